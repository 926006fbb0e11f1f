"""`perex.grad_norms`: equal to the norms of the loop, in range, differentiable, small.

The norms of all losses of the tests are compared in `test_clipped_grad`, together with the sums.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import largest_intermediate
from losses import batch, normal
from oracle import assert_trees_close, loop, to_float64

import perex


def norms_of(gradients):
    """Return the norms of stacked gradients, leaf by leaf, on the host."""
    return jax.tree.map(
        lambda g: np.sqrt(np.sum(np.square(np.float64(np.abs(g))), tuple(range(1, g.ndim)))),
        gradients,
    )


def total(norms):
    return np.sqrt(sum(np.square(n) for n in jax.tree.leaves(norms)))


def dense(w, x):
    """Return a loss whose gradient is a sum of as many outer products as `x` has rows."""
    return jnp.sum(jnp.sin(x @ w))


def convolution(kernel, x):
    y = jax.lax.conv_general_dilated(
        x[None], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.sum(jnp.sin(y))


def tied(table, ids):
    return jnp.sum(jnp.sin(table[ids] @ table.T))


def twice(w, x):
    return jnp.sum(jnp.sin(jnp.sin(x @ w) @ w))


def standardised(w, x):
    return jnp.sum(jnp.sin(x @ ((w - w.mean(0)) / w.std(0))))


def recurrent(w, xs):
    def step(h, x):
        h = jnp.sin(h @ w + x)
        return h, None

    return jnp.sum(jax.lax.scan(step, jnp.ones(w.shape[0]), xs)[0])


def unrolled(w, xs):
    h = xs[0]
    for x in xs[1:]:
        h = jnp.sin(h @ w + x)
    return jnp.sum(h)


# Large enough that one gradient is larger than all else there is about an example.
LARGE = {
    "gram": (dense, normal(96, 80), batch(4, 96)),
    "outer product": (dense, normal(96, 80), batch(96)),
    "stream": (dense, normal(60, 50), batch(40, 60)),
    "convolution": (convolution, normal(3, 3, 12, 30) * 0.1, batch(3, 4, 12)),
    "tied": (tied, normal(150, 40) * 0.2, np.array([[3, 3, 7], [149, 0, 0], [5, 6, 7]])),
    "twice": (twice, normal(80, 80) * 0.1, batch(4, 80)),
    "recurrent": (recurrent, normal(90, 90) * 0.1, batch(5, 90)),
    "unrolled": (unrolled, normal(90, 90) * 0.1, batch(5, 90)),
    "standardised": (standardised, normal(96, 80), batch(4, 96)),
}
# More examples than a chunk where gradients are streamed; their arrays never exist.
MANY = 6000


def many(w, x):
    """Return the shapes of a parameter and of a batch of many examples, in float32."""
    dtype = np.float32 if x.dtype.kind == "f" else np.int32
    return jax.ShapeDtypeStruct(w.shape, np.float32), jax.ShapeDtypeStruct(
        (MANY, *x.shape[1:]), dtype
    )


EACH = pytest.mark.parametrize("case", [pytest.param(v, id=k) for k, v in LARGE.items()])


@EACH
def test_large_leaves_in_float32(case):
    fun, w, x = case
    w = np.float32(w)
    x = np.float32(x) if x.dtype.kind == "f" else x
    actual = jax.jit(perex.grad_norms(fun))(w, x)
    assert actual.dtype == jnp.float32
    with jax.enable_x64(True):
        expected = norms_of(loop(fun)(*to_float64((w, x)))[2])
    # Sums of some thousand products in float32.
    np.testing.assert_allclose(actual, expected, rtol=2e-5)


def test_a_parameter_that_is_broadcast_before_it_is_used():
    """The gradient of the leaf is a sum over copies: its norm is not that of the operand's."""
    w, x = np.float32(normal(20000)), np.float32(batch(2, 8))

    def loss(w, x):
        return jnp.sum(jnp.sin(x @ jnp.broadcast_to(w, (8, *w.shape))))

    actual = jax.jit(perex.grad_norms(loss))(w, x)
    with jax.enable_x64(True):
        expected = norms_of(loop(loss)(*to_float64((w, x)))[2])
    np.testing.assert_allclose(actual, expected, rtol=2e-5)


