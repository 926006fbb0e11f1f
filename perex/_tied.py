"""Norms of a parameter that is used in several ways, such as tied weights.

The gradients of the uses add up before the norm is taken, so their inner products count:

    |g_1 + g_2|^2 = |g_1|^2 + |g_2|^2 + 2 <g_1, g_2>.

Where either is a sum of outer products, ``g = sum_t u_t v_t^T``, an inner product is one of
positions:

    <g_1, g_2> = sum_{s,t} (u_1[s] . u_2[t]) (v_1[s] . v_2[t]),

and where ``u_1[s]`` is a unit vector, as in the gradient of a look-up, its product with ``u_2[t]``
is one entry of that. So an embedding tied with the output projection never needs a gradient
``[vocabulary, D]``.

Letters: B examples; S, T positions; N entries of a factor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import jax
import jax.numpy as jnp

from perex import _compat, _ways
from perex._preparation import Preparation, steps
from perex._rules.certified import REDUCTION, CertifiedNorms, sum_slack, unit_roundoff
from perex._rules.chunks import cache_chunk, known_size, map_chunks
from perex._rules.outer_product import accumulate_dtype, product_seconds
from perex._rules.scales import combine_scales, divide, unit_scale
from perex._uses import Use

_P = _compat.primitives


class _Form(NamedTuple):
    """A gradient of which inner products are cheap, as ``scale`` ``[B]`` times what is said here.

    Either a sum of outer products over positions, in the leaf's layout: ``sides`` maps the leaf's
    axes, ascending, to a factor over these, ``[B, T, N]`` or integers ``[B, T]`` that stand for
    unit vectors. Or ``direction`` ``[*leaf]``, which all examples share, times ``coefficients``
    ``[B]``.
    ``magnitude`` ``[B]`` is the sum of the norms of the terms.
    """

    sides: Mapping[tuple[int, ...], jax.Array]
    scale: jax.Array
    magnitude: jax.Array
    direction: jax.Array | None = None
    coefficients: jax.Array | None = None

    def length(self, key: tuple[int, ...]) -> int:
        """How many entries a factor has."""
        side = self.sides[key]
        return side.shape[2] if side.ndim == 3 else 1


def adds_by_pairs(uses: Sequence[Use]) -> bool:
    """Whether the norm of the sum of several uses' gradients is best made of inner products.

    Not where there is no cheap inner product, nor where streaming the gradients is cheaper.
    """
    found = []

    def look(uses: Sequence[Use]) -> None:
        forms = [_form_of(use) for use in uses]
        known = [form for form in forms if form is not None]
        found.append(len(known) == len(uses) and _alike(known) and _pays(uses, known))

    jax.eval_shape(look, tuple(uses))
    return found[0]


def norms_by_pairs(uses: Sequence[Use]) -> CertifiedNorms:
    """Returns the norms ``[B]`` of the sum of the gradients of uses that `adds_by_pairs`."""
    forms = [form for form in map(_form_of, uses) if form is not None]
    norms = [
        use.norms("gram") if form.direction is None else _norms_along(form)
        for use, form in zip(uses, forms, strict=True)
    ]
    total = CertifiedNorms.combined(
        CertifiedNorms(*(jnp.stack(part, axis=1) for part in zip(*norms, strict=True)))
    )
    # In units of the total, whatever the scales are: neither their product nor its inverse may be
    # in range.
    divisor = jnp.where(total.scale == 0, 1, total.scale)
    squares, error, slack = total.squares, total.error, jnp.zeros_like(total.slack)
    for left, right in combinations(forms, 2):
        ratios = (left.scale / divisor) * (right.scale / divisor)
        squares += 2 * _inner(left, right) * ratios
        error += 2 * _inner_roundoff(left, right) * left.magnitude * right.magnitude * ratios
    for norm in norms:
        slack += norm.slack * (norm.scale / divisor)
    return CertifiedNorms(total.scale, jnp.maximum(squares, 0), error, slack)


def _norms_along(form: _Form) -> CertifiedNorms:
    """The norms ``[B]`` of gradients along one direction; nothing cancels in them."""
    squares = jnp.square(form.magnitude)
    slack = sum_slack(form.magnitude, 1, form.magnitude.dtype, jax.lax.Precision.HIGHEST)
    return CertifiedNorms(form.scale, squares, jnp.zeros_like(squares), slack)


def _inner_roundoff(left: _Form, right: _Form) -> float:
    """How far an inner product is off, as a part of the product of the magnitudes."""
    keys = set(left.sides) | set(right.sides)
    # An inner product with a unit vector, whose length counts as one, picks an entry.
    lengths = sum(
        min(form.length(key) for form in (left, right) if key in form.sides) for key in keys
    )
    return (lengths + REDUCTION) * unit_roundoff(left.magnitude.dtype)


def _alike(forms: Sequence[_Form]) -> bool:
    """Whether all sums of outer products split the leaf's axes alike."""
    return len({frozenset(form.sides) for form in forms if form.direction is None}) <= 1


