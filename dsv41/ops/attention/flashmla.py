"""Sparse attention by the package flash_mla (the wheel sgl-flash-mla): FlashMLA's own kernels.

On Hopper they read one record, `mixed_584`, on SM100 `scaled_528`, with `nvfp4_288` allowed for the states
beside it; pages lie a multiple of the record's TMA stride apart. They take 64 or 128 heads of 512 channels:
fewer are padded with zero queries whose sink is -inf. K is dequantised to bf16, and both products run in bf16
with fp32 sums (spec/runtime.md 5.2, 5.3), as in the reference; P is rounded relative to a running maximum of
64 keys in both.

Decode. Every row is a batch entry of its own: the window list as `indices`, the selection as the extra list,
-1 where nothing is listed. No list lengths are given, so the kernel's schedule, which splits rows over the
SMs, depends on shapes alone, and holes in a list need no compaction. An op keeps nothing between calls, so
each call plans anew: one small launch that an engine with a schedule a step would save. The other price of
lists without lengths: a short list costs as much as a full one. A call takes at most DECODE_ROWS rows, since
it allocates an fp32 output for each.

Prefill. Where a row's bits must not depend on its neighbours (`deterministic`) that split is not allowed. The
SM100 decode can be told so; Hopper's cannot, so there the prefill kernel, which has no splits, takes those
rows: the listed records of a chunk of rows are gathered and dequantised to a bf16 workspace of at most
WORKSPACE_BYTES (making it takes some eight times that for a moment), and the combined lists point there. The
kernel takes a row's keys in the order of its list, so neither the chunk nor the row's place in it shows in
its bits. Without `deterministic` the decode call takes every row count: the gather, in plain torch, moves
some 8 kB for a key that the decode kernel reads from 584 bytes.

Run on Hopper with sgl-flash-mla 1.0.0. For SM100 the arguments are checked against the conditions that the
wheel's kernels assert; nothing has run there.
"""

from __future__ import annotations

from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv41.hardware import Hardware
from dsv41.ops import records
from dsv41.ops.packages import load_failure

QUERY_HEADS = 64
HEAD_DIM, ROPE_DIM = 512, 64
DECODE_TILE, PREFILL_TILE = 64, 128  # list lengths are multiples of these
DECODE_ROWS, WORKSPACE_BYTES = 1024, 128 << 20
SYMBOLS = ("get_mla_metadata", "flash_mla_with_kvcache", "flash_mla_sparse_fwd", "has_legacy")
INSTALL = "pip install --no-deps sgl-flash-mla"


Lists = list[tuple[Tensor, Tensor, str, int]]  # cache, slots [T, N], record, states a page


class Format(NamedTuple):
    """How the kernels know a record: bytes a state, and the unit of page distances, an int32 number of which
    they can address. `legacy`: the kernels that upstream dropped in September 2026, among them Hopper's."""

    state_bytes: int
    page_unit: int
    legacy: bool


FORMATS = MappingProxyType(
    {
        "mixed_584": Format(584, 576, True),
        "scaled_528": Format(528, 528, False),
        "nvfp4_288": Format(288, 288, False),
    }
)
RECORDS_OF = MappingProxyType({9: ("mixed_584",), 10: ("scaled_528", "nvfp4_288")})  # by major capability


