"""Models of four frameworks: the examples, exact in every mode; what BatchNorm is told."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import modes
import numpy as np
import oracle
import pytest
import with_equinox
import with_flax_linen
import with_flax_nnx
import with_haiku
from _training import FLAGS, train
from flax import nnx

import perex

PROGRAMS = {
    "linen": with_flax_linen,
    "nnx": with_flax_nnx,
    "haiku": with_haiku,
    "equinox": with_equinox,
}


def images(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", PROGRAMS)
def test_exact_with_a_dropout_key_for_each_example(name):
    loss, _, params = PROGRAMS[name].build()
    params = oracle.to_float64(params)
    keys = jax.random.split(jax.random.key(3), 3)
    batch = images(3, 8, 8, 1), jnp.array([1, 0, 9], jnp.int32), keys
    # Some layers of NNX round to float32 on the way, whatever they are given; the gradient of the
    # key's bias in attention is zero but for that.
    tolerance = 1e-6 if name == "nnx" else modes.TOLERANCE
    modes.check(loss, params, *batch, tolerance=tolerance)
    same_key = batch[0], batch[1], keys[jnp.zeros(3, int)]
    gradients = [perex.grad_norms(loss)(params, *b) for b in (batch, same_key)]
    # The first example has the key that it had, the others do not.
    changed = np.asarray(gradients[0] != gradients[1])
    assert not changed[0] and changed[1:].all()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", PROGRAMS)
def test_large_leaves_keep_their_rules(name):
    loss, _, params = PROGRAMS[name].build()
    batch = images(2, 8, 8, 1), jnp.zeros(2, jnp.int32), jax.random.split(jax.random.key(0), 2)
    lines = modes.uses(loss, params, *batch).splitlines()[1:-1]
    for line in lines:
        assert ": rule " in line or ": add at" in line or ": mul at" in line, line


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_runs(name):
    FLAGS(["test", "--steps=2", "--batch_size=64"])
    loss, predict, params = PROGRAMS[name].build()
    result = train(loss, predict, params)
    assert jax.tree.structure(result.params) == jax.tree.structure(params)
    moved = jax.tree.map(lambda a, b: np.any(a != b), result.params, params)
    assert all(jax.tree.leaves(moved)) and np.all(np.isfinite(result.losses))


class LinenWithBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not train)(x))


def test_linen_batch_statistics():
    model = LinenWithBatchNorm()
    variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
    params, statistics = variables["params"], variables["batch_stats"]
    x = jnp.asarray(images(4, 3), jnp.float32)

    def training(params, x):
        variables = {"params": params, "batch_stats": statistics}
        y, updates = model.apply(variables, x, mutable=["batch_stats"])
        return jnp.sum(y**2), updates

    def fixed(params, x):
        y = model.apply({"params": params, "batch_stats": statistics}, x, train=False)
        return jnp.sum(y**2)

    with pytest.warns(UserWarning, match="batch_stats.*GroupNorm.*use_running_average=True"):
        perex.grad(training, has_aux=True, keep_batch_dim=True)(params, x)
    assert jnp.shape(perex.grad_norms(fixed)(params, x)) == (4,)  # no warning


def test_nnx_batch_statistics():
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    structure, params, statistics = nnx.split(model, nnx.Param, nnx.BatchStat)

    def loss(params, x):
        model = nnx.merge(structure, params, statistics, copy=True)
        y = model(x)
        return jnp.sum(y**2), nnx.state(model, nnx.BatchStat)

    with pytest.warns(UserWarning, match="BatchStat.*GroupNorm"):
        perex.grad(loss, has_aux=True, keep_batch_dim=True)(params, jnp.ones((4, 3)))


def test_haiku_batch_statistics():
    def network(x):
        return jnp.sum(hk.BatchNorm(True, True, 0.9, name="any")(x, is_training=True) ** 2)

    model = hk.transform_with_state(network)
    params, state = model.init(jax.random.key(0), jnp.ones((1, 3)))

    def loss(params, x):
        return model.apply(params, state, None, x)

    with pytest.warns(UserWarning, match="mean_ema.*GroupNorm"):
        perex.grad(loss, has_aux=True, keep_batch_dim=True)(params, jnp.ones((4, 3)))


def test_batch_norm_over_a_named_axis():
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="batch", mode="batch")
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x):
        y, _ = eqx.combine(params, static)(x, state)
        return jnp.sum(y**2)

    with pytest.raises(NameError, match="unbound axis name: batch.*GroupNorm"):
        perex.grad(loss)(params, jnp.ones((4, 3)))


def test_other_name_errors_are_left_alone():
    def loss(w, x):
        return undefined(w, x)  # noqa: F821

    with pytest.raises(NameError, match="^name 'undefined' is not defined"):
        perex.grad(loss)(jnp.ones(3), jnp.ones((2, 3)))


def test_auxiliary_data_without_batch_statistics():
    def loss(w, x):
        return jnp.sum(w * x), {"batch": x, "norm": x}

    perex.grad(loss, has_aux=True)(jnp.ones(3), jnp.ones((2, 3)))  # warnings are errors here
