"""The parity excerpt that ships with the package is the golden data, no more and no less."""

from __future__ import annotations

import json

import numpy as np
import torch
from golden import checkpoint
from make_parity_excerpt import EXCERPT, expected, text_config
from safetensors.torch import load_file

from dsv41.model.checkpoint import checkpoint_tensors


def test_the_weights_are_the_text_part_of_the_golden_checkpoint():
    stored, golden = load_file(EXCERPT / "model.safetensors"), checkpoint("tiny")
    assert set(stored) == {spec.name for spec in checkpoint_tensors(text_config())}
    for name, tensor in stored.items():
        assert tensor.dtype == golden[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), golden[name].view(torch.uint8)), name


def test_the_config_is_the_golden_one_without_draft_and_vision():
    assert json.loads((EXCERPT / "config.json").read_text()) == text_config().to_released()


def test_the_expected_values_are_the_golden_ones():
    values = expected()
    with np.load(EXCERPT / "expected.npz") as stored:
        assert set(stored.files) == set(values)
        for name, value in values.items():
            np.testing.assert_array_equal(stored[name], value, strict=True)


def test_the_excerpt_is_small():
    assert sum(file.stat().st_size for file in EXCERPT.iterdir()) < 6_000_000
