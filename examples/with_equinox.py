"""Private training of an Equinox model: `python examples/with_equinox.py --steps=60`.

An Equinox model is a pytree of arrays, numbers and functions. `eqx.partition` separates the
floating-point arrays, which are the parameters, from all else. Its layers see one example by
themselves, and dropout takes the example's own key. BatchNorm has no place here, as its statistics
mix the examples of a batch: `eqx.nn.GroupNorm`.
"""

import _flags
import equinox as eqx
import jax
import optax
from _training import FLAGS, train
from absl import app


class Network(eqx.Module):
    """A small convolutional network."""

    first: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    second: eqx.nn.Conv2d
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear
    depth: int  # a leaf that is no array

    def __init__(self, key):
        """Draws the parameters."""
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0])
        self.norm = eqx.nn.GroupNorm(4, 16)
        self.second = eqx.nn.Conv2d(16, 32, 3, stride=2, padding=1, key=keys[1])
        self.dropout = eqx.nn.Dropout(0.1)
        self.head = eqx.nn.Linear(32, 10, key=keys[2])
        self.depth = 2

    def __call__(self, image, key=None):
        """Returns the scores of the classes; with a key, dropout is on."""
        x = image.transpose(2, 0, 1)
        x = jax.nn.relu(self.norm(self.first(x)))
        x = jax.nn.relu(self.second(x)).mean((1, 2)) * self.depth
        return self.head(self.dropout(x, key=key, inference=key is None))


def build():
    """Returns loss, predict and params, as `train` takes them."""
    params, static = eqx.partition(Network(jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, image, label, key):
        logits = eqx.combine(params, static)(image, key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    return loss, lambda params, image: eqx.combine(params, static)(image), params


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    train(*build())


if __name__ == "__main__":
    _flags.publish(FLAGS)
    app.run(main)
