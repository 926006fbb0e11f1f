import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clipping import (
    HEAD,
    KEY,
    MODES,
    ROUNDING,
    SUM_SHAPES,
    apply,
    assert_same_bits,
    by_part,
    clipped_sum,
    distance,
    gradients,
    oracle,
    replaced,
)

import perex
from perex._clipping import Clipping, clip_weights, sensitivity
from perex._norms import ScaledNorms, combine_norms, from_square_norms, square_norms
from perex._privacy import dp_clip


@pytest.mark.parametrize(
    "clip, mode, group, gamma",
    [
        (0.5, {}, lambda path: None, None),
        (0.5, {"per": "leaf"}, lambda path: path, None),
        (HEAD, {"per": by_part}, by_part, None),
        (0.5, {"mode": "automatic", "gamma": 0.1}, lambda path: None, 0.1),
        (HEAD, {"per": by_part, "mode": "automatic"}, by_part, 0.01),
    ],
)
def test_clipped_sum_equals_the_loop(clip, mode, group, gamma):
    grads = gradients(9)
    expected = oracle(grads, clip, group, gamma)
    assert distance(clipped_sum(grads, clip, **mode), expected) < ROUNDING * distance(
        expected, gradients(9, scale=0)
    )


def test_mean_divides_by_the_batch_or_by_its_expectation():
    grads = gradients(8)
    total = oracle(grads, 0.5)
    for expected_size, divisor in [(None, 8), (20, 20), (2.5, 2.5)]:
        mean, _ = apply(dp_clip(0.5, 0.0, KEY, expected_batch_size=expected_size), grads)
        assert distance(mean, jax.tree.map(lambda t, d=divisor: t / d, total)) < ROUNDING


def test_jit_changes_rounding_only():
    grads = jax.tree.map(jnp.asarray, gradients(8))
    tx = dp_clip(0.5, 1.0, KEY, expected_batch_size=10)
    state = tx.init(grads)
    padding = jnp.arange(8) > 5
    eager, eager_state = tx.update(grads, state, is_padding=padding)
    update = jax.jit(lambda g, s, p: tx.update(g, s, is_padding=p))
    jitted, jitted_state = update(grads, state, padding)
    assert distance(eager, jitted) < ROUNDING
    for a, b in zip(eager_state[1:], jitted_state[1:], strict=True):
        assert a == b and a.dtype == b.dtype
    assert (jax.random.key_data(eager_state.key) == jax.random.key_data(jitted_state.key)).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-10, 1e10, 1e20, 1e30])
@pytest.mark.parametrize("mode", MODES)
def test_norms_neither_overflow_nor_underflow(scale, mode):
    grads, clip = gradients(6, scale=scale), 0.5 * scale
    arguments = dict(MODES[mode])
    if "mode" in arguments:
        arguments["gamma"] = 0.1 * scale
    group = {"leaf": lambda p: p, "group": by_part}.get(mode.split()[-1], lambda p: None)
    expected = oracle(grads, clip, group, arguments.get("gamma"))
    result = clipped_sum(grads, clip, **arguments)
    assert distance(result, expected) < ROUNDING * distance(expected, gradients(6, scale=0))


def test_leaves_of_very_different_scale_make_one_norm():
    grads = {"a": np.float32([[3e25], [3e-25], [0]]), "b": np.float32([[4e25], [4e-25], [1e-30]])}
    norms = combine_norms([square_norms(jnp.asarray(leaf)) for leaf in grads.values()])
    np.testing.assert_allclose(norms.values(), [5e25, 5e-25, 1e-30], rtol=1e-6)
    grads["c"] = np.float32([[1e-30], [1e30], [1e35]])
    norms = combine_norms([square_norms(jnp.asarray(leaf)) for leaf in grads.values()])
    np.testing.assert_allclose(norms.values(), [5e25, 1e30, 1e35], rtol=1e-6)
    # 2 ** -132 underflows, 2 ** (126 - 132) does not.
    parts = [
        ScaledNorms.measured(jnp.ones(1), jnp.float32([2.0**126])),
        from_square_norms(jnp.ones(1)),
    ]
    parts[1] = parts[1]._replace(scale=jnp.float32([2.0**66]))
    np.testing.assert_allclose(combine_norms(parts).squares, 2.0**-6 + parts[1].squares, rtol=1e-6)


