"""Bounds of what rounding does to norms and sums; `test_soundness` has them at work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import loop, to_float64
from test_grad_norms import norms_of

import perex
from perex._clipping import clip_weights
from perex._rules.certified import REDUCTION, CertifiedNorms, from_grams, settle, unit_roundoff
from perex._rules.scales import ScaledNorms, inner_products

LENGTHS = [100, 1000, 1024, 10_000, 100_000, 3_000_000]
TERMS = {
    "constant": lambda n: np.full(n, 0.1),
    "uniform": lambda n: np.random.default_rng(0).random(n),
    "falling": lambda n: 1 / np.arange(1, n + 1),
    "small ones after a large one": lambda n: np.where(np.arange(n) == 0, 4096, 0.7),
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_reductions_are_off_by_less_than_is_counted_with(terms, batch):
    """However long: one number after the other, millions would be off by millions of roundoffs."""
    worst = 0.0
    for length in LENGTHS:
        x = np.float32(np.broadcast_to(terms(length), (batch, length)))
        found = np.float64(jax.jit(inner_products)(x, jnp.ones_like(x)))
        exact = np.sum(np.float64(x), axis=1)
        worst = max(worst, np.max(np.abs(found - exact) / exact))
    assert 0 < worst <= REDUCTION * unit_roundoff(np.float32)


@pytest.mark.parametrize("positions, depth", [(2, 3), (7, 300), (40, 2)])
def test_squares_are_within_their_error(positions, depth):
    """Of gradients whose terms cancel to all but a thousandth or a millionth."""
    rng = np.random.default_rng(0)
    for eps in (1.0, 1e-3, 1e-6):
        signs = np.where(np.arange(positions) % 2, -1, 1)[:, None]
        u, v = (
            np.float32((1 + eps * rng.standard_normal((9, positions, n))) * s)
            for n, s in ((depth, 1), (5, signs))
        )
        grams = [jnp.einsum("bsn,btn->bst", x, x, precision="highest")[:, None] for x in (u, v)]
        squares, error, _ = from_grams(*grams, (depth, 5), "highest")
        exact = np.sum(np.einsum("btd,btp->bdp", np.float64(u), np.float64(v)) ** 2, axis=(1, 2))
        assert np.all(np.abs(np.float64(squares) - exact) <= error)


def test_only_wide_norms_are_measured_and_with_twice_the_slack():
    ones = jnp.ones(3)
    certified = CertifiedNorms(2 * ones, ones, jnp.array([0, 0.1, 0]), jnp.array([0, 0.5, 0.25]))
    measured = CertifiedNorms.measured(4 * ones, 9 * ones)
    scale, squares, upper = settle(certified, lambda: measured)
    np.testing.assert_allclose(scale * np.sqrt(squares), [2, 12, 2])
    # Four times sqrt(9) and twice 0.5 in units of 2; the others are as certified.
    np.testing.assert_allclose(scale * np.sqrt(upper), [2, 14, 2.5])


def test_the_upper_end_is_clipped():
    ones = jnp.ones(3)
    norms = ScaledNorms(2 * ones, ones, jnp.array([1.0, 4.0, 1 + 2.0**-12]))
    weights = clip_weights(norms, 1.0).weights
    # A surplus within the tolerance is left to rounding.
    np.testing.assert_allclose(weights, [0.5, 0.25, 0.5], rtol=1e-3)
    assert weights[0] == weights[2]


@pytest.mark.parametrize("eps", [1e-3, 1e-5])
def test_uses_that_cancel_each_other(eps):
    """Of one position each, so that nothing cancels within a use, and of different equations."""
    rng = np.random.default_rng(0)
    w = np.float32(rng.standard_normal((256, 256)) / 16)
    x = np.float32(rng.standard_normal((8, 256)))
    y = np.float32(x + eps * rng.standard_normal((8, 256)))

    def fun(w, x, y):
        return jnp.sum(jnp.sin(x @ w)) - jnp.sum(jnp.sin(w.T @ y))

    (leaf,) = jax.tree.leaves(
        perex.grad(fun, factored=True)(w, x, y), is_leaf=lambda x: isinstance(x, perex.PerExample)
    )
    assert len(leaf.uses) == 2 and leaf.way().way == "gram"
    with jax.enable_x64(True):
        expected = norms_of(loop(fun)(*to_float64((w, x, y)))[2])
    off = np.abs(perex.grad_norms(fun)(w, x, y) / expected - 1)
    # What jax.grad itself loses is some roundoffs of the terms that cancel.
    assert np.all(off <= 1e-2 + 1e-6 / eps)
