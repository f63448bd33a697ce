"""Cut a traced graph at the eager ops and hand what lies between them to the inner compiler.

The ops declared `eager` (index selection and sparse attention) stay outside compiled code: mixed batches
replay the compiled segments and call those ops between them. Everything else of the decoder lies in a
segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.fx.passes.split_module import split_module

from dsv41.ops.library import NAMESPACE, is_eager

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Segment:
    """One piece of the cut graph: the package's `ops` in order, and how many calls of any kind."""

    index: int
    eager: bool
    ops: tuple[str, ...]
    num_nodes: int


def _is_call(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method", "call_module")


def _op_name(node: fx.Node) -> str | None:
    target = node.target
    if node.op != "call_function" or getattr(target, "namespace", None) != NAMESPACE:
        return None
    return target._schema.name.partition("::")[2]  # type: ignore[union-attr]


def _partition(graph: fx.Graph) -> dict[fx.Node, int]:
    """A segment number per call, one more at every change between compiled and eager."""
    number, previous, parts = 0, None, {}
    for node in graph.nodes:
        if not _is_call(node):
            continue
        eager = is_eager(node.target) or _follows_eager(node)
        if previous is not None and eager != previous:
            number += 1
        previous, parts[node] = eager, number
    return parts


def _follows_eager(node: fx.Node) -> bool:
    """Unpacking an eager op's results belongs to the eager side: no compiled segment takes a tuple."""
    source = node.args[0] if node.args else None
    return (
        node.op == "call_function"
        and getattr(node.target, "__name__", "") == "getitem"
        and isinstance(source, fx.Node)
        and is_eager(source.target)
    )


def cut(graph: fx.GraphModule) -> tuple[fx.GraphModule, tuple[Segment, ...]]:
    """Split a traced graph into one submodule per segment, in program order, and describe the pieces."""
    parts = _partition(graph.graph)
    pieces = split_module(graph, None, parts.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
    segments = []
    for index, name in enumerate(_segment_names(pieces)):
        nodes = [node for node in pieces.get_submodule(name).graph.nodes if _is_call(node)]  # type: ignore[union-attr]
        ops = tuple(op for op in map(_op_name, nodes) if op is not None)
        segments.append(Segment(index, any(is_eager(node.target) for node in nodes), ops, len(nodes)))
    return pieces, tuple(segments)


def _segment_names(pieces: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in pieces.graph.nodes if node.op == "call_module"]


def compile_segments(
    pieces: fx.GraphModule, segments: tuple[Segment, ...], compiler: Compiler
) -> fx.GraphModule:
    """Compile every segment that is not eager; the trace's fake values describe its inputs."""
    for segment, name in zip(segments, _segment_names(pieces), strict=True):
        if segment.eager:
            continue
        piece = pieces.get_submodule(name)
        assert isinstance(piece, fx.GraphModule)
        inputs = [node.meta["example_value"] for node in piece.graph.nodes if node.op == "placeholder"]
        compiled = compiler(piece, inputs)
        delattr(pieces, name)
        setattr(pieces, name, _Call(compiled))
    pieces.recompile()
    return pieces


class _Call(nn.Module):
    """A compiled callable as a submodule."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)
