import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import perex
from perex._clipping import Clipping, clip_weights, sensitivity
from perex._norms import ScaledNorms, combine_norms, from_square_norms, square_norms, weighted_sum
from perex._privacy import dp_clip, dp_noise

KEY = jax.random.key(7)
SHAPES = {"conv": {"kernel": (3, 2), "bias": (2,)}, "head": (4,)}
HEAD = {"body": 0.7, "head": 0.2}
# Float32 sums of a few dozen terms: relative error well below this.
ROUNDING = 1e-6


def by_part(path):
    return path.split("/")[0].replace("conv", "body")


MODES = {
    "global": {},
    "leaf": {"per": "leaf"},
    "group": {"per": by_part},
    "automatic": {"mode": "automatic"},
    "automatic leaf": {"per": "leaf", "mode": "automatic", "gamma": 0.5},
}


def gradients(size, seed=0, scale=1.0, dtype=np.float32):
    """Return a tree of per-example gradients whose norms spread over two decades."""
    rng = np.random.default_rng(seed)
    sizes = scale * 10 ** rng.uniform(-1.5, 0.5, size)
    return jax.tree.map(
        lambda shape: (
            rng.normal(size=(size, *shape)) * sizes.reshape(-1, *[1] * len(shape))
        ).astype(dtype),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def apply(tx, grads, params=None, **extra):
    arrays = jax.tree.map(jnp.asarray, grads)
    return tx.update(arrays, tx.init(params), params, **extra)


def clipped_sum(grads, clip=0.5, is_padding=None, **mode):
    tx = dp_clip(clip, 0.0, KEY, expected_batch_size=1, **mode)
    return apply(tx, grads, is_padding=is_padding)[0]


def oracle(grads, clips, group=lambda path: None, gamma=None):
    """Clip in float64 with a Python loop over examples, and sum."""
    pairs, tree = jax.tree_util.tree_flatten_with_path(grads)
    names = [group(jax.tree_util.keystr(p, simple=True, separator="/")) for p, _ in pairs]
    leaves = [np.asarray(leaf, np.float64) for _, leaf in pairs]
    total = [np.zeros(leaf.shape[1:]) for leaf in leaves]
    for i in range(leaves[0].shape[0]):
        if not all(np.isfinite(leaf[i]).all() for leaf in leaves):
            continue
        for j, leaf in enumerate(leaves):
            norm = math.sqrt(
                sum((x[i] ** 2).sum() for x, n in zip(leaves, names, strict=True) if n == names[j])
            )
            clip = clips[names[j]] if isinstance(clips, dict) else clips
            if gamma is None:
                total[j] += leaf[i] * min(1, clip / norm if norm else 1)
            else:
                total[j] += leaf[i] * clip / (norm + gamma)
    return jax.tree.unflatten(tree, total)


def distance(a, b):
    return math.sqrt(
        sum(
            (np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)) ** 2).sum()
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )
    )


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


def replaced(grads, index, row):
    return jax.tree.map(
        lambda g, r: np.concatenate([g[:index], r[None], g[index + 1 :]]), grads, row
    )


# ---- clipping ----------------------------------------------------------------------------------


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
    parts = [ScaledNorms(jnp.ones(1), jnp.float32([2.0**126])), from_square_norms(jnp.ones(1))]
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


