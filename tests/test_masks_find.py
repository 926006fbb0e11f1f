"""Masks are found wherever users put them, and left alone where there are none."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from perex import _trace
from perex._masks import Knowledge, exact_masks

NUMBERS = ("NHWC", "HWIO", "NHWC")
RASTER = np.ones((3, 3, 2, 4), np.float32)
RASTER[2], RASTER[1, 2] = 0, 0
WEIGHT = np.asarray(jax.random.normal(jax.random.key(0), RASTER.shape))
IMAGE = np.asarray(jax.random.normal(jax.random.key(1), (2, 6, 5, 2)))


def conv(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NUMBERS)


def convolutions(fun, *args):
    """The windows of the convolutions in a function's jaxpr, those in bodies included."""
    windows = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive is lax.conv_general_dilated_p:
                rhs = equation.params["dimension_numbers"].rhs_spec
                windows.append(tuple(equation.invars[1].aval.shape[a] for a in rhs[2:]))
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(value):
                    visit(value)

    is_jaxpr = lambda value: hasattr(value, "eqns")  # noqa: E731
    visit(jax.make_jaxpr(fun)(*args))
    return sorted(windows)


def at_run_time(fun, *args):
    """Whether the first convolution has a mask that is known only at run time."""
    leaves, treedef = jax.tree.flatten((args, {}))
    program = _trace.trace(fun, leaves, treedef).program
    found = [Knowledge(program).find(equation) for equation in program.equations]
    return [bool(f.masks) for f in found if f is not None]


def first_rows(mask=(3, 3, 2, 4)):
    return jnp.ones(mask).at[2:].set(0).at[1, 2:].set(0)


HAND_WRITTEN = {
    "mask times weight": lambda w: jnp.asarray(RASTER) * w,
    "weight times mask": lambda w: w * RASTER,
    "where": lambda w: jnp.where(RASTER != 0, w, 0),
    "where not": lambda w: jnp.where(RASTER == 0, 0.0, w),
    "computed from constants": lambda w: first_rows() * w,
    "broadcast over channels": lambda w: first_rows((3, 3))[..., None, None] * w,
    "iota": lambda w: jnp.where(
        3 * lax.broadcasted_iota(int, w.shape, 0) + lax.broadcasted_iota(int, w.shape, 1) < 5, w, 0
    ),
    "boolean": lambda w: w * (RASTER > 0),
    "scaled first": lambda w: RASTER * (2.0 * w / jnp.linalg.norm(w)),
    "scaled after": lambda w: jnp.exp(w.mean()) * (RASTER * w) / 3,
    "cast": lambda w: (RASTER.astype(np.int8) * w.astype(jnp.bfloat16)).astype(jnp.float32),
    "transposed": lambda w: jnp.transpose(
        jnp.transpose(RASTER, (3, 2, 0, 1)) * w.T.swapaxes(2, 3), (2, 3, 1, 0)
    ),
    "reshaped": lambda w: (RASTER.reshape(9, 8) * w.reshape(9, 8)).reshape(w.shape),
    "flipped": lambda w: (RASTER[::-1, ::-1] * w)[::-1, ::-1],
    "low rank": lambda w: RASTER * w + RASTER * (w[:, :, :, :1] * w[:, :, :1]),
    "jitted": lambda w: jax.jit(lambda w: RASTER * w)(w),
    "padded": lambda w: jnp.pad(RASTER[:2] * w[:2], ((0, 1), (0, 0), (0, 0), (0, 0))),
}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_hand_written_masks_are_known(name):
    fun = lambda w, x: conv(x, HAND_WRITTEN[name](w))  # noqa: E731
    exact = exact_masks(fun)
    # Two rectangles: the larger is a convolution, the single tap that is left a product.
    assert convolutions(fun, WEIGHT, IMAGE) == [(3, 3)]
    assert convolutions(exact, WEIGHT, IMAGE) == [(2, 2)]
    # At most 18 products of float32 numbers around one (bfloat16 where the weight is cast).
    tolerance = 1e-5
    np.testing.assert_allclose(exact(WEIGHT, IMAGE), fun(WEIGHT, IMAGE), atol=tolerance)


