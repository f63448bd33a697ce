"""What an index source does: score the states of its KV source and choose for the layers that follow."""

from __future__ import annotations

from torch import Tensor, nn

from dsv41.model.caches import KVCaches
from dsv41.model.inputs import Rotations, Selection, StepInputs, empty_index
from dsv41.model.layout import CacheLayout
from dsv41.model.linear import Context
from dsv41.model.plan import LayerPlan
from dsv41.ops.indexing.op import index_query, select


class Indexer(nn.Module):
    """No parameters: its queries ride in the layer's up-projection, its head weights in the side one."""

    def __init__(self, context: Context, plan: LayerPlan, layout: CacheLayout) -> None:
        super().__init__()
        self.plan, self.context = plan, context
        self.page_states = layout.page_tokens // plan.ratio

    def query(self, q: Tensor, head_weights: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        """q [T, Hi*hi], head_weights float32 [T, Hi] -> rotated, quantised [T, Hi, hi], weights [T, Hi]"""
        config, backends = self.context.config, self.context.backends
        heads = q.unflatten(-1, (config.index_heads, config.index_dim))
        record, quantise = backends.index_record, self.context.quantise
        return index_query(heads, head_weights, rotations.compressed, record, quantise, backends.indexing)

    def forward(
        self,
        q: Tensor,
        head_weights: Tensor,
        candidates: Tensor,
        step: StepInputs,
        rotations: Rotations,
        caches: KVCaches,
    ) -> tuple[Selection, Tensor, Tensor]:
        """-> the selection, the candidates (published or passed on), the rows with NaN scores: bool [T]"""
        config, backends, plan, meta = self.context.config, self.context.backends, self.plan, step.attention
        assert plan.kv_source is not None, "an index source reads a KV source"
        queries, weights = self.query(q, head_weights, rotations)
        states, slots, published, faulty = select(
            queries,
            weights,
            caches.index_k[plan.kv_source],
            meta.page_table,
            meta.row_request,
            meta.num_states[plan.ratio],
            candidates if plan.reads_candidates else empty_index(q),
            config.index_topk,
            config.candidate_blocks if plan.publishes_candidates else 0,
            config.candidate_block_states,
            backends.index_record,
            self.page_states,
            self.context.deterministic,
            backends.indexing,
        )
        return Selection(states, slots), published if plan.publishes_candidates else candidates, faulty
