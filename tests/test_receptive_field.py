"""The program that draws receptive fields: runs, says what it shows, and refuses bad flags."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import matplotlib.image
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "examples" / "receptive_field.py"
sys.path.insert(0, str(ROOT / "examples"))

import receptive_field  # noqa: E402


def run(*flags):
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, str(PROGRAM), *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def test_digits(tmp_path):
    path = tmp_path / "picture.png"
    result = run("--steps=2", "--depth=1", "--features=32", "--batch_size=4", f"--plot={path}")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    if jax.default_backend() == "cpu":
        assert "does not leak" in lines[0] and "emulated" in lines[0]
    (layer,) = [line for line in lines if line.startswith("after 7x7 and 1 3x3")]
    leak = re.search(r"ordinary (\S+), perex 0.0e\+00 \(0 pixels outside", layer)
    assert leak is not None and float(leak[1]) > 1e-10
    assert "bits_per_pixel" in result.stderr
    assert np.ptp(matplotlib.image.imread(path)) > 0.5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--depth=0"], "depth"),
        (["--plot=/no/such/place/x.png"], "the directory does not exist"),
        (["--data_dir=/no/such/place"], "train-images-idx3-ubyte"),
        (["digits"], "unexpected arguments"),
    ],
)
def test_bad_flags(flags, message):
    result = run("--steps=0", *flags)
    assert result.returncode != 0
    assert message in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_the_pixels_that_may_have_influence():
    after_the_first = receptive_field.allowed(9, 9, 0)
    assert after_the_first.sum() == 24 and after_the_first[1:4, 1:8].all()
    assert receptive_field.allowed(9, 9, 2).sum() == 4 * 9 + 4
    assert receptive_field.raster_mask(3, 1, 1, "B").sum() == 5
