"""Private training of a Flax NNX model: `python examples/with_flax_nnx.py --steps=60`.

`nnx.split` separates the parameters, a pytree, from the rest: the structure, and the counters and
keys of the module's random streams. The loss puts them together again, with the example's own key
for dropout. BatchNorm has no place here, as its statistics mix the examples of a batch: GroupNorm.
"""

import _flags
import jax.numpy as jnp
import optax
from _training import FLAGS, train
from absl import app
from flax import nnx


class Network(nnx.Module):
    """A transformer block over the rows of an image."""

    def __init__(self, rngs):
        """Draws the parameters."""
        self.embed = nnx.Linear(8, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(32, 64, rngs=rngs), nnx.gelu, nnx.Linear(64, 32, rngs=rngs)
        )
        self.positions = nnx.Param(jnp.zeros((8, 32)))
        self.head = nnx.Linear(8 * 32, 10, rngs=rngs)

    def __call__(self, image):
        """Returns the scores of the classes."""
        x = self.embed(image[..., 0]) + self.positions[...]
        x = x + self.attention(self.norm(x))
        x = x + self.dropout(self.mlp(x))
        return self.head(x.reshape(-1))


def build():
    """Returns loss, predict and params, as `train` takes them."""
    # A stream of its own for dropout, so that the loss can give it the key of the example.
    model = Network(nnx.Rngs(0, dropout=1))
    structure, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, image, label, key):
        model = nnx.merge(structure, params, rest, copy=True)
        nnx.reseed(model, dropout=key)
        return optax.softmax_cross_entropy_with_integer_labels(model(image), label)

    def predict(params, image):
        model = nnx.merge(structure, params, rest, copy=True)
        model.eval()
        return model(image)

    return loss, predict, params


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    train(*build())


if __name__ == "__main__":
    _flags.publish(FLAGS)
    app.run(main)
