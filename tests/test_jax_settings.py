"""Settings of jax that forbid or check things change no result and make nothing fail."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from modes import QUICK

import perex

BATCH, CLIP = 5, 1.0

SETTINGS = {
    "rank_promotion": ("jax_numpy_rank_promotion", "raise"),
    "dtype_promotion": ("jax_numpy_dtype_promotion", "strict"),
    "debug_nans": ("jax_debug_nans", True),
    "debug_infs": ("jax_debug_infs", True),
    "enable_checks": ("jax_enable_checks", True),
    "check_tracer_leaks": ("jax_check_tracer_leaks", True),
    "disable_jit": ("jax_disable_jit", True),
    "x64": ("jax_enable_x64", True),
}


def _normal(*shape):
    values = np.random.default_rng([7, *shape]).normal(size=shape)
    return jnp.asarray(values / np.sqrt(shape[0]), jnp.float32)


def convolution(params, x):
    x = jax.lax.conv_general_dilated(
        jnp.expand_dims(x, 0), params["kernel"], (1, 1), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    x = jnp.tanh(x + jnp.expand_dims(params["bias"], (0, 1, 2)))
    return jnp.sum(jnp.mean(x, (0, 1, 2)) @ params["out"])


def tied(params, tokens):
    table = params["table"]

    def step(h, token):
        return jnp.tanh(table[token] + h @ params["w"]), None

    h, _ = jax.lax.scan(step, jnp.zeros(table.shape[1], table.dtype), tokens)
    return jax.nn.logsumexp(table @ h)


def decayed(params, x):
    h = jnp.tanh(x @ params["w"] + params["b"][None])
    decay = sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(params))
    return jnp.sum(h * h) + 0.01 * decay


def normalized(params, x):
    x = jax.lax.conv_general_dilated(
        jnp.expand_dims(x, 0), params["kernel"] * MASK.astype(params["kernel"].dtype), (1, 1),
        "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    groups = x.reshape(1, -1, 2, 2)
    centred = groups - jnp.mean(groups, (1, 3), keepdims=True)
    variance = jnp.mean(centred * centred, (1, 3), keepdims=True)
    x = (centred * jax.lax.rsqrt(variance + 0.1)).reshape(x.shape)
    return jnp.sum(jnp.tanh(x * jnp.expand_dims(params["scale"], (0, 1, 2))))


def halved(params, x):
    params, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x))
    return normalized(params, x).astype(jnp.float32)


MASK = np.ones((3, 3, 2, 4), np.float32)
MASK[1, 2:] = MASK[2:] = 0

LOSSES = {
    "convolution": (
        convolution,
        {"kernel": _normal(3, 3, 2, 4), "bias": _normal(4), "out": _normal(4, 3)},
        _normal(BATCH, 6, 6, 2),
    ),
    "tied": (
        tied,
        {"table": _normal(7, 4), "w": _normal(4, 4)},
        jnp.asarray(np.random.default_rng(0).integers(0, 7, (BATCH, 4)), jnp.int32),
    ),
    "normalized": (
        normalized,
        {"kernel": _normal(3, 3, 2, 4), "scale": _normal(4)},
        _normal(BATCH, 6, 6, 2),
    ),
    "halved": (
        halved,
        {"kernel": _normal(3, 3, 2, 4), "scale": _normal(4)},
        _normal(BATCH, 6, 6, 2),
    ),
    "decayed": (decayed, {"w": _normal(130, 140), "b": _normal(140)}, _normal(BATCH, 3, 130)),
}


@functools.cache
def expected(name):
    """The gradients, norms and clipped sums (without the last example too) of the plain loop."""
    loss, params, x = LOSSES[name]
    _, _, gradients = oracle.loop(jax.jit(loss))(params, x)
    squares = [
        np.sum(np.square(g, dtype=np.float64).reshape(BATCH, -1), 1)
        for g in jax.tree.leaves(gradients)
    ]
    norms = np.sqrt(sum(squares))
    weights = np.minimum(1, CLIP / norms)

    def total(w):
        return jax.tree.map(lambda g: np.tensordot(w, g, 1), gradients)

    return gradients, norms, total(weights), total(weights * (np.arange(BATCH) < BATCH - 1))


def everything(name, params, x):
    loss = LOSSES[name][0]
    is_padding = jnp.arange(BATCH) == BATCH - 1
    clipped = perex.clipped_grad(loss, CLIP)
    saving = perex.clipped_grad(loss, CLIP, save_memory=True)
    parts = perex.clipped_grad(loss, CLIP, microbatch_size=2)
    return {
        "gradients": perex.grad(loss)(params, x),
        "with values": perex.value_and_grad(loss)(params, x)[1],
        "norms": perex.grad_norms(loss)(params, x),
        "total": clipped(params, x)[0],
        "in parts": parts(params, x)[0],
        "saving": saving(params, x)[0],
        "without the last": clipped(params, x, is_padding=is_padding)[0],
        "mean": _dp_clip(perex.grad(loss, factored=True)(params, x)),
        "value": perex.exact_masks(loss)(params, jax.tree.map(lambda a: a[0], x)),
    }


def _dp_clip(gradients):
    transform = perex.dp_clip(CLIP, 0.0, jax.random.key(0))
    return transform.update(gradients, transform.init(gradients))[0]


@contextlib.contextmanager
def setting(name):
    key, value = SETTINGS[name]
    before = getattr(jax.config, key)
    jax.config.update(key, value)
    try:
        yield
    finally:
        jax.config.update(key, before)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("key", SETTINGS)
def test_settings_change_nothing(key, name):
    gradients, norms, total, without_last = expected(name)
    loss, params, x = LOSSES[name]
    explained = str(perex.explain(loss)(params, x))
    with setting(key):
        run = functools.partial(everything, name)
        if key != "disable_jit":
            run = jax.jit(run, compiler_options=QUICK)
        found = run(params, x)
        told = str(perex.explain(loss)(params, x))
    # Without jit a loop is traced as what it does, step by step.
    assert told == explained or key == "disable_jit"
    truth = {
        "gradients": gradients,
        "with values": gradients,
        "norms": norms,
        "total": total,
        "in parts": total,
        "saving": total,
        "without the last": without_last,
        "mean": jax.tree.map(lambda x: x / BATCH, total),
        "value": np.asarray(loss(params, x[0])),
    }
    # A bfloat16 loss is rounded to eight bits at each of its dozen steps.
    rtol, atol = (3e-2, 3e-2) if name == "halved" else (1e-4, 1e-5)
    for what, value in truth.items():
        oracle.assert_trees_close(found[what], value, rtol=rtol, atol=atol)


def cancelling(w, x):
    """At each step two products that are equal, of opposite sign: a gradient of exactly zero."""

    def step(total, w):
        both = jnp.stack([x, x]) @ w
        return total + jnp.sum(both[0] - both[1]), None

    return jax.lax.scan(step, jnp.zeros(()), w)[0]


@pytest.mark.parametrize("key", ["debug_infs", "debug_nans"])
@pytest.mark.parametrize("forced_way", ["gram"], indirect=True)
def test_bounds_of_what_cancels_to_nothing_are_finite(forced_way, key):
    w, x = _normal(3, 64, 64), _normal(BATCH, 64)
    with setting(key):
        leaf = perex.grad(cancelling, factored=True)(w, x)
        assert isinstance(leaf, perex.PerExample)
        norms = leaf.scaled_norms()
        total, stats = perex.clipped_grad(cancelling, CLIP)(w, x)
    assert np.isfinite(norms.upper).all() and (norms.scale > 0).all()
    np.testing.assert_array_equal(stats.norms, np.zeros(BATCH))
    np.testing.assert_array_equal(total, np.zeros(w.shape))
