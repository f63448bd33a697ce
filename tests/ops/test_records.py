"""Byte formats against the release's recorded codes, a nearest-value oracle and hand-made byte maps."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from dsv41.ops import records

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
PACKED = (
    "scaled_528",
    "scaled_528_split",
    "nvfp4_288",
    "nvfp4_288_split",
    "mixed_584",
    "fp8_132",
    "mxfp4_68",
)
ROWS = ("rows_bf16", "rows_fp32", "rows_fp8")
TRAINED_KINDS = ("fp8_32", "mxfp4_32", "nvfp4_16")
KINDS = (*TRAINED_KINDS, "fp8_64", "fp8_row", "fp8_unit", "none")
# record, width, rope width, bytes of a state: the released widths
RELEASED = (
    *((name, 512, 64, int(name.split("_")[1])) for name in PACKED[:5]),
    ("fp8_132", 128, 64, 132),
    ("mxfp4_68", 128, 64, 68),
    ("rows_bf16", 512, 64, 1024),
    ("rows_fp32", 512, 64, 2048),
    ("rows_fp8", 512, 64, 512),
)


def units(name: str) -> dict[str, Tensor]:
    return load_file(SHARED / "golden" / "units" / f"{name}.safetensors")


def bits(x: Tensor) -> Tensor:
    """Equality on bits tells -0 from 0 and compares NaN."""
    return x.contiguous().view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def seeded(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    """bf16 values whose blocks differ in magnitude by several octaves."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    octaves = torch.randn((*shape[:-1], 1), generator=generator) * spread
    return (values * torch.exp2(octaves)).to(torch.bfloat16)


# ------------------------------------------------------------------------------------------ golden data


@pytest.mark.parametrize("case", ["random", "heavy", "edges"])
def test_fp8_equals_the_release(case: str) -> None:
    golden = {key.split(".")[1]: value for key, value in units("act_quant").items() if key.startswith(case)}
    codes, scale = records.quantise_fp8(golden["x"])
    assert same_bits(codes, golden["q"])
    assert torch.equal(scale, golden["s"].view(torch.uint8))
    assert same_bits(records.round_trip(golden["x"], "fp8_32"), golden["dequant_bf16"])


@pytest.mark.parametrize("case", ["random", "heavy", "edges"])
@pytest.mark.parametrize(("unit", "kind"), [("e8m0_32", "mxfp4_32"), ("e4m3_16", "nvfp4_16")])
def test_fp4_equals_the_release(unit: str, kind: str, case: str) -> None:
    prefix = f"{unit}.{case}."
    golden = {k.removeprefix(prefix): v for k, v in units("fp4_act_quant").items() if k.startswith(prefix)}
    quantise = {"mxfp4_32": records.quantise_mxfp4, "nvfp4_16": records.quantise_nvfp4}[kind]
    codes, scale = quantise(golden["x"])
    assert torch.equal(records.pack_nibbles(codes), golden["packed"])
    assert torch.equal(scale, golden["s"].view(torch.uint8))
    assert same_bits(records.round_trip(golden["x"], kind), golden["dequant_bf16"])


def test_decode_tables_equal_the_release() -> None:
    golden = units("gemm")
    assert same_bits(records.e8m0_decode(golden["e8m0.all_codes"]), golden["e8m0.all_values"])
    pairs = records.e2m1_decode(records.unpack_nibbles(golden["fp4.all_codes_packed"]))
    assert same_bits(pairs, golden["fp4.all_codes_values"])
    finite = ~golden["fp8.all_values"].isnan()
    unit_scale = torch.full((256, 1), 127, dtype=torch.uint8)
    values = records.dequantise_fp8(golden["fp8.all_codes"].view(records.E4M3)[:, None], unit_scale, 1)[:, 0]
    assert same_bits(values[finite], golden["fp8.all_values"][finite])
    assert values.isnan().equal(~finite)


@pytest.mark.parametrize("case", ["a", "b", "c"])
@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_weights_multiply_to_the_release_product(form: str, case: str) -> None:
    prefix = f"{form}.{case}."
    golden = {k.removeprefix(prefix): v for k, v in units("gemm").items() if k.startswith(prefix)}
    decode = {"fp8": records.dequantise_fp8_weight, "fp4": records.dequantise_fp4_weight}[form]
    weight = decode(golden["w"], golden["w_scale"].view(torch.uint8))
    product = records.round_trip(golden["x"], "fp8_32").double() @ weight.double().T
    torch.testing.assert_close(product, golden["y_fp64"], rtol=1e-12, atol=1e-12 * product.abs().max().item())


