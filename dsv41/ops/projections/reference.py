"""The input projections one after the other, each by the `linear` family's chosen implementation."""

from __future__ import annotations

import torch
from torch import Tensor


def why_not(hardware: object, record: str | None) -> str | None:
    return None


def project_inputs(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    side_weight: Tensor,
    quantise: bool,
    deterministic: bool,
    linear_impl: str,
) -> tuple[Tensor, Tensor]:
    down = torch.ops.dsv41.linear_fp8.default(x, weight, scale, quantise, deterministic, linear_impl)
    return down, torch.ops.dsv41.linear.default(x, side_weight, torch.float32, deterministic, linear_impl)
