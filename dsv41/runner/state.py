"""What the device keeps of every request slot, and the one transfer that changes it.

R request slots, C context tokens, P pages of a context. Token ids carry `IMAGE_BIT` where the position
belongs to an image, so that one gather answers both what a token is and whether Engram may see it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IMAGE_BIT = 1 << 30
IN_FLIGHT = 2  # steps whose staged bytes may still be on their way


class RequestState:
    """Static tensors on the device, by request slot. A step reads them; `apply` and the step's own results
    write."""

    def __init__(self, max_requests: int, max_tokens: int, max_pages: int, device: str) -> None:
        self.max_tokens, self.max_pages = max_tokens, max_pages
        self.tokens = torch.zeros((max_requests, max_tokens), dtype=torch.int32, device=device)
        self.page_table = torch.zeros((max_requests, max_pages), dtype=torch.int32, device=device)
        self.window_table = torch.zeros_like(self.page_table)
        # Columns: num_computed, hit_tokens, replay_start, tail_start (runner/schedule.py, runner/batch.py).
        self.counts = torch.zeros((max_requests, 4), dtype=torch.int64, device=device)

    @property
    def num_computed(self) -> Tensor:
        return self.counts[:, 0]

    def apply(self, staged: Mapping[str, Tensor]) -> None:
        """Write the changes of a step: flat indices and values of each table (`Changes.arrays`)."""
        for name, table in (
            ("tokens", self.tokens),
            ("pages", self.page_table),
            ("window_pages", self.window_table),
            ("counts", self.counts),
        ):
            index = staged[f"{name}_at"]
            if len(index):  # in most steps nothing: no launch
                table.view(-1).index_copy_(0, index, staged[name].to(table.dtype))


class Changes:
    """The table entries that a step changes, collected on the host."""

    def __init__(self) -> None:
        self._parts: dict[str, list[NDArray]] = {}
        for name in ("tokens", "pages", "window_pages", "counts"):
            self._parts |= {name: [], f"{name}_at": []}

    def put(self, name: str, first: int, values: NDArray) -> None:
        """`values` go to the flat positions `first`, `first + 1`, ... of a table."""
        self._parts[name].append(values)
        self._parts[f"{name}_at"].append(np.arange(first, first + len(values)))

    @property
    def is_empty(self) -> bool:
        return not any(self._parts.values())

    def arrays(self) -> dict[str, NDArray]:
        empty = [np.empty(0, dtype=np.int64)]
        return {name: np.concatenate(parts or empty) for name, parts in self._parts.items()}


class Staging:
    """One pinned buffer and one host-to-device copy a step. Buffers rotate over the steps in flight."""

    def __init__(self, device: str) -> None:
        self.device, self.pinned = device, device != "cpu"
        self._buffers = [torch.empty(0, dtype=torch.int64) for _ in range(IN_FLIGHT + 1)]
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._buffers)
        self._turn = 0

    def send(self, arrays: Mapping[str, NDArray]) -> dict[str, Tensor]:
        """Integer arrays by name -> int64 tensors on the device, views of one transfer."""
        sizes = [array.size for array in arrays.values()]
        host = self._buffer(sum(sizes))
        np.concatenate(list(arrays.values()), out=host.numpy()[: sum(sizes)], casting="same_kind")
        if self.pinned:
            device = host[: sum(sizes)].to(self.device, non_blocking=True)
            event = self._copied[self._turn] = torch.cuda.Event()
            event.record()
        else:
            device = host[: sum(sizes)].clone()
        return dict(zip(arrays, device.split(sizes), strict=True))

    def _buffer(self, size: int) -> Tensor:
        self._turn = (self._turn + 1) % len(self._buffers)
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()  # passed long ago: the buffer is IN_FLIGHT steps old
        if self._buffers[self._turn].numel() < size:
            self._buffers[self._turn] = torch.empty(2 * size, dtype=torch.int64, pin_memory=self.pinned)
        return self._buffers[self._turn]
