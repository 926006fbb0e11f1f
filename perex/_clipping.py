"""Clip per-example gradients: how a norm becomes a weight, and which leaves share a norm.

All that private training needs to know about an example is its norm. This module turns norms into
one weight an example, and says how far the weighted sum can move when an example is added or
removed. `perex.dp_clip` and `perex.clipped_grad` both stand on it.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from perex._norms import ScaledNorms, combine_norms, from_square_norms, is_factored
from perex._rules.certified import TOLERANCE, unit_roundoff

Groups = str | Callable[[str], Hashable]

MODES = ("clip", "automatic")
_GLOBAL, _LEAF = "global", "leaf"
_RELATIONS = {"add_or_remove_one": 1.0, "replace_one": 2.0}


class ClipWeights(NamedTuple):
    """What clipping does to each of B examples."""

    weights: jax.Array
    """`[B]`, at least float32: the factor of the example; exactly zero leaves the example out."""
    is_clipped: jax.Array
    """`[B]` bool: the weight is below one because of the norm."""
    is_finite: jax.Array
    """`[B]` bool: false where the gradient holds Inf or NaN. Padding counts as finite."""


class GroupWeights(NamedTuple):
    """`ClipWeights` of several leaves, each with the weights of its group."""

    weights: tuple[jax.Array, ...]
    """One `[B]` for each leaf."""
    norms: jax.Array
    """`[B]`: norms over all leaves, before clipping. Zero for padding."""
    is_clipped: jax.Array
    """`[B]` bool: clipped in at least one group."""
    is_finite: jax.Array
    """`[B]` bool, as in `ClipWeights`: one bad leaf spoils the example in all groups."""


def clip_weights(
    norms: ScaledNorms | jax.Array,
    l2_norm_clip: float,
    *,
    mode: str = "clip",
    gamma: float = 0.01,
    is_padding: jax.Array | None = None,
) -> ClipWeights:
    """Return the factor that brings each example's gradient within the clip norm C.

    Mode "clip" gives `min(1, C / norm)` (Abadi et al. 2016, arXiv:1607.00133), which leaves a norm
    of zero alone and is one everywhere when C is infinite. Mode "automatic" gives
    `C / (norm + gamma)` (Bu et al. 2022, arXiv:2206.07136), which scales small gradients up as
    well. With either, no weighted gradient is longer than C, as computed: where the term of the sum
    may be longer than the norm says, because products cancel, the upper end takes the place of the
    norm (see `perex._rules.certified` for the theorem).

    Args:
      norms: the norms, or square norms `[B]`.
      l2_norm_clip: C, at least zero; finite in mode "automatic".
      mode: "clip" or "automatic".
      gamma: the stabiliser of mode "automatic".
      is_padding: bool `[B]`, the examples to leave out.

    Returns:
      Weights, and which examples were clipped and which were finite, each `[B]`. Examples that are
      not finite and padding have weight zero.
    """
    if not isinstance(norms, ScaledNorms):
        norms = from_square_norms(norms)
    is_finite = jnp.isfinite(norms.squares)
    tolerance = TOLERANCE * unit_roundoff(norms.squares.dtype)
    root = jnp.maximum(jnp.sqrt(norms.squares), jnp.sqrt(norms.upper) / (1 + tolerance))
    # C / norm as a quotient of numbers that are in range, even where the norm itself is not.
    unit = jnp.maximum(norms.scale, 1)
    scaled_norm = norms.scale / unit * root
    scaled_clip = l2_norm_clip / unit
    if mode == "automatic":
        factor = scaled_clip / (scaled_norm + gamma / unit)
    else:
        longer = norms.scale * root > l2_norm_clip
        factor = jnp.where(longer, scaled_clip / jnp.where(longer, scaled_norm, 1), 1)
    included = is_finite
    if is_padding is not None:
        included = is_finite & ~is_padding
        is_finite = is_finite | is_padding
    return ClipWeights(jnp.where(included, factor, 0), included & (factor < 1), is_finite)


@dataclasses.dataclass(frozen=True)
class Clipping:
    """How gradients are clipped: which leaves share a norm, and how a norm becomes a weight.

    Attributes:
      l2_norm_clip: C of each group, or a mapping from group to its C.
      per: "global" (all leaves are one group), "leaf" (each leaf is a group, called by its path),
        or a function from a leaf's path, such as "params/Conv_0/kernel", to the name of its group.
      mode: "clip" or "automatic", see `clip_weights`.
      gamma: the stabiliser of mode "automatic".

    Raises:
      ValueError: a value is out of range or a name unknown.
      TypeError: a value is of the wrong type.
    """

    l2_norm_clip: float | Mapping[Hashable, float]
    per: Groups = _GLOBAL
    mode: str = "clip"
    gamma: float = 0.01

    def __post_init__(self):
        """Check the arguments."""
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}; got {self.mode!r}.")
        if not callable(self.per) and self.per not in (_GLOBAL, _LEAF):
            raise ValueError(
                f"per must be {_GLOBAL!r}, {_LEAF!r} or a function from a leaf's path to the name "
                f"of its group; got {self.per!r}."
            )
        if self.mode == "automatic":
            nonnegative(self.gamma, "gamma", positive=True, finite=True)
        if isinstance(self.l2_norm_clip, Mapping) and self.per == _GLOBAL:
            raise ValueError('A mapping as l2_norm_clip needs groups: per="leaf" or a function.')
        for clip in clip_norms(self.l2_norm_clip):
            nonnegative(clip, "l2_norm_clip", finite=self.mode == "automatic")

    def groups(self, paths: Sequence[str]) -> tuple[Hashable, ...]:
        """Return the group of each leaf, given the leaves' paths."""
        if callable(self.per):
            return tuple(self.per(path) for path in paths)
        return tuple(paths) if self.per == _LEAF else (_GLOBAL,) * len(paths)

    def clips(self, paths: Sequence[str]) -> dict[Hashable, float]:
        """Return the clip norm of each group that occurs."""
        occurring = dict.fromkeys(self.groups(paths))
        if not isinstance(self.l2_norm_clip, Mapping):
            return dict.fromkeys(occurring, float(self.l2_norm_clip))
        if set(occurring) != set(self.l2_norm_clip):
            raise ValueError(
                f"l2_norm_clip has the groups {sorted(map(str, self.l2_norm_clip))}, but the "
                f"leaves fall into {sorted(map(str, occurring))}. Give each group one clip norm."
            )
        return {group: float(self.l2_norm_clip[group]) for group in occurring}

    def sensitivity(self, paths: Sequence[str]) -> float:
        """Return how far, in L2 norm, one example more or less moves the clipped sum."""
        return math.hypot(*self.clips(paths).values())

    def weights(
        self,
        norms: Sequence[ScaledNorms | jax.Array],
        paths: Sequence[str],
        is_padding: jax.Array | None = None,
    ) -> GroupWeights:
        """Return the weights of B examples in each leaf.

        Args:
          norms: one entry for each leaf: norms, or square norms `[B]`.
          paths: the leaves' paths, in the same order.
          is_padding: bool `[B]`, the examples to leave out.

        Returns:
          Weights for each leaf, and what happened to each example.
        """
        norms = [n if isinstance(n, ScaledNorms) else from_square_norms(n) for n in norms]
        groups, clips = self.groups(paths), self.clips(paths)
        each = {
            group: clip_weights(
                combine_norms([n for n, g in zip(norms, groups, strict=True) if g == group]),
                clip,
                mode=self.mode,
                gamma=self.gamma,
                is_padding=is_padding,
            )
            for group, clip in clips.items()
        }
        total = combine_norms(norms).values()
        is_finite = jnp.ones_like(total, bool)
        is_clipped = jnp.zeros_like(total, bool)
        for result in each.values():
            is_finite &= result.is_finite
            is_clipped |= result.is_clipped
        return GroupWeights(
            tuple(jnp.where(is_finite, each[group].weights, 0) for group in groups),
            total if is_padding is None else jnp.where(is_padding, 0, total),
            is_clipped & is_finite,
            is_finite,
        )


