"""The Insum paper's other figures: group size against gathers, the table of compilers, and the ablation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.rows import ANY, Peer, Row
from benchmarks.harness.study import Case, Setup, Way, as_graph, as_step, eager, line, measured, switched
from benchmarks.harness.timing import Times
from benchmarks.peers.published import figure
from benchmarks.scenes import matrices
from benchmarks.scenes.layers import exact
from benchmarks.suites import einsum_conv, spmm
from benchmarks.suites.first_call import first_calls
from benchmarks.suites.tensor_product import PER_SAMPLE
from pumice.lower.dataflow import CONV
from pumice.ops.sparse import sparse

PUBLISHED = {f"{name} (paper)": dict(column) for name, column in figure("Insum", "table 3").values.items()}
"""One point-cloud convolution on an RTX 3090, by compiler: milliseconds to compile, to tune, of
conversion and of a run, and lines."""
STATEMENTS: Mapping[str, tuple[str, str]] = {
    "structured": (spmm.TEXT, "structured SpMM (TorchBSR)"),
    "unstructured": (spmm.TEXT, "unstructured SpMM (Sputnik)"),
    "tensor-product": (PER_SAMPLE, "tensor product (e3nn)"),
    "conv": (CONV, "sparse convolution (TorchSparse)"),
}
"""The four applications: our statement, and the paper's row."""


class Swept(NamedTuple):
    """A product of which the group size is swept. entry: of stored values for each coordinate; blocks: levels of the
    format behind the groups."""

    name: str
    a: Tensor
    b: Tensor
    truth: Tensor
    occupancy: Tensor
    entry: int = 1
    blocks: str = ""


def figure7(setup: Setup) -> Iterator[Row]:
    """For each group size: gathers and scatters, bytes, and the time of the product. The paper's figure is that of
    blocks at 80 % sparsity."""
    if setup.wants("figure7/blocks"):
        yield from _sweep(setup, _blocks(setup))
    for name in ("artist-like", "dd-like") if setup.quick else ("artist-like", "blog-like", "dd-like", "uniform"):
        if setup.wants(f"figure7/{name}"):
            yield from _sweep(setup, _graph(setup, matrices.stand_in(name, 0.005 if setup.quick else 1.0)))


def _blocks(setup: Setup) -> Swept:
    size, block = (128, 32) if setup.quick else (4096, 32)
    a = spmm.block_matrix(setup, size, block, 0.8)
    b = setup.random(size, size, dtype=setup.half, seed=2)
    truth = spmm.filled_out(a).double() @ b.double()
    lengths = a.crow_indices().diff()
    return Swept(f"blocks{size}-s0.80", a, b, truth, lengths.cpu(), block * block, f" m:B{block} k:B{block}")


def _graph(setup: Setup, matrix: matrices.Matrix) -> Swept:
    csr = spmm.csr_of(setup, matrix, torch.float32)
    b = setup.filled(matrix.shape[1], 16 if setup.quick else 128, seed=6)
    truth = spmm.product(matrix, csr.values(), b)
    return Swept(f"{matrix.name}/N{b.shape[1]}", csr, b, truth, torch.from_numpy(matrix.occupancy))


def _sweep(setup: Setup, swept: Swept) -> Iterator[Row]:
    dtype, sizes, b = swept.b.dtype, _sizes(swept.occupancy), swept.b
    ours = [
        line(f"g{size}", spmm.TEXT, "triton" if setup.device.type == "cuda" else "", A=made, B=b)
        for size in sizes
        for made in [sparse(swept.a, f"m:C k:G{size}{swept.blocks}")]
    ]
    peer = Way("torch.sparse.mm", lambda: lambda: torch.sparse.mm(swept.a, b), slack=4)
    case = f"figure7/{swept.name}"
    rows = list(measured(setup, Case(case, dtype, swept.truth), ours, [peer]))
    yield from rows
    yield from _counts(setup, case, swept, rows)


@dataclass(frozen=True)
class GroupCost:
    """Cost of a group size. gathers: coordinates of grouped axes; scatters: groups; padded: padding entries."""

    gathers: int
    scatters: int
    padded: int
    bytes: int

    @property
    def total(self) -> int:
        """gathers + scatters, which `group="count"` minimises."""
        return self.gathers + self.scatters


