"""Losses with one kind of layer each: dense, convolution, embedding, attention, normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from losses import batch, normal, registry

LAYERS, case = registry()


@case({"w": normal(5, 4), "b": normal(4)}, batch(5), batch(4), sites=1)
def dense(params, x, y):
    return jnp.sum((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


@case([(normal(5, 4), normal(4)), (normal(4, 2), normal(2))], batch(5), sites=2)
def perceptron(layers, x):
    for w, b in layers:
        x = jax.nn.relu(x @ w + b)
    return jax.nn.logsumexp(x)


@case(normal(4, 5), batch(5), sites=1)
def dense_left(w, x):
    return jnp.sum(jnp.sin(w @ x))


@case({"w": normal(4, 6), "b": normal(6)}, batch(7, 4), sites=1)
def dense_over_positions(params, x):
    return jnp.sum(jnp.cos(x @ params["w"] + params["b"]))


@case({"k": normal(3, 2, 4), "b": normal(4)}, batch(9, 2), sites=1)
def convolution_1d(params, x):
    y = lax.conv_general_dilated(
        x[None], params["k"], (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )
    return jnp.sum(jnp.tanh(y + params["b"]))


@case({"k": normal(3, 2, 2, 3), "b": normal(3), "out": normal(48, 2)}, batch(7, 8, 2), sites=2)
def convolution_2d(params, x):
    y = lax.conv_general_dilated(
        x[None], params["k"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.logsumexp(jax.nn.relu(y + params["b"]).reshape(-1) @ params["out"])


@case(normal(3, 2, 2, 1, 2), batch(2, 4, 3, 5), sites=1)
def convolution_3d(kernel, x):
    y = lax.conv_general_dilated(x[None], kernel, (1, 2, 1), [(1, 0), (0, 0), (2, 1)])
    return jnp.sum(y**3)


@case(normal(3, 2, 1, 6), batch(6, 5, 3), sites=1)
def convolution_depthwise(kernel, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(
        x[None], kernel, (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=3
    )
    return jnp.sum(jnp.sin(y))


@case(normal(2, 3, 3, 3), batch(4, 3, 6, 6), sites=1)
def convolution_of_several_images(kernel, x):
    return jnp.sum(jnp.tanh(lax.conv(x, kernel, (1, 1), "VALID")))


@case(normal(3, 3, 2, 4), batch(4, 4, 2), sites=1)
def convolution_transposed(kernel, x):
    return jnp.sum(jnp.tanh(lax.conv_transpose(x[None], kernel, (2, 2), "SAME")))


@case(normal(2, 2, 2, 3), batch(5, 5, 2), sites=1)
def convolution_with_pooling(kernel, x):
    y = lax.conv_general_dilated(
        x[None], kernel, (1, 1), ((1, 0), (2, 1)), (2, 1), (1, 2), ("NHWC", "HWIO", "NHWC")
    )
    y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.sum(y**2)


@case({"image": normal(1, 3, 6, 6)}, batch(2, 3, 2, 2))
def parameter_is_the_image(params, kernel):
    return jnp.sum(jnp.tanh(lax.conv(params["image"], kernel, (1, 1), "VALID")))


@case(
    {"table": normal(7, 3), "w": normal(3)},
    np.array([[0, 2, 2, 6], [1, 1, 1, 1], [5, 0, 3, 5]]),
    sites=2,
)
def embedding(params, ids):
    return jnp.sum(jnp.tanh(params["table"][ids]) @ params["w"])


@case(normal(7, 3), np.array([[0, 2, 2], [1, 1, 1], [5, 0, 5]]), batch(), sites=2)
def embedding_tied_with_output(table, ids, temperature):
    hidden = jnp.mean(table[ids], axis=0)
    return -jax.nn.log_softmax(table @ jnp.tanh(hidden) * temperature)[ids[-1]]


@case(
    normal(4, 5, 2),
    np.array([[0, 3], [2, 2], [1, 0]]),
    np.array([[4, -1], [0, 0], [2, 2]]),
    sites=1,
)
def look_up_on_two_axes(table, rows, columns):
    return jnp.sum(table[rows, columns] ** 3)


@case(
    {"q": normal(6, 2, 3), "k": normal(6, 2, 3), "v": normal(6, 2, 3), "o": normal(2, 3, 6)},
    batch(5, 6),
    sites=4,
)
def attention(params, x):
    q, k, v = (jnp.einsum("td,dhk->htk", x, params[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("hsk,htk->hst", q, k) / np.sqrt(3))
    y = jnp.einsum("hst,htk,hkd->sd", weights, v, params["o"])
    return jnp.sum(jnp.sin(y))


@case({"scale": normal(6), "bias": normal(6), "w": normal(6, 6)}, batch(4, 6), sites=1)
def layer_norm(params, x):
    x = x @ params["w"]
    centred = x - x.mean(-1, keepdims=True)
    y = centred * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-3)
    return jnp.sum(jnp.tanh(y * params["scale"] + params["bias"]))


@case({"k": normal(3, 3, 2, 4), "scale": normal(4), "bias": normal(4)}, batch(4, 4, 2), sites=1)
def group_norm(params, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x[None], params["k"], (1, 1), "SAME", dimension_numbers=numbers)
    groups = y.reshape(4, 4, 2, 2)
    mean = groups.mean((0, 1, 3), keepdims=True)
    normed = (groups - mean) * lax.rsqrt(groups.var((0, 1, 3), keepdims=True) + 1e-3)
    return jnp.sum(jnp.tanh(normed.reshape(4, 4, 4) * params["scale"] + params["bias"]))


@case({"v": normal(3, 3, 2, 4), "g": normal(4)}, batch(5, 5, 2), sites=2)
def weight_standardisation(params, x):
    v = params["v"]
    kernel = (v - v.mean((0, 1, 2))) / (v.std((0, 1, 2)) + 1e-3) * params["g"]
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x[None], kernel, (1, 1), "VALID", dimension_numbers=numbers)
    return jnp.sum(jnp.tanh(y))


@case({"w": normal(6, 4), "a": normal(6, 2), "b": normal(2, 4)}, batch(3, 6), sites=2)
def low_rank_adapter(params, x):
    w = lax.stop_gradient(params["w"]) + 0.5 * params["a"] @ params["b"]
    return jnp.sum(jnp.tanh(x @ w))


@case({"w": normal(5, 5), "mask": np.tri(5)}, batch(5), sites=1)
def masked_dense(params, x):
    w = jnp.where(params["mask"] > 0, params["w"], 0.0) * np.tri(5).T
    return jnp.sum(jnp.exp(jnp.sin(x @ w)))


@case({"w": normal(2, 3, 4)}, batch(2, 5, 4), sites=1)
def experts(params, x):
    return jnp.sum(jnp.tanh(jnp.einsum("eif,etf->eti", params["w"], x)))


@case(
    {"k1": normal(3, 3, 1, 2), "k2": normal(3, 3, 2, 2), "w": normal(8, 3), "b": normal(3)},
    batch(5, 5, 1),
    np.array([0, 2, 1]),
    sites=3,
)
def residual_network(params, image, label):
    numbers = ("NHWC", "HWIO", "NHWC")

    def conv(x, k, stride):
        return lax.conv_general_dilated(x, k, stride, "SAME", dimension_numbers=numbers)

    x = jax.nn.silu(conv(image[None], params["k1"], (1, 1)))
    x = x + conv(jax.nn.gelu(x), params["k2"], (1, 1))
    x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return -jax.nn.log_softmax(x.reshape(-1) @ params["w"] + params["b"])[label]


@case({"w": normal(6, 4), "filter": normal(4)}, batch(6), sites=1)
def complex_numbers_within(params, x):
    spectrum = jnp.fft.fft(x @ params["w"]) * jnp.exp(1j * params["filter"])
    return jnp.sum(jnp.abs(jnp.fft.ifft(spectrum)) ** 2 * jnp.arange(4.0))


@case({"w": normal(6, 4) + 1j * normal(4, 6).T, "k": normal(2, 3) * 1j}, batch(6), sites=2)
def complex_parameters(params, x):
    y = jnp.tanh(x @ params["w"])
    y = lax.conv_general_dilated(
        y[None, :, None],
        params["k"].T[:, None],
        (1,),
        "SAME",
        dimension_numbers=("NHC", "HIO", "NHC"),
    )
    return jnp.sum(jnp.real(y * jnp.conj(y)) + jnp.imag(y))
