"""From logits to token ids."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.runner.request import SamplingParams


def sample_row(logits: Tensor, params: SamplingParams, position: int) -> int:
    """One token from float32 logits [V].

    Sampling is by the Gumbel maximum with noise that depends on (seed, position) alone, so a request draws
    the same tokens in any batch.
    """
    if params.temperature == 0:
        return int(logits.argmax())
    scaled = logits.cpu() / params.temperature
    if params.top_p < 1:
        ordered, order = scaled.sort(descending=True)
        probability = ordered.softmax(-1)
        below = probability.cumsum(-1) - probability < params.top_p  # the token that crosses top_p stays
        scaled = torch.full_like(scaled, -torch.inf).scatter(0, order[below], ordered[below])
    generator = torch.Generator().manual_seed((params.seed * 1_000_003 + position) % 2**63)
    noise = torch.empty_like(scaled).exponential_(generator=generator)
    return int((scaled - noise.log()).argmax())
