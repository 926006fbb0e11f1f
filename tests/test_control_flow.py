"""Sites inside scan, cond and checkpoint keep their fast rules and stay exact."""

import functools
import traceback

import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint

import perex

pytestmark = pytest.mark.usefixtures("x64")

BATCH, DIM, STEPS = 3, 4, 5


def normal(*shape, seed=0):
    """Draw numbers that depend on the shape too."""
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


def layer(w, x):
    return jnp.tanh(x @ w) + 0.5 * x


def scan_over_layers(params, x, **options):
    return jnp.sum(lax.scan(lambda x, w: (layer(w, x), None), x, params, **options)[0] ** 2)


def scan_over_time(params, xs, **options):
    def step(h, x):
        h = jnp.tanh(x @ params["w"] + h @ params["u"] + params["b"])
        return h, h

    return jnp.sum(lax.scan(step, jnp.zeros(DIM, xs.dtype), xs, **options)[1] ** 2)


def recurrent():
    return {"w": normal(DIM, DIM), "u": normal(DIM, DIM, seed=1), "b": normal(DIM)}


@pytest.mark.parametrize(
    "options", [{}, {"reverse": True}, {"unroll": 2}, {"unroll": STEPS, "reverse": True}], ids=str
)
def test_layers_and_time(options):
    def loss(params, x, xs):
        layers = scan_over_layers(params["layers"], x, **options)
        return layers + scan_over_time(params["cell"], xs, **options)

    params = {"layers": normal(STEPS, DIM, DIM), "cell": recurrent()}
    batch = normal(BATCH, DIM), normal(BATCH, STEPS, DIM)
    modes.check(loss, params, *batch)
    told = modes.uses(loss, params, *batch)
    assert "stacked over 5 steps" in told and told.count("shared over 5 steps") == 2
    assert not modes.fallbacks(loss, params, *batch)


def test_length_zero():
    def loss(params, x, xs):
        total = scan_over_layers(params["layers"], x) + scan_over_time(params["cell"], xs)
        return total + x @ params["head"]

    params = {"layers": normal(0, DIM, DIM), "cell": recurrent(), "head": normal(DIM)}
    expected = modes.check(loss, params, normal(BATCH, DIM), normal(BATCH, 0, DIM))
    assert expected["layers"].shape == (BATCH, 0, DIM, DIM)
    assert not np.any(expected["cell"]["w"])


def test_nested_scans():
    def loss(params, xs):
        def inner(x, w):
            return jnp.tanh(x @ w + x @ params["shared"]), None

        def outer(x, inputs):
            w, extra = inputs
            return lax.scan(inner, x + extra @ params["time"], w)[0], None

        return jnp.sum(lax.scan(outer, xs[0], (params["stacked"], xs))[0] ** 2)

    params = {
        "stacked": normal(3, 2, DIM, DIM),
        "shared": normal(DIM, DIM, seed=1),
        "time": normal(DIM, DIM, seed=2),
    }
    batch = normal(BATCH, 3, DIM)
    modes.check(loss, params, batch)
    told = modes.uses(loss, params, batch)
    assert "fallback" not in told
    assert "stacked over 3 steps, stacked over 2 steps" in told
    assert "shared over 3 steps, shared over 2 steps" in told


def test_stacked_outside_and_shared_within():
    def loss(params, xs):
        def outer(x, w):
            return lax.scan(lambda h, x: (jnp.tanh(x + h @ w), None), x, xs)[0], None

        return jnp.sum(lax.scan(outer, xs[0], params)[0] ** 2)

    params, batch = normal(2, DIM, DIM), normal(BATCH, 3, DIM)
    modes.check(loss, params, batch)
    assert "stacked over 2 steps, shared over 3 steps" in modes.uses(loss, params, batch)


def test_convolution_and_lookup_in_scans():
    def loss(params, image, ids):
        def step(x, inputs):
            kernel, token = inputs
            y = lax.conv_general_dilated(
                x[None], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )[0]
            y = y + lax.conv(x.transpose(2, 0, 1)[None], params["shared"], (1, 1), "SAME")[0].sum()
            return jnp.tanh(y + params["embedding"][token]), None

        return jnp.sum(lax.scan(step, image, (params["kernels"], ids))[0] ** 2)

    params = {
        "kernels": normal(3, 3, 3, 2, 2),
        "shared": normal(2, 2, 3, 3),
        "embedding": normal(6, 2),
    }
    batch = normal(BATCH, 5, 5, 2), jnp.array([[0, 1, 5], [2, 2, 2], [3, 0, 3]])
    modes.check(loss, params, *batch)
    assert not modes.fallbacks(loss, params, *batch)


