"""The released checkpoint: which tensors it must hold, and where a directory holds them.

Nothing here reads a weight. `checkpoint_tensors` lists every tensor of the release with our name for it;
`find_tensors` compares that list with the shard headers and refuses a directory that differs in any way.
Source of the table: spec/model.md, section 2.

    D hidden    H heads    d head_dim    R q_rank    O o_rank    G o_groups    M residual copies
    Hi, hi index heads and dim    E experts    I expert_dim    V vocabulary
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dsv41.config import ModelConfig

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

BLOCK = 32  # columns (and, for FP8, rows) that share one e8m0 scale byte
ITEM_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}  # keyed by safetensors dtype tag


class CheckpointError(ValueError):
    """A model directory that is not the checkpoint its config describes; in one sentence."""


class TensorSpec(NamedTuple):
    """One tensor of the release, and the place of its values among the decoder's parameters."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # safetensors tag, a key of ITEM_BYTES
    part: str  # "text", "draft" or "vision"
    target: str = ""  # the decoder's parameter; empty outside the text part
    expert: int | None = None  # position on the parameter's first axis, if experts are stacked there
    rows: tuple[int, int] | None = None  # half-open rows of the parameter (of its `expert`)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class StoredTensor(NamedTuple):
    """A tensor of the inventory, found: its bytes are `[offset, offset + spec.num_bytes)` of `path`."""

    spec: TensorSpec
    path: Path
    offset: int


# -- the inventory -------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """One line of the tables below. Lines that share a target are stacked on its rows, in table order."""

    name: str  # without .weight where `store` adds it
    store: str  # one of BF16, F32, FP8, FP4, TABLE; see _stored
    shape: tuple[int, ...]  # [out, in], in elements
    target: str = ""
    expert: int | None = None


def checkpoint_tensors(config: ModelConfig) -> list[TensorSpec]:
    """Every tensor of the checkpoint that `config` describes (the release: 96,085, 510,286,023,000 bytes)."""
    c = config
    tensors = list(_specs(_top_rows(c), part="text"))
    for layer in range(c.num_layers):
        rows = _block_rows(c, c.num_experts) + _source_rows(c, layer) + _engram_rows(c, layer)
        tensors += _specs(rows, part="text", prefix=f"layers.{layer}.")
    for stage in range(c.draft.stages):
        rows = _block_rows(c, c.draft.num_experts) + _stage_rows(c, stage)
        tensors += _specs(rows, part="draft", prefix=f"mtp.{stage}.")
    return tensors + list(_specs(_vision_rows(c), part="vision"))


def _top_rows(c: ModelConfig) -> list[_Row]:
    return [
        _Row("embed.weight", "BF16", (c.vocab_size, c.hidden_size), "embedding"),
        _Row("head.weight", "BF16", (c.vocab_size, c.hidden_size), "head"),
        _Row("norm.weight", "BF16", (c.hidden_size,), "norm"),
    ]


