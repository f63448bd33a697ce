"""The Triton compression kernels against the reference, and the order of reads and writes of open groups.

Open groups are copies and must be equal byte for byte. A latent goes through exp and a sum of d squares,
whose last fp32 bits differ between the kernel and torch: a value on a bf16 tie may round the other way.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from interpreted import (  # noqa: F401
    DEVICE,
    GPU,
    INTERPRETED,
    gpu,
    interpreted,
    normal,
    repair_the_interpreter,
    run_interpreted,
)
from torch import Tensor

from dsv41.hardware import Hardware
from dsv41.ops.compression.op import compress

EPS, OPEN_ROWS = 1e-20, 8


@pytest.mark.skipif(INTERPRETED or GPU, reason="this process runs the kernels itself")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def rows_of(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


Piece = tuple[int, int, int]  # request, first position, rows


def step(pieces: list[Piece], dim: int, seed: int, kept: int = 1, padding: int = 0) -> dict[str, Tensor]:
    """The arguments of one step of these pieces, its rows in random order, the projection cut from a wider
    one. Each piece keeps what is even of its last `kept` rows."""
    rows = [(request, p) for request, start, count in pieces for p in range(start, start + count)]
    rows += [(-1, 0)] * padding
    random.Random(seed).shuffle(rows)
    number = {row: index for index, row in enumerate(rows)}
    last = {request: start + count - 1 for request, start, count in pieces}

    def slot(request: int, p: int) -> int:
        return request * OPEN_ROWS + p % OPEN_ROWS

    partners = [number.get((request, p - 1), -1) if request >= 0 else -1 for request, p in rows]
    wide = normal((len(rows), 2 * dim + 48), seed) * 2
    wide[:, 2 * dim :] = torch.nan
    return {
        "kv_gate": wide[:, : 2 * dim],
        "positions": rows_of([p for _, p in rows]),
        "partner_row": rows_of(partners),
        "partner_slot": rows_of(
            [
                slot(request, p - 1) if request >= 0 and p % 2 == 1 and mate < 0 else -1
                for (request, p), mate in zip(rows, partners, strict=True)
            ]
        ),
        "open_slot": rows_of(
            [
                slot(request, p) if request >= 0 and p % 2 == 0 and p > last[request] - kept else -1
                for request, p in rows
            ]
        ),
    }


def run(
    inputs: dict[str, Tensor], open_groups: Tensor, impl: str, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    dim = inputs["kv_gate"].shape[1] // 2
    norm = torch.linspace(0.5, 1.5, dim, device=DEVICE).to(dtype)
    return compress(*inputs.values(), norm, open_groups, 2, EPS, dtype, impl)


def assert_latents(found: Tensor, expected: Tensor) -> None:
    """bf16: at most one value in a thousand is off, by one or two steps: a pooled value on a tie moves by
    one, and its row's norm may move a last bit. Where kv cancels, the error is one of the sum's terms."""
    bf16 = found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2**-6 if bf16 else 2e-6, atol=1e-5 if bf16 else 2e-6)
    assert torch.equal(found.any(1), expected.any(1)), "a row that closes nothing has a latent of zeros"
    wrong = (found != expected).sum().item()
    assert not bf16 or wrong <= max(2, found.numel() / 1000), f"{wrong} of {found.numel()} values differ"


def check(
    pieces: list[Piece], dim: int, seed: int, dtype: torch.dtype = torch.bfloat16, **choices: int
) -> None:
    inputs = step(pieces, dim, seed, **choices)
    num_slots = OPEN_ROWS * (1 + max((request for request, _, _ in pieces), default=0))
    kernel = torch.full((num_slots, 2 * dim), torch.nan, device=DEVICE)
    read = inputs["partner_slot"][inputs["partner_slot"] >= 0]
    kernel[read] = normal((len(read), 2 * dim), seed + 1)  # what no row may read stays NaN
    reference = kernel.clone()
    found = run(inputs, kernel, "triton", dtype)
    assert_latents(found, run(inputs, reference, "reference", dtype))
    assert torch.equal(kernel.view(torch.int32), reference.view(torch.int32))


def random_pieces(num_requests: int, seed: int, longest: int) -> list[Piece]:
    draw = random.Random(seed)
    return [(r, draw.randint(0, 40), draw.randint(1, longest)) for r in range(num_requests)]


# -- interpreter ----------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("start", range(3))
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 10])
def test_interpreted_chunks(start: int, count: int, dtype: torch.dtype) -> None:
    """Eight or nine rows from an odd position read and write one slot."""
    check([(0, start, count), (2, 5, 9)], dim=32, seed=count, dtype=dtype, padding=2)


@interpreted
@pytest.mark.parametrize("dim", [16, 96, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_interpreted_ratio_1(dim: int, dtype: torch.dtype) -> None:
    check_ratio_1(5, dim, dtype)


@interpreted
def test_interpreted_readers_of_one_slot() -> None:
    check_readers_of_one_slot(20)


@interpreted
def test_without_the_scan_a_writer_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: programs that do not look for each other run in row order, and the writer's row may
    be the first. The same step passes with the scan."""
    from dsv41.ops.compression import triton

    pieces = [(request, 1, OPEN_ROWS) for request in range(8)]
    check(pieces, dim=32, seed=3)
    kernel = triton._pooled_pairs

    class Blind:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, **options: kernel[grid](*args[:10], 0, *args[11:], **options)

    monkeypatch.setattr(triton, "_pooled_pairs", Blind())
    with pytest.raises(AssertionError):
        check(pieces, dim=32, seed=3)


