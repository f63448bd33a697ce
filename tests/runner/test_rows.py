"""The rows of a step built on the device from request state, against a builder on the host
(`host_rows.build_step`), and the one transfer a step by which that state changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import host_rows
import numpy as np
import pytest
import torch
from torch import Tensor

from dsv41.config import EngineConfig
from dsv41.model.caches import allocate_caches
from dsv41.model.inputs import AttnMetadata, StepInputs
from dsv41.model.layout import NULL_PAGE, OPEN_ROWS
from dsv41.runner.load import Model, blueprint, load
from dsv41.runner.request import SamplingParams
from dsv41.runner.rows import compute_rows, select_rows
from dsv41.runner.schedule import NewRequest, RunningRequest, SchedulerOutput
from dsv41.runner.state import IMAGE_BIT, IN_FLIGHT, Changes, RequestState, Staging
from dsv41.runner.stepper import Stepper
from dsv41.runner.worker import Prepared, Worker

PAGE_TOKENS = 4
MAX_REQUESTS, MAX_TOKENS = 5, 96
MAX_PAGES = MAX_TOKENS // PAGE_TOKENS
# How a request comes: "odd" is a replay that starts inside a pair, which a window of odd length brings about.
KINDS = ("cold", "image", "exact", "bounded", "odd")


@cache
def model(preset: str) -> Model:
    return load(blueprint(preset_name=preset, device="cpu", page_tokens=PAGE_TOKENS))


def row_fields(step: StepInputs) -> dict[str, Tensor]:
    """All tensors of a step by name, without its page table and tail."""
    found: dict[str, Tensor] = {}
    for source in (step, step.attention):
        for one in fields(source):
            value = getattr(source, one.name)
            if isinstance(value, dict):
                found |= {f"{one.name}[{ratio}]": part for ratio, part in value.items()}
            elif isinstance(value, Tensor) and one.name != "page_table":
                found[one.name] = value
    return found


def assert_equal(step: StepInputs, expected: StepInputs) -> None:
    mine, other = row_fields(step), row_fields(expected)
    assert mine.keys() == other.keys()
    for name, value in other.items():
        assert mine[name].dtype == value.dtype, name
        assert torch.equal(mine[name], value), name


def test_every_field_is_compared() -> None:
    """A field that `row_fields` does not see could be wrong everywhere."""
    worker = Traffic("tiny", 0)
    prepared, _ = worker.step()
    seen = {name.split("[")[0] for name in row_fields(prepared.step)}
    named = {one.name for one in (*fields(StepInputs), *fields(AttnMetadata))}
    assert named - seen <= {"attention", "page_table", "tail", "embeddings"}


@dataclass(eq=False)
class Held:
    """A request in the traffic: as the host's builder sees it, and what the worker was told."""

    number: int
    host: host_rows.Request
    num_prompt: int
    params: SamplingParams
    sent: int = 0  # page table entries

    @property
    def left(self) -> int:
        return len(self.host.tokens) - self.host.num_computed


