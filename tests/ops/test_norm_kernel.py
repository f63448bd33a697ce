"""The norm kernel against the reference: interpreted at small sizes, compiled for Hopper, and on a GPU.

The order of a float32 sum moves the root by about 1e-7, and a stored bf16 value by one step where it lies on
a rounding boundary: 1e-7 * 2^8 of the values, of which 1e-3 is an ample bound.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import (  # noqa: F401
    DEVICE,
    GPU,
    INTERPRETED,
    gpu,
    interpreted,
    normal,
    repair_the_interpreter,
    run_interpreted,
)
from offline import compile_sm90
from torch import Tensor

from dsv41.ops.linear import reference

EPS = 1e-20


@pytest.mark.skipif(INTERPRETED or GPU, reason="this process runs the kernels itself")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def rows_inside(rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows of a wider tensor, between NaN columns, of magnitudes from 2^-20 to 2^20."""
    wide = torch.full((rows, dim + 24), torch.nan, dtype=dtype, device=DEVICE)
    octaves = torch.arange(rows, device=DEVICE)[:, None] % 41 - 20
    wide[:, 8 : 8 + dim] = (normal((rows, dim), seed=rows) * 2.0**octaves).to(dtype)
    return wide[:, 8 : 8 + dim]


def check(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert torch.isfinite(got).all()
    step = 2.0 ** (expected.float().abs().log2().floor() - (7 if got.dtype == torch.bfloat16 else 21))
    off = (got.float() - expected.float()).abs()
    assert (off <= step).all()
    if got.dtype == torch.bfloat16:
        assert (off > 0).sum() <= 1e-3 * off.numel()


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (3, 96), (5, 1280)])
def test_equals_the_reference(rows: int, dim: int, dtype: torch.dtype) -> None:
    from dsv41.ops.linear.triton_norm import norm_kernel

    x, norm, out = (
        rows_inside(rows, dim, dtype),
        normal((dim,), seed=7).bfloat16(),
        torch.empty(rows, dim, dtype=dtype),
    )
    norm_kernel[(rows,)](x, norm, out, x.stride(0), EPS, D=dim, BLOCK=2048, EARLY=False, STACKED=False)
    check(out, reference.rms_norm(x, norm, EPS))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
def test_compiled_for_hopper() -> None:
    from dsv41.ops.linear.triton_norm import norm_kernel

    constants = {"D": 1280, "BLOCK": 2048, "EARLY": True, "STACKED": True}
    types = {"x": "*bf16", "norm": "*bf16", "out": "*bf16", "eps": "fp32"}
    compiled = compile_sm90(norm_kernel, constants, types, aligned=("x_row",), num_warps=8, launch_pdl=True)
    assert "LOCAL:0" in compiled.usage
    assert "LDG.E.128" in compiled.sass
    assert "ACQBULK" in compiled.sass


def test_refused() -> None:
    from dsv41.ops.linear.gluon import rms_norm

    with pytest.raises(ValueError, match=r"\(32,\) weights does not fit rows of 64"):
        rms_norm(normal((2, 64), seed=0), normal((32,), seed=1), EPS)
    with pytest.raises(ValueError, match="one after the other"):
        rms_norm(normal((64, 2), seed=0).T, normal((64,), seed=1), EPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 17, 64, 127, 128, 129, 1000, 4096])
class TestOnAGpu:
    pytestmark = gpu

    def test_equals_the_reference(self, rows: int, dtype: torch.dtype) -> None:
        from dsv41.ops.linear.gluon import rms_norm

        x, norm = rows_inside(rows, 1280, dtype), normal((1280,), seed=7).bfloat16()
        check(rms_norm(x, norm, EPS), reference.rms_norm(x, norm, EPS))

    def test_a_row_does_not_depend_on_the_others(self, rows: int, dtype: torch.dtype) -> None:
        from dsv41.ops.linear.gluon import rms_norm

        x, norm = rows_inside(rows, 1280, dtype), normal((1280,), seed=7).bfloat16()
        together = rms_norm(x, norm, EPS)
        for row in range(0, rows, max(1, rows // 16)):
            assert torch.equal(rms_norm(x[row : row + 1], norm, EPS), together[row : row + 1])
