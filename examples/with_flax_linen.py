"""Private training of a Flax linen model: `python examples/with_flax_linen.py --steps=60`.

The module sees one example. Dropout draws from the example's own key. BatchNorm has no place here:
its statistics mix the examples of a batch, so no example has a gradient of its own. GroupNorm has
none of that.
"""

from typing import Any

import _flags
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from _training import FLAGS, train
from absl import app


class Network(nn.Module):
    """A small residual network."""

    @nn.compact
    def __call__(self, x, train):
        """Returns the scores of the classes."""
        x = nn.Conv(16, (3, 3))(x)
        y = nn.relu(nn.GroupNorm(4)(x))
        x = x + nn.Conv(16, (3, 3))(y)
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x)).mean((0, 1))
        return nn.Dense(10)(nn.Dropout(0.1, deterministic=not train)(x))


def build():
    """Returns loss, predict and params, as `train` takes them."""
    model = Network()
    params = model.init(jax.random.key(0), jnp.zeros((8, 8, 1)), train=False)

    def scores(params, image, **options) -> Any:
        return model.apply(params, image, **options)

    def loss(params, image, label, key):
        logits = scores(params, image, train=True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    return loss, lambda params, image: scores(params, image, train=False), params


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    train(*build())


if __name__ == "__main__":
    _flags.publish(FLAGS)
    app.run(main)
