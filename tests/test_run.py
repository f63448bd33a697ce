"""The command line: every mistake costs an exit code and one line, and every command works."""

from __future__ import annotations

import csv
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv41.run import main
from dsv41.runner import bench, check

EXCERPT = Path(__file__).resolve().parents[1] / "dsv41" / "data" / "parity"
TOO_SLOW_SECONDS = 2.0
PROMPT = ["--prompt-ids", "1,2,3"]
SCALE = "layers.0.attn.wq_a.scale"
WEIGHT = "layers.0.attn.wq_a.weight"


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """The imports of a first call are not what the time limits are about."""
    assert main(["inspect", "--no-segments", "--quiet"]) == 0
    assert main([*generate(EXCERPT), "--quiet"]) == 0  # the tokenizer's package


@pytest.fixture
def fail(capsys) -> Callable[..., str]:
    """Run and return the sentence, after checking the exit code, its form and the processor time, without the
    garbage of the tests before."""

    def seconds_of(code: int, argv: Sequence[str]) -> float:
        capsys.readouterr()
        gc.collect()
        started = time.process_time()
        assert main(list(argv)) == code
        return time.process_time() - started

    def run(code: int, *argv: str, limit: float = TOO_SLOW_SECONDS) -> str:
        seconds = seconds_of(code, argv)
        if seconds >= limit:  # the process has other threads: what a command needs, it needs twice
            seconds = seconds_of(code, argv)
        captured = capsys.readouterr()
        errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, captured.err
        assert captured.err.splitlines()[-1] == errors[0]
        assert "Traceback" not in captured.err
        assert seconds < limit
        return errors[0]

    return run


# -- usage and config: 2 -----------------------------------------------------------------------------------

USAGE = {
    "unknown command": (["train"], "invalid choice"),
    "unknown flag": (["bench", "--speed=11"], "unrecognized"),
    "no prompt": (["generate"], "--prompt"),
    "two prompts": (["generate", "--prompt", "a", *PROMPT], "not allowed"),
    "model and preset": (["inspect", "--model", str(EXCERPT), "--preset", "tiny"], "exclude"),
    "unknown preset": (["inspect", "--preset", "huge"], "unknown preset 'huge'"),
    "unknown override": (["inspect", "--set", "engram.headz=4"], "heads"),
    "bad JSON override": (["inspect", "--set", '{"heads": '], "JSON"),
    "override of a wrong type": (["inspect", "--set", "num_heads=many"], "num_attention_heads"),
    "override breaks a rule": (["inspect", "--set", "o_groups=3"], "o_groups"),
    "fixed value": (["inspect", "--set", "text_config.hidden_act=gelu"], "hidden_act"),
    "unknown numerics": (["inspect", "--numerics", "fp16"], "fp16"),
    "unknown load format": (["inspect", "--load-format", "pickle"], "pickle"),
    "unknown backend preset": (["inspect", "--backends", "sm999"], "sm999"),
    "unknown backend family": (["inspect", "--backends", "cpu,norm=triton"], "norm=triton"),
    "unknown implementation": (["inspect", "--backends", "attention=magic"], "magic"),
    "record against numerics": (
        ["inspect", "--numerics", "fp32-noquant", "--backends", "state_record=nvfp4_288"],
        "nvfp4_288",
    ),
    "no architecture": (["inspect", "--as", "h200"], "sm90"),
    "backends without a value": (["bench", "--backends"], "--backends"),
    "generic attention": (["inspect", "--backends", "attention=FLASHINFER_MLA_SPARSE"], "_DSV41"),
    "unknown device": (["inspect", "--device", "tpu"], "tpu"),
    "bad context": (["inspect", "--context", "4k,long"], "long"),
    "unknown mode": (["bench", "--mode", "eager,fast"], "fast"),
    "zero batch": (["bench", "--batch", "0"], "batch"),
    "negative depth": (["bench", "--depth", "-5"], "depth"),
    "no repeat": (["bench", "--repeat", "0"], "repeat"),
    "context beyond the model": (["bench", "--prompt-len", "8k"], "4096"),
    "unknown scenario": (["bench", "--scenario", "nothing"], "decode-4k"),
    "scenario and lists": (["bench", "--scenario", "tiny", "--batch", "2"], "--batch"),
    "profile of another case": (["profile", "draft"], "draft"),
    "profile without steps": (["profile", "--steps", "0"], "steps"),
    "profile of no depth": (["profile", "--depth", "0"], "depth"),
    "profile of a decode's prompt": (["profile", "decode", "--prompt-len", "8"], "--prompt-len"),
    "profile of a prefill's depth": (["profile", "prefill", "--depth", "8"], "--depth"),
    "profile of a captured prefill": (["profile", "prefill", "--mode", "graph"], "prefill"),
    "profile beyond the model": (["profile", "--depth", "4k"], "4096"),
    "trace in a missing folder": (["profile", "--trace", "/nowhere/t.json"], "--trace /nowhere"),
    "summary in a missing folder": (["profile", "--summary", "/nowhere/s.csv"], "--summary /nowhere"),
    "empty prompt": (["generate", "--prompt-ids", ""], "empty"),
    "empty text": (["generate", "--model", str(EXCERPT), "--prompt", ""], "empty"),
    "token id out of range": (["generate", "--prompt-ids", "1,512"], "512"),
    "negative token id": (["generate", "--prompt-ids=-1"], "-1"),
    "ids that are words": (["generate", "--prompt-ids", "1,two"], "two"),
    "prompt too long": (["generate", *PROMPT, "--max-tokens", "4094"], "4096"),
    "text without tokenizer": (["generate", "--prompt", "hello"], "--prompt-ids"),
    "no new tokens": (["generate", *PROMPT, "--max-tokens", "0"], "max_tokens"),
    "temperature below zero": (["generate", *PROMPT, "--temperature=-1"], "temperature"),
    "temperature not a number": (["generate", *PROMPT, "--temperature", "nan"], "temperature"),
    "top-p of zero": (["generate", *PROMPT, "--top-p", "0"], "top_p"),
    "negative seed": (["generate", *PROMPT, "--seed=-1"], "-1"),
    "output in a missing folder": (["inspect", "--output", "/nowhere/out.jsonl"], "/nowhere"),
}


