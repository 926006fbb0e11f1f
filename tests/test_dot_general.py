"""The rule of ``dot_general``: any dimension numbers, the parameter on either side."""

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from sites import by_loop, check_repeats, check_rule, site_of, squares_of

from perex._rules import find_rule
from perex._rules.dot_general import DotGeneralRule

RULE = DotGeneralRule()
# float64 sums of some dozen products.
ROUNDING = 1e-10


@dataclasses.dataclass(frozen=True)
class Product:
    """A product with axes named by letters: ``out = einsum("left,right->out")``."""

    left: str
    right: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def numbers(self):
        batch = [c for c in self.left if c in self.right and c in "bc"]
        contract = [c for c in self.left if c in self.right and c not in "bc"]
        places = [tuple(map(side.index, axes)) for axes in (contract, batch) for side in self.sides]
        return (tuple(places[:2]), tuple(places[2:]))

    @property
    def sides(self):
        return self.left, self.right

    def shape(self, side):
        sizes = dict(self.sizes)
        return tuple(sizes[c] for c in self.sides[side])

    def __call__(self, left, right):
        return lax.dot_general(left, right, self.numbers)


@st.composite
def products(draw, smallest=1):
    """Up to two batch axes, contracted axes and free axes on each side, in any order."""
    groups = ("bc", "de", "tu", "pq")
    batch, contract, free_left, free_right = (g[: draw(st.integers(0, 2))] for g in groups)
    left = "".join(draw(st.permutations(batch + contract + free_left)))
    right = "".join(draw(st.permutations(batch + contract + free_right)))
    letters = sorted({*left, *right})
    return Product(left, right, tuple((c, draw(st.integers(smallest, 3))) for c in letters))


def arrays(product, side, front, dtype=np.float64, seed=0):
    """Return parameter, the other operand and cotangent, these two with axes in front."""
    rng = np.random.default_rng(seed)

    def normal(shape):
        values = rng.standard_normal(shape)
        if np.issubdtype(dtype, np.complexfloating):
            values = values + 1j * rng.standard_normal(shape)
        return values.astype(dtype)

    out = jax.eval_shape(product, *(np.zeros(product.shape(s), dtype) for s in (0, 1))).shape
    other = normal((*front, *product.shape(1 - side)))
    return normal(product.shape(side)), other, normal((*front, *out))


def site_and_truth(product, side, parameter, x, cotangent):
    operands = (x[0], parameter) if side else (parameter, x[0])
    site = site_of(product, side, *operands)
    return site, by_loop(product, side, parameter, (x,), cotangent)


@hypothesis.given(products(), st.sampled_from([0, 1]))
def test_any_dimension_numbers(x64, product, side):
    parameter, x, cotangent = arrays(product, side, (3,))
    site, expected = site_and_truth(product, side, parameter, x, cotangent)
    check_rule(RULE, site, (x,), cotangent, expected, ROUNDING)


@hypothesis.given(products(), st.sampled_from([0, 1]))
def test_repeats_are_added_up(x64, product, side):
    parameter, x, cotangent = arrays(product, side, (2, 3))
    operands = (x[0, 0], parameter) if side else (parameter, x[0, 0])
    check_repeats(RULE, site_of(product, side, *operands), (x,), cotangent, ROUNDING)


@hypothesis.given(products(smallest=0), st.sampled_from([0, 1]), st.sampled_from([0, 2]))
@hypothesis.settings(max_examples=10)
def test_axes_of_length_zero(x64, product, side, count):
    parameter, x, cotangent = arrays(product, side, (count,))
    structs = (jax.ShapeDtypeStruct(product.shape(s), np.float64) for s in (0, 1))
    site = site_of(product, side, *structs)
    expected = by_loop(product, side, parameter, (x,), cotangent)
    check_rule(RULE, site, (x,), cotangent, expected, ROUNDING)


