"""The sampler against a row-by-row reference in Python floats, and its draws against their distributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.runner import sampler as module
from dsv41.runner.request import SamplingParams
from dsv41.runner.sampler import Sampled, Sampler, gumbel_noise, prompt_logprobs

V, EOS = 40, 3
GREEDY = SamplingParams(max_tokens=64)
RANDOM = replace(GREEDY, temperature=1.0)


@dataclass
class Case:
    params: SamplingParams
    prompt: Sequence[int] = (5, 9, 9, 21)
    output: Sequence[int] = ()
    mask: Sequence[bool] | None = None


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tied_logits(rows: int, seed: int = 0) -> Tensor:
    """On a grid of 1/4: every row holds equal logits."""
    return (torch.randn(rows, V, generator=generator(seed)) * 8).round() / 4


def seated(cases: Sequence[Case], slots: Sequence[int] | None = None, vocab: int = V) -> Sampler:
    sampler = Sampler(len(cases) + 3, vocab, "cpu", EOS)
    for slot, case in zip(slots or range(len(cases)), cases, strict=True):
        sampler.admit(slot, case.params, case.prompt, case.output)
    return sampler


def sample(sampler: Sampler, logits: Tensor, slots: Sequence[int], cases: Sequence[Case]) -> Sampled:
    """One token for each of the cases; a row's position follows from its tokens."""
    prompts = torch.tensor([len(case.prompt) for case in cases])
    positions = prompts + torch.tensor([len(case.output) for case in cases])
    masks = None
    if any(case.mask is not None for case in cases):
        masks = torch.tensor([case.mask or [True] * logits.shape[1] for case in cases])
    active = [slot for slot in slots if slot >= 0]
    return sampler.sample(logits, torch.tensor(slots), positions, prompts, active, masks)


def sample_all(cases: Sequence[Case], logits: Tensor) -> Sampled:
    return sample(seated(cases), logits, range(len(cases)), cases)


def alone(case: Case, row: Sequence[float]) -> int:
    return int(sample_all([case], torch.tensor([row])).tokens)


# -- the reference ----------------------------------------------------------------------------------------


def reference_scores(row: Iterable[float], case: Case) -> list[float]:
    """Spec/runtime.md 6.8, one rule after the other."""
    params, x = case.params, [float(value) for value in row]
    for token in range(len(x)):
        if case.mask is not None and not case.mask[token]:
            x[token] = -math.inf
    for token in range(len(x)):
        x[token] += dict(params.logit_bias).get(token, 0.0)
        is_allowed = params.allowed_ids is None or token in params.allowed_ids
        is_early_end = len(case.output) < params.min_tokens and token in (EOS, *params.stop_ids)
        if not is_allowed or token in params.banned_ids or is_early_end:
            x[token] = -math.inf
    for token in range(len(x)):
        if token in case.prompt or token in case.output:
            penalty = params.repetition_penalty
            x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        x[token] -= params.frequency_penalty * list(case.output).count(token)
        x[token] -= params.presence_penalty * (token in case.output)
    best = max(x)
    if params.temperature == 0:
        return [value - best for value in x]
    return reference_cut([(value - best) / params.temperature for value in x], params)


def reference_cut(x: list[float], params: SamplingParams) -> list[float]:
    if params.min_p:
        x = [value if math.exp(value) >= params.min_p - 1e-7 else -math.inf for value in x]
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.top_k:
        for token in order[params.top_k :]:
            x[token] = -math.inf
    probability = softmax(x)
    before = 0.0
    for token in order:
        if before >= params.top_p and params.top_p < 1:
            x[token] = -math.inf
        before += probability[token]
    return x


def softmax(x: Sequence[float]) -> list[float]:
    weights = [math.exp(value - max(x)) for value in x]
    return [weight / sum(weights) for weight in weights]


