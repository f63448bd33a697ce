"""Requests that move: exported from one engine, gone on with in another, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from engines import PAGE, Spy, assert_all_given_back, engine, fresh_model, model, random_tokens

from dsv41.runner.engine import LLM
from dsv41.runner.request import Request, SamplingParams
from dsv41.runner.snapshot import Snapshot

PARAMS = SamplingParams(max_tokens=7, ignore_eos=True)
DRAWN = replace(
    PARAMS,
    temperature=0.9,
    seed=21,
    top_k=40,
    repetition_penalty=1.5,
    frequency_penalty=1.2,
    presence_penalty=0.8,
    min_tokens=6,
    stop_ids=(50, 60),
)
LENGTHS = (1, 7, 8, 21, 30)  # open and closed groups, inside and beyond the window, whole pages


def run_to_end(used: LLM) -> None:
    while used.has_work:
        used.step()


@cache
def prompt(length: int) -> tuple[int, ...]:
    return tuple(random_tokens(length, 200 + length))


@cache
def whole(length: int, params: SamplingParams = PARAMS) -> list[int]:
    used = engine("short")
    request = used.add(prompt(length), params)
    run_to_end(used)
    assert len(request.output) >= 6
    return request.output


def until(used: LLM, request: Request, num_output: int) -> None:
    while len(request.output) < num_output:
        assert request.finish_reason is None
        used.step()


def busy_engine(run: Any = None, **changes: Any) -> tuple[LLM, list[Request]]:
    """An engine whose pages and slots are in other hands, so that nothing fits by chance."""
    used = engine("short", run=run, **changes)
    others = [used.add(prompt(length), PARAMS) for length in (9, 12)]
    used.step()
    used.step()
    return used, others


def pool_counts(used: LLM) -> list[int]:
    prefix = used.scheduler.prefix
    return [prefix.global_pool.num_free, prefix.window_pool.num_free]


@pytest.mark.parametrize("params", [PARAMS, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("num_output", [1, 2, 5])
def test_a_request_goes_on_where_it_was(num_output: int, params: SamplingParams) -> None:
    """Exported at the end of the prompt and in mid-answer, at every kind of length: the same tokens as
    uninterrupted, and the importing engine computes the rest alone, one row a token."""
    open_group = 0
    for length in LENGTHS:
        source, _ = busy_engine()
        moving = source.add(prompt(length), params)
        until(source, moving, num_output)
        snapshot = source.export_state(moving)
        source.abort(moving)
        run_to_end(source)
        assert_all_given_back(source)
        assert snapshot.num_computed == length + num_output - 1
        open_group += snapshot.num_computed % 2
        pages = -(-snapshot.num_computed // PAGE)
        assert all(len(tensor) == pages for tensor in (snapshot.states | snapshot.index_k).values())
        assert all(len(tensor) <= 3 for tensor in snapshot.window.values()) or num_output == 1

        spy = Spy(model("short"))
        target, others = busy_engine(spy)
        spy.calls.clear()
        found = target.import_state(snapshot)
        assert found.output == whole(length, params)[:num_output]
        before = sum(len(one.output) for one in others)
        run_to_end(target)
        assert found.output == whole(length, params)
        assert [one.output for one in others] == [whole(9), whole(12)]
        rest = sum(len(one.output) for one in others) - before
        assert spy.num_rows == rest + len(whole(length, params)) - num_output, "something was computed again"
        assert_all_given_back(target)
    assert 0 < open_group < len(LENGTHS)


@pytest.mark.parametrize("budget", [5, 8, 11])
def test_export_in_mid_prefill(budget: int) -> None:
    source = engine("short", max_batch_tokens=budget)
    moving = source.add(prompt(30), DRAWN)
    source.step()
    source.step()
    assert moving.num_computed == 2 * budget < 30
    spy = Spy(model("short"))
    target = engine("short", run=spy)
    found = target.import_state(source.export_state(moving))
    run_to_end(target)
    assert found.output == whole(30, DRAWN)
    assert spy.num_rows == 30 - 2 * budget + len(whole(30, DRAWN)) - 1


def test_export_disturbs_neither_the_request_nor_its_engine() -> None:
    source = engine("short")
    moving, other = source.add(prompt(21), DRAWN), source.add(prompt(9), PARAMS)
    for count in (1, 3, 5):
        until(source, moving, count)
        source.export_state(moving)
    run_to_end(source)
    assert (moving.output, other.output) == (whole(21, DRAWN), whole(9))
    assert_all_given_back(source)


@pytest.mark.parametrize("num_output", [1, 4])
def test_asynchronous_engines_lose_no_token(num_output: int) -> None:
    """What is in flight is taken in before the export; its events come with the next step."""
    source = engine("short", asynchronous=True)
    moving, other = source.add(prompt(21), PARAMS), source.add(prompt(9), PARAMS)
    until(source, moving, num_output)
    snapshot = source.export_state(moving)
    assert len(snapshot.tokens) == 21 + num_output + 1, "a token was in flight"
    assert source.has_work
    events = [event.result.token for event in source.step() if event.request is moving]
    assert events[:1] == whole(21)[num_output : num_output + 1]
    run_to_end(source)
    assert (moving.output, other.output) == (whole(21), whole(9))
    target = engine("short", asynchronous=True)
    found = target.import_state(snapshot)
    run_to_end(target)
    assert found.output == whole(21)
    assert_all_given_back(target)


def test_a_snapshot_can_be_imported_twice_and_moved_on() -> None:
    source = engine("short")
    moving = source.add(prompt(21), DRAWN)
    until(source, moving, 2)
    snapshot = source.export_state(moving)
    middle = engine("short")
    first, second = middle.import_state(snapshot), middle.import_state(snapshot)
    until(middle, first, 4)
    target = engine("short")
    third = target.import_state(middle.export_state(second))
    for used in (middle, target):
        run_to_end(used)
    assert first.output == second.output == third.output == whole(21, DRAWN)


def test_an_imported_request_can_be_preempted() -> None:
    """It came last: it gives way, and is computed again from its tokens. Its old open rows do no harm."""
    source = engine("short")
    moving = source.add(prompt(7), DRAWN)
    until(source, moving, 2)
    snapshot = source.export_state(moving)
    target = engine("short", global_pages=9, window_pages=12, max_batch_tokens=5)
    others = [target.add(prompt(length), PARAMS) for length in (9, 8)]
    for _ in range(4):
        target.step()
    found = target.import_state(snapshot)
    run_to_end(target)
    assert found.num_preemptions > 0
    assert found.output == whole(7, DRAWN)
    assert [one.output for one in others] == [whole(9), whole(8)]
    assert_all_given_back(target)


@pytest.mark.parametrize("mode", ["exact", "bounded"])
def test_after_a_hit_and_into_a_cache(mode: str) -> None:
    """The exporter's request came from its prefix cache; the importer may offer the pages to others."""
    source = engine("short", prefix_mode=mode)
    for _ in range(2):
        moving = source.add(prompt(30), PARAMS)
        until(source, moving, 3)
    assert moving.num_cached == 28
    snapshot = source.export_state(moving)
    run_to_end(source)
    target = engine("short", prefix_mode=mode)
    found = target.import_state(snapshot)
    run_to_end(target)
    assert found.output == moving.output
    again = target.add(prompt(30), PARAMS)
    run_to_end(target)
    if mode == "exact":
        assert again.output == found.output == whole(30)
    assert_all_given_back(target)


