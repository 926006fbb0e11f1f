"""Norms and weighted sums of per-example gradients.

Letters: B examples. A leaf is a per-example gradient `[B, *shape]`: an array, or an object that
stands for one and offers `square_norms() -> [B]` and `weighted_sum(weights) -> shape`
(`perex.PerExample`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex._compat import promote_types
from perex._rules.scales import ScaledNorms, power_of_two, scaled_squares, sum_squares

__all__ = [
    "KnownNorms",
    "ScaledNorms",
    "at_least_float32",
    "combine_columns",
    "combine_norms",
    "from_square_norms",
    "is_factored",
    "square_norms",
    "weighted_sum",
]


@dataclasses.dataclass(frozen=True, eq=False)
class KnownNorms:
    """Stands for per-example gradients of which nothing but norms, or a sum, is known.

    Attributes:
      norms: their norms `[B]`.
      total: their sum with weights that were chosen before, or None.
    """

    norms: ScaledNorms
    total: Any = None

    def scaled_norms(self) -> ScaledNorms:
        """Return the norms `[B]`."""
        return self.norms


def is_factored(leaf: Any) -> bool:
    """Say whether a leaf stands for an array by its methods."""
    # Its class is asked: a Flax NNX variable lends its instances the attributes of what it holds.
    return hasattr(type(leaf), "square_norms") and hasattr(type(leaf), "weighted_sum")


def at_least_float32(dtype: Any) -> np.dtype:
    """Return the real dtype to take norms of `dtype` in: its own, or float32 if it is smaller."""
    return promote_types(jnp.finfo(dtype).dtype, jnp.float32)


def square_norms(leaf: Any) -> ScaledNorms:
    """Return the norms of each example of one leaf.

    The squares are summed as they are, which is one pass over the leaf. Only where some example's
    sum is so large or small that squares may have overflowed or underflowed, all is done again with
    each example scaled by its largest entry, and just those examples take the second result: no
    example's norm depends on another example.

    Args:
      leaf: an array `[B, *shape]`, real or complex, or a factored leaf.

    Returns:
      The norms, `[B]`, in at least float32.
    """
    if hasattr(leaf, "scaled_norms"):
        return leaf.scaled_norms()
    if is_factored(leaf):
        return from_square_norms(leaf.square_norms())
    return _array_norms(leaf)


# Compiled, as otherwise each call outside of jit would compile its conditional anew.
@jax.jit
def _array_norms(leaf: jax.Array) -> ScaledNorms:
    dtype = at_least_float32(leaf.dtype)
    size = math.prod(leaf.shape[1:])
    leaf = leaf.astype(promote_types(leaf.dtype, dtype))
    info = jnp.finfo(dtype)
    squares = sum_squares(leaf)
    # Each square below `tiny` may be lost: together at most size * tiny, which is rounding beside a
    # sum above `low`. Below `high` there is room for the sum over millions of leaves.
    low = float(info.tiny) * size / float(info.eps)
    high = float(info.max) * float(info.eps)
    usable = (squares >= low) & (squares <= high)

    def as_is():
        return ScaledNorms.measured(jnp.ones_like(squares), squares)

    def rescaled():
        again = ScaledNorms.measured(*scaled_squares(leaf).T)
        return ScaledNorms(*(jnp.where(usable, *pair) for pair in zip(as_is(), again, strict=True)))

    return jax.lax.cond(jnp.all(usable), as_is, rescaled)


def from_square_norms(squares: jax.Array) -> ScaledNorms:
    """Take square norms `[B]` as they come; what lies below zero by rounding counts as zero."""
    squares = jnp.asarray(squares)
    squares = jnp.maximum(squares.astype(at_least_float32(squares.dtype)), 0)
    scale = power_of_two(jnp.sqrt(squares))
    # Twice, because the square of the scale can be out of range.
    return ScaledNorms.measured(scale, squares / scale / scale)


def combine_norms(norms: Sequence[ScaledNorms]) -> ScaledNorms:
    """Return the norms of the concatenation of vectors whose norms are given."""
    parts = zip(*norms, strict=True)
    return combine_columns(ScaledNorms(*(jnp.stack(part, axis=1) for part in parts)))


def combine_columns(norms: ScaledNorms) -> ScaledNorms:
    """Return the norms `[B]` of the concatenation of vectors with norms `[B, N]`."""
    if norms.squares.shape[1] == 1:
        return ScaledNorms(*(part[:, 0] for part in norms))
    # A vector that is zero has no say in the scale.
    scales = jnp.where(norms.upper == 0, 0, norms.scale)
    scale = jnp.max(scales, axis=1, initial=0)
    ratio = scales / jax.lax.expand_dims(jnp.where(scale == 0, 1, scale), (1,))
    # Twice, because the square of the ratio can be out of range where the product is not.
    sums = (jnp.sum(part * ratio * ratio, axis=1) for part in (norms.squares, norms.upper))
    return ScaledNorms(scale, *sums)


def weighted_sum(leaf: Any, weights: jax.Array) -> jax.Array:
    """Return the sum of the examples of one leaf, each times its weight.

    An example of weight exactly zero is left out by select, so it may hold Inf or NaN. A select of
    the whole leaf costs ten times the product, so the product is tried first: it is finite unless
    such an example spoils it.

    Args:
      leaf: an array `[B, *shape]` or a factored leaf; or known norms, whose total is returned.
      weights: `[B]`, finite.

    Returns:
      An array of the leaf's `shape`, in at least float32.
    """
    if isinstance(leaf, KnownNorms):
        return leaf.total
    if is_factored(leaf):
        return leaf.weighted_sum(weights)
    return _array_sum(leaf, weights)


@jax.jit
def _array_sum(leaf: jax.Array, weights: jax.Array) -> jax.Array:
    dtype = promote_types(leaf.dtype, jnp.float32)
    weights = weights.astype(at_least_float32(leaf.dtype))

    def product(leaf):
        return jnp.tensordot(
            weights.astype(dtype), leaf.astype(dtype), 1, precision=jax.lax.Precision.HIGHEST
        )

    def select():
        return jnp.where(jnp.expand_dims(weights != 0, tuple(range(1, leaf.ndim))), leaf, 0)

    def selected():
        # A conditional, as XLA fuses a bare select into a small product, whose rounding changes:
        # which examples are poisoned must not show in the others' sum.
        return product(jax.lax.cond(jnp.any(weights == 0), select, lambda: leaf))

    total = product(leaf)
    return jax.lax.cond(jnp.all(jnp.isfinite(total)), lambda: total, selected)
