"""Grouped: the convolution's backward pass as one convolution, with examples as groups.

The kernel gradient

    dkernel[k, c, p] = sum_{n, o} padded(x)[n, o * stride + k * dilation, c] * cotangent[n, o, p]

is itself a convolution in which ``x`` is the image and the cotangent is the kernel: ``k`` is now
the output position and ``o`` the position in the window, so stride and dilation change roles. Input
channels become the batch, images inside the example become the channels that are summed over, and
every example and group is a group of its own (Rochette et al. 2019, arXiv:1912.06015).

Why the plain form of this returns more than the kernel, and why the surplus is cropped from the
right: a forward convolution of an axis of length L has
O = floor((L - (K - 1) * dilation - 1) / stride) + 1 outputs, and the floor drops up to
``stride - 1`` entries on the right, which no output reads. The backward convolution, whose window
is the cotangent spread by ``stride``, sees them: it has
floor((L - (O - 1) * stride - 1) / dilation) + 1 outputs, which is K plus up to
floor((stride - 1) / dilation), so up to ``stride - 1`` more than the kernel. Its output ``k`` pairs
the entry ``o * stride + k * dilation`` with the cotangent at ``o``. That is the sum above for the
true kernel positions ``k < K``, counted from the left; the outputs after them pair dropped entries
with cotangents which these never had a part in, and mean nothing. So the first K are the gradient
(Opacus PR #245 found the missing crop). Cropping the *input* on the right, to
(O - 1) * stride + (K - 1) * dilation + 1 entries, gives the same numbers without computing the
surplus: the normal form has done so already, and here the size comes out as K.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from perex._rules.conv.normal_form import Convolution, pad_input
from perex._rules.conv.unfold import weigh

# XLA on the CPU has a grouped convolution for these types alone. For others it multiplies every
# group with every group and masks the result, so 0 * NaN would carry NaN between examples, and
# between groups, of which a mask can hide some entries.
_GROUPED_ON_CPU = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64)


def per_example(conv: Convolution, x: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Kernel gradients of every example.

    Args:
      conv: the convolution.
      x: ``[B, N, *S, G, C]``.
      cotangent: ``[B, N, *O, G, P]``.

    Returns:
      ``[B, *K, G, C, P]`` of type ``conv.dtype``.
    """
    return _by_groups(conv, x.astype(conv.dtype), cotangent.astype(conv.dtype))


def weighted_sum(
    conv: Convolution, x: jax.Array, cotangent: jax.Array, weights: jax.Array
) -> jax.Array:
    """Sum over examples of weight times kernel gradient: the ordinary backward convolution.

    Args:
      conv: the convolution.
      x: ``[B, N, *S, G, C]``.
      cotangent: ``[B, N, *O, G, P]``.
      weights: ``[B]``; an example of weight zero adds exactly zero, whatever it holds.

    Returns:
      ``[*K, G, C, P]`` of type ``conv.dtype``.
    """
    x, cotangent = weigh(conv, x, cotangent, weights)
    x = x.reshape(1, -1, *x.shape[2:])
    cotangent = cotangent.reshape(1, -1, *cotangent.shape[2:])
    return _by_groups(conv, x, cotangent)[0]


def _by_groups(conv: Convolution, x: jax.Array, cotangent: jax.Array) -> jax.Array:
    """As `_convolve`, and no example and no group touches another one on any platform."""

    def one_by_one(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        single = dataclasses.replace(conv, groups=1)

        def one(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
            return _convolve(single, pair[0][None], pair[1][None])[0]

        def split(array: jax.Array) -> jax.Array:  # [b, N, ..., G, C] -> [(b, G), N, ..., 1, C]
            array = jnp.expand_dims(jnp.moveaxis(array, -2, 1), -2)
            return array.reshape(-1, *array.shape[2:])

        result = lax.map(one, (split(x), split(cotangent)))
        result = result.reshape(x.shape[0], conv.groups, *result.shape[1:])
        return jnp.moveaxis(result, 1, -4)[..., 0, :, :]

    alone = x.shape[0] == conv.groups == 1
    if alone or any(conv.dtype == dtype for dtype in _GROUPED_ON_CPU):
        return _convolve(conv, x, cotangent)
    return lax.platform_dependent(
        x, cotangent, cpu=one_by_one, default=functools.partial(_convolve, conv)
    )


def _convolve(conv: Convolution, x: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Kernel gradients ``[b, *K, G, C, P]``, with any number of images in both arrays."""
    x = pad_input(conv, x)
    rank = len(conv.kernel)
    batch, images = x.shape[0], x.shape[1]
    # [b, N, *S, G, C] -> [C, *S, (b, G, N)] and [b, N, *O, G, P] -> [*O, N, (b, G, P)]
    x = jnp.transpose(x, (3 + rank, *range(2, 2 + rank), 0, 2 + rank, 1))
    x = x.reshape(*x.shape[: 1 + rank], batch * conv.groups * images)
    cotangent = jnp.transpose(cotangent, (*range(2, 2 + rank), 1, 0, 2 + rank, 3 + rank))
    cotangent = cotangent.reshape(*cotangent.shape[: 1 + rank], -1)
    spatial = tuple(range(1, 1 + rank))
    numbers = lax.ConvDimensionNumbers(
        lhs_spec=(0, 1 + rank, *spatial),
        rhs_spec=(1 + rank, rank, *range(rank)),
        out_spec=(0, 1 + rank, *spatial),
    )
    result = lax.conv_general_dilated(
        x,
        cotangent,
        window_strides=conv.dilation,
        padding=((0, 0),) * rank,
        rhs_dilation=conv.strides,
        dimension_numbers=numbers,
        feature_group_count=batch * conv.groups,
        precision=conv.precision,
    )
    result = result.reshape(conv.channels, *conv.kernel, batch, conv.groups, conv.features)
    return jnp.transpose(result, (1 + rank, *range(1, 1 + rank), 2 + rank, 0, 3 + rank))
