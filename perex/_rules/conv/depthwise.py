"""Depthwise: one input channel a group, so that every kernel position is a sum, not a product.

With ``C = 1`` a matrix product would have one column. Instead a loop runs over blocks of output
rows and adds ``view_k(x) * cotangent`` of every kernel position ``k`` to an accumulator of the
block's shape, elementwise, with groups in the vector lanes; what is left of a row is added up once
at the end. (XLA's own reduction over all positions took five times as long on a CPU, for it adds
one number at a time.)
"""

from __future__ import annotations

import itertools
import math
from typing import cast

import jax
import jax.numpy as jnp
from jax import export, lax

from perex._rules.chunks import map_chunks, sum_chunks, varying_zeros
from perex._rules.conv.normal_form import Convolution, pad_input, tap
from perex._rules.conv.unfold import weigh

# The accumulator of one chunk should stay in the inner caches.
_CHUNK_BYTES = 128 << 10
# Blocks of output positions should not be narrower than this.
_WIDTH = 16


def covers(conv: Convolution) -> str | None:
    """None for one input channel a group, else the reason why not."""
    return None if conv.channels == 1 else f"{conv.channels} input channels a group, not one"


def _block(conv: Convolution) -> int:
    """Rows along the first axis in one block: a divisor of the output size, or one of none."""
    rows, width = conv.out[0], math.prod(conv.out[1:]) * conv.images
    divisors = (r for r in range(1, rows + 1) if rows % r == 0)
    return next((r for r in divisors if r * width >= _WIDTH or r == rows), 1)


def cache_chunk(conv: Convolution, batch: int) -> int:
    """Number of examples whose accumulators stay in cache together."""
    if not conv.out:
        return cast(int, batch) if export.is_symbolic_dim(batch) else max(batch, 1)
    width = math.prod(conv.out[1:]) * conv.images * _block(conv)
    size = conv.taps * width * conv.groups * conv.features * conv.itemsize
    chunk = max(1, _CHUNK_BYTES // max(1, size))
    return cast(int, batch) if export.is_symbolic_dim(batch) else min(max(batch, 1), chunk)


def gradient_seconds(conv: Convolution) -> float:
    """Estimated seconds of one example on a CPU: a pass for every kernel position, in cache."""
    return conv.taps * conv.itemsize * conv.groups * conv.positions * conv.features / 2.3e10


def gradient(conv: Convolution, x: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Gradients ``[b, *K, G, 1, P]`` of a chunk, at once."""
    batch = x.shape[0]
    x, cotangent = pad_input(conv, x.astype(conv.dtype)), cotangent.astype(conv.dtype)
    shape = (batch, *conv.kernel, conv.groups, 1, conv.features)
    if not conv.out:
        return jnp.sum(x * cotangent, axis=1).reshape(shape)
    block = _block(conv)
    stride, dilation = conv.strides[0], conv.dilation[0]

    def step(total: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        rows = lax.dynamic_slice_in_dim(cotangent, i * block, block, axis=2)
        terms = []
        for position in itertools.product(*(range(k) for k in conv.kernel)):
            start = i * (block * stride) + position[0] * dilation
            view = lax.dynamic_slice_in_dim(x, start, (block - 1) * stride + 1, axis=2)
            terms.append(tap(conv, view, (0, *position[1:]), block) * rows)
        return total + jnp.stack(terms, axis=1), None

    held = (batch, conv.taps, conv.images, block, *conv.out[1:], conv.groups, conv.features)
    total = varying_zeros(held, conv.dtype, (x, cotangent))
    total, _ = lax.scan(step, total, jnp.arange(conv.out[0] // block))
    total = total.reshape(batch, conv.taps, -1, conv.groups, conv.features)
    return jnp.sum(total, axis=2).reshape(shape)


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

    def some(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return gradient(conv, x, cotangent)

    return map_chunks(some, (x, cotangent), chunk or cache_chunk(conv, x.shape[0]))


def weighted_sum(
    conv: Convolution, x: jax.Array, cotangent: jax.Array, weights: jax.Array
) -> jax.Array:
    """Sum over examples of weight times kernel gradient.

    Args:
      conv: the convolution, with one input channel a group.
      x: ``[B, N, *S, G, 1]``.
      cotangent: ``[B, N, *O, G, P]``.
      weights: ``[B]``; an example of weight zero adds exactly zero, whatever it holds.

    Returns:
      ``[*K, G, 1, P]`` of type ``conv.dtype``.
    """

    def some(x: jax.Array, cotangent: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(gradient(conv, *weigh(conv, x, cotangent, weights)), axis=0)

    return sum_chunks(some, (x, cotangent, weights), cache_chunk(conv, x.shape[0]))