# -- compiled -------------------------------------------------------------------------------------------


ROWS = (0, 1, 2, 3, 5, 8, 17, 64, 127, 128, 129, 1000, 4096, 8192)


@pytest.mark.parametrize("num_rows", [pytest.param(t, marks=gpu) for t in ROWS])
@pytest.mark.parametrize("start", [0, 1])
def test_one_request(num_rows: int, start: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check([(1, start, num_rows)] if num_rows else [], dim=512, seed=num_rows, dtype=dtype)


@pytest.mark.parametrize("kept", [1, OPEN_ROWS])
@pytest.mark.parametrize("seed", [pytest.param(s, marks=gpu) for s in range(12)])
def test_many_requests(seed: int, kept: int) -> None:
    """128 requests in chunks of their own, rows shuffled, padding between; many reuse the slot they read."""
    check(random_pieces(128, seed, longest=(1, 2, 9, 40)[seed % 4]), dim=512, seed=seed, kept=kept, padding=7)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=gpu) for s in range(40)])
def test_every_request_writes_the_slot_it_reads(seed: int) -> None:
    """Rows p = 1..8k: the first reads slot 0, the last is kept there. A race would pool a row with itself."""
    check([(r, 1, OPEN_ROWS * (1 + (r + seed) % 8)) for r in range(256)], dim=512, seed=seed)


@pytest.mark.parametrize("dim", [pytest.param(d, marks=gpu) for d in (16, 96, 512)])
def test_the_same_chunk_after_chunk(dim: int) -> None:
    """A request in chunks of any length gives the latents of the whole, bit for bit."""
    length = 97
    tokens = normal((length, 2 * dim), 1)
    whole = step([(0, 0, length)], dim, seed=2)
    whole["kv_gate"] = tokens[whole["positions"]]
    expected = dict(zip(whole["positions"].tolist(), run(whole, spare(dim), "triton"), strict=True))
    for chunks in ([1] * length, [9, 8, 16, 64], [2, 95], [1, 96], [33, 31, 33], [5] * 19 + [2]):
        open_groups, done = spare(dim), 0
        for count in chunks:
            inputs = step([(0, done, count)], dim, seed=count)
            inputs["kv_gate"] = tokens[inputs["positions"]]
            for p, row in zip(inputs["positions"].tolist(), run(inputs, open_groups, "triton"), strict=True):
                assert torch.equal(row, expected[p]), (chunks, p)
            done += count
        assert done == length


def spare(dim: int) -> Tensor:
    return torch.full((OPEN_ROWS, 2 * dim), torch.nan, device=DEVICE)


@pytest.mark.parametrize("num_rows", [pytest.param(t, marks=gpu) for t in (20, 3000)])
def test_readers_of_one_slot(num_rows: int) -> None:
    check_readers_of_one_slot(num_rows)


