"""Train a small CNN on real images with differential privacy (DP-SGD).

    python examples/train_private.py                                     # digits, about a minute
    python examples/train_private.py --dataset=mnist --data_dir=DIR --target_epsilon=1.19

Each step draws a Poisson sample of the training images, takes the gradient of each image with
`perex.grad`, as factors where that is cheaper, and gives these to
`optax.chain(perex.dp_clip(...), optax.sgd(...))`. With `--microbatch_size`, `perex.clipped_grad`
clips and sums that many images at a time with less memory, and `perex.dp_noise` adds the noise,
once. The privacy spent, by dp_accounting, is printed at each epoch.

The guarantee is for adding or removing one training image, and for what training releases: the
parameters, and the accuracy on test images, which are taken to be public. The number of training
images is taken to be public too. Counts of clipped images and the histogram of norms show training
images without any noise: they are here to help choose a clip norm, and are not private.

Batches have a fixed physical size, chosen so that a Poisson sample practically always fits. A
sample that does not fit is cut at random and counted, and the delta that is printed allows for the
possibility; see `_sampling.py`. With a fixed `--seed` a run can be repeated by anybody
who knows the seed, noise included: a release that must be private needs a secret one.
"""

import dataclasses
import math
import pathlib
import time
from typing import Any

import _data
import _report
import _sampling
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from absl import app, flags

import perex

# What each data set is trained with, where flags do not say otherwise.
DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {
        "epochs": 40,
        "batch_size": 512,
        "l2_norm_clip": 0.5,
        "learning_rate": 1.0,
        "target_epsilon": 3.0,
        "delta": 1e-4,
    },
    "mnist": {
        "epochs": 12,
        "batch_size": 2048,
        "l2_norm_clip": 0.5,
        "learning_rate": 1.5,
        "target_epsilon": 3.0,
        "delta": 1e-5,
    },
}
MOMENTUM = 0.9

FLAGS = flags.FLAGS


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    def by_dataset(name):
        return "default: " + ", ".join(f"{d[name]:g} for {key}" for key, d in DEFAULTS.items())

    def number(define, name, text, least=None, default=None):
        define(name, default, text, lower_bound=least, flag_values=values)

    integer, real = flags.DEFINE_integer, flags.DEFINE_float
    flags.DEFINE_enum(
        "dataset", "digits", list(DEFAULTS), "Images to train on.", flag_values=values
    )
    flags.DEFINE_string(
        "data_dir",
        None,
        "Directory of the four IDX files of MNIST, gzipped or not.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "plot", None, "PNG file to draw a picture of the run into.", flag_values=values
    )
    number(integer, "epochs", f"Passes over the data, in expectation; {by_dataset('epochs')}.", 1)
    number(integer, "batch_size", f"Expected size of a batch; {by_dataset('batch_size')}.", 1)
    number(real, "l2_norm_clip", f"Bound on a gradient's norm; {by_dataset('l2_norm_clip')}.", 0)
    number(
        real,
        "learning_rate",
        f"Of SGD with momentum, at the start; {by_dataset('learning_rate')}.",
        0,
    )
    number(real, "noise_multiplier", "Noise on the sum, in clip norms; 0: no privacy.", 0)
    number(
        real,
        "target_epsilon",
        f"Make the noise such that the run spends this; {by_dataset('target_epsilon')}.",
    )
    number(real, "delta", f"The delta of the guarantee; {by_dataset('delta')}.")
    number(integer, "microbatch_size", "Images to hold gradients of at a time; default: all.", 1)
    number(integer, "seed", "Of parameters, samples and noise.", 0, default=0)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags, with defaults filled in; either noise_multiplier or target_epsilon is None."""

    epochs: int
    batch_size: int
    l2_norm_clip: float
    learning_rate: float
    delta: float
    noise_multiplier: float | None
    target_epsilon: float | None
    microbatch_size: int | None
    seed: int


def settings(examples: int) -> Settings:
    """Fill in what the flags leave open, and check what they say.

    Args:
      examples: the number of training images.

    Returns:
      The settings of the run.

    Raises:
      app.UsageError: a flag does not fit the data or the other flags.
    """
    defaults = DEFAULTS[FLAGS.dataset]
    values: dict[str, Any] = {
        name: default if FLAGS[name].value is None else FLAGS[name].value
        for name, default in defaults.items()
    }
    if FLAGS.noise_multiplier is not None:
        if FLAGS.target_epsilon is not None:
            raise app.UsageError("give --noise_multiplier or --target_epsilon, not both")
        values["target_epsilon"] = None
    elif not 0 < values["target_epsilon"] < math.inf:
        raise app.UsageError(
            f"--target_epsilon={values['target_epsilon']} is not above 0 and finite"
        )
    if not 0 < values["delta"] < 1:
        raise app.UsageError(f"--delta={values['delta']} does not lie between 0 and 1")
    if values["batch_size"] > examples:
        raise app.UsageError(
            f"--batch_size={values['batch_size']} exceeds the {examples} training images"
        )
    for name in ("l2_norm_clip", "learning_rate", "noise_multiplier"):
        given: Any = FLAGS[name].value
        if given is not None and not math.isfinite(given):
            raise app.UsageError(f"--{name}={given} is not finite")
    if FLAGS.plot and not pathlib.Path(FLAGS.plot).absolute().parent.is_dir():
        raise app.UsageError(f"--plot={FLAGS.plot}: there is no such directory")
    return Settings(
        **values,
        noise_multiplier=FLAGS.noise_multiplier,
        microbatch_size=FLAGS.microbatch_size,
        seed=FLAGS.seed,
    )


class CNN(nn.Module):
    """Two convolutions and two dense layers, from one image `[H, W, 1]` to the logits `[10]`."""

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """Return the logits of the ten classes."""
        large = image.shape[0] > 16
        # Bounded activations do better than ReLU where gradients are clipped (Papernot et al. 2020,
        # arXiv:2007.14191).
        x = nn.tanh(nn.Conv(16, (8, 8) if large else (3, 3), strides=2 if large else 1)(image))
        x = nn.max_pool(x, (2, 2))
        x = nn.tanh(nn.Conv(32, (4, 4) if large else (3, 3), strides=2, padding="VALID")(x))
        x = nn.max_pool(x, (2, 2))
        x = nn.tanh(nn.Dense(32)(x.reshape(-1)))
        return nn.Dense(10)(x)


MODEL = CNN()


def logits(params: Any, image: jax.Array) -> jax.Array:
    """Return the logits `[10]` of one image `[H, W, 1]`."""
    return jnp.asarray(MODEL.apply(params, image))


def loss(params: Any, image: jax.Array, label: jax.Array) -> jax.Array:
    """Return the loss of one image `[H, W, 1]`, a scalar."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, image), label)


