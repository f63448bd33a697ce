"""Golden data (outputs of the release's own reference) for the tests. Missing data fails the test that asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv41.config import EngineConfig
from dsv41.model.inputs import StepOutput
from dsv41.runner.engine import Engine
from dsv41.runner.load import Model, blueprint, load
from dsv41.runner.request import Request, SamplingParams

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
MODES = {"bf16": "bf16", "fp32": "fp32q", "fp32-noquant": "fp32nq"}
PLENTY = SamplingParams(max_tokens=64)


@cache
def tensors(name: str) -> dict[str, Tensor]:
    """One golden file, e.g. `tiny/golden/prompts` or `units/gate`."""
    return load_file(GOLDEN / f"{name}.safetensors")


@cache
def model(name: str, numerics: str, overrides: tuple[str, ...] = (), backends: str | None = None) -> Model:
    """A golden checkpoint under one arithmetic mode, on the CPU."""
    plan = blueprint(
        str(GOLDEN / name / "model"), numerics=numerics, device="cpu", overrides=overrides, backends=backends
    )
    return load(plan, features=True)


def prompts(name: str, images: bool = False) -> list[tuple[str, int]]:
    """(prompt, row) of every golden prompt; image prompts only when asked for."""
    found = []
    for key, ids in sorted(tensors(f"{name}/golden/prompts").items()):
        prompt, kind = key.split(".")
        if kind == "ids" and (images or not prompt.startswith("img")):
            found += [(prompt, row) for row in range(len(ids))]
    return found


def image_embeddings(name: str, numerics: str, prompt: str) -> tuple[list[bool], Tensor] | None:
    """Which positions of an image prompt belong to an image, and the rows that replace their embeddings."""
    types = tensors(f"{name}/golden/prompts").get(f"{prompt}.types")
    if types is None:
        return None
    types = types[0]
    weights = checkpoint(name)
    rows = torch.zeros(len(types), weights["image_start"].shape[-1])
    for kind, parameter in ((0, "image_start"), (2, "image_newline"), (3, "image_end")):
        rows[types == kind] = weights[parameter].float()
    vision, mode = tensors(f"{name}/golden/vision"), MODES[numerics]
    spans = sorted(key for key in vision if key.startswith(f"{prompt}.") and key.endswith(f".aligner_{mode}"))
    rows[types == 1] = torch.cat([vision[key].float() for key in spans])
    return (types >= 0).tolist(), rows


@cache
def checkpoint(name: str) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for shard in sorted((GOLDEN / name / "model").glob("*.safetensors")):
        merged |= load_file(shard)
    return merged


@dataclass
class Session:
    """One request of a golden prompt in an engine of its own; `feed` runs its next rows and returns their output."""

    name: str
    numerics: str
    prompt: str
    row: int = 0
    engine: Engine = field(init=False)
    request: Request = field(init=False)

    def __post_init__(self) -> None:
        chosen = model(self.name, self.numerics)
        self.engine = Engine(chosen, EngineConfig(max_requests=1, max_context_tokens=512))
        ids = tensors(f"{self.name}/golden/prompts")[f"{self.prompt}.ids"][self.row]
        self.request = self.engine.add(ids.tolist(), PLENTY)
        images = image_embeddings(self.name, self.numerics, self.prompt)
        if images is not None:
            self.request.image_rows, self.request.embeddings = images

    @torch.inference_mode()
    def feed(self, count: int) -> StepOutput:
        output = self.engine.run(self.engine.step_inputs([(self.request, count)]), self.engine.caches)
        self.request.num_computed += count
        return output

    @torch.inference_mode()
    def logits(self, count: int) -> Tensor:
        return self.engine.model.decoder.logits(self.feed(count).hidden)


class Recorder(TorchDispatchMode):
    """Keeps the results of every op of this package, in call order: `calls[name]` is a list of (arguments, result)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[tuple, object]]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "dsv41":
            self.calls.setdefault(func._schema.name.split("::")[1], []).append((args, result))
        return result


def rel(a: Tensor, b: Tensor) -> float:
    """rms(a - b) / rms(b)"""
    a, b = a.double(), b.double()
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-300))


def row_error(logits: Tensor, golden: Tensor) -> Tensor:
    """Per row: rms(logits - golden) / std(golden). [n, V] -> [n]"""
    return (logits - golden).square().mean(-1).sqrt() / golden.std(-1)
