"""What surrounds the expert products: who runs where, quantised inputs, activation, and the sum over experts.

A pair is one row's one choice, number row * k + j; a padding pair has id -1. `group` orders the live pairs by
expert, a stable counting sort, and cuts every expert's run into slots of at most `chunk` pairs. No atomics:
a pair's place is counted, so it is the same every time.

Up to `ONE_LAUNCH` pairs, one launch: a program for the experts (histogram, sums, slots) and one for every 32
pairs, which compares them with all pairs by the key (expert, number). More pairs take three launches:
histograms of 256 pairs, their running sums, and places inside 256 pairs.

`spread` gathers a slot's rows, quantises them per 32 columns as ops/records.py does, bit for bit, and writes
the B operand of gluon_few.py: for NT rows to a slot, 8 columns of NT rows x 8 / NT scale groups, a column
zero outside its group, so that one product covers 256 / NT of K and still keeps the groups' sums apart; 16
rows take 16 columns of one group.

T rows, k choices, E experts, D hidden size, W expert width, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.ops import records

ONE_LAUNCH = 2048  # pairs; above it comparing all with all costs more than two further launches
PLACES, BLOCK = 32, 256  # pairs that a program places, in one launch and in three


class Groups(NamedTuple):
    """The live pairs by expert, and the slots that they are cut into. All int32, on the device.

    `order` [T * k]: pair numbers by expert, then number; undefined after the last live pair. `offsets`
    [E + 1]: where an expert's run starts in `order`. Slot s < `num_slots` [1] is `slot_count` pairs of expert
    `slot_expert` from `slot_start` on; the slots' arrays [max slots] are undefined after `num_slots`.
    """

    order: Tensor
    offsets: Tensor
    slot_expert: Tensor
    slot_start: Tensor
    slot_count: Tensor
    num_slots: Tensor


# --- Grouping -------------------------------------------------------------------------------------


@triton.jit
def _write_slots(
    count, offsets, slot_expert, slot_start, slot_count, num_slots, num_experts, chunk, E: tl.constexpr
):
    """count [E], pairs of every expert -> offsets and slots."""
    expert = tl.arange(0, E)
    start = tl.cumsum(count, 0) - count
    tl.store(offsets + expert, start, mask=expert < num_experts)
    tl.store(offsets + num_experts, tl.sum(count, 0))
    slots = (count + chunk - 1) // chunk
    first = tl.cumsum(slots, 0) - slots
    tl.store(num_slots, tl.sum(slots, 0))
    most = tl.max(slots, 0)
    part = 0
    while part < most:
        mask = part < slots
        tl.store(slot_expert + first + part, expert, mask=mask)
        tl.store(slot_start + first + part, start + part * chunk, mask=mask)
        tl.store(slot_count + first + part, tl.minimum(count - part * chunk, chunk), mask=mask)
        part += 1


@triton.jit
def _keys(ids, pair, num_pairs):
    """Sorts by expert, then by number; a padding pair comes last."""
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
    return tl.where(expert >= 0, (expert << 16) | pair, 0x7FFFFFFF)


@triton.jit(do_not_specialize=("num_pairs", "num_experts"))
def _group_once(
    ids, order, offsets, slot_expert, slot_start, slot_count, num_slots,
    num_pairs, num_experts, chunk,
    P: tl.constexpr, E: tl.constexpr, STEP: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:
        pair = tl.arange(0, P)
        expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
        count = tl.histogram(tl.maximum(expert, 0), E, mask=expert >= 0)
        _write_slots(
            count, offsets, slot_expert, slot_start, slot_count, num_slots, num_experts, chunk, E
        )  # fmt: skip
    else:
        own = (tl.program_id(0) - 1) * PLACES + tl.arange(0, PLACES)
        key = _keys(ids, own, num_pairs)
        before = tl.zeros((PLACES, STEP), tl.int32)
        for start in range(0, num_pairs, STEP):
            other = _keys(ids, start + tl.arange(0, STEP), num_pairs)
            before += (other[None, :] < key[:, None]).to(tl.int32)
        tl.store(order + tl.sum(before, 1), own, mask=key != 0x7FFFFFFF)


@triton.jit(do_not_specialize=("num_pairs",))
def _count(ids, counts, num_pairs, BLOCK: tl.constexpr, E: tl.constexpr):
    """counts [blocks, E]: pairs of every expert in every block."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
    count = tl.histogram(tl.maximum(expert, 0), E, mask=expert >= 0)
    tl.store(counts + tl.program_id(0) * E + tl.arange(0, E), count)


