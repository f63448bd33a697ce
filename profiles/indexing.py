"""The sparse indexer's kernels on one GPU: CUDA-graph replays, cold and hot, against the roof of this run.

    python profiles/indexing.py [--only scores|top_k|select] [--variant bf16,e4m3]
                                [--rows 1,4096] [--states 4096,1048576] [--output FILE]

--variant: kernels of the scores, in turn; the error of each against float64 comes first, on keys whose scales
lie 0, 3 and 9 octaves apart.

Cold: each call of a replay reads another part of a key pool of at least 320 MB (the L2 holds 60); hot: one
part again and again. Top-k reads scores that the kernel before it wrote, so its rows are as hot as their size
allows, as in a step. Bytes: keys once a row (decode) or once (prefill: its limit is flops), fp32 scores
written and read. Synthetic: random keys and queries, every row full. One JSON object a line with --output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from timing import Call, device, product_rate, read_bandwidth, time_us

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dsv41.ops import records
from dsv41.ops.indexing import triton as kernels
from dsv41.ops.indexing.op import select, top_k

S, HEADS, DIM, K, RECORD = 64, 32, 128, 512, "mxfp4_68"
PAGE = 68 * S
COLD_BYTES = 320 << 20


def replay(calls: Sequence[Call], repeats: int = 25) -> float:
    """Median microseconds of one call in a graph of all of them, at least 20 calls long."""
    launches = len(calls) * max(1, 20 // len(calls))
    return statistics.median(time_us(calls, launches, repeats, warm=3))


def random_queries(num_rows: int) -> torch.Tensor:
    q = torch.randn(num_rows, HEADS, DIM, device="cuda")
    return torch.cat([records.round_trip(part.bfloat16(), "mxfp4_32") for part in q.split(512)])


def errors(variant: str) -> list[dict[str, object]]:
    """Of 1 row (decode kernel) and, in bf16, of 24 rows (prefill kernel): the norm of the difference from
    float64 over that of the same sums without signs, and the largest difference over the row's deviation."""
    results = []
    for octaves in (0, 3, 9):
        for num_rows in (1, 24) if variant == "bf16" else (1,):
            states = 8192
            keys = torch.randn(states, 4, 32, device="cuda")
            keys *= 2.0 ** torch.randint(0, octaves + 1, (states, 4, 1), device="cuda")
            cache = torch.zeros(states // S, PAGE, dtype=torch.uint8, device="cuda")
            slots = torch.arange(states, device="cuda")
            records.write_slots(RECORD, cache, slots, keys.flatten(1).bfloat16(), S, 0)
            true_keys = records.read_slots(RECORD, cache, slots, S, DIM, 0, torch.bfloat16).double()
            q = random_queries(num_rows)
            weights = torch.randn(num_rows, HEADS, device="cuda").bfloat16()
            zeros = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
            table = torch.arange(states // S, dtype=torch.int32, device="cuda")[None]
            rows = kernels.Rows(zeros, zeros + states, table, S)
            scores = torch.full((num_rows, states), torch.nan, device="cuda")
            kernels.score(q, weights, cache, rows, rows.num_states, None, scores, RECORD, 0, variant)
            dots = (q.double() @ true_keys.mT).relu()
            truth = torch.einsum("th,ths->ts", weights.double(), dots)
            norm = torch.einsum("th,ths->ts", weights.double().abs(), dots).norm(dim=1)
            off = scores.double() - truth
            relative = float((off.norm(dim=1) / norm).max())
            worst = float((off.abs().amax(1) / truth.std(dim=1)).max())
            print(
                f"{variant:12} {num_rows:3} rows, scales {octaves} octaves apart: error {relative:.1e}, "
                f"worst {worst:.1e} of a row's deviation",
                flush=True,
            )
            results.append(
                {"what": "error", "variant": variant, "rows": num_rows, "octaves": octaves,
                 "relative": relative, "worst": worst}
            )  # fmt: skip
    return results


class Work:
    """Rows of distinct requests (`shared`: of one) over `states` states each, with `sets` key sets."""

    def __init__(self, num_rows: int, states: int, cold: bool, shared: bool = False) -> None:
        requests = 1 if shared else num_rows
        pages = -(-states // S)
        size = requests * pages * PAGE
        self.sets = max(1, -(-COLD_BYTES // size)) if cold else 1
        self.keys = torch.randint(
            0, 256, (self.sets * requests * pages, PAGE), dtype=torch.uint8, device="cuda"
        )
        scales = self.keys[:, 64 * S :]
        scales.copy_(torch.randint(120, 132, scales.shape, dtype=torch.uint8, device="cuda"))
        order = torch.randperm(len(self.keys), device="cuda").to(torch.int32)
        self.tables = order.view(self.sets, requests, pages)
        self.q = random_queries(num_rows)
        self.weights = (torch.randn(num_rows, HEADS, device="cuda") / 64).bfloat16()
        self.num_states = torch.full((num_rows,), states, dtype=torch.int32, device="cuda")
        if shared:  # a prefill chunk: the last row sees all
            self.num_states -= torch.arange(num_rows - 1, -1, -1, dtype=torch.int32, device="cuda")
        self.request = torch.arange(num_rows, dtype=torch.int32, device="cuda") % requests
        self.scores = torch.empty(num_rows, -(-states // 64) * 64, device="cuda")
        self.num_rows, self.states = num_rows, states

    def score(self, number: int, variant: str) -> Call:
        rows = kernels.Rows(self.request, self.num_states, self.tables[number], S)
        return lambda: kernels.score(
            self.q, self.weights, self.keys, rows, self.num_states, None, self.scores, RECORD, 0, variant
        )

    def select(self, number: int, candidates: torch.Tensor | None = None, num_blocks: int = 0) -> Call:
        if candidates is None:
            candidates = torch.empty((self.num_rows, 0), dtype=torch.int32, device="cuda")
        return lambda: select(
            self.q, self.weights, self.keys, self.tables[number], self.request, self.num_states, candidates,
            K, num_blocks, 8, RECORD, S, False, "triton",
        )  # fmt: skip


def rows_of(kind: str) -> list[tuple[int, int, bool]]:
    one = [(1, 4096, False), (1, 131072, False), (1, 1 << 20, False)]
    many = [(32, 32768, False), (128, 32768, False), (4096, 4096, True), (4096, 32768, True)]
    return one + many + ([(4096, 131072, True)] if kind == "scores" else [])


def measure_scores(
    read: float, flops: float, variants: Sequence[str], wanted: Callable[[int, int], bool]
) -> list[dict[str, object]]:
    results = [line for variant in variants for line in errors(variant)] if variants != ["bf16"] else []
    for num_rows, states, shared in rows_of("scores"):
        if not wanted(num_rows, states):
            continue
        for cold in (False, True) if not shared and num_rows * states < 1 << 22 else (not shared,):
            work = Work(num_rows, states, cold, shared)
            key_bytes = (1 if shared else num_rows) * states * 68
            pairs = int(work.num_states.sum())
            roof = max((key_bytes + 4 * pairs) / read, 2 * HEADS * DIM * pairs / flops)
            for variant in variants if num_rows <= kernels.FEW_ROWS else ["bf16"]:
                time = replay([work.score(i, variant) for i in range(work.sets)])
                name = "scores" if variant == "bf16" else f"scores {variant}"
                results.append(row(name, num_rows, states, shared, cold, time, roof))
            del work
            torch.cuda.empty_cache()
    return results


def measure_top_k(read: float, flops: float) -> list[dict[str, object]]:
    results = []
    for num_rows, states, shared in rows_of("top_k"):
        sets = 1 if num_rows == 4096 else max(1, min(16, (16 << 20) // (num_rows * states * 4)))
        scores = [torch.randn(num_rows, states, device="cuda") for _ in range(sets)]
        lengths = torch.full((num_rows,), states, dtype=torch.int32, device="cuda")
        time = replay([lambda x=x, n=lengths: top_k(x, n, K, "triton") for x in scores])
        results.append(
            row("top_k", num_rows, states, shared, False, time, num_rows * (4 * states + 4 * K) / read)
        )
    return results


def measure_select(read: float, flops: float) -> list[dict[str, object]]:
    results = []
    for num_rows, states, shared in rows_of("select"):
        work = Work(num_rows, states, not shared, shared)
        key_bytes = (1 if shared else num_rows) * states * 68
        pairs = int(work.num_states.sum())
        roof = max((key_bytes + 8 * pairs) / read, 2 * HEADS * DIM * pairs / flops)
        time = replay([work.select(i) for i in range(work.sets)], 9)
        results.append(row("select", num_rows, states, shared, not shared, time, roof))
        if states < 32768:
            continue
        time = replay([work.select(i, num_blocks=2048) for i in range(work.sets)], 9)
        results.append(row("select, publishing", num_rows, states, shared, not shared, time, roof))
        chosen = work.select(0, num_blocks=2048)()[2]
        time = replay([work.select(i, chosen) for i in range(work.sets)], 9)
        listed = num_rows * 16384
        roof = max((min(key_bytes, 68 * listed) + 8 * listed) / read, 2 * HEADS * DIM * listed / flops)
        results.append(row("select in candidates", num_rows, states, shared, not shared, time, roof))
        del work
        torch.cuda.empty_cache()
    return results


def row(
    what: str, num_rows: int, states: int, shared: bool, cold: bool, time: float, roof: float
) -> dict[str, object]:
    print(
        f"{what:22} {num_rows:5} x {states:7} {'one request' if shared else 'own pages':11} "
        f"{'cold' if cold else 'hot':4} {time:10.2f} us {100 * roof / time:5.0f} % of the roof",
        flush=True,
    )
    return {
        "what": what, "rows": num_rows, "states": states, "shared": shared, "cold": cold,
        "us": round(time, 3), "roof_us": round(roof, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=("scores", "top_k", "select"))
    parser.add_argument("--variant", default="bf16", help=f"of {', '.join(kernels.VARIANTS)}; or all")
    parser.add_argument("--rows", help="only these cases of the scores")
    parser.add_argument("--states", help="only these cases of the scores")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    read, flops = read_bandwidth() / 1e6, product_rate() / 1e6  # a microsecond
    about = {**device(), "read_TBs": read / 1e6}
    about |= {"bf16_TFLOPs": flops / 1e6}
    print(about, flush=True)
    variants = [*kernels.VARIANTS] if args.variant == "all" else args.variant.split(",")

    def wanted(num_rows: int, states: int) -> bool:
        listed = ((args.rows, num_rows), (args.states, states))
        return all(only is None or str(number) in only.split(",") for only, number in listed)

    def scores(read: float, flops: float) -> list[dict[str, object]]:
        return measure_scores(read, flops, variants, wanted)

    parts = {"scores": scores, "top_k": measure_top_k, "select": measure_select}
    results = [about]
    for name, measure in parts.items():
        if args.only in (None, name):
            results += measure(read, flops)
    if args.output:
        args.output.write_text("".join(json.dumps(result) + "\n" for result in results))


if __name__ == "__main__":
    main()
