"""Engram: hash, lookup and write, against the release's own units and against the equations in plain
integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import one_request
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv41.ops.engram.op import engram_hash, engram_lookup, engram_write
from dsv41.ops.linear.op import linear_fp8
from dsv41.runner.load import blueprint

UNITS = Path(__file__).resolve().parents[3] / "shared" / "golden" / "units"
IMPL = "reference"


def back(tokens: Tensor, depth: int) -> Tensor:
    """tokens 1 ... depth back, -1 before the start. [S] -> [S, depth]"""
    padded = torch.cat((torch.full((depth,), -1), tokens))
    return torch.stack([padded[depth - i : len(padded) - i] for i in range(1, depth + 1)], dim=1)


# -- hash -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layer", [0, 1])
def test_hash_of_the_release(layer: int, masked: bool) -> None:
    """The released primes and multipliers; their products fill 63 bits. Catches a hash in floating point,
    blocking that is not cumulative, a column order of heads before n-gram sizes."""
    golden = load_file(UNITS / "engram_release.safetensors")
    pad = int(golden["pad_compressed"])
    identity = torch.arange(int(golden["compressed_ids"].max()) + pad + 1)
    for ids, text, expected in zip(
        golden["compressed_ids"],
        golden["token_mask"],
        golden["hash_ids_masked" if masked else "hash_ids"],
        strict=True,
    ):
        image = ~text if masked else torch.zeros_like(text)
        rows = engram_hash(
            ids,
            back(torch.where(image, -1, ids), 3),
            image,
            identity,
            golden["multipliers"][layer],
            golden["primes"][layer],
            golden["offsets"][layer],
            pad,
            IMPL,
        )
        assert torch.equal(rows, expected[:, layer])


MAP = torch.tensor([3, 0, 7, 5, 5, 2, 9, 4])  # tokens 3 and 4 are one word
MULTIPLIERS = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
PRIMES = torch.tensor([[97, 101], [103, 107], [109, 113]])
OFFSETS = torch.tensor([0, 97, 198, 301, 408, 517])
PAD = 2


def hashed(
    tokens: Sequence[int], lookback: Sequence[Sequence[int]], image: Sequence[bool]
) -> list[list[int]]:
    return engram_hash(
        torch.tensor(tokens),
        torch.tensor(lookback),
        torch.tensor(image),
        MAP,
        MULTIPLIERS,
        PRIMES,
        OFFSETS,
        PAD,
        IMPL,
    ).tolist()


def by_hand(token: int, lookback: Sequence[int], image: bool) -> list[int]:
    blocked, rolling, columns = False, 0, []
    for shift, one in enumerate([token, *lookback]):
        blocked = blocked or one < 0 or (shift == 0 and image)
        rolling ^= int(MAP[PAD if blocked else one]) * int(MULTIPLIERS[shift])
        if shift:
            columns += [rolling % int(prime) for prime in PRIMES[shift - 1]]
    return [row + int(offset) for row, offset in zip(columns, OFFSETS, strict=True)]


def test_blocking_is_cumulative() -> None:
    """What lies behind a blocked token is blocked too, whatever id it has. The pad is a raw id, mapped like
    others."""
    histories = [[4, 5, 6], [-1, 5, 6], [4, -1, 6], [4, 5, -1], [-1, -1, -1]]
    found = hashed([1] * 5, histories, [False] * 5)
    assert found == [by_hand(1, history, False) for history in histories]
    assert found[1] == found[4] != found[0]
    assert hashed([1], [[4, -1, 6]], [False]) == hashed([1], [[4, -1, 0]], [False])
    assert hashed([1], [[PAD, PAD, PAD]], [False]) == [found[4]]


def test_an_image_row_blocks_itself() -> None:
    assert hashed([1], [[4, 5, 6]], [True]) == hashed([PAD], [[-1, -1, -1]], [False])
    assert hashed([1], [[4, 5, 6]], [True]) != hashed([1], [[4, 5, 6]], [False])


def test_equal_words_have_equal_rows() -> None:
    """The map is applied to history as to the token."""
    assert hashed([3], [[1, 3, 4]], [False]) == hashed([4], [[1, 4, 3]], [False])


@pytest.mark.parametrize("length", [1, 2, 3, 9])
@pytest.mark.parametrize("image_at", [None, 1])
def test_lookback_is_the_history(length: int, image_at: int | None) -> None:
    """A prompt of 1, 2, 3 tokens, and a split after 1, 2, 3: the rows' lookback is the same as in one call,
    i.e. the true history, -1 before the start and on image tokens. Catches history that restarts with a
    chunk."""
    plan = blueprint(preset_name="tiny", device="cpu", page_tokens=4)
    tokens = list(range(40, 40 + length))
    images = [position == image_at for position in range(length)]
    text = torch.tensor([-1 if image else token for token, image in zip(tokens, images, strict=True)])
    for first in {1, 2, 3, length}:
        if first > length:
            continue
        counts = [count for count in (first, length - first) if count]
        found = one_request.steps(tokens, counts, plan.config, plan.layout, images=images)
        assert torch.cat([step.token_ids for step in found]).tolist() == tokens
        assert torch.cat([step.is_image for step in found]).tolist() == images
        assert torch.equal(torch.cat([step.lookback for step in found]), back(text, 3))


# -- lookup -----------------------------------------------------------------------------------------------


def table() -> tuple[Tensor, Tensor]:
    """e4m3 [40, 64] and e8m0 scale bytes [40, 2], the extremes among them."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(40, 64, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.randint(100, 150, (40, 2), generator=generator, dtype=torch.uint8)
    scale[7] = torch.tensor([0, 240])
    return codes, scale


