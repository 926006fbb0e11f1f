"""The way from parameter leaves to the operand of a site, and back.

What is computed from parameters alone before a site (casts, transposes, masks, weight
standardisation, low-rank products) is the site's preparation. A rule gives per-example gradients
with respect to the prepared operand; they are pulled back to a leaf through the preparation, which
is the same for all examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from perex import _compat
from perex._rules.registry import same_params
from perex._steps import PARAM, Plan, Region, SiteUse
from perex._trace import Equation

_P = _compat.primitives
# Rearrangements of numbers: their transpose keeps the L2 norm.
# (The transpose of a slice puts zeros around it.)
_ISOMETRIES = {
    _P.reshape_p, _P.transpose_p, _P.squeeze_p, _P.rev_p, _P.copy_p, _P.neg_p, _P.slice_p,
}  # fmt: skip


def prepare(
    plan: Plan, chain: tuple[tuple[Region, int], ...], variable: int, values: Mapping[int, Any]
) -> Any:
    """Computes the operand of a site from the inputs of a plan.

    Args:
      plan: the plan.
      chain: the regions between the plan and the site.
      variable: the operand, a variable of the innermost plan.
      values: the plan's inputs, and its constants where they are given anew.

    Returns:
      The operand, with an axis in front for each scan in which it differs from step to step.
    """
    if not chain:
        return plan.program.evaluate((variable,), values)[0]
    (region, number), *rest = chain
    body, inner = region.form.bodies[number], region.plans[number]
    required = sorted(required_inputs(inner, tuple(rest), variable))
    position = {v: p for p, v in enumerate(body.program.inputs)}
    positions = [position[v] for v in required]
    outer = tuple(region.equation.inputs[body.operands[p]] for p in positions)
    operands = plan.program.evaluate(outer, values)

    def within(*operands: Any) -> Any:
        named = dict(zip(required, operands, strict=True))
        return prepare(inner, tuple(rest), variable, named)

    axes = [0 if body.stacked(p) else None for p in positions]
    if any(axis == 0 for axis in axes):
        return jax.vmap(within, in_axes=axes)(*operands)
    return within(*operands)


def required_inputs(
    plan: Plan, chain: tuple[tuple[Region, int], ...], variable: int
) -> frozenset[int]:
    """Returns the inputs of a plan from which the operand of a site is prepared."""
    if not chain:
        return plan.preparation(variable)[1]
    return frozenset().union(*(plan.preparation(v)[1] for v in _outer_operands(chain, variable)))


def _outer_operands(chain: tuple[tuple[Region, int], ...], variable: int) -> list[int]:
    (region, number), *rest = chain
    body, inner = region.form.bodies[number], region.plans[number]
    outer = dict(
        zip(body.program.inputs, (region.equation.inputs[p] for p in body.operands), strict=True)
    )
    return [outer[v] for v in required_inputs(inner, tuple(rest), variable)]


def required_constants(
    plan: Plan, chain: tuple[tuple[Region, int], ...], variable: int
) -> tuple[int, ...]:
    """Returns the constants of a plan's program from which the operand of a site is prepared."""
    variables = [variable] if not chain else _outer_operands(chain, variable)
    read = set(variables)
    for v in variables:
        for equation in plan.preparation(v)[0]:
            read.update(equation.inputs)
    return tuple(sorted(v for v in read if v in plan.program.constants))


def steps(plan: Plan, use: SiteUse) -> list[tuple[Plan, Equation]]:
    """Returns the equations of a preparation, outermost first, each with the plan it stands in."""
    found, chain = [], use.chain
    while True:
        variables = _outer_operands(chain, use.variable) if chain else [use.variable]
        seen: set[int] = set()
        for variable in variables:
            for equation in plan.preparation(variable)[0]:
                if equation.outputs[0] not in seen:
                    seen.update(equation.outputs)
                    found.append((plan, equation))
        if not chain:
            return found
        (region, number), *rest = chain
        plan, chain = region.plans[number], tuple(rest)


def is_isometric(plan: Plan, use: SiteUse) -> bool:
    """Whether pulling a gradient back to the leaf keeps its norm and needs no values.

    True where the preparation is a chain of rearrangements and casts of a single leaf.
    """
    if len(use.leaves) != 1 or len(required_inputs(plan, use.chain, use.variable)) != 1:
        return False
    for owner, equation in steps(plan, use):
        if not _is_isometry(owner, equation):
            return False
    return True


def is_direction(use: SiteUse, isometric: bool) -> bool:
    """Whether leaves enter a site by one number, computed from them once."""
    return not isometric and use.site.parameter.size == 1 and not use.stack


def _is_isometry(plan: Plan, equation: Equation) -> bool:
    if len(equation.inputs) != 1 or plan.dependence[equation.outputs[0]] != PARAM:
        return False
    source = plan.program.avals[equation.inputs[0]]
    result = plan.program.avals[equation.outputs[0]]
    if equation.primitive in _ISOMETRIES:
        return True
    if equation.primitive is _P.broadcast_in_dim_p:
        return source.size == result.size
    if equation.primitive is _P.convert_element_type_p:
        real = jax.numpy.floating
        return jax.numpy.issubdtype(source.dtype, real) and jax.numpy.issubdtype(result.dtype, real)
    return False


