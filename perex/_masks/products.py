"""Matrix products in the form that convolutions need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def grouped_product(x: jax.Array, kernel: jax.Array, precision: Any, dtype: Any) -> jax.Array:
    """Returns ``[..., G * O]``, the products of ``[..., G * I]`` with ``[I, G, O]``."""
    inputs, groups, _ = kernel.shape
    if groups == 1:
        # As a product of two matrices: otherwise the kernel's gradient transposes the cotangent.
        rows = x.reshape(-1, inputs)
        y = lax.dot_general(rows, kernel[:, 0], (((1,), (0,)), ((), ())), precision, dtype)
        return y.reshape(*x.shape[:-1], y.shape[-1])
    x = x.reshape(*x.shape[:-1], groups, inputs)
    dimensions = (((x.ndim - 1,), (0,)), ((x.ndim - 2,), (1,)))
    y = lax.dot_general(x, kernel, dimensions, precision, dtype)
    y = jnp.moveaxis(y, 0, -2)
    return y.reshape(*y.shape[:-2], -1)


def from_channels_last(y: jax.Array, out_spec: Sequence[int]) -> jax.Array:
    """Brings ``[N, *S, C]`` into the layout of a convolution's result."""
    order = (out_spec[0], *out_spec[2:], out_spec[1])
    return jnp.transpose(y, tuple(np.argsort(order)))
