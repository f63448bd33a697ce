"""The layer table against the release's, and the bytes of its caches against arithmetic done by hand.

The release has 40 window caches and the KV sources 2, 8, 14 (ratio 2) and 20 (ratio 1): 2.5 states a token.
Its pages hold 64 tokens.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv41.backends import Backends
from dsv41.model.caches import allocate_caches
from dsv41.model.layout import CacheLayout, build_layout
from dsv41.model.plan import FULL, REINDEX, REUSE, WINDOW, build_plan
from dsv41.ops import records
from dsv41.presets import preset
from dsv41.runner.pages import PagePool

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
TRAINED = Backends(window_record="scaled_528", state_record="nvfp4_288", index_record="mxfp4_68")
VENDOR = Backends(window_record="mixed_584", state_record="mixed_584", index_record="fp8_132")
ROWS = Backends(window_record="rows_bf16", state_record="rows_bf16", index_record="rows_bf16")


def layout_of(name: str, backends: Backends, page_tokens: int = 64) -> CacheLayout:
    config = preset(name)
    return build_layout(config, build_plan(config), backends, page_tokens)


# ---------------------------------------------------------------------- the plan


def test_the_release_s_plan_is_the_published_table() -> None:
    """An owner, a role, a candidate flag, an Engram or a target layer off by one in any of 40 layers."""
    roles = {"SWA": WINDOW, "Full": FULL, "Reindex": REINDEX, "Reuse": REUSE}
    published = json.loads((SHARED / "spec" / "data" / "layer_roles.json").read_text())
    plan = build_plan(preset("full"))
    assert len(plan) == len(published) == 40
    for own, row in zip(plan, published, strict=True):
        assert (own.layer, own.ratio, own.role) == (row["layer"], row["ratio"], roles[row["mode"]])
        assert own.kv_source == row["main_kv_owner"] == row["index_key_owner"]
        assert own.index_source == row["topk_owner"]
        assert own.publishes_candidates == (row["candidate_role"] == "producer")
        assert own.reads_candidates == (row["candidate_role"] == "consumer(own scoring)")
        assert (own.engram is not None) == row["engram"]
        assert own.is_target == row["dspark_tap"]
    assert [own.engram for own in plan if own.engram is not None] == [0, 1]


def test_an_owner_owns_what_it_names() -> None:
    plan = build_plan(preset("odd"))  # its candidate source and its re-indexing layers own no states
    assert [own.layer for own in plan if own.owns_kv] == [0, 2, 6]
    assert [own.layer for own in plan if own.owns_index] == [0, 2, 5, 6, 8, 9]
    assert [own.layer for own in plan if own.reads_candidates] == [9]
    assert [own.kv_source for own in plan] == [0, 0, 2, None, 2, 2, 6, 6, 6, 6]


@pytest.mark.parametrize(
    ("ratios", "kv", "index", "sentence"),
    [
        ((0, 2, 2), (2,), (2,), "layer 1 has ratio 2 but no KV and index source"),
        ((2, 2), (0,), (1,), "layer 0 has ratio 2 but no KV and index source"),
        ((2, 1), (0,), (0,), "layer 1 has ratio 1 but its KV source, layer 0, has ratio 2"),
        ((1, 1), (0, 1), (0,), "layer 1 would read the selection of layer 0 in the states of 1"),
    ],
)
def test_a_layer_with_nothing_to_read_is_refused(
    ratios: tuple[int, ...], kv: tuple[int, ...], index: tuple[int, ...], sentence: str
) -> None:
    """A ModelConfig refuses these first (dsv41/rules.py), so the plan's own check needs a bare stand-in."""
    config = SimpleNamespace(
        num_layers=len(ratios), ratios=ratios, kv_sources=kv, index_sources=index, candidate_source=-1
    )
    config.engram, config.draft = SimpleNamespace(layers=()), SimpleNamespace(target_layers=())
    with pytest.raises(ValueError, match=sentence):
        build_plan(config)


@pytest.mark.parametrize(
    "change",
    [
        "kv_source_layer_ids=[3,5,7]",  # layer 2 comes before its source
        "index_source_layer_ids=[2,3,7,9]",  # KV source 5 does not index
        "kv_source_layer_ids=[2,5]",  # layers 7... of ratio 1 would read states of ratio 2
        "candidate_source_layer_id=8",  # not an index source
        "index_topk=32",  # more than the candidates hold
    ],
)
def test_a_broken_topology_never_becomes_a_config(change: str) -> None:
    with pytest.raises(ValueError, match=r"layer|topk"):
        build_plan(preset("tiny").with_overrides([change]))


# ---------------------------------------------------------------------- bytes of a layout


def test_trained_records_cost_890_bytes_a_token() -> None:
    """2.5 states of 288 + 68 bytes; alignment adds nothing, since 32 and 64 states fill whole lines."""
    layout = layout_of("full", TRAINED)
    assert [group.num_states for group in layout.states] == [32, 32, 32, 64]
    assert [group.page_bytes for group in layout.states] == [9216, 9216, 9216, 18432]
    assert [group.page_bytes for group in layout.index_k] == [2176, 2176, 2176, 4352]
    assert layout.global_page_bytes == 64 * 890
    assert layout.window_page_bytes == 40 * 64 * 528


