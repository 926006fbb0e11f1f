"""The emulated backend that leaks, for tests; `examples/receptive_field.py` shows it too."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

from _winograd import backend, forward, kernel_gradient

__all__ = ["backend", "forward", "kernel_gradient"]
