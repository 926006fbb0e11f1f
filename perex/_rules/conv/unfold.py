"""Unfold: patches of the input, then one matrix product for each example.

The patches ``A[(k, c), t]`` are what the kernel position ``k`` reads at the output position ``t``,
and the kernel gradient is ``A cotangent``. They take ``K`` times the memory of the input, so they
are made for a few examples at a time and consumed while they are still in cache.

Windows are taken one axis after the other, which takes ``k1 + k2`` slices for a ``k1 x k2`` kernel
instead of ``k1 * k2``. Along an axis where the windows neither overlap nor leave gaps (stride =
kernel size, as in patch embeddings) a reshape does it, and a 1x1 kernel needs no patches at all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import export, lax

from perex._compat import promote_types
from perex._rules import chunks
from perex._rules.chunks import map_chunks, sum_chunks
from perex._rules.conv.normal_form import Convolution, pad_input
from perex._rules.outer_product import COPY

# One product over several examples pays from about this many rows on.
_SUM_ROWS = 512


def cache_chunk(conv: Convolution, batch: int) -> int:
    """Number of examples whose patches and gradients stay in cache together."""
    return chunks.cache_chunk(batch, patch_bytes(conv), conv.kernel_size * conv.itemsize)


def sum_chunk(conv: Convolution, batch: int) -> int:
    """Number of examples to sum over in one product."""
    wanted = chunks.cache_chunk(batch, patch_bytes(conv))
    if export.is_symbolic_dim(batch):
        return wanted
    return max(wanted, -(-_SUM_ROWS // max(1, conv.positions)))


def patches(conv: Convolution, x: jax.Array) -> jax.Array:
    """The patches ``[b, G, *K, C, N, *O]`` of ``x``, ``[b, N, *S, G, C]``.

    Output positions come last, because rows of them are runs of the image, long even for few
    channels, and because the product adds over the last axis of both sides then.
    """
    x = jnp.moveaxis(pad_input(conv, x), (-2, -1), (1, 2))
    rank = len(conv.kernel)
    # Each round takes the last spatial axis left and puts its window before the ones already there.
    for i in reversed(range(rank)):
        axis = x.ndim - rank + i
        k, o = conv.kernel[i], conv.out[i]
        stride, dilation = conv.strides[i], conv.dilation[i]
        if k > 1 and k == stride and dilation == 1:
            x = x.reshape(*x.shape[:axis], o, k, *x.shape[axis + 1 :])
            x = jnp.moveaxis(x, axis + 1, 2)
            continue
        views = [
            lax.slice_in_dim(x, j * dilation, j * dilation + (o - 1) * stride + 1, stride, axis)
            for j in range(k)
        ]
        x = jnp.stack(views, axis=2)
    return x


def product(conv: Convolution, patch: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Gradients ``[b, *K, G, C, P]`` from patches and cotangents ``[b, N, *O, G, P]``."""
    rank = len(conv.kernel)
    dtype = promote_types(patch.dtype, cotangent.dtype)
    result = lax.dot_general(
        patch.astype(dtype),
        cotangent.astype(dtype),
        (
            (tuple(range(3 + rank, 4 + 2 * rank)), tuple(range(1, 2 + rank))),
            ((0, 1), (0, 2 + rank)),
        ),
        precision=conv.precision,
        preferred_element_type=conv.dtype,
    )
    return jnp.moveaxis(result, 1, -3)


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

    def some(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return product(conv, patches(conv, x), cotangent)

    return map_chunks(some, (x, cotangent), chunk or cache_chunk(conv, x.shape[0]))


def weighted_sum(
    conv: Convolution,
    x: jax.Array,
    cotangent: jax.Array,
    weights: jax.Array,
    chunk: int | None = None,
) -> jax.Array:
    """Sum over examples of weight times kernel gradient, in products over examples and positions.

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
        x, cotangent = weigh(conv, x, cotangent, weights)
        # The examples of a chunk become images of one example.
        x = x.reshape(1, -1, *x.shape[2:])
        cotangent = cotangent.reshape(1, -1, *cotangent.shape[2:])
        return product(conv, patches(conv, x), cotangent)[0]

    return sum_chunks(some, (x, cotangent, weights), chunk or sum_chunk(conv, x.shape[0]))


def weigh(
    conv: Convolution, x: jax.Array, cotangent: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Multiplies cotangents by weights; both sides are zero where a weight is zero.

    Both are of type ``conv.dtype`` then, so that weights are not rounded to a short type. The
    selection keeps NaN and Inf of an example of weight zero out of the sum.
    """
    weights = weights.astype(conv.dtype)

    def select(array: jax.Array, factor: jax.Array | float) -> jax.Array:
        factor = (
            factor if isinstance(factor, float) else lax.expand_dims(factor, range(1, array.ndim))
        )
        used = lax.expand_dims(weights != 0, range(1, array.ndim))
        return jnp.where(used, array.astype(conv.dtype) * factor, 0)

    return select(x, 1.0), select(cotangent, weights)


def patch_bytes(conv: Convolution) -> int:
    """Bytes of one example's patches."""
    return conv.groups * conv.positions * conv.depth * conv.itemsize


def patch_seconds(conv: Convolution) -> float:
    """Estimated seconds to write one example's patches and to read them, on a CPU."""
    return 2 * patch_bytes(conv) / COPY
