"""The list of faults fits the code as it stands, and the program can tell a survivor."""

import ast
import pathlib

import mutations
import pytest
from mutant import Mutant
from mutations import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.path}:{m.fault}" for m in MUTANTS])
def test_a_fault_can_be_made(mutant):
    text = (ROOT / mutant.path).read_text()
    ast.parse(mutations.mutated(text, mutant))
    assert mutant.tests
    for test in mutant.tests:
        path, _, name = test.partition("::")
        source = (ROOT / path).read_text()
        assert not name or f"def {name.partition('[')[0]}(" in source


def test_there_are_enough_and_each_is_another():
    assert len(MUTANTS) >= 60
    assert len({(m.path, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)
    assert len({(m.path, m.fault) for m in MUTANTS}) == len(MUTANTS)


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "doubled.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "test_code.py").write_text(
        "from doubled import double\n\ndef test_it():\n    assert double(0) == 0\n"
        "\ndef test_all():\n    assert double(2) == 4\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    "tests, outcome",
    [("test_code.py", mutations.KILLED), ("test_code.py::test_it", mutations.SURVIVED)],
)
def test_survivors_are_told(tree, tests, outcome):
    mutant = Mutant("doubled.py", "2 * x", "3 * x", "three for two", (tests,))
    assert mutations.try_mutant(tree, mutant, timeout=60) == outcome
    assert "2 * x" in (tree / "doubled.py").read_text()


def test_tests_that_do_not_run_are_an_error(tree):
    with pytest.raises(RuntimeError, match="did not run"):
        mutations.run_tests(tree, ("test_none.py",), timeout=60)


def test_a_place_must_be_there_once(tree):
    mutant = Mutant("doubled.py", "x", "y", "everything", ("test_code.py",))
    with pytest.raises(ValueError, match="2 times, not once"):
        mutations.try_mutant(tree, mutant, timeout=60)
