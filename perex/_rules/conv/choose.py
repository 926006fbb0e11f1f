"""Which algorithm a convolution gets: names, user's functions, and a model of their time.

The model counts what an algorithm does for one example: the products and the bytes it copies, at
rates measured on two CPU cores with AVX-512 (float32, jaxlib 0.12; 0.10 is much the same):

* a product of sides from 64 on runs at 200 to 350 GFLOP/s, which `product_seconds` models;
* copies in cache (patches, shifted views) move 40 GB/s, the first write to new memory 2 GB/s;
* a step of a loop costs 20 microseconds;
* a grouped convolution runs its products at a third of the rate of a plain one; with groups
  *inside* the example it fell below 1 MFLOP/s (a depthwise 3x3 layer of 32 channels: a minute), so
  the model keeps away from it there.

Milliseconds of both cores together, vmap(grad) and the algorithms, alternately in one run with
jaxlib 0.12 (F: multiplications and additions in 1e9; "s2": stride 2; B is 32 unless given; grouped
was not run on depthwise layers, which were timed in another run):

    layer                     F    vmap  unfold   taps  grouped  depthwise
    3-64 3x3 at 32x32      0.11    3.24    0.48   1.18     2.54
    64-64 3x3 at 32x32     2.42    50.3    8.59   12.3     35.3
    64-128 3x3 s2          1.21    35.7    4.36   6.22     20.1
    64-128 1x1 s2          0.13    5.33    0.73   1.04     3.98
    128-128 3x3 at 16x16   2.42    45.5    7.93   11.9     38.8
    256-256 3x3 at 8x8     2.42    83.9    24.2   32.9     78.5
    512-512 3x3 at 4x4     2.42     218    78.5    126      219
    16-64 3x3 at 32x32     0.60    14.0    4.79   4.59     10.0
    1-16 8x8 s2            0.01    0.58    0.17   0.66     0.39       3.14
    16-32 4x4 s2           0.01    0.36    0.19   0.26     0.41
    64-256 1x1 at 16x16    0.27    4.20    0.90   1.16     4.21
    64-64 k=5 length 1000  1.31    12.2    6.23   7.52     9.05
    4-16 3x3x3             0.23    28.8    1.61   3.37     11.2
    64-32 3x3 spread 2     1.21    39.1    5.67   10.4     19.6
    depthwise 3x3, 128 B16 0.04       -    14.2   10.7        -       3.20
    depthwise 7x7, 192 B16 0.08       -    21.5   25.1        -       8.13
    depthwise k=5, 64 B16  0.01       -    3.59   4.63        -       1.04

On other platforms nothing has been measured. There a loop over small chunks starves the device, so
chunks are bounded by memory alone; `unfold` is chosen because it needs only batched products, and
sums use the ordinary backward convolution.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax import export, lax

from perex._rules.certified import CertifiedNorms
from perex._rules.chunks import chunk_size, known_size
from perex._rules.conv import depthwise, grouped, norms, taps, unfold
from perex._rules.conv.normal_form import Convolution
from perex._rules.outer_product import CACHE, COPY, FRESH, product_seconds

Run = Callable[..., jax.Array]

_LOOP = 2.0e-5

# What the examples of a chunk may take together where there is no small cache to stay in.
DEVICE_BYTES = 1 << 29


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One way to compute kernel gradients.

    Attributes:
      per_example: ``(conv, x [B, N, *S, G, C], cotangent [B, N, *O, G, P]) -> [B, *K, G, C, P]``.
      covers: ``conv -> None`` or the reason why it does not apply.
      seconds: ``(conv, batch) -> seconds`` on a CPU, estimated; None keeps it out of ``"auto"``.
      chunk: ``(conv, batch) -> examples at a time`` on a CPU, for algorithms that take ``chunk=``.
    """

    per_example: Run
    covers: Callable[[Convolution], str | None] = lambda conv: None
    seconds: Callable[[Convolution, int], float] | None = None
    chunk: Callable[[Convolution, int], int] | None = None


def _output_seconds(conv: Convolution, batch: int) -> float:
    size = batch * conv.kernel_size * conv.itemsize
    return size / (CACHE if size < 16 << 20 else FRESH)


