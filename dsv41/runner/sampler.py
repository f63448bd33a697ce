"""From logits to token ids, on the device and for a whole batch. The host reads nothing back.

A row of logits is changed in this order, the upstream runner's; "log-probabilities" below are those of the
logits after step 1, so they are the model's own, whatever the request's settings:

    1. token mask                   x = -inf outside it
    2. check                        a maximum that is not finite flags the row (NaN, +inf, an empty mask)
    3. bias, allowed, banned        x += bias, -inf for ids that cannot come
       min tokens                   x = -inf at end and stop ids while the output is shorter
    4. repetition penalty r         x = x / r if x > 0 else x * r, for tokens of the prompt or the output
       frequency f, presence p      x -= f * count + p * (count > 0), counts over the output
    5. temperature t                x = (x - max x) / t
    6. min-p m                      drop x < ln m
    7. top-k, top-p                 in order of (-x, id): the first k; then those before whom less than p lies
    8. draw                         argmax of x + Gumbel noise, a hash of (seed, position, token id)

Every step treats a row by itself, with arithmetic that does not depend on the rows beside it, so a request
gets the same tokens in any batch. Equal values: the smaller id first. A batch that needs none of the steps 3
to 8 costs one argmax.

Legend: n rows, V vocabulary, R slots of requests, K the largest number of alternatives asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dsv41.runner.request import SamplingParams

Step = Literal["bias", "min_tokens", "penalties", "draw", "min_p", "cut"]

LOGITS_AT_ONCE = 2**23  # most work goes by parts of the rows: it takes up to 50 bytes a logit
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FMIX64 = (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64)
SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 2.0**-126, 2.0**127  # float32 holds no zero and no inf between


class LogProbs(NamedTuple):
    """Natural log-probabilities of n tokens and of the K likeliest ones, best first. A rank counts the logits
    that are at least the token's own: 1 is the one best."""

    chosen: Tensor  # float32 [n]
    ranks: Tensor  # int64 [n]
    top_ids: Tensor  # int64 [n, K]
    top: Tensor  # float32 [n, K]


@dataclass(frozen=True)
class Sampled:
    """`nan` marks rows from which nothing can be drawn: NaN or +inf among the logits, or every token
    excluded. Their token is 0 and their log-probabilities are those of equal logits."""

    tokens: Tensor  # int64 [n]
    nan: Tensor  # bool [n]
    logprobs: LogProbs | None


@dataclass(frozen=True)
class Admitted:
    """What the host knows of a slot: the steps its request needs; `top_n` -1 asks for no log-probability."""

    steps: frozenset[Step]
    top_n: int

    @classmethod
    def of(cls, params: SamplingParams) -> Admitted:
        wanted: dict[Step, bool] = {
            "bias": bool(params.logit_bias or params.banned_ids) or params.allowed_ids is not None,
            "min_tokens": params.min_tokens > 0,
            "penalties": params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0,
        }
        if params.temperature > 0:  # on a greedy row the steps 5 to 8 would change nothing
            cut = params.top_k > 0 or params.top_p < 1
            wanted |= {"draw": True, "min_p": params.min_p > 0, "cut": cut}
        steps = frozenset(step for step, is_wanted in wanted.items() if is_wanted)
        return cls(steps, -1 if params.logprobs is None else params.logprobs)


