"""Squares that neither overflow nor underflow: each example is divided by a power of two first.

A power of two changes no digit. Where a norm is in question, it is carried in two parts,
``scale * sqrt(squares)``, which are in range even where the square of the norm is not.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from perex._compat import promote_types


class ScaledNorms(NamedTuple):
    """Norms of B vectors, ``scale * sqrt(squares)``, of which no part overflows or underflows.

    ``scale`` is zero or a power of two ``[B]``; ``squares`` and ``upper`` are ``[B]``. ``scale *
    sqrt(upper)`` is what the vector's term in a clipped sum is never longer than (see
    `perex._rules.certified`). A vector that holds Inf or NaN has Inf or NaN squares.
    """

    scale: jax.Array
    squares: jax.Array
    upper: jax.Array

    @classmethod
    def measured(cls, scale: jax.Array, squares: jax.Array) -> ScaledNorms:
        """Norms of vectors that are summed as they were measured."""
        return cls(scale, squares, lax.stop_gradient(squares))

    def values(self) -> jax.Array:
        """The norms ``[B]``; infinite where the norm itself is too large for the dtype."""
        # A square root has no derivative at zero; that of the norm shall be zero there.
        nonzero = self.squares != 0
        root = jnp.sqrt(jnp.where(nonzero, self.squares, 1))
        return self.scale * jnp.where(nonzero, root, 0)


def power_of_two(peak: jax.Array) -> jax.Array:
    """A power of two near each value, which like its inverse is a normal number.

    Args:
      peak: ``[B]``, real, not negative.

    Returns:
      ``[B]``; 1 for what is zero or not finite.
    """
    info = jnp.finfo(peak.dtype)
    # Without digits behind the leading one, rounding leaves a power of two.
    scale = lax.reduce_precision(peak, info.nexp, 0)
    scale = jnp.clip(scale, 2.0 ** (info.minexp + 2), 2.0 ** (-info.minexp - 2))
    return jnp.where((peak > 0) & (peak < jnp.inf), scale, 1)


def unit_scale(array: jax.Array) -> jax.Array:
    """A power of two near the largest entry of every example.

    Dividing by it keeps squares in range and changes no digit. It is 1 for an example
    that is all zero or not finite, and no gradient flows through it.

    Args:
      array: ``[B, ...]``, real or complex.

    Returns:
      ``[B]`` of the real type, at least float32.
    """
    # Along one long axis a reduction is several times faster than along several short ones.
    array = lax.stop_gradient(_flat(array))
    parts = (array.real, array.imag) if jnp.iscomplexobj(array) else (array,)
    peaks = [jnp.max(jnp.abs(part), axis=1, initial=0) for part in parts]
    peak = peaks[0] if len(peaks) == 1 else jnp.maximum(*peaks)
    return power_of_two(peak.astype(promote_types(peak.dtype, jnp.float32)))


def divide(array: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """``array / scale`` of type ``dtype``, with one scale ``[B]`` for each example."""
    return array.astype(dtype) * lax.expand_dims(1 / scale, range(1, array.ndim)).astype(dtype)


def sum_squares(array: jax.Array) -> jax.Array:
    """Sum of squared magnitudes of every example, ``[B, ...]`` to ``[B]``."""
    return inner_products(array, array)


def inner_products(left: jax.Array, right: jax.Array) -> jax.Array:
    """Real part of every example's ``sum(left * conj(right))``, ``[B, ...]`` to ``[B]``."""
    # Behind a barrier, as XLA would multiply in the shape before, into new memory, and then add up.
    # (A product of matrices is faster in some versions of XLA, but adds up one number at a time.)
    left, right = lax.optimization_barrier((_flat(left), _flat(right)))
    products = left.real * right.real
    if jnp.iscomplexobj(left):
        products = products + left.imag * right.imag
    return jnp.sum(products, axis=1)


def scaled_squares(array: jax.Array) -> jax.Array:
    """Norms ``scale * sqrt(squares)`` of every example, neither part out of range.

    Args:
      array: ``[B, ...]``, real or complex.

    Returns:
      ``[B, 2]``: scale and squares, real, at least float32. An example with NaN or Inf has NaN or
      Inf squares.
    """
    array = _flat(array.astype(promote_types(array.dtype, jnp.float32)))
    scale = unit_scale(array)
    return jnp.stack([scale, sum_squares(divide(array, scale, array.dtype))], axis=1)


def combine_scales(left: jax.Array, right: jax.Array) -> jax.Array:
    """Product of two powers of two ``[B]``, kept within the range of normal numbers.

    `undo_scales` also accounts for what a bound cuts off.
    """
    info = jnp.finfo(left.dtype)
    return jnp.clip(left * right, float(info.tiny), 2.0 ** (info.maxexp - 1))


def undo_scales(
    left: jax.Array,
    right: jax.Array,
    squares: jax.Array,
    error: jax.Array,
    slack: jax.Array,
) -> jax.Array:
    """Joins the scales of two factors with what is known of their scaled product.

    Args:
      left: powers of two ``[B]``.
      right: powers of two ``[B]``.
      squares: of the norms, ``[B]``, around 1.
      error: of the squares, ``[B]``.
      slack: of the norms, ``[B]``.

    Returns:
      ``[B, 4]``: one scale, a power of two and a normal number, and squares, error and slack that
      belong to it. Where ``left * right`` is out of range, these take what the scale cannot.
    """
    scale = combine_scales(left, right)
    rest = (left / scale) * right
    square = rest * rest
    return jnp.stack([scale, squares * square, error * square, slack * rest], axis=1)


def _flat(array: jax.Array) -> jax.Array:
    return array.reshape(array.shape[0], math.prod(array.shape[1:]))
