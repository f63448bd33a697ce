"""The rows of a step, computed on the device from the request state: once a step, never per layer.

T token rows, B requests of the batch, W window, N longest n-gram. Nothing here reads the device from the
host.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsv41.config import ModelConfig
from dsv41.model.inputs import AttnMetadata, StepInputs
from dsv41.model.layout import OPEN_ROWS, CacheLayout
from dsv41.runner.state import IMAGE_BIT, RequestState


def _slots(table: Tensor, request: Tensor, index: Tensor, page_states: int) -> Tensor:
    """int64 slots of states `index` of request slots `request`, by a page table int32 [R, P]."""
    return table[request, index // page_states].long() * page_states + index % page_states


def _window_read(
    state: RequestState, request: Tensor, positions: Tensor, oldest: Tensor, window: int, page_tokens: int
) -> Tensor:
    """int32 [T, W]: window slots of positions max(oldest, p - W + 1) ... p, then -1."""
    first = torch.maximum(positions - window + 1, oldest)
    wanted = first.unsqueeze(1) + torch.arange(window, device=positions.device)
    seen = wanted <= positions.unsqueeze(1)
    wanted = torch.where(seen, wanted, positions.unsqueeze(1))
    slots = _slots(state.window_table, request.unsqueeze(1), wanted, page_tokens)
    return torch.where(seen, slots, -1).to(torch.int32)


def _lookback(state: RequestState, request: Tensor, positions: Tensor, depth: int) -> Tensor:
    """int64 [T, N-1]: token ids 1 ... N-1 back; -1 before the start and on image tokens."""
    back = positions.unsqueeze(1) - torch.arange(1, depth + 1, device=positions.device)
    tokens = state.tokens[request.unsqueeze(1), back.clamp(min=0)]
    return torch.where((back >= 0) & (tokens < IMAGE_BIT), tokens, -1).long()


def compute_rows(
    state: RequestState,
    slots: Tensor,
    counts: Tensor,
    num_rows: int,
    config: ModelConfig,
    layout: CacheLayout,
) -> StepInputs:
    """The inputs of a step that computes the next `counts[b]` tokens of request slot `slots[b]`, in that
    order.

    slots, counts: int64 [B]; num_rows = sum of counts, known to the host. Positions come from the device's
    own `num_computed`."""
    device, page_tokens = slots.device, layout.page_tokens
    batch = torch.repeat_interleave(torch.arange(len(slots), device=device), counts, output_size=num_rows)
    row = torch.arange(num_rows, device=device)
    request = slots[batch]
    offset = row - (counts.cumsum(0) - counts)[batch]
    computed, hit_tokens, replay_start, _ = state.counts[request].unbind(1)
    positions = computed + offset
    tokens = state.tokens[request, positions]
    state_write, num_states = {}, {}
    for ratio in sorted({ratio for ratio in config.ratios if ratio}):
        closes = ((positions + 1) % ratio == 0) & (positions >= hit_tokens)
        own = _slots(state.page_table, request, positions // ratio, page_tokens // ratio)
        state_write[ratio] = torch.where(closes, own, -1)
        num_states[ratio] = ((positions + 1) // ratio).to(torch.int32)
    second, open_row = positions % 2 == 1, request * OPEN_ROWS + positions % OPEN_ROWS
    before = request * OPEN_ROWS + (positions - 1) % OPEN_ROWS
    last = offset >= (counts[batch] - OPEN_ROWS)
    return StepInputs(
        token_ids=(tokens & (IMAGE_BIT - 1)).long(),
        positions=positions,
        is_image=tokens >= IMAGE_BIT,
        lookback=_lookback(state, request, positions, max(config.engram.max_ngram - 1, 1)),
        attention=AttnMetadata(
            row_request=request.to(torch.int32),
            page_table=state.page_table,
            window_write=_slots(state.window_table, request, positions, page_tokens),
            window_read=_window_read(
                state, request, positions, replay_start, config.window_tokens, page_tokens
            ),
            state_write=state_write,
            num_states=num_states,
            partner_row=torch.where(second & (offset > 0), row - 1, -1),
            partner_slot=torch.where(second & (offset == 0) & (positions > replay_start), before, -1),
            open_slot=torch.where(~second & last, open_row, -1),
        ),
    )


def select_rows(step: StepInputs, rows: Tensor) -> StepInputs:
    """The step of some of its rows, in the order of `rows` int64 [t]. They publish no states: those of the
    whole step are published already."""
    meta = step.attention
    nothing = torch.full_like(rows, -1)
    return StepInputs(
        token_ids=step.token_ids[rows],
        positions=step.positions[rows],
        is_image=step.is_image[rows],
        lookback=step.lookback[rows],
        embeddings=None if step.embeddings is None else step.embeddings[rows],
        attention=AttnMetadata(
            row_request=meta.row_request[rows],
            page_table=meta.page_table,
            window_write=meta.window_write[rows],
            window_read=meta.window_read[rows],
            state_write=dict.fromkeys(meta.state_write, nothing),
            num_states={ratio: count[rows] for ratio, count in meta.num_states.items()},
            partner_row=nothing,
            partner_slot=nothing,
            open_slot=nothing,
        ),
    )


def trim_window(
    step: StepInputs, state: RequestState, config: ModelConfig, layout: CacheLayout
) -> StepInputs:
    """The same rows without window rows below the start of their request's tail (decoder replay)."""
    request = step.attention.row_request.long()
    _, _, replay_start, tail_start = state.counts[request].unbind(1)
    read = _window_read(
        state,
        request,
        step.positions,
        torch.maximum(replay_start, tail_start),
        config.window_tokens,
        layout.page_tokens,
    )
    return replace(step, attention=replace(step.attention, window_read=read))


def pad_rows(step: StepInputs, num_rows: int) -> StepInputs:
    """The step with padding rows behind its own: request -1, slots -1, counts 0. Raises ValueError for fewer
    rows."""
    more = num_rows - step.num_rows
    if more < 0:
        raise ValueError(f"a step of {step.num_rows} rows does not fit a bucket of {num_rows}")

    def pad(rows: Tensor, value: int = -1) -> Tensor:
        return torch.cat((rows, rows.new_full((more, *rows.shape[1:]), value)))

    meta = step.attention
    return StepInputs(
        token_ids=pad(step.token_ids, 0),
        positions=pad(step.positions, 0),
        is_image=pad(step.is_image, 0),
        lookback=pad(step.lookback),
        embeddings=None if step.embeddings is None else pad(step.embeddings, 0),
        tail=step.tail,
        attention=AttnMetadata(
            row_request=pad(meta.row_request),
            page_table=meta.page_table,
            window_write=pad(meta.window_write),
            window_read=pad(meta.window_read),
            state_write={ratio: pad(slots) for ratio, slots in meta.state_write.items()},
            num_states={ratio: pad(count, 0) for ratio, count in meta.num_states.items()},
            partner_row=pad(meta.partner_row),
            partner_slot=pad(meta.partner_slot),
            open_slot=pad(meta.open_slot),
        ),
    )
