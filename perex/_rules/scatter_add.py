"""``scatter_add`` of a parameter table at places that the example names: segments, histograms.

``jax.ops.segment_sum(table, ids)`` adds up the table's rows by ids of the example. A row goes to
one place, or to none where its id is out of bounds, so the gradient is a look-up of the cotangent:
each of its entries is one entry of that, and nothing is added up. It is as large as the table for
every example, and is computed a few examples at a time.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from perex._compat import manual_axes, vary_over
from perex._rules import outer_product
from perex._rules.chunks import cache_chunk, map_chunks, sum_chunks
from perex._rules.registry import Site
from perex._rules.scales import sum_squares

# Two CPU cores, float32: what reading or writing one number in memory takes.
_SECONDS_PER_ENTRY = 5e-10


class ScatterAddRule:
    """Per-example gradients of a table that is added up at places of the example's."""

    def covers(self, site: Site) -> str | None:
        """Returns why the rule does not apply, or None."""
        if site.argument == 0:
            return "the parameter is what is added to"
        if site.argument == 1:
            return "the places are computed from parameters"
        return None

    def per_example(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> jax.Array:
        """Returns ``[B, *table.shape]``.

        Args:
          site: the sum.
          inputs: what is added to, ``[B, ...]``, which is not read, and the places ``[B, ..., K]``.
          cotangent: ``[B, *site.out.shape]``.
        """
        return jax.vmap(lambda i, c: _transpose(site, i, c))(inputs[1], cotangent)

    def square_norm(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> jax.Array:
        """Returns the squared norms ``[B]``, of the gradients themselves."""

        def some(indices: jax.Array, cotangent: jax.Array) -> jax.Array:
            return sum_squares(self._gradients(site, indices, cotangent))

        return map_chunks(some, (inputs[1], cotangent), self._chunk(site, cotangent))

    def weighted_sum(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """Returns the weighted sum over examples, of the table's shape, at least float32."""

        def some(indices: jax.Array, cotangent: jax.Array, weights: jax.Array) -> jax.Array:
            return outer_product.sum_measured(self._gradients(site, indices, cotangent), weights)

        return sum_chunks(some, (inputs[1], cotangent, weights), self._chunk(site, cotangent))

    def estimate(self, site: Site, batch_size: int) -> dict[str, float]:
        """Returns estimated seconds of each way to a clipped sum."""
        seconds = 2 * batch_size * math.prod(site.parameter.shape) * _SECONDS_PER_ENTRY
        return {"keep": 1.5 * seconds, "gram": seconds, "stream": 1.2 * seconds}

    def _gradients(self, site: Site, indices: jax.Array, cotangent: jax.Array) -> jax.Array:
        dtype: Any = outer_product.accumulate_dtype(cotangent.dtype)
        return jax.vmap(lambda i, c: _transpose(site, i, c))(indices, cotangent.astype(dtype))

    def _chunk(self, site: Site, cotangent: jax.Array) -> int:
        dtype = outer_product.accumulate_dtype(cotangent.dtype)
        held = dtype.itemsize * math.prod(site.parameter.shape)
        return cache_chunk(cotangent.shape[0], held)


def _transpose(site: Site, indices: jax.Array, cotangent: jax.Array) -> jax.Array:
    # Inside shard_map the table must vary over the same mesh axes as the places.
    axes = manual_axes(jax.typeof(cotangent))
    table = vary_over(jnp.zeros(site.parameter.shape, cotangent.dtype), axes)
    start = jnp.zeros_like(cotangent)
    (gradient,) = jax.linear_transpose(lambda t: site.apply((start, indices), t), table)(cotangent)
    return gradient
