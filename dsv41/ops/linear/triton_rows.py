"""What stands around the products of fp8 weights, in Triton: rows made ready, weights widened, splits added.

    prepare_kernel    grid [rows, blocks, groups]   bf16 rows quantised and back, or rotated back
    widen_kernel      grid [N / 16, K / 256]        e4m3 weight and its scales to bf16
    add_kernel        grid [elements / 1024]        fp32 sums of the parts of K, in their order, to bf16

Layout. A row of x is read as int32: a word is a pair of channels, its even one in the low half. A block of 32
channels is a run of 16 words, and the rotation turns the two halves of a word.

The trick. Codes are never formed: a scaled fp32 value is rounded to three mantissa bits in place, by adding
half a step to its bits, or by adding a large power of two where e4m3 is subnormal. Results are exact in bf16
and equal ops/records.py bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv41.ops.records import FP8_FLOOR, FP32_RECIPROCAL_448

FLOOR, RECIPROCAL = tl.constexpr(FP8_FLOOR), tl.constexpr(FP32_RECIPROCAL_448)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _pow2(biased):
    """records._pow2: int32 exponent + 127 in 0..255 -> fp32, 255 -> NaN."""
    edge = (biased == 0) | (biased == 255)
    return ((biased << 23) | (edge.to(tl.int32) << 22)).to(tl.float32, bitcast=True)


@triton.jit
def _round_e4m3(x):
    """fp32 -> the nearest e4m3 value in fp32, ties to even, saturating at 448; NaN stays."""
    bits = _bits(x)
    magnitude = bits & 0x7FFFFFFF
    capped = tl.minimum(magnitude, 0x43E00000)  # 448
    normal = (capped + 0x7FFFF + ((capped >> 20) & 1)) & -0x100000
    # The spacing of fp32 at 2^14 is 2^-9, the spacing of e4m3 below its first normal value 2^-6.
    subnormal = _bits((capped.to(tl.float32, bitcast=True) + 16384.0) - 16384.0)
    rounded = tl.where(capped < 0x3C800000, subnormal, normal) | (bits & -0x80000000)
    return tl.where(magnitude > 0x7F800000, x, rounded.to(tl.float32, bitcast=True))


@triton.jit
def _fake_quantised(even, odd, PAIRS: tl.constexpr):
    """records.round_trip "fp8_32" of pairs [PAIRS] in fp32."""
    even = tl.reshape(even, (PAIRS // 16, 16))
    odd = tl.reshape(odd, (PAIRS // 16, 16))
    # As integers: NaN ranks above infinity and so rules its block.
    largest = tl.max(tl.maximum(_bits(even) & 0x7FFFFFFF, _bits(odd) & 0x7FFFFFFF), axis=1)
    largest = tl.maximum(largest, _bits(tl.full((PAIRS // 16,), FLOOR, tl.float32)))
    target = _bits(largest.to(tl.float32, bitcast=True) * RECIPROCAL)
    biased = tl.minimum((target >> 23) + ((target & 0x7FFFFF) != 0).to(tl.int32), 255)
    scale = tl.expand_dims(_pow2(biased), 1)
    inverse = tl.expand_dims(_pow2((254 - biased) & 0xFF), 1)
    even = _round_e4m3(even * inverse) * scale
    odd = _round_e4m3(odd * inverse) * scale
    return tl.reshape(even, (PAIRS,)), tl.reshape(odd, (PAIRS,))


@triton.jit
def _turned_back(even, odd, angles, pair, live, D: tl.constexpr, ROPE: tl.constexpr):
    """arithmetic.rotate, inverse, of pairs in fp32; pair counts channels of whole heads in twos."""
    place = pair % (D // 2) - (D - ROPE) // 2
    turns = live & (place >= 0)
    cos = tl.load(angles + place, mask=turns, other=1.0)
    sin = tl.load(angles + ROPE // 2 + place, mask=turns, other=0.0)
    turned_even = even * cos + odd * sin
    turned_odd = odd * cos - even * sin
    return tl.where(turns, turned_even, even), tl.where(turns, turned_odd, odd)


@triton.jit
def prepare_kernel(
    x, cos_sin, out, x_row, K: tl.constexpr, PADDED: tl.constexpr, QUANTISE: tl.constexpr,
    PERMUTE: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """x: words, x_row apart, K / 2 of a group -> out bf16 [T, groups * PADDED], zeros from K to PADDED.

    PERMUTE: in the order of K of the few-row kernel, else in x's own.
    """
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(2)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    live = pair < K // 2
    words = tl.load(x + row * x_row + group * (K // 2) + pair, mask=live, other=0)
    even = (words << 16).to(tl.float32, bitcast=True)
    odd = (words & -65536).to(tl.float32, bitcast=True)
    if QUANTISE:
        even, odd = _fake_quantised(even, odd, PAIRS)
    else:
        even, odd = _turned_back(even, odd, cos_sin + row * ROPE, pair, live, D, ROPE)
    v = tl.join(even.to(tl.bfloat16), odd.to(tl.bfloat16))
    if PERMUTE:
        # [block of 64, lane, w1, j1, p, j0] -> [block, w1, j1, j0, lane, p]
        v = tl.permute(tl.reshape(v, (PAIRS // 32, 4, 2, 2, 2, 2)), (0, 2, 3, 5, 1, 4))
    v = tl.reshape(v, (2 * PAIRS,))
    column = tl.program_id(1) * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)
    at = (row * tl.num_programs(2) + group) * PADDED + column
    tl.store(out + at, v, mask=column < PADDED)


@triton.jit
def widen_kernel(weight, scale, out, num_rows, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """weight: e4m3 bytes [N, K], scale [N / 32, K / 32] -> out bf16 [N, K]; NaN codes and scales give NaN."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = (row < num_rows)[:, None] & (column < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + column[None, :]
    code = tl.load(weight + at, mask=live, other=0).to(tl.int32)
    group = tl.program_id(1) * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
    scale_row = tl.program_id(0) * ROWS // 32
    byte = tl.load(scale + scale_row.to(tl.int64) * (K // 32) + group, mask=group < K // 32, other=127)
    power = tl.expand_dims(tl.expand_dims(_pow2(byte.to(tl.int32)), 0), 2)
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * (
        2.0**120
    )  # e4m3 fields read as fp32 are 2^-120 of their value
    value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    value = tl.reshape(tl.reshape(value, (ROWS, COLUMNS // 32, 32)) * power, (ROWS, COLUMNS))
    tl.store(out + at, value.to(tl.bfloat16), mask=live)


@triton.jit
def add_kernel(
    part, out, count, SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, STACKED: tl.constexpr
):
    """part fp32 [SPLITS, count] -> out [count]: added from the first on, rounded once.

    EARLY: launched before the kernel that writes `part` has ended. STACKED: the next kernel may start before
    that end, too (it waits for this one, and this one for that end).
    """
    if EARLY:
        if STACKED:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not STACKED:
            tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    total = tl.load(part + at, mask=live, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(part + split * count.to(tl.int64) + at, mask=live, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=live)
