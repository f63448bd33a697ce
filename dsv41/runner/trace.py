"""`profile`: warm steps of one case, all alike, watched in two ways one after the other.

    Nsight           NVTX ranges for the step, its stages and every op, inside a cudaProfiler range
    torch.profiler   a trace, and a summary of it: launches and time by model part

Both need the GPU's one tracing interface, so a process under Nsight must not ask for the second. No other run
is slowed: ops carry ranges only here, for as long as steps are watched.
"""

from __future__ import annotations

import csv
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from statistics import fmean, median
from typing import Any, TextIO

import torch

from dsv41.backends import Backends
from dsv41.config import EngineConfig, ModelConfig
from dsv41.graphs.buckets import Bucket
from dsv41.graphs.capture import Run, cuda_recorder
from dsv41.graphs.module import CompiledModule
from dsv41.model.caches import KVCaches
from dsv41.model.inputs import StepInputs, StepOutput
from dsv41.ops.library import implementation
from dsv41.runner.bench import Say
from dsv41.runner.engine import LLM
from dsv41.runner.load import Model
from dsv41.runner.parity import random_tokens
from dsv41.runner.parts import CLOSES_WITHIN, TWIN, Line, Summary, op_parts, summarise
from dsv41.runner.report import table
from dsv41.runner.request import SamplingParams
from dsv41.runner.workload import Case, Workload, capacity

Mark = Callable[[str], AbstractContextManager[Any]]  # a named range around a block

CASES = ("decode", "prefill")
MODES = ("eager", "compile", "eager-graph", "graph")  # `graph`: compiled, then captured


@dataclass(frozen=True)
class Target:
    """What is profiled: decode steps at a depth of `context` tokens, or the steps of prefills of so many."""

    kind: str = "decode"
    batch: int = 1
    context: int = 32
    mode: str = "eager"
    steps: int = 3
    warmup: int = 2

    def __post_init__(self) -> None:
        tokens = "depth" if self.kind == "decode" else "prompt_len"
        for name, value in (
            ("batch", self.batch),
            (tokens, self.context),
            ("steps", self.steps),
            ("warmup", self.warmup),
        ):
            if value < 1:
                raise ValueError(f"profile: {name} is {value}, but must be at least 1")
        if self.kind == "prefill" and self.captured:
            raise ValueError(f"profile: --mode {self.mode} captures decode steps, not a prefill")

    @property
    def captured(self) -> bool:
        return self.mode.endswith("graph")

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.batch}x{self.context}-{self.mode}"

    @property
    def workload(self) -> Workload:
        """The same as a benchmark's, with steps to warm, to watch twice, and to come before each watch."""
        if self.kind == "prefill":
            return Workload((self.batch,), (self.context,), depth=(), gen_len=())
        steps = self.warmup + 2 * self.steps + 3
        return Workload((self.batch,), prompt_len=(), depth=(self.context,), gen_len=(steps,))

    def engine(self, config: ModelConfig, seed: int) -> EngineConfig:
        return capacity(self.workload, config, seed)


