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

from perex._rules import outer_product
from perex._rules.certified import CertifiedNorms, settle, sum_slack
from perex._rules.chunks import cache_chunk, map_chunks, sum_chunks
from perex._rules.scales import ScaledNorms, combine_scales, divide, unit_scale


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
      they are cheaper than the gradients; the cotangent is scaled so that squares are in range;
    * ``magnitudes(site, inputs, cotangent) -> [B]`` and ``longest_sum(site) -> int``: for the
      certificate (`perex._rules.certified`), the sum of the norms of the terms that add up to the
      gradient, and how many of these can meet in one of its entries; without them a rule's
      ``square_norm`` and ``weighted_sum`` are taken to be those of the very same gradients;
    * ``gram_norms(site, inputs, cotangent) -> CertifiedNorms`` in place of ``square_norm``, for
      norms with bounds of their own;
    * ``stream_norms(site, inputs, cotangent) -> CertifiedNorms`` and ``stream_sum(site, inputs,
      cotangent, weights) -> parameter.shape``: norms and weighted sum of gradients that are
      computed a few at a time, both of the very same numbers;
    * ``outer_form(site, inputs, cotangent) -> ((u, axes), (v, axes))`` or None: the gradient as
      ``sum_t u[t] v[t]^T``, each factor ``[B, T, N]`` over some axes of the parameter in this
      order, or integer ``[B, T]``, which stands for unit vectors; for norms of tied parameters;
    * ``weighted_sum(site, inputs, cotangent, weights) -> parameter.shape``: the sum over examples
      of ``weights[b]`` times the gradient, at least float32;
    * ``merge_repeats(site, inputs, cotangent) -> (site, inputs, cotangent)``: folds an axis of
      repeated uses, second of every array, into one use;
    * ``estimate(site, batch_size) -> {"keep": s, "gram": s, "stream": s}``: estimated seconds;
    * ``pays(site, leaf_size) -> bool``: whether a use is worth a site, for the largest leaf that
      the operand is computed from; else it goes the plain way;
    * ``reads_inputs = False``: the rule needs no more than the cotangent, and gets no inputs;
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
    rule: Any,
    site: Site,
    inputs: tuple[jax.Array, ...],
    cotangent: jax.Array,
    wide: bool = False,
) -> jax.Array:
    """Calls the rule and checks the shape of what it returns.

    Args:
      rule: the site's rule.
      site: the equation.
      inputs: the other operands, each with the example axis in front.
      cotangent: the cotangent of the result, ``[B, *site.out.shape]``.
      wide: whether to return at least float32; else the operand's dtype.

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
    dtype = site.parameter.dtype
    result = result.astype(outer_product.accumulate_dtype(dtype) if wide else dtype)
    return result if site.mask is None else site.mask.zero_masked(result)


def knows_norms(rule: Any) -> bool:
    """Whether a rule has norms that are cheaper than gradients, and sums that go with them."""
    return hasattr(rule, "weighted_sum") and (
        hasattr(rule, "gram_norms") or hasattr(rule, "square_norm")
    )


def site_norms(
    rule: Any, site: Site, way: str, inputs: tuple[jax.Array, ...], cotangent: jax.Array
) -> CertifiedNorms:
    """Returns the norms ``[B]`` of a site's gradients.

    Args:
      rule: the site's rule.
      site: the equation.
      way: ``"gram"`` for norms without gradients, if the rule `knows_norms`; ``"stream"``.
      inputs: the other operands, each with the example axis in front.
      cotangent: the cotangent of the result, ``[B, *site.out.shape]``.
    """
    if way == "gram":
        if hasattr(rule, "gram_norms"):
            return rule.gram_norms(site, inputs, cotangent)
        return _from_square_norm(rule, site, inputs, cotangent)
    if hasattr(rule, "stream_norms") and site.mask is None:
        return rule.stream_norms(site, inputs, cotangent)
    some = _some(rule, site, len(inputs), outer_product.measure)
    chunk = cache_chunk(cotangent.shape[0], 4 * site.parameter.size)
    return CertifiedNorms.measured(*map_chunks(some, (*inputs, cotangent), chunk).T)


def settled_norms(
    rule: Any, site: Site, way: str, inputs: tuple[jax.Array, ...], cotangent: jax.Array
) -> ScaledNorms:
    """Returns norms as `site_norms` does, measured where inner products cancel."""
    certified = site_norms(rule, site, way, inputs, cotangent)
    if way != "gram" or not hasattr(rule, "gram_norms"):
        return certified.scaled()

    return settle(certified, lambda: site_norms(rule, site, "stream", inputs, cotangent))


def site_sum(
    rule: Any,
    site: Site,
    way: str,
    inputs: tuple[jax.Array, ...],
    cotangent: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    """Returns the sum ``[*parameter.shape]`` of weight times gradient that goes with `site_norms`.

    Masked entries of the sum are exactly zero, and so is what an example of weight zero adds.
    """
    if way == "gram":
        result = rule.weighted_sum(site, inputs, cotangent, weights)
    elif hasattr(rule, "stream_sum"):
        result = rule.stream_sum(site, inputs, cotangent, weights)
    else:
        some = _some(rule, site, len(inputs), outer_product.sum_measured)
        chunk = cache_chunk(cotangent.shape[0], 4 * site.parameter.size)
        result = sum_chunks(some, (*inputs, cotangent, weights), chunk)
    return result if site.mask is None else site.mask.zero_masked(result)


def _some(
    rule: Any, site: Site, count: int, function: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """Returns a function of a few examples' gradients, as one of ``count`` inputs and more."""

    def some(*arrays: jax.Array) -> jax.Array:
        gradients = per_example(rule, site, arrays[:count], arrays[count])
        return function(gradients, *arrays[count + 1 :])

    return some


def _from_square_norm(
    rule: Any, site: Site, inputs: tuple[jax.Array, ...], cotangent: jax.Array
) -> CertifiedNorms:
    scale, scaled = _scaled(inputs, cotangent)
    squares = rule.square_norm(site, inputs, scaled)
    certified = CertifiedNorms.measured(scale.astype(squares.dtype), squares)
    if not hasattr(rule, "magnitudes"):
        return certified
    magnitude = rule.magnitudes(site, inputs, scaled)
    dtype = outer_product.accumulate_dtype(cotangent.dtype)
    # Twice: the gradient that was measured is rounded, and the one that is summed is too.
    slack = 2 * sum_slack(magnitude, rule.longest_sum(site), dtype, jax.lax.Precision.HIGHEST)
    return certified._replace(slack=slack.astype(squares.dtype))


def _scaled(inputs: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Divides the cotangent so that gradients are around one, and returns the divisor ``[B]``.

    Any rule is linear in the cotangent. For one that is linear in its inputs too, the inputs' scale
    belongs into the divisor; for another it does no harm.
    """
    scale = unit_scale(cotangent)
    cotangent = divide(cotangent, scale, cotangent.dtype)
    for x in inputs:
        # A half-precision cotangent has no room for the inputs' scale, nor can its inputs have one
        # that float32 squares would not bear.
        wide = jnp.finfo(cotangent.dtype).maxexp >= 128
        if wide and jnp.issubdtype(x.dtype, jnp.inexact):
            scale_x = unit_scale(x).astype(scale.dtype)
            cotangent = divide(cotangent, scale_x, cotangent.dtype)
            scale = combine_scales(scale, scale_x)
    return scale, cotangent
