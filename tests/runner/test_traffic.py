"""Two thousand requests at random: each gets the tokens that it gets alone, and nothing is left behind."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from engines import PAGE, assert_all_given_back, engine, random_tokens

from dsv41.runner.engine import LLM
from dsv41.runner.request import Request, SamplingParams

REQUESTS = 2000


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    params: SamplingParams


def settings(rng: random.Random) -> SamplingParams:
    """Greedy, drawn, cut, penalised, biased: what a caller may ask for, in any mixture."""
    params = SamplingParams(max_tokens=rng.randint(1, 6), ignore_eos=True)
    kind = rng.randrange(6)
    if kind == 1:
        params = replace(params, temperature=rng.choice([0.5, 1.0]), seed=rng.randrange(1 << 40))
    elif kind == 2:
        params = replace(params, temperature=1.3, seed=rng.randrange(9), top_k=20, top_p=0.9, min_p=0.01)
    elif kind == 3:
        params = replace(params, repetition_penalty=1.4, frequency_penalty=1.0, presence_penalty=-0.5)
    elif kind == 4:
        params = replace(params, logit_bias=dict.fromkeys(range(60, 90), 3.0), banned_ids=(70, 71))
    elif kind == 5:
        params = replace(params, temperature=0.8, seed=7, logprobs=2, ignore_eos=False)
    return params


@cache
def jobs() -> tuple[Job, ...]:
    """Different prompts and settings; prompts of one family share beginnings of every length."""
    rng, found = random.Random(1), []
    families = [random_tokens(24, 900 + number) for number in range(3)]
    for number in range(110):
        shared = rng.choice([0, 0, 0, 4, 7, 8, 12, 16, 21, 24])
        own = random_tokens(rng.randint(1, 6 if shared else 12), 2000 + number)
        found.append(Job((*rng.choice(families)[:shared], *own), settings(rng)))
    assert {len(job.prompt) for job in found} >= {1, 30}
    return tuple(found)


@cache
def alone(decoder_replay: bool) -> tuple[tuple[int, ...], ...]:
    """The answer of every job in roomy engines: no chunk, no preemption, no cache. A sample of them is equal
    to engines of one request."""
    used = engine(
        "small", max_requests=40, max_batch_tokens=1000, max_context_tokens=36, decoder_replay=decoder_replay
    )
    found = used.generate([job.prompt for job in jobs()], [job.params for job in jobs()])
    assert used.metrics.preemptions == used.metrics.cached_tokens == 0
    for number in range(0, len(jobs()), 12):
        single = engine("small", max_requests=1, max_context_tokens=36, decoder_replay=decoder_replay)
        (one,) = single.generate([jobs()[number].prompt], [jobs()[number].params])
        assert one.tokens == found[number].tokens
    assert len({one.tokens for one in found}) > 90, "equal answers hide a mix-up"
    return tuple(one.tokens for one in found)


def test_decoder_replay_is_seen_in_the_answers() -> None:
    """Otherwise the traffic below could not tell a wrong window behind the cut."""
    assert sum(a != b for a, b in zip(alone(False), alone(True), strict=True)) >= 5


@dataclass
class Expected:
    tokens: tuple[int, ...]
    reason: str


def with_stop(job: Job, answer: tuple[int, ...], rng: random.Random) -> tuple[SamplingParams, Expected]:
    """Some requests stop at a token of their own answer; what they give then is its beginning. A stop id
    changes no logits without `min_tokens`."""
    end = Expected(answer, "length" if len(answer) == job.params.max_tokens else "stop")
    if rng.random() < 0.7:
        return job.params, end
    stop = rng.choice(answer)
    length = answer.index(stop) + 1
    return replace(job.params, stop_ids=(stop,)), Expected(answer[:length], "stop")


class Traffic:
    """Random arrivals and cancellations on one engine, checked after every step."""

    def __init__(self, seed: int, **changes: Any) -> None:
        self.rng = random.Random(seed)
        self.used: LLM = engine("small", **{"max_context_tokens": 36} | changes)
        self.answers = alone(self.used.engine.decoder_replay)
        self.expected: dict[Request, Expected] = {}
        self.seen: dict[Request, list[int]] = {}
        self.cancelled: set[Request] = set()
        self.reached: Counter[str] = Counter()

    def arrive(self) -> None:
        number = self.rng.randrange(len(jobs()))
        params, expected = with_stop(jobs()[number], self.answers[number], self.rng)
        request = self.used.add(jobs()[number].prompt, params)
        self.expected[request], self.seen[request] = expected, []

    def cancel(self) -> None:
        request = self.rng.choice(list(self.used.scheduler.requests))
        state = "preempted" if request.num_preemptions and request.pages is None else request.status
        in_flight = request.num_pending > 0
        mid_prefill = request.pages is not None and request.num_computed < request.num_prompt
        self.reached[f"cancelled {state}"] += 1
        self.reached["cancelled in flight"] += in_flight
        self.reached["cancelled in mid-prefill"] += mid_prefill
        self.cancelled.add(request)
        self.used.abort(request)

    def step(self) -> None:
        used, before = self.used, self.used.metrics
        rows = self.rows_of_step()
        scheduler = used.scheduler
        scheduler.check_integrity()
        after = used.metrics
        self.reached["preempted"] += after.preemptions - before.preemptions
        self.reached["mixed"] += len({count > 1 for count in rows.values()}) == 2
        self.reached["chunks"] += any(
            0 < request.num_computed < request.num_prompt for request in scheduler.running
        )
        assert sum(rows.values()) <= used.engine.max_batch_tokens
        if not rows:
            assert not scheduler.running or used.engine.asynchronous, "an idle step with work to do"
        left = used.engine.max_batch_tokens - sum(rows.values())
        if scheduler.waiting and left and len(scheduler.running) < used.engine.max_requests:
            self.reached["blocked"] += 1

    def rows_of_step(self) -> dict[int, int]:
        rows: dict[int, int] = {}
        used, schedule = self.used, self.used.scheduler.schedule

        def watched():
            output = schedule()
            rows.update(output.num_tokens)
            self.may_wait(output.total_tokens, len(output.preempted))
            return output

        used.scheduler.schedule = watched  # type: ignore[method-assign]
        events = used.step()
        used.scheduler.schedule = schedule  # type: ignore[method-assign]
        for event in events:
            assert event.request not in self.cancelled, "a cancelled request gets an event"
            assert event.result.error is None
            self.seen[event.request].append(event.result.token)
        return rows

    def may_wait(self, num_rows: int, preempted: int) -> None:
        """The first in the queue waits for a reason (tests/runner/test_scheduler.py says which there are)."""
        scheduler, capacity = self.used.scheduler, self.used.engine
        left = capacity.max_batch_tokens - num_rows
        full = len(scheduler.running) == capacity.max_requests
        if not scheduler.waiting or not left or preempted or full:
            return
        first, prefix = scheduler.waiting[0], scheduler.prefix
        pages = -(-len(first.tokens) // PAGE)
        window = min(pages, self.used.model.layout.window_pages(min(left, len(first.tokens))))
        fits = pages <= prefix.global_pool.num_free and window <= prefix.window_pool.num_free
        assert first.num_pending or not fits, "a request could start and does not"

    def run(self, count: int) -> None:
        while count or self.used.has_work:
            while count and self.used.metrics.waiting < 6 and self.rng.random() < 0.8:
                count -= 1
                self.arrive()
            if self.used.scheduler.has_work and self.rng.random() < 0.12:
                self.cancel()
            self.step()
        assert_all_given_back(self.used)
        for request, expected in self.expected.items():
            assert tuple(self.seen[request]) == tuple(request.output)
            if request.finish_reason == "abort":
                assert request in self.cancelled
                assert tuple(request.output) == expected.tokens[: len(request.output)]
            else:
                assert (tuple(request.output), request.finish_reason) == (expected.tokens, expected.reason)


MODES: tuple[dict[str, Any], ...] = (
    {},
    {"asynchronous": True},
    {"prefix_mode": "exact"},
    {"prefix_mode": "exact", "asynchronous": True},
    {"decoder_replay": True},
    {"decoder_replay": True, "asynchronous": True},
)


@pytest.mark.parametrize("number", range(len(MODES)))
def test_each_of_many_requests_gets_its_own_answer(number: int) -> None:
    share = -(-REQUESTS // len(MODES))
    traffic = Traffic(
        number,
        max_requests=14,
        max_batch_tokens=48,
        global_pages=34,
        window_pages=40 if "prefix_mode" in MODES[number] else 30,
        **MODES[number],
    )
    traffic.run(share)
    reasons = Counter(request.finish_reason for request in traffic.expected)
    assert sum(reasons.values()) == len(traffic.expected) == share
    assert min(reasons[reason] for reason in ("stop", "length", "abort")) > 4, reasons
    reached = traffic.reached
    for name in ("preempted", "mixed", "chunks", "blocked", "cancelled running", "cancelled waiting"):
        assert reached[name] > 0, reached
    assert (reached["cancelled in flight"] > 0) == ("asynchronous" in MODES[number])
    assert (traffic.used.metrics.cached_tokens > 0) == ("prefix_mode" in MODES[number])


@pytest.mark.parametrize("changes", [{}, {"prefix_mode": "exact"}, {"decoder_replay": True}])
def test_asynchronous_equals_synchronous(changes: dict[str, Any]) -> None:
    """Token for token, with stops that arrive when the next row is launched already, and with cancellations
    between a launch and its result."""
    rng = random.Random(3)
    chosen = [rng.randrange(len(jobs())) for _ in range(24)]
    answers = alone("decoder_replay" in changes)
    params = [with_stop(jobs()[number], answers[number], rng)[0] for number in chosen]
    found, late = [], 0
    for asynchronous in (False, True):
        used = engine(
            "small",
            max_context_tokens=36,
            max_requests=6,
            max_batch_tokens=24,
            asynchronous=asynchronous,
            **changes,
        )
        requests = [used.add(jobs()[number].prompt, one) for number, one in zip(chosen, params, strict=True)]
        while used.has_work:
            used.step()
            for request in requests[::4]:  # cancelled as soon as two tokens are known
                if len(request.output) == 2 and request.finish_reason is None:
                    late += request.num_pending > 0
                    used.abort(request)
        assert_all_given_back(used)
        found.append([(request.output, request.finish_reason) for request in requests])
    assert found[0] == found[1]
    assert {reason for _, reason in found[0]} == {"stop", "length", "abort"}
    assert late > 0, "no cancellation came while a token was in flight"
