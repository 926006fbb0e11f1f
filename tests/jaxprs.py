"""What the tests ask about a jaxpr, bodies of inner jaxprs included."""

from perex import _compat


def equations(jaxpr):
    """Yield every equation of a jaxpr."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        for inner in _compat.inner_jaxprs(equation.params):
            yield from equations(inner)


def largest_intermediate(jaxpr) -> int:
    """Return the number of entries of the largest array that any equation makes."""
    return max(
        getattr(variable.aval, "size", 0)
        for equation in equations(jaxpr)
        for variable in equation.outvars
    )
