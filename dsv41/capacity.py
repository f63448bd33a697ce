"""How much of a model one engine holds, and how it runs. Only the standard library is imported."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv41.config import ModelConfig

ENGRAM_TABLES = ("device", "host", "disk")
PREFIX_MODES = ("off", "bounded", "exact")
LATE_COMPILE = ("warn", "error")


@dataclass(frozen=True)
class EngineConfig:
    """Capacity and choices of one engine.

    Raises:
        ValueError: see `validate`.
    """

    page_tokens: int = 64
    max_batch_tokens: int = 2048  # token rows of one step
    max_requests: int = 16  # running at once
    max_context_tokens: int = 4096  # prompt and answer of one request
    engram_tables: str = "device"  # where the tables live: one of ENGRAM_TABLES
    global_pages: int = 0  # pool of states and index keys; 0: enough for max_requests full contexts
    window_pages: int = 0  # pool of window rows; 0: enough for max_requests
    prefix_mode: str = "off"  # prefix reuse: one of PREFIX_MODES (runner/prefix.py says what each promises)
    decoder_replay: bool = False  # behind the last KV source, compute only the last window of every prompt
    asynchronous: bool = False  # launch a step before the tokens of the one before are read
    deterministic: bool = False  # a row's bits do not depend on its company, at a price in speed
    graph_rows: int = 0  # steps of up to this many rows run as captured CUDA graphs; 0: none
    late_compile: str = "warn"  # when a step of a warm engine compiles something: one of LATE_COMPILE
    seed: int = 0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self, model: "ModelConfig | None" = None) -> None:
        """Check the numbers, and against `model` if given.

        Raises:
            ValueError: the first number that cannot work.
        """
        capacities = ("page_tokens", "max_batch_tokens", "max_requests", "max_context_tokens")
        for name in (*capacities, "global_pages", "window_pages", "graph_rows", "seed"):
            value, least = getattr(self, name), 1 if name in capacities else 0
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}, but must be an integer of at least {least}")
        if self.page_tokens % 2:
            raise ValueError(
                f"page_tokens is {self.page_tokens}, but a page must hold whole states of 2 tokens"
            )
        if self.max_requests * (self.max_context_tokens + 1) >= 2**31:
            raise ValueError(
                f"{self.max_requests} requests (max_requests) of {self.max_context_tokens} tokens"
                " (max_context_tokens) exceed the token table's 2^31 entries"
            )
        for name, choices in (
            ("engram_tables", ENGRAM_TABLES),
            ("prefix_mode", PREFIX_MODES),
            ("late_compile", LATE_COMPILE),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, but must be one of {', '.join(choices)}"
                )
        for name in ("decoder_replay", "asynchronous", "deterministic"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but must be true or false")
        if self.decoder_replay and self.prefix_mode == "exact":
            raise ValueError(
                "decoder_replay skips window rows that prefix_mode exact shares: choose another prefix_mode"
            )
        if model is not None:
            self._validate_for(model)

    def _validate_for(self, model: "ModelConfig") -> None:
        if self.max_context_tokens > model.max_tokens:
            raise ValueError(
                f"max_context_tokens is {self.max_context_tokens}, but the model ends at {model.max_tokens} "
                "(max_position_embeddings)"
            )
        cut = model.kv_sources[-1] if model.kv_sources else model.num_layers
        behind = next((layer for layer in model.engram.layers if layer >= cut), None)
        if self.decoder_replay and (cut >= model.num_layers - 1 or behind is not None):
            raise ValueError(
                f"decoder_replay needs layers without Engram behind the last KV source, layer {cut}"
                + ("" if behind is None else f", and layer {behind} has one")
            )
