"""Matrix products in plain PyTorch, accumulated in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops import arithmetic, records
from dsv41.ops.arithmetic import exact_matmul, rotate


def why_not(hardware: object, record: str | None) -> str | None:
    return None


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, quantise: bool, deterministic: bool) -> Tensor:
    x_q = records.round_trip(x, "fp8_32") if quantise else x
    return exact_matmul(x_q, records.dequantise_fp8_weight(weight, scale)).to(x.dtype)


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype, deterministic: bool) -> Tensor:
    return exact_matmul(x, weight).to(dtype)


def grouped_output(
    o: Tensor, cos_sin: Tensor, weight: Tensor, scale: Tensor, groups: int, deterministic: bool
) -> Tensor:
    turned = rotate(o, cos_sin, inverse=True).flatten(1).unflatten(1, (groups, -1)).transpose(0, 1)
    per_group = records.dequantise_fp8_weight(weight, scale).unflatten(0, (groups, -1))  # [G, O, d*H/G]
    return exact_matmul(turned, per_group).to(o.dtype).transpose(0, 1).flatten(1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return arithmetic.rms_norm(x, weight, eps)
