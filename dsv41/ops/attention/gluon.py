"""Sparse attention on Hopper, straight from packed pages (Triton's Gluon, wgmma).

Layout. A persistent grid, one CTA an SM. An item is a row, or one of several contiguous ranges of a row's
64-key tiles (window tiles first, then selected states). Shared memory, about 206 KB: Q [64, 512], two
buffers K [64, 512] (bf16, 128-byte swizzle; a tile is keys and values at once), P [64, 64], a bias per key
(0 or -inf). Eight consumer warps run QK (each warpgroup half of the keys), softmax and PV (each warpgroup
half of the channels); four or eight producer warps gather records, decode them to bf16 in registers and
store them to a free K buffer. The next row's Q is on its way while a row's output leaves. Fewer than 64
heads are padded.

Grid. T rows over S SMs leave a last wave of T % S rows; those are split over keys so that they fill the
machine, and `_combine` merges their fp32 partial results. With few rows the last wave is all there is (grid
[splits, rows]). `deterministic` never splits: one item a row, so a row's bits cannot depend on the rows
beside it.

The trick. A code becomes bf16 without a table: its bits move into the sign, exponent and mantissa fields,
and one bf16x2 product with a power of two (times the e4m3 scale of an fp4 block) makes the value, subnormal
codes included. Every K tile holds true values times 2^-9, which keeps that factor inside bf16's range; the
softmax scale and the output give it back. A lane decodes 32 channels and its four 16-byte stores must not
meet other lanes' banks, so the groups of 8 channels stand permuted in shared memory (`_channel`), in K, in
Q and in the staged output alike.

Tried on an H200 and slower: the next tile's QK before this tile's PV (10 % at 4096 rows), decoding before
the wait for a buffer (2 %), natural channel order inside a group with Q by cp.async (14 %; that decode is
all ALU), the next tile's slots one tile early (1 us at few rows, 0.3 % gained at many), Q prefetched to L2
(2 %).

A record's scales are taken as finite: e8m0 bytes above 143 (2^16) count as 143, NaN codes count as numbers.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda.gdc import gdc_wait

from dsv41.ops import records

MAX_HEADS, HEAD_DIM, TILE_KEYS = 64, 512, 64
HEADS, DIM, TILE = gl.constexpr(MAX_HEADS), gl.constexpr(HEAD_DIM), gl.constexpr(TILE_KEYS)
LOG2E = gl.constexpr(1.4426950408889634)
MAX_SPLITS = 16
FP4, FP8, MIXED, BF16 = (gl.constexpr(i) for i in range(4))  # how a record is decoded
KINDS = MappingProxyType({
    "scaled_528": FP8,
    "scaled_528_split": FP8,
    "nvfp4_288": FP4,
    "nvfp4_288_split": FP4,
    "mixed_584": MIXED,
    "rows_bf16": BF16,
})  # fmt: skip
# For measurements. "four_warps": with many rows, too, half of the producers and the wide second product.
VARIANTS = MappingProxyType({"default": 8, "four_warps": 4})  # producer warps of many rows
ROPE_DIM = 64  # of `mixed_584`, the one record whose bytes depend on it

# Eight fp4 codes of one word -> four bf16 pairs (r, r + 4), which lie 16 bits apart in the word.
_FP4 = tl.constexpr("""{
.reg .b32 t, u;
shl.b32 t, $4, 6; and.b32 t, t, 0x01C001C0; shl.b32 u, $4, 12; lop3.b32 t, u, 0x80008000, t, 0xEA;
mul.rn.bf16x2 $0, t, $5;
shl.b32 t, $4, 2; and.b32 t, t, 0x01C001C0; shl.b32 u, $4, 8; lop3.b32 t, u, 0x80008000, t, 0xEA;
mul.rn.bf16x2 $1, t, $5;
shr.u32 t, $4, 2; and.b32 t, t, 0x01C001C0; shl.b32 u, $4, 4; lop3.b32 t, u, 0x80008000, t, 0xEA;
mul.rn.bf16x2 $2, t, $5;
shr.u32 t, $4, 6; and.b32 t, t, 0x01C001C0; lop3.b32 t, $4, 0x80008000, t, 0xEA;
mul.rn.bf16x2 $3, t, $5;
}""")
# Eight e4m3 codes of two words -> four bf16 pairs (r, r + 4).
_FP8 = tl.constexpr("""{
.reg .b32 t, u;
prmt.b32 t, $4, $5, 0x4404; shr.u32 u, t, 4; and.b32 u, u, 0x07F007F0; lop3.b32 u, t, 0x80008000, u, 0xEA;
mul.rn.bf16x2 $0, u, $6;
prmt.b32 t, $4, $5, 0x5515; shr.u32 u, t, 4; and.b32 u, u, 0x07F007F0; lop3.b32 u, t, 0x80008000, u, 0xEA;
mul.rn.bf16x2 $1, u, $6;
prmt.b32 t, $4, $5, 0x6626; shr.u32 u, t, 4; and.b32 u, u, 0x07F007F0; lop3.b32 u, t, 0x80008000, u, 0xEA;
mul.rn.bf16x2 $2, u, $6;
prmt.b32 t, $4, $5, 0x7737; shr.u32 u, t, 4; and.b32 u, u, 0x07F007F0; lop3.b32 u, t, 0x80008000, u, 0xEA;
mul.rn.bf16x2 $3, u, $6;
}""")
# Eight bf16 values of four words -> four pairs (r, r + 4), times 2^-9.
_BF16 = tl.constexpr("""{
.reg .b32 t, c;
mov.b32 c, 0x3B003B00;
prmt.b32 t, $4, $6, 0x5410; mul.rn.bf16x2 $0, t, c;
prmt.b32 t, $4, $6, 0x7632; mul.rn.bf16x2 $1, t, c;
prmt.b32 t, $5, $7, 0x5410; mul.rn.bf16x2 $2, t, c;
prmt.b32 t, $5, $7, 0x7632; mul.rn.bf16x2 $3, t, c;
}""")
_OUT = tl.constexpr("=&r,=&r,=&r,=&r,")


# --- Work -----------------------------------------------------------------------------------------


@gluon.jit
def _item(item, full_rows, splits, num_tiles, FEW: gl.constexpr):
    """-> (row, first tile, end tile) of an item: whole rows first, then `splits` ranges of each other row.

    With few rows the grid is [splits, rows] and an item's row needs no division.
    """
    row = item
    first = 0
    end = num_tiles
    if FEW:
        row = gl.program_id(1)
        first = gl.program_id(0) * num_tiles // splits
        end = (gl.program_id(0) + 1) * num_tiles // splits
    else:
        if item >= full_rows:
            part = item - full_rows
            row = full_rows + part // splits
            first = part % splits * num_tiles // splits
            end = (part % splits + 1) * num_tiles // splits
    return row, first, end


@gluon.jit
def _items(num_items, FEW: gl.constexpr):
    """-> (first, end, step) of a program's items; with few rows it has one."""
    first = gl.program_id(0)
    end = num_items
    step = gl.num_programs(0)
    if FEW:
        first = gl.program_id(1) * step + first
        end = first + 1
    return first, end, step


