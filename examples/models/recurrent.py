"""Recurrent language models: the cell reads the same weights at every step of a scan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import layers
from .common import Model, tokens


def _language_model(
    batch_size: int,
    init: layers.Init,
    sizes: tuple[int, int, int],
    gates: int,
    states: int,
    cell: Callable[[Any, tuple[jax.Array, ...], jax.Array], tuple[jax.Array, ...]],
) -> Model:
    """Returns a model whose cell maps ``(params, states, x)`` to states, the first its result."""
    hidden, steps, vocabulary = sizes
    params = {
        "embedding": init.normal(vocabulary, hidden, scale=1.0),
        "cell": {
            "input": init.dense(hidden, gates * hidden),
            "hidden": init.dense(hidden, gates * hidden),
        },
        "head": init.dense(hidden, vocabulary),
    }
    ids = tokens(init, batch_size, steps + 1, vocabulary)

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        def step(state: tuple[jax.Array, ...], x: jax.Array) -> Any:
            state = cell(params["cell"], state, x)
            return state, state[0]

        x = params["embedding"][ids[:-1]]
        start = (jnp.zeros(hidden, x.dtype),) * states
        _, outputs = jax.lax.scan(step, start, x)
        return layers.cross_entropy(layers.dense(params["head"], outputs), ids[1:])

    return loss, params, (ids,)


def lstm(
    batch_size: int,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    hidden: int = 256,
    steps: int = 100,
    vocabulary: int = 1000,
) -> Model:
    """A long short-term memory language model."""

    def cell(params: Any, state: tuple[jax.Array, ...], x: jax.Array) -> tuple[jax.Array, ...]:
        h, c = state
        both = layers.dense(params["input"], x) + layers.dense(params["hidden"], h)
        i, f, g, o = jnp.split(both, 4)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    return _language_model(
        batch_size, layers.Init(key, dtype), (hidden, steps, vocabulary), 4, 2, cell
    )


def gru(
    batch_size: int,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    hidden: int = 256,
    steps: int = 100,
    vocabulary: int = 1000,
) -> Model:
    """A gated recurrent unit language model."""

    def cell(params: Any, state: tuple[jax.Array, ...], x: jax.Array) -> tuple[jax.Array, ...]:
        (h,) = state
        from_input = jnp.split(layers.dense(params["input"], x), 3)
        from_hidden = jnp.split(layers.dense(params["hidden"], h), 3)
        reset = jax.nn.sigmoid(from_input[0] + from_hidden[0])
        update = jax.nn.sigmoid(from_input[1] + from_hidden[1])
        candidate = jnp.tanh(from_input[2] + reset * from_hidden[2])
        return ((1 - update) * candidate + update * h,)

    return _language_model(
        batch_size, layers.Init(key, dtype), (hidden, steps, vocabulary), 3, 1, cell
    )
