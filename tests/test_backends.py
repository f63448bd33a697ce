"""Choosing what runs: every refusal is one sentence that names the flag, the choice and the reason."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dsv41 import backends
from dsv41.backends import (
    FAMILIES,
    OPTIONS,
    PRESETS,
    RECORD_FIELDS,
    Backends,
    automatic,
    choose,
    parse,
    reasons,
    refusal,
    select,
)
from dsv41.config import Numerics
from dsv41.hardware import Hardware, assume, detect
from dsv41.ops import records

CPU = Hardware("cpu", 0, "CPU", 0)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("cpu", ("cpu", {})),
        ("moe=triton", (None, {"moe": "triton"})),
        ("sm90, moe=triton,state_record=mixed_584", ("sm90", {"moe": "triton", "state_record": "mixed_584"})),
    ],
)
def test_parse(spec: str, expected: tuple[str | None, dict[str, str]]) -> None:
    assert parse(spec) == expected


@pytest.mark.parametrize("spec", ["attn=triton", "cpu,sm90", "cpu,attention", "moe=reference,cpu", "cpu,"])
def test_parse_refuses_what_is_no_choice(spec: str) -> None:
    """A misspelt key, or a preset in the wrong place, must not be dropped in silence."""
    with pytest.raises(ValueError, match=r"--backends: '.*' is not KEY=VALUE with a key of attention, "):
        parse(spec)


@pytest.mark.parametrize("numerics", Numerics)
@pytest.mark.parametrize("spec", [None, "cpu", "window_record=rows"])
def test_rows_follow_the_numerics(numerics: Numerics, spec: str | None) -> None:
    """bf16 rows under fp32 numerics would round the caches that fp32 is there to keep exact."""
    chosen = select(CPU, numerics, spec)
    rows = "rows_bf16" if numerics is Numerics.BF16 else "rows_fp32"
    assert {getattr(chosen, field) for field in RECORD_FIELDS} == {rows}
    assert {getattr(chosen, family) for family in FAMILIES} == {"reference"}


def test_an_override_changes_one_choice() -> None:
    chosen = select(CPU, Numerics.BF16, "cpu,state_record=nvfp4_288")
    assert chosen == Backends(window_record="rows_bf16", state_record="nvfp4_288", index_record="rows_bf16")


@pytest.mark.parametrize("numerics", [Numerics.FP32, Numerics.FP32_NOQUANT])
@pytest.mark.parametrize("record", ["mixed_584", "nvfp4_288", "rows_fp8", "rows_bf16"])
def test_fp32_numerics_refuse_records_that_round(numerics: Numerics, record: str) -> None:
    """The error names the field and the record that would do."""
    sentence = (
        f"--backends state_record={record} cannot hold {numerics.value} numerics: use state_record=rows_fp32"
    )
    with pytest.raises(ValueError, match=sentence):
        select(CPU, numerics, f"state_record={record}")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("gpu", "--backends: no preset 'gpu'; there are .*cpu"),
        (
            "moe=nonesuch",
            "--backends moe=nonesuch cannot run on CPU: op family 'moe' has no implementation 'nonesuch'",
        ),
        ("moe=", "has no implementation ''"),
        ("state_record=nonesuch", "'nonesuch' is unknown"),
        ("moe=op", "has no implementation 'op'"),
        ("moe=reference,moe=reference", "each once"),
    ],
)
def test_select_refuses_what_is_not_there(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        select(CPU, Numerics.BF16, spec)


def fake_implementation(family: str, impl: str) -> SimpleNamespace:
    """`gpu_only` needs SM90 and reads no mixed_584, `unbuilt` lacks its package, all others run."""

    def why_not(hardware: Hardware, record: str | None) -> str | None:
        if impl == "gpu_only" and hardware.sm < 90:
            return "it needs SM90"
        return "it reads no mixed_584" if impl == "gpu_only" and record == "mixed_584" else None

    if impl == "unbuilt":
        raise ValueError("implementation 'unbuilt' needs the package 'triton'")
    return SimpleNamespace(why_not=why_not)


def test_reasons_ask_every_implementation_about_its_own_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel asked about the wrong cache's record accepts bytes it cannot read."""
    monkeypatch.setattr(backends, "implementation", fake_implementation)
    hopper = Hardware("cuda", 90, "H200", 1 << 37)
    chosen = Backends(attention="gpu_only", indexing="gpu_only", linear="unbuilt", state_record="mixed_584")
    answers = reasons(chosen, hopper)
    assert tuple(answers) == FAMILIES
    assert {family: reason for family, reason in answers.items() if reason} == {
        "attention": "it reads no mixed_584",
        "linear": "implementation 'unbuilt' needs the package 'triton'",
    }
    assert reasons(Backends(moe="gpu_only"), CPU)["moe"] == "it needs SM90"


