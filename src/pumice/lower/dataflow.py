"""Named dataflows (schedule.dataflow) carried out, for the one equation of a convolution and its derivatives.

    forward   y[o, n]    = map[o, k, i] * x[i, c] * w[n, k, c]
    dgrad     x[i, c]    = map[o, k, i] * y[o, n] * w[n, k, c]          the transposed map
    wgrad     w[n, k, c] = map[o, k, i] * x[i, c] * y[o, n]

with a group of channels beside n and c where there are several. An engine carries out a movement: some are products of
torch's libraries (movement.py), the others statements over a form of the map, by kernels on a GPU and by what a CPU has
for these forms (plan.py). Nothing is replaced: what cannot be done is refused with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType

import torch
from torch import Tensor

from pumice.coords import KernelMap
from pumice.errors import DtypeError, OptionError
from pumice.language.derive import derivative, gradient_name
from pumice.language.parse import parse
from pumice.lower import kernel as kernels
from pumice.lower import maps, movement, plan, reference
from pumice.lower.epilogue import NO_EPILOGUE, Epilogue, EpilogueSignature, applied
from pumice.lower.loops import EIGHT_BITS
from pumice.lower.movement import Forward, PairLayout
from pumice.schedule.dataflow import DATAFLOWS, DGRAD, FORWARD, PASSES, WGRAD, Chosen, Dataflow
from pumice.schedule.grouping import Grouping

CONV = "O[o,n] = map[o,k,i] * x[i,c] * w[n,k,c]"
GROUPED_CONV = "O[o,g,n] = map[o,k,i] * x[i,g,c] * w[g,n,k,c]"
"""The one equation: a kernel map is a sparse operand, and its gradients are its derivatives."""

Two = tuple[Tensor, Tensor]
Engine = Callable[["Pass", Two, Epilogue | None], Tensor]
"""What carries out a pass with its two operands and an epilogue."""


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass over a map. name: one of PASSES; its operands are (x, w), (y, w) or (x, y).

    x [inputs, G*C], w [G*N, K, C], y [outputs, G*N]: the result, or the gradient that it is given.
    """

    name: str
    flow: Dataflow
    found: KernelMap
    groups: int

    def __call__(self, operands: Two, epilogue: Epilogue | None = None) -> Tensor:
        """The third operand, in their dtype or the epilogue's."""
        check(self)
        engine = ENGINES.get(self.flow.movement)
        if engine is None:
            raise OptionError(f"movement {self.flow.movement!r} is unknown; there are {', '.join(ENGINES)}")
        return engine(self, operands, epilogue)

    @property
    def oriented_map(self) -> KernelMap:
        """The map with what is written on its output side."""
        return self.found.transpose() if self.name == DGRAD else self.found


def check(map_pass: Pass) -> None:
    """Raise OptionError for what adds in any order where torch is asked for one."""
    flow = map_pass.flow
    if plan.deterministic() and map_pass.found.device.type == "cuda" and map_pass.name not in flow.repeats:
        able = ", ".join(name for name, other in DATAFLOWS.items() if map_pass.name in other.repeats)
        raise OptionError(
            f"dataflow {flow.name} adds in any order in its {map_pass.name} pass, and deterministic algorithms are asked "
            f"for; Dataflows(forward, dgrad, wgrad) takes another for each pass, and these keep to one order: {able}"
        )


# Library products
def _by_library(run: Callable[[Pass, Two], Tensor], asked: Pass, given: Two, epilogue: Epilogue | None) -> Tensor:
    kind = given[0].dtype
    if kind in EIGHT_BITS:
        raise DtypeError(
            f"dataflow {asked.flow.name} multiplies by the products of torch's libraries, which take no {kind}; the "
            "implicit-gemm and fetch-on-demand ones do"
        )
    if asked.name == DGRAD:
        y, w = given
        given = y, reference.transposed(w.contiguous(), asked.groups)
    result = run(asked, given)
    return result.to(kind) if epilogue is None else applied(result, epilogue, kind)


def _explicit(asked: Pass, given: Two) -> Tensor:
    run = movement.columns_weight_gradient if asked.name == WGRAD else movement.columns_forward
    return run(*given, asked.oriented_map, asked.groups)


def _gathered(forward: Forward, asked: Pass, given: Two) -> Tensor:
    how: PairLayout = movement.layout(asked.oriented_map, asked.flow.grouping or Grouping("separate"))
    if asked.name == WGRAD:
        fused = forward is not movement.forward_by_group
        return movement.weight_gradient(*given, how, (asked.found.volume, asked.groups), fused)
    return forward(*given, how, asked.oriented_map.num_outputs, asked.groups)


