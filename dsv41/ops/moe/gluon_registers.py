"""Many-row expert products on Hopper with the weights in registers: the other design of gluon_many.py.

A CTA multiplies a slot (at most 128 rows of one expert) by 256 rows of its weight. Weights are the M operand:
what a lane owns in a packed block is, widened to bf16, its part of the A fragment, so that decoded weights
never meet shared memory. Rows are the N operand, 64 or 128 to a CTA. Both come through a ring by cp.async.

64 rows: 128 registers a thread, two CTAs share an SM and one decodes while the other's products run. A CTA
waits for all of its products before it decodes: with anything in flight, ptxas 12.8 runs short of registers
and waits after every single product instead (which is what the prototype in the leads did).
128 rows: one CTA an SM; the next step is decoded while the products of this one run.

A slot of at most 64 rows takes the first kernel. A larger one takes the second, in a launch of its own, or
the first twice (`split`). K is never split and its order is fixed, so that a row's bits depend on neither.

In K, inside a group of 32, k = 16h + 4t + i stands at 16h + 8 (i % 2) + 2t + i // 2.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv41.ops.moe import gluon_many as many
from dsv41.ops.moe.triton_group import Groups

_bf16, _factors, _round_trip, _silu = many._bf16, many._factors, many._round_trip, many._silu
GIVE_BACK, TILE = many.GIVE_BACK, many.TILE
NARROW = gl.constexpr(64)


def _decode_asm() -> str:
    """`many.DECODE` of two words, h 0 and 1: inputs $8, $9 words, $10 and $12 the factors of both rows."""
    lines = ["{", ".reg .b32 t, u;"]
    for h in range(2):
        for output, fields in enumerate(many.DECODE):
            for number, (shift, mask) in enumerate(fields):
                moved, source = "u" if number else "t", f"${8 + h}"
                if shift:
                    name = "shl.b32" if shift > 0 else "shr.u32"
                    lines.append(f"{name} {moved}, {source}, {abs(shift)};")
                    source = moved
                if number:
                    lines.append(f"lop3.b32 t, {source}, {mask:#010x}, t, 0xEA;")
                else:
                    lines.append(f"and.b32 t, {source}, {mask:#010x};")
            lines.append(f"mul.rn.bf16x2 ${4 * h + output}, t, ${10 + output // 2 * 2};")
    return "\n".join([*lines, "}"])


_DECODE = gl.constexpr(_decode_asm())


def k_place(k: int) -> int:
    """Where column k of a group of 32 stands in the rows."""
    h, t, i = k >> 4, k >> 2 & 3, k & 3
    return 16 * h + 8 * (i & 1) + 2 * t + (i >> 1)


# --- Ring -----------------------------------------------------------------------------------------


@gluon.constexpr_function
def words_layout():
    """Words [16 bands, 8 g, 4 t, 4 (q, h)]: a lane's 16 bytes of two bands, 8 warps of a band each."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [8, 0, 0, 0]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [],
        [16, 8, 4, 4],
    )


@gluon.jit
def _ask(sources, ring, step, stage):
    """Copies of a step's rows, words and scales: one group."""
    rows, live, words, scales = sources
    x_s, w_s, s_s = ring
    async_copy.async_copy_global_to_shared(x_s.index(stage), rows + step * 64, mask=live)
    chunk, block = step >> 2, step & 3
    async_copy.async_copy_global_to_shared(w_s.index(stage), words + (chunk * 2048 + block * 128))
    async_copy.async_copy_global_to_shared(s_s.index(stage), scales + (chunk * 128 + block))
    async_copy.commit_group()


