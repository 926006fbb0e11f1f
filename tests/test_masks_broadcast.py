"""Masks that broadcast to the kernel on the way, constant or an argument of ``jit``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import loop

import perex
from perex._masks import Knowledge
from perex._trace import trace

SHAPE = (3, 3, 4, 6)
WEIGHT = np.asarray(jax.random.normal(jax.random.key(0), SHAPE))
IMAGES = np.asarray(jax.random.normal(jax.random.key(1), (3, 5, 4, 4)))
CLIP = 3.0
LOW = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

SHAPES = [
    (),
    (6,),
    (1,),
    (4, 1),
    (3, 1, 6),
    (1, 1, 1, 1),
    (3, 1, 1, 1),
    (1, 3, 1, 6),
    (3, 3, 1, 1),
    (3, 3, 1, 6),
    (3, 3, 4, 1),
    SHAPE,
]

FORMS = {
    "boolean on the right": lambda w, m: w * m,
    "integer on the left": lambda w, m: m.astype(np.int32) * w,
    "float": lambda w, m: lax.stop_gradient(m.astype(w.dtype)) * w,
    "where": lambda w, m: jnp.where(m, w, 0),
    "where not": lambda w, m: jnp.where(jnp.logical_not(m), 0.0, w),
    "select": lambda w, m: lax.select(jnp.broadcast_to(m, w.shape), w, jnp.zeros_like(w)),
    "one factor more": lambda w, m: 0.5 * (w * m) * jnp.ones((1, 1, 4, 1), w.dtype),
    "mask of a sum": lambda w, m: m * (w + 0.25),
    "reshaped after": lambda w, m: jnp.reshape((w * m).reshape(9, 24), (3, 3, 4, 6)),
    "turned": lambda w, m: jnp.flip(jnp.flip(w, 1) * jnp.flip(expand(m), 1), 1),
    "transposed": lambda w, m: (
        w.transpose(3, 2, 0, 1) * expand(m).transpose(3, 2, 0, 1)
    ).transpose(2, 3, 1, 0),
}


def expand(mask):
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def mask_of(shape):
    """Row 2, input 1, and outputs 0 and 5 are masked, where the mask has these axes."""
    mask = np.ones((1,) * (4 - len(shape)) + shape, bool)
    for axis, places in ((0, [2]), (2, [1]), (3, [0, 5])):
        if mask.shape[axis] > 1:
            mask[(slice(None),) * axis + (places,)] = False
    return mask.reshape(shape)


def conv(x, kernel):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def loss_of(forms, weights, masks, x):
    values = [jnp.sum(jnp.tanh(conv(x[None], form(weights[n], *masks)))) for n, form in forms]
    return sum(values, jnp.zeros((), x.dtype))


def all_ways(forms, constant):
    """A function that returns what every transform returns, to be compiled in one piece."""

    def run(weights, masks, x):
        masks = masks if constant is None else constant
        closed = lambda weights, x: loss_of(forms, weights, masks, x)  # noqa: E731
        return (
            perex.grad(closed)(weights, x),
            perex.grad_norms(closed)(weights, x),
            perex.clipped_grad(closed, CLIP)(weights, x),
            jax.vmap(jax.grad(perex.exact_masks(closed)), (None, 0))(weights, x),
        )

    return run


def check(forms, masks, where, known):
    """Compares with the oracle; ``where`` is the mask of each form's kernel."""
    forms = tuple(forms.items())
    weights = {name: WEIGHT for name, _ in forms}
    given = tuple(map(jnp.asarray, masks))
    ways = jax.jit(all_ways(forms, given if known else None))
    ways = ways.lower(weights, given, IMAGES).compile(LOW)
    gradients, norms, clipped, exact = ways(weights, given, IMAGES)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (weights, IMAGES))
        closed = jax.jit(lambda weights, x: loss_of(forms, weights, given, x))
        _, _, expected = loop(closed)(*wide)
    squares = sum(np.square(e).sum((1, 2, 3, 4)) for e in expected.values())
    # Sums of at most 36 products of numbers around one, in float32.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    close(norms, np.sqrt(squares))
    factors = CLIP / np.maximum(np.sqrt(squares), CLIP)
    assert (factors < 1).any() or not np.any(where)
    total, _ = clipped
    for name, _ in forms:
        close(gradients[name], expected[name], err_msg=name)
        close(exact[name], expected[name], err_msg=name)
        close(total[name], np.tensordot(factors, expected[name], 1), err_msg=name)
    acts = np.broadcast_to(where, SHAPE)
    for tree in (gradients, exact, total):
        for name, _ in forms:
            np.testing.assert_array_equal(tree[name][..., ~acts], 0, err_msg=name)
    return ways, weights, given, (gradients, norms, clipped, exact)


