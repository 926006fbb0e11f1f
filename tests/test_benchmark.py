"""The benchmark measures what it says, times no wrong result, and runs at smallest sizes."""

import ast
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys

import _benchmark_conv
import _benchmark_grad
import _benchmark_layers as layers
import _benchmark_masks
import _benchmark_models as models
import _benchmark_peers as peers
import _benchmark_report as report
import _benchmark_sums as sums
import _benchmark_timing as timing
import benchmark
import jax
import jax.numpy as jnp
import pytest
from _benchmark_models import Entry
from _benchmark_timing import Contestant, Measurement, Settings
from absl import app

import perex

ROOT = pathlib.Path(__file__).resolve().parents[1]
QUICK = Settings(repeats=1, min_time=0.0, tolerance=1e-3)
OPTIONS = report.Options(QUICK, batch_size=3)
SMALL_CNN = Entry("cnn", "cifar_cnn", 4, {"size": 4, "widths": (2,)}, sample=4)
SMALL_DENSE = Entry("dense", "dense", 4, {"sizes": (4, 3, 2)}, sample=4)


def same(x):
    return x


class TestTiming:
    def test_measures(self):
        x = jnp.arange(1000.0)
        contestants = [
            Contestant("sum", jnp.sum, (x,)),
            Contestant("dot", lambda x: x @ jnp.ones_like(x), (x,)),
        ]
        found = timing.measure(contestants, Settings(repeats=3, min_time=0))
        assert list(found) == ["sum", "dot"]
        for measurement in found.values():
            assert len(measurement.times) == 3 and min(measurement.times) > 0
            assert measurement.compile_seconds > 0
            assert measurement.results == 4 and measurement.temporaries >= 0
            assert not measurement.problem

    @pytest.mark.parametrize("wrong", [lambda x: x + 0.1, lambda x: x * jnp.nan, lambda x: x[:1]])
    def test_times_no_wrong_result(self, wrong):
        x = jnp.ones(3)
        contestants = [Contestant("right", same, (x,)), Contestant("wrong", wrong, (x,))]
        found = timing.measure(contestants, QUICK)
        assert found["right"].times and not found["right"].wrong
        assert not found["wrong"].times and found["wrong"].wrong
        assert "differs from right" in found["wrong"].problem

    def test_compares_each_view_with_the_first_that_has_it(self):
        x = jnp.ones((2, 3))
        total = {"total": same}
        contestants = [
            Contestant("total", lambda x: x.sum(0), (x,), total),
            Contestant("each", same, (x,), {"each": same, "total": lambda x: x.sum(0)}),
            Contestant("each, off", lambda x: x * 1.1, (x,), {"each": same}),
            Contestant("total, off", lambda x: x[0], (x,), total),
            Contestant("incomparable", lambda x: x * 5, (x,), {}),
        ]
        found = timing.measure(contestants, QUICK)
        assert [name for name, m in found.items() if m.wrong] == ["each, off", "total, off"]
        assert found["each, off"].problem.startswith("each: differs from each by 0.1")
        assert found["total, off"].problem.startswith("total: differs from total by 0.5")

    def test_too_much_memory(self):
        x = jnp.ones(4)
        big = Contestant("big", lambda x: jnp.broadcast_to(x, (1000, 4)) + 0, (x,), {})
        settings = dataclasses.replace(QUICK, memory_limit=8000)
        found = timing.measure([Contestant("small", same, (x,), {}), big], settings)
        assert found["small"].times
        assert not found["big"].times and "needs 0 MiB" in found["big"].problem
        assert not found["big"].wrong

    def test_two_of_one_name(self):
        contestant = Contestant("a", same, (1.0,))
        with pytest.raises(ValueError, match="one name"):
            timing.measure([contestant, contestant], QUICK)

    def test_alternates_and_rotates(self, monkeypatch):
        clock, order = [0.0], []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

        def runner(name, seconds):
            def run():
                order.append(name)
                clock[0] += seconds

            return run

        runners = {"a": runner("a", 1.0), "b": runner("b", 2.0)}
        times = timing._alternate(runners, Settings(repeats=3, min_time=0))
        assert times == {"a": [1.0] * 3, "b": [2.0] * 3}
        assert "".join(order) == "aabb" + "abbaab"  # each warms up and is sized, then three rounds
        longer = Settings(repeats=3, min_time=5)
        assert len(timing._alternate(runners, longer)["b"]) == 5
        slow = Settings(repeats=9, min_time=0, max_time=8)
        assert len(timing._alternate(runners, slow)["b"]) == 4
        slow = Settings(repeats=9, min_time=0, max_time=0)
        assert len(timing._alternate(runners, slow)["b"]) == 3

    def test_calls_a_fast_contestant_several_times(self, monkeypatch):
        clock = [0.0]
        monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
        calls = []

        def run():
            calls.append(1)
            clock[0] += 1e-3

        (times,) = timing._alternate({"a": run}, Settings(repeats=1, min_time=0)).values()
        assert times == [pytest.approx(1e-3)] and len(calls) == 2 + 1 + 2  # sized, warmed, timed

    def test_ratio_is_the_median_within_rounds(self):
        fast, slow = Measurement([1.0, 10.0, 2.0]), Measurement([2.0, 20.0, 40.0])
        assert fast.ratio(slow) == 0.5 and fast.seconds == 2.0
        assert math.isnan(fast.ratio(Measurement())) and math.isnan(Measurement().seconds)

    @pytest.mark.parametrize(
        "tree, reference, expected",
        [
            ([1.1, 3.0], [1.0, 3.0], 0.1),
            ([0.0, 3.0 + 3e-3], [0.0, 3.0], 1e-3),
            ([3e-4, 3.0], [0.0, 3.0], 1e-2),  # a leaf that ought to be zero: against the whole
            ([], [], 0.0),
            ([1.0], [1.0, 2.0], math.inf),
            ([jnp.ones(2)], [jnp.ones((1, 2))], math.inf),
            ([math.nan], [1.0], math.nan),
            ([math.nan], [math.nan], math.nan),
        ],
    )
    def test_difference(self, tree, reference, expected):
        found = timing.difference(tree, reference)
        assert found == pytest.approx(expected, rel=1e-3, nan_ok=True)


