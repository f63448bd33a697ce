"""Is this build the model? Recorded logits of the release, then invariants that need no recorded truth.

`check` prints a receipt per comparison: what was compared, the error, the tolerance, the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import dsv41
from dsv41.backends import FAMILIES
from dsv41.config import EngineConfig
from dsv41.runner.load import Model, blueprint, load
from dsv41.runner.parity import random_tokens, row_error
from dsv41.runner.stepper import HandRequest, Stepper

EXCERPT = Path(dsv41.__file__ or "").parent / "data" / "parity"

EXACT_LIMIT = 2e-5  # worst row without quantisers: sums differ in their order and in nothing else
# With quantisers one ulp can move a code and codes move rows: this only shows that nothing is grossly wrong.
SMOKE_LIMITS = {"prefill": 0.28, "decode": 0.33}  # rms(difference) / std, over a prompt
SMOKE_MARGIN = 1.5  # the two best logits must be this far apart before the argmax is held against a build
REPLAY_DRIFT = 0.5  # of a row's deviation; stand-in weights: up to 0.1 was seen
LOOSE_INVARIANT = 0.05  # worst row on implementations that are not the reference

NOT_SHOWN = (
    "that bf16 logits are exact: quantisation amplifies one ulp to about a tenth of the logits' deviation",
    "anything about images and the draft module: the excerpt is text only",
    "contexts beyond a few windows, real weights, or the quality of any text",
    "speed, and the compiled form of the model (bench compares that with the reference first)",
)


@dataclass(frozen=True)
class Receipt:
    """One comparison. `error` is None when it could not be made; `note` then says why."""

    name: str
    what: str
    error: float | None
    limit: float
    note: str = ""
    extra: bool = True  # conditions besides the error, named in `note`

    @property
    def verdict(self) -> str:
        if self.error is None:
            return "SKIP"
        return "PASS" if self.extra and self.error <= self.limit else "FAIL"


class Rows:
    """A stepper, and the logits of all the rows of its requests."""

    def __init__(self, model: Model, context: int) -> None:
        capacity = EngineConfig(max_requests=2, max_context_tokens=context, max_batch_tokens=2 * context)
        self.stepper = Stepper(model, capacity)
        self.add = self.stepper.add

    def feed(self, *scheduled: tuple[HandRequest, int], padding: int = 0) -> list[Tensor]:
        """Logits [count, V] of every scheduled request's next `count` tokens."""
        num_rows = sum(count for _, count in scheduled) + padding
        return [logits.cpu() for logits in self.stepper.logits(scheduled, num_rows)]

    def run(self, tokens: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Logits [n, V] of one request alone, in steps of these sizes; the rest of it in a last one."""
        request = self.add(tokens)
        logits = [self.feed((request, count))[0] for count in counts]
        if len(tokens) > request.num_computed:
            logits += self.feed((request, len(tokens) - request.num_computed))
        return torch.cat(logits)


# -- against the release -----------------------------------------------------------------------------------


def parity(device: str, backends: str | None, say: Callable[[str], None]) -> Iterator[Receipt]:
    """The shipped excerpt of the release's own output, in two arithmetics."""
    for mode, numerics in (("fp32nq", "fp32-noquant"), ("bf16", "bf16")):
        say(f"parity with the release: {numerics}")
        try:
            plan = blueprint(str(EXCERPT), numerics=numerics, device=device, backends=backends)
        except ValueError as reason:
            yield Receipt(f"release {numerics}", "recorded logits", None, 0, str(reason))
            continue
        model = load(plan)
        with np.load(EXCERPT / "expected.npz") as stored:
            values = {name: torch.from_numpy(stored[name]) for name in stored.files if name != "mode"}
        for prompt in sorted(
            key.split(".")[1] for key in values if key.startswith(mode) and "prefill" in key
        ):
            ids, prefill = values[f"{prompt}.ids"].tolist(), values[f"{mode}.{prompt}.prefill"]
            decode = values[f"{mode}.{prompt}.decode"]
            logits = Rows(model, len(ids) + 1).run(ids, [len(prefill)] + [1] * len(decode))
            expected = torch.cat((prefill, decode))
            if mode == "bf16":
                margin = values[f"{mode}.{prompt}.margin"]
                yield from _smoke(prompt, logits, expected, len(prefill), margin)
            else:
                yield _exact(prompt, logits, expected)


def _exact(prompt: str, logits: Tensor, expected: Tensor) -> Receipt:
    same = bool((logits.argmax(-1) == expected.argmax(-1)).all())
    return Receipt(
        f"release fp32-noquant {prompt}",
        f"logits of {len(logits)} rows, worst row",
        float(row_error(logits, expected).max()),
        EXACT_LIMIT,
        "argmax equal" if same else "argmax differs",
        same,
    )


def _smoke(
    prompt: str, logits: Tensor, expected: Tensor, num_prefill: int, margin: Tensor
) -> Iterator[Receipt]:
    decisive = torch.cat((torch.zeros(num_prefill - 1), margin)) >= SMOKE_MARGIN
    same = bool((logits.argmax(-1) == expected.argmax(-1))[decisive].all())
    parts = {"prefill": slice(0, num_prefill), "decode": slice(num_prefill, None)}
    for kind, rows in parts.items():
        difference = logits[rows] - expected[rows]
        error = float(difference.square().mean().sqrt() / expected[rows].std())
        note = f"argmax equal on {int(decisive.sum())} decisive rows" if same else "a decisive argmax differs"
        what = f"logits of {len(difference)} rows, whole {kind}"
        yield Receipt(f"release bf16 {prompt} {kind}", what, error, SMOKE_LIMITS[kind], note, same)


# -- invariants --------------------------------------------------------------------------------------------


def invariants(model: Model, seed: int) -> Iterator[Receipt]:
    """Equalities of one model with itself. Bit for bit on the reference implementations."""
    exact = all(getattr(model.backends, family) == "reference" for family in FAMILIES)
    limit = 0.0 if exact else LOOSE_INVARIANT
    window = model.config.window_tokens
    length = min(2 * window + 3, model.config.max_tokens - 1)
    tokens = random_tokens(length, model, seed)
    context = length + 1
    whole = Rows(model, context).run(tokens, [])

    def receipt(name: str, what: str, logits: Tensor, expected: Tensor) -> Receipt:
        error = 0.0 if torch.equal(logits, expected) else float(row_error(logits, expected).max())
        return Receipt(name, what, error, limit, "bit for bit" if exact else "")

    for first in sorted({1, window - 1, window, window + 1} & set(range(1, length))):
        chunked = Rows(model, context).run(tokens, [first])
        yield receipt("chunked = one-shot", f"{length} rows split after {first}", chunked, whole)

    decoded = Rows(model, context).run(tokens, [window] + [1] * (length - window))
    yield receipt("decode = prefill", f"{length - window} single rows after {window}", decoded, whole)

    short = random_tokens(max(window // 2, 1), model, seed + 1)
    alone = Rows(model, context).run(short, [])
    both = Rows(model, context)
    pair = both.feed((both.add(tokens), length), (both.add(short), len(short)))
    yield receipt(
        "batch = alone",
        f"{length} and {len(short)} rows in one step",
        torch.cat(pair),
        torch.cat((whole, alone)),
    )

    yield from _replay_drift(model, tokens, context, whole[-1:])

    padded = Rows(model, context)
    (logits,) = padded.feed((padded.add(tokens), length), padding=5)
    yield receipt("padded = exact", f"{length} rows and 5 of padding", logits, whole)


def _replay_drift(model: Model, tokens: Sequence[int], context: int, expected: Tensor) -> Iterator[Receipt]:
    """How far decoder replay moves the last row of a prompt: approximate by design, so measured."""
    name = "decoder replay, drift"
    capacity = EngineConfig(max_requests=1, max_context_tokens=context, decoder_replay=True)
    try:
        stepper = Stepper(model, capacity)
    except ValueError as reason:
        yield Receipt(name, "last row against the full pass", None, 0, str(reason))
        return
    hidden = stepper.step([(stepper.add(tokens), len(tokens))]).hidden[-1:]
    error = float(row_error(model.decoder.logits(hidden).cpu(), expected).max())
    yield Receipt(name, "last row against the full pass", error, REPLAY_DRIFT, "approximate by design")
