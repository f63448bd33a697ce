"""Pages and bytes of the caches: arithmetic only.

A page covers `page_tokens` tokens. The window group has one cache per layer, all with the same page table;
the global group has, per KV source, one cache of states and one of index keys (page_tokens / ratio states a
page), again with one table. Open groups are kept per request, unpaged: `OPEN_ROWS` fp32 rows per request and
ratio-2 KV source. Page 0 is the null page: it is never allocated and never written.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv41.backends import Backends
from dsv41.config import ModelConfig
from dsv41.model.plan import LayerPlan, kv_sources
from dsv41.ops import records

OPEN_ROWS = 8  # rows kept per request: the open row, and room for a speculative step (spec/runtime.md 1.1.8)
NULL_PAGE = 0
# Vendor kernels stride the 584-byte pages and their index keys by 576 bytes; ours want whole cache lines.
VENDOR_ALIGNMENT, LINE_ALIGNMENT = 576, 64
VENDOR_RECORDS = ("mixed_584", "fp8_132")


@dataclass(frozen=True)
class CacheGroup:
    """One paged cache: `num_states` states of `dim` channels a page; `page_bytes` counts the alignment."""

    name: str
    layer: int
    record: str
    dim: int
    num_states: int
    page_bytes: int


@dataclass(frozen=True)
class CacheLayout:
    page_tokens: int
    window_tokens: int
    window: tuple[CacheGroup, ...]
    states: tuple[CacheGroup, ...]
    index_k: tuple[CacheGroup, ...]
    open_groups: tuple[int, ...]  # the ratio-2 KV sources
    open_row_bytes: int

    @property
    def window_page_bytes(self) -> int:
        return sum(group.page_bytes for group in self.window)

    @property
    def global_page_bytes(self) -> int:
        return sum(group.page_bytes for group in self.states + self.index_k)

    def global_pages(self, num_tokens: int) -> int:
        """Pages of the global group that hold `num_tokens` tokens of one request."""
        return -(-num_tokens // self.page_tokens)

    def window_pages(self, step_tokens: int) -> int:
        """Most window pages of one request in a step of `step_tokens` rows: the window and those rows."""
        return -(-(self.window_tokens + step_tokens - 2) // self.page_tokens) + 1

    def context_bytes(self, num_tokens: int, step_tokens: int = 1) -> dict[str, int]:
        """Bytes of one request with `num_tokens` tokens of context, by group."""
        window_pages = min(self.window_pages(step_tokens), self.global_pages(num_tokens))
        pages = self.global_pages(num_tokens)
        return {
            "window": window_pages * self.window_page_bytes,
            "states": pages * sum(group.page_bytes for group in self.states),
            "index_k": pages * sum(group.page_bytes for group in self.index_k),
            "open_groups": len(self.open_groups) * OPEN_ROWS * self.open_row_bytes,
        }


def _group(name: str, layer: int, record: str, dim: int, num_states: int, config: ModelConfig) -> CacheGroup:
    rope_dim = config.rope_dim if name != "index_k" else 0
    payload = records.page_bytes(record, num_states, dim, rope_dim)
    alignment = VENDOR_ALIGNMENT if record in VENDOR_RECORDS else LINE_ALIGNMENT
    if record.startswith("rows_"):
        alignment = 1
    return CacheGroup(name, layer, record, dim, num_states, page_bytes=-(-payload // alignment) * alignment)


def build_layout(
    config: ModelConfig, plan: tuple[LayerPlan, ...], backends: Backends, page_tokens: int
) -> CacheLayout:
    """Raises ValueError when a page cannot hold whole groups or a record does not fit the widths."""
    sources = kv_sources(plan)
    for source in sources:
        if page_tokens % source.ratio:
            raise ValueError(
                f"page_tokens {page_tokens} is not a multiple of ratio {source.ratio} of layer {source.layer}"
            )
    window = tuple(
        _group("window", layer.layer, backends.window_record, config.head_dim, page_tokens, config)
        for layer in plan
    )
    states = tuple(
        _group("states", s.layer, backends.state_record, config.head_dim, page_tokens // s.ratio, config)
        for s in sources
    )
    index_k = tuple(
        _group("index_k", s.layer, backends.index_record, config.index_dim, page_tokens // s.ratio, config)
        for s in sources
    )
    return CacheLayout(
        page_tokens=page_tokens,
        window_tokens=config.window_tokens,
        window=window,
        states=states,
        index_k=index_k,
        open_groups=tuple(source.layer for source in sources if source.ratio == 2),
        open_row_bytes=2 * config.head_dim * 4,
    )
