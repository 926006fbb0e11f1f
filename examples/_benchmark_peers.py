"""Other libraries in another interpreter: Opacus, which needs torch."""

from __future__ import annotations

import json
import pathlib
import subprocess
from typing import Any

from _benchmark_models import Entry
from _benchmark_report import Options

MODES = ("hooks", "ghost")
_PROGRAM = pathlib.Path(__file__).with_name("_benchmark_opacus.py")
# The models of which that program has a twin.
TWINS = ("mnist_cnn", "cifar_cnn", "dense", "resnet18", "wrn16_4")


def opacus(entry: Entry, batch_size: int, options: Options) -> dict[str, Any]:
    """Times Opacus on the twin of a model.

    Args:
      entry: the model.
      batch_size: number of examples.
      options: names the interpreter and says how to measure.

    Returns:
      Figures "opacus ordinary ms", "opacus hooks ms" and "opacus ghost ms" and the ratios of the
      latter two to the first, of one process; nothing if no interpreter is given or the model has
      no twin.

    Raises:
      RuntimeError: the program failed; the message holds what it printed.
    """
    if not options.opacus_python or entry.builder not in TWINS or options.dtype != "float32":
        return {}
    command = [options.opacus_python, str(_PROGRAM), entry.builder, str(batch_size)]
    command += [f"--repeats={options.settings.repeats}", f"--min_time={options.settings.min_time}"]
    command += [f"--sizes={json.dumps(dict(entry.sizes))}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
