"""The engine on one GPU with the reference implementations: the same tokens as on the CPU, in every mode."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from dsv41.config import EngineConfig
from dsv41.graphs.module import CompiledModule
from dsv41.model.inputs import StepOutput
from dsv41.run import main
from dsv41.runner.engine import LLM
from dsv41.runner.load import Model, blueprint, load
from dsv41.runner.request import SamplingParams

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA GPU")
pytestmark = [pytest.mark.gpu, needs_gpu]

PROMPTS = [[1, 2, 3, 4, 5] * 9, [7, 8, 9], [3] * 20, [5]]
PARAMS = [
    SamplingParams(max_tokens=12, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=12, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(max_tokens=7, temperature=0.7, top_k=20, seed=5, logprobs=2, ignore_eos=True),
]


@cache
def model(device: str) -> Model:
    """fp32 without quantisers: the same arithmetic everywhere, to the order of sums."""
    plan = blueprint(preset_name="tiny", device=device, page_tokens=4, numerics="fp32-noquant")
    return load(plan)


def tokens(device: str, inner: str | None = None, **choices: object) -> list[tuple[int, ...]]:
    engine = EngineConfig(**{"page_tokens": 4, "max_requests": 4, "max_context_tokens": 64} | choices)
    run = None if inner is None else CompiledModule(model(device).decoder, inner)
    with LLM(model(device), engine, run=run) as llm:
        answers = [answer.tokens for answer in llm.generate(PROMPTS, PARAMS)]
        llm.scheduler.check_integrity()
    return answers


@cache
def expected() -> list[tuple[int, ...]]:
    return tokens("cpu")


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"asynchronous": True},
        {"asynchronous": True, "max_batch_tokens": 7},
        {"asynchronous": True, "global_pages": 18},
        {"prefix_mode": "exact"},
    ],
)
def test_tokens_equal_the_cpu(choices: dict[str, object]) -> None:
    assert tokens("cuda", **choices) == expected()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_compiled_tokens_equal_the_cpu(inner: str) -> None:
    assert tokens("cuda", inner, asynchronous=True) == expected()


def test_no_step_waits_for_the_device() -> None:
    """Between two steps nothing may read the device from the host; taking in results waits on an event alone.
    The reference ops themselves do read it, so the model is left out."""
    chosen = model("cuda")
    hidden = torch.randn(64, chosen.config.hidden_size, device="cuda")

    def run(step, caches):
        rows = hidden[: step.num_rows]
        return StepOutput(rows, rows[:, :0], torch.full_like(step.attention.row_request, -1))

    llm = LLM(
        chosen,
        EngineConfig(page_tokens=4, max_requests=4, max_context_tokens=64, asynchronous=True),
        run=run,
    )
    for prompt in PROMPTS:
        llm.add(prompt[:16], SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(3):
        llm.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            llm.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    llm.close()


def test_check_passes_on_the_gpu() -> None:
    assert main(["check", "--device", "cuda", "--quiet"]) == 0
