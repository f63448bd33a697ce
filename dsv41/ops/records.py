"""Every stored byte format by name: scalar codecs, block quantisers, records and their place in a page.

The only definition of how a value becomes bytes. Kernels are tested against it and may take their address
arithmetic from `regions`. Sources: spec/model.md 2.1 and 4 (arithmetic), spec/runtime.md 1.1 (bytes).
Plain torch without data-dependent control flow or host tables: it traces, and it may be captured.

    e8m0   unsigned power of two, byte b is 2^(b - 127), 255 is NaN
    e4m3   torch.float8_e4m3fn: 448 is the largest value, 0x7f and 0xff are NaN, no infinity
    e2m1   four bits: 0 .5 1 1.5 2 3 4 6 and bit 3 for the sign; two to a byte, the even element low

Non-finite inputs stay in their own block. NaN makes its block NaN in every format. Infinity does so where the
scale is a power of two, and saturates to 2688 in NVFP4. A value above 3e38 may round up to infinity.

Shape letters: N rows or slots, D values of a state, P pages, S states of a page, W bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
# The release multiplies by these fp32 reciprocals; the literals are their exact values.
FP32_RECIPROCAL_448 = float.fromhex("0x1.24924ap-9")
FP32_RECIPROCAL_6 = float.fromhex("0x1.555556p-3")
# Floors on a block's largest magnitude: they keep the scale of a zero block above zero.
FP8_FLOOR, MXFP4_FLOOR, NVFP4_FLOOR = 1e-4, 6 * 2.0**-126, 6 * 2.0**-9
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoint k lies between codes k and k + 1


def _pow2(biased: Tensor) -> Tensor:
    """int32 exponent + 127 in 0..255 -> fp32 power of two, built from bits: exact at both ends, no exp2."""
    # The pattern 0 means 2^-127, a subnormal, and 255, where fp32 has infinity, NaN.
    return (biased << 23).view(torch.float32).clamp(min=2.0**-127).nan_to_num(nan=torch.nan, posinf=torch.nan)


def e8m0_decode(scale: Tensor) -> Tensor:
    """uint8 (or float8_e8m0fnu) -> fp32 2^(b - 127), exact for 0..254; 255 gives NaN."""
    return _pow2(scale.view(torch.uint8).to(torch.int32))


def pow2_ceil_exponent(x: Tensor) -> Tensor:
    """ceil(log2 x) of fp32 x > 0 as int32, from the bit pattern (spec/model.md 4).

    Exact for normal x. A subnormal gives -126, infinity 128, NaN 129: the last two become the e8m0 NaN.
    """
    assert x.dtype == torch.float32, f"the exponent is read from fp32 bits, got {x.dtype}"
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    # Any mantissa bit carries into the exponent; a NaN's carries into bit 31, which the shift brings back.
    return (((magnitude + 0x7FFFFF) >> 23) & 0x1FF) - 127


def e2m1_encode(x: Tensor) -> Tensor:
    """fp32 -> uint8 codes 0..15: nearest, ties to the even code, saturating at 6. NaN gives magnitude 0."""
    assert x.dtype == torch.float32, f"e2m1 codes are rounded from fp32, got {x.dtype}"
    magnitude = x.abs()
    code = (x.view(torch.int32) >> 28) & 8
    for lower, midpoint in enumerate(_E2M1_MIDPOINTS):
        # A tie leaves the lower code only when that code is odd.
        above = magnitude >= midpoint if lower % 2 else magnitude > midpoint
        code = code + above.to(torch.int32)
    return code.to(torch.uint8)


def e2m1_decode(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 -> fp32; code 8 is negative zero. Arithmetic: a table would be a host copy.

    The code's bits are those of a tiny fp16, code 1 (0.5) a subnormal; the product moves the exponent.
    """
    code = codes.to(torch.int16)
    return (((code & 7) << 9) | ((code & 8) << 12)).view(torch.float16).to(torch.float32) * 2.0**14


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes [..., n], n even -> uint8 [..., n / 2]; the even element is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 (or int8) [..., n] -> uint8 codes [..., 2n]."""
    packed = packed.view(torch.uint8)
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def _blocks(x: Tensor, block: int) -> Tensor:
    """[..., n] -> fp32 [..., n / block, block]."""
    assert x.shape[-1] % block == 0, f"{x.shape[-1]} values do not divide into blocks of {block}"
    return x.to(torch.float32).unflatten(-1, (-1, block))


def _scale_pow2(x: Tensor, block: int, floor: float, reciprocal_max: float) -> tuple[Tensor, Tensor]:
    """-> (fp32 x / scale, e8m0 bytes of scale = 2^ceil(log2(max(amax, floor) * reciprocal_max)))."""
    blocks = _blocks(x, block)
    target = blocks.abs().amax(dim=-1).clamp(min=floor) * reciprocal_max
    biased = (pow2_ceil_exponent(target) + 127).clamp(0, 255)
    reciprocal = _pow2((254 - biased) & 0xFF)  # exact; 255 maps to itself, so NaN stays NaN
    return (blocks * reciprocal.unsqueeze(-1)).flatten(-2), biased.to(torch.uint8)


def _to_e4m3(x: Tensor) -> Tensor:
    """RNE with saturation; the cast alone makes NaN above 464 in torch 2.11 and saturates in 2.13."""
    return x.to(torch.float32).clamp(-448.0, 448.0).to(E4M3)


def quantise_fp8(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """float [..., n] -> (e4m3 codes [..., n], e8m0 bytes [..., n / block]) (spec/model.md 4.1).

    scale = 2^ceil(log2(max(amax, 1e-4) * fp32(1/448))); code = e4m3(x / scale).
    """
    scaled, scale = _scale_pow2(x, block, FP8_FLOOR, FP32_RECIPROCAL_448)
    return _to_e4m3(scaled), scale


def dequantise_fp8(codes: Tensor, scale: Tensor, block: int = 32) -> Tensor:
    """Inverse of `quantise_fp8` -> fp32 [..., n]."""
    return (_blocks(codes, block) * e8m0_decode(scale).unsqueeze(-1)).flatten(-2)


def quantise_mxfp4(x: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """float [..., n] -> (e2m1 codes uint8 [..., n], e8m0 bytes [..., n / block]) (spec/model.md 4.4).

    scale = 2^ceil(log2(max(amax, 6 * 2^-126) * fp32(1/6))); code = e2m1(x / scale).
    """
    scaled, scale = _scale_pow2(x, block, MXFP4_FLOOR, FP32_RECIPROCAL_6)
    return e2m1_encode(scaled), scale


def dequantise_mxfp4(codes: Tensor, scale: Tensor, block: int = 32) -> Tensor:
    """Inverse of `quantise_mxfp4` -> fp32 [..., n]."""
    return (_blocks(e2m1_decode(codes), block) * e8m0_decode(scale).unsqueeze(-1)).flatten(-2)


def quantise_nvfp4(x: Tensor, block: int = 16) -> tuple[Tensor, Tensor]:
    """float [..., n] -> (e2m1 codes uint8 [..., n], e4m3 bytes uint8 [..., n / block]) (spec/model.md 4.3).

    scale = e4m3(min(max(amax, 6 * 2^-9) / 6, 448)); code = e2m1(x / scale); true divisions, no global scale.
    The scale may round down, so a block's largest value may be clamped. Quantise once: where amax is 9 to 10
    times 2^-9, and only there, a second round trip moves values (the scale 2 * 2^-9 becomes 2^-9).
    """
    # Through float64: the IEEE fp32 quotient (53 >= 2 * 24 + 2) also where Inductor's fp32 `/` is 2 ulp off.
    blocks = _blocks(x, block).to(torch.float64)
    scale = _to_e4m3(blocks.abs().amax(dim=-1).clamp(min=NVFP4_FLOOR) / 6.0)
    codes = e2m1_encode((blocks / scale.to(torch.float32).unsqueeze(-1)).to(torch.float32))
    return codes.flatten(-2), scale.view(torch.uint8)


def dequantise_nvfp4(codes: Tensor, scale: Tensor, block: int = 16) -> Tensor:
    """Inverse of `quantise_nvfp4` -> fp32 [..., n]."""
    return (_blocks(e2m1_decode(codes), block) * scale.view(E4M3).to(torch.float32).unsqueeze(-1)).flatten(-2)


class _Quantiser(NamedTuple):
    quantise: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    dequantise: Callable[[Tensor, Tensor, int], Tensor]
    block: int  # values that share a scale; 0 means the whole vector
    code_bits: int


_QUANTISERS = MappingProxyType(
    {
        "fp8_32": _Quantiser(quantise_fp8, dequantise_fp8, 32, 8),
        "fp8_64": _Quantiser(quantise_fp8, dequantise_fp8, 64, 8),
        "fp8_row": _Quantiser(quantise_fp8, dequantise_fp8, 0, 8),
        "mxfp4_32": _Quantiser(quantise_mxfp4, dequantise_mxfp4, 32, 4),
        "nvfp4_16": _Quantiser(quantise_nvfp4, dequantise_nvfp4, 16, 4),
    }
)


def round_trip(x: Tensor, kind: str) -> Tensor:
    """Quantise and dequantise float [..., n], keeping shape and dtype ("fake quantisation").

    kind: "fp8_32", "mxfp4_32", "nvfp4_16" (the trained formats), "none"; and what other records imply:
    "fp8_64", "fp8_row" (one scale a vector), "fp8_unit" (e4m3, no scale). A result has at most 6 significant
    bits: exact in bf16, fp32 and fp64; fp16 may lack the exponent range.
    """
    if kind == "none":
        return x
    if kind == "fp8_unit":
        return _to_e4m3(x).to(x.dtype)
    if kind not in _QUANTISERS:
        raise ValueError(f"round trip '{kind}' is unknown; choose none, fp8_unit, {', '.join(_QUANTISERS)}.")
    quantiser = _QUANTISERS[kind]
    block = quantiser.block or x.shape[-1]
    codes, scale = quantiser.quantise(x, block)
    return quantiser.dequantise(codes, scale, block).to(x.dtype)


def dequantise_fp8_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """e4m3 [N, K], e8m0 bytes [ceil(N/32), ceil(K/32)] -> fp32 [N, K] (spec/model.md 2.1)."""
    rows, columns = weight.shape
    assert scale.shape == (-(-rows // 32), -(-columns // 32)), f"wrong scale shape {tuple(scale.shape)}"
    scales = e8m0_decode(scale).repeat_interleave(32, dim=0)[:rows].repeat_interleave(32, dim=1)[:, :columns]
    return weight.to(torch.float32) * scales


def dequantise_fp4_weight(packed: Tensor, scale: Tensor) -> Tensor:
    """uint8 (or int8) [..., N, K/2], e8m0 bytes [..., N, K/32] -> fp32 [..., N, K] (spec/model.md 2.1)."""
    return dequantise_mxfp4(unpack_nibbles(packed), scale)


@dataclass(frozen=True)
class Record:
    """The byte layout of one stored state. The number in a name is its size at the released width."""

    name: str
    value: str  # what a state's bytes are: data, then scales
    round_trip: str  # the `round_trip` kind that a write and a read amount to; if keeps_rope, before the rope
    placement: str  # "rows": typed tensor; "interleaved": state by state; "split": all data, then all scales
    row_dtype: torch.dtype | None = None  # of "rows"
    keeps_rope: bool = False  # the last rope_dim values stay bf16, and scales are padded to 8 bytes
    fp32_scales: bool = False  # scales are fp32 powers of two instead of bytes

    @property
    def quantises(self) -> bool:
        return self.round_trip != "none"  # then a stored value may differ from the bf16 value written


_SCALED = "e4m3 values, one e8m0 scale per 32"
_NVFP4 = "e2m1 pairs, one e4m3 scale per 16"
_MIXED = "e4m3 nope values and bf16 rope values, one e8m0 scale per 64 nope values and zero bytes up to 8"
_RECORDS = (
    Record("rows_bf16", "bf16 values", "none", "rows", row_dtype=torch.bfloat16),
    Record("rows_fp32", "fp32 values", "none", "rows", row_dtype=torch.float32),
    Record("rows_fp8", "e4m3 values, scale 1.0", "fp8_unit", "rows", row_dtype=E4M3),
    Record("scaled_528", _SCALED, "fp8_32", "interleaved"),
    Record("scaled_528_split", _SCALED, "fp8_32", "split"),
    Record("nvfp4_288", _NVFP4, "nvfp4_16", "interleaved"),
    Record("nvfp4_288_split", _NVFP4, "nvfp4_16", "split"),
    Record("mixed_584", _MIXED, "fp8_64", "split", keeps_rope=True),
    Record("fp8_132", "e4m3 values, one fp32 power of two", "fp8_row", "split", fp32_scales=True),
    Record("mxfp4_68", "e2m1 pairs, one e8m0 scale per 32", "mxfp4_32", "split"),
)
RECORDS = MappingProxyType({record.name: record for record in _RECORDS})


def get_record(name: str) -> Record:
    """The record called `name`; ValueError lists the names there are."""
    if name not in RECORDS:
        raise ValueError(f"record '{name}' is unknown; choose one of {', '.join(RECORDS)}.")
    return RECORDS[name]


def _part_bytes(record: Record, dim: int, rope_dim: int) -> tuple[int, int]:
    """(data bytes, scale bytes) of one state; ValueError where the record cannot hold this width."""
    if record.row_dtype is not None:
        return dim * record.row_dtype.itemsize, 0
    quantiser = _QUANTISERS[record.round_trip]
    width = dim - rope_dim if record.keeps_rope else dim
    multiple = quantiser.block or 4  # one scale a vector: its fp32 must stay aligned behind the data
    if width <= 0 or width % multiple:
        raise ValueError(f"{record.name} quantises a multiple of {multiple} values, not {width}.")
    data_bytes = width * quantiser.code_bits // 8
    scale_bytes = width // (quantiser.block or width) * (4 if record.fp32_scales else 1)
    if record.keeps_rope:
        return data_bytes + rope_dim * torch.bfloat16.itemsize, scale_bytes + -scale_bytes % 8
    return data_bytes, scale_bytes


def state_bytes(record: str, dim: int, rope_dim: int) -> int:
    """Bytes of one state, scales and their padding included."""
    return sum(_part_bytes(get_record(record), dim, rope_dim))


def page_bytes(record: str, num_states: int, dim: int, rope_dim: int) -> int:
    """Payload bytes of a page of `num_states` states; alignment is the layout's business."""
    return num_states * state_bytes(record, dim, rope_dim)


