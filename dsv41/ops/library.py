"""`declare()`: how an operator of this package comes to exist.

An op family is a folder: `op.py` (contract, fake, declaration) and one file per implementation. The
implementation is an ordinary string argument of the op, always the last one, so that a printed graph names
the kernel that runs and two implementations can run in one process. `declare` uses `Library.define`/`impl`
rather than `custom_op`: the same contract at about half the call overhead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

NAMESPACE = "dsv41"
_LIBRARY = Library(NAMESPACE, "DEF")  # registrations live as long as this object


def implementation(family: str, impl: str) -> ModuleType:
    """The module of one implementation, imported on first use (Triton and vendor packages stay optional)."""
    if impl == "op":
        raise ValueError(f"op family '{family}' has no implementation '{impl}'")
    try:
        return importlib.import_module(f"dsv41.ops.{family}.{impl}")
    except ModuleNotFoundError as missing:
        if missing.name == f"dsv41.ops.{family}.{impl}":
            raise ValueError(f"op family '{family}' has no implementation '{impl}'") from None
        raise ValueError(
            f"implementation '{impl}' of op family '{family}' needs the package '{missing.name}'"
        ) from None


def pack_weights(family: str, impl: str, *weights: Tensor, back: bool = False) -> None:
    """Put weights that lie as the release stores them into the byte order that an implementation reads, or
    `back`.

    In place: shapes, dtypes and sizes stay. An implementation without functions `pack` and `unpack` reads the
    release's own order; `pack` alone checks. Raises ValueError for a shape that it cannot run.
    """
    reorder = getattr(implementation(family, impl), "unpack" if back else "pack", None)
    if reorder is not None:
        reorder(*weights)


def declare(
    family: str, schema: str, *, fake: Callable[..., Any], eager: bool = False
) -> torch._ops.OpOverload:
    """Register `dsv41::<name>` from a schema whose last argument is `str impl`; return its default overload.

    The implementation module must hold a function of the op's name that takes all arguments but `impl`.
    Arguments marked `(a!)` are mutated in place and nothing else is. `fake` sees every argument and depends
    on shapes only. `eager` tags an op that is kept outside compiled segments (`graphs/segments.py`).
    """
    name = schema.split("(", 1)[0]
    tags = [torch.Tag.cudagraph_unsafe] if eager else []
    _LIBRARY.define(schema, tags=tags)

    def run(*args: Any) -> Any:
        return getattr(implementation(family, args[-1]), name)(*args[:-1])

    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def is_eager(target: object) -> bool:
    """Whether a graph node's target is an op declared with `eager=True`."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == NAMESPACE
        and torch.Tag.cudagraph_unsafe in target.tags
    )
