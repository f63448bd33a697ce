"""The boundary between scheduling and computing: what one step does, in host integers.

`Worker.execute` needs nothing but these objects in order, so a scheduler of another make can drive it:
announce a request once as new, append its pages as they come, name its tokens of every step, and say when it
is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from dsv41.runner.request import SamplingParams


@dataclass(frozen=True)
class NewRequest:
    """A request that the worker does not hold: new, or resumed after a preemption.

    `tokens` is everything known: the prompt, then what was sampled before a preemption. The first scheduled
    token is number `num_computed`. States of tokens below `hit_tokens` are cached and shared: this request
    reads and never writes them. The window has no rows below `replay_start`; tokens in [replay_start,
    hit_tokens) are computed again for their window rows alone. `pages[i]` and `window_pages[i]` hold tokens
    i*page_tokens ..."""

    request_id: int
    tokens: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    pages: tuple[int, ...]
    window_pages: tuple[int, ...]
    num_computed: int = 0
    hit_tokens: int = 0
    replay_start: int = 0
    image_rows: tuple[bool, ...] | None = None
    embeddings: Tensor | None = None  # [num_prompt, D], read on image rows
    open_groups: dict[int, Tensor] | None = (
        None  # by KV source: the request's open rows, from an earlier engine
    )


@dataclass(frozen=True)
class RunningRequest:
    """A request that the worker holds, and the pages that it got for this step.

    `tokens`, if any, replace all from the next token to compute on: a forced answer in the place of the
    sampled one. `draft_tokens` are guesses at the tokens behind the last known one. Each gets a row of this
    step, and those that the model draws itself are kept: the tokens are those of plain decoding, several a
    step. The results of such a step must be read before its request is scheduled again."""

    request_id: int
    new_pages: tuple[int, ...] = ()
    new_window_pages: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    draft_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class SchedulerOutput:
    """One step. Every id in `num_tokens` is new or running; `finished` and `preempted` are dropped first."""

    new: tuple[NewRequest, ...] = ()
    running: tuple[RunningRequest, ...] = ()
    finished: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    num_tokens: dict[int, int] = field(default_factory=dict)

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens.values())


@dataclass(frozen=True)
class PromptLogProb:
    """A prompt token, its natural log-probability and rank after the tokens before it, and the likeliest ones
    there."""

    position: int
    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TokenResult:
    """What a step made of one request: a token, or the sentence of a fault. `token` is -1 with a fault, and
    when the step brought prompt log-probabilities alone. A rank of 1 is the likeliest token."""

    request_id: int
    token: int
    error: str | None = None
    logprob: float | None = None
    rank: int | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: tuple[PromptLogProb, ...] = ()
