"""Whole steps as CUDA graphs, one per bucket.

A graph replays fixed kernels on fixed addresses. Per bucket there is one static copy of a step: a replay
copies the step in, launches the graph, and returns its results, which hold until the next replay. The caches
and weights must stay where they were at capture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dsv41.graphs.buckets import Bucket, fit
from dsv41.model.caches import KVCaches
from dsv41.model.inputs import StepInputs, StepOutput

Run = Callable[[StepInputs, KVCaches], StepOutput]
# Runs the work often enough to compile its kernels, records it, and returns what it returned and how to
# replay it.
Recorder = Callable[[Callable[[], StepOutput]], tuple[StepOutput, Callable[[], None]]]
WARMUP = 2  # runs before a recording: the first compiles, the second must find everything compiled


@dataclass(frozen=True)
class Captured:
    """One bucket's graph: the step it reads, the output it writes."""

    step: StepInputs
    output: StepOutput
    replay: Callable[[], None]


def cuda_recorder(device: str) -> Recorder:
    """Records on a stream of its own into one memory pool that all recordings share."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def record(work: Callable[[], StepOutput]) -> tuple[StepOutput, Callable[[], None]]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                work()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            output = work()
        return output, graph.replay

    return record


class Graphs:
    """The captured steps of one callable over one set of caches.

    `padding(rows)` makes a step of rows that name nothing. The graphs are recorded here, largest bucket
    first; `seconds` says how long it took.
    """

    @torch.inference_mode()
    def __init__(
        self,
        run: Run,
        caches: KVCaches,
        buckets: Sequence[Bucket],
        padding: Callable[[int], StepInputs],
        record: Recorder,
    ) -> None:
        started = time.perf_counter()
        self._captured: dict[Bucket, Captured] = {}
        for bucket in sorted(buckets, reverse=True):
            step = narrow(padding(bucket.rows), bucket.pages)
            output, replay = record(lambda step=step: run(step, caches))  # type: ignore[misc]
            self._captured[bucket] = Captured(step, output, replay)
        self.seconds = time.perf_counter() - started

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(self._captured)

    def fit(self, rows: int, pages: int) -> Bucket | None:
        """The bucket for a step of `rows` rows whose requests have at most `pages` pages, if there is one."""
        return fit(self._captured, rows, pages)

    @torch.inference_mode()
    def __call__(self, bucket: Bucket, step: StepInputs) -> StepOutput:
        """Run a step that is padded to `bucket`. The result is overwritten by the bucket's next step."""
        captured = self._captured[bucket]
        assert step.num_rows == bucket.rows, f"a step of {step.num_rows} rows for a graph of {bucket.rows}"
        table = step.attention.page_table[:, : bucket.pages]
        torch._foreach_copy_(
            [*captured.step.row_tensors(), captured.step.attention.page_table], [*step.row_tensors(), table]
        )
        captured.replay()
        return captured.output


def narrow(step: StepInputs, pages: int) -> StepInputs:
    """The step over the first `pages` pages of every request, in a table of their own (a compiled graph takes
    another row pitch for another kind of table)."""
    table = step.attention.page_table[:, :pages].contiguous()
    return replace(step, attention=replace(step.attention, page_table=table))
