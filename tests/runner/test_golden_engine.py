"""The release's own decode sequences through the worker: device rows, forced tokens, sampling, results."""

from __future__ import annotations

import golden

from dsv41.config import EngineConfig
from dsv41.model.caches import allocate_caches
from dsv41.runner.engine import LLM
from dsv41.runner.request import SamplingParams
from dsv41.runner.schedule import NewRequest, RunningRequest, SchedulerOutput
from dsv41.runner.worker import Worker

PAGES = 4  # of 64 tokens: the longest prompt and its answer
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


def test_greedy_choices_along_the_golden_sequences() -> None:
    """Every text prompt in one batch, then the golden tokens forced one by one: each step's own greedy choice
    is the reference's, in fp32 without quantisers."""
    names = golden.prompts("tiny")
    chosen = golden.model("tiny", "fp32-noquant")
    capacity = EngineConfig(max_requests=len(names), max_context_tokens=64 * PAGES)
    caches = allocate_caches(chosen.layout, *[1 + PAGES * len(names)] * 2, len(names), "cpu")
    worker = Worker(chosen, capacity, caches, max_pages=PAGES)

    def step(output: SchedulerOutput) -> dict[int, int]:
        worker.execute(output)
        return {result.request_id: result.token for result in worker.sample().get()}

    prompts = [golden.tensors("tiny/golden/prompts")[f"{name}.ids"][row].tolist() for name, row in names]
    pages = [tuple(range(1 + PAGES * i, 1 + PAGES * (i + 1))) for i in range(len(names))]
    new = tuple(
        NewRequest(i, tuple(prompt), len(prompt), GREEDY, pages[i], pages[i])
        for i, prompt in enumerate(prompts)
    )
    steps = [step(SchedulerOutput(new=new, num_tokens={i: len(prompt) for i, prompt in enumerate(prompts)}))]
    forced = [golden.decode_tokens("tiny", *name) for name in names]
    for tokens in zip(*forced, strict=True):
        running = tuple(RunningRequest(i, tokens=(token,)) for i, token in enumerate(tokens))
        steps.append(step(SchedulerOutput(running=running, num_tokens=dict.fromkeys(range(len(names)), 1))))
    for i, (name, row) in enumerate(names):
        golden_choice = golden.tensors("tiny/golden/logits_fp32nq")[f"{name}.argmax"][row].tolist()
        assert [one[i] for one in steps] == golden_choice, name


def test_the_engine_writes_the_golden_sequences() -> None:
    """bf16, greedy, nothing forced: prompts on which our bf16 logits are the release's to the last bit go on
    with the release's own tokens, in one batch."""
    llm = LLM(golden.model("tiny", "bf16"), EngineConfig(max_context_tokens=256))
    names = ("p3", "p7")
    prompts = [golden.tensors("tiny/golden/prompts")[f"{name}.ids"][0].tolist() for name in names]
    for name, answer in zip(
        names, llm.generate(prompts, SamplingParams(max_tokens=13, ignore_eos=True)), strict=True
    ):
        assert list(answer.tokens) == golden.tensors("tiny/golden/logits_bf16")[f"{name}.tokens"][0].tolist()
