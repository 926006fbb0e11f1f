"""What a plan is made of: a step for each equation, sites, fallbacks. Nothing is decided here.

Every variable of a program depends on parameters (bit `PARAM`), on the example (bit `DATA`), on
both (`ACTIVE`) or on neither.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from perex import _regions
from perex._masks import Found
from perex._regions import DATA, PARAM
from perex._rules import Site
from perex._trace import Equation, Program

ACTIVE = PARAM | DATA


@dataclasses.dataclass(frozen=True, eq=False)
class Prepare:
    """Evaluates an equation that no example enters.

    Attributes:
      equation: the equation.
      plain: whether its results are wanted as constants of the differentiation (for sites).
      differentiable: whether they are wanted as functions of the parameters (for the fallback).
    """

    equation: Equation
    plain: bool
    differentiable: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Apply:
    """Evaluates an equation that depends on the example as it stands.

    Attributes:
      equation: the equation.
      found: for a masked convolution, how it is evaluated exactly instead.
      apart: for a convolution with a kernel that is differentiated, its description as a site of
        the kernel: its rule keeps examples apart, where the convolution that ``vmap`` makes of the
        kernel's gradient may mix them (XLA makes it dense in float64, where 0 * NaN = NaN).
    """

    equation: Equation
    found: Found | None = None
    apart: Site | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Tap:
    """Evaluates a site and taps its inputs and cotangent.

    Attributes:
      equation: the equation.
      index: the site's number in the plan.
      site: the site's description.
      active: for each operand other than the parameter, whether a gradient flows through it.
    """

    equation: Equation
    index: int
    site: Site
    active: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Evaluates an equation with bodies, re-emitted over the plans of its bodies.

    Attributes:
      equation: the equation.
      form: which operands enter which body, and how (see `perex._regions`).
      plans: a plan for each body.
      first: the number, in the enclosing plan, of the first site of each body.
    """

    equation: Equation
    form: _regions.Form
    plans: tuple[Plan, ...]
    first: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class SiteUse:
    """A site, seen from the top of a plan.

    Attributes:
      site: the description.
      rule: its rule.
      variable: the parameter operand, a variable of the innermost plan.
      chain: the regions that enclose the site, outermost first, each with the number of the body.
      stack: for each enclosing scan, outermost first: its length, and whether the parameter operand
        is a different one at each step (stacked layers) or the same (a shared weight).
      required: the inputs of the plan from which the operand is prepared.
      leaves: the parameter leaves on which the operand depends.
      equation: the innermost equation.
    """

    site: Site
    rule: Any
    variable: int
    chain: tuple[tuple[Region, int], ...]
    stack: tuple[tuple[int, bool], ...]
    required: frozenset[int]
    leaves: frozenset[int]
    equation: Equation


@dataclasses.dataclass(frozen=True, eq=False)
class Fallback:
    """A use of parameters that goes the plain way, with the reason."""

    equation: Equation | None
    leaves: frozenset[int]
    reason: str


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What to do with each equation of a program.

    Attributes:
      program: the program.
      dependence: the bits of each variable.
      steps: one step an equation, in order.
      sites: all sites, those within regions included.
      fallbacks: all other uses of parameters.
      plain: the `PARAM` inputs wanted as constants of the differentiation.
      differentiable: the `PARAM` inputs wanted as what is differentiated.
      plain_enough: whether nothing is lost by evaluating the program as it stands.
    """

    program: Program
    dependence: tuple[int, ...]
    steps: tuple[Any, ...]
    sites: tuple[SiteUse, ...]
    fallbacks: tuple[Fallback, ...]
    plain: frozenset[int]
    differentiable: frozenset[int]
    plain_enough: bool

    def preparation(self, variable: int) -> tuple[tuple[Equation, ...], frozenset[int]]:
        """Returns the equations and the program inputs from which ``variable`` is computed."""
        return self.program.preparation(variable)
