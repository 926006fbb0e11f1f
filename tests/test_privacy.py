import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clipping import (
    KEY,
    ROUNDING,
    SUM_SHAPES,
    apply,
    assert_same_bits,
    by_part,
    clipped_sum,
    distance,
    gradients,
    oracle,
)
from scipy import stats

from perex._clipping import sensitivity
from perex._norms import weighted_sum
from perex._privacy import dp_clip, dp_noise

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
