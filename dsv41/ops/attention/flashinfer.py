"""Sparse attention by the package flashinfer (flashinfer-python): one function of it, two kernels behind it.

`flashinfer.mla.trtllm_batch_decode_sparse_mla_dsv4` takes 8, 16, 32, 64 or 128 heads of 512 channels; others
are padded with zero queries. Every row goes as a request of one token. Facts are of version 0.7.4: its
docstrings, its checks and its CUDA sources.

SM120 (`mixed_584`). Pages are read in place, any number of states a page, 16 bytes * n apart. The window list
and the selection are two segments with a length each; an entry of -1 before that length reads a row of zeros
and is masked, so lists keep their holes and their full width is their length. Widths are multiples of 64:
more than 64 rows go to a prefill kernel that takes no others, fewer to that or to a split decode kernel. The
decode kernel rounds queries (unrotated channels, 64 to a scale) and probabilities to e4m3, the prefill kernel
probabilities alone, where the reference keeps bf16, so values lie apart by the rounding of e4m3.
Kernel and split follow the shape of a call; nothing else of a row's company reaches it. `deterministic`
therefore makes every call one of DETERMINISTIC_ROWS rows, padded with rows of empty lists.

SM100 (`rows_bf16`, `rows_fp8`; only by explicit choice). The kernels are prebuilt binaries. A row has one
list: 128 columns of window slots, then the selection, as rows of the whole storage (page * distance + offset,
in units of a state), because other layers' pages may lie between. Both pools have the query's dtype, so with
`rows_fp8` the queries are rounded to e4m3 too, with the scale 1 of the stored rows. A hole is not skipped
everywhere (a -1 before a list's end has entered the softmax, vLLM pull request 57432), so the lists are
compacted, in order, and carry lengths: `seq_lens` bounds the window's columns, `sparse_topk_lens` counts 128
for the window and the selection behind it. A row that lists nothing is outside what FlashInfer promises; its
zeros are made here. Nothing says that a row's bits do not depend on its company: `deterministic` is refused.

A call allocates its output, its lists and WORKSPACE_BYTES for split sums. FlashInfer compiles (SM120) or
fetches (SM100) its kernels at the first call and plans a shape at its first eager call, so a capture needs a
warm-up. Not run on a GPU yet: the arguments are checked against the conditions that the package asserts.
"""

from __future__ import annotations

import re
from types import MappingProxyType, ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv41.hardware import Hardware
from dsv41.ops import records
from dsv41.ops.packages import load_failure

QUERY_HEADS = 8
HEAD_COUNTS = (8, 16, 32, 64, 128)
HEAD_DIM, ROPE_DIM = 512, 64
SCALE = HEAD_DIM**-0.5
SEGMENT_TILE, DETERMINISTIC_ROWS = 64, 64  # SM120: list widths are multiples; rows of a fixed call
WINDOW_COLUMNS, LIST_TILE = 128, 4  # SM100: the window's part of a list; list widths are multiples
WORKSPACE_BYTES = 128 << 20
VERSION = (0, 7, 4)
INSTALL = "pip install 'flashinfer-python>=0.7.4'"
FUNCTION, CONFIGS = "trtllm_batch_decode_sparse_mla_dsv4", "supported_sparse_mla_sm120_configs"

PACKED, PACKED_BYTES = "mixed_584", 584
PLAIN = MappingProxyType({"rows_bf16": torch.bfloat16, "rows_fp8": records.E4M3})
RECORDS_OF = MappingProxyType({10: tuple(PLAIN), 12: (PACKED,)})  # by major capability

Listed = tuple[Tensor, Tensor, int]  # cache, slots [T, N], states a page