def _block_rows(c: ModelConfig, num_experts: int) -> list[_Row]:
    """What every block has, backbone or draft."""
    D, H, d, R, M, I = c.hidden_size, c.num_heads, c.head_dim, c.q_rank, c.copies, c.expert_dim  # noqa: E741
    O, G, E = c.o_rank, c.o_groups, num_experts  # noqa: E741
    mixes = (2 + M) * M
    rows = [
        _Row("attn_norm.weight", "BF16", (D,), "attention_norm"),
        _Row("hc_attn_fn", "F32", (mixes, M * D), "attention_hyper.fn"),
        _Row("hc_attn_base", "F32", (mixes,), "attention_hyper.base"),
        _Row("hc_attn_scale", "F32", (3,), "attention_hyper.scale"),
        _Row("attn.attn_sink", "F32", (H,), "attention.sink"),
        _Row("attn.wq_a", "FP8", (R, D), "attention.down"),
        _Row("attn.wkv", "FP8", (d, D), "attention.down"),
        _Row("attn.q_norm.weight", "BF16", (R,), "attention.q_norm"),
        _Row("attn.kv_norm.weight", "BF16", (d,), "attention.kv_norm"),
        _Row("attn.wq_b", "FP8", (H * d, R), "attention.up"),
        _Row("attn.wo_a", "FP8", (G * O, H * d // G), "attention.output_down"),
        _Row("attn.wo_b", "FP8", (D, G * O), "attention.output_up"),
        _Row("ffn_norm.weight", "BF16", (D,), "ffn_norm"),
        _Row("hc_ffn_fn", "F32", (mixes, M * D), "ffn_hyper.fn"),
        _Row("hc_ffn_base", "F32", (mixes,), "ffn_hyper.base"),
        _Row("hc_ffn_scale", "F32", (3,), "ffn_hyper.scale"),
        _Row("ffn.gate.weight", "BF16", (E, D), "moe.gate"),
        _Row("ffn.gate.bias", "F32", (E,), "moe.bias"),
        _Row("ffn.gate.bias_vl", "F32", (E,), "moe.image_bias"),
        _Row("ffn.shared_experts.w1", "FP8", (I, D), "moe.shared_gate_up"),
        _Row("ffn.shared_experts.w3", "FP8", (I, D), "moe.shared_gate_up"),
        _Row("ffn.shared_experts.w2", "FP8", (D, I), "moe.shared_down"),
    ]
    for e in range(E):
        rows += [
            _Row(f"ffn.experts.{e}.w1", "FP4", (I, D), "moe.gate_up", e),
            _Row(f"ffn.experts.{e}.w3", "FP4", (I, D), "moe.gate_up", e),
            _Row(f"ffn.experts.{e}.w2", "FP4", (D, I), "moe.down", e),
        ]
    return rows


def _source_rows(c: ModelConfig, layer: int) -> list[_Row]:
    """What a layer has because others read its compressed KV or its selection."""
    D, d, Hi, hi = c.hidden_size, c.head_dim, c.index_heads, c.index_dim
    rows = []
    if layer in c.kv_sources:
        rows.append(_Row("attn.compressor.wkv.weight", "BF16", (d, D), "attention.side"))
        if c.ratios[layer] > 1:  # a group of one token has nothing to weigh
            rows.append(_Row("attn.compressor.wgate.weight", "BF16", (d, D), "attention.side"))
        rows += [
            _Row("attn.compressor.norm.weight", "BF16", (d,), "attention.compressor.norm"),
            _Row("attn.indexer.wk.weight", "BF16", (hi, d), "attention.compressor.index_key"),
            _Row("attn.indexer.k_norm.weight", "BF16", (hi,), "attention.compressor.index_key_norm"),
        ]
    if layer in c.index_sources:
        rows += [
            _Row("attn.indexer.wq_b", "FP8", (Hi * hi, c.q_rank), "attention.up"),
            _Row("attn.indexer.weights_proj.weight", "BF16", (Hi, D), "attention.side"),
        ]
    return rows


def _engram_rows(c: ModelConfig, layer: int) -> list[_Row]:
    g = c.engram
    if layer not in g.layers:
        return []
    D, M, columns = c.hidden_size, c.copies, (g.max_ngram - 1) * g.heads
    return [
        _Row("engram.embed", "TABLE", (g.num_rows[g.layers.index(layer)], g.dim), "engram.table"),
        _Row("engram.wkv", "FP8", (D * (M + 1), columns * g.dim), "engram.kv"),
        _Row("engram.q_weight", "BF16", (M, D), "engram.query"),
        _Row("engram.k_weight", "BF16", (M, D), "engram.key"),
    ]


def _stage_rows(c: ModelConfig, stage: int) -> list[_Row]:
    """What only the first and only the last draft stage have (one and the same when there is one)."""
    D, rank = c.hidden_size, c.draft.markov_rank
    rows = []
    if stage == 0:
        rows += [
            _Row("main_proj", "FP8", (D, len(c.draft.target_layers) * D)),
            _Row("main_norm.weight", "BF16", (D,)),
        ]
    if stage == c.draft.stages - 1:
        rows += [
            _Row("norm.weight", "BF16", (D,)),
            _Row("markov_head.embed.weight", "BF16", (c.vocab_size, rank)),
            _Row("markov_head.head.weight", "BF16", (c.vocab_size, rank)),
            _Row("confidence_head.proj.weight", "BF16", (1, D + rank)),
        ]
    return rows


def _vision_rows(c: ModelConfig) -> list[_Row]:
    v = c.vision
    if v is None:
        return []
    D, h, wide = c.hidden_size, v.hidden_size, v.intermediate_size
    rows = _biased("vision.patch_embed.proj", h, 3 * v.patch * v.patch)
    for block in (f"vision.blocks.{i}." for i in range(v.num_layers)):
        rows += [_Row(block + "norm1.weight", "BF16", (h,)), _Row(block + "norm2.weight", "BF16", (h,))]
        rows += _biased(block + "attn.wqkv", 3 * h, h) + _biased(block + "attn.wo", h, h)
        rows += [_Row(block + "mlp.w1.weight", "BF16", (2 * wide, h))]
        rows += [_Row(block + "mlp.w2.weight", "BF16", (h, wide))]
    rows += [_Row("vision.norm.weight", "BF16", (h,))]
    rows += _biased("aligner.w1", D, h * v.downsample * v.downsample) + _biased("aligner.w2", D, D)
    return rows + [_Row(name, "BF16", (D,)) for name in ("image_start", "image_end", "image_newline")]


def _biased(name: str, num_out: int, num_in: int) -> list[_Row]:
    return [_Row(f"{name}.weight", "BF16", (num_out, num_in)), _Row(f"{name}.bias", "BF16", (num_out,))]


def _specs(rows: list[_Row], *, part: str, prefix: str = "") -> Iterator[TensorSpec]:
    filled: Counter[tuple[str, int | None]] = Counter()  # rows of each target that earlier lines have taken
    for row in rows:
        for name, dtype, shape, target in _stored(row):
            if part != "text":
                yield TensorSpec(prefix + name, shape, dtype, part)
                continue
            start = filled[target, row.expert]
            filled[target, row.expert] += shape[0]
            place = (start, start + shape[0])
            yield TensorSpec(prefix + name, shape, dtype, part, prefix + target, row.expert, place)


def _stored(row: _Row) -> Iterator[tuple[str, str, tuple[int, ...], str]]:
    """Yield (name, dtype tag, shape, target) of the one or two tensors that a table line stands for.

    FP8: e4m3 [out, in] with a scale per 32x32 block. FP4: two e2m1 codes a byte, [out, in / 2], with a scale
    per 32 columns. TABLE: e4m3 rows with a scale per 32 columns. BF16 and F32 are stored as they are.
    """
    if row.store in ("BF16", "F32"):
        yield row.name, row.store, row.shape, row.target
        return
    num_out, num_in = row.shape
    weight, scale = (f"{row.target}.weight", f"{row.target}.scale")
    if row.store != "FP8":
        weight, scale = (f"{row.target}", f"{row.target}_scale")
    dtype, width = ("I8", num_in // 2) if row.store == "FP4" else ("F8_E4M3", num_in)
    scale_rows = -(-num_out // BLOCK) if row.store == "FP8" else num_out
    yield f"{row.name}.weight", dtype, (num_out, width), weight
    yield f"{row.name}.scale", "F8_E8M0", (scale_rows, -(-num_in // BLOCK)), scale


# -- the files -----------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """A tensor as a shard's header describes it."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    num_bytes: int


def find_tensors(config: ModelConfig, directory: str | Path) -> list[StoredTensor]:
    """Locate every tensor of the inventory, in file order; only the index and the shard headers are read.

    Raises CheckpointError for a missing or truncated shard, an index that disagrees with a shard, and a
    tensor that is missing, unexpected, or of another shape or dtype than `config` implies.
    """
    directory = Path(directory)
    entries = _read_directory(directory)
    specs = {spec.name: spec for spec in checkpoint_tensors(config)}
    missing = [name for name in specs if name not in entries]
    unexpected = [name for name in entries if name not in specs]
    if unexpected:
        also = f", and {missing[0]!r} is missing" if missing else ""
        where = entries[unexpected[0]].path
        raise CheckpointError(f"{where}: tensor {unexpected[0]!r} is not part of this model{also}")
    if missing:
        raise CheckpointError(f"{directory}: tensor {missing[0]!r} is missing ({len(missing)} in all)")
    found = [_check_entry(spec, entries[name]) for name, spec in specs.items()]
    return sorted(found, key=lambda tensor: (tensor.path, tensor.offset))


def _check_entry(spec: TensorSpec, entry: _Entry) -> StoredTensor:
    if entry.dtype != spec.dtype:
        raise CheckpointError(f"{entry.path}: tensor {spec.name!r} is {entry.dtype}, expected {spec.dtype}")
    if entry.shape != spec.shape:
        shapes = f"has shape {list(entry.shape)}, expected {list(spec.shape)}"
        raise CheckpointError(f"{entry.path}: tensor {spec.name!r} {shapes}")
    return StoredTensor(spec, entry.path, entry.offset)


def _read_directory(directory: Path) -> dict[str, _Entry]:
    """Every tensor of a sharded or a single-file checkpoint, by name."""
    index_path = directory / INDEX_FILE
    if not index_path.exists():
        path = directory / SINGLE_FILE
        if not path.exists():
            raise CheckpointError(f"{directory}: neither {INDEX_FILE} nor {SINGLE_FILE} is here")
        return _read_header(path)
    index = _parse_object(index_path.read_bytes(), index_path).get("weight_map")
    if not isinstance(index, dict):
        raise CheckpointError(f"{index_path}: there is no 'weight_map'")
    first_tensor: dict[str, str] = {}
    for name, file in index.items():
        first_tensor.setdefault(file, name)
    for file, name in first_tensor.items():  # before any header: a missing shard is the likeliest fault
        if not (directory / file).is_file():
            raise CheckpointError(f"{directory / file}: this shard is missing; it should hold {name!r}")
    entries: dict[str, _Entry] = {}
    for file in first_tensor:
        for name, entry in _read_header(directory / file).items():
            if index.get(name) != file:
                claim = f"{INDEX_FILE} says {index.get(name, 'nothing of it')}"
                raise CheckpointError(f"{entry.path}: tensor {name!r} is here, but {claim}")
            entries[name] = entry
    for name, file in index.items():
        if name not in entries:
            raise CheckpointError(f"{directory / file}: tensor {name!r} is in {INDEX_FILE}, but not here")
    return entries


def _read_header(path: Path) -> dict[str, _Entry]:
    """Parse a safetensors header: 8 bytes of little-endian length, JSON, then the tensors without gaps."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or header_bytes > file_bytes - 8:
            raise CheckpointError(f"{path}: the file is cut off inside its header, at {file_bytes} bytes")
        header = _parse_object(file.read(header_bytes), path)
    header.pop("__metadata__", None)
    entries = [_parse_entry(name, item, path, 8 + header_bytes) for name, item in header.items()]
    entries.sort(key=lambda entry: entry.offset)
    end = 8 + header_bytes
    for entry in entries:
        if entry.offset != end:
            raise CheckpointError(f"{path}: tensor {entry.name!r} starts at byte {entry.offset}, not {end}")
        end += entry.num_bytes
        if end > file_bytes:
            raise CheckpointError(f"{path}: the file is cut off at {file_bytes} bytes, inside {entry.name!r}")
    if end != file_bytes:
        raise CheckpointError(f"{path}: {file_bytes - end} bytes follow the last tensor")
    return {entry.name: entry for entry in entries}


def _parse_entry(name: str, item: Any, path: Path, data: int) -> _Entry:
    try:
        dtype, shape, (start, stop) = str(item["dtype"]), tuple(item["shape"]), item["data_offsets"]
        num_bytes = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
        consistent = stop - start == num_bytes or dtype not in ITEM_BYTES  # the inventory refuses those
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header entry of tensor {name!r} is malformed") from error
    if not consistent:
        raise CheckpointError(f"{path}: tensor {name!r} has {stop - start} bytes, its shape says {num_bytes}")
    return _Entry(name, path, dtype, shape, data + start, stop - start)


def _parse_object(text: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise CheckpointError(f"{path}: not valid JSON where it should be ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: the JSON is not an object")
    return value
