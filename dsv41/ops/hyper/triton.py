"""Residual copies in Triton: one launch for expand and collapse, two for the update and the coefficients.

Rows. The expansion takes a program for every 1024 channels; in an update it also sums the new copies for the
collapse, and `_norm`, one program a row, is launched early and finishes. A collapse alone is one program of 8
warps that holds a whole row, read before the first sum, so that it waits little more than once for memory.

Coefficients. `_project` multiplies with `fn` by tensor cores, `_finish` adds the partial sums of a row and
evaluates the gates and the Sinkhorn sweeps. The trick: the streams are bf16, and a float32 weight is exactly
the sum of three bf16 values (8 + 8 + 8 bits), so that three bf16 products give the float32 product. The small
parts go first; 128 terms are summed in the tensor core, which truncates, everything above in float32.

A row's bits. Sums have one tree for every row count: chunks of 128 channels in the tensor core, pairs of
chunks, 5 pairs a group, then the groups. With few rows a program makes one chunk and `_finish` adds a group's
pairs; with many a program adds the pairs of its group itself, in the same order. Tiles have 64 rows in both,
so the instructions are the same. Rounding: float32 until the stored value, as in the reference; coefficients
differ from it by the order of sums and by the last bits of exponential, root and reciprocal.

Shape letters: T rows, M copies, D channels.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.hardware import Hardware
from dsv41.ops.hyper.triton_words import check_rows, exponential, half, load_row, pack, reciprocal
from dsv41.ops.streams import fork, join, nothing_forked

WIDTH = 512  # words of two channels that a program treats at once
ROW_WARPS, EXPAND_WARPS = 8, 4
MAX_COPIES = 8
TILE, CHUNK = 64, 128  # rows of a program of `_project`, channels of one chain of products
GROUP_CHUNKS = 10  # 1280 channels
FEW_ROWS = 256  # up to here a program makes one chunk, beyond a group
FORK_ROWS = 64  # up to here coefficients are computed beside their sub-layer


def why_not(hardware: Hardware, record: str | None) -> str | None:
    if hardware.sm < 90:  # an update's second kernel is launched early
        return (
            f"the Triton kernels of the residual copies need a CUDA GPU of SM90 or newer, not {hardware.name}"
        )
    return None


# -- rows: expand, collapse, update -------------------------------------------------------------------------


@triton.jit
def _load_scalars(row, COUNT: tl.constexpr):
    values = ()
    for index in tl.static_range(COUNT):
        values += (tl.load(row + index),)
    return values


@triton.jit
def _weighted(
    words, weights, FIRST: tl.constexpr, STEP: tl.constexpr, COPIES: tl.constexpr, ODD: tl.constexpr
):
    """sum_j weights[FIRST + j * STEP] * words[j] over the even or odd channels, in the order of j."""
    total = weights[FIRST] * half(words[0], ODD)
    for copy in tl.static_range(1, COPIES):
        total += weights[FIRST + copy * STEP] * half(words[copy], ODD)
    return total


@triton.jit
def _expanded(old, added, posts, combs, COPY: tl.constexpr, COPIES: tl.constexpr):
    """Words of the new copy `COPY`, from the words of the old ones and of the sub-layer's output."""
    even = posts[COPY] * half(added, False) + _weighted(old, combs, COPY, COPIES, COPIES, False)
    odd = posts[COPY] * half(added, True) + _weighted(old, combs, COPY, COPIES, COPIES, True)
    return pack(even, odd)


@triton.jit
def _take(values, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr):
    taken = ()
    for index in tl.static_range(COUNT):
        taken += (values[FIRST + index * STEP],)
    return taken


@triton.jit
def _hand_on(pre_row, mix_row, sound_row, COPIES: tl.constexpr):
    """Copy a row's `pre`, and say whether it has no NaN."""
    sound = True
    for copy in tl.static_range(COPIES):
        value = tl.load(pre_row + copy)
        tl.store(mix_row + copy, value)
        sound = sound & (value == value)
    tl.store(sound_row, sound)


