"""Draw convolutions at random and check their per-example gradients by the definition.

    python tests/random_convolutions.py --count=300
    python tests/random_convolutions.py --seed=1 --first=4711 --count=1     # one draw again

A draw is a convolution of any rank to 3, its windows, paddings, groups, layout and dtype, perhaps a
mask on its kernel, and an algorithm. What perex computes is compared with sums in numpy, in
float64, taken from the definition of a convolution one kernel position after the other. Nothing
of jax or perex stands in them. The tolerance is a bound of the rounding errors of each entry, so
that an entry to which nothing adds must be exactly zero.

Arrays are small and each draw is one program that is compiled at the lowest level of effort, since
compiling takes most of the time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gc
import itertools
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import lax

import perex
from perex._rules.conv.choose import ALGORITHMS

# What a draw takes is nearly all compiling.
COMPILER = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# Programs that are held until jax's caches are cleared.
_KEPT = 200

_LARGEST_SPATIAL = (0, 9, 6, 4)
_LARGEST_KERNEL = (0, 5, 4, 3)
_DTYPES = ("float32",) * 4 + ("bfloat16", "float16", "float64", "complex64")


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask on the kernel.

    Attributes:
      acts: bool, of a shape that broadcasts to the kernel's.
      form: how it is applied, a name in `MASKED`.
      known: whether it is a constant of the program, else it is an argument.
      poisoned: whether weights that are masked, and inputs that only they read, are NaN.
    """

    acts: np.ndarray
    form: str
    known: bool
    poisoned: bool


