"""`Use`: the per-example gradient of a parameter through one site, as factors.

The gradient of an example at a site is linear in the cotangent of the site's result and, for the
rules of this library, linear in the site's inputs as well. Keeping these two *factors*, one can
have the gradients, only their norms, or a weighted sum over examples.

Letters: B examples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from perex import _compat
from perex._preparation import Preparation
from perex._rules import per_example, site_norms, site_sum
from perex._rules.certified import CertifiedNorms
from perex._taps import Factors


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("factors", "values"),
    meta_fields=("preparation",),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """One use of a parameter at a site, for a batch of examples.

    Attributes:
      factors: the site's inputs and the cotangent of its result, ``[B, *scans, ...]``.
      values: what the preparation needs, without an example axis.
      preparation: the way from the leaf to the site.
    """

    factors: Factors
    values: tuple[Any, ...]
    preparation: Preparation

    def operand_gradient(self) -> jax.Array:
        """Returns the gradient of the site's operand, ``[B, *stacked scans, *operand]``."""
        return self._by_step(per_example, 1)

    def puller(self) -> Callable[[jax.Array], jax.Array]:
        """Returns the function from one example's operand gradient to that of the leaf."""
        return self.preparation.puller(self.values, self._manual_axes())

    def _manual_axes(self) -> frozenset[str]:
        return _compat.manual_axes(jax.typeof(self.factors.cotangent))

    def direction(self) -> jax.Array:
        """Returns the leaf's gradient ``[*leaf]`` for a cotangent of one of an operand of size one.

        The gradient of every example is a multiple of it.
        """
        operand = self.preparation.use.site.parameter
        return self.puller()(jnp.ones(operand.shape, operand.dtype))

    def norms(self, way: str) -> CertifiedNorms:
        """Returns the norms ``[B]`` of the operand's gradients, see `site_norms`."""
        columns = self._by_step(
            lambda rule, site, inputs, cotangent: site_norms(rule, site, way, inputs, cotangent), 1
        )
        return CertifiedNorms.combined(
            jax.tree.map(lambda x: x.reshape(x.shape[0], math.prod(x.shape[1:])), columns)
        )

    def weighted_sum(self, weights: jax.Array, way: str) -> jax.Array:
        """Returns the sum of weight times gradient ``[*leaf]``, as measured by `norms`."""
        if self.preparation.is_direction:
            dtype = weights.dtype
            coefficients = self.operand_gradient().reshape(-1).astype(dtype)
            total = jnp.sum(jnp.where(weights != 0, weights * coefficients, 0))
            return total * self.direction().astype(dtype)
        total = self._by_step(
            lambda rule, site, inputs, cotangent: site_sum(
                rule, site, way, inputs, cotangent, weights
            ),
            0,
        )
        return self.preparation.pull_sum(total, self.values, self._manual_axes())

    def _by_step(self, function: Callable[..., Any], axis: int) -> Any:
        """Calls ``function(rule, site, inputs, cotangent)``, once for each operand.

        Steps of a scan that share one operand are merged into one use; where the operand differs
        from step to step, the results are stacked along ``axis``.
        """
        use = self.preparation.use
        lengths = [length for length, stacked in use.stack if stacked]
        repeated = len(lengths) < len(use.stack)

        def one(factors: Factors) -> Any:
            if repeated and hasattr(use.rule, "merge_repeats"):
                return function(use.rule, *use.rule.merge_repeats(use.site, *factors))
            if repeated:
                each = jax.vmap(partial(function, use.rule, use.site), in_axes=1)
                return each(*factors).sum(0)
            return function(use.rule, use.site, *factors)

        factors = self._arranged()
        if not lengths:
            return one(factors)
        results = jax.vmap(one, in_axes=1, out_axes=axis)(factors)
        return jax.tree.map(
            lambda x: x.reshape(*x.shape[:axis], *lengths, *x.shape[axis + 1 :]), results
        )

    def _arranged(self) -> Factors:
        """Returns the factors ``[B, S, R, ...]``: one axis for stacked, one for shared steps.

        Either axis is missing where there are no such steps.
        """
        stack = self.preparation.use.stack
        stacked = [i for i, (_, is_stacked) in enumerate(stack) if is_stacked]
        shared = [i for i, (_, is_stacked) in enumerate(stack) if not is_stacked]

        def arrange(x: jax.Array) -> jax.Array:
            order = [0, *(i + 1 for i in stacked), *(i + 1 for i in shared)]
            x = jnp.transpose(x, (*order, *range(len(order), x.ndim)))
            sizes = [math.prod(stack[i][0] for i in part) for part in (stacked, shared) if part]
            return x.reshape(x.shape[0], *sizes, *x.shape[len(order) :])

        return jax.tree.map(arrange, self.factors)

    def merged(self) -> tuple[Any, tuple[Any, ...], jax.Array] | None:
        """Returns (site, inputs, cotangent) of one equivalent site, or None where there is none."""
        use = self.preparation.use
        if any(stacked for _, stacked in use.stack):
            return None
        if not use.stack:
            return use.site, self.factors.inputs, self.factors.cotangent
        if not hasattr(use.rule, "merge_repeats"):
            return None
        return use.rule.merge_repeats(use.site, *self._arranged())


def merge_uses(uses: Sequence[Use], merged: dict[Any, Use] | None = None) -> tuple[Use, ...]:
    """Makes one use of those that repeat the same equation with the same operand.

    A recurrent loop written out in Python has a use of its weight at each step. As one use, their
    sum is one contraction, and so is its norm.

    Args:
      uses: the uses of one leaf.
      merged: what has been merged before, to be shared by leaves that have sites in common.

    Returns:
      The uses, fewer perhaps.
    """
    groups: list[list[Use]] = []
    kinds: dict[int, list[list[Use]]] = {}
    for use in uses:
        alike = kinds.setdefault(use.preparation.kind(), [])
        for group in alike:
            if _repeats(group[0], use):
                group.append(use)
                break
        else:
            alike.append([use])
            groups.append(alike[-1])
    return tuple(group[0] if len(group) == 1 else _stacked(group, merged) for group in groups)


def _repeats(first: Use, other: Use) -> bool:
    a, b = first.preparation, other.preparation
    if not hasattr(a.use.rule, "merge_repeats") or a.use.rule is not b.use.rule:
        return False
    if a.use.site != b.use.site or a.use.stack != b.use.stack:
        return False
    same = a.plan is b.plan and a.leaf == b.leaf and a.use.chain == b.use.chain
    return a == b or (same and a.use.variable == b.use.variable)


def _stacked(group: Sequence[Use], merged: dict[Any, Use] | None) -> Use:
    merged = {} if merged is None else merged
    key = tuple(id(use.factors) for use in group)
    first = group[0].preparation
    if key not in merged:
        factors = jax.tree.map(lambda *xs: jnp.stack(xs, axis=1), *(u.factors for u in group))
        merged[key] = dataclasses.replace(group[0], factors=factors)
    stack = ((len(group), False), *first.use.stack)
    preparation = dataclasses.replace(first, use=dataclasses.replace(first.use, stack=stack))
    return dataclasses.replace(group[0], factors=merged[key].factors, preparation=preparation)
