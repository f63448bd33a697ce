"""One step's requests in their order, complete at birth: decode rows first, then chunks, each with its
counts.

Decoder replay: after the last KV source has published for all rows, the layers behind it run on the tail
alone: the rows from `tail_start = num_prompt - window` on, which is a property of the prompt and not of its
chunks. Their window starts there too (spec/model.md 9.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass
class Slot:
    """What the worker's host side knows of a request: counters that run ahead of the device's results.

    `length` counts known tokens and those sampled but not yet read back; the request samples when a step
    computes its last row. Decoder replay skips rows below `tail_start` behind the last KV source."""

    request_id: int
    index: int
    num_prompt: int
    length: int
    num_computed: int
    tail_start: int
    num_pages: int
    num_window_pages: int
    prompt_logprobs: int | None = None  # alternatives wanted beside each prompt token
    drafts: tuple[int, ...] = ()  # guesses in the step under way: `length` counts them until it is settled

    def settle(self, num_accepted: int) -> None:
        """The results of a step with drafts are known: the rows of the others do not count."""
        self.num_computed -= len(self.drafts) - num_accepted
        self.length, self.drafts = self.num_computed + 1, ()


@dataclass(frozen=True)
class Batch:
    """B requests, T rows, of which the layers behind the last KV source compute T' (`tail_rows` int64 [T']).

    `sample_rows` int64 [S] are the rows of `StepOutput.hidden` (T' of them) that are sampled from, for the
    requests `sampled` (numbers within the batch). A request with drafts has a row for each of them and one
    more; `sample_index` int64 [S] counts them from 0.
    """

    slots: tuple[Slot, ...]
    counts: NDArray  # int64 [B]
    tail_rows: NDArray
    sample_rows: NDArray
    sampled: tuple[int, ...]
    sample_index: NDArray

    @property
    def num_drafts(self) -> NDArray:
        """int64 [B]"""
        return np.array([len(slot.drafts) for slot in self.slots], dtype=np.int64)

    @property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    @property
    def has_tail(self) -> bool:
        """Whether a request is still in a prompt whose tail starts behind its first token: rows are skipped,
        or their window begins at the tail. From the last prompt token on neither can happen."""
        return any(slot.tail_start and slot.num_computed < slot.num_prompt - 1 for slot in self.slots)

    def hidden_rows(self, number: int) -> NDArray:
        """The rows of `hidden` that belong to request `number` of the batch."""
        first = int(self.counts[:number].sum())
        low, high = np.searchsorted(self.tail_rows, (first, first + int(self.counts[number])))
        return np.arange(low, high)


def make_batch(slots: list[Slot], counts: list[int]) -> Batch:
    """Order the requests (one-row ones first, then by rows) and find the rows that go on and those that
    sample."""
    order = sorted(range(len(slots)), key=lambda i: counts[i])
    chosen, rows = tuple(slots[i] for i in order), np.array([counts[i] for i in order], dtype=np.int64)
    ends = rows.cumsum()
    skipped = np.array([max(0, slot.tail_start - slot.num_computed) for slot in chosen])
    kept = [
        np.arange(end - max(0, count - skip), end)
        for end, count, skip in zip(ends, rows, skipped, strict=True)
    ]
    tail_ends = np.cumsum([len(part) for part in kept])
    sampled = [
        (number, index)
        for number, (slot, count) in enumerate(zip(chosen, rows, strict=True))
        if slot.num_computed + count == slot.length
        for index in range(1 + len(slot.drafts))
    ]
    sample_rows = [tail_ends[number] - 1 - len(chosen[number].drafts) + index for number, index in sampled]
    return Batch(
        chosen,
        rows,
        np.concatenate(kept),
        np.array(sample_rows, dtype=np.int64),
        tuple(number for number, _ in sampled),
        np.array([index for _, index in sampled], dtype=np.int64),
    )
