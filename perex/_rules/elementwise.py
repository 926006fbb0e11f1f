"""Sums and products, entry by entry, of a large parameter with what depends on the example.

A bias, a scale or a learnt position is small by nature, and ``vmap(grad)`` does such a use as well
as can be. This rule is for where the parameter's per-example gradients would be far larger than
what the equation computes: a penalty on all weights that is added to the loss (each example's
gradient is a multiple of the same array), a few positions sliced from a large table.

The gradient of a sum is the cotangent itself, which other sites share; that of a product is the
cotangent times the other factor. Both are added up along axes in which the parameter has length
one.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from perex._compat import primitives
from perex._rules import outer_product
from perex._rules.registry import Site
from perex._rules.scales import sum_squares

# Leaves with fewer entries are small by nature.
_LARGE = 1 << 14
# Estimated seconds to read one number from memory and use it, on two CPU cores, float32.
_SECONDS_PER_ENTRY = 5e-10


class SumRule:
    """Per-example gradients of an operand of ``add`` or ``sub``."""

    reads_inputs = False

    def pays(self, site: Site, leaf_size: int) -> bool:
        """Whether what a site brings home is no larger than the gradients of the largest leaf."""
        return leaf_size >= max(_LARGE, _entries(site))

    def per_example(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> jax.Array:
        """Returns ``[B, *parameter.shape]``, in at least float32 where terms add up."""
        del inputs
        if site.primitive is primitives.sub_p and site.argument == 1:
            cotangent = -cotangent
        return _summed(site, cotangent)

    def square_norm(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> jax.Array:
        """Returns the squared norms ``[B]``, of the gradients themselves."""
        gradients = self.per_example(site, inputs, cotangent)
        return sum_squares(gradients.astype(outer_product.accumulate_dtype(gradients.dtype)))

    def weighted_sum(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """Returns the weighted sum over examples, of the parameter's shape, at least float32."""
        return outer_product.sum_measured(self.per_example(site, inputs, cotangent), weights)

    def estimate(self, site: Site, batch_size: int) -> dict[str, float]:
        """Returns estimated seconds of each way to a clipped sum."""
        seconds = 2 * batch_size * _entries(site) * _SECONDS_PER_ENTRY
        return {"keep": 1.5 * seconds, "gram": seconds, "stream": 1.2 * seconds}


class ProductRule(SumRule):
    """Per-example gradients of an operand of ``mul``, or of the numerator of ``div``."""

    reads_inputs = True

    def pays(self, site: Site, leaf_size: int) -> bool:
        """Whether what a site brings home is no larger than the gradients of the largest leaf."""
        return leaf_size >= max(_LARGE, 2 * _entries(site))

    def covers(self, site: Site) -> str | None:
        """Returns why the rule does not apply, or None."""
        if site.primitive is primitives.div_p and site.argument == 1:
            return "the parameter is a denominator"
        return None

    def per_example(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> jax.Array:
        """Returns ``[B, *parameter.shape]``, in at least float32 where terms add up."""
        operation = jnp.divide if site.primitive is primitives.div_p else jnp.multiply
        return _summed(site, operation(cotangent, inputs[0]))


def _entries(site: Site) -> int:
    return math.prod(site.out.shape)


def _summed(site: Site, gradient: jax.Array) -> jax.Array:
    """Adds up ``[B, *out.shape]`` along the axes in which the parameter has length one."""
    shape = site.parameter.shape
    # jaxpr operands are of one rank, or scalars.
    axes = tuple(
        axis + 1
        for axis in range(len(site.out.shape))
        if not shape or shape[axis] != site.out.shape[axis]
    )
    if axes:
        dtype = outer_product.accumulate_dtype(gradient.dtype)
        gradient = jnp.sum(gradient.astype(dtype), axis=axes)
    return gradient.reshape(gradient.shape[0], *shape)
