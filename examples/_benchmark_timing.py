"""Times several ways to compute the same thing: compiled first, compared once, then run in turn.

A machine's speed drifts, by clocks and by what else runs on it. So the contestants of a comparison
run round by round, each round in another order, and a ratio is the median over rounds of the ratio
within a round: what slows a whole round down cancels.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# A round calls a fast contestant several times, for about this long, as clocks are coarse.
_SECONDS_A_ROUND = 2e-3
# A contestant that takes less is called once more before it is timed, in each round.
_BRIEF_SECONDS = 0.5
_MOST_ROUNDS = 200
# So many rounds are run however long they take.
_LEAST_ROUNDS = 3


def _same(result: Any) -> Any:
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class Contestant:
    """One way to compute something.

    Attributes:
      name: a name, unique within a comparison.
      fun: a function that can be compiled.
      args: its arguments.
      views: what to compare: label -> function of the result, as numpy arrays. Contestants with a
        label in common must agree in it, up to rounding.
    """

    name: str
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    views: Mapping[str, Callable[[Any], Any]] = dataclasses.field(
        default_factory=lambda: {"result": _same}
    )


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
      repeats: rounds, at least.
      min_time: seconds to measure each contestant for, at least (unless that takes 200 rounds).
      max_time: seconds after which, for the slowest contestant, three rounds are enough.
      tolerance: how far two results may differ, relative to their norm.
      memory_limit: bytes of temporaries and results beyond which a contestant does not run.
    """

    repeats: int = 5
    min_time: float = 0.2
    max_time: float = math.inf
    tolerance: float = 2e-3
    memory_limit: float = math.inf


