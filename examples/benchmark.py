"""Times perex against JAX's own ways, and against other libraries.

    python examples/benchmark.py                                # a sample of all suites, minutes
    python examples/benchmark.py --suite=conv --full            # the whole grid of layers
    python examples/benchmark.py --suite=clipped --models=mnist,resnet18 --batch_size=16
    python examples/benchmark.py --suite=conv --layers=depthwise --json=FILE

Suites:

    grad     per-example gradients of models: perex.grad by algorithm, vmap(grad)
    conv     per-example kernel gradients of single convolutions, by algorithm
    masks    masked convolutions: perex.exact_masks against the kernel with zeros in it
    clipped  sums of clipped gradients: perex.clipped_grad, factored gradients with perex.dp_clip,
             vmap and clip, jax_privacy where it is installed, Opacus where --opacus_python has it
    models   sums of clipped gradients on more models, with compile times and memory

Within a row all contestants are compiled first, their results are compared with each other, and
then they run in turn. Times are medians, ratios are medians of ratios within a round. Temporaries
are what the compiler reserves besides arguments and results. The program fails if results differ.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from typing import Any

import _benchmark_conv
import _benchmark_grad
import _benchmark_masks
import _benchmark_report as report
import _benchmark_sums
import jax
from _benchmark_timing import Settings, measure
from absl import app, flags

SUITES: dict[str, report.Suite] = {
    "grad": _benchmark_grad.SUITE,
    "conv": _benchmark_conv.SUITE,
    "masks": _benchmark_masks.SUITE,
    "clipped": _benchmark_sums.CLIPPED,
    "models": _benchmark_sums.MODELS,
}
# How far results may differ, relative to their norm. Deep models amplify rounding, and accelerators
# multiply float32 numbers in a shorter type unless told otherwise.
TOLERANCES = {"bfloat16": 0.2, "float32": 5e-3, "float64": 1e-6}
_SHORT_PRODUCTS = 0.1

_SUITE = flags.DEFINE_multi_enum("suite", ["all"], ["all", *SUITES], "What to time.")
_FULL = flags.DEFINE_bool("full", False, "Everything that a suite has, instead of a sample.")
_LAYERS = flags.DEFINE_list("layers", [], "Layers to run: parts of their names.")
_MODELS = flags.DEFINE_list("models", [], "Models to run: parts of their names.")
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", None, "Batch size, in place of the suite's own.", lower_bound=1
)
_MICROBATCH_SIZE = flags.DEFINE_integer(
    "microbatch_size", None, "Microbatch size of the clipped sums that take one.", lower_bound=1
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Rounds to run, at least.", lower_bound=1)
_MIN_TIME = flags.DEFINE_float(
    "min_time", 0.2, "Seconds to run each contestant for, at least.", lower_bound=0
)
_MAX_TIME = flags.DEFINE_float(
    "max_time", 10, "Once a contestant took so many seconds, three rounds do.", lower_bound=0
)
_DTYPE = flags.DEFINE_enum("dtype", "float32", list(TOLERANCES), "Type of parameters and inputs.")
_PRECISION = flags.DEFINE_enum(
    "precision", None, ["default", "high", "highest"], "Of matrix products and convolutions."
)
_MEMORY_LIMIT = flags.DEFINE_float(
    "memory_limit_gib", 8, "A contestant that needs more memory does not run.", lower_bound=0
)
_CACHE = flags.DEFINE_float("cache_mib", 4, "What counts as fitting in cache.", lower_bound=0)
_JSON = flags.DEFINE_string("json", None, "File to write all figures to.")
_OPACUS = flags.DEFINE_string(
    "opacus_python", "", "A Python interpreter with torch and Opacus, to compare with."
)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    tolerance = TOLERANCES[_DTYPE.value]
    if jax.default_backend() != "cpu" and _PRECISION.value != "highest":
        tolerance = max(tolerance, _SHORT_PRODUCTS)
    options = report.Options(
        Settings(
            _REPEATS.value,
            _MIN_TIME.value,
            _MAX_TIME.value,
            tolerance,
            _MEMORY_LIMIT.value * 2**30,
        ),
        _FULL.value,
        _LAYERS.value,
        _MODELS.value,
        _BATCH_SIZE.value,
        _MICROBATCH_SIZE.value,
        _DTYPE.value,
        int(_CACHE.value * 2**20),
        _OPACUS.value,
    )
    names = list(SUITES) if "all" in _SUITE.value else list(dict.fromkeys(_SUITE.value))
    check_patterns(names, options)
    with (
        jax.enable_x64(_DTYPE.value == "float64"),
        jax.default_matmul_precision(_PRECISION.value),
    ):
        if wrong := run(names, options, _JSON.value):
            raise SystemExit(f"{wrong} result(s) are wrong; see above")


def check_patterns(names: Sequence[str], options: report.Options) -> None:
    """Raises a usage error if a pattern is in no name of these suites."""
    everything = dataclasses.replace(options, full=True, layers=(), models=())
    known = {task.name: None for name in names for task in SUITES[name].tasks(everything)}
    for pattern in (*options.layers, *options.models):
        if not any(pattern in name for name in known):
            raise app.UsageError(f"nothing has {pattern!r} in its name; there are {list(known)}")


def run(names: Sequence[str], options: report.Options, path: str | None) -> int:
    """Runs suites, prints what they find, and writes it to a file after each row.

    Args:
      names: the suites.
      options: what to run of them.
      path: the file, or None.

    Returns:
      How many results were wrong.
    """
    about = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "dtype": options.dtype,
        "precision": jax.config.jax_default_matmul_precision,
    }
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    found: list[dict[str, Any]] = []
    wrong = 0
    for name in names:
        suite, rows = SUITES[name], []
        for task in report.progress(list(suite.tasks(options)), name):
            row = report.Row(
                task.name,
                task.batch_size,
                measure(task.contestants(), options.settings),
                {**task.facts, **task.afterwards()},
            )
            rows.append(row)
            found.append(row.as_json(name))
            wrong += sum(measurement.wrong for measurement in row.measurements.values())
            if path:
                report.write(path, about, found)
        report.show(suite, rows, options)
    return wrong


if __name__ == "__main__":
    app.run(main)
