"""What must hold between the numbers of a model config (spec/model.md, section 11, rules 1 to 10 and 12).

Each group of rules is a generator of sentences about what is broken; `broken` chains them, and the caller
stops at the first. So a rule may rely on every rule before it. Sentences name keys as the released file does.
"""

import itertools
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from dsv41.released import SPELLING as KEY

if TYPE_CHECKING:
    from dsv41.config import ModelConfig

BLOCK = (
    32  # elements that share a scale in every fp8 and fp4 matrix product, fp8 window row and fp4 index key
)
RATIOS = (0, 1, 2)
MAX_COPIES = 4
MAX_SEARCH_START = 2**31  # keeps the prime search short, and tables beyond it are beyond any disk

# Smallest legal value where "positive" is not the rule.
MINIMUM: dict[str, float] = {
    **dict.fromkeys(("bos_token", "eos_token", "pad_token", "image_token", "engram.pad_token"), 0),
    "draft.noise_token": 0,
    **dict.fromkeys(("copies", "engram.max_ngram", "engram.search_start"), 2),
    **dict.fromkeys(
        ("rope_theta", "compressed_rope_theta", "vision.rope_theta"), 2
    ),  # YaRN divides by ln(theta)
    "candidate_source": -1,
    "yarn.factor": 1,
    "vision.max_tokens": 10,
}
BLOCKED = ("hidden_size", "q_rank", "o_rank", "head_dim", "index_dim", "expert_dim", "engram.dim")
TOKENS = ("bos_token", "eos_token", "pad_token", "image_token", "engram.pad_token", "draft.noise_token")


def broken(config: "ModelConfig") -> Iterator[str]:
    """Sentences about broken rules, in a fixed order. Only the first is meaningful."""
    groups = (_ranges, _sizes, _ratios, _sources, _sharing, _candidates, _experts, _engram, _draft, _vision)
    return itertools.chain.from_iterable(group(config) for group in groups)


def last_source(sources: Sequence[int], layer: int) -> int | None:
    """The largest of `sources` at or before `layer`: whom a layer reads (spec/model.md, 3.9)."""
    return max((source for source in sources if source <= layer), default=None)


def _is(c: "ModelConfig", name: str) -> str:
    return f"{KEY[name]} is {attrgetter(name)(c)}"


def _ranges(c: "ModelConfig") -> Iterator[str]:
    values = c.values()
    for name, value in values.items():
        if value is None or isinstance(value, tuple):
            continue
        if name in MINIMUM and value < MINIMUM[name]:
            yield f"{_is(c, name)}, but must be at least {MINIMUM[name]}"
        if name not in MINIMUM and value <= 0:
            yield f"{_is(c, name)}, but must be positive"
    for name in TOKENS:
        if values.get(name, 0) >= c.vocab_size:
            yield f"{_is(c, name)}, but {_is(c, 'vocab_size')}"
    if c.copies > MAX_COPIES:
        yield f"{_is(c, 'copies')}, but must be 2 to {MAX_COPIES}"


def _sizes(c: "ModelConfig") -> Iterator[str]:
    values = c.values()
    for name in BLOCKED:
        if values.get(name, 0) % BLOCK:
            yield f"{_is(c, name)}, but must be a multiple of {BLOCK}, the block of one scale"
    if c.rope_dim % 2 or c.rope_dim > min(c.head_dim, c.index_dim):
        yield (
            f"{_is(c, 'rope_dim')}, but must be even and within {KEY['head_dim']} {c.head_dim} "
            f"and {KEY['index_dim']} {c.index_dim}"
        )
    if c.num_heads % c.o_groups:
        yield f"{_is(c, 'num_heads')}, but must be a multiple of {KEY['o_groups']} {c.o_groups}"
    if c.yarn.beta_fast < c.yarn.beta_slow:
        yield f"{_is(c, 'yarn.beta_fast')}, but {_is(c, 'yarn.beta_slow')}"
    if 2 in c.ratios and c.max_tokens % 2:
        yield f"{_is(c, 'max_tokens')}, but layers of ratio 2 need an even number"


def _ratios(c: "ModelConfig") -> Iterator[str]:
    if len(c.ratios) != c.num_layers:
        yield f"{KEY['ratios']} has {len(c.ratios)} backbone entries, but {_is(c, 'num_layers')}"
    for layer, ratio in enumerate(c.ratios):
        if ratio not in RATIOS:
            yield f"{KEY['ratios']} of layer {layer} is {ratio}, but must be 0, 1 or 2"


