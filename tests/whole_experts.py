"""The two ops of the experts, called as one."""

from __future__ import annotations

from torch import Tensor

from dsv41.ops.moe.op import experts, shared_expert


def whole_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *stored: Tensor,
    limit: float,
    impl: str,
    deterministic: bool = False,
    linear_impl: str = "reference",
) -> Tensor:
    """`stored`: the four tensors of the routed experts, then the four of the shared one."""
    fixed = (limit, True, deterministic)
    shared, side = shared_expert(x, *stored[4:], *fixed, linear_impl, impl)
    return experts(x, ids, weights, *stored[:4], shared, side, *fixed, impl)
