"""`perex.grad` in place of `jax.vmap(jax.grad)`: the same results, structure and composition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses import BATCH, batch, normal
from losses_layers import LAYERS
from losses_uses import USES
from oracle import assert_trees_close, loop

import perex

LOSSES = {**LAYERS, **USES}
EVERY = pytest.mark.parametrize("loss", [pytest.param(v, id=k) for k, v in LOSSES.items()])
# float64 sums of a few hundred terms of order one, in another order than the loop's.
ROUNDING = {"rtol": 1e-9, "atol": 1e-11}


def run(loss, args, **options):
    given = {**loss.differentiate, "in_axes": loss.in_axes, **options}
    return perex.value_and_grad(loss.fun, **given)(*args, **loss.kwargs)


def like_loop(loss, args):
    """Return what `value_and_grad` should, by the loop over single examples."""
    # The loss is jitted for speed alone: it is still one example at a time.
    fun = jax.jit(loss.fun, static_argnames=[k for k in loss.kwargs if k == "power"])
    values, aux, grads = loop(fun, loss.argnums, loss.has_aux, loss.axes())(*args, **loss.kwargs)
    return ((values, aux) if loss.has_aux else values), grads


def by_vmap(loss):
    function = jax.value_and_grad(functools.partial(loss.fun, **loss.kwargs), **loss.differentiate)
    return jax.vmap(function, in_axes=loss.axes())


@EVERY
def test_equals_the_loop_over_single_examples(loss, x64):
    args = loss.arguments()
    actual = jax.jit(functools.partial(run, loss))(args)
    assert_trees_close(actual, like_loop(loss, args), **ROUNDING)


def described(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


@EVERY
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_structure_shapes_and_dtypes_are_those_of_vmap(loss, dtype):
    args = loss.arguments(jnp.dtype(dtype))
    try:
        expected = jax.eval_shape(by_vmap(loss), *args)
    except (NotImplementedError, TypeError, ValueError) as error:
        assert dtype == "bfloat16" and loss.fun.__name__ in ("complex_numbers_within", "solved")
        with pytest.raises(type(error)):
            jax.eval_shape(functools.partial(run, loss), args)
        return
    assert described(jax.eval_shape(functools.partial(run, loss), args)) == described(expected)


def test_grad_is_the_gradient_of_value_and_grad(x64):
    for name in ("auxiliary", "two_arguments"):
        loss = LOSSES[name]
        args = loss.arguments()
        values, grads = jax.jit(functools.partial(run, loss))(args)
        actual = jax.jit(perex.grad(loss.fun, **loss.differentiate))(*args)
        expected = (grads, values[1]) if loss.has_aux else grads
        assert_trees_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype, rounding", [("float32", 1e-5), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("name", ["dense_over_positions", "convolution_2d", "embedding"])
def test_lower_precision_is_near_the_truth(name, dtype, rounding):
    loss = LOSSES[name]
    actual = jax.jit(functools.partial(run, loss))(loss.arguments(jnp.dtype(dtype)))
    # Rounded arguments are what the loss sees, so they are the truth's too.
    rounded = jax.tree.map(
        lambda x: x.astype(np.float64) if x.dtype == jnp.dtype(dtype) else x,
        loss.arguments(jnp.dtype(dtype)),
    )
    with jax.enable_x64(True):
        expected = like_loop(loss, rounded)
    actual = jax.tree.map(lambda x: np.asarray(x, np.float64), actual)
    assert_trees_close(actual, expected, rtol=rounding, atol=rounding)


def test_bfloat16_parameters_with_float32_data(x64):
    def fun(params, x):
        y = jax.nn.relu(x @ params["w"].astype(jnp.float32) + params["b"])
        return jnp.sum(y @ params["v"])

    params = {
        "w": jnp.asarray(normal(5, 4), jnp.bfloat16),
        "b": jnp.asarray(normal(4), jnp.bfloat16),
        "v": jnp.asarray(normal(4, 2), jnp.float16),
    }
    x = jnp.asarray(batch(5), jnp.float32)
    actual = jax.jit(perex.grad(fun))(params, x)
    assert {k: v.dtype for k, v in actual.items()} == {k: v.dtype for k, v in params.items()}
    # A result is rounded to its dtype once: half a unit in the last place of bfloat16 is 2^-9.
    exact = jax.tree.map(lambda p: p.astype(jnp.float64), params)
    _, _, expected = loop(lambda p, x: jnp.sum(jax.nn.relu(x @ p["w"] + p["b"]) @ p["v"]))(
        exact, x.astype(jnp.float64)
    )
    widened = jax.tree.map(lambda g: np.asarray(g, np.float64), actual)
    assert_trees_close(widened, expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("name", ["dense", "convolution_1d", "embedding", "in_a_scan_and_outside"])
@pytest.mark.parametrize("size", [0, 1])
def test_batches_of_no_and_of_one_example(name, size, x64):
    loss = LOSSES[name]
    params, *examples = loss.arguments()
    examples = [x[:size] for x in examples]
    actual = jax.jit(functools.partial(run, loss))((params, *examples))
    expected = jax.eval_shape(by_vmap(loss), params, *examples)
    assert described(jax.tree.map(jnp.asarray, actual)) == described(expected)
    if size:
        assert_trees_close(actual, like_loop(loss, (params, *examples)), **ROUNDING)


@EVERY
def test_empty_batches_have_the_structure_of_vmap(loss):
    args = loss.arguments(np.float32)
    chosen = [c % len(args) for c in np.atleast_1d(loss.argnums)]
    if loss.in_axes is not None:
        pytest.skip("has its own axes")
    empty = [a if i in chosen else jax.tree.map(lambda x: x[:0], a) for i, a in enumerate(args)]
    expected = jax.eval_shape(by_vmap(loss), *empty)
    actual = jax.eval_shape(functools.partial(run, loss), empty)
    assert described(actual) == described(expected)


# Example axes.


def quadratic(params, x, y):
    return jnp.sum((params["w"] @ x - y) ** 2)


QUADRATIC = ({"w": normal(2, 4)}, batch(4), batch(2))


@pytest.mark.parametrize(
    "in_axes, move",
    [
        ((None, 0, 0), (0, 0)),
        ([None, 1, 0], (1, 0)),
        ((None, -1, 1), (1, 1)),
        ((None, 0, None), (0, None)),
        (({"w": None}, 0, -2), (0, 0)),
    ],
    ids=str,
)
def test_in_axes(in_axes, move, x64):
    params, x, y = QUADRATIC
    x = np.moveaxis(x, 0, move[0])
    y = y[0] if move[1] is None else np.moveaxis(y, 0, move[1])
    actual = perex.value_and_grad(quadratic, in_axes=in_axes)(params, x, y)
    axes = (None, *move)
    values, _, grads = loop(quadratic, in_axes=axes)(params, x, y)
    assert_trees_close(actual, (values, grads), **ROUNDING)


def test_one_in_axis_for_all_arguments(x64):
    _, x, y = QUADRATIC
    params = {"w": normal(2, BATCH, 4)}
    moved = (params, x.reshape(4, BATCH), y.reshape(2, BATCH))
    actual = perex.value_and_grad(quadratic, in_axes=1)(*moved)
    values, _, grads = loop(quadratic, in_axes=(1, 1, 1))(*moved)
    assert_trees_close(actual, (values, grads), **ROUNDING)


def test_a_shared_argument_outside_argnums_is_no_parameter(x64):
    statistics = {"mean": normal(4)}
    fun = lambda w, s, x: jnp.sum(jnp.tanh(w @ (x - s["mean"])))  # noqa: E731
    args = (normal(4, 4), statistics, batch(4))
    actual = perex.value_and_grad(fun, in_axes=(None, None, 0))(*args)
    values, _, grads = loop(fun, in_axes=(None, None, 0))(*args)
    assert_trees_close(actual, (values, grads), **ROUNDING)


def test_keep_batch_dim(x64):
    def fun(w, x, y):
        assert x.shape == (1, 4) and y.shape == (2, 1)
        return jnp.mean(jnp.sum((x @ w.T - y.T) ** 2, axis=1))

    args = (normal(2, 4), batch(4), normal(2, BATCH))
    actual = perex.value_and_grad(fun, in_axes=(None, 0, 1), keep_batch_dim=True)(*args)

    def alone(w, x, y):
        return fun(w, x[None], y[:, None])

    values, _, grads = loop(alone, in_axes=(None, 0, 1))(*args)
    assert_trees_close(actual, (values, grads), **ROUNDING)


# Composition with other transformations.


def test_jit_with_donated_arguments(x64):
    params, x, y = jax.tree.map(jnp.asarray, QUADRATIC)
    expected = perex.grad(quadratic)(params, x, y)
    donating = jax.jit(
        lambda p, x, y: (perex.grad(quadratic)(p, x, y)["w"], jnp.sin(x)), donate_argnums=1
    )
    actual, _ = donating(params, x, y)
    assert x.is_deleted()
    assert_trees_close(actual, expected["w"], **ROUNDING)


@pytest.mark.parametrize(
    "name", ["dense", "convolution_1d", "embedding", "nested_control_flow", "custom_vjp"]
)
def test_under_an_outer_vmap(name, x64):
    loss = LOSSES[name]
    params, *examples = loss.arguments()
    stacked = jax.tree.map(lambda p: np.stack([p, 0.5 * p]), params)
    actual = jax.jit(jax.vmap(lambda p: run(loss, (p, *examples))))(stacked)
    for i in range(2):
        alone = jax.tree.map(lambda p, i=i: p[i], stacked)
        here = jax.tree.map(lambda x, i=i: x[i], actual)
        assert_trees_close(here, like_loop(loss, (alone, *examples)), **ROUNDING)


def directions(tree):
    return jax.tree.map(lambda x: normal(*np.shape(x)), tree)


def norms_of(gradients):
    squares = (jnp.sum(g**2, tuple(range(1, g.ndim))) for g in jax.tree.leaves(gradients))
    return jnp.sum(jnp.sqrt(sum(squares) + 1))


@pytest.mark.parametrize(
    "name", ["dense", "convolution_1d", "embedding", "layers_in_a_scan", "condition"]
)
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_second_order(name, mode, x64):
    loss = LOSSES[name]
    params, *examples = loss.arguments()

    def by_perex(params):
        return norms_of(run(loss, (params, *examples))[1])

    def by_loop(params):
        grads = [jax.grad(loss.fun)(params, *(x[b] for x in examples)) for b in range(BATCH)]
        return norms_of(jax.tree.map(lambda *g: jnp.stack(g), *grads))

    if mode == "reverse":
        actual, expected = jax.jit(jax.grad(by_perex))(params), jax.jit(jax.grad(by_loop))(params)
    else:
        along = directions(params)
        actual = jax.jit(lambda p: jax.jvp(by_perex, (p,), (along,)))(params)
        expected = jax.jit(lambda p: jax.jvp(by_loop, (p,), (along,)))(params)
    assert_trees_close(actual, expected, **ROUNDING)


def test_gradient_with_respect_to_the_data(x64):
    w, x = normal(3, 3), batch(3)
    fun = lambda w, x: jnp.sum(jnp.tanh(w @ x))  # noqa: E731
    actual = jax.grad(lambda x: jnp.sum(perex.grad(fun)(w, x) ** 2))(x)
    expected = [jax.grad(lambda x: jnp.sum(jax.grad(fun)(w, x) ** 2))(x[b]) for b in range(BATCH)]
    assert_trees_close(actual, np.stack(expected), **ROUNDING)


@pytest.mark.parametrize("outer", ["jit", "grad", "vmap", "scan", "checkpoint"])
def test_closures_over_outer_tracers(outer, x64):
    w, x = normal(3, 3), batch(3)

    def total(scale, differentiate):
        # The scale is a tracer of the outer transformation, closed over by the loss.
        fun = lambda w, x: jnp.sum(jnp.tanh((scale * w) @ x) * jnp.sin(scale))  # noqa: E731
        return jnp.sum(differentiate(fun)(w, x) ** 2)

    def by_loop(fun):
        return lambda w, x: jnp.stack([jax.grad(fun)(w, x[b]) for b in range(BATCH)])

    transform = {
        "jit": jax.jit,
        "grad": jax.grad,
        "vmap": lambda f: lambda s: jax.vmap(f)(jnp.stack([s, 2 * s])),
        "scan": lambda f: lambda s: jax.lax.scan(lambda c, _: (f(c), c), s, length=2),
        "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    }[outer]
    actual = transform(lambda s: total(s, perex.grad))(0.7)
    assert_trees_close(actual, transform(lambda s: total(s, by_loop))(0.7), **ROUNDING)


def test_collectives_over_an_outer_named_axis(x64):
    def fun(w, x):
        return jnp.sum(jax.lax.pmean(jnp.tanh(w @ x), "models"))

    weights, x = normal(2, 3, 3), batch(3)
    actual = jax.vmap(lambda w: perex.grad(fun)(w, x), axis_name="models")(weights)

    def by_loop(w):
        return jnp.stack([jax.grad(fun)(w, x[b]) for b in range(BATCH)])

    assert_trees_close(actual, jax.vmap(by_loop, axis_name="models")(weights), **ROUNDING)


MESH = pytest.param("mesh", marks=pytest.mark.skipif(len(jax.devices()) < 2, reason="one device"))


@pytest.mark.parametrize("name", ["dense", "convolution_1d", "embedding", "layers_in_a_scan"])
@pytest.mark.parametrize("_", [MESH])
def test_in_shard_map(name, _, x64):
    loss = LOSSES[name]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    params, *examples = loss.arguments()
    examples = [np.concatenate([x, x[:1]]) for x in examples]
    sharded = jax.jit(
        jax.shard_map(
            lambda params, examples: run(loss, (params, *examples)),
            mesh=mesh,
            in_specs=(spec(), spec("data")),
            out_specs=spec("data"),
        )
    )
    assert_trees_close(sharded(params, examples), like_loop(loss, (params, *examples)), **ROUNDING)


@pytest.mark.parametrize("name", ["dense", "convolution_2d"])
@pytest.mark.parametrize("_", [MESH])
def test_a_batch_sharded_over_devices(name, _, x64):
    loss = LOSSES[name]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    params, *examples = loss.arguments()
    examples = [np.concatenate([x, x[:1]]) for x in examples]
    placed = [jax.device_put(x, sharding) for x in examples]
    values, grads = jax.jit(lambda p, e: run(loss, (p, *e)))(params, placed)
    assert_trees_close((values, grads), like_loop(loss, (params, *examples)), **ROUNDING)
    # An example's gradient stays on the device of the example.
    for leaf in jax.tree.leaves(grads):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), leaf.sharding


def test_effects_happen_once_for_each_example():
    def fun(seen, w, x):
        norm = jnp.sum(w**2)
        jax.debug.callback(lambda n: seen.append(("parameters", float(n))), norm)
        y = jnp.tanh(w @ x)
        jax.debug.callback(lambda y: seen.append(("example", round(float(y), 4))), jnp.sum(y))
        return jnp.sum(y)

    w, x = normal(3, 3).astype(np.float32), batch(3).astype(np.float32)
    ours, theirs = [], []
    jax.block_until_ready(perex.grad(functools.partial(fun, ours))(w, x))
    jax.effects_barrier()
    vmapped = jax.vmap(jax.grad(functools.partial(fun, theirs)), (None, 0))
    jax.block_until_ready(vmapped(w, x))
    jax.effects_barrier()
    assert sorted(ours) == sorted(theirs)
    assert sum(kind == "example" for kind, _ in ours) == BATCH


def test_without_jit_and_with_leak_checks():
    w, x = normal(3, 3).astype(np.float32), batch(3).astype(np.float32)
    fun = LOSSES["for_loop"].fun
    expected = perex.grad(fun)(w, x)
    with jax.checking_leaks():
        assert_trees_close(jax.jit(perex.grad(fun))(w, x), expected, rtol=1e-5, atol=1e-6)
    with jax.disable_jit():
        assert_trees_close(perex.grad(fun)(w, x), expected, rtol=1e-5, atol=1e-6)


def test_any_callable():
    class Model:
        power = 2

        def loss(self, w, x):
            """The loss of one example."""
            return jnp.sum(w * x) ** self.power

        def __call__(self, w, x):
            return self.loss(w, x)

    w, x = normal(3).astype(np.float32), batch(3).astype(np.float32)
    model = Model()
    expected = perex.grad(model.loss)(w, x)
    assert perex.grad(model.loss).__doc__ == "The loss of one example."
    for fun in (model, functools.partial(Model.loss, model), jax.jit(model.loss)):
        np.testing.assert_allclose(perex.grad(fun)(w, x), expected, rtol=1e-6)
