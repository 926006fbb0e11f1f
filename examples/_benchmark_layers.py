"""The convolutions of the benchmark: a grid of layers as real networks have them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

_BATCH_SIZES = (1, 8, 32, 128)
_NUMBERS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


@dataclasses.dataclass(frozen=True)
class Layer:
    """A convolution of one example ``[*spatial, channels]``.

    Attributes:
      name: what it is called in the tables.
      spatial: input sizes.
      channels: input channels.
      features: output channels.
      kernel: kernel sizes.
      stride: the same along each axis.
      padding: "SAME", "VALID", or (low, high) for all axes.
      dilation: of the kernel.
      spread: dilation of the input; above one the convolution is a transposed one.
      groups: of channels.
      batch_sizes: to run it with.
    """

    name: str
    spatial: tuple[int, ...]
    channels: int
    features: int
    kernel: tuple[int, ...]
    stride: int = 1
    padding: str | tuple[int, int] = "SAME"
    dilation: int = 1
    spread: int = 1
    groups: int = 1
    batch_sizes: tuple[int, ...] = _BATCH_SIZES

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return len(self.spatial)

    def apply(self, kernel: jax.Array, images: jax.Array) -> jax.Array:
        """Convolves ``images [B, *spatial, channels]`` with the kernel."""
        padding: Any = self.padding
        if not isinstance(padding, str):
            padding = (padding,) * self.rank
        return jax.lax.conv_general_dilated(
            images,
            kernel,
            (self.stride,) * self.rank,
            padding,
            lhs_dilation=(self.spread,) * self.rank,
            rhs_dilation=(self.dilation,) * self.rank,
            dimension_numbers=_NUMBERS[self.rank],
            feature_group_count=self.groups,
        )

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        """``[*kernel, channels / groups, features]``."""
        return (*self.kernel, self.channels // self.groups, self.features)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """``[*spatial, channels]``."""
        return (*self.spatial, self.channels)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the result of one example."""
        images = jax.ShapeDtypeStruct((1, *self.input_shape), "float32")
        kernel = jax.ShapeDtypeStruct(self.kernel_shape, "float32")
        return jax.eval_shape(self.apply, kernel, images).shape[1:]

    @property
    def product(self) -> tuple[int, int, int, int]:
        """(groups, D, T, P): one example's kernel gradient as matrix products [D, T] [T, P]."""
        depth = math.prod(self.kernel) * self.channels // self.groups
        positions = math.prod(self.out_shape[:-1])
        return self.groups, depth, positions, self.features // self.groups


def _square(
    name: str, size: int, channels: int, features: int, kernel: int, **others: Any
) -> Layer:
    return Layer(name, (size, size), channels, features, (kernel, kernel), **others)


def _depthwise(name: str, spatial: Sequence[int], channels: int, kernel: int) -> Layer:
    sizes = (kernel,) * len(spatial)
    return Layer(name, tuple(spatial), channels, channels, sizes, groups=channels)


