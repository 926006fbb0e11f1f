"""Depthwise: one input channel a group, so that each kernel position is a reduction, not a product.

With ``C = 1`` a matrix product would have one column. Instead every kernel position is an elementwise
product of a shifted view with the cotangent, added up over positions, with the groups in the
vector lanes.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp

from perex._rules.chunks import map_chunks
from perex._rules.conv.normal_form import Convolution, pad_input, tap

_CHUNK_BYTES = 2 << 20


def covers(conv: Convolution) -> str | None:
    """None for one input channel a group, else the reason why not."""
    return None if conv.channels == 1 else f"{conv.channels} input channels a group, not one"


def cache_chunk(conv: Convolution) -> int:
    """Number of examples whose inputs and cotangents stay in cache together."""
    size = conv.groups * conv.positions * (1 + conv.features) * conv.itemsize
    return max(1, _CHUNK_BYTES // max(1, size))


def per_example(
    conv: Convolution, x: jax.Array, cotangent: jax.Array, chunk: int | None = None
) -> jax.Array:
    """Kernel gradients of every example.

    Args:
      conv: the convolution, with one input channel a group.
      x: ``[B, N, *S, G, 1]``.
      cotangent: ``[B, N, *O, G, P]``.
      chunk: examples at a time, by default what stays in a CPU's cache.

    Returns:
      ``[B, *K, G, 1, P]`` of type ``conv.dtype``.
    """
    rank = len(conv.kernel)

    def some(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        padded = pad_input(conv, x.astype(conv.dtype))
        cotangent = cotangent.astype(conv.dtype)
        sums = [
            jnp.sum(tap(conv, padded, position) * cotangent, axis=tuple(range(1, 2 + rank)))
            for position in itertools.product(*(range(k) for k in conv.kernel))
        ]
        result = jnp.stack(sums, axis=1)
        return result.reshape(x.shape[0], *conv.kernel, conv.groups, 1, conv.features)

    return map_chunks(some, (x, cotangent), chunk or cache_chunk(conv))
