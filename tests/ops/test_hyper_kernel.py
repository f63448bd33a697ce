"""The Triton kernels of the residual copies against the reference.

On a CPU the kernels run in Triton's interpreter, at small sizes, in a process of its own; what they become on
Hopper is compiled there too. `gpu` tests run them at the release's sizes. The kernel always runs before the
reference.

Tolerances. Stored bf16 values: sums of M + 1 float32 products in another order, or fused, move a value across
a rounding boundary now and then, by a bf16 step of the largest term, in a small share of values.
Coefficients: the reference sums in float64. Ours sum 128 products in a tensor core, which truncates (at most
2^-23 of the partial sum a step), then in float32, and evaluate exp, rsqrt and 1/x to an ulp or two; 20 sweeps
renormalise, so that errors do not grow. That is about 3e-7 of the norms of x and fn (root mean square), times
a scale of up to 3.5, times 4.5 for the worst of 100,000, half of it in a coefficient: 2e-6, allowed 8e-6.
"""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from interpreted import (  # noqa: F401
    DEVICE,
    GPU,
    INTERPRETED,
    apart,
    generator,
    gpu,
    interpreted,
    normal,
    pack_pairs,
    repair_the_interpreter,
    run_interpreted,
)
from offline import compile_sm90
from torch import Tensor

from dsv41.hardware import Hardware
from dsv41.ops.hyper import reference
from dsv41.ops.hyper.op import hyper_coefficients, hyper_collapse, hyper_expand, hyper_update
from dsv41.ops.streams import join, nothing_forked

SWEEPS, HYPER_EPS, EPS = 20, 1e-6, 1e-20
COPIES, DIM = 4, 5120
COEFFICIENT = 8e-6


