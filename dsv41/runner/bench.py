"""Speed of prefill and decode through the engine, next to what the machine could do.

Correctness first: before a number is shown, the measured callable must agree with the eager reference on
the same inputs. The roof (read bandwidth, matmul rate) is measured in the same run: another day differs.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor

from dsv41.config import EngineConfig
from dsv41.graphs.capture import Run
from dsv41.graphs.module import CompiledModule
from dsv41.model.costs import Span, StepCost, Weights, loaded_bytes, step_cost, weights_by_part
from dsv41.runner.engine import LLM, compile_ahead
from dsv41.runner.load import Model
from dsv41.runner.parity import Parity, ParityError, compare, random_tokens
from dsv41.runner.request import Request, SamplingParams
from dsv41.runner.snapshot import Snapshot, repeated, take
from dsv41.runner.start import Start
from dsv41.runner.workload import Case, Workload, capacity

Say = Callable[[str], None]

FILL_TOKENS = 4096  # computed for a fill that is repeated


# -- the roof ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roof:
    bytes_per_second: float
    flops_per_second: float


def measure_roof(device: str, dtype: torch.dtype) -> Roof:
    """A streaming sum over a buffer several times the last cache, and a square matmul; medians."""
    gpu = device != "cpu"
    buffer = torch.ones((1 << 30) if gpu else (1 << 26), dtype=torch.int32, device=device)
    size = 8192 if gpu else 512
    matrix = torch.ones((size, size), dtype=dtype, device=device)
    read = _median_seconds(lambda: buffer.sum(dtype=torch.int32), device)
    multiply = _median_seconds(lambda: matrix @ matrix, device)
    return Roof(buffer.numel() * 4 / read, 2 * size**3 / multiply)


def _median_seconds(work: Callable[[], Tensor], device: str, repeat: int = 5) -> float:
    samples = []
    for _ in range(repeat + 1):
        started = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - started)
    return sorted(samples[1:])[repeat // 2]


# -- measuring ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One timed piece of work: a whole prefill, or one decode step. `spans`: the requests of every step."""

    seconds: float
    spans: tuple[tuple[Span, ...], ...]


def _timed_step(llm: LLM, requests: Sequence[Request]) -> Sample:
    """One step on the host's clock. Taking in its tokens waits for the device."""
    before = [request.num_computed for request in requests]
    started = time.perf_counter()
    events = llm.step()
    seconds = time.perf_counter() - started
    fault = next((event.result.error for event in events if event.result.error), None)
    if fault:
        raise RuntimeError(f"bench: {fault}")
    spans = (Span(start, r.num_computed - start) for start, r in zip(before, requests, strict=True))
    return Sample(seconds, (tuple(span for span in spans if span.rows),))


def _prefill(llm: LLM, tokens: Sequence[int]) -> Snapshot:
    """Compute some tokens, for requests that begin behind them."""
    request = llm.add(tokens, SamplingParams(max_tokens=2, ignore_eos=True))
    while not request.output:
        _timed_step(llm, [request])
    snapshot = take(request, llm.worker)
    llm.abort(request)
    llm.step()
    return snapshot


def _fill(llm: LLM, case: Case, fill: str, seed: int) -> Snapshot | None:
    """What the case's requests begin behind; None if they begin with their first token."""
    num_tokens = case.filled(fill)
    if not num_tokens:
        return None
    computed = min(num_tokens, FILL_TOKENS) if fill == "repeated" else num_tokens
    return _prefill(llm, random_tokens(computed, llm.model, seed))


def _run_case(llm: LLM, case: Case, fill: str, begin: Snapshot | None, seed: int) -> list[Sample]:
    """One repetition: fill the engine, prefill, then decode; the samples of the kind that is asked for."""
    params = SamplingParams(max_tokens=case.max_tokens, ignore_eos=True)
    requests, samples = [], []
    for number in range(case.batch):
        tokens = random_tokens(case.prefix + case.context, llm.model, seed + number)
        if begin is None:
            requests.append(llm.add(tokens, params))
        else:
            requests.append(llm.import_state(repeated(begin, tokens, case.filled(fill), params)))
    while not all(request.output for request in requests):
        samples.append(_timed_step(llm, requests))
    if case.kind == "prefill":
        spans = tuple(span for sample in samples for span in sample.spans)
        samples = [Sample(sum(sample.seconds for sample in samples), spans)]
    else:
        samples = [_timed_step(llm, requests) for _ in range(case.gen_len)]
    for request in requests:  # some decoded while the last ones still prefilled; see Case.lead
        llm.abort(request)
    llm.step()
    return samples


def measure(llm: LLM, case: Case, workload: Workload, seed: int) -> list[Sample]:
    fill = workload.fill
    begin = _fill(llm, case, fill, seed)
    for _ in range(workload.warmup):
        _run_case(llm, case, fill, begin, seed)
    return [sample for _ in range(workload.repeat) for sample in _run_case(llm, case, fill, begin, seed)]


def _percentiles(samples: Sequence[float]) -> dict[str, float]:
    if len(samples) == 1:
        return dict.fromkeys(("p10", "p50", "p90"), samples[0])
    cuts = quantiles(samples, n=10, method="inclusive")
    return {"p10": cuts[0], "p50": cuts[4], "p90": cuts[8]}


def memory_of(llm: LLM, weights: Mapping[str, Weights]) -> dict[str, int]:
    """Bytes: the bill of the weights and the engine's caches, and on a GPU the most that was taken so far."""
    bill = {"weights": loaded_bytes(weights), "caches": llm.caches.num_bytes()}
    device = llm.model.device
    return bill if device == "cpu" else bill | {"peak": torch.cuda.max_memory_allocated(device)}


