"""Exact top-k of score rows on the device: ascending indices, equal scores keep the smaller index.

A score becomes an ordered int32 key; what may not be chosen (NaN, beyond the row's length, -inf where `DROP`)
is `NEVER`, the smallest int32. `search` finds the k-th largest key by counting; `emit` keeps what lies above
it and the first of what equals it by one packed prefix sum, so nothing is ever sorted.

The one trick: over more than twice k groups of scores, the k-th largest group maximum is a lower bound of the
k-th score, and about 1.4 k scores reach it (they are kept in order). So a long row costs one cheap read, two
small searches and no histogram. Rows that defeat the bound (mostly equal scores) take `scan_row`, which is
exact for anything and only slower.

    row_kernel      grid [rows]      one CTA a row, read once into registers (to 32,768 scores)
    maxima_kernel   grid [C, rows]   group maxima of a long row; also resets the row's ticket
    long_kernel     grid [C, rows]   every CTA derives the bound and keeps its chunk's survivors; the last to
                                     arrive (by ticket) chooses among them
    blocks_kernel   grid [B, rows]   block maxima, the newest block pinned at +inf
    lengths_kernel  grid [rows]      how many of a row's candidate states it can see

Rows are `num_states [T]` long, 0 for a padding row (`row_request` -1). Everything is deterministic: survivors
keep their order, and the ticket only says who finishes. No host reads; the workspace needs no clearing.
`while` where `for` would do: the interpreter takes no loaded value as a range.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEVER = tl.constexpr(-0x80000000)


@triton.jit
def ordered(score, DROP: tl.constexpr):
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    refused = score != score
    if DROP:
        refused = refused | (score == float("-inf"))
    return tl.where(refused, NEVER, key)


@triton.jit
def count_above(keys, t1, t2, t3):
    """How many keys exceed each pivot. Counts below 1024 (the pivots lie above the smallest key) share one
    word, and so one reduction."""
    if keys.shape[0] <= 1024:
        a = tl.sum(
            tl.where(keys > t1, 1, 0) + tl.where(keys > t2, 1 << 10, 0) + tl.where(keys > t3, 1 << 20, 0), 0
        )
        return a & 1023, (a >> 10) & 1023, a >> 20
    else:
        a = tl.sum(tl.where(keys > t1, 1, 0) + tl.where(keys > t2, 1 << 16, 0), 0)
        return a & 0xFFFF, (a >> 16) & 0xFFFF, tl.sum(tl.where(keys > t3, 1, 0), 0)


@triton.jit
def narrow(lo, hi, above_lo, above_hi, m, c, k):
    """Tighten [lo, hi) by pivot m, which c keys reach; an exact count closes it."""
    low = (c >= k) & (m >= lo)
    high = (c < k) & (m < hi)
    above_lo = tl.where(low, c, above_lo)
    lo = tl.where(low, m, lo)
    above_hi = tl.where(high, c, above_hi)
    hi = tl.where(high, m, hi)
    exact = low & (c == k)
    return lo, tl.where(exact, m, hi), above_lo, tl.where(exact, k, above_hi)


@triton.jit
def search(keys, k):
    """int32 keys [N <= 32768] -> (lo, hi, taken): choose the `taken` keys >= hi, then the first k - taken of
    [lo, hi), all equal to lo. At most k eligible keys: all of them, with an empty [lo, hi).

    Three pivots a turn: the middle (a turn halves the interval at worst) and two beside where the counts
    say the k-th key should be, as far apart as a random sample of that size may err.
    """
    eligible = keys > NEVER
    present = tl.sum(tl.where(eligible, 1, 0), 0)
    lo = tl.min(tl.where(eligible, keys, 0x7FFFFFFF), 0).to(tl.int64)
    hi = tl.max(keys, 0).to(tl.int64) + 1
    few = present <= k
    lo = tl.where(few, NEVER + 1, lo).to(tl.int64)
    hi = tl.where(few, NEVER + 1, hi).to(tl.int64)
    above_lo = present
    above_hi = tl.where(few, present, 0)
    while hi - lo > 1:
        span = (hi - lo).to(tl.float32)
        inside = (above_lo - above_hi).to(tl.float32)
        guess = span * ((above_lo - k).to(tl.float32) + 0.5) / inside
        reach = span / tl.sqrt(inside) * 0.75
        m2 = lo + (hi - lo) // 2
        m1 = tl.minimum(tl.maximum(lo + (guess - reach).to(tl.int64), lo + 1), hi - 1)
        m3 = tl.minimum(tl.maximum(lo + (guess + reach).to(tl.int64), lo + 1), hi - 1)
        c1, c2, c3 = count_above(keys, (m1 - 1).to(tl.int32), (m2 - 1).to(tl.int32), (m3 - 1).to(tl.int32))
        lo, hi, above_lo, above_hi = narrow(lo, hi, above_lo, above_hi, m1, c1, k)
        lo, hi, above_lo, above_hi = narrow(lo, hi, above_lo, above_hi, m2, c2, k)
        lo, hi, above_lo, above_hi = narrow(lo, hi, above_lo, above_hi, m3, c3, k)
    return lo, hi, above_hi


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
    lo, hi, taken = search(keys, K)
    above = keys > (hi - 1).to(tl.int32)
    equal = (keys > (lo - 1).to(tl.int32)) & (~above)
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
    key = tl.where(i < n, ordered(f, DROP), NEVER)
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
    lo = (tl.zeros([], tl.int64) + NEVER) + 1
    hi = tl.zeros([], tl.int64) + 0x7FFFFFFF
    taken = 0
    while hi - lo > 1:
        middle = lo + (hi - lo) // 2
        counts = tl.zeros([W], tl.int32)
        start = 0
        while start < n:
            key = ordered(tl.load(x + start + i, mask=start + i < n, other=float("nan")), DROP)
            counts += (key > (middle - 1).to(tl.int32)).to(tl.int32)
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
        above = key > (hi - 1).to(tl.int32)
        equal = (key > (lo - 1).to(tl.int32)) & (~above)
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
def bounded_row(
    x, n, selection, slots, candidates, table, survivors,
    K: tl.constexpr, KP: tl.constexpr, W: tl.constexpr, G: tl.constexpr, CAP: tl.constexpr,
    DROP: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """A row of more than 4 W and at most G W scores: the bound, the survivors, the choice among them."""
    i = tl.arange(0, W)
    member = tl.arange(0, G)[None, :]
    size = (n + 4 * W - 1) // (4 * W) * 4
    column = i[:, None] * size + member
    readable = (n + 3) // 4 * 4
    f = tl.load(x + column, mask=(member < size) & (column < readable), other=float("-inf"))
    inside = (member < size) & (column < n)
    sick = tl.max(tl.max((inside & (f != f)).to(tl.int32), 1), 0)
    key = tl.where(inside, ordered(f, DROP), NEVER)
    lo, hi, taken = search(tl.max(key, axis=1), K)
    bound = (lo - 1).to(tl.int32)
    hit = (key > bound).to(tl.int32)
    bits = tl.sum(hit << member, axis=1)
    count = tl.sum(hit, axis=1)
    place = tl.cumsum(count, 0) - count
    total = tl.sum(count, 0)
    if total <= CAP:
        turns = tl.max(count, 0)
        while turns > 0:
            turns -= 1
            live = bits != 0
            low = bits & (-bits)
            # the place of the lowest bit, from the exponent of its float
            b = ((low.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)) >> 23) - 127
            tl.store(survivors + place, i * size + b, mask=live)
            place += live.to(tl.int32)
            bits = bits & (bits - 1)
        tl.debug_barrier()
        if total <= 2 * KP:
            choose(x, survivors, total, selection, slots, candidates, table, 2 * KP, K, KP, DROP, BLOCK, S)
        else:
            choose(x, survivors, total, selection, slots, candidates, table, CAP, K, KP, DROP, BLOCK, S)
    else:
        scan_row(x, n, selection, slots, candidates, table, K, KP, 4 * W, DROP, BLOCK, S)
    return sick


@triton.jit
def row_kernel(
    scores, lengths, row_request, selection, slots, faulty, candidates, table, survivors,
    stride, candidate_stride, table_stride,
    K: tl.constexpr, KP: tl.constexpr, W: tl.constexpr, G: tl.constexpr, DIRECT: tl.constexpr,
    CAP: tl.constexpr, FROM: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr,
    REQUESTS: tl.constexpr, FAULTS: tl.constexpr,
):  # fmt: skip
    """Rows to W * G scores. W >= 2 KP groups of neighbours; a group's length follows the row's, so that there
    are always more than K groups. Loads are 16 bytes: the caller pads rows to multiples of four."""
    row = tl.program_id(0).to(tl.int64)
    n, request = row_length(lengths, row_request, row, FROM, REQUESTS)
    x = scores + row * stride
    selection += row * K
    slots += row * K
    candidates += row * candidate_stride
    table += request * table_stride
    if n <= KP:
        sick = whole_row(x, n, selection, slots, candidates, table, KP, K, KP, DROP, BLOCK, S)
    elif G <= 4:
        sick = whole_row(x, n, selection, slots, candidates, table, DIRECT, K, KP, DROP, BLOCK, S)
    elif n <= DIRECT:
        sick = whole_row(x, n, selection, slots, candidates, table, DIRECT, K, KP, DROP, BLOCK, S)
    else:
        sick = bounded_row(
            x, n, selection, slots, candidates, table, survivors + row * CAP,
            K, KP, W, G, CAP, DROP, BLOCK, S,
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
    best = tl.full([TILE, P], NEVER, tl.int32)
    readable = (end + 3) // 4 * 4
    start = begin
    while start < end:
        f = tl.load(x + start + tile, mask=start + tile < readable, other=float("nan"))
        best = tl.maximum(best, tl.where(start + tile < end, ordered(f, DROP), NEVER))
        start += TILE * P
    tl.store(maxima + row * GROUPS + c * P + tl.arange(0, P), tl.max(best, axis=0))


@triton.jit
def long_kernel(
    scores, lengths, row_request, selection, slots, faulty, candidates, table,
    maxima, survivors, counts, ticket, stride, candidate_stride, table_stride, chunk_cap,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
    CAP: tl.constexpr, FROM: tl.constexpr, DROP: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr,
    REQUESTS: tl.constexpr, FAULTS: tl.constexpr,
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
        lo, hi, taken = search(tl.load(maxima + row * GROUPS + tl.arange(0, GROUPS)), K)
        bound = (lo - 1).to(tl.int32)
        chunk = ((n + C - 1) // C + 3) // 4 * 4
        begin = c * chunk
        end = tl.minimum(n, begin + chunk)
        have = 0
        sick = tl.zeros([TILE], tl.int32)
        readable = (end + 3) // 4 * 4
        start = begin
        while start < end:
            j = start + tl.arange(0, TILE)
            f = tl.load(x + j, mask=j < readable, other=float("-inf"))
            sick = sick | ((f != f) & (j < end)).to(tl.int32)
            hit = ((ordered(f, DROP) > bound) & (j < end)).to(tl.int32)
            place = have + tl.cumsum(hit, 0) - hit
            tl.store(survivors + c * chunk_cap + place, j, mask=(hit != 0) & (place < chunk_cap))
            have += tl.sum(hit, 0)
            start += TILE
        tl.store(counts + c, have)
        tl.store(counts + 2 * C + c, tl.max(sick, 0))
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
