"""How long the many-row expert products take, by variant: replayed graphs, flops, percent of the roof.

    python profiles/moe_many.py [--rows 128 512 1024 4096] [--cases gate_up down]
                                [--variants default registers] [--output moe_many.jsonl]

One layer of the release's widths with 128 experts: 2.4 GB of packed weights, far more than the L2 cache
holds, so that every launch reads them from memory. Two draws of rows and routing alternate in a graph. The
roof is the larger of two times: flops of live pairs over the rate of a bf16 product of 8192^3, and bytes over
the rate of a device copy, both timed in the same run. `padded` counts the rows that a slot is padded to, 64
or 128. Synthetic: random bytes as weights, uniform routing, every row live; grouping and the final sum are
not included. `whole` is `run_many`: quantised rows, gate and up, down.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from timing import copy_bandwidth, device, product_rate, report, spread, time_us
from torch import Tensor

from dsv41.ops.moe import gluon_many, gluon_registers

EXPERTS, TOP_K, HIDDEN, WIDTH, LIMIT = 128, 6, 5120, 2304, 10.0
VARIANTS = {  # a design and arguments of its `multiply`, beside the defaults
    "default": (gluon_many, {}),
    "late_fence": (gluon_many, {"early_fence": False}),
    "registers": (gluon_registers, {"split": False}),
    "registers_split": (gluon_registers, {"split": True}),
}


def weights() -> tuple[Tensor, ...]:
    """Any bytes are packed codes; the scales are of a size that keeps gate and up around 1."""

    def random(*shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")

    return (
        random(EXPERTS, 2 * WIDTH, HIDDEN // 2),
        random(EXPERTS, 2 * WIDTH, HIDDEN // 32, low=117, high=121),
        random(EXPERTS, HIDDEN, WIDTH // 2),
        random(EXPERTS, HIDDEN, WIDTH // 32, low=117, high=121),
    )


def draw(rows: int) -> tuple[Tensor, SimpleNamespace, Tensor, list[int]]:
    """Rows, groups of a uniform routing, routing weights, and how many rows each slot has."""
    ids = torch.rand((rows, EXPERTS), device="cuda").topk(TOP_K, dim=1).indices.flatten()
    counts = ids.bincount(minlength=EXPERTS).tolist()
    slots, start = [], 0
    for expert, count in enumerate(counts):
        for at in range(0, count, gluon_many.CHUNK):
            slots.append((expert, start + at, min(gluon_many.CHUNK, count - at)))
        start += count
    room = [(0, 0, 0)] * (rows * TOP_K // gluon_many.CHUNK + EXPERTS - len(slots))
    expert, first, size = (
        torch.tensor(column, dtype=torch.int32, device="cuda") for column in zip(*(slots + room), strict=True)
    )
    groups = SimpleNamespace(
        order=ids.sort(stable=True).indices.to(torch.int32),
        slot_expert=expert,
        slot_start=first,
        slot_count=size,
        num_slots=torch.tensor([len(slots)], dtype=torch.int32, device="cuda"),
    )
    x = torch.randn((rows, HIDDEN), device="cuda").bfloat16()
    return x, groups, torch.rand((rows, TOP_K), device="cuda"), [slot[2] for slot in slots]


def call(
    case: str, variant: str, layer: tuple[Tensor, ...], x: Tensor, groups: SimpleNamespace, routing: Tensor
):
    design, options = VARIANTS[variant]
    if case == "quantise":
        return lambda: design.quantise_rows(x)
    rows = design.quantise_rows(x)
    if case == "gate_up":
        return lambda: design.multiply(rows, groups, routing, *layer[:2], LIMIT, **options)
    if case == "down":
        hidden = design.multiply(rows, groups, routing, *layer[:2], LIMIT)
        return lambda: design.multiply(hidden, groups, routing, *layer[2:], None, **options)

    def whole() -> Tensor:
        rows = design.quantise_rows(x)
        hidden = design.multiply(rows, groups, routing, *layer[:2], LIMIT, **options)
        return design.multiply(hidden, groups, routing, *layer[2:], None, **options)

    return whole


def cost(case: str, rows: int, slots: list[int]) -> tuple[float, float, float]:
    """(flops of live pairs, flops with padding, bytes) of one launch; a weight is read once."""
    pairs, padded = sum(slots), sum(64 if size <= 64 else 128 for size in slots)
    used = min(EXPERTS, pairs)
    gate_up, down = 2 * 2 * WIDTH * HIDDEN, 2 * HIDDEN * WIDTH
    flops = {"quantise": 0, "gate_up": gate_up, "down": down, "whole": gate_up + down}[case]
    weight_bytes = used * flops / 2 * 17 / 32
    row_bytes = {
        "quantise": 4 * HIDDEN * rows,
        "gate_up": 2 * HIDDEN * rows + 2 * WIDTH * pairs,
        "down": 2 * WIDTH * pairs + 2 * HIDDEN * pairs,
        "whole": 6 * HIDDEN * rows + 4 * WIDTH * pairs + 2 * HIDDEN * pairs,
    }[case]
    return pairs * flops, padded * flops, weight_bytes + row_bytes


def measure(cases: list[str], variants: list[str], row_counts: list[int]) -> Iterator[dict[str, object]]:
    bandwidth, rate = copy_bandwidth(1 << 28), product_rate()
    yield {"copy_tb_s": bandwidth / 1e12, "product_tflops": rate / 1e12, **device()}
    layer = weights()
    for rows in row_counts:
        draws = [draw(rows) for _ in range(2)]
        for variant in variants:
            for case in cases:
                if case == "quantise" and variant != variants[0]:
                    continue
                calls = [call(case, variant, layer, *own[:3]) for own in draws]
                found = spread(time_us(calls, 4 if rows >= 1024 else 8, 11))
                median = found["us"]
                flops, padded, size = (
                    statistics.mean(column)
                    for column in zip(*(cost(case, rows, own[3]) for own in draws), strict=True)
                )
                roof = max(flops / rate, size / bandwidth) * 1e6
                yield {
                    "case": case,
                    "variant": variant,
                    "rows": rows,
                    **found,
                    "tflops": flops / median / 1e6,
                    "padded_tflops": padded / median / 1e6,
                    "bytes": size,
                    "tb_s": size / median / 1e6,
                    "roof_us": roof,
                    "percent_of_roof": 100 * roof / median,
                    "slots": statistics.mean(len(own[3]) for own in draws),
                }


def card(result: dict) -> str:
    if "case" not in result:
        copy, product = result["copy_tb_s"], result["product_tflops"]
        return f"{result['gpu']}: copy {copy:.2f} TB/s, bf16 product {product:.0f} TF"
    return (
        f"{result['case']:9s} {result['variant']:15s} {result['rows']:5d} rows {result['us']:9.1f} us"
        f"  {result['tflops']:6.1f} TF ({result['padded_tflops']:6.1f} padded)"
        f" {result['tb_s']:5.2f} TB/s {result['percent_of_roof']:5.1f} % of the roof"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = ["quantise", "gate_up", "down", "whole"]
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 512, 1024, 4096])
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--output", type=Path, help="one JSON object a line")
    arguments = parser.parse_args()
    report(measure(arguments.cases, arguments.variants, arguments.rows), card, arguments.output)


if __name__ == "__main__":
    main()
