"""Compression: pool `ratio` tokens into one latent; what is not complete waits in the open group.

    ratio 1   latent_t = norm(kv_t)
    ratio 2   latent   = norm(sum over the pair of kv_i * softmax(gate)_i)  softmax over the pair, per channel

`kv_gate [T, d or 2d]` float32 is the raw projection of every row: kv, and at ratio 2 the gate behind it. A
row closes its group when `(position + 1) % ratio == 0`; the other rows get a latent of zeros. At ratio 2 the
partner of a closing row is another row of this step (`partner_row [T]`, its row number, -1 if it is not here)
or was kept by an earlier step (`partner_slot [T]`, a row of `open_groups`). `open_slot [T]` says where a row
is kept for later steps, -1 nowhere. All reads of `open_groups` precede all writes. The latent is neither
rotated nor quantised (spec/model.md 3.5).

T token rows, d head dimension. `open_groups [slots, 2d]` float32 (empty at ratio 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops.library import declare


def _compress_fake(
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
    impl: str,
) -> Tensor:
    return kv_gate.new_empty((kv_gate.shape[0], norm.shape[0]), dtype=dtype)


compress = declare(
    "compression",
    "compress(Tensor kv_gate, Tensor positions, Tensor partner_row, Tensor partner_slot, Tensor open_slot,"
    " Tensor norm, Tensor(a!) open_groups, int ratio, float eps, ScalarType dtype, str impl) -> Tensor",
    fake=_compress_fake,
)