SUM_SHAPES = jax.tree.map(np.zeros, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


# ---- sensitivity -------------------------------------------------------------------------------


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


# ---- noise -------------------------------------------------------------------------------------


def rejects(noise, stddev, level=1e-6):
    """Say whether a chi-square test of the variance rejects noise of this standard deviation."""
    statistic = (np.asarray(noise, np.float64) ** 2).sum() / stddev**2
    tail = stats.chi2(noise.size)
    return not tail.ppf(level / 2) < statistic < tail.ppf(1 - level / 2)


NOISE_CASES = {
    "global": (0.5, {}, 0.5),
    "leaf": (0.5, {"per": "leaf"}, 0.5 * math.sqrt(2)),
    "group": ({"a": 0.3, "b": 0.4}, {"per": lambda path: path}, 0.5),
    "automatic": (0.5, {"mode": "automatic"}, 0.5),
}


@pytest.mark.parametrize("case", NOISE_CASES)
def test_scale_of_the_noise(case):
    clip, mode, bound = NOISE_CASES[case]
    grads = {"a": np.zeros((3, 8000), np.float32), "b": np.zeros((3, 50, 80), np.float32)}
    tx = dp_clip(clip, 1.7, KEY, expected_batch_size=5, **mode)
    noise, _ = apply(tx, grads)
    stddev = 1.7 * bound / 5
    both = np.concatenate([noise["a"], noise["b"].ravel()])
    assert noise["b"].shape == (50, 80)
    for part in (noise["a"], noise["b"].ravel(), both):
        assert not rejects(part, stddev)
    # The test can tell: a scale that is off by a tenth would fail it.
    assert rejects(both, 1.1 * stddev) and rejects(both, 0.9 * stddev)
    assert stats.kstest(both / stddev, "norm").pvalue > 1e-4
    # Leaves have independent noise.
    assert abs(np.corrcoef(noise["a"][:4000], noise["b"].ravel())[0, 1]) < 5 / math.sqrt(4000)


def test_noise_is_added_to_the_clipped_sum():
    grads = gradients(6)
    noisy, _ = apply(dp_clip(0.5, 1.0, KEY, expected_batch_size=5), grads)
    noise, _ = apply(
        dp_clip(0.5, 1.0, KEY, expected_batch_size=5), jax.tree.map(np.zeros_like, grads)
    )
    clean = jax.tree.map(lambda t: t / 5, oracle(grads, 0.5))
    assert distance(jax.tree.map(jnp.subtract, noisy, noise), clean) < ROUNDING


def test_noise_is_fresh_at_each_step_and_repeatable():
    grads = {"w": np.zeros((2, 500), np.float32)}
    for tx, value in [
        (dp_clip(1.0, 1.0, KEY), grads),
        (dp_noise(1.0, 1.0, KEY, expected_batch_size=2), {"w": grads["w"][0]}),
    ]:
        first, state = tx.update(jax.tree.map(jnp.asarray, value), tx.init(None))
        second, state = tx.update(jax.tree.map(jnp.asarray, value), state)
        again, _ = tx.update(jax.tree.map(jnp.asarray, value), tx.init(None))
        assert state.step == 2
        assert abs(np.corrcoef(first["w"], second["w"])[0, 1]) < 5 / math.sqrt(500)
        assert_same_bits(first, again)


def test_float32_noise_for_bfloat16_gradients():
    grads = jax.tree.map(lambda g: jnp.asarray(g, jnp.bfloat16), gradients(300))
    exact = jax.tree.map(lambda g: np.asarray(g, np.float64), grads)
    mean, _ = apply(dp_clip(0.5, 0.0, KEY, expected_batch_size=300), grads)
    expected = jax.tree.map(lambda t: t / 300, oracle(exact, 0.5))
    for x, y in zip(jax.tree.leaves(mean), jax.tree.leaves(expected), strict=True):
        assert x.dtype == jnp.bfloat16
        # One rounding, at the end: half a unit in the last of 8 bits, and float32 rounding.
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=2**-8, atol=1e-7)
    # The noise is that of float32 gradients, rounded once. bfloat16 noise has 2 % of the values.
    zeros = jnp.zeros((1, 5000), jnp.bfloat16)
    low, _ = apply(dp_clip(1.0, 1.0, KEY), {"w": zeros})
    high, _ = apply(dp_clip(1.0, 1.0, KEY), {"w": zeros.astype(jnp.float32)})
    assert_same_bits(low["w"], high["w"].astype(jnp.bfloat16))


def test_weighted_sum_of_low_precision_leaves_is_float32():
    leaf = jnp.ones((1000, 2), jnp.float16) / 3
    total = weighted_sum(leaf, jnp.full(1000, 1 / 3, jnp.float32))
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, float(leaf[0, 0]) * 1000 / 3, rtol=1e-5)


def test_float64_and_complex_gradients(x64):
    rng = np.random.default_rng(0)
    real = {"w": rng.normal(size=(4, 5))}
    assert distance(clipped_sum(real), oracle(real, 0.5)) < 1e-14
    both = {"w": rng.normal(size=(4, 5)) + 1j * rng.normal(size=(4, 5))}
    stacked = {"w": np.stack([both["w"].real, both["w"].imag], -1)}
    result, expected = clipped_sum(both)["w"], oracle(stacked, 0.5)["w"]
    np.testing.assert_allclose(np.stack([result.real, result.imag], -1), expected, atol=1e-14)
    noise, _ = apply(dp_clip(0.5, 1.7, KEY), {"w": np.zeros((1, 8000), np.complex64)})
    assert not rejects(noise["w"].real, 0.85) and not rejects(noise["w"].imag, 0.85)


# ---- dp_noise and sums -------------------------------------------------------------------------


