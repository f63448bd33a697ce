"""The text model: rows in, normed hidden rows out. One forward serves prefill, chunks, decode and any
mixture.

streams = embed(token) on every residual copy;  mix = copy 0
layer:  streams = engram(streams)                                   (two layers)
        x = norm(collapse(streams, mix))                            (mix of the previous feed-forward half)
        u = attention(x)
        streams = expand(u, streams)
        x = norm(collapse(streams, pre of the attention half))
        v = moe(x)
        streams = expand(v, streams);  mix = pre of the feed-forward half
hidden = norm(collapse(streams, mix))

An expansion and the collapse that follows are one op, also across layers; an Engram or a cut comes between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsv41.backends import Backends
from dsv41.config import ModelConfig
from dsv41.model.attention import Attention, Shared
from dsv41.model.caches import KVCaches
from dsv41.model.engram import Engram
from dsv41.model.hyper import HyperConnection
from dsv41.model.inputs import Rotations, StepInputs, StepOutput, empty_index
from dsv41.model.layout import CacheLayout
from dsv41.model.linear import Context, Fp8Weight, parameter
from dsv41.model.moe import MoE
from dsv41.model.plan import LayerPlan, kv_sources
from dsv41.model.rope import plain_frequencies, rotations, yarn_frequencies
from dsv41.ops.library import pack_weights
from dsv41.ops.linear.op import linear

NO_FAULT = 1 << 30  # in the place of a layer's number


class Flow(NamedTuple):
    """Between two layers: streams [T, M, D], the mix float32 [T, M] of their collapse, `sound` bool [T] of
    the layer before, and the collapsed, normed rows x [T, D] where they are there already."""

    streams: Tensor
    mix: Tensor
    sound: Tensor
    x: Tensor | None = None


class Turn(NamedTuple):
    """What all layers of a step read: the step, its rotations, and which rows are no padding, bool [T]."""

    step: StepInputs
    rotations: Rotations
    valid: Tensor


class DecoderLayer(nn.Module):
    def __init__(self, context: Context, plan: LayerPlan, layout: CacheLayout, own_tables: bool) -> None:
        super().__init__()
        self.engram = None if plan.engram is None else Engram(context, plan.engram, own_tables)
        self.attention_hyper = HyperConnection(context)
        self.attention_norm = parameter(context.config.hidden_size)
        self.attention = Attention(context, plan, layout)
        self.ffn_hyper = HyperConnection(context)
        self.ffn_norm = parameter(context.config.hidden_size)
        self.moe = MoE(context)

    def forward(
        self, flow: Flow, turn: Turn, caches: KVCaches, shared: Shared, next_norm: Tensor | None = None
    ) -> tuple[Flow, Shared]:
        """Both halves, and what later layers share. `next_norm`: of the collapse that follows, if it follows
        at once."""
        step, x, tickets = turn.step, flow.x, caches.tickets
        own = self.attention_hyper.coefficients(flow.streams, tickets)
        if x is None:
            x = self.attention_hyper.collapse(flow.streams, flow.mix, self.attention_norm)
        u, shared = self.attention(x, step, turn.rotations, caches, shared)
        streams, _, _, x = self.attention_hyper.update(u, flow.streams, own, self.ffn_norm, tickets)

        own = self.ffn_hyper.coefficients(streams, tickets)
        v = self.moe(x, step.is_image, turn.valid)
        if next_norm is None:
            return Flow(*self.ffn_hyper.expand(v, streams, own)), shared
        return Flow(*self.ffn_hyper.update(v, streams, own, next_norm, tickets)), shared

    def write_kv(self, flow: Flow, step: StepInputs, rotations: Rotations, caches: KVCaches) -> None:
        """Only the layer's cache writes, for rows that end here (decoder replay)."""
        x = self.attention_hyper.collapse(flow.streams, flow.mix, self.attention_norm)
        self.attention.write_kv(x, step, rotations, caches)


@dataclass(frozen=True)
class Stack:
    """What runs up the layers: the flow, what sources share, the draft head's features collected so far, each
    [T, D], and `fault` int32 [T]: the first faulty layer, NO_FAULT if there was none."""

    flow: Flow
    shared: Shared
    features: tuple[Tensor, ...]
    fault: Tensor

    @property
    def fault_layer(self) -> Tensor:
        return torch.where(self.fault == NO_FAULT, -1, self.fault)

    def rows(self, rows: Tensor) -> Stack:
        """Some rows, in front of a source: what layers shared so far ends here."""
        flow = Flow(self.flow.streams[rows], self.flow.mix[rows], self.flow.sound[rows])
        shared = Shared(None, empty_index(flow.streams), torch.zeros_like(rows, dtype=torch.bool))
        features = tuple(feature[rows] for feature in self.features)
        return Stack(flow, shared, features, self.fault[rows])


