"""Runs a plan over a batch: one reverse sweep under ``vmap``, then gradients by leaf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from perex import _compat, _evaluate, _plan, _trace, _ways
from perex._batch_statistics import unbound_axes_explained, warn_of_batch_statistics
from perex._masks import Knowledge, exact_masks
from perex._norms import KnownNorms, ScaledNorms, at_least_float32, combine_columns
from perex._per_example import PerExample
from perex._preparation import Preparation
from perex._steps import DATA, PARAM, Plan, SiteUse
from perex._uses import Use, merge_uses


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A loss and its arguments, flat.

    Attributes:
      fun: the loss of one example, called as ``fun(*args, **kwargs)``.
      treedef: the structure of ``(args, kwargs)``.
      leaves: the leaves of the arguments.
      axes: for each leaf the example axis, or None where all examples share it.
      parameters: for each leaf whether to differentiate with respect to it.
      batch_size: the number of examples.
      has_aux: whether the loss returns ``(value, aux)``.
      keep_batch_dim: whether an example keeps its axis, with length one.
      options: options of the rules.
      name: the transform's name, for messages.
      leaf_names: what a message calls each leaf.
    """

    fun: Callable[..., Any]
    treedef: Any
    leaves: tuple[Any, ...]
    axes: tuple[int | None, ...]
    parameters: tuple[bool, ...]
    batch_size: int
    has_aux: bool
    keep_batch_dim: bool
    options: Mapping[str, Any]
    name: str
    leaf_names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Sweep:
    """What one sweep over a batch brings.

    Attributes:
      values: the losses, ``[B]``.
      aux: the auxiliary results, with the example axis in front; None without ``has_aux``.
      gradients: the per-example gradient of each parameter leaf, in order: a `PerExample`, or
        `KnownNorms` where only norms were asked for.
      plan: the plan.
    """

    values: jax.Array
    aux: Any
    gradients: list[Any]
    plan: Plan


def sweep(problem: Problem, norms: bool = False) -> Sweep:
    """Evaluates the loss of all examples and, for each parameter leaf, the gradients as factors.

    Args:
      problem: the problem.
      norms: whether to bring home no more than norms, where a leaf allows it.
    """
    problem = _varying(problem)
    found: list[tuple[Plan, Any]] = []

    def one(leaves: Sequence[Any]) -> Any:
        plan, out_tree = plan_for(problem, leaves)
        found.append((plan, out_tree))
        program = plan.program
        inputs = dict(zip(program.inputs, leaves, strict=True))
        values = {v: x for v, x in inputs.items() if plan.dependence[v] != PARAM or v in plan.plain}
        # A parameter with a value for each example has no site: it is differentiated as it stands.
        wanted = [
            v
            for v, is_parameter in zip(program.inputs, problem.parameters, strict=True)
            if is_parameter and (v in plan.differentiable or plan.dependence[v] & DATA)
        ]

        def loss(differentiable: dict[int, Any], taps: Any) -> Any:
            both = {v: x for v, x in differentiable.items() if plan.dependence[v] & DATA}
            alone = {v: x for v, x in differentiable.items() if not plan.dependence[v] & DATA}
            value, *aux = _evaluate.evaluate(plan, {**values, **both}, alone, taps)
            return value, aux

        value, pull, aux = jax.vjp(
            loss,
            {v: jnp.asarray(inputs[v]) for v in wanted},
            _evaluate.make_taps(plan, _ways.norm_sites(plan) if norms else ()),
            has_aux=True,
        )
        dense, factors = pull(jnp.ones_like(value))
        return value, aux, dense, factors

    batch = [x for x, axis in zip(problem.leaves, problem.axes, strict=True) if axis is not None]
    values, aux, dense, factors = _over_examples(problem, one)(batch)
    plan, out_tree = found[-1]
    known = dict(zip(plan.program.inputs, problem.leaves, strict=True))
    gradients = _gradients(problem, plan, known, dense, factors)
    _, aux = jax.tree.unflatten(out_tree, [values, *aux]) if problem.has_aux else (None, None)
    return Sweep(values, aux, gradients, plan)


