"""fp4 experts for few rows on Hopper: every weight is read once, by TMA, and becomes fp8 in registers.

Layout. gluon_pack.py's byte order. A CTA of four warps owns a tile of 64 weight rows and all of K, four bands
of 16 rows, a warp each. It walks K in chunks of 256 through a ring of TMA stages: 8 KB of codes, 512 bytes of
scales, 2 KB of the rows' fp8 codes.

Grid [tiles, slots]. A slot is an expert and at most NT of its rows (triton_group.py). A gate/up tile has 8
gate and 8 up rows in a band, so a CTA owns 32 intermediates, which is one quantisation group: activation,
routing weight and quantisation end the kernel, and it writes the down product's operand.

The trick. Two masks and two shifts make eight e4m3 values of a word of eight fp4 codes, in the register where
the wgmma A operand wants them; they are 2^-6 of the codes' values, which the rows' scales give back. Scales
change every 32 of K, and promoting every product would cost as much as the products, so the eight columns of
a product are NT rows times 8 / NT scale groups: a column's operand is zero outside its group (`spread`), one
product covers 256 / NT of K, and each accumulator meets one row scale and one weight scale. The zeros also
keep a row's NaN in its own columns. 16 rows take 16 columns: a sixth more instructions than 8 rows, for
experts that would fill two slots.

A launch follows its predecessor by programmatic dependent launch: the weights' first stages are on their way
before it waits for the rows. `spread` waits for the grouping before it lets gate/up start, so slots may be
read without a wait.

Rounding: e4m3 rows, exact weights, products accumulated as the tensor core does for fp8 (about 14 bits inside
32 of K, as the release), fp32 beyond; gate, up, hidden and output rounded to bf16. Scale bytes of weights are
taken as 1 to 254. A prototype of this design took 36 to 38 / 194 / 443 / 622 us at 1 / 8 / 32 / 128 rows of
the release's experts on an H200, grouping excluded; more CTAs beat a deeper ring there, and bf16 products
were slower (45 / 223 / 509 / 843 us).

T rows, k choices, E experts, D hidden size, W expert width, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

from dsv41.ops import records
from dsv41.ops.moe import triton_group

FP8_FLOOR = gl.constexpr(records.FP8_FLOOR)
RECIPROCAL = gl.constexpr(records.FP32_RECIPROCAL_448)
FOUR_ROWS, EIGHT_ROWS = 48, 128  # up to here a slot has four rows, then eight, above them sixteen

# Four words of weights -> eight registers of four e4m3: rows g, then rows g + 8, of every word.
_WORD = """and.b32 ${low}, ${word}, 0x9C9C9C9C;
shr.u32 a, ${word}, 2; and.b32 a, a, 0x10101010;
shl.b32 b, ${word}, 2; lop3.b32 ${high}, b, 0x8C8C8C8C, a, 0xEA;
"""
_TO_E4M3 = gl.constexpr(
    "{ .reg .b32 a, b;\n"
    + "".join(_WORD.format(low=2 * word, high=2 * word + 1, word=8 + word) for word in range(4))
    + "}"
)


@gluon.constexpr_function
def _columns(nt):
    """Columns of a product: `nt` rows times scale groups, at least the eight that a product has."""
    return max(8, nt)


@gluon.constexpr_function
def _acc(nt):
    """The layout of a product [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _columns(nt), 32])


@gluon.constexpr_function
def _a(nt):
    return gl.DotOperandLayout(0, _acc(nt), 4)


@gluon.constexpr_function
def _stage_bytes(nt):
    """Codes and scales of the weights, codes of the rows."""
    return 8192 + 512 + 256 * _columns(nt)


# --- Weights in registers -------------------------------------------------------------------------


@gluon.jit
def _to_e4m3(words):
    """int32 [4, B, 128] of B blocks -> e4m3 of k 0..31 and of k 32..63, [4, B, 128, half of the rows, h].

    The asm sees a lane's four words of a block as one pack; which byte is which k is only a label.
    """
    w0_low, w0_high, w1_low, w1_high, w2_low, w2_high, w3_low, w3_high = gl.inline_asm_elementwise(
        _TO_E4M3, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", [words],
        dtype=(gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv,
               gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv),
        is_pure=True, pack=4)  # fmt: skip
    first = gl.join(gl.join(w0_low, w0_high), gl.join(w1_low, w1_high))
    second = gl.join(gl.join(w2_low, w2_high), gl.join(w3_low, w3_high))
    return first, second


