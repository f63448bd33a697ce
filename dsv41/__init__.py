"""DeepSeek-V4.1-Flash as one compiled graph per step.

    module = dsv41.compiled("tiny")        # a preset, or a checkpoint directory
    module.plan, module.segments, module.backends

Names are resolved on first use: `import dsv41` needs torch alone, and no GPU.
"""

import time
from importlib import import_module
from typing import Any

IMPORTED_AT = time.perf_counter()  # where the first phase of a start begins
_HOMES = {
    "EngineConfig": "dsv41.config",
    "ModelConfig": "dsv41.config",
    "LLM": "dsv41.runner.engine",
    "SamplingParams": "dsv41.runner.request",
    "compiled": "dsv41.runner.load",
}

__all__ = ["LLM", "EngineConfig", "ModelConfig", "SamplingParams", "compiled"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dsv41' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