@gluon.jit
def _channel(chunk_column):
    """Channel group of 8 held by 16-byte chunk c: chunk wi * 16 + lane holds group 4 * lane + wi."""
    return (chunk_column % 16) * 4 + chunk_column // 16


# --- Producer -------------------------------------------------------------------------------------


@gluon.constexpr_function
def _lane_words(kind):
    """Words of one load of a lane: 32 channels of fp4, fp8 (also in `mixed`), bf16."""
    return {FP4.value: 4, BF16.value: 16}.get(kind, 8)


@gluon.jit
def _load_words(cache, chunk, live, KEYS: gl.constexpr, W: gl.constexpr, LW: gl.constexpr):
    """chunk int64 [KEYS, 16]: address in 16-byte units -> int32 [KEYS, 16, W], 0 where not live."""
    word = gl.arange(0, W, layout=gl.SliceLayout(0, gl.SliceLayout(1, LW)))
    offset = gl.expand_dims(chunk * 4, 2) + gl.expand_dims(gl.expand_dims(word, 0), 1)
    mask, _ = gl.broadcast(gl.expand_dims(live, 2), offset)
    return gl.load(cache.to(gl.pointer_type(gl.int32)) + offset, mask=mask, other=0)


@gluon.jit
def _load(cache, page_bytes, slot, PAGE: gl.constexpr, STRIDE: gl.constexpr, SCALE0: gl.constexpr,
          SCALE_STRIDE: gl.constexpr, KIND: gl.constexpr, KEYS: gl.constexpr, LW: gl.constexpr):  # fmt: skip
    """slot int32 [KEYS] -> (words, more words of `mixed`, scales [KEYS, 16]) as read; 0 where slot < 0."""
    W: gl.constexpr = _lane_words(KIND)
    lane = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LW))), 0)
    slot = gl.expand_dims(slot, 1)
    page = gl.maximum(slot, 0) // PAGE
    state = gl.maximum(slot, 0) - page * PAGE
    page = page.to(gl.int64)
    # The comparison with the lane only spreads the mask over the lanes.
    live = (slot >= 0) & (lane >= 0)
    base = page * (page_bytes >> 4) + state * (STRIDE // 16)
    if KIND == MIXED:
        chunk = base + gl.where(lane < 14, lane * 2, lane * 4 - 28)
        words = _load_words(cache, chunk, live, KEYS, W, LW)
        more = _load_words(cache, chunk + 2, live & (lane >= 14), KEYS, W, LW)
    else:
        words = _load_words(cache, base + lane * (W // 4), live, KEYS, W, LW)
        more = words
    if KIND == BF16:
        scale = state
    else:
        at = page * page_bytes + (SCALE0 + state * SCALE_STRIDE)
        if KIND == FP4:
            scale = gl.load(cache.to(gl.pointer_type(gl.int16)) + ((at >> 1) + lane), mask=live, other=0)
        elif KIND == FP8:
            scale = gl.load(cache + (at + lane), mask=live, other=0)
        else:
            scale = gl.load(cache + (at + (lane >> 1)), mask=live & (lane < 14), other=0)
    return words, more, scale.to(gl.int32)


@gluon.jit
def _fp4_factor(scale, LW: gl.constexpr):
    """Two e4m3 scales of a lane -> bf16x2 factor [KEYS, 16, 4] of its four words: scale * 2^117."""
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LW)))
    word = gl.expand_dims(gl.expand_dims(word, 0), 1)
    bits = (gl.expand_dims(scale, 2) >> ((word >> 1) * 8)) & 0x7F
    # Two steps: e4m3 bits read as fp32 are 2^-120 times their value, and 2^237 is no fp32 number.
    value = (bits << 20).to(gl.float32, bitcast=True) * 1.329227995784916e36 * 1.661534994731145e35
    bits = value.to(gl.int32, bitcast=True)
    return ((bits >> 16) & 0xFFFF) | (bits & -65536)


