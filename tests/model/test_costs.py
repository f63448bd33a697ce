"""The cost model against the figures of spec/performance.md, section 2, and against sums done by hand."""

from __future__ import annotations

from functools import cache

import pytest

from dsv41.backends import Backends
from dsv41.model.costs import Span, distinct_experts, step_cost, weights_by_part
from dsv41.model.layout import build_layout
from dsv41.model.plan import build_plan
from dsv41.presets import preset

TRAINED = Backends(window_record="scaled_528", state_record="nvfp4_288", index_record="mxfp4_68")


@cache
def setting(name):
    config = preset(name)
    plan = build_plan(config)
    return config, plan, build_layout(config, plan, TRAINED, 64), weights_by_part(config)


def decode(name, rows, context=4096):
    return step_cost(*setting(name), [Span(context - 1, 1)] * rows)


@pytest.mark.parametrize(
    ("part", "gigabytes"),
    [
        ("routed experts", 288.8),
        ("attention projections", 5.07),
        ("shared experts", 1.42),
        ("head", 1.32),
        ("embedding", 1.32),
        ("engram projections", 0.315),
        ("router", 0.157),
        ("hyper connections", 0.157),
        ("indexer and compressor", 0.082),
        ("engram tables", 202.8),
    ],
)
def test_weights_of_the_release(part, gigabytes):
    assert setting("full")[3][part].num_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_the_parts_are_the_whole_checkpoint():
    assert sum(part.num_bytes for part in setting("full")[3].values()) == 510_286_023_000


@pytest.mark.parametrize(("rows", "gigabytes"), [(1, 13.08), (8, 43.1), (32, 124), (128, 264)])
def test_decode_bytes_of_the_release(rows, gigabytes):
    assert decode("full", rows).num_bytes / 1e9 == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.parametrize(("rows", "milliseconds"), [(1, 2.94), (8, 8.8), (128, 25)])
def test_decode_floor_of_h200(rows, milliseconds):
    """At 128 rows the page rounds to all 128 experts and 25 ms."""
    floor = decode("h200", rows).floor_seconds(4.45e12, 769e12) * 1e3
    assert floor == pytest.approx(milliseconds, rel=0.02 if rows < 128 else 0.05)


def test_distinct_experts():
    assert distinct_experts(128, 6, 1) == pytest.approx(6)
    assert distinct_experts(128, 6, 8) == pytest.approx(40.6, rel=0.01)
    assert distinct_experts(128, 6, 10_000) == pytest.approx(128)


def test_long_context_adds_a_twentieth_of_a_millisecond():
    extra = decode("full", 1, 1 << 20).num_bytes - decode("full", 1).num_bytes
    assert extra / 4.45e12 * 1e3 == pytest.approx(0.05, abs=0.01)


def test_global_bytes_a_token():
    layout = setting("full")[2]
    assert layout.global_page_bytes / layout.page_tokens == 890


def test_prefill_flops():
    """4096 rows without decoder replay: 140 TFLOP."""
    cost = step_cost(*setting("full"), [Span(0, 4096)])
    assert cost.flops / 1e12 == pytest.approx(140, rel=0.02)


def test_decoder_replay_flops():
    """4096 rows, of which layers 20 to 39 compute the last 128: 73 TFLOP, of which experts 36 and attention
    projections 21 (spec/performance.md 2)."""
    cost = step_cost(*setting("full"), [Span(0, 4096)], [Span(3968, 128)])
    assert cost.flops / 1e12 == pytest.approx(73, rel=0.02)
    for part, teraflops in (("routed experts", 36), ("attention projections", 21), ("shared experts", 6.0)):
        assert cost.parts[part].flops / 1e12 == pytest.approx(teraflops, rel=0.04), part
    for part, same in step_cost(*setting("full"), [Span(0, 4096)], [Span(0, 4096)]).parts.items():
        assert same == pytest.approx(step_cost(*setting("full"), [Span(0, 4096)]).parts[part]), part


def test_attention_by_hand():
    """kernel at position 999, one row: every window full, the top states in four of its five layers."""
    config, plan, layout, weights = setting("kernel")
    cost = step_cost(config, plan, layout, weights, [Span(999, 1)])
    records = config.num_layers * config.window_tokens + 4 * config.index_topk
    assert cost.parts["sparse attention"].flops == 4 * config.num_heads * config.head_dim * records
    read = config.num_layers * config.window_tokens * 528 + 4 * config.index_topk * 288
    written = config.num_layers * 528 + (1 / 2 + 1) * 288  # one KV source of ratio 2, one of ratio 1
    assert cost.parts["sparse attention"].num_bytes == pytest.approx(read + written)


def test_a_chunk_costs_the_flops_of_its_rows():
    config, plan, layout, weights = setting("kernel")
    whole = step_cost(config, plan, layout, weights, [Span(0, 400)])
    rows = [step_cost(config, plan, layout, weights, [Span(position, 1)]) for position in range(400)]
    for part in ("sparse attention", "index scoring", "attention projections"):
        total = sum(row.parts[part].flops for row in rows)
        assert whole.parts[part].flops == pytest.approx(total, rel=0.01), part
