"""A cold start and a warm one, each in a process of its own with the real Inductor, and the file of compiled
code. Counted, not timed: what Inductor compiled, and what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv41.run import main

ROOT = Path(__file__).resolve().parents[1]
ONE_LAYER = (
    '{"num_layers": 1, "ratios": [1], "kv_sources": [0], "index_sources": [0], "candidate_source": 0,'
    ' "engram.layers": [0], "engram.num_rows": [1025], "draft.stages": 0, "num_experts": 4}'
)


def bench(cache: Path, *argv: str) -> dict[str, Any]:
    """The start of a compiled benchmark, as its last line of JSON tells it; `text` is what people see."""
    sizes = ["--batch", "2", "--prompt-len", "4", "--depth", "4", "--gen-len", "1", "--repeat", "1"]
    command = ["bench", "--mode", "compile", "--set", ONE_LAYER, *sizes, "--device", "cpu"]
    command += ["--late-compile", "error", "--cache-dir", str(cache), *argv]
    done = subprocess.run(
        [sys.executable, "-m", "dsv41.run", *command],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert {row["late_compiles"] for row in rows} == {0}
    return rows[0]["start"] | {"text": done.stdout + done.stderr}


def test_a_cold_start_a_warm_one_and_the_file(tmp_path: Path, capsys, monkeypatch) -> None:
    """One test, because it begins with half a minute of compiling."""
    start = bench(tmp_path / "cache", "--save-compiled", str(tmp_path / "compiled.zip"))
    a_cold_start_compiles_everything(tmp_path, start)
    a_second_process_finds_what_the_first_compiled(tmp_path)
    a_file_fills_an_empty_directory(tmp_path, capsys)
    a_file_for_something_else_is_refused_before_loading(tmp_path, capsys, monkeypatch)


def a_cold_start_compiles_everything(folder: Path, start: dict[str, Any]) -> None:
    """Two graphs, many rows and one, of two segments each around the eager attention."""
    assert (start["segments_found"], start["segments_compiled"]) == (0, 4)
    (directory,) = (folder / "cache").iterdir()
    assert f"compiled code: {folder / 'cache'}, key {directory.name}" in start["text"]
    assert {path.name for path in directory.iterdir()} >= {"inductor", "key.json", "starts.jsonl"}
    assert list((directory / "inductor").iterdir())
    seconds = start["seconds"]
    assert all(seconds[phase] > 0 for phase in ("import", "config", "load", "compile", "capture"))
    assert seconds["ready"] == pytest.approx(sum(seconds.values()) - seconds["ready"])
    assert "start of compile: import " in start["text"]
    assert "segments: 0 found, 4 compiled" in start["text"]


def a_second_process_finds_what_the_first_compiled(folder: Path) -> None:
    start = bench(folder / "cache")
    assert (start["segments_found"], start["segments_compiled"]) == (4, 0)
    (directory,) = (folder / "cache").iterdir()
    notes = [json.loads(line) for line in (directory / "starts.jsonl").read_text().splitlines()]
    assert [note["segments_compiled"] for note in notes] == [4, 0]
    assert {note["mode"] for note in notes} == {"compile"}


def a_file_fills_an_empty_directory(folder: Path, capsys) -> None:
    """With the entries that the process which compiled them left in its own, so that a start finds them. No
    start is tried: it would compile the C++ of the graphs again, which takes long."""
    argv = ["generate", "--prompt-ids", "1,2", "--max-tokens", "1", "--set", ONE_LAYER, "--device", "cpu"]
    file = ["--load-compiled", str(folder / "compiled.zip"), "--cache-dir", str(folder / "elsewhere")]
    assert main([*argv, *file]) == 0
    assert "compiled.zip brings 4 graphs" in capsys.readouterr().err
    entries = [
        {
            str(path.relative_to(root))
            for kind in ("fxgraph", "aotautograd")
            for path in root.rglob(f"{kind}/*/*")
        }
        for root in ((folder / name) for name in ("cache", "elsewhere"))
    ]
    assert entries[0] == entries[1]
    assert len(entries[0]) == 8


def a_file_for_something_else_is_refused_before_loading(folder: Path, capsys, monkeypatch) -> None:
    """One line that says what differs. The weights are not loaded for it."""
    monkeypatch.setattr("dsv41.run.load", lambda *args, **kwargs: pytest.fail("it was loaded"))
    other = ["bench", "--cache-dir", str(folder / "third"), "--load-compiled", str(folder / "compiled.zip")]
    assert main([*other, "--set", ONE_LAYER, "--device", "cpu", "--numerics", "fp32"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert 'numerics "bf16" there, "fp32" here' in last
    (folder / "broken.zip").write_bytes((folder / "compiled.zip").read_bytes()[:1000])
    other[-1] = str(folder / "broken.zip")
    assert main([*other, "--set", ONE_LAYER, "--device", "cpu"]) == 2
    assert "broken.zip is damaged" in capsys.readouterr().err


def test_places_that_cannot_be_written(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert main(["bench", "--cache-dir", str(tmp_path / "file")]) == 2
    assert f"error: --cache-dir {tmp_path / 'file'}: Not a directory" in capsys.readouterr().err
    argv = ["bench", "--cache-dir", str(tmp_path / "c"), "--save-compiled", str(tmp_path / "no" / "f.zip")]
    assert main(argv) == 2
    assert "f.zip: its folder does not exist" in capsys.readouterr().err


def test_inspect_names_the_directory(tmp_path, capsys) -> None:
    assert main(["inspect", "--no-segments", "--cache-dir", str(tmp_path / "c"), "--device", "cpu"]) == 0
    assert f"compiled code      {tmp_path / 'c'}, key " in capsys.readouterr().out
    assert not (tmp_path / "c").exists(), "inspecting leaves nothing behind"
