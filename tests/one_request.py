"""The steps of one request by hand: device state filled in place, and the rows computed from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv41.config import ModelConfig
from dsv41.model.inputs import StepInputs
from dsv41.model.layout import CacheLayout
from dsv41.runner.rows import compute_rows
from dsv41.runner.state import IMAGE_BIT, RequestState


def steps(
    tokens: Sequence[int],
    counts: Sequence[int],
    config: ModelConfig,
    layout: CacheLayout,
    *,
    slot: int = 0,
    start: int = 0,
    images: Sequence[bool] | None = None,
    window_pages: Sequence[int] | None = None,
) -> list[StepInputs]:
    """The steps that compute `counts` tokens, one after the other, from token `start` on. Page i of the
    global group is 2 + i; of the window the same in reverse order, unless `window_pages` are given."""
    num_pages = layout.global_pages(len(tokens))
    state = RequestState(slot + 1, len(tokens), num_pages, "cpu")
    marks = [IMAGE_BIT * image for image in images] if images is not None else [0] * len(tokens)
    state.tokens[slot] = torch.tensor(tokens) | torch.tensor(marks)
    state.page_table[slot] = torch.arange(2, 2 + num_pages)
    state.window_table[slot] = torch.tensor(window_pages or range(1 + num_pages, 1, -1))
    state.num_computed[slot] = start
    found = []
    for count in counts:
        step = compute_rows(state, torch.tensor([slot]), torch.tensor([count]), count, config, layout)
        found.append(step)
        state.num_computed[slot] += count
    return found
