"""The engine on the Hopper kernels: one SM90 GPU, the `kernel` preset and the golden checkpoint of its shape.

`ALL` is the preset; `DENSE` leaves out the experts, too narrow in the golden checkpoint, and `SPARSE`
is the attention side alone.

With quantisers two implementations that are not equal to the bit drift apart to a noise floor of 5 to 20 % of
the logits' deviation (shared/golden/README.md, section 5), so the runs against the release are held to that
page's limits; what must be exact is compared among the kernels' own runs, under `deterministic`.
"""

from __future__ import annotations

from functools import cache

import golden
import pytest
import torch
from hopper import ALL, WIDE, kernel_model, needs_hopper

from dsv41.backends import PRESETS, RECORD_FIELDS
from dsv41.config import EngineConfig
from dsv41.graphs.module import CompiledModule
from dsv41.hardware import detect
from dsv41.ops.library import implementation
from dsv41.run import main
from dsv41.runner.engine import LLM
from dsv41.runner.request import SamplingParams
from dsv41.runner.stepper import Stepper

pytestmark = needs_hopper

DENSE = "sm90,moe=reference"
SPARSE = f"{DENSE},linear=reference,hyper=reference,engram=reference"
FLASHMLA = "sm90-flashmla,moe=reference"
PROMPT_LIMIT, DECODE_LIMIT = 0.25, 0.30  # kernel_dims in bf16: shared/golden/README.md, section 5
DECISIVE = 1.5  # the golden margin from which on the argmax must agree


# -- the release's own outputs ----------------------------------------------------------------------------


def records_of(backends: str) -> str:
    preset = PRESETS[backends.partition(",")[0]]
    return ",".join(f"{name}={getattr(preset, name)}" for name in RECORD_FIELDS)


@cache
def kernel_dims(backends: str) -> dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]]:
    return golden.together("kernel_dims", "bf16", backends, "cuda")


NO_FLASHMLA = implementation("attention", "flashmla").why_not(detect("auto"), None)
BACKENDS = [
    pytest.param(SPARSE, id="sparse"),
    pytest.param(DENSE, id="dense"),
    pytest.param(
        FLASHMLA, id="flashmla", marks=pytest.mark.skipif(bool(NO_FLASHMLA), reason=str(NO_FLASHMLA))
    ),
]


@pytest.mark.parametrize("backends", BACKENDS)
@pytest.mark.parametrize("key", golden.prompts("kernel_dims", images=True), ids=str)
def test_kernel_dims_end_to_end(key: tuple[str, int], backends: str) -> None:
    prefill, decode = (part.cpu() for part in kernel_dims(backends)[key])
    true_prefill, true_decode = golden.truth("kernel_dims", "bf16", *key)
    assert golden.prompt_error(prefill, true_prefill) <= PROMPT_LIMIT
    assert golden.prompt_error(decode, true_decode) <= DECODE_LIMIT
    file = golden.tensors("kernel_dims/golden/logits_bf16")
    tokens, margin = file[f"{key[0]}.tokens"][key[1]], file[f"{key[0]}.margin"][key[1]]
    ours = torch.cat((prefill[-1:], decode)).argmax(-1)
    decisive = margin >= DECISIVE
    assert torch.equal(ours[decisive], tokens[decisive])


@pytest.mark.parametrize("backends", BACKENDS)
def test_kernel_dims_against_the_reference_on_the_same_records(backends: str) -> None:
    """Pooled over all prompts the kernels are no further from the reference ops than two valid builds are."""
    ours, reference = kernel_dims(backends), kernel_dims(f"cpu,{records_of(backends)}")
    for part, limit in ((0, PROMPT_LIMIT), (1, DECODE_LIMIT)):
        mine, other = (torch.cat([run[key][part] for key in run]) for run in (ours, reference))
        assert golden.prompt_error(mine, other) <= limit


# -- the engine -------------------------------------------------------------------------------------------

LENGTHS = (300, 150, 128, 40, 7, 1)  # on both sides of the window (128) and of two top-k (64) states
PARAMS = [
    SamplingParams(max_tokens=12, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.0, seed=3, ignore_eos=True),
]


@cache
def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 500, (length,), generator=draw).tolist() for length in LENGTHS]


