"""The rules of ``add``, ``sub``, ``mul`` and ``div``: entry by entry, broadcast or not."""

import numpy as np
import pytest
from jax import lax
from sites import by_loop, check_rule, site_of

from perex._rules.elementwise import ProductRule, SumRule

ROUNDING = 1e-12
SHAPES = {
    "alike": ((3, 4), (3, 4)),
    "a row": ((1, 4), (3, 4)),
    "an axis of length one": ((3, 1), (3, 4)),
    "all axes of length one": ((1, 1), (3, 4)),
    "the other is a row": ((3, 4), (1, 4)),
    "a scalar": ((), (3, 4)),
    "scalars": ((), ()),
}
EQUATIONS = {
    "added": (lax.add, 0),
    "added to": (lax.add, 1),
    "subtracted from": (lax.sub, 0),
    "subtracted": (lax.sub, 1),
    "multiplied": (lax.mul, 0),
    "multiplier": (lax.mul, 1),
    "divided": (lax.div, 0),
}


def rule_of(function):
    return SumRule() if function in (lax.add, lax.sub) else ProductRule()


@pytest.mark.parametrize("dtype", [np.float64, np.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("equation", EQUATIONS.values(), ids=EQUATIONS)
def test_equations_and_shapes(equation, shapes, dtype, x64):
    function, argument = equation
    rng = np.random.default_rng(0)

    def draw(shape):
        return (rng.standard_normal((*shape, 2)) @ [1, 1j if dtype is np.complex128 else 0]).astype(
            dtype
        )

    parameter, other = draw(shapes[0]), draw((5, *shapes[1]))
    operands = [other[0], other[0]]
    operands[argument] = parameter
    site = site_of(function, argument, *operands)
    cotangent = draw((5, *site.out.shape))
    expected = by_loop(function, argument, parameter, (other,), cotangent)
    rule = rule_of(function)
    inputs = (other,) if rule.reads_inputs else ()
    check_rule(rule, site, inputs, cotangent, expected, ROUNDING)


def test_a_denominator_is_not_covered():
    site = site_of(lax.div, 1, np.ones(3), np.ones(3))
    assert "denominator" in ProductRule().covers(site)
    assert ProductRule().covers(site_of(lax.div, 0, np.ones(3), np.ones(3))) is None


@pytest.mark.parametrize("rule, entries", [(SumRule(), 1 << 16), (ProductRule(), 1 << 15)])
def test_it_pays_where_the_leaf_is_larger_than_what_comes_home(rule, entries):
    function = lax.add if isinstance(rule, SumRule) else lax.mul
    for size, pays in ((entries, True), (entries + 1, False)):
        site = site_of(function, 0, np.ones(size, np.float32), np.ones(size, np.float32))
        assert rule.pays(site, leaf_size=1 << 16) is pays
        assert not rule.pays(site, leaf_size=(1 << 14) - 1)
