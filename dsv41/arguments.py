"""The flags of `python -m dsv41.run`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn

from dsv41.config import ENGRAM_TABLES, LATE_COMPILE, PREFIX_MODES, Numerics
from dsv41.hardware import Hardware, assume
from dsv41.presets import PRESETS
from dsv41.runner.load import LOAD_FORMATS
from dsv41.runner.trace import CASES, MODES
from dsv41.runner.workload import FILLS

Command = Callable[[argparse.Namespace], None]


class Parser(argparse.ArgumentParser):
    """One line per mistake, and no exit of its own."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def _count(text: str) -> int:
    """A natural number; 4k is 4096, 1M is 1048576."""
    match = re.fullmatch(r"(\d{1,15})([kM]?)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 64, 4k or 1M")
    return int(match[1]) * {"": 1, "k": 1 << 10, "M": 1 << 20}[match[2]]


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(item) for item in text.split(","))


def _ids(text: str) -> list[int]:
    if not text.strip():
        return []
    if re.fullmatch(r"\s*-?\d{1,18}\s*(,\s*-?\d{1,18}\s*)*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3")
    return [int(item) for item in text.split(",")]


def _names(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(","))


def _device(text: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of auto, cpu, cuda, cuda:N")
    return text


def _gpu(text: str) -> Hardware:
    try:
        return assume(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _shared(may_be_bare: bool = False) -> Parser:
    """`may_be_bare`: --backends may stand without a value, which then is ""."""
    shared = Parser(add_help=False)
    shared.add_argument("--model", metavar="DIR_OR_ID", help="a checkpoint directory; nothing is downloaded")
    shared.add_argument(
        "--preset", metavar="NAME", help=f"{', '.join(PRESETS)} (default tiny), with stand-in weights"
    )
    shared.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the config")
    shared.add_argument("--load-format", choices=LOAD_FORMATS, default="auto")
    shared.add_argument("--engram-tables", choices=ENGRAM_TABLES, default="device", help="where they live")
    shared.add_argument("--seed", type=_count, default=0)
    shared.add_argument("--device", type=_device, default="auto", help="auto, cpu, cuda or cuda:N")
    shared.add_argument("--numerics", choices=[choice.value for choice in Numerics])
    bare: dict[str, Any] = {"nargs": "?", "const": ""} if may_be_bare else {}
    shared.add_argument("--backends", metavar="SPEC", help="PRESET, KEY=VALUE,... or both", **bare)
    shared.add_argument("--cache-dir", metavar="DIR", help="of compiled code (default in ~/.cache)")
    shared.add_argument("--output", metavar="FILE.jsonl", help="one JSON object a line")
    shared.add_argument("--quiet", action="store_true", help="results and errors only")
    shared.add_argument("--debug", action="store_true", help="show tracebacks")
    shared.set_defaults(save_compiled=None, load_compiled=None)
    return shared


def _compiled() -> Parser:
    compiled = Parser(add_help=False)
    compiled.add_argument("--save-compiled", metavar="FILE", help="write the compiled code as one file")
    compiled.add_argument("--load-compiled", metavar="FILE", help="begin with such a file (it is trusted)")
    return compiled


def _engine() -> Parser:
    engine = Parser(add_help=False)
    engine.add_argument("--max-requests", type=_count, help="running at once")
    engine.add_argument("--max-batch-tokens", type=_count, help="rows of one step")
    engine.add_argument("--graph-rows", type=_count, help="steps up to so many rows as CUDA graphs (GPU)")
    engine.add_argument("--prefix-mode", choices=PREFIX_MODES, help="prefix reuse (default off)")
    engine.add_argument("--decoder-replay", action="store_true", help="decoder layers on prompt tails only")
    engine.add_argument("--asynchronous", action="store_true", help="launch ahead of the results")
    return engine


def parser(bench: Command, generate: Command, profile: Command, check: Command, inspect: Command) -> Parser:
    """Every command sets `command` to its function."""
    parser = Parser(
        prog="python -m dsv41.run", description="Run, measure, profile, check, inspect DeepSeek-V4.1-Flash."
    )
    commands = parser.add_subparsers(required=True, metavar="{bench,generate,profile,check,inspect}")
    shared, compiled = _shared(), _compiled()

    sub = commands.add_parser(
        "bench", parents=[shared, _engine(), compiled], help="measure steps, or the throughput of a workload"
    )
    sub.set_defaults(command=bench)
    sub.add_argument("what", nargs="?", choices=("steps", "throughput"), default="steps")
    sub.add_argument("--requests", type=_count, default=32, help="throughput: requests of a random workload")
    sub.add_argument(
        "--workload", metavar="FILE.jsonl", help='throughput: {"prompt_ids": ..., "max_tokens": ...}'
    )
    for flag in ("--batch", "--prompt-len", "--prefix", "--gen-len", "--depth"):
        sub.add_argument(flag, type=_counts, metavar="N,...")
    sub.add_argument("--mode", type=_names, metavar="MODE,...", help="eager, compile, graph")
    sub.add_argument("--step-rows", type=_count, help="most rows of a step (default 4k)")
    sub.add_argument("--cache-tokens", type=_count, help="leave out cases with more tokens in the caches")
    sub.add_argument("--fill", choices=FILLS, help="where the tokens before the measured steps come from")
    sub.add_argument("--repeat", type=_count)
    sub.add_argument("--warmup", type=_count)
    sub.add_argument("--plot", metavar="FILE.png", help="draw decode time against context and batch")
    sub.add_argument(
        "--from", dest="rows_from", metavar="FILE.jsonl", help="--plot old rows, measure nothing"
    )
    sub.add_argument("--late-compile", choices=LATE_COMPILE, default="warn", help="a compile after ready")
    sub.add_argument("--scenario", metavar="NAME", help="a file of profiles/scenarios instead of lists")

    sub = commands.add_parser("generate", parents=[shared, _engine(), compiled], help="continue a prompt")
    sub.set_defaults(command=generate)
    prompt = sub.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-ids", type=_ids, metavar="1,2,3")
    sub.add_argument("--max-tokens", type=_count, default=16)
    sub.add_argument("--temperature", type=float, default=0.0)
    sub.add_argument("--top-p", type=float, default=1.0)
    sub.add_argument("--ignore-eos", action="store_true")

    sub = commands.add_parser(
        "profile", parents=[shared, compiled], help="watch warm steps, here or under Nsight"
    )
    sub.set_defaults(command=profile)
    sub.add_argument("case", nargs="?", choices=CASES, default="decode")
    sub.add_argument("--batch", type=_count, default=1)
    sub.add_argument("--depth", type=_count, help="decode: tokens in the cache (default 32)")
    sub.add_argument("--prompt-len", type=_count, help="prefill: tokens of a prompt (default 32)")
    sub.add_argument("--mode", choices=MODES, default="eager", help="graph: compiled, then captured")
    sub.add_argument("--steps", type=_count, default=3)
    sub.add_argument("--warmup", type=_count, default=2)
    sub.add_argument("--trace", metavar="FILE.json", help="torch.profiler's, for chrome://tracing")
    sub.add_argument("--summary", metavar="FILE.csv", help="launches and time by model part")

    sub = commands.add_parser("check", parents=[shared], help="compare with the release, and with itself")
    sub.set_defaults(command=check)

    sub = commands.add_parser(
        "inspect", parents=[_shared(may_be_bare=True)], help="what would run; needs no weights and no GPU"
    )
    sub.set_defaults(command=inspect)
    sub.add_argument(
        "--as", dest="gpu", type=_gpu, metavar="smNN", help="the backends table as on another GPU"
    )
    sub.add_argument("--context", type=_counts, metavar="N,...", help="tokens, for the cache sizes")
    sub.add_argument("--no-segments", action="store_true", help="do not trace the graph")
    return parser
