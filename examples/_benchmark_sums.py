"""The suites `clipped` and `models`: sums of clipped gradients of whole models.

`clipped` compares with everything there is, also with other libraries; `models` has more models,
fewer contestants, and looks at compile time and memory too.

Where the compiler's own kernel gradients are slow, a clipped sum can beat the ordinary gradient. So
the contestant `own rules` is the ordinary gradient computed by perex's rules (the weighted sum of
factored gradients, all weights one): against it, one sees what clipping alone costs.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import _benchmark_models as models
import _benchmark_peers as peers
import jax
import jax.numpy as jnp
from _benchmark_models import Entry, Problem
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

_ORDINARY, _OWN, _CLIPPED, _CHAIN = "ordinary", "own rules", "clipped_grad", "dp_clip"
_SAVING = "save_memory"
_VMAP, _VMAP_CLIP, _JAX_PRIVACY = "vmap(grad)", "vmap + clip", "jax_privacy"

CLIPPED_ENTRIES = (
    Entry("mnist_cnn", "mnist_cnn", 128, sample=32),
    Entry("cifar_cnn", "cifar_cnn", 64),
    Entry("dense 784-512-512-10", "dense", 256, sample=64),
    Entry("resnet18 width 16", "resnet18", 32, {"width": 16}),
    Entry("resnet18 width 64, small batch", "resnet18", 16, {"width": 64}),
    Entry("resnet18 width 64", "resnet18", 32, {"width": 64}),
    Entry("wrn16_4", "wrn16_4", 32),
    Entry("vit", "vit", 32),
    Entry("transformer", "transformer", 16),
)
MODELS_ENTRIES = (
    Entry("lstm", "lstm", 32),
    Entry("gru", "gru", 32, sample=4),
    Entry("transformer scan", "transformer", 16, {"scan": True}),
    Entry(
        "transformer scan remat",
        "transformer",
        16,
        {"scan": True, "remat": True},
        remat_of="transformer scan",
    ),
    Entry("convnext", "convnext", 32),
    Entry("mobilenet_v2", "mobilenet_v2", 32),
    Entry("unet", "unet", 32),
    Entry("pixelcnn", "pixelcnn", 32),
    Entry("moe", "moe", 16),
    Entry("lora", "lora", 16),
    Entry("vit", "vit", 32),
    Entry("wrn16_4", "wrn16_4", 32),
    Entry("resnet18 width 16", "resnet18", 32, {"width": 16}),
)


def _clipped_tasks(options: Options) -> Iterator[Task]:
    for entry, batch_size in models.select(CLIPPED_ENTRIES, options):
        yield Task(
            entry.name,
            batch_size,
            partial(clipped_contestants, entry, batch_size, options),
            afterwards=partial(peers.opacus, entry, batch_size, options),
        )


def _models_tasks(options: Options) -> Iterator[Task]:
    for entry, batch_size in models.select(MODELS_ENTRIES, options):
        yield Task(
            entry.name,
            batch_size,
            partial(models_contestants, entry, batch_size, options),
            {"remat_of": entry.remat_of},
        )


def clipped_contestants(entry: Entry, batch_size: int, options: Options) -> list[Contestant]:
    """Returns every way to a clipped sum of a model's gradients."""
    problem = models.build(entry, batch_size, jnp.dtype(options.dtype))
    mean = {"mean gradient": lambda gradient: gradient}
    total = {"clipped sum": lambda result: result}
    contestants = [
        Contestant(_ORDINARY, models.ordinary(problem), problem.args, mean),
        Contestant(_OWN, own_rules(problem), problem.args, mean),
        Contestant(_VMAP_CLIP, models.vmapped_and_clipped(problem), problem.args, total),
        _clipped(problem, options),
        Contestant(
            _CHAIN,
            chain(problem),
            problem.args,
            {"clipped sum": lambda update: jax.tree.map(lambda g: g * batch_size, update)},
        ),
    ]
    if importlib.util.find_spec("jax_privacy"):
        # It takes no microbatch size that leaves a remainder.
        size = options.microbatch_size
        size = None if size is not None and batch_size % size else size
        peer = jax_privacy(problem, size)
        contestants.append(Contestant(_JAX_PRIVACY, peer, problem.args, total))
    return contestants


