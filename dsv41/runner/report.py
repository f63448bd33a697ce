"""What a person reads: pages of `inspect`, receipts of `check`, the card of `bench`. Lines, no printing."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch

from dsv41 import backends as backend_table
from dsv41.backends import FAMILIES, PRESETS, RECORD_FIELDS, RECORDS_OF, Backends
from dsv41.config import ModelConfig
from dsv41.graphs.artifacts import Artifacts
from dsv41.graphs.segments import Segment
from dsv41.hardware import Hardware
from dsv41.model.costs import UNUSED_PARTS, Weights
from dsv41.model.layout import CacheLayout
from dsv41.model.plan import LayerPlan
from dsv41.runner.bench import Bench
from dsv41.runner.check import NOT_SHOWN, Receipt
from dsv41.runner.load import Blueprint


def table(rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """Aligned columns; the first `left` to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def size(num_bytes: float) -> str:
    """Decimal units, as memory vendors and bandwidths use them."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.2f} GB"


def device_memory(hardware: Hardware) -> int:
    """The GPU's memory, or the machine's for a CPU."""
    return hardware.memory_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# -- inspect -----------------------------------------------------------------------------------------------


def config_lines(blueprint: Blueprint) -> list[str]:
    c = blueprint.config
    engram = f"layers {list(c.engram.layers)}, {c.engram.columns} rows of {c.engram.dim} a token"
    draft = f"{c.draft.stages} stages of {c.draft.block_tokens} tokens"
    rows = [
        ("layers, hidden, vocabulary", f"{c.num_layers}, {c.hidden_size}, {c.vocab_size}"),
        ("heads x dim (rope)", f"{c.num_heads} x {c.head_dim} ({c.rope_dim})"),
        ("query rank, output rank x groups", f"{c.q_rank}, {c.o_rank} x {c.o_groups}"),
        ("window, longest context", f"{c.window_tokens}, {c.max_tokens} tokens"),
        ("index heads x dim, top", f"{c.index_heads} x {c.index_dim}, {c.index_topk} states"),
        ("candidates", f"{c.candidate_blocks} blocks of {c.candidate_block_states} states"),
        ("experts", f"{c.experts_per_token} of {c.num_experts} x {c.expert_dim}, and one shared"),
        ("residual copies", c.copies),
        ("engram", engram if c.engram.layers else "none"),
        ("draft", draft if c.draft.stages else "none"),
        ("vision", f"{c.vision.num_layers} blocks of {c.vision.hidden_size}" if c.vision else "none"),
        ("numerics", c.numerics.value),
        ("unknown keys", ", ".join(c.unknown_keys) or "none"),
    ]
    kind = "checkpoint" if blueprint.directory else "preset"
    return [f"config: {kind} {blueprint.source}", *_indent(table(rows, left=2))]


def plan_lines(plan: Sequence[LayerPlan]) -> list[str]:
    """One line per run of equal layers."""
    rows: list[tuple[object, ...]] = [("layers", "ratio", "role", "KV of", "index of", "notes")]
    groups: list[list[LayerPlan]] = []
    for layer in plan:
        if groups and replace(groups[-1][-1], layer=layer.layer) == layer:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    for group in groups:
        first, last = group[0], group[-1]
        notes = [
            *(["publishes candidates"] if first.publishes_candidates else []),
            *(["inside candidates"] if first.reads_candidates else []),
            *([f"engram table {first.engram}"] if first.engram is not None else []),
            *(["feeds the draft"] if first.is_target else []),
        ]
        number = first.layer if first is last else f"{first.layer}-{last.layer}"
        sources = ["-" if s is None else s for s in (first.kv_source, first.index_source)]
        rows.append((number, first.ratio, first.role, *sources, ", ".join(notes)))
    return ["layer plan", *_indent(table(rows, left=6))]


def cache_lines(layout: CacheLayout, contexts: Sequence[int]) -> list[str]:
    names = list(layout.context_bytes(1))
    rows: list[tuple[object, ...]] = [("context", *names, "total")]
    for context in contexts:
        held = layout.context_bytes(context)
        rows.append((context, *(size(held[name]) for name in names), size(sum(held.values()))))
    firsts = layout.window[:1] + layout.states[:1] + layout.index_k[:1]
    return [
        f"caches of one request, pages of {layout.page_tokens} tokens, records "
        + ", ".join(f"{group.name} {group.record}" for group in firsts),
        *_indent(table(rows)),
        f"  global bytes a token: {layout.global_page_bytes / layout.page_tokens:g}",
    ]


def memory_lines(
    weights: Mapping[str, Weights], layout: CacheLayout, contexts: Sequence[int], hardware: Hardware
) -> list[str]:
    used = {name: part.num_bytes for name, part in weights.items() if name not in UNUSED_PARTS}
    unused = {name: part.num_bytes for name, part in weights.items() if name in UNUSED_PARTS}
    cache = sum(layout.context_bytes(max(contexts)).values())
    total, memory = sum(used.values()) + cache, device_memory(hardware)
    rows = [(name, size(num_bytes)) for name, num_bytes in used.items()]
    rows += [(f"caches, one request of {max(contexts)} tokens", size(cache)), ("total", size(total))]
    rows += [(f"{hardware.name} memory", size(memory))]
    lines = ["memory bill", *_indent(table(rows))]
    lines += [f"  in the checkpoint, not loaded: {name} {size(num)}" for name, num in unused.items()]
    fits = "fits" if total < memory else f"does not fit: {size(total - memory)} too much"
    return [*lines, f"  {fits}"]


def backend_lines(backends: Backends, hardware: Hardware) -> list[str]:
    """Every implementation of every family, the chosen one marked, and why it can or cannot run here."""
    rows: list[tuple[object, ...]] = []
    for family in FAMILIES:
        chosen = getattr(backends, family)
        for impl in dict.fromkeys((chosen, *implementations(family))):
            mark = "* " if impl == chosen else "  "
            reason = backend_table.reason(backends, family, impl, hardware)
            rows.append((family, mark + impl, _verdict(reason)))
    rows += [(name, f"* {getattr(backends, name)}", _readers(name)) for name in RECORD_FIELDS]
    return [f"backends on {hardware.name} (* chosen)", *_indent(table(rows, left=3))]


def _readers(record_field: str) -> str:
    return "of " + ", ".join(family for family, names in RECORDS_OF.items() if record_field in names)


def preset_lines(hardware: Hardware, config: ModelConfig) -> list[str]:
    """Every preset and why it can or cannot run on a GPU, and which one fits it."""
    rows = [(name, _verdict(why)) for name, why in _preset_refusals(hardware, config).items()]
    default = "it is the default" if backend_table.AUTOMATIC_IS_DEFAULT else "the default stays cpu"
    rows += [("fits", f"{_fitting(hardware, config)} ({default})")]
    return [f"presets on {hardware.name}", *_indent(table(rows, left=2))]


def _preset_refusals(hardware: Hardware, config: ModelConfig) -> dict[str, str | None]:
    heads, groups = config.num_heads, config.o_groups
    return {name: backend_table.refusal(preset, hardware, heads, groups) for name, preset in PRESETS.items()}


def _fitting(hardware: Hardware, config: ModelConfig) -> str:
    """The automatic choice, or the sentence that refuses the GPU."""
    try:
        return backend_table.automatic(hardware, config.num_heads, config.o_groups)
    except ValueError as error:
        return f"none: {error}"


def backends_json(backends: Backends, hardware: Hardware, config: ModelConfig) -> dict[str, Any]:
    """`preset_lines` and `backend_lines` for machines; null means that it runs."""
    return {
        "device": hardware.name,
        "sm": hardware.sm,
        "fits": _fitting(hardware, config),
        "presets": _preset_refusals(hardware, config),
        "backends": vars(backends),
        "reasons": {
            family: {
                impl: backend_table.reason(backends, family, impl, hardware)
                for impl in dict.fromkeys((getattr(backends, family), *implementations(family)))
            }
            for family in FAMILIES
        },
    }


def implementations(family: str) -> list[str]:
    """The implementations of an op family: one word each; `triton_topk.py` is a part of `triton.py`."""
    spec = importlib.util.find_spec(f"dsv41.ops.{family}")
    folders = spec.submodule_search_locations if spec is not None else None
    assert folders, f"no op family {family}"
    return [item.name for item in pkgutil.iter_modules(folders) if item.name != "op" and "_" not in item.name]


def _verdict(reason: str | None) -> str:
    return "runs" if reason is None else f"no: {reason.removeprefix('--backends ')}"


def environment_lines(hardware: Hardware, artifacts: Artifacts) -> list[str]:
    rows = [("python", platform.python_version()), ("torch", torch.__version__)]
    for package in (
        "triton",
        "flash-mla",
        "sgl-flash-mla",
        "flashinfer-python",
        "safetensors",
        "transformers",
    ):
        try:
            rows.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            rows.append((package, "not installed"))
    kind = f"sm_{hardware.sm}" if hardware.sm else f"{torch.get_num_threads()} threads"
    rows += [("device", f"{hardware.device}: {hardware.name}, {kind}, {size(device_memory(hardware))}")]
    rows += [("compiled code", f"{artifacts.root}, key {artifacts.key}")]
    return ["environment", *_indent(table(rows, left=2))]


def segment_lines(segments: Sequence[Segment]) -> list[str]:
    """The number of pieces, and every kind of piece once."""
    eager = [segment for segment in segments if segment.eager]
    counts = Counter((segment.eager, segment.ops, segment.num_nodes) for segment in segments)
    rows: list[tuple[object, ...]] = [("times", "kind", "calls", "ops")]
    for (is_eager, ops, nodes), times in counts.items():
        rows.append((times, "eager" if is_eager else "compiled", nodes, _repeats(ops)))
    return [
        f"segments: {len(segments)}, {len(segments) - len(eager)} compiled and {len(eager)} eager",
        *_indent(table(rows, left=4)),
    ]


def _repeats(ops: Sequence[str]) -> str:
    return ", ".join(f"{op} x{times}" if times > 1 else op for op, times in Counter(ops).items()) or "-"


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def inspect_json(
    blueprint: Blueprint,
    weights: Mapping[str, Weights],
    contexts: Sequence[int],
    segments: Sequence[Segment] | None,
) -> dict[str, Any]:
    """The same facts for machines."""
    config: ModelConfig = blueprint.config
    return {
        "source": blueprint.source,
        "config": config.to_released(),
        "numerics": config.numerics.value,
        "unknown_keys": config.unknown_keys,
        "plan": [vars(layer) for layer in blueprint.plan],
        "backends": vars(blueprint.backends),
        "device": blueprint.hardware.name,
        "weights_bytes": {name: part.num_bytes for name, part in weights.items()},
        "cache_bytes": {context: blueprint.layout.context_bytes(context) for context in contexts},
        "segments": None if segments is None else [vars(segment) for segment in segments],
    }


# -- check -------------------------------------------------------------------------------------------------


def receipt_line(receipt: Receipt) -> str:
    error = "not compared"
    if receipt.error is not None:
        error = f"error {receipt.error:.1e} (limit {receipt.limit:g})"
    note = f"; {receipt.note}" if receipt.note else ""
    return f"{receipt.verdict}  {receipt.name}: {receipt.what}: {error}{note}"


def check_lines(receipts: Sequence[Receipt]) -> list[str]:
    counts = Counter(receipt.verdict for receipt in receipts)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("PASS", "FAIL", "SKIP"))
    return [summary, "this does not show", *_indent(NOT_SHOWN)]


# -- bench -------------------------------------------------------------------------------------------------


def bench_head(bench: Bench) -> list[str]:
    setting = bench.setting()
    roof = setting["roof"]
    threads = f", {setting['threads']} threads" if setting["threads"] else ""
    scenario = f", scenario {bench.workload.scenario}" if bench.workload.scenario else ""
    return [
        f"bench {bench.model.blueprint.source}, {setting['numerics']}, {setting['device']}{threads}, "
        f"torch {setting['torch']}{scenario}",
        f"roof, measured now: read {roof['gigabytes_per_second']:.1f} GB/s, "
        f"matmul {roof['teraflops_per_second']:.3g} TFLOP/s",
        f"not real: {'; '.join(setting['synthetic'])}",
        BENCH_ROW.format(*BENCH_COLUMNS),
    ]


def start_lines(mode: str, start: Mapping[str, Any], memory: Mapping[str, int]) -> list[str]:
    """The seconds of every phase, what compiling cost, and the memory taken."""
    seconds = dict(start["seconds"])
    ready = seconds.pop("ready")
    phases = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
    found, compiled = start["segments_found"], start["segments_compiled"]
    segments = f"segments: {found} found, {compiled} compiled"
    return [f"start of {mode}: {phases}; ready after {ready:.1f} s; {segments}", _memory_line(memory)]


def _memory_line(memory: Mapping[str, int]) -> str:
    """The bill next to the peak on a GPU."""
    bill = memory["weights"] + memory["caches"]
    parts = f"weights {size(memory['weights'])} and caches {size(memory['caches'])}"
    peak = memory.get("peak")
    measured = f", {peak / bill - 1:.1%} below the measured peak of {size(peak)}" if peak else ""
    return f"memory: {parts} are {size(bill)}{measured}"


BENCH_COLUMNS = ("mode", "kind", "batch", "context", "tok/s", "ms", "p10", "p90", "GB/s", "of roof", "parity")
BENCH_ROW = "{:8} {:8} {:>5} {:>12} {:>10} {:>10} {:>10} {:>10} {:>8} {:>8} {:>8}"


def bench_line(row: Mapping[str, Any]) -> str:
    """`ms` is one step of a decode, the whole of a prefill; `parity` the worst row of the comparison."""
    times = row["milliseconds"]
    return BENCH_ROW.format(
        row["mode"],
        row["kind"],
        row["batch"],
        _context(row),
        f"{row['tokens_per_second']:,.1f}",
        *(f"{times[name]:.2f}" for name in ("p50", "p10", "p90")),
        f"{row['gigabytes_per_second']:.3g}",
        f"{row['fraction_of_roof']:.2%}",
        f"{row['parity']['worst_row']:.1e}",
    )


def _context(row: Mapping[str, Any]) -> str:
    """The depth of a decode; the tokens of a prefill behind those of its prefix."""
    if row["kind"] == "decode":
        return str(row["depth"])
    return f"{row['prefix']}+{row['prompt_len']}" if row["prefix"] else str(row["prompt_len"])


def throughput_lines(row: Mapping[str, Any]) -> list[str]:
    metrics, per_second = row["metrics"], row["tokens_per_second"]
    cells = [
        (
            "requests",
            f"{row['requests']}: {row['prompt_tokens']} prompt, {row['output_tokens']} new tokens",
        ),
        ("time", f"{row['seconds']:.2f} s in {metrics['steps']} steps, {metrics['preemptions']} preemptions"),
        (
            "throughput",
            f"{per_second:.0f} tok/s, {row['output_tokens_per_second']:.0f} of them new",
        ),
        ("first token", f"median {row['median_seconds_to_first_token']:.2f} s"),
        ("prefix cache", f"{metrics['cached_tokens']} of {metrics['looked_up_tokens']} tokens found"),
        ("note", row["note"]),
    ]
    return [f"throughput of {row['throughput']} on {row['device']}", *_indent(table(cells, left=2))]
