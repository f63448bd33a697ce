"""What Triton kernels share that treat bf16 rows as words of two channels.

A word is widened by one instruction a channel, a shift or a mask, and packed by one for two. Triton's own
conversions take two to four, and one that is a quarter of the rate where a rounded value is used again.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def pack(even, odd):
    """Two float32 vectors, rounded to bf16, as int32 words. Conversions one by one run at a quarter of the
    rate."""
    asm: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return tl.inline_asm_elementwise(asm, "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """1 / x to one unit in the last place, x normal: a single instruction."""
    asm: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def half(words, ODD: tl.constexpr):
    """The even or the odd channels of words of two, in float32."""
    if ODD:
        return (words & -65536).to(tl.float32, bitcast=True)
    else:
        return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_row(row, D: tl.constexpr, WIDTH: tl.constexpr, SHARED: tl.constexpr = False):
    """A row of D bf16 channels as a tuple of vectors of `WIDTH` words; zeros behind its end. SHARED: other
    programs of the same launch stored it, so it is read from L2."""
    CACHE: tl.constexpr = ".cg" if SHARED else ""
    words = row.to(tl.pointer_type(tl.int32))
    pieces = ()
    for piece in tl.static_range((D // 2 + WIDTH - 1) // WIDTH):
        word = piece * WIDTH + tl.arange(0, WIDTH)
        pieces += (tl.load(words + word, mask=word < D // 2, other=0, cache_modifier=CACHE),)
    return pieces


@triton.jit
def exponential(x):
    """e^x: the product with log2 e is rounded, and its rest corrects the power to first order."""
    power = x * 1.4426950408889634
    rest = tl.fma(x, 1.4426950408889634, -power) + x * 1.9259629911e-8
    rest = tl.where(tl.abs(power) < 1e30, rest, 0.0)
    return tl.exp2(power) * (1.0 + rest * 0.6931471805599453)


def check_rows(*tensors: Tensor) -> None:
    """Rows may be any distance apart; a row lies in one piece, and starts at a word."""
    for tensor in tensors:
        if not len(tensor):
            continue
        if not tensor[0].is_contiguous():
            raise ValueError(f"a row of {tuple(tensor.shape[1:])} values must lie in one piece")
        if tensor.data_ptr() % 4 or (len(tensor) > 1 and tensor.stride(0) * tensor.element_size() % 4):
            raise ValueError("a row of bf16 values must start at a multiple of 4 bytes")