def group_cost(occupancy: Tensor | Sequence[int], size: int, itemsize: int = 4) -> GroupCost:
    """The cost of storing rows of `occupancy` entries of `itemsize` bytes in groups of `size`, with int32
    coordinates."""
    lengths = torch.as_tensor(occupancy)
    entries, groups = torch.stack([lengths.sum(), ((lengths + size - 1) // size).sum()]).tolist()
    places = size * groups
    return GroupCost(places, groups, places - entries, 4 * groups + (4 + itemsize) * places)


def _sizes(occupancy: Tensor) -> list[int]:
    """Powers of two up to the longest row and 64; larger groups only add padding."""
    longest = int(occupancy.max())
    return [size for size in (1, 2, 4, 8, 16, 32, 64) if size == 1 or size < 2 * longest]


def _counts(setup: Setup, case: str, swept: Swept, rows: list[Row]) -> Iterator[Row]:
    """Print the table of the figure, and yield its counts as rows against groups of 1."""
    itemsize, dtype = swept.entry * swept.b.element_size(), swept.b.dtype
    bare = group_cost(swept.occupancy, 1, itemsize)
    setup.say(f"{case}: size, gathers + scatters, MB, padding, ms")
    for size in _sizes(swept.occupancy):
        cost = group_cost(swept.occupancy, size, itemsize)
        own = [found for found in rows if found.case == f"{case}/g{size}" and found.metric == "time"]
        spent = {found.clock: found.value for found in own}
        times = ", ".join(f"{value:.4g} ({clock})" for clock, value in spent.items()) or "FAILED"
        padding = cost.padded / max(1, cost.gathers)
        setup.say(f"  {size:>3} {cost.total:>10} {cost.bytes / 1e6:8.2f} {padding:6.1%}  {times}")
        for metric, unit, value, other in (
            ("gathers+scatters", "entries", cost.total, bare.total),
            ("memory", "bytes", cost.bytes, bare.bytes),
        ):
            yield setup.row(f"{case}/g{size}", value, "count", Peer("groups of 1", other), metric, unit, dtype)


def table3(setup: Setup) -> Iterator[Row]:
    """Compile time, conversion, run time and lines of one point-cloud convolution, beside published values."""
    name, coords = next(einsum_conv.scenes(setup))
    layer = einsum_conv.layer_of(setup, coords)
    case = f"table3/{name}"
    peer = eager("eager", partial(einsum_conv.grouped_graph, layer))
    run = list(measured(setup, Case(case, setup.half, exact(layer)), [einsum_conv.planned(layer)], [peer]))
    convert = list(einsum_conv.conversions(setup, case, layer))
    build = first_calls(setup, ["conv"], warm=0)["conv"]["cold"]
    found: dict[str, Times] = {"compile": build, "lines": Times.exactly(_lines(CONV))}
    wall = [r for r in run if r.clock == "wall"]
    if wall:
        found["run"] = Times(wall[0].value, wall[0].p20, wall[0].p80)
    # Compacted tiles are the planner's form on a GPU; on a CPU it takes pairs as they are.
    made = next((r for r in convert if r.case.endswith("to-compacted")), None)
    if made is not None:
        found["conversion"] = Times(made.value, made.p20, made.p80)
    _say_table(setup, found)
    for metric, times in found.items():
        unit = "lines" if metric == "lines" else "ms"
        clock = "count" if metric == "lines" else "wall"
        for peer, column in PUBLISHED.items():
            if metric in column:
                yield setup.row(case, times, clock, Peer(peer, column[metric], "recorded"), metric, unit)


def _say_table(setup: Setup, found: dict[str, Times]) -> None:
    metrics = ("compile", "conversion", "run", "lines")
    setup.say("table 3: " + ", ".join(f"{m} ({'-' if m == 'lines' else 'ms'})" for m in metrics))
    mine = {metric: times.median for metric, times in found.items()}
    for name, column in {"pumice": mine, **PUBLISHED}.items():
        setup.say(f"  {name:<18}" + "".join(f"{column[m]:>12.5g}" if m in column else f"{'-':>12}" for m in metrics))


def lines(setup: Setup) -> Iterator[Row]:
    """Lines of the four applications: of our statement, and of the library that the paper replaces (table 1)."""
    counted = figure("Insum", "table 1").values
    for name, (text, row) in STATEMENTS.items():
        if setup.wants(f"lines/{name}"):
            replaced = counted[row]["lines"]
            setup.say(f"lines/{name}: {_lines(text)} here, {replaced:g} of {row}")
            peer = Peer(f"{row}, by the paper", replaced, "recorded")
            yield replace(setup.row(f"lines/{name}", _lines(text), "count", peer, "lines", "lines"), device=ANY)


def _lines(text: str) -> int:
    return len(text.strip().splitlines())


def ablation(setup: Setup) -> Iterator[Row]:
    """COO, + groups, + blocks, + tensor cores, + lazy broadcasting: a block-sparse product, step by step."""
    size, block = (128, 32) if setup.quick else (4096, 32)
    a = spmm.block_matrix(setup, size, block, 0.9)
    b = setup.random(size, size, dtype=setup.half, seed=2)
    dense = spmm.filled_out(a)
    truth = dense.double() @ b.double()
    peers = [Way("dense", lambda: lambda: torch.mm(dense, b))]
    times: dict[str, float] = {}
    for way in _steps(setup, a, b, block):
        # One at a time: the first steps need tens of gigabytes.
        for found in measured(setup, Case("ablation", setup.half, truth), [way], peers):
            times[way.name] = min(found.value, times.get(way.name, found.value))
            yield found
    slowest = next(iter(times.values()), 0.0)
    for name, spent in times.items():
        setup.say(f"  {name:<24} {spent:10.4g} ms {slowest / spent:8.2f}x")


def _steps(setup: Setup, a: Tensor, b: Tensor, block: int) -> Iterator[Way]:
    """The steps of the paper, with its group sizes."""
    flat = sparse(a, "(m k):C")
    grouped = sparse(flat, "m:C k:G16")
    blocked = sparse(a, f"m:C k:G4 m:B{block} k:B{block}")
    yield eager("COO", lambda: as_graph(spmm.TEXT, A=flat, B=b))
    yield eager("+ group", lambda: as_graph(spmm.TEXT, A=grouped, B=b))
    yield eager("+ block", lambda: as_graph(spmm.TEXT, A=blocked, B=b))
    if setup.quick:
        setup.say("  + tensor cores: left out of a quick run, Inductor takes long to compile")
    else:
        yield line("+ tensor cores", spmm.TEXT, "inductor", A=blocked, B=b)
    if setup.device.type == "cuda":
        # The last step in one compiler: the same kernel, loads over three axes at once.
        yield switched("our kernel, eager broadcasting", lambda: as_step(spmm.TEXT, A=blocked, B=b), lazy=False)
    generated = "triton" if setup.device.type == "cuda" else ""
    yield line("+ lazy broadcasting", spmm.TEXT, generated, A=blocked, B=b)