class Traffic:
    """A worker under random requests: chunks, decode, forced tokens, images, prefix hits, ends, and pages in
    any order. The model itself never runs."""

    def __init__(self, preset: str, seed: int, decoder_replay: bool = False) -> None:
        self.model, self.draw = model(preset), random.Random(seed)
        self.config, self.window = self.model.config, self.model.config.window_tokens
        self.engine = EngineConfig(
            page_tokens=PAGE_TOKENS,
            max_requests=MAX_REQUESTS,
            max_context_tokens=MAX_TOKENS,
            decoder_replay=decoder_replay,
        )
        caches = allocate_caches(self.model.layout, 2, 2, MAX_REQUESTS, "cpu")
        self.worker = Worker(self.model, self.engine, caches, MAX_PAGES)
        self.held: list[Held] = []
        self.seen: set[str] = set()  # kinds of steps that came up
        self.free_pages = [list(range(1, 400)), list(range(400, 800))]
        for pages in self.free_pages:
            self.draw.shuffle(pages)
        self.num_requests = 0

    def tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(self.config.vocab_size) for _ in range(count)]

    def new(self) -> Held:
        """A request: cold, with a prefix hit of either kind, resumed after a preemption, or with images."""
        draw, length = self.draw, self.draw.randint(1, 70)
        host = host_rows.Request(self.tokens(length))
        num_prompt = draw.choice([length, draw.randint(1, length)])  # the rest was sampled before
        kind = KINDS[self.num_requests % len(KINDS)]
        host.hit_tokens = (length - 1) // PAGE_TOKENS * PAGE_TOKENS
        if kind == "exact":
            host.num_computed = host.hit_tokens
        elif kind in ("bounded", "odd") and host.hit_tokens > self.window:
            host.replay_start = host.num_computed = host.hit_tokens - self.window - (kind == "odd")
        else:
            host.hit_tokens = 0
        if kind == "image":
            host.image_rows = [draw.random() < 0.4 for _ in range(num_prompt)]
            host.embeddings = torch.randn(num_prompt, self.config.hidden_size)
        params = SamplingParams(prompt_logprobs=draw.choice([None, None, 0]))
        if self.engine.decoder_replay and params.prompt_logprobs is None:  # all its hidden rows are wanted
            host.tail_start = max(0, num_prompt - self.window)
        self.num_requests += 1
        return Held(self.num_requests, host, num_prompt, params)

    def reserve(self, host: host_rows.Request, count: int) -> None:
        """Pages up to the last row; window pages below the first row that is read are the null page."""
        first = max(host.replay_start, host.num_computed - self.window + 1) // PAGE_TOKENS
        for entry in range(len(host.pages), -(-(host.num_computed + count) // PAGE_TOKENS)):
            host.pages.append(self.free_pages[0].pop())
            host.window_pages.append(NULL_PAGE if entry < first else self.free_pages[1].pop())

    def step(self, num_rows: int | None = None) -> tuple[Prepared, list[tuple[host_rows.Request, int]]]:
        """The worker's next step, and the same requests in the order of its batch."""
        draw = self.draw
        ended = [one for one in self.held if draw.random() < 0.15 or len(one.host.tokens) > MAX_TOKENS - 4]
        self.held = [one for one in self.held if one not in ended]
        for one in ended:
            self.free_pages[0] += one.host.pages
            self.free_pages[1] += filter(None, one.host.window_pages)
        new = [self.new() for _ in range(draw.randint(not self.held, MAX_REQUESTS - len(self.held)))]
        chosen = draw.sample(self.held, draw.randint(0, len(self.held))) + new
        draw.shuffle(chosen)
        announced, running, counts = [], [], {}
        for one in chosen or self.held:
            forced: tuple[int, ...] = ()
            over_images = one.host.num_computed < len(one.host.image_rows)  # a forced token is a text token
            if one not in new and not over_images and (not one.left or draw.random() < 0.2):
                forced = tuple(self.tokens(draw.randint(1, 3)))
                one.host.tokens[one.host.num_computed :] = forced
            counts[one.number] = draw.choice([1, one.left, draw.randint(1, one.left)])
            self.reserve(one.host, counts[one.number])
            if one in new:
                announced.append(self._announce(one))
            else:
                pages = one.host.pages[one.sent :], one.host.window_pages[one.sent :]
                running.append(RunningRequest(one.number, tuple(pages[0]), tuple(pages[1]), forced))
            one.sent = len(one.host.pages)
        self.held += new
        output = SchedulerOutput(
            tuple(announced), tuple(running), tuple(one.number for one in ended), num_tokens=counts
        )
        prepared = self.worker.prepare(output, num_rows)
        assert prepared is not None
        by_number = {one.number: one.host for one in self.held}
        for number in counts:
            by_number[number].slot = self.worker.slots[number].index
        order = sorted(counts, key=lambda number: counts[number])
        self.seen |= {"chunk" for number in counts if counts[number] > 1}
        self.seen |= {"even start" if by_number[n].num_computed % 2 == 0 else "odd start" for n in counts}
        self.seen |= {"mixed" for number in counts if counts[number] > min(counts.values())}
        return prepared, [(by_number[number], counts[number]) for number in order]

    def _announce(self, one: Held) -> NewRequest:
        host = one.host
        return NewRequest(
            one.number,
            tuple(host.tokens),
            one.num_prompt,
            one.params,
            tuple(host.pages),
            tuple(host.window_pages),
            host.num_computed,
            host.hit_tokens,
            host.replay_start,
            tuple(host.image_rows) or None,
            host.embeddings,
        )

    def advance(self, prepared: Prepared, scheduled: Sequence[tuple[host_rows.Request, int]]) -> None:
        self.worker.advance(prepared)
        for host, count in scheduled:
            host.num_computed += count

    def expected(
        self, scheduled: Sequence[tuple[host_rows.Request, int]], num_rows: int | None = None
    ) -> StepInputs:
        return host_rows.build_step(
            scheduled,
            self.config,
            self.model.layout,
            max_requests=MAX_REQUESTS,
            max_pages=MAX_PAGES,
            num_rows=num_rows,
        )


@pytest.mark.parametrize("preset", ["tiny", "odd"])
@pytest.mark.parametrize("seed", range(6))
def test_rows_of_the_device_equal_rows_of_the_host(preset: str, seed: int) -> None:
    """Forty steps of random traffic. Catches a position counted from the chunk, a slot's last owner, a window
    below the start of a replay, a state written into shared pages, a partner across requests, a stale page,
    an image seen as text."""
    traffic = Traffic(preset, seed)
    for number in range(40):
        num_rows = None if number % 2 else MAX_REQUESTS * MAX_TOKENS
        prepared, scheduled = traffic.step(num_rows)
        expected = traffic.expected(scheduled, num_rows)
        assert prepared.step.tail is None
        assert_equal(prepared.step, expected)
        for host, _ in scheduled:
            own = prepared.step.attention.page_table[host.slot, : len(host.pages)]
            assert own.tolist() == host.pages
        assert prepared.step.attention.page_table.shape == (MAX_REQUESTS, MAX_PAGES)
        traffic.advance(prepared, scheduled)
        computed = traffic.worker.state.num_computed
        assert all(int(computed[host.slot]) == host.num_computed for host, _ in scheduled)
    assert traffic.num_requests > 4 * len(KINDS)
    assert traffic.seen == {"chunk", "mixed", "even start", "odd start"}


@pytest.mark.parametrize("preset", ["tiny", "odd"])
@pytest.mark.parametrize("seed", range(6))
def test_the_tail_of_a_step_equals_the_host_s(preset: str, seed: int) -> None:
    """Behind the last KV source: the rows from the tail's start on, publishing nothing, with a window that
    begins at the tail and never below the start of a replay."""
    traffic, tails = Traffic(preset, seed, decoder_replay=True), 0
    for _ in range(40):
        prepared, scheduled = traffic.step()
        assert_equal(replace(prepared.step, tail=None), traffic.expected(scheduled))
        rows, tail = host_rows.tail_rows(scheduled), prepared.step.tail
        assert prepared.batch.tail_rows.tolist() == rows
        behind = traffic.expected(host_rows.behind_the_last_source(scheduled))
        if tail is None:
            assert rows == list(range(prepared.step.num_rows))
            assert torch.equal(prepared.step.attention.window_read, behind.attention.window_read)
        else:
            tails += 1
            assert tail.rows.tolist() == rows
            assert_tail(tail.first, traffic.expected(scheduled), rows)
            assert_tail(tail.rest, behind, rows)
        traffic.advance(prepared, scheduled)
    assert tails > 5


NOTHING = ("state_write", "partner_row", "partner_slot", "open_slot")


def assert_tail(step: StepInputs, whole: StepInputs, rows: list[int]) -> None:
    """`step` has these rows of `whole`, and publishes nothing."""
    expected = row_fields(whole)
    for name, value in row_fields(step).items():
        if name.startswith(NOTHING):
            assert value.tolist() == [-1] * len(rows), name
        else:
            assert torch.equal(value, expected[name][rows]), name


# -- one request, by hand ---------------------------------------------------------------------------------


def state_of(
    tokens: Sequence[int], computed: int = 0, hit: int = 0, replay: int = 0, tail: int = 0
) -> RequestState:
    """Request slot 1 of three: its pages are 10, 11, ..., its window pages 30, 31, ..."""
    state = RequestState(3, MAX_TOKENS, MAX_PAGES, "cpu")
    state.tokens[1, : len(tokens)] = torch.tensor(tokens)
    state.page_table[1] = torch.arange(10, 10 + MAX_PAGES)
    state.window_table[1] = torch.arange(30, 30 + MAX_PAGES)
    state.counts[1] = torch.tensor([computed, hit, replay, tail])
    return state


def rows_of(state: RequestState, count: int) -> StepInputs:
    chosen = model("tiny")
    return compute_rows(state, torch.tensor([1]), torch.tensor([count]), count, chosen.config, chosen.layout)


def test_a_replay_writes_its_window_and_no_states() -> None:
    """A hit of 16 tokens whose last 8 are computed again: nothing is published below 16, the window begins at
    8, and row 8 has no partner though a token stands before it."""
    meta = rows_of(state_of(range(6, 30), computed=8, hit=16, replay=8), 16).attention
    assert (meta.state_write[1][:8] == -1).all()
    assert (meta.state_write[2][:8] == -1).all()
    assert meta.state_write[1][8:].tolist() == [4 * 14 + n for n in range(8)]
    assert meta.state_write[2][8:].tolist() == [-1, 28, -1, 29, -1, 30, -1, 31]
    assert meta.window_write.tolist() == [4 * 32 + n for n in range(16)]
    assert meta.window_read[0].tolist() == [128] + [-1] * 7
    assert meta.window_read[3].tolist() == [128, 129, 130, 131] + [-1] * 4
    assert meta.window_read[8].tolist() == list(range(129, 137))
    assert meta.num_states[1].tolist() == list(range(9, 25)), "the states of the hit are seen"
    assert (meta.partner_slot == -1).all()


@pytest.mark.parametrize(("replay", "slot"), [(0, OPEN_ROWS), (8, OPEN_ROWS), (9, -1)])
def test_the_first_row_of_a_replay_has_no_partner(replay: int, slot: int) -> None:
    """Row 9 closes the pair with row 8, if that was computed by this request in an earlier step."""
    meta = rows_of(state_of(range(6, 30), computed=9, replay=replay), 3).attention
    assert meta.partner_slot.tolist() == [slot, -1, -1]
    assert meta.partner_row.tolist() == [-1, -1, 1]


@pytest.mark.parametrize("count", [1, 2, OPEN_ROWS - 1, OPEN_ROWS, OPEN_ROWS + 1, 20])
@pytest.mark.parametrize("computed", [0, 1])
def test_the_last_rows_that_open_a_pair_are_kept(count: int, computed: int) -> None:
    """Each of the last OPEN_ROWS rows may turn out to be the last that counts. No two share a place."""
    meta = rows_of(state_of(range(6, 60), computed=computed), count).attention
    positions = range(computed, computed + count)
    kept = [p % 2 == 0 and p >= computed + count - OPEN_ROWS for p in positions]
    assert (meta.open_slot >= 0).tolist() == kept
    slots = meta.open_slot[meta.open_slot >= 0].tolist()
    assert len(set(slots)) == len(slots)
    assert set(slots) <= set(range(OPEN_ROWS, 2 * OPEN_ROWS))
    following = rows_of(state_of(range(6, 60), computed=computed + count), 1).attention
    if (computed + count) % 2:
        assert following.partner_slot.tolist() == [slots[-1]]


def test_images_are_marked_and_leave_no_history() -> None:
    tokens = [6, 7 | IMAGE_BIT, 8, 9, 10]
    step = rows_of(state_of(tokens), 5)
    assert step.token_ids.tolist() == [6, 7, 8, 9, 10]
    assert step.is_image.tolist() == [False, True, False, False, False]
    depth = step.lookback.shape[1]
    assert depth == 3
    assert step.lookback.tolist() == [[-1] * 3, [6, -1, -1], [-1, 6, -1], [8, -1, 6], [9, 8, -1]]


def test_a_stepper_s_chunks_keep_images_and_take_changed_tokens() -> None:
    """The tokens of a step may change until it is prepared; what is an image stays one."""
    config = EngineConfig(page_tokens=PAGE_TOKENS, max_requests=2, max_context_tokens=32)
    stepper = Stepper(model("tiny"), config)
    request = stepper.add(range(6, 16))
    request.image_rows = tuple(number in (1, 2, 5, 7) for number in range(10))
    request.embeddings = torch.randn(10, stepper.model.config.hidden_size)
    found = []
    for count in (2, 4, 3):
        step = stepper.prepare([(request, count)]).step
        assert_equal(stepper.prepare([(request, count)]).step, step)  # nothing is computed yet
        assert step.embeddings is not None
        found.append(step)
        stepper.step([(request, count)])
    images = torch.cat([step.is_image for step in found])
    assert images.tolist() == list(request.image_rows[:9])
    assert found[1].lookback[1].tolist() == [-1, -1, 6]
    request.tokens[9:] = [40, 41, 42]
    step = stepper.prepare([(request, 3)]).step
    assert step.token_ids.tolist() == [40, 41, 42]
    assert not step.is_image.any()
    assert step.lookback[2].tolist() == [41, 40, 14]


def test_padding_rows_name_nothing() -> None:
    """Request -1, slots -1, counts 0; the rows before them are untouched; an image's rows are padded too."""
    chosen, state = model("tiny"), state_of(range(6, 30))
    step = rows_of(state, 5)
    padded = compute_rows(state, torch.tensor([1]), torch.tensor([5]), 9, chosen.config, chosen.layout)
    assert padded.num_rows == 9
    for name, value in row_fields(padded).items():
        assert torch.equal(value[:5], row_fields(step)[name]), name
        zero = name in ("token_ids", "positions", "is_image") or name.startswith("num_states")
        assert (value[5:] == (0 if zero else -1)).all(), name
    assert padded.attention.page_table is step.attention.page_table


def test_a_bucket_that_is_too_small_changes_nothing() -> None:
    stepper = Stepper(model("tiny"), EngineConfig(page_tokens=PAGE_TOKENS, max_context_tokens=MAX_TOKENS))
    request = stepper.add(range(6, 30))
    step = stepper.prepare([(request, 5)]).step
    with pytest.raises(ValueError, match="a step of 5 rows does not fit a bucket of 4"):
        stepper.prepare([(request, 5)], 4)
    assert_equal(stepper.prepare([(request, 5)], 5).step, step)


def test_selected_rows_come_in_the_given_order() -> None:
    step, rows = rows_of(state_of(range(6, 30)), 7), [6, 0, 3]
    assert_tail(select_rows(step, torch.tensor(rows)), step, rows)
    assert select_rows(step, torch.tensor(rows)).attention.page_table is step.attention.page_table


# -- the transfer -----------------------------------------------------------------------------------------


def test_staging_rotates_and_never_mixes_steps() -> None:
    """A buffer is written again only when its step is IN_FLIGHT steps old, also when sizes grow and shrink.
    Catches one buffer for all steps, and a step that shows the next one's numbers."""
    staging, sent = Staging("cpu"), []
    for number, size in enumerate((3, 100, 0, 7, 1000, 1, 50, 2)):
        arrays = {
            "a": np.full(size, number, dtype=np.int64),
            "none": np.empty(0, dtype=np.int64),
            "b": np.arange(number, number + 2),
        }
        staged = staging.send(arrays)
        assert list(staged) == ["a", "none", "b"]
        assert all(tensor.dtype == torch.int64 for tensor in staged.values())
        buffer = staging._buffers[staging._turn]
        assert all(buffer is not other for *_, other in sent[-IN_FLIGHT:])
        sent.append((arrays, staged, buffer))
        for earlier, _, pinned in sent[-1 - IN_FLIGHT :]:  # bytes that may still be on their way
            whole = np.concatenate(list(earlier.values()))
            assert pinned.numpy()[: len(whole)].tolist() == whole.tolist()
    for arrays, staged, _ in sent:
        assert {name: value.tolist() for name, value in staged.items()} == {
            name: value.tolist() for name, value in arrays.items()
        }
    assert len({buffer.data_ptr() for *_, buffer in sent[-3:]}) == IN_FLIGHT + 1


def test_changes_are_applied_where_they_were_put_and_nowhere_else() -> None:
    state, changes = RequestState(3, 10, 4, "cpu"), Changes()
    assert changes.is_empty
    state.apply(Staging("cpu").send(changes.arrays()))  # nothing
    for tensor in (state.tokens, state.page_table, state.window_table, state.counts):
        assert not tensor.any()
        tensor.fill_(-5)
    changes.put("tokens", 1 * 10 + 2, np.array([3, 4 | IMAGE_BIT]))
    changes.put("tokens", 2 * 10, np.array([9]))
    changes.put("pages", 2 * 4 + 1, np.array([7, 8]))
    changes.put("window_pages", 0, np.array([6]))
    changes.put("counts", 1 * 4, np.array([1, 2, 3, 4]))
    assert not changes.is_empty
    state.apply(Staging("cpu").send(changes.arrays()))
    expected = torch.full((3, 10), -5)
    expected[1, 2], expected[1, 3], expected[2, 0] = 3, 4 | IMAGE_BIT, 9
    assert torch.equal(state.tokens.long(), expected)
    assert state.page_table.tolist() == [[-5] * 4, [-5] * 4, [-5, 7, 8, -5]]
    assert state.window_table.tolist() == [[6, -5, -5, -5], [-5] * 4, [-5] * 4]
    assert state.counts.tolist() == [[-5] * 4, [1, 2, 3, 4], [-5] * 4]
    assert state.num_computed.tolist() == [-5, 1, -5]
    state.num_computed[0] = 2
    assert state.counts[0].tolist() == [2, -5, -5, -5], "num_computed is a view"
