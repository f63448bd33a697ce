"""Many-row expert products on Hopper: fp4 weights widened to bf16 once a tile, wgmma (Triton's Gluon).

Layout. A CTA multiplies one slot (at most 128 rows of one expert) by 256 rows of its weight. Tokens are the M
operand and weights the N operand, so that a slot pads to 64 rows and a product reads little shared memory.
Eight producer warps read packed words and scales (512-byte blocks of gluon_pack.py), make bf16 of them in
registers and store them to W [256, 64]; they also gather the rows into X [128, 64] by cp.async. Eight other
warps only issue products and finish tiles. A ring of 4 stages of W and X, 192 KB, both in 128-byte swizzle.

Grid. Persistent, one CTA an SM; item = slot * tiles + tile, so that the slots of an expert run side by side
and share its weights in L2. The producers fill the ring for the next item while a tile is finished. A slot
of at most 64 rows takes half of the M operand: each warpgroup then has 128 weight rows. K is never split and
its order is fixed, so a row's bits do not depend on the batch or on its place in a slot.

The trick. Both operands may be permuted for free. In K, inside a group of 32, k = 16h + 4t + i stands at
8t + 4h + 2 (i % 2) + i // 2: what one lane decodes of a row and group is one 16-byte store. `_quantise_rows`
and the gated epilogue write that order. In N, a weight row's place inside a tile of 64 makes the eight lanes
of a store phase meet eight bank groups, and gives an accumulator lane what belongs together: gate, up and
the 8 intermediates of one 16-byte store of hidden rows, or 8 neighbouring outputs (`row_place`).

Decoding. A code's magnitude, moved into bf16's low exponent and high mantissa bits, is its value times
2^-126, subnormal code included; one bf16x2 product with a power of two makes 2^-16 times the weight, and the
epilogue gives 2^16 back. So e8m0 bytes 11..144 are exact in bf16. Smaller ones lose bits below 2^-133, larger
ones make infinities and NaN, never a wrong number.

By count, cycles of one step (64 of K): 128 rows: products 1024, shared memory 1152, decoding 570 of the
integer pipe and 600 of issue. 64 rows: 512, 704, 570, 600. Measured: about 1750 and 1400, the second the same
for any number of rows: the producers are late. Their fence is a MEMBAR, which by its definition also waits
for the words that they have asked for ahead.

T token rows, k choices, E experts, D hidden size, I expert width.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv41.ops import records
from dsv41.ops.moe.triton_group import Groups

CHUNK = 128  # rows of a slot: the M operand of both warpgroups
TILE_ROWS = 256  # weight rows of an item
ROWS, HALF_ROWS, TILE = gl.constexpr(CHUNK), gl.constexpr(CHUNK // 2), gl.constexpr(TILE_ROWS)
STAGES = 4
AHEAD = 8  # steps of 64 by which packed words are asked into L2 before they are read

SHIFT = 16  # the tile holds weights times 2^-SHIFT
TOP_SCALE = 254 + SHIFT - 126  # the largest e8m0 byte whose factor is a finite bf16
FACTOR_BIAS = 126 - SHIFT  # e8m0 byte to bf16 exponent field
GIVE_BACK, CLAMP, BIAS = gl.constexpr(2.0**SHIFT), gl.constexpr(TOP_SCALE + 1), gl.constexpr(FACTOR_BIAS)

# `publish/triton.py` has the same numbers; fp32 bits, so that NaN ranks above infinity.
_FLOOR_BITS = struct.unpack("<i", struct.pack("<f", records.FP8_FLOOR))[0]
FLOOR_BITS, RECIPROCAL = tl.constexpr(_FLOOR_BITS), tl.constexpr(records.FP32_RECIPROCAL_448)

# One word (byte i: k = .. + i, rows g and g + 8) and the factors of both rows -> bf16 pairs (i 0, 2) and
# (1, 3) of row g, then of row g + 8. Each line of `DECODE` moves fields: (shift left, mask) of the word.
DECODE = (
    ((4, 0x01C001C0), (8, 0x80008000)),
    ((-4, 0x01C001C0), (0, 0x80008000)),
    ((6, 0x00C000C0), (2, 0x01000100), (10, 0x80008000)),
    ((-2, 0x00C000C0), (-6, 0x01000100), (2, 0x80008000)),
)


def _decode_asm() -> str:
    """Inputs: $4 word, $5 factor of row g, $6 of row g + 8. One lop3 joins a field: (a & mask) | b."""
    lines = ["{", ".reg .b32 t, u;"]
    for output, fields in enumerate(DECODE):
        for number, (shift, mask) in enumerate(fields):
            moved = "u" if number else "t"
            if shift:
                name = "shl.b32" if shift > 0 else "shr.u32"
                lines.append(f"{name} {moved}, $4, {abs(shift)};")
            source = moved if shift else "$4"
            if number:
                lines.append(f"lop3.b32 t, {source}, {mask:#010x}, t, 0xEA;")
            else:
                lines.append(f"and.b32 t, {source}, {mask:#010x};")
        lines.append(f"mul.rn.bf16x2 ${output}, t, ${5 + output // 2};")
    return "\n".join([*lines, "}"])


_DECODE = gl.constexpr(_decode_asm())
# Two fp32 values rounded to bf16 and widened again; alone, a conversion runs at a quarter of the rate.
_ROUND = gl.constexpr("""{
.reg .b32 t;
cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xFFFF0000;
}""")
# silu; 0xBFB8AA3B is -log2(e). NaN and -inf give NaN, as x * sigmoid(x) does.
_SILU = gl.constexpr("""{
.reg .f32 t;
mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;
rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t;
}""")
_PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


# --- Rows -----------------------------------------------------------------------------------------


@triton.jit
def _quantise_rows(x, out, stride, D: tl.constexpr, GROUPS: tl.constexpr, FRAGMENTS: tl.constexpr):
    """bf16 [T, D] -> its fp8_32 round trip in the K order of the products; GROUPS groups of 32 a program."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(x + row * stride + at, mask=at < D, other=0.0).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True)
    largest = tl.maximum(tl.max(bits & 0x7FFFFFFF, axis=1), FLOOR_BITS).to(tl.float32, bitcast=True)
    target = (largest * RECIPROCAL).to(tl.int32, bitcast=True)
    biased = tl.minimum((target >> 23) + ((target & 0x7FFFFF) != 0).to(tl.int32), 255)
    scale = tl.where(biased == 255, 0x7FC00000, biased << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(biased == 255, 0x7FC00000, (254 - biased) << 23).to(tl.float32, bitcast=True)
    value = value * inverse[:, None]
    bits = value.to(tl.int32, bitcast=True)
    # At most 448. Adding 2^20 times its power of two (2^-6 below the normal codes) leaves 3 bits behind it.
    magnitude = bits & 0x7FFFFFFF
    step = (tl.maximum(magnitude & 0x7F800000, 0x3C800000) + 0x0A000000).to(tl.float32, bitcast=True)
    value = (magnitude.to(tl.float32, bitcast=True) + step) - step
    value = ((value.to(tl.int32, bitcast=True)) | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    value = (value * scale[:, None]).to(tl.bfloat16)
    value = tl.reshape(value, (GROUPS, 2, 4, 2, 2))  # h, t, i // 2, i % 2
    if FRAGMENTS:
        value = tl.permute(value, (0, 1, 4, 2, 3))
    else:
        value = tl.permute(value, (0, 2, 1, 4, 3))
    tl.store(out + row * D + at, tl.reshape(value, (GROUPS, 32)), mask=at < D)


@gluon.jit
def _round_trip(value, largest):
    """fp32 values and the fp32 bits of their group's largest magnitude -> fp8_32 round trip in fp32."""
    largest = gl.maximum(largest, FLOOR_BITS).to(gl.float32, bitcast=True)
    target = (largest * RECIPROCAL).to(gl.int32, bitcast=True)
    biased = gl.minimum((target >> 23) + ((target & 0x7FFFFF) != 0).to(gl.int32), 255)
    scale = gl.where(biased == 255, 0x7FC00000, biased << 23).to(gl.float32, bitcast=True)
    inverse = gl.where(biased == 255, 0x7FC00000, (254 - biased) << 23).to(gl.float32, bitcast=True)
    value = value * inverse
    bits = value.to(gl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    step = (gl.maximum(magnitude & 0x7F800000, 0x3C800000) + 0x0A000000).to(gl.float32, bitcast=True)
    value = (magnitude.to(gl.float32, bitcast=True) + step) - step
    value = ((value.to(gl.int32, bitcast=True)) | (bits & -0x80000000)).to(gl.float32, bitcast=True)
    return value * scale


# --- Work -----------------------------------------------------------------------------------------


@gluon.jit
def _item(item, slots, TILES: gl.constexpr):
    """-> (tile, expert, first place in `order`, rows) of an item."""
    slot_expert, slot_start, slot_count = slots
    slot = item // TILES
    return (
        item - slot * TILES,
        gl.load(slot_expert + slot),
        gl.load(slot_start + slot),
        gl.load(slot_count + slot),
    )


# --- Producer -------------------------------------------------------------------------------------


@gluon.constexpr_function
def words_layout(warps):
    """Words [16 bands, 8 g, 4 t, 4 (q, h)] of 64 of K: a lane's are 16 bytes of g and of g + 4, with 4 warps
    of two bands. Lanes are (t, band parity, two bits of g), so that a store phase is t times two bands."""
    bands = [[2, 0, 0, 0], [4, 0, 0, 0], [8, 0, 0, 0]]
    own = 3 - (int(warps).bit_length() - 1)
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 4, 0, 0], *bands[:own]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0]],
        bands[own:],
        [],
        [16, 8, 4, 4],
    )


