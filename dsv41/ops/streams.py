"""Two CUDA streams for two pieces of work of which neither needs the other.

    fork_join    `main` on the current stream, `side` on an auxiliary one, which joins it again
    fork, join   the same over two ops: the auxiliary stream's handle travels between them as data, so that
                 nothing has to remember it and the second op cannot run before the first

The auxiliary stream comes from torch's own pool of 32, at each call: taking one is an index into that pool,
and nothing here has to be kept between calls. Two consequences were weighed. The allocator keeps free blocks
by stream, so memory that `side` allocates may lie idle in up to 32 places: fork small results. And the pool
is shared, with streams of captures and of copies to the host: work on an auxiliary stream may wait for a
stranger's, and the allocator's blocks of the stream may be taken by one. See `fork_join` for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def fork_join(main: Callable[[], Result], side: Callable[[], Tensor]) -> tuple[Result, Tensor]:
    """Run `side` beside `main` on the current device; what follows on the current stream sees both results.

    Legal while the current stream is captured: the fork and the join become edges of the graph. What either
    function reads must stay referenced by the caller until this returns; from then on the current stream is
    behind both.

    The memory of `side`'s result belongs to the auxiliary stream and is read by the current one. Outside a
    capture the allocator is told so, and gives it out again only when the current stream has passed its last
    use. In a capture it need not be told, and must not: it would keep the block until the capture ends. There
    only forks of the one captured stream allocate on auxiliary streams, and each starts behind everything
    that was launched before it, the last use of a freed result included.
    """
    current = torch.cuda.current_stream()
    auxiliary = _other_stream(current)
    auxiliary.wait_stream(current)
    try:
        with torch.cuda.stream(auxiliary):
            beside = side()
        result = main()
    finally:  # also after an error: what `side` still reads is about to be freed on the current stream
        current.wait_stream(auxiliary)
    if not torch.cuda.is_current_stream_capturing():
        beside.record_stream(current)
    return result, beside


def fork(side: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Start `side` on an auxiliary stream of the current device: its results, and the stream's handle, int64
    [1] on the host, for `join`.

    Until then nothing may read the results, and what `side` reads must stay referenced. For their memory the
    argument of `fork_join` holds.
    """
    current = torch.cuda.current_stream()
    auxiliary = _other_stream(current)
    auxiliary.wait_stream(current)
    with torch.cuda.stream(auxiliary):
        results = side()
    if not torch.cuda.is_current_stream_capturing():
        for result in results:
            result.record_stream(current)
    return results, torch.tensor([auxiliary.cuda_stream])


def nothing_forked() -> Tensor:
    """The handle that `join` need not wait for."""
    return torch.zeros(1, dtype=torch.int64)


def join(handle: Tensor) -> None:
    """What follows on the current stream sees the results of the `fork` that gave `handle`."""
    if stream := int(handle):
        torch.cuda.current_stream().wait_stream(torch.cuda.ExternalStream(stream))


def _other_stream(current: torch.cuda.Stream) -> torch.cuda.Stream:
    """The next stream of the pool that is not the current one, as a capture's may be."""
    stream = torch.cuda.Stream()
    return stream if stream != current else torch.cuda.Stream()
