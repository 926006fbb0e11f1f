"""What is computed from parameters before a site is pulled back exactly; sites of many kinds."""

import cProfile

import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
from jax import lax

import perex

BATCH, DIM = 3, 4


def normal(*shape, seed=0, dtype=None):
    """Draw numbers that depend on the shape too."""
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def conv(x, kernel, **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x[None], kernel, (1, 1), "SAME", dimension_numbers=numbers, **options
    )[0]


def standardise(kernel):
    axes = tuple(range(kernel.ndim - 1))
    centred = kernel - kernel.mean(axes, keepdims=True)
    return centred / jnp.sqrt(jnp.square(centred).sum(axes, keepdims=True) + 1e-5)


def spectral(w):
    """Divide by the largest singular value, by power iteration from a fixed start."""

    def step(_, u):
        v = w.T @ u
        return w @ (v / jnp.linalg.norm(v))

    u = lax.fori_loop(0, 3, step, jnp.ones(w.shape[0], w.dtype))
    u = lax.stop_gradient(u / jnp.linalg.norm(u))
    v = w.T @ u
    return w / (u @ w @ (v / jnp.linalg.norm(v)))


@jax.custom_vjp
def quantise(w):
    return jnp.round(4 * w) / 4


quantise.defvjp(lambda w: (quantise(w), None), lambda _, cotangent: (cotangent,))


def hidden(x, w):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


# name -> (loss, shapes of the parameters, shape of an example)
CASES = {
    "standardised kernel": (
        lambda p, x: jnp.sum(
            conv(jnp.tanh(conv(x, standardise(p["a"]))), standardise(p["b"])) ** 2
        ),
        {"a": (3, 3, 2, 3), "b": (3, 3, 3, 2)},
        (5, 5, 2),
    ),
    "standardised slices in a scan": (
        lambda p, x: jnp.sum(
            lax.scan(lambda x, k: (jnp.tanh(conv(x, standardise(k))), None), x, p["k"])[0] ** 2
        ),
        {"k": (2, 3, 3, 2, 2)},
        (4, 4, 2),
    ),
    "spectral norm": (lambda p, x: hidden(x, spectral(p["w"])), {"w": (DIM, DIM)}, (DIM,)),
    "weight norm": (
        lambda p, x: hidden(x, p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=0)),
        {"g": (DIM,), "v": (DIM, DIM)},
        (2, DIM),
    ),
    "low-rank update": (
        lambda p, x: hidden(x, p["w"] + 0.5 * p["a"] @ p["b"]),
        {"w": (DIM, 5), "a": (DIM, 2), "b": (2, 5)},
        (3, DIM),
    ),
    "low-rank updates in a scan": (
        lambda p, x: jnp.sum(
            lax.scan(lambda x, q: (jnp.tanh(x @ (q["a"] @ q["b"] + p["w"])), None), x, p["l"])[0]
        ),
        {"w": (DIM, DIM), "l": {"a": (3, DIM, 2), "b": (3, 2, DIM)}},
        (2, DIM),
    ),
    "standardised in a checkpoint": (
        lambda p, x: jax.checkpoint(lambda w, x: hidden(jnp.tanh(x @ standardise(w)), w.T))(
            p["w"], x
        ),
        {"w": (DIM, 5)},
        (2, DIM),
    ),
    "tied by transpose": (
        lambda p, x: jnp.sum((jnp.tanh(x @ p["w"]) @ p["w"].T - x) ** 2),
        {"w": (DIM, 6)},
        (2, DIM),
    ),
    "rearranged": (
        lambda p, x: hidden(
            jnp.einsum("td,hdk->thk", x, p["w"].reshape(DIM, 2, 3).transpose(1, 0, 2)).reshape(-1),
            jnp.flip(p["v"], 0)[:, ::2],
        ),
        {"w": (DIM, 6), "v": (12, 4)},
        (2, DIM),
    ),
    "straight-through": (
        lambda p, x: hidden(
            x, quantise(p["w"]) + lax.stop_gradient(jnp.round(p["w"])) - p["w"] / 2
        ),
        {"w": (DIM, DIM)},
        (DIM,),
    ),
    "padded and sliced": (
        lambda p, x: hidden(x, jnp.pad(p["w"], ((1, 1), (0, 0)))) + hidden(x[:3], p["w"][1:, :2]),
        {"w": (4, 5)},
        (6,),
    ),
    "noise with a key": (
        lambda p, x: hidden(x, p["w"] + jax.random.normal(jax.random.key(0), p["w"].shape)),
        {"w": (DIM, DIM)},
        (DIM,),
    ),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", CASES)
def test_preparation(name):
    loss, shapes, example = CASES[name]
    params = jax.tree.map(lambda s: normal(*s), shapes, is_leaf=lambda x: isinstance(x, tuple))
    batch = normal(BATCH, *example, seed=1)
    modes.check(loss, params, batch)
    assert not modes.fallbacks(loss, params, batch)


def test_bfloat16_compute_with_float32_masters():
    def loss(params, x):
        w, v = (params[k].astype(jnp.bfloat16) for k in "wv")
        y = jnp.tanh(x.astype(jnp.bfloat16) @ w) @ v
        return jnp.sum(y.astype(jnp.float32) ** 2)

    params = {"w": normal(8, 8, dtype=jnp.float32), "v": normal(8, 2, dtype=jnp.float32)}
    x = normal(BATCH, 5, 8, dtype=jnp.float32)
    # Both sides round to bfloat16 (8 bits), at other places: a few of its steps.
    modes.check(loss, params, x, tolerance=0.03)
    assert not modes.fallbacks(loss, params, x)
    assert {g.dtype for g in jax.tree.leaves(perex.grad(loss)(params, x))} == {jnp.dtype("float32")}


