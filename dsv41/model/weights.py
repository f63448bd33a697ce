"""Fill a decoder: from the released checkpoint, or with seeded stand-ins of the same formats.

A checkpoint is checked completely against its config before the first weight is read (checkpoint.py), then
streamed: each tensor goes from its memory-mapped shard straight into its rows of the parameter. Bytes are
never converted: packed FP4 (tag I8) and e8m0 scales are viewed as uint8, e4m3 stays e4m3.

Names here are those of the decoder's `state_dict`. Three integer tables per Engram layer and the token map
are not in the checkpoint; `set_constants` derives them (spec/model.md, 6).
"""

from __future__ import annotations

import itertools
import math
import mmap
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from dsv41.config import ModelConfig
from dsv41.model.checkpoint import CheckpointError, StoredTensor, TensorSpec, checkpoint_tensors, find_tensors

__all__ = [
    "CheckpointError",
    "EngramConstants",
    "LoadReport",
    "checkpoint_tensors",
    "default_token_map",
    "engram_constants",
    "init_dummy",
    "load_weights",
    "set_constants",
]

DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
PLACEMENTS = ("device", "host", "disk")  # of the Engram tables
TABLES = ("engram.table", "engram.table_scale")
DERIVED = ("token_map", "engram.multipliers", "engram.primes", "engram.offsets")
E8M0_NAN = 255

Progress = Callable[[int, int], None]  # (bytes done, bytes in all), after each tensor


@dataclass(frozen=True)
class LoadReport:
    """What one load did."""

    num_tensors: int
    num_bytes: int
    mapped_bytes: int  # of num_bytes, left on disk
    seconds: float
    skipped: tuple[TensorSpec, ...]  # of the parts that the caller declared unused

    def __str__(self) -> str:
        lines = [f"{self.num_tensors} tensors, {self.num_bytes / 1e6:,.1f} MB in {self.seconds:.1f} s"]
        for part in sorted({spec.part for spec in self.skipped}):
            sizes = [spec.num_bytes for spec in self.skipped if spec.part == part]
            lines.append(f"{len(sizes)} {part} tensors, {sum(sizes) / 1e6:,.1f} MB not used")
        return "; ".join(lines)


class _HoldsTable(Protocol):
    def set_table(self, table: Tensor, scale: Tensor) -> None: ...


# -- loading ---------------------------------------------------------------------------------------------


def load_weights(
    decoder: nn.Module,
    config: ModelConfig,
    directory: str | Path,
    *,
    token_map: Tensor | None = None,
    tables: str = "device",
    unused: Sequence[str] = ("draft", "vision"),
    progress: Progress | None = None,
) -> LoadReport:
    """Fill every tensor of `decoder` from the checkpoint in `directory` (sharded with an index, or one file).

    token_map: int64 [V], compressed id of each token (runner/tokenizer.py makes it). Required where the
        model has Engram layers: a wrong one gives fluent nonsense.
    tables: where the Engram tables live. "device": in the decoder's own `engram.table`. "host": in CPU
        memory, pinned if there is a GPU. "disk": mapped from the shard, read a 4 KiB page at a time by the
        rows looked up; never write to such a tensor. The last two are handed to the Engram module's
        `set_table`.
    unused: parts whose tensors are checked but not read.

    No tensor is held twice: a source is a view of its mapped shard. Its pages show as resident file memory
    until the shard is closed; they are clean page cache, which the kernel drops when it needs the space.

    Raises CheckpointError when the directory is not the checkpoint that `config` describes. Scale bytes of
    255 (NaN) are refused as they are read, so not in a table left on disk. Raises ValueError for other
    arguments.
    """
    started = time.perf_counter()
    if tables not in PLACEMENTS:
        raise ValueError(f"tables must be one of {', '.join(PLACEMENTS)}, not {tables!r}")
    if token_map is None and config.engram.layers:
        raise ValueError("the Engram layers need a token_map: the tokenizer's, or default_token_map(config)")
    stored = find_tensors(config, directory)
    wanted = [tensor for tensor in stored if tensor.spec.part not in unused]
    homeless = next((tensor.spec for tensor in wanted if not tensor.spec.target), None)
    if homeless is not None:
        raise ValueError(
            f"{homeless.part} tensors have no place here ({homeless.name!r}): list them as unused"
        )

    outside = {t.spec.target: t for t in wanted if tables != "device" and t.spec.target.endswith(TABLES)}
    place = _map_tensor if tables == "disk" else _host_like
    own_tables = {target: place(tensor) for target, tensor in outside.items()}
    destinations = _stored_tensors(decoder) | own_tables
    _check_destinations(destinations, wanted)
    set_constants(decoder, config, token_map)

    mapped = list(outside.values()) if tables == "disk" else []
    _stream([tensor for tensor in wanted if tensor not in mapped], destinations, progress)
    _hand_over(decoder, own_tables)
    return LoadReport(
        num_tensors=len(wanted),
        num_bytes=sum(tensor.spec.num_bytes for tensor in wanted),
        mapped_bytes=sum(tensor.spec.num_bytes for tensor in mapped),
        seconds=time.perf_counter() - started,
        skipped=tuple(tensor.spec for tensor in stored if tensor.spec.part in unused),
    )


