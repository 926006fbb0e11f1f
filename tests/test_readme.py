"""README.md is true: its Python runs, and its shell lines name things that exist."""

import pathlib
import re
import shlex
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(text, language):
    """Return the fenced blocks in a language: pairs of first line number and text."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(text[: m.start(1)].count("\n") + 1, m.group(1)) for m in fence.finditer(text)]


def run(text):
    """Run the Python blocks of a text one after another in one namespace."""
    namespace = {"__name__": "readme"}
    for line, code in blocks(text, "python"):
        # The padding makes a traceback name the line of README.md.
        exec(compile("\n" * (line - 1) + code, "README.md", "exec"), namespace)
    return namespace


def commands(text):
    """Return the commands of the shell blocks, each as a list of words."""
    found = []
    for _, block in blocks(text, "(?:bash|sh|shell|console)"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                cut = words.index("&&") if "&&" in words else len(words)
                found.append(words[:cut])
                words = words[cut + 1 :]
    return found


def check_commands(found):
    """Raise unless each command names files, flags and extras that exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for words in found:
        for extra in re.findall(
            r"(?<=\[)[\w,-]+(?=\])", " ".join(words) if "pip" in words[0] else ""
        ):
            assert set(extra.split(",")) <= set(extras), f"no extra is called {extra}"
        scripts = [word for word in words if word.endswith(".py")]
        for script in scripts:
            assert (ROOT / script).is_file(), f"there is no {script}"
            source = "".join(p.read_text() for p in (ROOT / script).parent.glob("*.py"))
            for flag in re.findall(r"--(\w+)", " ".join(words[words.index(script) :])):
                names = f'"{flag}"', f'"{flag.removeprefix("no")}"'
                assert any(name in source for name in names), f"{script} has no flag --{flag}"


def test_python_blocks_run():
    assert blocks(README, "python")
    run(README)


def test_the_runner_fails_with_the_code():
    broken = "\n".join(["text", "```python", "x = 1", "```", "```python", "y = x / 0", "```", ""])
    try:
        run(broken)
    except ZeroDivisionError as error:
        trace = error.__traceback__
        while trace.tb_next:
            trace = trace.tb_next
        assert trace.tb_lineno == 6 and trace.tb_frame.f_code.co_filename == "README.md"
    else:
        raise AssertionError("the second block did not run")


def test_commands_name_what_exists():
    found = commands(README)
    check_commands(found)
    bad = [
        "pip install -e '.[none]'",
        "python examples/none.py",
        "python examples/benchmark.py --unheard_of",
    ]
    for line in bad:
        try:
            check_commands(commands(f"```bash\n{line}\n```"))
        except AssertionError:
            continue
        raise AssertionError(f"the check let {line!r} pass")


def test_set_up_takes_two_lines():
    # `.ci/run` runs them as they stand.
    lines = [line for _, block in blocks(README, "bash") for line in block.splitlines()]
    set_up = [line for line in lines if line.startswith("python3 -m venv ")]
    assert len(set_up) == 2
    main, tests = set_up
    assert "[examples]" in main and main.endswith("python examples/train_private.py")
    assert "[test]" in tests and "-m pytest" in tests.rpartition("&&")[2]
