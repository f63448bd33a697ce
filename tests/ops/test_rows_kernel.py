"""The Triton row kernels against the reference, every output, exactly: integers have no tolerance.

On a CPU the kernels run in Triton's interpreter, in a process of its own; `gpu` tests run them compiled. The
kernel always runs before the reference.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import (  # noqa: F401
    DEVICE,
    GPU,
    INTERPRETED,
    gpu,
    interpreted,
    repair_the_interpreter,
    run_interpreted,
)
from torch import Tensor

from dsv41.ops.rows.op import step_rows, window_rows

REQUESTS, CONTEXT, PAGE, OPEN, IMAGE_BIT = 9, 96, 4, 8, 1 << 30
OUTPUTS = (
    "token_ids", "positions", "is_image", "lookback", "request", "window_write", "window_read", "state_write",
    "num_states", "partner_row", "partner_slot", "open_slot",
)  # fmt: skip


@pytest.mark.skipif(INTERPRETED or GPU, reason="this process runs the kernels itself")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tables(seed: int) -> list[Tensor]:
    """Tokens with image bits, page tables, window tables. Pages reach far above 2^31 / page size."""
    rng = draw(seed)
    tokens = torch.randint(0, 129_280, (REQUESTS, CONTEXT), generator=rng, dtype=torch.int32)
    tokens |= IMAGE_BIT * (torch.rand(tokens.shape, generator=rng) < 0.2).int()
    pages = torch.randint(0, 2**31 - 1, (REQUESTS, CONTEXT // PAGE), generator=rng, dtype=torch.int32)
    window = torch.randint(0, 2**31 // PAGE, (REQUESTS, CONTEXT // PAGE), generator=rng, dtype=torch.int32)
    return [tokens.to(DEVICE), pages.to(DEVICE), window.to(DEVICE)]


def step(seed: int, requests: int, padding: int, index: torch.dtype) -> list[object]:
    """Requests in any order with 0 to 13 tokens each, cold, hit or replayed, at odd and even positions."""
    rng = draw(seed + 1)
    sizes = torch.randint(0, 14, (requests,), generator=rng)
    computed = torch.randint(0, CONTEXT - 14, (REQUESTS,), generator=rng)
    hit = (computed + torch.randint(-6, 7, (REQUESTS,), generator=rng)).clamp(min=0)
    replay = (computed - torch.randint(0, 9, (REQUESTS,), generator=rng)).clamp(min=0)
    counts = torch.stack((computed, hit, replay, replay), dim=1)
    slots = torch.randperm(REQUESTS, generator=rng)[:requests]
    lists = [counts.to(DEVICE), slots.to(DEVICE, index), sizes.to(DEVICE, index)]
    return [*tables(seed), *lists, int(sizes.sum()) + padding]


def compare(args: list[object]) -> None:
    for name, mine, other in zip(
        OUTPUTS, step_rows(*args, "triton"), step_rows(*args, "reference"), strict=True
    ):
        assert mine.dtype == other.dtype, name
        assert torch.equal(mine, other), name


CASES = [  # requests, padding rows, window, lookback
    (1, 0, 8, 2),
    (1, 3, 5, 3),
    (2, 0, 1, 1),
    (2, 3, 8, 2),
    (5, 3, 5, 3),
    (5, 0, 8, 1),
    (9, 0, 8, 2),
    (9, 3, 5, 3),
]


@interpreted
@pytest.mark.parametrize(("requests", "padding", "window", "lookback"), CASES)
@pytest.mark.parametrize("ratio", [1, 2])
def test_step(requests: int, padding: int, window: int, lookback: int, ratio: int) -> None:
    index = torch.int32 if padding else torch.int64
    compare(
        [*step(requests + ratio, requests, padding, index), window, lookback, PAGE, OPEN, IMAGE_BIT, ratio]
    )


@interpreted
def test_a_step_of_padding_alone() -> None:
    args = step(4, 3, 0, torch.int64)
    args[5] = torch.zeros_like(args[5])
    for rows in (0, 2):
        compare([*args[:-1], rows, 8, 2, PAGE, OPEN, IMAGE_BIT, 2])


@interpreted
def test_window_lists_from_other_starts() -> None:
    rng = draw(7)
    table = tables(7)[2]
    request = torch.randint(-1, REQUESTS, (21,), generator=rng, dtype=torch.int32).to(DEVICE)
    positions = torch.randint(0, CONTEXT, (21,), generator=rng).to(DEVICE)
    oldest = (positions - torch.randint(-1, 12, (21,), generator=rng).to(DEVICE)).clamp(min=0)
    mine = window_rows(table, request, positions, oldest, 8, PAGE, "triton")
    assert torch.equal(mine, window_rows(table, request, positions, oldest, 8, PAGE, "reference"))


@interpreted
def test_what_the_kernel_refuses() -> None:
    args = [*step(5, 2, 0, torch.int64), 8, 2, PAGE, OPEN, IMAGE_BIT, 2]
    args[0] = args[0].repeat(1, 2)[:, ::2]
    with pytest.raises(ValueError, match="contiguous"):
        step_rows(*args, "triton")


class TestOnTheGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("requests", [1, 9, 256])
    @pytest.mark.parametrize("padding", [0, 61])
    def test_release_sizes(self, requests: int, padding: int) -> None:
        """256 requests of up to 16 tokens, contexts of 4,096, window 128."""
        rng = draw(requests)
        tokens = torch.randint(0, 2**31 - 1, (256, 4096), generator=rng, dtype=torch.int32)
        pages = torch.randint(0, 2**31 // 64, (2, 256, 64), generator=rng, dtype=torch.int32)
        computed = torch.randint(0, 4000, (256, 1), generator=rng)
        slots = torch.randperm(256, generator=rng)[:requests].int()
        sizes = torch.randint(1, 17, (requests,), generator=rng).int()
        tensors = [tokens, pages[0], pages[1], computed.repeat(1, 4).contiguous(), slots, sizes]
        compare([*(t.cuda() for t in tensors), int(sizes.sum()) + padding, 128, 2, 64, OPEN, IMAGE_BIT, 2])

    def test_a_captured_graph_follows_its_inputs(self) -> None:
        args = [*step(3, 5, 0, torch.int32), 8, 2, PAGE, OPEN, IMAGE_BIT, 2]
        args[6] = 80
        step_rows(*args, "triton")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step_rows(*args, "triton")
        args[3] += 1
        args[5].copy_(torch.tensor([1, 0, 3, 9, 1]))
        graph.replay()
        for name, mine, other in zip(OUTPUTS, captured, step_rows(*args, "reference"), strict=True):
            assert torch.equal(mine, other), name
