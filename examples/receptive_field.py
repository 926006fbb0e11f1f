"""Draw what one pixel of a PixelCNN depends on, with and without exact masks.

    python examples/receptive_field.py                        # scikit-learn's digits
    python examples/receptive_field.py --data_dir=DIR         # MNIST from its IDX files

A small PixelCNN (a 7x7 convolution of type A, then 3x3 of type B, in Flax) is trained briefly on
real digits to predict each pixel from the pixels before it. Then the gradient of its centre pixel
with respect to the image is drawn for each depth, on a logarithmic scale: as the backend computes
it, as `perex.exact_masks` does, and the difference. Pixels that must not have any influence lie
after the stroked line; a gradient of exactly zero is white.

Backends that transform 3x3 convolutions (Winograd, on many GPUs) show colour there. Others, like
CPUs, do not; there the program says so and draws an emulated backend, labelled as such, instead.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import _data
import _flags
import _winograd
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import tqdm
from absl import app, flags
from matplotlib import colors, figure

import perex

matplotlib.use("agg")

FLAGS = flags.FlagValues()
flags.DEFINE_string(
    "data_dir", None, "directory with MNIST's IDX files; default: small digits", flag_values=FLAGS
)
flags.DEFINE_integer(
    "depth", 4, "number of 3x3 layers after the 7x7 one", lower_bound=1, flag_values=FLAGS
)
flags.DEFINE_integer("features", 64, "channels of each layer", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer("steps", 150, "training steps", lower_bound=0, flag_values=FLAGS)
flags.DEFINE_integer("batch_size", 32, "images a step", lower_bound=1, flag_values=FLAGS)
flags.DEFINE_float(
    "learning_rate", 2e-3, "Adam's learning rate", lower_bound=0.0, flag_values=FLAGS
)
flags.DEFINE_integer(
    "seed", 0, "seed of the initial parameters and of the order of images", flag_values=FLAGS
)
flags.DEFINE_string(
    "plot", "receptive_field.png", "file that the picture is written to", flag_values=FLAGS
)


class PixelCNN(nn.Module):
    """Predicts each pixel's logit from the pixels before it, in raster order.

    Attributes:
      features: channels of each layer.
      depth: number of 3x3 layers after the first one.
    """

    features: int
    depth: int

    @nn.compact
    def __call__(self, images: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Returns logits ``[N, H, W, 1]`` and the activations ``[N, H, W, C]`` of each layer."""
        x = nn.Conv(self.features, (7, 7), mask=raster_mask(7, 1, self.features, "A"))(images)
        activations = [x]
        for _ in range(self.depth):
            mask = raster_mask(3, self.features, self.features, "B")
            x = x + nn.Conv(self.features, (3, 3), mask=mask)(nn.silu(x))
            activations.append(x)
        return nn.Dense(1)(nn.silu(x)), activations


def raster_mask(size: int, inputs: int, outputs: int, kind: str) -> jax.Array:
    """Returns ``[size, size, inputs, outputs]``: ones before the centre, and on it for type B."""
    place = jnp.arange(size * size).reshape(size, size)
    before = place < size * size // 2 + (kind == "B")
    return jnp.broadcast_to(before[..., None, None], (size, size, inputs, outputs)).astype(float)


