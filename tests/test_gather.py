"""The rule of ``gather``: look-ups of any kind, repeated ids, indices out of bounds."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from losses import Loss
from oracle import assert_trees_close, loop
from sites import by_loop, check_repeats, check_rule, site_of

import perex
from perex import _taps
from perex._rules.gather import GatherRule
from perex._rules.scatter_add import ScatterAddRule

RULE = GatherRule()
ROUNDING = 1e-10
MODES = ["clip", "fill", "promise_in_bounds"]


@dataclasses.dataclass(frozen=True)
class LookUp:
    """A gather by its own numbers; ``bounds`` are the smallest and largest index tried."""

    table: tuple[int, ...]
    indices: tuple[int, ...]
    offset: tuple[int, ...]
    collapsed: tuple[int, ...]
    mapped: tuple[int, ...]
    sizes: tuple[int, ...]
    table_batch: tuple[int, ...] = ()
    indices_batch: tuple[int, ...] = ()
    mode: str = "clip"

    def __call__(self, table, indices):
        numbers = lax.GatherDimensionNumbers(
            self.offset, self.collapsed, self.mapped, self.table_batch, self.indices_batch
        )
        return lax.gather(
            table,
            indices,
            dimension_numbers=numbers,
            slice_sizes=self.sizes,
            mode=self.mode,
            fill_value=0.5 if self.mode == "fill" else None,
        )


KINDS = {
    "rows": LookUp((7, 3), (4, 1), (1,), (0,), (0,), (1, 3)),
    "one row": LookUp((7, 3), (1,), (0,), (0,), (0,), (1, 3)),
    "numbers": LookUp((7,), (2, 3, 1), (), (0,), (0,), (1,)),
    "columns": LookUp((3, 7), (4, 1), (0,), (1,), (1,), (3, 1)),
    "rows between other axes": LookUp((2, 5, 3), (4, 1), (0, 2), (1,), (1,), (2, 1, 3)),
    "two axes": LookUp((4, 5, 2), (6, 2), (1,), (0, 1), (0, 1), (1, 1, 2)),
    "two axes swapped": LookUp((4, 5, 2), (6, 2), (1,), (0, 1), (1, 0), (1, 1, 2)),
    "slices": LookUp((7, 3), (4, 1), (1, 2), (), (0,), (2, 3)),
    "parts of rows": LookUp((7, 3), (4, 2), (1,), (0,), (0, 1), (1, 2)),
    "rows that are kept": LookUp((7, 3), (4, 1), (1, 2), (), (0,), (1, 3)),
    "batches": LookUp((2, 5, 3), (2, 4, 1), (2,), (1,), (1,), (1, 1, 3), (0,), (0,)),
    "batches swapped": LookUp((5, 3, 2), (4, 2, 1), (2,), (0,), (0,), (1, 3, 1), (2,), (1,)),
    "no indices": LookUp((7, 3), (0, 1), (1,), (0,), (0,), (1, 3)),
}


def draw(kind, front, mode, seed=0):
    """Return table, indices and cotangent; indices repeat, and leave the table unless promised."""
    rng = np.random.default_rng(seed)
    kind = dataclasses.replace(kind, mode=mode)
    reach = max(kind.table) + 3
    indices = rng.integers(-3, reach, (*front, *kind.indices)).astype(np.int32)
    if mode == "promise_in_bounds":
        limits = [kind.table[d] - kind.sizes[d] for d in kind.mapped]
        indices = np.clip(indices, 0, np.array(limits, np.int32))
    table = rng.standard_normal(kind.table)
    out = jax.eval_shape(kind, table, np.zeros(kind.indices, np.int32)).shape
    return kind, table, indices, rng.standard_normal((*front, *out))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [pytest.param(v, id=k) for k, v in KINDS.items()])
def test_kinds_and_modes(kind, mode, x64):
    kind, table, indices, cotangent = draw(kind, (3,), mode)
    site = site_of(kind, 0, table, indices[0])
    expected = by_loop(kind, 0, table, (indices,), cotangent)
    check_rule(RULE, site, (indices,), cotangent, expected, ROUNDING)


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("kind", [pytest.param(v, id=k) for k, v in KINDS.items()])
def test_repeats_are_added_up(kind, mode, x64):
    kind, table, indices, cotangent = draw(kind, (2, 3), mode)
    site = site_of(kind, 0, table, indices[0, 0])
    check_repeats(RULE, site, (indices,), cotangent, ROUNDING)


def test_repeated_ids_accumulate(x64):
    kind, table, indices, cotangent = draw(KINDS["rows"], (2,), "clip")
    indices = np.array([[[5], [5], [5], [5]], [[0], [6], [0], [6]]], np.int32)
    site = site_of(kind, 0, table, indices[0])
    gradients = RULE.per_example(site, (indices,), cotangent)
    np.testing.assert_allclose(gradients[0, 5], cotangent[0].sum(0))
    np.testing.assert_allclose(gradients[1, 6], cotangent[1, 1] + cotangent[1, 3])
    norms = np.sum(np.asarray(gradients) ** 2, (1, 2))
    np.testing.assert_allclose(RULE.square_norm(site, (indices,), cotangent), norms)


def test_the_norm_of_rows_does_not_grow_with_the_table():
    """A vocabulary of a million rows costs what the look-ups cost."""
    kind = LookUp((1 << 20, 8), (5, 1), (1,), (0,), (0,), (1, 8))
    structs = jax.ShapeDtypeStruct(kind.table, np.float32), jax.ShapeDtypeStruct((5, 1), np.int32)
    site = site_of(kind, 0, *structs)
    jaxpr = jax.make_jaxpr(lambda i, c: RULE.square_norm(site, (i,), c))(
        jnp.zeros((4, 5, 1), np.int32), jnp.ones((4, 5, 8))
    )
    sizes = [v.aval.size for e in jaxpr.eqns for v in e.outvars]
    assert max(sizes) <= 4 * 5 * 8


@pytest.mark.parametrize("count", [0, 1])
def test_batches_of_no_and_of_one_example(count, x64):
    kind, table, indices, cotangent = draw(KINDS["rows"], (count,), "clip")
    site = site_of(kind, 0, table, np.zeros((4, 1), np.int32))
    expected = by_loop(kind, 0, table, (indices,), cotangent)
    check_rule(RULE, site, (indices,), cotangent, expected, ROUNDING)


def test_bfloat16_tables_accumulate_in_float32():
    count = 1024
    kind = LookUp((2, 1), (count, 1), (1,), (0,), (0,), (1, 1))
    indices, cotangent = np.zeros((1, count, 1), np.int32), np.ones((1, count, 1), jnp.bfloat16)
    site = site_of(kind, 0, np.zeros((2, 1), jnp.bfloat16), indices[0])
    # In bfloat16 the sum of ones stops at 256.
    np.testing.assert_allclose(RULE.square_norm(site, (indices,), cotangent), count**2)
    total = RULE.weighted_sum(site, (indices,), cotangent, np.ones(1, np.float32))
    np.testing.assert_allclose(total[0], count)


def test_weight_zero_drops_what_is_not_finite():
    kind, table, indices, cotangent = draw(KINDS["rows"], (3,), "clip")
    site = site_of(kind, 0, table.astype(np.float32), indices[0])
    cotangent = cotangent.astype(np.float32)
    spoiled = cotangent.copy()
    spoiled[1] = np.nan
    weights = np.array([1, 0, 0.5], np.float32)
    expected = RULE.weighted_sum(site, (indices,), cotangent, weights)
    actual = RULE.weighted_sum(site, (indices,), spoiled, weights)
    np.testing.assert_array_equal(actual, expected)


def test_the_parameter_is_not_the_index():
    kind = KINDS["rows"]
    site = site_of(kind, 1, np.zeros(kind.table), np.zeros(kind.indices, np.int32))
    assert "indices" in RULE.covers(site)
    assert RULE.covers(dataclasses.replace(site, argument=0)) is None


# As users write look-ups.


def table_at(table, ids):
    return table[ids]


LOOK_UPS = {
    "subscript": table_at,
    "take": lambda t, i: jnp.take(t, i, axis=0),
    "take clip": lambda t, i: jnp.take(t, i, axis=1, mode="clip"),
    "take fill": lambda t, i: jnp.take(t, i, axis=0, mode="fill", fill_value=3.0),
    "take wrap": lambda t, i: jnp.take(t, i, axis=0, mode="wrap"),
    "at get": lambda t, i: t.at[i].get(mode="drop", fill_value=0.25),
    "rows and columns": lambda t, i: t[i[:, None], i[None, :] % 3],
    "take_along_axis": lambda t, i: jnp.take_along_axis(t, i[:, None] % 7, axis=0),
    "vmapped": lambda t, i: jax.vmap(lambda j: t[j, 1:])(i),
    "one": lambda t, i: t[i[0]],
}


@pytest.mark.parametrize(
    "dtype", [np.int32, np.int64, np.uint8, np.int16], ids=lambda d: d.__name__
)
@pytest.mark.parametrize("name", ["subscript", "take fill"])
def test_dtypes_of_ids(name, dtype, x64):
    check_look_up(LOOK_UPS[name], np.array([[0, 6, 6], [1, 1, 200 % 7], [5, 2, 6]], dtype))


@pytest.mark.parametrize("look_up", [pytest.param(v, id=k) for k, v in LOOK_UPS.items()])
def test_look_ups_as_users_write_them(look_up, x64):
    # Negative ids count from the end where the look-up says so; 9 and -8 are out of bounds.
    check_look_up(look_up, np.array([[0, 6, 6], [-1, 9, 1], [5, -8, 6]]))


def check_look_up(look_up, ids):
    table = np.random.default_rng(0).standard_normal((7, 4))

    def fun(table, ids):
        rows = look_up(table, ids)
        # NaN where a subscript fills what is out of bounds has no gradient to compare.
        return jnp.sum(jnp.sin(jnp.where(jnp.isnan(rows), 0, rows)))

    loss = Loss(fun, (table, ids))
    text = perex.explain(fun)(*loss.args)
    assert ": rule " in text and "fallback" not in text, text
    _, _, expected = loop(jax.jit(fun))(*loss.args)
    actual = jax.jit(perex.grad(fun))(*loss.args)
    assert_trees_close(actual, expected, rtol=1e-9, atol=1e-11)


@hypothesis.given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4))
@hypothesis.settings(max_examples=10)
def test_ids_travel_without_loss(ids):
    """Ids beyond 2^24 have no float32 of their own, and still come back."""
    ids = np.array(ids, np.int32)
    struct = jax.ShapeDtypeStruct(ids.shape, ids.dtype)
    np.testing.assert_array_equal(_taps.decode(_taps.encode(jnp.asarray(ids)), struct), ids)


# What is never held: an array of the table's size for each example.


def four_ids():
    """Return ids ``[3, 4]``, some repeated, within a table of seven rows and beyond."""
    ids = np.random.default_rng(0).integers(-9, 9, (3, 4)).astype(np.int32)
    ids[:, 1] = ids[:, 0]
    return ids


def inside(ids, rows=7):
    return jnp.clip(ids, 0, rows - 1)


def steps(table, ids):
    return jax.lax.scan(lambda c, i: (c, jnp.sin(table[inside(i)])), 0.0, ids)[1]


def windows(table, ids):
    return jax.vmap(lambda i: lax.dynamic_slice(table, (i, jnp.ones_like(i)), (2, 2)))(ids)


# Shape of the table, what is looked up by four ids of one example.
EXACT = {
    "tables": ((4, 7, 3), lambda t, i: jax.vmap(lambda t, i: t[i])(t, i)),
    "bags": (
        (4, 7, 3),
        lambda t, i: jax.vmap(lambda t, i: t[i].sum(0))(t, jnp.stack([i, i[::-1], i], 1)),
    ),
    "tables of tables": (
        (2, 2, 7, 3),
        lambda t, i: jax.vmap(jax.vmap(lambda t, i: t[i]))(t, i.reshape(2, 2)),
    ),
    "windows": ((7, 4), windows),
    "one window": ((7, 4), lambda t, i: lax.dynamic_slice(t, (i[0], i[1]), (3, 2))),
    "parts": ((7, 4), lambda t, i: jax.vmap(lambda j: t[j, 1:3])(i)),
    "along axis": ((4, 7), lambda t, i: jnp.take_along_axis(t, inside(i)[:, None], axis=1)),
    "fill": ((7, 3), lambda t, i: jnp.take(t, i, axis=0, mode="fill", fill_value=0)),
    "clip": ((7, 3), lambda t, i: jnp.take(t, i, axis=0, mode="clip")),
    "wrap": ((7, 3), lambda t, i: jnp.take(t, i, axis=0, mode="wrap")),
    "none": ((7, 3), lambda t, i: t[i[:0]]),
    "one row": ((1, 3), lambda t, i: jnp.take(t, i, axis=0, mode="clip")),
    "one column": ((7, 1), lambda t, i: t[inside(i)]),
    "scan": ((7, 3), steps),
    "segments": ((4, 3), lambda t, i: jax.ops.segment_sum(t, i, 5)),
    "segments of windows": ((4, 2, 3), lambda t, i: jnp.zeros((7, 2, 3)).at[i].add(t)),
}


def exact_case(name):
    shape, look_up = EXACT[name]
    rng = np.random.default_rng(1)
    args = rng.standard_normal(shape), four_ids()

    def fun(table, ids):
        rows = look_up(table, ids)
        # NaN where a subscript fills what is out of bounds has no gradient to compare.
        rows = jnp.where(jnp.isnan(rows), 0, rows)
        return jnp.sum(jnp.sin(rows + jnp.arange(rows.size).reshape(rows.shape)))

    return fun, args


@pytest.mark.parametrize("name", EXACT)
def test_gradients_norms_and_clipped_sums(name, x64):
    fun, args = exact_case(name)
    _, _, expected = loop(jax.jit(fun))(*args)
    norms = np.sqrt(np.sum(np.square(expected), axis=tuple(range(1, expected.ndim))))
    clip = 0.6 * norms.max() + 0.1
    weights = np.minimum(1, clip / np.maximum(norms, 1e-30))

    @jax.jit
    def everything(*args):
        clipped = perex.clipped_grad(fun, clip)(*args)
        return perex.grad(fun)(*args), perex.grad_norms(fun)(*args), clipped

    gradients, actual_norms, clipped = everything(*args)
    assert "fallback" not in perex.explain(fun)(*args)
    assert_trees_close(gradients, expected, rtol=1e-9, atol=1e-11)
    assert_trees_close(actual_norms, norms, rtol=1e-9, atol=1e-11)
    clipped = clipped[0] if isinstance(clipped, tuple) else clipped
    assert_trees_close(clipped, np.tensordot(weights, expected, 1), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int64"])
@pytest.mark.parametrize("mode", MODES[:2])
def test_types_of_ids_that_are_narrower_than_the_table(dtype, mode, x64):
    """256 is no uint8, and the largest uint32 no int32."""
    kind = LookUp((256, 2), (4, 1), (1,), (0,), (0,), (1, 2), mode=mode)
    info = np.iinfo(dtype)
    ids = np.array([[0, info.max, info.max, 3], [7, info.min, 0, 7]]).astype(dtype)[..., None]
    cotangent = np.random.default_rng(0).standard_normal((2, 4, 2))
    site = site_of(kind, 0, np.zeros(kind.table), ids[0])
    expected = by_loop(kind, 0, np.zeros(kind.table), (ids,), cotangent)
    check_rule(RULE, site, (ids,), cotangent, expected, ROUNDING)


@pytest.mark.parametrize("dtype", ["uint8", "uint32"])
def test_slices_at_places_of_other_types(dtype, x64):
    fun = lambda t, i: jnp.sum(jnp.sin(lax.dynamic_slice(t, (i, i), (4, 2))))  # noqa: E731
    args = np.random.default_rng(0).standard_normal((300, 4)), np.array([0, 3, 255], dtype)
    _, _, expected = loop(fun)(*args)
    norms = np.sqrt(np.sum(np.square(expected), axis=(1, 2)))
    assert_trees_close(jax.jit(perex.grad_norms(fun))(*args), norms, rtol=1e-9, atol=1e-11)


def test_certificate_of_look_ups(x64):
    """A look-up adds its row of the cotangent, unless it is dropped; those of one table meet."""
    kind, _, _, cotangent = draw(KINDS["rows"], (1,), "fill")
    ids = np.array([[[0], [0], [6], [9]]], np.int32)
    site = site_of(kind, 0, np.zeros(kind.table), ids[0])
    lengths = np.linalg.norm(cotangent[0, :3], axis=1)
    np.testing.assert_allclose(RULE.magnitudes(site, (ids,), cotangent), [lengths.sum()])
    assert RULE.longest_sum(site) == 4
    for name, longest in ("batches", 4), ("no indices", 1), ("one row", 1):
        kind = KINDS[name]
        site = site_of(kind, 0, np.zeros(kind.table), np.zeros(kind.indices, np.int32))
        assert RULE.longest_sum(site) == longest


def test_promises_that_are_broken(x64):
    """Subscripts promise to be inside; JAX's derivative drops what is not, and so do the norms."""
    kind, table, _, cotangent = draw(KINDS["rows"], (1,), "promise_in_bounds")
    ids = np.array([[[6], [9], [-1], [0]]], np.int32)
    site = site_of(kind, 0, table, ids[0])
    expected = by_loop(kind, 0, table, (ids,), cotangent)
    check_rule(RULE, site, (ids,), cotangent, expected, ROUNDING)


