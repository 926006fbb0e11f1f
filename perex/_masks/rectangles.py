"""From a mask to the few dense pieces of a kernel that it leaves.

A mask says which entries of a convolution kernel may act. Here its layout is ``[*K, G, I, O]``:
the spatial taps ``K``, then for each of ``G`` groups ``I`` input and ``O`` output channels. What
it leaves is cut into *pieces*, each the product of a rectangle of taps, a set of groups, a set of
input channels and a set of output channels. Pieces are disjoint and cover exactly the entries that
act, so a sum of convolutions over pieces has no zero entry that could let anything through: neither
a residue of a transform that mixes taps, nor a NaN by way of ``0 * nan``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rectangle:
    """A box of taps in which every tap has the same channel pattern.

    Attributes:
      start: the first tap, one number a spatial axis.
      stop: one past the last tap.
      pattern: bool ``[G, I, O]``, which channel pairs act; at least one does.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    pattern: np.ndarray

    @property
    def window(self) -> tuple[int, ...]:
        """The number of taps along each axis."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def taps(self) -> tuple[slice, ...]:
        """The rectangle as an index into the spatial axes."""
        return tuple(map(slice, self.start, self.stop))


@dataclasses.dataclass(frozen=True)
class Block:
    """The channel pairs ``inputs x outputs``, the same in each of ``groups``."""

    groups: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def rectangles(mask: np.ndarray) -> list[Rectangle]:
    """Splits a mask into rectangles of taps that share one channel pattern.

    The rectangles of one pattern are chosen greedily, the largest first. For a raster mask this is
    the least number; in general it is close.

    Args:
      mask: ``[*K, G, I, O]``; zero entries are masked, whatever the others are.

    Returns:
      Disjoint rectangles which together cover exactly the taps that act for any channel pair. None
      for a mask of zeros, one for a mask without zeros.
    """
    acts = np.asarray(mask) != 0
    window = acts.shape[:-3]
    taps_of: dict[bytes, np.ndarray] = {}
    for tap in np.ndindex(window):
        if acts[tap].any():
            taps = taps_of.setdefault(acts[tap].tobytes(), np.zeros(window, bool))
            taps[tap] = True
    found = []
    for taps in taps_of.values():
        pattern = acts[tuple(np.argwhere(taps)[0])]
        found += [Rectangle(start, stop, pattern) for start, stop in _cover(taps)]
    return sorted(found, key=lambda rectangle: rectangle.start)


def blocks(pattern: np.ndarray) -> list[Block]:
    """Splits a channel pattern into disjoint blocks which cover exactly the pairs that act.

    Args:
      pattern: bool ``[G, I, O]``.

    Returns:
      Either the sets of output channels that see the same inputs, or the sets of input channels
      that are seen by the same outputs, whichever are fewer. Groups with equal blocks share one.
    """
    by_outputs = _merge(
        (g, inputs, outputs)
        for g, pairs in enumerate(pattern)
        for inputs, outputs in _equal_columns(pairs)
    )
    by_inputs = _merge(
        (g, inputs, outputs)
        for g, pairs in enumerate(pattern)
        for outputs, inputs in _equal_columns(pairs.T)
    )
    return min(by_outputs, by_inputs, key=len)


def without_square_windows(rectangle: Rectangle) -> list[Rectangle]:
    """Cuts a rectangle until no two of its extents are equal and three or more.

    Backends have Winograd transforms for square windows (3x3 and 5x5). Those with results of 4x4
    also read inputs just *outside* the window, with a residue, and beside a rectangle lie the
    masked taps.

    Args:
      rectangle: any rectangle.

    Returns:
      The rectangle itself, or the parts it was cut into.
    """
    long = [extent for extent in rectangle.window if extent >= 3]
    twice = [extent for extent in long if long.count(extent) > 1]
    if not twice:
        return [rectangle]
    axis = rectangle.window.index(max(twice))
    cut = rectangle.stop[axis] - 1
    start, stop = list(rectangle.start), list(rectangle.stop)
    start[axis] = stop[axis] = cut
    first = dataclasses.replace(rectangle, stop=tuple(stop))
    last = dataclasses.replace(rectangle, start=tuple(start))
    return [*without_square_windows(first), *without_square_windows(last)]


def _cover(taps: np.ndarray) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Covers the true entries of a boolean array by disjoint boxes, the largest first."""
    left = taps.copy()
    boxes = []
    # Taking a box away makes no larger one possible, so one pass over the extents is enough.
    extents = itertools.product(*(range(1, n + 1) for n in taps.shape))
    for extent in sorted(extents, key=math.prod, reverse=True):
        size = math.prod(extent)
        while size <= left.sum():
            full = np.argwhere(_window_sums(left, extent) == size)
            if not len(full):
                break
            start = tuple(map(int, full[0]))
            stop = tuple(a + e for a, e in zip(start, extent, strict=True))
            left[tuple(map(slice, start, stop))] = False
            boxes.append((start, stop))
    return boxes


def _window_sums(values: np.ndarray, extent: tuple[int, ...]) -> np.ndarray:
    """Returns the sum over every window of the given extent, by differences of running sums."""
    sums = values.astype(np.int64)
    for axis, size in enumerate(extent):
        running = np.cumsum(sums, axis)
        running = np.concatenate([np.zeros_like(running.take([0], axis)), running], axis)
        count = running.shape[axis]
        high = running.take(range(size, count), axis)
        sums = high - running.take(range(count - size), axis)
    return sums


def _equal_columns(pairs: np.ndarray) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Groups equal columns: pairs of (the rows that are true, the columns with those rows)."""
    columns_of: dict[bytes, list[int]] = {}
    for column in np.flatnonzero(pairs.any(0)).tolist():
        columns_of.setdefault(pairs[:, column].tobytes(), []).append(column)
    return [
        (tuple(np.flatnonzero(pairs[:, columns[0]]).tolist()), tuple(columns))
        for columns in columns_of.values()
    ]


def _merge(
    triples: Iterable[tuple[int, tuple[int, ...], tuple[int, ...]]],
) -> list[Block]:
    groups_of: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for group, inputs, outputs in triples:
        groups_of.setdefault((inputs, outputs), []).append(group)
    return [Block(tuple(groups), *channels) for channels, groups in groups_of.items()]