@dataclasses.dataclass(frozen=True)
class Draw:
    """One convolution and what to compute of it; channels and features are those of a group."""

    batch: int
    images: int
    groups: int
    batch_groups: int
    channels: int
    features: int
    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    interiors: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    layouts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    dtype: str
    algorithm: str
    result: str
    mask: Mask | None = None

    @property
    def out(self) -> tuple[int, ...]:
        """Output sizes; none is negative."""
        axes = zip(
            self.spatial, self.kernel, self.strides, self.dilations, self.interiors, self.pads,
            strict=True,
        )  # fmt: skip
        return tuple(
            max(0, ((n - 1) * i + 1 + sum(p) - ((k - 1) * d + 1)) // s + 1)
            for n, k, s, d, i, p in axes
        )

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of the input, the kernel and the result of one example."""
        features = self.features * self.groups * self.batch_groups
        logical = (
            (self.images * self.batch_groups, self.channels * self.groups, *self.spatial),
            (features, self.channels, *self.kernel),
            (self.images, features, *self.out),
        )
        return tuple(
            tuple(sizes[layout.index(axis)] for axis in range(len(layout)))
            for layout, sizes in zip(self.layouts, logical, strict=True)
        )

    def convolve(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """The convolution of one example."""
        return lax.conv_general_dilated(
            x, kernel, self.strides, self.pads, self.interiors, self.dilations,
            lax.ConvDimensionNumbers(*self.layouts), self.groups, self.batch_groups,
        )  # fmt: skip


def _integer(m: Any) -> Any:
    return m.astype(np.int32)


MASKED = {
    "w * bool": lambda w, m: w * m,
    "int * w": lambda w, m: _integer(m) * w,
    "float * w": lambda w, m: lax.stop_gradient(m.astype(w.dtype)) * w,
    "where": lambda w, m: jnp.where(m, w, 0),
    "where not": lambda w, m: jnp.where(jnp.logical_not(m), 0, w),
    "where and product": lambda w, m: jnp.where(m, w, 0) * m,
}


def draw(seed: int, index: int) -> Draw:
    """Returns the draw with this index, whatever the others are."""
    random = np.random.default_rng((seed, index))
    one_of = lambda options: options[random.integers(len(options))]  # noqa: E731
    rank = one_of((0, 1, 1, 2, 2, 2, 3))

    def each(*options: int) -> tuple[int, ...]:
        if random.random() < 0.4:
            return (1,) * rank
        return tuple(one_of(options) for _ in range(rank))

    spatial = tuple(int(random.integers(1, _LARGEST_SPATIAL[rank] + 1)) for _ in range(rank))
    kernel = tuple(int(random.integers(1, _LARGEST_KERNEL[rank] + 1)) for _ in range(rank))
    groups, batch_groups = one_of(((1, 1), (1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3)))
    while math.prod(kernel) > 9 and random.random() < 0.7:
        # Each position adds to the program of some algorithms.
        kernel = tuple((k + 1) // 2 for k in kernel)
    found = Draw(
        batch=one_of((1, 2, 3, 4, 5)),
        images=one_of((1, 1, 1, 2, 3)),
        groups=groups,
        batch_groups=batch_groups,
        channels=one_of((1, 1, 2, 3, 5)),
        features=one_of((1, 1, 2, 3, 4)),
        spatial=spatial,
        kernel=kernel,
        strides=each(1, 2, 3, 4),
        dilations=each(1, 2, 3),
        interiors=each(1, 2, 3),
        pads=((0, 0),) * rank,
        layouts=_layouts(random, rank),
        dtype=one_of(_DTYPES),
        algorithm=one_of(("auto", *ALGORITHMS)),
        result=one_of(("gradients",) * 10 + ("norms", "sum")),
    )
    pads = []
    for k, d in zip(kernel, found.dilations, strict=True):
        reach = (k - 1) * d + 1
        pairs = (
            (0, 0), (0, 0), (1, 1), (reach // 2, (reach - 1) // 2), (reach - 1, reach - 1),
            (0, reach), (reach + 1, reach), (-1, 0), (0, -1), (-2, -1), (-1, reach), (reach, -2),
            (-3, 2),
        )  # fmt: skip
        pads.append(one_of(pairs))
    found = dataclasses.replace(found, pads=tuple(pads))
    # A kernel that fits nowhere has no result: few draws stay so. JAX refuses to crop all and more.
    keep = random.random() < 0.03
    pads = [
        (low, high if o or (keep and n + low + high >= 0) else high + k * d + 3)
        for n, (low, high), o, k, d in zip(
            spatial, pads, found.out, kernel, found.dilations, strict=True
        )
    ]
    found = dataclasses.replace(found, pads=tuple(pads))
    if random.random() < 0.4:
        found = dataclasses.replace(found, mask=_mask(random, found))
    return found


def _layouts(random: np.random.Generator, rank: int) -> Any:
    if random.random() < 0.3:
        last = (0, rank + 1, *range(1, rank + 1))
        return last, (rank + 1, rank, *range(rank)), last
    return tuple(tuple(map(int, random.permutation(rank + 2))) for _ in range(3))


def _mask(random: np.random.Generator, draw: Draw) -> Mask:
    shape = draw.shapes[1]
    kind = random.integers(3)
    if kind == 0:
        # What comes first in raster order, or what does not.
        taps = np.arange(math.prod(draw.kernel)) < random.integers(math.prod(draw.kernel) + 1)
        taps = taps.reshape(1, 1, *draw.kernel) ^ (random.random() < 0.2)
        acts = taps.transpose(np.argsort(draw.layouts[1]))
    else:
        sizes = [n if kind == 1 or random.random() < 0.5 else 1 for n in shape]
        acts = random.random(sizes) < random.choice([0.3, 0.6, 0.9])
    if random.random() < 0.3:
        acts = np.broadcast_to(acts, shape)
    while acts.ndim and acts.shape[0] == 1 and random.random() < 0.5:
        acts = acts[0]
    return Mask(
        np.ascontiguousarray(acts).reshape(acts.shape),
        list(MASKED)[random.integers(len(MASKED))],
        bool(random.random() < 0.5),
        bool(random.random() < 0.5),
    )


def _wide(array: np.ndarray, layout: tuple[int, ...]) -> np.ndarray:
    """An array ``[B, ...]`` in float64, its axes in the order of a layout."""
    array = array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    return array.transpose(0, *(1 + axis for axis in layout))


def _reads(draw: Draw) -> Iterator[tuple[tuple[int, ...], Any, Any]]:
    """Yields for each kernel position what it reads: the results and the inputs, index by index."""
    along = []
    for axis, size in enumerate(draw.kernel):
        rows = []
        for k in range(size):
            place = np.arange(draw.out[axis]) * draw.strides[axis]
            place = place + k * draw.dilations[axis] - draw.pads[axis][0]
            inside = (place >= 0) & (place <= (draw.spatial[axis] - 1) * draw.interiors[axis])
            results = np.flatnonzero(inside & (place % draw.interiors[axis] == 0))
            rows.append((results, place[results] // draw.interiors[axis]))
        along.append(rows)
    for position in itertools.product(*map(range, draw.kernel)):
        pairs = [rows[k] for rows, k in zip(along, position, strict=True)]
        yield position, np.ix_(*(p[0] for p in pairs)), np.ix_(*(p[1] for p in pairs))


def _by_groups(draw: Draw, x: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs ``[B, G, C, N, *S]`` and results ``[B, G, P, N, *O]``."""
    batch, groups = x.shape[0], draw.groups * draw.batch_groups
    if draw.batch_groups > 1:
        x = x.reshape(batch, groups, draw.images, draw.channels, *draw.spatial)
        x = x.swapaxes(2, 3)
    else:
        x = x.reshape(batch, draw.images, groups, draw.channels, *draw.spatial)
        x = np.moveaxis(x, 1, 3)
    features = features.reshape(batch, draw.images, groups, draw.features, *draw.out)
    return x, np.moveaxis(features, 1, 3)


def gradients(draw: Draw, x: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
    """Kernel gradients ``[B, *kernel]`` by the definition, in float64."""
    rows, columns = _by_groups(draw, _wide(x, draw.layouts[0]), _wide(cotangent, draw.layouts[2]))
    lead = columns.shape[:3]
    result = np.zeros((*lead, draw.channels, *draw.kernel), np.result_type(rows, columns))
    for position, results, inputs in _reads(draw):
        seen = columns[(..., *results)].reshape(*lead, -1)
        read = rows[(..., *inputs)].reshape(*rows.shape[:3], -1)
        result[(..., *position)] = seen @ read.swapaxes(-1, -2)
    result = result.reshape(lead[0], -1, draw.channels, *draw.kernel)
    return result.transpose(0, *(1 + np.argsort(draw.layouts[1])))


def only_masked(draw: Draw, acts: np.ndarray) -> np.ndarray:
    """Which inputs ``[*lhs]`` are read, but by masked kernel entries alone."""
    groups = draw.groups * draw.batch_groups
    acts = acts.transpose(draw.layouts[1])
    acts = acts.reshape(groups, draw.features, draw.channels, *draw.kernel).any(1)
    x = np.zeros((1, draw.images * draw.batch_groups, draw.channels * draw.groups, *draw.spatial))
    read, acting = np.zeros_like(x, bool), np.zeros_like(x, bool)
    nothing = np.zeros((1, draw.images, groups * draw.features, *draw.out))
    shared = [_by_groups(draw, array, nothing)[0] for array in (read, acting)]
    for position, _, inputs in _reads(draw):
        place = (..., *inputs)
        shared[0][place] = True
        shared[1][place] |= acts[(None, ..., None, *position)].reshape(
            1, groups, draw.channels, 1, *(1,) * len(draw.kernel)
        )
    alone = (shared[0] & ~shared[1])[0]  # [G, C, N, *S]
    if draw.batch_groups > 1:
        alone = alone.swapaxes(1, 2)
    else:
        alone = np.moveaxis(alone, 2, 0)
    alone = alone.reshape(x.shape[1:])
    return alone.transpose(np.argsort(draw.layouts[0]))


def data(draw: Draw, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Kernel, inputs ``[B, *lhs]`` and cotangents ``[B, *out]``, in the dtype of the draw."""
    random = np.random.default_rng(seed)
    lhs, kernel, out = draw.shapes
    arrays = []
    for shape in (kernel, (draw.batch, *lhs), (draw.batch, *out)):
        values = random.standard_normal(shape)
        if draw.dtype.startswith("complex"):
            values = values + 1j * random.standard_normal(shape)
        arrays.append(values.astype(jnp.dtype(draw.dtype)))
    return arrays[0], arrays[1], arrays[2]


def _program(draw: Draw, clip: float) -> Any:
    """The function that computes, with perex, all that is compared."""
    mask = draw.mask

    def loss(kernel: jax.Array, x: jax.Array, cotangent: jax.Array, acts: Any) -> jax.Array:
        if mask is not None:
            kernel = MASKED[mask.form](kernel, jnp.asarray(mask.acts) if mask.known else acts)
        product = lax.mul(draw.convolve(x, kernel), cotangent)
        return jnp.sum(lax.real(product) if jnp.iscomplexobj(product) else product)

    name = draw.algorithm
    if name == "depthwise":
        covers = ALGORITHMS[name].covers
        algorithm: Any = lambda conv: name if covers(conv) is None else "auto"  # noqa: E731
    else:
        algorithm = name

    options: dict[str, Any] = {"in_axes": (None, 0, 0, None), "conv": algorithm}

    def run(*args: Any) -> dict[str, Any]:
        if draw.result == "norms":
            return {"norms": perex.grad_norms(loss, **options)(*args)}
        if draw.result == "sum":
            total, stats = perex.clipped_grad(loss, clip, **options)(*args)
            return {"sum": total, "norms": stats.norms}
        return {"gradients": perex.grad(loss, **options)(*args)}

    return run


def wrong(draw: Draw, seed: int = 0) -> str | None:
    """Computes a draw by perex and by the definition, and compares.

    Args:
      draw: the convolution.
      seed: of its data.

    Returns:
      None where all is right, else what is not.
    """
    kernel, x, cotangent = data(draw, seed)
    acts = np.broadcast_to(True if draw.mask is None else draw.mask.acts, kernel.shape)
    expected = np.where(acts, gradients(draw, x, cotangent), 0)
    scale = np.where(acts, gradients(draw, abs(x), abs(cotangent)), 0)
    axes = tuple(range(1, expected.ndim))
    norms = np.sqrt((abs(expected) ** 2).sum(axes))
    clip = float(np.median(norms)) or 1.0
    if draw.mask is not None and draw.mask.poisoned:
        kernel = np.where(acts, kernel, np.nan).astype(kernel.dtype)
        x = np.where(only_masked(draw, acts), np.nan, x).astype(x.dtype)
    args = kernel, x, cotangent, None if draw.mask is None else draw.mask.acts
    with jax.enable_x64(draw.dtype == "float64"):
        run = jax.jit(_program(draw, clip), compiler_options=COMPILER)
        found = jax.tree.map(np.asarray, run(*args))

    # The errors of a sum of n products are at most n u times the sum of their absolute values,
    # whatever the order; complex products are four real ones, of parts of the absolute values.
    wide = jnp.promote_types(draw.dtype, jnp.float32)
    unit = float(jnp.finfo(wide).eps) / 2 * (4 if draw.dtype.startswith("complex") else 1)
    terms = draw.images * math.prod(draw.out) + 2
    bound = 2 * terms * unit * scale
    if wide != draw.dtype:
        # The result is rounded to the type of the kernel, maybe to a subnormal number.
        info = jnp.finfo(draw.dtype)
        bound += (scale > 0) * (float(info.eps) / 2 * abs(expected) + 2.0**-24)
    if "gradients" in found:
        return _far("gradients", found["gradients"], expected, bound, draw.dtype)
    # Squares: by the gradients' errors, or where they come from inner products, by those of these.
    squares, total = norms**2, (scale**2).sum(axes)
    error = (2 * abs(expected) * bound + bound**2).sum(axes)
    error += 4 * (terms + math.prod(kernel.shape)) * unit * total
    complaint = _far("squared norms", found["norms"] ** 2, squares, error)
    if complaint or draw.result == "norms":
        return complaint
    factors = np.minimum(1, clip / np.where(found["norms"] > 0, found["norms"], np.inf))
    factors = np.where(found["norms"] > 0, factors, 1)
    # Clipping aims below C by up to 2**-10 of it, by its contract.
    bound = np.tensordot(factors, bound + abs(expected) * (2.0**-9 + terms * unit), 1)
    return _far("sum", found["sum"], np.tensordot(factors, expected, 1), bound)


def _far(
    name: str, found: np.ndarray, expected: np.ndarray, bound: np.ndarray, dtype: Any = None
) -> str | None:
    """Says where a result differs by more than a bound, or nothing."""
    if found.shape != expected.shape or (dtype is not None and found.dtype != dtype):
        return f"{name}: {found.dtype}{list(found.shape)}, expected {list(expected.shape)}"
    error = abs(found.astype(expected.dtype) - expected)
    places = np.argwhere(~(error <= bound))
    if not len(places):
        return None
    first = tuple(map(int, places[0]))
    return (
        f"{name} at {len(places)} of {error.size} places; at {first} {found[first]}, expected "
        f"{expected[first]:.8g} within {bound[first]:.1e}"
    )


def complaint_of(seed: int, index: int) -> str | None:
    """Returns a line that says what is wrong with a draw and how to repeat it, or None."""
    drawn = draw(seed, index)
    try:
        complaint = wrong(drawn, index)
    except Exception as error:  # whatever it is, it is reported with its draw
        complaint = f"{type(error).__name__}: {error}"
    if complaint is None:
        return None
    text = " ".join(repr(drawn).split())
    return f"wrong: --seed={seed} --first={index} --count=1: {complaint}; {text}"


def check(seed: int, indices: range) -> Iterator[str | None]:
    """Yields `complaint_of` for each index; memory stays bounded."""
    for number, index in enumerate(indices):
        if number % _KEPT == _KEPT - 1:
            jax.clear_caches()
            gc.collect()
        yield complaint_of(seed, index)


def _check_part(seed: int, indices: range) -> list[str | None]:
    return list(check(seed, indices))


def _all(seed: int, indices: range, workers: int) -> Iterator[str | None]:
    if workers == 1:
        yield from check(seed, indices)
        return
    context = multiprocessing.get_context("spawn")
    parts = [indices[i : i + _KEPT] for i in range(0, len(indices), _KEPT)]
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for complaints in pool.map(functools.partial(_check_part, seed), parts):
            yield from complaints


def define_flags() -> None:
    """Defines the flags of the program; a test that imports it has no use for them."""
    integer = functools.partial(flags.DEFINE_integer, lower_bound=0)
    integer("count", 300, "how many convolutions")
    integer("seed", 0, "seed of all draws")
    integer("first", 0, "index of the first draw")
    integer("workers", 1, "number of processes", lower_bound=1)
    integer("progress", 1000, "draws from one line of progress to the next", lower_bound=1)


def main(argv: list[str]) -> None:
    """Draws, checks, and says how many were wrong."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    values = flags.FLAGS
    start, count, failures = time.perf_counter(), 0, 0
    indices = range(values.first, values.first + values.count)
    for complaint in _all(values.seed, indices, values.workers):
        count += 1
        if complaint is not None:
            failures += 1
            print(complaint, flush=True)
        if count % values.progress == 0:
            each = 1e3 * (time.perf_counter() - start) / count
            print(f"{count} done, {failures} wrong, {each:.0f} ms each", flush=True)
    print(f"{count} convolutions, {failures} wrong")
    sys.exit(failures > 0)


if __name__ == "__main__":
    define_flags()
    app.run(main)
