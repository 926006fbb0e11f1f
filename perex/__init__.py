"""Exact per-example gradients in JAX, as fast as an ordinary gradient."""

from perex._api import grad, value_and_grad
from perex._clipped_grad import ClippedGradStats, clipped_grad
from perex._explain import explain
from perex._grad_norms import grad_norms
from perex._per_example import PerExample
from perex._rules import Rule, Site, register_rule

__all__ = [
    "ClippedGradStats",
    "PerExample",
    "Rule",
    "Site",
    "clipped_grad",
    "explain",
    "grad",
    "grad_norms",
    "register_rule",
    "value_and_grad",
]
