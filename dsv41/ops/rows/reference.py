"""The rows of a step in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def why_not(hardware: object, record: str | None) -> str | None:
    return None


def _slots(table: Tensor, request: Tensor, index: Tensor, page_states: int) -> Tensor:
    """int64 slots of states `index` of request slots `request`."""
    return table[request, index // page_states].long() * page_states + index % page_states


def window_rows(
    window_table: Tensor, request: Tensor, positions: Tensor, oldest: Tensor, window: int, page_tokens: int
) -> Tensor:
    first = torch.maximum(positions - window + 1, oldest)
    wanted = first.unsqueeze(1) + torch.arange(window, device=positions.device)
    live = request.unsqueeze(1) >= 0
    seen = (wanted <= positions.unsqueeze(1)) & live
    slots = _slots(window_table, request.clamp(min=0).unsqueeze(1), torch.where(seen, wanted, 0), page_tokens)
    return torch.where(seen, slots, -1).to(torch.int32)


def _lookback(tokens: Tensor, request: Tensor, positions: Tensor, depth: int, image_bit: int) -> Tensor:
    """int64 [T, N-1]: token ids 1 ... N-1 back; -1 before the start and on image tokens."""
    back = positions.unsqueeze(1) - torch.arange(1, depth + 1, device=positions.device)
    ids = tokens[request.unsqueeze(1), back.clamp(min=0)]
    return torch.where((back >= 0) & (ids < image_bit), ids, -1).long()


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
    row, ends = torch.arange(num_rows, device=counts.device), num_tokens.long().cumsum(0)
    batch = torch.searchsorted(ends, row, right=True)
    live = batch < len(slots)
    batch = batch.clamp(max=len(slots) - 1)
    request = torch.where(live, slots[batch].long(), 0)
    offset = row - (ends - num_tokens)[batch]
    computed, hit_tokens, replay_start, _ = counts[request].unbind(1)
    positions = torch.where(live, computed + offset, 0)
    ids = tokens[request, positions]
    state_write, num_states = [], []
    for ratio in range(1, max_ratio + 1):
        closes = ((positions + 1) % ratio == 0) & (positions >= hit_tokens)
        own = _slots(page_table, request, positions // ratio, page_tokens // ratio)
        state_write.append(torch.where(closes & live, own, -1))
        num_states.append(torch.where(live, (positions + 1) // ratio, 0).to(torch.int32))
    second, open_row = positions % 2 == 1, request * open_rows + positions % open_rows
    before = request * open_rows + (positions - 1) % open_rows
    last = (offset >= num_tokens[batch] - open_rows) & live
    row_request = torch.where(live, request, -1)
    return (
        torch.where(live, ids & (image_bit - 1), 0).long(),
        positions,
        (ids >= image_bit) & live,
        torch.where(live.unsqueeze(1), _lookback(tokens, request, positions, lookback, image_bit), -1),
        row_request.to(torch.int32),
        torch.where(live, _slots(window_table, request, positions, page_tokens), -1),
        window_rows(window_table, row_request, positions, replay_start, window, page_tokens),
        torch.stack(state_write),
        torch.stack(num_states),
        torch.where(second & (offset > 0) & live, row - 1, -1),
        torch.where(second & (offset == 0) & (positions > replay_start) & live, before, -1),
        torch.where(~second & last, open_row, -1),
    )