@gluon.jit
def _decode_fp8(words, scale, KEYS: gl.constexpr):
    low, high = gl.split(gl.reshape(words, [KEYS, 16, 4, 2]))
    factor = ((gl.minimum(scale, 143) + 111) << 7) * 0x10001  # 2^(byte - 127 + 120 - 9), twice
    factor = gl.convert_layout(factor, gl.SliceLayout(2, low.type.layout), assert_trivial=True)
    factor, _ = gl.broadcast(gl.expand_dims(factor, 2), low)
    return gl.inline_asm_elementwise(
        _FP8, _OUT + "r,r,r", [low, high, factor],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def _decode_bf16(words, KEYS: gl.constexpr, CHUNKS: gl.constexpr):
    even, odd = gl.split(gl.reshape(words, [KEYS, 16, CHUNKS, 2, 2]))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    return gl.inline_asm_elementwise(
        _BF16, _OUT + "r,r,r,r", [w0, w1, w2, w3],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def _rope_or(rope_low, rope_high, values, KEYS: gl.constexpr):
    """`mixed`: the last two lanes hold bf16 channels, two chunks in each load."""
    both = gl.reshape(gl.permute(gl.join(rope_low, rope_high), (0, 1, 3, 2)), [KEYS, 16, 4])
    both = gl.convert_layout(both, values.type.layout, assert_trivial=True)
    lane = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, values.type.layout)))
    lane = gl.expand_dims(gl.expand_dims(lane, 0), 2)
    return gl.where(lane >= 14, both, values)


@gluon.jit
def _decode(words, more, scale, KIND: gl.constexpr, KEYS: gl.constexpr, LW: gl.constexpr):
    """What `_load` read -> four int32 [KEYS, 16, 4]: bf16 pairs (r, r + 4) of every group of 8 channels."""
    if KIND == FP4:
        r0, r1, r2, r3 = gl.inline_asm_elementwise(
            _FP4, _OUT + "r,r", [words, _fp4_factor(scale, LW)],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1)  # fmt: skip
    elif KIND == BF16:
        r0, r1, r2, r3 = _decode_bf16(words, KEYS, 4)
    else:
        r0, r1, r2, r3 = _decode_fp8(words, scale, KEYS)
        if KIND == MIXED:
            a0, a1, a2, a3 = _decode_bf16(words, KEYS, 2)
            b0, b1, b2, b3 = _decode_bf16(more, KEYS, 2)
            r0 = _rope_or(a0, b0, r0, KEYS)
            r1 = _rope_or(a1, b1, r1, KEYS)
            r2 = _rope_or(a2, b2, r2, KEYS)
            r3 = _rope_or(a3, b3, r3, KEYS)
    return r0, r1, r2, r3


