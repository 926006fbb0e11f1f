"""The plan: where parameters meet the example, decided before anything is computed.

Every variable of a program depends on parameters (bit `PARAM`), on the example (bit `DATA`), on
both or on neither. An equation whose inputs carry no `DATA` is *preparation*: it is the same for
all examples. An equation with a rule, one `PARAM` operand and some `DATA` operand is a *site*. Any
other equation that depends on the example is evaluated as it stands, and parameters that it reads
directly are differentiated by JAX, batched by ``vmap``: the *fallback*, for that use alone.

Equations with bodies (``scan``, ``cond``, ``checkpoint``) become *regions*, planned in turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from perex import _compat, _regions
from perex._masks import Knowledge
from perex._rules import Site, find_rule
from perex._steps import (
    ACTIVE,
    DATA,
    PARAM,
    Apply,
    Fallback,
    Plan,
    Prepare,
    Region,
    SiteUse,
    Tap,
)
from perex._trace import Equation, Program


def classify(program: Program, input_bits: Sequence[int]) -> tuple[int, ...]:
    """Returns the dependence of every variable, from that of the inputs."""
    bits = [0] * len(program.avals)
    for variable, value in zip(program.inputs, input_bits, strict=True):
        bits[variable] = value
    for equation in program.equations:
        union = 0
        for variable in equation.inputs:
            union |= bits[variable]
        stopped = equation.primitive is _compat.primitives.stop_gradient_p
        for variable in equation.outputs:
            differentiable = _is_inexact(program.avals[variable]) and not stopped
            bits[variable] = union if differentiable else union & ~PARAM
    return tuple(bits)


def make_plan(
    program: Program,
    input_bits: Sequence[int],
    input_leaves: Sequence[frozenset[int]],
    options: Mapping[str, Any],
    differentiated_outputs: frozenset[int],
    fixed: Callable[[int], bool] = lambda variable: True,
    knowledge: Knowledge | None = None,
    leaf_sizes: Mapping[int, int] | None = None,
) -> Plan:
    """Plans a program.

    Args:
      program: the program.
      input_bits: the dependence of each input.
      input_leaves: the parameter leaves on which each input depends.
      options: handed on to the sites.
      differentiated_outputs: positions of the outputs through which gradients flow.
      fixed: whether an input may enter a site's preparation; False for the carries of loops.
      knowledge: what is known of values beforehand, to find the masks of convolutions.
      leaf_sizes: how many entries each parameter leaf has; by default the inputs are the leaves.

    Returns:
      The plan.
    """
    knowledge = knowledge or Knowledge(program)
    if leaf_sizes is None:
        leaf_sizes = {v: program.avals[v].size for v in frozenset().union(*input_leaves)}
    planner = _Planner(program, input_bits, input_leaves, options, fixed, knowledge, leaf_sizes)
    return planner.plan(differentiated_outputs)


class _Planner:
    def __init__(
        self,
        program: Program,
        input_bits: Sequence[int],
        input_leaves: Sequence[frozenset[int]],
        options: Mapping[str, Any],
        fixed: Callable[[int], bool],
        knowledge: Knowledge,
        leaf_sizes: Mapping[int, int],
    ) -> None:
        self.program = program
        self.leaf_sizes = leaf_sizes
        self.bits = classify(program, input_bits)
        self.options = options
        self.fixed = fixed
        self.knowledge = knowledge
        self.leaves: dict[int, frozenset[int]] = dict(
            zip(program.inputs, input_leaves, strict=True)
        )
        self.sites: list[Any] = []
        self.fallbacks: list[Fallback] = []

    def plan(self, differentiated_outputs: frozenset[int]) -> Plan:
        drafts = [self._draft(equation) for equation in self.program.equations]
        plain: set[int] = set()
        differentiable: set[int] = set()
        for position, variable in enumerate(self.program.outputs):
            if self.bits[variable] == PARAM and position in differentiated_outputs:
                differentiable.add(variable)
                self._fall_back(None, variable, "it is part of the result by itself")
            elif not self.bits[variable] & DATA:
                plain.add(variable)
        steps = []
        for step in reversed(drafts):
            if isinstance(step, Prepare):
                outputs = step.equation.outputs
                wants_plain = not plain.isdisjoint(outputs) or bool(step.equation.source.effects)
                wants_differentiable = not differentiable.isdisjoint(outputs)
                if wants_plain:
                    plain.update(step.equation.inputs)
                if wants_differentiable:
                    self._want(step.equation.inputs, plain, differentiable)
                step = Prepare(step.equation, wants_plain, wants_differentiable)
            elif isinstance(step, Apply):
                self._want(step.equation.inputs, plain, differentiable)
                if step.found is not None:
                    plain.update(mask.variable for mask in step.found.masks)
            elif isinstance(step, Tap):
                plain.update(v for v in step.equation.inputs if not self.bits[v] & DATA)
            else:
                wanted_plain, wanted_differentiable = step.form.wanted(
                    step.equation, step.plans, self.bits
                )
                plain.update(wanted_plain)
                differentiable.update(wanted_differentiable)
            steps.append(step)
        inputs = frozenset(v for v in self.program.inputs if self.bits[v] == PARAM)
        return Plan(
            self.program,
            self.bits,
            tuple(reversed(steps)),
            tuple(self.sites),
            tuple(self.fallbacks),
            inputs & plain,
            inputs & differentiable,
            not self.sites
            and not any(isinstance(d, Region) or getattr(d, "apart", None) for d in drafts),
        )

    def _want(self, inputs: Sequence[int], plain: set[int], differentiable: set[int]) -> None:
        for variable in inputs:
            if self.bits[variable] == PARAM:
                differentiable.add(variable)
            elif not self.bits[variable]:
                plain.add(variable)

    def _leaves(self, variables: Sequence[int]) -> frozenset[int]:
        return frozenset().union(
            *(self.leaves.get(v, frozenset()) for v in variables if self.bits[v] & PARAM)
        )

    def _fall_back(self, equation: Equation | None, variable: int, reason: str) -> None:
        self.fallbacks.append(Fallback(equation, self._leaves([variable]), reason))

    def _draft(self, equation: Equation) -> Any:
        leaves = self._leaves(equation.inputs)
        for variable in equation.outputs:
            self.leaves[variable] = leaves
        if not any(self.bits[v] & DATA for v in equation.inputs):
            return Prepare(equation, False, False)
        if not any(self.bits[v] & PARAM for v in equation.inputs):
            return Apply(equation, self.knowledge.find(equation))
        form = _regions.form_of(equation)
        if form is not None:
            return self._region(equation, form)
        parameters = [i for i, v in enumerate(equation.inputs) if self.bits[v] == PARAM]
        if not parameters:
            return self._apply(equation)
        reason = self._tap(equation, parameters)
        if isinstance(reason, Tap):
            return reason
        for position in parameters:
            self._fall_back(equation, equation.inputs[position], reason)
        return self._apply(equation)

    def _apply(self, equation: Equation) -> Apply:
        found = self.knowledge.find(equation)
        convolution = equation.primitive is _compat.primitives.conv_general_dilated_p
        if found is not None or not convolution or not self.bits[equation.inputs[1]] & PARAM:
            return Apply(equation, found)
        return Apply(equation, apart=self._site(equation, 1))

    def _site(self, equation: Equation, argument: int, mask: Any = None) -> Site:
        return Site(
            equation.primitive,
            equation.params,
            argument,
            tuple(_struct(self.program.avals[v]) for v in equation.inputs),
            _struct(self.program.avals[equation.outputs[0]]),
            self.options,
            _compat.source_summary(equation.source),
            mask,
        )

    def _tap(self, equation: Equation, parameters: Sequence[int]) -> Tap | str:
        """Returns the step for a site, or the reason why the equation is none."""
        rule = find_rule(equation.primitive)
        if rule is None:
            return f"'{equation.primitive}' has no per-example rule"
        if len(parameters) > 1:
            return "more than one operand is computed from parameters alone"
        (argument,) = parameters
        variable = equation.inputs[argument]
        _, required = self.program.preparation(variable)
        if not all(self.fixed(v) for v in required):
            return "the parameter is computed from what a loop carries from step to step"
        found = self.knowledge.find(equation)
        if found is not None and found.masks:
            return f"masked convolution, {found.plan.describe()}"
        site = self._site(equation, argument, None if found is None else found.plan)
        leaves = self._leaves([variable])
        largest = max((self.leaf_sizes[leaf] for leaf in leaves), default=0)
        if hasattr(rule, "pays") and not rule.pays(site, largest):
            return "nothing is faster for it than vmap(grad)"
        reason = rule.covers(site) if hasattr(rule, "covers") else None
        if reason is not None:
            return reason
        index = len(self.sites)
        self.sites.append(SiteUse(site, rule, variable, (), (), required, leaves, equation))
        inputs = equation.inputs[:argument] + equation.inputs[argument + 1 :]
        return Tap(equation, index, site, tuple(self.bits[v] == ACTIVE for v in inputs))

    def _enter(self, equation: Equation, body: _regions.Body) -> Knowledge:
        positions = range(len(body.program.inputs))
        operands = [
            None if body.carried(i) else equation.inputs[body.operands[i]] for i in positions
        ]
        return self.knowledge.enter(body.program, operands, [body.stacked(i) for i in positions])

    def _region(self, equation: Equation, form: _regions.Form) -> Region | Apply:
        plans, first = [], []
        for body in form.bodies:
            operands = [equation.inputs[i] for i in body.operands]
            bits = form.body_bits(body, [self.bits[v] for v in operands], classify)
            for variable, operand_bits, body_bits in zip(
                operands, [self.bits[v] for v in operands], bits, strict=True
            ):
                if operand_bits == PARAM and body_bits != PARAM:
                    self._fall_back(equation, variable, "it travels in the carry of a loop")
            # What depends on the example enters no preparation, and its own way is long.
            closures = {
                v: self.program.preparation(v)[1] for v in operands if not self.bits[v] & DATA
            }
            free = {
                inner: not body.carried(position) and all(map(self.fixed, closures.get(outer, ())))
                for position, (inner, outer) in enumerate(
                    zip(body.program.inputs, operands, strict=True)
                )
            }
            plans.append(
                make_plan(
                    body.program,
                    bits,
                    [self._leaves([v]) for v in operands],
                    self.options,
                    frozenset(range(len(body.program.outputs))),
                    lambda variable, free=free: free.get(variable, True),
                    self._enter(equation, body),
                    self.leaf_sizes,
                )
            )
            first.append(len(self.sites))
            self.sites.extend([None] * len(plans[-1].sites))  # filled below, once the region exists
        if all(plan.plain_enough for plan in plans):
            self.fallbacks.extend(f for plan in plans for f in plan.fallbacks)
            return Apply(equation)
        region = Region(equation, form, tuple(plans), tuple(first))
        for number, (body, plan) in enumerate(zip(form.bodies, plans, strict=True)):
            outer = dict(
                zip(body.program.inputs, (equation.inputs[i] for i in body.operands), strict=True)
            )
            position = {v: p for p, v in enumerate(body.program.inputs)}
            for offset, use in enumerate(plan.sites):
                required = frozenset().union(
                    *(self.program.preparation(outer[v])[1] for v in use.required)
                )
                stack = use.stack
                if form.length is not None:
                    stacked = any(body.stacked(position[v]) for v in use.required)
                    stack = ((form.length, stacked), *stack)
                self.sites[first[number] + offset] = dataclasses.replace(
                    use, chain=((region, number), *use.chain), stack=stack, required=required
                )
            self.fallbacks.extend(plan.fallbacks)
        return region


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _is_inexact(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)
