"""Engram: one layer's n-gram memory. The table lives on the device, in pinned host memory or in the file."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsv41.model.inputs import StepInputs
from dsv41.model.linear import Context, Fp8Linear, parameter
from dsv41.ops.engram.op import engram_hash, engram_lookup, engram_write


class Engram(nn.Module):
    """`number` counts the config's Engram layers. Without `own_table`, `set_table` brings the table."""

    def __init__(self, context: Context, number: int, own_table: bool) -> None:
        super().__init__()
        config, engram = context.config, context.config.engram
        num_rows = engram.num_rows[number] if own_table else 0
        self.table = parameter(num_rows, engram.dim, dtype=torch.float8_e4m3fn)
        self.table_scale = parameter(num_rows, engram.dim // 32, dtype=torch.uint8)
        self.multipliers = parameter(engram.max_ngram, dtype=torch.int64)
        self.primes = parameter(engram.max_ngram - 1, engram.heads, dtype=torch.int64)
        self.offsets = parameter(engram.columns, dtype=torch.int64)
        self.kv = Fp8Linear(context, config.hidden_size * (config.copies + 1), engram.columns * engram.dim)
        self.query = parameter(config.copies, config.hidden_size)
        self.key = parameter(config.copies, config.hidden_size)
        self.pad_token, self.eps = engram.pad_token, config.norm_eps
        self.dtype, self.impl = context.dtype, context.backends.engram

    def set_table(self, table: Tensor, scale: Tensor) -> None:
        """Read rows from `table` e4m3 [rows, dim] and `scale` uint8 [rows, dim/32], wherever they live."""
        self.table = nn.Parameter(table, requires_grad=False)
        self.table_scale = nn.Parameter(scale, requires_grad=False)

    def hash(self, step: StepInputs, token_map: Tensor) -> Tensor:
        """The table rows of every token row, int64 [T, C]."""
        return engram_hash(
            step.token_ids,
            step.lookback,
            step.is_image,
            token_map,
            self.multipliers,
            self.primes,
            self.offsets,
            self.pad_token,
            self.impl,
        )

    def write(self, streams: Tensor, rows: Tensor, is_image: Tensor) -> Tensor:
        """streams [T, M, D] with the gated value of the looked-up rows added."""
        looked_up = engram_lookup(self.table, self.table_scale, rows, self.dtype, self.impl)
        return engram_write(streams, self.kv(looked_up), self.query, self.key, is_image, self.eps, self.impl)

    def forward(self, streams: Tensor, step: StepInputs, token_map: Tensor) -> Tensor:
        return self.write(streams, self.hash(step, token_map), step.is_image)
