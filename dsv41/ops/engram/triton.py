"""Engram in Triton: one launch an op.

Hash. A program hashes `HASH_ROWS` rows, a lane a column, so that the one slow step, a 64-bit remainder, is
done once a lane. Integers: exact.

Lookup. A program of 4 warps copies `LOOKUP_ROWS` table rows, 16 bytes a lane, and widens e4m3 by moving its
fields into a float32, where a product with a power of two is exact. The table is read where it lies: device
memory, or pinned host memory over the bus, by its own address; nothing else of it is touched.

Write. A program of 8 warps takes one copy of one row: its three sums, its gate and its new stream. bf16 rows
are words of two channels (ops/hyper/triton_words.py). Image rows keep their words. The order of a sum depends
on the sizes alone, never on the row count.

Shape letters: T rows, N longest n-gram, C columns of a row, c channels of a table row, M copies, D channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv41.hardware import Hardware
from dsv41.ops.hyper.triton_words import check_rows, exponential, half, load_row, pack

HASH_ROWS, HASH_WARPS = 4, 4
LOOKUP_ROWS, LOOKUP_WARPS = 8, 4
WIDTH, WRITE_WARPS = 512, 8  # words of two channels that a program treats at once
SCALED = 32  # channels of a table row that share a scale


def why_not(hardware: Hardware, record: str | None) -> str | None:
    if hardware.sm < 80:
        return f"the Triton kernels of Engram need a CUDA GPU of SM80 or newer, not {hardware.name}"
    return None


@triton.jit(do_not_specialize=["num_rows", "pad_token", "vocab"])
def _hash(
    tokens,
    lookback,
    lookback_stride,
    is_image,
    token_map,
    multipliers,
    primes,
    offsets,
    out,
    num_rows,
    pad_token,
    vocab,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    here = row < num_rows
    there = column < BACK * HEADS
    prime = tl.load(primes + column, mask=there, other=1)[None, :]
    offset = tl.load(offsets + column, mask=there, other=0)[None, :]
    token = tl.load(tokens + row, mask=here, other=0).to(tl.int64)
    blocked = tl.load(is_image + row, mask=here, other=0) != 0
    rolling = tl.zeros((ROWS,), tl.int64)
    hashed = tl.zeros((ROWS, COLUMNS), tl.int64)
    for shift in tl.static_range(BACK + 1):
        if shift > 0:
            token = tl.load(lookback + row * lookback_stride + (shift - 1), mask=here, other=-1).to(tl.int64)
            blocked = blocked | (token < 0)
        known = tl.where(blocked, pad_token, token)
        known = tl.minimum(tl.maximum(known, 0), vocab - 1)
        term = tl.load(token_map + known) * tl.load(multipliers + shift)
        rolling = rolling ^ term
        if shift > 0:
            hashed = tl.where((column // HEADS == shift - 1)[None, :], rolling[:, None], hashed)
    rest = hashed % prime
    rest = tl.where(rest < 0, rest + prime, rest)  # torch's remainder has the sign of the divisor
    at = out + row[:, None] * (BACK * HEADS) + column[None, :]
    tl.store(at, rest + offset, mask=here[:, None] & there[None, :])


@triton.jit
def _scale(byte):
    """e8m0 bytes -> float32: records.e8m0_decode."""
    byte = byte.to(tl.int32)
    edge = (byte == 0) | (byte == 255)
    return ((byte << 23) | (edge.to(tl.int32) << 22)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_entries"])
def _lookup(
    table,
    scale,
    rows,
    rows_stride,
    out,
    num_entries,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,  # scales of a table row
    BLOCK_WIDTH: tl.constexpr,  # a power of two
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = entry < num_entries
    row = tl.load(rows + (entry // COLUMNS) * rows_stride + entry % COLUMNS, mask=here, other=0)
    block = tl.arange(0, BLOCK_WIDTH)
    mask = here[:, None] & (block < BLOCKS)[None, :]
    factor = tl.load(scale + row[:, None] * BLOCKS + block[None, :], mask=mask, other=127)
    channel = (block[:, None] * SCALED + tl.arange(0, SCALED)[None, :])[None, :, :]
    code = tl.load(table + row[:, None, None] * (BLOCKS * SCALED) + channel, mask=mask[:, :, None], other=0)
    code = code.to(tl.int32)
    value = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True) * (2.0**120)
    value = tl.where((code & 0x7F) == 0x7F, float("nan"), value) * _scale(factor)[:, :, None]
    target = out + entry[:, None, None] * (BLOCKS * SCALED) + channel
    tl.store(target, value.to(tl.bfloat16), mask=mask[:, :, None])


@triton.jit
def _write(
    streams,
    streams_stride,
    kv,
    kv_stride,
    query,
    key,
    is_image,
    eps,
    out,
    COPIES: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROOT: tl.constexpr,  # D^-1/2
):
    PIECES: tl.constexpr = (D // 2 + WIDTH - 1) // WIDTH
    row = (tl.program_id(0) // COPIES).to(tl.int64)
    copy = tl.program_id(0) % COPIES
    image = tl.load(is_image + row) != 0
    xs = load_row(streams + row * streams_stride + copy * D, D, WIDTH)
    keys = load_row(kv + row * kv_stride + copy * D, D, WIDTH)
    queries = load_row(query + copy * D, D, WIDTH)
    weights = load_row(key + copy * D, D, WIDTH)
    values = load_row(kv + row * kv_stride + COPIES * D, D, WIDTH)
    match = tl.zeros((WIDTH,), tl.float32)
    x_squares = tl.zeros((WIDTH,), tl.float32)
    key_squares = tl.zeros((WIDTH,), tl.float32)
    for piece in tl.static_range(PIECES):
        for odd in tl.static_range(2):
            x = half(xs[piece], odd)
            k = half(keys[piece], odd)
            match += x * half(queries[piece], odd) * half(weights[piece], odd) * k
            x_squares += x * x
            key_squares += k * k
    inverse = tl.rsqrt(tl.sum(x_squares, axis=0) / D + eps) * tl.rsqrt(tl.sum(key_squares, axis=0) / D + eps)
    alpha = tl.sum(match, axis=0) * inverse * ROOT
    magnitude = tl.abs(alpha)
    root = tl.sqrt_rn(tl.where(magnitude < 1e-6, 1e-6, magnitude))  # NaN stays
    alpha = tl.where(alpha.to(tl.int32, bitcast=True) < 0, -root, root)
    gate = 1.0 / (1.0 + exponential(-alpha))
    target = (out + (row * COPIES + copy) * D).to(tl.pointer_type(tl.int32))
    for piece in tl.static_range(PIECES):
        word = piece * WIDTH + tl.arange(0, WIDTH)
        even = half(xs[piece], False) + gate * half(values[piece], False)
        odd_value = half(xs[piece], True) + gate * half(values[piece], True)
        new = tl.where(image, xs[piece], pack(even, odd_value))
        tl.store(target + word, new, mask=word < D // 2)


# -- the ops ------------------------------------------------------------------------------------------------


def engram_hash(
    token_ids: Tensor,
    lookback: Tensor,
    is_image: Tensor,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_token: int,
) -> Tensor:
    num_rows, back = lookback.shape
    heads = primes.shape[1]
    out = token_ids.new_empty((num_rows, offsets.shape[0]), dtype=torch.int64)
    if num_rows == 0:
        return out
    constants = (token_map, multipliers, primes, offsets)
    assert all(one.dtype == torch.int64 for one in constants), "the constants of a hash are int64"
    assert all(one.is_contiguous() for one in constants), "the constants of a hash lie in one piece"
    assert primes.shape[0] == back, f"{primes.shape[0]} n-gram sizes for {back} tokens of history"
    assert offsets.shape == (back * heads,), f"{offsets.shape[0]} offsets for {back} sizes of {heads} heads"
    assert token_ids.stride(0) == is_image.stride(0) == 1, "tokens and image flags lie in one piece"
    assert is_image.dtype == torch.bool, f"image flags are bool, got {is_image.dtype}"
    check_rows(lookback)
    _hash[(triton.cdiv(num_rows, HASH_ROWS),)](
        token_ids,
        lookback,
        lookback.stride(0),
        is_image.view(torch.uint8),
        token_map,
        multipliers,
        primes,
        offsets,
        out,
        num_rows,
        pad_token,
        token_map.shape[0],
        BACK=back,
        HEADS=heads,
        COLUMNS=triton.next_power_of_2(back * heads),
        ROWS=HASH_ROWS,
        num_warps=HASH_WARPS,
    )
    return out


def engram_lookup(table: Tensor, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != torch.bfloat16:
        raise ValueError(f"the Triton lookup of Engram makes bf16 rows, not {dtype}")
    (num_rows, columns), channels = rows.shape, table.shape[1]
    if channels % SCALED or scale.shape[1] != channels // SCALED:
        raise ValueError(
            f"the Triton lookup of Engram reads blocks of {SCALED} channels with a scale each,"
            f" not rows of {channels} with {scale.shape[1]}"
        )
    if rows.is_cuda:
        _check_reachable(table, scale)
    assert table.dtype == torch.float8_e4m3fn, f"a table holds e4m3 values, not {table.dtype}"
    assert table.is_contiguous(), "a table lies in one piece"
    assert scale.is_contiguous(), "a table's scales lie in one piece"
    assert rows.dtype == torch.int64, f"table rows are int64, got {rows.dtype}"
    check_rows(rows)
    out = rows.new_empty((num_rows, columns * channels), dtype=dtype)
    if num_rows == 0:
        return out
    _lookup[(triton.cdiv(num_rows * columns, LOOKUP_ROWS),)](
        table.view(torch.uint8),
        scale.view(torch.uint8),
        rows,
        rows.stride(0),
        out,
        num_rows * columns,
        COLUMNS=columns,
        BLOCKS=channels // SCALED,
        BLOCK_WIDTH=triton.next_power_of_2(channels // SCALED),
        SCALED=SCALED,
        ROWS=LOOKUP_ROWS,
        num_warps=LOOKUP_WARPS,
    )
    return out


def _check_reachable(*tensors: Tensor) -> None:
    """A kernel reads device memory and pinned host memory. A mapped file is neither."""
    for tensor in tensors:
        if not tensor.is_cuda and not tensor.is_pinned():
            raise ValueError(
                "the Triton lookup of Engram reads tables on the device or in pinned host memory"
                " (--engram-tables device or host); for tables on disk choose --backends engram=reference"
            )


def engram_write(
    streams: Tensor, kv: Tensor, query: Tensor, key: Tensor, is_image: Tensor, eps: float
) -> Tensor:
    num_rows, copies, dim = streams.shape
    if not streams.dtype == kv.dtype == torch.bfloat16:
        raise ValueError(f"the Triton write of Engram adds bf16 rows, not {kv.dtype} to {streams.dtype}")
    if dim % 8:
        raise ValueError(f"the Triton write of Engram needs a multiple of 8 channels, not {dim}")
    assert kv.shape == (num_rows, (copies + 1) * dim), f"{tuple(kv.shape)} for streams {tuple(streams.shape)}"
    assert query.dtype == key.dtype == torch.bfloat16, "query and key weights are bf16"
    assert query.shape == key.shape == (copies, dim), "query and key have a weight for each copy's channel"
    assert query.is_contiguous(), "query weights lie in one piece"
    assert key.is_contiguous(), "key weights lie in one piece"
    assert is_image.dtype == torch.bool, f"image flags are bool, got {is_image.dtype}"
    assert is_image.stride(0) == 1, "image flags lie in one piece"
    check_rows(streams, kv)
    out = streams.new_empty(streams.shape)
    if num_rows == 0:
        return out
    _write[(num_rows * copies,)](
        streams,
        streams.stride(0),
        kv,
        kv.stride(0),
        query,
        key,
        is_image.view(torch.uint8),
        eps,
        out,
        COPIES=copies,
        D=dim,
        WIDTH=min(WIDTH, triton.next_power_of_2(dim // 2)),
        ROOT=dim**-0.5,
        num_warps=WRITE_WARPS,
    )
    return out
