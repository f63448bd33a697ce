"""The adapter of FlashInfer: what it hands to the package, against a double that asserts as the package does.

The double has the signature of `trtllm_batch_decode_sparse_mla_dsv4` of flashinfer-python 0.7.4. It refuses
what that function, its bindings and its launcher refuse, and makes the worst of what they leave open: an
address outside the cache, a hole before the end of a selection, a row without entries. It computes in fp64
from the bytes behind the views that it gets, by its own formula.

Tolerance. The double's products are exact and its output is rounded once; the reference rounds P to bf16, as
for the other kernels (test_attention_kernel.py). What the real kernels round besides is in the adapter's
docstring and cannot be seen here.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from vendors import NoHostReads, assert_rows, lists, mixed_state, require, slow_attention

from dsv41.backends import PRESETS, choose
from dsv41.config import ModelConfig, Numerics
from dsv41.hardware import Hardware
from dsv41.model.layout import build_layout
from dsv41.model.plan import build_plan
from dsv41.ops import records
from dsv41.ops.attention import flashinfer, reference
from dsv41.presets import preset

SM100, SM120 = Hardware("cuda", 100, "B200", 1 << 37), Hardware("cuda", 120, "B6000", 1 << 37)
CPU = Hardware("cpu", 0, "CPU", 0)
DIM, ROPE = 512, 64
PACKED, BF16, FP8 = "mixed_584", "rows_bf16", "rows_fp8"
EVERY = [PACKED, BF16, FP8]
DTYPES = {PACKED: torch.uint8, BF16: torch.bfloat16, FP8: torch.float8_e4m3fn}
TOLERANCE = 4e-3


# --- The double -----------------------------------------------------------------------------------


def plain_row(view: Tensor, index: int) -> Tensor:
    """fp64 [512] of one row, counted from the start of the pool in units of a row, gaps included."""
    whole = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    return whole[view.storage_offset() + index * DIM :][:DIM].double()


class Mla(ModuleType):
    """flashinfer.mla as the adapter sees it. `blind` reads no values, as in a capture."""

    def __init__(self) -> None:
        super().__init__("flashinfer.mla")
        self.blind, self.calls = False, []
        self.config = SimpleNamespace(bytes_per_token=584, page_block_size_is_runtime=True)

    def supported_sparse_mla_sm120_configs(self, *, kv_cache_format="fp8"):
        return {} if self.config is None else {"dsv4": self.config}

    def trtllm_batch_decode_sparse_mla_dsv4(
        self,
        query,
        swa_kv_cache,
        workspace_buffer,
        sparse_indices=None,
        compressed_kv_cache=None,
        sparse_topk_lens=None,
        seq_lens=None,
        out=None,
        bmm1_scale=1.0,
        bmm2_scale=1.0,
        sinks=None,
        kv_layout="HND",
        cum_seq_lens_q=None,
        max_q_len=None,
        enable_pdl=None,
        swa_topk_lens=None,
        extra_sparse_indices=None,
        extra_sparse_topk_lens=None,
        backend="auto",
        remapped_sparse_indices_buffer=None,
        sparse_indices_are_storage_offsets=None,
        sparse_topk_lens_offset=0,
        multi_ctas_kv_counter_buffer=None,
        *,
        kv_cache_format="fp8",
    ):
        require(out is None and cum_seq_lens_q is None and enable_pdl is None, "left to FlashInfer")
        require(remapped_sparse_indices_buffer is None and max_q_len is None, "left to FlashInfer")
        require(multi_ctas_kv_counter_buffer is None, "left to FlashInfer")
        require(workspace_buffer.is_contiguous() and workspace_buffer.numel() >= 128 << 20, "workspace")
        require(isinstance(bmm1_scale, float) and bmm2_scale == 1.0, "scales are floats")
        require(query.shape[-2] in (8, 16, 32, 64, 128), f"unsupported heads: {query.shape[-2]}")
        require(query.shape[-1] == DIM and query.is_contiguous(), "q must be contiguous, 512 wide")
        require(query.data_ptr() % 16 == 0 and query.shape[0] > 0, "q must be 16B-aligned, with rows")
        require(sinks.dtype == torch.float32 and sinks.is_contiguous(), "attn_sink is contiguous fp32")
        require(sinks.shape == (query.shape[-2],), "attn_sink has one value a head")
        if not self.blind:
            require(sinks.isfinite().all(), "only finite sinks are documented")
        if backend == "sparse":
            require(sparse_topk_lens is None and seq_lens is None, "lengths of the other backend")
            require(sparse_indices_are_storage_offsets is None, "sparse does not accept storage offsets")
            require(kv_layout == "NHD" and kv_cache_format == "fp8", "584 bytes a token are fp8")
            parts = [(swa_kv_cache, sparse_indices, swa_topk_lens)]
            none = [extra is None for extra in (extra_sparse_indices, extra_sparse_topk_lens)]
            require(none[0] == none[1] == (compressed_kv_cache is None), "the extra cache is incomplete")
            if not none[0]:
                parts.append((compressed_kv_cache, extra_sparse_indices, extra_sparse_topk_lens))
            return self.sparse(query, parts, sinks, bmm1_scale)
        require(backend == "trtllm-gen", f"unknown backend {backend}")
        require(swa_topk_lens is None and extra_sparse_indices is None, "SM120 only")
        require(extra_sparse_topk_lens is None and sparse_topk_lens_offset == 0, "SM120 and cake only")
        require(kv_layout == "HND" and sparse_indices_are_storage_offsets, "storage offsets in HND pools")
        pools = (swa_kv_cache, compressed_kv_cache)
        return self.generated(query, pools, sparse_indices, sparse_topk_lens, seq_lens, sinks, bmm1_scale)

    # SM120

    def sparse(self, query, parts, sinks, scale):
        require(query.ndim == 3 and query.dtype == torch.bfloat16, "SM120 only supports BF16 query")
        rows = query.shape[0]
        for cache, listed, lengths in parts:
            require(cache.ndim == 4 and cache.shape[2:] == (1, 584), "packed NHD cache of 584 bytes")
            require(cache.dtype == torch.uint8 and cache.stride(-1) == 1, "last dim must be contiguous")
            require(cache.data_ptr() % 16 == 0, "data pointer must be 16B-aligned")
            require(cache.stride(0) % 16 == 0, "block stride must be 16B-aligned")
            require(cache.stride(1) == 584, "footer-scale rows must stay tightly packed")
            require(cache.stride(0) >= cache.shape[1] * 584, "block stride is smaller than page capacity")
            room = cache.untyped_storage().nbytes() - cache.storage_offset()
            require((cache.shape[0] - 1) * cache.stride(0) + cache.shape[1] * 584 <= room, "beyond the cache")
            require(listed.dtype == torch.int32 and listed.ndim == 2, "indices must be int32 [T, K]")
            require(listed.shape[0] == rows and listed.shape[1] > 0, "indices shape mismatch")
            require(listed.stride(1) == 1 and listed.stride(0) >= listed.shape[1], "indices stride mismatch")
            whole = listed.is_contiguous() and listed.shape[1] % 64 == 0
            require(rows <= 64 or whole, "prefill takes whole tiles of dense indices")
            self.check_vector(lengths, rows, "topk_length")
            if not self.blind:
                require((listed < cache.shape[0] * cache.shape[1]).all(), "an address outside the cache")
                require((listed >= -1).all(), "only -1 is documented to be masked")
        self.calls.append(("sparse", rows))
        out = torch.zeros(query.shape, dtype=torch.bfloat16)
        for row in range(0 if self.blind else rows):
            keys = [
                mixed_state(cache, int(index))
                for cache, listed, lengths in parts
                for index in listed[row, : lengths[row]]
                if index >= 0
            ]
            if keys:
                out[row] = slow_attention(query[row], keys, sinks, scale)
        return out

    # SM100

    def generated(self, query, pools, listed, lengths, seq_lens, sinks, scale):
        require(query.ndim == 4 and query.shape[1] == 1, "one token a request")
        require(query.dtype in (torch.bfloat16, torch.float8_e4m3fn), "BF16 or FP8 E4M3 query")
        rows = query.shape[0]
        for pool in pools:
            require(pool.dtype == query.dtype, "cache dtype must match query dtype")
            require(pool.ndim == 4 and pool.shape[1] == 1 and pool.shape[3] == DIM, "HND pools, 512 wide")
            require(pool.stride(3) == 1, "head dimension must be contiguous")
            require(pool.stride(2) == DIM, "token stride must equal the head dimension")
            require(pool.stride(0) % DIM == 0, "page stride must be divisible by the token stride")
            require(pool.data_ptr() % 16 == 0, "must be 16-byte aligned for TMA")
            last = (pool.shape[0] - 1) * (pool.stride(0) // DIM) + pool.shape[2]
            require(last < 2**31 - 1, "encoded page coordinate exceeds int32 range")
        require(listed.dtype == torch.int32 and listed.is_contiguous(), "sparse_indices: contiguous int32")
        require(listed.ndim == 2 and listed.shape[0] == rows, "sparse_indices must be flattened [T, K]")
        require(listed.shape[1] >= 128, "sparse topK must include 128 sliding-window entries")
        require(listed.shape[1] % 4 == 0, "sparse topK must be a multiple of 4")
        self.check_vector(lengths, rows, "sparse_topk_lens")
        self.check_vector(seq_lens, rows, "seq_lens")
        self.calls.append((str(query.dtype), rows))
        out = torch.full((rows, 1, query.shape[2], DIM), torch.nan, dtype=torch.bfloat16)
        if self.blind:
            return out
        require((lengths >= 128).all(), "sparse_topk_lens must include the fixed 128 SWA entries")
        require((lengths <= listed.shape[1]).all(), "sparse_topk_lens cannot exceed the capacity")
        require((seq_lens >= 1).all(), "seq_lens must be at least the query length")
        for row in range(rows):
            near = listed[row, : min(int(seq_lens[row]), 128)].tolist()
            keys = [self.row(pools[0], index) for index in near] if max(near) >= 0 else []
            keys += [self.row(pools[1], index) for index in listed[row, 128 : lengths[row]].tolist()]
            if keys:
                out[row, 0] = slow_attention(query[row, 0], keys, sinks, scale)
        return out

    def row(self, pool: Tensor, index: int) -> Tensor:
        """A hole before the end of a list reads zeros and takes part."""
        if index < 0:
            return torch.zeros(DIM, dtype=torch.float64)
        page, offset = divmod(index, pool.stride(0) // DIM)
        require(page < pool.shape[0] and offset < pool.shape[2], "an address outside the cache")
        return plain_row(pool, index)

    def check_vector(self, value, rows, name) -> None:
        require(value is not None and value.dtype == torch.int32, f"{name} must be int32")
        require(value.shape == (rows,) and value.is_contiguous(), f"{name} must be a contiguous vector")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Mla:
    package = ModuleType("flashinfer")
    package.__version__, package.mla = "0.7.4", Mla()
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", package.mla)
    return package.mla


# --- Samples --------------------------------------------------------------------------------------


def poisoned(record: str, num_pages: int, page: int, seed: int, gap: int = 0) -> tuple[Tensor, Tensor]:
    """-> (cache, slots with a state). All other bytes are 0xff, a NaN in every part of a record.

    Pages lie in a slab with `gap` states' room between them, as if other layers' pages stood there.
    """
    if record == PACKED:
        payload = records.page_bytes(record, page, DIM, ROPE)
        stride = (-(-payload // 576) + gap) * 576
        cache = torch.full((num_pages, stride), 255, dtype=torch.uint8)[:, : -(-payload // 576) * 576]
    else:
        dtype = DTYPES[record]
        slab = torch.full((num_pages, (page + gap) * DIM * dtype.itemsize), 255, dtype=torch.uint8)
        cache = slab.view(dtype).unflatten(1, (page + gap, DIM))[:, :page]
    draw = torch.Generator().manual_seed(seed)
    slots = torch.randperm((num_pages - 1) * page, generator=draw)[: num_pages * page // 2] + page
    scale = torch.exp2(torch.randint(-6, 4, (len(slots), 1), generator=draw).float())
    x = torch.randn((len(slots), DIM), generator=draw) * scale
    records.write_slots(record, cache, slots, x.to(torch.bfloat16), page, ROPE)
    return cache, slots


def arguments(
    rows: int,
    heads: int = 16,
    width: int = 40,
    selected: int = 22,
    record: str = PACKED,
    *,
    deterministic: bool = False,
    gap: int = 1,
    seed: int = 0,
) -> list:
    draw = torch.Generator().manual_seed(seed + 7)
    window, window_slots = poisoned(record, 5, 16, seed, gap)
    states, state_slots = poisoned(record, 7, 8, seed + 1, 3 * gap)
    return [
        torch.randn((rows, heads, DIM), generator=draw).to(torch.bfloat16),
        window, lists(window_slots, rows, width, seed), record, 16,
        states, lists(state_slots, rows, selected, seed + 2), record, 8,
        torch.randn(heads, generator=draw), ROPE, deterministic,
    ]  # fmt: skip


def rounded(q: Tensor) -> Tensor:
    return q.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(q.dtype)


def check(args: list) -> Tensor:
    """The adapter first, then the reference: each row within tolerance, empty rows exactly zero."""
    got = flashinfer.sparse_attention(*args)
    queries = rounded(args[0]) if FP8 in (args[3], args[7]) else args[0]
    expected = reference.sparse_attention(queries, *args[1:]).double()
    assert got.dtype == torch.bfloat16
    assert_rows(got, expected, args, TOLERANCE)
    return got


# --- The arguments and the result -----------------------------------------------------------------


@pytest.mark.parametrize("record", EVERY)
@pytest.mark.parametrize("rows", [0, 1, 3, 17])
def test_rows(double, record: str, rows: int) -> None:
    check(arguments(rows, record=record))
    kind = "sparse" if record == PACKED else str(DTYPES[record])
    assert double.calls == ([(kind, rows)] if rows else [])


@pytest.mark.parametrize("record", EVERY)
@pytest.mark.parametrize(
    ("heads", "width", "selected"),
    [(8, 128, 64), (3, 128, 0), (24, 0, 70), (64, 5, 3), (100, 64, 1), (128, 1, 30)],
)
def test_heads_and_lists(double, record: str, heads: int, width: int, selected: int) -> None:
    """Heads are padded to the next count, lists to the next tile; either list may be missing."""
    check(arguments(5, heads, width, selected, record))
    assert len(double.calls) == 1


@pytest.mark.parametrize("record", EVERY)
@pytest.mark.parametrize("unused", [1, 5])
def test_a_cache_without_entries_is_not_looked_at(double, record: str, unused: int) -> None:
    """Nothing says what it is: a layer without states hands over whatever it has."""
    args = arguments(5, 8, 0 if unused == 1 else 40, 0 if unused == 5 else 22, record)
    expected = check(args)
    args[unused], args[unused + 2] = torch.full((1, 1, 1), torch.nan), "fp8_132"
    assert torch.equal(flashinfer.sparse_attention(*args), expected)


@pytest.mark.parametrize("record", EVERY)
@pytest.mark.parametrize("gap", [0, 1, 5])
def test_pages_in_a_slab(double, record: str, gap: int) -> None:
    """Other layers' pages between ours: another distance in each cache, and a first page inside the slab."""
    args = arguments(5, record=record, gap=gap)
    moved = torch.empty(0, dtype=args[1].dtype).set_(args[1].untyped_storage()).clone()
    room = 576 if record == PACKED else 2 * DIM
    slab = torch.full((moved.numel() * moved.itemsize + room * 8,), 255, dtype=torch.uint8).view(moved.dtype)
    slab[room : room + moved.numel()] = moved
    args[1] = slab[room:].as_strided(args[1].shape, args[1].stride(), room)
    check(args)