def test_map_and_fori_loop():
    def loss(params, xs):
        mapped = lax.map(lambda x: jnp.tanh(x @ params["w"]), xs)
        final = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ params["u"]), mapped[0])
        return jnp.sum(mapped**2) + jnp.sum(final**3)

    params, batch = {k: recurrent()[k] for k in "wu"}, normal(BATCH, 4, DIM)
    modes.check(loss, params, batch)
    told = modes.uses(loss, params, batch)
    assert "shared over 4 steps" in told and "shared over 3 steps" in told
    assert "fallback" not in told


def test_associative_scan():
    def loss(params, xs):
        def combine(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        gates = jax.nn.sigmoid(xs @ params["gate"])
        _, states = lax.associative_scan(combine, (gates, xs @ params["w"]))
        return jnp.sum(states**2)

    params, batch = {"gate": normal(DIM, DIM), "w": normal(DIM, DIM, seed=1)}, normal(BATCH, 6, DIM)
    modes.check(loss, params, batch)
    assert not modes.fallbacks(loss, params, batch)


def test_slices_at_a_place_that_the_example_names():
    def loss(params, i, x):
        row = params["table"][i]
        window = lax.dynamic_slice(params["table"], (i, 1), (2, 2))
        corner = lax.dynamic_slice(params["table"], (i, i), (1, 1))
        whole = lax.dynamic_slice(params["small"], (i, i), (1, 2))
        return jnp.sum((row @ x) ** 2 + window**3) * jnp.sum(whole**2) + corner[0, 0] ** 2

    params = {"table": normal(5, DIM), "small": normal(1, 2)}
    # The last two reach beyond the table, so that the slices start earlier.
    batch = jnp.array([0, 4, 7]), normal(BATCH, DIM)
    expected = modes.check(loss, params, *batch)
    assert np.any(expected["table"][2, 4])
    assert not modes.fallbacks(loss, params, *batch)


def by_slice(params, x):
    return lax.scan(lambda x, i: (layer(params[i], x), None), x, jnp.arange(len(params)))[0]


def by_carry(params, x):
    def body(i, x):
        return layer(lax.dynamic_index_in_dim(params, i, keepdims=False), x)

    return lax.fori_loop(0, len(params), body, x)


def by_numbers(params, x, number, **options):
    """Two counters, one of which says how far the other goes; a third belongs to the example."""

    def step(carry, c):
        i, stride, x, own = carry
        x = layer(params[i % len(params)], x) * jnp.cos(own) + c
        return (i + stride, stride + 1, x, own * 2), x

    first, last = jnp.int32(len(params) - 1), jnp.int32(2)
    (first, last, x, own), xs = lax.scan(
        step, (first, last, x, number), jnp.arange(4.0, dtype=x.dtype), **options
    )
    return x * last + xs.sum(0) * (first + own)


def by_carry_alone(params, x):
    step = lambda i, _: (i + 1, layer(params[i], x))  # noqa: E731
    return lax.scan(step, jnp.int32(0), None, len(params))[1].sum(0)


def in_two_loops(params, x):
    def outer(i, x):
        return lax.fori_loop(0, 2, lambda j, x: layer(params[(i + j) % 3], x), x)

    return lax.fori_loop(0, 2, outer, x)


def by_checkpointed(params, x):
    return jax.checkpoint(by_carry)(params, x)


NUMBERS = jnp.array([1, 5, 2])


@pytest.mark.parametrize(
    ("fun", "more"),
    [
        (by_slice, ()),
        (by_carry, ()),
        (by_numbers, (NUMBERS,)),
        (functools.partial(by_numbers, reverse=True, unroll=2), (NUMBERS,)),
        (by_carry_alone, ()),
        (in_two_loops, ()),
        (by_checkpointed, ()),
    ],
    ids=["slice", "carry", "numbers", "reverse", "carry alone", "two loops", "checkpoint"],
)
def test_weights_chosen_by_the_counter(fun, more):
    params, batch = normal(3, DIM, DIM), (normal(BATCH, DIM), *more)
    loss = lambda *args: jnp.sum(fun(*args) ** 2)  # noqa: E731
    modes.check(loss, params, *batch)
    assert not modes.fallbacks(loss, params, *batch)


def test_weights_chosen_by_the_counter_are_not_held_for_each_example():
    params, x = jnp.ones((3, 256, 256)), jnp.ones((64, 256))
    step = perex.clipped_grad(lambda params, x: jnp.sum(by_carry(params, x)), 1.0)
    memory = jax.jit(step).lower(params, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 20 * params.nbytes


@pytest.mark.parametrize("of_the_example", [False, True])
def test_weights_chosen_by_what_the_loop_computes(of_the_example):
    """What a parameter or an example has a part in is no counter."""

    def loss(params, x, number):
        def step(carry, _):
            i, x = carry
            last = number if of_the_example else (params[0, 0, 0] > 0).astype(int)
            return ((i + 1 + last) % len(params), layer(params[i], x)), None

        return jnp.sum(lax.scan(step, (jnp.int64(0), x), length=3)[0][1] ** 2)

    params, batch = normal(3, DIM, DIM), (normal(BATCH, DIM), NUMBERS)
    modes.check(loss, params, *batch)
    if not of_the_example:
        assert "what a loop carries from step to step" in modes.uses(loss, params, *batch)


def test_effects_in_a_loop_happen_once_a_step():
    seen = []

    def loss(params, x):
        def body(i, x):
            jax.debug.callback(lambda i: seen.append(int(i)), i)
            return layer(params[i], x)

        return jnp.sum(lax.fori_loop(0, 3, body, x))

    params, x = normal(3, DIM, DIM), normal(1, DIM)
    found = jax.jit(perex.grad(loss))(params, x)
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2]
    expected = jax.grad(lambda params, x: jnp.sum(by_carry(params, x)))(params, x[0])
    np.testing.assert_allclose(found[0], expected, rtol=1e-9)


def test_parameter_in_a_carry():
    def loss(params, x):
        def step(carry, _):
            w, x = carry
            return (0.9 * w, jnp.tanh(x @ w) + x @ params["other"]), None

        return jnp.sum(lax.scan(step, (params["w"], x), length=3)[0][1] ** 2)

    params, batch = {"w": normal(DIM, DIM), "other": normal(DIM, DIM, seed=1)}, normal(BATCH, DIM)
    modes.check(loss, params, batch)
    told = modes.uses(loss, params, batch)
    assert "it travels in the carry of a loop" in told
    assert "shared over 3 steps" in told


def test_while_loop_in_what_is_not_differentiated():
    def loss(w, x):
        def body(state):
            return state[0] + 1, state[1] / 2

        steps, _ = lax.while_loop(lambda s: s[1] > 1, body, (0, lax.stop_gradient(x @ w).max()))
        return jnp.sum(jnp.tanh(x @ w)) * steps

    modes.check(loss, normal(DIM, DIM), 9 * normal(BATCH, DIM))


def test_what_jax_cannot_differentiate_is_told_by_jax():
    def loss(w, x):
        return jnp.sum(lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x + x @ w, x))

    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work") as info:
        perex.grad(loss)(jnp.ones((DIM, DIM)), jnp.ones((BATCH, DIM)))
    # The cause that jax attaches holds the stack of the operation: the user's line.
    cause = info.value.__cause__
    frames = traceback.extract_tb(cause.__traceback__)
    assert any(frame.name == "loss" and frame.filename == __file__ for frame in frames)


