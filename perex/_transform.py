"""Runs a plan over a batch: one reverse sweep under ``vmap``, then gradients by leaf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from perex import _compat, _evaluate, _plan, _trace, _ways
from perex._batch_statistics import unbound_axes_explained, warn_of_batch_statistics
from perex._masks import Knowledge
from perex._norms import KnownNorms, combine_columns
from perex._per_example import PerExample
from perex._preparation import Preparation
from perex._rules.scales import ScaledNorms
from perex._steps import DATA, PARAM, Plan, SiteUse
from perex._taps import Factors, Saving, Settled, Tapped, decode_inputs, make_taps
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

    def parameter_structs(self) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of each parameter leaf, without an example axis."""
        structs = []
        for leaf, axis, chosen in zip(self.leaves, self.axes, self.parameters, strict=True):
            if chosen:
                aval = jax.typeof(leaf)
                shape = [n for i, n in enumerate(aval.shape) if i != axis]
                structs.append(jax.ShapeDtypeStruct(tuple(shape), aval.dtype))
        return structs


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


class SavedMemory(NamedTuple):
    """How a sweep saves memory.

    Attributes:
      weights: for each parameter leaf the weights ``[B]`` of a sum, or None for norms alone.
      is_sum: whether the sweep is the one for the sum: a scalar.
    """

    weights: Sequence[jax.Array] | None = None
    is_sum: Any = None


def sweep(problem: Problem, saved: SavedMemory | None = None) -> Sweep:
    """Evaluates the loss of all examples and, for each parameter leaf, the gradients as factors.

    Args:
      problem: the problem.
      saved: to bring home no more than norms or sums, where a leaf allows it.
    """
    problem = _varying(problem)
    found: list[tuple[Plan, Any]] = []

    def one(leaves: Sequence[Any], weights: Sequence[Any]) -> Any:
        plan, out_tree = plan_for(problem, leaves)
        found.append((plan, out_tree))
        program = plan.program
        inputs = dict(zip(program.inputs, leaves, strict=True))
        values = {v: x for v, x in inputs.items() if plan.dependence[v] != PARAM or v in plan.plain}
        parameters = _parameters(problem, plan)
        # A parameter with a value for each example has no site: it is differentiated as it stands.
        wanted = [v for v in parameters if v in plan.differentiable or plan.dependence[v] & DATA]
        saving = None if saved is None else _saving(problem, plan, weights, saved)

        def loss(differentiable: dict[int, Any], taps: Any) -> Any:
            both = {v: x for v, x in differentiable.items() if plan.dependence[v] & DATA}
            alone = {v: x for v, x in differentiable.items() if not plan.dependence[v] & DATA}
            value, *aux = _evaluate.evaluate(plan, {**values, **both}, alone, taps, saving)
            return value, aux

        value, pull, aux = jax.vjp(
            loss,
            {v: jnp.asarray(inputs[v]) for v in wanted},
            make_taps(plan, saving),
            has_aux=True,
        )
        dense, brought = pull(jnp.ones_like(value))
        # What is summed over the examples has no example axis.
        totals = {i: tap.total for i, tap in enumerate(brought) if isinstance(tap, Settled)}
        brought = [x._replace(total=None) if isinstance(x, Settled) else x for x in brought]
        return (value, aux, dense, brought), totals

    weights = () if saved is None or saved.weights is None else tuple(saved.weights)
    run = _over_examples(problem, one, len(weights), (0, None))
    (values, aux, dense, brought), totals = run(_batched(problem), weights)
    plan, out_tree = found[-1]
    known = dict(zip(plan.program.inputs, problem.leaves, strict=True))
    brought = [
        x._replace(total=totals[i]) if isinstance(x, Settled) else x for i, x in enumerate(brought)
    ]
    gradients = _gradients(problem, plan, known, dense, brought)
    _, aux = jax.tree.unflatten(out_tree, [values, *aux]) if problem.has_aux else (None, None)
    return Sweep(values, aux, gradients, plan)


def _parameters(problem: Problem, plan: Plan) -> list[int]:
    pairs = zip(plan.program.inputs, problem.parameters, strict=True)
    return [v for v, is_parameter in pairs if is_parameter]


def _saving(problem: Problem, plan: Plan, weights: Sequence[Any], saved: SavedMemory) -> Saving:
    ways = _ways.settled_sites(plan, problem.batch_size)
    if saved.is_sum is not None:
        # The sum of a site in a branch is one over the examples that take it: not known there.
        ways = {i: way for i, way in ways.items() if not _ways.is_in_a_branch(plan.sites[i])}
    by_leaf = dict(zip(_parameters(problem, plan), weights, strict=bool(weights)))
    return Saving(
        ways,
        _ways.accumulated_sites(plan) - set(ways),
        {i: by_leaf[leaf] for i in ways for leaf in plan.sites[i].leaves if by_leaf},
        saved.is_sum,
    )


