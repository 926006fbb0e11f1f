"""What a rule is, and which primitive has one.

A *site* is an equation in which an operand computed from parameters alone meets operands that
depend on the example, and which is linear in the parameter operand. A *rule* knows the gradient
with respect to that operand for a whole batch of examples at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """Where a parameter meets the example.

    Attributes:
      primitive: the JAX primitive of the equation.
      params: the equation's parameters.
      argument: which operand is the parameter.
      operands: shape and dtype of every operand, for one example, in the equation's order.
      out: shape and dtype of the result, for one example.
      options: the transform's options; ``options["conv"]`` names the convolution algorithm.
      location: the user's source line, for messages.
      mask: for a masked convolution, how it is evaluated exactly (`perex._masks.MaskPlan`).
    """

    primitive: Any
    params: Mapping[str, Any]
    argument: int
    operands: tuple[jax.ShapeDtypeStruct, ...]
    out: jax.ShapeDtypeStruct
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    location: str = ""
    mask: Any = None

    @property
    def parameter(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the parameter operand."""
        return self.operands[self.argument]

    @property
    def inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the other operands, in order."""
        return self.operands[: self.argument] + self.operands[self.argument + 1 :]

    def apply(self, inputs: tuple[Any, ...], parameter: Any) -> Any:
        """Evaluates the equation for one example.

        Args:
          inputs: the other operands, in order.
          parameter: the operand that is the parameter.

        Returns:
          The result, of the shape and dtype of ``out``.
        """
        if self.mask is not None:
            return self.mask.convolve(*inputs, parameter)
        operands = (*inputs[: self.argument], parameter, *inputs[self.argument :])
        return self.primitive.bind(*operands, **self.params)

    def _key(self) -> tuple[Any, ...]:
        shapes = tuple((x.shape, str(x.dtype)) for x in (*self.operands, self.out))
        return (self.primitive, self.argument, shapes, self.mask)

    def __hash__(self) -> int:
        return hash((self.primitive, self.argument, self.operands, self.out))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Site)
            and self._key() == other._key()
            and same_params(self.params, other.params)
            and same_params(self.options, other.options)
        )


def same_params(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether two equations' parameters are equal beyond doubt; jaxprs are so only if identical."""
    if left.keys() != right.keys():
        return False
    for key, value in left.items():
        other = right[key]
        if value is not other and not (type(value) is type(other) and _equal(value, other)):
            return False
    return True


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except ValueError:  # The comparison of arrays has no truth value.
        return False


@runtime_checkable
class Rule(Protocol):
    """A per-example rule of a primitive.

    Only ``per_example`` is required. A rule may also offer

    * ``covers(site) -> str | None``: None where the rule applies, else the reason why not;
    * ``square_norm(site, inputs, cotangent) -> [B]``: squared L2 norms, at least float32, where
      they are cheaper than the gradients;
    * ``scaled_norm(site, inputs, cotangent) -> (scale [B], squares [B])``: norms as ``scale *
      sqrt(squares)``, the scale a power of two, where squares can leave their range on the way;
      without it the cotangent is scaled before ``square_norm`` is called;
    * ``outer_form(site, inputs, cotangent) -> ((u, axes), (v, axes))`` or None: the gradient as
      ``sum_t u[t] v[t]^T``, each factor ``[B, T, N]`` over some axes of the parameter in this
      order, or integer ``[B, T]``, which stands for unit vectors; for norms of tied parameters;
    * ``weighted_sum(site, inputs, cotangent, weights) -> parameter.shape``: the sum over examples
      of ``weights[b]`` times the gradient, at least float32;
    * ``merge_repeats(site, inputs, cotangent) -> (site, inputs, cotangent)``: folds an axis of
      repeated uses, second of every array, into one use;
    * ``estimate(site, batch_size) -> {"keep": s, "gram": s, "stream": s}``: estimated seconds;
    * ``describe(site, batch_size) -> str``: a word on the algorithm, for `perex.explain`;
    * ``check_options(options)``: raises where the options of a transform make no sense.
    """

    def per_example(
        self, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> jax.Array:
        """Returns the gradient ``[B, *site.parameter.shape]``.

        Args:
          site: the equation.
          inputs: the other operands, each with the example axis in front.
          cotangent: the cotangent of the result, ``[B, *site.out.shape]``.
        """
        ...


@dataclasses.dataclass(frozen=True)
class _Function:
    """A rule given as a plain function."""

    per_example: Callable[..., jax.Array]


_RULES: dict[Any, Any] = {}


def register_rule(primitive: Any, rule: Any) -> None:
    """Registers a per-example rule for a primitive.

    The primitive must be linear in the operand that is the parameter; ``site.argument`` tells the
    rule which one it is. A rule for a primitive that has one already replaces it.

    Args:
      primitive: a JAX primitive (``jax.extend.core.Primitive``).
      rule: a function ``(site, inputs, cotangent) -> [B, *site.parameter.shape]``, or an object
        with that method under the name ``per_example`` and, optionally, the others listed at
        `perex.Rule`.

    Raises:
      TypeError: ``primitive`` is not a primitive, or ``rule`` is neither callable nor has a
        callable ``per_example``.
    """
    if not hasattr(primitive, "bind") or not hasattr(primitive, "multiple_results"):
        raise TypeError(
            f"perex.register_rule: primitive must be a JAX primitive, got {primitive!r}."
        )
    if primitive.multiple_results:
        raise TypeError(
            f"perex.register_rule: {primitive} returns several results; only primitives with one "
            "result can be sites. Write a primitive for each result, or leave it to the fallback."
        )
    if not callable(getattr(rule, "per_example", None)):
        if not callable(rule):
            raise TypeError(
                "perex.register_rule: rule must be a function (site, inputs, cotangent) -> "
                f"[B, *parameter.shape] or an object with a method per_example, got {rule!r}."
            )
        function: Any = rule
        rule = _Function(function)
    _RULES[primitive] = rule


def check_options(options: Mapping[str, Any]) -> None:
    """Lets every rule with a ``check_options`` raise where a transform's options are wrong."""
    for rule in _RULES.values():
        if hasattr(rule, "check_options"):
            rule.check_options(options)


def find_rule(primitive: Any) -> Any | None:
    """Returns the rule registered for a primitive, or None."""
    return _RULES.get(primitive)


def per_example(
    rule: Any, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
) -> jax.Array:
    """Calls the rule and checks the shape and dtype of what it returns.

    Raises:
      ValueError: the result has the wrong shape; the message names primitive and source line.
    """
    result = rule.per_example(site, inputs, cotangent)
    expected = (cotangent.shape[0], *site.parameter.shape)
    if jnp.shape(result) != expected:
        raise ValueError(
            f"perex: the per-example rule of primitive '{site.primitive}' returned shape "
            f"{jnp.shape(result)}, expected {expected} (example axis, then the shape of operand "
            f"{site.argument}), for the equation at {site.location}. Correct the rule given to "
            "perex.register_rule."
        )
    result = result.astype(site.parameter.dtype)
    return result if site.mask is None else site.mask.zero_masked(result)


def weighted_sum(
    rule: Any,
    site: Site,
    inputs: tuple[jax.Array, ...],
    cotangent: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    """Calls the rule's ``weighted_sum``; masked entries of the sum are exactly zero."""
    result = rule.weighted_sum(site, inputs, cotangent, weights)
    return result if site.mask is None else site.mask.zero_masked(result)
