"""The suite `conv`: per-example kernel gradients of single convolutions, by algorithm.

Each contestant gets the input and the cotangent of the result, so that all its time goes into the
kernel gradient: the loss of an example is the inner product of the layer's result with a given
array, which is linear in the kernel, and the compiler drops the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import _benchmark_layers as layers
import jax
import jax.numpy as jnp
import numpy as np
from _benchmark_report import (
    Column,
    Options,
    Row,
    Suite,
    Task,
    Verdict,
    compile_seconds,
    known,
    mebibytes,
    milliseconds,
    ratio,
    share,
    spread,
)
from _benchmark_timing import Contestant

import perex
from perex._rules.conv import describe
from perex._rules.conv.choose import ALGORITHMS

_ORDINARY, _VMAP, _AUTO, _PLAIN = "ordinary", "vmap(grad)", "auto", "product"


def _tasks(options: Options) -> Iterator[Task]:
    for layer in layers.select(options.layers, options.full):
        sizes = layer.batch_sizes
        if options.batch_size is not None:
            sizes = (options.batch_size,)
        elif not options.full and len(sizes) > 1:
            sizes = (layers.SAMPLE_BATCH_SIZE,)
        for batch_size in sizes:
            yield Task(
                layer.name,
                batch_size,
                partial(_contestants, layer, batch_size, jnp.dtype(options.dtype)),
                _facts(layer, batch_size, jnp.dtype(options.dtype)),
            )


def _facts(layer: layers.Layer, batch_size: int, dtype: jnp.dtype) -> dict[str, float]:
    groups, depth, positions, features = layer.product
    entries = groups * depth * features
    return {
        "gflop": 2e-9 * batch_size * positions * entries,
        "result_bytes": float(batch_size * entries * dtype.itemsize),
    }


def _contestants(layer: layers.Layer, batch_size: int, dtype: jnp.dtype) -> list[Contestant]:
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.standard_normal(layer.kernel_shape), dtype)
    images = jnp.asarray(rng.standard_normal((batch_size, *layer.input_shape)), dtype)
    cotangents = jnp.asarray(rng.standard_normal((batch_size, *layer.out_shape)), dtype)

    def loss(kernel: jax.Array, image: jax.Array, cotangent: jax.Array) -> jax.Array:
        return jnp.vdot(layer.apply(kernel, image[None])[0], cotangent)

    def batch_loss(kernel: jax.Array, images: jax.Array, cotangents: jax.Array) -> jax.Array:
        return jnp.vdot(layer.apply(kernel, images), cotangents)

    args = (kernel, images, cotangents)
    total = {"sum over examples": lambda gradient: gradient}
    each = {
        "gradients": lambda gradient: gradient,
        "sum over examples": lambda gradient: gradient.sum(0),
    }
    vmapped = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))
    return [
        Contestant(_ORDINARY, jax.grad(batch_loss), args, total),
        Contestant(_VMAP, vmapped, args, each),
        *(
            Contestant(name, perex.grad(loss, conv=name), args, each)
            for name in [*applicable(layer), _AUTO]
        ),
        _product(layer, batch_size, dtype),
    ]


def applicable(layer: layers.Layer) -> list[str]:
    """Returns the algorithms that cover a layer."""
    image = jnp.zeros((1, *layer.input_shape))
    kernel = jnp.zeros(layer.kernel_shape)
    jaxpr = jax.make_jaxpr(lambda image, kernel: layer.apply(kernel, image))(image, kernel)
    (equation,) = [e for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    operands = tuple(
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)  # type: ignore[union-attr]
        for v in equation.invars
    )
    result = equation.outvars[0].aval
    out = jax.ShapeDtypeStruct(result.shape, result.dtype)  # type: ignore[union-attr]
    convolution = describe(perex.Site(equation.primitive, equation.params, 1, operands, out))
    return [name for name, a in ALGORITHMS.items() if a.covers(convolution) is None]


def _product(layer: layers.Layer, batch_size: int, dtype: jnp.dtype) -> Contestant:
    """One matrix product [D, B T] [B T, P] a group: the same multiplications, without the rest."""
    groups, depth, positions, features = layer.product
    rows = batch_size * positions
    left = jnp.ones((groups, depth, rows), dtype)
    right = jnp.ones((groups, rows, features), dtype)
    return Contestant(_PLAIN, jnp.matmul, (left, right), {})


def _names(rows: Sequence[Row]) -> list[str]:
    """Returns the algorithms that any row has."""
    return [name for name in ALGORITHMS if any(name in row.measurements for row in rows)]


def _gflops(name: str, row: Row) -> float:
    return row.facts["gflop"] / row[name].seconds


def _columns(rows: Sequence[Row]) -> Sequence[Column]:
    names = _names(rows)
    return [
        milliseconds(_ORDINARY),
        milliseconds(_VMAP),
        *(milliseconds(name) for name in names),
        milliseconds(_AUTO),
        ratio(_AUTO, _VMAP, "auto /\nvmap"),
        ratio(_AUTO, _ORDINARY, "auto /\nordinary"),
        ("auto /\nbest", lambda row: row.ratio(_AUTO, row.best(names))),
        ("best", lambda row: row.best(names)),
        ("auto\nGFLOP/s", partial(_gflops, _AUTO)),
        ("product\nGFLOP/s", partial(_gflops, _PLAIN)),
        mebibytes(_AUTO),
        mebibytes(_VMAP, "vmap"),
        compile_seconds(_AUTO),
        compile_seconds(_VMAP, "vmap"),
    ]


def _verdicts(rows: Sequence[Row], options: Options) -> Sequence[Verdict]:
    names = _names(rows)
    to_best = known(row.ratio(_AUTO, row.best(names)) for row in rows)
    cached = [
        row.ratio(_PLAIN, _AUTO) for row in rows if row.facts["result_bytes"] <= options.cache_bytes
    ]
    compiling = (row[_AUTO].compile_seconds / row[_VMAP].compile_seconds for row in rows)
    slow = [
        f"{row.name} (B = {row.batch_size}): {row.ratio(_AUTO, row.best(names)):.2f} of "
        f"{row.best(names)}"
        for row in rows
        if row.ratio(_AUTO, row.best(names)) > 1.1
    ]
    return [
        spread("auto / vmap(grad)", (row.ratio(_AUTO, _VMAP) for row in rows)),
        spread("auto / ordinary kernel gradient", (row.ratio(_AUTO, _ORDINARY) for row in rows)),
        spread("auto / best algorithm", to_best),
        share("auto within 10 % of the best algorithm", (value <= 1.1 for value in to_best)),
        share(
            "result fits in cache, and auto has 60 % of the product's speed or more",
            (value >= 0.6 for value in known(cached)),
        ),
        spread("compile time, auto / vmap(grad)", compiling),
        *(("more than 10 % above the best", text) for text in slow),
    ]


SUITE = Suite("Per-example kernel gradients of a layer", _tasks, _columns, _verdicts)
