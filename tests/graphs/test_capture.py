"""Captured steps without a GPU: the buckets, what a replay copies and what it leaves, and the engine on them.

The recorder here runs the work again at every replay and writes the result where the recording's was, which
is what a CUDA graph does with the same static tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv41.config import EngineConfig
from dsv41.graphs.buckets import Bucket, engine_buckets, fit, make_buckets, page_widths, row_sizes
from dsv41.graphs.capture import Recorder
from dsv41.model.inputs import StepOutput
from dsv41.presets import preset
from dsv41.runner.engine import LLM
from dsv41.runner.load import Model, blueprint, load
from dsv41.runner.request import SamplingParams
from dsv41.runner.stepper import Stepper

ENGINE = EngineConfig(page_tokens=4, max_requests=6, max_context_tokens=64, max_batch_tokens=24)
PROMPTS = [[1, 2, 3, 4, 5] * 6, [7, 8, 9], [3] * 20, [5], [2] * 9, [4, 6] * 8]
PARAMS = [SamplingParams(max_tokens=10 + n, ignore_eos=True, temperature=n % 2, seed=n) for n in range(6)]
BUCKETS = make_buckets(row_sizes(8), page_widths(17, 4, (8, 32)))


@cache
def tiny() -> Model:
    return load(blueprint(preset_name="tiny", device="cpu", page_tokens=4))


class Replays:
    """A recorder that counts, and that spoils a graph's output before it is written again."""

    def __init__(self) -> None:
        self.recorded, self.replayed = 0, 0

    def __call__(self, work: Callable[[], StepOutput]) -> tuple[StepOutput, Callable[[], None]]:
        output = work()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            for tensor, value in zip(vars(output).values(), vars(work()).values(), strict=True):
                tensor.copy_(value)

        return output, replay


# -- buckets ----------------------------------------------------------------------------------------------


def test_row_sizes() -> None:
    assert row_sizes(1) == (1,)
    assert row_sizes(3) == (1, 2, 3)
    assert row_sizes(8) == (1, 2, 4, 8)
    assert row_sizes(100) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 100)


def test_page_widths_end_with_the_whole_table() -> None:
    assert page_widths(64, 64, (512, 1024, 100_000)) == (8, 16, 64)
    assert page_widths(64, 64, (1,)) == (2, 64), "a table of one page would be a constant of a compiled graph"
    assert page_widths(1, 64, (512,)) == (1,)


@given(
    st.sets(st.integers(1, 40), min_size=1), st.sets(st.integers(1, 40), min_size=1), st.integers(1, 50),
    st.integers(1, 50),
)  # fmt: skip
def test_a_step_gets_the_least_padding_that_holds_it(
    rows: set[int], pages: set[int], num_rows: int, num_pages: int
) -> None:
    found = fit(make_buckets(rows, pages), num_rows, num_pages)
    held = [(r, p) for r in sorted(rows) for p in sorted(pages) if r >= num_rows and p >= num_pages]
    assert (found and (found.rows, found.pages)) == (held[0] if held else None)


def test_buckets_of_the_release() -> None:
    """Selection begins above 512 states, candidates above 2,048 blocks of 8."""
    engine = EngineConfig(graph_rows=4, max_context_tokens=1 << 20)
    found = engine_buckets(preset("full"), engine, (1 << 20) // 64 + 1)
    assert [bucket.rows for bucket in found] == [4] * 5 + [2] * 5 + [1] * 5
    assert [64 * bucket.pages for bucket in found[:5]] == [(1 << 20) + 64, 131_072, 16_384, 1_024, 512]


# -- replays ----------------------------------------------------------------------------------------------


def test_a_replay_equals_the_step_and_writes_nothing_else() -> None:
    """Every live count of a bucket, one after the other on the same static inputs: rows left over from the
    step before must turn into padding, and nobody's cache but the step's own may change."""
    record, stepper = Replays(), Stepper(tiny(), ENGINE)
    stepper.worker.capture((Bucket(6, 17),), record)
    twin = Stepper(tiny(), ENGINE)
    sides = [(side, [side.add(prompt) for prompt in PROMPTS]) for side in (stepper, twin)]
    for side, requests in sides:
        side.step([(request, len(request.tokens)) for request in requests])
    assert record.replayed == 0, "a prefill of more rows than the bucket was replayed"
    for live in (6, 1, 3, 2, 5, 4):
        outputs = []
        for side, requests in sides:
            for request in requests[:live]:
                request.tokens.append(11)
            outputs.append(side.step([(request, 1) for request in requests[:live]]))
        ours, plain = outputs
        assert ours.hidden.shape[0] == 6
        assert torch.equal(ours.hidden[:live], plain.hidden)
        assert torch.equal(ours.fault_layer[:live], plain.fault_layer)
        for name in ("window", "states", "index_k", "open_groups"):
            mine, other = getattr(stepper.caches, name), getattr(twin.caches, name)
            for number in mine.keys() if isinstance(mine, dict) else range(len(mine)):
                assert torch.equal(mine[number], other[number]), f"{name} {number}"
    assert record.replayed == 6


def engine(**choices: object) -> tuple[list[tuple[int, ...]], Replays, LLM]:
    record = Replays()
    with LLM(tiny(), EngineConfig(**(vars(ENGINE) | choices))) as llm:
        llm.worker.capture(BUCKETS, record)
        answers = [answer.tokens for answer in llm.generate(PROMPTS, PARAMS)]
        llm.scheduler.check_integrity()
    return answers, record, llm


@cache
def plain_tokens() -> list[tuple[int, ...]]:
    with LLM(tiny(), ENGINE) as llm:
        return [answer.tokens for answer in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    "choices",
    [{}, {"asynchronous": True}, {"global_pages": 20}, {"prefix_mode": "exact"}],
    ids=str,
)
def test_the_engine_gives_the_same_tokens(choices: dict[str, object]) -> None:
    """Decode steps and small prefills run captured, in every context class; larger steps do not."""
    tokens, record, llm = engine(**choices)
    assert tokens == plain_tokens()
    assert record.recorded == len(BUCKETS)
    assert 10 <= record.replayed < llm.metrics.steps


def test_what_does_not_fit_runs_as_it_is() -> None:
    """Decoder replay ends rows early and an image brings its own embeddings: no graph has either."""
    tokens, record, _ = engine(decoder_replay=True)
    assert record.replayed > 0
    with LLM(tiny(), EngineConfig(**(vars(ENGINE) | {"decoder_replay": True}))) as llm:
        assert tokens == [answer.tokens for answer in llm.generate(PROMPTS, PARAMS)]
    record = Replays()
    with LLM(tiny(), ENGINE) as llm:
        llm.worker.capture(BUCKETS, record)
        rows = torch.ones(3, tiny().config.hidden_size)
        request = llm.add([5, 511, 6], PARAMS[0], image_rows=[False, True, False], embeddings=rows)
        while llm.has_work:
            llm.step()
    assert len(request.output) == 10
    assert record.replayed == 0


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="graph_rows needs a CUDA device, not cpu"):
        LLM(tiny(), EngineConfig(**(vars(ENGINE) | {"graph_rows": 4})))


_: Recorder = Replays()
