"""Convolutions to test with, two oracles for their kernel gradients, and a way to draw more.

`loop` is the oracle of record: `jax.grad` of one example after the other in float64.
`numpy_gradient` shares nothing with JAX; it decides where JAX itself is in doubt (negative
padding).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from perex._rules.certified import CertifiedNorms
from perex._rules.conv import norms
from perex._rules.conv.normal_form import Convolution
from perex._rules.registry import Site


@dataclasses.dataclass(frozen=True)
class Case:
    """A convolution of one example and the number of examples; C and P are totals."""

    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    channels: int = 2
    features: int = 4
    batch: int = 3
    images: int = 1
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    interior: Any = 1
    groups: int = 1
    batch_groups: int = 1
    layouts: tuple[tuple[int, ...], ...] | None = None
    dtype: str = "float32"

    def _each(self, value: Any) -> tuple[Any, ...]:
        return (value,) * len(self.spatial) if isinstance(value, int) else tuple(value)

    @property
    def window(self) -> tuple[tuple[int, ...], ...]:
        """Strides, dilations and input dilations."""
        return tuple(self._each(v) for v in (self.stride, self.dilation, self.interior))

    def pads(self) -> tuple[tuple[int, int], ...]:
        """Padding as pairs; uneven SAME gives the high side more, SAME_LOWER the low side."""
        if not isinstance(self.padding, str):
            each = self._each(self.padding)
            return tuple((p, p) if isinstance(p, int) else tuple(p) for p in each)
        pads = []
        for n, k, s, d, i in zip(self.spatial, self.kernel, *self.window, strict=True):
            size, reach = (n - 1) * i + 1, (k - 1) * d + 1
            total = max((-(-size // s) - 1) * s + reach - size, 0) * (self.padding != "VALID")
            less, more = total // 2, total - total // 2
            pads.append((less, more) if self.padding != "SAME_LOWER" else (more, less))
        return tuple(pads)

    def out(self) -> tuple[int, ...]:
        """Output sizes by the formula; below 1 where the kernel does not fit."""
        return tuple(
            ((n - 1) * i + 1 + low + high - (k - 1) * d - 1) // s + 1
            for n, k, s, d, i, (low, high) in zip(
                self.spatial, self.kernel, *self.window, self.pads(), strict=True
            )
        )

    @property
    def negative(self) -> bool:
        """Whether some padding crops."""
        return any(p < 0 for pair in self.pads() for p in pair)

    def _lay(self, which: int, first: int, second: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
        spec = self._numbers()[which]
        shape = [0] * len(spec)
        for axis, size in zip(spec, (first, second, *sizes), strict=True):
            shape[axis] = size
        return tuple(shape)

    def _numbers(self) -> lax.ConvDimensionNumbers:
        rank = len(self.spatial)
        last = (0, rank + 1, *range(1, rank + 1))
        layouts = self.layouts or (last, (rank + 1, rank, *range(rank)), last)
        return lax.ConvDimensionNumbers(*layouts)

    def lhs_shape(self) -> tuple[int, ...]:
        return self._lay(0, self.images * self.batch_groups, self.channels, self.spatial)

    def kernel_shape(self) -> tuple[int, ...]:
        return self._lay(1, self.features, self.channels // self.groups, self.kernel)

    def apply(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """The convolution of one example."""
        stride, dilation, interior = self.window
        return lax.conv_general_dilated(
            x,
            kernel,
            stride,
            self.pads(),
            interior,
            dilation,
            self._numbers(),
            self.groups,
            self.batch_groups,
        )

    def site(self, **options: Any) -> Site:
        """The site of the kernel, as the library makes it from the equation."""
        args = [
            jax.ShapeDtypeStruct(s, self.dtype) for s in (self.lhs_shape(), self.kernel_shape())
        ]
        equation = jax.make_jaxpr(self.apply)(*args).jaxpr.eqns[-1]
        shapes = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
            for v in (*equation.invars, *equation.outvars)
        ]
        return Site(equation.primitive, equation.params, 1, tuple(shapes[:2]), shapes[2], options)

    def data(self, seed: int = 0, batch: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Inputs ``[B, *lhs]`` and cotangents ``[B, *out]``, exact in the case's dtype."""
        random = np.random.default_rng(seed)
        batch = self.batch if batch is None else batch
        out = jax.eval_shape(
            self.apply,
            jax.ShapeDtypeStruct(self.lhs_shape(), self.dtype),
            jax.ShapeDtypeStruct(self.kernel_shape(), self.dtype),
        )
        arrays = []
        for shape in (self.lhs_shape(), out.shape):
            values = random.normal(size=(batch, *shape))
            if self.dtype.startswith("complex"):
                values = values + 1j * random.normal(size=values.shape)
            arrays.append(np.asarray(jnp.asarray(values, self.dtype)))
        return arrays[0], arrays[1]


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def loop(case: Case, x: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
    """Gradients ``[B, *kernel]`` by `jax.grad` of single examples in float64."""
    with jax.enable_x64(True):
        dtype = _wide(x).dtype

        @jax.jit
        @jax.grad
        def gradient(kernel: jax.Array, x: jax.Array, cotangent: jax.Array) -> jax.Array:
            return jnp.sum(jnp.real(case.apply(x, kernel) * cotangent))

        kernel = jnp.zeros(case.kernel_shape(), dtype)
        rows = [
            np.asarray(gradient(kernel, jnp.asarray(a), jnp.asarray(b)))
            for a, b in zip(_wide(x), _wide(cotangent), strict=True)
        ]
    return np.stack(rows) if rows else np.zeros((0, *case.kernel_shape()), dtype)


def numpy_gradient(case: Case, x: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
    """Gradients ``[B, *kernel]`` from the definition, one kernel position after the other."""
    lhs_spec, rhs_spec, out_spec = case._numbers()
    rank, out = len(case.spatial), case.out()
    stride, dilation, interior = case.window
    x = _wide(x).transpose(0, *(1 + i for i in lhs_spec))  # [B, N, C, *S]
    cotangent = _wide(cotangent).transpose(0, *(1 + i for i in out_spec))
    batch = x.shape[0]
    per_group = case.channels // case.groups
    spread = np.zeros(
        (*x.shape[:3], *((n - 1) * i + 1 for n, i in zip(case.spatial, interior, strict=True))),
        x.dtype,
    )
    spread[(..., *(slice(None, None, i) for i in interior))] = x
    # [B, G, N, C', *S] and [B, G, N, P', *O] for feature groups and for batch groups.
    if case.batch_groups > 1:
        spread = spread.reshape(batch, case.batch_groups, case.images, *spread.shape[2:])
    else:
        spread = spread.reshape(batch, case.images, case.groups, per_group, *spread.shape[3:])
        spread = spread.swapaxes(1, 2)
    groups = case.groups * case.batch_groups
    cotangent = cotangent.reshape(batch, case.images, groups, case.features // groups, *out)
    cotangent = cotangent.swapaxes(1, 2)
    result = np.zeros((batch, groups, case.features // groups, per_group, *case.kernel), x.dtype)
    for position in itertools.product(*(range(k) for k in case.kernel)):
        view = np.zeros((*spread.shape[:4], *out), x.dtype)
        for place in itertools.product(*(range(o) for o in out)):
            source = [
                o * s + k * d - low
                for o, s, k, d, (low, _) in zip(
                    place, stride, position, dilation, case.pads(), strict=True
                )
            ]
            if all(0 <= a < n for a, n in zip(source, spread.shape[4:], strict=True)):
                view[(..., *place)] = spread[(..., *source)]
        flat = [v.reshape(*v.shape[:4], math.prod(out)) for v in (cotangent, view)]
        result[(..., *position)] = np.einsum("bgnpt,bgnct->bgpc", *flat)
    result = result.reshape(batch, case.features, per_group, *case.kernel)
    order = [0] * (rank + 2)
    for i, axis in enumerate(rhs_spec):
        order[axis] = 1 + i
    return result.transpose(0, *order)


NAMED = {
    "crop": Case((6,), (3,), stride=2),
    "crop_two_axes": Case((11, 13), (3, 2), stride=(2, 3)),
    "tall": Case((8, 1), (3, 1), 1, 1, dilation=(3, 1), layouts=((0, 1, 2, 3),) * 3, batch=1),
    "stride_above_kernel": Case((8, 8), (2, 2), 3, 6, padding=2, stride=4, dilation=3),
    "same_even_kernel": Case((7, 7), (4, 4), padding="SAME"),
    "same_even_size": Case((8, 8), (3, 3), padding="SAME", stride=2),
    "same_lower": Case((8, 8), (3, 3), padding="SAME_LOWER", stride=2),
    "depthwise_long": Case((64,), (5,), 16, 16, groups=16, padding=2),
    "depthwise_twice": Case((9, 9), (3, 3), 4, 8, groups=4, padding="SAME", images=2),
    "depthwise_strided": Case((9, 50), (3, 2), 2, 2, groups=2, stride=(2, 3), padding=1),
    "many_small": Case((4, 4), (2, 2), 2, 3, batch=300),
    "transposed": Case((4, 4, 4), (3, 3, 3), 4, 2, interior=2, padding=((2, 1),) * 3),
    "patches": Case((8, 12), (4, 4), 3, 5, stride=4),
    "dense": Case((5, 4), (5, 4), 3, 5),
    "pointwise": Case((5, 5), (1, 1), 3, 5, stride=2),
    "rank_0": Case((), (), 3, 5, images=4),
    "negative": Case((9, 8), (3, 2), padding=((-2, 1), (0, -1)), stride=(2, 1)),
    "negative_transposed": Case((5, 6), (2, 3), padding=((-1, 3), (-2, -1)), interior=(2, 3)),
    "cropped_away": Case((3,), (2,), padding=((-5, 6),)),
    "batch_groups": Case((6, 6), (3, 3), 3, 4, images=2, batch_groups=2, padding=1),
} | {
    f"two_groups_{stride}{pad}{dilation}{groups}": Case(
        (6, 6), (3, 3), 4, 6, 2, 4, stride, pad, dilation, groups=groups
    )
    for stride, pad, dilation, groups in itertools.product((1, 3), (0, 2), (1, 2), (1, 2))
}

_SIZES = {1: (st.integers(6, 10),), 2: (st.integers(11, 17),) * 2}
_SIZES[3] = (st.integers(3, 6), st.integers(6, 10), st.integers(6, 10))
_KERNELS = {1: [(1,), (2,), (3,)], 2: [(k, k) for k in (1, 2, 3, 4)] + [(3, 1), (1, 3)]}
_KERNELS[3] = [(k, k, k) for k in (1, 2, 3)] + [(1, 2, 3)]
_STRIDES = {1: [1, 2, 5], 2: [1, 2, 4, (2, 1)], 3: [1, 2, (1, 2, 3)]}
_DILATIONS = {1: [1, 2], 2: [1, 2, 3], 3: [1, (1, 2, 2)]}
_INTERIORS = {1: [1, 2, 3], 2: [1, 2, (2, 1)], 3: [1, 2]}


@st.composite
def cases(draw: st.DrawFn, rank: int) -> Case:
    """Draws a convolution from the grid."""
    channels = draw(st.sampled_from([1, 3, 32]))
    features = draw(st.sampled_from([2 * channels, max(1, channels // 2), channels]))
    shared = [g for g in range(1, 17) if channels % g == 0 and features % g == 0]
    groups = draw(st.sampled_from([*shared, channels if features % channels == 0 else 1]))
    batch_groups = 1
    if groups == 1 and rank < 3 and features % 2 == 0:
        batch_groups = draw(st.sampled_from([1, 2]))
    one = st.one_of(st.integers(0, 2), st.just((0, 1)), st.tuples(*[st.integers(-2, 2)] * 2))
    named = st.sampled_from(["SAME", "SAME_LOWER", "VALID"])
    order = st.permutations(range(rank + 2)).map(tuple)
    case = Case(
        spatial=draw(st.tuples(*_SIZES[rank])),
        kernel=draw(st.sampled_from(_KERNELS[rank])),
        channels=channels,
        features=features,
        batch=draw(st.integers(0, 4)),
        images=draw(st.sampled_from([1, 3 if rank < 3 else 2])),
        stride=draw(st.sampled_from(_STRIDES[rank])),
        padding=draw(st.one_of(named, st.tuples(*[one] * rank))),
        dilation=draw(st.sampled_from(_DILATIONS[rank])),
        interior=draw(st.sampled_from(_INTERIORS[rank])),
        groups=groups,
        batch_groups=batch_groups,
        layouts=draw(st.one_of(st.none(), st.tuples(order, order, order))),
        dtype=draw(st.sampled_from(["float32", "float32", "float64", "bfloat16", "complex64"])),
    )
    # A kernel larger than the image is an error of the user's, which JAX reports.
    if min(case.out()) < 1:
        case = dataclasses.replace(case, padding="SAME")
    return case


def norms_by(way: str, conv: Convolution, x: Any, cotangent: Any) -> CertifiedNorms:
    """Returns the norms by one way: "stream", "patches" or "pixels"."""
    if way == "stream":
        return norms.stream_norms(conv, x, cotangent)
    return norms.gram_norms(conv, x, cotangent, way)
