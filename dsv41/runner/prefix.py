"""Prefix reuse: which pages of a finished or running request a new one may take over.

A full page is known by the hash of every token up to its end. Three modes:

    off       nothing is registered, nothing is found
    bounded   global pages are shared, the window is not: its rows before the hit's end are replayed
              (spec/model.md 9.3). Replayed rows see no window below the first of them, so the result is near
              that of a cold run, not equal.
    exact     window pages are shared as well: a full window page stays in its pool as a snapshot instead of
              being freed. A hit ends where the pages of the whole window before it are there, nothing is
              replayed, and the result is equal to a cold run bit for bit.

A hit ends on a page boundary. Pages are even, so no group of two tokens is open there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, get_args

import numpy as np

from dsv41.model.layout import NULL_PAGE
from dsv41.runner.pages import PagePool

Mode = Literal["off", "bounded", "exact"]
MODES = get_args(Mode)
KEY_BYTES = 16


def extend_keys(keys: list[bytes], tokens: Sequence[int], page_tokens: int, salt: bytes = b"") -> None:
    """Append the keys of the pages of `tokens` that became full since the last call.

    Key i covers tokens [0, (i + 1) * page_tokens) and `salt`, which stands for what else the states depend
    on: images, numerics, the model. Every token must be final: no placeholder of a token still to come.
    """
    key = keys[-1] if keys else blake2b(salt, digest_size=KEY_BYTES).digest()
    for number in range(len(keys), len(tokens) // page_tokens):
        page = np.asarray(tokens[number * page_tokens : (number + 1) * page_tokens], dtype="<i8")
        key = blake2b(key + page.tobytes(), digest_size=KEY_BYTES).digest()
        keys.append(key)


def page_keys(tokens: Sequence[int], page_tokens: int, salt: bytes = b"") -> list[bytes]:
    """The keys of all full pages of `tokens`."""
    keys: list[bytes] = []
    extend_keys(keys, tokens, page_tokens, salt)
    return keys


@dataclass(frozen=True)
class Hit:
    """What a request takes from the cache, in tokens; all 0 without a hit.

    The states of tokens [0, length) are there. The first row to run is `num_computed`. Rows
    [num_computed, length) are replayed: they write their window and never a state. No row reads the window
    below `replay_start`.
    """

    length: int = 0
    replay_start: int = 0
    num_computed: int = 0

    def first_kept(self, position: int, window_tokens: int) -> int:
        """The first window row that row `position` reads; rows below are read by no later row either."""
        return max(self.replay_start, position - window_tokens + 1)


def _longest_hit(num_tokens: int, page_tokens: int) -> int:
    """The last page boundary that leaves a token to compute: the logits of the last one are wanted."""
    assert num_tokens > 0, "a request without tokens has nothing to compute"
    return (num_tokens - 1) // page_tokens * page_tokens


def bounded_hit(cached_tokens: int, num_tokens: int, window_tokens: int, page_tokens: int) -> Hit:
    """The hit of a request of `num_tokens` tokens, of which the states of the first `cached_tokens` are there
    and the window is not (spec/runtime.md 7.1)."""
    length = min(cached_tokens // page_tokens * page_tokens, _longest_hit(num_tokens, page_tokens))
    if length <= window_tokens:  # all of it would be replayed
        return Hit()
    replay_start = length - window_tokens
    return Hit(length, replay_start, num_computed=replay_start)


@dataclass(frozen=True)
class Match:
    """A hit and its pages, held once for the caller. Window entries below the first row kept are the null
    page; in bounded mode there are no others."""

    hit: Hit
    pages: list[int]
    window_pages: list[int]
    num_tokens: int


@dataclass
class PrefixStats:
    """`hit_tokens` of `looked_up_tokens` were found; in bounded mode the window of each hit is replayed."""

    queries: int = 0
    hit_tokens: int = 0
    looked_up_tokens: int = 0


class PrefixCache:
    """The two pools and what requests share of them."""

    def __init__(
        self,
        global_pool: PagePool,
        window_pool: PagePool,
        page_tokens: int,
        window_tokens: int,
        mode: Mode = "bounded",
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"prefix mode {mode!r} is unknown: choose one of {', '.join(MODES)}")
        assert page_tokens % 2 == 0, f"a page of {page_tokens} tokens ends inside a group of two"
        self.global_pool, self.window_pool = global_pool, window_pool
        self.page_tokens, self.window_tokens = page_tokens, window_tokens
        self.mode = mode
        self.stats = PrefixStats()

    def lookup(self, keys: Sequence[bytes], num_tokens: int) -> Match:
        """The longest hit of a request of `num_tokens` tokens. Its pages are held until `release`."""
        hit = self._find(keys, num_tokens)
        end = hit.length // self.page_tokens
        first = self._first_window_page(hit)
        shared = keys[first:end] if self.mode == "exact" else []
        pages = _acquire(self.global_pool, keys[:end])
        window_pages = [NULL_PAGE] * first + _acquire(self.window_pool, shared)
        self._count(hit, num_tokens, 1)
        return Match(hit, pages, window_pages, num_tokens)

    def undo(self, match: Match) -> None:
        """As if the lookup had not been: for a request that cannot start."""
        self.release(match.pages, match.window_pages)
        self._count(match.hit, match.num_tokens, -1)

    def commit(
        self,
        keys: Sequence[bytes],
        pages: Sequence[int],
        window_pages: Sequence[int],
        num_computed: int,
        first_page: int = 0,
    ) -> int:
        """Register the full pages of a request from `first_page` on; returns the next call's `first_page`.

        `num_computed` tokens are certain: no draft, no fault. In exact mode each of them must have gone
        through every layer, since its window rows are shared too. Call this before window pages are freed.
        """
        end = min(len(keys), num_computed // self.page_tokens)
        if self.mode == "off":
            return end
        for number in range(first_page, end):
            self.global_pool.register(pages[number], keys[number])
            if self.mode == "exact" and window_pages[number] != NULL_PAGE:
                self.window_pool.register(window_pages[number], keys[number])
        return end

    def release(self, pages: Sequence[int], window_pages: Sequence[int]) -> None:
        """Give pages back. What serves the longest hits is evicted last: the start of the states, without
        which later pages are of no use, and the end of the window."""
        for page in reversed(pages):
            self.global_pool.release(page)
        for page in window_pages:
            if page != NULL_PAGE:
                self.window_pool.release(page)

    def _find(self, keys: Sequence[bytes], num_tokens: int) -> Hit:
        if self.mode == "off":
            return Hit()
        if self.mode == "exact":
            return self._exact_hit(keys, num_tokens)
        cached = next((i for i, key in enumerate(keys) if self.global_pool.find(key) is None), len(keys))
        return bounded_hit(cached * self.page_tokens, num_tokens, self.window_tokens, self.page_tokens)

    def _exact_hit(self, keys: Sequence[bytes], num_tokens: int) -> Hit:
        """The last boundary with all states below it and the window pages that the next row reads."""
        best, run = Hit(), 0  # run: how many window pages in a row end at this boundary
        limit = _longest_hit(num_tokens, self.page_tokens) // self.page_tokens
        for number, key in enumerate(keys[:limit], 1):
            if self.global_pool.find(key) is None:
                break
            run = run + 1 if self.window_pool.find(key) is not None else 0
            length = number * self.page_tokens
            hit = Hit(length, replay_start=0, num_computed=length)
            if run >= number - self._first_window_page(hit):
                best = hit
        return best

    def _first_window_page(self, hit: Hit) -> int:
        return hit.first_kept(hit.num_computed, self.window_tokens) // self.page_tokens

    def _count(self, hit: Hit, num_tokens: int, sign: int) -> None:
        self.stats.queries += sign
        self.stats.hit_tokens += sign * hit.length
        self.stats.looked_up_tokens += sign * num_tokens


def _acquire(pool: PagePool, keys: Sequence[bytes]) -> list[int]:
    pages = []
    for key in keys:
        page = pool.find(key)
        assert page is not None, "a page of the hit is not in the cache"
        pool.acquire(page)
        pages.append(page)
    return pages
