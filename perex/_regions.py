"""Equations with bodies: how operands enter the bodies of ``scan``, ``cond`` and ``checkpoint``.

This is the static half; `perex._control_flow` re-emits the equations over the evaluator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from perex import _compat
from perex._trace import Equation, Program, flatten

# What a variable depends on, as bits: parameters, the example.
PARAM, DATA = 1, 2


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A body of an equation.

    Attributes:
      program: the body as a program.
      operands: for each input of the program, the position of the equation's operand.
      carries: the range of inputs that a loop carries; empty outside loops.
      slices: the range of inputs that are slices of the operand, one a step.
    """

    program: Program
    operands: tuple[int, ...]
    carries: range = range(0)
    slices: range = range(0)

    def carried(self, position: int) -> bool:
        """Whether an input is carried from step to step."""
        return position in self.carries

    def stacked(self, position: int) -> bool:
        """Whether an input is a slice of the operand."""
        return position in self.slices


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """The form of an equation with bodies.

    Attributes:
      kind: ``"scan"``, ``"cond"`` or ``"checkpoint"``.
      bodies: its bodies.
      selector: the positions of operands that enter no body (the index of ``cond``).
      length: the number of steps of a loop, else None.
    """

    kind: str
    bodies: tuple[Body, ...]
    selector: tuple[int, ...] = ()
    length: int | None = None

    def body_bits(
        self,
        body: Body,
        operand_bits: Sequence[int],
        classify: Callable[[Program, Sequence[int]], tuple[int, ...]],
    ) -> list[int]:
        """Returns the dependence of the body's inputs.

        A carry joins what enters it and what each step leaves in it. A carry that depends on
        parameters alone is treated as depending on the example too: as the parameter operand of a
        site it would differ from step to step.
        """
        bits = list(operand_bits)
        while True:
            outputs = [classify(body.program, bits)[v] for v in body.program.outputs]
            joined = list(bits)
            for number, position in enumerate(body.carries):
                union = bits[position] | outputs[number]
                joined[position] = union | DATA if union & PARAM else union
            if joined == bits:
                return bits
            bits = joined

    def wanted(
        self, equation: Equation, plans: Sequence[Any], bits: Sequence[int]
    ) -> tuple[set[int], set[int]]:
        """Returns the operands wanted as constants, and those wanted differentiable."""
        plain = {equation.inputs[i] for i in self.selector if not bits[equation.inputs[i]] & DATA}
        differentiable: set[int] = set()
        for body, plan in zip(self.bodies, plans, strict=True):
            for inner, operand in zip(body.program.inputs, body.operands, strict=True):
                outer = equation.inputs[operand]
                if not bits[outer]:
                    plain.add(outer)
                elif bits[outer] == PARAM:
                    if inner in plan.plain:
                        plain.add(outer)
                    if inner in plan.differentiable or plan.dependence[inner] != PARAM:
                        differentiable.add(outer)
        return plain, differentiable


def form_of(equation: Equation) -> Form | None:
    """Returns the form of an equation that can be entered, or None."""
    primitives, params = _compat.primitives, equation.params
    if equation.primitive is primitives.scan_p:
        consts, carry = _compat.scan_operand_counts(params)
        program = flatten(params["jaxpr"])
        count = len(program.inputs)
        body = Body(
            program,
            tuple(range(count)),
            range(consts, consts + carry),
            range(consts + carry, count),
        )
        return Form("scan", (body,), length=params["length"])
    if equation.primitive is primitives.remat_p:
        program = flatten(params["jaxpr"])
        return Form("checkpoint", (Body(program, tuple(range(len(program.inputs)))),))
    if equation.primitive is primitives.cond_p:
        programs = [flatten(branch) for branch in params["branches"]]
        operands = tuple(range(1, len(equation.inputs)))
        return Form("cond", tuple(Body(p, operands) for p in programs), selector=(0,))
    return None
