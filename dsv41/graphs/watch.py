"""Seeing what is compiled while something runs. Between two steps of a warm engine it must be nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

TIMING_RUN = "benchmarking."  # the counters in which Inductor's autotuning counts its timing runs


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The list of what is compiled inside the block, one phrase each; timing runs are added at its end.

    - graphs: torch's own callback at the start of every trace
    - Triton and Gluon kernels: Triton's hook behind a kernel's compilation. It is called as well when the
      binary comes from Triton's directory, because the call has waited for it
    - autotuning of Inductor's kernels, which happens when they run: the counter of its timing runs

    The hooks are set for the block alone, in front of those that were there. Code that a library compiles by
    other means (nvcc) is not seen.
    """
    found: list[str] = []
    with ExitStack() as undo:
        _hook_graphs(found, undo)
        _hook_kernels(found, undo)
        before = _timing_runs()
        yield found
        if runs := _timing_runs() - before:
            found.append(f"autotuning ({runs} timing runs)")


def _hook_graphs(found: list[str], undo: ExitStack) -> None:
    from torch._dynamo.callback import callback_handler  # imported late: it loads the tracer

    def starts(args: Any) -> None:
        found.append(f"graph {args.compile_id}")

    def remove() -> None:
        if starts in callback_handler.start_callbacks:  # `torch._dynamo.reset` forgets them all
            callback_handler.remove_start_callback(starts)

    callback_handler.register_start_callback(starts)
    undo.callback(remove)


def _hook_kernels(found: list[str], undo: ExitStack) -> None:
    try:
        from triton import knobs
    except ImportError:  # then there are no kernels
        return
    runtime, before = knobs.runtime, knobs.runtime.jit_post_compile_hook

    def compiled(**kernel: Any) -> Any:
        found.append(f"kernel {kernel['repr']}")
        return None if before is None else before(**kernel)

    runtime.jit_post_compile_hook = compiled
    undo.callback(setattr, runtime, "jit_post_compile_hook", before)


def _timing_runs() -> int:
    from torch._dynamo.utils import counters

    return sum(count for name, count in counters["inductor"].items() if name.startswith(TIMING_RUN))


def graph_lookups() -> tuple[int, int]:
    """How many segments Inductor found in its cache since the process began, and how many it compiled."""
    if "torch._dynamo.utils" not in sys.modules:  # before the first trace, and its loading takes seconds
        return 0, 0
    from torch._dynamo.utils import counters

    seen = counters["inductor"]
    return seen["fxgraph_cache_hit"], seen["fxgraph_cache_miss"] + seen["fxgraph_cache_bypass"]