def _form_of(use: Use) -> _Form | None:
    if jnp.issubdtype(use.factors.cotangent.dtype, jnp.complexfloating):
        return None
    if use.preparation.is_direction:
        return _form_along(use)
    axes = _leaf_axes(use.preparation)
    merged = use.merged()
    rule = use.preparation.use.rule
    if axes is None or merged is None or not hasattr(rule, "outer_form"):
        return None
    form = rule.outer_form(*merged)
    if form is None:
        return None
    sides: dict[tuple[int, ...], jax.Array] = {}
    scale = None
    shape = use.preparation.use.site.parameter.shape
    for factor, operand_axes in form:
        leaf_axes = [axes[i] for i in operand_axes]
        order = sorted(range(len(leaf_axes)), key=leaf_axes.__getitem__)
        if jnp.issubdtype(factor.dtype, jnp.integer):
            if order != list(range(len(order))):
                return None
        else:
            front = factor.shape[:2]
            factor = factor.reshape(*front, *(shape[i] for i in operand_axes))
            factor = factor.transpose(0, 1, *(2 + i for i in order)).reshape(*front, -1)
            factor_scale = unit_scale(factor)
            dtype = accumulate_dtype(factor.dtype)
            factor = divide(factor, factor_scale, dtype)
            scale = factor_scale if scale is None else combine_scales(scale, factor_scale)
        sides[tuple(sorted(leaf_axes))] = factor
    if len(sides) != len(form) or scale is None:
        return None
    norms = [
        jnp.sqrt(jnp.sum(jnp.square(jnp.abs(jax.lax.stop_gradient(side))), axis=2))
        for side in sides.values()
        if side.ndim == 3
    ]
    return _Form(sides, scale, jnp.sum(functools.reduce(jnp.multiply, norms), axis=1))


def _form_along(use: Use) -> _Form:
    direction = use.direction()
    dtype = accumulate_dtype(direction.dtype)
    (size,) = unit_scale(jax.lax.expand_dims(direction, (0,)))
    (direction,) = divide(jax.lax.expand_dims(direction, (0,)), size[None], dtype)
    coefficients = use.operand_gradient().reshape(-1)
    scale = unit_scale(jax.lax.expand_dims(coefficients, (1,)))
    coefficients = divide(coefficients, scale, dtype)
    length = jnp.sqrt(jnp.sum(jnp.square(direction)))
    return _Form(
        {},
        combine_scales(scale, jnp.broadcast_to(size, scale.shape)),
        jnp.abs(coefficients) * length,
        direction,
        coefficients,
    )


def _leaf_axes(preparation: Preparation) -> tuple[int, ...] | None:
    """Returns which axis of the leaf each axis of the operand is, or None if it is no axis."""
    if not preparation.isometric:
        return None
    axes = tuple(range(len(preparation.plan.program.avals[preparation.leaf].shape)))
    for _, equation in steps(preparation.plan, preparation.use):
        if equation.primitive is _P.transpose_p:
            axes = tuple(axes[i] for i in equation.params["permutation"])
        elif equation.primitive not in (_P.convert_element_type_p, _P.copy_p):
            return None
    return axes if len(axes) == len(preparation.use.site.parameter.shape) else None


