"""Exact per-example gradients in JAX, as fast as an ordinary gradient."""

from perex._api import grad, value_and_grad
from perex._clipped_grad import ClippedGradStats, clipped_grad
from perex._explain import explain
from perex._grad_norms import grad_norms
from perex._masks import exact_masks
from perex._per_example import PerExample
from perex._privacy import dp_clip, dp_noise, sensitivity
from perex._rules import Rule, Site, register_rule
from perex._rules.conv import register_conv_algorithm

__all__ = [
    "ClippedGradStats",
    "PerExample",
    "Rule",
    "Site",
    "clipped_grad",
    "dp_clip",
    "dp_noise",
    "exact_masks",
    "explain",
    "grad",
    "grad_norms",
    "register_conv_algorithm",
    "register_rule",
    "sensitivity",
    "value_and_grad",
]
