"""The transforms' signatures, argument checks and example axes."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from perex._per_example import materialize_all, simplify
from perex._rules import check_options
from perex._transform import Problem, sweep


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that all transforms share, checked.

    Attributes:
      name: the transform, for messages.
      fun: the loss of one example.
      argnums: an int or a tuple of ints, as given.
      has_aux: whether the loss returns ``(value, aux)``.
      in_axes: as in `jax.vmap`, or None for the default.
      keep_batch_dim: whether an example keeps an axis of length one.
      rules: options handed to the rules.
    """

    name: str
    fun: Callable[..., Any]
    argnums: int | tuple[int, ...]
    has_aux: bool
    in_axes: Any
    keep_batch_dim: bool
    rules: dict[str, Any]

    @classmethod
    def check(
        cls,
        name: str,
        fun: Callable[..., Any],
        argnums: int | Sequence[int],
        has_aux: bool,
        in_axes: Any,
        keep_batch_dim: bool,
        **rules: Any,
    ) -> Options:
        """Checks what can be checked before the arguments are known."""
        if not callable(fun):
            raise TypeError(f"{name}: fun must be callable, got {fun!r}.")
        if isinstance(argnums, bool) or not isinstance(argnums, int):
            try:
                argnums = tuple(operator.index(i) for i in argnums)  # type: ignore[union-attr]
            except (TypeError, ValueError):
                raise TypeError(
                    f"{name}: argnums must be an int or a sequence of ints, got {argnums!r}."
                ) from None
            if not argnums:
                raise ValueError(f"{name}: argnums is empty; name at least one argument.")
        if in_axes is not None and not isinstance(in_axes, (int, tuple, list)):
            raise TypeError(
                f"{name}: in_axes must be None, an int or a sequence with an entry for each "
                f"positional argument (as in jax.vmap), got {in_axes!r}."
            )
        check_options(rules)
        return cls(name, fun, argnums, has_aux, in_axes, keep_batch_dim, rules)

    def problem(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Problem:
        """Binds the arguments: which leaves are parameters, and where the example axes are."""
        chosen = self._chosen(len(args))
        axes = self._axes(args, chosen)
        flat, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
        leaves = tuple(leaf for _, leaf in flat)
        paths = [path for path, _ in flat]
        parameters = tuple(
            path[0].idx == 0 and path[1].idx in chosen  # type: ignore[attr-defined]
            for path in paths
        )
        for path, leaf, is_parameter in zip(paths, leaves, parameters, strict=True):
            self._check_leaf(path, leaf, is_parameter)
        batch_size = self._batch_size(paths, leaves, axes)
        return Problem(
            self.fun,
            treedef,
            leaves,
            tuple(axes),
            parameters,
            batch_size,
            self.has_aux,
            self.keep_batch_dim,
            self.rules,
            self.name,
            tuple(argument_name(path) for path in paths),
        )

    def _chosen(self, count: int) -> list[int]:
        argnums = (self.argnums,) if isinstance(self.argnums, int) else self.argnums
        chosen = []
        for argnum in argnums:
            if not -count <= argnum < count:
                raise TypeError(
                    f"{self.name}: argnums names argument {argnum}, but the loss was called with "
                    f"{count} positional argument(s)."
                )
            chosen.append(argnum % count)
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"{self.name}: argnums {self.argnums} names an argument twice.")
        return chosen

    def _axes(self, args: tuple[Any, ...], chosen: Sequence[int]) -> list[int | None]:
        """Returns the example axis of each leaf of the positional arguments."""
        in_axes: Any
        if self.in_axes is None:
            in_axes = [None if i in chosen else 0 for i in range(len(args))]
        elif isinstance(self.in_axes, int):
            in_axes = [self.in_axes] * len(args)
        else:
            in_axes = list(self.in_axes)
        if len(in_axes) != len(args):
            raise ValueError(
                f"{self.name}: in_axes has {len(in_axes)} entries, but the loss was called with "
                f"{len(args)} positional arguments."
            )
        axes: list[int | None] = []
        for position, (axis, argument) in enumerate(zip(in_axes, args, strict=True)):
            # None is an axis in in_axes, but no leaf of an argument.
            prefixes, structure = jax.tree.flatten(axis, is_leaf=lambda x: x is None)
            try:
                subtrees = structure.flatten_up_to(argument)
            except ValueError as error:
                raise ValueError(
                    f"{self.name}: in_axes[{position}] = {axis!r} is not a prefix of the structure "
                    f"of argument {position}: {error}"
                ) from None
            for prefix, subtree in zip(prefixes, subtrees, strict=True):
                if prefix is not None and (isinstance(prefix, bool) or not isinstance(prefix, int)):
                    raise TypeError(
                        f"{self.name}: in_axes[{position}] must hold ints or None, got {prefix!r}."
                    )
                axes.extend([prefix] * jax.tree.structure(subtree).num_leaves)
        return axes

    def _check_leaf(self, path: Any, leaf: Any, is_parameter: bool) -> None:
        where = argument_name(path)
        try:
            dtype = jax.typeof(leaf).dtype
        except TypeError:
            raise TypeError(
                f"{self.name}: {where} is no array but {type(leaf).__name__}. Close over what is "
                "not an array, or register its type as a pytree."
            ) from None
        if not is_parameter:
            return
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"{self.name}: {where} is differentiated and must be floating-point (or "
                f"complex), but has dtype {dtype}. Leave it out of argnums, or cast it."
            )

    def _batch_size(
        self, paths: Sequence[Any], leaves: Sequence[Any], axes: list[int | None]
    ) -> int:
        axes.extend([None] * (len(leaves) - len(axes)))  # keyword arguments are shared
        sizes: dict[int, str] = {}
        for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
            axis = axes[i]
            if axis is None:
                continue
            shape, where = jnp.shape(leaf), argument_name(path)
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"{self.name}: {where} has shape {shape} and so no axis {axis} for the "
                    "examples. Give it one, or share it among examples with in_axes=None there."
                )
            axes[i] = axis % len(shape)
            sizes.setdefault(shape[axis], where)
        if not sizes:
            raise ValueError(
                f"{self.name}: no argument carries an example axis. Pass the batch as a positional "
                "argument that is not in argnums, or set in_axes; keyword arguments are shared."
            )
        if len(sizes) > 1:
            told = ", ".join(f"{where} has {size}" for size, where in sizes.items())
            raise ValueError(
                f"{self.name}: the arguments disagree about the number of examples: {told}. Every "
                "argument outside argnums needs the same example axis; share an argument among "
                "examples with in_axes=None there, or as a keyword argument."
            )
        return next(iter(sizes))

    def by_argument(self, args: tuple[Any, ...], gradients: Sequence[Any]) -> Any:
        """Arranges one result for each parameter leaf like the arguments in ``argnums``."""
        chosen = self._chosen(len(args))
        remaining = iter(gradients)
        trees = {}
        for position in sorted(chosen):
            treedef = jax.tree.structure(args[position])
            trees[position] = treedef.unflatten(
                [next(remaining) for _ in range(treedef.num_leaves)]
            )
        if isinstance(self.argnums, int):
            return trees[chosen[0]]
        return tuple(trees[position] for position in chosen)


