"""How one masked convolution is to be computed, decided before it runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from perex._compat import primitives
from perex._masks.entries import convolve_entries
from perex._masks.pieces import Piece, convolve_pieces
from perex._masks.rectangles import blocks, rectangles, without_square_windows

# More convolutions than this cost more than one product over all the taps that act.
_MOST_PIECES = 16


@dataclasses.dataclass(frozen=True, eq=False)
class MaskPlan:
    """An exact convolution with a kernel of which some entries are masked.

    Attributes:
      params: the parameters of the ``conv_general_dilated`` equation.
      mask: bool, of the kernel's shape: False where the kernel is masked. None if it becomes known
        only at run time.
      pieces: the pieces whose convolutions are summed, or None where one product over ``taps`` is
        taken instead.
      taps: the taps at which anything acts.
      rectangle_count: the number of rectangles of taps with one channel pattern each.
    """

    params: Mapping[str, Any]
    mask: np.ndarray | None
    pieces: tuple[Piece, ...] | None
    taps: tuple[tuple[int, ...], ...]
    rectangle_count: int

    def convolve(self, x: jax.Array, kernel: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Returns the convolution; JAX may differentiate it with respect to either operand.

        Masked entries have no influence: their kernel gradient is exactly zero, and so is the
        gradient of an input that only they see. The result does not depend on what such inputs or
        entries hold, even NaN or infinity. Summed pieces can be differentiated in either mode,
        the product over taps with a channel pattern in reverse mode only.

        Args:
          x: the input, in the layout of the equation.
          kernel: the masked kernel, in the layout of the equation.
          mask: the mask, bool, of the kernel's shape, where it was not known before.

        Returns:
          What the equation returns, up to rounding.
        """
        bind = functools.partial(primitives.conv_general_dilated_p.bind, **self.params)
        out = jax.eval_shape(bind, x, kernel)
        if self.pieces is not None:
            return convolve_pieces(x, kernel, self.pieces, self.params, out)
        known = mask if self.mask is None else self._partial_mask()
        return convolve_entries(x, kernel, known, self.taps, self.params, out)

    def zero_masked(self, gradient: jax.Array) -> jax.Array:
        """Sets the masked entries of a gradient ``[..., *kernel.shape]`` to zero, even NaN."""
        return gradient if self.mask is None else jnp.where(self.mask, gradient, 0)

    def _key(self) -> tuple[Any, ...]:
        mask = None if self.mask is None else (self.mask.shape, self.mask.tobytes())
        return (
            mask,
            self.taps,
            tuple(sorted((name, str(value)) for name, value in self.params.items())),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskPlan) and (self is other or self._key() == other._key())

    def __hash__(self) -> int:
        return hash((self.rectangle_count, self.taps))

    @property
    def share(self) -> float:
        """The share of the kernel's multiplications that is still computed."""
        if self.mask is None or not self.mask.size:
            return 1.0
        if self.pieces is None:
            rhs_spec = self.params["dimension_numbers"][1]
            taps = [self.mask.shape[axis] for axis in rhs_spec[2:]]
            return len(self.taps) / int(np.prod(taps))
        return float(self.mask.mean())

    def describe(self) -> str:
        """Returns a few words for `perex.explain`."""
        if self.mask is None:
            return f"mask at run time: one product over {len(self.taps)} taps, input held for each"
        if self.pieces is None:
            way = f"one product over {len(self.taps)} taps, {self.rectangle_count} rectangles"
        else:
            way = f"{self.rectangle_count} {_plural('rectangle', self.rectangle_count)}"
            if len(self.pieces) != self.rectangle_count:
                way += f" in {len(self.pieces)} {_plural('piece', len(self.pieces))}"
        masked = 1 - float(self.mask.mean()) if self.mask.size else 0.0
        return f"mask, {masked:.0%} zeros: {way}, saves {1 - self.share:.0%} of the multiplications"

    def _partial_mask(self) -> np.ndarray | None:
        """Returns the mask, or None where every entry of every tap that acts, acts."""
        if self.mask is None:
            return None
        taps = _tap_masks(self.mask, self.params)
        return None if all(taps[tap].all() for tap in self.taps) else self.mask


def plan_known(mask: np.ndarray, params: Mapping[str, Any]) -> MaskPlan:
    """Plans a convolution whose mask is known.

    Args:
      mask: of the kernel's shape; zero (or False) where the kernel is masked.
      params: the parameters of the ``conv_general_dilated`` equation.

    Returns:
      The plan.
    """
    acts = np.asarray(mask) != 0
    per_tap = _tap_masks(acts, params)
    found = rectangles(per_tap)
    pieces = [
        (part, block)
        for rectangle in found
        for part in without_square_windows(rectangle)
        for block in blocks(part.pattern)
    ]
    window = per_tap.shape[:-3]
    taps = tuple(tap for tap in np.ndindex(window) if per_tap[tap].any())
    chosen = tuple(pieces) if len(pieces) <= _MOST_PIECES else None
    return MaskPlan(params, acts, chosen, taps, len(found))


def plan_at_run_time(
    kernel_shape: tuple[int, ...], params: Mapping[str, Any], known: np.ndarray | None = None
) -> MaskPlan:
    """Plans a convolution whose mask is an argument of `MaskPlan.convolve`.

    Args:
      kernel_shape: the kernel's.
      params: the parameters of the ``conv_general_dilated`` equation.
      known: bool, of the kernel's shape: False where that mask is known to be.

    Returns:
      The plan.
    """
    per_tap = _tap_masks(np.ones(kernel_shape, bool) if known is None else known, params)
    taps = tuple(tap for tap in np.ndindex(per_tap.shape[:-3]) if per_tap[tap].any())
    return MaskPlan(params, None, None, taps, 0)


def masked_convolution(
    x: jax.Array, kernel: jax.Array, mask: np.ndarray | jax.Array, **params: Any
) -> jax.Array:
    """Convolves with a masked kernel, exactly.

    Args:
      x: the input.
      kernel: the kernel; what it holds where it is masked is not read.
      mask: of the kernel's shape; zero where the kernel is masked. A concrete array is split into
        pieces, a tracer is a mask known only at run time.
      **params: the other arguments of `jax.lax.conv_general_dilated`.

    Returns:
      The result of the convolution of ``x`` with ``where(mask, kernel, 0)``.
    """
    jaxpr = jax.make_jaxpr(functools.partial(lax.conv_general_dilated, **params))(x, kernel)
    (equation,) = jaxpr.eqns
    if isinstance(mask, Tracer):
        return plan_at_run_time(kernel.shape, equation.params).convolve(x, kernel, mask != 0)
    return plan_known(np.asarray(mask), equation.params).convolve(x, kernel)


def _tap_masks(mask: np.ndarray, params: Mapping[str, Any]) -> np.ndarray:
    """Brings a mask from the kernel's layout to ``[*K, G, I, O]``."""
    rhs_spec = params["dimension_numbers"][1]
    groups = params["feature_group_count"] * params["batch_group_count"]
    mask = np.transpose(mask, (*rhs_spec[2:], rhs_spec[1], rhs_spec[0]))
    mask = mask.reshape(*mask.shape[:-1], groups, mask.shape[-1] // groups)
    return np.moveaxis(mask, -2, -3)


def _plural(word: str, count: int) -> str:
    return word if count == 1 else word + "s"
