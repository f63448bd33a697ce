"""What the model is (`ModelConfig`); how much of it one engine holds is in `dsv41.capacity` (`EngineConfig`).

The released spelling of every field is in `dsv41.released`, the rules that bind them in `dsv41.rules`. A
config that exists is valid: construction runs `validate()`. Only the standard library is imported.
"""

import enum
import inspect
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from dsv41 import released, rules
from dsv41.capacity import ENGRAM_TABLES, LATE_COMPILE, PREFIX_MODES, EngineConfig

__all__ = [
    "ENGRAM_TABLES",
    "LATE_COMPILE",
    "PREFIX_MODES",
    "EngineConfig",
    "ModelConfig",
    "Numerics",
    "engram_primes",
]


class Numerics(enum.Enum):
    """Which arithmetic the model runs in (spec/arithmetic.md)."""

    BF16 = "bf16"
    FP32 = "fp32"
    FP32_NOQUANT = "fp32-noquant"

    @property
    def dtype_name(self) -> str:
        """Name of the torch dtype of activations."""
        return "bfloat16" if self is Numerics.BF16 else "float32"

    @property
    def quantised(self) -> bool:
        """Whether activations and caches pass through their fp8 and fp4 formats."""
        return self is not Numerics.FP32_NOQUANT


@dataclass(frozen=True)
class YarnConfig:
    """YaRN scaling of the compressed layers' rotation (spec/model.md, 3.2)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_tokens: int


@dataclass(frozen=True)
class EngramConfig:
    """The n-gram memory (spec/model.md, 6). Without layers the model has none and the rest means nothing."""

    layers: tuple[int, ...] = ()
    num_rows: tuple[int, ...] = ()  # table rows, one entry per layer of `layers`
    max_ngram: int = 0  # n-grams of 2 ... max_ngram tokens are hashed
    search_start: int = 0  # bucket sizes are the primes from here on
    heads: int = 0
    dim: int = 0  # channels of one row
    pad_token: int = 0  # raw id, mapped like any other
    compressed_vocab: int = 0

    @property
    def columns(self) -> int:
        """Rows one token reads from one layer's table."""
        return (self.max_ngram - 1) * self.heads if self.layers else 0

    def primes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Bucket sizes in rows, indexed [layer in `layers`][n-gram size - 2][head]."""
        return engram_primes(len(self.layers), self.max_ngram - 1, self.heads, self.search_start)


@dataclass(frozen=True)
class DraftConfig:
    """The DSpark draft module (spec/model.md, 7). Without stages there is none and the rest means nothing."""

    stages: int = 0
    block_tokens: int = 0
    noise_token: int = 0
    target_layers: tuple[int, ...] = ()  # backbone layers whose inputs condition the draft
    markov_rank: int = 0
    num_experts: int = 0
    experts_per_token: int = 0


@dataclass(frozen=True)
class VisionConfig:
    """The image tower and its budget (spec/model.md, 8)."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch: int  # pixels along one side
    rope_theta: float
    downsample: int  # patches along one side of an image token
    max_tokens: int  # per image, its start, newlines and end included
    min_pixels: int
    max_wh_ratio: float | None

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class ModelConfig:
    """The architecture in our names. Dimensions are channels; `*_tokens`, `*_states` and layer ids say so.

    Raises:
        ValueError: a rule is broken; see `validate`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int  # backbone only
    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_rank: int
    o_groups: int
    window_tokens: int
    ratios: tuple[int, ...]  # tokens per compressed state of each backbone layer; 0: window only
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int  # states
    candidate_source: int  # a layer, or -1: no layer restricts its selection to candidates
    candidate_blocks: int
    candidate_block_states: int
    num_experts: int
    experts_per_token: int
    expert_dim: int
    route_scale: float
    swiglu_limit: float
    norm_eps: float
    copies: int
    sinkhorn_iters: int
    hyper_eps: float
    rope_theta: float
    compressed_rope_theta: float
    yarn: YarnConfig
    max_tokens: int
    bos_token: int
    eos_token: int
    pad_token: int
    image_token: int
    engram: EngramConfig = EngramConfig()
    draft: DraftConfig = DraftConfig()
    vision: VisionConfig | None = None
    numerics: Numerics = Numerics.BF16  # a choice of ours: the released file does not carry it
    unknown_keys: tuple[str, ...] = field(default=(), compare=False)  # in the file, known to nobody here

    def __post_init__(self) -> None:
        self.validate()

    @property
    def heads_per_group(self) -> int:
        """Attention heads that share one block of the output projection."""
        return self.num_heads // self.o_groups

    @classmethod
    def load(cls, path: str | Path) -> "ModelConfig":
        """Read a `config.json`, or the one inside a model directory.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not JSON, or not a config this package can run.
        """
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
            raise ValueError(f"{file} is not valid JSON: {error}") from error
        return cls.from_released(content)

    @classmethod
    def from_released(cls, content: Mapping[str, Any]) -> "ModelConfig":
        """Build from the content of a released `config.json`.

        Engram, the draft and vision may each be missing, but only as a whole; an empty engram_layer_ids or a
        num_nextn_predict_layers of 0 says the same.

        Raises:
            ValueError: foreign layout, missing keys, wrong types or a broken rule; the first one found.
        """
        values, unknown = released.read(content)
        values = _complete(values)
        values["ratios"] = _backbone_ratios(values)
        return _assemble(values, Numerics.BF16, unknown)

    def to_released(self) -> dict[str, Any]:
        """The inverse of `from_released`; `numerics` and unknown keys have no place in it."""
        return released.write({**self.values(), "ratios": self.ratios + (0,) * self.draft.stages})

    def with_overrides(self, overrides: str | Iterable[str]) -> "ModelConfig":
        """A changed copy. Each override is `key=value` (the value is JSON, else a string) or one JSON object.

        Keys are ours or the released ones, dotted: `engram.heads=4`, `text_config.sliding_window=64`,
        `vision=null`, `numerics=fp32`. All are applied before the result is checked; no other value moves.

        Raises:
            ValueError: an unknown key (close matches are named), a wrong type, or a rule the result breaks.
        """
        values, numerics, ratios_given = self.values(), self.numerics, False
        for key, value in released.parse_overrides(overrides):
            if key == "numerics":
                numerics = _numerics(value)
            elif key in ("vision", "vision_config") and value is None:
                values = {name: kept for name, kept in values.items() if not name.startswith("vision.")}
            elif (name := released.resolve(key)) in released.FIXED:
                released.check_fixed(name, value)
            else:
                values[name] = value
                ratios_given |= name == "ratios"
        values = _complete(values)
        if ratios_given:  # may then cover the draft stages, as in the file; the ones we hold never do
            values["ratios"] = _backbone_ratios(values)
        return _assemble(values, numerics, self.unknown_keys)

    def values(self) -> dict[str, Any]:
        """Every field the released file carries, by dotted name; sections the model lacks are left out."""
        held = {"engram": self.engram.layers, "draft": self.draft.stages, "vision": self.vision}
        names = (name for name in released.SPELLING if held.get(_section(name), True))
        return {name: attrgetter(name)(self) for name in names}

    def validate(self) -> None:
        """Check every rule of spec/model.md, section 11, that a config alone can break.

        Raises:
            ValueError: the first broken rule, with the released key, the layer if any, and the value.
        """
        sentence = next(rules.broken(self), None)
        if sentence is not None:
            raise ValueError(sentence)


def engram_primes(
    layers: int, orders: int, heads: int, start: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Bucket sizes of the n-gram tables in rows, [layer][order][head]; `orders` counts the n-gram sizes.

    spec/model.md, 6.2, restarts the search at `start` for every layer and order and skips primes already
    used. Those are always a run of consecutive primes, so each search finds the next: one ascending sequence.
    """

    def is_prime(number: int) -> bool:
        return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))

    primes = (n for n in itertools.count(start) if is_prime(n))
    return tuple(tuple(tuple(itertools.islice(primes, heads)) for _ in range(orders)) for _ in range(layers))