def models_contestants(entry: Entry, batch_size: int, options: Options) -> list[Contestant]:
    """Returns the clipped sum of a model's gradients and what it is measured against."""
    problem = models.build(entry, batch_size, jnp.dtype(options.dtype))
    mean = {"mean gradient": lambda gradient: gradient}
    means = {"mean gradient": lambda gradients: jax.tree.map(lambda g: g.mean(0), gradients)}
    total = {"clipped sum": lambda result: result}
    contestants = [
        Contestant(_ORDINARY, models.ordinary(problem), problem.args, mean),
        Contestant(_VMAP, models.vmapped(problem), problem.args, means),
        Contestant(_VMAP_CLIP, models.vmapped_and_clipped(problem), problem.args, total),
        _clipped(problem, options),
    ]
    if entry.remat_of:
        contestants.append(_clipped(problem, options, save_memory=True))
    return contestants


def _clipped(problem: Problem, options: Options, save_memory: bool = False) -> Contestant:
    function = perex.clipped_grad(
        problem.loss,
        problem.l2_norm_clip,
        microbatch_size=options.microbatch_size,
        save_memory=save_memory,
    )
    name = _SAVING if save_memory else _CLIPPED
    return Contestant(name, function, problem.args, {"clipped sum": lambda result: result[0]})


def own_rules(problem: Problem) -> Callable[..., Any]:
    """The ordinary gradient by perex's rules: the weighted sum of factored gradients."""
    factored = perex.grad(problem.loss, factored=True)

    def mean_gradient(*args: Any) -> Any:
        weights = jnp.full(problem.batch_size, 1 / problem.batch_size)

        def one(leaf: Any) -> jax.Array:
            if isinstance(leaf, perex.PerExample):
                return leaf.weighted_sum(weights)
            return models.weighted(leaf, weights)

        gradients = factored(*args)
        return jax.tree.map(one, gradients, is_leaf=lambda x: isinstance(x, perex.PerExample))

    return mean_gradient


def chain(problem: Problem) -> Callable[..., Any]:
    """The clipped mean by factored gradients and `perex.dp_clip`, without noise."""
    factored = perex.grad(problem.loss, factored=True)
    transform = perex.dp_clip(problem.l2_norm_clip, 0.0, jax.random.key(0))
    state = transform.init(problem.params)

    def clipped_mean(params: Any, *batch: Any) -> Any:
        return transform.update(factored(params, *batch), state, params)[0]

    return clipped_mean


def jax_privacy(problem: Problem, microbatch_size: int | None) -> Callable[..., Any]:
    """The same sum by jax_privacy, which need not be installed otherwise."""
    clipping = importlib.import_module("jax_privacy.clipping")
    return clipping.clipped_grad(
        problem.loss,
        l2_clip_norm=problem.l2_norm_clip,
        batch_argnums=tuple(range(1, len(problem.args))),
        keep_batch_dim=False,
        microbatch_size=microbatch_size,
    )


def _memory(row: Row, name: str, other: str) -> float:
    """Returns the ratio of two contestants' peak temporaries."""
    mine, theirs = row[name].temporaries, row[other].temporaries
    return mine / theirs if mine is not None and theirs else math.nan


def _opacus(row: Row) -> float:
    """Returns the time of clipped_grad over that of Opacus's faster mode."""
    times = [row.facts.get(f"opacus {mode} ms", math.nan) for mode in peers.MODES]
    best = min((t for t in times if not math.isnan(t)), default=math.nan)
    return row[_CLIPPED].seconds * 1e3 / best


def _fact(key: str) -> Callable[[Row], float]:
    return lambda row: row.facts.get(key, math.nan)


