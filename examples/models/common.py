"""What the builders share: their result, and classification of random data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from . import layers

Model = tuple[Callable[..., jax.Array], Any, tuple[jax.Array, ...]]


def classification(
    init: layers.Init, batch_size: int, shape: Sequence[int], classes: int
) -> tuple[jax.Array, jax.Array]:
    """Returns random inputs ``[B, *shape]`` and labels ``[B]``."""
    inputs = init.normal(batch_size, *shape, scale=1.0)
    return inputs, jax.random.randint(init.key(), (batch_size,), 0, classes)


def classifier(logits: Callable[[Any, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Returns the cross-entropy loss of a model of one input."""

    def loss(params: Any, inputs: jax.Array, label: jax.Array) -> jax.Array:
        return layers.cross_entropy(logits(params, inputs), label)

    return loss


def tokens(init: layers.Init, batch_size: int, length: int, vocabulary: int) -> jax.Array:
    """Returns random token ids ``[B, length]``."""
    return jax.random.randint(init.key(), (batch_size, length), 0, vocabulary)
