"""The experts of gluon.py on two streams: the shared expert beside the routed ones.

The kernels and so the bits are those of the serial implementation. With few rows both read weights, each with
pauses where its kernels start and end; together they fill them. With many rows each fills the GPU alone.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dsv41.hardware import Hardware
from dsv41.ops.moe import gluon_pack, triton_group, triton_route
from dsv41.ops.moe.gluon_run import check, routed_experts, shared_expert
from dsv41.ops.streams import fork_join

FORK_ROWS = 64

pack = gluon_pack.pack
unpack = gluon_pack.unpack


def why_not(hardware: Hardware, record: str | None) -> str | None:
    if hardware.sm != 90:
        return f"its instructions are Hopper's (sm_90), this is {hardware.name}"
    return None


def route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    image_bias: Tensor,
    is_image: Tensor,
    valid: Tensor,
    top_k: int,
    route_scale: float,
) -> tuple[Tensor, Tensor]:
    """See op.py and triton_route.py."""
    with torch.cuda.device(x.device):
        return triton_route.choose(x, gate, bias, image_bias, is_image, valid, top_k, route_scale)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    shared_gate_up: Tensor,
    shared_gate_up_scale: Tensor,
    shared_down: Tensor,
    shared_down_scale: Tensor,
    limit: float,
    quantise: bool,
    deterministic: bool,
    linear_impl: str,
) -> Tensor:
    """See op.py; the routed experts' weights as `pack` leaves them."""
    check(x, ids, weights, gate_up, gate_up_scale, down, down_scale, quantise)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    common = (shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale)
    own = (gate_up, gate_up_scale, down, down_scale)
    routed = partial(routed_experts, x, ids, weights, *own, limit, deterministic)
    shared = partial(shared_expert, x, *common, limit, deterministic, linear_impl)
    with torch.cuda.device(x.device):
        y, added = fork_join(routed, shared) if x.shape[0] <= FORK_ROWS else (routed(), shared())
        return triton_group.combine(y, ids, added)
