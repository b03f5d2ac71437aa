"""Emitted kernels in Triton's interpreter, in a process of its own.

TRITON_INTERPRET must be set before triton is first imported, and the other tests need it unset.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice, product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from einsum_fuzz import random_case
from einsum_oracle import evaluate
from kernels.cases import CASES, SMALL, SMALL_BLOCK, STUDIES, Case, Problem, problem, variants
from torch import Tensor
from torch.nn import functional

import pumice as pm
from pumice.coords import KernelMap, MultiMap, Relation, kernel_map
from pumice.errors import OptionError
from pumice.language.bind import bind
from pumice.language.contraction import ContractionRoles, contraction_roles, stacked
from pumice.language.derive import declare
from pumice.language.parse import parse
from pumice.language.rewrite import lower_statement, single_terms
from pumice.lower import chained, dataflow, maps, plan, reference, segments
from pumice.lower import kernel as lowered
from pumice.lower.dataflow import GROUPED_CONV, Pass
from pumice.lower.epilogue import ACTIVATIONS, NO_EPILOGUE, Epilogue, EpilogueSignature, applied
from pumice.lower.maps import FORMS
from pumice.lower.parts import WeightParts, rounded
from pumice.ops.operands import flatten_used
from pumice.schedule import tile as schedule
from pumice.schedule.dataflow import DATAFLOWS, PASSES, Dataflow, Grouping
from pumice.schedule.tile import Tile
from pumice.testing import random_tensor

Checks = Mapping[str, Callable[[], None]]
SEEDS = 300
BATCH = 30
TILES = 1
"""Tiles per case besides the default."""


# Comparing
def form_of(p: Problem) -> ContractionRoles:
    return contraction_roles(p.bound.statement, p.bound.extents)


def wanted(p: Problem) -> Tensor:
    """The reference in float64 (the oracle checks it elsewhere)."""
    return reference.run(p.bound, p.to(torch.float64).operands, torch.float64)


def agree(p: Problem, dtype: torch.dtype = torch.float32, tile: Tile | None = None, limit: float = 2e-5) -> None:
    """The kernel's result is the reference's, in the dtype asked, and operands are left alone."""
    before = {name: t.clone() for name, t in p.operands.items()}
    refused = lowered.refusal(p.bound.statement, p.bound, p.operands)
    assert refused is None, refused
    got = lowered.runner(p.bound, dtype, tile)(p.operands)
    assert got.dtype == dtype, f"asked for {dtype}, found {got.dtype}"
    near(got, wanted(p), limit)
    for name, tensor in p.operands.items():
        assert torch.equal(tensor, before[name]), f"operand {name} was written to"


def refuses(lowering: str, cases: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """The lowering refuses each statement, by its operands, for the reason given."""
    for reason, (text, operands) in cases.items():
        try:
            pm.einsum(text, lowering=lowering, **operands)
        except OptionError as refused:
            assert reason in str(refused), refused
        else:
            raise AssertionError(f"`{text}` was not refused")


def text_of(p: Problem, out: Tensor, tile: Tile) -> str:
    """The source of the kernel with this tile."""
    return lowered.generated_kernel(p.bound, {**p.operands, "": out}, tile, lowered.KernelOptions()).source.text


def check_repeated(format: str, a: Tensor, b: Tensor, lowering: str, limit: float) -> None:
    """A plan of a @ b as a function of b reads the values of a where they are."""
    A, text = pm.sparse(a, format), "C[m,n] = A[m,k] * B[k,n]"
    tensors, names, _ = flatten_used(text, {"A": A, "B": b}, ())
    step = plan.plan_for(tensors, names, text, None, lowering)
    plan.execute_plan(step, tensors)
    call = plan.repeated(step, tensors, [len(tensors) - 1])
    values = A.parts[0].values
    assert call is not None and values is not None
    for factor in (1, 3):
        other = torch.randn_like(b)
        assert (got := call([other])) is not None
        near(got, factor * a.double() @ other.double(), limit)
        values.mul_(3)


def near(got: Tensor, want: Tensor, limit: float) -> None:
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if not want.numel():
        return
    error = float((got.double() - want).abs().max())
    scale = max(1.0, float(want.abs().max()))
    assert error <= limit * scale, f"error {error:.3g}, allowed are {limit:.3g} * {scale:.3g}"


def tiles(p: Problem, count: int = TILES, most: int = 64 * 64) -> list[Tile]:
    """The default and some candidates spread over all that are small."""
    asked = schedule.Problem(form_of(p), p.bound.extents, mean=4.0, bits=32)
    first, *found = (replace(t, warps=4, stages=2) for t in schedule.candidates(asked))
    # Warps and stages do nothing here.
    found = [t for t in dict.fromkeys(found) if t.rows * t.columns <= most and t != first]
    step = max(1, len(found) // count)
    ahead = [replace(first, prefetch_indices=True)] if form_of(p).product else []
    shared = [replace(first, stream_k_chunk=2)] if asked.shares else []
    return [first, *ahead, *shared, *found[::step][:count]]


# The case studies
def study_checks(kind: str) -> Checks:
    """All sizes and layouts for the forward statements, some for their derivatives."""
    found: dict[str, Callable[[], None]] = {}
    for name, case in CASES.items():
        if STUDIES[case.study].kind == kind and STUDIES[case.study].block in (0, SMALL_BLOCK):
            # Weights of each sample leave no matrix product over samples: each is a program, so few will do.
            small = case.at(SMALL, b=3) if case.study.endswith("own") else case.at(SMALL)
            found[f"{name} tiles"] = partial(check_tiles, small)
            found[f"{name} half"] = partial(check_half, small)
            if not case.wrt:
                found[f"{name} strided"] = partial(check_strided, small)
                found[f"{name} accumulates"] = partial(check_accumulates, small)
                found |= {f"{name} {label}": partial(check_one, odd) for label, odd in variants(case)}
    return found


def check_one(case: Case) -> None:
    agree(problem(case))


def check_tiles(case: Case) -> None:
    p = problem(case)
    for tile in tiles(p):
        try:
            agree(p, tile=tile)
        except Exception as error:
            raise AssertionError(f"tile {tile}: {error}") from error


def check_half(case: Case) -> None:
    """Half operands are multiplied and added in float32; what goes into a dot is rounded once if it is a product."""
    p = problem(case).to(torch.float16)
    form = form_of(p)
    rounds = form.product and max(len(form.left), len(form.right)) > 1
    agree(p, torch.float32, limit=2**-10 if rounds else 2e-5)
    agree(p, torch.float16, limit=2**-9 if rounds else 2**-10)


def check_accumulates(case: Case) -> None:
    p = problem(case)
    old = torch.randn(p.bound.shape, generator=torch.Generator().manual_seed(5))
    statement = replace(p.bound.statement, accumulate=True)
    agree(Problem.of(statement, {**p.operands, statement.target.name: old}, p.bound.shape))


def check_strided(case: Case) -> None:
    """Every operand transposed in memory, or with gaps."""
    p = problem(case)
    agree(replace(p, operands={name: strided(t) for name, t in p.operands.items()}))


def strided(tensor: Tensor) -> Tensor:
    if tensor.ndim < 2:
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


# Products whose left side is a product
def within_checks() -> Checks:
    kinds = {"fp32": torch.float32, "fp64": torch.float64}
    found: dict[str, Callable[[], None]] = {}
    for sizes in ({}, {"i": 16, "j": 16}, {"u": 40, "w": 33}, {"l": 1, "q": 1}, {"j": 33}):
        for name, kind in kinds.items():
            found[f"within {sizes} {name}"] = partial(check_within, sizes, kind)
    found["an infinity within"] = check_infinity_within
    found["float32 as tf32 is rounded"] = check_rounded
    found["weights in parts"] = check_parts
    found["weights in parts, of a convolution"] = check_parts_of_convolution
    return found


def check_within(sizes: Mapping[str, int], kind: torch.dtype) -> None:
    for study in ("tp_tables", "tp_tables_own"):
        p = problem(CASES[study].at(SMALL, **sizes)).to(kind)
        found = form_of(p).within
        assert found is not None and (found.shared, found.summed) == ("j", ("q",))
        for depth in (16, 32, 64):
            agree(p, kind, Tile(16, 16, depth), 2e-6)


def check_infinity_within() -> None:
    """What is cut off for tf32 has no part in an infinity."""
    p = problem(CASES["tp_tables_own"].at(SMALL))
    p.operands["W"][1, :, :, 2] = torch.inf
    got, want = lowered.runner(p.bound, torch.float32)(p.operands), wanted(p)
    assert torch.equal(got.isfinite(), want.isfinite())


def check_rounded() -> None:
    """To the nearest of 10 bits; what is finite stays so, and what is not, too."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(24, 32, generator=generator), torch.randn(32, 16, generator=generator)
    mantissas, exponents = zip(a.frexp(), b.frexp(), strict=True)
    near = [torch.ldexp(torch.round(m * 2**11) / 2**11, e) for m, e in zip(mantissas, exponents, strict=True)]
    a[0, 0], a[1, 0], a[2, 0] = torch.inf, torch.nan, -torch.inf
    a[3], b[:, 0] = torch.finfo(torch.float32).max, 0.0
    near[1][:, 0] = 0.0
    bound = bind(parse("C[m,n] = A[m,k] * B[k,n]"), {"A": tuple(a.shape), "B": tuple(b.shape)})
    got = lowered.runner(bound, torch.float32, None, "tf32")({"A": a, "B": b})
    torch.testing.assert_close(got[4:], near[0][4:] @ near[1], rtol=1e-5, atol=1e-5)
    assert not got[:3, 1:].isfinite().any() and (got[3, 0] == 0)


