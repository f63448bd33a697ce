"""The byte order in which the Hopper expert kernels read fp4 weights: out of the release's order, and back.

Codes. A block is 16 weight rows by 64 of K, 512 bytes. Lane (g, t), g in 0..7 and t in 0..3, owns 16 of them:
four words (q, h), whose byte i belongs to k = 32q + 16h + 4t + i. It holds two codes, of row g and of row
g + 8, with their bits where two masks and two shifts make e4m3 of them (a code's magnitude, moved to the
e4m3 exponent's low bits and mantissa, is the value times 2^-6):

    bit       7        6          5        4     3     2     1     0
    row g     sign                         m2    m1    m0
    row g+8            m2         sign                       m1    m0

so that a lane's words are, in turn, its registers of the A operand of an m64n8k32 product. Blocks lie in the
order [tile of 64 rows, chunk of 256 k, band of 16 rows, block of 64 k]: what a CTA reads for one chunk is
8 KB in one piece.

Scales. Of the 512 of a tile and chunk: [band, g, pair of 32-wide groups] words, bytes (row half, group of the
pair).

`gate_up` joins w1 and w3; their rows are interleaved first, a band being 8 gate rows and the 8 up rows of the
same intermediates, so that one lane holds both halves of a product.

Everything is in place, expert by expert: the scratch is a few times one expert, never a second copy of a
layer. Integer operations only, so that every byte pattern survives. E experts, N rows, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS, CHUNK = 64, 256  # what a CTA reads at once: rows of the weight, columns


def _unpack_rows(packed: Tensor) -> Tensor:
    """uint8 [N, K/2] in the release's order -> codes [tile, band, half, g, chunk, block, q, h, t, i]."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1)
    return codes.view(packed.shape[0] // TILE_ROWS, 4, 2, 8, -1, 4, 2, 2, 4, 4)


def _pack_codes(packed: Tensor) -> Tensor:
    """uint8 [N, K/2] of one expert, release order -> the same shape, kernel order."""
    codes = _unpack_rows(packed)
    low, high = codes.unbind(2)  # rows g and g + 8 of a band
    order = (0, 3, 1, 4, 2, 7, 5, 6, 8)  # tile, chunk, band, block, g, t, q, h, i
    low, high = low.permute(order), high.permute(order)
    both = (low >> 3 << 7) | ((low & 7) << 2) | (high >> 3 << 5) | ((high & 4) << 4) | (high & 3)
    return both.reshape(packed.shape)


def _unpack_codes(packed: Tensor) -> Tensor:
    """Inverse of `_pack_codes`."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    both = packed.view(rows // TILE_ROWS, columns // CHUNK, 4, 4, 8, 4, 2, 2, 4)
    low = (both >> 7 << 3) | ((both >> 2) & 7)
    high = ((both >> 5 & 1) << 3) | ((both >> 4) & 4) | (both & 3)
    codes = torch.stack((low, high), dim=-1)  # tile, chunk, band, block, g, t, q, h, i, half
    codes = codes.permute(0, 2, 9, 4, 1, 3, 6, 7, 5, 8).reshape(rows, columns // 2, 2)
    return codes[..., 0] | (codes[..., 1] << 4)


def _pack_scales(scale: Tensor) -> Tensor:
    """uint8 [N, K/32] of one expert, release order -> the same shape, kernel order."""
    view = scale.view(
        scale.shape[0] // TILE_ROWS, 4, 2, 8, -1, 4, 2
    )  # tile, band, half, g, chunk, pair, group
    return view.permute(0, 4, 1, 3, 5, 2, 6).reshape(scale.shape)


def _unpack_scales(scale: Tensor) -> Tensor:
    """Inverse of `_pack_scales`."""
    view = scale.view(scale.shape[0] // TILE_ROWS, -1, 4, 8, 4, 2, 2)
    return view.permute(0, 2, 5, 3, 1, 4, 6).reshape(scale.shape)


def _interleave(rows: Tensor) -> Tensor:
    """[2I, X], gate rows then up rows -> 8 gate rows, 8 up rows, and so on."""
    return rows.view(2, -1, 8, rows.shape[1]).transpose(0, 1).reshape(rows.shape)


def _separate(rows: Tensor) -> Tensor:
    """Inverse of `_interleave`."""
    return rows.view(-1, 2, 8, rows.shape[1]).transpose(0, 1).reshape(rows.shape)


def check_weights(gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor) -> None:
    """ValueError unless these are contiguous bytes of the shapes in op.py, widths in steps of 256."""
    experts, width, hidden = gate_up.shape[0], gate_up.shape[1] // 2, 2 * gate_up.shape[2]
    if hidden % CHUNK or width % CHUNK:
        raise ValueError(
            f"the Hopper expert kernels need widths that are multiples of {CHUNK}, not {hidden} x {width}"
        )
    shapes = (
        (experts, 2 * width, hidden // 2), (experts, 2 * width, hidden // 32),
        (experts, hidden, width // 2), (experts, hidden, width // 32),
    )  # fmt: skip
    for weight, shape in zip((gate_up, gate_up_scale, down, down_scale), shapes, strict=True):
        if tuple(weight.shape) != shape or weight.element_size() != 1 or not weight.is_contiguous():
            raise ValueError(
                f"an expert weight is contiguous bytes {shape}, got {weight.dtype} {tuple(weight.shape)}"
            )


def _bytes(*weights: Tensor) -> list[Tensor]:
    check_weights(*weights)
    return [weight.view(torch.uint8) for weight in weights]


def pack(gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor) -> None:
    """Reorder weights that lie as the release stores them, in place: byte tensors of the shapes in op.py.

    Raises ValueError where a width is no multiple of 256 or a tensor is not contiguous bytes.
    """
    gate_up, gate_up_scale, down, down_scale = _bytes(gate_up, gate_up_scale, down, down_scale)
    for expert in range(gate_up.shape[0]):
        gate_up[expert] = _pack_codes(_interleave(gate_up[expert]))
        gate_up_scale[expert] = _pack_scales(_interleave(gate_up_scale[expert]))
        down[expert] = _pack_codes(down[expert])
        down_scale[expert] = _pack_scales(down_scale[expert])


def unpack(gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor) -> None:
    """Inverse of `pack`, in place."""
    gate_up, gate_up_scale, down, down_scale = _bytes(gate_up, gate_up_scale, down, down_scale)
    for expert in range(gate_up.shape[0]):
        gate_up[expert] = _separate(_unpack_codes(gate_up[expert]))
        gate_up_scale[expert] = _separate(_unpack_scales(gate_up_scale[expert]))
        down[expert] = _unpack_codes(down[expert])
        down_scale[expert] = _unpack_scales(down_scale[expert])
