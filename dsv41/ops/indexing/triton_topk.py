"""Exact top-k of score rows on the device: ascending indices, equal scores keep the smaller index.

A score becomes an ordered uint32 key; what may not be chosen (NaN, beyond the row's length, -inf where
`DROP`) is 0, the smallest key. `search` finds the k-th largest key by counting; `emit` keeps what lies
above it and the first of what equals it by one packed prefix sum, so nothing is ever sorted.

The one trick: over 2 k groups of scores, the k-th largest group maximum is a lower bound of the k-th score,
and about 1.4 k scores reach it (they are kept in order). So a long row costs two cheap reads and two small
searches, no histogram. The bound may be loose: its search stops at 17/16 k groups. Rows that defeat it
(mostly equal scores) take `scan_row`, which is exact for anything and only slower.

    row_kernel      grid [rows]      one CTA a row of any length; short rows without the bound
    maxima_kernel   grid [C, rows]   group maxima of a row that several CTAs share; also resets its ticket
    long_kernel     grid [C, rows]   every CTA derives the bound and keeps its chunk's survivors; the last to
                                     arrive (by ticket) chooses among them
    blocks_kernel   grid [B, rows]   block maxima, the newest block pinned at +inf
    lengths_kernel  grid [rows]      how many of a row's candidate states it can see

Rows are `num_states [T]` long, 0 for a padding row (`row_request` -1), and start at 16 bytes; the last quad
may be read past the length, never past the row. Everything is deterministic: survivors keep their order,
and the ticket only says who finishes. No host reads; the workspace needs no clearing. `while` stands where
`for` would do: the interpreter takes no loaded value as a range.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(score, DROP: tl.constexpr):
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    key = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
    refused = score != score
    if DROP:
        refused = refused | (score == float("-inf"))
    return tl.where(refused, tl.zeros_like(key), key)


@triton.jit
def count_from(keys, m1, m2, m3):
    """How many keys reach each pivot. Counts below 1024 (the pivots lie above the smallest key) share a word,
    and so a reduction."""
    if keys.shape[0] <= 1024:
        packed = tl.where(keys >= m1, 1, 0) + tl.where(keys >= m2, 1 << 10, 0)
        a = tl.sum(packed + tl.where(keys >= m3, 1 << 20, 0), 0)
        return a & 1023, (a >> 10) & 1023, a >> 20
    else:
        a = tl.sum(tl.where(keys >= m1, 1, 0) + tl.where(keys >= m2, 1 << 16, 0), 0)
        return a & 0xFFFF, (a >> 16) & 0xFFFF, tl.sum(tl.where(keys >= m3, 1, 0), 0)


@triton.jit
def search(keys, k, slack):
    """uint32 keys [N <= 32768] -> (lo, hi, taken): choose the `taken` keys >= hi, then the first k - taken of
    [lo, hi), all equal to lo. At most k eligible keys: all of them, with an empty [lo, hi).

    slack > 0: lo alone is meant, as a bound that k to k + slack keys reach. Quarters: six turns for a
    thousand random keys, since an exact count ends the search; sixteen at worst. Interpolated pivots save
    no turn.
    """
    eligible = keys > 0
    present = tl.sum(tl.where(eligible, 1, 0), 0)
    lo = tl.min(tl.where(eligible, keys, 0xFFFFFFFF), 0)
    hi = tl.max(keys, 0) + 1
    few = present <= k
    lo = tl.where(few, 1, lo).to(tl.uint32)
    hi = tl.where(few, 1, hi).to(tl.uint32)
    reach_lo = present
    taken = tl.where(few, present, 0)
    while (hi - lo > 1) & (reach_lo - k > slack):
        quarter = ((hi - lo) >> 2) + (((hi - lo) & 3) != 0).to(tl.uint32)
        m1 = lo + quarter
        m2 = tl.minimum(m1 + quarter, hi)
        m3 = tl.minimum(m2 + quarter, hi)
        c1, c2, c3 = count_from(keys, m1, m2, m3)
        hi = tl.where(c3 >= k, hi, tl.where(c2 >= k, m3, tl.where(c1 >= k, m2, m1)))
        lo = tl.where(c3 >= k, m3, tl.where(c2 >= k, m2, tl.where(c1 >= k, m1, lo)))
        taken = tl.where(c3 >= k, taken, tl.where(c2 >= k, c3, tl.where(c1 >= k, c2, c1)))
        reach_lo = tl.where(c3 >= k, c3, tl.where(c2 >= k, c2, tl.where(c1 >= k, c1, reach_lo)))
        hi = tl.where(reach_lo == k, lo, hi)
        taken = tl.where(reach_lo == k, k, taken)
    return lo, hi, taken


@triton.jit
def put(selection, slots, place, index, keep, candidates, table, BLOCK: tl.constexpr, S: tl.constexpr):
    """Write chosen columns as states and as cache slots. BLOCK > 0: columns count candidate blocks' states;
    S > 0: slots are wanted."""
    state = index
    if BLOCK > 0:
        state = tl.load(candidates + index // BLOCK, mask=keep, other=0) * BLOCK + index % BLOCK
    tl.store(selection + place, state, mask=keep)
    if S > 0:
        page = tl.load(table + state // S, mask=keep, other=0)
        tl.store(slots + place, page * S + state % S, mask=keep)


@triton.jit
def finish(selection, slots, kept, K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr):
    rest = tl.arange(0, KP)
    tl.store(selection + rest, tl.full([KP], -1, tl.int32), mask=(rest >= kept) & (rest < K))
    if S > 0:
        tl.store(slots + rest, tl.full([KP], -1, tl.int32), mask=(rest >= kept) & (rest < K))


@triton.jit
def emit(
    keys, index, selection, slots, candidates, table,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """keys [N] in index order -> the K best indices, ascending, then -1."""
    lo, hi, taken = search(keys, K, 0)
    above = keys >= hi
    equal = (keys >= lo) & (~above)
    packed = tl.where(above, 1, 0) + tl.where(equal, 65536, 0)
    before = tl.cumsum(packed, 0) - packed
    equal_before = (before >> 16) & 0xFFFF
    quota = K - taken
    keep = above | (equal & (equal_before < quota))
    place = (before & 0xFFFF) + tl.minimum(equal_before, quota)
    put(selection, slots, place, index, keep, candidates, table, BLOCK, S)
    finish(selection, slots, tl.sum(tl.where(keep, 1, 0), 0), K, KP, S)


@triton.jit
def whole_row(
    x, n, selection, slots, candidates, table,
    N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    DROP: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """A row of at most N scores, searched as it is. -> 1 if it holds NaN"""
    i = tl.arange(0, N)
    f = tl.load(x + i, mask=i < (n + 3) // 4 * 4, other=float("-inf"))  # whole quads load as one
    key = tl.where(i < n, ordered(f, DROP), 0)
    emit(key, i, selection, slots, candidates, table, K, KP, BLOCK, S)
    return tl.max(((f != f) & (i < n)).to(tl.int32), 0)


@triton.jit
def scan_row(
    x, n, selection, slots, candidates, table,
    K: tl.constexpr, KP: tl.constexpr, W: tl.constexpr,
    DROP: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Any row, one CTA: bisection by counts over memory, then one ordered pass."""
    i = tl.arange(0, W)
    lo = tl.full([], 1, tl.uint32)
    hi = tl.full([], 0xFFFFFFFF, tl.uint32)
    taken = 0
    while hi - lo > 1:
        middle = lo + ((hi - lo) >> 1)
        counts = tl.zeros([W], tl.int32)
        start = 0
        while start < n:
            key = ordered(tl.load(x + start + i, mask=start + i < n, other=float("nan")), DROP)
            counts += (key >= middle).to(tl.int32)
            start += W
        count = tl.sum(counts, 0)
        lo = tl.where(count >= K, middle, lo)
        hi = tl.where(count > K, hi, middle)
        taken = tl.where(count > K, taken, count)
    quota = K - taken
    above_done = 0
    equal_done = 0
    start = 0
    while start < n:
        key = ordered(tl.load(x + start + i, mask=start + i < n, other=float("nan")), DROP)
        above = key >= hi
        equal = (key >= lo) & (~above)
        packed = tl.where(above, 1, 0) + tl.where(equal, 65536, 0)
        before = tl.cumsum(packed, 0) - packed
        equal_before = equal_done + ((before >> 16) & 0xFFFF)
        keep = above | (equal & (equal_before < quota))
        place = above_done + (before & 0xFFFF) + tl.minimum(equal_before, quota)
        put(selection, slots, place, start + i, keep, candidates, table, BLOCK, S)
        total = tl.sum(packed, 0)
        above_done += total & 0xFFFF
        equal_done += (total >> 16) & 0xFFFF
        start += W
    finish(selection, slots, above_done + tl.minimum(equal_done, quota), K, KP, S)