class Decoder(nn.Module):
    """The backbone of a config under a plan, a cache layout and chosen backends. Weights are uninitialised.

    `own_tables=False` leaves the Engram tables empty for `Engram.set_table`; `features=True` also returns the
    draft head's features.
    """

    plain_frequencies: Tensor
    yarn_frequencies: Tensor

    def __init__(
        self,
        config: ModelConfig,
        plan: tuple[LayerPlan, ...],
        layout: CacheLayout,
        backends: Backends,
        *,
        own_tables: bool = True,
        features: bool = False,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.context = context = Context(config, backends, deterministic)
        self.plan, self.return_features, self.packed = plan, features, False
        self.embedding = parameter(config.vocab_size, config.hidden_size)
        if config.engram.layers:
            self.token_map = parameter(config.vocab_size, dtype=torch.int64)
        self.layers = nn.ModuleList(DecoderLayer(context, layer, layout, own_tables) for layer in plan)
        self.norm = parameter(config.hidden_size)
        self.head = parameter(config.vocab_size, config.hidden_size)
        self.last_kv_source = kv_sources(plan)[-1].layer if kv_sources(plan) else len(plan)
        self.ratios = tuple(sorted({layer.ratio for layer in plan if layer.ratio}))
        device = self.embedding.device
        plain = plain_frequencies(config.rope_dim, config.rope_theta)
        self.register_buffer("plain_frequencies", plain.to(device), persistent=False)
        self.register_buffer("yarn_frequencies", yarn_frequencies(config).to(device), persistent=False)

    def pack_weights(self) -> None:
        """Put the loaded weights into the byte orders that their backends read, in place."""
        self._reorder_weights(packed=True)

    def unpack_weights(self) -> None:
        """Put them back into the release's order, which the reference reads."""
        self._reorder_weights(packed=False)

    def _reorder_weights(self, packed: bool) -> None:
        assert self.packed != packed, "the weights lie in that order already"
        self.packed, backends = packed, self.context.backends
        for module in self.modules():
            if isinstance(module, Fp8Weight):
                pack_weights("linear", backends.linear, module.weight, module.scale, back=not packed)
            elif isinstance(module, MoE):
                routed = (module.gate_up, module.gate_up_scale, module.down, module.down_scale)
                pack_weights("moe", backends.moe, *routed, back=not packed)

    def embed(self, step: StepInputs) -> Tensor:
        """The stream before layer 0: every residual copy is the embedding. [T, M, D]"""
        config = self.context.config
        rows = torch.nn.functional.embedding(step.token_ids, self.embedding).to(self.context.dtype)
        if step.embeddings is not None:
            rows = torch.where(step.is_image.unsqueeze(1), step.embeddings, rows)
        return rows.unsqueeze(1).expand(-1, config.copies, -1).contiguous()

    def rotations(self, step: StepInputs) -> Rotations:
        return rotations(step.positions, self.plain_frequencies, self.yarn_frequencies, self.ratios)

    def first_mix(self, streams: Tensor) -> Tensor:
        """The incoming mix of layer 0: copy 0 alone. float32 [T, M]"""
        copies = torch.arange(streams.shape[1], device=streams.device)
        return (copies == 0).float().expand(streams.shape[0], -1).contiguous()

    def start(self, step: StepInputs) -> Stack:
        streams = self.embed(step)
        nothing = torch.zeros(streams.shape[0], dtype=torch.bool, device=streams.device)
        shared = Shared(None, empty_index(streams), nothing)
        fault = torch.full_like(step.attention.row_request, NO_FAULT)
        return Stack(Flow(streams, self.first_mix(streams), ~nothing), shared, (), fault)

    def run_layers(self, first: int, last: int, stack: Stack, step: StepInputs, caches: KVCaches) -> Stack:
        """Layers `first` ... `last - 1` on the rows of `step`."""
        if first == last:
            return stack
        flow, shared, features = stack.flow, stack.shared, stack.features
        sound: list[Tensor] = []
        turn = Turn(step, self.rotations(step), step.attention.row_request >= 0)
        for plan in self.plan[first:last]:
            layer = self.layer(plan.layer)
            if layer.engram is not None:
                flow = flow._replace(streams=layer.engram(flow.streams, step, self.token_map))
            if plan.is_target and self.return_features:
                features += (flow.streams.float().mean(1).to(flow.streams.dtype),)
            flow, shared = layer(flow, turn, caches, shared, self._next_norm(plan.layer, last))
            # The mix comes from the mean square of the row's whole stream: not finite there shows in it.
            sound.append(flow.sound & ~shared.faulty if plan.owns_index else flow.sound)
        # Here and not layer by layer: it is a launch a step, and a layer's number would make equal layers
        # compile to unequal code.
        layers = torch.arange(first, last, dtype=torch.int32, device=stack.fault.device)
        fault = torch.where(torch.stack(sound), NO_FAULT, layers.unsqueeze(1)).amin(0)
        return Stack(flow, shared, features, torch.minimum(stack.fault, fault))

    def _next_norm(self, number: int, last: int) -> Tensor | None:
        """The norm of the collapse that follows a layer at once: the next one's, or the model's."""
        if number + 1 == len(self.plan):
            return self.norm
        following = self.layer(number + 1)
        return None if number + 1 == last or following.engram is not None else following.attention_norm

    def forward(self, step: StepInputs, caches: KVCaches) -> StepOutput:
        stack, tail, end = self.start(step), step.tail, len(self.plan)
        if tail is None:
            stack = self.run_layers(0, end, stack, step, caches)
            return self.finish(stack, stack.fault_layer)
        cut = self.last_kv_source
        stack = self.run_layers(0, cut, stack, step, caches)
        self.layer(cut).write_kv(stack.flow, step, self.rotations(step), caches)
        fault_layer, stack = stack.fault_layer, stack.rows(tail.rows)
        stack = self.run_layers(cut, cut + 1, stack, tail.first, caches)
        stack = self.run_layers(cut + 1, end, stack, tail.rest, caches)
        return self.finish(stack, fault_layer.index_copy(0, tail.rows, stack.fault_layer))

    def finish(self, stack: Stack, fault_layer: Tensor) -> StepOutput:
        hidden = stack.flow.x
        assert hidden is not None, "the last layer collapses with the model's norm"
        features = torch.cat(stack.features, -1) if stack.features else hidden[:, :0]
        return StepOutput(hidden, features, fault_layer)

    def layer(self, number: int) -> DecoderLayer:
        layer = self.layers[number]
        assert isinstance(layer, DecoderLayer)
        return layer

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, D] -> float32 [n, V]"""
        context = self.context
        return linear(hidden, self.head, torch.float32, context.deterministic, context.backends.linear)