def test_look_ups_of_different_lengths_in_one_table():
    """Two sites; their gradients meet in the rows that both look up, and in no others."""
    table, ids = np.float32(normal(3000, 16)), np.array([[1, 1, 7, 9, 1], [0, 5, 2, 4, 3]])

    def loss(table, ids):
        return jnp.sum(jnp.sin(table[ids[:2]])) + 9 * jnp.sum(jnp.cos(table[ids[2:]]))

    gradients = perex.grad(loss, factored=True)(table, ids)
    assert len(gradients.uses) == 2 and gradients.way().way == "gram"
    with jax.enable_x64(True):
        expected = norms_of(loop(loss)(*to_float64((table, ids)))[2])
    np.testing.assert_allclose(perex.grad_norms(loss)(table, ids), expected, rtol=2e-5)


@EACH
def test_norms_far_from_one_neither_underflow_nor_overflow(case):
    fun, w, x = case
    w = np.float32(w)
    x = np.float32(x) if x.dtype.kind == "f" else x
    norms = jax.jit(perex.grad_norms(lambda w, x, s: s * fun(w, x), in_axes=(None, 0, None)))
    one = np.float64(norms(w, x, np.float32(1)))
    # About 1e-20 and 1e20, but powers of two, so that nothing but the exponent changes.
    for scale in (2.0**-66, 2.0**66):
        other = norms(w, x, np.float32(scale))
        np.testing.assert_allclose(np.float64(other), scale * one, rtol=1e-5)


@pytest.mark.parametrize("positions", [1, 3, 60])
def test_inputs_and_cotangents_far_from_one(positions):
    """Their product is of order one while their own squares are out of range."""
    w, x = np.float32(normal(24, 20)), np.float32(batch(positions, 24))

    def loss(w, x, scale, inverse):
        return jnp.sum((scale * x) @ w * inverse)

    norms = jax.jit(perex.grad_norms(loss, in_axes=(None, 0, None, None)))
    expected = np.sqrt(20.0) * np.linalg.norm(x.sum(1), axis=1)
    for scale in (1e-30, 1e-12, 1e12, 1e30):
        actual = norms(w, x, np.float32(scale), np.float32(1 / scale))
        np.testing.assert_allclose(actual, expected, rtol=1e-4)


def test_cancelling_positions_give_no_nan_but_zero():
    x = np.float32(batch(1, 96))
    x = np.concatenate([x, -x, 3 * x, -3 * x], axis=1)  # an even cotangent makes the sum zero
    norms, slopes = jax.jit(jax.value_and_grad(lambda w: jnp.sum(perex.grad_norms(dense)(w, x))))(
        np.ones((96, 80), np.float32)
    )
    # What remains of terms of order 1000 is the square root of their rounding at most.
    assert 0 <= norms < 1e3 * np.sqrt(1e-6)
    assert np.all(np.isfinite(slopes))


def test_zero_gradients_have_norm_zero_and_a_derivative():
    value, slope = jax.jit(
        jax.value_and_grad(lambda w: jnp.sum(perex.grad_norms(dense)(w, jnp.zeros((3, 4, 96)))))
    )(jnp.ones((96, 80)))
    assert value == 0
    np.testing.assert_array_equal(slope, 0)


@EACH
def test_nothing_of_the_size_of_all_gradients_exists(case):
    fun, w, x = case
    jaxpr = jax.make_jaxpr(perex.grad_norms(fun))(*many(w, x))
    assert largest_intermediate(jaxpr) < w.size * MANY


def test_the_walk_over_a_jaxpr_finds_what_vmap_holds():
    fun, w, x = LARGE["gram"]
    jaxpr = jax.make_jaxpr(jax.vmap(jax.grad(fun), (None, 0)))(*many(w, x))
    assert largest_intermediate(jaxpr) == w.size * MANY


@pytest.mark.parametrize("name", ["gram", "stream", "convolution", "tied", "recurrent"])
def test_gradient_penalty(name, x64):
    """Second order: the derivative of the norms."""
    fun, w, x = LARGE[name]
    x = x if x.dtype.kind == "i" else x[:, :9]
    norms = perex.grad_norms(fun)
    actual = jax.jit(jax.grad(lambda w: jnp.sum(jnp.square(norms(w, x) - 1))))(w)

    def penalty(w):
        return sum(jnp.square(jnp.linalg.norm(jax.grad(fun)(w, one)) - 1) for one in x)

    assert_trees_close(actual, jax.jit(jax.grad(penalty))(w), rtol=1e-8, atol=1e-8)


