"""A backend that computes 3x3 convolutions by Winograd transforms, emulated in plain JAX.

CPUs compute convolutions tap by tap; many GPUs do not, and there a masked tap leaks. `backend`
runs a function as such a GPU would: every 3x3 convolution with step 1 is computed by F(2x2, 3x3)
or F(4x4, 3x3), and every kernel gradient of one by the transpose of that (Lavin and Gray, 2015,
arXiv:1509.09308). Apply it outside of differentiation: ``backend(jax.grad(f))``.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# y = A^T [(G g G^T) * (B^T d B)] A for an input tile d, a 3x3 kernel g and a result y, of 2x2 from
# 4x4 or of 4x4 from 6x6: the matrices (B, G, A) by the size of the result. In the larger one, each
# result also reads inputs of its tile that lie outside of its window.
MATRICES = {
    2: (
        np.array([[1, 0, 0, 0], [0, 1, -1, 1], [-1, 1, 1, 0], [0, 0, 0, -1]], float),
        np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], float),
        np.array([[1, 0], [1, 1], [1, -1], [0, -1]], float),
    ),
    4: (
        np.array(
            [
                [4, 0, 0, 0, 0, 0],
                [0, -4, 4, -2, 2, 4],
                [-5, -4, -4, -1, -1, 0],
                [0, 1, -1, 2, -2, -5],
                [1, 1, 1, 1, 1, 0],
                [0, 0, 0, 0, 0, 1],
            ],
            float,
        ),
        np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]) / 24,
        np.array(
            [
                [1, 0, 0, 0],
                [1, 1, 1, 1],
                [1, -1, 1, -1],
                [1, 2, 4, 8],
                [1, -2, 4, -8],
                [0, 0, 0, 1],
            ],
            float,
        ),
    ),
}


def _transform(matrix, values):
    """Applies a matrix along the first two axes."""
    matrix = jnp.asarray(matrix, values.dtype)
    return jnp.einsum("ia,jb,ab...->ij...", matrix, matrix, values, precision="highest")


def _tiles(values, size, step, counts):
    """Cuts the last two axes into tiles: ``[..., H, W] -> [size, size, ..., *counts]``."""
    need = [step * (count - 1) + size for count in counts]
    widths = [(0, max(0, n - have)) for n, have in zip(need, values.shape[-2:], strict=True)]
    values = jnp.pad(values, [(0, 0)] * (values.ndim - 2) + widths)
    rows = [values[..., i : i + step * (counts[0] - 1) + 1 : step, :] for i in range(size)]
    return jnp.stack(
        [
            jnp.stack([r[..., j : j + step * (counts[1] - 1) + 1 : step] for j in range(size)])
            for r in rows
        ]
    )


def forward(x, kernel, tile=2):
    """Convolves ``x [N, C, H, W]`` with ``kernel [O, C, 3, 3]``, without padding."""
    B, G, A = MATRICES[tile]
    out = [n - 2 for n in x.shape[2:]]
    counts = [-(-n // tile) for n in out]
    data = _transform(B.T, _tiles(x, tile + 2, tile, counts))
    weights = _transform(G, jnp.moveaxis(kernel, (2, 3), (0, 1)))
    product = jnp.einsum("ijnchw,ijoc->ijnohw", data, weights, precision="highest")
    y = _transform(A.T, product)  # [tile, tile, N, O, h, w]
    y = y.transpose(2, 3, 4, 0, 5, 1)
    y = y.reshape(*y.shape[:2], tile * counts[0], tile * counts[1])
    return y[..., : out[0], : out[1]]


def kernel_gradient(x, cotangent, tile=2):
    """Returns ``[O, C, 3, 3]`` from ``x [N, C, H, W]`` and ``cotangent [N, O, H - 2, W - 2]``."""
    B, G, A = MATRICES[tile]
    counts = [-(-n // tile) for n in cotangent.shape[2:]]
    data = _transform(B.T, _tiles(x, tile + 2, tile, counts))
    back = _transform(A, _tiles(cotangent, tile, tile, counts))
    product = jnp.einsum("ijnchw,ijnohw->ijoc", data, back, precision="highest")
    return jnp.moveaxis(_transform(G.T, product), (0, 1), (2, 3))


def _convolve(x, kernel, params, tile):
    """Computes a convolution equation as the backend does, or returns None to leave it."""
    lhs, rhs, out = params["dimension_numbers"]
    ones = (*params["window_strides"], *params["lhs_dilation"], *params["rhs_dilation"])
    plain = len(lhs) == 4 and set(ones) == {1} and params["batch_group_count"] == 1
    groups = params["feature_group_count"]
    low_high = np.array(params["padding"])
    if not plain or (low_high < 0).any():
        return None
    x, kernel = jnp.transpose(x, lhs), jnp.transpose(kernel, rhs)
    x = jnp.pad(x, ((0, 0), (0, 0), *map(tuple, low_high)))
    window = kernel.shape[2:]
    result = tuple(n - k + 1 for n, k in zip(x.shape[2:], window, strict=True))
    if window == (3, 3):
        parts = zip(jnp.split(x, groups, 1), jnp.split(kernel, groups, 0), strict=True)
        y = jnp.concatenate([forward(*part, tile) for part in parts], 1)
    elif result == (3, 3) and groups == 1:
        # JAX writes the kernel gradient as a convolution over the images: C and N change places.
        y = kernel_gradient(x.swapaxes(0, 1), kernel.swapaxes(0, 1), tile).swapaxes(0, 1)
    else:
        return None
    return jnp.transpose(y, np.argsort(out).tolist())


def _holds_convolution(jaxpr):
    return any(
        equation.primitive is lax.conv_general_dilated_p or any(map(_holds_convolution, inner))
        for equation in jaxpr.eqns
        for inner in [list(_inner(equation))]
    )


def _inner(equation):
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield value


def _is_jaxpr(value):
    return hasattr(value, "eqns")


_CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint"}


def _run(jaxpr, consts, tile, *arguments):
    environment = dict(zip(jaxpr.constvars, consts, strict=True))
    environment.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom):
        return atom.val if hasattr(atom, "val") else environment[atom]

    for equation in jaxpr.eqns:
        inputs = list(map(read, equation.invars))
        outputs = None
        if equation.primitive is lax.conv_general_dilated_p:
            x, kernel = inputs
            outputs = _convolve(x, kernel, equation.params, tile)
            outputs = None if outputs is None else [outputs]
        elif any(map(_holds_convolution, _inner(equation))):
            if equation.primitive.name not in _CALLS:
                raise ValueError(f"winograd.backend does not enter {equation.primitive}")
            body = next(_inner(equation))
            if hasattr(body, "jaxpr"):
                outputs = _run(body.jaxpr, body.consts, tile, *inputs)
            else:
                outputs = _run(body, (), tile, *inputs)
        if outputs is None:
            params = equation.primitive.get_bind_params(equation.params)
            outputs = equation.primitive.bind(*inputs, **params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        environment.update(zip(equation.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


def backend(fun, tile=2):
    """Returns ``fun``, jitted, as a backend with transforms F(tile x tile, 3x3) computes it."""

    @jax.jit
    @functools.wraps(fun)
    def wrapped(*args):
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        results = _run(closed.jaxpr, closed.consts, tile, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return wrapped
