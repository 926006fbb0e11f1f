"""A few private steps on real images, whatever framework the model comes from.

The batches are of fixed size, so this trains with clipping and noise but states no privacy budget;
`train_private.py` samples and accounts as a private release must.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import _data
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

import perex

FLAGS = flags.FlagValues()
flags.DEFINE_integer("steps", 60, "Steps to train.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("batch_size", 256, "Images a step.", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_float("l2_norm_clip", 1.0, "The clip norm.", lower_bound=0, flag_values=FLAGS)
flags.DEFINE_float(
    "noise_multiplier", 0.5, "Noise per clip norm.", lower_bound=0, flag_values=FLAGS
)


class Result(NamedTuple):
    """What training brings: the parameters, the mean loss of each step, and the test accuracy."""

    params: Any
    losses: list[float]
    accuracy: float


def train(
    loss: Callable[..., jax.Array], predict: Callable[[Any, jax.Array], jax.Array], params: Any
) -> Result:
    """Trains on the digits.

    Args:
      loss: ``loss(params, image, label, key)`` of one example, with a PRNG key of its own.
      predict: ``predict(params, image)``, the class scores of one image.
      params: a pytree of floating-point arrays.
    """
    data = _data.digits()
    clip, size = FLAGS.l2_norm_clip, FLAGS.batch_size
    optimizer = optax.chain(
        perex.dp_noise(clip, FLAGS.noise_multiplier, jax.random.key(1), expected_batch_size=size),
        optax.adam(3e-3),
    )
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, images: Any, labels: Any, key: jax.Array) -> Any:
        keys = jax.random.split(key, len(images))
        total, stats = perex.clipped_grad(loss, clip)(params, images, labels, keys)
        updates, state = optimizer.update(total, state, params)
        return optax.apply_updates(params, updates), state, stats

    random, losses = np.random.default_rng(0), []
    for number in range(FLAGS.steps):
        chosen = random.choice(len(data.train_labels), size, replace=False)
        images, labels = data.train_images[chosen], data.train_labels[chosen]
        params, state, stats = step(params, state, images, labels, jax.random.key(number))
        losses.append(float(jnp.mean(stats.values)))
        if number in (0, FLAGS.steps - 1):
            told = f"loss {losses[-1]:.3f}, median norm {jnp.median(stats.norms):.3f}"
            print(f"step {number + 1}: {told}, {int(stats.num_clipped)} of {size} clipped")
    scores = jax.jit(jax.vmap(predict, (None, 0)))(params, data.test_images)
    accuracy = float(np.mean(np.argmax(scores, -1) == data.test_labels))
    print(f"test accuracy {accuracy:.3f}")
    return Result(params, losses, accuracy)