def two_leaves(params, x):
    return jnp.sum(jnp.sin(x @ params["a"]["w"] + params["a"]["b"]) @ params["c"]), x.sum()


PARAMS = {"a": {"w": normal(6, 5), "b": normal(5)}, "c": normal(5, 2)}


def test_global_leaf_and_groups(x64):
    x = batch(3, 6)
    _, aux, gradients = loop(two_leaves, has_aux=True)(PARAMS, x)
    leaves = norms_of(gradients)
    norms, actual_aux = perex.grad_norms(two_leaves, has_aux=True)(PARAMS, x)
    np.testing.assert_allclose(norms, total(leaves), rtol=1e-9)
    np.testing.assert_allclose(actual_aux, aux, rtol=1e-12)
    first = lambda path: path.split("/")[0]  # noqa: E731
    groups, _ = perex.grad_norms(two_leaves, has_aux=True, per=first)(PARAMS, x)
    assert set(groups) == {"a", "c"}
    np.testing.assert_allclose(groups["a"], total(leaves["a"]), rtol=1e-9)
    np.testing.assert_allclose(groups["c"], leaves["c"], rtol=1e-9)


def test_several_arguments_count_together_and_frozen_ones_do_not(x64):
    w, v, x = normal(6, 5), normal(5, 2), batch(3, 6)

    def fun(w, v, x):
        return jnp.sum(jnp.sin(x @ w) @ v)

    both = norms_of(loop(fun, (0, 1))(w, v, x)[2])
    np.testing.assert_allclose(perex.grad_norms(fun, (0, 1))(w, v, x), total(both), rtol=1e-9)
    actual = perex.grad_norms(fun, 1, in_axes=(None, None, 0))(w, v, x)
    np.testing.assert_allclose(actual, both[1], rtol=1e-9)


def test_frozen_parameters_cost_nothing():
    """Neither their own gradient nor the way back to them is even traced."""

    @jax.custom_vjp
    def guarded(x):
        return x

    def backward(_, cotangent):
        raise AssertionError("the way back is traced")

    guarded.defvjp(lambda x: (x, None), backward)
    args = np.float32(normal(9, 8)), np.float32(normal(8, 7)), np.float32(batch(9))

    def fun(w, v, x):
        return jnp.sum(guarded(jnp.sin(x @ w)) @ v)

    axes = (None, None, 0)
    assert perex.grad_norms(fun, 1, in_axes=axes)(*args).shape == (3,)
    with pytest.raises(AssertionError, match="is traced"):
        perex.grad_norms(fun, (0, 1), in_axes=axes)(*args)


def test_bfloat16(x64):
    for name in ("gram", "convolution", "tied"):
        fun, w, x = LARGE[name]
        w = jnp.asarray(w, jnp.bfloat16)
        x = x if x.dtype.kind == "i" else jnp.asarray(x, jnp.bfloat16)
        actual = jax.jit(perex.grad_norms(fun))(w, x)
        assert actual.dtype == jnp.float32
        expected = norms_of(loop(fun)(*to_float64((w, x)))[2])
        # bfloat16 has 8 bits, and forward and backward pass round some times.
        np.testing.assert_allclose(actual, expected, rtol=0.05)


@EACH
def test_a_bad_example_changes_no_bit_of_another(case):
    fun, w, x = case
    x = np.float32(x) if x.dtype.kind == "f" else x
    norms = jax.jit(perex.grad_norms(lambda w, x, factor: factor * fun(w, x)))
    good = norms(np.float32(w), x, np.ones(3, np.float32))
    for bad in (np.nan, np.inf):
        result = norms(np.float32(w), x, np.float32([bad, 1, 1]))
        assert not np.isfinite(result[0])
        np.testing.assert_array_equal(result[1:], good[1:])


def test_outer_vmap_and_empty_batch():
    fun, w, x = LARGE["gram"]
    norms = perex.grad_norms(fun)
    xs = np.stack([x, 2 * x])
    actual = jax.jit(jax.vmap(norms, (None, 0)))(w, xs)
    np.testing.assert_allclose(actual, np.stack([norms(w, x) for x in xs]), rtol=1e-4)
    assert norms(w, x[:0]).shape == (0,)


def test_bad_per():
    with pytest.raises(ValueError, match="per must be 'global', 'leaf' or a function"):
        perex.grad_norms(dense, per="layer")