def reference_noise(seed: int, position: int, token: int) -> float:
    def mixed(key: int, counter: int) -> int:
        bits = (key + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64
        bits = (bits ^ bits >> 33) * 0xFF51AFD7ED558CCD % 2**64
        bits = (bits ^ bits >> 33) * 0xC4CEB9FE1A85EC53 % 2**64
        return bits ^ bits >> 33

    bits = mixed(mixed(mixed(0, seed), position), token)
    return -math.log(-math.log1p(-((bits >> 12) + 0.5) / 2**52))


def assert_equal_scores(cases: Sequence[Case], logits: Tensor) -> None:
    """The scores of the steps, and the token that they and the noise decide."""
    sampler, result = seated(cases), sample_all(cases, logits)
    steps = frozenset().union(*(held.steps for held in sampler.admitted.values()))
    lengths = torch.tensor([len(case.output) for case in cases])
    if any(case.mask is not None for case in cases):
        allowed = torch.tensor([case.mask or [True] * V for case in cases])
        logits = logits.masked_fill(~allowed, -torch.inf)
    found = sampler.scores(logits, torch.arange(len(cases)), lengths, steps)
    found = found - found.amax(-1, keepdim=True)
    for row, (case, scores) in enumerate(zip(cases, found, strict=True)):
        expected = reference_scores(logits[row].tolist(), case)
        torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-5, atol=1e-5)
        if case.params.temperature:
            position = len(case.prompt) + len(case.output) - 1
            for token in range(V):
                expected[token] += reference_noise(case.params.seed, position, token)
        assert result.tokens[row] == expected.index(max(expected)), (row, case)


# -- every step, alone and with the others ----------------------------------------------------------------

OUTPUT = (7, 7, 7, 12, 30, 5)
STEPS: dict[str, list[Case]] = {
    "greedy": [Case(GREEDY)],
    "temperature": [Case(replace(RANDOM, temperature=t, seed=8)) for t in (0.3, 1.0, 2.5)],
    "top_k": [Case(replace(RANDOM, top_k=k, seed=1)) for k in (1, 2, 7, V, 10**6)],
    "top_p": [Case(replace(RANDOM, top_p=p, seed=2)) for p in (1e-9, 0.2, 0.5, 0.9, 0.999)],
    "min_p": [Case(replace(RANDOM, min_p=p, seed=3)) for p in (1e-3, 0.1, 0.5, 1.0)],
    "top_k and top_p": [
        Case(replace(RANDOM, top_k=6, top_p=0.7)),
        Case(replace(RANDOM, top_k=2, top_p=0.95)),
    ],
    "min_p and top_p": [Case(replace(RANDOM, min_p=0.2, top_p=0.8, temperature=2.0))],
    "bias": [Case(replace(p, logit_bias={4: 3.5, 11: -100.0, 39: 0.25})) for p in (GREEDY, RANDOM)],
    "allowed": [Case(replace(p, allowed_ids=(0, 17, 39))) for p in (GREEDY, RANDOM)],
    "banned": [Case(replace(p, banned_ids=tuple(range(0, V, 2)))) for p in (GREEDY, RANDOM)],
    "allowed, banned, biased": [
        Case(replace(GREEDY, allowed_ids=(1, 2), banned_ids=(2,), logit_bias={2: 99}))
    ],
    "min_tokens": [Case(replace(RANDOM, min_tokens=3, stop_ids=(1, 30)), output=(8,) * n) for n in range(5)],
    "repetition": [Case(replace(RANDOM, repetition_penalty=r), output=OUTPUT) for r in (0.5, 1.3, 4.0)],
    "presence": [Case(replace(RANDOM, presence_penalty=p), output=OUTPUT) for p in (-2.0, 0.7)],
    "frequency": [Case(replace(RANDOM, frequency_penalty=f), output=OUTPUT) for f in (-0.5, 1.5)],
    "penalties": [Case(replace(GREEDY, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3))],
    "mask": [Case(p, mask=[token % 3 == 1 for token in range(V)]) for p in (GREEDY, RANDOM)],
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_equals_the_reference(name: str) -> None:
    for seed in range(4):
        assert_equal_scores(STEPS[name], tied_logits(len(STEPS[name]), seed))


def random_case(seed: int) -> Case:
    source = generator(seed)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=source))]

    params = SamplingParams(
        max_tokens=64,
        temperature=pick(0.0, 0.5, 1.0, 1.7),
        top_k=pick(0, 0, 3, 20),
        top_p=pick(1.0, 1.0, 0.6, 0.95),
        min_p=pick(0.0, 0.0, 0.05),
        repetition_penalty=pick(1.0, 1.0, 1.5),
        presence_penalty=pick(0.0, 0.9),
        frequency_penalty=pick(0.0, 0.0, -0.3),
        logit_bias=pick((), {7: 4.0, 12: -4.0}),
        allowed_ids=pick(None, None, tuple(range(5, 35))),
        banned_ids=pick((), (7, 8)),
        min_tokens=pick(0, 0, 9),
        stop_ids=pick((), (20,)),
        seed=pick(0, 1, -1, 2**63 - 1, -(2**63)),
        logprobs=pick(None, 0, 4),
    )
    mask = pick(None, [token % 4 > 0 for token in range(V)])
    return Case(params, output=pick((), OUTPUT), mask=mask)


