"""The sparse indexer: ties, visibility, candidates, pages, faults. Scores are integers, answers exact."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dsv41.ops.indexing import reference
from dsv41.ops.indexing.op import candidate_blocks, index_scores, select, top_k
from dsv41.ops.publish.op import publish_index_k

PAGE_STATES = 3
K = 8
IMPL = "reference"


def best(scores: Sequence[float], k: int) -> list[int]:
    """The rule in plain Python: highest score, then smaller index; ascending, then -1."""
    chosen = sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:k]
    return sorted(chosen) + [-1] * (k - len(chosen))


def best_blocks(scores: Sequence[float], num_blocks: int, size: int) -> list[int]:
    """The rule for candidate blocks: by maximum, the newest pinned, blocks of -inf alone dropped."""
    parts = [max(scores[start : start + size]) for start in range(0, len(scores), size)]
    parts[-1:] = [math.inf] if parts else []
    kept = [b for b in sorted(range(len(parts)), key=lambda b: (-parts[b], b)) if parts[b] > -math.inf]
    return sorted(kept[:num_blocks]) + [-1] * (num_blocks - len(kept))


class Pool:
    """Index keys of several requests on scattered pages. Whatever holds no key is NaN: the null page, pages
    of nobody, the tail of a last page, and what the page table names beyond a request's pages."""

    def __init__(self, keys: Sequence[Tensor], seed: int = 0) -> None:
        counts = [-(-len(own) // PAGE_STATES) for own in keys]
        draw = random.Random(seed)
        pages = draw.sample(range(1, sum(counts) + 6), sum(counts))
        self.cache = torch.full(
            (sum(counts) + 6, PAGE_STATES, keys[0].shape[1]), torch.nan, dtype=torch.bfloat16
        )
        self.table = torch.zeros((len(keys), max(counts) + 1), dtype=torch.int32)
        for number, own in enumerate(keys):
            mine = [pages.pop() for _ in range(counts[number])]
            self.table[number, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            for state, key in enumerate(own):
                self.cache[mine[state // PAGE_STATES], state % PAGE_STATES] = key

    def slot(self, request: int, state: int) -> int:
        return int(self.table[request, state // PAGE_STATES]) * PAGE_STATES + state % PAGE_STATES

    def select(
        self,
        rows: Sequence[tuple[int, int]],
        q: Tensor,
        weights: Tensor,
        candidates: Tensor | None = None,
        k: int = K,
        num_blocks: int = 0,
        block: int = 4,
    ) -> tuple[list[list[int]], list[list[int]], list[list[int]], list[bool]]:
        """`rows` are (request, visible states). -> selection, slots, blocks, faulty as lists."""
        if candidates is None:
            candidates = torch.empty((len(rows), 0), dtype=torch.int32)
        request, num_states = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
        chosen, slots, blocks, faulty = select(
            q, weights, self.cache, self.table, request, num_states, candidates,
            k, num_blocks, block, "rows_bf16", PAGE_STATES, False, IMPL,
        )  # fmt: skip
        return chosen.tolist(), slots.tolist(), blocks.tolist(), faulty.tolist()


def one_head(scores: Sequence[float]) -> Tensor:
    """Keys [S, 1] whose score is the given non-negative number under `ask`."""
    return torch.tensor(scores, dtype=torch.bfloat16).unsqueeze(1)


def ask(num_rows: int) -> tuple[Tensor, Tensor]:
    """A query of one head and one channel, weight 1: score = relu(key)."""
    return torch.ones(num_rows, 1, 1, dtype=torch.bfloat16), torch.ones(num_rows, 1, dtype=torch.bfloat16)


def integers(draw: random.Random, *shape: int) -> Tensor:
    count = math.prod(shape)
    return torch.tensor([draw.randint(-2, 2) for _ in range(count)], dtype=torch.bfloat16).view(shape)


def scores_by_hand(q: Tensor, weights: Tensor, keys: Tensor) -> list[float]:
    """One row: sum over heads of w relu(<q, key>)."""
    dots = [
        [max(sum(a * b for a, b in zip(head, key, strict=True)), 0) for key in keys.tolist()]
        for head in q.tolist()
    ]
    return [sum(w * dot[j] for w, dot in zip(weights.tolist(), dots, strict=True)) for j in range(len(keys))]


# -- top-k ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [K - 1, K, K + 1, 2 * K, 10 * K])
def test_ties_keep_the_smallest_indices(width: int) -> None:
    """After the ReLU most scores are equal. Catches a sort that is not stable, or that differs from run to
    run."""
    pool, expected = Pool([torch.zeros(width, 1)]), [*range(min(K, width))] + [-1] * (K - width)
    scores = torch.zeros(1, 10 * K)
    for _ in range(100):
        assert top_k(scores, torch.tensor([width]), K, IMPL).tolist() == [expected]
        assert pool.select([(0, width)], *ask(1))[0] == [expected]


def test_few_visible_states_are_all_chosen() -> None:
    """Scores of -inf among the visible lose to nothing: what lies beyond is worth less, even +inf and NaN.
    Catches a mask that is written into the scores."""
    scores = torch.tensor([[-math.inf, 1.0, -math.inf] + [math.inf, math.nan] * 5])
    assert top_k(scores, torch.tensor([3]), K, IMPL).tolist() == [[0, 1, 2] + [-1] * 5]
    assert top_k(scores, torch.tensor([3]), 2, IMPL).tolist() == [[0, 1]]
    pool = Pool([one_head([math.inf, 0.0, math.inf])])
    q, weights = ask(1)
    assert pool.select([(0, 3)], q, -weights)[0] == [[0, 1, 2] + [-1] * 5]
    assert pool.select([(0, 3)], q, -weights, k=2)[0] == [[0, 1]]


def test_nothing_visible_chooses_nothing() -> None:
    """A prompt of one token at ratio 2, and a padding row. Catches a count of 0 - 1."""
    pool = Pool([one_head([5.0] * 7)])
    chosen, slots, blocks, faulty = pool.select([(0, 0), (-1, 0), (0, 7)], *ask(3), num_blocks=2)
    for lists in (chosen, slots, blocks):
        assert all(set(row) == {-1} for row in lists[:2])
    assert chosen[2] == [*range(7), -1]
    assert faulty == [False] * 3


@pytest.mark.parametrize("seed", range(30))
def test_top_k_and_blocks_against_sorting(seed: int) -> None:
    """Random shapes; few distinct scores, so that ties cross the boundary; some -inf; rubbish beyond the
    visible."""
    draw = random.Random(seed)
    width, k, size, num_blocks = (
        draw.randint(1, 60),
        draw.randint(1, 20),
        draw.randint(1, 7),
        draw.randint(1, 9),
    )
    seen = [draw.randint(0, width) for _ in range(5)]
    rows = [[draw.choice([-math.inf, -1.0, 0.0, 0.0, 2.0]) for _ in range(count)] for count in seen]
    rubbish = [[draw.choice([math.inf, math.nan]) for _ in range(width - count)] for count in seen]
    scores = torch.tensor([row + rest for row, rest in zip(rows, rubbish, strict=True)])
    counts = torch.tensor(seen, dtype=torch.int32)
    assert top_k(scores, counts, k, IMPL).tolist() == [best(row, k) for row in rows]
    found = candidate_blocks(scores, counts, num_blocks, size, IMPL).tolist()
    assert found == [best_blocks(row, num_blocks, size) for row in rows]


# -- candidates -------------------------------------------------------------------------------------------


def test_newest_block_is_always_a_candidate() -> None:
    """It has the lowest score of all, then -inf, and still is in. Catches a pin on the last block of the
    buffer instead of the row's own newest."""
    scores = torch.arange(24.0, 0.0, -1.0).repeat(3, 1)
    seen = torch.tensor([24, 13, 12], dtype=torch.int32)
    assert candidate_blocks(scores, seen, 2, 4, IMPL).tolist() == [[0, 5], [0, 3], [0, 2]]
    scores[:, 4:] = -math.inf
    assert candidate_blocks(scores, seen, 3, 4, IMPL).tolist() == [[0, 5, -1], [0, 3, -1], [0, 2, -1]]


def test_candidates_change_nothing_while_they_hold_every_block() -> None:
    """Catches an off-by-one in the block count: the last, partly visible block must be inside."""
    draw = random.Random(1)
    for states in (1, 4, 13, 16):
        keys, q, weights = integers(draw, states, 4), integers(draw, 1, 3, 4), integers(draw, 1, 3)
        pool = Pool([keys])
        free, _, blocks, _ = pool.select([(0, states)], q, weights, k=5, num_blocks=4)
        inside = torch.tensor(blocks, dtype=torch.int32)
        assert pool.select([(0, states)], q, weights, inside, k=5)[0] == free


def test_selection_stays_inside_the_candidates() -> None:
    """The best scores lie outside and are not taken; changing what lies outside changes nothing."""
    scores = [9.0] * 24
    for state in (4, 5, 6, 7, 20, 21, 22, 23):
        scores[state] = 1.0
    blocks = torch.tensor([[1, 5, -1]], dtype=torch.int32)
    for outside in (9.0, 0.0, 512.0):
        keys = one_head([score if score == 1.0 else outside for score in scores])
        assert Pool([keys]).select([(0, 22)], *ask(1), blocks, k=7)[0] == [[4, 5, 6, 7, 20, 21, -1]]
        assert Pool([keys]).select([(0, 22)], *ask(1), k=7)[0] != [[4, 5, 6, 7, 20, 21, -1]]


# -- pages, rows, requests --------------------------------------------------------------------------------


def batch(seed: int) -> tuple[Pool, list[Tensor], list[tuple[int, int]], Tensor, Tensor]:
    """Rows of three requests and of padding, shuffled, each with a query of its own."""
    draw = random.Random(seed)
    keys = [integers(draw, draw.randint(1, 30), 4) for _ in range(3)]
    rows = [(r, draw.randint(0, len(keys[r]))) for r in (0, 1, 2) * 4] + [(r, len(keys[r])) for r in range(3)]
    rows += [(-1, 0)] * 3
    draw.shuffle(rows)
    return Pool(keys, seed), keys, rows, integers(draw, len(rows), 3, 4), integers(draw, len(rows), 3)


@pytest.mark.parametrize("seed", range(10))
def test_select_against_sorting(seed: int) -> None:
    """Scores, selection, slots and blocks of every row by hand, then again inside the blocks. Catches a wrong
    page, a neighbour's request, a NaN from the null page, and anything that follows a row's place."""
    pool, keys, rows, q, weights = batch(seed)
    k, num_blocks, size = 5, 3, 4
    chosen, slots, blocks, faulty = pool.select(rows, q, weights, k=k, num_blocks=num_blocks, block=size)
    inside = pool.select(rows, q, weights, torch.tensor(blocks, dtype=torch.int32), k=k, block=size)[0]
    request, seen = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
    scored = index_scores(
        q, weights, pool.cache, pool.table, request, seen, 40, "rows_bf16", PAGE_STATES, IMPL
    )
    assert not any(faulty)
    for row, (owner, count) in enumerate(rows):
        scores = scores_by_hand(q[row], weights[row], keys[owner][:count])
        assert scored[row].tolist() == scores + [-math.inf] * (40 - count)
        assert chosen[row] == best(scores, k)
        assert blocks[row] == best_blocks(scores, num_blocks, size)
        assert slots[row] == [-1 if state < 0 else pool.slot(owner, state) for state in chosen[row]]
        kept = [score if j // size in blocks[row] else None for j, score in enumerate(scores)]
        ranked = sorted((j for j in range(count) if kept[j] is not None), key=lambda j: (-scores[j], j))[:k]
        assert inside[row] == sorted(ranked) + [-1] * (k - len(ranked))


def test_some_batch_reaches_every_rule() -> None:
    """The random batches above do drop states and blocks, and the mask does change a selection."""
    dropped = masked = changed = 0
    for seed in range(10):
        pool, _, rows, q, weights = batch(seed)
        free, _, blocks, _ = pool.select(rows, q, weights, k=5, num_blocks=3)
        inside = pool.select(rows, q, weights, torch.tensor(blocks, dtype=torch.int32), k=5)[0]
        dropped += sum(count > 5 for _, count in rows)
        masked += sum(count > 12 for _, count in rows)
        changed += sum(a != b for a, b in zip(free, inside, strict=True))
    assert min(dropped, masked, changed) > 5


def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of one row against one tile of all. Catches state that leaks from tile to tile."""
    pool, _, rows, q, weights = batch(3)
    whole = pool.select(rows, q, weights, num_blocks=3)
    monkeypatch.setattr(reference, "TILE_BYTES", 1)
    assert pool.select(rows, q, weights, num_blocks=3) == whole


# -- faults -----------------------------------------------------------------------------------------------


def test_a_nan_key_is_reported_and_never_chosen() -> None:
    """State 2 of request 0 is NaN: rows that see it are faulty, rows that do not, and other requests, are as
    before. Catches NaN sorted first, and a fault spread over the batch."""
    sound = Pool([one_head([1.0] * 9), one_head([2.0] * 9)])
    sick = Pool([one_head([1.0, 1.0, math.nan] + [1.0] * 6), one_head([2.0] * 9)])
    rows = [(0, 9), (1, 9), (0, 2), (-1, 0), (0, 3)]
    before, after = (pool.select(rows, *ask(5), k=9, num_blocks=2) for pool in (sound, sick))
    assert before[3] == [False] * 5
    assert after[3] == [True, False, False, False, True]
    assert after[0][0] == [0, 1, 3, 4, 5, 6, 7, 8, -1]
    assert after[0][4] == [0, 1] + [-1] * 7
    for answers in range(3):
        for row in (1, 2, 3):
            assert after[answers][row] == before[answers][row]


def test_a_nan_query_is_a_fault_of_its_row_alone() -> None:
    pool, (q, weights) = Pool([one_head([1.0] * 9)]), ask(3)
    before = pool.select([(0, 9)] * 3, q, weights)
    q[1] = math.nan
    after = pool.select([(0, 9)] * 3, q, weights)
    assert after[3] == [False, True, False]
    assert after[0][1] == [-1] * K
    assert after[0][0] == after[0][2] == before[0][0]


def test_a_key_of_an_earlier_chunk_stays_selectable() -> None:
    """Three chunks publish their keys; the key that the third asks for came with the first. Catches a key
    cache that is overwritten, or scored, from the chunk's start only."""
    dim, states, planted, k = 8, 36, 5, 4
    keys = torch.zeros(states, dim, dtype=torch.bfloat16)
    keys[:, 1], keys[:, 2] = 1.0, torch.arange(states) % 5
    keys[planted] = 0.0
    keys[planted, 0] = 1.0
    cache = torch.full((states // PAGE_STATES + 1, PAGE_STATES, dim), torch.nan, dtype=torch.bfloat16)
    table = torch.arange(states // PAGE_STATES, 0, -1, dtype=torch.int32).unsqueeze(0)
    unturned = torch.cat((torch.ones(states, 1), torch.zeros(states, 1)), dim=1)
    slots = (
        table[0, torch.arange(states) // PAGE_STATES].long() * PAGE_STATES
        + torch.arange(states) % PAGE_STATES
    )
    norm, q, weights = (
        torch.ones(dim, dtype=torch.bfloat16),
        torch.zeros(1, 1, dim, dtype=torch.bfloat16),
        ask(1)[1],
    )
    q[0, 0, :2] = torch.tensor([4.0, 0.5])
    for start in (0, 12, 24):
        own = slice(start, start + 12)
        publish_index_k(
            keys[own], norm, unturned[own], slots[own], cache, "rows_bf16", PAGE_STATES, 1e-20, False, IMPL
        )
        request, seen = torch.zeros(1, dtype=torch.int32), torch.tensor([start + 12], dtype=torch.int32)
        none = torch.empty((1, 0), dtype=torch.int32)
        chosen = select(
            q, weights, cache, table, request, seen, none, k, 0, 4, "rows_bf16", PAGE_STATES, False, IMPL
        )[0][0]
        scores = index_scores(q, weights, cache, table, request, seen, states, "rows_bf16", PAGE_STATES, IMPL)
        assert int(scores.argmax()) == planted
        assert planted in chosen.tolist()
        assert len(chosen.unique()) == k < start + 12
