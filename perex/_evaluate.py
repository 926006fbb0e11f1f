"""Evaluates a plan for one example, with taps.

A *tap* is an extra input of a site, a zero that does not affect the value. The backward rule of the
site puts into the tap's cotangent what perex wants to know: the site's inputs and the cotangent of
its result, from which the rules compute gradients, norms and weighted sums for the whole batch.
One ``jax.vjp`` under ``jax.vmap`` does all differentiation.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from perex import _compat, _control_flow
from perex._norms import ScaledNorms
from perex._rules import Site, find_rule, per_example
from perex._steps import PARAM, Apply, Plan, Prepare, SiteUse, Tap


class Factors(NamedTuple):
    """What a tap brings back: the inputs of a site and the cotangent of its result.

    With the example axis in front, and after it an axis for each enclosing scan.
    """

    inputs: tuple[Any, ...]
    cotangent: Any


# What a tap brings back where no more than the norm of the site's gradient is wanted is the norm.
Tapped = Factors | ScaledNorms


def make_taps(plan: Plan, norms: Container[int] = ()) -> list[Tapped]:
    """Returns a zero tap for each site of the plan, with an axis in front for each scan.

    Args:
      plan: the plan.
      norms: the sites, by number, whose taps bring back norms.
    """
    return [_zero_tap(use, number in norms) for number, use in enumerate(plan.sites)]


def _zero_tap(use: SiteUse, of_norm: bool) -> Tapped:
    lengths = tuple(length for length, _ in use.stack)
    variables = use.equation.source.invars
    axes = frozenset().union(*(_compat.manual_axes(v.aval) for v in variables))

    def zero(struct: jax.ShapeDtypeStruct) -> jax.Array:
        return _compat.vary_over(jnp.zeros(lengths + struct.shape, struct.dtype), axes)

    if of_norm:
        structs = jax.eval_shape(_norm(use.site), use.site.inputs, use.site.out)
        return ScaledNorms(*map(zero, structs))
    inputs = tuple(jax.tree.map(zero, jax.eval_shape(_encode, s)) for s in use.site.inputs)
    return Factors(inputs, zero(use.site.out))


# Cotangents of integers do not exist, so the integer inputs of a site (token ids) travel as floats.
# float32 holds 24 bits exactly and float64 53; wider integers travel as two halves.
_HALF = 16


def _encode(value: jax.Array) -> Any:
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return value
    if value.dtype.itemsize <= 2:
        return value.astype(jnp.float32)
    half = _HALF * value.dtype.itemsize // 4
    dtype = jnp.float32 if value.dtype.itemsize == 4 else jnp.float64
    return (value >> half).astype(dtype), (value & ((1 << half) - 1)).astype(dtype)


def decode(encoded: Any, struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the input of a site from the cotangent of its tap."""
    if not isinstance(encoded, tuple):
        return encoded.astype(struct.dtype)
    half = _HALF * struct.dtype.itemsize // 4
    high, low = (part.astype(struct.dtype) for part in encoded)
    return (high << half) | low


def evaluate(
    plan: Plan,
    values: Mapping[int, Any],
    differentiable: Mapping[int, Any],
    taps: Sequence[Tapped],
) -> list[Any]:
    """Evaluates a plan for one example.

    Args:
      plan: the plan.
      values: the program's inputs, those in ``plan.plain`` and all that are not parameters.
      differentiable: the inputs in ``plan.differentiable``.
      taps: a tap for each site.

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
                found = step.found.mask
                mask = None if found is None else environment[found.variable]
                with _compat.equation_scope(equation.source):
                    results = [step.found.apply(x, kernel, mask)]
        elif isinstance(step, Tap):
            operands = [environment[v] for v in equation.inputs]
            with _compat.equation_scope(equation.source):
                results = [tapped(step.site, step.active, operands, taps[step.index])]
        else:
            results = _control_flow.emit(
                step, plan, environment, differentiated, taps, run=evaluate
            )
        environment.update(zip(equation.outputs, results, strict=True))

    return [
        differentiated[v] if plan.dependence[v] == PARAM and v in differentiated else environment[v]
        for v in plan.program.outputs
    ]


def tapped(site: Site, active: Sequence[bool], operands: Sequence[Any], tap: Any) -> Any:
    """Evaluates a site with its tap.

    The parameter is a constant of this differentiation: all there is to know about its gradient is
    in the factors that the tap takes home.
    """
    parameter = operands[site.argument]
    inputs = (*operands[: site.argument], *operands[site.argument + 1 :])
    of_norm = isinstance(tap, ScaledNorms)

    @jax.custom_vjp
    def call(tap: Any, parameter: Any, inputs: tuple[Any, ...]) -> Any:
        return site.apply(inputs, parameter)

    def forward(tap: Any, parameter: Any, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        return site.apply(inputs, parameter), (parameter, inputs)

    def backward(residuals: Any, cotangent: Any) -> tuple[Any, ...]:
        parameter, inputs = residuals

        def of_active(*chosen: Any) -> Any:
            remaining = iter(chosen)
            merged = tuple(next(remaining) if a else x for a, x in zip(active, inputs, strict=True))
            return site.apply(merged, parameter)

        _, pull = jax.vjp(of_active, *(x for a, x in zip(active, inputs, strict=True) if a))
        cotangents = iter(pull(cotangent))
        input_cotangents = tuple(next(cotangents) if a else None for a in active)
        if of_norm:
            brought = ScaledNorms(*_norm(site)(inputs, cotangent))
        else:
            brought = Factors(tuple(map(_encode, inputs)), cotangent)
        return brought, None, input_cotangents

    call.defvjp(forward, backward)
    return call(tap, parameter, inputs)


def _norm(site: Site) -> Callable[..., Any]:
    """Returns the function from one example's inputs and cotangent to scale and squares."""
    rule: Any = find_rule(site.primitive)
    return _for_the_whole_batch(partial(rule.scaled_norm, site))


def _for_the_whole_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of one example that ``vmap`` turns into a given function of a batch."""

    @jax.custom_batching.custom_vmap
    def one(*arguments: Any) -> Any:
        batch = jax.tree.map(lambda x: x[None], arguments)
        return jax.tree.map(lambda x: x[0], function(*batch))

    @one.def_vmap
    def many(size: int, batched: Any, *arguments: Any) -> Any:
        def with_axis(value: jax.Array, is_batched: bool) -> jax.Array:
            return value if is_batched else jnp.broadcast_to(value, (size, *value.shape))

        result = function(*jax.tree.map(with_axis, arguments, tuple(batched)))
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
