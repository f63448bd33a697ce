"""The command line: `python -m dsv41.run {bench,generate,profile,check,inspect}`. Alone it benches `tiny`.

Results go to stdout, everything else to stderr. Exit codes: 0 ok, 1 a check failed, 2 usage or config,
3 model files, 4 unsupported device, 5 out of memory, 6 runtime fault. Only this file touches the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

# Before torch loads OpenMP: threads that spin between small ops run ten times slower beside other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import dsv41
from dsv41.arguments import parser
from dsv41.backends import choose, select
from dsv41.config import EngineConfig
from dsv41.exits import KNOWN, CheckFailed, DeviceError, exit_code, sentence
from dsv41.graphs.capture import Run
from dsv41.graphs.module import CompiledModule
from dsv41.hardware import detect
from dsv41.model.costs import loaded_bytes, weights_by_part
from dsv41.runner import check, plot, report, trace
from dsv41.runner.bench import Bench, memory_of
from dsv41.runner.engine import LLM, compile_ahead
from dsv41.runner.load import Blueprint, Model, blueprint, load, trace_blueprint
from dsv41.runner.request import SamplingParams, check_prompt
from dsv41.runner.start import Start, artifacts, default_cache_root
from dsv41.runner.throughput import jobs_of, random_jobs, read_workload, throughput
from dsv41.runner.workload import LISTS, SWITCHES, Workload, find_scenario, load_scenario

IMPORT_SECONDS = time.perf_counter() - dsv41.IMPORTED_AT
SLOW_SECONDS = 2.0  # between two progress lines
CONTEXTS = (4096, 131072, 1048576)
BENCH_FLAGS = (*LISTS, "step_rows", "cache_tokens", "fill")
Row = dict[str, Any]  # for JSON
ENGINE_FLAGS = ("max_requests", "max_batch_tokens", "prefix_mode", "graph_rows")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is ever downloaded
    try:
        args = parser(bench, generate, profile, run_check, inspect).parse_args(argv or ["bench"])
        args.argv, args.start = argv, Start({"import": IMPORT_SECONDS})
        with _output(args.output) as args.lines:
            args.command(args)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader left, as `head` does; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KNOWN as error:
        if "--debug" in argv:
            traceback.print_exc()
        return _fail(sentence(error), exit_code(error))


def _fail(sentence: str, code: int) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return code


@contextmanager
def _output(path: str | None, flag: str = "--output") -> Iterator[TextIO | None]:
    """The file of a flag, opened before any work is done."""
    if path is None:
        yield None
        return
    try:
        file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  # only its opening is a usage error
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from error
    with file:
        yield file


# -- commands ----------------------------------------------------------------------------------------------


def bench(args: argparse.Namespace) -> None:
    if args.rows_from is not None and (args.plot is None or args.what == "throughput"):
        raise ValueError("--from needs --plot FILE.png, and plots rows of bench steps")
    if args.plot is not None:
        plot.need_matplotlib()
        _check_folder("--plot", args.plot)
    if args.rows_from is not None:
        return _plot(args, plot.read_rows(Path(args.rows_from)))
    if args.what == "throughput":
        return _throughput(args)
    workload, plan = _workload(args), _blueprint(args)
    if "graph" in workload.mode:
        _need_gpu(plan, "--mode graph")
    model = _load(args, plan)
    run = Bench(model, workload, args.seed, args.say, args.start, args.late_compile)
    _print(report.bench_head(run))
    rows: list[Row] = []
    for row in run.rows():
        if not rows or rows[-1]["mode"] != row["mode"]:
            _started(args, row["mode"], row["start"], run.engine, row["memory"])
        _print([report.bench_line(row)])
        _write(args, row)
        rows.append({key: value for key, value in row.items() if key not in run.setting()})
        rows[-1]["milliseconds"] = {k: v for k, v in row["milliseconds"].items() if k != "samples"}
    _save_compiled(args)
    if args.plot is not None:
        _plot(args, [run.setting() | row for row in rows])
    print(json.dumps({"bench": model.blueprint.source, **run.setting(), "rows": rows}))


def _plot(args: argparse.Namespace, rows: Sequence[plot.Row]) -> None:
    plot.draw(rows, Path(args.plot))
    print(f"plotted {args.plot}", file=sys.stderr)


def _started(args: argparse.Namespace, mode: str, start: Row, engine: EngineConfig, memory: Row) -> None:
    """An engine is ready: tell people, and the directory of its compiled code."""
    _print(report.start_lines(mode, start, memory))
    args.artifacts.note({"mode": mode, "engine": vars(engine), **start})


def _throughput(args: argparse.Namespace) -> None:
    flags = (*BENCH_FLAGS, "scenario", "plot")
    refused = next((name for name in flags if getattr(args, name) is not None), None)
    if refused is not None:
        raise ValueError(f"bench throughput takes no --{refused.replace('_', '-')}")
    plan = _blueprint(args)
    entries = read_workload(Path(args.workload)) if args.workload else None
    model = _load(args, plan)
    jobs = jobs_of(entries, model) if entries is not None else random_jobs(model, args.requests, args.seed)
    context = max(len(job.prompt) + job.params.max_tokens for job in jobs)
    engine, run = replace(_engine_config(args, context), late_compile=args.late_compile), _run_of(args, model)
    compile_ahead(model, engine, run, args.start)
    with args.start.phase("capture"):
        llm = LLM(model, engine, run)
        llm.warm_up()
    start, memory = args.start.row(), memory_of(llm, args.weights)
    _started(args, "compile" if isinstance(run, CompiledModule) else "eager", start, engine, memory)
    args.say(f"replaying {len(jobs)} requests")
    row = throughput(llm, jobs) | {"start": start, "memory": memory}
    _print(report.throughput_lines(row))
    _save_compiled(args)
    _write(args, row)
    print(json.dumps(row))


def _run_of(args: argparse.Namespace, model: Model) -> Run:
    modes = args.mode or ("eager",)
    if len(modes) > 1 or modes[0] not in ("eager", "compile"):
        raise ValueError("bench throughput takes one --mode, eager or compile")
    return CompiledModule(model.decoder) if modes[0] == "compile" else model.decoder


def _engine_config(args: argparse.Namespace, context: int) -> EngineConfig:
    given = {name: getattr(args, name) for name in ENGINE_FLAGS}
    given = {name: value for name, value in given.items() if value is not None}
    given |= {"decoder_replay": args.decoder_replay, "asynchronous": args.asynchronous}
    return EngineConfig(**{"max_context_tokens": context, "seed": args.seed} | given)


def generate(args: argparse.Namespace) -> None:
    params = SamplingParams(args.max_tokens, args.temperature, args.top_p, args.seed, args.ignore_eos)
    plan = _blueprint(args)
    if args.prompt_ids is not None:
        check_prompt(args.prompt_ids, params, plan.config)  # before minutes of loading
    elif plan.directory is None:
        raise ValueError(f"--prompt needs a tokenizer, and preset {plan.source} has none: give --prompt-ids")
    elif not args.prompt:
        raise ValueError("the prompt is empty: it needs at least one token")
    model = _load(args, plan)
    prompt = args.prompt_ids
    if prompt is None:
        if model.tokenizer is None:
            raise ValueError(f"--prompt needs a tokenizer.json in {plan.source}: give --prompt-ids")
        prompt = model.tokenizer.encode(args.prompt)
        check_prompt(prompt, params, plan.config)
    engine = LLM(model, _engine_config(args, len(prompt) + params.max_tokens))
    tokens, reason = _stream(engine, prompt, params, as_text=args.prompt is not None)
    text = model.tokenizer.decode(tokens) if model.tokenizer else None
    _save_compiled(args)
    _write(args, {"prompt_ids": prompt, "tokens": tokens, "text": text, "finish_reason": reason})


def _stream(
    engine: LLM, prompt: Sequence[int], params: SamplingParams, as_text: bool
) -> tuple[list[int], str | None]:
    """Print tokens as they come: their text, or their ids separated by spaces."""
    tokens: list[int] = []
    shown, reason = "", None
    for _, event in engine.stream([prompt], params):
        if event.result.error:
            raise RuntimeError(event.result.error)
        tokens.append(event.result.token)
        reason = event.finish_reason
        if as_text:
            assert engine.model.tokenizer is not None, "text needs a tokenizer"
            visible = engine.model.tokenizer.decode(tokens[:-1] if reason == "stop" else tokens)
            if visible.endswith("\ufffd") and reason is None:
                continue  # in the middle of a character
        else:
            visible = " ".join(map(str, tokens))
        print(visible[len(shown) :], end="", flush=True)
        shown = visible
    print()
    return tokens, reason


def profile(args: argparse.Namespace) -> None:
    context, other = ("depth", "prompt_len") if args.case == "decode" else ("prompt_len", "depth")
    if getattr(args, other) is not None:
        raise ValueError(f"profile {args.case} takes no --{other.replace('_', '-')}")
    tokens = 32 if getattr(args, context) is None else getattr(args, context)
    target = trace.Target(args.case, args.batch, tokens, args.mode, args.steps, args.warmup)
    with _output(args.trace, "--trace"), _output(args.summary, "--summary") as file:
        plan = _blueprint(args)
        if target.captured:
            _need_gpu(plan, f"--mode {args.mode}")
        target.engine(plan.config, args.seed).validate(plan.config)  # before minutes of loading
        model = _load(args, plan)
        path = Path(args.trace) if args.trace is not None else None
        profiled = trace.profile(model, target, args.seed, args.say, path, args.summary is not None)
        if file is not None and profiled.summary is not None:
            trace.write_summary(profiled.summary, profiled.traced_seconds, file)
    _save_compiled(args)
    _print(trace.lines(model, target, profiled, args.argv))
    _write(args, trace.row(model, target, profiled))


def run_check(args: argparse.Namespace) -> None:
    receipts = []
    plan = _blueprint(args)

    def record(receipt: check.Receipt) -> None:
        receipts.append(receipt)
        _print([report.receipt_line(receipt)])
        _write(args, {**vars(receipt), "verdict": receipt.verdict})

    for receipt in check.parity(plan.hardware.device, args.backends, args.say):
        record(receipt)
    model = _load(args, plan)
    args.say(f"invariants on {plan.source}, {plan.config.numerics.value}")
    for receipt in check.invariants(model, args.seed):
        record(receipt)
    _print(report.check_lines(receipts))
    failed = [receipt.name for receipt in receipts if receipt.verdict == "FAIL"]
    if failed:
        raise CheckFailed(f"{len(failed)} of {len(receipts)} checks failed, first {failed[0]}")


def inspect(args: argparse.Namespace) -> None:
    if args.gpu is not None or args.backends == "":
        return _inspect_backends(args)
    plan = _blueprint(args)
    contexts = args.context or sorted({min(context, plan.config.max_tokens) for context in CONTEXTS})
    _print(report.config_lines(plan) + report.plan_lines(plan.plan))
    _print(report.cache_lines(plan.layout, contexts))
    args.say("adding up the checkpoint's tensors")
    weights = weights_by_part(plan.config)
    _print(report.memory_lines(weights, plan.layout, contexts, plan.hardware))
    _print(report.backend_lines(plan.backends, plan.hardware))
    segments = None
    if not args.no_segments:
        args.say(f"tracing {plan.config.num_layers} layers without weights")
        segments = trace_blueprint(plan)
        _print(report.segment_lines(segments))
    _print(report.environment_lines(plan.hardware, args.artifacts))
    _write(args, report.inspect_json(plan, weights, contexts, segments))


def _inspect_backends(args: argparse.Namespace) -> None:
    """The tables alone, for this machine or another GPU. A spec that is refused there ends in its error."""
    spec, args.backends = args.backends or None, None
    plan = _blueprint(args)
    hardware = args.gpu or plan.hardware
    choice = (hardware, plan.config.numerics, spec, plan.config.num_heads, plan.config.o_groups)
    chosen = choose(*choice)
    _print(report.preset_lines(hardware, plan.config))
    _print(report.backend_lines(chosen, hardware))
    _write(args, report.backends_json(chosen, hardware, plan.config))
    if spec is not None:
        select(*choice)


# -- what commands share -----------------------------------------------------------------------------------


def _print(lines: Sequence[str]) -> None:
    print("\n".join(lines), flush=True)


def _write(args: argparse.Namespace, row: Row) -> None:
    if args.lines is not None:
        args.lines.write(json.dumps(row) + "\n")
        args.lines.flush()


def _blueprint(args: argparse.Namespace) -> Blueprint:
    args.say = (lambda line: None) if args.quiet else (lambda line: print(line, file=sys.stderr, flush=True))
    if args.model is not None and not Path(args.model).is_dir():
        raise FileNotFoundError(f"--model {args.model} is not a directory, and nothing is ever downloaded")
    try:
        device = detect(args.device).device
    except ValueError as error:
        raise DeviceError(str(error)) from error
    with args.start.phase("config"):
        plan = blueprint(
            args.model,
            preset_name=args.preset,
            overrides=args.set,
            numerics=args.numerics,
            device=device,
            backends=args.backends,
        )
    root = Path(args.cache_dir) if args.cache_dir else default_cache_root(os.environ)
    args.artifacts = artifacts(plan, root)
    os.environ.update(args.artifacts.environment)
    return plan


def _prepare_artifacts(args: argparse.Namespace) -> None:
    """The directory for compiled code, before minutes of loading and compiling."""
    try:
        args.artifacts.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--cache-dir {args.artifacts.root}: {error.strerror}") from error
    args.say(f"compiled code: {args.artifacts.root}, key {args.artifacts.key}")
    if args.save_compiled is not None:
        _check_folder("--save-compiled", args.save_compiled)
    if args.load_compiled is not None:
        args.say(f"{args.load_compiled} brings {args.artifacts.load(Path(args.load_compiled))}")


def _check_folder(flag: str, path: str) -> None:
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{flag} {path}: its folder does not exist")


def _save_compiled(args: argparse.Namespace) -> None:
    if args.save_compiled is not None:
        args.say(f"{args.save_compiled} holds {args.artifacts.save(Path(args.save_compiled))}")


def _need_gpu(plan: Blueprint, flag: str) -> None:
    if plan.hardware.sm == 0:
        raise DeviceError(f"{flag}: CUDA graphs need a GPU")


def _load(args: argparse.Namespace, plan: Blueprint) -> Model:
    args.weights, memory = weights_by_part(plan.config), report.device_memory(plan.hardware)
    if (needed := loaded_bytes(args.weights)) > memory:
        sizes = f"{report.size(needed)} of weights and {plan.hardware.name} has {report.size(memory)}"
        raise MemoryError(f"{plan.source} needs {sizes} (`inspect` shows the bill)")
    _prepare_artifacts(args)
    last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > SLOW_SECONDS:
            last = time.monotonic()
            args.say(f"loaded {done / total:.0%} of {report.size(total)}")

    args.say(f"loading {plan.source}: {report.size(needed)}")
    where = EngineConfig(engram_tables=args.engram_tables)
    with args.start.phase("load"):
        model = load(plan, load_format=args.load_format, seed=args.seed, engine=where, progress=progress)
    args.say(str(model.report) if model.report else "the weights are stand-ins: the text means nothing")
    return model


def _workload(args: argparse.Namespace) -> Workload:
    """From the flags, or from a scenario file, whose preset and backends then are the default."""
    flags = (*BENCH_FLAGS, *SWITCHES, "mode")
    given = {name: getattr(args, name) for name in flags if getattr(args, name) not in (None, False)}
    workload = Workload()
    if args.scenario is not None:
        if given:
            raise ValueError(f"--scenario {args.scenario} already says --{min(given).replace('_', '-')}")
        preset, backends, workload = load_scenario(find_scenario(args.scenario))
        args.backends = args.backends or backends
        if args.model is None and args.preset is None:
            args.preset = preset
    given |= {name: getattr(args, name) for name in ("repeat", "warmup") if getattr(args, name) is not None}
    return replace(workload, **given)


if __name__ == "__main__":
    sys.exit(main())
