"""How long the Engram kernels take: replayed graphs, bytes, and percent of the roof.

    python profiles/engram.py [--rows 1 8 32 128 4096] [--cases hash lookup] [--output engram.jsonl]

Each line times one op at one number of rows in a CUDA graph of many launches. The rows looked up are drawn
anew for every launch from a table of 2 GiB, far beyond the L2 cache; `lookup host` reads a table of 256 MiB
in pinned host memory over the bus, whose roof is not the one printed. The inputs of `write` rotate among sets
that exceed the cache together where a set is at least 1 MB. The roof is a device copy, timed in the same run.
Synthetic: random ids and values, one row in eight an image's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from timing import Call, copy_bandwidth, device, of_roof, report, sets_beyond_l2, spread, time_us
from torch import Tensor

from dsv41.config import engram_primes
from dsv41.ops.engram.op import engram_hash, engram_lookup, engram_write

COPIES, DIM, EPS, IMPL = 4, 5120, 1e-20, "triton"
BACK, HEADS, CHANNELS, VOCAB = 3, 8, 256, 129280
COLUMNS = BACK * HEADS
TABLE_ROWS = {"lookup": 8 << 20, "lookup host": 1 << 20}


def ids(limit: int, *shape: int) -> Tensor:
    return torch.randint(0, limit, shape, device="cuda")


def hashing(rows: int) -> tuple[list[Call], int]:
    primes = torch.tensor(engram_primes(1, BACK, HEADS, 16_000_000)[0], device="cuda").view(BACK, HEADS)
    offsets = primes.flatten().cumsum(0) - primes.flatten()
    multipliers = ids(1 << 46, BACK + 1) * 2 + 1
    token_map, image = ids(99092, VOCAB), ids(8, rows) == 0
    args = (ids(VOCAB, rows), ids(VOCAB, rows, BACK), image, token_map, multipliers, primes, offsets, 2)
    return [lambda: engram_hash(*args, IMPL)], rows * (8 * (1 + BACK) + 1 + 8 * COLUMNS)


def looking_up(case: str, rows: int) -> tuple[list[Call], int]:
    entries = TABLE_ROWS[case]
    if case == "lookup host":
        table = torch.zeros((entries, CHANNELS), dtype=torch.uint8, pin_memory=True)
        scale = torch.full((entries, CHANNELS // 32), 127, dtype=torch.uint8).pin_memory()
    else:
        table = torch.zeros((entries, CHANNELS), dtype=torch.uint8, device="cuda")
        scale = torch.full((entries, CHANNELS // 32), 127, dtype=torch.uint8, device="cuda")
    codes = table.view(torch.float8_e4m3fn)
    indices = [ids(entries, rows, COLUMNS) for _ in range(8 if rows >= 1024 else 64)]

    def call(index: Tensor) -> Call:
        return lambda: engram_lookup(codes, scale, index, torch.bfloat16, IMPL)

    size = rows * COLUMNS * (8 + CHANNELS + CHANNELS // 32 + 2 * CHANNELS)
    return [call(index) for index in indices], size


def writing(rows: int) -> tuple[list[Call], int]:
    size = 2 * rows * DIM * (2 * COPIES + COPIES + 1) + 2 * 2 * COPIES * DIM + rows
    sets = 1 if size < 1 << 20 else sets_beyond_l2(size)
    query, key, image = bf16(COPIES, DIM), bf16(COPIES, DIM), ids(8, rows) == 0

    def call() -> Call:
        streams, kv = bf16(rows, COPIES, DIM), bf16(rows, (COPIES + 1) * DIM)
        return lambda: engram_write(streams, kv, query, key, image, EPS, IMPL)

    return [call() for _ in range(sets)], size


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


CASES: dict[str, Callable[[int], tuple[list[Call], int]]] = {
    "hash": hashing,
    "lookup": lambda rows: looking_up("lookup", rows),
    "lookup host": lambda rows: looking_up("lookup host", rows),
    "write": writing,
}


def measure(cases: list[str], row_counts: list[int]) -> Iterator[dict[str, object]]:
    bandwidth = copy_bandwidth()
    yield {"copy_tb_s": bandwidth / 1e12, **device()}
    for case in cases:
        for rows in row_counts:
            calls, size = CASES[case](rows)
            launches = max(len(calls), 8 if rows >= 1024 else 64)
            found = spread(time_us(calls, launches, 7 if case == "lookup host" else 21))
            yield {"case": case, "rows": rows, **found, **of_roof(found["us"], size, bandwidth)}


def card(result: dict) -> str:
    if "case" not in result:
        return f"{result['gpu']}: copy {result['copy_tb_s']:.2f} TB/s"
    return (
        f"{result['case']:12s} {result['rows']:5d} rows {result['us']:8.2f} us"
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
