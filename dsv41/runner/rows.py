"""The rows of a step, computed on the device from the request state: once a step, never per layer. Nothing
here reads the device from the host."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsv41.config import ModelConfig
from dsv41.model.inputs import AttnMetadata, StepInputs
from dsv41.model.layout import OPEN_ROWS, CacheLayout
from dsv41.ops.rows.op import step_rows, window_rows
from dsv41.runner.state import IMAGE_BIT, RequestState


def compute_rows(
    state: RequestState,
    slots: Tensor,
    counts: Tensor,
    num_rows: int,
    config: ModelConfig,
    layout: CacheLayout,
    impl: str = "reference",
) -> StepInputs:
    """The inputs of a step that computes the next `counts[b]` tokens of request slot `slots[b]`, in that
    order (ops/rows/op.py).

    slots, counts: integers [B]. num_rows: known to the host, at least the sum of counts; the rows above it
    are padding. Positions come from the device's own `num_computed`."""
    ratios = sorted({ratio for ratio in config.ratios if ratio})
    ids, positions, is_image, lookback, request, write, read, state_write, num_states, *partners = step_rows(
        state.tokens,
        state.page_table,
        state.window_table,
        state.counts,
        slots,
        counts,
        num_rows,
        config.window_tokens,
        max(config.engram.max_ngram - 1, 1),
        layout.page_tokens,
        OPEN_ROWS,
        IMAGE_BIT,
        max(ratios, default=1),
        impl,
    )
    return StepInputs(
        token_ids=ids,
        positions=positions,
        is_image=is_image,
        lookback=lookback,
        attention=AttnMetadata(
            row_request=request,
            page_table=state.page_table,
            window_write=write,
            window_read=read,
            state_write={ratio: state_write[ratio - 1] for ratio in ratios},
            num_states={ratio: num_states[ratio - 1] for ratio in ratios},
            partner_row=partners[0],
            partner_slot=partners[1],
            open_slot=partners[2],
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
    step: StepInputs,
    state: RequestState,
    config: ModelConfig,
    layout: CacheLayout,
    impl: str = "reference",
) -> StepInputs:
    """The same rows without window rows below the start of their request's tail (decoder replay)."""
    request = step.attention.row_request
    _, _, replay_start, tail_start = state.counts[request.clamp(min=0)].unbind(1)
    read = window_rows(
        state.window_table,
        request,
        step.positions,
        torch.maximum(replay_start, tail_start),
        config.window_tokens,
        layout.page_tokens,
        impl,
    )
    return replace(step, attention=replace(step.attention, window_read=read))
