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

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import jax
import jax.numpy as jnp

from perex import _compat, _ways
from perex._norms import ScaledNorms, combine_norms
from perex._preparation import Preparation, steps
from perex._rules.chunks import cache_chunk, map_chunks
from perex._rules.outer_product import accumulate_dtype, product_seconds
from perex._rules.scales import combine_scales, divide, unit_scale
from perex._uses import Use

_P = _compat.primitives


class _Form(NamedTuple):
    """A gradient as a sum of outer products over positions, in the leaf's layout.

    ``sides`` maps the leaf's axes, ascending, to a factor over these: ``[B, T, N]``, or integers
    ``[B, T]`` that stand for unit vectors. The gradient is ``scale`` ``[B]`` times what these say.
    """

    sides: Mapping[tuple[int, ...], jax.Array]
    scale: jax.Array


def norms_by_pairs(uses: Sequence[Use]) -> ScaledNorms | None:
    """Returns the norms ``[B]`` of the sum of several uses' gradients by inner products.

    Returns None where there is no cheap inner product, or streaming the gradients is cheaper.
    """
    forms, norms = [], []
    for use in uses:
        form = _form_of(use)
        norm = None if form is None else use.norms()
        if form is None or norm is None or (forms and set(form.sides) != set(forms[0].sides)):
            return None
        forms.append(form)
        norms.append(norm)
    if not _pays(uses, forms):
        return None
    total = combine_norms(norms)
    cross = jnp.zeros_like(total.squares)
    for left, right in combinations(forms, 2):
        # Divided one by one, as neither the product of the scales nor its inverse may be in range.
        divisor = jnp.where(total.scale == 0, 1, total.scale)
        cross += 2 * _inner(left, right) * (left.scale / divisor) * (right.scale / divisor)
    return ScaledNorms(total.scale, jnp.maximum(total.squares + cross, 0))


def _form_of(use: Use) -> _Form | None:
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
    return _Form(sides, scale)


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
        for key, factor in left.sides.items():
            other = right.sides[key]
            both_dense = factor.ndim == other.ndim == 3
            seconds = product_seconds(
                factor.shape[1], factor.shape[2] if both_dense else 1, other.shape[1]
            )
            pairs += factor.shape[0] * seconds
    return pairs <= stream


def _inner(left: _Form, right: _Form) -> jax.Array:
    """Returns the inner products ``[B]``, but for the scales."""
    keys = list(left.sides)
    arrays = tuple(form.sides[key] for form in (left, right) for key in keys)

    def some(*arrays: jax.Array) -> jax.Array:
        products = None
        for i in range(len(keys)):
            gram = _gram(arrays[i], arrays[len(keys) + i])
            products = gram if products is None else products * gram
        assert products is not None
        return jnp.sum(products, axis=(1, 2))

    rows = arrays[0].shape[1] * arrays[len(keys)].shape[1]
    return map_chunks(some, arrays, cache_chunk(arrays[0].shape[0], 8 * rows))


def _gram(left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the inner products of positions ``[b, S, T]`` of ``[b, S, N]`` and ``[b, T, N]``.

    Either may be integer without the last axis: unit vectors.
    """
    if left.ndim == right.ndim == 2:
        return (left[:, :, None] == right[:, None, :]).astype(jnp.float32)
    if left.ndim == 2:
        return jnp.take_along_axis(right, left[:, None, :], axis=2).swapaxes(1, 2)
    if right.ndim == 2:
        return jnp.take_along_axis(left, right[:, None, :], axis=2)
    return jax.lax.dot_general(
        left, right, (((2,), (2,)), ((0,), (0,))), precision=jax.lax.Precision.HIGHEST
    )