def test_microbatches_clip_apart_and_add_noise_once():
    grads = gradients(12)
    whole, _ = apply(dp_clip(0.5, 1.3, KEY, expected_batch_size=10), grads)
    parts = [clipped_sum(jax.tree.map(lambda g, i=i: g[i : i + 5], grads)) for i in (0, 5, 10)]
    total = jax.tree.map(lambda *p: sum(p), *parts)
    noisy, state = apply(dp_noise(0.5, 1.3, KEY, expected_batch_size=10), total)
    # The same key gives dp_noise the noise of dp_clip.
    assert distance(whole, noisy) < ROUNDING
    assert state.step == 1


def test_accumulation_over_steps_adds_noise_once():
    tx = optax.MultiSteps(
        optax.chain(dp_noise(1.0, 1.0, KEY, expected_batch_size=10)), 4, use_grad_mean=False
    )
    params = {"w": jnp.zeros(8000)}
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update({"w": jnp.full(8000, 2.5)}, state, params)
    noise = updates["w"] - 1.0
    assert not rejects(noise, 0.1) and rejects(noise, 0.2)


def test_dp_noise_of_groups_and_low_precision():
    tx = dp_noise({"a": 3.0, "b": 4.0}, 2.0, KEY, expected_batch_size=10)
    noise, _ = apply(tx, {"w": np.zeros(8000, np.float32)})
    assert not rejects(noise["w"], 1.0)
    low, _ = apply(tx, {"w": jnp.zeros(8000, jnp.bfloat16)})
    assert_same_bits(low["w"], noise["w"].astype(jnp.bfloat16))


def test_in_a_chain_under_scan_and_with_donation():
    grads = jax.tree.map(jnp.asarray, gradients(8))
    params = jax.tree.map(lambda g: g[0], grads)
    tx = optax.chain(dp_clip(0.5, 1.0, KEY, expected_batch_size=6), optax.adam(1e-2))

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(grads, state, params, is_padding=jnp.arange(8) > 5)
        return (optax.apply_updates(params, updates), state), None

    def train(params, state):
        return jax.lax.scan(step, (params, state), None, 3)[0]

    expected, _ = train(params, tx.init(params))
    donating = jax.jit(train, donate_argnums=(0, 1))
    for _ in range(2):  # Twice, as a donated state must not take the key of `init` with it.
        result, state = donating(jax.tree.map(jnp.copy, params), tx.init(params))
        assert distance(result, expected) < ROUNDING
    assert state[0].step == 3


def test_under_vmap():
    grads = jax.tree.map(lambda *x: jnp.stack(x), *[gradients(4, seed) for seed in range(3)])
    grads["head"] = grads["head"].at[1, 2].set(jnp.nan)
    tx = dp_clip(0.5, 0.0, KEY)
    many, state = jax.vmap(lambda g: tx.update(g, tx.init(None)))(grads)
    assert state.num_nonfinite.tolist() == [0, 1, 0]
    for i in range(3):
        one, _ = apply(tx, jax.tree.map(lambda g, i=i: g[i], grads))
        assert distance(jax.tree.map(lambda m, i=i: m[i], many), one) < ROUNDING


def test_sums_are_accepted_by_jax_privacy():
    noise_addition = pytest.importorskip("jax_privacy.noise_addition")
    privatizer = noise_addition.gaussian_privatizer(stddev=2.0 * sensitivity(0.5), prng_key=KEY)
    grads = {"w": np.ones((3, 8000), np.float32)}
    total = clipped_sum(grads)
    noisy, _ = privatizer.update(total, privatizer.init(total))
    assert not rejects(noisy["w"] - total["w"], 1.0)


# ---- leaves that stand for an array ------------------------------------------------------------


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


