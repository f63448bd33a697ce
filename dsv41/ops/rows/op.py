"""The rows of a step, from what the device keeps of every request: once a step, never per layer.

A step computes the next `num_tokens[b]` tokens of request slot `slots[b]`, in that order, one token row each.
Rows behind the last token are padding: request -1, slots -1, lookback -1, everything else 0.

    position  = num_computed + place of the row among its request's rows of this step
    slot(i)   = table[i div S] * S + i mod S       S states a page: page_tokens of a window, / ratio of states
    window    = the slots of positions max(oldest, p - W + 1) ... p, then -1
    state     = p div ratio, published by the row that closes it, (p + 1) mod ratio = 0, behind a prefix hit
    open half = of a ratio-2 pair: the even row; its partner is a row of this step or an open slot

`oldest` is `replay_start` here; `window_rows` makes the list for other starts (decoder replay).

B requests of the step, R request slots, C context tokens, P pages of a context, T token rows, W window, N-1
tokens of lookback. `tokens` int32 [R, C], with `image_bit` set where the position belongs to an image, so
that one gather answers both what a token is and whether Engram may see it. `counts` int64 [R, 4]:
num_computed, hit_tokens, replay_start, tail_start. `state_write` and `num_states` have one row for every
ratio from 1 to `max_ratio`, which is 1 or 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops.library import declare


def _step_rows_fake(
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
    impl: str,
) -> tuple[Tensor, ...]:
    def rows(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return counts.new_empty(shape, dtype=dtype)

    T, int32 = num_rows, torch.int32
    per_row = [rows(T), rows(T), rows(T, dtype=torch.bool), rows(T, lookback), rows(T, dtype=int32)]
    cache = [rows(T), rows(T, window, dtype=int32), rows(max_ratio, T), rows(max_ratio, T, dtype=int32)]
    return (*per_row, *cache, rows(T), rows(T), rows(T))


def _window_rows_fake(
    window_table: Tensor, request: Tensor, positions: Tensor, oldest: Tensor, window: int, *_: object
) -> Tensor:
    return positions.new_empty((positions.shape[0], window), dtype=torch.int32)


step_rows = declare(
    "rows",
    "step_rows(Tensor tokens, Tensor page_table, Tensor window_table, Tensor counts, Tensor slots,"
    " Tensor num_tokens, SymInt num_rows, int window, int lookback, int page_tokens, int open_rows,"
    " int image_bit, int max_ratio, str impl)"
    " -> (Tensor token_ids, Tensor positions, Tensor is_image, Tensor lookback, Tensor request,"
    " Tensor window_write, Tensor window_read, Tensor state_write, Tensor num_states, Tensor partner_row,"
    " Tensor partner_slot, Tensor open_slot)",
    fake=_step_rows_fake,
)
window_rows = declare(
    "rows",
    "window_rows(Tensor window_table, Tensor request, Tensor positions, Tensor oldest, int window,"
    " int page_tokens, str impl) -> Tensor",
    fake=_window_rows_fake,
)
