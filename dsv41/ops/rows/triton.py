"""The rows of a step in Triton: one launch, one program a row.

A program finds its request by scanning the step's token counts (in registers), then everything of its row is
a handful of scalars, a window list and a lookback list. The width of that scan is the number of request slots
and not the step's number of requests, and the counts may begin anywhere, so that an engine has one kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.hardware import Hardware

MAX_BATCH = 8192  # request slots: token counts that a program holds in registers


def why_not(hardware: Hardware, record: str | None) -> str | None:
    if hardware.sm < 80:
        return f"the Triton row kernels need a CUDA GPU of SM80 or newer, not {hardware.name}"
    return None


@triton.jit
def _slot(table, request, index, mask, table_row, S: tl.constexpr):
    page = tl.load(table + request * table_row + index // S, mask=mask, other=0).to(tl.int64)
    return page * S + index % S


@triton.jit
def _window(
    read, table, row, request, position, oldest, live, table_row,
    W: tl.constexpr, B: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Store one row's window list."""
    j = tl.arange(0, B)
    wanted = tl.maximum(position - W + 1, oldest) + j
    seen = (wanted <= position) & (j < W) & live
    slots = _slot(table, request, tl.where(seen, wanted, 0), seen, table_row, S)
    tl.store(read + row * W + j, tl.where(seen, slots, -1).to(tl.int32), mask=j < W)


