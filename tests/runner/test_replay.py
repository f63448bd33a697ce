"""Prefix reuse, bounded replay of the window, decoder replay: each against a statement of its rule that
shares no code with the runner.

Measured here, as the largest difference over the largest logit: bounded hits up to 0.14 from the cold run,
decoder replay up to 0.08 from the full pass, on random weights and a window of 8. Both are 0 where the
rule cuts nothing.

P prompt tokens, W window, H tokens of a hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from engines import (
    PAGE,
    NoModel,
    Spy,
    assert_all_given_back,
    engine,
    full_logits,
    model,
    random_tokens,
)
from torch import Tensor

from dsv41.config import EngineConfig
from dsv41.model.attention import Shared
from dsv41.model.caches import KVCaches, allocate_caches
from dsv41.model.decoder import Flow, Stack
from dsv41.model.inputs import AttnMetadata, Selection, StepInputs
from dsv41.model.layout import OPEN_ROWS
from dsv41.runner.engine import LLM
from dsv41.runner.load import Model
from dsv41.runner.request import Request, SamplingParams
from dsv41.runner.schedule import NewRequest, SchedulerOutput
from dsv41.runner.worker import Worker

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
ONE = SamplingParams(max_tokens=1, ignore_eos=True)
LENGTH = 45  # tokens of the longest context here


def run_to_end(used: LLM) -> None:
    while used.has_work:
        used.step()


def answer(used: LLM, tokens: Sequence[int], params: SamplingParams = GREEDY) -> Request:
    request = used.add(tokens, params)
    run_to_end(used)
    assert request.error is None
    return request


def drift(ours: Tensor, other: Tensor) -> float:
    return float((ours - other).abs().max() / other.abs().max())


# -- the rules, stated again -------------------------------------------------------------------------------


def hand_step(
    chosen: Model, tokens: Sequence[int], first: int, last: int, *, hit: int = 0, oldest: int = 0
) -> StepInputs:
    """Rows [first, last) of one request whose page i is i + 1 in both groups. No state below `hit` is
    written; no row sees the window below `oldest`. Plain Python, a row at a time."""
    config = chosen.config
    window, depth = config.window_tokens, max(config.engram.max_ngram - 1, 1)
    ratios = sorted({ratio for ratio in config.ratios if ratio})
    rows = range(first, last)
    seen = [list(range(max(0, oldest, p - window + 1), p + 1)) for p in rows]
    pages = -(-LENGTH // PAGE)
    return StepInputs(
        token_ids=torch.tensor([tokens[p] for p in rows]),
        positions=torch.tensor(list(rows)),
        is_image=torch.zeros(len(rows), dtype=torch.bool),
        lookback=torch.tensor([[tokens[p - n] if p >= n else -1 for n in range(1, depth + 1)] for p in rows]),
        attention=AttnMetadata(
            row_request=torch.zeros(len(rows), dtype=torch.int32),
            page_table=torch.arange(1, pages + 1, dtype=torch.int32).unsqueeze(0),
            window_write=torch.tensor([p + PAGE for p in rows]),
            window_read=torch.tensor(
                [[q + PAGE for q in one] + [-1] * (window - len(one)) for one in seen], dtype=torch.int32
            ),
            state_write={
                r: torch.tensor([(p + PAGE) // r if (p + 1) % r == 0 and p >= hit else -1 for p in rows])
                for r in ratios
            },
            num_states={r: torch.tensor([(p + 1) // r for p in rows], dtype=torch.int32) for r in ratios},
            partner_row=torch.tensor([p - first - 1 if p % 2 and p > first else -1 for p in rows]),
            partner_slot=torch.tensor(
                [(p - 1) % OPEN_ROWS if p % 2 and p == first and p > oldest else -1 for p in rows]
            ),
            open_slot=torch.tensor([p % OPEN_ROWS if p % 2 == 0 and p == last - 1 else -1 for p in rows]),
        ),
    )


def own_caches(chosen: Model) -> KVCaches:
    pages = 1 + -(-LENGTH // PAGE)
    return allocate_caches(chosen.layout, pages, pages, 1, "cpu")


def take_rows(stack: Stack, keep: slice) -> Stack:
    shared = stack.shared
    selection = shared.selection
    assert selection is not None
    own = Shared(
        Selection(selection.states[keep], selection.slots[keep]), shared.candidates[keep], shared.faulty[keep]
    )
    flow = Flow(stack.flow.streams[keep], stack.flow.mix[keep], stack.flow.sound[keep])
    return replace(stack, flow=flow, shared=own, fault=stack.fault[keep])


@torch.inference_mode()
def by_the_rule(
    chosen: Model,
    tokens: Sequence[int],
    *,
    hit: int = 0,
    tail_start: int = 0,
) -> tuple[Tensor, KVCaches]:
    """The logits of the last row, and the caches.

    With a hit: the first `hit` tokens went by in another run, whole. Then the rows from max(0, hit - W) on,
    which see no older window row and write no state below `hit`. With a tail: every row goes through the last
    KV source and sees the whole window there; the rows from `tail_start` on go through the rest, where the
    window begins at `tail_start`.
    """
    decoder, caches, end = chosen.decoder, own_caches(chosen), len(tokens)
    start = max(0, hit - chosen.config.window_tokens)
    if hit:
        decoder(hand_step(chosen, tokens, 0, hit), caches)
        for cache_ in caches.window.values():
            cache_.fill_(torch.nan)
    step = hand_step(chosen, tokens, start, end, hit=hit, oldest=start)
    cut = decoder.last_kv_source + 1 if tail_start else len(chosen.plan)
    stack = decoder.run_layers(0, cut, decoder.start(step), step, caches)
    if tail_start:
        low = max(start, tail_start)
        tail = hand_step(chosen, tokens, low, end, hit=end, oldest=low)
        stack = decoder.run_layers(
            cut, len(chosen.plan), take_rows(stack, slice(low - start, None)), tail, caches
        )
    return decoder.logits(decoder.finish(stack, stack.fault_layer).hidden[-1:])[0], caches


def test_the_statement_without_a_hit_and_a_tail_is_the_full_pass() -> None:
    tokens = random_tokens(29, 1)
    logits, _ = by_the_rule(model("short"), tokens)
    assert torch.equal(logits, full_logits(model("short"), tokens)[-1])


# -- exact -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("mode", ["exact", "bounded"])
def test_the_same_prompt_three_times(mode: str, asynchronous: bool) -> None:
    """Another request in between; the second and third come from the cache, and agree."""
    used = engine("short", prefix_mode=mode, asynchronous=asynchronous)
    tokens, other = random_tokens(30, 2), random_tokens(19, 3)
    first, between, second, third = (answer(used, one) for one in (tokens, other, tokens, tokens))
    assert [first.num_cached, between.num_cached, second.num_cached, third.num_cached] == [0, 0, 28, 28]
    cold = answer(engine("short"), tokens)
    assert first.output == cold.output
    assert third.output == second.output
    if mode == "exact":
        assert second.output == cold.output
    assert used.metrics.cached_tokens == 56
    assert used.metrics.looked_up_tokens == 109
    assert_all_given_back(used)


@pytest.mark.parametrize("budget", [64, 5])
@pytest.mark.parametrize("name", ["short", "odd"])
def test_exact_hits_of_every_length_are_cold_runs_bit_for_bit(name: str, budget: int) -> None:
    """A cached prompt and its beginnings, each with another end: the logits of the first token are equal to
    the cold run's, and so is every later token. Window pages of the hit are shared and keep their bytes."""
    chosen, base, hits = model(name), random_tokens(37, 4), set()
    for shared in range(1, 37, 3 if (name, budget) == ("short", 64) else 9):
        spy = Spy(chosen)
        used = engine(name, run=spy, prefix_mode="exact", max_batch_tokens=budget)
        answer(used, base, ONE)
        kept = [
            (tensor, tensor.clone())
            for group in (used.caches.states, used.caches.index_k, used.caches.window)
            for tensor in group.values()
        ]
        prefix = used.scheduler.prefix
        cached = [sorted(pool._key_of) for pool in (prefix.global_pool, prefix.window_pool)]
        tokens = base[:shared] + random_tokens(shared % 6 + 1, 1000 + shared)
        spy.calls.clear()
        request = used.add(tokens, GREEDY)
        while not request.output and request.error is None:
            used.step()
        assert torch.equal(spy.logits(), full_logits(chosen, tokens)[-1])
        run_to_end(used)
        assert request.output == answer(engine(name), tokens).output
        assert request.num_cached == shared // PAGE * PAGE - (
            0 if len(tokens) > shared // PAGE * PAGE else PAGE
        )
        for index, (tensor, before) in enumerate(kept):
            own = cached[index >= len(kept) - len(used.caches.window)]
            assert torch.equal(tensor[own], before[own]), "a cached page was written"
        hits.add(request.num_cached)
    assert len(hits) > 3


