"""The inventory, the loader and the stand-in weights, against the golden checkpoints.

The decoder is played by `StandIn`: bare modules with the tensor names and shapes that the inventory's targets
imply. `expected_tensors` says by hand which released tensors each of those is made of.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dsv41.config import ModelConfig, engram_primes
from dsv41.model import weights
from dsv41.model.checkpoint import ITEM_BYTES, CheckpointError, checkpoint_tensors
from dsv41.model.weights import DTYPES, default_token_map, engram_constants, init_dummy, load_weights

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
GOLDEN = SHARED / "golden"
MODELS = ("tiny", "kernel_dims")
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


class Engram(nn.Module):
    def set_table(self, table: Tensor, scale: Tensor) -> None:
        self.outside = (table, scale)


class StandIn(nn.Module):
    """The decoder's named tensors, filled with a poison byte so that an unwritten element shows."""

    def __init__(self, config: ModelConfig, own_tables: bool = True) -> None:
        super().__init__()
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for spec in checkpoint_tensors(config):
            if spec.target and spec.rows:
                lead = () if spec.expert is None else (spec.expert + 1,)
                dtypes[spec.target] = DTYPES[spec.dtype]
                shapes[spec.target] = (*lead, spec.rows[1], *spec.shape[1:])  # the last one is the largest
        for layer, constants in engram_constants(config).items():
            shapes |= {f"layers.{layer}.engram.{k}": tuple(v.shape) for k, v in constants._asdict().items()}
        if config.engram.layers:
            shapes["token_map"] = (config.vocab_size,)
        for layer in range(config.num_layers):  # a layer without side products has a side of no rows
            shapes.setdefault(f"layers.{layer}.attention.side", (0, config.hidden_size))
            dtypes.setdefault(f"layers.{layer}.attention.side", torch.bfloat16)
        for name, shape in shapes.items():
            if "engram.table" in name and not own_tables:
                shape = (0, *shape[1:])
            tensor = torch.empty(shape, dtype=dtypes.get(name, torch.int64))
            tensor.view(torch.uint8).fill_(0xA5)
            self.place(name, tensor)

    def place(self, name: str, tensor: Tensor) -> None:
        module: nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, Engram() if part == "engram" else nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))


def model_config(model: str) -> ModelConfig:
    return ModelConfig.load(GOLDEN / model / "model")


def released_config() -> ModelConfig:
    return ModelConfig.load(SHARED / "spec" / "data" / "config.json")


def raw_tensors(directory: Path) -> dict[str, Tensor]:
    return {k: v for path in sorted(directory.glob("*.safetensors")) for k, v in load_file(path).items()}


def load(config: ModelConfig, directory: Path, tables: str = "device") -> tuple[StandIn, weights.LoadReport]:
    decoder = StandIn(config, own_tables=tables == "device")
    return decoder, load_weights(
        decoder, config, directory, token_map=default_token_map(config), tables=tables
    )


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


# -- inventory --------------------------------------------------------------------------------------------


def test_release_inventory() -> None:
    tensors = checkpoint_tensors(released_config())
    assert len(tensors) == len({t.name for t in tensors}) == 96_085
    assert sum(t.num_bytes for t in tensors) == 510_286_023_000
    sizes = dict.fromkeys(ITEM_BYTES, 0)
    for t in tensors:
        sizes[t.dtype] += t.num_bytes
    assert sizes == {
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "I8": 278_585_671_680,
    }
    parts = {p: [t.num_bytes for t in tensors if t.part == p] for p in ("draft", "vision")}
    assert {p: (len(b), sum(b)) for p, b in parts.items()} == {
        "draft": (2_401, 7_932_874_632),
        "vision": (266, 970_536_960),
    }


def test_release_inventory_matches_the_schema() -> None:
    """The published schema counts the tensors of each name pattern, shape and dtype."""
    schema: Counter[tuple[object, ...]] = Counter()
    for item in json.loads((SHARED / "spec" / "data" / "tensor_schema.json").read_text()):
        pattern = re.sub(r"\{\w+\}", "#", item["name"])
        schema[re.sub(r"\.\d+\.", ".#.", pattern), tuple(item["shape"]), item["dtype"]] += item["count"]
    ours: Counter[tuple[object, ...]] = Counter()
    for tensor in checkpoint_tensors(released_config()):
        ours[re.sub(r"\.\d+\.", ".#.", tensor.name), tensor.shape, tensor.dtype] += 1
    assert ours == schema


