"""Residual copies in Triton: one launch for everything with few rows, two with more.

The expansion takes a program for every 1024 channels. In an update it also sums the new copies for the
collapse, and the program of a row that arrives last norms the row (tickets: triton_mixes.py); with more rows
`_norm`, one program a row, is launched early and finishes; with many one program makes a whole row, in
registers. A collapse alone is one program of 8 warps that holds a whole row, read before the first sum, so
that it waits little more than once for memory. The coefficients are in triton_mixes.py.

A row's bits. What is multiplied and added is said instruction by instruction, and a norm's sum of squares has
one tree, that of `ROW_WARPS` warps, for every row count. Rounding: float32 until the stored value, as in the
reference; coefficients differ from it by the order of sums and by the last bits of exponential, root and
reciprocal.

Shape letters: T rows, M copies, D channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.hardware import Hardware
from dsv41.ops.hyper.triton_mixes import coefficients
from dsv41.ops.hyper.triton_words import check_rows, half, load_row, pack
from dsv41.ops.streams import fork, join, nothing_forked

WIDTH = 512  # words of two channels that a program treats at once
ROW_WARPS, EXPAND_WARPS = 8, 4
MAX_COPIES = 8
FORK_ROWS = 64  # up to here coefficients are computed beside their sub-layer
LAST_NORMS_ROWS = 16  # up to here the program that arrives last norms a row; 0 switches it off
WHOLE_ROWS = 512  # from here on a program makes a whole row
ROWS_EARLY = False  # programmatic launch of expansions: nothing gained on an H200


def why_not(hardware: Hardware, record: str | None) -> str | None:
    if hardware.sm < 90:  # an update's second kernel is launched early
        return (
            f"the Triton kernels of the residual copies need a CUDA GPU of SM90 or newer, not {hardware.name}"
        )
    return None


# -- rows: expand, collapse, update -------------------------------------------------------------------------


@triton.jit
def _load_few(row, COUNT: tl.constexpr):
    """A vector of `COUNT` values, which are few: every thread's lane holds one."""
    WIDTH: tl.constexpr = triton.next_power_of_2(COUNT)
    at = tl.arange(0, WIDTH)
    return tl.load(row + at, mask=at < COUNT, other=0.0)


@triton.jit
def _each(vector, COUNT: tl.constexpr):
    """Its values one by one, by shuffles: as many loads would be put off between the sums, and waited for."""
    values = ()
    for index in tl.static_range(COUNT):
        values += (tl.gather(vector, tl.full((1,), index, tl.int32), axis=0),)
    return values


@triton.jit
def _weighted(
    words, weights, FIRST: tl.constexpr, STEP: tl.constexpr, COPIES: tl.constexpr, ODD: tl.constexpr
):
    """sum_j weights[FIRST + j * STEP] * words[j] over the even or odd channels, in the order of j."""
    total = weights[FIRST] * half(words[0], ODD)
    for copy in tl.static_range(1, COPIES):
        total = tl.fma(half(words[copy], ODD), weights[FIRST + copy * STEP], total)
    return total


@triton.jit
def _expanded(old, added, posts, combs, COPY: tl.constexpr, COPIES: tl.constexpr):
    """Words of the new copy `COPY`, from the words of the old ones and of the sub-layer's output."""
    even = tl.fma(half(added, False), posts[COPY], _weighted(old, combs, COPY, COPIES, COPIES, False))
    odd = tl.fma(half(added, True), posts[COPY], _weighted(old, combs, COPY, COPIES, COPIES, True))
    return pack(even, odd)


@triton.jit
def _take(values, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr):
    taken = ()
    for index in tl.static_range(COUNT):
        taken += (values[FIRST + index * STEP],)
    return taken


@triton.jit
def _hand_on(pres, mix_row, sound_row, COPIES: tl.constexpr):
    """Store a row's `pre` again, and whether it has no NaN."""
    WIDTH: tl.constexpr = triton.next_power_of_2(COPIES)
    at = tl.arange(0, WIDTH)
    tl.store(mix_row + at, pres, mask=at < COPIES)
    tl.store(sound_row, tl.sum((pres != pres).to(tl.int32), axis=0) == 0)


@triton.jit
def _words(row):
    return row.to(tl.pointer_type(tl.int32))