def check_poisoned(ways, weights, given, clean, where):
    """NaN in weights that are masked and in inputs that only they see changes no bit."""
    acts = np.broadcast_to(where, SHAPE)
    x = IMAGES.copy()
    if not acts[2].any():
        x[:, 4] = np.nan
    if not acts[:, :, 1].any():
        x[..., 1] = np.inf
    weights = {n: np.where(acts, w, np.nan).astype(w.dtype) for n, w in weights.items()}
    jax.tree.map(np.testing.assert_array_equal, ways(weights, given, x), clean)


@pytest.mark.parametrize(
    "shape, known",
    # Constants of any shape are computed to the kernel's before anything is looked for.
    [(shape, False) for shape in SHAPES] + [(shape, True) for shape in SHAPES[1::4]],
    ids=str,
)
def test_every_shape_and_form(shape, known):
    mask = mask_of(shape)
    first = SHAPES.index(shape) % 3  # a third of the forms for each shape
    forms = dict(list(FORMS.items())[first::3])
    *ways, clean = check(forms, (mask,), mask, known)
    check_poisoned(*ways, clean, mask)


TAPS, INPUTS, OUTPUTS = mask_of((3, 1, 1, 1)), mask_of((4, 1)), mask_of((6,))
CHAINS = {
    "products": lambda w, a, b, c: a * (w * c) * b,
    "masks first": lambda w, a, b, c: jnp.logical_and(a, b & c) * w,
    "product of masks": lambda w, a, b, c: (lax.stop_gradient(a * 1.0 * b) * c) * w,
    "where of where": lambda w, a, b, c: jnp.where(a, jnp.where(b, jnp.where(c, w, 0), 0), 0),
    "where of a product": lambda w, a, b, c: jnp.where(~b, 0, a * w) * c,
    "turned between": lambda w, a, b, c: jnp.transpose(
        jnp.transpose(w * a, (3, 2, 0, 1)) * b[..., None] * c[:, None, None, None], (2, 3, 1, 0)
    ),
    "reshaped between": lambda w, a, b, c: jnp.reshape(
        jnp.where(b[:, 0, None], jnp.reshape(w * a, (9, 4, 6)) * c, 0), SHAPE
    ),
    "a constant between": lambda w, a, b, c: jnp.where(INPUTS, w * a, 0) * c,
    "a constant after": lambda w, a, b, c: (w * a * b) * OUTPUTS,
    "a constant before": lambda w, a, b, c: (TAPS * w) * (c * (2 * b)),
}


@pytest.mark.parametrize("known", [False, True], ids=["argument", "constant"])
def test_several_masks_in_a_row(known):
    where = TAPS & INPUTS & OUTPUTS
    *ways, clean = check(CHAINS, (TAPS, INPUTS, OUTPUTS), where, known)
    check_poisoned(*ways, clean, where)


def test_nothing_acts():
    mask = np.zeros((3, 1, 1, 1), bool)
    for known in (False, True):
        *ways, clean = check(dict(list(FORMS.items())[::3]), (mask,), mask, known)
        check_poisoned(*ways, clean, mask)


def test_scalars_that_are_zero():
    forms = {
        "product": lambda w, m: w * m,
        "where": lambda w, m: jnp.where(m, w, 0),
        "on the left": lambda w, m: jnp.where(jnp.logical_not(m), 0, m * w),
    }
    for known in (False, True):
        check(forms, (np.zeros((), bool),), np.zeros((), bool), known)


def test_binarised_weights():
    def binarised(w):
        clipped = jnp.clip(w, -1, 1)
        sign = clipped + lax.stop_gradient(jnp.sign(w) - clipped)
        return sign * lax.stop_gradient(jnp.mean(jnp.abs(w), (0, 1, 2)))

    check({"binarised": binarised}, (), np.ones((), bool), False)


