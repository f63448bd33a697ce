"""What `compilations` sees: each kind is made to happen, and none is seen where none happens."""

from __future__ import annotations

import pytest
import torch

from dsv41.graphs.compile import compile_whole
from dsv41.graphs.watch import compilations


class Doubler:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def doubler():
    return compile_whole(Doubler().forward, lambda graph, inputs: graph.forward)


def test_a_graph_is_seen_when_it_compiles_and_not_again() -> None:
    run = doubler()
    with compilations() as found:
        run(torch.ones(3))
    assert len(found) == 1
    assert found[0].startswith("graph ")
    with compilations() as found:
        run(torch.ones(3))
        assert found == []
        run(torch.ones(4))
        assert len(found) == 1, "the list fills while the block runs"


def test_nothing_stays_hooked() -> None:
    from torch._dynamo.callback import callback_handler

    before = list(callback_handler.start_callbacks)
    with pytest.raises(ZeroDivisionError), compilations() as found:
        raise ZeroDivisionError
    assert callback_handler.start_callbacks == before
    doubler()(torch.ones(2))
    assert found == []
    with compilations():
        callback_handler.start_callbacks.clear()  # what torch._dynamo.reset does


def test_timing_runs_of_autotuning_are_seen() -> None:
    """Inductor's kernels are tuned at their first run, behind every callback of the compiler."""
    from torch._inductor.runtime.benchmarking import benchmarker

    with compilations() as found:
        benchmarker.benchmark_cpu(lambda: None, warmup=0, rep=1)
    assert found == ["autotuning (1 timing runs)"]


class NoGpu:
    """The driver of a GPU that is not there: enough to compile for it."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def test_a_kernel_is_seen_once_for_each_specialisation(tmp_path, monkeypatch) -> None:
    """A kernel of the package, launched as on a GPU up to the launch itself: row counts that Triton takes for
    one kind compile once. A hook that was there before is still called."""
    pytest.importorskip("triton")
    from triton import knobs
    from triton.runtime import driver

    from tests.graphs.kernel import copy_rows

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    earlier: list[object] = []
    monkeypatch.setattr(driver, "_active", NoGpu())
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **kernel: earlier.append(kernel))
    with compilations() as found:
        for rows in (3, 5, 16, 48, 1):
            copy_rows.warmup(torch.float32, torch.float32, rows, BLOCK=16, grid=(1,))
    assert len(found) == 3, "odd counts, multiples of 16, and 1"
    assert all("copy_rows" in phrase for phrase in found)
    assert len(earlier) == 3
