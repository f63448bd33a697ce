"""Profiling: the steps that are watched are the engine's, names are taken away again, and sums close."""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv41.backends import FAMILIES
from dsv41.graphs.module import CompiledModule
from dsv41.model.inputs import StepOutput
from dsv41.ops.library import implementation
from dsv41.runner import trace
from dsv41.runner.load import Model, blueprint, load
from dsv41.runner.parity import random_tokens
from dsv41.runner.parts import CLOSES_WITHIN, Line, Summary, op_parts, summarise
from dsv41.runner.request import SamplingParams
from dsv41.runner.trace import Driver, Target, commands, named_ops, nvtx_mark, profile, write_summary
from tests.runner.engines import SMALL

STAGES = {"schedule", "execute", "decoder", "sampling", "results"}
has_gpu = torch.cuda.is_available()
hopper = has_gpu and torch.cuda.get_device_capability()[0] == 9


@cache
def small() -> Model:
    return load(blueprint(preset_name="tiny", overrides=[SMALL], device="cpu"))


def quiet(line: str) -> None:
    del line


class Marks:
    """Ranges that write down their nesting: `step 0/decoder/moe.experts`."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.paths: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Any:
        self.open.append(name)
        self.paths.append("/".join(self.open))
        try:
            yield
        finally:
            self.open.pop()


def functions() -> dict[tuple[str, str], Any]:
    """Every op's reference implementation, as it stands in its module."""
    parts = (part.split(".") for part in op_parts().values())
    return {(family, op): getattr(implementation(family, "reference"), op) for family, op in parts}


# -- the steps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_watched_steps_are_the_engine_s(batch: int) -> None:
    """`Driver.step` is `LLM.step` taken apart: the same tokens, however a step is watched."""
    target = Target("decode", batch, context=9, steps=2, warmup=1)
    driver, marks = Driver(small(), target, seed=5), Marks()
    driver.warm()
    requests = list(driver.llm.scheduler.requests)
    before = [len(request.output) for request in requests]
    for name in ("step 0", "step 1"):
        assert driver.step(name, marks) > 0
    assert [len(request.output) for request in requests] == [count + 2 for count in before]
    plain = Driver(small(), target, seed=5).llm
    prompts = [random_tokens(9, small(), 5 + number) for number in range(batch)]
    params = SamplingParams(max_tokens=max(before) + 2, ignore_eos=True)
    for request, answer in zip(requests, plain.generate(prompts, params), strict=True):
        assert tuple(request.output) == answer.tokens[: len(request.output)]
    stages = ("schedule", "execute", "execute/decoder")
    assert marks.paths[:4] == ["step 0", *(f"step 0/{stage}" for stage in stages)]
    own = [path for path in marks.paths if path.startswith("step 1") and "." not in path]
    assert own[-2:] == ["step 1/sampling", "step 1/results"]


def test_a_prefill_begins_anew_when_it_is_through() -> None:
    driver = Driver(small(), Target("prefill", 2, context=11, steps=3, warmup=1), seed=0)
    driver.warm()
    assert not driver.llm.has_work
    for number in range(3):
        driver.step(f"step {number}")
        assert driver.llm.worker.num_steps == 2 + number, "two prompts of 11 tokens are one step"


def test_a_fault_ends_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(small(), Target(context=4), seed=0)
    fault = SimpleNamespace(result=SimpleNamespace(error="NaN in layer 2"))
    monkeypatch.setattr(driver.llm.scheduler, "update", lambda results: [fault])
    with pytest.raises(RuntimeError, match="profile: NaN in layer 2"):
        driver.warm()


