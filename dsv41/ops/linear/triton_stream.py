"""Few rows times a bf16 weight, in Triton: the weight is read once, at the speed of the memory.

    stream_kernel     grid [N / BN, K splits, rows / BT]

Layout. weight [N, K] and x [T, K] as they come, tiles by cp.async. 64 rows of the weight are the M side of
wgmma, BT rows of x the N side. Where N is small, K is split and another kernel adds the fp32 sums in order.
Products are exact, sums are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def stream_kernel(
    x, weight, out, x_row, num_rows, N, K: tl.constexpr, STEPS: tl.constexpr, BN: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [splits, T, N]: sums over STEPS * BK columns a split."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    t = tl.program_id(2) * BT + tl.arange(0, BT)
    live_n, live_t = n < N, t < num_rows
    w_row = weight + n.to(tl.int64)[:, None] * K
    x_row_of = x + t.to(tl.int64)[:, None] * x_row
    acc = tl.zeros((BN, BT), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        k = (split * STEPS + step) * BK + tl.arange(0, BK)
        w = tl.load(w_row + k[None, :], mask=live_n[:, None] & (k < K)[None, :], other=0.0)
        v = tl.load(x_row_of + k[None, :], mask=live_t[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(w, tl.trans(v), acc)
    at = out + split.to(tl.int64) * num_rows * N + t.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=live_n[:, None] & live_t[None, :])