def _pays(uses: Sequence[Use], forms: Sequence[_Form]) -> bool:
    """Whether inner products are estimated to be faster than the sum of the gradients itself."""
    estimates = [
        _ways.estimate(use.preparation.use, use.factors.cotangent.shape[0]) for use in uses
    ]
    pairs = stream = 0.0
    for estimate in estimates:
        if estimate is None:
            return True
        pairs += min(estimate["gram"], estimate["stream"])
        stream += estimate["stream"]
    for left, right in combinations(forms, 2):
        if left.direction is not None or right.direction is not None:
            outer = left if right.direction is not None else right
            shapes = [(x.shape[1], x.shape[2] if x.ndim == 3 else 1) for x in outer.sides.values()]
            if len(shapes) == 2:
                (positions, depth), (_, width) = shapes
                rows = known_size(outer.scale.shape[0]) * positions
                pairs += product_seconds(rows, depth, width)
            continue
        for key, factor in left.sides.items():
            other = right.sides[key]
            both_dense = factor.ndim == other.ndim == 3
            seconds = product_seconds(
                factor.shape[1], factor.shape[2] if both_dense else 1, other.shape[1]
            )
            pairs += known_size(factor.shape[0]) * seconds
    return pairs <= stream


def _inner(left: _Form, right: _Form) -> jax.Array:
    """Returns the inner products ``[B]``, but for the scales."""
    if left.direction is not None or right.direction is not None:
        return _inner_along(*((left, right) if left.direction is not None else (right, left)))
    keys = list(left.sides)
    arrays = tuple(form.sides[key] for form in (left, right) for key in keys)

    def some(*arrays: jax.Array) -> jax.Array:
        products = None
        for i in range(len(keys)):
            gram = _gram(arrays[i], arrays[len(keys) + i]).astype(left.magnitude.dtype)
            products = gram if products is None else products * gram
        assert products is not None
        return jnp.sum(products, axis=(1, 2))

    rows = arrays[0].shape[1] * arrays[len(keys)].shape[1]
    return map_chunks(some, arrays, cache_chunk(arrays[0].shape[0], 8 * rows))


def _inner_along(along: _Form, other: _Form) -> jax.Array:
    """The same with a gradient along one direction, ``[B]``."""
    direction, coefficients = along.direction, along.coefficients
    assert direction is not None and coefficients is not None
    if other.direction is not None and other.coefficients is not None:
        product = jnp.sum(direction * other.direction)
        return coefficients * other.coefficients * product
    (first, u), (second, v) = other.sides.items()
    if v.ndim == 2:
        (first, u), (second, v) = (second, v), (first, u)
    sizes = [math.prod(direction.shape[i] for i in key) for key in (first, second)]
    matrix = direction.transpose(*first, *second).reshape(sizes)
    if u.ndim == 2:
        rows = matrix[u]
    else:
        rows = jnp.tensordot(u, matrix, 1, precision=jax.lax.Precision.HIGHEST)
    return coefficients * jnp.sum(rows * v, axis=(1, 2))


def _gram(left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the inner products of positions ``[b, S, T]`` of ``[b, S, N]`` and ``[b, T, N]``.

    Either may be integer without the last axis: unit vectors.
    """
    if left.ndim == right.ndim == 2:
        return (left[:, :, None] == right[:, None, :].astype(left.dtype)).astype(jnp.float32)
    if left.ndim == 2:
        return jnp.take_along_axis(right, left[:, None, :], axis=2).swapaxes(1, 2)
    if right.ndim == 2:
        return jnp.take_along_axis(left, right[:, None, :], axis=2)
    return jax.lax.dot_general(
        left, right, (((2,), (2,)), ((0,), (0,))), precision=jax.lax.Precision.HIGHEST
    )
