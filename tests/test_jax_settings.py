"""Settings of jax that forbid or check things change no result and make nothing fail."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

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


def run(mode, name):
    loss, params, x = LOSSES[name]
    if mode == "grad":
        return perex.grad(loss)(params, x)
    if mode == "grad_norms":
        return perex.grad_norms(loss)(params, x)
    if mode == "dp_clip":
        return _dp_clip(perex.grad(loss, factored=True)(params, x))
    if mode == "exact_masks":
        return perex.exact_masks(loss)(params, jax.tree.map(lambda a: a[0], x))
    if mode == "explain":
        return str(perex.explain(loss)(params, x))
    options = {"save_memory": {"save_memory": True}, "microbatch": {"microbatch_size": 2}}
    is_padding = jnp.arange(BATCH) == BATCH - 1 if mode == "padding" else None
    clipped = perex.clipped_grad(loss, CLIP, **options.get(mode, {}))
    return clipped(params, x, is_padding=is_padding)[0]


def _dp_clip(gradients):
    transform = perex.dp_clip(CLIP, 0.0, jax.random.key(0))
    return transform.update(gradients, transform.init(gradients))[0]


MODES = [
    "grad", "grad_norms", "clip", "save_memory", "microbatch", "padding", "dp_clip",
    "exact_masks", "explain",
]  # fmt: skip


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
    explained = run("explain", name)
    close = functools.partial(oracle.assert_trees_close, rtol=1e-4, atol=1e-5)
    with setting(key):
        close(run("grad", name), gradients)
        close(run("grad_norms", name), norms)
        for mode in ("clip", "save_memory", "microbatch"):
            close(run(mode, name), total)
        close(run("padding", name), without_last)
        close(run("dp_clip", name), jax.tree.map(lambda x: x / BATCH, total))
        assert run("explain", name) == explained
        found = run("exact_masks", name)
    loss, params, x = LOSSES[name]
    np.testing.assert_allclose(found, loss(params, x[0]), rtol=1e-5)
