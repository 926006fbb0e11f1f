"""``gather`` from a parameter table: look-ups, embeddings.

The gradient of a look-up is a scatter-add of the cotangent rows into a table of zeros; rows looked
up several times accumulate. Norms need no table: rows with equal ids are added up first, so they
cost in the number of look-ups, never in the size of the vocabulary.

Any gather is one of rows. Axes of the table along which a look-up takes less than all, or which
it shares with its indices, make up the row's id, row by row where a look-up spans several; the
other axes are the row. So a look-up in one of several tables is one of rows of all of them.

Letters: B examples; N look-ups of one example; T rows looked up; D entries of a row.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex._compat import manual_axes, promote_types, vary_over
from perex._rules.chunks import cache_chunk, map_chunks
from perex._rules.registry import Site
from perex._rules.scales import sum_squares

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
        dtype = promote_types(cotangent.dtype, jnp.float32)
        cotangent = cotangent.astype(dtype)
        rows = _rows(site, inputs[0], cotangent)
        if rows is None:

            def some(indices: jax.Array, cotangent: jax.Array) -> jax.Array:
                return sum_squares(self.per_example(site, (indices,), cotangent))

            held = dtype.itemsize * math.prod(site.parameter.shape)
            chunk = cache_chunk(cotangent.shape[0], held)
            return map_chunks(some, (inputs[0], cotangent), chunk)
        if self.longest_sum(site) == 1:
            # No row is looked up twice.
            return sum_squares(rows[1])
        return jax.vmap(_square_norm_of_rows)(*rows)

    def magnitudes(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> jax.Array:
        """Returns the sum ``[B]`` over look-ups of the norms of what each adds to the gradient."""
        windows = _windows(site, cotangent)
        windows = windows.astype(promote_types(cotangent.dtype, jnp.float32))
        axes = tuple(range(2, windows.ndim))
        lengths = jnp.sqrt(jnp.sum(jnp.square(jnp.abs(windows)), axis=axes))
        _, inside = _starts(site, inputs[0])
        if inside is not None:
            lengths = jnp.where(inside.reshape(lengths.shape), lengths, 0)
        return jnp.sum(lengths, axis=1)

    def longest_sum(self, site: Site) -> int:
        """Returns how many look-ups can meet in one entry of the table, at least 1."""
        numbers = site.params["dimension_numbers"]
        shape = site.operands[1].shape
        shared = numbers.start_indices_batching_dims
        return max(1, math.prod(n for d, n in enumerate(shape[:-1]) if d not in shared))

    def outer_form(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> tuple[tuple[jax.Array, tuple[int, ...]], ...] | None:
        """Returns ids ``[B, T]`` and rows ``[B, T, D]``, each with the table's axes it spans.

        None where the gather does not look up whole rows.
        """
        numbers = site.params["dimension_numbers"]
        table, sizes = site.parameter.shape, site.params["slice_sizes"]
        mapped = tuple(sorted(numbers.start_index_map))
        whole = all(sizes[d] == (1 if d in mapped else table[d]) for d in range(len(table)))
        if (
            numbers.operand_batching_dims
            or not whole
            or mapped != tuple(sorted(numbers.collapsed_slice_dims))
        ):
            return None
        rows = _rows(site, inputs[0], cotangent)
        if rows is None:
            return None
        rest = tuple(d for d in range(len(table)) if d not in mapped)
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
        dtype = promote_types(cotangent.dtype, jnp.float32)
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
        # What was said of the order of one use's ids does not hold for those of several.
        params = {
            **site.params,
            "dimension_numbers": merged,
            "indices_are_sorted": False,
            "unique_indices": False,
        }
        return (
            dataclasses.replace(
                site,
                params=params,
                operands=(table, jax.ShapeDtypeStruct(indices.shape[1:], indices.dtype)),
                out=jax.ShapeDtypeStruct(cotangent.shape[1:], cotangent.dtype),
            ),
            inputs,
            cotangent,
        )


def index_dtype(size: int) -> Any | None:
    """Returns the integer type for indices from -1 to ``size``, or None if there is none."""
    if size <= np.iinfo(np.int32).max:
        return jnp.dtype(jnp.int32)
    wide = jax.dtypes.canonicalize_dtype(np.int64)
    return wide if size <= np.iinfo(wide).max else None


def clip_index(index: jax.Array, low: int, high: int, dtype: Any) -> jax.Array:
    """Returns an integer array within bounds that its own type may be too narrow for."""
    info = jnp.iinfo(index.dtype)
    low, high = (min(max(bound, info.min), info.max) for bound in (low, high))
    bounds = (jnp.asarray(bound, index.dtype) for bound in (low, high))
    return jnp.clip(index, *bounds).astype(dtype)


def _transpose(site: Site, indices: jax.Array, cotangent: jax.Array) -> jax.Array:
    # Inside shard_map the table must vary over the same mesh axes as the look-ups.
    table = jnp.zeros(site.parameter.shape, cotangent.dtype)
    table = vary_over(table, manual_axes(jax.typeof(cotangent)))
    (gradient,) = jax.linear_transpose(lambda t: site.apply((indices,), t), table)(cotangent)
    return gradient


def _starts(site: Site, indices: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Where look-ups start in the table, so that they fit into it.

    Args:
      site: the look-up.
      indices: ``[..., K]``.

    Returns:
      (starts, inside): ``[..., K]``, of an integer type that holds any index of the table, and
      ``[...]``, which look-ups are not dropped, or None if none is.
    """
    table, sizes = site.parameter.shape, site.params["slice_sizes"]
    mapped = site.params["dimension_numbers"].start_index_map
    dtype = index_dtype(max(table, default=1)) or jnp.dtype(jnp.int32)
    largest = np.iinfo(dtype).max
    limits = jnp.array([min(table[d] - sizes[d], largest) for d in mapped], dtype)
    indices = clip_index(indices, -1, max(table, default=1), dtype)
    inside = None
    # Where the promise to stay inside is broken, JAX's derivative drops too: a scatter adds nothing
    # to places that are not there.
    if site.params["mode"] != jax.lax.GatherScatterMode.CLIP:
        inside = jnp.all((indices >= 0) & (indices <= limits), axis=-1)
    return jnp.clip(indices, 0, limits), inside


