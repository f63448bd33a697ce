"""Bytes and flops of one step, by part of the model: what `bench` divides by and `inspect` adds up.

Bytes are the least a step must move: every weight it touches once, the cache records its rows read and
write, the embedding and Engram rows it looks up. Activations between kernels are not counted: a perfect
kernel keeps them on the chip. Flops count a multiply and an add as two.

    T rows of the step    E experts, k of them per row    p elements of a part's matrices

    part                bytes                                            flops
    embedding           T * row                                          0
    engram tables       T * columns * row                                0
    routed experts      weights * distinct(T) / E                        2 * T * p * k / E
    head                weights                                          2 * (rows that need logits) * p
    any other matrix    weights                                          2 * T * p
    index scoring       index keys a request's last row sees, once       2 * Hi * hi * (keys scored)
    sparse attention    records its rows read (each once), and written   4 * H * d * (records read)

distinct(T) = E * (1 - (1 - k / E) ** T): experts that T rows hit under uniform routing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsv41.config import ModelConfig
from dsv41.model.checkpoint import TensorSpec, checkpoint_tensors
from dsv41.model.layout import CacheGroup, CacheLayout
from dsv41.model.plan import LayerPlan, kv_sources

EMBEDDING, TABLES, EXPERTS, HEAD = "embedding", "engram tables", "routed experts", "head"
SCORING, ATTENTION = "index scoring", "sparse attention"
ENGRAM, INDEX = "engram projections", "indexer and compressor"
UP_FRONT = (EMBEDDING, TABLES, HEAD, ENGRAM, INDEX)

# First match wins; a target is a decoder parameter without its layer.
PART_OF_TARGET = (
    ("embedding", EMBEDDING),
    ("head", HEAD),
    ("engram.table", TABLES),
    ("engram.", ENGRAM),
    ("moe.shared", "shared experts"),
    ("moe.gate_up", EXPERTS),
    ("moe.down", EXPERTS),
    ("moe.", "router"),
    ("attention_hyper.", "hyper connections"),
    ("ffn_hyper.", "hyper connections"),
    ("attention.side", INDEX),
    ("attention.compressor.", INDEX),
    ("attention.", "attention projections"),
    ("", "norms"),
)


class Weights(NamedTuple):
    """One part's stored bytes, scales included, and the matrix elements that a row multiplies with."""

    num_bytes: int
    elements: int


class Cost(NamedTuple):
    num_bytes: float
    flops: float


class Span(NamedTuple):
    """`rows` consecutive rows of one request, the first at position `start`."""

    start: int
    rows: int

    @property
    def end(self) -> int:
        return self.start + self.rows


@dataclass(frozen=True)
class StepCost:
    """What one step costs, part by part."""

    parts: Mapping[str, Cost]

    @property
    def num_bytes(self) -> float:
        return sum(cost.num_bytes for cost in self.parts.values())

    @property
    def flops(self) -> float:
        return sum(cost.flops for cost in self.parts.values())

    def floor_seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """The least time under these rates, if moving and computing overlap perfectly."""
        return max(self.num_bytes / bytes_per_second, self.flops / flops_per_second)


def distinct_experts(num_experts: int, per_row: int, rows: int) -> float:
    """Experts of a layer that `rows` rows hit, on average under uniform routing."""
    return num_experts * (1 - (1 - per_row / num_experts) ** rows)


def part_of(spec: TensorSpec) -> str:
    """The part of the model a checkpoint tensor belongs to; "draft" and "vision" are not split further."""
    if spec.part != "text":
        return spec.part
    target = spec.target
    if target.startswith("layers."):
        target = target.split(".", 2)[2]
    if target.startswith("attention.up.") and spec.rows is not None and spec.rows[0] > 0:
        return INDEX  # the index queries' rows of the joint up-projection
    return next(part for prefix, part in PART_OF_TARGET if target.startswith(prefix))


def weights_by_part(config: ModelConfig) -> dict[str, Weights]:
    """Bytes and elements of every part of the checkpoint, largest first. Takes seconds for the release."""
    num_bytes: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for spec in checkpoint_tensors(config):
        part = part_of(spec)
        num_bytes[part] += spec.num_bytes
        if len(spec.shape) == 2 and spec.dtype != "F8_E8M0":
            elements[part] += spec.shape[0] * spec.shape[1] * (2 if spec.dtype == "I8" else 1)
    return {part: Weights(size, elements[part]) for part, size in num_bytes.most_common()}


UNUSED_PARTS = ("draft", "vision")  # of the checkpoint: checked by the loader, not read by this engine


def loaded_bytes(weights: Mapping[str, Weights]) -> int:
    """Bytes of the parts that this engine loads."""
    return sum(part.num_bytes for name, part in weights.items() if name not in UNUSED_PARTS)


