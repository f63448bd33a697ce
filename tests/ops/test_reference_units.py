"""The references against the release's own recorded unit vectors, and against arithmetic done by hand.

Tolerances are those of golden/README.md, 5. What needs no golden data is at the end.
"""

from pathlib import Path

import one_request
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from whole_experts import whole_experts

from dsv41.backends import select
from dsv41.hardware import detect
from dsv41.model import rope
from dsv41.model.layout import build_layout
from dsv41.model.plan import build_plan
from dsv41.ops import records
from dsv41.ops.arithmetic import exact_matmul, rms_norm, rotate
from dsv41.ops.attention.op import sparse_attention
from dsv41.ops.compression.op import compress
from dsv41.ops.hyper.op import hyper_coefficients, hyper_collapse, hyper_expand, hyper_update
from dsv41.ops.hyper.reference import collapse, split_mixes
from dsv41.ops.indexing.op import candidate_blocks
from dsv41.ops.linear.op import linear, linear_fp8
from dsv41.ops.moe.op import route
from dsv41.ops.moe.reference import _gated
from dsv41.ops.streams import nothing_forked
from dsv41.presets import preset

UNITS = Path(__file__).resolve().parents[2].parent / "shared" / "golden" / "units"
EPS = 1e-20
CPU = "reference"
TICKETS = torch.zeros(4, dtype=torch.int32)


def units(name: str, case: str = "") -> dict[str, Tensor]:
    """A unit file; of one case of it, the tensors without their prefix. Missing data fails the test."""
    tensors = load_file(UNITS / f"{name}.safetensors")
    found = {key.removeprefix(f"{case}."): value for key, value in tensors.items() if key.startswith(case)}
    assert found, f"{name} has no case {case}"
    return found


