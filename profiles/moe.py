"""How long routing and the routed experts take at the release's sizes: replayed graphs, bytes, percent of
the roof.

    python profiles/moe.py [--rows 1 8 32 128] [--cases routed few] [--plan 4 3 128] [--output moe.jsonl]

128 experts, 6 a row, 5120 x 2304. Every call of a replay has rows and choices of its own, so that the experts
read between two uses of one exceed the L2 cache. Cases: `route`; `group`, `spread`, `gate_up`, `down`,
`combine` are the parts of the few-row path on prepared inputs; `few` and `many` are the two paths complete
(grouping to sum), `routed` the one that the op takes (under `deterministic` it takes `many`); `experts` is
the op with its shared expert, by `--linear`. Bytes are the weights of the distinct chosen experts, read once;
the roof is a streaming read, timed in the same run. `--plan` sets rows of a slot, stages and registers of the
few-row kernels. Synthetic: random weights, uniform routing. Before timing, the two paths must agree.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from timing import Call, device, of_roof, read_bandwidth, report, spread, time_us
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import dsv41.ops.linear.op  # noqa: F401
from dsv41.ops.moe import gluon, gluon_few, gluon_many, gluon_pack, triton_group
from dsv41.ops.moe.op import experts, route, shared_expert

HIDDEN, WIDTH, EXPERTS, TOP_K, LIMIT = 5120, 2304, 128, 6, 10.0
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 17 // 32
CASES = (
    "route", "group", "spread", "gate_up", "down", "combine", "few", "many", "routed", "experts",
)  # fmt: skip
FEW_ONLY = ("group", "spread", "gate_up", "down", "few")  # cases that end at MOST_FEW rows
MOST_FEW = 512
TARGETS = {
    1: (44, 33),
    8: (215, 185),
    32: (480, 430),
    128: (720, 600),
    1024: (1400, 1050),
    4096: (4200, 2800),
}


class Layer:
    """Packed random experts, one shared expert, a router."""

    def __init__(self) -> None:
        shapes = (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)
        self.packed = []
        self.shared = []
        for n, k in shapes:
            self.packed += [
                torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8, device="cuda"),
                torch.randint(117, 122, (EXPERTS, n, k // 32), dtype=torch.uint8, device="cuda"),
            ]
            weight = (torch.randn((n, k), device="cuda") * 4).to(torch.float8_e4m3fn)
            scale = torch.randint(114, 117, (n // 32, k // 32), dtype=torch.uint8, device="cuda")
            self.shared += [weight, scale]
        gluon_pack.pack(*self.packed)
        self.gate = (torch.randn((EXPERTS, HIDDEN), device="cuda") * HIDDEN**-0.5).bfloat16()
        self.bias = torch.randn(EXPERTS, device="cuda") * 0.1

    def routed(
        self, x: Tensor, ids: Tensor, weights: Tensor, few: bool, plan: gluon_few.Plan | None
    ) -> Tensor:
        if few:
            return gluon_few.run_few(x, ids, weights, *self.packed, LIMIT, plan)
        groups = triton_group.group(ids, EXPERTS, gluon_many.CHUNK)
        return gluon_many.run_many(x, groups, weights, *self.packed, LIMIT)


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn((rows, HIDDEN), device="cuda").bfloat16()
    ids = torch.rand((rows, EXPERTS), device="cuda").topk(TOP_K).indices.to(torch.int32)
    return x, ids, torch.rand((rows, TOP_K), device="cuda") + 0.05


def build(case: str, layer: Layer, rows: int, arguments: argparse.Namespace) -> tuple[Call, int]:
    """One call on inputs of its own, and the bytes of weights that it must read."""
    x, ids, weights = inputs(rows)
    distinct = len(ids.unique())
    plan = gluon_few.Plan(*arguments.plan) if arguments.plan else None
    chosen = plan or gluon_few.plan(rows)
    whole = distinct * EXPERT_BYTES
    if case == "route":
        no, yes = torch.zeros(rows, dtype=torch.bool, device="cuda"), torch.ones(rows, device="cuda").bool()
        args = (x, layer.gate, layer.bias, layer.bias, no, yes, TOP_K, 1.5, "gluon")
        return lambda: route(*args), 2 * layer.gate.numel() + 2 * x.numel()
    if case == "group":
        return lambda: triton_group.group(ids, EXPERTS, chosen.rows), 4 * ids.numel()
    if case in ("spread", "gate_up", "down"):
        work, codes, scales = gluon_few.quantised_rows(x, ids, EXPERTS, chosen)
        if case == "spread":
            groups = None if work.solo else triton_group.group(ids, EXPERTS, chosen.rows)
            call = lambda: triton_group.spread(x, groups, TOP_K, work.slots, chosen.rows)  # noqa: E731
            return call, 2 * x.numel() + codes.numel()
        up = (work, codes, scales, *layer.packed[:2], weights, LIMIT)
        if case == "gate_up":
            return lambda: gluon_few.hidden_rows(*up), whole * 2 // 3
        down = (work, *gluon_few.hidden_rows(*up), *layer.packed[2:], ids.numel())
        return lambda: gluon_few.output_rows(*down), whole // 3
    if case == "combine":
        y = torch.randn((rows * TOP_K, HIDDEN), device="cuda").bfloat16()
        return lambda: triton_group.combine(y, ids, x), 2 * (y.numel() + 2 * x.numel())
    if case == "experts":

        def both() -> Tensor:
            shared, side = shared_expert(x, *layer.shared, LIMIT, True, False, arguments.linear, "gluon")
            return experts(x, ids, weights, *layer.packed, shared, side, LIMIT, True, False, "gluon")

        return both, whole + sum(part.numel() for part in layer.shared)
    few = case == "few" or (case == "routed" and rows <= gluon.FEW_ROWS)
    return lambda: triton_group.combine(layer.routed(x, ids, weights, few, plan), ids, x), whole


def agreement(layer: Layer) -> float:
    """How far the two paths are apart on 40 rows: about 2.5e-3 of the norm if both are right."""
    x, ids, weights = inputs(40)
    few, many = (layer.routed(x, ids, weights, way, None).double() for way in (True, False))
    return ((few - many).norm() / many.norm()).item()


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    torch.manual_seed(0)
    layer, bandwidth = Layer(), read_bandwidth()
    apart = 0.0 if arguments.unchecked else agreement(layer)
    yield {
        **device(), "read_tb_s": bandwidth / 1e12, "few_from_many": apart,
        "synthetic": "random weights, uniform routing",
    }  # fmt: skip
    if not apart < 2e-2:
        raise SystemExit(f"the few-row and many-row paths are {apart:.2e} apart: nothing is timed")
    for rows in arguments.rows:
        for case in arguments.cases:
            if case in FEW_ONLY and rows > MOST_FEW:
                continue
            sets = 16 if rows == 1 else 4 if rows <= 16 else 2
            built = [build(case, layer, rows, arguments) for _ in range(sets)]
            launches = {1: 64, 8: 32}.get(rows, 16 if rows < 1024 else 4)
            found = spread(time_us([call for call, _ in built], launches, 11))
            us, size = found["us"], sum(size for _, size in built) / sets
            must, aim = TARGETS.get(rows, (None, None)) if case == "routed" else (None, None)
            yield {
                "case": case, "rows": rows, "plan": arguments.plan, **found, **of_roof(us, size, bandwidth),
                "must_us": must, "aim_us": aim, "tflop_s": 6 * rows * TOP_K * HIDDEN * WIDTH / us / 1e6,
            }  # fmt: skip


def card(result: dict) -> str:
    if "case" not in result:
        apart = f"few and many rows {result['few_from_many']:.1e} apart"
        return f"{result['gpu']}: read {result['read_tb_s']:.2f} TB/s; {apart}"
    line = f"{result['case']:14s} {result['rows']:5d} rows {result['us']:9.2f} us {result['us_p90']:9.2f} p90"
    if result["case"] in ("gate_up", "down", "few", "many", "routed", "experts"):
        line += f"  {result['tb_s']:5.2f} TB/s {result['percent_of_roof']:5.1f} % of the roof"
    if result["rows"] >= 256 and result["case"] in ("few", "many", "routed"):
        line += f"  {result['tflop_s']:5.0f} TFLOP/s"
    if result["must_us"]:
        line += f"  must {result['must_us']}, aim {result['aim_us']}"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 256, 1024, 4096])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES[:-1]))
    parser.add_argument("--plan", type=int, nargs=3, metavar=("ROWS", "STAGES", "REGISTERS"))
    parser.add_argument(
        "--linear", default="reference", help="implementation of the shared expert's products"
    )
    parser.add_argument(
        "--unchecked", action="store_true", help="time one path though the other may be wrong"
    )
    parser.add_argument("--output", type=Path, help="one JSON object a line")
    arguments = parser.parse_args()
    report(measure(arguments), card, arguments.output)


if __name__ == "__main__":
    main()
