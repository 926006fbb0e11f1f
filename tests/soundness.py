"""Losses whose gradients cancel inside of an example, and how far clipping lets them go.

A family is a loss of one example and a way to draw its arguments from a seed, the part ``eps`` of
the terms that does not cancel, and the scale of some factor. What one example adds to a clipped sum
is computed by the public API alone, with every other example marked as padding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from oracle import to_float64

import perex

BATCH = 3
# Weights of the losses are powers of two, so that they change no rounding.
_LARGEST_EXPONENT = 100

OPTIONS = {
    "default": {},
    "save_memory": {"save_memory": True},
    "microbatch": {"microbatch_size": 2},
    "leaf": {"per": "leaf"},
    "automatic": {"mode": "automatic"},
    "dp_clip": {"dp_clip": True},
}

Arguments = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Family:
    """A loss ``fun(params, *example)`` and its arguments ``[B]`` for a seed, an eps and a scale."""

    name: str
    fun: Callable[..., Any]
    draw: Callable[[Any, float, float], Arguments]
    bound: float = 1 + 1e-3

    def arguments(self, seed: int, eps: float, scale: float = 1.0) -> Arguments:
        params, *batched = self.draw(_Draw(seed), eps, scale)

        def cast(x: Any) -> Any:
            floating = np.issubdtype(np.asarray(x).dtype, np.floating)
            return np.asarray(x, np.float32 if floating else np.int32)

        params, batched = jax.tree.map(cast, (params, batched))
        if self.name == "bfloat16 parameters":
            params, batched = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batched))
        return (params, *batched)

    def weighted(self, weight: Any, params: Any, *example: Any) -> Any:
        loss = self.fun(params, *example)
        return loss * weight.astype(loss.dtype)


class _Draw:
    """Normal numbers of a seed."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape)

    def matrix(self, *shape: int) -> np.ndarray:
        return self(*shape) / math.sqrt(shape[-2])

    def near(self, count: int, eps: float, *shape: int) -> np.ndarray:
        """``[B, count, *shape]``: for each example a vector, and others at a distance eps."""
        return self(BATCH, 1, *shape) + eps * self(BATCH, count, *shape)

    def alternating(self, count: int, eps: float, *shape: int) -> np.ndarray:
        """``[B, count, *shape]``: plus and minus the same vector, to eps."""
        signs = (-1.0) ** np.arange(count).reshape(-1, *[1] * len(shape))
        return signs * self.near(count, eps, *shape)


@functools.cache
def _functions(family: Family, option: str) -> tuple[Callable[..., Any], ...]:
    """Jitted: the clipped sum, the norms, and the gradient of one example by `jax.grad`."""
    options = dict(OPTIONS[option])
    axes = (None, None)
    fun = family.weighted

    def clipped(is_padding: Any, weight: Any, params: Any, *batched: Any) -> Any:
        in_axes = (*axes, *[0] * len(batched))
        if options.get("dp_clip"):
            gradients = perex.grad(fun, 1, in_axes=in_axes, factored=True)(weight, params, *batched)
            tx = perex.dp_clip(1.0, 0.0, jax.random.key(0), expected_batch_size=1)
            total = tx.update(gradients, tx.init(params), params, is_padding=is_padding)[0]
            return total, None
        step = perex.clipped_grad(fun, 1.0, 1, in_axes=in_axes, **options)
        total, stats = step(weight, params, *batched, is_padding=is_padding)
        return total, stats.norms

    def norms(weight: Any, params: Any, *batched: Any) -> Any:
        saved = {"save_memory": True} if option == "save_memory" else {}
        in_axes = (*axes, *[0] * len(batched))
        return perex.grad_norms(fun, 1, in_axes=in_axes, **saved)(weight, params, *batched)

    return jax.jit(clipped), jax.jit(norms), jax.jit(jax.grad(fun, 1))


def _flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def _one(b: int, arguments: Arguments) -> Arguments:
    params, *batched = arguments
    return (params, *jax.tree.map(lambda x: x[b], batched))


