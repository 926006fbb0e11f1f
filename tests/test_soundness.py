"""No example adds more than the clip norm, whatever cancels inside of its gradient."""

import pytest
import soundness
from soundness import FAMILIES

PAIRS = [
    "pair of calls, large",
    "pair of vmap, large",
    "pair of scan, large",
    "pair of axis, large",
]
# The small form of a loss holds its gradients, where there is little to go wrong.
LARGE = [name for name in FAMILIES if name not in PAIRS and f"{name}, large" not in FAMILIES]
# Options that go other ways to norms and sums, on losses that take each way.
OTHERS = [
    ("pair of calls, large", "save_memory"),
    ("conv 4x4, large", "save_memory"),
    ("stacked layers, large", "save_memory"),
    ("pair of scan, large", "dp_clip"),
    ("tied embedding, large", "dp_clip"),
    ("background, large", "microbatch"),
    ("pair of axis, large", "leaf"),
    ("two positions, large", "automatic"),
]


def check(name, option, *draws, of_stats=True):
    family = FAMILIES[name]
    for draw in draws:
        arguments = family.arguments(0, *draw)
        exact = soundness.oracle(family, arguments)
        assert soundness.contribution(family, arguments, option, exact) <= family.bound, draw
        if option != "dp_clip":
            error = soundness.norm_error(family, arguments, option, exact, of_stats)
            assert error <= 1, draw


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_that_nearly_cancel(name):
    check(name, "default", (1e-2,), (1e-3,), (1e-4,), (1e-5,))


@pytest.mark.parametrize("name", LARGE)
def test_families(name):
    check(name, "default", (1e-4,), (1e-5,))


@pytest.mark.parametrize(("name", "option"), OTHERS)
def test_options(name, option):
    check(name, option, (1e-4,))


def test_norms_without_sums():
    check("pair of scan, large", "default", (1e-2,), (1e-4,), of_stats=False)


def test_small_gradients():
    check("pair of calls", "default", (1e-4,))


def test_scales():
    check("pair of axis, large", "default", (1e-4, 1e-20), (1e-4, 1e20))