@dataclasses.dataclass(frozen=True, eq=False)
class Preparation:
    """The preparation of one site, as seen from one leaf.

    Two preparations are equal where their equations are, so that a jitted consumer of per-example
    gradients is compiled once.

    Attributes:
      plan: the plan of the whole loss.
      use: the site.
      leaf: the leaf, an input of the plan's program.
      inputs: the inputs and constants whose values are needed, in order; empty if isometric.
      isometric: whether the preparation merely rearranges the leaf.
    """

    plan: Plan
    use: SiteUse
    leaf: int
    inputs: tuple[int, ...]
    isometric: bool

    @classmethod
    def of(cls, plan: Plan, use: SiteUse, leaf: int) -> Preparation:
        """Returns the preparation of ``use`` as seen from ``leaf``."""
        isometric = is_isometric(plan, use)
        inputs: tuple[int, ...] = ()
        if not isometric:
            inputs = tuple(sorted(use.required)) + required_constants(plan, use.chain, use.variable)
        return cls(plan, use, leaf, inputs, isometric)

    @property
    def is_direction(self) -> bool:
        """Whether the leaf enters by one number, so that all gradients are multiples of one."""
        return is_direction(self.use, self.isometric)

    @property
    def is_identity(self) -> bool:
        """Whether the operand is the leaf itself."""
        return self.isometric and not steps(self.plan, self.use)

    def puller(
        self, values: tuple[Any, ...], manual_axes: frozenset[Any]
    ) -> Callable[[jax.Array], jax.Array]:
        """Returns the function from a cotangent of the operand to the cotangent of the leaf.

        It is linear, of one example, and all that depends on values alone is computed now.

        Args:
          values: the values of `inputs`.
          manual_axes: the manual mesh axes over which cotangents vary.

        Returns:
          A function of a cotangent like the operand, with an axis in front for each scan in which
          it differs from step to step.
        """
        if self.is_identity:
            return lambda cotangent: cotangent
        named = dict(zip(self.inputs, values, strict=True))
        aval = self.plan.program.avals[self.leaf]
        if self.isometric:
            named[self.leaf] = jax.numpy.zeros(aval.shape, aval.dtype)

        def operand(leaf: Any) -> Any:
            return prepare(self.plan, self.use.chain, self.use.variable, {**named, self.leaf: leaf})

        leaf = _compat.vary_over(jax.numpy.asarray(named[self.leaf]), manual_axes)
        _, pull = jax.vjp(operand, leaf)
        return lambda cotangent: pull(cotangent)[0]

    def pull_sum(
        self, total: jax.Array, values: tuple[Any, ...], manual_axes: frozenset[Any]
    ) -> jax.Array:
        """Pulls a sum back to the leaf without rounding it to the operand's dtype.

        The pull-back takes the operand's dtype. It is linear, so a sum of higher precision goes
        through in parts, each rounding error of the last one.

        Args:
          total: a sum of gradients of the operand, in at least its dtype.
          values: see `puller`.
          manual_axes: see `puller`.
        """
        if self.is_identity:
            return total
        operand = self.use.site.parameter.dtype
        parts = -(-jax.numpy.finfo(total.dtype).nmant // (jax.numpy.finfo(operand).nmant + 1))
        pulled, pull = None, self.puller(values, manual_axes)
        for _ in range(parts):
            part = total.astype(operand)
            total = total - part.astype(total.dtype)
            result = pull(part).astype(total.dtype)
            pulled = result if pulled is None else pulled + result
        return pulled  # type: ignore[return-value]

    def _key(self) -> tuple[Any, ...]:
        use = self.use
        return (use.site, use.stack, self.leaf, self.isometric, self.inputs)

    def __hash__(self) -> int:
        return hash((self.use.site, self.use.stack, self.isometric))

    def kind(self) -> int:
        """Returns a number that is the same for equal preparations, and mostly not for others."""
        equations = [equation for _, equation in steps(self.plan, self.use)]
        names = tuple(equation.primitive for equation in equations)
        try:
            return hash((self, names, *(frozenset(e.params.items()) for e in equations)))
        except TypeError:  # Some parameter has no hash.
            return hash((self, names))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Preparation) or self._key() != other._key():
            return False
        own, others = steps(self.plan, self.use), steps(other.plan, other.use)
        if len(own) != len(others):
            return False
        # A chain of rearrangements is told by its equations. Otherwise it also matters which reads
        # what, and within a loop that is more than can be compared.
        wired = not self.isometric
        if wired and (self.use.chain or other.use.chain or self.use.variable != other.use.variable):
            return False
        for (_, a), (_, b) in zip(own, others, strict=True):
            if a.primitive is not b.primitive or not same_params(a.params, b.params):
                return False
            if wired and (a.inputs != b.inputs or a.outputs != b.outputs):
                return False
        return True