@gluon.jit
def _operand(words, BLOCKS: gl.constexpr, NT: gl.constexpr):
    """int32 [4, BLOCKS, 128] -> the A operand [64, 64 * BLOCKS], no data moved."""
    first, second = _to_e4m3(words)
    # band, block, g, t, i, half, h, q -> band, half, g | block, q, h, t, i
    codes = gl.join(first, second).reshape([4, BLOCKS, 8, 4, 4, 2, 2, 2])
    codes = codes.permute([0, 5, 2, 1, 7, 6, 3, 4]).reshape([64, BLOCKS * 64])
    return gl.convert_layout(codes, _a(NT), assert_trivial=True)


@gluon.jit
def _half_operand(codes, NT: gl.constexpr):
    """e4m3 [4, 1, 128, half, h] -> the A operand [64, 32]."""
    codes = codes.reshape([4, 8, 4, 4, 2, 2]).permute([0, 4, 1, 5, 2, 3]).reshape([64, 32])
    return gl.convert_layout(codes, _a(NT), assert_trivial=True)


@gluon.jit
def _halves(words, BLOCKS: gl.constexpr):
    """The first and the second half of the blocks."""
    return gl.split(words.reshape([4, 2, BLOCKS // 2, 128]).permute([0, 2, 3, 1]))


@gluon.jit
def _scales(words, EVEN: gl.constexpr, ODD: gl.constexpr, NT: gl.constexpr):
    """int32 words [4, 8, 4] of bytes (half of the rows, group of a pair) -> fp32 [64, columns] as a product's
    accumulators lie; the group EVEN serves the even columns, ODD the odd ones."""
    low_even = (words << (23 - 8 * EVEN)) & 0x7F800000
    low_odd = (words << (23 - 8 * ODD)) & 0x7F800000
    if EVEN == 0:
        high_even = (words << 7) & 0x7F800000
    else:
        high_even = (words >> 1) & 0x7F800000
    if ODD == 0:
        high_odd = (words << 7) & 0x7F800000
    else:
        high_odd = (words >> 1) & 0x7F800000
    bits = gl.join(gl.join(low_even, low_odd), gl.join(high_even, high_odd))  # band, g, t, column, half
    if NT == 16:
        bits = gl.join(bits, bits).permute([0, 4, 1, 5, 2, 3]).reshape([64, 16])
    else:
        bits = bits.permute([0, 4, 1, 2, 3]).reshape([64, 8])
    return gl.convert_layout(bits, _acc(NT), assert_trivial=True).to(gl.float32, bitcast=True)


@gluon.constexpr_function
def _pair_layout():
    """[4 bands, 8 rows, 4 columns, 4 pairs]: a lane holds the pairs of its row."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]], [], [4, 8, 4, 4])  # fmt: skip


@gluon.jit
def _pair_words(scales):
    """A stage's scales, int32 [4, 32] -> the words of pairs 0..3, each [4, 8, 4] alike in every column."""
    FLAT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 0], [0, 0], [0, 4], [0, 8], [0, 16]], [[1, 0], [2, 0]], [],
        [4, 32])  # fmt: skip
    PAIRS: gl.constexpr = _pair_layout()
    words = scales.load(FLAT).reshape([4, 8, 4])
    words = gl.convert_layout(words, gl.SliceLayout(2, PAIRS), assert_trivial=True)
    words = gl.expand_dims(words, 2) + gl.zeros([4, 8, 4, 4], gl.int32, PAIRS)
    low, high = gl.split(words.reshape([4, 8, 4, 2, 2]).permute([0, 1, 2, 4, 3]))
    w0, w1 = gl.split(low)
    w2, w3 = gl.split(high)
    return w0, w1, w2, w3


# --- Products -------------------------------------------------------------------------------------


@gluon.jit
def _four(acc, a, rows, factors, FIRST: gl.constexpr, NT: gl.constexpr):
    """Four products in flight at once, then acc += product * factor in order."""
    N: gl.constexpr = _columns(NT)
    zero = gl.zeros([64, N], gl.float32, _acc(NT))
    a0, a1, a2, a3 = a
    f0, f1, f2, f3 = factors
    x0 = rows.slice(FIRST * N, N).permute((1, 0))
    x1 = rows.slice((FIRST + 1) * N, N).permute((1, 0))
    x2 = rows.slice((FIRST + 2) * N, N).permute((1, 0))
    x3 = rows.slice((FIRST + 3) * N, N).permute((1, 0))
    t0 = warpgroup_mma(a0, x0, zero, use_acc=False, is_async=True)
    t1 = warpgroup_mma(a1, x1, zero, use_acc=False, is_async=True)
    t2 = warpgroup_mma(a2, x2, zero, use_acc=False, is_async=True)
    t3 = warpgroup_mma(a3, x3, zero, use_acc=False, is_async=True)
    p0, p1, p2, p3 = warpgroup_mma_wait(0, deps=[t0, t1, t2, t3])
    acc = acc + p0 * f0
    acc = acc + p1 * f1
    acc = acc + p2 * f2
    return acc + p3 * f3


