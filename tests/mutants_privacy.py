"""Faults of what privacy rests on: norms, their bounds, clipping, sums, noise."""

from mutant import Mutant

_SOUND = (
    "tests/test_soundness.py::test_pairs_that_nearly_cancel",
    "tests/test_soundness.py::test_scales",
)
_CLIP = ("tests/test_clipping.py",)
_SUMS = ("tests/test_clipped_grad.py::test_equals_the_loop",)

_NORMS = (
    Mutant(
        "perex/_norms.py",
        "usable = (squares >= low) & (squares <= high)",
        "usable = squares <= high",
        "squares that underflow are taken as they are",
        _CLIP,
    ),
    Mutant(
        "perex/_norms.py",
        "usable = (squares >= low) & (squares <= high)",
        "usable = squares >= low",
        "squares that overflow are taken as they are",
        _CLIP,
    ),
    Mutant(
        "perex/_norms.py",
        "return jax.lax.cond(jnp.all(usable), as_is, rescaled)",
        "return jax.lax.cond(jnp.any(usable), as_is, rescaled)",
        "one usable example speaks for all",
        _CLIP,
    ),
    Mutant(
        "perex/_norms.py",
        "sums = (jnp.sum(part * ratio * ratio, axis=1)",
        "sums = (jnp.sum(part * ratio, axis=1)",
        "squares are scaled like norms",
        _CLIP,
    ),
    Mutant(
        "perex/_norms.py",
        "return jnp.where(jnp.expand_dims(weights != 0, tuple(range(1, leaf.ndim))), leaf, 0)",
        "return leaf",
        "the NaN of an example of weight zero reaches the sum",
        _CLIP,
    ),
    Mutant(
        "perex/_rules/scales.py",
        "    square = rest * rest\n",
        "    square = rest\n",
        "what a scale cannot take is not squared",
        ("tests/test_outer_product.py::test_scales_whose_product_is_out_of_range",),
    ),
    Mutant(
        "perex/_rules/scales.py",
        "    scale = unit_scale(array)\n",
        "    scale = jnp.ones_like(unit_scale(array))\n",
        "squares overflow and underflow",
        ("tests/test_clipping.py::test_norms_neither_overflow_nor_underflow",),
    ),
    Mutant(
        "perex/_rules/scales.py",
        "return self.scale * jnp.where(nonzero, root, 0)",
        "return jnp.where(nonzero, root, 0)",
        "norms forget their scale",
        _CLIP,
    ),
    Mutant(
        "perex/_rules/scales.py",
        "        products = products + left.imag * right.imag\n",
        "        products = products - left.imag * right.imag\n",
        "the square of a complex number is not that of its size",
        ("tests/test_outer_product.py", "tests/test_privacy.py"),
    ),
    Mutant(
        "perex/_rules/registry.py",
        "            scale = combine_scales(scale, scale_x)\n",
        "            scale = scale\n",
        "norms forget the scale of the inputs",
        ("tests/test_elementwise.py",),
    ),
    Mutant(
        "perex/_rules/registry.py",
        "        result = sum_chunks(some, (*inputs, cotangent, weights), chunk)\n",
        "        result = sum_chunks(some, (*inputs, cotangent, weights * weights), chunk)\n",
        "a rule of no more than gradients sums them with squared weights",
        ("tests/test_elementwise.py",),
    ),
)

