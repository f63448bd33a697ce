"""One request: its tokens, how many of them the model has seen, and where its state lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from torch import Tensor

from dsv41.config import ModelConfig
from dsv41.runner.block_table import RequestPages

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen, and where they end. Hashable; lists and mappings given for ids
    are stored as tuples.

    - `temperature` 0 is greedy. `top_k` keeps that many tokens (0: all), `top_p` in (0, 1] the smallest set
      with at least that probability, `min_p` the tokens with at least that fraction of the best one's
      probability.
    - `repetition_penalty` acts on tokens of the prompt and the output, `presence_penalty` and
      `frequency_penalty` on those of the output.
    - `logit_bias` adds to logits, by id. Where `allowed_ids` are given, no other id can be chosen;
      `banned_ids` never can.
    - `stop_ids` end a request as the end-of-sequence token does. None of these comes before the output has
      `min_tokens` tokens, whether or not `ignore_eos` is set.
    - `seed`: one seed draws the same tokens for the same logits, in any batch.
    - `logprobs`: report the chosen token's log-probability and those of so many best ones (0: the chosen one
      alone); `prompt_logprobs`: likewise for the tokens of the prompt.
    - `token_mask`: structured output. Given the output ids so far, bool [V] of the ids that may come next.

    Raises ValueError for a value out of range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    banned_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_mask: Callable[[Sequence[int]], Tensor] | None = None

    def __post_init__(self) -> None:
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        object.__setattr__(self, "logit_bias", tuple(sorted(bias)))
        for name in ("allowed_ids", "banned_ids", "stop_ids"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, holds, rule in self._rules():
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)}, but {rule}")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """(field, whether its value is right, what it must be); every comparison fails on NaN."""
        yield "max_tokens", self.max_tokens >= 1, "a request must produce at least one token"
        yield "temperature", 0 <= self.temperature < inf, "must be a finite number of at least 0"
        yield "top_p", 0 < self.top_p <= 1, "must lie in (0, 1]"
        yield "seed", -(2**63) <= self.seed < 2**63, "must fit in 64 bits with a sign"
        yield "top_k", self.top_k >= 0, "must be at least 0; 0 keeps every token"
        yield "min_p", 0 <= self.min_p <= 1, "must lie in [0, 1]"
        yield "repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "must lie in [0.01, 100]"
        yield "presence_penalty", -2 <= self.presence_penalty <= 2, "must lie in [-2, 2]"
        yield "frequency_penalty", -2 <= self.frequency_penalty <= 2, "must lie in [-2, 2]"
        biases = dict(self.logit_bias)
        yield "logit_bias", len(biases) == len(self.logit_bias), "names a token twice"
        small = all(-100 <= bias <= 100 for bias in biases.values())
        yield "logit_bias", small, "a bias must lie in [-100, 100]; banned_ids excludes a token"
        yield "min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must lie between 0 and max_tokens"
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            yield name, count is None or count >= 0, "must be None or at least 0"
        for name, ids in self._ids():
            yield name, min(ids, default=0) >= 0, "a token id is at least 0"
        if self.allowed_ids is not None:
            left = set(self.allowed_ids) - set(self.banned_ids)
            yield "allowed_ids", bool(left), "no token is left: give at least one that is not in banned_ids"
            ends = self.min_tokens > 0 and left <= set(self.stop_ids)
            yield "allowed_ids", not ends, "all of them end the request, which min_tokens forbids"

    def _ids(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "logit_bias", tuple(dict(self.logit_bias))
        yield "allowed_ids", self.allowed_ids or ()
        yield "banned_ids", self.banned_ids
        yield "stop_ids", self.stop_ids

    def validate_for(self, vocab_size: int) -> None:
        """Raises ValueError for ids, or numbers of them, that a vocabulary of `vocab_size` ids has not."""
        for name, ids in self._ids():
            if max(ids, default=0) >= vocab_size:
                raise ValueError(f"{name}: token id {max(ids)} is outside the vocabulary of {vocab_size} ids")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise ValueError(f"{name} is {getattr(self, name)}, but the vocabulary has {vocab_size} ids")
        if len(set(self.banned_ids)) == vocab_size:
            raise ValueError("banned_ids holds every id of the vocabulary: no token is left")


@dataclass(eq=False)
class Request:
    """One request on the host. `tokens` are known; `num_pending` more were sampled in steps still in flight.

    `num_computed` counts tokens that executed steps compute. `salt` keeps apart what equal token ids do not
    tell, such as images."""

    request_id: int
    tokens: list[int]
    params: SamplingParams
    num_prompt: int
    salt: bytes = b""
    image_rows: tuple[bool, ...] | None = None
    embeddings: Tensor | None = None
    open_groups: dict[int, Tensor] | None = None  # brought along by an imported request
    status: str = WAITING
    num_pending: int = 0
    num_computed: int = 0
    num_confirmed: int = 0  # of these, in steps whose results are known
    num_cached: int = 0  # prompt tokens taken from the prefix cache at the last admission
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0  # delivered; a preempted prompt computes them again
    pages: RequestPages | None = None
    keys: list[bytes] = field(default_factory=list)
    sent_pages: tuple[int, int] | None = None  # entries of both tables that the worker holds
    finish_reason: str | None = None
    error: str | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) + self.num_pending

    @property
    def num_remaining(self) -> int:
        """Tokens that no executed step computes yet; 0 when the last token of the answer is in flight."""
        done = self.length - self.num_prompt >= self.params.max_tokens
        return 0 if done else self.length - self.num_computed

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


def check_prompt(tokens: Sequence[int], params: SamplingParams, config: ModelConfig) -> None:
    """Raises ValueError for a prompt that the model cannot continue."""
    if not tokens:
        raise ValueError("the prompt is empty: it needs at least one token")
    wrong = next((token for token in tokens if not 0 <= token < config.vocab_size), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is outside the vocabulary of {config.vocab_size} ids")
    if len(tokens) + params.max_tokens > config.max_tokens:
        raise ValueError(
            f"a prompt of {len(tokens)} tokens and {params.max_tokens} new ones exceed the model's "
            f"{config.max_tokens} tokens"
        )
