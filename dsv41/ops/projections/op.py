"""What a layer reads its input for: the joined low-rank projections, and beside them the small side products.

    down = quantise(x) @ (weight * scale)^T   [T, N]       rows: query down-projection | window KV
    side = x @ side_weight^T                  [T, n] fp32  rows: compressor KV | its gate | index head weights

Both read the same row and neither needs the other, so an implementation may run them on two CUDA streams. n
is 0 in a layer that owns neither compressor nor indexer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv41.ops.library import declare


def _project_inputs_fake(
    x: Tensor, weight: Tensor, scale: Tensor, side_weight: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    down = x.new_empty((x.shape[0], weight.shape[0]))
    return down, x.new_empty((x.shape[0], side_weight.shape[0]), dtype=torch.float32)


project_inputs = declare(
    "projections",
    "project_inputs(Tensor x, Tensor weight, Tensor scale, Tensor side_weight, bool quantise,"
    " bool deterministic, str linear_impl, str impl) -> (Tensor, Tensor)",
    fake=_project_inputs_fake,
)