def test_norm_too_large_for_float32_still_clips():
    grads = {"w": np.full((2, 100), 3e38, np.float32)}
    grads["w"][1] = 0.01
    result = clipped_sum(grads, 1e3)["w"]
    np.testing.assert_allclose(result, np.full(100, 1e2 + 0.01), rtol=1e-6)


def test_square_norms_do_not_overflow_in_their_sum_over_leaves():
    grads = {str(i): np.full((2, 1), 1.8e19, np.float32) for i in range(9)}
    assert distance(clipped_sum(grads, 1e3), oracle(grads, 1e3)) < 1e3 * ROUNDING


def test_square_norms_below_zero_or_out_of_range():
    norms = from_square_norms(jnp.float32([-1e-9, 0, 2.25, 3e38, 2e-38, jnp.inf, jnp.nan]))
    expected = [0, 0, 1.5, 3e38**0.5, 2e-38**0.5, np.inf, np.nan]
    np.testing.assert_allclose(norms.values(), expected, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_no_example_exceeds_the_clip_norm(mode):
    grads = gradients(64, scale=3)
    bound = sensitivity(0.5, per=MODES[mode].get("per", "global"), params=SUM_SHAPES)
    longest = 0
    for i in range(64):
        alone = jax.tree.map(lambda g, i=i: g[i : i + 1], grads)
        longest = max(longest, distance(clipped_sum(alone, **MODES[mode]), gradients(1, scale=0)))
    assert 0.7 * bound < longest < bound * (1 + ROUNDING)


def test_clip_weights_by_itself():
    squares = jnp.float32([0, 1, 4, 16, math.nan, 100])
    result = clip_weights(squares, 2.0, is_padding=jnp.arange(6) == 5)
    np.testing.assert_array_equal(result.weights, [1, 1, 1, 0.5, 0, 0])
    np.testing.assert_array_equal(result.is_clipped, [0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(result.is_finite, [1, 1, 1, 1, 0, 1])
    automatic = clip_weights(squares, 2.0, mode="automatic", gamma=1.0)
    np.testing.assert_allclose(automatic.weights, [2, 1, 2 / 3, 0.4, 0, 2 / 11], rtol=1e-6)


def test_group_weights_report_the_norm_over_all_leaves():
    clipping = Clipping({"a": 1.0, "b": 10.0}, per="leaf")
    squares = [jnp.float32([9, 0.25, math.inf]), jnp.float32([16, 0, 1])]
    result = clipping.weights(squares, ["a", "b"], jnp.array([False, True, False]))
    np.testing.assert_allclose(result.weights[0], [1 / 3, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(result.weights[1], [1, 0, 0])
    np.testing.assert_array_equal(result.norms, [5, 0, math.inf])
    assert result.is_clipped.tolist() == [True, False, False]
    assert result.is_finite.tolist() == [True, True, False]


@pytest.mark.parametrize("mode", MODES)
def test_one_example_moves_the_sum_by_no_more_than_the_sensitivity(mode):
    bound = {"add_or_remove_one": 0.0, "replace_one": 0.0}
    for relation in bound:
        bound[relation] = sensitivity(
            0.5, per=MODES[mode].get("per", "global"), params=SUM_SHAPES, relation=relation
        )
    # The worst neighbour: one long example, and its opposite in its place.
    grads = gradients(6, scale=1)
    long = jax.tree.map(lambda g: 50 * g[0], gradients(1, seed=3))
    full = clipped_sum(replaced(grads, 2, long), **MODES[mode])
    without = clipped_sum(jax.tree.map(lambda g: np.delete(g, 2, 0), grads), **MODES[mode])
    opposite = clipped_sum(replaced(grads, 2, jax.tree.map(np.negative, long)), **MODES[mode])
    moved, swapped = distance(full, without), distance(full, opposite)
    assert 0.9 * bound["add_or_remove_one"] < moved < bound["add_or_remove_one"] * (1 + 1e-5)
    assert 0.9 * bound["replace_one"] < swapped < bound["replace_one"] * (1 + 1e-5)


def test_sensitivity_of_groups():
    assert sensitivity(2.0) == 2.0
    assert sensitivity(2.0, relation="replace_one") == 4.0
    assert sensitivity(2.0, per="leaf", params=SUM_SHAPES) == pytest.approx(2 * math.sqrt(3))
    assert sensitivity(2.0, per=by_part, params=SUM_SHAPES) == pytest.approx(2 * math.sqrt(2))
    assert sensitivity({"body": 3.0, "head": 4.0}) == 5.0
    assert sensitivity({"body": 3.0, "head": 4.0}, per=by_part, params=SUM_SHAPES) == 5.0
    assert sensitivity(math.inf) == math.inf


@pytest.mark.parametrize("fill", [0.0, 1.0, 3e38, math.inf, math.nan])
@pytest.mark.parametrize("mode", MODES)
def test_padding_contributes_exactly_nothing(fill, mode):
    padding = np.array([False, True, False, False, True])
    grads = gradients(5)
    filled = jax.tree.map(np.copy, grads)
    for leaf in jax.tree.leaves(filled):
        leaf[padding] = fill
    real = jax.tree.map(lambda g: g[~padding], grads)
    result = clipped_sum(filled, is_padding=jnp.asarray(padding), **MODES[mode])
    assert distance(result, clipped_sum(real, **MODES[mode])) < ROUNDING
    assert_same_bits(result, clipped_sum(grads, is_padding=jnp.asarray(padding), **MODES[mode]))
    tx = dp_clip(0.5, 0.0, KEY, expected_batch_size=1, **MODES[mode])
    _, state = apply(tx, filled, is_padding=jnp.asarray(padding))
    _, expected = apply(tx, real)
    assert (state.num_clipped, state.num_nonfinite) == (expected.num_clipped, 0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", MODES)
def test_nonfinite_example_contributes_exactly_nothing_and_is_counted(poison, mode):
    grads = gradients(5)
    rest = jax.tree.map(lambda g: np.delete(g, 3, 0), grads)
    grads["conv"]["bias"][3, 1] = poison
    tx = dp_clip(0.5, 0.0, KEY, expected_batch_size=1, **MODES[mode])
    result, state = apply(tx, grads)
    expected, clean = apply(tx, rest)
    assert distance(result, expected) < ROUNDING
    zeroed = replaced(grads, 3, jax.tree.map(lambda g: np.zeros_like(g[0]), grads))
    assert_same_bits(result, clipped_sum(zeroed, **MODES[mode]))
    assert (state.num_nonfinite, state.total_nonfinite) == (1, 1)
    assert state.num_clipped == clean.num_clipped


def test_counts_of_a_batch_and_of_all():
    tx = dp_clip(1.0, 0.0, KEY)
    state = tx.init(None)
    grads = {"w": jnp.float32([[3, 4], [0.6, 0.8], [math.nan, 0], [0, 0], [2, 0]])}
    for step in (1, 2):
        _, state = tx.update(grads, state)
        assert (state.step, state.num_clipped, state.num_nonfinite) == (step, 2, 1)
        assert (state.total_clipped, state.total_nonfinite) == (2 * step, step)
    last = jnp.int32(np.iinfo(np.int32).max)
    _, state = tx.update(grads, state._replace(total_clipped=last - 1, step=last))
    assert (state.total_clipped, state.step) == (last, last)


def test_zero_norm_zero_clip_and_infinite_clip():
    grads = gradients(5)
    none = jax.tree.map(np.zeros_like, grads)
    for mode in MODES.values():
        assert_same_bits(clipped_sum(none, **mode), jax.tree.map(lambda g: g[0], none))
        assert_same_bits(clipped_sum(grads, 0.0, **mode), jax.tree.map(lambda g: g[0], none))
    mean, state = apply(dp_clip(math.inf, 0.0, KEY), grads)
    assert distance(mean, jax.tree.map(lambda g: g.mean(0), grads)) < ROUNDING
    assert state.num_clipped == 0
    grads["head"][1] = math.inf
    mean, state = apply(dp_clip(math.inf, 0.0, KEY), grads)
    assert state.num_nonfinite == 1 and np.isfinite(mean["head"]).all()


def test_empty_batch_is_noise_alone():
    tx = dp_clip(0.5, 2.0, KEY, expected_batch_size=4)
    noise, state = apply(tx, {"w": np.zeros((0, 1000), np.float32)})
    assert noise["w"].std() == pytest.approx(0.5 * 2 / 4, rel=0.1)
    assert (state.num_clipped, state.num_nonfinite, state.step) == (0, 0, 1)
    with pytest.raises(ValueError, match="expected_batch_size"):
        apply(dp_clip(0.5, 2.0, KEY), {"w": np.zeros((0, 3), np.float32)})


def test_no_example_depends_on_another_in_the_norms():
    leaf = jnp.asarray(gradients(6)["conv"]["kernel"])
    expected = square_norms(leaf).values()
    for poison in (math.nan, math.inf, 1e30, 1e-30, 0):
        poisoned = square_norms(leaf.at[2].set(poison)).values()
        assert_same_bits(np.delete(poisoned, 2), np.delete(expected, 2))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Outer:
    """Per-example gradients `[B, D, P]`, the outer products of `[B, D]` and `[B, P]`."""

    inputs: jax.Array
    cotangents: jax.Array

    @property
    def dtype(self):
        return self.inputs.dtype

    def square_norms(self):
        return (self.inputs**2).sum(1) * (self.cotangents**2).sum(1)

    def weighted_sum(self, weights):
        cotangents = jnp.where(weights[:, None] != 0, weights[:, None] * self.cotangents, 0)
        return jnp.where(weights[:, None] != 0, self.inputs, 0).T @ cotangents


@pytest.mark.parametrize("mode", MODES)
def test_factored_leaves_give_the_result_of_arrays(mode):
    rng = np.random.default_rng(1)
    x, ct = rng.normal(size=(6, 3)), rng.normal(size=(6, 2))
    ct[4] = np.inf
    outer = Outer(jnp.float32(x), jnp.float32(ct))
    plain = gradients(6)
    factored = {"w": outer, **plain}
    arrays = {"w": np.float32(np.einsum("bd,bp->bdp", x, ct)), **plain}
    tx = dp_clip(0.5, 1.0, KEY, expected_batch_size=6, **MODES[mode])
    padding = jnp.arange(6) == 1
    result, state = apply(tx, factored, is_padding=padding)
    expected, expected_state = apply(tx, arrays, is_padding=padding)
    assert distance(result, expected) < ROUNDING
    assert result["w"].shape == (3, 2)
    for a, b in zip(state[1:], expected_state[1:], strict=True):
        assert a == b


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_factored_gradients_of_perex(poison):
    """A poisoned example and poisoned padding, through the taps of `perex.grad`."""
    rng = np.random.default_rng(0)
    params = {
        "conv": jnp.float32(rng.normal(size=(3, 3, 32, 64))) / 10,
        "dense": jnp.float32(rng.normal(size=(256, 128))) / 10,
        "bias": jnp.zeros(128),
    }

    def loss(params, x, label):
        y = jax.lax.conv_general_dilated(
            x[None], params["conv"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        logits = jnp.tanh(y).reshape(-1) @ params["dense"] + params["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    x = rng.normal(size=(6, 4, 4, 32)).astype(np.float32)
    x[[1, 4]] = poison
    labels, padding = jnp.arange(6), jnp.arange(6) == 4
    tx = dp_clip(0.5, 0.0, KEY, expected_batch_size=1)
    factored = perex.grad(loss, factored=True)(params, x, labels)
    assert isinstance(factored["conv"], perex.PerExample)
    assert isinstance(factored["dense"], perex.PerExample)
    result, state = apply(tx, factored, params, is_padding=padding)
    one_by_one = [jax.grad(loss)(params, x[i], labels[i]) for i in (0, 2, 3, 5)]
    expected = oracle(jax.tree.map(lambda *g: np.stack(g), *one_by_one), 0.5)
    assert distance(result, expected) < 10 * ROUNDING
    assert (state.num_nonfinite, state.num_clipped) == (1, 4)
