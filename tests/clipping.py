"""What the tests of clipping and privacy share: gradients, and an oracle that loops in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from perex._privacy import dp_clip

KEY = jax.random.key(7)
SHAPES = {"conv": {"kernel": (3, 2), "bias": (2,)}, "head": (4,)}
HEAD = {"body": 0.7, "head": 0.2}
# Float32 sums of a few dozen terms: relative error well below this.
ROUNDING = 1e-6


def by_part(path):
    return path.split("/")[0].replace("conv", "body")


MODES = {
    "global": {},
    "leaf": {"per": "leaf"},
    "group": {"per": by_part},
    "automatic": {"mode": "automatic"},
    "automatic leaf": {"per": "leaf", "mode": "automatic", "gamma": 0.5},
}


def gradients(size, seed=0, scale=1.0, dtype=np.float32):
    """Return a tree of per-example gradients whose norms spread over two decades."""
    rng = np.random.default_rng(seed)
    sizes = scale * 10 ** rng.uniform(-1.5, 0.5, size)
    return jax.tree.map(
        lambda shape: (
            rng.normal(size=(size, *shape)) * sizes.reshape(-1, *[1] * len(shape))
        ).astype(dtype),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def apply(tx, grads, params=None, **extra):
    arrays = jax.tree.map(jnp.asarray, grads)
    return tx.update(arrays, tx.init(params), params, **extra)


def clipped_sum(grads, clip=0.5, is_padding=None, **mode):
    tx = dp_clip(clip, 0.0, KEY, expected_batch_size=1, **mode)
    return apply(tx, grads, is_padding=is_padding)[0]


def oracle(grads, clips, group=lambda path: None, gamma=None):
    """Clip in float64 with a Python loop over examples, and sum."""
    pairs, tree = jax.tree_util.tree_flatten_with_path(grads)
    names = [group(jax.tree_util.keystr(p, simple=True, separator="/")) for p, _ in pairs]
    leaves = [np.asarray(leaf, np.float64) for _, leaf in pairs]
    total = [np.zeros(leaf.shape[1:]) for leaf in leaves]
    for i in range(leaves[0].shape[0]):
        if not all(np.isfinite(leaf[i]).all() for leaf in leaves):
            continue
        for j, leaf in enumerate(leaves):
            norm = math.sqrt(
                sum((x[i] ** 2).sum() for x, n in zip(leaves, names, strict=True) if n == names[j])
            )
            clip = clips[names[j]] if isinstance(clips, dict) else clips
            if gamma is None:
                total[j] += leaf[i] * min(1, clip / norm if norm else 1)
            else:
                total[j] += leaf[i] * clip / (norm + gamma)
    return jax.tree.unflatten(tree, total)


def distance(a, b):
    return math.sqrt(
        sum(
            (np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)) ** 2).sum()
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )
    )


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


def replaced(grads, index, row):
    return jax.tree.map(
        lambda g, r: np.concatenate([g[:index], r[None], g[index + 1 :]]), grads, row
    )


SUM_SHAPES = jax.tree.map(np.zeros, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
