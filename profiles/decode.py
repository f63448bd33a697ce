"""Captured decode steps of a whole model by variant: what a stream or a backend is worth end to end.

    python profiles/decode.py [--preset h200] [--backends sm90] [--rows 1 8 32] [--context 4096]
                              [--variants all serial ...] [--mode eager-graph] [--output decode.jsonl]

The model is loaded once. Every variant captures one step at each number of rows: `replay` is the graph alone,
replayed back to back; `step` a whole step of the synchronous engine on the host's clock. `bytes` is the least
that the step must move, the roof a streaming read, timed in the same run. Stand-in weights, random prompts.

Variants: `all` is the package as it is; `serial` forks no stream; `no_...` leaves one fork out; `projections`
adds the overlapped input projections.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from timing import changed, device, read_bandwidth, report

from dsv41.config import EngineConfig
from dsv41.model.costs import Span, step_cost, weights_by_part
from dsv41.runner.load import Model, blueprint, load
from dsv41.runner.parity import twin
from dsv41.runner.trace import Driver, Target

FORKS = {"hyper": ("dsv41.ops.hyper.triton", "FORK_ROWS"), "experts": ("dsv41.ops.moe.gluon", "FORK_ROWS")}
VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {  # forks left out, other backends
    "all": ((), {}),
    "serial": (tuple(FORKS), {}),
    "no_hyper": (("hyper",), {}),
    "no_experts": (("experts",), {}),
    "projections": ((), {"projections": "overlapped"}),
}


def measure(model: Model, variant: str, rows: int, context: int, mode: str) -> dict[str, object]:
    names, other = VARIANTS[variant]
    if other:
        model = replace(model, decoder=twin(model, replace(model.backends, **other)))
    with changed([(importlib.import_module(file), name, 0) for file, name in map(FORKS.__getitem__, names)]):
        driver = Driver(model, Target("decode", rows, context, mode, steps=8), 0)
        driver.warm()
    graphs = driver.llm.worker.graphs
    assert graphs is not None, f"mode {mode} captures nothing"
    (captured,) = graphs._captured.values()
    replay = statistics.median(time_us_of(captured.replay))
    step = statistics.median(driver.step("step") for _ in range(8))
    driver.llm.close()
    return {"replay_us": replay, "step_us": step * 1e6}


def time_us_of(replay: Callable[[], None], samples: int = 11) -> list[float]:
    """Microseconds of one replay, launched behind another."""
    times = []
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        replay()
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times


def run(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    began = time.perf_counter()
    plan = blueprint(preset_name=arguments.preset, device="cuda", backends=arguments.backends)
    model = load(plan, engine=EngineConfig())
    torch.cuda.synchronize()
    roof = read_bandwidth()
    loaded = {"load_s": time.perf_counter() - began, "weights_gb": torch.cuda.memory_allocated() / 1e9}
    yield {"read_tb_s": roof / 1e12, **loaded, **device()}
    weights = weights_by_part(model.config)
    for rows in arguments.rows:
        spans = [Span(arguments.context, 1)] * rows
        num_bytes = step_cost(model.config, model.plan, model.layout, weights, spans).num_bytes
        for variant in arguments.variants:
            found = measure(model, variant, rows, arguments.context, arguments.mode)
            gc.collect()
            torch.cuda.empty_cache()
            floor = num_bytes / roof * 1e6
            yield {"variant": variant, "rows": rows, "context": arguments.context, "floor_us": floor, **found}


def card(row: dict) -> str:
    if "variant" not in row:
        loaded = f"{row['weights_gb']:.1f} GB in {row['load_s']:.1f} s"
        return f"{row['gpu']}: read {row['read_tb_s']:.2f} TB/s; {loaded}"
    share = row["floor_us"] / row["replay_us"]
    return (
        f"{row['variant']:12s} {row['rows']:4d} rows: replay {row['replay_us']:9.1f} us"
        f"  step {row['step_us']:9.1f} us  {share:6.1%} of the roof"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="h200")
    parser.add_argument("--backends", default="sm90")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--mode", choices=("eager-graph", "graph"), default="eager-graph")
    parser.add_argument("--output", type=Path, help="one JSON object a line")
    arguments = parser.parse_args()
    report(run(arguments), card, arguments.output)


if __name__ == "__main__":
    main()