def test_a_choice_that_cannot_run_is_refused_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "implementation", fake_implementation)
    with pytest.raises(ValueError, match="--backends moe=gpu_only cannot run on CPU: it needs SM90"):
        select(CPU, Numerics.BF16, "moe=gpu_only")
    assert select(Hardware("cuda", 90, "H200", 1), Numerics.BF16, "cpu,moe=gpu_only").moe == "gpu_only"


# ---------------------------------------------------------------------- the matrix of spec/runtime.md 2
# Written from the tables of 2.1 to 2.3 by hand; our own SM90 kernels stand where Hopper's FlashMLA would.

GPUS = {f"sm{sm}": assume(f"sm{sm}") for sm in (80, 89, 90, 100, 103, 110, 120, 121)}
MIXED, SCALED = ("mixed_584", "mixed_584"), ("scaled_528", "scaled_528")
TRAINED, BF16, FP8 = ("scaled_528", "nvfp4_288"), ("rows_bf16", "rows_bf16"), ("rows_fp8", "rows_fp8")
RELEASED = (64, 8)  # heads and output groups


def everything_runs(family: str, impl: str) -> SimpleNamespace:
    """Every attention is there and needs the GPU of its rules; the other families run anywhere."""
    majors = {"gluon": (9,), "flashmla": (9, 10), "mega": (10,), "flashinfer": (10, 12)}

    def why_not(hardware: Hardware, record: str | None) -> str | None:
        wanted = majors.get(impl) if family == "attention" else None
        return None if wanted is None or hardware.sm // 10 in wanted else "another GPU"

    return SimpleNamespace(why_not=why_not)


def without(*missing: str):
    """The same, but some attentions have no package."""

    def found(family: str, impl: str) -> SimpleNamespace:
        if family == "attention" and impl in missing:
            return SimpleNamespace(why_not=lambda hardware, record: f"no package for {impl}")
        return everything_runs(family, impl)

    return found


@pytest.mark.parametrize(
    ("gpu", "missing", "heads", "groups", "preset", "attention", "cache", "index"),
    [
        ("sm90", (), 64, 8, "sm90", "gluon", TRAINED, "mxfp4_68"),
        ("sm100", (), 64, 8, "sm100-mega", "mega", TRAINED, "fp8_132"),
        ("sm103", (), 64, 8, "sm100-mega", "mega", TRAINED, "fp8_132"),
        ("sm100", (), 8, 1, "sm100-mega", "mega", TRAINED, "fp8_132"),  # a rank of eight
        ("sm100", (), 64, 4, "sm100", "flashmla", SCALED, "fp8_132"),  # 16 heads a group
        ("sm100", (), 4, 1, "sm100", "flashmla", SCALED, "fp8_132"),  # half a group
        ("sm100", ("mega",), 64, 8, "sm100", "flashmla", SCALED, "fp8_132"),  # its ops are missing
        ("sm120", (), 64, 8, "sm120", "flashinfer", MIXED, "fp8_132"),
        ("sm121", (), 64, 8, "sm120", "flashinfer", MIXED, "fp8_132"),
    ],
)
def test_automatic_choice(monkeypatch, gpu, missing, heads, groups, preset, attention, cache, index) -> None:
    monkeypatch.setattr(backends, "implementation", without(*missing))
    monkeypatch.setattr(backends, "AUTOMATIC_IS_DEFAULT", True)
    assert automatic(GPUS[gpu], heads, groups) == preset
    chosen = select(GPUS[gpu], Numerics.BF16, None, heads, groups)
    assert chosen == select(GPUS[gpu], Numerics.BF16, preset, heads, groups)
    assert (chosen.attention, chosen.window_record, chosen.state_record) == (attention, *cache)
    assert chosen.index_record == index


