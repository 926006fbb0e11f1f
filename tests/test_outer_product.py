"""Outer products: gradients, norms by every way, weighted sums, the choice of way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest
import sites

from perex._rules import outer_product

SHAPES = [(3, 1, 1, 4, 5), (3, 2, 1, 4, 5), (5, 1, 7, 4, 6), (4, 3, 6, 2, 1), (1, 1, 2, 3, 3)]


def _pair(
    shape: tuple[int, ...], dtype: str = "float32", scale: float = 1
) -> tuple[jax.Array, jax.Array]:
    batch, groups, positions, depth, outputs = shape
    random = np.random.default_rng(0)
    pair = []
    for last, factor in ((depth, scale), (outputs, 1 / scale)):
        values = random.normal(size=(batch, groups, positions, last)) * factor
        if dtype.startswith("complex"):
            values = values * (1 + 0.5j * random.normal(size=values.shape))
        pair.append(jnp.asarray(values, dtype))
    return pair[0], pair[1]


NORMS = {"gram": outer_product.gram_norms, "stream": outer_product.stream_norms}
SUMS = {"gram": outer_product.weighted_sum, "stream": outer_product.stream_sum}


def _squares(way: str, a: jax.Array, b: jax.Array) -> jax.Array:
    norms = NORMS[way](a, b)
    return norms.scale * (norms.scale * norms.squares)


def _expected(a: jax.Array, b: jax.Array) -> np.ndarray:
    wide = np.complex128 if jnp.iscomplexobj(a) else np.float64
    return np.einsum("bgtd,bgtp->bgdp", np.asarray(a).astype(wide), np.asarray(b).astype(wide))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_against_the_definition(shape: tuple[int, ...], dtype: str) -> None:
    a, b = _pair(shape, dtype)
    expected = _expected(a, b)
    squares = (np.abs(expected) ** 2).sum((1, 2, 3))
    weights = np.linspace(-1, 2, shape[0])
    gradient = outer_product.per_example(a, b)
    assert gradient.dtype == jnp.promote_types(dtype, jnp.float32)
    # 2e-6: float32 sums of a few dozen terms; bfloat16 inputs are added up in float32 too.
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=2e-6 * np.abs(expected).max())
    for way in NORMS:
        found = _squares(way, a, b)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, squares, rtol=1e-5)
    for summed in (outer_product.weighted_sum, outer_product.stream_sum):
        total = summed(a, b, jnp.asarray(weights))
        np.testing.assert_allclose(total, np.tensordot(weights, expected, 1), atol=1e-5 * 30)


@pytest.mark.parametrize("way", ["gram", "stream"])
@pytest.mark.parametrize("scale", [1e-20, 1e20])
@pytest.mark.parametrize("shape", SHAPES)
def test_scales(shape: tuple[int, ...], scale: float, way: str) -> None:
    a, b = _pair(shape, scale=scale)
    expected = np.sqrt((_expected(a, b) ** 2).sum((1, 2, 3)))
    np.testing.assert_allclose(_squares(way, a, b), expected**2, rtol=1e-5)
    # The norm is 1e-20 or 1e20 now, and its square has no float32.
    factor, squares, *_ = NORMS[way](a, b * np.float32(scale))
    np.testing.assert_allclose(factor * jnp.sqrt(squares) / scale, expected, rtol=1e-5)


def test_scales_whose_product_is_out_of_range() -> None:
    left, right = jnp.float32([2.0**-100, 2.0**100, 2.0**-40]), jnp.float32([2.0**-30, 2.0**29, 8])
    # Norms 2^-118, 2^127.5 (with squares below 1) and 2^-36, all of which float32 can hold.
    squares = jnp.float32([2.0**24, 2.0**-3, 4])
    scale, rest, error, slack = outer_product.undo_scales(
        left, right, squares, squares, jnp.sqrt(squares)
    ).T
    np.testing.assert_array_equal(error, rest)
    np.testing.assert_allclose(slack, jnp.sqrt(rest), rtol=1e-6)
    expected = [2.0**-118, 2.0**127.5, 2.0**-36]
    np.testing.assert_allclose(scale * jnp.sqrt(rest), expected, rtol=1e-6)


@pytest.mark.parametrize("way", ["gram", "stream"])
@pytest.mark.parametrize("small_chunks", [False, True])
def test_an_example_with_nan_stays_alone(
    way: str, small_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_chunks:
        sites.one_at_a_time(monkeypatch)
    a, b = _pair((5, 2, 6, 4, 3))
    clean = np.asarray(_squares(way, a, b))
    for poison in (np.nan, np.inf):
        dirty = np.asarray(_squares(way, a.at[1, 0, 0, 0].set(poison), b))
        assert not np.isfinite(dirty[1])
        assert np.delete(dirty, 1).tobytes() == np.delete(clean, 1).tobytes()
        weights = jnp.array([1.0, 0, 1, 0, 2])
        summed = SUMS[way]
        total = summed(a.at[1].set(poison), b.at[3].set(poison), weights)
        assert total.tobytes() == summed(a, b, weights).tobytes()


def test_gram_never_goes_below_zero() -> None:
    # Two equal positions with opposite cotangents: the gradient is zero up to rounding.
    a, b = _pair((64, 1, 1, 300, 200))
    a, b = jnp.concatenate([a, a], 2), jnp.concatenate([b, -b * (1 + 1e-7)], 2)
    found = _squares("gram", a, b)
    assert np.all(found >= 0)
    products = jnp.sum(a * a, (1, 2, 3)) * jnp.sum(b * b, (1, 2, 3))
    np.testing.assert_array_less(found, 1e-6 * products)


def test_zero_and_empty() -> None:
    for shape in ((3, 1, 4, 2, 2), (0, 1, 4, 2, 2), (3, 1, 0, 2, 2)):
        a, b = _pair(shape)
        for way in NORMS:
            assert not np.any(_squares(way, a * 0, b))
            assert _squares(way, a, b).shape == (shape[0],)
        for summed in (outer_product.weighted_sum, outer_product.stream_sum):
            assert not np.any(summed(a * 0, b, jnp.ones(shape[0])))


@pytest.mark.parametrize("way", ["gram", "stream"])
def test_second_order(way: str, x64: None) -> None:
    a, b = _pair((3, 2, 4, 3, 2), "float64")
    found = jax.grad(lambda a: _squares(way, a, b).sum())(a)
    expected = jax.grad(lambda a: (outer_product.per_example(a, b) ** 2).sum())(a)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_cheapest_way() -> None:
    def best(*sizes: int) -> str:
        seconds = outer_product.estimate(*sizes)
        return min(seconds, key=seconds.__getitem__)

    assert best(1, 1, 4096, 4096, 64) == "gram"
    assert best(1, 16, 4608, 512, 32) == "gram"
    assert best(1, 1024, 576, 64, 32) == "keep"
    assert best(1, 2048, 1024, 1024, 64) in ("stream", "keep")


def test_large_norms_hold_no_array_of_all_gradients() -> None:
    a = jax.ShapeDtypeStruct((64, 1, 512, 256), jnp.float32)
    b = jax.ShapeDtypeStruct((64, 1, 512, 256), jnp.float32)
    for way in ("gram", "stream"):
        text = str(jax.make_jaxpr(lambda a, b, w=way: _squares(w, a, b))(a, b))
        assert "64,1,256,256" not in text and "64,1,512,512" not in text


@pytest.mark.parametrize("length", [1, 1024, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_long_inner_products_are_added_up_in_blocks(length: int, dtype: str) -> None:
    a, _ = _pair((2, 2, 3, length, 1), dtype)
    wide = np.asarray(a).astype(np.complex128)
    expected = np.einsum("bgsn,bgtn->bgst", wide, wide.conj())
    found = np.asarray(outer_product.gram(a, dtype))
    assert found.dtype == dtype
    norms = np.sqrt(np.abs(np.einsum("bgtt->bgt", expected)))
    longest = outer_product.gram_length(length)
    assert longest <= min(length, 2047)
    contracted = [
        equation.invars[0].aval.shape[axis]
        for equation in jaxprs.equations(jax.make_jaxpr(outer_product.gram, (1,))(a, dtype))
        if equation.primitive is jax.lax.dot_general_p
        for axis in equation.params["dimension_numbers"][0][0]
    ]
    assert contracted and max(contracted) <= longest
    bound = 4 * longest * 2.0**-24 * norms[..., None] * norms[..., None, :]
    assert np.all(np.abs(found - expected) <= bound)