@pytest.mark.parametrize("model", MODELS)
def test_golden_inventory(model: str) -> None:
    tags = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0", torch.int8: "I8"}
    tags |= {torch.bfloat16: "BF16", torch.float32: "F32"}
    raw = {k: (tuple(v.shape), tags[v.dtype]) for k, v in raw_tensors(GOLDEN / model / "model").items()}
    tensors = checkpoint_tensors(model_config(model))
    assert {t.name: (t.shape, t.dtype) for t in tensors} == raw
    assert len(tensors) == {"tiny": 1433, "kernel_dims": 760}[model]


# -- loading ----------------------------------------------------------------------------------------------

# Our tensor in a layer: the released tensors whose rows it holds, in order; a layer may lack some of them.
PLAIN = {
    "attention_norm": ["attn_norm.weight"],
    "ffn_norm": ["ffn_norm.weight"],
    **{f"attention_hyper.{k}": [f"hc_attn_{k}"] for k in ("fn", "base", "scale")},
    **{f"ffn_hyper.{k}": [f"hc_ffn_{k}"] for k in ("fn", "base", "scale")},
    "attention.sink": ["attn.attn_sink"],
    "attention.q_norm": ["attn.q_norm.weight"],
    "attention.kv_norm": ["attn.kv_norm.weight"],
    "attention.side": [
        "attn.compressor.wkv.weight",
        "attn.compressor.wgate.weight",
        "attn.indexer.weights_proj.weight",
    ],
    "attention.compressor.norm": ["attn.compressor.norm.weight"],
    "attention.compressor.index_key": ["attn.indexer.wk.weight"],
    "attention.compressor.index_key_norm": ["attn.indexer.k_norm.weight"],
    "moe.gate": ["ffn.gate.weight"],
    "moe.bias": ["ffn.gate.bias"],
    "moe.image_bias": ["ffn.gate.bias_vl"],
    "engram.table": ["engram.embed.weight"],
    "engram.table_scale": ["engram.embed.scale"],
    "engram.query": ["engram.q_weight"],
    "engram.key": ["engram.k_weight"],
}
SCALED = {
    "attention.down": ["attn.wq_a", "attn.wkv"],
    "attention.up": ["attn.wq_b", "attn.indexer.wq_b"],
    "attention.output_down": ["attn.wo_a"],
    "attention.output_up": ["attn.wo_b"],
    "moe.shared_gate_up": ["ffn.shared_experts.w1", "ffn.shared_experts.w3"],
    "moe.shared_down": ["ffn.shared_experts.w2"],
    "engram.kv": ["engram.wkv"],
}
EXPERTS = {"moe.gate_up": ["w1", "w3"], "moe.down": ["w2"]}


def expected_tensors(config: ModelConfig, raw: dict[str, Tensor]) -> dict[str, Tensor]:
    """The decoder's tensors, joined by hand from the released ones."""
    joined = {"embedding": raw["embed.weight"], "head": raw["head.weight"], "norm": raw["norm.weight"]}
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        sources = dict(PLAIN)
        for ours, names in SCALED.items():
            sources |= {f"{ours}.{kind}": [f"{n}.{kind}" for n in names] for kind in ("weight", "scale")}
        for ours, names in sources.items():
            rows = [raw[at + name].view(raw[at + name].dtype) for name in names if at + name in raw]
            if rows:
                joined[at + ours] = torch.cat([row.view(torch.uint8) for row in rows]).view(rows[0].dtype)
        joined.setdefault(at + "attention.side", torch.empty(0, config.hidden_size, dtype=torch.bfloat16))
        for ours, names in EXPERTS.items():
            for ending, kind in (("", "weight"), ("_scale", "scale")):
                experts = [
                    torch.cat([raw[f"{at}ffn.experts.{e}.{n}.{kind}"].view(torch.uint8) for n in names])
                    for e in range(config.num_experts)
                ]
                joined[f"{at}{ours}{ending}"] = torch.stack(experts)
    return joined