@gluon.jit
def _factor(row_scale, words, EVEN: gl.constexpr, ODD: gl.constexpr, NT: gl.constexpr):
    return row_scale[None, :] * _scales(words, EVEN, ODD, NT)


@gluon.jit
def _four_halves(acc, b0, b1, rows, e, s0, s1, FIRST: gl.constexpr, NT: gl.constexpr):
    """Two blocks of 64 k, one scale group a product: `e` and the words s0, s1 are their scales."""
    q0, q1 = _to_e4m3(b0)
    q2, q3 = _to_e4m3(b1)
    a = (_half_operand(q0, NT), _half_operand(q1, NT), _half_operand(q2, NT), _half_operand(q3, NT))
    factors = (
        _factor(e[FIRST], s0, 0, 0, NT), _factor(e[FIRST + 1], s0, 1, 1, NT),
        _factor(e[FIRST + 2], s1, 0, 0, NT), _factor(e[FIRST + 3], s1, 1, 1, NT),
    )  # fmt: skip
    return _four(acc, a, rows, factors, FIRST, NT)


@gluon.jit
def _row_scales(at, NT: gl.constexpr):
    """The row scales of a chunk's products; loaded before the wait for the stage they belong to."""
    N: gl.constexpr = _columns(NT)
    e0 = gl.load(at)
    if NT == 1:
        e = (e0,)
    else:
        e1 = gl.load(at + N)
        e2 = gl.load(at + 2 * N)
        e3 = gl.load(at + 3 * N)
        if NT == 4:
            e = (e0, e1, e2, e3)
        else:
            e4 = gl.load(at + 4 * N)
            e5 = gl.load(at + 5 * N)
            e6 = gl.load(at + 6 * N)
            e7 = gl.load(at + 7 * N)
            e = (e0, e1, e2, e3, e4, e5, e6, e7)
    return e


@gluon.jit
def _chunk(acc, e, w_s, s_s, x_s, NT: gl.constexpr):
    """acc [64, columns] plus one stage; e from `_row_scales`."""
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0]], [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]], [[4, 0], [8, 0]], [],
        [16, 128])  # fmt: skip
    words = w_s.load(WORDS).reshape([4, 4, 128])
    if NT == 1:
        PAIR: gl.constexpr = gl.DistributedLinearLayout(
            [], [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], [[1, 0], [2, 0]], [], [4, 32])  # fmt: skip
        scales = s_s.load(PAIR).reshape([4, 8, 4])
        zero = gl.zeros([64, 8], gl.float32, _acc(NT))
        product = warpgroup_mma(_operand(words, 4, NT), x_s.permute((1, 0)), zero, use_acc=False)
        acc = acc + product * _factor(e[0], scales, 0, 1, NT)
    else:
        s0, s1, s2, s3 = _pair_words(s_s)
        low, high = _halves(words, 4)
        b0, b1 = _halves(low, 2)
        b2, b3 = _halves(high, 2)
        if NT == 4:
            a = (_operand(b0, 1, NT), _operand(b1, 1, NT), _operand(b2, 1, NT), _operand(b3, 1, NT))
            factors = (
                _factor(e[0], s0, 0, 1, NT), _factor(e[1], s1, 0, 1, NT),
                _factor(e[2], s2, 0, 1, NT), _factor(e[3], s3, 0, 1, NT),
            )  # fmt: skip
            acc = _four(acc, a, x_s, factors, 0, NT)
        else:
            acc = _four_halves(acc, b0, b1, x_s, e, s0, s1, 0, NT)
            acc = _four_halves(acc, b2, b3, x_s, e, s2, s3, 4, NT)
    return acc


@gluon.jit
def _issue_weights(weight, scale, bar, w_s, s_s, chunk, pred, BYTES: gl.constexpr):
    mbarrier.expect(bar, BYTES, pred=pred)
    tma.async_copy_global_to_shared(weight, [chunk * 16, 0], bar, w_s, pred=pred)
    tma.async_copy_global_to_shared(scale, [chunk * 4, 0], bar, s_s, pred=pred)


