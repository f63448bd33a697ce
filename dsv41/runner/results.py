"""From a step's device tensors to one `TokenResult` per request that got a token or met a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from dsv41.runner.async_output import AsyncResult
from dsv41.runner.batch import Batch, Slot
from dsv41.runner.sampler import LogProbs, Sampled
from dsv41.runner.schedule import PromptLogProb, TokenResult


def first_faults(fault_layers: Tensor, batch: Batch) -> list[int]:
    """By request of a batch: its first faulty layer, -1 without one. fault_layers int32 [T], on the host."""
    rows = np.split(fault_layers.numpy(), batch.counts.cumsum()[:-1])
    return [int(min(own[own >= 0], default=-1)) for own in rows]


@dataclass(frozen=True)
class Gathered:
    """What `results` needs of a step besides the tensors on their way."""

    batch: Batch
    number: int  # of the step
    top_n: tuple[int, ...]  # alternatives asked for, by sampled request; -1: no log-probability
    prompt_of: dict[int, int]  # by number in the batch: the first prompt position that gets log-probabilities


def gather(
    gathered: Gathered, faults: Tensor, sampled: Sampled, prompt: Sequence[tuple[Tensor, LogProbs]]
) -> AsyncResult:
    """Send a step's results on their way."""
    tensors = {"faults": faults, "tokens": sampled.tokens, "nan": sampled.nan}
    if sampled.logprobs is not None:
        tensors |= _named("sampled", sampled.logprobs)
    for number, (ids, logprobs) in zip(gathered.prompt_of, prompt, strict=True):
        tensors |= {f"prompt{number}.ids": ids} | _named(f"prompt{number}", logprobs)
    return AsyncResult(tensors, lambda host: results(gathered, host))


def _named(name: str, logprobs: LogProbs) -> dict[str, Tensor]:
    return {
        f"{name}.chosen": logprobs.chosen,
        f"{name}.ranks": logprobs.ranks,
        f"{name}.top_ids": logprobs.top_ids,
        f"{name}.top": logprobs.top,
    }


def _top(host: dict[str, Tensor], name: str, row: int, top_n: int) -> tuple[tuple[int, float], ...]:
    ids, values = host[f"{name}.top_ids"][row].tolist(), host[f"{name}.top"][row].tolist()
    return tuple(zip(ids, values, strict=True))[:top_n]


def _prompt(host: dict[str, Tensor], number: int, first: int) -> tuple[PromptLogProb, ...]:
    name = f"prompt{number}"
    ids = host[f"{name}.ids"].tolist()
    chosen, ranks = host[f"{name}.chosen"].tolist(), host[f"{name}.ranks"].tolist()
    width = host[f"{name}.top"].shape[1]
    return tuple(
        PromptLogProb(first + row, ids[row], chosen[row], ranks[row], _top(host, name, row, width))
        for row in range(len(ids))
    )


def results(gathered: Gathered, host: dict[str, Tensor]) -> list[TokenResult]:
    """Results for each sampled request, each faulty one, and each that got prompt log-probabilities."""
    batch, made = gathered.batch, []
    nan, faults = host["nan"].tolist(), first_faults(host["faults"], batch)
    rows_of: dict[int, list[int]] = {number: [] for number in range(len(batch.slots))}
    for row, number in enumerate(batch.sampled):
        rows_of[number].append(row)
    for number, slot in enumerate(batch.slots):
        rows = rows_of[number]
        first = gathered.prompt_of.get(number)
        prompt = _prompt(host, number, first) if first is not None else ()
        if faults[number] >= 0 or any(nan[row] for row in rows):
            where = f"layer {faults[number]}" if faults[number] >= 0 else "the logits"
            error = f"not a finite number in step {gathered.number}, {where}"
            made.append(TokenResult(slot.request_id, -1, error))
        elif rows:
            tokens = [_token(gathered, host, slot, row) for row in rows[: _num_tokens(slot, host, rows)]]
            if slot.drafts:
                slot.settle(len(tokens) - 1)
            made += [replace(tokens[0], prompt_logprobs=prompt), *tokens[1:]]
        elif prompt:
            made.append(TokenResult(slot.request_id, -1, prompt_logprobs=prompt))
    return made


def _num_tokens(slot: Slot, host: dict[str, Tensor], rows: list[int]) -> int:
    """The drafts that the model drew itself, and the token after them."""
    pairs = enumerate(zip(slot.drafts, rows, strict=False))
    return next((i for i, (draft, row) in pairs if draft != host["tokens"][row]), len(slot.drafts)) + 1


def _token(gathered: Gathered, host: dict[str, Tensor], slot: Slot, row: int) -> TokenResult:
    token = int(host["tokens"][row])
    if gathered.top_n[row] < 0:
        return TokenResult(slot.request_id, token)
    return TokenResult(
        slot.request_id,
        token,
        logprob=float(host["sampled.chosen"][row]),
        rank=int(host["sampled.ranks"][row]),
        top_logprobs=_top(host, "sampled", row, gathered.top_n[row]),
    )
