"""Mixture of experts: choose, weigh, run.

    s        = sqrt(softplus(gate @ x))                        fp32                                   [T, E]
    chosen   = the k largest s + bias, ties to the smaller id  (image_bias replaces bias on image rows)
    weight_i = route_scale * s_i / (sum over chosen s + 1e-20)
    expert(x, g) = w2 @ (silu(min(w1 @ x, limit)) * clamp(w3 @ x, -limit, limit) * g)
    y        = sum over chosen expert_i(x, weight_i) + shared
    shared   = expert(x, 1) of the shared expert

The bias chooses and never weighs; the routing weight enters before w2 and its input quantisation
(spec/model.md 5). Rows that are not `valid` choose id -1 with weight 0 and get 0 from the routed experts.
Under `deterministic` a row's bits do not depend on the rows beside it.

The shared expert needs no router, so an implementation may compute it beside the router and the experts. Then
`side` is the handle of its stream (ops/streams.py), else 0, and nothing but `experts` may read `shared`.

T token rows, D hidden size, E experts, k chosen experts, I expert width. `gate_up` joins w1 and w3: packed
e2m1 [E, 2I, D/2] with e8m0 scales [E, 2I, D/32]; `down` is w2: [E, D, I/2], [E, D, I/32]. The shared expert
is fp8 with 32x32 scales: [2I, D] and [D, I]; its products are the `linear` family's, by `linear_impl`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops.library import declare


def _route_fake(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    image_bias: Tensor,
    is_image: Tensor,
    valid: Tensor,
    top_k: int,
    route_scale: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], top_k)
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)


def _shared_fake(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty(1, dtype=torch.int64, device="cpu")


def _experts_fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


route = declare(
    "moe",
    "route(Tensor x, Tensor gate, Tensor bias, Tensor image_bias, Tensor is_image, Tensor valid, int top_k,"
    " float route_scale, str impl) -> (Tensor, Tensor)",
    fake=_route_fake,
)
shared_expert = declare(
    "moe",
    "shared_expert(Tensor x, Tensor gate_up, Tensor gate_up_scale, Tensor down, Tensor down_scale,"
    " float limit, bool quantise, bool deterministic, str linear_impl, str impl) -> (Tensor, Tensor)",
    fake=_shared_fake,
)
experts = declare(
    "moe",
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor down,"
    " Tensor down_scale, Tensor shared, Tensor side, float limit, bool quantise, bool deterministic,"
    " str impl) -> Tensor",
    fake=_experts_fake,
)
