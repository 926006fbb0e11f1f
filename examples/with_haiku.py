"""Private training of a Haiku model: `python examples/with_haiku.py --steps=60`.

The transformed function sees one example, as a batch of one where a module insists on a batch axis
(an LSTM does not). Dropout draws from the example's own key. BatchNorm has no place here, as its
statistics mix the examples of a batch: GroupNorm or LayerNorm.
"""

import _flags
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from _training import FLAGS, train
from absl import app


def network(image, is_training):
    """An LSTM over the rows of an image."""
    rows = hk.Linear(32)(image[..., 0])
    core = hk.LSTM(32)
    states, _ = hk.dynamic_unroll(core, rows, core.initial_state(None))
    x = hk.LayerNorm(-1, True, True)(states).mean(0)
    if is_training:
        x = hk.dropout(hk.next_rng_key(), 0.1, x)
    return hk.Linear(10)(x)


def build():
    """Returns loss, predict and params, as `train` takes them."""
    model = hk.transform(network)
    params = model.init(jax.random.key(0), jnp.zeros((8, 8, 1)), is_training=True)

    def loss(params, image, label, key):
        logits = model.apply(params, key, image, is_training=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    def predict(params, image):
        return model.apply(params, None, image, is_training=False)

    return loss, predict, params


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    train(*build())


if __name__ == "__main__":
    _flags.publish(FLAGS)
    app.run(main)
