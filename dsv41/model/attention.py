"""The attention half of a layer: project, publish, select, attend, project back (spec/model.md 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dsv41.backends import query_heads
from dsv41.model.caches import KVCaches
from dsv41.model.compressor import Compressor
from dsv41.model.indexer import Indexer
from dsv41.model.inputs import Rotations, Selection, StepInputs, empty_index
from dsv41.model.layout import CacheLayout
from dsv41.model.linear import Context, Fp8Linear, Fp8Weight, parameter
from dsv41.model.plan import LayerPlan
from dsv41.ops.attention.op import sparse_attention
from dsv41.ops.linear.op import grouped_output, rms_norm
from dsv41.ops.projections.op import project_inputs
from dsv41.ops.publish.op import publish_window


@dataclass(frozen=True)
class Shared:
    """What index sources hand to the layers after them within a step."""

    selection: Selection | None
    candidates: Tensor  # int32 [T, C], or [T, 0] before the candidate source
    faulty: Tensor  # bool [T]: a NaN index score in this layer


class Attention(nn.Module):
    """One layer's projections, its window cache, and its share of the compressed states.

    The joined weights: `down` holds the rows of the query down-projection and of the window KV, `up` the
    query heads and the index queries, `side` the compressor (KV, then gate at ratio 2) and the index head
    weights.
    """

    def __init__(self, context: Context, plan: LayerPlan, layout: CacheLayout) -> None:
        super().__init__()
        config = context.config
        heads, dim, hidden = config.num_heads, config.head_dim, config.hidden_size
        self.plan, self.context, self.page_tokens = plan, context, layout.page_tokens
        self.pad_heads = query_heads(context.backends)
        self.up_split = (heads * dim, config.index_heads * config.index_dim if plan.owns_index else 0)
        self.side_split = (
            plan.ratio * dim if plan.owns_kv else 0,
            config.index_heads if plan.owns_index else 0,
        )
        self.down = Fp8Weight(config.q_rank + dim, hidden)
        self.side = parameter(sum(self.side_split), hidden)
        self.q_norm = parameter(config.q_rank)
        self.kv_norm = parameter(dim)
        self.up = Fp8Linear(context, sum(self.up_split), config.q_rank)
        self.sink = parameter(heads, dtype=torch.float32)
        self.output_down = Fp8Weight(config.o_groups * config.o_rank, heads * dim // config.o_groups)
        self.output_up = Fp8Linear(context, hidden, config.o_groups * config.o_rank)
        self.compressor = Compressor(context, plan, layout) if plan.owns_kv else None
        self.indexer = Indexer(context, plan, layout) if plan.owns_index else None

    def forward(
        self, x: Tensor, step: StepInputs, rotations: Rotations, caches: KVCaches, shared: Shared
    ) -> tuple[Tensor, Shared]:
        """x [T, D], normed -> the half's output [T, D] and what later layers of the step share."""
        context, plan = self.context, self.plan
        backends, eps = context.backends, context.config.norm_eps
        cos_sin = rotations.compressed if plan.ratio else rotations.window
        down, side = project_inputs(
            x,
            self.down.weight,
            self.down.scale,
            self.side,
            context.quantise,
            context.deterministic,
            backends.linear,
            backends.projections,
        )
        q_rank, kv = down.split((context.config.q_rank, context.config.head_dim), dim=-1)
        kv_gate, head_weights = side.split(self.side_split, dim=-1)
        q, index_q = self.up(rms_norm(q_rank, self.q_norm, eps, backends.linear)).split(self.up_split, dim=-1)
        q = publish_window(
            q.unflatten(-1, (context.config.num_heads, context.config.head_dim)),
            kv,
            self.kv_norm,
            cos_sin,
            step.attention.window_write,
            caches.window[plan.layer],
            backends.window_record,
            self.page_tokens,
            self.pad_heads,
            eps,
            context.quantise,
            backends.publish,
        )
        if self.compressor is not None:
            self.compressor(kv_gate, step, rotations, caches)
        if self.indexer is not None:
            shared = Shared(*self.indexer(index_q, head_weights, shared.candidates, step, rotations, caches))
        o = self.attend(q, step, caches, shared.selection)
        return self.project_output(o, cos_sin), shared

    def write_kv(self, x: Tensor, step: StepInputs, rotations: Rotations, caches: KVCaches) -> None:
        """Only what later layers and rows read of this layer: its window rows, its states, its index keys."""
        context, plan = self.context, self.plan
        backends = context.backends
        down, side = project_inputs(
            x,
            self.down.weight,
            self.down.scale,
            self.side,
            context.quantise,
            context.deterministic,
            backends.linear,
            backends.projections,
        )
        publish_window(
            x.new_empty((x.shape[0], 0, context.config.head_dim)),
            down[:, context.config.q_rank :],
            self.kv_norm,
            rotations.compressed,
            step.attention.window_write,
            caches.window[plan.layer],
            backends.window_record,
            self.page_tokens,
            0,
            context.config.norm_eps,
            context.quantise,
            backends.publish,
        )
        assert self.compressor is not None, f"layer {plan.layer} is no KV source"
        self.compressor(side[:, : self.side_split[0]], step, rotations, caches)

    def attend(self, q: Tensor, step: StepInputs, caches: KVCaches, selection: Selection | None) -> Tensor:
        """q [T, H, d], rotated -> o [T, H, d], not yet rotated back."""
        plan, backends = self.plan, self.context.backends
        window = caches.window[plan.layer]
        if plan.kv_source is None:
            states, slots, page_states = window, empty_index(q), self.page_tokens
        else:
            assert selection is not None, f"layer {plan.layer} runs before its index source"
            states, slots = caches.states[plan.kv_source], selection.slots
            page_states = self.page_tokens // plan.ratio
        return sparse_attention(
            q,
            window,
            step.attention.window_read,
            backends.window_record,
            self.page_tokens,
            states,
            slots,
            backends.window_record if plan.kv_source is None else backends.state_record,
            page_states,
            self.sink,
            self.context.config.rope_dim,
            self.context.deterministic,
            backends.attention,
        )

    def project_output(self, o: Tensor, cos_sin: Tensor) -> Tensor:
        weight, scale, context = self.output_down.weight, self.output_down.scale, self.context
        groups, impl = context.config.o_groups, context.backends.linear
        return self.output_up(grouped_output(o, cos_sin, weight, scale, groups, context.deterministic, impl))
