"""Compression: what a step pools, what it keeps open, and where the runner says a state stands."""

from __future__ import annotations

import random
from collections.abc import Sequence

import one_request
import pytest
import torch
from torch import Tensor

from dsv41.backends import Backends
from dsv41.model.inputs import StepInputs
from dsv41.model.layout import OPEN_ROWS, build_layout
from dsv41.model.plan import build_plan
from dsv41.model.rope import plain_frequencies, rotations, yarn_frequencies
from dsv41.ops.arithmetic import rms_norm
from dsv41.ops.compression.op import compress
from dsv41.presets import preset

DIM, EPS = 16, 1e-6
NORM = torch.linspace(0.5, 1.5, DIM).bfloat16()
NAN_SLOTS = torch.full((4 * OPEN_ROWS, 2 * DIM), torch.nan)


def projections(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, 2 * DIM, generator=torch.Generator().manual_seed(seed))


def pooled(first: Tensor, second: Tensor) -> Tensor:
    """The latent of one pair, from the equation."""
    kv, gate = torch.stack((first, second)).chunk(2, dim=-1)
    weight = gate.exp() / gate.exp().sum(0)
    return rms_norm((weight * kv).sum(0).bfloat16(), NORM, EPS)


Piece = tuple[int, int, int]  # request, first position, rows