def test_the_profiler_range_holds_warm_steps_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: start after the warm-up and a wait for the device, stop after the steps and another wait."""
    happened: list[str] = []

    @contextmanager
    def profiler_range() -> Any:
        happened.append("start")
        yield
        happened.append("stop")

    def step(self: Driver, name: str, mark: Any = nullcontext) -> float:
        happened.append(name)
        return real(self, name, mark)

    real = Driver.step
    monkeypatch.setattr(Driver, "step", step)
    monkeypatch.setattr(Driver, "on_gpu", property(lambda driver: True))
    monkeypatch.setattr(Driver, "synchronize", lambda driver: happened.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "profile", profiler_range)
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=Marks()))
    profile(small(), Target(context=4, steps=2, warmup=1), 0, quiet, None, summarised=False)
    assert happened == ["prefill", "warm-up", "wait", "start", "step 0", "step 1", "wait", "stop"]


# -- names -------------------------------------------------------------------------------------------------


def test_every_op_has_a_part() -> None:
    namespace = torch._C._dispatch_get_all_op_names()
    declared = {name.split("::")[1] for name in namespace if name.startswith("dsv41::")}
    assert set(op_parts()) == declared
    assert {part.split(".")[0] for part in op_parts().values()} == set(FAMILIES)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compile"])
def test_nvtx_names_every_step_and_every_op(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """Compiled code calls the same implementations, and torch's profiler sees the same ops."""
    marks, before = Marks(), functions()
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=marks))
    monkeypatch.setattr(trace, "CompiledModule", partial(CompiledModule, inner="eager"))
    mode = "compile" if compiled else "eager"
    found = profile(small(), Target(context=9, mode=mode, steps=2), 0, quiet, None, summarised=True)
    steps = [[path for path in marks.paths if path.startswith(f"step {n}")] for n in range(2)]
    assert [path.replace("step 0", "step 1") for path in steps[0]] == steps[1]
    assert sum(map(len, steps)) == len(marks.paths), "warm-up steps are not named"
    counts, layers = Counter(steps[0]), len(small().plan)
    for op in ("attention.sparse_attention", "moe.experts", "projections.project_inputs"):
        assert counts[f"step 0/execute/decoder/{op}"] == layers
    assert counts["step 0/execute/decoder/moe.experts/linear.linear_fp8"] in (0, 2 * layers)
    assert counts["step 0/sampling/linear.linear"] == 1
    sources = sum(layer.owns_index for layer in small().plan)
    assert counts["step 0/execute/decoder/indexing.select"] == sources
    assert functions() == before, "the wrappers stayed"
    assert found.summary is not None
    calls = {line.part: line.calls for line in found.summary.lines if "." in line.part}
    outermost = Counter(path.split("/")[-1] for path in steps[0] if path.count(".") == 1)
    assert calls == outermost


def test_names_are_taken_away_after_an_error() -> None:
    before = functions()

    def break_off() -> None:
        with named_ops(small().backends, Marks()):
            assert functions() != before
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        break_off()
    assert functions() == before


def test_without_the_package_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is optional; what takes its place is said, never guessed."""
    said: list[str] = []
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert nvtx_mark(False, said.append) is None
    assert nvtx_mark(True, said.append) is torch.cuda.nvtx.range
    assert len(said) == 2
    assert all("nvtx is not installed" in line for line in said)
    present = SimpleNamespace(annotate=Marks())
    monkeypatch.setitem(sys.modules, "nvtx", present)
    assert nvtx_mark(True, said.append) is present.annotate
    assert len(said) == 2


def test_the_printed_commands_run_the_same_steps() -> None:
    argv = [
        "profile",
        "decode",
        "--depth",
        "4k",
        "--trace",
        "a b.json",
        "--set",
        "num_layers=3",
        "--summary=s",
    ]
    for command in commands([*argv, "--output", "rows", "--quiet"], "decode-1x4096-eager"):
        words = shlex.split(command)
        own = words[words.index(sys.executable) :]
        assert own[1:3] == ["-m", "dsv41.run"]
        assert own[3:] == ["profile", "decode", "--depth", "4k", "--set", "num_layers=3", "--quiet"]
    nsys, ncu = (shlex.split(command) for command in commands(["profile", "--tra", "x", "--sum=y"], "name"))
    assert nsys[-1] == "profile", "argparse takes flags that are cut short"
    assert nsys[:2] == ["nsys", "profile"]
    assert {"--capture-range=cudaProfilerApi", "--output=name"} <= set(nsys)
    assert ncu[: ncu.index("--nvtx")] == ["ncu", "--profile-from-start", "off"]
    assert ncu[ncu.index("--nvtx-include") + 1] == "step 0/"


# -- sums --------------------------------------------------------------------------------------------------


def read(summary: Summary, traced: tuple[float, ...]) -> dict[str, dict[str, float]]:
    """The CSV file's lines by part."""
    file = io.StringIO()
    write_summary(summary, traced, file)
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert [row["part"] for row in rows][-2:] == ["other", "step"]
    return {row.pop("part"): {name: float(value) for name, value in row.items()} for row in rows}


