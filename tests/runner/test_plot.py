"""The chart of decode times: what is drawn as one line, and that a PNG comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsv41.run import main
from dsv41.runner.plot import Series, decode_series, draw, read_rows


def row(batch: int, depth: int, p50: float, **more: Any) -> dict[str, Any]:
    times = {"p10": p50 - 1, "p50": p50, "p90": p50 + 2}
    fixed = {"source": "h200", "device": "H200", "mode": "graph", "kind": "decode"}
    return fixed | {"batch": batch, "depth": depth, "milliseconds": times} | more


ROWS = [row(8, 4096, 14.0), row(1, 131072, 6.0), row(1, 4096, 5.0), row(1, 1 << 20, 7.0)]
PREFILL = row(1, 0, 99.0, kind="prefill", prompt_len=512)


def test_a_line_for_every_batch_along_the_context() -> None:
    series = decode_series([*ROWS, PREFILL, {"throughput": "tiny"}], "depth", "batch")
    assert series == [
        Series("batch 1", (4096, 131072, 1 << 20), (5.0, 6.0, 7.0), (4.0, 5.0, 6.0), (7.0, 8.0, 9.0)),
        Series("batch 8", (4096,), (14.0,), (13.0,), (16.0,)),
    ]


def test_a_line_for_every_context_along_the_batch() -> None:
    series = decode_series(ROWS, "batch", "depth")
    assert [(one.label, one.x) for one in series] == [
        ("depth 4k", (1, 8)),
        ("depth 128k", (1,)),
        ("depth 1M", (1,)),
    ]


def test_modes_and_models_are_apart_and_the_last_row_of_a_case_counts() -> None:
    rows = [*ROWS, row(1, 4096, 50.0, mode="eager"), row(1, 4096, 4.5)]
    series = {one.label: one for one in decode_series(rows, "depth", "batch")}
    assert set(series) == {"graph batch 1", "graph batch 8", "eager batch 1"}
    assert series["graph batch 1"].p50 == (4.5, 6.0, 7.0)
    labels = [one.label for one in decode_series([*ROWS, row(1, 5, 1.0, source="tiny")], "depth", "batch")]
    assert labels == ["h200 batch 1", "h200 batch 8", "tiny batch 1"]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_files_without_rows_are_refused(tmp_path) -> None:
    for name, text, words in (
        ("a", "{", "line 1"),
        ("b", "[1]", "no object"),
        ("c", json.dumps(PREFILL), "no decode rows"),
        ("d", "", "no decode rows"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=words):
            read_rows(tmp_path / name)
    assert read_rows(write(tmp_path / "e", [PREFILL, *ROWS])) == [PREFILL, *ROWS]


def test_saved_rows_become_a_picture(tmp_path) -> None:
    """Both charts of several lines. Skipped without matplotlib, which only the extra `plot` brings."""
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib, of the extra `plot`")
    rows, picture = write(tmp_path / "rows.jsonl", ROWS), tmp_path / "decode.png"
    assert main(["bench", "--from", str(rows), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    draw(ROWS[:1], tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes() != picture.read_bytes()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--from", "rows.jsonl"], "--from needs --plot"),
        (["throughput", "--from", "rows.jsonl", "--plot", "a.png"], "bench steps"),
        (["throughput", "--plot", "a.png"], "takes no --plot"),
        (["--plot", "/nowhere/a.png"], "its folder does not exist"),
    ],
)
def test_bad_flags(argv: list[str], words: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr("dsv41.runner.plot.need_matplotlib", lambda: None)
    assert main(["bench", *argv]) == 2
    assert words in capsys.readouterr().err


def test_without_matplotlib_nothing_is_measured(capsys, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["bench", "--plot", "decode.png"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: --plot needs matplotlib: pip install 'dsv41[plot]'\n"
    assert captured.out == ""
