"""The input projections on two streams: what is forked and how, on any machine; the same bits as the serial
implementation, on one CUDA GPU.

Both implementations call the same products of the `linear` family, so nothing here has a tolerance: a
difference is a race. The GPU tests make one likely: products are held back by waiting kernels, results are
read at once, freed memory is asked for again and filled with NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv41.hardware import Hardware
from dsv41.ops import streams
from dsv41.ops.projections import overlapped
from dsv41.ops.projections.op import project_inputs
from dsv41.ops.streams import fork, fork_join, join, nothing_forked

has_gpu = torch.cuda.is_available()
hopper = has_gpu and torch.cuda.get_device_capability() == (9, 0)
needs_gpu = pytest.mark.skipif(not has_gpu, reason="needs one CUDA GPU")
LINEAR = [
    "reference",
    pytest.param("gluon", marks=pytest.mark.skipif(not hopper, reason="needs one SM90 GPU")),
]
POOL = 32  # streams of torch's pool


def on_gpu(test: Any) -> Any:
    return pytest.mark.gpu(needs_gpu(test))


# -- on any machine ----------------------------------------------------------------------------------------


class Streams:
    """Stands in for torch.cuda: writes down who waits for whom, and what runs where."""

    def __init__(self, capturing: bool) -> None:
        self.happened: list[str] = []
        self.capturing, self.taken = capturing, 0
        self.now = Stream("main", self)

    def current_stream(self) -> Stream:
        return self.now

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def take(self) -> Stream:
        """The pool gives the current stream first."""
        self.taken += 1
        return Stream("main" if self.taken == 1 else f"pool {self.taken}", self)

    @contextmanager
    def stream(self, stream: Stream) -> Any:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def run(self, what: str) -> Result:
        self.happened.append(f"{what} on {self.now.name}")
        return Result(what, self)


class Stream:
    def __init__(self, name: str, owner: Streams) -> None:
        self.name, self.owner = name, owner

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    __hash__ = None  # type: ignore[assignment]

    @property
    def cuda_stream(self) -> int:
        return int(self.name.removeprefix("pool "))

    def wait_stream(self, other: Stream) -> None:
        self.owner.happened.append(f"{self.name} waits for {other.name}")


class Result:
    def __init__(self, name: str, owner: Streams) -> None:
        self.name, self.owner = name, owner

    def record_stream(self, stream: Stream) -> None:
        self.owner.happened.append(f"{self.name} is used on {stream.name}")


@pytest.fixture(params=[False, True], ids=["eager", "captured"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Streams:
    cuda = Streams(request.param)
    for name in ("current_stream", "is_current_stream_capturing", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "Stream", cuda.take)
    return cuda


def test_the_side_forks_from_and_joins_the_current_stream(cuda: Streams) -> None:
    """In a capture the allocator must not be told of a second stream: it would keep the memory to its end."""
    main, side = fork_join(lambda: cuda.run("main"), lambda: cuda.run("side"))  # type: ignore[arg-type]
    assert (main.name, side.name) == ("main", "side")  # type: ignore[attr-defined]
    assert cuda.happened[0] == "pool 2 waits for main"
    assert sorted(cuda.happened[1:3]) == ["main on main", "side on pool 2"]
    told = [] if cuda.capturing else ["side is used on main"]
    assert cuda.happened[3:] == ["main waits for pool 2", *told]
    assert cuda.now.name == "main"


def test_a_fork_ends_where_its_handle_is_joined(cuda: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle: Stream(f"pool {handle}", cuda))
    (side,), handle = fork(lambda: (cuda.run("side"),))  # type: ignore[arg-type,return-value]
    told = [] if cuda.capturing else ["side is used on main"]
    assert side.name == "side"  # type: ignore[attr-defined]
    assert cuda.happened == ["pool 2 waits for main", "side on pool 2", *told]
    assert cuda.now.name == "main"
    cuda.happened.clear()
    join(nothing_forked())
    assert not cuda.happened
    join(handle)
    assert cuda.happened == ["main waits for pool 2"]


@pytest.mark.parametrize("broken", ["main", "side"])
def test_an_error_joins_too(cuda: Streams, broken: str) -> None:
    """Else the caller frees what the side still reads."""

    def work(name: str) -> Result:
        if name == broken:
            raise ValueError("refused")
        return cuda.run(name)

    with pytest.raises(ValueError, match="refused"):
        fork_join(lambda: work("main"), lambda: work("side"))  # type: ignore[arg-type]
    assert cuda.happened[-1] == "main waits for pool 2"
    assert cuda.now.name == "main"


def inputs(rows: int, side: int, device: str = "cpu", columns: int = 128, outputs: int = 96) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rows + side)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    scale = torch.randint(125, 129, (outputs // 32, columns // 32), generator=draw, dtype=torch.uint8)
    weight = normal(outputs, columns).to(torch.float8_e4m3fn)
    tensors = [normal(rows, columns).bfloat16(), weight, scale, normal(side, columns).bfloat16()]
    return [tensor.to(device) for tensor in tensors]


def test_it_needs_a_gpu() -> None:
    assert "CPU" in str(overlapped.why_not(Hardware("cpu", 0, "CPU", 0), None))
    for sm in (80, 90, 100, 120):
        assert overlapped.why_not(Hardware("cuda", sm, f"sm{sm}", 1 << 37), None) is None
    with pytest.raises(ValueError, match="not on a cpu"):
        project_inputs(*inputs(2, 8), True, False, "reference", "overlapped")


@pytest.mark.parametrize(
    ("rows", "side", "forks"),
    [
        (1, 8, True),
        (overlapped.FORK_ROWS, 8, True),
        (overlapped.FORK_ROWS + 1, 8, False),
        (0, 8, False),
        (3, 0, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_forked(
    rows: int, side: int, forks: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without side products there is nothing to overlap; many rows fill the GPU and use cuBLAS. Either way
    the results are the serial implementation's."""
    forked: list[int] = []

    def fake(main: Callable[[], Any], beside: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        forked.append(1)
        second = beside()
        return main(), second

    monkeypatch.setattr(overlapped, "fork_join", fake)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    x, *weights = inputs(rows, side)
    arguments = (x.to(dtype), *weights, True, False, "reference")
    down, beside = overlapped.project_inputs(*arguments)
    assert bool(forked) == forks
    expected = project_inputs(*arguments, "reference")
    assert down.dtype == dtype
    assert torch.equal(down, expected[0])
    assert torch.equal(beside, expected[1])


# -- on a GPU ----------------------------------------------------------------------------------------------

CYCLES = 200_000  # of a waiting kernel: a tenth of a millisecond, longer than a product takes
COLUMNS, OUTPUTS = 5120, 1792  # the release: query rank 1280 and a window KV of 512


def wait(factor: int = 1) -> None:
    torch.cuda._sleep(factor * CYCLES)


def both(arguments: tuple[Any, ...]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The overlapped results first: a race may not be healed by the serial ones."""
    ours = project_inputs(*arguments, "overlapped")
    return ours, project_inputs(*arguments, "reference")


def assert_equal(ours: tuple[Tensor, Tensor], serial: tuple[Tensor, Tensor], note: object = "") -> None:
    for name, a, b in zip(("down", "side"), ours, serial, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), (name, note)


@on_gpu
@pytest.mark.parametrize("linear", LINEAR)
@pytest.mark.parametrize("side", [0, 32, 544, 1056])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_bits_as_one_after_the_other(linear: str, side: int, deterministic: bool) -> None:
    for rows in (0, 1, 2, 3, 5, 8, 17, 63, 64, 65, 127, 128, 129):
        arguments = (*inputs(rows, side, "cuda", COLUMNS, OUTPUTS), True, deterministic, linear)
        assert_equal(*both(arguments), (rows, side))


@on_gpu
def test_two_waits_take_the_time_of_one() -> None:
    """Otherwise nothing overlaps, and every other test here passes for the wrong reason."""

    def elapsed(work: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def waiting() -> Tensor:
        wait(100)
        return torch.ones(1, device="cuda")

    elapsed(lambda: fork_join(waiting, waiting))
    alone = min(elapsed(waiting) for _ in range(3))
    assert min(elapsed(lambda: fork_join(waiting, waiting)) for _ in range(3)) < 1.5 * alone


@on_gpu
def test_the_side_sees_what_came_before_and_what_follows_sees_the_side() -> None:
    """A fork without its wait reads the old row; a join without its wait reads unwritten memory."""
    x = torch.zeros(1 << 16, device="cuda")
    for number in range(1, 40):
        wait()
        x.fill_(number)

        def side() -> Tensor:
            wait(2)
            return x * 2

        main, beside = fork_join(lambda: x + 1, side)
        result = main + beside
        assert torch.equal(result, torch.full_like(x, 3 * number + 1)), number


@on_gpu
def test_memory_of_the_side_is_not_given_out_under_a_reader() -> None:
    """The result of the side is freed while its reader has not begun; then every stream of the pool, the
    side's among them, asks for memory of that size and fills it. The reader must not see it."""
    size, outs = 1 << 18, []
    source = torch.arange(size, device="cuda", dtype=torch.float32)
    for number in range(2 * POOL):
        _, beside = fork_join(lambda: None, partial(torch.add, source, number))
        wait(3)
        outs.append(beside + 0.0)
        del beside
        for _ in range(POOL):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.full((size,), torch.nan, device="cuda")
    for number, out in enumerate(outs):
        assert torch.equal(out, source + number), number


@on_gpu
@pytest.mark.parametrize("linear", LINEAR)
def test_many_layers_under_memory_pressure(linear: str) -> None:
    """Forks one after the other, the row of each made from the results of the one before, as in a stack of
    layers. Serial and overlapped runs allocate alike and end on the same bits."""
    if linear == "reference":
        columns, outputs, side, layers = 256, 96, 160, 60
    else:
        columns, outputs, side, layers = COLUMNS, OUTPUTS, 1056, 400
    x, *weights = inputs(8, side, "cuda", columns, outputs)

    def run(impl: str) -> Tensor:
        row = x
        for _ in range(layers):
            down, beside = project_inputs(row, *weights, True, False, linear, impl)
            mixed = torch.cat((down.float(), beside), 1)
            repeated = mixed.repeat(1, -(-columns // mixed.shape[1]))[:, :columns]
            row = torch.nn.functional.layer_norm(repeated, (columns,)).bfloat16()
            del down, beside, mixed, repeated
            torch.full((8, side), torch.nan, device="cuda")
        return row

    ours = run("overlapped")
    assert not ours.isnan().any()
    assert torch.equal(ours, run("reference"))


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = work()
    return graph, result


@on_gpu
@pytest.mark.skipif(not hopper, reason="needs one SM90 GPU")
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_captured_stack_replays_to_the_same_bits(rows: int) -> None:
    """More forks than the pool has streams, so that one meets the capture's own; the memory of every result
    is used again within the graph. Replayed on new rows, between other work."""
    x, *weights = inputs(rows, 1056, "cuda", COLUMNS, OUTPUTS)

    def stack(impl: str) -> list[Tensor]:
        row, kept = x, []
        for layer in range(POOL + 8):
            down, beside = project_inputs(row, *weights, True, False, "gluon", impl)
            mixed = torch.cat((down.float(), beside), 1).repeat(1, 2)[:, :COLUMNS]
            row = torch.nn.functional.layer_norm(mixed, (COLUMNS,)).bfloat16()
            if layer % 8 == 0:
                kept += [down, beside]
        return [*kept, row]

    graph, ours = captured(lambda: stack("overlapped"))
    for number in range(20):
        x.copy_(torch.randn(x.shape, device="cuda"))
        for out in ours:
            out.fill_(torch.nan)
        graph.replay()
        torch.full((rows, 1056), torch.nan, device="cuda")
        for got, expected in zip(ours, stack("reference"), strict=True):
            assert torch.equal(got, expected), (number, rows)


@on_gpu
def test_a_capture_may_hold_many_forks_and_a_second_capture_too() -> None:
    """Any function, not only products: waits hold both sides back, and memory is reused between the forks."""
    x = torch.zeros(1 << 14, device="cuda")

    def side(total: Tensor, number: int) -> Tensor:
        if number % 4 == 0:
            wait()
        return total * 2

    def work() -> Tensor:
        total = x
        for number in range(2 * POOL):
            main, beside = fork_join(partial(torch.add, total, 1), partial(side, total, number))
            total = torch.remainder(main + beside, 1009)
        return total

    graphs = [captured(work) for _ in range(2)]
    for start in range(5):
        x.fill_(start)
        for graph, result in graphs:
            result.fill_(torch.nan)
            graph.replay()
            assert torch.equal(result, work()), start


@on_gpu
def test_streams_are_of_the_current_device_and_not_the_current_stream() -> None:
    for _ in range(2 * POOL):
        current = torch.cuda.Stream()
        with torch.cuda.stream(current):
            assert streams._other_stream(current) != current
            assert torch.cuda.current_stream() == current
