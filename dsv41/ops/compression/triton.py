"""Compression in Triton: one launch, one program a row.

Layout. Four warps hold a row's kv and gate, d fp32 values each. At ratio 2 a row's program pools it with its
partner, norms and stores the latent; the other rows store zeros and read nothing.

The trick: all reads of `open_groups` precede all writes without a barrier between programs. The program that
writes a slot first pools every row of the step that reads it, and a row whose slot is written in this step
leaves itself to that program. So a slot that changes is read and written by one program, in that order,
whatever the order of the rows; it needs only that no slot is written twice. They find each other by a scan of
the step's slots, which only rows that read or write a slot pay: the first and the last of a request.

Shape letters: T rows, d channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.hardware import Hardware

WARPS = 4
SCAN = 1024  # slots that a program looks at together, 8 a thread


def why_not(hardware: Hardware, record: str | None) -> str | None:
    if hardware.sm < 80:
        return f"the Triton compression kernels need a CUDA GPU of SM80 or newer, not {hardware.name}"
    return None


@triton.jit
def _norm(x, weight, eps, D: tl.constexpr):
    """Root mean square norm of one row in fp32."""
    scale = tl.rsqrt(tl.div_rn(tl.sum(x * x, axis=0), D * 1.0) + eps)
    return x * scale * weight


@triton.jit
def _normed_rows(kv_gate, row_stride, norm, latent, eps, D: tl.constexpr, WIDTH: tl.constexpr):
    """Ratio 1: the latent of a row is its norm."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    mask = channel < D
    dtype: tl.constexpr = latent.dtype.element_ty
    kv = tl.load(kv_gate + row * row_stride + channel, mask=mask, other=0.0).to(dtype).to(tl.float32)
    weight = tl.load(norm + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(latent + row * D + channel, _norm(kv, weight, eps, D).to(dtype), mask=mask)


@triton.jit
def _pool(partner, own, norm, latent, eps, D: tl.constexpr, WIDTH: tl.constexpr):
    """The latent of the pair (partner, own), pointers to kv | gate."""
    channel = tl.arange(0, WIDTH)
    mask = channel < D
    dtype: tl.constexpr = latent.dtype.element_ty
    kv_0 = tl.load(partner + channel, mask=mask, other=0.0)
    gate_0 = tl.load(partner + D + channel, mask=mask, other=0.0)
    kv_1 = tl.load(own + channel, mask=mask, other=0.0)
    gate_1 = tl.load(own + D + channel, mask=mask, other=0.0)
    weight = tl.load(norm + channel, mask=mask, other=0.0).to(tl.float32)
    largest = tl.maximum(gate_0, gate_1)
    exp_0, exp_1 = tl.exp(gate_0 - largest), tl.exp(gate_1 - largest)
    total = exp_0 + exp_1
    pooled = tl.div_rn(exp_0, total) * kv_0 + tl.div_rn(exp_1, total) * kv_1
    pooled = pooled.to(dtype).to(tl.float32)
    tl.store(latent + channel, _norm(pooled, weight, eps, D).to(dtype), mask=mask)


@triton.jit
def _next_row(slots, slot, after, num_rows, SCAN: tl.constexpr):
    """The first row behind `after` that names this slot, num_rows if there is none."""
    found = tl.zeros((SCAN,), tl.int32) + num_rows
    for start in tl.range((after + 1) // SCAN * SCAN, num_rows, SCAN, loop_unroll_factor=4):
        row = start + tl.arange(0, SCAN)
        names = (tl.load(slots + row, mask=row < num_rows, other=-1) == slot) & (row > after)
        found = tl.minimum(found, tl.where(names, row, num_rows))
    return tl.min(found, axis=0)


@triton.jit
def _reads(row, positions, partner_row, partner_slot):
    """Whether a row closes a pair whose partner an earlier step has kept."""
    odd = (tl.load(positions + row) & 1) == 1
    return odd & (tl.load(partner_row + row) < 0) & (tl.load(partner_slot + row) >= 0)


@triton.jit(do_not_specialize=["num_rows"])  # one compilation for every T
def _pooled_pairs(
    kv_gate,
    row_stride,
    positions,
    partner_row,
    partner_slot,
    open_slot,
    norm,
    open_groups,
    slot_stride,
    latent,
    num_rows,
    eps,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Ratio 2."""
    row = tl.program_id(0).to(tl.int64)
    own = kv_gate + row * row_stride
    mate = tl.load(partner_row + row)
    read_slot = tl.load(partner_slot + row)
    write_slot = tl.load(open_slot + row)
    if _reads(row, positions, partner_row, partner_slot):
        if _next_row(open_slot, read_slot, -1, num_rows, SCAN) >= num_rows:
            _pool(open_groups + read_slot * slot_stride, own, norm, latent + row * D, eps, D, WIDTH)
    elif (tl.load(positions + row) & 1) == 1 and mate >= 0:
        _pool(kv_gate + mate * row_stride, own, norm, latent + row * D, eps, D, WIDTH)
    else:
        channel = tl.arange(0, WIDTH)
        zeros = tl.zeros((WIDTH,), latent.dtype.element_ty)
        tl.store(latent + row * D + channel, zeros, mask=channel < D)
    if write_slot >= 0:
        kept = open_groups + write_slot * slot_stride
        reader = _next_row(partner_slot, write_slot, -1, num_rows, SCAN)
        while reader < num_rows:
            index = reader.to(tl.int64)
            if _reads(index, positions, partner_row, partner_slot):
                _pool(kept, kv_gate + index * row_stride, norm, latent + index * D, eps, D, WIDTH)
            reader = _next_row(partner_slot, write_slot, reader, num_rows, SCAN)
        tl.debug_barrier()  # the store may give a channel to another thread than the loads above
        channel = tl.arange(0, WIDTH)
        for half in tl.static_range(2):
            offset = half * D + channel
            tl.store(kept + offset, tl.load(own + offset, mask=channel < D), mask=channel < D)


def compress(
    kv_gate: Tensor,
    positions: Tensor,
    partner_row: Tensor,
    partner_slot: Tensor,
    open_slot: Tensor,
    norm: Tensor,
    open_groups: Tensor,
    ratio: int,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    assert ratio in (1, 2), f"compression ratio {ratio}"
    num_rows, dim = kv_gate.shape[0], norm.shape[0]
    assert kv_gate.shape[1] == ratio * dim, f"{kv_gate.shape[1]} projected channels for {ratio} times {dim}"
    assert kv_gate.dtype == torch.float32, f"the projection is float32, got {kv_gate.dtype}"
    assert kv_gate.stride(1) == norm.stride(0) == 1, "rows lie in one piece"
    latent = torch.empty((num_rows, dim), dtype=dtype, device=kv_gate.device)
    if num_rows == 0:
        return latent
    shape = {"D": dim, "WIDTH": triton.next_power_of_2(dim), "num_warps": WARPS, "enable_fp_fusion": False}
    if ratio == 1:
        _normed_rows[(num_rows,)](kv_gate, kv_gate.stride(0), norm, latent, eps, **shape)
        return latent
    for rows in (positions, partner_row, partner_slot, open_slot):
        assert (*rows.shape, rows.stride(0)) == (num_rows, 1), "one position, partner and slot a row"
        assert rows.dtype == torch.int64, f"positions, rows and slots are int64, got {rows.dtype}"
    assert open_groups.dtype == torch.float32, f"open groups are float32, got {open_groups.dtype}"
    assert open_groups.stride(1) == 1, "slots lie in one piece"
    assert open_groups.shape[1] == 2 * dim, f"wrong shape {tuple(open_groups.shape)} of open groups"
    _pooled_pairs[(num_rows,)](
        kv_gate,
        kv_gate.stride(0),
        positions,
        partner_row,
        partner_slot,
        open_slot,
        norm,
        open_groups,
        open_groups.stride(0),
        latent,
        num_rows,
        eps,
        SCAN=SCAN,
        **shape,
    )
    return latent
