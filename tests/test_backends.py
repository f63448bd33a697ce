"""Choosing what runs: every refusal is one sentence that names the flag, the choice and the reason."""

from types import SimpleNamespace

import pytest
import torch

from dsv41 import backends
from dsv41.backends import FAMILIES, RECORD_FIELDS, Backends, parse, reasons, select
from dsv41.config import Numerics
from dsv41.hardware import Hardware, detect

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
