"""The linear family on Hopper: few rows by own kernels at the memory's speed, many rows widened for cuBLAS.

    linear_fp8, grouped_output
      1 or 2 rows   skinny_kernel with K in 8 or 4 parts a tile, or whole where tiles are many: one launch
      ... 8 rows    skinny_kernel, x quantised or turned back in its prologue, K split over CTAs, add_kernel
      ... 256 rows  prepare_kernel, skinny_kernel on ready rows, add_kernel
      more          prepare_kernel, widen_kernel (weight to bf16), torch.mm or torch.bmm
    linear
      1 or 2 rows   dots_kernel
      ... 64 rows   stream_kernel, add_kernel
      more          torch.mm
    rms_norm        norm_kernel

One arithmetic everywhere: bf16 values that are exact (codes times powers of two), fp32 sums, one rounding.
Only the order of the sums differs. `deterministic` takes ready rows, one tile width and one split of K for
every number of rows.

The e4m3 tensor instructions (wgmma on the stored bytes, scales on the sums per 32 columns) were not taken:
they add 32 products in about 14 bits, need fp32 work for every sum and 32 columns, and cannot serve the
grouped output, whose input is not quantised. The skinny kernel spends about half of an SM's issue slots at
the memory's full speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsv41.hardware import Hardware
from dsv41.ops.linear import gluon_dots as dots
from dsv41.ops.linear import gluon_skinny as skinny
from dsv41.ops.linear.triton_norm import norm_rows
from dsv41.ops.linear.triton_rows import add_kernel, prepare_kernel, widen_kernel
from dsv41.ops.linear.triton_stream import stream_kernel

SMS = 132  # of an H200: a split of K may not depend on the device, or bits would
FUSED_ROWS = 8  # up to here the skinny kernel prepares x itself
PARTS_ROWS = 2  # up to here a tile may hold several parts of K
LEAST_CTAS = 200  # of a split product: fewer leave too many SMs with one or none
FEW_ROWS = 256  # beyond, the weight is widened once and cuBLAS multiplies
STREAM_ROWS = 64  # the same limit of `linear`
FIXED_ROWS = 64  # rows of a tile under `deterministic`
RESIDENT_CHUNKS = 16  # of x that a CTA keeps: 2 KB each
SHARED_BYTES = 225 << 10  # of an SM, less what the CTAs' own reserves take
WIDEN_ELEMENTS = 1 << 27  # of the weight widened at a time: 256 MB of scratch
STREAM_N, STREAM_K = 64, 128
MOST_CTAS, MOST_STAGES = 5, 10  # of an SM, of a CTA's ring
EARLY = True  # programmatic launch: the weight is on its way while the kernel before still runs
# How the skinny kernel works, to be compared by profiles/linear.py; see skinny_kernel.
STACKED = False  # whether it, and what adds its splits, let the next kernel start before their own wait
EXACT_CHUNKS = 8  # up to so many chunks a CTA, x is made of no more columns than there are; 0: passes of 512
LEAN = True  # no barriers for stages that are used once
OVERLAP = 2  # a half chunk is decoded while the one before is multiplied: 1 within a chunk, 2 across chunks


@dataclass(frozen=True)
class Plan:
    """How a few rows meet a weight.

    fused: the skinny kernel prepares x. parts: Q of K in a tile; rows: NT of x a tile; live: columns of wgmma
    that are made; splits of K over CTAs; chunks of 128 columns a CTA; stages of its ring; ctas in all.
    """

    fused: bool
    parts: int
    rows: int
    live: int
    splits: int
    chunks: int
    ctas: int

    @property
    def exact(self) -> bool:
        """x is made of no more columns than there are."""
        most = RESIDENT_CHUNKS if self.live == 1 else EXACT_CHUNKS
        return self.fused and EXACT_CHUNKS > 0 and self.live in (1, 8) and self.chunks <= most

    @property
    def x_chunks(self) -> int:
        """Chunks of x that a CTA has room for, if it prepares x."""
        at_once = 1 if self.exact else 4
        return triton.cdiv(self.chunks, at_once) * at_once

    @property
    def refill(self) -> int:
        """How the kernel fills stages again."""
        return 2 if not LEAN else int(self.stages < self.chunks)

    @property
    def stages(self) -> int:
        """Of 8 KB and ready rows: as many CTAs an SM as the grid gives it, if each has three under way."""
        x_bytes = self.x_chunks * 2048 if self.fused else 0
        stage_bytes = 8192 + (0 if self.fused else 256 * self.rows)
        stages = 1
        for resident in range(min(MOST_CTAS, triton.cdiv(self.ctas, SMS)), 0, -1):
            stages = min(self.chunks, MOST_STAGES, (SHARED_BYTES // resident - x_bytes - 3072) // stage_bytes)
            if stages >= min(self.chunks, 3):
                break
        return stages


def why_not(hardware: Hardware, record: str | None) -> str | None:
    if hardware.sm != 90:
        return f"its instructions are Hopper's (sm_90), this is {hardware.name}"
    return None


def slowest_sm(ctas: int, chunks: float) -> float:
    """The work of the SM that gets most CTAs, in chunks of 8 KB of weight (a quarter of a microsecond each);
    CTAs that begin where others end cost six."""
    return triton.cdiv(ctas, SMS) * chunks + 6 * (ctas > MOST_CTAS * SMS)


def split_count(tiles: int, steps: int, most_steps: int) -> int:
    """Into how many parts K's `steps` are cut so that no SM has much more to do than another, in no more CTAs
    than have room at once; of equal ones the most, since a CTA prepares its part of x before its first
    product. Depends on the shape alone."""
    least = min(steps, max(triton.cdiv(LEAST_CTAS, tiles), triton.cdiv(steps, most_steps)))
    most = min(steps, max(least, MOST_CTAS * SMS // tiles))
    sizes = sorted({triton.cdiv(steps, splits) for splits in range(least, most + 1)})
    best = min(sizes, key=lambda size: slowest_sm(tiles * triton.cdiv(steps, size), size))
    return triton.cdiv(steps, best)


def parts_of_k(tiles: int, k: int, num_rows: int) -> int:
    """Into how many parts a tile cuts K so that one launch fills the machine; 1 if the tiles alone do.

    Two rows leave columns of wgmma for four parts, one row for eight.
    """
    if num_rows > PARTS_ROWS or k > 16384 or (tiles >= 2 * SMS and k <= RESIDENT_CHUNKS * skinny.CHUNK):
        return 1
    legal = [parts for parts in ((4, 8) if num_rows == 1 else (4,)) if k % (32 * parts) == 0]
    if not legal:
        return 1 if k % 128 else 4
    enough = [parts for parts in legal if tiles * parts >= LEAST_CTAS] or legal[-1:]
    return min(enough, key=lambda parts: slowest_sm(tiles * parts, k / parts / skinny.CHUNK))


def plan(n: int, k: int, groups: int, num_rows: int, deterministic: bool) -> Plan:
    """For `groups` weights [n, k] and any number of rows, of which a tile takes at most 64."""
    steps, tiles = triton.cdiv(k, skinny.CHUNK), groups * triton.cdiv(n, skinny.TILE_ROWS)
    fused = num_rows <= FUSED_ROWS and not deterministic
    parts = parts_of_k(tiles, k, num_rows) if fused else 1
    if parts > 1:
        tiles = groups * triton.cdiv(n, skinny.TILE_ROWS // parts)
        return Plan(True, parts, 8 // parts, 8, 1, triton.cdiv(k // parts, skinny.CHUNK), tiles)
    splits = split_count(tiles, steps, RESIDENT_CHUNKS)
    chunks = triton.cdiv(steps, splits)
    if fused:
        live = 1 if num_rows == 1 and EXACT_CHUNKS else 2 if num_rows <= 2 else 8
        return Plan(True, 1, 8, live, splits, chunks, tiles * splits)
    rows = FIXED_ROWS if deterministic else max(16, min(64, triton.next_power_of_2(num_rows)))
    return Plan(False, 1, rows, rows, splits, chunks, tiles * splits * triton.cdiv(num_rows, rows))


def check_weight(weight: Tensor, scale: Tensor) -> None:
    """ValueError for a shape that the kernels cannot run."""
    n, k = weight.shape
    if k % 32 or n % 16:
        raise ValueError(f"fp8 weights need N a multiple of 16 and K of 32 on Hopper, not {n} x {k}.")
    if scale.shape != (triton.cdiv(n, 32), k // 32):
        raise ValueError(f"a weight {n} x {k} has one scale per 32 x 32 tile, not {tuple(scale.shape)}.")
    if not weight.is_contiguous() or not scale.is_contiguous() or weight.data_ptr() % 16:
        raise ValueError(
            f"the rows of a weight {n} x {k} must follow each other, from a 16-byte boundary on."
        )


def pack(weight: Tensor, scale: Tensor) -> None:
    """The kernels read the released order: only the shape is checked."""
    check_weight(weight, scale)


# --- fp8 weights ----------------------------------------------------------------------------------


def _bf16_rows(x: Tensor) -> Tensor:
    """[T, columns], readable in 16-byte pieces from the start of a row on; copied if it is not."""
    if x.dtype != torch.bfloat16:
        raise ValueError(f"the Hopper kernels multiply bf16 activations, not {x.dtype}.")
    if x.shape[0] == 1:
        x = x[0].unsqueeze(0)  # the stride of a single row may be anything
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def prepare(x: Tensor, turn: tuple[Tensor, int] | None, groups: int, padded: int, permute: bool) -> Tensor:
    """bf16 rows [T, groups * K], quantised and back, or turned back by (cos_sin, head dimension).

    -> [T, groups * padded], zeros beyond K.
    """
    k = x.shape[1] // groups
    cos_sin, dim = turn or (x, 2)
    out = torch.empty((x.shape[0], groups * padded), dtype=torch.bfloat16, device=x.device)
    pairs = 512 if padded >= 1024 else 32
    prepare_kernel[(x.shape[0], triton.cdiv(padded, 2 * pairs), groups)](
        x.view(torch.int32), cos_sin, out, x.stride(0) // 2, K=k, PADDED=padded, QUANTISE=turn is None,
        PERMUTE=permute, D=dim, ROPE=0 if turn is None else cos_sin.shape[1], PAIRS=pairs,
        num_warps=4 if pairs == 512 else 1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def widen(weight: Tensor, scale: Tensor, first: int, count: int) -> Tensor:
    """bf16 rows first ... of the weight, first a multiple of 32."""
    k = weight.shape[1]
    out = torch.empty((count, k), dtype=torch.bfloat16, device=weight.device)
    widen_kernel[(triton.cdiv(count, 16), triton.cdiv(k, 256))](
        weight[first:].view(torch.uint8), scale[first // 32 :], out, count, K=k, ROWS=16, COLUMNS=256,
        num_warps=4,
    )  # fmt: skip
    return out


def add_splits(part: Tensor, out: Tensor) -> None:
    """out = sum of part [splits, ...] over splits, in order."""
    count = out.numel()
    block = 1024 if count >= 1024 * SMS else 256
    add_kernel[(triton.cdiv(count, block),)](
        part,
        out,
        count,
        SPLITS=part.shape[0],
        BLOCK=block,
        EARLY=True,
        STACKED=STACKED,
        num_warps=block // 128,
        launch_pdl=True,
    )


def skinny_constants(weight: Tensor, groups: int, way: Plan) -> dict[str, int]:
    """The compile-time arguments of the skinny kernel that follow from shapes."""
    names = ("N", "K", "GROUPS", "Q", "NT", "LIVE", "SPLITS", "CHUNKS", "STAGES", "PADDED")
    n, k = weight.shape[0] // groups, weight.shape[1]
    padded = way.splits * way.chunks * skinny.CHUNK
    values = (n, k, groups, way.parts, way.rows, way.live, way.splits, way.chunks, way.stages, padded)
    how = {"STACKED": STACKED, "EXACT": way.exact, "OVERLAP": OVERLAP, "REFILL": way.refill}
    return dict(zip(names, values, strict=True)) | how


def boxes(weight: Tensor, parts: int) -> TensorDescriptor:
    """The weight [N, K] as [N, parts, K / parts] in words, copied in boxes of 8 KB."""
    words = weight.view(torch.int32)
    n, k = words.shape
    box, layout = [skinny.TILE_ROWS // parts, parts, 32], gl.NVMMASharedLayout(128, 32, 3)
    return TensorDescriptor(words, [n, parts, k // parts], [k, k // parts, 1], box, layout)


def few_rows(
    x: Tensor, turn: tuple[Tensor, int] | None, weight: Tensor, scale: Tensor, groups: int, way: Plan
) -> Tensor:
    """bf16 [T, groups * K] times groups weights [N, K] -> [T, groups * N] by the skinny kernel."""
    num_rows, columns = x.shape[0], weight.shape[0]
    constants = skinny_constants(weight, groups, way)
    cos_sin, dim = turn or (None, 2)
    rope = 0 if turn is None else turn[0].shape[1]
    ready, kind = None, skinny.QUANTISE if turn is None else skinny.ROTATE
    if not way.fused:
        rows = prepare(x, turn, groups, constants["PADDED"], True)
        ready = TensorDescriptor.from_tensor(rows, [way.rows, skinny.CHUNK], gl.NVMMASharedLayout(128, 16, 2))
        kind, cos_sin, dim, rope = skinny.READY, None, 2, 0
    out = torch.empty((num_rows, columns), dtype=torch.bfloat16, device=x.device)
    part = None
    if way.splits > 1:
        part = torch.empty((way.splits, num_rows, columns), dtype=torch.float32, device=x.device)
    tiles = groups * triton.cdiv(columns // groups, skinny.TILE_ROWS // way.parts)
    row_tiles = triton.cdiv(num_rows, way.rows)
    skinny.skinny_kernel[(tiles, way.splits, row_tiles)](
        boxes(weight, way.parts), ready, x if way.fused else None, scale, cos_sin,
        out if part is None else None, part,
        num_rows, x.stride(0) // 2, KIND=kind.value, D=dim, ROPE=rope, **constants,
        num_warps=4, maxnreg=128, enable_fp_fusion=False, launch_pdl=EARLY,
    )  # fmt: skip
    if part is not None:
        add_splits(part, out)
    return out


def many_rows(
    x: Tensor, turn: tuple[Tensor, int] | None, weight: Tensor, scale: Tensor, groups: int
) -> Tensor:
    """The same by cuBLAS, on the weight widened to bf16 (some of it at a time)."""
    n, k = weight.shape
    rows = prepare(x, turn, groups, k, False)
    out = torch.empty((x.shape[0], n), dtype=torch.bfloat16, device=x.device)
    if groups > 1:
        wide = widen(weight, scale, 0, n).unflatten(0, (groups, -1))
        by_group = out.unflatten(1, (groups, -1)).transpose(0, 1)
        torch.bmm(rows.unflatten(1, (groups, -1)).transpose(0, 1), wide.mT, out=by_group)
        return out
    step = max(32, WIDEN_ELEMENTS // k // 32 * 32)
    if n <= step:
        return torch.mm(rows, widen(weight, scale, 0, n).mT, out=out)
    for first in range(0, n, step):
        count = min(step, n - first)
        torch.mm(rows, widen(weight, scale, first, count).mT, out=out[:, first : first + count])
    return out


def _multiply(
    x: Tensor,
    turn: tuple[Tensor, int] | None,
    weight: Tensor,
    scale: Tensor,
    groups: int,
    deterministic: bool,
) -> Tensor:
    check_weight(weight, scale)
    if x.shape[0] == 0 or weight.shape[0] == 0:
        return x.new_empty((x.shape[0], weight.shape[0]))
    with torch.cuda.device(x.device):
        if x.shape[0] > FEW_ROWS and not deterministic:
            return many_rows(x, turn, weight, scale, groups)
        way = plan(weight.shape[0] // groups, weight.shape[1], groups, x.shape[0], deterministic)
        return few_rows(x, turn, weight, scale, groups, way)


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, quantise: bool, deterministic: bool) -> Tensor:
    if not quantise:
        raise ValueError("the Hopper linear quantises its input: exactness studies use the reference.")
    rows = _bf16_rows(x.reshape(-1, weight.shape[1]))
    out = _multiply(rows, None, weight, scale, 1, deterministic)
    return out.view(*x.shape[:-1], weight.shape[0])


def grouped_output(
    o: Tensor, cos_sin: Tensor, weight: Tensor, scale: Tensor, groups: int, deterministic: bool
) -> Tensor:
    num_rows, heads, dim = o.shape
    rope = cos_sin.shape[1]
    if weight.shape[0] % (32 * groups) or heads * dim != groups * weight.shape[1]:
        raise ValueError(
            f"{heads} heads of {dim} in {groups} groups do not fit a weight {tuple(weight.shape)}."
        )
    if dim % 2 or rope % 2 or rope > dim or cos_sin.dtype != torch.float32:
        raise ValueError(f"{rope} {cos_sin.dtype} angles do not turn heads of {dim}.")
    rows = _bf16_rows(o.reshape(num_rows, heads * dim))
    return _multiply(rows, (cos_sin.contiguous(), dim), weight, scale, groups, deterministic)


# --- bf16 weights ---------------------------------------------------------------------------------


def _stream(x: Tensor, weight: Tensor, dtype: torch.dtype, deterministic: bool) -> Tensor:
    num_rows, (n, k) = x.shape[0], weight.shape
    tiles, steps = triton.cdiv(n, STREAM_N), triton.cdiv(k, STREAM_K)
    splits = (
        split_count(tiles, steps, steps) if steps > 4 else 1
    )  # a small product is over before an addition
    block = FIXED_ROWS if deterministic else max(16, min(64, triton.next_power_of_2(num_rows)))
    out = torch.empty((num_rows, n), dtype=dtype, device=x.device)
    part = out
    if splits > 1:
        part = torch.empty((splits, num_rows, n), dtype=torch.float32, device=x.device)
    stream_kernel[(tiles, splits, triton.cdiv(num_rows, block))](
        x, weight, part, x.stride(0), num_rows, n, K=k, STEPS=triton.cdiv(steps, splits), BN=STREAM_N,
        BT=block, BK=STREAM_K, STAGES=4 if block <= 32 else 3, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        add_splits(part, out)
    return out


def _dots(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    n, k = weight.shape
    out = torch.empty((x.shape[0], n), dtype=dtype, device=x.device)
    two = x.shape[0] == 2
    dots.dots_kernel[(triton.cdiv(n, dots.BLOCK_ROWS),)](
        x, weight, out, x.stride(0), n, K=k, TWO=two,
        GROUP=dots.TWO_ROWS_TILES if two else dots.ONE_ROW_TILES, STACKED=STACKED, num_warps=4,
        launch_pdl=EARLY,
    )  # fmt: skip
    return out


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype, deterministic: bool) -> Tensor:
    n, k = weight.shape
    if weight.dtype != torch.bfloat16 or dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"the Hopper linear multiplies bf16 weights to bf16 or fp32, not {weight.dtype} to {dtype}."
        )
    if k % 8 or not weight.is_contiguous() or weight.data_ptr() % 16:
        raise ValueError(f"a weight {n} x {k} must have rows of a multiple of 8, one after the other.")
    rows = _bf16_rows(x.reshape(-1, k))
    shape = (*x.shape[:-1], n)
    if rows.shape[0] == 0 or n == 0:
        return rows.new_empty(shape, dtype=dtype)
    with torch.cuda.device(x.device):
        if deterministic:
            return _stream(rows, weight, dtype, True).view(shape)
        if rows.shape[0] <= 2 and k <= dots.MOST_COLUMNS:
            return _dots(rows, weight, dtype).view(shape)
        if rows.shape[0] <= STREAM_ROWS:
            return _stream(rows, weight, dtype, False).view(shape)
        if dtype == torch.bfloat16:
            return torch.mm(rows, weight.mT).view(shape)
        return torch.mm(rows, weight.mT, out_dtype=dtype).view(shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm_rows(x, weight, eps)
