"""Inputs of sites as they travel home in the cotangents of taps."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax

import perex
from perex._taps import decode, encode

INTEGERS = ["int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"]


def _extremes(dtype):
    info = jnp.iinfo(dtype)
    near = {info.min, info.min + 1, -1, 0, 1, 2**16 - 1, 2**16, 2**32 - 1, 2**32, info.max - 1}
    values = sorted(v for v in {*near, info.max} if info.min <= v <= info.max)
    return jnp.asarray(np.array(values, np.int64 if info.min else np.uint64), dtype)


def _travels(value):
    encoded = jax.jit(encode)(value)
    # What no cotangent can be would not travel at all.
    assert all(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(encoded))
    decoded = decode(encoded, jax.ShapeDtypeStruct(value.shape, value.dtype))
    assert decoded.dtype == value.dtype
    np.testing.assert_array_equal(decoded, value)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_travel_whole(dtype):
    _travels(_extremes(dtype))


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_wide_integers_travel_whole(x64, dtype):
    _travels(_extremes(dtype))


def test_truth_values_travel():
    _travels(jnp.array([True, False]))


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint8", "int16", "int32", "float8_e4m3fn", "float8_e5m2", "float16"]
)
def test_products_with_narrow_inputs(dtype):
    def loss(w, x):
        numbers = (((1,), (0,)), ((), ()))
        return jnp.sum(jnp.tanh(lax.dot_general(x, w, numbers, preferred_element_type=w.dtype)))

    random = np.random.default_rng(0)
    w = jnp.asarray(random.normal(size=(30, 200)) / 5, jnp.float32)
    x = jnp.asarray(random.integers(0, 2, (6, 3, 30)), dtype)
    _, _, expected = oracle.loop(loss)(w, x)
    norms = np.sqrt(np.sum(np.square(expected), (1, 2)))
    clipped = np.tensordot(np.minimum(1, 1 / norms), expected, 1)
    oracle.assert_trees_close(perex.grad(loss)(w, x), expected, 1e-5, 1e-6)
    for save_memory in (False, True):
        found = perex.grad_norms(loss, save_memory=save_memory)(w, x)
        np.testing.assert_allclose(found, norms, rtol=1e-5)
        total, _ = perex.clipped_grad(loss, 1.0, save_memory=save_memory)(w, x)
        oracle.assert_trees_close(total, clipped, 1e-5, 1e-6)
