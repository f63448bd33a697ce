"""Engram: hash a row's last n-grams, look their rows up, add a gated value to the residual copies.

    v_i  = map[token i back], or map[pad] from the first blocked shift on (before the start, an image token)
    R_0  = v_0 m_0,  R_i = R_{i-1} xor v_i m_i                           int64, never negative
    row  = R_i mod prime[i-1, h] + offset[(i-1)*heads + h]               i = 1..N-1, h = 0..heads-1
    a_m  = <X_m * query_m * key_m, K_m> / (rms(X_m) rms(K_m) sqrt(D))
    X_m += sigmoid(sign(a_m) sqrt(max(|a_m|, 1e-6))) v       image rows are left as they are

T token rows, N longest n-gram, C = (N-1)*heads columns, c channels of a table row, M residual copies, D
hidden size. `lookback [T, N-1]` holds the token ids 1..N-1 back, -1 where there is none or it belongs to an
image. `kv` is the projection of the looked-up rows: M keys, then one value, of D channels each (spec/model.md
6).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops.library import declare


def _engram_hash_fake(
    token_ids: Tensor,
    lookback: Tensor,
    is_image: Tensor,
    token_map: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_token: int,
    impl: str,
) -> Tensor:
    return token_ids.new_empty((token_ids.shape[0], offsets.shape[0]), dtype=torch.int64)


def _engram_lookup_fake(table: Tensor, scale: Tensor, rows: Tensor, dtype: torch.dtype, impl: str) -> Tensor:
    return rows.new_empty((rows.shape[0], rows.shape[1] * table.shape[1]), dtype=dtype)


def _engram_write_fake(streams: Tensor, *_: object) -> Tensor:
    return streams.new_empty(streams.shape)


engram_hash = declare(
    "engram",
    "engram_hash(Tensor token_ids, Tensor lookback, Tensor is_image, Tensor token_map, Tensor multipliers,"
    " Tensor primes, Tensor offsets, int pad_token, str impl) -> Tensor",
    fake=_engram_hash_fake,
)
engram_lookup = declare(
    "engram",
    "engram_lookup(Tensor table, Tensor scale, Tensor rows, ScalarType dtype, str impl) -> Tensor",
    fake=_engram_lookup_fake,
)
engram_write = declare(
    "engram",
    "engram_write(Tensor streams, Tensor kv, Tensor query, Tensor key, Tensor is_image, float eps, str impl)"
    " -> Tensor",
    fake=_engram_write_fake,
)
