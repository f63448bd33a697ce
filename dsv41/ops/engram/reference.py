"""Engram in plain PyTorch. The table may live on another device than the rows: only the rows asked for are
read."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops import records
from dsv41.ops.arithmetic import sigmoid


def why_not(hardware: object, record: str | None) -> str | None:
    return None


def engram_hash(
    token_ids: Tensor,
    lookback: Tensor,
    is_image: Tensor,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_token: int,
) -> Tensor:
    tokens = torch.cat((token_ids.unsqueeze(1), lookback.to(token_ids.dtype)), dim=1).long()  # [T, N]
    blocked = torch.cat((is_image.unsqueeze(1), lookback < 0), dim=1).cummax(dim=1).values
    tokens = torch.where(blocked, pad_token, tokens.clamp(min=0))
    terms = token_map[tokens] * multipliers
    rolling, columns = terms[:, 0], []
    for shift in range(1, tokens.shape[1]):
        rolling = rolling ^ terms[:, shift]
        columns.append(rolling.unsqueeze(1) % primes[shift - 1])
    return torch.cat(columns, dim=1) + offsets


def engram_lookup(table: Tensor, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    index = rows.flatten().to(table.device)
    # float8 has no index_select on the CPU: gather bytes, then view
    codes = table.view(torch.uint8).index_select(0, index).view(torch.float8_e4m3fn)
    factor = records.e8m0_decode(scale.index_select(0, index))
    value = codes.float().unflatten(1, (factor.shape[1], -1)) * factor.unsqueeze(-1)
    return value.to(device=rows.device, dtype=dtype).view(rows.shape[0], rows.shape[1] * table.shape[1])


def engram_write(
    streams: Tensor, kv: Tensor, query: Tensor, key: Tensor, is_image: Tensor, eps: float
) -> Tensor:
    copies, hidden = streams.shape[1:]
    x = streams.float()
    keys, value = kv.float().split((copies * hidden, hidden), dim=-1)
    keys = keys.unflatten(-1, (copies, hidden))
    inverse_rms = torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    match = (x * query.float() * key.float() * keys).sum(-1) * inverse_rms * hidden**-0.5  # [T, M]
    gate = sigmoid(torch.copysign(match.abs().clamp(min=1e-6).sqrt(), match))
    gate = torch.where(is_image.unsqueeze(1), 0.0, gate)
    return (x + gate.unsqueeze(-1) * value.unsqueeze(1)).to(streams.dtype)