@triton.jit
def _new_copies(old, added, posts, combs, target, word, COPIES: tl.constexpr, D: tl.constexpr):
    """The words of the new copies, which are also stored to the row `target`."""
    new = ()
    for copy in tl.static_range(COPIES):
        new += (_expanded(old, added, posts, combs, copy, COPIES),)
        tl.store(_words(target + copy * D) + word, new[copy], mask=word < D // 2)
    return new


@triton.jit
def _collapsed(words, pres, COPIES: tl.constexpr):
    """Rounded sums of the copies, as words."""
    even = _weighted(words, pres, 0, 1, COPIES, False)
    return pack(even, _weighted(words, pres, 0, 1, COPIES, True))


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
    norm,
    tickets,
    eps,
    COPIES: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SUM: tl.constexpr,  # also the collapse of the new streams, before its norm
    NORM: tl.constexpr,  # and its norm, by the program that arrives last
    EARLY: tl.constexpr,  # launched with its producers
    NEXT_EARLY: tl.constexpr,  # the next kernel is launched at once
):
    PIECES: tl.constexpr = (D // 2 + WIDTH - 1) // WIDTH
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    piece = tl.program_id(0) % PIECES
    word = piece * WIDTH + tl.arange(0, WIDTH)
    mask = word < D // 2
    if NORM:
        weight = load_row(norm, D, WIDTH)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if NEXT_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    pres = _load_few(pre + row * pre_stride, COPIES)  # first: what is used last is put off
    old = ()
    for copy in tl.static_range(COPIES):
        old += (tl.load(_words(streams + row * streams_stride + copy * D) + word, mask=mask, other=0),)
    added = tl.load(_words(y + row * y_stride) + word, mask=mask, other=0)
    posts = _load_few(post + row * post_stride, COPIES)
    combs = _load_few(comb + row * comb_stride, COPIES * COPIES)
    posts, combs, mixed = _each(posts, COPIES), _each(combs, COPIES * COPIES), _each(pres, COPIES)
    new = _new_copies(old, added, posts, combs, out + row * COPIES * D, word, COPIES, D)
    if SUM:
        tl.store(_words(x + row * D) + word, _collapsed(new, mixed, COPIES), mask=mask)
    if piece == 0:
        _hand_on(pres, mix + row * COPIES, sound + row, COPIES)
    if NORM:
        tl.debug_barrier()  # the whole program has stored
        if tl.atomic_add(tickets + row, 1, sem="acq_rel", scope="gpu") == PIECES - 1:
            tl.store(tickets + row, 0)
            _norm_row(x + row * D, weight, eps, D, WIDTH)


@triton.jit
def _square(words, squares):
    squares = tl.fma(half(words, False), half(words, False), squares)
    return tl.fma(half(words, True), half(words, True), squares)


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
def _norm_row(row, weight, eps, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rounded sums of a row, which other programs stored -> the normed row, in place."""
    sums = load_row(row, D, WIDTH, True)
    squares = tl.zeros((WIDTH,), tl.float32)
    for piece in tl.static_range((D // 2 + WIDTH - 1) // WIDTH):
        squares = _square(sums[piece], squares)
    _normed(sums, weight, _words(row), squares, eps, D, WIDTH)


@triton.jit
def _norm(x, norm, eps, D: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    """Rounded sums in x [T, D] -> the normed rows, in place. EARLY: launched with its producer."""
    row = tl.program_id(0).to(tl.int64)
    weight = load_row(norm, D, WIDTH)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _norm_row(x + row * D, weight, eps, D, WIDTH)


@triton.jit
def _update(
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
    norm,
    eps,
    COPIES: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A whole row a program: what `_expand` and `_norm` do, to the same bits, with the sums in registers."""
    PIECES: tl.constexpr = (D // 2 + WIDTH - 1) // WIDTH
    row = tl.program_id(0).to(tl.int64)
    weight = load_row(norm, D, WIDTH)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pres = _load_few(pre + row * pre_stride, COPIES)
    old = ()
    for copy in tl.static_range(COPIES):
        old += load_row(streams + row * streams_stride + copy * D, D, WIDTH)
    added = load_row(y + row * y_stride, D, WIDTH)
    posts = _load_few(post + row * post_stride, COPIES)
    combs = _load_few(comb + row * comb_stride, COPIES * COPIES)
    posts, combs, mixed = _each(posts, COPIES), _each(combs, COPIES * COPIES), _each(pres, COPIES)
    sums = ()
    squares = tl.zeros((WIDTH,), tl.float32)
    for piece in tl.static_range(PIECES):
        word = piece * WIDTH + tl.arange(0, WIDTH)
        values = _take(old, piece, PIECES, COPIES)
        new = _new_copies(values, added[piece], posts, combs, out + row * COPIES * D, word, COPIES, D)
        sums += (_collapsed(new, mixed, COPIES),)
        squares = _square(sums[piece], squares)
    _normed(sums, weight, _words(x + row * D), squares, eps, D, WIDTH)
    _hand_on(pres, mix + row * COPIES, sound + row, COPIES)


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
    pres = _load_few(pre + row * pre_stride, COPIES)
    old = ()
    for copy in tl.static_range(COPIES):
        old += load_row(streams + row * streams_stride + copy * D, D, WIDTH)
    weight = load_row(norm, D, WIDTH)
    pres = _each(pres, COPIES)
    sums = ()
    squares = tl.zeros((WIDTH,), tl.float32)
    for piece in tl.static_range(PIECES):
        values = _take(old, piece, PIECES, COPIES)
        sums += (_collapsed(values, pres, COPIES),)
        squares = _square(sums[piece], squares)
    _normed(sums, weight, _words(x + row * D), squares, eps, D, WIDTH)


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
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    tickets: Tensor,
    sweeps: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, copies, dim = _check_streams(streams)
    mixes = (2 + copies) * copies
    assert fn.shape == (mixes, copies * dim), f"fn of shape {tuple(fn.shape)} for {copies} copies of {dim}"
    assert all(weight.is_contiguous() for weight in (fn, base, scale)), "weights lie in one piece"
    assert fn.dtype == base.dtype == scale.dtype == torch.float32, "fn, base and scale are float32"
    _check_tickets(tickets)
    work = partial(coefficients, streams, fn, base, scale, tickets, sweeps, eps, norm_eps)
    if not (streams.is_cuda and 0 < num_rows <= FORK_ROWS):
        return (*work(), nothing_forked())
    with torch.cuda.device(streams.device):
        (pre, post, comb), side = fork(work)
    return pre, post, comb, side


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
    given = (y, streams, post, comb, pre)
    handed = _begin(*given, side)
    if len(streams):
        _launch_expand(given, handed)
    return handed


def hyper_update(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    side: Tensor,
    norm: Tensor,
    tickets: Tensor,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, copies, dim = streams.shape
    _check_collapse(streams, pre, norm)
    _check_tickets(tickets)
    x = streams.new_empty((num_rows, dim))
    given = (y, streams, post, comb, pre)
    handed = _begin(*given, side)
    if num_rows == 0:
        return (*handed, x)
    sizes = {"D": dim, "WIDTH": _width(dim), "num_warps": ROW_WARPS}
    if num_rows >= WHOLE_ROWS:
        early = ROWS_EARLY and x.is_cuda
        arguments = (*_with_strides(given), *handed, x, norm, norm_eps)
        _update[(num_rows,)](
            *arguments,
            COPIES=copies,
            EARLY=early,
            launch_pdl=early,
            **sizes,
        )
    elif num_rows <= min(LAST_NORMS_ROWS, len(tickets)):
        _launch_expand(given, handed, x, norm, tickets, norm_eps)
    else:
        _launch_expand(given, handed, x)
        _norm[(num_rows,)](x, norm, norm_eps, EARLY=x.is_cuda, launch_pdl=x.is_cuda, **sizes)
    return (*handed, x)


def _begin(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, pre: Tensor, side: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for streams, mix and soundness; what is launched from here on sees the coefficients."""
    num_rows, copies, _ = _check_streams(streams)
    _check_update(y, streams, post, comb, pre)
    out, mix = streams.new_empty(streams.shape), streams.new_empty((num_rows, copies), dtype=torch.float32)
    sound = streams.new_empty(num_rows, dtype=torch.bool)
    if streams.is_cuda:
        with torch.cuda.device(streams.device):
            join(side)
    return out, mix, sound


def _with_strides(tensors: tuple[Tensor, ...]) -> Iterator[Tensor | int]:
    for tensor in tensors:
        yield tensor
        yield tensor.stride(0)


def _launch_expand(
    given: tuple[Tensor, ...],
    handed: tuple[Tensor, ...],
    x: Tensor | None = None,
    norm: Tensor | None = None,
    tickets: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """The sums of the collapse go to x [T, D], normed if the norm's weights are there."""
    out, mix, _ = handed
    num_rows, copies, dim = out.shape
    width, alone, early = _width(dim), norm is None, ROWS_EARLY and out.is_cuda
    _expand[(num_rows * triton.cdiv(dim // 2, width),)](
        *_with_strides(given),
        *handed,
        out if x is None else x,
        out if norm is None else norm,
        mix if tickets is None else tickets,
        eps,
        COPIES=copies,
        D=dim,
        WIDTH=width,
        SUM=x is not None,
        NORM=not alone,
        EARLY=early,
        NEXT_EARLY=out.is_cuda and (early or x is not None),
        num_warps=EXPAND_WARPS if alone else ROW_WARPS,
        launch_pdl=early,
    )


def _check_tickets(tickets: Tensor) -> None:
    assert tickets.dtype == torch.int32, f"tickets are int32, not {tickets.dtype}"
    assert tickets.is_contiguous(), "tickets lie in one piece"


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
