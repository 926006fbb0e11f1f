"""Which way a leaf takes to its norms and clipped sum: decided by estimated time, when tracing.

* keep: the gradient of every example is computed and held, then weighted;
* gram: norms from inner products of positions, then one weighted product over all examples;
* stream: gradients of a few examples at a time for the norms, then the same weighted product.

A rule's ``estimate`` gives the seconds of each; only their ratios matter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from perex._preparation import is_isometric
from perex._steps import Plan, SiteUse

if TYPE_CHECKING:
    from perex._per_example import PerExample

# What costs little to hold is kept: an estimate cannot tell such small times apart.
_SMALL_BYTES = 1 << 17
# Above this size memory counts too: gradients are kept only where that is faster by this factor.
_LARGE_BYTES = 1 << 23
_LARGE_FACTOR = 1.3
# Bytes a second of gradients that are written, read twice, and fit in no cache.
_WRITTEN = 1.5e9


def offers(use: SiteUse, method: str) -> bool:
    """Whether the site's rule has an optional method that works at this site."""
    repeated = any(not stacked for _, stacked in use.stack)
    return hasattr(use.rule, method) and (not repeated or hasattr(use.rule, "merge_repeats"))


def estimate(use: SiteUse, batch_size: int) -> dict[str, float] | None:
    """Returns estimated seconds of each way through one site, or None if the rule does not say.

    Args:
      use: the site.
      batch_size: B.
    """
    if not offers(use, "estimate"):
        return None
    repeats = math.prod(length for length, stacked in use.stack if not stacked)
    steps = math.prod(length for length, stacked in use.stack if stacked)
    site = use.site
    if len(use.stack) > sum(stacked for _, stacked in use.stack):
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


def norm_sites(plan: Plan) -> set[int]:
    """Returns the sites whose norms can be taken at once, by number.

    These are the only uses of their leaf, rearrange it at most, and have another operand at each
    step of every scan around them: the norm of the site's gradient is that of the leaf's.
    """
    uses = Counter(leaf for use in plan.sites for leaf in use.leaves)

    def allows(use: SiteUse) -> bool:
        alone = all(uses[leaf] == 1 and leaf not in plan.differentiable for leaf in use.leaves)
        known = hasattr(use.rule, "scaled_norm") and use.site.mask is None
        return alone and known and all(stacked for _, stacked in use.stack)

    return {i for i, use in enumerate(plan.sites) if allows(use) and is_isometric(plan, use)}


class Choice(NamedTuple):
    """The way of a leaf: "keep", "gram" or "stream", why, and the seconds estimated for each."""

    way: str
    reason: str
    seconds: Mapping[str, float] | None

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.way} ({self.reason})"
        told = ", ".join(f"{way} {1000 * s:.2g}" for way, s in self.seconds.items())
        return f"{self.way} ({self.reason}: {told} ms)"


def choice(uses: Sequence[tuple[SiteUse, bool]], batch_size: int, leaf_size: int) -> Choice:
    """Returns the way to the norms and the clipped sum of a leaf.

    Args:
      uses: the leaf's sites, each with whether its preparation keeps norms.
      batch_size: B.
      leaf_size: the number of entries of the leaf.
    """
    kept_bytes = 4 * batch_size * leaf_size
    if not uses:
        return Choice("keep", "no site", None)
    if kept_bytes <= _SMALL_BYTES:
        return Choice("keep", "small", None)
    total = {"keep": 0.0, "gram": 0.0, "stream": 0.0}
    for use, _ in uses:
        if not (offers(use, "square_norm") and offers(use, "weighted_sum")):
            return Choice("keep", "the rule knows nothing better", None)
        seconds = estimate(use, batch_size)
        if seconds is None:
            return Choice("gram", "the rule's square_norm", None)
        if leaf_size < use.site.parameter.size:
            # Gradients of the operand are dropped a few at a time, and those of the leaf are kept:
            # what a stream does before its sum, which is half of it.
            seconds = {**seconds, "keep": seconds["stream"] / 2 + kept_bytes / _WRITTEN}
        for way in total:
            total[way] += seconds[way]
    if not all(isometric for _, isometric in uses):
        del total["gram"]  # The norm of the operand's gradient is not that of the leaf's.
    best = min(total, key=lambda way: total[way])
    others = [way for way in total if way != "keep"]
    other = min(others, key=lambda way: total[way])
    if best == "keep" and kept_bytes > _LARGE_BYTES and total[other] < _LARGE_FACTOR * total[best]:
        best = other
    return Choice(best, "estimates", total)


def keeps(leaf: PerExample) -> bool:
    """Says whether the per-example gradients of a leaf should be held as an array."""
    uses = [(use.preparation.use, use.preparation.isometric) for use in leaf.uses]
    return choice(uses, leaf.batch_size, math.prod(leaf.leaf_shape)).way == "keep"