def call(
    tokens: Sequence[Tensor],
    pieces: Sequence[Piece],
    open_groups: Tensor,
    seed: int | None = None,
    kept: int = 1,
) -> dict:
    """One step of these pieces, its rows shuffled if a seed is given; of each piece, the last `kept` rows
    stay for later. -> {(request, state): latent}"""
    rows = [(request, p) for request, start, count in pieces for p in range(start, start + count)]
    if seed is not None:
        random.Random(seed).shuffle(rows)
    last = {request: start + count - 1 for request, start, count in pieces}
    slot = {row: row[0] * OPEN_ROWS + row[1] % OPEN_ROWS for row in rows}
    partner = [(request, p - 1) for request, p in rows]
    here = [p % 2 == 1 and (request, p - 1) in rows for request, p in rows]
    latent = compress(
        torch.stack([tokens[request][p] for request, p in rows]),
        torch.tensor([p for _, p in rows]),
        torch.tensor([rows.index(mate) if near else -1 for mate, near in zip(partner, here, strict=True)]),
        torch.tensor(
            [
                request * OPEN_ROWS + (p - 1) % OPEN_ROWS if p % 2 == 1 and not near else -1
                for (request, p), near in zip(rows, here, strict=True)
            ]
        ),
        torch.tensor([slot[row] if row[1] % 2 == 0 and row[1] > last[row[0]] - kept else -1 for row in rows]),
        NORM,
        open_groups,
        2,
        EPS,
        torch.bfloat16,
        "reference",
    )
    for (_, p), value in zip(rows, latent, strict=True):
        assert p % 2 == 1 or not value.any(), "a row that closes nothing has a latent of zeros"
    return {(request, p // 2): value for (request, p), value in zip(rows, latent, strict=True) if p % 2 == 1}


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert torch.equal(value, b[key]), key


@pytest.mark.parametrize("kept", [1, OPEN_ROWS])
@pytest.mark.parametrize("length", range(1, 18))
def test_every_split_equals_one_shot(length: int, kept: int) -> None:
    """State j pools tokens 2j and 2j+1 and appears when both are there. Catches a pair that is cut by the
    call."""
    tokens = [projections(length)]
    whole = call(tokens, [(0, 0, length)], NAN_SLOTS.clone())
    assert sorted(whole) == [(0, j) for j in range(length // 2)]
    for (_, j), latent in whole.items():
        torch.testing.assert_close(
            latent, pooled(tokens[0][2 * j], tokens[0][2 * j + 1]), rtol=2**-7, atol=1e-3
        )
    for first in range(1, length):
        open_groups = NAN_SLOTS.clone()
        early = call(tokens, [(0, 0, first)], open_groups, kept=kept)
        assert len(early) == first // 2
        opens = [p for p in range(max(0, first - kept), first) if p % 2 == 0]
        assert int(open_groups.isfinite().any(1).sum()) == len(opens)
        assert_same(early | call(tokens, [(0, first, length - first)], open_groups, kept=kept), whole)


@pytest.mark.parametrize("seed", range(10))
def test_interleaved_requests_in_any_row_order(seed: int) -> None:
    """Three requests in chunks of their own, rows shuffled, requests missing from some calls. Catches a
    partner taken from the row before, and an open group kept by the row in the batch."""
    draw = random.Random(seed)
    tokens = [projections(17, 10 * seed + request) for request in range(3)]
    whole = [call(tokens, [(request, 0, 17)], NAN_SLOTS.clone()) for request in range(3)]
    open_groups, done, found = NAN_SLOTS.clone(), [0, 0, 0], {}
    while min(done) < 17:
        pieces = [(r, done[r], min(draw.randint(1, 4), 17 - done[r])) for r in range(3) if done[r] < 17]
        pieces = draw.sample(pieces, draw.randint(1, len(pieces)))
        found |= call(tokens, pieces, open_groups, seed=draw.randint(0, 99))
        for request, start, count in pieces:
            done[request] = start + count
    assert_same(found, whole[0] | whole[1] | whole[2])


def test_only_the_own_open_slot_changes() -> None:
    """Requests 0 and 2 leave a pair open beside request 1's. Catches a write to slot -1, i.e. to the last
    slot."""
    tokens = [projections(9, seed) for seed in range(3)]
    open_groups = NAN_SLOTS.clone()
    call(tokens, [(1, 0, 3)], open_groups)
    call(tokens, [(0, 0, 5), (2, 0, 7)], open_groups)
    kept = {0 * OPEN_ROWS + 4: tokens[0][4], OPEN_ROWS + 2: tokens[1][2], 2 * OPEN_ROWS + 6: tokens[2][6]}
    for slot, row in enumerate(open_groups):
        assert torch.equal(row, kept[slot]) if slot in kept else row.isnan().all()


def test_a_pair_may_close_where_another_opens() -> None:
    """One call reads the slot that it also writes, and reads first: position 8 is kept where 0 was."""
    tokens = [projections(9)]
    open_groups = NAN_SLOTS.clone()
    call(tokens, [(0, 0, 1)], open_groups)
    found = call(tokens, [(0, 1, 8)], open_groups, seed=4)
    assert_same(found, {k: v for k, v in call(tokens, [(0, 0, 9)], NAN_SLOTS.clone()).items() if k[1] < 4})
    assert torch.equal(open_groups[0], tokens[0][8])


def test_ratio_1_is_a_norm_of_every_row() -> None:
    kv = projections(5)[:, :DIM]
    none, empty = torch.full((5,), -1), torch.empty(0, 0)
    latent = compress(kv, torch.arange(5), none, none, none, NORM, empty, 1, EPS, torch.bfloat16, "reference")
    assert torch.equal(latent, rms_norm(kv.bfloat16(), NORM, EPS))


# -- where the runner puts states -------------------------------------------------------------------------

PAGE = 4


def step_of(name: str, chunks: Sequence[int]) -> list[StepInputs]:
    """The steps of the request in slot 1, fed in chunks."""
    config = preset(name)
    rows = Backends(window_record="rows_bf16", state_record="rows_bf16", index_record="rows_bf16")
    layout = build_layout(config, build_plan(config), rows, PAGE)
    return one_request.steps(range(6, 6 + sum(chunks)), chunks, config, layout, slot=1)


@pytest.mark.parametrize("name", ["tiny", "odd"])
@pytest.mark.parametrize("first", range(1, 17))
def test_states_are_visible_once_complete(name: str, first: int) -> None:
    """Row p sees state j iff (j+1)*ratio <= p+1, writes state j iff it closes it, and turns it by j*ratio.
    Catches counts from the chunk's start, an incomplete state shown, a state rotated at its last token."""
    steps = step_of(name, [first, 17 - first])
    config = preset(name)
    plain, yarn = plain_frequencies(config.rope_dim, config.rope_theta), yarn_frequencies(config)
    everywhere = rotations(torch.arange(17), plain, yarn, (1, 2))
    written: dict[int, list[int]] = {1: [], 2: []}
    for step in steps:
        turns = rotations(step.positions, plain, yarn, (1, 2))
        for row, p in enumerate(step.positions.tolist()):
            for ratio in (1, 2):
                seen = sum((j + 1) * ratio <= p + 1 for j in range(17))
                assert int(step.attention.num_states[ratio][row]) == seen
                slot = int(step.attention.state_write[ratio][row])
                assert (slot >= 0) == ((p + 1) % ratio == 0)
                if slot >= 0:
                    page, states = int(step.attention.page_table[1, p // PAGE]), PAGE // ratio
                    j = p // ratio
                    assert slot == page * states + j % states
                    assert torch.equal(turns.group[ratio][row], everywhere.compressed[j * ratio])
                    written[ratio].append(slot)
    assert {ratio: len(set(slots)) for ratio, slots in written.items()} == {1: 17, 2: 8}


def test_one_token_has_no_state_of_two() -> None:
    """And keeps its row: the second token closes the pair from the open group."""
    first, second = step_of("tiny", [1, 1])
    assert first.attention.num_states[2].tolist() == [0]
    assert first.attention.state_write[2].tolist() == [-1]
    assert first.attention.open_slot.tolist() == second.attention.partner_slot.tolist() == [OPEN_ROWS]
    assert second.attention.num_states[2].tolist() == [1]
