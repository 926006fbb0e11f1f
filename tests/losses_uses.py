"""Losses with unusual uses of parameters: tied, in control flow, in odd trees and calls."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from losses import BATCH, batch, normal, registry

USES, case = registry()


@case({"w": normal(4, 4), "b": normal(4)}, batch(4), sites=2)
def weight_at_two_places(params, x):
    return jnp.sum(jnp.tanh(params["w"].T @ jnp.tanh(params["w"] @ x + params["b"])))


@case(normal(2, 2, 3, 3), batch(1, 2, 7, 7), sites=2)
def kernel_at_two_places(kernel, x):
    y = jnp.tanh(lax.conv(x, kernel, (1, 1), "SAME"))
    return jnp.sum(jnp.sin(lax.conv(y, kernel, (2, 2), "VALID")))


@case({"w": normal(4, 4)}, batch(4), sites=1)
def site_and_plain_use(params, x):
    return jnp.sum(jnp.tanh(params["w"] @ x)) + jnp.sum(params["w"] * x) ** 2


@case({"w": normal(4, 4), "b": normal(4)}, batch(5, 4), sites=2)
def in_a_scan_and_outside(params, xs):
    def step(h, x):
        h = jnp.tanh(x @ params["w"] + h + params["b"])
        return h, h

    last, hidden = lax.scan(step, jnp.zeros_like(params["b"]), xs)
    return jnp.sum(last @ params["w"]) + jnp.sum(hidden**2)


@case({"w": normal(3, 4, 4), "b": normal(3, 4)}, batch(4), sites=1)
def layers_in_a_scan(params, x):
    def layer(x, p):
        return jnp.tanh(x @ p["w"] + p["b"]) + x, None

    return jnp.sum(lax.scan(layer, x, params)[0] ** 2)


@case(normal(4, 4), batch(4))
def parameter_in_a_carry(w, x):
    def step(carry, _):
        w, x = carry
        return (0.9 * w, jnp.tanh(w @ x)), None

    return jnp.sum(lax.scan(step, (w, x), length=3)[0][1])


@case(normal(4, 4), batch(4), sites=1)
def for_loop(w, x):
    return jnp.sum(lax.fori_loop(0, 3, lambda i, x: jnp.tanh(w @ x) + i, x))


@case(normal(4, 4), batch(4), np.array([1, 3, 2]), sites=1)
def while_loop_without_parameters(w, x, steps):
    count = lax.while_loop(lambda n: n * n < 9 + steps, lambda n: n + steps, steps)
    return jnp.sum(jnp.sin(w @ x)) * count


@case({"w": normal(4, 4), "v": normal(4)}, batch(4), sites=2)
def condition(params, x):
    return lax.cond(
        x[0] > 0,
        lambda x: jnp.sum(jnp.sin(params["w"] @ x)),
        lambda x: params["v"] @ x**2,
        x,
    )


@case({"w": normal(4, 4), "b": normal(4)}, batch(4), np.array([2, 0, 1]), sites=1)
def switch(params, x, which):
    branches = [
        lambda: jnp.sum(jnp.tanh(params["w"] @ x)),
        lambda: jnp.sum(params["b"] * x),
        lambda: jnp.sum(x),
    ]
    return lax.switch(which, branches)


@case([normal(4, 4), normal(4, 4)], batch(4), sites=2)
def checkpointed(weights, x):
    for w in weights:
        x = jax.checkpoint(lambda w, x: jnp.tanh(w @ x))(w, x)
    return jnp.sum(x)


@case({"w": normal(2, 4, 4), "v": normal(4, 4)}, batch(4), sites=2)
def nested_control_flow(params, x):
    @jax.checkpoint
    def layer(x, w):
        x = lax.cond(x[0] > 0, lambda x: jnp.tanh(w @ x), lambda x: x, x)
        return lax.scan(lambda x, _: (jnp.sin(params["v"] @ x), None), x, length=2)[0], None

    return jnp.sum(lax.scan(layer, x, params["w"])[0])


@case(normal(4, 4), batch(3, 4), sites=1)
def mapped_over_positions(w, xs):
    return jnp.sum(lax.map(lambda x: jnp.sum(jnp.tanh(w @ x)), xs) ** 2)


@case({"decay": normal(4), "w": normal(4, 4)}, batch(5, 4), sites=1)
def associative_scan(params, xs):
    gates = jax.nn.sigmoid(xs * params["decay"])
    combine = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])  # noqa: E731
    _, y = lax.associative_scan(combine, (gates, xs @ params["w"]))
    return jnp.sum(y**2)


@jax.custom_vjp
def half_gradient(w, x):
    return jnp.tanh(w @ x)


def _half_forward(w, x):
    return half_gradient(w, x), (w, x)


def _half_backward(residuals, cotangent):
    w, x = residuals
    return 0.5 * jnp.outer(cotangent, x), w.T @ cotangent


half_gradient.defvjp(_half_forward, _half_backward)


@case(normal(4, 4), batch(4), sites=1)
def custom_vjp(w, x):
    return jnp.sum(half_gradient(w, jnp.sin(w @ x)))


@jax.custom_jvp
def twice_the_slope(x, slope):
    return jnp.maximum(x, slope * x)


@twice_the_slope.defjvp
def _twice_the_slope_jvp(primals, tangents):
    x, slope = primals
    x_dot, slope_dot = tangents
    out = twice_the_slope(x, slope)
    return out, 2 * jnp.where(x > 0, x_dot, slope * x_dot) + x * slope_dot


@case({"w": normal(4, 4), "slope": normal()}, batch(4), sites=1)
def custom_jvp(params, x):
    return jnp.sum(twice_the_slope(params["w"] @ x, params["slope"]) ** 2)


_SECRET = normal(4)


@case(normal(4, 4), batch(4), sites=1)
def closure(w, x):
    secret = jnp.asarray(_SECRET, x.dtype)
    return jnp.sum(jnp.tanh(w @ (x * secret)) * secret)


@case({"w": normal(4, 3)}, batch(4), np.array([0, 2, 1]), has_aux=True, sites=1)
def auxiliary(params, x, label):
    logits = x @ params["w"]
    aux = {"right": jnp.argmax(logits) == label, "logits": logits, "w": params["w"], "one": 1}
    return -jax.nn.log_softmax(logits)[label], aux


@case({"w": normal(4, 3)}, batch(4), (normal(3), normal(3)), argnums=(2, 0), sites=1)
def two_arguments(params, x, others):
    scale, bias = others
    return jnp.sum(jnp.tanh(x @ params["w"]) * scale + bias**2 * x[0])


@case(batch(4), normal(4, 4), argnums=-1, sites=1)
def last_argument(x, w):
    return jnp.sum(jnp.cos(w @ x))


@case({"w": normal(6, 6)}, batch(6), lambda: jax.random.split(jax.random.key(0), BATCH), sites=2)
def dropout(params, x, key):
    for _ in range(2):
        key, sub = jax.random.split(key)
        keep = jax.random.bernoulli(sub, 0.7, x.shape)
        x = jnp.where(keep, jnp.tanh(params["w"] @ x) / 0.7, 0)
    return jnp.sum(x**2)


class Weights(NamedTuple):
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    inner: Weights
    scale: Any
    name: str = dataclasses.field(metadata={"static": True}, default="block")


@case([Block(Weights(normal(4, 4), normal(4)), normal(4)), {}, None, {"e": ()}], batch(4), sites=1)
def odd_trees(params, x):
    block = params[0]
    return jnp.sum(jnp.tanh(block.inner.w @ x + block.inner.b) * block.scale)


@case({"w": normal(4), "b": 0.5, "c": [2.0, normal()]}, batch(4), sites=1)
def python_numbers(params, x):
    return jnp.tanh(params["w"] @ x * params["b"] + params["c"][0] * params["c"][1])


@case({"w": normal(4, 4), "frozen": normal(4, 4), "unused": normal(2)}, batch(4), sites=1)
def stopped_and_unused(params, x):
    return jnp.sum(jnp.sin(params["w"] @ (lax.stop_gradient(params["frozen"]) @ x)))


@case(normal(3, 3), {"x": batch(3), "n": np.array([1, 2, 3]), "on": np.array([True, False, True])})
def integers_and_booleans(w, example):
    return jnp.where(example["on"], jnp.sum(w * example["x"]), w[0, 0]) * example["n"]


@case({"w": normal(4, 4)}, batch(4), sites=1)
def with_regulariser(params, x):
    return jnp.sum(jnp.tanh(params["w"] @ x)) + 0.1 * jnp.sum(params["w"] ** 2)


@case({"w": normal(4, 4)}, batch(4))
def regulariser_only(params, x):
    del x
    return jnp.sum(params["w"] ** 2)


@case(normal(4, 4), batch(4), kwargs={"scale": normal(4), "power": 2}, sites=1)
def keyword_arguments(w, x, *, scale, power):
    return jnp.sum((w @ x * scale) ** power)


@case(normal(4, 5), normal(5, BATCH), (normal(4), batch(1)), in_axes=(None, 1, (None, 0)), sites=1)
def other_axes(w, x, others):
    return jnp.sum(jnp.tanh(w @ x) * others[0]) * others[1][0]


@case(
    {"own": batch(4, 4), "shared": normal(4, 4)},
    batch(4),
    in_axes=({"own": 0, "shared": None}, 0),
    sites=1,
)
def parameters_of_each_example(params, x):
    return jnp.sum(jnp.tanh(params["own"] @ jnp.sin(params["shared"] @ x)))


@case({"left": normal(4, 3), "right": normal(3, 4), "m": normal(4, 4)}, batch(4), sites=3)
def products_of_parameters(params, x):
    return jnp.sin(x @ (params["left"] @ params["right"]) @ x) + x @ params["m"] @ jnp.ones(4)


@case({"w": normal(4, 2), "token": normal(4)}, batch(3, 4), sites=1)
def concatenated_with_data(params, x):
    x = jnp.concatenate([params["token"][None], x])
    return jnp.sum(jnp.tanh(jnp.cumsum(x @ params["w"], axis=0)))


@case({"table": normal(6, 3)}, np.array([0, 2, 3]), batch(2, 3), sites=1)
def sliced_and_updated(params, start, x):
    window = lax.dynamic_slice_in_dim(params["table"], start, 2)
    updated = params["table"].at[start].add(x[0]).at[0].multiply(2.0)
    return jnp.sum(jnp.tanh(window * x)) + jnp.sum(updated**3)


@case({"w": normal(5, 5), "scale": normal(5)}, batch(5), sites=1)
def sorted_and_ranked(params, x):
    y = jnp.sort(params["w"] @ x * params["scale"])
    return jnp.sum(y * jnp.arange(5.0)) + jnp.max(params["scale"] * x) + lax.top_k(y, 2)[0][1]


@case(normal(3, 3), batch(3))
def solved(w, x):
    return jnp.sum(jnp.linalg.solve(w @ w.T + 3 * jnp.eye(3), x) ** 2)


@case({"w": normal(4, 6), "v": normal(6)}, batch(4), sites=3)
def gradient_penalty(params, x):
    energy = lambda x: jnp.sum(jnp.tanh(x @ params["w"]) * params["v"])  # noqa: E731
    return energy(x) + jnp.sum(jax.grad(energy)(x) ** 2)


@jax.jit
def silu(w, x):
    """A function of a user's own under a library's name."""
    return jnp.sin(w @ x) * 3


@jax.jit
def conv(x, w):
    """No convolution, whatever its name says."""
    return x + w


@case({"w": normal(4, 4), "b": normal(4)}, batch(4), sites=1)
def own_functions_with_known_names(params, x):
    return jnp.sum(conv(silu(params["w"], x), params["b"]) ** 2)


@case({"w": normal(4, 4)}, batch(3, 4), sites=1)
def mapped_within(params, xs):
    score = lambda x: jnp.sum(jnp.tanh(params["w"] @ x))  # noqa: E731
    return jnp.sum(jax.vmap(score)(xs) ** 2)


@case({"w": normal(4, 4), "v": normal(4, 4)}, batch(4), sites=1)
def barriers_and_names(params, x):
    w, x = lax.optimization_barrier((params["w"], x))
    with jax.named_scope("layer"):
        return jnp.sum(jnp.tanh(w @ x)) + jnp.sum(jnp.sin(params["v"] @ x))


@case(normal(4, 4), batch(4), sites=1)
def parameter_returned_by_itself_and_used(w, x):
    return lax.select(x[0] > 0, w[0, 0], jnp.sum(w @ x))


@case(normal(4), batch(4), sites=2)
def gradient_jumps(w, x):
    return jnp.abs(w @ x) + jnp.round(w @ x)
