"""From a Python function to a flat program.

A `Program` is a jaxpr brought into the form that planning and evaluation want: variables are
integers, literals and closed-over arrays are named constants, nested jits are written out in place,
and equations whose results nobody uses are gone. Control flow (``scan``, ``cond``, ``checkpoint``,
…) and functions with custom derivatives stay single equations. A scan whose carry holds a counter
(so do those that ``fori_loop`` makes) becomes one that is given the counter's values: what is
computed from a slice can be computed for all steps at once, such as the layer with that number.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from perex import _compat


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """One operation: ``outputs = primitive(*inputs, **params)``.

    Attributes:
      primitive: the JAX primitive.
      inputs: the variables read.
      outputs: the variables written; an output that nobody reads is still named.
      params: the primitive's parameters.
      source: the jaxpr equation that this one was made from (its context and source line).
    """

    primitive: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: dict[str, Any]
    source: Any

    def bind(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Returns the results of the operation, in the context in which it was written."""
        params = self.primitive.get_bind_params(self.params)
        operands = _compat.as_operands(self.params, operands)
        with _compat.equation_scope(self.source):
            results = self.primitive.bind(*operands, **params)
        return results if self.primitive.multiple_results else [results]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A flat list of equations.

    Attributes:
      inputs: the variables to be given, in order.
      constants: variable -> value, for literals and closed-over arrays (which may be tracers).
      equations: in an order in which they can be evaluated.
      outputs: the variables returned, in order; may repeat and may be inputs or constants.
      avals: the abstract value of each variable.
    """

    inputs: tuple[int, ...]
    constants: dict[int, Any]
    equations: tuple[Equation, ...]
    outputs: tuple[int, ...]
    avals: tuple[Any, ...]

    @functools.cached_property
    def _makers(self) -> dict[int, int]:
        return {v: i for i, equation in enumerate(self.equations) for v in equation.outputs}

    @functools.cached_property
    def _input_set(self) -> frozenset[int]:
        return frozenset(self.inputs)

    @functools.cached_property
    def _preparations(self) -> dict[int, tuple[tuple[Equation, ...], frozenset[int]]]:
        return {}

    def preparation(self, variable: int) -> tuple[tuple[Equation, ...], frozenset[int]]:
        """Returns the equations and the program inputs from which ``variable`` is computed."""
        if variable not in self._preparations:
            needed, pending, found = {variable}, [variable], set()
            while pending:
                maker = self._makers.get(pending.pop())
                if maker is not None and maker not in found:
                    found.add(maker)
                    new = set(self.equations[maker].inputs) - needed
                    needed |= new
                    pending.extend(new)
            equations = tuple(self.equations[i] for i in sorted(found))
            self._preparations[variable] = equations, self._input_set & needed
        return self._preparations[variable]

    def evaluate(self, variables: Sequence[int], values: Mapping[int, Any]) -> list[Any]:
        """Returns the values of variables, from those of the inputs that they are computed from."""
        # Constants are many in a long program: only those that are read are looked up.
        environment: ChainMap[int, Any] = ChainMap(dict(values), self.constants)
        for variable in variables:
            for equation in self.preparation(variable)[0]:
                if equation.outputs[0] not in environment:
                    results = equation.bind([environment[v] for v in equation.inputs])
                    environment.update(zip(equation.outputs, results, strict=True))
        return [environment[v] for v in variables]


class _Flattener:
    """Writes equations out in place, under fresh names."""

    def __init__(self) -> None:
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.equations: list[Equation] = []

    def name(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def constant(self, value: Any, aval: Any) -> int:
        variable = self.name(aval)
        self.constants[variable] = value
        return variable

    def inline(self, jaxpr: Any, arguments: Sequence[int]) -> list[int]:
        """Appends the equations of ``jaxpr`` and returns the variables of its results."""
        jaxpr, consts = _compat.split_closed_jaxpr(jaxpr)
        environment: dict[Any, int] = dict(zip(jaxpr.invars, arguments, strict=True))
        if not consts:
            consts = getattr(jaxpr, "consts", ())
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            environment[variable] = self.constant(value, variable.aval)

        def read(atom: Any) -> int:
            if isinstance(atom, _compat.Literal):
                return self.constant(atom.val, atom.aval)
            return environment[atom]

        for equation in jaxpr.eqns:
            inputs = tuple(map(read, equation.invars))
            body = _compat.call_jaxpr(equation)
            if body is None and equation.primitive is _compat.primitives.scan_p:
                body = _with_counters_given(equation)
            if body is not None:
                outputs = tuple(self.inline(body, inputs))
            else:
                outputs = tuple(self.name(v.aval) for v in equation.outvars)
                self.equations.append(
                    Equation(equation.primitive, inputs, outputs, equation.params, equation)
                )
            environment.update(zip(equation.outvars, outputs, strict=True))
        return list(map(read, jaxpr.outvars))


def flatten(jaxpr: Any) -> Program:
    """Returns the `Program` of a jaxpr (open without constants, or closed)."""
    flattener = _Flattener()
    open_jaxpr, _ = _compat.split_closed_jaxpr(jaxpr)
    inputs = tuple(flattener.name(v.aval) for v in open_jaxpr.invars)
    outputs = tuple(flattener.inline(jaxpr, inputs))
    live = set(outputs)
    kept = []
    for equation in reversed(flattener.equations):
        if equation.source.effects or not live.isdisjoint(equation.outputs):
            kept.append(equation)
            live.update(equation.inputs)
    constants = {v: c for v, c in flattener.constants.items() if v in live}
    return Program(inputs, constants, tuple(reversed(kept)), outputs, tuple(flattener.avals))


def _with_counters_given(equation: Any) -> Any | None:
    """Returns the jaxpr of a scan that is given its counters, or None where it carries none."""
    params = equation.params
    jaxpr, _ = _compat.split_closed_jaxpr(params["jaxpr"])
    consts, carry = _compat.scan_operand_counts(params)
    carries = range(consts, consts + carry)
    if not any(_is_counter(jaxpr.invars[i].aval) for i in carries):
        return None
    program = flatten(params["jaxpr"])
    counters = _counters(program, carries)
    nothing_else = len(counters) == len(program.inputs)
    if not counters or nothing_else or any(e.source.effects for e in program.equations):
        return None
    others = [i for i in carries if i not in counters]
    left = [program.outputs[i - consts] for i in others] + list(program.outputs[carry:])

    def values(positions: Sequence[int], operands: Sequence[Any]) -> dict[int, Any]:
        return dict(zip((program.inputs[i] for i in positions), operands, strict=True))

    def scan(*operands: Any) -> list[Any]:
        constants = values(range(consts), operands[:consts])
        options = {"length": params["length"], "reverse": params["reverse"]}

        def count(now: list[Any], _: None) -> tuple[list[Any], list[Any]]:
            after = [program.outputs[i - consts] for i in counters]
            return program.evaluate(after, values(counters, now)), now

        def step(now: list[Any], xs: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            counted, slices = xs
            given = values(counters, counted) | values(others, now)
            slices = values(range(consts + carry, len(program.inputs)), slices)
            results = program.evaluate(left, constants | given | slices)
            return results[: len(others)], results[len(others) :]

        last, counted = jax.lax.scan(count, [operands[i] for i in counters], None, **options)
        xs = counted, list(operands[consts + carry :])
        initial = [operands[i] for i in others]
        final, stacked = jax.lax.scan(step, initial, xs, unroll=params["unroll"], **options)
        carried = dict(zip(counters, last, strict=True)) | dict(zip(others, final, strict=True))
        return [*(carried[i] for i in carries), *stacked]

    with _compat.equation_scope(equation):
        return jax.make_jaxpr(scan)(*(v.aval for v in equation.invars))


def _is_counter(aval: Any) -> bool:
    return aval.shape == () and jnp.issubdtype(aval.dtype, jnp.integer)


def _counters(program: Program, carries: range) -> list[int]:
    """Returns the integers in a carry that are computed from nothing but each other."""
    counters = {i for i in carries if _is_counter(program.avals[program.inputs[i]])}
    while True:
        known = {program.inputs[i] for i in counters}
        left = {
            i
            for i in counters
            if program.preparation(program.outputs[i - carries.start])[1] <= known
        }
        if left == counters:
            return sorted(counters)
        counters = left


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A traced function: its program over flat arguments, and the structure of its result.

    Attributes:
      program: the flat program; its inputs are the leaves of the arguments, in order.
      out_tree: the structure of the function's result.
      out_avals: the abstract values of the result's leaves.
    """

    program: Program
    out_tree: Any
    out_avals: tuple[Any, ...]


def trace(fun: Callable[..., Any], leaves: Sequence[Any], treedef: Any) -> Traced:
    """Traces ``fun(*args, **kwargs)``.

    Args:
      fun: the function.
      leaves: the leaves of ``(args, kwargs)``: arrays, tracers or anything with an abstract value.
        Only their abstract values are read.
      treedef: the structure of ``(args, kwargs)``.

    Returns:
      The traced function.
    """
    out_trees = []

    def flat_fun(*flat: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(treedef, flat)
        out_leaves, out_tree = jax.tree.flatten(fun(*args, **kwargs))
        out_trees.append(out_tree)
        return out_leaves

    jaxpr = jax.make_jaxpr(flat_fun)(*leaves)
    program = flatten(jaxpr)
    return Traced(program, out_trees[-1], tuple(program.avals[v] for v in program.outputs))
