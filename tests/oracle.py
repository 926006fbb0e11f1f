"""The oracle: a Python loop of `jax.grad` over single examples.

It shares no code with what it checks: no vmap, no perex. Run under float64 it is the truth to which
results are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def loop(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    in_axes: Sequence[Any] | None = None,
) -> Callable[..., Any]:
    """Returns ``(values, aux or None, grads)`` of each example, stacked on the host."""
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def run(*args: Any, **kwargs: Any) -> Any:
        axes = in_axes or [None if i in chosen else 0 for i in range(len(args))]
        leaves, treedef = jax.tree.flatten(args)
        flat_axes = [
            axis
            for prefix, argument in zip(axes, args, strict=True)
            for axis in _axes_of_leaves(prefix, argument)
        ]
        sizes = {jnp.shape(x)[a] for x, a in zip(leaves, flat_axes, strict=True) if a is not None}
        (size,) = sizes
        results = []
        for b in range(size):
            example = treedef.unflatten(
                x if axis is None else jnp.take(x, b, axis=axis)
                for x, axis in zip(leaves, flat_axes, strict=True)
            )
            value, gradients = jax.value_and_grad(fun, argnums, has_aux)(*example, **kwargs)
            value, aux = value if has_aux else (value, None)
            results.append((value, aux, gradients))
        return jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *results)

    return run


def _axes_of_leaves(prefix: Any, argument: Any) -> list[int | None]:
    if prefix is None or isinstance(prefix, int):
        return [prefix] * len(jax.tree.leaves(argument))
    keys = sorted(prefix) if isinstance(prefix, dict) else range(len(prefix))
    pairs = [(prefix[key], argument[key]) for key in keys]
    return [axis for part, subtree in pairs for axis in _axes_of_leaves(part, subtree)]


def to_float64(tree: Any) -> Any:
    """Casts the floating-point leaves of a tree to float64 (call with x64 enabled)."""
    return jax.tree.map(
        lambda x: (
            jnp.asarray(x, jnp.float64) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating) else x
        ),
        tree,
    )


def assert_trees_close(actual: Any, expected: Any, rtol: float, atol: float) -> None:
    """Asserts equal structure and shapes, and values within a tolerance of each leaf's scale."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    flat_actual = jax.tree_util.tree_leaves_with_path(actual)
    for (path, a), e in zip(flat_actual, jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a), np.asarray(e)
        assert a.shape == e.shape, (path, a.shape, e.shape)
        scale = max(1.0, float(np.max(np.abs(e)))) if e.size else 1.0
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol * scale, err_msg=str(path))