def test_the_automatic_choice_of_a_cpu_is_the_reference() -> None:
    assert automatic(CPU) == "cpu"


@pytest.mark.parametrize("gpu", ["sm80", "sm89", "sm110"])
def test_an_unknown_gpu_is_told_what_there_is(monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    monkeypatch.setattr(backends, "AUTOMATIC_IS_DEFAULT", True)
    sentence = (
        f"no preset fits {gpu.upper()}: attention has kernels for SM90, SM100 and SM120; --backends cpu"
    )
    with pytest.raises(ValueError, match=sentence):
        select(GPUS[gpu], Numerics.BF16)
    assert select(GPUS[gpu], Numerics.BF16, "cpu").attention == "reference"


@pytest.mark.parametrize("gpu", GPUS)
def test_the_automatic_choice_is_off(gpu: str) -> None:
    """Until the kernels are verified, a machine runs them only when it is told to."""
    assert select(GPUS[gpu], Numerics.BF16) == select(CPU, Numerics.BF16)


def test_sm120_without_its_kernel_tries_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "implementation", without("flashinfer"))
    monkeypatch.setattr(backends, "AUTOMATIC_IS_DEFAULT", True)
    sentence = "--backends attention=flashinfer cannot run on SM120: no package for flashinfer"
    with pytest.raises(ValueError, match=sentence):
        select(GPUS["sm120"], Numerics.BF16)


