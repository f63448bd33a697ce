"""The sparse indexer: score the compressed states of a row's request and keep the best.

    index_query       rotate and quantise the index queries, scale the head weights
    index_scores      score_j = sum_h w_h relu(<q_h, key_j>) for j < num_states, -inf beyond
    top_k             the k best visible states of every row, ascending; equal scores keep the smaller index
    candidate_blocks  the blocks of `block_states` states with the best maximum, always with the newest
                      visible block, ascending; later index sources look only inside
    select            all of it from the paged key cache, in a bounded workspace: what the model calls

T token rows, B requests, P pages of a request, Hi index heads, hi index dimension, S states, k selected
states, C candidate blocks. A row sees the first `num_states [T]` states of request `row_request [T]` (-1: a
padding row, which sees none); `page_table [B, P]` maps page p of a request to its page of the cache. Index
lists are int32 in state units, -1 padded at the end. A NaN score never becomes an index: `select` reports
rows with one among the states they may choose in `faulty [T]` bool. `select` also returns the selection as
cache slots (page * page_states + offset), which every layer that shares the selection reads (spec/model.md
3.7, 3.8). Under `deterministic` a row's scores do not depend on the rows beside it, in their last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops.library import declare


def _index_query_fake(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2])


def _index_scores_fake(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    row_request: Tensor,
    num_states: Tensor,
    max_states: int,
    record: str,
    page_states: int,
    impl: str,
) -> Tensor:
    return q.new_empty((q.shape[0], max_states), dtype=torch.float32)


def _top_k_fake(scores: Tensor, num_states: Tensor, k: int, impl: str) -> Tensor:
    return scores.new_empty((scores.shape[0], k), dtype=torch.int32)


def _candidate_blocks_fake(
    scores: Tensor, num_states: Tensor, num_blocks: int, block_states: int, impl: str
) -> Tensor:
    return scores.new_empty((scores.shape[0], num_blocks), dtype=torch.int32)


def _select_fake(
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
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    selection = q.new_empty((q.shape[0], k), dtype=torch.int32)
    blocks = q.new_empty((q.shape[0], num_blocks), dtype=torch.int32)
    return selection, torch.empty_like(selection), blocks, q.new_empty(q.shape[:1], dtype=torch.bool)


index_query = declare(
    "indexing",
    "index_query(Tensor q, Tensor head_weights, Tensor cos_sin, str record, bool quantise, str impl)"
    " -> (Tensor, Tensor)",
    fake=_index_query_fake,
)
index_scores = declare(
    "indexing",
    "index_scores(Tensor q, Tensor weights, Tensor keys, Tensor page_table, Tensor row_request,"
    " Tensor num_states, SymInt max_states, str record, int page_states, str impl) -> Tensor",
    fake=_index_scores_fake,
)
top_k = declare(
    "indexing", "top_k(Tensor scores, Tensor num_states, int k, str impl) -> Tensor", fake=_top_k_fake
)
candidate_blocks = declare(
    "indexing",
    "candidate_blocks(Tensor scores, Tensor num_states, int num_blocks, int block_states, str impl)"
    " -> Tensor",
    fake=_candidate_blocks_fake,
)
select = declare(
    "indexing",
    "select(Tensor q, Tensor weights, Tensor keys, Tensor page_table, Tensor row_request, Tensor num_states,"
    " Tensor candidates, int k, int num_blocks, int block_states, str record, int page_states,"
    " bool deterministic, str impl) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_select_fake,
    eager=True,
)
