"""The worker driven by hand: what a scheduler of another make sends, and what comes back.

The protocol, as `Loop` below follows it:

    worker.execute(SchedulerOutput(...))      one step: who leaves, who joins, pages, rows of each
    result = worker.sample()                  an AsyncResult, or None when the step had no rows
    result.get()                              a TokenResult for each request that sampled

- A request is announced once, in `new`, with all its known tokens and the pages of its first step.
- Later steps name it in `running`, with the pages that it got since.
- `num_tokens` says how many rows each of them gets; a request samples in the step of its last token.
- The sampled token is on the device already: the next step may follow before `get`.
- A request that ended or was preempted is named once, in `finished` or `preempted`; its slot is free again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from engines import PAGE, engine, full_logits, model, random_tokens

from dsv41.config import EngineConfig
from dsv41.model.caches import allocate_caches
from dsv41.runner.async_output import AsyncResult
from dsv41.runner.request import SamplingParams
from dsv41.runner.schedule import NewRequest, RunningRequest, SchedulerOutput, TokenResult
from dsv41.runner.state import IN_FLIGHT, Staging
from dsv41.runner.worker import Worker

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
LENGTHS = (13, 1, 8, 21)
PAGES = 12  # of a context of 48 tokens


def make_worker(name: str = "short", max_requests: int = 4, run: Any = None, **changes: Any) -> Worker:
    """Everything that a worker needs: a model, capacities, and caches of as many pages as one likes."""
    chosen = model(name)
    capacity = EngineConfig(
        page_tokens=PAGE, max_requests=max_requests, max_context_tokens=PAGES * PAGE, **changes
    )
    num_pages = 1 + max_requests * PAGES  # page 0 is the null page
    caches = allocate_caches(chosen.layout, num_pages, num_pages, max_requests, chosen.device)
    return Worker(chosen, capacity, caches, max_pages=PAGES, run=run)


@dataclass
class Loop:
    """The smallest scheduler: a request owns one range of pages, which serves both groups."""

    worker: Worker
    lag: int = 0  # steps launched before results are read
    computed: dict[int, int] = field(default_factory=dict)
    length: dict[int, int] = field(default_factory=dict)
    pages: dict[int, list[int]] = field(default_factory=dict)
    output: dict[int, list[int]] = field(default_factory=dict)
    results: list[TokenResult] = field(default_factory=list)
    in_flight: list[AsyncResult] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)

    def new(self, request_id: int, tokens: Sequence[int], place: int, **changes: Any) -> NewRequest:
        first = 1 + place * PAGES
        self.computed[request_id], self.length[request_id] = 0, len(tokens)
        self.pages[request_id] = list(range(first, first + PAGES))
        self.output[request_id] = []
        values: dict[str, Any] = {
            "request_id": request_id,
            "tokens": tuple(tokens),
            "num_prompt": len(tokens),
            "params": GREEDY,
            "pages": (),
            "window_pages": (),
        }
        return NewRequest(**values | changes)

    def end(self, request_id: int) -> None:
        self.finished.append(request_id)

    def step(self, counts: dict[int, int], new: Sequence[NewRequest] = (), **forced: tuple[int, ...]) -> None:
        joined, going = [], []
        for request_id, count in counts.items():
            start = -(-self.computed[request_id] // PAGE)
            self.computed[request_id] += count
            fresh = tuple(self.pages[request_id][start : -(-self.computed[request_id] // PAGE)])
            announced = next((one for one in new if one.request_id == request_id), None)
            if announced is not None:
                joined.append(replace(announced, pages=fresh, window_pages=fresh))
            else:
                tokens = forced.get(f"r{request_id}", ())
                going.append(RunningRequest(request_id, fresh, fresh, tokens))
        finished, self.finished = tuple(self.finished), []
        self.worker.execute(SchedulerOutput(tuple(joined), tuple(going), finished, num_tokens=counts))
        result = self.worker.sample()
        if result is not None:
            self.in_flight.append(result)
        self.read(self.lag)

    def read(self, behind: int = 0) -> None:
        while len(self.in_flight) > behind:
            for result in self.in_flight.pop(0).get():
                self.results.append(result)
                assert result.error is None
                self.output[result.request_id].append(result.token)


def prompts() -> list[list[int]]:
    return [random_tokens(length, 50 + length) for length in LENGTHS]


def solo(params: SamplingParams = GREEDY, name: str = "short") -> list[list[int]]:
    return [list(engine(name).generate([tokens], params)[0].tokens) for tokens in prompts()]


# -- the protocol -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("name", ["short", "odd"])
def test_a_hand_made_schedule_gives_the_engine_s_tokens(name: str, lag: int) -> None:
    """Chunks, a mixed step, a late arrival, a request that pauses, and slots that change hands."""
    loop = Loop(make_worker(name, max_requests=3), lag)
    tokens, expected = prompts(), solo(name=name)
    loop.step({7: 5}, [loop.new(7, tokens[0], 0)])
    loop.step({7: 8, 3: 1}, [loop.new(3, tokens[1], 1)])  # a chunk and a whole prompt; both sample
    loop.step({3: 1, 9: 8, 7: 1}, [loop.new(9, tokens[2], 2)])
    loop.step({9: 1})  # the others pause
    loop.step({7: 1, 9: 1, 3: 1})
    loop.end(3)
    loop.step({7: 1, 9: 1})
    loop.step({4: 20, 9: 1}, [loop.new(4, tokens[3], 1)])  # takes the slot and the pages of request 3
    loop.step({4: 1, 7: 1})
    loop.step({4: 1, 9: 1})
    loop.read()
    assert loop.output[7] == expected[0][:5]
    assert loop.output[3] == expected[1][:3]
    assert loop.output[9] == expected[2][:6]
    assert loop.output[4] == expected[3][:2]
    assert sorted(loop.worker.slots) == [4, 7, 9]


def test_state_is_by_request_and_not_by_row() -> None:
    """Requests A, B, C of odd lengths; B ends; the next steps run C before A. Open groups, sampling state and
    pages follow the request (a row's place in the batch is not its slot)."""
    params = [
        replace(GREEDY, temperature=1.0, seed=4),
        GREEDY,
        replace(GREEDY, repetition_penalty=1.6, frequency_penalty=0.7),
    ]
    tokens = [random_tokens(length, 9 + length) for length in (7, 5, 9)]
    expected = [
        list(engine("short").generate([one], own)[0].tokens) for one, own in zip(tokens, params, strict=True)
    ]
    loop = Loop(make_worker(max_requests=3))
    loop.step(
        {0: 7, 1: 5, 2: 9},
        [loop.new(n, one, n, params=own) for n, (one, own) in enumerate(zip(tokens, params, strict=True))],
    )
    loop.end(1)
    for order in ((2, 0), (2, 0), (0, 2), (2,), (0,), (0, 2)):
        loop.step(dict.fromkeys(order, 1))
    assert loop.output[0] == expected[0][: len(loop.output[0])]
    assert loop.output[2] == expected[2][: len(loop.output[2])]
    assert len(loop.output[0]) == len(loop.output[2]) == 6


def test_a_step_without_rows_does_its_bookkeeping() -> None:
    loop = Loop(make_worker(max_requests=1))
    loop.step({1: 13}, [loop.new(1, prompts()[0], 0)])
    loop.end(1)
    loop.step({})
    assert (loop.worker.slots, loop.worker.num_steps) == ({}, 1)
    assert loop.worker.sample() is None
    loop.step({2: 8}, [loop.new(2, prompts()[2], 0)])
    assert loop.output[2] == solo()[2][:1]


def test_a_preempted_request_is_announced_again_with_its_tokens() -> None:
    """With penalties: their counts are made from the tokens that come back."""
    params = replace(GREEDY, frequency_penalty=1.5, repetition_penalty=1.4, min_tokens=5)
    loop, tokens = Loop(make_worker(max_requests=2)), prompts()[0]
    expected = solo(params)[0]
    loop.step({1: 13}, [loop.new(1, tokens, 0, params=params)])
    loop.step({1: 1})
    assert loop.output[1] == expected[:2]
    known = [*tokens, *loop.output[1]]
    worker = loop.worker
    worker.execute(SchedulerOutput(preempted=(1,)))
    assert worker.sample() is None
    again = loop.new(1, known, 1, num_prompt=13, params=params)
    loop.step({1: 10}, [again])
    loop.step({1: 5})
    for _ in range(3):
        loop.step({1: 1})
    assert loop.output[1] == expected[2:]


def test_forced_tokens_take_the_place_of_the_sampled_one() -> None:
    """`RunningRequest.tokens`: an answer from elsewhere, one or several at once; Engram and the selection see
    it. What follows equals a prompt with those tokens."""
    loop, tokens = Loop(make_worker(max_requests=1)), prompts()[2]
    loop.step({5: 8}, [loop.new(5, tokens, 0)])
    forced = [11, 12, 13]
    assert loop.output[5][0] != 11
    loop.step({5: 1}, r5=(11,))
    loop.step({5: 2}, r5=(12, 13))
    loop.step({5: 1})
    expected = [list(engine("short").generate([tokens + forced[:n]], GREEDY)[0].tokens) for n in (0, 1, 3)]
    assert loop.output[5] == [expected[0][0], expected[1][0], *expected[2][:2]]


def test_penalties_count_the_forced_token() -> None:
    """The sampled token that a forced one replaced is not part of the output, and the forced one is."""
    params = replace(GREEDY, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1.5)
    tokens = prompts()[2]
    loop = Loop(make_worker(max_requests=1))
    loop.step({5: 8}, [loop.new(5, tokens, 0, params=params)])
    loop.step({5: 1}, r5=(11,))
    counts = loop.worker.sampler.counts
    assert counts is not None
    slot = loop.worker.slots[5].index
    assert counts[slot].nonzero().flatten().tolist() == sorted({11, loop.output[5][1]})


# -- what does not fit -------------------------------------------------------------------------------------


def test_ids_that_do_not_fit_are_refused() -> None:
    loop = Loop(make_worker(max_requests=2))
    loop.step({1: 13}, [loop.new(1, prompts()[0], 0)])
    worker = loop.worker
    with pytest.raises(ValueError, match="request 8 is scheduled but neither new nor held"):
        worker.execute(SchedulerOutput(num_tokens={8: 1}))
    with pytest.raises(ValueError, match=r"request 8 .*held"):
        worker.execute(SchedulerOutput(running=(RunningRequest(8),), num_tokens={1: 1}))
    with pytest.raises(ValueError, match="request 1 is new but already held"):
        worker.execute(SchedulerOutput(new=(loop.new(1, prompts()[0], 1),)))
    with pytest.raises(ValueError, match=r"1 requests already and 2 are new.*max_requests"):
        worker.execute(SchedulerOutput(new=tuple(loop.new(n, [1], 1) for n in (2, 3))))


@pytest.mark.parametrize("count", [0, -1, 2, 40])
def test_a_count_of_rows_that_nobody_knows_is_refused(count: int) -> None:
    """One token is known behind the prompt: a step of two would read a row that holds no token."""
    loop = Loop(make_worker(max_requests=2))
    loop.step({1: 13}, [loop.new(1, prompts()[0], 0)])
    with pytest.raises(ValueError, match="request 1"):
        loop.worker.execute(
            SchedulerOutput(running=(RunningRequest(1, (5, 6), (5, 6)),), num_tokens={1: count})
        )


def test_more_tokens_than_a_context_are_refused() -> None:
    """They would be written into the next slot's row."""
    loop = Loop(make_worker(max_requests=2))
    with pytest.raises(ValueError, match="max_context_tokens"):
        loop.worker.execute(SchedulerOutput(new=(loop.new(1, [7] * 60, 0),)))


def test_execute_and_sample_alternate() -> None:
    loop = Loop(make_worker())
    worker = loop.worker
    assert worker.sample() is None
    one = replace(loop.new(1, [5], 0), pages=(1,), window_pages=(1,))
    worker.execute(SchedulerOutput(new=(one,), num_tokens={1: 1}))
    with pytest.raises(AssertionError, match="not sampled"):
        worker.execute(SchedulerOutput(num_tokens={1: 1}))


# -- device state --------------------------------------------------------------------------------------------


def test_request_state_stays_where_it_is() -> None:
    """A captured graph reads the tables by address: no step may replace them, only write them."""
    loop = Loop(make_worker(max_requests=2))
    state = loop.worker.state
    names = ("tokens", "page_table", "window_table", "counts")

    def places() -> list[int]:
        return [getattr(state, name).data_ptr() for name in names]

    before = places()
    caches = [tensor.data_ptr() for tensor in loop.worker.caches.tensors()]
    tables = set()
    loop.step({1: 13}, [loop.new(1, prompts()[0], 0)])
    for _ in range(3):
        loop.step({1: 1})
        assert loop.worker.state is state
        assert places() == before
        tables.add(int(state.counts[loop.worker.slots[1].index, 0]))
    assert tables == {14, 15, 16}, "the device counts the rows that it computed"
    loop.end(1)
    loop.step({2: 8}, [loop.new(2, prompts()[2], 1)])
    assert places() == before
    assert [tensor.data_ptr() for tensor in loop.worker.caches.tensors()] == caches


def test_the_next_step_reads_the_device_and_not_the_host() -> None:
    """The token on the device is changed between two steps: the second step computes the changed one."""
    loop, tokens = Loop(make_worker(max_requests=1), lag=9), prompts()[2]
    loop.step({5: 8}, [loop.new(5, tokens, 0)])
    slot = loop.worker.slots[5].index
    loop.worker.state.tokens[slot, 8] = 11
    loop.step({5: 1})
    loop.read()
    assert loop.output[5][1] == int(full_logits(model("short"), [*tokens, 11])[-1].argmax())


class LateCopy(Staging):
    """A device whose copies happen later: what `send` returned is filled when `arrive` is called."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.late: list[torch.Tensor] = []

    def send(self, arrays):
        sent = super().send(arrays)
        size = sum(array.size for array in arrays.values())
        self.late.append(self._buffers[self._turn][:size])
        return sent

    def arrive(self) -> list[int]:
        """What the device gets of the oldest transfer, read from the host buffer only now."""
        return self.late.pop(0).tolist()


def test_staged_bytes_survive_until_their_copy_arrives() -> None:
    """With as many steps in flight as allowed, no host buffer is written that a copy still reads; sizes vary,
    so that buffers are grown too."""
    staging, sent = LateCopy(), []
    for step in range(40):
        size = (3, 50, 7, 200, 1)[step % 5] + step
        values = {"a": np.arange(size) + 1000 * step, "b": np.arange(step % 3) - step}
        result = staging.send(values)
        assert {name: tensor.tolist() for name, tensor in result.items()} == {
            name: array.tolist() for name, array in values.items()
        }
        assert all(tensor.dtype == torch.int64 for tensor in result.values())
        sent.append([*values["a"].tolist(), *values["b"].tolist()])
        if step >= IN_FLIGHT:
            assert staging.arrive() == sent[step - IN_FLIGHT]


def test_a_staging_buffer_waits_for_its_own_copy() -> None:
    """The event of the copy that last read a buffer is waited for before the buffer is written again."""
    staging = Staging("cpu")
    log: list[int] = []

    class Event:
        def __init__(self, step: int) -> None:
            self.step = step

        def synchronize(self) -> None:
            log.append(self.step)

    for step in range(3 * (IN_FLIGHT + 1)):
        staging.send({"a": np.arange(4)})
        staging._copied[staging._turn] = Event(step)  # as `send` does on a device
    assert log == list(range(2 * (IN_FLIGHT + 1)))


def test_one_transfer_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(make_worker(max_requests=3))
    sends = []
    send = loop.worker.staging.send
    monkeypatch.setattr(loop.worker.staging, "send", lambda arrays: sends.append(1) or send(arrays))
    loop.step({1: 13, 2: 8}, [loop.new(1, prompts()[0], 0), loop.new(2, prompts()[2], 1)])
    loop.step({1: 1, 2: 1})
    loop.end(2)
    loop.step({1: 1, 3: 1}, [loop.new(3, prompts()[1], 2)])
    assert len(sends) == 3


def test_images_of_a_chunk_are_those_of_its_rows() -> None:
    """An image prompt in chunks, beside a text prompt: the same tokens as in one step alone."""
    tokens, size = prompts()[3], model("short").config.hidden_size
    rows = torch.randn(len(tokens), size, generator=torch.Generator().manual_seed(3))
    span = tuple(4 <= p < 15 for p in range(len(tokens)))
    found = []
    for chunks in ((21,), (5, 9, 7), (20, 1)):
        loop = Loop(make_worker(max_requests=2))
        image = loop.new(1, tokens, 0, image_rows=span, embeddings=rows)
        new = [image, loop.new(2, prompts()[2], 1)]
        loop.step({1: chunks[0], 2: 8}, new)
        for count in chunks[1:]:
            loop.step({1: count, 2: 1})
        for _ in range(3):
            loop.step({1: 1})
        found.append(loop.output[1])
    assert found[0] == found[1] == found[2]
    assert found[0] != solo()[3][: len(found[0])]


def test_a_refused_output_changes_nothing() -> None:
    """A scheduler's mistake must not lose a request: what was refused can be said again, rightly."""
    loop = Loop(make_worker(max_requests=2))
    loop.step({1: 13}, [loop.new(1, prompts()[0], 0)])
    worker, slots = loop.worker, dict(loop.worker.slots)
    before = [replace(slot) for slot in slots.values()], worker.state.counts.clone()
    wrong = SchedulerOutput(
        new=(loop.new(2, prompts()[1], 1),), running=(RunningRequest(1),), finished=(1,), num_tokens={2: 1}
    )
    with pytest.raises(ValueError, match="request 1 is running but not held"):
        worker.execute(wrong)
    assert worker.slots == slots
    assert [replace(slot) for slot in worker.slots.values()] == before[0]
    assert torch.equal(worker.state.counts, before[1])
    loop.step({1: 1})
