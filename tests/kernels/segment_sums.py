"""Sums of gathered rows over segments in Triton's interpreter, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product

import torch
from kernels.interpret import answering, check_repeated, near, refuses
from torch import Tensor

import pumice as pm
from pumice.lower import plan, segment_sums
from pumice.lower.segment_sums import SegmentTile, ordered
from pumice.ops.operands import flatten_used

Checks = Mapping[str, Callable[[], None]]
TILES = {
    "default": None,
    "cut": SegmentTile(4, 1, 2, short=2, long=4, turns=2, window=5),
    "whole": SegmentTile(16, 2, 4, short=3, long=9, turns=64, window=3),
    "hardly any rows": SegmentTile(8, 4, 2, short=0, long=0, turns=1, window=1),
    "two at once": SegmentTile(4, 4, 2, short=5, long=9, turns=3, depth=2),
}
LENGTHS = {
    "mixed": [0, 3, 1, 0, 9, 2, 170, 4, 5, 0, 33, 12, 1, 1],
    "short": [1, 2, 0, 2],
    "one": [300],
    "empty but one": [0, 0, 0, 1, 0],
}
WIDTHS = (128, 32, 24, 72, 9)
NEAR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SPMM = "C[m,n] = A[m,k] * B[k,n]"


def entries(lengths: list[int], rows: int, size: int = 1) -> tuple[Tensor, Tensor]:
    """(segment of each group of entries, row of each entry, -1 where there is none)."""
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    shape = (len(segments), size) if size > 1 else (len(segments),)
    return segments, torch.randint(-1, rows, shape).int()


def check_sums(lengths: list[int], width: int, tile: SegmentTile | None, dtype: torch.dtype, valued: bool) -> None:
    """Kernel and plain torch compute what index_add does, whatever was in the result before."""
    torch.manual_seed(0)
    segments, places = entries(lengths, 19)
    x, values = torch.randn(19, width).to(dtype), torch.randn(len(places)).to(dtype)
    there = places >= 0
    factors = values[there, None].double() if valued else 1.0
    want = torch.zeros(len(lengths), width, dtype=torch.float64)
    want.index_add_(0, segments[there].long(), factors * x[places[there].long()].double())
    tile = tile or SegmentTile()
    ready = segment_sums.prepared(segments, places, len(lengths), tile)
    for run in (ready.run, ready.run_torch):
        got = run(x, values if valued else None, places, torch.full((len(lengths), width), torch.nan, dtype=dtype))
        near(got, want, NEAR[dtype])


def check_order() -> None:
    """Every entry is read once, in a program of its segment; windows keep together."""
    lengths = [*LENGTHS["mixed"], *[3] * 40]
    for tile in (t for t in TILES.values() if t is not None):
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        found = ordered(bounds, 2, tile)
        seen = torch.zeros(2 * int(bounds[-1]), dtype=torch.int64)
        for slots, code in zip(found.slots.tolist(), found.codes.tolist(), strict=True):
            step = (1, tile.middle, tile.rows)[code & 3]
            longest = max(tile.turns * tile.depth, tile.short, -(-tile.long // tile.middle))
            assert (code >> 2) * tile.depth < longest + tile.depth, "a program takes too long"
            for begin, stop, segment in zip(*slots, strict=True):
                read = range(begin, min(stop, begin + step * (code >> 2) * tile.depth), step)
                seen[list(read)] += 1
                assert all(2 * bounds[segment] <= e < 2 * bounds[segment + 1] for e in read) or segment < 0
        assert (seen == 1).all()
        if len(found.pieces):
            cut = found.pieces > 1
            assert (found.firsts[cut] + found.pieces[cut] > torch.arange(len(cut))[cut]).all()


def check_formats(format: str) -> None:
    """Products with a sparse matrix in formats that list entries by rows; coefficients, old values, more axes."""
    torch.manual_seed(0)
    a, b, c = torch.randn(23, 31) * (torch.rand(23, 31) < 0.3), torch.randn(31, 4, 8), torch.randn(23, 32)
    a[3:7] = 0
    A, flat = pm.sparse(a, format), b.flatten(1)
    want = a.double() @ flat.double()
    near(pm.einsum(SPMM, A=A, B=flat, lowering="segments"), want, 1e-5)
    near(pm.einsum(SPMM.replace("=", "+= 2 *", 1), A=A, B=flat, C=c, lowering="segments"), c + 2 * want, 1e-5)
    wide = pm.einsum("C[m,n,o] = A[m,k] * B[k,n,o]", A=A, B=b, lowering="segments")
    near(wide.flatten(1), want, 1e-5)
    turned = flat.t().contiguous().t()
    near(pm.einsum(SPMM, A=A, B=turned, lowering="segments"), want, 1e-5)


def check_messages() -> None:
    """Messages without values, by index arrays; gradients of all."""
    torch.manual_seed(0)
    target, source = torch.tensor([0, 0, 2, 2, 2, 5]), torch.tensor([3, 1, -1, 0, 3, 2])
    x = torch.randn(4, 16, requires_grad=True)
    got = pm.einsum("y[T[e],n] = x[S[e],n] ; T:sorted, y:[6,_]", T=target, S=source, x=x, lowering="segments")
    there = source >= 0
    want = torch.zeros(6, 16, dtype=torch.float64).index_add(0, target[there], x.double()[source[there]])
    near(got, want, 1e-5)
    weights = torch.randn(6, 16)
    ours, theirs = (torch.autograd.grad((y * weights).sum(), x, retain_graph=True)[0] for y in (got, want))
    near(ours, theirs.double(), 1e-5)


def check_prepared() -> None:
    """A plan as a function of the gathered rows reads values where they are."""
    torch.manual_seed(0)
    a, b = torch.randn(20, 16) * (torch.rand(20, 16) < 0.5), torch.randn(16, 32)
    check_repeated("CSR", a, b, "segments", 1e-5)
    twice = SPMM.replace("=", "+= 2 *", 1)
    tensors, names, _ = flatten_used(twice, {"A": pm.sparse(a, "CSR"), "B": b, "C": torch.ones(20, 32)}, ())
    assert plan.repeated(plan.plan_for(tensors, names, twice, None, "segments"), tensors, [len(tensors) - 2]) is None


def check_refusals() -> None:
    """Other statements are refused with the reason."""
    a, b = pm.sparse(torch.eye(4), "CSR"), torch.ones(4, 16)
    index = {"T": torch.tensor([0, 1]), "S": torch.tensor([1, 0]), "x": torch.ones(2, 16)}
    cases = {
        "fewer than 8 columns": (SPMM, {"A": a, "B": b[:, :4]}),
        "a factor is not of float32": (SPMM, {"A": pm.sparse(torch.eye(4).double(), "CSR"), "B": b.double()}),
        "sorted index array": ("y[T[e],n] = x[S[e],n] ; y:[2,_]", index),
        "other factors": (
            "y[T[e],n] = x[S[e],n] * v[e] * w[e] ; T:sorted, y:[2,_]",
            {**index, "v": torch.ones(2), "w": torch.ones(2)},
        ),
        "other axes": ("y[T[e]] = x[S[e],n] ; T:sorted, y:[2]", index),
        "no factor has its rows": ("y[T[e],n] = x[e,n] ; T:sorted, y:[2,_]", {n: index[n] for n in "Tx"}),
        "a part of an axis": ("y[T[e],n] = x[S[e],n] ; T:sorted, y:[2,16], n:4..12", index),
        "it is no sum": ("y[T[e],n] max= x[S[e],n] ; T:sorted, y:[2,_]", index),
    }
    refuses("segments", cases)


def checks() -> Checks:
    every = product(LENGTHS, WIDTHS[:2], TILES)
    found = {
        f"{name}, {width} columns, {tile}": partial(
            check_sums, LENGTHS[name], width, TILES[tile], torch.float32, width == 128
        )
        for name, width, tile in every
    }
    found |= {
        f"{width} columns of {dtype}": partial(check_sums, LENGTHS["mixed"], width, TILES["cut"], dtype, True)
        for width in WIDTHS
        for dtype in NEAR
    }
    formats = ("COO", "CSR", "GroupCOO", "m:C k:G4", "m:C k:G*")
    return {
        **found,
        **{f"format {name}": partial(check_formats, name) for name in formats},
        "order": check_order,
        "messages": check_messages,
        "prepared": check_prepared,
        "refusals": check_refusals,
    }


GROUPS: Mapping[str, Callable[[], Checks]] = {"segments": checks}
answer = answering(GROUPS)
