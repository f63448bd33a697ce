"""The indexer's kernels: the contract in the interpreter, the Hopper kernels compiled offline, all of it on a
GPU.

Tolerance: the kernels' scores are fp32 sums of exact products; float64 differs by less than 2e-6 of a row's
norm (20 rounded additions). The reference rounds to bf16 three times, so it is the rule for selection, and
float64 the rule for scores. Selection has no tolerance: it is exact for the scores of the kernel itself.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton")

import test_indexing as rules
from interpreted import INTERPRETED, interpreted, repair_the_interpreter, run_interpreted  # noqa: F401
from offline import compile_sm90

from dsv41.hardware import Hardware
from dsv41.ops import records
from dsv41.ops.indexing import reference
from dsv41.ops.indexing import triton as kernels
from dsv41.ops.indexing.op import candidate_blocks, index_query, index_scores, select, top_k

compiler = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_gpu = pytest.mark.skipif(not ON_HOPPER or INTERPRETED, reason="needs one SM90 GPU")
RECORDS = ("mxfp4_68", "fp8_132", "rows_bf16")
SCORE_ERROR = 2e-6  # against float64, of a row's norm
NAN_BYTE = 255  # e8m0, e4m3 and bf16 NaN alike


def test_why_not_names_the_reason() -> None:
    hopper = Hardware("cuda", 90, "H200", 1)
    assert all(kernels.why_not(hopper, record) is None for record in (*RECORDS, None))
    assert "rows_fp32" in kernels.why_not(hopper, "rows_fp32")
    assert "SM90" in kernels.why_not(Hardware("cpu", 0, "CPU", 0), None)


def test_the_workspace_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """4096 rows that may see a million states, by shapes alone: tiles within the bound, every row once."""
    tiles: list[Tensor] = []
    monkeypatch.setattr(kernels, "score", lambda *args: tiles.append(args[6]))
    for name in ("publish", "choose"):
        monkeypatch.setattr(kernels, name, lambda *args, **kwargs: None)
    with torch.device("meta"):
        q, weights = torch.empty(4096, 32, 128, dtype=torch.bfloat16), torch.empty(4096, 32)
        keys, table = torch.empty(9, 4352, dtype=torch.uint8), torch.empty(1, 16384, dtype=torch.int32)
        rows, none = torch.empty(4096, dtype=torch.int32), torch.empty(4096, 0, dtype=torch.int32)
    kernels.select(q, weights, keys, table, rows, rows, none, 512, 2048, 8, "mxfp4_68", 64, False)
    assert {tile.nbytes for tile in tiles} == {kernels.SCORE_BYTES}
    assert sum(len(tile) for tile in tiles) == 4096


# -- in the interpreter -----------------------------------------------------------------------------------


@compiler
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize(
    "rule",
    [
        rules.test_few_visible_states_are_all_chosen,
        rules.test_nothing_visible_chooses_nothing,
        rules.test_newest_block_is_always_a_candidate,
        rules.test_candidates_change_nothing_while_they_hold_every_block,
        rules.test_selection_stays_inside_the_candidates,
        rules.test_a_nan_key_is_reported_and_never_chosen,
        rules.test_a_nan_query_is_a_fault_of_its_row_alone,
    ],
)
def test_interpreted_rule(rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's own tests, run on the kernels."""
    monkeypatch.setattr(rules, "IMPL", "triton")
    rule()