# Statements
_OPERANDS = {FORWARD: ("x", "w"), DGRAD: ("grad", "w"), WGRAD: ("x", "grad")}
_PRODUCTS = {
    FORWARD: "Y[s[g,q],h,n] = x[i[g,q],h,c] * w[h,n,k[g],c] ; s:distinct, s:onto",
    DGRAD: "Y[s[g,q],h,c] = grad[i[g,q],h,n] * w[h,n,k[g],c] ; s:distinct, s:onto",
}
"""The products of all pairs, pair s in the order of the outputs, for groups h of channels."""
_SUMS = "O[o[p],n] = Y[p,n] ; o:sorted"


@lru_cache(maxsize=16)
def statement(name: str, groups: int) -> str:
    """The statement of a pass: the equation, or its derivative."""
    whole = parse(CONV if groups == 1 else GROUPED_CONV)
    assert gradient_name(whole) == "grad"
    if name == FORWARD:
        return str(whole)
    (found,) = derivative(whole, "x" if name == DGRAD else "w")
    return str(found)


def _form(asked: Pass) -> str:
    """The form of the map that a pass reads: with fewer splits where there are fewer taps, and pairs for weights."""
    form, volume = asked.flow.form, asked.found.volume
    if asked.name == WGRAD:
        return "grouped"
    if asked.flow.splits > max(1, volume):
        form = "compacted" if volume == 1 else f"split{volume}"
    return f"{form}_t" if asked.name == DGRAD and f"{form}_t" in maps.FORMS else form


def forms(map_pass: Pass) -> tuple[str, ...]:
    """The forms of the map that the statement of a pass reads; none where it is no statement."""
    if map_pass.flow.movement == "planned":
        return maps.names_of(map_pass.found, map_pass.name != FORWARD)
    return (_form(map_pass),) if map_pass.flow.movement in ("implicit", "on-demand") else ()


def materialize(wanted: Sequence[tuple[KernelMap, Iterable[Chosen | None]]], differentiable: bool) -> None:
    """Lay maps out as layers in these dataflows will read them, with one read of all their sizes.

    None: as the planner likes them. differentiable: for gradients, too.
    """
    asked = []
    for found, flows in wanted:
        for three in flows:
            if three is None:
                asked.append((found, maps.names_of(found, differentiable)))
                continue
            passes = PASSES if differentiable else PASSES[:1]
            for name, flow in zip(passes, three, strict=False):
                asked.append((found, forms(Pass(name, flow, found, 1))))
    maps.materialize(asked)


def _run_as_einsum(asked: Pass, given: Two, epilogue: Epilogue | None) -> Tensor:
    """The statement of a pass over the form of its dataflow."""
    split, finish = _in_groups(asked, given), _finish(epilogue)
    ready = asked.found.cached(_key(asked, given, finish), lambda _: _ready(asked, split, finish))
    found = plan.execute_plan(ready, split, None if epilogue is None else epilogue.split(asked.groups))
    return _flat(asked, found)


def _ready(asked: Pass, given: Two, finish: EpilogueSignature) -> plan.Plan:
    """The call made ready; it holds the arrays of the map."""
    each = [maps.held(asked.found, form) for form in forms(asked)]
    tokens, arrays = [t for told, _ in each for t in told], [x for _, held in each for x in held]
    operands, names = [*given, *arrays], "|".join((*_OPERANDS[asked.name], *tokens))
    text, shape = statement(asked.name, asked.groups), _shape(asked, given)
    lowering = "" if asked.flow.movement == "planned" else _lowering(given[0])
    # Of weights nothing counts rows or entries.
    steady = (len(operands),) if asked.name == WGRAD else (1,)
    piece = 0 if asked.name == WGRAD else asked.flow.piece
    return plan.bound_plan(operands, plan.PlanRequest(names, text, shape, steady, (0, 1), lowering, finish, piece))


def _in_order(asked: Pass, given: Two, epilogue: Epilogue | None) -> Tensor:
    """Products of all pairs in the order of the outputs, then the sum of each output's; weights tap by tap."""
    if asked.name == WGRAD:
        return _by_library(partial(_gathered, movement.forward_by_group), asked, given, epilogue)
    split, finish = _in_groups(asked, given), _finish(epilogue)
    key = _key(asked, given, finish)
    products, sums = asked.oriented_map.cached(key, lambda _: _ready_in_order(asked, split, finish))
    return plan.execute_plan(sums, [plan.execute_plan(products, split).flatten(1)], epilogue)