def rel(a: Tensor, b: Tensor) -> float:
    """rms(a - b) / rms(b)"""
    return float((a.double() - b.double()).norm() / b.double().norm())


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """How many bf16 values lie between a and b."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    assert a.dtype == b.dtype == torch.bfloat16
    return (ordered(a) - ordered(b)).abs()


# ---------------------------------------------------------------------- products and norms


def assert_product(y_fp32: Tensor, y_bf16: Tensor, golden: dict[str, Tensor]) -> None:
    row_max = golden["y_fp32"].abs().amax(-1, keepdim=True)
    assert ((y_fp32 - golden["y_fp32"]).abs() <= 1e-5 * row_max).all()
    distance = ulps(y_bf16, golden["y_bf16"])
    assert distance.max() <= 1
    assert (distance > 0).float().mean() <= 0.05


@pytest.mark.parametrize("case", ["fp8.a", "fp8.b", "fp8.c"])
def test_fp8_linear(case: str) -> None:
    """A scale tile laid across the wrong axis, or the ragged last tile of `b` dropped."""
    golden = units("gemm", case)
    weight, scale = golden["w"], golden["w_scale"].view(torch.uint8)
    y_fp32 = linear_fp8(golden["x"].float(), weight, scale, True, False, CPU)
    assert_product(y_fp32, linear_fp8(golden["x"], weight, scale, True, False, CPU), golden)


@pytest.mark.parametrize("case", ["fp4.a", "fp4.b", "fp4.c"])
def test_fp4_product(case: str) -> None:
    """Nibbles in the wrong order, or the activation quantised to another format than fp8."""
    golden = units("gemm", case)
    weight = records.dequantise_fp4_weight(golden["w"], golden["w_scale"])
    y = exact_matmul(records.round_trip(golden["x"], "fp8_32"), weight)
    assert_product(y, y.bfloat16(), golden)


def test_rms_norm() -> None:
    """An eps other than 1e-20 shows in the tiny rows; a zero row stays zero."""
    golden = units("rmsnorm")
    assert torch.equal(rms_norm(golden["x"], golden["weight"], EPS), golden["y"])
    assert (golden["x"] == 0).all(-1).any()


# ---------------------------------------------------------------------- residual copies


def test_hyper_split() -> None:
    """Sinkhorn sweeps that start with the wrong axis, or miss an eps."""
    golden = units("hc_split_sinkhorn")
    made = split_mixes(golden["mixes"], golden["base"], golden["scale"], 4, 20, 1e-6)
    for name, value in zip(("pre", "post", "comb"), made, strict=True):
        torch.testing.assert_close(value, golden[name], rtol=0, atol=1e-6)


def test_hyper_connection() -> None:
    """The whole sub-layer: a transposed comb or copies concatenated in another order."""
    golden = units("hyper_connection")
    streams = golden["stream"][0]
    pre, post, comb, side = hyper_coefficients(
        streams, golden["fn"], golden["base"], golden["scale"], TICKETS, 20, 1e-6, EPS, CPU
    )
    for name, value in (("pre", pre), ("post", post), ("comb", comb)):
        torch.testing.assert_close(value, golden[name][0], rtol=0, atol=1e-6)
    assert ulps(collapse(streams, pre), golden["collapsed"][0]).max() <= 1
    expanded, mix, sound = hyper_expand(golden["sub_out"][0], streams, post, comb, pre, side, CPU)
    assert torch.equal(mix, pre)
    assert sound.all()
    assert ulps(expanded, golden["expanded"][0]).max() <= 1
    transposed, *_ = hyper_expand(golden["sub_out"][0], streams, post, comb.mT.contiguous(), pre, side, CPU)
    assert rel(transposed, expanded) > 0.05, "the vectors do not tell comb from its transpose"


def test_hyper_norm() -> None:
    """A norm of the sum before it is rounded, and an update that collapses the old streams or does not round
    the new ones first."""
    golden = units("hyper_connection")
    streams, y = golden["stream"][0], golden["sub_out"][0]
    pre, post, comb = (golden[name][0] for name in ("pre", "post", "comb"))
    weight = torch.linspace(0.5, 1.5, y.shape[-1]).bfloat16()
    x = hyper_collapse(streams, pre, weight, EPS, CPU)
    assert torch.equal(x, rms_norm(collapse(streams, pre), weight, EPS))
    pre, side = pre.clone(), nothing_forked()
    pre[0, -1] = torch.nan
    updated, *handed, x = hyper_update(y, streams, post, comb, pre, side, weight, TICKETS, EPS, CPU)
    expanded, *same = hyper_expand(y, streams, post, comb, pre, side, CPU)
    assert torch.equal(updated, expanded)
    assert torch.equal(handed[0].view(torch.int32), pre.view(torch.int32))
    assert handed[1].tolist() == same[1].tolist() == [row != 0 for row in range(len(y))]
    assert torch.equal(x[1:], hyper_collapse(updated, pre, weight, EPS, CPU)[1:])


# ---------------------------------------------------------------------- rotation

FREQUENCIES = {
    "swa": ("full", "plain"),
    "compress": ("full", "yarn"),
    "tiny_swa": ("tiny", "plain"),
    "tiny_compress": ("tiny", "yarn"),
}


@pytest.mark.parametrize("case", FREQUENCIES)
def test_rotation(case: str) -> None:
    """Ramp ends, the compressed table's base, halves instead of adjacent pairs, the inverse's sign;
    beyond 65535, angles that are not the fp32 product."""
    golden, (model, table) = units("rope", case), FREQUENCIES[case]
    config = preset(model)
    plain = rope.plain_frequencies(config.rope_dim, config.rope_theta)
    frequencies = plain if table == "plain" else rope.yarn_frequencies(config)
    assert torch.equal(frequencies, golden["freqs"])

    made = rope.cos_sin(golden["positions"], frequencies)
    error = (made - torch.cat((golden["cos"], golden["sin"]), dim=1)).abs().amax(1)
    assert (error <= torch.where(golden["positions"] > 65535, 1e-5, 1e-6)).all()

    turns = rope.cos_sin(golden["x_positions"], frequencies)
    assert torch.equal(rotate(golden["x"][0], turns), golden["rotated"][0])
    assert torch.equal(rotate(golden["x"][0], turns, inverse=True), golden["unrotated"][0])


# ---------------------------------------------------------------------- attention

PAGE = 20


def attend(q: Tensor, kv: Tensor, listed: Tensor, sink: Tensor, window: int) -> Tensor:
    """The op on one golden batch entry: the first `window` listed keys in one cache, the others in a second
    whose pages stand in reverse order; what is not listed is NaN in both."""
    pages = kv.unflatten(0, (-1, PAGE))
    first, rest = listed[:, :window], listed[:, window:]
    reverse = torch.where(rest < 0, -1, (len(pages) - 1 - rest // PAGE) * PAGE + rest % PAGE).int()
    record = "rows_bf16" if q.dtype == torch.bfloat16 else "rows_fp32"

    def cache(rows: Tensor, slots: Tensor) -> Tensor:
        poisoned = torch.full_like(rows, torch.nan).flatten(0, 1)
        used = slots[slots >= 0].unique().long()
        poisoned[used] = rows.flatten(0, 1)[used]
        return poisoned.view_as(rows)

    window_cache, state_cache = cache(pages, first), cache(pages.flip(0), reverse)
    return sparse_attention(
        q, window_cache, first, record, PAGE, state_cache, reverse, record, PAGE, sink, 0, False, CPU
    )


@pytest.mark.parametrize(
    ("case", "window"), [("small", 24), ("small", 8), ("blocks", 128), ("blocks", 64), ("real", 128)]
)
def test_sparse_attention(case: str, window: int) -> None:
    """The sink scaled or given a value, slots of one cache looked up in the other, a page size ignored;
    in fp32, any approximation at all."""
    golden = units("sparse_attn", case)
    assert float(golden["scale"]) == pytest.approx(golden["q"].shape[-1] ** -0.5)
    for batch, (q, kv, listed) in enumerate(zip(golden["q"], golden["kv"], golden["idx"], strict=True)):
        o = attend(q, kv, listed, golden["sink"], window)
        assert rel(o, golden["o_bf16"][batch]) <= 4e-3
        exact = attend(q.float(), kv.float(), listed, golden["sink"], window)
        assert rel(exact, golden["o_fp32"][batch]) <= 1e-6
        assert (listed[0] < 0).all()
        assert (o[0] == 0).all(), "a row that sees nothing"


def test_attention_of_a_row_whose_first_block_is_empty() -> None:
    """64 empty slots come first: a running maximum of -inf would make NaN of exp(-inf + inf)."""
    golden = units("sparse_attn", "blocks")
    q, kv, listed = golden["q"][0, 2:3], golden["kv"][0], golden["idx"][0, 2:3]
    assert (listed[:, :64] < 0).all()
    assert (listed >= 0).any()
    moved = torch.cat((listed[:, 64:], listed[:, :64]), dim=1)
    o = attend(q, kv, listed, golden["sink"], 128)
    assert rel(o, golden["o_bf16"][0, 2:3]) <= 4e-3
    assert rel(o, attend(q, kv, moved, golden["sink"], 128)) <= 4e-3


def test_a_state_listed_twice_counts_twice() -> None:
    golden = units("sparse_attn", "small")
    q, kv, sink = golden["q"][0, :1], golden["kv"][0], golden["sink"]
    twice = attend(q, kv, golden["dup_idx"][0], sink, 4)
    assert rel(twice, golden["dup_o_bf16"][0]) <= 4e-3
    assert rel(attend(q, kv, golden["dup_idx"][0, :, 1:], sink, 3), twice) > 0.05


# ---------------------------------------------------------------------- mixture of experts


@pytest.mark.parametrize("case", ["release_like", "draft_like", "small"])
@pytest.mark.parametrize("kind", ["text", "vl"])
def test_route(case: str, kind: str) -> None:
    """The bias in the weights, the text bias on image rows; the zero row is decided by the bias alone."""
    golden = units("gate", case)
    x, top_k = golden["x"], golden["text_indices"].shape[1]
    image = golden["image_mask"] if kind == "vl" else torch.zeros(len(x), dtype=torch.bool)
    valid = torch.ones(len(x), dtype=torch.bool)
    ids, weights = route(
        x, golden["weight"], golden["bias"], golden["bias_vl"], image, valid, top_k, 1.5, CPU
    )
    assert torch.equal(ids.long(), golden[f"{kind}_indices"])
    torch.testing.assert_close(weights, golden[f"{kind}_weights"], rtol=0, atol=1e-6)


LIMIT = 2.0  # of the golden experts: low enough that most of their rows are clamped


def stored_experts(hidden: int, width: int, **golden: Tensor) -> list[Tensor]:
    """The weights of one routed and one shared expert, zero but for what is given."""
    stored = {
        "gate_up": torch.zeros(1, 2 * width, hidden // 2, dtype=torch.uint8),
        "gate_up_scale": torch.full((1, 2 * width, hidden // 32), 127, dtype=torch.uint8),
        "down": torch.zeros(1, hidden, width // 2, dtype=torch.uint8),
        "down_scale": torch.full((1, hidden, width // 32), 127, dtype=torch.uint8),
        "shared_gate_up": torch.zeros(2 * width, hidden).to(torch.float8_e4m3fn),
        "shared_gate_up_scale": torch.full((2 * width // 32, hidden // 32), 127, dtype=torch.uint8),
        "shared_down": torch.zeros(hidden, width).to(torch.float8_e4m3fn),
        "shared_down_scale": torch.full((hidden // 32, width // 32), 127, dtype=torch.uint8),
    }
    for name, value in golden.items():
        assert stored[name].numel() == value.numel()
        stored[name] = value.view(stored[name].dtype).view_as(stored[name])
    return list(stored.values())


@pytest.mark.parametrize("weighted", [False, True])
def test_routed_expert(weighted: bool) -> None:
    """w1 and w3 swapped, and the routing weight after w2 instead of before its quantisation (moves codes)."""
    golden = units("expert", "fp4")
    stored = stored_experts(
        64,
        96,
        gate_up=torch.cat((golden["w1"], golden["w3"])),
        gate_up_scale=torch.cat((golden["w1_scale"].view(torch.uint8), golden["w3_scale"].view(torch.uint8))),
        down=golden["w2"],
        down_scale=golden["w2_scale"],
    )
    weights = golden["route_weight"] if weighted else torch.ones(7, 1)
    chosen = torch.zeros(7, 1, dtype=torch.int32)
    y = whole_experts(golden["x"], chosen, weights, *stored, limit=LIMIT, impl=CPU)
    assert torch.equal(y, golden["y_weighted" if weighted else "y"])


def test_shared_expert() -> None:
    """Rows without a routed expert get the shared one alone."""
    golden = units("expert", "fp8")
    stored = stored_experts(
        64,
        96,
        shared_gate_up=torch.cat((golden["w1"].view(torch.uint8), golden["w3"].view(torch.uint8))),
        shared_gate_up_scale=torch.cat(
            (golden["w1_scale"].view(torch.uint8), golden["w3_scale"].view(torch.uint8))
        ),
        shared_down=golden["w2"],
        shared_down_scale=golden["w2_scale"],
    )
    nothing = torch.full((7, 1), -1, dtype=torch.int32)
    y = whole_experts(golden["x"], nothing, torch.zeros(7, 1), *stored, limit=LIMIT, impl=CPU)
    assert torch.equal(y, golden["y"])


# ---------------------------------------------------------------------- compression


def compress_tokens(
    kv_gate: Tensor, norm: Tensor, ratio: int, splits: list[int], open_groups: Tensor
) -> Tensor:
    """Two requests [2, S, ...], their tokens in steps of the given sizes -> latents [2, S // ratio, d]."""
    start, latents = 0, []
    for size in splits:
        position = torch.arange(start, start + size).repeat(2)
        request, row = torch.arange(2).repeat_interleave(size), torch.arange(2 * size)
        closes, first = position % 2 == 1, position == start
        last = position == start + size - 1
        latents.append(
            compress(
                kv_gate[:, start : start + size].flatten(0, 1),
                position,
                torch.where(closes & ~first, row - 1, -1),
                torch.where(closes & first, request, -1),
                torch.where(~closes & last, request, -1),
                norm,
                open_groups,
                ratio,
                EPS,
                torch.bfloat16,
                CPU,
            ).unflatten(0, (2, size))
        )
        start += size
    return torch.cat(latents, dim=1)[:, ratio - 1 :: ratio]


SPLITS = {"prefill11": [11], "prefill5_decode6": [5] + [1] * 6}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("ratio", [1, 2])
def test_compression(ratio: int, split: str) -> None:
    """The open group lost between steps or taken from the other request; the pooled value not rounded."""
    golden = units("compressor", f"r{ratio}")
    weight = golden["wkv"] if ratio == 1 else torch.cat((golden["wkv"], golden["wgate"]))
    kv_gate = linear(golden["x"].flatten(0, 1), weight, torch.float32, False, CPU).unflatten(0, (2, 11))
    open_groups = torch.full((2, 128) if ratio == 2 else (0, 0), torch.nan)
    latents = compress_tokens(kv_gate, golden["norm"], ratio, SPLITS[split], open_groups)
    assert torch.equal(latents, golden[f"latent_{split}"])


# ---------------------------------------------------------------------- candidates and windows


@pytest.mark.parametrize(
    ("call", "scores", "every_state_seen"),
    [(f"prefill{n}", "prefill.logits", False) for n in range(5)]
    + [(f"decode{n}", "decode.logits", True) for n in range(2)],
)
def test_candidate_blocks(call: str, scores: str, every_state_seen: bool) -> None:
    """The newest block not kept, a ragged last block, more blocks asked for than there are."""
    golden = units("select_candidate_blocks")
    num_blocks, block_states = golden[f"{call}.topk_blocks_block_size"].tolist()
    rows, mask = golden[scores].flatten(0, 1), golden[f"{call}.mask"].flatten(0, 1)
    lens = torch.full((len(rows),), rows.shape[1]) if every_state_seen else golden["prefill.lens"].flatten()
    blocks = candidate_blocks(rows, lens.int(), num_blocks, block_states, CPU)
    block_of_state = torch.arange(rows.shape[1]) // block_states
    assert torch.equal((block_of_state[:, None] == blocks[:, None]).any(-1), mask)
    in_order = torch.where(blocks < 0, rows.shape[1], blocks)
    assert (in_order.diff(dim=1) >= 0).all(), "ascending, then -1"


@pytest.mark.parametrize("name", sorted(load_file(UNITS / "window_index.safetensors")))
def test_window_list(name: str) -> None:
    """A window one short, the wrong end first, or slots of another page than the position's."""
    call, window, number = name.split(".")
    window_tokens, golden = int(window[1:]), units("window_index")[name][0]
    config = preset("tiny").with_overrides([f"sliding_window={window_tokens}"])
    layout = build_layout(config, build_plan(config), select(detect("cpu"), config.numerics), page_tokens=4)
    start, count = (0, int(number[1:])) if call == "prefill" else (int(number[1:]), 1)
    pages = [7, 3, 9, 1, 5, 11, 2, 8, 4, 10, 6][: -(-(start + count) // 4)]
    tokens = [3] * (start + count)
    (step,) = one_request.steps(tokens, [count], config, layout, start=start, window_pages=pages)

    position_of = {4 * page + i: 4 * n + i for n, page in enumerate(pages) for i in range(4)}
    slots = step.attention.window_read.tolist()
    listed = [[position_of[slot] for slot in row if slot >= 0] for row in slots]
    assert step.attention.window_read.shape == (count, window_tokens)
    if call == "decode":  # the release lists ring slots, right-aligned
        listed = [[position % window_tokens for position in row] for row in listed]
    assert listed == [[entry for entry in row if entry >= 0] for row in golden.tolist()]


# ---------------------------------------------------------------------- without golden data


@pytest.mark.parametrize("top_k", [3, 6])
def test_router_at_extreme_logits(top_k: int) -> None:
    """softplus as log(1 + e^x) gives 0 at -16.7 and infinity at 100; either shows in the weights."""
    logits = torch.tensor([-100.0, -20.0, -16.7, 0.0, 80.0, 100.0])
    favoured = torch.arange(6) < top_k  # the bias picks the smallest logits first
    ids, weights = route(
        torch.ones(1, 1), logits.unsqueeze(1), favoured * 1e3, torch.zeros(6), *flags(1), top_k, 1.5, CPU
    )
    assert sorted(ids[0].tolist()) == list(range(top_k))
    score = F.softplus(logits.double()[ids[0].long()]).sqrt()
    torch.testing.assert_close(
        weights[0].double(), 1.5 * score / (score.sum() + 1e-20), rtol=2e-6, atol=1e-19
    )
    assert float(weights.sum()) == pytest.approx(1.5, rel=1e-6)


def flags(rows: int) -> tuple[Tensor, Tensor]:
    """No row is an image, all are valid."""
    return torch.zeros(rows, dtype=torch.bool), torch.ones(rows, dtype=torch.bool)


def test_clamp_is_one_sided_on_the_gate_branch() -> None:
    """silu(-10) instead of silu(-50) is 5e-4 out; an up branch clamped from above only is 5 times out."""
    gate_up = torch.tensor([(g, u) for g in (-50.0, -3.0, 3.0, 50.0) for u in (-50.0, 4.0, 50.0)])
    y = _gated(gate_up, None, 10.0)
    expected = [F.silu(gate.clamp(max=10)) * up.clamp(-10, 10) for gate, up in gate_up]
    torch.testing.assert_close(y[:, 0], torch.stack(expected), rtol=1e-6, atol=1e-12)


def test_padding_rows_choose_nothing() -> None:
    """A padding row with a real id would load an expert for nothing; with weight it would change the sum."""
    x, (image, valid) = torch.randn(4, 8), flags(4)
    valid[1] = valid[3] = False
    ids, weights = route(x, torch.randn(6, 8), torch.zeros(6), torch.zeros(6), image, valid, 2, 1.5, CPU)
    assert (ids[~valid] == -1).all()
    assert (weights[~valid] == 0).all()
    assert (ids[valid] >= 0).all()


def random_experts(num: int) -> list[Tensor]:
    """Stored weights of `num` routed experts and a shared one, 64 wide, 32 inside."""
    generator = torch.Generator().manual_seed(0)

    def bytes_(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    def scales(*shape: int) -> Tensor:
        return torch.randint(123, 127, shape, generator=generator, dtype=torch.uint8)

    def fp8(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)

    routed = [bytes_(num, 64, 32), scales(num, 64, 2), bytes_(num, 64, 16), scales(num, 64, 1)]
    return [*routed, fp8(64, 64), scales(2, 2), fp8(64, 32), scales(2, 1)]


def test_experts_without_rows_are_not_touched() -> None:
    """Experts 0 and 2 hold NaN scales: one use of them, by a padding row or an empty group, spreads."""
    x, stored = torch.randn(5, 64).bfloat16(), random_experts(3)
    stored[1][[0, 2]] = stored[3][[0, 2]] = 255
    ids = torch.tensor([[1], [1], [-1], [1], [-1]], dtype=torch.int32)
    weights = torch.tensor([[0.5], [1.0], [0.0], [1.5], [0.0]])
    y = whole_experts(x, ids, weights, *stored, limit=2.0, impl=CPU)
    assert y.isfinite().all()
    alone = whole_experts(x[2:3], ids[2:3], weights[2:3], *stored, limit=2.0, impl=CPU)
    assert torch.equal(y[2:3], alone)
    assert not torch.equal(
        y[0:1], whole_experts(x[0:1], ids[2:3], weights[2:3], *stored, limit=2.0, impl=CPU)
    )


def test_one_expert_with_all_rows() -> None:
    """A row's bits do not depend on how many rows share its expert."""
    x, stored = torch.randn(33, 64).bfloat16(), random_experts(3)
    ids, weights = torch.full((33, 1), 1, dtype=torch.int32), torch.rand(33, 1)
    together = whole_experts(x, ids, weights, *stored, limit=2.0, impl=CPU)
    alone = [
        whole_experts(x[i : i + 1], ids[:1], weights[i : i + 1], *stored, limit=2.0, impl=CPU)
        for i in range(len(x))
    ]
    assert torch.equal(together, torch.cat(alone))
