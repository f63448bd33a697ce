"""Residual copies: the parameters of one sub-layer's coefficients, and the uses of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsv41.model.linear import Context, parameter
from dsv41.ops.hyper.op import hyper_coefficients, hyper_collapse, hyper_expand, hyper_update


class Coefficients(NamedTuple):
    """Of one sub-layer, float32: pre [T, M], post [T, M], comb [T, M, M]. They may still be computed on the
    stream `side`, so only `expand` and `update` read them."""

    pre: Tensor
    post: Tensor
    comb: Tensor
    side: Tensor


class HyperConnection(nn.Module):
    """M residual copies around one sub-layer (ops/hyper/op.py has the equations)."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        config = context.config
        copies = config.copies
        mixes = (2 + copies) * copies
        self.fn = parameter(mixes, copies * config.hidden_size, dtype=torch.float32)
        self.base = parameter(mixes, dtype=torch.float32)
        self.scale = parameter(3, dtype=torch.float32)
        self.sweeps, self.eps, self.norm_eps = config.sinkhorn_iters, config.hyper_eps, config.norm_eps
        self.impl = context.backends.hyper

    def coefficients(self, streams: Tensor, tickets: Tensor) -> Coefficients:
        weights, settings = (self.fn, self.base, self.scale), (self.sweeps, self.eps, self.norm_eps)
        return Coefficients(*hyper_coefficients(streams, *weights, tickets, *settings, self.impl))

    def collapse(self, streams: Tensor, pre: Tensor, norm: Tensor) -> Tensor:
        """[T, M, D] -> normed [T, D]; `pre` comes from the sub-layer before this one."""
        return hyper_collapse(streams, pre, norm, self.norm_eps, self.impl)

    def expand(self, y: Tensor, streams: Tensor, own: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
        """-> streams [T, M, D], `pre` as the next sub-layer's mix [T, M], and whether a row is sound [T]."""
        return hyper_expand(y, streams, own.post, own.comb, own.pre, own.side, self.impl)

    def update(
        self, y: Tensor, streams: Tensor, own: Coefficients, norm: Tensor, tickets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `expand` returns, and the next sub-layer's input, fed by this one's `pre`: x [T, D]."""
        given = (y, streams, own.post, own.comb, own.pre, own.side)
        return hyper_update(*given, norm, tickets, self.norm_eps, self.impl)
