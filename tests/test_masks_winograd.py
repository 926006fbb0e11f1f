"""Masked taps leak on a backend with Winograd convolutions, and do not under `exact_masks`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import winograd
from jax import lax

from perex._masks import exact_masks

NUMBERS = ("NHWC", "HWIO", "NHWC")
CHANNELS = 128


def conv(x, kernel, padding="SAME"):
    return lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=NUMBERS)


def draw(seed, shape, scale=1.0):
    return scale * jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("tile", [2, 4])
@pytest.mark.parametrize("padding", ["SAME", ((1, 2), (0, 0))])
def test_the_emulation_is_a_convolution(padding, tile):
    x, kernel = draw(0, (2, 7, 6, 3)), draw(1, (3, 3, 3, 4))
    loss = lambda x, k: (conv(x, k, padding) ** 2).sum()  # noqa: E731
    plain = jax.value_and_grad(loss, (0, 1))(x, kernel)
    emulated = winograd.backend(jax.value_and_grad(loss, (0, 1)), tile)(x, kernel)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(emulated), strict=True):
        # Float32 sums of 27 to 84 products, larger by the transforms' growth.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(abs(a).max()))
    assert not np.array_equal(plain[1][1], emulated[1][1])


def layers(count):
    """Masked layers as in google/jax#12159: a 3x3 kernel without its last row, 128 channels."""
    mask = jnp.ones((3, 3, CHANNELS, CHANNELS)).at[2].set(0)
    weights = [draw(i, mask.shape, (9 * CHANNELS) ** -0.5) for i in range(count)]

    def apply(weights, x):
        for weight in weights:
            x = conv(x, mask * weight)
        return x

    return apply, weights, draw(9, (1, 5, 5, CHANNELS))


def centre(apply):
    return lambda weights, x: apply(weights, x)[0, 2, 2].sum()


@pytest.mark.parametrize("count", [1, 2])
def test_the_emulated_backend_leaks(count):
    apply, weights, x = layers(count)
    run = winograd.backend(apply)
    assert abs(run(weights, x.at[:, 3:].add(1.0)) - run(weights, x))[:, :3].max() > 1e-7
    gradient = winograd.backend(jax.grad(centre(apply), argnums=1))(weights, x)
    leak = abs(gradient[:, 3:]).max()
    assert 1e-9 < leak < 1e-5


@pytest.mark.parametrize("count", [1, 2])
def test_exact_masks_do_not_leak(count):
    apply, weights, x = layers(count)
    exact = exact_masks(apply)
    run = winograd.backend(exact)
    for change in (x.at[:, 3:].add(1.0), x.at[:, 3:].set(jnp.nan), x.at[:, 3:].set(-jnp.inf)):
        np.testing.assert_array_equal(run(weights, change)[:, :3], run(weights, x)[:, :3])
    for gradient in (jax.grad(centre(exact), 1), exact_masks(jax.grad(centre(apply), 1))):
        result = winograd.backend(gradient)(weights, x)
        outside = np.ones(x.shape, bool)
        reach = slice(2 - count, 3 + count)
        outside[:, 2 - count : 3, reach] = False
        np.testing.assert_array_equal(result[outside], 0)
        assert (result[~outside] != 0).all()
        # Plain float32 sums over 1152 products a layer.
        np.testing.assert_allclose(result, jax.grad(centre(apply), 1)(weights, x), atol=1e-5)


def test_kernel_gradients_do_not_see_masked_inputs():
    apply, weights, x = layers(2)
    for f, leaks in ((apply, True), (exact_masks(apply), False)):
        gradient = winograd.backend(jax.grad(lambda w, x, f=f: f(w, x)[0, 2].sum()))
        changed, same = gradient(weights, x.at[:, 3:].add(100.0)), gradient(weights, x)
        equal = [np.array_equal(a, b) for a, b in zip(changed, same, strict=True)]
        assert all(equal) is not leaks


def test_square_rectangles_inside_larger_kernels():
    # The taps that act are a 3x3 square, and F(4x4, 3x3) reads masked rows below it.
    mask = jnp.ones((5, 3, CHANNELS, CHANNELS)).at[3:].set(0)
    weight, x = draw(0, mask.shape, 0.03), draw(1, (1, 9, 5, CHANNELS))
    whole = lambda w, x: conv(x[:, :-2], w[:3], ((4, 0), (1, 1)))  # noqa: E731
    exact = exact_masks(lambda w, x: conv(x, mask * w, ((4, 0), (1, 1))))
    for fun, leaks in ((whole, True), (exact, False)):
        run = winograd.backend(fun, tile=4)
        same = []
        for row in (0, 3, 4, 5, 8):
            changed = x.at[:, : max(row - 4, 0)].add(9.0).at[:, max(row - 1, 0) :].add(9.0)
            same.append(np.array_equal(run(weight, changed)[:, row], run(weight, x)[:, row]))
        assert all(same) is not leaks


class PixelCNN(nn.Module):
    """7x7 of type A, then 3x3 of type B, with colours in the order red, green, blue."""

    @nn.compact
    def __call__(self, x):
        for number, features in enumerate((12, 12, 12, 3)):
            size = 7 if number == 0 else 3
            mask = self.mask(size, x.shape[-1], features, strict=number == 0)
            x = nn.Conv(features, (size, size), mask=mask)(x)
            x = nn.relu(x) if number < 3 else x
        return x

    def mask(self, size, inputs, outputs, strict):
        rows, columns = jnp.indices((size, size))
        earlier = rows * size + columns < size**2 // 2
        before, after = jnp.arange(inputs)[:, None] % 3, jnp.arange(outputs) % 3
        centre = before < after if strict else before <= after
        is_centre = rows * size + columns == size**2 // 2
        return (earlier[..., None, None] | (is_centre[..., None, None] & centre)).astype(float)


def test_a_pixelcnn_with_colours_is_autoregressive_to_the_bit():
    model, x = PixelCNN(), draw(0, (1, 8, 8, 3))
    params = model.init(jax.random.key(1), x)
    exact, leaky = winograd.backend(exact_masks(model.apply)), winograd.backend(model.apply)
    order = np.arange(8 * 8 * 3).reshape(x.shape)
    clean, leaked = exact(params, x), leaky(params, x)
    leaks = []
    for position in (0, 1, 2, 85, 119, 191):
        later = order >= position  # all that must not influence this position and the ones before
        changed = jnp.where(later, draw(2, x.shape), x)
        same = order <= position
        np.testing.assert_array_equal(exact(params, changed)[same], clean[same])
        poisoned = exact(params, jnp.where(later, jnp.nan, x))
        np.testing.assert_array_equal(poisoned[same], clean[same])
        leaks.append(not np.array_equal(leaky(params, changed)[same], leaked[same]))
    assert any(leaks)
    np.testing.assert_allclose(clean, model.apply(params, x), atol=1e-5)


def test_a_pixelcnn_has_an_exact_receptive_field():
    model, x = PixelCNN(), draw(0, (1, 8, 8, 3))
    params = model.init(jax.random.key(1), x)
    exact = exact_masks(model.apply)
    gradient = winograd.backend(jax.grad(lambda x, colour: exact(params, x)[0, 4, 4, colour]))
    for colour in range(3):
        result = gradient(x, colour)
        later = np.arange(8 * 8 * 3).reshape(x.shape) >= (4 * 8 + 4) * 3 + colour
        np.testing.assert_array_equal(result[later], 0)
        assert (result[~later] != 0).any()
