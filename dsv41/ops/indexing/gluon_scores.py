"""Index scores of fp4 keys on Hopper: 32 heads, 128 channels, `mxfp4_68` pages, bf16 tensor cores (Gluon).

    decode_kernel   grid [splits, rows]         one row a program; N = 32 heads; two tiles of 64 states a turn
    prefill_kernel  grid [row groups, splits]   8 rows of one request; N = 256

Layout. Keys are the M side. A lane takes 16 contiguous bytes of a state, which is one scale group: one
16-byte load and one scale byte feed rows lane / 4 and + 8 of a wgmma A fragment without a shuffle, because
the order of K is free and q is stored in the order that the codes come out. The trick: e2m1 code bits are
put at the low exponent and high mantissa bits of a bf16 and one bf16x2 multiply by the group's scale makes
the value, subnormal 0.5 included. Everything is 2^-64 too small, which the head weights undo. relu is x +
|x|, which keeps NaN and runs beside the integer work; its factor 2 is in the weights too.

Exact products, fp32 sums: within 2e-6 of a row's norm of float64 (tested). Scale bytes below 62 may flush a
value to zero (keys under 2^-60); those above 192 count as NaN. Folding scales into e4m3 would save 5 to 15
percent at one row and a third in prefill, but it rounds unquantised queries to 4 bits and the arguments do
not tell: not done.

Pages: a tile of 64 states lies in one page (S a multiple of 64), or a lane finds its states one by one
(smaller pages; candidate lists, BLOCK > 0). A group of 8 rows goes to the prefill kernel if its rows share
a request, else to the decode kernel: both are launched, each leaves the other's groups alone, and the sum
over heads has one order in both, so a row's bits do not depend on its group.

A barrier follows every wgmma wait of the prefill kernel: builds without it gave wrong rows (cause not
established); the decode kernel names A in the wait, so that its registers are not reused too early.

Limits (H200): a tile costs a warp 244 instructions, so a million states need 15 us of issue slots; the
prototype's loads alone took 22; 35 are measured, so the two overlap badly with 16 warps an SM. A ring of
pages fed by the copy engine (4 to 8 stages, 6 CTAs an SM) was no faster: 36.1 us.
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

TILE = gl.constexpr(64)
UNDO = gl.constexpr(2.0**63)  # of 2^-64 in the keys and of the 2 in x + |x|
# Eight codes of a word -> four bf16x2 (nibbles n and n + 4), each times the scale pair s; two words a call.
_CODES = "lop3.b32 u, u, 0x80008000, t, 0xEA;\nmul.rn.bf16x2 {out}, u, s;\n"
_WORD = (
    "shl.b32 t, {x}, 6; and.b32 t, t, 0x01C001C0; shl.b32 u, {x}, 12;\n"
    + _CODES.format(out="{a}")
    + "shl.b32 t, {x}, 2; and.b32 t, t, 0x01C001C0; shl.b32 u, {x}, 8;\n"
    + _CODES.format(out="{b}")
    + "shr.b32 t, {x}, 2; and.b32 t, t, 0x01C001C0; shl.b32 u, {x}, 4;\n"
    + _CODES.format(out="{c}")
    + "shr.b32 t, {x}, 6; and.b32 t, t, 0x01C001C0; mov.b32 u, {x};\n"
    + _CODES.format(out="{d}")
)
UNPACK = gl.constexpr(
    "{{\n.reg .b32 t, u, s;\nmov.b32 s, $10;\n{first}{second}}}".format(
        first=_WORD.format(x="$8", a="$0", b="$1", c="$2", d="$3"),
        second=_WORD.format(x="$9", a="$4", b="$5", c="$6", d="$7"),
    )
)
EIGHT = gl.constexpr((gl.bfloat16,) * 8)


@gluon.constexpr_function
def page_layout():
    """[64 states, 4 groups, 4 words]: a lane owns a group (16 bytes) of states lane / 4 and lane / 4 + 8."""
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    registers = [[0, 0, 1], [0, 0, 2], [8, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, 4, 4])


@gluon.constexpr_function
def turned_layout(rows: int):
    """[64 states, rows, 4 partial sums]: the four lanes' partial sums in registers, rows over those lanes."""
    registers = [[0, 0, 1], [0, 0, 2], [8, 0, 0]]
    bit = 4
    while bit < rows:
        registers.append([0, bit, 0])
        bit *= 2
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, rows, 4])


