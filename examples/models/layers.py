"""Layers of the example models, each a function of its parameters and one example."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

IMAGE = ("NHWC", "HWIO", "NHWC")


class Init:
    """Draws initial parameters of one dtype, with a fresh key for each."""

    def __init__(self, key: jax.Array, dtype: Any) -> None:
        """Starts from a PRNG key."""
        self._key = key
        self.dtype = dtype

    def key(self) -> jax.Array:
        """Returns a fresh key."""
        self._key, key = jax.random.split(self._key)
        return key

    def normal(self, *shape: int, scale: float) -> jax.Array:
        """Returns normal numbers of a standard deviation."""
        return jax.random.normal(self.key(), shape, self.dtype) * jnp.asarray(scale, self.dtype)

    def conv(self, size: int, inputs: int, outputs: int, groups: int = 1) -> jax.Array:
        """Returns a square kernel ``[size, size, inputs / groups, outputs]``."""
        fan_in = size * size * inputs // groups
        shape = (size, size, inputs // groups, outputs)
        return self.normal(*shape, scale=math.sqrt(2 / fan_in))

    def dense(self, inputs: int, outputs: int) -> dict[str, jax.Array]:
        """Returns the weight and the bias of a dense layer."""
        weight = self.normal(inputs, outputs, scale=1 / math.sqrt(inputs))
        return {"w": weight, "b": self.zeros(outputs)}

    def norm(self, channels: int) -> dict[str, jax.Array]:
        """Returns scale and bias of a normalisation."""
        return {"scale": jnp.ones(channels, self.dtype), "bias": self.zeros(channels)}

    def zeros(self, *shape: int) -> jax.Array:
        """Returns zeros."""
        return jnp.zeros(shape, self.dtype)


def conv(
    x: jax.Array,
    kernel: jax.Array,
    stride: int = 1,
    padding: str | Sequence[tuple[int, int]] = "SAME",
    groups: int = 1,
) -> jax.Array:
    """Convolves an image ``[H, W, C]``."""
    return jax.lax.conv_general_dilated(
        x[None],
        kernel,
        (stride, stride),
        padding,
        dimension_numbers=IMAGE,
        feature_group_count=groups,
    )[0]


def conv_transpose(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """Enlarges an image ``[H, W, C]`` by a transposed convolution."""
    return jax.lax.conv_transpose(x[None], kernel, (stride, stride), "SAME")[0]


def depthwise(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolves each channel by itself."""
    return conv(x, kernel, stride, groups=x.shape[-1])


def dense(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Returns ``x @ w + b``."""
    return x @ params["w"] + params["b"]


def group_norm(params: dict[str, jax.Array], x: jax.Array, groups: int = 16) -> jax.Array:
    """Normalises groups of channels over the image (arXiv:1803.08494)."""
    groups = math.gcd(x.shape[-1], groups)
    split = x.reshape(-1, groups, x.shape[-1] // groups)
    centred = split - split.mean((0, 2), keepdims=True)
    variance = jnp.square(centred).mean((0, 2), keepdims=True)
    normal = (centred * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return normal * params["scale"] + params["bias"]


def layer_norm(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Normalises over the last axis."""
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-6) * params["scale"] + params["bias"]


def standardise(kernel: jax.Array) -> jax.Array:
    """Standardises the weights of each output channel (arXiv:1903.10520)."""
    axes = tuple(range(kernel.ndim - 1))
    centred = kernel - kernel.mean(axes, keepdims=True)
    fan_in = math.prod(kernel.shape[:-1])
    return centred * jax.lax.rsqrt(jnp.square(centred).sum(axes, keepdims=True) + 1e-8 * fan_in)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of integer labels; ``logits`` have one more axis."""
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probabilities, labels[..., None], -1).mean()


def attention_init(init: Init, dim: int) -> dict[str, Any]:
    """Returns the parameters of `attention`."""
    return {"qkv": init.dense(dim, 3 * dim), "out": init.dense(dim, dim)}


def attention(params: dict[str, Any], x: jax.Array, heads: int, causal: bool = False) -> jax.Array:
    """Returns the self-attention over tokens ``[T, dim]``."""
    tokens, dim = x.shape
    qkv = dense(params["qkv"], x).reshape(tokens, 3, heads, dim // heads)
    q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    scores = jnp.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim // heads)
    if causal:
        allowed = jnp.tril(jnp.ones((tokens, tokens), bool))
        scores = jnp.where(allowed, scores, jnp.finfo(scores.dtype).min)
    mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)
    return dense(params["out"], mixed.reshape(tokens, dim))


def mlp_init(init: Init, dim: int, hidden: int) -> dict[str, Any]:
    """Returns the parameters of `mlp`."""
    return {"up": init.dense(dim, hidden), "down": init.dense(hidden, dim)}


def mlp(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Returns a two-layer perceptron of ``x``."""
    return dense(params["down"], jax.nn.gelu(dense(params["up"], x)))


def block_init(init: Init, dim: int) -> dict[str, Any]:
    """Returns the parameters of `block`."""
    return {
        "norm1": init.norm(dim),
        "attention": attention_init(init, dim),
        "norm2": init.norm(dim),
        "mlp": mlp_init(init, dim, 4 * dim),
    }


def block(params: dict[str, Any], x: jax.Array, heads: int, causal: bool = False) -> jax.Array:
    """Applies a pre-norm transformer block to tokens ``[T, dim]``."""
    x = x + attention(params["attention"], layer_norm(params["norm1"], x), heads, causal)
    return x + mlp(params["mlp"], layer_norm(params["norm2"], x))