@triton.jit
def row_length(lengths, row_request, row, FROM: tl.constexpr, REQUESTS: tl.constexpr):
    """Columns of a row and its request; FROM > 1: columns are blocks of that many states."""
    n = tl.load(lengths + row).to(tl.int32)
    request = tl.zeros([], tl.int64)
    if REQUESTS:
        request = tl.load(row_request + row).to(tl.int64)
        n = tl.where(request < 0, 0, n)
        request = tl.maximum(request, 0)
    return (n + FROM - 1) // FROM, request


@triton.jit
def collect(x, begin, end, bound, survivors, room, W: tl.constexpr, G: tl.constexpr, DROP: tl.constexpr):
    """Columns of [begin, end) whose keys reach `bound`, in order; the first `room` are stored. -> how many,
    and 1 if a NaN was met. G neighbours are one word of hits: one prefix sum serves W * G scores."""
    i = tl.arange(0, W)
    member = tl.arange(0, G)[None, :]
    readable = (end + 3) // 4 * 4
    have = 0
    sick = tl.zeros([W], tl.int32)
    start = begin
    while start < end:
        column = start + i[:, None] * G + member
        f = tl.load(x + column, mask=column < readable, other=float("-inf"))
        sick = sick | tl.max(((column < end) & (f != f)).to(tl.int32), axis=1)
        hit = ((column < end) & (ordered(f, DROP) >= bound)).to(tl.int32)
        bits = tl.sum(hit << member, axis=1)
        count = tl.sum(hit, axis=1)
        turns = tl.max(count, 0)
        if turns > 0:
            upto = tl.cumsum(count, 0)
            place = have + upto - count
            have += tl.max(upto, 0)
            while turns > 0:
                turns -= 1
                low = bits & (-bits)
                # the place of the lowest bit, from the exponent of its float
                at = (low.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
                tl.store(survivors + place, start + i * G + at, mask=(bits != 0) & (place < room))
                place += (bits != 0).to(tl.int32)
                bits = bits & (bits - 1)
        start += W * G
    return have, tl.max(sick, 0)


@triton.jit
def stream_row(
    x, n, selection, slots, candidates, table, survivors,
    K: tl.constexpr, KP: tl.constexpr, W: tl.constexpr, CAP: tl.constexpr,
    DROP: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """A row of more than W scores, W >= 2 K: maxima of every W-th score, the bound, survivors, the choice."""
    readable = (n + 3) // 4 * 4
    tile = tl.arange(0, 4)[:, None] * W + tl.arange(0, W)[None, :]
    best = tl.zeros([4, W], tl.uint32)
    start = 0
    while start < n:
        f = tl.load(x + start + tile, mask=start + tile < readable, other=float("nan"))
        best = tl.maximum(best, tl.where(start + tile < n, ordered(f, DROP), 0))
        start += 4 * W
    bound, _hi, _taken = search(tl.max(best, axis=0), K, K // 16)
    total, sick = collect(x, 0, n, bound, survivors, CAP, 256, 16, DROP)
    tl.debug_barrier()
    if total <= 2 * KP:
        choose(x, survivors, total, selection, slots, candidates, table, 2 * KP, K, KP, DROP, BLOCK, S)
    elif total <= CAP:
        choose(x, survivors, total, selection, slots, candidates, table, CAP, K, KP, DROP, BLOCK, S)
    else:
        scan_row(x, n, selection, slots, candidates, table, K, KP, 4 * W, DROP, BLOCK, S)
    return sick


@triton.jit
def row_kernel(
    scores, lengths, row_request, selection, slots, faulty, candidates, table, survivors,
    stride, candidate_stride, table_stride,
    K: tl.constexpr, KP: tl.constexpr, W: tl.constexpr, CAP: tl.constexpr, DIRECT: tl.constexpr,
    LONG: tl.constexpr, FROM: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr,
    REQUESTS: tl.constexpr, FAULTS: tl.constexpr,
):  # fmt: skip
    """LONG: a row may have more than DIRECT scores."""
    row = tl.program_id(0).to(tl.int64)
    n, request = row_length(lengths, row_request, row, FROM, REQUESTS)
    x = scores + row * stride
    selection += row * K
    slots += row * K
    candidates += row * candidate_stride
    table += request * table_stride
    if n <= KP:
        sick = whole_row(x, n, selection, slots, candidates, table, KP, K, KP, DROP, BLOCK, S)
    elif not LONG:  # noqa: SIM114 - a constant: the rest is not compiled
        sick = whole_row(x, n, selection, slots, candidates, table, DIRECT, K, KP, DROP, BLOCK, S)
    elif n <= DIRECT:
        sick = whole_row(x, n, selection, slots, candidates, table, DIRECT, K, KP, DROP, BLOCK, S)
    else:
        sick = stream_row(
            x, n, selection, slots, candidates, table, survivors + row * CAP, K, KP, W, CAP, DROP, BLOCK, S
        )  # fmt: skip
    if FAULTS:
        tl.store(faulty + row, sick.to(tl.int1))


@triton.jit
def choose(
    x, survivors, total, selection, slots, candidates, table,
    N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    DROP: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    j = tl.arange(0, N)
    index = tl.load(survivors + j, mask=j < total, other=0)
    f = tl.load(x + index, mask=j < total, other=float("nan"))
    emit(ordered(f, DROP), index, selection, slots, candidates, table, K, KP, BLOCK, S)


@triton.jit
def maxima_kernel(
    scores, lengths, row_request, maxima, ticket, stride,
    C: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
    FROM: tl.constexpr, DROP: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """GROUPS // C groups a CTA: those of its run of the row, strided by the number of groups."""
    P: tl.constexpr = GROUPS // C
    c = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    n, _ = row_length(lengths, row_request, row, FROM, REQUESTS)
    if c == 0:
        tl.store(ticket + row, 0)
    size = (n + GROUPS - 1) // GROUPS
    begin = c * P * size
    end = tl.minimum(n, begin + P * size)
    x = scores + row * stride
    tile = tl.arange(0, TILE)[:, None] * P + tl.arange(0, P)[None, :]
    best = tl.zeros([TILE, P], tl.uint32)
    readable = (end + 3) // 4 * 4
    start = begin
    while start < end:
        f = tl.load(x + start + tile, mask=start + tile < readable, other=float("nan"))
        best = tl.maximum(best, tl.where(start + tile < end, ordered(f, DROP), 0))
        start += TILE * P
    top = tl.max(best, axis=0).to(tl.int32, bitcast=True)
    tl.store(maxima + row * GROUPS + c * P + tl.arange(0, P), top)


@triton.jit
def long_kernel(
    scores, lengths, row_request, selection, slots, faulty, candidates, table,
    maxima, survivors, counts, ticket, stride, candidate_stride, table_stride, chunk_cap,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr, W: tl.constexpr,
    G: tl.constexpr, CAP: tl.constexpr, FROM: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr,
    S: tl.constexpr, REQUESTS: tl.constexpr, FAULTS: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    n, request = row_length(lengths, row_request, row, FROM, REQUESTS)
    x = scores + row * stride
    selection += row * K
    slots += row * K
    candidates += row * candidate_stride
    table += request * table_stride
    if n <= KP:
        if c == 0:
            fault = whole_row(x, n, selection, slots, candidates, table, KP, K, KP, DROP, BLOCK, S)
            if FAULTS:
                tl.store(faulty + row, fault.to(tl.int1))
    else:
        survivors += row * C * chunk_cap
        counts += row * 3 * C  # per chunk: survivors, survivors before it, NaN seen
        best = tl.load(maxima + row * GROUPS + tl.arange(0, GROUPS)).to(tl.uint32, bitcast=True)
        bound, _hi, _taken = search(best, K, K // 16)
        chunk = ((n + C - 1) // C + 3) // 4 * 4
        begin = c * chunk
        end = tl.minimum(n, begin + chunk)
        have, sick = collect(x, begin, end, bound, survivors + c * chunk_cap, chunk_cap, W, G, DROP)
        tl.store(counts + c, have)
        tl.store(counts + 2 * C + c, sick)
        tl.debug_barrier()
        if tl.atomic_add(ticket + row, 1) == C - 1:
            cc = tl.arange(0, C)
            each = tl.load(counts + cc)
            tl.store(counts + C + cc, tl.cumsum(each, 0) - each)
            total = tl.sum(each, 0)
            if FAULTS:
                tl.store(faulty + row, tl.max(tl.load(counts + 2 * C + cc), 0).to(tl.int1))
            tl.debug_barrier()
            fits = (total <= CAP) & (tl.max(each, 0) <= chunk_cap)
            if fits & (total <= 2 * KP):
                gather(
                    x, survivors, counts + C, chunk_cap, total, selection, slots, candidates, table,
                    2 * KP, C, K, KP, DROP, BLOCK, S,
                )  # fmt: skip
            elif fits:
                gather(
                    x, survivors, counts + C, chunk_cap, total, selection, slots, candidates, table,
                    CAP, C, K, KP, DROP, BLOCK, S,
                )  # fmt: skip
            else:
                scan_row(x, n, selection, slots, candidates, table, K, KP, 4096, DROP, BLOCK, S)


@triton.jit
def gather(
    x, survivors, before, chunk_cap, total, selection, slots, candidates, table,
    N: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    DROP: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The chunks' survivors in row order: each finds its chunk by bisection over `before`."""
    j = tl.arange(0, N)
    chunk = tl.zeros([N], tl.int32)
    step = C // 2
    while step > 0:
        chunk = tl.where(tl.load(before + chunk + step) <= j, chunk + step, chunk)
        step = step // 2
    at = chunk * chunk_cap + j - tl.load(before + chunk)
    index = tl.load(survivors + at, mask=j < total, other=0)
    f = tl.load(x + index, mask=j < total, other=float("nan"))
    emit(ordered(f, DROP), index, selection, slots, candidates, table, K, KP, BLOCK, S)


@triton.jit
def blocks_kernel(
    scores, lengths, row_request, best, stride, best_stride,
    SIZE: tl.constexpr, PAD: tl.constexpr, B: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Maxima of SIZE states (PAD: the next power of two), NaN counted as -inf, the newest block +inf."""
    row = tl.program_id(1).to(tl.int64)
    n, _ = row_length(lengths, row_request, row, 1, REQUESTS)
    block = tl.program_id(0) * B + tl.arange(0, B)
    if tl.program_id(0) * B * SIZE < n:
        member = tl.arange(0, PAD)[None, :]
        column = block[:, None] * SIZE + member
        f = tl.load(scores + row * stride + column, mask=(member < SIZE) & (column < n), other=float("-inf"))
        top = tl.max(tl.where(f != f, float("-inf"), f), axis=1)
        top = tl.where(block == (n - 1) // SIZE, float("inf"), top)
        tl.store(best + row * best_stride + block, top, mask=block * SIZE < n)


@triton.jit
def lengths_kernel(
    candidates, num_states, row_request, lengths, candidate_stride,
    COUNT: tl.constexpr, PAD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A row's candidate blocks ascend and only the newest is seen in part, so the candidate states that the
    row sees are the first `lengths [T]` of the list."""
    row = tl.program_id(0).to(tl.int64)
    n, _ = row_length(num_states, row_request, row, 1, True)
    i = tl.arange(0, PAD)
    block = tl.load(candidates + row * candidate_stride + i, mask=i < COUNT, other=-1)
    seen = tl.minimum(tl.maximum(n - tl.maximum(block, 0) * SIZE, 0), SIZE)
    tl.store(lengths + row, tl.sum(tl.where(block >= 0, seen, 0), 0))
