"""Exact contractions for gradients that are sums of outer products.

The per-example gradient of a matrix-like parameter is ``g[b] = sum_t a[b, t] b[b, t]^T``, with

    a   [B, G, T, D]    what the parameter was multiplied with
    b   [B, G, T, P]    the cotangent of the result
    g   [B, G, D, P]

for B examples, G independent groups, T positions that are added up, D inputs and P outputs. No
complex conjugate is taken, as `jax.grad` takes none. Everything is added up in at least float32.

There are three ways to the norm of ``g[b]``: T = 1 makes it a product of two norms; the Gram way
uses ``|g|^2 = sum_{t,t'} (a_t . a_t') (b_t . b_t')``, cheap for few positions, and certifies what
rounding can do to it (`perex._rules.certified`); the stream computes ``g`` for a few examples,
squares it and drops it. `estimate` says which is the cheapest. A sum whose norms were streamed is
streamed as well, from the very gradients that were measured; it costs no more then than one product
over examples and positions, which is the sum for the other ways.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from perex._compat import promote_types
from perex._rules.certified import CertifiedNorms, from_grams, sum_slack
from perex._rules.chunks import cache_chunk, map_chunks, sum_chunks
from perex._rules.scales import (
    divide,
    scaled_squares,
    sum_squares,
    undo_scales,
    unit_scale,
)

__all__ = [
    "accumulate_dtype",
    "estimate",
    "gram",
    "gram_length",
    "gram_norms",
    "measure",
    "per_example",
    "stream_norms",
    "stream_sum",
    "sum_measured",
    "weighted_sum",
]

# Two CPU cores with AVX-512, float32: a matrix product of side 64 and more runs at 200 to 350
# GFLOP/s, its operands come from cache at some 80 GB/s, copies within it run at 40 GB/s, memory is
# read at 20 GB/s, and the first write to new memory runs at 2 GB/s (page faults). Each product of a
# batch costs about a microsecond on top. Half the cores or shorter vectors slow all but the memory
# down alike.
_FLOPS = 2.8e11
CACHE = 8.0e10
COPY = 4.0e10
FRESH = 2.2e9
_READ = 2.0e10
_CALL = 7.0e-7
# Longer sums are added up in blocks of this many, or less than twice as many, terms: rounding grows
# with the length of a sum.
_BLOCK = 1024
# Gradients of a batch that are this small stay in cache until they are weighted.
_RESIDENT_BYTES = 4 << 20


def accumulate_dtype(*dtypes: jax.typing.DTypeLike) -> jnp.dtype:
    """The type to add products of these types up in: their promotion, at least float32."""
    return promote_types(*dtypes, jnp.float32)


def product_seconds(rows: int, depth: int, columns: int, itemsize: int = 4) -> float:
    """Estimated time of one matrix product ``[rows, depth] x [depth, columns]`` in cache.

    Args:
      rows: rows of the result.
      depth: length of the sums.
      columns: columns of the result.
      itemsize: bytes of one number; time goes up with it.

    Returns:
      Seconds on the machine of the constants; only ratios matter.
    """
    size = itemsize / 4
    moved = 4 * (rows * depth + depth * columns + 2 * rows * columns)
    return size * (2 * rows * depth * columns / _FLOPS + moved / CACHE) + _CALL


def estimate(groups: int, positions: int, depth: int, outputs: int, batch: int) -> dict[str, float]:
    """Estimated seconds of the ways to a clipped sum (norms, then a weighted sum).

    Args:
      groups: G.
      positions: T.
      depth: D.
      outputs: P.
      batch: B.

    Returns:
      ``{"keep": s, "gram": s, "stream": s}``: keep all gradients and weight them; Gram norms and
      one weighted product; streamed norms and a streamed sum.
    """
    size = groups * depth * outputs
    one = groups * product_seconds(depth, positions, outputs)
    total = groups * product_seconds(depth, batch * positions, outputs)
    resident = batch * size * 4 <= _RESIDENT_BYTES
    write = 4 * size / (CACHE if resident else FRESH)
    read = 4 * size / (CACHE if resident else _READ)
    if positions == 1:
        gram = groups * 4 * (depth + outputs) / CACHE
    else:
        gram = groups * (
            product_seconds(positions, depth, positions)
            + product_seconds(positions, outputs, positions)
            + 4 * positions**2 / CACHE
        )
    return {
        "keep": batch * (one + write + 2 * read),
        "gram": batch * gram + total,
        "stream": 2 * batch * (one + 4 * size / CACHE),
    }


def per_example(a: jax.Array, b: jax.Array, *, precision: lax.PrecisionLike = None) -> jax.Array:
    """The gradients ``sum_t a[t] b[t]^T`` of every example.

    Args:
      a: ``[B, G, T, D]``.
      b: ``[B, G, T, P]``.
      precision: of the products, as in `jax.lax.dot_general`.

    Returns:
      ``[B, G, D, P]`` of `accumulate_dtype`.
    """
    dtype = promote_types(a.dtype, b.dtype)
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((2,), (2,)), ((0, 1), (0, 1))),
        precision=precision,
        preferred_element_type=accumulate_dtype(dtype),
    )


def weighted_sum(
    a: jax.Array, b: jax.Array, weights: jax.Array, *, precision: lax.PrecisionLike = None
) -> jax.Array:
    """The sum over examples of weight times gradient, as one product over examples and positions.

    Args:
      a: ``[B, G, T, D]``.
      b: ``[B, G, T, P]``.
      weights: ``[B]``; an example of weight zero adds exactly zero, even if it holds NaN or Inf.
      precision: of the products, as in `jax.lax.dot_general`.

    Returns:
      ``[G, D, P]`` of `accumulate_dtype`.
    """
    dtype = accumulate_dtype(a.dtype, b.dtype)
    weights = lax.expand_dims(weights.astype(dtype), (1, 2, 3))
    # Weights multiply in at least float32, so that bfloat16 cotangents do not round them.
    b = jnp.where(weights != 0, b.astype(dtype) * weights, 0)
    # A conditional, as it is rarely needed, and because XLA makes of a select that feeds a product
    # a transposing copy that can take as long as the product.
    zero = jnp.zeros((), a.dtype)  # As a number, 0 would make int32 of bool.
    a = lax.cond(jnp.any(weights == 0), lambda: jnp.where(weights != 0, a, zero), lambda: a)
    a = a.astype(dtype)
    return lax.dot_general(
        a,
        b,
        (((0, 2), (0, 2)), ((1,), (1,))),
        precision=precision,
        preferred_element_type=dtype,
    )


def gram(array: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Inner products of positions ``[B, G, T, T]`` of ``[B, G, T, N]``.

    Terms cancel where the norm is far below the sum of the norms of its outer products, so products
    are taken at the highest precision whatever the equation asks for.
    """
    if array.shape[2] == 1:
        # A reduction, which adds up in a tree, where a product adds one number after the other.
        return lax.expand_dims(jnp.sum((array * jnp.conj(array)).astype(dtype), axis=3), (3,))
    blocks, size = _blocks(array.shape[3])
    if blocks > 1:
        split = blocks * size
        each = array[..., :split].reshape(*array.shape[:3], blocks, size)
        total = jnp.sum(_products(jnp.moveaxis(each, 3, 2), dtype), axis=2)
        return total if split == array.shape[3] else total + _products(array[..., split:], dtype)
    return _products(array, dtype)


