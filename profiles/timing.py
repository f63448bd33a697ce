"""What the benchmarks of this folder share: replayed graphs, the roofs of the same run, and their output."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

L2_BYTES = 60 << 20  # of an H200
Call = Callable[[], object]
Change = tuple[object, str, int]  # a module, one of its constants, another value


def time_us(calls: Sequence[Call], launches: int, samples: int = 21, warm: int = 1) -> list[float]:
    """Microseconds of one call, ascending: `launches` of them in a graph, taken from `calls` in turn."""
    for call in calls[:4]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            calls[index % len(calls)]()
    for _ in range(warm):
        graph.replay()
    times = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return sorted(times)


def sets_beyond_l2(size: int, most: int = 64) -> int:
    """How many inputs of `size` bytes take turns so that none is read from the L2 cache."""
    return 1 + min(most, 2 * L2_BYTES // size)


def copy_bandwidth(elements: int = 1 << 29) -> float:
    """Bytes read and written per second by an elementwise kernel over `elements` int32."""
    source = torch.randint(0, 255, (elements,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(time_us([lambda: torch.neg(source, out=target)], 4)) * 1e6


def read_bandwidth() -> float:
    """Bytes read per second by a reduction over 4 GiB."""
    source = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    return source.nbytes / statistics.median(time_us([lambda: source.amax()], 4)) * 1e6


def product_rate() -> float:
    """Flops per second of a bf16 product of 8192^3."""
    a, b = (torch.randn((8192, 8192), device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * 8192**3 / statistics.median(time_us([lambda: torch.mm(a, b, out=out)], 4)) * 1e6


def changes_of(items: Iterable[str], modules: Sequence[object]) -> list[Change]:
    """`NAME=VALUE` each -> a change in every module that has the constant. ValueError if none has."""
    found: list[Change] = []
    for item in items:
        name, _, value = item.partition("=")
        owners = [module for module in modules if isinstance(getattr(module, name, None), int)]
        if not owners:
            raise ValueError(f"the implementation has no constant {name}")
        found += [(owner, name, type(getattr(owner, name))(int(value))) for owner in owners]
    return found


@contextmanager
def changed(changes: Sequence[Change]) -> Iterator[None]:
    """The constants at other values for as long as this lasts."""
    before = [getattr(module, name) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(changes, before, strict=True):
            setattr(module, name, value)


def device() -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}


def spread(times: Sequence[float]) -> dict[str, object]:
    """The median of ascending times, where nine tenths of them lie, and all of them."""
    return {
        "us": statistics.median(times),
        "us_p10": times[len(times) // 10],
        "us_p90": times[-1 - len(times) // 10],
        "samples_us": list(times),
    }


def of_roof(us: float, size: float, bandwidth: float) -> dict[str, float]:
    """How far a time is from moving `size` bytes at `bandwidth` bytes a second."""
    roof = size / bandwidth * 1e6
    return {"bytes": size, "tb_s": size / us / 1e6, "roof_us": roof, "percent_of_roof": 100 * roof / us}


def report(results: Iterable[dict], card: Callable[[dict], str], output: Path | None) -> None:
    """Print a line for every result as it comes; write all of them, one JSON object a line."""
    lines = []
    for result in results:
        lines.append(json.dumps(result))
        print(card(result), flush=True)
    if output is not None:
        output.write_text("\n".join(lines) + "\n")
