"""Parameters as the checkpoint stores them, and the fp8 linear that reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dsv41.backends import Backends
from dsv41.config import ModelConfig
from dsv41.ops.linear.op import linear_fp8

FP8_TILE = 32


@dataclass(frozen=True)
class Context:
    """What every module of a model shares: the config, the chosen backends, the numerics they follow.

    `deterministic`: a row's bits do not depend on the rows beside it, at a price in speed.
    """

    config: ModelConfig
    backends: Backends
    deterministic: bool = False

    @property
    def quantise(self) -> bool:
        return self.config.numerics.quantised

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.numerics.dtype_name)


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    """An uninitialised, frozen parameter on the default device; model/weights.py fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Fp8Weight(nn.Module):
    """An e4m3 matrix [N, K] with one e8m0 scale byte per 32x32 tile."""

    def __init__(self, num_outputs: int, num_inputs: int) -> None:
        super().__init__()
        self.weight = parameter(num_outputs, num_inputs, dtype=torch.float8_e4m3fn)
        tiles = (-(-num_outputs // FP8_TILE), -(-num_inputs // FP8_TILE))
        self.scale = parameter(*tiles, dtype=torch.uint8)


class Fp8Linear(Fp8Weight):
    """`y = quantise(x) @ (weight * scale)^T`, x [..., K] -> [..., N] in x's dtype."""

    def __init__(self, context: Context, num_outputs: int, num_inputs: int) -> None:
        super().__init__(num_outputs, num_inputs)
        self.quantise, self.deterministic = context.quantise, context.deterministic
        self.impl = context.backends.linear

    def forward(self, x: Tensor) -> Tensor:
        return linear_fp8(x, self.weight, self.scale, self.quantise, self.deterministic, self.impl)
