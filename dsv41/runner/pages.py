"""The page pool of one group: reference counts, and an index of full pages by their content.

A page is in one of three states:

    free        nobody holds it and nothing is known of its content
    used        held by one request or more (`_references` counts them)
    evictable   held by nobody, but full and registered under a key: a later request may take it over

Page 0 is the null page: it is never handed out. Every operation is O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from dsv41.model.layout import NULL_PAGE


class PagePool:
    """Pages `1 ... num_pages - 1`. The last page freed is the next one used; cached pages go when none is
    free, least recently used first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.evictions = 0
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._references = [0] * num_pages
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_free

    @property
    def num_cached(self) -> int:
        """Pages registered under a key, used or evictable."""
        return len(self._page_of)

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self) -> int:
        """One page of unknown content, held once. Raises MemoryError when all are in use."""
        if self._free:
            page = self._free.pop()
        elif self._evictable:
            page = self._evict()
        else:
            raise MemoryError(f"all {self.num_pages - 1} pages of the pool are in use")
        self._references[page] = 1
        return page

    def _evict(self) -> int:
        page, _ = self._evictable.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        self.evictions += 1
        return page

    def acquire(self, page: int) -> None:
        """Hold a used or a cached page once more."""
        if not self._references[page]:
            assert page in self._evictable, f"page {page} is acquired but neither used nor cached"
            del self._evictable[page]
        self._references[page] += 1

    def release(self, page: int) -> None:
        assert self._references[page] > 0, f"page {page} is released but not in use"
        self._references[page] -= 1
        if self._references[page]:
            return
        if page in self._key_of:
            self._evictable[page] = None
        else:
            self._free.append(page)

    def register(self, page: int, key: bytes) -> None:
        """Make a full page findable; its content must not change from now on. When the key has a page already
        that one stays, and this page remains private."""
        assert self._references[page] > 0, f"page {page} is registered but not in use"
        if key in self._page_of:
            return
        assert page not in self._key_of, f"page {page} is registered under a second key"
        self._page_of[key] = page
        self._key_of[page] = key

    def forget(self, page: int) -> None:
        """The content of a page is not to be found again; who holds it keeps it."""
        key = self._key_of.pop(page, None)
        if key is None:
            return
        del self._page_of[key]
        if page in self._evictable:
            del self._evictable[page]
            self._free.append(page)

    def find(self, key: bytes) -> int | None:
        return self._page_of.get(key)

    def check_integrity(self, references: Mapping[int, int] | None = None) -> None:
        """Every page but the null page is free, evictable or used, and only one of them. `references` are the
        counts that the requests expect, by page."""
        free, evictable = set(self._free), set(self._evictable)
        used = {page for page, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "a page is free twice"
        assert min(self._references) >= 0, "a reference count is negative"
        assert not free & evictable, "a page is free and evictable"
        assert not (free | evictable) & used, "a page is free and used"
        assert free | evictable | used == set(range(1, self.num_pages)), "a page is lost"
        assert self._key_of == {page: key for key, page in self._page_of.items()}, "the index is torn"
        assert not free & self._key_of.keys(), "a free page can be found"
        assert evictable <= self._key_of.keys(), "an evictable page cannot be found"
        if references is not None:
            held = {page: self._references[page] for page in used}
            assert held == dict(references), "the requests hold other pages than the pool believes"