@pytest.mark.parametrize("record", EVERY)
def test_views(double, record: str) -> None:
    """Queries are every second head of a wider row; lists and sinks are slices."""
    args = arguments(5, record=record)
    wide = torch.full((5, 33, DIM + 1), torch.nan, dtype=torch.bfloat16)
    wide[:, 1:33:2, 1:] = args[0]
    args[0] = wide[:, 1:33:2, 1:]
    for position in (2, 6):
        room = torch.full((5, args[position].shape[1] + 3), 7, dtype=torch.int32)
        room[:, 1:-2] = args[position]
        args[position] = room[:, 1:-2]
    args[9] = args[9].repeat_interleave(2)[::2]
    check(args)


@pytest.mark.parametrize("record", EVERY)
@pytest.mark.parametrize("shape", ["wider rows", "odd address", "every second channel", "channels first"])
def test_queries_in_any_place(double, record: str, shape: str) -> None:
    args = arguments(3, record=record)
    room = {
        "wider rows": lambda: torch.empty((3, 24, DIM), dtype=torch.bfloat16)[:, 4:20],
        "odd address": lambda: torch.empty(3 * 16 * DIM + 1, dtype=torch.bfloat16)[1:].view(3, 16, DIM),
        "every second channel": lambda: torch.empty((3, 16, 2 * DIM), dtype=torch.bfloat16)[..., ::2],
        "channels first": lambda: torch.empty((3, DIM, 16), dtype=torch.bfloat16).mT,
    }[shape]()
    args[0] = room.copy_(args[0])
    check(args)


