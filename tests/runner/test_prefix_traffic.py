"""Prefix reuse under traffic, over a memory that knows what every row should hold."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsv41.model.layout import NULL_PAGE
from dsv41.runner.block_table import RequestPages, admit
from dsv41.runner.pages import PagePool
from dsv41.runner.prefix import Mode, PrefixCache, extend_keys, page_keys


def make_cache(
    mode: Mode,
    num_global: int = 40,
    num_window: int = 40,
    page_tokens: int = 4,
    window_tokens: int = 6,
    pool: Callable[[int], PagePool] = PagePool,
) -> PrefixCache:
    return PrefixCache(pool(1 + num_global), pool(1 + num_window), page_tokens, window_tokens, mode)


class World:
    """Requests over a memory in which every row holds the tokens that it was computed from."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache, self.states, self.window = cache, {}, {}
        self.running: list[tuple[RequestPages, list[int], list[bytes]]] = []
        self.computed: dict[RequestPages, int] = {}
        self.refused = 0

    def counts(self) -> list[object]:
        pools = self.cache.global_pool, self.cache.window_pool
        stats = replace(self.cache.stats)
        return [stats, *((pool.num_free, pool.num_used, pool.num_cached, pool.evictions) for pool in pools)]

    def start(self, tokens: list[int], max_step_tokens: int) -> RequestPages | None:
        keys, before = page_keys(tokens, self.cache.page_tokens), self.counts()
        try:
            pages = admit(self.cache, keys, len(tokens), max_step_tokens)
        except MemoryError:
            assert self.counts() == before
            self.refused += 1
            return None
        assert pages.hit.num_computed < len(tokens)
        self.running.append((pages, tokens, keys))
        self.computed[pages] = pages.hit.num_computed
        return pages

    def advance(self, number: int, count: int) -> None:
        """Compute up to `count` tokens; at the end of its tokens a request samples one."""
        pages, tokens, keys = self.running[number]
        start, size = self.computed[pages], self.cache.page_tokens
        end = min(start + count, len(tokens))
        before = self.counts()
        try:
            pages.reserve(start, end - start)
        except MemoryError:
            assert self.counts() == before
            self.refused += 1
            return
        for row in range(start, end):
            place, value = (row // size, row % size), tuple(tokens[: row + 1])
            self.write(self.window, self.cache.window_pool, pages.window_pages, place, value)
            if row >= pages.hit.length:
                self.write(self.states, self.cache.global_pool, pages.global_pages, place, value)
            first_kept = pages.hit.first_kept(row, self.cache.window_tokens)
            self.read(self.window, pages.window_pages, tokens, first_kept, row)
            self.read(self.states, pages.global_pages, tokens, 0, row)
        self.computed[pages] = end
        pages.commit(keys, end)
        if end == len(tokens):
            tokens.append(end % 2)
            extend_keys(keys, tokens, size)

    def write(
        self, memory: dict, pool: PagePool, table: list[int], place: tuple[int, int], value: tuple
    ) -> None:
        page, offset = table[place[0]], place[1]
        assert page != NULL_PAGE, "a row without a page"
        assert pool.references(page) == 1, "a shared page is written"
        assert page not in pool._key_of, "a cached page is written"
        memory[page, offset] = value

    def read(self, memory: dict, table: list[int], tokens: list[int], first: int, last: int) -> None:
        for row in range(first, last + 1):
            page, offset = table[row // self.cache.page_tokens], row % self.cache.page_tokens
            assert page != NULL_PAGE, "a dropped row is read"
            assert memory[page, offset] == tuple(tokens[: row + 1]), "a row holds another prefix"

    def stop(self, number: int) -> None:
        pages, _, _ = self.running.pop(number)
        del self.computed[pages]
        pages.release()

    def check(self) -> None:
        tables = [pages for pages, _, _ in self.running]
        self.cache.global_pool.check_integrity(Counter(page for t in tables for page in t.global_pages))
        window = Counter(page for t in tables for page in t.window_pages)
        del window[NULL_PAGE]
        self.cache.window_pool.check_integrity(window)

    def drain(self) -> None:
        while self.running:
            self.stop(0)
        self.check()
        assert self.cache.global_pool.num_used == self.cache.window_pool.num_used == 0


class Traffic(RuleBasedStateMachine):
    mode: Mode = "off"

    def __init__(self) -> None:
        super().__init__()
        self.world = World(make_cache(self.mode, num_global=16, num_window=9))

    @rule(
        family=st.integers(0, 1),
        shared=st.integers(1, 24),
        own=st.lists(st.integers(0, 3), max_size=24),
        step=st.integers(1, 20),
    )
    def start(self, family: int, shared: int, own: list[int], step: int) -> None:
        self.world.start([family] * shared + own, step)

    @precondition(lambda self: self.world.running)
    @rule(choice=st.integers(0, 99), count=st.integers(1, 24))
    def advance(self, choice: int, count: int) -> None:
        self.world.advance(choice % len(self.world.running), count)

    @precondition(lambda self: self.world.running)
    @rule(choice=st.integers(0, 99))
    def stop(self, choice: int) -> None:
        self.world.stop(choice % len(self.world.running))

    @invariant()
    def is_sound(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.drain()


@pytest.mark.parametrize("mode", ["off", "bounded", "exact"])
def test_traffic(mode: Mode) -> None:
    machine = type("Machine", (Traffic,), {"mode": mode}).TestCase
    machine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    machine("runTest").runTest()


def random_traffic(cache: PrefixCache, num_steps: int, seed: int = 0) -> World:
    world, rng = World(cache), random.Random(seed)
    for _ in range(num_steps):
        choice = rng.random()
        if choice < 0.3 or not world.running:
            shared = [rng.randrange(2)] * rng.randrange(1, 40)
            world.start(shared + [rng.randrange(3) for _ in range(rng.randrange(9))], rng.randrange(1, 30))
        elif choice < 0.85:
            world.advance(rng.randrange(len(world.running)), rng.choice([1, 1, 3, 12, 40]))
        else:
            world.stop(rng.randrange(len(world.running)))
        world.check()
    return world


@pytest.mark.parametrize("mode", ["off", "bounded", "exact"])
@pytest.mark.parametrize(("page", "window"), [(2, 1), (4, 6), (4, 8), (8, 5)])
def test_long_traffic_reaches_every_path(mode: Mode, page: int, window: int) -> None:
    cache = make_cache(mode, 90 // page, 60 // page, page, window)
    world = random_traffic(cache, 600)
    world.drain()
    assert world.refused
    assert (cache.stats.hit_tokens > 0) == (cache.global_pool.evictions > 0) == (mode != "off")
    assert (cache.window_pool.evictions > 0) == (mode == "exact")


class ForgetsNothing(PagePool):
    """A mutant: an evicted page can still be found."""

    def _evict(self) -> int:
        page, _ = self._evictable.popitem(last=False)
        return page

    def check_integrity(self, references: object = None) -> None:
        """Left to the memory."""


def test_the_memory_notices_mutants() -> None:
    with pytest.raises(AssertionError):
        random_traffic(make_cache("exact", 22, 15, pool=ForgetsNothing), 600)
    for changed, message in (
        ({"length": 0}, "a shared page is written"),
        ({"replay_start": 0}, "dropped row"),
    ):
        world = World(make_cache("bounded"))
        world.start([0] * 21, 21)
        world.advance(0, 21)
        pages = world.start([0] * 21, 21)
        pages.hit = replace(pages.hit, **changed)
        with pytest.raises(AssertionError, match=message):
            world.advance(1, 21)


def test_two_cold_runs_at_once_leave_one_copy() -> None:
    world = World(make_cache("exact"))
    for _ in range(2):
        world.start([0] * 12, 12)
    world.advance(0, 12)
    world.advance(1, 12)
    assert world.cache.global_pool.num_cached == world.cache.window_pool.num_cached == 3
    assert world.cache.global_pool.num_used == 6
    world.drain()


@pytest.mark.parametrize(("num_global", "num_window"), [(8, 40), (40, 3)])
@pytest.mark.parametrize("mode", ["bounded", "exact"])
def test_an_admission_that_fails_takes_nothing(mode: Mode, num_global: int, num_window: int) -> None:
    """The shared pages fit, the fresh ones do not; in the first case as the shared ones are held."""
    world = World(make_cache(mode, num_global, num_window))
    for _ in range(3):
        world.start([0] * 16, 4)
        for _ in range(4):
            world.advance(0, 4)
        world.stop(0)
    before = world.counts()
    steps = (30, 2) if num_global == 8 else (30,)  # states for all tokens must be there, windows for one step
    for step in steps:
        assert world.start([0] * 16 + [1] * 30, step) is None
        assert world.counts() == before
    assert world.start([0] * 16 + [1] * 2, 2) is not None
    world.drain()


@pytest.mark.parametrize("mode", ["bounded", "exact"])
def test_abort_in_mid_prefill_500_times(mode: Mode) -> None:
    world = World(make_cache(mode))
    for number in range(500):
        world.start([number % 3] * (20 + number % 9), 7)
        world.advance(0, 1 + number % 13)
        world.stop(0)
        assert (world.cache.global_pool.num_free, world.cache.window_pool.num_free) == (40, 40)
    world.drain()


def test_the_cost_of_a_step_does_not_grow_with_the_context() -> None:
    """Only new pages are offered, and window entries that were dropped are not looked at again."""
    world = World(make_cache("exact"))
    world.start([0] * 40, 40)
    world.advance(0, 40)
    world.stop(0)
    pages = world.start([0] * 60, 20)
    assert (pages.hit.length, pages.num_committed) == (40, 10)
    for end in (44, 48, 52):
        world.advance(0, 4)
        assert pages.num_committed == end // 4
        assert pages.num_dropped == (end - 4 - 6 + 1) // 4
    world.drain()
