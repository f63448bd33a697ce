"""Residual copies (mHC): a sub-layer's coefficients, the collapse into its input, its output's expansion.

    x      = copies of a row, concatenated                                   [M*D]
    z      = (fn @ x) / rms(x)                                               [(2 + M)*M]
    pre    = sigmoid(scale_0 z[:M] + base[:M]) + eps                         [M]
    post   = 2 sigmoid(scale_1 z[M:2M] + base[M:2M])                         [M]
    comb   = Sinkhorn(scale_2 z[2M:] + base[2M:])   rows, then columns       [M, M]
    expand(y, streams, post, comb)_k     = post_k y + sum_j comb_jk streams_j
    collapse(streams, pre, norm)         = rms_norm(sum_j pre_j streams_j, norm)
    update(y, streams, post, comb, pre, norm): expand, then collapse of the new streams
    mix, sound             = pre, no NaN in it         handed on by expand and update              [M], bool

Every collapse of the model feeds a norm, so the norm belongs to it. Stored values are rounded to the stream's
dtype: the expanded streams, the sum of a collapse before its norm, the norm's result (spec/arithmetic.md 2,
points 1 and 10).

The coefficients are staggered: a sub-layer is fed by the previous sub-layer's `pre` (spec/model.md 3.1).
They are not needed before the sub-layer's output is there, so an implementation may compute them beside it.
Then `side` is the handle of their stream (ops/streams.py), else 0: nothing but `expand` and `update` may read
what `coefficients` returns. Later readers get `mix`, a copy.

`tickets` are int32 zeros, any number, in which the programs of a launch may count themselves: afterwards they
are zero again, so the schemas name no mutation. Ops that share tickets must run one after the other, as those
of a step do, each fed by the one before. With fewer tickets than rows an implementation takes more launches.

T token rows, M residual copies, D hidden size. All coefficients are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops.library import declare


def _coefficients_fake(streams: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, copies = streams.shape[:2]
    pre = streams.new_empty((rows, copies), dtype=torch.float32)
    comb = streams.new_empty((rows, copies, copies), dtype=torch.float32)
    return pre, torch.empty_like(pre), comb, torch.empty(1, dtype=torch.int64, device="cpu")


def _collapse_fake(streams: Tensor, *_: object) -> Tensor:
    return streams.new_empty((streams.shape[0], streams.shape[2]))


def _expand_fake(y: Tensor, streams: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    mix = streams.new_empty(streams.shape[:2], dtype=torch.float32)
    return streams.new_empty(streams.shape), mix, streams.new_empty(streams.shape[:1], dtype=torch.bool)


def _update_fake(y: Tensor, streams: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*_expand_fake(y, streams), _collapse_fake(streams))


hyper_coefficients = declare(
    "hyper",
    "hyper_coefficients(Tensor streams, Tensor fn, Tensor base, Tensor scale, Tensor tickets, int sweeps,"
    " float eps, float norm_eps, str impl) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_coefficients_fake,
)
hyper_collapse = declare(
    "hyper",
    "hyper_collapse(Tensor streams, Tensor pre, Tensor norm, float norm_eps, str impl) -> Tensor",
    fake=_collapse_fake,
)
hyper_expand = declare(
    "hyper",
    "hyper_expand(Tensor y, Tensor streams, Tensor post, Tensor comb, Tensor pre, Tensor side, str impl)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_expand_fake,
)
hyper_update = declare(
    "hyper",
    "hyper_update(Tensor y, Tensor streams, Tensor post, Tensor comb, Tensor pre, Tensor side,"
    " Tensor norm, Tensor tickets, float norm_eps, str impl) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_update_fake,
)