@pytest.mark.parametrize("record", EVERY)
def test_heads_of_padding_stay_apart(double, record: str) -> None:
    """Publishing pads the queries; what stands in those heads is read by nobody."""
    args = arguments(3, 32, record=record)
    args[0][:, 5:] = torch.nan
    args[9] = args[9][:5].contiguous()
    got = flashinfer.sparse_attention(*args)
    args[0] = args[0][:, :5]
    assert torch.equal(got, flashinfer.sparse_attention(*args))


@pytest.mark.parametrize("record", EVERY)
def test_nothing_to_do_calls_nothing(double, record: str) -> None:
    empty = flashinfer.sparse_attention(*arguments(3, 16, 0, 0, record))
    assert empty.shape == (3, 16, DIM)
    assert (empty == 0).all()
    assert double.calls == []


def test_sinks_take_their_share(double) -> None:
    """A sink far above every logit takes all of a row, one far below nothing."""
    args = arguments(1, 8)
    args[9] = torch.tensor([1e4] * 4 + [-1e4] * 4)
    got = check(args)
    assert (got[:, :4] == 0).all()
    assert (got[:, 4:] != 0).any()


def test_rounded_queries_stay_near(double) -> None:
    """e4m3 queries are the price of rows_fp8: three bits of mantissa a channel, averaged over 512 of them."""
    args = arguments(5, record=FP8)
    got, expected = flashinfer.sparse_attention(*args).double(), reference.sparse_attention(*args).double()
    error = (got - expected).norm() / expected.norm()
    assert TOLERANCE < error < 0.1, "it is a price, and a bounded one"


