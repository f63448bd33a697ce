"""The sparse indexer on Hopper: what runs for which shape, and in which workspace.

Kernels: gluon_scores.py (fp4 keys of the released shape), gluon_e4m3.py (the same for a few very long rows,
summed in another order, so never under `deterministic`), triton_scores.py (queries; every other record and
shape), triton_topk.py (selection and candidate blocks). All sizes here come from shapes, nothing from device
values, so a call may be captured; lengths may change between replays.

Workspace: dense scores of a tile of rows, at most SCORE_BYTES, the survivors of the search (never more than
the scores) and, where candidates are published, block maxima (an eighth of the scores). So a call holds under
2.2 SCORE_BYTES however long the prompt is: 4096 rows that may see a million states go 64 rows at a time.

Against the reference: scores are fp32 sums, not rounded to bf16 after the dot, the weighting and the sum, so
they differ from it by its own rounding (2^-8 of the largest head's term) and agree with float64 to 2e-6 of a
row's norm (tested). The selection is exact for the scores the kernel computed. Candidate lists must ascend,
as `candidate_blocks` makes them; only the listed blocks' keys are read. Rows that see no more than k states
are scored (NaN is to be reported) but never searched.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dsv41.ops import records
from dsv41.ops.indexing import triton_scores, triton_topk

SCORE_BYTES = 256 << 20
PLAIN_TILE = 64
QUERY_HEADS = 4  # of a program that rotates and quantises queries
GROUP_ROWS = 8  # rows of a prefill group
FEW_ROWS = 16  # to here rows are scored one by one
LONG_STATES = 1 << 19  # from here on few rows are scored by e4m3 products
MANY_ROWS = 64  # from here one CTA selects from a row, below it several
KINDS = {"mxfp4_68": "mxfp4", "fp8_132": "fp8", "rows_bf16": "rows"}


class Variant(NamedTuple):
    """A decode kernel: registers of a thread, and CTAs an SM by them."""

    registers: int
    resident: int


VARIANTS = MappingProxyType({"bf16": Variant(128, 4), "e4m3": Variant(96, 5)})


def why_not(hardware: object, record: str | None) -> str | None:
    if getattr(hardware, "sm", 0) != 90:
        return "its kernels are written for SM90 (Hopper)"
    if record is not None and record not in KINDS:
        return f"it scores {', '.join(KINDS)} index keys, not {record}"
    return None


def index_query(
    q: Tensor, head_weights: Tensor, cos_sin: Tensor, record: str, quantise: bool
) -> tuple[Tensor, Tensor]:
    num_rows, heads, dim = q.shape
    assert q.dtype == torch.bfloat16, f"index queries are bf16, got {q.dtype}"
    assert q.stride(2) == 1, "a head's channels are contiguous"
    pairs = (q.data_ptr() // 2, q.stride(0), q.stride(1), dim)
    assert all(place % 2 == 0 for place in pairs), "channels are read in pairs"
    turned, weights = q.new_empty(q.shape), q.new_empty(q.shape[:2])
    if num_rows == 0:
        return turned, weights
    kind = "fp8" if record == "fp8_132" else "mxfp4" if quantise else "rows"
    assert kind != "mxfp4" or dim % 32 == 0, f"fp4 scales cover 32 channels, the head has {dim}"
    together = min(QUERY_HEADS, _power(heads))
    triton_scores.query_kernel[(num_rows, triton.cdiv(heads, together))](
        q, head_weights, cos_sin, turned, weights,
        q.stride(0), q.stride(1), head_weights.stride(0), cos_sin.stride(0), dim**-0.5 * heads**-0.5,
        heads, together, dim, _power(dim), cos_sin.shape[1], kind,
        num_warps=2, enable_fp_fusion=False,  # products round before their sum, as in the reference
    )  # fmt: skip
    return turned, weights


def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    row_request: Tensor,
    num_states: Tensor,
    max_states: int,
    record: str,
    page_states: int,
) -> Tensor:
    num_rows, width = q.shape[0], _round_up(max_states, 64)
    scores = torch.empty((num_rows, width), dtype=torch.float32, device=q.device)
    if num_rows and max_states:
        rows = Rows(row_request, num_states, page_table, page_states)
        score(q, weights, keys, rows, rows.num_states, None, scores, record, 0)
        grid = (triton.cdiv(max_states, 1024), num_rows)
        triton_scores.mask_kernel[grid](
            scores, rows.row_request, rows.num_states, scores.stride(0), max_states, 1024
        )
    return scores[:, :max_states]


def top_k(scores: Tensor, num_states: Tensor, k: int) -> Tensor:
    selection = scores.new_empty((scores.shape[0], k), dtype=torch.int32)
    if scores.shape[0]:
        choose(_aligned(scores), scores.shape[1], _int32(num_states), selection)
    return selection


def candidate_blocks(scores: Tensor, num_states: Tensor, num_blocks: int, block_states: int) -> Tensor:
    blocks = scores.new_empty((scores.shape[0], num_blocks), dtype=torch.int32)
    if scores.shape[0] and num_blocks:
        publish(_aligned(scores), scores.shape[1], _int32(num_states), blocks, block_states)
    return blocks


def select(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    row_request: Tensor,
    num_states: Tensor,
    candidates: Tensor,
    k: int,
    num_blocks: int,
    block_states: int,
    record: str,
    page_states: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, device = q.shape[0], q.device
    selection = torch.empty((num_rows, k), dtype=torch.int32, device=device)
    slots = torch.empty_like(selection)
    blocks = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    faulty = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return selection, slots, blocks, faulty
    states = page_table.shape[1] * page_states
    listed = candidates.shape[1]
    columns = min(listed * block_states, _round_up(states, block_states)) if listed else states
    width = _round_up(max(columns, states if num_blocks else 0, 1), 64)
    tile = max(1, min(SCORE_BYTES // (4 * width), 32768))
    tile = min(num_rows, tile // GROUP_ROWS * GROUP_ROWS or tile)
    scores = torch.empty((tile, width), dtype=torch.float32, device=device)
    every = Rows(row_request, num_states, page_table, page_states)
    for first in range(0, num_rows, tile):
        part = slice(first, min(first + tile, num_rows))
        rows, inside, out = every.part(part), None, scores[: part.stop - first]
        lengths = rows.num_states
        if num_blocks or not listed:
            long = not deterministic and num_rows <= FEW_ROWS and states >= LONG_STATES
            way = "e4m3" if long else "bf16"
            score(q[part], weights[part], keys, rows, lengths, None, out, record, 0, way)
        if num_blocks:
            publish(out, states, lengths, blocks[part], block_states, rows)
        if listed:
            inside, lengths = candidates[part], torch.empty_like(lengths)
            triton_topk.lengths_kernel[(len(lengths),)](
                inside, rows.num_states, rows.row_request, lengths, inside.stride(0),
                listed, _power(listed), block_states,
            )  # fmt: skip
            score(q[part], weights[part], keys, rows, lengths, inside, out, record, block_states)
        choose(
            out, columns, lengths, selection[part], rows=rows, slots=slots[part], faulty=faulty[part],
            candidates=inside, block=block_states if listed else 0,
        )  # fmt: skip
    return selection, slots, blocks, faulty


def _power(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _int32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()


def _aligned(scores: Tensor) -> Tensor:
    """Rows that start at 16 bytes and end at a multiple of them: the selection loads quads of scores."""
    assert scores.dtype == torch.float32, f"scores are fp32, got {scores.dtype}"
    short = -scores.shape[1] % 4
    if short or scores.stride(1) != 1 or scores.stride(0) % 4 or scores.data_ptr() % 16:
        scores = torch.nn.functional.pad(scores, (0, short)).contiguous()
    return scores


class Rows:
    """Whose states a row sees, and how many."""

    def __init__(self, row_request: Tensor, num_states: Tensor, table: Tensor, page_states: int) -> None:
        assert table.dtype == torch.int32, f"page tables are int32, got {table.dtype}"
        assert table.stride(1) == 1, "a request's pages are contiguous in its table"
        self.row_request, self.num_states = _int32(row_request), _int32(num_states)
        self.table, self.page_states = table, page_states

    def part(self, rows: slice) -> Rows:
        return Rows(self.row_request[rows], self.num_states[rows], self.table, self.page_states)


def score(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    rows: Rows,
    lengths: Tensor,
    candidates: Tensor | None,
    scores: Tensor,
    record: str,
    block: int,
    variant: str = "bf16",
) -> None:
    """scores [t, width] of every column below a row's length; what lies beyond is not defined. `variant`: of
    the released shape's decode kernels; e4m3 takes FEW_ROWS quantised queries at most."""
    q, weights = q.contiguous(), weights.contiguous()
    num_rows, heads, dim = q.shape
    listed = rows.row_request if candidates is None else candidates  # a pointer that is not read
    listed_stride = 0 if candidates is None else candidates.stride(0)
    states = rows.page_states
    if (heads, dim, record) == (32, 128, "mxfp4_68") and q.is_cuda and keys.stride(0) % 16 == 0:
        score_fp4(q, weights, keys, rows, lengths, listed, listed_stride, scores, block, variant)
        return
    data, scale = records.regions(record, states, dim, 0)
    plain = record == "rows_bf16"
    unit = keys.element_size()
    grid = (triton.cdiv(scores.shape[1], PLAIN_TILE), num_rows)
    triton_scores.scores_kernel[grid](
        q, weights, keys, keys, rows.table, rows.row_request, rows.num_states, lengths, listed, scores,
        keys.stride(0), rows.table.stride(0), listed_stride, scores.stride(0),
        heads, _power(heads), dim, _power(dim), states,
        KINDS[record], data.offset // unit, keys.stride(1) if plain else data.stride,
        scale.offset, scale.stride, block, PLAIN_TILE,
    )  # fmt: skip


