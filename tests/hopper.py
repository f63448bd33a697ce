"""What the engine's tests on one SM90 GPU share: the mark that skips them elsewhere, and a model of stand-in
weights at the least sizes that every Hopper kernel takes."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from dsv41.config import EngineConfig
from dsv41.runner.load import Model, blueprint, load

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = [pytest.mark.gpu, pytest.mark.skipif(not hopper, reason="needs one SM90 GPU")]

ALL = "sm90"
WIDE = "expert_dim=256"  # the least that the expert kernels take


@cache
def kernel_model(deterministic: bool = True) -> Model:
    plan = blueprint(preset_name="kernel", overrides=[WIDE], device="cuda", backends=ALL)
    return load(plan, engine=EngineConfig(deterministic=deterministic))