class TestReport:
    row = report.Row(
        "it", 2, {"a": Measurement([1.0], 0.5), "b": Measurement([2.0]), "c": Measurement()}
    )

    def test_row(self):
        assert self.row.best(["b", "a", "c", "d"]) == "a" and self.row.best(["c", "d"]) == ""
        assert self.row.ratio("a", "b") == 0.5
        assert math.isnan(self.row.ratio("a", "c")) and math.isnan(self.row.ratio("d", "a"))

    def test_json(self, tmp_path):
        path = tmp_path / "figures.json"
        report.write(str(path), {"jax": "1"}, [self.row.as_json("suite")])
        found = json.loads(path.read_text())
        assert found["about"] == {"jax": "1"}
        (row,) = found["rows"]
        assert (row["suite"], row["name"], row["batch_size"]) == ("suite", "it", 2)
        assert row["contestants"]["b"]["seconds"] == 2.0
        assert row["contestants"]["c"]["seconds"] is None

    def test_summaries(self):
        nan = math.nan
        assert report.spread("x", [1.0, nan, 4.0])[1] == "geometric mean 2.00, worst 4.00, of 2"
        assert report.spread("x", [nan])[1] == "not measured"
        assert report.share("x", [True, True, True, False])[1] == "3 of 4, 75%"
        assert report.share("x", [])[1] == "not measured"

    @pytest.mark.parametrize(
        "value, text",
        [
            (1234.5, "1234"),
            (12.34, "12.3"),
            (0.1234, "0.123"),
            (0.0, "0"),
            (math.nan, "–"),
            ("a", "a"),
        ],
    )
    def test_form(self, value, text):
        assert report.form(value) == text


