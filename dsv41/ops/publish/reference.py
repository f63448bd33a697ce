"""Publishing in plain PyTorch. Every value is rounded where the release rounds it: after the norm, after the
rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops import records
from dsv41.ops.arithmetic import rms_norm, rotate


def why_not(hardware: object, record: str | None) -> str | None:
    return None


def _store(
    value: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    record: str,
    page_states: int,
    round_trip: str,
) -> None:
    turned = rotate(value, cos_sin)
    if record.startswith("rows_"):
        turned = records.round_trip(turned, round_trip)
    records.write_slots(record, cache, slots, turned, page_states, cos_sin.shape[-1])


def publish_window(
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
) -> Tensor:
    round_trip = "fp8_32" if quantise else "none"
    _store(rms_norm(kv, norm, eps), cos_sin, slots, cache, record, page_states, round_trip)
    q = rotate(q, cos_sin)
    more = max(pad_heads - q.shape[1], 0)
    return torch.nn.functional.pad(q, (0, 0, 0, more)) if more else q


def publish_states(
    latent: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    record: str,
    page_states: int,
    quantise: bool,
) -> None:
    _store(latent, cos_sin, slots, cache, record, page_states, "nvfp4_16" if quantise else "none")


def publish_index_k(
    key: Tensor,
    norm: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    record: str,
    page_states: int,
    eps: float,
    quantise: bool,
) -> None:
    round_trip = "mxfp4_32" if quantise else "none"
    _store(rms_norm(key, norm, eps), cos_sin, slots, cache, record, page_states, round_trip)
