"""Coefficients of the residual copies in Triton: one launch with few rows, two with more.

`_project` multiplies with `fn` by tensor cores, `_finish` adds the partial sums of a row and evaluates the
gates and the Sinkhorn sweeps; `_both` does the two in one launch. The trick: the streams are bf16, and a
float32 weight is exactly the sum of three bf16 values (8 + 8 + 8 bits), so that three bf16 products give the
float32 product. The small parts go first; 128 terms are summed in the tensor core, which truncates,
everything above in float32.

A row's bits. Sums have one tree for every row count: chunks of 128 channels in the tensor core, pairs of
chunks, 5 pairs a group, the groups of a copy in their order, then the copies in halves. With few rows a
program makes one chunk and the finishing adds a group's pairs; with many a program adds the pairs of its
group itself, in the same order. Tiles have 64 rows in both, so the instructions are the same; the finishing
adds whole vectors, never along one, so that its warps and rows a program may be any.

Sinkhorn. Every entry stays r_i K_ij c_j, K the softmax plus eps, and a sweep renews factors alone. To divide
a line by its sum plus eps is r_i <- r_i / (r_i sum_j K_ij c_j + eps), whose inverse is
q_i <- sum_j K_ij c_j + eps q_i: a multiply-add for each entry, one reciprocal a line, and nothing behind it
but the next sweep. Ratios inside r and inside c are at most those inside K, 1 / eps, and r K c at most 1, so
nothing leaves float32.

Tickets. In `_both` every program counts itself in when its sums are stored; the last one sets the count back
to zero and finishes all rows. Who is last moves no bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.ops.hyper.triton_words import exponential, reciprocal

TILE, CHUNK = 64, 128  # rows of a program of `_project`, channels of one chain of products
GROUP_CHUNKS = 10  # 1280 channels
FEW_ROWS = 256  # up to here a program makes one chunk, beyond a group
LAST_FINISHES_ROWS = 4  # up to here one launch, which is slower than two at 8 rows; 0 switches it off
MIXES_EARLY = True  # programmatic launch, which fetches weights meanwhile


# -- sums ---------------------------------------------------------------------------------------------------


@triton.jit
def _high(x):
    """The upper 16 bits of a float32, which are a bf16 value: the rest is exact and 8 bits shorter."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _load_weight(fn_row, first, value_mask, D: tl.constexpr, CHUNK: tl.constexpr):
    channel = (first + tl.arange(0, CHUNK))[None, :]
    return tl.load(fn_row + channel, mask=value_mask[:, None] & (channel < D), other=0.0)


@triton.jit
def _chunk(x_row, weight, first, row_mask, D: tl.constexpr, CHUNK: tl.constexpr):
    """fn @ x and <x, x> over `CHUNK` channels: [TILE, VALUES] and [TILE]."""
    channel = (first + tl.arange(0, CHUNK))[None, :]
    x = tl.load(x_row + channel, mask=row_mask[:, None] & (channel < D), other=0.0)
    high = _high(weight)
    middle = _high(weight - high)
    low = (weight - high) - middle
    sums = tl.dot(x, low.to(tl.bfloat16).T)
    sums = tl.dot(x, middle.to(tl.bfloat16).T, sums)
    sums = tl.dot(x, high.to(tl.bfloat16).T, sums)
    wide = x.to(tl.float32)
    return sums, tl.sum(wide * wide, axis=1)