class Sampler:
    """The sampling state of R slots, at fixed addresses. Tables of [R, V] come with the first request that
    needs them and stay."""

    def __init__(
        self, max_requests: int, vocab_size: int, device: torch.device | str, eos_token: int
    ) -> None:
        assert vocab_size <= 2**22, "the integer sum of `cut_tail` would overflow"
        self.max_requests, self.vocab_size, self.eos_token = max_requests, vocab_size, eos_token
        self.device = torch.device(device)
        self.admitted: dict[int, Admitted] = {}
        self.temperature = self._zeros(torch.float32)
        self.top_k = self._zeros(torch.int32)
        self.top_p = self._zeros(torch.float64)
        self.log_min_p = self._zeros(torch.float32)
        self.repetition = self._zeros(torch.float32)
        self.presence = self._zeros(torch.float32)
        self.frequency = self._zeros(torch.float32)
        self.seed = self._zeros(torch.int64)
        self.min_tokens = self._zeros(torch.int32)
        self.ids = torch.arange(vocab_size, device=device)
        self.bias: Tensor | None = None  # float32 [R, V]
        self.ends: Tensor | None = None  # bool [R, V]: end and stop ids
        self.in_prompt: Tensor | None = None  # bool [R, V]
        self.counts: Tensor | None = None  # int32 [R, V]: tokens of the output

    # -- requests ------------------------------------------------------------------------------------------

    def admit(
        self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int] = ()
    ) -> None:
        """A request takes `slot`; `output` is what it has sampled already, when it resumes. The ids are those
        of a request that `SamplingParams.validate_for` let through."""
        assert slot not in self.admitted, f"slot {slot} is taken"
        self.admitted[slot] = Admitted.of(params)
        temperature = min(max(params.temperature, SMALLEST_TEMPERATURE), LARGEST_TEMPERATURE)
        if params.temperature == 0:  # greedy: nothing to cut, whatever the other rows need
            temperature, params = 0.0, replace(params, top_k=0, top_p=1.0, min_p=0.0)
        self.temperature[slot].fill_(temperature)
        self.top_k[slot].fill_(min(params.top_k or self.vocab_size, self.vocab_size))
        self.top_p[slot].fill_(params.top_p)
        self.log_min_p[slot].fill_(math.log(params.min_p) if params.min_p else -math.inf)
        self.repetition[slot].fill_(params.repetition_penalty)
        self.presence[slot].fill_(params.presence_penalty)
        self.frequency[slot].fill_(params.frequency_penalty)
        self.seed[slot].fill_(params.seed)
        self.min_tokens[slot].fill_(params.min_tokens)
        self._admit_tables(slot, params, prompt, output)

    def _admit_tables(
        self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        steps = self.admitted[slot].steps
        if "bias" in steps and self.bias is None:
            self.bias = self._zeros(torch.float32, self.vocab_size)
        if self.bias is not None:
            self._write_bias(self.bias[slot], params)
        if "min_tokens" in steps:
            if self.ends is None:
                self.ends = self._zeros(torch.bool, self.vocab_size)
            ends = self._upload((self.eos_token, *params.stop_ids), torch.int64)
            self.ends[slot].zero_().index_fill_(0, ends, True)
        if "penalties" in steps:
            if self.in_prompt is None or self.counts is None:
                self.in_prompt = self._zeros(torch.bool, self.vocab_size)
                self.counts = self._zeros(torch.int32, self.vocab_size)
            self.in_prompt[slot].zero_().index_fill_(0, self._upload(prompt, torch.int64), True)
            ids = self._upload(output, torch.int64)
            self.counts[slot].zero_().scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def draws_rows_alone(self, slot: int) -> bool:
        """Whether a row of the slot's request can be drawn without the tokens of the rows before it."""
        return "penalties" not in self.admitted[slot].steps

    def release(self, slot: int) -> None:
        """The request of `slot` ended or was preempted."""
        del self.admitted[slot]

    def _write_bias(self, row: Tensor, params: SamplingParams) -> None:
        row.zero_()
        if params.allowed_ids is not None:
            row.fill_(-torch.inf).index_fill_(0, self._upload(params.allowed_ids, torch.int64), 0.0)
        if params.banned_ids:
            row.index_fill_(0, self._upload(params.banned_ids, torch.int64), -torch.inf)
        if params.logit_bias:
            ids, values = zip(*dict(params.logit_bias).items(), strict=True)
            row.index_add_(0, self._upload(ids, torch.int64), self._upload(values, torch.float32))

    @torch.inference_mode(False)  # a tensor born in inference mode could never be written outside it
    def _zeros(self, dtype: torch.dtype, *columns: int) -> Tensor:
        return torch.zeros(self.max_requests, *columns, dtype=dtype, device=self.device)

    def _upload(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Through pinned memory, so that the copy waits for nothing and nothing waits for it."""
        host = torch.tensor(values, dtype=dtype, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)

    # -- a step --------------------------------------------------------------------------------------------

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        num_prompt: Tensor,
        active: Sequence[int],
        masks: Tensor | None = None,
    ) -> Sampled:
        """One token for every row of `logits` [n, V] float32, which are left as they are.

        `slots`, `positions` and `num_prompt` are int64 [n] on the device: the row's slot, the position of the
        token to come, and the tokens of the request's prompt. A row of slot -1 is padding: it gets some
        token, which is counted nowhere. `active` names the slots of the other rows on the host, in any order:
        it decides which steps run. `masks` bool [n, V] holds the tokens that may come.
        """
        assert logits.dtype == torch.float32, "the head gives float32 logits"
        requests = [self.admitted[slot] for slot in active]
        steps = frozenset[Step]().union(*(request.steps for request in requests))
        top_n = max((request.top_n for request in requests), default=-1)
        if masks is not None:
            logits = logits.masked_fill(~masks, -torch.inf)
        best, tokens = logits.max(-1)
        is_wrong = _is_wrong(best)
        if steps:
            chosen = [
                self._choose(logits[rows], slots[rows], positions[rows], num_prompt[rows], steps)
                for rows in _parts(logits)
            ]
            best, tokens = (torch.cat(parts) for parts in zip(*chosen, strict=True))
            is_wrong = is_wrong | _is_wrong(best)
        tokens = tokens.masked_fill(is_wrong, 0)
        if "penalties" in steps:
            self.count(slots, tokens)
        return Sampled(tokens, is_wrong, None if top_n < 0 else _logprobs(logits, tokens, top_n))

    def _choose(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        num_prompt: Tensor,
        steps: frozenset[Step],
    ) -> tuple[Tensor, Tensor]:
        """The score [n] and the id [n] of the best token of every row, noise included."""
        slots = slots.clamp(min=0)
        scores = self.scores(logits, slots, positions - num_prompt, steps)
        if "draw" in steps:
            is_drawn = (self.temperature[slots] > 0).unsqueeze(1)
            scores = scores + gumbel_noise(self.seed[slots], positions - 1, self.ids) * is_drawn
        best, tokens = scores.max(-1)
        return best, tokens

    def scores(self, logits: Tensor, slots: Tensor, num_outputs: Tensor, steps: frozenset[Step]) -> Tensor:
        """Steps 3 to 7 [n, V]: their softmax is the distribution that a row is drawn from; a greedy row keeps
        its temperature of 1 and takes the maximum."""
        if "bias" in steps:
            assert self.bias is not None
            logits = logits + self.bias[slots]
        if "min_tokens" in steps:
            assert self.ends is not None
            is_early = num_outputs < self.min_tokens[slots]
            logits = logits.masked_fill(self.ends[slots] & is_early.unsqueeze(1), -torch.inf)
        if "penalties" in steps:
            logits = self._penalise(logits, slots)
        if "draw" not in steps:
            return logits
        temperature = self.temperature[slots]
        temperature = torch.where(temperature > 0, temperature, 1.0)
        # The maximum first: neither a tiny temperature nor a large logit overflows then.
        scores = (logits - logits.amax(-1, keepdim=True)) / temperature.unsqueeze(1)
        if "min_p" in steps:
            scores = scores.masked_fill(scores < self.log_min_p[slots].unsqueeze(1), -torch.inf)
        if "cut" in steps:
            scores = cut_tail(scores, self.top_k[slots], self.top_p[slots])
        return scores

    def _penalise(self, logits: Tensor, slots: Tensor) -> Tensor:
        assert self.in_prompt is not None
        assert self.counts is not None
        counts = self.counts[slots]
        is_in_output = counts > 0
        repetition, frequency, presence = (
            each[slots].unsqueeze(1) for each in (self.repetition, self.frequency, self.presence)
        )
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(self.in_prompt[slots] | is_in_output, scaled, logits)
        return logits - (frequency * counts + presence * is_in_output)

    def recount(self, slot: int, output: Tensor) -> None:
        """The output of a slot's request is `output` int [n], whatever was counted before."""
        if self.counts is not None and "penalties" in self.admitted[slot].steps:
            ones = torch.ones_like(output, dtype=self.counts.dtype)
            self.counts[slot].zero_().scatter_add_(0, output.long(), ones)

    def count(self, slots: Tensor, tokens: Tensor) -> None:
        """Add tokens [n] to the outputs of their slots [n]; slot -1 counts nothing."""
        assert self.counts is not None
        places = slots.clamp(min=0) * self.vocab_size + tokens
        self.counts.view(-1).scatter_add_(0, places, (slots >= 0).to(torch.int32))


def _is_wrong(best: Tensor) -> Tensor:
    """Whether the largest of a row is not finite: a number less itself is 0, and NaN for the others."""
    return (best - best) != 0


def _parts(logits: Tensor) -> Iterator[slice]:
    """Slices of the rows of `logits` [n, V], one at least."""
    num_rows = max(1, LOGITS_AT_ONCE // logits.shape[1])
    for start in range(0, max(1, len(logits)), num_rows):
        yield slice(start, start + num_rows)


def cut_tail(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Scores [n, V] whose maximum is 0, with -inf outside the first `top_k` [n] tokens and, of the
    probability those share, outside the smallest set that holds `top_p` [n]. The token that crosses stays.

    The sums are of integers: a float sum depends on the order, and a scan's order on the rows beside it. A
    weight counts in units of 2**-40 of the best token's.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)  # equal scores: the smaller id first
    kept = torch.arange(scores.shape[1], device=scores.device) < top_k.unsqueeze(1)
    weights = (ordered.exp() * 2.0**40).long() * kept
    before = weights.cumsum(-1) - weights
    limit = (top_p * weights.sum(-1)).ceil().long()
    kept &= (before < limit.unsqueeze(1)) | (top_p == 1).unsqueeze(1)
    return scores.masked_fill(~torch.zeros_like(kept).scatter(1, order, kept), -torch.inf)


def gumbel_noise(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [n, V], of seeds [n], positions [n] and token ids [V] alone: the argmax
    of log p + noise is a draw from p (Maddison, Tarlow and Minka 2014)."""
    key = _hash(_hash(torch.zeros_like(seeds), seeds), positions)
    return _gumbel(_hash(key.unsqueeze(1), ids))


def _hash(key: Tensor, counter: Tensor) -> Tensor:
    """64 bits as int64: Murmur3's finaliser (fmix64) on a Weyl sequence that starts at `key`, as in
    SplittableRandom (Steele, Lea and Flood 2014). Products wrap around."""
    bits = key + (counter + 1) * GOLDEN
    for factor in FMIX64:
        bits = (bits ^ (bits >> 33 & 0x7FFFFFFF)) * factor  # the mask makes the shift a logical one
    return bits ^ (bits >> 33 & 0x7FFFFFFF)


def _gumbel(bits: Tensor) -> Tensor:
    """-log(-log(1 - u)) with u = (top 52 bits + 1/2) / 2**52. Large noise belongs to small u, where float32
    keeps all the bits; u stays below 1, where it would round to 1 and the noise to -inf."""
    u = ((bits >> 12 & (1 << 52) - 1).float() + 0.5) * 2.0**-52
    return -(-torch.log1p(-u.clamp(max=1 - 2.0**-24))).log()


def prompt_logprobs(logits: Tensor, next_ids: Tensor, top_n: int) -> LogProbs:
    """Log-probabilities of the tokens `next_ids` [n] that follow rows of raw logits [n, V] float32: row i has
    seen the prompt up to and without `next_ids[i]`."""
    return _logprobs(logits, next_ids, top_n)


def _logprobs(logits: Tensor, tokens: Tensor, top_n: int) -> LogProbs:
    parts = [_logprobs_of_part(logits[rows], tokens[rows], top_n) for rows in _parts(logits)]
    return LogProbs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _logprobs_of_part(logits: Tensor, tokens: Tensor, top_n: int) -> LogProbs:
    is_wrong = ~logits.amax(-1, keepdim=True).isfinite()
    logits = logits.masked_fill(is_wrong, 0.0)
    logprobs = logits.log_softmax(-1)
    tokens = tokens.unsqueeze(1)
    ranks = (logits >= logits.gather(1, tokens)).sum(-1)
    top_ids = _largest(logits, top_n)
    return LogProbs(logprobs.gather(1, tokens).squeeze(1), ranks, top_ids, logprobs.gather(1, top_ids))


def _largest(values: Tensor, count: int) -> Tensor:
    """The ids [n, count] of the largest of `values` [n, V], in order; the smaller id first among equals.

    `topk` leaves the order of equals open, so it gets keys without any: a float32's bits as an integer of the
    same order above, the id counted from the end below.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: one zero
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    last = values.shape[1] - 1
    keys = ordered.long() * 2**32 + (last - torch.arange(last + 1, device=values.device))
    return last - (keys.topk(count).values & 0xFFFFFFFF)
