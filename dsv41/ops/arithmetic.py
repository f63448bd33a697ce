"""The arithmetic that several references share: exact products, the norm and the rotation, as the release
rounds them.

Shapes: T token rows, ... any middle dimensions, d channels, r rotated channels (the last r of d).
"""

from __future__ import annotations

import torch
from torch import Tensor


def exact_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """`x [..., K] @ weight [N, K].T` accumulated in float64, returned as float32 [..., N].

    float64 makes a row's result independent of the rows beside it (the BLAS chooses its summation order by
    shape).
    """
    return (x.double() @ weight.double().mT).float()


def sigmoid(x: Tensor) -> Tensor:
    """float32 [...], evaluated in float64: the CPU's fp32 kernels give the last elements of a tensor another
    last bit, so that a value would depend on where its row stands."""
    return torch.sigmoid(x.double()).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last dimension, in fp32, rounded once to x's dtype."""
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate adjacent pairs of the last r channels of `x [T, ..., d]` by the angles of its row.

    `cos_sin` is float32 [T, r]: r/2 cosines, then r/2 sines (model/rope.py). fp32 inside, rounded once to x's
    dtype; `inverse` turns the other way.
    """
    rope_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.view(-1, *[1] * (x.dim() - 2), rope_dim).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    even, odd = x[..., -rope_dim:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-rope_dim], turned.to(x.dtype)), dim=-1)
