"""What the doubles of vendor packages share: refusals, a slow attention from bytes, lists of every kind, and
how their results are compared."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def require(condition: object, sentence: str) -> None:
    if not condition:
        raise RuntimeError(sentence)


def powers(scales: Tensor) -> Tensor:
    return torch.tensor([2.0 ** (int(byte) - 127) for byte in scales], dtype=torch.float64)


def mixed_state(view: Tensor, index: int) -> Tensor:
    """fp64 [512] of one `mixed_584` state from the view [P, S, 1, 584]: all data of a page, then all its
    scales; bf16 from channel 448 on."""
    page, offset = divmod(index, view.shape[1])
    whole = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
    whole = whole[view.storage_offset() + page * view.stride(0) :]
    data, scales = whole[offset * 576 :][:576], whole[view.shape[1] * 576 + offset * 8 :][:7]
    nope = data[:448].view(torch.float8_e4m3fn).double() * powers(scales).repeat_interleave(64)
    return torch.cat((nope, data[448:].view(torch.bfloat16).double()))


def slow_attention(q: Tensor, keys: list[Tensor], sink: Tensor, scale: float) -> Tensor:
    """One row: q [H, 512] over a list of fp64 keys -> bf16 [H, 512]; nothing listed gives zeros."""
    if not keys:
        return torch.zeros_like(q)
    stack = torch.stack(keys)
    logits = torch.cat((q.double() @ stack.T * scale, sink.double()[:, None]), dim=1)
    return (logits.softmax(1)[:, :-1] @ stack).to(torch.bfloat16)


def lists(slots: Tensor, rows: int, width: int, seed: int) -> Tensor:
    """int32 [rows, width]: in turn full, empty, a prefix, holes, only the last place."""
    draw = torch.Generator().manual_seed(seed)
    listed = slots[torch.randint(0, len(slots), (rows, width), generator=draw)].to(torch.int32)
    place, kind = torch.arange(width), (torch.arange(rows) + seed) % 5
    drop = torch.zeros((rows, width), dtype=torch.bool)
    for number, rule in (
        (1, place >= 0),
        (2, place >= width // 3),
        (3, torch.rand((rows, width), generator=draw) < 0.5),
        (4, place < width - 1),
    ):
        drop |= (kind == number)[:, None] & rule
    return listed.masked_fill(drop, -1)


def assert_rows(got: Tensor, expected: Tensor, args: list, tolerance: float) -> None:
    """`args` of sparse_attention: each row within tolerance, rows that list nothing exactly zero."""
    assert got.shape == expected.shape
    assert got.is_contiguous()
    assert not got.isnan().any(), "NaN from a state that is not listed"
    empty = ((args[2] >= 0).sum(1) + (args[6] >= 0).sum(1)) == 0
    assert (got[empty] == 0).all()
    error = (got.double() - expected).flatten(1).norm(dim=1)
    assert (error <= tolerance * expected.flatten(1).norm(dim=1)).all(), error


class NoHostReads(TorchDispatchMode):
    """A value that the host waits for ends a graph capture."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.masked_select,
        ), f"{func} reads a value"
        return func(*args, **(kwargs or {}))