def weighted_gradient(problem: Problem, weights: jax.Array) -> list[jax.Array]:
    """Returns the gradient of the weighted sum of all losses: one ordinary backward pass.

    Args:
      problem: the problem.
      weights: ``[B]``, finite. An example of weight zero does not take part: another one is put in
        its place, so that it may hold anything.

    Returns:
      The gradient of each parameter leaf, in order, without an example axis.
    """
    problem = _varying(problem)
    if problem.batch_size == 0:
        triples = zip(problem.leaves, problem.axes, problem.parameters, strict=True)
        return [
            jnp.zeros_like(x) if axis is None else jnp.sum(jnp.asarray(x), axis)
            for x, axis, is_parameter in triples
            if is_parameter
        ]
    taking_part = weights != 0
    places = jnp.where(taking_part, jnp.arange(problem.batch_size), jnp.argmax(taking_part))
    leaves = [
        x if axis is None else jnp.take(jnp.asarray(x), places, axis)
        for x, axis in zip(problem.leaves, problem.axes, strict=True)
    ]
    numbers = [i for i, is_parameter in enumerate(problem.parameters) if is_parameter]
    fun = exact_masks(problem.fun)

    def loss(leaves: Sequence[Any]) -> jax.Array:
        args, kwargs = jax.tree.unflatten(problem.treedef, leaves)
        result = fun(*args, **kwargs)
        return result[0] if problem.has_aux else result

    def total(parameters: Sequence[jax.Array]) -> jax.Array:
        chosen = dict(zip(numbers, parameters, strict=True))
        mixed = tuple(chosen.get(i, leaf) for i, leaf in enumerate(leaves))
        part = dataclasses.replace(problem, leaves=mixed)
        batch = [x for x, axis in zip(mixed, problem.axes, strict=True) if axis is not None]
        values = _over_examples(part, loss)(batch)
        dtype = at_least_float32(values.dtype)
        return jnp.sum(values.astype(dtype) * weights.astype(dtype))

    gradients = jax.grad(total)([jnp.asarray(leaves[i]) for i in numbers])
    axes = [problem.axes[i] for i in numbers]
    someone = jnp.any(taking_part)
    return [
        jnp.where(someone, g if axis is None else jnp.sum(g, axis), 0)
        for g, axis in zip(gradients, axes, strict=True)
    ]


def plan_of(problem: Problem) -> Plan:
    """Plans the loss without computing anything."""
    problem = _varying(problem)
    found: list[Plan] = []

    def one(leaves: Sequence[Any]) -> None:
        found.append(plan_for(problem, leaves)[0])

    batch = [x for x, axis in zip(problem.leaves, problem.axes, strict=True) if axis is not None]
    jax.eval_shape(_over_examples(problem, one), batch)
    return found[-1]


def _varying(problem: Problem) -> Problem:
    """Lets all leaves vary over the manual mesh axes (of ``shard_map``) over which examples do.

    The gradient of what is the same on all devices is summed over them; the gradient of what may
    differ from device to device is each example's own.
    """
    examples = (x for x, axis in zip(problem.leaves, problem.axes, strict=True) if axis is not None)
    axes = frozenset().union(*(_compat.manual_axes(jax.typeof(x)) for x in examples))
    if not axes:
        return problem
    leaves = tuple(_compat.vary_over(jnp.asarray(x), axes) for x in problem.leaves)
    return dataclasses.replace(problem, leaves=leaves)


def _over_examples(
    problem: Problem, one: Callable[[Sequence[Any]], Any]
) -> Callable[[Sequence[Any]], Any]:
    """Returns ``vmap`` of a function of one example's leaves."""
    batched = [i for i, axis in enumerate(problem.axes) if axis is not None]

    def of_example(examples: Sequence[Any]) -> Any:
        leaves = list(problem.leaves)
        for i, example in zip(batched, examples, strict=True):
            if problem.keep_batch_dim and not problem.parameters[i]:
                example = jnp.expand_dims(example, problem.axes[i] or 0)
            leaves[i] = example
        return one(leaves)

    axes = [problem.axes[i] for i in batched]
    return jax.vmap(of_example, in_axes=(axes,), axis_size=problem.batch_size)


