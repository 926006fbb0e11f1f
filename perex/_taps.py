"""Taps: what a sweep brings back from the sites of a plan.

A *tap* is an extra input of a site, a zero that does not affect the value. Its cotangent is what
perex wants to know: the site's inputs and the cotangent of its result, from which the rules compute
gradients, norms and weighted sums for the whole batch. To save memory, a tap can bring back the
norms, the weighted sum or the gradients themselves instead.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from perex import _compat
from perex._rules import Site
from perex._rules.outer_product import accumulate_dtype
from perex._rules.scales import ScaledNorms
from perex._steps import Plan, SiteUse


class Factors(NamedTuple):
    """What a tap brings back: the inputs of a site and the cotangent of its result.

    With the example axis in front, and after it an axis for each enclosing scan.
    """

    inputs: tuple[Any, ...]
    cotangent: Any


class Settled(NamedTuple):
    """What a tap brings back of a site whose norms or sum are all that is wanted.

    ``norms`` ``[B, *scans]``, and ``total`` ``[*scans, *operand]``, the weighted sum over examples.
    Either is None or zero where the other one is wanted.
    """

    norms: ScaledNorms | None
    total: Any


class Gradient(NamedTuple):
    """What a tap brings back of a site whose gradients are summed over the steps of scans.

    ``[B, *stacked scans, *operand]``.
    """

    gradient: Any


Tapped = Factors | Settled | Gradient


class Saving(NamedTuple):
    """How a sweep saves memory: what its taps bring back in place of factors.

    Attributes:
      ways: for each site that is settled, by number, its way to norms, "gram" or "stream".
      gradients: the sites, by number, whose gradients are brought back.
      weights: for each site that is settled, the weight of the example, if sums are wanted.
      is_sum: whether sums are wanted, not norms: a scalar, or None where only norms ever are.
    """

    ways: Mapping[int, str]
    gradients: Container[int]
    weights: Mapping[int, Any]
    is_sum: Any


def make_taps(plan: Plan, saving: Saving | None = None) -> list[Tapped]:
    """Returns a zero tap for each site of the plan, with an axis in front for each scan.

    Args:
      plan: the plan.
      saving: what to bring back in place of factors.
    """
    return [_zero_tap(number, use, saving) for number, use in enumerate(plan.sites)]


def _zero_tap(number: int, use: SiteUse, saving: Saving | None) -> Tapped:
    lengths = tuple(length for length, _ in use.stack)
    variables = use.equation.source.invars
    axes = frozenset().union(*(_compat.manual_axes(v.aval) for v in variables))

    def zero(struct: Any, lengths: tuple[int, ...] = lengths) -> jax.Array:
        return _compat.vary_over(jnp.zeros(lengths + struct.shape, struct.dtype), axes)

    site = use.site
    wide = jax.ShapeDtypeStruct(site.parameter.shape, accumulate_dtype(site.parameter.dtype))
    if saving is not None and number in saving.gradients:
        stacked = tuple(length for length, is_stacked in use.stack if is_stacked)
        return Gradient(zero(wide, stacked))
    if saving is not None and number in saving.ways:
        real = jax.ShapeDtypeStruct((), jnp.finfo(_norm_dtype(site)).dtype)
        norms = ScaledNorms(*(zero(real) for _ in ScaledNorms._fields))
        return Settled(norms, None if saving.is_sum is None else zero(wide))
    inputs = tuple(jax.tree.map(zero, jax.eval_shape(encode, s)) for s in _read(use.rule, site))
    return Factors(inputs, zero(site.out))


def _norm_dtype(site: Site) -> Any:
    inexact = [s.dtype for s in site.inputs if jnp.issubdtype(s.dtype, jnp.inexact)]
    return accumulate_dtype(*inexact, site.out.dtype)


def _read(rule: Any, site: Site) -> tuple[Any, ...]:
    """The inputs of a site that its rule reads."""
    return site.inputs if getattr(rule, "reads_inputs", True) else ()


# Cotangents of integers do not exist, so the integer inputs of a site (token ids) travel as floats.
# float32 holds 24 bits exactly and float64 53; wider integers travel as two halves.
_HALF = 16


def encode(value: jax.Array) -> Any:
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return value
    if value.dtype.itemsize <= 2:
        return value.astype(jnp.float32)
    half = _HALF * value.dtype.itemsize // 4
    dtype = jnp.float32 if value.dtype.itemsize == 4 else jnp.float64
    return (value >> half).astype(dtype), (value & ((1 << half) - 1)).astype(dtype)


def decode_inputs(tap: Factors, use: SiteUse) -> Factors:
    """Returns the factors of a site with its inputs as they were before they travelled."""
    structs = zip(tap.inputs, _read(use.rule, use.site), strict=True)
    return Factors(tuple(decode(x, struct) for x, struct in structs), tap.cotangent)


def decode(encoded: Any, struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the input of a site from the cotangent of its tap."""
    if not isinstance(encoded, tuple):
        return encoded.astype(struct.dtype)
    half = _HALF * struct.dtype.itemsize // 4
    high, low = (part.astype(struct.dtype) for part in encoded)
    return (high << half) | low
