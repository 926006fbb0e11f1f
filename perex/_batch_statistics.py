"""Layers that mix the examples of a batch: what a user of BatchNorm is told.

The gradient of one example's loss does not exist where the loss depends on the other examples. A
loss of one example cannot see them, but a BatchNorm layer within it still computes "batch"
statistics, of that example alone. This shows in two ways: the layer averages over a named axis, or
the loss returns the layer's updated statistics as auxiliary data.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

# Flax linen: the collection "batch_stats"; NNX: variables of type BatchStat; Haiku: the states of
# the module BatchNorm, which are exponential moving averages.
_STATISTICS = re.compile(r"batch_?stats?|batch_?norm|mean_ema", re.IGNORECASE)

_ADVICE = (
    "A layer that normalises by the statistics of a batch makes each example's loss depend on the "
    "others, so there is no per-example gradient. Use GroupNorm or LayerNorm (flax.linen.GroupNorm,"
    " flax.nnx.GroupNorm, haiku.GroupNorm, equinox.nn.GroupNorm), or the layer with fixed "
    "statistics (use_running_average=True, is_training=False, inference=True)."
)


def warn_of_batch_statistics(name: str, aux_tree: Any) -> None:
    """Warns where the auxiliary data of a loss look like updated batch statistics.

    Args:
      name: the transform, for the message.
      aux_tree: the structure of the auxiliary data.
    """
    found = _STATISTICS.search(str(aux_tree))
    if found:
        warnings.warn(
            f"{name}: the loss returns batch statistics ('{found.group()}') as auxiliary data. The "
            f"loss sees one example, so these are statistics of one example each. {_ADVICE}",
            UserWarning,
            stacklevel=2,
        )


@contextlib.contextmanager
def unbound_axes_explained(name: str) -> Iterator[None]:
    """Explains the error of a loss that communicates over a named axis which does not exist."""
    try:
        yield
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise NameError(
            f"{name}: {error}. The loss of one example communicates over a named axis, as BatchNorm"
            f" does to average over a batch. {_ADVICE}"
        ) from error