def _stream(
    stored: list[StoredTensor], destinations: Mapping[str, Tensor], progress: Progress | None
) -> None:
    """Copy each tensor into its rows of its destination, shard by shard in file order."""
    from safetensors import safe_open  # imported late: `inspect` and stand-in weights need no safetensors

    total, done = sum(tensor.spec.num_bytes for tensor in stored), 0
    for path, group in itertools.groupby(stored, key=lambda tensor: tensor.path):
        with safe_open(path, framework="pt") as shard:
            for spec in (tensor.spec for tensor in group):
                source = shard.get_tensor(spec.name).view(DTYPES[spec.dtype])  # mapped: nothing is read yet
                if spec.dtype == "F8_E8M0" and int(source.max()) == E8M0_NAN:
                    raise CheckpointError(
                        f"{path}: tensor {spec.name!r} holds scale byte {E8M0_NAN}, which is NaN"
                    )
                _slot(destinations[spec.target], spec).copy_(source)
                done += spec.num_bytes
                if progress is not None:
                    progress(done, total)


def _slot(destination: Tensor, spec: TensorSpec) -> Tensor:
    """The view of a decoder tensor that one released tensor fills."""
    assert spec.rows is not None, f"{spec.name!r} has no place in the decoder"
    start, stop = spec.rows
    return (destination if spec.expert is None else destination[spec.expert])[start:stop]


def _stored_tensors(decoder: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint fills: parameters and persistent buffers, by name, without the derived integers.

    Buffers that are not persistent (rotation tables, say) are their module's own business. The tensors share
    the decoder's memory and are detached, so that they can be written in place.
    """
    return {name: tensor for name, tensor in decoder.state_dict().items() if not name.endswith(DERIVED)}


def _check_destinations(destinations: Mapping[str, Tensor], wanted: list[StoredTensor]) -> None:
    """The decoder and checkpoint.py must agree, and every element be filled (programmer errors)."""
    filled: Counter[str] = Counter()
    for spec in (tensor.spec for tensor in wanted):
        tensor = destinations.get(spec.target)
        assert tensor is not None, f"the decoder has no {spec.target!r} for {spec.name!r}"
        assert tensor.dtype == DTYPES[spec.dtype], (
            f"{spec.target!r} is {tensor.dtype}, {spec.name!r} {spec.dtype}"
        )
        row = tensor.shape[1 if spec.expert is None else 2 :]
        assert tuple(row) == spec.shape[1:], (
            f"{spec.target!r} has rows {tuple(row)}, {spec.name!r} {spec.shape[1:]}"
        )
        filled[spec.target] += math.prod(spec.shape)
    for name, tensor in destinations.items():
        assert not tensor.is_meta, f"{name!r} is on the meta device: allocate the decoder before loading"
        assert filled[name] == tensor.numel(), (
            f"{name!r}: the checkpoint fills {filled[name]} of {tensor.numel()}"
        )


# -- tables outside the decoder's own tensors --------------------------------------------------------------


def _host_like(stored: StoredTensor) -> Tensor:
    """CPU memory for one table; torch's pinned allocator rounds up to a power of two (98 GB take 137 GB)."""
    shape, dtype = stored.spec.shape, DTYPES[stored.spec.dtype]
    return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())


