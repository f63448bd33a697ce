"""The rows of a step, built on the host in numpy from lists of tokens and pages: what `compute_rows` must
equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv41.config import ModelConfig
from dsv41.model.inputs import AttnMetadata, StepInputs
from dsv41.model.layout import OPEN_ROWS, CacheLayout

Rows = dict[str, NDArray]


@dataclass
class Request:
    """One request on the host. Its window has no rows below `replay_start`, and behind the last KV source
    none below `tail_start`; it writes no states of tokens below `hit_tokens`."""

    tokens: list[int]
    slot: int = 0
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)
    hit_tokens: int = 0
    replay_start: int = 0
    tail_start: int = 0
    image_rows: Sequence[bool] = ()
    embeddings: Tensor | None = None


def page_slots(pages: Sequence[int], positions: NDArray, page_states: int) -> NDArray:
    """Slots of states `positions` of one request: page * page_states + offset, int64."""
    table = np.asarray(pages, dtype=np.int64)
    return table[positions // page_states] * page_states + positions % page_states


def _window_read(request: Request, positions: NDArray, window: int, page_tokens: int) -> NDArray:
    """int64 [n, W]: slots of positions max(replay_start, p - W + 1) ... p, oldest first, then -1."""
    oldest = np.maximum(positions - window + 1, request.replay_start)
    wanted = oldest[:, None] + np.arange(window)
    seen = wanted <= positions[:, None]
    slots = page_slots(request.window_pages, np.where(seen, wanted, positions[:, None]), page_tokens)
    return np.where(seen, slots, -1)


def _lookback(tokens: NDArray, positions: NDArray, depth: int) -> NDArray:
    """int64 [n, depth]: token ids 1 ... depth back, -1 before the start (image tokens are -1 already)."""
    back = positions[:, None] - np.arange(1, depth + 1)
    return np.where(back >= 0, tokens[np.maximum(back, 0)], -1)


def _open_groups(request: Request, positions: NDArray, first_row: int) -> Rows:
    """Partners of the rows that close a pair, and where those that open one are kept: the last `OPEN_ROWS`
    rows, any of which may turn out to be the request's last (drafts)."""
    start, last = int(positions[0]), int(positions[-1])
    closes, here = positions % 2 == 1, positions > start
    own = request.slot * OPEN_ROWS + positions % OPEN_ROWS
    before = request.slot * OPEN_ROWS + (positions - 1) % OPEN_ROWS
    return {
        "partner_row": np.where(closes & here, first_row + np.arange(len(positions)) - 1, -1),
        "partner_slot": np.where(closes & ~here & (positions - 1 >= request.replay_start), before, -1),
        "open_slot": np.where((positions > last - OPEN_ROWS) & ~closes, own, -1),
    }


def _request_rows(
    request: Request, count: int, first_row: int, config: ModelConfig, layout: CacheLayout
) -> Rows:
    """All row fields of the next `count` tokens of one request."""
    positions = np.arange(request.num_computed, request.num_computed + count, dtype=np.int64)
    tokens = np.asarray(request.tokens, dtype=np.int64)
    images = np.zeros(len(tokens), dtype=bool)
    images[: len(request.image_rows)] = request.image_rows
    page_tokens = layout.page_tokens
    rows: Rows = {
        "token_ids": tokens[positions],
        "positions": positions,
        "is_image": images[positions],
        "lookback": _lookback(np.where(images, -1, tokens), positions, max(config.engram.max_ngram - 1, 1)),
        "row_request": np.full(count, request.slot),
        "window_write": page_slots(request.window_pages, positions, page_tokens),
        "window_read": _window_read(request, positions, config.window_tokens, page_tokens),
        **_open_groups(request, positions, first_row),
    }
    for ratio in sorted({ratio for ratio in config.ratios if ratio}):
        slots = page_slots(request.pages, positions // ratio, page_tokens // ratio)
        writes = ((positions + 1) % ratio == 0) & (positions >= request.hit_tokens)
        rows[f"state_write_{ratio}"] = np.where(writes, slots, -1)
        rows[f"num_states_{ratio}"] = (positions + 1) // ratio
    return rows


PADDING = {"token_ids": 0, "positions": 0, "is_image": False}  # every other field of a padding row is -1 or 0


def _pad(name: str, rows: NDArray, num_rows: int) -> NDArray:
    value = PADDING.get(name, 0 if name.startswith("num_states") else -1)
    padding = np.full((num_rows - len(rows), *rows.shape[1:]), value, dtype=rows.dtype)
    return np.concatenate((rows, padding))


def _embeddings(scheduled: Sequence[tuple[Request, int]], num_rows: int, hidden: int) -> Tensor | None:
    if all(request.embeddings is None for request, _ in scheduled):
        return None
    parts = []
    for request, count in scheduled:
        part = torch.zeros((count, hidden))
        if request.embeddings is not None:
            own = request.embeddings[request.num_computed : request.num_computed + count]
            part[: len(own)] = own
        parts.append(part)
    rows = torch.cat(parts)
    return torch.nn.functional.pad(rows, (0, 0, 0, num_rows - len(rows)))


def build_step(
    scheduled: Sequence[tuple[Request, int]],
    config: ModelConfig,
    layout: CacheLayout,
    *,
    max_requests: int,
    max_pages: int,
    num_rows: int | None = None,
) -> StepInputs:
    """The inputs of a step that computes the next `count` tokens of every scheduled request, in that order,
    padded to `num_rows`. The page table, int32 [max_requests, max_pages], has the rows of these requests."""
    pieces, first_row = [], 0
    table = np.zeros((max_requests, max_pages), dtype=np.int32)
    for request, count in scheduled:
        pieces.append(_request_rows(request, count, first_row, config, layout))
        table[request.slot, : len(request.pages)] = request.pages
        first_row += count
    num_rows = num_rows or first_row
    rows = {name: _pad(name, np.concatenate([p[name] for p in pieces]), num_rows) for name in pieces[0]}

    def put(name: str, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(rows[name])).to(dtype)

    ratios = sorted({ratio for ratio in config.ratios if ratio})
    embeddings = _embeddings(scheduled, num_rows, config.hidden_size)
    return StepInputs(
        token_ids=put("token_ids"),
        positions=put("positions"),
        is_image=put("is_image", torch.bool),
        lookback=put("lookback"),
        embeddings=None if embeddings is None else embeddings.to(getattr(torch, config.numerics.dtype_name)),
        attention=AttnMetadata(
            row_request=put("row_request", torch.int32),
            page_table=torch.from_numpy(table),
            window_write=put("window_write"),
            window_read=put("window_read", torch.int32),
            state_write={ratio: put(f"state_write_{ratio}") for ratio in ratios},
            num_states={ratio: put(f"num_states_{ratio}", torch.int32) for ratio in ratios},
            partner_row=put("partner_row"),
            partner_slot=put("partner_slot"),
            open_slot=put("open_slot"),
        ),
    )


def tail_rows(scheduled: Sequence[tuple[Request, int]]) -> list[int]:
    """The rows of a step that go on behind the last KV source."""
    kept = [
        position >= request.tail_start
        for request, count in scheduled
        for position in range(request.num_computed, request.num_computed + count)
    ]
    return [row for row, keep in enumerate(kept) if keep]


def behind_the_last_source(scheduled: Sequence[tuple[Request, int]]) -> list[tuple[Request, int]]:
    """The same requests with the window that their rows have there."""
    return [
        (replace(request, replay_start=max(request.replay_start, request.tail_start)), count)
        for request, count in scheduled
    ]
