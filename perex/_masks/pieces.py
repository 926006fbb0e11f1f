"""A masked convolution as the sum of convolutions over the pieces of its kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from perex._masks.geometry import Geometry, crop, normalize, spans, uncrop
from perex._masks.products import from_channels_last, grouped_product
from perex._masks.rectangles import Block, Rectangle

Piece = tuple[Rectangle, Block]


def convolve_pieces(
    x: jax.Array,
    kernel: jax.Array,
    pieces: Sequence[Piece],
    params: Mapping[str, Any],
    out: jax.ShapeDtypeStruct,
) -> jax.Array:
    """Convolves with the pieces of a kernel, as if it were zero elsewhere.

    Only slices, pads, convolutions and products take part, so JAX differentiates it, in
    either mode and to any order. An input that no piece reads gets a gradient of exactly zero, and
    so does a kernel entry outside the pieces.

    Args:
      x: the input, in the layout that ``params`` says.
      kernel: the whole kernel; entries outside the pieces are not read.
      pieces: disjoint pieces.
      params: the parameters of the ``conv_general_dilated`` equation.
      out: shape and dtype of the equation's result.

    Returns:
      The result of the convolution, of the shape and dtype of ``out``.
    """
    x, geometry = normalize(x, kernel, params, out.shape)
    # Rounding each piece to 16 bits before the sum would cost accuracy.
    narrow = jnp.issubdtype(out.dtype, jnp.floating) and jnp.finfo(out.dtype).bits < 32
    dtype = jnp.float32 if narrow and len(pieces) > 1 else out.dtype
    total = None
    for rectangle, block in pieces:
        part = _convolve_piece(x, kernel, rectangle, block, geometry, dtype)
        if part is not None:
            total = part if total is None else total + part
    if total is None:
        return jnp.zeros(out.shape, out.dtype)
    return total.astype(out.dtype)


def _convolve_piece(
    x: jax.Array,
    kernel: jax.Array,
    rectangle: Rectangle,
    block: Block,
    geometry: Geometry,
    dtype: Any,
) -> jax.Array | None:
    """Returns one piece's share of the result, or None where it is zero."""
    in_window = tuple(x.shape[axis] for axis in geometry.lhs_spec[2:])
    reads = spans(geometry, rectangle.start, rectangle.stop, in_window)
    if reads is None:
        return None
    in_axis, out_axis = geometry.lhs_spec[1], geometry.out_spec[1]
    out_channels = geometry.out_shape[out_axis]
    in_per_group = kernel.shape[geometry.rhs_spec[1]]
    out_per_group = out_channels // geometry.groups
    channels_in = [g * in_per_group + i for g in block.groups for i in block.inputs]
    channels_out = [g * out_per_group + o for g in block.groups for o in block.outputs]

    start, stop = [0] * kernel.ndim, list(kernel.shape)
    for axis, low, high in zip(geometry.rhs_spec[2:], rectangle.start, rectangle.stop, strict=True):
        start[axis], stop[axis] = low, high
    kernel = lax.slice(kernel, start, stop)
    kernel = take(kernel, geometry.rhs_spec[1], block.inputs)
    kernel = take(kernel, geometry.rhs_spec[0], channels_out)
    x = take(x, in_axis, channels_in)

    one_tap = kernel.size == len(block.inputs) * len(channels_out)
    if one_tap and geometry.options.get("out_sharding") is None:
        x = crop(x, geometry.lhs_spec[2:], reads, geometry.strides)
        y = _one_tap(x, kernel, geometry, len(block.groups), dtype)
    else:
        y = lax.conv_general_dilated(
            crop(x, geometry.lhs_spec[2:], reads),
            kernel,
            window_strides=geometry.strides,
            padding=[span.padding for span in reads],
            rhs_dilation=geometry.dilation,
            dimension_numbers=lax.ConvDimensionNumbers(
                geometry.lhs_spec, geometry.rhs_spec, geometry.out_spec
            ),
            feature_group_count=len(block.groups),
            **{**geometry.options, "preferred_element_type": dtype},
        )
    return place(uncrop(y, geometry.out_spec[2:], reads), out_axis, channels_out, out_channels)


def _one_tap(
    x: jax.Array, kernel: jax.Array, geometry: Geometry, groups: int, dtype: Any
) -> jax.Array:
    """Convolves with a single tap: a matrix product, which no backend can take for a transform."""
    kernel = jnp.transpose(
        kernel, (*geometry.rhs_spec[2:], geometry.rhs_spec[1], geometry.rhs_spec[0])
    )
    kernel = kernel.reshape(kernel.shape[-2], groups, kernel.shape[-1] // groups)
    x = jnp.transpose(x, (geometry.lhs_spec[0], *geometry.lhs_spec[2:], geometry.lhs_spec[1]))
    y = grouped_product(x, kernel, geometry.options.get("precision"), dtype)
    return from_channels_last(y, geometry.out_spec)


def take(x: jax.Array, axis: int, indices: Sequence[int]) -> jax.Array:
    """Selects along an axis, by a slice where the (rising) indices are evenly spaced."""
    if len(indices) == x.shape[axis]:
        return x
    step = _step(indices)
    if step is None:
        return jnp.take(x, np.array(indices), axis, mode="clip")
    return lax.slice_in_dim(x, indices[0], indices[-1] + 1, step, axis)


def place(y: jax.Array, axis: int, indices: Sequence[int], size: int) -> jax.Array:
    """Writes along an axis into zeros: the transpose of `take`."""
    if len(indices) == size:
        return y
    step = _step(indices)
    if step is None:
        shape = (*y.shape[:axis], size, *y.shape[axis + 1 :])
        index = (*(slice(None),) * axis, np.array(indices))
        return jnp.zeros(shape, y.dtype).at[index].set(y, unique_indices=True)
    widths = [(0, 0, 0)] * y.ndim
    widths[axis] = (indices[0], size - 1 - indices[-1], step - 1)
    return lax.pad(y, jnp.zeros((), y.dtype), widths)


def _step(indices: Sequence[int]) -> int | None:
    steps = set(np.diff(indices).tolist())
    return (steps.pop() if steps else 1) if len(steps) <= 1 else None
