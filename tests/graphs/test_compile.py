"""The decoder as one graph: what is eager, how often it compiles, and that it still computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dsv41
from dsv41.config import EngineConfig
from dsv41.graphs.compile import inner_compiler
from dsv41.graphs.module import CompiledModule, trace_segments
from dsv41.model.plan import WINDOW
from dsv41.runner.engine import Engine
from dsv41.runner.load import Model, blueprint, load, trace_blueprint
from dsv41.runner.request import SamplingParams

CAPACITY = EngineConfig(max_requests=4, max_context_tokens=256)
PROMPTS = [[1, 2, 3, 4, 5] * 9, [7, 8, 9], [3] * 20]
# A stack with one layer of every kind: window, ratio-2 source, reuse, ratio-1 candidate source, reindex.
SHORT = (
    '{"num_layers": 5, "ratios": [0, 2, 2, 1, 1], "kv_sources": [1, 3], "index_sources": [1, 3, 4],'
    ' "candidate_source": 3, "engram.layers": [2], "engram.num_rows": [1025], "draft.stages": 0}'
)


@pytest.fixture(scope="module")
def tiny() -> Model:
    return load(blueprint(preset_name="tiny", device="cpu"))


@pytest.fixture(scope="module")
def short() -> Model:
    return load(blueprint(preset_name="tiny", overrides=[SHORT], device="cpu"))


def step_of(model: Model, rows: int):
    """A prefill step of `rows` rows, with the engine whose caches it belongs to."""
    engine = Engine(model, CAPACITY)
    tokens = torch.arange(rows).remainder(model.config.vocab_size).tolist()
    request = engine.add(tokens, SamplingParams())
    return engine, engine.step_inputs([(request, rows)])


def test_only_selection_and_attention_are_eager(tiny: Model) -> None:
    """Every layer has exactly one eager piece; an index source selects in it, and no other op is in any."""
    engine, step = step_of(tiny, 5)
    segments = trace_segments(tiny.decoder, step, engine.caches)
    eager = [segment.ops for segment in segments if segment.eager]
    assert eager == [("select", "sparse_attention")[not layer.owns_index :] for layer in tiny.plan]
    assert len(segments) == 2 * len(tiny.plan) + 1
    compiled = {op for segment in segments if not segment.eager for op in segment.ops}
    assert compiled.isdisjoint({"select", "sparse_attention"})
    assert {"compress", "publish_states", "experts", "engram_write"} <= compiled
    assert sum(layer.role != WINDOW for layer in tiny.plan) > 4, "the stack must hold layers that select"


def test_segments_of_the_release_need_no_memory() -> None:
    """The full model traces on the meta device: 40 layers, 81 segments."""
    plan = blueprint(preset_name="full", device="cpu")
    segments = trace_blueprint(plan)
    assert len(segments) == 81
    assert sum(segment.eager for segment in segments) == 40


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_one_compile_for_all_row_counts_and_one_for_a_single_row(short: Model, inner: str) -> None:
    """A graph that fixes a row count, a page table or a cache size would compile again here."""
    module = CompiledModule(short.decoder, inner)
    for rows in (5, 2, 17, 64, 3):
        engine, step = step_of(short, rows)
        assert_same(module(step, engine.caches), short, rows)
    assert module.num_compiles == 1
    for _ in range(2):
        engine, step = step_of(short, 1)
        assert_same(module(step, engine.caches), short, 1)
    assert module.num_compiles == 2


def assert_same(output, model: Model, rows: int) -> None:
    engine, step = step_of(model, rows)
    with torch.inference_mode():
        expected = model.decoder(step, engine.caches)
    assert torch.equal(output.hidden, expected.hidden)
    assert torch.equal(output.fault_layer, expected.fault_layer)


def caches_after(model: Model, run) -> tuple[list[list[int]], list[Tensor]]:
    engine = Engine(model, CAPACITY, run=run)
    tokens = engine.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True))
    return tokens, engine.caches.tensors()


def test_compiled_engine_equals_eager_engine(tiny: Model) -> None:
    """Prefill and decode through the whole stack: same tokens, same bytes in every cache."""
    tokens, caches = caches_after(tiny, None)
    compiled_tokens, compiled_caches = caches_after(tiny, CompiledModule(tiny.decoder, "aot_eager"))
    assert compiled_tokens == tokens
    assert all(torch.equal(a, b) for a, b in zip(caches, compiled_caches, strict=True))


def test_inductor_computes_the_same(short: Model) -> None:
    """Inductor may sum a norm's squares in another order, which moves bf16 roundings: logits stay within the
    noise that one such rounding makes (README of the golden data: 1e-2 of a layer's output), tokens stay the
    same."""
    module = CompiledModule(short.decoder, "inductor")
    engine, step = step_of(short, 40)
    output = module(step, engine.caches)
    engine, step = step_of(short, 40)
    with torch.inference_mode():
        expected = short.decoder(step, engine.caches)
        logits, golden = short.decoder.logits(output.hidden), short.decoder.logits(expected.hidden)
    assert float((logits - golden).square().mean().sqrt() / golden.std()) < 1e-2
    assert torch.equal(logits.argmax(-1), golden.argmax(-1))
    assert module.num_compiles == 1


def test_compiled_is_importable() -> None:
    module = dsv41.compiled("tiny", inner="eager", overrides=[SHORT], device="cpu")
    assert len(module.plan) == 5
    assert module.backends.attention == "reference"
    assert module.segments == (), "nothing is traced before the first call"


def test_unknown_inner_compiler_is_refused() -> None:
    with pytest.raises(ValueError, match="inner compiler 'nvcc' is not one of inductor, aot_eager, eager"):
        inner_compiler("nvcc")
