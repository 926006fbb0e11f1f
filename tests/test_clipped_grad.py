"""`perex.clipped_grad`: equal to clipping in a loop, whatever the microbatch and the padding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import largest_intermediate
from losses import batch, normal
from losses_layers import LAYERS
from losses_uses import USES
from oracle import assert_trees_close, loop, to_float64
from test_grad_norms import EACH, MANY, dense, many, norms_of, total

import perex
from perex import _ways
from perex._privacy import dp_clip, dp_noise

LOSSES = {**LAYERS, **USES}
EVERY = pytest.mark.parametrize("loss", [pytest.param(v, id=k) for k, v in LOSSES.items()])


WAYS = pytest.mark.parametrize("forced_way", ["gram", "stream"], indirect=True)


def clipped_by_hand(gradients, clip):
    """Return the sum of clipped gradients, on the host, and the norms."""
    norms = total(norms_of(gradients))
    weights = np.minimum(1, clip / np.where(norms == 0, 1, norms))
    return jax.tree.map(lambda g: np.tensordot(weights, g, 1), gradients), norms


@WAYS
@EVERY
def test_equals_the_loop(loss, x64, forced_way):
    args = loss.arguments()
    fun = jax.jit(loss.fun, static_argnames=[k for k in loss.kwargs if k == "power"])
    values, aux, gradients = loop(fun, loss.argnums, loss.has_aux, loss.axes())(
        *args, **loss.kwargs
    )
    # Just below the norm of one example, so that some are clipped and none is on the edge.
    clip = 0.99 * float(np.median(total(norms_of(gradients))))
    clipped = perex.clipped_grad(loss.fun, clip, **loss.differentiate, in_axes=loss.in_axes)
    actual, stats = jax.jit(lambda *args: clipped(*args, **loss.kwargs))(*args)
    expected, norms = clipped_by_hand(gradients, clip)
    assert_trees_close(actual, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(stats.values, values, rtol=1e-9)
    np.testing.assert_allclose(stats.norms, norms, rtol=1e-9, atol=1e-9)
    assert stats.num_clipped == np.sum(norms > clip * (1 + 1e-9))
    assert stats.num_nonfinite == 0
    assert_trees_close(stats.aux, aux, rtol=1e-9, atol=1e-9)


@EACH
def test_large_leaves_in_float32(case):
    fun, w, x = case
    w, x = np.float32(w), x if x.dtype.kind == "i" else np.float32(x)
    with jax.enable_x64(True):
        gradients = loop(fun)(*to_float64((w, x)))[2]
    expected, norms = clipped_by_hand(gradients, clip := float(np.median(norms_of(gradients))))
    actual, stats = jax.jit(perex.clipped_grad(fun, clip))(w, x)
    assert actual.dtype == stats.norms.dtype == jnp.float32
    np.testing.assert_allclose(stats.norms, norms, rtol=2e-5)
    # Sums of thousands of products in float32, relative to the largest entry.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@EACH
def test_nothing_of_the_size_of_all_gradients_exists(case, monkeypatch):
    # Which way is the fastest is another matter; here leaves count as too large to be kept.
    monkeypatch.setattr(_ways, "_SMALL_BYTES", 0)
    monkeypatch.setattr(_ways, "_LARGE_BYTES", 0)
    monkeypatch.setattr(_ways, "_LARGE_FACTOR", 1e9)
    fun, w, x = case
    jaxpr = jax.make_jaxpr(perex.clipped_grad(fun, 1.0))(*many(w, x))
    assert largest_intermediate(jaxpr) < w.size * MANY


def two_layers(params, x):
    h = jnp.sin(x @ params["first"]["w"] + params["first"]["b"])
    return jnp.sum(jnp.sin(h @ params["last"])), {"mean": h.mean()}


PARAMS = jax.tree.map(
    np.float32, {"first": {"w": normal(6, 5), "b": normal(5)}, "last": normal(5, 3)}
)
XS = np.float32(normal(7, 2, 6)) * np.float32([0.01, 0.1, 1, 3, 0.3, 1, 2])[:, None, None]
CLIP = 1.0


def first_part(path):
    return path.split("/")[0]


@pytest.mark.parametrize(
    "size, forced_way",
    [(1, "keep"), (2, "gram"), (3, "keep"), (4, "stream"), (7, "keep"), (100, "gram")],
    indirect=["forced_way"],
)
def test_microbatches_change_rounding_only(size, forced_way):
    whole = jax.jit(perex.clipped_grad(two_layers, CLIP, has_aux=True))(PARAMS, XS)
    parts = perex.clipped_grad(two_layers, CLIP, has_aux=True, microbatch_size=size)
    assert_trees_close(jax.jit(parts)(PARAMS, XS), whole, rtol=1e-5, atol=1e-6)


def test_microbatches_of_keys_and_of_other_axes():
    """What fills the last microbatch must exist for every kind of argument."""

    def noisy(w, key, x):
        return jnp.sum(jnp.sin(x @ w) * jax.random.normal(key, (5,)))

    keys = jax.random.split(jax.random.key(1), 7)
    options = {"in_axes": (None, 0, 1)}
    args = (PARAMS["first"]["w"], keys, XS[:, 0].T)
    whole = jax.jit(perex.clipped_grad(noisy, CLIP, **options))(*args)
    parts = jax.jit(perex.clipped_grad(noisy, CLIP, **options, microbatch_size=2))(*args)
    assert_trees_close(parts, whole, rtol=1e-5, atol=1e-6)


def test_memory_is_that_of_a_microbatch():
    w, x = np.float32(normal(300, 200)), np.float32(normal(64, 50, 300))

    def temporaries(size):
        clipped = jax.jit(perex.clipped_grad(dense, CLIP, microbatch_size=size))
        return clipped.lower(w, x).compile().memory_analysis().temp_size_in_bytes

    # The batch itself in another layout may be among the temporaries.
    assert temporaries(4) < temporaries(None) / 3 + x.nbytes


@pytest.mark.parametrize(
    "size, forced_way",
    [(None, "keep"), (None, "gram"), (3, "gram"), (None, "stream"), (3, "stream")],
    indirect=["forced_way"],
)
def test_padding_changes_no_bit(size, forced_way):
    is_padding = np.array([False, True, False, False, True, False, True])
    clipped = jax.jit(perex.clipped_grad(two_layers, CLIP, has_aux=True, microbatch_size=size))
    zero, other = XS.copy(), XS.copy()
    zero[is_padding] = 0
    expected, expected_stats = clipped(PARAMS, zero, is_padding=is_padding)
    for bad in (7.0, np.nan, np.inf):
        other[is_padding] = bad
        actual, stats = clipped(PARAMS, other, is_padding=is_padding)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
        for field in ("values", "norms", "num_clipped", "num_nonfinite"):
            np.testing.assert_array_equal(getattr(stats, field), getattr(expected_stats, field))
    assert stats.num_nonfinite == 0
    np.testing.assert_array_equal(stats.norms[is_padding], 0)
    np.testing.assert_array_equal(stats.values[is_padding], 0)
    alone, _ = clipped(PARAMS, XS[~is_padding])
    assert_trees_close(expected, alone, rtol=1e-5, atol=1e-6)


@EACH
def test_a_nonfinite_example_contributes_nothing_and_is_counted(case):
    fun, w, x = case
    x = x if x.dtype.kind == "i" else np.float32(x)
    clipped = jax.jit(perex.clipped_grad(lambda w, x, factor: factor * fun(w, x), CLIP))
    expected, _ = clipped(np.float32(w), x, np.float32([1, 0, 1]))
    sums = []
    for bad in (np.nan, np.inf):
        actual, stats = clipped(np.float32(w), x, np.float32([1, bad, 1]))
        assert stats.num_nonfinite == 1
        assert not np.isfinite(stats.norms[1])
        sums.append(actual)
    np.testing.assert_array_equal(*sums)
    # An example of norm zero has weight one, which may round in another order.
    assert_trees_close(sums[0], expected, rtol=1e-5, atol=1e-6)


@EACH
def test_no_example_exceeds_the_clip_norm(case):
    fun, w, x = case
    w, x = np.float32(w), x if x.dtype.kind == "i" else np.float32(x)
    clip = 1e-3
    clipped = jax.jit(perex.clipped_grad(fun, clip))
    for one in x:
        norm = np.linalg.norm(np.float64(clipped(w, one[None])[0]))
        # Norm and sum are rounded apart: some thousand float32 products each.
        assert norm <= clip * (1 + 1e-5)


@pytest.mark.parametrize("forced_way", ["keep", "gram", "stream"], indirect=True)
@pytest.mark.parametrize(
    "modes",
    [
        {},
        {"per": "leaf"},
        {"per": first_part},
        {"mode": "automatic", "gamma": 0.1},
        {"mode": "automatic", "per": "leaf"},
    ],
)
def test_the_sum_is_what_dp_clip_makes_of_the_gradients(modes, forced_way):
    """Without noise and divided by one, of arrays and of factors alike."""
    transform = dp_clip(CLIP, 0.0, jax.random.key(0), expected_batch_size=1, **modes)
    state = transform.init(PARAMS)
    arrays, _ = perex.grad(two_layers, has_aux=True)(PARAMS, XS)
    factors, _ = perex.grad(two_layers, has_aux=True, factored=True)(PARAMS, XS)
    assert isinstance(factors["last"], perex.PerExample) == (forced_way != "keep")
    actual, stats = perex.clipped_grad(two_layers, CLIP, has_aux=True, **modes)(PARAMS, XS)
    for gradients in (arrays, factors):
        expected, after = transform.update(gradients, state, PARAMS)
        assert_trees_close(actual, expected, rtol=1e-5, atol=1e-6)
        assert after.num_clipped == stats.num_clipped


def test_a_clip_norm_for_each_group():
    clips = {"first": 0.5, "last": 2.0}
    actual, _ = perex.clipped_grad(two_layers, clips, has_aux=True, per=first_part)(PARAMS, XS)
    gradients, _ = perex.grad(two_layers, has_aux=True)(PARAMS, XS)
    for group, clip in clips.items():
        expected, _ = clipped_by_hand(gradients[group], clip)
        assert_trees_close(actual[group], expected, rtol=1e-5, atol=1e-6)


def test_noise_goes_on_top():
    """The whole private step, as the documentation of `dp_noise` says."""
    total_, _ = perex.clipped_grad(two_layers, CLIP, has_aux=True, microbatch_size=2)(PARAMS, XS)
    noise = dp_noise(CLIP, 1.0, jax.random.key(0), expected_batch_size=7)
    chain = optax.chain(noise, optax.sgd(0.1))
    updates, _ = chain.update(total_, chain.init(PARAMS), PARAMS)
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)
    assert not np.allclose(updates["last"], -0.1 / 7 * total_["last"])


@WAYS
def test_bfloat16_sums_are_float32(x64, forced_way):
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), PARAMS)
    xs = jnp.asarray(XS, jnp.bfloat16)
    fun = lambda params, x: two_layers(params, x)[0]  # noqa: E731
    actual, stats = jax.jit(perex.clipped_grad(fun, CLIP))(params, xs)
    assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {jnp.dtype("float32")}
    expected, norms = clipped_by_hand(loop(jax.jit(fun))(*to_float64((params, xs)))[2], CLIP)
    np.testing.assert_allclose(stats.norms, norms, rtol=0.05)
    assert_trees_close(actual, expected, rtol=0.05, atol=0.05)


@WAYS
def test_a_sum_through_a_cast_is_not_rounded_to_the_short_type(forced_way):
    """Weights float32, product bfloat16: the cast back must not cost the sum its digits."""
    w, x = np.float32(normal(96, 80)), jnp.asarray(batch(4, 96), jnp.bfloat16)

    def cast(w, x):
        return jnp.sum((x @ w.astype(jnp.bfloat16)).astype(jnp.float32))

    actual, _ = jax.jit(perex.clipped_grad(cast, float("inf")))(w, x)
    expected = np.broadcast_to(np.float64(x).sum((0, 1))[:, None], w.shape)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [0, 1])
def test_small_batches(count):
    clipped = perex.clipped_grad(two_layers, CLIP, has_aux=True, microbatch_size=2)
    total_, stats = jax.jit(clipped)(PARAMS, XS[:count])
    expected, _ = clipped_by_hand(perex.grad(two_layers, has_aux=True)(PARAMS, XS[:count])[0], CLIP)
    assert_trees_close(total_, expected, rtol=1e-5, atol=1e-6)
    assert stats.values.shape == stats.norms.shape == stats.aux["mean"].shape == (count,)


def test_keyword_arguments_are_shared_and_the_batch_axis_may_be_kept():
    def fun(w, x, *, power):
        assert x.ndim == 3 and x.shape[0] == 1
        return jnp.sum(jnp.sin(x @ w) ** power)

    options = {"keep_batch_dim": True}
    gradients = perex.grad(fun, **options)(PARAMS["first"]["w"], XS, power=3)
    actual, _ = perex.clipped_grad(fun, CLIP, **options, microbatch_size=4)(
        PARAMS["first"]["w"], XS, power=3
    )
    assert_trees_close(actual, clipped_by_hand(gradients, CLIP)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [None, 2])
def test_batch_sharded_over_devices(size):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.NamedSharding(mesh, jax.P("data"))
    xs = jax.device_put(np.concatenate([XS, XS[:1]]), sharded)
    clipped = perex.clipped_grad(two_layers, CLIP, has_aux=True, microbatch_size=size)
    assert_trees_close(
        jax.jit(clipped)(PARAMS, xs), clipped(PARAMS, np.asarray(xs)), rtol=1e-5, atol=1e-6
    )

    def local(params, xs):
        return jax.lax.psum(clipped(params, xs)[0], "data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
    assert_trees_close(
        jax.jit(mapped)(PARAMS, xs), clipped(PARAMS, np.asarray(xs))[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"l2_norm_clip": -1.0}, ValueError, "l2_norm_clip must be at least 0"),
        ({"microbatch_size": 0}, ValueError, "microbatch_size must be None or an int"),
        ({"microbatch_size": 2.0}, ValueError, "microbatch_size must be None or an int"),
        ({"mode": "soft"}, ValueError, "mode must be one of"),
        ({"per": "layer"}, ValueError, "per must be"),
        ({"l2_norm_clip": {"a": 1.0}}, ValueError, "needs groups"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        perex.clipped_grad(two_layers, **{"l2_norm_clip": CLIP, **arguments})


@pytest.mark.parametrize("padding", [np.zeros(6, bool), np.zeros(7), [False] * 7])
def test_padding_must_be_bool_of_the_batch(padding):
    with pytest.raises(ValueError, match=r"is_padding must be bool of shape \(7,\)"):
        perex.clipped_grad(two_layers, CLIP, has_aux=True)(PARAMS, XS, is_padding=padding)


def test_no_parameters():
    with pytest.raises(ValueError, match="hold no arrays"):
        perex.clipped_grad(lambda p, x: x.sum(), CLIP)({}, XS)