@gluon.constexpr_function
def row_order(gated):
    """The dimensions (tile, b1, b0, g2, g1, g0, t, q, h, parity, half) of decoded pairs in the order of W:
    rows (tile, p5 .. p0), then words of K. p2..p0 differ in band parity b0 between two lanes of one t; lanes
    of the accumulator are p2, p1."""
    if gated:
        return (0, 1, 4, 10, 2, 3, 5, 7, 6, 8, 9)
    return (0, 1, 3, 4, 2, 10, 5, 7, 6, 8, 9)


def row_place(row: int, gated: bool) -> int:
    """Where row 16b + 8 half + g of a packed tile of 64 stands in W: the formula behind `row_order`."""
    b1, b0, half, g2, g1, g0 = (row >> n & 1 for n in (5, 4, 3, 2, 1, 0))
    bits = (b1, g1, half, b0, g2, g0) if gated else (b1, g2, g1, b0, half, g0)
    return sum(bit << n for n, bit in zip((5, 4, 3, 2, 1, 0), bits, strict=True))


def k_place(k: int) -> int:
    """Where column k of a group of 32 stands in X and W."""
    h, t, i = k >> 4, k >> 2 & 3, k & 3
    return 8 * t + 4 * h + 2 * (i & 1) + (i >> 1)


