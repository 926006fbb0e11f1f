"""The suite `masks`: masked convolutions, forward and backward.

The unmasked path multiplies the kernel with its mask and convolves with all of it, zeros included.
`perex.exact_masks` convolves with what the mask leaves, so that a raster mask costs about half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _benchmark_report import (
    Column,
    Options,
    Row,
    Suite,
    Task,
    Verdict,
    compile_seconds,
    mebibytes,
    milliseconds,
    ratio,
    share,
    spread,
)
from _benchmark_timing import Contestant

import perex

_UNMASKED, _EXACT = "unmasked path", "exact_masks"
_EACH_VMAP, _EACH = "vmap(grad)", "perex.grad"
_NUMBERS = ("NHWC", "HWIO", "NHWC")


@dataclasses.dataclass(frozen=True)
class Masked:
    """A masked convolution of images ``[size, size, channels]`` to as many channels.

    Attributes:
      name: what it is called in the tables.
      kernel: size of the kernel.
      size: of the images.
      channels: input and output channels.
      mask: makes the mask, which broadcasts against the kernel.
      sample: whether it runs without `--full` too.
    """

    name: str
    kernel: int
    size: int
    channels: int
    mask: Callable[[Masked], np.ndarray]
    sample: bool = False


def _raster(layer: Masked, centre: bool) -> np.ndarray:
    """Keeps the taps before the centre in reading order: type A, or B with the centre itself."""
    count = layer.kernel**2
    before = np.arange(count) < count // 2 + centre
    return before.reshape(layer.kernel, layer.kernel, 1, 1).astype(np.float32)


def _colours(layer: Masked) -> np.ndarray:
    """Type B where the centre tap lets a colour see itself and the colours before it."""
    mask = np.tile(_raster(layer, False), (1, 1, layer.channels, layer.channels))
    colour = np.arange(layer.channels) * 3 // layer.channels
    centre = layer.kernel // 2
    mask[centre, centre] = colour[:, None] <= colour[None, :]
    return mask


_A, _B = partial(_raster, centre=False), partial(_raster, centre=True)
LAYERS = (
    Masked("raster A k3 64 @16", 3, 16, 64, _A, sample=True),
    Masked("raster B k3 64 @16", 3, 16, 64, _B),
    Masked("raster B k3 128 @28", 3, 28, 128, _B),
    Masked("raster A k7 32 @16", 7, 16, 32, _A, sample=True),
    Masked("raster B k7 32 @28", 7, 28, 32, _B),
    Masked("colours k3 96 @16", 3, 16, 96, _colours, sample=True),
    Masked("colours k7 48 @16", 7, 16, 48, _colours),
)
_BATCH_SIZE = 16


def _tasks(options: Options) -> Iterator[Task]:
    for layer in LAYERS:
        named = not options.layers or any(pattern in layer.name for pattern in options.layers)
        if named and (options.full or options.layers or layer.sample):
            batch_size = options.batch_size or _BATCH_SIZE
            kept = np.broadcast_to(
                layer.mask(layer), (layer.kernel, layer.kernel, layer.channels, layer.channels)
            )
            yield Task(
                layer.name,
                batch_size,
                partial(_contestants, layer, batch_size, jnp.dtype(options.dtype)),
                {"kept": float(kept.mean())},
            )


def _contestants(layer: Masked, batch_size: int, dtype: jnp.dtype) -> list[Contestant]:
    rng = np.random.default_rng(0)
    shape = (batch_size, layer.size, layer.size, layer.channels)
    kernel_shape = (layer.kernel, layer.kernel, layer.channels, layer.channels)
    kernel = jnp.asarray(rng.standard_normal(kernel_shape), dtype)
    images = jnp.asarray(rng.standard_normal(shape), dtype)
    cotangents = jnp.asarray(rng.standard_normal(shape), dtype)
    mask = layer.mask(layer).astype(dtype)

    def convolve(kernel: jax.Array, images: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            images, jnp.multiply(mask, kernel), (1, 1), "SAME", dimension_numbers=_NUMBERS
        )

    def loss(kernel: jax.Array, image: jax.Array, cotangent: jax.Array) -> jax.Array:
        return jnp.vdot(convolve(kernel, image[None])[0], cotangent)

    def forward_and_backward(
        convolve: Callable[..., jax.Array], kernel: Any, images: Any, cotangents: Any
    ) -> Any:
        out, pull_back = jax.vjp(convolve, kernel, images)
        return out, pull_back(cotangents)

    args = (kernel, images, cotangents)
    same = {"result and both gradients": lambda result: result}
    each = {"gradients": lambda gradient: gradient}
    return [
        Contestant(_UNMASKED, partial(forward_and_backward, convolve), args, same),
        Contestant(_EXACT, partial(forward_and_backward, perex.exact_masks(convolve)), args, same),
        Contestant(_EACH_VMAP, jax.vmap(jax.grad(loss), in_axes=(None, 0, 0)), args, each),
        Contestant(_EACH, perex.grad(loss), args, each),
    ]


def _columns(rows: Sequence[Row]) -> Sequence[Column]:
    del rows
    return [
        ("taps\nkept", lambda row: row.facts["kept"]),
        milliseconds(_UNMASKED),
        milliseconds(_EXACT),
        ratio(_EXACT, _UNMASKED, "exact /\nunmasked"),
        milliseconds(_EACH_VMAP),
        milliseconds(_EACH),
        ratio(_EACH, _EACH_VMAP, "perex.grad /\nvmap(grad)"),
        mebibytes(_UNMASKED),
        mebibytes(_EXACT),
        compile_seconds(_UNMASKED),
        compile_seconds(_EXACT),
    ]


def _verdicts(rows: Sequence[Row], options: Options) -> Sequence[Verdict]:
    del options
    raster = [row for row in rows if row.name.startswith("raster")]
    ratios = [row.ratio(_EXACT, _UNMASKED) for row in raster if row[_EXACT].times]
    return [
        spread("exact / unmasked path, forward and backward, raster masks", ratios),
        share("raster masks at 0.75 of the unmasked path or less", (r <= 0.75 for r in ratios)),
        spread("perex.grad / vmap(grad), masked", (row.ratio(_EACH, _EACH_VMAP) for row in rows)),
    ]


SUITE = Suite("Masked convolutions, forward and backward", _tasks, _columns, _verdicts)