@interpreted
@pytest.mark.parametrize(("seed", "tile_bytes"), [(0, kernels.SCORE_BYTES), (1, 1)])
def test_interpreted_select_against_sorting(
    seed: int, tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged rows of three requests, padding rows, NaN pages; all rows in a tile, and one row a tile."""
    monkeypatch.setattr(rules, "IMPL", "triton")
    monkeypatch.setattr(kernels, "SCORE_BYTES", tile_bytes)
    rules.test_select_against_sorting(seed)


@interpreted
@pytest.mark.parametrize("many_rows", [1, kernels.MANY_ROWS])
def test_interpreted_top_k(many_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path: select-all, whole rows, the bound in one CTA and in several, and rows that defeat it."""
    monkeypatch.setattr(kernels, "MANY_ROWS", many_rows)
    draw = torch.Generator().manual_seed(many_rows)
    columns, k = 700, 8
    for number, scores in enumerate(hard_scores(3, columns, draw, "cpu")):
        lengths = torch.tensor([columns, columns - 37, (65, k, 1, 0)[number % 4]], dtype=torch.int32)
        assert torch.equal(kernels.top_k(scores, lengths, k), reference.top_k(scores, lengths, k))
        blocks = kernels.candidate_blocks(scores, lengths, 5, 3)
        assert torch.equal(blocks, reference.candidate_blocks(scores, lengths, 5, 3))


@interpreted
@pytest.mark.parametrize("record", RECORDS)
def test_interpreted_records(record: str) -> None:
    """Queries on angles and values that round nowhere, then scores."""
    draw = torch.Generator().manual_seed(0)
    heads, dim = 5, 32
    q = torch.randint(-6, 7, (4, heads, dim), generator=draw).bfloat16()
    turns = torch.tensor([[1.0, 0, -1, 0, 0, 1, 0, -1]]).repeat(4, 1)
    head_weights = torch.randint(-4, 5, (4, heads), generator=draw).float()
    ours = kernels.index_query(q, head_weights, turns, record, True)
    truth = reference.index_query(q, head_weights, turns, record, True)
    assert torch.equal(ours[0], truth[0])
    assert torch.allclose(ours[1].float(), truth[1].float(), rtol=2**-7)
    pool = Pool(record, 4, dim, [70, 9], 0, draw, "cpu")
    rows, seen = torch.tensor([0, 1, -1, 0], dtype=torch.int32), torch.tensor([70, 9, 5, 33])
    scores = kernels.index_scores(*ours, pool.cache, pool.table, rows, seen, 70, record, 4)
    check_scores(scores, *ours, pool, rows, seen)


# -- compiled offline -------------------------------------------------------------------------------------


POINTERS = {"k32": "*i32", "k8": "*u8", "q": "*bf16", "w": "*bf16", "scores": "*fp32", "faulty": "*i1"}


def opcodes_of(kernel, constants: dict[str, object], **options: object) -> tuple[dict[str, int], Counter]:
    """-> (registers, stack bytes) and the opcodes of the compiled object"""
    names = kernel.arg_names
    integers = ("num_rows", "chunk_cap", *(name for name in names if name.endswith("stride")))
    types = POINTERS | dict.fromkeys(integers, "i32")
    text, usage, _ = compile_sm90(kernel, constants, types, other="*i32", aligned=("stride",), **options)
    resources = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    opcodes = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", text, re.M)
    return resources, Counter(opcodes)


def count(opcodes: Counter, *prefixes: str) -> int:
    return sum(number for opcode, number in opcodes.items() if opcode.startswith(prefixes))


@compiler
@pytest.mark.parametrize(("states", "block", "mixed"), [(64, 0, 0), (64, 0, 1), (32, 0, 0), (64, 8, 0)])
def test_decode_kernel_compiles(states: int, block: int, mixed: int) -> None:
    """Two tiles a turn: 16 wgmma and no spill within the registers of four CTAs an SM; keys by 16 bytes."""
    from dsv41.ops.indexing.gluon_scores import decode_kernel

    constants = {"PAGE": 68 * states, "S": states, "BLOCK": block, "MIXED": bool(mixed), "LOOP": True}
    resources, opcodes = opcodes_of(decode_kernel, constants, num_warps=4, maxnreg=128)
    assert count(opcodes, "HGMMA") == 16
    assert count(opcodes, "LDG.E.128") >= 8
    assert resources["REG"] <= 128
    assert count(opcodes, "LDL") <= (4 if block else 0)


@compiler
def test_prefill_kernel_compiles() -> None:
    """Two CTAs an SM, no spill, A through stmatrix, the prologue's product and the loop's."""
    from dsv41.ops.indexing.gluon_scores import prefill_kernel

    resources, opcodes = opcodes_of(prefill_kernel, {"PAGE": 4352, "S": 64, "R": 8}, num_warps=4)
    assert count(opcodes, "HGMMA") == 16
    assert count(opcodes, "STSM") >= 8
    assert resources["REG"] <= 255
    assert count(opcodes, "LDL", "STL") == 0


@compiler
@pytest.mark.parametrize(("states", "block"), [(64, 0), (32, 0), (64, 8)])
def test_e4m3_decode_kernel_compiles(states: int, block: int) -> None:
    """Half of the bf16 kernel's tensor instructions; nothing but addresses spilled within the registers that
    the residency in VARIANTS needs, and next to nothing where the states are not listed."""
    from dsv41.ops.indexing.gluon_e4m3 import decode_kernel

    chosen = kernels.VARIANTS["e4m3"]
    assert chosen.registers * 128 * chosen.resident <= 65536
    constants = {"PAGE": 68 * states, "S": states, "BLOCK": block, "MIXED": False, "LOOP": True}
    resources, opcodes = opcodes_of(decode_kernel, constants, num_warps=4, maxnreg=chosen.registers)
    assert count(opcodes, "QGMMA") == 8
    assert count(opcodes, "HGMMA") == 0
    assert count(opcodes, "STS.128") >= 8
    assert resources["REG"] <= chosen.registers
    assert resources["STACK"] <= (40 if block else 8)


@compiler
def test_e4m3_magnitudes() -> None:
    """The table of every distance below the largest scale, as e4m3: exact to 11, then the smallest code goes,
    and from 13 on the kernel has none."""
    from dsv41.ops.indexing import gluon_e4m3

    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for below in range(13):
        low = gluon_e4m3.LOW.value - below * gluon_e4m3.HALF_LOW.value
        high = gluon_e4m3.HIGH.value - below * gluon_e4m3.HALF_HIGH.value
        table = torch.tensor([*low.to_bytes(4, "little"), *high.to_bytes(4, "little")], dtype=torch.uint8)
        expected = magnitudes * 2.0 ** (6 - below)
        if below == 12:
            expected[1] = 0
        assert torch.equal(table.view(torch.float8_e4m3fn).float(), expected)


@compiler
def test_row_kernel_compiles() -> None:
    """The path of every decode step below 4k states spills nothing."""
    from dsv41.ops.indexing.triton_topk import row_kernel

    constants = {"K": 512, "KP": 512, "W": 1024, "CAP": 4096, "DIRECT": 4096, "LONG": False, "FROM": 1}
    constants |= {"DROP": False, "BLOCK": 0, "S": 64, "REQUESTS": True, "FAULTS": True}
    resources, opcodes = opcodes_of(row_kernel, constants, num_warps=4)
    assert resources["STACK"] == 0
    assert count(opcodes, "LDL", "STL") == 0


# -- on the GPU -------------------------------------------------------------------------------------------


def hard_scores(num_rows: int, columns: int, draw: torch.Generator, device: str) -> list[Tensor]:
    """Random; ties across the boundary; all equal; a cluster; one sign with -0.0; NaN here and there."""
    random = torch.randn(num_rows, columns, generator=draw, device=draw.device).to(device)
    cluster, sick = random.clone(), random.clone()
    cluster[:, columns // 2 : columns // 2 + columns // 8] += 6
    sick[:, ::7] = torch.nan
    sick[0, 3:] = torch.nan
    zeros = (random - 2.8).relu() * torch.where(random < 0, -1.0, 1.0)
    constant = torch.full_like(random, 0.25)
    constant[:, columns // 3] = torch.inf
    return [random, (random * 4).round() / 4, constant, cluster, -random.abs(), zeros, sick]


class Pool:
    """Requests' keys on scattered pages of one record. All else is NaN: unused pages, the tails of last
    pages, and every page that the table names beyond a request's own."""

    def __init__(
        self, record: str, page_states: int, dim: int, counts: list[int], spare: int,
        draw: torch.Generator, device: str, keys: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.record, self.page_states, self.dim = record, page_states, dim
        pages = [-(-number // page_states) for number in counts]
        total = sum(pages) + 3 + spare
        size = -(-records.page_bytes(record, page_states, dim, 0) // 64) * 64
        self.cache = torch.full((total, size), NAN_BYTE, dtype=torch.uint8, device=device)
        if record == "rows_bf16":
            self.cache = self.cache[:, : page_states * dim * 2].view(torch.bfloat16).view(total, -1, dim)
        order = torch.randperm(total - 1, generator=draw, device=draw.device).to(device)
        self.table = order[-1].to(torch.int32).repeat(len(counts), max(pages) + 2)
        begin = 0
        for request, number in enumerate(counts):
            own = order[begin : begin + pages[request]]
            begin += pages[request]
            if request == 0 and number:
                own = own.clone()
                own[-1] = total - 1  # the last page of the pool
            self.table[request, : len(own)] = own.to(torch.int32)
            state = torch.arange(number, device=device)
            slots = own[state // page_states] * page_states + state % page_states
            values = keys
            if values is None:
                values = torch.randn(number, dim, generator=draw, device=draw.device).to(device)
            for part in torch.arange(number, device=device).split(1 << 18):
                records.write_slots(record, self.cache, slots[part], values[part].bfloat16(), page_states, 0)

    def keys(self, request: int, number: int) -> Tensor:
        state = torch.arange(number, device=self.table.device)
        pages = self.table[request].long()[state // self.page_states]
        slots = pages * self.page_states + state % self.page_states
        args = (self.record, self.cache, slots, self.page_states, self.dim, 0, torch.bfloat16)
        return records.read_slots(*args)


def check_scores(
    scores: Tensor,
    q: Tensor,
    weights: Tensor,
    pool: Pool,
    request: Tensor,
    seen: Tensor,
    tolerance: float = 2e-6,
) -> None:
    """Every visible score against float64, every other one -inf."""
    for row in range(len(q)):
        number = int(seen[row]) if request[row] >= 0 else 0
        assert torch.isneginf(scores[row, number:]).all()
        if number:
            dots = (q[row].double() @ pool.keys(int(request[row]), number).double().mT).relu()
            truth = weights[row].double() @ dots
            error = (scores[row, :number].double() - truth).norm()
            norm = (weights[row].double().abs() @ dots).norm()
            assert error <= tolerance * norm, f"row {row}: {float(error / norm):.1e} of its norm"


def check_selection(
    chosen: Tensor, slots: Tensor, scores: Tensor, pool: Pool, request: Tensor, seen: Tensor
) -> None:
    """Exact for the kernel's own scores, and the slots are the table's."""
    live = torch.where(request < 0, 0, seen)
    assert torch.equal(chosen, reference.top_k(scores, live, chosen.shape[1]))
    owner = request.long().clamp(min=0).unsqueeze(1)
    page = pool.table.long()[owner, chosen.long().clamp(min=0) // pool.page_states]
    expected = page * pool.page_states + chosen % pool.page_states
    assert torch.equal(slots, torch.where(chosen < 0, -1, expected).to(torch.int32))


def queries(num_rows: int, record: str, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    q = torch.randn(num_rows, 32, 128, generator=draw, device="cuda").bfloat16()
    angles = torch.rand(num_rows, 32, generator=draw, device="cuda") * 7
    head_weights = torch.randn(num_rows, 32, generator=draw, device="cuda")
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    return index_query(q, head_weights, cos_sin, record, True, "triton")


def run_select(
    q: Tensor, weights: Tensor, pool: Pool, request: Tensor, seen: Tensor,
    candidates: Tensor | None = None, num_blocks: int = 0, k: int = 512, deterministic: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    if candidates is None:
        candidates = torch.empty((len(q), 0), dtype=torch.int32, device=q.device)
    return select(
        q, weights, pool.cache, pool.table, request, seen, candidates, k, num_blocks, 8,
        pool.record, pool.page_states, deterministic, "triton",
    )  # fmt: skip


def cuda_draw(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


EDGES = [0, 1, 63, 64, 65, 127, 128, 129, 511, 512, 513, 4095, 4096, 4097, 16384, 16391]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("record", RECORDS)
def test_queries_are_bit_equal(record: str) -> None:
    """Rotation, rounding, quantisation and head weights; NaN, zero, tiny and huge heads; strided input."""
    draw = cuda_draw(0)
    size = 2.0 ** torch.randint(-9, 9, (129, 32, 1), generator=draw, device="cuda")
    q = (torch.randn(129, 32, 128, generator=draw, device="cuda") * size).bfloat16()
    q[3], q[4, 0, 0], q[5] = 0, torch.nan, 1e-38
    q[6] *= 1e30
    q = torch.nn.functional.pad(q.flatten(1), (0, 64))[:, : 32 * 128].unflatten(1, (32, 128))
    cos_sin = torch.randn(129, 64, generator=draw, device="cuda")
    head_weights = torch.randn(129, 32, generator=draw, device="cuda")
    for quantise in (True, False):
        ours = index_query(q, head_weights, cos_sin, record, quantise, "triton")
        truth = index_query(q, head_weights, cos_sin, record, quantise, "reference")
        for mine, true in zip(ours, truth, strict=True):
            assert torch.equal(mine.nan_to_num(nan=7e7), true.nan_to_num(nan=7e7))
            assert torch.equal(mine.isnan(), true.isnan())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("record", "page_states"), [("mxfp4_68", 64), ("mxfp4_68", 32), ("fp8_132", 64), ("rows_bf16", 64)]
)
def test_scores_and_selection(record: str, page_states: int) -> None:
    """Rows 0 to 129, ragged over requests and padding, every edge of the lengths. Catches a page, a scale or
    a head in the wrong place, a group of rows that borrows its neighbour's request, reads beyond a length."""
    draw = cuda_draw(1)
    pool = Pool(record, page_states, 128, [16391, 5000, 700], 8, draw, "cuda")
    for num_rows in (0, 1, 2, 3, 5, 8, 17, 64, 127, 128, 129):
        for spread in (1, 9):  # rows of one request that follow each other: 9 makes whole groups of 8
            q, weights = queries(num_rows, record, draw)
            request = torch.arange(num_rows, device="cuda", dtype=torch.int32) // spread % 4 - 1
            if spread == 9:
                request = torch.where(request < 0, 0, request)
            most = int32([0, 16391, 5000, 700])[request.long() + 1]
            edge = int32(EDGES)[torch.arange(num_rows, device="cuda") * 7 % len(EDGES)]
            seen = torch.minimum(edge, torch.where(request < 0, edge, most))
            scores = index_scores(
                q, weights, pool.cache, pool.table, request, seen, 16391, record, page_states, "triton"
            )
            chosen, slots, _, faulty = run_select(q, weights, pool, request, seen)
            check_scores(scores, q, weights, pool, request, seen)
            check_selection(chosen, slots, scores, pool, request, seen)
            assert not faulty.any()


@pytest.mark.gpu
@needs_gpu
def test_a_row_has_the_same_bits_in_any_company() -> None:
    """Alone (decode kernel), in a group of its request (prefill kernel), in a mixed group."""
    draw = cuda_draw(2)
    pool = Pool("mxfp4_68", 64, 128, [5003, 3000], 8, draw, "cuda")
    q, weights = queries(40, "mxfp4_68", draw)
    seen = torch.full((40,), 2999, dtype=torch.int32, device="cuda")

    def scored(rows: slice, request: Tensor) -> Tensor:
        args = (q[rows], weights[rows], pool.cache, pool.table, request, seen[rows])
        return index_scores(*args, 2999, "mxfp4_68", 64, "triton")

    together = scored(slice(0, 40), int32([0] * 40))
    mixed = scored(slice(0, 40), int32([0, 0, 1, 0] * 10))
    for row in (0, 9, 39):
        assert torch.equal(scored(slice(row, row + 1), int32([0]))[0], together[row])
        assert torch.equal(mixed[row], together[row])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("num_rows", "states"), [(3, 131072), (1, 1 << 20), (20, 131072)])
def test_long_rows(num_rows: int, states: int) -> None:
    """Long rows, several CTAs a row, lengths from device memory; twenty selections alike."""
    draw = cuda_draw(3)
    pool = Pool("mxfp4_68", 64, 128, [states], 8, draw, "cuda")
    q, weights = queries(num_rows, "mxfp4_68", draw)
    request = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    seen = int32([states, states - 37, 513] * 7)[:num_rows]
    scores = index_scores(q, weights, pool.cache, pool.table, request, seen, states, "mxfp4_68", 64, "triton")
    first = run_select(q, weights, pool, request, seen, num_blocks=2048)
    check_scores(scores[:3], q[:3], weights[:3], pool, request, seen)
    check_selection(*first[:2], scores, pool, request, seen)
    assert torch.equal(first[2], reference.candidate_blocks(scores, seen, 2048, 8))
    for _ in range(20):
        again = run_select(q, weights, pool, request, seen, num_blocks=2048)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("columns", [512, 4096, 32768, 131072, 1 << 20])
def test_top_k_is_a_stable_sort(columns: int) -> None:
    draw = cuda_draw(4)
    for scores in hard_scores(6, columns, draw, "cuda"):
        lengths = int32([columns, columns - 37, 513, 512, 100, 0]).clamp(max=columns)
        scores = torch.where(torch.arange(columns, device="cuda") < lengths.unsqueeze(1), scores, torch.nan)
        assert torch.equal(top_k(scores, lengths, 512, "triton"), reference.top_k(scores, lengths, 512))
        ours = candidate_blocks(scores, lengths, 2048, 8, "triton")
        assert torch.equal(ours, reference.candidate_blocks(scores, lengths, 2048, 8))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("num_rows", [3, 40])
def test_candidates_bound_what_is_read(num_rows: int) -> None:
    """Publish, then choose inside: as masking the dense scores would; and after every key outside the listed
    blocks has become NaN, the same answer, bit for bit, and no fault."""
    draw = cuda_draw(5)
    states = 40003
    pool = Pool("mxfp4_68", 64, 128, [states], 8, draw, "cuda")
    q, weights = queries(num_rows, "mxfp4_68", draw)
    request, seen = int32([0] * num_rows), int32([states, 20000, 16384, 513, 3, 0] * 7)[:num_rows]
    scores = index_scores(q, weights, pool.cache, pool.table, request, seen, states, "mxfp4_68", 64, "triton")
    blocks = run_select(q, weights, pool, request, seen, num_blocks=2048)[2]
    assert torch.equal(blocks, reference.candidate_blocks(scores, seen, 2048, 8))
    chosen, slots, _, faulty = run_select(q, weights, pool, request, seen, blocks)
    inside = torch.stack([reference._inside(b[None], states, 8)[0] for b in blocks])
    visible = torch.arange(states, device="cuda") < seen.unsqueeze(1)
    assert torch.equal(chosen, reference._choose(scores, inside & visible, 512))
    assert not faulty.any()
    if num_rows > 8:
        return
    for row in range(num_rows):
        poisoned = pool.cache.clone()
        slot = torch.arange(states, device="cuda")[~inside[row]]
        page = pool.table[0].long()[slot // 64]
        for group in range(4):
            poisoned[page, 4096 + slot % 64 * 4 + group] = NAN_BYTE
        one = slice(row, row + 1)
        again = select(
            q[one], weights[one], poisoned, pool.table, request[one], seen[one], blocks[one], 512, 0, 8,
            "mxfp4_68", 64, True, "triton",
        )  # fmt: skip
        assert torch.equal(again[0], chosen[one])
        assert torch.equal(again[1], slots[one])
        assert not again[3].any()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("states", [300, 3000, 30000, 100000])
def test_nan_is_reported_and_never_chosen(states: int) -> None:
    draw = cuda_draw(6)
    pool = Pool("mxfp4_68", 64, 128, [states, states], 0, draw, "cuda")
    q, weights = queries(4, "mxfp4_68", draw)
    sick = states - 5
    pool.cache[pool.table[0, sick // 64].long(), 4096 + sick % 64 * 4] = NAN_BYTE
    request, seen = int32([0, 1, 0, -1]), int32([states, states, sick, 7])
    scores = index_scores(q, weights, pool.cache, pool.table, request, seen, states, "mxfp4_68", 64, "triton")
    chosen, slots, _, faulty = run_select(q, weights, pool, request, seen)
    assert faulty.tolist() == [True, False, False, False]
    assert scores[0].isnan().nonzero().flatten().tolist() == [sick]
    assert not (chosen[0] == sick).any()
    check_selection(chosen, slots, scores, pool, request, seen)


@pytest.mark.gpu
@needs_gpu
def test_equal_scores_keep_the_smallest_indices() -> None:
    draw = cuda_draw(7)
    for states in (511, 512, 513, 1024, 5120, 40000):
        keys = torch.ones(states, 128, device="cuda")
        pool = Pool("mxfp4_68", 64, 128, [states], 0, draw, "cuda", keys=keys)
        q, weights = queries(2, "mxfp4_68", draw)
        answers = {
            str(run_select(q, weights, pool, int32([0, 0]), int32([states] * 2))[0].tolist())
            for _ in range(20)
        }
        expected = [*range(min(states, 512))] + [-1] * (512 - states)
        assert answers == {str([expected] * 2)}


@pytest.mark.gpu
@needs_gpu
def test_the_last_page_of_a_pool_over_two_gib() -> None:
    """The only page with a score above zero is the pool's last. Catches 32-bit addresses."""
    pages = (1 << 31) // 4352 + 1000
    cache = torch.full((pages, 4352), NAN_BYTE, dtype=torch.uint8, device="cuda")
    table = int32([5, pages - 1, 9])[None]
    good = torch.zeros(192, 128, device="cuda")
    good[64:128] = 1
    slots = (table[0].long().repeat_interleave(64) * 64) + torch.arange(192, device="cuda") % 64
    records.write_slots("mxfp4_68", cache, slots, good.bfloat16(), 64, 0)
    for num_rows in (1, 24):
        q = torch.ones(num_rows, 32, 128, device="cuda", dtype=torch.bfloat16)
        weights = torch.ones(num_rows, 32, device="cuda", dtype=torch.bfloat16)
        for listed in (0, 24):
            blocks = torch.arange(listed, dtype=torch.int32, device="cuda").repeat(num_rows, 1)
            chosen, slots, _, faulty = select(
                q, weights, cache, table, int32([0] * num_rows), int32([192] * num_rows), blocks, 16, 0, 8,
                "mxfp4_68", 64, False, "triton",
            )  # fmt: skip
            assert chosen.tolist() == [[*range(64, 80)]] * num_rows
            assert slots[0].tolist() == [(pages - 1) * 64 + i for i in range(16)]
            assert not faulty.any()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("num_rows", [1, 24])
def test_capture_and_replay_with_other_lengths(num_rows: int) -> None:
    """One graph, every length from nothing to all: as the eager call. Publishes and consumes candidates."""
    draw = cuda_draw(8)
    states = 60000
    pool = Pool("mxfp4_68", 64, 128, [states], 0, draw, "cuda")
    q, weights = queries(num_rows, "mxfp4_68", draw)
    request, seen = int32([0] * num_rows), int32([states] * num_rows)

    def step() -> list[Tensor]:
        first = run_select(q, weights, pool, request, seen, num_blocks=2048)
        return [*first, *run_select(q, weights, pool, request, seen, first[2])]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for number in (0, 1, 512, 513, 4096, 16385, states - 1, states, 7):
        seen.fill_(number)
        graph.replay()
        replayed = [x.clone() for x in captured]
        assert all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True)), number


@pytest.mark.gpu
@needs_gpu
def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 rows against one tile of all."""
    draw = cuda_draw(9)
    pool = Pool("mxfp4_68", 64, 128, [9000, 5000], 0, draw, "cuda")
    q, weights = queries(61, "mxfp4_68", draw)
    request, seen = int32([0] * 30 + [1] * 31), int32(list(range(4000, 4061)))
    whole = run_select(q, weights, pool, request, seen, num_blocks=512)
    monkeypatch.setattr(kernels, "SCORE_BYTES", 8 * 4 * 9200)
    parts = run_select(q, weights, pool, request, seen, num_blocks=512)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


# -- variants of the scores -------------------------------------------------------------------------------


def variant_scores(
    variant: str, q: Tensor, weights: Tensor, pool: Pool, request: Tensor, seen: Tensor, width: int
) -> Tensor:
    """As `index_scores`, from memory that was NaN."""
    scores = torch.full((len(q), -(-width // 64) * 64), torch.nan, device=q.device)
    rows = kernels.Rows(request, seen, pool.table, pool.page_states)
    kernels.score(q, weights, pool.cache, rows, rows.num_states, None, scores, pool.record, 0, variant)
    live = torch.where(request < 0, 0, seen).unsqueeze(1)
    hidden = torch.arange(scores.shape[1], device=q.device) >= live
    return scores.masked_fill(hidden, -torch.inf)[:, :width]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("page_states", [64, 32])
@pytest.mark.parametrize("spread", [0, 3, 9])
@pytest.mark.parametrize("variant", list(kernels.VARIANTS))
def test_variant_scores(variant: str, spread: int, page_states: int) -> None:
    """Keys and queries whose groups lie up to `spread` octaves apart, zero states and zero groups; rows
    alone and in groups of a request, every edge of the lengths."""
    draw = cuda_draw(10)
    counts = [16391, 5000, 700]

    def scaled(*shape: int) -> Tensor:
        octaves = torch.randint(
            0, spread + 1, (*shape[:-1], shape[-1] // 32, 1), generator=draw, device="cuda"
        )
        x = torch.randn(*shape, generator=draw, device="cuda").unflatten(-1, (-1, 32)) * 2.0**octaves
        return x.flatten(-2)

    keys = scaled(max(counts), 128)
    keys[3], keys[5, :32] = 0, 0
    pool = Pool("mxfp4_68", page_states, 128, counts, 8, draw, "cuda", keys=keys)
    for num_rows in (1, 2, 3, 8, 16) if variant == "e4m3" else (1, 2, 3, 8, 17, 64, 129):
        q = records.round_trip(scaled(num_rows, 32, 128).bfloat16(), "mxfp4_32")
        weights = torch.randn(num_rows, 32, generator=draw, device="cuda").bfloat16()
        for own in (1, 9):
            request = torch.arange(num_rows, device="cuda", dtype=torch.int32) // own % 4 - 1
            request = request if own == 1 else request.clamp(min=0)
            edge = int32(EDGES)[torch.arange(num_rows, device="cuda") * 7 % len(EDGES)]
            seen = torch.minimum(edge, int32([16391, *counts])[request.long() + 1])
            scores = variant_scores(variant, q, weights, pool, request, seen, 16391)
            check_scores(scores, q, weights, pool, request, seen, SCORE_ERROR)


@pytest.mark.gpu
@needs_gpu
def test_e4m3_rows_have_the_same_bits_in_any_company() -> None:
    """Alone and beside others; a NaN key and a NaN query stay where they are; a captured graph replays at
    other lengths."""
    draw = cuda_draw(11)
    pool = Pool("mxfp4_68", 64, 128, [5003, 3000], 8, draw, "cuda")
    q, weights = queries(16, "mxfp4_68", draw)
    pool.cache[pool.table[0, 20].long(), 4096 + 5 * 4 + 2] = NAN_BYTE
    q[9, 3, 70] = torch.nan
    seen = torch.full((16,), 2999, dtype=torch.int32, device="cuda")

    def scored(rows: slice) -> Tensor:
        request = int32([0] * 16)[rows]
        return variant_scores("e4m3", q[rows], weights[rows], pool, request, seen[rows], 2999)

    together = scored(slice(0, 16))
    sick = torch.zeros(16, 2999, dtype=torch.bool, device="cuda")
    sick[:, 20 * 64 + 5], sick[9] = True, True
    assert torch.equal(together.isnan(), sick)
    for row in (0, 9, 15):
        alone = scored(slice(row, row + 1))[0]
        assert torch.equal(alone.nan_to_num(nan=7e7), together[row].nan_to_num(nan=7e7))
    request, scores = int32([0] * 16), torch.zeros(16, 3008, device="cuda")
    rows = kernels.Rows(request, seen, pool.table, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.score(q, weights, pool.cache, rows, rows.num_states, None, scores, "mxfp4_68", 0, "e4m3")
    for number in (0, 1, 65, 2999, 1500):
        seen.fill_(number)
        graph.replay()
        assert torch.equal(scores[:, :number].nan_to_num(nan=7e7), together[:, :number].nan_to_num(nan=7e7))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_few_very_long_rows(num_rows: int) -> None:
    """What `select` takes without `deterministic`, and with it: each chooses exactly by its own scores."""
    states = 1 << 20
    draw = cuda_draw(12)
    pool = Pool("mxfp4_68", 64, 128, [states], 8, draw, "cuda")
    q, weights = queries(num_rows, "mxfp4_68", draw)
    request, seen = int32([0] * num_rows), int32([states, states - 37, 513])[:num_rows]
    for variant in kernels.VARIANTS:
        scores = variant_scores(variant, q, weights, pool, request, seen, states)
        check_scores(scores, q, weights, pool, request, seen, SCORE_ERROR)
        chosen, slots, blocks, _ = run_select(
            q, weights, pool, request, seen, num_blocks=2048, deterministic=variant == "bf16"
        )
        check_selection(chosen, slots, scores, pool, request, seen)
        assert torch.equal(blocks, reference.candidate_blocks(scores, seen, 2048, 8))


@pytest.mark.gpu
@needs_gpu
def test_e4m3_in_candidates() -> None:
    """Listed states only, found one by one."""
    draw = cuda_draw(13)
    states, blocks = 40003, 2048
    pool = Pool("mxfp4_68", 64, 128, [states], 8, draw, "cuda")
    for num_rows in (1, 16):
        q, weights = queries(num_rows, "mxfp4_68", draw)
        listed = torch.rand(num_rows, states // 8, generator=draw, device="cuda").argsort(1)[:, :blocks]
        listed = listed.sort(1).values.to(torch.int32)
        lengths = int32([blocks * 8, 70, 1, 0] * 5)[:num_rows]
        rows = kernels.Rows(int32([0] * num_rows), int32([states] * num_rows), pool.table, 64)
        scores = torch.full((num_rows, blocks * 8), torch.nan, device="cuda")
        kernels.score(q, weights, pool.cache, rows, lengths, listed, scores, "mxfp4_68", 8, "e4m3")
        state = (listed.long().unsqueeze(2) * 8 + torch.arange(8, device="cuda")).flatten(1)
        keys = pool.keys(0, states).double()
        for row in range(min(num_rows, 4)):
            number = int(lengths[row])
            dots = (q[row].double() @ keys[state[row, :number]].mT).relu()
            truth, norm = weights[row].double() @ dots, (weights[row].double().abs() @ dots).norm()
            assert (scores[row, :number] - truth).norm() <= SCORE_ERROR * norm