SECTIONS = {"yarn": YarnConfig, "engram": EngramConfig, "draft": DraftConfig, "vision": VisionConfig}
SWITCHES = {"engram": "engram.layers", "draft": "draft.stages"}  # empty or 0: the model has no such section
OPTIONAL = ("engram", "draft", "vision")


def _section(name: str) -> str:
    return name.rpartition(".")[0]


def _complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """Checked types, no switched-off section, and nothing missing of what is there."""
    typed = {name: _typed(name, values[name]) for name in released.SPELLING if name in values}
    for section, switch in SWITCHES.items():
        if switch in typed and not typed[switch]:
            typed = {name: value for name, value in typed.items() if _section(name) != section}
    needed = {_section(name) for name in typed} | {name for name in ("", *SECTIONS) if name not in OPTIONAL}
    missing = [
        key for name, key in released.SPELLING.items() if _section(name) in needed and name not in typed
    ]
    if missing:
        raise ValueError(f"the config lacks {', '.join(missing)}")
    return typed


def _typed(name: str, value: Any) -> Any:
    """`value` as the type its field declares. JSON has no tuples, and its 10000 may stand for a float."""
    convert: Callable[[Any], Any]
    owner = SECTIONS.get(_section(name), ModelConfig)
    kind = inspect.get_annotations(owner)[name.rpartition(".")[2]]
    if kind is int:
        expected, fits, convert = "an integer", type(value) is int, int
    elif kind == tuple[int, ...]:
        expected, convert = "a list of integers", tuple
        fits = isinstance(value, list | tuple) and all(type(item) is int for item in value)
    elif kind == float | None and value is None:
        return None
    else:
        # A comparison, because math.isfinite overflows on a long integer.
        expected, convert = "a finite number", float
        fits = type(value) in (int, float) and abs(value) <= sys.float_info.max
    if not fits:
        raise ValueError(f"{released.SPELLING[name]} is {value!r}, but must be {expected}")
    return convert(value)


def _numerics(value: Any) -> Numerics:
    choices = [choice.value for choice in Numerics]
    if value not in choices:
        raise ValueError(f"numerics is {value!r}, but must be one of {', '.join(choices)}")
    return Numerics(value)


def _backbone_ratios(values: Mapping[str, Any]) -> tuple[int, ...]:
    """compress_ratios without the draft stages, whose entries the release appends and others may omit."""
    key = released.SPELLING["ratios"]
    ratios, layers, stages = values["ratios"], values["num_layers"], values.get("draft.stages", 0)
    if len(ratios) not in (layers, layers + stages):
        raise ValueError(
            f"{key} has {len(ratios)} entries, but needs {layers + stages}: num_hidden_layers {layers} and "
            f"num_nextn_predict_layers {stages}"
        )
    for layer, ratio in enumerate(ratios[layers:], layers):
        if ratio != 0:
            raise ValueError(f"{key} of layer {layer} is {ratio}, but a draft stage must have 0")
    return tuple(ratios[:layers])


def _assemble(values: Mapping[str, Any], numerics: Numerics, unknown: tuple[str, ...]) -> ModelConfig:
    fields: dict[str, Any] = {name: value for name, value in values.items() if not _section(name)}
    for section, kind in SECTIONS.items():
        own = {name.rpartition(".")[2]: value for name, value in values.items() if _section(name) == section}
        if own:
            fields[section] = kind(**own)
    return ModelConfig(**fields, numerics=numerics, unknown_keys=unknown)