def _one_rounding_away(arguments: Arguments, seed: int) -> Arguments:
    rng = np.random.default_rng(seed)

    def away(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        sign = rng.choice([-1, 1], x.shape)
        return x * (1 + sign * jnp.finfo(x.dtype).eps).astype(x.dtype)

    return jax.tree.map(away, arguments)


def oracle(family: Family, arguments: Arguments) -> list[np.ndarray]:
    """The gradients ``[P]`` of each example in float64."""
    with jax.enable_x64(True):
        gradient = _functions(family, "default")[2]
        exact = to_float64(arguments)
        return [_flat(gradient(jnp.float64(1), *_one(b, exact))) for b in range(BATCH)]


def weight_of(norms: Any) -> np.float32:
    """The weight of losses that brings ten times the clip norm, 1, to the least of the norms."""
    least = min((float(n) for n in norms if 0 < n < math.inf), default=10.0)
    exponent = math.ceil(math.log2(10 / least))
    return np.float32(2.0 ** max(-_LARGEST_EXPONENT, min(_LARGEST_EXPONENT, exponent)))


def contribution(
    family: Family,
    arguments: Arguments,
    option: str = "default",
    exact: list[np.ndarray] | None = None,
) -> float:
    """What an example adds to the clipped sum, over C: the most of any example.

    Args:
      family: the loss.
      arguments: of the loss.
      option: a name in `OPTIONS`. With one clip norm for each leaf, the most of any leaf.
      exact: the result of `oracle`, if known.
    """
    exact = oracle(family, arguments) if exact is None else exact
    weight = weight_of([np.linalg.norm(g) for g in exact])
    clipped = _functions(family, option)[0]
    worst = 0.0
    for b in range(BATCH):
        total, _ = clipped(np.arange(BATCH) != b, weight, *arguments)
        norms = [np.linalg.norm(_flat(leaf)) for leaf in jax.tree.leaves(total)]
        # A sum that is not finite is the worst of all.
        size = max(norms) if option == "leaf" else float(np.linalg.norm(norms))
        worst = max(worst, size if math.isfinite(size) else math.inf)
    return worst


def norm_error(
    family: Family,
    arguments: Arguments,
    option: str = "default",
    exact: list[np.ndarray] | None = None,
    of_stats: bool = False,
) -> float:
    """The error of `perex.grad_norms`, as a part of what is allowed; above one is too much.

    Allowed is a thousandth, or four times the error of `jax.grad` itself where that is more: the
    same terms add up in another order. Its error is taken at the inputs and at two sets of
    neighbours, each number one rounding away: where terms cancel, the order in which it happens to
    add them up may be a lucky one for the inputs themselves, and a climb would look for these.

    Args:
      family: the loss.
      arguments: of the loss.
      option: a name in `OPTIONS`.
      exact: the result of `oracle`, if known.
      of_stats: whether to look at the norms that `perex.clipped_grad` tells instead.
    """
    exact = oracle(family, arguments) if exact is None else exact
    weight = weight_of([np.linalg.norm(g) for g in exact])
    clipped, norms, gradient = _functions(family, option)
    if of_stats:
        found = clipped(np.zeros(BATCH, bool), weight, *arguments)[1]
    else:
        found = norms(weight, *arguments)
    found = np.asarray(found, np.float64)
    neighbours = [arguments, *(_one_rounding_away(arguments, seed) for seed in range(2))]
    worst = 0.0
    for b, truth in enumerate(exact):
        truth = truth * float(weight)
        size = np.linalg.norm(truth)
        off = max(
            np.linalg.norm(_flat(gradient(weight, *_one(b, near))) - truth) for near in neighbours
        )
        if not math.isfinite(off):
            continue
        allowed = max(1e-3 * size, 4 * off, 1e-30)
        error = abs(found[b] - size) / allowed
        worst = max(worst, float(error) if math.isfinite(error) else math.inf)
    return worst


# Losses, in the order of the table at the end.


def _net(params: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) * params["c"])


def _calls(params: Any, x: Any) -> Any:
    return _net(params, x[0]) - _net(params, x[1])


def _vmap(params: Any, x: Any) -> Any:
    values = jax.vmap(_net, (None, 0))(params, x)
    return values[0] - values[1]


def _scan(params: Any, x: Any) -> Any:
    def step(total, inputs):
        row, sign = inputs
        return total + sign * _net(params, row), None

    return lax.scan(step, jnp.zeros((), x.dtype), (x, jnp.array([1, -1], x.dtype)))[0]


def _axis(params: Any, x: Any) -> Any:
    y = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) @ params["c"]
    return jnp.sum(y * jnp.array([1, -1], x.dtype))


def _squared(params: Any, x: Any) -> Any:
    first, second = (jnp.tanh(jnp.tanh(row @ params["a"]) @ params["b"]) for row in x)
    return jnp.sum((first - second) ** 2)


def _bfloat16_compute(params: Any, x: Any) -> Any:
    if x.dtype == jnp.float64:  # The oracle rounds nothing.
        return _calls(params, x)
    return _calls(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), x.astype(jnp.bfloat16))