_BOUNDS = (
    Mutant(
        "perex/_rules/certified.py",
        "REDUCTION = 256\n",
        "REDUCTION = 0\n",
        "the sum over pairs of positions is taken to be exact",
        ("tests/test_certified.py",),
    ),
    Mutant(
        "perex/_rules/certified.py",
        "_WIDE = 0.01\n",
        "_WIDE = 1e9\n",
        "norms of what cancels are never measured again",
        _SOUND,
    ),
    Mutant(
        "perex/_rules/certified.py",
        "return self.error > 2 * _WIDE * self.squares",
        "return self.error > 2 * _WIDE",
        "what is wide depends on the size of the norm",
        ("tests/test_certified.py", *_SOUND),
    ),
    Mutant(
        "perex/_rules/certified.py",
        "error += (depth * roundoff * width * roundoff) * magnitude * magnitude",
        "error = 0 * error",
        "inner products are taken to be exact",
        _SOUND,
    ),
    Mutant(
        "perex/_rules/certified.py",
        "slack = 2 * certified.slack * (certified.scale / ",
        "slack = 0 * certified.slack * (certified.scale / ",
        "the sum is taken to be what was measured, though it is another product",
        ("tests/test_certified.py",),
    ),
    Mutant(
        "perex/_rules/certified.py",
        "        return ScaledNorms(*(jnp.where(wide, *pair) for pair in pairs))\n",
        "        return norms.scaled()\n",
        "an example's norm depends on whether another one was measured",
        ("tests/test_certified.py",),
    ),
    Mutant(
        "perex/_rules/certified.py",
        "return 4 * roundoff if jnp.issubdtype(dtype, jnp.complexfloating) else roundoff",
        "return 0.0 * roundoff",
        "numbers are taken to be exact",
        _SOUND,
    ),
    Mutant(
        "perex/_tied.py",
        "squares += 2 * _inner(left, right) * ratios",
        "squares += _inner(left, right) * ratios",
        "the inner product of two uses counts once",
        _SUMS,
    ),
    Mutant(
        "perex/_tied.py",
        "ratios = (left.scale / divisor) * (right.scale / divisor)",
        "ratios = (left.scale / divisor) * (left.scale / divisor)",
        "an inner product has the scale of one use",
        ("tests/test_grad_norms.py::test_look_ups_of_different_lengths_in_one_table",),
    ),
    Mutant(
        "perex/_tied.py",
        "error += 2 * _inner_roundoff(left, right) * left.magnitude",
        "error += 0 * _inner_roundoff(left, right) * left.magnitude",
        "inner products of uses are taken to be exact",
        ("tests/test_certified.py",),
    ),
    Mutant(
        "perex/_tied.py",
        "return (left[:, :, None] == right[:, None, :].astype(left.dtype)).astype(jnp.float32)",
        "return (left[:, :, None] <= right[:, None, :].astype(left.dtype)).astype(jnp.float32)",
        "different rows of a table have an inner product",
        ("tests/test_grad_norms.py::test_look_ups_of_different_lengths_in_one_table",),
    ),
    Mutant(
        "perex/_tied.py",
        '            axes = tuple(axes[i] for i in equation.params["permutation"])\n',
        "            axes = tuple(axes)\n",
        "a transposed use is taken for one that is not",
        _SUMS,
    ),
)

_CLIPPING = (
    Mutant(
        "perex/_clipping.py",
        "jnp.maximum(jnp.sqrt(norms.squares), jnp.sqrt(norms.upper) / (1 + tolerance))",
        "jnp.sqrt(norms.squares)",
        "norms are clipped, not their upper ends",
        ("tests/test_certified.py",),
    ),
    Mutant(
        "perex/_clipping.py",
        "longer = norms.scale * root > l2_norm_clip",
        "longer = norms.scale * root > 2 * l2_norm_clip",
        "a gradient a little too long is not clipped",
        _CLIP,
    ),
    Mutant(
        "perex/_clipping.py",
        "        included = is_finite & ~is_padding\n",
        "        included = is_finite\n",
        "padding is summed",
        _CLIP,
    ),
    Mutant(
        "perex/_clipping.py",
        "        is_finite = is_finite | is_padding\n",
        "        is_finite = is_finite & ~is_padding\n",
        "padding counts as not finite",
        _CLIP,
    ),
    Mutant(
        "perex/_clipping.py",
        "factor = scaled_clip / (scaled_norm + gamma / unit)",
        "factor = scaled_clip / (scaled_norm + gamma)",
        "the stabiliser grows with the norm's scale",
        _CLIP,
    ),
    Mutant(
        "perex/_clipping.py",
        "return math.hypot(*self.clips(paths).values())",
        "return sum(self.clips(paths).values())",
        "the sensitivity of groups is their sum",
        _CLIP,
    ),
    Mutant(
        "perex/_clipping.py",
        '"replace_one": 2.0}',
        '"replace_one": 1.0}',
        "to replace an example moves the sum as far as to remove one",
        _CLIP,
    ),
    Mutant(
        "perex/_clipping.py",
        "tuple(jnp.where(is_finite, each[group].weights, 0) for group in groups)",
        "tuple(each[group].weights for group in groups)",
        "an example with a bad leaf stays in the other groups",
        _CLIP,
    ),
    Mutant(
        "perex/_parts.py",
        "parts.setdefault((group, str(leaf.dtype)) if joins else i, [])",
        "parts.setdefault(str(leaf.dtype) if joins else i, [])",
        "leaves of different groups share a norm",
        ("tests/test_clipping.py", "tests/test_clipped_grad.py::test_a_clip_norm_for_each_group"),
    ),
    Mutant(
        "perex/_parts.py",
        "jnp.split(total, ends[:-1])",
        "jnp.split(total, ends[:-1][::-1])[::-1]",
        "sums of leaves that were joined change places",
        _CLIP,
    ),
)

