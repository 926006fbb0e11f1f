"""A program exported with a batch of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import export

import perex

SHAPES = {"dense": (3, 130), "convolution": (9, 9, 2), "tied": (4,)}


def dense(params, x):
    h = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.sum(h * h) + 0.01 * jnp.sum(params["w"] ** 2)


def convolution(params, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(
        x[None], params["w"], (1, 1), "SAME", dimension_numbers=numbers
    )
    return jnp.sum(jnp.tanh(x + params["b"]))


def tied(params, tokens):
    """A table that is looked up at each step of a scan, and multiplied with at the end."""
    table = params["w"]

    def step(h, token):
        return jnp.tanh(table[token] + h * params["b"]), None

    h, _ = jax.lax.scan(step, jnp.zeros(table.shape[1], table.dtype), tokens)
    return jax.nn.logsumexp(table @ h)


def _parameters(name):
    random = np.random.default_rng(0)
    shapes = {
        "dense": ((130, 140), 140), "convolution": ((3, 3, 2, 4), 4), "tied": ((300, 160), 160),
    }[name]  # fmt: skip
    w, b = (random.normal(size=shape) / 12 for shape in shapes)
    return {"w": jnp.asarray(w, jnp.float32), "b": jnp.asarray(b, jnp.float32)}


@pytest.mark.parametrize("options", [{}, {"save_memory": True}, {"microbatch_size": 2}], ids=str)
@pytest.mark.parametrize("loss", [dense, convolution, tied], ids=lambda f: f.__name__)
def test_the_batch_size_may_be_a_symbol(loss, options):
    shape, params = SHAPES[loss.__name__], _parameters(loss.__name__)

    def run(params, x):
        total, stats = perex.clipped_grad(loss, 1.0, **options)(params, x)
        norms = stats.norms, perex.grad_norms(loss)(params, x)
        return total, perex.grad(loss)(params, x), *norms

    (b,) = export.symbolic_shape("b")
    structs = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    dtype = jnp.int32 if loss is tied else jnp.float32
    exported = export.export(jax.jit(run))(structs, jax.ShapeDtypeStruct((b, *shape), dtype))
    random = np.random.default_rng(1)
    for size in (1, 3, 64):
        draw = random.integers(0, 300, (size, *shape)) if loss is tied else None
        x = jnp.asarray(random.normal(size=(size, *shape)) if draw is None else draw, dtype)
        total, gradients, *both = exported.call(params, x)
        _, _, expected = oracle.loop(jax.jit(loss))(params, x)
        oracle.assert_trees_close(gradients, expected, 1e-4, 1e-5)
        squares = [np.sum(g.reshape(size, -1) ** 2, 1) for g in jax.tree.leaves(expected)]
        norms = np.sqrt(sum(squares))
        for found in both:
            np.testing.assert_allclose(found, norms, rtol=1e-4)
        weights = np.minimum(1, 1 / norms)
        clipped = jax.tree.map(lambda g, w=weights: np.tensordot(w, g, 1), expected)
        oracle.assert_trees_close(total, clipped, 1e-4, 1e-5)
