"""Models with a result for each pixel: a U-Net and a PixelCNN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import layers
from .common import Model


def unet(
    batch_size: int,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    size: int = 32,
    widths: Sequence[int] = (32, 64, 128),
    classes: int = 4,
) -> Model:
    """A U-Net (arXiv:1505.04597) with transposed convolutions and GroupNorm: a class a pixel."""
    init = layers.Init(key, dtype)

    def double(inputs: int, outputs: int) -> dict[str, Any]:
        return {
            "conv1": init.conv(3, inputs, outputs),
            "norm1": init.norm(outputs),
            "conv2": init.conv(3, outputs, outputs),
            "norm2": init.norm(outputs),
        }

    pairs = list(zip(widths[:-1], widths[1:], strict=True))
    params = {
        "down": [double(m, n) for m, n in zip((3, *widths[:-1]), widths, strict=True)],
        "enlarge": [init.conv(2, n, m) for m, n in pairs],
        "up": [double(2 * m, m) for m, _ in pairs],
        "head": init.conv(1, widths[0], classes),
        "bias": init.zeros(classes),
    }
    images = init.normal(batch_size, size, size, 3, scale=1.0)
    labels = jax.random.randint(init.key(), (batch_size, size, size), 0, classes)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for i in "12":
            x = layers.conv(x, params["conv" + i])
            x = jax.nn.relu(layers.group_norm(params["norm" + i], x))
        return x

    def loss(params: Any, image: jax.Array, label: jax.Array) -> jax.Array:
        x, skips = image, []
        for stage in params["down"]:
            if skips:
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2, 1), (2, 2, 1), "VALID")
            x = apply(stage, x)
            skips.append(x)
        skips.pop()
        for enlarge, stage in zip(params["enlarge"][::-1], params["up"][::-1], strict=True):
            x = jnp.concatenate([skips.pop(), layers.conv_transpose(x, enlarge, 2)], -1)
            x = apply(stage, x)
        return layers.cross_entropy(layers.conv(x, params["head"]) + params["bias"], label)

    return loss, params, (images, labels)


def raster_mask(size: int, include_centre: bool) -> np.ndarray:
    """Returns the mask ``[size, size, 1, 1]`` of the pixels before the centre in reading order."""
    before = np.arange(size * size) < size * size // 2 + include_centre
    return before.reshape(size, size, 1, 1)


def pixelcnn(
    batch_size: int,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    size: int = 28,
    width: int = 32,
    depth: int = 5,
    levels: int = 4,
) -> Model:
    """A PixelCNN of one channel (arXiv:1601.06759): 7x7 mask A, then residual 3x3 masks B."""
    init = layers.Init(key, dtype)
    params = {
        "first": init.conv(7, 1, width),
        "blocks": [{"w": init.conv(3, width, width), "b": init.zeros(width)} for _ in range(depth)],
        "head": init.dense(width, levels),
    }
    labels = jax.random.randint(init.key(), (batch_size, size, size), 0, levels)
    images = 2 * labels[..., None].astype(dtype) / (levels - 1) - 1
    first, later = raster_mask(7, False), raster_mask(3, True)

    def loss(params: Any, image: jax.Array, label: jax.Array) -> jax.Array:
        x = layers.conv(image, params["first"] * first)
        for block in params["blocks"]:
            x = x + layers.conv(jax.nn.relu(x), block["w"] * later) + block["b"]
        return layers.cross_entropy(layers.dense(params["head"], jax.nn.relu(x)), label)

    return loss, params, (images, labels)