@gluon.jit
def _put(k, bias, words, more, scale, slot, AT: gl.constexpr, KIND: gl.constexpr, KEYS: gl.constexpr,
         LW: gl.constexpr):  # fmt: skip
    """Decode KEYS keys into rows AT.. of a K buffer: 16-byte stores, eight lanes to eight bank groups."""
    r0, r1, r2, r3 = _decode(words, more, scale, KIND, KEYS, LW)
    pairs = gl.permute(gl.join(gl.join(r0, r2), gl.join(r1, r3)), (0, 2, 1, 3, 4))
    k.slice(AT, KEYS, 0).store(gl.reshape(pairs, [KEYS, DIM // 2]))
    bias.slice(AT, KEYS, 0).store(gl.where(slot >= 0, 0.0, float("-inf")))


@gluon.jit
def _slots(slots, start, count, KEYS: gl.constexpr, LW: gl.constexpr):
    at = start + gl.arange(0, KEYS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LW)))
    return gl.load(slots + at, mask=at < count, other=-1)


@gluon.jit
def _fill(cache, page_bytes, slots, count, first, end, fills, k_s, bias_s, full, empty,
          PAGE: gl.constexpr, STRIDE: gl.constexpr, SCALE0: gl.constexpr, SCALE_STRIDE: gl.constexpr,
          KIND: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Tiles first..end of one cache's list into the K buffers, in turn; `fills` counts buffers ever filled.

    Packed keys are read before the wait for a free buffer, so that the wait hides the reads; wider records do
    only the first half so, for want of registers.
    """
    KEYS: gl.constexpr = 16
    LW: gl.constexpr = gl.BlockedLayout([1, 1, _lane_words(KIND)], [2, 16, 1], [WARPS, 1, 1], [2, 1, 0])
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    EARLY: gl.constexpr = KIND != BF16 and KIND != MIXED  # `in` is not traced
    for tile in range(first, end):
        s0 = _slots(slots, tile * TILE, count, KEYS, LW)
        s1 = _slots(slots, tile * TILE + 16, count, KEYS, LW)
        s2 = _slots(slots, tile * TILE + 32, count, KEYS, LW)
        s3 = _slots(slots, tile * TILE + 48, count, KEYS, LW)
        x0, y0, e0 = _load(cache, page_bytes, s0, PAGE, STRIDE, SCALE0, SCALE_STRIDE, KIND, KEYS, LW)
        x1, y1, e1 = _load(cache, page_bytes, s1, PAGE, STRIDE, SCALE0, SCALE_STRIDE, KIND, KEYS, LW)
        if EARLY:
            x2, y2, e2 = _load(cache, page_bytes, s2, PAGE, STRIDE, SCALE0, SCALE_STRIDE, KIND, KEYS, LW)
            x3, y3, e3 = _load(cache, page_bytes, s3, PAGE, STRIDE, SCALE0, SCALE_STRIDE, KIND, KEYS, LW)
        buffer = fills & 1
        mbarrier.wait(empty.index(buffer), ((fills >> 1) & 1) ^ 1)
        k = k_s.index(buffer)._reinterpret(gl.int32, [TILE, DIM // 2], WORDS)
        bias = bias_s.index(buffer)
        _put(k, bias, x0, y0, e0, s0, 0, KIND, KEYS, LW)
        _put(k, bias, x1, y1, e1, s1, 16, KIND, KEYS, LW)
        if not EARLY:
            x2, y2, e2 = _load(cache, page_bytes, s2, PAGE, STRIDE, SCALE0, SCALE_STRIDE, KIND, KEYS, LW)
            x3, y3, e3 = _load(cache, page_bytes, s3, PAGE, STRIDE, SCALE0, SCALE_STRIDE, KIND, KEYS, LW)
        _put(k, bias, x2, y2, e2, s2, 32, KIND, KEYS, LW)
        _put(k, bias, x3, y3, e3, s3, 48, KIND, KEYS, LW)
        fence_async_shared()
        mbarrier.arrive(full.index(buffer), count=1)
        fills += 1
    return fills


@gluon.jit
def _producer(work, window_args, state_args, smem, WINDOW: gl.constexpr, STATE: gl.constexpr,
              WARPS: gl.constexpr, FEW: gl.constexpr):  # fmt: skip
    num_items, full_rows, splits = work
    window, window_bytes, window_slots, window_row, num_window = window_args
    states, state_bytes, state_slots, state_row, num_states = state_args
    _, k_s, _, bias_s, full, empty = smem
    window_tiles = (num_window + TILE - 1) // TILE
    num_tiles = window_tiles + (num_states + TILE - 1) // TILE
    fills = 0
    first_item, end_item, step = _items(num_items, FEW)
    for item in range(first_item, end_item, step):
        row, first, end = _item(item, full_rows, splits, num_tiles, FEW)
        row = row.to(gl.int64)
        wlist = window_slots + row * window_row
        slist = state_slots + row * state_row
        w0 = gl.minimum(first, window_tiles)
        w1 = gl.minimum(end, window_tiles)
        s0 = gl.maximum(first - window_tiles, 0)
        s1 = gl.maximum(end - window_tiles, 0)
        fills = _fill(window, window_bytes, wlist, num_window, w0, w1, fills, k_s, bias_s, full, empty,
                      WINDOW[0], WINDOW[1], WINDOW[2], WINDOW[3], WINDOW[4], WARPS)  # fmt: skip
        fills = _fill(states, state_bytes, slist, num_states, s0, s1, fills, k_s, bias_s, full, empty,
                      STATE[0], STATE[1], STATE[2], STATE[3], STATE[4], WARPS)  # fmt: skip


# --- Consumer -------------------------------------------------------------------------------------


@gluon.jit
def _offsets(HEAD_STRIDE: gl.constexpr, LR: gl.constexpr):
    """Element offsets [64, 512] of a row's heads and channels, in the channel order of shared memory."""
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, LR))
    channel = gl.max_contiguous(gl.multiple_of(_channel(column // 8) * 8 + column % 8, 8), 8)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LR))
    return head[:, None] * HEAD_STRIDE + channel[None, :]


@gluon.jit
def _head_mask(NUM_HEADS: gl.constexpr, LR: gl.constexpr):
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, LR))
    return (gl.arange(0, HEADS, layout=gl.SliceLayout(1, LR)) < NUM_HEADS)[:, None] & (column >= 0)[None, :]


@gluon.jit
def _load_q(q, NUM_HEADS: gl.constexpr, Q_HEAD: gl.constexpr, LR: gl.constexpr):
    """A row's heads, zeros beyond the last one."""
    return gl.load(q + _offsets(Q_HEAD, LR), mask=_head_mask(NUM_HEADS, LR), other=0.0)


@gluon.jit
def _store_q(x, q_s):
    x = gl.permute(gl.reshape(x, [HEADS, DIM // 8, 2, 4]), (0, 1, 3, 2))
    q_s.store(gl.reshape(x, [HEADS, DIM]))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _softmax(s, bias, peak, softmax_scale):
    """-> (p, new peak, factor of what was summed before), in base 2. A tile with no key gives p = 0."""
    s = s * softmax_scale + bias[None, :]
    new_peak = gl.maximum(peak, gl.max(s, 1))
    return gl.exp2(s - new_peak[:, None]), new_peak, gl.exp2(peak - new_peak)


@gluon.jit
def _stage_row(o, k):
    gl.thread_barrier()  # the other warpgroup may still multiply with this buffer
    k.store(o)
    gl.thread_barrier()


@gluon.jit
def _store_row(out, k, NUM_HEADS: gl.constexpr, LR: gl.constexpr):
    """A row of the output from the K buffer that stages it: undo the channel order, 16-byte stores."""
    x = gl.permute(gl.reshape(k.load(LR), [HEADS, DIM // 8, 4, 2]), (0, 1, 3, 2))
    x = gl.convert_layout(gl.reshape(x, [HEADS, DIM]), LR)
    gl.store(out + _offsets(DIM, LR), x, mask=_head_mask(NUM_HEADS, LR))


@gluon.jit
def _store_part(
    item, part, ml, acc, peak, total, NUM_HEADS: gl.constexpr, LP: gl.constexpr, LS: gl.constexpr
):
    """fp32 sums of an item, in the channel order of shared memory; `_combine` reorders."""
    part += item.to(gl.int64) * (HEADS * DIM)
    ml += item * (2 * HEADS)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LP))
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, LP))
    gl.store(part + head[:, None] * DIM + column[None, :], acc, mask=_head_mask(NUM_HEADS, LP))
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LS))
    gl.store(ml + head, peak)
    gl.store(ml + HEADS + head, total)


@gluon.jit
def _consumer(work, q_args, out_args, num_tiles, softmax_scale, smem, NUM_HEADS: gl.constexpr,
              Q_HEAD: gl.constexpr, PV_N: gl.constexpr, FEW: gl.constexpr):  # fmt: skip
    num_items, full_rows, splits = work
    q, q_row = q_args
    out, part, ml, sink = out_args
    q_s, k_s, p_s, bias_s, full, empty = smem
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TILE // 2, 16])
    LP: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, PV_N, 16])
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    RP: gl.constexpr = gl.SliceLayout(1, LP)
    KEY: gl.constexpr = gl.SliceLayout(0, LS)
    LR: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    first_item, end_item, step = _items(num_items, FEW)
    row, first, end = _item(first_item, full_rows, splits, num_tiles, FEW)
    _store_q(_load_q(q + row.to(gl.int64) * q_row, NUM_HEADS, Q_HEAD, LR), q_s)
    uses = 0
    for item in range(first_item, end_item, step):
        row, first, end = _item(item, full_rows, splits, num_tiles, FEW)
        acc = gl.zeros([HEADS, DIM], gl.float32, LP)
        zero = gl.zeros([HEADS, TILE], gl.float32, LS)
        peak = gl.full([HEADS], -1e30, gl.float32, RS)
        total = gl.full([HEADS], 0.0, gl.float32, RS)
        mbarrier.wait(full.index(uses & 1), (uses >> 1) & 1)
        s = warpgroup_mma(q_s, k_s.index(uses & 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        for _ in range(first + 1, end):
            buffer = uses & 1
            p, peak, shrink = _softmax(s, bias_s.index(buffer).load(KEY), peak, softmax_scale)
            p_s.store(p.to(gl.bfloat16))
            fence_async_shared()
            acc = acc * gl.convert_layout(shrink, RP)[:, None]
            acc_next = warpgroup_mma(p_s, k_s.index(buffer), acc, is_async=True)
            uses += 1
            ahead = uses & 1
            mbarrier.wait(full.index(ahead), (uses >> 1) & 1)
            s_next = warpgroup_mma(q_s, k_s.index(ahead).permute((1, 0)), zero, use_acc=False, is_async=True)
            total = total * shrink + gl.sum(p, 1)
            acc = warpgroup_mma_wait(1, deps=[acc_next])
            mbarrier.arrive(empty.index(buffer), count=1)
            s = warpgroup_mma_wait(0, deps=[s_next])
        buffer = uses & 1
        uses += 1
        p, peak, shrink = _softmax(s, bias_s.index(buffer).load(KEY), peak, softmax_scale)
        total = total * shrink + gl.sum(p, 1)
        p_s.store(p.to(gl.bfloat16))
        fence_async_shared()
        acc = acc * gl.convert_layout(shrink, RP)[:, None]
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p_s, k_s.index(buffer), acc, is_async=True)])
        if FEW:
            _store_part(item, part, ml, acc, peak, total, NUM_HEADS, LP, LS)
        else:
            if item < full_rows:
                head = gl.arange(0, HEADS, layout=RS)
                weight = gl.exp2(gl.load(sink + head, mask=head < NUM_HEADS, other=0.0) * LOG2E - peak)
                inverse = gl.where(total > 0, 512.0 / (total + weight), 0.0)
                o = (acc * gl.convert_layout(inverse, RP)[:, None]).to(gl.bfloat16)
                _stage_row(o, k_s.index(buffer))
                row_out = out + row.to(gl.int64) * (NUM_HEADS * DIM)
                if item + step < end_item:
                    # The next Q is on its way while this output leaves.
                    next_row, _, _ = _item(item + step, full_rows, splits, num_tiles, FEW)
                    q_next = _load_q(q + next_row.to(gl.int64) * q_row, NUM_HEADS, Q_HEAD, LR)
                    _store_row(row_out, k_s.index(buffer), NUM_HEADS, LR)
                    mbarrier.arrive(empty.index(buffer), count=1)
                    _store_q(q_next, q_s)
                else:
                    _store_row(row_out, k_s.index(buffer), NUM_HEADS, LR)
            else:  # no program has an item after a part of a row
                _store_part(item - full_rows, part, ml, acc, peak, total, NUM_HEADS, LP, LS)


