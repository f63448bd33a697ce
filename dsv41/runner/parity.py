"""Whether a measured callable computes what the reference computes: the same steps on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv41.backends import FAMILIES, Backends
from dsv41.config import EngineConfig
from dsv41.graphs.capture import Run
from dsv41.model.decoder import Decoder
from dsv41.runner.load import Model
from dsv41.runner.stepper import Stepper

# Worst row of rms(difference) / std(reference). Without quantisers only the order of sums differs. With them
# one ulp can move a code, and codes move rows: valid builds of a small release differ by up to 0.21.
PARITY_LIMIT = {True: 0.28, False: 2e-5}
NOISE_FACTOR = 1.25  # of the reference's own noise, which is the limit where a deeper model has more


class ParityError(RuntimeError):
    """The measured callable does not compute what the reference computes."""


def random_tokens(count: int, model: Model, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (count,), generator=generator).tolist()


@dataclass(frozen=True)
class Parity:
    """The worst row of the comparison that comes before the numbers. `noise`: the reference's own, where it
    had to be measured."""

    rows: int
    worst_row: float
    limit: float
    noise: float | None = None

    @property
    def passed(self) -> bool:
        return self.worst_row <= self.limit


def row_error(logits: Tensor, reference: Tensor) -> Tensor:
    """Per row: rms(difference) / std(reference). [n, V] -> [n]; not finite anywhere gives NaN."""
    return (logits.double() - reference.double()).square().mean(-1).sqrt() / reference.double().std(-1)


def reference_run(model: Model) -> Run:
    """The eager decoder on the reference implementations, over the model's own weights and record formats."""
    backends = _reference(model)
    return model.decoder if backends == model.backends else twin(model, backends)


def _reference(model: Model) -> Backends:
    return replace(model.backends, **dict.fromkeys(FAMILIES, "reference"))


def twin(model: Model, backends: Backends) -> Decoder:
    """Another decoder over the same weights. Their byte order must be one that its backends read."""
    with torch.device("meta"):
        decoder = Decoder(
            model.config, model.plan, model.layout, backends, features=model.decoder.return_features
        )
    decoder.load_state_dict(model.decoder.state_dict(), assign=True)
    for name in ("plain_frequencies", "yarn_frequencies"):
        setattr(decoder, name, getattr(model.decoder, name))
    return decoder.eval()


def _nudged(embedding: Tensor, seed: int = 0) -> Tensor:
    """Every normal bf16 value one step up or down, as another rounding of it could be."""
    bits = embedding.detach().view(torch.int16)
    generator = torch.Generator(bits.device).manual_seed(seed)
    step = torch.randint(0, 2, bits.shape, generator=generator, device=bits.device, dtype=torch.int16) * 2 - 1
    exponent = bits & 0x7F80
    return torch.where((exponent > 0) & (exponent < 0x7F00), bits + step, bits).view(torch.bfloat16)


def _noise(model: Model, engine: EngineConfig, reference: Tensor) -> float:
    """How far the reference is from itself when its embeddings are rounded otherwise: the worst row."""
    other = twin(model, _reference(model))
    other.embedding = torch.nn.Parameter(_nudged(model.decoder.embedding), requires_grad=False)
    return float(row_error(_steps(model, engine, other), reference).max())


def compare(model: Model, engine: EngineConfig, measured: Run) -> Parity:
    """Run `measured`, then the reference, over the same steps.

    The reference reads the model's own weights: where an implementation keeps them in an order of its own,
    they are put back into the release's for that time, in place. It runs eagerly: it reads the device.

    A model that is deeper than those of the golden data has more noise, which is measured where it matters.
    """
    engine = replace(engine, decoder_replay=False)  # every row's logits are compared
    logits, noise = _steps(model, engine, measured), None
    limit, engine = PARITY_LIMIT[model.config.numerics.quantised], _small(model, engine)
    model.decoder.unpack_weights()
    try:
        reference = _steps(model, engine, reference_run(model))
        worst = float(row_error(logits, reference).max())
        if model.config.numerics.quantised and limit < worst < 1:  # 1.4: rows that have nothing in common
            noise = _noise(model, engine, reference)
            limit = max(limit, NOISE_FACTOR * noise)
    finally:
        model.decoder.pack_weights()
    return Parity(len(reference), worst, limit, noise)


def _long(model: Model, engine: EngineConfig) -> int:
    """Rows of the first step."""
    return min(model.config.window_tokens + 3, engine.max_context_tokens - 4, engine.max_batch_tokens)


def _small(model: Model, engine: EngineConfig) -> EngineConfig:
    """With room for the steps of `_steps` alone: the reference sizes its work by the longest context."""
    tokens = _long(model, engine) + 4
    return replace(
        engine, graph_rows=0, max_requests=2, max_context_tokens=tokens, global_pages=0, window_pages=0
    )


def _steps(model: Model, engine: EngineConfig, run: Run) -> Tensor:
    """Logits of a prefill, a mixed step, two decodes, and one decode alone. [n, V]"""
    long = _long(model, engine)
    stepper = Stepper(model, engine, run)
    requests = [stepper.add(random_tokens(*prompt)) for prompt in ((long + 3, model, 1), (4, model, 2))]
    schedule: Sequence[Sequence[tuple[int, int]]] = (
        ((0, long),),
        ((0, 1), (1, 3)),
        ((0, 1), (1, 1)),
        ((0, 1),),
    )
    logits = [stepper.logits([(requests[number], count) for number, count in step]) for step in schedule]
    return torch.cat([rows for step in logits for rows in step])