# --- Rows that must not see their company ---------------------------------------------------------


def test_deterministic_calls_have_one_shape(double, monkeypatch) -> None:
    """The plan of a call follows its shape, so every call has the same rows, whatever the step has."""
    whole = check(arguments(9, 8, 6, 5, deterministic=True))
    assert double.calls == [("sparse", 64)]
    double.calls.clear()
    monkeypatch.setattr(flashinfer, "DETERMINISTIC_ROWS", 4)
    args = arguments(9, 8, 6, 5, deterministic=True)
    assert torch.equal(flashinfer.sparse_attention(*args), whole)
    assert double.calls == [("sparse", 4)] * 3
    alone = [arg[4:5] if position in (0, 2, 6) else arg for position, arg in enumerate(args)]
    assert torch.equal(flashinfer.sparse_attention(*alone), whole[4:5])
    assert double.calls[3:] == [("sparse", 4)]


@pytest.mark.parametrize("record", [BF16, FP8])
def test_sm100_refuses_determinism(double, record: str) -> None:
    with pytest.raises(ValueError, match=r"does not promise on SM100 .*: leave out deterministic"):
        flashinfer.sparse_attention(*arguments(3, record=record, deterministic=True))
    assert double.calls == []


def test_many_rows_take_whole_tiles(double) -> None:
    """More than 64 rows go to the prefill kernel, which takes dense lists of 64 * n entries."""
    args = arguments(65, 8, 3, 64)
    args[6] = args[6].mT.contiguous().mT
    check(args)
    assert double.calls == [("sparse", 65)]


