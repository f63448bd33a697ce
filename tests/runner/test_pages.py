"""The page pool against a plain model of it, and the tables of one request."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsv41.model.layout import NULL_PAGE, CacheLayout
from dsv41.runner.block_table import RequestPages
from dsv41.runner.pages import PagePool
from dsv41.runner.prefix import PrefixCache

PAGES = st.integers(0, 1 << 16)  # taken modulo what there is to choose from


class PoolTraffic(RuleBasedStateMachine):
    """Random calls; the model is a count per page, a dict from key to page and a list of evictable pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(6)
        self.held: Counter[int] = Counter()
        self.keys: dict[bytes, int] = {}
        self.evictable: list[int] = []  # oldest first
        self.content: dict[int, int] = {}  # page -> number of the allocation that wrote it
        self.meant: dict[bytes, int] = {}  # key -> the content it was registered for
        self.num_allocations = 0

    @rule()
    def allocate(self) -> None:
        idle = 5 - len(self.held)
        if not idle:
            with pytest.raises(MemoryError):
                self.pool.allocate()
            return
        page = self.pool.allocate()
        assert page != NULL_PAGE
        assert page not in self.held
        if idle == len(self.evictable):  # none was free: the least recently used one goes
            assert page == self.evictable.pop(0)
            self.keys = {key: other for key, other in self.keys.items() if other != page}
        assert page not in self.evictable
        self.held[page] += 1
        self.num_allocations += 1
        self.content[page] = self.num_allocations

    @precondition(lambda self: self.held or self.keys)
    @rule(choice=PAGES)
    def acquire(self, choice: int) -> None:
        pages = sorted({*self.held, *self.keys.values()})
        page = pages[choice % len(pages)]
        self.pool.acquire(page)
        self.held[page] += 1
        self.evictable = [other for other in self.evictable if other != page]

    @precondition(lambda self: self.held)
    @rule(choice=PAGES)
    def release(self, choice: int) -> None:
        page = sorted(self.held)[choice % len(self.held)]
        self.pool.release(page)
        self.held -= Counter([page])
        if page not in self.held and page in self.keys.values():
            self.evictable.append(page)

    @precondition(lambda self: self.held)
    @rule(choice=PAGES, letter=st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"]))
    def register(self, choice: int, letter: bytes) -> None:
        page = sorted(self.held)[choice % len(self.held)]
        if letter not in self.keys and page in self.keys.values():
            with pytest.raises(AssertionError, match="second key"):
                self.pool.register(page, letter)
            return
        self.pool.register(page, letter)
        if letter not in self.keys:
            self.keys[letter] = page
            self.meant[letter] = self.content[page]

    @precondition(lambda self: self.held or self.keys)
    @rule(choice=PAGES)
    def forget(self, choice: int) -> None:
        pages = sorted({*self.held, *self.keys.values()})
        page = pages[choice % len(pages)]
        self.pool.forget(page)
        self.keys = {key: other for key, other in self.keys.items() if other != page}
        self.evictable = [other for other in self.evictable if other != page]

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity(self.held)
        assert self.pool.num_used == len(self.held)
        assert self.pool.num_free == 5 - len(self.held)
        assert self.pool.num_cached == len(self.keys)
        for letter in b"abcdefgh":
            key = bytes([letter])
            page = self.pool.find(key)
            assert page == self.keys.get(key)
            assert page is None or self.content[page] == self.meant[key], "a stale key was found"


TestPoolTraffic = PoolTraffic.TestCase
TestPoolTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def cached_pool(num_pages: int) -> tuple[PagePool, list[int]]:
    """A pool whose pages are all evictable, oldest first."""
    pool = PagePool(num_pages)
    pages = [pool.allocate() for _ in range(num_pages - 1)]
    for page in pages:
        pool.register(page, bytes([page]))
    for page in pages:
        pool.release(page)
    return pool, pages


def test_the_least_recently_used_page_is_evicted_first() -> None:
    pool, pages = cached_pool(5)
    pool.acquire(pages[0])
    pool.release(pages[0])  # used again: now the last to go
    assert [pool.allocate() for _ in pages] == [*pages[1:], pages[0]]
    assert (pool.evictions, pool.num_cached, pool.num_free) == (4, 0, 0)


def test_a_held_page_is_never_evicted_and_a_free_one_goes_first() -> None:
    pool, pages = cached_pool(4)
    pool.acquire(pages[0])
    assert [pool.allocate(), pool.allocate()] == pages[1:]
    with pytest.raises(MemoryError, match="all 3 pages of the pool are in use"):
        pool.allocate()
    assert pool.find(bytes([pages[0]])) == pages[0]
    pool.release(pages[2])
    pool.release(pages[0])
    assert pool.allocate() == pages[2]
    assert pool.evictions == 2


def test_the_first_page_of_a_key_stays() -> None:
    pool = PagePool(4)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, b"key")
    pool.register(second, b"key")
    assert pool.find(b"key") == first
    pool.release(second)  # private: free at once
    assert (pool.num_cached, pool.allocate()) == (1, second)


