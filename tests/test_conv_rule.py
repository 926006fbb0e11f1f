"""The convolution rule: isolation, derivatives, repeats, size of the program, choice."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sites
from conv_cases import NAMED, Case, norms_by, numpy_gradient
from sites import squares_of

from perex._rules.conv import ConvRule, choose, describe, register_conv_algorithm
from perex._rules.conv.normal_form import Convolution, arrange_cotangent, arrange_input

RULE = ConvRule()
PLAIN = Case((7, 6), (3, 2), 4, 6, batch=5, padding="SAME", images=2, groups=2)
DEPTHWISE = dataclasses.replace(PLAIN, features=8, groups=4)
# One image, one group and few examples: that is where XLA multiplies every group with every other
# in float64 on the CPU, so that a NaN spreads unless the algorithm takes care.
SINGLE = Case((8, 8), (3, 3), 3, 4, batch=4)
ALGORITHMS = ["auto", "unfold", "taps", "grouped", "depthwise"]


def _case(algorithm: str, dtype: str = "float32") -> Case:
    return dataclasses.replace(DEPTHWISE if algorithm == "depthwise" else PLAIN, dtype=dtype)


def _x64(dtype: str) -> contextlib.AbstractContextManager[Any]:
    return jax.enable_x64(True) if dtype in ("float64", "complex128") else contextlib.nullcontext()


@pytest.mark.parametrize("small_chunks", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_examples_do_not_touch_each_other(
    algorithm: str, dtype: str, small_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_chunks:
        sites.one_at_a_time(monkeypatch)
    with _x64(dtype):
        case = _case(algorithm, dtype)
        if algorithm == "grouped":
            case = dataclasses.replace(SINGLE, dtype=dtype)
        site = case.site(conv=algorithm)

        @jax.jit
        def run(x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
            return RULE.per_example(site, (x,), cotangent), squares_of(RULE, site, (x,), cotangent)

        x, cotangent = case.data()
        clean = run(x, cotangent)
        for poison in (np.nan, np.inf, 1e30):
            dirty_x, dirty_cotangent = x.copy(), cotangent.copy()
            dirty_x[0] = poison
            dirty_cotangent[3] = poison
            for before, after in zip(clean, run(dirty_x, dirty_cotangent), strict=True):
                rows = [i for i in range(case.batch) if i not in (0, 3)]
                assert np.array(before)[rows].tobytes() == np.array(after)[rows].tobytes()


@pytest.mark.parametrize("way", ["chunked", "whole", "convolution"])
def test_weight_zero_leaves_an_example_out_whatever_it_holds(way: str) -> None:
    case = PLAIN
    conv = describe(case.site())
    x, cotangent = case.data()
    weights = jnp.array([0.5, 0, 2, 0, 1.0])
    dirty_x, dirty_cotangent = x.copy(), cotangent.copy()
    dirty_x[1], dirty_cotangent[3] = np.nan, np.inf

    def total(x: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
        arrays = (
            arrange_input(case.site(), conv, jnp.asarray(x)),
            arrange_cotangent(case.site(), conv, jnp.asarray(cotangent)),
            weights,
        )
        if way == "convolution":
            return np.asarray(choose.grouped.weighted_sum(conv, *arrays))
        return np.asarray(choose.unfold.weighted_sum(conv, *arrays, 1 if way == "chunked" else 5))

    assert total(x, cotangent).tobytes() == total(dirty_x, dirty_cotangent).tobytes()
    assert np.all(np.isfinite(total(x, cotangent)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_second_order_and_outer_vmap(algorithm: str, x64: None) -> None:
    case = _case(algorithm, "float64")
    site = case.site(conv=algorithm)
    x, cotangent = map(jnp.asarray, case.data())
    tangent, cotangent_tangent = map(jnp.asarray, case.data(seed=1))

    def f(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return RULE.per_example(site, (x,), cotangent)

    # The gradient is bilinear, so its derivatives are the rule itself on other arguments.
    _, found = jax.jvp(f, (x, cotangent), (tangent, cotangent_tangent))
    expected = f(tangent, cotangent) + f(x, cotangent_tangent)
    np.testing.assert_allclose(found, expected, atol=1e-11)

    value, pull_back = jax.vjp(f, x, cotangent)
    direction = jnp.asarray(np.random.default_rng(2).normal(size=value.shape))
    back_x, back_cotangent = pull_back(direction)
    np.testing.assert_allclose(
        jnp.vdot(back_x, tangent), jnp.vdot(direction, f(tangent, cotangent)), rtol=1e-10
    )
    np.testing.assert_allclose(
        jnp.vdot(back_cotangent, cotangent_tangent),
        jnp.vdot(direction, f(x, cotangent_tangent)),
        rtol=1e-10,
    )
    stacked = jax.vmap(f)(jnp.stack([x, tangent]), jnp.stack([cotangent, cotangent]))
    np.testing.assert_allclose(
        stacked, jnp.stack([f(x, cotangent), f(tangent, cotangent)]), atol=1e-11
    )


@pytest.mark.parametrize("way", ["stream", "patches", "pixels"])
def test_gradient_of_norms(way: str, x64: None) -> None:
    case = dataclasses.replace(PLAIN, dtype="float64")
    site = case.site()
    conv = describe(site)
    x, cotangent = map(jnp.asarray, case.data())

    def by_norms(x: jax.Array) -> jax.Array:
        arrays = arrange_input(site, conv, x), arrange_cotangent(site, conv, cotangent)
        scale, squares, *_ = norms_by(way, conv, *arrays)
        return jnp.sum(scale * scale * squares)

    def by_gradients(x: jax.Array) -> jax.Array:
        return jnp.sum(RULE.per_example(site, (x,), cotangent) ** 2)

    np.testing.assert_allclose(jax.grad(by_norms)(x), jax.grad(by_gradients)(x), rtol=1e-9)


@pytest.mark.parametrize("way", ["stream", "patches", "pixels"])
@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_norms_of_tiny_and_huge_gradients(way: str, size: float) -> None:
    case = dataclasses.replace(PLAIN, groups=1)
    site = case.site()
    conv = describe(site)
    x, cotangent = case.data()
    expected = np.linalg.norm(numpy_gradient(case, x, cotangent).reshape(case.batch, -1), axis=1)
    arrays = (
        arrange_input(site, conv, jnp.asarray(x * np.float32(size))),
        arrange_cotangent(site, conv, jnp.asarray(cotangent)),
    )
    scale, squares, *_ = norms_by(way, conv, *arrays)
    np.testing.assert_allclose(scale * jnp.sqrt(squares) / size, expected, rtol=1e-4)
    # Both factors out of range, their product within it.
    arrays = arrays[0], arrays[1] / np.float32(size)
    scale, squares, *_ = norms_by(way, conv, *arrays)
    np.testing.assert_allclose(scale * jnp.sqrt(squares), expected, rtol=1e-4)


@pytest.mark.parametrize("case", [PLAIN, NAMED["batch_groups"], NAMED["negative_transposed"]])
def test_repeats_merge_into_images(case: Case) -> None:
    pairs = [case.data(seed=seed) for seed in range(3)]
    x, cotangent = (np.stack(arrays, 1) for arrays in zip(*pairs, strict=True))
    site, inputs, merged = RULE.merge_repeats(
        case.site(), (jnp.asarray(x),), jnp.asarray(cotangent)
    )
    found = RULE.per_example(site, inputs, merged)
    expected = sum(numpy_gradient(case, *pair) for pair in pairs)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def _equations(jaxpr: Any) -> int:
    count = 0
    for equation in jaxpr.eqns:
        count += 1
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            count += _equations(inner) if hasattr(inner, "eqns") else 0
    return count


@pytest.mark.parametrize("algorithm", ["auto", "unfold", "taps", "grouped"])
def test_program_does_not_grow_with_the_batch(algorithm: str) -> None:
    case = NAMED["many_small"]
    sizes = []
    for batch in (1 << 17, 1 << 20):
        site = case.site(conv=algorithm)
        args = (
            jax.ShapeDtypeStruct((batch, *case.lhs_shape()), case.dtype),
            jax.ShapeDtypeStruct((batch, *site.out.shape), case.dtype),
            jax.ShapeDtypeStruct((batch,), "float32"),
        )

        def run(x: jax.Array, ct: jax.Array, w: jax.Array, site: Any = site) -> tuple[Any, ...]:
            return (
                RULE.per_example(site, (x,), ct),
                squares_of(RULE, site, (x,), ct),
                squares_of(RULE, site, (x,), ct, "stream"),
                RULE.weighted_sum(site, (x,), ct, w),
            )

        sizes.append(_equations(jax.make_jaxpr(run)(*args).jaxpr))
    assert sizes[0] == sizes[1]
    assert sizes[0] > 10


@pytest.mark.parametrize(
    "case",
    [NAMED["cropped_away"], Case((4,), (5,), 3, 6, batch=5, groups=3, padding="VALID")],
    ids=["cropped_away", "no_result_of_single_channels"],
)
def test_an_empty_kernel_gradient_is_zero(case: Case) -> None:
    site = case.site()
    x, cotangent = map(jnp.asarray, case.data())
    assert describe(site).empty
    assert not np.any(RULE.per_example(site, (x,), cotangent))
    assert not np.any(squares_of(RULE, site, (x,), cotangent))
    assert not np.any(squares_of(RULE, site, (x,), cotangent, "stream"))
    assert not np.any(RULE.weighted_sum(site, (x,), cotangent, jnp.ones(case.batch)))
    assert set(RULE.estimate(site, 3).values()) == {0.0}
    assert RULE.describe(site, 3)


def test_mixed_types_are_added_up_in_the_wider() -> None:
    case = dataclasses.replace(PLAIN, dtype="bfloat16")
    site = case.site()
    x, _ = case.data()
    cotangent = dataclasses.replace(case, dtype="float32").data()[1]
    wide = dataclasses.replace(site, out=jax.ShapeDtypeStruct(site.out.shape, jnp.float32))
    total = RULE.weighted_sum(wide, (jnp.asarray(x),), jnp.asarray(cotangent), jnp.ones(5))
    expected = numpy_gradient(case, x.astype(np.float32), cotangent).sum(0)
    np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-4)
    for algorithm in ("unfold", "taps", "grouped"):
        options = {"conv": algorithm}
        chosen = dataclasses.replace(wide, options=options)
        assert RULE.per_example(chosen, (jnp.asarray(x),), jnp.asarray(cotangent)).dtype == x.dtype


def test_precision_reaches_the_products() -> None:
    case = PLAIN
    site = case.site(conv="unfold")
    exact = dataclasses.replace(
        site, params={**site.params, "precision": (jax.lax.Precision.HIGHEST,) * 2}
    )
    x, cotangent = map(jnp.asarray, case.data())
    for algorithm in ("unfold", "taps", "grouped"):
        for s, wanted in ((site, False), (exact, True)):
            s = dataclasses.replace(s, options={"conv": algorithm})
            text = str(jax.make_jaxpr(lambda x, c, s=s: RULE.per_example(s, (x,), c))(x, cotangent))
            assert ("HIGHEST" in text) == wanted


class TestChoice:
    """``conv=`` as a name, a function of the description, or an algorithm."""

    def test_unknown_name_lists_the_known(self) -> None:
        x, cotangent = map(jnp.asarray, PLAIN.data())
        with pytest.raises(ValueError, match="unknown.*'wino'.*'auto'.*'unfold'.*'grouped'"):
            RULE.per_example(PLAIN.site(conv="wino"), (x,), cotangent)

    def test_not_covered_says_why(self) -> None:
        x, cotangent = map(jnp.asarray, PLAIN.data())
        with pytest.raises(ValueError, match="'depthwise' does not cover 3x2, 2 groups.*not one"):
            RULE.per_example(PLAIN.site(conv="depthwise"), (x,), cotangent)

    def test_other_types_are_refused(self) -> None:
        with pytest.raises(TypeError, match="conv must be"):
            choose.resolve(describe(PLAIN.site()), 3, 5)

    def test_own_algorithm_and_chooser(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choose, "ALGORITHMS", dict(choose.ALGORITHMS))
        seen = []

        def mine(conv: Convolution, x: jax.Array, cotangent: jax.Array) -> jax.Array:
            seen.append(conv.kernel)
            return 2 * choose.taps.per_example(conv, x, cotangent)

        register_conv_algorithm("mine", mine)
        x, cotangent = map(jnp.asarray, PLAIN.data())
        expected = 2 * numpy_gradient(PLAIN, *PLAIN.data())
        for choice in ("mine", mine, lambda conv: "mine", lambda conv: mine):
            found = RULE.per_example(PLAIN.site(conv=choice), (x,), cotangent)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        assert seen == [(3, 2)] * 4
        assert "mine" in RULE.describe(PLAIN.site(conv="mine"), 5)

    def test_wrong_shape_is_refused(self) -> None:
        x, cotangent = map(jnp.asarray, PLAIN.data())

        def wrong(conv: Convolution, x: jax.Array, cotangent: jax.Array) -> jax.Array:
            return choose.taps.per_example(conv, x, cotangent)[..., :1]

        with pytest.raises(ValueError, match="'wrong' returned shape.*expected"):
            RULE.per_example(PLAIN.site(conv=wrong), (x,), cotangent)

    def test_names_that_cannot_be(self) -> None:
        with pytest.raises(ValueError, match="'auto' cannot be"):
            register_conv_algorithm("auto", lambda *a: a[0])
        with pytest.raises(TypeError, match="must be callable"):
            register_conv_algorithm("none", None)  # pyright: ignore

    def test_explanation_shows_choice_and_estimates(self) -> None:
        text = RULE.describe(PLAIN.site(), 5)
        name = text.split()[0]
        assert name == next(iter(choose.estimates(describe(PLAIN.site()), 5)))
        assert f"{name} " in text and "ms" in text and "3x2, 2 groups of 2 to 3 channels" in text

    def test_image_as_parameter_is_not_covered(self) -> None:
        site = dataclasses.replace(PLAIN.site(), argument=0)
        assert "image" in (RULE.covers(site) or "")
        assert RULE.covers(PLAIN.site()) is None
