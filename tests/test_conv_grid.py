"""The grid of convolutions over every algorithm, chunked and not, against the float64 oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_cases import NAMED, Case, cases, loop, norms_by, numpy_gradient
from hypothesis import given, settings
from sites import WAYS, squares_of

from perex._rules import site_sum
from perex._rules.conv import ConvRule, depthwise, describe, grouped, taps, unfold
from perex._rules.conv.normal_form import arrange_cotangent, arrange_input, restore_kernel

# Rounding of sums of up to a few thousand products, relative to the largest entry. Inputs are exact
# in each type, so for bfloat16 only the result is rounded, to 8 bits.
TOLERANCE = {"float32": 2e-5, "float64": 1e-12, "complex64": 2e-5, "bfloat16": 5e-3}


def _everything(case: Case) -> Callable[..., dict[str, Any]]:
    """One jitted function that computes a case in all ways."""
    rule, site = ConvRule(), case.site()
    conv = describe(site)

    def run(x: jax.Array, cotangent: jax.Array, weights: jax.Array) -> dict[str, Any]:
        sites = {name: case.site(conv=name) for name in ("auto", "unfold", "taps", "grouped")}
        if depthwise.covers(conv) is None:
            sites["depthwise"] = case.site(conv="depthwise")
        found = {
            f"gradient {name}": rule.per_example(s, (x,), cotangent) for name, s in sites.items()
        }
        for way in WAYS:
            found[f"squares {way}"] = squares_of(rule, site, (x,), cotangent, way)
            found[f"sum {way}"] = site_sum(rule, site, way, (x,), cotangent, weights)
        if conv.empty or x.shape[0] == 0:
            return found
        arrays = arrange_input(site, conv, x), arrange_cotangent(site, conv, cotangent)
        small = {"unfold": unfold, "taps": taps}
        if "depthwise" in sites:
            small["depthwise"] = depthwise
        for name, module in small.items():
            gradient = restore_kernel(site, conv, module.per_example(conv, *arrays, chunk=1))
            found[f"gradient {name}, chunked"] = gradient.astype(case.dtype)
        for name, module in {"unfold": unfold, "grouped": grouped}.items():
            total = module.weighted_sum(conv, *arrays, weights)
            found[f"sum {name}"] = restore_kernel(site, conv, total)
        for way in ("patches", "pixels"):
            if way == "pixels" and max(conv.interior, default=1) > 1:
                continue
            scale, squares, *_ = norms_by(way, conv, *arrays)
            found[f"squares {way}"] = scale * scale * squares
        return found

    return run


def _check(case: Case) -> None:
    with jax.enable_x64(True) if case.dtype == "float64" else contextlib.nullcontext():
        _check_in_context(case)


def _check_in_context(case: Case) -> None:
    x, cotangent = case.data()
    weights = np.linspace(-1, 2, case.batch)
    expected = numpy_gradient(case, x, cotangent)
    if not case.negative:
        np.testing.assert_allclose(expected, loop(case, x, cotangent), rtol=1e-9, atol=1e-9)
    # Compiling takes nearly all the time of these tests; the lowest level of LLVM halves it.
    options = {"xla_backend_optimization_level": 0}
    run = jax.jit(_everything(case), compiler_options=options)
    found = run(x, cotangent, jnp.asarray(weights))
    squares = (np.abs(expected) ** 2).sum(tuple(range(1, expected.ndim)))
    total = np.tensordot(weights, expected, 1)
    # Terms of a Gram sum can be larger than the norm: their scale is what rounding is relative to.
    gram_scale = squares + 0.1 * (np.abs(x.astype(expected.dtype)) ** 2).sum(
        tuple(range(1, x.ndim))
    )
    for name, value in found.items():
        value = np.asarray(value.astype(jnp.promote_types(value.dtype, jnp.float32)))
        rounding = TOLERANCE[case.dtype]
        if name.startswith("gradient"):
            assert found[name].dtype == case.dtype, name
            reference = expected
        else:
            # Norms and sums stay in at least float32.
            reference = total if name.startswith("sum") else squares
            rounding = TOLERANCE["float32"] if case.dtype == "bfloat16" else rounding
            assert found[name].dtype.itemsize >= 4, name
        scale = np.max(np.abs(reference), initial=1e-30)
        if name.startswith("squares"):
            scale = np.max(gram_scale, initial=1e-30)
        assert value.shape == reference.shape, name
        np.testing.assert_allclose(value, reference, rtol=0, atol=rounding * scale, err_msg=name)


@pytest.mark.parametrize("name", NAMED)
def test_named_case(name: str) -> None:
    _check(NAMED[name])


@given(cases(1))
@settings(max_examples=10)
def test_grid_1d(case: Case) -> None:
    _check(case)


@given(cases(2))
@settings(max_examples=12)
def test_grid_2d(case: Case) -> None:
    _check(case)


@given(cases(3))
@settings(max_examples=5)
def test_grid_3d(case: Case) -> None:
    _check(case)
