"""Chunked loops: any batch size, remainders, derivatives, sharded batches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from perex._rules import chunks


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)


@pytest.mark.parametrize("batch", [0, 1, 2, 7, 12, 13, 127])
@pytest.mark.parametrize("wanted", [1, 3, 4, 50, 1000])
def test_map_and_sum(batch: int, wanted: int, one_device: None) -> None:
    rows = jnp.arange(batch * 3.0).reshape(batch, 3) + 1
    sizes = set()

    def double(a: jax.Array, b: jax.Array) -> jax.Array:
        sizes.add(a.shape[0])
        return jnp.stack([a * b, a + b], axis=1)

    expected = np.stack([rows * rows, rows + rows], axis=1)
    np.testing.assert_array_equal(chunks.map_chunks(double, (rows, rows), wanted), expected)
    total = chunks.sum_chunks(lambda a, b: double(a, b).sum(0), (rows, rows), wanted)
    np.testing.assert_allclose(total, expected.sum(0), rtol=1e-5)
    assert sizes == {min(batch, chunks.chunk_size(batch, wanted))}
    assert max(sizes) <= min(2 * wanted, max(batch, 1))


def test_chunk_size_prefers_divisors(one_device: None) -> None:
    assert chunks.chunk_size(32, 5) == 4
    assert chunks.chunk_size(300, 70) == 75
    assert chunks.chunk_size(13, 4) == 4
    assert chunks.chunk_size(13, 13) == chunks.chunk_size(13, 99) == 13
    assert chunks.chunk_size(10**6 + 3, 1) == 1


def test_padding_rows_do_not_matter(one_device: None) -> None:
    # 1 / 0 in the rows that fill up the last chunk must not reach anybody.
    rows = jnp.arange(1.0, 14.0)
    found = chunks.map_chunks(lambda a: 1 / a, (rows,), 4)
    np.testing.assert_array_equal(found, 1 / rows)


def test_derivatives_and_vmap(one_device: None) -> None:
    rows = jnp.arange(13.0)
    run = functools.partial(chunks.map_chunks, jnp.sin, wanted=4)
    np.testing.assert_allclose(
        jax.grad(lambda a: (run((a,)) ** 2).sum())(rows), jnp.sin(2 * rows), atol=1e-6
    )
    both = jnp.stack([rows, -rows])
    np.testing.assert_array_equal(jax.vmap(lambda a: run((a,)))(both), jnp.sin(both))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_a_sharded_batch_stays_where_it_is() -> None:
    sharding = NamedSharding(Mesh(jax.devices()[:2], ("data",)), PartitionSpec("data"))
    rows = jax.device_put(jnp.ones((64, 8, 8)), sharding)
    run = jax.jit(
        lambda a: chunks.map_chunks(lambda b: b @ b, (a,), 2),
        in_shardings=sharding,
        out_shardings=sharding,
    )
    text = run.lower(rows).compile().as_text()
    assert "while" in text
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert collective not in text


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_inside_shard_map() -> None:
    mesh = Mesh(jax.devices()[:2], ("data",))
    rows = jnp.arange(64.0)
    split = jax.shard_map(
        lambda a: chunks.map_chunks(jnp.sin, (a,), 2),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    np.testing.assert_allclose(jax.jit(split)(rows), jnp.sin(rows), rtol=1e-6)