class Driver:
    """Steps of one case through an engine. `step` is `LLM.step` with a range for every stage."""

    def __init__(self, model: Model, target: Target, seed: int) -> None:
        self.target, self.seed = target, seed
        self.case: Case = next(target.workload.cases())
        self._mark: Mark = nullcontext
        compiled = target.mode in ("compile", "graph")
        self._decoder: Run = CompiledModule(model.decoder) if compiled else model.decoder
        self.llm = LLM(model, target.engine(model.config, seed), run=self._run)
        if target.captured:
            bucket = Bucket(target.batch, self.llm.scheduler.max_pages)
            self.llm.worker.capture((bucket,), cuda_recorder(model.device))

    def _run(self, step: StepInputs, caches: KVCaches) -> StepOutput:
        with self._mark("decoder"):
            return self._decoder(step, caches)

    @property
    def on_gpu(self) -> bool:
        return self.llm.model.device != "cpu"

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.llm.model.device)

    def warm(self) -> None:
        """Up to where every further step is one to watch."""
        self._refill()
        if self.case.kind == "decode":
            while not all(request.output for request in self.llm.scheduler.requests):
                self.step("prefill")
        for _ in range(self.target.warmup):
            self.step("warm-up")
        if self.target.captured:
            self.step_without_graph()
        while self.case.kind == "prefill" and self.llm.has_work:  # the first watched step begins a prefill
            self.step("warm-up")

    def _refill(self) -> None:
        """All prompts of the case; those of a prefill come again when they are through."""
        if self.llm.has_work:
            return
        params = SamplingParams(max_tokens=self.case.max_tokens, ignore_eos=True)
        for number in range(self.case.batch):
            self.llm.add(random_tokens(self.case.context, self.llm.model, self.seed + number), params)

    def step(self, name: str, mark: Mark = nullcontext) -> float:
        """One step's seconds on the host's clock, until its tokens are there."""
        self._refill()
        llm, self._mark = self.llm, mark
        with mark(name):
            started = time.perf_counter()
            with mark("schedule"):
                output = llm.scheduler.schedule()
            with mark("execute"):
                llm.worker.execute(output)
            with mark("sampling"):
                launched = llm.worker.sample()
            assert launched is not None, "a step to watch has rows"
            with mark("results"):
                events = llm.scheduler.update(launched.get())
            seconds = time.perf_counter() - started
        fault = next((event.result.error for event in events if event.result.error), None)
        if fault:
            raise RuntimeError(f"profile: {fault}")
        return seconds

    def step_without_graph(self, mark: Mark = nullcontext) -> None:
        """The same work launched kernel by kernel: it tells which part every kernel of the graph serves."""
        worker = self.llm.worker
        graphs, worker.graphs = worker.graphs, None
        try:
            self.step(TWIN, mark)
            self.synchronize()
        finally:
            worker.graphs = graphs


# -- names -------------------------------------------------------------------------------------------------


@contextmanager
def named_ops(backends: Backends, mark: Mark) -> Iterator[None]:
    """While this lasts, every op of the chosen backends runs in a range of its part's name.

    It works on the implementations, so eager and compiled code are served alike, and graphs at capture.
    """
    with ExitStack() as undo:
        for name, part in op_parts().items():
            family = part.partition(".")[0]
            module = implementation(family, getattr(backends, family))
            function = getattr(module, name)
            undo.callback(setattr, module, name, function)
            setattr(module, name, _named(function, part, mark))
        yield


def _named(function: Callable[..., Any], part: str, mark: Mark) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any) -> Any:
        with mark(part):
            return function(*args)

    return run


def nvtx_mark(on_gpu: bool, say: Say) -> Mark | None:
    """Ranges that Nsight shows: by the package nvtx, else by torch on a GPU, else none."""
    try:
        import nvtx
    except ImportError:
        if on_gpu:
            say("the package nvtx is not installed: ranges by torch.cuda.nvtx")
            return torch.cuda.nvtx.range
        say("the package nvtx is not installed, and there is no GPU: no NVTX ranges")
        return None
    return nvtx.annotate


