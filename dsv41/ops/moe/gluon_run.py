"""The routed experts, the shared expert, and the checks of both: what the implementations put together.

Few rows (gluon_few.py) are bound by reading weights: fp8 products, every chosen expert read once. Many rows
(gluon_many.py) are bound by products: bf16. Both take the one packing, round where the reference does, and
leave a row per pair, which `combine` adds up. They differ in the last bits, so `deterministic` always takes
the second, whose rows do not depend on the rows beside them; that costs most at one row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops.moe import gluon_few, gluon_many, gluon_pack, triton_group

# Up to here the few-row kernels are taken. By count: 320 rows make 1.34 slots an expert there, which is 1.4
# times the instructions of the prototype's 622 us at 128 rows, and the many-row prototype took 1.22 ms where
# every expert has a row. To be measured.
FEW_ROWS = 320


def shared_expert(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    limit: float,
    deterministic: bool,
    linear_impl: str,
) -> Tensor:
    """The expert that every row takes: [T, D] -> [T, D]."""
    linear_fp8 = torch.ops.dsv41.linear_fp8.default
    products = linear_fp8(x, gate_up, gate_up_scale, True, deterministic, linear_impl)
    hidden = triton_group.activate(products, limit)
    return linear_fp8(hidden, down, down_scale, True, deterministic, linear_impl)


def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    limit: float,
    deterministic: bool,
) -> Tensor:
    """A row per pair of row and choice, for `triton_group.combine`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    weighed = (weights, gate_up, gate_up_scale, down, down_scale, limit)
    if x.shape[0] <= FEW_ROWS and not deterministic:
        return gluon_few.run_few(x, ids, *weighed)
    groups = triton_group.group(ids, gate_up.shape[0], gluon_many.CHUNK)
    return gluon_many.run_many(x, groups, *weighed)


def check(
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