def test_triangular_channel_masks():
    fun = lambda w, x: conv(x, w * jnp.tril(jnp.ones((4, 2))).T)  # noqa: E731
    exact = exact_masks(fun)
    poisoned = IMAGE.copy()
    poisoned[..., 1] = np.nan
    y = exact(WEIGHT, poisoned)
    assert np.isfinite(y[..., 0]).all() and not np.isfinite(y[..., 1:]).any()
    np.testing.assert_allclose(exact(WEIGHT, IMAGE), fun(WEIGHT, IMAGE), atol=1e-5)


@pytest.mark.parametrize(
    "kernel",
    [
        lambda w: w,
        lambda w: 2 * w,
        lambda w: np.ones_like(RASTER) * w,
        lambda w: w + RASTER,
        lambda w: jnp.where(w > 0, w, 0.5),
        lambda w: jnp.exp(w * RASTER),
    ],
)
def test_other_kernels_do_not_change(kernel):
    fun = lambda w, x: conv(x, kernel(w))  # noqa: E731
    assert convolutions(exact_masks(fun), WEIGHT, IMAGE) == [(3, 3)]
    np.testing.assert_array_equal(exact_masks(fun)(WEIGHT, IMAGE), fun(WEIGHT, IMAGE))


def test_a_constant_kernel_is_not_a_mask():
    sobel = np.outer([1, 2, 1], [1, 0, -1]).astype(np.float32)[..., None, None]
    fun = lambda x: conv(x[..., :1], sobel)  # noqa: E731
    assert convolutions(exact_masks(fun), IMAGE) == [(3, 3)]


def test_all_zero_mask():
    fun = lambda w, x: conv(x, w * np.zeros_like(RASTER))  # noqa: E731
    assert convolutions(exact_masks(fun), WEIGHT, IMAGE) == []
    np.testing.assert_array_equal(exact_masks(fun)(WEIGHT, IMAGE * np.nan), 0)


def flax_linen():
    model = nn.Conv(4, (3, 3), mask=jnp.asarray(RASTER))
    return model.apply, model.init(jax.random.key(0), IMAGE)


def flax_nnx():
    model = nnx.Conv(2, 4, (3, 3), mask=jnp.asarray(RASTER), rngs=nnx.Rngs(0))
    # The mask is part of the state, but no parameter; it stays known while it is closed over.
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda params, x: nnx.merge(graph, params, rest)(x), params


def haiku():
    model = hk.without_apply_rng(hk.transform(lambda x: hk.Conv2D(4, 3, mask=RASTER)(x)))
    return model.apply, model.init(jax.random.key(0), IMAGE)


class Masked(eqx.Module):
    weight: jax.Array
    mask: jax.Array

    def __call__(self, x):
        return conv(x, lax.stop_gradient(self.mask) * self.weight)


def equinox():
    model = Masked(jnp.asarray(WEIGHT), jnp.asarray(RASTER))
    trained = Masked(True, False)
    trained, rest = eqx.partition(model, trained)
    return lambda trained, x: eqx.combine(trained, rest)(x), trained


def equinox_whole():
    return lambda model, x: model(x), Masked(jnp.asarray(WEIGHT), jnp.asarray(RASTER))


@pytest.mark.parametrize("make", [flax_linen, flax_nnx, haiku, equinox, equinox_whole])
def test_frameworks(make):
    apply, params = make()
    exact = exact_masks(apply)
    poisoned = IMAGE.copy()
    poisoned[:, 3:] = np.nan
    y, clean = exact(params, poisoned), exact(params, IMAGE)
    np.testing.assert_allclose(clean, apply(params, IMAGE), atol=1e-5)
    # Without the mask, row 2 reads row 3.
    np.testing.assert_array_equal(y[:, :3], clean[:, :3])
    assert np.isnan(apply(params, poisoned)[:, 2]).all()
    if make is not equinox_whole:
        assert convolutions(exact, params, IMAGE) == [(2, 2)]
    else:
        assert at_run_time(apply, params, IMAGE) == [True]


