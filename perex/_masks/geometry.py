"""What of a convolution a rectangle of its kernel's taps computes.

Shifts and crops are done by slicing the input and padding the output, and the padding of the
convolutions that remain lies between 0 and the window's reach. Neither they nor their derivatives
then have a negative padding, which is computed wrongly on the CPU (openxla/xla#48713, #48715).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True, eq=False)
class Geometry:
    """A convolution without batch groups and input dilation, on an input in its original layout.

    Attributes:
      lhs_spec: the axes of the input: examples, channels, spatial.
      rhs_spec: the axes of the kernel: output channels, input channels, spatial.
      out_spec: the axes of the result: examples, channels, spatial.
      groups: feature groups.
      window: the number of taps along each spatial axis.
      strides: the window's step, along each spatial axis.
      dilation: the distance between taps, along each spatial axis.
      padding: low and high padding, along each spatial axis; may be negative.
      out_shape: the shape of the result.
      options: parameters of the primitive that are handed on as they are.
    """

    lhs_spec: tuple[int, ...]
    rhs_spec: tuple[int, ...]
    out_spec: tuple[int, ...]
    groups: int
    window: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    out_shape: tuple[int, ...]
    options: Mapping[str, Any]

    @property
    def out_window(self) -> tuple[int, ...]:
        """The spatial shape of the result."""
        return tuple(self.out_shape[axis] for axis in self.out_spec[2:])


def normalize(
    x: jax.Array, kernel: Any, params: Mapping[str, Any], out_shape: tuple[int, ...]
) -> tuple[jax.Array, Geometry]:
    """Rewrites batch groups as feature groups and inserts the input dilation.

    Args:
      x: the input, ``[N, C, *S]`` in the order that ``params`` says.
      kernel: the kernel, or anything with its shape.
      params: the parameters of a ``conv_general_dilated`` equation.
      out_shape: the shape of the equation's result.

    Returns:
      The input and the geometry of an equal convolution.
    """
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    groups = params["feature_group_count"]
    if params["batch_group_count"] > 1:
        groups = params["batch_group_count"]
        batch, channel = lhs_spec[:2]
        size = x.shape[batch] // groups
        x = jnp.moveaxis(x, (batch, channel), (0, 1))
        x = x.reshape(groups, size, *x.shape[1:])
        x = jnp.moveaxis(x, 0, 1).reshape(size, groups * x.shape[2], *x.shape[3:])
        x = jnp.moveaxis(x, (0, 1), (batch, channel))
    if any(step != 1 for step in params["lhs_dilation"]):
        interior = [(0, 0, 0)] * x.ndim
        for axis, step in zip(lhs_spec[2:], params["lhs_dilation"], strict=True):
            interior[axis] = (0, 0, step - 1)
        x = lax.pad(x, jnp.zeros((), x.dtype), interior)
    handled = {
        "dimension_numbers", "feature_group_count", "batch_group_count", "lhs_dilation",
        "rhs_dilation", "window_strides", "padding", "lhs_shape", "rhs_shape",
    }  # fmt: skip
    return x, Geometry(
        lhs_spec=tuple(lhs_spec),
        rhs_spec=tuple(rhs_spec),
        out_spec=tuple(out_spec),
        groups=groups,
        window=tuple(kernel.shape[axis] for axis in rhs_spec[2:]),
        strides=tuple(params["window_strides"]),
        dilation=tuple(params["rhs_dilation"]),
        padding=tuple((int(low), int(high)) for low, high in params["padding"]),
        out_shape=tuple(out_shape),
        options={key: value for key, value in params.items() if key not in handled},
    )


@dataclasses.dataclass(frozen=True)
class Span:
    """Where one axis of a rectangle reads and writes.

    Attributes:
      start: the first input position read.
      stop: one past the last input position read.
      padding: zeros that the convolution adds on either side of these.
      before: results before the first one that sees the input; they are zero.
      after: results after the last one that sees the input; they are zero.
    """

    start: int
    stop: int
    padding: tuple[int, int]
    before: int
    after: int


def spans(
    geometry: Geometry,
    first_tap: tuple[int, ...],
    last_tap: tuple[int, ...],
    in_window: tuple[int, ...],
) -> list[Span] | None:
    """Returns what a rectangle of taps reads and writes, along each axis.

    Tap ``j`` of result ``p`` reads input position ``p * stride + j * dilation - low``.

    Args:
      geometry: the convolution.
      first_tap: the first tap of the rectangle.
      last_tap: one past its last tap.
      in_window: the spatial shape of the input.

    Returns:
      A span for each spatial axis, or None where every result sees nothing but padding.
    """
    found = []
    for start, stop, stride, dilation, (low, _), size, count in zip(
        first_tap,
        last_tap,
        geometry.strides,
        geometry.dilation,
        geometry.padding,
        in_window,
        geometry.out_window,
        strict=True,
    ):
        origin = start * dilation - low
        reach = (stop - start - 1) * dilation
        # Results p with p * stride + origin + reach >= 0 and p * stride + origin < size.
        first = max(0, -((origin + reach) // stride))
        last = min(count, -((origin - size) // stride))
        if first >= last:
            return None
        begin = first * stride + origin
        end = (last - 1) * stride + origin + reach + 1
        found.append(
            Span(
                max(begin, 0),
                min(end, size),
                (max(-begin, 0), max(end - size, 0)),
                first,
                count - last,
            )
        )
    return found


def crop(
    x: jax.Array, axes: tuple[int, ...], spans_: list[Span], step: tuple[int, ...] | None = None
) -> jax.Array:
    """Slices ``x`` to what is read along each spatial axis, in steps where these are given."""
    start, stop, strides = [0] * x.ndim, list(x.shape), [1] * x.ndim
    for i, (axis, span) in enumerate(zip(axes, spans_, strict=True)):
        start[axis], stop[axis] = span.start, span.stop
        strides[axis] = 1 if step is None else step[i]
    if all(
        a == 0 and b == n and s == 1
        for a, b, n, s in zip(start, stop, x.shape, strides, strict=True)
    ):
        return x
    return lax.slice(x, start, stop, strides)


def uncrop(y: jax.Array, axes: tuple[int, ...], spans_: list[Span]) -> jax.Array:
    """Pads ``y`` with the results that see no input."""
    widths = [(0, 0, 0)] * y.ndim
    for axis, span in zip(axes, spans_, strict=True):
        widths[axis] = (span.before, span.after, 0)
    return lax.pad(y, jnp.zeros((), y.dtype), widths) if any(map(any, widths)) else y