def generate(numbers: list[int], **choices: object) -> list[tuple[int, ...]]:
    engine = EngineConfig(
        **{"max_requests": 8, "max_context_tokens": 512, "deterministic": True, "max_batch_tokens": 256}
        | choices
    )
    with LLM(kernel_model(engine.deterministic), engine) as llm:
        chosen = [prompts()[number] for number in numbers]
        answers = llm.generate(chosen, [PARAMS[number % 2] for number in numbers])
        llm.scheduler.check_integrity()
    return [answer.tokens for answer in answers]


@cache
def alone() -> list[tuple[int, ...]]:
    return [generate([number])[0] for number in range(len(LENGTHS))]


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"asynchronous": True},
        {"asynchronous": True, "max_batch_tokens": 37},
        {"asynchronous": True, "global_pages": 14},
        {"prefix_mode": "exact"},
    ],
    ids=str,
)
def test_a_request_in_company_equals_the_request_alone(choices: dict[str, object]) -> None:
    """Chunks, batches, preemption and asynchronous steps do not change a token under `deterministic`."""
    assert generate(list(range(len(LENGTHS))), **choices) == alone()


def test_the_fast_path_generates() -> None:
    """Without `deterministic` a row may move within its format's rounding; every request still ends sound."""
    answers = generate(list(range(len(LENGTHS))), deterministic=False, asynchronous=True)
    assert [len(tokens) for tokens in answers] == [PARAMS[n % 2].max_tokens for n in range(len(LENGTHS))]


def test_no_step_waits_for_the_device() -> None:
    """The whole step, model included: nothing reads the device from the host between two steps."""
    engine = EngineConfig(max_requests=4, max_context_tokens=512, asynchronous=True)
    with LLM(kernel_model(False), engine) as llm:
        for prompt in prompts()[:4]:
            llm.add(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
        for _ in range(6):
            llm.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                llm.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


# -- captured steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [{}, {"asynchronous": True, "global_pages": 14}], ids=str)
def test_captured_steps_give_the_same_tokens(choices: dict[str, object]) -> None:
    assert generate(list(range(len(LENGTHS))), graph_rows=8, **choices) == alone()


def test_a_replay_equals_the_step_at_every_live_count() -> None:
    """Rows of a step before become padding; nobody's cache but the step's own changes, nor guard pages."""
    choices = {"max_requests": 6, "max_context_tokens": 512, "deterministic": True}
    sides = [Stepper(kernel_model(), EngineConfig(graph_rows=rows, **choices)) for rows in (6, 0)]
    for side in sides:
        for pages in side.caches.tensors():
            pages.view(torch.uint8).fill_(0xA5)
    requests = [[side.add(prompt) for prompt in prompts()] for side in sides]
    for side, own in zip(sides, requests, strict=True):
        side.step([(request, len(request.tokens)) for request in own])
    for live in (6, 1, 3, 2, 5, 4):
        outputs = []
        for side, own in zip(sides, requests, strict=True):
            for request in own[:live]:
                request.tokens.append(11)
            outputs.append(side.step([(request, 1) for request in own[:live]]))
        assert torch.equal(outputs[0].hidden[:live], outputs[1].hidden)
        for mine, other in zip(sides[0].caches.tensors(), sides[1].caches.tensors(), strict=True):
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


def test_compiled_and_captured_steps_give_the_same_tokens() -> None:
    """One compile for many rows and one for a single row serve every bucket, with one page or more."""
    module = CompiledModule(kernel_model().decoder)
    engine = EngineConfig(max_requests=8, max_context_tokens=512, deterministic=True, graph_rows=4)
    with LLM(kernel_model(), engine, run=module) as llm:
        compiles = module.num_compiles
        answers = llm.generate(prompts(), [PARAMS[number % 2] for number in range(len(LENGTHS))])
    assert module.num_compiles == compiles <= 4
    with LLM(kernel_model(), engine, run=CompiledModule(kernel_model().decoder, "eager")) as llm:
        plain = llm.generate(prompts(), [PARAMS[number % 2] for number in range(len(LENGTHS))])
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]


def test_bench_and_its_parity_gate() -> None:
    """`bench` refuses to print numbers when its parity steps fail."""
    model = f"--preset kernel --set {WIDE} --device cuda --backends {ALL} --mode eager,graph --quiet"
    work = "--batch 2 --prompt-len 200 --gen-len 4 --repeat 1 --warmup 1"
    assert main(["bench", *model.split(), *work.split()]) == 0
