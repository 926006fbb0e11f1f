"""Classifiers of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import layers
from .common import Model, classification, classifier


def dense(
    batch_size: int,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    sizes: Sequence[int] = (784, 512, 512, 10),
) -> Model:
    """A multi-layer perceptron."""
    init = layers.Init(key, dtype)
    params = [init.dense(m, n) for m, n in zip(sizes[:-1], sizes[1:], strict=True)]

    def logits(params: Any, x: jax.Array) -> jax.Array:
        for layer in params[:-1]:
            x = jax.nn.relu(layers.dense(layer, x))
        return layers.dense(params[-1], x)

    return classifier(logits), params, classification(init, batch_size, sizes[:1], sizes[-1])


def mnist_cnn(
    batch_size: int,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    size: int = 28,
    widths: Sequence[int] = (16, 32, 32),
) -> Model:
    """The small network of the DP-SGD tutorials: 8x8 stride 2, 4x4 stride 2, two dense layers."""
    init = layers.Init(key, dtype)

    def features(params: Any, x: jax.Array) -> jax.Array:
        for kernel, bias, padding in (
            (params["conv1"], params["bias1"], "SAME"),
            (params["conv2"], params["bias2"], "VALID"),
        ):
            x = jax.nn.relu(layers.conv(x, kernel, 2, padding) + bias)
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2, 1), (1, 1, 1), "VALID")
        return x.reshape(-1)

    params: dict[str, Any] = {
        "conv1": init.conv(8, 1, widths[0]),
        "bias1": init.zeros(widths[0]),
        "conv2": init.conv(4, widths[0], widths[1]),
        "bias2": init.zeros(widths[1]),
    }
    flat = jax.eval_shape(features, params, jax.ShapeDtypeStruct((size, size, 1), dtype)).shape[0]
    params["hidden"] = init.dense(flat, widths[2])
    params["head"] = init.dense(widths[2], 10)

    def logits(params: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(layers.dense(params["hidden"], features(params, x)))
        return layers.dense(params["head"], x)

    return classifier(logits), params, classification(init, batch_size, (size, size, 1), 10)


def cifar_cnn(
    batch_size: int,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    size: int = 32,
    widths: Sequence[int] = (32, 64, 64, 128),
) -> Model:
    """3x3 convolutions with average pooling after each (arXiv:2007.14191, without its tanh)."""
    init = layers.Init(key, dtype)
    convs = [
        {"w": init.conv(3, m, n), "b": init.zeros(n)}
        for m, n in zip((3, *widths[:-1]), widths, strict=True)
    ]
    params = {"convs": convs, "head": init.dense(widths[-1], 10)}

    def logits(params: Any, x: jax.Array) -> jax.Array:
        for layer in params["convs"]:
            x = jax.nn.relu(layers.conv(x, layer["w"]) + layer["b"])
            if min(x.shape[:2]) > 1:
                x = x.reshape(x.shape[0] // 2, 2, x.shape[1] // 2, 2, -1).mean((1, 3))
        return layers.dense(params["head"], x.mean((0, 1)))

    return classifier(logits), params, classification(init, batch_size, (size, size, 3), 10)


def resnet18(
    batch_size: int,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    size: int = 32,
    width: int = 64,
    classes: int = 10,
) -> Model:
    """ResNet-18 for small images (arXiv:1512.03385), with GroupNorm."""
    init = layers.Init(key, dtype)
    shapes = [(width, width, 1)] * 2
    for stage in range(1, 4):
        inner = width * 2**stage
        shapes += [(inner // 2, inner, 2), (inner, inner, 1)]
    strides = [stride for *_, stride in shapes]
    blocks = []
    for inputs, outputs, stride in shapes:
        block = {
            "conv1": init.conv(3, inputs, outputs),
            "norm1": init.norm(outputs),
            "conv2": init.conv(3, outputs, outputs),
            "norm2": init.norm(outputs),
        }
        if stride > 1:
            block |= {"skip": init.conv(1, inputs, outputs), "skip_norm": init.norm(outputs)}
        blocks.append(block)
    params = {
        "stem": init.conv(3, 3, width),
        "norm": init.norm(width),
        "blocks": blocks,
        "head": init.dense(8 * width, classes),
    }

    def logits(params: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(layers.group_norm(params["norm"], layers.conv(x, params["stem"])))
        for block, stride in zip(params["blocks"], strides, strict=True):
            y = layers.conv(x, block["conv1"], stride)
            y = jax.nn.relu(layers.group_norm(block["norm1"], y))
            y = layers.group_norm(block["norm2"], layers.conv(y, block["conv2"]))
            if stride > 1:
                x = layers.group_norm(block["skip_norm"], layers.conv(x, block["skip"], stride))
            x = jax.nn.relu(x + y)
        return layers.dense(params["head"], x.mean((0, 1)))

    return classifier(logits), params, classification(init, batch_size, (size, size, 3), classes)


def wrn16_4(
    batch_size: int,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    size: int = 32,
    width: int = 16,
    factor: int = 4,
    classes: int = 10,
) -> Model:
    """Wide ResNet 16-4 (arXiv:1605.07146), GroupNorm, weight standardisation (arXiv:2204.13650)."""
    init = layers.Init(key, dtype)
    widths = [width, *(width * factor * 2**stage for stage in range(3))]
    shapes = []
    for stage in range(3):
        shapes += [
            (widths[stage], widths[stage + 1], 1 + (stage > 0)),
            (widths[stage + 1],) * 2 + (1,),
        ]
    strides = [stride for *_, stride in shapes]
    blocks = []
    for inputs, outputs, _ in shapes:
        block = {
            "norm1": init.norm(inputs),
            "conv1": init.conv(3, inputs, outputs),
            "norm2": init.norm(outputs),
            "conv2": init.conv(3, outputs, outputs),
        }
        if inputs != outputs:
            block["skip"] = init.conv(1, inputs, outputs)
        blocks.append(block)
    params = {
        "stem": init.conv(3, 3, width),
        "blocks": blocks,
        "norm": init.norm(widths[-1]),
        "head": init.dense(widths[-1], classes),
    }

    def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
        return layers.conv(x, layers.standardise(kernel), stride)

    def logits(params: Any, x: jax.Array) -> jax.Array:
        x = convolve(x, params["stem"])
        for block, stride in zip(params["blocks"], strides, strict=True):
            y = jax.nn.relu(layers.group_norm(block["norm1"], x))
            if "skip" in block:
                x = convolve(y, block["skip"], stride)
            y = convolve(y, block["conv1"], stride)
            y = jax.nn.relu(layers.group_norm(block["norm2"], y))
            x = x + convolve(y, block["conv2"])
        x = jax.nn.relu(layers.group_norm(params["norm"], x))
        return layers.dense(params["head"], x.mean((0, 1)))

    return classifier(logits), params, classification(init, batch_size, (size, size, 3), classes)


def convnext(
    batch_size: int,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    size: int = 32,
    widths: Sequence[int] = (32, 64, 128),
    depths: Sequence[int] = (2, 2, 2),
    patch: int = 2,
    classes: int = 10,
) -> Model:
    """ConvNeXt (arXiv:2201.03545): depthwise 7x7, layer norm, inverted bottleneck, layer scale."""
    init = layers.Init(key, dtype)
    stages = []
    for inputs, outputs, depth in zip((3, *widths[:-1]), widths, depths, strict=True):
        blocks = [
            {
                "depthwise": init.conv(7, outputs, outputs, groups=outputs),
                "norm": init.norm(outputs),
                "mlp": layers.mlp_init(init, outputs, 4 * outputs),
                "scale": jnp.full(outputs, 0.1, dtype),
            }
            for _ in range(depth)
        ]
        stage: dict[str, Any] = {
            "blocks": blocks,
            "norm": init.norm(outputs if not stages else inputs),
        }
        stage["down"] = init.conv(patch if not stages else 2, inputs, outputs)
        stages.append(stage)
    params = {
        "stages": stages,
        "norm": init.norm(widths[-1]),
        "head": init.dense(widths[-1], classes),
    }

    def logits(params: Any, x: jax.Array) -> jax.Array:
        for number, stage in enumerate(params["stages"]):
            if number:
                x = layers.conv(layers.layer_norm(stage["norm"], x), stage["down"], 2, "VALID")
            else:
                x = layers.layer_norm(stage["norm"], layers.conv(x, stage["down"], patch, "VALID"))
            for block in stage["blocks"]:
                y = layers.layer_norm(block["norm"], layers.depthwise(x, block["depthwise"]))
                x = x + block["scale"] * layers.mlp(block["mlp"], y)
        return layers.dense(params["head"], layers.layer_norm(params["norm"], x.mean((0, 1))))

    return classifier(logits), params, classification(init, batch_size, (size, size, 3), classes)


# Expansion, channels, repeats, stride of the first: MobileNetV2's table, for 32x32 images.
_INVERTED = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def mobilenet_v2(
    batch_size: int,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    size: int = 32,
    width: float = 1.0,
    table: Sequence[tuple[int, int, int, int]] = _INVERTED,
    last: int = 1280,
    classes: int = 10,
) -> Model:
    """MobileNetV2 (arXiv:1801.04381) for small images, with GroupNorm."""
    init = layers.Init(key, dtype)

    def scaled(channels: float) -> int:
        return max(4, int(channels * width + 2) // 4 * 4)

    stem = channels = scaled(32)
    blocks, strides = [], []
    for expansion, outputs, repeats, stride in table:
        outputs = scaled(outputs)
        for repeat in range(repeats):
            inner = channels * expansion
            blocks.append(
                {
                    "expand": init.conv(1, channels, inner),
                    "norm1": init.norm(inner),
                    "depthwise": init.conv(3, inner, inner, groups=inner),
                    "norm2": init.norm(inner),
                    "project": init.conv(1, inner, outputs),
                    "norm3": init.norm(outputs),
                }
            )
            strides.append(stride if repeat == 0 else 1)
            channels = outputs
    last = scaled(last)
    params = {
        "stem": init.conv(3, 3, stem),
        "norm": init.norm(stem),
        "blocks": blocks,
        "last": init.conv(1, channels, last),
        "last_norm": init.norm(last),
        "head": init.dense(last, classes),
    }

    def logits(params: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.relu6(layers.group_norm(params["norm"], layers.conv(x, params["stem"])))
        for block, stride in zip(params["blocks"], strides, strict=True):
            y = layers.conv(x, block["expand"])
            y = jax.nn.relu6(layers.group_norm(block["norm1"], y))
            y = layers.depthwise(y, block["depthwise"], stride)
            y = jax.nn.relu6(layers.group_norm(block["norm2"], y))
            y = layers.group_norm(block["norm3"], layers.conv(y, block["project"]))
            x = x + y if x.shape == y.shape else y
        x = layers.group_norm(params["last_norm"], layers.conv(x, params["last"]))
        return layers.dense(params["head"], jax.nn.relu6(x).mean((0, 1)))

    return classifier(logits), params, classification(init, batch_size, (size, size, 3), classes)
