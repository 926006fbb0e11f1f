"""Differential privacy as optax transforms: `dp_clip`, and its noise half `dp_noise`.

DP-SGD (Abadi et al. 2016, arXiv:1607.00133) replaces the mean gradient by

    (sum_i clip(g_i) + noise_multiplier * sensitivity * N(0, I)) / expected_batch_size.

The noise is added once, to the sum, and the divisor is a public number: the number of examples that
Poisson sampling happened to draw is private, as it tells whether somebody is in the data.

What these functions do not do: sample the batch, count the privacy budget (dp_accounting does), or
defend against attacks on floating-point noise (Mironov 2012, doi:10.1145/2382196.2382264).
`jax.random` keys are as unpredictable as the seed they are made from.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from perex import _norms
from perex._clipping import Clipping, Groups, clip_norms, flatten, nonnegative, sensitivity
from perex._compat import promote_types
from perex._parts import Parts


class DPClipState(NamedTuple):
    """State of `dp_clip`.

    The counts are for watching a run. They are *not* private: no noise is added to them, so keep
    them to yourself.
    """

    key: jax.Array
    """The key that the noise of the next step comes from."""
    step: jax.Array
    """int32: steps done, the same as noise additions."""
    num_clipped: jax.Array
    """int32: examples of the last batch that the clip norm shortened."""
    num_nonfinite: jax.Array
    """int32: examples of the last batch that held Inf or NaN and so contributed nothing."""
    total_clipped: jax.Array
    """int32: the sum of `num_clipped` over all steps; stays at the largest int32."""
    total_nonfinite: jax.Array
    """int32: the sum of `num_nonfinite` over all steps; stays at the largest int32."""


class DPNoiseState(NamedTuple):
    """State of `dp_noise`: the key that the next noise comes from, and the steps done (int32)."""

    key: jax.Array
    step: jax.Array


def dp_clip(
    l2_norm_clip: float | Mapping[Hashable, float],
    noise_multiplier: float,
    key: jax.Array,
    *,
    expected_batch_size: float | None = None,
    per: Groups = "global",
    mode: str = "clip",
    gamma: float = 0.01,
) -> optax.GradientTransformationExtraArgs:
    """Turn per-example gradients into the noisy mean of clipped gradients.

    Place it first in a chain, in front of any optimizer. The `update` function takes per-example
    gradients, as `perex.grad` returns them: each leaf an array `[B, *shape]`, or a factored leaf.
    It also takes `is_padding`, a bool array `[B]`: those examples contribute exactly zero, whatever
    they hold. So does an example whose gradient holds Inf or NaN; the state counts these. An empty
    batch is a valid step and gives noise alone.

    Norms, sums and noise are computed in at least float32, and the result is cast to the leaf's
    dtype at the end.

    Args:
      l2_norm_clip: the clip norm C. With several groups each group has clip norm C, or its own if
        this is a mapping from group to clip norm. Zero drops all gradients; infinity clips nothing
        and needs `noise_multiplier=0`.
      noise_multiplier: the noise's standard deviation, as a multiple of the sum's sensitivity to
        adding or removing one example (see `sensitivity`): for a single group, as a multiple of C.
      key: a key from `jax.random.key`, where the noise of all steps comes from.
      expected_batch_size: what the noisy sum is divided by; with Poisson sampling, the sampling
        probability times the size of the data set. None divides by B, which is right only for
        batches of a fixed size without padding.
      per: what shares a norm. "global": all leaves; "leaf": each leaf by itself, under its path as
        its name; or a function from a leaf's path, such as "params/Conv_0/kernel", to the name of
        its group.
      mode: "clip" scales a gradient by `min(1, C / norm)`; "automatic" scales it by
        `C / (norm + gamma)` (Bu et al. 2022, arXiv:2206.07136), so that C only sets the step size.
      gamma: the stabiliser of mode "automatic", above zero.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `DPClipState`.

    Raises:
      ValueError: an argument is out of range; or, from `update`, leaves disagree about B,
        `is_padding` comes without `expected_batch_size`, or the groups do not match the mapping.
      TypeError: an argument has the wrong type; or, from `update`, a leaf is not a floating-point
        array.

    Example:
      >>> import jax, optax, perex
      >>> gradients = {"w": jax.numpy.array([[2.0, 0.0], [0.0, 0.5]])}  # of two examples
      >>> tx = optax.chain(perex.dp_clip(1.0, 0.0, jax.random.key(0)), optax.sgd(1.0))
      >>> updates, state = tx.update(gradients, tx.init({"w": jax.numpy.zeros(2)}))
      >>> updates["w"].tolist(), int(state[0].num_clipped)
      ([-0.5, -0.25], 1)
    """
    clipping = Clipping(l2_norm_clip, per, mode, gamma)
    noise_multiplier = nonnegative(noise_multiplier, "noise_multiplier", finite=True)
    if expected_batch_size is not None:
        _check_batch_size(expected_batch_size)
    _check_noise(max(map(float, clip_norms(l2_norm_clip)), default=0.0), noise_multiplier)
    _check_key(key)

    def init(params):
        paths, _, _ = flatten(params)
        if paths:
            clipping.clips(paths)  # A mapping that does not fit shall fail before the first step.
        return DPClipState(_own(key), *(jnp.zeros((), jnp.int32) for _ in range(5)))

    def update(updates, state, params=None, *, is_padding=None, **extra_args):
        del extra_args
        paths, leaves, treedef = flatten(updates)
        _check_leaves(paths, leaves, params)
        parts = Parts.of(leaves, clipping.groups(paths))
        norms, firsts = parts.norms(), parts.first(paths)
        size = norms[0].squares.shape[0]
        _check_sizes(firsts, [norm.squares.shape[0] for norm in norms])
        _check_padding(is_padding, size, expected_batch_size)
        divisor = size if expected_batch_size is None else expected_batch_size
        if divisor == 0:
            raise ValueError(
                "dp_clip: the batch is empty, so its size cannot be the divisor of the mean. "
                "Give expected_batch_size."
            )
        result = clipping.weights(norms, firsts, is_padding)
        sums = parts.weighted_sums(result.weights)
        stddev = _stddev(noise_multiplier, clipping.sensitivity(paths))
        next_key, noise_key = jax.random.split(state.key)
        means = _noisy_means(sums, [leaf.dtype for leaf in leaves], stddev, noise_key, divisor)
        clipped = jnp.sum(result.is_clipped, dtype=jnp.int32)
        nonfinite = jnp.sum(~result.is_finite, dtype=jnp.int32)
        new_state = DPClipState(
            next_key,
            _add(state.step, 1),
            clipped,
            nonfinite,
            _add(state.total_clipped, clipped),
            _add(state.total_nonfinite, nonfinite),
        )
        return treedef.unflatten(means), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def dp_noise(
    l2_norm_clip: float | Mapping[Hashable, float],
    noise_multiplier: float,
    key: jax.Array,
    *,
    expected_batch_size: float,
) -> optax.GradientTransformationExtraArgs:
    """Turn a sum of clipped gradients into the noisy mean: the noise half of `dp_clip`.

    For sums that were clipped before, such as those of `perex.clipped_grad`, over microbatches or
    accumulated over several calls. The noise is added once, however many pieces the sum has. With
    `optax.MultiSteps` around it, pass `use_grad_mean=False`.

    Args:
      l2_norm_clip: the clip norm that the sum was clipped with: a number, or a mapping from group
        to clip norm; where each of several groups has the same clip norm, the number that
        `sensitivity` returns.
      noise_multiplier: the noise's standard deviation, as a multiple of the sum's sensitivity to
        adding or removing one example.
      key: a key from `jax.random.key`, where the noise of all steps comes from.
      expected_batch_size: what the noisy sum is divided by; 1 returns the noisy sum.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `DPNoiseState`. `update` takes one
      array a parameter, without an example axis; noise is computed in at least float32, the result
      has the sum's dtype.

    Raises:
      ValueError: an argument is out of range; or, from `update`, a sum does not have its
        parameter's shape.
      TypeError: an argument has the wrong type.

    Example:
      >>> import jax, optax, perex
      >>> tx = perex.dp_noise(1.0, 0.0, jax.random.key(0), expected_batch_size=4)
      >>> tx.update({"w": jax.numpy.array([2.0, 6.0])}, tx.init(None))[0]["w"].tolist()
      [0.5, 1.5]
    """
    bound = sensitivity(l2_norm_clip)
    noise_multiplier = nonnegative(noise_multiplier, "noise_multiplier", finite=True)
    _check_batch_size(expected_batch_size)
    _check_noise(bound, noise_multiplier)
    _check_key(key)
    stddev = _stddev(noise_multiplier, bound)

    def init(params):
        del params
        return DPNoiseState(_own(key), jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, **extra_args):
        del extra_args
        paths, leaves, treedef = flatten(updates)
        _check_floating(paths, leaves)
        for path, leaf, parameter in zip(paths, leaves, _like(params, len(leaves)), strict=True):
            if parameter is not None and jnp.shape(parameter) != leaf.shape:
                raise ValueError(
                    f"dp_noise: the sum {path!r} has shape {leaf.shape}, its parameter "
                    f"{jnp.shape(parameter)}. dp_noise takes sums over examples; for per-example "
                    "gradients use dp_clip."
                )
        next_key, noise_key = jax.random.split(state.key)
        sums = [leaf.astype(promote_types(leaf.dtype, jnp.float32)) for leaf in leaves]
        dtypes = [leaf.dtype for leaf in leaves]
        means = _noisy_means(sums, dtypes, stddev, noise_key, expected_batch_size)
        return treedef.unflatten(means), DPNoiseState(next_key, _add(state.step, 1))

    return optax.GradientTransformationExtraArgs(init, update)


def _like(params: Any, count: int) -> Sequence[Any]:
    """Return the parameters in the order of `count` gradients; `count` times None without them."""
    leaves = jax.tree.leaves(params)
    return leaves if len(leaves) == count else [None] * count


def _check_leaves(paths: list[str], leaves: list[Any], params: Any) -> None:
    """Check that the leaves are per-example gradients, and the arrays among them of one batch."""
    if not leaves:
        raise ValueError("dp_clip: there are no gradients, so there is no batch to average over.")
    _check_floating(paths, leaves)
    for path, leaf, parameter in zip(paths, leaves, _like(params, len(leaves)), strict=True):
        if not _norms.is_factored(leaf):
            shape = jnp.shape(parameter) if parameter is not None else leaf.shape[1:]
            if leaf.ndim == 0 or leaf.shape[1:] != shape:
                expected = f"[B, *{list(shape)}]" if parameter is not None else "[B, ...]"
                raise ValueError(
                    f"dp_clip: the gradient {path!r} has shape {leaf.shape}, not {expected}. "
                    "dp_clip takes per-example gradients, with the example axis in front, as "
                    "perex.grad returns them."
                )
    arrays = [
        (path, leaf.shape[0])
        for path, leaf in zip(paths, leaves, strict=True)
        if not _norms.is_factored(leaf)
    ]
    if arrays:
        _check_sizes(*zip(*arrays, strict=True))


def _check_sizes(paths: Sequence[str], sizes: Sequence[int]) -> None:
    """Check that gradients are of one batch."""
    for path, size in zip(paths, sizes, strict=True):
        if size != sizes[0]:
            raise ValueError(
                f"dp_clip: the gradient {path!r} has {size} examples, but {paths[0]!r} has "
                f"{sizes[0]}. All leaves must be of one batch."
            )


def _noisy_means(
    sums: list[jax.Array], dtypes: list[Any], stddev: float, key: jax.Array, divisor: float
) -> list[jax.Array]:
    """Add independent noise to each sum (at least float32), divide, and cast to `dtypes`."""
    keys = jax.random.split(key, len(sums))
    means = []
    for total, dtype, leaf_key in zip(sums, dtypes, keys, strict=True):
        if stddev > 0:
            noise = jax.random.normal(leaf_key, total.shape, total.dtype)
            # jax.random splits unit variance over both parts of a complex number, which are two
            # coordinates here.
            total = total + noise * (stddev * (math.sqrt(2) if jnp.iscomplexobj(total) else 1))
        means.append((total / divisor).astype(dtype))
    return means


def _stddev(noise_multiplier: float, bound: float) -> float:
    """Return the noise's standard deviation: zero without noise, even if nothing is clipped."""
    return noise_multiplier * bound if noise_multiplier > 0 else 0.0