def _ready_in_order(asked: Pass, given: Two, finish: EpilogueSignature) -> tuple[plan.Plan, plan.Plan]:
    taps, inputs, places, outputs = asked.oriented_map.cached("pairs in output order", _pairs_in_order)
    operands, lowering = [*given, inputs, taps, places], _lowering(given[0])
    shape = _shape(asked, given)
    text, width = _PRODUCTS[asked.name], shape[1:]
    if asked.groups == 1:
        text = text.replace(",h", "").replace("h,", "")
    names = "|".join((*_OPERANDS[asked.name], "i", "k", "s"))
    products = plan.ready_for(operands, names, text, (len(outputs), *width), lowering)
    # Of its shape and dtype alone.
    buffer = given[0].new_empty((len(outputs), math.prod(width)), dtype=products.dtype)
    sums = plan.ready_for([buffer, outputs], "Y|o", _SUMS, (shape[0], math.prod(width)), lowering, finish)
    return plan.bind_operands(products, operands, (0, 1)), plan.bind_operands(sums, [buffer, outputs], (0,))


def _pairs_in_order(found: KernelMap) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Taps [G], inputs [G, Q] and places [G, Q] of the pairs in groups of a tap, and the output of each place [P].

    Places count pairs by output, and those of one output by tap; -1 fills up.
    """
    if found.between is not None:
        raise OptionError("dataflow fetch-on-demand-deterministic waits for a map's sizes: not in a captured network")
    taps, inputs, outputs = found.grouped(maps.group_of(found))
    flat = outputs.flatten()
    filled = int((flat < 0).sum())
    order = (outputs.long() * found.volume + taps[:, None]).flatten().argsort()[filled:]
    places = torch.full_like(flat, -1)
    places[order] = torch.arange(len(order), dtype=flat.dtype, device=flat.device)
    return taps, inputs, places.view_as(outputs), flat[order]


def _key(asked: Pass, given: Two, finish: EpilogueSignature) -> tuple[object, ...]:
    """What a call made ready depends on."""
    facts = tuple((x.shape, x.dtype, x.device) for x in given)
    return "dataflow", asked.name, asked.flow, asked.groups, plan.deterministic(), finish, facts


def _lowering(x: Tensor) -> str:
    """Kernels where they run: were another lowering taken there, it would be another dataflow."""
    return "triton" if x.is_cuda or kernels.interpreted() else ""


def _finish(epilogue: Epilogue | None) -> EpilogueSignature:
    return NO_EPILOGUE if epilogue is None else epilogue.finish


def _in_groups(asked: Pass, given: Two) -> Two:
    """The operands with an axis for groups of channels where there are several."""
    if asked.groups == 1:
        return given
    axes = {"x": 1, "grad": 1, "w": 0}
    first, second = (
        x.unflatten(axes[name], (asked.groups, -1)) for name, x in zip(_OPERANDS[asked.name], given, strict=True)
    )
    return first, second


def _shape(asked: Pass, given: Two) -> tuple[int, ...]:
    """Of the result, an axis for groups of channels among the others; from operands that have it."""
    first, second = given
    groups = () if asked.groups == 1 else (asked.groups,)
    if asked.name == WGRAD:
        return *groups, second.shape[-1], asked.found.volume, first.shape[-1]
    width = second.shape[-3] if asked.name == FORWARD else second.shape[-1]
    return asked.oriented_map.num_outputs, *groups, width


def _flat(asked: Pass, found: Tensor) -> Tensor:
    if asked.groups == 1:
        return found
    return found.flatten(0, 1) if asked.name == WGRAD else found.flatten(1)


def _library(run: Callable[[Pass, Two], Tensor]) -> Engine:
    return partial(_by_library, run)


ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "explicit": _library(_explicit),
        "vectorised": _library(partial(_gathered, movement.forward_by_group)),
        "fused": _library(partial(_gathered, movement.forward_fused)),
        "locality-aware": _library(partial(_gathered, movement.forward_in_order)),
        "on-demand": _run_as_einsum,
        "on-demand-in-order": _in_order,
        "implicit": _run_as_einsum,
        "planned": _run_as_einsum,
    }
)
"""The engines by movement."""
