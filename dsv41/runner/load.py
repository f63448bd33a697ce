"""Build a model from a checkpoint directory, or from a preset with stand-in weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsv41 import backends as backend_table
from dsv41.backends import Backends
from dsv41.config import EngineConfig, ModelConfig, Numerics
from dsv41.graphs.module import CompiledModule, trace_segments
from dsv41.graphs.segments import Segment
from dsv41.hardware import Hardware, detect
from dsv41.model.caches import allocate_caches
from dsv41.model.decoder import Decoder
from dsv41.model.layout import CacheLayout, build_layout
from dsv41.model.plan import LayerPlan, build_plan
from dsv41.model.weights import LoadReport, default_token_map, init_dummy, load_weights
from dsv41.presets import preset
from dsv41.runner.rows import compute_rows
from dsv41.runner.state import RequestState
from dsv41.runner.tokenizer import Tokenizer

LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True)
class Blueprint:
    """Everything about a model that needs no weights and no device memory."""

    source: str  # what a person named: a directory or a preset
    directory: Path | None
    config: ModelConfig
    plan: tuple[LayerPlan, ...]
    hardware: Hardware
    backends: Backends
    layout: CacheLayout


@dataclass(frozen=True)
class Model:
    """A loaded model. `report` is None for stand-in weights."""

    blueprint: Blueprint
    decoder: Decoder
    tokenizer: Tokenizer | None
    report: LoadReport | None

    @property
    def config(self) -> ModelConfig:
        return self.blueprint.config

    @property
    def plan(self) -> tuple[LayerPlan, ...]:
        return self.blueprint.plan

    @property
    def backends(self) -> Backends:
        return self.blueprint.backends

    @property
    def layout(self) -> CacheLayout:
        return self.blueprint.layout

    @property
    def device(self) -> str:
        return self.blueprint.hardware.device

    def check(self, engine: EngineConfig) -> None:
        """Raises ValueError for an engine that this model cannot serve, or was not loaded for."""
        engine.validate(self.config)
        if self.layout.page_tokens != engine.page_tokens:
            raise ValueError(
                f"the model has pages of {self.layout.page_tokens} tokens, the engine {engine.page_tokens}"
            )
        if engine.deterministic and not self.decoder.context.deterministic:
            raise ValueError("the engine is deterministic, the model was not loaded so: load it with engine=")


def blueprint(
    model: str | None = None,
    *,
    preset_name: str | None = None,
    overrides: Iterable[str] = (),
    numerics: str | None = None,
    device: str = "auto",
    backends: str | None = None,
    page_tokens: int = 64,
) -> Blueprint:
    """Resolve a checkpoint directory, or a preset by name, into a checked plan.

    Raises ValueError for a config, override, device or backend that cannot work, FileNotFoundError for a
    directory without a config.json.
    """
    if model is not None and preset_name is not None:
        raise ValueError("--model and --preset exclude each other")
    source = model or preset_name or "tiny"
    config = ModelConfig.load(source) if model is not None else preset(source)
    config = config.with_overrides(overrides)
    if numerics is not None:
        if numerics not in [choice.value for choice in Numerics]:
            raise ValueError(f"--numerics {numerics} is not one of {', '.join(n.value for n in Numerics)}")
        config = replace(config, numerics=Numerics(numerics))
    hardware = detect(device)
    heads, groups = config.num_heads, config.o_groups
    chosen = backend_table.select(hardware, config.numerics, backends, heads, groups)
    plan = build_plan(config)
    return Blueprint(
        source=source,
        directory=Path(model) if model is not None else None,
        config=config,
        plan=plan,
        hardware=hardware,
        backends=chosen,
        layout=build_layout(config, plan, chosen, page_tokens),
    )


def load(
    blueprint: Blueprint,
    *,
    load_format: str = "auto",
    seed: int = 0,
    engine: EngineConfig | None = None,
    features: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Allocate the decoder on the blueprint's device and fill it: from the checkpoint if there is one and
    `load_format` is "auto", otherwise with stand-in weights of the same formats.

    Raises CheckpointError for a checkpoint that is not the one its config describes.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"--load-format {load_format} is not one of {', '.join(LOAD_FORMATS)}")
    tables = (engine or EngineConfig()).engram_tables
    config, directory = blueprint.config, blueprint.directory
    from_files = directory is not None and load_format == "auto"
    tokenizer = Tokenizer.load(directory) if directory is not None else None
    with torch.device(blueprint.hardware.device):
        decoder = Decoder(
            config,
            blueprint.plan,
            blueprint.layout,
            blueprint.backends,
            own_tables=not from_files or tables == "device",
            features=features,
            deterministic=engine is not None and engine.deterministic,
        )
    decoder.eval()
    token_map = None
    if config.engram.layers:
        token_map = tokenizer.engram_token_map(config) if tokenizer is not None else default_token_map(config)
    if from_files:
        assert directory is not None
        report = load_weights(
            decoder, config, directory, token_map=token_map, tables=tables, progress=progress
        )
        decoder.pack_weights()
        return Model(blueprint, decoder, tokenizer, report)
    init_dummy(decoder, config, seed, token_map=token_map)
    decoder.pack_weights()
    return Model(blueprint, decoder, tokenizer, None)


def load_by_name(
    model_or_preset: str,
    engine: EngineConfig | None = None,
    *,
    load_format: str = "auto",
    **choices: Any,
) -> Model:
    """A checkpoint directory or a preset, with the page size, table placement and seed of an engine.
    `choices` are those of `blueprint`: overrides, numerics, device, backends."""
    engine = engine if engine is not None else EngineConfig()
    source: dict[str, Any] = (
        {"model": model_or_preset} if Path(model_or_preset).is_dir() else {"preset_name": model_or_preset}
    )
    plan = blueprint(**source, page_tokens=engine.page_tokens, **choices)
    return load(plan, load_format=load_format, seed=engine.seed, engine=engine)


def compiled(
    model_or_preset: str,
    *,
    inner: str = "inductor",
    engine: EngineConfig | None = None,
    **choices: Any,
) -> CompiledModule:
    """The decoder of a checkpoint directory or a preset as one compiled callable.

    It is called with a step and its caches; `.plan`, `.segments`, `.backends` and `.decoder` are readable. To
    run requests through it: `LLM(module.model, engine, run=module)`. `choices` are those of `load_by_name`.
    """
    model = load_by_name(model_or_preset, engine, **choices)
    return CompiledModule(model.decoder, inner)


def trace_blueprint(blueprint: Blueprint) -> tuple[Segment, ...]:
    """The segments of a model's graph, traced on the meta device: no weights, no memory, no compilation."""
    config, layout, rows = blueprint.config, blueprint.layout, 2
    with torch.device("meta"):
        decoder = Decoder(config, blueprint.plan, layout, blueprint.backends)
        slots, counts = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    state = RequestState(max_requests=1, max_tokens=rows, max_pages=1, device="meta")
    step = compute_rows(state, slots, counts, rows, config, layout)
    return trace_segments(decoder, step, allocate_caches(layout, 2, 2, 1, "meta"))