@pytest.mark.parametrize("name", USAGE)
def test_usage_error(name, fail):
    argv, words = USAGE[name]
    assert words in fail(2, *argv)


def test_bad_scenario_files(fail, tmp_path, monkeypatch):
    folder = tmp_path / "profiles" / "scenarios"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    bad = {
        "broken": ("batch = [", "TOML"),
        "nameless": ("batch = [1]", "preset"),
        "extra": ('preset = "tiny"\nspeed = 1', "speed"),
        "scalar": ('preset = "tiny"\nbatch = 1', "list"),
        "words": ('preset = "tiny"\nbatch = ["many"]', "many"),
        "often": ('preset = "tiny"\nrepeat = "often"', "repeat"),
        "empty": ('preset = "tiny"\nbatch = []', "nothing to measure"),
    }
    for name, (text, words) in bad.items():
        (folder / f"{name}.toml").write_text(text)
        assert words in fail(2, "bench", "--scenario", name)


def edited_config(directory: Path, edit: Callable[[dict], object]) -> Path:
    content = json.loads((EXCERPT / "config.json").read_text())
    edit(content)
    (directory / "config.json").write_text(json.dumps(content))
    return directory


BAD_CONFIGS: dict[str, tuple[Callable[[dict], object], str]] = {
    "missing key": (lambda c: c["text_config"].pop("head_dim"), "head_dim"),
    "wrong type": (lambda c: c["text_config"].update(hidden_size="wide"), "hidden_size"),
    "broken rule": (lambda c: c["text_config"].update(num_experts_per_tok=99), "num_experts_per_tok"),
    "bad topology": (lambda c: c["text_config"].update(kv_source_layer_ids=[5, 7]), "layer"),
    "another model": (lambda c: c.update(model_type="llama"), "model_type"),
    "flat layout": (lambda c: (c.clear(), c.update(dim=128, n_layers=11)), "text_config"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_config(name, fail, tmp_path):
    edit, words = BAD_CONFIGS[name]
    assert words in fail(2, "inspect", "--model", str(edited_config(tmp_path, edit)))


def test_config_that_is_not_json(fail, tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert "JSON" in fail(2, "inspect", "--model", str(tmp_path))


def test_unknown_config_key_is_listed_and_not_fatal(capsys, tmp_path):
    directory = edited_config(tmp_path, lambda c: c["text_config"].update(colour="blue"))
    assert main(["inspect", "--no-segments", "--model", str(directory)]) == 0
    assert "colour" in capsys.readouterr().out


# -- model files: 3 ----------------------------------------------------------------------------------------


def test_model_that_is_an_id(fail):
    assert "nothing is ever downloaded" in fail(3, "inspect", "--model", "deepseek-ai/DeepSeek-V4.1-Flash")


def test_directory_without_a_config(fail, tmp_path):
    assert "config.json" in fail(3, "inspect", "--model", str(tmp_path))


@pytest.fixture
def copy(tmp_path) -> Path:
    """The excerpt's config and tokenizer, without weights."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((EXCERPT / name).read_bytes())
    return tmp_path


def generate(directory: Path) -> list[str]:
    return ["generate", "--model", str(directory), *PROMPT, "--max-tokens", "1"]


def test_no_weights(fail, copy):
    assert "neither" in fail(3, *generate(copy))


def test_missing_shard(fail, copy):
    index = {"weight_map": {WEIGHT: "model-00001-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "shard is missing" in fail(3, *generate(copy))


def test_truncated_file(fail, copy):
    whole = (EXCERPT / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[:-1000])
    assert "cut off" in fail(3, *generate(copy))


def test_file_that_is_no_checkpoint(fail, copy):
    (copy / "model.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"not a json text!")
    assert "JSON" in fail(3, *generate(copy))


BAD_TENSORS: dict[str, tuple[Callable[[dict], object], str]] = {
    "missing scale": (lambda t: t.pop(SCALE), SCALE),
    "missing weight": (lambda t: t.pop("norm.weight"), "norm.weight"),
    "wrong dtype": (lambda t: t.update({SCALE: t[SCALE].view(torch.uint8)}), "U8"),
    "wrong shape": (lambda t: t.update({WEIGHT: t[WEIGHT][:-1].clone()}), "shape"),
    "unexpected tensor": (lambda t: t.update(colour=torch.zeros(1)), "colour"),
    "NaN scale": (lambda t: t[SCALE].view(torch.uint8).fill_(255), "NaN"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensor(name, fail, copy):
    edit, words = BAD_TENSORS[name]
    tensors = load_file(EXCERPT / "model.safetensors")
    edit(tensors)
    save_file(tensors, copy / "model.safetensors")
    assert words in fail(3, *generate(copy))


# -- devices and memory: 4, 5; faults: 6 -------------------------------------------------------------------


def test_absent_gpu(fail):
    assert "is not there" in fail(4, "inspect", "--device", "cuda:99")


def test_graph_mode(fail):
    assert "CUDA graphs" in fail(4, "bench", "--mode", "graph")


def test_model_larger_than_memory(fail, monkeypatch):
    monkeypatch.setattr("dsv41.runner.report.device_memory", lambda hardware: 1_000_000)
    assert "1 MB" in fail(5, "generate", *PROMPT)


def test_runtime_fault(fail, monkeypatch):
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the device fell off\nand a page of details")

    monkeypatch.setattr("dsv41.run.load", broken)
    assert fail(6, "generate", *PROMPT) == "error: the device fell off"


def test_interrupt(fail, monkeypatch):
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dsv41.run.load", interrupted)
    assert fail(130, "generate", *PROMPT) == "error: interrupted"


def test_debug_shows_the_traceback(capsys):
    assert main(["inspect", "--preset", "huge", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


# -- in a process of its own -------------------------------------------------------------------------------


def process(*argv: str, **kwargs) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "dsv41.run", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, **kwargs)


@pytest.mark.parametrize(
    ("code", "argv"),
    [
        (2, ["bench", "--mode", "fast"]),
        (3, ["inspect", "--model", "/nowhere"]),
        (4, ["bench", "--mode", "graph"]),
    ],
)
def test_exit_code_of_the_process(code, argv):
    done = process(*argv)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_closed_pipe_is_silent():
    root = Path(__file__).resolve().parents[1]
    script = f"{sys.executable} -m dsv41.run inspect --quiet --no-segments | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=root, check=False)
    assert done.stderr == ""


# -- what works --------------------------------------------------------------------------------------------


def test_inspect(capsys, tmp_path):
    output = tmp_path / "out.jsonl"
    assert main(["inspect", "--context", "4k", "--output", str(output)]) == 0
    text = capsys.readouterr().out
    for words in ("layer plan", "caches of one request", "memory bill", "segments: 23", "backends", "python"):
        assert words in text
    row = json.loads(output.read_text())
    assert row["source"] == "tiny"
    assert {op for segment in row["segments"] if segment["eager"] for op in segment["ops"]} == {
        "select",
        "sparse_attention",
    }


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("sm90", ("fits           sm90 (the default stays cpu)", "sm90           runs")),
        (
            "sm100",
            ("fits           sm100 (", "no: attention=mega cannot run this model", "no: attention=gluon"),
        ),
        ("sm120", ("fits           sm120 (", "it needs the package 'flashinfer' (pip install")),
        ("sm89", ("fits           none: no preset fits SM89", "* reference")),
    ],
)
def test_inspect_backends_of_another_gpu(capsys, tmp_path, monkeypatch, gpu, words):
    """On a machine without that GPU and its packages: the tables alone, with the reasons."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    output = tmp_path / "out.jsonl"
    assert main(["inspect", "--backends", "--as", gpu, "--output", str(output)]) == 0
    text = capsys.readouterr().out
    for word in words:
        assert word in text
    assert "layer plan" not in text
    row = json.loads(output.read_text())
    assert row["device"] == gpu.upper()
    assert row["presets"]["cpu"] is None
    assert (row["reasons"]["attention"]["gluon"] is None) == (gpu == "sm90")


def test_inspect_backends_of_this_machine(capsys):
    assert main(["inspect", "--backends"]) == 0
    assert capsys.readouterr().out.startswith("presets on ")


def test_inspect_of_a_choice_that_another_gpu_refuses(fail, capsys):
    """The table first, then the sentence that a run there would end with."""
    assert "attention=gluon cannot run on SM100" in fail(2, "inspect", "--as", "sm100", "--backends", "sm90")


def test_inspect_of_a_directory_reads_its_config_alone(capsys, copy):
    assert main(["inspect", "--no-segments", "--quiet", "--model", str(copy)]) == 0
    captured = capsys.readouterr()
    assert f"checkpoint {copy}" in captured.out
    assert captured.err == ""


def test_generate_ids(capsys, tmp_path):
    output = tmp_path / "out.jsonl"
    argv = ["generate", *PROMPT, "--max-tokens", "4", "--ignore-eos", "--output", str(output)]
    assert main(argv) == 0
    first = capsys.readouterr()
    row = json.loads(output.read_text())
    assert [int(item) for item in first.out.split()] == row["tokens"]
    assert len(row["tokens"]) == 4
    assert row["finish_reason"] == "length"
    assert "stand-ins" in first.err
    assert main([*argv, "--quiet"]) == 0
    second = capsys.readouterr()
    assert (second.out, second.err) == (first.out, "")


def test_generate_text(capsys):
    argv = ["generate", "--model", str(EXCERPT), "--prompt", "The river", "--max-tokens", "5", "--ignore-eos"]
    assert main([*argv, "--temperature", "0.8", "--top-p", "0.9", "--seed", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert "tensors" in captured.err


def test_bench(capsys, tmp_path):
    output = tmp_path / "out.jsonl"
    lists = ["--batch", "1,2", "--prompt-len", "9", "--depth", "9", "--gen-len", "2", "--repeat", "1"]
    assert main(["bench", "--mode", "eager", *lists, "--output", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["kind"], row["batch"]) for row in rows] == [
        ("prefill", 1),
        ("decode", 1),
        ("prefill", 2),
        ("decode", 2),
    ]
    assert len(summary["rows"]) == len(rows)
    for row in rows:
        assert len(row["milliseconds"]["samples"]) == (1 if row["kind"] == "prefill" else 2)
        assert row["parity"]["worst_row"] <= row["parity"]["limit"]
        assert row["tokens_per_second"] > 0
        assert row["fraction_of_roof"] > 0
        assert any("stand-in" in item for item in row["synthetic"])


def test_bench_compiled(capsys, monkeypatch):
    """The graph path, without Inductor's half minute."""
    monkeypatch.setattr(bench, "CompiledModule", partial(bench.CompiledModule, inner="eager"))
    lists = ["--batch", "2", "--prompt-len", "9", "--depth", "9", "--gen-len", "1", "--repeat", "1"]
    assert main(["bench", "--mode", "compile", *lists]) == 0
    captured = capsys.readouterr()
    assert "compiled 2 graphs" in captured.err
    assert {row["mode"] for row in json.loads(captured.out.splitlines()[-1])["rows"]} == {"compile"}


def test_bench_scenario_names_its_rows(capsys, monkeypatch, tmp_path):
    folder = tmp_path / "profiles" / "scenarios"
    folder.mkdir(parents=True)
    lists = 'mode = ["eager"]\nbatch = [1]\nprompt_len = [4]\ndepth = []\nrepeat = 1\n'
    (folder / "mine.toml").write_text('name = "mine"\npreset = "tiny"\n' + lists)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--scenario", "mine", "--quiet"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["scenario"] for row in summary["rows"]] == ["mine"]


def test_bench_refuses_numbers_without_parity(fail, monkeypatch):
    """A reference that differs from what is measured must stop the run before the first row."""

    def wrong(model):
        def run(step, caches):
            output = model.decoder(step, caches)
            return type(output)(output.hidden.flip(-1), output.features, output.fault_layer)

        return run

    monkeypatch.setattr("dsv41.runner.parity.reference_run", wrong)
    argv = ["bench", "--mode", "eager", "--batch", "1", "--prompt-len", "4", "--depth", "4", "--gen-len", "1"]
    assert "no numbers" in fail(1, *argv, limit=30)


def test_profile(capsys, tmp_path):
    """What a user gets: a summary whose parts add up to the step, a trace, and what to type for Nsight."""
    files = {name: tmp_path / name for name in ("s.csv", "t.json", "rows.jsonl")}
    outputs = ["--summary", str(files["s.csv"]), "--trace", str(files["t.json"])]
    argv = ["profile", "decode", "--batch", "2", "--depth", "5", "--steps", "1", "--warmup", "1"]
    assert main([*argv, *outputs, "--output", str(files["rows.jsonl"])]) == 0
    captured = capsys.readouterr()
    with files["s.csv"].open() as file:
        rows = {row["part"]: float(row["milliseconds"]) for row in csv.DictReader(file)}
    step = rows.pop("step")
    assert sum(rows.values()) == pytest.approx(step, rel=0.02)
    assert {"attention.sparse_attention", "moe.experts", "linear.linear_fp8", "sampling"} <= set(rows)
    assert json.loads(files["t.json"].read_text())["traceEvents"]
    row = json.loads(files["rows.jsonl"].read_text())
    assert (row["profile"], row["kind"], row["batch"], row["context"]) == ("tiny", "decode", 2, 5)
    assert row["stand_in_weights"]
    assert {part["part"] for part in row["parts"]} == set(rows)
    commands = [line.split() for line in captured.out.splitlines() if line.split()[0] in ("nsys", "ncu")]
    assert [command[0] for command in commands] == ["nsys", "ncu"]
    assert all(command[-len(argv) :] == argv for command in commands)
    assert "nvtx" in captured.err or "nvtx" in sys.modules


def test_profile_alone_prints_its_steps(capsys):
    assert main(["profile", "prefill", "--prompt-len", "6", "--steps", "1", "--warmup", "1", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "a step takes" in captured.out
    assert "parts of" not in captured.out


def test_profile_faults(fail, monkeypatch):
    """A captured step needs a GPU, and a fault in the middle is one line like anywhere else."""
    assert "CUDA graphs need a GPU" in fail(4, "profile", "--mode", "graph", "--device", "cpu")

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the device fell off")

    monkeypatch.setattr("dsv41.runner.trace.Driver.step", broken)
    assert fail(6, "profile") == "error: the device fell off"


def test_check(capsys, tmp_path):
    output = tmp_path / "out.jsonl"
    assert main(["check", "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert "0 FAIL, 0 SKIP" in text
    assert "this does not show" in text
    names = [json.loads(line)["name"] for line in output.read_text().splitlines()]
    assert any(name.startswith("release fp32-noquant") for name in names)
    assert {"chunked = one-shot", "decode = prefill", "batch = alone", "padded = exact"} <= set(names)


def test_check_fails_on_a_wrong_model(fail, monkeypatch):
    """Negative control: without the sinks' share of the softmax the recorded logits are out of reach."""

    def wrong(*args, **kwargs):
        model = real(*args, **kwargs)
        for layer in model.decoder.layers:
            layer.attention.sink.fill_(-torch.inf)
        return model

    real = check.load
    monkeypatch.setattr(check, "load", wrong)
    monkeypatch.setattr(check, "invariants", lambda *args: iter(()))
    assert "release fp32-noquant" in fail(1, "check", limit=60)
