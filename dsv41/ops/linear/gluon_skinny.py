"""Few rows times an e4m3 weight on Hopper: bytes by the copy engine, bf16 in registers, wgmma (Gluon).

    grid [weight tiles, K splits, row tiles], 4 warps: 64 weight rows as the A of wgmma, or R = 64 / Q rows
    whose K is cut into Q parts, which stand as 64 rows of A (row r * Q + q is part q of weight row r)

Layout. The weight lies as it is released, [N, K] bytes. Seen as [N, Q, K / Q], a box of R x Q x 128 bytes is
one chunk of 128 of K: 8 KB, one copy, 128-byte swizzle. `STAGES` chunks are under way from the first
instruction on. The M side of wgmma is the weight, the N side is rows of x: column q * NT + t is row t with
part q of K. With Q > 1 only the products of equal parts count: the other columns are dropped at the end,
and a tile of 16 weight rows fills an SM's ring without splitting K over CTAs, so no second launch adds up.
Where K is split, fp32 sums go to `part` and another kernel adds them in order.

The trick. A lane takes 16 contiguous bytes of a weight row. The order of K is free as long as x follows it
(`permuted`): x stands in the order in which the codes come out of the lane's words. A code becomes bf16 by
moving its bits into the sign, exponent and mantissa fields and one bf16x2 product with a power of two, which
is the tile's scale at the same time. So every product is exact and sums are fp32 over all of K; nothing is
rescaled on the way. Rows of a group of 8 stand permuted in A, so that a quarter warp's 16-byte reads meet
eight bank groups.

x is read in one of two ways. `QUANTISE`, `ROTATE`: by the kernel itself (8 / Q rows at most), while the
weight is already on its way: every CTA quantises, or rotates back, the part of x that it needs. `READY`: bf16
rows in the permuted order, written by another kernel, copied beside the weight.

Everything is 2^-64 too small until the end, which keeps the factors inside bf16's range: exact for scale
bytes from 74 to 198 (2^-53 ... 2^71); smaller ones may flush codes to zero, larger ones count as NaN. NaN
codes of the weight count as 480.

Programmatic launch: weights and scales are read before the wait for the kernel before. That kernel must not
write them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

from dsv41.ops.records import FP8_FLOOR, FP32_RECIPROCAL_448

TILE_ROWS, CHUNK, PASS = 64, 128, 512  # rows of A; columns of a chunk; columns of x quantised in one go
ROWS, FLOOR, RECIPROCAL = gl.constexpr(TILE_ROWS), gl.constexpr(FP8_FLOOR), gl.constexpr(FP32_RECIPROCAL_448)
UNDO = gl.constexpr(2.0**64)
# Dimensions as the loads leave them -> as wgmma wants them. Rows of A: (hi, m2, m1, m0), K of A: (half, lane,
# w1, p, j0, j1), where j counts what `_CODES` writes and p its halves; the sums' rows back; K of x: (block of
# 64, lane, w1, j1, p, j0).
A_ORDER = gl.constexpr((0, 2, 3, 1, 4, 6, 9, 8, 5, 7))
ROW_ORDER = gl.constexpr((0, 3, 1, 2, 4))
X_ORDER = gl.constexpr((0, 1, 3, 4, 6, 2, 5))
READY, QUANTISE, ROTATE = (gl.constexpr(i) for i in range(3))  # how x comes
FOUR = gl.constexpr((gl.bfloat16,) * 4)
# Eight e4m3 codes of two words, times the bf16x2 factor $6: bytes (0, 2) and (1, 3) of either word.
_CODES = gl.constexpr("""{
.reg .b32 t, u;
shl.b32 t, $4, 4; and.b32 t, t, 0x07F007F0; shl.b32 u, $4, 8; lop3.b32 t, u, 0x80008000, t, 0xEA;
mul.rn.bf16x2 $0, t, $6;
shr.u32 t, $4, 4; and.b32 t, t, 0x07F007F0; lop3.b32 t, $4, 0x80008000, t, 0xEA;
mul.rn.bf16x2 $1, t, $6;
shl.b32 t, $5, 4; and.b32 t, t, 0x07F007F0; shl.b32 u, $5, 8; lop3.b32 t, u, 0x80008000, t, 0xEA;
mul.rn.bf16x2 $2, t, $6;
shr.u32 t, $5, 4; and.b32 t, t, 0x07F007F0; lop3.b32 t, $5, 0x80008000, t, 0xEA;
mul.rn.bf16x2 $3, t, $6;
}""")


def permuted() -> list[int]:
    """Column of x that stands at each place of a block of 64 (the kernel's order of K)."""
    bits = ((p, j0, j1, w1, t) for w1 in (0, 1) for j1 in (0, 1) for j0 in (0, 1)
            for t in range(4) for p in (0, 1))  # fmt: skip
    return [16 * t + 8 * w1 + 4 * j1 + 2 * p + j0 for p, j0, j1, w1, t in bits]


@gluon.constexpr_function
def words_layout(parts):
    """[R, Q, 32 words]: lane (g, t) owns words 4t .. 4t + 3 and 16 + 4t .. of rows that differ in bit 3."""
    low = parts.bit_length() - 1

    def row(bit):
        return [0, 1 << bit, 0] if bit < low else [1 << (bit - low), 0, 0]

    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 16], row(3)],
        [[0, 0, 4], [0, 0, 8], row(2), row(0), row(1)],
        [row(4), row(5)],
        [],
        [TILE_ROWS // parts, parts, 32],
    )