def _map_tensor(stored: StoredTensor) -> Tensor:
    """The bytes of a tensor in its file, read on access.

    The mapping is read-only, so that it costs no commit charge however large. MADV_RANDOM keeps the kernel
    from reading ahead: a row costs one or two 4 KiB pages instead of about 64 KiB.
    """
    spec, start = stored.spec, stored.offset - stored.offset % mmap.ALLOCATIONGRANULARITY
    skip = stored.offset - start
    with stored.path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), skip + spec.num_bytes, access=mmap.ACCESS_READ, offset=start)
    memory.madvise(mmap.MADV_RANDOM)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        data = torch.frombuffer(memory, dtype=torch.uint8, count=spec.num_bytes, offset=skip)
    return data.view(DTYPES[spec.dtype]).view(spec.shape)


def _hand_over(decoder: nn.Module, tables: Mapping[str, Tensor]) -> None:
    for name, table in tables.items():
        if name.endswith("engram.table"):
            engram = cast(_HoldsTable, decoder.get_submodule(name.rpartition(".")[0]))
            engram.set_table(table, tables[f"{name}_scale"])


# -- derived integers --------------------------------------------------------------------------------------


class EngramConstants(NamedTuple):
    """The int64 tables of one Engram layer (spec/model.md, 6.2 to 6.4), on the CPU."""

    multipliers: Tensor  # [max_ngram], by lookback
    primes: Tensor  # [max_ngram - 1, heads], bucket sizes in rows
    offsets: Tensor  # [(max_ngram - 1) * heads], first row of each column's bucket


def engram_constants(config: ModelConfig) -> dict[int, EngramConstants]:
    """By Engram layer. Multipliers are odd, and small enough that id * multiplier stays below 2^63."""
    g, constants = config.engram, {}
    for layer, sizes in zip(g.layers, g.primes(), strict=True):
        bound = np.iinfo(np.int64).max // g.compressed_vocab // 2
        draws = np.random.default_rng(10007 * layer).integers(0, bound, size=g.max_ngram, dtype=np.int64)
        primes = torch.tensor(sizes, dtype=torch.int64)
        offsets = primes.flatten().cumsum(0) - primes.flatten()
        constants[layer] = EngramConstants(torch.from_numpy(2 * draws + 1), primes, offsets)
    return constants


def default_token_map(config: ModelConfig) -> Tensor:
    """id % compressed_vocab, int64 [V]: a stand-in of the right range for runs without a tokenizer.

    With real weights it selects the wrong Engram rows; use runner.tokenizer's map there. Where no layer has
    Engram nobody reads it.
    """
    return torch.arange(config.vocab_size) % max(config.engram.compressed_vocab, 1)


def set_constants(decoder: nn.Module, config: ModelConfig, token_map: Tensor | None) -> None:
    """Write what no checkpoint holds: each Engram layer's integers and the token map, if there are any."""
    g = config.engram
    if not g.layers:
        return
    assert token_map is not None, "a model with Engram layers needs a token map"
    if token_map.dtype != torch.int64 or tuple(token_map.shape) != (config.vocab_size,):
        raise ValueError(
            f"token_map must be int64 [{config.vocab_size}], not {token_map.dtype} {list(token_map.shape)}"
        )
    if not 0 <= int(token_map.min()) <= int(token_map.max()) < g.compressed_vocab:
        raise ValueError(
            f"token_map must hold ids from 0 to {g.compressed_vocab - 1}, not {int(token_map.max())}"
        )
    tensors = decoder.state_dict()
    tensors["token_map"].copy_(token_map)
    for layer, constants in engram_constants(config).items():
        for name, values in constants._asdict().items():
            tensors[f"layers.{layer}.engram.{name}"].copy_(values)


# -- stand-in weights --------------------------------------------------------------------------------------

E4M3_RMS, E2M1_RMS = 100.06, 2.926  # of codes drawn uniformly (e4m3 without its NaNs)
SCALE_SPREAD_RMS = 1.3229  # of 2^k, k drawn from -1, 0, 1: constant scale bytes would hide indexing mistakes
ON_CPU_ELEMENTS = 1 << 23
CHUNK_ELEMENTS = 1 << 26

