"""One normal form for every convolution, so that each algorithm is written once.

A ``conv_general_dilated`` of one example becomes, with the example axis ``B`` in front,

    x          [B, N, *S, G, C]    N images, S spatial sizes, G groups of C channels
    cotangent  [B, N, *O, G, P]    O output sizes, P output channels of each group
    kernel     [*K, G, C, P]

    out[n, o, g, p] = sum_{k, c} padded(x)[n, o * stride + k * dilation, g, c] * kernel[k, g, c, p]

where ``padded`` spreads ``x`` by its interior dilation and puts zeros around it. Feature groups
split channels and batch groups split images, and both come out as ``G``. Negative padding has
become a crop of ``x``, and so has everything on the right that no kernel position reads:
afterwards each padded size is exactly ``(O - 1) * stride + (K - 1) * dilation + 1`` and all
padding is at least zero. Crops are slices and padding is an update of zeros; ``lax.pad`` and
negative padding, which the transpose of ``lax.pad`` also makes, give wrong values on some CPU
versions (openxla/xla#48713, #48715).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from perex._compat import promote_types

if TYPE_CHECKING:
    from perex._rules.registry import Site


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution of one example in normal form; see the module for the letters.

    Attributes:
      images: N, images inside one example that share the kernel.
      groups: G.
      channels: C, input channels of one group.
      features: P, output channels of one group.
      spatial: S, input sizes after cropping.
      kernel: K.
      out: O, output sizes.
      strides: step of the window along each axis.
      dilation: distance of kernel positions along each axis.
      interior: distance of input entries along each axis (the lhs dilation of a transposed
        convolution).
      pads: zeros (low, high) around the spread input, never negative.
      crops: (start, stop) along each axis of the original input.
      precision: as in the equation.
      dtype: type in which products are added up, at least float32.
    """

    images: int
    groups: int
    channels: int
    features: int
    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    out: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    interior: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    crops: tuple[tuple[int, int], ...]
    precision: Any
    dtype: Any

    @property
    def taps(self) -> int:
        """Number of kernel positions."""
        return math.prod(self.kernel)

    @property
    def positions(self) -> int:
        """T: number of outputs positions of one example, over its images."""
        return self.images * math.prod(self.out)

    @property
    def depth(self) -> int:
        """D: kernel entries for one output channel."""
        return self.taps * self.channels

    @property
    def kernel_size(self) -> int:
        """Number of kernel entries."""
        return self.groups * self.depth * self.features

    @property
    def padded(self) -> tuple[int, ...]:
        """Spatial sizes of the padded input."""
        return tuple(
            (o - 1) * s + (k - 1) * d + 1
            for o, s, k, d in zip(self.out, self.strides, self.kernel, self.dilation, strict=True)
        )

    @property
    def empty(self) -> bool:
        """Whether there is nothing to add up, or nothing to return."""
        return 0 in (self.positions, self.kernel_size) or 0 in self.spatial

    @property
    def itemsize(self) -> int:
        """Bytes of one number while adding up."""
        return jnp.dtype(self.dtype).itemsize


def accumulate_dtype(*dtypes: Any) -> Any:
    """The type to add products of these types up in: their promotion, at least float32."""
    return promote_types(*dtypes, jnp.float32)


