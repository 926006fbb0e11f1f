"""Norms of per-example kernel gradients without keeping the gradients.

The Gram way needs the inner products of patches at all pairs of output positions. Patches are
overlapping windows, so these are sums of inner products of *pixels*:

    patch_t . patch_t' = sum_k  pixel(t * stride + k * dilation) . pixel(t' * stride + k * dilation)

One product gives all pixel pairs, ``2 S^2 C`` multiplications and additions (S of the padded image)
where the patches need ``2 T^2 K C``; then shifted views of it are added up, one axis after the
other. The stream way computes the gradients of a few examples, squares them and drops them.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from perex._rules import chunks, outer_product
from perex._rules.chunks import map_chunks
from perex._rules.conv import depthwise, unfold
from perex._rules.conv.normal_form import Convolution, pad_input
from perex._rules.outer_product import product_seconds
from perex._rules.scales import (
    divide,
    inner_products,
    scaled_squares,
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
        seconds["stream"] = min(seconds["stream"], 2 * single)
        seconds["gram"] += single - total
    return seconds


def _is_depthwise(conv: Convolution) -> bool:
    return depthwise.covers(conv) is None and conv.groups > 1


def scaled_norms(
    conv: Convolution,
    x: jax.Array,
    cotangent: jax.Array,
    way: str | None = None,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Norms of the kernel gradients as ``scale * sqrt(squares)``, both in range.

    Args:
      conv: the convolution.
      x: ``[B, N, *S, G, C]``.
      cotangent: ``[B, N, *O, G, P]``.
      way: ``"gram"``, ``"pixels"`` or ``"patches"`` (Gram by one of the two ways) or ``"stream"``,
        by default the fastest by `estimate`.
      chunk: examples at a time, by default what stays in a CPU's cache.

    Returns:
      ``(scale [B], squares [B])``, real, at least float32. An example with NaN or Inf has NaN or
      Inf squares.
    """
    way = _resolve(conv, x.shape[0], way)

    def some(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        if way == "stream":
            return scaled_squares(_gradient(conv, x, cotangent))
        scale_x, scale_c = unit_scale(x), unit_scale(cotangent)
        x, cotangent = divide(x, scale_x, conv.dtype), divide(cotangent, scale_c, conv.dtype)
        squares = (_pixels if way == "pixels" else _patches)(conv, x, cotangent)
        return undo_scales(scale_x, scale_c, squares)

    result = map_chunks(some, (x, cotangent), chunk or cache_chunk(conv, x.shape[0], way))
    return result[:, 0], result[:, 1]


def _resolve(conv: Convolution, batch: int, way: str | None) -> str:
    """The way by name, without ``None`` and ``"gram"``."""
    if way is None:
        seconds = estimate(conv, batch)
        way = "gram" if seconds["gram"] <= seconds["stream"] else "stream"
    if way == "gram":
        grams = gram_seconds(conv)
        way = min(grams, key=grams.__getitem__)
    return way


def cache_chunk(conv: Convolution, batch: int, way: str | None = None) -> int:
    """Number of examples whose temporaries stay in a CPU's cache together."""
    way = _resolve(conv, batch, way)
    held = unfold.patch_bytes(conv)
    if way == "stream":
        if _is_depthwise(conv):
            return depthwise.cache_chunk(conv, batch)
        held += conv.kernel_size * conv.itemsize
    else:
        pixels = (conv.images * math.prod(conv.padded)) ** 2 if way == "pixels" else 0
        held += conv.groups * conv.itemsize * (2 * conv.positions**2 + 2 * pixels)
    return chunks.cache_chunk(batch, held)


def _gradient(conv: Convolution, x: jax.Array, cotangent: jax.Array) -> jax.Array:
    if _is_depthwise(conv):
        return depthwise.gradient(conv, x, cotangent)
    return unfold.product(conv, unfold.patches(conv, x), cotangent)


def _patches(conv: Convolution, x: jax.Array, cotangent: jax.Array) -> jax.Array:
    rank = len(conv.kernel)
    rows = unfold.patches(conv, x).reshape(x.shape[0], conv.groups, conv.depth, -1)
    columns = jnp.moveaxis(cotangent, 2 + rank, 1)
    columns = columns.reshape(x.shape[0], conv.groups, -1, conv.features)
    return outer_product.gram_squares(rows.swapaxes(2, 3), columns)


def _pixels(conv: Convolution, x: jax.Array, cotangent: jax.Array) -> jax.Array:
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
    return jnp.maximum(inner_products(left, jnp.conj(right)), 0)


def _pairs(array: jax.Array) -> jax.Array:
    """Inner products of all pairs of places, ``[b, N, *S, G, C]`` to ``[b, G, N, *S, N, *S]``."""
    axis = array.ndim - 1
    return lax.dot_general(
        array,
        jnp.conj(array),
        (((axis,), (axis,)), ((0, axis - 1), (0, axis - 1))),
        precision=lax.Precision.HIGHEST,
    )
