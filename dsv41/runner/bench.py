"""Speed of prefill and decode through the engine, next to what the machine could do.

Correctness first: before a number is shown, the measured callable must agree with the eager reference on
the same inputs. The roof (read bandwidth, matmul rate) is measured in the same run: another day differs.
"""

from __future__ import annotations

import platform
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dsv41
from dsv41.config import EngineConfig
from dsv41.graphs.capture import Run
from dsv41.graphs.module import CompiledModule
from dsv41.model.costs import Span, StepCost, Weights, step_cost, weights_by_part
from dsv41.runner.engine import LLM
from dsv41.runner.load import Model
from dsv41.runner.parity import Parity, ParityError, compare, random_tokens
from dsv41.runner.request import Request, SamplingParams

Say = Callable[[str], None]

MODES = ("eager", "compile", "graph")
CPU_MODES = ("eager", "compile")  # without CUDA graphs
STEP_TOKENS = 4096  # most rows of one step
LEAST = 8  # tokens of capacity that the parity steps need


@dataclass(frozen=True)
class Workload:
    """Prefill of every (batch, prompt_len) and decode of every (batch, depth, gen_len), in every mode."""

    batch: tuple[int, ...] = (1, 4)
    prompt_len: tuple[int, ...] = (32,)
    depth: tuple[int, ...] = (32,)  # tokens in the cache before the first measured step
    gen_len: tuple[int, ...] = (4,)
    mode: tuple[str, ...] = CPU_MODES
    repeat: int = 2
    warmup: int = 0  # the parity steps have compiled and touched everything once already
    scenario: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "prompt_len", "depth", "gen_len"):
            wrong = next(
                (value for value in getattr(self, name) if type(value) is not int or value < 1), None
            )
            if wrong is not None:
                raise ValueError(f"bench: {name} holds {wrong!r}, but must hold integers of at least 1")
        unknown = next((mode for mode in self.mode if mode not in MODES), None)
        if unknown is not None:
            raise ValueError(f"bench: mode {unknown!r} is not one of {', '.join(MODES)}")
        for name, least in (("repeat", 1), ("warmup", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"bench: {name} is {value!r}, but must be an integer of at least {least}")
        if not (self.mode and list(self.cases())):
            raise ValueError("bench: nothing to measure: give a batch, and prompt_len or depth and gen_len")

    def cases(self) -> Iterator[Case]:
        """Every measurement of one mode."""
        for batch in self.batch:
            for length in self.prompt_len:
                yield Case("prefill", batch, length, 0)
            for depth in self.depth:
                for length in self.gen_len:
                    yield Case("decode", batch, depth, length)


class Case(NamedTuple):
    """`context` is the prompt of a prefill, the depth of a decode."""

    kind: str
    batch: int
    context: int
    gen_len: int

    @property
    def lead(self) -> int:
        """Steps that prefilling takes: an early request decodes while the last ones still prefill."""
        return -(-self.batch * self.context // max(STEP_TOKENS - self.batch, 1))

    @property
    def max_tokens(self) -> int:
        return self.gen_len + self.lead if self.kind == "decode" else 1


def find_scenario(name: str) -> Path:
    """Its file in profiles/scenarios, here or beside the package. Raises ValueError if there is none."""
    roots = (Path.cwd(), Path(dsv41.__path__[0]).parent)
    folders = [root / "profiles" / "scenarios" for root in roots]
    found = {path.stem: path for folder in reversed(folders) for path in sorted(folder.glob("*.toml"))}
    if name not in found:
        raise ValueError(f"--scenario {name}: there are {', '.join(found) or 'none in profiles/scenarios'}")
    return found[name]


def load_scenario(path: Path) -> tuple[str, Workload]:
    """The preset and the workload of a scenario file. Raises ValueError for anything else than a scenario."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    content["scenario"] = content.pop("name", path.stem)
    content.pop("about", None)
    preset = content.pop("preset", None)
    if not isinstance(preset, str):
        raise ValueError(f"{path} names no preset")
    known = {item.name for item in fields(Workload)}
    unknown = next((key for key in content if key not in known), None)
    if unknown is not None:
        raise ValueError(
            f"{path}: unknown key {unknown!r}; there are name, about, preset, {', '.join(sorted(known))}"
        )
    lists = ("batch", "prompt_len", "depth", "gen_len", "mode")
    wrong = next((key for key in lists if key in content and not isinstance(content[key], list)), None)
    if wrong is not None:
        raise ValueError(f"{path}: {wrong} must be a list")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
    return preset, Workload(**values)


def capacity(workload: Workload, seed: int) -> EngineConfig:
    """One size for the whole run: the shapes of caches and page table stay, so nothing compiles twice."""
    cases = list(workload.cases())
    return EngineConfig(
        max_batch_tokens=max(LEAST, *(min(STEP_TOKENS, case.batch * case.context) for case in cases)),
        max_requests=max(2, *workload.batch),
        max_context_tokens=max(LEAST, *(case.context + case.max_tokens for case in cases)),
        seed=seed,
    )


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


def _run_case(llm: LLM, case: Case, seed: int) -> list[Sample]:
    """One repetition: fill the engine, prefill, then decode; the samples of the kind that is asked for."""
    params = SamplingParams(max_tokens=case.max_tokens, ignore_eos=True)
    prompts = [random_tokens(case.context, llm.model, seed + number) for number in range(case.batch)]
    requests = [llm.add(tokens, params) for tokens in prompts]
    samples = []
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
    for _ in range(workload.warmup):
        _run_case(llm, case, seed)
    return [sample for _ in range(workload.repeat) for sample in _run_case(llm, case, seed)]


def _percentiles(samples: Sequence[float]) -> dict[str, float]:
    if len(samples) == 1:
        return dict.fromkeys(("p10", "p50", "p90"), samples[0])
    cuts = quantiles(samples, n=10, method="inclusive")
    return {"p10": cuts[0], "p50": cuts[4], "p90": cuts[8]}


@dataclass
class Bench:
    """The whole run. `rows()` yields one JSON-ready dict per mode and case."""

    model: Model
    workload: Workload
    seed: int
    say: Say
    engine: EngineConfig = field(init=False)
    weights: Mapping[str, Weights] = field(init=False)
    roof: Roof = field(init=False)

    def __post_init__(self) -> None:
        self.engine = capacity(self.workload, self.seed)
        self.engine.validate(self.model.config)
        self.weights = weights_by_part(self.model.config)
        dtype = getattr(torch, self.model.config.numerics.dtype_name)
        self.roof = measure_roof(self.model.device, dtype)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Raises ParityError, before any number, when a mode does not agree with the reference."""
        for mode in self.workload.mode:
            run: Run = self.model.decoder
            compiled, engine = None, self.engine
            if mode != "eager":
                run = compiled = CompiledModule(self.model.decoder)
                self.say("compiling the decoder, once for many rows and once for a single row")
            if mode == "graph":
                engine = replace(engine, graph_rows=max(self.workload.batch))
            parity = compare(self.model, engine, run)
            if compiled is not None:
                self.say(f"compiled {compiled.num_compiles} graphs in {compiled.compile_seconds:.1f} s")
            if not parity.passed:
                raise ParityError(
                    f"bench: {mode} differs from the reference by {parity.worst_row:.2g} in its worst of "
                    f"{parity.rows} rows, more than {parity.limit:g}: no numbers"
                )
            llm = LLM(self.model, engine, run)
            if llm.worker.graphs is not None:
                graphs = llm.worker.graphs
                self.say(f"captured {len(graphs.buckets)} steps in {graphs.seconds:.1f} s")
            num_compiles = compiled.num_compiles if compiled is not None else 0
            for case in self.workload.cases():
                self.say(f"measuring {mode}: {case.kind}, batch {case.batch}, context {case.context}")
                samples = measure(llm, case, self.workload, self.seed)
                if compiled is not None and compiled.num_compiles != num_compiles:
                    raise RuntimeError(
                        f"bench: {case.kind} of batch {case.batch} compiled again while measured"
                    )
                yield self._row(mode, case, samples, parity)

    def _row(self, mode: str, case: Case, samples: list[Sample], parity: Parity) -> dict[str, Any]:
        milliseconds = [sample.seconds * 1e3 for sample in samples]
        spread = _percentiles(milliseconds)
        costs = [self._cost(spans) for spans in samples[len(samples) // 2].spans]
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
            "tokens_per_second": tokens / seconds,
            "milliseconds": {**spread, "samples": milliseconds},
            "num_bytes": num_bytes,
            "flops": sum(cost.flops for cost in costs),
            "gigabytes_per_second": num_bytes / seconds / 1e9,
            "floor_milliseconds": floor * 1e3,
            "fraction_of_roof": floor / seconds,
            "parity": {"rows": parity.rows, "worst_row": parity.worst_row, "limit": parity.limit},
            **self.setting(),
        }

    def _cost(self, spans: Sequence[Span]) -> StepCost:
        model = self.model
        return step_cost(model.config, model.plan, model.layout, self.weights, spans)

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
        return [
            *weights,
            "prompts of uniform random ids",
            "no shared prefixes, caches empty at the start",
            "costs assume uniform routing",
        ]