@gluon.constexpr_function
def blocks_of(parts):
    """Blocks of 32 weight rows in a tile."""
    return 2 if parts == 1 else 1


@gluon.jit
def _fragment(words, factor_s, Q: gl.constexpr, MMA: gl.constexpr):
    """int32 [R, Q, 32], factors in shared memory [blocks, Q, 4] -> bf16 [64, 128], A in its order of K."""
    B: gl.constexpr = blocks_of(Q)
    w = gl.reshape(words, [B, ROWS // (B * Q), Q, 4, 8])
    factor = factor_s.load(gl.SliceLayout(1, gl.SliceLayout(4, w.type.layout)))
    factor, _ = gl.broadcast(gl.expand_dims(gl.expand_dims(factor, 1), 4), w)
    v0, v1, v2, v3 = gl.inline_asm_elementwise(
        _CODES, "=&r,=&r,=&r,=&r,r,r,r,r", [w, factor], dtype=FOUR, is_pure=True, pack=2)  # fmt: skip
    v = gl.join(gl.join(v0, v1), gl.join(v2, v3))
    v = gl.permute(gl.reshape(v, [8, 2, 2, 2, 2, 4, 2, 2, 2, 2]), A_ORDER.value)
    return gl.convert_layout(gl.reshape(v, [ROWS, 128]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _pow2(biased):
    """int32 exponent + 127 in 1..255 -> fp32, 255 -> NaN."""
    return ((biased << 23) | ((biased == 255).to(gl.int32) << 22)).to(gl.float32, bitcast=True)


@gluon.jit
def _quantised(even, odd):
    """records.round_trip "fp8_32" of pairs [rows, pairs] in fp32."""
    ROWS_X: gl.constexpr = even.shape[0]
    PAIRS: gl.constexpr = even.shape[1]
    even = gl.reshape(even, [ROWS_X, PAIRS // 16, 16])
    odd = gl.reshape(odd, [ROWS_X, PAIRS // 16, 16])
    largest = gl.maximum(gl.abs(even).to(gl.int32, bitcast=True), gl.abs(odd).to(gl.int32, bitcast=True))
    largest = gl.max(largest, 2)  # as integers: NaN ranks above infinity and so rules its block
    floor = gl.full([ROWS_X, PAIRS // 16], FLOOR, gl.float32, largest.type.layout)
    largest = gl.maximum(largest, floor.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    bits = (largest * RECIPROCAL).to(gl.int32, bitcast=True)
    biased = gl.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(gl.int32), 255)
    scale = gl.expand_dims(_pow2(biased), 2)
    inverse = gl.expand_dims(_pow2((254 - biased) & 255), 2)
    even = (even * inverse).to(gl.float8e4nv).to(gl.float32) * scale
    odd = (odd * inverse).to(gl.float8e4nv).to(gl.float32) * scale
    return gl.reshape(even, [ROWS_X, PAIRS]), gl.reshape(odd, [ROWS_X, PAIRS])


@gluon.jit
def _turned(even, odd, cos_sin, live, pair, D: gl.constexpr, ROPE: gl.constexpr):
    """Pairs turned back by their row's angles; cos_sin: pointers to the row's first cosine, [8, 1]."""
    place = pair % (D // 2) - (D - ROPE) // 2
    mask = live & (place >= 0)
    cos = gl.load(cos_sin + place, mask=mask, other=1.0)
    sin = gl.load(cos_sin + (place + ROPE // 2), mask=mask, other=0.0)
    turned = even * cos + odd * sin
    odd = gl.where(place >= 0, odd * cos - even * sin, odd)
    return gl.where(place >= 0, turned, even), odd


@gluon.jit
def _load_x(x, x_row, num_rows, column, pair, K: gl.constexpr, Q: gl.constexpr, LIVE: gl.constexpr,
            L: gl.constexpr):  # fmt: skip
    """Pairs of bf16 as int32 [LIVE, PASS / 2], row q * NT + t; pair counts from the start of a part of K."""
    NT: gl.constexpr = 8 // Q
    n = gl.arange(0, LIVE, layout=gl.SliceLayout(1, L))
    t = n % NT
    live = gl.expand_dims(t < num_rows, 1) & gl.expand_dims(pair < K // Q // 2, 0)
    base = t.to(gl.int64) * x_row + (column // 2 + n // NT * (K // Q // 2))
    at = gl.expand_dims(base, 1) + gl.expand_dims(pair, 0)
    return gl.load(x.to(gl.pointer_type(gl.int32)) + at, mask=live, other=0)


@gluon.jit
def _fill_x(x, x_row, cos_sin, num_rows, column, first, x_s, K: gl.constexpr, Q: gl.constexpr,
            LIVE: gl.constexpr, PASSES: gl.constexpr, KIND: gl.constexpr, D: gl.constexpr,
            ROPE: gl.constexpr):  # fmt: skip
    """Chunks `first` .. of the rows of x, quantised or turned back, into x_s in the kernel's order of K.

    Only LIVE columns of wgmma are made; the others repeat them, and their sums are not stored.
    """
    NT: gl.constexpr = 8 // Q
    L: gl.constexpr = (
        gl.BlockedLayout([1, 4], [4, 8], [2, 2], [1, 0])
        if LIVE == 8
        else gl.BlockedLayout([1, 2], [1, 32], [1, 4], [1, 0])
    )
    inner = gl.arange(0, 256, layout=gl.SliceLayout(0, L))
    ahead = _load_x(x, x_row, num_rows, column, first * 64 + inner, K, Q, LIVE, L)
    for i in range(PASSES):
        pair = first * 64 + i * 256 + inner
        words = ahead
        ahead = _load_x(x, x_row, num_rows, column, pair + 256, K, Q, LIVE, L)
        even = (words << 16).to(gl.float32, bitcast=True)
        odd = (words & -65536).to(gl.float32, bitcast=True)
        if KIND == QUANTISE:
            even, odd = _quantised(even, odd)
        else:
            n = gl.arange(0, LIVE, layout=gl.SliceLayout(1, L))
            live = gl.expand_dims(n % NT < num_rows, 1) & gl.expand_dims(pair < K // Q // 2, 0)
            angles = gl.expand_dims(cos_sin + (n % NT).to(gl.int64) * ROPE, 1)
            channel = gl.expand_dims(n // NT * (K // Q // 2), 1) + gl.expand_dims(pair, 0)
            even, odd = _turned(even, odd, angles, live, channel, D, ROPE)
        even = gl.convert_layout(even, L, assert_trivial=True)
        odd = gl.convert_layout(odd, L, assert_trivial=True)
        v = gl.join(even.to(gl.bfloat16), odd.to(gl.bfloat16))
        v = gl.permute(gl.reshape(v, [LIVE, 8, 4, 2, 2, 2, 2]), X_ORDER.value)
        v = gl.reshape(v, [1, LIVE, 512])
        if LIVE < 8:
            every = gl.full([8 // LIVE, LIVE, 512], 0.0, gl.bfloat16, v.type.layout)
            v, _ = gl.broadcast(v, every)
        x_s.index(i).store(gl.reshape(v, [8, 512]))


@gluon.jit
def _load_scales(scale, first_row, last_row, first, K: gl.constexpr, Q: gl.constexpr, CHUNKS: gl.constexpr):
    """Scale bytes of a tile as int32, flat [CHUNKS, blocks, Q, 4]; 0 beyond the weight."""
    B: gl.constexpr = blocks_of(Q)
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    e = gl.arange(0, CHUNKS * B * Q * 4, layout=L)
    group = (first + e // (B * Q * 4)) * 4 + e % 4
    row = first_row // 32 + e // (Q * 4) % B
    at = row.to(gl.int64) * (K // 32) + (e // 4 % Q * (K // Q // 32) + group)
    live = (group < K // Q // 32) & (row * 32 < last_row)
    return gl.load(scale + at, mask=live, other=0).to(gl.int32)


@gluon.jit
def _copy_weight(weight, full, w_s, stage, row, chunk, pred, BYTES: gl.constexpr):
    """Start a chunk of the weight on its way into a stage, whose barrier waits for BYTES in all."""
    mbarrier.expect(full.index(stage), BYTES, pred=pred)
    tma.async_copy_global_to_shared(
        weight, [row, 0, chunk * 32], full.index(stage), w_s.index(stage), pred=pred
    )


@gluon.jit
def _copy_x(x, full, x_s, stage, row, column, pred):
    tma.async_copy_global_to_shared(x, [row, column], full.index(stage), x_s.index(stage), pred=pred)


@gluon.jit
def _sums(acc, Q: gl.constexpr):
    """The A operand's sums fp32 [64, columns] -> [R, NT]: rows in their order, equal parts of K added."""
    COLUMNS: gl.constexpr = acc.shape[1]
    acc = gl.permute(gl.reshape(acc * UNDO, [8, 2, 2, 2, COLUMNS]), ROW_ORDER.value)
    if Q == 1:
        return gl.reshape(acc, [ROWS, COLUMNS])
    else:
        a = gl.reshape(acc, [ROWS // Q, Q, Q, COLUMNS // Q])
        L3: gl.constexpr = gl.SliceLayout(3, a.type.layout)
        of_weight = gl.arange(0, Q, layout=gl.SliceLayout(1, gl.SliceLayout(0, L3)))
        of_x = gl.arange(0, Q, layout=gl.SliceLayout(0, gl.SliceLayout(0, L3)))
        same = gl.expand_dims(gl.expand_dims(of_weight, 1) == gl.expand_dims(of_x, 0), 0)
        same, _ = gl.broadcast(gl.expand_dims(same, 3), a)
        return gl.sum(gl.sum(gl.where(same, a, 0.0), 2), 1)


@gluon.jit(do_not_specialize=["num_rows"])
def skinny_kernel(
    weight, ready, x, scale, cos_sin, out, part, num_rows, x_row,
    N: gl.constexpr, K: gl.constexpr, GROUPS: gl.constexpr, Q: gl.constexpr, NT: gl.constexpr,
    LIVE: gl.constexpr, SPLITS: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    D: gl.constexpr, ROPE: gl.constexpr, PADDED: gl.constexpr,
):  # fmt: skip
    """weight: boxes [64 / Q, Q, 32] of words [GROUPS * N, Q, K / Q / 4]; scale [GROUPS * N / 32, K / 32].

    x bf16 [T, GROUPS * K], x_row words apart, or `ready`: boxes [NT, 128] of bf16 [T, GROUPS * PADDED].
    out bf16 [T, GROUPS * N], or part fp32 [SPLITS, T, GROUPS * N] if K is split; a split has CHUNKS chunks.
    Beyond a group's K the weight's boxes are zero, and so is x: K need not be a multiple of 128.
    """
    R: gl.constexpr = ROWS // Q
    COLUMNS: gl.constexpr = Q * NT
    TILES: gl.constexpr = (N + R - 1) // R
    B: gl.constexpr = blocks_of(Q)
    TABLE: gl.constexpr = gl.constexpr(1 << (CHUNKS - 1).bit_length())
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BYTES: gl.constexpr = 8192 + (NT * 256 if KIND == READY else 0)
    group = gl.program_id(0) // TILES
    tile_row = gl.program_id(0) % TILES * R
    row = group * N + tile_row
    first = gl.program_id(1) * CHUNKS
    first_row = gl.program_id(2) * NT
    w_s = gl.allocate_shared_memory(gl.int32, [STAGES, R, Q, 32], weight.layout)
    f_s = gl.allocate_shared_memory(gl.int32, [TABLE, B, Q, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if KIND == READY:
        x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, NT, 128], SWIZZLED)
    else:
        PASSES: gl.constexpr = (CHUNKS + 3) // 4
        x_s = gl.allocate_shared_memory(gl.bfloat16, [PASSES * 4, 8, 128], SWIZZLED)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    for i in gl.static_range(STAGES):
        _copy_weight(weight, full, w_s, i, row, first + i, i < CHUNKS, BYTES)
    scales = _load_scales(scale, row, GROUPS * N, first, K, Q, TABLE)
    gdc_wait()
    gdc_launch_dependents()
    if KIND == READY:
        column = group * PADDED + first * 128
        for i in gl.static_range(STAGES):
            _copy_x(ready, full, x_s, i, first_row, column + i * 128, i < CHUNKS)
    else:
        wide = x_s._reinterpret(gl.bfloat16, [PASSES, 8, 512], SWIZZLED)
        _fill_x(x, x_row, cos_sin, num_rows, group * K, first, wide, K, Q, LIVE, PASSES, KIND, D, ROPE)
        fence_async_shared()
    # Not before x: the scales come from far away.
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    factors = (
        gl.where(scales > 198, 0x7FC0, (scales + 56) << 7) * 0x10001
    )  # 2^(scale - 127 + 120 - 64), twice
    f_s._reinterpret(gl.int32, [TABLE * B * Q * 4], FLAT).store(factors)
    gl.thread_barrier()

    LW: gl.constexpr = words_layout(Q)
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
    stage = 0
    phase = 0
    for i in range(CHUNKS):
        mbarrier.wait(full.index(stage), phase)
        words = w_s.index(stage).load(LW)
        ahead = i + STAGES
        if KIND == READY:
            a = _fragment(words, f_s.index(i), Q, MMA)
            acc = warpgroup_mma(a, x_s.index(stage).permute((1, 0)), acc)
            gl.thread_barrier()
            _copy_weight(weight, full, w_s, stage, row, first + ahead, ahead < CHUNKS, BYTES)
            _copy_x(ready, full, x_s, stage, first_row, column + ahead * 128, ahead < CHUNKS)
        else:
            gl.thread_barrier()  # every warp has its words: the stage is free
            _copy_weight(weight, full, w_s, stage, row, first + ahead, ahead < CHUNKS, BYTES)
            a = _fragment(words, f_s.index(i), Q, MMA)
            acc = warpgroup_mma(a, x_s.index(i).permute((1, 0)), acc)
        last = stage == STAGES - 1
        phase = gl.where(last, phase ^ 1, phase)
        stage = gl.where(last, 0, stage + 1)

    LO: gl.constexpr = gl.BlockedLayout([1 if R < 64 else 4, 1], [16, 2], [1, 4], [0, 1])
    sums = gl.convert_layout(_sums(acc, Q), LO)
    n = gl.arange(0, R, layout=gl.SliceLayout(1, LO)) + tile_row
    t = gl.arange(0, NT, layout=gl.SliceLayout(0, LO)) + first_row
    at = gl.expand_dims(t.to(gl.int64) * (GROUPS * N), 0) + gl.expand_dims(group * N + n, 1)
    live = gl.expand_dims(t < num_rows, 0) & gl.expand_dims(n < N, 1)
    if SPLITS == 1:
        gl.store(out + at, sums.to(gl.bfloat16), mask=live)
    else:
        split = gl.program_id(1).to(gl.int64) * num_rows * (GROUPS * N)
        gl.store(part + split + at, sums, mask=live)
