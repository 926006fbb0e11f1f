"""Per-example rules, one file a primitive, and their registry."""

from perex._compat import primitives
from perex._rules.conv import ConvRule
from perex._rules.dot_general import DotGeneralRule
from perex._rules.dynamic_slice import DynamicSliceRule
from perex._rules.elementwise import ProductRule, SumRule
from perex._rules.gather import GatherRule
from perex._rules.registry import (
    Rule,
    Site,
    check_options,
    find_rule,
    knows_norms,
    per_example,
    register_rule,
    settled_norms,
    site_norms,
    site_sum,
)
from perex._rules.scatter_add import ScatterAddRule

__all__ = [
    "Rule",
    "Site",
    "check_options",
    "find_rule",
    "knows_norms",
    "per_example",
    "register_rule",
    "settled_norms",
    "site_norms",
    "site_sum",
]

register_rule(primitives.conv_general_dilated_p, ConvRule())
register_rule(primitives.dot_general_p, DotGeneralRule())
register_rule(primitives.add_p, SumRule())
register_rule(primitives.sub_p, SumRule())
register_rule(primitives.mul_p, ProductRule())
register_rule(primitives.div_p, ProductRule())
register_rule(primitives.dynamic_slice_p, DynamicSliceRule(GatherRule()))
register_rule(primitives.gather_p, GatherRule())
register_rule(primitives.scatter_add_p, ScatterAddRule())
