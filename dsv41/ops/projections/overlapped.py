"""The input projections on two streams: `down` on the current one, `side` beside it on an auxiliary one.

Every product is the `linear` family's, as in the serial implementation, so the bits are the same. With few
rows each of the two reads weights for 2 to 3 us and leaves the memory idle while it starts and ends; together
they might hide that. On an H200 a captured decode step of one row gained nothing (5.37 against 5.35 ms).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dsv41.hardware import Hardware
from dsv41.ops.linear.op import linear, linear_fp8
from dsv41.ops.streams import fork_join

# Up to here the products are forked. Beyond, each fills the GPU alone, and cuBLAS, which keeps a workspace of
# 32 MB a stream, runs the side products.
FORK_ROWS = 64


def why_not(hardware: Hardware, record: str | None) -> str | None:
    if hardware.sm == 0:
        return "it overlaps CUDA streams, and a CPU has none"
    return None


def project_inputs(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    side_weight: Tensor,
    quantise: bool,
    deterministic: bool,
    linear_impl: str,
) -> tuple[Tensor, Tensor]:
    """See op.py. Raises ValueError for tensors that are not on a GPU."""
    if not x.is_cuda:
        raise ValueError(f"overlapped projections run on CUDA streams, not on a {x.device.type}.")
    down = partial(linear_fp8, x, weight, scale, quantise, deterministic, linear_impl)
    side = partial(linear, x, side_weight, torch.float32, deterministic, linear_impl)
    if side_weight.shape[0] == 0 or not 0 < x.shape[0] <= FORK_ROWS:
        return down(), side()
    with torch.cuda.device(x.device):
        return fork_join(down, side)
