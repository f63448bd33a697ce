"""The linear family on Hopper: order of K and plans on any machine, Triton kernels in the interpreter, Gluon
kernels compiled for sm_90, results on one SM90 GPU.

Tolerance. Every product is exact in fp32 and every path rounds once, so kernel and reference differ where the
order of fp32 sums moves a result across a rounding boundary of bf16: a few elements by one unit in the last
place (2^-8 of their value), 3e-4 of a row's norm at K of a few thousand. cuBLAS may add parts of K in bf16:
3e-3 there.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import cache

import pytest
import torch
from interpreted import (
    DEVICE,
    INTERPRETED,
    interpreted,
    repair_the_interpreter,  # noqa: F401
    run_interpreted,
)
from offline import compile_sm90
from torch import Tensor

from dsv41.hardware import Hardware
from dsv41.ops import records
from dsv41.ops.arithmetic import rotate
from dsv41.ops.linear import reference

triton = pytest.importorskip("triton", reason="the kernels are written in Triton: needs the package triton")
kernel = pytest.importorskip("dsv41.ops.linear.gluon")
skinny, dots, rows_part, stream_part = (
    pytest.importorskip(f"dsv41.ops.linear.{part}")
    for part in ("gluon_skinny", "gluon_dots", "triton_rows", "triton_stream")
)

ROW_TOLERANCE, BLAS_TOLERANCE = 1e-3, 3e-3  # of a row's norm
FP32_TOLERANCE = 1e-4  # not rounded to bf16; the tensor cores cut their sums off instead of rounding them
compiles = pytest.mark.skipif(INTERPRETED, reason="a compiled kernel cannot be seen by the interpreter")
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs one SM90 GPU",
    ),
]


def on_gpu(test):
    for mark in gpu:
        test = mark(test)
    return test


def fp8_weight(n: int, k: int, seed: int = 0, device: str = DEVICE) -> tuple[Tensor, Tensor]:
    """Codes of every exponent, and scales that differ from tile to tile."""
    draw = torch.Generator(device).manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 4, (n, k), generator=draw, device=device).float())
    codes = (torch.randn((n, k), generator=draw, device=device) * spread).clamp(-448, 448)
    tiles = (-(-n // 32), k // 32)
    scale = torch.randint(112, 121, tiles, generator=draw, device=device).to(torch.uint8)
    return codes.to(records.E4M3), scale


def bf16(*shape: int, seed: int = 0, device: str = DEVICE) -> Tensor:
    draw = torch.Generator(device).manual_seed(seed)
    magnitude = torch.exp2(torch.randint(-3, 4, (*shape[:-1], 1), generator=draw, device=device).float())
    return (torch.randn(shape, generator=draw, device=device) * magnitude).bfloat16()


def angles(rows: int, rope: int, seed: int = 0, device: str = DEVICE) -> Tensor:
    draw = torch.Generator(device).manual_seed(seed)
    turn = torch.rand((rows, rope // 2), generator=draw, device=device) * 6.28
    return torch.cat((turn.cos(), turn.sin()), dim=1)


# --- Order of K, plans, packing -------------------------------------------------------------------


def run_codes(words: tuple[int, int], factor: int) -> list[int]:
    """`_CODES` as written, on two words: four words of two bf16 each. Interprets five PTX instructions."""
    named = {"$4": words[0], "$5": words[1], "$6": factor}

    def value(name: str) -> int:
        return named[name] if name in named else int(name, 0)

    def half(word: int) -> Tensor:
        return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(torch.bfloat16)

    text = re.sub(r"\.reg[^;]*;|[{}]", "", skinny._CODES.value)
    for line in filter(None, map(str.strip, text.split(";"))):
        op, arguments = line.split(" ", 1)
        target, *sources = (part.strip() for part in arguments.split(","))
        a, b, *rest = (value(source) for source in sources)
        if op == "shl.b32":
            named[target] = a << b & 0xFFFFFFFF
        elif op == "shr.u32":
            named[target] = a >> b
        elif op == "and.b32":
            named[target] = a & b
        elif op == "lop3.b32":
            assert rest[1] == 0xEA, "(a & b) | c"
            named[target] = a & b | rest[0]
        else:
            assert op == "mul.rn.bf16x2"
            low, high = (half(a) * half(b)).view(torch.uint16).tolist()
            named[target] = high << 16 | low
    return [named[f"${n}"] for n in range(4)]


def halves(word: int) -> list[float]:
    return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(torch.bfloat16).float().tolist()


def test_codes_become_their_values() -> None:
    """Every code of either sign under the scales of the exact range, NaN codes apart."""
    codes = torch.arange(256, dtype=torch.uint8)
    for byte in (74, 100, 119, 127, 160, 198):
        factor = ((byte + 56) << 7) * 0x10001
        for code in [c for c in range(256) if c & 0x7F != 0x7F]:
            got = halves(run_codes((code * 0x01010101, 0), factor)[0])
            expected = codes[code].view(records.E4M3).float().item() * 2.0 ** (byte - 127 - 64)
            assert got == [expected, expected], f"code {code:#x} at scale byte {byte}"


def test_order_of_k_follows_the_codes() -> None:
    """What lands at each place of the A operand's K is the column that `permuted` names, and each once.

    The codes 0x38.. of a lane's bytes are told apart by their values; A_ORDER is applied to their columns."""
    codes = [0x38 + byte for byte in range(8)]
    words = tuple(int.from_bytes(codes[4 * w : 4 * w + 4], "little") for w in range(2))
    values = torch.tensor(codes, dtype=torch.uint8).view(records.E4M3).float().tolist()
    # place[j][p]: which of a word pair's eight bytes the half p of output j holds
    scaled = [halves(word) for word in run_codes(words, ((127 + 56) << 7) * 0x10001)]
    place = torch.tensor([[values.index(v * 2.0**64) for v in pair] for pair in scaled])
    half, lane, w1 = torch.arange(2), torch.arange(4), torch.arange(2)
    start = half[:, None, None] * 64 + lane[None, :, None] * 16 + w1[None, None, :] * 8  # of a pair of words
    by_output = place.T.unflatten(1, (2, 2)).transpose(1, 2)  # [p, j0, j1], as nested joins leave them
    column = start[..., None, None, None] + by_output  # [half, lane, w1, p, j0, j1]
    row = torch.arange(64).view(8, 2, 2, 2)
    both = row.view(8, 2, 2, 2, 1, 1, 1, 1, 1, 1) * 128 + column
    fragment = both.permute(skinny.A_ORDER.value).reshape(64, 128)
    in_order = skinny.permuted()
    assert sorted(in_order) == list(range(64))
    assert fragment[0].tolist() == in_order + [64 + k for k in in_order]
    assert ((fragment - fragment[0]) % 128 == 0).all(), "rows must not change the order of K"
    for half in range(2):  # decoded alone, a half of the chunk is the same half of the whole
        alone = both[:, :, :, :, half : half + 1].permute(skinny.A_ORDER.value).reshape(64, 64)
        assert torch.equal(alone, fragment[:, 64 * half : 64 * half + 64])
    # x: [block, lane, w1, j1, p, j0] of a row in its own order
    x = torch.arange(64).view(1, 1, 4, 2, 2, 2, 2).permute(skinny.X_ORDER.value).flatten()
    assert x.tolist() == in_order
    # the sums' rows come back in the weight's order
    rows = (fragment[:, 0] - fragment[0, 0]) // 128
    assert rows.view(8, 2, 2, 2, 1).permute(skinny.ROW_ORDER.value).flatten().tolist() == list(range(64))


