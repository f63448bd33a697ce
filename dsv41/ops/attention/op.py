"""Sparse attention: one softmax over a row's window states and its selected compressed states.

    l_n   = <q_h, k_n> / sqrt(d)                              over every listed state n, window first
    o_h   = sum_n exp(l_n - m) k_n / (sum_n exp(l_n - m) + exp(sink_h - m))

Keys and values are the same stored vector, shared by all heads; the sink has no value (spec/model.md 3.3). A
slot of -1 is skipped, a state listed twice counts twice, a row with nothing listed gets zeros.

T token rows, H heads, d head dimension, W window, K selected states. `q` may have padding behind its H heads
(publish_window); `sink [H]` says how many count, and the output has those. `window_slots [T, W]` and
`state_slots [T, K]` are int32 slots of the two caches (page * page_states + offset); K is 0 in a window-only
layer. The output is not yet rotated back. `deterministic`: a row's bits do not depend on the number of rows
beside it (the reference never lets them).
"""

from __future__ import annotations

from torch import Tensor

from dsv41.ops.library import declare


def _sparse_attention_fake(
    q: Tensor,
    window: Tensor,
    window_slots: Tensor,
    window_record: str,
    window_page: int,
    states: Tensor,
    state_slots: Tensor,
    state_record: str,
    state_page: int,
    sink: Tensor,
    *_: object,
) -> Tensor:
    return q.new_empty((q.shape[0], sink.shape[0], q.shape[2]))


sparse_attention = declare(
    "attention",
    "sparse_attention(Tensor q, Tensor window, Tensor window_slots, str window_record, int window_page,"
    " Tensor states, Tensor state_slots, str state_record, int state_page, Tensor sink, int rope_dim,"
    " bool deterministic, str impl) -> Tensor",
    fake=_sparse_attention_fake,
    eager=True,
)
