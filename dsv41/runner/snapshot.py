"""A running request's state, whole: for prefill here and decode there.

Its states and index keys, the window that its next row reads, the open group, and the counters. Pages travel
as they are, so both engines must have the same model, records and page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv41.backends import RECORD_FIELDS, Backends
from dsv41.config import ModelConfig
from dsv41.model.caches import KVCaches
from dsv41.model.layout import NULL_PAGE, CacheLayout
from dsv41.runner.load import Model
from dsv41.runner.request import Request, SamplingParams
from dsv41.runner.worker import Worker

Signature = tuple[ModelConfig, Backends, CacheLayout]


def signature(model: Model) -> Signature:
    """What must be equal on both sides: config and numerics, records, page layout."""
    records_only = Backends(**{name: getattr(model.backends, name) for name in RECORD_FIELDS})
    return model.config, records_only, model.layout


@dataclass(frozen=True)
class Snapshot:
    """`states` and `index_k` by KV source, `window` by layer: the request's pages in order, on the CPU. Of
    the window only the pages that rows from `num_computed` on can read are there, the last ones."""

    tokens: tuple[int, ...]
    num_prompt: int
    num_computed: int
    params: SamplingParams
    signature: Signature
    salt: bytes
    image_rows: tuple[bool, ...] | None
    embeddings: Tensor | None
    states: dict[int, Tensor]
    index_k: dict[int, Tensor]
    window: dict[int, Tensor]
    open_groups: dict[int, Tensor]


def _pages(caches: dict[int, Tensor], pages: list[int]) -> dict[int, Tensor]:
    index = torch.tensor(pages, dtype=torch.int64)
    return {layer: cache[index.to(cache.device)].cpu() for layer, cache in caches.items()}


def _held(request: Request) -> tuple[list[int], list[int]]:
    assert request.pages is not None, "a running request holds pages"
    return request.pages.global_pages, [page for page in request.pages.window_pages if page != NULL_PAGE]


@torch.inference_mode()
def take(request: Request, worker: Worker) -> Snapshot:
    """Copy a request's state out. Raises ValueError when it does not run, or still replays its window."""
    if request.pages is None or request.sent_pages is None:
        raise ValueError(f"request {request.request_id} does not run: it has no state to export")
    if request.num_computed < request.pages.hit.length:
        raise ValueError(f"request {request.request_id} still replays its window: a snapshot would lack it")
    pages, window_pages = _held(request)
    caches = worker.caches
    return Snapshot(
        tokens=tuple(request.tokens),
        num_prompt=request.num_prompt,
        num_computed=request.num_computed,
        params=request.params,
        signature=signature(worker.model),
        salt=request.salt,
        image_rows=request.image_rows,
        embeddings=request.embeddings,
        states=_pages(caches.states, pages),
        index_k=_pages(caches.index_k, pages),
        window=_pages(caches.window, window_pages),
        open_groups={
            layer: worker.open_rows(request.request_id, layer).cpu().clone() for layer in caches.open_groups
        },
    )


def repeated(
    snapshot: Snapshot, tokens: Sequence[int], num_computed: int, params: SamplingParams
) -> Snapshot:
    """A snapshot as if `num_computed` of `tokens` were computed: its pages over and over, or its first ones.
    For measuring long contexts: what is in the caches then does not follow from the tokens."""
    config, _, layout = snapshot.signature

    def pages(content: dict[int, Tensor], num_pages: int) -> dict[int, Tensor]:
        return {layer: held[torch.arange(num_pages) % len(held)] for layer, held in content.items()}

    num_pages = layout.global_pages(num_computed)
    return replace(
        snapshot,
        tokens=tuple(tokens),
        num_prompt=len(tokens),
        num_computed=num_computed,
        params=params,
        states=pages(snapshot.states, num_pages),
        index_k=pages(snapshot.index_k, num_pages),
        window=pages(snapshot.window, layout.window_pages(config.window_tokens)),
    )


def _write(caches: dict[int, Tensor], pages: list[int], content: dict[int, Tensor]) -> None:
    """The last of `content`'s pages go to `pages`."""
    for layer, cache in caches.items():
        own = content[layer][len(content[layer]) - len(pages) :]
        cache[torch.tensor(pages, dtype=torch.int64, device=cache.device)] = own.to(cache.device)


@torch.inference_mode()
def restore(snapshot: Snapshot, request: Request, caches: KVCaches) -> None:
    """Write a snapshot into the pages that the scheduler reserved for `request`."""
    pages, window_pages = _held(request)
    _write(caches.states, pages, snapshot.states)
    _write(caches.index_k, pages, snapshot.index_k)
    _write(caches.window, window_pages, snapshot.window)
