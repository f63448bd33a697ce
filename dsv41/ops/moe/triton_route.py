"""The router: partial products of fixed tiles, then one program a row that sums, scores and selects.

Kernel 1, grid [splits of K, experts / 32, rows / 32]: bf16 tensor-core products of 32 rows, 32 experts and
512 of K, accumulated in fp32; one row of a step reads the gate on as many SMs as there are tiles. Kernel 2
adds the splits in their order. One configuration for every row count, so that a row's bits cannot depend on
the rows beside it; a tile's rows do not meet.

Scores are computed in fp64, as the reference does, where softplus needs neither a table nor care about
cancellation; a row has only E of them. Selection takes k times the largest biased score, as an integer in
the same order, and the smallest id that has it.

T rows, E experts (padded to a power of two), D hidden size, k choices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, SPLIT, STEP = 32, 32, 512, 128  # of a tile: rows, experts, K of a program, K of a product
MAX_EXPERTS, MAX_CHOICES = 512, 16


@triton.jit(do_not_specialize=("num_rows",))
def _products(
    x, gate, partial, num_rows, x_stride,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
    STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, STEP)
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    gate_row = gate + expert.to(tl.int64)[None, :] * D
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, SPLIT, STEP):
        k = split * SPLIT + start + step
        a = tl.load(x_row + k[None, :], mask=(row < num_rows)[:, None] & (k < D)[None, :], other=0.0)
        b = tl.load(gate_row + k[:, None], mask=(expert < E)[None, :] & (k < D)[:, None], other=0.0)
        total = tl.dot(a, b, total)
    at = (split * num_rows + row).to(tl.int64)[:, None] * E + expert[None, :]
    tl.store(partial + at, total, mask=(row < num_rows)[:, None] & (expert < E)[None, :])


@triton.jit
def _score(z):
    """sqrt(softplus(z)) of fp32 z, by way of fp64; torch's softplus is the identity above 20."""
    wide = z.to(tl.float64)
    small = tl.exp(-tl.abs(wide))
    # 1 + small would lose the small one's digits.
    log = tl.where(small < 1e-4, small * (1.0 - small * (0.5 - small * (1.0 / 3.0))), tl.log(1.0 + small))
    soft = tl.where(wide > 20.0, wide, tl.where(wide > 0.0, wide, 0.0) + log)
    soft = tl.where(wide != wide, wide, soft)
    return tl.sqrt_rn(soft.to(tl.float32))


@triton.jit
def _ordered(biased):
    """fp32 -> int32 in the same order, above the smallest one. NaN ranks below every number, infinities as
    the largest finite numbers, as in the reference."""
    largest = 3.4028234663852886e38
    biased = tl.where(biased > largest, largest, tl.where(biased < -largest, -largest, biased))
    biased = tl.where(biased != biased, float("-inf"), biased)
    biased = tl.where(biased == 0.0, 0.0, biased)  # either zero
    bits = biased.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=("num_rows", "route_scale"))
def _select(
    partial, bias, image_bias, is_image, valid, ids, weights, num_rows, route_scale,
    NUM_EXPERTS: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    expert = tl.arange(0, E)
    known = expert < NUM_EXPERTS
    live = tl.load(valid + row) != 0
    if tl.load(is_image + row) != 0:
        added = tl.load(image_bias + expert, mask=known, other=0.0)
    else:
        added = tl.load(bias + expert, mask=known, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    z = tl.zeros((E,), tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * num_rows + row).to(tl.int64) * NUM_EXPERTS + expert
        z += tl.load(partial + at, mask=known, other=0.0)
    score = _score(z)
    TAKEN: tl.constexpr = -(2**31)
    order = tl.where(known, _ordered(score + added), TAKEN)
    choice = tl.arange(0, KP)
    chosen = tl.zeros((KP,), tl.int32)
    for j in tl.static_range(K):
        best = tl.max(order, 0)
        first = tl.min(tl.where(order == best, expert, E), 0)
        chosen = tl.where(choice == j, first, chosen)
        order = tl.where(expert == first, TAKEN, order)
    mine = (chosen[:, None] == expert[None, :]) & (choice < K)[:, None]
    value = tl.sum(tl.where(mine, score[None, :], 0.0), 1)
    total = tl.zeros((KP,), tl.float32) + (tl.sum(value, 0) + 1e-20)
    weight = tl.div_rn(value, total) * route_scale
    at = row.to(tl.int64) * K + choice
    tl.store(ids + at, tl.where(live, chosen, -1), mask=choice < K)
    tl.store(weights + at, tl.where(live, weight, 0.0), mask=choice < K)


def choose(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    image_bias: Tensor,
    is_image: Tensor,
    valid: Tensor,
    top_k: int,
    route_scale: float,
) -> tuple[Tensor, Tensor]:
    """See op.py. bf16 x [T, D] and gate [E, D], fp32 biases [E], bool flags [T]; D a multiple of 64."""
    rows, hidden = x.shape
    experts = gate.shape[0]
    if x.dtype != torch.bfloat16 or gate.dtype != torch.bfloat16:
        raise ValueError(f"the Triton router multiplies bf16, not {x.dtype} by {gate.dtype}")
    if hidden % 64 or experts > MAX_EXPERTS or not 0 < top_k <= min(experts, MAX_CHOICES):
        raise ValueError(
            f"the Triton router takes {MAX_EXPERTS} experts, {MAX_CHOICES} choices and a hidden size in steps"
            f" of 64, not {experts} experts, {top_k} choices and {hidden}"
        )
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=x.device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=x.device)
    if rows == 0:
        return ids, weights
    if x.stride(1) != 1:
        x = x.contiguous()
    splits = triton.cdiv(hidden, SPLIT)
    partial = torch.empty((splits, rows, experts), dtype=torch.float32, device=x.device)
    _products[(splits, triton.cdiv(experts, COLUMNS), triton.cdiv(rows, ROWS))](
        x, gate.contiguous(), partial, rows, x.stride(0),
        D=hidden, E=experts, ROWS=ROWS, COLUMNS=COLUMNS, SPLIT=SPLIT, STEP=STEP, PDL=x.is_cuda,
        num_warps=4, num_stages=5, launch_pdl=x.is_cuda,
    )  # fmt: skip
    padded = triton.next_power_of_2(experts)
    _select[(rows,)](
        partial, bias.float().contiguous(), image_bias.float().contiguous(),
        is_image.contiguous().view(torch.uint8), valid.contiguous().view(torch.uint8),
        ids, weights, rows, route_scale,
        NUM_EXPERTS=experts, E=padded, SPLITS=splits, K=top_k, KP=triton.next_power_of_2(top_k),
        PDL=x.is_cuda, num_warps=max(1, padded // 128), launch_pdl=x.is_cuda,
    )  # fmt: skip
    return ids, weights
