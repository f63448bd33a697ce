"""Break one thing at a time: a parity test that cannot fail proves nothing.

Most mistakes are broken into the reference ops and run end to end on p37 of tiny without quantisers, where
parity holds to 1e-6 and the limit is 2e-5; each must exceed the margin beside it, half of the error it
causes: the one that spec/arithmetic.md 6 lists for the reference itself (ours agree within 0.01), or else the
one measured here. What is about quantisers shows on single layers instead.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import golden
import pytest
import torch
import torch.nn.functional as F

from dsv41.model.inputs import Rotations
from dsv41.ops.attention import reference as attention
from dsv41.ops.engram import reference as engram
from dsv41.ops.hyper import reference as hyper
from dsv41.ops.indexing import reference as indexing
from dsv41.ops.linear import reference as linear
from dsv41.ops.moe import reference as moe
from dsv41.ops.publish import reference as publish

Patch = pytest.MonkeyPatch
END_TO_END: list = []


def control(margin: float) -> Callable:
    """Register a function that breaks one thing through `patch`, with the end-to-end error that it must
    cause."""

    def register(mistake: Callable[[Patch], None]) -> Callable[[Patch], None]:
        END_TO_END.append(pytest.param(mistake, margin, id=mistake.__name__))
        return mistake

    return register


def wrap(patch: Patch, module: object, name: str, broken: Callable) -> None:
    """Replace `module.name` by `broken(original, *arguments)`."""
    patch.setattr(module, name, functools.partial(broken, getattr(module, name)))


def prefill_error() -> float:
    session = golden.Session("tiny", "fp32-noquant", "p37")
    return golden.prompt_error(session.prefill(), golden.truth("tiny", "fp32-noquant", "p37", 0)[0])


def test_nothing_broken() -> None:
    """The yardstick: without a mistake the same run is at least a thousand times closer than any margin
    below."""
    assert prefill_error() <= 2e-6


@control(0.15)
def no_inverse_rotation(patch: Patch) -> None:
    patch.setattr(linear, "rotate", lambda o, cos_sin, inverse: o)


@control(0.10)
def sink_ignored(patch: Patch) -> None:
    def broken(attend, q, keys, listed, sink):
        return attend(q, keys, listed, torch.full_like(sink, -torch.inf))

    wrap(patch, attention, "attend", broken)


@control(0.10)
def window_one_short(patch: Patch) -> None:
    def broken(attend, q, window, slots, *rest):
        full = (slots >= 0).all(1, keepdim=True)
        oldest = torch.arange(slots.shape[1]) == 0
        return attend(q, window, torch.where(full & oldest, -1, slots), *rest)

    wrap(patch, attention, "sparse_attention", broken)


@control(0.02)
def comb_transposed(patch: Patch) -> None:
    wrap(
        patch,
        hyper,
        "hyper_expand",
        lambda expand, y, x, post, comb, *rest: expand(y, x, post, comb.mT, *rest),
    )


@control(0.04)
def coefficients_not_staggered(patch: Patch) -> None:
    """Every half is fed by its own `pre` instead of the previous half's."""

    def broken_collapse(own, right, streams, pre, norm):
        tickets = torch.zeros(0, dtype=torch.int32)
        return right(streams, own.coefficients(streams, tickets)[0], norm)

    def broken_update(following, right, y, streams, own, norm, tickets):
        streams, mix, sound, _ = right(y, streams, own, norm, tickets)
        pre = following.coefficients(streams, tickets)[0]
        return streams, mix, sound, type(following).collapse(following, streams, pre, norm)

    layers = golden.model("tiny", "fp32-noquant").decoder.layers
    halves = [half for layer in layers for half in (layer.attention_hyper, layer.ffn_hyper)]
    for half, following in itertools.pairwise(halves):
        patch.setattr(half, "collapse", functools.partial(broken_collapse, half, half.collapse))
        patch.setattr(half, "update", functools.partial(broken_update, following, half.update))


@control(0.01)
def sinkhorn_stops_early(patch: Patch) -> None:
    wrap(patch, hyper, "sinkhorn", lambda sinkhorn, logits, sweeps, eps: sinkhorn(logits, 5, eps))


@control(0.07)
def states_of_another_source(patch: Patch) -> None:
    """The Reuse layer 6 attends to the states of the first ratio-2 source, layer 2, not of layer 5."""
    wrong = golden.model("tiny", "fp32-noquant").decoder.layers[6].attention
    patch.setattr(wrong, "plan", replace(wrong.plan, kv_source=2))


@control(0.055)
def index_keys_of_another_source(patch: Patch) -> None:
    """The second ratio-2 source, layer 5, scores against the index keys of layer 2."""
    wrong = golden.model("tiny", "fp32-noquant").decoder.layers[5].attention.indexer
    patch.setattr(wrong, "plan", replace(wrong.plan, kv_source=2))


@control(0.12)
def selection_shifted_by_one(patch: Patch) -> None:
    def broken(select, *args):
        states, slots, *rest = select(*args)
        return states, torch.where(states > 0, slots - 1, slots), *rest  # p37 lies on one page

    wrap(patch, indexing, "select", broken)


@control(0.05)
def top_k_one_short(patch: Patch) -> None:
    def broken(select, q, weights, keys, table, request, num_states, candidates, k, *rest):
        states, slots, *others = select(
            q, weights, keys, table, request, num_states, candidates, k - 1, *rest
        )
        return F.pad(states, (0, 1), value=-1), F.pad(slots, (0, 1), value=-1), *others

    wrap(patch, indexing, "select", broken)


