"""The scheduler alone. The worker is a memory that knows what every row should hold, and makes up tokens."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import engines
import pytest

from dsv41.config import EngineConfig
from dsv41.runner.request import FINISHED, RUNNING, WAITING, Request, SamplingParams
from dsv41.runner.schedule import NewRequest, RunningRequest, SchedulerOutput, TokenResult
from dsv41.runner.scheduler import Event, Scheduler

PAGE, VOCAB = engines.PAGE, 512


def token_of(request_id: int, number: int) -> int:
    """What request `request_id` samples as its token `number`, prompt included."""
    return (request_id * 131 + number * 17) % 500 + 6


@dataclass
class Held:
    """What a worker knows of a request."""

    tokens: list[int]
    computed: int
    hit: int
    replay_start: int
    pages: list[int]
    window_pages: list[int]


@dataclass
class FakeWorker:
    """Follows the outputs of a scheduler as the real worker does. A cached row is the tuple of all tokens up
    to it; a row is written where the table says, once its request may write it, and read wherever the model
    would."""

    window_tokens: int
    max_requests: int
    ends: Callable[[int, int], int] = token_of
    faulty: set[int] = field(default_factory=set)
    held: dict[int, Held] = field(default_factory=dict)
    states: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    window: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    replayed: int = 0

    def execute(self, output: SchedulerOutput) -> list[TokenResult]:
        for gone in (*output.finished, *output.preempted):
            self.held.pop(gone, None)
        for new in output.new:
            self.admit(new)
        for running in output.running:
            self.grow(running)
        assert set(output.num_tokens) == {r.request_id for r in (*output.new, *output.running)}
        results = []
        for request_id, count in output.num_tokens.items():
            held = self.held[request_id]
            assert 0 < count <= len(held.tokens) - held.computed, "tokens that nobody knows are scheduled"
            for _ in range(count):
                self.compute(held)
            if request_id in self.faulty:
                results.append(TokenResult(request_id, -1, "not finite"))
            elif held.computed == len(held.tokens):
                token = self.ends(request_id, len(held.tokens))
                held.tokens.append(token)
                results.append(TokenResult(request_id, token))
        return results

    def admit(self, new: NewRequest) -> None:
        assert new.request_id not in self.held, "a request is new twice"
        assert len(self.held) < self.max_requests, "more requests than slots"
        assert new.tokens[new.num_prompt :] == tuple(
            self.ends(new.request_id, n) for n in range(new.num_prompt, len(new.tokens))
        )
        self.held[new.request_id] = Held(
            list(new.tokens),
            new.num_computed,
            new.hit_tokens,
            new.replay_start,
            list(new.pages),
            list(new.window_pages),
        )

    def grow(self, running: RunningRequest) -> None:
        held = self.held[running.request_id]
        held.pages += running.new_pages
        held.window_pages += running.new_window_pages

    def compute(self, held: Held) -> None:
        row = held.computed
        known = tuple(held.tokens[: row + 1])
        self.window[self.place(held.window_pages, row)] = known
        if row >= held.hit:
            self.states[self.place(held.pages, row)] = known
        else:
            self.replayed += 1
        for seen in range(max(held.replay_start, row - self.window_tokens + 1), row + 1):
            found = self.window[self.place(held.window_pages, seen)]
            assert found == known[: seen + 1], "a window row holds another prefix"
        for seen in range(row + 1):
            assert self.states[self.place(held.pages, seen)] == known[: seen + 1], (
                "a state holds another prefix"
            )
        held.computed += 1

    @staticmethod
    def place(table: list[int], row: int) -> tuple[int, int]:
        assert table[row // PAGE] != 0, "a row lies on the null page"
        return table[row // PAGE], row % PAGE


class Driver:
    """A scheduler and its fake worker, `depth` steps in flight, every rule checked in every step."""

    def __init__(self, depth: int = 0, ends: Callable[[int, int], int] = token_of, **changes: Any) -> None:
        numbers: dict[str, Any] = {
            "max_requests": 4,
            "max_batch_tokens": 16,
            "max_context_tokens": 48,
        } | changes
        small = engines.model("small")
        self.config = small.config
        self.engine = EngineConfig(page_tokens=PAGE, asynchronous=depth > 0, **numbers)
        self.layout = small.layout
        self.scheduler = Scheduler(self.config, self.engine, self.layout)
        self.worker = FakeWorker(self.config.window_tokens, self.engine.max_requests, ends)
        self.depth, self.in_flight = depth, deque[list[TokenResult]]()
        self.requests: list[Request] = []
        self.outputs: list[SchedulerOutput] = []
        self.events: list[Event] = []
        self.reached: dict[str, int] = dict.fromkeys(
            ("mixed", "chunks", "preempted", "blocked", "idle", "replayed", "hits"), 0
        )

    def add(self, prompt: int | list[int], **params: Any) -> Request:
        tokens = engines.random_tokens(prompt, len(self.requests)) if isinstance(prompt, int) else prompt
        settings = SamplingParams(**{"max_tokens": 4, "ignore_eos": True} | params)
        request = Request(len(self.requests), list(tokens), settings, len(tokens))
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self) -> SchedulerOutput:
        preempted_before = self.scheduler.num_preemptions
        alive = {request: request.num_remaining for request in self.scheduler.requests}
        oldest = min(alive, key=lambda request: request.request_id, default=None)
        output = self.scheduler.schedule()
        self.outputs.append(output)
        self.check(output, alive, oldest, self.scheduler.num_preemptions - preempted_before)
        results = self.worker.execute(output)
        if output.num_tokens:
            self.in_flight.append(results)
        while len(self.in_flight) > (self.depth if output.num_tokens else 0):
            self.events += self.scheduler.update(self.in_flight.popleft())
            self.scheduler.check_integrity()
        return output

    def check(
        self, output: SchedulerOutput, alive: dict[Request, int], oldest: Request | None, preempted: int
    ) -> None:
        scheduler, tokens = self.scheduler, output.num_tokens
        scheduler.check_integrity()
        left = self.engine.max_batch_tokens - output.total_tokens
        assert left >= 0, "more rows than the budget"
        assert len(scheduler.running) <= self.engine.max_requests
        assert all(request.num_remaining >= 0 for request in alive)
        # The oldest advances, unless its next token is still on its way.
        if oldest is not None and alive[oldest] and not (oldest.num_pending and oldest.status == WAITING):
            assert oldest.request_id in tokens, "the oldest request does not advance"
        # Fair order: who runs came before all who wait, and who gave way came last.
        running = [request.request_id for request in scheduler.running]
        waiting = [request.request_id for request in scheduler.waiting]
        assert running == sorted(running)
        assert waiting == sorted(waiting)
        assert max(running, default=-1) < min(waiting, default=1 << 30)
        assert preempted == len(set(output.preempted)), "a request is preempted twice in one step"
        assert max(running, default=-1) < min(output.preempted, default=1 << 30)
        self.check_busy(output, alive, left, preempted)
        # Decode rows first: none is left out while a prompt gets rows of the same budget.
        counts = {request: tokens.get(request.request_id, 0) for request in scheduler.running}
        decoding = [request for request in counts if alive.get(request) == 1 and request.status == RUNNING]
        if any(counts[request] > 1 for request in counts):
            assert all(counts[request] == 1 for request in decoding), "a prompt took a decode row's place"
        self.reached["mixed"] += len({count > 1 for count in counts.values() if count}) == 2
        self.reached["chunks"] += any(
            request.num_remaining and request.num_computed < request.num_prompt
            for request in scheduler.running
        )
        self.reached["preempted"] += preempted
        self.reached["hits"] += any(new.hit_tokens for new in output.new)
        self.reached["idle"] += not tokens

    def check_busy(
        self, output: SchedulerOutput, alive: dict[Request, int], left: int, preempted: int
    ) -> None:
        """Never idle: rows of the budget are left over only when
        - every running request got all its rows, and
        - nobody waits; or a request gave way in this step; or the slots are full; or the first in the queue
          waits for its own token in flight, or for more pages than are free: those of all its tokens and
          those of a window before and a first chunk. (Only the first in the queue counts, or order would not
          be fair.)
        """
        scheduler, tokens = self.scheduler, output.num_tokens
        if not tokens and scheduler.has_work:
            assert self.in_flight, "nothing runs, nothing is on its way, and work is left: a deadlock"
        if not left:
            return
        rows = {new.request_id: len(new.tokens) - new.num_computed for new in output.new}
        for request in scheduler.running:
            wanted = rows.get(request.request_id, alive[request])
            assert tokens.get(request.request_id, 0) == wanted, "rows are left, and a request did not get all"
        if not scheduler.waiting or preempted or len(scheduler.running) == self.engine.max_requests:
            return
        first = scheduler.waiting[0]
        pools = scheduler.prefix.global_pool, scheduler.prefix.window_pool
        pages = -(-len(first.tokens) // PAGE)
        window_pages = min(pages, self.layout.window_pages(min(left, len(first.tokens))))
        waits = first.num_pending > 0
        short = pages > pools[0].num_free or window_pages > pools[1].num_free
        assert waits or short, "a request could start and does not"
        self.reached["blocked"] += short

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work and not self.in_flight:
                break
            self.step()
        else:
            raise AssertionError("the work does not end")
        self.step()
        for pool in (self.scheduler.prefix.global_pool, self.scheduler.prefix.window_pool):
            assert pool.num_free == pool.num_pages - 1
        assert not self.worker.held
        self.reached["replayed"] = self.worker.replayed

    def expected(self, request: Request) -> list[int]:
        """The whole answer of a request that nobody stops."""
        first = request.num_prompt
        count = request.params.max_tokens
        return [self.worker.ends(request.request_id, n) for n in range(first, first + count)]


# -- one step -----------------------------------------------------------------------------------------------


def test_decode_rows_come_before_chunks_within_the_budget() -> None:
    driver = Driver(max_batch_tokens=10)
    first, second, third = driver.add(5), driver.add(4), driver.add(23)
    assert driver.step().num_tokens == {0: 5, 1: 4, 2: 1}
    assert driver.step().num_tokens == {0: 1, 1: 1, 2: 8}
    assert driver.step().num_tokens == {0: 1, 1: 1, 2: 8}
    assert driver.step().num_tokens == {0: 1, 1: 1, 2: 6}
    assert [request.finish_reason for request in (first, second)] == ["length"] * 2
    driver.run()
    assert third.output == driver.expected(third)
    assert driver.reached["mixed"] >= 3
    assert driver.reached["chunks"] == 3


def test_more_decode_rows_than_budget_go_by_arrival() -> None:
    """Nobody starves: the first in line end, then the others get their rows."""
    driver = Driver(max_batch_tokens=2, max_requests=4)
    for _ in range(4):
        driver.add(1)
    assert driver.step().num_tokens == {0: 1, 1: 1}
    for _ in range(3):
        assert driver.step().num_tokens == {0: 1, 1: 1}
    assert driver.step().num_tokens == {2: 1, 3: 1}
    driver.run()
    assert all(request.output == driver.expected(request) for request in driver.requests)


def test_an_imported_decode_row_goes_before_an_older_prompt_s_chunk() -> None:
    """Without imports the prompt that is being cut is always the last arrival, so order alone would do."""
    driver = Driver(max_batch_tokens=4)
    driver.add(13)
    assert driver.step().num_tokens == {0: 4}
    imported = Request(1, engines.random_tokens(6, 1), SamplingParams(max_tokens=3, ignore_eos=True), 6)
    driver.scheduler.resume(imported, 5)
    output = driver.scheduler.schedule()
    assert list(output.num_tokens.items()) == [(1, 1), (0, 3)]
    assert [new.num_computed for new in output.new] == [5]


def test_new_and_running_requests_say_only_what_changed() -> None:
    driver = Driver(max_batch_tokens=6)
    driver.add(9)
    first, second, third = driver.step(), driver.step(), driver.step()
    (new,) = first.new
    assert (len(new.pages), len(new.window_pages), new.num_computed, first.num_tokens) == (2, 2, 0, {0: 6})
    assert (second.new, [len(r.new_pages) for r in second.running], second.num_tokens) == ((), [1], {0: 3})
    assert third.running == (RunningRequest(0),)
    driver.run()
    assert driver.outputs[-1].finished == (0,)


# -- pages run out ------------------------------------------------------------------------------------------


def test_the_last_arrival_gives_way_and_comes_back() -> None:
    """Three requests of which two fit at their full length: the third is computed again, with its tokens."""
    driver = Driver(global_pages=8, window_pages=12)
    for _ in range(3):
        driver.add(8, max_tokens=8)
    driver.run()
    gone = [request_id for output in driver.outputs for request_id in output.preempted]
    assert gone
    assert set(gone) <= {1, 2}
    assert gone[0] == 2
    resumed = [new for output in driver.outputs for new in output.new if len(new.tokens) > new.num_prompt]
    assert resumed, "no request had to compute its own tokens again"
    assert driver.scheduler.num_preemptions == len(gone)
    assert all(request.output == driver.expected(request) for request in driver.requests)
    assert driver.requests[2].num_preemptions == gone.count(2)


def test_a_request_that_could_never_run_is_refused() -> None:
    """At `add`, with the numbers; what just fits runs, alone and to its end."""
    driver = Driver(global_pages=5, window_pages=4, max_batch_tokens=8)
    with pytest.raises(ValueError, match=r"6 pages and 4 window pages.*5 and 4"):
        driver.add(18, max_tokens=4)
    narrow = Driver(global_pages=9, window_pages=2, max_batch_tokens=8)
    with pytest.raises(ValueError, match=r"window pages.*9 and 2"):
        narrow.add(18, max_tokens=4)
    with pytest.raises(ValueError, match="max_context_tokens"):
        driver.add(45)
    assert not driver.scheduler.has_work
    fits = driver.add(16, max_tokens=4)
    driver.run()
    assert fits.output == driver.expected(fits)


@pytest.mark.parametrize("window_pages", range(2, 8))
@pytest.mark.parametrize("depth", [0, 1])
def test_whoever_is_let_in_finishes_alone_in_the_smallest_pools(depth: int, window_pages: int) -> None:
    """Whatever `add` does not refuse must end, at every length and budget."""
    finished = 0
    for budget in (1, 3, 8, 16):
        for length in (1, 4, 5, 17, 30):
            pages = -(-(length + 4) // PAGE)
            driver = Driver(depth, global_pages=pages, window_pages=window_pages, max_batch_tokens=budget)
            try:
                request = driver.add(length)
            except ValueError:
                continue
            driver.run()
            assert request.output == driver.expected(request)
            finished += 1
    assert finished >= 2 * window_pages


# -- ends and cancellations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_the_answer_never_exceeds_max_tokens(depth: int) -> None:
    """With a step in flight the scheduler counts the token on its way: no row is computed for nothing."""
    driver = Driver(depth)
    for count in (1, 2, 5):
        driver.add(3, max_tokens=count)
    driver.run()
    for request in driver.requests:
        assert request.output == driver.expected(request)
        assert (request.finish_reason, request.num_pending) == ("length", 0)
        rows = sum(output.num_tokens.get(request.request_id, 0) for output in driver.outputs)
        assert rows == 3 + request.params.max_tokens - 1


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_that_arrives_late_drops_the_token_behind_it(depth: int) -> None:
    driver = Driver(depth)
    stopping = driver.add(3, max_tokens=6, stop_ids=(token_of(0, 4),))
    other = driver.add(3, max_tokens=6)
    driver.run()
    assert (stopping.output, stopping.finish_reason) == ([token_of(0, 3), token_of(0, 4)], "stop")
    rows = sum(output.num_tokens.get(0, 0) for output in driver.outputs)
    assert rows == 4 + depth, "asynchronously one row too many is computed"
    assert other.output == driver.expected(other)
    mine = [event for event in driver.events if event.request is stopping]
    assert [event.finish_reason for event in mine] == [None, "stop"]


def test_end_of_sequence_min_tokens_and_ignore_eos() -> None:
    eos = engines.model("small").config.eos_token
    driver = Driver(ends=lambda request_id, number: eos)
    params = ({"ignore_eos": False}, {"ignore_eos": True}, {"ignore_eos": False, "min_tokens": 3})
    found = [driver.add(2, **one) for one in params]
    driver.run()
    assert [len(request.output) for request in found] == [1, 4, 3]
    assert [request.finish_reason for request in found] == ["stop", "length", "stop"]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("state", ["waiting", "mid-prefill", "decoding", "preempted", "in flight", "ended"])
def test_a_request_can_be_cancelled_in_every_state(state: str, depth: int) -> None:
    """Its pages come back, it gets no further event, and the others do not notice."""
    driver = Driver(depth, global_pages=8, window_pages=12, max_batch_tokens=20, max_requests=3)
    others = [driver.add(8, max_tokens=8), driver.add(6, max_tokens=6)]
    victim = driver.add(9 if state != "mid-prefill" else 15, max_tokens=7)
    reached = {
        "waiting": lambda: victim.status == WAITING,
        "mid-prefill": lambda: victim.status == RUNNING and 0 < victim.num_computed < victim.num_prompt,
        "decoding": lambda: len(victim.output) >= 1 and victim.status == RUNNING,
        "preempted": lambda: victim.status == WAITING and victim.num_preemptions > 0,
        "in flight": lambda: victim.num_pending > 0 or not depth,
        "ended": lambda: victim.status == FINISHED,
    }[state]
    for _ in range(60):
        if reached():
            break
        driver.step()
    assert reached(), "the state was not reached"
    before, length = len([e for e in driver.events if e.request is victim]), len(victim.output)
    driver.scheduler.abort(victim)
    driver.scheduler.check_integrity()
    assert victim.pages is None
    driver.scheduler.abort(victim)
    driver.run()
    assert len([event for event in driver.events if event.request is victim]) == before
    assert len(victim.output) == length
    assert victim.finish_reason == ("length" if state == "ended" else "abort")
    assert all(request.output == driver.expected(request) for request in others)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_fault_frees_the_pages_and_forgets_them(depth: int) -> None:
    driver = Driver(depth, prefix_mode="exact", max_batch_tokens=12)
    prompt = engines.random_tokens(21, 77)
    bad, good = driver.add(prompt), driver.add(9)
    driver.worker.faulty = {0}
    driver.step()
    driver.worker.faulty = set()
    driver.run()
    assert (bad.finish_reason, bad.error, bad.output) == ("error", "not finite", [])
    assert good.output == driver.expected(good)
    again, third = driver.add(prompt), driver.add(prompt)
    driver.run()
    assert (again.num_cached, again.finish_reason) == (0, "length")
    fourth = driver.add(prompt)
    driver.run()
    assert third.num_cached <= fourth.num_cached == 20, "the healthy pages are found"


# -- random traffic -----------------------------------------------------------------------------------------


def traffic(seed: int, depth: int, mode: str) -> Driver:
    """Random small pools and budgets, arrivals, stops, cancellations, and prompts that share beginnings."""
    rng = random.Random(seed)
    driver = Driver(
        depth,
        max_requests=rng.randint(1, 6),
        max_batch_tokens=rng.choice([1, 3, 7, 12, 24]),
        global_pages=rng.randint(6, 20),
        window_pages=rng.randint(5, 20),
        prefix_mode=mode,
    )
    left, cancelled = 12, set()
    while left or driver.scheduler.has_work:
        while left and rng.random() < 0.4:
            left -= 1
            family = engines.random_tokens(30, 1000 + rng.randrange(2))
            own = engines.random_tokens(rng.randint(1, 9), rng.randrange(1 << 30))
            prompt = family[: rng.choice([0, 0, 4, 8, 11, 16, 20])] + own
            try:
                request = driver.add(prompt, max_tokens=rng.randint(1, 9))
            except ValueError:
                continue
            if rng.random() < 0.3:
                stop = token_of(request.request_id, request.num_prompt + rng.randrange(4))
                request.params = replace(request.params, stop_ids=(stop,))
        if rng.random() < 0.08 and (alive := list(driver.scheduler.requests)):
            victim = rng.choice(alive)
            cancelled.add(victim)
            driver.scheduler.abort(victim)
        driver.step()
        assert len(driver.outputs) < 3000, "the work does not end"
    driver.run()
    for request in driver.requests:
        expected = driver.expected(request)
        stops = [n for n, token in enumerate(expected, 1) if token in request.params.stop_ids]
        expected = expected[: min(stops, default=len(expected))]
        if request in cancelled and request.finish_reason == "abort":
            assert request.output == expected[: len(request.output)]
        else:
            assert request.output == expected
            assert request.finish_reason == ("stop" if stops else "length")
    return driver


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mode", ["off", "exact", "bounded"])
def test_random_traffic_keeps_every_rule(mode: str, depth: int) -> None:
    reached: dict[str, int] = {}
    reasons = set()
    for seed in range(200):
        driver = traffic(seed, depth, mode)
        for name, count in driver.reached.items():
            reached[name] = reached.get(name, 0) + count
        reasons |= {request.finish_reason for request in driver.requests}
    assert reasons == {"abort", "length", "stop"}
    for name in ("mixed", "chunks", "preempted", "blocked"):
        assert reached[name] > 20, f"{name}: {reached}"
    assert (reached["hits"] > 20) == (mode != "off")
    assert (reached["replayed"] > 20) == (mode == "bounded")
