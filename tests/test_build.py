"""BUILD names every test, example and module, and only files that exist; its tests can fail."""

import ast
import glob as globbing
import os
import pathlib
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
RULES = ("py_library", "py_binary", "py_test")
# What Starlark, unlike Python, does not have.
NOT_STARLARK = (
    ast.Import,
    ast.ImportFrom,
    ast.JoinedStr,
    ast.ClassDef,
    ast.Try,
    ast.While,
    ast.With,
    ast.GeneratorExp,
    ast.Set,
    ast.SetComp,
    ast.NamedExpr,
    ast.Starred,
)


def glob(include, exclude=()):
    """Do what Bazel's `glob` does: files below the package, as sorted relative paths."""

    def matches(patterns):
        return {
            path
            for pattern in patterns
            for path in globbing.glob(pattern, root_dir=ROOT, recursive=True, include_hidden=True)
            if (ROOT / path).is_file() and "__pycache__" not in path
        }

    found = sorted(matches(include) - matches(exclude))
    assert found, f"glob({include}) matches nothing, which Bazel takes for an error"
    return found


def targets(text):
    """Execute the text of a BUILD file and return its targets: name -> (rule, attributes)."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        assert not isinstance(node, NOT_STARLARK), f"line {node.lineno}: not Starlark"
    found, loaded = {}, {}

    def rule(kind):
        def declare(*, name, **attributes):
            assert name not in found, f"two targets are called {name}"
            found[name] = (kind, attributes)

        return declare

    def load(where, *names):
        assert where == "@rules_python//python:defs.bzl"
        loaded.update((name, rule(name)) for name in names)
        scope.update(loaded)

    scope = {
        "__builtins__": {},
        "load": load,
        "glob": glob,
        "package": lambda **_: None,
        "licenses": lambda _: None,
        "exports_files": lambda files: [existing(file) for file in files],
    }
    exec(compile(tree, "BUILD", "exec"), scope)
    assert set(RULES) <= set(loaded)
    return found


def existing(file):
    """Check that a file of the repository exists, and return its name."""
    assert (ROOT / file).is_file(), f"BUILD names {file}, which does not exist"
    return file


def same(named, present):
    """Check that BUILD names what is there, and say what it lacks."""
    missing, gone = sorted(present - named), sorted(named - present)
    assert named == present, f"BUILD lacks {missing} and names {gone}, which are not there"


def check_targets(found):
    """Raise unless the targets are complete and name existing files only."""
    for name, (kind, attributes) in found.items():
        for file in attributes.get("srcs", []) + attributes.get("data", []):
            existing(file)
        for dependency in attributes.get("deps", []):
            assert dependency.removeprefix(":") in found, f"{name} depends on {dependency}"
        if kind != "py_library":
            assert attributes["main"] in attributes["srcs"], f"{name}: main is not in srcs"

    tests = {attributes["args"][0] for kind, attributes in found.values() if kind == "py_test"}
    same(tests, {str(p.relative_to(ROOT)) for p in ROOT.glob("tests/**/test_*.py")})
    for name, (kind, attributes) in found.items():
        if kind == "py_test":
            assert attributes["args"] == [f"tests/{name}.py"]
            assert attributes["args"][0] in attributes["srcs"]
    programs = {p.stem for p in ROOT.glob("examples/*.py") if "app.run(" in p.read_text()}
    same({name for name, (kind, _) in found.items() if kind == "py_binary"}, programs)
    modules = {str(p.relative_to(ROOT)) for p in ROOT.glob("perex/**/*.py")}
    same(set(found["perex"][1]["srcs"]), modules)


def test_targets_are_complete():
    check_targets(targets((ROOT / "BUILD").read_text()))


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('    "test_build",\n', "", r"BUILD lacks .*test_build"),
        ('    "test_build",\n', '    "test_build",\n    "test_none",\n', "does not exist"),
        ("perex/py.typed", "perex/none", "does not exist"),
        ('deps = [":perex"]', 'deps = [":none"]', "depends on :none"),
        ('            "tests/run_pytest.py",\n', "", "main is not in srcs"),
        ("perex/**/*.py", "perex/_*.py", r"BUILD lacks .*__init__"),
        ('"tests/%s.py" % name', 'f"tests/{name}.py"', "not Starlark"),
    ],
)
def test_check_sees_what_is_wrong(old, new, message):
    text = (ROOT / "BUILD").read_text()
    assert old in text
    with pytest.raises(AssertionError, match=message):
        check_targets(targets(text.replace(old, new)))


@pytest.mark.parametrize("outcome, code", [("True", 0), ("False", 1)])
def test_runner_reports_the_outcome(tmp_path, outcome, code):
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    assert {outcome}\n")
    command = [sys.executable, ROOT / "tests" / "run_pytest.py", "test_it.py"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # half of the start-up
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr


def test_extras_hold_what_the_tests_and_examples_import():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    distribution = {"sklearn": "scikit-learn", "haiku": "dm-haiku", "absl": "absl-py"}

    def names(requirements):
        bare = {requirement.split(">")[0].split("[")[0] for requirement in requirements}
        return bare | {f"perex[{e}]" for e in extras if f"perex[{e}]" in requirements}

    core = names(project["dependencies"])
    examples = core | names(extras["examples"]) | names(extras["accounting"])
    assert {"perex[accounting]"} <= examples and "perex[examples]" in names(extras["test"])

    def check(folder, allowed):
        # A program and a test find their siblings, and a test those of the programs as well.
        roots = ["examples", "tests"] if folder == "tests" else [folder]
        local = {p.stem for root in roots for p in ROOT.glob(f"{root}/*") if p.stem[0] != "."}
        local |= {"perex", "examples", "tests"}
        for path in ROOT.glob(f"{folder}/**/*.py"):
            for module in imported(ast.parse(path.read_text())):
                top = module.split(".")[0]
                if top in sys.stdlib_module_names or top in local:
                    continue
                name = distribution.get(top, top.replace("_", "-"))
                assert name in allowed, f"{path.name} imports {module}: no extra brings it"

    check("perex", core)
    check("examples", examples)
    check("tests", examples | names(extras["test"]))


def imported(tree):
    """Return the names of the modules that a syntax tree imports absolutely."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module
