"""What the benchmark tells: tables, a summary of each suite, and all of it as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table
import tqdm
from _benchmark_timing import Contestant, Measurement, Settings

_NOTHING = Measurement()


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
      settings: how to measure.
      full: everything that a suite has, instead of a sample.
      layers: parts of names of layers to run; empty for all.
      models: parts of names of models to run; empty for all.
      batch_size: in place of each suite's own, if given.
      microbatch_size: for the clipped sums that take one.
      dtype: of parameters and inputs.
      cache_bytes: what counts as fitting in cache.
      opacus_python: an interpreter with torch and Opacus, or the empty string.
    """

    settings: Settings
    full: bool = False
    layers: Sequence[str] = ()
    models: Sequence[str] = ()
    batch_size: int | None = None
    microbatch_size: int | None = None
    dtype: str = "float32"
    cache_bytes: int = 4 << 20
    opacus_python: str = ""


@dataclasses.dataclass
class Row:
    """One comparison.

    Attributes:
      name: of the layer or the model.
      batch_size: number of examples.
      measurements: by contestant.
      facts: other figures.
    """

    name: str
    batch_size: int
    measurements: dict[str, Measurement]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __getitem__(self, name: str) -> Measurement:
        """Returns a contestant's measurement; an empty one if it did not take part."""
        return self.measurements.get(name, _NOTHING)

    def ratio(self, name: str, other: str) -> float:
        """Returns the time of one contestant over another's."""
        return self[name].ratio(self[other])

    def best(self, names: Iterable[str]) -> str:
        """Returns the fastest of these contestants, or the empty string if none ran."""
        ran = [name for name in names if self[name].times]
        return min(ran, key=lambda name: self[name].seconds, default="")

    def as_json(self, suite: str) -> dict[str, Any]:
        """Returns everything as plain values."""
        contestants = {
            name: dataclasses.asdict(m) | {"seconds": m.seconds}
            for name, m in self.measurements.items()
        }
        return {
            "suite": suite,
            "name": self.name,
            "batch_size": self.batch_size,
            "facts": self.facts,
            "contestants": contestants,
        }


@dataclasses.dataclass(frozen=True)
class Task:
    """One comparison to make: the contestants are built only when it is their turn.

    Attributes:
      name: of the layer or the model.
      batch_size: number of examples.
      contestants: builds them.
      facts: figures about the task, known beforehand.
      afterwards: returns more of them, such as what another program measured.
    """

    name: str
    batch_size: int
    contestants: Callable[[], Sequence[Contestant]]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    afterwards: Callable[[], dict[str, Any]] = dict


Column = tuple[str, Callable[[Row], Any]]
Verdict = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Suite:
    """A kind of comparison.

    Attributes:
      title: over the table.
      tasks: the comparisons to make.
      columns: (header, value of a row); numbers are printed with three digits.
      verdicts: sums the rows up: (statement, figure).
    """

    title: str
    tasks: Callable[[Options], Iterator[Task]]
    columns: Callable[[Sequence[Row]], Sequence[Column]]
    verdicts: Callable[[Sequence[Row], Options], Sequence[Verdict]]


def milliseconds(name: str, header: str | None = None) -> Column:
    """A column with a contestant's median time."""
    return f"{header or name}\nms", lambda row: row[name].seconds * 1e3


def ratio(name: str, other: str, header: str) -> Column:
    """A column with the ratio of two contestants' times."""
    return header, lambda row: row.ratio(name, other)


def mebibytes(name: str, header: str | None = None) -> Column:
    """A column with a contestant's peak temporaries."""

    def value(row: Row) -> float:
        temporaries = row[name].temporaries
        return math.nan if temporaries is None else temporaries / 2**20

    return f"{header or name}\nMiB", value


def compile_seconds(name: str, header: str | None = None) -> Column:
    """A column with a contestant's compile time."""
    return f"{header or name}\ncompile s", lambda row: row[name].compile_seconds


def known(values: Iterable[float]) -> list[float]:
    """Returns the values that are numbers."""
    return [value for value in values if not math.isnan(value)]


def spread(statement: str, values: Iterable[float]) -> Verdict:
    """Sums ratios up: geometric mean and worst."""
    ratios = known(values)
    if not ratios:
        return statement, "not measured"
    mean = statistics.geometric_mean(ratios)
    return statement, f"geometric mean {mean:.2f}, worst {max(ratios):.2f}, of {len(ratios)}"


def share(statement: str, holds: Iterable[bool]) -> Verdict:
    """Sums up how often something holds."""
    outcomes = list(holds)
    if not outcomes:
        return statement, "not measured"
    return statement, f"{sum(outcomes)} of {len(outcomes)}, {sum(outcomes) / len(outcomes):.0%}"


def form(value: Any) -> str:
    """Returns a cell's text."""
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "–"
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{min(digits, 4)}f}"


def show(suite: Suite, rows: Sequence[Row], options: Options) -> None:
    """Prints a suite's table, what went wrong, and the summary."""
    # A table in a file is as wide as it needs to be; on a terminal it must fit.
    console = rich.console.Console(width=None if sys.stdout.isatty() else 320)
    table = rich.table.Table(title=suite.title, box=rich.box.SIMPLE, title_justify="left")
    table.add_column("")
    table.add_column("B", justify="right")
    columns = suite.columns(rows)
    for header, _ in columns:
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(row.name, str(row.batch_size), *(form(value(row)) for _, value in columns))
    console.print(table)
    for row in rows:
        for name, measurement in row.measurements.items():
            if measurement.problem:
                word = "WRONG" if measurement.wrong else "not run"
                console.print(
                    f"{word}: {row.name}, B = {row.batch_size}, {name}: {measurement.problem}",
                    style="bold red" if measurement.wrong else None,
                    markup=False,
                )
    for statement, figure in suite.verdicts(rows, options):
        console.print(f"{statement}: {figure}", markup=False, highlight=False)


def progress(tasks: Sequence[Task], suite: str) -> Iterator[Task]:
    """Yields the tasks under a progress bar."""
    with tqdm.tqdm(tasks, desc=suite, unit="row", disable=not sys.stderr.isatty()) as bar:
        for task in bar:
            bar.set_postfix_str(f"{task.name}, B = {task.batch_size}")
            yield task


def write(path: str, about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Writes everything measured so far as JSON; what did not run is null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    text = json.dumps(plain({"about": about, "rows": list(rows)}), indent=1)
    pathlib.Path(path).write_text(text + "\n")