def test_export_in_the_middle_of_a_replay() -> None:
    """A bounded hit replays 8 rows, here in steps of 3. The window below the first of them is nowhere, and
    the shared states must not be written again: a snapshot says so, or is refused in a sentence."""
    source = engine("short", prefix_mode="bounded", max_batch_tokens=3)
    first = source.add(prompt(30), PARAMS)
    run_to_end(source)
    moving = source.add(prompt(30), PARAMS)
    source.step()
    assert (first.num_cached, moving.num_cached, moving.num_computed) == (0, 28, 23)
    try:
        snapshot = source.export_state(moving)
    except ValueError:
        run_to_end(source)
        return
    run_to_end(source)
    target = engine("short", prefix_mode="bounded")
    found = target.import_state(snapshot)
    run_to_end(target)
    assert found.output == moving.output


def test_decoder_replay_moves_along() -> None:
    """Exported in mid-prefill, the tail begins at the same row in the other engine."""
    source = engine("short", decoder_replay=True, max_batch_tokens=25)
    moving = source.add(prompt(30), PARAMS)
    source.step()
    snapshot = source.export_state(moving)
    run_to_end(source)
    target = engine("short", decoder_replay=True)
    found = target.import_state(snapshot)
    run_to_end(target)
    assert found.output == moving.output


