"""Checkpointed regions: exact, values recomputed as the policy says."""

import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import perex

BATCH, DIM, LAYERS = 3, 4, 3
POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("kept"),
    "everything": jax.checkpoint_policies.everything_saveable,
}


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape))


def layer(params, x):
    y = checkpoint_name(jnp.sin(x @ params["w"]), "kept")
    return jnp.cos(y @ params["v"]) + params["b"]


def params():
    return {"w": normal(LAYERS, DIM, 5), "v": normal(LAYERS, 5, DIM), "b": normal(LAYERS, DIM)}


def loss_with(policy, scan, prevent_cse=True):
    remat = jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)

    def loss(params, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, layer: (remat(layer, x), None), x, params)
        else:
            for i in range(LAYERS):
                x = remat(jax.tree.map(lambda p, i=i: p[i], params), x)
        return jnp.sum(x**2)

    return loss


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
@pytest.mark.parametrize("policy", POLICIES)
def test_exact(policy, scan):
    loss = loss_with(POLICIES[policy], scan)
    modes.check(loss, params(), normal(BATCH, 2, DIM))
    assert modes.uses(loss, params(), normal(BATCH, 2, DIM)).count(": rule dot_general") >= 2


def count(jaxpr, name):
    """Count the equations of a primitive, those in bodies included."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    total = 0
    for equation in jaxpr.eqns:
        total += equation.primitive.name == name
        for value in equation.params.values():
            for body in value if isinstance(value, tuple | list) else (value,):
                if hasattr(body, "eqns") or hasattr(body, "jaxpr"):
                    total += count(body, name)
    return total


@pytest.mark.parametrize("policy", POLICIES)
def test_recomputes_what_the_policy_says(policy):
    """As many sines and cosines as in the ordinary gradient with the same policy."""
    loss, x = loss_with(POLICIES[policy], True), normal(BATCH, 2, DIM)
    ordinary = jax.make_jaxpr(jax.vmap(jax.grad(loss), (None, 0)))(params(), x)
    ours = jax.make_jaxpr(perex.grad(loss))(params(), x)
    assert [count(ours, n) for n in ("sin", "cos")] == [count(ordinary, n) for n in ("sin", "cos")]


def test_the_count_tells_policies_apart():
    x = normal(BATCH, 2, DIM)
    nothing, everything = (
        jax.make_jaxpr(perex.grad(loss_with(POLICIES[p], True)))(params(), x)
        for p in ("nothing", "everything")
    )
    assert count(nothing, "sin") > count(everything, "sin")


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_prevent_cse_is_kept(prevent_cse):
    loss = loss_with(POLICIES["nothing"], False, prevent_cse)
    x = normal(BATCH, 2, DIM)
    ordinary = jax.make_jaxpr(jax.vmap(jax.grad(loss), (None, 0)))(params(), x)
    ours = jax.make_jaxpr(perex.grad(loss))(params(), x)
    assert settings(ours) == settings(ordinary) == {prevent_cse}


def settings(jaxpr):
    """Return the settings of ``prevent_cse`` of all checkpoints."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    found = set()
    for equation in jaxpr.eqns:
        if "prevent_cse" in equation.params:
            found.add(equation.params["prevent_cse"])
        for value in equation.params.values():
            for body in value if isinstance(value, tuple | list) else (value,):
                if hasattr(body, "eqns") or hasattr(body, "jaxpr"):
                    found |= settings(body)
    return found
