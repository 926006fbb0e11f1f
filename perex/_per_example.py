"""`PerExample`: the per-example gradient of one parameter, as factors.

It holds what a site's gradient is made of instead of the gradient of every example, and offers
what users want of these: themselves, their norms, a weighted sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from perex import _norms, _ways
from perex._compat import promote_types
from perex._norms import KnownNorms, ScaledNorms
from perex._rules.certified import CertifiedNorms, settle
from perex._rules.chunks import cache_chunk, map_chunks, sum_chunks
from perex._rules.outer_product import measure, sum_measured, zero_norms
from perex._tied import adds_by_pairs, norms_by_pairs
from perex._uses import Use

_Puller = Callable[[jax.Array], jax.Array]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("uses", "dense", "extent"),
    meta_fields=("batch_size", "leaf_shape", "leaf_dtype"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class PerExample:
    """Stands for an array ``[B, *shape]`` of per-example gradients without holding it.

    `perex.grad` with ``factored=True`` returns it where the array would be costly. It is a pytree
    of arrays: it crosses ``jit`` (where it can be donated), ``vmap`` (which puts further axes in
    front) and ``jax.tree.map``. ``jnp.asarray`` materialises it, and `perex.dp_clip` takes it.

    Attributes:
      uses: the uses of the parameter at sites.
      dense: the per-example gradient through all other uses ``[B, *shape]``, or None.
      extent: for a gradient that is zero, an array ``[B, 0]``, else None.
      batch_size: B.
      leaf_shape: the parameter's shape.
      leaf_dtype: the parameter's dtype.

    Example:
      >>> import jax.numpy as jnp, perex
      >>> loss = lambda w, x: jnp.sum((x @ w) ** 2)
      >>> x = jnp.ones((8, 1, 256))
      >>> gradient = perex.grad(loss, factored=True)(jnp.ones((256, 256)), x)
      >>> gradient.shape, gradient.square_norms().shape
      ((8, 256, 256), (8,))
      >>> gradient.weighted_sum(jnp.ones(8)).shape
      (256, 256)
    """

    uses: tuple[Use, ...]
    dense: Any
    extent: Any
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
    def size(self) -> int:
        """The number of entries of the array that this stands for."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the array that this stands for, that of the parameter."""
        return jnp.dtype(self.leaf_dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def _outer_shape(self) -> tuple[int, ...]:
        if self.dense is not None:
            return tuple(self.dense.shape[: self.dense.ndim - 1 - len(self.leaf_shape)])
        if self.uses:
            use = self.uses[0].preparation.use
            cotangent = self.uses[0].factors.cotangent
            inner = 1 + len(use.stack) + len(use.site.out.shape)
            return tuple(cotangent.shape[: cotangent.ndim - inner])
        return tuple(self.extent.shape[:-2])

    def materialize(self) -> jax.Array:
        """Returns the per-example gradients, ``[B, *shape]``."""
        if self._outer_shape():
            return jax.vmap(PerExample.materialize)(self)
        return materialize_all([self])[0]

    def way(self) -> _ways.Choice:
        """Returns the way to norms and weighted sums: "keep", "gram" or "stream"."""
        if self._is_zero():
            return _ways.Choice("zero", "no gradient flows to it", None)
        uses = [(use.preparation.use, use.preparation.isometric) for use in self.uses]
        size = math.prod(self.leaf_shape)
        chosen = _ways.choice(uses, self.batch_size, size, self.dense is not None)
        tied = len(self.uses) > 1 or (self.uses and self.uses[0].preparation.is_direction)
        if chosen.way == "gram" and tied and not adds_by_pairs(self.uses):
            return _ways.Choice("stream", "inner products of the uses cost more", chosen.seconds)
        return chosen

    def _is_zero(self) -> bool:
        return not self.uses and self.dense is None

    def scaled_norms(self) -> ScaledNorms:
        """Returns the norms ``[B]`` in parts of which none overflows or underflows."""
        if self._outer_shape():
            return jax.vmap(PerExample.scaled_norms)(self)
        return _norms_of_leaf(self)

    def _streamed_norms(self, at_once: int | None = None) -> CertifiedNorms:
        if self._is_one_site():
            return self.uses[0].norms("stream")
        return CertifiedNorms.measured(*self._in_chunks(measure, at_once=at_once).T)

    def _is_one_site(self) -> bool:
        """Whether the rule of a single site can measure and sum the gradients by itself."""
        if len(self.uses) != 1 or self.dense is not None:
            return False
        use = self.uses[0].preparation.use
        return self.uses[0].preparation.isometric and use.site.mask is None and _ways.merges(use)

    def square_norms(self) -> jax.Array:
        """Returns the squared L2 norm of each example's gradient.

        The square of a norm below 1e-19 or above 1e19 is out of range in float32, and comes out as
        zero or infinite; `perex.grad_norms` and `perex.dp_clip` do not meet this limit.

        Returns:
          ``[B]``, in the parameter's dtype or float32, whichever is wider; never below zero.
        """
        norms = self.scaled_norms()
        return norms.scale * (norms.scale * norms.squares)

    def weighted_sum(self, weights: jax.Array) -> jax.Array:
        """Returns the sum over examples of weight times gradient.

        Args:
          weights: ``[B]``, one for each example. An example of weight zero adds exactly zero, even
            if its gradient holds NaN or Inf.

        Returns:
          An array of the parameter's shape, in its dtype or float32, whichever is wider.
        """
        if self._outer_shape():
            return jax.vmap(PerExample.weighted_sum)(self, weights)
        dtype = promote_types(self.leaf_dtype, jnp.float32)
        weights = jnp.asarray(weights).astype(dtype)
        way = self.way().way
        if way == "zero":
            return jnp.zeros(self.leaf_shape, dtype)
        if way == "keep":
            return _norms.weighted_sum(self.materialize(), weights)
        if way == "stream" and not self._is_one_site():
            return self._in_chunks(sum_measured, weights).astype(dtype)
        terms = [use.weighted_sum(weights, way).astype(dtype) for use in self.uses]
        return sum(terms[1:], terms[0])

    def _in_chunks(
        self,
        function: Callable[..., jax.Array],
        weights: jax.Array | None = None,
        at_once: int | None = None,
    ) -> jax.Array:
        """Calls a function of the gradients of a few examples at a time.

        Args:
          function: from gradients ``[b, *shape]`` to ``[b, ...]``; with weights, from gradients and
            weights to their sum ``[*shape]``.
          weights: ``[B]`` or None.
          at_once: how many examples to take, by default what stays in cache.

        Returns:
          The results joined, or added up if there are weights.
        """
        arrays, treedef = jax.tree.flatten(([use.factors for use in self.uses], self.dense))
        pullers = [use.puller() for use in self.uses]

        def some(*arrays: jax.Array) -> jax.Array:
            factors, dense = treedef.unflatten(arrays[: treedef.num_leaves])
            uses = tuple(
                dataclasses.replace(u, factors=f) for u, f in zip(self.uses, factors, strict=True)
            )
            part = dataclasses.replace(self, uses=uses, dense=dense, batch_size=arrays[0].shape[0])
            (gradients,) = _materialize([part], [pullers])
            return function(gradients, *arrays[treedef.num_leaves :])

        wanted = at_once or _chunk_size(self.uses, math.prod(self.leaf_shape), self.batch_size)
        if weights is None:
            return map_chunks(some, tuple(arrays), wanted)
        return sum_chunks(some, (*arrays, weights), wanted)

    def __jax_array__(self) -> jax.Array:
        return self.materialize()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.materialize(), dtype)

    def __repr__(self) -> str:
        terms = []
        for use in self.uses:
            site = use.preparation.use.site
            operands = [str(list(x.shape)) for x in (*use.factors.inputs, use.factors.cotangent)]
            terms.append(f"{site.primitive} of {' and '.join(operands)} at {site.location}")
        if self.dense is not None:
            terms.append("an array")
        return f"PerExample(shape={self.shape}, dtype={self.dtype}, {' + '.join(terms) or 'zero'})"