def _layer_list(name: str, layers: Sequence[int], num_layers: int) -> Iterator[str]:
    for layer in layers:
        if not 0 <= layer < num_layers:
            yield f"{KEY[name]} has layer {layer}, but {KEY['num_layers']} is {num_layers}"
    for before, layer in itertools.pairwise(layers):
        if layer <= before:
            yield f"{KEY[name]} has layer {layer} after layer {before}, but must ascend"


def _sources(c: "ModelConfig") -> Iterator[str]:
    for name, layers in (("kv_sources", c.kv_sources), ("index_sources", c.index_sources)):
        yield from _layer_list(name, layers, c.num_layers)
        for layer in layers:
            if c.ratios[layer] == 0:
                yield f"{KEY[name]} has layer {layer}, but its {KEY['ratios']} entry is 0: it has no states"
    for layer in c.kv_sources:
        if layer not in c.index_sources:
            yield f"{KEY['kv_sources']} has layer {layer}, but {KEY['index_sources']} lacks it"


def _sharing(c: "ModelConfig") -> Iterator[str]:
    for layer, ratio in enumerate(c.ratios):
        if ratio == 0:
            continue
        owner = last_source(c.kv_sources, layer)
        if owner is None:
            yield (
                f"{KEY['ratios']} of layer {layer} is {ratio}, but {KEY['kv_sources']} {list(c.kv_sources)} "
                "has no source at or before it"
            )
        elif c.ratios[owner] != ratio:
            yield (
                f"{KEY['ratios']} of layer {layer} is {ratio}, but {c.ratios[owner]} of layer {owner}, "
                f"its source in {KEY['kv_sources']}"
            )


def _candidates(c: "ModelConfig") -> Iterator[str]:
    source, key = c.candidate_source, KEY["candidate_source"]
    if source == -1:
        return
    if source not in c.index_sources:
        yield f"{key} is {source}, but {KEY['index_sources']} {list(c.index_sources)} lacks it"
    if c.ratios[source] != 1:
        yield f"{key} is {source}, but {KEY['ratios']} of layer {source} is {c.ratios[source]} and must be 1"
    owner = last_source(c.kv_sources, source)
    for layer in c.index_sources:
        if layer > source and last_source(c.kv_sources, layer) != owner:
            yield (
                f"{KEY['index_sources']} has layer {layer} after {key} {source}, but it reads states of "
                f"layer {last_source(c.kv_sources, layer)} and the candidates are states of layer {owner}"
            )
    # The newest block is always kept and may hold a single state.
    reach = (c.candidate_blocks - 1) * c.candidate_block_states + 1
    if reach < c.index_topk:
        yield (
            f"{_is(c, 'index_topk')}, but {KEY['candidate_blocks']} {c.candidate_blocks} of "
            f"{KEY['candidate_block_states']} {c.candidate_block_states} guarantee only {reach} states"
        )


def _experts(c: "ModelConfig") -> Iterator[str]:
    if c.experts_per_token > c.num_experts:
        yield f"{_is(c, 'experts_per_token')}, but {_is(c, 'num_experts')}"


def _engram(c: "ModelConfig") -> Iterator[str]:
    e = c.engram
    if not e.layers:
        return
    yield from _layer_list("engram.layers", e.layers, c.num_layers)
    if e.compressed_vocab > c.vocab_size:
        yield f"{_is(c, 'engram.compressed_vocab')}, but {_is(c, 'vocab_size')}"
    if e.search_start > MAX_SEARCH_START:
        yield f"{_is(c, 'engram.search_start')}, but must be at most {MAX_SEARCH_START}"
    expected = tuple(sum(map(sum, orders)) for orders in e.primes())
    if len(e.num_rows) != len(e.layers):
        yield f"{KEY['engram.num_rows']} has {len(e.num_rows)} entries for {len(e.layers)} layers"
    for layer, rows, total in zip(e.layers, e.num_rows, expected, strict=True):
        if rows != total:
            yield f"{KEY['engram.num_rows']} of layer {layer} is {rows}, but its primes sum to {total}"


def _draft(c: "ModelConfig") -> Iterator[str]:
    d = c.draft
    if not d.stages:
        return
    if not d.target_layers:
        yield f"{KEY['draft.target_layers']} is empty, but {_is(c, 'draft.stages')}"
    yield from _layer_list("draft.target_layers", d.target_layers, c.num_layers)
    if d.experts_per_token > d.num_experts:
        yield f"{_is(c, 'draft.experts_per_token')}, but {_is(c, 'draft.num_experts')}"


def _vision(c: "ModelConfig") -> Iterator[str]:
    v = c.vision
    if v is None:
        return
    if v.hidden_size % (4 * v.num_heads):  # two axes, and an even half for each
        yield (
            f"{_is(c, 'vision.hidden_size')}, but must be a multiple of 4 times "
            f"{KEY['vision.num_heads']} {v.num_heads}"
        )
