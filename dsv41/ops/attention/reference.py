"""Sparse attention in plain PyTorch, with the release's rounding: an online softmax over blocks of 64 listed
slots.

The probabilities are rounded to the query's dtype relative to the running maximum of their block, while the
denominator sums them unrounded; the list is the window part, then the selected part (spec/arithmetic.md 2.8).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops import records

BLOCK_SLOTS = 64
TILE_BYTES = 64 << 20  # bound on the gathered float64 keys of one tile of rows


def why_not(hardware: object, record: str | None) -> str | None:
    return None


def attend(q: Tensor, keys: Tensor, listed: Tensor, sink: Tensor) -> Tensor:
    """q [T, H, d], keys [T, N, d] (zero where not listed), listed bool [T, N], sink float32 [H] -> o [T, H,
    d]."""
    rows, heads, dim = q.shape
    scale = dim**-0.5
    peak = torch.full((rows, heads), -1e30, device=q.device)
    total = torch.zeros((rows, heads), device=q.device)
    acc = torch.zeros((rows, heads, dim), device=q.device)
    q64 = q.double()
    for start in range(0, keys.shape[1], BLOCK_SLOTS):
        block = keys[:, start : start + BLOCK_SLOTS].double()
        logits = (q64 @ block.mT).float() * scale
        logits = logits.masked_fill(~listed[:, None, start : start + BLOCK_SLOTS], -torch.inf)
        new_peak = torch.maximum(peak, logits.amax(-1))
        shrink = torch.exp(peak - new_peak)
        p = torch.exp(logits - new_peak.unsqueeze(-1))
        total = total * shrink + p.sum(-1)
        acc = acc * shrink.unsqueeze(-1) + (p.to(q.dtype).double() @ block).float()
        peak = new_peak
    total = total + torch.exp(sink - peak)
    return (acc / total.unsqueeze(-1)).to(q.dtype)


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_slots: Tensor,
    window_record: str,
    window_page: int,
    states: Tensor,
    state_slots: Tensor,
    state_record: str,
    state_page: int,
    sink: Tensor,
    rope_dim: int,
    deterministic: bool,
) -> Tensor:
    dim, num_slots = q.shape[-1], window_slots.shape[1] + state_slots.shape[1]
    tile = max(1, TILE_BYTES // (max(num_slots, 1) * dim * 8))
    q = q[:, : sink.shape[0]]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # contiguous whatever q is: the fake says so
    for start in range(0, q.shape[0], tile):
        rows = slice(start, start + tile)
        parts = [
            records.read_slots(record, cache, slots[rows].long(), page, dim, rope_dim, q.dtype)
            for record, cache, slots, page in (
                (window_record, window, window_slots, window_page),
                (state_record, states, state_slots, state_page),
            )
        ]
        listed = torch.cat((window_slots[rows], state_slots[rows]), dim=1) >= 0
        out[rows] = attend(q[rows], torch.cat(parts, dim=1), listed, sink)
    return out