@triton.jit
def _project_tile(
    streams,
    streams_stride,
    fn,
    partials,
    num_rows,
    COPIES: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    part = tl.program_id(1)
    copy = part // PARTS
    first = (part % PARTS) * (CHUNKS * CHUNK)
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.arange(0, VALUES)
    x_row = streams + row[:, None] * streams_stride + copy * D
    fn_row = fn + value[:, None].to(tl.int64) * (COPIES * D) + copy * D
    if CHUNKS == 1:
        weight = _load_weight(fn_row, first, value < MIXES, D, CHUNK)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if CHUNKS == 1:
        total, total_squares = _chunk(x_row, weight, first, row < num_rows, D, CHUNK)
    else:
        total = tl.zeros((TILE, VALUES), tl.float32)
        total_squares = tl.zeros((TILE,), tl.float32)
        other, other_squares = total, total_squares
        for chunk in range(CHUNKS):
            channel = first + chunk * CHUNK
            weight = _load_weight(fn_row, channel, value < MIXES, D, CHUNK)
            sums, squares = _chunk(x_row, weight, channel, row < num_rows, D, CHUNK)
            if chunk % 2 == 0:
                other, other_squares = sums, squares
            else:
                total += other + sums
                total_squares += other_squares + squares
    target = partials + (part.to(tl.int64) * num_rows + row) * VALUES
    tl.store(
        target[:, None] + value[None, :], total, mask=(row < num_rows)[:, None] & (value < MIXES)[None, :]
    )
    tl.store(target + MIXES, total_squares, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _project(
    streams,
    streams_stride,
    fn,
    partials,
    num_rows,
    COPIES: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    VALUES: tl.constexpr,  # a power of two: the mixes, the sum of squares, padding
    PARTS: tl.constexpr,  # programs of a copy
    CHUNKS: tl.constexpr,  # of a program: 1, or an even number
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`CHUNKS` chunks of fn @ x and of <x, x> for a tile of rows -> partials[part, row]."""
    _project_tile(
        streams, streams_stride, fn, partials, num_rows,
        COPIES, D, MIXES, VALUES, PARTS, CHUNKS, TILE, CHUNK, EARLY,
    )  # fmt: skip


@triton.jit
def _add_halves(x, ROWS: tl.constexpr, COUNT: tl.constexpr, VALUES: tl.constexpr):
    """[ROWS, COUNT, VALUES] -> [ROWS, VALUES]: the upper half added to the lower, until one is left."""
    for halved in tl.static_range(3):  # COUNT is at most 8
        if (COUNT >> halved) > 1:
            halves = tl.reshape(x, (ROWS, 2, COUNT >> (halved + 1), VALUES))
            lower, upper = tl.split(tl.permute(halves, (0, 2, 3, 1)))
            x = lower + upper
    return tl.reshape(x, (ROWS, VALUES))


@triton.jit
def _add_partials(
    partials,
    row,
    num_rows,
    COPIES: tl.constexpr,
    VALUES: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    COPY_WIDTH: tl.constexpr,
):
    """The sums of some rows: [ROWS, VALUES]. All loads come first, from L2, where other programs stored."""
    copy = tl.arange(0, COPY_WIDTH)[None, :, None]
    at = partials + row[:, None, None] * VALUES + tl.arange(0, VALUES)[None, None, :]
    step = num_rows.to(tl.int64) * VALUES  # from part to part
    mask = (row < num_rows)[:, None, None] & (copy < COPIES)
    parts = ()
    for index in tl.static_range(GROUPS * CHUNKS):
        part = copy * (GROUPS * CHUNKS) + index
        parts += (tl.load(at + part * step, mask=mask, other=0.0, cache_modifier=".cg"),)
    total = tl.zeros((ROWS, COPY_WIDTH, VALUES), tl.float32)
    for group in tl.static_range(GROUPS):
        if CHUNKS == 1:
            total += parts[group]
        else:
            sums = tl.zeros((ROWS, COPY_WIDTH, VALUES), tl.float32)
            for pair in tl.static_range(CHUNKS // 2):
                sums += parts[group * CHUNKS + 2 * pair] + parts[group * CHUNKS + 2 * pair + 1]
            total += sums
    return _add_halves(total, ROWS, COPY_WIDTH, VALUES)


# -- Sinkhorn -----------------------------------------------------------------------------------------------


@triton.jit
def _softmax(logits, COPIES: tl.constexpr, eps):
    """The softmax of every row plus eps. A tuple in row order."""
    comb = ()
    for line in tl.static_range(COPIES):
        largest = logits[line * COPIES]
        for index in tl.static_range(1, COPIES):
            largest = tl.maximum(largest, logits[line * COPIES + index])
        entries = ()
        for index in tl.static_range(COPIES):
            entries += (exponential(logits[line * COPIES + index] - largest),)
        total = entries[0]
        for index in tl.static_range(1, COPIES):
            total += entries[index]
        share = reciprocal(total)
        for index in tl.static_range(COPIES):
            comb += (entries[index] * share + eps,)
    return comb


@triton.jit
def _inverses(comb, factors, before, COPIES: tl.constexpr, ROWS: tl.constexpr, eps):
    """The inverse factors of the rows, or of the columns, from the factors of the others and from the
    inverses before. `comb` is a tuple in row order."""
    OUTER: tl.constexpr = COPIES if ROWS else 1  # from line to line
    INNER: tl.constexpr = 1 if ROWS else COPIES  # along a line
    sums = ()
    for line in tl.static_range(COPIES):
        total = before[line] * eps
        for index in tl.static_range(COPIES):
            total = tl.fma(comb[line * OUTER + index * INNER], factors[index], total)
        sums += (total,)
    return sums


@triton.jit
def _reciprocals(values, COUNT: tl.constexpr):
    found = ()
    for index in tl.static_range(COUNT):
        found += (reciprocal(values[index]),)
    return found


@triton.jit
def _sinkhorn(logits, sweeps, COPIES: tl.constexpr, eps):
    """Row softmax, then `sweeps` column normalisations with a row normalisation between each two."""
    comb = _softmax(logits, COPIES, eps)
    ones = ()
    for _line in tl.static_range(COPIES):
        ones += (comb[0] * 0.0 + 1.0,)
    rows, inverse_rows = ones, ones
    inverse_columns = _inverses(comb, rows, ones, COPIES, False, eps)
    columns = _reciprocals(inverse_columns, COPIES)
    for _ in range(sweeps - 1):
        inverse_rows = _inverses(comb, columns, inverse_rows, COPIES, True, eps)
        rows = _reciprocals(inverse_rows, COPIES)
        inverse_columns = _inverses(comb, rows, inverse_columns, COPIES, False, eps)
        columns = _reciprocals(inverse_columns, COPIES)
    normed = ()
    for index in tl.static_range(COPIES * COPIES):
        normed += (comb[index] * rows[index // COPIES] * columns[index % COPIES],)
    return normed


# -- the end of a row ---------------------------------------------------------------------------------------


@triton.jit
def _load_affine(base, scale, COPIES: tl.constexpr, MIXES: tl.constexpr, VALUES: tl.constexpr):
    """Of every value its factor and its bias: [1, VALUES] each."""
    value = tl.arange(0, VALUES)[None, :]
    factor = tl.load(scale + tl.where(value < COPIES, 0, tl.where(value < 2 * COPIES, 1, 2)))
    return factor, tl.load(base + value, mask=value < MIXES, other=0.0)


@triton.jit
def _finish_rows(
    sums,
    factor,
    bias,
    row,
    pre,
    post,
    comb,
    num_rows,
    sweeps,
    eps,
    norm_eps,
    COPIES: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums of rows [ROWS, VALUES] -> their coefficients. A lane sweeps whole matrices."""
    value = tl.arange(0, VALUES)[None, :]
    live = (row < num_rows)[:, None]
    squares = tl.sum(tl.where(value == MIXES, sums, 0.0), axis=1)[:, None]  # of one term
    logits = factor * (sums * tl.rsqrt(squares / (COPIES * D) + norm_eps)) + bias

    gate = 1.0 / (1.0 + exponential(-logits))
    at = row[:, None] * COPIES + value
    tl.store(pre + at, gate + eps, mask=live & (value < COPIES))
    tl.store(post + at - COPIES, 2.0 * gate, mask=live & (value >= COPIES) & (value < 2 * COPIES))

    entries = ()
    for index in tl.static_range(COPIES * COPIES):
        entries += (tl.gather(logits, tl.full((ROWS, 1), 2 * COPIES + index, tl.int32), axis=1),)
    entries = _sinkhorn(entries, sweeps, COPIES, eps)
    matrix = tl.zeros((ROWS, VALUES), tl.float32)
    for index in tl.static_range(COPIES * COPIES):
        matrix = tl.where(value == 2 * COPIES + index, entries[index], matrix)
    at = row[:, None] * (COPIES * COPIES) + value - 2 * COPIES
    tl.store(comb + at, matrix, mask=live & (value >= 2 * COPIES) & (value < MIXES))


@triton.jit(do_not_specialize=["num_rows", "sweeps"])
def _finish(
    partials,
    base,
    scale,
    pre,
    post,
    comb,
    num_rows,
    sweeps,
    eps,
    norm_eps,
    COPIES: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    VALUES: tl.constexpr,
    GROUPS: tl.constexpr,  # of a copy
    CHUNKS: tl.constexpr,  # partial sums of a group: 1, or an even number
    ROWS: tl.constexpr,
    COPY_WIDTH: tl.constexpr,  # a power of two
    EARLY: tl.constexpr,
):
    """partials of rows -> their coefficients."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    factor, bias = _load_affine(base, scale, COPIES, MIXES, VALUES)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = _add_partials(partials, row, num_rows, COPIES, VALUES, GROUPS, CHUNKS, ROWS, COPY_WIDTH)
    _finish_rows(
        sums, factor, bias, row, pre, post, comb, num_rows, sweeps, eps, norm_eps,
        COPIES, D, MIXES, VALUES, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "sweeps"])
def _both(
    streams,
    streams_stride,
    fn,
    partials,
    base,
    scale,
    pre,
    post,
    comb,
    tickets,
    num_rows,
    sweeps,
    eps,
    norm_eps,
    COPIES: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    VALUES: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,  # of a group; a program makes one of them
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, all of them
    COPY_WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`_project` and `_finish` of at most a tile of rows: the program that arrives last finishes them."""
    factor, bias = _load_affine(base, scale, COPIES, MIXES, VALUES)
    _project_tile(
        streams, streams_stride, fn, partials, num_rows,
        COPIES, D, MIXES, VALUES, GROUPS * CHUNKS, 1, TILE, CHUNK, EARLY,
    )  # fmt: skip
    tl.debug_barrier()  # the whole program has stored
    if tl.atomic_add(tickets, 1, sem="acq_rel", scope="gpu") == COPIES * GROUPS * CHUNKS - 1:
        tl.store(tickets, 0)
        row = tl.arange(0, ROWS).to(tl.int64)
        sums = _add_partials(partials, row, num_rows, COPIES, VALUES, GROUPS, CHUNKS, ROWS, COPY_WIDTH)
        _finish_rows(
            sums, factor, bias, row, pre, post, comb, num_rows, sweeps, eps, norm_eps,
            COPIES, D, MIXES, VALUES, ROWS,
        )  # fmt: skip


# -- launches -----------------------------------------------------------------------------------------------


def coefficients(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    tickets: Tensor,
    sweeps: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, copies, dim = streams.shape
    mixes = (2 + copies) * copies
    pre = streams.new_empty((num_rows, copies), dtype=torch.float32)
    post = torch.empty_like(pre)
    comb = streams.new_empty((num_rows, copies, copies), dtype=torch.float32)
    if num_rows == 0:
        return pre, post, comb
    groups = triton.cdiv(dim, GROUP_CHUNKS * CHUNK)  # of a copy
    made, added = (1, GROUP_CHUNKS) if num_rows <= FEW_ROWS else (GROUP_CHUNKS, 1)
    parts = groups * added
    values = max(16, triton.next_power_of_2(mixes + 1))
    partials = streams.new_empty((copies * parts, num_rows, values), dtype=torch.float32)
    early = MIXES_EARLY and streams.is_cuda
    sizes = {"COPIES": copies, "D": dim, "MIXES": mixes, "VALUES": values, "EARLY": early}
    tile = {"TILE": TILE, "CHUNK": CHUNK}
    sums = {"GROUPS": groups, "CHUNKS": added, "COPY_WIDTH": triton.next_power_of_2(copies)}
    # No fused multiply-add: the forms of the sums must not differ by what the compiler fuses.
    options = {"enable_fp_fusion": False, "launch_pdl": early}
    given, found = (base, scale, pre, post, comb), (num_rows, sweeps, eps, norm_eps)
    rows = (streams, streams.stride(0), fn, partials)
    if made == 1 and num_rows <= min(LAST_FINISHES_ROWS, TILE) and len(tickets):
        _both[(1, copies * parts)](
            *rows, *given, tickets, *found, **sizes, **tile, **sums, **options,
            ROWS=triton.next_power_of_2(num_rows), num_warps=4, num_stages=2,
        )  # fmt: skip
        return pre, post, comb
    _project[(triton.cdiv(num_rows, TILE), copies * parts)](
        *rows, num_rows, **sizes, **tile, **options, PARTS=parts, CHUNKS=made, num_warps=4, num_stages=2
    )
    _finish[(num_rows,)](partials, *given, *found, **sizes, **sums, **options, ROWS=1, num_warps=1)
    return pre, post, comb
