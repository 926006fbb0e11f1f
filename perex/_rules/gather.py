"""``gather`` from a parameter table: look-ups, embeddings.

The gradient of a look-up is a scatter-add of the cotangent rows into a table of zeros; rows looked
up several times accumulate. Norms need no table: rows with equal ids are added up first, so they
cost in the number of look-ups, never in the size of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from perex._compat import manual_axes, vary_over
from perex._rules.registry import Site

# Two CPU cores, float32: what reading or writing one number in memory takes.
_SECONDS_PER_ENTRY = 5e-10


class GatherRule:
    """Per-example gradients of a table from which rows (or any slices) are gathered."""

    def covers(self, site: Site) -> str | None:
        """Returns why the rule does not apply, or None."""
        if site.argument != 0:
            return "the indices of the look-up are computed from parameters"
        return None

    def per_example(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> jax.Array:
        """Returns ``[B, *table.shape]``."""
        (indices,) = inputs
        return jax.vmap(lambda i, c: _transpose(site, i, c))(indices, cotangent)

    def square_norm(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> jax.Array:
        """Returns the squared norms ``[B]``.

        Args:
          site: the look-up.
          inputs: the indices ``[B, ..., K]``.
          cotangent: ``[B, *site.out.shape]``.
        """
        dtype = jnp.promote_types(cotangent.dtype, jnp.float32)
        rows = _rows(site, inputs[0], cotangent.astype(dtype))
        if rows is None:
            gradients = self.per_example(site, inputs, cotangent).astype(dtype)
            return jnp.sum(jnp.square(jnp.abs(gradients)), axis=tuple(range(1, gradients.ndim)))
        return jax.vmap(_square_norm_of_rows)(*rows)

    def outer_form(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> tuple[tuple[jax.Array, tuple[int, ...]], ...] | None:
        """Returns ids ``[B, T]`` and rows ``[B, T, D]``, each with the table's axes it spans.

        None where the gather does not look up whole rows.
        """
        rows = _rows(site, inputs[0], cotangent)
        mapped = tuple(site.params["dimension_numbers"].start_index_map)
        if rows is None:
            return None
        rest = tuple(d for d in range(len(site.parameter.shape)) if d not in mapped)
        return (rows[0], mapped), (rows[1], rest)

    def estimate(self, site: Site, batch_size: int) -> dict[str, float]:
        """Returns estimated seconds of each way to a clipped sum.

        Norms cost in the number of rows looked up, gradients in the size of the table.
        """
        looked_up = batch_size * math.prod(site.out.shape) * _SECONDS_PER_ENTRY
        table = math.prod(site.parameter.shape) * _SECONDS_PER_ENTRY
        return {
            "keep": looked_up + 3 * batch_size * table,
            "gram": 2 * looked_up + table,
            "stream": 2 * looked_up + (2 * batch_size + 1) * table,
        }

    def weighted_sum(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """Returns the weighted sum over examples, of the table's shape, at least float32."""
        dtype = jnp.promote_types(cotangent.dtype, jnp.float32)
        weights = weights.reshape(-1, *[1] * (cotangent.ndim - 1)).astype(dtype)
        # By select, so that NaN and Inf of an example of weight zero stay out of the sum.
        cotangent = jnp.where(weights != 0, weights * cotangent.astype(dtype), 0)
        site, (indices,), cotangent = self.merge_repeats(
            site, tuple(x[None] for x in inputs), cotangent[None]
        )
        return _transpose(site, indices[0], cotangent[0])

    def merge_repeats(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> tuple[Site, tuple[jax.Array, ...], jax.Array]:
        """Folds the axis of repeats, second of every array, into the batch axes of the indices."""
        (indices,) = inputs
        numbers = site.params["dimension_numbers"]
        # The repeats become the first batch axis of the indices, so the first axis of the result
        # that is no offset axis: in front of all others, all of which move up by one.
        merged = numbers._replace(
            offset_dims=tuple(d + 1 for d in numbers.offset_dims),
            start_indices_batching_dims=tuple(d + 1 for d in numbers.start_indices_batching_dims),
        )
        table = site.operands[0]
        return (
            dataclasses.replace(
                site,
                params={**site.params, "dimension_numbers": merged},
                operands=(table, jax.ShapeDtypeStruct(indices.shape[1:], indices.dtype)),
                out=jax.ShapeDtypeStruct(cotangent.shape[1:], cotangent.dtype),
            ),
            inputs,
            cotangent,
        )


def _transpose(site: Site, indices: jax.Array, cotangent: jax.Array) -> jax.Array:
    # Inside shard_map the table must vary over the same mesh axes as the look-ups.
    table = jnp.zeros(site.parameter.shape, cotangent.dtype)
    table = vary_over(table, manual_axes(jax.typeof(cotangent)))
    (gradient,) = jax.linear_transpose(lambda t: site.apply((indices,), t), table)(cotangent)
    return gradient


def _rows(site: Site, indices: jax.Array, cotangent: jax.Array) -> Any | None:
    """Brings look-ups of whole rows into the form ids ``[B, T]``, rows ``[B, T, D]``.

    Returns None where the gather is of another kind. Look-ups out of bounds are treated as the
    gather's mode says: clamped, or dropped (rows of zeros).
    """
    numbers = site.params["dimension_numbers"]
    table = site.parameter.shape
    mapped = numbers.start_index_map
    sizes = site.params["slice_sizes"]
    whole = all(sizes[d] == (1 if d in mapped else table[d]) for d in range(len(table)))
    collapsed = tuple(sorted(mapped)) == tuple(numbers.collapsed_slice_dims)
    if numbers.operand_batching_dims or not whole or not collapsed or 0 in table:
        return None
    batch, count = indices.shape[0], math.prod(indices.shape[1:-1])
    offsets = [d + 1 for d in numbers.offset_dims]
    others = [d for d in range(1, cotangent.ndim) if d not in offsets]
    rows = jnp.transpose(cotangent, (0, *others, *offsets))
    rows = rows.reshape(batch, count, math.prod(site.out.shape[d] for d in numbers.offset_dims))
    limits = jnp.array([table[d] for d in mapped], indices.dtype)
    indices = indices.reshape(batch, count, len(mapped))
    inside = jnp.all((indices >= 0) & (indices < limits), axis=-1)
    if site.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP:
        rows = jnp.where(inside[..., None], rows, 0)
    indices = jnp.clip(indices, 0, limits - 1)
    ids = jnp.zeros((batch, count), indices.dtype)
    for axis, d in enumerate(mapped):
        ids = ids * table[d] + indices[..., axis]
    return ids, rows


def _square_norm_of_rows(ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the squared norm of the sum of rows by id: ids ``[T]``, rows ``[T, D]``."""
    if ids.shape[0] == 0:
        return jnp.zeros((), rows.dtype)
    order = jnp.argsort(ids)
    ordered = ids[order]
    starts = jnp.concatenate(
        [jnp.zeros(1, jnp.int32), (ordered[1:] != ordered[:-1]).astype(jnp.int32)]
    )
    slots = jnp.cumsum(starts)
    sums = jax.ops.segment_sum(rows[order], slots, ids.shape[0], indices_are_sorted=True)
    return jnp.sum(jnp.square(jnp.abs(sums)))
