"""The norm between two products in Triton: one program a row, so that a row's bits depend on nothing else.

The sum of squares has one tree for a width. It differs from the reference's in the order of the sum, which
moves a stored value by one step where it lies on a rounding boundary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

EARLY = True  # programmatic launch: the product that follows fetches its weight meanwhile
STACKED = False  # whether that product may start before this kernel's own wait
MOST_COLUMNS = 1 << 14


@triton.jit
def norm_kernel(
    x, norm, out, x_row, eps, D: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, STACKED: tl.constexpr
):
    """x [T, D], rows `x_row` apart, norm [D] -> out [T, D].

    EARLY: launched before its producer has ended. STACKED: the next kernel may be, too.
    """
    if EARLY and STACKED:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    weight = tl.load(norm + column, mask=column < D, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if EARLY and not STACKED:
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + row * x_row + column, mask=column < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / D + eps)
    tl.store(out + row * D + column, (value * scale * weight).to(out.dtype.element_ty), mask=column < D)


def norm_rows(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """The op `rms_norm`: x [..., D] in any float dtype, norm [D]. ValueError for a row not in one piece."""
    dim = x.shape[-1]
    if norm.shape != (dim,) or dim > MOST_COLUMNS:
        raise ValueError(
            f"a norm of {tuple(norm.shape)} weights does not fit rows of {dim} (at most {MOST_COLUMNS})."
        )
    rows = x.reshape(-1, dim)
    if rows.stride(1) != 1 or not norm.is_contiguous():
        raise ValueError("a row's channels and a norm's weights must lie one after the other.")
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if rows.numel():
        block = triton.next_power_of_2(dim)
        with torch.cuda.device(x.device):
            norm_kernel[(len(rows),)](
                rows, norm, out, rows.stride(0), eps, D=dim, BLOCK=block, EARLY=EARLY, STACKED=STACKED,
                num_warps=max(1, min(8, block // 256)), launch_pdl=EARLY,
            )  # fmt: skip
    return out.view(x.shape)
