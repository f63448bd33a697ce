"""The sparse indexer in plain PyTorch. Scores are rounded as the release rounds them: to the query's dtype
after the dot product, after the weighting and after the sum over heads (spec/arithmetic.md 2.7).

`select` goes request by request and tiles the rows of each, so that its workspace holds one request's keys
and `TILE_BYTES` of per-head scores, never a dense [rows, states] matrix of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops import records
from dsv41.ops.arithmetic import rotate

TILE_BYTES = 64 << 20  # bound on the float64 per-head scores of one tile of rows (at least one row)


def why_not(hardware: object, record: str | None) -> str | None:
    return None


def index_query(
    q: Tensor, head_weights: Tensor, cos_sin: Tensor, record: str, quantise: bool
) -> tuple[Tensor, Tensor]:
    heads, dim = q.shape[1:]
    turned = rotate(q, cos_sin)
    if record == "fp8_132":
        codes, scale = records.quantise_fp8(turned, block=dim)
        turned = records.dequantise_fp8(codes, scale, block=dim).to(q.dtype)
    elif quantise:
        turned = records.round_trip(turned, "mxfp4_32")
    weights = head_weights.to(q.dtype) * (dim**-0.5 * heads**-0.5)
    return turned.contiguous(), weights


def score(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """q [t, Hi, hi], weights [t, Hi], keys [S, hi] -> float32 [t, S]"""
    dots = (q.double() @ keys.double().mT).to(q.dtype).relu()
    return (dots * weights.unsqueeze(-1)).float().sum(1).to(q.dtype).float()


def _request_keys(
    keys: Tensor,
    page_table: Tensor,
    request: int,
    num_states: int,
    record: str,
    page_states: int,
    like: Tensor,
) -> Tensor:
    """The first `num_states` index keys of one request, [S, hi]."""
    state = torch.arange(num_states, device=like.device)
    slots = page_table[request, state // page_states].long() * page_states + state % page_states
    return records.read_slots(record, keys, slots, page_states, like.shape[-1], 0, like.dtype)


def _choose(scores: Tensor, eligible: Tensor, k: int) -> Tensor:
    """The k best eligible columns, ascending, then -1. Two stable sorts: ties keep the smaller index, and an
    eligible score of -inf still beats what is not eligible. [t, S] -> int32 [t, k]"""
    order = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = order.sort(dim=-1, descending=True, stable=True).indices
    rank = eligible.gather(1, order).sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(1, rank)[:, :k]
    missing = scores.shape[1]
    chosen = torch.where(eligible.gather(1, order), order, missing).sort(dim=-1).values
    chosen = torch.where(chosen < missing, chosen, -1).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]), value=-1)


def _visible(scores: Tensor, num_states: Tensor) -> Tensor:
    return torch.arange(scores.shape[1], device=scores.device) < num_states.unsqueeze(1)


def top_k(scores: Tensor, num_states: Tensor, k: int) -> Tensor:
    return _choose(scores, _visible(scores, num_states) & ~scores.isnan(), k)


def candidate_blocks(scores: Tensor, num_states: Tensor, num_blocks: int, block_states: int) -> Tensor:
    seen = torch.where(_visible(scores, num_states) & ~scores.isnan(), scores, -torch.inf)
    seen = torch.nn.functional.pad(seen, (0, -seen.shape[1] % block_states), value=-torch.inf)
    best = seen.unflatten(1, (-1, block_states)).amax(-1)
    newest = (num_states.unsqueeze(1) - 1).div(
        block_states, rounding_mode="floor"
    )  # -1 where nothing is visible
    block = torch.arange(best.shape[1], device=scores.device)
    best = torch.where(block == newest, torch.inf, best)
    return _choose(best, best > -torch.inf, num_blocks)


def _inside(candidates: Tensor, num_states: int, block_states: int) -> Tensor:
    """Candidate blocks [t, C] -> bool [t, S]: which states lie in one of them."""
    num_blocks = -(-num_states // block_states)
    listed = torch.zeros((candidates.shape[0], num_blocks + 1), dtype=torch.bool, device=candidates.device)
    unseen = (candidates < 0) | (candidates >= num_blocks)
    listed.scatter_(1, torch.where(unseen, num_blocks, candidates).long(), True)
    return listed[:, :num_blocks].repeat_interleave(block_states, dim=1)[:, :num_states]


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
    scores = torch.full((q.shape[0], max_states), -torch.inf, device=q.device)
    for request, rows, count in _tiles(row_request, num_states, q.shape[1]):
        request_keys = _request_keys(keys, page_table, request, count, record, page_states, q)
        scores[rows, :count] = score(q[rows], weights[rows], request_keys)
    return scores.masked_fill(~_visible(scores, num_states), -torch.inf)


def _tiles(row_request: Tensor, num_states: Tensor, heads: int) -> list[tuple[int, Tensor, int]]:
    """(request, rows, states) pieces that cover every row which sees a state."""
    pieces = []
    for request in row_request[num_states > 0].unique().tolist():
        rows = (row_request == request).nonzero().squeeze(1)
        count = int(num_states[rows].max())
        tile = max(1, TILE_BYTES // (8 * heads * count))
        pieces += [(request, part, count) for part in rows.split(tile)]
    return pieces


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
    selection = torch.full((num_rows, k), -1, dtype=torch.int32, device=device)
    slots = torch.full_like(selection, -1)
    blocks = torch.full((num_rows, num_blocks), -1, dtype=torch.int32, device=device)
    faulty = torch.zeros(num_rows, dtype=torch.bool, device=device)
    for request, rows, count in _tiles(row_request, num_states, q.shape[1]):
        request_keys = _request_keys(keys, page_table, request, count, record, page_states, q)
        scores = score(q[rows], weights[rows], request_keys)
        seen = _visible(scores, num_states[rows])
        if num_blocks:
            blocks[rows] = candidate_blocks(scores, num_states[rows], num_blocks, block_states)
        if candidates.shape[1]:
            seen &= _inside(candidates[rows], count, block_states)
        faulty[rows] = (scores.isnan() & seen).any(1)
        chosen = _choose(scores, seen & ~scores.isnan(), k)
        page = page_table[request].long()[(chosen.clamp(min=0) // page_states).long()]
        selection[rows] = chosen
        slots[rows] = torch.where(chosen < 0, -1, page * page_states + chosen % page_states).to(torch.int32)
    return selection, slots, blocks, faulty
