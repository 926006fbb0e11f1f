"""The plan as text: which rule each use of a parameter gets, or why it goes the plain way."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from perex import _compat, _ways
from perex._api import Options
from perex._preparation import is_isometric, steps
from perex._steps import PARAM, Fallback, Plan, SiteUse
from perex._transform import Problem, plan_of

_P = _compat.primitives
_ELEMENTWISE = {_P.add_p, _P.sub_p, _P.mul_p, _P.div_p, _P.max_p, _P.min_p, _P.select_n_p}


class Explanation(str):
    """A plan as text, one line for each use of a parameter; prints as it reads."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    in_axes: Any = None,
    keep_batch_dim: bool = False,
    conv: Any = "auto",
) -> Callable[..., Explanation]:
    """Returns a function that explains what perex makes of a loss, without computing anything.

    Printing the result is the way to find out why something is slow.

    Args:
      fun: the loss of one example, as for `perex.grad`.
      argnums: see `perex.grad`.
      has_aux: see `perex.grad`.
      in_axes: see `perex.grad`.
      keep_batch_dim: see `perex.grad`.
      conv: see `perex.grad`.

    Returns:
      A function with the arguments of ``fun`` (batched; arrays or `jax.ShapeDtypeStruct`) that
      returns text with one line for each use of a parameter: the leaf's path and shape, the
      equation and the user's source line, and the rule and algorithm, or the reason for the
      fallback to ``vmap(grad)`` and the leaf's share of the parameters; and the way to a clipped
      sum with the time estimated for each, and how many bytes it holds for the whole batch. The
      last line has their sum beside what an ordinary gradient holds of it. Elementwise uses
      (biases, scales) go to ``vmap(grad)`` by design: nothing is faster for them.

    Raises:
      TypeError: as `perex.grad`.
      ValueError: as `perex.grad`.

    Example:
      >>> import jax.numpy as jnp, perex
      >>> loss = lambda w, x: jnp.sum(jnp.tanh(w @ x))
      >>> print(perex.explain(loss)(jnp.ones((2, 3)), jnp.ones((4, 3))))  # doctest: +ELLIPSIS
      perex.explain: 4 examples, 1 parameter leaf, 6 parameters, 100.0% of them by rules alone
        argument 0 [2, 3]: dot_general at ...: rule dot_general...
    """
    options = Options.check(
        "perex.explain", fun, argnums, has_aux, in_axes, keep_batch_dim, conv=conv
    )

    def explanation(*args: Any, **kwargs: Any) -> Explanation:
        problem = options.problem(args, kwargs)
        return Explanation(_describe(problem, plan_of(problem)))

    return explanation


def _describe(problem: Problem, plan: Plan) -> str:
    avals = plan.program.avals
    names = dict(zip(plan.program.inputs, problem.leaf_names, strict=True))
    parameters = [v for v, p in zip(plan.program.inputs, problem.parameters, strict=True) if p]
    count = sum(avals[v].size for v in parameters)
    plain = {v for v in parameters if plan.dependence[v] != PARAM}.union(
        *(fallback.leaves for fallback in plan.fallbacks)
    )
    by_rule = 1 - sum(avals[v].size for v in plain) / max(count, 1)
    lines = [
        f"perex.explain: {_counted(problem.batch_size, 'example', 'examples')}, "
        f"{_counted(len(parameters), 'parameter leaf', 'parameter leaves')}, "
        f"{_counted(count, 'parameter', 'parameters')}, {by_rule:.1%} of them by rules alone"
    ]
    for variable in parameters:
        head = f"  {names[variable]} {list(avals[variable].shape)}: "
        lines.extend(head + use for use in _uses(problem, plan, variable, count))
    held = sum(sum(_held(problem, plan, variable).values()) for variable in parameters)
    ordinary = sum(_bytes(avals[variable]) for variable in parameters)
    ordinary += problem.batch_size * sum(_inputs_bytes(use) for use in plan.sites)
    lines.append(
        f"  in all, a clipped sum holds {_size(held)} for the batch; of that an ordinary gradient "
        f"holds {_size(ordinary)} (the inputs of the sites, and itself)"
    )
    return "\n".join(lines)


