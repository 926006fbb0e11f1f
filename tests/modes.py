"""Checks a loss in every mode: gradients, norms and clipped sum, against the float64 loop."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import perex

# What is compiled here runs once: compile it quickly.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# float64 on both sides; sums in another order differ in the last digits, and Gram norms cancel.
TOLERANCE = 1e-9


def check(loss: Callable[..., Any], params: Any, *batch: Any, tolerance: float = TOLERANCE) -> Any:
    """Asserts that all modes agree with the loop, and returns the loop's gradients.

    The clip norm is the median of the norms, so that some examples are clipped and some are not.
    Call under float64, unless the tolerance says otherwise.
    """
    _, _, expected = oracle.loop(jax.jit(loss))(params, *batch)
    leaves = jax.tree.leaves(expected)
    norms = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64), axis=_rest(g)) for g in leaves))
    clip = float(np.median(norms))

    @partial(jax.jit, compiler_options=QUICK)
    def modes(params: Any, *batch: Any) -> Any:
        factored = perex.grad(loss, factored=True)(params, *batch)
        gradients = jax.tree.map(jnp.asarray, factored, is_leaf=_is_factored)
        total, stats = perex.clipped_grad(loss, clip)(params, *batch)
        return gradients, total, stats.norms, perex.grad_norms(loss)(params, *batch)

    gradients, total, *both = modes(params, *batch)
    oracle.assert_trees_close(gradients, expected, tolerance, tolerance)
    for found in both:
        np.testing.assert_allclose(found, norms, rtol=tolerance)
    weights = np.minimum(1, clip / np.where(norms == 0, 1, norms))
    clipped = jax.tree.map(lambda g: np.tensordot(weights, g, 1), expected)
    oracle.assert_trees_close(total, clipped, tolerance, tolerance)
    return expected


def uses(loss: Callable[..., Any], params: Any, *batch: Any) -> str:
    """Returns perex's explanation of a loss."""
    return str(perex.explain(loss)(params, *batch))


def fallbacks(loss: Callable[..., Any], params: Any, *batch: Any) -> set[str]:
    """Returns the paths of the leaves with a use that goes the plain way."""
    lines = uses(loss, params, *batch).splitlines()[1:]
    found = (re.match(r" *(.*?) \[[\d, ]*\]: .*fallback", line) for line in lines)
    return {match.group(1) for match in found if match}


def _is_factored(x: Any) -> bool:
    return isinstance(x, perex.PerExample)


def _rest(x: Any) -> tuple[int, ...]:
    return tuple(range(1, np.ndim(x)))
