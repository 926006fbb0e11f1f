"""Work through a batch a few examples at a time, so that temporaries stay small.

The batch axis ``[B]`` is viewed as ``[chunk, steps]`` and the loop runs over the *second* axis. A
batch that is sharded over devices along its examples then stays where it is: each device holds a
contiguous block of examples, hence its own rows of the first axis, and every step takes the same
share of each of them. A loop over the first axis would gather one device's block after another.
The body is traced once whatever ``B`` is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import export, lax

from perex._compat import manual_axes, vary_over

_Carry = tuple[jax.Array, jax.Array]

# Measured in whole models on two CPU cores with 1 MiB of second-level cache each and 32 MiB of
# third-level cache: temporaries of up to 4 MiB are best made at once, without a loop; beyond, in
# chunks of about 2 MiB and of two examples at least. (A single layer whose arrays are in cache
# already likes three times as much. In a model, memory that is written anew costs more.)
_WHOLE_BYTES = 4 << 20
_CHUNK_BYTES = 2 << 20
_FEW, _FEW_BYTES = 2, 24 << 20
# What estimates take for a batch whose size is not known.
_UNKNOWN_SIZE = 1 << 10


def known_size(size: Any) -> int:
    """A size as a number, for estimates; a large one where it is a symbol (`jax.export`)."""
    return _UNKNOWN_SIZE if export.is_symbolic_dim(size) else size


def cache_chunk(batch: int, held: int, kept: int = 0) -> int:
    """Number of examples whose temporaries stay in a CPU's cache together.

    Args:
      batch: B.
      held: bytes of temporaries of one example.
      kept: bytes of its result, which exist for the whole batch in the end.

    Returns:
      A number from 1 to ``max(batch, 1)``; a batch of symbolic size is taken at once.
    """
    if export.is_symbolic_dim(batch):
        return cast(int, batch)
    # Beside a large result temporaries do not count, and a loop would write the result twice.
    if batch * held <= max(_WHOLE_BYTES, batch * kept // 4):
        return max(batch, 1)
    row = held + kept
    return min(batch, max(1, _CHUNK_BYTES // row, min(_FEW, _FEW_BYTES // row)))


def chunk_size(batch: int, wanted: int) -> int:
    """Number of examples to take at a time.

    A divisor of the batch close to ``wanted`` avoids padding; only where none lies between a half
    and twice of it the batch is padded. With several devices the chunk grows so that each
    of them keeps ``wanted`` examples of a sharded batch.

    Args:
      batch: number of examples.
      wanted: how many of them one device should work on at a time.

    Returns:
      A number from 1 to ``max(batch, 1)``.
    """
    if export.is_symbolic_dim(batch):  # The steps of a loop must be known.
        return cast(int, batch)
    wanted = max(1, wanted) * jax.local_device_count()
    if wanted >= batch:
        return max(batch, 1)
    divisors = [d for d in range(-(-wanted // 2), 2 * wanted + 1) if batch % d == 0]
    if not divisors:
        return wanted
    return min(divisors, key=lambda d: abs(math.log(d / wanted)))


def _split(array: jax.Array, chunk: int, steps: int) -> jax.Array:
    missing = chunk * steps - array.shape[0]
    if missing:
        filler = jnp.zeros((missing, *array.shape[1:]), array.dtype)
        array = jnp.concatenate([array, filler])
    return array.reshape(chunk, steps, *array.shape[1:])


def varying_zeros(shape: tuple[int, ...], dtype: Any, like: tuple[jax.Array, ...]) -> jax.Array:
    """Zeros which vary over the manual mesh axes of `like`, as a loop's carry in shard_map must."""
    axes = frozenset[str]().union(*(manual_axes(jax.typeof(array)) for array in like))
    return vary_over(jnp.zeros(shape, dtype), axes)


def _first() -> jax.Array:
    # Unsigned, because a signed index is checked for being negative, in a kernel of its own.
    return jnp.zeros((), jnp.uint32)


def _take(parts: tuple[jax.Array, ...], i: jax.Array) -> Iterator[jax.Array]:
    """The rows of step ``i``, ``[chunk, ...]`` of each ``[chunk, steps, ...]``."""
    return (lax.dynamic_index_in_dim(part, i, 1, keepdims=False) for part in parts)


def map_chunks(
    function: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], wanted: int
) -> jax.Array:
    """Applies a function of a batch to a few examples at a time.

    Args:
      function: takes arrays ``[b, ...]`` and returns ``[b, ...]``, row by row, for any ``b``. It is
        also called on rows of zeros, whose results are dropped.
      arrays: arrays ``[B, ...]``.
      wanted: number of examples at a time, see `chunk_size`.

    Returns:
      ``function(*arrays)``, ``[B, ...]``.
    """
    batch = arrays[0].shape[0]
    chunk = chunk_size(batch, wanted)
    if chunk is batch or chunk >= batch:
        return function(*arrays)
    steps = -(-batch // chunk)
    parts = tuple(_split(array, chunk, steps) for array in arrays)
    row = jax.eval_shape(function, *(jax.ShapeDtypeStruct(p[:, 0].shape, p.dtype) for p in parts))

    def step(carry: _Carry, _: None) -> tuple[_Carry, None]:
        i, result = carry
        rows = function(*_take(parts, i))
        return (i + 1, lax.dynamic_update_index_in_dim(result, rows, i, 1)), None

    start = varying_zeros((chunk, steps, *row.shape[1:]), row.dtype, arrays)
    (_, result), _ = lax.scan(step, (_first(), start), None, length=steps)
    result = result.reshape(chunk * steps, *row.shape[1:])
    return result if chunk * steps == batch else result[:batch]


def sum_chunks(
    function: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], wanted: int
) -> jax.Array:
    """Adds up a function of a batch over a few examples at a time.

    Args:
      function: takes arrays ``[b, ...]`` and returns a sum over their rows, of a shape without
        ``b``; rows of zeros must add zero.
      arrays: arrays ``[B, ...]``.
      wanted: number of examples at a time, see `chunk_size`.

    Returns:
      ``function(*arrays)``, to rounding.
    """
    batch = arrays[0].shape[0]
    chunk = chunk_size(batch, wanted)
    if chunk is batch or chunk >= batch:
        return function(*arrays)
    steps = -(-batch // chunk)
    parts = tuple(_split(array, chunk, steps) for array in arrays)
    total = jax.eval_shape(function, *(jax.ShapeDtypeStruct(p[:, 0].shape, p.dtype) for p in parts))

    def step(carry: _Carry, _: None) -> tuple[_Carry, None]:
        i, result = carry
        return (i + 1, result + function(*_take(parts, i))), None

    start = varying_zeros(total.shape, total.dtype, arrays)
    (_, result), _ = lax.scan(step, (_first(), start), None, length=steps)
    return result
