"""Mixture of experts on Hopper: packing, routing, grouping, and the few-row expert kernels.

Packing is checked on any machine against a formula of its own. Triton kernels run in the interpreter, in a
process of their own; Gluon kernels are compiled for sm_90 and their resources checked. `gpu` tests compare
stage by stage first, so that a failure names the kernel: rows quantised, hidden rows, output rows, sum.

Tolerances. fp8 products keep about 14 bits inside 32 of K, so gate and up are off by 2^-13 of a slice before
they are rounded to bf16: some 3 % of those roundings fall the other way, and with them well under 1 % of the
hidden codes. A row of the result is then off by 2e-3 to 5e-3 of its norm. Anything but rounding is far
outside: the routing weight after the down product gives 3e-2, one scale or one row displaced more than 1e-1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from interpreted import (  # noqa: F401
    DEVICE,
    GPU,
    INTERPRETED,
    generator,
    interpreted,
    repair_the_interpreter,
    run_interpreted,
)
from offline import compile_sm90
from torch import Tensor
from whole_experts import whole_experts

import dsv41.ops.linear.op  # noqa: F401  (the shared expert's products)
from dsv41.hardware import Hardware
from dsv41.ops import records
from dsv41.ops.arithmetic import exact_matmul
from dsv41.ops.moe import gluon_pack, reference

triton = pytest.importorskip("triton", reason="the kernels are written in Triton: needs the package triton")
from dsv41.ops.moe import triton_group, triton_route  # noqa: E402

HOPPER = GPU and torch.cuda.get_device_capability() == (9, 0)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs one SM90 GPU")]
compiled_only = pytest.mark.skipif(INTERPRETED, reason="Gluon cannot be interpreted")
LIMIT = 10.0
SHAPES = (4, 1, 8, 16)  # rows of a slot


def on_gpu(test):
    for mark in gpu:
        test = mark(test)
    return test


@pytest.mark.skipif(INTERPRETED or GPU, reason="this process runs the kernels itself")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


# -- inputs ---------------------------------------------------------------------------------------------


def integers(low: int, high: int, shape: tuple[int, ...], seed: int, dtype=torch.uint8) -> Tensor:
    return torch.randint(low, high, shape, generator=generator(seed), device=DEVICE, dtype=dtype)


def released(experts: int, hidden: int, width: int, seed: int = 0) -> list[Tensor]:
    """Random weights as the release stores them: gate_up, its scale, down, its scale."""
    return [
        integers(0, 256, (experts, 2 * width, hidden // 2), seed),
        integers(117, 122, (experts, 2 * width, hidden // 32), seed + 1),
        integers(0, 256, (experts, hidden, width // 2), seed + 2),
        integers(117, 122, (experts, hidden, width // 32), seed + 3),
    ]


def choices(rows: int, top_k: int, experts: int, seed: int = 0) -> Tensor:
    """Distinct experts of every row, in any order."""
    score = torch.rand((rows, experts), generator=generator(seed), device=DEVICE)
    return score.topk(top_k).indices.to(torch.int32)


def rows_of(rows: int, hidden: int, seed: int = 0) -> Tensor:
    """bf16 rows whose sizes and blocks differ by octaves."""
    x = torch.randn((rows, hidden), generator=generator(seed), device=DEVICE)
    octaves = torch.randn((rows, hidden // 32), generator=generator(seed + 1), device=DEVICE)
    return (x * torch.exp2(octaves).repeat_interleave(32, -1)).bfloat16()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every `torch.empty` comes full of NaN, 255 or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# -- packing --------------------------------------------------------------------------------------------


def place_of_code(row: int, column: int, columns: int) -> tuple[int, int]:
    """-> (byte, half) of a code, from the words of gluon_pack.py's docstring."""
    tile, band, half, g = row // 64, row // 16 % 4, row // 8 % 2, row % 8
    chunk, block, q, h, t, i = (
        column // 256, column // 64 % 4, column // 32 % 2, column // 16 % 2, column // 4 % 4, column % 4,
    )  # fmt: skip
    blocks = ((tile * (columns // 256) + chunk) * 4 + band) * 4 + block
    return blocks * 512 + (g * 4 + t) * 16 + (q * 2 + h) * 4 + i, half


def place_of_scale(row: int, group: int, groups: int) -> int:
    tile, band, half, g = row // 64, row // 16 % 4, row // 8 % 2, row % 8
    word = ((tile * (groups // 8) + group // 8) * 4 + band) * 32 + g * 4 + group // 2 % 4
    return word * 4 + half * 2 + group % 2


def unpacked_slowly(packed: Tensor, scale: Tensor, rows: list[int]) -> list[tuple[list[int], list[int]]]:
    """Codes and scales of some rows of one packed weight, one at a time."""
    columns = 2 * packed.shape[1]
    data, scales = packed.flatten().tolist(), scale.flatten().tolist()
    found = []
    for row in rows:
        codes = []
        for column in range(columns):
            byte, half = place_of_code(row, column, columns)
            b = data[byte]
            low = (b >> 7) * 8 + (b >> 2) % 8
            high = (b >> 5) % 2 * 8 + (b >> 6) % 2 * 4 + b % 4
            codes.append(high if half else low)
        groups = columns // 32
        found.append((codes, [scales[place_of_scale(row, group, groups)] for group in range(groups)]))
    return found


def codes_of(packed: Tensor) -> list[list[int]]:
    return records.unpack_nibbles(packed).tolist()


@compiled_only
@pytest.mark.parametrize(("hidden", "width"), [(256, 256), (512, 256), (256, 768)])
def test_packed_places(hidden: int, width: int) -> None:
    """Every kind of row against the layout in words; what is gate and what is up; in place."""
    before = [weight.cpu() for weight in released(2, hidden, width)]
    after = [weight.clone() for weight in before]
    places = [weight.data_ptr() for weight in after]
    gluon_pack.pack(*after)
    assert [weight.data_ptr() for weight in after] == places
    rows = [0, 7, 8, 15, 16, 31, 40, 63, 64, 121, 2 * width - 1]
    gate_up, gate_up_scale, down, down_scale = (weight[1] for weight in before)
    original = [row // 16 * 8 + row % 8 + (width if row // 8 % 2 else 0) for row in rows]
    found = unpacked_slowly(after[0][1], after[1][1], rows)
    for (codes, scales), row in zip(found, original, strict=True):
        assert codes == codes_of(gate_up)[row]
        assert scales == gate_up_scale[row].tolist()
    rows = [0, 7, 8, 15, 16, 31, 40, 63, 64, 121, hidden - 1]
    for (codes, scales), row in zip(unpacked_slowly(after[2][1], after[3][1], rows), rows, strict=True):
        assert codes == codes_of(down)[row]
        assert scales == down_scale[row].tolist()
    gluon_pack.unpack(*after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@compiled_only
def test_a_packed_byte_becomes_two_e4m3() -> None:
    """The masks and shifts of the kernel, on all bytes: 2^-6 of the code's value, both rows."""
    code = torch.arange(256, dtype=torch.int32)
    low, high = code & 15, code >> 4
    byte = (low >> 3 << 7) | ((low & 7) << 2) | (high >> 3 << 5) | ((high & 4) << 4) | (high & 3)
    even = byte & 0x9C
    odd = ((byte << 2) & 0x8C) | ((byte >> 2) & 0x10)
    for e4m3, wanted in ((even, low), (odd, high)):
        value = e4m3.to(torch.uint8).view(torch.float8_e4m3fn).float() * 64
        assert torch.equal(value, records.e2m1_decode(wanted.to(torch.uint8)))


@compiled_only
def test_pack_refuses() -> None:
    for hidden, width in ((320, 256), (256, 288)):
        with pytest.raises(ValueError, match=f"{hidden} x {width}"):
            gluon_pack.pack(*released(1, hidden, width))
    weights = released(2, 256, 256)
    with pytest.raises(ValueError, match="contiguous"):
        gluon_pack.pack(weights[0].transpose(1, 2).contiguous().transpose(1, 2), *weights[1:])
    with pytest.raises(ValueError, match="bytes"):
        gluon_pack.pack(weights[0], weights[1], weights[3], weights[2])


@compiled_only
def test_pack_takes_typed_bytes() -> None:
    weights = released(1, 256, 256)
    typed = [w.clone().view(t) for w, t in zip(weights, (torch.int8, torch.float8_e8m0fnu) * 2, strict=True)]
    gluon_pack.pack(*weights)
    gluon_pack.pack(*typed)
    assert all(torch.equal(a, b.view(torch.uint8)) for a, b in zip(weights, typed, strict=True))


# -- grouping -------------------------------------------------------------------------------------------


def check_groups(ids: Tensor, experts: int, chunk: int) -> None:
    with poisoned_memory():
        found = triton_group.group(ids, experts, chunk)
    flat = ids.flatten().tolist()
    lists: list[list[int]] = [[] for _ in range(experts)]
    for pair, expert in enumerate(flat):
        if expert >= 0:
            lists[expert].append(pair)
    order = [pair for pairs in lists for pair in pairs]
    assert found.order[: len(order)].tolist() == order
    offsets = [0]
    for pairs in lists:
        offsets.append(offsets[-1] + len(pairs))
    assert found.offsets.tolist() == offsets
    slots = [
        (e, offsets[e] + at, min(chunk, len(lists[e]) - at))
        for e in range(experts)
        for at in range(0, len(lists[e]), chunk)
    ]
    n = found.num_slots.item()
    assert n == len(slots) <= found.slot_expert.numel() == triton_group.max_slots(len(flat), experts, chunk)
    arrays = (found.slot_expert, found.slot_start, found.slot_count)
    assert list(zip(*(a[:n].tolist() for a in arrays), strict=True)) == slots
    assert all(part.dtype == torch.int32 for part in found)


def some_ids(rows: int, top_k: int, experts: int, seed: int) -> Tensor:
    """A quarter of the rows are padding, and half of the experts are popular."""
    ids = choices(rows, top_k, experts, seed)
    if seed % 2:
        ids = ids // 2
    dead = torch.rand((rows, 1), generator=generator(seed), device=DEVICE) < 0.25
    return ids.masked_fill(dead, -1)


@interpreted
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize(
    ("rows", "top_k", "experts"), [(0, 6, 8), (1, 1, 1), (1, 6, 8), (5, 6, 7), (40, 3, 33), (351, 6, 128)]
)
def test_interpreted_groups(rows: int, top_k: int, experts: int, chunk: int) -> None:
    for seed in range(2 if rows < 100 else 1):
        check_groups(some_ids(rows, top_k, experts, seed), experts, chunk)


@interpreted
def test_interpreted_groups_at_the_ends() -> None:
    check_groups(torch.full((9, 6), -1, dtype=torch.int32), 8, 4)
    check_groups(torch.full((9, 6), 7, dtype=torch.int32), 8, 4)
    check_groups(some_ids(12, 12, 16, 0)[::2, ::3], 16, 4)


@pytest.mark.parametrize("chunk", [4, 8, 64])
@pytest.mark.parametrize(
    ("rows", "experts"),
    [
        pytest.param(*s, marks=gpu)
        for s in ((1, 128), (5, 8), (341, 128), (342, 128), (1000, 384), (8192, 384))
    ],
)
def test_groups(rows: int, experts: int, chunk: int) -> None:
    for seed in range(2):
        check_groups(some_ids(rows, 6, experts, seed), experts, chunk)


@on_gpu
@pytest.mark.parametrize("rows", [9, 700])
def test_groups_at_the_ends(rows: int) -> None:
    for expert in (-1, 0, 127):
        check_groups(torch.full((rows, 6), expert, dtype=torch.int32, device=DEVICE), 128, 8)


def test_slots_always_fit() -> None:
    for pairs, experts, chunk in ((6, 128, 1), (6, 128, 8), (768, 128, 8), (12, 3, 4), (5000, 128, 64)):
        spread_out = [pairs // experts + (e < pairs % experts) for e in range(experts)]
        one = [max(0, pairs - experts + 1)] + [1] * min(experts - 1, pairs - 1)
        for counts in (spread_out, one, [pairs]):
            needed = sum(-(-count // chunk) for count in counts)
            assert needed <= triton_group.max_slots(pairs, experts, chunk)


# -- quantised rows, activation, sum --------------------------------------------------------------------


def operand_rows(codes: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """What an operand of the few-row products means: fp32 [slots, rows, columns]. Zeros must be there."""
    groups, chunks = max(1, 8 // rows), columns // 256
    shape = (-1, chunks, 8 // groups, rows, groups)  # slot, chunk, product, row, group
    parts = codes.view(*shape, groups, 32)
    own = torch.eye(groups, dtype=torch.bool, device=codes.device)[:, :, None]
    assert (parts.masked_fill(own, 0) == 0).all(), "a column is not zero outside its group"
    kept = parts.diagonal(dim1=4, dim2=5).movedim(-1, 4)  # [slot, chunk, product, row, group, 32]
    scale = scales.view(*shape, 1) / 64
    value = kept.contiguous().view(torch.float8_e4m3fn).float() * scale
    return value.permute(0, 3, 1, 2, 4, 5).reshape(-1, rows, columns)


def hostile_rows(hidden: int) -> Tensor:
    """Rows of odd magnitudes: zeros, ties between codes, below the floor, near the ends, NaN, infinity."""
    x = rows_of(12, hidden, 5)
    x[0] = 0
    x[1] = (torch.arange(hidden, device=DEVICE) % 113 / 8 + 0.0625).bfloat16()
    x[1, ::32] = 448.0
    x[2] *= 2.0**-20
    x[3] = 1e-4
    x[4] = 3e38
    x[5, 40] = torch.nan
    x[6, 3] = torch.inf
    x[7, hidden - 1] = -torch.inf
    x[8] *= 2.0**-130
    return x


def check_spread(x: Tensor, ids: Tensor, experts: int, rows: int) -> None:
    """Codes and scales of every live slot equal ops/records.py, and stand where the products read them."""
    top_k, hidden = ids.shape[1], x.shape[1]
    with poisoned_memory():
        if rows == 1 and len(x) == 1:
            slots = top_k
            codes, scales = triton_group.spread(x, None, top_k, slots, 1)
            starts, counts, order = range(top_k), [1] * top_k, list(range(top_k))
        else:
            groups = triton_group.group(ids, experts, rows)
            slots = triton_group.max_slots(ids.numel(), experts, rows)
            codes, scales = triton_group.spread(x, groups, top_k, slots, rows)
            n = groups.num_slots.item()
            starts, counts = groups.slot_start[:n].tolist(), groups.slot_count[:n].tolist()
            order = groups.order.tolist()
    live = len(counts) * (hidden // 256)
    found = operand_rows(codes[:live], scales[:live], rows, hidden)
    expected = records.round_trip(x, "fp8_32").float()
    for slot, (start, count) in enumerate(zip(starts, counts, strict=True)):
        wanted = torch.zeros_like(found[slot])
        for token in range(count):
            wanted[token] = expected[order[start + token] // top_k]
        torch.testing.assert_close(found[slot], wanted, rtol=0, atol=0, equal_nan=True)


def spread_cases(rows: int) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    yield hostile_rows(512), some_ids(12, 3, 8, 2), 8, rows
    wide = rows_of(5, 2 * 256 + 64)
    yield wide[:, 16 : 16 + 512], some_ids(5, 2, 3, 0), 3, rows
    if rows == 1:
        yield rows_of(1, 256), choices(1, 6, 8), 8, 1


@interpreted
@pytest.mark.parametrize("rows", SHAPES)
def test_interpreted_spread(rows: int) -> None:
    for case in spread_cases(rows):
        check_spread(*case)


@on_gpu
@pytest.mark.parametrize("rows", SHAPES)
def test_spread(rows: int) -> None:
    for case in spread_cases(rows):
        check_spread(*case)
    check_spread(rows_of(128, 5120), choices(128, 6, 128), 128, rows)


def check_activation(rows: int, width: int) -> None:
    gate_up = rows_of(rows, 2 * width, 3) * 4
    if rows > 1:
        gate_up[1, :6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e4, -1e4, -90.0])
        gate_up[1, width : width + 6] = torch.tensor([1, 1, 1, torch.nan, torch.inf, -torch.inf])
    with poisoned_memory():
        found = triton_group.activate(gate_up, LIMIT)
    expected = reference._gated(gate_up, None, LIMIT)
    # The exponential is good to a few fp32 ulp: a rounding to bf16 may fall the other way now and then.
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-30, equal_nan=True)
    assert ((found != expected) & expected.isfinite()).sum() <= 2 + 0.002 * found.numel()


@interpreted
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (3, 96), (2, 1056)])
def test_interpreted_activation(rows: int, width: int) -> None:
    check_activation(rows, width)


@on_gpu
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (3, 96), (129, 2304)])
def test_activation(rows: int, width: int) -> None:
    check_activation(rows, width)


def check_sum(rows: int, hidden: int, top_k: int) -> None:
    """Bit for bit: ascending experts, then the shared one, in fp32; padding pairs are never read."""
    y, shared = rows_of(rows * top_k, hidden, 1), rows_of(rows, hidden, 2)
    ids = choices(rows, top_k, 40, 3)
    dead = torch.rand(ids.shape, generator=generator(4), device=DEVICE) < 0.2
    ids = ids.masked_fill(dead, -1)
    if rows > 2:
        ids[2] = -1
    y[ids.flatten() < 0] = torch.nan
    with poisoned_memory():
        found = triton_group.combine(y, ids, shared)
    total = torch.zeros((rows, hidden), device=DEVICE)
    for expert in range(40):
        row, choice = (ids == expert).nonzero(as_tuple=True)
        total[row] += y.view(rows, top_k, hidden)[row, choice].float()
    assert torch.equal(found, (total + shared.float()).bfloat16())


@interpreted
@pytest.mark.parametrize(("rows", "hidden", "top_k"), [(0, 64, 6), (1, 64, 1), (4, 96, 6), (3, 1088, 3)])
def test_interpreted_sum(rows: int, hidden: int, top_k: int) -> None:
    check_sum(rows, hidden, top_k)


@on_gpu
@pytest.mark.parametrize(("rows", "hidden", "top_k"), [(1, 5120, 6), (129, 5120, 6), (1000, 2048, 8)])
def test_sum(rows: int, hidden: int, top_k: int) -> None:
    check_sum(rows, hidden, top_k)


# -- routing --------------------------------------------------------------------------------------------


def router(rows: int, experts: int, hidden: int, seed: int = 0) -> list[Tensor]:
    """x, gate, bias, image_bias, is_image, valid."""
    draw = generator(seed)
    x = torch.randn((rows, hidden), generator=draw, device=DEVICE).bfloat16()
    gate = (torch.randn((experts, hidden), generator=draw, device=DEVICE) * 2 * hidden**-0.5).bfloat16()
    bias, image_bias = torch.randn((2, experts), generator=draw, device=DEVICE) * 0.3
    flags = torch.rand((2, rows), generator=draw, device=DEVICE)
    return [x, gate, bias, image_bias, flags[0] < 0.3, flags[1] < 0.8]


def check_route(args: list[Tensor], top_k: int, scale: float = 1.5) -> tuple[Tensor, Tensor]:
    """Kernel first. Ids are exact where no two scores lie closer than the fp32 sums can move them.

    A sum of D products takes D / 16 + D / 512 steps, each off by at most 2^-23 of what is summed so far,
    which is about 1 / sqrt(D) of the sum of magnitudes: 2^-21 of that sum is several times the error.
    sqrt(softplus) is no steeper than 0.6. Weights follow their scores.
    """
    with poisoned_memory():
        ids, weights = triton_route.choose(*args, top_k, scale)
    x, gate, bias, image_bias, is_image, valid = args
    expected_ids, expected_weights = reference.route(*args, top_k, scale)
    assert ids.dtype == torch.int32
    assert (ids[~valid] == -1).all()
    assert (weights[~valid] == 0).all()
    if len(x) == 0:
        return ids, weights
    magnitude = (x.double().abs() @ gate.double().abs().T).amax(1).nan_to_num(0)
    bound = 0.6 * 2.0**-21 * magnitude
    z = x.double() @ gate.double().T
    biased = torch.nn.functional.softplus(z).sqrt() + torch.where(is_image[:, None], image_bias, bias)
    best = biased.sort(dim=1, descending=True).values[:, : top_k + 1]
    clear = ((best[:, :-1] - best[:, 1:]) > 2 * bound[:, None] + 2e-6).all(1) & valid
    assert torch.equal(ids[clear], expected_ids[clear])
    torch.testing.assert_close(weights[clear], expected_weights[clear], rtol=3e-5, atol=1e-7)
    finite = valid & x.isfinite().all(1)
    assert clear[finite].float().mean() > 0.9 or finite.sum() < 10, "the margins test nothing"
    assert all(
        len(set(row)) == top_k and 0 <= min(row) <= max(row) < len(gate) for row in ids[valid].tolist()
    )
    return ids, weights


@interpreted
@pytest.mark.parametrize(
    ("rows", "experts", "hidden", "top_k"),
    [(0, 8, 64, 2), (1, 8, 64, 8), (3, 20, 704, 6), (33, 48, 192, 3), (2, 128, 1024, 16)],
)
def test_interpreted_route(rows: int, experts: int, hidden: int, top_k: int) -> None:
    check_route(router(rows, experts, hidden), top_k)


def check_odd_scores() -> None:
    """Ties, NaN rows, infinite and saturated scores, biases at the ends."""
    experts, hidden = 16, 64
    x = torch.zeros((8, hidden), dtype=torch.bfloat16, device=DEVICE)
    gate = torch.zeros((experts, hidden), dtype=torch.bfloat16, device=DEVICE)
    gate[:, 0] = torch.arange(experts, device=DEVICE) % 4
    bias = torch.zeros(experts, device=DEVICE)
    image_bias = bias.clone()
    image_bias[3], image_bias[7], image_bias[9] = -torch.inf, torch.inf, torch.nan
    x[1, 0], x[2, 0], x[3, 0], x[4, 0] = 1.0, -8.0, 100.0, -100.0
    x[5, 5] = torch.nan
    x[6, 0] = 3e38
    x[7, 0] = 1.0
    is_image = torch.zeros(8, dtype=torch.bool, device=DEVICE)
    is_image[7] = True
    args = [x, gate, bias, image_bias, is_image, torch.ones_like(is_image)]
    for top_k in (6, 16):
        found_ids, found = triton_route.choose(*args, top_k, 1.5)
        ids, weights = reference.route(*args, top_k, 1.5)
        assert torch.equal(found_ids, ids)
        torch.testing.assert_close(found, weights, rtol=1e-6, atol=0, equal_nan=True)


@interpreted
def test_interpreted_odd_scores() -> None:
    check_odd_scores()


@on_gpu
def test_odd_scores() -> None:
    check_odd_scores()


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 17, 64, 127, 128, 129, 1000, 4096])
@on_gpu
def test_route(rows: int) -> None:
    check_route(router(rows, 128, 5120, rows), 6)


@pytest.mark.parametrize(("experts", "top_k"), [(384, 6), (256, 8), (128, 3), (8, 8), (500, 16)])
@on_gpu
def test_route_of_other_models(experts: int, top_k: int) -> None:
    check_route(router(130, experts, 1088), top_k)


@on_gpu
def test_a_routed_row_is_alone() -> None:
    """The same bits alone, in company, and in another place."""
    args = router(1000, 128, 5120)
    ids, weights = triton_route.choose(*args, 6, 1.5)
    for rows in (slice(0, 1), slice(77, 78), slice(999, 1000), slice(3, 131)):
        own = [arg[rows] if position in (0, 4, 5) else arg for position, arg in enumerate(args)]
        own_ids, own_weights = triton_route.choose(*own, 6, 1.5)
        assert torch.equal(own_ids, ids[rows])
        assert torch.equal(own_weights, weights[rows])


@on_gpu
def test_route_reads_views() -> None:
    args = router(5, 128, 1024)
    wide = torch.full((5, 1024 + 8), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 1:1025] = args[0]
    ids, weights = triton_route.choose(wide[:, 1:1025], *args[1:], 6, 1.5)
    own_ids, own_weights = triton_route.choose(*args, 6, 1.5)
    assert torch.equal(ids, own_ids)
    assert torch.equal(weights, own_weights)


@compiled_only
def test_route_refuses() -> None:
    args = router(2, 8, 64)
    for broken, message in (
        ([args[0].float(), *args[1:]], "bf16"),
        ([args[0][:, :32], args[1][:, :32], *args[2:]], "32"),
    ):
        with pytest.raises(ValueError, match=message):
            triton_route.choose(*broken, 2, 1.0)
    with pytest.raises(ValueError, match="9 choices"):
        triton_route.choose(*args, 9, 1.0)


# -- the compiled objects -------------------------------------------------------------------------------


def plan_of(rows: int):
    """The few-row plan whose slots have so many rows."""
    from dsv41.ops.moe import gluon_few

    return next(plan for plan in map(gluon_few.plan, (1, 8, 100, 300)) if plan.rows == rows)


@cache
def compiled(name: str, rows: int) -> tuple[str, str, int]:
    """-> (SASS, resource usage, bytes of shared memory) of a few-row kernel, compiled without a GPU."""
    from triton.runtime.jit import mangle_type

    from dsv41.ops.moe import gluon_few

    hidden, width = 5120, 2304
    work = gluon_few.Work(plan_of(rows), 6, rows == 1, ())
    options = gluon_few._options(work, hidden, width)
    settings = {key: options.pop(key) for key in ("num_warps", "maxnreg", "launch_pdl")}
    weight = torch.empty((1, 64, hidden // 2), dtype=torch.uint8)
    codes = torch.empty((1, 4096), dtype=torch.uint8)
    boxes = (
        gluon_few.row_descriptor(codes, rows),
        *gluon_few.weight_descriptors(weight, weight[..., : hidden // 32].contiguous()),
    )
    types = dict(zip(("rows", "weight", "scale"), map(mangle_type, boxes), strict=True))
    types |= dict.fromkeys(("row_scales", "hidden_scales", "route_weights"), "*fp32")
    types |= {"hidden": "*u8", "y": "*bf16", "limit": "fp32"}
    kernel = getattr(gluon_few, name)
    sass, usage, binary = compile_sm90(kernel, options, types, other="*i32", **settings)
    return sass, usage, binary.metadata.shared


@compiled_only
@pytest.mark.parametrize("name", ["_gate_up", "_down"])
@pytest.mark.parametrize("rows", SHAPES)
def test_compiled_object(name: str, rows: int) -> None:
    sass, usage, shared = compiled(name, rows)
    products = len(re.findall(rf"QGMMA\.64x{max(8, rows)}x32\.F32\.E4M3\.E4M3", sass))
    assert products == 8, "256 of K are eight products"
    assert sass.count("GMMA") == products, "some product is of another kind"
    waits = {1: 1, 4: 1, 8: 2, 16: 2}[rows]
    assert sass.count("WARPGROUP.DEPBAR") == waits, "products are serialised"
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    assert stack == 0
    assert not re.search(r"\b(STL|LDL)", sass), "registers are spilled"
    assert registers <= {1: 80, 4: 96, 8: 96, 16: 128}[rows], "fewer CTAs an SM than planned"
    assert sass.count("PRMT") <= 2, "bytes are moved one by one: the decode's words were taken apart"
    assert shared <= {1: 54_000, 4: 33_000, 8: 33_000, 16: 39_000}[rows], "four CTAs an SM, or more"


@compiled_only
def test_why_not() -> None:
    gluon = pytest.importorskip("dsv41.ops.moe.gluon")
    assert gluon.why_not(Hardware("cuda", 90, "H200", 0), None) is None
    assert "CPU" in gluon.why_not(Hardware("cpu", 0, "CPU", 0), None)


# -- the products, stage by stage -----------------------------------------------------------------------


class Layer:
    """Weights of one shape in both orders, and one shared expert."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        self.experts, self.hidden, self.width = experts, hidden, width
        self.released = released(experts, hidden, width, seed=hidden)
        self.packed = [weight.clone() for weight in self.released]
        gluon_pack.pack(*self.packed)
        shapes = (2 * width, hidden), (hidden, width)
        self.shared = []
        for seed, (n, k) in enumerate(shapes):
            weight = torch.randn((n, k), generator=generator(seed), device=DEVICE) * 4
            self.shared += [
                weight.to(torch.float8_e4m3fn),
                integers(114, 117, (-(-n // 32), k // 32), seed),
            ]

    def weight(self, part: int, expert: int) -> Tensor:
        return records.dequantise_fp4_weight(self.released[part][expert], self.released[part + 1][expert])

    def arguments(self, rows: int, top_k: int = 6, seed: int = 0) -> list:
        """x, ids, weights."""
        weights = torch.rand((rows, top_k), generator=generator(seed), device=DEVICE) + 0.05
        size = torch.exp2(torch.arange(rows, device=DEVICE) % 5 - 1.0).unsqueeze(1)  # some meet the limit
        x = (rows_of(rows, self.hidden, seed).float() * size).bfloat16()
        return [x, choices(rows, top_k, self.experts, seed), weights]

    def run(self, impl: str, x: Tensor, ids: Tensor, weights: Tensor, deterministic: bool = False) -> Tensor:
        stored = self.released if impl == "reference" else self.packed
        stored = [*stored, *self.shared]
        return whole_experts(x, ids, weights, *stored, limit=LIMIT, impl=impl, deterministic=deterministic)


@cache
def small() -> Layer:
    return Layer(16, 1024, 512)


@cache
def release() -> Layer:
    """The release's widths, few experts."""
    return Layer(8, 5120, 2304)


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    found, expected = found.double(), expected.double()
    return (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)


def by_slot(work, ids: Tensor) -> list[tuple[int, int, int]]:
    """(slot, place in it, pair) of every live pair."""
    if work.solo:
        return [(slot, 0, slot) for slot, expert in enumerate(ids.flatten().tolist()) if expert >= 0]
    order, _, start, count, num = (part.tolist() for part in work.table)
    return [(s, i, order[start[s] + i]) for s in range(num[0]) for i in range(count[s])]


@pytest.mark.parametrize("layer", [small, release], ids=["small", "release"])
@pytest.mark.parametrize("rows", [1, 8, 64, 300])
@on_gpu
def test_hidden_rows(rows: int, layer) -> None:
    """Gate/up, activation, routing weight and quantisation, without the down product."""
    from dsv41.ops.moe import gluon_few

    layer = layer()
    x, ids, weights = layer.arguments(rows, seed=rows)
    with poisoned_memory():
        work, codes, scales = gluon_few.quantised_rows(x, ids, layer.experts, gluon_few.plan(rows))
        codes, scales = gluon_few.hidden_rows(work, codes, scales, *layer.packed[:2], weights, LIMIT)
    listed = by_slot(work, ids)
    live = (1 + max(slot for slot, _, _ in listed)) * (layer.width // 256)
    operand = operand_rows(codes[:live], scales[:live], work.plan.rows, layer.width)
    slot, place, pair = torch.tensor(listed, device=DEVICE).T
    found = operand[slot, place]
    quantised, flat = records.round_trip(x, "fp8_32"), ids.flatten()
    expected = torch.empty_like(found)
    for expert in flat.unique().tolist():
        mine = flat[pair] == expert
        product = exact_matmul(quantised[pair[mine] // ids.shape[1]], layer.weight(0, expert))
        hidden = reference._gated(product.bfloat16(), weights.flatten()[pair[mine]], LIMIT)
        expected[mine] = records.round_trip(hidden, "fp8_32").float()
    errors, share = row_errors(found, expected), (found != expected).float().mean().item()
    whole = ((found - expected).norm() / expected.norm()).item()
    print(f"hidden rows: {whole:.2e} off, a row {errors.max():.2e} at most, {share:.3%} of codes differ")
    # One code is an eighth of its value, and a sum of 14 bits may choose another; in a row whose norm is that
    # of one value this is up to 6e-2. What a code leaves is the sum's own error, to a row's root mean square.
    step = torch.maximum(found.abs(), expected.abs()) / 8
    rms = expected.square().mean(1, keepdim=True).sqrt()
    assert ((found - expected).abs() <= step + 1e-2 * rms).all()
    assert whole < 3e-3
    assert share < 0.01


@pytest.mark.parametrize("layer", [small, release], ids=["small", "release"])
@pytest.mark.parametrize("rows", SHAPES)
@on_gpu
def test_output_rows(rows: int, layer) -> None:
    """The down product alone, on hidden rows of our own."""
    from dsv41.ops.moe import gluon_few

    layer = layer()
    _, ids, _ = layer.arguments(40, seed=rows)
    hidden = rows_of(ids.numel(), layer.width, 7)
    pairs = ids.view(-1, 1)  # a row a pair
    slots = triton_group.max_slots(len(pairs), layer.experts, rows)
    with poisoned_memory():
        groups = triton_group.group(pairs, layer.experts, rows)
        work = gluon_few.Work(plan_of(rows), slots, False, (groups.order, *groups[2:]))
        codes, scales = triton_group.spread(hidden, groups, 1, slots, rows)
        found = gluon_few.output_rows(work, codes, scales, *layer.packed[2:], len(pairs))
    quantised = records.round_trip(hidden, "fp8_32")
    expected = torch.empty_like(found)
    for expert in pairs.unique().tolist():
        mine = pairs[:, 0] == expert
        expected[mine] = exact_matmul(quantised[mine], layer.weight(2, expert)).bfloat16()
    errors = row_errors(found, expected)
    print(f"output rows: {errors.max():.2e} off at most")
    assert errors.max() < 4e-3, f"pair {errors.argmax()} is {errors.max():.2e} off"


@on_gpu
def test_one_column_at_a_time() -> None:
    """A row with one value times an expert's weights is exact: a misplaced code or scale shows where."""
    from dsv41.ops.moe import gluon_few

    layer = small()
    places = [0, 1, 4, 15, 16, 31, 32, 63, 64, 200, 255, layer.width - 256, layer.width - 1]
    columns = torch.tensor(places, device=DEVICE)
    hidden = torch.zeros((len(columns), layer.width), dtype=torch.bfloat16, device=DEVICE)
    hidden[torch.arange(len(columns)), columns] = 1.0
    expected = layer.weight(2, 3)[:, columns].T.bfloat16()
    ids = torch.full((len(columns), 1), 3, dtype=torch.int32, device=DEVICE)
    for rows in SHAPES:
        slots = triton_group.max_slots(len(ids), layer.experts, rows)
        groups = triton_group.group(ids, layer.experts, rows)
        work = gluon_few.Work(plan_of(rows), slots, False, (groups.order, *groups[2:]))
        codes, scales = triton_group.spread(hidden, groups, 1, slots, rows)
        found = gluon_few.output_rows(work, codes, scales, *layer.packed[2:], len(ids))
        wrong = (found != expected).nonzero()
        assert not len(wrong), f"{rows} rows a slot: {len(wrong)} wrong (row, output): {wrong[:8].tolist()}"


# -- the whole ------------------------------------------------------------------------------------------


def check(layer: Layer, args: list, deterministic: bool = False) -> Tensor:
    with poisoned_memory():
        found = layer.run("gluon", *args, deterministic)
    expected = layer.run("reference", *args)
    assert found.shape == expected.shape
    if len(found):
        errors = row_errors(found, expected)
        print(f"{len(found)} rows: {errors.max():.2e} off at most, {errors.mean():.2e} on average")
        assert errors.max() < 1.5e-2, f"row {errors.argmax()} is {errors.max():.2e} off"
        assert errors.mean() < 6e-3
    return found


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 17, 64, 127, 128, 129, 1000, 4096])
@on_gpu
def test_rows(rows: int, deterministic: bool) -> None:
    check(small(), small().arguments(rows, seed=rows), deterministic)


@pytest.mark.parametrize("rows", [1, 8, 128, 300, 600])
@on_gpu
def test_release(rows: int) -> None:
    check(release(), release().arguments(rows, seed=rows))


@on_gpu
@pytest.mark.parametrize("rows", [1, 6, 60, 200, 400])
def test_padding_rows(rows: int) -> None:
    """Some rows choose nothing, then all: only the shared expert is left. A lone choice is a row too."""
    layer = small()
    x, ids, weights = layer.arguments(rows)
    ids[::2] = -1
    weights[::2] = 0
    check(layer, [x, ids, weights])
    ids.fill_(-1)
    check(layer, [x, ids, weights])
    ids[0, 3] = 5
    weights[0, 3] = 0.7
    check(layer, [x, ids, weights])


@on_gpu
@pytest.mark.parametrize("rows", [3, 40, 100, 300, 500])
def test_everyone_chooses_the_same(rows: int) -> None:
    layer = small()
    x, ids, weights = layer.arguments(rows)
    ids[:] = ids[0]
    check(layer, [x, ids, weights])


@on_gpu
@pytest.mark.parametrize("rows", [12, 100])
def test_hostile_rows(rows: int) -> None:
    """NaN and infinity stay in their rows; zeros, tiny and huge rows come out as the reference's."""
    layer = small()
    x, ids, weights = layer.arguments(rows)
    x[:12] = hostile_rows(layer.hidden)
    x[4] = 1e4  # 3e38 overflows in the reference too
    with poisoned_memory():
        found = layer.run("gluon", x, ids, weights)
    expected = layer.run("reference", x, ids, weights)
    sick = expected.isnan().any(1)
    assert sick[5:8].all()
    assert not sick[[0, 1, 2, 3, 4, 8]].any()
    assert found[sick].isnan().all(1).equal(expected[sick].isnan().all(1))
    assert not found[~sick].isnan().any(), "NaN of another row"
    assert row_errors(found[~sick], expected[~sick]).max() < 1.5e-2


@on_gpu
@pytest.mark.parametrize(("few", "many"), [(2, 48), (49, 128), (129, 300)])
def test_few_rows_do_not_meet(few: int, many: int) -> None:
    """Where the plan is the same, so are the bits, whoever shares a slot."""
    layer = small()
    x, ids, weights = layer.arguments(many)
    together = layer.run("gluon", x, ids, weights)
    alone = layer.run("gluon", x[:few], ids[:few], weights[:few])
    assert torch.equal(alone, together[:few])
    assert torch.equal(layer.run("gluon", x, ids, weights), together)


@on_gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 8, 64, 65])
def test_the_shared_expert_beside_the_others_gives_the_same_bits(
    rows: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With linear kernels that are launched early, in a stack whose freed memory is used again at once."""
    from dsv41.ops.moe import gluon

    layer = release()
    x, ids, weights = layer.arguments(rows, seed=rows)

    def stack(fork_rows: int) -> list[Tensor]:
        monkeypatch.setattr(gluon, "FORK_ROWS", fork_rows)
        row, kept = x, []
        for _ in range(6):
            fixed = {"limit": LIMIT, "impl": "gluon", "deterministic": deterministic, "linear_impl": "gluon"}
            row = whole_experts(row, ids, weights, *layer.packed, *layer.shared, **fixed) * 0.5
            torch.full_like(row, torch.nan)
            kept.append(row)
        return kept

    with poisoned_memory():
        ours, serial = stack(64), stack(0)
    assert all(torch.equal(a, b) for a, b in zip(ours, serial, strict=True))
    if not rows:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = stack(64)
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(again, serial, strict=True))


@on_gpu
@pytest.mark.parametrize("rows", [1, 8, 100, 300])
def test_same_bits_every_time(rows: int) -> None:
    """Launches overlap their predecessors: one that reads too early would show here, sooner or later."""
    layer = small()
    args = layer.arguments(rows)
    first = layer.run("gluon", *args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [layer.run("gluon", *args) for _ in range(20)]
    for _ in range(5):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(out, first) for out in outs)


@on_gpu
def test_deterministic_rows_are_alone() -> None:
    layer = small()
    args = layer.arguments(128)
    together = layer.run("gluon", *args, True)
    for rows in (slice(0, 1), slice(77, 78), slice(127, 128), slice(5, 40)):
        assert torch.equal(layer.run("gluon", *(arg[rows] for arg in args), True), together[rows])


@on_gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 200, 500])
def test_captured(rows: int) -> None:
    """A graph replays on new inputs, other choices and other numbers of slots included."""
    layer = small()
    args, other = layer.arguments(rows), layer.arguments(rows, seed=9)
    other[1][rows // 2 :] = other[1][0]
    layer.run("gluon", *args)
    expected = [layer.run("gluon", *each) for each in (args, other)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The shared expert stands apart: its reference reads nothing back either.
    with torch.cuda.graph(graph):
        out = layer.run("gluon", *args)
    originals = [arg.clone() for arg in args]
    for values, wanted in ((other, expected[1]), (originals, expected[0])):
        for arg, value in zip(args, values, strict=True):
            arg.copy_(value)
        graph.replay()
        assert torch.equal(out, wanted)


@on_gpu
def test_views() -> None:
    layer = small()
    x, ids, weights = layer.arguments(9)
    wide = torch.full((9, layer.hidden + 24), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 8 : 8 + layer.hidden] = x
    more = torch.full((9, 9), -1, dtype=torch.int32, device=DEVICE)
    more[:, 1:7] = ids
    found = layer.run("gluon", wide[:, 8 : 8 + layer.hidden], more[:, 1:7], weights.T.contiguous().T)
    assert torch.equal(found, layer.run("gluon", x, ids, weights))


@on_gpu
def test_refusals() -> None:
    layer = small()
    x, ids, weights = layer.arguments(2)
    with pytest.raises(ValueError, match="bf16"):
        layer.run("gluon", x.float(), ids, weights)
