"""One request: its tokens, how many of them the model has seen, and where its state lives."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from dsv41.model.layout import NULL_PAGE
from dsv41.runner.pages import PagePool


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen. `temperature` 0 is greedy; `top_p` in (0, 1] keeps the smallest
    set of tokens with at least that probability; a seed gives the same tokens in any batch.

    Raises ValueError for a value out of range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(
                f"max_tokens is {self.max_tokens}, but a request must produce at least one token"
            )
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise ValueError(f"temperature is {self.temperature}, but must be a finite number of at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, but must lie in (0, 1]")


@dataclass(eq=False)
class Request:
    """`tokens` holds the prompt and what was sampled. `slot` keeps the open groups, `pages` the global states
    (page i covers tokens i*page_tokens ...), `window_pages` the window (entries below the window are the null
    page).

    `image_rows` marks prompt positions that belong to an image; `embeddings [prompt, D]` replaces theirs.
    """

    tokens: list[int]
    params: SamplingParams
    slot: int = -1
    num_computed: int = 0
    num_prompt: int = 0
    pages: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)
    image_rows: list[bool] | None = None
    embeddings: Tensor | None = None
    finish_reason: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def reserve(
        self,
        num_tokens: int,
        page_tokens: int,
        window_tokens: int,
        global_pool: PagePool,
        window_pool: PagePool,
    ) -> None:
        """Pages for the next `num_tokens` tokens; window pages wholly below the next window are given back
        first.

        Raises MemoryError when a pool runs out, with every page still owned by this request.
        """
        first_kept = max(0, self.num_computed - window_tokens + 1) // page_tokens
        for number in range(min(first_kept, len(self.window_pages))):
            if self.window_pages[number] != NULL_PAGE:
                window_pool.release(self.window_pages[number])
                self.window_pages[number] = NULL_PAGE
        needed = -(-(self.num_computed + num_tokens) // page_tokens)
        while len(self.pages) < needed:
            self.pages.append(global_pool.allocate())
        while len(self.window_pages) < needed:
            skipped = len(self.window_pages) < first_kept
            self.window_pages.append(NULL_PAGE if skipped else window_pool.allocate())

    def release(self, global_pool: PagePool, window_pool: PagePool) -> None:
        """Give every page back."""
        for page in self.pages:
            global_pool.release(page)
        for page in self.window_pages:
            if page != NULL_PAGE:
                window_pool.release(page)
        self.pages, self.window_pages = [], []
