"""The Hopper kernel of sparse attention: its compiled object on any machine, its results on one SM90 GPU.

Tolerance. P and the output are rounded to bf16 in kernel and reference alike, K is exact in bf16 for every
record; the sums differ in order. A row is off by about 1.7e-3 of its norm, nearly all of it the output's
rounding.
"""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from offline import compile_sm90
from torch import Tensor

from dsv41.hardware import Hardware
from dsv41.ops import records
from dsv41.ops.attention import reference

triton = pytest.importorskip(
    "triton", reason="the kernel is written in Triton's Gluon: needs the package triton"
)
kernel = pytest.importorskip("dsv41.ops.attention.gluon")

DIM, ROPE = 512, 64
TOLERANCE = 4e-3
HEAD_TOLERANCE = 1e-2  # of one head of one row: fewer values, so a wider spread
TRAINED = ("scaled_528", "nvfp4_288")
PAIRS = [
    TRAINED,
    ("scaled_528_split", "nvfp4_288_split"),
    ("mixed_584", "mixed_584"),
    ("rows_bf16", "rows_bf16"),
]

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs one SM90 GPU",
    ),
]


def on_gpu(test):
    for mark in gpu:
        test = mark(test)
    return test


# --- The compiled object --------------------------------------------------------------------------


@cache
def compiled(window_record: str, state_record: str, few: bool, variant: str = "default") -> tuple[str, str]:
    """-> (SASS, resource usage) of the attention kernel, compiled for sm_90 without a GPU."""
    constants = kernel.specialisation(window_record, 64, state_record, 64, few, variant=variant)
    element = {r: "*bf16" if r == "rows_bf16" else "*u8" for r in (window_record, state_record)}
    types = {"q": "*bf16", "out": "*bf16", "window": element[window_record], "states": element[state_record]}
    types |= dict.fromkeys(("window_slots", "state_slots"), "*i32")
    types |= dict.fromkeys(("sink", "part", "ml"), "*fp32") | {"softmax_scale": "fp32"}
    aligned = ("q_row", "window_bytes", "state_bytes")
    return compile_sm90(kernel._attend, constants, types, aligned=aligned, num_warps=8)[:2]


@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1])
def test_compiled_object(pair: tuple[str, str], few: bool) -> None:
    sass, usage = compiled(*pair, few)
    assert sass.count("HGMMA.64x32x16.F32.BF16") == 64, "QK: 32 steps, in the loop and before it"
    assert sass.count(f"HGMMA.64x{256 if few else 128}x16.F32.BF16") == (8 if few else 16), "PV: 4 steps"
    assert "HMMA" not in sass.replace("HGMMA", ""), "some product runs on the old tensor instructions"
    assert sass.count("WARPGROUP.DEPBAR") <= 8, "products are serialised"
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    assert registers == (168 if few else 128)  # what 12 or 16 warps share; setmaxnreg moves the rest
    # What is spilled are addresses that a row's two ends use; none of it in the consumers' loop.
    assert stack <= (64 if pair == TRAINED else 96), f"{stack} bytes of stack: tiles or sums are spilled"
    assert not main_loop_spills(sass), "the consumers' loop spills"


def test_compiled_variant() -> None:
    """Four producer warps for many rows: a product of the second kind reads P once, and nothing of a loop is
    spilled."""
    sass, usage = compiled("scaled_528", "nvfp4_288", False, "four_warps")
    assert sass.count("HGMMA.64x32x16.F32.BF16") == 64
    assert sass.count("HGMMA.64x256x16.F32.BF16") == 8
    assert sass.count("WARPGROUP.DEPBAR") <= 8
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    assert registers == 168
    assert stack <= 64
    assert not main_loop_spills(sass)


def main_loop_spills(sass: str) -> list[str]:
    """Spills between two QK products: the loop of the consumers."""
    lines = sass.splitlines()
    products = [n for n, line in enumerate(lines) if "HGMMA.64x32x16" in line]
    softmax = lines[products[31] : products[32]]
    return [line for line in softmax if re.search(r"\bSTL", line)]


def test_why_not() -> None:
    hopper, cpu = Hardware("cuda", 90, "H200", 0), Hardware("cpu", 0, "CPU", 0)
    assert kernel.why_not(hopper, None) is None
    assert all(kernel.why_not(hopper, record) is None for pair in PAIRS for record in pair)
    assert "rows_fp8" in kernel.why_not(hopper, "rows_fp8")
    assert "CPU" in kernel.why_not(cpu, "scaled_528")


@pytest.mark.parametrize("deterministic", [False, True])
def test_splits_cover_every_row_once(deterministic: bool) -> None:
    for rows in (1, 2, 13, 32, 64, 66, 67, 128, 132, 133, 264, 1000, 4096):
        for tiles in (1, 2, 10, 40):
            whole, splits = kernel.plan_splits(rows, tiles, 132, deterministic)
            assert 0 <= whole <= rows
            assert 1 <= splits <= min(tiles, kernel.MAX_SPLITS)
            assert whole == rows or (whole % 132 == 0 and (rows - whole) * splits <= 132)
            assert whole == rows or not deterministic


