"""``dot_general`` with the parameter on either side, any dimension numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from perex._rules import outer_product
from perex._rules.certified import CertifiedNorms
from perex._rules.registry import Site


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How the two operands and the result of one example are laid out.

    Axes of the other operand ``x``: batch, contracted, free (T). Axes of the parameter ``w``:
    batch, contracted (D), free (P). The result has the batch axes, then the free axes of the
    left operand, then those of the right.
    """

    x_batch: tuple[int, ...]
    x_contract: tuple[int, ...]
    x_free: tuple[int, ...]
    w_batch: tuple[int, ...]
    w_contract: tuple[int, ...]
    w_free: tuple[int, ...]
    parameter_first: bool

    @classmethod
    def of(cls, site: Site) -> _Layout:
        contract, batch = site.params["dimension_numbers"]
        w_side, x_side = site.argument, 1 - site.argument
        x, w = site.operands[x_side], site.operands[w_side]

        def free(ndim: int, side: int) -> tuple[int, ...]:
            return tuple(i for i in range(ndim) if i not in contract[side] + batch[side])

        contract = tuple(map(tuple, contract))
        batch = tuple(map(tuple, batch))
        return cls(
            batch[x_side],
            contract[x_side],
            free(len(x.shape), x_side),
            batch[w_side],
            contract[w_side],
            free(len(w.shape), w_side),
            w_side == 0,
        )


def _factors(
    site: Site, x: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, _Layout]:
    """Returns ``a [B, G, T, D]`` and ``b [B, G, T, P]`` whose product over T is the gradient."""
    layout = _Layout.of(site)
    batch = x.shape[0]
    axes = (*layout.x_batch, *layout.x_free, *layout.x_contract)
    a = jnp.transpose(x, (0, *(i + 1 for i in axes)))
    groups = math.prod(x.shape[i + 1] for i in layout.x_batch)
    positions = math.prod(x.shape[i + 1] for i in layout.x_free)
    depth = math.prod(x.shape[i + 1] for i in layout.x_contract)
    outputs = math.prod(site.parameter.shape[i] for i in layout.w_free)
    a = a.reshape(batch, groups, positions, depth)
    if layout.parameter_first:
        b = cotangent.reshape(batch, groups, outputs, positions).swapaxes(2, 3)
    else:
        b = cotangent.reshape(batch, groups, positions, outputs)
    return a, b, layout


def _to_parameter(site: Site, layout: _Layout, gradient: jax.Array) -> jax.Array:
    """Brings ``[*front, G, D, P]`` into the parameter's layout ``[*front, *parameter.shape]``."""
    shape = site.parameter.shape
    order = _parameter_order(site, layout)
    front = gradient.ndim - 3
    gradient = gradient.reshape(*gradient.shape[:front], *(shape[i] for i in order))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return jnp.transpose(gradient, (*range(front), *(front + i for i in inverse)))


def _parameter_order(site: Site, layout: _Layout) -> tuple[int, ...]:
    # The contracted axes of the two operands are paired in the order that the equation gives.
    return (*layout.w_batch, *layout.w_contract, *layout.w_free)


class DotGeneralRule:
    """Per-example gradients of the parameter of a ``dot_general``.

    With ``a [B, G, T, D]`` the other operand (G its batch axes, T its free axes, D the contracted
    ones) and ``b [B, G, T, P]`` the cotangent, an example's gradient is ``sum_t a[t] b[t]^T``.
    """

    def per_example(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> jax.Array:
        """Returns ``[B, *parameter.shape]``."""
        a, b, layout = _factors(site, inputs[0], cotangent)
        product = outer_product.per_example(a, b, **_numerics(site))
        return _to_parameter(site, layout, product)

    def gram_norms(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> CertifiedNorms:
        """Returns the norms ``[B]`` from inner products of positions, with bounds."""
        a, b, _ = _factors(site, inputs[0], cotangent)
        return outer_product.gram_norms(a, b, **_numerics(site))

    def stream_norms(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> CertifiedNorms:
        """Returns the norms ``[B]`` of gradients that are computed and dropped."""
        a, b, _ = _factors(site, inputs[0], cotangent)
        return outer_product.stream_norms(a, b, **_numerics(site))

    def outer_form(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> tuple[tuple[jax.Array, tuple[int, ...]], ...] | None:
        """Returns the two factors ``[B, T, N]`` of the gradient, each with the axes it spans.

        None where the product has batch axes.
        """
        a, b, layout = _factors(site, inputs[0], cotangent)
        if layout.w_batch:
            return None
        return (a[:, 0], layout.w_contract), (b[:, 0], layout.w_free)

    def estimate(self, site: Site, batch_size: int) -> dict[str, float]:
        """Returns estimated seconds of each way to a clipped sum."""
        layout = _Layout.of(site)
        x, w = site.inputs[0].shape, site.parameter.shape
        groups, positions, depth = (
            math.prod(x[i] for i in axes)
            for axes in (layout.x_batch, layout.x_free, layout.x_contract)
        )
        outputs = math.prod(w[i] for i in layout.w_free)
        return outer_product.estimate(groups, positions, depth, outputs, batch_size)

    def weighted_sum(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """Returns the weighted sum over examples, of the parameter's shape."""
        a, b, layout = _factors(site, inputs[0], cotangent)
        total = outer_product.weighted_sum(a, b, weights, **_numerics(site))
        return _to_parameter(site, layout, total)

    def stream_sum(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """Returns the same of the gradients that `stream_norms` measures."""
        a, b, layout = _factors(site, inputs[0], cotangent)
        total = outer_product.stream_sum(a, b, weights, **_numerics(site))
        return _to_parameter(site, layout, total)

    def merge_repeats(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> tuple[Site, tuple[jax.Array, ...], jax.Array]:
        """Folds the axis of repeats ``R``, second of every array, into the free axes."""
        (x,) = inputs
        layout = _Layout.of(site)
        # The repeats become a new first axis of x's free axes: in front of x, and in the result
        # right where the free axes of x begin.
        at = len(layout.x_batch) + (len(layout.w_free) if layout.parameter_first else 0)
        cotangent = jnp.moveaxis(cotangent, 1, 1 + at)
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = site.params["dimension_numbers"]
        dimension_numbers: Any
        if layout.parameter_first:
            dimension_numbers = (
                (lhs_contract, _shifted(rhs_contract)),
                (lhs_batch, _shifted(rhs_batch)),
            )
        else:
            dimension_numbers = (
                (_shifted(lhs_contract), rhs_contract),
                (_shifted(lhs_batch), rhs_batch),
            )
        operands = list(site.operands)
        operands[1 - site.argument] = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        merged = dataclasses.replace(
            site,
            params={**site.params, "dimension_numbers": dimension_numbers},
            operands=tuple(operands),
            out=jax.ShapeDtypeStruct(cotangent.shape[1:], cotangent.dtype),
        )
        return merged, (x,), cotangent


def _shifted(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i + 1 for i in axes)


def _numerics(site: Site) -> dict[str, Any]:
    return {"precision": site.params.get("precision")}
