import gzip
import math
import os
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest
from absl import app
from absl import flags as absl_flags
from dp_accounting import dp_event, rdp

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
PROGRAM = EXAMPLES / "train_private.py"
sys.path.insert(0, str(EXAMPLES))

import _data  # noqa: E402
import _sampling  # noqa: E402
import train_private  # noqa: E402


def run(*flags, check=True):
    result = subprocess.run(
        [sys.executable, str(PROGRAM), *flags],
        capture_output=True,
        text=True,
        cwd=EXAMPLES.parent,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "COLUMNS": "100"},
    )
    if check:
        assert result.returncode == 0, result.stderr
    return result


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def small_mnist(tmp_path):
    """Write real digits as MNIST files: two gzipped, two not."""
    data = _data.digits()
    parts = {
        "train_images": data.train_images[:200],
        "train_labels": data.train_labels[:200],
        "test_images": data.test_images[:50],
        "test_labels": data.test_labels[:50],
    }
    for name, array in parts.items():
        if "images" in name:
            large = np.zeros((len(array), 28, 28))
            large[:, 2:26, 2:26] = np.kron(array[..., 0] * 255, np.ones((3, 3)))
            array = large
        file = _data.MNIST_FILES[name]
        write_idx(tmp_path / (f"{file}.gz" if "train" in name else file), array)
    return tmp_path


# ---- the program -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    plot = tmp_path_factory.mktemp("run") / "run.png"
    flags = ("--epochs=12", "--batch_size=256", "--target_epsilon=4")
    return run(*flags, f"--plot={plot}").stdout, plot


def test_learns_digits_privately(digits_run):
    output, _ = digits_run
    lines = [line for line in output.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 12
    accuracies = [float(line.split("accuracy ")[1].split("%")[0]) for line in lines]
    epsilons = [float(line.split("epsilon ")[1].split(" ")[0]) for line in lines]
    # A wrong gradient, clip or sign stays near the 10 % of guessing.
    assert accuracies[-1] > 80
    assert epsilons == sorted(epsilons)
    # Calibration to a thousandth of the noise spends the target nearly whole, and never more.
    assert 3.9 < epsilons[-1] <= 4


def test_prints_a_summary_and_draws_a_picture(digits_run):
    output, plot = digits_run
    for word in ("test accuracy", "noise multiplier", "physical batch", "samples cut", "0 (0)"):
        assert word in output
    assert "at delta 0.0001 " in output
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000


def parse(flags, monkeypatch):
    """Parse flags as the program does, in this process: importing jax anew takes seconds."""
    values = absl_flags.FlagValues()
    monkeypatch.setattr(train_private, "FLAGS", values)
    train_private.define_flags(values)
    return values(["train_private.py", *flags])


def test_microbatches_change_nothing_but_rounding(monkeypatch):
    runs = []
    for more in ([], ["--microbatch_size=50"]):
        parse(["--epochs=1", "--batch_size=300", "--noise_multiplier=0.7", *more], monkeypatch)
        runs.append(train_private.train(_data.digits(), train_private.settings(1437)))
    whole, parts = runs
    # Rounding may tip one image of the 360 or two, and moves norms by parts in a million; where it
    # tips a unit at its kink or another maximum of a window wins, by parts in a hundred.
    assert abs(whole.accuracies[-1] - parts.accuracies[-1]) < 0.006
    moved = np.abs(whole.norms["after"] / parts.norms["after"] - 1)
    assert np.max(moved) < 0.05
    assert np.mean(moved < 1e-3) > 0.99


def test_mnist_files_and_no_privacy(small_mnist, monkeypatch, capsys):
    flags = ["--dataset=mnist", f"--data_dir={small_mnist}", "--epochs=1", "--batch_size=50"]
    train_private.main(parse([*flags, "--noise_multiplier=0"], monkeypatch))
    output = capsys.readouterr().out
    assert "epsilon inf" in output and "none (no noise)" in output
    assert "200, 50" in output


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--noise_multiplier=1", "--target_epsilon=2"], "not both"),
        (["--target_epsilon=0"], "not above 0"),
        (["--target_epsilon=inf"], "not above 0 and finite"),
        (["--delta=0"], "does not lie between 0 and 1"),
        (["--delta=nan"], "does not lie between 0 and 1"),
        (["--batch_size=5000"], "exceeds the 1437 training images"),
        (["--batch_size=0"], "batch_size"),
        (["--l2_norm_clip=inf"], "is not finite"),
        (["--noise_multiplier=-1"], "noise_multiplier"),
        (["--noise_multiplier=nan"], "is not finite"),
        (["--microbatch_size=0"], "microbatch_size"),
        (["--plot=/no/such/place.png"], "no such directory"),
        (["--dataset=mnist"], "needs --data_dir"),
        (["--dataset=mnist", "--data_dir=/no/such/place"], "neither train-images-idx3-ubyte nor"),
        (["--dataset=letters"], "digits"),
        (["now"], "unknown argument 'now'"),
    ],
)
def test_bad_flags(flags, message, monkeypatch):
    with pytest.raises((app.UsageError, absl_flags.Error), match=message):
        train_private.main(parse(flags, monkeypatch))