class Region(NamedTuple):
    """Byte k (0 <= k < width) of state t lies at `offset + t * stride + k` from the start of its page."""

    offset: int
    stride: int
    width: int


def regions(record: str, page_states: int, dim: int, rope_dim: int) -> tuple[Region, Region]:
    """Where a page keeps (data, scales): the one address rule of every record, placement included."""
    data, scales = _part_bytes(get_record(record), dim, rope_dim)
    if get_record(record).placement == "split":
        return Region(0, data, data), Region(page_states * data, scales, scales)
    return Region(0, data + scales, data), Region(data, data + scales, scales)


def pack(record: str, x: Tensor, rope_dim: int) -> Tensor:
    """float [N, D] -> logical bytes uint8 [N, state_bytes] of states: data, then scales, in any placement."""
    layout = get_record(record)
    if layout.row_dtype is not None:
        rows = _to_e4m3(x) if layout.row_dtype == E4M3 else x.to(layout.row_dtype)
        return rows.contiguous().view(torch.uint8)
    scale_bytes = _part_bytes(layout, x.shape[-1], rope_dim)[1]
    quantiser = _QUANTISERS[layout.round_trip]
    width = x.shape[-1] - rope_dim if layout.keeps_rope else x.shape[-1]
    codes, scales = quantiser.quantise(x[..., :width], quantiser.block or width)
    parts = [pack_nibbles(codes) if quantiser.code_bits == 4 else codes.view(torch.uint8)]
    if layout.keeps_rope:
        parts.append(x[..., width:].to(torch.bfloat16).contiguous().view(torch.uint8))
    parts.append(e8m0_decode(scales).view(torch.uint8) if layout.fp32_scales else scales)
    return torch.nn.functional.pad(torch.cat(parts, dim=-1), (0, scale_bytes - parts[-1].shape[-1]))


