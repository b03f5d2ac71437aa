"""Execution of the named dataflows (schedule.dataflow) of a convolution and its gradients.

    forward   y[o, n]    = map[o, k, i] * x[i, c] * w[n, k, c]
    dgrad     x[i, c]    = map[o, k, i] * y[o, n] * w[n, k, c]          the transposed map
    wgrad     w[n, k, c] = map[o, k, i] * x[i, c] * y[o, n]

with a group axis next to n and c if there are several groups. An engine implements a movement: either products of
torch's libraries (movement.py) or a statement over a form of the map, by a kernel on a GPU and by the planner's
lowerings on a CPU (plan.py). There is no fallback to another dataflow: unsupported ones raise with the reason.
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
"""The equation: a kernel map is a sparse operand; gradients are its derivatives."""

Two = tuple[Tensor, Tensor]
Engine = Callable[["Pass", Two, Epilogue | None], Tensor]
"""Executes a pass on its two operands and an epilogue."""


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass over a map. name: one of PASSES; its operands are (x, w), (y, w) or (x, y).

    x [inputs, G*C], w [G*N, K, C], y [outputs, G*N], each the tensor or its gradient.
    """

    name: str
    flow: Dataflow
    found: KernelMap
    groups: int

    def __call__(self, operands: Two, epilogue: Epilogue | None = None) -> Tensor:
        """The third operand, in their dtype or the epilogue's. Raises OptionError for an unsupported dataflow."""
        check(self)
        engine = ENGINES.get(self.flow.movement)
        if engine is None:
            raise OptionError(f"movement {self.flow.movement!r} is unknown; there are {', '.join(ENGINES)}")
        return engine(self, operands, epilogue)

    @property
    def oriented_map(self) -> KernelMap:
        """The map oriented so that the result is on the output side."""
        return self.found.transpose() if self.name == DGRAD else self.found


def check(map_pass: Pass) -> None:
    """Raise OptionError for a nondeterministic dataflow under torch.use_deterministic_algorithms."""
    flow = map_pass.flow
    if plan.deterministic() and map_pass.found.device.type == "cuda" and map_pass.name not in flow.repeats:
        able = ", ".join(name for name, other in DATAFLOWS.items() if map_pass.name in other.repeats)
        raise OptionError(
            f"the {map_pass.name} pass of dataflow {flow.name} is not deterministic, and deterministic algorithms are "
            f"required; Dataflows(forward, dgrad, wgrad) sets one for each pass; deterministic ones: {able}"
        )


# Library products
def _by_library(run: Callable[[Pass, Two], Tensor], map_pass: Pass, given: Two, epilogue: Epilogue | None) -> Tensor:
    kind = given[0].dtype
    if kind in EIGHT_BITS:
        raise DtypeError(
            f"dataflow {map_pass.flow.name} uses products of torch's libraries, which do not support {kind}; the "
            "implicit-gemm and fetch-on-demand dataflows do"
        )
    if map_pass.name == DGRAD:
        y, w = given
        given = y, reference.transposed(w.contiguous(), map_pass.groups)
    result = run(map_pass, given)
    return result.to(kind) if epilogue is None else applied(result, epilogue, kind)


def _explicit(map_pass: Pass, given: Two) -> Tensor:
    run = movement.columns_weight_gradient if map_pass.name == WGRAD else movement.columns_forward
    return run(*given, map_pass.oriented_map, map_pass.groups)


def _gathered(forward: Forward, map_pass: Pass, given: Two) -> Tensor:
    how: PairLayout = movement.layout(map_pass.oriented_map, map_pass.flow.grouping or Grouping("separate"))
    if map_pass.name == WGRAD:
        fused = forward is not movement.forward_by_group
        return movement.weight_gradient(*given, how, (map_pass.found.volume, map_pass.groups), fused)
    return forward(*given, how, map_pass.oriented_map.num_outputs, map_pass.groups)