# --- Kernels --------------------------------------------------------------------------------------

_PLAIN = ("num_items", "full_rows", "splits", "num_window", "num_states", "window_row", "state_row")


@gluon.jit(do_not_specialize=_PLAIN)
def _attend(q, window, window_slots, states, state_slots, sink, out, part, ml,
            q_row, window_bytes, state_bytes, window_row, state_row, num_window, num_states,
            num_items, full_rows, splits, softmax_scale,
            NUM_HEADS: gl.constexpr, Q_HEAD: gl.constexpr, WINDOW: gl.constexpr, STATE: gl.constexpr,
            PV_N: gl.constexpr,
            PRODUCER_WARPS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, FEW: gl.constexpr):  # fmt: skip
    gdc_wait()
    if FEW:
        # `_combine` may take its places beside this grid; it still waits for the end of it.
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [],
            dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [HEADS, DIM], SWIZZLED)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, DIM], SWIZZLED)
    p_s = gl.allocate_shared_memory(gl.bfloat16, [HEADS, TILE], SWIZZLED)
    bias_s = gl.allocate_shared_memory(gl.float32, [2, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    num_tiles = (num_window + TILE - 1) // TILE + (num_states + TILE - 1) // TILE
    work = (num_items, full_rows, splits)
    smem = (q_s, k_s, p_s, bias_s, full, empty)
    gl.warp_specialize([
        (_consumer, (work, (q, q_row), (out, part, ml, sink), num_tiles, softmax_scale, smem,
                     NUM_HEADS, Q_HEAD, PV_N, FEW)),
        (_producer, (work, (window, window_bytes, window_slots, window_row, num_window),
                     (states, state_bytes, state_slots, state_row, num_states), smem,
                     WINDOW, STATE, PRODUCER_WARPS, FEW)),
    ], [PRODUCER_WARPS], [PRODUCER_REGISTERS])  # fmt: skip


@triton.jit(do_not_specialize=("num_heads", "splits", "first_row"))
def _combine(part, ml, sink, out, num_heads, splits, first_row, PARTS: tl.constexpr, DIM: tl.constexpr):
    """One head of one split row: weigh the fp32 partial results by their peaks, add the sink, normalise."""
    tl.extra.cuda.gdc_wait()
    row, head = tl.program_id(0), tl.program_id(1)
    item = row * splits + tl.arange(0, PARTS)
    live = tl.arange(0, PARTS) < splits
    place = tl.arange(0, DIM)
    at = part + item.to(tl.int64)[:, None] * (64 * DIM) + head * DIM + place[None, :]
    sums = tl.load(at, mask=live[:, None], other=0.0)  # on its way while the weights are found
    peak = tl.load(ml + item * 128 + head, mask=live, other=-1e30)
    total = tl.load(ml + item * 128 + 64 + head, mask=live, other=0.0)
    sink_head = tl.load(sink + head) * 1.4426950408889634
    top = tl.max(peak, 0)
    weight = tl.exp2(peak - top)
    total = tl.sum(weight * total, 0)
    inverse = tl.where(total > 0, 512.0 / (total + tl.exp2(sink_head - top)), 0.0)
    o = tl.sum(sums * (weight * inverse)[:, None], 0)
    chunk = place // 8
    channel = ((chunk % 16) * 4 + chunk // 16) * 8 + (place % 8) // 2 + 4 * (place % 2)
    tl.store(out + ((first_row + row).to(tl.int64) * num_heads + head) * DIM + channel, o.to(tl.bfloat16))


# --- Host -----------------------------------------------------------------------------------------


def why_not(hardware: object, record: str | None) -> str | None:
    if hardware.sm != 90:
        return f"its instructions are Hopper's (sm_90), this is {hardware.name}"
    if record is not None and record not in KINDS:
        return f"it reads {', '.join(KINDS)}, not {record}"
    return None


def plan_splits(rows: int, num_tiles: int, sms: int, deterministic: bool) -> tuple[int, int]:
    """-> (rows done whole, splits of each other row): the last, partial wave of rows is split to fill it,
    into no more parts than the longest part needs."""
    tail = rows % sms
    if deterministic or tail == 0:
        return rows, 1
    longest = triton.cdiv(num_tiles, min(sms // tail, MAX_SPLITS))
    splits = triton.cdiv(num_tiles, longest)
    return (rows, 1) if splits == 1 else (rows - tail, splits)


def record_layout(record: str, page_states: int) -> tuple[int, ...]:
    """What a producer is specialised on: states a page, stride of data, scales' place and stride, decoder."""
    data, scales = records.regions(record, page_states, HEAD_DIM, ROPE_DIM)
    return page_states, data.stride, scales.offset, scales.stride, KINDS[record].value


def specialisation(
    window_record: str,
    window_page: int,
    state_record: str,
    state_page: int,
    few: bool,
    num_heads: int = MAX_HEADS,
    q_head: int = HEAD_DIM,
    variant: str = "default",
) -> dict[str, object]:
    """Compile-time arguments of `_attend`. `few`: an item is a few tiles and its latency counts, so four
    producer warps with more registers, and wider products. Otherwise their throughput counts: eight warps."""
    four = few or VARIANTS[variant] == 4
    return {
        "NUM_HEADS": num_heads,
        "Q_HEAD": q_head,
        "WINDOW": record_layout(window_record, window_page),
        "STATE": record_layout(state_record, state_page),
        "PV_N": 256 if four else 128,
        "PRODUCER_WARPS": 4 if four else 8,
        "PRODUCER_REGISTERS": 112 if four else 72,
        "FEW": few,
    }


def _page_bytes(record: str, cache: Tensor, page_states: int) -> int:
    """Distance of two pages; the kernel reads in units of 16 bytes."""
    assert cache.stride(-1) == 1, f"the bytes of a {record} page must be contiguous"
    if KINDS[record] is BF16:
        assert cache.dtype == torch.bfloat16, f"{record} is stored as bf16, got {cache.dtype}"
        assert cache.shape[1:] == (page_states, HEAD_DIM), (
            f"wrong shape {tuple(cache.shape)} of {record} pages"
        )
        assert cache.stride(1) == HEAD_DIM, f"the states of a {record} page must be contiguous"
    else:
        assert cache.dtype == torch.uint8, f"a {record} cache is uint8, got {cache.dtype}"
        payload = records.page_bytes(record, page_states, HEAD_DIM, ROPE_DIM)
        assert cache.shape[1] >= payload, f"a page needs {payload} bytes, it has {cache.shape[1]}"
    page_bytes = cache.stride(0) * cache.element_size()
    assert (page_bytes | cache.data_ptr()) % 16 == 0, f"{record} pages must start at multiples of 16 bytes"
    return page_bytes


def sparse_attention(
    q: Tensor, window: Tensor, window_slots: Tensor, window_record: str, window_page: int, states: Tensor,
    state_slots: Tensor, state_record: str, state_page: int, sink: Tensor, rope_dim: int, deterministic: bool,
) -> Tensor:  # fmt: skip
    return attend(
        q, window, window_slots, window_record, window_page, states, state_slots, state_record, state_page,
        sink, rope_dim, deterministic,
    )  # fmt: skip


def attend(
    q: Tensor,
    window: Tensor,
    window_slots: Tensor,
    window_record: str,
    window_page: int,
    states: Tensor,
    state_slots: Tensor,
    state_record: str,
    state_page: int,
    sink: Tensor,
    rope_dim: int,
    deterministic: bool,
    variant: str = "default",
) -> Tensor:
    """`sparse_attention` by one of `VARIANTS`."""
    q = q[:, : sink.shape[0]]
    rows, heads, dim = q.shape
    assert heads == sink.shape[0], f"{sink.shape[0]} sinks for {heads} heads"
    assert dim == HEAD_DIM, f"heads are {HEAD_DIM} wide here, got {dim}"
    assert heads <= MAX_HEADS, f"at most {MAX_HEADS} heads a rank, got {heads}"
    assert q.dtype == torch.bfloat16, f"queries are bf16, got {q.dtype}"
    assert sink.dtype == torch.float32, f"sinks are fp32, got {sink.dtype}"
    sink = sink.contiguous()
    mixed = "mixed_584" in (window_record, state_record)
    assert rope_dim == ROPE_DIM or not mixed, f"mixed_584 keeps {ROPE_DIM} bf16 values, not {rope_dim}"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_window, num_states = window_slots.shape[1], state_slots.shape[1]
    num_tiles = triton.cdiv(num_window, TILE_KEYS) + triton.cdiv(num_states, TILE_KEYS)
    if rows == 0 or heads == 0:
        return out
    if num_tiles == 0:
        return out.zero_()
    if q.stride(2) != 1 or (q.stride(0) | q.stride(1)) % 8 or q.data_ptr() % 16:
        q = q.contiguous()
    window_slots = window_slots if window_slots.stride(1) == 1 else window_slots.contiguous()
    state_slots = state_slots if state_slots.stride(1) == 1 else state_slots.contiguous()

    with torch.cuda.device(q.device):
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        full_rows, splits = plan_splits(rows, num_tiles, sms, deterministic)
        tail = rows - full_rows
        num_items = full_rows + tail * splits
        part = torch.empty((tail * splits, MAX_HEADS, HEAD_DIM), dtype=torch.float32, device=q.device)
        ml = torch.empty((tail * splits, 2, MAX_HEADS), dtype=torch.float32, device=q.device)
        few = full_rows == 0 and splits > 1
        grid = (splits, rows) if few else (min(num_items, sms),)
        _attend[grid](
            q, window, window_slots, states, state_slots, sink, out, part, ml,
            q.stride(0), _page_bytes(window_record, window, window_page),
            _page_bytes(state_record, states, state_page), window_slots.stride(0), state_slots.stride(0),
            num_window, num_states, num_items, full_rows, splits, HEAD_DIM**-0.5 * LOG2E.value * 512.0,
            **specialisation(
                window_record, window_page, state_record, state_page, few, heads, q.stride(1), variant
            ),
            num_warps=8, launch_pdl=True,
        )  # fmt: skip
        if tail:
            _combine[(tail, heads)](
                part, ml, sink, out, heads, splits, full_rows,
                PARTS=triton.next_power_of_2(splits), DIM=HEAD_DIM, num_warps=4, launch_pdl=True,
            )  # fmt: skip
    return out
