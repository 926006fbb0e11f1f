"""``dynamic_slice`` of a parameter at a place that the example names: one look-up.

``table[token]`` with a single token, as in a loop over tokens, is this and no ``gather``. It is the
gather of one slice, and left to the gather's rule. A slice that would reach beyond the table starts
earlier (``dynamic_slice`` clamps), which is the gather's mode "clip".
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from perex._compat import primitives
from perex._rules.gather import GatherRule, clip_index, index_dtype
from perex._rules.registry import Site


class DynamicSliceRule:
    """Per-example gradients of a table of which the example names one slice."""

    def __init__(self, gather: GatherRule) -> None:
        """Leaves the work to the rule of the gather."""
        self._gather = gather

    def covers(self, site: Site) -> str | None:
        """Returns why the rule does not apply, or None."""
        if site.argument != 0:
            return "the place of the slice is computed from parameters"
        return None

    def per_example(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> jax.Array:
        """Returns ``[B, *table.shape]``."""
        return self._gather.per_example(*as_gather(site, inputs, cotangent))

    def square_norm(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> jax.Array:
        """Returns the squared norms ``[B]``."""
        return self._gather.square_norm(*as_gather(site, inputs, cotangent))

    def magnitudes(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> jax.Array:
        """Returns the norm ``[B]`` of what is sliced, of several slices the sum of the norms."""
        return self._gather.magnitudes(*as_gather(site, inputs, cotangent))

    def longest_sum(self, site: Site) -> int:
        """Returns how many slices can meet in one entry of the table, at least 1."""
        # A slice becomes a gather where repeats are merged, and only there are there several.
        return self._gather.longest_sum(site) if site.primitive is primitives.gather_p else 1

    def weighted_sum(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """Returns the weighted sum over examples, of the table's shape, at least float32."""
        return self._gather.weighted_sum(*as_gather(site, inputs, cotangent), weights)

    def estimate(self, site: Site, batch_size: int) -> dict[str, float]:
        """Returns estimated seconds of each way to a clipped sum."""
        return self._gather.estimate(site, batch_size)

    def merge_repeats(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> tuple[Site, tuple[jax.Array, ...], jax.Array]:
        """Folds the axis of repeats, second of every array, into a look-up of several slices."""
        return self._gather.merge_repeats(*as_gather(site, inputs, cotangent))


def as_gather(
    site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[Site, tuple[jax.Array, ...], jax.Array]:
    """Returns the gather that a ``dynamic_slice`` is.

    Args:
      site: the slice.
      inputs: the start along each axis, each ``[B, ...]``.
      cotangent: ``[B, ..., *slice_sizes]``.

    Returns:
      (site, inputs, cotangent) of the gather; its indices are ``[B, ..., K]``, an entry for each
      axis that is not taken whole. A site that is a gather (of merged repeats) stays as it is.
    """
    if site.primitive is primitives.gather_p:
        return site, inputs, cotangent
    table, sizes = site.parameter, tuple(site.params["slice_sizes"])
    mapped = tuple(d for d, size in enumerate(sizes) if size < table.shape[d])
    # The starts may differ in their integer type.
    dtype = index_dtype(max(table.shape, default=1)) or jnp.dtype(jnp.int32)
    starts = [clip_index(inputs[d], 0, table.shape[d] - sizes[d], dtype) for d in mapped]
    front = cotangent.shape[: cotangent.ndim - len(sizes)]
    indices = jnp.stack(starts, -1) if mapped else jnp.zeros((*front, 0), dtype)
    # A gather of whole rows, as its rule knows them, has no axis for the place of the row.
    collapsed = mapped if all(sizes[d] == 1 for d in mapped) else ()
    kept = tuple(size for d, size in enumerate(sizes) if d not in collapsed)
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=tuple(range(len(kept))),
        collapsed_slice_dims=collapsed,
        start_index_map=mapped,
    )
    index = jax.ShapeDtypeStruct((len(mapped),), dtype)
    (equation,) = jax.make_jaxpr(
        functools.partial(
            jax.lax.gather,
            dimension_numbers=numbers,
            slice_sizes=sizes,
            mode=jax.lax.GatherScatterMode.CLIP,
        )
    )(table, index).eqns
    gather = dataclasses.replace(
        site,
        primitive=primitives.gather_p,
        params=equation.params,
        operands=(table, index),
        out=jax.ShapeDtypeStruct(kept, site.out.dtype),
    )
    return gather, (indices,), cotangent.reshape(*front, *kept)
