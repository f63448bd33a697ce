"""What a benchmark of steps measures: lists of sizes, from flags or from a scenario file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import dsv41
from dsv41.config import EngineConfig, ModelConfig

MODES = ("eager", "compile", "graph")
CPU_MODES = ("eager", "compile")  # without CUDA graphs
FILLS = ("computed", "repeated")
LISTS = ("batch", "prompt_len", "prefix", "depth", "gen_len")
SWITCHES = ("asynchronous", "decoder_replay")
LEAST = 8  # tokens of capacity that the parity steps need


class Case(NamedTuple):
    """`context` is the prompt of a prefill behind `prefix` tokens, or the depth of a decode. The engine's
    requests have all begun to answer after `lead` steps."""

    kind: str
    batch: int
    context: int
    gen_len: int
    prefix: int = 0
    lead: int = 1

    @property
    def max_tokens(self) -> int:
        """Of an answer: an early request decodes while the last ones still prefill, and an asynchronous
        engine is one step ahead."""
        return self.gen_len + self.lead + 1 if self.kind == "decode" else 1

    @property
    def name(self) -> str:
        behind = f" behind {self.prefix}" if self.prefix else ""
        return f"{self.kind}, batch {self.batch}, context {self.context}{behind}"

    def filled(self, fill: str) -> int:
        """Tokens of each request that are there before it begins. A decode whose fill is computed begins with
        its first token, and one whose fill is repeated with the last of its prompt."""
        if self.kind == "prefill":
            return self.prefix
        return self.context - 1 if fill == "repeated" else 0

    @property
    def request_tokens(self) -> int:
        """The longest that one of its requests becomes."""
        return self.prefix + self.context + self.max_tokens


@dataclass(frozen=True)
class Workload:
    """Prefill of every (batch, prompt_len, prefix), decode of every (batch, depth, gen_len), in every mode.

    A prompt of up to `step_rows` tokens is one chunk, computed in one step. Cases that keep more than
    `cache_tokens` tokens in the caches are left out (0: none are). `fill` says where the tokens before the
    first measured step come from: "computed" by a prefill, or "repeated": copies of the first pages, for
    contexts whose prefill would take longer than what is measured. `asynchronous`: a step is launched before
    the results of the one before are taken in, so that a decode's time is the longer of the GPU's and the
    host's. `decoder_replay`: layers behind the last KV source compute the last window of a prompt.
    """

    batch: tuple[int, ...] = (1, 4)
    prompt_len: tuple[int, ...] = (32,)
    prefix: tuple[int, ...] = (0,)  # tokens in the cache before a prompt
    depth: tuple[int, ...] = (32,)  # tokens in the cache before the first measured step
    gen_len: tuple[int, ...] = (4,)
    mode: tuple[str, ...] = CPU_MODES
    step_rows: int = 4096
    cache_tokens: int = 0
    fill: str = "computed"
    asynchronous: bool = False
    decoder_replay: bool = False
    repeat: int = 2
    warmup: int = 0  # the parity steps have compiled and touched everything once already
    scenario: str | None = None

    def __post_init__(self) -> None:
        for name in LISTS:
            least = 0 if name == "prefix" else 1
            wrong = next((v for v in getattr(self, name) if type(v) is not int or v < least), None)
            if wrong is not None:
                raise ValueError(f"bench: {name} holds {wrong!r}, but must hold integers of at least {least}")
        for name, chosen, known in (("mode", self.mode, MODES), ("fill", (self.fill,), FILLS)):
            unknown = next((value for value in chosen if value not in known), None)
            if unknown is not None:
                raise ValueError(f"bench: {name} {unknown!r} is not one of {', '.join(known)}")
        for name, least in (("step_rows", 1), ("cache_tokens", 0), ("repeat", 1), ("warmup", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"bench: {name} is {value!r}, but must be an integer of at least {least}")
        for name in SWITCHES:
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"bench: {name} is {getattr(self, name)!r}, but must be true or false")
        if max(self.batch, default=0) > self.step_rows:
            raise ValueError(f"bench: step_rows {self.step_rows} is less than a batch of {max(self.batch)}")
        if not (self.mode and list(self.cases())):
            raise ValueError("bench: nothing to measure: give a batch, and prompt_len or depth and gen_len")

    def cases(self) -> Iterator[Case]:
        """Every measurement of one mode."""
        return (case for case in self._all() if self._fits(case))

    def left_out(self) -> list[Case]:
        return [case for case in self._all() if not self._fits(case)]

    def _all(self) -> Iterator[Case]:
        for batch in self.batch:
            for length in self.prompt_len:
                for prefix in self.prefix:
                    yield Case("prefill", batch, length, 0, prefix)
            for depth in self.depth:
                for length in self.gen_len:
                    yield Case("decode", batch, depth, length, lead=self._lead(batch, depth))

    def _fits(self, case: Case) -> bool:
        return not self.cache_tokens or case.batch * case.request_tokens <= self.cache_tokens

    def _lead(self, batch: int, depth: int) -> int:
        """With a repeated fill one step is left: the row whose token is the first to come."""
        if self.fill == "repeated":
            return 1
        return -(-batch * depth // max(self.step_rows - batch, 1))


def find_scenario(name: str) -> Path:
    """Its file in profiles/scenarios, here or beside the package. Raises ValueError if there is none."""
    roots = (Path.cwd(), Path(dsv41.__path__[0]).parent)
    folders = [root / "profiles" / "scenarios" for root in roots]
    found = {path.stem: path for folder in reversed(folders) for path in sorted(folder.glob("*.toml"))}
    if name not in found:
        raise ValueError(f"--scenario {name}: there are {', '.join(found) or 'none in profiles/scenarios'}")
    return found[name]


def load_scenario(path: Path) -> tuple[str, str | None, Workload]:
    """The preset of a scenario file, its backends if it names any, and its workload. Raises ValueError for
    anything else than a scenario."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    content["scenario"] = content.pop("name", path.stem)
    content.pop("about", None)
    preset, backends = content.pop("preset", None), content.pop("backends", None)
    if not isinstance(preset, str):
        raise ValueError(f"{path} names no preset")
    if not isinstance(backends, str | None):
        raise ValueError(f"{path}: backends must be a spec as --backends takes it")
    known = {item.name for item in fields(Workload)}
    unknown = next((key for key in content if key not in known), None)
    if unknown is not None:
        others = ", ".join(sorted(known))
        raise ValueError(
            f"{path}: unknown key {unknown!r}; there are name, about, preset, backends, {others}"
        )
    lists = (*LISTS, "mode")
    wrong = next((key for key in lists if key in content and not isinstance(content[key], list)), None)
    if wrong is not None:
        raise ValueError(f"{path}: {wrong} must be a list")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
    return preset, backends, Workload(**values)


def capacity(workload: Workload, config: ModelConfig, seed: int) -> EngineConfig:
    """One size for the whole run: the shapes of caches and page table stay, so nothing compiles twice. Pages
    are for the case that needs most, not for every request at the longest context."""
    cases, page_tokens = list(workload.cases()), EngineConfig.page_tokens
    prompts = (case.batch * (case.prefix + case.context) for case in cases)
    rows = max(LEAST, *(min(workload.step_rows, tokens) for tokens in prompts))
    requests = max(2, *(case.batch for case in cases))
    context = max(LEAST, *(case.request_tokens for case in cases))
    # A request's window begins and ends within a page, and a step's rows go while the next one's come.
    pages = (case.batch * -(-case.request_tokens // page_tokens) for case in cases)
    window = requests * (-(-config.window_tokens // page_tokens) + 2)
    return EngineConfig(
        page_tokens=page_tokens,
        max_batch_tokens=rows,
        max_requests=requests,
        max_context_tokens=context,
        global_pages=max(2 * -(-context // page_tokens), *pages),  # two requests for parity
        window_pages=window + 2 * -(-rows // page_tokens),
        asynchronous=workload.asynchronous,
        decoder_replay=workload.decoder_replay,
        seed=seed,
    )
