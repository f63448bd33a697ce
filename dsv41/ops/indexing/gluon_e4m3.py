"""Index scores of fp4 keys on Hopper, e4m3 tensor cores: a decode kernel for the longest rows (Gluon).

    grid [splits, rows]: one row a program; two tiles of 64 states a turn

Layout. Pages are read as in gluon_scores.py: a lane has the 16 bytes of one scale group. The trick: the eight
magnitudes of an e2m1 code, divided by the power of two by which the group's scale lies below the state's
largest, are a table of eight bytes, and a byte permute looks up four codes at a time. The codes of a group
are 32 bytes of a shared row in the order of the channels, two 16-byte stores that meet no bank twice. The
state's largest scale multiplies its score; a head's queries are scaled to below 256 and the head's weight
takes that back. Half the tensor time and half the operand bytes of bf16, and fewer integer instructions.

Every group of 32 channels has sums of its own. An e2m1 product is a multiple of 1/4 not above 36, so 32 of
them fit in 13 bits, whatever the group's scale, and the tensor core keeps those: measured error as in bf16.
The sum of the four groups is fp32, in another order than the bf16 kernel's: a row's last bits differ.

Limits: a group 12 octaves below the state's largest loses its smallest code and one 13 below all of them.
Queries must be fp4 values (`index_query` with `quantise`) with group scales of a head within 2^13 of each
other: others are rounded to e4m3. Scale byte 0 counts as zero, 255 as NaN.

One H200: 31.5 us at one row of 1M states, where bf16 needs 35.1; at 128k states 7.6, where it needs 7.4. As a
prefill kernel the design lost (2.06 ms at 4096 x 32k, bf16 1.64); one chain over all groups was the fastest
of all (29.5 us and 1.23 ms), but keeps 2e-5 of a row's norm only.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

from dsv41.ops.indexing.gluon_scores import fetch, group_of, locate

# A word's eight codes -> two words of e4m3 in the order of the channels, through the magnitudes {lo, hi}.
LOOK_UP = gl.constexpr(
    "{.reg .b32 m, a, b, u, s;\n"
    "and.b32 m, $2, 0x77777777; prmt.b32 a, $3, $4, m; shr.b32 m, m, 16; prmt.b32 b, $3, $4, m;\n"
    "shl.b32 u, $2, 4; prmt.b32 s, u, $2, 0x5140; lop3.b32 $0, s, 0x80808080, a, 0xEA;\n"
    "prmt.b32 s, u, $2, 0x7362; lop3.b32 $1, s, 0x80808080, b, 0xEA;}"
)
# Magnitudes 0 .5 1 1.5 and 2 3 4 6 times 2^6 as e4m3 bytes, and what halves them: one less in the exponents.
LOW, HALF_LOW = gl.constexpr(0x6C686000), gl.constexpr(0x08080800)
HIGH, HALF_HIGH = gl.constexpr(0x7C787470), gl.constexpr(0x08080808)
KEYS = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))


@gluon.constexpr_function
def accumulator(n: int):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 32])


@gluon.jit
def put(codes, scale, buffer):
    """Codes [64, 4, 4] and scale bytes [64, 4] -> e4m3 [64, 128] in `buffer`, 2^6 of the values over the
    state's largest scale. -> that scale, fp32 [64]"""
    scale = scale.to(gl.int32)
    top = gl.max(scale, axis=1)
    below = gl.expand_dims(top, 1) - scale
    near = below < 13
    lo = gl.expand_dims(gl.where(near, LOW - below * HALF_LOW, 0), 2)
    hi = gl.expand_dims(gl.where(near, HIGH - below * HALF_HIGH, 0), 2)
    first, second = gl.inline_asm_elementwise(
        LOOK_UP, "=&r,=&r,r,r,r", [codes, lo, hi], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    words = gl.reshape(gl.join(first, second), [64, 32])
    buffer._reinterpret(gl.int32, [64, 32], WORDS).store(words)
    return gl.where(top == 255, 0x7FC00000, top << 23).to(gl.float32, bitcast=True)


@gluon.jit
def load_queries(q, w, first_head, num_heads, N: gl.constexpr):
    """-> (e4m3 [N, 128], weights fp32 [N] for them): a head's values times 2^(7 - exponent of its largest).
    Its weight: w 2^(exponent - 7), 2^-6 for the keys, 1/2 for x + |x|; NaN if the head has inf or NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    h = gl.arange(0, N, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    at = q + first_head.to(gl.int64) * 128 + gl.expand_dims(h, 1) * 128 + gl.expand_dims(d, 0)
    v = gl.load(at, mask=gl.expand_dims(first_head + h < num_heads, 1), other=0.0).to(gl.float32)
    largest = gl.max(gl.abs(v).to(gl.int32, bitcast=True), axis=1)  # NaN is above inf
    exponent = gl.maximum(largest >> 23, 16)  # biased; smaller heads keep fewer bits
    up = gl.maximum(261 - exponent, 1)
    up = (up << 23).to(gl.float32, bitcast=True)
    codes = (v * gl.expand_dims(up, 1)).to(gl.float8e4nv)
    down = gl.where(exponent == 255, 0x7FC00000, (exponent - 14) << 23).to(gl.float32, bitcast=True)
    weight = gl.load(w + first_head + h, mask=first_head + h < num_heads, other=0.0).to(gl.float32)
    return codes, weight * down


@gluon.jit
def group_product(keys, queries, zero, G: gl.constexpr):
    a = keys.slice(32 * G, 32, 1)
    b = queries.slice(32 * G, 32, 1).permute((1, 0))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def start(keys, queries, zero):
    """Sends off the products [64, N] of the first two groups."""
    return group_product(keys, queries, zero, 0), group_product(keys, queries, zero, 1)


@gluon.jit
def finish(c0, c1, keys, queries, zero):
    """-> the products of all groups in fp32. One group's run beside the addition of the one before."""
    s = warpgroup_mma_wait(1, deps=(c0,))
    c2 = group_product(keys, queries, zero, 2)
    s = s + warpgroup_mma_wait(1, deps=(c1,))
    c3 = group_product(keys, queries, zero, 3)
    s = s + warpgroup_mma_wait(1, deps=(c2,))
    return s + warpgroup_mma_wait(0, deps=(c3,))


@gluon.jit
def store_row(dots, w, top, scores, tile, n):
    s = gl.sum((dots + gl.abs(dots)) * gl.expand_dims(w, 0), axis=1)
    s = s * gl.convert_layout(top, s.type.layout, assert_trivial=True)
    j = tile * 64 + gl.arange(0, 64, layout=s.type.layout)
    gl.store(scores + j, s, mask=j < n)


@gluon.jit(do_not_specialize=["num_rows", "table_stride", "candidate_stride"])
def decode_kernel(
    k32, k8, table, candidates, row_request, lengths, q, w, scores,
    num_rows, table_stride, candidate_stride, stride,
    PAGE: gl.constexpr, S: gl.constexpr, BLOCK: gl.constexpr, MIXED: gl.constexpr, LOOP: gl.constexpr,
):  # fmt: skip
    """As gluon_scores.decode_kernel, with the keys of both tiles of a turn in shared memory."""
    MMA: gl.constexpr = accumulator(32)
    VECTOR: gl.constexpr = BLOCK > 0 or S % 64 != 0
    row = gl.program_id(1)
    gdc_wait()
    gdc_launch_dependents()
    request = gl.load(row_request + row)
    n = gl.load(lengths + row)
    n = gl.where(request < 0, 0, n)
    if MIXED:
        lowest, highest, _ = group_of(row_request, lengths, row // 8, num_rows)
        n = gl.where(lowest < highest, n, 0)
    first = (2 if LOOP else 1) * gl.program_id(0)
    if first * 64 < n:
        table += request.to(gl.int64) * table_stride
        candidates += row.to(gl.int64) * candidate_stride
        last = n - 1
        step = 2 * gl.num_programs(0)
        page0, state0 = locate(table, candidates, first, last, S, BLOCK)
        if LOOP:
            page1, state1 = locate(table, candidates, first + 1, last, S, BLOCK)
        queries, weights = load_queries(q, w, row * 32, num_rows * 32, 32)  # while the pages are looked up
        x0, e0 = fetch(k32, k8, page0, state0, PAGE, S, VECTOR)
        if LOOP:
            x1, e1 = fetch(k32, k8, page1, state1, PAGE, S, VECTOR)
            page0, state0 = locate(table, candidates, first + step, last, S, BLOCK)
            page1, state1 = locate(table, candidates, first + step + 1, last, S, BLOCK)
        scores += row.to(gl.int64) * stride
        qs = gl.allocate_shared_memory(gl.float8e4nv, [32, 128], KEYS, queries)
        wv = gl.convert_layout(weights, gl.SliceLayout(0, MMA))
        zero = gl.zeros([64, 32], gl.float32, layout=MMA)
        keys0 = gl.allocate_shared_memory(gl.float8e4nv, [64, 128], KEYS)
        if LOOP:
            keys1 = gl.allocate_shared_memory(gl.float8e4nv, [64, 128], KEYS)
            for tile in range(first, (n + 63) // 64, step):
                gl.thread_barrier()  # the last turn's products are done in every warp
                top0 = put(x0, e0, keys0)
                x0, e0 = fetch(k32, k8, page0, state0, PAGE, S, VECTOR)
                page0, state0 = locate(table, candidates, tile + 2 * step, last, S, BLOCK)
                top1 = put(x1, e1, keys1)
                x1, e1 = fetch(k32, k8, page1, state1, PAGE, S, VECTOR)
                page1, state1 = locate(table, candidates, tile + 2 * step + 1, last, S, BLOCK)
                fence_async_shared()
                gl.thread_barrier()
                c0, c1 = start(keys0, qs, zero)
                dots = finish(c0, c1, keys0, qs, zero)
                c0, c1 = start(keys1, qs, zero)  # beside the sums of the first tile
                store_row(dots, wv, top0, scores, tile, n)
                dots = finish(c0, c1, keys1, qs, zero)
                store_row(dots, wv, top1, scores, tile + 1, n)
        else:
            top0 = put(x0, e0, keys0)
            fence_async_shared()
            gl.thread_barrier()
            c0, c1 = start(keys0, qs, zero)
            store_row(finish(c0, c1, keys0, qs, zero), wv, top0, scores, first, n)