def test_real_checkpoint_sample() -> None:
    sample = json.loads((SHARED / "spec" / "data" / "golden.json").read_text())["fp8_block_sample"]
    codes = torch.tensor(list(bytes.fromhex(sample["weight_hex"]))[:8], dtype=torch.uint8).view(records.E4M3)
    weight = records.dequantise_fp8_weight(codes[None], torch.tensor([[0x73]], dtype=torch.uint8))
    assert weight[0].tolist() == sample["first8_decoded"]


# ----------------------------------------------------------------------------------------------- scalars


def test_fp32_reciprocals_are_rounded_once() -> None:
    assert torch.tensor(1 / 448, dtype=torch.float32).item() == records.FP32_RECIPROCAL_448
    assert torch.tensor(1 / 6, dtype=torch.float32).item() == records.FP32_RECIPROCAL_6


def test_e8m0_ends() -> None:
    scale = torch.tensor([0, 1, 120, 127, 254, 255], dtype=torch.uint8)
    values = records.e8m0_decode(scale).tolist()
    assert values[:-1] == [2.0**-127, 2.0**-126, 2.0**-7, 1.0, 2.0**127]
    assert math.isnan(values[-1])


@pytest.mark.parametrize("scale_byte", [0, 1, 120, 127, 254])
def test_weight_scales_reach_both_ends(scale_byte: int) -> None:
    """Decoding 2^-127 through exp2 or a flushed subnormal would give 0."""
    scale = torch.full((1, 1), scale_byte, dtype=torch.uint8)
    factor = math.ldexp(1.0, scale_byte - 127)
    fp8 = records.dequantise_fp8_weight(torch.tensor([[0.5, -1.75]]).to(records.E4M3), scale)
    assert fp8.tolist() == [[0.5 * factor, -1.75 * factor]]
    packed = torch.full((1, 16), 0x91, dtype=torch.uint8)  # low nibble 1 = 0.5, high nibble 9 = -0.5
    assert records.dequantise_fp4_weight(packed, scale).tolist() == [[0.5 * factor, -0.5 * factor] * 16]


def test_ragged_weight_edges_take_the_last_scale() -> None:
    weight = torch.ones(33, 70).to(records.E4M3)
    scale = torch.tensor([[127, 128, 129], [130, 131, 132]], dtype=torch.uint8)
    decoded = records.dequantise_fp8_weight(weight, scale)
    assert [decoded[r, c].item() for r, c in ((0, 31), (31, 32), (0, 69), (32, 31), (32, 69))] == [
        1,
        2,
        4,
        8,
        32,
    ]
    stacked = torch.full((2, 3, 16), 0x22, dtype=torch.uint8)  # experts
    scales = torch.arange(127, 133, dtype=torch.uint8).view(2, 3, 1)
    assert records.dequantise_fp4_weight(stacked, scales)[1, 2].tolist() == [32.0] * 32


@given(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32))
def test_pow2_exponent_is_the_ceiling(value: float) -> None:
    exponent = int(records.pow2_ceil_exponent(torch.tensor([value])).item())
    assert math.ldexp(1.0, exponent - 1) < value <= math.ldexp(1.0, exponent)


def nearest_code(values: Tensor, table: list[float]) -> Tensor:
    """Brute force in float64: the nearest non-negative table entry, ties to the even code, saturating."""
    distance = (values.abs().double()[:, None] - torch.tensor(table, dtype=torch.float64)).abs()
    tie_penalty = (torch.arange(len(table)) % 2).double()
    nearest = distance == distance.amin(1, keepdim=True)
    return torch.where(nearest, tie_penalty, torch.inf).argmin(1)


def probes(table: list[float]) -> Tensor:
    """Every entry, every midpoint, their fp32 neighbours, and random values, with both signs."""
    entries = torch.tensor(table)
    points = torch.cat([entries, (entries[1:] + entries[:-1]) / 2])
    around = torch.cat([points, *(points.nextafter(torch.tensor(way)) for way in (torch.inf, -torch.inf))])
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(4000, generator=generator) * table[-1] * 1.1
    small = torch.exp2(-14 * torch.rand(4000, generator=generator))
    positive = torch.cat([around.abs(), uniform, small])
    return torch.cat([positive, -positive])


