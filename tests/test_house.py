"""The house rules that a reader relies on: imports, layers, sizes, docstrings, what lies where."""

import ast
import inspect
import pathlib
import re
import shutil
import subprocess

import pytest

import perex

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = sorted(ROOT.glob("perex/**/*.py"))
SOURCES = PACKAGE + sorted(ROOT.glob("examples/**/*.py")) + sorted(ROOT.glob("tests/**/*.py"))
COMPAT = ROOT / "perex" / "_compat.py"
# A test that makes a primitive of a user's own, as a user would.
OWN_PRIMITIVE = ROOT / "tests" / "test_register_rule.py"
TOP_LEVEL = {"pyproject.toml", "README.md", "perex", "tests", "examples", "BUILD", "LICENSE"}

# Layer -> what its modules must not import: data walks from the trace to the rules, and knows
# nothing of who asked.
FORBIDDEN = {
    "perex._compat": ["perex"],
    "perex._rules": ["perex._api", "perex._trace", "perex._plan", "perex._evaluate"],
    "perex._clipping": ["perex._api", "perex._trace", "perex._plan", "perex._evaluate"],
    "perex._privacy": ["perex._api", "perex._trace", "perex._plan", "perex._evaluate"],
    "perex._trace": ["perex._api", "perex._plan", "perex._evaluate", "perex._privacy"],
    "perex._plan": ["perex._api", "perex._evaluate", "perex._privacy"],
    "perex._evaluate": ["perex._api", "perex._privacy"],
}


def parse(path):
    return ast.parse(path.read_text(), filename=str(path))


def relative(path):
    return str(path.relative_to(ROOT))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PACKAGE}


def imports(tree, module, is_package=False):
    """Yield the absolute dotted names that a tree imports: `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within(name, package):
    return name == package or name.startswith(package + ".")


def attributes(tree):
    """Yield the dotted names that stand in a tree, such as `jax.lax.scan`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def private_or_extended(tree, module, is_package=False):
    """Return what a tree uses of `jax._src`, and of `jax.extend`."""
    used = [*imports(tree, module, is_package), *attributes(tree)]
    return (
        [name for name in used if re.match(r"(jax|jaxlib)\._src\b", name)],
        [name for name in used if within(name, "jax.extend")],
    )


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_only_public_jax(path):
    private, extended = private_or_extended(parse(path), module_name(path), path.stem == "__init__")
    assert not private
    assert not extended or path in (COMPAT, OWN_PRIMITIVE)


@pytest.mark.parametrize(
    "line, private, extended",
    [
        ("import jax._src.core", 1, 0),
        ("from jax._src import core", 1, 0),
        ("from jax import _src", 1, 0),
        ("jax._src.core.jaxpr", 1, 0),
        ("from jax.extend.core import primitives", 0, 1),
        ("from jax import extend", 0, 1),
        ("import jax.extend as jex", 0, 1),
        ("import jax.lax", 0, 0),
    ],
)
def test_the_check_for_public_jax_sees(line, private, extended):
    found = private_or_extended(ast.parse(line), "perex._x")
    assert [bool(names) for names in found] == [private, extended]


