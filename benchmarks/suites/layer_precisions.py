"""The study `dtypes` of the suite `conv-forward`: every dtype and precision of a layer, its error, and spconv's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.rows import Peer, Row, Subject, row
from benchmarks.harness.study import DTYPES, Case, Ready, Setup, Way, by_choice, goals_told, ready
from benchmarks.harness.timing import Times, clocks, together
from benchmarks.peers import spconv as spconv_peer
from benchmarks.scenes.layers import Cell, Choice, Trained, cells, layer_of
from benchmarks.suites.einsum_conv import Layer, exact
from pumice.lower import maps
from pumice.lower.dataflow import CONV
from pumice.lower.kernel import without_fp8
from pumice.lower.loops import EIGHT_BITS
from pumice.ops import Epilogue, conv_features, quantize
from pumice.ops.autograd import einsum
from pumice.runtime.launch import has_triton


@dataclass(frozen=True)
class Kind:
    """A dtype, and how float32 is multiplied. slack: how many times float32's error is good enough."""

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


@dataclass(frozen=True)
class Goal:
    """The fastest of ours is so many times as fast as the rival. limit: the error that is allowed, of those of all."""

    name: str
    ours: tuple[str, ...]
    rival: str
    times: float
    limit: Callable[[Mapping[str, float]], float] = lambda errors: math.inf


GOALS = (
    Goal("tf32 over spconv tf32", ("tf32",), "spconv tf32", 1.5),
    # Whichever is the fastest at twice ieee's error or less.
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
    """What was measured of a cell: errors and times by name."""

    case: str
    errors: Mapping[str, float]
    times: Mapping[str, Times] = field(default_factory=dict)

    def own(self, goal: Goal) -> str:
        """The fastest of the goal's that is exact enough; "" where none is, or where the rival is missing."""
        there = [name for name in goal.ours if name in self.times]
        if goal.rival not in self.times or not there:
            return ""
        exact_enough = [name for name in there if self.errors[name] <= goal.limit(self.errors)]
        return min(exact_enough, key=lambda name: self.times[name].median, default="")


def dtypes(setup: Setup) -> Iterator[Row]:
    """Every kind, with relative errors; by default tiles, tuned where thorough."""
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
        way = Way(kind.name, partial(by_choice, setup, _lowered(layer, lowering)), slack=kind.slack)
        done = ready(setup, Case(cell.case, kind.dtype, truth), way, ours=True)
        if done is not None:
            yield done


def _in_bytes(setup: Setup, cell: Cell, kind: Kind) -> Ready | None:
    """A layer of quantized values with their scales in its epilogue, to half precision; None where there is no fp8.

    Right is what the quantized values give in float64: what quantizing them loses is no error of the layer.
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
    case, slack = Case(cell.case, torch.float32, exact(layer)), spconv_peer.slack(setup.device)
    ways = [Way("spconv fp32", partial(_spconv, layer), spconv_peer.package(), slack=slack)]
    if setup.device.type == "cuda":
        in_tf32 = partial(_spconv, layer, how=spconv_peer.in_tf32)
        ways.append(Way("spconv tf32", in_tf32, spconv_peer.package(), slack=20))
    for way in ways:
        done = ready(setup, case, way, ours=False)
        if done is not None:
            yield done


def _lowered(layer: Layer, lowering: str) -> Callable[[], Tensor]:
    """The layer in inference by one lowering."""
    tokens, held = maps.planner_operands(layer.found, differentiable=False)
    names, shape = "|".join(("x", "w", *tokens)), (layer.rows, layer.weight.shape[0])
    operands = [layer.feats, layer.weight, *held]
    return torch.no_grad()(lambda: einsum(operands, names, CONV, shape, lowering))


def _spconv(
    layer: Layer, how: Callable[[Callable[[], Tensor]], Callable[[], Tensor]] = lambda call: call
) -> Callable[[], Tensor]:
    _, run = spconv_peer.layer(layer.feats, layer.weight, layer.coords)
    return how(torch.no_grad()(lambda: run(layer.feats)))


def _told(found: Found, name: str) -> str:
    return f"{name} {found.times[name].median:.4g} ms (error {found.errors[name]:.1e})"


def _rows(setup: Setup, found: Found, clock: str) -> Iterator[Row]:
    """Times against the rivals of the goals, and errors against what is allowed."""
    kinds = {kind.name: kind for kind in KINDS}
    for goal in GOALS:
        own = found.own(goal)
        if not own:
            continue
        packages = (spconv_peer.package(),) if goal.rival.startswith("spconv") else ()
        subject = Subject(setup.suite, f"{found.case}/{own}", DTYPES[kinds[own].dtype], setup.device, packages)
        yield row(subject, found.times[own], clock, Peer(goal.rival, found.times[goal.rival].median))
        limit, error = goal.limit(found.errors), found.errors[own]
        if math.isfinite(limit):
            failing = replace(subject, metric="error", unit="relative", packages=())
            yield row(failing, Times(error, error, error), "count", Peer("goal", limit, "goal"))


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