def plan_for(problem: Problem, leaves: Sequence[Any]) -> tuple[Plan, Any]:
    """Traces the loss for one example's leaves and plans it."""
    with unbound_axes_explained(problem.name):
        traced = _trace.trace(problem.fun, leaves, problem.treedef)
    _check_result(problem, traced)
    program = traced.program
    bits = [
        (PARAM if is_parameter else 0) | (DATA if axis is not None else 0)
        for is_parameter, axis in zip(problem.parameters, problem.axes, strict=True)
    ]
    leaf_sets = [
        frozenset([v]) if p else frozenset()
        for v, p in zip(program.inputs, problem.parameters, strict=True)
    ]
    given = {
        v: x
        for v, x, value in zip(program.inputs, leaves, bits, strict=True)
        if not value and isinstance(x, jax.Array | np.ndarray) and not isinstance(x, Tracer)
    }
    plan = _plan.make_plan(
        program,
        bits,
        leaf_sets,
        problem.options,
        frozenset([0]),
        knowledge=Knowledge(program, given),
    )
    return plan, traced.out_tree


def _check_result(problem: Problem, traced: _trace.Traced) -> None:
    """Raises where the loss does not return a real scalar (and ``aux``, if announced)."""
    children = traced.out_tree.children()
    if problem.has_aux:
        if len(children) != 2 or children[0].num_leaves != 1:
            raise TypeError(
                f"{problem.name}: with has_aux=True the loss must return a pair (value, aux) with "
                f"a scalar value, but it returned the structure {traced.out_tree}."
            )
        warn_of_batch_statistics(problem.name, children[1])
    elif traced.out_tree.num_leaves != 1 or children:
        raise TypeError(
            f"{problem.name}: the loss of one example must return a scalar, but it returned the "
            f"structure {traced.out_tree}. For (value, aux) pass has_aux=True."
        )
    aval = traced.out_avals[0]
    if aval.shape != ():
        raise TypeError(
            f"{problem.name}: the loss of one example must return a scalar, but it returned an "
            f"array of shape {tuple(aval.shape)}. Sum or average over it; the example axis is not "
            "part of what the loss sees (keep_batch_dim=True gives each example a batch axis of "
            "length one)."
        )
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        raise TypeError(
            f"{problem.name}: the loss must return a real floating-point number, but it returned "
            f"dtype {aval.dtype}."
        )


def _gradients(
    problem: Problem,
    plan: Plan,
    known: Mapping[int, Any],
    dense: Mapping[int, Any],
    brought: Sequence[_evaluate.Tapped],
) -> list[PerExample | KnownNorms]:
    factors: list[tuple[SiteUse, _evaluate.Factors]] = []
    norms: dict[int, KnownNorms] = {}
    for use, tap in zip(plan.sites, brought, strict=True):
        if isinstance(tap, ScaledNorms):
            (leaf,) = use.leaves
            columns = (x.reshape(x.shape[0], math.prod(x.shape[1:])) for x in tap)
            norms[leaf] = KnownNorms(combine_columns(ScaledNorms(*columns)))
            continue
        structs = zip(tap.inputs, use.site.inputs, strict=True)
        inputs = tuple(_evaluate.decode(x, struct) for x, struct in structs)
        factors.append((use, _evaluate.Factors(inputs, tap.cotangent)))
    values = {**plan.program.constants, **known}
    gradients: list[PerExample | KnownNorms] = []
    merged: dict[Any, Use] = {}
    for variable, is_parameter in zip(plan.program.inputs, problem.parameters, strict=True):
        if not is_parameter:
            continue
        if variable in norms:
            gradients.append(norms[variable])
            continue
        uses = []
        for use, factor in factors:
            if variable in use.leaves:
                preparation = Preparation.of(plan, use, variable)
                needed = tuple(values[v] for v in preparation.inputs)
                uses.append(Use(factor, needed, preparation))
        aval = plan.program.avals[variable]
        gradients.append(
            PerExample(
                merge_uses(uses, merged),
                dense.get(variable),
                problem.batch_size,
                aval.shape,
                aval.dtype,
            )
        )
    return gradients
