"""Publishing: rotate, quantise, and store in a paged cache by slot. A slot of -1 writes nothing.

    publish_window   the window KV of every row: norm, rotation, store; returns its queries rotated
    publish_states   compressed states: rotation, store
    publish_index_k  index keys: norm, rotation, store

T token rows, H heads, d channels, r rotated channels. `cos_sin [T, r]` holds the angles of the row's own
position, or of its group's first token for states and index keys (model/rope.py). `record` names the byte
format (ops/records.py); plain rows store what the release would have quantised, after the same round trip,
when `quantise`. `page_states` is the number of states of one page; slot = page * page_states + offset, int64.
Queries of fewer heads than `pad_heads` come back with heads of zeros behind them, for kernels that want a
fixed number.
"""

from __future__ import annotations

from torch import Tensor

from dsv41.ops.library import declare


def _publish_window_fake(
    q: Tensor,
    kv: Tensor,
    norm: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    record: str,
    page_states: int,
    pad_heads: int,
    eps: float,
    quantise: bool,
    impl: str,
) -> Tensor:
    return q.new_empty((q.shape[0], max(q.shape[1], pad_heads), q.shape[2]))


def _store_fake(*_: object) -> None:
    return None


publish_window = declare(
    "publish",
    "publish_window(Tensor q, Tensor kv, Tensor norm, Tensor cos_sin, Tensor slots, Tensor(a!) cache,"
    " str record, int page_states, int pad_heads, float eps, bool quantise, str impl) -> Tensor",
    fake=_publish_window_fake,
)
publish_states = declare(
    "publish",
    "publish_states(Tensor latent, Tensor cos_sin, Tensor slots, Tensor(a!) cache, str record,"
    " int page_states, bool quantise, str impl) -> ()",
    fake=_store_fake,
)
publish_index_k = declare(
    "publish",
    "publish_index_k(Tensor key, Tensor norm, Tensor cos_sin, Tensor slots, Tensor(a!) cache, str record,"
    " int page_states, float eps, bool quantise, str impl) -> ()",
    fake=_store_fake,
)
