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

from perex._rules.chunks import map_chunks

__all__ = [
    "accumulate_dtype",
    "estimate",
    "gram_squares",
    "per_example",
    "scaled_norms",
    "square_norms",
    "unit_scale",
    "weighted_sum",
]

_CHUNK_BYTES = 4 << 20

# Two CPU cores, float32: a matrix product of side 64 and more runs at 80 to 150 GFLOP/s, from cache
# a core moves some 30 GB/s, and the first write to new memory some 4 GB/s (page faults). Each
# product of a batch costs a microsecond or two on top.
_FLOPS = 1.0e11
_CACHE = 3.0e10
_FRESH = 4.0e9
_READ = 1.5e10
_CALL = 1.5e-6


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
    return size * (2 * rows * depth * columns / _FLOPS + moved / _CACHE) + _CALL


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
    resident = batch * size * 4 <= _CHUNK_BYTES
    write = 4 * size / (_CACHE if resident else _FRESH)
    read = 4 * size / (_CACHE if resident else _READ)
    if positions == 1:
        gram = groups * 4 * (depth + outputs) / _CACHE
    else:
        gram = groups * (
            product_seconds(positions, depth, positions)
            + product_seconds(positions, outputs, positions)
            + 4 * positions**2 / _CACHE
        )
    return {
        "keep": batch * (one + write + 2 * read),
        "gram": batch * gram + total,
        "stream": batch * (one + 4 * size / _CACHE) + total,
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
    a = jnp.where(weights != 0, a.astype(dtype), 0)
    return lax.dot_general(
        a,
        b,
        (((0, 2), (0, 2)), ((1,), (1,))),
        precision=precision,
        preferred_element_type=dtype,
    )


def unit_scale(array: jax.Array) -> jax.Array:
    """A power of two near the largest entry of every example.

    Dividing by it keeps squares in range and changes no digit. It is 1 for an example
    that is all zero or not finite, and no gradient flows through it.

    Args:
      array: ``[B, ...]``, real or complex.

    Returns:
      ``[B]`` of the real type, at least float32.
    """
    array = lax.stop_gradient(array)
    axes = tuple(range(1, array.ndim))
    parts = (array.real, array.imag) if jnp.iscomplexobj(array) else (array,)
    peaks = [jnp.max(jnp.abs(part), axis=axes, initial=0) for part in parts]
    peak = peaks[0] if len(peaks) == 1 else jnp.maximum(*peaks)
    peak = peak.astype(jnp.promote_types(peak.dtype, jnp.float32))
    info = jnp.finfo(peak.dtype)
    _, exponent = jnp.frexp(peak)
    # Both the scale and its inverse must be normal numbers.
    scale = jnp.ldexp(jnp.ones_like(peak), jnp.clip(exponent, info.minexp + 2, -info.minexp - 2))
    return jnp.where((peak > 0) & jnp.isfinite(peak), scale, 1)


def divide(array: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """``array / scale`` of type ``dtype``, with one scale ``[B]`` for each example."""
    return array.astype(dtype) * lax.expand_dims(1 / scale, range(1, array.ndim)).astype(dtype)


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

    products = jnp.real(gram(a) * gram(b)).reshape(a.shape[0], -1)
    return jnp.maximum(jnp.sum(products, axis=1), 0)


def sum_squares(array: jax.Array) -> jax.Array:
    """Sum of squared magnitudes of every example, ``[B, ...]`` to ``[B]``."""
    array = array.reshape(array.shape[0], -1)
    if jnp.iscomplexobj(array):
        return jnp.sum(array.real**2 + array.imag**2, axis=1)
    return jnp.sum(array * array, axis=1)


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
        scale_a, scale_b = unit_scale(a), unit_scale(b)
        a, b = divide(a, scale_a, dtype), divide(b, scale_b, dtype)
        if way == "gram" and positions == 1:
            # Both [b, G]; with one position the gradient is one outer product.
            norms = (sum_squares(v.reshape(-1, v.shape[3])) for v in (a, b))
            left, right = (norm.reshape(-1, groups) for norm in norms)
            squares = jnp.sum(left * right, axis=1)
        elif way == "gram":
            squares = gram_squares(a, b)
        else:
            squares = sum_squares(per_example(a, b, precision=precision))
        return undo_scales(scale_a, scale_b, squares)

    if 0 in (batch, groups, positions, depth, outputs):
        zeros = jnp.zeros(batch, jnp.finfo(dtype).dtype)
        return zeros + 1, zeros
    held = positions**2 * 2 if way == "gram" else depth * outputs
    row = groups * (held + positions * (depth + outputs)) * jnp.dtype(dtype).itemsize
    result = map_chunks(some, (a, b), max(1, _CHUNK_BYTES // row))
    return result[:, 0], result[:, 1]


def combine_scales(left: jax.Array, right: jax.Array) -> jax.Array:
    """Product of two powers of two ``[B]``, kept within the range of normal numbers.

    `undo_scales` also accounts for what a bound cuts off.
    """
    info = jnp.finfo(left.dtype)
    return jnp.clip(left * right, float(info.tiny), 2.0 ** (info.maxexp - 1))


def undo_scales(left: jax.Array, right: jax.Array, squares: jax.Array) -> jax.Array:
    """Joins the scales of two factors with the squares of their scaled product.

    Args:
      left: powers of two ``[B]``.
      right: powers of two ``[B]``.
      squares: ``[B]``, around 1.

    Returns:
      ``[B, 2]``: one scale, a power of two and a normal number, and the squares that belong to it.
      Where ``left * right`` is out of range, the squares take what the scale cannot.
    """
    scale = combine_scales(left, right)
    rest = (left / scale) * right
    return jnp.stack([scale, squares * rest * rest], axis=1)


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
