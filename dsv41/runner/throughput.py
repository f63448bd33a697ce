"""Throughput of a whole workload: every request is there at the start, the engine decides the rest."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dsv41.runner.engine import LLM
from dsv41.runner.load import Model
from dsv41.runner.request import Request, SamplingParams


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    params: SamplingParams


def random_jobs(model: Model, count: int, seed: int) -> list[Job]:
    """Uniform random ids; prompts of up to six windows and answers of up to a window, also uniform."""
    draw, config = random.Random(seed), model.config
    longest = min(6 * config.window_tokens, config.max_tokens // 2)
    jobs = []
    for _ in range(count):
        prompt = tuple(draw.randrange(config.vocab_size) for _ in range(draw.randint(1, longest)))
        answer = draw.randint(1, min(config.window_tokens, 64))
        jobs.append(Job(prompt, SamplingParams(max_tokens=answer, ignore_eos=True)))
    return jobs


def read_workload(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file: `prompt_ids` or `prompt`, and `max_tokens` (default 16). Raises ValueError
    with the number of the first line that is none."""
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if not isinstance(entry, dict) or ("prompt_ids" in entry) == ("prompt" in entry):
            raise ValueError(f"{path}, line {number}: give an object with either prompt_ids or prompt")
        entries.append(entry)
    if not entries:
        raise ValueError(f"{path} holds no request")
    return entries


def jobs_of(entries: Sequence[dict[str, Any]], model: Model) -> list[Job]:
    """Raises ValueError for text without a tokenizer and for a bad `max_tokens`."""
    jobs = []
    for entry in entries:
        tokens = entry.get("prompt_ids")
        if tokens is None:
            if model.tokenizer is None:
                raise ValueError(f"{model.blueprint.source} has no tokenizer: give prompt_ids")
            tokens = model.tokenizer.encode(entry["prompt"])
        jobs.append(Job(tuple(tokens), SamplingParams(max_tokens=entry.get("max_tokens", 16))))
    return jobs


def throughput(llm: LLM, jobs: Sequence[Job]) -> dict[str, Any]:
    """Run all jobs to their end; a JSON-ready row. Raises RuntimeError when a request ends by a fault."""
    started = time.perf_counter()
    requests = [llm.add(job.prompt, job.params) for job in jobs]
    first_token: dict[Request, float] = {}
    while llm.has_work:
        for event in llm.step():
            if event.result.error is not None:
                raise RuntimeError(f"request {event.request.request_id}: {event.result.error}")
            first_token.setdefault(event.request, time.perf_counter() - started)
    seconds = time.perf_counter() - started
    prompt_tokens = sum(len(job.prompt) for job in jobs)
    output_tokens = sum(len(request.output) for request in requests)
    return {
        "throughput": llm.model.blueprint.source,
        "requests": len(jobs),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "seconds": seconds,
        "tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "median_seconds_to_first_token": median(first_token.values()),
        "metrics": vars(llm.metrics),
        "engine": vars(llm.engine),
        "device": llm.model.blueprint.hardware.name,
        "note": "all requests are there at the start; code is compiled ahead, the prefix cache starts empty",
    }