def plan_of(problem: Problem) -> Plan:
    """Plans the loss without computing anything."""
    problem = _varying(problem)
    found: list[Plan] = []

    def one(leaves: Sequence[Any], weights: Sequence[Any]) -> None:
        found.append(plan_for(problem, leaves)[0])

    jax.eval_shape(_over_examples(problem, one, 0, 0), _batched(problem), ())
    return found[-1]


def _batched(problem: Problem) -> list[Any]:
    """The leaves that carry an example axis."""
    return [x for x, axis in zip(problem.leaves, problem.axes, strict=True) if axis is not None]


def manual_axes(problem: Problem) -> frozenset[str]:
    """The manual mesh axes (of ``shard_map``) over which examples vary."""
    return frozenset().union(*(_compat.manual_axes(jax.typeof(x)) for x in _batched(problem)))


def _varying(problem: Problem) -> Problem:
    """Lets all leaves vary over the manual mesh axes (of ``shard_map``) over which examples do.

    The gradient of what is the same on all devices is summed over them; the gradient of what may
    differ from device to device is each example's own.
    """
    axes = manual_axes(problem)
    if not axes:
        return problem
    leaves = tuple(_compat.vary_over(jnp.asarray(x), axes) for x in problem.leaves)
    return dataclasses.replace(problem, leaves=leaves)


def _over_examples(
    problem: Problem, one: Callable[..., Any], weights: int, out_axes: Any
) -> Callable[..., Any]:
    """Returns ``vmap`` of a function of one example's leaves and so many weights."""
    batched = [i for i, axis in enumerate(problem.axes) if axis is not None]

    def of_example(examples: Sequence[Any], weights: Sequence[Any]) -> Any:
        leaves = list(problem.leaves)
        for i, example in zip(batched, examples, strict=True):
            if problem.keep_batch_dim and not problem.parameters[i]:
                example = jnp.expand_dims(example, problem.axes[i] or 0)
            leaves[i] = example
        return one(leaves, weights)

    axes = [problem.axes[i] for i in batched]
    return jax.vmap(
        of_example,
        in_axes=(axes, (0,) * weights),
        out_axes=out_axes,
        axis_size=problem.batch_size,
    )


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
    brought: Sequence[Tapped],
) -> list[PerExample | KnownNorms]:
    values = {**plan.program.constants, **known}
    factors: list[tuple[SiteUse, Factors]] = []
    settled: dict[int, KnownNorms] = {}
    arrays = dict(dense)
    for use, tap in zip(plan.sites, brought, strict=True):
        if isinstance(tap, Factors):
            factors.append((use, decode_inputs(tap, use)))
            continue
        (leaf,) = use.leaves
        preparation = Preparation.of(plan, use, leaf)
        if isinstance(tap, Settled):
            assert tap.norms is not None
            columns = (x.reshape(x.shape[0], math.prod(x.shape[1:])) for x in tap.norms)
            norms = combine_columns(ScaledNorms(*columns))
            axes = _compat.manual_axes(jax.typeof(tap.norms.squares))
            total = None if tap.total is None else preparation.pull_sum(tap.total, (), axes)
            settled[leaf] = KnownNorms(norms, total)
        else:
            pull = preparation.puller((), _compat.manual_axes(jax.typeof(tap.gradient)))
            operand = tap.gradient.astype(use.site.parameter.dtype)
            gradient = jax.vmap(pull)(operand)
            arrays[leaf] = arrays[leaf] + gradient if leaf in arrays else gradient
    gradients: list[PerExample | KnownNorms] = []
    merged: dict[Any, Use] = {}
    by_leaf: dict[int, list[tuple[SiteUse, Factors]]] = {}
    for use, factor in factors:
        for leaf in use.leaves:
            by_leaf.setdefault(leaf, []).append((use, factor))
    for variable in _parameters(problem, plan):
        if variable in settled:
            gradients.append(settled[variable])
            continue
        uses = []
        for use, factor in by_leaf.get(variable, ()):
            preparation = Preparation.of(plan, use, variable)
            needed = tuple(values[v] for v in preparation.inputs)
            uses.append(Use(factor, needed, preparation))
        aval = plan.program.avals[variable]
        is_zero = not uses and variable not in arrays
        gradients.append(
            PerExample(
                merge_uses(uses, merged),
                arrays.get(variable),
                jnp.zeros((problem.batch_size, 0)) if is_zero else None,
                problem.batch_size,
                aval.shape,
                aval.dtype,
            )
        )
    return gradients
