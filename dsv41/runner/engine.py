"""The engine: prompts in, tokens out. A step schedules, computes, samples, and takes in results.

llm = dsv41.LLM("tiny")                         # a preset, a checkpoint directory, a loaded Model
llm.generate([[1, 2, 3]], SamplingParams(8))    # ids, or text where there is a tokenizer

request = llm.add([1, 2, 3], params)            # the same by hand
while llm.has_work:
    for event in llm.step(): ...
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType

from torch import Tensor

from dsv41.config import EngineConfig
from dsv41.graphs.capture import Run
from dsv41.graphs.watch import compilations
from dsv41.model.caches import allocate_caches
from dsv41.runner.async_output import AsyncResult
from dsv41.runner.load import Model, load_by_name
from dsv41.runner.request import Request, SamplingParams
from dsv41.runner.schedule import PromptLogProb, SchedulerOutput, TokenResult
from dsv41.runner.scheduler import Event, Scheduler
from dsv41.runner.snapshot import Snapshot, restore, signature, take
from dsv41.runner.start import Start, warm_up
from dsv41.runner.worker import Worker

Prompt = str | Sequence[int]
LOG = logging.getLogger(__name__)  # without a handler a warning goes to stderr, as its plain text


class LateCompileError(RuntimeError):
    """A step of a warm engine compiled something, and the engine was told to refuse that."""


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt. `text` is None without a tokenizer. `results` has a `TokenResult` for each
    token, with its log-probabilities where they were asked for; `num_cached` prompt tokens came from the
    prefix cache."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: str
    error: str | None
    num_cached: int
    results: tuple[TokenResult, ...]
    prompt_logprobs: tuple[PromptLogProb, ...]


@dataclass(frozen=True)
class Metrics:
    """Counters since the engine began. `cached_tokens` of `looked_up_tokens` came from the prefix cache;
    `late_compiles` happened in steps after `warm_up`."""

    steps: int
    preemptions: int
    looked_up_tokens: int
    cached_tokens: int
    running: int
    waiting: int
    late_compiles: int


class LLM:
    """A model with its caches, scheduler and worker. `run(step, caches)` replaces the eager decoder.

    Raises ValueError for a model and capacities that do not fit each other.
    """

    def __init__(
        self, model: Model | str, engine: EngineConfig | None = None, run: Run | None = None
    ) -> None:
        self.engine = engine = engine if engine is not None else EngineConfig()
        self.model = model = load_by_name(model, engine) if isinstance(model, str) else model
        model.check(engine)
        self.scheduler = Scheduler(model.config, engine, model.layout)
        prefix = self.scheduler.prefix
        self.caches = allocate_caches(
            model.layout,
            prefix.window_pool.num_pages,
            prefix.global_pool.num_pages,
            engine.max_requests,
            model.device,
        )
        self.worker = Worker(model, engine, self.caches, self.scheduler.max_pages, run)
        self._ids = itertools.count()
        self._in_flight: deque[AsyncResult] = deque()
        self._ready: list[Event] = []  # taken in outside `step`, for its next call
        self._is_warm = False
        self._num_late = 0

    # -- requests ------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        image_rows: Sequence[bool] | None = None,
        embeddings: Tensor | None = None,
    ) -> Request:
        """Queue one prompt. `embeddings` [prompt, D] replace those of the positions in `image_rows`.

        Raises ValueError for a prompt that cannot run; nothing is changed then.
        """
        params = params if params is not None else SamplingParams()
        tokens = self._encode(prompt)
        params.validate_for(self.model.config.vocab_size)
        request = Request(next(self._ids), tokens, params, num_prompt=len(tokens))
        if image_rows is not None or embeddings is not None:
            if (
                image_rows is None
                or embeddings is None
                or not len(tokens) == len(image_rows) == len(embeddings)
            ):
                raise ValueError("image_rows and embeddings must both have one entry for every prompt token")
            request.image_rows, request.embeddings = tuple(image_rows), embeddings
            content = bytes(image_rows) + embeddings.float().cpu().numpy().tobytes()
            request.salt = hashlib.sha256(content).digest()
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request at any moment. Tokens of it in flight are dropped."""
        self.scheduler.abort(request)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight) or bool(self._ready)

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.model.tokenizer is None:
            raise ValueError(f"{self.model.blueprint.source} has no tokenizer: give token ids")
        return self.model.tokenizer.encode(prompt)

    # -- ready ---------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compile ahead what steps without images run. From then on a step that compiles anything is late:
        counted, and logged as a warning or raised as `EngineConfig.late_compile` says."""
        with compilations():  # nobody reads it: the hooks' own modules are loaded before the first step
            warm_up(self.worker)
        self._is_warm = True

    def _watch(self) -> AbstractContextManager[list[str]]:
        return compilations() if self._is_warm else nullcontext([])

    def _check_late(self, found: list[str], output: SchedulerOutput) -> None:
        """Raises LateCompileError if the engine is told so; the step's events then come with the next."""
        if not found:
            return
        self._num_late += len(found)
        counts = ", ".join(map(str, output.num_tokens.values()))
        step = f"a step of {sum(output.num_tokens.values())} rows (by request: {counts})"
        message = f"warning: compiled after ready, in {step}: {'; '.join(found)}"
        if self.engine.late_compile == "error":
            raise LateCompileError(message.removeprefix("warning: "))
        LOG.warning(message)

    # -- steps ---------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Schedule and launch one step, and take in results: of this step, or, when the engine is
        asynchronous, of the one before."""
        if self._wants_masks:
            self._drain()  # a mask depends on every token so far
        output = self.scheduler.schedule()
        if self._wants_masks:
            self.worker.masks = {
                request.request_id: request.params.token_mask(request.output)
                for request in self.scheduler.running
                if request.params.token_mask is not None
            }
        with self._watch() as found:
            self.worker.execute(output)
            launched = self.worker.sample()
        if launched is not None:
            self._in_flight.append(launched)
        self._drain(behind=1 if self.engine.asynchronous and launched is not None else 0)
        self._check_late(found, output)
        events, self._ready = self._ready, []
        return events

    @property
    def _wants_masks(self) -> bool:
        return any(request.params.token_mask is not None for request in self.scheduler.requests)

    def _drain(self, behind: int = 0) -> None:
        """Take in the results of all steps but the last `behind`."""
        while len(self._in_flight) > behind:
            self._ready += self.scheduler.update(self._in_flight.popleft().get())

    # -- whole answers ---------------------------------------------------------------------------------------

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[tuple[int, Event]]:
        """(number of the prompt, event) as tokens come. Requests that are still running when the caller stops
        iterating are aborted."""
        requests: dict[Request, int] = {}
        try:
            for number, prompt in enumerate(prompts):
                one = params[number] if isinstance(params, Sequence) else params
                requests[self.add(prompt, one)] = number
            while any(request.finish_reason is None for request in requests):
                for event in self.step():
                    if event.request in requests:
                        yield requests[event.request], event
        finally:
            for request in requests:
                self.abort(request)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """The answers to all prompts, in their order. A request that ends by a fault says so in `error`."""
        events: list[list[Event]] = [[] for _ in prompts]
        for number, event in self.stream(prompts, params):
            events[number].append(event)
        return [self._completion(own) for own in events]

    def _completion(self, events: list[Event]) -> Completion:
        request = events[-1].request
        tokens = tuple(request.output)
        tokenizer = self.model.tokenizer
        return Completion(
            prompt=tuple(request.tokens[: request.num_prompt]),
            tokens=tokens,
            text=None if tokenizer is None else tokenizer.decode(list(tokens)),
            finish_reason=request.finish_reason or "abort",
            error=request.error,
            num_cached=request.num_cached,
            results=tuple(event.result for event in events if event.result.token >= 0),
            prompt_logprobs=tuple(one for event in events for one in event.result.prompt_logprobs),
        )

    @property
    def metrics(self) -> Metrics:
        stats = self.scheduler.prefix.stats
        return Metrics(
            steps=self.worker.num_steps,
            preemptions=self.scheduler.num_preemptions,
            looked_up_tokens=stats.looked_up_tokens,
            cached_tokens=stats.hit_tokens,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            late_compiles=self._num_late,
        )

    # -- moving a request ------------------------------------------------------------------------------------

    def export_state(self, request: Request) -> Snapshot:
        """Everything that another engine of the same model needs to go on with a running request
        (runner/snapshot.py). Raises ValueError for a request that has not started or has ended."""
        self._drain()
        return take(request, self.worker)

    def import_state(self, snapshot: Snapshot) -> Request:
        """Go on with a request of another engine; nothing is computed again. Raises ValueError for one that
        does not fit, MemoryError when slots or pages are short; nothing is changed then."""
        if snapshot.signature != signature(self.model):
            raise ValueError("the snapshot is of another model, numerics, records or page size")
        snapshot.params.validate_for(self.model.config.vocab_size)
        request = Request(
            next(self._ids),
            list(snapshot.tokens),
            snapshot.params,
            num_prompt=snapshot.num_prompt,
            salt=snapshot.salt,
            image_rows=snapshot.image_rows,
            embeddings=snapshot.embeddings,
            open_groups=snapshot.open_groups,
        )
        self.scheduler.resume(request, snapshot.num_computed)
        restore(snapshot, request, self.caches)
        return request

    def close(self) -> None:
        """End every request and wait for what is in flight."""
        for request in list(self.scheduler.requests):
            self.scheduler.abort(request)
        self._drain()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def compile_ahead(model: Model, engine: EngineConfig, run: Run, start: Start) -> None:
    """The phase "compile" of a start, in an engine of the same sizes that captures nothing and is gone
    afterwards: what follows finds everything compiled."""
    with start.phase("compile"), LLM(model, replace(engine, graph_rows=0), run) as llm:
        llm.warm_up()
