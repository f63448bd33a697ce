"""The Triton kernels of Engram against the reference.

On a CPU the kernels run in Triton's interpreter, at small sizes, in a process of its own; what they become on
Hopper is compiled there too. `gpu` tests run them at the release's sizes. The kernel always runs before the
reference.

Hash and lookup are exact. The write sums D products in another order in float32, which moves a gate by about
1e-6 and a stored bf16 value by one step where it lies on a rounding boundary.
"""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from interpreted import (  # noqa: F401
    DEVICE,
    GPU,
    INTERPRETED,
    apart,
    generator,
    gpu,
    interpreted,
    normal,
    pack_pairs,
    repair_the_interpreter,
    run_interpreted,
)
from offline import compile_sm90
from torch import Tensor

from dsv41.config import engram_primes
from dsv41.hardware import Hardware
from dsv41.ops.engram.op import engram_hash, engram_lookup, engram_write

BACK, HEADS, VOCAB, CHANNELS = 3, 8, 129280, 256
COLUMNS = BACK * HEADS
COPIES, DIM, EPS = 4, 5120, 1e-20
# The released multipliers of layer 1: with compressed ids below 99092 a product fills 63 bits.
MULTIPLIERS = (76632096046245, 4839876093313, 35959672319349, 73987337458391)
ROWS = (0, 1, 2, 3, 5, 8, 17, 64, 127, 128, 129, 1000, 4096)


