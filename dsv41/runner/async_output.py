"""The way back: a step's few results travel on a copy stream while the next step is prepared and launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dsv41.runner.schedule import TokenResult


class AsyncResult:
    """Device tensors on their way to pinned host memory. `get` waits for them, once, and makes the results.

    The device tensors are kept until then, so that the allocator does not hand them out under the copy.
    Pinned buffers come from torch's host allocator, which gives a buffer out again only after the copies that
    use it have ended."""

    def __init__(
        self, tensors: Mapping[str, Tensor], finish: Callable[[dict[str, Tensor]], list[TokenResult]]
    ) -> None:
        self._finish, self._device = finish, tensors
        self._arrived: torch.cuda.Event | None = None
        first = next(iter(tensors.values()))
        self._host = self._copy(first.device) if first.is_cuda else dict(tensors)

    def _copy(self, device: torch.device) -> dict[str, Tensor]:
        stream = torch.cuda.Stream(device)  # from torch's pool
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            host = {}
            for name, tensor in self._device.items():
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host[name] = pinned.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(stream)
        return host

    def get(self) -> list[TokenResult]:
        """The results of a step's requests (runner/results.py)."""
        if self._arrived is not None:
            self._arrived.synchronize()
        results = self._finish(self._host)
        self._device = {}
        return results
