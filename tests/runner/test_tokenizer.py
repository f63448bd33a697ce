"""Ids, text and the compressed token map, against the golden models' tokenizers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv41.config import ModelConfig
from dsv41.runner.tokenizer import Tokenizer, _normaliser

GOLDEN = Path(__file__).resolve().parents[2].parent / "shared" / "golden"
MODELS = ("tiny", "kernel_dims")


def load(model: str) -> tuple[Tokenizer, ModelConfig]:
    directory = GOLDEN / model / "model"
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    return tokenizer, ModelConfig.load(directory)


def test_no_tokenizer_file(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None


@pytest.mark.parametrize("text", ["hello world", "  two  spaces ", "naïve — 漢字 🙂", "a , b . isn 't", ""])
def test_text_survives(text: str) -> None:
    tokenizer, _ = load("tiny")
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text


def test_bos_is_added_once() -> None:
    tokenizer, config = load("tiny")
    plain = tokenizer.encode("hello", add_bos=False)
    assert config.bos_token not in plain
    once = [config.bos_token, *plain]
    assert tokenizer.encode("hello") == once
    assert tokenizer.encode(tokenizer.decode(once)) == once
    assert tokenizer.encode("") == [config.bos_token]
    assert tokenizer.eos == config.eos_token


@pytest.mark.parametrize("model", MODELS)
def test_token_map_is_golden(model: str) -> None:
    tokenizer, config = load(model)
    golden = load_file(GOLDEN / model / "golden" / "engram_tables.safetensors")
    token_map = tokenizer.engram_token_map(config)
    assert token_map.dtype == torch.int64
    assert torch.equal(token_map, golden["token_map"])
    assert int(token_map[config.engram.pad_token]) == int(golden["pad"])


def test_another_tokenizer_is_refused() -> None:
    tokenizer, config = load("tiny")
    engram = dataclasses.replace(config.engram, compressed_vocab=383)
    with pytest.raises(ValueError, match=r"512 tokens compress to 382 ids.*is 383"):
        tokenizer.engram_token_map(dataclasses.replace(config, engram=engram))


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        (" ", " "),  # the sentinel: without it every kind of blank would have an empty key
        ("\t\r\n ", " "),
        ("\u3000", " "),
        (" The ", "the"),
        ("ÉCOLE", "ecole"),
        ("ﬁ①", "fi1"),
        ("a \n\t b", "a b"),
        ("ΣΑΣ", "σασ"),  # per character: str.lower gives a final ς
        ("\u0915\u093e", "\u0915"),  # a spacing vowel sign (Mc) goes too
        ("\x1c", "\x1c"),  # str.strip would remove it
        ("", ""),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    assert _normaliser()(text) == normal