@triton.jit
def _state(
    write, count, table, row, num_rows, request, position, hit, live, table_row,
    RATIO: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Store where one row's state of one ratio goes, and how many states it sees."""
    closes = ((position + 1) % RATIO == 0) & (position >= hit) & live
    slot = _slot(table, request, position // RATIO, closes, table_row, S)
    tl.store(write + (RATIO - 1) * num_rows + row, tl.where(closes, slot, -1))
    seen = tl.where(live, (position + 1) // RATIO, 0)
    tl.store(count + (RATIO - 1) * num_rows + row, seen.to(tl.int32))


@triton.jit(
    do_not_specialize=["batch_size", "num_rows"], do_not_specialize_on_alignment=["slots", "num_tokens"]
)
def _step_rows(
    tokens, page_table, window_table, counts, slots, num_tokens,
    ids_out, positions_out, image_out, lookback_out, request_out, window_write, window_read,
    state_write, num_states, partner_row, partner_slot, open_slot,
    batch_size, num_rows, token_row, page_row, window_row,
    W: tl.constexpr, WB: tl.constexpr, N: tl.constexpr, NB: tl.constexpr, S: tl.constexpr, OPEN: tl.constexpr,
    IMAGE_BIT: tl.constexpr, MAX_RATIO: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, B)
    sizes = tl.load(num_tokens + b, mask=b < batch_size, other=0).to(tl.int64)
    before_row = tl.cumsum(sizes, 0) <= row
    batch = tl.sum((before_row & (b < batch_size)).to(tl.int32), 0)
    live = batch < batch_size
    offset = row - tl.sum(tl.where(before_row, sizes, 0), 0)
    own = tl.load(num_tokens + batch, mask=live, other=0).to(tl.int64)
    request = tl.load(slots + batch, mask=live, other=0).to(tl.int64)
    position = tl.load(counts + request * 4, mask=live, other=0) + offset
    position = tl.where(live, position, 0)
    hit = tl.load(counts + request * 4 + 1, mask=live, other=0)
    replay = tl.load(counts + request * 4 + 2, mask=live, other=0)

    token = tl.load(tokens + request * token_row + position, mask=live, other=0)
    tl.store(ids_out + row, (token & (IMAGE_BIT - 1)).to(tl.int64))
    tl.store(positions_out + row, position)
    tl.store(image_out + row, token >= IMAGE_BIT)
    tl.store(request_out + row, tl.where(live, request, -1).to(tl.int32))
    n = tl.arange(0, NB)
    back = position - 1 - n
    known = (back >= 0) & (n < N) & live
    past = tl.load(tokens + request * token_row + back, mask=known, other=-1)
    tl.store(lookback_out + row * N + n, tl.where(past < IMAGE_BIT, past, -1).to(tl.int64), mask=n < N)

    slot = _slot(window_table, request, position, live, window_row, S)
    tl.store(window_write + row, tl.where(live, slot, -1))
    _window(window_read, window_table, row, request, position, replay, live, window_row, W, WB, S)
    _state(state_write, num_states, page_table, row, num_rows, request, position, hit, live, page_row, 1, S)
    if MAX_RATIO == 2:
        _state(
            state_write,
            num_states,
            page_table,
            row,
            num_rows,
            request,
            position,
            hit,
            live,
            page_row,
            2,
            S // 2,
        )

    second = position % 2 == 1
    tl.store(partner_row + row, tl.where(second & (offset > 0) & live, row - 1, -1))
    kept = second & (offset == 0) & (position > replay) & live
    tl.store(partner_slot + row, tl.where(kept, request * OPEN + (position - 1) % OPEN, -1))
    keeps = (position % 2 == 0) & (offset >= own - OPEN) & live
    tl.store(open_slot + row, tl.where(keeps, request * OPEN + position % OPEN, -1))


@triton.jit
def _window_rows(
    table, requests, positions, oldest, read, table_row, W: tl.constexpr, WB: tl.constexpr, S: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(requests + row).to(tl.int64)
    live = request >= 0
    start = tl.load(oldest + row)
    _window(read, table, row, request, tl.load(positions + row), start, live, table_row, W, WB, S)


def step_rows(
    tokens: Tensor,
    page_table: Tensor,
    window_table: Tensor,
    counts: Tensor,
    slots: Tensor,
    num_tokens: Tensor,
    num_rows: int,
    window: int,
    lookback: int,
    page_tokens: int,
    open_rows: int,
    image_bit: int,
    max_ratio: int,
) -> tuple[Tensor, ...]:
    batch, request_slots = slots.shape[0], counts.shape[0]
    if request_slots > MAX_BATCH:
        raise ValueError(f"{request_slots} request slots: the Triton row kernel takes {MAX_BATCH}")
    assert batch <= request_slots, f"{batch} requests in {request_slots} slots"
    if counts.shape[1] != 4 or not all(
        t.is_contiguous() for t in (tokens, page_table, window_table, counts, slots, num_tokens)
    ):
        raise ValueError("the Triton row kernel reads contiguous tables, and four counts a request")

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=counts.device)

    T, int32 = num_rows, torch.int32
    found = (
        new(T), new(T), new(T, dtype=torch.bool), new(T, lookback), new(T, dtype=int32), new(T),
        new(T, window, dtype=int32), new(max_ratio, T), new(max_ratio, T, dtype=int32),
        new(T), new(T), new(T),
    )  # fmt: skip
    if T:
        _step_rows[(T,)](
            tokens, page_table, window_table, counts, slots, num_tokens, *found,
            batch, T, tokens.shape[1], page_table.shape[1], window_table.shape[1],
            window, triton.next_power_of_2(window), lookback, triton.next_power_of_2(lookback),
            page_tokens, open_rows, image_bit, max_ratio, triton.next_power_of_2(request_slots),
            num_warps=1 if request_slots <= 128 else 4,
        )  # fmt: skip
    return found


def window_rows(
    window_table: Tensor, request: Tensor, positions: Tensor, oldest: Tensor, window: int, page_tokens: int
) -> Tensor:
    read = torch.empty((positions.shape[0], window), dtype=torch.int32, device=positions.device)
    if positions.shape[0]:
        _window_rows[(positions.shape[0],)](
            window_table, request, positions.contiguous(), oldest.contiguous(), read, window_table.shape[1],
            window, triton.next_power_of_2(window), page_tokens, num_warps=1,
        )  # fmt: skip
    return read