def branches(params, x):
    return (
        lambda x: jnp.sum(jnp.log(x) @ params["log"]),
        lambda x: jnp.sum((x @ params["one"]) ** 2),
        lambda x: jnp.sum(jnp.tanh(x @ params["one"] @ params["two"])),
    )


def branch_params():
    return {name: normal(DIM, DIM, seed=s) for s, name in enumerate(("log", "one", "two"))}


def test_switch_by_example():
    def loss(params, x, index):
        return lax.switch(index, branches(params, x), x) + jnp.sum(x @ params["two"])

    # The logarithm of the second example is not finite: its branch is not the first.
    batch = jnp.abs(normal(BATCH, DIM)).at[1].set(0), jnp.array([0, 1, 2])
    expected = modes.check(loss, branch_params(), *batch)
    assert not np.any(expected["log"][1:]) and np.all(np.isfinite(expected["log"]))
    assert not modes.fallbacks(loss, branch_params(), *batch)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_switch_for_all_examples(index):
    def loss(params, x):
        return lax.switch(jnp.asarray(index), branches(params, x), x)

    batch = jnp.abs(normal(BATCH, DIM))
    expected = modes.check(loss, branch_params(), batch)
    assert np.any(expected["two"]) == (index == 2)
    assert not modes.fallbacks(loss, branch_params(), batch)


def test_cond_on_a_parameter_and_within_a_scan():
    def loss(params, xs):
        def step(h, x):
            h = lax.cond(x[0] > 0, lambda h: jnp.tanh(h @ params["w"]), lambda h: h, h)
            return h + x @ params["u"], None

        h = lax.scan(step, xs[0], xs)[0]
        return lax.cond(params["b"][0] > 0, jnp.sum, lambda h: h @ params["b"], h)

    for sign in (1, -1):
        params = {**recurrent(), "b": sign * jnp.abs(normal(DIM))}
        modes.check(loss, params, normal(BATCH, STEPS, DIM))


