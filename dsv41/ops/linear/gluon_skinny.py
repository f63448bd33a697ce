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

Programmatic launch: weights and scales are read before the wait for the kernel before. No kernel that may
still run may write them: the one before can itself have been started early (`STACKED`). Every CTA waits, so
that this kernel ends after all before it, and whatever waits for this one may read their results.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
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
    """int32 [R, Q, 32], factors in shared memory [blocks, Q, 4] -> bf16 [64, 128], A in its order of K; or a
    half of all that."""
    B: gl.constexpr = blocks_of(Q)
    HALVES: gl.constexpr = words.shape[2] // 16
    w = gl.reshape(words, [B, ROWS // (B * Q), Q, 2 * HALVES, 8])
    factor = factor_s.load(gl.SliceLayout(1, gl.SliceLayout(4, w.type.layout)))
    factor, _ = gl.broadcast(gl.expand_dims(gl.expand_dims(factor, 1), 4), w)
    v0, v1, v2, v3 = gl.inline_asm_elementwise(
        _CODES, "=&r,=&r,=&r,=&r,r,r,r,r", [w, factor], dtype=FOUR, is_pure=True, pack=2)  # fmt: skip
    v = gl.join(gl.join(v0, v1), gl.join(v2, v3))
    v = gl.permute(gl.reshape(v, [8, 2, 2, 2, HALVES, 4, 2, 2, 2, 2]), A_ORDER.value)
    v = gl.reshape(v, [ROWS, 64 * HALVES])
    return gl.convert_layout(v, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _halves(words):
    """Words of a chunk [R, Q, 32] -> those of its halves."""
    R: gl.constexpr = words.shape[0]
    Q: gl.constexpr = words.shape[1]
    return gl.split(gl.permute(gl.reshape(words, [R, Q, 2, 16]), (0, 1, 3, 2)))


@gluon.jit
def _add_halves(words, f_s, x_low, x_high, acc, Q: gl.constexpr, MMA: gl.constexpr, OVERLAP: gl.constexpr):
    """acc + a chunk's products, a half at a time, so that one half is decoded while the other is multiplied.

    x_low, x_high: [columns, 64]. OVERLAP 1: nothing is under way at the end. 2: the second half is.
    """
    low, high = _halves(words)
    a = _fragment(low, f_s.slice(0, 2, dim=2), Q, MMA)
    acc = warpgroup_mma(a, x_low.permute((1, 0)), acc, is_async=True)
    if OVERLAP == 2:
        acc = warpgroup_mma_wait(1, deps=(acc,))  # the half before this one: its registers are free
    b = _fragment(high, f_s.slice(2, 2, dim=2), Q, MMA)
    acc = warpgroup_mma(b, x_high.permute((1, 0)), acc, is_async=True)
    return warpgroup_mma_wait(OVERLAP - 1, deps=(acc,))


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
        even, odd = _made(words, cos_sin, num_rows, pair, K, Q, KIND, D, ROPE, L)
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
def _made(words, cos_sin, num_rows, pair, K: gl.constexpr, Q: gl.constexpr, KIND: gl.constexpr,
          D: gl.constexpr, ROPE: gl.constexpr, L: gl.constexpr):  # fmt: skip
    """Words of x -> its pairs in fp32, quantised or turned back; pair counts within a part of K."""
    NT: gl.constexpr = 8 // Q
    even = (words << 16).to(gl.float32, bitcast=True)
    odd = (words & -65536).to(gl.float32, bitcast=True)
    if KIND == QUANTISE:
        even, odd = _quantised(even, odd)
    else:
        n = gl.arange(0, words.shape[0], layout=gl.SliceLayout(1, L))
        live = gl.expand_dims(n % NT < num_rows, 1) & gl.expand_dims(pair < K // Q // 2, 0)
        angles = gl.expand_dims(cos_sin + (n % NT).to(gl.int64) * ROPE, 1)
        channel = gl.expand_dims(n // NT * (K // Q // 2), 1) + gl.expand_dims(pair, 0)
        even, odd = _turned(even, odd, angles, live, channel, D, ROPE)
    return even, odd


@gluon.constexpr_function
def _pieces(chunks):
    """A number of chunks as powers of two of at most 8, the largest first."""
    return [8] * (chunks // 8) + [1 << bit for bit in (2, 1, 0) if chunks >> bit & 1]


@gluon.constexpr_function
def pieces(chunks):
    return len(_pieces(chunks))


@gluon.constexpr_function
def piece_size(chunks, piece):
    return _pieces(chunks)[piece]


@gluon.constexpr_function
def piece_start(chunks, piece):
    """The piece's first chunk."""
    return sum(_pieces(chunks)[:piece])


@gluon.constexpr_function
def piece_layout(live, size):
    """Of a piece's words [live, 64 * size]: a thread has as much as it can of one block of 32 channels."""
    if live == 8:
        return gl.BlockedLayout([1, 4], [4, 8], [2, 2], [1, 0])
    return gl.BlockedLayout([1, min(4, max(1, size // 2))], [1, 32], [1, 4], [1, 0])


@gluon.jit
def _load_piece(x, x_row, num_rows, column, first, K: gl.constexpr, Q: gl.constexpr, LIVE: gl.constexpr,
                CHUNKS: gl.constexpr, PIECE: gl.constexpr):  # fmt: skip
    SIZE: gl.constexpr = piece_size(CHUNKS, PIECE)
    L: gl.constexpr = piece_layout(LIVE, SIZE)
    inner = gl.arange(0, 64 * SIZE, layout=gl.SliceLayout(0, L))
    pair = (first + piece_start(CHUNKS, PIECE)) * 64 + inner
    return _load_x(x, x_row, num_rows, column, pair, K, Q, LIVE, L)


@gluon.jit
def _store_piece(words, cos_sin, num_rows, first, x_s, K: gl.constexpr, Q: gl.constexpr, LIVE: gl.constexpr,
                 CHUNKS: gl.constexpr, PIECE: gl.constexpr, KIND: gl.constexpr, D: gl.constexpr,
                 ROPE: gl.constexpr):  # fmt: skip
    SIZE: gl.constexpr = piece_size(CHUNKS, PIECE)
    START: gl.constexpr = piece_start(CHUNKS, PIECE)
    L: gl.constexpr = piece_layout(LIVE, SIZE)
    inner = gl.arange(0, 64 * SIZE, layout=gl.SliceLayout(0, L))
    pair = (first + START) * 64 + inner
    even, odd = _made(words, cos_sin, num_rows, pair, K, Q, KIND, D, ROPE, L)
    even = gl.convert_layout(even, L, assert_trivial=True)
    odd = gl.convert_layout(odd, L, assert_trivial=True)
    v = gl.join(even.to(gl.bfloat16), odd.to(gl.bfloat16))
    v = gl.permute(gl.reshape(v, [LIVE, 2 * SIZE, 4, 2, 2, 2, 2]), X_ORDER.value)
    if LIVE == 1:
        # The first row of a half chunk is 128 bytes which the swizzle leaves in place.
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        rows = x_s.index(2 * START)._reinterpret(gl.bfloat16, [2 * SIZE, 512], PLAIN).slice(0, 64, dim=1)
        rows.store(gl.reshape(v, [2 * SIZE, 64]))
    else:
        rows = x_s.index(2 * START)._reinterpret(gl.bfloat16, [8, 128 * SIZE], x_s.layout)
        rows.store(gl.reshape(v, [8, 128 * SIZE]))


@gluon.jit
def _fill_exact(x, x_row, cos_sin, num_rows, column, first, x_s, K: gl.constexpr, Q: gl.constexpr,
                LIVE: gl.constexpr, CHUNKS: gl.constexpr, KIND: gl.constexpr, D: gl.constexpr,
                ROPE: gl.constexpr):  # fmt: skip
    """As `_fill_x`, of no more columns than there are, all of them on their way before the first is used.

    x_s: the halves of the chunks [2 * CHUNKS, 8, 64]. LIVE 8: all columns of wgmma. LIVE 1: the first one
    alone; what the others hold is never looked at. In few pieces, as there is a barrier between two of them.
    """
    words = ()
    for i in gl.static_range(pieces(CHUNKS)):
        words = words + (_load_piece(x, x_row, num_rows, column, first, K, Q, LIVE, CHUNKS, i),)  # noqa: RUF005
    for i in gl.static_range(pieces(CHUNKS)):
        _store_piece(words[i], cos_sin, num_rows, first, x_s, K, Q, LIVE, CHUNKS, i, KIND, D, ROPE)


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
def _store_factors(scales, f_s):
    """Scale bytes -> 2^(scale - 127 + 120 - 64), twice in a word."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    factors = gl.where(scales > 198, 0x7FC0, (scales + 56) << 7) * 0x10001
    f_s._reinterpret(gl.int32, [scales.shape[0]], FLAT).store(factors)


@gluon.jit
def _refill(source, full, w_s, ahead, stage, CHUNKS: gl.constexpr, REFILL: gl.constexpr):
    """Chunk `ahead` of the weight, if there is one, into a stage whose words this warp has: once all have."""
    weight, row, first = source
    if REFILL == 2:
        gl.thread_barrier()
        _copy_weight(weight, full, w_s, stage, row, first + ahead, ahead < CHUNKS, 8192)
    elif REFILL == 1:  # noqa: SIM102 (known when compiled, and the next is not)
        if ahead < CHUNKS:
            gl.thread_barrier()
            _copy_weight(weight, full, w_s, stage, row, first + ahead, True, 8192)


@gluon.jit
def _add_chunk(words, f_s, x_s, acc, i, Q: gl.constexpr, MMA: gl.constexpr, OVERLAP: gl.constexpr):
    """acc + the products of chunk i with the x that this CTA has made."""
    if OVERLAP > 0:
        low, high = x_s.index(2 * i), x_s.index(2 * i + 1)
        acc = _add_halves(words, f_s.index(i), low, high, acc, Q, MMA, OVERLAP)
    else:
        x_chunks = x_s._reinterpret(gl.bfloat16, [x_s.shape[0] // 2, 8, 128], x_s.layout)
        a = _fragment(words, f_s.index(i), Q, MMA)
        acc = warpgroup_mma(a, x_chunks.index(i).permute((1, 0)), acc)
    return acc


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
    D: gl.constexpr, ROPE: gl.constexpr, PADDED: gl.constexpr, STACKED: gl.constexpr, EXACT: gl.constexpr,
    OVERLAP: gl.constexpr, REFILL: gl.constexpr,
):  # fmt: skip
    """weight: boxes [64 / Q, Q, 32] of words [GROUPS * N, Q, K / Q / 4]; scale [GROUPS * N / 32, K / 32].

    x bf16 [T, GROUPS * K], x_row words apart, or `ready`: boxes [NT, 128] of bf16 [T, GROUPS * PADDED].
    out bf16 [T, GROUPS * N], or part fp32 [SPLITS, T, GROUPS * N] if K is split; a split has CHUNKS chunks.
    Beyond a group's K the weight's boxes are zero, and so is x: K need not be a multiple of 128.

    STACKED: the next kernel may start once this one's first copies have been asked for, before its wait.
    EXACT: `_fill_exact`. OVERLAP: 0: none, else see `_add_halves`. REFILL: stages are 0: used once, 1: filled
    again behind a branch, 2: under a predicate.
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
        X_CHUNKS: gl.constexpr = CHUNKS if EXACT else PASSES * 4
        x_s = gl.allocate_shared_memory(gl.bfloat16, [X_CHUNKS * 2, 8, 64], SWIZZLED)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    scales = _load_scales(scale, row, GROUPS * N, first, K, Q, TABLE)  # they come from far away
    for i in gl.static_range(STAGES):
        _copy_weight(weight, full, w_s, i, row, first + i, i < CHUNKS, BYTES)
    if STACKED:
        gdc_launch_dependents()
    gdc_wait()
    if not STACKED:
        gdc_launch_dependents()
    if KIND == READY:
        column = group * PADDED + first * 128
        for i in gl.static_range(STAGES):
            _copy_x(ready, full, x_s, i, first_row, column + i * 128, i < CHUNKS)
    elif EXACT:
        _fill_exact(x, x_row, cos_sin, num_rows, group * K, first, x_s, K, Q, LIVE, X_CHUNKS, KIND, D, ROPE)
        fence_async_shared()
    else:
        wide = x_s._reinterpret(gl.bfloat16, [PASSES, 8, 512], SWIZZLED)
        _fill_x(x, x_row, cos_sin, num_rows, group * K, first, wide, K, Q, LIVE, PASSES, KIND, D, ROPE)
        fence_async_shared()
    _store_factors(scales, f_s)
    gl.thread_barrier()

    acc = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
    stage = 0
    phase = 0
    for i in range(CHUNKS):
        mbarrier.wait(full.index(stage), phase)
        words = w_s.index(stage).load(words_layout(Q))
        ahead = i + STAGES
        if KIND == READY:
            a = _fragment(words, f_s.index(i), Q, MMA)
            acc = warpgroup_mma(a, x_s.index(stage).permute((1, 0)), acc)
            gl.thread_barrier()
            _copy_weight(weight, full, w_s, stage, row, first + ahead, ahead < CHUNKS, BYTES)
            _copy_x(ready, full, x_s, stage, first_row, column + ahead * 128, ahead < CHUNKS)
        else:
            _refill((weight, row, first), full, w_s, ahead, stage, CHUNKS, REFILL)
            acc = _add_chunk(words, f_s, x_s, acc, i, Q, MMA, OVERLAP)
        last = stage == STAGES - 1
        phase = gl.where(last, phase ^ 1, phase)
        stage = gl.where(last, 0, stage + 1)
    if OVERLAP == 2 and KIND != READY:
        acc = warpgroup_mma_wait(0, deps=(acc,))

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
