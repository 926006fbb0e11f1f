"""Evaluates a plan for one example, with taps.

The backward rule of a site puts into its tap's cotangent what perex wants to know (`perex._taps`).
One ``jax.vjp`` under ``jax.vmap`` does all differentiation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from perex import _compat, _control_flow
from perex._rules import Site, find_rule, per_example, settled_norms, site_sum
from perex._rules.chunks import varying_zeros
from perex._rules.outer_product import accumulate_dtype
from perex._rules.scales import ScaledNorms
from perex._steps import PARAM, Apply, Plan, Prepare, Tap
from perex._taps import Factors, Gradient, Saving, Settled, Tapped, encode


def evaluate(
    plan: Plan,
    values: Mapping[int, Any],
    differentiable: Mapping[int, Any],
    taps: Sequence[Tapped],
    saving: Saving | None = None,
) -> list[Any]:
    """Evaluates a plan for one example.

    Args:
      plan: the plan.
      values: the program's inputs, those in ``plan.plain`` and all that are not parameters.
      differentiable: the inputs in ``plan.differentiable``.
      taps: a tap for each site.
      saving: how memory is saved; sites of the plan have the numbers that it says.

    Returns:
      The program's outputs.
    """
    environment = {**plan.program.constants, **values}
    differentiated = dict(differentiable)

    def read(variable: int) -> Any:
        if plan.dependence[variable] == PARAM:
            return differentiated[variable]
        return environment[variable]

    for step in plan.steps:
        equation = step.equation
        if isinstance(step, Prepare):
            if step.plain:
                results = equation.bind([environment[v] for v in equation.inputs])
                environment.update(zip(equation.outputs, results, strict=True))
            if step.differentiable:
                results = equation.bind(list(map(read, equation.inputs)))
                differentiated.update(zip(equation.outputs, results, strict=True))
            continue
        if isinstance(step, Apply):
            operands = list(map(read, equation.inputs))
            if step.apart is not None:
                with _compat.equation_scope(equation.source):
                    results = [kept_apart(step.apart, *operands)]
            elif step.found is None:
                results = equation.bind(operands)
            else:
                x, kernel = operands
                with _compat.equation_scope(equation.source):
                    results = [step.found.apply(x, kernel, environment)]
        elif isinstance(step, Tap):
            operands = [environment[v] for v in equation.inputs]
            with _compat.equation_scope(equation.source):
                results = [tapped(step, operands, taps[step.index], saving)]
        else:
            results = _control_flow.emit(
                step, plan, environment, differentiated, taps, saving, run=evaluate
            )
        environment.update(zip(equation.outputs, results, strict=True))

    return [
        differentiated[v] if plan.dependence[v] == PARAM and v in differentiated else environment[v]
        for v in plan.program.outputs
    ]


def tapped(step: Tap, operands: Sequence[Any], tap: Tapped, saving: Saving | None) -> Any:
    """Evaluates a site with its tap.

    The parameter is a constant of this differentiation: all there is to know about its gradient is
    in what the tap takes home.
    """
    site, active = step.site, step.active
    parameter = operands[site.argument]
    inputs = (*operands[: site.argument], *operands[site.argument + 1 :])
    extra = None, None
    bring = _bring_factors
    if isinstance(tap, Gradient):
        bring = _bring_gradients
    elif isinstance(tap, Settled):
        assert saving is not None
        bring = partial(_bring_settled, saving.ways[step.index])
        extra = saving.weights.get(step.index), saving.is_sum

    @jax.custom_vjp
    def call(tap: Any, parameter: Any, inputs: tuple[Any, ...], extra: Any) -> Any:
        return site.apply(inputs, parameter)

    def forward(tap: Any, parameter: Any, inputs: tuple[Any, ...], extra: Any) -> tuple[Any, Any]:
        return site.apply(inputs, parameter), (parameter, inputs, extra)

    def backward(residuals: Any, cotangent: Any) -> tuple[Any, ...]:
        parameter, inputs, extra = residuals

        def of_active(*chosen: Any) -> Any:
            remaining = iter(chosen)
            merged = tuple(next(remaining) if a else x for a, x in zip(active, inputs, strict=True))
            return site.apply(merged, parameter)

        _, pull = jax.vjp(of_active, *(x for a, x in zip(active, inputs, strict=True) if a))
        cotangents = iter(pull(cotangent))
        input_cotangents = tuple(next(cotangents) if a else None for a in active)
        return bring(site, inputs, cotangent, *extra), None, input_cotangents, None

    call.defvjp(forward, backward)
    return call(tap, parameter, inputs, extra)


# What the tap of a site takes home, of one example.


def _bring_factors(site: Site, inputs: Any, cotangent: Any, *_: None) -> Factors:
    read = inputs if getattr(find_rule(site.primitive), "reads_inputs", True) else ()
    return Factors(tuple(map(encode, read)), cotangent)


def _bring_gradients(site: Site, inputs: Any, cotangent: Any, *_: None) -> Gradient:
    rule = find_rule(site.primitive)
    gradients = _for_the_whole_batch(
        lambda inputs, cotangent: per_example(rule, site, inputs, cotangent, wide=True)
    )
    return Gradient(gradients(inputs, cotangent))


def _bring_settled(
    way: str, site: Site, inputs: Any, cotangent: Any, weight: Any, is_sum: Any
) -> Settled:
    norms = partial(settled_norms, find_rule(site.primitive), site, way)
    if is_sum is None:
        return Settled(_for_the_whole_batch(norms)(inputs, cotangent), None)
    return _settle_either(norms, site, way)(is_sum, inputs, cotangent, weight)


def _settle_either(
    norms: Callable[..., ScaledNorms], site: Site, way: str
) -> Callable[..., Settled]:
    """Returns the function of one example that brings norms, or the sum over the whole batch."""
    rule = find_rule(site.primitive)

    def both(is_sum: Any, inputs: tuple[Any, ...], cotangent: Any, weights: Any) -> Settled:
        def sums(inputs: Any, cotangent: Any, weights: Any) -> Any:
            total = site_sum(rule, site, way, inputs, cotangent, weights)
            return total.astype(accumulate_dtype(site.parameter.dtype))

        def zeros(struct: Any) -> jax.Array:
            return varying_zeros(struct.shape, struct.dtype, (cotangent,))

        operands = inputs, cotangent, weights
        total = jax.eval_shape(sums, *operands)
        known = jax.eval_shape(lambda i, c, w: norms(i, c), *operands)
        return jax.lax.cond(
            is_sum,
            lambda *args: Settled(jax.tree.map(zeros, known), sums(*args)),
            lambda i, c, w: Settled(norms(i, c), zeros(total)),
            *operands,
        )

    @jax.custom_batching.custom_vmap
    def one(is_sum: Any, inputs: Any, cotangent: Any, weight: Any) -> Settled:
        batch = jax.tree.map(lambda x: jnp.expand_dims(x, 0), (inputs, cotangent, weight))
        result = both(is_sum, *batch)
        return result._replace(norms=jax.tree.map(lambda x: x[0], result.norms))

    @one.def_vmap
    def many(size: int, batched: Any, is_sum: Any, *arguments: Any) -> Any:
        result = both(is_sum, *_with_axes(size, batched[1:], arguments))
        return result, Settled(jax.tree.map(lambda _: True, result.norms), False)

    return one


def _with_axes(size: int, batched: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """Gives the arguments that all examples share an example axis."""

    def with_axis(value: jax.Array, is_batched: bool) -> jax.Array:
        return value if is_batched else jnp.broadcast_to(value, (size, *value.shape))

    return jax.tree.map(with_axis, tuple(arguments), tuple(batched))


def _for_the_whole_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of one example that ``vmap`` turns into a given function of a batch."""

    @jax.custom_batching.custom_vmap
    def one(*arguments: Any) -> Any:
        batch = jax.tree.map(lambda x: jnp.expand_dims(x, 0), arguments)
        return jax.tree.map(lambda x: x[0], function(*batch))

    @one.def_vmap
    def many(size: int, batched: Any, *arguments: Any) -> Any:
        result = function(*_with_axes(size, batched, arguments))
        return result, jax.tree.map(lambda _: True, result)

    return one


def kept_apart(site: Site, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolves with a kernel whose gradient is computed by the rule, for the whole batch."""
    rule = find_rule(site.primitive)
    gradient = _for_the_whole_batch(lambda x, ct: per_example(rule, site, (x,), ct))

    @jax.custom_vjp
    def call(x: jax.Array, kernel: jax.Array) -> Any:
        return site.apply((x,), kernel)

    def forward(x: jax.Array, kernel: jax.Array) -> tuple[Any, Any]:
        return site.apply((x,), kernel), (x, kernel)

    def backward(residuals: Any, cotangent: Any) -> tuple[Any, ...]:
        x, kernel = residuals
        _, pull = jax.vjp(lambda x: site.apply((x,), kernel), x)
        return *pull(cotangent), gradient(x, cotangent)

    call.defvjp(forward, backward)
    return call(x, kernel)
