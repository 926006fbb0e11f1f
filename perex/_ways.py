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
from typing import Any, NamedTuple

import jax

from perex._preparation import is_direction, is_isometric
from perex._rules import knows_norms
from perex._rules.chunks import known_size
from perex._steps import Plan, SiteUse

# What costs little to hold is kept: an estimate cannot tell such small times apart.
_SMALL_BYTES = 1 << 17
# Above this size memory counts too: gradients are kept only where that is faster by this factor.
_LARGE_BYTES = 1 << 23
_LARGE_FACTOR = 1.3
# Bytes a second of gradients that are written, read twice, and fit in no cache.
_WRITTEN = 1.5e9


def merges(use: SiteUse) -> bool:
    """Whether the site is one of its rule's: not repeated, or repeated and merged into one."""
    repeated = any(not stacked for _, stacked in use.stack)
    return not repeated or hasattr(use.rule, "merge_repeats")


def estimate(use: SiteUse, batch_size: int) -> dict[str, float] | None:
    """Returns estimated seconds of each way through one site, or None if the rule does not say.

    Args:
      use: the site.
      batch_size: B.
    """
    if not (hasattr(use.rule, "estimate") and merges(use)):
        return None
    repeats = math.prod(length for length, stacked in use.stack if not stacked)
    steps = math.prod(length for length, stacked in use.stack if stacked)
    site = use.site
    if len(use.stack) > sum(stacked for _, stacked in use.stack):
        site = _merged_site(use, repeats)
    seconds = use.rule.estimate(site, known_size(batch_size))
    return {way: steps * s for way, s in seconds.items()}


def _merged_site(use: SiteUse, repeats: int) -> Any:
    found = []

    def merge(inputs: tuple[Any, ...], cotangent: Any) -> None:
        found.append(use.rule.merge_repeats(use.site, inputs, cotangent)[0])

    def batched(struct: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, repeats, *struct.shape), struct.dtype)

    jax.eval_shape(merge, tuple(map(batched, use.site.inputs)), batched(use.site.out))
    return found[0]


def settled_sites(plan: Plan, batch_size: int) -> dict[int, str]:
    """Returns the sites whose norms and sums can be taken at once, by number, and their ways.

    These are the only uses of their leaf, rearrange it at most, and have another operand at each
    step of every scan around them: the norm of the site's gradient is that of the leaf's.
    """
    uses = Counter(leaf for use in plan.sites for leaf in use.leaves)
    ways = {}
    for number, use in enumerate(plan.sites):
        alone = all(uses[leaf] == 1 and leaf not in plan.differentiable for leaf in use.leaves)
        known = knows_norms(use.rule) and use.site.mask is None
        steps_apart = all(stacked for _, stacked in use.stack)
        if alone and known and steps_apart and is_isometric(plan, use):
            seconds = estimate(use, batch_size)
            faster = seconds is None or seconds["gram"] <= seconds["stream"]
            ways[number] = "gram" if faster else "stream"
    return ways


def is_in_a_branch(use: SiteUse) -> bool:
    """Whether a site stands in a branch of ``cond`` or ``switch``."""
    return any(region.form.kind == "cond" for region, _ in use.chain)


def accumulated_sites(plan: Plan) -> set[int]:
    """Returns the sites, by number, whose gradients are smaller than what they are made of.

    Their operand is the same at each step of some scan: its gradient is the sum over the steps.
    """
    chosen = set()
    for number, use in enumerate(plan.sites):
        repeats = math.prod(length for length, stacked in use.stack if not stacked)
        factors = sum(_bytes(x) for x in (*use.site.inputs, use.site.out))
        # Twice: the sum so far, and what a step adds.
        if repeats > 1 and 2 * _bytes(use.site.parameter) <= repeats * factors:
            if is_isometric(plan, use):
                chosen.add(number)
    return chosen


def _bytes(struct: jax.ShapeDtypeStruct) -> int:
    return math.prod(struct.shape) * struct.dtype.itemsize


def is_small(batch_size: int, leaf_size: int) -> bool:
    """Whether the gradients of a leaf cost little to hold."""
    return 4 * known_size(batch_size) * leaf_size <= _SMALL_BYTES


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


def open_ways(uses: Sequence[tuple[SiteUse, bool]], dense: bool = False) -> tuple[str, ...]:
    """Returns the ways to the norms and the clipped sum of a leaf that exist.

    Args:
      uses: the leaf's sites, each with whether its preparation keeps norms.
      dense: whether the leaf has other uses, whose gradients are held as an array.
    """
    if not uses:
        return ("keep",)

    def has_norms(use: SiteUse, isometric: bool) -> bool:
        # Else the norm of the operand's gradient is not that of the leaf's.
        keeps = isometric and use.site.mask is None
        return knows_norms(use.rule) and merges(use) and (keeps or is_direction(use, isometric))

    if dense or not all(has_norms(*pair) for pair in uses):
        return ("keep", "stream")
    return ("keep", "gram", "stream")


def choice(
    uses: Sequence[tuple[SiteUse, bool]], batch_size: int, leaf_size: int, dense: bool = False
) -> Choice:
    """Returns the way to the norms and the clipped sum of a leaf.

    Args:
      uses: the leaf's sites, each with whether its preparation keeps norms.
      batch_size: B.
      leaf_size: the number of entries of the leaf.
      dense: whether the leaf has other uses, whose gradients are held as an array.
    """
    kept_bytes = 4 * known_size(batch_size) * leaf_size
    ways = open_ways(uses, dense)
    if not uses:
        return Choice("keep", "no site", None)
    if is_small(batch_size, leaf_size):
        return Choice("keep", "small", None)
    total = dict.fromkeys(ways, 0.0)
    for use, isometric in uses:
        seconds = _seconds(use, isometric, batch_size, leaf_size)
        if seconds is None:
            if "gram" in ways:
                return Choice("gram", "the rule's norms", None)
            way = "stream" if kept_bytes > _LARGE_BYTES else "keep"
            return Choice(way, "the rule knows nothing better", None)
        for way in total:
            total[way] += seconds[way]
    best = min(total, key=lambda way: total[way])
    others = [way for way in total if way != "keep"]
    other = min(others, key=lambda way: total[way])
    if best == "keep" and kept_bytes > _LARGE_BYTES and total[other] < _LARGE_FACTOR * total[best]:
        best = other
    return Choice(best, "estimates", total)


def _seconds(
    use: SiteUse, isometric: bool, batch_size: int, leaf_size: int
) -> Mapping[str, float] | None:
    """Returns estimated seconds of each way through one site for a leaf."""
    kept_bytes = 4 * known_size(batch_size) * leaf_size
    if is_direction(use, isometric):
        # Passes over an array of the leaf's size, one or one for each example.
        kept = 3 * kept_bytes / _WRITTEN
        return {"keep": kept, "gram": 16 * leaf_size / _WRITTEN, "stream": kept}
    seconds = estimate(use, batch_size)
    if seconds is not None and leaf_size < use.site.parameter.size:
        # Gradients of the operand are dropped a few at a time, and those of the leaf are kept:
        # what a stream does for the norms, which is half of it.
        return {**seconds, "keep": seconds["stream"] / 2 + kept_bytes / _WRITTEN}
    return seconds
