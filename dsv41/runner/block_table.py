"""The pages of one request in both groups: reserved before a step, committed after it, then released."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dsv41.model.layout import NULL_PAGE
from dsv41.runner.prefix import Hit, PrefixCache


class Missing(NamedTuple):
    """Pages that a reservation needs of each pool, beyond those it gives back."""

    global_pages: int
    window_pages: int


@dataclass(eq=False)
class RequestPages:
    """Entry i of either table covers tokens [i*page_tokens, (i+1)*page_tokens); window entries below the
    first row kept are the null page."""

    cache: PrefixCache
    hit: Hit = field(default_factory=Hit)
    global_pages: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)
    num_committed: int = 0  # pages
    num_dropped: int = 0  # window entries before this one are the null page

    def missing(self, num_computed: int, num_tokens: int) -> Missing:
        """What `reserve` with the same arguments would take. Nothing is changed."""
        first, end = self._window_span(num_computed, num_tokens)
        pool = self.cache.window_pool
        dropped = self.window_pages[self.num_dropped : first]
        given_back = sum(page != NULL_PAGE and pool.references(page) == 1 for page in dropped)
        fresh = max(0, end - max(first, len(self.window_pages)))
        return Missing(max(0, end - len(self.global_pages)), max(0, fresh - given_back))

    def reserve(self, num_computed: int, num_tokens: int) -> None:
        """Pages for the next `num_tokens` tokens; window pages that row `num_computed` and later ones do not
        read are given back first.

        Tokens that may still be taken back (drafts, steps in flight) count in `num_tokens`. Raises
        MemoryError when a pool has too few pages; nothing is changed then.
        """
        missing = self.missing(num_computed, num_tokens)
        _check("global", missing.global_pages, self.cache.global_pool.num_free)
        _check("window", missing.window_pages, self.cache.window_pool.num_free)
        first, end = self._window_span(num_computed, num_tokens)
        self._drop_window(first)
        while len(self.global_pages) < end:
            self.global_pages.append(self.cache.global_pool.allocate())
        while len(self.window_pages) < end:
            self.window_pages.append(self.cache.window_pool.allocate())

    def commit(self, keys: Sequence[bytes], num_computed: int) -> None:
        """Offer the pages that are full now to other requests (see `PrefixCache.commit`)."""
        self.num_committed = self.cache.commit(
            keys, self.global_pages, self.window_pages, num_computed, self.num_committed
        )

    def release(self) -> None:
        """Give every page back; the object is as new."""
        self.cache.release(self.global_pages, self.window_pages)
        self.global_pages, self.window_pages = [], []
        self.hit, self.num_committed, self.num_dropped = Hit(), 0, 0

    def _window_span(self, num_computed: int, num_tokens: int) -> tuple[int, int]:
        """First and last + 1 of the window entries that rows [num_computed, num_computed + num_tokens) need:
        their own, and the window of the first."""
        first_kept = self.hit.first_kept(num_computed, self.cache.window_tokens)
        end = -(-(num_computed + num_tokens) // self.cache.page_tokens)
        return first_kept // self.cache.page_tokens, end

    def _drop_window(self, first: int) -> None:
        """Entries before `first` become the null page."""
        for number in range(self.num_dropped, min(first, len(self.window_pages))):
            if self.window_pages[number] != NULL_PAGE:
                self.cache.window_pool.release(self.window_pages[number])
                self.window_pages[number] = NULL_PAGE
        self.window_pages += [NULL_PAGE] * (first - len(self.window_pages))
        self.num_dropped = max(self.num_dropped, first)


def _check(group: str, missing: int, num_free: int) -> None:
    if missing > num_free:
        raise MemoryError(f"{missing} pages of the {group} pool are needed, but {num_free} are free")


def admit(cache: PrefixCache, keys: Sequence[bytes], num_tokens: int, max_step_tokens: int) -> RequestPages:
    """Start a request of `num_tokens` tokens: take over what the cache has of it, and reserve its first
    step of at most `max_step_tokens` rows from `hit.num_computed` on.

    Raises MemoryError when a pool has too few pages for that step, or the global pool for all the tokens;
    nothing is changed then.
    """
    match = cache.lookup(keys, num_tokens)
    hit, num_shared = match.hit, len(match.pages)
    pages = RequestPages(cache, hit, list(match.pages), list(match.window_pages), num_committed=num_shared)
    num_rows = num_tokens - hit.num_computed
    try:
        missing = pages.missing(hit.num_computed, num_rows)  # window pages of later steps come back by then
        _check("global", missing.global_pages, cache.global_pool.num_free)
        pages.reserve(hit.num_computed, min(max_step_tokens, num_rows))
    except MemoryError:
        cache.undo(match)
        raise
    return pages