# ---- what bad input gets -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"l2_norm_clip": -1.0}, ValueError, "l2_norm_clip must be at least 0"),
        ({"l2_norm_clip": math.nan}, ValueError, "l2_norm_clip must be at least 0"),
        ({"l2_norm_clip": "much"}, ValueError, "could not convert"),
        ({"l2_norm_clip": None}, TypeError, "l2_norm_clip must be a number"),
        ({"noise_multiplier": -0.1}, ValueError, "noise_multiplier must be at least 0"),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier must be at least 0"),
        ({"noise_multiplier": math.inf}, ValueError, "noise_multiplier must be finite"),
        ({"l2_norm_clip": math.inf}, ValueError, "infinite l2_norm_clip"),
        ({"expected_batch_size": 0}, ValueError, "expected_batch_size must be above 0"),
        ({"expected_batch_size": math.nan}, ValueError, "expected_batch_size must be above 0"),
        ({"expected_batch_size": math.inf}, ValueError, "expected_batch_size must be finite"),
        ({"key": 0}, TypeError, "jax.random.key"),
        ({"key": jax.random.split(KEY)}, TypeError, "jax.random.key"),
        ({"key": None}, TypeError, "jax.random.key"),
    ],
)
@pytest.mark.parametrize("transform", [dp_clip, dp_noise])
def test_bad_arguments(transform, arguments, error, message):
    good = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "key": KEY, "expected_batch_size": 4}
    transform(**good)
    with pytest.raises(error, match=message):
        transform(**good | arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"per": "layer"}, "per must be 'global', 'leaf'"),
        ({"per": 3}, "per must be"),
        ({"mode": "flat"}, "mode must be one of clip, automatic"),
        ({"mode": "automatic", "gamma": 0}, "gamma must be above 0"),
        ({"mode": "automatic", "gamma": math.nan}, "gamma must be above 0"),
        ({"mode": "automatic", "l2_norm_clip": math.inf, "noise_multiplier": 0}, "must be finite"),
        ({"l2_norm_clip": {"a": 1.0}}, "needs groups"),
        ({"l2_norm_clip": {"a": 1.0, "b": -1.0}, "per": "leaf"}, "at least 0"),
        ({"l2_norm_clip": {"a": 1.0, "b": math.inf}, "per": "leaf"}, "infinite l2_norm_clip"),
    ],
)
def test_bad_modes(arguments, message):
    with pytest.raises(ValueError, match=message):
        dp_clip(**{"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "key": KEY} | arguments)


def test_groups_must_match_the_mapping():
    tx = dp_clip({"body": 1.0, "tail": 1.0}, 1.0, KEY, per=by_part)
    with pytest.raises(ValueError, match=r"\['body', 'tail'\].*\['body', 'head'\]"):
        tx.init(SUM_SHAPES)
    with pytest.raises(ValueError, match="Give each group one clip norm"):
        tx.update(gradients(3), tx.init(None))


def test_bad_sensitivity_arguments():
    with pytest.raises(ValueError, match="relation must be one of"):
        sensitivity(1.0, relation="swap")
    with pytest.raises(ValueError, match="give params"):
        sensitivity(1.0, per="leaf")
    with pytest.raises(ValueError, match="at least 0"):
        sensitivity({"a": -1.0})


def test_padding_without_an_expected_batch_size_says_why():
    with pytest.raises(ValueError, match="number of real examples is private"):
        apply(dp_clip(1.0, 1.0, KEY), gradients(3), is_padding=jnp.zeros(3, bool))


@pytest.mark.parametrize(
    "padding",
    [jnp.zeros(3), jnp.zeros(3, int), jnp.zeros(2, bool), jnp.zeros((3, 1), bool), [True] * 3],
)
def test_padding_must_be_bool_of_the_batch(padding):
    with pytest.raises(ValueError, match=r"is_padding must be bool of shape \(3,\)"):
        apply(dp_clip(1.0, 1.0, KEY, expected_batch_size=3), gradients(3), is_padding=padding)


def test_bad_gradients():
    tx = dp_clip(1.0, 1.0, KEY)
    grads = gradients(3)
    with pytest.raises(ValueError, match="'head' has 3 examples, but 'conv/bias' has 2"):
        apply(tx, {"conv": gradients(2)["conv"], "head": grads["head"]})
    with pytest.raises(ValueError, match=r"'b' has shape \(\), not \[B, ...\]"):
        apply(tx, {"a": grads["head"], "b": np.float32(1)})
    with pytest.raises(
        ValueError, match=r"'conv/kernel' has shape \(3, 2\), not \[B, \*\[3, 2\]\]"
    ):
        apply(
            tx, SUM_SHAPES | {"conv": SUM_SHAPES["conv"] | {"bias": np.zeros((3, 2))}}, SUM_SHAPES
        )
    with pytest.raises(TypeError, match="'head' is int32"):
        apply(tx, grads | {"head": np.zeros((3, 4), np.int32)})
    with pytest.raises(TypeError, match="'head' is float"):
        tx.update({"head": 1.0}, tx.init(None))
    with pytest.raises(ValueError, match="no gradients"):
        apply(tx, {})
    noise = dp_noise(1.0, 1.0, KEY, expected_batch_size=3)
    with pytest.raises(
        ValueError, match="'conv/bias' has shape .* per-example gradients use dp_clip"
    ):
        apply(noise, grads, SUM_SHAPES)


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
