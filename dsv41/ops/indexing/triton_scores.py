"""Index queries and index scores in plain Triton, for every record and every shape.

    query_kernel   grid [T, heads]    rotate, round, quantise some heads of a row; scale their weights
    scores_kernel  grid [tiles, T]    TILE columns of one row: dequantise keys, one dot, relu, weighted sum
    mask_kernel    grid [tiles, T]    -inf beyond a row's visible states

The fp4 path of the release's shape has kernels of its own (gluon_scores.py); these serve the other records
and are what the interpreter can run. A row's column is a state or, with a candidate list, a state of a listed
block. A page is read by `records.regions`: the address rule is not repeated here. Scores are fp32 sums in
head order of a power-of-two tree, never rounded to bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_of_two(biased):
    """Exponent + 127 in 0..255 -> 2^exponent, from bits: 0 is the subnormal 2^-127, 255 is NaN."""
    edge = ((biased == 0) | (biased == 255)).to(tl.int32)
    return ((biased << 23) | (edge << 22)).to(tl.float32, bitcast=True)


@triton.jit
def ceil_exponent(x):
    """ceil(log2 x) + 127 of fp32 x > 0, from bits (spec/model.md 4)."""
    bits = x.to(tl.int32, bitcast=True)
    biased = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return tl.minimum(biased, 255)


@triton.jit
def e2m1(x):
    """fp32 -> the nearest of 0 .5 1 1.5 2 3 4 6, ties to the even code, saturating; NaN gives 0."""
    m = tl.abs(x)
    value = tl.where(m > 0.25, 0.5, 0.0) + tl.where(m >= 0.75, 0.5, 0.0) + tl.where(m > 1.25, 0.5, 0.0)
    value += tl.where(m >= 1.75, 0.5, 0.0) + tl.where(m > 2.5, 1.0, 0.0) + tl.where(m >= 3.5, 1.0, 0.0)
    value += tl.where(m > 5.0, 2.0, 0.0)
    return tl.where(x.to(tl.int32, bitcast=True) < 0, -value, value)


@triton.jit
def largest(x, axis: tl.constexpr):
    """max |x| with NaN kept. |x| >= 0 and NaN order as the integers of their bits."""
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=axis, keep_dims=True)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def query_kernel(
    q, head_weights, cos_sin, turned, weights,
    q_row, q_head, weight_row, angle_row, scale,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    R: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """HP heads of a row as words of two channels [HP, DP / 2], the even one in the low half."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HP + tl.arange(0, HP)
    head = heads[:, None]
    pair = tl.arange(0, DP // 2)[None, :]
    real = (head < H) & (pair < D // 2)
    source = (q + row * q_row).to(tl.pointer_type(tl.int32)) + head * (q_head // 2) + pair
    words = tl.load(source, mask=real, other=0)
    even = (words << 16).to(tl.float32, bitcast=True)
    odd = (words & -65536).to(tl.float32, bitcast=True)
    angle = pair - (D - R) // 2  # the last R channels turn
    turns = (angle >= 0) & (angle < R // 2)
    cos = tl.load(cos_sin + row * angle_row + angle, mask=turns, other=1.0)
    sin = tl.load(cos_sin + row * angle_row + R // 2 + angle, mask=turns, other=0.0)
    new_even = tl.where(turns, even * cos - odd * sin, even).to(tl.bfloat16).to(tl.float32)
    new_odd = tl.where(turns, even * sin + odd * cos, odd).to(tl.bfloat16).to(tl.float32)
    if RECORD == "mxfp4":
        e = tl.reshape(new_even, [HP, DP // 32, 16])
        o = tl.reshape(new_odd, [HP, DP // 32, 16])
        top = tl.maximum(largest(e, 2).to(tl.int32, bitcast=True), largest(o, 2).to(tl.int32, bitcast=True))
        top = tl.maximum(top, 0x01C00000).to(tl.float32, bitcast=True)  # 6 * 2^-126
        biased = ceil_exponent(top * 0.16666667163372040)  # fp32(1 / 6)
        down, up = power_of_two((254 - biased) & 0xFF), power_of_two(biased)
        new_even = tl.reshape(e2m1(e * down) * up, [HP, DP // 2])
        new_odd = tl.reshape(e2m1(o * down) * up, [HP, DP // 2])
    if RECORD == "fp8":
        top = tl.maximum(
            largest(new_even, 1).to(tl.int32, bitcast=True), largest(new_odd, 1).to(tl.int32, bitcast=True)
        )
        top = tl.maximum(top, 0x38D1B717).to(tl.float32, bitcast=True)  # 1e-4
        biased = ceil_exponent(top * 0.0022321429569274187)  # fp32(1 / 448)
        down, up = power_of_two((254 - biased) & 0xFF), power_of_two(biased)
        new_even = (new_even * down).to(tl.float8e4nv).to(tl.float32) * up
        new_odd = (new_odd * down).to(tl.float8e4nv).to(tl.float32) * up
    # Both are bf16 values by now: codes times powers of two, or rounded above.
    low = (new_even.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    high = new_odd.to(tl.int32, bitcast=True) & -65536
    target = (turned + row * (H * D)).to(tl.pointer_type(tl.int32)) + head * (D // 2) + pair
    tl.store(target, low | high, mask=real)
    w = tl.load(head_weights + row * weight_row + heads, mask=heads < H, other=0.0).to(tl.bfloat16)
    tl.store(weights + row * H + heads, (w.to(tl.float32) * scale).to(tl.bfloat16), mask=heads < H)


@triton.jit
def scores_kernel(
    q, weights, keys, keys_bytes, table, row_request, num_states, lengths, candidates, scores,
    page_stride, table_stride, candidate_stride, stride,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr,
    RECORD: tl.constexpr, DATA: tl.constexpr, DATA_STRIDE: tl.constexpr,
    SCALE: tl.constexpr, SCALE_STRIDE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`keys` in elements (bf16 rows), `keys_bytes` in bytes: page_stride counts elements of the one used."""
    row = tl.program_id(1).to(tl.int64)
    request = tl.load(row_request + row).to(tl.int64)
    n = tl.load((lengths if BLOCK > 0 else num_states) + row).to(tl.int32)
    n = tl.where(request < 0, 0, n)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if tl.program_id(0) * TILE < n:
        seen = column < n
        state = column
        if BLOCK > 0:
            block = tl.load(candidates + row * candidate_stride + column // BLOCK, mask=seen, other=0)
            state = block * BLOCK + column % BLOCK
        page = tl.load(table + request * table_stride + state // S, mask=seen, other=0).to(tl.int64)
        offset = (state % S).to(tl.int64)
        d = tl.arange(0, DP)
        h = tl.arange(0, HP)
        here = seen[:, None] & (d < D)[None, :]
        base = (page * page_stride + offset * DATA_STRIDE + DATA)[:, None]
        factor = tl.full([TILE], 1.0, tl.float32)
        if RECORD == "rows":
            key = tl.load(keys + base + d[None, :], mask=here, other=0.0)
        elif RECORD == "fp8":
            code = tl.load(keys_bytes + base + d[None, :], mask=here, other=0)
            key = code.to(tl.float8e4nv, bitcast=True)
            at = keys_bytes + page * page_stride + offset * SCALE_STRIDE + SCALE
            factor = tl.load(at.to(tl.pointer_type(tl.float32)), mask=seen, other=0.0)
        else:
            # every byte is read twice, once for each of its values: simple, and this path is not the fast one
            byte = tl.load(keys_bytes + base + d[None, :] // 2, mask=here, other=0).to(tl.int32)
            code = (byte >> ((d[None, :] % 2) * 4)) & 15
            exponent = (code >> 1) & 3
            halves = tl.where(exponent == 0, code & 1, (2 + (code & 1)) << tl.maximum(exponent - 1, 0))
            value = halves.to(tl.float32) * tl.where(code >= 8, -0.5, 0.5)
            at = (page * page_stride + offset * SCALE_STRIDE + SCALE)[:, None] + d[None, :] // 32
            scale = tl.load(keys_bytes + at, mask=here, other=127).to(tl.int32)
            key = value * power_of_two(scale)
        asked = (h < H)[None, :] & (d < D)[:, None]
        query = tl.load(q + (row * H + h[None, :]) * D + d[:, None], mask=asked, other=0.0)
        # bf16 values are exact in tf32, the products too; the interpreter has no bf16 product
        dots = tl.dot(key.to(tl.float32), query.to(tl.float32))
        w = tl.load(weights + row * H + h, mask=h < H, other=0.0).to(tl.float32)
        kept = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
        score = tl.sum(tl.where((h < H)[None, :], kept * w[None, :], 0.0), axis=1) * factor
        tl.store(scores + row * stride + column, score, mask=seen)


@triton.jit
def mask_kernel(scores, row_request, num_states, stride, columns, TILE: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    n = tl.where(tl.load(row_request + row) < 0, 0, tl.load(num_states + row))
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    hidden = (column >= n) & (column < columns)
    tl.store(scores + row * stride + column, tl.full([TILE], float("-inf"), tl.float32), mask=hidden)