@pytest.mark.parametrize(
    "kernel",
    [
        lambda w, m: w * lax.stop_gradient(m),
        lambda w, m: (m > 0) * w,
        lambda w, m: w * m.astype(bool).astype(float),
        lambda w, m: jnp.where(m == 0, 0, w),
        lambda w, m: jnp.where(m > 0, w, 0.0),
        lambda w, m: ((m > 0).transpose(3, 2, 0, 1) * w.transpose(3, 2, 0, 1)).transpose(
            2, 3, 1, 0
        ),
        lambda w, m: (w * (m > 0)) / jnp.sqrt(jnp.sum(w**2, (0, 1, 2))),
        lambda w, m: ((m > 0) * w) ** 3,
    ],
)
def test_masks_known_at_run_time(kernel):
    fun = lambda w, m, x: conv(x, kernel(w, m))  # noqa: E731
    exact = jax.jit(exact_masks(fun))
    assert at_run_time(fun, WEIGHT, RASTER, IMAGE) == [True]
    assert convolutions(exact, WEIGHT, RASTER, IMAGE) == []
    poisoned = IMAGE.copy()
    poisoned[:, 3:] = np.nan
    clean = exact(WEIGHT, RASTER, IMAGE)
    np.testing.assert_allclose(clean, fun(WEIGHT, RASTER, IMAGE), atol=1e-5)
    np.testing.assert_array_equal(exact(WEIGHT, RASTER, poisoned)[:, :3], clean[:, :3])


COMPLEX_WEIGHT = (WEIGHT + 1j * WEIGHT[::-1]).astype(np.complex64)


@pytest.mark.parametrize("known", [True, False], ids=["known", "at run time"])
@pytest.mark.parametrize(
    "kernel",
    [
        lambda w, m: m * w,
        lambda w, m: m.astype(bool) * w,
        lambda w, m: jnp.where(m > 0, w, 0),
        lambda w, m: lax.complex(m * w.real, m * w.imag),
    ],
    ids=["integers", "truth values", "selected", "by parts"],
)
def test_kernels_of_complex_numbers(kernel, known):
    mask = RASTER.astype(np.int32)
    image = IMAGE.astype(np.complex64)
    fun = lambda w, m, x: conv(x, kernel(w, mask if known else m))  # noqa: E731
    exact = jax.jit(exact_masks(fun))
    poisoned = image.copy()
    poisoned[:, 3:] = np.nan
    clean = exact(COMPLEX_WEIGHT, mask, image)
    np.testing.assert_allclose(clean, fun(COMPLEX_WEIGHT, mask, image), atol=1e-5)
    np.testing.assert_array_equal(exact(COMPLEX_WEIGHT, mask, poisoned)[:, :3], clean[:, :3])


def test_a_mask_of_one_part_of_a_complex_number_is_none():
    fun = lambda w, m, x: conv(x, lax.complex(m * w.real, w.imag))  # noqa: E731
    mask, image = RASTER.astype(np.int32), IMAGE.astype(np.complex64)
    assert at_run_time(fun, COMPLEX_WEIGHT, mask, image) == []
    np.testing.assert_allclose(
        exact_masks(fun)(COMPLEX_WEIGHT, mask, image), fun(COMPLEX_WEIGHT, mask, image), atol=1e-5
    )


@pytest.mark.parametrize(
    "step",
    [lambda w, s: w * w, lambda w, s: s * w, lambda w, s: lax.complex(s * w.real, s * w.imag)],
    ids=["squares", "scales", "scales of both parts"],
)
def test_the_work_does_not_double_with_each_product(step):
    """A kernel may be used twice at each of many steps, as in an iteration on it."""

    def kernel(w, s, m):
        w = m * w
        for i in range(25):
            w = step(w, s[i])
        return w

    scales, mask = np.ones(25, np.float32), RASTER.astype(np.int32)
    fun = lambda w, s, m, x: conv(x, kernel(w, s, m))  # noqa: E731
    assert at_run_time(fun, COMPLEX_WEIGHT, scales, mask, IMAGE.astype(np.complex64)) == [True]


def test_a_learnt_scale_is_no_mask():
    fun = lambda w, g, x: conv(x, g * w)  # noqa: E731
    assert at_run_time(fun, WEIGHT, RASTER, IMAGE) == []
    leaves, treedef = jax.tree.flatten(((WEIGHT, RASTER, IMAGE), {}))
    program = _trace.trace(fun, leaves, treedef).program
    told = Knowledge(program, is_mask=lambda variable: variable == program.inputs[1])
    (found,) = filter(None, map(told.find, program.equations))
    assert [mask.variable for mask in found.masks] == [program.inputs[1]]