def test_reads_of_a_quarter_warp_meet_eight_banks() -> None:
    for parts in (1, 2, 4, 8):
        layout = skinny.words_layout(parts)
        lanes = layout.lane_bases
        chunks = set()
        for lane in range(8):
            r, q, word = (sum(base[d] for bit, base in enumerate(lanes) if lane >> bit & 1) for d in range(3))
            chunks.add((word // 4) ^ ((r * parts + q) & 7))  # 128-byte swizzle of 16-byte chunks
        assert len(chunks) == 8


SHAPES = [
    (1792, 5120, 1),
    (32768, 1280, 1),
    (40960, 1280, 1),
    (1024, 4096, 8),
    (5120, 8192, 1),
    (4608, 5120, 1),
    (5120, 2304, 1),
    (25600, 12288, 1),
    (128, 32, 1),
    (64, 96, 2),
    (16, 544, 1),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plans_fit_and_cover(shape: tuple[int, int, int], deterministic: bool) -> None:
    n, k, groups = shape
    plans = {t: kernel.plan(n, k, groups, t, deterministic) for t in (1, 2, 3, 8, 9, 17, 64, 128, 4096)}
    for rows, way in plans.items():
        assert 1 <= way.stages <= way.chunks
        assert way.chunks * way.splits * 128 >= k // way.parts
        assert (way.splits - 1) * way.chunks * 128 < k // way.parts, "a split without work"
        assert way.x_chunks >= way.chunks
        x_bytes = way.x_chunks * 2048 if way.fused else way.stages * way.rows * 256
        assert way.stages * 8192 + x_bytes + 4096 < 227 << 10
        assert way.parts == 1 or (k // way.parts % 32 == 0 and way.parts * way.rows == 8 and way.splits == 1)
        assert not way.fused or rows <= way.rows
    if deterministic:
        assert len({(p.fused, p.parts, p.rows, p.splits, p.chunks) for p in plans.values()}) == 1
    assert len({plans[t].splits for t in (3, 8, 9, 17, 64, 128)}) == 1, "one split a shape"


def test_pieces_of_x_cover_its_chunks() -> None:
    for chunks in range(1, 17):
        sizes = skinny._pieces(chunks)
        assert sum(sizes) == chunks
        assert all(size in (1, 2, 4, 8) for size in sizes)
        assert len(sizes) <= 4


def test_weights_that_cannot_run_are_refused() -> None:
    weight, scale = fp8_weight(64, 96, device="cpu")
    kernel.pack(weight, scale)
    for bad in [(weight[:, :80], scale), (weight[:24], scale), (weight, scale[:1]), (weight.T[:96], scale)]:
        with pytest.raises(ValueError, match=r"\d+ x \d+"):
            kernel.pack(*bad)


def test_pack_leaves_the_released_order() -> None:
    weight, scale = fp8_weight(64, 96, device="cpu")
    before = weight.view(torch.uint8).clone()
    kernel.pack(weight, scale)
    assert torch.equal(weight.view(torch.uint8), before)


def test_exactness_studies_are_refused() -> None:
    weight, scale = fp8_weight(64, 96, device="cpu")
    with pytest.raises(ValueError, match="quantises"):
        kernel.linear_fp8(bf16(2, 96, device="cpu"), weight, scale, False, False)
    with pytest.raises(ValueError, match="bf16"):
        kernel.linear_fp8(torch.zeros((2, 96)), weight, scale, True, False)
    with pytest.raises(ValueError, match="bf16"):
        kernel.linear(torch.zeros((2, 96)), torch.zeros((8, 96)), torch.float32, False)


class Recorder:
    """Stands in for a kernel: binds a launch's arguments to the kernel's own and notes (name, grid, them)."""

    def __init__(self, function, launches: list) -> None:
        self.function, self.launches = function, launches

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*args, **named):
            options = {"num_warps", "maxnreg", "enable_fp_fusion", "launch_pdl"}
            arguments = dict(zip(self.function.arg_names, args, strict=False))
            own = {name: value for name, value in named.items() if name not in options}
            assert not arguments.keys() & own.keys(), "an argument is given twice"
            assert arguments.keys() | own.keys() == set(self.function.arg_names)
            self.launches.append((self.function.__name__, grid, arguments | own))

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list:
    """What the host code would launch, on a CPU."""
    noted: list = []
    here = ("add_kernel", "prepare_kernel", "widen_kernel", "stream_kernel")
    for module, name in [
        (skinny, "skinny_kernel"),
        (dots, "dots_kernel"),
        *((kernel, name) for name in here),
    ]:
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), noted))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return noted


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (0, []),
        (1, ["skinny"]),
        (2, ["skinny"]),
        (8, ["skinny", "add"]),
        (20, ["prepare", "skinny", "add"]),
        (300, ["prepare", "widen"]),
    ],
)
def test_launches_of_an_fp8_product(rows: int, names: list[str], launches: list) -> None:
    weight, scale = fp8_weight(1792, 5120, device="cpu")
    wide = torch.zeros((rows, 5184), dtype=torch.bfloat16)
    assert kernel.linear_fp8(wide[:, :5120], weight, scale, True, False).shape == (rows, 1792)
    assert [name.removesuffix("_kernel") for name, _, _ in launches] == names
    for name, grid, arguments in launches:
        if name == "skinny_kernel":
            rows_of_tile = skinny.TILE_ROWS // arguments["Q"]
            assert grid[0] * rows_of_tile >= 1792
            assert grid[2] * arguments["NT"] >= rows
            assert arguments["weight"].block_shape == [rows_of_tile, arguments["Q"], 32]
            assert (arguments["part"] is None) == (arguments["SPLITS"] == 1) == (arguments["out"] is not None)
            assert arguments["ready"] is None or arguments["ready"].shape[1] == arguments["PADDED"]
    launches.clear()
    kernel.linear_fp8(wide[:, :5120], weight, scale, True, True)
    assert [name for name, _, _ in launches] == ["prepare_kernel", "skinny_kernel", "add_kernel"] * (rows > 0)