# Deviation of a product's output over that of its input, 1 where not named. These four write to the
# residual copies, and add about a quarter of one: of a mean over keys, of silu(gate) * up, of a value gated
# by one half.
GAINS = {
    "attention.output_up.weight": 0.5,
    "moe.down": 0.35,
    "moe.shared_down.weight": 0.35,
    "engram.kv.weight": 0.5,
}
# (mean, deviation) by the last part of the name; norms are (1, 0.1), other matrices (0, fan_in ** -0.5).
FLOATS = {
    "embedding": (0.0, 1.0),
    "sink": (0.0, 1.0),
    "scale": (0.75, 0.1),
    "base": (0.0, 0.2),
    "bias": (0.0, 0.01),
    "image_bias": (0.0, 0.01),
    "query": (1.0, 0.1),
    "key": (1.0, 0.1),
}


def init_dummy(
    decoder: nn.Module, config: ModelConfig, seed: int, *, token_map: Tensor | None = None
) -> None:
    """Fill every tensor of `decoder`, where it lies, with finite values that keep activations O(1).

    Each tensor has a generator of its own, seeded from (seed, name), so its values do not depend on the
    others. Up to 8M elements are drawn on the CPU and are the same on every device; larger tensors are
    drawn in chunks on their own device (100 GB would take a CPU minutes) and depend on its generator.
    """
    tensors = _stored_tensors(decoder)
    for name, tensor in tensors.items():
        assert not tensor.is_meta, f"{name!r} is on the meta device: allocate the decoder first"
        device = tensor.device if tensor.numel() > ON_CPU_ELEMENTS else torch.device("cpu")
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        draw = _dummy_values(name, tensor, tensors)
        for chunk in tensor.view(-1).split(CHUNK_ELEMENTS):
            chunk.copy_(draw(chunk.numel(), generator))
    set_constants(decoder, config, default_token_map(config) if token_map is None else token_map)


Draw = Callable[[int, torch.Generator], Tensor]  # (elements, generator) -> values on the generator's device


def _dummy_values(name: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> Draw:
    if tensor.dtype == torch.float8_e4m3fn:
        return _random_e4m3
    if tensor.dtype != torch.uint8:
        mean, deviation = _float_moments(name, tensor)
        return lambda n, g: torch.empty(n, device=g.device).normal_(mean, deviation, generator=g)
    if not name.endswith("scale"):
        return _random_bytes  # packed FP4: every byte is two legal codes
    exponent = _scale_exponent(name, tensors)
    floor = math.floor(exponent)
    # 2^floor and 2^(floor + 1), mixed so that their mean square is that of 2^exponent.
    share = (4 ** (exponent - floor) - 1) / 3

    def scale_bytes(n: int, g: torch.Generator) -> Tensor:
        spread = torch.randint(-1, 2, (n,), generator=g, device=g.device)
        return 127 + floor + spread + (torch.rand(n, generator=g, device=g.device) < share)

    return scale_bytes


def _float_moments(name: str, tensor: Tensor) -> tuple[float, float]:
    leaf = name.rpartition(".")[2]
    if leaf.endswith("norm"):
        return 1.0, 0.1
    return FLOATS.get(leaf, (0.0, tensor.shape[-1] ** -0.5))


def _scale_exponent(name: str, tensors: Mapping[str, Tensor]) -> float:
    """The power of two that gives a quantised matrix the deviation gain / sqrt(fan_in)."""
    weight = f"{name[: -len('.scale')]}.weight" if name.endswith(".scale") else name.removesuffix("_scale")
    packed = tensors[weight].dtype == torch.uint8
    fan_in = tensors[weight].shape[-1] * (2 if packed else 1)
    gain = next((gain for suffix, gain in GAINS.items() if weight.endswith(suffix)), 1.0)
    deviation = 1.0 if weight.endswith("engram.table") else gain * fan_in**-0.5
    return math.log2(deviation / (SCALE_SPREAD_RMS * (E2M1_RMS if packed else E4M3_RMS)))


def _random_bytes(num: int, generator: torch.Generator) -> Tensor:
    words = torch.empty(-(-num // 8), dtype=torch.int64, device=generator.device)
    return words.random_(-(2**63), None, generator=generator).view(torch.uint8)[:num]


def _random_e4m3(num: int, generator: torch.Generator) -> Tensor:
    codes = _random_bytes(num, generator)
    return codes.masked_fill_((codes & 0x7F) == 0x7F, 0).view(torch.float8_e4m3fn)  # 0x7f and 0xff are NaN
