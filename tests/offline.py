"""Kernels compiled for sm_90 on any machine, and what their objects say."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Compiled(NamedTuple):
    """SASS and resource usage as the disassembler prints them, and Triton's own record of the compilation."""

    sass: str
    usage: str
    binary: Any


def compile_sm90(
    kernel: Any,
    constants: Mapping[str, object],
    types: Mapping[str, str],
    *,
    other: str = "i32",
    aligned: Collection[str] = (),
    **options: object,
) -> Compiled:
    """A Triton or Gluon kernel with `constants` as constexprs; `types` of its arguments, `other` for the
    rest. Pointers and the `aligned` integers are multiples of 16. Skips the test without Triton."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, other) for name in names}
    sixteens = [name for name in names if signature[name][0] == "*" or name in aligned]
    source = (GluonASTSource if "Gluon" in type(kernel).__name__ else ASTSource)(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in sixteens},
    )
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary.asm["cubin"])
        sass, usage = (
            subprocess.run([tools / tool, flag, path], capture_output=True, text=True, check=True).stdout
            for tool, flag in (("nvdisasm", "-c"), ("cuobjdump", "-res-usage"))
        )
    return Compiled(sass, usage, binary)