def _loop_seconds(batch: int, chunk: int) -> float:
    return _LOOP * (-(-batch // chunk_size(batch, chunk)))


def unfold_seconds(conv: Convolution, batch: int) -> float:
    """Patches written and read, and one product for each example and group."""
    product = product_seconds(conv.depth, conv.positions, conv.features, conv.itemsize)
    one = conv.groups * product + unfold.patch_seconds(conv)
    return (
        batch * one
        + _output_seconds(conv, batch)
        + _loop_seconds(batch, unfold.cache_chunk(conv, batch))
    )


def taps_seconds(conv: Convolution, batch: int) -> float:
    """For every kernel position a view copied, a product, and its part of the result copied."""
    product = product_seconds(conv.channels, conv.positions, conv.features, conv.itemsize)
    copied = conv.itemsize * conv.channels * (2 * conv.positions + conv.features)
    one = conv.taps * conv.groups * (product + copied / COPY)
    return (
        batch * one
        + _output_seconds(conv, batch)
        + _loop_seconds(batch, taps.cache_chunk(conv, batch))
    )


def grouped_seconds(conv: Convolution, batch: int) -> float:
    """A convolution with a group for each example: products at a third of the rate."""
    product = product_seconds(conv.depth, conv.positions, conv.features, conv.itemsize)
    # Groups inside the example: see the module.
    slow, start = (3.0 if conv.groups == 1 else 1000.0), 1e-4
    if batch == conv.groups == 1 and conv.channels >= 16 and len(conv.kernel) <= 2:
        # One ordinary convolution.
        slow, start = 1.3, 3e-5
    copied = conv.itemsize * conv.positions * (conv.channels + conv.features)
    one = conv.groups * (slow * product + copied / COPY)
    return start + batch * one + _output_seconds(conv, batch)


def depthwise_seconds(conv: Convolution, batch: int) -> float:
    """For every kernel position a pass over view and cotangent."""
    return (
        batch * depthwise.gradient_seconds(conv)
        + _output_seconds(conv, batch)
        + _loop_seconds(batch, depthwise.cache_chunk(conv, batch))
    )


ALGORITHMS: dict[str, Algorithm] = {
    "unfold": Algorithm(unfold.per_example, seconds=unfold_seconds, chunk=unfold.cache_chunk),
    "taps": Algorithm(taps.per_example, seconds=taps_seconds, chunk=taps.cache_chunk),
    "grouped": Algorithm(grouped.per_example, seconds=grouped_seconds),
    "depthwise": Algorithm(
        depthwise.per_example, depthwise.covers, depthwise_seconds, depthwise.cache_chunk
    ),
}


def register_conv_algorithm(name: str, fn: Run) -> None:
    """Registers an algorithm for per-example kernel gradients under a name for ``conv=``.

    Args:
      name: the name; one that is taken is replaced.
      fn: ``(conv, x, cotangent) -> gradient`` with ``conv`` the convolution's description (groups
        G, images N, channels C and features P of a group, spatial S, kernel K, out O, strides,
        dilation, interior, pads), ``x`` ``[B, N, *S, G, C]``, ``cotangent`` ``[B, N, *O, G, P]``
        and the gradient ``[B, *K, G, C, P]``. No example may influence another one.

    Raises:
      TypeError: ``fn`` is not callable.
      ValueError: ``name`` is empty or ``"auto"``.
    """
    if not callable(fn):
        raise TypeError(f"perex.register_conv_algorithm: fn must be callable, got {fn!r}.")
    if not isinstance(name, str) or name in ("", "auto"):
        raise ValueError(
            f"perex.register_conv_algorithm: {name!r} cannot be the name of an algorithm; "
            "give a non-empty string other than 'auto'."
        )
    ALGORITHMS[name] = Algorithm(fn)


def estimates(conv: Convolution, batch: int) -> dict[str, float]:
    """Estimated seconds on a CPU of every algorithm that ``"auto"`` may take, the best first."""
    found = {
        name: algorithm.seconds(conv, batch)
        for name, algorithm in ALGORITHMS.items()
        if algorithm.seconds is not None and algorithm.covers(conv) is None
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


def check(choice: Any) -> None:
    """Raises as `resolve` does where a value of ``conv=`` can mean no algorithm."""
    if callable(choice):
        return
    if not isinstance(choice, str):
        raise TypeError(
            f"perex: conv must be 'auto', the name of an algorithm or a function, got {choice!r}."
        )
    if choice not in ("auto", *ALGORITHMS):
        known = ", ".join(repr(name) for name in ("auto", *ALGORITHMS))
        raise ValueError(f"perex: unknown convolution algorithm {choice!r}; known are {known}.")


def resolve(conv: Convolution, choice: Any, batch: int) -> tuple[str, Algorithm]:
    """The algorithm that a value of ``conv=`` means on a CPU.

    Args:
      conv: the convolution.
      choice: ``"auto"``, a name, an algorithm (a function of three arguments, as in
        `register_conv_algorithm`) or a function of the description alone that returns one of these.
      batch: B.

    Returns:
      Name and algorithm.

    Raises:
      ValueError: the name is unknown or its algorithm does not cover this convolution.
      TypeError: ``choice`` is none of these.
    """
    if callable(choice):
        if _arity(choice) != 1:
            return _own(choice)
        choice = choice(conv)
        if callable(choice):
            return _own(choice)
    check(choice)
    if choice == "auto":
        names = estimates(conv, known_size(batch))
        # A number of groups cannot be a symbol (`jax.export`).
        is_known = not export.is_symbolic_dim(batch)
        choice = next(name for name in names if is_known or name != "grouped")
    reason = ALGORITHMS[choice].covers(conv)
    if reason is not None:
        raise ValueError(
            f"perex: the convolution algorithm {choice!r} does not cover {summary(conv)}: {reason}."
        )
    return choice, ALGORITHMS[choice]


def _own(function: Any) -> tuple[str, Algorithm]:
    return getattr(function, "__name__", repr(function)), Algorithm(function)


def _arity(function: Callable[..., Any]) -> int:
    """Number of positional arguments that a function must be given."""
    required = 0
    for parameter in inspect.signature(function).parameters.values():
        positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        required += positional and parameter.default is parameter.empty
    return required


def by_platform(cpu: Callable[..., Any], other: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Runs ``cpu`` where the program is lowered for a CPU, else ``other``."""
    return lax.platform_dependent(*arrays, cpu=cpu, default=other)


def per_example(conv: Convolution, choice: Any, x: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Kernel gradients ``[B, *K, G, C, P]`` by the chosen algorithm, see `resolve`."""
    batch = x.shape[0]
    name, algorithm = resolve(conv, choice, batch)
    run = functools.partial(algorithm.per_example, conv)
    other_name = name
    if choice == "auto" and name == "grouped":
        other_name = "unfold"
    other = ALGORITHMS[other_name] if other_name in ALGORITHMS else algorithm
    if other_name == name and (
        algorithm.chunk is None or chunk_size(batch, algorithm.chunk(conv, batch)) >= batch
    ):
        return run(x, cotangent)
    return by_platform(
        run,
        functools.partial(other.per_example, conv, chunk=device_chunk(conv)),
        x,
        cotangent,
    )


def weighted_sum(
    conv: Convolution, x: jax.Array, cotangent: jax.Array, weights: jax.Array
) -> jax.Array:
    """Weighted sum ``[*K, G, C, P]``: chunks of patches on a CPU, else one ordinary convolution."""
    summing = unfold
    if depthwise.covers(conv) is None:
        batch = known_size(x.shape[0])
        if depthwise_seconds(conv, batch) < unfold_seconds(conv, batch):
            summing = depthwise
    return by_platform(
        functools.partial(summing.weighted_sum, conv),
        functools.partial(grouped.weighted_sum, conv),
        x,
        cotangent,
        weights,
    )


def gram_norms(conv: Convolution, x: jax.Array, cotangent: jax.Array) -> CertifiedNorms:
    """Norms from inner products, see `norms.gram_norms`, in chunks by platform."""
    return _by_chunk(norms.gram_norms, norms.gram_chunk, conv, x, cotangent)


def stream_norms(conv: Convolution, x: jax.Array, cotangent: jax.Array) -> CertifiedNorms:
    """Norms of gradients that are dropped, see `norms.stream_norms`, in chunks by platform."""
    return _by_chunk(norms.stream_norms, norms.stream_chunk, conv, x, cotangent)


def stream_sum(
    conv: Convolution, x: jax.Array, cotangent: jax.Array, weights: jax.Array
) -> jax.Array:
    """Weighted sum of the gradients that `stream_norms` measures, in the same chunks."""
    return _by_chunk(norms.stream_sum, norms.stream_chunk, conv, x, cotangent, weights)


def _by_chunk(
    run: Callable[..., Any],
    cache_chunk: Callable[[Convolution, int], int],
    conv: Convolution,
    *arrays: jax.Array,
) -> Any:
    batch = arrays[0].shape[0]
    cpu = functools.partial(run, conv)
    if chunk_size(batch, cache_chunk(conv, batch)) >= batch:
        return cpu(*arrays)
    # A quarter of the batch keeps a device busy and never holds all gradients.
    return by_platform(cpu, functools.partial(run, conv, chunk=-(-batch // 4)), *arrays)


def device_chunk(conv: Convolution) -> int:
    """Examples at a time where only memory bounds them."""
    return max(1, DEVICE_BYTES // max(1, unfold.patch_bytes(conv)))


def summary(conv: Convolution) -> str:
    """A convolution in a few words, as in ``3x3 stride 2x2, 4 groups of 16 to 32 channels``."""

    def by(sizes: tuple[int, ...]) -> str:
        return "x".join(map(str, sizes)) or "scalar"

    text = by(conv.kernel)
    for word, sizes in (
        ("stride", conv.strides),
        ("dilation", conv.dilation),
        ("input dilation", conv.interior),
    ):
        if any(size != 1 for size in sizes):
            text += f" {word} {by(sizes)}"
    groups = f"{conv.groups} groups of " if conv.groups > 1 else ""
    return f"{text}, {groups}{conv.channels} to {conv.features} channels, output {by(conv.out)}"


def explain(conv: Convolution, choice: Any, batch: int) -> str:
    """The choice and the estimates in one line.

    Args:
      conv: the convolution.
      choice: the value of ``conv=``.
      batch: B.

    Returns:
      For instance ``unfold by estimate (unfold 1.2 ms, taps 1.9 ms, grouped 3.1 ms), 3x3, ...``.
    """
    name, _ = resolve(conv, choice, batch)
    seconds = estimates(conv, batch)
    listed = ", ".join(f"{key} {1e3 * value:.3g} ms" for key, value in seconds.items())
    reason = "by estimate" if choice == "auto" else "as asked; estimates"
    return f"{name} {reason} ({listed}), {summary(conv)}"