# Statements
_OPERANDS = {FORWARD: ("x", "w"), DGRAD: ("grad", "w"), WGRAD: ("x", "grad")}
_PRODUCTS = {
    FORWARD: "Y[s[g,q],h,n] = x[i[g,q],h,c] * w[h,n,k[g],c] ; s:distinct, s:onto",
    DGRAD: "Y[s[g,q],h,c] = grad[i[g,q],h,n] * w[h,n,k[g],c] ; s:distinct, s:onto",
}
"""The products of all pairs, pair s sorted by output, for channel groups h."""
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


def _form(map_pass: Pass) -> str:
    """The form of the map that a pass reads: at most as many splits as kernel offsets; "grouped" for wgrad."""
    form, volume = map_pass.flow.form, map_pass.found.volume
    if map_pass.name == WGRAD:
        return "grouped"
    if map_pass.flow.splits > max(1, volume):
        form = "compacted" if volume == 1 else f"split{volume}"
    return f"{form}_t" if map_pass.name == DGRAD and f"{form}_t" in maps.FORMS else form


def forms(map_pass: Pass) -> tuple[str, ...]:
    """The forms of the map that the statement of a pass reads; none for library products."""
    if map_pass.flow.movement == "planned":
        return maps.names_of(map_pass.found, map_pass.name != FORWARD)
    return (_form(map_pass),) if map_pass.flow.movement in ("implicit", "on-demand") else ()


def materialize(wanted: Sequence[tuple[KernelMap, Iterable[Chosen | None]]], differentiable: bool) -> None:
    """Materialise the forms of maps that layers with these dataflows read, with one host synchronisation.

    None: the planner's default forms. differentiable: include those of the gradients.
    """
    requests = []
    for found, flows in wanted:
        for three in flows:
            if three is None:
                requests.append((found, maps.names_of(found, differentiable)))
                continue
            passes = PASSES if differentiable else PASSES[:1]
            for name, flow in zip(passes, three, strict=False):
                requests.append((found, forms(Pass(name, flow, found, 1))))
    maps.materialize(requests)


def _run_as_einsum(map_pass: Pass, given: Two, epilogue: Epilogue | None) -> Tensor:
    """The statement of a pass over the form of its dataflow."""
    split, finish = _in_groups(map_pass, given), _finish(epilogue)
    ready = map_pass.found.cached(_key(map_pass, given, finish), lambda _: _plan_of(map_pass, split, finish))
    found = plan.execute_plan(ready, split, None if epilogue is None else epilogue.split(map_pass.groups))
    return _flat(map_pass, found)


def _plan_of(map_pass: Pass, given: Two, finish: EpilogueSignature) -> plan.Plan:
    """The plan of the call, with the arrays of the map bound."""
    each = [maps.form_operands(map_pass.found, form) for form in forms(map_pass)]
    tokens, arrays = [t for names, _ in each for t in names], [x for _, held in each for x in held]
    operands, names = [*given, *arrays], "|".join((*_OPERANDS[map_pass.name], *tokens))
    text, shape = statement(map_pass.name, map_pass.groups), _shape(map_pass, given)
    lowering = "" if map_pass.flow.movement == "planned" else _lowering(given[0])
    # No axis of a weight is a number of rows or entries.
    steady = (len(operands),) if map_pass.name == WGRAD else (1,)
    piece = 0 if map_pass.name == WGRAD else map_pass.flow.piece
    return plan.bound_plan(operands, plan.PlanRequest(names, text, shape, steady, (0, 1), lowering, finish, piece))


def _run_in_order(map_pass: Pass, given: Two, epilogue: Epilogue | None) -> Tensor:
    """Products of all pairs sorted by output, then a segment sum; wgrad by kernel offset."""
    if map_pass.name == WGRAD:
        return _by_library(partial(_gathered, movement.forward_by_group), map_pass, given, epilogue)
    split, finish = _in_groups(map_pass, given), _finish(epilogue)
    key = _key(map_pass, given, finish)
    products, sums = map_pass.oriented_map.cached(key, lambda _: _plans_in_order(map_pass, split, finish))
    return plan.execute_plan(sums, [plan.execute_plan(products, split).flatten(1)], epilogue)


