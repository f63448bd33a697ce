"""A trace of steps, added up by model part: launches and time.

The trace is torch.profiler's, in Chrome's format: events with a category, a name, and start and duration in
microseconds. On the host, a range `step 0` holds the ranges of its stages, and those hold calls of ops. The
parts, each of which owns what the ones before it do not:

    family.op   an op, with the ops that it calls
    decoder     torch code of the forward between ops
    execute     the step's inputs; with a captured graph, its launch
    schedule, sampling, results   the other stages
    graph       kernels of a captured graph that match no part
    idle        time in which a GPU runs nothing
    other       the rest
"""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dsv41.backends import FAMILIES
from dsv41.ops.library import NAMESPACE

Event = Mapping[str, Any]
Span = tuple[float, float, str]  # start, end, and a name
Window = tuple[float, float]

TWIN = "step without its graph"  # of the range around one
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CALLS = ("cuda_runtime", "cuda_driver")
CLOSES_WITHIN = 0.02  # of a step by another clock: how far the sum of its parts may be off


def op_parts() -> dict[str, str]:
    """Every op of the package by its name: its model part, `family.op`."""
    parts = {}
    for family in FAMILIES:
        for value in vars(importlib.import_module(f"dsv41.ops.{family}.op")).values():
            if isinstance(value, torch._ops.OpOverload) and value.namespace == NAMESPACE:
                name = value._schema.name.partition("::")[2]
                parts[name] = f"{family}.{name}"
    return parts


class Line(NamedTuple):
    """One model part, per step. `calls` of the op or stage; `launches` of kernels, copies and fills on a GPU,
    of innermost torch operators on a CPU."""

    part: str
    calls: float
    launches: float
    milliseconds: float
    share: float


@dataclass(frozen=True)
class Summary:
    """Per step. `lines` add up to the steps of the trace; `kernels`: part, name, launches, milliseconds."""

    lines: tuple[Line, ...]
    kernels: tuple[tuple[str, str, float, float], ...]

    @property
    def milliseconds(self) -> float:
        return sum(line.milliseconds for line in self.lines)


class Owners:
    """Whose a moment on the host is: the outermost op's, else the innermost stage's, else the step's own."""

    def __init__(self, ranges: Iterable[Span], ops: Container[str]) -> None:
        self.segments: list[Span] = []
        self.calls: Counter[str] = Counter()
        self._now, stack = 0.0, list[tuple[float, str]]()
        for start, end, name in sorted(ranges, key=lambda span: (span[0], -span[1])):
            self._pass(start, stack)
            inside = stack[-1][1] if stack else ""
            if inside not in ops:
                self.calls[name] += 1
            end = min(end, stack[-1][0]) if stack else end
            stack.append((end, inside if inside in ops else name))
        self._pass(float("inf"), stack)
        self._starts = [start for start, _, _ in self.segments]

    def _pass(self, moment: float, stack: list[tuple[float, str]]) -> None:
        """Time goes on to `moment`; ranges that end before it are closed."""
        while stack:
            end, owner = stack[-1]
            if (stop := min(end, moment)) > self._now:
                self.segments.append((self._now, stop, owner))
                self._now = stop
            if end > moment:
                return
            stack.pop()
        self._now = max(self._now, moment)

    def at(self, moment: float) -> str | None:
        number = bisect_right(self._starts, moment) - 1
        if number < 0 or self.segments[number][1] <= moment:
            return None
        return self.segments[number][2]


