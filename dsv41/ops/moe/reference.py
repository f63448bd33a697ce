"""Mixture of experts in plain PyTorch: one expert after the other, ascending id, accumulated in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv41.ops import records
from dsv41.ops.arithmetic import exact_matmul, sigmoid


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


def _expert(
    x: Tensor, gate_up: Tensor, down: Tensor, route_weight: Tensor, limit: float, quantise: bool
) -> Tensor:
    """One routed expert on its rows: x [t, D], float32 weights [2I, D] and [D, I], route_weight [t]."""
    x_q = records.round_trip(x, "fp8_32") if quantise else x
    hidden = _gated(exact_matmul(x_q, gate_up).to(x.dtype), route_weight, limit)
    hidden = records.round_trip(hidden, "fp8_32") if quantise else hidden
    return exact_matmul(hidden, down).to(x.dtype)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    shared_gate_up: Tensor,
    shared_gate_up_scale: Tensor,
    shared_down: Tensor,
    shared_down_scale: Tensor,
    limit: float,
    quantise: bool,
    deterministic: bool,
    linear_impl: str,
) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids[ids >= 0].unique().tolist():
        rows, choice = (ids == expert).nonzero(as_tuple=True)
        total[rows] += _expert(
            x[rows],
            records.dequantise_fp4_weight(gate_up[expert], gate_up_scale[expert]),
            records.dequantise_fp4_weight(down[expert], down_scale[expert]),
            weights[rows, choice],
            limit,
            quantise,
        ).float()
    linear_fp8 = torch.ops.dsv41.linear_fp8.default
    hidden = _gated(
        linear_fp8(x, shared_gate_up, shared_gate_up_scale, quantise, deterministic, linear_impl), None, limit
    )
    shared = linear_fp8(hidden, shared_down, shared_down_scale, quantise, deterministic, linear_impl)
    return (total + shared.float()).to(x.dtype)