def _fit(size: int, spread: int, low: int, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Crop (start, stop) and padding (low, high) which make a window of ``length`` of an axis.

    The axis has ``size`` entries ``spread`` apart, the first of them at ``low`` (maybe negative);
    the window begins at 0.
    """
    start = max(0, -(low // spread))
    stop = min(size, (length - 1 - low) // spread + 1)
    if stop <= start:
        return (0, 0), (length, 0)
    first, last = start * spread + low, (stop - 1) * spread + low
    return (start, stop), (first, length - 1 - last)


def describe(site: Site) -> Convolution:
    """The normal form of a site of ``conv_general_dilated`` whose parameter is the kernel.

    Args:
      site: its operands are (lhs, rhs) of one example, unbatched.

    Returns:
      The description, static and hashable.
    """
    params = site.params
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    lhs, rhs = site.operands[0], site.operands[1]
    batch_groups = params["batch_group_count"]
    groups = params["feature_group_count"] * batch_groups
    kernel = tuple(rhs.shape[i] for i in rhs_spec[2:])
    out = tuple(site.out.shape[i] for i in out_spec[2:])
    strides, dilation = tuple(params["window_strides"]), tuple(params["rhs_dilation"])
    interior = tuple(params["lhs_dilation"])
    fits = [
        _fit(lhs.shape[axis], spread, low, (o - 1) * s + (k - 1) * d + 1)
        for axis, spread, (low, _), o, s, k, d in zip(
            lhs_spec[2:], interior, params["padding"], out, strides, kernel, dilation, strict=True
        )
    ]
    return Convolution(
        images=lhs.shape[lhs_spec[0]] // batch_groups,
        groups=groups,
        channels=rhs.shape[rhs_spec[1]],
        features=rhs.shape[rhs_spec[0]] // groups,
        spatial=tuple(stop - start for (start, stop), _ in fits),
        kernel=kernel,
        out=out,
        strides=strides,
        dilation=dilation,
        interior=interior,
        pads=tuple(pad for _, pad in fits),
        crops=tuple(crop for crop, _ in fits),
        precision=params["precision"],
        dtype=accumulate_dtype(lhs.dtype, rhs.dtype, site.out.dtype),
    )


def arrange_input(site: Site, conv: Convolution, x: jax.Array) -> jax.Array:
    """Brings the input ``[B, *lhs.shape]`` to ``[B, N, *S, G, C]``."""
    lhs_spec = site.params["dimension_numbers"][0]
    batch = x.shape[0]
    x = x.transpose(0, 1 + lhs_spec[0], *(1 + i for i in lhs_spec[2:]), 1 + lhs_spec[1])
    x = x[(slice(None), slice(None), *(slice(*crop) for crop in conv.crops))]
    if site.params["batch_group_count"] == 1:
        return x.reshape(batch, conv.images, *conv.spatial, conv.groups, conv.channels)
    x = x.reshape(batch, conv.groups, conv.images, *conv.spatial, conv.channels)
    return jnp.moveaxis(x, 1, -2)


def arrange_cotangent(site: Site, conv: Convolution, cotangent: jax.Array) -> jax.Array:
    """Brings the output cotangent ``[B, *out.shape]`` to ``[B, N, *O, G, P]``."""
    spec = site.params["dimension_numbers"][2]
    batch = cotangent.shape[0]
    cotangent = cotangent.transpose(0, 1 + spec[0], *(1 + i for i in spec[2:]), 1 + spec[1])
    return cotangent.reshape(batch, conv.images, *conv.out, conv.groups, conv.features)


def restore_kernel(site: Site, conv: Convolution, gradient: jax.Array) -> jax.Array:
    """Brings ``[..., *K, G, C, P]`` to ``[..., *kernel.shape]``; no leading axis or one."""
    rhs_spec = site.params["dimension_numbers"][1]
    rank = len(conv.kernel)
    lead = gradient.ndim - rank - 3
    gradient = jnp.moveaxis(gradient, -3, -2)
    gradient = gradient.reshape(
        *gradient.shape[:lead], *conv.kernel, conv.channels, conv.groups * conv.features
    )
    order = sorted(range(rank + 2), key=lambda i: (*rhs_spec[2:], rhs_spec[1], rhs_spec[0])[i])
    return gradient.transpose(*range(lead), *(lead + i for i in order))


def pad_input(conv: Convolution, x: jax.Array) -> jax.Array:
    """Spreads and pads ``x``, ``[b, N, *S, G, C]``, to ``[b, N, *conv.padded, G, C]``."""
    for axis, spread in enumerate(conv.interior, start=2):
        size = x.shape[axis]
        if spread == 1 or size <= 1:
            continue
        x = jnp.expand_dims(x, axis + 1)
        zeros = jnp.zeros((*x.shape[: axis + 1], spread - 1, *x.shape[axis + 2 :]), x.dtype)
        x = lax.concatenate([x, zeros], axis + 1)
        x = x.reshape(*x.shape[:axis], size * spread, *x.shape[axis + 2 :])
        x = lax.slice_in_dim(x, 0, (size - 1) * spread + 1, axis=axis)
    if not any(low or high for low, high in conv.pads):
        return x
    shape = (*x.shape[:2], *conv.padded, *x.shape[-2:])
    start = (0, 0, *(low for low, _ in conv.pads), 0, 0)
    return lax.dynamic_update_slice(jnp.zeros(shape, x.dtype), x, start)


def tap(
    conv: Convolution, padded: jax.Array, position: Sequence[int], rows: int | None = None
) -> jax.Array:
    """What a kernel position reads of a padded input.

    Args:
      conv: the convolution.
      padded: ``[b, N, *conv.padded, G, C]``, or only the part of the first spatial axis that
        ``rows`` outputs read.
      position: index into the kernel, relative to that part.
      rows: number of outputs along the first spatial axis, by default all.

    Returns:
      ``[b, N, *O, G, C]``, with ``rows`` in place of the first output size.
    """
    out = conv.out if rows is None else (rows, *conv.out[1:])
    start = [k * d for k, d in zip(position, conv.dilation, strict=True)]
    stop = [f + (o - 1) * s + 1 for f, o, s in zip(start, out, conv.strides, strict=True)]
    return lax.slice(
        padded,
        (0, 0, *start, 0, 0),
        (*padded.shape[:2], *stop, *padded.shape[-2:]),
        (1, 1, *conv.strides, 1, 1),
    )
