"""Draft tokens at the worker's boundary: whatever is guessed, the tokens are those of plain decoding."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from dsv41.config import EngineConfig
from dsv41.model.caches import allocate_caches
from dsv41.runner.engine import LLM
from dsv41.runner.load import Model, blueprint, load
from dsv41.runner.request import SamplingParams
from dsv41.runner.schedule import NewRequest, RunningRequest, SchedulerOutput, TokenResult
from dsv41.runner.worker import Worker

CAPACITY = EngineConfig(max_requests=2, max_context_tokens=64, page_tokens=4)
PAGES = tuple(range(1, 17))  # a whole context for the one request
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, top_p=0.95, seed=9)
PROMPT = (5, 9, 200, 31, 77, 410, 12, 3, 3, 18, 240)


@cache
def model() -> Model:
    return load(blueprint(preset_name="tiny", device="cpu", page_tokens=4))


@cache
def plain(params: SamplingParams, length: int) -> tuple[int, ...]:
    return LLM(model(), CAPACITY).generate([PROMPT[:length]], params)[0].tokens


class Alone:
    """One request on a worker of its own, its tokens so far."""

    def __init__(self, params: SamplingParams, length: int) -> None:
        chosen = model()
        caches = allocate_caches(chosen.layout, 17, 17, 2, "cpu")
        self.worker = Worker(chosen, CAPACITY, caches, max_pages=16)
        new = NewRequest(0, PROMPT[:length], length, params, PAGES, PAGES)
        self.tokens: list[int] = []
        self.run(SchedulerOutput(new=(new,), num_tokens={0: length}))

    def run(self, output: SchedulerOutput) -> list[TokenResult]:
        self.worker.execute(output)
        results = self.worker.sample().get()
        self.tokens += [result.token for result in results]
        return results

    def step(self, drafts: tuple[int, ...] = ()) -> list[TokenResult]:
        running = RunningRequest(0, draft_tokens=drafts)
        return self.run(SchedulerOutput(running=(running,), num_tokens={0: 1 + len(drafts)}))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("length", [10, 11])
def test_every_accept_count_is_followed_by_plain_decoding(params: SamplingParams, length: int) -> None:
    """Five drafts, the first wrong one at every place, on odd and even positions; ten steps behind
    it. Catches a row kept beyond the accepted ones, a pair left open by a rejected row, a draft in
    Engram's history."""
    truth = plain(params, length)
    for accepted in range(6):
        alone = Alone(params, length)
        drafts = list(truth[1:6])
        if accepted < 5:
            drafts[accepted] = (drafts[accepted] + 1) % 500
        assert len(alone.step(tuple(drafts))) == accepted + 1
        for _ in range(10):
            alone.step()
        assert alone.tokens == list(truth[: len(alone.tokens)])


def test_random_guesses_change_nothing() -> None:
    """Many steps with drafts in a row, some right, some wrong, in company of nobody."""
    truth, draw = plain(SAMPLED, 10), torch.Generator().manual_seed(1)
    alone, several = Alone(SAMPLED, 10), 0
    while len(alone.tokens) < 24:
        here = len(alone.tokens)
        right = int(torch.randint(0, 5, (1,), generator=draw))
        results = alone.step((*truth[here : here + right], 499))
        several += len(results) > 1
    assert several > 2
    assert alone.tokens == list(truth[: len(alone.tokens)])


def test_what_drafts_cannot_do() -> None:
    alone = Alone(SamplingParams(max_tokens=30, repetition_penalty=1.5), 10)
    with pytest.raises(ValueError, match="penalties or a token mask"):
        alone.step((1, 2))
    alone = Alone(GREEDY, 10)
    with pytest.raises(ValueError, match="has 8 draft tokens and room for 7"):
        alone.step((1,) * 8)
    alone = Alone(GREEDY, 10)
    alone.worker.execute(SchedulerOutput(running=(RunningRequest(0, draft_tokens=(1,)),), num_tokens={0: 2}))
    unread = alone.worker.sample()
    with pytest.raises(ValueError, match="before its drafts' results are read"):
        alone.step()
    assert unread is not None