def _products(array: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    axis = array.ndim - 1
    outer = tuple(range(axis - 1))
    return lax.dot_general(
        array,
        jnp.conj(array),
        (((axis,), (axis,)), (outer, outer)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )


def _blocks(length: int) -> tuple[int, int]:
    """How many equal blocks a long sum is split into, and of what size."""
    blocks = max(1, length // _BLOCK)
    return blocks, length // blocks


def gram_length(length: int) -> int:
    """How many numbers are added up one after the other in `gram`, at most."""
    blocks, size = _blocks(length)
    return length if blocks == 1 else max(size, length - blocks * size) + blocks + 1


def gram_norms(
    a: jax.Array, b: jax.Array, *, precision: lax.PrecisionLike = None
) -> CertifiedNorms:
    """Norms of the gradients from inner products of positions.

    Args:
      a: ``[B, G, T, D]``.
      b: ``[B, G, T, P]``.
      precision: of the product that the weighted sum will be.

    Returns:
      Norms and bounds, each ``[B]``, real, at least float32. An example with NaN or Inf has NaN or
      Inf squares.
    """
    batch, groups, positions, depth = a.shape
    outputs = b.shape[3]
    dtype = accumulate_dtype(a.dtype, b.dtype)
    if 0 in (batch, groups, positions, depth, outputs):
        return zero_norms(batch, dtype)

    def some(a: jax.Array, b: jax.Array) -> jax.Array:
        real = jnp.finfo(dtype).dtype
        scale_a, scale_b = unit_scale(a).astype(real), unit_scale(b).astype(real)
        a, b = divide(a, scale_a, dtype), divide(b, scale_b, dtype)
        if positions == 1:
            # Both [b, G]; with one position the gradient is one outer product, and nothing cancels.
            norms = (sum_squares(v.reshape(-1, v.shape[3])) for v in (a, b))
            left, right = (norm.reshape(-1, groups) for norm in norms)
            squares = jnp.sum(left * right, axis=1)
            certified = squares, jnp.zeros_like(squares), _single_slack(squares, dtype, precision)
        else:
            lengths = gram_length(depth), gram_length(outputs)
            certified = from_grams(gram(a, dtype), gram(b, dtype), lengths, precision)
        return undo_scales(scale_a, scale_b, *certified)

    row = groups * (positions**2 * 2 + positions * (depth + outputs)) * jnp.dtype(dtype).itemsize
    return CertifiedNorms(*map_chunks(some, (a, b), cache_chunk(batch, row)).T)


def _single_slack(squares: jax.Array, dtype: jnp.dtype, precision: lax.PrecisionLike) -> jax.Array:
    return sum_slack(jnp.sqrt(lax.stop_gradient(squares)), 1, dtype, precision)


def zero_norms(batch: int, dtype: jax.typing.DTypeLike) -> CertifiedNorms:
    """The norms ``[B]`` of gradients that are zero or have no entries."""
    zeros = jnp.zeros(batch, jnp.finfo(dtype).dtype)
    return CertifiedNorms.measured(zeros + 1, zeros)


def measure(gradients: jax.Array) -> jax.Array:
    """Scale and squares ``[b, 2]`` of gradients ``[b, ...]`` that are dropped then.

    Behind a barrier, so that `sum_measured` meets the very same numbers.
    """
    return scaled_squares(lax.optimization_barrier(gradients))


def sum_measured(gradients: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum of weight times gradient, of ``[b, ...]``, in at least float32.

    An example of weight zero adds exactly zero, even if it holds NaN or Inf.
    """
    gradients = lax.optimization_barrier(gradients)
    dtype = accumulate_dtype(gradients.dtype)
    gradients = gradients.astype(dtype)
    weights = weights.astype(dtype)
    used = lax.expand_dims(weights != 0, range(1, gradients.ndim))
    # A conditional, as it is rarely needed.
    gradients = lax.cond(jnp.all(used), lambda: gradients, lambda: jnp.where(used, gradients, 0))
    return jnp.tensordot(weights, gradients, 1, precision=lax.Precision.HIGHEST)


def stream_norms(
    a: jax.Array, b: jax.Array, *, precision: lax.PrecisionLike = None
) -> CertifiedNorms:
    """Norms of the gradients, computed a few at a time and dropped; see `gram_norms`."""
    dtype = accumulate_dtype(a.dtype, b.dtype)
    if 0 in (*a.shape, *b.shape):
        return zero_norms(a.shape[0], dtype)

    def some(a: jax.Array, b: jax.Array) -> jax.Array:
        return measure(per_example(a, b, precision=precision))

    return CertifiedNorms.measured(*map_chunks(some, (a, b), _stream_chunk(a, b)).T)


def stream_sum(
    a: jax.Array, b: jax.Array, weights: jax.Array, *, precision: lax.PrecisionLike = None
) -> jax.Array:
    """The sum of weight times gradient, of the gradients that `stream_norms` measures.

    Args:
      a: ``[B, G, T, D]``.
      b: ``[B, G, T, P]``.
      weights: ``[B]``; an example of weight zero adds exactly zero, even if it holds NaN or Inf.
      precision: of the products, as in `jax.lax.dot_general`.

    Returns:
      ``[G, D, P]`` of `accumulate_dtype`.
    """
    if 0 in (*a.shape, *b.shape):
        return jnp.zeros((a.shape[1], a.shape[3], b.shape[3]), accumulate_dtype(a.dtype, b.dtype))

    def some(a: jax.Array, b: jax.Array, weights: jax.Array) -> jax.Array:
        return sum_measured(per_example(a, b, precision=precision), weights)

    return sum_chunks(some, (a, b, weights), _stream_chunk(a, b))


def _stream_chunk(a: jax.Array, b: jax.Array) -> int:
    batch, groups, positions, depth = a.shape
    outputs = b.shape[3]
    row = groups * (depth * outputs + positions * (depth + outputs))
    return cache_chunk(batch, row * accumulate_dtype(a.dtype, b.dtype).itemsize)