@gluon.jit
def _axis(SIZE: gl.constexpr, AXIS: gl.constexpr, L: gl.constexpr):
    """0..SIZE-1 along one axis of a four-dimensional layout."""
    A: gl.constexpr = 1 if AXIS == 0 else 0
    B: gl.constexpr = 1 if AXIS > 1 else 2
    C: gl.constexpr = 2 if AXIS == 3 else 3
    index = gl.arange(0, SIZE, layout=gl.SliceLayout(A, gl.SliceLayout(B, gl.SliceLayout(C, L))))
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(index, A), B), C)


@gluon.jit
def _load(words, scales, at, scale_at, step):
    """Packed words and scales of step (64 of K) of a tile, as read."""
    w = gl.load(words + ((step >> 2) * 2048 + (step & 3) * 128) + at)
    s = gl.load(scales + ((step >> 2) * 128 + (step & 3)) + scale_at)
    return w, s


@gluon.jit
def _prefetch(words, at, step):
    """Ask a step's words into L2; lanes that share a line are one request."""
    first, _ = gl.split(gl.reshape(at, [16, 8, 4, 2, 2]))
    first, _ = gl.split(first)
    gl.inline_asm_elementwise(
        _PREFETCH, "=r,l", [words + ((step >> 2) * 2048 + (step & 3) * 128) + first],
        dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _factors(s, BYTE: gl.constexpr, L: gl.constexpr):
    """Scale words [16, 8] -> bf16x2 factors of every word; BYTE 0: row g, 2: row g + 8."""
    word = _axis(4, 3, L)
    byte = (gl.expand_dims(gl.expand_dims(s, 2), 3) >> ((word >> 1) * 8 + BYTE * 8)) & 0xFF
    return (gl.minimum(byte, CLAMP) + BIAS) * 0x00800080


@gluon.jit
def _put(w, s, buffer, GATED: gl.constexpr, L: gl.constexpr):
    """Decode a step into W [256, 64]."""
    f0, _ = gl.broadcast(_factors(s, 0, L), w)
    f1, _ = gl.broadcast(_factors(s, 2, L), w)
    a0, a1, b0, b1 = gl.inline_asm_elementwise(
        _DECODE, "=&r,=&r,=&r,=&r,r,r,r", [w, f0, f1],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1)  # fmt: skip
    pairs = gl.join(gl.join(a0, a1), gl.join(b0, b1))  # [16, 8, 4, 4, parity, half]
    pairs = gl.reshape(pairs, [4, 2, 2, 2, 2, 2, 4, 2, 2, 2, 2])
    P: gl.constexpr = row_order(GATED)
    pairs = gl.permute(pairs, P[0], P[1], P[2], P[3], P[4], P[5], P[6], P[7], P[8], P[9], P[10])
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    buffer._reinterpret(gl.int32, [TILE, 32], WORDS).store(gl.reshape(pairs, [TILE, 32]))


@gluon.jit
def _hand_over(barrier, pred, EARLY: gl.constexpr):
    """One thread arrives for all writers. Their fence also waits for the words that they have asked for, so
    the readers may have it instead: any fence on the way from a store to the products will do."""
    if EARLY:
        fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1, pred=pred)


