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
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from dsv41.model.layout import OPEN_ROWS
from dsv41.ops import records
from dsv41.ops.compression.op import compress
from dsv41.ops.publish.op import publish_index_k, publish_states, publish_window

ROPE, HEADS, DIM, INDEX_DIM, PAGE_STATES, EPS = 64, 64, 512, 128, 64, 1e-20
L2_BYTES = 60 << 20
Call = Callable[[], object]


def time_us(calls: list[Call], launches: int, samples: int = 21) -> list[float]:
    """Microseconds of one launch: `launches` of them in a graph, taken from `calls` in turn."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            calls[index % len(calls)]()
    graph.replay()
    times = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return times


def copy_bandwidth() -> float:
    """Bytes read and written per second by an elementwise kernel over 2 GiB."""
    source = torch.randint(0, 255, (1 << 29,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    size = 2 * source.numel() * source.element_size()
    return size / statistics.median(time_us([lambda: torch.neg(source, out=target)], 4)) * 1e6


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
    device = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    yield {"copy_tb_s": bandwidth / 1e12, "launch_floor_us": floor, **device}
    for name in names:
        case = CASES[name]
        for rows in row_counts:
            build = compressing if isinstance(case[0], int) else publishing
            call, size = build(*case, rows)
            sets = 1 if size < 1 << 20 else 1 + min(64, 2 * L2_BYTES // size)
            calls = [call, *(build(*case, rows)[0] for _ in range(sets - 1))]
            times = sorted(time_us(calls, max(2 * sets, 4 if rows >= 4096 else 64)))
            median = statistics.median(times)
            yield {
                "case": name,
                "rows": rows,
                "us": median,
                "us_p10": times[len(times) // 10],
                "us_p90": times[-1 - len(times) // 10],
                "bytes": size,
                "roof_us": size / bandwidth * 1e6,
                "percent_of_roof": 100 * size / bandwidth * 1e6 / median,
                "input_sets": sets,
                "samples_us": times,
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 4096])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--output", type=Path, help="one JSON object a line")
    arguments = parser.parse_args()
    lines = []
    for result in measure(arguments.cases, arguments.rows):
        lines.append(json.dumps(result))
        if "case" in result:
            print(
                f"{result['case']:28s} {result['rows']:5d} rows {result['us']:8.2f} us"
                f"  {result['bytes'] / 1e6:9.3f} MB  {result['percent_of_roof']:5.1f} % of the roof"
            )
        else:
            print(
                f"{result['gpu']}: copy {result['copy_tb_s']:.2f} TB/s,"
                f" empty launch {result['launch_floor_us']:.2f} us"
            )
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