# Compiled, as otherwise each call outside of jit would compile its conditional anew.
@jax.jit
def _norms_of_leaf(leaf: PerExample) -> ScaledNorms:
    way = leaf.way().way
    if way == "zero":
        return zero_norms(leaf.batch_size, leaf.leaf_dtype).scaled()
    if way == "keep":
        return _norms.square_norms(leaf.materialize())
    if way == "stream":
        return leaf._streamed_norms().scaled()
    use = leaf.uses[0]
    if len(leaf.uses) > 1 or use.preparation.is_direction:
        certified = norms_by_pairs(leaf.uses)
    else:
        certified = use.norms("gram")
        if not hasattr(use.preparation.use.rule, "gram_norms"):
            return certified.scaled()

    # One example at a time, as the memory of what rarely runs is there all the time.
    return settle(certified, lambda: leaf._streamed_norms(at_once=1))


def _chunk_size(uses: Sequence[Use], size: int, batch_size: int) -> int:
    """Returns how many examples to hold gradients of, for a leaf of ``size`` entries."""
    sizes = [size, *(u.preparation.use.site.parameter.size for u in uses)]
    return cache_chunk(batch_size, 4 * max(sizes))


def materialize_all(leaves: Sequence[PerExample]) -> list[jax.Array]:
    """Materialises several leaves; one operand's gradient is computed once for all its leaves."""
    return _materialize(leaves, [[use.puller() for use in leaf.uses] for leaf in leaves])


