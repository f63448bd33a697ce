"""Residual copies in plain PyTorch: fp32 inside, one rounding on every stored value."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops.arithmetic import exact_matmul, rms_norm, sigmoid


def why_not(hardware: object, record: str | None) -> str | None:
    return None


def sinkhorn(logits: Tensor, sweeps: int, eps: float) -> Tensor:
    """Row softmax, then `sweeps` column normalisations with a row normalisation between each two. [..., M,
    M]"""
    comb = torch.exp(logits - logits.amax(-1, keepdim=True))
    comb = comb / comb.sum(-1, keepdim=True) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(sweeps - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def split_mixes(
    mixes: Tensor, base: Tensor, scale: Tensor, copies: int, sweeps: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The raw mixes [T, (2 + M)*M] -> pre [T, M], post [T, M], comb [T, M, M]."""
    pre_z, post_z, comb_z = mixes.split((copies, copies, copies * copies), dim=-1)
    pre_b, post_b, comb_b = base.split((copies, copies, copies * copies))
    pre = sigmoid(scale[0] * pre_z + pre_b) + eps
    post = 2 * sigmoid(scale[1] * post_z + post_b)
    comb = sinkhorn((scale[2] * comb_z + comb_b).unflatten(-1, (copies, copies)), sweeps, eps)
    return pre, post, comb


def hyper_coefficients(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    tickets: Tensor,
    sweeps: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flat = streams.flatten(1).float()
    mixes = exact_matmul(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    beside = torch.zeros(1, dtype=torch.int64)  # no stream
    return (*split_mixes(mixes, base, scale, streams.shape[1], sweeps, eps), beside)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """The sum alone, before its norm: [T, M, D], [T, M] -> [T, D]."""
    return (streams.float() * pre.unsqueeze(-1)).sum(1).to(streams.dtype)


def hyper_collapse(streams: Tensor, pre: Tensor, norm: Tensor, norm_eps: float) -> Tensor:
    return rms_norm(collapse(streams, pre), norm, norm_eps)


def hyper_expand(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, pre: Tensor, side: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    kept = (comb.unsqueeze(-1) * streams.float().unsqueeze(2)).sum(
        1
    )  # [T, M, D], summed over the row index j
    streams = (post.unsqueeze(-1) * y.float().unsqueeze(1) + kept).to(streams.dtype)
    return streams, pre.clone(), ~pre.isnan().any(1)


def hyper_update(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    side: Tensor,
    norm: Tensor,
    tickets: Tensor,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    streams, mix, sound = hyper_expand(y, streams, post, comb, pre, side)
    return streams, mix, sound, hyper_collapse(streams, pre, norm, norm_eps)
