"""The directory and the file of compiled artifacts. Their content is made by hand here: no compiler runs.
`tests/test_cold_start.py` has the real one."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv41.graphs.artifacts import Artifacts, source_hash

PARTS = {"torch": "2.13", "config": {"layers": list(range(60))}, "triton": None}
INFO = SimpleNamespace(artifacts={"inductor": ["a", "b"]})


@pytest.fixture(autouse=True)
def graphs(monkeypatch) -> dict[str, bytes]:
    """torch's own part of the file, as bytes that go in and come out."""
    kept = {"saved": b"graphs of torch"}
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (kept["saved"], INFO))

    def load(data: bytes) -> object:
        kept["loaded"] = data
        return None if data == b"unreadable" else INFO

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)
    return kept


def filled(root: Path) -> Artifacts:
    """One kernel of Triton's cache, with what must not travel beside it."""
    made = Artifacts(root, PARTS)
    kernel = made.directory / "triton" / "HASH"
    (kernel / "tmp.pid_1").mkdir(parents=True)
    for name, content in {"k.cubin": b"\x7fELF\0", "lock": b"", "tmp.pid_1/k.cubin": b"half"}.items():
        (kernel / name).write_bytes(content)
    children = {name: str(kernel / name) for name in ("k.cubin", "k.json")}
    (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": children}))
    return made


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_a_file_carries_graphs_and_kernels_to_another_directory(tmp_path, graphs) -> None:
    saved = filled(tmp_path / "a").save(tmp_path / "all.zip")
    target = Artifacts(tmp_path / "b", PARTS)
    assert target.load(tmp_path / "all.zip") == saved == "2 graphs and 2 files of kernels"
    assert graphs["loaded"] == graphs["saved"]
    assert files(target.directory) == {"triton/HASH/k.cubin", "triton/HASH/__grp__k.json"}
    group = json.loads((target.directory / "triton/HASH/__grp__k.json").read_text())
    assert group["child_paths"]["k.cubin"] == str(target.directory / "triton/HASH/k.cubin")
    assert (target.directory / "triton/HASH/k.cubin").read_bytes() == b"\x7fELF\0"


def test_a_file_of_another_key_is_refused(tmp_path, graphs) -> None:
    filled(tmp_path / "a").save(tmp_path / "all.zip")
    other = Artifacts(tmp_path / "b", PARTS | {"torch": "2.11", "config": {"layers": []}})
    words = 'compiled for something else: another config, torch "2.13" there, "2.11" here$'
    with pytest.raises(ValueError, match=words):
        other.load(tmp_path / "all.zip")
    assert not (tmp_path / "b").exists()
    assert "loaded" not in graphs


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"graphs.bin") + 14] ^= 0xFF  # in the compressed graphs
    path.write_bytes(data)


def add(name: str, content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(name, content)

    return change


def without_graphs(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("key.json", json.dumps(PARTS))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": cut,
    "a wrong byte": flip,
    "empty": lambda path: path.write_bytes(b""),
    "another file": lambda path: path.write_bytes(b"{}"),
    "a part missing": without_graphs,
    "something else inside": add("notes.txt", b"hello"),
    "a way out": add("triton/../../x", b"hello"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_refused_whole(name: str, tmp_path, graphs) -> None:
    filled(tmp_path / "a").save(tmp_path / "all.zip")
    DAMAGES[name](tmp_path / "all.zip")
    with pytest.raises(ValueError, match=r"all\.zip is (damaged|no file of compiled artifacts)"):
        Artifacts(tmp_path / "b", PARTS).load(tmp_path / "all.zip")
    assert not (tmp_path / "b").exists()
    assert "loaded" not in graphs


def test_graphs_that_torch_cannot_read_are_refused(tmp_path, graphs) -> None:
    graphs["saved"] = b"unreadable"
    filled(tmp_path / "a").save(tmp_path / "all.zip")
    with pytest.raises(ValueError, match="torch cannot read the graphs"):
        Artifacts(tmp_path / "b", PARTS).load(tmp_path / "all.zip")
    assert not (tmp_path / "b").exists()


def test_notes_say_what_the_directory_is_for(tmp_path) -> None:
    made = Artifacts(tmp_path, PARTS)
    for number in range(2):
        made.note({"start": number})
    assert json.loads((made.directory / "key.json").read_text()) == PARTS
    lines = (made.directory / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["start"] for line in lines] == [0, 1]
    assert set(made.environment.values()) == {str(made.directory / name) for name in ("inductor", "triton")}


def test_source_hash_follows_every_file(tmp_path, monkeypatch) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "a.py").write_text("x = 1")
    monkeypatch.setattr("dsv41.__path__", [str(tmp_path)])
    seen = {source_hash()}
    for name, text in (("a.py", "x = 2"), ("ops/b.py", ""), ("ops/b.py", "x")):
        (tmp_path / name).write_text(text)
        seen.add(source_hash())
    (tmp_path / "ops" / "b.py").rename(tmp_path / "ops" / "c.py")
    assert len(seen | {source_hash()}) == 5
