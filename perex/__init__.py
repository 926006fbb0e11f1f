"""Exact per-example gradients in JAX, as fast as an ordinary gradient."""

from perex._api import grad, value_and_grad
from perex._explain import explain
from perex._per_example import PerExample
from perex._rules import Rule, Site, register_rule

__all__ = ["PerExample", "Rule", "Site", "explain", "grad", "register_rule", "value_and_grad"]
