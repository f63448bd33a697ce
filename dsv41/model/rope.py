"""Rotary tables (spec/model.md 3.2): window-only layers use the plain one, all others the YaRN one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv41.config import ModelConfig
from dsv41.model.inputs import Rotations


def plain_frequencies(rope_dim: int, theta: float) -> Tensor:
    """theta^(-2i/r) for i = 0..r/2-1, float32 [r/2], formed as the release forms it."""
    return 1.0 / (theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32, device="cpu") / rope_dim))


def yarn_frequencies(config: ModelConfig) -> Tensor:
    """The compressed table, float32 [r/2]: low pairs as they are, high pairs / factor, a ramp between."""
    dim, theta, yarn = config.rope_dim, config.compressed_rope_theta, config.yarn

    def pair_of(turns: float) -> float:
        return dim * math.log(yarn.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = plain_frequencies(dim, theta)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def cos_sin(positions: Tensor, frequencies: Tensor) -> Tensor:
    """positions int64 [T] -> float32 [T, r]: cosines, then sines, of the fp32 product with a frequency."""
    angles = positions.float().unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def rotations(positions: Tensor, plain: Tensor, yarn: Tensor, ratios: tuple[int, ...]) -> Rotations:
    """All angles of a step. A group of `ratio` tokens turns by the position of its first token."""
    return Rotations(
        window=cos_sin(positions, plain),
        compressed=cos_sin(positions, yarn),
        group={ratio: cos_sin(positions - positions % ratio, yarn) for ratio in ratios},
    )