@control(0.04)
def candidates_ignored(patch: Patch) -> None:
    def broken(select, q, weights, keys, table, request, num_states, candidates, *rest):
        return select(q, weights, keys, table, request, num_states, candidates[:, :0], *rest)

    wrap(patch, indexing, "select", broken)


@control(0.055)
def state_rotated_at_its_last_token(patch: Patch) -> None:
    """The compressed state of a pair, and its index key, at the angle of the token that closes the pair."""
    decoder = golden.model("tiny", "fp32-noquant").decoder
    right = decoder.rotations

    def broken(step) -> Rotations:
        turns = right(step)
        return replace(turns, group=dict.fromkeys(turns.group, turns.compressed))

    patch.setattr(decoder, "rotations", broken)


@control(0.08)
def bias_weighs(patch: Patch) -> None:
    def broken(route, x, gate, bias, image_bias, is_image, valid, top_k, scale):
        ids, _ = route(x, gate, bias, image_bias, is_image, valid, top_k, scale)
        chosen = (F.softplus(x.float() @ gate.float().T).sqrt() + bias).gather(1, ids.long())
        return ids, chosen / chosen.sum(-1, keepdim=True) * scale

    wrap(patch, moe, "route", broken)


@control(0.09)
def route_scale_missing(patch: Patch) -> None:
    wrap(patch, moe, "route", lambda route, *args: route(*args[:-1], 1.0))


@control(0.18)
def clamp_ignored(patch: Patch) -> None:
    wrap(patch, moe, "experts", lambda experts, *args: experts(*args[:-3], 1e30, *args[-2:]))
    wrap(patch, moe, "shared_expert", lambda expert, *args: expert(*args[:-4], 1e30, *args[-3:]))


@control(0.035)
def engram_gate_without_root(patch: Patch) -> None:
    """`copysign(sqrt(|a|), a)` becomes `a`."""
    assert "copysign" in engram.engram_write.__code__.co_names, "break the root of the new gate here"
    patch.setattr(torch, "copysign", lambda root, match: match)


@pytest.mark.parametrize(("mistake", "margin"), END_TO_END)
def test_logic_mistakes_show_end_to_end(
    monkeypatch: Patch, mistake: Callable[[Patch], None], margin: float
) -> None:
    """Each margin is at least 500 times the limit of the parity tests (2e-5)."""
    mistake(monkeypatch)
    assert prefill_error() > margin >= 500 * 2e-5


def worst(tensor: str) -> float:
    """The largest error of one tensor over the layers of tiny in bf16, each on its golden input."""
    layers = golden.force("tiny", "bf16", "p25", ("prefill",))["prefill"].layers
    pairs = [(layer.ours[tensor], layer.golden[tensor]) for layer in layers if tensor in layer.ours]
    return max(golden.rel(ours.nan_to_num(neginf=0), truth.nan_to_num(neginf=0)) for ours, truth in pairs)


UNQUANTISED = [
    pytest.param("publish_window", "window_kv", 0.013, id="window"),
    pytest.param("publish_states", "compress_kv", 0.049, id="states"),
    pytest.param("publish_index_k", "index_score", 0.09, id="index-k"),
]


@pytest.mark.parametrize(("op", "tensor", "margin"), UNQUANTISED)
def test_a_missing_quantiser_shows_in_its_layer(
    monkeypatch: Patch, op: str, tensor: str, margin: float
) -> None:
    """End to end these stay below the bf16 noise floor; the layer tests hold the tensors equal to the bit."""
    wrap(monkeypatch, publish, op, lambda right, *args: right(*args[:-1], False))
    assert worst(tensor) > margin


def test_states_in_the_wrong_format_show_in_their_layer(monkeypatch: Patch) -> None:
    """Blocks of 32 with power-of-two scales, the index keys' format, for the compressed states."""

    def broken(store, value, turns, slots, cache, record, page_states, round_trip):
        other = "mxfp4_32" if round_trip == "nvfp4_16" else round_trip
        store(value, turns, slots, cache, record, page_states, other)

    wrap(monkeypatch, publish, "_store", broken)
    assert worst("compress_kv") > 0.08


def test_weighing_after_the_last_product_shows_in_ffn_out(monkeypatch: Patch) -> None:
    """Algebraically equal, 0 without quantisers; but the routing weight belongs before the quantiser of w2's
    input and moves its codes. The feed-forward half alone is held to 5e-3."""

    held = torch.empty(0)  # the weights of rows whose last product is still to come

    def unweighed(gated, up, weight, limit):
        nonlocal held
        if weight is None:  # the shared expert
            return gated(up, None, limit)
        held = weight
        return gated(up, torch.ones_like(weight), limit)

    def weighing(product, x, weight):
        nonlocal held
        out = product(x, weight)
        if len(held):
            out = out.bfloat16().float() * held[: len(x)].unsqueeze(1)
            held = held[len(x) :]
        return out

    wrap(monkeypatch, moe, "_gated", unweighed)
    wrap(monkeypatch, moe, "exact_matmul", weighing)
    session = golden.Session("tiny", "bf16", "p25")
    step = session.step(session.num_uncomputed)
    _, dumps = golden.dump("tiny", "bf16", "p25", "prefill")
    with torch.inference_mode():
        errors = [
            golden.rel(
                layer.moe(dump["ffn_in"], step.is_image, step.attention.row_request >= 0), dump["ffn_out"]
            )
            for layer, dump in zip(session.stepper.model.decoder.layers, dumps, strict=True)
        ]
    assert not len(held)
    assert max(errors) > 0.013
    assert min(errors) > 5e-3
