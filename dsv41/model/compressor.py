"""What a KV source publishes: compressed states and the index keys made from them."""

from __future__ import annotations

from torch import Tensor, nn

from dsv41.model.caches import KVCaches
from dsv41.model.inputs import Rotations, StepInputs
from dsv41.model.layout import CacheLayout
from dsv41.model.linear import Context, parameter
from dsv41.model.plan import LayerPlan
from dsv41.ops.compression.op import compress
from dsv41.ops.linear.op import linear
from dsv41.ops.publish.op import publish_index_k, publish_states


class Compressor(nn.Module):
    """The KV source's part of a layer: states and index keys go straight into their caches."""

    def __init__(self, context: Context, plan: LayerPlan, layout: CacheLayout) -> None:
        super().__init__()
        config = context.config
        self.norm = parameter(config.head_dim)
        self.index_key = parameter(config.index_dim, config.head_dim)
        self.index_key_norm = parameter(config.index_dim)
        self.plan, self.context = plan, context
        self.page_states = layout.page_tokens // plan.ratio

    def forward(self, kv_gate: Tensor, step: StepInputs, rotations: Rotations, caches: KVCaches) -> None:
        """kv_gate float32 [T, ratio*d]: publish every state and index key that a row of this step closes."""
        context, layer, ratio, meta = self.context, self.plan.layer, self.plan.ratio, step.attention
        backends, eps = context.backends, context.config.norm_eps
        open_groups = caches.open_groups[layer] if ratio == 2 else kv_gate.new_empty((0, 0))
        latent = compress(
            kv_gate,
            step.positions,
            meta.partner_row,
            meta.partner_slot,
            meta.open_slot,
            self.norm,
            open_groups,
            ratio,
            eps,
            context.dtype,
            backends.compression,
        )
        slots, cos_sin = meta.state_write[ratio], rotations.group[ratio]
        key = linear(latent, self.index_key, context.dtype, context.deterministic, backends.linear)
        publish_index_k(
            key,
            self.index_key_norm,
            cos_sin,
            slots,
            caches.index_k[layer],
            backends.index_record,
            self.page_states,
            eps,
            context.quantise,
            backends.publish,
        )
        publish_states(
            latent,
            cos_sin,
            slots,
            caches.states[layer],
            backends.state_record,
            self.page_states,
            context.quantise,
            backends.publish,
        )
