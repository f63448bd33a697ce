"""What compiling leaves behind: one directory for each thing that is compiled for, and one file to carry it.

    DIR/<key>/key.json       what the key stands for
    DIR/<key>/inductor/      Inductor's cache
    DIR/<key>/triton/        Triton's cache: the package's own kernels and Inductor's
    DIR/<key>/starts.jsonl   one line a start: how long its phases took, what was found and what was compiled

The key is a hash of all that the content depends on, so a change of any of it begins an empty directory and
the old one may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

import dsv41

KEY, GRAPHS, KERNELS = "key.json", "graphs.bin", "triton"  # members of the file
GROUP = "__grp__"  # Triton's list of the files of a kernel, by absolute path


def source_hash() -> str:
    """A hash of the package's own sources: names and contents of its Python files."""
    root, digest = Path(dsv41.__path__[0]), hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True)
class Artifacts:
    """The directory under `root` for what is compiled for `parts`: JSON values by name."""

    root: Path
    parts: Mapping[str, Any]

    @property
    def key(self) -> str:
        """16 hexadecimal digits."""
        text = json.dumps(self.parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def directory(self) -> Path:
        return self.root / self.key

    @property
    def environment(self) -> dict[str, str]:
        """What makes Inductor and Triton use the directory, if it is set before the first compile."""
        return {
            "TORCHINDUCTOR_CACHE_DIR": str(self.directory / "inductor"),
            "TRITON_CACHE_DIR": str(self.directory / "triton"),
        }

    def note(self, start: Mapping[str, Any]) -> None:
        """Add a line to `starts.jsonl`, and say beside it what the directory is for."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / KEY).write_text(json.dumps(self.parts, indent=1, sort_keys=True), encoding="utf-8")
        with (self.directory / "starts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(start) + "\n")

    def save(self, path: Path) -> str:
        """Write what this process compiled or found as one file; returns what is in it, for people.

        Graphs are those of `torch.compiler.save_cache_artifacts`: Inductor's code with its Triton binaries;
        C++ compiles again. Beside them lie the files of Triton's cache, the package's own kernels.
        """
        graphs = torch.compiler.save_cache_artifacts()
        files = list(self._kernel_files())
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr(KEY, json.dumps(self.parts))
            archive.writestr(GRAPHS, graphs[0] if graphs is not None else b"")
            for file in files:
                name = PurePosixPath(KERNELS, *file.relative_to(self.directory / "triton").parts)
                archive.writestr(str(name), _portable(file))
        return _content(graphs[1] if graphs is not None else None, len(files))

    def load(self, path: Path) -> str:
        """Put a saved file's content where Inductor and Triton look for it; returns what was in it.

        The environment must be set. The file is trusted: it holds code that will run.

        Raises ValueError for a file that is damaged, is no such file, or was saved under another key;
        nothing is changed then. OSError for one that cannot be read.
        """
        try:
            with zipfile.ZipFile(path) as archive:
                content = {name: archive.read(name) for name in archive.namelist()}  # checks every checksum
            parts, graphs = json.loads(content.pop(KEY)), content.pop(GRAPHS)
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, ValueError) as error:
            raise ValueError(f"{path} is damaged, or no file of compiled artifacts: {error}") from None
        wrong = next((name for name in content if not _is_kernel_file(PurePosixPath(name))), None)
        if wrong is not None:
            raise ValueError(f"{path} is no file of compiled artifacts: it holds {wrong}")
        if parts != self.parts:
            raise ValueError(f"{path} was compiled for something else: {_difference(parts, self.parts)}")
        info = torch.compiler.load_cache_artifacts(graphs) if graphs else None
        if graphs and info is None:
            raise ValueError(f"{path} is damaged: torch cannot read the graphs in it")
        for name, data in content.items():
            _unpack(self.directory, name, data)
        return _content(info, len(content))

    def _kernel_files(self) -> Iterator[Path]:
        folder = self.directory / "triton"
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            if path.is_file() and path.name != "lock" and not any(part.startswith("tmp.") for part in parts):
                yield path


def _content(info: Any, num_files: int) -> str:
    graphs = 0 if info is None else len(info.artifacts["inductor"])
    return f"{graphs} graphs and {num_files} files of kernels"


def _is_kernel_file(name: PurePosixPath) -> bool:
    return name.parts[0] == KERNELS and len(name.parts) > 1 and ".." not in name.parts


def _portable(path: Path) -> bytes:
    """A file of Triton's cache; a group without the directory in its paths."""
    if not path.name.startswith(GROUP):
        return path.read_bytes()
    group = json.loads(path.read_text(encoding="utf-8"))
    children = {name: Path(child).name for name, child in group["child_paths"].items()}
    return json.dumps({"child_paths": children}).encode()


def _unpack(directory: Path, name: str, data: bytes) -> None:
    """The opposite of `_portable`, at the file's place."""
    path = directory.joinpath(*PurePosixPath(name).parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.startswith(GROUP):
        children = json.loads(data)["child_paths"]
        data = json.dumps({"child_paths": {k: str(path.with_name(v)) for k, v in children.items()}}).encode()
    path.write_bytes(data)


def _difference(there: Any, here: Mapping[str, Any]) -> str:
    """The parts that differ, with both values where they are short."""
    if not isinstance(there, dict):
        return "its key is no object"
    found = []
    for name in sorted(there.keys() | here.keys()):
        theirs, ours = json.dumps(there.get(name)), json.dumps(here.get(name))
        if theirs != ours:
            long = len(theirs) + len(ours) > 80
            found.append(f"another {name}" if long else f"{name} {theirs} there, {ours} here")
    return ", ".join(found)
