"""Compression in plain PyTorch: pooling in fp32, the pooled value rounded once before its norm."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops.arithmetic import rms_norm


def why_not(hardware: object, record: str | None) -> str | None:
    return None


def compress(
    kv_gate: Tensor,
    positions: Tensor,
    partner_row: Tensor,
    partner_slot: Tensor,
    open_slot: Tensor,
    norm: Tensor,
    open_groups: Tensor,
    ratio: int,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    assert ratio in (1, 2), f"compression ratio {ratio}"
    if ratio == 1:
        return rms_norm(kv_gate.to(dtype), norm, eps)
    latent = torch.zeros((kv_gate.shape[0], norm.shape[0]), dtype=dtype, device=kv_gate.device)
    closing = ((positions % 2 == 1) & ((partner_row >= 0) | (partner_slot >= 0))).nonzero().squeeze(1)
    row, slot = partner_row[closing], partner_slot[closing]
    partner = kv_gate[row.clamp(min=0)]
    kept = row < 0
    partner[kept] = open_groups[slot[kept]]
    kv, gate = torch.stack((partner, kv_gate[closing]), dim=1).chunk(2, dim=-1)  # each [closing, 2, d]
    pooled = (torch.softmax(gate, dim=1) * kv).sum(1)
    latent[closing] = rms_norm(pooled.to(dtype), norm, eps)
    keep = open_slot >= 0
    open_groups[open_slot[keep]] = kv_gate[keep]
    return latent