def test_an_argument_of_zeros_and_ones_is_a_mask_outside_of_jit():
    fun = lambda w, m, x: conv(x, m * w)  # noqa: E731
    y = exact_masks(fun)(WEIGHT, RASTER, np.where(np.arange(6)[:, None, None] < 3, IMAGE, np.inf))
    np.testing.assert_allclose(y[:, :3], fun(WEIGHT, RASTER, IMAGE)[:, :3], atol=1e-5)


def scan_shared(w, x):
    square = lambda w: jnp.concatenate([w, w], 2)[..., :4]  # noqa: E731
    step = lambda x, _: (jnp.tanh(conv(x, jnp.tile(RASTER, (1, 1, 2, 1)) * square(w))), x.sum())  # noqa: E731
    return lax.scan(step, jnp.concatenate([x, x], -1), None, length=3)


def scan_stacked(w, x):
    stacked = jnp.stack([w, 2 * w]) * RASTER
    step = lambda total, w: (total + conv(x, w), None)  # noqa: E731
    return lax.scan(step, conv(x, w) * 0, stacked)[0]


def while_loop(w, x):
    body = lambda carry: (carry[0] + 1, carry[1] + conv(x, RASTER * w))  # noqa: E731
    return lax.while_loop(lambda carry: carry[0] < 3, body, (0, conv(x, w) * 0))[1]


def cond(w, x):
    return lax.cond(x.sum() > 0, lambda w: conv(x, RASTER * w), lambda w: conv(-x, RASTER * w), w)


def remat(w, x):
    return jax.checkpoint(lambda w, x: jnp.sin(conv(x, RASTER * w)))(w, x)


def nested(w, x):
    step = lambda total, x: (total + remat(w, x[None]), None)  # noqa: E731
    return jax.jit(lambda w, x: lax.scan(step, remat(w, x[:1]), x))(w, x)


@pytest.mark.parametrize("fun", [scan_shared, scan_stacked, while_loop, cond, remat, nested])
def test_bodies(fun):
    exact = exact_masks(fun)
    plain, ours = convolutions(fun, WEIGHT, IMAGE), convolutions(exact, WEIGHT, IMAGE)
    masked = len(plain) - (fun in (scan_stacked, while_loop))  # those have one without a mask
    assert len(ours) == len(plain) and ours.count((2, 2)) == masked
    for a, b in zip(
        jax.tree.leaves(exact(WEIGHT, IMAGE)), jax.tree.leaves(fun(WEIGHT, IMAGE)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-5)
    if fun is not while_loop:
        loss = lambda f: lambda w, x: sum(jnp.sum(y**2) for y in jax.tree.leaves(f(w, x)))  # noqa: E731
        gradients = [jax.grad(loss(f), (0, 1))(WEIGHT, IMAGE) for f in (exact, fun)]
        for a, b in zip(*gradients, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_composes_with_transformations():
    fun = lambda w, x: conv(x[None], RASTER * w)[0]  # noqa: E731
    loss = lambda f: lambda w, x: (f(w, x) ** 2).sum()  # noqa: E731
    exact = exact_masks(fun)
    for transform in (
        lambda f: jax.jit(jax.vmap(f, (None, 0))),
        lambda f: jax.vmap(jax.grad(loss(f)), (None, 0)),
        lambda f: lambda w, x: jax.jvp(lambda w: f(w, x[0]), (w,), (w,))[1],
    ):
        np.testing.assert_allclose(
            transform(exact)(WEIGHT, IMAGE), transform(fun)(WEIGHT, IMAGE), rtol=1e-4, atol=1e-4
        )
    inside = exact_masks(jax.grad(lambda x, w: (conv(x, RASTER * w)[:, 2, 2]).sum()))
    assert (2, 2) in convolutions(inside, IMAGE, WEIGHT)
    np.testing.assert_array_equal(inside(IMAGE, WEIGHT)[:, 3:], 0)


def test_arguments_that_are_not_arrays_and_keywords():
    fun = lambda w, x, *, name, times: {name: times * conv(x, RASTER * w)}  # noqa: E731
    y = exact_masks(fun)(WEIGHT, x=IMAGE, name="y", times=2)
    np.testing.assert_allclose(y["y"], 2 * conv(IMAGE, RASTER * WEIGHT), atol=1e-5)


def test_not_callable():
    with pytest.raises(TypeError, match="perex.exact_masks: fun must be callable"):
        exact_masks(3)
