"""The plan as text: which rule each use of a parameter gets, or why it goes the plain way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from perex import _compat, _ways
from perex._api import Options
from perex._preparation import is_isometric, steps
from perex._steps import Plan, SiteUse
from perex._transform import Problem, plan_of


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
      fallback to ``vmap(grad)``; and the way to a clipped sum with the time estimated for each.

    Raises:
      TypeError: as `perex.grad`.
      ValueError: as `perex.grad`.

    Example:
      >>> import jax.numpy as jnp, perex
      >>> loss = lambda w, x: jnp.sum(jnp.tanh(w @ x))
      >>> print(perex.explain(loss)(jnp.ones((2, 3)), jnp.ones((4, 3))))  # doctest: +ELLIPSIS
      perex.explain: 4 examples, 1 parameter leaf, 6 parameters
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
    names = dict(zip(plan.program.inputs, problem.leaf_names, strict=True))
    parameters = [v for v, p in zip(plan.program.inputs, problem.parameters, strict=True) if p]
    count = sum(plan.program.avals[v].size for v in parameters)
    plural = "leaf" if len(parameters) == 1 else "leaves"
    lines = [
        f"perex.explain: {problem.batch_size} examples, {len(parameters)} parameter {plural}, "
        f"{count} parameters"
    ]
    for variable in parameters:
        shape = list(plan.program.avals[variable].shape)
        head = f"  {names[variable]} {shape}: "
        sites = [use for use in plan.sites if variable in use.leaves]
        way = _ways.choice(
            [(use, is_isometric(plan, use)) for use in sites],
            problem.batch_size,
            plan.program.avals[variable].size,
        )
        uses = [
            f"{head}{_describe_site(plan, use, problem.batch_size)}; clipped sum: {way}"
            for use in sites
        ]
        for fallback in plan.fallbacks:
            if variable in fallback.leaves:
                uses.append(head + _describe_fallback(fallback))
        if plan.dependence[variable] != 1:
            uses = [head + "fallback to vmap(grad): in_axes gives each example its own"]
        lines.extend(uses or [head + "not used: its gradient is zero"])
    return "\n".join(lines)


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


def _describe_fallback(fallback: Any) -> str:
    if fallback.equation is None:
        return f"fallback to vmap(grad): {fallback.reason}"
    equation = fallback.equation
    where = _compat.source_summary(equation.source)
    return f"{equation.primitive} at {where}: fallback to vmap(grad): {fallback.reason}"
