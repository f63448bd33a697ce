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
from types import SimpleNamespace

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
    """Triton 3.6's interpreter truncates to bf16, loses subnormals, multiplies bf16 tiles by their bits as
    integers, and cannot loop to a run-time bound under NumPy 2.4. The kernels mean the hardware's
    arithmetic. It also patches the language
    anew for every function that a kernel calls; once a launch is enough."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            import triton.language as tl
            from triton.runtime import interpreter

            dtypes = {
                tl.bfloat16: torch.bfloat16,
                tl.float32: torch.float32,
                tl.float8e4nv: torch.float8_e4m3fn,
            }
            integers = {8: torch.int8, 16: torch.int16, 32: torch.int32}

            def convert(x: np.ndarray, source: object, target: object, rounding: object) -> np.ndarray:
                bits = torch.from_numpy(np.ascontiguousarray(x).view(f"int{source.primitive_bitwidth}"))
                to = bits.view(dtypes[source]).to(dtypes[target])
                return to.view(integers[target.primitive_bitwidth]).numpy().reshape(x.shape)

            def patch_tensor(
                tensor: type, scope: object, original: Callable = interpreter._patch_lang_tensor
            ):
                original(tensor, scope)
                scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

            def widened(operand: interpreter.TensorHandle) -> interpreter.TensorHandle:
                if operand.dtype.scalar != tl.bfloat16:
                    return operand
                values = (operand.data.astype(np.uint32) << 16).view(np.float32)
                return interpreter.TensorHandle(values, tl.float32)

            whole = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
            outermost: list[object] = []

            def patch_language(function: object, original: Callable = interpreter._patch_lang) -> object:
                if outermost and outermost[0]._changes:  # a scope that has been restored has none
                    return interpreter._LangPatchScope()
                outermost[:] = [original(whole)]
                return outermost[0]

            multiply = interpreter.InterpreterBuilder.create_dot

            def dot(self: object, a: object, b: object, *rest: object) -> interpreter.TensorHandle:
                return multiply(self, widened(a), widened(b), *rest)

            patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
            patch.setattr(interpreter, "_convert_float", convert)
            patch.setattr(interpreter, "_patch_lang", patch_language)
            patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
        yield


def pack_pairs(even: object, odd: object) -> object:
    """What the inline assembly of `pack` does (ops/hyper/triton_words.py): the interpreter has none."""
    import triton.language as tl

    low = even.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    high = odd.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return (low | (high << 16)).to(tl.int32, bitcast=True)


# -- inputs -----------------------------------------------------------------------------------------------


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed), device=DEVICE)


def apart(x: torch.Tensor, gap: int = 8, filler: float = torch.nan) -> torch.Tensor:
    """The same rows, with NaN (or another value) between and around them."""
    wide = torch.full((len(x), x[0].numel() + 2 * gap), filler, dtype=x.dtype, device=x.device)
    return wide[:, gap:-gap].unflatten(1, x.shape[1:]).copy_(x)