def check_readers_of_one_slot(num_rows: int) -> None:
    """No runner asks for it, but the order holds: every odd row reads slot 3, which row 4 writes, and which
    row 9 names without reading it."""
    inputs = step([], 32, seed=1, padding=num_rows)
    inputs["positions"] = torch.arange(num_rows, device=DEVICE)
    inputs["partner_slot"] = torch.where(inputs["positions"] % 2 == 1, 3, -1)
    inputs["partner_row"][9] = 0
    inputs["open_slot"][4] = 3
    kernel = normal((OPEN_ROWS, 64), 2)
    reference = kernel.clone()
    assert_latents(run(inputs, kernel, "triton"), run(inputs, reference, "reference"))
    assert torch.equal(kernel, reference)


@pytest.mark.parametrize("num_rows", [pytest.param(t, marks=gpu) for t in ROWS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ratio_1(num_rows: int, dtype: torch.dtype) -> None:
    check_ratio_1(num_rows, 512, dtype)


def check_ratio_1(num_rows: int, dim: int, dtype: torch.dtype) -> None:
    """Integers: the sum of squares is exact, and so is the latent equal."""
    draw = torch.Generator(DEVICE).manual_seed(num_rows)
    wide = torch.randint(-31, 32, (num_rows, dim + 13), generator=draw, device=DEVICE).float()
    none, norm = rows_of([-1] * num_rows), torch.linspace(0.5, 1.5, dim, device=DEVICE).to(dtype)
    found, expected = (
        compress(
            wide[:, 5 : dim + 5], none, none, none, none, norm, wide.new_empty(0, 0), 1, EPS, dtype, impl
        )
        for impl in ("triton", "reference")
    )
    if dim & (dim - 1):  # the mean is then rounded, by another division
        torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=gpu) for s in range(2)])
def test_a_row_does_not_depend_on_its_batch(seed: int) -> None:
    pieces = random_pieces(32, seed, 12)
    together = torch.full((32 * OPEN_ROWS, 1024), torch.nan, device=DEVICE)
    inputs = step(pieces, 512, seed)
    read = inputs["partner_slot"].clamp(min=0)
    together[read] = normal((len(read), 1024), seed)
    alone = together.clone()
    latent = run(inputs, together, "triton")
    number = torch.arange(len(latent), device=DEVICE)
    request = torch.empty_like(number)  # recovered from the slots and partners of `step`'s rows
    order = [(r, p) for r, start, count in pieces for p in range(start, start + count)]
    random.Random(seed).shuffle(order)
    request.copy_(rows_of([r for r, _ in order]))
    for r, _, _ in pieces:
        rows = (request == r).nonzero().flatten()
        part = {name: value[rows] for name, value in inputs.items()}
        place = torch.full_like(number, -1)
        place[rows] = torch.arange(len(rows), device=DEVICE)
        part["partner_row"] = torch.where(
            part["partner_row"] >= 0, place[part["partner_row"].clamp(min=0)], -1
        )
        assert torch.equal(run(part, alone, "triton"), latent[rows])
    assert torch.equal(together.view(torch.int32), alone.view(torch.int32))


@pytest.mark.parametrize("seed", [pytest.param(0, marks=gpu)])
def test_captured(seed: int) -> None:
    """A graph recorded with padding rows only is replayed with live ones."""
    live = step([(r, 1, OPEN_ROWS + r) for r in range(4)], 512, seed)
    inputs = {name: value.clone() for name, value in live.items()}
    for name in ("partner_row", "partner_slot", "open_slot"):
        inputs[name].fill_(-1)
    kernel = normal((4 * OPEN_ROWS, 1024), 1)
    reference, before = kernel.clone(), kernel.clone()
    run(inputs, kernel, "triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        latent = run(inputs, kernel, "triton")
    graph.replay()
    assert not latent.any()
    assert torch.equal(kernel, before)
    for name, value in live.items():
        inputs[name].copy_(value)
    graph.replay()
    assert_latents(latent, run(live, reference, "reference"))
    assert torch.equal(kernel, reference)


@interpreted
def test_why_not() -> None:
    from dsv41.ops.compression import triton

    assert triton.why_not(Hardware("cuda", 80, "A100", 0), None) is None
    assert "SM80" in triton.why_not(Hardware("cpu", 0, "CPU", 0), None)
