"""The studies `dtypes`, `errors` and `channels` of the suite `conv-forward`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import (
    DTYPES,
    TOLERANCE,
    Case,
    Ready,
    Setup,
    Way,
    by_choice,
    error,
    goals_told,
    ready,
    summarize,
    timed,
    tuned,
    untuned,
)
from benchmarks.harness.timing import Times, clocks, together
from benchmarks.harness.whole import multiplying
from benchmarks.peers import spconv as spconv_peer
from benchmarks.scenes.clouds import Voxels, batched, shell
from benchmarks.scenes.layers import (
    Cell,
    Choice,
    Trained,
    Width,
    both,
    cells,
    exact,
    exact_both,
    forward,
    layer_of,
    map_of,
    statement,
)
from benchmarks.suites.layer_model import Step, bounds, needs, walks
from pumice.lower import maps
from pumice.lower.kernel import without_fp8
from pumice.lower.reference import EIGHT_BITS
from pumice.ops import Epilogue, conv_features, quantize
from pumice.ops.conv import merge_small_groups
from pumice.runtime.launch import has_triton


@dataclass(frozen=True)
class Kind:
    """A dtype, and for float32 the precision of products. slack: factor on the tolerance of the dtype."""

    name: str
    dtype: torch.dtype
    precision: str = ""
    slack: float = 1.0


KINDS = (
    Kind("fp16", torch.float16),
    Kind("bf16", torch.bfloat16),
    Kind("tf32", torch.float32, "tf32", 20),
    Kind("bf16x3", torch.float32, "bf16x3"),
    Kind("tf32x3", torch.float32, "tf32x3"),
    Kind("ieee", torch.float32, "ieee"),
    Kind("int8", torch.int8),
    Kind("fp8", torch.float8_e4m3fn),
)


DENSE_KINDS = (*KINDS[:3], Kind("fp32", torch.float32, "ieee"))
"""Kinds of a dense convolution by torch. precision: torch's setting."""


@dataclass(frozen=True)
class Goal:
    """A goal: the fastest of our kinds is `times` as fast as the rival. limit: its maximum error, from all errors."""

    name: str
    ours: tuple[str, ...]
    rival: str
    times: float
    limit: Callable[[Mapping[str, float]], float] = lambda errors: math.inf


GOALS = (
    Goal("tf32 over spconv tf32", ("tf32",), "spconv tf32", 1.5),
    # The fastest with at most twice the error of ieee.
    Goal(
        "ieee class over spconv fp32",
        ("ieee", "tf32x3"),
        "spconv fp32",
        1.0,
        lambda errors: 2 * errors.get("ieee", 0.0),
    ),
    Goal("bf16x3 over spconv fp32", ("bf16x3",), "spconv fp32", 2.0, lambda errors: 1e-5),
    Goal("bf16 over fp16", ("bf16",), "fp16", 1 / 1.05),
    Goal("int8 over fp16", ("int8",), "fp16", 1.0),
    Goal("fp8 over fp16", ("fp8",), "fp16", 1.0),
)


@dataclass(frozen=True, eq=False)
class Found:
    """Errors and times of a cell, by kind."""

    case: str
    errors: Mapping[str, float]
    times: Mapping[str, Times] = field(default_factory=dict)

    def own(self, goal: Goal) -> str:
        """The fastest of the goal's kinds that is exact enough; "" if none is, or the rival is missing."""
        there = [name for name in goal.ours if name in self.times]
        if goal.rival not in self.times or not there:
            return ""
        exact_enough = [name for name in there if self.errors[name] <= goal.limit(self.errors)]
        return min(exact_enough, key=lambda name: self.times[name].median, default="")


