"""The per-example rule of ``conv_general_dilated`` with a parameter as kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from perex._rules import outer_product
from perex._rules.certified import CertifiedNorms
from perex._rules.conv import choose, norms
from perex._rules.conv.choose import register_conv_algorithm
from perex._rules.conv.normal_form import (
    arrange_cotangent,
    arrange_input,
    describe,
    restore_kernel,
)

if TYPE_CHECKING:
    from perex._rules.registry import Site

__all__ = ["ConvRule", "describe", "register_conv_algorithm"]


class ConvRule:
    """Kernel gradients of any convolution; ``site.options["conv"]`` chooses the algorithm."""

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raises where ``options["conv"]`` means no algorithm, whether or not a loss convolves."""
        choose.check(options.get("conv", "auto"))

    def covers(self, site: Site) -> str | None:
        """None where the parameter is the kernel, else the reason why the rule does not apply."""
        return None if site.argument == 1 else "the parameter is the image, not the kernel"

    def per_example(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> jax.Array:
        """Kernel gradient of every example.

        Args:
          site: the convolution of one example.
          inputs: ``(x,)`` with ``x`` ``[B, *lhs.shape]``.
          cotangent: ``[B, *out.shape]``.

        Returns:
          ``[B, *kernel.shape]`` of the kernel's dtype.

        Raises:
          ValueError: the site's options name an unknown algorithm, or one that does not cover it.
        """
        conv = describe(site)
        batch = cotangent.shape[0]
        choice = site.options.get("conv", "auto")
        kernel = site.operands[1]
        name, _ = choose.resolve(conv, choice, batch)
        if conv.empty or batch == 0:
            return jnp.zeros((batch, *kernel.shape), kernel.dtype)
        x = arrange_input(site, conv, inputs[0])
        gradient = choose.per_example(conv, choice, x, arrange_cotangent(site, conv, cotangent))
        expected = (batch, *conv.kernel, conv.groups, conv.channels, conv.features)
        if gradient.shape != expected:
            raise ValueError(
                f"perex: the convolution algorithm {name!r} returned shape "
                f"{gradient.shape}, expected [B, *K, G, C, P] = {expected}."
            )
        return restore_kernel(site, conv, gradient.astype(kernel.dtype))

    def gram_norms(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> CertifiedNorms:
        """Norms ``[B]`` of the kernel gradients from inner products, with bounds.

        Args:
          site: the convolution of one example.
          inputs: ``(x,)`` with ``x`` ``[B, *lhs.shape]``.
          cotangent: ``[B, *out.shape]``.
        """
        return self._norms(choose.gram_norms, site, inputs, cotangent)

    def stream_norms(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> CertifiedNorms:
        """Norms ``[B]`` of kernel gradients that are computed and dropped, see `gram_norms`."""
        return self._norms(choose.stream_norms, site, inputs, cotangent)

    def _norms(
        self,
        norms_of: Callable[..., CertifiedNorms],
        site: Site,
        inputs: tuple[jax.Array, ...],
        cotangent: jax.Array,
    ) -> CertifiedNorms:
        conv = describe(site)
        batch = cotangent.shape[0]
        if conv.empty or batch == 0:
            return outer_product.zero_norms(batch, conv.dtype)
        x = arrange_input(site, conv, inputs[0])
        return norms_of(conv, x, arrange_cotangent(site, conv, cotangent))

    def estimate(self, site: Site, batch_size: int) -> dict[str, float]:
        """Estimated seconds on a CPU of the three ways to a clipped sum, ``keep, gram, stream``."""
        conv = describe(site)
        if conv.empty or batch_size == 0:
            return {"keep": 0.0, "gram": 0.0, "stream": 0.0}
        return norms.estimate(conv, batch_size)

    def describe(self, site: Site, batch_size: int) -> str:
        """The algorithm and the estimates in one line, for `perex.explain`."""
        return choose.explain(describe(site), site.options.get("conv", "auto"), batch_size)

    def weighted_sum(
        self,
        site: Site,
        inputs: tuple[jax.Array, ...],
        cotangent: jax.Array,
        weights: jax.Array,
    ) -> jax.Array:
        """Sum over examples of weight times kernel gradient, without the gradients themselves.

        Args:
          site: the convolution of one example.
          inputs: ``(x,)`` with ``x`` ``[B, *lhs.shape]``.
          cotangent: ``[B, *out.shape]``.
          weights: ``[B]``; an example of weight zero adds exactly zero, whatever it holds.

        Returns:
          ``kernel.shape``, at least float32.
        """
        return self._sum(choose.weighted_sum, site, inputs, cotangent, weights)

    def stream_sum(
        self,
        site: Site,
        inputs: tuple[jax.Array, ...],
        cotangent: jax.Array,
        weights: jax.Array,
    ) -> jax.Array:
        """The same of the gradients that `stream_norms` measures."""
        return self._sum(choose.stream_sum, site, inputs, cotangent, weights)

    def _sum(
        self,
        sum_of: Callable[..., jax.Array],
        site: Site,
        inputs: tuple[jax.Array, ...],
        cotangent: jax.Array,
        weights: jax.Array,
    ) -> jax.Array:
        conv = describe(site)
        if conv.empty or cotangent.shape[0] == 0:
            return jnp.zeros(site.operands[1].shape, conv.dtype)
        x = arrange_input(site, conv, inputs[0])
        result = sum_of(conv, x, arrange_cotangent(site, conv, cotangent), weights)
        return restore_kernel(site, conv, result)

    def merge_repeats(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> tuple[Site, tuple[jax.Array, ...], jax.Array]:
        """Folds repeated uses of a kernel into more images of one use.

        Args:
          site: the convolution of one example and one repeat.
          inputs: ``(x,)`` with ``x`` ``[B, R, *lhs.shape]``.
          cotangent: ``[B, R, *out.shape]``; gradients are to be summed over ``R``.

        Returns:
          ``(site, (x,), cotangent)`` of one convolution with ``R`` times as many images.
        """
        lhs_spec, _, out_spec = site.params["dimension_numbers"]
        groups = site.params["batch_group_count"]
        x = _fold(inputs[0], lhs_spec[0], groups)
        cotangent = _fold(cotangent, out_spec[0], 1)
        operands = (
            jax.ShapeDtypeStruct(x.shape[1:], site.operands[0].dtype),
            *site.operands[1:],
        )
        out = jax.ShapeDtypeStruct(cotangent.shape[1:], site.out.dtype)
        return dataclasses.replace(site, operands=operands, out=out), (x,), cotangent


def _fold(array: jax.Array, axis: int, groups: int) -> jax.Array:
    """Folds axis 1, ``R``, into the images of each batch group: ``[B, R, ...]`` to ``[B, ...]``."""
    batch, repeats = array.shape[:2]
    rest = list(array.shape[2:])
    images = rest[axis] // groups
    array = array.reshape(batch, repeats, *rest[:axis], groups, images, *rest[axis + 1 :])
    array = jnp.moveaxis(array, 1, 2 + axis)
    rest[axis] = groups * repeats * images
    return array.reshape(batch, *rest)
