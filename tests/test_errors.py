"""Bad input gets an error when the loss is traced, and the message names what is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import perex
from perex._rules.registry import per_example

TRANSFORMS = ["grad", "value_and_grad", "explain"]
W = np.ones((2, 4), np.float32)
X = np.ones((3, 4), np.float32)


def loss(w, x):
    return jnp.sum(w @ x)


def fails(error, fun, args, *words, kwargs=None, **options):
    """Assert that every transform raises an error that holds all words, under its own name."""
    for name in TRANSFORMS:
        transform = getattr(perex, name)
        with pytest.raises(error) as raised:
            # eval_shape computes nothing: the error comes from tracing.
            call = transform(fun, **options)
            if name == "explain":
                call(*args, **(kwargs or {}))
            else:
                jax.eval_shape(lambda: call(*args, **(kwargs or {})))  # noqa: B023
        message = str(raised.value)
        for word in (f"perex.{name}", *words):
            assert word in message, f"{word!r} not in: {message}"


@pytest.mark.parametrize(
    "fun, words",
    [
        (lambda w, x: w @ x, ["scalar", "(2,)", "keep_batch_dim"]),
        (lambda w, x: (w @ x)[None, :1], ["scalar", "(1, 1)"]),
        (lambda w, x: {"loss": jnp.sum(w @ x)}, ["scalar", "{'loss': *}"]),
        (lambda w, x: (jnp.sum(w @ x), x), ["scalar", "has_aux=True"]),
        (lambda w, x: None, ["scalar", "None"]),
        (lambda w, x: jnp.sum(w @ x).astype(int), ["real floating-point", "int32"]),
        (lambda w, x: jnp.sum(w @ x) * 1j, ["real floating-point", "complex64"]),
        (lambda w, x: jnp.sum(w @ x) > 0, ["real floating-point", "bool"]),
    ],
    ids=["array", "one entry", "dict", "pair", "nothing", "integer", "complex", "bool"],
)
def test_a_loss_that_is_no_real_scalar(fun, words):
    fails(TypeError, fun, (W, X), *words)


@pytest.mark.parametrize(
    "fun",
    [loss, lambda w, x: (x, w, x), lambda w, x: ({"a": x, "b": x}, x)],
    ids=["no pair", "three", "not one value"],
)
def test_a_loss_without_the_announced_auxiliary_data(fun):
    fails(TypeError, fun, (W, X), "has_aux=True", "pair (value, aux)", has_aux=True)


def test_the_value_beside_auxiliary_data_is_no_scalar():
    fails(TypeError, lambda w, x: (w @ x, x), (W, X), "scalar", "(2,)", has_aux=True)


@pytest.mark.parametrize(
    "leaf, word",
    [
        (np.ones((2, 4), np.int32), "int32"),
        (np.ones((2, 4), bool), "bool"),
        (3, "int32"),
    ],
    ids=["integer", "bool", "Python number"],
)
def test_a_parameter_of_integers(leaf, word):
    words = "argument 0 at ['layers'][1]", "differentiated", word
    fun = lambda params, x: jnp.sum(x)  # noqa: E731
    fails(TypeError, fun, ({"layers": [W, leaf]}, X), *words)
    # As jax.grad treats it.
    with pytest.raises(TypeError):
        jax.grad(fun)({"layers": [W, leaf]}, X[0])


def test_parameters_that_are_keys():
    key = jax.random.key(0)
    fails(TypeError, lambda k, x: jnp.sum(x), (key, X), "argument 0", "key", "floating-point")


def test_batch_sizes_that_differ():
    fun = lambda w, x, y: jnp.sum(w @ x) + jnp.sum(y["a"])  # noqa: E731
    words = "argument 1 has 3", "argument 2 at ['a'] has 5", "in_axes=None"
    fails(ValueError, fun, (W, X, {"a": np.ones(5)}), *words)


def test_an_argument_without_the_example_axis():
    fails(ValueError, loss, (W, np.float32(1)), "argument 1", "()", "in_axes=None")
    fails(ValueError, loss, (W, X), "argument 1", "(3, 4)", "no axis 2", in_axes=(None, 2))
    fails(ValueError, loss, (W, X), "argument 0", "no axis -3", in_axes=(-3, 0))


def test_no_examples_at_all():
    words = "no argument carries an example axis", "in_axes", "keyword"
    fails(ValueError, loss, (W, X), *words, in_axes=(None, None))
    fails(ValueError, loss, (W,), *words, kwargs={"x": X})
    fails(ValueError, lambda w: jnp.sum(w), (W,), *words)


@pytest.mark.parametrize(
    "in_axes, error, words",
    [
        ((None,), ValueError, ["in_axes has 1 entries", "2 positional arguments"]),
        ((None, 0, 0), ValueError, ["in_axes has 3 entries", "2 positional arguments"]),
        ((None, {"x": 0}), ValueError, ["in_axes[1]", "argument 1"]),
        ((None, 1.5), TypeError, ["in_axes[1]", "1.5"]),
        ((None, True), TypeError, ["in_axes[1]", "True"]),
        ("rows", TypeError, ["in_axes", "'rows'"]),
        ({1: 0}, TypeError, ["in_axes", "{1: 0}"]),
    ],
    ids=str,
)
def test_in_axes_that_do_not_fit(in_axes, error, words):
    fails(error, loss, (W, X), *words, in_axes=in_axes)


@pytest.mark.parametrize(
    "argnums, error, words",
    [
        (2, TypeError, ["argument 2", "2 positional"]),
        (-3, TypeError, ["argument -3", "2 positional"]),
        ((0, 0), ValueError, ["(0, 0)", "twice"]),
        ((0, -2), ValueError, ["(0, -2)", "twice"]),
        ((), ValueError, ["empty"]),
        ("w", TypeError, ["argnums", "'w'"]),
        (1.0, TypeError, ["argnums", "1.0"]),
        ((0, 1.5), TypeError, ["argnums", "1.5"]),
        (True, TypeError, ["argnums", "True"]),
        (None, TypeError, ["argnums", "None"]),
    ],
    ids=str,
)
def test_argnums_that_do_not_fit(argnums, error, words):
    fails(error, loss, (W, X), *words, argnums=argnums)


def test_an_argument_that_is_no_array():
    words = "argument 1 at ['name']", "str", "Close over"
    fails(TypeError, lambda w, x: jnp.sum(w), (W, {"x": X, "name": "a"}), *words)
    words = "keyword argument 'mode'", "str"
    fails(TypeError, lambda w, x, mode: jnp.sum(w), (W, X), *words, kwargs={"mode": "train"})


def test_a_loss_that_cannot_be_called():
    for name in TRANSFORMS:
        with pytest.raises(TypeError, match=f"perex.{name}: fun must be callable, got 3"):
            getattr(perex, name)(3)


def test_an_unknown_algorithm():
    for name in TRANSFORMS:
        with pytest.raises(ValueError, match="'wavelet'.*'unfold'.*'grouped'"):
            getattr(perex, name)(loss, conv="wavelet")


def test_the_users_own_errors_come_through():
    def fun(w, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        perex.grad(fun)(W, X)
    with pytest.raises(TypeError, match="dot_general|matmul"):
        perex.grad(loss)(W, X[:, :3])


class WrongShape:
    def per_example(self, site, inputs, cotangent):
        return jnp.zeros((cotangent.shape[0], 7))


def test_a_rule_with_the_wrong_shape(monkeypatch):
    primitive = jax.make_jaxpr(loss)(W, X[0]).eqns[0].primitive
    monkeypatch.setitem(per_example.__globals__["_RULES"], primitive, WrongShape())
    with pytest.raises(ValueError) as raised:
        jax.eval_shape(perex.grad(loss), W, X)
    message = str(raised.value)
    for word in ("dot_general", "(3, 7)", "(3, 2, 4)", "test_errors.py", "operand 0"):
        assert word in message, message


@pytest.mark.parametrize("primitive, rule", [("dot", loss), (loss, loss), (None, None)])
def test_register_what_is_no_primitive(primitive, rule):
    with pytest.raises(TypeError, match="must be a JAX primitive"):
        perex.register_rule(primitive, rule)


def test_register_what_is_no_rule():
    primitive = jax.make_jaxpr(loss)(W, X[0]).eqns[0].primitive
    for rule in (3, None, "dense"):
        with pytest.raises(TypeError, match="rule must be a function"):
            perex.register_rule(primitive, rule)
    several = jax.make_jaxpr(lambda x: jax.lax.top_k(x, 1))(X[0]).eqns[0].primitive
    with pytest.raises(TypeError, match="returns several results"):
        perex.register_rule(several, loss)