@triton.jit
def _expand(
    y,
    y_stride,
    streams,
    streams_stride,
    post,
    post_stride,
    comb,
    comb_stride,
    pre,
    pre_stride,
    out,
    mix,
    sound,
    x,
    COPIES: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SUM: tl.constexpr,  # also the collapse of the new streams, before its norm
    EARLY: tl.constexpr,  # the next kernel is launched at once
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    PIECES: tl.constexpr = (D // 2 + WIDTH - 1) // WIDTH
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    piece = tl.program_id(0) % PIECES
    word = piece * WIDTH + tl.arange(0, WIDTH)
    mask = word < D // 2
    old = ()
    for copy in tl.static_range(COPIES):
        source = (streams + row * streams_stride + copy * D).to(tl.pointer_type(tl.int32))
        old += (tl.load(source + word, mask=mask, other=0),)
    added = tl.load((y + row * y_stride).to(tl.pointer_type(tl.int32)) + word, mask=mask, other=0)
    posts = _load_scalars(post + row * post_stride, COPIES)
    combs = _load_scalars(comb + row * comb_stride, COPIES * COPIES)
    new = ()
    for copy in tl.static_range(COPIES):
        new += (_expanded(old, added, posts, combs, copy, COPIES),)
        target = (out + (row * COPIES + copy) * D).to(tl.pointer_type(tl.int32))
        tl.store(target + word, new[copy], mask=mask)
    if SUM:
        pres = _load_scalars(pre + row * pre_stride, COPIES)
        even = _weighted(new, pres, 0, 1, COPIES, False)
        rounded = pack(even, _weighted(new, pres, 0, 1, COPIES, True))
        tl.store((x + row * D).to(tl.pointer_type(tl.int32)) + word, rounded, mask=mask)
    if piece == 0:
        _hand_on(pre + row * pre_stride, mix + row * COPIES, sound + row, COPIES)


@triton.jit
def _normed(sums, weight, target, squares, eps, D: tl.constexpr, WIDTH: tl.constexpr):
    """Store the rounded sums of a row, normed."""
    scale = tl.rsqrt(tl.sum(squares, axis=0) / D + eps)
    for piece in tl.static_range((D // 2 + WIDTH - 1) // WIDTH):
        word = piece * WIDTH + tl.arange(0, WIDTH)
        even = half(sums[piece], False) * scale * half(weight[piece], False)
        odd = half(sums[piece], True) * scale * half(weight[piece], True)
        tl.store(target + word, pack(even, odd), mask=word < D // 2)


@triton.jit
def _norm(x, norm, eps, D: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    """Rounded sums in x [T, D] -> the normed rows, in place. EARLY: launched with its producer."""
    row = tl.program_id(0).to(tl.int64)
    weight = load_row(norm, D, WIDTH)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = load_row(x + row * D, D, WIDTH)
    squares = tl.zeros((WIDTH,), tl.float32)
    for piece in tl.static_range((D // 2 + WIDTH - 1) // WIDTH):
        squares += half(sums[piece], False) * half(sums[piece], False)
        squares += half(sums[piece], True) * half(sums[piece], True)
    _normed(sums, weight, (x + row * D).to(tl.pointer_type(tl.int32)), squares, eps, D, WIDTH)


@triton.jit
def _collapse(
    streams,
    streams_stride,
    pre,
    pre_stride,
    norm,
    eps,
    x,
    COPIES: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    PIECES: tl.constexpr = (D // 2 + WIDTH - 1) // WIDTH
    row = tl.program_id(0).to(tl.int64)
    pres = _load_scalars(pre + row * pre_stride, COPIES)
    old = ()
    for copy in tl.static_range(COPIES):
        old += load_row(streams + row * streams_stride + copy * D, D, WIDTH)
    weight = load_row(norm, D, WIDTH)
    sums = ()
    squares = tl.zeros((WIDTH,), tl.float32)
    for piece in tl.static_range(PIECES):
        values = _take(old, piece, PIECES, COPIES)
        even = _weighted(values, pres, 0, 1, COPIES, False)
        rounded = pack(even, _weighted(values, pres, 0, 1, COPIES, True))
        squares += half(rounded, False) * half(rounded, False)
        squares += half(rounded, True) * half(rounded, True)
        sums += (rounded,)
    _normed(sums, weight, (x + row * D).to(tl.pointer_type(tl.int32)), squares, eps, D, WIDTH)


# -- coefficients -------------------------------------------------------------------------------------------


@triton.jit
def _high(x):
    """The upper 16 bits of a float32, which are a bf16 value: the rest is exact and 8 bits shorter."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _chunk(x_row, fn_row, first, row_mask, value_mask, D: tl.constexpr, CHUNK: tl.constexpr):
    """fn @ x and <x, x> over `CHUNK` channels: [TILE, VALUES] and [TILE]."""
    channel = (first + tl.arange(0, CHUNK))[None, :]
    x = tl.load(x_row + channel, mask=row_mask[:, None] & (channel < D), other=0.0)
    weight = tl.load(fn_row + channel, mask=value_mask[:, None] & (channel < D), other=0.0)
    high = _high(weight)
    middle = _high(weight - high)
    low = (weight - high) - middle
    sums = tl.dot(x, low.to(tl.bfloat16).T)
    sums = tl.dot(x, middle.to(tl.bfloat16).T, sums)
    sums = tl.dot(x, high.to(tl.bfloat16).T, sums)
    wide = x.to(tl.float32)
    return sums, tl.sum(wide * wide, axis=1)


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
):
    """`CHUNKS` chunks of fn @ x and of <x, x> for a tile of rows -> partials[part, row]."""
    part = tl.program_id(1)
    copy = part // PARTS
    first = (part % PARTS) * (CHUNKS * CHUNK)
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.arange(0, VALUES)
    x_row = streams + row[:, None] * streams_stride + copy * D
    fn_row = fn + value[:, None].to(tl.int64) * (COPIES * D) + copy * D
    if CHUNKS == 1:
        total, total_squares = _chunk(x_row, fn_row, first, row < num_rows, value < MIXES, D, CHUNK)
    else:
        total = tl.zeros((TILE, VALUES), tl.float32)
        total_squares = tl.zeros((TILE,), tl.float32)
        other, other_squares = total, total_squares
        for chunk in range(CHUNKS):
            channel = first + chunk * CHUNK
            sums, squares = _chunk(x_row, fn_row, channel, row < num_rows, value < MIXES, D, CHUNK)
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


@triton.jit
def _normalise(comb, COPIES: tl.constexpr, ROWS: tl.constexpr, eps):
    """Divide by the sums of the rows, or of the columns. `comb` is a tuple in row order."""
    OUTER: tl.constexpr = COPIES if ROWS else 1  # from line to line
    INNER: tl.constexpr = 1 if ROWS else COPIES  # along a line
    reciprocals = ()
    for line in tl.static_range(COPIES):
        total = comb[line * OUTER]
        if COPIES > 1:  # two chains of additions, other as long
            second = comb[line * OUTER + INNER]
            for index in tl.static_range(2, COPIES):
                if index % 2 == 0:
                    total += comb[line * OUTER + index * INNER]
                else:
                    second += comb[line * OUTER + index * INNER]
            total += second
        reciprocals += (reciprocal(total + eps),)
    normed = ()
    for index in tl.static_range(COPIES * COPIES):
        normed += (comb[index] * reciprocals[index // COPIES if ROWS else index % COPIES],)
    return normed


@triton.jit
def _softmax(logits, COPIES: tl.constexpr, eps):
    """The softmax of every row plus eps. A tuple in row order."""
    comb = ()
    for line in tl.static_range(COPIES):
        largest = logits[line * COPIES]
        for index in tl.static_range(1, COPIES):
            largest = tl.maximum(largest, logits[line * COPIES + index])
        for index in tl.static_range(COPIES):
            comb += (exponential(logits[line * COPIES + index] - largest),)
    comb = _normalise(comb, COPIES, True, 0.0)
    raised = ()
    for index in tl.static_range(COPIES * COPIES):
        raised += (comb[index] + eps,)
    return raised


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
    GROUPS: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,  # a power of two
    CHUNKS: tl.constexpr,  # partial sums of a group: 1, or an even number
):
    """partials of a row -> its coefficients. One warp: every lane sweeps the whole matrix."""
    row = tl.program_id(0).to(tl.int64)
    value = tl.arange(0, VALUES)
    group = tl.arange(0, GROUP_WIDTH)
    mask = (group < GROUPS)[:, None]  # the padding behind the values is never used
    at = partials + row * VALUES + value[None, :]
    step = num_rows.to(tl.int64) * VALUES  # from part to part
    factor = tl.load(scale + tl.where(value < COPIES, 0, tl.where(value < 2 * COPIES, 1, 2)))
    bias = tl.load(base + value, mask=value < MIXES, other=0.0)
    sums = tl.zeros((GROUP_WIDTH, VALUES), tl.float32)
    if CHUNKS == 1:
        sums += tl.load(at + group[:, None] * step, mask=mask, other=0.0)
    else:
        for pair in tl.static_range(CHUNKS // 2):
            part = group[:, None] * CHUNKS + 2 * pair
            even = tl.load(at + part * step, mask=mask, other=0.0)
            sums += even + tl.load(at + (part + 1) * step, mask=mask, other=0.0)
    sums = tl.sum(sums, axis=0)
    squares = tl.sum(tl.where(value == MIXES, sums, 0.0), axis=0)
    logits = factor * (sums * tl.rsqrt(squares / (COPIES * D) + norm_eps)) + bias

    gate = 1.0 / (1.0 + exponential(-logits))
    tl.store(pre + row * COPIES + value, gate + eps, mask=value < COPIES)
    tl.store(post + row * COPIES + value - COPIES, 2.0 * gate, mask=(value >= COPIES) & (value < 2 * COPIES))

    entries = ()
    for index in tl.static_range(COPIES * COPIES):
        entries += (tl.gather(logits, tl.full((1,), 2 * COPIES + index, tl.int32), axis=0),)
    entries = _softmax(entries, COPIES, eps)
    entries = _normalise(entries, COPIES, False, eps)
    for _ in range(sweeps - 1):
        entries = _normalise(entries, COPIES, True, eps)
        entries = _normalise(entries, COPIES, False, eps)
    matrix = tl.zeros((VALUES,), tl.float32)
    for index in tl.static_range(COPIES * COPIES):
        matrix = tl.where(value == 2 * COPIES + index, entries[index], matrix)
    at = comb + row * (COPIES * COPIES) + value - 2 * COPIES
    tl.store(at, matrix, mask=(value >= 2 * COPIES) & (value < MIXES))


# -- the ops ------------------------------------------------------------------------------------------------


def _check_streams(streams: Tensor) -> tuple[int, int, int]:
    """T, M, D of streams that the kernels can read."""
    num_rows, copies, dim = streams.shape
    if streams.dtype != torch.bfloat16:
        raise ValueError(f"the Triton kernels of the residual copies read bf16 streams, not {streams.dtype}")
    if not 1 <= copies <= MAX_COPIES or dim % 8:
        raise ValueError(
            f"the Triton kernels take 1 to {MAX_COPIES} residual copies of a multiple of 8 channels,"
            f" not {copies} of {dim}"
        )
    check_rows(streams)
    return num_rows, copies, dim


def _check_weights(*coefficients: Tensor) -> None:
    for tensor in coefficients:
        assert tensor.dtype == torch.float32, f"coefficients are float32, got {tensor.dtype}"
    check_rows(*coefficients)


def _width(dim: int) -> int:
    return min(WIDTH, triton.next_power_of_2(dim // 2))


def hyper_coefficients(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, sweeps: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, copies, dim = _check_streams(streams)
    mixes = (2 + copies) * copies
    assert fn.shape == (mixes, copies * dim), f"fn of shape {tuple(fn.shape)} for {copies} copies of {dim}"
    assert all(weight.is_contiguous() for weight in (fn, base, scale)), "weights lie in one piece"
    assert fn.dtype == base.dtype == scale.dtype == torch.float32, "fn, base and scale are float32"
    work = partial(_coefficients, streams, fn, base, scale, sweeps, eps, norm_eps)
    if not (streams.is_cuda and 0 < num_rows <= FORK_ROWS):
        return (*work(), nothing_forked())
    with torch.cuda.device(streams.device):
        (pre, post, comb), side = fork(work)
    return pre, post, comb, side


def _coefficients(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, sweeps: int, eps: float, norm_eps: float
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
    sizes = {"COPIES": copies, "D": dim, "MIXES": mixes, "VALUES": values}
    # No fused multiply-add: the two forms of the sums must not differ by what the compiler fuses.
    _project[(triton.cdiv(num_rows, TILE), copies * parts)](
        streams,
        streams.stride(0),
        fn,
        partials,
        num_rows,
        **sizes,
        PARTS=parts,
        CHUNKS=made,
        TILE=TILE,
        CHUNK=CHUNK,
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=False,
    )
    _finish[(num_rows,)](
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
        **sizes,
        GROUPS=copies * groups,
        GROUP_WIDTH=triton.next_power_of_2(copies * groups),
        CHUNKS=added,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return pre, post, comb


def hyper_collapse(streams: Tensor, pre: Tensor, norm: Tensor, norm_eps: float) -> Tensor:
    num_rows, copies, dim = _check_streams(streams)
    _check_collapse(streams, pre, norm)
    x = streams.new_empty((num_rows, dim))
    if num_rows:
        _collapse[(num_rows,)](
            streams,
            streams.stride(0),
            pre,
            pre.stride(0),
            norm,
            norm_eps,
            x,
            COPIES=copies,
            D=dim,
            WIDTH=_width(dim),
            num_warps=ROW_WARPS,
        )
    return x


def hyper_expand(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, pre: Tensor, side: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _launch_expand(y, streams, post, comb, pre, side, None)


def hyper_update(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    side: Tensor,
    norm: Tensor,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, _, dim = streams.shape
    _check_collapse(streams, pre, norm)
    x = streams.new_empty((num_rows, dim))
    handed = _launch_expand(y, streams, post, comb, pre, side, x)
    if num_rows:
        _norm[(num_rows,)](
            x,
            norm,
            norm_eps,
            D=dim,
            WIDTH=_width(dim),
            EARLY=x.is_cuda,
            num_warps=ROW_WARPS,
            launch_pdl=x.is_cuda,
        )
    return (*handed, x)


def _launch_expand(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, pre: Tensor, side: Tensor, x: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Streams, mix and soundness; the sums of the collapse go to x [T, D]."""
    num_rows, copies, dim = _check_streams(streams)
    _check_update(y, streams, post, comb, pre)
    out, mix = streams.new_empty(streams.shape), streams.new_empty((num_rows, copies), dtype=torch.float32)
    sound = streams.new_empty(num_rows, dtype=torch.bool)
    if streams.is_cuda:
        with torch.cuda.device(streams.device):
            join(side)
    if num_rows:
        width = _width(dim)
        _expand[(num_rows * triton.cdiv(dim // 2, width),)](
            y,
            y.stride(0),
            streams,
            streams.stride(0),
            post,
            post.stride(0),
            comb,
            comb.stride(0),
            pre,
            pre.stride(0),
            out,
            mix,
            sound,
            out if x is None else x,
            COPIES=copies,
            D=dim,
            WIDTH=width,
            SUM=x is not None,
            EARLY=x is not None and x.is_cuda,
            num_warps=EXPAND_WARPS,
        )
    return out, mix, sound


def _check_update(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, pre: Tensor) -> None:
    num_rows, copies, dim = streams.shape
    if y.dtype != torch.bfloat16:
        raise ValueError(f"the Triton kernels of the residual copies add a bf16 output, not {y.dtype}")
    assert y.shape == (num_rows, dim), (
        f"an output of shape {tuple(y.shape)} for streams {tuple(streams.shape)}"
    )
    assert post.shape == pre.shape == (num_rows, copies), f"{tuple(post.shape)} weights for {num_rows} rows"
    assert comb.shape == (num_rows, copies, copies), f"{tuple(comb.shape)} weights for {num_rows} rows"
    check_rows(y)
    _check_weights(post, comb, pre)


def _check_collapse(streams: Tensor, pre: Tensor, norm: Tensor) -> None:
    num_rows, copies, dim = streams.shape
    assert pre.shape == (num_rows, copies), f"{tuple(pre.shape)} weights for streams {tuple(streams.shape)}"
    assert norm.shape == (dim,), f"a norm of {tuple(norm.shape)} weights for {dim} channels"
    assert norm.dtype == torch.bfloat16, f"a norm's weights are bf16, got {norm.dtype}"
    assert norm.is_contiguous(), "a norm's weights lie in one piece"
    _check_weights(pre)