@pytest.mark.parametrize("logits_at_once", [1, 70 * V, 10**6])
def test_steps_combine_as_in_the_reference(logits_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows at once, one at a time, and in uneven parts."""
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", logits_at_once)
    cases = [random_case(seed) for seed in range(150)]
    assert_equal_scores(cases, tied_logits(len(cases)))


def test_a_row_is_the_same_in_any_batch_order_slot_and_padding() -> None:
    """Tokens and log-probabilities, bit for bit. A padded row counts nothing."""
    cases = [random_case(seed) for seed in range(24)]
    logits = torch.randn(len(cases), V, generator=generator()) * 3
    together = sample_all(cases, logits)
    order = torch.randperm(len(cases), generator=generator()).tolist()
    slots = [slot + 3 for slot in order]
    mixed = seated([cases[row] for row in order], slots)
    padded = sample(
        mixed,
        torch.cat((logits[order], torch.full((2, V), torch.nan))),
        [*slots, -1, -1],
        [*(cases[row] for row in order), Case(GREEDY), Case(GREEDY)],
    )
    assert torch.equal(padded.tokens[:-2], together.tokens[order])
    assert not padded.nan[:-2].any()
    assert mixed.counts is not None
    assert mixed.counts[:3].sum() == 0
    for row, case in enumerate(cases):
        single = sample_all([case], logits[row : row + 1])
        assert single.tokens[0] == together.tokens[row]
        if single.logprobs is not None and together.logprobs is not None:
            width = case.params.logprobs
            assert single.logprobs.chosen[0] == together.logprobs.chosen[row]
            assert torch.equal(single.logprobs.top_ids[0], together.logprobs.top_ids[row, :width])
            assert torch.equal(single.logprobs.top[0], together.logprobs.top[row, :width])


def test_penalties_follow_the_sampled_tokens() -> None:
    """The device counts what it samples: thirty steps, one request joining late, one preempted half-way."""
    penal = replace(RANDOM, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.8)
    cases = [Case(replace(penal, seed=seed), output=[]) for seed in (1, 2)]
    cases.append(Case(replace(GREEDY, frequency_penalty=2.0), output=[]))
    sampler = seated(cases)
    base = torch.randn(3, V, generator=generator(4)) * 2
    for step in range(30):
        live = [0, 1, 2] if step >= 5 else [0, 2]
        if step == 15:
            sampler.release(0)
            sampler.admit(0, GREEDY, (), ())
            sampler.release(0)
            sampler.admit(0, cases[0].params, cases[0].prompt, cases[0].output)
        logits = base.roll(step % 2, 0)[live]
        result = sample(sampler, logits, live, [cases[row] for row in live])
        for row, slot in enumerate(live):
            case, token = cases[slot], int(result.tokens[row])
            expected = sample_all([case], logits[row : row + 1])
            assert token == expected.tokens[0]
            assert_equal_scores([case], logits[row : row + 1])
            case.output = [*case.output, token]
    assert sampler.counts is not None
    for slot, case in enumerate(cases):
        assert sampler.counts[slot].tolist() == [list(case.output).count(token) for token in range(V)]


def test_a_slot_forgets_its_last_request() -> None:
    full = replace(
        RANDOM, logit_bias={1: 50.0}, banned_ids=(2,), min_tokens=5, presence_penalty=2.0, top_k=3, seed=4
    )
    sampler = seated([Case(full, output=OUTPUT)])
    assert sample(sampler, torch.zeros(1, V), [0], [Case(full, output=OUTPUT)]).tokens[0] == 1
    sampler.release(0)
    sampler.admit(0, RANDOM, (5,), ())
    sampler.admit(1, full, (5,), OUTPUT)  # makes every step run
    logits = torch.randn(2, V, generator=generator())
    found = sample(sampler, logits, [0, 1], [Case(RANDOM, (5,)), Case(full, (5,), OUTPUT)])
    assert found.tokens[0] == sample_all([Case(RANDOM, (5,))], logits[:1]).tokens[0]


# -- edges ------------------------------------------------------------------------------------------------


def test_equal_logits_give_the_smaller_id() -> None:
    flat = torch.zeros(1, V)
    for params in (
        GREEDY,
        replace(RANDOM, top_k=1),
        replace(RANDOM, top_p=1e-12),
        replace(RANDOM, top_p=0.02),
    ):
        assert sample_all([Case(params)], flat).tokens.tolist() == [0]
    for cut, count in ({"top_k": 5}, 5), ({"top_p": 0.5}, V // 2), ({"top_p": 0.25}, V // 4):
        assert kept_ids(replace(RANDOM, **cut), flat) == list(range(count))


def kept_ids(params: SamplingParams, logits: Tensor) -> list[int]:
    """In a batch where another row needs the cuts."""
    zero = torch.tensor([0])
    scores = seated([Case(params)]).scores(logits, zero, zero, frozenset({"draw", "min_p", "cut"}))
    return scores[0].isfinite().nonzero().flatten().tolist()


def test_a_row_that_asks_for_no_cut_keeps_its_tail() -> None:
    """The cut sees weights of 2**-40 and more; a row of top-p 1 beside it keeps the smaller ones too."""
    steep = torch.arange(V).mul(-2.0).unsqueeze(0)
    assert kept_ids(RANDOM, steep) == list(range(V))
    assert len(kept_ids(replace(RANDOM, top_p=1 - 1e-9), steep)) < 14


@pytest.mark.parametrize("size", [1.0, 1e30])
@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float, size: float) -> None:
    logits = torch.randn(5, V, generator=generator()) * size
    result = sample_all([Case(replace(RANDOM, temperature=temperature))] * 5, logits)
    assert torch.equal(result.tokens, logits.argmax(-1))
    assert not result.nan.any()


@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e300])
def test_a_huge_temperature_is_uniform_over_what_may_come(temperature: float) -> None:
    params = replace(RANDOM, temperature=temperature, banned_ids=tuple(range(8, V)))
    assert_follows(params, torch.linspace(-20, 20, V), [1 / 8] * 8 + [0.0] * (V - 8))


def test_rows_without_a_number_are_flagged_alone() -> None:
    """NaN (at a banned id too), +inf, an empty mask, and every token excluded by two rules together."""
    cases = [Case(replace(RANDOM, logprobs=2, frequency_penalty=0.1, seed=s)) for s in range(7)]
    cases[0] = Case(replace(cases[0].params, min_tokens=1))
    cases[3] = replace(cases[3], mask=[False] * V)
    cases[5] = Case(replace(GREEDY, allowed_ids=(1,)), mask=[token != 1 for token in range(V)])
    logits = torch.randn(7, V, generator=generator())
    clean = sample_all([replace(case, mask=None) for case in cases], logits)
    logits[0, EOS], logits[1], logits[6, 2] = torch.nan, torch.nan, torch.inf
    result = sample_all(cases, logits)
    assert result.nan.tolist() == [True, True, False, True, False, True, True]
    assert result.tokens[result.nan].tolist() == [0] * 5
    assert torch.equal(result.tokens[[2, 4]], clean.tokens[[2, 4]])
    assert result.logprobs is not None
    assert clean.logprobs is not None
    assert torch.equal(result.logprobs.chosen[[2, 4]], clean.logprobs.chosen[[2, 4]])
    assert result.logprobs.chosen.isfinite().all()
    assert result.logprobs.top.isfinite().all()
    greedy = sample_all([Case(GREEDY)] * 2, logits[1:3])
    assert (greedy.nan.tolist(), greedy.tokens[0]) == ([True, False], 0)


def test_the_logits_stay_as_they_are() -> None:
    cases = [random_case(seed) for seed in range(30)]
    logits = tied_logits(len(cases))
    before = logits.clone()
    sample_all(cases, logits)
    assert torch.equal(logits, before)


def test_no_rows_and_no_steps() -> None:
    cases = [Case(RANDOM)]
    nothing = torch.zeros(0, dtype=torch.int64)
    result = seated(cases).sample(torch.zeros(0, V), nothing, nothing, nothing, [0])
    assert result.tokens.shape == result.nan.shape == (0,)
    assert seated([Case(GREEDY)]).admitted[0].steps == frozenset()


def test_the_host_reads_nothing() -> None:
    """Meta tensors hold no values: any read of one raises."""
    cases = [random_case(seed) for seed in range(70)]
    sampler = Sampler(len(cases), V, "meta", EOS)
    for slot, case in enumerate(cases):
        sampler.admit(slot, case.params, case.prompt, case.output)
    rows = torch.zeros(len(cases), dtype=torch.int64, device="meta")
    masks = torch.zeros(len(cases), V, dtype=torch.bool, device="meta")
    logits = torch.zeros(len(cases), V, device="meta")
    result = sampler.sample(logits, rows, rows, rows, range(len(cases)), masks)
    assert result.tokens.shape == (len(cases),)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: synchronisation and graph capture")
def test_on_a_gpu_nothing_waits_and_a_graph_repeats_it() -> None:
    """The CPU's tokens; rows alone as together, bit for bit; a captured step draws what an eager one does."""
    vocab = 20_000
    cases = [replace(random_case(seed), mask=None) for seed in range(200)]
    host = torch.randn(len(cases), vocab, generator=generator()) * 3
    logits, slots = host.cuda(), torch.arange(len(cases)).cuda()
    prompts = torch.tensor([len(case.prompt) for case in cases]).cuda()
    positions = prompts + torch.tensor([len(case.output) for case in cases]).cuda()
    samplers = [Sampler(len(cases), vocab, "cuda", EOS) for _ in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for sampler in samplers:
            for slot, case in enumerate(cases):
                sampler.admit(slot, case.params, case.prompt, case.output)
        together = samplers[0].sample(logits, slots, positions, prompts, range(len(cases)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(
        together.tokens.cpu(), sample(seated(cases, vocab=vocab), host, slots.tolist(), cases).tokens
    )
    for row in range(len(cases)):
        one = slice(row, row + 1)
        single = samplers[1].sample(logits[one], slots[one], positions[one], prompts[one], [row])
        assert single.tokens[0] == together.tokens[row]
        if single.logprobs is not None and together.logprobs is not None:
            assert single.logprobs.chosen[0] == together.logprobs.chosen[row]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = samplers[2].sample(logits, slots, positions, prompts, range(len(cases)))
    graph.replay()
    assert torch.equal(captured.tokens, together.tokens)


def test_state_survives_inference_mode() -> None:
    """A table born in inference mode could not be written outside it."""
    params = replace(RANDOM, presence_penalty=1.0, banned_ids=(1,), min_tokens=2)
    with torch.inference_mode():
        sampler = seated([Case(params)])
    sample(sampler, torch.zeros(1, V), [0], [Case(params)])
    sampler.release(0)
    sampler.admit(0, params, (1,), ())


# -- log-probabilities ------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own() -> None:
    """Before temperature, bans and penalties. Ranks count ties; of equals the smaller id is first."""
    wanted = [0, 3, V]
    cases = [Case(replace(RANDOM, temperature=3.0, banned_ids=(0,), logprobs=n, seed=n)) for n in wanted]
    logits = tied_logits(3, seed=2)
    logits[:, 5], logits[:, 6] = 0.0, -0.0
    result = sample_all(cases, logits)
    assert result.logprobs is not None
    for row, values in enumerate(logits.tolist()):
        expected, token = [math.log(p) for p in softmax(values)], int(result.tokens[row])
        assert result.logprobs.chosen[row].item() == pytest.approx(expected[token], abs=1e-5)
        assert result.logprobs.ranks[row] == sum(value >= values[token] for value in values)
        order = sorted(range(V), key=lambda token, values=values: (-values[token], token))
        assert result.logprobs.top_ids[row].tolist() == order
        assert result.logprobs.top[row].tolist() == pytest.approx([expected[t] for t in order], abs=1e-5)


def test_logprobs_only_where_asked() -> None:
    assert sample_all([Case(GREEDY)], torch.zeros(1, V)).logprobs is None
    found = sample_all([Case(GREEDY), Case(replace(GREEDY, logprobs=0))], torch.zeros(2, V)).logprobs
    assert found is not None
    assert found.top_ids.shape == (2, 0)
    assert found.ranks.tolist() == [V, V]


def test_a_mask_bounds_the_logprobs() -> None:
    case = Case(replace(GREEDY, logprobs=2), mask=[token in (4, 9) for token in range(V)])
    found = sample_all([case], torch.zeros(1, V)).logprobs
    assert found is not None
    assert found.top_ids.tolist() == [[4, 9]]
    assert found.chosen.item() == pytest.approx(math.log(0.5))


@pytest.mark.parametrize("logits_at_once", [1, 4 * V, 10**6])
def test_prompt_logprobs(logits_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", logits_at_once)
    logits = torch.randn(6, V, generator=generator())
    following = torch.randint(V, (6,), generator=generator())
    found = prompt_logprobs(logits, following, 2)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(found.chosen.double(), expected[range(6), following], rtol=0, atol=1e-5)
    assert torch.equal(found.top_ids, logits.topk(2).indices)
    assert (found.ranks == 1).tolist() == (following == logits.argmax(-1)).tolist()


# -- distributions ----------------------------------------------------------------------------------------

DRAWS = 20_000


def chi_square(params: SamplingParams, row: Tensor, expected: Sequence[float]) -> tuple[float, float]:
    """The statistic of DRAWS draws at successive positions, and its bound at one chance in 100,000
    (Wilson and Hilferty)."""
    sampler = seated([Case(params)], vocab=len(row))
    zeros = torch.zeros(DRAWS, dtype=torch.int64)
    result = sampler.sample(row.expand(DRAWS, -1), zeros, torch.arange(DRAWS), zeros, [0])
    counts = result.tokens.bincount(minlength=len(row)).tolist()
    pairs = [(count, DRAWS * p) for count, p in zip(counts, expected, strict=True)]
    assert all(mean > 5 or count == mean == 0 for count, mean in pairs), pairs
    freedom = sum(mean > 0 for _, mean in pairs) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3
    return sum((count - mean) ** 2 / mean for count, mean in pairs if mean), bound


def assert_follows(params: SamplingParams, row: Tensor, expected: Sequence[float]) -> None:
    found, bound = chi_square(params, row, expected)
    assert found < bound


@pytest.mark.parametrize("seed", [0, 12345])
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"temperature": 2.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.15}],
    ids=str,
)
def test_draws_follow_their_distribution(settings: dict[str, Any], seed: int) -> None:
    params = replace(RANDOM, seed=seed, **settings)
    row = torch.randn(16, generator=generator(6))
    assert_follows(params, row, softmax(reference_scores(row.tolist(), Case(params, prompt=()))))


def test_the_chi_square_can_fail() -> None:
    """Negative control: a temperature wrong by a tenth."""
    row = torch.randn(16, generator=generator(6))
    expected = softmax(reference_scores(row.tolist(), Case(replace(RANDOM, temperature=1.1), prompt=())))
    found, bound = chi_square(RANDOM, row, expected)
    assert found > 2 * bound


# -- the noise --------------------------------------------------------------------------------------------

INTEGERS = (0, 1, -1, 17, 2**31, -(2**63), 2**63 - 1)


def test_noise_equals_its_definition() -> None:
    pairs = [(seed, position) for seed in INTEGERS for position in (0, 1, 70_000, 2**40)]
    found = gumbel_noise(*torch.tensor(pairs).T, torch.arange(V))
    expected = [[reference_noise(*pair, token) for token in range(V)] for pair in pairs]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_noise_is_finite_at_both_ends() -> None:
    """A float32 u rounds to 0 or 1 at the ends, which gave infinite noise."""
    found = module._gumbel(torch.tensor([0, 4095, 4096, -1, -4096, 2**63 - 1, -(2**63)]))
    assert found.isfinite().all()
    assert found.max().item() == pytest.approx(53 * math.log(2), rel=1e-6)
    assert found.min().item() == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)


def test_noise_is_uniform_under_its_distribution() -> None:
    """exp(-exp(-noise)) has the mean, the variance and the distribution (Kolmogorov-Smirnov) of U(0, 1)."""
    for seed in (0, 1, 2**62):
        noise = gumbel_noise(torch.full((500,), seed), torch.arange(500), torch.arange(400)).double()
        u = (-(-noise).exp()).exp().flatten().sort().values
        size = u.numel()
        assert abs(u.mean() - 1 / 2) < 4.5 * math.sqrt(1 / 12 / size)
        assert abs(u.var() - 1 / 12) < 4.5 * math.sqrt(1 / 180 / size)
        steps = torch.arange(size + 1, dtype=torch.float64) / size
        distance = max((u - steps[:-1]).max(), (steps[1:] - u).max())
        assert distance * math.sqrt(size) < 2.2  # one chance in 8,000


@pytest.mark.parametrize("step", [1, 2, 64])
def test_neighbours_are_uncorrelated(step: int) -> None:
    """Neighbouring seeds, positions and ids, and the diagonals between them."""
    side, ids = 40 + step, torch.arange(100 + step)
    grid = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    noise = gumbel_noise(grid[:, 0], grid[:, 1], ids).view(side, side, -1)
    core = noise[:40, :40, :100]
    for shift in [(a, b, c) for a in (0, step) for b in (0, step) for c in (0, step)][1:]:
        moved = noise[shift[0] :, shift[1] :, shift[2] :][:40, :40, :100]
        correlation = torch.stack((core.flatten(), moved.flatten())).double().corrcoef()[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(core.numel()), shift
    assert noise.unique().numel() > 0.9 * noise.numel()


# -- parameters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"seed": 2**63}, "64 bits"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 17}, "min_tokens is 17"),
        ({"logit_bias": {1: 101.0}}, r"\[-100, 100\]"),
        ({"logit_bias": {1: math.nan}}, r"\[-100, 100\]"),
        ({"logit_bias": ((1, 2.0), (1, 3.0))}, "names a token twice"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias .* at least 0"),
        ({"allowed_ids": ()}, "no token is left"),
        ({"allowed_ids": (1, 2), "banned_ids": (2, 1)}, "no token is left"),
        ({"allowed_ids": (1,), "stop_ids": (1,), "min_tokens": 1}, "min_tokens forbids"),
        ({"allowed_ids": (-4,)}, "allowed_ids .* at least 0"),
        ({"banned_ids": (-4,)}, "banned_ids .* at least 0"),
        ({"stop_ids": (-4,)}, "stop_ids .* at least 0"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"prompt_logprobs": -2}, "prompt_logprobs is -2"),
    ],
)
def test_a_wrong_parameter_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": {V: 1.0}}, "logit_bias: token id 40"),
        ({"allowed_ids": (V,)}, "allowed_ids: token id 40"),
        ({"banned_ids": (V + 1,)}, "banned_ids: token id 41"),
        ({"stop_ids": (1, V)}, "stop_ids: token id 40"),
        ({"logprobs": V + 1}, "logprobs is 41"),
        ({"prompt_logprobs": V + 1}, "prompt_logprobs is 41"),
        ({"banned_ids": range(V)}, "no token is left"),
    ],
)
def test_a_parameter_outside_the_vocabulary_is_named(settings: dict[str, Any], message: str) -> None:
    SamplingParams(**settings).validate_for(V + 2)
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings).validate_for(V)


def test_parameters_are_values() -> None:
    """Equal settings are equal and hash alike, however they were given."""
    given = SamplingParams(logit_bias={5: 1.0, 2: -1.0}, stop_ids=[1], allowed_ids=[2, 5], banned_ids=[3])
    stored = SamplingParams(
        logit_bias=((2, -1.0), (5, 1.0)), stop_ids=(1,), allowed_ids=(2, 5), banned_ids=(3,)
    )
    assert given == stored
    assert hash(given) == hash(replace(stored))
    hook: Callable[[Sequence[int]], Tensor] = lambda output: torch.ones(V, dtype=torch.bool)  # noqa: E731
    assert replace(given, token_mask=hook).token_mask is hook