def _materialize(
    leaves: Sequence[PerExample], pullers: Sequence[Sequence[_Puller]]
) -> list[jax.Array]:
    """Materialises several leaves, with the puller of each of their uses."""
    shared: dict[int, list[tuple[int, Use, _Puller]]] = {}
    for number, leaf in enumerate(leaves):
        for use, pull in zip(leaf.uses, pullers[number], strict=True):
            shared.setdefault(id(use.factors), []).append((number, use, pull))
    terms: list[list[jax.Array]] = [[] for _ in leaves]
    for members in shared.values():
        numbers, uses, pulls = zip(*members, strict=True)
        for number, gradient in zip(numbers, _leaf_gradients(uses, pulls), strict=True):
            terms[number].append(gradient)
    results = []
    for leaf, gradients in zip(leaves, terms, strict=True):
        if leaf.dense is not None:
            gradients.append(leaf.dense)
        if not gradients:
            gradients.append(jnp.zeros((leaf.batch_size, *leaf.leaf_shape), leaf.leaf_dtype))
        total = sum(gradients[1:], gradients[0])
        # The gradient of a Python number is weakly typed, as it is from jax.grad; a cast is not.
        results.append(total if total.dtype == leaf.dtype else total.astype(leaf.dtype))
    return results


def _leaf_gradients(uses: Sequence[Use], pulls: Sequence[_Puller]) -> list[jax.Array]:
    """Returns the gradients ``[B, *leaf]`` of leaves that are prepared for one site."""
    if all(use.preparation.isometric for use in uses):
        gradient = uses[0].operand_gradient()
        return [jax.vmap(pull)(gradient) for pull in pulls]
    # The operand can be far larger than its leaves (low-rank products), so the gradients of all
    # examples with respect to it must not exist at once.
    arrays, treedef = jax.tree.flatten(uses[0].factors)

    def pulled(*arrays: jax.Array) -> list[jax.Array]:
        factors = treedef.unflatten(arrays)
        gradient = dataclasses.replace(uses[0], factors=factors).operand_gradient()
        return [jax.vmap(pull)(gradient) for pull in pulls]

    structs = jax.eval_shape(pulled, *arrays)
    dtype = promote_types(*(struct.dtype for struct in structs))
    sizes = [math.prod(struct.shape[1:]) for struct in structs]

    def some(*arrays: jax.Array) -> jax.Array:
        gradients = zip(pulled(*arrays), sizes, strict=True)
        flat = [x.reshape(x.shape[0], size).astype(dtype) for x, size in gradients]
        return jnp.concatenate(flat, axis=1)

    joined = map_chunks(some, tuple(arrays), _chunk_size(uses, sum(sizes), arrays[0].shape[0]))
    parts = jnp.split(joined, np.cumsum(sizes)[:-1], axis=1)
    return [
        part.reshape(struct.shape).astype(struct.dtype)
        for part, struct in zip(parts, structs, strict=True)
    ]


def simplify(leaves: Sequence[PerExample | KnownNorms]) -> list[Any]:
    """Replaces leaves by arrays where these cost little or nothing better is known."""

    def is_kept(leaf: PerExample | KnownNorms) -> bool:
        if not isinstance(leaf, PerExample):
            return False
        small = _ways.is_small(leaf.batch_size, math.prod(leaf.leaf_shape))
        return leaf.way().way == "keep" or (leaf._is_zero() and small)

    kept = [x for x in leaves if isinstance(x, PerExample) and is_kept(x)]
    arrays = {id(x): array for x, array in zip(kept, materialize_all(kept), strict=True)}
    return [arrays.get(id(x), x) for x in leaves]
