"""`save_memory=True`: the same norms and sums, without holding what they are made of."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import largest_intermediate
from losses import normal
from oracle import assert_trees_close, loop, to_float64
from test_clipped_grad import EVERY, clipped_by_hand
from test_grad_norms import norms_of, total

import perex
from perex import _transform
from perex._rules.scales import ScaledNorms

DIM, LAYERS, BATCH, POSITIONS = 16, 12, 8, 32


@EVERY
def test_equals_the_loop(loss, x64):
    args = loss.arguments()
    fun = jax.jit(loss.fun, static_argnames=[k for k in loss.kwargs if k == "power"])
    values, aux, gradients = loop(fun, loss.argnums, loss.has_aux, loss.axes())(
        *args, **loss.kwargs
    )
    clip = 0.99 * float(np.median(total(norms_of(gradients))))
    options = {**loss.differentiate, "in_axes": loss.in_axes, "save_memory": True}

    @jax.jit
    def both(*args):
        clipped = perex.clipped_grad(loss.fun, clip, **options)(*args, **loss.kwargs)
        norms = perex.grad_norms(loss.fun, **options)(*args, **loss.kwargs)
        return clipped, norms[0] if loss.has_aux else norms

    (actual, stats), taken = both(*args)
    expected, norms = clipped_by_hand(gradients, clip)
    assert_trees_close(actual, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(stats.values, values, rtol=1e-9)
    for found in (stats.norms, taken):
        np.testing.assert_allclose(found, norms, rtol=1e-9, atol=1e-9)
    assert stats.num_clipped == np.sum(norms > clip * (1 + 1e-9))
    assert_trees_close(stats.aux, aux, rtol=1e-9, atol=1e-9)


def layered(params, x):
    """A loss whose layers are computed again on the way back."""

    @jax.checkpoint
    def layer(x, params):
        for w in params:
            x = jnp.sin(x @ w)
        return x, None

    return jnp.sum(jax.lax.scan(layer, x, params)[0] ** 2)


PARAMS = tuple(np.float32(normal(LAYERS, DIM, DIM)) for _ in range(4))
XS = np.float32(normal(BATCH, POSITIONS, DIM))


def test_a_weight_of_each_layer_at_every_step_of_time():
    """Its gradient, smaller than what it is made of, adds up over time and not over layers."""
    params, xs = np.float32(0.3 * normal(3, 4, 4)), np.float32(normal(BATCH, POSITIONS, 4))

    def loss(params, xs):
        def layer(xs, w):
            def step(h, x):
                h = jnp.sin(h @ w + x)
                return h, h

            return jax.lax.scan(step, jnp.zeros(4, xs.dtype), xs)[1], None

        return jnp.sum(jax.lax.scan(layer, xs, params)[0] ** 2)

    with jax.enable_x64(True):
        gradients = loop(loss)(*to_float64((params, xs)))[2]
    expected, norms = clipped_by_hand(gradients, clip := float(np.median(norms_of(gradients))))
    actual, stats = jax.jit(perex.clipped_grad(loss, clip, save_memory=True))(params, xs)
    np.testing.assert_allclose(stats.norms, norms, rtol=2e-5)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def temporaries(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_memory_of_checkpoints_is_kept():
    """Well below what holding inputs and cotangents takes, and near the ordinary gradient's."""

    def mean(params, xs):
        return jnp.mean(jax.vmap(layered, (None, 0))(params, xs))

    ordinary = temporaries(jax.grad(mean), PARAMS, XS)
    clipped = partial(perex.clipped_grad, l2_norm_clip=1.0)
    # Of the sum's two passes, the second starts before all of the first's memory is free.
    for transform, bound in ((perex.grad_norms, 1.1), (clipped, 1.6)):
        saving = temporaries(transform(layered, save_memory=True), PARAMS, XS)
        assert saving < bound * ordinary
        assert temporaries(transform(layered), PARAMS, XS) > 4 * ordinary


def test_only_norms_come_home(monkeypatch):
    """No tap has the size of an input, and rules see the whole batch at once."""
    seen = []
    take = _transform.make_taps

    def make_taps(plan, saving):
        seen.extend(jax.tree.leaves(taps := take(plan, saving)))
        return taps

    monkeypatch.setattr(_transform, "make_taps", make_taps)
    jaxpr = jax.make_jaxpr(perex.grad_norms(layered, save_memory=True))(PARAMS, XS)
    assert [tap.shape for tap in seen] == [(LAYERS,)] * 4 * len(ScaledNorms._fields)
    assert largest_intermediate(jaxpr) <= max(LAYERS * XS.size, BATCH * DIM * DIM)


