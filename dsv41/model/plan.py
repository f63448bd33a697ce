"""The layer table: who owns which state, whose state a layer reads. Pure integers from the config."""

from __future__ import annotations

from dataclasses import dataclass

from dsv41.config import ModelConfig
from dsv41.rules import last_source

WINDOW, FULL, REINDEX, REUSE = "window", "full", "reindex", "reuse"


@dataclass(frozen=True)
class LayerPlan:
    """One layer of the stack (spec/model.md 3.9). `kv_source` and `index_source` are layer numbers, None in a
    window-only layer; `engram` is the number of the layer's n-gram table, None without one."""

    layer: int
    ratio: int
    role: str
    kv_source: int | None
    index_source: int | None
    publishes_candidates: bool
    reads_candidates: bool
    engram: int | None
    is_target: bool

    @property
    def owns_kv(self) -> bool:
        return self.kv_source == self.layer

    @property
    def owns_index(self) -> bool:
        return self.index_source == self.layer


def _layer_plan(config: ModelConfig, layer: int) -> LayerPlan:
    ratio = config.ratios[layer]
    kv_source = last_source(config.kv_sources, layer) if ratio else None
    index_source = last_source(config.index_sources, layer) if ratio else None
    if ratio == 0:
        role = WINDOW
    elif kv_source is None or index_source is None:
        raise ValueError(f"layer {layer} has ratio {ratio} but no KV and index source at or before it")
    elif config.ratios[kv_source] != ratio:
        raise ValueError(
            f"layer {layer} has ratio {ratio} but its KV source, layer {kv_source}, has ratio"
            f" {config.ratios[kv_source]}"
        )
    elif index_source < kv_source:
        raise ValueError(
            f"layer {layer} would read the selection of layer {index_source} in the states of {kv_source}"
        )
    else:
        role = FULL if kv_source == layer else REINDEX if index_source == layer else REUSE
    source = config.candidate_source
    return LayerPlan(
        layer=layer,
        ratio=ratio,
        role=role,
        kv_source=kv_source,
        index_source=index_source,
        publishes_candidates=layer == source,
        reads_candidates=0 <= source < layer and index_source == layer,
        engram=config.engram.layers.index(layer) if layer in config.engram.layers else None,
        is_target=layer in config.draft.target_layers,
    )


def build_plan(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """The plan of every backbone layer. Raises ValueError where a layer would have nothing to read."""
    return tuple(_layer_plan(config, layer) for layer in range(config.num_layers))


def kv_sources(plan: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
    """The layers that publish compressed states and index keys."""
    return tuple(layer for layer in plan if layer.owns_kv)
