"""Ready means that nothing compiles any more, and that it is heard when something does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from dsv41.graphs.compile import compile_whole
from dsv41.graphs.module import CompiledModule
from dsv41.model.caches import KVCaches
from dsv41.model.inputs import StepInputs, StepOutput
from dsv41.runner.engine import LLM, LateCompileError
from dsv41.runner.load import blueprint
from dsv41.runner.request import SamplingParams
from dsv41.runner.start import Start, artifacts, default_cache_root
from tests.runner.engines import NoModel, engine, model, random_tokens


def traffic(llm: LLM, num_shapes: int, seed: int) -> None:
    """Short requests that come at random, until so many different steps have run."""
    draw, shapes = random.Random(seed), set()
    longest = min(20, llm.engine.max_context_tokens - 2)
    while len(shapes) < num_shapes:
        while draw.random() < 0.6 and len(list(llm.scheduler.requests)) < llm.engine.max_requests:
            prompt = random_tokens(draw.randint(1, longest), draw.randrange(99))
            llm.add(prompt, SamplingParams(max_tokens=draw.randint(1, 2), ignore_eos=True))
        before = {request: request.num_computed for request in llm.scheduler.requests}
        assert all(event.result.error is None for event in llm.step())
        counts = (request.num_computed - done for request, done in before.items())
        shapes.add(tuple(sorted(filter(None, counts))))
    llm.close()


@pytest.mark.parametrize(
    ("num_shapes", "kinds", "choices"),
    [
        (56, 2, {"asynchronous": True, "prefix_mode": "exact"}),
        (12, 7, {"decoder_replay": True, "max_batch_tokens": 9}),
    ],
)
def test_no_step_compiles_after_ready(num_shapes: int, kinds: int, choices: dict[str, object]) -> None:
    """One graph for many rows and one for a single row; with decoder replay those with a tail of many rows,
    one and none, behind many rows and one."""
    module = CompiledModule(model("small").decoder, "eager")
    llm = engine("small", module, late_compile="error", **({"max_batch_tokens": 20} | choices))
    llm.warm_up()
    assert module.num_compiles == kinds
    traffic(llm, num_shapes, seed=3)
    assert module.num_compiles == kinds
    assert llm.metrics.late_compiles == 0


def test_equal_sizes_are_not_taken_for_one() -> None:
    """A trace takes two sizes that are equal for the same one. The page table here is as wide as the step
    that a warm-up would naturally trace, so the next step would have compiled again."""
    module = CompiledModule(model("small").decoder, "eager")
    llm = engine("small", module, late_compile="error", max_context_tokens=7)
    assert llm.scheduler.max_pages == 2
    llm.warm_up()
    traffic(llm, 4, seed=1)
    assert module.num_compiles == 2


class Recompiles(NoModel):
    """A model that compiles whenever its `size` has changed."""

    def __init__(self) -> None:
        super().__init__(model("small"))
        self.size, self.double = 2, compile_whole(self.forward, lambda graph, inputs: graph.forward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def __call__(self, step: StepInputs, caches: KVCaches) -> StepOutput:
        self.double(torch.ones(self.size))
        return super().__call__(step, caches)


@pytest.mark.parametrize("warm", [False, True])
def test_a_late_compile_is_heard(warm: bool, caplog) -> None:
    """One line that names the step, and a count. Before ready nothing is said: that is when to compile."""
    llm = engine("small", doubled := Recompiles())
    if warm:
        llm.warm_up()
    llm.add([5, 6, 7], SamplingParams(max_tokens=2))
    doubled.size += 1
    for _ in range(2):
        assert [event.result.error for event in llm.step()] == [None]
    heard = [record.message for record in caplog.records if record.name.startswith("dsv41")]
    assert len(heard) == llm.metrics.late_compiles == warm
    words = "warning: compiled after ready, in a step of 3 rows (by request: 3): graph "
    assert all(message.startswith(words) for message in heard)


def test_a_late_compile_is_refused() -> None:
    """The step has run: its token is not lost with the error."""
    llm = engine("small", doubled := Recompiles(), late_compile="error")
    llm.warm_up()
    llm.add([5, 6, 7], SamplingParams(max_tokens=1))
    doubled.size += 1
    with pytest.raises(LateCompileError, match=r"^compiled after ready, in a step of 3 rows"):
        llm.step()
    (event,) = llm.step()
    assert event.finish_reason == "length"


def test_a_warm_up_changes_nothing() -> None:
    """Its rows name nothing: no cache changes, and the answers are those of a cold engine."""
    answers = []
    for warm in (False, True):
        llm = engine("small", decoder_replay=False)
        if warm:
            before = [tensor.clone() for tensor in llm.caches.tensors()]
            llm.warm_up()
            assert all(torch.equal(a, b) for a, b in zip(before, llm.caches.tensors(), strict=True))
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        answers.append([one.tokens for one in llm.generate([random_tokens(9), [4]], params)])
    assert answers[0] == answers[1]


# -- what a start is for ----------------------------------------------------------------------------------


def test_cache_root() -> None:
    assert default_cache_root({"DSV41_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert default_cache_root({"XDG_CACHE_HOME": "/b"}) == Path("/b/dsv41")
    assert default_cache_root({"XDG_CACHE_HOME": ""}) == Path.home() / ".cache" / "dsv41"


CHANGES = {
    "config": {"overrides": ["swiglu_limit=3"]},
    "numerics": {"numerics": "fp32"},
    "page_tokens": {"page_tokens": 32},
    "backends": {"backends": "cpu,window_record=rows_fp32"},
}


def test_the_key_follows_every_choice() -> None:
    plans = {name: blueprint(preset_name="tiny", device="cpu", **change) for name, change in CHANGES.items()}
    plain = artifacts(blueprint(preset_name="tiny", device="cpu"), Path("/c"))
    keys = {plain.key} | {artifacts(plan, Path("/c")).key for plan in plans.values()}
    assert len(keys) == 1 + len(CHANGES)
    assert artifacts(blueprint(preset_name="tiny", device="cpu"), Path("/d")).key == plain.key
    assert plain.directory == Path("/c") / plain.key


@pytest.mark.parametrize(
    ("target", "value"),
    [
        ("torch.__version__", "9.9"),
        ("torch.version.git_version", "0" * 40),
        ("dsv41.runner.start.source_hash", lambda: "another source"),
        ("dsv41.runner.start._version", lambda package: "9.9"),
        ("dsv41.runner.start.INDUCTOR_OPTIONS", {}),
        ("torch.backends.cpu.get_cpu_capability", lambda: "another"),
    ],
)
def test_the_key_follows_software_and_processor(target: str, value: object, monkeypatch) -> None:
    plan = blueprint(preset_name="tiny", device="cpu")
    before = artifacts(plan, Path("/c")).key
    monkeypatch.setattr(target, value)
    assert artifacts(plan, Path("/c")).key != before


def test_phases_add_up() -> None:
    start = Start()
    with start.phase("load"):
        pass
    fork = start.fork()
    for _ in range(2):
        with fork.phase("compile"):
            sum(range(100))
    assert set(start.seconds) == {"load"}, "a fork is apart"
    seconds = fork.row()["seconds"]
    assert list(seconds) == ["import", "config", "load", "compile", "capture", "ready"]
    assert seconds["ready"] == pytest.approx(seconds["load"] + seconds["compile"])
    assert seconds["compile"] > 0