@pytest.mark.parametrize("model", MODELS)
def test_every_byte_arrives(model: str) -> None:
    config, directory = model_config(model), GOLDEN / model / "model"
    raw = raw_tensors(directory)
    decoder, report = load(config, directory)
    expected = expected_tensors(config, raw)
    loaded = {k: v for k, v in decoder.state_dict().items() if v.dtype != torch.int64}
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bytes(loaded[name], tensor), name
    skipped = {k: v for k, v in raw.items() if not k.startswith(("layers.", "embed.", "head.", "norm."))}
    assert {(s.name, s.num_bytes) for s in report.skipped} == {(k, v.nbytes) for k, v in skipped.items()}
    assert report.num_tensors == len(raw) - len(skipped)
    assert report.num_bytes == sum(v.nbytes for v in raw.values()) - sum(v.nbytes for v in skipped.values())
    assert "draft" in str(report)
    assert "vision" in str(report)


@pytest.mark.parametrize("tables", ["host", "disk"])
@pytest.mark.parametrize("model", MODELS)
def test_tables_outside_the_decoder(model: str, tables: str) -> None:
    config, directory = model_config(model), GOLDEN / model / "model"
    raw = raw_tensors(directory)
    decoder, report = load(config, directory, tables)
    bytes_outside = 0
    for layer in config.engram.layers:
        table, scale = decoder.get_submodule(f"layers.{layer}.engram").outside
        assert table.dtype == torch.float8_e4m3fn
        assert scale.dtype == torch.uint8
        assert same_bytes(table, raw[f"layers.{layer}.engram.embed.weight"])
        assert same_bytes(scale, raw[f"layers.{layer}.engram.embed.scale"])
        bytes_outside += table.nbytes + scale.nbytes
    assert report.mapped_bytes == (bytes_outside if tables == "disk" else 0)


def test_single_file(tmp_path: Path) -> None:
    config, directory = model_config("tiny"), GOLDEN / "tiny" / "model"
    save_file(raw_tensors(directory), tmp_path / "model.safetensors")
    one, _ = load(config, tmp_path)
    two, _ = load(config, directory)
    for name, tensor in two.state_dict().items():
        assert same_bytes(one.state_dict()[name], tensor), name


def test_progress_reaches_the_total() -> None:
    config, seen = model_config("tiny"), []
    decoder, token_map = StandIn(config), default_token_map(config)
    report = load_weights(
        decoder,
        config,
        GOLDEN / "tiny" / "model",
        token_map=token_map,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert len(seen) == report.num_tensors
    assert seen[-1] == (report.num_bytes, report.num_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# -- memory -----------------------------------------------------------------------------------------------


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status).group(1)) * 1024


def resident_bytes(path: Path) -> tuple[int, int]:
    """(mapped, resident) bytes of this process's mappings of a file."""
    size = resident = 0
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if str(path) in mapping.split("\n", 1)[0]:
            size += int(re.search(r"Size:\s+(\d+) kB", mapping).group(1)) * 1024
            resident += int(re.search(r"Rss:\s+(\d+) kB", mapping).group(1)) * 1024
    return size, resident


def test_loading_holds_no_second_copy() -> None:
    """Copies of 43 MB go by; the process may grow by less than two of the largest tensors (4.2 MB).

    File-backed pages are not counted: a mapped shard is resident while it is open, as for any reader by mmap.
    """
    config, directory, grown = model_config("kernel_dims"), GOLDEN / "kernel_dims" / "model", []
    load(config, directory)  # imports and allocator pools are paid for
    decoder, token_map = StandIn(config), default_token_map(config)  # written, so its pages exist
    before = anonymous_bytes()
    report = load_weights(
        decoder,
        config,
        directory,
        token_map=token_map,
        progress=lambda *_: grown.append(anonymous_bytes() - before),
    )
    largest = max(t.num_bytes for t in checkpoint_tensors(config) if t.part == "text")
    assert report.num_bytes > 8 * largest
    assert max(grown) < 2 * largest


def sparse_checkpoint(config: ModelConfig, directory: Path) -> Path:
    """A single file of zeros without blocks on disk, as large as `config` says."""
    header, end = {}, 0
    for spec in checkpoint_tensors(config):
        offsets = [end, end + spec.num_bytes]
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = directory / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


