"""The program that draws convolutions at random: what it draws is right, and it can say wrong."""

import numpy as np
import pytest
import random_convolutions
from random_convolutions import MASKED, check, complaint_of, draw, gradients, only_masked

from perex._rules.conv.choose import ALGORITHMS


def test_convolutions_drawn_at_random():
    complaints = [c for c in check(seed=0, indices=range(40)) if c is not None]
    assert not complaints, "\n".join(complaints)


# Wrong once: no result at all, groups in float64 under a mask, a scalar that masks all; a mask of
# integers on complex weights.
@pytest.mark.parametrize(
    "seed, index",
    [*((10, i) for i in (689, 2531, 14997, 34834, 3458, 17877, 24907)), (0, 150)],
)
def test_draws_that_were_wrong_once(seed, index):
    assert complaint_of(seed, index) is None


def test_all_kinds_are_drawn():
    draws = [draw(0, index) for index in range(2000)]
    assert {d.algorithm for d in draws} == {"auto", *ALGORITHMS}
    assert {d.mask.form for d in draws if d.mask is not None} == {*MASKED}
    assert {len(d.spatial) for d in draws} == {0, 1, 2, 3}
    for wanted in (
        lambda d: 0 in d.out,
        lambda d: d.batch_groups > 1,
        lambda d: d.groups > 1 and d.channels > 1,
        lambda d: max(d.interiors, default=1) > 1 and max(d.strides) > 1 and max(d.dilations) > 1,
        lambda d: any(low < 0 < high for low, high in d.pads),
        lambda d: any(
            low > (k - 1) * e + 1
            for (low, _), k, e in zip(d.pads, d.kernel, d.dilations, strict=True)
        ),
        lambda d: d.mask is not None and not d.mask.acts.any(),
        lambda d: d.mask is not None and not d.mask.known and 0 < d.mask.acts.ndim < 4,
        lambda d: (
            d.mask is not None and only_masked(d, np.broadcast_to(d.mask.acts, d.shapes[1])).any()
        ),
    ):
        assert sum(map(wanted, draws)) >= 5


def test_the_definition_on_a_convolution_done_by_hand():
    x, cotangent = np.array([[[[1.0, 2.0, 3.0]]]]), np.array([[[[10.0, 1.0]]]])
    hand = random_convolutions.Draw(
        batch=1,
        images=1,
        groups=1,
        batch_groups=1,
        channels=1,
        features=1,
        spatial=(3,),
        kernel=(2,),
        strides=(2,),
        dilations=(2,),
        interiors=(1,),
        pads=((1, 1),),
        layouts=((0, 1, 2),) * 3,
        dtype="float64",
        algorithm="auto",
        result="gradients",
    )
    # The padded input is 0 1 2 3 0: results at 0 and 2, the second position two further on.
    np.testing.assert_array_equal(gradients(hand, x, cotangent), [[[[2.0, 20.0]]]])
    # Both positions read the middle of the input, and no other part of it.
    acts = np.array([[[True, False]]])
    assert not only_masked(hand, acts).any()
    np.testing.assert_array_equal(only_masked(hand, acts & False), [[[False, True, False]]])


def _tells(d, index, result):
    """Whether a draw shows a small fault: bfloat16 is too coarse, and some gradients are zero."""
    if d.result != result or d.mask is not None or d.dtype != "float32":
        return False
    return random_convolutions.gradients(d, *random_convolutions.data(d, index)[1:]).all()


@pytest.mark.parametrize("result", ["gradients", "norms", "sum"])
def test_a_wrong_result_is_reported(result, monkeypatch):
    index = next(i for i in range(999) if _tells(draw(0, i), i, result))
    original = random_convolutions.gradients
    monkeypatch.setattr(
        random_convolutions, "gradients", lambda *args: original(*args) * (1 + 2.0**-7)
    )
    complaint = complaint_of(0, index)
    assert complaint is not None
    assert f"--seed=0 --first={index} --count=1" in complaint and result in complaint


def test_an_error_is_reported(monkeypatch):
    def broken(*args):
        raise ValueError("no such convolution")

    monkeypatch.setattr(random_convolutions, "wrong", broken)
    assert "ValueError: no such convolution" in (complaint_of(0, 3) or "")
