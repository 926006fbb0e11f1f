"""Rectangles and channel blocks: disjoint, exact, few."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from perex._masks import rectangles as lib


def spatial(taps):
    return np.asarray(taps)[..., None, None, None]


def raster(size, kind):
    mask = np.zeros((size, size))
    mask[: size // 2] = 1
    mask[size // 2, : size // 2 + (kind == "B")] = 1
    return mask


@pytest.mark.parametrize("size", [3, 5, 7])
@pytest.mark.parametrize("kind", "AB")
def test_a_raster_mask_needs_two(size, kind):
    assert len(lib.rectangles(spatial(raster(size, kind)))) == 2


@pytest.mark.parametrize(
    ("taps", "count"),
    [
        (np.ones((3, 3)), 1),
        (np.zeros((3, 3)), 0),
        (np.pad(np.zeros((1, 1)), 1, constant_values=1), 4),  # blind spot
        ([[0, 1, 0], [1, 1, 1], [0, 1, 0]], 3),
        (np.indices((3, 3)).sum(0) % 2, 4),
        (np.ones(()), 1),
        (np.zeros(()), 0),
        (np.ones((7, 5, 3)), 1),
        (np.arange(64) < 20, 1),
    ],
)
def test_counts(taps, count):
    assert len(lib.rectangles(spatial(taps))) == count


def test_real_valued_masks_count_their_zeros_only():
    mask = spatial([[0.5, -2.0], [0.0, np.nan]])
    assert [(r.start, r.stop) for r in lib.rectangles(mask)] == [((0, 0), (1, 2)), ((1, 1), (2, 2))]


def test_colour_ordering_needs_few_blocks():
    colour = np.arange(6) % 3
    strict = colour[:, None] < colour[None, :]
    inclusive = colour[:, None] <= colour[None, :]
    assert len(lib.blocks(strict[None])) == 2
    assert len(lib.blocks(inclusive[None])) == 3
    assert len(lib.blocks(np.ones((4, 6, 6), bool))) == 1


def test_blocks_use_the_shorter_side():
    pattern = np.zeros((1, 2, 5), bool)
    pattern[0, 0] = [1, 0, 1, 0, 1]
    pattern[0, 1] = [1, 1, 0, 0, 1]
    assert len(lib.blocks(pattern)) == 2  # by inputs: the outputs see three different sets


masks = hnp.array_shapes(min_dims=3, max_dims=5, min_side=1, max_side=4).flatmap(
    lambda shape: hnp.arrays(bool, shape)
)


@hypothesis.given(masks)
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
def test_pieces_are_disjoint_and_cover_exactly(mask):
    hits = np.zeros(mask.shape, int)
    for rectangle in lib.rectangles(mask):
        parts = lib.without_square_windows(rectangle)
        for part in parts:
            for block in lib.blocks(part.pattern):
                hits[(*part.taps, *np.ix_(block.groups, block.inputs, block.outputs))] += 1
    np.testing.assert_array_equal(hits, mask)


@hypothesis.given(st.lists(st.integers(1, 6), min_size=1, max_size=3))
@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
def test_no_square_window_stays(window):
    whole = lib.Rectangle((0,) * len(window), tuple(window), np.ones((1, 1, 1), bool))
    for part in lib.without_square_windows(whole):
        long = [extent for extent in part.window if extent >= 3]
        assert len(set(long)) == len(long)
