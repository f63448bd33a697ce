"""The adapter of FlashMLA: what it hands to the package, against a double that asserts as the kernels do.

The double has the signatures of sgl-flash-mla 1.0.0 and refuses what the wheel's own checks refuse (its
assertion strings), and what the Hopper kernels take for granted: they check no bound of an index, and read
indices in pairs. It computes from the bytes behind the views by its own formula. On an SM90 GPU with the
wheel the same op runs against the reference.

Tolerance. As for our own kernel (test_attention_kernel.py): equal rounding points, sums in another order.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from vendors import NoHostReads, assert_rows, lists, mixed_state, powers, require, slow_attention

from dsv41.backends import PRESETS
from dsv41.config import ModelConfig
from dsv41.hardware import Hardware, detect
from dsv41.model.layout import build_layout
from dsv41.model.plan import build_plan
from dsv41.ops import records
from dsv41.ops.attention import flashmla, reference
from dsv41.presets import preset

HOPPER, CPU = Hardware("cuda", 90, "H200", 1 << 37), Hardware("cpu", 0, "CPU", 0)
BLACKWELL = Hardware("cuda", 100, "B200", 1 << 37)
DIM, ROPE, RECORD = 512, 64, "mixed_584"
UNIT = {"mixed_584": 576, "scaled_528": 528, "nvfp4_288": 288}
TOLERANCE = 4e-3


# --- The double -----------------------------------------------------------------------------------


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def slow_record(pages: Tensor, index: int) -> Tensor:
    """fp64 [512] of one state from the view [P, S, 1, bytes of a state], whose last size names the record."""
    if pages.shape[3] == 584:
        return mixed_state(pages, index)
    page, offset = divmod(index, pages.shape[1])
    whole = torch.empty(0, dtype=torch.uint8).set_(pages.untyped_storage())
    whole = whole[pages.storage_offset() + page * pages.stride(0) :]
    state = whole[offset * pages.shape[3] :][: pages.shape[3]]
    if pages.shape[3] == 528:
        return state[:512].view(torch.float8_e4m3fn).double() * powers(state[512:]).repeat_interleave(32)
    codes = torch.stack((state[:256] % 16, state[:256] // 16), dim=1).flatten().long()
    values = torch.where(codes >= 8, -E2M1[codes % 8], E2M1[codes % 8])
    return values * state[256:].view(torch.float8_e4m3fn).double().repeat_interleave(16)


class Double(ModuleType):
    """flash_mla as the adapter sees it. `blind` reads no values, as in a capture."""

    def __init__(self, blind: bool = False) -> None:
        super().__init__("flash_mla")
        self.blind, self.calls = blind, []

    def has_legacy(self) -> bool:
        return True

    def get_mla_metadata(self, *args, **kwargs):
        return SimpleNamespace(used=False), None

    def flash_mla_with_kvcache(
        self,
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
        is_fp8_kvcache=None,
        indices=None,
        attn_sink=None,
        extra_k_cache=None,
        extra_indices_in_kvcache=None,
        topk_length=None,
        extra_topk_length=None,
        enable_batch_invariant=False,
        use_legacy=False,
        kv_format=None,
        descale_q=None,
        descale_k=None,
    ):
        require(block_table is None and cache_seqlens is None and num_splits is None, "ignored arguments")
        require(not causal and is_fp8_kvcache and descale_q is None and descale_k is None, "sparse fp8 only")
        if use_legacy:
            require(not enable_batch_invariant, "the legacy kernels have no batch-invariant mode")
            require(kv_format in (None, "V4"), "584 bytes a token are V4")
        else:
            require(kv_format is None, "kv_format only applies to the legacy kernels")
        require(not tile_scheduler_metadata.used, "a schedule of another call")
        tile_scheduler_metadata.used = True
        require(q.ndim == 4, "q must have 4 dimensions")
        require(q.stride(0) % q.stride(1) == 0, "params.stride_q_b % params.stride_q_s_q == 0")
        self.check_queries(q, head_dim_v, attn_sink, q.shape[0])
        require((extra_k_cache is None) == (extra_indices_in_kvcache is None), "extra cache without indices")
        require(topk_length is None and extra_topk_length is None, "no lengths are passed")
        pairs = [(k_cache, indices)]
        if extra_k_cache is not None:
            pairs.append((extra_k_cache, extra_indices_in_kvcache))
        for cache, listed in pairs:
            self.check_pages(cache, use_legacy, cache is extra_k_cache)
            self.check_list(listed, q.shape[:2], 64, cache.shape[0] * cache.shape[1])
        self.calls.append(("unsplit" if enable_batch_invariant else "decode", q.shape[0]))
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        for row in range(0 if self.blind else q.shape[0]):
            keys = [
                slow_record(cache, int(index))
                for cache, listed in pairs
                for index in listed[row, 0]
                if index != -1
            ]
            out[row, 0] = slow_attention(q[row, 0], keys, attn_sink, softmax_scale)
        return out, torch.zeros((q.shape[0], q.shape[2], 1))

    def flash_mla_sparse_fwd(
        self,
        q,
        kv,
        indices,
        sm_scale,
        d_v=512,
        attn_sink=None,
        topk_length=None,
        use_legacy=False,
        return_log2_lse=None,
    ):
        require(use_legacy, "the current kernels have no SM90")
        require(topk_length is None, "no lengths are passed")
        require(q.ndim == 3, "q must have 3 dimensions")
        self.check_queries(q, d_v, attn_sink, q.shape[0])
        require(kv.ndim == 3 and kv.shape[1:] == (1, DIM), "kv must have shape (s_kv, h_kv, d_qk)")
        require(kv.dtype == torch.bfloat16 and kv.stride(2) == 1, "kv must be contiguous bf16")
        self.check_list(indices, (q.shape[0], 1), 128, kv.shape[0])
        self.calls.append(("prefill", q.shape[0]))
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        for row in range(0 if self.blind else q.shape[0]):
            keys = [kv[index, 0].double() for index in indices[row, 0] if index >= 0]
            out[row] = slow_attention(q[row], keys, attn_sink, sm_scale)
        return [out, None, None] if return_log2_lse is False else [out, out[..., 0], out[..., 0]]

    def check_queries(self, q, head_dim_v, sink, rows) -> None:
        require(rows > 0, "batch size must be positive")
        require(q.dtype == torch.bfloat16, "q must have dtype ScalarType::BFloat16")
        require(q.shape[-2] in (64, 128), f"Unsupported h_q: {q.shape[-2]}")
        require(q.shape[-1] == 512 and head_dim_v == 512, "Only head_size 512 is supported")
        require(q.stride(-1) == 1, "q must have contiguous last dimension")
        require(all(stride % 8 == 0 for stride in q.stride()[:-1]), "TMA strides are multiples of 16 bytes")
        require(q.data_ptr() % 16 == 0, "TMA addresses are multiples of 16 bytes")
        require(sink.dtype == torch.float32 and sink.is_contiguous(), "attn_sink must be contiguous fp32")
        require(sink.shape == (q.shape[-2],), "attn_sink must have shape (h_q)")

    def check_pages(self, cache, legacy, extra) -> None:
        width = cache.shape[3]
        known = (584,) if legacy else (528, 288) if extra else (528,)
        require(cache.ndim == 4 and cache.shape[2] == 1 and width in known, "Unsupported bytes_per_token")
        unit = 576 if legacy else width
        require(cache.dtype == torch.uint8, "key must have dtype fp8_e4m3fn, int8 or uint8")
        require(cache.stride(1) == width and cache.stride(3) == 1, "The whole block must be contiguous")
        require(cache.stride(0) % unit == 0, "block_stride_bytes % F::TMA_K_STRIDE == 0")
        require(cache.shape[0] * (cache.stride(0) // unit) <= 2**31 - 1, "num_blocks <= INT32_MAX")
        require(cache.data_ptr() % 16 == 0, "(int64_t)kv % 16 == 0")
        room = cache.untyped_storage().nbytes() - cache.storage_offset()
        require((cache.shape[0] - 1) * cache.stride(0) + cache.shape[1] * width <= room, "beyond the cache")

    def check_list(self, listed, rows, tile, num_slots) -> None:
        require(listed.dtype == torch.int32, "indices must have dtype ScalarType::Int")
        require(
            listed.ndim == 3 and listed.shape[:2] == tuple(rows), "indices must have shape (b, s_q, topk)"
        )
        require(listed.shape[2] > 0 and listed.shape[2] % tile == 0, f"params.topk % {tile} == 0")
        require(listed.stride(2) == 1, "indices must have contiguous last dimension")
        require(listed.stride(0) % 2 == 0 and listed.data_ptr() % 8 == 0, "indices are read in pairs")
        if not self.blind:
            require(bool(((listed == -1) | (listed >= 0)).all()), "only -1 is skipped")
            require(bool((listed < num_slots).all()), "no bound is checked: an address outside the cache")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    stand_in = Double()
    monkeypatch.setitem(sys.modules, "flash_mla", stand_in)
    return stand_in


# --- Samples --------------------------------------------------------------------------------------


def poisoned(
    num_pages: int, page: int, seed: int, device: str = "cpu", record: str = RECORD, padding: int = 0
) -> tuple[Tensor, Tensor]:
    """-> (cache, slots with a state). All other bytes are 0xff, a NaN in every part of a record."""
    unit = UNIT[record]
    stride = (-(-records.page_bytes(record, page, DIM, ROPE) // unit) + padding) * unit
    cache = torch.full((num_pages, stride), 255, dtype=torch.uint8, device=device)
    draw = torch.Generator().manual_seed(seed)
    slots = torch.randperm((num_pages - 1) * page, generator=draw)[: num_pages * page // 2] + page
    scale = torch.exp2(torch.randint(-6, 4, (len(slots), 1), generator=draw).float())
    x = (torch.randn((len(slots), DIM), generator=draw) * scale).to(device)
    records.write_slots(record, cache, slots.to(device), x, page, ROPE)
    return cache, slots


def arguments(
    rows: int,
    heads: int = 64,
    width: int = 128,
    selected: int = 64,
    *,
    deterministic: bool = False,
    pages: tuple[int, int] = (32, 16),
    device: str = "cpu",
    seed: int = 0,
    pair: tuple[str, str] = (RECORD, RECORD),
) -> list:
    draw = torch.Generator().manual_seed(seed + 7)
    window, window_slots = poisoned(7, pages[0], seed, device, pair[0])
    states, state_slots = poisoned(9, pages[1], seed + 1, device, pair[1], padding=1)
    return [
        torch.randn((rows, heads, DIM), generator=draw).to(torch.bfloat16).to(device),
        window, lists(window_slots, rows, width, seed).to(device), pair[0], pages[0],
        states, lists(state_slots, rows, selected, seed + 2).to(device), pair[1], pages[1],
        torch.randn(heads, generator=draw).to(device), ROPE, deterministic,
    ]  # fmt: skip


def check(args: list) -> Tensor:
    """The adapter first, then the reference: each row within tolerance, empty rows exactly zero."""
    got = flashmla.sparse_attention(*args)
    expected = reference.sparse_attention(*args).double()
    assert_rows(got, expected, args, TOLERANCE)
    return got


# --- The arguments and the result -----------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("heads", "width", "selected"),
    [(64, 128, 64), (24, 128, 64), (100, 64, 64), (64, 128, 0), (64, 0, 70), (8, 5, 3)],
)
def test_against_the_reference(double, deterministic, heads, width, selected) -> None:
    check(arguments(6, heads, width, selected, deterministic=deterministic))
    assert [kind for kind, _ in double.calls] == ["prefill" if deterministic else "decode"]


@pytest.mark.parametrize("deterministic", [False, True], ids=["decode", "unsplit"])
@pytest.mark.parametrize("state_record", ["scaled_528", "nvfp4_288"])
@pytest.mark.parametrize(("heads", "selected"), [(64, 64), (24, 70), (64, 0)])
def test_records_of_sm100(double, deterministic, state_record, heads, selected) -> None:
    """The current kernels: no legacy flag, fp4 states beside an fp8 window, an unsplit decode on request."""
    double.has_legacy = None
    pair = ("scaled_528", state_record)
    check(arguments(6, heads, 128, selected, deterministic=deterministic, pair=pair))
    assert double.calls == [("unsplit" if deterministic else "decode", 6)]


@pytest.mark.parametrize("deterministic", [False, True], ids=["decode", "prefill"])
def test_views(double, deterministic) -> None:
    """Queries are every second head of a wider row, lists and sinks are slices, pages lie in a wider pool."""
    args = arguments(3, 32, deterministic=deterministic)
    wide = torch.full((3, 65, DIM + 1), torch.nan, dtype=torch.bfloat16)
    wide[:, 1:65:2, 1:] = args[0]
    args[0] = wide[:, 1:65:2, 1:]
    for position in (2, 6):
        room = torch.full((3, args[position].shape[1] + 3), 7, dtype=torch.int32)
        room[:, 1:-2] = args[position]
        args[position] = room[:, 1:-2]
    args[9] = args[9].repeat_interleave(2)[::2]
    pool = torch.full((args[1].shape[0], args[1].shape[1] + 2 * 576), 255, dtype=torch.uint8)
    pool[:, 576:-576] = args[1]
    args[1] = pool[:, 576:-576]
    check(args)


@pytest.mark.parametrize("deterministic", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("shape", ["wider rows", "odd rows", "every second channel", "channels first"])
def test_queries_in_any_place(double, deterministic, shape) -> None:
    """TMA wants channels in a row, and rows and heads 16 bytes * n apart; anything else is copied first."""
    args = arguments(3, deterministic=deterministic)
    room = {
        "wider rows": lambda: torch.empty((3, 80, DIM), dtype=torch.bfloat16)[:, 8:72],
        "odd rows": lambda: torch.empty((3, 64 * DIM + 4), dtype=torch.bfloat16)[:, :-4].view(3, 64, DIM),
        "every second channel": lambda: torch.empty((3, 64, 2 * DIM), dtype=torch.bfloat16)[..., ::2],
        "channels first": lambda: torch.empty((3, DIM, 64), dtype=torch.bfloat16).mT,
    }[shape]()
    assert not room.is_contiguous()
    args[0] = room.copy_(args[0])
    check(args)


@pytest.mark.parametrize("heads", [64, 128])
def test_heads_of_padding_stay_apart(double, heads) -> None:
    """Publishing pads the queries; what stands in those heads is read by nobody."""
    args = arguments(3, heads)
    args[0][:, 24:] = torch.nan
    args[9] = args[9][:24].contiguous()
    got = flashmla.sparse_attention(*args)
    args[0] = args[0][:, :24]
    assert torch.equal(got, flashmla.sparse_attention(*args))


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_to_do_calls_nothing(double, deterministic) -> None:
    assert flashmla.sparse_attention(*arguments(0, deterministic=deterministic)).shape == (0, 64, DIM)
    empty = flashmla.sparse_attention(*arguments(3, 64, 0, 0, deterministic=deterministic))
    assert empty.shape == (3, 64, DIM)
    assert (empty == 0).all()
    assert double.calls == []


def test_decode_calls_are_bounded_and_plan_anew(double, monkeypatch) -> None:
    """A call allocates fp32 outputs by its rows, and a schedule serves the shapes it was made for."""
    args = arguments(7)
    whole = flashmla.sparse_attention(*args)
    monkeypatch.setattr(flashmla, "DECODE_ROWS", 3)
    assert torch.equal(flashmla.sparse_attention(*args), whole)
    assert double.calls[1:] == [("decode", 3), ("decode", 3), ("decode", 1)]


# --- The gathered workspace -----------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "step"), [(1, 1), (7, 3), (6, 3), (3, 8), (1000, 1)])
def test_chunks_cover_every_row_once(rows: int, step: int) -> None:
    parts = flashmla.chunks(rows, step)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
    assert all(part.stop - part.start <= step for part in parts)


@pytest.mark.parametrize("num_slots", [1, 128, 640, 1 << 20])
def test_the_workspace_is_bounded(num_slots: int) -> None:
    rows = flashmla.gathered_rows(num_slots)
    assert rows >= 1
    assert rows == 1 or rows * num_slots * DIM * 2 <= flashmla.WORKSPACE_BYTES
    assert (rows + 1) * num_slots * DIM * 2 > flashmla.WORKSPACE_BYTES


def test_gather_against_the_records() -> None:
    """Every listed place of the combined list points at its own state, and at nothing else."""
    args = arguments(5, width=130, selected=70)
    pairs = [(args[1], args[2], RECORD, args[4]), (args[5], args[6], RECORD, args[8])]
    keys, listed = flashmla.gather(pairs, slice(1, 4))
    assert keys.shape == (3 * 200, 1, DIM)
    assert listed.shape == (3, 1, 256)
    for row in range(3):
        combined = [(args[1], args[4], int(slot)) for slot in args[2][row + 1]]
        combined += [(args[5], args[8], int(slot)) for slot in args[6][row + 1]]
        assert (listed[row, 0, len(combined) :] == -1).all()
        for place, (cache, page, slot) in enumerate(combined):
            index = int(listed[row, 0, place])
            if slot < 0:
                assert index == -1
                continue
            assert index == row * 200 + place
            expected = slow_record(flashmla.page_view(cache, RECORD, page), slot)
            assert torch.equal(keys[index, 0].double(), expected)


def test_prefill_rows_do_not_see_their_company(double, monkeypatch) -> None:
    args = arguments(9, deterministic=True)
    whole = flashmla.sparse_attention(*args)
    alone = [arg[4:5] if position in (0, 2, 6) else arg for position, arg in enumerate(args)]
    assert torch.equal(flashmla.sparse_attention(*alone), whole[4:5])
    monkeypatch.setattr(flashmla, "WORKSPACE_BYTES", 2 * 192 * DIM * 2)
    double.calls.clear()
    assert torch.equal(flashmla.sparse_attention(*args), whole)
    assert double.calls == [("prefill", 2)] * 4 + [("prefill", 1)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_is_read_on_the_host(double, deterministic) -> None:
    args = arguments(4, 24, deterministic=deterministic)
    double.blind = True
    with NoHostReads():
        flashmla.sparse_attention(*args)
    with NoHostReads(), pytest.raises(AssertionError, match="reads a value"):
        args[2].max().item()


# --- Bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [32, 64])
@pytest.mark.parametrize("record", UNIT)
def test_page_view_and_records_agree(record: str, page: int) -> None:
    """A state written by the records is where the kernel looks for it, to the byte."""
    cache, slots = poisoned(4, page, 3, record=record)
    view = flashmla.page_view(cache, record, page)
    stored = records.read_slots(record, cache, slots, page, DIM, ROPE, torch.bfloat16)
    for slot, value in zip(slots[:20], stored, strict=False):
        assert torch.equal(slow_record(view, int(slot)), value.double())
    assert flashmla.FORMATS[record].state_bytes == records.state_bytes(record, DIM, ROPE)


@pytest.mark.parametrize("name", ["kernel", "full"])
@pytest.mark.parametrize("backends", ["sm90-flashmla", "sm100", "sm100-mega"])
def test_pages_of_the_preset_fit(name: str, backends: str) -> None:
    """The layout's pages have the kernel's distance, for both ratios."""
    config: ModelConfig = preset(name)
    layout = build_layout(config, build_plan(config), PRESETS[backends], 64)
    for group in layout.window + layout.states:
        view = flashmla.page_view(
            torch.zeros((2, group.page_bytes), dtype=torch.uint8), group.record, group.num_states
        )
        assert view.shape[:3] == (2, group.num_states, 1)


# --- What is refused ------------------------------------------------------------------------------


def changed(position: int, value: object) -> list:
    args = arguments(2)
    args[position] = value
    return args


REFUSED = {
    "fp32 queries": (lambda: changed(0, torch.zeros(2, 64, DIM)), "takes bf16 queries, not torch.float32"),
    "narrow heads": (lambda: changed(0, torch.zeros(2, 64, 64, dtype=torch.bfloat16)), "512 channels"),
    "another rope": (lambda: changed(10, 32), "64 of them rotated, not 512 and 32"),
    "another record": (lambda: changed(7, "rows_bf16"), "reads mixed_584, scaled_528, .*, not rows_bf16"),
    "records of two GPUs": (
        lambda: arguments(2, pair=("mixed_584", "scaled_528")),
        "does not read mixed_584 and scaled_528 in one call",
    ),
    "fp4 alone": (
        lambda: arguments(2, width=0, pair=("scaled_528", "nvfp4_288")),
        "does not read nvfp4_288 in one call",
    ),
    "page distance": (
        lambda: changed(1, torch.zeros((7, 33 * 576 + 64), dtype=torch.uint8)),
        "not 19072 bytes apart",
    ),
    "heads": (lambda: arguments(2, 130), "at most 128 heads a rank, not 130"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(double, name: str) -> None:
    make, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        flashmla.sparse_attention(*make())
    assert double.calls == []


def test_why_not(double, monkeypatch) -> None:
    assert flashmla.why_not(HOPPER, None) is None
    assert flashmla.why_not(HOPPER, RECORD) is None
    assert flashmla.why_not(BLACKWELL, "scaled_528") is None
    assert flashmla.why_not(HOPPER, "scaled_528") == "FlashMLA reads mixed_584 on H200, not scaled_528"
    reads = "FlashMLA reads scaled_528 and nvfp4_288 on B200, not mixed_584"
    assert flashmla.why_not(BLACKWELL, "mixed_584") == reads
    for hardware in (CPU, Hardware("cuda", 80, "A100", 0), Hardware("cuda", 120, "B6000", 0)):
        assert f"SM90 and SM100, this is {hardware.name}" in flashmla.why_not(hardware, RECORD)
    double.has_legacy = lambda: False
    assert flashmla.why_not(BLACKWELL, None) is None
    assert "leaves the Hopper kernels out" in flashmla.why_not(HOPPER, None)
    monkeypatch.setitem(sys.modules, "flash_mla", ModuleType("flash_mla"))
    assert "has no get_mla_metadata, so it is not sgl-flash-mla 1.0" in flashmla.why_not(HOPPER, None)
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    assert "needs the package 'flash_mla' (pip install" in flashmla.why_not(HOPPER, None)

    def broken() -> ModuleType:
        raise OSError("libtorch_cuda.so is not there\nand more lines")

    monkeypatch.setattr(flashmla, "_package", broken)
    assert flashmla.why_not(HOPPER, None).endswith("does not load here: libtorch_cuda.so is not there")


# --- The double itself ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda call: call.update(q=call["q"][:, :, :24]), "Unsupported h_q: 24"),
        (lambda call: call.update(indices=call["indices"][..., :60]), "params.topk % 64 == 0"),
        (lambda call: call["indices"].fill_(10**6), "outside the cache"),
        (lambda call: call["indices"].fill_(-2), "only -1 is skipped"),
        (lambda call: call.update(indices=call["indices"].long()), "dtype"),
        (lambda call: call.update(k_cache=call["k_cache"][..., :576]), "bytes_per_token"),
        (lambda call: call.update(attn_sink=call["attn_sink"].double()), "fp32"),
        (lambda call: call.update(extra_k_cache=None), "extra cache"),
        (lambda call: call.update(use_legacy=False), "kv_format only applies"),
        (lambda call: call.update(use_legacy=False, kv_format=None), "bytes_per_token"),
        (lambda call: call.update(enable_batch_invariant=True), "no batch-invariant mode"),
        (lambda call: setattr(call["tile_scheduler_metadata"], "used", True), "another call"),
    ],
)
def test_the_double_refuses(double, monkeypatch, break_it, sentence) -> None:
    """Negative control: every one of these would reach the kernel's assertions or its memory."""
    honest = double.flash_mla_with_kvcache

    def tampered(**call):
        break_it(call)
        return honest(**call)

    monkeypatch.setattr(double, "flash_mla_with_kvcache", tampered)
    with pytest.raises(RuntimeError, match=sentence):
        flashmla.sparse_attention(*arguments(2))