def summarise(events: Sequence[Event]) -> Summary:
    """Add up the steps of a trace (Chrome's format, as torch.profiler writes it).

    On a GPU the time of a part is that of its kernels; where kernels overlap, each has its share of the time,
    and `idle` is the time without any. A kernel belongs to the part that launched it. A graph's kernels are
    matched by name and order with those of the step without its graph. Raises ValueError without steps.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    ops = {f"{NAMESPACE}::{name}": part for name, part in op_parts().items()}
    steps = _windows(timed, lambda name: name.startswith("step ") and name != TWIN)
    if not steps:
        raise ValueError("the trace holds no step")
    owners = _owners(timed, steps, ops)
    kernels = _kernels(timed, owners, _learned(timed, ops))
    if not kernels:
        times = defaultdict[str, float](float)
        for start, end, part in owners.segments:
            times[part] += end - start
        return _summary(len(steps), owners.calls, times, _operators(timed, owners), {})
    launches, by_name = Counter[str](), defaultdict[tuple[str, str], list[float]](list)
    for start, end, part, name in kernels:
        if part:
            launches[part] += 1
            by_name[part, name].append(end - start)
    times = _shared_time([(start, end, part or "other") for start, end, part, _ in kernels], steps)
    return _summary(len(steps), owners.calls, times, launches, by_name)


def _summary(
    steps: int,
    calls: Counter[str],
    times: Mapping[str, float],
    launches: Counter[str],
    by_name: Mapping[tuple[str, str], Sequence[float]],
) -> Summary:
    total = sum(times.values()) or 1.0
    order = sorted(
        {*calls, *times, *launches, "other"},
        key=lambda part: (part in ("idle", "other"), part == "other", -times.get(part, 0.0), part),
    )
    lines = []
    for part in order:
        microseconds = times.get(part, 0.0)
        counts = calls[part] / steps, launches[part] / steps
        lines.append(Line(part, *counts, microseconds / 1e3 / steps, microseconds / total))
    names = [(p, name, len(us) / steps, sum(us) / 1e3 / steps) for (p, name), us in by_name.items()]
    return Summary(tuple(lines), tuple(sorted(names, key=lambda item: -item[3])))


def _span(event: Event) -> Window:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _windows(timed: Sequence[Event], chosen: Callable[[str], bool]) -> list[Window]:
    named = (event for event in timed if event.get("cat") == "user_annotation" and chosen(event["name"]))
    return sorted(_span(event) for event in named)


def _inside(moment: float, windows: Sequence[Window]) -> bool:
    number = bisect_right(windows, (moment, float("inf"))) - 1
    return number >= 0 and moment < windows[number][1]


def _owners(timed: Sequence[Event], windows: Sequence[Window], ops: Mapping[str, str]) -> Owners:
    ranges = [(start, end, "other") for start, end in windows]
    for event in timed:
        name = event["name"]
        if event.get("cat") == "user_annotation":
            name = "" if name.startswith("step ") else name
        else:
            name = ops.get(name, "") if event.get("cat") == "cpu_op" else ""
        if name and _inside(event["ts"], windows):
            ranges.append((*_span(event), name))
    owners = Owners(ranges, set(ops.values()))
    del owners.calls["other"]
    return owners


def _operators(timed: Sequence[Event], owners: Owners) -> Counter[str]:
    """Calls of torch operators that call no other, by part."""
    spans = sorted((_span(e) for e in timed if e.get("cat") == "cpu_op"), key=lambda s: (s[0], -s[1]))
    found: Counter[str] = Counter()
    for (start, end), after in zip(spans, [*spans[1:], (float("inf"), 0.0)], strict=True):
        if after[0] >= end and (part := owners.at(start)) is not None:
            found[part] += 1
    return found


def _launches(timed: Sequence[Event]) -> dict[int, Event]:
    """The call on the host behind every piece of work on the GPU."""
    calls = (event for event in timed if event.get("cat") in HOST_CALLS)
    return {event["args"]["correlation"]: event for event in calls if "correlation" in event.get("args", {})}


def _learned(timed: Sequence[Event], ops: Mapping[str, str]) -> dict[str, list[str]]:
    """Of the step without its graph: for every kernel name of the decoder the parts it serves, in order."""
    twins = _windows(timed, TWIN.__eq__)
    decoders = [w for w in _windows(timed, "decoder".__eq__) if _inside(w[0], twins)]
    owners, launches = _owners(timed, decoders, ops), _launches(timed)
    found: dict[str, list[str]] = defaultdict(list)
    for event in sorted((e for e in timed if e.get("cat") in GPU_WORK), key=lambda e: e["ts"]):
        launch = launches.get(event["args"].get("correlation"))
        if launch is not None and (part := owners.at(launch["ts"])) is not None:
            found[event["name"]].append(part)
    return found


def _kernels(
    timed: Sequence[Event], owners: Owners, learned: Mapping[str, Sequence[str]]
) -> list[tuple[float, float, str, str]]:
    """Start, end, part and name of all work on the GPU; part "" for what no step launched."""
    launches, turns, found = _launches(timed), Counter[tuple[int, str]](), []
    for event in sorted((e for e in timed if e.get("cat") in GPU_WORK), key=lambda e: e["ts"]):
        correlation, name = event["args"].get("correlation"), event["name"]
        launch = launches.get(correlation)
        part = owners.at(launch["ts"]) if launch is not None else None
        if part and launch is not None and "GraphLaunch" in launch["name"]:
            known, turn = learned.get(name, ()), turns[correlation, name]
            part = known[turn] if turn < len(known) else "graph"
            turns[correlation, name] += 1
        found.append((*_span(event), part or "", name))
    return found


def _shared_time(spans: Sequence[Span], windows: Sequence[Window]) -> defaultdict[str, float]:
    """Microseconds of the windows by name: where n spans overlap, each has an n-th of the time."""
    times = defaultdict[str, float](float, idle=0.0)
    for first, last in windows:
        edges = [(last, 0, "")]
        for start, end, name in spans:
            if start < last and end > first:
                edges += [(max(start, first), 1, name), (min(end, last), -1, name)]
        now, running = first, Counter[str]()
        for moment, change, name in sorted(edges):
            if moment > now:
                total = running.total()
                for owner, count in running.items():
                    times[owner] += (moment - now) * count / total
                if not total:
                    times["idle"] += moment - now
            now = moment
            running[name] += change
            if not running[name]:
                del running[name]
    return times