@triton.jit(do_not_specialize=("num_blocks", "num_experts"))
def _scan(
    counts, offsets, slot_expert, slot_start, slot_count, num_slots, num_blocks, num_experts, chunk,
    E: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """counts becomes, in place, the pairs of every expert before a block; then offsets and slots."""
    expert = tl.arange(0, E)
    total = tl.zeros((E,), tl.int32)
    for start in range(0, num_blocks, STEP):
        block = start + tl.arange(0, STEP)
        at = counts + block[:, None] * E + expert[None, :]
        live = (block < num_blocks)[:, None] & (expert >= 0)[None, :]
        count = tl.load(at, mask=live, other=0)
        tl.store(at, tl.cumsum(count, 0) - count + total[None, :], mask=live)
        total += tl.sum(count, 0)
    _write_slots(total, offsets, slot_expert, slot_start, slot_count, num_slots, num_experts, chunk, E)


@triton.jit(do_not_specialize=("num_pairs",))
def _place(ids, counts, offsets, order, num_pairs, BLOCK: tl.constexpr, E: tl.constexpr, STEP: tl.constexpr):
    base = tl.program_id(0) * BLOCK
    own = base + tl.arange(0, BLOCK)
    expert = tl.load(ids + own, mask=own < num_pairs, other=-1)
    live = expert >= 0
    at = tl.load(offsets + expert, mask=live, other=0)
    at += tl.load(counts + tl.program_id(0) * E + expert, mask=live, other=0)
    before = tl.zeros((BLOCK, STEP), tl.int32)
    for start in range(0, BLOCK, STEP):
        pair = base + start + tl.arange(0, STEP)
        other = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
        same = (other[None, :] == expert[:, None]) & (pair[None, :] < own[:, None])
        before += same.to(tl.int32)
    tl.store(order + at + tl.sum(before, 1), own, mask=live)


def max_slots(num_pairs: int, num_experts: int, chunk: int) -> int:
    """No draw of experts makes more slots: every one but an expert's last is full."""
    return min(num_pairs, num_experts + num_pairs // chunk)


def group(ids: Tensor, num_experts: int, chunk: int) -> Groups:
    """int32 ids [T, k], -1 where padded -> the live pairs by expert, in slots of at most `chunk`.

    Ids are -1 or below `num_experts`, which is at most 4096. Nothing is read by the host.
    """
    assert ids.dtype == torch.int32, f"ids are int32, got {ids.dtype}"
    ids = ids.contiguous()
    num_pairs = ids.numel()
    if num_experts > 4096:
        raise ValueError(f"grouping takes at most 4096 experts, not {num_experts}")
    slots = max_slots(num_pairs, num_experts, chunk)
    sizes = (num_pairs, num_experts + 1, slots, slots, slots, 1)
    if num_pairs == 0:
        return Groups(*(torch.zeros(size, dtype=torch.int32, device=ids.device) for size in sizes))
    groups = Groups(*(torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes))
    padded = max(32, triton.next_power_of_2(num_experts))
    if num_pairs <= ONE_LAUNCH:
        _group_once[(1 + triton.cdiv(num_pairs, PLACES),)](
            ids, *groups, num_pairs, num_experts, chunk,
            P=max(32, triton.next_power_of_2(num_pairs)), E=padded, STEP=64, PLACES=PLACES, num_warps=4,
        )  # fmt: skip
        return groups
    blocks = triton.cdiv(num_pairs, BLOCK)
    counts = torch.empty((blocks, padded), dtype=torch.int32, device=ids.device)
    _count[(blocks,)](ids, counts, num_pairs, BLOCK=BLOCK, E=padded, num_warps=4)
    _scan[(1,)](
        counts, *groups[1:], blocks, num_experts, chunk, E=padded, STEP=max(1, 4096 // padded), num_warps=8
    )
    _place[(blocks,)](
        ids, counts, groups.offsets, groups.order, num_pairs, BLOCK=BLOCK, E=padded, STEP=32, num_warps=8
    )
    return groups


# --- Quantised inputs -----------------------------------------------------------------------------


@triton.jit
def _quantise(x, FLOOR: tl.constexpr, RECIPROCAL: tl.constexpr):
    """fp32 [..., 32] -> int32 e4m3 codes, and int32 exponents + 127 of their scales [...], 255 for NaN.

    Integers on fp32 bits: |x| is compared as an integer, where NaN ranks above infinity. A block whose scale
    is NaN may have any codes. No magnitude exceeds 448 here, and none but NaN saturates.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits, 2).to(tl.float32, bitcast=True)
    target = (tl.where(largest < FLOOR, FLOOR, largest) * RECIPROCAL).to(tl.int32, bitcast=True)
    exponent = tl.minimum((target >> 23) + ((target & 0x7FFFFF) != 0).to(tl.int32), 255)
    inverse = (((254 - exponent) & 0xFF) << 23).to(tl.float32, bitcast=True)
    scaled = (x * inverse[:, :, None]).to(tl.int32, bitcast=True)
    bits = scaled & 0x7FFFFFFF
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # fp32 numbers at 2^14 are 2^-9 apart, as e4m3 codes are below the first normal one, 2^-6.
    subnormal = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(bits < 0x3C800000, subnormal, normal)
    return (code & 0x7F) | ((scaled >> 24) & 0x80), exponent


@triton.jit
def _spread(
    x, codes, scales, order, slot_start, slot_count, num_slots, x_stride,
    D: tl.constexpr, NT: tl.constexpr, TOP_K: tl.constexpr, SOLO: tl.constexpr, PDL: tl.constexpr,
    FLOOR: tl.constexpr, RECIPROCAL: tl.constexpr,
):  # fmt: skip
    if PDL:
        # Waits before it lets the next kernel start: that one reads the slots without a wait of its own.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    slot = tl.program_id(1)
    N: tl.constexpr = 8 if NT < 8 else NT  # columns of a product
    GP: tl.constexpr = N // NT  # its scale groups
    live = True if SOLO else slot < tl.load(num_slots)
    if live:
        token = tl.arange(0, NT)
        if SOLO:
            count = 1
            row = tl.zeros((NT,), tl.int64)
        else:
            count = tl.load(slot_count + slot)
            pair = tl.load(order + tl.load(slot_start + slot) + token, mask=token < count, other=0)
            row = (pair // TOP_K).to(tl.int64)
        group = tl.arange(0, 8)
        at = (row * x_stride)[:, None] + (chunk * 256 + group * 32)[None, :]
        at = at[:, :, None] + tl.arange(0, 32)[None, None, :]
        value = tl.load(x + at, mask=(token < count)[:, None, None], other=0.0).to(tl.float32)
        code, exponent = _quantise(value, FLOOR, RECIPROCAL)
        place = slot.to(tl.int64) * (D // 256) + chunk
        # Row of the B operand: [product, token, group of the product].
        b_row = ((group // GP) * N + group % GP)[None, :] + (token * GP)[:, None]
        # 2^(exponent - 127), times the 2^6 by which the weights' e4m3 codes fall short.
        scale = tl.where(exponent == 255, 0x7FC00000, (exponent + 6) << 23).to(tl.float32, bitcast=True)
        tl.store(scales + place * (8 * NT) + b_row, scale)
        part = tl.arange(0, GP)[None, None, :, None]
        own = part == (group % GP)[None, :, None, None]
        wide = tl.where(own, code[:, :, None, :], 0).to(tl.uint8)
        at = b_row[:, :, None, None] * (32 * GP) + part * 32 + tl.arange(0, 32)[None, None, None, :]
        tl.store(codes + place * (256 * N) + at, wide)


def scale_groups(rows: int) -> int:
    """Scale groups that one product of slots of `rows` rows covers: eight columns, or as many as rows."""
    return max(1, 8 // rows)


def spread(x: Tensor, groups: Groups | None, top_k: int, slots: int, rows: int) -> tuple[Tensor, Tensor]:
    """bf16 x [T, D] -> e4m3 codes uint8 [S * D / 256, operand bytes] and fp32 scales [S * D / 256, 8 * rows].

    `rows` 1, 4, 8 or 16 are the rows of a slot. Without groups x has one row, and slot j is its choice j.
    """
    hidden = x.shape[1]
    chunks = hidden // 256
    codes = torch.empty((slots * chunks, 256 * rows * scale_groups(rows)), dtype=torch.uint8, device=x.device)
    scales = torch.empty((slots * chunks, 8 * rows), dtype=torch.float32, device=x.device)
    solo = groups is None
    assert not solo or (x.shape[0] == 1 and rows == 1), "one row, one row to a slot"
    table = (codes,) * 4 if groups is None else (groups.order, *groups[3:])
    _spread[(chunks, slots)](
        x, codes, scales, *table, x.stride(0),
        D=hidden, NT=rows, TOP_K=top_k, SOLO=solo, PDL=x.is_cuda,
        FLOOR=records.FP8_FLOOR, RECIPROCAL=records.FP32_RECIPROCAL_448,
        num_warps=2, launch_pdl=x.is_cuda,
    )  # fmt: skip
    return codes, scales


# --- Activation and sum ---------------------------------------------------------------------------


@triton.jit(do_not_specialize=("limit",))
def _activate(gate_up, hidden, limit, W: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    mask = column < W
    gate = tl.load(gate_up + row * (2 * W) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * W) + W + column, mask=mask, other=0.0).to(tl.float32)
    # Comparisons, because a minimum would turn NaN into the limit.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = gate * (1.0 / (1.0 + tl.exp(-gate))) * up
    tl.store(hidden + row * W + column, value.to(tl.bfloat16), mask=mask)


def activate(gate_up: Tensor, limit: float) -> Tensor:
    """bf16 [T, 2W], gates then ups -> bf16 [T, W]: silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up.contiguous()
    hidden = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _activate[(triton.cdiv(width, 512), rows)](
            gate_up, hidden, limit, W=width, WIDTH=512, PDL=hidden.is_cuda,
            num_warps=2, launch_pdl=hidden.is_cuda,
        )  # fmt: skip
    return hidden


@triton.jit
def _combine(
    y, ids, shared, out, shared_stride,
    D: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    mask = column < D
    choice = tl.arange(0, KP)
    expert = tl.load(ids + row * K + choice, mask=choice < K, other=-1)
    key = tl.where(expert >= 0, expert * KP + choice, 0x7FFFFFFF)
    rank = tl.sum((key[None, :] < key[:, None]).to(tl.int32), 1)
    num_live = tl.sum((expert >= 0).to(tl.int32), 0)
    if PDL:
        tl.extra.cuda.gdc_wait()  # also for `shared`, which another stream may have written
    beside = tl.load(shared + row * shared_stride + column, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    for place in tl.static_range(K):
        j = tl.sum(tl.where(rank == place, choice, 0), 0)
        live = place < num_live
        j = tl.where(live, j, 0)
        value = tl.load(y + (row * K + j) * D + column, mask=mask & live, other=0.0)
        total += value.to(tl.float32)
    tl.store(out + row * D + column, (total + beside).to(tl.bfloat16), mask=mask)


def combine(y: Tensor, ids: Tensor, shared: Tensor) -> Tensor:
    """bf16 y [T * k, D], ids [T, k], bf16 shared [T, D] -> bf16 [T, D]: the live pairs' rows in ascending
    expert order, then the shared expert's, in fp32, rounded once. Rows of padding pairs are not read."""
    rows, hidden = shared.shape
    out = torch.empty((rows, hidden), dtype=shared.dtype, device=shared.device)
    if rows == 0:
        return out
    if shared.stride(1) != 1:
        shared = shared.contiguous()
    top_k = ids.shape[1]
    _combine[(triton.cdiv(hidden, 512), rows)](
        y, ids.contiguous(), shared, out, shared.stride(0),
        D=hidden, K=top_k, KP=triton.next_power_of_2(top_k), WIDTH=512, PDL=y.is_cuda,
        num_warps=2, launch_pdl=y.is_cuda,
    )  # fmt: skip
    return out