def _plans_in_order(map_pass: Pass, given: Two, finish: EpilogueSignature) -> tuple[plan.Plan, plan.Plan]:
    taps, inputs, places, outputs = map_pass.oriented_map.cached("pairs in output order", _pairs_in_order)
    operands, lowering = [*given, inputs, taps, places], _lowering(given[0])
    shape = _shape(map_pass, given)
    text, width = _PRODUCTS[map_pass.name], shape[1:]
    if map_pass.groups == 1:
        text = text.replace(",h", "").replace("h,", "")
    names = "|".join((*_OPERANDS[map_pass.name], "i", "k", "s"))
    products = plan.plan_for(operands, names, text, (len(outputs), *width), lowering)
    # Only its shape and dtype are used.
    buffer = given[0].new_empty((len(outputs), math.prod(width)), dtype=products.dtype)
    sums = plan.plan_for([buffer, outputs], "Y|o", _SUMS, (shape[0], math.prod(width)), lowering, finish)
    return plan.bind_operands(products, operands, (0, 1)), plan.bind_operands(sums, [buffer, outputs], (0,))


def _pairs_in_order(found: KernelMap) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Kernel offsets [G], inputs [G, Q] and places [G, Q] of pairs grouped by offset, and the output of each place [P].

    A place is the rank of a pair sorted by output, then by kernel offset; padding is -1.
    """
    if found.buffered is not None:
        raise OptionError("dataflow fetch-on-demand-deterministic reads map sizes on the host, not allowed in capture")
    taps, inputs, outputs = found.grouped(maps.group_of(found))
    flat = outputs.flatten()
    filled = int((flat < 0).sum())
    order = (outputs.long() * found.volume + taps[:, None]).flatten().argsort()[filled:]
    places = torch.full_like(flat, -1)
    places[order] = torch.arange(len(order), dtype=flat.dtype, device=flat.device)
    return taps, inputs, places.view_as(outputs), flat[order]


def _key(map_pass: Pass, given: Two, finish: EpilogueSignature) -> tuple[object, ...]:
    """Cache key of the plan of a call."""
    facts = tuple((x.shape, x.dtype, x.device) for x in given)
    return "dataflow", map_pass.name, map_pass.flow, map_pass.groups, plan.deterministic(), finish, facts


def _lowering(x: Tensor) -> str:
    """Require kernels where Triton runs: another lowering would be another dataflow."""
    return "triton" if x.is_cuda or kernels.interpreted() else ""


def _finish(epilogue: Epilogue | None) -> EpilogueSignature:
    return NO_EPILOGUE if epilogue is None else epilogue.signature


def _in_groups(map_pass: Pass, given: Two) -> Two:
    """The operands with an axis for channel groups if there are several."""
    if map_pass.groups == 1:
        return given
    axes = {"x": 1, "grad": 1, "w": 0}
    first, second = (
        x.unflatten(axes[name], (map_pass.groups, -1)) for name, x in zip(_OPERANDS[map_pass.name], given, strict=True)
    )
    return first, second


def _shape(map_pass: Pass, given: Two) -> tuple[int, ...]:
    """Shape of the result, with an axis for channel groups, from operands that have it."""
    first, second = given
    groups = () if map_pass.groups == 1 else (map_pass.groups,)
    if map_pass.name == WGRAD:
        return *groups, second.shape[-1], map_pass.found.volume, first.shape[-1]
    width = second.shape[-3] if map_pass.name == FORWARD else second.shape[-1]
    return map_pass.oriented_map.num_outputs, *groups, width


def _flat(map_pass: Pass, found: Tensor) -> Tensor:
    if map_pass.groups == 1:
        return found
    return found.flatten(0, 1) if map_pass.name == WGRAD else found.flatten(1)


def _library(run: Callable[[Pass, Two], Tensor]) -> Engine:
    return partial(_by_library, run)


ENGINES: Mapping[str, Engine] = MappingProxyType(
    {
        "explicit": _library(_explicit),
        "vectorised": _library(partial(_gathered, movement.forward_by_group)),
        "fused": _library(partial(_gathered, movement.forward_fused)),
        "locality-aware": _library(partial(_gathered, movement.forward_in_order)),
        "on-demand": _run_as_einsum,
        "on-demand-in-order": _run_in_order,
        "implicit": _run_as_einsum,
        "planned": _run_as_einsum,
    }
)
"""The engines by movement."""
