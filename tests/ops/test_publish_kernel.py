"""The Triton publishing kernels against ops/records.py and the reference: the whole cache, byte for byte.

On a CPU the kernels run in Triton's interpreter, at small sizes, in a process of its own (the choice is made
when Triton is imported). `gpu` tests run them compiled. The kernel always runs before the reference.

Rows with "exact" values have sums of squares that fp32 holds in any order: there the norm cannot differ, and
every byte must be equal. On free values the order of that sum moves the last fp32 bit of about every second
row, and a value that happens to lie on a bf16 tie moves with it: 512 / 2^16 of rows for bf16, 16 times fewer
for e4m3.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreted import (  # noqa: F401
    DEVICE,
    GPU,
    INTERPRETED,
    generator,
    gpu,
    interpreted,
    repair_the_interpreter,
    run_interpreted,
)
from torch import Tensor

from dsv41.hardware import Hardware
from dsv41.ops import records
from dsv41.ops.publish.op import publish_index_k, publish_states, publish_window

ROPE, EPS = 64, 1e-20
WINDOW = ("scaled_528", "scaled_528_split", "mixed_584", "rows_bf16")
STATES = ("nvfp4_288", "nvfp4_288_split", "mixed_584", "rows_bf16")
INDEX_K = ("mxfp4_68", "fp8_132", "rows_bf16")
# op, record, width, whether plain rows take the release's round trip
CASES = [
    (op, record, dim, quantise)
    for op, dim, names in (("window", 512, WINDOW), ("states", 512, STATES), ("index_k", 128, INDEX_K))
    for record in names
    for quantise in ((False, True) if record == "rows_bf16" else (True,))
]
PAGE_STATES = 32


@pytest.mark.skipif(INTERPRETED or GPU, reason="this process runs the kernels itself")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


# -- inputs ---------------------------------------------------------------------------------------------


def free_values(shape: tuple[int, ...], seed: int) -> Tensor:
    """bf16 values whose rows and blocks differ by octaves."""
    draw = generator(seed)
    values = torch.randn(shape, generator=draw, device=DEVICE)
    octaves = torch.randn((*shape[:-1], shape[-1] // 16), generator=draw, device=DEVICE) * 3
    return (values * torch.exp2(octaves).repeat_interleave(16, -1)).bfloat16()


def exact_values(shape: tuple[int, ...], seed: int) -> Tensor:
    """Small integers times a power of two for the row: fp32 sums their squares without rounding."""
    draw = generator(seed)
    values = torch.randint(-31, 32, shape, generator=draw, device=DEVICE).float()
    values *= torch.randint(
        0, 2, (*shape[:-1], shape[-1] // 16), generator=draw, device=DEVICE
    ).repeat_interleave(16, -1)
    octaves = torch.randint(-20, 20, (*shape[:-1], 1), generator=draw, device=DEVICE)
    return (values * torch.exp2(octaves.float())).bfloat16()


def angles(num_rows: int, seed: int) -> Tensor:
    turn = torch.rand((num_rows, ROPE // 2), generator=generator(seed), device=DEVICE) * 6.2831853
    return torch.cat((turn.cos(), turn.sin()), dim=1)


def some_slots(num_rows: int, seed: int) -> tuple[Tensor, int]:
    """Distinct slots in any order, a quarter of them negative in many ways; and the pages they need."""
    draw = generator(seed)
    num_pages = 2 + num_rows // PAGE_STATES * 2
    slots = torch.randperm(num_pages * PAGE_STATES, generator=draw, device=DEVICE)[:num_rows]
    dead = torch.rand(num_rows, generator=draw, device=DEVICE) < 0.25
    hostile = torch.tensor([-1, -2, -PAGE_STATES, -(2**40), -(2**63)], device=DEVICE)
    kind = torch.randint(0, len(hostile), (num_rows,), generator=draw, device=DEVICE)
    return torch.where(dead, hostile[kind], slots), num_pages


def poisoned_cache(record: str, num_pages: int, dim: int, extra: int = 64, seed: int = 0) -> Tensor:
    """Pages of random bytes, NaN among them, `extra` bytes (values of plain rows) apart."""
    row_dtype = records.get_record(record).row_dtype
    payload = records.page_bytes(record, PAGE_STATES, dim, ROPE)
    if row_dtype is None:
        return torch.randint(
            0, 256, (num_pages, payload + extra), dtype=torch.uint8, generator=generator(seed), device=DEVICE
        )
    stride = PAGE_STATES * dim + extra
    slab = torch.full((num_pages, stride), torch.nan, dtype=row_dtype, device=DEVICE)
    return slab[:, : PAGE_STATES * dim].unflatten(1, (PAGE_STATES, dim))


def whole(cache: Tensor) -> Tensor:
    """Every byte between the first and the last page, padding included."""
    size = (cache.shape[0] - 1) * cache.stride(0) + cache[0].numel()
    return cache.as_strided((size,), (1,)).view(torch.uint8)


def copy_of(cache: Tensor) -> Tensor:
    size = (cache.shape[0] - 1) * cache.stride(0) + cache[0].numel()
    return cache.as_strided((size,), (1,)).clone().as_strided(cache.shape, cache.stride())


def publish(
    op: str, record: str, quantise: bool, x: Tensor, cos_sin: Tensor, slots: Tensor, cache: Tensor, impl: str,
    q: Tensor | None = None, pad_heads: int = 0,
) -> Tensor | None:  # fmt: skip
    weight = torch.linspace(0.5, 1.5, x.shape[-1], device=DEVICE).bfloat16()
    if op == "window":
        q = x.new_empty((x.shape[0], 0, x.shape[1])) if q is None else q
        fixed = (weight, cos_sin, slots, cache, record, PAGE_STATES, pad_heads, EPS, quantise)
        return publish_window(q, x, *fixed, impl)
    if op == "states":
        return publish_states(x, cos_sin, slots, cache, record, PAGE_STATES, quantise, impl)
    return publish_index_k(x, weight, cos_sin, slots, cache, record, PAGE_STATES, EPS, quantise, impl)


def assert_same_bytes(
    op: str, record: str, quantise: bool, x: Tensor, cos_sin: Tensor, slots: Tensor, cache: Tensor
) -> None:
    kernel, reference = cache, copy_of(cache)
    publish(op, record, quantise, x, cos_sin, slots, kernel, "triton")
    publish(op, record, quantise, x, cos_sin, slots, reference, "reference")
    wrong = (whole(kernel) != whole(reference)).nonzero().flatten()
    assert not len(wrong), f"{len(wrong)} bytes differ, first at {wrong[:4].tolist()}"


def hostile_inputs(
    values: Callable, num_rows: int, dim: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Rows apart from each other; NaN in everything that belongs to a row without a slot."""
    slots, num_pages = some_slots(num_rows, seed)
    wide = torch.full((num_rows, dim + 24), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    x = wide[:, 8 : dim + 8]
    x.copy_(torch.where(slots.unsqueeze(1) >= 0, values((num_rows, dim), seed), torch.nan))
    cos_sin = torch.where(slots.unsqueeze(1) >= 0, angles(num_rows, seed), torch.nan)
    return x, cos_sin, slots, num_pages


# -- interpreter ----------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize(("op", "record", "dim", "quantise"), CASES)
def test_interpreted_bytes(op: str, record: str, dim: int, quantise: bool, num_rows: int) -> None:
    values = free_values if op == "states" else exact_values
    x, cos_sin, slots, num_pages = hostile_inputs(values, num_rows, dim, seed=num_rows)
    assert_same_bytes(op, record, quantise, x, cos_sin, slots, poisoned_cache(record, num_pages, dim))


@interpreted
@pytest.mark.parametrize(("record", "dim"), [(r, 512) for r in STATES + WINDOW] + [(r, 128) for r in INDEX_K])
def test_interpreted_extremes(record: str, dim: int) -> None:
    check_extremes(record, dim)


@interpreted
@pytest.mark.parametrize(("num_heads", "pad_heads"), [(0, 0), (1, 0), (6, 0), (6, 9), (6, 4)])
def test_interpreted_queries(num_heads: int, pad_heads: int) -> None:
    check_queries(3, num_heads, 0, pad_heads)


# -- compiled -------------------------------------------------------------------------------------------


ROWS = (0, 1, 2, 3, 5, 8, 17, 64, 127, 128, 129, 1000, 4096)


@pytest.mark.parametrize("num_rows", [pytest.param(t, marks=gpu) for t in ROWS])
@pytest.mark.parametrize(("op", "record", "dim", "quantise"), CASES)
def test_bytes(op: str, record: str, dim: int, quantise: bool, num_rows: int) -> None:
    """Catches a wrong tie, floor, saturation, address, and a write to a padding row or a padding byte."""
    values = free_values if op == "states" else exact_values
    x, cos_sin, slots, num_pages = hostile_inputs(values, num_rows, dim, seed=num_rows)
    assert_same_bytes(op, record, quantise, x, cos_sin, slots, poisoned_cache(record, num_pages, dim))


@pytest.mark.parametrize("seed", [pytest.param(s, marks=gpu) for s in range(2)])
@pytest.mark.parametrize(("op", "record", "dim", "quantise"), [case for case in CASES if case[0] != "states"])
def test_free_values_differ_only_by_the_norm(
    op: str, record: str, dim: int, quantise: bool, seed: int
) -> None:
    num_rows = 16384
    slots = torch.arange(num_rows, device=DEVICE)
    x, cos_sin = free_values((num_rows, dim), seed), angles(num_rows, seed)
    kernel = poisoned_cache(record, num_rows // PAGE_STATES, dim)
    reference = copy_of(kernel)
    publish(op, record, quantise, x, cos_sin, slots, kernel, "triton")
    publish(op, record, quantise, x, cos_sin, slots, reference, "reference")
    a, b = (
        records.read_slots(record, cache, slots, PAGE_STATES, dim, ROPE, torch.float32)
        for cache in (kernel, reference)
    )
    share = (a == b).all(1).float().mean().item()
    print(f"{op} {record} {quantise}: {share:.5%} of rows equal")
    assert share >= (0.999 if records.get_record(record).quantises or quantise else 0.99)
    # What differs lies one code away: at most a third of a value in e2m1, never of another order.
    assert ((a - b).abs() <= 0.5 * torch.maximum(a.abs(), b.abs()) + 1e-30).all() or quantise


@pytest.mark.parametrize(
    ("record", "dim"),
    [pytest.param(r, d, marks=gpu) for names, d in ((STATES + WINDOW, 512), (INDEX_K, 128)) for r in names],
)
def test_extremes(record: str, dim: int) -> None:
    check_extremes(record, dim)


def check_extremes(record: str, dim: int) -> None:
    """One row per oddity, through `publish_states`, whose input is the value to store. Rows with NaN or
    infinity are compared as values, since a NaN code may have either sign; what is finite must be equal."""
    draw = generator(0)
    grid = torch.arange(-dim // 2, dim // 2, device=DEVICE).float()
    signs = torch.where(torch.arange(dim, device=DEVICE) % 3 > 0, 1.0, -1.0)
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], device=DEVICE)
    ties = steps.repeat(dim // 8) * signs
    e4m3_ties = (torch.randint(0, 64, (dim,), generator=draw, device=DEVICE).float() + 0.5) * signs
    e4m3_ties[::16] = 448.0
    rows = [
        torch.zeros(dim, device=DEVICE),
        -torch.zeros(dim, device=DEVICE),
        *(ties * 2.0**k for k in (-9, -8, -7, -1, 0, 3, 8, 100, 120)),
        *(e4m3_ties * 2.0**k for k in (-40, -9, 0, 5, 100)),
        grid * 2.0**-9, grid * 2.0**-16, grid * 2.0**-22, grid * 2.0**-126, grid * 2.0**-133,
        *(value * signs for value in (1e-4, 9.9e-5, 6 * 2.0**-9, 9.5 * 2.0**-9, 6 * 2.0**-126, 1e-40)),
        *(value * signs for value in (448.0, 449.0, 450.0, 2688.0, 2700.0, 3e38)),
        torch.exp2(grid.clamp(-126, 126)) * signs,
    ]  # fmt: skip
    spoiled = []
    for position in (0, 17, dim - ROPE - 1, dim - 1):
        for value in (torch.nan, torch.inf, -torch.inf):
            spoiled.append(torch.randn(dim, generator=draw, device=DEVICE))
            spoiled[-1][position] = value
    x = torch.stack(rows + spoiled).bfloat16()
    still = torch.cat((torch.ones(ROPE // 2), torch.zeros(ROPE // 2))).to(DEVICE)
    cos_sin = torch.where(torch.arange(len(x), device=DEVICE).unsqueeze(1) % 2 == 0, still, angles(len(x), 1))
    finite = torch.arange(len(x), device=DEVICE) < len(rows)
    pages_apart = -len(rows) % PAGE_STATES  # whole pages of finite rows, then pages of the others
    slots = torch.arange(len(x), device=DEVICE) + torch.where(finite, 0, pages_apart)
    for quantise in (False, True):
        found = poisoned_cache(record, 3 + len(x) // PAGE_STATES, dim)
        expected = copy_of(found)
        publish("states", record, quantise, x, cos_sin, slots, found, "triton")
        publish("states", record, quantise, x, cos_sin, slots, expected, "reference")
        a, b = (
            records.read_slots(record, pages, slots, PAGE_STATES, dim, ROPE, torch.float32)
            for pages in (found, expected)
        )
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert not a[finite].isnan().any()
        same = whole(found) == whole(expected)
        exact = (len(rows) + pages_apart) // PAGE_STATES * found.stride(0) * found.element_size()
        assert same[:exact].all(), f"byte {same[:exact].logical_not().nonzero()[0].item()} differs"


QUERIES = [(t, h) for t in (0, 1, 2, 5, 64, 129) for h in (1, 8, 16, 32, 64)] + [
    (1000, 64),
    (4096, 16),
    (17, 5),
]


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("num_rows", "num_heads"), [pytest.param(*shape, marks=gpu) for shape in QUERIES])
@pytest.mark.parametrize("pad_heads", [0, 64])
def test_queries(num_rows: int, num_heads: int, offset: int, pad_heads: int) -> None:
    check_queries(num_rows, num_heads, offset, pad_heads)


def check_queries(num_rows: int, num_heads: int, offset: int, pad_heads: int) -> None:
    """q is cut from a wider projection: row-strided, and not aligned where the offset is odd."""
    dim = 512
    wide = free_values((num_rows, num_heads * dim + 16 * (1 + num_heads)), 3)
    q = wide[:, offset : offset + num_heads * dim].unflatten(1, (num_heads, dim))
    slots, num_pages = some_slots(num_rows, 4)
    x, cos_sin = exact_values((num_rows, dim), 5), angles(num_rows, 6)
    kernel = poisoned_cache("scaled_528", num_pages, dim)
    reference, before = copy_of(kernel), q.clone()
    found = publish("window", "scaled_528", True, x, cos_sin, slots, kernel, "triton", q, pad_heads)
    expected = publish("window", "scaled_528", True, x, cos_sin, slots, reference, "reference", q, pad_heads)
    assert found.is_contiguous() or not found.numel()
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(q, before)
    assert torch.equal(whole(kernel), whole(reference))


@pytest.mark.parametrize("extra", [pytest.param(e, marks=gpu) for e in (0, 2, 14, 64)])
@pytest.mark.parametrize(("op", "record", "dim", "quantise"), CASES)
def test_pages_of_any_stride(op: str, record: str, dim: int, quantise: bool, extra: int) -> None:
    """Also rows of x that start at odd addresses. Catches a wide access that assumes alignment."""
    slots, num_pages = some_slots(129, extra)
    x = exact_values((129, dim + 1 + 15), 1)
    x[:, dim + 1 :] = torch.nan
    cache = poisoned_cache(record, num_pages, dim, extra=extra)
    assert_same_bytes(op, record, quantise, x[:, 1 : dim + 1], angles(129, 2), slots, cache)


@pytest.mark.parametrize(
    ("op", "record", "dim", "quantise"), [pytest.param(*case, marks=gpu) for case in CASES]
)
def test_the_last_page_of_a_large_pool(op: str, record: str, dim: int, quantise: bool) -> None:
    """Addresses past 2^31 bytes, for plain rows past 2^31 values. Catches 32-bit address arithmetic."""
    small = poisoned_cache(record, 2, dim, extra=0)
    size, stride = whole(small).numel() // small.element_size() // 2, 2**20 + 64
    slab = torch.zeros(2**31 + 4 * stride, dtype=small.dtype, device=DEVICE)
    num_pages = slab.numel() // stride
    pool = slab.as_strided((num_pages, *small.shape[1:]), (stride, *small.stride()[1:]))
    x, cos_sin = exact_values((2 * PAGE_STATES, dim), 1), angles(2 * PAGE_STATES, 2)
    slots = torch.arange(2 * PAGE_STATES, device=DEVICE)
    pool[-2:].copy_(small)
    publish(op, record, quantise, x, cos_sin, slots + (num_pages - 2) * PAGE_STATES, pool, "triton")
    publish(op, record, quantise, x, cos_sin, slots, small, "reference")
    assert torch.equal(pool[-2:].reshape(-1).view(torch.uint8), whole(small))
    assert (num_pages - 1) * stride > 2**31 > size
    assert (
        not slab[: (num_pages - 2) * stride]
        .view(torch.int16 if small.dtype == torch.bfloat16 else small.dtype)
        .any()
    )


@pytest.mark.parametrize(
    ("op", "record", "dim", "quantise"), [pytest.param(*case, marks=gpu) for case in CASES]
)
def test_a_row_does_not_depend_on_its_batch(op: str, record: str, dim: int, quantise: bool) -> None:
    x, cos_sin = free_values((128, dim), 1), angles(128, 2)
    q = free_values((128, 64, dim), 3)
    slots = torch.arange(128, device=DEVICE)
    together = poisoned_cache(record, 4, dim)
    alone = copy_of(together)
    turned = publish(op, record, quantise, x, cos_sin, slots, together, "triton", q)
    for row in range(128):
        one = slice(row, row + 1)
        single = publish(op, record, quantise, x[one], cos_sin[one], slots[one], alone, "triton", q[one])
        assert turned is None or torch.equal(turned[one], single)
    assert torch.equal(whole(together), whole(alone))


@pytest.mark.parametrize(
    ("op", "record", "dim", "quantise"), [pytest.param(*case, marks=gpu) for case in CASES]
)
def test_captured(op: str, record: str, dim: int, quantise: bool) -> None:
    """A graph recorded with padding rows only is replayed with live ones."""
    live, num_pages = some_slots(64, 1)
    x, cos_sin, slots = (
        torch.zeros((64, dim), dtype=torch.bfloat16, device=DEVICE),
        angles(64, 2),
        live * 0 - 1,
    )
    q = torch.zeros((64, 8, dim), dtype=torch.bfloat16, device=DEVICE)
    cache = poisoned_cache(record, num_pages, dim)
    reference = copy_of(cache)
    publish(op, record, quantise, x, cos_sin, slots, cache, "triton", q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turned = publish(op, record, quantise, x, cos_sin, slots, cache, "triton", q)
    assert torch.equal(whole(cache), whole(reference))
    slots.copy_(live)
    x.copy_(exact_values((64, dim), 3))
    q.copy_(free_values((64, 8, dim), 4))
    graph.replay()
    expected = publish(op, record, quantise, x, cos_sin, slots, reference, "reference", q)
    assert torch.equal(whole(cache), whole(reference))
    assert turned is None or torch.equal(turned, expected)


# -- eligibility ----------------------------------------------------------------------------------------


@interpreted
def test_why_not() -> None:
    from dsv41.ops.publish import triton

    assert triton.why_not(Hardware("cuda", 90, "H200", 0), "scaled_528") is None
    assert "SM90" in triton.why_not(Hardware("cpu", 0, "CPU", 0), "scaled_528")
    assert "rows_fp8" in triton.why_not(Hardware("cuda", 90, "H200", 0), "rows_fp8")