def _draw_net(width: int) -> Callable[..., Any]:
    def draw(normal: _Draw, eps: float, scale: float) -> Arguments:
        a, b = normal.matrix(width, width) / scale, normal.matrix(width, width)
        return {"a": a, "b": b, "c": normal(width)}, scale * normal.near(2, eps, width)

    return draw


def _dense(params: Any, x: Any, c: Any) -> Any:
    return jnp.sum((x @ params["w"]) * c)


def _draw_positions(width: int) -> Callable[..., Any]:
    def draw(normal: _Draw, eps: float, scale: float) -> Arguments:
        v, d = normal(BATCH, 1, width), normal(BATCH, 1, width)
        x = np.concatenate([v / eps, v / eps + 4 * d], 1) * scale
        c = normal(BATCH, 1, width) * np.array([1.0, -1.0])[:, None]
        return {"w": normal.matrix(width, width) / scale}, x, c

    return draw


def _draw_dense(positions: int, width: int, background: float = 0.0) -> Callable[..., Any]:
    def draw(normal: _Draw, eps: float, scale: float) -> Arguments:
        x = background + normal.near(positions, eps, width)
        c = normal.alternating(positions, eps, width)
        return {"w": normal.matrix(width, width)}, x * scale, c

    return draw


def _conv(stride: int, groups: int) -> Callable[..., Any]:
    def loss(params: Any, x: Any, c: Any) -> Any:
        y = lax.conv_general_dilated(
            x[None],
            params["w"],
            (stride, stride),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return jnp.sum(y[0] * c)

    return loss


def _draw_conv(
    side: int, channels: tuple[int, int], stride: int = 1, groups: int = 1, taps: int = 3
) -> Callable[..., Any]:
    inner, outer = channels

    def draw(normal: _Draw, eps: float, scale: float) -> Arguments:
        size = (side - 1) * stride + taps
        x = normal.near(size * size, eps, inner).reshape(BATCH, size, size, inner)
        # In no order: a sum that runs along signs which alternate never grows, and `jax.grad`,
        # which adds up in that order, is a hundred times more accurate there than for any other.
        c = normal.alternating(side * side, eps, outer)[:, normal.rng.permutation(side * side)]
        c = c.reshape(BATCH, side, side, outer)
        return {"w": normal(taps, taps, inner // groups, outer) / 9}, x * scale, c

    return draw


def _masked_conv(params: Any, x: Any, c: Any) -> Any:
    shape = params["w"].shape
    mask = np.ones(shape, np.float32)
    mask[2:], mask[1, 1:] = 0, 0
    return _conv(1, 1)({"w": params["w"] * mask}, x, c)


def _masked_dense(params: Any, x: Any, c: Any) -> Any:
    w = params["w"]
    rows = np.arange(w.shape[0])[:, None] >= w.shape[0] // 2
    return jnp.sum((x @ jnp.where(rows, w, 0)) * c)


def _embedding(params: Any, ids: Any, c: Any) -> Any:
    return jnp.sum(params["w"][ids] * c)


def _draw_embedding(rows: int, width: int) -> Callable[..., Any]:
    def draw(normal: _Draw, eps: float, scale: float) -> Arguments:
        ids = np.full((BATCH, 8), rows // 2)
        return {"w": normal(rows, width)}, ids, scale * normal.alternating(8, eps, width)

    return draw


def _tied(params: Any, ids: Any, s: Any, d: Any) -> Any:
    table = params["w"]
    logits = s @ table.T
    return jnp.sum(jnp.take_along_axis(logits, ids[:, None], 1)) - jnp.sum(table[ids] * d)


def _draw_tied(rows: int, width: int) -> Callable[..., Any]:
    def draw(normal: _Draw, eps: float, scale: float) -> Arguments:
        ids = np.full((BATCH, 4), rows // 2)
        s = normal(BATCH, 4, width)
        return {"w": normal(rows, width)}, ids, scale * s, scale * (s + eps * normal(*s.shape))

    return draw


def _transposed(params: Any, x: Any, c: Any, y: Any, d: Any) -> Any:
    return jnp.sum((x @ params["w"]) * c) - jnp.sum((y @ params["w"].T) * d)


def _draw_transposed(width: int) -> Callable[..., Any]:
    def draw(normal: _Draw, eps: float, scale: float) -> Arguments:
        x, c = normal(BATCH, 3, width), normal(BATCH, 3, width)
        y = c + eps * normal(*c.shape)
        return {"w": normal.matrix(width, width)}, scale * x, c, y, scale * x

    return draw


def _lstm_net(params: Any, x: Any) -> Any:
    width = params["u"].shape[0]

    def step(state, row):
        h, cell = state
        i, f, g, o = jnp.split(row @ params["w"] + h @ params["u"] + params["b"], 4)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (h, cell), None

    zeros = jnp.zeros(width, x.dtype)
    return jnp.sum(lax.scan(step, (zeros, zeros), x)[0][0])


def _lstm(params: Any, x: Any) -> Any:
    return _lstm_net(params, x[0]) - _lstm_net(params, x[1])


def _draw_lstm(width: int) -> Callable[..., Any]:
    def draw(normal: _Draw, eps: float, scale: float) -> Arguments:
        w, u = normal.matrix(width, 4 * width) / scale, normal.matrix(width, 4 * width)
        x = scale * normal.near(2, eps, 5, width)
        return {"w": w, "u": u, "b": normal(4 * width)}, x

    return draw


def _recurrent(params: Any, x: Any, c: Any) -> Any:
    def step(total, inputs):
        row, weights = inputs
        return total + jnp.sum(jnp.tanh(row @ params["w"]) * weights), None

    return lax.scan(step, jnp.zeros((), x.dtype), (x, c))[0]


def _unrolled(params: Any, x: Any, c: Any) -> Any:
    total = 0.0
    for row, weights in zip(x, c, strict=True):
        total += jnp.sum(jnp.tanh(row @ params["w"]) * weights)
    return total


def _standardised(params: Any, x: Any, c: Any) -> Any:
    w = params["w"] - jnp.mean(params["w"], 0)
    return jnp.sum((x @ (w / jnp.sqrt(jnp.mean(w * w, 0)))) * c)


def _draw_standardised(width: int) -> Callable[..., Any]:
    def draw(normal: _Draw, eps: float, scale: float) -> Arguments:
        w = normal(width, width)
        centred = w - w.mean(0)
        hat = centred / np.sqrt(np.mean(centred**2, 0))
        x = np.broadcast_to(np.eye(width), (BATCH, width, width))
        # The gradient of the standardised kernel is the kernel, which standardisation projects out.
        return {"w": w}, scale * x, hat + eps * normal(BATCH, width, width)

    return draw


def _decayed(params: Any, x: Any, c: Any, decay: Any) -> Any:
    return _dense(params, x, c) - decay / 2 * jnp.sum(params["w"] ** 2)


def _draw_decayed(width: int) -> Callable[..., Any]:
    def draw(normal: _Draw, eps: float, scale: float) -> Arguments:
        w = normal.matrix(width, width)
        x = np.broadcast_to(np.eye(width), (BATCH, width, width))
        return {"w": w}, scale * x, w + eps * normal(BATCH, width, width), np.full(BATCH, scale)

    return draw


def _low_rank(params: Any, x: Any) -> Any:
    def net(row):
        return jnp.sum(jnp.tanh(row @ (params["w"] + params["a"] @ params["b"])) * params["c"])

    return net(x[0]) - net(x[1])


def _draw_low_rank(width: int) -> Callable[..., Any]:
    def draw(normal: _Draw, eps: float, scale: float) -> Arguments:
        params = {
            "w": normal.matrix(width, width) / scale,
            "a": normal.matrix(width, 2) / scale,
            "b": normal.matrix(2, width),
            "c": normal(width),
        }
        return params, scale * normal.near(2, eps, width)

    return draw


def _stacked(params: Any, x: Any) -> Any:
    @jax.checkpoint
    def layer(h, w):
        return jnp.tanh(h @ w), None

    y = lax.scan(layer, x, params["w"])[0]
    return jnp.sum(y[0] - y[1])


def _draw_stacked(width: int) -> Callable[..., Any]:
    def draw(normal: _Draw, eps: float, scale: float) -> Arguments:
        return {"w": normal.matrix(3, width, width)}, scale * normal.near(2, eps, width)

    return draw


def _normalised(params: Any, x: Any, c: Any) -> Any:
    centred = x - jnp.mean(x, -1, keepdims=True)
    hat = centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True))
    return jnp.sum((hat * params["scale"] + params["bias"]) * c)


def _draw_normalised(width: int) -> Callable[..., Any]:
    def draw(normal: _Draw, eps: float, scale: float) -> Arguments:
        params = {"scale": normal(width), "bias": normal(width)}
        return params, normal.near(8, eps, width), scale * normal.alternating(8, eps, width)

    return draw


def _sliced(params: Any, start: Any, c: Any) -> Any:
    width = params["w"].shape[1]
    rows = [lax.dynamic_slice(params["w"], (s, jnp.zeros_like(s)), (2, width)) for s in start]
    return sum(jnp.sum(row * weights) for row, weights in zip(rows, c, strict=True))


def _draw_sliced(rows: int, width: int) -> Callable[..., Any]:
    def draw(normal: _Draw, eps: float, scale: float) -> Arguments:
        start = np.full((BATCH, 2), rows // 2)
        return {"w": normal(rows, width)}, start, scale * normal.alternating(2, eps, 2, width)

    return draw


_BFLOAT16 = 1 + 2e-2


def _families() -> dict[str, Family]:
    large, small = 128, 5
    found = []

    def add(name: str, fun: Any, draw: Any, bound: float = 1 + 1e-3) -> None:
        found.append(Family(name, fun, draw, bound))

    for form, fun in {"calls": _calls, "vmap": _vmap, "scan": _scan, "axis": _axis}.items():
        add(f"pair of {form}", fun, _draw_net(small))
        add(f"pair of {form}, large", fun, _draw_net(256 if form == "calls" else large))
    add("squared distance", _squared, _draw_net(small))
    add("squared distance, large", _squared, _draw_net(large))
    add("bfloat16 parameters", _calls, _draw_net(large), _BFLOAT16)
    add("bfloat16 compute", _bfloat16_compute, _draw_net(large))
    add("two positions", _dense, _draw_positions(small))
    add("two positions, large", _dense, _draw_positions(large))
    add("background", _dense, _draw_dense(8, small, 1e3))
    add("background, large", _dense, _draw_dense(8, large, 1e3))
    add("equal positions", _dense, _draw_dense(4096, small))
    add("equal positions, large", _dense, _draw_dense(4096, large))
    add("conv 32x32", _conv(1, 1), _draw_conv(32, (4, 8)))
    add("conv 32x32, large", _conv(1, 1), _draw_conv(32, (16, 80)))
    add("conv 4x4", _conv(1, 1), _draw_conv(4, (4, 8)))
    add("conv 4x4, large", _conv(1, 1), _draw_conv(4, (32, 64)))
    add("conv 1x1, large", _conv(1, 1), _draw_conv(4, (128, 128), taps=1))
    add("conv strided, large", _conv(2, 1), _draw_conv(4, (32, 64), 2))
    add("conv grouped, large", _conv(1, 2), _draw_conv(4, (64, 64), 1, 2))
    add("conv depthwise", _conv(1, 8), _draw_conv(8, (8, 8), 1, 8))
    add("conv depthwise, large", _conv(1, 512), _draw_conv(4, (512, 512), 1, 512, 5))
    add("masked conv", _masked_conv, _draw_conv(4, (4, 8)))
    add("masked conv, large", _masked_conv, _draw_conv(4, (32, 64)))
    add("masked dense, large", _masked_dense, _draw_dense(2, large))
    add("embedding", _embedding, _draw_embedding(9, 4))
    add("embedding, large", _embedding, _draw_embedding(1000, 32))
    add("tied embedding", _tied, _draw_tied(9, 4))
    add("tied embedding, large", _tied, _draw_tied(1000, 32))
    add("transposed uses", _transposed, _draw_transposed(small))
    add("transposed uses, large", _transposed, _draw_transposed(large))
    add("lstm", _lstm, _draw_lstm(small))
    add("lstm, large", _lstm, _draw_lstm(64))
    add("recurrent, large", _recurrent, _draw_dense(6, large))
    add("unrolled, large", _unrolled, _draw_dense(6, large))
    add("standardised", _standardised, _draw_standardised(small))
    add("standardised, large", _standardised, _draw_standardised(large))
    add("decay", _decayed, _draw_decayed(small))
    add("decay, large", _decayed, _draw_decayed(large))
    add("low rank", _low_rank, _draw_low_rank(small))
    add("low rank, large", _low_rank, _draw_low_rank(large))
    add("stacked layers", _stacked, _draw_stacked(small))
    add("stacked layers, large", _stacked, _draw_stacked(large))
    add("normalised", _normalised, _draw_normalised(16))
    add("slices", _sliced, _draw_sliced(9, 4))
    add("slices, large", _sliced, _draw_sliced(500, 64))
    return {family.name: family for family in found}


FAMILIES = _families()
# Factors far from one leave the range of float32 in these, or change what is cancelled.
UNSCALED = {
    "bfloat16 compute",
    "bfloat16 parameters",
    "recurrent, large",
    "stacked layers",
    "stacked layers, large",
    "unrolled, large",
}
