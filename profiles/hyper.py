"""How long the kernels of the residual copies take: replayed graphs, bytes, and percent of the roof.

    python profiles/hyper.py [--rows 1 8 32 128 4096] [--cases update coefficients]
                             [--set ROWS_EARLY=0 WHOLE_ROWS=1] [--output hyper.jsonl]

Each line times one op at one number of rows in a CUDA graph of many launches. `fn` (2 MB) rotates among 64
copies, which exceed the L2 cache together, since a step reads every layer's once. Streams rotate where a set
of them is at least 1 MB; a decode step's were written by the launch before, and are read from L2 in a step
too. `sub-layer` is what one sub-layer costs in a layer: coefficients and update. The roof is a device copy,
timed in the same run, `floor` a launch that does nothing. `--set` changes constants of the implementation, to
compare. Synthetic: random values.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from timing import (
    Call,
    changed,
    changes_of,
    copy_bandwidth,
    device,
    of_roof,
    report,
    sets_beyond_l2,
    spread,
    time_us,
)
from torch import Tensor

from dsv41.model.caches import NUM_TICKETS
from dsv41.ops.hyper.op import hyper_coefficients, hyper_collapse, hyper_expand, hyper_update
from dsv41.ops.library import implementation
from dsv41.ops.streams import join, nothing_forked

COPIES, DIM, SWEEPS, HYPER_EPS, EPS = 4, 5120, 20, 1e-6, 1e-20
MIXES = (2 + COPIES) * COPIES
FN_BYTES = 4 * MIXES * COPIES * DIM
NUM_FN = 64
IMPL = "triton"


def launch_floor() -> float:
    """Microseconds of a kernel that expands one row of 8 channels."""
    y, streams = torch.zeros((1, 8), dtype=torch.bfloat16, device="cuda"), bf16(1, 1, 8)
    post, comb, side = (
        torch.ones((1, 1), device="cuda"),
        torch.ones((1, 1, 1), device="cuda"),
        nothing_forked(),
    )
    return statistics.median(time_us([lambda: hyper_expand(y, streams, post, comb, post, side, IMPL)], 200))


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def weights() -> list[Tensor]:
    return [torch.randn((MIXES, COPIES * DIM), device="cuda") * 0.01 for _ in range(NUM_FN)]


def calls_of(case: str, rows: int, fns: list[Tensor]) -> tuple[list[Call], int]:
    """Calls to take in turn, and the bytes that one of them must move."""
    row = 2 * rows * DIM  # bytes of one copy of all rows
    coefficients = 4 * rows * MIXES
    moved = {
        "coefficients": row * COPIES + coefficients + FN_BYTES,
        "collapse": row * (COPIES + 1) + 4 * rows * COPIES,
        "expand": row * (2 * COPIES + 1) + coefficients,
        "update": row * (2 * COPIES + 2) + coefficients,
    }
    moved["sub-layer"] = moved["coefficients"] + moved["update"]
    size, used = moved[case], moved[case] - (FN_BYTES if case in ("coefficients", "sub-layer") else 0)
    sets = 1 if used < 1 << 20 else sets_beyond_l2(used)
    inputs = [one_set(rows) for _ in range(sets)]
    base, scale = torch.randn(MIXES, device="cuda"), torch.ones(3, device="cuda")
    norm, side = bf16(DIM), nothing_forked()
    tickets = torch.zeros(NUM_TICKETS, dtype=torch.int32, device="cuda")
    fixed = (base, scale, tickets, SWEEPS, HYPER_EPS, EPS, IMPL)

    def call(index: int) -> Call:
        y, streams, pre, post, comb = inputs[index % sets]
        fn = fns[index % NUM_FN]

        def coefficients() -> None:
            join(hyper_coefficients(streams, fn, *fixed)[3])

        def sub_layer() -> object:
            own = hyper_coefficients(streams, fn, *fixed)
            return hyper_update(y, streams, own[1], own[2], own[0], own[3], norm, tickets, EPS, IMPL)

        return {
            "coefficients": coefficients,
            "collapse": lambda: hyper_collapse(streams, pre, norm, EPS, IMPL),
            "expand": lambda: hyper_expand(y, streams, post, comb, pre, side, IMPL),
            "update": lambda: hyper_update(y, streams, post, comb, pre, side, norm, tickets, EPS, IMPL),
            "sub-layer": sub_layer,
        }[case]

    return [call(index) for index in range(max(sets, NUM_FN if used != size else 1))], size


def one_set(rows: int) -> tuple[Tensor, ...]:
    shapes = ((rows, COPIES), (rows, COPIES), (rows, COPIES, COPIES))
    return bf16(rows, DIM), bf16(rows, COPIES, DIM), *(torch.rand(shape, device="cuda") for shape in shapes)


CASES = ("coefficients", "collapse", "expand", "update", "sub-layer")


def measure(cases: list[str], row_counts: list[int]) -> Iterator[dict[str, object]]:
    bandwidth, floor = copy_bandwidth(), launch_floor()
    yield {"copy_tb_s": bandwidth / 1e12, "launch_floor_us": floor, **device()}
    fns = weights()
    for case in cases:
        for rows in row_counts:
            calls, size = calls_of(case, rows, fns)
            found = spread(time_us(calls, 8 if rows >= 1024 else max(64, len(calls))))
            yield {"case": case, "rows": rows, **found, **of_roof(found["us"], size, bandwidth)}


def card(result: dict) -> str:
    if "case" not in result:
        copy, floor = result["copy_tb_s"], result["launch_floor_us"]
        return f"{result['gpu']}: copy {copy:.2f} TB/s, empty launch {floor:.2f} us"
    return (
        f"{result['case']:14s} {result['rows']:5d} rows {result['us']:8.2f} us"
        f"  {result['bytes'] / 1e6:9.3f} MB  {result['percent_of_roof']:5.1f} % of the roof"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512, 4096])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="constants")
    parser.add_argument("--output", type=Path, help="one JSON object a line")
    arguments = parser.parse_args()
    files = [implementation("hyper", name) for name in (IMPL, f"{IMPL}_mixes")]
    try:
        changes = changes_of(arguments.set, files)
    except ValueError as error:
        parser.error(f"--set: {error}")
    with changed(changes):
        report(measure(arguments.cases, arguments.rows), card, arguments.output)


if __name__ == "__main__":
    main()
