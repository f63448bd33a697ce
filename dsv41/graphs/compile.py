"""The only `torch.compile`, and the Inductor settings with a reason each."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import fx

MOST_GRAPHS = 16  # of one module: rows one or many, a tail of none, one or many, image embeddings or not

INNER = ("inductor", "aot_eager", "eager")

# What Inductor is told, and why.
INDUCTOR_OPTIONS: dict[str, Any] = {
    # Generated shape, stride and scalar checks cost about 2 ms a forward on a graph of 40 layers; fakes and
    # tests of every op already hold them.
    "size_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
}


def inner_compiler(name: str) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    """The compiler of one segment: "inductor", or "aot_eager" / "eager", which generate no code.

    Raises ValueError for another name.
    """
    if name not in INNER:
        raise ValueError(f"inner compiler '{name}' is not one of {', '.join(INNER)}")
    if name == "inductor":
        from torch._inductor.compile_fx import compile_fx  # imported late: it loads the code generators

        def compile_segment(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            return cast(Callable[..., Any], compile_fx(graph, inputs, config_patches=INDUCTOR_OPTIONS))

        return compile_segment
    return torch._dynamo.lookup_backend(name)


def compile_whole(
    method: Callable[..., Any], backend: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Trace a bound method as one graph without breaks and give it to `backend`.

    `dynamic=False` leaves every dimension fixed that the caller did not mark: automatic dynamism would turn
    the page table's or a cache's size into a symbol on its second value and compile again.
    """
    # The tracer gives up at 8 graphs, for the process as a whole; a module of ours has up to 14.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
    return torch.compile(_with_own_code(method), fullgraph=True, dynamic=False, backend=backend)


def _with_own_code(method: Callable[..., Any]) -> Callable[..., Any]:
    """The bound method over a code object of its own: dynamo counts recompiles by code object, and the
    modules of one process must not use up each other's few."""
    function, owner = method.__func__, method.__self__  # type: ignore[attr-defined]
    code, name = function.__code__.replace(), function.__name__
    own = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    return MethodType(own, owner)


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Mark a dimension as one that changes. Size 1 is its own compile."""
    if tensor.shape[dim] > 1:
        torch._dynamo.mark_dynamic(tensor, dim)