def test_what_one_use_promises_of_its_ids_is_not_promised_of_several():
    """Two uses of the same rows: XLA may drop one of them where ids are said to be unique."""
    table, ids = np.zeros((7, 3)), np.zeros((2, 1), np.int32)
    take = lambda t, i: lax.gather(  # noqa: E731
        t,
        i,
        lax.GatherDimensionNumbers((1,), (0,), (0,)),
        (1, 3),
        indices_are_sorted=True,
        unique_indices=True,
    )
    site = site_of(take, 0, table, ids)
    assert site.params["indices_are_sorted"] and site.params["unique_indices"]
    inputs, cotangent = (np.zeros((5, 4, 2, 1), np.int32),), np.ones((5, 4, 2, 3))
    merged, _, _ = RULE.merge_repeats(site, inputs, cotangent)
    assert not merged.params["indices_are_sorted"] and not merged.params["unique_indices"]


@pytest.mark.parametrize("bag", [(), (3,)], ids=["ids", "bags"])
def test_memory_of_many_tables(bag):
    """Clipping holds no table for each example, where tables are vmapped over."""
    tables, batch = jnp.zeros((8, 20000, 16)), 128

    def fun(params, ids):
        rows = jax.vmap(lambda t, i: t[i])(params["tables"], ids)
        rows = rows.sum(1) if bag else rows
        return jnp.sum(jnp.square(rows.reshape(-1) @ params["dense"] - 1))

    args = {"tables": tables, "dense": jnp.zeros((128, 1))}, jnp.zeros((batch, 8, *bag), jnp.int32)
    assert (
        held(perex.clipped_grad(fun, 1.0), args)
        <= held(gradient_of_mean(fun), args) + 2 * tables.nbytes
    )


def test_memory_of_segments():
    table, ids = jnp.zeros((1 << 14, 64)), jnp.zeros((32, 1 << 14), jnp.int32)

    def fun(table, ids):
        return jnp.sum(jnp.sin(jax.ops.segment_sum(table, ids, 5)))

    # Both hold the rows of each example, which the sum itself adds up.
    most = held(gradient_of_mean(fun), (table, ids)) + 4 * table.nbytes
    assert held(perex.clipped_grad(fun, 1.0), (table, ids)) <= most


def gradient_of_mean(fun):
    return jax.grad(lambda params, ids: jnp.mean(jax.vmap(fun, (None, 0))(params, ids)))


def held(fun, args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_what_scatter_add_does_not_cover():
    rule = ScatterAddRule()
    args = np.zeros((5, 3)), np.zeros((4, 1), np.int32), np.zeros((4, 3))
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    site = site_of(lambda o, i, u: lax.scatter_add(o, i, u, numbers), 2, *args)
    assert rule.covers(site) is None
    assert "added to" in rule.covers(dataclasses.replace(site, argument=0))
    assert "places" in rule.covers(dataclasses.replace(site, argument=1))
