"""One or two rows times a bf16 weight: dot products on the plain arithmetic units (Gluon).

    grid [N / 8], 4 warps: eight rows of the weight, all of K

Layout. A lane reads 8 columns of a weight row at once and has four rows under the same columns, so that its
piece of x serves four. The loop over K is unrolled: the reads of GROUP tiles of 8 KB leave before the first
is used, and those of the first group before the wait for the kernel that makes x (at K = 5120 and one row,
all of them). Nothing is added across programs: fp32 sums of a lane over K, then of the lanes.

Programmatic launch: the kernel before must not write the weight.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

BLOCK_ROWS, BLOCK_COLUMNS = 8, 512
ONE_ROW_TILES, TWO_ROWS_TILES = 10, 6  # under way: 16 registers of a lane each
MOST_COLUMNS = 5120  # of K, as the loop is unrolled: beyond, two rows spill
BN, BK = gl.constexpr(BLOCK_ROWS), gl.constexpr(BLOCK_COLUMNS)


@gluon.jit
def _load_weight(base, k, live, first: gl.constexpr, K: gl.constexpr):
    mask = live & gl.expand_dims(first + k < K, 0)
    return gl.load(base + gl.expand_dims(first + k, 0), mask=mask, other=0.0)


@gluon.jit
def _load_weights(base, k, live, first: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr):
    """As many tiles [8, 512] as there are up to K, at most GROUP."""
    tiles = (_load_weight(base, k, live, first, K),)
    for i in gl.static_range(1, GROUP):
        if first + i * BK < K:
            tiles = tiles + (_load_weight(base, k, live, first + i * BK, K),)  # noqa: RUF005 (not traced)
    return tiles


@gluon.jit
def _load_x(x, k, first: gl.constexpr, K: gl.constexpr):
    return gl.expand_dims(gl.load(x + first + k, mask=first + k < K, other=0.0).to(gl.float32), 0)


@gluon.jit
def dots_kernel(
    x, weight, out, x_row, N, K: gl.constexpr, TWO: gl.constexpr, GROUP: gl.constexpr, STACKED: gl.constexpr
):
    """x bf16 [1 or 2, K], weight bf16 [N, K] -> out [1 or 2, N]. STACKED: the next kernel may start before
    this one's wait."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [2, 2], [1, 0])
    n = gl.program_id(0) * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, L))
    k = gl.arange(0, BK, layout=gl.SliceLayout(0, L))
    base = weight + gl.expand_dims(n.to(gl.int64) * K, 1)
    live = gl.expand_dims(n < N, 1)
    tiles = _load_weights(base, k, live, 0, GROUP, K)
    if STACKED:
        gdc_launch_dependents()
    gdc_wait()
    if not STACKED:
        gdc_launch_dependents()
    sums = gl.zeros([BN, BK], gl.float32, L)
    more = gl.zeros([BN, BK], gl.float32, L)
    for first in gl.static_range(0, K, GROUP * BK):
        if first > 0:
            tiles = _load_weights(base, k, live, first, GROUP, K)
        for i in gl.static_range(0, GROUP):
            if first + i * BK < K:
                tile = tiles[i].to(gl.float32)
                sums += tile * _load_x(x, k, first + i * BK, K)
                if TWO:
                    more += tile * _load_x(x + x_row, k, first + i * BK, K)
    gl.store(out + n, gl.sum(sums, 1).to(out.dtype.element_ty), mask=n < N)
    if TWO:
        gl.store(out + N + n, gl.sum(more, 1).to(out.dtype.element_ty), mask=n < N)
