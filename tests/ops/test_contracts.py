"""What every op promises whatever it computes: schema, fake, mutation, strides, signatures.

Ops and implementations are found, not listed: a new op without a sample fails here, and so does a new
implementation without `why_not`.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41 import ops
from dsv41.backends import FAMILIES
from dsv41.hardware import Hardware
from dsv41.ops import records
from dsv41.ops.library import NAMESPACE, implementation, is_eager
from dsv41.ops.streams import nothing_forked

HARDWARE = [Hardware("cpu", 0, "CPU", 0)] + [
    Hardware("cuda", sm, f"sm{sm}", 1 << 37) for sm in (80, 90, 100, 120)
]
DTYPES = (torch.bfloat16, torch.float32)


def _overloads(family: str) -> dict[str, torch._ops.OpOverload]:
    """The ops that `ops/<family>/op.py` declares, by name."""
    members = vars(importlib.import_module(f"dsv41.ops.{family}.op")).values()
    return {op._schema.name.split("::")[1]: op for op in members if isinstance(op, torch._ops.OpOverload)}


FOUND = sorted(module.name for module in pkgutil.iter_modules(ops.__path__) if module.ispkg)
OPS = {name: (family, op) for family in FOUND for name, op in _overloads(family).items()}
IMPLEMENTATIONS = [
    (family, path.stem)
    for family in FOUND
    for path in sorted((Path(ops.__path__[0]) / family).glob("*.py"))
    if path.stem not in ("__init__", "op")
    and any(f"def {name}(" in path.read_text() for name in _overloads(family))
]

# ---------------------------------------------------------------------- samples
# Small sizes, none of them a row count that is tested: 3 heads, 64 channels of which 16 rotate, 2 requests.

Sample = Callable[[int, torch.dtype], list[Any]]
SAMPLES: dict[str, Sample] = {}
HEADS, DIM, ROPE, PAGE, PAGES = 3, 64, 16, 4, 6


def sample(make: Sample) -> Sample:
    """Register the arguments (without `impl`) of the op called like the function, for T rows of a dtype."""
    SAMPLES[make.__name__] = make
    return make


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def ids(*shape: int, below: int, dtype: torch.dtype = torch.int64, least: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(below)
    return torch.randint(least, below, shape, generator=generator, dtype=dtype)


def scale_bytes(*shape: int) -> Tensor:
    return ids(*shape, below=129, least=125, dtype=torch.uint8)


def fp8(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return normal(rows, columns).to(torch.float8_e4m3fn), scale_bytes(-(-rows // 32), -(-columns // 32))


def fp4(*shape: int) -> tuple[Tensor, Tensor]:
    *outer, columns = shape
    return ids(*outer, columns // 2, below=256, dtype=torch.uint8), scale_bytes(*outer, columns // 32)


def rows_record(dtype: torch.dtype) -> str:
    return "rows_bf16" if dtype == torch.bfloat16 else "rows_fp32"


def every_other_slot(rows: int) -> Tensor:
    """int64 [T]: 1, 3, 5, ... and -1 for the third row."""
    slots = 2 * torch.arange(rows) + 1
    return torch.where(torch.arange(rows) == 2, -1, slots)


@sample
def sparse_attention(rows: int, dtype: torch.dtype) -> list[Any]:
    cache, record = normal(PAGES, PAGE, DIM, dtype=dtype), rows_record(dtype)
    window_slots = ids(rows, 7, below=PAGES * PAGE, dtype=torch.int32, least=-1)
    state_slots = ids(rows, 9, below=PAGES * PAGE, dtype=torch.int32, least=-1)
    q, sink = normal(rows, HEADS + 1, DIM, dtype=dtype), normal(HEADS)  # one head of padding
    return [q, cache, window_slots, record, PAGE, cache + 1, state_slots, record, PAGE, sink, ROPE, False]


@sample
def compress(rows: int, dtype: torch.dtype) -> list[Any]:
    """Ratio 2 from position 3: row 0 closes a kept group, the last row (of an odd count) stays open."""
    row, none = torch.arange(rows), torch.full((rows,), -1)
    closes = (row + 3) % 2 == 1
    partner_row = torch.where(closes & (row > 0), row - 1, none)
    partner_slot = torch.where(row == 0, 2, none)
    open_slot = torch.where(closes, none, row)
    tensors = [normal(rows, 2 * DIM), row + 3, partner_row, partner_slot, open_slot, normal(DIM).bfloat16()]
    return [*tensors, normal(8, 2 * DIM), 2, 1e-20, dtype]


@sample
def engram_hash(rows: int, dtype: torch.dtype) -> list[Any]:
    tokens, back, image = ids(rows, below=50), ids(rows, 3, below=50, least=-1), ids(rows, below=2).bool()
    primes = torch.tensor([[53, 59], [61, 67], [71, 73]])
    return [tokens, back, image, ids(50, below=40), ids(4, below=1 << 40), primes, torch.arange(6) * 80, 2]


@sample
def engram_lookup(rows: int, dtype: torch.dtype) -> list[Any]:
    return [
        normal(90, DIM).to(torch.float8_e4m3fn),
        scale_bytes(90, DIM // 32),
        ids(rows, 6, below=90),
        dtype,
    ]


@sample
def engram_write(rows: int, dtype: torch.dtype) -> list[Any]:
    streams, kv = normal(rows, 4, DIM, dtype=dtype), normal(rows, 5 * DIM, dtype=dtype)
    query, key = normal(4, DIM).bfloat16(), normal(4, DIM).bfloat16() + 1
    return [streams, kv, query, key, ids(rows, below=2).bool(), 1e-20]


def tickets() -> Tensor:
    return torch.zeros(4, dtype=torch.int32)


@sample
def hyper_coefficients(rows: int, dtype: torch.dtype) -> list[Any]:
    return [
        normal(rows, 4, DIM, dtype=dtype),
        normal(24, 4 * DIM),
        normal(24),
        normal(3),
        tickets(),
        20,
        1e-6,
        1e-20,
    ]


@sample
def hyper_collapse(rows: int, dtype: torch.dtype) -> list[Any]:
    return [normal(rows, 4, DIM, dtype=dtype), normal(rows, 4), normal(DIM).bfloat16(), 1e-20]


@sample
def hyper_expand(rows: int, dtype: torch.dtype) -> list[Any]:
    y, streams = normal(rows, DIM, dtype=dtype), normal(rows, 4, DIM, dtype=dtype)
    return [y, streams, normal(rows, 4), normal(rows, 4, 4), normal(rows, 4), nothing_forked()]


@sample
def hyper_update(rows: int, dtype: torch.dtype) -> list[Any]:
    norm, eps = hyper_collapse(rows, dtype)[2:]
    return [*hyper_expand(rows, dtype), norm, tickets(), eps]


@sample
def index_query(rows: int, dtype: torch.dtype) -> list[Any]:
    return [normal(rows, HEADS, DIM, dtype=dtype), normal(rows, HEADS), normal(rows, ROPE), "mxfp4_68", True]


def index_inputs(rows: int, dtype: torch.dtype) -> list[Any]:
    """Two requests with shuffled pages, the third row is padding."""
    request = torch.where(torch.arange(rows) == 2, -1, torch.arange(rows) % 2).int()
    num_states = torch.where(request < 0, 0, 3 + 2 * torch.arange(rows)).int()
    q, weights = normal(rows, HEADS, DIM, dtype=dtype), normal(rows, HEADS, dtype=dtype)
    table = torch.tensor([[4, 2, 0], [5, 1, 3]], dtype=torch.int32)
    return [q, weights, normal(PAGES, PAGE, DIM, dtype=dtype), table, request, num_states]


@sample
def index_scores(rows: int, dtype: torch.dtype) -> list[Any]:
    return [*index_inputs(rows, dtype), 3 * PAGE, rows_record(dtype), PAGE]


@sample
def top_k(rows: int, dtype: torch.dtype) -> list[Any]:
    return [normal(rows, 12), ids(rows, below=13, dtype=torch.int32), 4]


@sample
def candidate_blocks(rows: int, dtype: torch.dtype) -> list[Any]:
    return [normal(rows, 12), ids(rows, below=13, dtype=torch.int32), 4, 3]


@sample
def select(rows: int, dtype: torch.dtype) -> list[Any]:
    """Candidate blocks of 3 states: the first and the newest."""
    inputs = index_inputs(rows, dtype)
    newest = (inputs[-1] - 1).div(3, rounding_mode="floor")
    candidates = torch.stack((torch.zeros_like(newest), torch.where(newest > 0, newest, -1)), dim=1)
    return [*inputs, candidates.int(), 4, 2, 3, rows_record(dtype), PAGE, False]


@sample
def step_rows(rows: int, dtype: torch.dtype) -> list[Any]:
    """Requests 2 and 0 of three, one row of padding."""
    first = rows // 2
    tables = [ids(3, 40, below=50, dtype=torch.int32), *(ids(3, 10, below=6, dtype=torch.int32),) * 2]
    counts = torch.tensor([[3, 0, 0, 0], [0, 0, 0, 0], [9, 8, 4, 4]])
    own = [torch.tensor([2, 0]), torch.tensor([first, max(rows - first - 1, 0)])]
    return [*tables, counts, *own, rows, 5, 2, PAGE, 8, 1 << 30, 2]


@sample
def window_rows(rows: int, dtype: torch.dtype) -> list[Any]:
    request, positions = torch.arange(rows) % 3 - 1, ids(rows, below=38)
    return [ids(3, 10, below=6, dtype=torch.int32), request.int(), positions, positions - 2, 5, PAGE]


@sample
def linear_fp8(rows: int, dtype: torch.dtype) -> list[Any]:
    return [normal(rows, DIM, dtype=dtype), *fp8(80, DIM), True, False]


@sample
def linear(rows: int, dtype: torch.dtype) -> list[Any]:
    return [normal(rows, DIM, dtype=dtype), normal(80, DIM).bfloat16(), torch.float32, False]


@sample
def rms_norm(rows: int, dtype: torch.dtype) -> list[Any]:
    return [normal(rows, DIM, dtype=dtype), normal(DIM).bfloat16(), 1e-20]


@sample
def grouped_output(rows: int, dtype: torch.dtype) -> list[Any]:
    return [normal(rows, 4, DIM, dtype=dtype), normal(rows, ROPE), *fp8(2 * 32, 2 * DIM), 2, False]


@sample
def route(rows: int, dtype: torch.dtype) -> list[Any]:
    biases, flags = (normal(12), -normal(12)), (ids(rows, below=2).bool(), torch.arange(rows) != 2)
    return [normal(rows, DIM, dtype=dtype), normal(12, DIM).bfloat16(), *biases, *flags, 3, 1.5]


@sample
def experts(rows: int, dtype: torch.dtype) -> list[Any]:
    chosen = (torch.arange(rows).unsqueeze(1) + torch.arange(3)) % 6
    chosen[2:3] = -1
    weights = torch.where(chosen < 0, 0.0, normal(rows, 3).abs())
    stored = [*fp4(6, 2 * 32, DIM), *fp4(6, DIM, 32)]
    x, shared = normal(rows, DIM, dtype=dtype), normal(rows, DIM, dtype=dtype)
    return [x, chosen.int(), weights, *stored, shared, nothing_forked(), 2.0, True, False]


@sample
def shared_expert(rows: int, dtype: torch.dtype) -> list[Any]:
    stored = [*fp8(2 * 32, DIM), *fp8(DIM, 32)]
    return [normal(rows, DIM, dtype=dtype), *stored, 2.0, True, False, "reference"]


@sample
def project_inputs(rows: int, dtype: torch.dtype) -> list[Any]:
    return [
        normal(rows, DIM, dtype=dtype),
        *fp8(80, DIM),
        normal(14, DIM).bfloat16(),
        True,
        False,
        "reference",
    ]


@sample
def publish_window(rows: int, dtype: torch.dtype) -> list[Any]:
    q, kv = normal(rows, HEADS, DIM, dtype=dtype), normal(rows, DIM, dtype=dtype)
    cache = torch.zeros(PAGES, PAGE, DIM, dtype=dtype)
    fixed = [normal(DIM).bfloat16(), normal(rows, ROPE), every_other_slot(rows), cache]
    return [q, kv, *fixed, rows_record(dtype), PAGE, HEADS + 2, 1e-20, True]


@sample
def publish_states(rows: int, dtype: torch.dtype) -> list[Any]:
    pages = torch.zeros(PAGES, records.page_bytes("nvfp4_288", PAGE, DIM, ROPE) + 8, dtype=torch.uint8)
    latent = normal(rows, DIM, dtype=dtype)
    return [latent, normal(rows, ROPE), every_other_slot(rows), pages, "nvfp4_288", PAGE, True]


@sample
def publish_index_k(rows: int, dtype: torch.dtype) -> list[Any]:
    pages = torch.zeros(PAGES, records.page_bytes("mxfp4_68", PAGE, DIM, 0) + 8, dtype=torch.uint8)
    rest = [normal(DIM).bfloat16(), normal(rows, ROPE), every_other_slot(rows), pages]
    return [normal(rows, DIM, dtype=dtype), *rest, "mxfp4_68", PAGE, 1e-20, True]


# ---------------------------------------------------------------------- the tests

each_op = pytest.mark.parametrize("name", sorted(OPS))
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
each_implementation = pytest.mark.parametrize(("family", "impl"), IMPLEMENTATIONS)


def copied(args: list[Any]) -> list[Any]:
    return [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]


def strided(args: list[Any], rows: int) -> list[Any]:
    """Every per-row tensor as a slice of a wider one, which is what `split` makes of a joined projection."""

    def slice_of_wider(x: Tensor) -> Tensor:
        garbage = x.new_full((rows, 8), torch.nan if x.is_floating_point() else 77)
        wide = torch.cat((garbage, x.flatten(1), garbage), dim=1)
        return wide[:, 8:-8].unflatten(1, x.shape[1:])

    is_rows = [isinstance(arg, Tensor) and arg.dim() > 1 and len(arg) == rows for arg in args]
    return [slice_of_wider(arg) if mine else arg for arg, mine in zip(args, is_rows, strict=True)]


def run(name: str, args: list[Any], impl: str = "reference") -> tuple[Tensor, ...]:
    result = OPS[name][1](*args, impl)
    return result if isinstance(result, tuple) else () if result is None else (result,)


def bits(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def test_every_op_is_found_and_has_a_sample() -> None:
    """An op registered elsewhere, or without a sample here, would escape every test of this file."""
    registered = [
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("dsv41::")
    ]
    assert set(FOUND) == set(FAMILIES), "backends.py and the folders of ops/ disagree"
    assert sorted(OPS) == sorted(registered) == sorted(SAMPLES)


def test_the_eager_ops_are_the_sparse_indexer_and_attention() -> None:
    """A third eager op would cut every layer once more; a missing tag captures what cannot be captured."""
    assert {name for name, (_, op) in OPS.items() if is_eager(op)} == {"select", "sparse_attention"}


@each_op
@each_dtype
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_schema_and_fake_tell_the_truth(name: str, dtype: torch.dtype, rows: int) -> None:
    """A fake of wrong shape, dtype or strides, an undeclared mutation or an alias breaks only compiled code.
    Five rows come as the model passes them: slices of joined projections. No rows is a legal step."""
    args = SAMPLES[name](rows, dtype)
    checks = ["test_faketensor"]
    if not any(isinstance(arg, Tensor) and arg.dtype == torch.float8_e4m3fn for arg in args):
        checks.append("test_schema")  # it compares by arithmetic, and the CPU has none for fp8
    if rows == 5:
        args = strided(args, rows)
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(OPS[name][1], (*args, "reference"), test_utils=checks)


@pytest.mark.parametrize(
    "name", [name for name, (family, _) in OPS.items() if family != "rows"]
)  # no matrices
@each_dtype
def test_rows_may_be_slices(name: str, dtype: torch.dtype) -> None:
    """A kernel that takes the row pitch for granted reads its neighbour's channels (NaN here)."""
    plain, sliced = copied(SAMPLES[name](5, dtype)), strided(copied(SAMPLES[name](5, dtype)), 5)
    assert any(isinstance(arg, Tensor) and not arg.is_contiguous() for arg in sliced)
    for a, b in zip(run(name, plain), run(name, sliced), strict=True):
        assert torch.equal(bits(a), bits(b))
    for a, b in zip(plain, sliced, strict=True):
        assert not isinstance(a, Tensor) or torch.equal(bits(a), bits(b)), "the written caches differ"