def _windows(site: Site, cotangent: jax.Array) -> jax.Array:
    """Returns the cotangent as ``[B, N, *offset axes]``."""
    offsets = [d + 1 for d in site.params["dimension_numbers"].offset_dims]
    others = [d for d in range(1, cotangent.ndim) if d not in offsets]
    count = math.prod(cotangent.shape[d] for d in others)
    windows = jnp.transpose(cotangent, (0, *others, *offsets))
    return windows.reshape(cotangent.shape[0], count, *(cotangent.shape[d] for d in offsets))


def _rows(
    site: Site, indices: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array] | None:
    """Brings look-ups into the form ids ``[B, T]``, rows ``[B, T, D]``.

    Look-ups out of bounds are treated as the gather's mode says: moved so that they fit, or dropped
    (rows of zeros). Returns None if no integer type holds the ids.
    """
    numbers = site.params["dimension_numbers"]
    table, sizes = site.parameter.shape, site.params["slice_sizes"]
    mapped, batched = numbers.start_index_map, numbers.operand_batching_dims
    axes = [
        d
        for d in range(len(table))
        if sizes[d] < table[d] or d in batched or (d in mapped and sizes[d] == 1)
    ]
    dtype = index_dtype(math.prod(table[d] for d in axes))
    if dtype is None:
        return None
    batch = indices.shape[0]
    depth = math.prod(sizes[d] for d in range(len(table)) if d not in axes)
    if 0 in table or 0 in sizes:
        return jnp.zeros((batch, 0), dtype), jnp.zeros((batch, 0, depth), cotangent.dtype)
    shape = indices.shape[1:-1]
    count = math.prod(shape)
    starts, inside = _starts(site, indices)
    starts = starts.reshape(batch, count, len(mapped)).astype(dtype)
    # Of collapsed and of shared axes a look-up takes one entry.
    windows = _windows(site, cotangent).reshape(batch, count, *sizes)
    rest = [d for d in range(len(table)) if d not in axes]
    windows = jnp.transpose(windows, (0, 1, *(2 + d for d in (*axes, *rest))))
    if inside is not None:
        inside = jax.lax.expand_dims(inside.reshape(batch, count), range(2, windows.ndim))
        windows = jnp.where(inside, windows, 0)
    ids = jnp.zeros((batch, count), dtype)
    # Where the entries of one look-up lie from its start.
    places = np.zeros((1,), dtype)
    for d in axes:
        ids = ids * table[d]
        if d in mapped:
            ids = ids + starts[..., mapped.index(d)]
        elif d in batched:
            axis = numbers.start_indices_batching_dims[batched.index(d)]
            ids = ids + jax.lax.broadcasted_iota(dtype, shape, axis).reshape(count)
        places = (places[:, None] * table[d] + np.arange(sizes[d], dtype=dtype)).reshape(-1)
    ids = (ids[..., None] + places).reshape(batch, count * len(places))
    return ids, windows.reshape(batch, count * len(places), depth)


def _square_norm_of_rows(ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the squared norm of the sum of rows by id: ids ``[T]``, rows ``[T, D]``."""
    if ids.shape[0] == 0:
        return jnp.zeros((), jnp.finfo(rows.dtype).dtype)
    order = jnp.argsort(ids)
    ordered = ids[order]
    starts = jnp.concatenate(
        [jnp.zeros(1, jnp.int32), (ordered[1:] != ordered[:-1]).astype(jnp.int32)]
    )
    slots = jnp.cumsum(starts)
    sums = jax.ops.segment_sum(rows[order], slots, ids.shape[0], indices_are_sorted=True)
    return jnp.sum(jnp.square(jnp.abs(sums)))