@dataclasses.dataclass
class Measurement:
    """What was found out about a contestant.

    Attributes:
      times: seconds of one call, for each round; empty if it did not run.
      compile_seconds: to trace, lower and compile.
      temporaries: peak bytes of temporary buffers, if the backend tells.
      results: bytes of the results, if the backend tells.
      problem: why it did not run, or the empty string.
      wrong: whether that is because its result is wrong.
    """

    times: list[float] = dataclasses.field(default_factory=list)
    compile_seconds: float = math.nan
    temporaries: int | None = None
    results: int | None = None
    problem: str = ""
    wrong: bool = False

    @property
    def seconds(self) -> float:
        """The median time of a call, NaN if it did not run."""
        return statistics.median(self.times) if self.times else math.nan

    def ratio(self, other: Measurement) -> float:
        """Returns this time over the other's: the median over rounds, NaN if one did not run."""
        if not (self.times and other.times):
            return math.nan
        pairs = zip(self.times, other.times, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def measure(contestants: Sequence[Contestant], settings: Settings) -> dict[str, Measurement]:
    """Compiles, compares and times contestants.

    Args:
      contestants: the first that has a view is the reference for it.
      settings: how to measure.

    Returns:
      The measurement of each contestant, by its name. One that needs too much memory or whose
      result differs from the reference's has no times, but the problem in words.

    Raises:
      ValueError: two contestants have one name.
    """
    measurements = {contestant.name: Measurement() for contestant in contestants}
    if len(measurements) != len(contestants):
        raise ValueError(f"two contestants have one name: {[c.name for c in contestants]}")
    if contestants:
        _warm_up(contestants[0])
    ready: dict[str, Callable[[], Any]] = {}
    for contestant in contestants:
        measurement = measurements[contestant.name]
        compiled = _compile(contestant, measurement)
        needed = (measurement.temporaries or 0) + (measurement.results or 0)
        if needed > settings.memory_limit:
            measurement.problem = f"needs {needed / 2**20:.0f} MiB"
        else:
            ready[contestant.name] = _call(compiled, contestant.args)
    _compare([c for c in contestants if c.name in ready], ready, measurements, settings.tolerance)
    runners = {name: call for name, call in ready.items() if not measurements[name].problem}
    for name, times in _alternate(runners, settings).items():
        measurements[name].times = times
    return measurements


def _warm_up(contestant: Contestant) -> None:
    """Traces a contestant and compiles something.

    So none pays for what only the first pays for: the start of the compiler, and the traces of
    `jax.numpy`'s functions, which JAX keeps.
    """
    jax.jit(_fresh(contestant.fun)).lower(*contestant.args)
    jax.jit(jnp.sin).lower(0.0).compile()


def _fresh(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function, so that JAX does not know it and traces it again."""
    return lambda *args: fun(*args)


def _compile(contestant: Contestant, measurement: Measurement) -> Any:
    """Compiles a contestant and notes what that took and what it will take."""
    start = time.perf_counter()
    compiled = jax.jit(_fresh(contestant.fun)).lower(*contestant.args).compile()
    measurement.compile_seconds = time.perf_counter() - start
    analysis = compiled.memory_analysis()
    if analysis is not None:
        measurement.temporaries = analysis.temp_size_in_bytes
        measurement.results = analysis.output_size_in_bytes
    return compiled


def _call(compiled: Any, args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(compiled(*args))


def _compare(
    contestants: Sequence[Contestant],
    ready: Mapping[str, Callable[[], Any]],
    measurements: Mapping[str, Measurement],
    tolerance: float,
) -> None:
    """Runs each contestant once and compares its views with those of the first that has them."""
    references: dict[str, tuple[str, Any]] = {}
    for contestant in contestants:
        # On the host, where views and norms compile nothing.
        result = jax.tree.map(np.asarray, ready[contestant.name]())
        for label, view in contestant.views.items():
            seen = view(result)
            name, reference = references.setdefault(label, (contestant.name, seen))
            error = difference(seen, reference)
            if not error <= tolerance:  # NaN is a difference too
                measurement = measurements[contestant.name]
                measurement.problem = f"{label}: differs from {name} by {error:.2g}"
                measurement.wrong = True


def difference(tree: Any, reference: Any) -> float:
    """Returns the largest difference of a leaf in norm, relative to the norm of the reference leaf.

    Leaves that ought to be zero, such as the gradient of a bias before a normalisation, hold
    rounding errors alone. So a leaf counts as no smaller than a hundredth of the whole reference.

    Args:
      tree: arrays.
      reference: arrays, of the same structure and shapes.

    Returns:
      The difference: NaN if anything is NaN, infinite if structures or shapes differ.
    """
    leaves, treedef = jax.tree.flatten(tree)
    expected, expected_treedef = jax.tree.flatten(reference)
    shapes = [np.shape(x) for x in leaves] == [np.shape(x) for x in expected]
    if treedef != expected_treedef or not shapes:
        return math.inf
    norms = [_norm(x) for x in expected]
    floor = max(math.hypot(*norms) / 100, 1e-30)
    errors = [
        _norm(_at_least_float32(x) - _at_least_float32(y)) / max(norm, floor)
        for x, y, norm in zip(leaves, expected, norms, strict=True)
    ]
    return math.nan if any(map(math.isnan, [*errors, *norms])) else max(errors, default=0.0)


def _norm(x: Any) -> float:
    return float(np.linalg.norm(_at_least_float32(x).ravel()))


def _at_least_float32(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32), copy=False)


def _alternate(
    runners: Mapping[str, Callable[[], Any]], settings: Settings
) -> dict[str, list[float]]:
    """Returns seconds a call, round by round."""
    names = list(runners)
    calls, brief = {}, {}
    for name, run in runners.items():
        run()
        seconds = _time(run, 1)
        calls[name] = max(1, math.ceil(_SECONDS_A_ROUND / seconds))
        brief[name] = seconds < _BRIEF_SECONDS
    times: dict[str, list[float]] = {name: [] for name in names}
    spent = dict.fromkeys(names, 0.0)
    for number in range(_MOST_ROUNDS if names else 0):
        if number >= settings.repeats and min(spent.values()) >= settings.min_time:
            break
        if number >= _LEAST_ROUNDS and max(spent.values()) >= settings.max_time:
            break
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            if brief[name]:
                # The memory and the caches that the one before left behind are not its business.
                runners[name]()
            seconds = _time(runners[name], calls[name])
            times[name].append(seconds)
            spent[name] += seconds * calls[name]
    return times


def _time(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return max(time.perf_counter() - start, 1e-9) / calls
