"""Masked convolutions by pieces and by entries, against a convolution written tap by tap."""

import functools
import itertools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

from perex._masks import plan as lib

pytestmark = pytest.mark.usefixtures("x64")


def reference(x, kernel, mask, params, cotangent=None):
    """A convolution and its two gradients in numpy, tap by tap; masked entries are never used.

    Returns the result, or with a cotangent the triple (result, input gradient, kernel gradient).
    """
    lhs, rhs, out = params["dimension_numbers"]
    # Batch groups: the g-th part of the batch meets the g-th part of the output channels.
    batch, groups = params["batch_group_count"], params["feature_group_count"]
    dtype = np.result_type(x, kernel)
    x = np.transpose(x, lhs)
    n, c, *size = x.shape
    kernel, mask = np.transpose(kernel, rhs), np.transpose(mask, rhs)
    o, i, *window = kernel.shape
    x = x.reshape(batch, n // batch, groups, i, *size)
    kernel = np.where(mask, kernel, 0).reshape(batch, groups, -1, i, *window)
    low = [a for a, _ in params["padding"]]
    full = [
        (m - 1) * d + 1 + sum(pad)
        for m, d, pad in zip(size, params["lhs_dilation"], params["padding"], strict=True)
    ]
    counts = [
        max(0, (m - (k - 1) * d - 1) // s + 1)
        for m, k, d, s in zip(
            full, window, params["rhs_dilation"], params["window_strides"], strict=True
        )
    ]
    y = np.zeros((batch, n // batch, groups, o // groups // batch, *counts), dtype)
    if cotangent is not None:
        cotangent = np.transpose(cotangent, out)
        cotangent = cotangent.reshape(n // batch, batch, groups, -1, *counts).swapaxes(0, 1)
    dx, dkernel = np.zeros(x.shape, dtype), np.zeros(kernel.shape, dtype)
    for tap in itertools.product(*map(range, window)):
        results, inputs = [], []
        for t, d, s, m, count, ld, lo in zip(
            tap,
            params["rhs_dilation"],
            params["window_strides"],
            size,
            counts,
            params["lhs_dilation"],
            low,
            strict=True,
        ):
            read = np.arange(count) * s + t * d - lo
            real = (read >= 0) & (read <= (m - 1) * ld) & (read % ld == 0)
            results.append(np.flatnonzero(real))
            inputs.append(read[real] // ld)
        head = [np.arange(k) for k in x.shape[:4]]
        reads, writes = np.ix_(*head, *inputs), np.ix_(*map(np.arange, y.shape[:4]), *results)
        where = (..., *tap)
        # A masked entry is left out, not multiplied with.
        for b, g, p, q in np.argwhere(mask.reshape(kernel.shape)[where]):
            one = kernel[(b, g, p, q, *tap)]
            seen = x[reads][b, :, g, q]
            rows = np.ix_(np.arange(n // batch), *results)
            y[b, :, g, p][rows] += one * seen
            if cotangent is not None:
                back = cotangent[writes][b, :, g, p]
                dx[b, :, g, q][np.ix_(np.arange(n // batch), *inputs)] += one * back
                dkernel[(b, g, p, q, *tap)] = (seen * back).sum()
    y = y.swapaxes(0, 1).reshape(n // batch, o, *counts).transpose(np.argsort(out))
    if cotangent is None:
        return y
    dx = dx.reshape(n, c, *size).transpose(np.argsort(lhs))
    return y, dx, dkernel.reshape(o, i, *window).transpose(np.argsort(rhs))


@st.composite
def cases(draw):
    rank = draw(st.sampled_from([0, 1, 2, 2, 2, 3]))
    each = lambda values: tuple(draw(st.sampled_from(values)) for _ in range(rank))  # noqa: E731
    groups, batch_groups = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 1), (1, 2)]))
    n, i, o = (
        draw(st.integers(1, 2)) * batch_groups,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    window = each([1, 2, 3] if rank == 3 else [1, 2, 3, 4])
    lhs_dilation, rhs_dilation = each([1, 1, 2]), each([1, 1, 2])
    padding = tuple((a, b) for a, b in zip(each([-1, 0, 1, 3]), each([-1, 0, 2]), strict=True))
    extra = each([3, 4, 6])
    size = tuple(
        -(-max((k - 1) * d + e - low - high, 1) // s) + 1
        for k, d, e, (low, high), s in zip(
            window, rhs_dilation, extra, padding, lhs_dilation, strict=True
        )
    )
    specs = [draw(st.permutations(range(rank + 2))) for _ in range(3)]
    shapes = (n, i * groups, *size), (o * groups * batch_groups, i, *window)
    params = {
        "dimension_numbers": lax.ConvDimensionNumbers(*map(tuple, specs)),
        "feature_group_count": groups,
        "batch_group_count": batch_groups,
        "window_strides": each([1, 2, 3]),
        "padding": padding,
        "lhs_dilation": lhs_dilation,
        "rhs_dilation": rhs_dilation,
    }
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(["taps", "taps", "channels", "entries", "zeros", "ones"]))
    shape = {
        "taps": (1, 1, *window),
        "channels": (*shapes[1][:2], *(1,) * rank),
        "entries": shapes[1],
    }.get(kind, (1,) * (rank + 2))
    share = {"zeros": 0, "ones": 1}.get(kind, 0.6)
    mask = np.broadcast_to(rng.random(shape) < share, shapes[1])
    layouts = [np.argsort(spec) for spec in specs]
    x = rng.normal(size=shapes[0]).transpose(layouts[0])
    kernel = rng.normal(size=shapes[1]).transpose(layouts[1])
    return x, kernel, mask.transpose(layouts[1]), params


def by_pieces(x, kernel, mask, unknown, params):
    return lib.masked_convolution(x, kernel, mask, **params)


def at_run_time(x, kernel, mask, unknown, params):
    return lib.masked_convolution(x, kernel, unknown, **params)


def everything(way, x, kernel, mask, params, cotangent):
    """The result and both gradients."""

    @jax.jit
    def run(x, kernel, unknown, cotangent):
        y, pull = jax.vjp(lambda x, k: way(x, k, mask, unknown, params), x, kernel)
        return y, *pull(cotangent)

    return jax.device_get(run(x, kernel, mask, cotangent))


@hypothesis.given(cases(), st.sampled_from([by_pieces, at_run_time]))
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
def test_random_masks(case, way):
    x, kernel, mask, params = case
    shape = reference(x, kernel, mask, params).shape
    cotangent = np.random.default_rng(1).normal(size=shape)
    expected = reference(x, kernel, mask, params, cotangent)
    poisoned = np.where(mask, kernel, np.nan)
    result = everything(way, x, poisoned, mask, params, cotangent)
    # Sums of at most 200 products of numbers around one, in float64.
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    ones = np.ones(x.shape), mask.astype(float), mask, params, np.ones(shape)
    for value, count in zip(result, reference(*ones), strict=True):
        np.testing.assert_array_equal(value[count == 0], 0)
    np.testing.assert_array_equal(result[2][~mask], 0)


@hypothesis.given(cases(), st.sampled_from([by_pieces, at_run_time]), st.sampled_from([0, 1]))
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
def test_nan_and_inf_go_only_where_the_mask_lets_them(case, way, number):
    x, kernel, mask, params = case
    # XLA expands grouped convolutions on the CPU to dense ones, in which groups meet.
    hypothesis.assume(params["feature_group_count"] * params["batch_group_count"] == 1)
    bad = np.random.default_rng(2).random(x.shape) < 0.2
    evil = np.where(bad, [np.nan, np.inf][number], x)
    shape = reference(x, kernel, mask, params).shape
    cotangent = np.random.default_rng(1).normal(size=shape)
    clean = everything(way, x, kernel, mask, params, cotangent)
    dirty = everything(way, evil, kernel, mask, params, cotangent)
    counts = reference(bad.astype(float), mask.astype(float), mask, params, np.ones(shape))
    for position in (0, 2):
        hit = counts[position] > 0
        np.testing.assert_allclose(dirty[position][~hit], clean[position][~hit], atol=1e-12)
        assert not np.isfinite(dirty[position][hit]).any()
    # The gradient with respect to the input does not depend on the input at all.
    np.testing.assert_array_equal(dirty[1], clean[1])


@pytest.mark.parametrize("way", [by_pieces, at_run_time])
def test_nan_cotangents_stay_within_the_support(way):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(1, 6, 6, 3)), rng.normal(size=(3, 3, 3, 6))
    mask = np.broadcast_to(np.arange(3)[:, None] < np.arange(6) % 3, (3, 3, 3, 6)).copy()
    mask[2] = False
    numbers = lax.conv_dimension_numbers(x.shape, kernel.shape, ("NHWC", "HWIO", "NHWC"))
    params = {
        "dimension_numbers": numbers, "feature_group_count": 1, "batch_group_count": 1,
        "window_strides": (1, 1), "padding": ((1, 1), (1, 1)), "lhs_dilation": (1, 1),
        "rhs_dilation": (1, 1),
    }  # fmt: skip
    cotangent = np.ones((1, 6, 6, 6))
    cotangent[0, 3, 3, 1] = np.nan  # sees channel 0 alone, rows 2 and 3, columns 2 to 4
    _, dx, dkernel = everything(way, x, kernel, mask, params, cotangent)
    reached = np.zeros(x.shape, bool)
    reached[0, 2:4, 2:5, 0] = True
    np.testing.assert_array_equal(np.isnan(dx), reached)
    np.testing.assert_array_equal(np.isnan(dkernel), mask & (np.arange(6) == 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("way", [by_pieces, at_run_time])
def test_dtypes(way, dtype):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape) + 1j * rng.normal(size=shape)  # noqa: E731
    x, kernel = draw(2, 4, 7), draw(6, 4, 3)
    if dtype != "complex64":
        x, kernel = x.real, kernel.real
    x, kernel = jnp.asarray(x, dtype), jnp.asarray(kernel, dtype)
    mask = np.ones((6, 4, 3), bool)
    mask[:, :, 2] = False
    mask[3:, :2, 1] = False
    params = {
        "dimension_numbers": lax.ConvDimensionNumbers((0, 1, 2), (0, 1, 2), (0, 1, 2)),
        "feature_group_count": 1, "batch_group_count": 1, "window_strides": (1,),
        "padding": ((1, 1),), "lhs_dilation": (1,), "rhs_dilation": (1,),
    }  # fmt: skip
    cotangent = jnp.asarray(rng.normal(size=(2, 6, 7)), dtype)
    result = everything(way, x, kernel, mask, params, cotangent)
    wide = {"complex64": "complex128"}.get(dtype, "float64")
    full = (np.asarray(v).astype(wide) for v in (x, kernel, cotangent))
    exact = reference(next(full), next(full), mask, params, next(full))
    epsilon = float(jnp.finfo(dtype).eps)
    for number, (a, b) in enumerate(zip(result, exact, strict=True)):
        assert a.dtype == dtype
        a, size = np.asarray(a).astype(wide), float(abs(b).max())
        if number == 0 and dtype in ("bfloat16", "float16"):
            # The sum over pieces, in float32, is rounded once.
            np.testing.assert_allclose(a, b, rtol=0.51 * epsilon, atol=1e-6 * size)
        else:
            # Rounded, or in 16 bits a gradient for each of few pieces.
            np.testing.assert_allclose(a, b, rtol=4 * epsilon, atol=4 * epsilon * size)


def test_both_modes_and_second_order_by_pieces():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(1, 3, 4, 2)), rng.normal(size=(3, 3, 2, 2))
    mask = np.ones(kernel.shape, bool)
    mask[2], mask[1, 1, 0] = False, False
    params = {
        "window_strides": (1, 2),
        "padding": "SAME",
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
    }
    exact = lambda x, k: (jnp.sin(lib.masked_convolution(x, k, mask, **params)) ** 2).sum()  # noqa: E731
    plain = lambda x, k: (  # noqa: E731
        (jnp.sin(lax.conv_general_dilated(x, k * mask, **params)) ** 2).sum()
    )
    for transform in (jax.hessian, lambda f: jax.jacrev(jax.grad(f))):
        for a, b in zip(
            jax.jit(transform(exact))(x, kernel), jax.jit(transform(plain))(x, kernel), strict=True
        ):
            np.testing.assert_allclose(a, b, atol=1e-12)


def test_second_order_at_run_time():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(1, 5, 2)), rng.normal(size=(3, 2, 2))
    mask = rng.random(kernel.shape) < 0.5
    params = {"window_strides": (1,), "padding": "SAME", "dimension_numbers": ("NWC", "WIO", "NWC")}
    exact = lambda k: (  # noqa: E731
        (jnp.sin(jax.jit(lambda m: lib.masked_convolution(x, k, m, **params))(mask)) ** 2).sum()
    )
    plain = lambda k: (jnp.sin(lax.conv_general_dilated(x, k * mask, **params)) ** 2).sum()  # noqa: E731
    second = lambda f: jax.jit(jax.jacrev(jax.grad(f)))(kernel)  # noqa: E731
    np.testing.assert_allclose(second(exact), second(plain), atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 5, 2), (1, 2, 2)])
def test_empty_batches_and_results(shape):
    mask = np.array([1, 0, 1]).reshape(3, 1, 1) * np.ones((3, 2, 4))
    params = {
        "window_strides": (1,),
        "padding": "VALID",
        "dimension_numbers": ("NWC", "WIO", "NWC"),
    }
    y = lib.masked_convolution(jnp.ones(shape), jnp.ones((3, 2, 4)), mask, **params)
    assert y.shape == (shape[0], max(0, shape[1] - 2), 4)


def test_plans():
    params = {
        "window_strides": (1, 1),
        "padding": "SAME",
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
    }
    x = jnp.ones((1, 8, 8, 4))

    def plan(mask):
        mask = np.broadcast_to(mask, (*mask.shape[:2], 4, 4))
        kernel = jnp.ones(mask.shape)
        jaxpr = jax.make_jaxpr(functools.partial(lax.conv_general_dilated, **params))(x, kernel)
        return lib.plan_known(mask, jaxpr.eqns[0].params)

    raster = np.zeros((3, 3, 1, 1))
    raster[0], raster[1, 0] = 1, 1
    assert plan(raster).rectangle_count == len(plan(raster).pieces) == 2
    assert math.isclose(plan(raster).share, 4 / 9)
    assert "2 rectangles, saves 56%" in plan(raster).describe()
    assert len(plan(np.ones((5, 5, 1, 1))).pieces) == 2  # a square window is cut
    checks = np.indices((7, 7)).sum(0).reshape(7, 7, 1, 1) % 2
    assert plan(checks).pieces is None and len(plan(checks).taps) == 24
    assert "one product over 24 taps" in plan(checks).describe()
    assert plan(np.zeros((3, 3, 1, 1))).pieces == ()
