"""Makes `dsv41/data/parity` from the golden data: `python tests/make_parity_excerpt.py`.

A text-only copy of golden/tiny/model in one shard, and the release's own logits of three prompts. `check`
compares with them on any machine; tests/test_parity_excerpt.py shows that they equal the golden data.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from golden import GOLDEN, checkpoint, tensors
from safetensors.torch import save_file

from dsv41.config import ModelConfig
from dsv41.model.checkpoint import checkpoint_tensors

EXCERPT = Path(__file__).resolve().parents[1] / "dsv41" / "data" / "parity"
TEXT_ONLY = ("vision=null", "draft.stages=0")
PROMPTS = {"fp32nq": ("p25", "ngram"), "bf16": ("p7",)}


def text_config() -> ModelConfig:
    return ModelConfig.load(GOLDEN / "tiny" / "model").with_overrides(TEXT_ONLY)


def expected() -> dict[str, np.ndarray]:
    """`{mode}.{prompt}.prefill [S, V]` and `.decode [N, V]`, `{prompt}.ids [S + N]`; bf16 also `.margin`."""
    values = {}
    prompts = tensors("tiny/golden/prompts")
    for mode, names in PROMPTS.items():
        logits = tensors(f"tiny/golden/logits_{mode}")
        for name in names:
            fed = tensors("tiny/golden/logits_bf16")[f"{name}.tokens"][0, :-1]
            values[f"{name}.ids"] = np.concatenate((prompts[f"{name}.ids"][0].numpy(), fed.numpy()))
            kinds = ("prefill", "decode", "margin") if mode == "bf16" else ("prefill", "decode")
            values |= {f"{mode}.{name}.{kind}": logits[f"{name}.{kind}"][0].numpy() for kind in kinds}
    return values


def main() -> None:
    EXCERPT.mkdir(parents=True, exist_ok=True)
    config = text_config()
    weights = checkpoint("tiny")
    names = [spec.name for spec in checkpoint_tensors(config)]
    save_file({name: weights[name] for name in names}, EXCERPT / "model.safetensors")
    (EXCERPT / "config.json").write_text(json.dumps(config.to_released(), indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(GOLDEN / "tiny" / "model" / name, EXCERPT / name)
    np.savez_compressed(EXCERPT / "expected.npz", **expected())
    (EXCERPT / "model.safetensors").chmod(0o644)  # save_file leaves it to its owner alone


if __name__ == "__main__":
    main()