def step_cost(
    config: ModelConfig,
    plan: Sequence[LayerPlan],
    layout: CacheLayout,
    weights: Mapping[str, Weights],
    spans: Sequence[Span],
    tails: Sequence[Span] | None = None,
) -> StepCost:
    """The cost of a step that computes `spans`, one per request, each ending in a row that needs logits.

    weights: of `weights_by_part(config)`. `tails`: what the last KV source and the layers behind it compute
    of the spans, in decoder replay. The source's own keys and values for the other rows are left out.
    """
    if tails is not None:
        return _replay_cost(config, plan, layout, weights, spans, tails)
    rows, k, E = sum(span.rows for span in spans), config.experts_per_token, config.num_experts
    parts: dict[str, Cost] = {}
    for part, (num_bytes, elements) in weights.items():
        if part == EXPERTS:
            share = distinct_experts(E, k, rows) / E
            parts[part] = Cost(num_bytes * share, 2 * rows * elements * k / E)
        elif part == EMBEDDING:
            parts[part] = Cost(rows * num_bytes / config.vocab_size, 0)
        elif part == TABLES:
            looked_up = rows * config.engram.columns * len(config.engram.layers)
            parts[part] = Cost(looked_up * num_bytes / sum(config.engram.num_rows), 0)
        elif part == HEAD:
            parts[part] = Cost(num_bytes, 2 * len(spans) * elements)
        elif part not in ("draft", "vision"):
            parts[part] = Cost(num_bytes, 2 * rows * elements)
    parts[SCORING] = _scoring(config, plan, layout, spans)
    parts[ATTENTION] = _sparse_attention(config, plan, layout, spans)
    return StepCost(parts)


def _replay_cost(
    config: ModelConfig,
    plan: Sequence[LayerPlan],
    layout: CacheLayout,
    weights: Mapping[str, Weights],
    spans: Sequence[Span],
    tails: Sequence[Span],
) -> StepCost:
    """Layers share a part's weights equally; those of UP_FRONT lie in front of the cut. What reads caches is
    counted layer by layer."""
    cut = kv_sources(tuple(plan))[-1].layer
    front = step_cost(config, plan[:cut], layout, weights, spans).parts
    behind = step_cost(config, plan[cut:], layout, weights, [span for span in tails if span.rows]).parts
    shares = dict.fromkeys(front, (cut / len(plan), 1 - cut / len(plan)))
    shares |= dict.fromkeys(UP_FRONT, (1.0, 0.0)) | dict.fromkeys((SCORING, ATTENTION), (1.0, 1.0))

    def added(part: str) -> Cost:
        before, after = shares[part]
        return Cost(*(before * a + after * b for a, b in zip(front[part], behind[part], strict=True)))

    return StepCost({part: added(part) for part in front})


def _record_bytes(groups: Sequence[CacheGroup]) -> dict[int, float]:
    """Bytes of one stored state, the page's alignment shared out, by layer."""
    return {group.layer: group.page_bytes / group.num_states for group in groups}


def _positions_sum(span: Span, ratio: int, limit: int) -> float:
    """Sum over a span's rows of min(limit, states seen): (position + 1) // ratio, taken as a real number."""
    first, last = (span.start + 1) / ratio, span.end / ratio
    if first >= limit:
        return float(limit * span.rows)
    if last <= limit:
        return (first + last) / 2 * span.rows
    below = (limit - first) * ratio + 1  # rows up to the limit; those after it see all of it
    return (first + limit) / 2 * below + limit * (span.rows - below)


def _scoring(
    config: ModelConfig, plan: Sequence[LayerPlan], layout: CacheLayout, spans: Sequence[Span]
) -> Cost:
    key_bytes = _record_bytes(layout.index_k)
    candidates = config.candidate_blocks * config.candidate_block_states
    num_bytes = flops = 0.0
    for layer in plan:
        if not layer.owns_index or layer.kv_source is None:
            continue
        for span in spans:
            visible = span.end // layer.ratio
            limit = min(visible, candidates) if layer.reads_candidates else visible
            scored = _positions_sum(span, layer.ratio, limit)
            keys = min(visible, scored)  # rows of a span share the keys they read
            num_bytes += keys * key_bytes[layer.kv_source]
            if layer.owns_kv:
                num_bytes += span.rows / layer.ratio * key_bytes[layer.kv_source]
            flops += 2 * config.index_heads * config.index_dim * scored
    return Cost(num_bytes, flops)


def _sparse_attention(
    config: ModelConfig, plan: Sequence[LayerPlan], layout: CacheLayout, spans: Sequence[Span]
) -> Cost:
    window_bytes, state_bytes = _record_bytes(layout.window), _record_bytes(layout.states)
    num_bytes = flops = 0.0
    for layer in plan:
        for span in spans:
            read = _positions_sum(span, 1, config.window_tokens)
            held = min(span.end, config.window_tokens + span.rows - 1)
            num_bytes += (min(read, held) + span.rows) * window_bytes[layer.layer]
            if layer.kv_source is not None:
                chosen = _positions_sum(span, layer.ratio, config.index_topk)
                written = span.rows / layer.ratio if layer.owns_kv else 0
                num_bytes += (min(chosen, span.end / layer.ratio) + written) * state_bytes[layer.kv_source]
                read += chosen
            flops += 4 * config.num_heads * config.head_dim * read
    return Cost(num_bytes, flops)
