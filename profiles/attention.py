"""Sparse attention on one GPU: time, bytes, flops, and the distance to the roof measured in the same run.

    python profiles/attention.py [--rows 1,8,32] [--kernels gluon:scaled_528+nvfp4_288] [--deterministic]
                                 [--variant default,four_warps]
                                 [--output profiles/baselines/attention.json]

Every row lists 128 window states and 512 selected states, 64 heads of 512. Up to 512 rows, a row is a
request of 2048 states of its own (decode, 4k tokens at ratio 2); 4096 rows are one chunk over a prefix of
32768 states, whose windows overlap (prefill). Keys and queries are random, selections uniform without
repetition. `--kernels` are implementations and the records they read, in turn: `flashmla:mixed_584` beside
our own shows both in one run, and `flashmla-planned` is its kernel alone, on a schedule of an earlier call
(the op keeps nothing between calls, so it plans in every one). Times are medians over replays of one captured
graph of several calls, which take turns over four selections; few rows so stay in L2. Parity with the
reference is checked first: no numbers without it.
Prints a table, then one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from timing import Call, product_rate, read_bandwidth, time_us
from torch import Tensor

from dsv41.ops import records
from dsv41.ops.attention import flashmla, gluon
from dsv41.ops.attention.op import sparse_attention

HEADS, DIM, ROPE, WINDOW, SELECTED, PAGE = 64, 512, 64, 128, 512, 64
MUST = {1: 12.5, 8: 15.0, 32: 25.0, 128: 40.0, 512: 150.0, 4096: 1000.0}  # us, spec/performance.md section 4
AIM = {1: 8.0, 8: 10.0, 32: 18.0, 128: 33.0, 512: 120.0, 4096: 650.0}
TOLERANCE = 4e-3


def pool(record: str, num_states: int) -> Tensor:
    """Pages of random states; 65536 different ones, repeated."""
    distinct = min(num_states, 65536)
    pages, shape = -(-distinct // PAGE), (PAGE, DIM)
    if record == "rows_bf16":
        cache = torch.empty((pages, *shape), dtype=torch.bfloat16, device="cuda")
    else:
        stride = records.page_bytes(record, PAGE, DIM, ROPE)
        stride = -(-stride // 576) * 576 if record == "mixed_584" else -(-stride // 64) * 64
        cache = torch.zeros((pages, stride), dtype=torch.uint8, device="cuda")
    x = torch.randn((pages * PAGE, DIM), device="cuda")
    records.write_slots(record, cache, torch.arange(pages * PAGE, device="cuda"), x, PAGE, ROPE)
    return cache.repeat(-(-num_states // (pages * PAGE)), *([1] * (cache.dim() - 1)))


def problem(rows: int, window_record: str, state_record: str, deterministic: bool) -> list[list]:
    """Arguments of `sparse_attention` without its implementation, one list per selection."""
    prefill = rows > 512
    context = 32768 if prefill else 2048
    window = pool(window_record, (rows + WINDOW) if prefill else rows * WINDOW)
    states = pool(state_record, context if prefill else rows * context)
    row = torch.arange(rows, device="cuda", dtype=torch.int32)[:, None]
    window_slots = row * (1 if prefill else WINDOW) + torch.arange(WINDOW, device="cuda", dtype=torch.int32)
    q = torch.randn((rows, HEADS, DIM), device="cuda").to(torch.bfloat16)
    sink = torch.randn(HEADS, device="cuda")
    sets = []
    for _ in range(4):
        # Without repetition: one state out of each of 512 parts of the context, then shuffled.
        part = context // SELECTED
        chosen = torch.arange(SELECTED, device="cuda") * part
        chosen = chosen + torch.randint(part, (rows, SELECTED), device="cuda")
        chosen = chosen.gather(1, torch.rand((rows, SELECTED), device="cuda").argsort(1)).to(torch.int32)
        slots = chosen if prefill else chosen + row * context
        sets.append(
            [
                q,
                window,
                window_slots,
                window_record,
                PAGE,
                states,
                slots,
                state_record,
                PAGE,
                sink,
                ROPE,
                deterministic,
            ]
        )
    return sets


def planned(args: list) -> Call:
    """The package's own call, without what the op does around it."""
    q, window, window_slots, record, page, states, slots, state_record, state_page, sink = args[:10]
    lists = [(window, window_slots, record, page), (states, slots, state_record, state_page)]
    calls = flashmla.decode_calls(q, lists, sink, False)
    return lambda: torch.cat([flashmla._package().flash_mla_with_kvcache(**call)[0] for call in calls])[:, 0]