# --- Parity ---------------------------------------------------------------------------------------


class Cache:
    """Random states on a few pages; every other byte (unused states, padding, other pages) is 0xff, a NaN."""

    def __init__(
        self, record: str, page: int, pages: list[int], num_pages: int, seed: int, padding: int = 64
    ):
        self.record, self.page = record, page
        if record == "rows_bf16":
            shape, dtype = (num_pages, page + 1, DIM), torch.bfloat16
            self.bytes = torch.full(shape, torch.nan, dtype=dtype, device="cuda")[:, :page]
        else:
            stride = -(-records.page_bytes(record, page, DIM, ROPE) // 64) * 64 + padding
            self.bytes = torch.full((num_pages, stride), 255, dtype=torch.uint8, device="cuda")
        draw = torch.Generator("cuda").manual_seed(seed)
        ids = torch.tensor(pages, device="cuda")[:, None] * page + torch.arange(page, device="cuda")
        order = torch.rand(ids.numel(), device="cuda", generator=draw).argsort()
        self.slots = ids.flatten()[order][: ids.numel() * 3 // 4]  # a quarter of the states is never written
        scale = torch.exp2(torch.randint(-6, 4, (len(self.slots), 1), device="cuda", generator=draw).float())
        x = torch.randn((len(self.slots), DIM), device="cuda", generator=draw) * scale
        records.write_slots(record, self.bytes, self.slots, x, page, ROPE)

    def lists(self, rows: int, width: int, seed: int) -> Tensor:
        """int32 [rows, width]; in turn full, empty, a prefix, holes, one state everywhere, the last place."""
        draw = torch.Generator("cuda").manual_seed(seed)
        pick = torch.randint(0, len(self.slots), (rows, width), device="cuda", generator=draw)
        lists = self.slots[pick].to(torch.int32)
        place = torch.arange(width, device="cuda")
        kind = (torch.arange(rows, device="cuda") + seed) % 6
        length = torch.randint(0, width + 1, (rows, 1), device="cuda", generator=draw)
        holes = torch.rand((rows, width), device="cuda", generator=draw) < 0.5
        drop = torch.zeros((rows, width), dtype=torch.bool, device="cuda")
        for number, rule in ((1, place >= 0), (2, place >= length), (3, holes), (5, place < width - 1)):
            drop |= (kind == number)[:, None] & rule
        lists[kind == 4] = lists[kind == 4][:, :1]
        return lists.masked_fill(drop, -1).contiguous()


@cache
def caches(window_record: str, state_record: str) -> tuple[Cache, Cache]:
    return Cache(window_record, 64, [1, 3, 4, 7], 9, 1), Cache(state_record, 64, [2, 3, 5, 8, 11, 12], 14, 2)


def queries(rows: int, heads: int, seed: int) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn((rows, heads, DIM), device="cuda", generator=draw).to(torch.bfloat16)


def arguments(pair, rows, heads, width=128, selected=512, seed=0, q=None, deterministic=False):
    window, states = caches(*pair)
    sink = torch.randn(heads, device="cuda", generator=torch.Generator("cuda").manual_seed(seed + 9))
    return [
        queries(rows, heads, seed) if q is None else q,
        window.bytes, window.lists(rows, width, seed), window.record, window.page,
        states.bytes, states.lists(rows, selected, seed + 2), states.record, states.page,
        sink, ROPE, deterministic,
    ]  # fmt: skip


def check(args: list) -> Tensor:
    """Kernel first, then reference; every row and every head within tolerance, empty rows exactly zero."""
    got = kernel.sparse_attention(*args)
    expected = reference.sparse_attention(*args).double()
    assert got.shape == expected.shape
    if got.numel() == 0:
        return got
    assert not got.isnan().any(), "NaN from an unused state, page or padding byte"
    empty = ((args[2] >= 0).sum(1) + (args[6] >= 0).sum(1)) == 0
    assert (got[empty] == 0).all(), "a row with nothing listed is not zero"
    error = (got.double() - expected)[~empty]
    norms = expected[~empty]
    by_row = error.flatten(1).norm(dim=1) / norms.flatten(1).norm(dim=1)
    by_head = error.norm(dim=2) / norms.norm(dim=2).clamp(min=1e-6)
    if len(by_row):
        assert by_row.max() <= TOLERANCE, f"row {by_row.argmax()} is {by_row.max():.2e} off"
        assert by_head.max() <= HEAD_TOLERANCE, f"a head is {by_head.max():.2e} off"
    return got


@on_gpu
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 17, 64, 127, 128, 129, 1000])
def test_rows(rows: int) -> None:
    for seed in range(6 if rows <= 8 else 1):
        check(arguments(TRAINED, rows, 64, seed=seed))


