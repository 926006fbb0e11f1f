"""Finds the masks of convolution kernels in a program.

A kernel that was masked is zero at certain entries whatever the weights are. Which ones is found by
following these zeros from where they arise, a product with a known array or a selection by a
known condition, through whatever keeps them zeros: casts, rearrangements, scalings, sums.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from perex._compat import primitives as p
from perex._masks.plan import MaskPlan, plan_at_run_time, plan_known
from perex._trace import Equation, Program

# No more numbers than these are computed at trace time to get to know a mask.
_MOST_NUMBERS = 1 << 24
_DEEPEST = 100

_LAYOUT = {
    p.transpose_p, p.reshape_p, p.broadcast_in_dim_p, p.squeeze_p, p.rev_p, p.slice_p,
}  # fmt: skip
# Elementwise functions with f(0) = 0.
_ZERO_TO_ZERO = {
    p.convert_element_type_p, p.reduce_precision_p, p.copy_p, p.stop_gradient_p, p.neg_p, p.abs_p,
    p.sign_p, p.tanh_p, p.sin_p, p.sqrt_p, p.square_p, p.real_p, p.imag_p, p.conj_p, p.round_p,
    p.floor_p, p.ceil_p,
}  # fmt: skip
_KEEPS_MASK = {p.convert_element_type_p, p.copy_p, p.stop_gradient_p}


@dataclasses.dataclass(frozen=True, eq=False)
class RunTimeMask:
    """A mask whose value is known only when the program runs.

    Attributes:
      variable: the variable that holds it.
      zero: its value where the kernel is masked.
      layout: the rearrangements from there to the kernel, in order, each with the shape of its
        operand: products and sums on the way may have broadcast the mask to it.
    """

    variable: int
    zero: int
    layout: tuple[tuple[tuple[int, ...], Equation], ...] = ()

    def acts(self, value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns a boolean array of the kernel's shape, False where the kernel is masked."""
        value = value != self.zero
        for operand, equation in self.layout:
            value = equation.primitive.bind(jnp.broadcast_to(value, operand), **equation.params)
        return jnp.broadcast_to(value, shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The mask of one convolution.

    Attributes:
      plan: how to compute the convolution.
      masks: the masks that become known only at run time; an entry acts where all let it.
      known: what was known of the mask before where there are such masks: bool, False where the
        kernel is masked.
    """

    plan: MaskPlan
    masks: tuple[RunTimeMask, ...] = ()
    known: np.ndarray | None = None

    def apply(self, x: jax.Array, kernel: jax.Array, values: Mapping[int, Any]) -> jax.Array:
        """Evaluates the equation; ``values`` holds the variables of ``self.masks``."""
        if not self.masks:
            return self.plan.convolve(x, kernel)
        acts = [mask.acts(values[mask.variable], kernel.shape) for mask in self.masks]
        if self.known is not None:
            acts.append(jnp.asarray(self.known))
        return self.plan.convolve(x, kernel, functools.reduce(jnp.logical_and, acts))


class Knowledge:
    """What is known of the values in a program before it runs.

    Args:
      program: the program.
      values: values of some of the inputs; only read where a kernel depends on them.
      outer: for the body of a loop or a branch: the knowledge of the enclosing program, and for
        some of the body's inputs the outer variable and whether a slice of it enters.
      is_mask: whether an unknown variable that a kernel is multiplied with is a mask, and not,
        say, a scale that is learnt.
    """

    def __init__(
        self,
        program: Program,
        values: Mapping[int, Any] | None = None,
        outer: tuple[Knowledge, Mapping[int, tuple[int, bool]]] | None = None,
        is_mask: Callable[[int], bool] = lambda variable: False,
    ) -> None:
        self.program = program
        self._values = dict(values or {})
        self._outer = outer
        self._is_mask = is_mask
        self._maker = {v: e for e in program.equations for v in e.outputs}
        self._memo: dict[int, Any] = {}
        self._zeros_memo: dict[int, np.ndarray | None] = {}
        self._masks_memo: dict[int, tuple[RunTimeMask, ...]] = {}

    def find(self, equation: Equation) -> Found | None:
        """Returns the mask of a convolution, or None where it has none.

        Args:
          equation: an equation of the program.

        Returns:
          None too where nothing is masked or the equation is no convolution.
        """
        if equation.primitive is not p.conv_general_dilated_p:
            return None
        kernel = equation.inputs[1]
        if kernel in self.program.constants:
            return None  # zeros in an array that is just given are not known to be a mask
        zeros = self.zeros(kernel)
        masks = self._run_time_masks(kernel)
        if not masks or (zeros is not None and zeros.all()):
            return None if zeros is None else Found(plan_known(~zeros, equation.params))
        known = None if zeros is None else ~zeros
        plan = plan_at_run_time(self.program.avals[kernel].shape, equation.params, known)
        return Found(plan, masks, known)

    def value(self, variable: int) -> Any | None:
        """Returns the value of a variable where it depends on known values alone."""
        if variable not in self._memo:
            self._memo[variable] = self._fold(variable)
        return self._memo[variable]

    def zeros(self, variable: int, depth: int = 0) -> np.ndarray | None:
        """Returns where a variable is surely zero, as a boolean array; None if nowhere."""
        if variable not in self._zeros_memo:
            zeros = self._find_zeros(variable, depth) if depth < _DEEPEST else None
            if zeros is not None:
                # Operands may be scalars or have axes of size one where the result has not.
                zeros = np.broadcast_to(zeros, self.program.avals[variable].shape)
            self._zeros_memo[variable] = zeros if zeros is not None and zeros.any() else None
        return self._zeros_memo[variable]

    def enter(
        self, program: Program, operands: Sequence[int | None], sliced: Sequence[bool]
    ) -> Knowledge:
        """Returns the knowledge of a body.

        Args:
          program: the body.
          operands: for each of its inputs the variable that enters, or None if it varies.
          sliced: for each of its inputs whether a slice of the variable enters.
        """
        pairs = zip(program.inputs, operands, sliced, strict=True)
        outer = {inner: (v, cut) for inner, v, cut in pairs if v is not None}
        return Knowledge(program, None, (self, outer))

    def _given(self, variable: int) -> Any | None:
        """Returns the value of an input or a constant."""
        value = self.program.constants.get(variable, self._values.get(variable))
        if value is None and self._outer is not None and variable in self._outer[1]:
            knowledge, (outer, sliced) = self._outer[0], self._outer[1][variable]
            value = None if sliced else knowledge.value(outer)
        return None if isinstance(value, Tracer) else value

    def _fold(self, variable: int) -> Any | None:
        needed, equations, numbers = {variable}, [], 0
        for equation in reversed(self.program.preparation(variable)[0]):
            if not needed.isdisjoint(equation.outputs):
                avals = (self.program.avals[v] for v in equation.outputs)
                numbers += sum(math.prod(getattr(aval, "shape", ())) for aval in avals)
                if equation.source.effects or numbers > _MOST_NUMBERS:
                    return None
                equations.append(equation)
                needed.update(equation.inputs)
        made = {v for equation in equations for v in equation.outputs}
        environment = {v: self._given(v) for v in needed - made}
        if any(value is None for value in environment.values()):
            return None
        with jax.ensure_compile_time_eval():
            for equation in reversed(equations):
                results = equation.bind([environment[v] for v in equation.inputs])
                environment.update(zip(equation.outputs, results, strict=True))
        return environment[variable]

    def _find_zeros(self, variable: int, depth: int) -> np.ndarray | None:
        value = self.value(variable)
        if value is not None:
            return np.asarray(value) == 0
        equation = self._maker.get(variable)
        if equation is None:
            return self._outer_zeros(variable)

        def of(position: int) -> np.ndarray:
            operand = equation.inputs[position]
            zeros = self.zeros(operand, depth + 1)
            return np.zeros(self.program.avals[operand].shape, bool) if zeros is None else zeros

        primitive = equation.primitive
        if _first_keeps_zeros(equation):
            return of(0)
        if primitive is p.mul_p:
            return of(0) | of(1)
        if primitive in (p.add_p, p.sub_p, p.complex_p):
            return of(0) & of(1)
        if primitive is p.select_n_p:
            return self._selected_zeros(equation, [of(i) for i in range(1, len(equation.inputs))])
        if primitive in _LAYOUT or primitive is p.concatenate_p:
            return _rearrange(equation, *map(of, range(len(equation.inputs))))
        if primitive is p.pad_p:
            return _rearrange(equation, of(0), of(1))
        return None

    def _outer_zeros(self, variable: int) -> np.ndarray | None:
        if self._outer is None or variable not in self._outer[1]:
            return None
        outer, sliced = self._outer[1][variable]
        zeros = self._outer[0].zeros(outer)
        return zeros.all(0) if sliced and zeros is not None else zeros

    def _selected_zeros(self, equation: Equation, cases: Sequence[np.ndarray]) -> np.ndarray:
        which = self.value(equation.inputs[0])
        if which is None:
            return np.logical_and.reduce(cases)
        which = np.broadcast_to(np.asarray(which).astype(int), cases[0].shape)
        return np.take_along_axis(np.stack(cases), which[None], 0)[0]

    def _run_time_masks(self, variable: int, depth: int = 0) -> tuple[RunTimeMask, ...]:
        """Returns the masks of a variable that become known only at run time, each once."""
        if variable not in self._masks_memo:
            found = self._find_masks(variable, depth) if depth <= _DEEPEST else ()
            unique = {self._identity(mask): mask for mask in found}
            self._masks_memo[variable] = tuple(unique.values())
        return self._masks_memo[variable]

    def _find_masks(self, variable: int, depth: int) -> Iterator[RunTimeMask]:
        equation = self._maker.get(variable)
        if equation is None:
            return

        def of(position: int) -> tuple[RunTimeMask, ...]:
            return self._run_time_masks(equation.inputs[position], depth + 1)

        primitive = equation.primitive
        if primitive in _LAYOUT:
            step = (self.program.avals[equation.inputs[0]].shape, equation)
            yield from (RunTimeMask(m.variable, m.zero, (*m.layout, step)) for m in of(0))
        elif _first_keeps_zeros(equation):
            yield from of(0)
        elif primitive is p.select_n_p and len(equation.inputs) == 3:
            which, *cases = equation.inputs
            for number, case in enumerate(cases):
                zeros = self.zeros(case)
                if zeros is not None and zeros.all():
                    if not self._is_settled(which):
                        yield RunTimeMask(which, number)
                    yield from of(2 - number)
        elif primitive is p.mul_p:
            for position, operand in enumerate(equation.inputs):
                if self.looks_like_mask(operand):
                    yield RunTimeMask(operand, 0)
                else:
                    yield from of(position)
        elif primitive is p.complex_p:
            # A product of a real and a complex array is one of each part in jax from 0.12.1 on.
            # What masks both parts masks the number.
            imaginary = set(map(self._identity, of(1)))
            yield from (mask for mask in of(0) if self._identity(mask) in imaginary)

    def _identity(self, mask: RunTimeMask) -> tuple[Any, ...]:
        """What is the same for masks that let the same entries act."""
        variable = mask.variable
        while True:
            equation = self._maker.get(variable)
            if equation is None or equation.primitive is not p.convert_element_type_p:
                break
            source = self.program.avals[equation.inputs[0]].dtype
            target = self.program.avals[variable].dtype
            integer = jnp.issubdtype(source, jnp.integer) and jnp.issubdtype(target, jnp.inexact)
            if not (integer or jnp.issubdtype(source, jnp.bool_)):
                break  # What is not zero may have become it.
            variable = equation.inputs[0]
        layout = ((shape, step.primitive, str(step.params)) for shape, step in mask.layout)
        return (variable, mask.zero, *layout)

    def _is_settled(self, variable: int) -> bool:
        """Whether it is known before where a variable is zero, in all steps of a loop alike."""
        if self.value(variable) is not None:
            return True
        while variable in self._maker:
            equation = self._maker[variable]
            if equation.primitive not in _KEEPS_MASK and equation.primitive not in _LAYOUT:
                return False
            variable = equation.inputs[0]
        if self._outer is None or variable not in self._outer[1]:
            return False
        outer, sliced = self._outer[1][variable]
        value = self._outer[0].value(outer)
        if value is None or not sliced:
            return False
        zeros = np.asarray(value) == 0
        return bool((zeros.all(0) == zeros.any(0)).all())

    def looks_like_mask(self, variable: int) -> bool:
        """Whether an unknown factor of a kernel is a mask.

        It is where it was boolean or an integer once; if it is not a mere scalar, then also where
        the transform says so and where it passed through ``stop_gradient``.
        """
        if self._is_settled(variable):
            return False
        is_scalar = not self.program.avals[variable].shape
        while True:
            if not jnp.issubdtype(self.program.avals[variable].dtype, jnp.inexact):
                return True
            if self._is_mask(variable) and not is_scalar:
                return True
            equation = self._maker.get(variable)
            if equation is None:
                if self._outer is None or variable not in self._outer[1]:
                    return False
                knowledge, operands = self._outer
                return knowledge.looks_like_mask(operands[variable][0])
            if equation.primitive is p.stop_gradient_p and not is_scalar:
                return True
            if equation.primitive not in _KEEPS_MASK and equation.primitive not in _LAYOUT:
                return False
            variable = equation.inputs[0]


def _first_keeps_zeros(equation: Equation) -> bool:
    """Whether the result is zero wherever the first operand is."""
    if equation.primitive is p.integer_pow_p:
        return equation.params["y"] > 0
    return equation.primitive in _ZERO_TO_ZERO or equation.primitive is p.div_p


def _rearrange(equation: Equation, *zeros: np.ndarray) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        operands = [jnp.asarray(z) for z in zeros]
        return np.asarray(equation.primitive.bind(*operands, **equation.params))