DENSE = Product("td", "dp", (("t", 4), ("d", 3), ("p", 5)))
GROUPED = Product("bdt", "pbd", (("b", 2), ("d", 3), ("t", 1), ("p", 2)))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("product", [DENSE, GROUPED], ids=["dense", "grouped"])
@pytest.mark.parametrize(
    "dtype, rtol", [(np.complex128, 1e-10), (np.float32, 2e-6), (jnp.bfloat16, 2e-2)], ids=str
)
def test_dtypes(product, side, dtype, rtol, x64):
    parameter, x, cotangent = arrays(product, side, (3,), dtype)
    site, _ = site_and_truth(product, side, parameter, x, cotangent)
    wide = np.complex128 if dtype is np.complex128 else np.float64
    exact = [v.astype(wide) for v in (parameter, x, cotangent)]
    _, expected = site_and_truth(product, side, *exact)
    check_rule(RULE, site, (x,), cotangent, expected, rtol)


def test_bfloat16_norms_and_sums_are_added_up_in_float32():
    count = 4096
    product = Product("d", "d", (("d", count),))
    parameter, x, cotangent = (np.ones(s, jnp.bfloat16) for s in ((count,), (2, count), (2,)))
    site = site_of(product, 1, x[0], parameter)
    # 4096 ones added up in bfloat16 stop at 256.
    np.testing.assert_allclose(squares_of(RULE, site, (x,), cotangent), count, rtol=1e-6)
    many = np.ones((count, 2), jnp.bfloat16), np.ones(count, jnp.bfloat16)
    site = site_of(Product("d", "d", (("d", 2),)), 1, many[0][0], np.ones(2, jnp.bfloat16))
    total = RULE.weighted_sum(site, (many[0],), many[1], np.ones(count, np.float32))
    np.testing.assert_allclose(total, count, rtol=1e-6)


def test_weight_zero_drops_what_is_not_finite():
    _, x, cotangent = arrays(DENSE, 1, (3,), np.float32)
    site = site_of(DENSE, 1, x[0], np.zeros((3, 5), np.float32))
    poisoned, spoiled = x.copy(), cotangent.copy()
    poisoned[1], spoiled[1] = np.nan, np.inf
    weights = np.array([1, 0, 0.5], np.float32)
    expected = RULE.weighted_sum(site, (x,), cotangent, weights)
    actual = RULE.weighted_sum(site, (poisoned,), spoiled, weights)
    np.testing.assert_array_equal(actual, expected)


def precisions(jaxpr):
    return [e.params["precision"] for e in jaxpr.eqns if "precision" in e.params]


def test_precision_of_the_equation_is_kept():
    def product(x, w):
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)

    _, x, cotangent = arrays(DENSE, 1, (3,), np.float32)
    site = site_of(product, 1, x[0], np.zeros((3, 5), np.float32))
    found = precisions(jax.make_jaxpr(lambda x, c: RULE.per_example(site, (x,), c))(x, cotangent))
    assert found and all(lax.Precision.HIGHEST in p for p in found), found


def test_outer_form_spans_the_parameter(x64):
    parameter, x, cotangent = arrays(DENSE, 1, (3,))
    site, expected = site_and_truth(DENSE, 1, parameter, x, cotangent)
    (a, axes_a), (b, axes_b) = RULE.outer_form(site, (x,), cotangent)
    assert (axes_a, axes_b) == ((0,), (1,))
    product = np.einsum("btd,btp->bdp", a, b)
    np.testing.assert_allclose(product, expected, rtol=ROUNDING, atol=ROUNDING)
    parameter, x, cotangent = arrays(GROUPED, 1, (3,))
    site, _ = site_and_truth(GROUPED, 1, parameter, x, cotangent)
    assert RULE.outer_form(site, (x,), cotangent) is None


def test_estimates_name_every_way():
    _, x, _ = arrays(DENSE, 1, (3,))
    site = site_of(DENSE, 1, x[0], np.zeros((3, 5)))
    seconds = RULE.estimate(site, 32)
    assert set(seconds) == {"keep", "gram", "stream"}
    assert all(math.isfinite(s) and s > 0 for s in seconds.values())
    assert isinstance(find_rule(site.primitive), DotGeneralRule)