@gluon.jit
def _weights(ring, stage, L: gl.constexpr):
    """-> bf16 [256, 64] of a stage, the A operand of layout `L`: no lane gives anything to another."""
    P: gl.constexpr = words_layout()
    w = ring[1].index(stage).load(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
    w = gl.convert_layout(gl.reshape(w, [16, 8, 4, 4]), P, assert_trivial=True)
    s = ring[2].index(stage).load(gl.SliceLayout(2, gl.SliceLayout(3, P)))
    f0, _ = gl.broadcast(_factors(s, 0, P), w)
    f1, _ = gl.broadcast(_factors(s, 2, P), w)
    # The two halves of a register take the place of h in the words' layout.
    a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
        _DECODE, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r", [w, f0, f1],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
               gl.bfloat16), is_pure=True, pack=2)  # fmt: skip
    low = gl.join(gl.join(a0, a1), gl.join(b0, b1))
    high = gl.join(gl.join(c0, c1), gl.join(d0, d1))
    value = gl.reshape(gl.join(low, high), [16, 8, 4, 2, 2, 2, 2, 2])  # band g t q pair parity half h
    value = gl.reshape(gl.permute(value, (0, 6, 1, 3, 7, 5, 2, 4)), [TILE, 64])
    return gl.convert_layout(value, gl.DotOperandLayout(0, L, 2), assert_trivial=True)


@gluon.jit
def _arrived(PENDING: gl.constexpr):
    """All but PENDING groups have come, of all threads, and products may read them."""
    async_copy.wait_group(PENDING)
    gl.thread_barrier()
    fence_async_shared()


@gluon.jit
def _multiply_narrow(sources, ring, STEPS: gl.constexpr, RING: gl.constexpr, L: gl.constexpr):
    """Products, then the next step's weights."""
    acc = gl.zeros([TILE, NARROW], gl.float32, L)
    _arrived(RING - 2)
    a = _weights(ring, 0, L)
    for step in range(STEPS):
        _arrived(RING - 3)
        acc = warpgroup_mma(a, ring[0].index(step % RING).permute((1, 0)), acc, is_async=True)
        _ask(sources, ring, gl.minimum(step + RING - 1, STEPS - 1), (step + RING - 1) % RING)
        acc = warpgroup_mma_wait(0, deps=[acc])
        a = _weights(ring, (step + 1) % RING, L)
    async_copy.wait_group(0)
    return acc


@gluon.jit
def _half(acc, a, before, sources, ring, step, STEPS: gl.constexpr, RING: gl.constexpr, L: gl.constexpr):
    """Issues a step, waits for the one before it (operand `before`), decodes the next."""
    _arrived(RING - 4)
    acc = warpgroup_mma(a, ring[0].index(step % RING).permute((1, 0)), acc, is_async=True)
    _ask(sources, ring, gl.minimum(step + RING - 2, STEPS - 1), (step + RING - 2) % RING)
    acc, before = warpgroup_mma_wait(1, deps=[acc, before])
    return acc, _weights(ring, (step + 1) % RING, L), a


@gluon.jit
def _multiply_wide(sources, ring, STEPS: gl.constexpr, RING: gl.constexpr, L: gl.constexpr):
    """The next step's weights during the products; two steps a turn, so that no operand is moved."""
    acc = gl.zeros([TILE, 2 * NARROW], gl.float32, L)
    _arrived(RING - 3)
    a = _weights(ring, 0, L)
    before = a
    for step in range(0, STEPS, 2):
        acc, a, before = _half(acc, a, before, sources, ring, step, STEPS, RING, L)
        acc, a, before = _half(acc, a, before, sources, ring, step + 1, STEPS, RING, L)
    acc, before = warpgroup_mma_wait(0, deps=[acc, before])
    async_copy.wait_group(0)
    return acc