@pytest.mark.skipif(INTERPRETED or GPU, reason="this process runs the kernels itself")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture(scope="session", autouse=True)
def replace_instructions(repair_the_interpreter: None):  # noqa: F811
    """The interpreter has no inline assembly."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            from dsv41.ops.engram import triton as kernel

            patch.setattr(kernel, "pack", pack_pairs)
        yield


def below(limit: int, shape: tuple[int, ...], seed: int, least: int = 0) -> Tensor:
    return torch.randint(least, limit, shape, generator=generator(seed), device=DEVICE)


# -- hash -----------------------------------------------------------------------------------------------


def hash_inputs(rows: int, seed: int, heads: int = HEADS) -> list:
    """Rows of every kind: blocked at each distance, images, the first and the last ids."""
    tokens = below(VOCAB, (rows,), seed)
    back = below(VOCAB, (rows, BACK), seed + 1)
    back = torch.where(below(4, back.shape, seed + 2) == 0, -1, back)
    edge = below(6, (rows,), seed + 3)
    tokens = torch.where(edge == 0, VOCAB - 1, torch.where(edge == 1, 0, tokens))
    back[edge == 2] = VOCAB - 1
    image = below(8, (rows,), seed + 4) == 0
    primes = torch.tensor(engram_primes(1, BACK, heads, 16_000_000)[0], device=DEVICE).view(BACK, heads)
    offsets = primes.flatten().cumsum(0) - primes.flatten()
    token_map = below(99092, (VOCAB,), 7)
    token_map[-1] = 99091
    return [tokens, back, image, token_map, torch.tensor(MULTIPLIERS, device=DEVICE), primes, offsets, 2]


def check_hash(args: list) -> Tensor:
    found = engram_hash(*args, "triton")
    assert torch.equal(found, engram_hash(*args, "reference"))
    assert found.is_contiguous()
    return found


@interpreted
@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("heads", [8, 3])
def test_interpreted_hash(rows: int, heads: int) -> None:
    args = hash_inputs(rows, rows, heads)
    check_hash(args)
    if rows:
        args[1] = apart(args[1], filler=77)
        check_hash(args)
        args[0], args[1] = args[0].int(), args[1].int()
        check_hash(args)


@interpreted
def test_interpreted_hash_of_any_integers() -> None:
    check_hash_of_any_integers(29)


def check_hash_of_any_integers(rows: int) -> None:
    """Products that overflow, and so negative terms: the remainder has the sign of the divisor."""
    args = hash_inputs(rows, 1)
    args[3] = below(2**62, (VOCAB,), 8)
    assert (check_hash(args) >= 0).all()
    args[0] = torch.full_like(args[0], -5)  # an id below the first counts as the first
    check_hash(args)


@pytest.mark.parametrize("rows", [pytest.param(t, marks=gpu) for t in ROWS])
def test_hash(rows: int) -> None:
    check_hash(hash_inputs(rows, rows))


@pytest.mark.parametrize("rows", [pytest.param(1000, marks=gpu)])
def test_hash_of_any_integers(rows: int) -> None:
    check_hash_of_any_integers(rows)


# -- lookup ---------------------------------------------------------------------------------------------


def table_of(entries: int, channels: int, seed: int, device: str = DEVICE) -> tuple[Tensor, Tensor]:
    """Every code, NaN included, and scales of every size that a float32 product survives, and NaN."""
    draw = torch.Generator(device).manual_seed(seed)
    codes = torch.randint(0, 256, (entries, channels), generator=draw, dtype=torch.uint8, device=device)
    scale = torch.randint(0, 256, (entries, channels // 32), generator=draw, dtype=torch.uint8, device=device)
    return codes.view(torch.float8_e4m3fn), scale


def check_lookup(table: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
    found = engram_lookup(table, scale, rows, torch.bfloat16, "triton")
    expected = engram_lookup(table, scale, rows, torch.bfloat16, "reference")
    assert found.is_contiguous()
    assert torch.equal(found.isnan(), expected.isnan())
    same = found.view(torch.int16) == expected.view(torch.int16)
    assert (same | expected.isnan()).all(), f"{int((~same).sum())} values differ"
    return found


@interpreted
@pytest.mark.parametrize(("rows", "columns", "channels"), [(0, 6, 64), (1, 24, 256), (5, 6, 64), (3, 5, 96)])
def test_interpreted_lookup(rows: int, columns: int, channels: int) -> None:
    table, scale = table_of(90, channels, 0)
    index = below(90, (rows, columns), 1)
    index[:1, 0], index[:1, -1] = 89, 0
    check_lookup(table, scale, index)
    if rows:
        check_lookup(table, scale, apart(index, filler=2**40))


@interpreted
def test_what_is_refused() -> None:
    table, scale = table_of(9, 64, 0)
    index = below(9, (2, 3), 1)
    with pytest.raises(ValueError, match="makes bf16 rows"):
        engram_lookup(table, scale, index, torch.float32, "triton")
    with pytest.raises(ValueError, match="not rows of 64 with 1"):
        engram_lookup(table, scale[:, :1].contiguous(), index, torch.bfloat16, "triton")
    with pytest.raises(ValueError, match="in one piece"):
        engram_lookup(table, scale, index.T.contiguous().T, torch.bfloat16, "triton")
    args = write_inputs(2, 4, 64, 0)
    with pytest.raises(ValueError, match="adds bf16 rows"):
        engram_write(args[0].float(), *args[1:], "triton")
    with pytest.raises(ValueError, match="multiple of 8 channels, not 4"):
        engram_write(*write_inputs(2, 4, 4, 0), "triton")


@pytest.mark.parametrize("rows", [pytest.param(t, marks=gpu) for t in ROWS])
def test_lookup(rows: int) -> None:
    table, scale = table_of(50_021, CHANNELS, rows)
    index = below(50_021, (rows, COLUMNS), 1)
    index[:1, 0], index[:1, -1] = 50_020, 0
    check_lookup(table, scale, index)


@pytest.mark.parametrize("rows", [pytest.param(t, marks=gpu) for t in (1, 129)])
def test_lookup_in_pinned_memory(rows: int) -> None:
    """The kernel reads host memory by its address, the dispatcher takes the rows' device."""
    table, scale = (one.pin_memory() for one in table_of(5_003, CHANNELS, 0, "cpu"))
    index = below(5_003, (rows, COLUMNS), 1)
    index[0, 0] = 5_002
    found = check_lookup(table, scale, index)
    assert found.is_cuda
    assert torch.equal(
        found.view(torch.int16),
        engram_lookup(table.cuda(), scale.cuda(), index, torch.bfloat16, "triton").view(torch.int16),
    )


@pytest.mark.parametrize("rows", [pytest.param(3, marks=gpu)])
def test_lookup_refuses_a_mapped_table(rows: int) -> None:
    table, scale = table_of(9, CHANNELS, 0, "cpu")
    index = below(9, (rows, COLUMNS), 1)
    with pytest.raises(ValueError, match="--engram-tables device or host"):
        engram_lookup(table, scale, index, torch.bfloat16, "triton")
    with pytest.raises(ValueError, match="--engram-tables device or host"):
        engram_lookup(table.pin_memory(), scale, index, torch.bfloat16, "triton")