def test_e2m1_is_the_nearest_value() -> None:
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6.0]
    x = torch.cat([probes(table), torch.tensor([1e30, -1e30, torch.inf, -torch.inf])])
    code = records.e2m1_encode(x).long()
    expected = nearest_code(x.clamp(-6, 6), table)
    assert torch.equal(code & 7, expected)
    assert torch.equal(code >> 3, x.signbit().long())
    assert same_bits(records.e2m1_decode(code.to(torch.uint8)), torch.tensor(table)[expected].copysign(x))
    # Negative proof: the oracle tells ties-to-even from ties-away.
    assert not torch.equal(expected, nearest_code((x * (1 + 2**-20)).clamp(-6, 6), table))


def test_e4m3_is_the_nearest_value() -> None:
    table = torch.arange(127, dtype=torch.uint8).view(records.E4M3).float().tolist()
    x = probes(table).clamp(-448, 448)
    block = torch.cat([x[:, None], torch.full((len(x), 1), 448.0)], dim=1)  # 448 makes the scale 1
    codes, scale = records.quantise_fp8(block, block=2)
    assert scale.unique().tolist() == [127]
    code = codes.view(torch.uint8)[:, 0].long()
    assert torch.equal(code & 127, nearest_code(x, table))
    assert torch.equal(code >> 7, x.signbit().long())


def test_nibble_order() -> None:
    codes = torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)
    assert records.pack_nibbles(codes).tolist() == [[0x21, 0x8F]]
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(records.pack_nibbles(records.unpack_nibbles(every)), every)
    assert torch.equal(records.unpack_nibbles(every.view(torch.int8)), records.unpack_nibbles(every))


# ------------------------------------------------------------------------------------------------ blocks


def test_floors_ties_and_saturation() -> None:
    zeros = torch.zeros(1, 32)
    assert records.quantise_fp8(zeros)[1].tolist() == [[127 - 22]]  # 1e-4 / 448 = 2^-22.1
    assert records.quantise_mxfp4(zeros)[1].tolist() == [[1]]
    assert records.quantise_nvfp4(zeros)[1].tolist() == [[1, 1]]  # the smallest e4m3, 2^-9
    for kind in TRAINED_KINDS:
        assert same_bits(records.round_trip(-zeros, kind), -zeros), kind
    boundary = torch.zeros(3, 32)
    boundary[:, 0] = torch.tensor([448.0, 450.0, 446.0])  # at, above and below a power-of-two scale
    assert records.quantise_fp8(boundary)[1].flatten().tolist() == [127, 128, 127]
    large = torch.full((1, 16), 1e6)
    assert records.round_trip(large, "nvfp4_16").unique().tolist() == [6 * 448.0]
    edges = torch.tensor([448.0, 464.0, 465.0, 480.0, 1e6, torch.inf])  # torch 2.11 casts 465 to NaN
    assert records.round_trip(torch.cat([edges, -edges]), "fp8_unit").tolist() == [448.0] * 6 + [-448.0] * 6
    down = torch.zeros(1, 16)
    down[0, 0] = (
        6 * 1.0625
    )  # amax / 6 is the tie between scales 1 and 1.125: even wins, so the value is clamped
    assert records.round_trip(down, "nvfp4_16")[0, 0].item() == 6.0
    ties = torch.tensor([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -5, 0, 0, 0, 0, 0]])
    expected = [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -4, 0, 0, 0, 0, 0]
    assert records.round_trip(ties, "nvfp4_16").tolist() == [expected]
    assert records.round_trip(ties.repeat(1, 2), "mxfp4_32").tolist() == [expected * 2]


