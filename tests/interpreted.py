"""Triton kernels on a CPU: a process that imports Triton as an interpreter, and what its interpreter needs
mending.

A test file that imports from here runs its `interpreted` tests in such a process
(`run_interpreted(__file__)`) and gets `repair_the_interpreter` by importing it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"
gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs one CUDA GPU of SM80 or newer")]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs under TRITON_INTERPRET=1: see run_interpreted")


def run_interpreted(file: str) -> None:
    """All interpreter tests of a file, in a process that imports Triton as an interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not gpu", file],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout, done.stdout[-4000:]


@pytest.fixture(scope="session", autouse=True)
def repair_the_interpreter() -> Iterator[None]:
    """Triton 3.6's interpreter truncates to bf16, loses subnormals, and cannot loop to a run-time bound under
    NumPy 2.4. The kernels mean the hardware's conversions."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            import triton.language as tl
            from triton.runtime import interpreter

            dtypes = {tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}
            integers = {16: torch.int16, 32: torch.int32}

            def convert(x: np.ndarray, source: object, target: object, rounding: object) -> np.ndarray:
                bits = torch.from_numpy(np.ascontiguousarray(x).view(f"int{source.primitive_bitwidth}"))
                to = bits.view(dtypes[source]).to(dtypes[target])
                return to.view(integers[target.primitive_bitwidth]).numpy().reshape(x.shape)

            def patch_tensor(
                tensor: type, scope: object, original: Callable = interpreter._patch_lang_tensor
            ):
                original(tensor, scope)
                scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

            patch.setattr(interpreter, "_convert_float", convert)
            patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
        yield