def unpack(record: str, packed: Tensor, dim: int, rope_dim: int, dtype: torch.dtype) -> Tensor:
    """Inverse of `pack`: uint8 [..., state_bytes] -> [..., D] of `dtype`."""
    layout = get_record(record)
    if layout.row_dtype is not None:
        return packed.view(layout.row_dtype).to(dtype)
    data, scales = packed.split(_part_bytes(layout, dim, rope_dim), dim=-1)
    quantiser = _QUANTISERS[layout.round_trip]
    width = dim - rope_dim if layout.keeps_rope else dim
    if layout.fp32_scales:  # honours any fp32 scale, a power of two or not
        return (data.view(E4M3).to(torch.float32) * scales.view(torch.float32)).to(dtype)
    code_bytes = data[..., : width * quantiser.code_bits // 8]
    codes = unpack_nibbles(code_bytes) if quantiser.code_bits == 4 else code_bytes.view(E4M3)
    values = quantiser.dequantise(codes, scales[..., : width // quantiser.block], quantiser.block).to(dtype)
    if not layout.keeps_rope:
        return values
    return torch.cat([values, data[..., width:].view(torch.bfloat16).to(dtype)], dim=-1)


def _page_views(record: str, cache: Tensor, page_states: int, dim: int, rope_dim: int) -> list[Tensor]:
    """(data, scales) of every state as uint8 views [P, S, W] of the cache; W may be 0."""
    row_dtype = get_record(record).row_dtype
    if row_dtype is not None:
        assert cache.dtype == row_dtype, f"{record} is stored as {row_dtype}, got {cache.dtype}"
        assert cache.shape[1:] == (page_states, dim), f"wrong shape {tuple(cache.shape)} of {record} pages"
        return list(cache.view(torch.uint8).split((dim * row_dtype.itemsize, 0), dim=-1))
    payload = page_bytes(record, page_states, dim, rope_dim)
    assert cache.dtype == torch.uint8, f"a {record} cache is uint8, got {cache.dtype}"
    assert cache.shape[1] >= payload, f"a page needs {payload} bytes, its stride is {cache.shape[1]}"
    return [
        cache[:, offset : offset + (page_states - 1) * stride + width].unfold(1, width, stride)
        for offset, stride, width in regions(record, page_states, dim, rope_dim)
    ]


def write_slots(
    record: str, cache: Tensor, slots: Tensor, x: Tensor, page_states: int, rope_dim: int
) -> None:
    """Encode float x [N, D] into the states that int64 slots [N] name, in place.

    slot = page * page_states + state; a negative slot writes nothing; no live slot may stand twice.
    cache: uint8 [P, page stride in bytes], or [P, S, D] of the row dtype for "rows" records; pages may be any
    distance apart. Bytes past the payload are never touched.
    """
    assert slots.dtype == torch.int64, f"slots are int64, got {slots.dtype}"
    assert slots.shape == x.shape[:-1], f"{tuple(slots.shape)} slots for values {tuple(x.shape)}"
    if slots.numel() == 0:
        return
    # A mask would make a shape depend on data, and the host wait. Instead a dead row repeats a live row's
    # write, which is harmless; with no live row at all, slot 0 is given the bytes that it has.
    live = slots >= 0
    source = torch.where(live, torch.arange(len(slots), device=slots.device), live.to(torch.int32).argmax())
    target = slots[source].clamp(min=0)
    page, state = target // page_states, target % page_states
    views = _page_views(record, cache, page_states, x.shape[-1], rope_dim)
    parts = pack(record, x, rope_dim).split([view.shape[-1] for view in views], dim=-1)
    for view, part in zip(views, parts, strict=True):
        view[page, state] = torch.where(live.any(), part[source], view[0, 0])


def read_slots(
    record: str, cache: Tensor, slots: Tensor, page_states: int, dim: int, rope_dim: int, dtype: torch.dtype
) -> Tensor:
    """Decode the states that int64 slots [...] name -> [..., D] of `dtype`; a negative slot gives zeros.

    A negative slot loads state 0 of the null page and then replaces it, so NaN bytes there cannot leak.
    """
    assert slots.dtype == torch.int64, f"slots are int64, got {slots.dtype}"
    target = slots.clamp(min=0)
    page, state = target // page_states, target % page_states
    views = _page_views(record, cache, page_states, dim, rope_dim)
    packed = torch.cat([view[page, state] for view in views], dim=-1)
    return unpack(record, packed, dim, rope_dim, dtype).masked_fill(slots.unsqueeze(-1) < 0, 0.0)
