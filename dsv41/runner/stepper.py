"""Steps by hand: checks, benchmarks and studies choose the rows of every step and see all their hidden rows.

It is also the smallest scheduler there is: what it tells the worker is all that a worker needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv41.config import EngineConfig
from dsv41.graphs.capture import Run
from dsv41.model.caches import KVCaches, allocate_caches
from dsv41.model.inputs import StepOutput
from dsv41.runner.block_table import RequestPages
from dsv41.runner.load import Model
from dsv41.runner.pages import PagePool
from dsv41.runner.prefix import PrefixCache
from dsv41.runner.request import SamplingParams
from dsv41.runner.schedule import NewRequest, RunningRequest, SchedulerOutput
from dsv41.runner.worker import Prepared, Worker


@dataclass(eq=False)
class HandRequest:
    """One request stepped by hand. `tokens` may grow or change from `num_computed` on, where its next rows
    start."""

    request_id: int
    tokens: list[int]
    pages: RequestPages
    num_computed: int = 0
    image_rows: tuple[bool, ...] | None = None
    embeddings: Tensor | None = None
    sent: tuple[int, int] | None = field(default=None)  # entries of both page tables that the worker holds


class Stepper:
    """A worker without a scheduler. Pages: as the engine says, else for `max_requests` full contexts."""

    def __init__(self, model: Model, engine: EngineConfig, run: Run | None = None) -> None:
        model.check(engine)
        layout = model.layout
        self.model, self.engine = model, engine
        max_pages = layout.global_pages(engine.max_context_tokens)
        whole = engine.max_requests * max_pages
        pools = [PagePool(1 + (pages or whole)) for pages in (engine.global_pages, engine.window_pages)]
        self.prefix = PrefixCache(pools[0], pools[1], engine.page_tokens, layout.window_tokens, "off")
        self.caches: KVCaches = allocate_caches(
            layout, pools[1].num_pages, pools[0].num_pages, engine.max_requests, model.device
        )
        self.worker = Worker(model, engine, self.caches, max_pages, run)
        self._ids = itertools.count()
        self._dropped: list[int] = []

    def add(self, tokens: Sequence[int]) -> HandRequest:
        return HandRequest(next(self._ids), list(tokens), RequestPages(self.prefix))

    def drop(self, request: HandRequest) -> None:
        """End a request; its pages may be used by the next step."""
        request.pages.release()
        self._dropped.append(request.request_id)

    def prepare(self, scheduled: Sequence[tuple[HandRequest, int]], num_rows: int | None = None) -> Prepared:
        """Build the step that computes the next `count` tokens of every request, padded to `num_rows`."""
        new, running = [], []
        for request, count in scheduled:
            request.pages.reserve(request.num_computed, count)
            if request.sent is None:
                new.append(self._announce(request))
            else:
                running.append(self._continue(request))
            request.sent = len(request.pages.global_pages), len(request.pages.window_pages)
        counts = {request.request_id: count for request, count in scheduled}
        output = SchedulerOutput(tuple(new), tuple(running), tuple(self._dropped), num_tokens=counts)
        self._dropped = []
        prepared = self.worker.prepare(output, num_rows)
        assert prepared is not None, "a step by hand has rows"
        return prepared

    @torch.inference_mode()
    def step(self, scheduled: Sequence[tuple[HandRequest, int]], num_rows: int | None = None) -> StepOutput:
        """Compute a step; the rows of `hidden` come in the order of `scheduled` if that is by count."""
        prepared = self.prepare(scheduled, num_rows)
        output = self.worker.compute(prepared)
        self.worker.advance(prepared)
        for request, count in scheduled:
            request.num_computed += count
        return output

    @torch.inference_mode()
    def logits(
        self, scheduled: Sequence[tuple[HandRequest, int]], num_rows: int | None = None
    ) -> list[Tensor]:
        """The logits of a step's rows, float32 [count, V] for every request, in the order of `scheduled`."""
        hidden = self.step(scheduled, num_rows).hidden
        order = sorted(range(len(scheduled)), key=lambda i: scheduled[i][1])
        counts = [scheduled[i][1] for i in order]
        parts = dict(zip(order, self.model.decoder.logits(hidden[: sum(counts)]).split(counts), strict=True))
        return [parts[i] for i in range(len(scheduled))]

    def _announce(self, request: HandRequest) -> NewRequest:
        return NewRequest(
            request_id=request.request_id,
            tokens=tuple(request.tokens),
            num_prompt=len(request.tokens),
            params=SamplingParams(),
            pages=tuple(request.pages.global_pages),
            window_pages=tuple(request.pages.window_pages),
            num_computed=request.num_computed,
            image_rows=request.image_rows,
            embeddings=request.embeddings,
        )

    def _continue(self, request: HandRequest) -> RunningRequest:
        assert request.sent is not None, "a running request was announced"
        return RunningRequest(
            request.request_id,
            tuple(request.pages.global_pages[request.sent[0] :]),
            tuple(request.pages.window_pages[request.sent[1] :]),
            tuple(request.tokens[request.num_computed :]),
        )