def _held(problem: Problem, plan: Plan, variable: int) -> dict[int, int]:
    """Bytes that the way of a leaf holds for the batch, by use: sites by number, -1 the rest.

    What several leaves share, such as a penalty on all of them, is counted for each.
    """
    batch, leaf = problem.batch_size, plan.program.avals[variable]
    array = batch * _bytes(leaf)
    if plan.dependence[variable] != PARAM:
        return {-1: array}
    held = {-1: array} if any(variable in f.leaves for f in plan.fallbacks) else {}
    sites = [number for number, use in enumerate(plan.sites) if variable in use.leaves]
    if _way(problem, plan, variable).way == "keep":
        return {-1: array} if sites or held else {}
    for number in sites:
        use = plan.sites[number]
        held[number] = batch * (_inputs_bytes(use) + _steps(use) * _bytes(use.site.out))
    return held


def _way(problem: Problem, plan: Plan, variable: int) -> _ways.Choice:
    """The way of a leaf to a clipped sum."""
    sites = [use for use in plan.sites if variable in use.leaves]
    pairs = [(use, is_isometric(plan, use)) for use in sites]
    dense = any(variable in fallback.leaves for fallback in plan.fallbacks)
    size = plan.program.avals[variable].size
    return _ways.choice(pairs, problem.batch_size, size, dense)


def _inputs_bytes(use: SiteUse) -> int:
    """Bytes of a site's inputs for one example, at all steps of the loops around it."""
    if not getattr(use.rule, "reads_inputs", True):
        return 0
    return _steps(use) * sum(map(_bytes, use.site.inputs))


def _steps(use: SiteUse) -> int:
    return math.prod(length for length, _ in use.stack)


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def _size(count: float) -> str:
    """A number of bytes in three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000 or unit == "GiB":
            return f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _uses(problem: Problem, plan: Plan, variable: int, count: int) -> list[str]:
    """Describes the uses of a parameter leaf."""
    size = plan.program.avals[variable].size
    share = f"{size / max(count, 1):.1%} of the parameters"
    if plan.dependence[variable] != PARAM:
        return [f"fallback to vmap(grad), {share}: in_axes gives each example its own"]
    way, held = _way(problem, plan, variable), _held(problem, plan, variable)
    uses = [
        f"{_describe_site(plan, use, problem.batch_size)}; clipped sum: {way}, holds "
        f"{_size(held.get(number, held.get(-1, 0)))}"
        for number, use in enumerate(plan.sites)
        if variable in use.leaves
    ]
    # An equation that reads a leaf through two operands is one use.
    fallbacks = {id(f.equation): f for f in plan.fallbacks if variable in f.leaves}
    holds = f"; holds {_size(held.get(-1, 0))} for the batch"
    uses.extend(_describe_fallback(fallback, share) + holds for fallback in fallbacks.values())
    return uses or ["no gradient flows to it: zero"]


def _describe_site(plan: Plan, use: SiteUse, batch_size: int) -> str:
    site, rule = use.site, use.rule
    text = f"{site.primitive} at {site.location}: rule {site.primitive}"
    if hasattr(rule, "describe"):
        text += f", {rule.describe(site, batch_size)}"
    if site.mask is not None:
        text += f", {site.mask.describe()}"
    loops = [f"{'stacked' if stacked else 'shared'} over {n} steps" for n, stacked in use.stack]
    if loops:
        text += f", in a scan, {', '.join(loops)}"
    prepared = [str(equation.primitive) for _, equation in steps(plan, use)]
    if prepared:
        text += f", after {', '.join(prepared)}"
    return text


def _describe_fallback(fallback: Fallback, share: str) -> str:
    equation = fallback.equation
    if equation is None:
        return f"plain by design, {share}: {fallback.reason}"
    where = f"{equation.primitive} at {_compat.source_summary(equation.source)}"
    if equation.primitive in _ELEMENTWISE:
        # Biases, scales, positions: its gradient is no product that vmap would do badly.
        return (
            f"{where}: plain by design, {share}: an elementwise use, for which vmap(grad) is best"
        )
    return f"{where}: fallback to vmap(grad), {share}: {fallback.reason}"
