"""The tensors of a cache layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv41.model.layout import OPEN_ROWS, CacheGroup, CacheLayout

ROW_DTYPES = {"rows_bf16": torch.bfloat16, "rows_fp32": torch.float32, "rows_fp8": torch.float8_e4m3fn}
NUM_TICKETS = 64  # rows of a step that is finished in one launch


@dataclass(frozen=True)
class KVCaches:
    """Everything a step keeps for later steps, keyed by layer. Plain rows: `[pages, states, dim]` of the row
    dtype; packed records: `uint8 [pages, page_bytes]`. `open_groups`: float32 `[requests * OPEN_ROWS, 2 *
    head_dim]`.

    And `tickets`, int32 [NUM_TICKETS], zero between kernels (ops/hyper/op.py). They lie here because steps
    over the same caches follow each other, while two engines may run one model at a time.
    """

    window: dict[int, Tensor]
    states: dict[int, Tensor]
    index_k: dict[int, Tensor]
    open_groups: dict[int, Tensor]
    tickets: Tensor

    def tensors(self) -> list[Tensor]:
        groups = (self.window, self.states, self.index_k, self.open_groups)
        return [tensor for group in groups for tensor in group.values()]

    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


def _allocate(groups: tuple[CacheGroup, ...], num_pages: int, device: str) -> dict[int, Tensor]:
    caches = {}
    for group in groups:
        if group.record in ROW_DTYPES:
            shape, dtype = (num_pages, group.num_states, group.dim), ROW_DTYPES[group.record]
        else:
            shape, dtype = (num_pages, group.page_bytes), torch.uint8  # type: ignore[assignment]
        caches[group.layer] = torch.zeros(shape, dtype=dtype, device=device)
    return caches


def allocate_caches(
    layout: CacheLayout, window_pages: int, global_pages: int, max_requests: int, device: str
) -> KVCaches:
    """Zeroed caches with the given page counts (the null page included)."""
    slots = max_requests * OPEN_ROWS
    with torch.inference_mode(False):  # tensors born in inference mode would be another graph to the compiler
        return KVCaches(
            window=_allocate(layout.window, window_pages, device),
            states=_allocate(layout.states, global_pages, device),
            index_k=_allocate(layout.index_k, global_pages, device),
            open_groups={
                layer: torch.zeros((slots, layout.open_row_bytes // 4), device=device)
                for layer in layout.open_groups
            },
            tickets=torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device),
        )
