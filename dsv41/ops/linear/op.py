"""Matrix products with the release's stored weights, and the norm between two of them.

    linear_fp8      y = quantise(x) @ (weight * scale)^T     e4m3 weight, one e8m0 scale per 32x32 tile
                    the input is quantised per row and 32 columns if `quantise` (W8A8), else used as it is
    linear          y = x @ weight^T                         bf16 or fp32 weight, any output dtype
    grouped_output  z_g = (weight * scale)_g @ unrotate(o)_g one low-rank product per group of heads
                    the input is rotated back and not quantised
    rms_norm        y = x * rsqrt(mean(x^2) + eps) * weight  fp32 inside, rounded once to x's dtype

The norm is an op because PyTorch's own reductions choose the order of a sum by the number of rows on a GPU:
a row's bits would depend on the rows beside it.

T token rows, K input and N output features, H heads, d head dimension, G groups, O rank of a group, r rotated
channels. Accumulation is fp32 or better; the result is rounded once. Under `deterministic` a row's bits do
not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops.library import declare


def _linear_fp8_fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _linear_fake(x: Tensor, weight: Tensor, dtype: torch.dtype, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


def _rms_norm_fake(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _grouped_output_fake(o: Tensor, cos_sin: Tensor, weight: Tensor, *_: object) -> Tensor:
    return o.new_empty((o.shape[0], weight.shape[0]))


linear_fp8 = declare(
    "linear",
    "linear_fp8(Tensor x, Tensor weight, Tensor scale, bool quantise, bool deterministic, str impl)"
    " -> Tensor",
    fake=_linear_fp8_fake,
)
linear = declare(
    "linear",
    "linear(Tensor x, Tensor weight, ScalarType dtype, bool deterministic, str impl) -> Tensor",
    fake=_linear_fake,
)
grouped_output = declare(
    "linear",
    "grouped_output(Tensor o, Tensor cos_sin, Tensor weight, Tensor scale, int groups,"
    " bool deterministic, str impl) -> Tensor",
    fake=_grouped_output_fake,
)
rms_norm = declare(
    "linear", "rms_norm(Tensor x, Tensor weight, float eps, str impl) -> Tensor", fake=_rms_norm_fake
)
