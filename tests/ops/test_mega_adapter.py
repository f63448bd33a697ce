"""Mega is refused by name: first for what the machine lacks, then for what dsv41 lacks."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dsv41 import backends
from dsv41.config import Numerics
from dsv41.hardware import Hardware
from dsv41.ops.attention import mega
from dsv41.ops.attention.op import sparse_attention

SM100 = Hardware("cuda", 100, "B200", 1 << 37)
WHEEL = ModuleType("flash_mla")
NO_PLACE = (
    "its kernel rotates queries and outputs and rounds outputs to e4m3, and dsv41 has no grouped projection "
    "of e4m3 inputs to follow it; use attention=flashmla"
)


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The ops that importing sgl-flash-mla 1.0.0 registers."""
    ops = SimpleNamespace(fused_norm_rope_attn_rope_cast_decode=print, permute_q_b_proj=print)
    monkeypatch.setitem(sys.modules, "flash_mla", WHEEL)
    monkeypatch.setattr(torch.ops, "flash_mla", ops, raising=False)
    return ops


def test_gpus_and_records(wheel) -> None:
    for sm, name in ((0, "CPU"), (90, "H200"), (120, "B6000")):
        assert (
            mega.why_not(Hardware("cuda", sm, name, 0), None) == f"Mega has kernels for SM100, this is {name}"
        )
    assert mega.why_not(SM100, "mixed_584") == "Mega reads scaled_528 and nvfp4_288, not mixed_584"


@pytest.mark.parametrize("name", ["fused_norm_rope_attn_rope_cast_decode", "permute_q_b_proj"])
def test_its_ops_are_looked_for(wheel, name: str) -> None:
    delattr(wheel, name)
    sentence = f"this package 'flash_mla' registers no op {name} (pip install --no-deps sgl-flash-mla)"
    assert mega.why_not(SM100, "scaled_528") == sentence


def test_its_package_is_looked_for(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    sentence = "it needs the package 'flash_mla' (pip install --no-deps sgl-flash-mla)"
    assert mega.why_not(SM100, None) == sentence

    def broken() -> object:
        raise OSError("libtorch_cuda.so is not there\nand more lines")

    monkeypatch.setattr(mega, "_registered", broken)
    sentence = "the package 'flash_mla' does not load here: libtorch_cuda.so is not there"
    assert mega.why_not(SM100, None) == sentence


@pytest.mark.parametrize("record", [None, "scaled_528", "nvfp4_288"])
def test_all_of_it_there_is_not_enough(wheel, record: str | None) -> None:
    assert mega.why_not(SM100, record) == NO_PLACE


def test_the_choice_and_the_call_are_refused(wheel) -> None:
    """SM100 takes FlashMLA by the one documented rule; whoever asks for Mega by name is told why not."""
    assert backends.automatic(SM100, 64, 8) == "sm100"
    sentence = f"--backends attention=mega cannot run on B200: {NO_PLACE}"
    with pytest.raises(ValueError, match=sentence):
        backends.select(SM100, Numerics.BF16, "sm100-mega,indexing=reference,publish=reference", 64, 8)
    q, cache = torch.zeros((1, 8, 512), dtype=torch.bfloat16), torch.zeros((1, 528), dtype=torch.uint8)
    slots = torch.zeros((1, 1), dtype=torch.int32)
    with pytest.raises(ValueError, match=f"attention=mega does not run: {NO_PLACE}"):
        sparse_attention(
            q, cache, slots, "scaled_528", 1, cache, slots, "scaled_528", 1, torch.zeros(8), 64, False, "mega"
        )