@pytest.mark.parametrize("mode", ["exact", "bounded"])
@pytest.mark.parametrize("length", [4, 8, 12, 32])
def test_a_prompt_of_whole_pages_computes_a_token(length: int, mode: str) -> None:
    """All of it is cached, and its last token has to run: the logits are wanted."""
    spy, tokens = Spy(model("short")), random_tokens(length, 5)
    used = engine("short", run=spy, prefix_mode=mode)
    first = answer(used, tokens)
    spy.calls.clear()
    request = used.add(tokens, GREEDY)
    used.step()
    longest = length - PAGE
    hit = longest if mode == "exact" or longest > 8 else 0
    assert request.num_cached == hit
    assert spy.num_rows == length - hit + (min(8, hit) if mode == "bounded" else 0)
    run_to_end(used)
    if mode == "exact" or not hit:
        assert request.output == first.output


# -- bounded -----------------------------------------------------------------------------------------------


@dataclass
class HitRun:
    logits: Tensor
    worker: Worker
    steps: list[StepInputs]
    pages: tuple[int, ...]


NEW_PAGES = 20  # first page of the second request by hand; the first one owns 1 ...


@torch.inference_mode()
def hand_hit(name: str, tokens: Sequence[int], hit: int, chunks: Sequence[int] = ()) -> HitRun:
    """A request after a hit of any length, through the worker alone: the first `hit` tokens are computed by
    request 1; request 2 takes over its full pages, and a copy of the page that the hit ends in. Whatever
    window request 1 left, and every row of the caches that request 2 has not written, is NaN by then."""
    chosen, num_pages = model(name), -(-LENGTH // PAGE)
    window = chosen.config.window_tokens
    spy = Spy(chosen)
    capacity = EngineConfig(page_tokens=PAGE, max_requests=2, max_context_tokens=LENGTH + 1)
    caches = allocate_caches(chosen.layout, 40, 40, 2, "cpu")
    worker = Worker(chosen, capacity, caches, num_pages + 1, spy)
    own = tuple(range(1, -(-hit // PAGE) + 1))
    first = NewRequest(1, tuple(tokens[:hit]), hit, GREEDY, own, own)
    worker.execute(SchedulerOutput(new=(first,), num_tokens={1: hit}))
    worker.sample()
    worker.execute(SchedulerOutput(finished=(1,)))

    shared = hit // PAGE
    fresh = tuple(range(NEW_PAGES, NEW_PAGES + num_pages))
    pages = (*own[:shared], *fresh[shared:])
    for group in (caches.states, caches.index_k):
        for tensor in group.values():
            if hit % PAGE:
                tensor[fresh[shared]] = tensor[own[shared]]
            written = {*own[:shared], *([fresh[shared]] if hit % PAGE else [])}
            tensor[[page for page in range(40) if page not in written]] = torch.nan
    for tensor in caches.window.values():
        tensor.fill_(torch.nan)
    for tensor in caches.open_groups.values():
        tensor.fill_(torch.nan)
    before = {layer: tensor.clone() for layer, tensor in caches.states.items()}
    index_before = {layer: tensor.clone() for layer, tensor in caches.index_k.items()}

    start = max(0, hit - window)
    table = tuple(0 if number < start // PAGE else page for number, page in enumerate(fresh))
    second = NewRequest(
        2,
        tuple(tokens),
        len(tokens),
        GREEDY,
        pages,
        table,
        num_computed=start,
        hit_tokens=hit,
        replay_start=start,
    )
    spy.calls.clear()
    counts = [*chunks, len(tokens) - start - sum(chunks)]
    for number, count in enumerate(counts):
        worker.execute(SchedulerOutput(new=() if number else (second,), num_tokens={2: count}))
        result = worker.sample()
        assert result is not None
        assert all(one.error is None for one in result.get())
    for group, old in ((caches.states, before), (caches.index_k, index_before)):
        for layer, tensor in group.items():
            assert torch.equal(tensor[list(own[:shared])], old[layer][list(own[:shared])])
            below = hit % PAGE // (PAGE // tensor.shape[1])  # states of the copied page below the hit
            page = fresh[shared]
            assert torch.equal(tensor[page, :below], old[layer][page, :below])
    return HitRun(spy.logits(), worker, [step for step, _ in spy.calls], pages)


@cache
def window_of(name: str) -> int:
    return model(name).config.window_tokens


@pytest.mark.parametrize("hit", range(1, 3 * 8 + 3))
def test_every_hit_length_equals_the_rule(hit: int) -> None:
    """Hits of any length, also odd ones. The window below the first replayed row is NaN, so it is not read;
    shared states keep their bytes; the state that the hit ends in is written once, with both halves."""
    chosen, tokens = model("short"), random_tokens(hit + 7, 30 + hit)
    run = hand_hit("short", tokens, hit)
    expected, caches = by_the_rule(chosen, tokens, hit=hit)
    assert run.logits.isfinite().all()
    assert torch.equal(run.logits, expected)
    assert len(run.steps) == 1
    (step,) = run.steps
    start = max(0, hit - 8)
    assert step.positions.tolist() == list(range(start, hit + 7))
    lookback = [[tokens[p - n] if p >= n else -1 for n in (1, 2, 3)] for p in range(start, hit + 7)]
    assert step.lookback.tolist() == lookback, "replayed rows know the tokens before them"
    for ratio, written in step.attention.state_write.items():
        slots = [slot for slot in written.tolist() if slot >= 0]
        states = range(hit // ratio, (hit + 7) // ratio)
        page_states = PAGE // ratio
        assert slots == [
            run.pages[state // page_states] * page_states + state % page_states for state in states
        ]
    for layer, states_of in caches.states.items():
        per_page, ours = states_of.shape[1], run.worker.caches.states[layer]
        for state in range((hit + 7) * per_page // PAGE):
            mine = ours[run.pages[state // per_page], state % per_page]
            assert torch.equal(mine, states_of[1 + state // per_page, state % per_page])


@pytest.mark.parametrize("hit", [9, 13, 16, 25])
@pytest.mark.parametrize("chunks", [(1,), (3, 4), (8,), (9, 1)])
def test_chunks_do_not_change_a_replay(hit: int, chunks: tuple[int, ...]) -> None:
    """A chunk may end inside the replayed rows, between the halves of a state, or at the hit."""
    tokens = random_tokens(hit + 7, 30 + hit)
    run = hand_hit("short", tokens, hit, chunks)
    assert len(run.steps) == len(chunks) + 1
    assert torch.equal(run.logits, by_the_rule(model("short"), tokens, hit=hit)[0])


def test_another_window_and_layout_follow_the_rule() -> None:
    """`odd`: window 12, states owned by layer 0."""
    for hit in (5, 13, 14, 20, 27):
        tokens = random_tokens(hit + 5, hit)
        run = hand_hit("odd", tokens, hit)
        assert torch.equal(run.logits, by_the_rule(model("odd"), tokens, hit=hit)[0])


@pytest.mark.parametrize("budget", [64, 3])
def test_bounded_hits_through_the_scheduler_equal_the_rule(budget: int) -> None:
    """Every page boundary; hits that are not longer than the window are dropped. The drift against the cold
    run is stated."""
    chosen, base, drifts = model("short"), random_tokens(41, 6), {}
    for shared in range(0, 41, PAGE if budget == 64 else 3 * PAGE):
        spy = Spy(chosen)
        used = engine("short", run=spy, prefix_mode="bounded", max_batch_tokens=budget)
        answer(used, base, ONE)
        prefix = used.scheduler.prefix
        cached = sorted(prefix.global_pool._key_of)
        kept = [
            (tensor, tensor[cached].clone())
            for group in (used.caches.states, used.caches.index_k)
            for tensor in group.values()
        ]
        for tensor in used.caches.window.values():
            tensor.fill_(torch.nan)
        tokens = base[:shared] + random_tokens(3, 70 + shared)
        spy.calls.clear()
        request = used.add(tokens, ONE)
        run_to_end(used)
        assert request.error is None
        hit = shared if shared > 8 else 0
        assert request.num_cached == hit
        assert spy.num_rows == len(tokens) - max(0, hit - 8)
        assert spy.calls[0][0].positions[0] == max(0, hit - 8)
        expected, _ = by_the_rule(chosen, tokens, hit=hit)
        assert torch.equal(spy.logits(), expected)
        cold = full_logits(chosen, tokens)[-1]
        drifts[hit] = drift(spy.logits(), cold)
        assert (drifts[hit] == 0) == (hit == 0)
        for tensor, before in kept:
            assert torch.equal(tensor[cached], before), "a shared page was written"
    assert max(drifts.values()) < 0.3, f"drift of the logits against the cold run, by hit length: {drifts}"
    assert len(drifts) >= 3, drifts


def test_replayed_rows_take_no_page_of_the_global_pool() -> None:
    used = engine("short", prefix_mode="bounded")
    tokens = random_tokens(33, 8)
    answer(used, tokens, ONE)
    request = used.add(tokens, ONE)
    output = used.scheduler.schedule()
    (new,) = output.new
    assert (new.hit_tokens, new.replay_start, new.num_computed) == (32, 24, 24)
    assert output.num_tokens == {request.request_id: 9}
    assert used.scheduler.prefix.global_pool.num_used == 9
    assert new.window_pages[:6] == (0,) * 6
    assert 0 not in new.window_pages[6:]


# -- decoder replay ----------------------------------------------------------------------------------------


def replaying(name: str = "deep", **changes: Any) -> tuple[LLM, Spy]:
    spy = Spy(model(name))
    return engine(name, run=spy, decoder_replay=True, **changes), spy


@pytest.mark.parametrize("name", ["deep", "tiny"])
def test_decoder_replay_equals_the_full_pass_cut_by_the_rule(name: str) -> None:
    """Prompts around the window: equal to the full pass up to it, to the rule beyond. The drift against the
    full pass is stated."""
    drifts = {}
    for length in (1, 7, 8, 9, 10, 15, 17, 30):
        used, spy = replaying(name)
        tokens = random_tokens(length, length)
        answer(used, tokens, ONE)
        (call,) = spy.calls
        tail = max(0, length - 8)
        assert len(call[1].hidden) == length - tail
        assert (call[0].tail is not None) == (tail > 0)
        expected, _ = by_the_rule(model(name), tokens, tail_start=tail)
        assert torch.equal(spy.logits(), expected)
        drifts[length] = drift(spy.logits(), full_logits(model(name), tokens)[-1])
        assert (drifts[length] == 0) == (length <= 8)
    assert max(drifts.values()) < 0.15, f"drift of the logits against the full pass, by length: {drifts}"


@pytest.mark.parametrize("name", ["deep", "tiny"])
def test_chunks_do_not_change_decoder_replay(name: str) -> None:
    """The tail is a property of the prompt: every budget gives the same logits and the same answer."""
    tokens = random_tokens(21, 9)
    expected, _ = by_the_rule(model(name), tokens, tail_start=13)
    outputs = set()
    for budget in (1, 2, 3, 5, 8, 12, 13, 14, 20, 21) if name == "deep" else (5, 13):
        used, spy = replaying(name, max_batch_tokens=budget)
        request = used.add(tokens, GREEDY)
        while not request.output and request.error is None:
            used.step()
        assert torch.equal(spy.logits(), expected)
        run_to_end(used)
        kept = sum(len(output.hidden) for step, output in spy.calls if int(step.positions[0]) < 21)
        assert kept == 8, "rows that go on behind the last KV source"
        outputs.add(tuple(request.output))
    assert len(outputs) == 1


def test_decoder_replay_is_by_request_in_a_mixed_step() -> None:
    """A decode row, a short prompt, a chunk that ends before its tail, one with prompt log-probabilities and
    a long prompt in one step: each as alone."""
    lengths = (30, 5, 21, 26, 28)
    tokens = [random_tokens(length, 60 + length) for length in lengths]
    params = [GREEDY] * 5
    params[3] = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    alone = [answer(replaying()[0], one, own).output for one, own in zip(tokens, params, strict=True)]
    assert alone[3] == answer(engine("deep"), tokens[3]).output
    used, spy = replaying()
    answer(used, tokens[0])
    assert not torch.equal(spy.logits(0), full_logits(model("deep"), tokens[0])[-1])
    used, spy = replaying(max_batch_tokens=63)
    first = used.add(tokens[1], params[1])
    used.step()
    others = [used.add(tokens[n], params[n]) for n in (3, 0, 2, 4)]
    run_to_end(used)
    assert first.output == alone[1]
    assert [request.output for request in others] == [alone[n] for n in (3, 0, 2, 4)]
    mixed = [step for step, _ in spy.calls if step.tail is not None and int((step.positions == 0).sum()) > 1]
    assert mixed
    assert_all_given_back(used)


def test_prompt_log_probabilities_switch_decoder_replay_off() -> None:
    tokens = random_tokens(30, 1)
    used, spy = replaying()
    params = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    request = answer(used, tokens, params)
    step, output = spy.calls[0]
    assert step.tail is None
    assert len(output.hidden) == 30
    assert torch.equal(spy.logits(0), full_logits(model("deep"), tokens)[-1])
    assert request.output == answer(engine("deep"), tokens).output


@pytest.mark.parametrize("budget", [64, 3])
@pytest.mark.parametrize("length", [12, 14, 17, 20, 29, 33])
def test_decoder_replay_after_a_bounded_hit(length: int, budget: int) -> None:
    """Both rules at once: the later of both starts bounds the window behind the cut."""
    tokens = random_tokens(length, 11)
    used, spy = replaying(prefix_mode="bounded", max_batch_tokens=budget)
    answer(used, tokens, ONE)
    for tensor in used.caches.window.values():
        tensor.fill_(torch.nan)
    spy.calls.clear()
    request = used.add(tokens, ONE)
    run_to_end(used)
    assert request.error is None
    hit = (length - 1) // PAGE * PAGE
    hit = hit if hit > 8 else 0
    assert request.num_cached == hit
    expected, _ = by_the_rule(model("deep"), tokens, hit=hit, tail_start=length - 8)
    assert torch.equal(spy.logits(), expected)


@pytest.mark.parametrize("budget", [64, 3])
def test_a_resumed_request_sees_no_window_below_its_replay(budget: int) -> None:
    """Preempted while it decodes, a request comes back with a hit behind the end of its prompt. The replay
    then starts behind the tail of the prompt, and the layers behind the cut must not look below it: those
    window rows were given back."""
    chosen, tokens = model("deep"), random_tokens(30, 12)
    num_prompt, hit, start = 26, 28, 20
    assert start > num_prompt - 8
    used, spy = replaying(prefix_mode="bounded", max_batch_tokens=budget)
    first = answer(used, tokens, ONE)
    assert first.error is None
    for tensor in used.caches.window.values():
        tensor.fill_(torch.nan)
    resumed = Request(100, list(tokens), SamplingParams(max_tokens=6, ignore_eos=True), num_prompt)
    used.scheduler.add(resumed)
    spy.calls.clear()
    while resumed.finish_reason is None and len(resumed.tokens) == 30:
        used.step()
    assert resumed.num_cached == hit
    assert resumed.error is None
    last = next(
        number for number, (step, _) in enumerate(spy.calls) if int(step.positions[-1]) == len(tokens) - 1
    )
    expected, _ = by_the_rule(chosen, tokens, hit=hit, tail_start=num_prompt - 8)
    assert torch.equal(spy.logits(last), expected)


def test_a_replay_without_a_tail_stays_bounded_beside_one_that_has_a_tail() -> None:
    """The worker by hand: request 2 wants prompt log-probabilities, so no row of it is skipped, but it has a
    hit; in the same step a long prompt is cut. Request 2's window still begins at its `replay_start`."""
    tokens, hit = random_tokens(31, 13), 24
    chosen, spy = model("deep"), Spy(model("deep"))
    capacity = EngineConfig(page_tokens=PAGE, max_requests=3, max_context_tokens=44, decoder_replay=True)
    caches = allocate_caches(chosen.layout, 40, 40, 3, "cpu")
    worker = Worker(chosen, capacity, caches, 11, spy)
    own = tuple(range(1, 9))
    first = NewRequest(1, tuple(tokens[:hit]), hit, GREEDY, own[:6], own[:6])
    worker.execute(SchedulerOutput(new=(first,), num_tokens={1: hit}))
    worker.sample()
    for tensor in caches.window.values():
        tensor.fill_(torch.nan)
    params = SamplingParams(max_tokens=4, prompt_logprobs=0)
    table = (0, 0, 0, 0, *range(20, 24))
    second = NewRequest(
        2, tuple(tokens), 31, params, own, table, num_computed=16, hit_tokens=hit, replay_start=16
    )
    long = tuple(random_tokens(22, 14))
    third = NewRequest(3, long, 22, GREEDY, tuple(range(30, 36)), tuple(range(30, 36)))
    worker.execute(SchedulerOutput(new=(second, third), finished=(1,), num_tokens={2: 15, 3: 22}))
    result = worker.sample()
    assert result is not None
    assert [one.error for one in result.get()] == [None, None]
    assert spy.calls[-1][0].tail is not None
    expected, _ = by_the_rule(chosen, tokens, hit=hit)
    assert torch.equal(spy.logits(row=14), expected)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preempted_requests_replay_to_the_same_answer(asynchronous: bool) -> None:
    """Decoder replay under preemption: recomputed tails begin at the same row."""
    tokens = [random_tokens(length, 80 + length) for length in (17, 21, 14)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    alone = [answer(replaying()[0], one, params).output for one in tokens]
    used, _ = replaying(global_pages=14, window_pages=16, asynchronous=asynchronous, max_batch_tokens=16)
    requests = [used.add(one, params) for one in tokens]
    run_to_end(used)
    assert used.metrics.preemptions > 0
    assert [request.output for request in requests] == alone
    assert_all_given_back(used)


def test_what_decoder_replay_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="prefix_mode exact"):
        EngineConfig(decoder_replay=True, prefix_mode="exact")
    short = model("short").config
    for layer in (3, 4):
        behind = short.with_overrides([f"engram.layers=[{layer}]"])
        with pytest.raises(ValueError, match=f"layer 3, and layer {layer} has one"):
            EngineConfig(decoder_replay=True).validate(behind)
    EngineConfig(decoder_replay=True).validate(short)
    last = short.with_overrides(['{"num_layers": 4, "ratios": [0, 2, 2, 1], "index_sources": [1, 3]}'])
    with pytest.raises(ValueError, match="decoder_replay"):
        EngineConfig(decoder_replay=True).validate(last)


# -- Engram history ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["off", "exact", "bounded"])
@pytest.mark.parametrize("budget", [1, 2, 3, 64])
def test_lookback_is_the_prompt_s_and_the_sampled_tokens(budget: int, mode: str) -> None:
    """Prompts of 1, 2 and 3 tokens, splits after 1, 2 and 3, hits and decode: each row's three ids back are
    those of its request, whatever step or cache they came from."""
    spy = Spy(model("short"))
    used = engine("short", run=spy, prefix_mode=mode, max_batch_tokens=budget, asynchronous=True)
    base, with_hit = random_tokens(27, 15), 0
    for tokens in (base[:1], base[:2], base[:3], base, [*base, 7], base[:14]):
        spy.calls.clear()
        request = answer(used, tokens)
        known = request.tokens
        for step, _ in spy.calls:
            for p, token, back in zip(
                step.positions.tolist(), step.token_ids.tolist(), step.lookback.tolist(), strict=True
            ):
                if p >= len(known) - 1:
                    continue  # the row behind the last token, launched before the end was known
                assert token == known[p]
                assert back == [known[p - n] if p >= n else -1 for n in (1, 2, 3)]
        with_hit += request.num_cached > 0
        assert step.positions.numel() > 0
    assert (with_hit > 0) == (mode != "off")


# -- leaks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["off", "exact", "bounded"])
def test_abort_in_mid_prefill_500_times(mode: str) -> None:
    """Start, abort in mid-prefill, restart: the pages come back every time, hits included."""
    chosen = model("small")
    used = engine(
        "small",
        run=NoModel(chosen),
        prefix_mode=mode,
        max_batch_tokens=7,
        asynchronous=mode != "off",
        global_pages=24,
        window_pages=20,
    )
    pools = used.scheduler.prefix.global_pool, used.scheduler.prefix.window_pool
    cached = stopped = 0
    for number in range(500):
        request = used.add([6 + number % 3] * (20 + number % 9), GREEDY)
        for _ in range(1 + number % 3):
            used.step()
        stopped += 0 < request.num_computed < request.num_prompt
        cached += request.num_cached > 0
        used.abort(request)
        assert [pool.num_free for pool in pools] == [24, 20]
        used.scheduler.check_integrity()
    assert stopped > 100
    assert (cached > 100) == (mode != "off")
    run_to_end(used)
    request = answer(used, [9] * 20)
    assert len(request.output) == 4
    assert_all_given_back(used)
