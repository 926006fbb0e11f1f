"""`perex.PerExample`: stands for the array in all that one does with a leaf of gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sites
from losses import batch, normal
from oracle import assert_trees_close, loop
from test_grad_norms import EACH, LARGE, norms_of

import perex
from perex import _per_example, _ways
from perex._api import Options
from perex._transform import sweep

WEIGHTS = np.array([0.5, 0.0, -2.0])


def factors_of(fun, *args, argnums=0):
    """Return the factored gradients of all leaves, small ones too."""
    options = Options.check("test", fun, argnums, False, None, False, conv="auto")
    return sweep(options.problem(args, {})).gradients


def factored(case, dtype=np.float32):
    fun, w, x = case
    w, x = w.astype(dtype), x if x.dtype.kind == "i" else x.astype(dtype)
    (gradient,) = factors_of(fun, w, x)
    return fun, w, x, gradient


@EACH
def test_methods_equal_the_loop(case, x64):
    fun, w, x, gradient = factored(case, np.float64)
    _, _, expected = loop(jax.jit(fun))(w, x)
    assert isinstance(gradient, perex.PerExample)
    materialize, squares, sums = jax.jit(
        lambda g: (g.materialize(), g.square_norms(), g.weighted_sum(WEIGHTS))
    )(gradient)
    assert_trees_close(materialize, expected, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(squares, norms_of(expected) ** 2, rtol=1e-9)
    assert_trees_close(sums, np.tensordot(WEIGHTS, expected, 1), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["gram", "tied", "unrolled", "standardised"])
def test_looks_like_the_array(name):
    _, w, x, gradient = factored(LARGE[name])
    assert gradient.shape == (3, *w.shape)
    assert gradient.ndim == 3 and gradient.size == 3 * w.size and len(gradient) == 3
    assert gradient.dtype == jnp.float32
    array = gradient.materialize()
    np.testing.assert_array_equal(jnp.asarray(gradient), array)
    np.testing.assert_array_equal(np.asarray(gradient), array)
    text = repr(gradient)
    assert f"PerExample(shape={gradient.shape}, dtype=float32, " in text
    assert "test_grad_norms.py" in text  # where the sites are


def test_crosses_jit_tree_map_and_donation():
    _, w, x, gradient = factored(LARGE["gram"])
    expected = gradient.materialize()
    returned = jax.jit(lambda g: g)({"w": gradient})["w"]
    np.testing.assert_array_equal(returned.materialize(), expected)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, gradient)  # both factors
    np.testing.assert_allclose(doubled.materialize(), 4 * expected, rtol=1e-5)
    kept = jax.tree.map(lambda leaf: leaf.shape, {"w": gradient}, is_leaf=lambda x: x is gradient)
    assert kept == {"w": (3, *w.shape)}
    donated = jax.jit(lambda g: jax.tree.map(lambda leaf: leaf + 0, g), donate_argnums=0)
    np.testing.assert_array_equal(donated(returned).materialize(), expected)
    assert returned.uses[0].factors.cotangent.is_deleted()


@pytest.mark.parametrize("name", ["gram", "tied", "standardised"])
def test_under_an_outer_vmap(name):
    fun, w, x, gradient = factored(LARGE[name])
    ws = np.stack([w, 0.5 * w]).astype(np.float32)
    both = jax.jit(jax.vmap(lambda w: factors_of(fun, w, x)[0]))(ws)
    assert both.shape == (2, 3, *w.shape)
    singles = [factors_of(fun, w, x)[0] for w in ws]
    for method in ("materialize", "square_norms"):
        expected = np.stack([getattr(single, method)() for single in singles])
        actual = getattr(both, method)()
        assert_trees_close(actual, expected, rtol=1e-4, atol=1e-5)
    weights = np.float32([WEIGHTS, WEIGHTS[::-1]])
    expected = np.stack([s.weighted_sum(v) for s, v in zip(singles, weights, strict=True)])
    assert_trees_close(both.weighted_sum(weights), expected, rtol=1e-4, atol=1e-5)
    first = jax.tree.map(lambda leaf: leaf[0], both)
    assert first.shape == (3, *w.shape)


@pytest.mark.parametrize("name", ["gram", "tied", "recurrent", "unrolled", "standardised"])
def test_a_jitted_consumer_is_compiled_once(name):
    """However often the loss is written anew, as in a notebook."""
    fun, w, x, _ = factored(LARGE[name])
    traces = []

    @jax.jit
    def consumer(gradient):
        traces.append(gradient)
        return gradient.square_norms()

    results = []
    for factor in (1.0, 1.0):
        loss = lambda w, x, factor=factor: factor * fun(w, x)  # noqa: E731
        results.append(consumer(factors_of(loss, w, x)[0]))
    if name == "recurrent":  # a body of a loop is not compared, so it is compiled anew
        assert len(traces) <= 2
    else:
        assert len(traces) == 1
    np.testing.assert_array_equal(*results)


def test_other_preparations_are_not_mistaken():
    """What looks alike but is prepared with other numbers, or in another order, is another."""
    w, x = np.float32(normal(12, 12)), np.float32(batch(4, 12))
    squares = jax.jit(lambda g: g.square_norms())
    prepared = [
        lambda w: 2 * w,
        lambda w: 3 * w,
        lambda w: w.T,
        lambda w: w,
        lambda w: jnp.sin(w) - w,
        lambda w: w - jnp.sin(w),
        lambda w: jnp.sin(w) - jnp.sin(jnp.sin(w)),
    ]
    for prepare in prepared:
        fun = lambda w, x, p=prepare: jnp.sum(jnp.square(x @ p(w)))  # noqa: E731
        expected = norms_of(jax.vmap(jax.grad(fun), (None, 0))(w, x)) ** 2
        (gradient,) = factors_of(fun, w, x)
        np.testing.assert_allclose(squares(gradient), expected, rtol=1e-4)


def test_uses_that_are_prepared_alike_but_not_the_same_stay_apart():
    """Two uses in one loss whose preparations have the same equations, wired differently."""
    w, x = np.float32(normal(64, 64)), np.float32(batch(4, 64))

    def fun(w, x):
        y = jnp.square(x @ (jnp.sin(w) - w))
        return jnp.sum(y) + jnp.sum(jnp.square((2 * x) @ (w - jnp.sin(w)) + x))

    (gradient,) = factors_of(fun, w, x)
    expected = jax.vmap(jax.grad(fun), (None, 0))(w, x)
    np.testing.assert_allclose(gradient.materialize(), expected, rtol=1e-4, atol=1e-3)
    assert len(gradient.uses) == 2


@EACH
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weight_zero_keeps_a_bad_example_out(case, bad):
    fun, w, x = case
    x = x if x.dtype.kind == "i" else np.float32(x)
    loss = lambda w, x: x[1] * fun(w, x[0])  # noqa: E731
    good, poisoned = (
        factors_of(loss, np.float32(w), (x, np.float32([1, v, 1])))[0] for v in (1, bad)
    )
    expected = good.weighted_sum(WEIGHTS)
    actual = poisoned.weighted_sum(WEIGHTS)
    assert not np.all(np.isfinite(poisoned.weighted_sum(np.ones(3))))
    np.testing.assert_array_equal(actual, expected)


def test_repeated_uses_become_one():
    """A loop written out in Python: one contraction over all steps."""
    *_, gradient = factored(LARGE["unrolled"])
    assert len(gradient.uses) == 1
    *_, gradient = factored(LARGE["tied"])
    assert len(gradient.uses) == 2


@pytest.mark.parametrize("small_chunks", [False, True])
@pytest.mark.parametrize("name", ["tied", "standardised", "convolution"])
def test_streaming_in_chunks_changes_rounding_only(name, small_chunks, monkeypatch):
    if small_chunks:
        sites.one_at_a_time(monkeypatch)
    monkeypatch.setattr(_per_example, "norms_by_pairs", lambda uses: None)
    *_, gradient = factored(LARGE[name])
    array = np.float64(gradient.materialize())
    np.testing.assert_allclose(gradient.square_norms(), norms_of(array) ** 2, rtol=1e-4)
    expected = np.tensordot(WEIGHTS, array, 1)
    assert_trees_close(gradient.weighted_sum(WEIGHTS), expected, rtol=1e-4, atol=1e-5)


def test_low_rank_leaves_share_the_gradient_of_their_product(x64):
    """Two leaves of one site, much smaller than its operand."""
    params = {"a": normal(40, 2), "b": normal(2, 30), "w": normal(40, 30)}
    x = batch(5, 40)

    def fun(params, x):
        return jnp.sum(jnp.sin(x @ (params["w"] + params["a"] @ params["b"])))

    gradients = perex.grad(fun, factored=True)(params, x)
    expected = loop(fun)(params, x)[2]
    assert_trees_close(jax.tree.map(jnp.asarray, gradients), expected, rtol=1e-9, atol=1e-10)
    actual = perex.grad_norms(fun, per="leaf")(params, x)
    assert_trees_close(actual, norms_of(expected), rtol=1e-9, atol=1e-10)


def test_factored_leaves_are_arrays_where_that_is_as_good():
    params = {"w": np.float32(normal(96, 80)), "b": np.float32(normal(80))}
    fun = lambda p, x: jnp.sum(jnp.sin(x @ p["w"] + p["b"]))  # noqa: E731
    gradients = perex.grad(fun, factored=True)(params, np.float32(batch(4, 96)))
    assert isinstance(gradients["b"], jax.Array)
    assert isinstance(gradients["w"], jax.Array)  # small
    many = np.float32(normal(64, 4, 96))
    gradients = perex.grad(fun, factored=True)(params, many)
    assert isinstance(gradients["w"], perex.PerExample)
    assert isinstance(gradients["b"], jax.Array)


def test_unused_leaves_are_zero():
    unused, used = perex.grad(lambda p, x: jnp.sum(p[1] * x), factored=True)(
        [np.ones((3, 2), np.float16), np.ones(4, np.float32)], np.ones((5, 4), np.float32)
    )
    assert unused.shape == (5, 3, 2) and unused.dtype == np.float16
    np.testing.assert_array_equal(unused, 0)


def test_the_choice_of_the_way_follows_the_estimate(monkeypatch):
    """The cheapest wins, but what is large is kept only where that is clearly faster."""
    fun, w, x = LARGE["gram"]
    plan_uses = [
        (use.preparation.use, use.preparation.isometric)
        for use in factors_of(fun, np.float32(w), np.float32(x))[0].uses
    ]

    def way(keep, gram, stream, isometric=True, batch_size=100):
        seconds = {"keep": keep, "gram": gram, "stream": stream}
        monkeypatch.setattr(_ways, "estimate", lambda use, batch_size: seconds)
        uses = [(use, isometric) for use, _ in plan_uses]
        return _ways.choice(uses, batch_size, w.size).way

    assert way(3, 2, 1) == "stream"
    assert way(3, 1, 2) == "gram"
    assert way(1, 2, 3) == "keep"
    assert way(1.0, 1.1, 3) == "keep"
    assert way(1.0, 1.1, 3, batch_size=1000) == "gram"
    assert way(3, 1, 2, isometric=False) == "stream"
    assert way(3, 1, 2, batch_size=1) == "keep"


def test_explain_tells_the_way():
    fun, w, _ = LARGE["gram"]
    x = jax.ShapeDtypeStruct((500, 4, 96), np.float32)
    text = perex.explain(fun)(w, x)
    assert "clipped sum: gram (estimates: keep" in text and "stream" in text
    assert "clipped sum: keep (small)" in perex.explain(fun)(w, np.float32(batch(4, 96)))


def test_a_rule_with_no_more_than_gradients(monkeypatch):
    """Norms and sums of a user's rule that offers neither."""
    fun, w, x, _ = factored(LARGE["gram"])
    (gradient,) = factors_of(fun, w, x)
    monkeypatch.setattr(_ways, "knows_norms", lambda rule: False)
    array = np.float64(gradient.materialize())
    np.testing.assert_allclose(gradient.square_norms(), norms_of(array) ** 2, rtol=1e-4)
    expected = np.tensordot(WEIGHTS, array, 1)
    assert_trees_close(gradient.weighted_sum(WEIGHTS), expected, rtol=1e-4, atol=1e-5)
    assert isinstance(perex.grad(fun, factored=True)(w, np.concatenate([x] * 19)), jax.Array)


def test_composes_with_partial_and_methods():
    gradient = perex.grad(functools.partial(LARGE["gram"][0]), factored=True)(
        np.float32(LARGE["gram"][1]), np.float32(normal(64, 4, 96))
    )
    assert gradient.square_norms().shape == (64,)