@gluon.jit
def _sources(source, item, K: gl.constexpr, N: gl.constexpr, GATED: gl.constexpr, TOP_K: gl.constexpr,
             WARPS: gl.constexpr):  # fmt: skip
    """Where an item's words, scales and rows stand -> ((words, scales, at, scale_at), (rows, live))."""
    x, w, scale, order, slots = source
    L: gl.constexpr = words_layout(WARPS)
    LS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, L))
    LX: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    band, g, t, c = _axis(16, 0, L), _axis(8, 1, L), _axis(4, 2, L), _axis(4, 3, L)
    band_2 = gl.arange(0, 16, layout=gl.SliceLayout(1, LS))
    g_2 = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, LS)), 0)
    tile, expert, start, count = _item(item, slots, N // TILE)
    words = w.to(gl.pointer_type(gl.int32)) + expert.to(gl.int64) * (N * K // 8)
    scales = scale.to(gl.pointer_type(gl.int32)) + expert.to(gl.int64) * (N * K // 128)
    at = (tile * 4 + (band >> 2)) * (8 * K) + (band & 3) * 512 + (g * 16 + t * 4 + c)
    scale_at = (tile * 4 + (band_2 >> 2)) * (K // 2) + (band_2 & 3) * 32
    scale_at = gl.expand_dims(scale_at, 1) + g_2 * 4
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LX))
    live = m < count
    if GATED:
        row = gl.load(order + start + m, mask=live, other=0) // TOP_K
    else:
        row = start + m
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LX))
    rows = x + gl.expand_dims(row.to(gl.int64) * K, 1) + gl.expand_dims(column, 0)
    live, _ = gl.broadcast(gl.expand_dims(live, 1), rows)
    return (words, scales, at, scale_at), (rows, live)


