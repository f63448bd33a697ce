"""The many-row expert products: index maps and decoding on any machine, the compiled object, results on SM90.

Tolerance. Products of codes and powers of two are exact in bf16 and summed in fp32; the reference sums in
float64 and rounds at the same places. What is left are values that lie next to a bf16 tie and move by an ulp,
and the e4m3 codes that some of those move. Prototypes of this arithmetic were up to 1.4e-4 of the output's
norm off; a row may be 2e-3 off, all rows together 4e-4.

A wrong index map or a wrong bit of a code is an error of order 1.
"""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from interpreted import (  # noqa: F401
    DEVICE,
    GPU,
    INTERPRETED,
    interpreted,
    repair_the_interpreter,
    run_interpreted,
)
from offline import compile_sm90
from torch import Tensor

from dsv41.ops import records
from dsv41.ops.arithmetic import exact_matmul
from dsv41.ops.moe import reference

triton = pytest.importorskip(
    "triton", reason="the kernel is written in Triton's Gluon: needs the package triton"
)
kernel = pytest.importorskip("dsv41.ops.moe.gluon_many")
registers = pytest.importorskip("dsv41.ops.moe.gluon_registers")
packing = pytest.importorskip("dsv41.ops.moe.gluon_pack")

LIMIT, TOP_K = 10.0, 6
# Of a pair's norm: another order of fp32 sums may choose another e4m3 code of a hidden value, an eighth off.
# That moves one pair in thousands (8e-3 at most on one H200, the same pair in every design), not all of them.
ROW_TOLERANCE, TOLERANCE = 2e-2, 4e-4
VARIANTS = {  # a design and arguments of its `multiply`, beside the defaults
    "default": (kernel, {}),
    "three stages": (kernel, {"ring": 3}),
    "late fence": (kernel, {"early_fence": False}),
    "registers": (registers, {"split": False}),
    "registers, split": (registers, {"split": True}),
}
KINDS = ("default", "late fence", "registers", "registers, split")  # which take every test of results


def on_gpu(test):
    for mark in (
        pytest.mark.gpu,
        pytest.mark.skipif(
            not GPU or torch.cuda.get_device_capability() != (9, 0), reason="needs one SM90 GPU"
        ),
    ):
        test = mark(test)
    return test


@pytest.mark.skipif(INTERPRETED or GPU, reason="this process runs the kernels itself")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


# --- Decoding -------------------------------------------------------------------------------------


def run_asm(source: str, *inputs: Tensor) -> list[Tensor]:
    """Executes the integer lines of `_decode_asm` on int64 words; `mul` as a product of bf16 pairs."""
    outputs = source.count("mul.rn.bf16x2")
    registers = {f"${outputs + n}": value for n, value in enumerate(inputs)}

    def value(name: str) -> Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 16))

    for line in source.splitlines():
        for statement in filter(None, (part.strip() for part in line.split(";"))):
            if statement[0] in "{}.":
                continue
            name, *arguments = re.split(r"[ ,]+", statement)
            target, a, *rest = arguments
            if name == "shl.b32":
                result = (registers[a] << int(rest[0])) & 0xFFFFFFFF
            elif name == "shr.u32":
                result = registers[a] >> int(rest[0])
            elif name == "and.b32":
                result = registers[a] & value(rest[0])
            elif name == "lop3.b32":
                assert rest[2] == "0xEA", "only (a & b) | c is used"
                result = (registers[a] & value(rest[0])) | registers[rest[1]]
            else:
                assert name == "mul.rn.bf16x2", f"unknown instruction {name}"
                halves = [
                    (bf16(registers[a] >> at & 0xFFFF) * bf16(registers[rest[0]] >> at & 0xFFFF))
                    for at in (0, 16)
                ]
                result = torch.stack([half.bfloat16() for half in halves], dim=-1)
            registers[target] = result
    return [registers[f"${n}"] for n in range(outputs)]


def bf16(bits: Tensor) -> Tensor:
    """int64 bits -> fp32 value."""
    return (bits << 16).to(torch.int32).view(torch.float32)


def factor(scale: Tensor) -> Tensor:
    """What `_factors` computes."""
    byte = scale.long().clamp(max=kernel.CLAMP.value)
    return (byte + kernel.BIAS.value) * 0x00800080