def test_sm100_without_both_names_flashmla(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one documented step ends there: nothing comes after FlashMLA."""
    monkeypatch.setattr(backends, "implementation", without("mega", "flashmla"))
    monkeypatch.setattr(backends, "AUTOMATIC_IS_DEFAULT", True)
    with pytest.raises(ValueError, match="attention=flashmla cannot run on SM100: no package for flashmla"):
        select(GPUS["sm100"], Numerics.BF16)


def test_an_explicit_mega_is_refused_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "implementation", without("mega"))
    with pytest.raises(ValueError, match="attention=mega cannot run on SM100: no package for mega"):
        select(GPUS["sm100"], Numerics.BF16, "sm100-mega", *RELEASED)
    monkeypatch.setattr(backends, "implementation", everything_runs)
    sentence = "attention=mega cannot run this model: Mega needs exactly 8 heads in each output group"
    with pytest.raises(ValueError, match=sentence + ", not 64 in 4"):
        select(GPUS["sm100"], Numerics.BF16, "sm100-mega", 64, 4)
    assert select(GPUS["sm100"], Numerics.BF16, "sm100-mega", *RELEASED).attention == "mega"


@pytest.mark.parametrize(
    ("preset", "package"), [("sm90-flashmla", "FlashMLA"), ("sm100", "FlashMLA"), ("sm120", "FlashInfer")]
)
def test_vendors_have_128_heads(monkeypatch: pytest.MonkeyPatch, preset: str, package: str) -> None:
    monkeypatch.setattr(backends, "implementation", everything_runs)
    gpu = GPUS[preset.partition("-")[0]]
    assert select(gpu, Numerics.BF16, preset, 128, 8).attention == package.lower()
    with pytest.raises(ValueError, match=f"{package} has at most 128 heads, not 130"):
        select(gpu, Numerics.BF16, preset, 130, 8)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("FLASHMLA_SPARSE", "flashmla"),
        ("FLASHMLA_SPARSE_DSV4", "flashmla"),
        ("FLASHMLA_SPARSE_DSV41", "flashmla"),
        ("FLASHMLA_MEGA_ATTN_DSV41", "mega"),
        ("FLASHINFER_MLA_SPARSE_DSV4", "flashinfer"),
        ("FLASHINFER_MLA_SPARSE_DSV41", "flashinfer"),
    ],
)
def test_names_of_vllm(name: str, ours: str) -> None:
    assert choose(GPUS["sm100"], Numerics.BF16, f"sm100,attention={name}").attention == ours


@pytest.mark.parametrize("name", ["FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"])
@pytest.mark.parametrize("gpu", ["sm90", "sm100", "sm120"])
def test_generic_flashinfer_names_are_refused(name: str, gpu: str) -> None:
    sentence = (
        f"--backends attention={name} is FlashInfer's generic sparse attention, .*: "
        r"use attention=FLASHINFER_MLA_SPARSE_DSV41 \(here attention=flashinfer\)"
    )
    with pytest.raises(ValueError, match=sentence):
        select(GPUS[gpu], Numerics.BF16, f"attention={name}")


PACKED_SM90 = {"auto": MIXED, "fp8": MIXED, "fp8_ds_mla": MIXED}
CACHES = {  # attention, GPU -> what each cache dtype means; any other is refused
    ("flashmla", "sm90"): PACKED_SM90,
    ("flashmla", "sm100"): {"auto": SCALED, "fp8": SCALED, "fp8_ds_mla": SCALED, "nvfp4_ds_mla": TRAINED},
    ("mega", "sm100"): {"auto": TRAINED, "fp8": TRAINED, "fp8_ds_mla": SCALED, "nvfp4_ds_mla": TRAINED},
    ("flashinfer", "sm100"): {"auto": BF16, "bf16": BF16, "fp8": FP8},
    ("flashinfer", "sm120"): PACKED_SM90,
    ("gluon", "sm90"): {
        "auto": TRAINED, "bf16": BF16, "fp8": TRAINED, "fp8_ds_mla": MIXED, "nvfp4_ds_mla": TRAINED,
    },
    ("reference", "sm89"): {
        "auto": BF16, "bf16": BF16, "fp8": FP8, "fp8_ds_mla": MIXED, "nvfp4_ds_mla": TRAINED,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize(("attention", "gpu"), CACHES)
def test_cache_dtypes(attention: str, gpu: str, dtype: str) -> None:
    spec, allowed = f"attention={attention},kv_cache_dtype={dtype}", CACHES[attention, gpu]
    if dtype in allowed:
        chosen = choose(GPUS[gpu], Numerics.BF16, spec)
        assert (chosen.window_record, chosen.state_record) == allowed[dtype]
        assert chosen.index_record == "rows_bf16"
        return
    takes = f"attention={attention} on {gpu.upper()} takes {', '.join(allowed)}"
    if dtype == "nvfp4_ds_mla" and gpu != "sm100":
        why = f"is a record of SM100: {takes}"
    else:
        why = f": this attention reads {'plain rows' if 'bf16' in allowed else 'packed records'}: {takes}"
    with pytest.raises(ValueError, match=f"--backends kv_cache_dtype={dtype} ?{why}"):
        choose(GPUS[gpu], Numerics.BF16, spec)


@pytest.mark.parametrize(
    ("gpu", "spec", "sentence"),
    [
        (
            "sm90",
            "attention=flashmla,kv_cache_dtype=fp8_e5m2",
            "kv_cache_dtype=fp8_e5m2 is not one of auto, ",
        ),
        ("sm120", "attention=flashmla,kv_cache_dtype=auto", "attention=flashmla has no caches on SM120"),
        ("sm90", "attention=mega,kv_cache_dtype=auto", "attention=mega has no caches on SM90"),
        ("sm90", "kv_cache_dtype=auto,state_record=rows", "kv_cache_dtype already says state_record=rows"),
        (
            "sm90",
            "indexer_kv_dtype=fp8,index_record=mxfp4_68",
            "indexer_kv_dtype already says index_record=fp8",
        ),
        ("sm90", "indexer_kv_dtype=fp4", "indexer_kv_dtype=fp4 is not one of auto, fp8, mxfp4"),
        ("sm120", "sm120,indexer_kv_dtype=mxfp4", "indexer_kv_dtype=mxfp4 needs SM90 or SM100, not SM120"),
        ("sm100", "indexer_sparse_logits=yes", "indexer_sparse_logits=yes is not one of on, off"),
        ("sm100", "sm100,indexer_sparse_logits=on", "needs the fp4 index cache: use indexer_kv_dtype=mxfp4"),
        ("sm90", "sm90,indexer_sparse_logits=on", "indexer_sparse_logits=on needs SM100, not SM90"),
        (
            "sm100",
            "sm100,indexer_kv_dtype=mxfp4,indexer_sparse_logits=on",
            "no implementation of indexing has it, indexing=reference neither",
        ),
    ],
)
def test_options_that_are_refused(gpu: str, spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        choose(GPUS[gpu], Numerics.BF16, spec)


@pytest.mark.parametrize(
    ("dtype", "record"), [("auto", "fp8_132"), ("fp8", "fp8_132"), ("mxfp4", "mxfp4_68")]
)
@pytest.mark.parametrize("gpu", ["sm90", "sm100"])
def test_index_dtypes(gpu: str, dtype: str, record: str) -> None:
    spec = f"{gpu},indexer_kv_dtype={dtype},indexer_sparse_logits=off"
    assert choose(GPUS[gpu], Numerics.BF16, spec) == replace(PRESETS[gpu], index_record=record)


def test_options_obey_the_numerics() -> None:
    with pytest.raises(ValueError, match="window_record=mixed_584 cannot hold fp32 numerics"):
        choose(CPU, Numerics.FP32, "kv_cache_dtype=fp8_ds_mla")


def test_presets_are_whole() -> None:
    """Every record has a name, every option a meaning, and no preset leaves its attention's records."""
    for name, preset in PRESETS.items():
        for field in RECORD_FIELDS:
            assert getattr(preset, field) == "rows" or getattr(preset, field) in records.RECORDS
        gpu = name.partition("-")[0]
        if name == "cpu":
            continue
        pair = (preset.window_record, preset.state_record)
        assert pair in CACHES[preset.attention, gpu].values(), name
    assert all(key not in FAMILIES + RECORD_FIELDS for key in OPTIONS)


def test_what_is_there_today() -> None:
    """Which presets run on which GPU, those of a vendor package aside: the machine has it or not. Mega runs
    nowhere yet, with its package or without."""
    pytest.importorskip("triton", reason="the Triton families cannot be asked without their package")
    vendors = ("flashmla", "flashinfer")
    ours = {name: preset for name, preset in PRESETS.items() if preset.attention not in vendors}
    assert "sm100-mega" in ours
    for name, gpu in GPUS.items():
        runs = {preset for preset in ours if refusal(ours[preset], gpu, *RELEASED) is None}
        assert runs == ({"cpu", "sm90"} if name == "sm90" else {"cpu"}), name


@pytest.mark.parametrize("name", ["90", "sm", "sm9", "sm1000", "h200", "SM90", "cuda:0", ""])
def test_assume_refuses(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is not an architecture such as sm90"):
        assume(name)


# ---------------------------------------------------------------------- hardware


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150_000_000_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_detect_describes_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    assert detect("cuda:1") == Hardware("cuda:1", 90, "NVIDIA H200", 150_000_000_000)
    assert detect("auto").device == "cuda"
    assert detect("cpu") == CPU
    pretend_gpus(monkeypatch, 0)
    assert detect("auto") == CPU


@pytest.mark.parametrize(
    ("device", "count", "sentence"),
    [
        ("cuda", 0, "device 'cuda' is not there: this machine shows 0 CUDA"),
        ("cuda:2", 2, "device 'cuda:2' is not there: this machine shows 2 CUDA"),
        ("tpu", 2, "device 'tpu' is not one of auto, cpu, cuda, cuda:N"),
        ("cpu:0", 2, "device 'cpu:0' is not one of"),
        ("cuda:-1", 2, "device 'cuda:-1' is not one of"),
        ("cuda:first", 2, "device 'cuda:first' is not one of"),
        ("cuda:", 2, "device 'cuda:' is not one of"),
    ],
)
def test_detect_refuses(monkeypatch: pytest.MonkeyPatch, device: str, count: int, sentence: str) -> None:
    """A wrong name must end before any weight is read, never on another device than the one asked for."""
    pretend_gpus(monkeypatch, count)
    with pytest.raises(ValueError, match=sentence):
        detect(device)
