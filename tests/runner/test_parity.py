"""The parity steps of `bench`: their reference sees the release's weights, whatever order kernels keep."""

from __future__ import annotations

import pytest
import torch

from dsv41.config import EngineConfig
from dsv41.ops.linear import reference as linear
from dsv41.ops.moe import reference as moe
from dsv41.runner import parity
from dsv41.runner.load import blueprint, load

ENGINE = EngineConfig(page_tokens=4, max_context_tokens=64, max_requests=4)


def flip(*weights: torch.Tensor) -> None:
    """An order of bytes that no reference can read."""
    for weight in weights:
        flat = weight.view(torch.uint8).view(-1)
        flat.copy_(flat.flip(0))


def test_packing_comes_after_loading_and_goes_away_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured side runs on packed weights, the reference on unpacked ones, and afterwards they are
    packed again. Catches a second `pack`, weights left unpacked, and a family that is not asked."""
    plain = load(blueprint(preset_name="tiny", device="cpu", page_tokens=4))
    for family in (linear, moe):
        monkeypatch.setattr(family, "pack", flip, raising=False)
        monkeypatch.setattr(family, "unpack", flip, raising=False)
    packed = load(blueprint(preset_name="tiny", device="cpu", page_tokens=4))
    released = plain.decoder.state_dict()
    for name, ours in packed.decoder.state_dict().items():
        quantised = ours.element_size() == 1 and "engram.table" not in name
        assert torch.equal(ours.view(torch.uint8), released[name].view(torch.uint8)) != quantised, name
    seen = []

    def measured(step, caches):
        seen.append(packed.decoder.packed)
        return plain.decoder(step, caches)

    assert parity.compare(packed, ENGINE, measured).worst_row == 0.0
    assert seen == [True] * 4
    assert packed.decoder.packed
    with pytest.raises(AssertionError, match="in that order already"):
        packed.decoder.pack_weights()


def test_a_wrong_callable_is_told() -> None:
    model = load(blueprint(preset_name="tiny", device="cpu", page_tokens=4))

    def measured(step, caches):
        output = model.decoder(step, caches)
        return type(output)(output.hidden.flip(-1), output.features, output.fault_layer)

    assert not parity.compare(model, ENGINE, measured).passed


def test_a_deep_model_is_held_to_its_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit below the tiny model's noise: one more rounding passes, half a residual does not."""
    monkeypatch.setitem(parity.PARITY_LIMIT, True, 1e-3)
    model = load(blueprint(preset_name="tiny", device="cpu", page_tokens=4))
    nudged = parity._nudged(model.decoder.embedding)
    ulps = (nudged.view(torch.int16) - model.decoder.embedding.view(torch.int16)).abs()
    assert ulps.max() == 1
    assert ulps.float().mean() > 0.99

    other = parity.twin(model, model.backends)
    other.embedding = torch.nn.Parameter(nudged, requires_grad=False)
    found = parity.compare(model, ENGINE, other)
    assert found.passed
    assert found.noise == found.worst_row > 1e-3
    assert found.limit == parity.NOISE_FACTOR * found.noise

    other.embedding = torch.nn.Parameter(model.decoder.embedding * 1.5, requires_grad=False)
    assert not parity.compare(model, ENGINE, other).passed