@pytest.mark.parametrize("record", EVERY)
def test_nothing_is_read_on_the_host(double, record: str) -> None:
    args = arguments(4, 24, record=record)
    double.blind = True
    with NoHostReads():
        flashinfer.sparse_attention(*args)
    with NoHostReads(), pytest.raises(AssertionError, match="reads a value"):
        args[2].max().item()


# --- Lists and bytes ------------------------------------------------------------------------------


def test_compact() -> None:
    listed = torch.tensor([[3, -1, 0, -1, 7], [-1] * 5, [4, 4, 2, 1, 0], [-1, -1, -1, -1, 9]]).int()
    packed, counts = flashinfer.compact(listed, 8)
    assert counts.tolist() == [3, 0, 5, 1]
    assert packed.dtype == counts.dtype == torch.int32
    for row, count in enumerate(counts):
        assert packed[row, :count].tolist() == [slot for slot in listed[row].tolist() if slot >= 0]
        assert (packed[row, count:] == -1).all()


def test_storage_rows() -> None:
    """Pages of 8 states lie 11 states apart: slot 17 is the second state of the third page."""
    cache = poisoned(BF16, 4, 8, 0, gap=3)[0]
    slots = torch.tensor([[0, 7, 8, 17, -1]]).int()
    assert flashinfer.storage_rows(cache, slots, 8).tolist() == [[0, 7, 11, 23, -1]]


