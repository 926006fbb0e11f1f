"""Norms with a certificate: how far off they can be, and how much longer a summed term can be.

Clipping promises that no example adds more than C to the sum, in floating-point arithmetic. A norm
that is made of inner products does not give this where the products cancel: the gradient of
``net(x1) - net(x2)`` with ``x1`` near ``x2`` is a small difference of large terms, and so is the
square of its norm, of even larger ones. So every norm here comes with two bounds.

Write the gradient as ``g = sum_t u_t v_t^T``, with T positions, ``u_t`` of D entries and ``v_t`` of
P; let ``n_t = |u_t|``, ``m_t = |v_t|``, and let ``M = sum_t n_t m_t``, which bounds the norm of the
sum of the terms' magnitudes. With unit roundoff ``u``, a sum of K products is off by at most
``K u`` times the sum of their magnitudes in whatever order it is added up (Higham 2002, Accuracy
and Stability of Numerical Algorithms, section 3.1; terms in ``u**2`` are covered below or are
absorbed by the tolerance).

* **The square of the norm** is ``sum_{s,t} A_st B_st`` with the Gram matrices ``A_st = u_s . u_t``
  and ``B_st = v_s . v_t``. By Cauchy and Schwarz ``A_st`` is off by at most ``D u n_s n_t`` and
  ``B_st`` by ``P u m_s m_t``, and the reduction over s and t, which XLA does in trees of short
  runs, by at most ``R u`` of its terms (R is `REDUCTION`; a test measures it). Together

      error = sum_{s,t} [(D + R) u n_s n_t |B_st| + P u m_s m_t |A_st|] + D P u^2 M^2.

* **A term of the clipped sum** is the product ``sum_t u_t (w v_t)^T``, rounded anew. Each entry is
  a sum of T products of which one factor was rounded before, so the rounding is at most

      slack = (T + 3) u' M

  in L2 norm, with ``u'`` the roundoff of products of the equation's precision (on a CPU that of the
  dtype, on others that of TensorFloat-32 or bfloat16 unless the highest precision is asked for).

So no term is longer than ``upper = sqrt(squares + error) + slack``, whatever cancels. Gradients
that are *measured*, that is, computed, squared and later summed by one and the same computation,
have no error and no slack. Weights are ``min(1, C / upper)``, but a surplus of the upper end of up
to `TOLERANCE` roundoffs is left to rounding, so that it changes no weight where nothing cancels.

**Theorem.** The L2 norm of what one example adds to a clipped sum is at most
``C (1 + 2 TOLERANCE u)``: ``C (1 + 2**-10)`` in float32. Sums are never of less than float32.

Letters: B examples; G independent groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from perex._rules.scales import ScaledNorms, inner_products, power_of_two

# How many roundoffs the result of a reduction can be off, relative to the sum of magnitudes.
REDUCTION = 256
# Roundoffs of the norm that an upper end may exceed it by before weights change.
TOLERANCE = 2.0**13
# A norm that may be off by more than this part is computed from the gradients themselves. The bound
# is for the worst case: for the leaves of an ordinary transformer of 128 positions it is up to
# 0.004, where the norms are off by 3e-7 and measuring them again would cost a tenth of a step.
_WIDE = 0.01
# How products are rounded where the highest precision is not asked for.
_ROUNDED_PRODUCTS = {"tpu": 2.0**-8, "default": 2.0**-11}


class CertifiedNorms(NamedTuple):
    """Norms ``scale * sqrt(squares)`` of B gradients with bounds of what rounding can do, ``[B]``.

    ``error`` bounds how far ``squares`` are off, ``slack`` how much longer than the norm a term of
    the clipped sum can be, in units of ``scale``. None of the four leaves its range.
    """

    scale: jax.Array
    squares: jax.Array
    error: jax.Array
    slack: jax.Array

    @classmethod
    def measured(cls, scale: jax.Array, squares: jax.Array) -> CertifiedNorms:
        """Norms of gradients that are summed as they were measured."""
        zeros = jnp.zeros_like(squares)
        return cls(scale, squares, zeros, zeros)

    @classmethod
    def combined(cls, columns: CertifiedNorms) -> CertifiedNorms:
        """Norms ``[B]`` of the concatenation of vectors with norms ``[B, N]``."""
        if columns.squares.shape[1] == 1:
            return cls(*(part[:, 0] for part in columns))
        known = (columns.squares != 0) | (columns.error != 0) | (columns.slack != 0)
        scales = jnp.where(known, columns.scale, 0)
        scale = jnp.max(scales, axis=1, initial=0)
        ratio = scales / lax.expand_dims(jnp.where(scale == 0, 1, scale), (1,))
        # Twice, because the square of the ratio can be out of range where the product is not.
        squares, error = (
            jnp.sum(part * ratio * ratio, axis=1) for part in (columns.squares, columns.error)
        )
        slack = jnp.sqrt(jnp.sum(jnp.square(columns.slack * ratio), axis=1))
        return cls(scale, squares, error, slack)

    def is_wide(self) -> jax.Array:
        """Whether the norm may be off by more than a hundredth, bool ``[B]``."""
        return self.error > 2 * _WIDE * self.squares

    def scaled(self) -> ScaledNorms:
        """The norms and their upper ends."""
        top = jnp.sqrt(lax.stop_gradient(self.squares) + self.error) + self.slack
        # Where the upper end is far above the norm, its square needs a scale of its own.
        huge = power_of_two(jnp.where(top > 2.0**40, top, 1))
        top = top / huge
        return ScaledNorms(self.scale * huge, self.squares / huge / huge, top * top)


def settle(certified: CertifiedNorms, measured: Callable[[], CertifiedNorms]) -> ScaledNorms:
    """Returns norms with their upper ends, measured where products cancel.

    Only examples whose norm may be off take the measured one: no example's norm depends on another
    example. Their slack is twice that of the product which will sum them: the gradient that was
    measured is rounded, and the one that is summed is.

    Args:
      certified: norms from inner products.
      measured: computes the norms from the gradients themselves; called where any is wide.
    """
    wide = certified.is_wide()

    def some_measured() -> ScaledNorms:
        norms = measured()
        # Gradients that measure zero at each step of a scan have no scale.
        scale = jnp.where(norms.scale == 0, certified.scale, norms.scale)
        slack = 2 * certified.slack * (certified.scale / jnp.where(scale == 0, 1, scale))
        norms = norms._replace(scale=scale, slack=slack)
        pairs = zip(norms.scaled(), certified.scaled(), strict=True)
        return ScaledNorms(*(jnp.where(wide, *pair) for pair in pairs))

    return lax.cond(jnp.any(wide), some_measured, certified.scaled)


def unit_roundoff(dtype: Any) -> float:
    """Half the distance from one to the next number; four times as much for complex products."""
    roundoff = float(jnp.finfo(dtype).eps) / 2
    return 4 * roundoff if jnp.issubdtype(dtype, jnp.complexfloating) else roundoff


def product_roundoff(dtype: Any, precision: Any, like: jax.Array) -> jax.Array:
    """The roundoff of products of a precision on the platform that the program is lowered for.

    Args:
      dtype: in which products are added up.
      precision: as in `jax.lax.dot_general`.
      like: an array whose real dtype the result takes.
    """
    own = unit_roundoff(dtype)
    real = jnp.finfo(like.dtype).dtype
    both = precision if isinstance(precision, (tuple, list)) else (precision,)
    exact = all(p == lax.Precision.HIGHEST for p in both)
    if exact or jnp.finfo(dtype).bits > 32:
        return jnp.asarray(own, real)
    rounded = {name: max(own, part) for name, part in _ROUNDED_PRODUCTS.items()}
    if not all(p is None or isinstance(p, (lax.Precision, str)) for p in both):
        # An algorithm that is named runs everywhere.
        return jnp.asarray(max(rounded.values()), real)
    return lax.platform_dependent(
        cpu=lambda: jnp.asarray(own, real),
        tpu=lambda: jnp.asarray(rounded["tpu"], real),
        default=lambda: jnp.asarray(rounded["default"], real),
    )


def from_grams(
    left: jax.Array, right: jax.Array, lengths: tuple[int, int], precision: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Squares, error and slack of ``g = sum_t u_t v_t^T`` from inner products of positions.

    Args:
      left: ``u_s . conj(u_t)``, ``[B, G, T, T]``, of entries around 1 or below.
      right: ``v_s . conj(v_t)``, the same.
      lengths: (D, P), the lengths of the sums in these, or of their blocks.
      precision: of the product that the weighted sum will be.

    Returns:
      ``(squares, error, slack)``, each ``[B]`` and real; no gradient flows through the bounds.
    """
    squares = jnp.maximum(inner_products(left, jnp.conj(right)), 0)
    left, right = lax.stop_gradient((left, right))
    roundoff = unit_roundoff(left.dtype)
    rows, columns = _row_norms(left), _row_norms(right)
    magnitudes = jnp.sum(rows * columns, axis=2)
    magnitude = jnp.sqrt(jnp.sum(magnitudes * magnitudes, axis=1))
    depth, width = lengths
    bounds = ((depth + REDUCTION) * roundoff) * _pairs(rows) * jnp.abs(right)
    bounds += (width * roundoff) * _pairs(columns) * jnp.abs(left)
    error = jnp.sum(bounds.reshape(bounds.shape[0], -1), axis=1)
    error += (depth * roundoff * width * roundoff) * magnitude * magnitude
    return squares, error, sum_slack(magnitude, left.shape[3], left.dtype, precision)


def sum_slack(magnitude: jax.Array, length: int, dtype: Any, precision: Any) -> jax.Array:
    """How much longer than the true gradient a rounded term of a weighted sum can be.

    Args:
      magnitude: M ``[B]``, the sum of the norms of the terms that add up to the gradient.
      length: T, how many terms add up in one entry.
      dtype: in which they are added up.
      precision: of the products.
    """
    magnitude = lax.stop_gradient(magnitude)
    return (length + 3) * product_roundoff(dtype, precision, magnitude) * magnitude


def _row_norms(gram: jax.Array) -> jax.Array:
    """The norms ``[B, G, T]`` of the vectors of a Gram matrix."""
    return jnp.sqrt(jnp.maximum(jnp.diagonal(gram, axis1=2, axis2=3).real, 0))


def _pairs(norms: jax.Array) -> jax.Array:
    return lax.expand_dims(norms, (3,)) * lax.expand_dims(norms, (2,))