def test_images_move_along() -> None:
    """In mid-prefill the rows of the image are still to come, and its ids must not be taken for text: not by
    Engram's lookback, and not as the key of shared pages."""
    rows = torch.randn(21, model("short").config.hidden_size, generator=torch.Generator().manual_seed(2))
    span = [3 <= p < 19 for p in range(21)]
    source = engine("short", max_batch_tokens=8)
    moving = source.add(prompt(21), PARAMS, image_rows=span, embeddings=rows)
    source.step()
    early = source.export_state(moving)
    until(source, moving, 1)
    late = source.export_state(moving)
    run_to_end(source)
    assert moving.output != whole(21)
    for snapshot in (early, late):
        target = engine("short", prefix_mode="exact")
        found = target.import_state(snapshot)
        run_to_end(target)
        assert found.output == moving.output
        text = target.add(prompt(21), PARAMS)
        run_to_end(target)
        assert text.output == whole(21), "a text prompt took over the pages of an image"


# -- what cannot be ------------------------------------------------------------------------------------------


def exported(length: int = 21, num_output: int = 2) -> Snapshot:
    source = engine("short")
    moving = source.add(prompt(length), PARAMS)
    until(source, moving, num_output)
    return source.export_state(moving)


def test_a_request_without_state_is_refused() -> None:
    used = engine("short", max_requests=1)
    running, waiting = used.add(prompt(9), PARAMS), used.add(prompt(7), PARAMS)
    for request in (running, waiting):
        with pytest.raises(ValueError, match=f"request {request.request_id} does not run"):
            used.export_state(request)
    used.step()
    used.export_state(running)
    run_to_end(used)
    for request in (running, waiting):
        with pytest.raises(ValueError, match="does not run"):
            used.export_state(request)
    assert [running.output, waiting.output] == [whole(9), whole(7)]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"max_requests": 2}, MemoryError, "2 requests.*max_requests"),
        ({"global_pages": 9}, MemoryError, "global pool"),
        ({"window_pages": 6, "max_batch_tokens": 12}, MemoryError, "window pool"),
        ({"max_context_tokens": 27}, ValueError, "max_context_tokens"),
        ({"global_pages": 6}, ValueError, "7 pages.*6"),
    ],
)
def test_an_import_that_does_not_fit_changes_nothing(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    snapshot = exported()
    target, others = engine("short", **changes), []
    for length in (9, 7):
        others.append(target.add(prompt(length), PARAMS))
    target.step()
    before = [pool_counts(target), list(target.scheduler.requests), target.metrics]
    with pytest.raises(error, match=message):
        target.import_state(snapshot)
    assert [pool_counts(target), list(target.scheduler.requests), target.metrics] == before
    target.scheduler.check_integrity()
    run_to_end(target)
    assert [one.output for one in others] == [whole(9), whole(7)]
    assert_all_given_back(target)


def other_page_size() -> LLM:
    return engine(fresh_model("short", page_tokens=8))


def other_model() -> LLM:
    return engine("tiny")


def narrower_model() -> LLM:
    return engine("small")


def other_records() -> LLM:
    return engine(fresh_model("short", numerics="fp32"))


@pytest.mark.parametrize("make", [other_page_size, other_model, narrower_model, other_records])
def test_a_snapshot_of_another_model_is_refused(make: Callable[[], LLM]) -> None:
    """Other layers, other records, other pages: a sentence, and nothing is changed."""
    target, snapshot = make(), exported()
    before = pool_counts(target)
    with pytest.raises(ValueError, match="snapshot"):
        target.import_state(snapshot)
    assert pool_counts(target) == before
    assert not list(target.scheduler.requests)
    assert_all_given_back(target)


def test_params_and_tokens_are_checked_again() -> None:
    snapshot = exported()
    target = engine("short")
    for broken in (
        replace(snapshot, params=replace(PARAMS, stop_ids=(600,))),
        replace(snapshot, tokens=(600, *snapshot.tokens[1:])),
    ):
        with pytest.raises(ValueError, match="600"):
            target.import_state(broken)
    assert_all_given_back(target)


def sequences(one: Snapshot) -> Sequence[torch.Tensor]:
    groups = (one.states, one.index_k, one.window, one.open_groups)
    return [tensor for group in groups for tensor in group.values()]


def test_a_snapshot_is_a_copy() -> None:
    """The source goes on, and writes over what it exported: the snapshot keeps its bytes."""
    source = engine("short")
    moving = source.add(prompt(21), PARAMS)
    until(source, moving, 1)
    snapshot = source.export_state(moving)
    before = [tensor.clone() for tensor in sequences(snapshot)]
    assert len(before) == 2 + 2 + 5 + 1
    run_to_end(source)
    for tensor in source.caches.tensors():
        tensor.fill_(0)
    assert all(torch.equal(a, b) for a, b in zip(before, sequences(snapshot), strict=True))
    assert all(tensor.device.type == "cpu" for tensor in before)