def sensitivity(
    l2_norm_clip: float | Mapping[Hashable, float],
    *,
    per: Groups = "global",
    params: Any = None,
    relation: str = "add_or_remove_one",
) -> float:
    """Return how far, in L2 norm, one example can move the clipped sum: a number for accounting.

    An example moves group g by at most C_g, so all of them by `sqrt(sum of C_g ** 2)`: C itself for
    a single group, `C * sqrt(number of leaves)` for `per="leaf"`. Modes "clip" and "automatic" have
    the same sensitivity. To replace an example is to remove one and add another, twice as far.
    `dp_clip` scales its noise by the sensitivity to "add_or_remove_one", which goes with Poisson
    sampling.

    Args:
      l2_norm_clip: as in `dp_clip`. The groups of a mapping are taken to be all there are, unless
        `params` is given.
      per: as in `dp_clip`.
      params: the parameters, to find the groups where `per` is not "global" and the clip norm is
        one number.
      relation: "add_or_remove_one" or "replace_one", what makes two data sets neighbours.

    Returns:
      The sensitivity; infinite where a clip norm is.

    Raises:
      ValueError: an argument is out of range or missing.

    Example:
      >>> import perex
      >>> perex.sensitivity({"body": 3.0, "head": 4.0})
      5.0
    """
    if relation not in _RELATIONS:
        raise ValueError(f"relation must be one of {', '.join(_RELATIONS)}; got {relation!r}.")
    if params is None and isinstance(l2_norm_clip, Mapping):
        clips = [nonnegative(clip, "l2_norm_clip") for clip in l2_norm_clip.values()]
        return _RELATIONS[relation] * math.hypot(*clips)
    clipping = Clipping(l2_norm_clip, per)
    if params is None and per != "global":
        raise ValueError(
            "sensitivity: give params, as the sensitivity depends on the number of groups."
        )
    paths = [""] if per == "global" else flatten(params)[0]
    return _RELATIONS[relation] * clipping.sensitivity(paths)


def flatten(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Return the paths and values of the leaves, factored ones whole, and the tree's structure."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_factored)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs]
    return paths, [leaf for _, leaf in pairs], treedef


def clip_norms(l2_norm_clip: float | Mapping[Hashable, float]) -> list[float]:
    """Return all clip norms that the argument holds."""
    return list(l2_norm_clip.values()) if isinstance(l2_norm_clip, Mapping) else [l2_norm_clip]


def nonnegative(value: Any, name: str, *, positive: bool = False, finite: bool = False) -> float:
    """Return a value as a float, or raise an error that names the argument."""
    try:
        number = float(value)
    except TypeError as error:
        raise TypeError(f"{name} must be a number known when tracing; got {value!r}.") from error
    if math.isnan(number) or number < 0 or (positive and number == 0):
        raise ValueError(f"{name} must be {'above' if positive else 'at least'} 0; got {value!r}.")
    if finite and math.isinf(number):
        raise ValueError(f"{name} must be finite; got {value!r}.")
    return number
