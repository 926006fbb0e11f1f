"""Exact masked convolutions: find masks, split kernels into pieces, convolve with these."""

from perex._masks.exact import exact_masks
from perex._masks.find import Found, Knowledge
from perex._masks.plan import MaskPlan, masked_convolution, plan_at_run_time, plan_known

__all__ = [
    "Found",
    "Knowledge",
    "MaskPlan",
    "exact_masks",
    "masked_convolution",
    "plan_at_run_time",
    "plan_known",
]