@pytest.mark.parametrize("kind", TRAINED_KINDS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_stay_in_their_block(kind: str, poison: float) -> None:
    block = int(kind.split("_")[1])
    x = seeded(3, 4 * block)
    clean = records.round_trip(x, kind)
    x[1, block + 3] = poison
    dirty = records.round_trip(x, kind)
    own = torch.zeros(3, 4 * block, dtype=torch.bool)
    own[1, block : 2 * block] = True
    assert torch.equal(dirty[~own], clean[~own])
    if kind == "nvfp4_16" and not math.isnan(poison):
        assert dirty[1, block + 3].item() == math.copysign(2688, poison)
    else:
        assert dirty[own].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_round_trip_keeps_dtype_exactly(kind: str, dtype: torch.dtype) -> None:
    x = seeded(16, 128, spread=1.0)
    result = records.round_trip(x.to(dtype), kind)
    assert result.dtype == dtype
    assert torch.equal(result.double(), records.round_trip(x, kind).double())


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), octave=st.integers(-30, 60))
def test_round_trip_is_idempotent(kind: str, seed: int, octave: int) -> None:
    x = seeded(8, 128, seed=seed) * 2.0**octave
    if kind == "nvfp4_16":  # away from the one interval where it is not; see the next test
        amax = x.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True).expand(-1, -1, 16).flatten(-2)
        x = torch.where((amax >= 9 * 2**-9) & (amax <= 10 * 2**-9), 1.0, x)
    once = records.round_trip(x, kind)
    assert same_bits(records.round_trip(once, kind), once)


def test_nvfp4_moves_when_quantised_twice_in_one_interval() -> None:
    """In units of 2^-9, amax 9: scale 1.5 rounds to 2 and 4.5 to 4, so 8; then scale 1.33 to 1 and 8 to 6."""
    x = torch.zeros(1, 16)
    x[0, 0] = 9 * 2.0**-9
    once = records.round_trip(x, "nvfp4_16")
    assert once[0, 0].item() == 8 * 2.0**-9
    assert records.round_trip(once, "nvfp4_16")[0, 0].item() == 6 * 2.0**-9


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_traces_whole(kind: str) -> None:
    compiled = torch.compile(lambda x: records.round_trip(x, kind), backend="aot_eager", fullgraph=True)
    x = seeded(4, 128)
    assert same_bits(compiled(x), records.round_trip(x, kind))


# ----------------------------------------------------------------------------------------------- records


def test_the_table() -> None:
    assert set(records.RECORDS) == {*PACKED, *ROWS}
    assert all(record.name == name for name, record in records.RECORDS.items())
    assert [name for name, record in records.RECORDS.items() if not record.quantises] == [
        "rows_bf16",
        "rows_fp32",
    ]
    with pytest.raises(ValueError, match="'rows' is unknown"):
        records.state_bytes("rows", 512, 64)
    with pytest.raises(ValueError, match="'fp9' is unknown"):
        records.round_trip(torch.zeros(1, 32), "fp9")


@pytest.mark.parametrize(("name", "dim", "rope_dim", "expected"), RELEASED)
def test_released_sizes(name: str, dim: int, rope_dim: int, expected: int) -> None:
    assert records.state_bytes(name, dim, rope_dim) == expected
    assert records.page_bytes(name, 32, dim, rope_dim) == 32 * expected
    assert records.pack(name, seeded(2, dim), rope_dim).shape == (2, expected)


def test_sizes_at_other_widths() -> None:
    assert records.state_bytes("mixed_584", 96, 32) == 64 + 64 + 8  # one scale fills a word
    assert records.state_bytes("mixed_584", 640, 64) == 576 + 128 + 16  # nine scales fill two
    assert records.state_bytes("fp8_132", 32, 16) == 36
    assert records.state_bytes("mxfp4_68", 32, 16) == 17
    for name, dim in (("mixed_584", 500), ("mixed_584", 64), ("scaled_528", 48), ("fp8_132", 30)):
        with pytest.raises(ValueError, match=name):
            records.state_bytes(name, dim, 64)


# record, page states, dim, rope: {(state, "data" or "scale", k): byte offset}; worked by hand from the spec.
BYTE_MAPS = (
    (
        "scaled_528",
        32,
        512,
        {(0, "data", 511): 511, (0, "scale", 0): 512, (3, "data", 5): 1589, (3, "scale", 15): 2111},
    ),
    ("scaled_528_split", 32, 512, {(3, "data", 5): 1541, (0, "scale", 0): 16384, (3, "scale", 15): 16447}),
    ("nvfp4_288", 64, 512, {(2, "data", 7): 583, (2, "scale", 31): 863}),
    ("nvfp4_288_split", 64, 512, {(2, "data", 7): 519, (2, "scale", 31): 16384 + 95}),
    ("mixed_584", 64, 512, {(2, "data", 448): 1600, (0, "scale", 0): 36864, (2, "scale", 6): 36886}),
    ("fp8_132", 64, 128, {(63, "data", 127): 8191, (0, "scale", 0): 8192, (63, "scale", 3): 8447}),
    ("mxfp4_68", 64, 128, {(63, "data", 63): 4095, (0, "scale", 0): 4096, (63, "scale", 3): 4351}),
)