@gluon.jit
def _sources(x, w, scale, order, work, K: gl.constexpr, N: gl.constexpr, COLUMNS: gl.constexpr,
             GATED: gl.constexpr, TOP_K: gl.constexpr):  # fmt: skip
    """Pointers to the first step of a slot's rows (and which are live), a tile's words and its scales."""
    tile, expert, start, count = work
    LX: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    m = gl.arange(0, COLUMNS, gl.SliceLayout(1, LX))
    live = m < count
    if GATED:
        row = gl.load(order + start + m, mask=live, other=0) // TOP_K
    else:
        row = start + m
    column = gl.arange(0, 64, gl.SliceLayout(0, LX))
    rows = x + gl.expand_dims(row.to(gl.int64) * K, 1) + gl.expand_dims(column, 0)
    live, _ = gl.broadcast(gl.expand_dims(live, 1), rows)
    LW: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    band = gl.arange(0, 16, gl.SliceLayout(1, LW))
    at = gl.expand_dims((tile * 4 + (band >> 2)) * (8 * K) + (band & 3) * 512, 1)
    at += gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, LW)), 0)
    words = w.to(gl.pointer_type(gl.int32)) + expert.to(gl.int64) * (N * K // 8) + at
    LS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [8, 1], [1, 0])
    band = gl.arange(0, 16, gl.SliceLayout(1, LS))
    at = gl.expand_dims((tile * 4 + (band >> 2)) * (K // 2) + (band & 3) * 32, 1)
    at += gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, LS)) * 4, 0)
    scales = scale.to(gl.pointer_type(gl.int32)) + expert.to(gl.int64) * (N * K // 128) + at
    return rows, live, words, scales


# --- Results --------------------------------------------------------------------------------------


@gluon.jit
def _store(value, out, row, live, first, SIZE: gl.constexpr, WIDTH: gl.constexpr, L: gl.constexpr):
    """bf16 [SIZE, columns] -> channels first.. of every column's row, 16 bytes a lane."""
    channel = first + gl.arange(0, SIZE, gl.SliceLayout(1, L))
    at = gl.expand_dims(row.to(gl.int64) * WIDTH, 0) + gl.expand_dims(channel, 1)
    mask, _ = gl.broadcast(gl.expand_dims(live, 0), at)
    gl.store(out + at, value, mask=mask)


@gluon.jit
def _finish_gated(acc, out, order, weights, limit, work, COLUMNS: gl.constexpr, WIDTH: gl.constexpr):
    """Sums -> hidden rows of 128 intermediates, quantised, in the K order of the next product."""
    tile, _, start, count = work
    SIZE: gl.constexpr = TILE // 2
    gate, up = gl.split(gl.permute(gl.reshape(acc, [16, 2, 8, COLUMNS]), (0, 2, 3, 1)))
    gate = gl.minimum(_bf16(gate * GIVE_BACK), limit, propagate_nan=tl.PropagateNan.ALL)
    up = gl.minimum(_bf16(up * GIVE_BACK), limit, propagate_nan=tl.PropagateNan.ALL)
    up = gl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    hidden = _silu(gate) * up
    m = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, hidden.type.layout)))
    pair = gl.load(order + start + m, mask=m < count, other=0)
    weight = gl.load(weights + pair, mask=m < count, other=0.0)
    hidden = hidden * gl.expand_dims(gl.expand_dims(weight, 0), 1)
    # [group, h, t, i // 2, i % 2, column]
    hidden = gl.permute(gl.reshape(hidden.to(gl.bfloat16), [4, 2, 4, 2, 2, COLUMNS]), (0, 1, 4, 2, 3, 5))
    LO: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [4, 2], [0, 1])
    hidden = gl.convert_layout(gl.reshape(hidden, [SIZE, COLUMNS]), LO).to(gl.float32)
    hidden = gl.reshape(hidden, [4, 32, COLUMNS])
    largest = gl.max(hidden.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    hidden = _round_trip(hidden, gl.expand_dims(largest, 1)).to(gl.bfloat16)
    hidden = gl.convert_layout(gl.reshape(hidden, [SIZE, COLUMNS]), LO, assert_trivial=True)
    m = gl.arange(0, COLUMNS, gl.SliceLayout(0, LO))
    _store(hidden, out, start + m, m < count, tile * SIZE, SIZE, WIDTH, LO)


@gluon.jit
def _finish(acc, out, order, work, COLUMNS: gl.constexpr, D: gl.constexpr):
    """Sums -> 256 outputs of every pair."""
    tile, _, start, count = work
    LO: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [4, 2], [0, 1])
    value = gl.convert_layout((acc * GIVE_BACK).to(gl.bfloat16), LO)
    m = gl.arange(0, COLUMNS, gl.SliceLayout(0, LO))
    pair = gl.load(order + start + m, mask=m < count, other=0)
    _store(value, out, pair, m < count, tile * TILE, TILE, D, LO)


# --- Kernel ---------------------------------------------------------------------------------------


