"""`PerExample`: the per-example gradient of one parameter, as factors.

The gradient of an example at a site is a bilinear function of the site's input and of the cotangent
of its result. Keeping these two, one can have the gradients, only their norms, or a weighted sum
over examples, without ever holding one gradient for each example.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from perex._evaluate import Factors
from perex._preparation import Preparation
from perex._rules import per_example

# A streamed norm or sum holds about this many bytes of per-example gradients at a time.
_STREAM_BYTES = 1 << 25


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("factors", "values"),
    meta_fields=("preparation",),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """One use of a parameter at a site, for a batch of examples.

    Attributes:
      factors: the site's inputs and the cotangent of its result, ``[B, *scans, ...]``.
      values: what the preparation needs, without an example axis.
      preparation: the way from the leaf to the site.
    """

    factors: Factors
    values: tuple[Any, ...]
    preparation: Preparation

    def operand_gradient(self) -> jax.Array:
        """Returns the gradient of the site's operand, ``[B, *stacked scans, *operand]``."""
        return self._by_step(per_example, 1)

    def pull_back(self, gradient: jax.Array) -> jax.Array:
        """Returns the gradient of the leaf ``[B, *leaf]`` from that of the operand."""
        return jax.vmap(lambda g: self.preparation.pull_back(self.values, g))(gradient)

    def square_norms(self) -> jax.Array | None:
        """Returns the squared norms ``[B]``, or None where only the gradients tell."""
        if not (self.preparation.isometric and self._offers("square_norm")):
            return None
        norms = self._by_step(lambda rule, *arguments: rule.square_norm(*arguments), 1)
        return norms.reshape(norms.shape[0], -1).sum(-1)

    def weighted_sum(self, weights: jax.Array) -> jax.Array | None:
        """Returns the sum of weight times gradient ``[*leaf]``, or None if the rule offers none."""
        if not self._offers("weighted_sum"):
            return None
        total = self._by_step(lambda rule, *arguments: rule.weighted_sum(*arguments, weights), 0)
        operand = self.preparation.use.site.parameter.dtype
        if self.preparation.is_identity:
            return total
        return self.preparation.pull_back(self.values, total.astype(operand))

    def _offers(self, method: str) -> bool:
        use = self.preparation.use
        repeated = any(not stacked for _, stacked in use.stack)
        return hasattr(use.rule, method) and (not repeated or hasattr(use.rule, "merge_repeats"))

    def _by_step(self, function: Callable[..., jax.Array], axis: int) -> jax.Array:
        """Calls ``function(rule, site, inputs, cotangent)``, once for each operand.

        Steps of a scan that share one operand are merged into one use; where the operand differs
        from step to step, the results are stacked along ``axis``.
        """
        use = self.preparation.use
        stacked = [i for i, (_, is_stacked) in enumerate(use.stack) if is_stacked]
        shared = [i for i, (_, is_stacked) in enumerate(use.stack) if not is_stacked]
        lengths = [use.stack[i][0] for i in stacked]

        def arrange(x: jax.Array) -> jax.Array:
            order = [0, *(i + 1 for i in stacked), *(i + 1 for i in shared)]
            x = jnp.transpose(x, (*order, *range(len(order), x.ndim)))
            repeats = [math.prod(use.stack[i][0] for i in shared)] if shared else []
            flat = [math.prod(lengths)] if stacked else []
            return x.reshape(x.shape[0], *flat, *repeats, *x.shape[len(order) :])

        def one(factors: Factors) -> jax.Array:
            if shared and hasattr(use.rule, "merge_repeats"):
                return function(use.rule, *use.rule.merge_repeats(use.site, *factors))
            if shared:
                each = jax.vmap(partial(function, use.rule, use.site), in_axes=1)
                return each(*factors).sum(0)
            return function(use.rule, use.site, *factors)

        factors = jax.tree.map(arrange, self.factors)
        if not stacked:
            return one(factors)
        result = jax.vmap(one, in_axes=1, out_axes=axis)(factors)
        return result.reshape(*result.shape[:axis], *lengths, *result.shape[axis + 1 :])


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("uses", "dense"),
    meta_fields=("batch_size", "leaf_shape", "leaf_dtype"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class PerExample:
    """Stands for an array ``[B, *shape]`` of per-example gradients without holding it.

    A pytree of arrays: it crosses ``jit``, ``vmap`` (which puts further axes in front) and
    ``jax.tree.map``. ``jnp.asarray`` materialises it.

    Attributes:
      uses: the uses of the parameter at sites.
      dense: the per-example gradient through all other uses ``[B, *shape]``, or None.
      batch_size: B.
      leaf_shape: the parameter's shape.
      leaf_dtype: the parameter's dtype.
    """

    uses: tuple[Use, ...]
    dense: Any
    batch_size: int
    leaf_shape: tuple[int, ...]
    leaf_dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that this stands for, ``[B, *shape]``."""
        return (*self._outer_shape(), self.batch_size, *self.leaf_shape)

    @property
    def ndim(self) -> int:
        """The number of axes of the array that this stands for."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the array that this stands for, that of the parameter."""
        return self.leaf_dtype

    def _outer_shape(self) -> tuple[int, ...]:
        if self.dense is not None:
            return tuple(self.dense.shape[: self.dense.ndim - 1 - len(self.leaf_shape)])
        if self.uses:
            use = self.uses[0].preparation.use
            cotangent = self.uses[0].factors.cotangent
            inner = 1 + len(use.stack) + len(use.site.out.shape)
            return tuple(cotangent.shape[: cotangent.ndim - inner])
        return ()

    def materialize(self) -> jax.Array:
        """Returns the per-example gradients, ``[B, *shape]``."""
        if self._outer_shape():
            return jax.vmap(PerExample.materialize)(self)
        return self._sum([u.pull_back(u.operand_gradient()) for u in self.uses])

    def _sum(self, gradients: list[jax.Array]) -> jax.Array:
        terms = [*gradients, *([] if self.dense is None else [self.dense])]
        if not terms:
            return jnp.zeros((self.batch_size, *self.leaf_shape), self.leaf_dtype)
        return sum(terms[1:], terms[0]).astype(self.leaf_dtype)

    def square_norms(self) -> jax.Array:
        """Returns the squared L2 norm of each example's gradient, ``[B]``, at least float32."""
        if self._outer_shape():
            return jax.vmap(PerExample.square_norms)(self)
        if len(self.uses) == 1 and self.dense is None:
            norms = self.uses[0].square_norms()
            if norms is not None:
                return norms
        if not self.uses:
            return _square_norms(self._sum([]))
        return self._in_chunks(lambda chunk, _: _square_norms(chunk.materialize()), None)

    def weighted_sum(self, weights: jax.Array) -> jax.Array:
        """Returns the sum over examples of weight times gradient.

        Args:
          weights: ``[B]``, one for each example.

        Returns:
          An array of the parameter's shape, at least float32.
        """
        if self._outer_shape():
            return jax.vmap(PerExample.weighted_sum)(self, weights)
        dtype = jnp.promote_types(self.leaf_dtype, jnp.float32)
        total = jnp.zeros(self.leaf_shape, dtype)
        if self.dense is not None:
            total += jnp.tensordot(weights.astype(dtype), self.dense.astype(dtype), 1)
        for use in self.uses:
            term = use.weighted_sum(weights)
            if term is None:
                alone = dataclasses.replace(self, uses=(use,), dense=None)
                term = alone._in_chunks(
                    lambda chunk, w: jnp.tensordot(w, chunk.materialize().astype(dtype), 1)[None],
                    weights.astype(dtype),
                ).sum(0)
            total += term.astype(dtype)
        return total

    def _in_chunks(
        self, function: Callable[..., jax.Array], weights: jax.Array | None
    ) -> jax.Array:
        """Concatenates ``function(chunk, weights)`` over chunks of examples.

        The batch is cut along the second axis of a (chunk, steps) reshape, so that a batch sharded
        over devices is not gathered. What is padded has zero factors, so zero gradients.
        """
        size = math.prod(self.leaf_shape) * jnp.dtype(self.leaf_dtype).itemsize
        chunk = max(1, min(self.batch_size, _STREAM_BYTES // max(1, size)))
        steps = -(-self.batch_size // chunk)
        batched = ([use.factors for use in self.uses], self.dense, weights)
        if steps <= 1:
            return function(self, weights)

        def cut(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, [(0, chunk * steps - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
            return jnp.moveaxis(x.reshape(chunk, steps, *x.shape[1:]), 1, 0)

        def one(batched: Any) -> jax.Array:
            factors, dense, weights = batched
            uses = tuple(
                dataclasses.replace(u, factors=f) for u, f in zip(self.uses, factors, strict=True)
            )
            part = dataclasses.replace(self, uses=uses, dense=dense, batch_size=chunk)
            return function(part, weights)

        results = jax.lax.map(one, jax.tree.map(cut, batched))
        if weights is not None:
            return results.reshape(-1, *results.shape[2:])
        return jnp.moveaxis(results, 0, 1).reshape(-1)[: self.batch_size]

    def __jax_array__(self) -> jax.Array:
        return self.materialize()

    def __repr__(self) -> str:
        names = ", ".join(
            f"{u.preparation.use.site.primitive} at {u.preparation.use.site.location}"
            for u in self.uses
        )
        dense = "" if self.dense is None else " + dense"
        return f"PerExample(shape={self.shape}, dtype={jnp.dtype(self.dtype)}, [{names}]{dense})"


def _square_norms(gradients: jax.Array) -> jax.Array:
    gradients = gradients.astype(jnp.promote_types(gradients.dtype, jnp.float32))
    return jnp.sum(jnp.square(jnp.abs(gradients)), axis=tuple(range(1, gradients.ndim)))


def materialize_all(leaves: list[PerExample]) -> list[jax.Array]:
    """Materialises several leaves; one operand's gradient is computed once for all its leaves."""
    operand_gradients: dict[int, jax.Array] = {}
    results = []
    for leaf in leaves:
        gradients = []
        for use in leaf.uses:
            key = id(use.factors)
            if key not in operand_gradients:
                operand_gradients[key] = use.operand_gradient()
            gradients.append(use.pull_back(operand_gradients[key]))
        results.append(leaf._sum(gradients))
    return results