@pytest.mark.parametrize(("name", "page_states", "dim", "offsets"), BYTE_MAPS)
def test_byte_map(name: str, page_states: int, dim: int, offsets: dict[tuple[int, str, int], int]) -> None:
    data, scales = records.regions(name, page_states, dim, 64)
    page_bytes = records.page_bytes(name, page_states, dim, 64)
    x = seeded(page_states, dim)
    packed = records.pack(name, x, 64)
    cache = torch.zeros(1, page_bytes, dtype=torch.uint8)
    records.write_slots(name, cache, torch.arange(page_states), x, page_states, 64)
    for (state, part, k), offset in offsets.items():
        region = data if part == "data" else scales
        assert region.offset + state * region.stride + k == offset
        logical = k if part == "data" else data.width + k
        assert cache[0, offset] == packed[state, logical], (state, part, k)
    touched = sorted(
        region.offset + state * region.stride + k
        for region in (data, scales)
        for state in range(page_states)
        for k in range(region.width)
    )
    assert touched == list(range(page_bytes))  # no byte twice, none left out


def test_logical_bytes_by_hand() -> None:
    x = torch.zeros(1, 512)
    x[0, 0], x[0, 33], x[0, 448] = 448.0, -1.0, 1.5
    scaled = records.pack("scaled_528", x, 64)[0]
    assert (scaled[0], scaled[33], scaled[448]) == (0x7E, 0xF8, 0x7C)  # 448; -256 * 2^-8; 384 * 2^-8
    assert (scaled[512], scaled[513], scaled[526]) == (127, 119, 119)
    mixed = records.pack("mixed_584", x, 64)[0]
    assert (mixed[0], mixed[33]) == (0x7E, 0xB8)  # both of the first 64-block, scale 1
    assert mixed[448:452].tolist() == [0xC0, 0x3F, 0, 0]  # bf16 1.5, little endian
    assert mixed[576:].tolist() == [127, *[105] * 6, 0]  # the floor's scale 2^-22; the pad
    nvfp4 = records.pack("nvfp4_288", torch.tensor([[6.0, -0.5, 1.0] + [0.0] * 509]), 64)[0]
    assert nvfp4[:2].tolist() == [0x97, 0x02]
    assert nvfp4[256:258].tolist() == [0x38, 0x01]
    index = torch.zeros(1, 128)
    index[0, 0], index[0, 97] = 1.0, 6.0
    fp8 = records.pack("fp8_132", index, 64)[0]
    assert (fp8[0], fp8[97]) == (0x68, 0x7C)  # 64 and 384 at scale 2^-6 of the whole vector
    assert fp8[128:].view(torch.float32).item() == 2.0**-6
    mxfp4 = records.pack("mxfp4_68", index, 64)[0]
    assert (mxfp4[0], mxfp4[48]) == (0x06, 0x70)
    assert mxfp4[64:].tolist() == [125, 1, 1, 127]


@pytest.mark.parametrize(("name", "dim", "rope_dim", "size"), RELEASED)
def test_unpack_gives_the_implied_round_trip(name: str, dim: int, rope_dim: int, size: int) -> None:
    x = seeded(9, dim)
    restored = records.unpack(name, records.pack(name, x, rope_dim), dim, rope_dim, torch.bfloat16)
    record = records.get_record(name)
    if record.keeps_rope:
        nope = records.round_trip(x[:, :-rope_dim], record.round_trip)
        assert same_bits(restored, torch.cat([nope, x[:, -rope_dim:]], dim=1))
    else:
        assert same_bits(restored, records.round_trip(x, record.round_trip))
    one = records.unpack(name, records.pack(name, x[:1], rope_dim), dim, rope_dim, torch.float32)
    assert torch.equal(one, restored[:1].float())


# ------------------------------------------------------------------------------------------ paged caches