def why_not(hardware: Hardware, record: str | None) -> str | None:
    known = RECORDS_OF.get(hardware.sm // 10)
    if known is None:
        return f"FlashMLA has kernels for SM90 and SM100, this is {hardware.name}"
    if record is not None and record not in known:
        return f"FlashMLA reads {' and '.join(known)} on {hardware.name}, not {record}"
    return _package_missing(known == RECORDS_OF[9])


def _package_missing(legacy: bool) -> str | None:
    """Why flash_mla cannot be used, or None. Its import loads the kernels."""
    failure = load_failure("flash_mla", INSTALL, _package)
    if failure is not None:
        return failure
    flash_mla = _package()
    lacking = [name for name in SYMBOLS if not hasattr(flash_mla, name)]
    if lacking:
        return f"this package 'flash_mla' has no {lacking[0]}, so it is not sgl-flash-mla 1.0 ({INSTALL})"
    if legacy and not flash_mla.has_legacy():
        return (
            "this build of the package 'flash_mla' leaves the Hopper kernels out (FLASH_MLA_BUILD_LEGACY=0)"
        )
    return None


def _package() -> ModuleType:
    import flash_mla

    return flash_mla


# -- shapes -------------------------------------------------------------------------------------------------


def padded_heads(heads: int) -> int:
    """The kernel's head count that holds `heads`; ValueError beyond 128."""
    if heads > 128:
        raise ValueError(f"FlashMLA has at most 128 heads a rank, not {heads}")
    return 64 if heads <= 64 else 128


def page_view(cache: Tensor, record: str, page_states: int) -> Tensor:
    """uint8 [P, page bytes] -> the kernel's view [P, S, 1, bytes of a state].

    Those bytes are nominal for `mixed_584`: inside its page all data come first, then all scales
    (spec/runtime.md 1.1.1). Raises ValueError for pages that the kernel cannot address.
    """
    width, unit, _ = FORMATS[record]
    assert cache.dtype == torch.uint8, f"a {record} cache is uint8, got {cache.dtype}"
    assert cache.stride(1) == 1, f"the bytes of a {record} page must be contiguous"
    assert cache.shape[1] >= page_states * width, f"a page needs {page_states * width} bytes"
    stride = cache.stride(0)
    if stride % unit or cache.data_ptr() % 16:
        raise ValueError(
            f"FlashMLA wants {record} pages {unit} * n bytes apart from a multiple of 16 on, "
            f"not {stride} bytes apart"
        )
    if cache.shape[0] * (stride // unit) > torch.iinfo(torch.int32).max:
        raise ValueError(f"FlashMLA cannot address {cache.shape[0]} pages of {stride} bytes")
    return cache.as_strided((cache.shape[0], page_states, 1, width), (stride, width, width, 1))


def full_list(slots: Tensor, tile: int) -> Tensor:
    """int32 [T, N] -> contiguous [T, 1, M], M the next multiple of the tile, filled with -1."""
    short = -slots.shape[1] % tile
    return (pad(slots, (0, short), value=-1) if short else slots).contiguous().unsqueeze(1)


def chunks(rows: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def gathered_rows(num_slots: int) -> int:
    """Rows whose keys, `num_slots` each, fit the workspace."""
    return max(1, WORKSPACE_BYTES // (num_slots * HEAD_DIM * torch.bfloat16.itemsize))


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
        raise ValueError(f"FlashMLA takes bf16 queries, not {q.dtype}")
    if dim != HEAD_DIM or rope_dim != ROPE_DIM:
        raise ValueError(f"FlashMLA has heads of 512 channels, 64 of them rotated, not {dim} and {rope_dim}")
    lists = [
        (cache, slots, record, page)
        for cache, slots, record, page in (
            (window, window_slots, window_record, window_page),
            (states, state_slots, state_record, state_page),
        )
        if slots.shape[1]
    ]
    _check_records([record for _, _, record, _ in lists])
    if not rows or not heads or not lists:
        return q.new_zeros((rows, heads, dim))
    q, sink = _with_heads(q, sink, padded_heads(heads))
    if deterministic and FORMATS[lists[0][2]].legacy:
        out = _prefill(q, lists, sink)
    else:
        out = _decode(q, lists, sink, deterministic)
    return out[:, :heads].contiguous()


def _check_records(chosen: list[str]) -> None:
    """Both records of a call belong to one GPU, and the fp4 record is for the second list only."""
    unknown = next((record for record in chosen if record not in FORMATS), None)
    if unknown is not None:
        raise ValueError(f"FlashMLA reads {', '.join(FORMATS)}, not {unknown}")
    if chosen[:1] == ["nvfp4_288"] or len({FORMATS[record].legacy for record in chosen}) > 1:
        raise ValueError(f"FlashMLA does not read {' and '.join(chosen)} in one call")


def _with_heads(q: Tensor, sink: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Exactly `heads` heads: zero queries, and sinks of -inf, which take nothing from a softmax."""
    more = heads - q.shape[1]
    q = pad(q, (0, 0, 0, more)) if more > 0 else q[:, :heads]
    if q.stride(2) != 1 or (q.stride(0) | q.stride(1)) % 8 or q.data_ptr() % 16:  # they are read by TMA
        q = q.contiguous()
    short = heads - sink.shape[0]
    return q, (pad(sink.float(), (0, short), value=-torch.inf) if short else sink.float()).contiguous()


def _with_one_token(q: Tensor) -> Tensor:
    """[T, H, d] -> [T, 1, H, d]; a kernel wants the row distance to be a multiple of the token distance."""
    return q.as_strided((q.shape[0], 1, *q.shape[1:]), (q.stride(0), *q.stride()))


def _decode(q: Tensor, lists: Lists, sink: Tensor, unsplit: bool) -> Tensor:
    """q [T, 64 or 128, d] -> o of the same shape, from the paged records."""
    parts = []
    for arguments in decode_calls(q, lists, sink, unsplit):
        out, _ = _package().flash_mla_with_kvcache(**arguments)
        parts.append(out.squeeze(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def decode_calls(q: Tensor, lists: Lists, sink: Tensor, unsplit: bool) -> list[dict[str, Any]]:
    """The arguments of the package's decode calls, for at most DECODE_ROWS rows each. A schedule is filled by
    the first call with it."""
    which = {"use_legacy": True, "kv_format": "V4"} if FORMATS[lists[0][2]].legacy else {}
    which |= {"enable_batch_invariant": True} if unsplit else {}
    views = [page_view(cache, record, page) for cache, _, record, page in lists]
    slots = [full_list(listed, DECODE_TILE) for _, listed, _, _ in lists]
    return [
        {
            "q": _with_one_token(q[rows]),
            "k_cache": views[0],
            "block_table": None,
            "cache_seqlens": None,
            "head_dim_v": HEAD_DIM,
            "tile_scheduler_metadata": _package().get_mla_metadata()[0],
            "softmax_scale": HEAD_DIM**-0.5,
            "is_fp8_kvcache": True,
            "indices": slots[0][rows],
            "attn_sink": sink,
            "extra_k_cache": views[1] if len(lists) > 1 else None,
            "extra_indices_in_kvcache": slots[1][rows] if len(lists) > 1 else None,
            **which,
        }
        for rows in chunks(q.shape[0], DECODE_ROWS)
    ]


def _prefill(q: Tensor, lists: Lists, sink: Tensor) -> Tensor:
    """The same from gathered keys."""
    flash_mla = _package()
    parts = []
    for rows in chunks(q.shape[0], gathered_rows(sum(slots.shape[1] for _, slots, _, _ in lists))):
        keys, listed = gather(lists, rows)
        out, _, _ = flash_mla.flash_mla_sparse_fwd(
            q=q[rows],
            kv=keys,
            indices=listed,
            sm_scale=HEAD_DIM**-0.5,
            d_v=HEAD_DIM,
            attn_sink=sink,
            use_legacy=True,
            return_log2_lse=False,
        )
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def gather(lists: Lists, rows: slice) -> tuple[Tensor, Tensor]:
    """-> (keys bf16 [n * N, 1, d], where each row's keys lie int32 [n, 1, M], -1 where none) of n rows.

    N is the combined length of the lists and M the next multiple of the kernel's tile.
    """
    parts = [
        records.read_slots(record, cache, slots[rows].long(), page, HEAD_DIM, ROPE_DIM, torch.bfloat16)
        for cache, slots, record, page in lists
    ]
    keys = torch.cat(parts, dim=1)
    slots = torch.cat([slots[rows] for _, slots, _, _ in lists], dim=1)
    place = torch.arange(slots.numel(), dtype=torch.int32, device=slots.device).view(slots.shape)
    listed = torch.where(slots >= 0, place, -1)
    return keys.flatten(0, 1).unsqueeze(1), full_list(listed, PREFILL_TILE)