def score_fp4(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    rows: Rows,
    lengths: Tensor,
    listed: Tensor,
    listed_stride: int,
    scores: Tensor,
    block: int,
    variant: str,
) -> None:
    from dsv41.ops.indexing import gluon_e4m3, gluon_scores

    source = gluon_e4m3 if variant == "e4m3" else gluon_scores
    num_rows, tiles = q.shape[0], scores.shape[1] // 64
    assert variant == "bf16" or num_rows <= FEW_ROWS, f"{num_rows} rows are scored by bf16 products"
    words, table, processors = keys.view(torch.int32), rows.table, _processors(q.device)
    grouped = num_rows > FEW_ROWS and not block
    registers, resident = VARIANTS[variant]
    waves = 2 * resident if tiles >= 8192 else resident  # CTAs an SM: two rounds even out the longest rows
    loop = tiles * num_rows > waves * processors
    splits = max(2 if grouped else 1, waves * processors // num_rows)  # no CTA left for a round of its own
    splits = min(splits, triton.cdiv(tiles, 2)) if loop else tiles
    source.decode_kernel[(splits, num_rows)](
        words, keys, table, listed, rows.row_request, lengths, q, weights, scores,
        num_rows, table.stride(0), listed_stride, scores.stride(0),
        keys.stride(0), rows.page_states, block, grouped, loop,
        num_warps=4, maxnreg=registers, launch_pdl=True,
    )  # fmt: skip
    if grouped:
        parts = triton.cdiv(num_rows, GROUP_ROWS)
        splits = max(1, min(triton.cdiv(tiles, 8), triton.cdiv(4 * processors, parts)))
        gluon_scores.prefill_kernel[(parts, splits)](
            words, keys, table, rows.row_request, rows.num_states, q, weights, scores,
            num_rows, table.stride(0), scores.stride(0),
            keys.stride(0), rows.page_states, GROUP_ROWS,
            num_warps=4,
        )  # fmt: skip


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def publish(
    scores: Tensor, states: int, lengths: Tensor, blocks: Tensor, block_states: int, rows: Rows | None = None
) -> None:
    num_rows, count = scores.shape[0], triton.cdiv(states, block_states)
    best = scores.new_empty((num_rows, _round_up(count, 64)))
    request = lengths if rows is None else rows.row_request
    size = triton.next_power_of_2(block_states)
    step = max(16, 4096 // size)
    triton_topk.blocks_kernel[(triton.cdiv(count, step), num_rows)](
        scores, lengths, request, best, scores.stride(0), best.stride(0),
        block_states, size, step, rows is not None,
    )  # fmt: skip
    choose(best, count, lengths, blocks, rows=rows, size=block_states, drop=True)


def choose(
    scores: Tensor,
    columns: int,
    lengths: Tensor,
    selection: Tensor,
    *,
    rows: Rows | None = None,
    slots: Tensor | None = None,
    faulty: Tensor | None = None,
    candidates: Tensor | None = None,
    block: int = 0,
    size: int = 1,
    drop: bool = False,
) -> None:
    """The k best of the first `lengths / size` of `columns` scores; `block`: of candidates' states."""
    num_rows, k = selection.shape
    page_states = 0
    request, table, table_stride = lengths, lengths, 0
    if rows is not None:
        request, table, table_stride = rows.row_request, rows.table, rows.table.stride(0)
        page_states = 0 if slots is None else rows.page_states
    listed, listed_stride = (lengths, 0) if candidates is None else (candidates, candidates.stride(0))
    slots = selection if slots is None else slots
    flags = selection if faulty is None else faulty
    kp = _power(k)
    groups, cap = 2 * kp, min(8 * kp, max(8192, 2 * kp))
    whole = max(min(4 * groups, 8192), groups)  # the longest row that is searched as it is
    common = {"FROM": size, "DROP": drop, "REQUESTS": rows is not None}
    chosen = {"BLOCK": block, "S": page_states, "FAULTS": faulty is not None}
    if columns <= whole or num_rows >= MANY_ROWS:
        survivors = selection.new_empty((num_rows, cap) if columns > whole else 0)
        triton_topk.row_kernel[(num_rows,)](
            scores, lengths, request, selection, slots, flags, listed, table, survivors,
            scores.stride(0), listed_stride, table_stride,
            K=k, KP=kp, W=groups, CAP=cap, DIRECT=whole, LONG=columns > whole,
            num_warps=4 if columns <= 4096 else 8, **common, **chosen,
        )  # fmt: skip
        return
    chunks = min(256, max(4, triton.next_power_of_2(columns // 1024)))
    while chunks > 4 and chunks * num_rows > 264:
        chunks //= 2
    runs = min(groups // 4, max(2, chunks // 2))
    chunk_cap = min(triton.cdiv(columns, chunks) + 4, cap)
    maxima, ticket = selection.new_empty((num_rows, groups)), selection.new_empty(num_rows)
    survivors = selection.new_empty((num_rows, chunks * chunk_cap))
    counts = selection.new_empty((num_rows, 3 * chunks))
    triton_topk.maxima_kernel[(runs, num_rows)](
        scores, lengths, request, maxima, ticket, scores.stride(0),
        C=runs, GROUPS=groups, TILE=max(1, 4096 // (groups // runs)), num_warps=8, **common,
    )  # fmt: skip
    wide = columns > 1024 * chunks
    triton_topk.long_kernel[(chunks, num_rows)](
        scores, lengths, request, selection, slots, flags, listed, table, maxima, survivors, counts, ticket,
        scores.stride(0), listed_stride, table_stride, chunk_cap,
        K=k, KP=kp, C=chunks, GROUPS=groups, W=256 if wide else 128, G=16 if wide else 8, CAP=cap,
        num_warps=8 if num_rows <= 8 or kp > 512 else 4, **common, **chosen,
    )  # fmt: skip