@pytest.mark.parametrize("call", ["release", "acquire"])
def test_misuse_is_named(call: str) -> None:
    pool = PagePool(3)
    for page in (NULL_PAGE, pool.num_pages - 1):
        with pytest.raises(AssertionError, match=f"page {page} is {call}d but "):
            getattr(pool, call)(page)
    with pytest.raises(AssertionError, match="registered but not in use"):
        pool.register(1, b"key")


def test_integrity_notices_damage() -> None:
    for damage in ("_free.append(1)", "_references[1] = 0", "_evictable[1] = None", "_key_of[1] = b'x'"):
        pool = PagePool(3)
        assert pool.allocate() == 1
        pool.check_integrity({1: 1})
        exec(f"pool.{damage}")
        with pytest.raises(AssertionError):
            pool.check_integrity({1: 1})
    with pytest.raises(AssertionError, match="other pages"):
        PagePool(3).check_integrity({2: 1})


def request(num_global: int, num_window: int, page_tokens: int, window_tokens: int) -> RequestPages:
    pools = PagePool(1 + num_global), PagePool(1 + num_window)
    return RequestPages(PrefixCache(*pools, page_tokens, window_tokens, "off"))


@settings(max_examples=80, deadline=None)
@given(
    page_tokens=st.sampled_from([2, 4, 8]),
    window_tokens=st.integers(1, 19),
    chunks=st.lists(st.integers(1, 30), min_size=1, max_size=12),
)
def test_every_row_has_its_window_and_no_more(
    page_tokens: int, window_tokens: int, chunks: list[int]
) -> None:
    """Live window entries are those of rows [start - W + 1, end), within the bound that the layout states."""
    pages, start = request(200, 200, page_tokens, window_tokens), 0
    layout = CacheLayout(page_tokens, window_tokens, (), (), (), (), 0)
    for count in chunks:
        before = pages.cache.global_pool.num_free, pages.cache.window_pool.num_free
        missing = pages.missing(start, count)
        pages.reserve(start, count)
        after = pages.cache.global_pool.num_free, pages.cache.window_pool.num_free
        assert missing == tuple(max(0, old - new) for old, new in zip(before, after, strict=True))
        rows = range(max(0, start - window_tokens + 1), start + count)
        live = [number for number, page in enumerate(pages.window_pages) if page != NULL_PAGE]
        assert live == sorted({row // page_tokens for row in rows})
        assert len(live) <= layout.window_pages(count)
        assert len(pages.global_pages) == layout.global_pages(start + count)
        assert len(set(pages.global_pages)) == len(pages.global_pages)
        pages.cache.window_pool.check_integrity({pages.window_pages[number]: 1 for number in live})
        start += count
    pages.release()
    assert pages.cache.global_pool.num_used == pages.cache.window_pool.num_used == 0


@pytest.mark.parametrize(("num_global", "num_window", "group"), [(3, 9, "global"), (9, 3, "window")])
def test_a_failed_reservation_changes_nothing(num_global: int, num_window: int, group: str) -> None:
    pages = request(num_global, num_window, page_tokens=4, window_tokens=4)
    pages.reserve(0, 12)
    tables = list(pages.global_pages), list(pages.window_pages)
    with pytest.raises(MemoryError, match=f"pages of the {group} pool are needed"):
        pages.reserve(12, 20)  # would give two window pages back, and needs five
    assert tables == (pages.global_pages, pages.window_pages)
    pages.cache.global_pool.check_integrity(dict.fromkeys(tables[0], 1))
    pages.cache.window_pool.check_integrity(dict.fromkeys(tables[1], 1))


def test_pages_given_back_count_for_the_same_reservation() -> None:
    pages = request(4, 3, page_tokens=4, window_tokens=4)
    pages.reserve(0, 12)
    assert pages.missing(12, 4) == (1, 0)  # one window page is new, two are given back
    pages.reserve(12, 4)
    assert pages.window_pages[:2] == [NULL_PAGE] * 2
    assert pages.cache.window_pool.num_free == 1


def test_abort_in_mid_prefill_500_times() -> None:
    pages = request(40, 40, page_tokens=4, window_tokens=6)
    free = pages.cache.global_pool.num_free, pages.cache.window_pool.num_free
    for number in range(500):
        start = 0
        for count in (1 + number % 17, 1 + number % 5, 1 + number % 29):
            pages.reserve(start, count)
            start += count
        pages.release()
        assert free == (pages.cache.global_pool.num_free, pages.cache.window_pool.num_free)
    pages.cache.global_pool.check_integrity({})
    pages.cache.window_pool.check_integrity({})