def test_another_state_is_seen(double) -> None:
    """Negative control of the comparison: the kernel is told of one state, the reference of another."""
    args = arguments(1, 64, 0, 1, seed=3)
    got = flashmla.sparse_attention(*args)
    slots = poisoned(9, 16, 4)[1]
    args[6] = slots[slots != args[6].item()][:1].to(torch.int32)[None]
    other = reference.sparse_attention(*args)
    assert (got.double() - other.double()).norm() > 100 * TOLERANCE * other.double().norm()


# --- On the GPU -----------------------------------------------------------------------------------


def gpu_reason() -> str | None:
    if not torch.cuda.is_available():
        return "needs one SM90 GPU"
    return flashmla.why_not(detect("cuda"), RECORD)


REASON = gpu_reason()


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(REASON is not None, reason=REASON or "")(test))


@on_gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 17, 64, 127, 128, 129, 1000, 1100])
def test_rows(rows: int, deterministic: bool) -> None:
    check(arguments(rows, 64, 128, 512, device="cuda", deterministic=deterministic, pages=(64, 32)))


@on_gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("heads", "width", "selected"), [(8, 128, 512), (100, 128, 64), (64, 128, 0), (64, 0, 70)]
)
def test_shapes(heads: int, width: int, selected: int, deterministic: bool) -> None:
    check(arguments(20, heads, width, selected, device="cuda", deterministic=deterministic))


@on_gpu
def test_a_row_alone_and_in_company() -> None:
    args = arguments(128, 64, 128, 512, device="cuda", deterministic=True)
    together = flashmla.sparse_attention(*args)
    for row in (0, 3, 127):
        alone = [arg[row : row + 1] if place in (0, 2, 6) else arg for place, arg in enumerate(args)]
        assert torch.equal(flashmla.sparse_attention(*alone), together[row : row + 1])


@on_gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["decode", "prefill"])
def test_a_captured_call_reads_lists_and_queries_anew(deterministic: bool) -> None:
    args, other = (
        arguments(5, 64, 128, 512, device="cuda", deterministic=deterministic, seed=seed) for seed in (0, 4)
    )
    flashmla.sparse_attention(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashmla.sparse_attention(*args)
    for position in (0, 1, 2, 5, 6, 9):
        args[position].copy_(other[position])
    graph.replay()
    assert torch.equal(out, flashmla.sparse_attention(*other))
