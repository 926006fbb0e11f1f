"""What the tests ask about a jaxpr, bodies of inner jaxprs included."""

from jax.extend import core


def _inner(value):
    if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
        yield getattr(value, "jaxpr", value)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _inner(item)


def equations(jaxpr):
    """Yield every equation of a jaxpr."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in _inner(value):
                yield from equations(inner)


def largest_intermediate(jaxpr) -> int:
    """Return the number of entries of the largest array that any equation makes."""
    return max(
        getattr(variable.aval, "size", 0)
        for equation in equations(jaxpr)
        for variable in equation.outvars
    )