class TestLayers:
    def test_grid(self):
        names = [layer.name for layer in layers.LAYERS]
        assert len(names) == len(set(names)) >= 30
        assert set(layers.SAMPLE) <= set(names)
        kinds = {
            "1-D": lambda layer: layer.rank == 1,
            "3-D": lambda layer: layer.rank == 3,
            "transposed": lambda layer: layer.spread > 1,
            "dilated": lambda layer: layer.dilation > 1,
            "depthwise": lambda layer: layer.groups == layer.channels > 1,
            "4 groups": lambda layer: layer.groups == 4,
            "1x1": lambda layer: layer.kernel == (1, 1) and layer.stride == 1,
            "1x1 with stride": lambda layer: layer.kernel == (1, 1) and layer.stride == 2,
            "batch of 300": lambda layer: layer.batch_sizes == (300,),
        }
        assert [kind for kind, holds in kinds.items() if not any(map(holds, layers.LAYERS))] == []

    @pytest.mark.parametrize("layer", layers.LAYERS, ids=lambda layer: layer.name)
    def test_product_has_the_kernel_gradients_size(self, layer):
        groups, depth, positions, features = layer.product
        assert groups * depth * features == math.prod(layer.kernel_shape)
        assert groups * positions * features == math.prod(layer.out_shape)

    def test_selection(self):
        assert {layer.name for layer in layers.select([], False)} == set(layers.SAMPLE)
        assert layers.select([], True) == list(layers.LAYERS)
        assert {layer.groups for layer in layers.select(["grouped"], False)} == {4}

    def test_applicable_algorithms(self):
        (depthwise,) = layers.select(["depthwise 256 k3"], True)
        (dense,) = layers.select(["vgg 64-128"], True)
        assert set(_benchmark_conv.applicable(depthwise)) > set(_benchmark_conv.applicable(dense))


@pytest.fixture
def small(monkeypatch):
    """Put models and layers of the smallest sizes in place of the benchmark's own."""
    tiny = dataclasses.replace(layers.LAYERS[-1], spatial=(3, 3), channels=2, features=2)
    monkeypatch.setattr(layers, "LAYERS", (tiny,))
    monkeypatch.setattr(layers, "SAMPLE", (tiny.name,))
    masked = [
        dataclasses.replace(layer, size=5, channels=3, sample=True)
        for layer in (_benchmark_masks.LAYERS[0], _benchmark_masks.LAYERS[-1])
    ]
    monkeypatch.setattr(_benchmark_masks, "LAYERS", tuple(masked))
    monkeypatch.setattr(_benchmark_grad, "ENTRIES", (SMALL_CNN,))
    monkeypatch.setattr(sums, "CLIPPED_ENTRIES", (SMALL_CNN, SMALL_DENSE))
    remat = dataclasses.replace(SMALL_DENSE, name="remat", remat_of="dense")
    monkeypatch.setattr(sums, "MODELS_ENTRIES", (SMALL_DENSE, remat))


