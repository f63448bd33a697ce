"""The decoder as one graph: what is eager, how often it compiles, and that it still computes the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dsv41
from dsv41.config import EngineConfig
from dsv41.graphs.capture import Run, narrow
from dsv41.graphs.compile import MOST_GRAPHS, compile_whole, inner_compiler
from dsv41.graphs.module import CompiledModule, trace_segments
from dsv41.model.inputs import StepInputs
from dsv41.model.plan import WINDOW
from dsv41.runner.engine import LLM
from dsv41.runner.load import Model, blueprint, load, trace_blueprint
from dsv41.runner.request import SamplingParams
from dsv41.runner.stepper import Stepper

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


def step_of(model: Model, rows: int, capacity: EngineConfig = CAPACITY) -> tuple[Stepper, StepInputs]:
    """A prefill step of `rows` rows, with the stepper whose caches it belongs to."""
    stepper = Stepper(model, capacity)
    tokens = torch.arange(rows).remainder(model.config.vocab_size).tolist()
    return stepper, stepper.prepare([(stepper.add(tokens), rows)]).step


def test_only_selection_and_attention_are_eager(tiny: Model) -> None:
    """Every layer has exactly one eager piece; an index source selects in it, and no other op is in any."""
    stepper, step = step_of(tiny, 5)
    segments = trace_segments(tiny.decoder, step, stepper.caches)
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


def test_one_compile_for_all_row_counts_and_one_for_a_single_row(short: Model) -> None:
    """A graph that fixes a row count, a page table or a cache size would compile again here."""
    module = CompiledModule(short.decoder, "aot_eager")
    for rows in (5, 2, 17, 64, 3):
        assert_same(module, short, rows)
    assert module.num_compiles == 1
    for _ in range(2):
        assert_same(module, short, 1)
    assert module.num_compiles == 2


def assert_same(module: CompiledModule, model: Model, rows: int, capacity: EngineConfig = CAPACITY) -> None:
    """The output and the caches of a step, compiled and eager."""
    stepper, step = step_of(model, rows, capacity)
    output = module(step, stepper.caches)
    eager, step = step_of(model, rows, capacity)
    with torch.inference_mode():
        expected = model.decoder(step, eager.caches)
    assert torch.equal(output.hidden, expected.hidden)
    assert torch.equal(output.fault_layer, expected.fault_layer)
    for mine, other in zip(stepper.caches.tensors(), eager.caches.tensors(), strict=True):
        assert torch.equal(mine, other)


def answers(model: Model, run: Run | None, **choices: bool) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    """The tokens of `PROMPTS` and the caches they leave."""
    llm = LLM(model, replace(CAPACITY, **choices), run=run)
    found = llm.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True))
    assert all(one.error is None for one in found)
    return [one.tokens for one in found], llm.caches.tensors()


def assert_same_answers(model: Model, module: CompiledModule, **choices: bool) -> list[tuple[int, ...]]:
    tokens, caches = answers(model, None, **choices)
    compiled_tokens, compiled_caches = answers(model, module, **choices)
    assert compiled_tokens == tokens
    assert all(torch.equal(a, b) for a, b in zip(caches, compiled_caches, strict=True))
    return tokens


def test_compiled_engine_equals_eager_engine(tiny: Model) -> None:
    """Prefill and decode through the whole stack: same tokens, same bytes in every cache."""
    module = CompiledModule(tiny.decoder, "aot_eager")
    tokens = assert_same_answers(tiny, module)
    assert len(set(tokens)) == len(PROMPTS), "equal answers hide a mix-up"
    assert module.num_compiles == 1, "three requests never make a step of one row"


def test_decoder_replay_is_a_graph_of_its_own(short: Model) -> None:
    """A step with a tail is another graph, one for all row counts of the step and of its tail. Prompts below
    and above the window make both kinds of steps."""
    replay = replace(CAPACITY, decoder_replay=True)
    module = CompiledModule(short.decoder, "aot_eager")
    window = short.config.window_tokens
    for rows in (window + 1, 2 * window, 61):
        _, step = step_of(short, rows, replay)
        assert step.tail is not None
        assert step.tail.rows.tolist() == list(range(rows - window, rows))
        assert_same(module, short, rows, replay)
    assert module.num_compiles == 1
    _, step = step_of(short, window, replay)
    assert step.tail is None
    assert_same(module, short, window, replay)
    assert module.num_compiles == 2
    assert_same_answers(short, module, decoder_replay=True)
    assert module.num_compiles == 2


def test_inductor_computes_the_same(short: Model) -> None:
    """Inductor may sum a norm's squares in another order, which moves bf16 roundings: logits stay within the
    noise that one such rounding makes (README of the golden data: 1e-2 of a layer's output), tokens stay the
    same."""
    module = CompiledModule(short.decoder, "inductor")
    stepper, step = step_of(short, 40)
    output = module(step, stepper.caches)
    stepper, step = step_of(short, 40)
    with torch.inference_mode():
        expected = short.decoder(step, stepper.caches)
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


class Adds:
    def __init__(self, number: int) -> None:
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x + self.number


def test_modules_of_one_process_do_not_use_up_each_other_s_recompiles() -> None:
    """Dynamo gives up after so many compilations of one code object; every module has its own."""
    for number in range(MOST_GRAPHS + 2):
        run = compile_whole(Adds(number).forward, lambda graph, inputs: graph.forward)
        assert run(torch.zeros(2)).sum() == 2 * number


def test_a_module_may_have_as_many_graphs_as_there_are_kinds_of_steps() -> None:
    """Rows one or many, a tail of none, one or many, images or not: 14, and the tracer's own limit is 8. An
    engine with decoder replay that had seen all kinds would have failed at the next."""
    run = compile_whole(Adds(1).forward, lambda graph, inputs: graph.forward)
    for size in range(2, 16):
        assert run(torch.zeros(size)).sum() == size


def test_one_compile_for_all_page_table_widths(short: Model) -> None:
    """Captured buckets give the model the first pages of the table alone."""
    module = CompiledModule(short.decoder, "eager")
    stepper = Stepper(short, CAPACITY)
    step = stepper.prepare([(stepper.add(PROMPTS[0]), 20)]).step
    hidden = [module(narrow(step, pages), stepper.caches).hidden for pages in (4, 3, 2)]
    assert module.num_compiles == 1
    assert all(torch.equal(one, hidden[0]) for one in hidden)
