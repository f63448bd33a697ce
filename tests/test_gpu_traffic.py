"""A compiled, captured engine under random traffic on one SM90 GPU: every request gets the tokens that the
eager engine gives it, and once the engine is ready nothing is compiled and no memory is taken any more."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from hopper import kernel_model, needs_hopper

from dsv41.config import EngineConfig
from dsv41.graphs.module import CompiledModule
from dsv41.runner.engine import LLM
from dsv41.runner.request import Request, SamplingParams

pytestmark = needs_hopper

REQUESTS, SHAPES = 300, 200
LONGEST = 320  # of a prompt, on the far side of the window (128) and of two top-k (64) states
CAPACITY = {"max_context_tokens": 512, "max_batch_tokens": 256, "deterministic": True, "asynchronous": True}
Job = tuple[tuple[int, ...], SamplingParams]


def prompt(draw: random.Random) -> tuple[int, ...]:
    """Short ones mostly, so that many requests decode together."""
    length = draw.randint(1, LONGEST if draw.random() < 0.25 else 40)
    return tuple(draw.randrange(500) for _ in range(length))


@cache
def jobs() -> tuple[Job, ...]:
    draw, found = random.Random(5), []
    for number in range(REQUESTS):
        params = SamplingParams(max_tokens=draw.randint(1, 12), ignore_eos=True)
        if number % 3 == 1:
            params = SamplingParams(params.max_tokens, temperature=1.0, seed=number, top_k=30)
        found.append((prompt(draw), params))
    return tuple(found)


@cache
def eager_answers() -> tuple[tuple[int, ...], ...]:
    """Every job's tokens in an eager engine that has room for 32 at a time."""
    with LLM(kernel_model(), EngineConfig(max_requests=32, **CAPACITY)) as llm:
        answers = llm.generate([job[0] for job in jobs()], [job[1] for job in jobs()])
    return tuple(answer.tokens for answer in answers)


def ready(max_requests: int = 8, **choices: object) -> LLM:
    """A compiled engine whose decodes are captured, warm, and which refuses to compile from now on."""
    engine = EngineConfig(
        max_requests=max_requests, graph_rows=max_requests, late_compile="error", **CAPACITY | choices
    )
    llm = LLM(kernel_model(engine.deterministic), engine, CompiledModule(kernel_model().decoder))
    llm.warm_up()
    return llm


@pytest.mark.parametrize("pages", [None, 10])
def test_traffic_gets_the_tokens_of_the_eager_engine(pages: int | None) -> None:
    """300 requests that arrive and are cancelled at random; with few pages they are also preempted."""
    draw, requests, cancelled = random.Random(7), list[Request](), set[Request]()
    with ready(**{} if pages is None else {"global_pages": pages}) as llm:
        while len(requests) < REQUESTS or llm.has_work:
            while len(requests) < REQUESTS and llm.metrics.waiting < 4 and draw.random() < 0.8:
                requests.append(llm.add(*jobs()[len(requests)]))
            if llm.scheduler.has_work and draw.random() < 0.03:
                cancelled.add(chosen := draw.choice(list(llm.scheduler.requests)))
                llm.abort(chosen)
            llm.step()
            llm.scheduler.check_integrity()
        assert (llm.metrics.preemptions > 0) == (pages is not None)
    assert 4 < sum(request.finish_reason == "abort" for request in requests) < REQUESTS // 4
    for request, answer in zip(requests, eager_answers(), strict=True):
        if request.finish_reason == "abort":
            assert request in cancelled
            answer = answer[: len(request.output)]
        assert tuple(request.output) == answer


def test_nothing_is_compiled_and_no_memory_taken_over_many_shapes() -> None:
    """200 different mixtures of prompts, chunks and decodes through a warm engine. `num_device_alloc` counts
    the memory that PyTorch asks of the driver; what one step frees serves the next."""
    draw, shapes = random.Random(9), set[tuple[int, ...]]()
    with ready() as llm:
        llm.generate([[1] * LONGEST] * 8, SamplingParams(max_tokens=8, ignore_eos=True))
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["num_device_alloc"]
        schedule = llm.scheduler.schedule

        def watched():
            output = schedule()
            shapes.add(tuple(sorted(output.num_tokens.values())))
            return output

        llm.scheduler.schedule = watched  # type: ignore[method-assign]
        while len(shapes) < SHAPES:
            while llm.metrics.waiting < 3:
                llm.add(prompt(draw), SamplingParams(max_tokens=draw.randint(1, 6), ignore_eos=True))
            llm.step()
        assert llm.metrics.late_compiles == 0
        assert torch.cuda.memory_stats()["num_device_alloc"] == before
