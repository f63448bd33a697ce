"""Mixture of experts on Hopper: which kernels run, on weights in the byte order of gluon_pack.py.

Few rows (gluon_few.py) are bound by reading weights: fp8 products, every chosen expert read once. Many rows
(gluon_many.py) are bound by products: bf16. Both take the one packing, round where the reference does, and
leave a row per pair, which `combine` adds up. They differ in the last bits, so `deterministic` always takes
the second, whose rows do not depend on the rows beside them; that costs most at one row.

The shared expert's two products are the `linear` family's; only its activation is here. With few rows it runs
beside the router and the routed experts, on a stream of its own: each reads weights with pauses where its
kernels start and end, and together they fill them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.hardware import Hardware
from dsv41.ops.moe import gluon_few, gluon_many, gluon_pack, triton_group, triton_route
from dsv41.ops.streams import fork, join, nothing_forked

# Up to here the few-row kernels are taken. On an H200 they need 787 us at 256 rows, where the many-row ones
# need 1,783, and those hardly more up to 1,024: the limit may go up.
FEW_ROWS = 320
FORK_ROWS = 64  # up to here the shared expert has a stream of its own

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


def shared_expert(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    limit: float,
    quantise: bool,
    deterministic: bool,
    linear_impl: str,
) -> tuple[Tensor, Tensor]:
    """See op.py."""
    linear_fp8 = torch.ops.dsv41.linear_fp8.default

    def work() -> tuple[Tensor]:
        products = linear_fp8(x, gate_up, gate_up_scale, quantise, deterministic, linear_impl)
        hidden = triton_group.activate(products, limit)
        return (linear_fp8(hidden, down, down_scale, quantise, deterministic, linear_impl),)

    with torch.cuda.device(x.device):
        if not 0 < x.shape[0] <= FORK_ROWS:
            return (*work(), nothing_forked())
        (shared,), side = fork(work)
    return shared, side


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    shared: Tensor,
    side: Tensor,
    limit: float,
    quantise: bool,
    deterministic: bool,
) -> Tensor:
    """See op.py; the routed experts' weights as `pack` leaves them."""
    _check(x, ids, weights, gate_up, gate_up_scale, down, down_scale, quantise)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    x = x if x.stride(1) == 1 else x.contiguous()
    routed = (weights, gate_up, gate_up_scale, down, down_scale, limit)
    with torch.cuda.device(x.device):
        if x.shape[0] <= FEW_ROWS and not deterministic:
            y = gluon_few.run_few(x, ids, *routed)
        else:
            groups = triton_group.group(ids, gate_up.shape[0], gluon_many.CHUNK)
            y = gluon_many.run_many(x, groups, *routed)
        join(side)
        return triton_group.combine(y, ids, shared)


def _check(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    quantise: bool,
) -> None:
    """ValueError for what a user may ask and these kernels cannot do; asserts for the rest."""
    if x.dtype != torch.bfloat16 or not quantise:
        raise ValueError(f"the Hopper expert kernels run quantised bf16 rows only, not {x.dtype}")
    rows, hidden = x.shape
    gluon_pack.check_weights(gate_up, gate_up_scale, down, down_scale)
    assert gate_up.shape[2] * 2 == hidden, f"experts of {gate_up.shape[2] * 2} channels for rows of {hidden}"
    assert ids.shape == weights.shape == (rows, ids.shape[1]), "one id and one weight a choice"
    assert ids.dtype == torch.int32, f"ids are int32, got {ids.dtype}"
    assert weights.dtype == torch.float32, f"routing weights are fp32, got {weights.dtype}"