@pytest.mark.parametrize(("rows", "names"), [(1, ["dots"]), (8, ["stream", "add"]), (64, ["stream", "add"])])
def test_launches_of_a_bf16_product(rows: int, names: list[str], launches: list) -> None:
    x, weight = torch.zeros((rows, 1, 5120), dtype=torch.bfloat16), bf16(1088, 5120, device="cpu")
    out = kernel.linear(x, weight, torch.float32, False)
    assert out.shape == (rows, 1, 1088)
    assert out.dtype == torch.float32
    assert [name.removesuffix("_kernel") for name, _, _ in launches] == names


def test_launches_of_grouped_outputs(launches: list) -> None:
    weight, scale = fp8_weight(192, 96, device="cpu")
    for rows, names in ((1, ["skinny"]), (20, ["prepare", "skinny"]), (300, ["prepare", "widen"])):
        o, cos_sin = torch.zeros((rows, 4, 48), dtype=torch.bfloat16), torch.zeros((rows, 16))
        assert kernel.grouped_output(o, cos_sin, weight, scale, 2, False).shape == (rows, 192)
        assert [name.removesuffix("_kernel") for name, _, _ in launches] == names
        launches.clear()


def test_why_not() -> None:
    assert kernel.why_not(Hardware("cuda", 90, "H200", 0), None) is None
    assert "CPU" in kernel.why_not(Hardware("cpu", 0, "CPU", 0), None)


# --- Triton kernels in the interpreter ------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test would start")
def test_interpreted_kernels() -> None:
    run_interpreted(__file__)


def hostile_rows(k: int, exponents: int = 250) -> Tensor:
    """Rows of zeros, tiny, huge, so many bf16 exponents, ties of e4m3, NaN and infinity."""
    x = bf16(9, k, seed=3, device="cpu")
    x[1], x[2], x[3] = 0, x[2] * 2.0**-100, x[3] * 2.0**100
    x[4] = torch.exp2(torch.arange(k) % exponents - exponents / 2.0).bfloat16()
    x[5] = (torch.arange(k) % 33 * 14 * 0.5).bfloat16()
    x[6, 5], x[7, k - 1], x[8, 0] = torch.nan, torch.inf, -torch.inf
    return x