@on_gpu
@pytest.mark.parametrize("pair", PAIRS[1:], ids=lambda pair: pair[1])
@pytest.mark.parametrize("rows", [3, 150])
def test_records(pair: tuple[str, str], rows: int) -> None:
    check(arguments(pair, rows, 64))


@on_gpu
@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize("rows", [2, 140])
def test_heads(heads: int, rows: int) -> None:
    check(arguments(TRAINED, rows, heads))


@on_gpu
@pytest.mark.parametrize("rows", [2, 140])
def test_heads_of_padding(rows: int) -> None:
    """Heads behind the last sink are read by nobody: NaN there stays there."""
    q = queries(rows, 64, 3)
    q[:, 24:] = torch.nan
    args = arguments(TRAINED, rows, 24, q=q)
    assert check(args).shape == (rows, 24, DIM)


@on_gpu
@pytest.mark.parametrize("rows", [4, 133])
@pytest.mark.parametrize(
    ("width", "selected"),
    [(128, 0), (0, 512), (1, 1), (127, 513), (129, 511), (64, 64), (63, 65), (128, 2048)],
)
def test_widths(rows: int, width: int, selected: int) -> None:
    check(arguments(TRAINED, rows, 64, width, selected, seed=rows))


@on_gpu
def test_no_lists_at_all() -> None:
    assert (kernel.sparse_attention(*arguments(TRAINED, 3, 64, 0, 0)) == 0).all()


@on_gpu
@pytest.mark.parametrize("rows", [3, 140])
def test_views(rows: int) -> None:
    """q is a slice of a wider projection, the lists are slices of persistent buffers."""
    wide = queries(rows, 80, 5)
    args = arguments(TRAINED, rows, 32, q=wide[:, 8:72:2])
    for position in (2, 6):
        room = torch.full((rows, args[position].shape[1] + 3), -1, dtype=torch.int32, device="cuda")
        room[:, : args[position].shape[1]] = args[position]
        args[position] = room[:, : args[position].shape[1]]
    check(args)


@on_gpu
@pytest.mark.parametrize("rows", [132, 300])
def test_variant_changes_no_bit(rows: int) -> None:
    """The same products in the same order, whoever decodes the keys and however wide a product is."""
    args = arguments(TRAINED, rows, 64, deterministic=True)
    got = kernel.attend(*args, "four_warps")
    assert torch.equal(got, check(args))


@on_gpu
def test_sinks_at_the_ends() -> None:
    args = arguments(TRAINED, 9, 64)
    args[9] = torch.tensor([-torch.inf, -1e4, 0.0, 1e4], device="cuda").repeat(16)
    got, expected = kernel.sparse_attention(*args), reference.sparse_attention(*args)
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


@on_gpu
@pytest.mark.parametrize("pair", [TRAINED, ("mixed_584", "mixed_584")], ids=lambda pair: pair[1])
def test_last_page_of_a_large_pool(pair: tuple[str, str]) -> None:
    """Slots whose byte address needs more than 31 bits."""
    large = []
    for record, seed in zip(pair, (1, 2), strict=True):
        num_pages = (2 << 30) // records.page_bytes(record, 64, DIM, ROPE) + 50
        large.append(Cache(record, 64, [num_pages - 3, num_pages - 1], num_pages, seed))
    args = arguments(pair, 5, 64)
    for position, pool in zip((1, 5), large, strict=True):
        args[position] = pool.bytes
        args[position + 1] = pool.lists(5, args[position + 1].shape[1], seed=position)
    check(args)


@on_gpu
@pytest.mark.parametrize("pair", [TRAINED, ("rows_bf16", "rows_bf16")], ids=lambda pair: pair[1])
def test_deterministic_row_alone_and_in_company(pair: tuple[str, str]) -> None:
    args = arguments(pair, 300, 64, deterministic=True)
    together = check(args)
    for rows in (slice(0, 128), slice(57, 58), slice(299, 300), slice(100, 103)):
        own = [arg[rows] if position in (0, 2, 6) else arg for position, arg in enumerate(args)]
        assert torch.equal(kernel.sparse_attention(*own), together[rows])


@on_gpu
@pytest.mark.parametrize("rows", [3, 140])
def test_same_bits_every_time(rows: int) -> None:
    args = arguments(TRAINED, rows, 64)
    first = kernel.sparse_attention(*args)
    assert all(torch.equal(kernel.sparse_attention(*args), first) for _ in range(20))


@on_gpu
@pytest.mark.parametrize("rows", [2, 140])
def test_graph_reads_lists_and_keys_anew(rows: int) -> None:
    args = arguments(TRAINED, rows, 64)
    other = arguments(TRAINED, rows, 64, seed=4)
    kernel.sparse_attention(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.sparse_attention(*args)
    for position in (0, 2, 6, 9):
        args[position].copy_(other[position])
    graph.replay()
    assert torch.equal(out, kernel.sparse_attention(*other))