def found_in(fun, *args):
    leaves, treedef = jax.tree.flatten((args, {}))
    program = trace(fun, leaves, treedef).program
    found = map(Knowledge(program).find, program.equations)
    return [f for f in found if f is not None]


def test_what_is_known_is_left_out_at_run_time():
    fun = lambda w, m, x: conv(x, (w * TAPS) * m)  # noqa: E731
    (found,) = found_in(fun, WEIGHT, INPUTS, IMAGES)
    assert len(found.masks) == 1 and len(found.plan.taps) == 6
    fun = lambda w, m, x: conv(x, (w * TAPS) * m * np.zeros(6, np.float32))  # noqa: E731
    (found,) = found_in(fun, WEIGHT, INPUTS, IMAGES)
    assert not found.masks and found.plan.taps == ()


@pytest.mark.parametrize(
    "combine",
    [
        lambda w: (w * OUTPUTS) / jnp.ones((3, 1, 1, 1)),
        lambda w: jnp.zeros((1, 1, 4, 6)) * w[:1, :1] + w * TAPS * 0,
        lambda w: w[:1] * (TAPS * 0.0) - (OUTPUTS * 0.0),
        lambda w: lax.select(jnp.broadcast_to(TAPS, SHAPE), w * INPUTS, jnp.zeros(SHAPE)),
        lambda w: (w[:, :, :1] * OUTPUTS) / jnp.exp(w),
        lambda w: (0.0 * w[:1, :1, :1, :1]) / jnp.exp(w),
        lambda w: jnp.mean(w) * 0.0 / jnp.exp(w),
    ],
)
def test_zeros_have_the_shape_of_the_result(combine):
    kernel = jax.jit(combine)
    leaves, treedef = jax.tree.flatten(((WEIGHT,), {}))
    program = trace(kernel, leaves, treedef).program
    zeros = Knowledge(program).zeros(program.outputs[0])
    assert zeros.shape == SHAPE
    np.testing.assert_array_equal(zeros, kernel(WEIGHT) == 0)
    (found,) = found_in(lambda w, x: conv(x, kernel(w)), WEIGHT, IMAGES)
    assert found.plan.mask.shape == SHAPE and not found.masks


def test_a_stacked_mask_that_is_the_same_in_all_steps_stays_known():
    stacked = np.broadcast_to(OUTPUTS, (2, *SHAPE[:-1], 6))
    step = lambda total, w_m: (total + conv(IMAGES, w_m[0] * w_m[1]), None)  # noqa: E731

    def fun(w, stacked):
        return lax.scan(step, jnp.zeros((3, 3, 2, 6)), (jnp.stack([w, w]), stacked))[0]

    text = str(jax.make_jaxpr(perex.exact_masks(lambda w: fun(w, stacked)))(WEIGHT))
    assert "conv_general_dilated" in text
    other = stacked.copy()
    other[1, ..., 1] = False
    text = str(jax.make_jaxpr(perex.exact_masks(lambda w: fun(w, other)))(WEIGHT))
    assert "conv_general_dilated" not in text


@pytest.mark.parametrize("inside", [True, False], ids=["in the step", "before the scan"])
@pytest.mark.parametrize("argument", [True, False], ids=["argument", "constant"])
def test_a_mask_of_each_step_masks_that_step_alone(inside, argument):
    masks = np.ones((3, *SHAPE[:-1], 6), bool)
    masks[0, ..., 1] = masks[1, 0] = masks[2, ..., 1] = False
    step = lambda total, w_m: (total + conv(IMAGES, w_m[0] * w_m[1]), None)  # noqa: E731

    def fun(w, masks):
        kernels = jnp.stack([w, 2 * w, w])
        if not inside:
            kernels, masks = kernels * masks, jnp.ones(3)
        return lax.scan(step, jnp.zeros((3, 3, 2, 6)), (kernels, masks))[0]

    def square(exact):
        one = lambda w, m: fun(w, m if argument else masks)  # noqa: E731
        return lambda w: jnp.sum((perex.exact_masks(one) if exact else one)(w, masks) ** 2)

    found, expected = (jax.value_and_grad(square(exact))(WEIGHT) for exact in (True, False))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