def dtypes(setup: Setup) -> Iterator[Row]:
    """Every kind, with relative errors, by default tiles, or tuned ones in a thorough run."""
    chosen = Choice("dtypes", scenes=("waymo_1f_5cm", "shell_256"), channels=(64, 128, 256))
    found: list[Found] = []
    if not _has_kernels(setup):
        setup.say(f"tf32, bf16x3 and tf32x3 are left out: kernels multiply so, and none run on {setup.device.type}")
    if why := without_fp8(setup.device):
        setup.say(f"fp8 is left out: {why}")
    for cell in cells(setup, chosen):
        made = {r.name: r for r in (*_ours(setup, cell), *_theirs(setup, cell))}
        errors = {name: r.error for name, r in made.items()}
        for clock in clocks(setup.device) if made else ():
            spent = together([r.call for r in made.values()], setup.device, clock, 4 * setup.seconds)
            one = Found(cell.case, errors, dict(zip(made, spent, strict=True)))
            setup.say(f"{cell.case} {clock}: " + "   ".join(_told(one, name) for name in made))
            yield from _rows(setup, one, clock)
            if clock == clocks(setup.device)[-1]:
                found.append(one)
    _say_goals(setup, found)


def _has_kernels(setup: Setup) -> bool:
    return has_triton(torch.empty(0, device=setup.device))


def _ours(setup: Setup, cell: Cell) -> Iterator[Ready]:
    layers: dict[torch.dtype, tuple[Trained, Tensor]] = {}
    for kind in KINDS:
        if kind.precision not in ("", "ieee") and not _has_kernels(setup):
            continue
        if kind.dtype in EIGHT_BITS:
            if done := _in_bytes(setup, cell, kind):
                yield done
            continue
        if kind.dtype not in layers:
            layer = layer_of(setup, cell, kind.dtype)
            layers[kind.dtype] = layer, exact(layer)
        layer, truth = layers[kind.dtype]
        lowering = f"triton/{kind.precision}" if kind.precision and _has_kernels(setup) else ""
        operands = maps.planner_operands(layer.found, differentiable=False)
        call = statement(layer, operands, lowering=lowering)
        way = Way(kind.name, partial(by_choice, setup, call), slack=kind.slack)
        done = ready(setup, Case(cell.case, kind.dtype, truth), way, ours=True)
        if done is not None:
            yield done


def _in_bytes(setup: Setup, cell: Cell, kind: Kind) -> Ready | None:
    """A layer of quantized values with scales in its epilogue and a half-precision result; None if fp8 is unavailable.

    The reference is the float64 result of the quantized values, so quantization errors do not count.
    """
    if kind.dtype == torch.float8_e4m3fn and without_fp8(setup.device):
        return None
    layer = layer_of(setup, cell, torch.float32)
    (x, of_x), (weight, of_weight) = quantize(layer.feats, kind.dtype), quantize(layer.weight, kind.dtype, 0)
    scale = of_x * of_weight
    truth = exact(replace(layer, feats=x, weight=weight)) * scale.double()
    epilogue = Epilogue(scale=scale, dtype=torch.float16)
    call = torch.no_grad()(partial(conv_features, x, weight, layer.found, layer.rows, 1, epilogue))
    way = Way(kind.name, partial(by_choice, setup, call), slack=kind.slack)
    return ready(setup, Case(cell.case, torch.float16, truth), way, ours=True)


def _theirs(setup: Setup, cell: Cell) -> Iterator[Ready]:
    layer = layer_of(setup, cell, torch.float32)
    case = Case(cell.case, torch.float32, exact(layer))
    ways = [replace(spconv_peer.way(layer), name="spconv fp32")]
    if setup.device.type == "cuda":
        ways.append(spconv_peer.way(layer, tf32=True))
    for way in ways:
        done = ready(setup, case, way, ours=False)
        if done is not None:
            yield done


def _told(found: Found, name: str) -> str:
    return f"{name} {found.times[name].median:.4g} ms (error {found.errors[name]:.1e})"


def _rows(setup: Setup, found: Found, clock: str) -> Iterator[Row]:
    """Times against the goals' rivals, and errors against the goals' limits."""
    kinds = {kind.name: kind for kind in KINDS}
    for goal in GOALS:
        own = found.own(goal)
        if not own:
            continue
        package = spconv_peer.package() if goal.rival.startswith("spconv") else ""
        rival = Peer(goal.rival, found.times[goal.rival].median, package=package)
        case, dtype = f"{found.case}/{own}", kinds[own].dtype
        yield setup.row(case, found.times[own], clock, rival, dtype=dtype)
        limit = goal.limit(found.errors)
        if math.isfinite(limit):
            allowed = Peer("goal", limit, "goal")
            yield setup.row(case, found.errors[own], "count", allowed, "error", "relative", dtype)