@dataclass
class Bench:
    """The whole run. `rows()` yields one JSON-ready dict per mode and case."""

    model: Model
    workload: Workload
    seed: int
    say: Say
    start: Start
    late_compile: str = "warn"
    engine: EngineConfig = field(init=False)
    weights: Mapping[str, Weights] = field(init=False)
    roof: Roof = field(init=False)

    def __post_init__(self) -> None:
        sizes = capacity(self.workload, self.model.config, self.seed)
        self.engine = replace(sizes, late_compile=self.late_compile)
        self.engine.validate(self.model.config)
        self.weights = weights_by_part(self.model.config)
        dtype = getattr(torch, self.model.config.numerics.dtype_name)
        self.roof = measure_roof(self.model.device, dtype)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Raises ParityError, before any number, when a mode does not agree with the reference."""
        for case in self.workload.left_out():
            self.say(f"left out, more than cache_tokens: {case.name}")
        for mode in self.workload.mode:
            start, engine = self.start.fork(), self.engine
            compiled = CompiledModule(self.model.decoder) if mode != "eager" else None
            run: Run = compiled if compiled is not None else self.model.decoder
            self.say(f"compiling for {mode}")
            compile_ahead(self.model, engine, run, start)
            if compiled is not None:
                self.say(f"compiled {compiled.num_compiles} graphs in {compiled.compile_seconds:.1f} s")
            if mode == "graph":
                engine = replace(engine, graph_rows=max(self.workload.batch))
            parity = compare(self.model, engine, run)
            if not parity.passed:
                raise ParityError(
                    f"bench: {mode} differs from the reference by {parity.worst_row:.2g} in its worst of "
                    f"{parity.rows} rows, more than {parity.limit:g}: no numbers"
                )
            self._forget_peak()
            with start.phase("capture"):
                llm = LLM(self.model, engine, run)
                llm.warm_up()
            if llm.worker.graphs is not None:
                graphs = llm.worker.graphs
                self.say(f"captured {len(graphs.buckets)} steps in {graphs.seconds:.1f} s")
            for case in self.workload.cases():
                self.say(f"measuring {mode}: {case.name}")
                late = llm.metrics.late_compiles
                samples = measure(llm, case, self.workload, self.seed)
                late = llm.metrics.late_compiles - late
                if llm.metrics.preemptions:
                    raise RuntimeError(f"bench: pages ran out, {case.name} was computed twice")
                row = self._row(mode, case, samples, parity)
                yield row | {
                    "late_compiles": late,
                    "start": start.row(),
                    "memory": memory_of(llm, self.weights),
                }

    def _forget_peak(self) -> None:
        """What the reference run needed is not what the engine needs."""
        if self.model.device != "cpu":
            torch.cuda.reset_peak_memory_stats(self.model.device)

    def _row(self, mode: str, case: Case, samples: list[Sample], parity: Parity) -> dict[str, Any]:
        milliseconds = [sample.seconds * 1e3 for sample in samples]
        spread = _percentiles(milliseconds)
        costs = [self._cost(spans, case) for spans in samples[len(samples) // 2].spans]
        floor = sum(
            cost.floor_seconds(self.roof.bytes_per_second, self.roof.flops_per_second) for cost in costs
        )
        num_bytes, seconds = sum(cost.num_bytes for cost in costs), spread["p50"] / 1e3
        tokens = case.batch * (case.context if case.kind == "prefill" else 1)
        return {
            "scenario": self.workload.scenario,
            "source": self.model.blueprint.source,
            "kind": case.kind,
            "mode": mode,
            "batch": case.batch,
            "prompt_len" if case.kind == "prefill" else "depth": case.context,
            "gen_len": case.gen_len,
            "prefix": case.prefix,
            "fill": self.workload.fill,
            "tokens_per_second": tokens / seconds,
            "milliseconds": {**spread, "samples": milliseconds},
            "num_bytes": num_bytes,
            "flops": sum(cost.flops for cost in costs),
            "gigabytes_per_second": num_bytes / seconds / 1e9,
            "floor_milliseconds": floor * 1e3,
            "fraction_of_roof": floor / seconds,
            "parity": vars(parity),
            **self.setting(),
        }

    def _cost(self, spans: Sequence[Span], case: Case) -> StepCost:
        model, tails = self.model, None
        if self.workload.decoder_replay and case.kind == "prefill":
            first = case.prefix + case.context - model.config.window_tokens
            tails = [
                Span(max(span.start, first), max(0, span.end - max(span.start, first))) for span in spans
            ]
        return step_cost(model.config, model.plan, model.layout, self.weights, spans, tails)

    def setting(self) -> dict[str, Any]:
        """What every row is measured on, and what in it is not real."""
        model = self.model
        return {
            "numerics": model.config.numerics.value,
            "backends": vars(model.backends),
            "device": model.blueprint.hardware.name,
            "threads": torch.get_num_threads() if model.device == "cpu" else None,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "seed": self.seed,
            "roof": {
                "gigabytes_per_second": self.roof.bytes_per_second / 1e9,
                "teraflops_per_second": self.roof.flops_per_second / 1e12,
            },
            "synthetic": self.synthetic(),
        }

    def synthetic(self) -> list[str]:
        weights = [] if self.model.report else [f"stand-in weights (seed {self.seed})"]
        repeats = f"caches repeat the pages of {FILL_TOKENS} tokens"
        return [
            *weights,
            *([repeats] if self.workload.fill == "repeated" else []),
            "prompts of uniform random ids",
            "no shared prefixes, caches empty at the start",
            "costs assume uniform routing",
        ]