@gluon.jit
def _piece(x, w, scale, out, order, weights, limit, work, K: gl.constexpr, N: gl.constexpr,
           GATED: gl.constexpr, TOP_K: gl.constexpr, COLUMNS: gl.constexpr, RING: gl.constexpr):  # fmt: skip
    """At most COLUMNS rows of an expert by a tile of its weight. The ring is its own, so that the sums can be
    renamed in the same memory: two rings and no more fit into an SM's."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ring = (
        gl.allocate_shared_memory(gl.bfloat16, [RING, COLUMNS, 64], gl.NVMMASharedLayout(128, 16, 2)),
        gl.allocate_shared_memory(gl.int32, [RING, 16, 128], PLAIN),
        gl.allocate_shared_memory(gl.int32, [RING, 16, 8], PLAIN),
    )
    sources = _sources(x, w, scale, order, work, K, N, COLUMNS, GATED, TOP_K)
    AHEAD: gl.constexpr = RING - 1 if COLUMNS == NARROW else RING - 2
    for step in gl.static_range(AHEAD):
        _ask(sources, ring, step, step)
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, COLUMNS, 16])
    if COLUMNS == NARROW:
        acc = _multiply_narrow(sources, ring, K // 64, RING, L)
    else:
        acc = _multiply_wide(sources, ring, K // 64, RING, L)
    if GATED:
        _finish_gated(acc, out, order, weights, limit, work, COLUMNS, N // 2)
    else:
        _finish(acc, out, order, work, COLUMNS, N)


@gluon.jit(do_not_specialize_on_alignment=many._PLAIN)
def _experts(x, w, scale, out, order, weights, num_slots, slot_expert, slot_start, slot_count, limit,
             K: gl.constexpr, N: gl.constexpr, GATED: gl.constexpr, TOP_K: gl.constexpr,
             COLUMNS: gl.constexpr, SPLIT: gl.constexpr, RING: gl.constexpr):  # fmt: skip
    tile, slot = gl.program_id(0), gl.program_id(1)
    if slot >= gl.load(num_slots):
        return
    count = gl.load(slot_count + slot)
    if not SPLIT and (count > NARROW) != (COLUMNS > NARROW):
        return
    expert, start = gl.load(slot_expert + slot), gl.load(slot_start + slot)
    for first in range(0, count, COLUMNS):
        work = (tile, expert, start + first, gl.minimum(count - first, COLUMNS))
        _piece(x, w, scale, out, order, weights, limit, work, K, N, GATED, TOP_K, COLUMNS, RING)


# --- Host -----------------------------------------------------------------------------------------


def specialisation(
    k: int, n: int, gated: bool, top_k: int, columns: int = 64, split: bool = True, ring: int = 6
) -> dict[str, object]:
    """Compile-time arguments of `_experts`. With `split`, 64 columns take any slot, 64 rows at a time;
    without, 64 take slots of at most 64 rows, 128 the others."""
    return {
        "K": k,
        "N": n,
        "GATED": gated,
        "TOP_K": top_k if gated else 1,
        "COLUMNS": columns,
        "SPLIT": split,
        "RING": ring,
    }


def registers(columns: int) -> int:
    """Of a thread: two CTAs of 256 threads share an SM, or one has it."""
    return 128 if columns == NARROW.value else 255


def quantise_rows(x: Tensor) -> Tensor:
    """As `many.quantise_rows`, in the order of `k_place`."""
    return many.quantise_rows(x, fragments=True)


def multiply(
    x: Tensor,
    groups: Groups,
    weights: Tensor,
    packed: Tensor,
    scale: Tensor,
    limit: float | None,
    split: bool = True,
) -> Tensor:
    """As `many.multiply`, in the order of `k_place`."""
    gated = limit is not None
    n, k = packed.shape[1], packed.shape[2] * 2
    pairs, top_k = weights.numel(), weights.shape[1]
    out = torch.empty((pairs, n // 2 if gated else n), dtype=torch.bfloat16, device=x.device)
    if pairs == 0:
        return out
    grid = (n // many.TILE_ROWS, groups.slot_expert.shape[0])
    with torch.cuda.device(x.device):
        for columns in (64,) if split else (128, 64):
            _experts[grid](
                x, packed, scale, out, groups.order, weights, groups.num_slots, groups.slot_expert,
                groups.slot_start, groups.slot_count, limit if limit is not None else 0.0,
                **specialisation(k, n, gated, top_k, columns, split),
                num_warps=8, maxnreg=registers(columns),
            )  # fmt: skip
    return out
