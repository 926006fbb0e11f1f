"""Norms of per-example kernel gradients without keeping the gradients.

The Gram way needs the inner products of patches at all pairs of output positions. Patches are
overlapping windows, so these are sums of inner products of *pixels*:

    patch_t . patch_t' = sum_k  pixel(t * stride + k * dilation) . pixel(t' * stride + k * dilation)

One product gives all pixel pairs, ``2 S^2 C`` multiplications and additions (S of the padded image)
where the patches need ``2 T^2 K C``; then shifted views of it are added up, one axis after the
other. The stream way computes the gradients of a few examples, squares them and drops them, and
once more to sum them with their weights.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from perex._rules import chunks, outer_product
from perex._rules.certified import CertifiedNorms, from_grams
from perex._rules.chunks import map_chunks, sum_chunks
from perex._rules.conv import depthwise, unfold
from perex._rules.conv.normal_form import Convolution, pad_input
from perex._rules.outer_product import product_seconds
from perex._rules.scales import (
    divide,
    undo_scales,
    unit_scale,
)

# Adding shifted views of the pixel pairs, in float32 on two CPU cores: bytes a second.
_SHIFTED = 2.5e10


def gram_seconds(conv: Convolution) -> dict[str, float]:
    """Estimated seconds of one example's inner products of patches, by the way to get them."""
    pairs, pixels = conv.positions**2, (conv.images * math.prod(conv.padded)) ** 2
    patches = conv.groups * product_seconds(conv.positions, conv.depth, conv.positions)
    patches += unfold.patch_seconds(conv)
    seconds = {"patches": patches}
    # Pairs of a spread-out image would mostly be zeros.
    if all(spread == 1 for spread in conv.interior) and conv.taps > 1:
        product = product_seconds(math.isqrt(pixels), conv.channels, math.isqrt(pixels))
        seconds["pixels"] = conv.groups * (product + 4 * (pixels + conv.taps * pairs) / _SHIFTED)
    return seconds


def estimate(conv: Convolution, batch: int) -> dict[str, float]:
    """Estimated seconds of the three ways to a clipped sum of this layer, two CPU cores.

    Args:
      conv: the convolution.
      batch: B.

    Returns:
      ``{"keep": s, "gram": s, "stream": s}`` as in `outer_product.estimate`.
    """
    seconds = outer_product.estimate(conv.groups, conv.positions, conv.depth, conv.features, batch)
    # What the plain outer product does not have: patches, once for each pass over the input.
    patches = batch * unfold.patch_seconds(conv)
    right = conv.groups * (
        product_seconds(conv.positions, conv.features, conv.positions)
        + 4 * conv.positions**2 / _SHIFTED
    )
    total = patches + conv.groups * product_seconds(
        conv.depth, batch * conv.positions, conv.features
    )
    if conv.positions > 1:
        seconds["gram"] = batch * (min(gram_seconds(conv).values()) + right) + total
    else:
        seconds["gram"] += patches * 2
    seconds["keep"] += patches
    seconds["stream"] += 2 * patches
    if _is_depthwise(conv):
        single = batch * depthwise.gradient_seconds(conv)
        read = 2 * batch * conv.kernel_size * conv.itemsize / 1.5e10
        seconds["keep"] = min(seconds["keep"], single + read)
        seconds["stream"] = min(seconds["stream"], 2 * single + read)
        seconds["gram"] += single - total
    return seconds


def _is_depthwise(conv: Convolution) -> bool:
    return depthwise.covers(conv) is None and conv.groups > 1