def state_space(p, x):
    """A causal depthwise convolution over time, then a gated linear recurrence."""
    mixed = lax.conv_general_dilated(
        x.T[None],
        p["kernel"],
        (1,),
        [(2, 0)],
        dimension_numbers=("NCW", "OIW", "NCW"),
        feature_group_count=DIM,
    )[0].T
    gates = jax.nn.sigmoid(mixed @ p["gate"])
    _, states = lax.scan(lambda h, z: (z[0] * h + z[1],) * 2, jnp.zeros(DIM), (gates, mixed))
    return jnp.sum(jnp.tanh(states) ** 2)


def experts(p, x):
    y = jax.nn.gelu(jnp.einsum("etd,edh->eth", x, p["up"]))
    return jnp.sum(jnp.einsum("eth,ehd->etd", y, p["down"]) ** 2)


def heads(p, x):
    q = jnp.einsum("td,dhk->htk", x, p["q"])
    k = jnp.einsum("dhk,td->htk", p["k"], x)
    mixed = jnp.einsum("hqt,htd->hqd", jax.nn.softmax(q @ k.transpose(0, 2, 1)), q)
    return jnp.sum(jnp.einsum("htk,hkd->td", mixed, p["o"]) ** 2)


def enlarged(p, x):
    y = jnp.tanh(lax.conv_transpose(x[None], p["a"], (2, 2), "SAME"))
    return jnp.sum(lax.conv_transpose(y, p["b"], (2, 1), "VALID", transpose_kernel=True) ** 2)


def bag_of_words(p, ids):
    rows = jax.ops.segment_sum(p["table"][ids], jnp.array([0, 0, 1, 1, 1]), 2)
    return jnp.sum(jnp.tanh(rows) ** 2)


SITES = {
    "experts": (experts, {"up": (2, DIM, 6), "down": (2, 6, DIM)}, (BATCH, 2, 3, DIM)),
    "heads": (
        heads,
        {"q": (DIM, 2, 3), "k": (DIM, 2, 3), "o": (2, 3, DIM)},
        (BATCH, 5, DIM),
    ),
    "transposed": (enlarged, {"a": (3, 3, 2, 3), "b": (2, 2, 2, 3)}, (BATCH, 4, 4, 2)),
    "look-ups": (bag_of_words, {"table": (7, DIM)}, np.array([[0, 6, 6, 1, 2]] * 3)),
    "state space": (
        state_space,
        {"kernel": (DIM, 1, 3), "gate": (DIM, DIM)},
        (BATCH, 6, DIM),
    ),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", SITES)
def test_site(name):
    loss, shapes, batch = SITES[name]
    params = {k: normal(*s) for k, s in shapes.items()}
    batch = normal(*batch, seed=1) if isinstance(batch, tuple) else jnp.asarray(batch)
    modes.check(loss, params, batch)
    assert not modes.fallbacks(loss, params, batch)


def test_ragged_products_fare_as_under_vmap():
    """Neither jax version can batch them over group sizes; perex says what vmap says."""

    def loss(w, x, sizes):
        return jnp.sum(jnp.tanh(lax.ragged_dot(x, w, sizes)) ** 2)

    w, x = normal(2, DIM, 3), normal(BATCH, 5, DIM)
    sizes = jnp.array([[2, 3], [5, 0], [1, 4]], jnp.int32)
    assert "no per-example rule" in modes.uses(loss, w, x, sizes)
    for transform in (jax.vmap(jax.grad(loss), (None, 0, 0)), perex.grad(loss)):
        with pytest.raises(NotImplementedError, match="ragged_dot vmap"):
            transform(w, x, sizes)


@pytest.mark.usefixtures("x64")
def test_parameters_at_places_that_the_example_names_have_a_rule():
    def loss(w, ids):
        return jnp.sum(jnp.tanh(jax.ops.segment_sum(w, ids, 2)) ** 2)

    w, ids = normal(5, DIM), jnp.array([[0, 1, 0, 1, 1], [0] * 5, [1, 1, 0, 0, 0]])
    modes.check(loss, w, ids)
    assert "rule scatter-add" in modes.uses(loss, w, ids)


def unrolled_dense(params, x):
    h = jnp.zeros(4)
    for row in x:
        h = jnp.tanh(row @ params["w"] + h @ params["u"] + params["b"])
    return jnp.sum(h * h)


def unrolled_masked(params, x):
    h = jnp.zeros((1, 4, 4))
    for row in x:
        kernel = params["u"][None] * np.tri(4)[None, :, :]
        h = jnp.tanh(lax.conv_general_dilated(h, kernel, (1,), "SAME", None, None, NUMBERS) + row)
    return jnp.sum(h * params["w"] * params["b"])


NUMBERS = ("NHC", "HIO", "NHC")


@pytest.mark.parametrize(
    "loss, transform",
    [
        (unrolled_dense, perex.grad),
        (unrolled_dense, perex.explain),
        (unrolled_masked, perex.explain),
    ],
)
def test_the_work_of_tracing_is_in_proportion_to_the_length(loss, transform):
    params = {"w": normal(4, 4), "u": normal(4, 4), "b": normal(4)}

    def calls(length):
        # Calls of functions, built-in ones too: a measure that is the same in each run.
        x, profile = jnp.zeros((2, length, 4)), cProfile.Profile()
        run = profile.runcall
        jax.eval_shape(lambda p, x: [run(transform(loss), p, x), None][1], params, x)
        return sum(entry.callcount for entry in profile.getstats())

    calls(5)
    few, many = calls(30), calls(120)
    # Four times the length; in proportion to its square, sixteen.
    assert many < 4.3 * few