def _add(total: jax.Array, more: Any) -> jax.Array:
    """Add counts, and stay at the largest int32 rather than wrap around."""
    return total + jnp.minimum(more, jnp.iinfo(jnp.int32).max - total)


def _own(key: jax.Array) -> jax.Array:
    """Copy a key, so that donating the state does not delete the key that `init` needs again."""
    return jnp.array(key, copy=True)


def _check_floating(paths: list[str], leaves: list[Any]) -> None:
    for path, leaf in zip(paths, leaves, strict=True):
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise TypeError(f"The gradient {path!r} is {kind}; it must be a floating-point array.")


def _check_batch_size(expected_batch_size: float) -> None:
    nonnegative(expected_batch_size, "expected_batch_size", positive=True, finite=True)


def _check_noise(bound: float, noise_multiplier: float) -> None:
    if math.isinf(bound) and noise_multiplier > 0:
        raise ValueError(
            "An infinite l2_norm_clip bounds nothing, so no amount of noise gives privacy. Give a "
            "finite clip norm, or noise_multiplier=0 for training without privacy."
        )


def _check_key(key: Any) -> None:
    dtype = getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and key.ndim == 0
    # Keys of the old kind, from jax.random.PRNGKey, are vectors of uint32.
    if not typed and not (dtype == jnp.uint32 and key.ndim == 1):
        raise TypeError(f"key must be a key, such as jax.random.key(0); got {key!r}.")


def _check_padding(is_padding: Any, size: int, expected_batch_size: float | None) -> None:
    if is_padding is None:
        return
    kind = getattr(is_padding, "dtype", type(is_padding).__name__)
    shape = getattr(is_padding, "shape", None)
    if kind != jnp.bool_ or shape != (size,):
        raise ValueError(
            f"is_padding must be bool of shape ({size},); got {kind} of shape {shape}."
        )
    if expected_batch_size is None:
        raise ValueError(
            "dp_clip: is_padding needs expected_batch_size. Dividing by B would scale the step by "
            "the padding, and the number of real examples is private: a mean over it has another "
            "sensitivity than the noise is made for. Give the sampling probability times the size "
            "of the data set."
        )
