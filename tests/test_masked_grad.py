"""`perex.grad` of losses with masked convolutions: exact values, exact zeros."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import perex
from perex._api import Options
from perex._transform import sweep
from tests.oracle import assert_trees_close, loop

_NUMBERS = ("NHWC", "HWIO", "NHWC")


def _conv(x, kernel, padding="SAME"):
    return jax.lax.conv_general_dilated(
        x[None], kernel, (1, 1), padding, dimension_numbers=_NUMBERS
    )


def _raster(channels_in, channels_out):
    """Type A: the rows above, and to the left in the same row."""
    mask = np.ones((3, 3, channels_in, channels_out), np.float32)
    mask[2] = 0
    mask[1, 1:] = 0
    return mask


def _loss(params, x, shift):
    mask = jnp.ones((3, 3, 2, 4)).at[2:].set(0).at[1, 1:].set(0)
    h = jnp.tanh(_conv(x, mask * params["first"]))[0]
    h = _conv(h, jnp.where(_raster(4, 4) > 0, params["second"], 0))[0]
    return jnp.sum(h[2, 2] * (1 + shift))


def _factored(loss, *arguments):
    """The gradients as factors, however small they are."""
    options = Options.check("perex.grad", loss, 0, False, None, False)
    return sweep(options.problem(arguments, {})).gradients


@pytest.fixture
def problem():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "first": jax.random.normal(keys[0], (3, 3, 2, 4)),
        "second": jax.random.normal(keys[1], (3, 3, 4, 4)),
    }
    return params, jax.random.normal(keys[2], (3, 5, 5, 2)), jnp.arange(3.0)


def test_equals_the_loop(problem):
    with jax.enable_x64(True):
        arguments = jax.tree.map(lambda x: np.asarray(x, np.float64), problem)
        _, _, expected = loop(_loss)(*arguments)
    actual = jax.jit(perex.grad(_loss))(*problem)
    assert_trees_close(actual, expected, 1e-5, 1e-5)  # float32, sums of at most 100 terms
    factored = dict(zip(["first", "second"], _factored(_loss, *problem), strict=True))
    weights = jnp.array([0.5, 0.0, 2.0])
    for name, leaf in factored.items():
        squares = np.sum(np.square(expected[name]), axis=(1, 2, 3, 4))
        np.testing.assert_allclose(leaf.square_norms(), squares, rtol=1e-4)
        total = np.tensordot(np.asarray(weights), expected[name], 1)
        np.testing.assert_allclose(leaf.weighted_sum(weights), total, rtol=1e-4, atol=1e-3)


def test_masked_taps_get_exact_zeros_even_next_to_nan(problem):
    params, x, _ = problem
    mask = _raster(2, 4)

    def loss(kernel, x):
        return jnp.sum(jnp.tanh(_conv(x, mask * kernel, "VALID")))

    # Without padding, the last row of pixels is seen by masked taps only.
    poisoned = x.at[0, 4].set(jnp.nan).at[1, 4].set(jnp.inf)
    clean = perex.value_and_grad(loss)(params["first"], x)
    value, gradient = perex.value_and_grad(loss)(params["first"], poisoned)
    np.testing.assert_array_equal(value, clean[0])
    np.testing.assert_array_equal(gradient, clean[1])
    np.testing.assert_array_equal(gradient[jnp.broadcast_to(mask == 0, gradient.shape)], 0)
    (factored,) = _factored(loss, params["first"], poisoned)
    total = factored.weighted_sum(jnp.ones(3))
    np.testing.assert_allclose(total, clean[1].sum(0), rtol=1e-5, atol=1e-5)


def test_mask_given_as_an_argument(problem):
    params, x, _ = problem

    def loss(params, x, *, mask):
        return jnp.sum(jnp.tanh(_conv(x, mask * params))[0, 2, 2])

    mask = jnp.asarray(_raster(2, 4))
    expected = perex.grad(loss)(params["first"], x, mask=mask)
    with jax.enable_x64(True):
        arguments = (np.asarray(params["first"], np.float64), np.asarray(x, np.float64))
        _, _, truth = loop(loss)(*arguments, mask=np.asarray(mask, np.float64))
    np.testing.assert_allclose(expected, truth, rtol=1e-5, atol=1e-5)
    for convert in (lambda m: m > 0, lambda m: m.astype(jnp.int32)):
        jitted = jax.jit(perex.grad(loss))
        np.testing.assert_allclose(
            jitted(params["first"], x, mask=convert(mask)), truth, rtol=1e-5, atol=1e-5
        )
    plan = str(perex.explain(loss)(params["first"], x, mask=mask))
    assert "rectangle" in plan, plan
