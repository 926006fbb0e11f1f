"""No bit of an example's result depends on the other examples, whatever they hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from losses import BATCH, Loss, batch, normal
from losses_layers import LAYERS
from losses_uses import USES
from oracle import assert_trees_close, loop

import perex

NUMBERS = ("NHWC", "HWIO", "NHWC")


def image_loss(algorithm):
    def fun(params, x):
        for kernel in params:
            x = jnp.tanh(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", None, None, NUMBERS))
        return jnp.sum(x**2)

    kernels = [normal(3, 3, 2, 4), normal(2, 3, 4, 3)]
    return Loss(fun, (kernels, batch(1, 6, 6, 2))), {"conv": algorithm}


def kernel_of_the_example(params, x, own):
    """The kernel depends on the example: no site, and vmap would make one grouped convolution."""
    kernel = jnp.tanh(params["k"] * own)
    y = lax.conv_general_dilated(x[None], kernel, (1, 1), "SAME", None, None, NUMBERS)
    return jnp.sum(y**2) + jnp.sum(params["b"] * own)


def kernel_in_a_carry(kernel, x):
    def step(carry, _):
        kernel, x = carry
        x = jnp.tanh(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", None, None, NUMBERS))
        return (0.9 * kernel, x), None

    return jnp.sum(lax.scan(step, (kernel, x), length=2)[0][1])


CASES = {
    **{name: image_loss(name) for name in ("auto", "grouped", "unfold", "taps")},
    "kernel of the example": (
        Loss(
            kernel_of_the_example,
            ({"k": normal(3, 3, 4, 4), "b": normal()}, batch(6, 6, 4), batch(3, 3, 4, 4)),
        ),
        {},
    ),
    "kernel in a carry": (Loss(kernel_in_a_carry, (normal(3, 3, 2, 2), batch(1, 5, 5, 2))), {}),
    **{
        name: ({**LAYERS, **USES}[name], {})
        for name in (
            "dense_over_positions",
            "convolution_depthwise",
            "convolution_3d",
            "parameter_is_the_image",
            "attention",
            "group_norm",
            "embedding_tied_with_output",
            "layers_in_a_scan",
            "nested_control_flow",
            "sorted_and_ranked",
            "low_rank_adapter",
        )
    },
}


def with_others(args, others):
    """Replace the floating-point data of all examples but the middle one."""
    params, *examples = args
    replaced = []
    for x in examples:
        if x.dtype.kind == "f":
            x, kept = others(x), x[1]
            x[1] = kept
        replaced.append(x)
    return (params, *replaced)


OTHERS = {
    "NaN": lambda x: np.full_like(x, np.nan),
    "infinite": lambda x: np.full_like(x, np.inf),
    "huge": lambda x: np.full_like(x, np.finfo(x.dtype).max),
    "changed": lambda x: -3 * x[::-1] + 1,
    "one entry": lambda x: np.where(np.arange(x.size).reshape(x.shape) == 0, -np.inf, x),
}


def bits(tree):
    return [np.asarray(x)[1].tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", [pytest.param(v, id=k) for k, v in CASES.items()])
def test_other_examples_change_no_bit(case, dtype, x64):
    loss, options = case
    args = loss.arguments(dtype)
    assert BATCH == 3
    differentiate = jax.jit(perex.value_and_grad(loss.fun, **options))
    expected = bits(differentiate(*args))
    for name, others in OTHERS.items():
        results = differentiate(*with_others(args, others))
        assert bits(results) == expected, name
        if name == "NaN":
            values = np.asarray(results[0])
            assert not np.isfinite(values[0]) and np.isfinite(values[1])


def test_the_check_sees_a_leak(x64):
    def mean_of_all(w, x):
        return jax.vmap(jax.grad(lambda w, x: jnp.sum(w * x)), (None, 0))(w, x - 0 * jnp.mean(x))

    w, x = normal(4), batch(4)
    expected = bits(mean_of_all(w, x))
    assert bits(mean_of_all(*with_others((w, x), OTHERS["changed"]))) == expected
    assert bits(mean_of_all(*with_others((w, x), OTHERS["NaN"]))) != expected


@pytest.mark.parametrize("name", ["kernel of the example", "kernel in a carry"])
def test_kernels_that_are_no_sites_are_exact(name, x64):
    loss, _ = CASES[name]
    args = loss.arguments()
    actual = jax.jit(perex.value_and_grad(loss.fun))(*args)
    values, _, grads = loop(jax.jit(loss.fun))(*args)
    assert_trees_close(actual, (values, grads), rtol=1e-9, atol=1e-11)


def test_second_order_through_a_kernel_of_the_example(x64):
    loss, _ = CASES["kernel of the example"]
    params, *examples = loss.arguments()

    def by_perex(p):
        return jnp.sum(jnp.sin(perex.grad(loss.fun)(p, *examples)["k"]))

    def by_loop(p):
        one = functools.partial(jax.grad(loss.fun), p)
        return sum(jnp.sum(jnp.sin(one(*(x[b] for x in examples))["k"])) for b in range(BATCH))

    actual, expected = jax.jit(jax.grad(by_perex))(params), jax.jit(jax.grad(by_loop))(params)
    assert_trees_close(actual, expected, rtol=1e-9, atol=1e-11)