def check_parts() -> None:
    """The kernel writes the parts that torch does: a weight rounded to tf32, or three that add up to it."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, 3, c, generator=generator) for n, c in ((20, 16), (96, 32), (16, 20))]
    weights[0][0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, torch.finfo(torch.float32).max])
    for parts in (1, 3):
        found, by_torch = WeightParts.of(weights, parts), WeightParts.of(weights, parts)
        found.fill(weights)
        with patch("pumice.lower.parts.has_triton", lambda x: False):
            by_torch.fill(weights)
        for weight, first, other in zip(weights, found.first, by_torch.first, strict=True):
            each, others = (stored_parts(t, parts) for t in (first, other))
            torch.testing.assert_close(each, others, rtol=0, atol=0, equal_nan=True)
            usual = weight.abs() < 1e38
            assert torch.equal(each[0].isfinite(), weight.isfinite())
            if parts == 1:
                assert not (first.view(torch.int32)[usual] & 8191).any()
                assert (first - weight)[usual].abs().le(2.0**-11 * weight[usual].abs()).all()
            else:
                assert torch.equal(torch.stack(each).double().sum(0)[usual], weight.double()[usual])


def stored_parts(first: Tensor, parts: int) -> list[Tensor]:
    """All parts of a weight, by its first one."""
    begins = [first.storage_offset() + n * first.numel() for n in range(parts)]
    return [first.as_strided(first.shape, first.stride(), begin) for begin in begins]


def check_parts_of_convolution() -> None:
    """Three parts are as exact as float32, one is as exact as tf32; an infinity stays one, in its rows."""
    p = problem(CASES["conv_compacted"].at(SMALL, c=16, n=20))
    p.operands["X"][0, 3] = torch.inf
    weight = p.operands["W"]
    want = wanted(p)
    there = want.isfinite()
    assert not there.all() and there.any()
    for parts, precision, limit in ((3, "tf32x3", 1e-6), (1, "tf32", 2e-3)):
        stored = WeightParts.of([weight], parts)
        stored.fill([weight])
        finish = EpilogueSignature(weight_parts=parts)
        for tile in (None, Tile(16, 16, 16, stream_k_chunk=2), Tile(16, 32, 16, prefetch_indices=True)):
            run = lowered.runner(p.bound, torch.float32, tile, precision, finish)
            got = run({**p.operands, "W": stored.first[0]})
            assert torch.equal(got.isfinite(), there)
            near(got[there], want[there], limit)
    stored = WeightParts.of([weight], 1)
    stored.fill([weight])
    p.operands["X"] = rounded(p.operands["X"])
    finish = EpilogueSignature(weight_parts=1, in_tf32="xy")
    got = lowered.runner(p.bound, torch.float32, None, "tf32", finish)({**p.operands, "W": stored.first[0]})
    assert torch.equal(got[there], rounded(got[there])) and torch.equal(got.isfinite(), there)
    near(got[there], want[there], 1e-3)


# Rows that are segments
def lane_checks() -> Checks:
    found: dict[str, Callable[[], None]] = {}
    for study in ("coo", "group_coo"):
        for rows in (1, 3, 17, 40):
            for lanes in (1, 2, 4):
                found[f"{study} {rows} rows {lanes} lanes"] = partial(check_lanes, study, rows, lanes)
    found["one long row"] = partial(check_long_row, 4)
    found["one long row, one lane"] = partial(check_long_row, 1)
    found["rows apart"] = check_rows_apart
    for study in ("coo", "group_coo"):
        for rows in (1, 17, 40):
            found[f"{study} {rows} rows stacked"] = partial(check_stacks, study, rows)
    found["stacks apart"] = check_stacks_apart
    for study in ("coo", "group_coo"):
        found[f"{study} what is infinite stays in its rows"] = partial(check_infinite, study)
    return found


def check_lanes(study: str, rows: int, lanes: int) -> None:
    p = problem(CASES[study].at(SMALL, M=rows, p=rows + 6, n=7), rows)
    assert form_of(p).rows == (form_of(p).segment.index,)  # type: ignore[union-attr]
    agree(p, tile=Tile(lanes, 8, segment_threads=lanes))
    agree(p, tile=Tile(8 * lanes, 4, segment_threads=lanes))
    agree(p, tile=Tile(4 * lanes, 4, segment_threads=lanes, column_major_grid=True))


def check_stacks(study: str, rows: int) -> None:
    """Consecutive segments as the rows of a matrix product, in stacks that they fill or not."""
    p = problem(CASES[study].at(SMALL, M=rows, p=rows + 6, n=23), rows).to(torch.float16)
    assert stacked(form_of(p), p.bound.statement) is not None
    deep = Tile(32, 32, 64, stacked=True, column_major_grid=True)
    for tile in (Tile(16, 16, 16, stacked=True), deep, replace(deep, prefetch_indices=True)):
        agree(p, tile=tile)
        agree(p, torch.float16, tile, 2**-10)


def check_infinite(study: str) -> None:
    """What is not stored is not multiplied: an infinity or NaN reaches the rows that have an entry for it alone."""
    p = problem(CASES[study].at(SMALL, M=40, p=46, n=23)).to(torch.float16)
    p.operands["B"][2, 3], p.operands["B"][5, 7] = torch.inf, torch.nan
    want = wanted(p)
    assert 0 < int((~want.isfinite()).sum()) < want.numel() / 2
    for tile in (
        Tile(8, 16, segment_threads=2),
        Tile(16, 16, 16, stacked=True),
        Tile(16, 32, 64, stacked=True, prefetch_indices=True),
    ):
        got = lowered.runner(p.bound, torch.float32, tile)(p.operands)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True, msg=str(tile))


def check_stacks_apart() -> None:
    """Segments of very many entries have stacks of their own, and those around them end there."""
    p = problem(CASES["coo"].at(SMALL, M=40, p=400)).to(torch.float16)
    lengths = [2, 2, 90, 2, 80, 70, *[0] * 3, *[2] * 10, *[0] * 20, 134]
    p = replace(p, operands={**p.operands, "A_m": torch.arange(40).repeat_interleave(torch.tensor(lengths)).int()})
    with patch.multiple(segments, _LONG_ARRAY=1, _LONG=60):
        part = segments.stacks(p.operands["A_m"], 40, 16)
        assert part.outliers is not None and sorted(part.outliers.rows.tolist()) == [2, 4, 5, 39]
        assert sorted(zip(part.rows.tolist(), part.ends.tolist(), strict=True)) == [  # type: ignore[union-attr]
            (0, 2), (3, 4), (6, 16), (16, 32), (32, 39),
        ]  # fmt: skip
        agree(p, tile=Tile(16, 16, 32, stacked=True))


def check_long_row(lanes: int) -> None:
    p = problem(CASES["coo"].at(SMALL, M=5, p=70))
    p = replace(p, operands={**p.operands, "A_m": torch.tensor([0] * 2 + [3] * 68, dtype=torch.int32)})
    agree(p, tile=Tile(2 * lanes, 16, segment_threads=lanes))


def check_rows_apart() -> None:
    """Rows far longer than the others, by programs of their own."""
    p = problem(CASES["coo"].at(SMALL, M=40, p=400))
    lengths = [300, *[2] * 20, 60, *[0] * 18]
    p = replace(p, operands={**p.operands, "A_m": torch.arange(40).repeat_interleave(torch.tensor(lengths)).int()})
    with patch.object(segments, "_LONG_ARRAY", 1):
        part = segments.segments(p.operands["A_m"], 40, 512)
        assert part.outliers is not None and part.outliers.rows.tolist() == [0]
        agree(p)


# Products of several factors in two steps
def chain_checks() -> Checks:
    names = [name for name, case in CASES.items() if STUDIES[case.study].kind == "tensor product"]
    found = {f"{name} in two steps": partial(check_chain, name) for name in names if "own" in CASES[name].study}
    return {**found, "two steps occur": check_some_chains}


def check_chain(name: str) -> None:
    p = problem(CASES[name].at(SMALL, b=3))
    if not chained.refusal(p.bound.statement, p.bound, p.operands):
        near(chained.TwoStepLowering(p.bound, p.operands, torch.float32)(p.operands), wanted(p), 2e-5)


def check_some_chains() -> None:
    """A grouped statement and its gradients have two steps."""
    own = [problem(case.at(SMALL, b=3)) for case in CASES.values() if case.study == "tp_grouped_own"]
    assert any(not chained.refusal(p.bound.statement, p.bound, p.operands) for p in own)


# Convolutions over real kernel maps
WAYS = {
    "forward": "O[o,n] = map[o,k,i] * X[i,c] * W[n,k,c]",
    "dgrad": "D[i,c] = map[o,k,i] * G[o,n] * W[n,k,c]",
    "wgrad": "D[n,k,c] = map[o,k,i] * G[o,n] * X[i,c]",
}


def map_checks() -> Checks:
    found: dict[str, Callable[[], None]] = {
        f"kernel {size} stride {stride} {way} {form}": partial(check_map, size, stride, way, form)
        for size, stride in ((3, 1), (2, 2))
        for way in WAYS
        for form in FORMS
    }
    return {**found, "groups of no tap": check_no_tap, "groups with holes": check_holes}


def check_no_tap() -> None:
    """What they hold is added nowhere, in no turn of a loop."""
    found, operands = cloud(3, 1)
    (p,) = map_problems(found, operands, "grouped", WAYS["wgrad"], (11, found.volume, 9))
    want, groups = wanted(p), len(p.operands["map_k"])
    ends = {"map_k": -1, "map_i": 0, "map_o": 0}
    more = {name: torch.cat([p.operands[name], torch.full_like(p.operands[name][:3], x)]) for name, x in ends.items()}
    p = Problem.of(p.bound.statement, {**p.operands, **more}, p.bound.shape)
    near(wanted(p), want, 1e-12)
    for tile in (None, Tile(16, 16, 16, prefetch_indices=True), Tile(16, 16, 16, prefetch_indices=False)):
        near(lowered.runner(p.bound, torch.float32, tile)(p.operands), want, 2e-5)
    text = text_of(p, want, Tile(16, 16, 16))
    assert "tl.range(0, until)" in text and p.bound.extents["g"] == groups + 3


def check_holes() -> None:
    """Pairs may be absent anywhere in a group; the loop ends behind the last one that is there."""
    found, operands = cloud(3, 1)
    (p,) = map_problems(found, operands, "grouped", WAYS["wgrad"], (11, found.volume, 9))
    chance = torch.Generator().manual_seed(0)
    shown = {name: p.operands[name].clone() for name in ("map_i", "map_o")}
    for x in shown.values():
        x[torch.rand(x.shape, generator=chance) < 0.3] = -1
    shown = {name: functional.pad(x, (0, 2 * x.shape[1]), value=-1) for name, x in shown.items()}
    p = Problem.of(p.bound.statement, {**p.operands, **shown}, p.bound.shape)
    want = wanted(p)
    for tile in (None, Tile(16, 16, 16, prefetch_indices=True), Tile(16, 16, 16, prefetch_indices=False)):
        near(lowered.runner(p.bound, torch.float32, tile)(p.operands), want, 2e-5)
    text = text_of(p, want, Tile(16, 16, 16))
    assert "present = " in text and "tl.range(0, until)" in text


def check_map(size: int, stride: int, way: str, form: str) -> None:
    found, operands = cloud(size, stride)
    shapes = {"forward": (found.num_outputs, 11), "dgrad": (found.num_inputs, 9), "wgrad": (11, found.volume, 9)}
    (whole,) = map_problems(found, operands, "pairs", WAYS[way], shapes[way])
    got = None
    for p in map_problems(found, operands, form, WAYS[way], shapes[way]):
        got = lowered.runner(p.bound, torch.float32)(p.operands, got)
    assert got is not None
    near(got, wanted(whole), 2e-5)


@lru_cache
def cloud(size: int, stride: int) -> tuple[KernelMap, Mapping[str, Tensor]]:
    """A map, whose forms are found once, and operands for it."""
    generator = torch.Generator().manual_seed(size)
    x = random_tensor(40, 9, 3)
    found, _ = kernel_map(x.geometry, Relation.of(3, size, stride=stride))
    weight = torch.randn(11, found.volume, 9, generator=generator)
    return found, {"X": x.feats, "W": weight, "G": torch.randn(found.num_outputs, 11, generator=generator)}


def map_problems(
    found: KernelMap, operands: Mapping[str, Tensor], form: str, text: str, shape: tuple[int, ...]
) -> list[Problem]:
    """A problem for each part of the form."""
    told = lower_statement(parse(text), {"map": FORMS[form].storage_form})
    parts = FORMS[form].arrays(found)
    if form == "grouped":
        # Groups of thousands, mostly padding on so small a cloud, take the interpreter too long.
        parts = [dict(zip("kio", found.grouped(16), strict=True))]
    arrays = {name: parts[a.part][a.local] for name, a in told.arrays.items()}
    return [Problem.of(step, {**operands, **arrays}, shape) for step in told.steps]


# Dataflows by name, where kernels run
def flow_checks() -> Checks:
    kernels = {name: flow for name, flow in DATAFLOWS.items() if flow.movement != "explicit"}
    kernels = {name: flow for name, flow in kernels.items() if flow.grouping in (None, Grouping("adaptive"))}
    found = {f"dataflow {name}": partial(check_flow, flow, 1) for name, flow in kernels.items()}
    gathering = [f"gather-gemm-scatter-{how}-adaptive" for how in ("vectorised", "fused", "locality-aware")]
    implicit = "implicit-gemm-split2", "implicit-gemm-table", "implicit-gemm-table-split-k"
    for name in ("fetch-on-demand-deterministic", *implicit, *gathering):
        found[f"dataflow {name} in groups"] = partial(check_flow, kernels[name], 2)
    for name in ("fetch-on-demand", "fetch-on-demand-deterministic"):
        found[f"dataflow {name} over a graph"] = partial(check_graph_flow, kernels[name])
    return {**found, "programs share segments in split-k": check_split_k}


def check_graph_flow(flow: Dataflow) -> None:
    """All three passes over a map with several inputs of an output at one offset, groups of 16 pairs."""
    chance = torch.Generator().manual_seed(5)
    ends = [torch.randint(0, n, (200,), generator=chance) for n in (40, 30, 4)]
    found, _ = MultiMap.of((ends[0], ends[1]), ends[2], (40, 30, 4))
    x, w, y = (torch.randn(shape, generator=chance) for shape in ((40, 8), (10, 4, 8), (30, 10)))
    plain = DATAFLOWS["gather-gemm-scatter-vectorised-separate"]
    with patch.object(maps, "group_of", lambda outputs: 16):
        for name, given in (("forward", (x, w)), ("dgrad", (y, w)), ("wgrad", (x, y))):
            near(Pass(name, flow, found, 1)(given), Pass(name, plain, found, 1)(given).double(), 2e-5)


def check_flow(flow: Dataflow, groups: int) -> None:
    """All three passes, and an epilogue, against products of torch's libraries."""
    found, operands = cloud(3, 1)
    x, w = operands["X"][:, :8], operands["W"][:10, :, : 8 // groups]
    y = operands["G"][:, :10].contiguous()
    asked = {name: Pass(name, flow, found, groups) for name in PASSES}
    plain = {name: Pass(name, DATAFLOWS["explicit-gemm"], found, groups) for name in PASSES}
    then = epilogue_of(tuple(y.shape), "relu")
    # Groups of thousands, mostly padding on so small a cloud, take the interpreter too long.
    with patch.object(maps, "group_of", lambda outputs: 16):
        for name, given in (("forward", (x, w)), ("dgrad", (y, w)), ("wgrad", (x, y))):
            near(asked[name](given), plain[name](given).double(), 2e-5)
        near(asked["forward"]((x, w), then), plain["forward"]((x, w), then).double(), 2e-5)


def check_split_k() -> None:
    """The tile says so, and what it finds is the same every time."""
    found, operands = cloud(3, 1)
    asked = Pass("forward", DATAFLOWS["implicit-gemm-split-k"], found, 1)
    given = operands["X"], operands["W"]
    (part,) = dataflow._plan_of(asked, given, NO_EPILOGUE).steps
    assert part.run._sized.tile.stream_k_chunk == asked.flow.piece  # type: ignore[attr-defined]
    assert torch.equal(asked(given), asked(given))


def channel_checks() -> Checks:
    """Channels that leave no matrix product: few of them, and groups of few."""
    return {
        f"{inputs} to {outputs} channels in {groups} groups, {form}": partial(
            check_channels, (groups, inputs, outputs), form
        )
        for groups, inputs, outputs in ((1, 1, 5), (1, 3, 20), (1, 4, 32), (24, 1, 1), (5, 4, 4), (3, 1, 2))
        for form in ("compacted", "unsorted", "split2")
    }


def check_channels(channels: tuple[int, int, int], form: str) -> None:
    groups, inputs, outputs = channels
    found, _ = cloud(3, 1)
    generator = torch.Generator().manual_seed(sum(channels))
    x = torch.randn(found.num_inputs, groups, inputs, generator=generator)
    operands = {"x": x, "w": torch.randn(groups, outputs, 27, inputs, generator=generator)}
    shape = (found.num_outputs, groups, outputs)
    (whole,) = map_problems(found, operands, "pairs", GROUPED_CONV, shape)
    got = None
    for p in map_problems(found, operands, form, GROUPED_CONV, shape):
        assert not form_of(p).product
        got = lowered.runner(p.bound, torch.float32)(p.operands, got)
    assert got is not None
    near(got, wanted(whole), 2e-5)


# Several entries in one turn
def pack_checks() -> Checks:
    found: dict[str, Callable[[], None]] = {}
    for channels in (1, 3, 4, 5, 8, 16):
        found[f"{channels} channels packed"] = partial(check_packed, "conv_compacted", c=channels)
    found["3 channels of groups packed"] = partial(check_packed, "conv_g_compacted", c=3)
    found["4 channels of a gradient packed"] = partial(check_packed, "conv_compacted_t:dX", n=4, c=13)
    found["packed, any layout"] = check_packed_layouts
    found["packed, values of entries"] = check_packed_values
    for channels in (3, 9):
        found[f"{channels} channels read backwards"] = partial(check_backwards, channels)
    found["channels that lead"] = check_leading_channels
    return found


def ragged(study: str, **sizes: int) -> Problem:
    """Segments of 0 to 7 entries, which no pack divides."""
    p = problem(CASES[study].at(SMALL, b=16, e=19, T=6, I=23, N=25, **sizes))
    lengths = torch.tensor([5, 0, 1, 7, 2, 3])
    return replace(p, operands={**p.operands, "tile": torch.cat([-torch.ones(1), _owners(lengths)]).int()})


def _owners(lengths: Tensor) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(lengths)


def check_packed(study: str, **sizes: int) -> None:
    p = ragged(study, **sizes)
    assert lowered.tile_of(p.bound, p.operands).packed
    epilogue = epilogue_of(p.bound.shape, "relu")
    want = applied(wanted(p), epilogue)
    # One entry has more points than the last tile is deep.
    for tile in (
        Tile(16, 16, 16),
        Tile(16, 16, 64, prefetch_indices=True),
        Tile(16, 32, 2, prefetch_indices=True, column_major_grid=True),
    ):
        run = lowered.runner(p.bound, torch.float32, replace(tile, packed=True), finish=epilogue.signature)
        near(run({**p.operands, **epilogue.operands}), want, 2e-5)


def check_packed_layouts() -> None:
    """Other sides, other strides, other numbers."""
    for channels in (3, 4):
        p = ragged("conv_compacted", c=channels)
        agree(p, tile=Tile(16, 16, 32, packed=True, swapped=True))
        odd = {name: strided(t) for name, t in p.operands.items()}
        agree(replace(p, operands=odd), tile=Tile(16, 16, 32, packed=True, prefetch_indices=True))
        agree(p.to(torch.float16), torch.float16, Tile(16, 16, 64, packed=True), 2**-9)


def check_packed_values() -> None:
    """Where an entry is an axis itself, and not only behind an index."""
    p = ragged("conv_compacted", c=3)
    text = "O[rows[tile[e],b],n] = X[met[e,b],c] * W[n,e,c] * S[e] ; tile:sorted, rows:distinct, rows:onto"
    entries = len(p.operands["tile"])
    generator = torch.Generator().manual_seed(3)
    values = {"W": torch.randn(13, entries, 3, generator=generator), "S": torch.randn(entries, generator=generator)}
    held = {name: p.operands[name] for name in ("X", "tile", "rows", "met")}
    p = Problem.of(text, {**held, **values}, p.bound.shape)
    for ahead in (False, True):
        agree(p, tile=Tile(16, 16, 16, packed=True, prefetch_indices=ahead))


def check_backwards(channels: int) -> None:
    """Addresses that fall where what tells them rises are none that lie outside, packed or not."""
    p = ragged("conv_compacted", c=channels)
    taps = torch.randn(19, 13, channels, generator=torch.Generator().manual_seed(3))
    for x, w in (("22-met[e,b]", "W[n,k[e],c]"), ("met[e,b]", "W[n,4-k[e],c]"), ("met[e,b]", "taps[18-e,n,c]")):
        text = f"O[rows[tile[e],b],n] = X[{x},c] * {w} ; tile:sorted, rows:distinct, rows:onto"
        read = {name: t for name, t in {**p.operands, "taps": taps}.items() if f"{name}[" in text}
        agree(Problem.of(text, read, p.bound.shape))


def check_leading_channels() -> None:
    """Channels that lead every access may be any number, and are not packed."""
    p = ragged("conv_compacted", c=3)
    turned = {"X": p.operands["X"].t().contiguous(), "W": p.operands["W"].permute(2, 1, 0).contiguous()}
    text = "O[rows[tile[e],b],n] = X[c,met[e,b]] * W[c,k[e],n] ; tile:sorted, rows:distinct, rows:onto"
    agree(Problem.of(text, {**p.operands, **turned}, p.bound.shape))


# Ways of the loop
def way_checks() -> Checks:
    return {
        f"{channels} channels in {groups} groups, tile {tile}": partial(check_way, groups, channels, tile)
        for groups, channels in ((1, 11), (2, 9))
        for tile in (
            Tile(16, 16, 16, stream_k_chunk=4),
            Tile(64, 16, 16, stream_k_chunk=2, prefetch_indices=True),
            Tile(64, 16, 16, stream_k_chunk=1, column_major_grid=True),
            Tile(32, 16, 16, epilogue_subtiles=2),
            Tile(32, 64, 16, epilogue_subtiles=4, prefetch_indices=True),
            Tile(64, 8, 16, epilogue_subtiles=4, stream_k_chunk=4),
            Tile(64, 16, 16, hoisted=False),
            Tile(64, 16, 16, padded=False, prefetch_indices=True),
            Tile(32, 16, 16, hoisted=False, padded=False, prefetch_indices=True, stream_k_chunk=4),
            Tile(64, 16, 16, lazy=False),
            Tile(32, 32, 16, lazy=False, prefetch_indices=True, swapped=True),
            Tile(16, 16, 16, prefetch_indices=True, swapped=True, column_major_grid=True),
            Tile(16, 16, 16, swapped=True, column_major_grid=True, stream_k_chunk=2),
        )
    } | {"a tile refuses what it cannot do": check_refused_ways, "no segment is longer than taps": check_longest}


def check_longest() -> None:
    """What a tile is chosen for tells how many taps an output may have; of other statements nothing tells it."""
    text = "O[o,n] = map[o,k,i] * X[i,c] * W[n,k,c]"
    for size, stride, taps in ((3, 1, 27), (2, 2, 8), (5, 1, schedule.LONGEST)):
        found, operands = cloud(size, stride)
        given = {name: operands[name] for name in ("X", "W")}
        for form in ("compacted", "unsorted", "table"):
            for p in map_problems(found, given, form, text, (found.num_outputs, 11)):
                longest = lowered._problem(p.bound, p.operands, form_of(p)).longest
                assert longest == (taps if form != "table" else schedule.LONGEST), (size, form, longest)


def way_problem(groups: int, channels: int, columns: int = 10) -> tuple[Problem, Tensor]:
    """A convolution over tiles, and its result."""
    found, _ = cloud(3, 1)
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(found.num_inputs, groups, channels, generator=generator)
    operands = {"x": x, "w": torch.randn(groups, columns, 27, channels, generator=generator)}
    shape = (found.num_outputs, groups, columns)
    (whole,) = map_problems(found, operands, "pairs", GROUPED_CONV, shape)
    (p,) = map_problems(found, operands, "compacted", GROUPED_CONV, shape)
    return p, wanted(whole)


def check_way(groups: int, channels: int, tile: Tile) -> None:
    p, want = way_problem(groups, channels)
    run = lowered.runner(p.bound, torch.float32, tile)
    got = run(p.operands)
    near(got, want, 2e-5)
    assert torch.equal(got, run(p.operands))
    epilogue = epilogue_of(tuple(want.shape), "relu")
    text = text_of(p, got, tile)
    loop = text.partition("for turn in")[2]
    # What is switched off costs what it saves: the results are the same.
    assert ("+ shift)" in loop) == (not tile.hoisted) and ("+ shift <" in loop) == (not tile.padded)
    assert ("atomic_add" in text) == bool(tile.stream_k_chunk)
    assert ("tl.reshape(" in loop and "tl.trans(" in loop) == (not tile.lazy)
    finished = lowered.runner(p.bound, torch.float32, tile, finish=epilogue.signature)
    near(finished({**p.operands, **epilogue.operands}), applied(want, epilogue), 2e-5)


def check_refused_ways() -> None:
    p, _ = way_problem(1, 9)
    rows = problem(CASES["coo"].at(SMALL))
    for bad, tile in (
        (rows, Tile(8, 16, segment_threads=2, stream_k_chunk=2)),
        (rows, Tile(16, 16, 16, stacked=True, hoisted=False)),
        (rows, Tile(8, 16, padded=False)),
        (p, Tile(64, 16, 32, packed=True, hoisted=False)),
        (p, Tile(64, 16, 32, packed=True, lazy=False)),
        (rows, Tile(8, 16, lazy=False)),
        (p, Tile(16, 16, 16, stacked=True)),
        (rows, Tile(8, 16, segment_threads=2, swapped=True)),
        (rows, Tile(8, 16, segment_threads=2, epilogue_subtiles=2)),
        (rows, Tile(16, 16, 16, stacked=True, epilogue_subtiles=2)),
        (problem(CASES["tp:dV"].at(SMALL)), Tile(16, 16, 16, epilogue_subtiles=2)),
    ):
        try:
            lowered.runner(bad.bound, torch.float32, tile)(bad.operands)
        except OptionError:
            continue
        raise AssertionError(f"tile {tile} is not refused")


# Columns in slices
def slice_checks() -> Checks:
    """Slices that lie beyond the last column, of the only block and of the last of several; of one column each."""
    found: dict[str, Callable[[], None]] = {
        f"{columns} columns in {groups} groups, tile {tile}": partial(check_slices, groups, columns, tile)
        for groups, columns, tile in (
            (1, 11, Tile(32, 8, 16, epilogue_subtiles=2)),
            (1, 13, Tile(32, 8, 16, epilogue_subtiles=8, swapped=True)),
            (2, 9, Tile(32, 32, 16, epilogue_subtiles=4, prefetch_indices=True)),
            (1, 17, Tile(64, 16, 16, epilogue_subtiles=4, stream_k_chunk=2, prefetch_indices=True)),
            (2, 11, Tile(64, 8, 16, epilogue_subtiles=8, stream_k_chunk=4, column_major_grid=True)),
            (1, 32, Tile(32, 16, 16, epilogue_subtiles=4, hoisted=False, padded=False, swapped=True)),
        )
    }
    for names in (("scale", "shift"), ("residual",), ("mean", "variance"), ("mean", "scale"), ("shift", "residual")):
        found[f"slices with {' and '.join(names)}"] = partial(check_slices_with, names)
    for activation in ACTIVATIONS:
        found[f"slices with activation {activation or 'none'}"] = partial(check_slices_with, ("residual",), activation)
    for form in ("split2", "grouped", "unsorted"):
        found[f"{form} in slices"] = partial(check_sliced_form, form)
    for name in ("matrix product", "matrix product, ranges", "batched"):
        found[f"{name} in slices"] = partial(check_sliced_other, name)
    return found


def check_slices(groups: int, columns: int, tile: Tile) -> None:
    """Bit for bit what whole tiles give, in 32 and 16 bits, and with an epilogue what the reference gives."""
    p, want = way_problem(groups, 9, columns)
    epilogue = epilogue_of(tuple(want.shape), "relu")
    for dtype, limit in ((torch.float32, 2e-5), (torch.float16, 2e-3)):
        p = p.to(dtype)
        got, whole = (lowered.runner(p.bound, dtype, t)(p.operands) for t in (tile, replace(tile, epilogue_subtiles=1)))
        near(got, want, limit)
        assert torch.equal(got, whole)
        finished = lowered.runner(p.bound, dtype, tile, finish=epilogue.signature)
        near(finished({**p.operands, **epilogue.operands}), applied(want, epilogue), limit)
    text = text_of(p, got, tile)
    assert (
        text.count("tl.store(where") == tile.epilogue_subtiles and text.count("tl.split(") == tile.epilogue_subtiles - 1
    )
    # Slices without columns are left out when the kernel is compiled.
    left = 0 if columns % tile.columns == 0 else tile.epilogue_subtiles - 1
    assert tile.swapped or text.count(f"* (BX // {tile.epilogue_subtiles}) < {columns}:") == left


def check_slices_with(names: tuple[str, ...], activation: str = "relu") -> None:
    """Each part of an epilogue alone: what one slice has loaded of channels is no other's."""
    p, want = way_problem(1, 9, 23)
    whole = epilogue_of(tuple(want.shape), activation)
    kept = {name: value for name in names if (value := getattr(whole, name)) is not None}
    epilogue = Epilogue(**kept, activation=activation, eps=0.25)
    run = lowered.runner(p.bound, torch.float32, Tile(32, 16, 16, epilogue_subtiles=4), finish=epilogue.signature)
    near(run({**p.operands, **epilogue.operands}), applied(want, epilogue), 2e-5)


def check_sliced_form(form: str) -> None:
    """Parts that add to what is there, programs that add to one entry, rows in their order."""
    found, operands = cloud(3, 1)
    shape = (found.num_outputs, 11)
    (whole,) = map_problems(found, operands, "pairs", WAYS["forward"], shape)
    got = None
    for p in map_problems(found, operands, form, WAYS["forward"], shape):
        got = lowered.runner(p.bound, torch.float32, Tile(16, 8, 16, epilogue_subtiles=4))(p.operands, got)
    assert got is not None
    near(got, wanted(whole), 2e-5)


def check_sliced_other(name: str) -> None:
    """Columns whose number is known when a kernel runs, and not before; those of a range."""
    p, want = other_problem(name)
    for tile in (
        Tile(16, 16, 16, epilogue_subtiles=2),
        Tile(16, 64, 16, epilogue_subtiles=4),
        Tile(32, 16, 32, epilogue_subtiles=8, swapped=True),
    ):
        near(lowered.runner(p.bound, torch.float32, tile)(p.operands), want, 2e-5)


# Epilogues
def finish_checks() -> Checks:
    found: dict[str, Callable[[], None]] = {}
    for form in ("compacted", "unsorted", "split2"):
        found[f"{form} with an epilogue"] = partial(check_finished_map, form)
    for activation in ACTIVATIONS:
        found[f"activation {activation or 'none'}"] = partial(check_finished_rows, activation)
    found["no epilogue where programs add"] = check_unfinished
    for form in ("compacted", "unsorted", "split2"):
        found[f"{form} beside spare columns"] = partial(check_spare, form)
    for form in ("compacted", "split2"):
        found[f"{form} of bytes"] = partial(check_bytes, form)
    return found


def epilogue_of(shape: tuple[int, ...], activation: str) -> Epilogue:
    generator = torch.Generator().manual_seed(len(activation))
    sizes = (shape[1:], shape[1:], shape)
    mean, variance = torch.rand((2, *shape[1:]), generator=generator)
    scale, shift, residual = (torch.randn(size, generator=generator) for size in sizes)
    return Epilogue(scale, shift, residual, activation, mean=mean, variance=variance, eps=0.25)


def check_finished_map(form: str) -> None:
    found, operands = cloud(3, 1)
    shape = (found.num_outputs, 11)
    (whole,) = map_problems(found, operands, "pairs", WAYS["forward"], shape)
    epilogue = epilogue_of(shape, "relu")
    *parts, last = map_problems(found, operands, form, WAYS["forward"], shape)
    got = None
    for p in parts:
        got = lowered.runner(p.bound, torch.float32)(p.operands, got)
    run = lowered.runner(last.bound, torch.float32, finish=epilogue.signature)
    assert run.applies_epilogue
    got = run({**last.operands, **epilogue.operands}, got)
    near(got, applied(wanted(whole), epilogue), 2e-5)


def check_spare(form: str) -> None:
    """Rows with columns left free behind them, which nobody writes; not where the kernel adds to what is there."""
    found, operands = cloud(3, 1)
    shape = (found.num_outputs, 11)
    (whole,) = map_problems(found, operands, "pairs", WAYS["forward"], shape)
    epilogue = replace(epilogue_of(shape, "relu"), row_padding=5)
    want = applied(wanted(whole), epilogue)
    *parts, last = map_problems(found, operands, form, WAYS["forward"], shape)
    before = None
    for p in parts:
        before = lowered.runner(p.bound, torch.float32)(p.operands, before)
    for tile in (None, Tile(32, 8, 16, epilogue_subtiles=2)):
        run = lowered.runner(last.bound, torch.float32, tile, finish=epilogue.signature)
        given, wide = {**last.operands, **epilogue.operands}, torch.full((shape[0], 16), 7.0)
        if parts:
            got = run(given, before)
            assert got.is_contiguous()
            near(got, want, 2e-5)
            continue
        assert run(given).stride() == (16, 1)
        near(run(given), want, 2e-5)
        with patch.object(run, "allocate_output", lambda *_, wide=wide, **more: wide[:, :11]):
            run(given)
        near(wide[:, :11], want, 2e-5)
        assert (wide[:, 11:] == 7.0).all()


def check_finished_rows(activation: str) -> None:
    """Rows that are segments, in programs of several and stacked; tiles that do not divide the result."""
    p = problem(CASES["coo"].at(SMALL, M=21, p=40, n=23)).to(torch.float16)
    epilogue = epilogue_of(p.bound.shape, activation)
    want = applied(wanted(p), epilogue)
    for tile in (Tile(8, 16, segment_threads=2), Tile(16, 16, 16, stacked=True)):
        run = lowered.runner(p.bound, torch.float32, tile, finish=epilogue.signature)
        near(run({**p.operands, **epilogue.operands}), want, 2e-5)


def check_bytes(form: str) -> None:
    """Whole numbers of 8 bits, whose sums are exact, and a cast after all else."""
    found, operands = cloud(3, 1)
    operands = {name: (32 * x).clamp(-128, 127).to(torch.int8) for name, x in operands.items()}
    shape = (found.num_outputs, 11)
    (whole,) = map_problems(found, operands, "pairs", WAYS["forward"], shape)
    epilogue = replace(epilogue_of(shape, "relu"), dtype=torch.float16)
    *parts, last = map_problems(found, operands, form, WAYS["forward"], shape)
    got = None
    for p in parts:
        assert lowered.refusal(p.bound.statement, p.bound, p.operands) is None
        got = lowered.runner(p.bound, torch.float32)(p.operands, got)
    plain = lowered.runner(last.bound, torch.float32)(last.operands, got)
    assert torch.equal(plain.double(), wanted(whole))
    run = lowered.runner(last.bound, torch.float16, finish=epilogue.signature)
    near(run({**last.operands, **epilogue.operands}, got), applied(wanted(whole), epilogue), 1e-3)


def check_unfinished() -> None:
    found, operands = cloud(3, 1)
    (p,) = map_problems(found, operands, "grouped", WAYS["forward"], (found.num_outputs, 11))
    assert not lowered.runner(p.bound, torch.float32).applies_epilogue


# Statements of other shapes
OTHERS: Mapping[str, tuple[str, Mapping[str, tuple[int, ...]]]] = {
    "matrix product": ("C[m,n] = A[m,k] * B[k,n]", {"A": (21, 37), "B": (37, 50)}),
    "matrix product, ranges": (
        "C[m,n] = A[m,k] * B[k,n] ; k:2..33, n:3..47, m:1..20",
        {"A": (21, 37), "B": (37, 50)},
    ),
    "matrix product, short": ("C[m,n] = A[m,k] * B[k,n]", {"A": (3, 5), "B": (5, 2)}),
    "batched": ("C[b,m,n] = A[b,m,k] * B[b,n,k]", {"A": (3, 17, 19), "B": (3, 9, 19)}),
    "matrix times vector": ("C[i] = A[i,k] * x[k]", {"A": (21, 37), "x": (37,)}),
    "sum of all": ("s[z] = A[i,j] * A[i,j] ; z:1", {"A": (21, 37)}),
    "outer product": ("C[i,j] = 2.5 * a[i] * b[j]", {"a": (21,), "b": (37,)}),
    "trace": ("s[z] = A[i,i] ; z:1", {"A": (21, 21)}),
    "padded convolution": (
        "O[n,p,q,m] = X[n,p+r-1,q+s-1,c] * F[r,s,c,m] ; p:6, q:7",
        {"X": (2, 6, 7, 9), "F": (3, 3, 9, 11)},
    ),
    "strided convolution": ("O[p,m] = X[2*p+r,c] * F[m,r,c]", {"X": (25, 9), "F": (10, 3, 9)}),
    "transposed convolution": ("O[2*p+r,m] = X[p,c] * F[m,r,c]", {"X": (12, 9), "F": (10, 3, 9)}),
    "dilated, ranges": ("O[p] = X[p+2*r-2] * F[r] ; p:2..20", {"X": (20,), "F": (3,)}),
}


RUNS, TEN = torch.tensor([0, 0, 0, 1, 3, 3]), torch.arange(1.0, 11)

INDEXED: Mapping[str, tuple[str, Mapping[str, Tensor]]] = {
    "a diagonal, scattered": (
        "T[i,X[j]] = A[j,j] ; i:2, T:[2,5]",
        {"X": torch.tensor([4, 1, 2]), "A": torch.arange(1.0, 10).view(3, 3)},
    ),
    "a diagonal, gradient": (
        "dA[i,-1*X[j]+1] = -3 * G[j,j] ; i:1, j:1..3, dA:[1,3]",
        {"X": torch.tensor([0, 1, 0]), "G": torch.arange(1.0, 10).view(3, 3)},
    ),
    "entries counted": ("deg[R[e]] = one ; deg:[5], R:sorted", {"R": RUNS, "one": torch.tensor(2.0)}),
    "entries counted by column": ("T[R[e],n] = A[n] ; T:[5,_], R:sorted", {"R": RUNS, "A": torch.tensor([1.0, 10])}),
    "part of the segments": ("y[R[p]] = V[p] ; p:1..4, R:sorted, y:[5]", {"R": RUNS, "V": torch.arange(1.0, 7)}),
    "part of the segments, columns": (
        "y[R[p],n] = V[p] * B[p,n] ; p:2..6, R:sorted, y:[5,_]",
        {"R": RUNS, "V": torch.arange(1.0, 7), "B": torch.arange(24.0).view(6, 4)},
    ),
    "far": ("y[i] = x[65536*i] ; i:65537", {"x": TEN}),
    "far written": ("y[65536*i] = x[i] ; i:40000, y:[10]", {"x": torch.ones(40000)}),
    "far taken off": ("y[i] = x[-65536*X[i]] ; i:3", {"x": TEN, "X": torch.tensor([65536, 0, 1 << 62])}),
    "far from 64 bits": ("y[i] = x[i-X[i]] ; i:10", {"x": TEN, "X": torch.tensor([1 << 32, 0] * 5)}),
    "far constant": ("y[i] = x[i+4294967295] ; i:5", {"x": TEN}),
    "far constants cancel": ("y[i] = x[i+4294967295-X[i]] ; i:5", {"x": TEN, "X": torch.full((5,), 4294967294)}),
    "far columns": (
        "y[i,n] = A[3*i-X[i],n] * B[1073741824*n+i,i] ; i:20, n:16",
        {"A": torch.rand(40, 16), "B": torch.rand(30, 20), "X": torch.arange(20)},
    ),
}
"""Statements, and operands whose index arrays count."""


def check_indexed(name: str) -> None:
    p = Problem.of(*INDEXED[name])
    for tile in (None, *tiles(p)):
        agree(p, tile=tile)


def check_part_of_onto() -> None:
    """What is written of the result through a part of an array is not all of it."""
    operands = {"V": torch.ones(3), "R": torch.tensor([2, 0, 1]), "S": torch.tensor([1, -1, -1])}
    for target, ranges, fills in (("R[p]", "", torch.float32), ("R[p]", "p:1..3, ", None), ("R[S[p]]", "", None)):
        p = Problem.of(f"y[{target}] = V[p] ; {ranges}y:[3], R:distinct, R:onto", operands)
        assert lowered.runner(p.bound, torch.float32).writes_result_dtype == fills, p.bound.statement
        agree(p)


def other_checks() -> Checks:
    found: dict[str, Callable[[], None]] = {name: partial(check_other, name) for name in OTHERS}
    found |= {name: partial(check_indexed, name) for name in INDEXED}
    found["part of an array that is onto"] = check_part_of_onto
    found["padding everywhere"] = check_all_padding
    found["64-bit indices"] = check_long_indices
    found["float64"] = check_double
    found["a loop that programs share"] = check_shared
    found["the same layout, other sizes"] = check_other_sizes
    found["reductions by rows"] = check_reductions
    return found


def other_problem(name: str) -> tuple[Problem, Tensor]:
    """The problem, and what the oracle says."""
    text, shapes = OTHERS[name]
    generator = torch.Generator().manual_seed(3)
    operands = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    want = torch.from_numpy(evaluate(text, {n: t.double().numpy() for n, t in operands.items()}))
    return Problem.of(text, operands), want


def check_other(name: str) -> None:
    p, want = other_problem(name)
    for tile in tiles(p):
        near(lowered.runner(p.bound, torch.float32, tile)(p.operands), want, 2e-5)


def check_all_padding() -> None:
    """Nothing but -1: the result is 0 everywhere."""
    for name in ("block_group_coo_16", "conv_grouped", "tp"):
        p = problem(CASES[name].at(SMALL))
        gone = {n: t if t.is_floating_point() else torch.full_like(t, -1) for n, t in p.operands.items()}
        got = lowered.runner(p.bound, torch.float32)(gone)
        assert got.shape == p.bound.shape and not got.any(), name


def check_long_indices() -> None:
    for name in ("coo", "block_group_coo_16", "conv_compacted", "tp_grouped"):
        p = problem(CASES[name].at(SMALL))
        agree(replace(p, operands={n: t if t.is_floating_point() else t.long() for n, t in p.operands.items()}))


def check_double() -> None:
    for name in ("coo", "group_coo", "conv_pairs", "conv_compacted", "tp_grouped"):
        agree(problem(CASES[name].at(SMALL)).to(torch.float64), torch.float64, limit=1e-12)


def check_shared() -> None:
    """Few results of a long reduction: several programs add to them, to old values too."""
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(3000, 16, generator=generator), torch.randn(3000, 24, generator=generator)
    old = torch.randn(16, 24, generator=generator)
    near(
        lowered.runner(Problem.of("W[c,n] = x[i,c] * y[i,n]", {"x": x, "y": y}).bound, x.dtype)({"x": x, "y": y}),
        x.T @ y,
        1e-4,
    )
    given = {"x": x, "y": y, "W": old}
    p = Problem.of("W[c,n] += x[i,c] * y[i,n]", given)
    assert lowered.runner(p.bound, x.dtype).splits > 1
    near(lowered.runner(p.bound, x.dtype)(given), old + x.T @ y, 1e-4)
    for text, want in (("d[n] = y[i,n]", y.sum(0)), ("s[z] = y[i,z] * y[i,z]", y.square().sum(0))):
        p = Problem.of(text, {"y": y})
        near(lowered.runner(p.bound, y.dtype)(p.operands), want, 1e-4)


def check_other_sizes() -> None:
    """What is kept from one call is not taken for operands with the same strides and other extents."""
    for name, axis in (("coo", "K"), ("block_group_coo_16", "K"), ("conv_compacted", "I"), ("tp", "b"), ("coo", "p")):
        for size in (32, 64, 16):
            agree(problem(CASES[name].at(SMALL, **{axis: size})))


def check_reductions() -> None:
    """Whole rows combined are single elements combined: the shortcut changes no value, type or shape."""
    from triton import language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(tl.standard._xor_combine.fn)
    by_rows = interpreter.ReduceOps.generic_reduce
    for kind, dtype in ((tl.int32, np.int32), (tl.int64, np.int64), (tl.uint8, np.uint8)):
        for shape in ((8,), (4, 8), (2, 1, 4), (2, 2, 2, 2)):
            values = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
            inputs = (tl.tensor(interpreter.TensorHandle(values, kind), tl.block_type(kind, list(shape))),)
            for axis, keep in product([None, *range(len(shape))], (False, True)):
                ops = interpreter.ReduceOps(axis, tl.standard._xor_combine, keep)
                (got,), (want,) = by_rows(ops, inputs), by_rows.__wrapped__(ops, inputs)
                assert got.type == want.type and got.handle.data.dtype == want.handle.data.dtype
                assert np.array_equal(got.handle.data, want.handle.data)


# Random statements, against the oracle
def sums() -> Iterator[int]:
    """The seeds of statements that kernels are made of."""
    seed = 0
    while True:
        text = random_case(seed).text
        if not any(word in text for word in ("max=", "min=", "mean=", "exists", "equal")):
            yield seed
        seed += 1


def fuzz_checks() -> Checks:
    return {
        f"fuzz {first} to {first + BATCH - 1}": partial(check_fuzz, first, BATCH) for first in range(0, SEEDS, BATCH)
    }


def check_fuzz(first: int, count: int) -> None:
    for seed in islice(sums(), first, first + count):
        try:
            check_seed(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}, `{random_case(seed).text}`: {error}") from error


def check_seed(seed: int) -> None:
    """A statement term by term, as plans carry it out."""
    case = random_case(seed)
    integers = {name: v for name, v in case.operands.items() if isinstance(v, int)}
    operands = {name: torch.as_tensor(np.asarray(v)) for name, v in case.operands.items() if name not in integers}
    operands |= {name: torch.tensor(float(v)) for name, v in integers.items()}
    operands = {name: t.float() if t.is_floating_point() else t for name, t in operands.items()}
    shapes = {name: tuple(t.shape) for name, t in operands.items()}
    statement = parse(case.text, integers)
    bound = bind(statement, shapes)
    total = torch.zeros(bound.shape, dtype=torch.float64)
    if statement.accumulate:
        total = total + operands[statement.target.name]
    for step in single_terms(replace(statement, accumulate=False)):
        part = bind(declare(step, bound.ranges), shapes, bound.shape, strict=False)
        refused = lowered.refusal(part.statement, part, operands)
        # A term without a floating operand, such as a constant, is torch's.
        assert refused in (None, "no operand is floating point"), refused
        of_part = partial(reference.run, part, dtype=torch.float32) if refused else lowered.runner(part, torch.float32)
        total = total + of_part(operands)
    near(total, torch.from_numpy(evaluate(case.text, case.operands)), 2e-5)


def joined(*groups: Callable[[], Checks]) -> Checks:
    return {name: check for group in groups for name, check in group().items()}


GROUPS: Mapping[str, Callable[[], Checks]] = {
    "spmm": partial(joined, partial(study_checks, "block spmm"), partial(study_checks, "spmm"), lane_checks),
    "convolution": partial(
        joined,
        partial(study_checks, "convolution"),
        map_checks,
        channel_checks,
        pack_checks,
        finish_checks,
        flow_checks,
    ),
    "tensor product": partial(joined, partial(study_checks, "tensor product"), chain_checks),
    "tensor tables": partial(joined, partial(study_checks, "tensor tables"), within_checks),
    "ways": partial(joined, way_checks, slice_checks),
    "fuzz": partial(joined, other_checks, fuzz_checks),
}
"""The checks, by name, of each group."""


def answering(
    groups: Mapping[str, Callable[[], Checks]], around: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Callable[[tuple[str, str]], str]:
    """Of a group and the name of a check, carried out within `around`: what went wrong, "" where all is well."""
    checks_of = lru_cache(lambda group: groups[group]())

    def answer(request: tuple[str, str]) -> str:
        group, name = request
        try:
            with around():
                checks_of(group)[name]()
        except Exception as error:
            frames = "".join(traceback.format_exception(error)[-4:])
            return f"{type(error).__name__}: {error}\n{frames}"
        return ""

    return answer


answer = answering(GROUPS)
