"""Break the library in one place at a time, and see whether its tests notice.

    python tests/mutations.py
    python tests/mutations.py --only=certified
    python tests/mutations.py --list

Each fault of `mutants_gradients` and `mutants_privacy` is put into a copy of the tree, and the
tests that should notice it are run on that copy. They are run once on the copy as it is first: they
must pass there. Prints a line for each fault and ends with status 1 if any is not noticed.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import mutants_gradients
import mutants_privacy
from absl import app, flags
from mutant import Mutant

FLAGS = flags.FlagValues()
flags.DEFINE_string("only", "", "part of the path or of the words of a fault", flag_values=FLAGS)
flags.DEFINE_bool("list", False, "print the faults and stop", flag_values=FLAGS)
flags.DEFINE_float(
    "timeout", 300, "seconds for the tests of one fault; more counts as noticed", flag_values=FLAGS
)

ROOT = pathlib.Path(__file__).resolve().parents[1]
MUTANTS: tuple[Mutant, ...] = (*mutants_gradients.MUTANTS, *mutants_privacy.MUTANTS)
# What a copy of the tree needs for the tests to run on it.
_COPIED = ("perex", "tests", "examples", "pyproject.toml", "README.md", "BUILD")

KILLED, SURVIVED, TIMEOUT = "killed", "SURVIVED", "killed by the timeout"


@contextlib.contextmanager
def copy_of_the_tree() -> Iterator[pathlib.Path]:
    """A folder with what the tests need, removed in the end."""
    with tempfile.TemporaryDirectory(prefix="perex-mutant-") as name:
        copy = pathlib.Path(name)
        for part in _COPIED:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(
                    source, copy / part, ignore=shutil.ignore_patterns("__pycache__", ".*")
                )
            else:
                shutil.copy(source, copy / part)
        yield copy


def mutated(text: str, mutant: Mutant) -> str:
    """Returns the text of a file with the fault in it.

    Raises:
      ValueError: the place is not there exactly once, or nothing would change.
    """
    count = text.count(mutant.old)
    if count != 1 or mutant.old == mutant.new:
        raise ValueError(f"{mutant.path}: {mutant.old!r} stands there {count} times, not once")
    return text.replace(mutant.old, mutant.new)


def run_tests(copy: pathlib.Path, tests: Sequence[str], timeout: float) -> str:
    """Runs tests on a copy of the tree: says whether any failed.

    Raises:
      RuntimeError: the tests did not run, so that nothing is known.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return TIMEOUT
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest {' '.join(tests)} did not run:\n{done.stdout}{done.stderr}")
    return KILLED if done.returncode else SURVIVED


def try_mutant(copy: pathlib.Path, mutant: Mutant, timeout: float) -> str:
    """Puts a fault into a copy of the tree, runs its tests, and takes it out again."""
    path = copy / mutant.path
    text = path.read_text()
    path.write_text(mutated(text, mutant))
    try:
        return run_tests(copy, mutant.tests, timeout)
    finally:
        path.write_text(text)


def main(argv: Sequence[str]) -> int:
    FLAGS(list(argv))
    chosen = [m for m in MUTANTS if FLAGS.only in m.path or FLAGS.only in m.fault]
    if not chosen:
        raise app.UsageError(f"no fault has {FLAGS.only!r} in its path or its words")
    if FLAGS.list:
        for mutant in chosen:
            print(f"{mutant.path}: {mutant.fault} ({' '.join(mutant.tests)})")
        return 0
    outcomes = []
    with copy_of_the_tree() as copy:
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        if run_tests(copy, tests, timeout=3600) != SURVIVED:
            raise RuntimeError(
                "the tests fail on the tree as it is: no fault can be judged by them"
            )
        for mutant in chosen:
            start = time.monotonic()
            outcomes.append(try_mutant(copy, mutant, FLAGS.timeout))
            seconds = time.monotonic() - start
            print(f"{outcomes[-1]}: {mutant.path}: {mutant.fault} ({seconds:.0f} s)", flush=True)
    survived = outcomes.count(SURVIVED)
    print(f"{len(outcomes)} mutants, {len(outcomes) - survived} killed, {survived} survived")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