def test_vendor_records_cost_1790_bytes_a_token_and_1827_aligned() -> None:
    """Pages strided by 576 bytes: 33 and 65 strides of states, 8 and 15 of index keys."""
    layout = layout_of("full", VENDOR)
    groups = layout.states + layout.index_k
    payload = [records.page_bytes(g.record, g.num_states, g.dim, 64) for g in groups]
    assert sum(payload) == 64 * 1790
    assert [group.page_bytes // 576 for group in groups] == [33, 33, 33, 65, 8, 8, 8, 15]
    assert layout.global_page_bytes == 64 * 1827 == 576 * 203
    assert layout.window_page_bytes == 40 * 65 * 576


@pytest.mark.parametrize(
    ("num_tokens", "step_tokens", "window_pages", "pages"),
    [
        (1, 1, 1, 1),
        (64, 1, 1, 1),
        (65, 1, 2, 2),
        (1000, 1, 3, 16),
        (1_048_576, 1, 3, 16_384),
        (1000, 512, 11, 16),
    ],
)
def test_context_bytes(num_tokens: int, step_tokens: int, window_pages: int, pages: int) -> None:
    """Window bytes stop growing at the window, global bytes never do; open groups are a constant."""
    assert layout_of("full", TRAINED).context_bytes(num_tokens, step_tokens) == {
        "window": window_pages * 1_351_680,  # 40 layers * 64 rows * 528 bytes
        "states": pages * 46_080,  # (3 * 32 + 64) states * 288 bytes
        "index_k": pages * 10_880,  # (3 * 32 + 64) keys * 68 bytes
        "open_groups": 98_304,  # 3 layers * 8 rows * 2 * 512 channels * 4 bytes
    }


@pytest.mark.parametrize(
    ("window", "page", "step"), [(8, 4, 1), (8, 4, 7), (12, 4, 5), (8, 16, 3), (1, 4, 1)]
)
def test_window_pages_bound_every_step(window: int, page: int, step: int) -> None:
    """Counted over every start: the pages from the oldest position that a row sees to the step's last row."""
    layout = replace(layout_of("tiny", ROWS, page), window_tokens=window)
    starts = range(4 * window * page)
    touched = [(p + step - 1) // page - max(0, p - window + 1) // page + 1 for p in starts]
    assert max(touched) == layout.window_pages(step)


def test_a_page_holds_whole_groups() -> None:
    """A page of 5 tokens would tear the pair that makes a state."""
    with pytest.raises(ValueError, match="page_tokens 5 is not a multiple of ratio 2 of layer 2"):
        layout_of("tiny", ROWS, 5)


def test_a_record_that_does_not_fit_is_refused() -> None:
    """head_dim 96 with 24 rotated channels leaves 72 values, which blocks of 64 do not divide."""
    with pytest.raises(ValueError, match="mixed_584 quantises a multiple of 64 values, not 72"):
        layout_of("odd", VENDOR)


# ---------------------------------------------------------------------- the tensors


@pytest.mark.parametrize(
    ("name", "backends"),
    [("tiny", ROWS), ("odd", ROWS), ("kernel", TRAINED), ("kernel", VENDOR), ("full", TRAINED)],
    ids=lambda value: value if isinstance(value, str) else value.state_record,
)
def test_caches_take_the_bytes_the_layout_says(name: str, backends: Backends) -> None:
    """A capacity planned from the layout and exceeded by the tensors ends in an out-of-memory at start."""
    layout = layout_of(name, backends)
    caches = allocate_caches(layout, window_pages=2, global_pages=3, max_requests=2, device="meta")
    open_bytes = 2 * layout.context_bytes(1)["open_groups"]
    assert caches.num_bytes() == 2 * layout.window_page_bytes + 3 * layout.global_page_bytes + open_bytes
    plan = build_plan(preset(name))
    assert list(caches.window) == [own.layer for own in plan]
    assert list(caches.states) == list(caches.index_k) == [own.layer for own in plan if own.owns_kv]
    assert list(caches.open_groups) == [own.layer for own in plan if own.owns_kv and own.ratio == 2]


def test_caches_can_be_written_by_their_records() -> None:
    """The last state of the last page, read back: a page too short by its scales fails here."""
    layout = layout_of("kernel", TRAINED, page_tokens=8)
    caches = allocate_caches(layout, window_pages=3, global_pages=3, max_requests=1, device="cpu")
    for group in layout.window + layout.states + layout.index_k:
        cache, slots = getattr(caches, group.name)[group.layer], torch.tensor([3 * group.num_states - 1])
        rope_dim = 0 if group.name == "index_k" else 64
        rows = torch.full((1, group.dim), 3.0)  # exact in every format
        records.write_slots(group.record, cache, slots, rows, group.num_states, rope_dim)
        read = records.read_slots(
            group.record, cache, slots, group.num_states, group.dim, rope_dim, torch.float32
        )
        assert torch.equal(read, rows)
        assert not cache[0].any(), "the null page was written"


def test_the_null_page_is_never_handed_out() -> None:
    """Padding rows may point at page 0, so no request may own it."""
    pool = PagePool(4)
    pages = [pool.allocate() for _ in range(3)]
    assert sorted(pages) == [1, 2, 3]
    with pytest.raises(MemoryError, match="all 3 pages"):
        pool.allocate()
