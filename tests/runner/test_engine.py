"""The engine as its users see it: tokens, ends, errors, and what is left behind."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from dsv41.config import EngineConfig
from dsv41.runner.engine import Engine
from dsv41.runner.load import Model, blueprint, load
from dsv41.runner.request import SamplingParams

PAGE_TOKENS = 4
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
LENGTHS = (21, 1, 9, 2, 30, 16, 5)


def fresh_model() -> Model:
    return load(blueprint(preset_name="tiny", device="cpu", page_tokens=PAGE_TOKENS))


@cache
def model() -> Model:
    """Shared by the tests that leave the weights alone."""
    return fresh_model()


def engine(chosen: Model | None = None, **changes: int) -> Engine:
    numbers = {"max_requests": 8, "max_context_tokens": 48, "max_batch_tokens": 64} | changes
    return Engine(chosen or model(), EngineConfig(page_tokens=PAGE_TOKENS, **numbers))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(6, 500, (length,), generator=generator).tolist() for length in LENGTHS]


@cache
def solo(params: SamplingParams = GREEDY) -> list[list[int]]:
    """Every prompt in an engine of its own, one step for the prompt."""
    found = [engine(max_requests=1).generate([tokens], params)[0] for tokens in prompts()]
    assert len({tuple(tokens) for tokens in found}) == len(found), "equal answers hide a mix-up"
    return found


def assert_all_given_back(used: Engine) -> None:
    for pool in (used.global_pool, used.window_pool):
        pool.check_integrity()
        assert pool.num_free == pool.num_pages - 1
    assert not used.running
    assert sorted(used.free_slots) == list(range(used.engine.max_requests))


# -- tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"max_requests": 2}, {"max_batch_tokens": 7}])
def test_company_chunks_and_waiting_change_no_token(changes: dict[str, int]) -> None:
    """More prompts than slots, and a budget that cuts prompts: the same tokens as alone, and nothing is left
    behind. Catches a page handed out twice, a window pool too small for its budget, a prompt that is never
    served."""
    used = engine(**changes)
    for _ in range(2):  # the second time on pages that others have used
        assert used.generate(prompts(), GREEDY) == solo()
        assert_all_given_back(used)


def test_pools_are_sound_at_every_step() -> None:
    """Window pages below the window go back while a request runs, and come from the same pool later."""
    used = engine(max_requests=3, max_batch_tokens=5)
    ever_given_back = False
    for _ in used.stream(prompts(), GREEDY):
        used.global_pool.check_integrity()
        used.window_pool.check_integrity()
        held = [page for request in used.running for page in request.window_pages if page]
        assert len(held) == len(set(held)) == used.window_pool.num_pages - 1 - used.window_pool.num_free
        ever_given_back |= any(0 in request.window_pages for request in used.running)
    assert ever_given_back
    assert_all_given_back(used)


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_a_seed_gives_the_same_tokens_in_any_batch(top_p: float) -> None:
    """The noise depends on seed and position alone. Catches a generator shared by the batch."""
    params = replace(GREEDY, temperature=1.0, top_p=top_p, seed=11)
    assert engine(max_batch_tokens=9).generate(prompts(), params) == solo(params)
    assert engine(max_requests=3).generate(prompts()[::-1], params) == solo(params)[::-1]
    assert engine().generate(prompts(), replace(params, seed=12)) != solo(params) != solo()


# -- ends -------------------------------------------------------------------------------------------------


def test_eos_ends_a_request_alone() -> None:
    """The token is streamed, then the request is over; the others run on. `ignore_eos` runs through it."""
    stop = solo()[4][2]
    config = replace(model().config, eos_token=stop)
    stopping = replace(model(), blueprint=replace(model().blueprint, config=config))
    used = engine(stopping)
    events = list(used.stream(prompts(), replace(GREEDY, ignore_eos=False)))
    for number, expected in enumerate(solo()):
        mine = [event for event in events if event.prompt == number]
        length = expected.index(stop) + 1 if stop in expected else len(expected)
        assert [event.token for event in mine] == expected[:length]
        assert mine[-1].finish_reason == ("stop" if stop in expected else "length")
        assert all(event.finish_reason is None for event in mine[:-1])
    assert {event.finish_reason for event in events} == {None, "stop", "length"}
    assert_all_given_back(used)
    assert engine(stopping).generate(prompts(), GREEDY) == solo()


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], GREEDY, "empty"),
        ([5, 512], GREEDY, "512"),
        ([-1], GREEDY, "-1"),
        ([7] * 45, GREEDY, "48"),
        ([7], SamplingParams(max_tokens=48), "48"),
    ],
)
def test_a_prompt_that_cannot_run_changes_nothing(
    tokens: list[int], params: SamplingParams, message: str
) -> None:
    """One sentence with the number in it, and the running request does not notice."""
    used = engine()
    running = used.add(prompts()[0], GREEDY)
    used.step()
    before = (used.global_pool.num_free, used.window_pool.num_free, list(used.free_slots), list(used.running))
    with pytest.raises(ValueError, match=message):
        used.add(tokens, params)
    with pytest.raises(ValueError, match=message):
        used.generate([[7], tokens], params)
    assert before == (
        used.global_pool.num_free, used.window_pool.num_free, list(used.free_slots), list(used.running)
    )  # fmt: skip
    while used.running:
        used.step()
    assert running.output == solo()[0]


def test_longest_prompt_that_fits_runs() -> None:
    used = engine()
    assert len(used.generate([[7] * 44], GREEDY)[0]) == 4
    assert_all_given_back(used)


def test_one_request_too_many_is_refused() -> None:
    used = engine(max_requests=2)
    for tokens in prompts()[:2]:
        used.add(tokens, GREEDY)
    with pytest.raises(ValueError, match="max_requests"):
        used.add(prompts()[2], GREEDY)
    assert len(used.running) == 2


# -- faults -----------------------------------------------------------------------------------------------


def errors(used: Engine, tokens: list[list[int]]) -> tuple[list[list[int]], dict[int, str]]:
    """The tokens and the error of every prompt."""
    outputs: list[list[int]] = [[] for _ in tokens]
    found = {}
    for event in used.stream(tokens, GREEDY):
        if event.error is None:
            outputs[event.prompt].append(event.token)
        else:
            assert (event.token, event.finish_reason) == (-1, "error")
            found[event.prompt] = event.error
    return outputs, found


def test_a_nan_embedding_ends_its_request_alone() -> None:
    """One prompt holds a token whose row is NaN, mixed with all others in one step. The error names step and
    layer, the others get the tokens they get alone, and `generate` raises."""
    sick = fresh_model()
    victim = prompts()[4][20]
    assert not any(victim in tokens for tokens in prompts()[:4] + prompts()[5:] + solo())
    with torch.inference_mode():
        sick.decoder.embedding[victim] = torch.nan
    used = engine(sick, max_batch_tokens=128)
    outputs, found = errors(used, prompts())
    assert list(found) == [4]
    assert "step 1, layer 0" in found[4]
    assert outputs == [[] if number == 4 else tokens for number, tokens in enumerate(solo())]
    assert_all_given_back(used)
    with pytest.raises(RuntimeError, match=r"prompt 4: .*step"):
        used.generate(prompts(), GREEDY)


@pytest.mark.parametrize(("group", "layer"), [("states", 5), ("index_k", 7), ("window", 3)])
def test_a_nan_in_a_cache_ends_its_request_alone(group: str, layer: int) -> None:
    """NaN in the pages of one request, of one layer's cache, while it decodes: the error names that layer and
    step 3. Its pages then serve another request, which must not read what was left there."""
    used = engine(max_batch_tokens=128, max_requests=6)
    requests = [used.add(tokens, GREEDY) for tokens in prompts()[:6]]
    used.step()
    used.step()
    victim = requests[4]
    pages = victim.pages if group != "window" else [page for page in victim.window_pages if page]
    getattr(used.caches, group)[layer][pages] = torch.nan
    used.step()
    assert victim.finish_reason == "error"
    assert victim.error is not None
    assert f"step 3, layer {layer}" in victim.error
    assert victim.output == solo()[4][:2]
    late = used.add(prompts()[4], GREEDY)
    while used.running:
        used.step()
    for number, request in enumerate([*requests[:4], late, requests[5]]):
        assert request.output == solo()[number]
    assert_all_given_back(used)