@pytest.mark.parametrize("rows", [pytest.param(3, marks=gpu)])
def test_lookup_at_the_end_of_a_large_table(rows: int) -> None:
    """Addresses past 2^32. Catches 32-bit arithmetic."""
    entries = 2**32 // CHANNELS + 1000
    table = torch.zeros((entries, CHANNELS), dtype=torch.uint8, device=DEVICE)
    scale = torch.full((entries, CHANNELS // 32), 127, dtype=torch.uint8, device=DEVICE)
    small, small_scale = table_of(1000, CHANNELS, 0)
    table[-1000:], scale[-1000:] = small.view(torch.uint8), small_scale
    index = below(1000, (rows, COLUMNS), 1)
    index[0, 0], index[0, 1] = 999, 0
    found = engram_lookup(
        table.view(torch.float8_e4m3fn), scale, index + entries - 1000, torch.bfloat16, "triton"
    )
    expected = engram_lookup(small, small_scale, index, torch.bfloat16, "triton")
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


# -- write ----------------------------------------------------------------------------------------------


def write_inputs(rows: int, copies: int, dim: int, seed: int) -> list:
    streams = normal((rows, copies, dim), seed) * torch.exp2(normal((rows, copies, 1), seed + 1) * 3)
    kv = normal((rows, (copies + 1) * dim), seed + 2)
    query, key = normal((copies, dim), seed + 3), normal((copies, dim), seed + 4)
    image = below(4, (rows,), seed + 5) == 0
    return [streams.bfloat16(), kv.bfloat16(), query.bfloat16(), key.bfloat16(), image, EPS]


def check_write(args: list) -> Tensor:
    streams, kv, image = args[0], args[1], args[4]
    found = engram_write(*args, "triton")
    expected = engram_write(*args, "reference")
    assert found.is_contiguous()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[image].view(torch.int16), streams[image].view(torch.int16))
    dim = streams.shape[2]
    terms = torch.maximum(streams.float().abs(), kv[:, None, -dim:].float().abs()).nan_to_num()
    a, b = found.float().nan_to_num(), expected.float().nan_to_num()
    wrong = (a - b).abs() > 2.0**-7 * torch.maximum(b.abs(), 2.0**-8 * terms)
    assert not wrong.any(), f"{int(wrong.sum())} values are off, first at {wrong.nonzero()[0].tolist()}"
    if found.numel():
        assert float((a != b).float().mean()) <= 2e-3
    return found


@interpreted
@pytest.mark.parametrize(
    ("rows", "copies", "dim"), [(0, 4, 64), (1, 4, 64), (3, 4, 64), (5, 2, 1032), (2, 1, 8)]
)
def test_interpreted_write(rows: int, copies: int, dim: int) -> None:
    args = write_inputs(rows, copies, dim, rows)
    check_write(args)
    if rows:
        args[0], args[1] = apart(args[0]), apart(args[1])
        check_write(args)


@interpreted
def test_interpreted_hostile_rows() -> None:
    check_hostile_rows(3, 72)


def check_hostile_rows(copies: int, dim: int) -> None:
    """Zero rows, keys of zero, huge and tiny values, weak matches of either sign; NaN and infinity stay in
    their row, and in their copy where they are not in the value."""
    args = write_inputs(12, copies, dim, 3)
    streams, kv, query, key, image, _ = args
    image[:] = False
    streams[0] = 0
    kv[1] = 0
    streams[2] *= 2.0**40
    kv[3] *= 2.0**-40
    streams[4, :, 1:], streams[4, :, 0] = 0, 1  # a match of one product
    kv[4, : copies * dim] = 0
    kv[4, : copies * dim : dim] = -1
    streams[5, 1, 3] = torch.nan
    kv[6, dim + 2] = torch.inf  # the key of copy 1
    kv[7, -1] = torch.nan  # the value, which all copies share
    kv[8, 5], image[8] = torch.nan, True
    streams[10, :, ::2] = -0.0
    found = check_write(args)
    finite = torch.ones(12, copies, dtype=torch.bool, device=DEVICE)
    finite[5, 1] = finite[6, 1] = False
    finite[7] = False
    assert torch.equal(found.isfinite().all(2), finite)
    alone = engram_write(streams[:5], kv[:5], query, key, image[:5], EPS, "triton")
    assert torch.equal(found[:5].view(torch.int16), alone.view(torch.int16))


@pytest.mark.parametrize("rows", [pytest.param(t, marks=gpu) for t in ROWS])
def test_write(rows: int) -> None:
    check_write(write_inputs(rows, COPIES, DIM, rows))


@pytest.mark.parametrize(
    ("copies", "dim"), [pytest.param(*shape, marks=gpu) for shape in ((1, 8), (3, 136), (4, 4104), (8, 2056))]
)
def test_write_of_other_shapes(copies: int, dim: int) -> None:
    args = write_inputs(70, copies, dim, 1)
    args[0], args[1] = apart(args[0]), apart(args[1])
    check_write(args)


@pytest.mark.parametrize("dim", [pytest.param(d, marks=gpu) for d in (64, DIM)])
def test_hostile_rows(dim: int) -> None:
    check_hostile_rows(COPIES, dim)


@pytest.mark.parametrize("rows", [pytest.param(120_000, marks=gpu)])
def test_addresses_past_31_bits(rows: int) -> None:
    args = write_inputs(3, COPIES, DIM, 0)
    streams = torch.zeros((rows, COPIES, DIM), dtype=torch.bfloat16, device=DEVICE)
    kv = torch.zeros((rows, (COPIES + 1) * DIM), dtype=torch.bfloat16, device=DEVICE)
    image = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    streams[-3:], kv[-3:], image[-3:] = args[0], args[1], args[4]
    found = engram_write(streams, kv, *args[2:4], image, EPS, "triton")
    assert torch.equal(found[-3:], engram_write(*args, "triton"))
    assert not found[:-3].any()


# -- all three ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [pytest.param(t, marks=gpu) for t in (128, 1000)])
def test_a_row_does_not_depend_on_its_batch(rows: int) -> None:
    hashing, writing = hash_inputs(rows, 1), write_inputs(rows, COPIES, DIM, 2)
    table, scale = table_of(50_021, CHANNELS, 3)
    index = engram_hash(*hashing, "triton")
    values = engram_lookup(table, scale, index % 50_021, torch.bfloat16, "triton")
    written = engram_write(*writing, "triton")
    for row in (0, 1, 17, 63, 64, 127, rows - 1):
        one = slice(row, row + 1)
        alone = engram_hash(*(arg[one] for arg in hashing[:3]), *hashing[3:], "triton")
        assert torch.equal(index[one], alone)
        alone = engram_lookup(table, scale, index[one] % 50_021, torch.bfloat16, "triton")
        assert torch.equal(values[one].view(torch.int16), alone.view(torch.int16))
        streams, kv, query, key, image, eps = writing
        alone = engram_write(streams[one], kv[one], query, key, image[one], eps, "triton")
        assert torch.equal(written[one].view(torch.int16), alone.view(torch.int16))


@pytest.mark.parametrize("pinned", [pytest.param(p, marks=gpu) for p in (False, True)])
def test_captured(pinned: bool) -> None:
    """A graph recorded on one input is replayed on another, also where the table lies in host memory."""
    static, fresh = (hash_inputs(65, s) + write_inputs(65, COPIES, DIM, s) for s in (1, 2))
    table, scale = table_of(50_021, CHANNELS, 3, "cpu")
    table, scale = (t.pin_memory() if pinned else t.cuda() for t in (table, scale))

    def run(args: list) -> tuple[Tensor, ...]:
        index = engram_hash(*args[:8], "triton")
        values = engram_lookup(table, scale, index % 50_021, torch.bfloat16, "triton")
        return index, values, engram_write(*args[8:], "triton")

    run(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(static)
    for old, new in zip(static, fresh, strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)
    for result in found:
        result.fill_(77)
    graph.replay()
    for a, b in zip(found, run(fresh), strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))


@interpreted
def test_why_not() -> None:
    from dsv41.ops.engram import triton as kernel

    assert kernel.why_not(Hardware("cuda", 90, "H200", 0), None) is None
    assert "SM80" in kernel.why_not(Hardware("cpu", 0, "CPU", 0), None)


# -- the compiled object --------------------------------------------------------------------------------

COMPILED = {  # constants; warps; registers at most; loads of 8 or 16 bytes
    "_hash": ({"BACK": BACK, "HEADS": HEADS, "COLUMNS": 32, "ROWS": 4}, 4, 64, 0),
    "_lookup": (
        {"COLUMNS": COLUMNS, "BLOCKS": 8, "BLOCK_WIDTH": 8, "SCALED": 32, "ROWS": 8},
        4,
        64,
        1,
    ),
    "_write": ({"COPIES": COPIES, "D": DIM, "WIDTH": 512, "ROOT": DIM**-0.5}, 8, 96, 25),
}


@cache
def compiled(name: str) -> tuple[str, str]:
    """-> (SASS, resource usage) of a kernel, compiled for sm_90 without a GPU."""
    from dsv41.ops.engram import triton as module

    constants, warps, _, _ = COMPILED[name]
    types = dict.fromkeys(("tokens", "lookback", "token_map", "multipliers", "primes", "offsets"), "*i64")
    types |= {"rows": "*i64", "out": "*i64" if name == "_hash" else "*bf16", "table": "*u8", "scale": "*u8"}
    types |= dict.fromkeys(("streams", "kv", "query", "key"), "*bf16") | {"is_image": "*u8", "eps": "fp32"}
    aligned = ("streams_stride", "kv_stride")
    return compile_sm90(getattr(module, name), constants, types, aligned=aligned, num_warps=warps)[:2]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot compile")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_object(name: str) -> None:
    """Spills, conversions one by one, rows read in narrow pieces."""
    sass, usage = compiled(name)
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    _, _, limit, wide = COMPILED[name]
    assert registers <= limit
    assert stack == 0
    assert not re.search(r"\b(STL|LDL)\b", sass)
    assert "F2F." not in sass
    assert len(re.findall(r"LDG\.E\.(?:64|128)", sass)) >= wide
