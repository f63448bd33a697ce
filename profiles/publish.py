"""How long the publishing and compression kernels take: replayed graphs, bytes, and percent of the roof.

    python profiles/publish.py [--rows 1 8 32 128 4096] [--output publish.jsonl]

Each line times one op at one number of rows in a CUDA graph of many launches; the inputs rotate among sets
that exceed the L2 cache together where a single set is at least 1 MB (a decode step's inputs were written by
the launch before, and are read from L2 in the engine too). The roof is a device copy, timed in the same run,
`floor` a launch that does nothing. Synthetic: random values, slots in order, every row live; compress 2 has
chunks from position 1 on, half of whose rows close a group.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from timing import Call, copy_bandwidth, device, of_roof, report, sets_beyond_l2, spread, time_us
from torch import Tensor

from dsv41.model.layout import OPEN_ROWS
from dsv41.ops import records
from dsv41.ops.compression.op import compress
from dsv41.ops.publish.op import publish_index_k, publish_states, publish_window

ROPE, HEADS, DIM, INDEX_DIM, PAGE_STATES, EPS = 64, 64, 512, 128, 64, 1e-20


def launch_floor() -> float:
    """Microseconds of a kernel that publishes one padding row."""
    x, cos_sin, slots = bf16(1, DIM), angles(1), torch.full((1,), -1, device="cuda")
    pages = cache("nvfp4_288", 1, DIM)
    return statistics.median(
        time_us(
            [lambda: publish_states(x, cos_sin, slots, pages, "nvfp4_288", PAGE_STATES, True, "triton")], 200
        )
    )


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def angles(num_rows: int) -> Tensor:
    turn = torch.rand((num_rows, ROPE // 2), device="cuda") * 6.28
    return torch.cat((turn.cos(), turn.sin()), dim=1)


def cache(record: str, num_rows: int, dim: int) -> Tensor:
    pages = -(-num_rows // PAGE_STATES)
    if record == "rows_bf16":
        return torch.zeros((pages, PAGE_STATES, dim), dtype=torch.bfloat16, device="cuda")
    payload = records.page_bytes(record, PAGE_STATES, dim, ROPE)
    return torch.zeros((pages, -(-payload // 576) * 576), dtype=torch.uint8, device="cuda")


def publishing(op: str, record: str, rows: int) -> tuple[Call, int]:
    """One call and the bytes that it must move."""
    dim = INDEX_DIM if op == "publish_index_k" else DIM
    x, norm, cos_sin, slots = bf16(rows, dim), bf16(dim), angles(rows), torch.arange(rows, device="cuda")
    pages = cache(record, rows, dim)
    size = rows * (2 * dim + 4 * ROPE + 8 + records.state_bytes(record, dim, ROPE))
    if op == "publish_states":
        return lambda: publish_states(x, cos_sin, slots, pages, record, PAGE_STATES, True, "triton"), size
    if op == "publish_index_k":
        return (
            lambda: publish_index_k(x, norm, cos_sin, slots, pages, record, PAGE_STATES, EPS, True, "triton"),
            size,
        )
    q = bf16(rows, HEADS if op == "publish_window" else 0, dim)
    size += 2 * 2 * q.numel()
    return (
        lambda: publish_window(
            q, x, norm, cos_sin, slots, pages, record, PAGE_STATES, 0, EPS, True, "triton"
        ),
        size,
    )


def compressing(ratio: int, rows: int) -> tuple[Call, int]:
    kv_gate, norm = torch.randn((rows, ratio * DIM), device="cuda"), bf16(DIM)
    requests = min(rows, 128)
    chunk = rows // requests
    row = torch.arange(rows, device="cuda")
    positions, first = 1 + row % chunk, row % chunk == 0
    last = (row % chunk == chunk - 1) & (positions % 2 == 0)
    partner_row = torch.where(first, -1, row - 1)
    partner_slot = torch.where(first, row // chunk * OPEN_ROWS, -1)
    open_slot = torch.where(last, row // chunk * OPEN_ROWS + positions % OPEN_ROWS, -1)
    open_groups = torch.randn((requests * OPEN_ROWS, 2 * DIM), device="cuda")
    closing = rows if ratio == 1 else int((positions % 2 == 1).sum())
    kept = 0 if ratio == 1 else int(last.sum())
    size = ratio * (closing * ratio + 2 * kept) * 4 * DIM + rows * 2 * DIM
    args = (kv_gate, positions, partner_row, partner_slot, open_slot, norm, open_groups, ratio, EPS)
    return lambda: compress(*args, torch.bfloat16, "triton"), size


CASES = {
    **{f"publish_window {r}": ("publish_window", r) for r in ("scaled_528", "mixed_584", "rows_bf16")},
    "write_kv scaled_528": ("write_kv", "scaled_528"),  # publish_window without queries
    **{f"publish_states {r}": ("publish_states", r) for r in ("nvfp4_288", "mixed_584", "rows_bf16")},
    **{f"publish_index_k {r}": ("publish_index_k", r) for r in ("mxfp4_68", "fp8_132")},
    "compress 1": (1,),
    "compress 2": (2,),
}


def measure(names: list[str], row_counts: list[int]) -> Iterator[dict[str, object]]:
    bandwidth, floor = copy_bandwidth(), launch_floor()
    yield {"copy_tb_s": bandwidth / 1e12, "launch_floor_us": floor, **device()}
    for name in names:
        case = CASES[name]
        for rows in row_counts:
            build = compressing if isinstance(case[0], int) else publishing
            call, size = build(*case, rows)
            sets = 1 if size < 1 << 20 else sets_beyond_l2(size)
            calls = [call, *(build(*case, rows)[0] for _ in range(sets - 1))]
            found = spread(time_us(calls, max(2 * sets, 4 if rows >= 4096 else 64)))
            yield {
                "case": name,
                "rows": rows,
                **found,
                **of_roof(found["us"], size, bandwidth),
                "input_sets": sets,
            }


def card(result: dict) -> str:
    if "case" not in result:
        copy, floor = result["copy_tb_s"], result["launch_floor_us"]
        return f"{result['gpu']}: copy {copy:.2f} TB/s, empty launch {floor:.2f} us"
    return (
        f"{result['case']:28s} {result['rows']:5d} rows {result['us']:8.2f} us"
        f"  {result['bytes'] / 1e6:9.3f} MB  {result['percent_of_roof']:5.1f} % of the roof"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 4096])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--output", type=Path, help="one JSON object a line")
    arguments = parser.parse_args()
    report(measure(arguments.cases, arguments.rows), card, arguments.output)


if __name__ == "__main__":
    main()
