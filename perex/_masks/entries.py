"""A masked convolution as one product, for masks without structure or known only at run time.

The inputs that each result reads through the taps are laid side by side by slicing, and one
matrix product takes them to the result. Nothing mixes taps, so a masked entry is a factor of zero
and its share is exactly zero, in the result, in the input's gradient and in the kernel's.

A zero factor does not stop a NaN or an infinity. Where there are any, a second product *counts*,
for each result, the non-finite entries that the mask lets act on it; only results that have one
(the count is compared with a half, so rounding cannot matter) take the plain value, the others are
computed without these entries. The gradients are built in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from perex._compat import promote_types
from perex._masks.geometry import crop, normalize, spans, uncrop
from perex._masks.products import from_channels_last, grouped_product


def convolve_entries(
    x: jax.Array,
    kernel: jax.Array,
    mask: jax.Array | np.ndarray | None,
    taps: Sequence[tuple[int, ...]],
    params: Mapping[str, Any],
    out: jax.ShapeDtypeStruct,
) -> jax.Array:
    """Convolves with the entries of a kernel at which a mask is not zero.

    Memory: the input is held once for each tap.

    Args:
      x: the input, in the layout that ``params`` says.
      kernel: the whole kernel; masked entries may hold anything.
      mask: bool, of the kernel's shape; may be a tracer. None where every entry at ``taps`` acts.
      taps: the taps that may act.
      params: the parameters of the ``conv_general_dilated`` equation.
      out: shape and dtype of the equation's result.

    Returns:
      The result of the convolution, of the shape and dtype of ``out``. With a mask it can be
      differentiated in reverse mode only.
    """
    x, geometry = normalize(x, kernel, params, out.shape)
    inputs = kernel.shape[geometry.rhs_spec[1]]
    lhs, rhs = geometry.lhs_spec, geometry.rhs_spec
    in_window = tuple(x.shape[axis] for axis in lhs[2:])
    seen = []
    for tap in taps:
        reads = spans(geometry, tap, tuple(t + 1 for t in tap), in_window)
        if reads is not None:
            shifted = uncrop(crop(x, lhs[2:], reads, geometry.strides), lhs[2:], reads)
            shifted = jnp.transpose(shifted, (lhs[0], *lhs[2:], lhs[1]))
            seen.append((tap, shifted.reshape(*shifted.shape[:-1], geometry.groups, inputs)))
    if not seen:
        return jnp.zeros(out.shape, out.dtype)
    patches = jnp.stack([shifted for _, shifted in seen], -2)
    patches = patches.reshape(*patches.shape[:-3], -1)

    def rows(values: Any) -> jax.Array:
        values = jnp.transpose(values, (*rhs[2:], rhs[1], rhs[0]))
        values = jnp.stack([values[tap] for tap, _ in seen])
        return values.reshape(-1, geometry.groups, values.shape[-1] // geometry.groups)

    precision = geometry.options.get("precision")
    if mask is None:
        y = grouped_product(patches, rows(kernel), precision, out.dtype)
    else:
        y = _masked_product(patches, rows(kernel), rows(mask), precision, out.dtype)
    return from_channels_last(y, geometry.out_spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _masked_product(
    x: jax.Array, kernel: jax.Array, mask: jax.Array, precision: Any, dtype: Any
) -> jax.Array:
    """`grouped_product` of ``x [..., G * J]`` and ``kernel [J, G, O]`` where ``mask`` is true."""
    kernel = jnp.where(mask, kernel, 0)
    bad = ~jnp.isfinite(x)

    def plain() -> jax.Array:
        return grouped_product(x, kernel, precision, dtype)

    def careful() -> jax.Array:
        counts = grouped_product(
            bad.astype(jnp.float32), mask.astype(jnp.float32), lax.Precision.HIGHEST, jnp.float32
        )
        rest = grouped_product(jnp.where(bad, 0, x), kernel, precision, dtype)
        return jnp.where(counts > 0.5, plain(), rest)

    return lax.cond(bad.any(), careful, plain)


def _forward(x, kernel, mask, precision, dtype):
    return _masked_product(x, kernel, mask, precision, dtype), (x, kernel, mask)


def _backward(precision, dtype, saved, cotangent):
    del dtype
    x, kernel, mask = saved
    back = _masked_product(
        cotangent,
        kernel.transpose(2, 1, 0).astype(cotangent.dtype),
        mask.transpose(2, 1, 0),
        precision,
        cotangent.dtype,
    ).astype(x.dtype)
    inputs, groups, outputs = kernel.shape
    rows = x.reshape(-1, groups, inputs)
    columns = cotangent.reshape(-1, groups, outputs)
    gradient = jnp.einsum(
        "ngi,ngo->igo",
        rows,
        columns,
        precision=precision,
        preferred_element_type=promote_types(kernel.dtype, jnp.float32),
    )
    return back, jnp.where(mask, gradient, 0).astype(kernel.dtype), None


_masked_product.defvjp(_forward, _backward)
