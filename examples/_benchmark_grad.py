"""The suite `grad`: per-example gradients of whole models, by convolution algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import _benchmark_models as models
import jax
import jax.numpy as jnp
from _benchmark_report import (
    Column,
    Options,
    Row,
    Suite,
    Task,
    Verdict,
    compile_seconds,
    mebibytes,
    milliseconds,
    ratio,
    spread,
)
from _benchmark_timing import Contestant

import perex

_ORDINARY, _VMAP, _AUTO = "ordinary", "vmap(grad)", "auto"
# These cover every convolution, so a whole model can be run with each.
_ALGORITHMS = ("grouped", "unfold", "taps")
ENTRIES = (
    models.Entry("mnist_cnn", "mnist_cnn", 128, sample=32),
    models.Entry("cifar_cnn", "cifar_cnn", 64, sample=8),
    models.Entry("resnet18 width 16", "resnet18", 32, {"width": 16}),
    models.Entry("resnet18 width 64", "resnet18", 32, {"width": 64}),
)


def _tasks(options: Options) -> Iterator[Task]:
    for entry, batch_size in models.select(ENTRIES, options):
        yield Task(
            entry.name,
            batch_size,
            partial(contestants, entry, batch_size, jnp.dtype(options.dtype)),
        )


def contestants(entry: models.Entry, batch_size: int, dtype: jnp.dtype) -> list[Contestant]:
    """Returns the ways to per-example gradients of a model, and the ordinary gradient."""
    problem = models.build(entry, batch_size, dtype)
    mean = {"mean gradient": lambda gradient: gradient}
    each = {
        "gradients": lambda gradients: gradients,
        "mean gradient": lambda gradients: jax.tree.map(lambda g: g.mean(0), gradients),
    }
    return [
        Contestant(_ORDINARY, models.ordinary(problem), problem.args, mean),
        Contestant(_VMAP, models.vmapped(problem), problem.args, each),
        *(
            Contestant(name, perex.grad(problem.loss, conv=name), problem.args, each)
            for name in (*_ALGORITHMS, _AUTO)
        ),
    ]


def _columns(rows: Sequence[Row]) -> Sequence[Column]:
    del rows
    return [
        milliseconds(_ORDINARY),
        milliseconds(_VMAP),
        *(milliseconds(name) for name in _ALGORITHMS),
        milliseconds(_AUTO),
        ratio(_AUTO, _VMAP, "auto /\nvmap"),
        ratio(_AUTO, _ORDINARY, "auto /\nordinary"),
        mebibytes(_ORDINARY),
        mebibytes(_VMAP, "vmap"),
        mebibytes(_AUTO),
        compile_seconds(_ORDINARY),
        compile_seconds(_VMAP, "vmap"),
        compile_seconds(_AUTO),
    ]


def _verdicts(rows: Sequence[Row], options: Options) -> Sequence[Verdict]:
    del options
    compiling = (row[_AUTO].compile_seconds / row[_VMAP].compile_seconds for row in rows)
    return [
        spread("perex.grad / vmap(grad)", (row.ratio(_AUTO, _VMAP) for row in rows)),
        spread("perex.grad / ordinary gradient", (row.ratio(_AUTO, _ORDINARY) for row in rows)),
        spread("compile time, perex.grad / vmap(grad)", compiling),
    ]


SUITE = Suite("Per-example gradients of a model", _tasks, _columns, _verdicts)
