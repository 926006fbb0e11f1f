"""`perex.register_rule` with a primitive of a user's own: a circular convolution by a filter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from losses import batch, normal
from oracle import assert_trees_close, loop

import perex
from perex._rules import registry

ROUNDING = {"rtol": 1e-9, "atol": 1e-11}


def circulant(w, x, flip):
    """out[..., i] = sum_j w[j] x[..., (i - j) mod n], or (i + j) where flipped."""
    sign = 1 if flip else -1
    shifted = jnp.stack([jnp.roll(x, sign * -j, axis=-1) for j in range(w.shape[-1])], axis=-2)
    return jnp.einsum("...j,...jn->...n", w, shifted)


circulant_p = Primitive("circulant")


def bind(w, x, flip=False):
    return circulant_p.bind(w, x, flip=flip)


@circulant_p.def_impl
def _impl(w, x, *, flip):
    return circulant(w, x, flip)


@circulant_p.def_abstract_eval
def _abstract(w, x, *, flip):
    del flip
    assert w.shape[:-1] == x.shape[:-1]
    return x.update(shape=x.shape, dtype=jnp.promote_types(w.dtype, x.dtype))


def _batch(arguments, axes, *, flip):
    size = next(a.shape[d] for a, d in zip(arguments, axes, strict=True) if d is not None)
    w, x = (
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(arguments, axes, strict=True)
    )
    return bind(w, x, flip), 0


def _transpose_w(cotangent, w, x, *, flip):
    gradient = jax.linear_transpose(lambda w: circulant(w, x, flip), w.aval)
    return gradient(cotangent)[0]


def _transpose_x(cotangent, w, x, *, flip):
    return bind(w, cotangent, not flip)


batching.primitive_batchers[circulant_p] = _batch
ad.defbilinear(circulant_p, _transpose_w, _transpose_x)
mlir.register_lowering(circulant_p, mlir.lower_fun(circulant, multiple_results=False))


def per_example(site, inputs, cotangent):
    """The gradient of w[j] is the sum over i of cotangent[i] x[i - j]."""
    (x,) = inputs
    assert site.primitive is circulant_p and site.argument == 0
    assert x.shape[1:] == site.inputs[0].shape and cotangent.shape[1:] == site.out.shape
    sign = 1 if site.params["flip"] else -1
    count = site.parameter.shape[-1]
    return jnp.stack(
        [jnp.sum(cotangent * jnp.roll(x, sign * -j, -1), axis=-1) for j in range(count)], axis=-1
    )


class Rule:
    """The same as an object that knows norms and sums too."""

    def __init__(self):
        self.called = []

    def covers(self, site):
        return None if site.argument == 0 else "the signal is no filter"

    def per_example(self, site, inputs, cotangent):
        self.called.append("per_example")
        return per_example(site, inputs, cotangent)

    def square_norm(self, site, inputs, cotangent):
        self.called.append("square_norm")
        return jnp.sum(per_example(site, inputs, cotangent) ** 2, axis=-1)

    def weighted_sum(self, site, inputs, cotangent, weights):
        self.called.append("weighted_sum")
        return weights @ per_example(site, inputs, cotangent)


def loss(params, x):
    x = jnp.tanh(bind(params["w"], x))
    return jnp.sum(bind(2 * params["v"], x, flip=True) ** 2)


PARAMS = {"w": normal(3), "v": normal(2)}


@pytest.fixture
def register(monkeypatch):
    """Register rules for the time of a test."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    return perex.register_rule


def test_the_primitive_itself(x64):
    w, x = normal(3), normal(5)
    expected = [sum(w[j] * x[(i - j) % 5] for j in range(3)) for i in range(5)]
    np.testing.assert_allclose(bind(w, x), expected)
    for flip in (False, True):
        ours = jax.grad(lambda *a, f=flip: jnp.sum(jnp.sin(bind(*a, flip=f))), (0, 1))(w, x)
        theirs = jax.grad(lambda *a, f=flip: jnp.sum(jnp.sin(circulant(*a, f))), (0, 1))(w, x)
        assert_trees_close(ours, theirs, **ROUNDING)


def test_without_a_rule_the_primitive_falls_back(x64):
    args = (PARAMS, batch(5))
    text = perex.explain(loss)(*args)
    assert text.count("'circulant' has no per-example rule") == 2, text
    values, _, grads = loop(loss)(*args)
    assert_trees_close(perex.value_and_grad(loss)(*args), (values, grads), **ROUNDING)


@pytest.mark.parametrize("rule", [per_example, Rule()], ids=["function", "object"])
def test_with_a_rule(rule, register, x64):
    register(circulant_p, rule)
    args = (PARAMS, batch(5))
    text = perex.explain(loss)(*args)
    assert text.count("rule circulant") == 2 and "fallback" not in text, text
    values, _, grads = loop(loss)(*args)
    actual = jax.jit(perex.value_and_grad(loss))(*args)
    assert_trees_close(actual, (values, grads), **ROUNDING)
    if isinstance(rule, Rule):
        assert "per_example" in rule.called


def test_the_rule_is_what_computes_the_gradient(register):
    register(circulant_p, lambda *arguments: 0 * per_example(*arguments))
    grads = perex.grad(loss)(PARAMS, batch(5))
    assert all(not np.any(g) for g in jax.tree.leaves(grads))


def test_a_later_rule_replaces_an_earlier_one(register, x64):
    register(circulant_p, lambda *arguments: 0 * per_example(*arguments))
    register(circulant_p, per_example)
    args = (PARAMS, batch(5))
    assert_trees_close(perex.grad(loss)(*args), loop(loss)(*args)[2], **ROUNDING)


def test_where_a_rule_does_not_cover(register, x64):
    register(circulant_p, Rule())
    args = (normal(5), batch(3))
    swapped = lambda signal, filter: jnp.sum(jnp.sin(bind(filter, signal)))  # noqa: E731
    text = perex.explain(swapped)(*args)
    assert "fallback to vmap(grad), 100.0% of the parameters: the signal is no filter" in text
    assert_trees_close(perex.grad(swapped)(*args), loop(swapped)(*args)[2], **ROUNDING)


def test_norms_and_sums_of_the_rule(register, x64):
    rule = Rule()
    register(circulant_p, rule)
    fun = lambda w, x: jnp.sum(jnp.sin(bind(w, x)))  # noqa: E731
    args = (normal(3), batch(5))
    _, _, expected = loop(fun)(*args)
    norms = perex.grad_norms(fun)(*args)
    np.testing.assert_allclose(norms, np.linalg.norm(expected, axis=1), rtol=1e-9)
    factored = perex.grad(fun, factored=True)(*args)
    weights = jnp.array([0.5, 0.0, 2.0])
    if isinstance(factored, perex.PerExample):
        factored = factored.weighted_sum(weights)
    else:
        factored = weights @ factored
    np.testing.assert_allclose(factored, weights @ expected, rtol=1e-9)


def test_a_wrong_shape_is_an_error_that_names_primitive_and_line(register):
    register(circulant_p, lambda *arguments: per_example(*arguments)[:, :1])
    with pytest.raises(ValueError) as raised:
        perex.grad(loss)(PARAMS, batch(5))
    for word in ("circulant", "(3, 1)", "(3, ", "test_register_rule.py", "operand 0"):
        assert word in str(raised.value)