def attend(args: list, impl: str, variant: str) -> Tensor:
    if impl == "flashmla-planned":
        return planned(args)()
    if variant == "default":
        return sparse_attention(*args, impl)
    return gluon.attend(*args, variant)


def error(args: list, impl: str, variant: str) -> float:
    """Relative error of up to 24 rows against the reference."""
    got = attend(args, impl, variant).double()
    rows = torch.linspace(0, len(got) - 1, min(len(got), 24), device="cuda").long()
    few = [arg[rows] if position in (0, 2, 6) else arg for position, arg in enumerate(args)]
    expected = sparse_attention(*few, "reference").double()
    return float((got[rows] - expected).norm() / expected.norm())


def measure(rows: int, kernel: str, deterministic: bool, roof: dict, variant: str) -> dict:
    impl, _, names = kernel.partition(":")
    window_record, _, state_record = names.partition("+")
    state_record = state_record or window_record
    sets = problem(rows, window_record, state_record, deterministic)
    off = error(sets[0], impl, variant)
    if not off <= TOLERANCE:
        raise SystemExit(f"{rows} rows are {off:.2e} off the reference: no numbers")
    number = 20 if rows <= 128 else 4
    ready = [planned(a) for a in sets] if impl == "flashmla-planned" else []
    calls = ready or [lambda a=a: attend(a, impl, variant) for a in sets]
    times = time_us(calls, number, 15, warm=2)
    median, worst = statistics.median(times), times[-1]
    state_bytes = [records.state_bytes(record, DIM, ROPE) for record in (window_record, state_record)]
    num_bytes = rows * (WINDOW * state_bytes[0] + SELECTED * state_bytes[1] + 2 * 2 * HEADS * DIM)
    flops = 4 * rows * HEADS * DIM * (WINDOW + SELECTED)
    floor = max(num_bytes / roof["read_TB_s"], flops / roof["bf16_TFLOP_s"]) / 1e6
    return {
        "rows": rows, "window_record": window_record, "state_record": state_record, "impl": impl,
        "variant": variant, "deterministic": deterministic,
        "us": round(median, 2), "worst_us": round(worst, 2), "error": off,
        "bytes": num_bytes, "flops": flops, "TB_s": round(num_bytes / median / 1e6, 3),
        "TFLOP_s": round(flops / median / 1e6, 1), "roof_percent": round(100 * floor / median, 1),
        "must_us": MUST.get(rows), "aim_us": AIM.get(rows),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,8,32,128,512,4096")
    parser.add_argument(
        "--kernels", default="gluon:scaled_528+nvfp4_288", help="IMPL:RECORD or IMPL:WINDOW+STATES, by commas"
    )
    parser.add_argument("--variant", default="default", help=f"gluon's {', '.join(gluon.VARIANTS)}, in turn")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    roof = {"read_TB_s": read_bandwidth() / 1e12, "bf16_TFLOP_s": product_rate() / 1e12}
    table = [
        measure(int(rows), kernel, arguments.deterministic, roof, variant)
        for rows in arguments.rows.split(",")
        for kernel in arguments.kernels.split(",")
        for variant in (arguments.variant.split(",") if kernel.startswith("gluon:") else ["default"])
    ]
    print(" rows       us    worst   TB/s TFLOP/s roof %   must    aim   error")
    for line in table:
        figures = [line[key] for key in ("us", "worst_us", "TB_s", "TFLOP_s", "roof_percent")]
        targets = [line[key] or 0.0 for key in ("must_us", "aim_us")]
        print("{:5d} {:8.2f} {:8.2f} {:6.2f} {:7.1f} {:6.1f}".format(line["rows"], *figures), end="")
        names = [line[key] for key in ("impl", "window_record", "state_record", "variant")]
        print(" {:6.1f} {:6.1f} {:7.1e} {} {}+{} {}".format(*targets, line["error"], *names))
    report = {
        "benchmark": "attention", "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "synthetic": "random keys and queries, uniform selections", "roofs": roof, "rows": table,
    }  # fmt: skip
    print(json.dumps(report))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