def train(model: PixelCNN, images: np.ndarray) -> Any:
    """Trains on binary images ``[N, H, W, 1]`` and returns the parameters."""
    params = model.init(jax.random.key(FLAGS.seed), images[:1])
    optimizer = optax.adam(FLAGS.learning_rate)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        logits, _ = model.apply(params, batch)
        return optax.sigmoid_binary_cross_entropy(logits, batch).mean() / jnp.log(2)

    @jax.jit
    def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(perex.exact_masks(loss))(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    rng = np.random.default_rng(FLAGS.seed)
    progress = tqdm.trange(FLAGS.steps, desc="training", unit="step")
    for _ in progress:
        batch = images[rng.integers(len(images), size=FLAGS.batch_size)]
        params, state, value = step(params, state, batch)
        progress.set_postfix(bits_per_pixel=f"{float(value):.3f}")
    return params


def sensitivities(apply: Callable[..., Any], params: Any, images: Any, backend: Any) -> np.ndarray:
    """Returns ``[depth + 1, H, W]``: the mean size of the gradient of the centre pixel's features.

    Args:
      apply: the model.
      params: its parameters.
      images: ``[N, H, W, 1]``.
      backend: turns a function into one that runs it, such as `jax.jit`.
    """
    height, width = images.shape[1:3]

    def centre(images: jax.Array, layer: int) -> jax.Array:
        return apply(params, images)[1][layer][:, height // 2, width // 2].sum()

    maps = []
    for layer in tqdm.trange(FLAGS.depth + 1, desc="receptive fields", unit="layer", leave=False):
        gradient = backend(jax.grad(functools.partial(centre, layer=layer)))(images)
        maps.append(np.abs(gradient)[..., 0].mean(0))
    return np.stack(maps)


def allowed(height: int, width: int, layer: int) -> np.ndarray:
    """Returns ``[H, W]``: the pixels that may influence the centre after a number of 3x3 layers."""
    rows, columns = np.indices((height, width))
    down, right = rows - height // 2, columns - width // 2
    reach = 3 + layer
    inside = (abs(down) <= reach) & (abs(right) <= reach)
    return inside & ((down < 0) | ((down == 0) & (right < 0)))


def draw(rows: Sequence[tuple[str, np.ndarray]], outside: np.ndarray, path: pathlib.Path) -> None:
    """Draws a picture with one row for each title and ``[L, H, W]``, one column for each layer."""
    layers = len(rows[0][1])
    largest = max(values.max() for _, values in rows)
    smallest = min(values[values > 0].min() for _, values in rows if (values > 0).any())
    norm = colors.LogNorm(max(smallest, largest * 1e-12), largest)
    picture = figure.Figure(figsize=(2.1 * layers + 1.4, 2.3 * len(rows)), layout="constrained")
    axes = picture.subplots(len(rows), layers, squeeze=False)
    for row, (title, values) in enumerate(rows):
        for layer in range(layers):
            ax = axes[row, layer]
            shown = np.ma.masked_equal(values[layer], 0)
            image = ax.imshow(shown, norm=norm, cmap="viridis", interpolation="nearest")
            outline(ax, outside)
            ax.set(xticks=[], yticks=[])
            leak = values[layer][outside].max()
            ax.set_xlabel(f"after the line: {leak:.0e}" if leak else "after the line: 0", size=8)
            if row == 0:
                ax.set_title("7x7 A" if layer == 0 else f"+ {layer} x 3x3 B", size=9)
        axes[row, 0].set_ylabel(title, size=9)
    bar = picture.colorbar(image, ax=axes, shrink=0.7)
    bar.set_label("mean |gradient| of the centre pixel (white: exactly zero)", size=9)
    picture.savefig(path, dpi=130)


def outline(ax: Any, outside: np.ndarray) -> None:
    """Strokes the border between the pixels that may have influence and those that must not."""
    height, width = outside.shape
    row, column = height // 2, width // 2
    x = [-0.5, column - 0.5, column - 0.5, width - 0.5]
    y = [row + 0.5, row + 0.5, row - 0.5, row - 0.5]
    ax.plot(x, y, color="crimson", linewidth=1.2)
    ax.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))


def main(argv: Sequence[str]) -> None:
    """Trains, measures the leak and draws it."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    path = pathlib.Path(FLAGS.plot)
    if not path.resolve().parent.is_dir():
        raise app.UsageError(f"--plot={path}: the directory does not exist")
    try:
        data = _data.load("mnist" if FLAGS.data_dir else "digits", FLAGS.data_dir)
    except (OSError, ValueError) as error:
        raise app.UsageError(str(error)) from error
    images = (data.train_images > 0.5).astype(np.float32)
    probes = (data.test_images[:8] > 0.5).astype(np.float32)

    model = PixelCNN(FLAGS.features, FLAGS.depth)
    params = train(model, images)
    measure = functools.partial(sensitivities, params=params, images=probes)
    exact = perex.exact_masks(model.apply)
    height, width = probes.shape[1:3]
    outside = ~(np.arange(height * width) < height // 2 * width + width // 2).reshape(height, width)

    platform = jax.default_backend()
    ordinary, ours = measure(model.apply, backend=jax.jit), measure(exact, backend=jax.jit)
    name = f"ordinary, {platform}"
    if not ordinary[:, outside].any():
        print(
            f"The backend ({platform}) does not leak: the ordinary gradient is exactly zero after "
            "the centre. The picture shows an emulated Winograd backend instead."
        )
        name = "ordinary, EMULATED\nWinograd backend"
        ordinary = measure(model.apply, backend=_winograd.backend)
        ours = measure(exact, backend=_winograd.backend)
    for layer in range(FLAGS.depth + 1):
        field = int((ours[layer] > 0).sum())
        stray = int((ours[layer][~allowed(height, width, layer)] > 0).sum())
        print(
            f"after 7x7 and {layer} 3x3 layers: {field} pixels influence the centre; largest "
            f"gradient where there must be none: ordinary {ordinary[layer][outside].max():.1e}, "
            f"perex {ours[layer][outside].max():.1e} ({stray} pixels outside of the field)"
        )
    difference = np.abs(ordinary - ours)
    draw([(name, ordinary), ("perex.exact_masks", ours), ("difference", difference)], outside, path)
    print(f"wrote {path}")


if __name__ == "__main__":
    _flags.publish(FLAGS)
    app.run(main)