@pytest.mark.parametrize("page", [1, 32, 64])
@pytest.mark.parametrize("record", EVERY)
def test_views_and_records_agree(record: str, page: int) -> None:
    """A state written by the records is where the kernels look for it, to the byte."""
    cache, slots = poisoned(record, 4, page, 3, gap=2)
    stored = records.read_slots(record, cache, slots, page, DIM, ROPE, torch.bfloat16)
    for slot, value in zip(slots[:20], stored, strict=False):
        if record == PACKED:
            found = mixed_state(flashinfer.page_view(cache, page), int(slot))
        else:
            row = flashinfer.storage_rows(cache, slot.int(), page)
            found = plain_row(flashinfer.pool_view(cache, DTYPES[record]), int(row))
        assert torch.equal(found, value.double())
    assert records.state_bytes(PACKED, DIM, ROPE) == flashinfer.PACKED_BYTES


@pytest.mark.parametrize("name", ["kernel", "full"])
@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "bf16", "fp8"])
def test_pages_of_the_layout_fit(name: str, cache_dtype: str) -> None:
    """The layout's pages have a distance that the kernels address, for both ratios."""
    config: ModelConfig = preset(name)
    backends = PRESETS["sm120"]
    if cache_dtype != "fp8_ds_mla":
        spec = f"sm100,attention=flashinfer,kv_cache_dtype={cache_dtype}"
        backends = choose(SM100, Numerics.BF16, spec)
    layout = build_layout(config, build_plan(config), backends, 64)
    for group in layout.window + layout.states:
        pages = torch.zeros((2, group.page_bytes), dtype=torch.uint8)
        if group.record == PACKED:
            view = flashinfer.page_view(pages, group.num_states)
            assert view.shape == (2, group.num_states, 1, 584)
        else:
            typed = pages.view(DTYPES[group.record]).unflatten(1, (group.num_states, DIM))
            view = flashinfer.pool_view(typed, DTYPES[group.record])
            assert view.shape == (2, 1, group.num_states, DIM)


# --- What is refused ------------------------------------------------------------------------------


def changed(position: int, value: object, record: str = PACKED) -> list:
    args = arguments(2, record=record)
    args[position] = value
    return args