def _say_goals(setup: Setup, found: Sequence[Found]) -> None:
    for goal in GOALS:
        ratios = {
            one.case: one.times[goal.rival].median / one.times[own].median for one in found if (own := one.own(goal))
        }
        goals_told(setup, goal.name, ratios, goal.times)
        inexact = {one.case: one for one in found if set(goal.ours) & set(one.times) and goal.rival in one.times}
        for case in inexact.keys() - ratios.keys():
            allowed = goal.limit(inexact[case].errors)
            setup.say(f"  {case}: none of {', '.join(goal.ours)} has an error of at most {allowed:.2g}")


# Errors beside those of a dense convolution, and whether runs repeat

PARTS = ("y", "dx", "dw")
NOISE = 1.1
"""Errors up to this multiple of the dense convolution's are no worse: the order of summation alone may cause them."""


def errors(setup: Setup) -> Iterator[Row]:
    """Relative errors of results and gradients against float64, ours and torch's; and entries that differ between two
    runs with deterministic algorithms."""
    kinds = [kind for kind in DENSE_KINDS if setup.device.type == "cuda" or kind.name == "fp32"]
    if len(kinds) < len(DENSE_KINDS):
        setup.say(
            f"fp16, bf16 and tf32 are left out: a dense convolution has them on a GPU, not on {setup.device.type}"
        )
    side, coords = _box(setup)
    found = map_of(coords.coords)
    worse: list[str] = []
    for width in (8,) if setup.quick else (64, 128):
        for kind in kinds:
            case = f"errors/box_{side}/k3/C{width}/{kind.name}"
            if setup.wants(case):
                layer = layer_of(setup, Cell(case, "box", Width.square(width), found, coords), kind.dtype)
                yield from _beside(setup, (case, kind, side), layer, worse)
    setup.say(f"errors above {NOISE:g} times those of the dense convolution: {', '.join(worse) or 'none'}")
    yield from _repeated(setup)


def _box(setup: Setup) -> tuple[int, Voxels]:
    """The side of a box, and the voxels of a shell within it."""
    side, size = (8, 16) if setup.quick else (64, 128)
    found = shell(size)
    return side, Voxels.of(batched(found[(found < side).all(1)]).to(setup.device))


def _beside(setup: Setup, about: tuple[str, Kind, int], layer: Trained, worse: list[str]) -> Iterator[Row]:
    """A layer's errors beside those of the dense convolution. about: case, kind, side; worse: receives worse parts."""
    case, kind, side = about
    truth, peer = exact_both(layer), "cuDNN" if setup.device.type == "cuda" else "torch"
    with multiplying(kind.precision) if kind.precision else nullcontext():
        own, dense = _errors(both(layer), truth), _errors(_dense(layer, side), truth)
    told = ", ".join(f"{part} {own[part]:.2e} ({peer} {dense[part]:.2e})" for part in PARTS)
    bound = kind.slack * TOLERANCE[kind.dtype]
    if not max(own.values()) < bound:
        setup.failed(f"{case}: {told}; expected below {bound:g}")
        return
    setup.say(f"{case}: {told}")
    for part in PARTS:
        if not own[part] <= NOISE * dense[part]:
            worse.append(f"{case}/{part}")
        against = Peer(peer, dense[part])
        yield setup.row(f"{case}/{part}", own[part], "count", against, "error", "relative", kind.dtype)


def _errors(found: Sequence[Tensor], truth: Sequence[Tensor]) -> Mapping[str, float]:
    return {part: error(mine, right) for part, mine, right in zip(PARTS, found, truth, strict=True)}


def _dense(layer: Trained, side: int) -> tuple[Tensor, ...]:
    """Result and gradients of the layer at its voxels, computed by torch's dense convolution of the whole box."""
    width = layer.feats.shape[1]
    x, weight = (t.detach().requires_grad_() for t in (layer.feats, layer.weight))
    at = _places(layer.coords, width)
    grid = torch.zeros(1, width, side, side, side, dtype=x.dtype, device=x.device).index_put(at, x)
    kernel = weight.view(width, 3, 3, 3, width).permute(0, 4, 1, 2, 3)
    y = functional.conv3d(grid, kernel, padding=1)[at]
    return y.detach(), *torch.autograd.grad(y, (x, weight), layer.grad)