@interpreted
@pytest.mark.parametrize("k", [96, 1120])
def test_prepared_rows_are_the_records_round_trip(k: int) -> None:
    x = hostile_rows(k)
    padded = -(-k // 128) * 128
    got = kernel.prepare(x, None, 1, padded, False)
    expected = torch.nn.functional.pad(records.round_trip(x, "fp8_32"), (0, padded - k))
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    turned = kernel.prepare(x, None, 1, padded, True)
    order = torch.tensor(skinny.permuted())
    torch.testing.assert_close(
        turned, expected.unflatten(1, (-1, 64))[..., order].flatten(1), rtol=0, atol=0, equal_nan=True
    )


@interpreted
@pytest.mark.parametrize(("heads", "dim", "rope", "groups"), [(4, 128, 32, 2), (4, 48, 16, 2)])
def test_prepared_heads_are_turned_back(heads: int, dim: int, rope: int, groups: int) -> None:
    o, cos_sin = bf16(3, heads, dim), angles(3, rope)
    k = heads * dim // groups
    padded = -(-k // 128) * 128
    got = kernel.prepare(o.flatten(1), (cos_sin, dim), groups, padded, False)
    expected = rotate(o, cos_sin, inverse=True).flatten(1).unflatten(1, (groups, k))
    expected = torch.nn.functional.pad(expected, (0, padded - k)).flatten(1)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@interpreted
def test_prepared_rows_of_a_wider_projection() -> None:
    wide = bf16(4, 320)
    got = kernel.prepare(kernel._bf16_rows(wide[:, 64:192]), None, 1, 128, False)
    assert torch.equal(got, records.round_trip(wide[:, 64:192], "fp8_32"))


@interpreted
def test_widened_weight() -> None:
    weight, scale = fp8_weight(80, 288)
    weight.view(torch.uint8)[:, :256] = torch.arange(256, dtype=torch.uint8)
    scale[0, 0], scale[1, 1], scale[2, 2] = 0, 255, 230
    expected = records.dequantise_fp8_weight(weight, scale).bfloat16()
    for first, count in ((0, 80), (32, 48)):
        got = kernel.widen(weight, scale, first, count)
        torch.testing.assert_close(got, expected[first : first + count], rtol=0, atol=0, equal_nan=True)


@interpreted
def test_streamed_rows_and_added_splits() -> None:
    weight, x = bf16(70, 300), bf16(20, 300, seed=1)
    part, out = torch.full((2, 20, 70), torch.nan), torch.empty((20, 70), dtype=torch.bfloat16)
    stream_part.stream_kernel[(2, 2, 2)](
        x, weight, part, 300, 20, 70, K=300, STEPS=2, BN=64, BT=16, BK=128, STAGES=2
    )
    expected = reference.linear(x, weight, torch.float32, False)
    torch.testing.assert_close(part.sum(0), expected, rtol=1e-4, atol=1e-2)
    rows_part.add_kernel[(6,)](part, out, 1400, SPLITS=2, BLOCK=256, EARLY=False, STACKED=False)
    assert torch.equal(out, (part[0] + part[1]).bfloat16())


# --- The compiled object --------------------------------------------------------------------------


@cache
def compiled_skinny(n: int, k: int, groups: int, rows: int, deterministic: bool):
    from triton.experimental.gluon import language as gl

    way = kernel.plan(n, k, groups, rows, deterministic)
    weight = torch.empty((groups * n, k), dtype=torch.uint8, device="meta").view(records.E4M3)
    constants = kernel.skinny_constants(weight, groups, way)
    kind = skinny.READY if not way.fused else skinny.QUANTISE if groups == 1 else skinny.ROTATE
    constants |= {"KIND": kind.value, "D": 512, "ROPE": 64}
    constants |= dict.fromkeys(["out"] if way.splits > 1 else ["part"])
    constants |= dict.fromkeys(["x"] if kind is skinny.READY else ["ready"])
    constants |= {} if kind is skinny.ROTATE else {"cos_sin": None}
    box = f"{skinny.TILE_ROWS // way.parts}, {way.parts}, 32"
    types = {
        "weight": f"tensordesc<i32[{box}],{gl.NVMMASharedLayout(128, 32, 3)!r}>",
        "ready": f"tensordesc<bf16[{way.rows}, 128],{gl.NVMMASharedLayout(128, 16, 2)!r}>",
        "x": "*bf16",
        "scale": "*u8",
        "cos_sin": "*fp32",
        "out": "*bf16",
        "part": "*fp32",
    }
    options = {"num_warps": 4, "maxnreg": 128, "enable_fp_fusion": False}
    sass, usage, binary = compile_sm90(skinny.skinny_kernel, constants, types, aligned=("x_row",), **options)
    return way, sass, usage, binary.metadata.shared


@compiles
@pytest.mark.parametrize(
    ("case", "registers"),
    [
        ((1792, 5120, 1, 1, False), 80),  # eight parts of K
        ((5120, 8192, 1, 2, False), 96),  # four parts
        ((32768, 1280, 1, 1, False), 72),  # whole K, two live columns
        ((5120, 8192, 1, 8, False), 96),  # splits over CTAs
        ((1024, 4096, 8, 1, False), 88),  # turned back in the prologue
        ((5120, 2304, 1, 64, False), 104),  # ready rows
    ],
    ids=str,
)
def test_compiled_skinny_kernel(case: tuple[int, int, int, int, bool], registers: int) -> None:
    way, sass, usage, shared = compiled_skinny(*case)
    columns = way.parts * way.rows
    assert sass.count(f"HGMMA.64x{columns}x16.F32.BF16") == 8, "a chunk is eight products of 16 columns"
    waits = [1, 1, 3][kernel.OVERLAP if way.fused else 0]
    assert sass.count("WARPGROUP.DEPBAR") == waits, "products are serialised"
    loop = sass[sass.index("PHASECHK") : sass.rindex("HGMMA")]
    if way.refill == 0:
        assert loop.count("UTMALDG") == loop.count("FENCE") == 0, "what is used once is not filled again"
    assert loop.count("LDS.128") == 4, "a lane reads its 64 bytes of a chunk in four pieces"
    assert loop.count("HMUL2.BF16") == 32
    assert len(re.findall(r"\b(?:LDS|LDSM)\b", loop)) <= 8, (
        "words or factors are shuffled through shared memory"
    )
    assert not re.findall(r"\bST(?:S|SM)\b", loop), "words or factors are shuffled through shared memory"
    assert loop.count("BAR.SYNC") <= 3
    assert not re.findall(r"\b(?:STL|LDL)\b", sass), "spills"
    used, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    assert used <= registers
    assert stack == 0
    assert shared <= 227 << 10
    assert "UTMALDG.3D" in sass, "the weight by the copy engine"
    assert "ACQBULK" in sass, "the wait for the kernel before"
    if way.fused:
        assert "LDG.E.128" in sass or way.live == 2, "x is read in small pieces"


SWITCHES = [  # no one of which changes a bit
    {"OVERLAP": 1, "EXACT_CHUNKS": 4},
    {"OVERLAP": 0, "LEAN": False},
    {"STACKED": True},
]
BEFORE = {"STACKED": False, "EXACT_CHUNKS": 0, "LEAN": False, "OVERLAP": 0}


@compiles
@pytest.mark.parametrize("case", [(1792, 5120, 1, 8, False), (32768, 1280, 1, 1, False)], ids=str)
@pytest.mark.parametrize(
    "switches",
    [BEFORE, *SWITCHES],
    ids=str,
)
def test_compiled_switches(
    case: tuple[int, int, int, int, bool], switches: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in switches.items():
        monkeypatch.setattr(kernel, name, value)
    _, sass, usage, _ = compiled_skinny.__wrapped__(*case)
    assert not re.findall(r"\b(?:STL|LDL)\b", sass), "spills"
    assert int(re.search(r"REG:(\d+)", usage)[1]) <= 96
    assert sass.count("ACQBULK") == sass.count("PREEXIT") == 1
    early = sass.index("PREEXIT") < sass.index("ACQBULK")
    assert early == kernel.STACKED, "the next kernel starts before the wait"


@compiles
@pytest.mark.parametrize("stacked", [False, True])
def test_compiled_add_kernel(stacked: bool) -> None:
    constants = {"SPLITS": 7, "BLOCK": 256, "EARLY": True, "STACKED": stacked}
    types = {"part": "*fp32", "out": "*bf16"}
    sass = compile_sm90(rows_part.add_kernel, constants, types, aligned=("count",), num_warps=2).sass
    wait = sass.index("ACQBULK")
    assert (sass.index("PREEXIT") < wait) == stacked
    assert "LDG" not in sass[:wait], "nothing is read before the wait"
    assert sass.count("LDG.E.128") == 7


@compiles
@pytest.mark.parametrize("block", [16, 64])
def test_compiled_stream_kernel(block: int) -> None:
    constants = {"K": 5120, "STEPS": 40, "BN": 64, "BT": block, "BK": 128, "STAGES": 4 if block <= 32 else 3}
    types = {"x": "*bf16", "weight": "*bf16", "out": "*fp32"}
    options = {"num_warps": 4, "num_stages": 3}
    sass, _, binary = compile_sm90(stream_part.stream_kernel, constants, types, aligned=("x_row",), **options)
    assert sass.count(f"HGMMA.64x{block}x16.F32.BF16") >= 8
    assert "LDGSTS.E.BYPASS.LTC128B.128" in sass or "LDGSTS.E.BYPASS.128" in sass, "weights by cp.async"
    assert not re.findall(r"\b(?:STL|LDL)\b", sass), "spills"
    assert binary.metadata.shared <= 112 << 10, "two CTAs an SM"


@compiles
@pytest.mark.parametrize("two", [False, True])
def test_compiled_dots_kernel(two: bool) -> None:
    constants = {
        "K": 5120,
        "TWO": two,
        "GROUP": dots.TWO_ROWS_TILES if two else dots.ONE_ROW_TILES,
        "STACKED": True,
    }
    types = {"x": "*bf16", "weight": "*bf16", "out": "*fp32"}
    sass, usage, _ = compile_sm90(dots.dots_kernel, constants, types, aligned=("x_row",), num_warps=4)
    assert sass.index("PREEXIT") < sass.index("ACQBULK")
    early = sass[: sass.index("ACQBULK")].count("LDG.E.128")
    assert early == constants["GROUP"] * 4, "the weight is read before the wait for x, 16 bytes a lane"
    assert sass.count("LDG.E.128") == 50 + 10 * two
    assert not re.findall(r"\b(?:STL|LDL)\b", sass), "spills"
    assert int(re.search(r"REG:(\d+)", usage)[1]) <= 250, "two CTAs an SM"


# --- Parity ---------------------------------------------------------------------------------------


def poison() -> None:
    """What `torch.empty` will hand out next is full of NaN."""
    for size in (1 << 10, 1 << 16, 1 << 22, 1 << 25):
        torch.full((size,), torch.nan, device="cuda")


def check(got: Tensor, expected: Tensor, tolerance: float = ROW_TOLERANCE) -> Tensor:
    """Rows within tolerance; a row of the reference that is not finite may only be not finite."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    if got.numel() == 0:
        return got
    bad = ~expected.isfinite()
    assert not (got.isfinite() & bad).any(), "a value that cannot be finite is"
    assert got[~bad].isfinite().all(), (
        f"rows {(~got.isfinite() & ~bad).any(1).nonzero().flatten().tolist()[:8]}"
    )
    whole = ~bad.any(1)
    if whole.any():
        error = (got.double() - expected.double())[whole]
        norm = expected.double()[whole].norm(dim=1).clamp(min=1e-30)
        by_row = error.norm(dim=1) / norm
        wrong = (error.abs() > 0.1 * norm[:, None] / error.shape[1] ** 0.5).nonzero()
        assert by_row.max() <= tolerance, (
            f"row {by_row.argmax()} of {len(by_row)} is {by_row.max():.2e} off; {len(wrong)} of"
            f" {error.numel()} values are wrong, the first [row, column] {wrong[:12].tolist()}"
        )
    return got


@cache
def weights(n: int, k: int) -> tuple[Tensor, Tensor]:
    return fp8_weight(n, k, seed=n + k)


def rows_inside(rows: int, k: int, seed: int) -> Tensor:
    """Rows between NaN rows and NaN columns."""
    wide = torch.full((rows + 9, k + 64), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[:rows, :k] = bf16(rows, k, seed=seed)
    return wide[:rows, :k]


def fp8_case(rows: int, n: int, k: int, deterministic: bool = False, seed: int = 0) -> Tensor:
    weight, scale = weights(n, k)
    x = rows_inside(rows, k, seed)
    torch.cuda.synchronize()
    poison()
    got = kernel.linear_fp8(x, weight, scale, True, deterministic)
    tolerance = BLAS_TOLERANCE if rows > kernel.FEW_ROWS else ROW_TOLERANCE
    return check(got, reference.linear_fp8(x, weight, scale, True, deterministic), tolerance)


WAYS = {  # fused, parts, rows, live, splits, chunks: what each adds to the one before
    "ready rows": (False, 1, 16, 16, 1, 8),
    "64 ready rows": (False, 1, 64, 64, 1, 8),
    "x prepared in the kernel": (True, 1, 8, 8, 1, 8),
    "two live columns": (True, 1, 8, 2, 1, 8),
    "one live column": (True, 1, 8, 1, 1, 8),
    "splits": (True, 1, 8, 8, 4, 2),
    "two parts": (True, 2, 4, 8, 1, 4),
    "four parts": (True, 4, 2, 8, 1, 2),
    "eight parts": (True, 8, 1, 8, 1, 1),
}


@on_gpu
@pytest.mark.parametrize(
    ("name", "turned"),
    [*((n, False) for n in WAYS), *((n, True) for n in list(WAYS)[2:5]), ("four parts", True)],
)
def test_every_way(name: str, turned: bool) -> None:
    """One row and as many as fit, by a plan given by hand: the first failure names the part that is wrong."""
    groups = 2 if turned else 1
    weight, scale = weights(512, 1024)
    fused, parts, fit, live, splits, chunks = WAYS[name]
    way = kernel.Plan(fused, parts, fit, live, splits, chunks, 1)
    for rows in {1, min(fit, live)}:
        x, cos_sin = bf16(rows, groups * 1024, seed=rows), angles(rows, 64)
        torch.cuda.synchronize()
        poison()
        if turned:
            got = kernel.few_rows(x, (cos_sin, 128), weight, scale, 2, way)
            expected = reference.grouped_output(x.view(rows, 16, 128), cos_sin, weight, scale, 2, False)
        else:
            got = kernel.few_rows(x, None, weight, scale, 1, way)
            expected = reference.linear_fp8(x, weight, scale, True, False)
        check(got, expected)


@on_gpu
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 9, 17, 64, 127, 128, 129, 256, 257, 1000, 4096])
def test_rows(rows: int) -> None:
    """1792 x 5120: parts of K at one and two rows, splits of K beyond."""
    for seed in range(3 if rows <= 8 else 1):
        fp8_case(rows, 1792, 5120, seed=seed)


@on_gpu
@pytest.mark.parametrize(
    ("n", "k", "row_counts"),
    [
        (17024, 1280, (1, 2, 8, 20)),  # many tiles
        (5120, 8192, (1, 8, 33)),  # 16 chunks through a ring of five
        (5120, 2304, (2, 8, 40)),  # 18 chunks, 4.5 in a part
        (208, 416, (1, 8, 260)),  # rows and columns that fill no tile
        (48, 96, (2, 40)),
        (16, 32, (3,)),
    ],
)
def test_shapes(n: int, k: int, row_counts: tuple[int, ...]) -> None:
    for rows in row_counts:
        fp8_case(rows, n, k)


@on_gpu
@pytest.mark.parametrize("rows", [1, 2, 7, 40, 300])
def test_hostile_rows(rows: int) -> None:
    weight, scale = weights(1792, 5120)
    x = hostile_rows(5120, 160).cuda().repeat(-(-rows // 9) + 1, 1)
    for start in range(9) if rows == 1 else (0, 6):
        part = x[start : start + rows]
        got = kernel.linear_fp8(part, weight, scale, True, False)
        check(got, reference.linear_fp8(part, weight, scale, True, False), BLAS_TOLERANCE)


@on_gpu
def test_every_code_and_scale() -> None:
    """One-hot rows read the weight back: every finite code, under scales of the whole exact range."""
    weight, scale = weights(256, 512)
    weight, scale = weight.clone(), scale.clone()
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    codes[codes & 0x7F == 0x7F] = 0
    weight.view(torch.uint8)[:] = codes[(torch.arange(256)[:, None] * 7 + torch.arange(512)) % 256]
    scale[:] = (torch.arange(8 * 16) % 54 + 74).view(8, 16)
    wide = records.dequantise_fp8_weight(weight, scale).bfloat16()
    torch.cuda.synchronize()
    for rows in (1, 2, 8, 40):
        for first in range(0, 512, rows):
            hot = torch.zeros((rows, 512), dtype=torch.bfloat16, device="cuda")
            width = min(rows, 512 - first)
            hot[torch.arange(width), torch.arange(first, first + width)] = 1.0
            got = kernel.linear_fp8(hot, weight, scale, True, False)
            if not torch.equal(got[:width], wide[:, first : first + width].T):
                seen = [(wide == row[:, None]).sum(0).argmax().item() for row in got[:width]]
                pytest.fail(f"columns {first} .. at {rows} rows read back as columns {seen}")
            if rows == 1 and first > 130:
                break


def grouped_case(rows: int, groups: int = 8, out: int = 1024, heads: int = 64, dim: int = 512, rope: int = 64,
                 deterministic: bool = False):  # fmt: skip
    weight, scale = weights(groups * out, heads * dim // groups)
    o = rows_inside(rows, heads * dim, 1).unflatten(1, (heads, dim))
    cos_sin = angles(rows, rope)
    torch.cuda.synchronize()
    poison()
    got = kernel.grouped_output(o, cos_sin, weight, scale, groups, deterministic)
    expected = reference.grouped_output(o, cos_sin, weight, scale, groups, deterministic)
    return check(got, expected, BLAS_TOLERANCE if rows > kernel.FEW_ROWS else ROW_TOLERANCE)


@on_gpu
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 17, 64, 129, 1000])
def test_grouped_rows(rows: int) -> None:
    grouped_case(rows)


@on_gpu
@pytest.mark.parametrize("rows", [1, 2, 5, 40, 300])
def test_grouped_small(rows: int) -> None:
    """Heads that straddle chunks, groups that fill no tile, a K that is no multiple of a chunk."""
    grouped_case(rows, 2, 96, 4, 48, 16)
    if rows <= 2:
        grouped_case(rows, 4, 32, 8, 128, 128)


@on_gpu
@pytest.mark.parametrize("shape", [(1792, 5120), (5120, 2304)], ids=str)
def test_deterministic_row_alone_and_in_company(shape: tuple[int, int]) -> None:
    weight, scale = weights(*shape)
    x = bf16(300, shape[1], seed=5)
    together = kernel.linear_fp8(x, weight, scale, True, True)
    check(together, reference.linear_fp8(x, weight, scale, True, True))
    for rows in (slice(0, 128), slice(57, 58), slice(299, 300), slice(100, 103)):
        assert torch.equal(kernel.linear_fp8(x[rows], weight, scale, True, True), together[rows])


@on_gpu
def test_deterministic_heads_alone_and_in_company() -> None:
    weight, scale = weights(8192, 4096)
    o, cos_sin = bf16(128, 64, 512, seed=2), angles(128, 64)
    together = kernel.grouped_output(o, cos_sin, weight, scale, 8, True)
    check(together, reference.grouped_output(o, cos_sin, weight, scale, 8, True))
    for rows in (slice(57, 58), slice(120, 128)):
        alone = kernel.grouped_output(o[rows], cos_sin[rows], weight, scale, 8, True)
        assert torch.equal(alone, together[rows])


@on_gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 40])
def test_same_bits_every_time(rows: int) -> None:
    """A missing barrier or a stage refilled too early shows as a result that moves."""
    for shape in ((1792, 5120), (17024, 1280)):
        weight, scale = weights(*shape)
        x = bf16(rows, shape[1], seed=rows)
        first = kernel.linear_fp8(x, weight, scale, True, False)
        assert all(torch.equal(kernel.linear_fp8(x, weight, scale, True, False), first) for _ in range(30))


@on_gpu
@pytest.mark.parametrize("rows", [1, 8, 40, 300])
def test_graph_of_a_chain(rows: int) -> None:
    """Products that read each other, captured: programmatic launches must wait for their inputs."""
    first, second = weights(5120, 2304), weights(2304, 5120)
    x, other = bf16(rows, 5120, seed=1), bf16(rows, 5120, seed=2)

    def chain(value: Tensor) -> Tensor:
        for _ in range(3):
            hidden = kernel.linear_fp8(value, *second, True, False)
            value = kernel.linear_fp8(hidden, *first, True, False) * 2.0**-6
        return value

    def slowly(value: Tensor) -> Tensor:
        for _ in range(3):
            hidden = kernel.linear_fp8(value, *second, True, False)
            torch.cuda.synchronize()
            value = kernel.linear_fp8(hidden, *first, True, False) * 2.0**-6
            torch.cuda.synchronize()
        return value

    chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, slowly(x))
    x.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, slowly(other))


def outputs(rows: int) -> list[Tensor]:
    """Every plan of few rows, on the same inputs."""
    shapes = [(1792, 5120), (17024, 1280), (5120, 2304), (208, 416)]
    out = [kernel.linear_fp8(bf16(rows, k, seed=k), *weights(n, k), True, False) for n, k in shapes]
    for groups, columns, heads, dim, rope in ((8, 1024, 64, 512, 64), (2, 96, 4, 48, 16)):
        o, turn = bf16(rows, heads, dim, seed=7), angles(rows, rope)
        weight = weights(groups * columns, heads * dim // groups)
        out.append(kernel.grouped_output(o, turn, *weight, groups, False))
    return out


@on_gpu
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_switches_change_no_bit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plainest kernel, which `test_rows` and others hold to the reference as it is by default."""
    with monkeypatch.context() as patch:
        for name, value in BEFORE.items():
            patch.setattr(kernel, name, value)
        plain = outputs(rows)
    torch.cuda.synchronize()
    for switches in ({}, *SWITCHES):
        with monkeypatch.context() as patch:
            for name, value in switches.items():
                patch.setattr(kernel, name, value)
            poison()
            for index, (got, expected) in enumerate(zip(outputs(rows), plain, strict=True)):
                assert torch.equal(got, expected), f"output {index} under {switches}"


@on_gpu
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_graph_of_kernels_that_start_early(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing between the products, so that each starts before the one before its producer has ended; every
    buffer is one that an earlier product of the chain has read or written."""
    monkeypatch.setattr(kernel, "STACKED", True)
    monkeypatch.setattr("dsv41.ops.linear.triton_norm.STACKED", True)
    norm = torch.full((5120,), 0.5, dtype=torch.bfloat16, device="cuda")
    down, up, small = weights(2304, 5120), weights(5120, 2304), weights(48, 2304)
    x = bf16(rows, 5120, seed=1)

    def chain(wait: Callable[[], None]) -> tuple[Tensor, list[Tensor]]:
        value, seen = x, []
        for _ in range(4):
            hidden = kernel.linear_fp8(value, *down, True, False)
            wait()
            seen.append(kernel.linear_fp8(hidden, *small, True, False))
            wait()
            value = kernel.linear_fp8(hidden, *up, True, False)
            wait()
            value = kernel.rms_norm(value, norm, 1e-6)
            wait()
        return value, seen

    chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value, seen = chain(lambda: None)
    for seed in range(6):
        x.copy_(bf16(rows, 5120, seed=seed))
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        expected, kept = chain(torch.cuda.synchronize)
        assert torch.equal(value, expected)
        assert all(torch.equal(a, b) for a, b in zip(seen, kept, strict=True))


@on_gpu
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_graph_after_a_copy_and_on_two_streams(rows: int) -> None:
    """A programmatic launch right behind a copy, an event, and the end of a fork."""
    source, side = bf16(rows, 5120, seed=1), torch.cuda.Stream()
    first, second = weights(1792, 5120), fp8_weight(1792, 5120, seed=9)
    x = torch.zeros_like(source)

    def products(fork: bool) -> Tensor:
        x.copy_(source)
        if fork:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                b = kernel.linear_fp8(x, *second, True, False)
            a = kernel.linear_fp8(x, *first, True, False)
            torch.cuda.current_stream().wait_stream(side)
        else:
            a = kernel.linear_fp8(x, *first, True, False)
            b = kernel.linear_fp8(x, *second, True, False)
        c = kernel.linear_fp8(x, *second, True, False)
        return a - 2 * b + 4 * c

    products(False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = products(True)
    source.copy_(bf16(rows, 5120, seed=2))
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, products(False))


def bf16_case(rows: int, n: int, k: int, dtype: torch.dtype, deterministic: bool = False) -> Tensor:
    weight, x = bf16(n, k, seed=n), rows_inside(rows, k, 3)
    poison()
    got = kernel.linear(x, weight, dtype, deterministic)
    tolerance = FP32_TOLERANCE if dtype == torch.float32 else BLAS_TOLERANCE
    return check(got, reference.linear(x, weight, dtype, deterministic), tolerance)


@on_gpu
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 17, 64, 65, 129, 1000])
def test_bf16_rows(rows: int) -> None:
    bf16_case(rows, 1088, 5120, torch.float32)
    bf16_case(rows, 128, 512, torch.bfloat16)


@on_gpu
@pytest.mark.parametrize("rows", [1, 2, 5, 30, 100])
def test_bf16_shapes(rows: int) -> None:
    bf16_case(rows, 20000, 640, torch.float32)
    bf16_case(rows, 37, 200, torch.float32)
    bf16_case(rows, 513, 9000, torch.bfloat16)


@on_gpu
@pytest.mark.parametrize("shape", [(1088, 5120), (20000, 640)], ids=str)
def test_bf16_deterministic(shape: tuple[int, int]) -> None:
    weight, x = bf16(*shape), bf16(300, shape[1], seed=1)
    together = kernel.linear(x, weight, torch.float32, True)
    check(together, reference.linear(x, weight, torch.float32, True), FP32_TOLERANCE)
    for rows in (slice(0, 128), slice(57, 58), slice(299, 300)):
        assert torch.equal(kernel.linear(x[rows], weight, torch.float32, True), together[rows])