LAYERS: tuple[Layer, ...] = (
    # ResNet-18 of width 64 and WRN-16-4 at 32x32; some layers are the same in both.
    _square("resnet 3-64 k3 @32", 32, 3, 64, 3),
    _square("resnet 64-64 k3 @32", 32, 64, 64, 3),
    _square("resnet 64-128 k3 s2 @32", 32, 64, 128, 3, stride=2),
    _square("resnet 64-128 k1 s2 @32", 32, 64, 128, 1, stride=2),
    _square("resnet 128-128 k3 @16", 16, 128, 128, 3),
    _square("resnet 128-256 k3 s2 @16", 16, 128, 256, 3, stride=2),
    _square("resnet 256-256 k3 @8", 8, 256, 256, 3),
    _square("resnet 256-512 k3 s2 @8", 8, 256, 512, 3, stride=2),
    _square("resnet 512-512 k3 @4", 4, 512, 512, 3),
    _square("wrn 3-16 k3 @32", 32, 3, 16, 3),
    _square("wrn 16-64 k3 @32", 32, 16, 64, 3),
    _square("wrn 16-64 k1 @32", 32, 16, 64, 1),
    _square("wrn 128-256 k1 s2 @16", 16, 128, 256, 1, stride=2),
    # What VGG16 at 32x32 has beyond these.
    _square("vgg 64-128 k3 @16", 16, 64, 128, 3),
    _square("vgg 128-256 k3 @8", 8, 128, 256, 3),
    _square("vgg 256-512 k3 @4", 4, 256, 512, 3),
    _square("vgg 512-512 k3 @2", 2, 512, 512, 3),
    _square("mnist 1-16 k8 s2 @28", 28, 1, 16, 8, stride=2),
    _square("mnist 16-32 k4 s2 @13", 13, 16, 32, 4, stride=2, padding="VALID"),
    # The toy networks of Rochette et al. (arXiv:1912.06015), on smaller images.
    _square("rochette 3-25 k3 @128", 128, 3, 25, 3, padding="VALID"),
    _square("rochette 3-25 k5 @128", 128, 3, 25, 5, padding="VALID"),
    _square("rochette 25-25 k3 @62", 62, 25, 25, 3, padding="VALID"),
    _square("rochette 25-37 k5 @62", 62, 25, 37, 5, padding="VALID"),
    _depthwise("depthwise 128 k3 @32", (32, 32), 128, 3),
    _depthwise("depthwise 256 k3 @8", (8, 8), 256, 3),
    _depthwise("depthwise 96 k7 @32", (32, 32), 96, 7),
    _depthwise("depthwise 192 k7 @16", (16, 16), 192, 7),
    _square("dilated 64-64 k3 d2 @32", 32, 64, 64, 3, dilation=2),
    _square("dilated 128-128 k3 d4 @16", 16, 128, 128, 3, dilation=4),
    _square("pointwise 64-256 k1 @16", 16, 64, 256, 1),
    _square("pointwise 512-512 k1 @8", 8, 512, 512, 1),
    _square("patches 3-96 k4 s4 @32", 32, 3, 96, 4, stride=4, padding="VALID"),
    Layer("line 64-64 k5 @1000", (1000,), 64, 64, (5,)),
    _depthwise("line depthwise 64 k5 @1000", (1000,), 64, 5),
    Layer("volume 4-16 k3 @8x16x16", (8, 16, 16), 4, 16, (3, 3, 3)),
    Layer("volume 32-32 k3 s2 @8", (8, 8, 8), 32, 32, (3, 3, 3), stride=2),
    _square("transposed 64-32 k3 @16", 16, 64, 32, 3, spread=2, padding=(1, 2)),
    _square("transposed 64-32 k2 @16", 16, 64, 32, 2, spread=2, padding=(1, 1)),
    _square("grouped 64-64 k3 g4 @32", 32, 64, 64, 3, groups=4),
    _square("grouped 128-128 k3 g4 @16", 16, 128, 128, 3, groups=4),
    _square("tiny 8-16 k2 @4", 4, 8, 16, 2, padding="VALID", batch_sizes=(300,)),
)

# A few of each kind, for a run of a minute.
SAMPLE: tuple[str, ...] = (
    "resnet 128-128 k3 @16",
    "resnet 256-512 k3 s2 @8",
    "wrn 16-64 k1 @32",
    "mnist 1-16 k8 s2 @28",
    "depthwise 256 k3 @8",
    "line 64-64 k5 @1000",
    "tiny 8-16 k2 @4",
)
SAMPLE_BATCH_SIZE = 8


def select(patterns: Sequence[str], full: bool) -> list[Layer]:
    """Returns the layers whose name holds one of the patterns; without any, the sample or all."""
    if patterns:
        return [layer for layer in LAYERS if any(p in layer.name for p in patterns)]
    return [layer for layer in LAYERS if full or layer.name in SAMPLE]