@pytest.mark.parametrize("target", [Target("decode", 2, 9, steps=2), Target("prefill", 1, 20, steps=1)])
def test_the_parts_add_up_to_the_step(target: Target, tmp_path: Path) -> None:
    """The parts are spans of the trace, the step is measured by the host's own clock."""
    said: list[str] = []
    found = profile(small(), target, 0, said.append, tmp_path / "trace.json", summarised=True)
    assert found.summary is not None
    rows = read(found.summary, found.traced_seconds)
    step = rows.pop("step")
    assert step["milliseconds"] == pytest.approx(fmean(found.traced_seconds) * 1e3, abs=1e-5)
    total = sum(row["milliseconds"] for row in rows.values())
    assert abs(total - step["milliseconds"]) <= CLOSES_WITHIN * step["milliseconds"]
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1, abs=1e-4)
    largest = max(rows.values(), key=lambda row: row["share"])
    assert largest["share"] > 2 * CLOSES_WITHIN, "the sum would not miss its largest part"
    assert not any("add up" in line for line in said)
    layers = len(small().plan)
    for part in ("attention.sparse_attention", "moe.experts", "moe.route", "publish.publish_window"):
        assert rows[part]["calls"] == layers
        assert rows[part]["launches"] > layers
    assert {part for part in rows if "." not in part} == STAGES | {"other"}
    assert rows["decoder"]["calls"] == rows["sampling"]["calls"] == 1
    assert rows["other"]["share"] < CLOSES_WITHIN
    assert rows["moe.experts"]["share"] > rows["schedule"]["share"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_sum_that_does_not_close_is_said() -> None:
    said: list[str] = []
    line = Line("other", 1, 1, 9.7, 1.0)
    trace._check_sum(Summary((line,), ()), (0.01, 0.01), said.append)
    trace._check_sum(Summary((line._replace(milliseconds=9.9),), ()), (0.01, 0.01), said.append)
    assert len(said) == 1
    assert "9.700 ms" in said[0]


def host(name: str, start: float, end: float, cat: str = "user_annotation") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": {}}


def launch(correlation: int, moment: float, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    call = host(name, moment, moment + 1, "cuda_runtime" if name.startswith("cuda") else "cuda_driver")
    return call | {"args": {"correlation": correlation}}


def kernel(name: str, correlation: int, start: float, end: float, cat: str = "kernel") -> dict[str, Any]:
    return host(name, start, end, cat) | {"args": {"correlation": correlation}}


def step_of(first: float, name: str = "step 0") -> list[dict[str, Any]]:
    """100 us: the decoder from 10 to 60 with experts from 20 to 40, of which 25 to 35 is a linear op."""
    return [
        host(name, first, first + 100),
        host("execute", first + 5, first + 60),
        host("decoder", first + 10, first + 60),
        host("dsv41::experts", first + 20, first + 40, "cpu_op"),
        host("dsv41::linear_fp8", first + 25, first + 35, "cpu_op"),
        host("sampling", first + 60, first + 90),
        host("dsv41::linear", first + 61, first + 70, "cpu_op"),
        host("aten::topk", first + 72, first + 80, "cpu_op"),
        host("aten::sort", first + 73, first + 79, "cpu_op"),
    ]


def by_part(summary: Summary) -> dict[str, tuple[float, float, float]]:
    return {
        line.part: (line.calls, line.launches, round(line.milliseconds * 1e3, 6)) for line in summary.lines
    }


def test_time_of_nested_ranges_on_the_host() -> None:
    """An op within an op is the outer one's; the rest of a stage is the stage's."""
    found = by_part(
        summarise([*step_of(1000), *step_of(2000, "step 1"), host("aten::add", 1500, 1600, "cpu_op")])
    )
    assert found == {
        "moe.experts": (1, 1, 20),
        "decoder": (1, 0, 30),
        "execute": (1, 0, 5),
        "linear.linear": (1, 1, 9),
        "sampling": (1, 1, 21),
        "other": (0, 0, 15),
    }


def test_time_of_overlapping_kernels() -> None:
    """Two kernels side by side have half of the time each: the sum stays the step's."""
    events = [
        *step_of(1000),
        launch(1, 1022),  # within the experts
        kernel("grouped", 1, 1030, 1050),
        launch(2, 1027, "cuLaunchKernelEx"),  # within a linear op within the experts
        kernel("skinny", 2, 1040, 1060),
        launch(3, 1050),  # the decoder's own
        kernel("add", 3, 1045, 1055),
        launch(4, 1065),  # the head, which ends behind the step
        kernel("head", 4, 1090, 1110),
        launch(5, 950),  # before the step, but running in it
        kernel("earlier", 5, 990, 1010),
        kernel("nobody's", 99, 1060, 1062, "gpu_memset"),
        launch(6, 1085),
        kernel("copy", 6, 1062, 1064, "gpu_memcpy"),
    ]
    summary = summarise(events)
    found = by_part(summary)
    # Four times 5 us from 1040 on: both kernels of the experts; both and the add; one and the add; one.
    experts = 10 + 5 + 5 * 2 / 3 + 5 / 2 + 5
    times = {part: time for part, (_, _, time) in found.items()}
    assert times["decoder"] == pytest.approx(5 / 3 + 5 / 2, abs=1e-5)
    assert sum(times.values()) == pytest.approx(100)
    assert times["moe.experts"] == pytest.approx(experts, abs=1e-5)
    assert times["linear.linear"] == 10
    assert times["other"] == 10 + 2
    assert times["sampling"] == 2
    assert times["idle"] == pytest.approx(100 - 30 - 10 - 12 - 2)
    assert {part: launches for part, (_, launches, _) in found.items() if launches} == {
        "moe.experts": 2,
        "decoder": 1,
        "linear.linear": 1,
        "sampling": 1,
    }
    assert [line.part for line in summary.lines][-2:] == ["idle", "other"]
    assert summary.kernels[0] == ("moe.experts", "grouped", 1.0, 0.02)


def test_kernels_of_a_graph_are_known_from_the_step_without_it() -> None:
    """By name and order within the decoder; a name that the step without a graph lacks is the graph's own."""
    first = step_of(1000, "step without its graph")
    first += [launch(1, 1006), kernel("add", 1, 1007, 1008)]  # the inputs': no kernel of the graph
    first += [launch(2, 1012), kernel("add", 2, 1020, 1022), launch(3, 1030), kernel("add", 3, 1031, 1033)]
    first += [launch(4, 1062), kernel("add", 4, 1065, 1066)]  # the head's
    replayed = [event for event in step_of(2000) if event["name"] not in ("decoder", "dsv41::experts")]
    replayed += [
        launch(7, 2030, "cudaGraphLaunch"),
        kernel("add", 7, 2031, 2035),
        kernel("add", 7, 2035, 2043),
    ]
    replayed += [kernel("add", 7, 2043, 2044), kernel("fused", 7, 2044, 2046)]
    found = by_part(summarise([*first, *replayed]))
    assert found["decoder"] == (0, 1, 4)
    assert found["moe.experts"] == (0, 1, 8)
    assert found["graph"] == (0, 2, 3)
    assert found["idle"] == (0, 0, 85)


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="no step"):
        summarise([host("step without its graph", 0, 1), host("decoder", 0, 1)])


# -- captured steps ----------------------------------------------------------------------------------------


class Replays:
    """A recorder without a GPU: a replay computes again, into the tensors of the recording."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, work: Callable[[], StepOutput]) -> tuple[StepOutput, Callable[[], None]]:
        output = work()

        def replay() -> None:
            self.count += 1
            for tensor, value in zip(vars(output).values(), vars(work()).values(), strict=True):
                tensor.copy_(value)

        return output, replay


def test_captured_steps_are_replayed_but_for_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin runs the same rows kernel by kernel, and the graph is there again after it."""
    recorder = Replays()
    monkeypatch.setattr(trace, "cuda_recorder", lambda device: recorder)
    driver = Driver(small(), Target(context=9, mode="eager-graph", steps=1), seed=0)
    driver.warm()
    before = recorder.count
    assert before == 2, "the warm-up replays, but for its twin"
    driver.step_without_graph(Marks())
    assert recorder.count == before
    driver.step("step 0", Marks())
    assert recorder.count == before + 1


def test_a_captured_profile_has_room_for_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps come before the last token of the requests; with the twins there are two more of them."""
    monkeypatch.setattr(trace, "cuda_recorder", lambda device: Replays())
    found = profile(small(), Target(context=9, mode="eager-graph", steps=2), 0, quiet, None, summarised=True)
    assert len(found.seconds) == len(found.traced_seconds) == 2
    assert found.summary is not None


# -- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu, reason="needs one CUDA GPU")
def test_sums_close_on_a_gpu(tmp_path: Path) -> None:
    said: list[str] = []
    model = load(blueprint(preset_name="tiny", overrides=[SMALL], device="cuda"))
    found = profile(model, Target("decode", 2, 9), 0, said.append, tmp_path / "trace.json", summarised=True)
    assert found.summary is not None
    rows = read(found.summary, found.traced_seconds)
    step = rows.pop("step")["milliseconds"]
    assert abs(sum(row["milliseconds"] for row in rows.values()) - step) <= CLOSES_WITHIN * step
    assert not any("add up" in line for line in said)
    assert rows["moe.experts"]["launches"] > len(model.plan)
    assert rows["moe.experts"]["milliseconds"] > 0
    assert rows["other"]["launches"] == 0, "every launch belongs to a stage"
    assert found.summary.kernels


@pytest.mark.gpu
@pytest.mark.skipif(not hopper, reason="needs one SM90 GPU")
def test_a_captured_step_s_kernels_have_their_parts() -> None:
    """Nearly all kernels of the replayed graph are found again in the step without it."""
    plan = blueprint(preset_name="kernel", device="cuda", backends="sm90", overrides=["expert_dim=256"])
    found = profile(load(plan), Target("decode", 1, 200, "eager-graph"), 0, quiet, None, summarised=True)
    assert found.summary is not None
    rows = read(found.summary, found.traced_seconds)
    layers = len(plan.plan)
    assert rows["attention.sparse_attention"]["calls"] == 0, "the step was launched as one graph"
    assert rows["attention.sparse_attention"]["launches"] >= layers
    launches = sum(row["launches"] for row in rows.values())
    assert rows.get("graph", {"launches": 0})["launches"] < 0.05 * launches
