"""The decoder as one compiled callable, called like the decoder itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from dsv41.backends import Backends
from dsv41.graphs.compile import compile_whole, inner_compiler, mark_dynamic
from dsv41.graphs.segments import Segment, compile_segments, cut
from dsv41.model.caches import KVCaches
from dsv41.model.decoder import Decoder
from dsv41.model.inputs import StepInputs, StepOutput
from dsv41.model.plan import LayerPlan


class CompiledModule:
    """The whole layer stack traced as one graph, cut at the eager ops, each segment compiled by `inner`.

    One compile serves every number of token rows above one, and one more serves a single row. Nothing is
    compiled before the first call; `num_compiles` and `compile_seconds` say what happened since.
    """

    def __init__(self, decoder: Decoder, inner: str = "inductor") -> None:
        self.decoder, self.inner = decoder, inner
        self.segments: tuple[Segment, ...] = ()
        self.num_compiles, self.compile_seconds = 0, 0.0
        self._compiler = inner_compiler(inner)
        self._forward = compile_whole(decoder.forward, self._compile)

    @property
    def plan(self) -> tuple[LayerPlan, ...]:
        return self.decoder.plan

    @property
    def backends(self) -> Backends:
        return self.decoder.context.backends

    def _compile(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        started = time.perf_counter()
        pieces, self.segments = cut(graph)
        compile_segments(pieces, self.segments, self._compiler)
        self.num_compiles += 1
        self.compile_seconds += time.perf_counter() - started
        return pieces

    @torch.inference_mode()
    def __call__(self, step: StepInputs, caches: KVCaches) -> StepOutput:
        mark_sizes(step)
        return self._forward(step, caches)


def mark_sizes(step: StepInputs) -> None:
    """The sizes that change from step to step: rows, and pages of the longest context."""
    for tensor in step.row_tensors():
        mark_dynamic(tensor, 0)
    mark_dynamic(step.attention.page_table, 1)


def trace_segments(decoder: Decoder, step: StepInputs, caches: KVCaches) -> tuple[Segment, ...]:
    """The segments of a decoder; nothing is compiled, and everything may be on the meta device."""
    found: list[tuple[Segment, ...]] = []

    def keep(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.append(cut(graph)[1])
        return graph.forward

    with torch.inference_mode():
        mark_sizes(step)
        compile_whole(decoder.forward, keep)(step, caches)
    return found[0]