def test_bad_flags_end_the_program_with_a_message():
    result = run("--target_epsilon=-1", check=False)
    assert result.returncode != 0
    assert "--target_epsilon=-1.0 is not above 0" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


# ---- data --------------------------------------------------------------------------------------


def test_digits_are_split_without_overlap():
    data = _data.digits()
    assert data.train_images.shape == (1437, 8, 8, 1) and data.test_images.shape == (360, 8, 8, 1)
    assert data.train_images.dtype == np.float32 and data.train_labels.dtype == np.int32
    assert data.train_images.min() == 0 and data.train_images.max() == 1
    assert set(data.test_labels.tolist()) == set(range(10))
    train = {image.tobytes() for image in data.train_images}
    assert not any(image.tobytes() in train for image in data.test_images)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_read_idx(tmp_path, ending):
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    write_idx(tmp_path / f"a{ending}", array)
    np.testing.assert_array_equal(_data.read_idx(tmp_path / f"a{ending}"), array)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "not an IDX file"),
        (b"\0\0\x0d\x01\0\0\0\1\0", "not an IDX file of unsigned bytes"),
        (b"\0\0\x08\x03\0\0\0\1", "ends within its header"),
        (b"\0\0\x08\x01\0\0\0\3ab", r"holds 2 bytes, not \(3,\)"),
    ],
)
def test_bad_idx_files(tmp_path, content, message):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        _data.read_idx(tmp_path / "bad")


def test_images_without_labels(small_mnist):
    write_idx(small_mnist / _data.MNIST_FILES["test_labels"], np.zeros(49))
    with pytest.raises(ValueError, match="do not match"):
        _data.load("mnist", str(small_mnist))


# ---- sampling and accounting -------------------------------------------------------------------


def test_poisson_sampling():
    plan = _sampling.plan(2000, 100, epochs=20, delta=1e-5)
    sampler = _sampling.Sampler(plan, seed=1)
    counts, sizes = np.zeros(2000), []
    for _ in range(plan.steps):
        indices, is_padding = sampler.sample()
        assert indices.shape == is_padding.shape == (plan.physical_batch_size,)
        drawn = indices[~is_padding]
        assert len(set(drawn)) == len(drawn)
        counts[drawn] += 1
        sizes.append(len(drawn))
    assert sampler.overflows == 0
    # Binomial sizes have a variance; batches of one size have none. Bounds at about 5 sigma.
    assert abs(np.mean(sizes) - 100) < 5 * math.sqrt(95 / 400)
    assert 0.6 * 95 < np.var(sizes) < 1.4 * 95
    # Each example is drawn Binomial(400, 1/20) times.
    assert abs(counts.mean() - 20) < 0.5 and 0.8 * 19 < counts.var() < 1.2 * 19


def test_overflow_is_cut_and_counted():
    plan = _sampling.plan(2000, 100, epochs=1, delta=1e-5)
    small = _sampling.dataclasses.replace(plan, physical_batch_size=90)
    sampler = _sampling.Sampler(small, seed=1)
    whole = _sampling.Sampler(plan, seed=1)
    indices, is_padding = sampler.sample()
    drawn, padding = whole.sample()
    assert not is_padding.any() and len(set(indices)) == 90
    assert set(indices) < set(drawn[~padding])
    assert (sampler.overflows, sampler.left_out) == (1, int((~padding).sum()) - 90)


def test_physical_batch_makes_overflow_rare():
    for examples, batch_size in [(1437, 256), (60000, 1024)]:
        plan = _sampling.plan(examples, batch_size, epochs=15, delta=1e-5)
        assert plan.overflow_probability <= 1e-12
        assert plan.total_delta(1e-5, epsilon=10.0) == 1e-5 < plan.total_delta(1e-5, epsilon=40.0)
    # No more can be drawn than there are.
    plan = _sampling.plan(200, 200, epochs=1, delta=1e-5)
    assert plan.physical_batch_size == 200 and plan.overflow_probability == 0
    # Nor is it wasteful.
    plan = _sampling.plan(60000, 1024, epochs=15, delta=1e-5)
    assert plan.physical_batch_size < 1024 + 9 * math.sqrt(1024)


def test_accounting_agrees_with_an_independent_bound():
    plan = _sampling.plan(60000, 1024, epochs=2, delta=1e-5)
    accountant = _sampling.Accountant(plan, 1.1, 1e-5)
    first, second = accountant.spend(plan.steps_per_epoch), accountant.spend(plan.steps_per_epoch)
    other = rdp.RdpAccountant()
    step = dp_event.PoissonSampledDpEvent(1024 / 60000, dp_event.GaussianDpEvent(1.1))
    other.compose(step, 118)
    # Renyi differential privacy is an upper bound, looser by a fifth or so.
    assert first < second < other.get_epsilon(1e-5) < 1.5 * second
    assert _sampling.Accountant(plan, 0.0, 1e-5).spend(1) == math.inf


def test_calibration_meets_the_target():
    plan = _sampling.plan(1437, 256, epochs=5, delta=1e-4)
    noise = _sampling.calibrate(plan, 2.0, 1e-4)
    assert _sampling.Accountant(plan, noise, 1e-4).spend(plan.steps) <= 2.0
    assert _sampling.Accountant(plan, noise - 0.005, 1e-4).spend(plan.steps) > 2.0