@gluon.jit
def _fill(rows, w, s, step, fills, smem, GATED: gl.constexpr, RING: gl.constexpr, EARLY: gl.constexpr,
          L: gl.constexpr):  # fmt: skip
    """One stage: its rows on their way, its weights decoded. A step is handed over one step later, when its
    rows have come."""
    x_s, w_s, full, empty = smem
    stage = fills % RING
    mbarrier.wait(empty.index(stage), ((fills // RING) & 1) ^ 1)
    async_copy.async_copy_global_to_shared(x_s.index(stage), rows[0] + step * 64, mask=rows[1])
    async_copy.commit_group()
    _put(w, s, w_s.index(stage), GATED, L)
    async_copy.wait_group(1)
    _hand_over(full.index((fills + RING - 1) % RING), step > 0, EARLY)


@gluon.jit
def _produce(source, num_slots, smem, K: gl.constexpr, N: gl.constexpr, GATED: gl.constexpr,
             TOP_K: gl.constexpr, RING: gl.constexpr, PREFETCH: gl.constexpr,
             EARLY: gl.constexpr):  # fmt: skip
    full = smem[2]
    STEPS: gl.constexpr = K // 64  # a multiple of 4
    L: gl.constexpr = words_layout(8)
    fills = 0
    for item in range(gl.program_id(0), gl.load(num_slots) * (N // TILE), gl.num_programs(0)):
        weight, rows = _sources(source, item, K, N, GATED, TOP_K, 8)
        words, scales, at, scale_at = weight
        w0, s0 = _load(words, scales, at, scale_at, 0)
        w1, s1 = _load(words, scales, at, scale_at, 1)
        for step in range(2, PREFETCH):
            _prefetch(words, at, gl.minimum(step, STEPS - 1))
        for step in range(0, STEPS, 2):
            _prefetch(words, at, gl.minimum(step + PREFETCH, STEPS - 2))
            _prefetch(words, at, gl.minimum(step + PREFETCH, STEPS - 2) + 1)
            # Words are read again as soon as they are decoded: one step early, and from L2.
            _fill(rows, w0, s0, step, fills, smem, GATED, RING, EARLY, L)
            w0, s0 = _load(words, scales, at, scale_at, gl.minimum(step + 2, STEPS - 2))
            _fill(rows, w1, s1, step + 1, fills + 1, smem, GATED, RING, EARLY, L)
            w1, s1 = _load(words, scales, at, scale_at, gl.minimum(step + 2, STEPS - 2) + 1)
            fills += 2
        async_copy.wait_group(0)
        _hand_over(full.index((fills + RING - 1) % RING), STEPS > 0, EARLY)


# --- Consumer -------------------------------------------------------------------------------------


@gluon.jit
def _multiply(uses, smem, M: gl.constexpr, STEPS: gl.constexpr, RING: gl.constexpr, EARLY: gl.constexpr,
              L: gl.constexpr):  # fmt: skip
    """-> sums [M, 256] of one item; waits for stages, and frees each when the next one's products run."""
    x_s, w_s, full, empty = smem
    acc = gl.zeros([M, TILE], gl.float32, L)
    for step in range(STEPS):
        stage = uses % RING
        mbarrier.wait(full.index(stage), (uses // RING) & 1)
        if not EARLY:
            fence_async_shared()
        rows = x_s.index(stage).slice(0, M, 0)
        product = warpgroup_mma(rows, w_s.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[product])
        mbarrier.arrive(empty.index((uses + RING - 1) % RING), count=1, pred=step > 0)
        uses += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((uses + RING - 1) % RING), count=1)
    return acc


@gluon.constexpr_function
def store_layout(m, width):
    """Where the accumulators stand after `_finish*` has renamed columns: 8 neighbours, 16 bytes, a lane. 64
    rows leave half of the columns to the other warpgroup."""
    columns = [[0, 1 << n] for n in range(5, width.bit_length() - 1)]
    warps = [[16, 0], [32, 0], [64, 0]]
    if m == 64:
        warps[2] = columns.pop()
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *columns],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warps,
        [],
        [m, width],
    )


@gluon.jit
def _bf16(x):
    return gl.inline_asm_elementwise(_ROUND, "=&r,=&r,r,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def _silu(x):
    return gl.inline_asm_elementwise(_SILU, "=&r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _finish_gated(acc, out, order, weights, limit, tile, start, count, M: gl.constexpr, WIDTH: gl.constexpr):
    """Sums -> hidden rows of 128 intermediates, quantised, in the K order of the next product."""
    # [M, tile, b1, g1, half, lane, g0]
    gate, up = gl.split(gl.permute(gl.reshape(acc, [M, 4, 2, 2, 2, 4, 2]), (0, 1, 2, 3, 5, 6, 4)))
    gate = gl.minimum(_bf16(gate * GIVE_BACK), limit, propagate_nan=tl.PropagateNan.ALL)
    up = gl.minimum(_bf16(up * GIVE_BACK), limit, propagate_nan=tl.PropagateNan.ALL)
    up = gl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    hidden = _silu(gate) * up
    hidden = gl.reshape(gl.permute(hidden, (0, 1, 4, 2, 5, 3)), [M, 4, 32])
    LM: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, hidden.type.layout))
    m = gl.arange(0, M, layout=LM)
    pair = gl.load(order + start + m, mask=m < count, other=0)
    weight = gl.load(weights + pair, mask=m < count, other=0.0)
    hidden = _bf16(hidden * gl.expand_dims(gl.expand_dims(weight, 1), 2))
    largest = gl.max(hidden.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    hidden = _round_trip(hidden, gl.expand_dims(largest, 2)).to(gl.bfloat16)
    LO: gl.constexpr = store_layout(M, TILE // 2)
    hidden = gl.convert_layout(gl.reshape(hidden, [M, TILE // 2]), LO, assert_trivial=True)
    row = start + gl.arange(0, M, layout=gl.SliceLayout(1, LO))
    _store(hidden, out, row, count, tile * (TILE // 2), M, TILE // 2, WIDTH, LO)


@gluon.jit
def _finish(acc, out, order, tile, start, count, M: gl.constexpr, D: gl.constexpr):
    """Sums -> 256 outputs of every pair."""
    value = (acc * GIVE_BACK).to(gl.bfloat16)
    # [M, tile, b1, g2, g1, lane, g0]: a lane has the 8 outputs of one (b1, lane)
    value = gl.permute(gl.reshape(value, [M, 4, 2, 2, 2, 4, 2]), (0, 1, 2, 5, 3, 4, 6))
    LO: gl.constexpr = store_layout(M, TILE)
    value = gl.convert_layout(gl.reshape(value, [M, TILE]), LO, assert_trivial=True)
    m = gl.arange(0, M, layout=gl.SliceLayout(1, LO))
    pair = gl.load(order + start + m, mask=m < count, other=0)
    _store(value, out, pair, count, tile * TILE, M, TILE, D, LO)


@gluon.jit
def _store(value, out, row, count, first, M: gl.constexpr, WIDTH: gl.constexpr, D: gl.constexpr,
           L: gl.constexpr):  # fmt: skip
    """bf16 [M, WIDTH] -> columns first.. of rows `row`, 16 bytes a lane."""
    m = gl.arange(0, M, layout=gl.SliceLayout(1, L))
    column = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    at = gl.expand_dims(row.to(gl.int64) * D, 1) + gl.expand_dims(column, 0)
    mask, _ = gl.broadcast(gl.expand_dims(m < count, 1), at)
    gl.store(out + at, value, mask=mask)


@gluon.jit
def _item_of(uses, smem, out, order, weights, limit, work, M: gl.constexpr, K: gl.constexpr,
             N: gl.constexpr, GATED: gl.constexpr, RING: gl.constexpr, EARLY: gl.constexpr,
             L: gl.constexpr):  # fmt: skip
    tile, start, count = work
    acc = _multiply(uses, smem, M, K // 64, RING, EARLY, L)
    if GATED:
        _finish_gated(acc, out, order, weights, limit, tile, start, count, M, N // 2)
    else:
        _finish(acc, out, order, tile, start, count, M, N)


@gluon.jit
def _consume(out, order, weights, limit, num_slots, slots, smem, K: gl.constexpr, N: gl.constexpr,
             GATED: gl.constexpr, RING: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    TILES: gl.constexpr = N // TILE
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, TILE // 2, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TILE // 2, 16])
    uses = 0
    for item in range(gl.program_id(0), gl.load(num_slots) * TILES, gl.num_programs(0)):
        tile, _, start, count = _item(item, slots, TILES)
        work = (tile, start, count)
        if count > HALF_ROWS:
            _item_of(uses, smem, out, order, weights, limit, work, ROWS, K, N, GATED, RING, EARLY, WIDE)
        else:
            _item_of(uses, smem, out, order, weights, limit, work, HALF_ROWS, K, N, GATED, RING, EARLY,
                     NARROW)  # fmt: skip
        uses += K // 64


# --- Kernel ---------------------------------------------------------------------------------------


# Alignment of what is read word by word makes no other kernel.
_PLAIN = ("order", "weights", "num_slots", "slot_expert", "slot_start", "slot_count")


@gluon.jit(do_not_specialize_on_alignment=_PLAIN)
def _experts(x, w, scale, out, order, weights, num_slots, slot_expert, slot_start, slot_count, limit,
             K: gl.constexpr, N: gl.constexpr, GATED: gl.constexpr, TOP_K: gl.constexpr,
             RING: gl.constexpr, PREFETCH: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [RING, ROWS, 64], SWIZZLED)
    w_s = gl.allocate_shared_memory(gl.bfloat16, [RING, TILE, 64], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    slots = (slot_expert, slot_start, slot_count)
    smem = (x_s, w_s, full, empty)
    source = (x, w, scale, order, slots)
    gl.warp_specialize([
        (_consume, (out, order, weights, limit, num_slots, slots, smem, K, N, GATED, RING, EARLY)),
        (_produce, (source, num_slots, smem, K, N, GATED, TOP_K, RING, PREFETCH, EARLY)),
    ], [8], [80])  # fmt: skip


# --- Host -----------------------------------------------------------------------------------------


def specialisation(
    k: int,
    n: int,
    gated: bool,
    top_k: int,
    ring: int = STAGES,
    ahead: int = AHEAD,
    early_fence: bool = True,
) -> dict[str, object]:
    """Compile-time arguments of `_experts`: [n, k] weights of an expert, `top_k` choices a row.

    Without `early_fence`, the consumers fence what the producers have stored.
    """
    return {
        "K": k,
        "N": n,
        "GATED": gated,
        "TOP_K": top_k if gated else 1,
        "RING": ring,
        "PREFETCH": ahead,
        "EARLY": early_fence,
    }


def check_shapes(hidden: int, width: int) -> None:
    """ValueError for sizes that the blocks do not divide: gate and up rows [2I, D], down [D, I]."""
    for name, size in (("hidden size", hidden), ("expert width", width)):
        if size % 256 or size <= 0:
            raise ValueError(f"the Hopper expert kernels need a {name} that 256 divides, not {size}.")


def quantise_rows(x: Tensor, fragments: bool = False) -> Tensor:
    """bf16 [T, D], columns contiguous -> its fp8_32 round trip, bf16 [T, D] in the order of `k_place`, or
    with `fragments` in that of gluon_registers.py."""
    rows, hidden = x.shape
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if rows:
        _quantise_rows[(rows, triton.cdiv(hidden, 1024))](
            x, out, x.stride(0), D=hidden, GROUPS=32, FRAGMENTS=fragments, num_warps=4
        )
    return out


def multiply(
    x: Tensor,
    groups: Groups,
    weights: Tensor,
    packed: Tensor,
    scale: Tensor,
    limit: float | None,
    **variant: int,
) -> Tensor:
    """One product of every pair, its rows already quantised, in the order of `k_place`.

    With a `limit`, gate and up: x [T, D] by token -> hidden rows [T * k, I] by place in `order`. Without,
    down: x [T * k, I] by place -> [T * k, D] by pair. Rows past the last live pair are undefined.
    """
    gated = limit is not None
    n, k = packed.shape[1], packed.shape[2] * 2
    pairs, top_k = weights.numel(), weights.shape[1]
    out = torch.empty((pairs, n // 2 if gated else n), dtype=torch.bfloat16, device=x.device)
    if pairs == 0:
        return out
    with torch.cuda.device(x.device):
        sms = torch.cuda.get_device_properties(x.device).multi_processor_count
        grid = (min(sms, groups.slot_expert.shape[0] * (n // TILE_ROWS)),)
        _experts[grid](
            x, packed, scale, out, groups.order, weights, groups.num_slots, groups.slot_expert,
            groups.slot_start, groups.slot_count, limit if limit is not None else 0.0,
            **specialisation(k, n, gated, top_k, **variant), num_warps=8,
        )  # fmt: skip
    return out


def run_many(
    x: Tensor,
    groups: Groups,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    limit: float,
) -> Tensor:
    """bf16 x [T, D], float32 weights [T, k] -> bf16 [T * k, D], a row per pair, of padding pairs undefined.

    The four weight tensors are in the byte order of gluon_pack.py; `groups` has slots of at most CHUNK.
    Raises ValueError for another dtype, or a size that 256 does not divide.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(f"the Hopper expert kernels run bf16 rows only, not {x.dtype}.")
    check_shapes(x.shape[1], down.shape[2] * 2)
    x = x if x.stride(1) == 1 else x.contiguous()
    weights = weights.contiguous()
    hidden = multiply(quantise_rows(x), groups, weights, gate_up, gate_up_scale, limit)
    return multiply(hidden, groups, weights, down, down_scale, None)