def gram_norms(
    conv: Convolution,
    x: jax.Array,
    cotangent: jax.Array,
    way: str | None = None,
    chunk: int | None = None,
) -> CertifiedNorms:
    """Norms of the kernel gradients from inner products of patches.

    Args:
      conv: the convolution.
      x: ``[B, N, *S, G, C]``.
      cotangent: ``[B, N, *O, G, P]``.
      way: ``"pixels"`` or ``"patches"``, by default the faster by `gram_seconds`.
      chunk: examples at a time, by default what stays in a CPU's cache.

    Returns:
      Norms and bounds, each ``[B]``, real, at least float32. An example with NaN or Inf has NaN or
      Inf squares.
    """
    way = way or _gram_way(conv)

    def some(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        scale_x, scale_c = unit_scale(x), unit_scale(cotangent)
        x, cotangent = divide(x, scale_x, conv.dtype), divide(cotangent, scale_c, conv.dtype)
        grams = (_pixels if way == "pixels" else _patches)(conv, x, cotangent)
        certified = from_grams(*grams, (conv.depth, conv.features), conv.precision)
        return undo_scales(scale_x, scale_c, *certified)

    chunk = chunk or gram_chunk(conv, x.shape[0], way)
    return CertifiedNorms(*map_chunks(some, (x, cotangent), chunk).T)


def stream_norms(
    conv: Convolution, x: jax.Array, cotangent: jax.Array, chunk: int | None = None
) -> CertifiedNorms:
    """Norms of the kernel gradients, computed a few at a time and dropped; see `gram_norms`."""

    def some(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return outer_product.measure(_gradient(conv, x, cotangent))

    chunk = chunk or stream_chunk(conv, x.shape[0])
    return CertifiedNorms.measured(*map_chunks(some, (x, cotangent), chunk).T)


def stream_sum(
    conv: Convolution,
    x: jax.Array,
    cotangent: jax.Array,
    weights: jax.Array,
    chunk: int | None = None,
) -> jax.Array:
    """Sum of weight times kernel gradient, of the gradients that `stream_norms` measures.

    Args:
      conv: the convolution.
      x: ``[B, N, *S, G, C]``.
      cotangent: ``[B, N, *O, G, P]``.
      weights: ``[B]``; an example of weight zero adds exactly zero, whatever it holds.
      chunk: examples at a time, by default what stays in a CPU's cache.

    Returns:
      ``[*K, G, C, P]`` of type ``conv.dtype``.
    """

    def some(x: jax.Array, cotangent: jax.Array, weights: jax.Array) -> jax.Array:
        return outer_product.sum_measured(_gradient(conv, x, cotangent), weights)

    return sum_chunks(some, (x, cotangent, weights), chunk or stream_chunk(conv, x.shape[0]))


def _gram_way(conv: Convolution) -> str:
    seconds = gram_seconds(conv)
    return min(seconds, key=seconds.__getitem__)


def gram_chunk(conv: Convolution, batch: int, way: str | None = None) -> int:
    """Number of examples whose patches and inner products stay in a CPU's cache together."""
    pixels = 0
    if (way or _gram_way(conv)) == "pixels":
        pixels = (conv.images * math.prod(conv.padded)) ** 2
    held = conv.groups * conv.itemsize * (2 * conv.positions**2 + 2 * pixels)
    return chunks.cache_chunk(batch, unfold.patch_bytes(conv) + held)


def stream_chunk(conv: Convolution, batch: int) -> int:
    """Number of examples whose patches and gradients stay in a CPU's cache together."""
    if _is_depthwise(conv):
        return depthwise.cache_chunk(conv, batch)
    held = unfold.patch_bytes(conv) + conv.kernel_size * conv.itemsize
    return chunks.cache_chunk(batch, held)


def _gradient(conv: Convolution, x: jax.Array, cotangent: jax.Array) -> jax.Array:
    if _is_depthwise(conv):
        return depthwise.gradient(conv, x, cotangent)
    return unfold.product(conv, unfold.patches(conv, x), cotangent)


def _patches(conv: Convolution, x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inner products of all pairs of positions, ``[b, G, T, T]``, of patches and of cotangents."""
    rank = len(conv.kernel)
    rows = unfold.patches(conv, x).reshape(x.shape[0], conv.groups, conv.depth, -1)
    columns = jnp.moveaxis(cotangent, 2 + rank, 1)
    columns = columns.reshape(x.shape[0], conv.groups, -1, conv.features)
    return (
        outer_product.gram(rows.swapaxes(2, 3), conv.dtype),
        outer_product.gram(columns, conv.dtype),
    )


def _pixels(conv: Convolution, x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same from inner products of pixels."""
    left, right = _pairs(pad_input(conv, x)), _pairs(cotangent)
    # [b, G, N, *S, N, *S]: the same kernel position in both images, one axis after the other.
    rank = len(conv.kernel)
    for axis in range(rank):
        views = []
        for k in range(conv.kernel[axis]):
            start = k * conv.dilation[axis]
            stop = start + (conv.out[axis] - 1) * conv.strides[axis] + 1
            view = left
            for i in (3 + axis, 4 + rank + axis):
                view = lax.slice_in_dim(view, start, stop, conv.strides[axis], i)
            views.append(view)
        left = functools.reduce(jnp.add, views)
    shape = (x.shape[0], conv.groups, conv.positions, conv.positions)
    return left.reshape(shape), right.reshape(shape)


def _pairs(array: jax.Array) -> jax.Array:
    """Inner products of all pairs of places, ``[b, N, *S, G, C]`` to ``[b, G, N, *S, N, *S]``."""
    axis = array.ndim - 1
    return lax.dot_general(
        array,
        jnp.conj(array),
        (((axis,), (axis,)), ((0, axis - 1), (0, axis - 1))),
        precision=lax.Precision.HIGHEST,
    )