def make_cache(
    name: str, pages: int, page_states: int, dim: int, rope_dim: int, slack: int
) -> tuple[Tensor, Tensor]:
    """(whole slab filled with 0xFF = NaN in every format, the cache as a strided view inside it)."""
    row_dtype = records.get_record(name).row_dtype
    if row_dtype is not None:
        slab = torch.full((pages, page_states + 1, dim * row_dtype.itemsize), 0xFF, dtype=torch.uint8)
        return slab, slab.view(row_dtype)[:, :page_states]
    payload = records.page_bytes(name, page_states, dim, rope_dim)
    slab = torch.full((pages, payload + slack + 16), 0xFF, dtype=torch.uint8)
    return slab, slab[:, 16:]  # another layer's bytes in front, padding behind


@pytest.mark.parametrize("slack", [0, 40])
@pytest.mark.parametrize(("name", "dim", "rope_dim", "size"), [*RELEASED, ("mixed_584", 96, 32, 136)])
def test_write_touches_only_its_states(name: str, dim: int, rope_dim: int, size: int, slack: int) -> None:
    page_states, pages = 4, 3
    slab, cache = make_cache(name, pages, page_states, dim, rope_dim, slack)
    before = slab.clone()
    x = seeded(5, dim)
    x[[0, 3]] = torch.nan  # a dead row may hold anything
    slots = torch.tensor([-1, 11, 4, -1, 6])  # 11 is the last state of the last page
    records.write_slots(name, cache, slots, x, page_states, rope_dim)

    changed = torch.zeros_like(slab, dtype=torch.bool)
    if records.get_record(name).row_dtype is not None:
        changed[[2, 1, 1], [3, 0, 2]] = True
    else:
        for region in records.regions(name, page_states, dim, rope_dim):
            for slot in (11, 4, 6):
                start = 16 + region.offset + slot % page_states * region.stride
                changed[slot // page_states, start : start + region.width] = True
    assert torch.equal(slab[~changed], before[~changed])
    assert changed.sum() == 3 * size

    read = records.read_slots(name, cache, slots, page_states, dim, rope_dim, torch.bfloat16)
    expected = records.unpack(name, records.pack(name, x, rope_dim), dim, rope_dim, torch.bfloat16)
    live = slots >= 0
    assert same_bits(read[live], expected[live])
    assert same_bits(read[~live], torch.zeros_like(read[~live]))  # slot 0 is NaN bytes: nothing leaks


@pytest.mark.parametrize(("name", "dim", "rope_dim", "size"), RELEASED)
def test_dead_and_empty_writes_change_nothing(name: str, dim: int, rope_dim: int, size: int) -> None:
    slab, cache = make_cache(name, 2, 4, dim, rope_dim, 8)
    slab.copy_(torch.arange(slab.numel()).view_as(slab) % 251)
    before = slab.clone()
    records.write_slots(name, cache, torch.full((3,), -1), torch.full((3, dim), torch.nan), 4, rope_dim)
    records.write_slots(name, cache, torch.empty(0, dtype=torch.int64), torch.empty(0, dim), 4, rope_dim)
    assert torch.equal(slab, before)


@pytest.mark.parametrize("name", ["scaled_528", "mixed_584", "rows_bf16"])
def test_reads_keep_the_index_shape(name: str) -> None:
    _, cache = make_cache(name, 2, 4, 128, 64, 8)
    x = seeded(8, 128)
    records.write_slots(name, cache, torch.arange(8), x, 4, 64)
    slots = torch.tensor([[7, -1, 0], [0, 3, 7]])
    read = records.read_slots(name, cache, slots, 4, 128, 64, torch.float32)
    assert read.shape == (2, 3, 128)
    assert torch.equal(read[0, 2], read[1, 0])
    assert torch.equal(read[0, 0], read[1, 2])
    assert not read[0, 1].any()
    assert records.read_slots(name, cache, slots[:, :0], 4, 128, 64, torch.float32).shape == (2, 0, 128)


def test_placements_are_not_interchangeable() -> None:
    """Both forms have equal sizes, so only values can tell them apart (spec/runtime.md 1.1.2)."""
    _, cache = make_cache("scaled_528", 1, 4, 512, 64, 0)
    x = seeded(4, 512)
    records.write_slots("scaled_528", cache, torch.arange(4), x, 4, 64)
    right = records.read_slots("scaled_528", cache, torch.arange(4), 4, 512, 64, torch.float32)
    wrong = records.read_slots("scaled_528_split", cache, torch.arange(4), 4, 512, 64, torch.float32)
    assert torch.equal(right, records.round_trip(x, "fp8_32").float())
    assert not torch.equal(wrong, right)