def commands(argv: Sequence[str], name: str) -> list[str]:
    """The nsys and the ncu command of the same run. torch's profiler is left out, see above."""
    kept, skip = [], False
    for item in argv:
        flag, equals, _ = item.partition("=")
        ours = len(flag) > 2 and any(own.startswith(flag) for own in ("--trace", "--summary", "--output"))
        if not (skip or ours):
            kept.append(item)
        skip = ours and not equals
    run = [sys.executable, "-m", "dsv41.run", *kept]
    nsys = ["nsys", "profile", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    nsys += ["--trace=cuda,nvtx", "--cuda-graph-trace=node", "--force-overwrite=true", f"--output={name}"]
    ncu = ["ncu", "--profile-from-start", "off", "--nvtx", "--nvtx-include", "step 0/", "--set", "full"]
    ncu += ["--force-overwrite", "--export", name]
    return [shlex.join([*nsys, *run]), shlex.join([*ncu, *run])]


# -- the command -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profiled:
    """Seconds of the steps under NVTX alone; of those under torch's profiler, and what they add up to."""

    seconds: tuple[float, ...]
    traced_seconds: tuple[float, ...]
    summary: Summary | None


def profile(
    model: Model, target: Target, seed: int, say: Say, trace: Path | None, summarised: bool
) -> Profiled:
    """Watch steps by NVTX, and by torch's profiler if a trace or a summary is wanted."""
    driver = Driver(model, target, seed)
    say(f"warming up {target.name}")
    driver.warm()
    seconds = _watch_by_nvtx(driver, say)
    if trace is None and not summarised:
        driver.llm.close()
        return Profiled(seconds, (), None)
    with tempfile.TemporaryDirectory() as folder:
        path = trace if trace is not None else Path(folder) / "trace.json"
        traced = _watch_by_torch(driver, path)
        driver.llm.close()
        summary = None
        if summarised:
            say("adding up the trace")
            summary = summarise(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
            _check_sum(summary, traced, say)
    return Profiled(seconds, traced, summary)


def _watch_by_nvtx(driver: Driver, say: Say) -> tuple[float, ...]:
    mark = nvtx_mark(driver.on_gpu, say)
    with ExitStack() as watched:
        if mark is not None:
            watched.enter_context(named_ops(driver.llm.model.backends, mark))
        driver.synchronize()
        if driver.on_gpu:
            watched.enter_context(torch.cuda.profiler.profile())
        seconds = [driver.step(f"step {n}", mark or nullcontext) for n in range(driver.target.steps)]
        driver.synchronize()
    return tuple(seconds)


def _watch_by_torch(driver: Driver, path: Path) -> tuple[float, ...]:
    mark, activities = torch.profiler.record_function, [torch.profiler.ProfilerActivity.CPU]
    if driver.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        driver.step("settling", mark)
        if driver.target.captured:
            driver.step_without_graph(mark)
        driver.synchronize()
        seconds = [driver.step(f"step {n}", mark) for n in range(driver.target.steps)]
        driver.synchronize()
    profiler.export_chrome_trace(str(path))
    return tuple(seconds)


def _check_sum(summary: Summary, traced: Sequence[float], say: Say) -> None:
    """The trace's clock against the host's."""
    step = fmean(traced) * 1e3
    if abs(summary.milliseconds - step) > CLOSES_WITHIN * step:
        say(f"the parts add up to {summary.milliseconds:.3f} ms, but a traced step took {step:.3f} ms")


def write_summary(summary: Summary, traced: Sequence[float], file: TextIO) -> None:
    """One line a part, and `step` last: the mean step by the host's clock."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(Line._fields)
    step = Line("step", 1, sum(line.launches for line in summary.lines), fmean(traced) * 1e3, 1.0)
    for part, calls, launches, milliseconds, share in (*summary.lines, step):
        writer.writerow((part, f"{calls:g}", f"{launches:g}", f"{milliseconds:.6f}", f"{share:.6f}"))


def lines(model: Model, target: Target, profiled: Profiled, argv: Sequence[str]) -> list[str]:
    weights = "" if model.report else ", stand-in weights"
    found = [
        f"profile {model.blueprint.source} {target.name}, {model.blueprint.hardware.name}{weights}",
        f"  a step takes {median(profiled.seconds) * 1e3:.3f} ms, the median of {len(profiled.seconds)}",
    ]
    if profiled.traced_seconds:
        found.append(f"  and {median(profiled.traced_seconds) * 1e3:.3f} ms under torch's profiler")
    if profiled.summary is not None:
        rows: list[Sequence[object]] = [("part", "calls", "launches", "ms", "share")]
        for part, calls, launches, milliseconds, share in profiled.summary.lines:
            rows.append((part, f"{calls:g}", f"{launches:g}", f"{milliseconds:.4f}", f"{share:.1%}"))
        found += ["parts of a traced step", *(f"  {line}" for line in table(rows))]
    return [*found, "the same steps under Nsight", *(f"  {line}" for line in commands(argv, target.name))]


def row(model: Model, target: Target, profiled: Profiled) -> dict[str, Any]:
    """The same for machines."""
    summary = profiled.summary
    return {
        "profile": model.blueprint.source,
        **vars(target),
        "backends": vars(model.backends),
        "device": model.blueprint.hardware.name,
        "stand_in_weights": model.report is None,
        "milliseconds": [second * 1e3 for second in profiled.seconds],
        "traced_milliseconds": [second * 1e3 for second in profiled.traced_seconds],
        "parts": None if summary is None else [line._asdict() for line in summary.lines],
        "kernels": None if summary is None else [list(kernel) for kernel in summary.kernels],
    }