# jax_privacy, where it is installed, calls what optax has deprecated.
@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")
class TestSuites:
    contestants = {
        "grad": {"ordinary", "vmap(grad)", "grouped", "unfold", "taps", "auto"},
        "conv": {"ordinary", "vmap(grad)", "grouped", "unfold", "taps", "auto", "product"},
        "masks": {"unmasked path", "exact_masks", "vmap(grad)", "perex.grad"},
        "clipped": {"ordinary", "own rules", "clipped_grad", "dp_clip", "vmap + clip"},
        "models": {"ordinary", "vmap(grad)", "vmap + clip", "clipped_grad"},
    }

    @pytest.mark.parametrize("name", list(benchmark.SUITES))
    def test_runs_through(self, name, small, tmp_path, capsys):
        path = tmp_path / "figures.json"
        assert benchmark.run([name], OPTIONS, str(path)) == 0
        rows = json.loads(path.read_text())["rows"]
        suite = benchmark.SUITES[name]
        assert [row["name"] for row in rows] == [task.name for task in suite.tasks(OPTIONS)]
        for row in rows:
            assert row["batch_size"] == 3
            assert set(row["contestants"]) >= self.contestants[name]
            for contestant in row["contestants"].values():
                assert contestant["seconds"] > 0 and not contestant["problem"]
        printed = capsys.readouterr().out
        assert suite.title in printed and all(row["name"] in printed for row in rows)
        assert "geometric mean" in printed

    def test_a_wrong_result_is_told(self, small, monkeypatch, capsys):
        right = perex.clipped_grad

        def wrong(*args, **kwargs):
            def doubled(*arguments):
                total, stats = right(*args, **kwargs)(*arguments)
                return {**total, "head": {key: 2 * x for key, x in total["head"].items()}}, stats

            return doubled

        monkeypatch.setattr(perex, "clipped_grad", wrong)
        monkeypatch.setattr(sums, "CLIPPED_ENTRIES", (SMALL_CNN,))
        assert benchmark.run(["clipped"], OPTIONS, None) == 1
        assert "WRONG: cnn, B = 3, clipped_grad: clipped sum: differs from" in (
            capsys.readouterr().out.replace("\n", " ")
        )

    def test_microbatches(self, monkeypatch):
        monkeypatch.setattr(sums, "CLIPPED_ENTRIES", (SMALL_DENSE,))
        seen = []
        right = perex.clipped_grad

        def noting(*args, **kwargs):
            seen.append(kwargs["microbatch_size"])
            return right(*args, **kwargs)

        monkeypatch.setattr(perex, "clipped_grad", noting)
        options = dataclasses.replace(OPTIONS, batch_size=5, microbatch_size=2)
        assert benchmark.run(["clipped"], options, None) == 0
        assert seen == [2]

    def test_clip_norm_lies_between_norms(self):
        problem = models.build(SMALL_CNN, 8, jnp.float32)
        norms = jax.jit(perex.grad_norms(problem.loss))(*problem.args)
        assert norms.min() < problem.l2_norm_clip < norms.max()

    def test_selection_of_models(self):
        other = dataclasses.replace(SMALL_DENSE, name="other", sample=None)
        entries = (SMALL_CNN, other)

        def chosen(**changes):
            options = dataclasses.replace(OPTIONS, batch_size=None, **changes)
            return [(entry.name, size) for entry, size in models.select(entries, options)]

        assert chosen() == [("cnn", 4)]
        assert chosen(full=True) == [("cnn", 4), ("other", 4)]
        assert chosen(models=["oth"]) == [("other", 4)]

    @pytest.mark.parametrize("field", ["layers", "models"])
    def test_a_pattern_of_nothing(self, field):
        options = dataclasses.replace(OPTIONS, **{field: ["nonsense"]})
        with pytest.raises(app.UsageError, match="'nonsense' in its name"):
            benchmark.check_patterns(["conv"], options)
        benchmark.check_patterns(["conv"], dataclasses.replace(OPTIONS, layers=["depthwise"]))


class TestProgram:
    def test_runs(self, tmp_path):
        path = tmp_path / "figures.json"
        command = [sys.executable, "examples/benchmark.py", "--suite=conv", "--layers=tiny"]
        command += ["--batch_size=1", "--repeats=1", "--min_time=0", f"--json={path}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "tiny" in done.stdout and "geometric mean" in done.stdout
        assert len(json.loads(path.read_text())["rows"]) == 1

    def test_opacus_program_is_called(self, tmp_path, monkeypatch):
        program = tmp_path / "program.py"
        program.write_text(
            "import json, sys\nprint('noise')\nprint(json.dumps({'args': sys.argv[1:]}))"
        )
        monkeypatch.setattr(peers, "_PROGRAM", program)
        options = dataclasses.replace(OPTIONS, opacus_python=sys.executable)
        found = peers.opacus(Entry("r", "resnet18", 4, {"width": 16}), 2, options)
        assert found["args"][:2] == ["resnet18", "2"]
        assert '--sizes={"width": 16}' in found["args"] and "--repeats=1" in found["args"]
        assert peers.opacus(Entry("v", "vit", 4), 2, options) == {}
        assert peers.opacus(Entry("r", "resnet18", 4), 2, OPTIONS) == {}
        program.write_text("raise SystemExit('no torch here')")
        with pytest.raises(RuntimeError, match="no torch here"):
            peers.opacus(Entry("r", "resnet18", 4), 2, options)

    def test_opacus_program_has_the_twins(self):
        tree = ast.parse((ROOT / "examples" / "_benchmark_opacus.py").read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert set(peers.TWINS) <= functions
