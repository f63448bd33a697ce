"""What one step feeds the model: its rows, and where their state lives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttnMetadata:
    """Where a step's rows read and write cached state. T rows, B requests, W window, P pages of a request.

    A padding row has request -1, slots -1, counts 0: it writes nothing and sees nothing.
    """

    row_request: Tensor  # int32 [T], the row of `page_table`; -1 for a padding row
    page_table: Tensor  # int32 [B, P], the global group's pages of every request
    window_write: Tensor  # int64 [T], the row's own slot in the window caches
    window_read: Tensor  # int32 [T, W], window slots oldest first, then -1
    state_write: dict[int, Tensor]  # by ratio: int64 [T], slot of the state that the row closes, else -1
    num_states: dict[int, Tensor]  # by ratio: int32 [T], states the row sees: (position + 1) // ratio
    partner_row: Tensor  # int64 [T], the row of this step that holds position - 1, else -1
    partner_slot: (
        Tensor  # int64 [T], the open-group slot that keeps position - 1 since a step before, else -1
    )
    open_slot: Tensor  # int64 [T], the open-group slot that keeps this row for a later step, else -1


@dataclass(frozen=True)
class Tail:
    """Decoder replay: the rows that go on behind the last KV source, int64 [t], as the steps of the last KV
    source (`first`, with the window of the whole step) and of the layers behind it (`rest`, whose window
    starts at the tail)."""

    rows: Tensor
    first: StepInputs
    rest: StepInputs


@dataclass(frozen=True)
class StepInputs:
    """T token rows of any mixture of requests, in any order.

    `embeddings` replaces the token embedding on image rows; None in a step without images. With a `tail`, the
    layers behind the last KV source compute its rows alone."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], absolute
    is_image: Tensor  # bool [T]
    lookback: Tensor  # int64 [T, N-1], token ids 1..N-1 back; -1 before the start and on image tokens
    attention: AttnMetadata
    embeddings: Tensor | None = None  # [T, D]
    tail: Tail | None = None

    def with_tail(self, tail: Tail) -> StepInputs:
        return replace(self, tail=tail)

    def with_embeddings(self, embeddings: Tensor) -> StepInputs:
        return replace(self, embeddings=embeddings)

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def row_tensors(self) -> list[Tensor]:
        """The tensors whose first dimension is the token row."""
        meta = self.attention
        tensors = [self.token_ids, self.positions, self.is_image, self.lookback, meta.row_request]
        tensors += [
            meta.window_write,
            meta.window_read,
            *meta.state_write.values(),
            *meta.num_states.values(),
        ]
        tensors += [meta.partner_row, meta.partner_slot, meta.open_slot]
        if self.embeddings is not None:
            tensors.append(self.embeddings)
        if self.tail is not None:
            tensors += [self.tail.rows, *self.tail.first.row_tensors(), *self.tail.rest.row_tensors()]
        return tensors


@dataclass(frozen=True)
class StepOutput:
    """`hidden [t, D]` after the final norm, of all rows or of the step's tail; `features [t, targets * D]`
    for the draft head (no columns without it); `fault_layer [T]` int32: the first layer whose output or
    index scores were not finite, -1 if all were."""

    hidden: Tensor
    features: Tensor
    fault_layer: Tensor


@dataclass(frozen=True)
class Rotations:
    """cos | sin of a step, float32 [T, r]: the plain table at the row's position (window-only layers), the
    compressed table at the row's position, and by ratio the compressed table at the first token of the row's
    group."""

    window: Tensor
    compressed: Tensor
    group: dict[int, Tensor]


@dataclass(frozen=True)
class Selection:
    """What an index source chose for the layers that share it: `states` and `slots`, int32 [T, K]."""

    states: Tensor
    slots: Tensor


def empty_index(rows_like: Tensor) -> Tensor:
    """int32 [T, 0]: the index list of a layer that selects nothing."""
    return torch.empty((rows_like.shape[0], 0), dtype=torch.int32, device=rows_like.device)
