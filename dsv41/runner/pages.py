"""The page allocator: one pool of page ids, page 0 never handed out."""

from __future__ import annotations

from dsv41.model.layout import NULL_PAGE


class PagePool:
    """Free and used pages of one group. The last page freed is the next one used."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """One page. Raises MemoryError when none is free."""
        if not self._free:
            raise MemoryError(f"all {self.num_pages - 1} pages of the pool are in use")
        page = self._free.pop()
        self._used.add(page)
        return page

    def release(self, page: int) -> None:
        assert page in self._used, f"page {page} is released but not in use"
        self._used.remove(page)
        self._free.append(page)

    def check_integrity(self) -> None:
        """Every page but the null page is free or used, and never both."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & self._used, "a page is free and used"
        assert free | self._used == set(range(1, self.num_pages)), "a page is lost"