_CLIPPED_GRAD = (
    Mutant(
        "perex/_clipped_grad.py",
        "split(jnp.asarray(is_padding), 0, True)",
        "split(jnp.asarray(is_padding), 0, False)",
        "examples that fill up the last microbatch are summed",
        ("tests/test_clipped_grad.py::test_microbatches_change_rounding_only",),
    ),
    Mutant(
        "perex/_clipped_grad.py",
        "lambda x: jnp.moveaxis(x, 0, 1).reshape(padded, *x.shape[2:])[:batch_size]",
        "lambda x: x.reshape(padded, *x.shape[2:])[:batch_size]",
        "what is known of examples comes in the order of the microbatches",
        ("tests/test_clipped_grad.py::test_microbatches_change_rounding_only",),
    ),
    Mutant(
        "perex/_clipped_grad.py",
        "passes = jnp.arange(2) == 1",
        "passes = jnp.arange(2) == 0",
        "the sum is taken before the norms",
        ("tests/test_save_memory.py::test_equals_the_loop",),
    ),
    Mutant(
        "perex/_clipped_grad.py",
        "return values if is_padding is None else jnp.where(is_padding, 0, values)",
        "return values",
        "the losses of padding are reported",
        ("tests/test_clipped_grad.py::test_padding_changes_no_bit",),
    ),
    Mutant(
        "perex/_ways.py",
        "        if alone and known and steps_apart and is_isometric(plan, use):\n",
        "        if known and steps_apart and is_isometric(plan, use):\n",
        "a leaf with several uses has the norm of one",
        ("tests/test_save_memory.py::test_equals_the_loop",),
    ),
    Mutant(
        "perex/_ways.py",
        "        steps_apart = all(stacked for _, stacked in use.stack)\n",
        "        steps_apart = True\n",
        "norms of the steps of a shared weight are combined as if they did not add up",
        ("tests/test_save_memory.py",),
    ),
)

_NOISE = (
    Mutant(
        "perex/_privacy.py",
        "total = total + noise * (stddev * (math.sqrt(2) if jnp.iscomplexobj(total) else 1))",
        "total = total + noise * stddev",
        "complex sums get half of the noise",
        ("tests/test_privacy.py::test_float64_and_complex_gradients",),
    ),
    Mutant(
        "perex/_privacy.py",
        "    keys = jax.random.split(key, len(sums))\n",
        "    keys = [key] * len(sums)\n",
        "all leaves get the same noise",
        ("tests/test_privacy.py",),
    ),
    Mutant(
        "perex/_privacy.py",
        "        new_state = DPClipState(\n            next_key,\n",
        "        new_state = DPClipState(\n            state.key,\n",
        "all steps get the same noise",
        ("tests/test_privacy.py",),
    ),
    Mutant(
        "perex/_privacy.py",
        "return treedef.unflatten(means), DPNoiseState(next_key, _add(state.step, 1))",
        "return treedef.unflatten(means), DPNoiseState(state.key, _add(state.step, 1))",
        "all steps of dp_noise get the same noise",
        ("tests/test_privacy.py",),
    ),
    Mutant(
        "perex/_privacy.py",
        "stddev = _stddev(noise_multiplier, clipping.sensitivity(paths))",
        "stddev = _stddev(noise_multiplier, max(clipping.clips(paths).values()))",
        "several groups get the noise of one",
        ("tests/test_privacy.py::test_scale_of_the_noise",),
    ),
    Mutant(
        "perex/_privacy.py",
        "divisor = size if expected_batch_size is None else expected_batch_size",
        "divisor = size",
        "the mean is over the batch that was drawn",
        _CLIP,
    ),
    Mutant(
        "perex/_privacy.py",
        "        means.append((total / divisor).astype(dtype))\n",
        "        means.append(total.astype(dtype) / divisor)\n",
        "sums are rounded before they are divided",
        ("tests/test_privacy.py",),
    ),
    Mutant(
        "perex/_privacy.py",
        "return total + jnp.minimum(more, jnp.iinfo(jnp.int32).max - total)",
        "return total + more",
        "counts wrap around",
        ("tests/test_privacy.py", "tests/test_clipping.py"),
    ),
    Mutant(
        "perex/_privacy.py",
        "sums = [leaf.astype(promote_types(leaf.dtype, jnp.float32)) for leaf in leaves]",
        "sums = list(leaves)",
        "noise is added in the type of a short sum",
        ("tests/test_privacy.py",),
    ),
    Mutant(
        "perex/_privacy.py",
        "    if expected_batch_size is None:\n        raise ValueError(\n"
        '            "dp_clip: is_padding needs',
        "    if expected_batch_size is None and False:\n        raise ValueError(\n"
        '            "dp_clip: is_padding needs',
        "a private count divides the mean",
        ("tests/test_privacy.py::test_padding_without_an_expected_batch_size_says_why",),
    ),
)

MUTANTS = (*_NORMS, *_BOUNDS, *_CLIPPING, *_CLIPPED_GRAD, *_NOISE)
