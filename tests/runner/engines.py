"""Small models and engines for the tests of the runner, and what must hold when an engine has no work."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dsv41.config import EngineConfig
from dsv41.model.caches import KVCaches
from dsv41.model.inputs import StepInputs, StepOutput
from dsv41.runner.engine import LLM
from dsv41.runner.load import Model, blueprint, load
from dsv41.runner.stepper import Stepper

PAGE = 4
# One layer of every kind: window, ratio-2 source, reuse, ratio-1 candidate source, reindex behind the last
# KV source.
SHORT = (
    '{"num_layers": 5, "ratios": [0, 2, 2, 1, 1], "kv_sources": [1, 3], "index_sources": [1, 3, 4],'
    ' "candidate_source": 3, "engram.layers": [2], "engram.num_rows": [1025], "draft.stages": 0}'
)
# Three layers behind the last KV source: with one, decoder replay changes no logits of the last row.
DEEP = (
    '{"num_layers": 6, "ratios": [0, 2, 1, 1, 1, 1], "kv_sources": [1, 2], "index_sources": [1, 2, 4],'
    ' "candidate_source": 2, "engram.layers": [1], "engram.num_rows": [1025], "draft.stages": 0}'
)
# The least that keeps both ratios, Engram and two layers behind the last KV source, for much traffic.
SMALL = (
    '{"num_layers": 4, "ratios": [2, 1, 1, 1], "kv_sources": [0, 1], "index_sources": [0, 1],'
    ' "candidate_source": 1, "engram.layers": [0], "engram.num_rows": [1025], "draft.stages": 0,'
    ' "window_tokens": 6, "num_experts": 4, "experts_per_token": 2, "sinkhorn_iters": 4}'
)
OVERRIDES = {"short": SHORT, "deep": DEEP, "small": SMALL}


def fresh_model(name: str = "tiny", page_tokens: int = PAGE, numerics: str | None = None) -> Model:
    overrides = [OVERRIDES[name]] if name in OVERRIDES else []
    preset = "tiny" if overrides else name
    return load(
        blueprint(
            preset_name=preset,
            overrides=overrides,
            device="cpu",
            page_tokens=page_tokens,
            numerics=numerics,
        )
    )


@cache
def model(name: str = "tiny") -> Model:
    """Shared by the tests that leave the weights alone."""
    return fresh_model(name)


def engine(chosen: Model | str = "tiny", run: Any = None, **changes: Any) -> LLM:
    numbers: dict[str, Any] = {"max_requests": 8, "max_context_tokens": 48, "max_batch_tokens": 64}
    found = model(chosen) if isinstance(chosen, str) else chosen
    return LLM(found, EngineConfig(page_tokens=found.layout.page_tokens, **numbers | changes), run)


def random_tokens(length: int, seed: int = 0) -> list[int]:
    """Ordinary ids of every small vocabulary."""
    return torch.randint(6, 380, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_all_given_back(used: LLM) -> None:
    """Nothing is held by anyone: pages, slots of the worker, sampling state."""
    assert not used.has_work
    assert used.step() == []  # tells the worker who is gone
    used.scheduler.check_integrity()
    for pool in (used.scheduler.prefix.global_pool, used.scheduler.prefix.window_pool):
        assert pool.num_used == 0
        assert pool.num_free == pool.num_pages - 1
    assert not list(used.scheduler.requests)
    worker = used.worker
    assert (worker.slots, worker.sampler.admitted, worker.embeddings) == ({}, {}, {})
    assert sorted(worker._free) == list(range(used.engine.max_requests))


@torch.inference_mode()
def full_logits(chosen: Model, tokens: Sequence[int]) -> Tensor:
    """The logits of all rows of one prompt, computed in one step by hand. [S, V]"""
    capacity = EngineConfig(
        page_tokens=chosen.layout.page_tokens, max_requests=1, max_context_tokens=max(48, len(tokens))
    )
    stepper = Stepper(chosen, capacity)
    return stepper.logits([(stepper.add(tokens), len(tokens))])[0]


class Spy:
    """The decoder, with every step and its output kept."""

    def __init__(self, chosen: Model) -> None:
        self.decoder = chosen.decoder
        self.calls: list[tuple[StepInputs, StepOutput]] = []

    def __call__(self, step: StepInputs, caches: KVCaches) -> StepOutput:
        output = self.decoder(step, caches)
        self.calls.append((step, output))
        return output

    @property
    def num_rows(self) -> int:
        return sum(step.num_rows for step, _ in self.calls)

    @torch.inference_mode()
    def logits(self, call: int = -1, row: int = -1) -> Tensor:
        return self.decoder.logits(self.calls[call][1].hidden[row : row + 1 or None])[0]


class NoModel:
    """In the decoder's place where only requests and pages matter: every hidden row is 0."""

    def __init__(self, chosen: Model) -> None:
        self.hidden_size = chosen.config.hidden_size
        self.dtype = chosen.decoder.context.dtype

    def __call__(self, step: StepInputs, caches: KVCaches) -> StepOutput:
        num_rows = step.num_rows if step.tail is None else len(step.tail.rows)
        hidden = torch.zeros(num_rows, self.hidden_size, dtype=self.dtype)
        return StepOutput(hidden, hidden[:, :0], torch.full((step.num_rows,), -1, dtype=torch.int32))
