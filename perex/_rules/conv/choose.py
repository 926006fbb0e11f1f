"""Which algorithm a convolution gets."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax

from perex._rules.conv import depthwise, grouped, taps, unfold
from perex._rules.conv.normal_form import Convolution


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One way to compute kernel gradients.

    Attributes:
      per_example: ``(conv, x [B, N, *S, G, C], cotangent [B, N, *O, G, P]) -> [B, *K, G, C, P]``.
      weighted_sum: the same with ``weights [B]``, returning ``[*K, G, C, P]``, or None.
      covers: ``conv -> None`` or the reason why it does not apply.
    """

    per_example: Callable[..., jax.Array]
    weighted_sum: Callable[..., jax.Array] | None = None
    covers: Callable[[Convolution], str | None] = lambda conv: None


ALGORITHMS: dict[str, Algorithm] = {
    "grouped": Algorithm(grouped.per_example, grouped.weighted_sum),
    "unfold": Algorithm(unfold.per_example, unfold.weighted_sum),
    "taps": Algorithm(taps.per_example),
    "depthwise": Algorithm(depthwise.per_example, covers=depthwise.covers),
}


def register_conv_algorithm(name: str, fn: Callable[..., jax.Array]) -> None:
    """Registers an algorithm for per-example kernel gradients under a name for ``conv=``."""
    ALGORITHMS[name] = Algorithm(fn)


def per_example(conv: Convolution, choice: Any, batch: int) -> Callable[..., jax.Array]:
    """The function to run."""
    if choice == "auto":
        return unfold.per_example
    return ALGORITHMS[choice].per_example


def weighted_sum(conv: Convolution, choice: Any, batch: int) -> Callable[..., jax.Array]:
    return unfold.weighted_sum