@each_op
@each_dtype
def test_only_declared_arguments_change(name: str, dtype: torch.dtype) -> None:
    """Inductor reorders by the schema: an undeclared write corrupts, a needless (a!) serialises."""
    args = SAMPLES[name](5, dtype)
    before = copied(args)
    results = run(name, args)
    inputs = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
    assert not any(result.untyped_storage().data_ptr() in inputs for result in results), (
        "a result is an input"
    )
    for declared, was, now in zip(OPS[name][1]._schema.arguments, before, args, strict=False):
        if isinstance(now, Tensor):
            written = declared.alias_info is not None and declared.alias_info.is_write
            assert torch.equal(bits(was), bits(now)) != written, declared.name


@each_op
def test_an_unknown_implementation_is_named(name: str) -> None:
    """A typing error must not surface as ModuleNotFoundError from the middle of a step."""
    with pytest.raises(ValueError, match=f"'{OPS[name][0]}' has no implementation 'nonesuch'"):
        run(name, SAMPLES[name](1, torch.bfloat16), "nonesuch")


@each_implementation
def test_an_implementation_has_every_op_with_the_schema_s_arguments(family: str, impl: str) -> None:
    """Arguments go by position: two swapped integers of one type would still run."""
    module = module_of(family, impl)
    for name, op in _overloads(family).items():
        declared = [argument.name for argument in op._schema.arguments][:-1]
        assert list(inspect.signature(getattr(module, name)).parameters) == declared


@each_implementation
def test_why_not_answers_none_or_a_sentence(family: str, impl: str) -> None:
    """The answer is a skip reason, a table cell and the error that a user reads: one line, never a bool."""
    module = module_of(family, impl)
    for hardware in HARDWARE:
        for record in (None, *records.RECORDS):
            reason = module.why_not(hardware, record)
            assert reason is None or (len(reason.split()) > 2 and "\n" not in reason), (
                hardware,
                record,
                reason,
            )
    if impl == "reference":
        assert module.why_not(HARDWARE[0], None) is None, "the reference must run on a CPU"


def module_of(family: str, impl: str) -> Any:
    try:
        return implementation(family, impl)
    except ValueError as missing:
        pytest.skip(str(missing))


def test_namespace_is_ours() -> None:
    assert {op.namespace for _, op in OPS.values()} == {NAMESPACE}
