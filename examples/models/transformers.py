"""Transformers: of images, causal, with experts, and with low-rank updates of frozen weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from . import layers
from .common import Model, classification, classifier, tokens


def vit(
    batch_size: int,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    size: int = 32,
    patch: int = 4,
    dim: int = 192,
    blocks: int = 6,
    heads: int = 3,
    classes: int = 10,
) -> Model:
    """A vision transformer (arXiv:2010.11929) that averages over its tokens."""
    init = layers.Init(key, dtype)
    count = (size // patch) ** 2
    params = {
        "patches": init.conv(patch, 3, dim),
        "positions": init.normal(count, dim, scale=0.02),
        "blocks": [layers.block_init(init, dim) for _ in range(blocks)],
        "norm": init.norm(dim),
        "head": init.dense(dim, classes),
    }

    def logits(params: Any, image: jax.Array) -> jax.Array:
        x = layers.conv(image, params["patches"], patch, "VALID").reshape(count, dim)
        x = x + params["positions"]
        for block in params["blocks"]:
            x = layers.block(block, x, heads)
        return layers.dense(params["head"], layers.layer_norm(params["norm"], x).mean(0))

    return classifier(logits), params, classification(init, batch_size, (size, size, 3), classes)


def _causal(
    block: Callable[[Any, jax.Array], jax.Array], scan: bool, remat: bool, policy: Any = None
) -> Callable[..., jax.Array]:
    """Returns the loss of a language model with a tied embedding.

    Args:
      block: ``(params, x) -> x`` for tokens ``[T, dim]``.
      scan: whether ``params["blocks"]`` is stacked and scanned over, else a list.
      remat: whether the blocks' values are computed again in the backward pass.
      policy: which values are kept nevertheless, see `jax.checkpoint_policies`.
    """
    if remat:
        block = jax.checkpoint(block, prevent_cse=not scan, policy=policy)

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        x = params["embedding"][ids[:-1]] + params["positions"]
        if scan:
            x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["blocks"])
        else:
            for layer in params["blocks"]:
                x = block(layer, x)
        x = layers.layer_norm(params["norm"], x)
        return layers.cross_entropy(x @ params["embedding"].T, ids[1:])

    return loss


def _causal_init(
    init: layers.Init, block_init: Callable[[], Any], sizes: tuple[int, int, int, int], scan: bool
) -> dict[str, Any]:
    dim, blocks, length, vocabulary = sizes
    each = [block_init() for _ in range(blocks)]
    return {
        "embedding": init.normal(vocabulary, dim, scale=dim**-0.5),
        "positions": init.normal(length, dim, scale=0.02),
        "blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *each) if scan else each,
        "norm": init.norm(dim),
    }


def transformer(
    batch_size: int,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    dim: int = 256,
    blocks: int = 4,
    heads: int = 4,
    length: int = 128,
    vocabulary: int = 8192,
    scan: bool = False,
    remat: bool = False,
    policy: Any = None,
) -> Model:
    """A causal transformer whose output projection is the transposed embedding."""
    init = layers.Init(key, dtype)
    sizes = (dim, blocks, length, vocabulary)
    params = _causal_init(init, lambda: layers.block_init(init, dim), sizes, scan)
    block = partial(layers.block, heads=heads, causal=True)
    loss = _causal(block, scan, remat, policy)
    return loss, params, (tokens(init, batch_size, length + 1, vocabulary),)


def moe(
    batch_size: int,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    dim: int = 128,
    blocks: int = 2,
    heads: int = 4,
    length: int = 64,
    vocabulary: int = 1000,
    experts: int = 4,
    capacity: int = 32,
) -> Model:
    """A causal transformer with a mixture of experts in each block (arXiv:2101.03961).

    Each token goes to its best expert as long as that one has room, by products with a one-hot
    dispatch array, so that an expert's weights meet the example in a batched ``dot_general``.
    """
    init = layers.Init(key, dtype)

    def block_init() -> dict[str, Any]:
        params = layers.block_init(init, dim)
        each = [params["mlp"], *(layers.mlp_init(init, dim, 4 * dim) for _ in range(experts - 1))]
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *each)
        return params | {"mlp": stacked, "router": init.normal(dim, experts, scale=dim**-0.5)}

    def mixture(params: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(x @ params["router"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts, dtype=x.dtype)
        place = (jnp.cumsum(chosen, 0) * chosen).sum(-1).astype(jnp.int32) - 1
        dispatch = chosen[:, :, None] * jax.nn.one_hot(place, capacity, dtype=x.dtype)[:, None]
        inner = jnp.einsum("tec,td->ecd", dispatch, x)
        up, down = params["mlp"]["up"], params["mlp"]["down"]
        inner = jax.nn.gelu(jnp.einsum("ecd,edh->ech", inner, up["w"]) + up["b"][:, None])
        inner = jnp.einsum("ech,ehd->ecd", inner, down["w"]) + down["b"][:, None]
        return jnp.einsum("tec,ecd->td", dispatch * (gates * chosen)[:, :, None], inner)

    def block(params: Any, x: jax.Array) -> jax.Array:
        normal = layers.layer_norm(params["norm1"], x)
        x = x + layers.attention(params["attention"], normal, heads, causal=True)
        return x + mixture(params, layers.layer_norm(params["norm2"], x))

    params = _causal_init(init, block_init, (dim, blocks, length, vocabulary), False)
    loss = _causal(block, scan=False, remat=False)
    return loss, params, (tokens(init, batch_size, length + 1, vocabulary),)


def lora(
    batch_size: int,
    key: jax.Array,
    *,
    dtype: Any = jnp.float32,
    rank: int = 4,
    **sizes: Any,
) -> Model:
    """A causal transformer tuned by low-rank updates ``W + A @ B`` (arXiv:2106.09685).

    The pretrained weights are constants of the loss; the parameters are the updates of all dense
    weights within the blocks. ``sizes`` are those of `transformer`.
    """
    init = layers.Init(key, dtype)
    base_loss, base, batch = transformer(batch_size, init.key(), dtype=dtype, **sizes)
    flat, treedef = jax.tree_util.tree_flatten_with_path(base)
    params = {
        jax.tree_util.keystr(path): {
            "a": init.normal(*leaf.shape[:-1], rank, scale=leaf.shape[-2] ** -0.5),
            "b": init.normal(*leaf.shape[:-2], rank, leaf.shape[-1], scale=0.01),
        }
        for path, leaf in flat
        if path[0].key == "blocks" and path[-1].key == "w"
    }

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        leaves = []
        for path, leaf in flat:
            update = params.get(jax.tree_util.keystr(path))
            leaves.append(leaf if update is None else leaf + update["a"] @ update["b"])
        return base_loss(jax.tree.unflatten(treedef, leaves), ids)

    return loss, params, batch
