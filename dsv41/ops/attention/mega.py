"""FlashMLA's fused attention for SM100 ("Mega"): found, described, and refused.

The wheel sgl-flash-mla 1.0.0 carries it: `torch.ops.flash_mla.fused_norm_rope_attn_rope_cast_decode`, the
same with `_fwd` for gathered bf16 keys, and `permute_q_b_proj`, `permute_wv_proj` for the weights on both
sides. What the decode op takes and gives (its schema, docstring and assertions):

    q [T, 64 or 128, 512] bf16, not rotated, in chunks of 16 channels: chunk 0 of every head, then chunk 1
    records of 528 bytes, 528 or 288 for the extra cache; int32 lists [T, K] of both, with lengths or without
    positions int32 [T], cos and sin fp32 [P, 64]: the query is rotated with them, the output rotated back
    -> e4m3 [T, groups, heads a group * 512] in chunks of 32 channels, one e8m0 scale for each, and a log sum

An honest `sparse_attention` cannot be made of it. That op takes rotated queries and gives bf16 outputs that
are not yet rotated back. A table of cos 1 and sin 0 would undo both rotations, but the cast stays: it would
round the output to e4m3 before the inverse rotation, and neither the contract nor the release rounds it there
(`grouped_output` takes bf16; spec/arithmetic.md). The kernel wants a place of its own, from the query's
up-projection to a grouped output projection of e4m3 inputs. dsv41 has none, so the choice is refused with
that sentence, and SM100 takes FlashMLA (spec/runtime.md 2.1, rules 7 and 8).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.hardware import Hardware
from dsv41.ops.packages import load_failure

RECORDS = ("scaled_528", "nvfp4_288")
OPS = ("fused_norm_rope_attn_rope_cast_decode", "permute_q_b_proj")
INSTALL = "pip install --no-deps sgl-flash-mla"
NO_PLACE = (
    "its kernel rotates queries and outputs and rounds outputs to e4m3, and dsv41 has no grouped projection "
    "of e4m3 inputs to follow it; use attention=flashmla"
)


def why_not(hardware: Hardware, record: str | None) -> str | None:
    """Never None: what is missing on this machine first, then what is missing here."""
    if hardware.sm // 10 != 10:
        return f"Mega has kernels for SM100, this is {hardware.name}"
    if record is not None and record not in RECORDS:
        return f"Mega reads {' and '.join(RECORDS)}, not {record}"
    return _package_missing() or NO_PLACE


def _package_missing() -> str | None:
    """Why the fused ops cannot be found, or None."""
    failure = load_failure("flash_mla", INSTALL, _registered)
    if failure is not None:
        return failure
    ops = _registered()
    lacking = [name for name in OPS if not hasattr(ops, name)]
    return f"this package 'flash_mla' registers no op {lacking[0]} ({INSTALL})" if lacking else None


def _registered() -> object:
    """The ops of flash_mla; its import registers them."""
    import flash_mla  # noqa: F401

    return torch.ops.flash_mla


def sparse_attention(
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
    rope_dim: int,
    deterministic: bool,
) -> Tensor:
    raise ValueError(f"attention=mega does not run: {NO_PLACE}")
