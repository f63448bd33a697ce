"""A simple engine: a fixed set of requests, paged caches, prefill in chunks, then decode together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dsv41.config import EngineConfig
from dsv41.model.caches import KVCaches, allocate_caches
from dsv41.model.inputs import StepInputs, StepOutput
from dsv41.model.layout import build_layout
from dsv41.runner.inputs import build_step
from dsv41.runner.load import Model
from dsv41.runner.pages import PagePool
from dsv41.runner.request import Request, SamplingParams
from dsv41.runner.sampler import sample_row


@dataclass(frozen=True)
class Token:
    """One streamed token: the index of its prompt and the id; `finish_reason` is set on a request's last
    event. A request that ends by a fault streams a last event with token -1 and the error."""

    prompt: int
    token: int
    finish_reason: str | None = None
    error: str | None = None


class Engine:
    """Requests in, tokens out. `run(step, caches)` is the model, eager or compiled."""

    def __init__(
        self,
        model: Model,
        engine: EngineConfig,
        run: Callable[[StepInputs, KVCaches], StepOutput] | None = None,
    ) -> None:
        engine.validate(model.config)
        self.model, self.engine = model, engine
        self.run = run if run is not None else model.decoder
        self.layout = build_layout(model.config, model.plan, model.backends, engine.page_tokens)
        assert self.layout == model.layout, "the model was built for another page size"
        self.max_pages = self.layout.global_pages(engine.max_context_tokens)
        per_request = min(self.layout.window_pages(engine.max_batch_tokens), self.max_pages)
        self.global_pool = PagePool(1 + engine.max_requests * self.max_pages)
        self.window_pool = PagePool(1 + engine.max_requests * per_request)
        self.caches = allocate_caches(
            self.layout,
            self.window_pool.num_pages,
            self.global_pool.num_pages,
            engine.max_requests,
            model.device,
        )
        self.free_slots = list(range(engine.max_requests - 1, -1, -1))
        self.running: list[Request] = []
        self.num_steps = 0

    def add(self, tokens: Sequence[int], params: SamplingParams) -> Request:
        """Admit one request. Raises ValueError for a prompt that cannot run; nothing is changed then."""
        self._check(tokens, params)
        if not self.free_slots:
            raise ValueError(f"{self.engine.max_requests} requests are running already (max_requests)")
        request = Request(list(tokens), params, slot=self.free_slots.pop())
        self.running.append(request)
        return request

    def _check(self, tokens: Sequence[int], params: SamplingParams) -> None:
        vocab, limit = self.model.config.vocab_size, self.engine.max_context_tokens
        if not len(tokens):
            raise ValueError("the prompt is empty: it needs at least one token")
        wrong = next((token for token in tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is outside the vocabulary of {vocab} ids")
        if len(tokens) + params.max_tokens > limit:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and {params.max_tokens} new ones need more than the"
                f" {limit} tokens of max_context_tokens"
            )

    def schedule(self) -> list[tuple[Request, int]]:
        """Decode rows first, then as much of the prompts as the token budget holds."""
        budget, scheduled = self.engine.max_batch_tokens, []
        for request in sorted(self.running, key=lambda r: r.num_uncomputed > 1):
            count = min(request.num_uncomputed, budget)
            if count:
                scheduled.append((request, count))
                budget -= count
        return scheduled

    def step_inputs(
        self, scheduled: Sequence[tuple[Request, int]], num_rows: int | None = None
    ) -> StepInputs:
        """Reserve pages and build the step's inputs."""
        for request, count in scheduled:
            request.reserve(
                count, self.engine.page_tokens, self.layout.window_tokens, self.global_pool, self.window_pool
            )
        return build_step(
            scheduled,
            self.model.config,
            self.layout,
            max_requests=self.engine.max_requests,
            max_pages=self.max_pages,
            device=self.model.device,
            num_rows=num_rows,
        )

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one step; returns the requests that got a token or ended by a fault."""
        scheduled = self.schedule()
        output = self.run(self.step_inputs(scheduled), self.caches)
        last = torch.tensor([count for _, count in scheduled]).cumsum(0) - 1
        logits = self.model.decoder.logits(output.hidden[last.to(output.hidden.device)])
        faults = self._faults(output, scheduled)
        self.num_steps += 1
        touched = []
        for (request, count), row, fault in zip(scheduled, logits, faults, strict=True):
            request.num_computed += count
            if fault >= 0 or bool(row.isnan().any()):
                where = f"layer {fault}" if fault >= 0 else "the final head"
                self._finish(request, "error", f"not a finite number in step {self.num_steps}, {where}")
            elif request.num_uncomputed == 0:
                self._append(request, sample_row(row, request.params, len(request.tokens)))
            else:
                continue
            touched.append(request)
        return touched

    def _faults(self, output: StepOutput, scheduled: Sequence[tuple[Request, int]]) -> list[int]:
        """The first faulty layer of every scheduled request, -1 without one."""
        parts = output.fault_layer.split([count for _, count in scheduled])
        return [min((fault for fault in part.tolist() if fault >= 0), default=-1) for part in parts]

    def _append(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        params = request.params
        if token == self.model.config.eos_token and not params.ignore_eos:
            self._finish(request, "stop")
        elif len(request.output) >= params.max_tokens:
            self._finish(request, "length")

    def _finish(self, request: Request, reason: str, error: str | None = None) -> None:
        request.finish_reason, request.error = reason, error
        request.release(self.global_pool, self.window_pool)
        self.running.remove(request)
        self.free_slots.append(request.slot)

    def stream(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Iterator[Token]:
        """Tokens as they come, of at most `max_requests` prompts at once; the others wait for a free slot."""
        for tokens in prompts:
            self._check(tokens, params)
        waiting = list(enumerate(prompts))
        number: dict[int, int] = {}
        while waiting or self.running:
            while waiting and self.free_slots:
                index, tokens = waiting.pop(0)
                number[id(self.add(tokens, params))] = index
            for request in self.step():
                token = -1 if request.error else request.tokens[-1]
                yield Token(number[id(request)], token, request.finish_reason, request.error)

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """The new tokens of every prompt. Raises RuntimeError when a request ends by a fault."""
        outputs: list[list[int]] = [[] for _ in prompts]
        for event in self.stream(prompts, params):
            if event.error:
                raise RuntimeError(f"prompt {event.prompt}: {event.error}")
            outputs[event.prompt].append(event.token)
        return outputs
