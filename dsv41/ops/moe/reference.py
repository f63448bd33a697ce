"""Mixture of experts in plain PyTorch: one expert after the other, ascending id, accumulated in fp32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv41.ops import records
from dsv41.ops.arithmetic import exact_matmul, sigmoid

WORKSPACE_BYTES = 64 << 20  # of dequantised weights at a time, or one expert's


def why_not(hardware: object, record: str | None) -> str | None:
    return None


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    image_bias: Tensor,
    is_image: Tensor,
    valid: Tensor,
    top_k: int,
    route_scale: float,
) -> tuple[Tensor, Tensor]:
    scores = F.softplus(exact_matmul(x, gate).double()).float().sqrt()  # float64: see arithmetic.sigmoid
    biased = scores + torch.where(is_image.unsqueeze(1), image_bias, bias)
    biased = biased.nan_to_num(nan=-torch.inf)  # a NaN row must still choose valid ids; its weights stay NaN
    order = biased.sort(dim=-1, descending=True, stable=True).indices[
        :, :top_k
    ]  # stable: ties keep the smaller id
    chosen = scores.gather(1, order)
    weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * route_scale
    ids = torch.where(valid.unsqueeze(1), order, -1).to(torch.int32)
    return ids, torch.where(valid.unsqueeze(1), weights, 0.0)


def _gated(gate_up: Tensor, route_weight: Tensor | None, limit: float) -> Tensor:
    """gate_up [t, 2I] and route_weight [t] or None -> the hidden rows [t, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    hidden = gate * sigmoid(gate) * up.clamp(-limit, limit)
    if route_weight is not None:
        hidden = hidden * route_weight.unsqueeze(1)
    return hidden.to(gate_up.dtype)


def _dequantised(packed: Tensor, scale: Tensor, used: Tensor) -> Iterator[Tensor]:
    """The fp32 weight [N, K] of each expert in `used`, some of them at a time."""
    fp32_bytes = packed[0].numel() * 2 * 4
    for some in used.split(max(1, WORKSPACE_BYTES // fp32_bytes)):
        yield from records.dequantise_fp4_weight(packed[some], scale[some])


def shared_expert(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    limit: float,
    quantise: bool,
    deterministic: bool,
    linear_impl: str,
) -> tuple[Tensor, Tensor]:
    linear_fp8 = torch.ops.dsv41.linear_fp8.default
    products = linear_fp8(x, gate_up, gate_up_scale, quantise, deterministic, linear_impl)
    hidden = _gated(products, None, limit)
    beside = torch.zeros(1, dtype=torch.int64)  # no stream
    return linear_fp8(hidden, down, down_scale, quantise, deterministic, linear_impl), beside


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    shared: Tensor,
    side: Tensor,
    limit: float,
    quantise: bool,
    deterministic: bool,
) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    order = ids.flatten().argsort(stable=True)[(ids < 0).sum() :]  # the pairs of row and choice, by expert
    used, counts = ids.flatten()[order].unique_consecutive(return_counts=True)
    if used.numel():
        parts, x_q = counts.tolist(), records.round_trip(x, "fp8_32") if quantise else x
        rows = (order // ids.shape[1]).split(parts)
        ups = _dequantised(gate_up, gate_up_scale, used)
        up = torch.cat([exact_matmul(x_q[some], weight) for some, weight in zip(rows, ups, strict=True)])
        hidden = _gated(up.to(x.dtype), weights.flatten()[order], limit)
        hidden = records.round_trip(hidden, "fp8_32") if quantise else hidden
        downs = _dequantised(down, down_scale, used)
        for some, values, weight in zip(rows, hidden.split(parts), downs, strict=True):
            total[some] += exact_matmul(values, weight).to(x.dtype).float()
    return (total + shared.float()).to(x.dtype)