def test_disk_tables_are_not_paged_in(tmp_path: Path) -> None:
    """Loading maps 273 MB of table and reads nothing; 24 rows then cost a few pages each."""
    small = model_config("tiny")
    g = dataclasses.replace(small.engram, layers=(1,), search_start=460_000)
    rows = sum(map(sum, engram_primes(1, 3, g.heads, g.search_start)[0]))
    config = dataclasses.replace(small, engram=dataclasses.replace(g, num_rows=(rows,)))
    path = sparse_checkpoint(config, tmp_path)
    decoder, report = load(config, tmp_path, "disk")
    size, resident = resident_bytes(path)
    assert size >= report.mapped_bytes > 256 * 2**20
    assert resident == 0
    table, _ = decoder.get_submodule("layers.1.engram").outside
    assert not table[torch.linspace(0, rows - 1, 24).long()].view(torch.uint8).any()
    assert 0 < resident_bytes(path)[1] < 2**20


# -- refusals ---------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Tensor]], object]


def rename(tensors: dict[str, Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


def set_scale_byte(tensors: dict[str, Tensor], name: str, byte: int) -> None:
    tensors[name].view(torch.uint8)[-1, -1] = byte


def rewrite(directory: Path, file: str, change: Change) -> None:
    """Change the tensors of one shard, and the index with them."""
    tensors = load_file(directory / file)
    before = set(tensors)
    change(tensors)
    save_file(tensors, directory / file)
    index_path = directory / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if k not in before}
    index["weight_map"] |= dict.fromkeys(tensors, file)
    index_path.write_text(json.dumps(index))


def reindex(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def overwrite(path: Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.write(data)


W = "layers.0.attn.wkv.weight"
S = "layers.0.attn.wkv.scale"
REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda d: (d / SECOND).unlink(), f"{SECOND}: this shard is missing"),
    "missing scale": (lambda d: rewrite(d, FIRST, lambda t: t.pop(S)), f"tensor '{S}' is missing"),
    "missing weight": (
        lambda d: rewrite(d, FIRST, lambda t: t.pop("norm.weight")),
        "'norm.weight' is missing",
    ),
    "renamed draft tensor": (
        lambda d: rewrite(d, SECOND, lambda t: rename(t, "mtp.0.main_norm.weight", "mtp.0.main.weight")),
        f"{SECOND}: tensor 'mtp.0.main.weight' is not part .* 'mtp.0.main_norm.weight' is missing",
    ),
    "unknown tensor": (
        lambda d: rewrite(d, FIRST, lambda t: t.update({"layers.0.bonus": torch.zeros(3)})),
        f"{FIRST}: tensor 'layers.0.bonus' is not part of this model$",
    ),
    "wrong dtype": (
        lambda d: rewrite(d, FIRST, lambda t: t.update({"norm.weight": t["norm.weight"].float()})),
        f"{FIRST}: tensor 'norm.weight' is F32, expected BF16",
    ),
    "foreign dtype": (
        lambda d: rewrite(d, FIRST, lambda t: t.update({"norm.weight": t["norm.weight"].double()})),
        f"{FIRST}: tensor 'norm.weight' is F64, expected BF16",
    ),
    "wrong shape": (
        lambda d: rewrite(d, FIRST, lambda t: t.update({W: t[W][:32].clone()})),
        rf"{FIRST}: tensor '{W}' has shape \[32, 128\], expected \[64, 128\]",
    ),
    "NaN scale": (
        lambda d: rewrite(d, FIRST, lambda t: set_scale_byte(t, S, 255)),
        f"{FIRST}: tensor '{S}' holds scale byte 255",
    ),
    "NaN expert scale": (
        lambda d: rewrite(d, FIRST, lambda t: set_scale_byte(t, "layers.0.ffn.experts.3.w2.scale", 255)),
        f"{FIRST}: tensor 'layers.0.ffn.experts.3.w2.scale' holds scale byte 255",
    ),
    "cut off in the data": (
        lambda d: os.truncate(d / FIRST, (d / FIRST).stat().st_size - 1),
        f"{FIRST}: the file is cut off at .* bytes, inside 'layers",
    ),
    "cut off in the header": (
        lambda d: os.truncate(d / FIRST, 500),
        f"{FIRST}: the file is cut off inside its header",
    ),
    "empty shard": (lambda d: os.truncate(d / FIRST, 0), f"{FIRST}: the file is cut off inside its header"),
    "garbled header": (lambda d: overwrite(d / FIRST, (9).to_bytes(8, "little")), f"{FIRST}: not valid JSON"),
    "trailing bytes": (
        lambda d: os.truncate(d / FIRST, (d / FIRST).stat().st_size + 4),
        f"{FIRST}: 4 bytes follow the last tensor",
    ),
    "index names a tensor the shard lacks": (
        lambda d: reindex(d, lambda index: index.update({"layers.0.bonus": FIRST})),
        f"{FIRST}: tensor 'layers.0.bonus' is in .*index.json, but not here",
    ),
    "index sends a tensor to the other shard": (
        lambda d: reindex(d, lambda index: index.update({W: SECOND})),
        f"{FIRST}: tensor '{W}' is here, but .*index.json says {SECOND}",
    ),
    "no checkpoint": (lambda d: [path.unlink() for path in d.glob("model*")], "neither .*index.json nor"),
    "garbled index": (
        lambda d: overwrite(d / "model.safetensors.index.json", b"["),
        "index.json: not valid JSON",
    ),
    "index without a map": (
        lambda d: (d / "model.safetensors.index.json").write_text("{}"),
        "index.json: there is no 'weight_map'",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_by_name_and_at_once(case: str, tmp_path: Path) -> None:
    damage, sentence = REFUSALS[case]
    config, directory = model_config("tiny"), tmp_path / "model"
    shutil.copytree(GOLDEN / "tiny" / "model", directory, copy_function=shutil.copyfile)
    directory.chmod(0o755)
    damage(directory)
    decoder, started = StandIn(config), time.process_time()
    with pytest.raises(CheckpointError, match=sentence) as error:
        load_weights(decoder, config, directory, token_map=default_token_map(config))
    assert time.process_time() - started < 2
    assert "\n" not in str(error.value)
    if "NaN" not in case:  # all other faults are found before the first weight is read
        assert all((t.view(torch.uint8) == 0xA5).all() for t in decoder.state_dict().values())


def bytes_read() -> int:
    """What this process has asked files for, cached or not."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text()).group(1))


def test_a_release_sized_directory_is_checked_by_its_header_alone(tmp_path: Path) -> None:
    """96,085 tensors, 510 GB in one sparse file."""
    config = released_config()
    path = sparse_checkpoint(config, tmp_path)
    before = bytes_read()
    found = weights.find_tensors(config, tmp_path)
    read = bytes_read() - before
    assert sum(tensor.spec.num_bytes for tensor in found) == 510_286_023_000
    header = path.stat().st_size - 510_286_023_000
    assert header <= read < header + 2**16
    assert resident_bytes(path) == (0, 0)


def test_arguments_are_checked() -> None:
    config, directory = model_config("tiny"), GOLDEN / "tiny" / "model"
    decoder, token_map = StandIn(config), default_token_map(config)
    with pytest.raises(ValueError, match="tables must be one of device, host, disk, not 'tape'"):
        load_weights(decoder, config, directory, token_map=token_map, tables="tape")
    with pytest.raises(ValueError, match="need a token_map"):
        load_weights(decoder, config, directory)
    with pytest.raises(ValueError, match=r"token_map must be int64 \[512\], not torch.int64 \[511\]"):
        load_weights(decoder, config, directory, token_map=token_map[1:])
    with pytest.raises(ValueError, match="token_map must hold ids from 0 to 381, not 500"):
        load_weights(decoder, config, directory, token_map=token_map.clamp(max=1) * 500)
    with pytest.raises(ValueError, match="draft tensors have no place here"):
        load_weights(decoder, config, directory, token_map=token_map, unused=("vision",))


def test_a_decoder_tensor_that_nothing_fills_is_an_error() -> None:
    config = model_config("tiny")
    decoder = StandIn(config)
    decoder.place("layers.0.attention.query_bias", torch.zeros(8))
    with pytest.raises(AssertionError, match=r"layers\.0\.attention\.query_bias.*fills 0 of 8"):
        load_weights(decoder, config, GOLDEN / "tiny" / "model", token_map=default_token_map(config))


# -- derived integers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_golden_constants(model: str) -> None:
    config = model_config(model)
    golden = load_file(GOLDEN / model / "golden" / "engram_tables.safetensors")
    decoder = StandIn(config)
    weights.set_constants(decoder, config, golden["token_map"])
    written = decoder.state_dict()
    assert torch.equal(written["token_map"], golden["token_map"])
    for i, layer in enumerate(config.engram.layers):
        for name in ("multipliers", "primes", "offsets"):
            assert torch.equal(written[f"layers.{layer}.engram.{name}"], golden[name][i]), (layer, name)


def test_release_constants() -> None:
    config = released_config()
    data = json.loads((SHARED / "spec" / "data" / "engram_constants.json").read_text())
    constants = engram_constants(config)
    assert list(constants) == data["engram_layer_ids"]
    for i, (multipliers, primes, offsets) in enumerate(constants.values()):
        assert multipliers.tolist() == data["multipliers_per_layer_by_lookback"][i]
        assert primes.tolist() == data["primes_[layer][ngram 2..4][head]"][i]
        assert offsets.tolist() == data["row_offsets_[layer][24 columns, ngram-major then head]"][i]
        assert int(primes.sum()) == data["rows_per_layer"][i]
    stand_in = default_token_map(config)
    assert stand_in.shape == (config.vocab_size,)
    assert int(stand_in.max()) == config.engram.compressed_vocab - 1


# -- stand-in weights -------------------------------------------------------------------------------------

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def dequantise(weight: Tensor, scale: Tensor) -> Tensor:
    values = weight.float()
    if weight.dtype == torch.uint8:
        codes = torch.stack((weight & 15, weight >> 4), -1).flatten(-2).long()
        values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    elif scale.shape[-2] != weight.shape[-2]:
        scale = scale.repeat_interleave(32, -2)[: weight.shape[-2]]
    return values * torch.exp2(scale.repeat_interleave(32, -1)[..., : values.shape[-1]].float() - 127)


def dummy(model: str, seed: int) -> dict[str, Tensor]:
    config = model_config(model)
    decoder = StandIn(config)
    init_dummy(decoder, config, seed)
    return decoder.state_dict()


def test_dummy_is_a_function_of_the_seed() -> None:
    one, same, other = dummy("tiny", 7), dummy("tiny", 7), dummy("tiny", 8)
    assert all(same_bytes(one[name], same[name]) for name in one)
    drawn = [name for name, t in one.items() if t.dtype != torch.int64 and t.numel() > 3]
    assert not [name for name in drawn if same_bytes(one[name], other[name])]


def test_dummy_tensors_do_not_depend_on_each_other() -> None:
    config, whole = model_config("tiny"), dummy("tiny", 7)
    decoder = StandIn(config)
    del decoder.get_submodule("layers")._modules["3"]
    init_dummy(decoder, config, 7)
    assert all(same_bytes(tensor, whole[name]) for name, tensor in decoder.state_dict().items())


def test_dummy_without_engram() -> None:
    """A model that has no such layer at all, and so no compressed vocabulary either."""
    small = model_config("tiny")
    config = dataclasses.replace(small, engram=type(small.engram)())
    decoder = StandIn(config)
    init_dummy(decoder, config, 7)
    assert not [name for name in decoder.state_dict() if "engram" in name]


@pytest.mark.parametrize("model", MODELS)
def test_dummy_values(model: str) -> None:
    """Finite; matrices have deviation gain / sqrt(fan_in), made with scale bytes that vary."""
    tensors = dummy(model, 0)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int64:
            continue
        assert tensor.float().isfinite().all(), name
        leaf = name.rpartition(".")[2]
        pair = {"weight": name[: -len("weight")] + "scale"}.get(leaf, name + "_scale")
        if tensor.is_floating_point() and leaf.endswith("norm"):
            assert 0.9 < tensor.float().mean() < 1.1, name
        elif pair in tensors and tensors[pair].numel() >= 64:
            values = dequantise(tensor, tensors[pair])
            assert 3 <= tensors[pair].unique().numel() <= 4, pair
            gain = next((gain for end, gain in weights.GAINS.items() if name.endswith(end)), 1.0)
            wanted = 1.0 if leaf == "table" else gain / math.sqrt(values.shape[-1])
            assert wanted / 1.5 < values.std() < wanted * 1.5, name  # 64 scale bytes leave 10 % of noise


def test_dummy_draws_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are drawn a chunk at a time, straight into place, and every chunk is drawn."""
    monkeypatch.setattr(weights, "CHUNK_ELEMENTS", 1000)
    for name, tensor in dummy("tiny", 0).items():
        if tensor.dtype == torch.uint8 and not name.endswith("scale"):
            assert (tensor == 0xA5).float().mean() < 0.02, name
