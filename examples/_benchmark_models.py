"""The models that the benchmark runs, and the ways to differentiate them that need no perex."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import models
from _benchmark_report import Options

Tree = Any


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of one size.

    Attributes:
      name: what it is called in the tables.
      builder: its name in `models.BUILDERS`.
      batch_size: number of examples.
      sizes: keywords for the builder.
      sample: the batch size without `--full`; None leaves the model out then.
      remat_of: the name of the same model without rematerialisation, if this is one with it.
    """

    name: str
    builder: str
    batch_size: int
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sample: int | None = None
    remat_of: str = ""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A loss, and what to call it with.

    Attributes:
      loss: ``loss(params, *example)``, a scalar.
      params: the parameters.
      batch: arrays with the example axis in front.
      l2_norm_clip: a clip norm that some examples exceed and some do not.
    """

    loss: Callable[..., jax.Array]
    params: Tree
    batch: tuple[jax.Array, ...]
    l2_norm_clip: float

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of all contestants."""
        return (self.params, *self.batch)

    @property
    def batch_size(self) -> int:
        """The number of examples."""
        return self.batch[0].shape[0]


def select(entries: Sequence[Entry], options: Options) -> Iterator[tuple[Entry, int]]:
    """Yields the entries to run, and with how many examples."""
    for entry in entries:
        if options.models and not any(pattern in entry.name for pattern in options.models):
            continue
        if options.full or options.models:
            yield entry, options.batch_size or entry.batch_size
        elif entry.sample is not None:
            yield entry, options.batch_size or entry.sample


def build(entry: Entry, batch_size: int, dtype: Any) -> Problem:
    """Draws parameters and a batch.

    The clip norm is the mean of the first two examples' norms: random data has norms close to each
    other, and a clip norm that none or all exceed would leave half of what clipping does unchecked.
    """
    builder = models.BUILDERS[entry.builder]
    loss, params, batch = builder(batch_size, jax.random.key(0), dtype=dtype, **entry.sizes)
    norm_of = jax.jit(lambda *example: norm(jax.grad(loss)(params, *example)))
    norms = [float(norm_of(*(array[i] for array in batch))) for i in {0, min(1, batch_size - 1)}]
    return Problem(loss, params, batch, sum(norms) / len(norms))


def norm(tree: Tree) -> jax.Array:
    """Returns the L2 norm over all leaves, in at least float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(_at_least_float32(x))) for x in jax.tree.leaves(tree)))


def ordinary(problem: Problem) -> Callable[..., Tree]:
    """The gradient of the mean loss."""

    def mean_loss(params: Tree, *batch: jax.Array) -> jax.Array:
        return jax.vmap(problem.loss, in_axes=(None, *(0 for _ in batch)))(params, *batch).mean()

    return jax.grad(mean_loss)


def vmapped(problem: Problem) -> Callable[..., Tree]:
    """Per-example gradients by vmap."""
    return jax.vmap(jax.grad(problem.loss), in_axes=(None, *(0 for _ in problem.batch)))


def vmapped_and_clipped(problem: Problem) -> Callable[..., Tree]:
    """The sum of clipped gradients by vmap, all gradients in memory."""
    gradients_of = vmapped(problem)

    def clipped_sum(*args: Any) -> Tree:
        gradients = gradients_of(*args)
        weights = jnp.minimum(1, problem.l2_norm_clip / jax.vmap(norm)(gradients))
        return weighted(gradients, weights)

    return clipped_sum


def weighted(gradients: Tree, weights: jax.Array) -> Tree:
    """Sums gradients ``[B, ...]`` over examples, each with its weight."""
    return jax.tree.map(lambda g: jnp.tensordot(weights, _at_least_float32(g), 1), gradients)


def _at_least_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
