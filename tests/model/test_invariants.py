"""What must hold bit for bit on the reference backend, whatever the numbers are.

The truth of a prompt is its one-shot: alone in a worker, all rows in one step. Caches start as 0xFF bytes,
which is NaN in every float format and in every scale, so a read of what nobody wrote cannot
pass unseen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from dsv41.config import EngineConfig
from dsv41.model.caches import KVCaches
from dsv41.model.inputs import StepInputs, StepOutput
from dsv41.model.layout import OPEN_ROWS
from dsv41.ops import records
from dsv41.runner.load import Model, blueprint, load
from dsv41.runner.stepper import HandRequest, Stepper
from dsv41.runner.worker import Prepared

PAGE_TOKENS = 4  # smaller than every window: pages are crossed, and given back, all the time
PACKED = "cpu,window_record=scaled_528{0},state_record=nvfp4_288{0},index_record=mxfp4_68"
VENDOR = "cpu,window_record=mixed_584,state_record=mixed_584,index_record=fp8_132"

Feeds = list[list[int]]  # the rows of every call, for every request


@cache
def model(preset: str, numerics: str = "bf16", backends: str | None = None) -> Model:
    plan = blueprint(
        preset_name=preset, numerics=numerics, device="cpu", backends=backends, page_tokens=PAGE_TOKENS
    )
    return load(plan)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, 370, (num_tokens,), generator=generator).tolist()


class Session:
    """One worker with a request per prompt; `feed` computes the next rows of some of them."""

    def __init__(self, chosen: Model, prompts: Sequence[Sequence[int]], spare_requests: int = 0) -> None:
        config = EngineConfig(
            page_tokens=PAGE_TOKENS,
            max_requests=len(prompts) + spare_requests,
            max_context_tokens=max(map(len, prompts)) + 1,
        )
        self.stepper = Stepper(chosen, config)
        self.caches = self.stepper.caches
        for tensor in self.caches.tensors():
            tensor.view(torch.uint8).fill_(0xFF)
        self.requests: list[HandRequest] = []
        self.slots: dict[int, int] = {}  # of every request that ever ran
        self.hidden: list[Tensor] = []  # of every request, all rows so far
        self.last: Prepared | None = None
        for tokens in prompts:
            self.add(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        self.requests.append(self.stepper.add(tokens))
        self.hidden.append(torch.empty(0))

    def drop(self, number: int) -> None:
        self.stepper.drop(self.requests[number])

    def prepare(self, counts: Sequence[tuple[int, int]], num_rows: int | None = None) -> Prepared:
        scheduled = [(self.requests[number], count) for number, count in counts]
        self.last = self.stepper.prepare(scheduled, num_rows)
        for number, _ in counts:
            self.slots[number] = self.stepper.worker.slots[self.requests[number].request_id].index
        return self.last

    @torch.inference_mode()
    def run(self, step: StepInputs, caches: KVCaches | None = None) -> StepOutput:
        return self.stepper.worker.run(step, caches or self.caches)

    def feed(self, counts: Sequence[tuple[int, int]], in_order: bool = False) -> None:
        """The next `count` rows of request `number`, for every (number, count). The worker orders its batch
        by count; with `in_order`, the rows come in the order of `counts` instead."""
        prepared = self.prepare(counts)
        by_count = sorted(range(len(counts)), key=lambda i: counts[i][1])
        assert prepared.batch.counts.tolist() == [counts[i][1] for i in by_count]
        parts = list(torch.arange(prepared.step.num_rows).split(prepared.batch.counts.tolist()))
        rows = [parts[by_count.index(i)] for i in range(len(counts))]  # of the step, by entry of `counts`
        if in_order:
            hidden = self.run(permuted(prepared.step, torch.cat(rows))).hidden
            found = hidden.split([count for _, count in counts])
        else:
            hidden = self.run(prepared.step).hidden
            found = [hidden[own] for own in rows]
        self.stepper.worker.advance(prepared)
        for (number, count), part in zip(counts, found, strict=True):
            self.requests[number].num_computed += count
            self.hidden[number] = torch.cat((self.hidden[number].to(part.dtype), part))

    def feed_all(self, feeds: Feeds) -> None:
        """Call i computes entry i of every request's list: all in one batch."""
        for call in range(max(map(len, feeds))):
            self.feed([(number, sizes[call]) for number, sizes in enumerate(feeds) if call < len(sizes)])

    def places(self, pages: Sequence[int], states: range, page_states: int) -> Tensor:
        places = [pages[state // page_states] * page_states + state % page_states for state in states]
        return torch.tensor(places, dtype=torch.int64)

    def stored(self, number: int) -> dict[str, tuple[int, Tensor]]:
        """Every cached value that a later step may read: name -> (first position or state, rows)."""
        request, caches, chosen = self.requests[number], self.caches, self.stepper.model
        config, backends, done = chosen.config, chosen.backends, request.num_computed
        dtype = chosen.decoder.context.dtype
        pages = request.pages
        held = next((i for i, page in enumerate(pages.window_pages) if page), 0) * PAGE_TOKENS
        slots = self.places(pages.window_pages, range(held, done), PAGE_TOKENS)
        found = {}
        for layer, tensor in caches.window.items():
            rows = records.read_slots(
                backends.window_record, tensor, slots, PAGE_TOKENS, config.head_dim, config.rope_dim, dtype
            )
            found[f"window {layer}"] = held, rows
        for name, group, record, dim, rope_dim in (
            ("states", caches.states, backends.state_record, config.head_dim, config.rope_dim),
            ("index_k", caches.index_k, backends.index_record, config.index_dim, 0),
        ):
            for layer, tensor in group.items():
                ratio = config.ratios[layer]
                page_states = PAGE_TOKENS // ratio
                slots = self.places(pages.global_pages, range(done // ratio), page_states)
                rows = records.read_slots(record, tensor, slots, page_states, dim, rope_dim, dtype)
                found[f"{name} {layer}"] = 0, rows
        return found

    def own_bytes(self, number: int) -> list[Tensor]:
        """Copies of all bytes of the request's pages and open groups."""
        pages, caches = self.requests[number].pages, self.caches
        window = [page for page in pages.window_pages if page]
        copies = [tensor[window] for tensor in caches.window.values()]
        copies += [
            tensor[pages.global_pages]
            for group in (caches.states, caches.index_k)
            for tensor in group.values()
        ]
        first = self.slots[number] * OPEN_ROWS
        copies += [tensor[first : first + OPEN_ROWS] for tensor in caches.open_groups.values()]
        return [as_bytes(copy) for copy in copies]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).clone()


def one_shot(chosen: Model, tokens: Sequence[int]) -> Session:
    session = Session(chosen, [tokens])
    session.feed([(0, len(tokens))])
    return session


def assert_same(session: Session, number: int, truth: Session) -> None:
    """Request `number` has seen a prefix of the truth's prompt: equal hidden rows, logits, cached values."""
    decoder, done = session.stepper.model.decoder, session.requests[number].num_computed
    hidden, expected = session.hidden[number], truth.hidden[0][:done]
    assert torch.equal(hidden, expected)
    assert torch.equal(decoder.logits(hidden[-1:]), decoder.logits(truth.hidden[0])[done - 1 : done])
    wanted = truth.stored(0)
    for name, (first, rows) in session.stored(number).items():
        assert torch.equal(rows, wanted[name][1][first : first + len(rows)]), name


def assert_reaches_everything(truth: Session) -> None:
    """Compressed rows exist at both ratios, top-k drops some, the candidate mask removes blocks that a later
    layer would score, the window has moved on, and Engram reads different rows for different tokens."""
    chosen, done = truth.stepper.model, truth.requests[0].num_computed
    config = chosen.config
    for ratio in (1, 2):
        assert done // ratio > config.index_topk
    assert done > config.window_tokens
    assert done > config.candidate_blocks * config.candidate_block_states
    assert any(plan.reads_candidates for plan in chosen.plan)
    assert truth.last is not None
    step = truth.last.step  # the only one
    assert step.num_rows == done
    tables = [layer.engram for layer in chosen.decoder.layers if layer.engram is not None]
    assert tables
    for table in tables:
        assert len(table.hash(step, chosen.decoder.token_map).unique(dim=0)) > done // 2


# -- chunks -----------------------------------------------------------------------------------------------


def two_calls(window: int) -> Feeds:
    """Every length up to three windows, every split."""
    lengths = range(1, 3 * window + 1)
    return [[first, length - first] for length in lengths for first in range(1, length)] + [
        [n] for n in lengths
    ]


def three_calls(window: int) -> Feeds:
    draw = random.Random(3)
    cuts = [sorted(draw.sample(range(1, 3 * window), 2)) for _ in range(20)]
    return [[a, b - a, 3 * window - b] for a, b in cuts]


def forty_then_decode(window: int) -> Feeds:
    """A prompt of forty tokens split at every point, then decoded one by one."""
    return [[first, 40 - first, *[1] * 6] for first in range(1, 40)]


def one_by_one(window: int) -> Feeds:
    return [[1] * (3 * window)]


def assert_chunks_equal_one_shot(chosen: Model, feeds: Feeds) -> None:
    tokens = prompt(max(map(sum, feeds)))
    truth = one_shot(chosen, tokens)
    assert_reaches_everything(truth)
    session = Session(chosen, [tokens[: sum(sizes)] for sizes in feeds])
    session.feed_all(feeds)
    for number in range(len(feeds)):
        assert_same(session, number, truth)


@pytest.mark.parametrize("feeds", [two_calls, three_calls, forty_then_decode, one_by_one])
@pytest.mark.parametrize(
    ("preset", "numerics"), [("tiny", "bf16"), ("odd", "bf16"), ("tiny", "fp32-noquant")]
)
def test_chunks_equal_one_shot(preset: str, numerics: str, feeds: Callable[[int], Feeds]) -> None:
    """Catches state that depends on where a call began: window rows, open pairs, visible counts, lookback,
    positions counted from the chunk. The truth is alone and longer, so it also shows decode that differs
    from prefill."""
    chosen = model(preset, numerics)
    assert_chunks_equal_one_shot(chosen, feeds(chosen.config.window_tokens))


def test_chunks_equal_one_shot_in_vendor_records() -> None:
    """`mixed_584` and `fp8_132` need the real widths, hence the `kernel` preset and few lengths."""
    chosen = model("kernel", backends=VENDOR)
    assert_chunks_equal_one_shot(chosen, [[first, 140 - first] for first in (1, 127, 139)])


@pytest.mark.parametrize("suffix", ["", "_split"])
@pytest.mark.parametrize("preset", ["tiny", "odd"])
def test_packed_records_equal_plain_rows(preset: str, suffix: str) -> None:
    """Plain rows hold what the release would have quantised, after the round trip; every such value is a few
    bits times a power of two (or an e4m3 scale), exact in bf16. So the bytes may change and no result may.
    Catches a record that quantises twice, or an address that is right in one placement only."""
    plain, packed = model(preset), model(preset, backends=PACKED.format(suffix))
    truth = one_shot(plain, prompt(3 * plain.config.window_tokens))
    assert_reaches_everything(truth)
    session = Session(packed, [prompt(len(truth.hidden[0]))])
    assert all(
        tensor.dtype == torch.uint8
        for group in (session.caches.window, session.caches.states, session.caches.index_k)
        for tensor in group.values()
    )
    session.feed_all([[13, len(truth.hidden[0]) - 14, 1]])
    assert_same(session, 0, truth)


# -- company ----------------------------------------------------------------------------------------------

# (prompt length, rows of an earlier call): fresh, resumed on even and odd positions, decode rows, one token
COMPANY = ((29, 0), (31, 10), (40, 17), (38, 37), (33, 32), (1, 0), (7, 6))


@cache
def truths(preset: str) -> list[Session]:
    found = [one_shot(model(preset), prompt(length, seed)) for seed, (length, _) in enumerate(COMPANY)]
    assert len({tuple(truth.hidden[0][0].tolist()) for truth in found}) == len(COMPANY), (
        "equal prompts hide a mix-up"
    )
    assert_reaches_everything(max(found, key=lambda truth: len(truth.hidden[0])))
    return found


def company(preset: str, order: Sequence[int] = range(7)) -> tuple[Session, list[tuple[int, int]]]:
    """A session before a step that mixes all kinds of rows, and that step; requests come in `order`."""
    session = Session(model(preset), [prompt(length, seed) for seed, (length, _) in enumerate(COMPANY)])
    session.feed([(number, COMPANY[number][1]) for number in order if COMPANY[number][1]])
    return session, [(number, COMPANY[number][0] - COMPANY[number][1]) for number in order]


def permuted(step: StepInputs, order: Tensor) -> StepInputs:
    """The same rows in another order: row i of the result is row `order[i]`."""
    meta, new_row = step.attention, order.argsort()
    partner = meta.partner_row[order]
    attention = replace(
        meta,
        row_request=meta.row_request[order],
        window_write=meta.window_write[order],
        window_read=meta.window_read[order],
        state_write={ratio: slots[order] for ratio, slots in meta.state_write.items()},
        num_states={ratio: counts[order] for ratio, counts in meta.num_states.items()},
        partner_row=torch.where(partner < 0, -1, new_row[partner.clamp(min=0)]),
        partner_slot=meta.partner_slot[order],
        open_slot=meta.open_slot[order],
    )
    return replace(
        step,
        token_ids=step.token_ids[order],
        positions=step.positions[order],
        is_image=step.is_image[order],
        lookback=step.lookback[order],
        attention=attention,
    )


def copied(caches: KVCaches) -> KVCaches:
    groups = (caches.window, caches.states, caches.index_k, caches.open_groups)
    cloned = [{layer: tensor.clone() for layer, tensor in group.items()} for group in groups]
    return KVCaches(*cloned, caches.tickets.clone())


def assert_same_caches(a: KVCaches, b: KVCaches) -> None:
    for mine, other in zip(a.tensors(), b.tensors(), strict=True):
        assert torch.equal(as_bytes(mine), as_bytes(other))


@pytest.mark.parametrize("preset", ["tiny", "odd"])
def test_company_and_request_order_do_not_matter(preset: str) -> None:
    """Every request of a mixed batch, in three orders, equals itself alone: admitted in that order, then in
    the worker's order of a step and in the given one. Catches rows that read a neighbour's pages, and results
    that follow the number of rows."""
    for order in (range(7), range(6, -1, -1), (3, 0, 5, 2, 6, 1, 4)):
        for in_order in (False, True):
            session, counts = company(preset, order)
            session.feed(counts, in_order)
            assert len(set(session.slots.values())) == len(COMPANY)
            for number, truth in enumerate(truths(preset)):
                assert_same(session, number, truth)


@pytest.mark.parametrize("preset", ["tiny", "odd"])
def test_row_order_does_not_matter(preset: str) -> None:
    """Catches code that takes a row's place for its position, or its neighbour for its partner."""
    session, counts = company(preset)
    step = session.prepare(counts).step
    assert bool((step.attention.partner_row >= 0).any())
    assert bool((step.attention.partner_slot >= 0).any())
    before = copied(session.caches)
    output = session.run(step)
    for seed in range(3):
        order = torch.randperm(step.num_rows, generator=torch.Generator().manual_seed(seed))
        caches = copied(before)
        shuffled = session.run(permuted(step, order), caches)
        assert torch.equal(shuffled.hidden, output.hidden[order])
        assert_same_caches(caches, session.caches)


@pytest.mark.parametrize("preset", ["tiny", "odd"])
@torch.inference_mode()
def test_padding_does_nothing(preset: str) -> None:
    """A bucket's padding rows carry hostile tokens, positions and history; only their request, slots and
    counts say that they are padding. Catches a padding row that writes, that is counted, or that disturbs
    a live row."""
    session, counts = company(preset)
    exact, rows = session.prepare(counts).step, 128
    live, meta = exact.num_rows, exact.attention
    assert live < rows
    step = session.prepare(counts, rows).step
    assert step.num_rows == rows
    step.token_ids[live:] = session.stepper.model.config.vocab_size - 1
    step.positions[live:] = torch.arange(rows - live) * 1001
    step.is_image[live::2] = True
    step.lookback[live:] = 7
    assert step.attention.page_table is meta.page_table
    before = copied(session.caches)
    padded = session.run(step)
    caches = copied(before)
    alone = session.run(exact, caches)
    assert torch.equal(padded.hidden[:live], alone.hidden)
    assert torch.equal(padded.fault_layer[:live], alone.fault_layer)
    assert_same_caches(caches, session.caches)


@pytest.mark.parametrize("preset", ["tiny", "odd"])
def test_only_own_pages_are_written(preset: str) -> None:
    """A request that sits still keeps every byte while others come, run and go; pages in nobody's hands, the
    null page first of all, keep their poison. Catches a write through slot -1, a stale page table, a row
    past the end."""
    session = Session(model(preset), [prompt(33, 0), prompt(40, 1), prompt(27, 2)], spare_requests=1)
    states: set[int] = set()
    window: set[int] = set()

    def feed(*counts: tuple[int, int]) -> None:
        session.feed(counts)
        for request in session.requests:
            states.update(request.pages.global_pages)
            window.update(request.pages.window_pages)

    feed((0, 21), (1, 8))
    still = session.own_bytes(0)
    assert all((part != 0xFF).any() for part in still)
    feed((2, 27), (1, 9))
    session.drop(1)
    session.add(prompt(30, 3))
    feed((3, 30))
    for before, now in zip(still, session.own_bytes(0), strict=True):
        assert torch.equal(before, now)
    feed((0, 12))
    assert_same(session, 0, one_shot(model(preset), prompt(33, 0)))

    caches = session.caches
    for group, used in ((caches.states, states), (caches.index_k, states), (caches.window, window)):
        for tensor in group.values():
            unused = sorted(set(range(len(tensor))) - used | {0})
            assert len(unused) > 1
            assert bool((as_bytes(tensor[unused]) == 0xFF).all())
    assert set(session.slots.values()) == {0, 1, 2}
    assert session.slots[3] == session.slots[1]
    for rows in caches.open_groups.values():
        assert bool((as_bytes(rows[3 * OPEN_ROWS :]) == 0xFF).all())


@pytest.mark.parametrize("preset", ["tiny", "odd"])
def test_open_groups_follow_the_request(preset: str) -> None:
    """[A, B, C] with odd lengths; B ends; the next steps run [C, A], then D in B's place. Catches open-group
    state that is kept by the row in the batch, or inherited from the slot's last owner."""
    whole = [prompt(30, seed) for seed in range(4)]
    session = Session(model(preset), whole[:3])
    session.feed([(0, 17), (1, 9), (2, 21)])
    assert session.slots == {0: 0, 1: 1, 2: 2}
    for group in session.caches.open_groups.values():
        held = group.split(OPEN_ROWS)[:3]
        assert all(rows.isfinite().any() for rows in held), "every request left a pair open"
    session.drop(1)
    session.feed([(2, 1), (0, 2)])
    session.add(whole[3])
    for _ in range(3):
        session.feed([(3, 3), (2, 1), (0, 1)])
    assert session.slots[3] == session.slots[1]
    for number in (0, 2, 3):
        assert_same(session, number, one_shot(model(preset), whole[number]))
