"""Exact contractions for gradients that are sums of outer products.

The per-example gradient of a matrix-like parameter is ``g[b] = sum_t a[b, t] b[b, t]^T``, with

    a   [B, G, T, D]    what the parameter was multiplied with
    b   [B, G, T, P]    the cotangent of the result
    g   [B, G, D, P]

for B examples, G independent groups, T positions that are added up, D inputs and P outputs. No
complex conjugate is taken, as `jax.grad` takes none. Everything is added up in at least float32.

There are three ways to the norm of ``g[b]``: T = 1 makes it a product of two norms; the Gram way
uses ``|g|^2 = sum_{t,t'} (a_t . a_t') (b_t . b_t')``, cheap for few positions; the stream computes
``g`` for a few examples, squares it and drops it. `estimate` says which is the cheapest.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from perex._rules.chunks import cache_chunk, map_chunks
from perex._rules.scales import (
    divide,
    inner_products,
    scaled_squares,
    sum_squares,
    undo_scales,
    unit_scale,
)

__all__ = [
    "accumulate_dtype",
    "estimate",
    "gram_squares",
    "per_example",
    "scaled_norms",
    "square_norms",
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
# Gradients of a batch that are this small stay in cache until they are weighted.
_RESIDENT_BYTES = 4 << 20


def accumulate_dtype(*dtypes: jax.typing.DTypeLike) -> jnp.dtype:
    """The type to add products of these types up in: their promotion, at least float32."""
    return jnp.promote_types(jnp.result_type(*dtypes), jnp.float32)


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
      one weighted product; streamed norms and one weighted product.
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
        "stream": batch * (one + 4 * size / CACHE) + total,
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
    dtype = jnp.promote_types(a.dtype, b.dtype)
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
    a = lax.cond(jnp.any(weights == 0), lambda: jnp.where(weights != 0, a, 0), lambda: a)
    a = a.astype(dtype)
    return lax.dot_general(
        a,
        b,
        (((0, 2), (0, 2)), ((1,), (1,))),
        precision=precision,
        preferred_element_type=dtype,
    )


def gram_squares(a: jax.Array, b: jax.Array) -> jax.Array:
    """Squared norms ``[B]`` from inner products of positions; never below zero.

    Terms cancel where the norm is far below the sum of the norms of its outer products, so products
    are taken at the highest precision whatever the equation asks for.

    Args:
      a: ``[B, G, T, D]``, entries around 1 or below.
      b: ``[B, G, T, P]``, the same.

    Returns:
      ``[B]``, real, at least float32.
    """
    dtype = accumulate_dtype(a.dtype, b.dtype)

    def gram(array: jax.Array) -> jax.Array:
        return lax.dot_general(
            array,
            jnp.conj(array),
            (((3,), (3,)), ((0, 1), (0, 1))),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=dtype,
        )

    return jnp.maximum(inner_products(gram(a), jnp.conj(gram(b))), 0)


def scaled_norms(
    a: jax.Array, b: jax.Array, *, precision: lax.PrecisionLike = None, way: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Norms of the gradients as ``scale * sqrt(squares)``, neither of which leaves its range.

    Args:
      a: ``[B, G, T, D]``.
      b: ``[B, G, T, P]``.
      precision: of the products of the stream way.
      way: ``"gram"`` or ``"stream"``, by default the faster by `estimate`.

    Returns:
      ``(scale [B], squares [B])``, real, at least float32. An example with NaN or Inf has NaN or
      Inf squares.
    """
    batch, groups, positions, depth = a.shape
    outputs = b.shape[3]
    dtype = accumulate_dtype(a.dtype, b.dtype)
    if way is None:
        seconds = estimate(groups, positions, depth, outputs, batch)
        way = "gram" if seconds["gram"] <= seconds["stream"] else "stream"

    def some(a: jax.Array, b: jax.Array) -> jax.Array:
        if way == "stream":
            return scaled_squares(per_example(a, b, precision=precision))
        scale_a, scale_b = unit_scale(a), unit_scale(b)
        a, b = divide(a, scale_a, dtype), divide(b, scale_b, dtype)
        if positions == 1:
            # Both [b, G]; with one position the gradient is one outer product.
            norms = (sum_squares(v.reshape(-1, v.shape[3])) for v in (a, b))
            left, right = (norm.reshape(-1, groups) for norm in norms)
            squares = jnp.sum(left * right, axis=1)
        else:
            squares = gram_squares(a, b)
        return undo_scales(scale_a, scale_b, squares)

    if 0 in (batch, groups, positions, depth, outputs):
        zeros = jnp.zeros(batch, jnp.finfo(dtype).dtype)
        return zeros + 1, zeros
    held = positions**2 * 2 if way == "gram" else depth * outputs
    row = groups * (held + positions * (depth + outputs)) * jnp.dtype(dtype).itemsize
    result = map_chunks(some, (a, b), cache_chunk(batch, row))
    return result[:, 0], result[:, 1]


def square_norms(
    a: jax.Array, b: jax.Array, *, precision: lax.PrecisionLike = None, way: str | None = None
) -> jax.Array:
    """Squared norms of the gradients of every example.

    Products are taken of scaled entries, so nothing is lost on the way; a square itself can still
    be out of range (a norm below 1e-19 or above 1e19 in float32), for which there is
    `scaled_norms`.

    Args:
      a: ``[B, G, T, D]``.
      b: ``[B, G, T, P]``.
      precision: of the products of the stream way.
      way: ``"gram"`` or ``"stream"``, by default the faster by `estimate`.

    Returns:
      ``[B]``, real, at least float32.
    """
    scale, squares = scaled_norms(a, b, precision=precision, way=way)
    return scale * (scale * squares)
