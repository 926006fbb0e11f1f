"""Sites for the tests of rules: an equation as traced, and its truth one example at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perex._rules import Site, chunks, registry
from perex._rules.conv import depthwise

WAYS = ("gram", "stream")


def site_of(fun: Callable[..., Any], argument: int, *operands: Any) -> Site:
    """Returns the site of the one equation of a function of all its operands.

    Args:
      fun: binds a single primitive.
      argument: which operand is the parameter.
      *operands: shapes and dtypes of one example.
    """
    (equation,) = jax.make_jaxpr(fun)(*operands).eqns
    avals = [v.aval for v in (*equation.invars, *equation.outvars)]
    *structs, out = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
    return Site(equation.primitive, equation.params, argument, tuple(structs), out)


def by_loop(
    fun: Callable[..., Any], argument: int, parameter: Any, inputs: Any, cotangent: Any
) -> np.ndarray:
    """Returns the gradient of each example ``[B, *parameter.shape]`` by `jax.grad`, in a loop."""

    def loss(parameter: Any, inputs: Any, cotangent: Any) -> jax.Array:
        # No conjugate: the cotangent of a complex result is not conjugated by JAX either.
        result = fun(*inputs[:argument], parameter, *inputs[argument:])
        return jnp.real(jnp.sum(result * cotangent))

    gradient = jax.jit(jax.grad(loss))
    examples = range(cotangent.shape[0])
    found = [gradient(parameter, tuple(x[b] for x in inputs), cotangent[b]) for b in examples]
    return np.stack(found) if found else np.zeros((0, *parameter.shape))


def squares_of(rule: Any, site: Site, inputs: Any, cotangent: Any, way: str = "gram") -> jax.Array:
    """Returns the squared norms ``[B]`` by one way."""
    norms = registry.site_norms(rule, site, way, tuple(inputs), cotangent)
    return norms.scale * (norms.scale * norms.squares)


def check_rule(
    rule: Any, site: Site, inputs: Any, cotangent: Any, expected: np.ndarray, rtol: float
) -> None:
    """Asserts that all methods of a rule agree with the gradients of a loop."""
    weights = np.linspace(-1, 2, len(expected)).astype(np.float32)

    @jax.jit
    def everything(inputs: Any, cotangent: Any, weights: Any) -> Any:
        return (
            rule.per_example(site, inputs, cotangent),
            {way: squares_of(rule, site, inputs, cotangent, way) for way in WAYS},
            {way: registry.site_sum(rule, site, way, inputs, cotangent, weights) for way in WAYS},
        )

    gradients, all_squares, totals = everything(inputs, cotangent, weights)
    scale = np.max(np.abs(expected), initial=1)
    assert gradients.shape == expected.shape
    np.testing.assert_allclose(gradients, expected, rtol=rtol, atol=rtol * scale)
    flat = np.abs(expected.reshape(len(expected), expected[:1].size)) ** 2
    weighted = np.tensordot(weights.astype(np.float64), expected, 1)
    for way in WAYS:
        squares, total = all_squares[way], totals[way]
        assert squares.shape == (len(expected),)
        assert jnp.promote_types(squares.dtype, jnp.float32) == squares.dtype
        np.testing.assert_allclose(
            squares, flat.sum(1), rtol=10 * rtol, atol=10 * rtol * flat.sum(1).max(initial=1)
        )
        assert total.shape == site.parameter.shape
        assert jnp.promote_types(total.dtype, jnp.float32) == total.dtype
        np.testing.assert_allclose(total, weighted, rtol=10 * rtol, atol=20 * rtol * scale)


def check_repeats(rule: Any, site: Site, inputs: Any, cotangent: Any, rtol: float) -> None:
    """Asserts that uses merged along the second axis of all arrays add up.

    Args:
      rule: the rule; its ``per_example`` has been checked.
      site: the equation of a single use.
      inputs: arrays ``[B, R, ...]``.
      cotangent: ``[B, R, *site.out.shape]``.
      rtol: the tolerance.
    """
    one_use = jax.jit(lambda inputs, cotangent: rule.per_example(site, inputs, cotangent))
    repeats = range(cotangent.shape[1])
    uses = [one_use(tuple(x[:, r] for x in inputs), cotangent[:, r]) for r in repeats]
    expected = np.sum(uses, axis=0)
    merged, inputs, cotangent = rule.merge_repeats(site, inputs, cotangent)
    assert merged.out.shape == cotangent.shape[1:]
    assert [s.shape for s in merged.inputs] == [x.shape[1:] for x in inputs]
    check_rule(rule, merged, inputs, cotangent, expected, rtol)


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all chunks as small as they can be: an example for each device."""
    for name in ("_WHOLE_BYTES", "_CHUNK_BYTES", "_FEW_BYTES"):
        monkeypatch.setattr(chunks, name, 0)
    monkeypatch.setattr(depthwise, "_CHUNK_BYTES", 0)