@gluon.constexpr_function
def accumulator(n: int):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.jit
def locate(table, candidates, tile, last, S: gl.constexpr, BLOCK: gl.constexpr):
    """(page, state in page) of a tile, or of each of its 64 states; columns beyond `last` repeat it."""
    if BLOCK > 0 or S % 64 != 0:
        states: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, page_layout()))
        column = gl.minimum(tile * 64 + gl.arange(0, 64, layout=states), last)
        state = column
        if BLOCK > 0:
            state = gl.load(candidates + column // BLOCK) * BLOCK + column % BLOCK
    else:
        state = gl.minimum(tile, last // 64) * 64
    return gl.load(table + state // S).to(gl.int64), state % S


@gluon.jit
def fetch(k32, k8, page, state, PAGE: gl.constexpr, S: gl.constexpr, VECTOR: gl.constexpr):
    """-> codes int32 [64, 4, 4], scale bytes [64, 4]"""
    L3: gl.constexpr = page_layout()
    g = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    i = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, L3)))
    if VECTOR:
        word = gl.expand_dims(page * (PAGE // 4) + state * 16, 1) + gl.expand_dims(g, 0) * 4
        byte = gl.expand_dims(page * PAGE + (64 * S + state * 4), 1) + gl.expand_dims(g, 0)
        word = gl.expand_dims(word, 2) + gl.expand_dims(gl.expand_dims(i, 0), 1)
        return gl.load(k32 + word), gl.load(k8 + byte)
    else:
        r = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, L3)))
        group = gl.expand_dims(r, 1) * 4 + gl.expand_dims(g, 0)
        word = gl.expand_dims(group, 2) * 4 + gl.expand_dims(gl.expand_dims(i, 0), 1)
        codes = gl.load(k32 + page * (PAGE // 4) + state * 16 + word)
        return codes, gl.load(k8 + page * PAGE + (64 * S + state * 4) + group)


@gluon.jit
def dequantise(codes, scale, MMA: gl.constexpr):
    """-> bf16 [64, 128] as an A operand in the codes' order of K, 2^-64 of the value"""
    scale = scale.to(gl.int32)
    bits = gl.where(scale > 192, 0x7FC0, (scale + 62) << 7)
    s = gl.expand_dims(bits.to(gl.int16).to(gl.bfloat16, bitcast=True), 2)
    v0, v1, v2, v3, v4, v5, v6, v7 = gl.inline_asm_elementwise(
        UNPACK, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [codes, s], dtype=EIGHT, is_pure=True, pack=2
    )
    even = gl.join(gl.join(v0, v4), gl.join(v2, v6))
    odd = gl.join(gl.join(v1, v5), gl.join(v3, v7))
    v = gl.reshape(gl.join(even, odd), [64, 4, 2, 2, 2, 2, 2])  # state, group, wp, half, w, n1, n0
    v = gl.reshape(gl.permute(v, [0, 2, 4, 5, 6, 1, 3]), [64, 128])
    return gl.convert_layout(v, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def load_queries(q, first_head, num_heads, N: gl.constexpr):
    """bf16 [N, 128], a row a head, in the codes' order of K: (wp, w, n1, n0, group, half), last fastest, is
    channel 32 group + 16 wp + 8 w + 4 half + 2 n1 + n0."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    h = gl.arange(0, N, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    at = q + first_head.to(gl.int64) * 128 + gl.expand_dims(h, 1) * 128 + gl.expand_dims(d, 0)
    v = gl.load(at, mask=gl.expand_dims(first_head + h < num_heads, 1), other=0.0)
    v = gl.reshape(v, [N, 4, 2, 2, 2, 2, 2])
    return gl.reshape(gl.permute(v, [0, 2, 3, 5, 6, 1, 4]), [N, 128])


@gluon.jit
def group_of(row_request, num_states, group, num_rows):
    """(lowest, highest request, most states) of the live rows of a group of 8; lowest > highest: none."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = group * 8 + gl.arange(0, 8, layout=L)
    request = gl.load(row_request + row, mask=row < num_rows, other=-1)
    n = gl.load(num_states + row, mask=(row < num_rows) & (request >= 0), other=0)
    live = n > 0
    lowest = gl.min(gl.where(live, request, 0x7FFFFFFF), axis=0)
    return lowest, gl.max(gl.where(live, request, -1), axis=0), gl.max(n, axis=0)


@gluon.jit
def store_row(acc, w, scores, tile, n):
    s = gl.sum((acc + gl.abs(acc)) * gl.expand_dims(w, 0), axis=1)
    j = tile * 64 + gl.arange(0, 64, layout=s.type.layout)
    gl.store(scores + j, s, mask=j < n)


@gluon.jit(do_not_specialize=["num_rows", "table_stride", "candidate_stride"])
def decode_kernel(
    k32, k8, table, candidates, row_request, lengths, q, w, scores,
    num_rows, table_stride, candidate_stride, stride,
    PAGE: gl.constexpr, S: gl.constexpr, BLOCK: gl.constexpr, MIXED: gl.constexpr, LOOP: gl.constexpr,
):  # fmt: skip
    """LOOP: every num_programs-th pair of tiles of a row. The next pair's loads leave as soon as the
    registers that they fill are dequantised, and its pages are known a turn before that. Without LOOP a
    program has one tile and the grid covers all. MIXED: leave the rows of the prefill kernel's groups."""
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
        queries = load_queries(q, row * 32, num_rows * 32, 32)  # while the pages are looked up
        wv = gl.load(w + row * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, MMA))).to(gl.float32) * UNDO
        x0, e0 = fetch(k32, k8, page0, state0, PAGE, S, VECTOR)
        if LOOP:
            x1, e1 = fetch(k32, k8, page1, state1, PAGE, S, VECTOR)
            page0, state0 = locate(table, candidates, first + step, last, S, BLOCK)
            page1, state1 = locate(table, candidates, first + step + 1, last, S, BLOCK)
        scores += row.to(gl.int64) * stride
        shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([32, 128], gl.bfloat16)
        qs = gl.allocate_shared_memory(gl.bfloat16, [32, 128], shared, queries)
        fence_async_shared()
        gl.thread_barrier()
        zero = gl.zeros([64, 32], gl.float32, layout=MMA)
        if LOOP:
            for tile in range(first, (n + 63) // 64, step):
                a0 = dequantise(x0, e0, MMA)
                c0 = warpgroup_mma(a0, qs.permute((1, 0)), zero, use_acc=False, is_async=True)
                x0, e0 = fetch(k32, k8, page0, state0, PAGE, S, VECTOR)
                page0, state0 = locate(table, candidates, tile + 2 * step, last, S, BLOCK)
                a1 = dequantise(x1, e1, MMA)
                d0, a0 = warpgroup_mma_wait(0, deps=(c0, a0))
                c1 = warpgroup_mma(a1, qs.permute((1, 0)), zero, use_acc=False, is_async=True)
                x1, e1 = fetch(k32, k8, page1, state1, PAGE, S, VECTOR)
                page1, state1 = locate(table, candidates, tile + 2 * step + 1, last, S, BLOCK)
                store_row(d0, wv, scores, tile, n)
                d1, a1 = warpgroup_mma_wait(0, deps=(c1, a1))
                store_row(d1, wv, scores, tile + 1, n)
        else:
            a0 = dequantise(x0, e0, MMA)
            c0 = warpgroup_mma(a0, qs.permute((1, 0)), zero, use_acc=False, is_async=True)
            d0, a0 = warpgroup_mma_wait(0, deps=(c0, a0))
            store_row(d0, wv, scores, first, n)


@gluon.jit
def sum_heads(acc, w, R: gl.constexpr):
    """[64, 32 R] -> [64, R] in the order of `store_row`: a lane's 8, lanes 0 + 2 and 1 + 3, then those."""
    v = (acc + gl.abs(acc)) * gl.expand_dims(w, 0)
    v = gl.permute(gl.reshape(v, [64, R, 4, 4, 2]), [0, 1, 3, 2, 4])
    v = gl.sum(gl.reshape(v, [64, R, 4, 8]), axis=3)
    v = gl.convert_layout(v, turned_layout(R))
    return gl.sum(gl.sum(gl.reshape(v, [64, R, 2, 2]), axis=2), axis=2)


@gluon.jit(do_not_specialize=["num_rows", "table_stride"])
def prefill_kernel(
    k32, k8, table, row_request, num_states, q, w, scores, num_rows, table_stride, stride,
    PAGE: gl.constexpr, S: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """A tile is dequantised into a two-deep shared buffer while the tensor cores work on the one before; the
    SM's other CTA covers the epilogue. Writes whole tiles: what lies beyond a row's states is not defined."""
    N: gl.constexpr = 32 * R
    MMA: gl.constexpr = accumulator(N)
    VECTOR: gl.constexpr = S % 64 != 0
    group = gl.num_programs(0) - 1 - gl.program_id(0)  # the longest rows first
    lowest, highest, n = group_of(row_request, num_states, group, num_rows)
    tiles = (n + 63) // 64
    share = (tiles + gl.num_programs(1) - 1) // gl.num_programs(1)
    begin = gl.program_id(1) * share
    end = gl.minimum(tiles, begin + share)
    if (lowest == highest) & (begin < end):
        pages = table + lowest.to(gl.int64) * table_stride
        last = end * 64 - 1
        last = gl.minimum(last, n - 1)
        first_row = group * R
        page, state = locate(pages, pages, begin, last, S, 0)
        x, e = fetch(k32, k8, page, state, PAGE, S, VECTOR)
        page, state = locate(pages, pages, begin + 1, last, S, 0)
        x_next, e_next = fetch(k32, k8, page, state, PAGE, S, VECTOR)
        page, state = locate(pages, pages, begin + 2, last, S, 0)
        q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, 128], gl.bfloat16)
        k_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)
        qs = gl.allocate_shared_memory(gl.bfloat16, [N, 128], q_shared)
        qs.store(load_queries(q, first_row * 32, num_rows * 32, N))
        h = first_row * 32 + gl.arange(0, N, layout=gl.BlockedLayout([1], [32], [4], [0]))
        wv = gl.load(w + h, mask=h < num_rows * 32, other=0.0).to(gl.float32) * UNDO
        ws = gl.allocate_shared_memory(gl.float32, [N], gl.SwizzledSharedLayout(1, 1, 1, [0]), wv)
        buffer = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], k_shared)
        buffer.index(0).store(dequantise(x, e, MMA))
        fence_async_shared()
        gl.thread_barrier()
        zero = gl.zeros([64, N], gl.float32, layout=MMA)
        acc = warpgroup_mma(buffer.index(0), qs.permute((1, 0)), zero, use_acc=False, is_async=True)
        turn = 1
        for tile in range(begin, end):
            buffer.index(turn).store(dequantise(x_next, e_next, MMA))
            x_next, e_next = fetch(k32, k8, page, state, PAGE, S, VECTOR)
            page, state = locate(pages, pages, tile + 3, last, S, 0)
            fence_async_shared()
            done = warpgroup_mma_wait(0, deps=(acc,))
            gl.thread_barrier()
            s = sum_heads(done, ws.load(gl.SliceLayout(0, MMA)), R)
            gl.thread_barrier()
            acc = warpgroup_mma(buffer.index(turn), qs.permute((1, 0)), done, use_acc=False, is_async=True)
            SL: gl.constexpr = s.type.layout
            j = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SL))
            r = first_row + gl.arange(0, R, layout=gl.SliceLayout(0, SL))
            at = scores + gl.expand_dims(r, 0).to(gl.int64) * stride + gl.expand_dims(j, 1)
            gl.store(at, s, mask=gl.expand_dims(r < num_rows, 0))
            turn = 1 - turn
        warpgroup_mma_wait(0, deps=(acc,))
