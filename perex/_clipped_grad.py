"""`clipped_grad`: the sum of clipped per-example gradients, a microbatch at a time.

Letters: B examples, in steps of M.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from perex import _compat
from perex._api import Options, signature_of
from perex._clipping import Clipping, Groups, GroupWeights, flatten
from perex._compat import promote_types
from perex._parts import Parts
from perex._per_example import simplify
from perex._rules.chunks import known_size
from perex._transform import Problem, SavedMemory, Sweep, manual_axes, sweep


class ClippedGradStats(NamedTuple):
    """What `perex.clipped_grad` tells about the examples of a batch.

    None of this is private: no noise is added to it.
    """

    values: jax.Array
    """``[B]``: the losses, in their dtype; zero for padding."""
    norms: jax.Array
    """``[B]``: the norms over all parameters, unclipped, at least float32; zero for padding."""
    aux: Any
    """What the loss returns besides, with the example axis in front; None without ``has_aux``."""
    num_clipped: jax.Array
    """int32: how many examples the clip norm shortened."""
    num_nonfinite: jax.Array
    """int32: how many examples had Inf or NaN in their gradient and so contributed nothing."""


def clipped_grad(
    fun: Callable[..., Any],
    l2_norm_clip: float | Mapping[Hashable, float],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    in_axes: Any = None,
    keep_batch_dim: bool = False,
    conv: Any = "auto",
    per: Groups = "global",
    mode: str = "clip",
    gamma: float = 0.01,
    microbatch_size: int | None = None,
    save_memory: bool = False,
) -> Callable[..., Any]:
    """Returns a function that computes the sum over examples of clipped gradients.

    The sum that DP-SGD adds noise to (`perex.dp_noise`), at the cost of about one ordinary
    gradient: the norms and then the sum come from one forward and backward pass, and gradients of
    single examples are held only where that is the fastest way. No noise is added and nothing is
    divided by the batch size.

    Args:
      fun: see `perex.value_and_grad`.
      l2_norm_clip: the clip norm C, as in `perex.dp_clip`.
      argnums: see `perex.value_and_grad`. Their gradients are clipped together.
      has_aux: see `perex.value_and_grad`.
      in_axes: see `perex.value_and_grad`.
      keep_batch_dim: see `perex.value_and_grad`.
      conv: see `perex.value_and_grad`.
      per: what shares a norm, as in `perex.dp_clip`: "global", "leaf" or a function from a
        parameter's path to its group.
      mode: "clip" or "automatic", as in `perex.dp_clip`.
      gamma: the stabiliser of mode "automatic".
      microbatch_size: how many examples to work on at a time; memory is bounded by these. Any
        number goes with any B, and the result is the same to rounding. None takes all at once.
      save_memory: whether to take two passes. The first brings home norms alone (see
        `perex.grad_norms`), the second is the same pass again and brings home weighted sums. With
        `jax.checkpoint` in the loss, memory is about that of the ordinary gradient, and so is the
        time of each pass; without, there is nothing to save.

    Returns:
      A function with the arguments of ``fun`` (batched) and ``is_padding``, a bool array ``[B]`` or
      None, that returns ``(sum, stats)``. The sum has the structure and shapes of the parameters,
      in at least float32, as rounding it before noise is added would spoil its sensitivity. Stats
      is a `ClippedGradStats`. Padding contributes exactly zero whatever it holds, and so does an
      example whose gradient is not finite. No other example adds more than C (1 + 2**-10), as
      computed, whatever cancels inside of its gradient (float32; closer to C in float64; the
      theorem and its derivation stand in `perex._rules.certified`). How far one example can move
      the sum: `perex.sensitivity`.

    Raises:
      TypeError: see `perex.value_and_grad`; or an argument has the wrong type.
      ValueError: see `perex.value_and_grad`; or an argument is out of range, or ``is_padding`` is
        not bool ``[B]``.

    Example:
      >>> import jax.numpy as jnp, perex
      >>> loss = lambda w, x: jnp.dot(w, x)
      >>> clipped = perex.clipped_grad(loss, l2_norm_clip=1.0)
      >>> total, stats = clipped(jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 0.5]]))
      >>> total.round(6).tolist(), stats.norms.tolist(), int(stats.num_clipped)
      ([0.6000000238418579, 1.2999999523162842], [5.0, 0.5], 1)
    """
    options = Options.check(
        "perex.clipped_grad", fun, argnums, has_aux, in_axes, keep_batch_dim, conv=conv
    )
    clipping = Clipping(l2_norm_clip, per, mode, gamma)
    if microbatch_size is not None and (
        isinstance(microbatch_size, bool)
        or not isinstance(microbatch_size, int)
        or microbatch_size < 1
    ):
        raise ValueError(
            "perex.clipped_grad: microbatch_size must be None or an int of at least 1, got "
            f"{microbatch_size!r}."
        )

    @signature_of(fun)
    def clipped_gradient(*args: Any, is_padding: Any = None, **kwargs: Any) -> Any:
        problem = options.problem(args, kwargs)
        _check_padding(is_padding, problem.batch_size)

        def one(part: Problem, is_padding: Any) -> tuple[Any, _Examples]:
            run = _clipped_sum_in_two_passes if save_memory else _clipped_sum
            return run(options, clipping, args, part, is_padding)

        # A batch of symbolic size (`jax.export`) has no known number of steps.
        batch_size = known_size(problem.batch_size)
        size = batch_size if microbatch_size is None else microbatch_size
        if size >= batch_size or batch_size != problem.batch_size:
            total, examples = one(problem, is_padding)
        else:
            total, examples = _in_microbatches(one, problem, is_padding, size)
        counts = (
            jnp.sum(mask, dtype=jnp.int32) for mask in (examples.is_clipped, ~examples.is_finite)
        )
        return total, ClippedGradStats(examples.values, examples.norms, examples.aux, *counts)

    return clipped_gradient


class _Examples(NamedTuple):
    """What is known about each example, ``[B]``."""

    values: jax.Array
    norms: jax.Array
    aux: Any
    is_clipped: jax.Array
    is_finite: jax.Array


@dataclasses.dataclass(frozen=True)
class _Swept:
    """A sweep over one microbatch, its gradients arranged for clipping."""

    result: Sweep
    treedef: Any
    paths: list[str]
    parts: Parts

    @classmethod
    def of(
        cls,
        options: Options,
        clipping: Clipping,
        args: tuple[Any, ...],
        problem: Problem,
        saved: SavedMemory | None = None,
    ) -> _Swept:
        result = sweep(problem, saved)
        paths, leaves, treedef = flatten(options.by_argument(args, simplify(result.gradients)))
        if not leaves:
            raise ValueError("perex.clipped_grad: the arguments in argnums hold no arrays.")
        return cls(result, treedef, paths, Parts.of(leaves, clipping.groups(paths)))

    def weights(self, clipping: Clipping, is_padding: jax.Array | None) -> GroupWeights:
        """The weights of each part."""
        return clipping.weights(self.parts.norms(), self.parts.first(self.paths), is_padding)

    def values(self, is_padding: jax.Array | None) -> jax.Array:
        values = self.result.values
        return values if is_padding is None else jnp.where(is_padding, 0, values)


def _clipped_sum(
    options: Options,
    clipping: Clipping,
    args: tuple[Any, ...],
    problem: Problem,
    is_padding: jax.Array | None,
) -> tuple[Any, _Examples]:
    """Returns the clipped sum of one microbatch, arranged like the arguments in ``argnums``."""
    swept = _Swept.of(options, clipping, args, problem)
    clipped = swept.weights(clipping, is_padding)
    sums = swept.parts.weighted_sums(clipped.weights)
    return swept.treedef.unflatten(sums), _Examples(
        swept.values(is_padding),
        clipped.norms,
        swept.result.aux,
        clipped.is_clipped,
        clipped.is_finite,
    )


def _clipped_sum_in_two_passes(
    options: Options,
    clipping: Clipping,
    args: tuple[Any, ...],
    problem: Problem,
    is_padding: jax.Array | None,
) -> tuple[Any, _Examples]:
    """The same in two passes: the first for the norms, the second for the sum.

    Both are steps of one loop, so that they are one program and compute the same numbers: what is
    summed is what was measured, to the last bit.
    """
    parameters = problem.parameter_structs()
    order = jax.tree.leaves(options.by_argument(args, range(len(parameters))))
    treedef = jax.tree.structure(options.by_argument(args, parameters), is_leaf=_is_struct)

    def measured(swept: _Swept) -> GroupWeights:
        clipped = swept.weights(clipping, is_padding)
        return clipped._replace(weights=swept.parts.for_leaves(clipped.weights))

    def one_pass(carry: Any, is_sum: jax.Array) -> tuple[Any, Any]:
        clipped, sums = carry
        weights = dict(zip(order, clipped.weights, strict=True))
        saved = SavedMemory([weights[i] for i in range(len(parameters))], is_sum)
        swept = _Swept.of(options, clipping, args, problem, saved)

        def summed() -> list[jax.Array]:
            totals = swept.parts.weighted_sums(swept.parts.first(clipped.weights))
            return [x.astype(like.dtype) for x, like in zip(totals, sums, strict=True)]

        sums = jax.lax.cond(is_sum, summed, lambda: sums)
        clipped = jax.lax.cond(is_sum, lambda: clipped, lambda: measured(swept))
        return (clipped, sums), (swept.values(is_padding), swept.result.aux)

    structs = jax.eval_shape(
        lambda: measured(_Swept.of(options, clipping, args, problem, SavedMemory()))
    )
    axes = manual_axes(problem)
    start = (
        jax.tree.map(_zeros_like, structs),
        [
            _compat.vary_over(jnp.zeros(x.shape, promote_types(x.dtype, jnp.float32)), axes)
            for x in (parameters[i] for i in order)
        ],
    )
    passes = jnp.arange(2) == 1
    (clipped, sums), told = jax.lax.scan(one_pass, start, passes)
    values, aux = jax.tree.map(lambda x: x[1], told)
    return treedef.unflatten(sums), _Examples(
        values, clipped.norms, aux, clipped.is_clipped, clipped.is_finite
    )


def _is_struct(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _in_microbatches(
    one: Callable[[Problem, Any], tuple[Any, _Examples]],
    problem: Problem,
    is_padding: jax.Array | None,
    microbatch_size: int,
) -> tuple[Any, _Examples]:
    """Adds up ``one(microbatch, is_padding)`` over the batch.

    The example axis becomes (M, steps) and the loop runs over the second of these, so that a batch
    which is sharded over devices stays where it is. The last examples are repeated to fill up.
    """
    batch_size = problem.batch_size
    steps = math.ceil(batch_size / microbatch_size)
    # As even as possible: 10 examples in steps of at most 4 are 4 + 4 + 2, but also 3 steps of 4.
    size = math.ceil(batch_size / steps)
    padded = size * steps
    if padded > batch_size and is_padding is None:
        is_padding = jnp.zeros(batch_size, bool)

    def split(x: jax.Array, axis: int, filler: Any = None) -> jax.Array:
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        if padded > batch_size:
            # A real example, as zeros could be bad input to the loss. No lax.pad, which keys lack.
            last = jax.lax.slice_in_dim(x, batch_size - 1, batch_size, axis=axis)
            filler = last if filler is None else filler
            missing = (*before, padded - batch_size, *after)
            x = jnp.concatenate([x, jnp.broadcast_to(filler, missing)], axis)
        return x.reshape(*before, size, steps, *after)

    batch = {
        i: split(jnp.asarray(leaf), axis)
        for i, (leaf, axis) in enumerate(zip(problem.leaves, problem.axes, strict=True))
        if axis is not None
    }
    mask = None if is_padding is None else split(jnp.asarray(is_padding), 0, True)

    def at(step: Any) -> tuple[Any, _Examples]:
        leaves = list(problem.leaves)
        for i, leaf in batch.items():
            axis = problem.axes[i] + 1  # type: ignore[operator]
            leaves[i] = jax.lax.dynamic_index_in_dim(leaf, step, axis, keepdims=False)
        part = dataclasses.replace(problem, leaves=tuple(leaves), batch_size=size)
        return one(part, None if mask is None else mask[:, step])

    def body(total: Any, step: Any) -> tuple[Any, _Examples]:
        more, examples = at(step)
        return jax.tree.map(jnp.add, total, more), examples

    start = jax.tree.map(_zeros_like, jax.eval_shape(at, jax.ShapeDtypeStruct((), jnp.int32))[0])
    total, examples = jax.lax.scan(body, start, jnp.arange(steps, dtype=jnp.int32))
    return total, jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(padded, *x.shape[2:])[:batch_size], examples
    )


def _zeros_like(struct: Any) -> jax.Array:
    """Returns zeros that vary over the manual mesh axes as the sum does, in ``shard_map``."""
    return _compat.vary_over(jnp.zeros(struct.shape, struct.dtype), _compat.manual_axes(struct))


def _check_padding(is_padding: Any, batch_size: int) -> None:
    if is_padding is None:
        return
    kind = getattr(is_padding, "dtype", type(is_padding).__name__)
    shape = getattr(is_padding, "shape", None)
    if kind != jnp.bool_ or shape != (batch_size,):
        raise ValueError(
            f"perex.clipped_grad: is_padding must be bool of shape ({batch_size},); got {kind} of "
            f"shape {shape}."
        )
