"""Taps: one product per kernel position on a shifted view of the input, without patches.

For every kernel position ``k`` the gradient is ``view_k(x)^T cotangent``, where the view is a
strided slice of the padded input. Nothing of the size of the patches is ever made, which pays for
wide channels and few positions; with few channels the products are too narrow.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from perex._compat import promote_types
from perex._rules import chunks
from perex._rules.chunks import map_chunks
from perex._rules.conv.normal_form import Convolution, pad_input, tap


def cache_chunk(conv: Convolution, batch: int) -> int:
    """Number of examples whose inputs, cotangents and gradients stay in cache together."""
    rows = conv.positions * (conv.channels + conv.features)
    size = conv.groups * (rows + conv.depth * conv.features) * conv.itemsize
    return chunks.cache_chunk(batch, size)


def per_example(
    conv: Convolution, x: jax.Array, cotangent: jax.Array, chunk: int | None = None
) -> jax.Array:
    """Kernel gradients of every example.

    Args:
      conv: the convolution.
      x: ``[B, N, *S, G, C]``.
      cotangent: ``[B, N, *O, G, P]``.
      chunk: examples at a time, by default what stays in a CPU's cache.

    Returns:
      ``[B, *K, G, C, P]`` of type ``conv.dtype``.
    """
    rank = len(conv.kernel)
    rows = tuple(range(1, 2 + rank))
    dtype = promote_types(x.dtype, cotangent.dtype)

    def some(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        padded = pad_input(conv, x.astype(dtype))
        cotangent = cotangent.astype(dtype)
        products = [
            lax.dot_general(
                tap(conv, padded, position),
                cotangent,
                ((rows, rows), ((0, 2 + rank), (0, 2 + rank))),
                precision=conv.precision,
                preferred_element_type=conv.dtype,
            )
            for position in itertools.product(*(range(k) for k in conv.kernel))
        ]
        result = jnp.stack(products, axis=1)
        return result.reshape(x.shape[0], *conv.kernel, *result.shape[2:])

    return map_chunks(some, (x, cotangent), chunk or cache_chunk(conv, x.shape[0]))
