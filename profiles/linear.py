"""How long the linear family's products take at the release's sizes: replayed graphs, bytes, percent of roof.

    python profiles/linear.py [--rows 1 8 64 4096] [--cases wq_b head] [--deterministic]
                              [--set FEW_ROWS=64 FUSED_ROWS=4] [--variants STACKED=1 OVERLAP=0,LEAN=0]
                              [--output linear.jsonl]

Each line times one product at one number of rows in a CUDA graph of many launches, over weights that exceed
the L2 cache together; all that the op does is in it (quantisation or rotation, adding splits). `cuBLAS` is
torch.mm (or torch.bmm) on bf16 weights of the same shape and ready activations. `must` and `aim` are the
targets of this machine. The read roof is timed in the same run. `--set` changes a constant of the
implementation for this run, so that variants can be compared; `plan` in the JSON lines says what ran.
`--variants` times every case once more with each of the given changes, beside the one without.
Synthetic: random codes, scales and activations.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from timing import (
    Call,
    Change,
    changed,
    changes_of,
    device,
    of_roof,
    read_bandwidth,
    report,
    sets_beyond_l2,
    time_us,
)
from torch import Tensor

from dsv41.ops.library import implementation
from dsv41.ops.linear.op import grouped_output, linear, linear_fp8

HEADS, DIM, ROPE, GROUPS = 64, 512, 64, 8
# name: (kind, N, K, must and aim at one row, must at eight), us
CASES = {
    "wq_a+wkv": ("fp8", 1792, 5120, (5.0, 3.2, 5.7)),
    "wq_b": ("fp8", 32768, 1280, (12.0, 10.5, 14.5)),
    "wq_b+index": ("fp8", 40960, 1280, None),
    "wo_a": ("grouped", 8192, 4096, (10.5, 8.5, 12.3)),
    "wo_b": ("fp8", 5120, 8192, (13.5, 10.7, 15.0)),
    "shared w1+w3": ("fp8", 4608, 5120, (8.5, 6.3, 9.8)),
    "shared w2": ("fp8", 5120, 2304, (5.4, 3.8, 6.7)),
    "engram kv": ("fp8", 25600, 12288, None),
    "side": ("bf16", 1088, 5120, None),
    "index key": ("bf16", 128, 512, None),
    "head": ("bf16", 129280, 5120, None),
}


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def fp8(n: int, k: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, device="cuda")
    codes[codes & 0x7F == 0x7F] = 0
    return codes.view(torch.float8_e4m3fn), torch.randint(112, 121, (n // 32, k // 32), device="cuda").to(
        torch.uint8
    )


def build(kind: str, n: int, k: int, rows: int, deterministic: bool) -> Call:
    """One call on weights of its own."""
    if kind == "bf16":
        x, weight = bf16(rows, k), bf16(n, k)
        dtype = torch.bfloat16 if n == 128 else torch.float32
        return lambda: linear(x, weight, dtype, deterministic, "gluon")
    weight, scale = fp8(n, k)
    if kind == "fp8":
        x = bf16(rows, k)
        return lambda: linear_fp8(x, weight, scale, True, deterministic, "gluon")
    o, turn = bf16(rows, HEADS, DIM), torch.rand((rows, ROPE // 2), device="cuda") * 6.28
    cos_sin = torch.cat((turn.cos(), turn.sin()), dim=1)
    return lambda: grouped_output(o, cos_sin, weight, scale, GROUPS, deterministic, "gluon")


def blas(kind: str, n: int, k: int, rows: int) -> Call:
    if kind == "grouped":
        x, weight = bf16(GROUPS, rows, k), bf16(GROUPS, n // GROUPS, k)
        return lambda: torch.bmm(x, weight.mT)
    x, weight = bf16(rows, k), bf16(n, k)
    if kind == "bf16" and n != 128:
        return lambda: torch.mm(x, weight.mT, out_dtype=torch.float32)
    return lambda: torch.mm(x, weight.mT)


def many_calls(make: Callable[[], Call], weight_bytes: int) -> list[Call]:
    """Calls on as many weights as the L2 cache cannot hold."""
    return [make() for _ in range(sets_beyond_l2(weight_bytes, 40) if weight_bytes >= 1 << 20 else 1)]


def repeated(calls: list[Call], rows: int) -> float:
    """Median microseconds of one of the calls, taken in turn."""
    return statistics.median(time_us(calls, max(2 * len(calls), 4 if rows >= 1024 else 16), 15))


def settings(text: str) -> list[Change]:
    """ "STACKED=1,LEAN=0" -> changes of the implementation. ValueError for constants that it has not."""
    return changes_of(filter(None, text.split(",")), [implementation("linear", "gluon")])


def measure(
    names: list[str], row_counts: list[int], variants: list[str], deterministic: bool, with_blas: bool
) -> Iterator[dict]:
    kernel = implementation("linear", "gluon")
    bandwidth = read_bandwidth()
    yield {"read_tb_s": bandwidth / 1e12, **device()}
    for name in names:
        kind, n, k, targets = CASES[name]
        groups = GROUPS if kind == "grouped" else 1
        weight_bytes = n * k * 2 if kind == "bf16" else n * k + n * k // 1024
        for rows in row_counts:
            calls = many_calls(lambda: build(kind, n, k, rows, deterministic), weight_bytes)  # noqa: B023
            size = weight_bytes + rows * (k * groups * 2 + n * (4 if kind == "bf16" else 2))
            for variant in ["", *variants]:
                with changed(settings(variant)):
                    us = repeated(calls, rows)
                    result = {
                        "case": name,
                        "rows": rows,
                        "us": us,
                        **of_roof(us, size, bandwidth),
                        "tflop_s": 2 * rows * n * k / us / 1e6,
                        "deterministic": deterministic,
                        "variant": variant,
                    }
                    if kind != "bf16":
                        way = kernel.plan(n // groups, k, groups, rows, deterministic)
                        many = rows > kernel.FEW_ROWS and not deterministic
                        result["plan"] = None if many else dataclasses.asdict(way) | {"stages": way.stages}
                if targets and rows in (1, 8):
                    result |= {"must": targets[0] if rows == 1 else targets[2], "aim": targets[1]}
                if with_blas and not variant:
                    blas_calls = many_calls(lambda: blas(kind, n, k, rows), n * k * 2)  # noqa: B023
                    result["cublas_us"] = repeated(blas_calls, rows)
                    del blas_calls
                yield result
            del calls
            torch.cuda.empty_cache()


def card(result: dict) -> str:
    if "case" not in result:
        return f"{result['gpu']}: reads {result['read_tb_s']:.2f} TB/s"
    line = f"{result['case']:14s} {result['rows']:5d} rows {result['us']:9.2f} us"
    line += f"  {result['tb_s']:5.2f} TB/s  {result['percent_of_roof']:5.1f} % of the roof"
    line += f"  {result['tflop_s']:6.1f} TFLOP/s"
    if "cublas_us" in result:
        line += f"  cuBLAS bf16 {result['cublas_us']:9.2f} us"
    if "must" in result:
        verdict = "met" if result["us"] <= result["must"] else "MISSED"
        line += f"  must {result['must']} ({verdict}) aim {result['aim']}"
    return line + (f"  {result['variant']}" if result["variant"] else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 4096])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-blas", action="store_true", help="leave cuBLAS out")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="constants of the family")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=[],
        metavar="NAME=VALUE,...",
        help="timed beside it, one after another",
    )
    parser.add_argument("--output", type=Path, help="one JSON object a line")
    arguments = parser.parse_args()
    try:
        chosen, *_ = [settings(text) for text in [",".join(arguments.set), *arguments.variants]]
    except ValueError as error:
        parser.error(str(error))
    with changed(chosen):
        results = measure(
            arguments.cases,
            arguments.rows,
            arguments.variants,
            arguments.deterministic,
            not arguments.no_blas,
        )
        report(results, card, arguments.output)


if __name__ == "__main__":
    main()
