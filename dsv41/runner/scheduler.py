"""Continuous batching: which requests run in a step, and how many tokens of each.

Decode rows come first, then chunks of prompts in order of arrival, within the token budget. A request that
finds no page takes them from the request that arrived last, which is preempted and computed again later. The
oldest request can always go on, because `add` refuses what could not run alone: so nothing deadlocks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

from dsv41.config import EngineConfig, ModelConfig
from dsv41.model.layout import CacheLayout
from dsv41.runner.block_table import RequestPages, admit
from dsv41.runner.pages import PagePool
from dsv41.runner.prefix import Mode, PrefixCache, extend_keys
from dsv41.runner.request import FINISHED, RUNNING, WAITING, Request
from dsv41.runner.schedule import NewRequest, RunningRequest, SchedulerOutput, TokenResult


@dataclass(frozen=True)
class Event:
    """What a step brought for a request. `finish_reason` is set on its last event: "stop", "length" or
    "error"."""

    request: Request
    result: TokenResult
    finish_reason: str | None


class Scheduler:
    """Owns the requests and the pages. `schedule` and `update` alternate; with steps in flight, `update`
    lags."""

    def __init__(self, config: ModelConfig, engine: EngineConfig, layout: CacheLayout) -> None:
        self.config, self.engine = config, engine
        self.max_pages = layout.global_pages(engine.max_context_tokens)
        rows = engine.max_batch_tokens * (
            2 if engine.asynchronous else 1
        )  # a window waits for its step's result
        self._window_alone = min(layout.window_pages(rows), self.max_pages)
        global_pages = engine.global_pages or engine.max_requests * self.max_pages
        window_pages = engine.window_pages or engine.max_requests * self._window_alone
        self.prefix = PrefixCache(
            PagePool(1 + global_pages),
            PagePool(1 + window_pages),
            engine.page_tokens,
            config.window_tokens,
            cast(Mode, engine.prefix_mode),  # checked by the config
        )
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._alive: dict[int, Request] = {}
        self._in_flight: deque[list[tuple[Request, int, int]]] = deque()  # request, rows, its preemptions
        self._dropped: dict[str, list[int]] = {"finished": [], "preempted": []}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def requests(self) -> Iterable[Request]:
        """All that have not ended."""
        return self._alive.values()

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that could never run; nothing is changed then."""
        limit = self.engine.max_context_tokens
        needed = request.length + request.params.max_tokens - len(request.output)
        pools = self.prefix.global_pool, self.prefix.window_pool
        if not request.tokens:
            raise ValueError("the prompt is empty: it needs at least one token")
        wrong = next((token for token in request.tokens if not 0 <= token < self.config.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.config.vocab_size} ids")
        if needed > limit:
            raise ValueError(
                f"a prompt of {request.num_prompt} tokens and {request.params.max_tokens} new ones need more"
                f" than the {limit} tokens of max_context_tokens"
            )
        pages = -(-needed // self.engine.page_tokens)
        window_pages = min(pages, self._window_alone)
        if pages > pools[0].num_pages - 1 or window_pages > pools[1].num_pages - 1:
            raise ValueError(
                f"the request needs {pages} pages and {window_pages} window pages, more than the pools hold"
                f" ({pools[0].num_pages - 1} and {pools[1].num_pages - 1})"
            )
        self.waiting.append(request)
        self._alive[request.request_id] = request

    def resume(self, request: Request, num_computed: int) -> None:
        """Run a request whose state the caller writes into the pages that this reserves. Raises ValueError
        for one that could never run, MemoryError when slots or pages are short; nothing is changed then."""
        self.add(request)
        self.waiting.pop()
        pages = RequestPages(self.prefix)
        try:
            if len(self.running) >= self.engine.max_requests:
                raise MemoryError(f"{self.engine.max_requests} requests are running already (max_requests)")
            pages.reserve(num_computed, 0)
        except MemoryError:
            del self._alive[request.request_id]
            raise
        pages.num_committed = num_computed // self.engine.page_tokens  # imported pages are not shared
        request.pages, request.status = pages, RUNNING
        request.num_computed = request.num_confirmed = num_computed
        self.running.append(request)

    def abort(self, request: Request) -> None:
        """End a request at any moment; results of its steps in flight will be dropped."""
        if request.status != FINISHED:
            self._finish(request, "abort")

    def schedule(self) -> SchedulerOutput:
        """The next step. It may be empty of tokens while results in flight decide what comes next."""
        budget = self.engine.max_batch_tokens
        scheduled: dict[Request, int] = {}
        preempted = self.num_preemptions
        for request in sorted(
            self.running, key=lambda r: r.num_remaining > 1
        ):  # stable: by arrival within each
            count = min(request.num_remaining, budget)
            if count and request.status == RUNNING and self._reserve(request, count, scheduled):
                scheduled[request] = count
                budget = self.engine.max_batch_tokens - sum(scheduled.values())
        while budget > 0 and self.num_preemptions == preempted and (admitted := self._admit(budget)):
            count = scheduled[admitted] = min(admitted.num_remaining, budget)
            budget -= count
        held = {request: request.sent_pages is not None for request in scheduled}
        output = SchedulerOutput(
            new=tuple(self._new(request) for request in scheduled if not held[request]),
            running=tuple(self._running(request) for request in scheduled if held[request]),
            finished=tuple(self._dropped["finished"]),
            preempted=tuple(self._dropped["preempted"]),
            num_tokens={request.request_id: count for request, count in scheduled.items()},
        )
        self._dropped = {"finished": [], "preempted": []}
        for request, count in scheduled.items():
            request.num_computed += count
            request.num_pending += request.num_computed == request.length
        if scheduled:
            self._in_flight.append([(r, count, r.num_preemptions) for r, count in scheduled.items()])
        return output

    def update(self, results: list[TokenResult]) -> list[Event]:
        """Take in the results of the oldest step in flight; returns those of requests that had not ended
        meanwhile. Every scheduled step with tokens has its `update`, also without results."""
        alive = [(self._alive[r.request_id], r) for r in results if r.request_id in self._alive]
        alive = [(request, _only_new(request, result)) for request, result in alive]
        for request, result in alive:
            if result.error is not None:
                self._forget(request)
                self._finish(request, "error", result.error)
            elif result.token >= 0:
                request.num_pending -= 1
                request.tokens.append(result.token)
        self._confirm()
        for request, result in alive:
            if result.token >= 0:
                self._check_end(request, result.token)
        return [Event(request, result, request.finish_reason) for request, result in alive]

    def check_integrity(self) -> None:
        """Every page is accounted for by exactly the requests that hold it."""
        pools = self.prefix.global_pool, self.prefix.window_pool
        held: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
        for request in self.running:
            assert request.pages is not None, "a running request holds no pages"
            held[0].update(request.pages.global_pages)
            held[1].update(filter(None, request.pages.window_pages))  # without the null page
        for pool, pages in zip(pools, held, strict=True):
            pool.check_integrity(pages)

    def _reserve(self, request: Request, count: int, scheduled: dict[Request, int]) -> bool:
        """Pages for a running request, from the last arrival if need be; False if it gave way itself."""
        assert request.pages is not None
        while True:
            try:
                in_flight = request.num_computed - request.num_confirmed
                request.pages.reserve(request.num_confirmed, in_flight + count)
            except MemoryError:
                victim = max(self.running, key=lambda r: r.request_id)
                scheduled.pop(victim, None)
                self._preempt(victim)
                if victim is request:
                    return False
            else:
                return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.status, request.sent_pages = WAITING, None
        request.num_computed = request.num_confirmed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._dropped["preempted"].append(request.request_id)
        self.waiting.appendleft(request)

    def _admit(self, budget: int) -> Request | None:
        """Start the request that waits longest, if a slot and pages for all its tokens are there."""
        if not self.waiting or len(self.running) >= self.engine.max_requests:
            return None
        request = self.waiting[0]
        if request.num_pending:  # preempted with a token in flight: its prefill needs that token
            return None
        extend_keys(request.keys, request.tokens, self.engine.page_tokens, request.salt)
        every_row = (
            request.params.prompt_logprobs is not None
        )  # each row's logits are wanted: nothing to reuse
        try:
            pages = admit(self.prefix, [] if every_row else request.keys, len(request.tokens), budget)
        except MemoryError:
            return None
        self.waiting.popleft()
        request.pages = pages
        request.num_computed = request.num_confirmed = pages.hit.num_computed
        request.num_cached = pages.hit.length
        request.status = RUNNING
        self.running.append(request)
        self.running.sort(key=lambda r: r.request_id)  # by arrival, also after a preemption
        return request

    def _new(self, request: Request) -> NewRequest:
        pages = request.pages
        assert pages is not None
        request.sent_pages = (len(pages.global_pages), len(pages.window_pages))
        return NewRequest(
            request_id=request.request_id,
            tokens=tuple(request.tokens),
            num_prompt=request.num_prompt,
            params=request.params,
            pages=tuple(pages.global_pages),
            window_pages=tuple(pages.window_pages),
            num_computed=request.num_computed,
            hit_tokens=pages.hit.length,
            replay_start=pages.hit.replay_start,
            image_rows=request.image_rows,
            embeddings=request.embeddings,
            open_groups=request.open_groups,
        )

    def _running(self, request: Request) -> RunningRequest:
        pages, sent = request.pages, request.sent_pages
        assert pages is not None
        assert sent is not None
        request.sent_pages = (len(pages.global_pages), len(pages.window_pages))
        return RunningRequest(
            request.request_id, tuple(pages.global_pages[sent[0] :]), tuple(pages.window_pages[sent[1] :])
        )

    def _confirm(self) -> None:
        """The oldest step in flight computed its rows without fault: offer the pages that they filled."""
        for request, count, preemptions in self._in_flight.popleft():
            if request.pages is None or request.num_preemptions != preemptions:
                continue
            request.num_confirmed += count
            extend_keys(request.keys, request.tokens, self.engine.page_tokens, request.salt)
            request.pages.commit(request.keys, request.num_confirmed)

    def _forget(self, request: Request) -> None:
        """No later request may take over the pages of a faulty one."""
        if request.pages is not None:
            for page in request.pages.global_pages[request.pages.hit.length // self.engine.page_tokens :]:
                self.prefix.global_pool.forget(page)
            for page in filter(None, request.pages.window_pages):
                self.prefix.window_pool.forget(page)

    def _check_end(self, request: Request, token: int) -> None:
        params, num_output = request.params, len(request.output)
        stops = () if params.ignore_eos else (self.config.eos_token,)
        if token in (*stops, *params.stop_ids) and num_output >= params.min_tokens:
            self._finish(request, "stop")
        elif num_output >= params.max_tokens:
            self._finish(request, "length")

    def _finish(self, request: Request, reason: str, error: str | None = None) -> None:
        if request.status == RUNNING:
            self._release(request)
        else:
            self.waiting.remove(request)
        request.status, request.finish_reason, request.error = FINISHED, reason, error
        del self._alive[request.request_id]
        self._dropped["finished"].append(request.request_id)

    def _release(self, request: Request) -> None:
        assert request.pages is not None
        request.pages.release()
        request.pages = None
        self.running.remove(request)


def _only_new(request: Request, result: TokenResult) -> TokenResult:
    """Without the prompt log-probabilities that were delivered before a preemption."""
    new = tuple(one for one in result.prompt_logprobs if one.position > request.num_prompt_logprobs)
    if new:
        request.num_prompt_logprobs = new[-1].position
    return replace(result, prompt_logprobs=new) if new != result.prompt_logprobs else result
