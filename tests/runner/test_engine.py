"""The engine as its users see it: tokens, ends, errors, and what is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import engines
import pytest
import torch
from engines import assert_all_given_back, full_logits, random_tokens
from golden import GOLDEN
from torch import Tensor

import dsv41
from dsv41.config import EngineConfig
from dsv41.runner.engine import LLM, Completion
from dsv41.runner.load import Model
from dsv41.runner.request import Request, SamplingParams

NAME = "short"
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
LENGTHS = (21, 1, 9, 2, 30, 16, 5)


def engine(chosen: Model | str = NAME, **changes: Any) -> LLM:
    return engines.engine(chosen, **changes)


def model() -> Model:
    return engines.model(NAME)


def fresh_model() -> Model:
    """Whose weights a test may spoil."""
    return engines.fresh_model(NAME)


@cache
def prompts() -> list[list[int]]:
    return [random_tokens(length, seed=100 + length) for length in LENGTHS]


def answers(completions: Sequence[Completion]) -> list[list[int]]:
    assert all(one.error is None for one in completions)
    return [list(one.tokens) for one in completions]


@cache
def solo(params: SamplingParams = GREEDY, name: str = NAME) -> list[list[int]]:
    """Every prompt in an engine of its own, one step for the prompt."""
    found = [answers(engine(name, max_requests=1).generate([tokens], params))[0] for tokens in prompts()]
    assert len({tuple(tokens) for tokens in found}) == len(found), "equal answers hide a mix-up"
    return found


def run_to_end(used: LLM) -> None:
    while used.has_work:
        used.step()


# -- tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_requests": 2},
        {"max_batch_tokens": 7, "asynchronous": True},
        {"max_batch_tokens": 13, "prefix_mode": "exact"},
        {"global_pages": 12, "window_pages": 12, "max_batch_tokens": 11},
        {"global_pages": 12, "window_pages": 12, "asynchronous": True, "prefix_mode": "exact"},
    ],
)
def test_company_chunks_and_waiting_change_no_token(changes: dict[str, Any]) -> None:
    """More prompts than slots, a budget that cuts prompts, pools that preempt: the same tokens as alone, and
    nothing is left behind. Catches a page handed out twice, a window pool too small for its budget, a prompt
    that is never served."""
    used = engine(**changes)
    for _ in range(2):  # the second time on pages that others have used
        assert answers(used.generate(prompts(), GREEDY)) == solo()
        assert_all_given_back(used)
    assert (used.metrics.preemptions > 0) == ("global_pages" in changes)
    if "global_pages" not in changes:  # small pools keep nothing
        assert (used.metrics.cached_tokens > 0) == ("prefix_mode" in changes)
    assert used.metrics.steps > 2 * (4 + ("max_batch_tokens" in changes) + ("max_requests" in changes))


@pytest.mark.parametrize(("name", "asynchronous"), [("tiny", False), ("odd", True)])
def test_other_models_give_the_same_tokens_in_company(name: str, asynchronous: bool) -> None:
    """All of `tiny`, and `odd`, which shares no number with it: its first layer owns states, its window is
    12."""
    used = engine(name, max_batch_tokens=19, max_requests=5, asynchronous=asynchronous)
    assert answers(used.generate(prompts(), GREEDY)) == solo(GREEDY, name)
    assert_all_given_back(used)


def test_pools_are_sound_at_every_step() -> None:
    """Window pages below the window go back while a request runs, and come from the same pool later."""
    used = engine(max_requests=3, max_batch_tokens=5)
    ever_given_back = False
    for _ in used.stream(prompts(), GREEDY):
        used.scheduler.check_integrity()
        tables = [request.pages for request in used.scheduler.running]
        held = [page for table in tables for page in table.window_pages if page]
        assert len(held) == len(set(held)) == used.scheduler.prefix.window_pool.num_used
        ever_given_back |= any(0 in table.window_pages for table in tables)
    assert ever_given_back
    assert_all_given_back(used)


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_a_seed_gives_the_same_tokens_in_any_batch(top_p: float) -> None:
    """The noise depends on seed and position alone. Catches a generator shared by the batch."""
    params = replace(GREEDY, temperature=1.0, top_p=top_p, seed=11)
    assert answers(engine(max_batch_tokens=9).generate(prompts(), params)) == solo(params)
    assert answers(engine(max_requests=3).generate(prompts()[::-1], params)) == solo(params)[::-1]
    assert answers(engine().generate(prompts(), replace(params, seed=12))) != solo(params) != solo()


def test_every_prompt_has_its_own_params() -> None:
    """Greedy, drawn, cut and longer answers in one batch: each as alone."""
    every = [
        GREEDY,
        replace(GREEDY, temperature=0.8, seed=3),
        replace(GREEDY, max_tokens=7),
        replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5),
        replace(GREEDY, temperature=1.0, top_k=3),
        replace(GREEDY, logit_bias={7: 90.0}),
        replace(GREEDY, max_tokens=1, banned_ids=(solo()[6][0],)),
    ]
    found = answers(engine().generate(prompts(), every))
    alone = [
        answers(engine(max_requests=1).generate([tokens], params))[0]
        for tokens, params in zip(prompts(), every, strict=True)
    ]
    assert found == alone
    assert [len(tokens) for tokens in found] == [4, 4, 7, 4, 4, 4, 1]
    assert found[0] == solo()[0]
    assert found[5] == [7] * 4
    assert found[6] != solo()[6][:1]


def test_steps_by_hand_stream_and_generate_agree() -> None:
    """`add`/`step` deliver every token once and in order, with the last event of a request marked."""
    used = engine(max_requests=3)
    requests = [used.add(tokens, GREEDY) for tokens in prompts()]
    assert used.metrics.waiting == len(prompts())
    seen: dict[Request, list[int]] = {request: [] for request in requests}
    while used.has_work:
        for event in used.step():
            assert event.request.finish_reason is None or event.finish_reason is not None
            seen[event.request].append(event.result.token)
            assert seen[event.request] == event.request.output
    assert list(seen.values()) == solo()
    streamed: list[list[int]] = [[] for _ in prompts()]
    for number, event in engine().stream(prompts(), GREEDY):
        streamed[number].append(event.result.token)
    assert streamed == solo()


def test_a_stream_left_early_aborts_its_requests_only() -> None:
    used = engine()
    other = used.add(prompts()[2], GREEDY)
    stream = used.stream(prompts()[:2], GREEDY)
    next(stream)
    stream.close()
    assert list(used.scheduler.requests) == [other]
    run_to_end(used)
    assert other.output == solo()[2]
    assert_all_given_back(used)


def test_an_aborted_request_leaves_at_once_and_the_others_go_on() -> None:
    """Waiting, in mid-prefill, decoding, and twice."""
    for steps in range(5):
        for asynchronous in (False, True):
            used = engine(max_batch_tokens=12, max_requests=3, asynchronous=asynchronous)
            requests = [used.add(tokens, GREEDY) for tokens in prompts()[:4]]
            for _ in range(steps):
                used.step()
            victim = requests[steps % 4]
            length = len(victim.output)
            used.abort(victim)
            used.abort(victim)
            run_to_end(used)
            assert (victim.finish_reason, len(victim.output)) == ("abort", length)
            for number, request in enumerate(requests):
                if request is not victim:
                    assert request.output == solo()[number]
            assert_all_given_back(used)


def test_leaving_the_context_ends_every_request() -> None:
    with engine(asynchronous=True, max_requests=2) as used:
        requests = [used.add(tokens, GREEDY) for tokens in prompts()]
        for _ in range(2):
            used.step()
    assert {request.finish_reason for request in requests} == {"abort"}
    assert_all_given_back(used)

    def fails(into: list[LLM]) -> None:
        with engine() as used:
            into.append(used)
            used.add(prompts()[0], GREEDY)
            used.step()
            raise KeyError("a fault of the caller")

    used_once: list[LLM] = []
    with pytest.raises(KeyError, match="caller"):
        fails(used_once)
    assert_all_given_back(used_once[0])


def test_metrics_count_steps_hits_and_requests() -> None:
    used = engine(prefix_mode="exact", max_requests=2)
    requests = [used.add(prompts()[0], replace(GREEDY, max_tokens=2)) for _ in range(3)]
    assert (used.metrics.running, used.metrics.waiting, used.metrics.steps) == (0, 3, 0)
    used.step()
    assert (used.metrics.running, used.metrics.waiting, used.metrics.steps) == (2, 1, 1)
    run_to_end(used)
    assert used.metrics == replace(
        used.metrics,
        steps=4,
        preemptions=0,
        looked_up_tokens=63,
        cached_tokens=20,
        running=0,
        waiting=0,
    )
    assert [request.num_cached for request in requests] == [0, 0, 20]


# -- text --------------------------------------------------------------------------------------------------


def test_text_goes_through_the_checkpoint_s_tokenizer() -> None:
    used = dsv41.LLM(str(GOLDEN / "tiny" / "model"), EngineConfig(max_requests=2, max_context_tokens=256))
    tokenizer = used.model.tokenizer
    assert tokenizer is not None
    text, other = "Hello world, this is a test.", "ok"
    by_text = used.generate([text, other], GREEDY)
    by_ids = used.generate([tokenizer.encode(text), tokenizer.encode(other)], GREEDY)
    assert [one.tokens for one in by_text] == [one.tokens for one in by_ids]
    assert by_text[0].prompt == tuple(tokenizer.encode(text))
    assert by_text[0].prompt[0] == tokenizer.bos
    assert [one.text for one in by_text] == [tokenizer.decode(list(one.tokens)) for one in by_text]
    assert by_text[0].text != by_text[1].text
    assert_all_given_back(used)


def test_text_without_a_tokenizer_is_refused() -> None:
    used = engine()
    with pytest.raises(ValueError, match="tiny has no tokenizer"):
        used.generate(["Hello"], GREEDY)
    assert used.generate([prompts()[1]], GREEDY)[0].text is None
    assert_all_given_back(used)


# -- log-probabilities -------------------------------------------------------------------------------------


def assert_logprob(logits: Tensor, token: int, logprob: float | None, rank: int | None) -> None:
    expected = logits.double().log_softmax(-1)[token].item()
    assert logprob == pytest.approx(expected, abs=1e-4)
    assert rank == 1 + int((logits > logits[token]).sum())


def assert_top(logits: Tensor, top: Sequence[tuple[int, float]], count: int) -> None:
    values, ids = logits.double().log_softmax(-1).topk(count)
    assert [token for token, _ in top] == ids.tolist()
    assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_log_probabilities_are_those_of_a_full_forward(asynchronous: bool) -> None:
    """Sampled and best tokens beside requests that want none, or only the sampled one."""
    params = [replace(GREEDY, logprobs=count, temperature=1.0) for count in (3, 0, 5)] + [GREEDY] * 4
    used = engine(max_batch_tokens=17, asynchronous=asynchronous)
    completions = used.generate(prompts(), params)
    ranks = set()
    for one, own in zip(completions, params, strict=True):
        logits = full_logits(model(), one.prompt + one.tokens[:-1])[len(one.prompt) - 1 :]
        assert [result.token for result in one.results] == list(one.tokens)
        for row, result in zip(logits, one.results, strict=True):
            if own.logprobs is None:
                assert (result.logprob, result.rank, result.top_logprobs) == (None, None, ())
                assert result.token == int(row.argmax())
            else:
                assert_logprob(row, result.token, result.logprob, result.rank)
                assert_top(row, result.top_logprobs, own.logprobs)
                ranks.add(result.rank)
    assert len(ranks) > 3, "only likely tokens were drawn"


def assert_prompt_logprobs(one: Completion, count: int) -> None:
    logits = full_logits(model(), one.prompt)
    assert [entry.token for entry in one.prompt_logprobs] == list(one.prompt[1:])
    for row, entry in zip(logits, one.prompt_logprobs, strict=False):
        assert_logprob(row, entry.token, entry.logprob, entry.rank)
        assert_top(row, entry.top, count)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_batch_tokens": 7, "asynchronous": True},
        {"decoder_replay": True, "max_batch_tokens": 17},
    ],
)
def test_prompt_log_probabilities_are_those_of_a_full_forward(changes: dict[str, Any]) -> None:
    """Every prompt token but the first, once, whatever the chunks; replay is off for such a request."""
    params = [replace(GREEDY, prompt_logprobs=2)] * 4 + [GREEDY, replace(GREEDY, prompt_logprobs=0), GREEDY]
    completions = engine(**changes).generate(prompts(), params)
    for number, (one, own) in enumerate(zip(completions, params, strict=True)):
        if own.prompt_logprobs is None:
            assert one.prompt_logprobs == ()
        else:
            assert_prompt_logprobs(one, own.prompt_logprobs)
            assert list(one.tokens) == solo()[number]


@pytest.mark.parametrize("mode", ["exact", "bounded"])
def test_prompt_log_probabilities_are_whole_after_a_hit(mode: str) -> None:
    """Cached tokens have no logits: a request that wants their log-probabilities must compute them."""
    used = engine(prefix_mode=mode)
    used.generate([prompts()[0]], GREEDY)
    assert used.generate([prompts()[0]], GREEDY)[0].num_cached > 0
    one = used.generate([prompts()[0]], replace(GREEDY, prompt_logprobs=1))[0]
    assert_prompt_logprobs(one, 1)
    assert list(one.tokens) == solo()[0]


def test_prompt_log_probabilities_come_once_when_preempted() -> None:
    """A request computes its prompt again after a preemption; its caller must not get them twice."""
    params = replace(GREEDY, max_tokens=12, prompt_logprobs=1)
    used = engine(global_pages=11, window_pages=11)
    completions = used.generate(prompts()[:4], params)
    assert used.metrics.preemptions > 0
    for one in completions:
        assert_prompt_logprobs(one, 1)


# -- masks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_token_mask_sees_every_token_so_far(asynchronous: bool) -> None:
    """Only the masked request is bound: its tokens count up, which needs each token before the next mask."""
    seen: list[tuple[int, ...]] = []

    def next_one(output: Sequence[int]) -> Tensor:
        seen.append(tuple(output))
        mask = torch.zeros(model().config.vocab_size, dtype=torch.bool)
        mask[50 + len(output) : 52 + len(output)] = True
        mask[output[-1] if output else 0] = False
        return mask

    params = [replace(GREEDY, token_mask=next_one), *[GREEDY] * 3]
    used = engine(asynchronous=asynchronous)
    found = answers(used.generate(prompts()[:4], params))
    assert found[1:] == solo()[1:4]
    mine = found[0]
    assert all(token in (50 + n, 51 + n) for n, token in enumerate(mine))
    assert all(first != second for first, second in pairwise(mine))
    assert {tuple(mine[:n]) for n in range(4)} <= set(seen)
    assert {output for output in seen if output} <= {tuple(mine[:n]) for n in range(1, 5)}
    assert_all_given_back(used)


def test_a_mask_that_allows_nothing_ends_its_request_alone() -> None:
    params = replace(
        GREEDY, token_mask=lambda output: torch.zeros(model().config.vocab_size, dtype=torch.bool)
    )
    one, other = engine().generate(prompts()[:2], [params, GREEDY])
    assert (one.finish_reason, one.tokens) == ("error", ())
    assert one.error is not None
    assert "step 1, the logits" in one.error
    assert list(other.tokens) == solo()[1]


# -- ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_eos_ends_a_request_alone(asynchronous: bool) -> None:
    """The token is streamed, then the request is over; the others run on. `ignore_eos` runs through it."""
    stop = solo()[4][2]
    config = replace(model().config, eos_token=stop)
    stopping = replace(model(), blueprint=replace(model().blueprint, config=config))
    used = engine(stopping, asynchronous=asynchronous)
    events = list(used.stream(prompts(), replace(GREEDY, ignore_eos=False)))
    for number, expected in enumerate(solo()):
        mine = [event for prompt, event in events if prompt == number]
        length = expected.index(stop) + 1 if stop in expected else len(expected)
        assert [event.result.token for event in mine] == expected[:length]
        assert mine[-1].finish_reason == ("stop" if stop in expected else "length")
        assert all(event.finish_reason is None for event in mine[:-1])
    assert {event.finish_reason for _, event in events} == {None, "stop", "length"}
    assert_all_given_back(used)
    assert answers(engine(stopping).generate(prompts(), GREEDY)) == solo()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stop_ids_and_min_tokens(asynchronous: bool) -> None:
    """A stop id ends the answer behind it; with `min_tokens` it cannot come before."""
    stop = solo()[0][1]
    params = replace(GREEDY, max_tokens=6, stop_ids=(stop,))
    used = engine(asynchronous=asynchronous)
    stopped = used.generate(prompts()[:1], params)[0]
    assert (list(stopped.tokens), stopped.finish_reason) == (solo()[0][:2], "stop")
    later = used.generate(prompts()[:1], replace(params, min_tokens=4))[0]
    assert len(later.tokens) >= 4
    assert later.tokens[0] == solo()[0][0]
    assert stop not in later.tokens[:4]
    assert_all_given_back(used)
    forced = replace(params, allowed_ids=(stop, 99), logit_bias={stop: 90.0})
    assert used.generate(prompts()[:1], replace(forced, min_tokens=3))[0].tokens == (99, 99, 99, stop)


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], GREEDY, "empty"),
        ([5, 512], GREEDY, "512"),
        ([-1], GREEDY, "-1"),
        ([7] * 45, GREEDY, "48"),
        ([7], SamplingParams(max_tokens=48), "48"),
        ([7], replace(GREEDY, stop_ids=(512,)), "stop_ids.*512"),
        ([7], replace(GREEDY, logprobs=513), "513"),
        ([7] * 30, GREEDY, "9 pages.*8"),
    ],
)
def test_a_prompt_that_cannot_run_changes_nothing(
    tokens: list[int], params: SamplingParams, message: str
) -> None:
    """One sentence with the number in it, and the running request does not notice."""
    used = engine(global_pages=8)
    running = used.add(prompts()[0], GREEDY)
    used.step()

    def state() -> list[object]:
        pools = used.scheduler.prefix.global_pool, used.scheduler.prefix.window_pool
        scheduler = used.scheduler
        return [
            *(pool.num_free for pool in pools),
            list(scheduler.running),
            list(scheduler.waiting),
            list(scheduler.requests),
        ]

    before = state()
    with pytest.raises(ValueError, match=message):
        used.add(tokens, params)
    with pytest.raises(ValueError, match=message):
        used.generate([[7], tokens], [GREEDY, params])
    assert before == state()
    run_to_end(used)
    assert running.output == solo()[0]
    assert_all_given_back(used)


def test_longest_prompt_that_fits_runs() -> None:
    used = engine()
    assert len(used.generate([[7] * 44], GREEDY)[0].tokens) == 4
    assert_all_given_back(used)


def test_a_model_of_another_page_size_is_refused() -> None:
    with pytest.raises(ValueError, match="4 tokens, the engine 8"):
        LLM(model(), EngineConfig(page_tokens=8))


def test_a_model_that_was_not_loaded_deterministic_is_refused() -> None:
    with pytest.raises(ValueError, match="was not loaded so"):
        engine(deterministic=True)


def test_rows_of_an_image_need_both_halves() -> None:
    """One without the other would be dropped in silence: the prompt would run as text."""
    used, length = engine(), len(prompts()[2])
    rows = torch.zeros(length, model().config.hidden_size)
    for half in ({"image_rows": [True] * length}, {"embeddings": rows}):
        with pytest.raises(ValueError, match="image_rows and embeddings"):
            used.add(prompts()[2], GREEDY, **half)
    with pytest.raises(ValueError, match="one entry for every prompt token"):
        used.add(prompts()[2], GREEDY, image_rows=[True], embeddings=rows)
    assert_all_given_back(used)


def test_other_image_rows_share_no_page() -> None:
    """Equal ids and equal embeddings, but other positions that take them: other states."""
    length, size = len(prompts()[0]), model().config.hidden_size
    rows = torch.randn(length, size, generator=torch.Generator().manual_seed(1))
    spans = [[start <= p < start + 5 for p in range(length)] for start in (2, 9)]
    cold = []
    for span in spans:
        request = (alone := engine()).add(prompts()[0], GREEDY, image_rows=span, embeddings=rows)
        run_to_end(alone)
        cold.append(request.output)
    assert cold[0] != cold[1]
    used = engine(prefix_mode="exact")
    for span, expected in [*zip(spans, cold, strict=True), (spans[0], cold[0])]:
        request = used.add(prompts()[0], GREEDY, image_rows=span, embeddings=rows)
        run_to_end(used)
        assert request.output == expected
    assert request.num_cached > 0


# -- faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("budget", "step"), [(128, 1), (6, None)])
def test_a_nan_embedding_ends_its_request_alone(asynchronous: bool, budget: int, step: int | None) -> None:
    """One prompt holds a token whose row is NaN, mixed with all others in one step or met in mid-prefill. The
    error names step and layer, the others get the tokens they get alone."""
    sick = fresh_model()
    victim = prompts()[4][20]
    assert not any(victim in tokens for tokens in prompts()[:4] + prompts()[5:] + solo())
    with torch.inference_mode():
        sick.decoder.embedding[victim] = torch.nan
    used = engine(sick, max_batch_tokens=budget, asynchronous=asynchronous)
    completions = used.generate(prompts(), GREEDY)
    for number, one in enumerate(completions):
        if number != 4:
            assert (one.error, list(one.tokens)) == (None, solo()[number])
    bad = completions[4]
    assert (bad.tokens, bad.finish_reason) == ((), "error")
    assert bad.error is not None
    assert "layer 0" in bad.error
    if step is not None:
        assert f"step {step}, layer 0" in bad.error
    assert_all_given_back(used)


def test_a_fault_in_mid_prefill_ends_the_request_in_that_step() -> None:
    sick = fresh_model()
    with torch.inference_mode():
        sick.decoder.embedding[prompts()[4][20]] = torch.nan
    used = engine(sick, max_batch_tokens=6)
    request = used.add(prompts()[4], GREEDY)
    run_to_end(used)
    assert used.metrics.steps == 4, "rows 18 to 23 belong to the fourth step"
    assert request.error is not None
    assert "step 4, layer 0" in request.error


def test_pages_of_a_faulty_request_are_not_reused_as_a_prefix() -> None:
    """The NaN stands behind two full pages that were registered: a second try computes everything."""
    sick = fresh_model()
    with torch.inference_mode():
        sick.decoder.embedding[prompts()[4][20]] = torch.nan
    used = engine(sick, max_batch_tokens=6, prefix_mode="exact")
    for _ in range(2):
        one = used.generate([prompts()[4]], GREEDY)[0]
        assert (one.finish_reason, one.num_cached) == ("error", 0)
    assert used.scheduler.prefix.global_pool.num_cached == 0
    assert_all_given_back(used)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("group", "layer"), [("states", 1), ("index_k", 3), ("window", 2)])
def test_a_nan_in_a_cache_ends_its_request_alone(group: str, layer: int, asynchronous: bool) -> None:
    """NaN in the pages of one request, of one layer's cache, while it decodes: the error names that layer and
    step 3. Its pages then serve another request, which must not read what was left there."""
    used = engine(max_batch_tokens=128, max_requests=6, asynchronous=asynchronous)
    requests = [used.add(tokens, GREEDY) for tokens in prompts()[:6]]
    used.step()
    used.step()
    victim = requests[4]
    table = victim.pages
    assert table is not None
    pages = table.global_pages if group != "window" else [page for page in table.window_pages if page]
    getattr(used.caches, group)[layer][pages] = torch.nan
    used.step()
    if asynchronous:
        used.step()
    assert victim.finish_reason == "error"
    assert victim.error is not None
    assert f"step 3, layer {layer}" in victim.error
    assert victim.output == solo()[4][:2]
    late = used.add(prompts()[4], GREEDY)
    run_to_end(used)
    for number, request in enumerate([*requests[:4], late, requests[5]]):
        assert request.output == solo()[number]
    assert_all_given_back(used)
