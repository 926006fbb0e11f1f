"""Which way a leaf takes to its norms and clipped sum: decided by estimated time, when tracing.

* keep: the gradient of every example is computed and held, then weighted;
* gram: norms from inner products of positions, then one weighted product over all examples;
* stream: gradients of a few examples at a time for the norms, then the same weighted product.

A rule's ``estimate`` gives the seconds of each; only their ratios matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from perex._plan import SiteUse

if TYPE_CHECKING:
    from perex._per_example import PerExample

# What costs little to hold is kept: an estimate cannot tell such small times apart.
_SMALL_BYTES = 1 << 17
# Above this size memory counts too: gradients are kept only where that is faster by this factor.
_LARGE_BYTES = 1 << 23
_LARGE_FACTOR = 1.3


def estimate(use: SiteUse, batch_size: int) -> dict[str, float] | None:
    """Returns estimated seconds of each way through one site, or None if the rule does not say.

    Args:
      use: the site.
      batch_size: B.
    """
    if not hasattr(use.rule, "estimate"):
        return None
    repeats = math.prod(length for length, stacked in use.stack if not stacked)
    steps = math.prod(length for length, stacked in use.stack if stacked)
    site = use.site
    if len(use.stack) > sum(stacked for _, stacked in use.stack):
        if not hasattr(use.rule, "merge_repeats"):
            return None
        site = _merged_site(use, repeats)
    return {way: steps * s for way, s in use.rule.estimate(site, batch_size).items()}


def _merged_site(use: SiteUse, repeats: int) -> Any:
    found = []

    def merge(inputs: tuple[Any, ...], cotangent: Any) -> None:
        found.append(use.rule.merge_repeats(use.site, inputs, cotangent)[0])

    def batched(struct: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, repeats, *struct.shape), struct.dtype)

    jax.eval_shape(merge, tuple(map(batched, use.site.inputs)), batched(use.site.out))
    return found[0]


def choose(seconds: Mapping[str, float], kept_bytes: int, isometric: bool) -> str:
    """Returns the way of one use: "keep", "gram" or "stream".

    Args:
      seconds: the estimate.
      kept_bytes: what keeping the gradients takes.
      isometric: whether the norm of the operand's gradient is that of the leaf's; if not, there is
        no Gram way.
    """
    others = ("gram", "stream") if isometric else ("stream",)
    best = min(others, key=lambda way: seconds[way])
    factor = _LARGE_FACTOR if kept_bytes > _LARGE_BYTES else 1.0
    return "keep" if factor * seconds["keep"] <= seconds[best] else best


def keeps(leaf: PerExample) -> bool:
    """Says whether the per-example gradients of a leaf should be held as an array."""
    kept_bytes = leaf.batch_size * math.prod(leaf.leaf_shape) * max(leaf.dtype.itemsize, 4)
    if not leaf.uses or kept_bytes <= _SMALL_BYTES:
        return True
    total = {"keep": 0.0, "gram": 0.0, "stream": 0.0}
    for use in leaf.uses:
        if not (use.offers("square_norm") and use.offers("weighted_sum")):
            return True
        seconds = estimate(use.preparation.use, leaf.batch_size)
        if seconds is None:
            return False
        for way in total:
            total[way] += seconds[way]
    isometric = all(use.preparation.isometric for use in leaf.uses)
    return choose(total, kept_bytes, isometric) == "keep"


def describe(use: SiteUse, batch_size: int, isometric: bool, leaf_size: int) -> str:
    """Returns the way of a site's leaf to a clipped sum, with the estimates, for `perex.explain`.

    Args:
      use: the site.
      batch_size: B.
      isometric: whether the preparation keeps norms.
      leaf_size: the number of entries of the leaf.
    """
    kept_bytes = 4 * batch_size * leaf_size
    if kept_bytes <= _SMALL_BYTES:
        return "clipped sum: keep (small)"
    if not (hasattr(use.rule, "square_norm") and hasattr(use.rule, "weighted_sum")):
        return "clipped sum: keep (the rule knows no other way)"
    seconds = estimate(use, batch_size)
    if seconds is None:
        return "clipped sum: norms and weighted sum by the rule"
    told = ", ".join(f"{way} {1000 * s:.3g} ms" for way, s in seconds.items())
    return f"clipped sum: {choose(seconds, kept_bytes, isometric)} (estimates: {told})"