def argument_name(path: Any) -> str:
    """Returns how a message names a leaf of ``(args, kwargs)``."""
    rest = jax.tree_util.keystr(path[2:])
    if path[0].idx == 0:
        return f"argument {path[1].idx}{' at ' + rest if rest else ''}"
    return f"keyword argument '{path[1].key}'{' at ' + rest if rest else ''}"


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    in_axes: Any = None,
    keep_batch_dim: bool = False,
    conv: Any = "auto",
    factored: bool = False,
) -> Callable[..., Any]:
    """Returns a function that computes each example's loss and gradient.

    A replacement for ``jax.vmap(jax.value_and_grad(fun, argnums, has_aux), in_axes=...)``, with the
    same structure, shapes and dtypes.

    Args:
      fun: the loss of one example, ``fun(*args, **kwargs)``, returning a real scalar, or
        ``(scalar, aux)`` with ``has_aux``.
      argnums: which positional arguments to differentiate with respect to, an int or a sequence of
        ints. They are shared by all examples.
      has_aux: whether ``fun`` returns a pair of value and auxiliary data.
      in_axes: as in `jax.vmap`: an int, or a sequence with an int, None or a pytree prefix of these
        for each positional argument. By default arguments in ``argnums`` are shared and the others
        carry the example axis in front. Keyword arguments are always shared.
      keep_batch_dim: hand each example over with its axis kept, of length one.
      conv: how per-example kernel gradients of convolutions are computed: ``"auto"``, the name of
        an algorithm, an algorithm, or a function from the convolution's description to a name.
      factored: return a `perex.PerExample` in place of each array that would be costly to hold.

    Returns:
      A function with the arguments of ``fun`` (batched) that returns ``(value, gradient)``, or
      ``((value, aux), gradient)`` with ``has_aux``: value ``[B]`` in the loss's dtype, aux with the
      example axis in front, and for each parameter leaf ``[B, *leaf.shape]`` in the leaf's dtype.
      The gradient of a complex leaf follows the convention of `jax.grad`.

    Raises:
      TypeError: ``fun`` does not return a real scalar; an argument in ``argnums`` is of integers;
        an argument is no array.
      ValueError: the example axes disagree or are missing; ``conv`` names no algorithm.

    Example:
      >>> import jax.numpy as jnp, perex
      >>> loss = lambda w, x: jnp.sum((w @ x) ** 2)
      >>> values, grads = perex.value_and_grad(loss)(jnp.ones((2, 3)), jnp.ones((4, 3)))
      >>> values.shape, grads.shape
      ((4,), (4, 2, 3))
    """
    options = Options.check(
        "perex.value_and_grad", fun, argnums, has_aux, in_axes, keep_batch_dim, conv=conv
    )
    return _differentiate(options, factored)


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    in_axes: Any = None,
    keep_batch_dim: bool = False,
    conv: Any = "auto",
    factored: bool = False,
) -> Callable[..., Any]:
    """Returns a function that computes the gradient of each example's loss.

    A replacement for ``jax.vmap(jax.grad(fun, argnums, has_aux), in_axes=(None, 0, ...))``, with
    the same structure, shapes and dtypes, exact, and much faster where parameters meet the example
    in convolutions.

    Args:
      fun: see `perex.value_and_grad`.
      argnums: see `perex.value_and_grad`.
      has_aux: see `perex.value_and_grad`.
      in_axes: see `perex.value_and_grad`.
      keep_batch_dim: see `perex.value_and_grad`.
      conv: see `perex.value_and_grad`.
      factored: see `perex.value_and_grad`.

    Returns:
      A function with the arguments of ``fun`` (batched) that returns the gradient: for each
      parameter leaf ``[B, *leaf.shape]`` in the leaf's dtype; with ``has_aux`` the pair
      ``(gradient, aux)``.

    Raises:
      TypeError: see `perex.value_and_grad`.
      ValueError: see `perex.value_and_grad`.

    Example:
      >>> import jax.numpy as jnp, perex
      >>> loss = lambda params, x, y: (params["w"] @ x + params["b"] - y) ** 2
      >>> params = {"w": jnp.ones(3), "b": 0.0}
      >>> grads = perex.grad(loss)(params, jnp.ones((5, 3)), jnp.zeros(5))
      >>> grads["w"].shape, grads["b"].shape
      ((5, 3), (5,))
    """
    options = Options.check("perex.grad", fun, argnums, has_aux, in_axes, keep_batch_dim, conv=conv)
    differentiate = _differentiate(options, factored)

    @signature_of(fun)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = differentiate(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


def _differentiate(options: Options, factored: bool) -> Callable[..., Any]:
    @signature_of(options.fun)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        result = sweep(options.problem(args, kwargs))
        gradients = (simplify if factored else materialize_all)(result.gradients)
        tree = options.by_argument(args, gradients)
        return ((result.values, result.aux) if options.has_aux else result.values), tree

    return value_and_gradient


def signature_of(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a transformed function the name and docstring of the original, where it has them."""

    def decorate(transformed: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isfunction(fun) or inspect.ismethod(fun):
            return wraps(fun)(transformed)
        return transformed

    return decorate
