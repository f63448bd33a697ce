"""Host time of a step without the model: scheduling, staging, building rows, sampling, taking in results.

    python profiles/host_time.py [--device cuda] [--steps 50]

The model is replaced by constant hidden rows. Decode steps at 1, 32 and 256 requests and two context lengths:
the time must not grow with the context. Prints one JSON line per case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from dsv41.config import EngineConfig
from dsv41.model.caches import KVCaches
from dsv41.model.inputs import StepInputs, StepOutput
from dsv41.runner.engine import LLM
from dsv41.runner.load import Model, blueprint, load
from dsv41.runner.request import SamplingParams


def constant_model(model: Model):
    """A decoder that computes nothing: every hidden row is the same."""
    hidden = torch.randn(1, model.config.hidden_size, device=model.device)

    def run(step: StepInputs, caches: KVCaches) -> StepOutput:
        rows = hidden.expand(step.num_rows, -1)
        return StepOutput(rows, rows[:, :0], torch.full_like(step.attention.row_request, -1))

    return run


def decode_steps(model: Model, requests: int, context: int, steps: int, asynchronous: bool) -> list[float]:
    engine = EngineConfig(
        max_requests=requests,
        max_batch_tokens=max(8192, requests),
        max_context_tokens=context + steps + 8,
        asynchronous=asynchronous,
    )
    params = SamplingParams(max_tokens=steps + 6, ignore_eos=True)
    with LLM(model, engine, run=constant_model(model)) as llm:
        for number in range(requests):
            llm.add([number % 500] * context, params)
        while any(not request.output for request in llm.scheduler.requests):
            llm.step()
        samples = []
        for _ in range(steps):
            started = time.perf_counter()
            llm.step()
            samples.append(time.perf_counter() - started)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)  # small tensors: a second thread waits more than it works
    plan = blueprint(preset_name="tiny", device=args.device, numerics="bf16")
    model = load(plan)
    for requests in (1, 32, 256):
        for context in (64, 2048):
            for asynchronous in (False, True):
                samples = decode_steps(model, requests, context, args.steps, asynchronous)
                cuts = statistics.quantiles(samples, n=10)
                row = {
                    "host_time": plan.hardware.name,
                    "requests": requests,
                    "context": context,
                    "asynchronous": asynchronous,
                    "p50_us": round(statistics.median(samples) * 1e6),
                    "p90_us": round(cuts[8] * 1e6),
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
