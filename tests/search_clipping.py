"""Search for a gradient that clipping lets grow beyond its bound.

    PYTHONPATH=. python tests/search_clipping.py --minutes=25
    PYTHONPATH=. python tests/search_clipping.py --family=conv --seed=1

Draws losses whose gradients cancel (`soundness`), how much of them is left and the scale of their
factors at random, and climbs from the worst of each family by changes to its inputs. Prints a line
for each family and ends with status 1 if any contribution or norm is out of bounds.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np
import soundness
from absl import app, flags

FLAGS = flags.FlagValues()
flags.DEFINE_float("minutes", 1.0, "how long to search", lower_bound=0.0, flag_values=FLAGS)
flags.DEFINE_integer("seed", 0, "seed of all that is drawn", flag_values=FLAGS)
flags.DEFINE_string("family", "", "part of the names of the families to try", flag_values=FLAGS)

# Half of all evaluations are of the default options, whose functions are compiled first.
_OPTIONS = ("default",) * 5 + tuple(name for name in soundness.OPTIONS if name != "default")
# Steps uphill after each fresh draw.
_STEPS = 4


@dataclasses.dataclass
class Worst:
    """The worst of a family so far, and how it came about."""

    value: float = 0.0
    arguments: soundness.Arguments | None = None
    option: str = ""
    told: str = ""


@dataclasses.dataclass
class Found:
    """What is known of a family."""

    evaluations: int = 0
    contribution: Worst = dataclasses.field(default_factory=Worst)
    norm_error: Worst = dataclasses.field(default_factory=Worst)

    def take(self, family, arguments, option, told):
        exact = soundness.oracle(family, arguments)
        if not all(np.all(np.isfinite(gradient)) for gradient in exact):
            return
        self.evaluations += 1
        for worst, measure in (
            (self.contribution, soundness.contribution),
            (self.norm_error, soundness.norm_error),
        ):
            value = measure(family, arguments, option, exact)
            limit = family.bound if measure is soundness.contribution else 1
            if value > max(worst.value, limit):
                print(f"{family.name}: {measure.__name__} {value:.6g} ({told})", flush=True)
            if value > worst.value:
                worst.value, worst.arguments = value, arguments
                worst.option, worst.told = option, told


def changed(rng, arguments):
    """Return arguments with one batched array a little different."""
    params, *batched = arguments
    chosen = [i for i, x in enumerate(batched) if x.dtype != np.int32]
    i = chosen[rng.integers(len(chosen))]
    x = np.array(batched[i], np.float32)
    size = 10 ** rng.uniform(-7, -0.5)
    kind = rng.integers(3)
    if kind == 0:  # Noise everywhere.
        x = x * (1 + size * rng.normal(size=x.shape))
    elif kind == 1:  # Nearer to the mean over positions, or further away.
        mean = x.mean(1, keepdims=True) if x.ndim > 1 else x
        x = mean + (x - mean) * (10 ** rng.uniform(-1, 1))
    else:  # Another size for one row.
        if x.ndim > 1:
            x[:, rng.integers(x.shape[1])] *= 1 + size
        else:
            x = x * (1 + size)
    batched[i] = x.astype(np.float32).astype(batched[i].dtype)
    return (params, *batched)


def search(families, minutes, seed):
    """Return what was found of each family, each searched for its share of the time."""
    rng = np.random.default_rng(seed)
    found = {}
    for number in rng.permutation(len(families)):
        end = time.monotonic() + 60 * minutes / len(families)
        found[families[number].name] = search_one(families[number], end, rng)
        # Programs of all families and options at once are more than the system maps for a process.
        jax.clear_caches()
    return found


def search_one(family, end, rng):
    """Return what was found of a family until a time."""
    record = Found()
    while not record.evaluations or time.monotonic() < end:
        option = _OPTIONS[rng.integers(len(_OPTIONS))] if record.evaluations else "default"
        drawn, eps = int(rng.integers(2**31)), 10 ** rng.uniform(-7, -1)
        wide = family.name not in soundness.UNSCALED and rng.random() < 0.5
        scale = 10 ** rng.uniform(-20, 20) if wide else 1.0
        told = f"seed {drawn}, eps {eps:.3g}, scale {scale:.3g}, {option}"
        record.take(family, family.arguments(drawn, eps, scale), option, told)
        for _ in range(_STEPS):
            worst = (record.contribution, record.norm_error)[rng.integers(2)]
            if worst.arguments is None or time.monotonic() > end:
                break
            told = worst.told.removesuffix(", climbed") + ", climbed"
            record.take(family, changed(rng, worst.arguments), worst.option, told)
    return record


def main(argv: Sequence[str]) -> int:
    FLAGS(list(argv))
    families = [f for f in soundness.FAMILIES.values() if FLAGS.family in f.name]
    if not families:
        raise app.UsageError(f"no family has {FLAGS.family!r} in its name")
    found = search(families, FLAGS.minutes, FLAGS.seed)
    broken = 0
    for family in families:
        record = found[family.name]
        c, n = record.contribution, record.norm_error
        out = c.value > family.bound or n.value > 1
        broken += out
        print(
            f"{'BROKEN ' if out else ''}{family.name}: {record.evaluations} evaluations, "
            f"worst contribution {c.value:.6f} C ({c.told}), "
            f"norm error {n.value:.3g} of what is allowed ({n.told})",
            flush=True,
        )
    count = soundness.BATCH * sum(record.evaluations for record in found.values())
    worst = max((record.contribution.value for record in found.values()), default=0.0)
    print(f"{count} contributions, worst {worst:.6f} C")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