@jax.jit
def accuracy(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the fraction of images `[N, H, W, 1]` that get their label."""
    guesses = jnp.argmax(jax.vmap(logits, (None, 0))(params, images), -1)
    return jnp.mean(guesses == labels)


@jax.jit
def gradient_norms(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the norm of each image's gradient `[N]`."""
    return perex.grad_norms(loss)(params, images, labels)


def optimizer(
    config: Settings, plan: _sampling.Plan, noise_multiplier: float, key: jax.Array
) -> optax.GradientTransformationExtraArgs:
    """Return what makes an update of per-example gradients, or of their clipped sum."""
    privatize = perex.dp_clip if config.microbatch_size is None else perex.dp_noise
    return optax.chain(
        privatize(
            config.l2_norm_clip, noise_multiplier, key, expected_batch_size=config.batch_size
        ),
        optax.sgd(optax.linear_schedule(config.learning_rate, 0, plan.steps), momentum=MOMENTUM),
    )


def train(data: _data.Data, config: Settings) -> _report.Run:
    """Train, print the accuracy and the privacy spent at each epoch, and return the run."""
    plan = _sampling.plan(
        len(data.train_labels),
        config.batch_size,
        config.epochs,
        config.delta,
    )
    noise_multiplier = config.noise_multiplier
    if noise_multiplier is None:
        noise_multiplier = _sampling.calibrate(plan, config.target_epsilon or 0.0, config.delta)
    images, labels, test_images, test_labels = map(jnp.asarray, data)
    init_key, noise_key = jax.random.split(jax.random.key(config.seed))
    params = MODEL.init(init_key, images[0])
    tx = optimizer(config, plan, noise_multiplier, noise_key)
    state = tx.init(params)

    clipped_sum = perex.clipped_grad(
        loss, config.l2_norm_clip, microbatch_size=config.microbatch_size
    )

    @jax.jit
    def step(params, state, indices, is_padding):
        batch = images[indices], labels[indices]
        if config.microbatch_size is None:
            gradients = perex.grad(loss, factored=True)(params, *batch)
            updates, state = tx.update(gradients, state, params, is_padding=is_padding)
        else:
            total, _ = clipped_sum(params, *batch, is_padding=is_padding)
            updates, state = tx.update(total, state, params)
        return optax.apply_updates(params, updates), state

    sampler = _sampling.Sampler(plan, config.seed)
    accountant = _sampling.Accountant(plan, noise_multiplier, config.delta)
    run = _report.Run(plan, config.l2_norm_clip, noise_multiplier, config.delta)
    # Both data sets come shuffled, so the first images are as good as any.
    run.norms["before"] = np.asarray(gradient_norms(params, images[:1000], labels[:1000]))
    begin = time.perf_counter()
    with tqdm.tqdm(total=plan.steps, unit="step") as progress:
        for epoch in range(1, config.epochs + 1):
            for _ in range(plan.steps_per_epoch):
                params, state = step(params, state, *sampler.sample())
                progress.update()
            run.record(
                epoch * plan.steps_per_epoch,
                float(accuracy(params, test_images, test_labels)),
                accountant.spend(plan.steps_per_epoch),
            )
            progress.write(
                f"epoch {epoch}: test accuracy {run.accuracies[-1]:.2%}, "
                f"epsilon {run.epsilons[-1]:.3f} at delta {config.delta:g}"
            )
    run.seconds = time.perf_counter() - begin
    run.norms["after"] = np.asarray(gradient_norms(params, images[:1000], labels[:1000]))
    run.overflows, run.left_out = sampler.overflows, sampler.left_out
    return run


def main(arguments: list[str]) -> None:
    """Run the program."""
    if len(arguments) > 1:
        raise app.UsageError(f"unknown argument {arguments[1]!r}")
    try:
        data = _data.load(FLAGS.dataset, FLAGS.data_dir)
    except (ValueError, OSError) as error:
        raise app.UsageError(str(error)) from error
    run = train(data, settings(len(data.train_labels)))
    _report.print_summary(run)
    if FLAGS.plot:
        _report.plot(run, FLAGS.plot)
        print(f"wrote {FLAGS.plot}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
