"""Leaves that are treated as one: small arrays of one group, side by side.

A network has many small leaves, biases and scales. To compile and to call a norm and a sum for each
of them costs more than to join them.

Letters: B examples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex import _norms
from perex._norms import KnownNorms, ScaledNorms
from perex._rules.chunks import known_size

# Arrays of at most so many bytes are joined.
_JOINED_BYTES = 1 << 19


@dataclasses.dataclass(frozen=True)
class Parts:
    """Per-example gradients, arranged in parts.

    Attributes:
      leaves: arrays ``[B, *shape]``, factored leaves, or known norms.
      members: the leaves of each part, by number.
    """

    leaves: Sequence[Any]
    members: Sequence[Sequence[int]]

    @classmethod
    def of(cls, leaves: Sequence[Any], groups: Sequence[Hashable]) -> Parts:
        """Arranges leaves of a batch, each with its group; no part has leaves of two groups."""
        parts: dict[Any, list[int]] = {}
        for i, (leaf, group) in enumerate(zip(leaves, groups, strict=True)):
            joins = _is_array(leaf) and _bytes(leaf) <= _JOINED_BYTES
            parts.setdefault((group, str(leaf.dtype)) if joins else i, []).append(i)
        return cls(leaves, list(parts.values()))

    def first(self, values: Sequence[Any]) -> list[Any]:
        """Returns, of one value for each leaf, that of the first leaf of each part."""
        return [values[part[0]] for part in self.members]

    def for_leaves(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Returns, of one value for each part, that of the part of each leaf."""
        by_leaf = {i: v for part, v in zip(self.members, values, strict=True) for i in part}
        return tuple(by_leaf[i] for i in range(len(self.leaves)))

    def norms(self) -> list[ScaledNorms]:
        """Returns the norms ``[B]`` of each part."""
        return [_norms.square_norms(self._joined(part)) for part in self.members]

    def weighted_sums(self, weights: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns for each leaf the sum over examples of weight times gradient.

        Args:
          weights: ``[B]`` for each part.
        """
        sums: list[Any] = [None] * len(self.leaves)
        for part, part_weights in zip(self.members, weights, strict=True):
            total = _norms.weighted_sum(self._joined(part), part_weights)
            if len(part) == 1:
                sums[part[0]] = total
                continue
            shapes = [self.leaves[i].shape[1:] for i in part]
            ends = np.cumsum([math.prod(shape) for shape in shapes])
            for i, piece, shape in zip(part, jnp.split(total, ends[:-1]), shapes, strict=True):
                sums[i] = piece.reshape(shape)
        return sums

    def _joined(self, part: Sequence[int]) -> Any:
        """Returns the leaves of a part side by side, ``[B, N]``; one alone as it is."""
        if len(part) == 1:
            return self.leaves[part[0]]
        leaves = [self.leaves[i] for i in part]
        flat = [leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:])) for leaf in leaves]
        return jnp.concatenate(flat, axis=1)


def _bytes(leaf: Any) -> int:
    return math.prod(map(known_size, leaf.shape)) * leaf.dtype.itemsize


def _is_array(leaf: Any) -> bool:
    return not (_norms.is_factored(leaf) or isinstance(leaf, KnownNorms))
