"""`perex.explain`: a line for each use of a parameter, with its rule or the reason for none."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses import batch, normal
from losses_layers import LAYERS
from losses_uses import USES

import perex

LOSSES = {**LAYERS, **USES}
W, X = normal(4, 4).astype(np.float32), batch(4).astype(np.float32)


def explained(loss):
    options = {**loss.differentiate, "in_axes": loss.in_axes}
    args = loss.arguments(np.float32)
    return perex.explain(loss.fun, **options)(*args, **loss.kwargs)


def lines(fun, *args, **options):
    """The head and a line for each use, without the sum in the last line."""
    *found, last = str(perex.explain(fun, **options)(*args)).splitlines()
    assert last.startswith("  in all, a clipped sum holds ")
    return found


@pytest.mark.parametrize("loss", [pytest.param(v, id=k) for k, v in LOSSES.items()])
def test_uses_with_rules_are_found(loss):
    text = explained(loss)
    assert sum(": rule " in line for line in text.splitlines()) == loss.sites, text
    # Each leaf has at least one line, under its own path.
    args = loss.arguments(np.float32)
    for argnum in np.atleast_1d(loss.argnums):
        for path, _ in jax.tree_util.tree_leaves_with_path(args[argnum]):
            name = f"argument {argnum % len(args)}"
            name += f" at {jax.tree_util.keystr(path)}" if path else ""
            assert f"\n  {name} [" in text, name


def test_a_line_names_leaf_equation_source_line_and_rule():
    def fun(params, x):
        return jnp.sum(jnp.tanh(params["w"].T @ x + params["b"]))  # here

    params = {"w": W, "b": W[0]}
    head, bias, weight = lines(fun, params, X)
    source = pathlib.Path(__file__).read_text().splitlines()
    line = next(i for i, s in enumerate(source, 1) if s.endswith("# " + "here"))
    assert head == (
        "perex.explain: 3 examples, 2 parameter leaves, 20 parameters, 80.0% of them by rules alone"
    )
    assert re.match(r"  argument 0 at \['b'\] \[4\]: add at .*test_explain.py:\d+", bias), bias
    assert "plain by design, 20.0% of the parameters" in bias
    assert re.match(
        rf"  argument 0 at \['w'\] \[4, 4\]: dot_general at .*test_explain.py:{line}.*\(.*fun\): "
        "rule dot_general, after transpose",
        weight,
    ), weight


def test_the_convolution_algorithm_is_named():
    loss = LOSSES["convolution_1d"]
    args = loss.arguments(np.float32)
    for name in ("grouped", "unfold"):
        text = str(perex.explain(loss.fun, conv=name)(*args))
        (line,) = [line for line in text.splitlines() if ": rule " in line]
        assert "rule conv_general_dilated" in line and name in line, line


def by_carry(w, x):
    def step(carry, _):
        return (carry[0] * 0.9, jnp.tanh(carry[0] @ carry[1])), None

    return jnp.sum(jax.lax.scan(step, (w, x), length=2)[0][1])


@pytest.mark.parametrize(
    "fun, reason",
    [
        (lambda w, x: jnp.sum(w**2), "plain by design, 100.0% of the parameters: it is part of"),
        (lambda w, x: jnp.sum(w * x), "mul at .*: plain by design, .*elementwise"),
        (lambda w, x: jnp.sum(jnp.sort(w + 0 * x)), "add at .*: plain by design"),
        (lambda w, x: jnp.sum(jax.lax.concatenate([w, x[None]], 0)), "concatenate at .*: fallback"),
        (by_carry, "fallback to vmap.grad.*: it travels in the carry of a loop"),
        (lambda w, x: jnp.sum(jax.lax.stop_gradient(w) @ x), "no gradient flows to it: zero"),
        (lambda w, x: jnp.sum(x), "no gradient flows to it: zero"),
    ],
    ids=["result", "scale", "bias", "concatenated", "carry", "stopped", "unused"],
)
def test_reasons(fun, reason):
    text = "\n".join(lines(fun, W, X))
    assert re.search(reason, text) and ": rule " not in text, text


def test_a_parameter_of_each_example_has_a_reason():
    loss = LOSSES["parameters_of_each_example"]
    text = explained(loss)
    assert re.search(r"at \['own'\].*fallback to vmap\(grad\).*in_axes gives each", text), text
    assert re.search(r"at \['shared'\].*: rule dot_general", text), text


def test_a_use_is_listed_once():
    head, use = lines(lambda w, x: jnp.sum(jnp.where(x > 0, w, 2 * w)), W, X)
    assert "select_n" in use, use


def test_uses_within_a_scan():
    text = explained(LOSSES["layers_in_a_scan"])
    assert re.search(r"rule dot_general.*in a scan, stacked over 3 steps", text), text
    text = explained(LOSSES["for_loop"])
    assert re.search(r"rule dot_general.*in a scan, shared over 3 steps", text), text


def test_shapes_are_enough_and_nothing_is_computed():
    seen = []

    def fun(params, x):
        jax.debug.callback(seen.append, x[0])
        return jnp.sum(params["w"] @ x)

    of = jax.ShapeDtypeStruct
    text = perex.explain(fun)({"w": of((4, 4), jnp.float32)}, of((3, 4), jnp.float32))
    assert text == perex.explain(fun)({"w": W}, X)
    jax.effects_barrier()
    assert not seen
    assert "3 examples, 1 parameter leaf, 16 parameters" in text


def test_it_prints_as_it_reads():
    text = perex.explain(lambda w, x: jnp.sum(w @ x))(W, X)
    assert repr(text) == str(text) and text.startswith("perex.explain: ")
    assert isinstance(text, str)


def test_names_of_a_users_functions_mean_nothing():
    text = explained(LOSSES["own_functions_with_known_names"])
    assert "rule dot_general" in text and "rule conv" not in text
    assert re.search(r"at \['b'\].*add at .*losses_uses.py:\d+.*\(conv\): plain by design", text)


def test_bytes_held_for_the_batch():
    """Factors of what is large, arrays of what is small, and nothing of what takes no part."""

    def fun(params, x):
        penalty = jnp.sum(params["large"] ** 2)
        return jnp.sum(jnp.tanh(x @ params["large"]) * params["small"]) + penalty

    params = {"large": W.repeat(64, 0).repeat(64, 1), "small": np.ones(256, np.float32)}
    params["unused"] = np.ones((512, 512), np.float32)
    text = str(perex.explain(fun)(params, np.ones((100, 256), np.float32)))
    # 100 examples of 256 inputs and 256 cotangents, or of one cotangent of the penalty.
    assert re.search(r"\['large'\].*dot_general.*clipped sum: gram .*, holds 200 KiB", text), text
    assert re.search(r"\['large'\].*: add at.*clipped sum: gram .*, holds 400 B", text), text
    assert re.search(r"\['small'\].*mul at.*; holds 100 KiB for the batch", text), text
    assert re.search(r"\['unused'\].*no gradient flows to it: zero$", text, re.M), text
    assert "a clipped sum holds 300 KiB for the batch; of that an ordinary gradient holds" in text
