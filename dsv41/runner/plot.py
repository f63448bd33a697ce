"""Decode time against context and against batch, drawn from the JSON lines of `bench`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Series(NamedTuple):
    """One line of a chart, by ascending x. Milliseconds a step: median, 10th and 90th percentile."""

    label: str
    x: tuple[int, ...]
    p50: tuple[float, ...]
    p10: tuple[float, ...]
    p90: tuple[float, ...]


def decode_series(rows: Iterable[Row], along: str, by: str) -> list[Series]:
    """A series for each value of `by` in each mode of each source and device, along `along`; both are "batch"
    or "depth". Prefill rows are passed over, and of equal cases the last counts. Labels say what differs."""
    groups: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in rows:
        if row.get("kind") == "decode":
            group = (row["source"], row["device"], row["mode"], row[by])
            groups.setdefault(group, {})[row[along]] = row
    differs = [len({group[place] for group in groups}) > 1 for place in range(3)]
    found = []
    for group in sorted(groups):
        names = [name for name, shown in zip(group[:3], differs, strict=True) if shown]
        points = sorted(groups[group].items())
        times = [[row["milliseconds"][name] for _, row in points] for name in ("p50", "p10", "p90")]
        label = " ".join([*names, f"{by} {_short(group[3])}"])
        found.append(Series(label, tuple(x for x, _ in points), *map(tuple, times)))
    return found


def read_rows(path: Path) -> list[Row]:
    """The lines of `bench --output`. Raises ValueError for what is none, and for a file without a decode."""
    rows: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is no object")
        rows.append(row)
    if not decode_series(rows, "depth", "batch"):
        raise ValueError(f"{path} holds no decode rows of bench")
    return rows


def need_matplotlib() -> None:
    """Raises ValueError where nothing can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'dsv41[plot]'") from None


def draw(rows: Sequence[Row], path: Path) -> None:
    """A PNG of two charts: along the context with a line for each batch, and the other way round. Medians,
    with bars from the 10th to the 90th percentile."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, along, by in ((left, "depth", "batch"), (right, "batch", "depth")):
        ticks: set[int] = set()
        for series in decode_series(rows, along, by):
            bars = [
                [middle - low for middle, low in zip(series.p50, series.p10, strict=True)],
                [high - middle for middle, high in zip(series.p50, series.p90, strict=True)],
            ]
            axes.errorbar(series.x, series.p50, bars, label=series.label, marker="o", markersize=4, capsize=2)
            ticks.update(series.x)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(ticks), [_short(tick) for tick in sorted(ticks)], rotation=45)
        axes.set_xlabel({"depth": "context, tokens", "batch": "batch, requests"}[along])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.yaxis.set_minor_formatter(NullFormatter())
    left.set_ylabel("decode step, ms")
    figure.suptitle(_title(rows))
    figure.savefig(path, format="png", dpi=120)


def _title(rows: Sequence[Row]) -> str:
    decodes = [row for row in rows if row.get("kind") == "decode"]
    return ", ".join(", ".join(sorted({row[name] for row in decodes})) for name in ("source", "device"))


def _short(count: int) -> str:
    """4096 is 4k, 1048576 is 1M; others as they are."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)
