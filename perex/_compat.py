"""Everything that depends on JAX's internals or on its version lives here.

No other file imports ``jax.extend`` or asks for a JAX version. Differences met so far:

* ``ClosedJaxpr`` and ``Jaxpr`` are two classes up to jax 0.10 and one from 0.11.
* ``scan`` describes its operands by ``num_consts`` and ``num_carry`` up to 0.10 and by the flat
  trees ``ft_in`` and ``ft_out`` from 0.11.
* The manual mesh axes over which an array varies are read from its aval.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.extend.core import primitives

__all__ = [
    "Literal",
    "as_operands",
    "call_jaxpr",
    "equation_scope",
    "inner_jaxprs",
    "manual_axes",
    "primitives",
    "promote_types",
    "scan_operand_counts",
    "source_summary",
    "split_closed_jaxpr",
    "vary_over",
]

Literal = jex_core.Literal

# Calls whose body can be evaluated in place: they change how a computation is compiled, not what it
# computes. Custom derivatives are not among them: inlining would drop the user's rule.
_INLINED_CALLS = (primitives.jit_p, primitives.closed_call_p)


def split_closed_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the open jaxpr and its constants, for closed and for open jaxprs alike."""
    if isinstance(jaxpr, jex_core.ClosedJaxpr):  # pyright: ignore[reportPrivateImportUsage]
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def call_jaxpr(equation: Any) -> Any | None:
    """Returns the body of an equation that merely calls a jaxpr (a nested jit), or None."""
    if equation.primitive in _INLINED_CALLS:
        return equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return None


def inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """Yields every jaxpr that the parameters of an equation hold."""
    yield from jex_core.jaxprs_in_params(params)


def scan_operand_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns (number of constants, number of carries) of a scan equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def as_operands(params: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Any]:
    """Returns operands as an equation wants them when it is bound again.

    A jaxpr may hold constants as arrays of NumPy. Most primitives do not care, but a call whose
    derivative or batching is a Python function of the user hands them on to it: it may index them
    with tracers, as it may what it was given when it was traced.
    """
    if not any(map(callable, params.values())):
        return operands
    with jax.ensure_compile_time_eval():
        return [x if isinstance(x, jax.Array) else jax.numpy.asarray(x) for x in operands]


@contextlib.contextmanager
def equation_scope(equation: Any) -> Iterator[None]:
    """Restores the context in which a user wrote an equation.

    The equation's own settings (such as ``xla_metadata``), name stack and traceback are put back,
    so that an error raised while the equation is bound again points at the user's line.
    """
    info = equation.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack), equation.ctx.manager:
        yield


def source_summary(equation: Any) -> str:
    """Returns ``file:line (function)`` of the user's line that made the equation."""
    return source_info_util.summarize(equation.source_info)


def manual_axes(aval: Any) -> frozenset[str]:
    """Returns the manual mesh axes over which a value varies (non-empty only in ``shard_map``)."""
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(manual.varying) if manual is not None else frozenset()


def vary_over(value: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Marks ``value`` as varying over manual mesh axes, where it does not already."""
    missing = tuple(sorted(axes - manual_axes(jax.typeof(value))))
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def promote_types(*dtypes: Any) -> Any:
    """Returns the dtype that holds all of these, also where jax is set to promote none by itself.

    With ``jax_numpy_dtype_promotion="strict"`` even `jax.numpy.promote_types` raises. Floats of
    less than 16 bits are promoted too, which JAX never does by itself: bfloat16 holds them all.
    """
    unlike = {jax.numpy.dtype(dtype) for dtype in dtypes}
    if len(unlike) > 1:
        unlike = {jax.numpy.dtype("bfloat16") if _is_tiny(dtype) else dtype for dtype in unlike}
    with jax.numpy_dtype_promotion("standard"):
        return jax.numpy.result_type(*unlike)


def _is_tiny(dtype: Any) -> bool:
    floating = jax.numpy.issubdtype(dtype, jax.numpy.floating)
    return floating and jax.numpy.finfo(dtype).bits < 16