def why_not(hardware: Hardware, record: str | None) -> str | None:
    known = RECORDS_OF.get(hardware.sm // 10)
    if known is None:
        return f"FlashInfer has sparse attention of this model for SM100 and SM120, this is {hardware.name}"
    if record is not None and record not in known:
        return f"FlashInfer reads {' and '.join(known)} on {hardware.name}, not {record}"
    return _package_missing() or (_specialisation_missing(hardware) if known == (PACKED,) else None)


def _package_missing() -> str | None:
    """Why flashinfer cannot be used, or None."""
    failure = load_failure("flashinfer", INSTALL, _package)
    if failure is not None:
        return failure
    flashinfer = _package()
    version = str(getattr(flashinfer, "__version__", "unknown"))
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < VERSION:
        return f"this is FlashInfer {version}, and 0.7.4 is the oldest that is known to fit ({INSTALL})"
    lacking = [name for name in (FUNCTION, CONFIGS) if not hasattr(flashinfer.mla, name)]
    return f"this FlashInfer {version} has no flashinfer.mla.{lacking[0]} ({INSTALL})" if lacking else None


def _specialisation_missing(hardware: Hardware) -> str | None:
    """Why this FlashInfer has no SM120 kernel for the packed pages, or None. There is no other to try."""
    config = getattr(_package().mla, CONFIGS)().get("dsv4")
    if config is None or config.bytes_per_token != PACKED_BYTES or not config.page_block_size_is_runtime:
        return f"this FlashInfer has no SM120 kernel for {PACKED} pages of any size ({INSTALL})"
    least = (12, 9) if hardware.sm > 120 else (12, 8)
    cuda = torch.version.cuda
    if cuda is not None and tuple(map(int, cuda.split(".")[:2])) < least:
        return f"FlashInfer's kernels for {hardware.name} need CUDA {least[0]}.{least[1]}, this is {cuda}"
    return None


def _package() -> ModuleType:
    import flashinfer
    import flashinfer.mla

    return flashinfer


# -- shapes -------------------------------------------------------------------------------------------------


def padded_heads(heads: int) -> int:
    """The kernels' head count that holds `heads`; ValueError beyond 128."""
    if heads > HEAD_COUNTS[-1]:
        raise ValueError(f"FlashInfer has at most {HEAD_COUNTS[-1]} heads a rank, not {heads}")
    return next(count for count in HEAD_COUNTS if count >= heads)


def page_view(cache: Tensor, page_states: int) -> Tensor:
    """uint8 [P, page bytes] -> the SM120 kernel's view [P, S, 1, 584].

    Those bytes are nominal: inside its page all data come first, then all scales (spec/runtime.md 1.1.1).
    Raises ValueError for pages that the kernel cannot address.
    """
    assert cache.dtype == torch.uint8, f"a {PACKED} cache is uint8, got {cache.dtype}"
    assert cache.stride(1) == 1, f"the bytes of a {PACKED} page must be contiguous"
    assert cache.shape[1] >= page_states * PACKED_BYTES, f"a page needs {page_states * PACKED_BYTES} bytes"
    stride = cache.stride(0)
    if stride % 16 or cache.data_ptr() % 16:
        raise ValueError(
            f"FlashInfer wants {PACKED} pages 16 * n bytes apart from a multiple of 16 on, not {stride} apart"
        )
    shape = (cache.shape[0], page_states, 1, PACKED_BYTES)
    return cache.as_strided(shape, (stride, PACKED_BYTES, PACKED_BYTES, 1))


def pool_view(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """[P, S, 512] -> the SM100 kernels' view [P, 1, S, 512]; ValueError for pages they cannot address."""
    assert cache.dtype == dtype, f"rows are stored as {dtype}, got {cache.dtype}"
    assert cache.shape[2] == HEAD_DIM, f"rows have {HEAD_DIM} channels, not {cache.shape[2]}"
    assert cache.stride()[1:] == (HEAD_DIM, 1), "the rows of a page must be contiguous"
    stride = cache.stride(0)
    if stride % HEAD_DIM or cache.data_ptr() % 16:
        raise ValueError(
            f"FlashInfer wants pages {HEAD_DIM} * n values apart from a multiple of 16 bytes on, "
            f"not {stride} apart"
        )
    if (cache.shape[0] - 1) * (stride // HEAD_DIM) + cache.shape[1] >= torch.iinfo(torch.int32).max:
        raise ValueError(f"FlashInfer cannot address {cache.shape[0]} pages of {stride} values")
    return cache.unsqueeze(1)


def storage_rows(cache: Tensor, slots: Tensor, page_states: int) -> Tensor:
    """int32 slots -> where their rows lie from the start of the cache, counted in rows; -1 stays."""
    span = cache.stride(0) // HEAD_DIM
    return torch.where(slots >= 0, slots // page_states * span + slots % page_states, -1)


def full_list(slots: Tensor, more: int) -> Tensor:
    """int32 [T, N] -> contiguous [T + more, M], M the next multiple of the tile, filled with -1."""
    return pad(slots, (0, -slots.shape[1] % SEGMENT_TILE, 0, more), value=-1).contiguous()


def compact(listed: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """int32 [T, N] with holes -> (the entries in order, then -1: [T, width], how many: int32 [T])."""
    keep = listed >= 0
    place = torch.where(keep, keep.cumsum(1) - 1, width)  # holes share one column more, which is cut off
    packed = listed.new_full((listed.shape[0], width + 1), -1).scatter(1, place, listed)
    return packed[:, :width], keep.sum(1, dtype=torch.int32)


# -- the op -------------------------------------------------------------------------------------------------


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_slots: Tensor,
    window_record: str,
    window_page: int,
    states: Tensor,
    state_slots: Tensor,
    state_record: str,
    state_page: int,
    sink: Tensor,
    rope_dim: int,
    deterministic: bool,
) -> Tensor:
    rows, heads, dim = q.shape[0], sink.shape[0], q.shape[2]
    if q.dtype != torch.bfloat16:
        raise ValueError(f"FlashInfer takes bf16 queries, not {q.dtype}")
    if dim != HEAD_DIM or rope_dim != ROPE_DIM:
        raise ValueError(
            f"FlashInfer has heads of 512 channels, 64 of them rotated, not {dim} and {rope_dim}"
        )
    both = ((window, window_slots, window_page), (states, state_slots, state_page))
    listed = ((window_record, window_slots), (state_record, state_slots))
    chosen = [record for record, slots in listed if slots.shape[1]]
    _check_records(chosen)
    if not rows or not heads or not chosen:
        return q.new_zeros((rows, heads, dim))
    q, sink = _with_heads(q, sink, padded_heads(heads))
    if chosen[0] == PACKED:
        out = _packed(q, [part for part in both if part[1].shape[1]], sink, deterministic)
    elif deterministic:
        raise ValueError(
            "FlashInfer does not promise on SM100 that a row's bits do not depend on the rows beside it: "
            "leave out deterministic, or use attention=flashmla"
        )
    else:
        out = _plain(q, *both, sink, PLAIN[chosen[0]])
    return out[:, :heads].contiguous()


def _check_records(chosen: list[str]) -> None:
    """A call reads one record: two would be of two GPUs, or of two dtypes."""
    known = (PACKED, *PLAIN)
    unknown = next((record for record in chosen if record not in known), None)
    if unknown is not None:
        raise ValueError(f"FlashInfer reads {', '.join(known)}, not {unknown}")
    if len(set(chosen)) > 1:
        raise ValueError(f"FlashInfer does not read {' and '.join(chosen)} in one call")


def _with_heads(q: Tensor, sink: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Exactly `heads` heads, contiguous. Padding has zero queries and sinks of 0: sinks must be finite."""
    more = heads - q.shape[1]
    q = pad(q, (0, 0, 0, more)) if more > 0 else q[:, :heads]
    if not q.is_contiguous() or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)
    return q, pad(sink.float(), (0, heads - sink.shape[0])).contiguous()


def _packed(q: Tensor, parts: list[Listed], sink: Tensor, deterministic: bool) -> Tensor:
    """q [T, padded heads, d] -> o of the same shape, from packed pages (SM120)."""
    attend, rows = getattr(_package().mla, FUNCTION), q.shape[0]
    step = DETERMINISTIC_ROWS if deterministic else rows
    more = -rows % step
    q = pad(q, (0, 0, 0, 0, 0, more)) if more else q
    views = [page_view(cache, page) for cache, _, page in parts]
    lists = [full_list(slots, more) for _, slots, _ in parts]
    lengths = [pad(slots.new_full((rows,), slots.shape[1]), (0, more)) for slots in lists]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    dual, out = len(parts) > 1, []
    for start in range(0, rows, step):
        part = slice(start, start + step)
        done = attend(
            query=q[part],
            swa_kv_cache=views[0],
            workspace_buffer=workspace,
            sparse_indices=lists[0][part],
            swa_topk_lens=lengths[0][part],
            compressed_kv_cache=views[1] if dual else None,
            extra_sparse_indices=lists[1][part] if dual else None,
            extra_sparse_topk_lens=lengths[1][part] if dual else None,
            bmm1_scale=SCALE,
            sinks=sink,
            kv_layout="NHD",
            backend="sparse",
            kv_cache_format="fp8",
        )
        out.append(done)
    return (out[0] if len(out) == 1 else torch.cat(out))[:rows]


def _plain(q: Tensor, window: Listed, states: Listed, sink: Tensor, dtype: torch.dtype) -> Tensor:
    """q [T, padded heads, d] -> o of the same shape, from plain rows (SM100)."""
    if window[1].shape[1] > WINDOW_COLUMNS:
        raise ValueError(f"FlashInfer has a window of {WINDOW_COLUMNS} slots, not {window[1].shape[1]}")
    near, num_near = compact(storage_rows(*window), WINDOW_COLUMNS)
    far, num_far = compact(storage_rows(*states), states[1].shape[1] + -states[1].shape[1] % LIST_TILE)
    # Two pools must be there: where one has no entries, the other stands for it.
    first = window if window[1].shape[1] else states
    second = states if states[1].shape[1] else window
    out = getattr(_package().mla, FUNCTION)(
        query=_as_stored(q, dtype).unsqueeze(1),
        swa_kv_cache=pool_view(first[0], dtype),
        workspace_buffer=torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device),
        sparse_indices=torch.cat((near, far), dim=1),
        compressed_kv_cache=pool_view(second[0], dtype),
        sparse_topk_lens=num_far + WINDOW_COLUMNS,
        seq_lens=num_near.clamp(min=1),  # a request is never shorter than its own row
        bmm1_scale=SCALE,
        sinks=sink,
        kv_layout="HND",
        backend="trtllm-gen",
        sparse_indices_are_storage_offsets=True,
    )
    return out.squeeze(1).masked_fill((num_near + num_far == 0)[:, None, None], 0.0)


def _as_stored(q: Tensor, dtype: torch.dtype) -> Tensor:
    """Queries in the dtype of the rows, rounded as the rows are."""
    return q if dtype == q.dtype else records.pack("rows_fp8", q, 0).view(dtype)
