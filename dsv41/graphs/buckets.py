"""The sizes a captured step comes in. Integers only.

A step fits a bucket that has at least its rows and at least the pages that its longest request needs; what is
too much is padding. Rows are rows: one request with five of them and five requests with one share a bucket.
Pages matter because kernels size their work by the width of the page table, so that a step over short
contexts does not pay for the longest one that the engine could hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dsv41.config import EngineConfig, ModelConfig


@dataclass(frozen=True, order=True)
class Bucket:
    """`rows` token rows whose requests lie in the first `pages` pages of their tables."""

    rows: int
    pages: int


def row_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, then 8, 12, 16, 24, 32, 48 and so on up to `most`: of 9 rows or more a third at most is
    padding."""
    sizes, size = {most, *(small for small in (1, 2, 4) if small < most)}, 8
    while size < most:
        sizes |= {size, min(size * 3 // 2, most)}
        size *= 2
    return tuple(sorted(sizes))


def page_widths(max_pages: int, page_tokens: int, context_classes: Iterable[int]) -> tuple[int, ...]:
    """The page counts of context lengths in tokens, and the whole table: ascending, at least two pages (a
    compiled graph takes a single one for a constant)."""
    widths = {max(2, -(-tokens // page_tokens)) for tokens in context_classes}
    return (*sorted(width for width in widths if width < max_pages), max_pages)


def make_buckets(rows: Iterable[int], pages: Iterable[int]) -> tuple[Bucket, ...]:
    """Every pair, largest first: the graphs share one memory pool, which the largest sizes."""
    return tuple(sorted((Bucket(r, p) for r in set(rows) for p in set(pages)), reverse=True))


def engine_buckets(config: ModelConfig, engine: EngineConfig, max_pages: int) -> tuple[Bucket, ...]:
    """Rows up to `graph_rows`; contexts up to where selection begins at ratio 1 and 2, where candidates
    begin, eight times that, and the whole of `max_pages`."""
    candidates = config.candidate_blocks * config.candidate_block_states
    contexts = (config.index_topk, 2 * config.index_topk, candidates, 8 * candidates)
    widths = page_widths(max_pages, engine.page_tokens, contexts)
    return make_buckets(row_sizes(min(engine.graph_rows, engine.max_batch_tokens)), widths)


def fit(buckets: Iterable[Bucket], rows: int, pages: int) -> Bucket | None:
    """The least padding that holds a step: fewest rows, then fewest pages; None if nothing does."""
    holding = (bucket for bucket in buckets if bucket.rows >= rows and bucket.pages >= pages)
    return min(holding, default=None)