def loss(params, x):
    return jnp.sum(jnp.sin(x @ params["w"]) @ params["v"]) + jnp.sum(params["b"] * x)


SMALL = jax.tree.map(np.float32, {"w": normal(4, 5), "v": normal(5, 3), "b": normal(4)})


@pytest.mark.parametrize("size", [None, 1, 3, 100])
def test_what_takes_no_part_adds_zero(size):
    xs = np.float32(normal(7, 2, 4))
    is_padding = np.array([0, 0, 1, 0, 0, 0, 1], bool)
    clipped = jax.jit(perex.clipped_grad(loss, 1.0, microbatch_size=size, save_memory=True))
    expected, _ = jax.jit(perex.clipped_grad(loss, 1.0))(SMALL, xs[[1, 3, 5]])
    dirty = xs.copy()
    dirty[0], dirty[4], dirty[2], dirty[6] = np.nan, np.inf, np.nan, 1e30
    found, stats = clipped(SMALL, dirty, is_padding=is_padding)
    assert_trees_close(found, expected, rtol=1e-5, atol=1e-6)
    assert stats.num_nonfinite == 2 and stats.norms[2] == 0
    nothing, stats = clipped(SMALL, dirty, is_padding=np.ones(7, bool))
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(nothing))


def test_an_empty_batch_and_no_leaks():
    clipped = perex.clipped_grad(loss, 1.0, save_memory=True)
    total, stats = clipped(SMALL, np.zeros((0, 2, 4), np.float32))
    assert stats.norms.shape == (0,)
    assert_trees_close(total, jax.tree.map(np.zeros_like, SMALL), rtol=0, atol=0)
    with jax.checking_leaks():
        jax.make_jaxpr(clipped)(SMALL, np.ones((2, 2, 4), np.float32))


def test_norms_can_be_differentiated(x64):
    def sum_of(norms):
        return lambda *args: jnp.sum(norms(*args) ** 2)

    wide, xs = jax.tree.map(np.float64, SMALL), normal(3, 2, 4)
    expected = jax.grad(sum_of(perex.grad_norms(loss)))(wide, xs)
    found = jax.grad(sum_of(perex.grad_norms(loss, save_memory=True)))(wide, xs)
    assert_trees_close(found, expected, rtol=1e-9, atol=1e-9)


def test_norms_of_each_leaf():
    xs = np.float32(normal(7, 2, 4))
    expected = perex.grad_norms(loss, per="leaf")(SMALL, xs)
    found = perex.grad_norms(loss, per="leaf", save_memory=True)(SMALL, xs)
    assert_trees_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("per", ["global", "leaf", lambda path: path in "wv"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_and_short_parameters(per, dtype):
    """Sums are taken from the factors, in at least float32, with weights of their own."""
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), SMALL)
    xs = np.float32(normal(7, 2, 4))
    expected, told = perex.clipped_grad(loss, 1.0, per=per)(params, xs)
    found, stats = perex.clipped_grad(loss, 1.0, per=per, save_memory=True)(params, xs)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(found))
    # Small gradients are kept, in the dtype of the parameters.
    rounding = 1e-5 if dtype == "float32" else 1e-2
    assert_trees_close(found, expected, rtol=rounding, atol=rounding)
    np.testing.assert_allclose(stats.norms, told.norms, rtol=rounding)


def test_what_is_summed_is_what_was_measured():
    """Differences that are mere rounding are the same in both passes."""

    def difference(params, x):
        def net(x):
            return jnp.sum(jnp.tanh(jnp.tanh(x @ params["w"]) @ params["v"]))

        return (net(x) - net(x * (1 + 1e-7))) ** 2

    params = jax.tree.map(np.float32, {"w": normal(96, 64), "v": normal(64, 64)})
    xs = np.float32(normal(5, 96))
    for i in range(5):
        options = {"is_padding": np.arange(5) != i}
        total, stats = perex.clipped_grad(difference, 1e-12, save_memory=True)(
            params, xs, **options
        )
        added = np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(total)))
        assert stats.norms[i] > 1e-12 and added <= 1e-12 * 1.001
