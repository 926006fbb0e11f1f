"""Re-emits ``scan``, ``cond`` and ``checkpoint`` over the evaluator, by JAX's public functions.

A parameter enters a body twice where both are wanted: as a constant of the differentiation, for the
sites, and as what is differentiated, for the fallback. The taps of the sites within a scan have an
axis for its steps and travel as slices, so that a weight used at every step of a scan brings back
the inputs and cotangents of all steps, and its gradient is one contraction over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from perex import _compat
from perex._regions import PARAM
from perex._taps import Gradient


class _Inputs(NamedTuple):
    """The inputs of a body: by position, plain and differentiable."""

    values: dict[int, Any]
    differentiable: dict[int, Any]


def emit(
    step: Any,
    plan: Any,
    environment: Mapping[int, Any],
    differentiated: Mapping[int, Any],
    taps: Sequence[Any],
    saving: Any,
    run: Callable[..., list[Any]],
) -> list[Any]:
    """Emits a region.

    Args:
      step: the region.
      plan: the plan that it belongs to.
      environment: the values of the plan's variables.
      differentiated: the differentiable values of the variables computed from parameters.
      taps: the taps of the plan.
      saving: how memory is saved, see `perex._evaluate.Saving`.
      run: the evaluator, ``(plan, values, differentiable, taps, saving) -> outputs``.

    Returns:
      The results of the equation.
    """
    equation, form = step.equation, step.form
    inputs = [
        _body_inputs(equation, body, inner, plan, environment, differentiated)
        for body, inner in zip(form.bodies, step.plans, strict=True)
    ]
    body_taps = [
        list(taps[first : first + len(inner.sites)])
        for first, inner in zip(step.first, step.plans, strict=True)
    ]
    runs = [
        partial(_run, run, inner, _shifted(saving, first, len(inner.sites)))
        for first, inner in zip(step.first, step.plans, strict=True)
    ]
    with _compat.equation_scope(equation.source):
        if form.kind == "scan":
            # Taps that bring gradients are the same at each step that shares the operand.
            uses = plan.sites[step.first[0] : step.first[0] + len(body_taps[0])]
            summed = [
                isinstance(tap, Gradient) and not use.stack[0][1]
                for tap, use in zip(body_taps[0], uses, strict=True)
            ]
            return _scan(step, inputs[0], body_taps[0], summed, runs[0])
        if form.kind == "checkpoint":
            return _checkpoint(step, inputs[0], body_taps[0], runs[0])
        index = environment[equation.inputs[form.selector[0]]]
        return _cond(index, inputs, body_taps, runs)


def _shifted(saving: Any, first: int, count: int) -> Any:
    """The same for a body, whose sites count from zero."""
    if saving is None:
        return None
    places = range(first, first + count)
    return saving._replace(
        ways={i - first: saving.ways[i] for i in places if i in saving.ways},
        gradients={i - first for i in places if i in saving.gradients},
        weights={i - first: saving.weights[i] for i in places if i in saving.weights},
    )


def _body_inputs(
    equation: Any,
    body: Any,
    inner: Any,
    plan: Any,
    environment: Mapping[int, Any],
    differentiated: Mapping[int, Any],
) -> _Inputs:
    values, differentiable = {}, {}
    for position, (variable, operand) in enumerate(
        zip(body.program.inputs, body.operands, strict=True)
    ):
        outer = equation.inputs[operand]
        if plan.dependence[outer] != PARAM:
            values[position] = environment[outer]
        elif inner.dependence[variable] != PARAM:
            values[position] = differentiated[outer]
        else:
            if variable in inner.plain:
                values[position] = environment[outer]
            if variable in inner.differentiable:
                differentiable[position] = differentiated[outer]
    return _Inputs(values, differentiable)


def _run(
    run: Callable[..., list[Any]], inner: Any, saving: Any, inputs: _Inputs, taps: Any
) -> list[Any]:
    names = inner.program.inputs
    return run(
        inner,
        {names[p]: v for p, v in inputs.values.items()},
        {names[p]: v for p, v in inputs.differentiable.items()},
        taps,
        saving,
    )


def _split(values: Mapping[int, Any], chosen: range) -> tuple[dict[int, Any], dict[int, Any]]:
    inside = {p: v for p, v in values.items() if p in chosen}
    return inside, {p: v for p, v in values.items() if p not in chosen}


def _scan(
    step: Any,
    inputs: _Inputs,
    taps: Sequence[Any],
    summed: Sequence[bool],
    run: Callable[..., list[Any]],
) -> list[Any]:
    body, params = step.form.bodies[0], step.equation.params
    initial, rest = _split(inputs.values, body.carries)
    slices, constants = _split(rest, body.slices)
    sliced_differentiable, constant_differentiable = _split(inputs.differentiable, body.slices)
    count = len(body.carries)

    def one_step(carry: dict[int, Any], xs: Any) -> tuple[dict[int, Any], list[Any]]:
        slices, sliced_differentiable, sliced_taps = xs
        remaining = iter(sliced_taps)
        outputs = run(
            _Inputs(
                {**constants, **carry, **slices},
                {**constant_differentiable, **sliced_differentiable},
            ),
            [tap if s else next(remaining) for tap, s in zip(taps, summed, strict=True)],
        )
        return dict(zip(body.carries, outputs[:count], strict=True)), outputs[count:]

    final, stacked = jax.lax.scan(
        one_step,
        initial,
        (
            slices,
            sliced_differentiable,
            [tap for tap, s in zip(taps, summed, strict=True) if not s],
        ),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*(final[p] for p in body.carries), *stacked]


def _checkpoint(step: Any, inputs: _Inputs, taps: Any, run: Callable[..., list[Any]]) -> list[Any]:
    params = step.equation.params
    return jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])(
        inputs, taps
    )


def _cond(
    index: Any,
    inputs: Sequence[_Inputs],
    taps: Sequence[Any],
    runs: Sequence[Callable[..., list[Any]]],
) -> list[Any]:
    def branch(number: int) -> Callable[..., list[Any]]:
        def evaluate(inputs: Sequence[_Inputs], taps: Sequence[Any]) -> list[Any]:
            return runs[number](inputs[number], taps[number])

        return evaluate

    branches = [branch(number) for number in range(len(runs))]
    return jax.lax.switch(index, branches, list(inputs), list(taps))