def test_lookup() -> None:
    """Each half of a row has a scale of its own; rows are concatenated in column order. Catches a scale read
    as a number, one scale a row, and a bf16 product."""
    codes, scale = table()
    rows = torch.tensor([[7, 0, 39], [39, 7, 7]])
    expected = codes.double() * torch.exp2(scale.double() - 127).repeat_interleave(32, dim=1)
    assert len(expected[rows.unique()].unique(dim=0)) == 3
    for dtype in (torch.float32, torch.bfloat16):
        found = engram_lookup(codes, scale, rows, dtype, IMPL)
        assert torch.equal(found, expected[rows].float().to(dtype).flatten(1))


def test_lookup_reads_a_mapped_file(tmp_path: Path) -> None:
    """The table of the release may stay in its file. Only the named rows are read: the rest is NaN."""
    codes, scale = table()
    rows = torch.tensor([[7, 0, 39]])
    poisoned = torch.full((40, 64), torch.nan).to(torch.float8_e4m3fn)
    poisoned.view(torch.uint8)[rows[0]] = codes.view(torch.uint8)[rows[0]]
    for name, tensor in (("codes", poisoned), ("scale", scale)):
        tensor.view(torch.uint8).numpy().tofile(tmp_path / name)
    mapped = {
        name: torch.from_numpy(np.memmap(tmp_path / name, dtype=np.uint8, mode="r+", shape=(40, width)))
        for name, width in (("codes", 64), ("scale", 2))
    }
    found = engram_lookup(
        mapped["codes"].view(torch.float8_e4m3fn), mapped["scale"], rows, torch.bfloat16, IMPL
    )
    assert found.isfinite().all()
    assert torch.equal(found, engram_lookup(codes, scale, rows, torch.bfloat16, IMPL))


# -- write ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_write_of_the_release(masked: bool) -> None:
    """Lookup, projection, gates and write, to the release's bf16 bits; image rows keep their stream."""
    golden = load_file(UNITS / "engram_write.safetensors")
    text = golden["token_mask"][0]
    image = ~text if masked else torch.zeros_like(text)
    scale = golden["table_scale"].view(torch.uint8)
    looked_up = engram_lookup(golden["table"], scale, golden["hash_ids"][0], torch.bfloat16, IMPL)
    assert torch.equal(looked_up, golden["rows_bf16"][0].flatten(1))
    kv = linear_fp8(looked_up, golden["wkv"], golden["wkv_scale"].view(torch.uint8), True, False, IMPL)
    streams = golden["stream"][0]
    out = engram_write(streams, kv, golden["q_weight"], golden["k_weight"], image, 1e-20, IMPL)
    expected = golden["out_masked" if masked else "out"][0]
    assert bool((~text).any())
    assert not torch.equal(golden["out"], golden["out_masked"])
    assert not torch.equal(expected, streams)
    torch.testing.assert_close(out, expected, rtol=2**-8, atol=1e-6)
    assert float((out != expected).float().mean()) < 0.01
    if masked:
        assert torch.equal(out[image], streams[image])


@pytest.mark.parametrize(("dot", "alpha"), [(0.0, 1e-3), (3e-7, 1e-3), (-3e-7, -1e-3), (-0.25, -0.5)])
def test_gate_of_a_weak_match(dot: float, alpha: float) -> None:
    """The dot is floored at 1e-6 before the root and keeps its sign, +0 counting as positive. Catches sign(0)
    = 0, a gate of 0.5, and a floor on the signed value. A zero row has a finite rms too."""
    hidden = 4
    streams, kv = torch.zeros(1, 1, hidden), torch.ones(1, 2 * hidden)
    if dot:
        streams[:] = 1.0
    query = torch.full((1, hidden), dot * hidden**-0.5)
    out = engram_write(streams, kv, query, torch.ones(1, hidden), torch.tensor([False]), 1e-20, IMPL)
    gate = 1 / (1 + math.exp(-alpha))
    torch.testing.assert_close(out, streams + gate, rtol=2e-7, atol=0)
    assert abs(gate - 0.5) > 2e-4


def test_gate_of_a_match() -> None:
    """Every copy has its own key and gate; the value is shared. Catches a dot without its norms or without
    1/sqrt(D)."""
    generator, hidden = torch.Generator().manual_seed(0), 16
    streams = torch.randn(3, 2, hidden, generator=generator)
    kv = torch.randn(3, 3 * hidden, generator=generator)
    query, key = torch.randn(2, 2, hidden, generator=generator)
    out = engram_write(streams, kv, query, key, torch.tensor([False, True, False]), 1e-20, IMPL)
    for row in (0, 2):
        value = kv[row, 2 * hidden :]
        for copy in range(2):
            x, k = streams[row, copy].double(), kv[row, copy * hidden : (copy + 1) * hidden].double()
            dot = (x * query[copy] * key[copy] * k).sum() / (
                x.square().mean() * k.square().mean() * hidden
            ).sqrt()
            gate = torch.sigmoid(dot.sign() * dot.abs().sqrt())
            assert float(dot.abs()) > 1e-6
            torch.testing.assert_close(out[row, copy], (x + gate * value).float(), rtol=1e-5, atol=1e-6)
    assert torch.equal(out[1], streams[1])
