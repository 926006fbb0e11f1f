"""`perex.exact_masks`: any function, with its masked convolutions made exact."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from perex import _compat, _regions
from perex._masks.find import Found, Knowledge
from perex._trace import Equation, Program, flatten, trace

_P = _compat.primitives


def exact_masks(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Makes every masked convolution in a function exact.

    A kernel that is ``mask * weight`` or ``where(mask, weight, 0)``, in either order and through
    casts, reshapes, broadcasts and transposes, has entries that cannot have any influence.
    Backends that transform convolutions (Winograd) let them have some. Here only the pieces of
    the kernel that the mask leaves are convolved with, so that masked entries influence neither
    the result nor any gradient, even where the inputs that only they see, or the weights
    themselves, are NaN.

    A mask is known where it is computed from constants: literals, arrays that the function closes
    over, and, outside of `jax.jit`, arguments that hold nothing but zeros and ones. A mask is
    recognised at run time where it is, or was before a cast, boolean or integer, or where it
    passed through `jax.lax.stop_gradient`; a float array that `jax.jit` passes in, like the mask in
    the state of a whole Flax NNX module, is not: close over it (``nnx.split(model, nnx.Param,
    ...)``) or mark it in one of these ways. Its convolution becomes one matrix product over all
    taps: as exact, but it takes the memory of the input once for each tap, saves no
    multiplications and can be differentiated in reverse mode only. A known mask without structure
    (more than 16 pieces) goes that way too.

    Convolutions within ``jit``, ``scan``, ``while_loop``, ``cond`` and ``checkpoint`` are found
    too; functions with custom derivatives, and ``shard_map``, are left as they are (apply
    `exact_masks` inside). The transform goes outside or inside of ``jit``, ``vmap`` and ``grad``;
    ``jax.grad(exact_masks(loss))`` makes all gradients exact, ``exact_masks(jax.grad(loss))``
    those with respect to inputs.

    Args:
      fun: the function; arguments that are not arrays are handed to it as they are.

    Returns:
      A function with the same arguments and results, up to rounding.

    Raises:
      TypeError: ``fun`` is not callable.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> mask = jnp.ones((3, 1, 1)).at[2].set(0)
      >>> def causal(weight, x):
      ...     numbers = ("NWC", "WIO", "NWC")
      ...     return jax.lax.conv_general_dilated(
      ...         x, mask * weight, (1,), "SAME", dimension_numbers=numbers
      ...     )
      >>> x = jnp.array([1.0, 2.0, jnp.nan]).reshape(1, 3, 1)
      >>> print(exact_masks(causal)(jnp.ones((3, 1, 1)), x).ravel())
      [ 1.  3. nan]
    """
    if not callable(fun):
        raise TypeError(f"perex.exact_masks: fun must be callable, got {fun!r}.")

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        positions = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]

        def of_arrays(*arrays: Any) -> Any:
            merged = list(leaves)
            for position, array in zip(positions, arrays, strict=True):
                merged[position] = array
            args, kwargs = jax.tree.unflatten(treedef, merged)
            return fun(*args, **kwargs)

        arrays = [leaves[i] for i in positions]
        traced = trace(of_arrays, arrays, jax.tree.structure((tuple(arrays), {})))
        values = {
            variable: array
            for variable, array in zip(traced.program.inputs, arrays, strict=True)
            if not isinstance(array, Tracer)
        }
        knowledge = Knowledge(traced.program, values)
        return jax.tree.unflatten(traced.out_tree, _run(knowledge, arrays))

    return wrapped


def _run(knowledge: Knowledge, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates a program with its masked convolutions made exact."""
    program = knowledge.program
    environment = {**program.constants, **dict(zip(program.inputs, inputs, strict=True))}
    for equation in program.equations:
        operands = [environment[v] for v in equation.inputs]
        found = knowledge.find(equation)
        if found is not None:
            results = [_convolve(found, equation, operands, environment)]
        elif any(_holds_convolution(body) for body in _compat.inner_jaxprs(equation.params)):
            results = _region(knowledge, equation, operands)
        else:
            results = equation.bind(operands)
        environment.update(zip(equation.outputs, results, strict=True))
    return [environment[v] for v in program.outputs]


def _convolve(
    found: Found, equation: Equation, operands: Sequence[Any], environment: Mapping[int, Any]
) -> Any:
    with _compat.equation_scope(equation.source):
        return found.apply(operands[0], operands[1], environment)


def _holds_convolution(jaxpr: Any) -> bool:
    jaxpr, _ = _compat.split_closed_jaxpr(jaxpr)
    return any(
        equation.primitive is _P.conv_general_dilated_p
        or any(map(_holds_convolution, _compat.inner_jaxprs(equation.params)))
        for equation in jaxpr.eqns
    )


def _region(knowledge: Knowledge, equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """Emits an equation with bodies again, over `_run`."""
    if equation.primitive is _P.while_p:
        with _compat.equation_scope(equation.source):
            return _while(knowledge, equation, operands)
    form = _regions.form_of(equation)
    if form is None:
        return equation.bind(operands)
    bodies = [_enter(knowledge, equation, body) for body in form.bodies]
    with _compat.equation_scope(equation.source):
        if form.kind == "scan":
            return _scan(bodies[0], form.bodies[0], equation.params, operands)
        if form.kind == "checkpoint":
            return jax.checkpoint(
                functools.partial(_run, bodies[0]),
                prevent_cse=equation.params["prevent_cse"],
                policy=equation.params["policy"],
            )(operands)
        branches = [functools.partial(_run, body) for body in bodies]
        return jax.lax.switch(operands[0], branches, operands[1:])


def _enter(knowledge: Knowledge, equation: Equation, body: _regions.Body) -> Knowledge:
    count = len(body.program.inputs)
    operands = [
        None if body.carried(position) else equation.inputs[body.operands[position]]
        for position in range(count)
    ]
    return knowledge.enter(body.program, operands, [body.stacked(i) for i in range(count)])


def _scan(
    knowledge: Knowledge, body: _regions.Body, params: Mapping[str, Any], operands: Sequence[Any]
) -> list[Any]:
    first, last = body.carries.start, body.carries.stop

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = _run(knowledge, [*operands[:first], *carry, *xs])
        return outputs[: last - first], outputs[last - first :]

    carry, stacked = jax.lax.scan(
        step,
        list(operands[first:last]),
        list(operands[last:]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


def _while(knowledge: Knowledge, equation: Equation, operands: Sequence[Any]) -> list[Any]:
    params = equation.params
    counts = params["cond_nconsts"], params["body_nconsts"]
    starts = 0, counts[0]
    carry = list(operands[sum(counts) :])

    def part(jaxpr: Any, start: int, count: int) -> Callable[[list[Any]], list[Any]]:
        program: Program = flatten(jaxpr)
        consts = range(start, start + count)
        entering = [*(equation.inputs[i] for i in consts), *(None for _ in carry)]
        inner = knowledge.enter(program, entering, [False] * len(entering))
        return lambda carry: _run(inner, [*(operands[i] for i in consts), *carry])

    condition = part(params["cond_jaxpr"], starts[0], counts[0])
    body = part(params["body_jaxpr"], starts[1], counts[1])
    return jax.lax.while_loop(lambda carry: condition(carry)[0], body, carry)
