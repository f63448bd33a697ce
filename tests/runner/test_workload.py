"""What a benchmark of steps measures, and that it measures that: the engine's steps are watched."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from dsv41.backends import choose
from dsv41.config import Numerics
from dsv41.hardware import Hardware
from dsv41.presets import preset
from dsv41.runner import bench
from dsv41.runner.bench import measure
from dsv41.runner.engine import LLM
from dsv41.runner.load import Model
from dsv41.runner.request import SamplingParams
from dsv41.runner.snapshot import repeated, take
from dsv41.runner.workload import Case, Workload, capacity, load_scenario
from tests.runner.engines import NoModel, engine, fresh_model, random_tokens

SCENARIOS = sorted((Path(__file__).parents[2] / "profiles" / "scenarios").glob("*.toml"))
NO_DECODE: dict[str, Any] = {"depth": (), "gen_len": ()}


@pytest.fixture(scope="module")
def small() -> Model:
    """In pages of 64 tokens, as `capacity` plans them."""
    return fresh_model("small", page_tokens=64)


def spans_of(small: Model, workload: Workload, monkeypatch) -> list[list[tuple[int, int]]]:
    """For each sample of the only case: (first position, rows) of every request in every step."""
    monkeypatch.setattr(bench, "FILL_TOKENS", 64)
    (case,) = workload.cases()
    llm = LLM(small, capacity(workload, small.config, 0), NoModel(small))
    samples = measure(llm, case, workload, 0)
    assert llm.metrics.preemptions == 0
    assert not llm.has_work
    llm.scheduler.check_integrity()
    return [[(span.start, span.rows) for step in sample.spans for span in step] for sample in samples]


@pytest.mark.parametrize("fill", ["computed", "repeated"])
@pytest.mark.parametrize("prefix", [1, 64, 199])
def test_a_prefill_begins_behind_its_prefix(fill: str, prefix: int, small: Model, monkeypatch) -> None:
    workload = Workload((2,), (40,), (prefix,), mode=("eager",), fill=fill, repeat=2, **NO_DECODE)
    assert spans_of(small, workload, monkeypatch) == [[(prefix, 40), (prefix, 40)]] * 2


def test_a_prompt_longer_than_a_step_is_chunked(small: Model, monkeypatch) -> None:
    workload = Workload((1,), (40,), (7,), mode=("eager",), step_rows=16, repeat=1, **NO_DECODE)
    assert spans_of(small, workload, monkeypatch) == [[(7, 16), (23, 16), (39, 8)]]


@pytest.mark.parametrize("fill", ["computed", "repeated"])
@pytest.mark.parametrize("depth", [1, 130])
def test_a_decode_begins_at_its_depth(fill: str, depth: int, small: Model, monkeypatch) -> None:
    """With a computed fill the first request decodes while the second still prefills; in the end both are at
    the depth or behind it."""
    workload = Workload((2,), (), depth=(depth,), gen_len=(3,), mode=("eager",), fill=fill, repeat=1)
    spans = spans_of(small, workload, monkeypatch)
    assert spans == [[(depth + step, 1)] * 2 for step in range(3)]


def test_repeated_pages_are_those_that_were_computed() -> None:
    """The request goes on from copies: page i is page i modulo the computed ones. The model runs on them."""
    llm = engine("small", max_context_tokens=48)
    first = llm.add(random_tokens(8), SamplingParams(max_tokens=2, ignore_eos=True))
    llm.step()
    snapshot = take(first, llm.worker)
    llm.abort(first)
    longer = repeated(snapshot, random_tokens(31), 30, SamplingParams(max_tokens=3, ignore_eos=True))
    request = llm.import_state(longer)
    assert request.pages is not None
    pages = request.pages.global_pages
    assert len(pages) == 8
    for cache, kept in ((llm.caches.states, snapshot.states), (llm.caches.index_k, snapshot.index_k)):
        for layer, held in kept.items():
            assert len(held) == 2
            assert held.any()
            for place, page in enumerate(pages):
                assert cache[layer][page].equal(held[place % 2])
    while llm.has_work:
        assert all(event.result.error is None for event in llm.step())
    assert len(request.output) == 3


def test_capacity_holds_what_is_measured_and_no_more() -> None:
    """Every request at the longest context would be 128 times too much."""
    workload = Workload((1, 128), (), depth=(512, 1 << 17), gen_len=(32,), cache_tokens=1 << 20)
    assert workload.left_out() == [Case("decode", 128, 1 << 17, 32, lead=4229)]
    sizes = capacity(workload, preset("full"), 0)
    cases = list(workload.cases())
    most = max(case.batch * -(-case.request_tokens // 64) for case in cases)
    assert most <= sizes.global_pages <= 2 * most
    assert sizes.max_requests == 128
    assert sizes.max_context_tokens == max(case.request_tokens for case in cases)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenarios_fit_their_models(path: Path) -> None:
    """Nothing of a scenario file is refused behind minutes of loading."""
    name, spec, workload = load_scenario(path)
    capacity(workload, preset(name), 0).validate(preset(name))
    backends = choose(Hardware("cuda", 90, "H200", 1), Numerics.BF16, spec)
    assert (backends.attention == "reference") == (name == "tiny"), "a big model is benched on kernels"
    assert tomllib.loads(path.read_text())["name"] == path.stem


def test_a_scenario_names_backends_as_text(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text('preset = "tiny"\nbackends = ["sm90"]\n')
    with pytest.raises(ValueError, match="backends must be a spec"):
        load_scenario(path)
    path.write_text('preset = "tiny"\nbackends = "sm90"\n')
    assert load_scenario(path)[:2] == ("tiny", "sm90")


def test_sweeps_reach_what_they_promise() -> None:
    sweeps = {path.stem: load_scenario(path)[2] for path in SCENARIOS}
    decodes, prefills = list(sweeps["decode-sweep"].cases()), list(sweeps["prefill-sweep"].cases())
    assert {case.batch for case in decodes if case.context == 131008} >= {1, 128 // 2}
    assert max(case.context for case in decodes) > 1_000_000
    assert {(case.context, case.prefix) for case in prefills} >= {(512, 0), (16384, 1 << 19)}
    assert sweeps["prefill-sweep"].step_rows >= 16384, "a chunk is one step"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefix": (-1,)}, "prefix holds -1"),
        ({"fill": "random"}, "fill 'random' is not one of computed, repeated"),
        ({"step_rows": 2, "batch": (4,)}, "step_rows 2 is less than a batch of 4"),
        ({"cache_tokens": 1}, "nothing to measure"),
    ],
)
def test_bad_workloads(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Workload(**changes)