@pytest.mark.skipif(INTERPRETED or GPU, reason="this process runs the kernels itself")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture(scope="session", autouse=True)
def replace_instructions(repair_the_interpreter: None):  # noqa: F811
    """The interpreter has no inline assembly."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            from dsv41.ops.hyper import triton as kernel
            from dsv41.ops.hyper import triton_mixes as mixes
            from dsv41.ops.hyper import triton_words as words

            def reciprocal(x):
                return 1.0 / x

            for module in (kernel, mixes, words):
                patch.setattr(module, "pack", pack_pairs, raising=False)
                patch.setattr(module, "reciprocal", reciprocal, raising=False)
        yield


# -- inputs ---------------------------------------------------------------------------------------------


def streams_of(rows: int, copies: int, dim: int, seed: int) -> Tensor:
    """bf16 rows of very different sizes."""
    size = torch.exp2(normal((rows, copies, 1), seed + 1) * 3)
    return (normal((rows, copies, dim), seed) * size).bfloat16()


WEIGHTS = ("fn", "base", "scale", "norm", "tickets", "sweeps")


class Inputs:
    """All arguments of the four ops."""

    def __init__(self, rows: int, copies: int = COPIES, dim: int = DIM, seed: int = 0) -> None:
        mixes, self.sweeps = (2 + copies) * copies, SWEEPS
        self.streams = streams_of(rows, copies, dim, seed)
        self.y = streams_of(rows, 1, dim, seed + 2)[:, 0]
        self.fn = normal((mixes, copies * dim), seed + 4) * (copies * dim) ** -0.5
        self.base, self.scale = normal((mixes,), seed + 5), normal((3,), seed + 6).abs() + 0.5
        self.norm = (normal((dim,), seed + 7) * 0.2 + 1).bfloat16()
        self.tickets = torch.zeros(64, dtype=torch.int32, device=DEVICE)
        self.pre = normal((rows, copies), seed + 8)
        self.post = normal((rows, copies), seed + 9)
        self.comb = normal((rows, copies, copies), seed + 10)

    def coefficients(self, impl: str) -> tuple[Tensor, ...]:
        *coefficients, side = hyper_coefficients(self.streams, *self.fixed, impl)
        join(side)
        return tuple(coefficients)

    def collapse(self, impl: str) -> Tensor:
        return hyper_collapse(self.streams, self.pre, self.norm, EPS, impl)

    def expand(self, impl: str) -> tuple[Tensor, ...]:
        return hyper_expand(*self.half, impl)

    def update(self, impl: str) -> tuple[Tensor, ...]:
        return hyper_update(*self.half, self.norm, self.tickets, EPS, impl)

    @property
    def fixed(self) -> tuple[object, ...]:
        return self.fn, self.base, self.scale, self.tickets, self.sweeps, HYPER_EPS, EPS

    @property
    def half(self) -> tuple[Tensor, ...]:
        return self.y, self.streams, self.post, self.comb, self.pre, nothing_forked()

    def all(self, impl: str) -> list[Tensor]:
        return [*self.coefficients(impl), self.collapse(impl), *self.expand(impl), *self.update(impl)]

    def some(self, rows: slice) -> Inputs:
        """The same weights, some of the rows."""
        part = object.__new__(Inputs)
        for name, value in vars(self).items():
            alone = value if name in WEIGHTS else value[rows]
            setattr(part, name, alone)
        return part

    def spread(self) -> Inputs:
        """Rows apart from each other, with NaN between them."""
        part = self.some(slice(None))
        for name in ("streams", "y", "pre", "post", "comb"):
            setattr(part, name, apart(getattr(self, name)))
        return part


def close(found: Tensor, expected: Tensor, terms: Tensor, share: float, steps: int = 1) -> None:
    """bf16 values that differ in at most `share` of places, and there by bf16 steps of the largest term."""
    assert found.dtype == expected.dtype == torch.bfloat16
    assert found.is_contiguous()
    assert torch.equal(found.isnan(), expected.isnan())
    a, b = found.float().nan_to_num(), expected.float().nan_to_num()
    wrong = (a - b).abs() > steps * 2.0**-7 * torch.maximum(b.abs(), 2.0**-8 * terms.nan_to_num()) + 1e-30
    assert not wrong.any(), f"{int(wrong.sum())} values are off, first at {wrong.nonzero()[0].tolist()}"
    assert float((a != b).float().mean() if a.numel() else 0.0) <= share


def check_coefficients(inputs: Inputs) -> None:
    found, expected = inputs.coefficients("triton"), inputs.coefficients("reference")
    for name, ours, truth in zip(("pre", "post", "comb"), found, expected, strict=True):
        assert ours.is_contiguous(), name
        torch.testing.assert_close(
            ours, truth, rtol=COEFFICIENT, atol=COEFFICIENT, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert torch.equal(ours.isnan(), truth.isnan())


def check_rows(inputs: Inputs) -> None:
    """Expand, collapse and update. A norm divides by the row's size, so that one step of a sum is one step of
    the result, and rounds again, which is another."""
    expanded, collapsed, updated = (
        inputs.expand("triton"),
        inputs.collapse("triton"),
        inputs.update("triton"),
    )
    streams = inputs.streams.float()
    terms = (inputs.comb.unsqueeze(-1) * streams.unsqueeze(2)).abs().amax(1)
    terms = torch.maximum(terms, (inputs.post.unsqueeze(-1) * inputs.y.float().unsqueeze(1)).abs())
    for streams, mix, sound in (expanded, updated[:3]):
        close(streams, inputs.expand("reference")[0], terms, 2e-3)
        assert torch.equal(mix.view(torch.int32), inputs.pre.contiguous().view(torch.int32))
        assert torch.equal(sound, ~inputs.pre.isnan().any(1))
    for x, source in ((collapsed, inputs.streams), (updated[3], updated[0])):
        expected = reference.hyper_collapse(source, inputs.pre, inputs.norm, EPS)
        parts = (inputs.pre.unsqueeze(-1) * source.float()).abs().amax(1)
        size = reference.collapse(source, inputs.pre).float().square().mean(-1, keepdim=True).sqrt() + 1e-30
        close(x, expected, parts / size * inputs.norm.float().abs(), 1e-2, steps=2)


# -- interpreter ----------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize(
    ("rows", "copies", "dim"),
    [(0, 4, 64), (1, 4, 64), (3, 4, 64), (2, 1, 8), (2, 3, 136), (2, 8, 40), (2, 4, 1288)],
)
def test_interpreted(rows: int, copies: int, dim: int) -> None:
    inputs = Inputs(rows, copies, dim).spread() if rows else Inputs(rows, copies, dim)
    inputs.sweeps = SWEEPS if dim == 64 else copies  # from 1 on
    check_coefficients(inputs)
    check_rows(inputs)


@interpreted
def test_interpreted_tree_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program a chunk and a program a group give the same bits: the interpreter's dot is one for both."""
    from dsv41.ops.hyper import triton_mixes as kernel

    inputs = Inputs(3, 2, 1544)
    one = inputs.coefficients("triton")
    monkeypatch.setattr(kernel, "LAST_FINISHES_ROWS", 0)
    few = inputs.coefficients("triton")
    monkeypatch.setattr(kernel, "FEW_ROWS", 0)
    many = inputs.coefficients("triton")
    for a, b, c in zip(one, few, many, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(b, c)
    check_coefficients(inputs)
    assert not inputs.tickets.any()


@interpreted
@pytest.mark.parametrize("dim", [64, 1544])
def test_interpreted_updates_are_one(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Normed by the last program of a row, by a second launch, and by the only program of a row."""
    from dsv41.ops.hyper import triton as kernel

    inputs = Inputs(3, 4, dim).spread()
    last = inputs.update("triton")
    assert not inputs.tickets.any()
    monkeypatch.setattr(kernel, "LAST_NORMS_ROWS", 0)
    second = inputs.update("triton")
    monkeypatch.setattr(kernel, "WHOLE_ROWS", 1)
    whole = inputs.update("triton")
    for a, b, c in zip(last, second, whole, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(b, c)
    check_rows(inputs)


@interpreted
def test_interpreted_without_tickets() -> None:
    inputs, few = Inputs(3, 4, 64), Inputs(3, 4, 64)
    few.tickets = few.tickets[:0]
    for a, b in zip(inputs.all("triton"), few.all("triton"), strict=True):
        assert torch.equal(a, b)


@interpreted
def test_interpreted_hostile_rows() -> None:
    check_hostile_rows(4, 72)


@interpreted
@pytest.mark.parametrize("few", [True, False])
def test_interpreted_weights_are_exact(few: bool) -> None:
    check_weights_are_exact(1288, few)


def check_weights_are_exact(dim: int, few: bool) -> None:
    """Rows with a single 1 read a weight back: the sum of its three bf16 parts is the float32, bit for bit,
    in tensor cores too. Finds a wrong channel, a part that is missing, or products in tf32."""
    import triton

    from dsv41.ops.hyper import triton_mixes as kernel

    rows, copies, mixes = 70, 2, 8
    bits = torch.randint(-(2**31), 2**31, (mixes, copies * dim), generator=generator(0), device=DEVICE)
    fn = bits.to(torch.int32).view(torch.float32)
    fn = torch.where((fn.abs() > 2.0**-100) & (fn.abs() < 2.0**100), fn, 0xFFFFFF * 2.0**-20)
    places = torch.randperm(copies * dim, generator=generator(1), device=DEVICE)[:rows]
    streams = torch.zeros((rows, copies * dim), dtype=torch.bfloat16, device=DEVICE)
    streams[torch.arange(rows, device=DEVICE), places] = 1
    streams = streams.view(rows, copies, dim)
    chunks = 1 if few else kernel.GROUP_CHUNKS
    parts = triton.cdiv(dim, kernel.GROUP_CHUNKS * kernel.CHUNK) * kernel.GROUP_CHUNKS // chunks
    partials = torch.full((copies * parts, rows, 16), torch.nan, device=DEVICE)
    kernel._project[(triton.cdiv(rows, kernel.TILE), copies * parts)](
        streams, streams.stride(0), fn, partials, rows, COPIES=copies, D=dim, MIXES=mixes, VALUES=16,
        PARTS=parts, CHUNKS=chunks, TILE=kernel.TILE, CHUNK=kernel.CHUNK, EARLY=False, num_warps=4,
        num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    found = partials[..., : mixes + 1].double().sum(0)
    assert torch.equal(found[:, :mixes], fn[:, places].T.double())
    assert (found[:, mixes] == 1).all(), "the sum of squares"


@interpreted
def test_what_is_refused() -> None:
    inputs = Inputs(3, 4, 64)
    streams = inputs.streams
    with pytest.raises(ValueError, match="bf16 streams"):
        hyper_collapse(streams.float(), inputs.pre, inputs.norm, EPS, "triton")
    with pytest.raises(ValueError, match="bf16 output"):
        hyper_expand(inputs.y.float(), *inputs.half[1:], "triton")
    with pytest.raises(ValueError, match="multiple of 8 channels, not 4 of 60"):
        hyper_collapse(streams[..., :60].contiguous(), inputs.pre, inputs.norm[:60], EPS, "triton")
    with pytest.raises(ValueError, match="not 9 of 64"):
        hyper_collapse(streams.repeat(1, 3, 1)[:, :9], inputs.pre, inputs.norm, EPS, "triton")
    with pytest.raises(ValueError, match="in one piece"):
        hyper_collapse(streams.mT.contiguous().mT, inputs.pre, inputs.norm, EPS, "triton")
    with pytest.raises(ValueError, match="multiple of 4 bytes"):
        hyper_expand(apart(inputs.y, 7), *inputs.half[1:], "triton")


@interpreted
def test_why_not() -> None:
    from dsv41.ops.hyper import triton as kernel

    assert kernel.why_not(Hardware("cuda", 90, "H200", 0), None) is None
    assert "SM90" in kernel.why_not(Hardware("cpu", 0, "CPU", 0), None)


# -- the compiled object --------------------------------------------------------------------------------

COMMON = {"COPIES": COPIES, "D": DIM}
MIXES = COMMON | {"MIXES": 24, "VALUES": 32, "EARLY": True}
PROJECT = MIXES | {"TILE": 64, "CHUNK": 128}
FINISH = MIXES | {"GROUPS": 4, "COPY_WIDTH": 4, "ROWS": 1}
ROW = COMMON | {"WIDTH": 512, "EARLY": True}
EXPAND = ROW | {"NEXT_EARLY": True, "SUM": True, "NORM": False}
COMPILED = {  # kernel, constants, warps; registers at most
    "update": ("_expand", EXPAND, 4, 96),
    "update alone": ("_expand", EXPAND | {"NORM": True}, 8, 96),
    "update whole": ("_update", ROW, 8, 128),
    "expand": ("_expand", EXPAND | {"SUM": False}, 4, 96),
    "norm": ("_norm", COMMON | {"WIDTH": 512, "EARLY": True}, 8, 64),
    "collapse": ("_collapse", COMMON | {"WIDTH": 512}, 8, 64),
    "project few": ("_project", PROJECT | {"PARTS": 40, "CHUNKS": 1}, 4, 128),
    "project many": ("_project", PROJECT | {"PARTS": 4, "CHUNKS": 10}, 4, 200),
    "finish few": ("_finish", FINISH | {"CHUNKS": 10}, 1, 240),
    "finish many": ("_finish", FINISH | {"CHUNKS": 1}, 1, 128),
    "both": ("_both", PROJECT | FINISH | {"CHUNKS": 10}, 4, 128),
    "both 8": ("_both", PROJECT | FINISH | {"CHUNKS": 10, "ROWS": 8}, 4, 255),
}


WIDE = {"update": 5, "update alone": 5 + 2 * 5, "update whole": 6 * 5, "expand": 5, "norm": 2 * 5}
WIDE |= {"collapse": 5 * 5}  # loads of 2 or 4 words


@cache
def compiled(name: str) -> tuple[str, str, str]:
    """-> (SASS, resource usage, Triton's GPU IR) of a kernel, compiled for sm_90 without a GPU."""
    from dsv41.ops.hyper import triton, triton_mixes

    function, constants, warps, _ = COMPILED[name]
    kernel = getattr(triton_mixes if hasattr(triton_mixes, function) else triton, function)
    types = dict.fromkeys(("y", "streams", "norm", "out", "x"), "*bf16") | {"eps": "fp32", "norm_eps": "fp32"}
    floats = ("post", "comb", "pre", "mix", "fn", "partials", "base", "scale")
    types |= dict.fromkeys(floats, "*fp32") | {"sound": "*i1", "tickets": "*i32"}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    aligned = [name for name in kernel.arg_names if name.endswith("_stride")]
    fused = function in ("_collapse", "_expand", "_norm", "_update")
    options = {
        "num_warps": warps,
        "num_stages": 2 if function in ("_project", "_both") else 3,
        "enable_fp_fusion": fused,
        "launch_pdl": function != "_collapse",
    }
    sass, usage, binary = compile_sm90(kernel, constants, types, aligned=aligned, **options)
    return sass, usage, binary.asm["ttgir"]


not_interpreted = pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot compile")


@not_interpreted
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_object(name: str) -> None:
    """Spills, conversions one by one (F2F runs at an eighth of the rate), narrow loads."""
    sass, usage, _ = compiled(name)
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    assert registers <= COMPILED[name][3]
    assert stack == 0
    assert not re.search(r"\b(STL|LDL)\b", sass)
    assert "F2F." not in sass
    if name in WIDE:
        wide = len(re.findall(r"LDG\.E\.(?:64|128)", sass))
        assert wide == WIDE[name], "rows are read in narrow pieces"
    if name.startswith("project"):
        assert sass.count("HGMMA.64x32x16.F32.BF16") == 3 * 8, "three products of 128 channels"
    if name.startswith("finish"):
        assert len(re.findall(r"LDG\.E\.128", sass)) == (40 if name == "finish few" else 4)
    if name in ("both", "update alone"):
        assert re.search(r"MEMBAR\.ALL\.GPU.*ATOMG\.E\.ADD\.STRONG\.GPU.*CCTL\.IVALL", sass, re.S), "an order"
    if name != "collapse":
        written, waited = sass.index("STG"), sass.index("ACQBULK")
        assert waited < written, "an early launch writes before its wait"


@not_interpreted
def test_both_forms_sum_in_the_same_layout() -> None:
    """The order of a sum inside a tile follows its layout: it must not depend on the row count."""

    def layouts(name: str) -> list[str]:
        ir = compiled(name)[2]
        named = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", ir, re.M))
        reduced = re.findall(r'"tt\.reduce".*?\}\) : \(tensor<([^>]*?), (#\w+)(?:>|, )', ir, re.S)
        assert reduced, f"{name} has no sum"
        return [f"{shape} {named.get(layout, layout)}" for shape, layout in reduced if shape.endswith("f32")]

    assert layouts("project few") == layouts("project many") == layouts("both")[:1] == layouts("both 8")[:1]
    assert len(layouts("norm")) == 1
    assert layouts("norm") == layouts("update alone") == layouts("update whole")


# -- on a GPU -------------------------------------------------------------------------------------------

ROWS = (0, 1, 2, 3, 5, 8, 17, 64, 127, 128, 129, 256, 257, 1000, 4096)


@pytest.mark.parametrize("rows", [pytest.param(t, marks=gpu) for t in ROWS])
def test_coefficients(rows: int) -> None:
    check_coefficients(Inputs(rows, seed=rows))


@pytest.mark.parametrize("sweeps", [pytest.param(n, marks=gpu) for n in (1, 2, 3, 20)])
def test_sweeps(sweeps: int) -> None:
    """After 20 sweeps the matrix hardly moves: a sweep too few or too many shows in the first ones."""
    inputs = Inputs(9)
    inputs.sweeps = sweeps
    check_coefficients(inputs)


@pytest.mark.parametrize("few", [pytest.param(f, marks=gpu) for f in (True, False)])
def test_weights_are_exact(few: bool) -> None:
    check_weights_are_exact(DIM, few)


@pytest.mark.parametrize("rows", [pytest.param(t, marks=gpu) for t in ROWS])
def test_rows(rows: int) -> None:
    check_rows(Inputs(rows, seed=rows))


@pytest.mark.parametrize(
    ("copies", "dim"),
    [pytest.param(*shape, marks=gpu) for shape in ((1, 8), (3, 136), (5, 1288), (8, 2056))],
)
@pytest.mark.parametrize("rows", [1, 70, 300])
def test_other_shapes(rows: int, copies: int, dim: int) -> None:
    """Rows apart from each other, with NaN between them; channels that fill no tile."""
    inputs = Inputs(rows, copies, dim).spread()
    check_coefficients(inputs)
    check_rows(inputs)


@pytest.mark.parametrize("dim", [pytest.param(d, marks=gpu) for d in (64, DIM)])
def test_hostile_rows(dim: int) -> None:
    check_hostile_rows(COPIES, dim)


def check_hostile_rows(copies: int, dim: int) -> None:
    """Zero rows, equal copies, huge and tiny rows, and rows with NaN or infinity: those stay in their row,
    and no coefficient of theirs is finite, which is how a faulty layer is found."""
    inputs = Inputs(12, copies, dim)
    streams, inputs.sweeps = inputs.streams, 2 if INTERPRETED else SWEEPS
    streams[0] = 0
    streams[1] = streams[1, :1]
    streams[2] *= 2.0**40
    streams[3] *= 2.0**-30
    streams[5, 0, 3] = torch.nan
    streams[7, copies - 1, dim - 1] = torch.inf
    streams[9, 0, 0] = -torch.inf
    inputs.y[2] *= 2.0**40
    inputs.y[3] *= 2.0**-30
    inputs.y[10, 1] = torch.nan
    found, updated = inputs.coefficients("triton"), inputs.update("triton")
    finite = torch.ones(len(streams), dtype=torch.bool, device=DEVICE)
    finite[[5, 7, 9]] = False
    for value in found:
        assert torch.equal(value.flatten(1).isfinite().all(1), finite)
        assert torch.equal(value.flatten(1).isnan().all(1), ~finite)
    finite[10] = False
    for value in (updated[0], updated[3]):
        assert torch.equal(value.flatten(1).isfinite().all(1), finite)
    assert torch.equal(updated[3].isnan().all(1), ~finite), "the norm spreads a NaN over its row"
    check_coefficients(inputs)
    kept = inputs.some(slice(0, 5))
    check_rows(kept)
    for ours, theirs in zip(updated, kept.update("triton"), strict=True):
        assert torch.equal(ours[:5], theirs)


@pytest.mark.parametrize("rows", [pytest.param(t, marks=gpu) for t in (128, 256, 300, 1000)])
def test_a_row_does_not_depend_on_its_batch(rows: int) -> None:
    """Bit for bit, on both sides of the row count where the partial sums are made otherwise."""
    inputs = Inputs(rows)
    together = inputs.all("triton")
    for row in sorted({0, 1, 17, 63, 64, 127, rows // 2, rows - 1}):
        alone = inputs.some(slice(row, row + 1)).all("triton")
        for index, (one, many) in enumerate(zip(alone, together, strict=True)):
            assert torch.equal(one[0], many[row]), f"result {index} of row {row}"


@pytest.mark.parametrize("rows", [pytest.param(t, marks=gpu) for t in (1, 64)])
def test_coefficients_beside_their_sub_layer(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held back on their stream: an update that does not wait reads what was in their memory before. In a
    stack, whose freed memory is used again at once, eager and captured."""
    from dsv41.ops.hyper import triton as kernel

    inputs, computed = Inputs(rows), kernel.coefficients

    def late(*arguments: object) -> tuple[Tensor, ...]:
        torch.cuda._sleep(100_000)
        return computed(*arguments)

    def stack(fork_rows: int) -> list[Tensor]:
        monkeypatch.setattr(kernel, "FORK_ROWS", fork_rows)
        streams, kept = inputs.streams, []
        for _ in range(40):  # more than the pool has streams
            pre, post, comb, side = hyper_coefficients(streams, *inputs.fixed, "triton")
            assert bool(side) == bool(fork_rows)
            half = (inputs.y, streams, post, comb, pre, side, inputs.norm, inputs.tickets, EPS, "triton")
            streams, mix, _, x = hyper_update(*half)
            del pre, post, comb, half
            torch.full_like(streams, torch.nan)
            kept += [mix, x]
        return kept

    serial = stack(0)
    monkeypatch.setattr(kernel, "coefficients", late)
    assert all(torch.equal(a, b) for a, b in zip(stack(64), serial, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = stack(64)
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, serial, strict=True))


def switched(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few launches as there can be, each early; or more, each behind the end of the one before."""
    from dsv41.ops.hyper import triton as rows
    from dsv41.ops.hyper import triton_mixes as mixes

    monkeypatch.setattr(mixes, "LAST_FINISHES_ROWS", 8 if on else 0)
    monkeypatch.setattr(mixes, "MIXES_EARLY", on)
    monkeypatch.setattr(rows, "LAST_NORMS_ROWS", 64 if on else 0)
    monkeypatch.setattr(rows, "ROWS_EARLY", on)
    monkeypatch.setattr(rows, "WHOLE_ROWS", 512 if on else 1 << 30)


@pytest.mark.parametrize("rows", [pytest.param(t, marks=gpu) for t in (1, 2, 3, 7, 8, 64, 512, 1000)])
def test_fewer_launches_give_the_same_bits(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many times, since who arrives last is chance; every time the tickets are zero again."""
    inputs = Inputs(rows, seed=3)
    switched(True, monkeypatch)
    found = [inputs.all("triton") for _ in range(50 if rows <= 64 else 3)]
    assert not inputs.tickets.any()
    switched(False, monkeypatch)
    expected = inputs.all("triton")
    for results in found:
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("rows", [pytest.param(t, marks=gpu) for t in (1, 8, 64, 300, 600)])
def test_early_launches_wait(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel reads is written late, by the kernel right before it, over NaN. Eager and captured."""
    inputs, kept = Inputs(rows), Inputs(rows)
    switched(True, monkeypatch)

    def written_late(*names: str) -> None:
        for name in names:
            getattr(inputs, name).fill_(torch.nan)
        torch.cuda._sleep(100_000)
        for name in names:
            torch.mul(getattr(kept, name), 1, out=getattr(inputs, name))

    def run() -> list[Tensor]:
        written_late("streams")
        found = list(inputs.coefficients("triton"))
        for last in ("streams", "y", "comb"):
            written_late("pre", "post", last)
            found += inputs.update("triton")
        written_late("post", "comb", "y")
        return [*found, *inputs.expand("triton")]

    graph, eager = torch.cuda.CUDAGraph(), run()
    with torch.cuda.graph(graph):
        captured = run()
    replayed = []
    for _ in range(3):
        graph.replay()
        replayed.append([value.clone() for value in captured])
    switched(False, monkeypatch)
    expected = run()
    for results in (eager, *replayed):
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("rows", [pytest.param(t, marks=gpu) for t in (1, 64, 300)])
def test_captured(rows: int) -> None:
    """A graph recorded on one input is replayed on another; twice, to the same bits."""
    static, fresh = Inputs(rows, seed=1), Inputs(rows, seed=2)
    static.all("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = static.all("triton")
    for name, value in vars(fresh).items():
        if isinstance(value, Tensor):
            getattr(static, name).copy_(value)
    expected = fresh.all("triton")
    for _ in range(2):
        for result in found:
            result.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("rows", [pytest.param(t, marks=gpu) for t in (1, 64, 300)])
def test_scratch_is_never_read_before_it_is_written(rows: int) -> None:
    """The memory that the kernels allocate holds NaN from an earlier tensor."""
    inputs = Inputs(rows)
    expected = inputs.all("triton")
    for _ in range(3):
        blocks = [
            torch.full((size,), torch.nan, device=DEVICE) for size in (1 << 10, 1 << 16, 1 << 20, 1 << 23)
        ]
        torch.cuda.synchronize()
        del blocks
        assert all(torch.equal(a, b) for a, b in zip(inputs.all("triton"), expected, strict=True))


@pytest.mark.parametrize("rows", [pytest.param(120_000, marks=gpu)])
def test_addresses_past_31_bits(rows: int) -> None:
    """The last rows of streams of more than 2^31 values."""
    streams = torch.zeros((rows, COPIES, DIM), dtype=torch.bfloat16, device=DEVICE)
    assert streams.numel() > 2**31
    last = slice(rows - 3, rows)
    inputs = Inputs(3)
    streams[last] = inputs.streams
    pre = torch.zeros((rows, COPIES), device=DEVICE)
    pre[last] = inputs.pre
    x = hyper_collapse(streams, pre, inputs.norm, EPS, "triton")
    assert torch.equal(x[last], inputs.collapse("triton"))
    assert not x[:-3].any()
    del x
    *found, _ = hyper_coefficients(streams, *inputs.fixed, "triton")
    for value, alone in zip(found, inputs.coefficients("triton"), strict=True):
        assert torch.equal(value[last], alone)
    post, comb = pre, torch.zeros((rows, COPIES, COPIES), device=DEVICE)
    post[last], comb[last] = inputs.post, inputs.comb
    y = torch.zeros((rows, DIM), dtype=torch.bfloat16, device=DEVICE)
    y[last] = inputs.y
    out, mix, _ = hyper_expand(y, streams, post, comb, pre, nothing_forked(), "triton")
    assert torch.equal(mix, pre)
    assert torch.equal(out[last], inputs.expand("triton")[0])
    assert not out[:-3].any()
