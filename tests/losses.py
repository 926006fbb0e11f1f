"""What a loss function of the tests is: the function of one example, and arguments for a batch.

The losses themselves are in `losses_layers` (kinds of layers) and `losses_uses` (ways in which a
program can use a parameter). Arguments are host arrays in float64; tests cast them.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# Three examples: enough to mix up, and to differ from every other length in the losses.
BATCH = 3


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss and how it is differentiated.

    Attributes:
      fun: the loss of one example.
      args: the arguments of a batch; a callable among them is called for the argument.
      kwargs: keyword arguments, shared.
      argnums: as in `jax.grad`.
      has_aux: as in `jax.grad`.
      in_axes: as in `jax.vmap`, or None for perex's default.
      sites: how many lines of `perex.explain` name a rule, one for each leaf of each site.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    argnums: Any = 0
    has_aux: bool = False
    in_axes: Any = None
    sites: int = 0

    def arguments(self, dtype: Any = np.float64) -> tuple[Any, ...]:
        """Returns the arguments with floating-point arrays of a dtype; Python numbers stay."""
        args = tuple(x() if callable(x) else x for x in self.args)
        return jax.tree.map(
            lambda x: x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x,
            args,
        )

    @property
    def differentiate(self) -> dict[str, Any]:
        """The options that `jax.value_and_grad` and perex share."""
        return {"argnums": self.argnums, "has_aux": self.has_aux}

    def axes(self) -> tuple[Any, ...]:
        """Returns in_axes as `jax.vmap` wants them."""
        if self.in_axes is not None:
            return tuple(self.in_axes)
        chosen = (self.argnums,) if isinstance(self.argnums, int) else self.argnums
        count = len(self.args)
        return tuple(None if i in [c % count for c in chosen] else 0 for i in range(count))


def registry() -> tuple[dict[str, Loss], Callable[..., Any]]:
    """Returns an empty table of losses and the decorator that enters a function into it."""
    table: dict[str, Loss] = {}

    def case(*args: Any, **options: Any) -> Callable[..., Any]:
        def enter(fun: Callable[..., Any]) -> Callable[..., Any]:
            assert fun.__name__ not in table
            table[fun.__name__] = Loss(fun, args, **options)
            return fun

        return enter

    return table, case


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    """Returns normally distributed numbers, the same for the same shape."""
    rng = np.random.default_rng(zlib.crc32(repr(shape).encode()))
    return scale * rng.standard_normal(shape)


def batch(*shape: int) -> np.ndarray:
    """Returns normally distributed numbers with the example axis in front."""
    return normal(BATCH, *shape)
