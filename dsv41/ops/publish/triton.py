"""Publishing in Triton: one launch an op, one program a stored row; the window's queries ride along.

Layout. A program holds a row as its even and its odd channels, two fp32 vectors of d/2. The rotation turns
pairs, a byte of fp4 is a pair, a block is a run of pairs: all but the norm's sum and the blocks' maxima stays
inside a thread.

Grid. Program 0 of a row stores it; programs 1.. of a row each copy `HEAD_TILE` of its query heads and rotate
their last r channels. A row with slot -1 ends at once.

The trick. Scales and codes are integer arithmetic on fp32 bits, the same on every GPU: |x| is compared as an
integer, where NaN ranks above infinity and so makes its block NaN without a branch; adding half a step to the
bits rounds to a normal code, adding a large power of two to a subnormal one. The rest needs IEEE products,
quotients and differences, so the launch forbids fused multiply-add.

Bytes equal ops/records.py bit for bit, given the normed row: the norm sums d squares in another order than
torch, which moves a last bit now and then. A NaN code has no sign.

Shape letters: T rows, H heads, d channels, r rotated channels, P pages, S states of a page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.hardware import Hardware
from dsv41.ops import records

# Round trip -> (values that share a scale, 0 for the whole row; what to multiply their maximum by, 0 for the
# division of NVFP4; floor of the maximum).
_FP8 = (records.FP32_RECIPROCAL_448, records.FP8_FLOOR)
QUANTISERS = {
    "fp8_32": (32, *_FP8),
    "fp8_64": (64, *_FP8),
    "fp8_row": (0, *_FP8),
    "mxfp4_32": (32, records.FP32_RECIPROCAL_6, records.MXFP4_FLOOR),
    "nvfp4_16": (16, 0.0, records.NVFP4_FLOOR),
    "none": (0, 0.0, 0.0),
}
RECORDS = (
    "rows_bf16",
    "scaled_528",
    "scaled_528_split",
    "nvfp4_288",
    "nvfp4_288_split",
    "mixed_584",
    "fp8_132",
    "mxfp4_68",
)
HEAD_TILE = 4  # query heads of a program
# Without and with queries. Fixed, so that the norm's sum has one order for every T.
ROW_WARPS, QUERY_WARPS = 2, 4


def why_not(hardware: Hardware, record: str | None) -> str | None:
    if hardware.sm < 90:  # they are launched early
        return f"the Triton publishing kernels need a CUDA GPU of SM90 or newer, not {hardware.name}"
    if record is not None and record not in RECORDS:
        return f"the Triton publishing kernels write {', '.join(RECORDS)}, not {record}"
    return None


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _pow2(biased):
    """records._pow2: int32 exponent + 127 in 0..255 -> fp32, 255 -> NaN."""
    edge = (biased == 0) | (biased == 255)
    return ((biased << 23) | (edge.to(tl.int32) << 22)).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(x):
    """fp32 -> int32 codes: nearest, ties to even, saturating at 448; NaN is 0x7f."""
    bits = _bits(x)
    magnitude = bits & 0x7FFFFFFF
    capped = tl.minimum(magnitude, 0x43E00000)  # 448
    normal = ((capped + 0x7FFFF + ((capped >> 20) & 1)) >> 20) - (120 << 3)
    # The spacing of fp32 at 2^14 is 2^-9, the spacing of e4m3 below its first normal value 2^-6.
    subnormal = _bits(capped.to(tl.float32, bitcast=True) + 16384.0) & 0xF
    code = tl.where(capped < 0x3C800000, subnormal, normal)
    return tl.where(magnitude > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80))


@triton.jit
def _e2m1(x):
    """fp32 -> int32 codes 0..15: nearest, ties to the even code, saturating at 6; NaN is 0."""
    bits = _bits(x)
    magnitude = bits & 0x7FFFFFFF
    capped = tl.minimum(magnitude, 0x40C00000)  # 6
    normal = ((capped + 0x1FFFFF + ((capped >> 22) & 1)) >> 22) - (126 << 1)
    subnormal = _bits(capped.to(tl.float32, bitcast=True) + 4194304.0) & 0x3  # fp32 spacing 0.5 at 2^22
    code = tl.where(capped < 0x3F800000, subnormal, normal)
    return tl.where(magnitude > 0x7F800000, 0, code | ((bits >> 28) & 8))


@triton.jit
def _decode(code, FP4: tl.constexpr):
    """int32 codes -> fp32: the fields moved into place, then an exact product with the biases' difference."""
    if FP4:
        value = (((code & 0x7) << 22) | ((code & 0x8) << 28)).to(tl.float32, bitcast=True) * (2.0**126)
    else:
        value = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True) * (2.0**120)
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def _quantise(
    even, odd, HALF: tl.constexpr, FP4: tl.constexpr, RECIPROCAL: tl.constexpr, FLOOR: tl.constexpr
):
    """-> int32 codes of the even and of the odd channels [d/2], int32 scale bytes and fp32 scales [blocks].
    A block has HALF pairs."""
    PAIRS: tl.constexpr = even.shape[0]
    even = tl.reshape(even, (PAIRS // HALF, HALF))
    odd = tl.reshape(odd, (PAIRS // HALF, HALF))
    largest = tl.max(tl.maximum(_bits(even) & 0x7FFFFFFF, _bits(odd) & 0x7FFFFFFF), axis=1)
    largest = tl.maximum(largest, _bits(tl.full((PAIRS // HALF,), FLOOR, tl.float32)))
    largest = largest.to(tl.float32, bitcast=True)
    if RECIPROCAL == 0.0:
        scale_code = _e4m3(tl.div_rn(largest, 6.0))
        scale = _decode(scale_code, False)
        even = tl.div_rn(even, tl.expand_dims(scale, 1))
        odd = tl.div_rn(odd, tl.expand_dims(scale, 1))
    else:
        target = _bits(largest * RECIPROCAL)
        scale_code = tl.minimum((target >> 23) + ((target & 0x7FFFFF) != 0).to(tl.int32), 255)
        scale = _pow2(scale_code)
        inverse = tl.expand_dims(_pow2((254 - scale_code) & 0xFF), 1)
        even = even * inverse
        odd = odd * inverse
    if FP4:
        even, odd = _e2m1(even), _e2m1(odd)
    else:
        even, odd = _e4m3(even), _e4m3(odd)
    return tl.reshape(even, (PAIRS,)), tl.reshape(odd, (PAIRS,)), scale_code, scale


@triton.jit
def _norm(even, odd, weight, eps, D: tl.constexpr):
    """Root mean square norm of a row, rounded to bf16, in fp32."""
    weight_even, weight_odd = _load_pairs(weight, D, 2 * even.shape[0])
    mean = tl.div_rn(tl.sum(even * even + odd * odd, axis=0), D * 1.0)
    scale = tl.rsqrt(mean + eps)
    even = (even * scale * weight_even).to(tl.bfloat16).to(tl.float32)
    return even, (odd * scale * weight_odd).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _load_pairs(row, D: tl.constexpr, WIDTH: tl.constexpr):
    """d bf16 values, zeros up to the power of two WIDTH -> even and odd channels in fp32."""
    channel = tl.arange(0, WIDTH)
    values = tl.load(row + channel, mask=channel < D, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(values, (WIDTH // 2, 2)))


@triton.jit
def _rotate(even, odd, cos, sin):
    """The rotation as the release rounds it: two products, one difference or sum, bf16."""
    return (even * cos - odd * sin).to(tl.bfloat16), (even * sin + odd * cos).to(tl.bfloat16)


@triton.jit
def _store(
    even,
    odd,
    page,  # where the page starts
    state,  # int64, which of its states
    D: tl.constexpr,
    NOPE: tl.constexpr,  # quantised channels: d, or d - r where the record keeps the rotated ones in bf16
    ROWS: tl.constexpr,  # plain rows: bf16 values, after the round trip if there is one
    FP4: tl.constexpr,
    BLOCK: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    FLOOR: tl.constexpr,
    DATA_OFFSET: tl.constexpr,
    DATA_STRIDE: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FP32_SCALES: tl.constexpr,
):
    PAIRS: tl.constexpr = even.shape[0]
    HALF: tl.constexpr = BLOCK // 2 if BLOCK > 0 else PAIRS
    channel = tl.arange(0, 2 * PAIRS)
    if ROWS:
        if FLOOR > 0.0:
            even_code, odd_code, _, scale = _quantise(even, odd, HALF, FP4, RECIPROCAL, FLOOR)
            scale = tl.reshape(tl.broadcast_to(tl.expand_dims(scale, 1), (PAIRS // HALF, HALF)), (PAIRS,))
            even = _decode(even_code, FP4) * scale
            odd = _decode(odd_code, FP4) * scale
        values = tl.interleave(even.to(tl.bfloat16), odd.to(tl.bfloat16))
        tl.store(page + state * D + channel, values, mask=channel < D)
    else:
        data = page + DATA_OFFSET + state * DATA_STRIDE
        even_code, odd_code, scale_code, scale = _quantise(even, odd, HALF, FP4, RECIPROCAL, FLOOR)
        if FP4:
            pair = tl.arange(0, PAIRS)
            tl.store(data + pair, (even_code | (odd_code << 4)).to(tl.uint8), mask=pair < D // 2)
        else:
            codes = tl.interleave(even_code.to(tl.uint8), odd_code.to(tl.uint8))
            tl.store(data + channel, codes, mask=channel < NOPE)
        if NOPE < D:
            turned = (data + NOPE).to(tl.pointer_type(tl.bfloat16)) + channel - NOPE
            values = tl.interleave(even.to(tl.bfloat16), odd.to(tl.bfloat16))
            tl.store(turned, values, mask=(channel >= NOPE) & (channel < D))
        scales = page + SCALE_OFFSET + state * SCALE_STRIDE
        if FP32_SCALES:
            byte = tl.arange(0, 4)
            tl.store(scales + byte, ((_bits(scale) >> (8 * byte)) & 0xFF).to(tl.uint8))
        else:
            block = tl.arange(0, PAIRS // HALF)
            tl.store(scales + block, scale_code.to(tl.uint8), mask=block < NOPE // BLOCK)
            if SCALE_BYTES > NOPE // BLOCK:
                pad = tl.arange(0, 8)  # the one padding there is: zero bytes up to a multiple of 8
                written = SCALE_BYTES - 8 + pad
                zeros = tl.zeros((8,), tl.uint8)
                tl.store(scales + written, zeros, mask=written >= NOPE // BLOCK)


@triton.jit
def _publish(
    x,
    x_stride,
    norm,
    eps,
    cos_sin,
    angle_stride,
    slots,
    cache,
    page_stride,
    q,
    q_stride,
    q_head_stride,
    q_out,
    HEADS: tl.constexpr,
    OUT_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    PAGE_STATES: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    NOPE: tl.constexpr,
    ROWS: tl.constexpr,
    FP4: tl.constexpr,
    BLOCK: tl.constexpr,
    RECIPROCAL: tl.constexpr,
    FLOOR: tl.constexpr,
    DATA_OFFSET: tl.constexpr,
    DATA_STRIDE: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FP32_SCALES: tl.constexpr,
    EARLY: tl.constexpr,  # launched before its producers have ended
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    PARTS: tl.constexpr = 1 + (OUT_HEADS + TILE - 1) // TILE
    part = tl.program_id(0) % PARTS
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    angles = cos_sin + row * angle_stride
    if part == 0:
        slot = tl.load(slots + row)
        if slot >= 0:
            even, odd = _load_pairs(x + row * x_stride, D, WIDTH)
            if NORM:
                even, odd = _norm(even, odd, norm, eps, D)
            angle = tl.arange(0, WIDTH // 2) - (D - ROPE) // 2
            turns = (angle >= 0) & (angle < ROPE // 2)
            cos = tl.load(angles + angle, mask=turns, other=1.0)
            sin = tl.load(angles + ROPE // 2 + angle, mask=turns, other=0.0)
            turned_even, turned_odd = _rotate(even, odd, cos, sin)
            even = tl.where(turns, turned_even.to(tl.float32), even)  # x * 1 - y * 0 is not x if y is NaN
            odd = tl.where(turns, turned_odd.to(tl.float32), odd)
            _store(
                even,
                odd,
                cache + (slot // PAGE_STATES) * page_stride,
                slot % PAGE_STATES,
                D,
                NOPE,
                ROWS,
                FP4,
                BLOCK,
                RECIPROCAL,
                FLOOR,
                DATA_OFFSET,
                DATA_STRIDE,
                SCALE_OFFSET,
                SCALE_STRIDE,
                SCALE_BYTES,
                FP32_SCALES,
            )
    else:
        head = tl.expand_dims((part - 1) * TILE + tl.arange(0, TILE), 1)
        source = q + row * q_stride + head.to(tl.int64) * q_head_stride
        target = q_out + (row * OUT_HEADS + head) * D
        channel = tl.expand_dims(tl.arange(0, WIDTH), 0)
        turned = tl.expand_dims(tl.arange(0, ROPE_WIDTH), 0)
        in_still, in_turned = channel < D - ROPE, turned < ROPE
        live, kept = head < HEADS, head < OUT_HEADS
        still = tl.load(source + channel, mask=live & in_still, other=0.0)
        values = tl.load(source + (D - ROPE) + turned, mask=live & in_turned, other=0.0).to(tl.float32)
        pair = tl.arange(0, ROPE_WIDTH // 2)
        cos = tl.expand_dims(tl.load(angles + pair, mask=pair < ROPE // 2, other=0.0), 0)
        sin = tl.expand_dims(tl.load(angles + ROPE // 2 + pair, mask=pair < ROPE // 2, other=0.0), 0)
        even, odd = tl.split(tl.reshape(values, (TILE, ROPE_WIDTH // 2, 2)))
        even, odd = _rotate(even, odd, cos, sin)
        tl.store(target + channel, still, mask=kept & in_still)
        values = tl.where(live, tl.interleave(even, odd), 0.0)  # a turned zero could be negative
        tl.store(target + (D - ROPE) + turned, values, mask=kept & in_turned)


def _launch(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    record: str,
    page_states: int,
    round_trip: str,
    q: Tensor | None = None,
    pad_heads: int = 0,
) -> Tensor:
    """x [T, d], norm [d] or None, cos_sin [T, r], slots [T], q [T, H, d] or None -> q rotated and padded."""
    layout = records.get_record(record)
    assert record in RECORDS, f"{record} has no Triton writer"
    (num_rows, dim), rope_dim = x.shape, cos_sin.shape[-1]
    num_heads = 0 if q is None else q.shape[1]
    out_heads = 0 if q is None else max(num_heads, pad_heads)
    q_out = x if q is None else q.new_empty((num_rows, out_heads, dim))
    q = x if q is None else q
    if num_rows == 0:
        return q_out
    rows = layout.row_dtype is not None
    data, scales = records.regions(record, page_states, dim, rope_dim)
    assert x.dtype == q.dtype == torch.bfloat16, f"published values are bf16, got {x.dtype} and {q.dtype}"
    assert x.stride(-1) == q.stride(-1) == cos_sin.stride(-1) == slots.stride(0) == 1, "rows lie in one piece"
    assert norm is None or norm.is_contiguous(), "the norm's weights lie in one piece"
    assert slots.dtype == torch.int64, f"slots are int64, got {slots.dtype}"
    assert slots.shape == cos_sin.shape[:1] == q.shape[:1] == (num_rows,), "one slot, angle and query a row"
    assert cache.dtype == (layout.row_dtype or torch.uint8), f"wrong dtype {cache.dtype} of {record} pages"
    assert cache.stride(-1) == 1, "a page lies in one piece"
    assert not layout.keeps_rope or cache.stride(0) % 2 == 0, "bf16 values need pages an even distance apart"
    if rows:
        assert cache.shape[1:] == (page_states, dim), f"wrong shape {tuple(cache.shape)} of {record} pages"
        assert cache.stride(1) == dim, "a page lies in one piece"
    block, reciprocal, floor = QUANTISERS[round_trip if rows else layout.round_trip]
    width, tile = triton.next_power_of_2(dim), min(HEAD_TILE, triton.next_power_of_2(max(out_heads, 1)))
    _publish[(num_rows * (1 + -(-out_heads // tile)),)](
        x,
        x.stride(0),
        x if norm is None else norm,
        eps,
        cos_sin,
        cos_sin.stride(0),
        slots,
        cache,
        cache.stride(0),
        q,
        q.stride(0),
        q.stride(1),
        q_out,
        HEADS=num_heads,
        OUT_HEADS=out_heads,
        TILE=tile,
        NORM=norm is not None,
        PAGE_STATES=page_states,
        D=dim,
        ROPE=rope_dim,
        WIDTH=width,
        ROPE_WIDTH=triton.next_power_of_2(rope_dim),
        NOPE=dim - rope_dim if layout.keeps_rope else dim,
        ROWS=rows,
        FP4="fp4" in (round_trip if rows else layout.round_trip),
        BLOCK=block,
        RECIPROCAL=reciprocal,
        FLOOR=floor,
        DATA_OFFSET=data.offset,
        DATA_STRIDE=data.stride,
        SCALE_OFFSET=scales.offset,
        SCALE_STRIDE=scales.stride,
        SCALE_BYTES=scales.width,
        FP32_SCALES=layout.fp32_scales,
        EARLY=x.is_cuda,
        num_warps=QUERY_WARPS if out_heads else ROW_WARPS,
        enable_fp_fusion=False,
        launch_pdl=x.is_cuda,
    )
    return q_out


def publish_window(
    q: Tensor,
    kv: Tensor,
    norm: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    record: str,
    page_states: int,
    pad_heads: int,
    eps: float,
    quantise: bool,
) -> Tensor:
    round_trip = "fp8_32" if quantise else "none"
    return _launch(kv, norm, eps, cos_sin, slots, cache, record, page_states, round_trip, q, pad_heads)


def publish_states(
    latent: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    record: str,
    page_states: int,
    quantise: bool,
) -> None:
    round_trip = "nvfp4_16" if quantise else "none"
    _launch(latent, None, 0.0, cos_sin, slots, cache, record, page_states, round_trip)


def publish_index_k(
    key: Tensor,
    norm: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    record: str,
    page_states: int,
    eps: float,
    quantise: bool,
) -> None:
    round_trip = "mxfp4_32" if quantise else "none"
    _launch(key, norm, eps, cos_sin, slots, cache, record, page_states, round_trip)
