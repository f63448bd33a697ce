"""The law of the package (ARCHITECTURE.md, "Layers"), read off its syntax trees.

A law is a function from one file to the sentences it breaks. Every law runs over the whole package, and every
law is shown to fail on a small bad file.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "dsv41"
LAYERS = dict.fromkeys(("config", "capacity", "hardware", "released", "rules", "presets"), 0)
LAYERS |= {
    "ops": 1,
    "backends": 2,
    "model": 3,
    "graphs": 4,
    "runner": 5,
    "arguments": 6,
    "exits": 6,
    "run": 6,
}
EVERYWHERE = {"torch", "numpy", "dsv41", *sys.stdlib_module_names}
KERNELS = ("ops/*/triton*.py", "ops/*/gluon*.py")
HOMES = {  # outside package -> the files that may name it; any other outside package may be named nowhere
    "triton": (*KERNELS, "graphs/watch.py"),
    "flash_mla": ("ops/attention/flashmla*.py", "ops/attention/mega.py"),
    "flashinfer": ("ops/attention/flashinfer.py",),
    "safetensors": ("model/weights.py",),
    "transformers": ("runner/tokenizer.py",),
    "tokenizers": ("runner/tokenizer.py",),
    "nvtx": ("runner/trace.py",),
    "matplotlib": ("runner/plot.py",),
}
ONE_FILE = {  # API -> the only file that may name it
    "torch.compile": "graphs/compile.py",
    "torch.library": "ops/library.py",
    "torch.cuda.CUDAGraph": "graphs/capture.py",
    "torch.cuda.get_device_capability": "hardware.py",
    "torch.cuda.nvtx": "runner/trace.py",
    "torch.cuda.profiler": "runner/trace.py",
    "torch.profiler": "runner/trace.py",
    "os.environ": "run.py",
    "os.getenv": "run.py",
}
# The forks of ops; a capture's own stream; the copy of results to the host.
STREAM_HOMES = ("ops/streams.py", "graphs/capture.py", "runner/async_output.py")
STREAM_APIS = (
    *("Stream", "ExternalStream", "StreamContext", "stream", "set_stream"),
    *("current_stream", "default_stream", "get_stream_from_external"),
)
REFERENCE_MAY_IMPORT = ("torch", "dsv41.ops.records", "dsv41.ops.arithmetic")
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "OrderedDict", "Counter", "deque"}
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "clear"}


class File:
    """A source file under its path inside the package."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source, self.parts = path, source, PurePosixPath(path).parts
        self.nodes = list(ast.walk(ast.parse(source)))

    def matches(self, *patterns: str) -> bool:
        return any(PurePosixPath("/" + self.path).match("/" + pattern) for pattern in patterns)

    @cached_property
    def imports(self) -> list[str]:
        """Dotted names of what the file imports: `from a import b` is `a.b`, `import_module("a")` is `a`."""
        names = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
                names += [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        return names

    @cached_property
    def import_time(self) -> list[ast.AST]:
        """What runs when the module is imported: everything outside functions and classes."""
        found, pending = [], list[ast.AST](ast.parse(self.source).body)
        while pending:
            found.append(node := pending.pop())
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                pending += ast.iter_child_nodes(node)
        return found


def dotted(node: ast.AST) -> str:
    """`a.b.c` of nested attributes; an expression at the root is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def layers(file: File) -> Iterator[str]:
    """A layer names only layers below it, or its own; the package's public names are for `run` alone."""
    if file.path == "__init__.py":
        return
    own = LAYERS.get(file.parts[0].removesuffix(".py"))
    if own is None:
        yield "stands in no layer"
        return
    for name in {*file.imports, *(dotted(node) for node in file.nodes if isinstance(node, ast.Attribute))}:
        root, *rest = name.split(".")
        if root == "dsv41" and rest and not rest[0].startswith("__") and LAYERS.get(rest[0], 6) > own:
            yield f"names {name} from above"


def absolute_imports(file: File) -> Iterator[str]:
    for node in file.nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"imports {'.' * node.level}{node.module or ''} relatively"


def is_implementation(module: str) -> bool:
    path = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
    return path.exists() and "def why_not(" in path.read_text()


def no_sibling_implementation(file: File) -> Iterator[str]:
    """Either of two implementations can be deleted, and neither falls back to the other in silence."""
    own = "dsv41." + file.path.removesuffix(".py").replace("/", ".")
    for name in file.imports:
        module = ".".join(name.split(".")[:4])
        if within(module, own.rpartition(".")[0]) and module != own and is_implementation(module):
            yield f"imports the implementation {module}"


def reference_imports(file: File) -> Iterator[str]:
    if file.matches("ops/*/reference.py"):
        for name in file.imports:
            known = any(within(name, allowed) for allowed in REFERENCE_MAY_IMPORT)
            if not known and name.split(".")[0] not in sys.stdlib_module_names:
                yield f"imports {name}"


def outside_packages(file: File) -> Iterator[str]:
    for name in file.imports:
        root = name.split(".")[0]
        if root not in EVERYWHERE and not file.matches(*HOMES.get(root, ())):
            yield f"names {root}"


def one_file_apis(file: File) -> Iterator[str]:
    """Compilation, registration, capture, the device's capability and the environment each have one door."""
    named = file.imports + [dotted(node) for node in file.nodes if isinstance(node, ast.Attribute)]
    for api, home in ONE_FILE.items():
        if file.path != home and any(within(name, api) for name in named):
            yield f"names {api}"


def streams(file: File) -> Iterator[str]:
    """Whoever names streams owes an argument about memory and captures: few files make it for all."""
    named = file.imports + [dotted(node) for node in file.nodes if isinstance(node, ast.Attribute)]
    for api in ("torch.Stream", *(f"torch.cuda.{name}" for name in STREAM_APIS)):
        if not file.matches(*STREAM_HOMES) and any(within(name, api) for name in named):
            yield f"names {api}"


def no_mutable_state(file: File) -> Iterator[str]:
    """A module holds constants. A dict in ALL_CAPS is one as long as nothing writes to it."""
    for node in file.import_time:
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [dotted(target) for target in targets]
        call = dotted(node.value.func).rpartition(".")[2] if isinstance(node.value, ast.Call) else ""
        constant = names == ["__all__"] or (isinstance(node.value, ast.Dict) and all(map(str.isupper, names)))
        if (isinstance(node.value, MUTABLE) or call in MUTABLE_CALLS) and not constant:
            yield f"holds mutable state in {', '.join(names)}"
    for node in file.nodes:
        if isinstance(node, ast.Global):
            yield f"declares {', '.join(node.names)} global"
        written = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        called = isinstance(node, ast.Attribute) and node.attr in MUTATORS
        if (written or called) and isinstance(node.value, ast.Name) and node.value.id.isupper():
            yield f"writes to {node.value.id}"
    for name in file.imports + [dotted(node) for node in file.nodes if isinstance(node, ast.Attribute)]:
        if name in ("functools.cache", "functools.lru_cache"):
            yield f"caches with {name}"


def no_broad_except(file: File) -> Iterator[str]:
    for node in file.nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = {dotted(part) for part in ast.walk(node.type)} if node.type else {"Exception"}
            if caught & {"Exception", "BaseException"}:
                yield f"line {node.lineno} catches everything"


def names(file: File) -> Iterator[str]:
    if file.parts[-1].removesuffix(".py") in ("utils", "common", "helpers"):
        yield "says nothing with its name"
    for node in file.nodes:
        if isinstance(node, ast.ClassDef) and re.search("V4|(?i:deepseek)", node.name):
            yield f"names the model in class {node.name}"


def sizes(file: File) -> Iterator[str]:
    limit = 700 if file.matches(*KERNELS) else 400
    if (lines := len(file.source.splitlines())) > limit:
        yield f"has {lines} lines, more than {limit}"


LAWS: tuple[Callable[[File], Iterator[str]], ...] = (
    layers,
    absolute_imports,
    no_sibling_implementation,
    reference_imports,
    outside_packages,
    one_file_apis,
    streams,
    no_mutable_state,
    no_broad_except,
    names,
    sizes,
)
FILES = [File(p.relative_to(PACKAGE).as_posix(), p.read_text()) for p in sorted(PACKAGE.rglob("*.py"))]

BROKEN = [
    (layers, "ops/moe/op.py", "from dsv41.config import ModelConfig\nfrom dsv41.model.plan import WINDOW"),
    (layers, "model/plan.py", "from dsv41 import runner"),
    (layers, "graphs/compile.py", "import dsv41\nengine = dsv41.LLM"),
    (layers, "runner/check.py", "from dsv41 import LLM"),
    (layers, "kernels/moe.py", ""),
    (absolute_imports, "model/plan.py", "from .layout import NULL_PAGE"),
    (no_sibling_implementation, "ops/moe/triton.py", "from dsv41.ops.moe.reference import route"),
    (no_sibling_implementation, "ops/moe/triton.py", "from dsv41.ops.moe import reference"),
    (reference_imports, "ops/moe/reference.py", "import numpy"),
    (reference_imports, "ops/moe/reference.py", "from dsv41.ops.linear.op import linear"),
    (outside_packages, "ops/moe/reference.py", "def run():\n    import triton.language as tl"),
    (outside_packages, "ops/moe/flashmla.py", "import flash_mla"),
    (outside_packages, "model/checkpoint.py", "from safetensors import safe_open"),
    (outside_packages, "model/engram.py", "import importlib\nimportlib.import_module('transformers')"),
    (outside_packages, "run.py", "import requests"),
    (one_file_apis, "model/decoder.py", "import torch\nrun = torch.compile(print)"),
    (one_file_apis, "ops/moe/op.py", "from torch.library import custom_op"),
    (one_file_apis, "runner/worker.py", "from torch.cuda import CUDAGraph"),
    (one_file_apis, "backends.py", "import torch\nsm = torch.cuda.get_device_capability(0)"),
    (one_file_apis, "backends.py", "import os\nhome = os.environ.get('HOME')"),
    (one_file_apis, "backends.py", "from os import getenv"),
    (one_file_apis, "runner/worker.py", "import torch\nwith torch.cuda.nvtx.range('step'): ..."),
    (one_file_apis, "runner/bench.py", "from torch.profiler import profile"),
    (streams, "ops/projections/overlapped.py", "import torch\nside = torch.cuda.Stream()"),
    (streams, "ops/moe/gluon.py", "import torch\ndef f(side):\n    with torch.cuda.stream(side): ..."),
    (streams, "model/attention.py", "from torch.cuda import current_stream"),
    (streams, "runner/worker.py", "import torch\ndef f(side: torch.Stream) -> None: ..."),
    (no_mutable_state, "model/plan.py", "seen: set[int] = set()"),
    (no_mutable_state, "model/plan.py", "NAMES = [name for name in 'ab']"),
    (no_mutable_state, "model/plan.py", "try: ...\nexcept ImportError:\n    table = {}"),
    (no_mutable_state, "model/plan.py", "TABLE = {}\ndef f(key):\n    TABLE[key] = 1"),
    (no_mutable_state, "model/plan.py", "TABLE = {}\ndef f(key):\n    TABLE.update(key=1)"),
    (no_mutable_state, "model/plan.py", "def f():\n    global count\n    count = 1"),
    (no_mutable_state, "model/plan.py", "import functools\n@functools.lru_cache(1)\ndef f(): ..."),
    (no_mutable_state, "model/plan.py", "from functools import cache"),
    (no_broad_except, "run.py", "try: ...\nexcept: ..."),
    (no_broad_except, "run.py", "try: ...\nexcept (ValueError, Exception): ..."),
    (names, "model/utils.py", ""),
    (names, "model/decoder.py", "class DeepseekDecoder: ..."),
    (names, "model/decoder.py", "class V41Decoder: ..."),
    (sizes, "ops/moe/triton.py", "\n" * 701),
    (sizes, "model/decoder.py", "\n" * 401),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_package_keeps_the_law(law: Callable[[File], Iterator[str]]) -> None:
    assert len(FILES) > 40, "the walk does not see the package"
    broken = [f"{file.path} {sentence}" for file in FILES for sentence in law(file)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(("law", "path", "source"), BROKEN, ids=lambda part: getattr(part, "__name__", None))
def test_the_law_refuses_a_bad_file(law: Callable[[File], Iterator[str]], path: str, source: str) -> None:
    assert len(list(law(File(path, source)))) == 1


def test_every_law_has_a_bad_file() -> None:
    assert {law for law, _, _ in BROKEN} == set(LAWS)


def import_without_outside_packages(module: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter in which every package of `HOMES` is missing."""
    code = f"import sys; sys.modules.update(dict.fromkeys({list(HOMES)!r})); import {module}"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("module", ["dsv41", "dsv41.model.decoder", "dsv41.run"])
def test_the_front_imports_with_torch_alone(module: str) -> None:
    """A machine without Triton, a GPU or vendor kernels must still import the package and print its help."""
    done = import_without_outside_packages(module)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_blocked_interpreter_blocks() -> None:
    assert "ModuleNotFoundError" in import_without_outside_packages("safetensors").stderr