def test_every_byte_and_scale_decodes_exactly() -> None:
    """All code pairs of a byte, at every one of the four places, times every scale that bf16 can hold."""
    packed = torch.arange(256)
    low = (packed >> 7 << 3) | (packed >> 2 & 7)
    high = (packed >> 5 & 1) << 3 | (packed >> 4 & 4) | (packed & 3)
    other = 0xA5  # neighbours must not leak
    for place in range(4):
        word = sum((packed if i == place else torch.full_like(packed, other)) << 8 * i for i in range(4))
        for scale in (11, 12, 40, 100, 117, 120, 127, 128, 129, 135, kernel.TOP_SCALE):
            other_scale = torch.full_like(packed, 120)
            for row, codes in enumerate((low, high)):
                own = torch.full_like(packed, scale)
                scales = (own, other_scale) if row == 0 else (other_scale, own)
                pairs = run_asm(kernel._decode_asm(), word, factor(scales[0]), factor(scales[1]))
                got = pairs[2 * row + place % 2][:, place // 2].float()
                exact = records.e2m1_decode(codes).double() * 2.0 ** (scale - 127 - kernel.SHIFT)
                assert torch.equal(got.double(), exact), (place, scale, row)


def test_scales_beyond_the_range_are_loud() -> None:
    """A byte above the range makes infinities and NaN (0 times infinity), never a number."""
    packed = torch.arange(256)
    for scale in (kernel.TOP_SCALE + 1, 200, 255):
        own = factor(torch.full_like(packed, scale))
        for pair in run_asm(kernel._decode_asm(), packed, own, own):
            assert not pair[:, 0].isfinite().any()


# --- Index maps -----------------------------------------------------------------------------------


def weights_of(
    num_rows: int, columns: int, seed: int, scales: tuple[int, int] = (110, 125)
) -> tuple[Tensor, Tensor]:
    draw = torch.Generator(DEVICE).manual_seed(seed)
    packed = torch.randint(0, 256, (num_rows, columns // 2), generator=draw, device=DEVICE, dtype=torch.uint8)
    scale = torch.randint(
        *scales, (num_rows, columns // 32), generator=draw, device=DEVICE, dtype=torch.uint8
    )
    return packed, scale


def emulate_tile(
    words: Tensor, scales: Tensor, tile: int, step: int, num_columns: int, gated: bool
) -> Tensor:
    """What `_load` and `_put` leave in W [256, 64] for one step: the kernel's addresses and renamings."""
    band, g, t, c = (
        torch.arange(size).view([-1 if axis == own else 1 for axis in range(4)])
        for own, size in enumerate((16, 8, 4, 4))
    )
    tile64 = tile * 4 + (band >> 2)
    at = tile64 * (8 * num_columns) + (band & 3) * 512 + (g * 16 + t * 4 + c)
    at = at + (step >> 2) * 2048 + (step & 3) * 128
    scale_at = tile64 * (num_columns // 2) + (band & 3) * 32 + g * 4 + (step >> 2) * 128 + (step & 3)
    word, scale = words[at], scales[scale_at].expand_as(at)
    factors = [factor(scale >> ((c >> 1) * 8 + 8 * byte) & 0xFF) for byte in (0, 2)]
    a0, a1, b0, b1 = run_asm(kernel._decode_asm(), word, *factors)  # [16, 8, 4, 4, lane half of 32 bits]
    pairs = torch.stack((torch.stack((a0, a1), -2), torch.stack((b0, b1), -2)), -2)  # .., parity, half, 2
    pairs = pairs.view(4, 2, 2, 2, 2, 2, 4, 2, 2, 2, 2, 2).permute(*row_order(gated), 11)
    return pairs.reshape(256, 64).float()


def emulate_fragments(words: Tensor, scales: Tensor, tile: int, step: int, num_columns: int) -> Tensor:
    """What the registers' design multiplies by in one step, [256, 64]: its addresses and renamings."""
    band, lane = torch.arange(16)[:, None], torch.arange(128)[None, :]
    at = (tile * 4 + (band >> 2)) * (8 * num_columns) + (band & 3) * 512 + lane
    word = words[at + (step >> 2) * 2048 + (step & 3) * 128].view(16, 8, 4, 2, 2)
    g = torch.arange(8)[None, :]
    at = (tile * 4 + (band >> 2)) * (num_columns // 2) + (band & 3) * 32 + g * 4
    scale = scales[at + (step >> 2) * 128 + (step & 3)].view(16, 8, 1, 1)
    q = torch.arange(2).view(1, 1, 1, 2)
    f0, f1 = (factor(scale >> (q * 8 + 8 * byte) & 0xFF).expand(16, 8, 4, 2) for byte in (0, 2))
    pairs = run_asm(registers._decode_asm(), word[..., 0], word[..., 1], f0, f0, f1, f1)
    # [band, g, t, q, pair] by h, half, parity; the compiler sees join(low, high): .., parity, half, h
    value = torch.stack(pairs, -1).view(16, 8, 4, 2, 2, 2, 2, 2).permute(0, 1, 2, 3, 4, 7, 6, 5)
    return value.permute(0, 6, 1, 3, 7, 5, 2, 4).reshape(256, 64).float()


def row_order(gated: bool) -> tuple[int, ...]:
    order = kernel.row_order(gated)
    return tuple(getattr(order, "value", order))


@pytest.mark.skipif(GPU, reason="plain torch on the CPU")
@pytest.mark.parametrize("gated", [False, True])
def test_a_tile_holds_every_weight_once(gated: bool) -> None:
    """Packed bytes through the kernel's index algebra against the dequantised weight, row by row."""
    num_rows, columns = 512, 512
    packed, scale = weights_of(num_rows, columns, 3)
    release = records.dequantise_fp4_weight(packed, scale)
    words, scales = packed_by_formula(packed, scale)
    place = torch.tensor([kernel.row_place(row, gated) for row in range(64)])
    k_place = torch.tensor([32 * (k // 32) + kernel.k_place(k % 32) for k in range(64)])
    for tile in range(2):
        for step in range(columns // 64):
            got = emulate_tile(words, scales, tile, step, columns, gated)
            for tile64 in range(4):
                rows = release[(tile * 4 + tile64) * 64 :][:64, step * 64 : step * 64 + 64]
                own = got[tile64 * 64 : tile64 * 64 + 64][place][:, k_place] * 2.0**kernel.SHIFT
                assert torch.equal(own, rows), (tile, step, tile64)


@pytest.mark.skipif(GPU, reason="plain torch on the CPU")
def test_fragments_hold_every_weight_once() -> None:
    packed, scale = weights_of(512, 512, 3)
    release = records.dequantise_fp4_weight(packed, scale)
    words, scales = packed_by_formula(packed, scale)
    k_place = torch.tensor([32 * (k // 32) + registers.k_place(k % 32) for k in range(64)])
    for tile in range(2):
        for step in range(8):
            got = emulate_fragments(words, scales, tile, step, 512)[:, k_place] * 2.0**kernel.SHIFT
            expected = release[tile * 256 :][:256, step * 64 : step * 64 + 64]
            assert torch.equal(got, expected), (tile, step)


def interleaved(rows: Tensor) -> Tensor:
    """Gate rows, then up rows -> bands of 8 gate rows and the 8 up rows of the same intermediates."""
    return rows.view(2, -1, 8, rows.shape[1]).transpose(0, 1).reshape(rows.shape)


def packed_by_formula(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The packing as a slow independent formula -> int64 words and scale words, flat."""
    codes = records.unpack_nibbles(packed).long()
    num_rows, columns = codes.shape
    row, k = torch.meshgrid(torch.arange(num_rows), torch.arange(columns), indexing="ij")
    tile, band, half, g = row // 64, row // 16 % 4, row // 8 % 2, row % 8
    chunk, block, q, h, t, i = k // 256, k // 64 % 4, k // 32 % 2, k // 16 % 2, k // 4 % 4, k % 4
    at = (
        ((((tile * (columns // 256) + chunk) * 4 + band) * 4 + block) * 32 + g * 4 + t) * 16
        + q * 8
        + h * 4
        + i
    )
    own = torch.where(
        half == 0,
        (codes >> 3 << 7) | (codes & 7) << 2,
        (codes >> 3 << 5) | (codes >> 2 & 1) << 6 | codes & 3,
    )
    out = torch.zeros(num_rows * columns // 2, dtype=torch.long).index_add_(0, at.flatten(), own.flatten())
    row, group = torch.meshgrid(torch.arange(num_rows), torch.arange(columns // 32), indexing="ij")
    tile, band, half, g = row // 64, row // 16 % 4, row // 8 % 2, row % 8
    chunk, pair, parity = group // 8, group // 2 % 4, group % 2
    at = ((((tile * (columns // 256) + chunk) * 4 + band) * 8 + g) * 4 + pair) * 4 + half * 2 + parity
    scales = torch.zeros(scale.numel(), dtype=torch.long).index_add_(0, at.flatten(), scale.long().flatten())
    shifts = torch.tensor([0, 8, 16, 24])
    return (out.view(-1, 4) << shifts).sum(-1), (scales.view(-1, 4) << shifts).sum(-1)


@pytest.mark.skipif(GPU, reason="plain torch on the CPU")
def test_the_packing_is_the_one_read() -> None:
    """gluon_pack writes what this kernel's addresses mean."""
    gate_up, gate_up_scale = weights_of(512, 512, 5)
    down, down_scale = weights_of(512, 256, 6)
    expected = (
        packed_by_formula(interleaved(gate_up), interleaved(gate_up_scale)),
        packed_by_formula(down, down_scale),
    )
    tensors = [tensor[None].clone() for tensor in (gate_up, gate_up_scale, down, down_scale)]
    packing.pack(*tensors)
    for (words, scales), w, s in zip(expected, tensors[::2], tensors[1::2], strict=True):
        assert torch.equal(w.flatten().view(torch.int32).long() & 0xFFFFFFFF, words)
        assert torch.equal(s.flatten().view(torch.int32).long() & 0xFFFFFFFF, scales)


@pytest.mark.skipif(GPU, reason="plain torch on the CPU")
def test_columns_of_the_accumulator() -> None:
    """The epilogues' renamings: hidden rows in the K order of the next product, outputs in natural order."""
    place = torch.tensor([64 * (row // 64) + kernel.row_place(row % 64, True) for row in range(256)])
    acc = torch.full((256,), -1)
    acc[place] = torch.arange(256)  # which weight row a column of the accumulator belongs to
    halves = acc.view(4, 2, 2, 2, 4, 2).permute(0, 1, 2, 4, 5, 3)
    gate, up = halves[..., 0], halves[..., 1]
    hidden = gate.permute(0, 3, 1, 4, 2).flatten()
    assert torch.equal(up - gate, torch.full_like(gate, 8)), "a lane's gate and up are of the same unit"
    unit = hidden // 16 * 8 + hidden % 16  # natural intermediate of every stored column
    expected = torch.empty(128, dtype=torch.long)
    for u in range(128):
        expected[32 * (u // 32) + kernel.k_place(u % 32)] = u
    assert torch.equal(unit, expected)

    place = torch.tensor([64 * (row // 64) + kernel.row_place(row % 64, False) for row in range(256)])
    acc[place] = torch.arange(256)
    assert torch.equal(acc.view(4, 2, 2, 2, 4, 2).permute(0, 1, 4, 2, 3, 5).flatten(), torch.arange(256))


@pytest.mark.parametrize("gated", [False, True])
def test_lanes_store_to_different_banks(gated: bool) -> None:
    """Every store phase of eight lanes meets the eight 16-byte bank groups of the 128-byte swizzle."""
    layout = kernel.words_layout(8)
    layout = getattr(layout, "value", layout)
    for own in [*layout.reg_bases[2:], [0, 0, 0, 0]]:
        for half in range(2):
            for q in range(2):
                for phase in range(4):
                    groups = set()
                    for lane in range(8 * phase, 8 * phase + 8):
                        band, g, t, _ = (
                            own[axis] ^ sum(b[axis] for n, b in enumerate(layout.lane_bases) if lane >> n & 1)
                            for axis in range(4)
                        )
                        row = kernel.row_place(16 * (band % 4) + 8 * half + g, gated)
                        groups.add((t + 4 * q) ^ (row % 8))
                    assert len(groups) == 8


# --- Rows -----------------------------------------------------------------------------------------


def hostile_rows(rows: int, hidden: int, seed: int) -> Tensor:
    draw = torch.Generator(DEVICE).manual_seed(seed)
    octaves = torch.randint(-30, 30, (rows, hidden // 32, 1), generator=draw, device=DEVICE)
    x = torch.randn((rows, hidden // 32, 32), generator=draw, device=DEVICE) * torch.exp2(octaves.float())
    x[0, 0] = 0.0
    x[1 % rows, 1] = 3e38
    x[2 % rows, 2, 5] = torch.nan
    x[3 % rows, 3, 7] = torch.inf
    x[4 % rows, 4] = torch.arange(32, device=DEVICE) * 2.0**-9 * 0.5
    x[5 % rows, 5] = torch.arange(32, device=DEVICE) * 1e-6
    return x.flatten(1).bfloat16()


@pytest.mark.parametrize("variant", ["default", "registers"])
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.skipif(not (INTERPRETED or GPU), reason="runs in the interpreter or on a GPU")
def test_quantised_rows_equal_the_record(rows: int, variant: str) -> None:
    design = VARIANTS[variant][0]
    hidden = 1280  # one program and a quarter
    wide = torch.full((max(rows, 1), hidden + 8), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    x = wide[:rows, :hidden]
    x.copy_(hostile_rows(max(rows, 1), hidden, rows)[:rows])
    got = design.quantise_rows(x)
    place = torch.tensor([32 * (k // 32) + design.k_place(k % 32) for k in range(hidden)], device=DEVICE)
    expected = records.round_trip(x, "fp8_32")
    same = (got[:, place].view(torch.int16) == expected.view(torch.int16)) | expected.isnan()
    assert same.all()
    assert torch.equal(got[:, place].isnan(), expected.isnan())


@pytest.mark.parametrize(("hidden", "width"), [(128, 256), (256, 96), (0, 256), (512, 2240)])
def test_refuses_sizes(hidden: int, width: int) -> None:
    with pytest.raises(ValueError, match="256 divides"):
        kernel.check_shapes(hidden, width)


def test_refuses_other_dtypes() -> None:
    with pytest.raises(ValueError, match="bf16"):
        kernel.run_many(torch.zeros(1, 256), *[None] * 7)


# --- The compiled object --------------------------------------------------------------------------


@cache
def compiled(gated: bool, design: object, columns: int = 0) -> tuple[str, str]:
    """-> (SASS, resource usage), compiled for sm_90 without a GPU; `columns` of the registers' design."""
    k, n = (5120, 4608) if gated else (2304, 5120)
    types = {"x": "*bf16", "w": "*u8", "scale": "*u8", "out": "*bf16", "weights": "*fp32", "limit": "fp32"}
    options = {"num_warps": 8}
    if columns:
        constants = registers.specialisation(k, n, gated, TOP_K, columns, split=columns == 64)
        options["maxnreg"] = registers.registers(columns)
    else:
        constants = kernel.specialisation(k, n, gated, TOP_K)
    return compile_sm90(design._experts, constants, types, other="*i32", **options)[:2]


def resources(usage: str) -> tuple[int, int]:
    return tuple(int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("gated", [True, False])
def test_compiled_object(gated: bool) -> None:
    sass, usage = compiled(gated, kernel)
    # 4 steps of 16: 64 rows take one product of 128 columns, 128 rows two.
    assert sass.count("HGMMA.64x128x16.F32.BF16") == 12
    assert "HMMA" not in sass.replace("HGMMA", ""), "some product runs on the old tensor instructions"
    assert sass.count("WARPGROUP.DEPBAR") == 4, "products are serialised"
    assert sass.count("STS.128") == 16, "a decoded chunk is not one store"
    assert sass.count("HMUL2.BF16") == 4 * 16  # a thread's words of the two steps of its loop
    assert len(re.findall(r"LDGSTS\.E\.BYPASS\.128", sass)) == 8
    assert "STG.E.U16" not in sass, "outputs leave two bytes at a time"
    taken, stack = resources(usage)
    assert taken == 128  # what 16 warps share; setmaxnreg moves the rest
    assert stack <= 32, f"{stack} bytes of stack: sums or words are spilled"
    assert not loop_spills(sass, "HGMMA"), "the consumers' loop spills"
    assert len(loop_spills(sass, "LDGSTS")) <= 2, "the producers' loop spills"


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("gated", [True, False])
def test_compiled_object_of_the_registers(gated: bool, columns: int) -> None:
    sass, usage = compiled(gated, registers, columns)
    wide = columns == 128
    assert sass.count(f"HGMMA.64x{columns}x16.F32.BF16") == (16 if wide else 8)
    assert sass.count("WARPGROUP.DEPBAR") == (3 if wide else 1), "products are serialised"
    assert sass.count("STG") == sass.count("STG.E.128"), "an output is not stored 16 bytes at a time"
    taken, stack = resources(usage)
    assert taken <= registers.registers(columns)
    assert stack == 0
    assert not re.search(r"\b(STL|LDL)\b", sass)


def loop_spills(sass: str, instruction: str) -> list[str]:
    """Spills inside the innermost loops that hold an instruction."""
    lines = sass.splitlines()
    labels = {m[1]: n for n, line in enumerate(lines) if (m := re.match(r"\s*(\.L_x_\d+):", line))}
    jumps = {n: re.search(r"BRA `\((\.L_x_\d+)\)", line) for n, line in enumerate(lines)}
    loops = [(labels[to[1]], n) for n, to in jumps.items() if to and labels.get(to[1], n) < n]
    inner = set()
    for n, line in enumerate(lines):
        around = [loop for loop in loops if loop[0] < n < loop[1]] if instruction in line else []
        inner |= {min(around, key=lambda loop: loop[1] - loop[0])} if around else set()
    assert inner, f"no loop holds {instruction}"
    return [line for start, end in inner for line in lines[start:end] if re.search(r"\b(STL|LDL)\b", line)]


# --- Parity ---------------------------------------------------------------------------------------


class Layer:
    """Release weights of one layer, and the same bytes as the kernel reads them."""

    def __init__(self, experts: int, hidden: int, width: int, seed: int) -> None:
        draw = torch.Generator("cuda").manual_seed(seed)

        def bytes_of(*shape: int, low: int = 0, high: int = 256) -> Tensor:
            return torch.randint(low, high, shape, generator=draw, device="cuda", dtype=torch.uint8)

        # Scales keep gate and up around 1, so that the clamp, the silu and their tails are all met.
        middle = 127 - round(0.5 * torch.tensor(9.0 * hidden).log2().item())
        self.release = (
            bytes_of(experts, 2 * width, hidden // 2),
            bytes_of(experts, 2 * width, hidden // 32, low=middle - 2, high=middle + 3),
            bytes_of(experts, hidden, width // 2),
            bytes_of(experts, hidden, width // 32, low=112, high=122),
        )
        self.packed = tuple(tensor.clone() for tensor in self.release)
        packing.pack(*self.packed)
        self.experts, self.hidden, self.width = experts, hidden, width


@cache
def layer(name: str) -> Layer:
    sizes = {"small": (8, 512, 256), "odd": (5, 768, 1280), "release": (4, 5120, 2304)}
    return Layer(*sizes[name], seed=1)


def groups_of(ids: Tensor, experts: int) -> SimpleNamespace:
    """What triton_group.group gives, on the host; everything that is undefined is hostile."""
    flat = ids.flatten().cpu()
    keys = torch.where(flat < 0, experts, flat.long())
    order = keys.sort(stable=True).indices.to(torch.int32)
    counts = keys.bincount(minlength=experts + 1)[:experts].tolist()
    slots, start = [], 0
    for expert, count in enumerate(counts):
        slots += [(expert, start + at, min(kernel.CHUNK, count - at)) for at in range(0, count, kernel.CHUNK)]
        start += count
    order[start:] = 2**30
    hostile = [(2**30, 2**30, 2**30)] * (flat.numel() // kernel.CHUNK + experts + 1 - len(slots))
    columns = torch.tensor(slots + hostile, dtype=torch.int32).T.contiguous().cuda()
    return SimpleNamespace(
        order=order.cuda(),
        offsets=None,
        slot_expert=columns[0],
        slot_start=columns[1],
        slot_count=columns[2],
        num_slots=torch.tensor([len(slots)], dtype=torch.int32, device="cuda"),
    )


def routing(rows: int, experts: int, top_k: int, seed: int, padding: bool = True) -> tuple[Tensor, Tensor]:
    """Distinct experts a row, the first ones preferred, some rows without any."""
    draw = torch.Generator("cuda").manual_seed(seed)
    score = torch.rand((rows, experts), generator=draw, device="cuda")
    score[:, : experts // 2] += 0.2
    ids = score.topk(top_k, dim=1).indices.to(torch.int32)
    weights = torch.rand((rows, top_k), generator=draw, device="cuda") * 2
    if padding:
        ids[rows // 3 :: 7] = -1
    return ids, weights


def values(rows: int, hidden: int, seed: int) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    octaves = (
        torch.randint(-2, 3, (rows, hidden // 32), generator=draw, device="cuda")
        .float()
        .repeat_interleave(32, 1)
    )
    return (torch.randn((rows, hidden), generator=draw, device="cuda") * torch.exp2(octaves)).bfloat16()


def expected_pairs(x: Tensor, ids: Tensor, weights: Tensor, own: Layer) -> Tensor:
    """The reference's experts, a row per pair."""
    gate_up, gate_up_scale, down, down_scale = own.release
    out = torch.zeros((ids.numel(), own.hidden), dtype=x.dtype, device=x.device)
    for expert in range(own.experts):
        rows, choice = (ids == expert).nonzero(as_tuple=True)
        if len(rows):
            weight = records.dequantise_fp4_weight(gate_up[expert], gate_up_scale[expert])
            both = exact_matmul(records.round_trip(x[rows], "fp8_32"), weight).to(x.dtype)
            hidden = records.round_trip(reference._gated(both, weights[rows, choice], LIMIT), "fp8_32")
            weight = records.dequantise_fp4_weight(down[expert], down_scale[expert])
            out[rows * ids.shape[1] + choice] = exact_matmul(hidden, weight).to(x.dtype)
    return out


def run(x: Tensor, ids: Tensor, weights: Tensor, own: Layer, variant: str = "") -> Tensor:
    """A variant's two products, or `run_many`."""
    poison = torch.full((1 << 26,), torch.nan, device="cuda", dtype=torch.bfloat16)
    del poison  # the workspaces below are likely made of it
    groups = groups_of(ids, own.experts)
    if not variant:
        return kernel.run_many(x, groups, weights, *own.packed, LIMIT)
    design, options = VARIANTS[variant]
    hidden = design.multiply(design.quantise_rows(x), groups, weights, *own.packed[:2], LIMIT, **options)
    return design.multiply(hidden, groups, weights, *own.packed[2:], None, **options)


def check(x: Tensor, ids: Tensor, weights: Tensor, own: Layer, variant: str = "") -> Tensor:
    """Kernel first; every live pair's row within tolerance, and all of them together."""
    got = run(x, ids, weights, own, variant)
    expected = expected_pairs(x, ids, weights, own)
    live = (ids >= 0).flatten()
    assert got.shape == expected.shape
    if not live.any():
        return got
    got_live, expected = got[live].double(), expected[live].double()
    assert not got_live.isnan().any(), "NaN from a byte that no live row owns"
    error = (got_live - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    total = (got_live - expected).norm() / expected.norm()
    assert error.max() <= ROW_TOLERANCE, f"pair {error.argmax()} is {error.max():.2e} off, all {total:.2e}"
    assert total <= TOLERANCE, f"all rows are {total:.2e} off"
    return got


@on_gpu
@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("gated", [True, False], ids=["gate_up", "down"])
def test_one_product_of_unit_rows(gated: bool, variant: str) -> None:
    """A row that is 1 in one column reads that column of the weight: each index map on its own. The first
    test to look at when others fail."""
    own, (design, options) = layer("small"), VARIANTS[variant]
    rows = own.hidden if gated else own.width
    eye = torch.eye(rows, device="cuda").bfloat16()
    place = torch.tensor([32 * (k // 32) + design.k_place(k % 32) for k in range(rows)], device="cuda")
    ids = torch.full((rows, 1), 3, dtype=torch.int32, device="cuda")
    weights = torch.ones((rows, 1), device="cuda")
    groups = groups_of(ids, own.experts)
    x = torch.empty_like(eye)
    x[:, place] = eye
    if gated:
        got = design.multiply(x, groups, weights, *own.packed[:2], LIMIT, **options)
        weight = records.dequantise_fp4_weight(own.release[0][3], own.release[1][3]).T.bfloat16()
        expected = records.round_trip(reference._gated(weight, weights[:, 0], LIMIT), "fp8_32")
        place = torch.tensor(
            [32 * (k // 32) + design.k_place(k % 32) for k in range(own.width)], device="cuda"
        )
        torch.testing.assert_close(got[:, place], expected, rtol=0.13, atol=1e-6)  # one e4m3 step
        assert (got[:, place] == expected).float().mean() > 0.99
    else:
        got = design.multiply(x, groups, weights, *own.packed[2:], None, **options)
        weight = records.dequantise_fp4_weight(own.release[2][3], own.release[3][3]).T.bfloat16()
        assert torch.equal(got, weight)


@on_gpu
@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 17, 64, 127, 128, 129, 1000])
def test_rows(rows: int, variant: str) -> None:
    own = layer("small")
    for seed in range(3 if rows <= 8 else 1):
        check(values(rows, own.hidden, seed), *routing(rows, own.experts, TOP_K, seed), own, variant)


@on_gpu
@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize(("name", "top_k"), [("odd", 3), ("release", 3)])
@pytest.mark.parametrize("rows", [3, 200])
def test_sizes(name: str, top_k: int, rows: int, variant: str) -> None:
    own = layer(name)
    check(values(rows, own.hidden, 2), *routing(rows, own.experts, top_k, 2), own, variant)


@on_gpu
@pytest.mark.parametrize("variant", KINDS)
def test_many_rows_at_the_release_size(variant: str) -> None:
    own = layer("release")
    check(values(4096, own.hidden, 7), *routing(4096, own.experts, 3, 7), own, variant)


@on_gpu
@pytest.mark.parametrize("variant", list(VARIANTS)[1:])
def test_variants_agree_bit_for_bit(variant: str) -> None:
    """With the first of the same design: another design adds the products of 16 columns in another order."""
    own = layer("odd")
    x, (ids, weights) = values(700, own.hidden, 4), routing(700, own.experts, 3, 4)
    live = (ids >= 0).flatten()
    first = next(name for name in VARIANTS if VARIANTS[name][0] is VARIANTS[variant][0])
    assert torch.equal(check(x, ids, weights, own, variant)[live], run(x, ids, weights, own, first)[live])


@on_gpu
@pytest.mark.parametrize("variant", KINDS)
def test_a_row_alone_and_in_company(variant: str) -> None:
    """Bit equality over batch sizes, places in a slot, and slots of at most 64 and of more rows."""
    own = layer("small")
    x, (ids, weights) = values(300, own.hidden, 5), routing(300, own.experts, TOP_K, 5, padding=False)
    together = check(x, ids, weights, own, variant).view(300, TOP_K, -1)
    for rows in (slice(0, 128), slice(57, 58), slice(299, 300), slice(100, 103), slice(20, 85)):
        assert torch.equal(
            run(x[rows], ids[rows], weights[rows], own, variant).view(-1, TOP_K, own.hidden), together[rows]
        )
    shuffled = torch.randperm(300, device="cuda")
    again = run(x[shuffled], ids[shuffled], weights[shuffled], own, variant).view(300, TOP_K, -1)
    assert torch.equal(again, together[shuffled])


@on_gpu
@pytest.mark.parametrize("variant", KINDS)
def test_a_bad_row_stays_in_its_row(variant: str) -> None:
    own = layer("small")
    x, (ids, weights) = values(150, own.hidden, 6), routing(150, own.experts, TOP_K, 6, padding=False)
    clean = run(x, ids, weights, own, variant).view(150, TOP_K, -1)
    bad = x.clone()
    bad[17, 40], bad[90, 3] = torch.nan, torch.inf
    got = run(bad, ids, weights, own, variant).view(150, TOP_K, -1)
    others = torch.ones(150, dtype=torch.bool, device="cuda")
    others[[17, 90]] = False
    assert torch.equal(got[others], clean[others])
    assert got[~others].isnan().all()


@on_gpu
def test_views() -> None:
    own = layer("small")
    wide = values(40, own.hidden + 64, 8)
    x, (ids, weights) = wide[:, 32 : own.hidden + 32], routing(40, own.experts, TOP_K, 8)
    room = torch.full((40, TOP_K + 2), torch.nan, device="cuda")
    room[:, 1 : TOP_K + 1] = weights
    check(x, ids, room[:, 1 : TOP_K + 1], own)
    check(x.T.contiguous().T, ids, weights, own)


@on_gpu
@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("rows", [3, 500])
def test_same_bits_every_time(rows: int, variant: str) -> None:
    own = layer("small")
    x, (ids, weights) = values(rows, own.hidden, 9), routing(rows, own.experts, TOP_K, 9, padding=False)
    first = run(x, ids, weights, own, variant)
    assert all(torch.equal(run(x, ids, weights, own, variant), first) for _ in range(20))


@on_gpu
@pytest.mark.parametrize("rows", [2, 300])
def test_graph_reads_rows_and_groups_anew(rows: int) -> None:
    own = layer("small")
    x, (ids, weights) = values(rows, own.hidden, 10), routing(rows, own.experts, TOP_K, 10, padding=False)
    other_x, (other_ids, other_weights) = (
        values(rows, own.hidden, 11),
        routing(rows, own.experts, TOP_K, 11, False),
    )
    groups, other = groups_of(ids, own.experts), groups_of(other_ids, own.experts)
    kernel.run_many(x, groups, weights, *own.packed, LIMIT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.run_many(x, groups, weights, *own.packed, LIMIT)
    x.copy_(other_x)
    weights.copy_(other_weights)
    for name in ("order", "slot_expert", "slot_start", "slot_count", "num_slots"):
        getattr(groups, name).copy_(getattr(other, name))
    graph.replay()
    assert torch.equal(out, run(other_x, other_ids, other_weights, own))