@gluon.jit
def _tile(rows, row_scales, weight, scale, slot, tile, CHUNKS: gl.constexpr, NT: gl.constexpr,
          STAGES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """The products of one tile of weight rows (counted over all experts) with one slot -> fp32 [64, NT]."""
    N: gl.constexpr = _columns(NT)
    GP: gl.constexpr = N // NT
    ROWS: gl.constexpr = 8 * NT  # of the operand: every product's columns
    BYTES: gl.constexpr = _stage_bytes(NT)
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, 32 * GP], rows.layout)
    w_s = gl.allocate_shared_memory(gl.int32, [STAGES, 16, 128], weight.layout)
    s_s = gl.allocate_shared_memory(gl.int32, [STAGES, 4, 32], scale.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    x_chunk = slot * CHUNKS
    w_chunk = tile * CHUNKS
    for i in gl.static_range(STAGES - 1):
        _issue_weights(
            weight, scale, bars.index(i), w_s.index(i), s_s.index(i), w_chunk + i, i < CHUNKS, BYTES
        )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for i in gl.static_range(STAGES - 1):
        tma.async_copy_global_to_shared(
            rows, [(x_chunk + i) * ROWS, 0], bars.index(i), x_s.index(i), pred=i < CHUNKS)  # fmt: skip
    acc = gl.zeros([64, N], gl.float32, _acc(NT))
    row_scales += x_chunk.to(gl.int64) * ROWS + gl.arange(0, N, gl.SliceLayout(0, _acc(NT)))
    stage = 0
    phase = 0
    for i in range(CHUNKS):
        e = _row_scales(row_scales + i * ROWS, NT)
        mbarrier.wait(bars.index(stage), phase)
        # Every warp is done with the stage before this one: it may be filled again.
        gl.thread_barrier()
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        ahead = i + STAGES - 1
        bar = bars.index(free)
        more = ahead < CHUNKS
        _issue_weights(weight, scale, bar, w_s.index(free), s_s.index(free), w_chunk + ahead, more, BYTES)
        tma.async_copy_global_to_shared(
            rows, [(x_chunk + ahead) * ROWS, 0], bar, x_s.index(free), pred=more)  # fmt: skip
        acc = _chunk(acc, e, w_s.index(stage), s_s.index(stage), x_s.index(stage), NT)
        last = stage == STAGES - 1
        phase = gl.where(last, phase ^ 1, phase)
        stage = gl.where(last, 0, stage + 1)
    return gl.sum(acc.reshape([64, NT, GP]), 2)


# --- Kernels --------------------------------------------------------------------------------------


@gluon.jit
def _slot(slot_expert, slot_start, slot_count, num_slots, SOLO: gl.constexpr):
    """-> (expert, -1 if there is nothing to do; start; count) of this program's slot."""
    slot = gl.program_id(1)
    if SOLO:  # one row: its choices are the slots, `slot_expert` their ids
        expert = gl.load(slot_expert + slot)
        start = slot
        count = slot * 0 + 1
    else:
        live = slot < gl.load(num_slots)
        expert = gl.load(slot_expert + slot, mask=live, other=-1)
        start = gl.load(slot_start + slot, mask=live, other=0)
        count = gl.load(slot_count + slot, mask=live, other=0)
    return expert, start, count


@gluon.jit
def _pairs(order, start, count, token, SOLO: gl.constexpr):
    """Pair numbers of a slot's rows; some pair where there is none."""
    if SOLO:
        pair = start + token
    else:
        pair = gl.load(order + start + token, mask=token < count, other=0)
    return pair


@gluon.jit
def _bf16(x):
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def _quantise(hidden):
    """fp32 [32, NT] -> e4m3 codes as uint8, and exponents + 127 of the scales [NT], 255 for NaN."""
    # As integers NaN ranks above every magnitude.
    largest = gl.max(hidden.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(gl.float32, bitcast=True)
    largest = gl.where(largest < FP8_FLOOR, FP8_FLOOR, largest)
    target = (largest * RECIPROCAL).to(gl.int32, bitcast=True)
    exponent = (target >> 23) + gl.where((target & 0x7FFFFF) != 0, 1, 0)
    exponent = gl.minimum(exponent, 255)
    inverse = (((254 - exponent) & 0xFF) << 23).to(gl.float32, bitcast=True)
    codes = (hidden * inverse[None, :]).to(gl.float8e4nv)
    return codes.to(gl.uint8, bitcast=True), exponent


@gluon.jit(do_not_specialize=("limit",))
def _gate_up(rows, row_scales, weight, scale, hidden, hidden_scales, order, slot_expert, slot_start,
             slot_count, num_slots, route_weights, limit,
             D: gl.constexpr, W: gl.constexpr, NT: gl.constexpr, STAGES: gl.constexpr,
             SOLO: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    expert, start, count = _slot(slot_expert, slot_start, slot_count, num_slots, SOLO)
    if expert >= 0:
        N: gl.constexpr = _columns(NT)
        GP: gl.constexpr = N // NT
        tile = gl.program_id(0)
        slot = gl.program_id(1)
        acc = _tile(rows, row_scales, weight, scale, slot, expert * (W // 32) + tile, D // 256, NT, STAGES,
                    PDL)  # fmt: skip
        LANES: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
        # A band's rows g and g + 8 are a gate and its up.
        gate, up = gl.split(acc.reshape([4, 2, 8, NT]).permute([0, 2, 3, 1]).reshape([32, NT, 2]))
        gate = _bf16(gl.convert_layout(gate, LANES))
        up = _bf16(gl.convert_layout(up, LANES))
        # Comparisons, because a minimum would turn NaN into the limit.
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
        token = gl.arange(0, NT, gl.SliceLayout(0, LANES))
        pair = _pairs(order, start, count, token, SOLO)
        route_weight = gl.load(route_weights + pair, mask=token < count, other=0.0)
        value = _bf16(gate * (1.0 / (1.0 + gl.exp(-gate))) * up * route_weight[None, :])
        codes, exponent = _quantise(value)
        # The down product's operand: row [chunk, product, token, group], zero outside its own 32 columns.
        place = slot.to(gl.int64) * (W // 256) + tile // 8
        row = tile % 8 // GP * N + token * GP + tile % GP
        lane = gl.arange(0, 32, gl.SliceLayout(1, LANES))
        at = place * (256 * N) + ((row * (32 * GP))[None, :] + lane[:, None])
        for part in gl.static_range(GP):
            gl.store(hidden + (at + part * 32), gl.where(tile % GP == part, codes, gl.zeros_like(codes)))
        bits = gl.where(exponent == 255, 0x7FC00000, (exponent + 6) << 23)  # times the weights' 2^6
        gl.store(hidden_scales + (place * (8 * NT) + row), bits.to(gl.float32, bitcast=True))


@gluon.jit
def _down(rows, row_scales, weight, scale, y, order, slot_expert, slot_start, slot_count, num_slots,
          D: gl.constexpr, W: gl.constexpr, NT: gl.constexpr, STAGES: gl.constexpr, SOLO: gl.constexpr,
          PDL: gl.constexpr):  # fmt: skip
    expert, start, count = _slot(slot_expert, slot_start, slot_count, num_slots, SOLO)
    if expert >= 0:
        tile = gl.program_id(0)
        acc = _tile(rows, row_scales, weight, scale, gl.program_id(1), expert * (D // 64) + tile, W // 256,
                    NT, STAGES, PDL)  # fmt: skip
        ROWS: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
        acc = gl.convert_layout(acc, ROWS)
        token = gl.arange(0, NT, gl.SliceLayout(0, ROWS))
        pair = _pairs(order, start, count, token, SOLO)
        column = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, ROWS))
        at = (pair.to(gl.int64) * D)[None, :] + column[:, None]
        # The second comparison only spreads the mask.
        gl.store(y + at, acc.to(gl.bfloat16), mask=(token < count)[None, :] & (column >= 0)[:, None])


# --- Host -----------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How a row count runs: rows of a slot, TMA stages, registers of a thread."""

    rows: int
    stages: int
    registers: int


def plan(rows: int) -> Plan:
    """With one row an expert has one; with few, a slot of four is seldom full and its products are wide."""
    if rows == 1:
        return Plan(1, 5, 128)
    # 96 registers make five CTAs an SM; at 80 the factors spill, at 72 ptxas serialises the products.
    if rows <= EIGHT_ROWS:
        return Plan(4 if rows <= FOUR_ROWS else 8, 3, 96)
    return Plan(16, 3, 128)


class Work(NamedTuple):
    """The slots of a call and who is in them."""

    plan: Plan
    slots: int
    solo: bool  # one row: its choices are the slots, nothing was grouped
    table: tuple[Tensor, ...]  # order, slot_expert, slot_start, slot_count, num_slots; `solo`: the ids


def weight_descriptors(weight: Tensor, scale: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Packed weights [E, N, K/2] and scales [E, N, K/32] as TMA boxes of one tile and 256 of K."""
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    words = weight.view(torch.uint8).view(torch.int32).view(-1, 128)
    scale_words = scale.view(torch.uint8).view(torch.int32).view(-1, 32)
    return (
        TensorDescriptor.from_tensor(words, [16, 128], flat),
        TensorDescriptor.from_tensor(scale_words, [4, 32], flat),
    )


def row_descriptor(codes: Tensor, rows: int) -> TensorDescriptor:
    """Codes [S * K / 256, ...] as boxes of one slot's 256 columns, 8 * rows operand rows."""
    width = 32 * triton_group.scale_groups(rows)
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=min(128, width), element_bitwidth=8, rank=2)
    operand = codes.view(torch.float8_e4m3fn).view(-1, width)
    return TensorDescriptor.from_tensor(operand, [8 * rows, width], swizzled)


def _options(work: Work, hidden: int, width: int) -> dict[str, object]:
    return {
        "D": hidden, "W": width, "NT": work.plan.rows, "STAGES": work.plan.stages, "SOLO": work.solo,
        "PDL": True, "num_warps": 4, "maxnreg": work.plan.registers, "launch_pdl": True,
    }  # fmt: skip


def quantised_rows(x: Tensor, ids: Tensor, num_experts: int, chosen: Plan) -> tuple[Work, Tensor, Tensor]:
    """Groups the pairs, quantises their rows -> (work, codes, scales) as `triton_group.spread` has them."""
    top_k = ids.shape[1]
    if x.shape[0] == 1 and chosen.rows == 1:
        work, groups = Work(chosen, top_k, True, (ids,) * 5), None
    else:
        groups = triton_group.group(ids, num_experts, chosen.rows)
        slots = triton_group.max_slots(ids.numel(), num_experts, chosen.rows)
        work = Work(chosen, slots, False, (groups.order, *groups[2:]))
    return work, *triton_group.spread(x, groups, top_k, work.slots, chosen.rows)


def hidden_rows(
    work: Work, codes: Tensor, scales: Tensor, gate_up: Tensor, gate_up_scale: Tensor, weights: Tensor,
    limit: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gate/up products and all that is rounded after them -> (codes, scales) for the down products."""
    hidden, width, rows = 2 * gate_up.shape[2], gate_up.shape[1] // 2, work.plan.rows
    chunks = work.slots * width // 256
    inner = torch.empty((chunks, codes.shape[1]), dtype=torch.uint8, device=codes.device)
    inner_scales = torch.empty((chunks, 8 * rows), dtype=torch.float32, device=codes.device)
    _gate_up[(width // 32, work.slots)](
        row_descriptor(codes, rows), scales, *weight_descriptors(gate_up, gate_up_scale), inner, inner_scales,
        *work.table, weights, limit, **_options(work, hidden, width),
    )  # fmt: skip
    return inner, inner_scales


def output_rows(
    work: Work, codes: Tensor, scales: Tensor, down: Tensor, down_scale: Tensor, num_pairs: int
) -> Tensor:
    """The down products -> bf16 [T * k, D]."""
    hidden, width = down.shape[1], 2 * down.shape[2]
    y = torch.empty((num_pairs, hidden), dtype=torch.bfloat16, device=codes.device)
    _down[(hidden // 64, work.slots)](
        row_descriptor(codes, work.plan.rows), scales, *weight_descriptors(down, down_scale), y, *work.table,
        **_options(work, hidden, width),
    )  # fmt: skip
    return y


def run_few(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    limit: float,
    chosen: Plan | None = None,
) -> Tensor:
    """bf16 x [T, D], int32 ids and fp32 weights [T, k], packed weights -> bf16 [T * k, D], a row a pair.

    Rows of padding pairs (id -1) are undefined. At least one row; widths as `gluon_pack.check_weights` has
    them. `chosen` stands in for the row count's own plan.
    """
    ids, weights = ids.contiguous(), weights.contiguous()
    work, codes, scales = quantised_rows(x, ids, gate_up.shape[0], chosen or plan(x.shape[0]))
    codes, scales = hidden_rows(work, codes, scales, gate_up, gate_up_scale, weights, limit)
    return output_rows(work, codes, scales, down, down_scale, ids.numel())