def test_custom_derivatives_keep_the_users_rule():
    @jax.custom_vjp
    def scaled_product(w, x):
        return x @ w

    def backward(residuals, cotangent):
        w, x = residuals
        return 3 * jnp.outer(x, cotangent), 2 * w @ cotangent

    scaled_product.defvjp(lambda w, x: (x @ w, (w, x)), backward)

    @jax.custom_jvp
    def product(w, x):
        return x @ w

    @product.defjvp
    def _(primals, tangents):
        (w, x), (dw, dx) = primals, tangents
        return x @ w, 5 * (x @ dw) + dx @ w

    def loss(params, x):
        x = jax.nn.gelu(x @ params["first"])
        x = jnp.tanh(product(params["jvp"], scaled_product(params["vjp"], x)))
        return jnp.sum(jax.nn.log_softmax(jax.nn.silu(x @ params["last"])) ** 2)

    names = ("first", "jvp", "vjp", "last")
    params = {name: normal(DIM, DIM, seed=s) for s, name in enumerate(names)}
    modes.check(loss, params, normal(BATCH, DIM))
    found = modes.fallbacks(loss, params, normal(BATCH, DIM))
    assert found == {"argument 0 at ['jvp']", "argument 0 at ['vjp']"}


def test_no_gradient_for_each_step_of_a_shared_weight():
    """A weight used T times is one contraction: nothing holds T or B gradients but the result."""
    steps, dim = 7, 128

    def loss(w, xs):
        return jnp.sum(lax.scan(lambda h, x: (jnp.tanh(x + h @ w),) * 2, xs[0], xs)[1] ** 2)

    w, xs = normal(dim, dim), normal(BATCH, steps, dim)
    for transform, held in (
        (perex.grad(loss), BATCH * dim * dim),
        (perex.grad(loss, factored=True), BATCH * steps * dim),
    ):
        sizes = [
            aval.size for aval in intermediates(jax.make_jaxpr(transform)(w, xs)) if aval.ndim > 2
        ]
        assert max(sizes) <= held
    # The check can fail: vmap carries a gradient for each example from step to step.
    plain = jax.make_jaxpr(jax.vmap(jax.grad(loss), (None, 0)))(w, xs)
    in_loops = [
        v.aval.size
        for equation in plain.eqns
        if equation.primitive.name == "scan"
        for v in equation.outvars
    ]
    assert BATCH * dim * dim in in_loops
    ours = jax.make_jaxpr(perex.grad(loss))(w, xs)
    in_loops = [
        v.aval.size
        for equation in ours.eqns
        if equation.primitive.name == "scan"
        for v in equation.outvars
    ]
    assert in_loops and BATCH * dim * dim not in in_loops


def intermediates(jaxpr):
    """Yield the abstract values of all equations' results, those in bodies included."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield from (v.aval for v in equation.outvars)
        for value in equation.params.values():
            for body in value if isinstance(value, tuple | list) else (value,):
                if hasattr(body, "eqns") or hasattr(body, "jaxpr"):
                    yield from intermediates(body)


def ode_with_times_in_the_loss(w, x):
    def field(y, t, w):
        return jnp.tanh(w @ y) * jnp.cos(t)

    return jnp.sum(odeint(field, x, jnp.array([0.0, 0.5, 1.0]), w)[-1] ** 2)


@jax.custom_vjp
def weighed_by_step(w, table, factor):
    return jnp.sum(w * table) * factor


def _weighed_backward(residuals, g):
    table, factor = residuals
    # Indexed by a tracer, which an array of NumPy does not take.
    return g * factor * jax.vmap(lambda i: table[i])(jnp.arange(len(table))), None, None


weighed_by_step.defvjp(lambda w, t, f: (weighed_by_step(w, t, f), (t, f)), _weighed_backward)


def constants_in_a_loop(w, x):
    def step(carry, _):
        y = weighed_by_step(w[0] * x, np.arange(3.0), 2.0)
        return carry + jnp.sin(y) + weighed_by_step(w[1], jnp.array([1.0, 0.0, 2.0]), 0.5), None

    return lax.scan(step, jnp.sum(w @ x), None, length=2)[0]


@pytest.mark.parametrize("loss", [ode_with_times_in_the_loss, constants_in_a_loop])
def test_functions_with_custom_derivatives_get_constants_as_jax_arrays(loss):
    w, x = normal(3, 3), normal(BATCH, 3)
    modes.check(loss, w, x)
    expected, _ = perex.clipped_grad(loss, 1.0)(w, x)
    found, _ = perex.clipped_grad(loss, 1.0, save_memory=True)(w, x)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