def _clipped_columns(rows: Sequence[Row]) -> Sequence[Column]:
    columns: list[Column] = [
        milliseconds(_ORDINARY),
        milliseconds(_OWN),
        milliseconds(_CLIPPED),
        milliseconds(_CHAIN),
        milliseconds(_VMAP_CLIP),
        milliseconds(_JAX_PRIVACY),
    ]
    modes = [
        mode
        for mode in ("ordinary", *peers.MODES)
        if any(f"opacus {mode} ms" in r.facts for r in rows)
    ]
    columns += [(f"opacus\n{mode} ms", _fact(f"opacus {mode} ms")) for mode in modes]
    columns += [
        ratio(_CLIPPED, _ORDINARY, "clipped /\nordinary"),
        ratio(_CLIPPED, _OWN, "clipped /\nown rules"),
        ratio(_CHAIN, _CLIPPED, "dp_clip /\nclipped"),
        ratio(_VMAP_CLIP, _CLIPPED, "vmap /\nclipped"),
        ratio(_JAX_PRIVACY, _CLIPPED, "jax_privacy /\nclipped"),
    ]
    if modes:
        columns.append(("opacus best /\nclipped", lambda row: 1 / _opacus(row)))
    return [
        *columns,
        mebibytes(_ORDINARY),
        mebibytes(_CLIPPED),
        mebibytes(_JAX_PRIVACY),
        compile_seconds(_ORDINARY),
        compile_seconds(_CLIPPED),
    ]


def _clipped_verdicts(rows: Sequence[Row], options: Options) -> Sequence[Verdict]:
    del options
    verdicts = [
        spread(f"clipped_grad / {text}", (row.ratio(_CLIPPED, name) for row in rows))
        for text, name in (
            ("ordinary gradient", _ORDINARY),
            ("ordinary gradient with perex's own rules", _OWN),
            ("vmap + clip", _VMAP_CLIP),
            ("jax_privacy", _JAX_PRIVACY),
        )
    ]
    return [
        *verdicts,
        spread("clipped_grad / Opacus's faster mode (in a process of its own)", map(_opacus, rows)),
        spread("factored and dp_clip / clipped_grad", (r.ratio(_CHAIN, _CLIPPED) for r in rows)),
        spread(
            "temporaries, clipped_grad / ordinary", (_memory(r, _CLIPPED, _ORDINARY) for r in rows)
        ),
    ]


def _models_columns(rows: Sequence[Row]) -> Sequence[Column]:
    del rows
    return [
        milliseconds(_ORDINARY),
        milliseconds(_CLIPPED),
        milliseconds(_VMAP_CLIP),
        ratio(_CLIPPED, _ORDINARY, "clipped /\nordinary"),
        ratio(_VMAP_CLIP, _CLIPPED, "vmap /\nclipped"),
        mebibytes(_ORDINARY),
        mebibytes(_CLIPPED),
        mebibytes(_VMAP_CLIP),
        ("clipped /\nordinary MiB", lambda row: _memory(row, _CLIPPED, _ORDINARY)),
        compile_seconds(_ORDINARY),
        compile_seconds(_VMAP),
        compile_seconds(_CLIPPED),
        ("compile\nclipped / vmap", _compile_ratio),
    ]


def _compile_ratio(row: Row) -> float:
    return row[_CLIPPED].compile_seconds / row[_VMAP].compile_seconds


def _models_verdicts(rows: Sequence[Row], options: Options) -> Sequence[Verdict]:
    del options
    named = {row.name: row for row in rows}
    remat = []
    for row in rows:
        without = named.get(row.facts["remat_of"])
        if without is not None and row[_CLIPPED].temporaries and without[_CLIPPED].temporaries:
            saved = row[_CLIPPED].temporaries / without[_CLIPPED].temporaries  # type: ignore[operator]
            remat.append(
                (f"temporaries of clipped_grad, {row.name} / without remat", f"{saved:.2f}")
            )
        if _SAVING in row.measurements:
            remat += [
                (f"{what} of clipped_grad with save_memory / ordinary, {row.name}", f"{value:.2f}")
                for what, value in (
                    ("temporaries", _memory(row, _SAVING, _ORDINARY)),
                    ("time", row.ratio(_SAVING, _ORDINARY)),
                )
            ]
    return [
        spread("clipped_grad / ordinary gradient", (r.ratio(_CLIPPED, _ORDINARY) for r in rows)),
        spread("clipped_grad / vmap + clip", (r.ratio(_CLIPPED, _VMAP_CLIP) for r in rows)),
        spread(
            "temporaries, clipped_grad / ordinary", (_memory(r, _CLIPPED, _ORDINARY) for r in rows)
        ),
        spread("compile time, clipped_grad / vmap(grad)", map(_compile_ratio, rows)),
        *remat,
    ]


CLIPPED = Suite("Sums of clipped gradients", _clipped_tasks, _clipped_columns, _clipped_verdicts)
MODELS = Suite("More models", _models_tasks, _models_columns, _models_verdicts)