def _places(coords: Tensor, width: int) -> tuple[Tensor, ...]:
    """Indices [N, C] into each axis of a dense batch [B, C, ...], for all channels of voxels."""
    batch, *place = coords.long()[:, :, None].unbind(1)
    return (batch, torch.arange(width, device=coords.device), *place)


@contextmanager
def deterministic() -> Iterator[None]:
    """Within this context torch's algorithms are deterministic, or raise."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _repeated(setup: Setup) -> Iterator[Row]:
    """Count entries that differ when a result and its gradients are computed twice."""
    for cell in cells(setup, Choice("repeated", scenes=("nuscenes_1f_10cm", "waymo_1f_5cm"), channels=(64,))):
        for dtype in dict.fromkeys((setup.half, torch.float32)):
            layer = layer_of(setup, cell, dtype)
            case = f"{cell.case}/{DTYPES[dtype]}"
            try:
                with deterministic():
                    pairs = list(zip(both(layer), both(layer), strict=True))
            except RuntimeError as reason:  # cuBLAS requires an environment variable
                setup.failed(f"{case}: {str(reason).splitlines()[0]}")
                continue
            differing = sum(int((one != other).sum()) for one, other in pairs)
            told = f"{case}: {differing} of {sum(one.numel() for one, _ in pairs)} entries differ when computed twice"
            setup.failed(told) if differing else setup.say(told)
            yield setup.row(case, differing, "count", Peer("goal", 0, "goal"), "differing", "entries", dtype)


# Odd and few channels, and groups

FORM = "compacted"
WIDTHS = (
    *(Width(1, 16), Width(3, 32), Width(4, 32), Width(5, 16), Width(16, 16), Width(17, 96)),
    *(Width(96, 96), Width(192, 96), Width(64, 1000)),
    *(Width(64, 64, 2), Width(128, 128, 4), Width(128, 128, 32), Width(64, 64, 64), Width(256, 256, 256)),
)
DENSE = "one group"
"""The peer of a layer with groups: our layer with the same channels in one group."""


def channels(setup: Setup) -> Iterator[Row]:
    """Every width by default tiles (thorough: also tuned ones) against spconv, or against one group if there are
    several."""
    done: list[Row] = []
    setup.say("spconv is left out where there are groups: it has layers of one group only")
    for cell in cells(setup, Choice("channels", "fwd", ("waymo_1f_5cm", "nuscenes_1f_10cm"), widths=WIDTHS)):
        for made in _cell(setup, cell):
            done.append(made)
            yield made
    summarize(setup, done, {"spconv": ("spconv",), DENSE: (DENSE,)})


def _cell(setup: Setup, cell: Cell) -> Iterator[Row]:
    layer = layer_of(setup, cell)
    case = Case(cell.case, setup.half, exact(layer), _bounds(layer))
    mine = [r for way in _ways(setup, layer) if (r := ready(setup, case, way, ours=True))]
    spconv = spconv_peer.way(layer)
    peer = _one_group(setup, cell) if cell.width.groups > 1 else ready(setup, case, spconv, ours=False)
    if mine:
        yield from timed(setup, case, mine, [peer] if peer else [])


def _ways(setup: Setup, layer: Trained) -> Iterator[Way]:
    call = partial(forward, layer)
    yield Way("default", lambda: untuned(call))
    if setup.thorough:
        yield Way("tuned", lambda: tuned(call))


def _bounds(layer: Trained) -> Mapping[str, float]:
    """Lower bounds of the default tile in milliseconds; no latency bound, which models matrix products only."""
    weight, _ = merge_small_groups(layer.feats, layer.weight, layer.groups)
    layer = replace(layer, weight=weight)
    needed = needs(layer, walks(layer.found, FORM), Step.of(layer, FORM).default())
    return {name: 1e3 * seconds for name, seconds in bounds(needed).items() if name != "latency"}


def _one_group(setup: Setup, cell: Cell) -> Ready | None:
    """The peer with one group; its weights differ, so it is checked against its own result."""
    dense = layer_of(setup, replace(cell, width=replace(cell.width, groups=1)))
    way = Way(DENSE, lambda: untuned(partial(forward, dense)))
    return ready(setup, Case(cell.case, setup.half, exact(dense)), way, ours=True)