def version_forks(tree):
    """Return the expressions with which a tree asks for the version of jax or of Python."""
    names = [*attributes(tree), *imports(tree, "perex._x")]
    asked = [n for n in names if re.match(r"(jax|jaxlib)\.(__version\w*|version)\b", n)]
    asked += [n for n in names if re.match(r"sys\.(version|hexversion)|importlib\.metadata", n)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr"):
            if re.match(r"(jax|jnp|lax)\b", ast.unparse(node.args[0])):
                asked.append(ast.unparse(node))
    return asked


@pytest.mark.parametrize("path", [p for p in PACKAGE if p != COMPAT], ids=relative)
def test_only_compat_forks_on_a_version(path):
    assert not version_forks(parse(path))


@pytest.mark.parametrize(
    "line",
    [
        "jax.__version_info__ < (0, 11)",
        "from jax import __version__",
        "hasattr(jax.lax, 'x')",
        "getattr(jax, 'x', None)",
        "sys.version_info",
    ],
)
def test_the_check_for_forks_sees(line):
    assert version_forks(ast.parse(line))


@pytest.mark.parametrize("path", PACKAGE, ids=relative)
def test_files_are_short(path):
    # A file ends where its idea ends; one of this length surely holds two.
    assert len(path.read_text().splitlines()) <= 500


@pytest.mark.parametrize("path", PACKAGE, ids=relative)
def test_imports_stand_at_the_top(path):
    for function in ast.walk(parse(path)):
        if isinstance(function, ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef):
            inner = [n for n in ast.walk(function) if isinstance(n, ast.Import | ast.ImportFrom)]
            assert not inner, f"line {inner[0].lineno}: an import inside a function"


def import_graph():
    """Return module -> the modules of the package that it imports when it is loaded."""
    graph = {}
    for name, path in MODULES.items():
        tree = parse(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                node.body = []
        graph[name] = set()
        for target in imports(tree, name, path.stem == "__init__"):
            while target and target not in MODULES:
                target = target.rpartition(".")[0]
            if target and target != name:
                graph[name].add(target)
    return graph


def cycle(graph):
    """Return the modules of one import cycle, or nothing."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        path.append(name)
        for target in sorted(graph[name]):
            if found := visit(target):
                return found
        done.add(path.pop())
        return []

    return next((found for name in sorted(graph) if (found := visit(name))), [])


def test_no_import_cycle():
    assert not cycle(import_graph())


def test_the_check_for_cycles_sees():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert not cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def trespasses(graph):
    """Return the imports that go against the layers."""
    return [
        (name, target)
        for layer, banned in FORBIDDEN.items()
        for name in graph
        if within(name, layer)
        for target in graph[name]
        if any(within(target, other) for other in banned)
    ]


def test_layers():
    graph = import_graph()
    assert not trespasses(graph)
    assert trespasses(graph | {"perex._rules.new": {"perex._api"}})
    assert trespasses(graph | {"perex._trace": {"perex._plan"}})


def test_package_init_only_re_exports():
    tree = parse(MODULES["perex"])
    assert ast.get_docstring(tree)
    exported = []
    for node in tree.body[1:]:
        if isinstance(node, ast.ImportFrom):
            exported += [alias.asname or alias.name for alias in node.names]
        else:
            assert isinstance(node, ast.Assign), f"line {node.lineno}: neither import nor name"
            assert ast.unparse(node.targets[0]) in ("__all__", "__version__")
    assert sorted(perex.__all__) == sorted(exported)
    assert not [name for name in exported if name.startswith("_")]


def public():
    """Yield the public functions, classes and methods: (dotted name, object)."""
    for name in perex.__all__:
        thing = getattr(perex, name)
        if not callable(thing):
            continue
        yield name, thing
        if inspect.isclass(thing):
            for member, function in vars(thing).items():
                if inspect.isfunction(function) and not member.startswith("_"):
                    yield f"{name}.{member}", function


def missing_sections(thing, is_method=False):
    """Return the parts that a public docstring lacks."""
    text = inspect.getdoc(thing) or ""
    missing = [] if text else ["a docstring"]
    if inspect.isfunction(thing):
        parameters = list(inspect.signature(thing).parameters.values())[int(is_method) :]
        if parameters and "\nArgs:" not in text:
            missing.append("Args")
        missing += [p.name for p in parameters if not re.search(rf"\b{p.name}\b", text)]
        # A first line that says what is returned is enough, as in Google's style.
        says = text.startswith(("Returns ", "Return ")) or re.search(r"\n(Returns|Yields):", text)
        if not says and inspect.signature(thing).return_annotation not in (None, "None"):
            missing.append("Returns")
    return missing


@pytest.mark.parametrize("name, thing", [pytest.param(*p, id=p[0]) for p in public()])
def test_public_docstrings(name, thing):
    assert not missing_sections(thing, is_method="." in name)


def test_the_check_of_docstrings_sees():
    def bare(x): ...

    def half(x):
        """Do it.

        Args:
            y: not x, the parameter.
        """

    def first() -> int:
        """Return it."""

    def nothing() -> None:
        """Do it."""

    assert not missing_sections(first) and not missing_sections(nothing)
    assert missing_sections(bare) == ["a docstring", "Args", "x", "Returns"]
    assert missing_sections(half) == ["Returns"]


def test_every_module_says_what_it_is():
    for path in SOURCES:
        if not path.name.startswith("test_"):
            assert ast.get_docstring(parse(path)), f"{relative(path)} has no docstring"


def top_level():
    """Return the names at the top that belong to the repository, or all of them without git."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard"]
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return {line.split("/")[0] for line in listing.stdout.splitlines()}
    return {path.name for path in ROOT.iterdir()}


def test_top_level_holds_only_what_it_should():
    assert {name for name in top_level() if not name.startswith(".")} <= TOP_LEVEL


# A home, a scratch folder or a package server of one machine has no place in the tree.
PLACES = r"(?<![\w.>)}}/*-])/(?:{})/\w".format(
    "|".join(["root", "home", "work", "tmp", "opt", "mnt"])
)
SERVERS = "|".join(["pypi", "npmjs", "pythonhosted"]).join(["(?:", r")\.(?:org|com|io)"])


def test_no_place_of_one_machine():
    for path in [
        *SOURCES,
        *(ROOT / name for name in (".ci/run", "BUILD", "README.md", "pyproject.toml")),
    ]:
        found = re.search(f"{PLACES}|{SERVERS}", path.read_text())
        assert not found, f"{relative(path)}: {found}"


def test_the_check_for_places_sees():
    assert re.search(PLACES, "open('" + "/ro" + "ot/x')") and re.search(PLACES, " /tm" + "p/x")
    assert not re.search(PLACES, "a/home/b")
