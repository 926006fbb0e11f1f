"""`grad_norms`: the norms of per-example gradients, without the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from perex import _norms
from perex._api import Options, signature_of
from perex._clipping import Clipping, Groups, flatten
from perex._norms import combine_norms
from perex._parts import Parts
from perex._per_example import PerExample
from perex._transform import SavedMemory, sweep


def grad_norms(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    in_axes: Any = None,
    keep_batch_dim: bool = False,
    conv: Any = "auto",
    per: Groups = "global",
    save_memory: bool = False,
) -> Callable[..., Any]:
    """Returns a function that computes the L2 norm of the gradient of each example's loss.

    The norms come out of one forward and backward pass over the batch; no array of per-example
    gradients of a large parameter is held. They are exact, and in range wherever the norm itself
    has a number of its dtype: a norm of 1e-20 or 1e20 is no problem in float32. They can be
    differentiated; where a norm is zero, its derivative is taken to be zero.

    Args:
      fun: see `perex.value_and_grad`.
      argnums: see `perex.value_and_grad`. The norm is over all these arguments.
      has_aux: see `perex.value_and_grad`.
      in_axes: see `perex.value_and_grad`.
      keep_batch_dim: see `perex.value_and_grad`.
      conv: see `perex.value_and_grad`.
      per: "global" for the norm over all parameters; "leaf" for one of each parameter; or a
        function from a parameter's path, such as "Conv_0/kernel", to the name of its group.
      save_memory: whether to take norms while the backward pass goes on, where that is possible,
        and hold none of what they are made of. With `jax.checkpoint` in the loss, memory is that
        of the ordinary backward pass then; without, the time is the same.

    Returns:
      A function with the arguments of ``fun`` (batched) that returns the norms ``[B]``, at least
      float32. With ``per="leaf"`` there is a ``[B]`` in place of each parameter, and with groups a
      dict from group to ``[B]``. With ``has_aux`` it returns the pair ``(norms, aux)``.

    Raises:
      TypeError: see `perex.value_and_grad`.
      ValueError: see `perex.value_and_grad`; or ``per`` is unknown.

    Example:
      >>> import jax.numpy as jnp, perex
      >>> loss = lambda w, x: jnp.dot(w, x)
      >>> perex.grad_norms(loss)(jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 1.0]])).tolist()
      [5.0, 1.0]
    """
    options = Options.check(
        "perex.grad_norms", fun, argnums, has_aux, in_axes, keep_batch_dim, conv=conv
    )
    grouping = Clipping(float("inf"), per)

    @signature_of(fun)
    def norms_of(*args: Any, **kwargs: Any) -> Any:
        result = sweep(options.problem(args, kwargs), SavedMemory() if save_memory else None)
        paths, leaves, treedef = flatten(options.by_argument(args, result.gradients))
        if per == "leaf":
            tree = treedef.unflatten([_norms.square_norms(leaf).values() for leaf in leaves])
        else:
            kinds = grouping.groups(paths)
            parts = Parts.of([_array_if_plain(leaf) for leaf in leaves], kinds)
            groups: dict[Any, list[_norms.ScaledNorms]] = {}
            for group, norm in zip(parts.first(kinds), parts.norms(), strict=True):
                groups.setdefault(group, []).append(norm)
            tree = {group: combine_norms(members).values() for group, members in groups.items()}
        if per == "global":
            tree = tree["global"] if leaves else jax.numpy.zeros_like(result.values)
        return (tree, result.aux) if has_aux else tree

    return norms_of


def _array_if_plain(leaf: Any) -> Any:
    plain = isinstance(leaf, PerExample) and not leaf.uses and leaf.dense is not None
    return leaf.materialize() if plain else leaf
