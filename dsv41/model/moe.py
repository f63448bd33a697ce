"""The feed-forward half of a layer: router, routed experts in packed fp4, one shared expert in fp8."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsv41.model.linear import Context, Fp8Weight, parameter
from dsv41.ops.moe.op import experts, route, shared_expert

FP4_BLOCK = 32


class MoE(nn.Module):
    def __init__(self, context: Context) -> None:
        super().__init__()
        config = context.config
        num_experts, hidden, width = config.num_experts, config.hidden_size, config.expert_dim
        self.gate = parameter(num_experts, hidden)
        self.bias = parameter(num_experts, dtype=torch.float32)
        self.image_bias = parameter(num_experts, dtype=torch.float32)
        self.gate_up = parameter(num_experts, 2 * width, hidden // 2, dtype=torch.uint8)
        self.gate_up_scale = parameter(num_experts, 2 * width, hidden // FP4_BLOCK, dtype=torch.uint8)
        self.down = parameter(num_experts, hidden, width // 2, dtype=torch.uint8)
        self.down_scale = parameter(num_experts, hidden, width // FP4_BLOCK, dtype=torch.uint8)
        self.shared_gate_up = Fp8Weight(2 * width, hidden)
        self.shared_down = Fp8Weight(hidden, width)
        self.top_k, self.route_scale = config.experts_per_token, config.route_scale
        self.limit = config.swiglu_limit
        self.quantise, self.deterministic = context.quantise, context.deterministic
        self.linear_impl, self.impl = context.backends.linear, context.backends.moe

    def route(self, x: Tensor, is_image: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D], is_image and valid bool [T] -> expert ids int32 [T, k] and weights float32 [T, k]."""
        return route(
            x,
            self.gate,
            self.bias,
            self.image_bias,
            is_image,
            valid,
            self.top_k,
            self.route_scale,
            self.impl,
        )

    def forward(self, x: Tensor, is_image: Tensor, valid: Tensor) -> Tensor:
        """x [T, D] -> [T, D]; rows that are not `valid` are padding."""
        shared, side = shared_expert(
            x,
            self.shared_gate_up.weight,
            self.shared_gate_up.scale,
            self.shared_down.weight,
            self.shared_down.scale,
            self.limit,
            self.quantise,
            self.deterministic,
            self.linear_impl,
            self.impl,
        )
        ids, weights = self.route(x, is_image, valid)
        return experts(
            x,
            ids,
            weights,
            self.gate_up,
            self.gate_up_scale,
            self.down,
            self.down_scale,
            shared,
            side,
            self.limit,
            self.quantise,
            self.deterministic,
            self.impl,
        )