REFUSED = {
    "fp32 queries": (lambda: changed(0, torch.zeros(2, 16, DIM)), "takes bf16 queries, not torch.float32"),
    "narrow heads": (lambda: changed(0, torch.zeros(2, 16, 64, dtype=torch.bfloat16)), "512 channels"),
    "another rope": (lambda: changed(10, 32), "64 of them rotated, not 512 and 32"),
    "another record": (
        lambda: changed(7, "scaled_528"),
        "reads mixed_584, rows_bf16, rows_fp8, not scaled_528",
    ),
    "records of two GPUs": (lambda: changed(7, BF16), "does not read mixed_584 and rows_bf16 in one call"),
    "rows of two dtypes": (
        lambda: changed(7, FP8, BF16),
        "does not read rows_bf16 and rows_fp8 in one call",
    ),
    "packed distance": (
        lambda: changed(1, torch.zeros((5, 17 * 576 + 8), dtype=torch.uint8)),
        "16 \\* n bytes apart from a multiple of 16 on, not 9800 apart",
    ),
    "rows' distance": (
        lambda: changed(
            1,
            torch.zeros((5, 17 * DIM + 8), dtype=torch.bfloat16)[:, : 16 * DIM].unflatten(1, (16, DIM)),
            BF16,
        ),
        "512 \\* n values apart from a multiple of 16 bytes on, not 8712 apart",
    ),
    "too many rows": (
        lambda: changed(1, torch.empty((1 << 27, 16, DIM), dtype=torch.bfloat16, device="meta"), BF16),
        "cannot address 134217728 pages of 8192 values",
    ),
    "a wide window": (
        lambda: arguments(2, 8, 129, record=BF16),
        "has a window of 128 slots, not 129",
    ),
    "heads": (lambda: arguments(2, 130), "at most 128 heads a rank, not 130"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(double, name: str) -> None:
    make, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        flashinfer.sparse_attention(*make())
    assert double.calls == []


def test_why_not_of_gpus_and_records(double) -> None:
    for hardware in (CPU, Hardware("cuda", 90, "H200", 0), Hardware("cuda", 110, "Thor", 0)):
        sentence = (
            f"FlashInfer has sparse attention of this model for SM100 and SM120, this is {hardware.name}"
        )
        assert flashinfer.why_not(hardware, PACKED) == sentence
    for record in (None, PACKED):
        assert flashinfer.why_not(SM120, record) is None
    for record in (None, BF16, FP8):
        assert flashinfer.why_not(SM100, record) is None
    assert flashinfer.why_not(SM120, BF16) == "FlashInfer reads mixed_584 on B6000, not rows_bf16"
    reads = "FlashInfer reads rows_bf16 and rows_fp8 on B200, not mixed_584"
    assert flashinfer.why_not(SM100, PACKED) == reads


def test_why_not_of_packages(double, monkeypatch) -> None:
    package, install = sys.modules["flashinfer"], r"(pip install 'flashinfer-python>=0.7.4')"
    for version in ("0.7.2.post1", "0.6.18", "0.0.0+unknown", "unknown"):
        package.__version__ = version
        said = f"this is FlashInfer {version}, and 0.7.4 is the oldest that is known to fit {install}"
        assert flashinfer.why_not(SM100, None) == said
    for version in ("0.7.4.post1", "0.8.0rc1", "1.0"):
        package.__version__ = version
        assert flashinfer.why_not(SM120, None) is None
    for name in (flashinfer.FUNCTION, flashinfer.CONFIGS):
        monkeypatch.delattr(Mla, name)
    said = f"this FlashInfer 1.0 has no flashinfer.mla.trtllm_batch_decode_sparse_mla_dsv4 {install}"
    assert flashinfer.why_not(SM100, None) == said
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert flashinfer.why_not(SM120, None) == f"it needs the package 'flashinfer' {install}"

    def broken() -> ModuleType:
        raise OSError("libtvm_ffi.so is not there\nand more lines")

    monkeypatch.setattr(flashinfer, "_package", broken)
    said = "the package 'flashinfer' does not load here: libtvm_ffi.so is not there"
    assert flashinfer.why_not(SM120, None) == said


@pytest.mark.parametrize(
    "config",
    [
        None,
        SimpleNamespace(bytes_per_token=528, page_block_size_is_runtime=True),
        SimpleNamespace(bytes_per_token=584, page_block_size_is_runtime=False),
    ],
)
def test_sm120_needs_its_specialisation(double, config) -> None:
    """Asked before a weight is read, without a kernel compiled; SM100 does not depend on it."""
    double.config = config
    said = "this FlashInfer has no SM120 kernel for mixed_584 pages of any size (pip install 'flashinfer-"
    assert flashinfer.why_not(SM120, PACKED).startswith(said)
    assert flashinfer.why_not(SM100, BF16) is None


@pytest.mark.parametrize(
    ("sm", "cuda", "needs"),
    [(120, "12.6", "12.8"), (121, "12.8", "12.9"), (120, "12.8", ""), (121, "13.0", "")],
)
def test_sm120_needs_its_cuda(double, monkeypatch, sm: int, cuda: str, needs: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    answer = flashinfer.why_not(Hardware("cuda", sm, f"SM{sm}", 0), PACKED)
    said = f"FlashInfer's kernels for SM{sm} need CUDA {needs}, this is {cuda}"
    assert answer == (said if needs else None)


# --- The double itself ----------------------------------------------------------------------------

BREAKS = {
    "heads": (PACKED, lambda call: call.update(query=call["query"][:, :7].clone()), "unsupported heads: 7"),
    "packed width": (
        PACKED,
        lambda call: call.update(swa_kv_cache=call["swa_kv_cache"][..., :576]),
        "cache of 584 bytes",
    ),
    "outside": (PACKED, lambda call: call["sparse_indices"].fill_(10**6), "outside the cache"),
    "another hole": (PACKED, lambda call: call["sparse_indices"].fill_(-2), "only -1"),
    "long lists": (PACKED, lambda call: call.update(sparse_indices=call["sparse_indices"].long()), "int32"),
    "no lengths": (PACKED, lambda call: call.update(swa_topk_lens=None), "topk_length must be int32"),
    "half a cache": (PACKED, lambda call: call.update(extra_sparse_indices=None), "incomplete"),
    "scores of another": (PACKED, lambda call: call.update(seq_lens=call["swa_topk_lens"]), "other backend"),
    "wide sink": (PACKED, lambda call: call.update(sinks=call["sinks"].double()), "fp32"),
    "infinite sink": (PACKED, lambda call: call["sinks"].fill_(-torch.inf), "finite"),
    "offsets": (BF16, lambda call: call.update(sparse_indices_are_storage_offsets=None), "storage offsets"),
    "logical slots": (BF16, lambda call: call["sparse_indices"].fill_(16), "outside the cache"),
    "narrow list": (
        BF16,
        lambda call: call.update(sparse_indices=call["sparse_indices"][:, :124].clone()),
        "include 128 sliding-window",
    ),
    "no window in the length": (BF16, lambda call: call["sparse_topk_lens"].fill_(20), "the fixed 128"),
    "no request": (BF16, lambda call: call["seq_lens"].fill_(0), "at least the query length"),
    "two dtypes": (BF16, lambda call: call.update(query=rounded8(call["query"])), "must match query dtype"),
}


def rounded8(q: Tensor) -> Tensor:
    return q.to(torch.float8_e4m3fn)


@pytest.mark.parametrize("name", BREAKS)
def test_the_double_refuses(double, monkeypatch, name: str) -> None:
    """Negative control: every one of these would reach the package's assertions or the kernel's memory."""
    record, break_it, sentence = BREAKS[name]
    honest = double.trtllm_batch_decode_sparse_mla_dsv4

    def tampered(**call):
        break_it(call)
        return honest(**call)

    monkeypatch.setattr(double, "trtllm_batch_decode_sparse_mla_dsv4", tampered)
    with pytest.raises(RuntimeError, match=sentence):
        flashinfer.sparse_attention(*arguments(2, record=record))


@pytest.mark.parametrize("record", EVERY)
def test_another_state_is_seen(double, record: str) -> None:
    """Negative control of the comparison: the kernel is told of one state, the reference of another."""
    args = arguments(1, 8, 0, 1, record, seed=3)
    got = flashinfer.sparse_attention(*args)
    slots = poisoned(record, 7, 8, 4, 3)[1]
    args[6] = slots[slots != args[6].item()][:1].to(torch.int32)[None]
    other = reference.sparse_attention(*args)
    assert (got.double() - other.double()).norm() > 100 * TOLERANCE * other.double().norm()


def counted_holes(listed: Tensor, width: int) -> tuple[Tensor, Tensor]:
    packed = listed.new_full((listed.shape[0], width), -1)
    packed[:, : listed.shape[1]] = listed
    return packed, listed.new_full((listed.shape[0],), listed.shape[1])


def dense_pages(cache: Tensor, page: int) -> Tensor:
    return cache.as_strided((cache.shape[0], page, 1, 584), (page * 584, 584, 584, 1))


def narrow_tiles(slots: Tensor, more: int) -> Tensor:
    return slots[:, : slots.shape[1] // 4 * 4].contiguous()


WRONG = {
    "holes are counted": (BF16, "compact", counted_holes),
    "slots stand for rows": (BF16, "storage_rows", lambda cache, slots, page: slots),
    "pages without a distance": (PACKED, "page_view", dense_pages),
    "lists are cut to tiles": (PACKED, "full_list", narrow_tiles),
    "queries have another scale": (FP8, "_as_stored", lambda q, dtype: q.mul(2).to(dtype)),
    "a scale of another width": (PACKED, "SCALE", 448**-0.5),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_adapter_fails(double, monkeypatch, name: str) -> None:
    """Negative control of the suite: each mistake is caught by the comparison or by the double."""
    record, part, mistake = WRONG[name]
    monkeypatch.setattr(flashinfer, part, mistake)
    with pytest.raises((AssertionError, RuntimeError)):
        check(arguments(5, record=record))
