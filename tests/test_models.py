"""Whole models, small, in every mode; at full size no large leaf falls back."""

import math
import re

import jax
import jax.numpy as jnp
import modes
import pytest

import perex
from examples.models import BUILDERS

SMALL_TRANSFORMER = {"dim": 8, "blocks": 2, "heads": 2, "length": 6, "vocabulary": 20}
SMALL_RECURRENT = {"hidden": 4, "steps": 5, "vocabulary": 9}

# name -> (builder, sizes that make it small, sizes of the benchmark other than the defaults)
MODELS = {
    "dense": ("dense", {"sizes": (6, 5, 4)}, {}),
    "mnist_cnn": ("mnist_cnn", {"size": 16, "widths": (2, 3, 4)}, {}),
    "cifar_cnn": ("cifar_cnn", {"size": 8, "widths": (4, 4, 4, 4)}, {}),
    "resnet18": ("resnet18", {"size": 8, "width": 2}, {}),
    "wrn16_4": ("wrn16_4", {"size": 8, "width": 2, "factor": 1}, {}),
    "convnext": ("convnext", {"size": 8, "widths": (4, 8), "depths": (1, 1)}, {}),
    "mobilenet_v2": (
        "mobilenet_v2",
        {"size": 8, "width": 0.1, "table": ((1, 40, 1, 1), (2, 40, 2, 2)), "last": 80},
        {},
    ),
    "unet": ("unet", {"size": 8, "widths": (4, 8)}, {}),
    "pixelcnn": ("pixelcnn", {"size": 7, "width": 4, "depth": 2}, {}),
    "vit": ("vit", {"size": 8, "dim": 8, "heads": 2, "blocks": 2}, {}),
    "transformer": ("transformer", SMALL_TRANSFORMER, {}),
    "transformer, scan": ("transformer", {**SMALL_TRANSFORMER, "scan": True}, {"scan": True}),
    "transformer, scan, remat": (
        "transformer",
        {**SMALL_TRANSFORMER, "scan": True, "remat": True},
        {"scan": True, "remat": True},
    ),
    "lstm": ("lstm", SMALL_RECURRENT, {}),
    "gru": ("gru", SMALL_RECURRENT, {}),
    "moe": (
        "moe",
        {**SMALL_TRANSFORMER, "blocks": 1, "experts": 2, "capacity": 4},
        {},
    ),
    "lora": (
        "lora",
        {**SMALL_TRANSFORMER, "rank": 2, "scan": True},
        {"dim": 64, "vocabulary": 500},
    ),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", MODELS)
def test_small(name):
    builder, sizes, _ = MODELS[name]
    loss, params, batch = BUILDERS[builder](3, jax.random.key(1), dtype=jnp.float64, **sizes)
    modes.check(loss, params, *batch)


@pytest.mark.parametrize("name", MODELS)
def test_no_large_leaf_falls_back(name):
    builder, _, sizes = MODELS[name]
    found = []

    def build(key):
        loss, params, batch = BUILDERS[builder](2, key, **sizes)
        found.append(loss)
        return params, batch

    if builder == "lora":  # its loss holds the pretrained weights
        params, batch = build(jax.random.key(0))
    else:
        params, batch = jax.eval_shape(build, jax.random.key(0))
    _, *told, _ = str(perex.explain(found[-1])(params, *batch)).splitlines()
    total = sum(x.size for x in jax.tree.leaves(params))
    assert len(told) >= len(jax.tree.leaves(params))
    for line in told:
        shape = re.match(r" *\S.*? \[([\d, ]*)\]: ", line).group(1)
        size = math.prod(int(n) for n in shape.split(", ") if n)
        assert "not used" not in line
        assert size <= 0.01 * total or ": rule " in line, line


def test_every_builder_is_tested():
    assert {builder for builder, *_ in MODELS.values()} == set(BUILDERS)
