"""From a name to an engine that is ready: what it is compiled for, how long its phases take, and the steps
that compile everything ahead."""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv41.backends import FAMILIES
from dsv41.graphs.artifacts import Artifacts, source_hash
from dsv41.graphs.buckets import row_sizes
from dsv41.graphs.compile import INDUCTOR_OPTIONS
from dsv41.graphs.watch import graph_lookups
from dsv41.model.inputs import StepInputs, StepOutput
from dsv41.runner.load import Blueprint
from dsv41.runner.state import IN_FLIGHT

if TYPE_CHECKING:
    from dsv41.runner.worker import Worker

PHASES = ("import", "config", "load", "compile", "capture")
PACKAGES = ("triton", "flash-mla", "sgl-flash-mla", "flashinfer-python")  # whose kernels run


def default_cache_root(environment: Mapping[str, str]) -> Path:
    """`$DSV41_CACHE_DIR`, else `dsv41` in the user's cache directory (XDG)."""
    if chosen := environment.get("DSV41_CACHE_DIR"):
        return Path(chosen)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv41"


def artifacts(blueprint: Blueprint, root: Path) -> Artifacts:
    """The compiled artifacts of a blueprint under `root`. Their key changes with everything that is compiled
    into them: software and sources, processor, config and numerics, backends and records, page size."""
    hardware = blueprint.hardware
    processor = f"sm_{hardware.sm}" if hardware.sm else torch.backends.cpu.get_cpu_capability()
    parts = {
        "python": platform.python_version(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "packages": {name: _version(name) for name in PACKAGES},
        "dsv41": source_hash(),
        "processor": f"{platform.machine()} {hardware.name} {processor}",
        "config": blueprint.config.to_released(),
        "numerics": blueprint.config.numerics.value,
        "backends": vars(blueprint.backends),
        "page_tokens": blueprint.layout.page_tokens,
        "inductor": INDUCTOR_OPTIONS,
    }
    return Artifacts(root.expanduser().absolute(), parts)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass
class Start:
    """The phases of a start in seconds, and how many segments Inductor found in its cache or compiled.

    Work between two phases (a benchmark's parity, its roof) belongs to no phase: `ready` is their sum.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    num_found: int = 0
    num_compiled: int = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's time to a phase of `PHASES`."""
        assert name in PHASES, f"no phase {name}"
        found, compiled = graph_lookups()
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        found_now, compiled_now = graph_lookups()
        self.num_found += found_now - found
        self.num_compiled += compiled_now - compiled

    def fork(self) -> Start:
        """A second engine in one process shares what came before."""
        return Start(dict(self.seconds), self.num_found, self.num_compiled)

    def row(self) -> dict[str, Any]:
        """For JSON; every phase is there, 0 if it was skipped."""
        seconds = {name: self.seconds.get(name, 0.0) for name in PHASES}
        return {
            "seconds": seconds | {"ready": sum(seconds.values())},
            "segments_found": self.num_found,
            "segments_compiled": self.num_compiled,
        }


# -- ready -------------------------------------------------------------------------------------------------


@torch.inference_mode()
def warm_up(worker: Worker) -> None:
    """Run steps of padding rows, which write nothing, until every kind of step has run: many rows and one;
    with decoder replay those with a tail of many rows, one and none. Where kernels are compiled for sizes,
    every size of `row_sizes` and the one below. Outputs live as long as an asynchronous engine keeps them, so
    that the memory of its steps is taken too.

    Steps with image embeddings are graphs of their own, and are not among these.
    """
    alive: deque[tuple[StepInputs, StepOutput, Tensor]] = deque(maxlen=IN_FLIGHT)
    for rows, tail in _kinds_of_steps(worker):
        step = worker.padding(rows, tail)
        output = worker.run(step, worker.caches)
        sampled = output.hidden[: worker.engine.max_requests]
        alive.append((step, output, worker.model.decoder.logits(sampled) if len(sampled) else sampled))


def _kinds_of_steps(worker: Worker) -> Iterator[tuple[int, int | None]]:
    """Rows, and rows of the tail. No two sizes of one step are equal, the pages of a request included: the
    trace would take them for the same one."""
    pages = worker.state.page_table.shape[1]
    many, more = _other_than(pages, 2, 3), _other_than(pages, 4, 5)
    yield from ((many, None), (1, None))
    if worker.engine.decoder_replay:
        yield from ((more, many), (more, 1), (more, 0), (1, 1), (1, 0))
    if any(getattr(worker.model.backends, family) != "reference" for family in FAMILIES):
        sizes = {rows for size in row_sizes(worker.engine.max_batch_tokens) for rows in (size - 1, size)}
        # The largest first: the memory of the others is cut out of its.
        yield from ((rows, None) for rows in sorted(sizes - {0, 1}, reverse=True))


def _other_than(taken: int, first: int, second: int) -> int:
    return first if first != taken else second
