"""The operator `pumice::einsum`: dispatch, fake implementation and derivatives of any order.

The operator evaluates any statement of the language; its gradients are statements too. Operands are a flat list of
tensors that `names` describes (pumice.lower.plan.read); compiled code sees sparse operands only in this form.

A convolution in named dataflows is a trilinear form of x, w and y; each pass is its derivative by one of them:

    T(x, w, y) = sum of map[o, k, i] * x[i, c] * w[n, k, c] * y[o, n]       y = dT/dy, dx = dT/dx, dw = dT/dw

so the gradients of a pass are the two other passes, each in its own dataflow.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pumice.coords import KernelMap
from pumice.coords.traced_ops import TAGS
from pumice.errors import DeviceError, DtypeError, OptionError
from pumice.language.bind import bind
from pumice.language.derive import count, declare, derivative, gradient_name, lost_points, result_name
from pumice.language.nodes import Statement, accesses_of, arrays_of, indices_of
from pumice.language.rewrite import VALUES
from pumice.lower import maps, plan, together
from pumice.lower.call import (
    BoundCall,
    MapCall,
    call_signature,
    find_arrays_read,
    keep_arrays_read,
    row_strides,
    rows_of,
)
from pumice.lower.dataflow import Pass, check
from pumice.lower.epilogue import Epilogue, applied
from pumice.lower.reference import EIGHT_BITS
from pumice.lower.together import StatementPart
from pumice.lower.unrolled import Target
from pumice.ops.ahead import Calls, compile_layers
from pumice.runtime.cache import BoundedCache
from pumice.schedule.dataflow import PASSES, Chosen

_LIBRARY = torch.library.Library("pumice", "DEF")
_LIBRARY.define(
    "einsum(Tensor[] operands, str names, str text, SymInt[]? shape, str lowering) -> Tensor",
    # Cached properties of index arrays must not be allocated in the memory pool of a graph under capture.
    tags=TAGS,
)


def uses_gpu(x: Tensor) -> bool:
    """True if x is on a GPU, where cached kernel launches apply."""
    return x.is_cuda


DEVICES = ("cpu", "cuda", "meta")
"""Supported device types."""


def einsum(
    operands: Sequence[Tensor], names: str, text: str, shape: Sequence[int] | None = None, lowering: str = ""
) -> Tensor:
    """Evaluate the statement `text` on operands that `names` describes. shape: of the target, if known."""
    known = None if shape is None else tuple(shape)
    if operands:
        check_device(operands[0].device)
    # Plain calls, and calls without tensors, bypass the dispatcher.
    if not operands or is_plain_call(operands):
        return plan.execute(operands, names, text, known, lowering)
    if only_autograd_active(operands):
        # As the registered operator, without the dispatcher: saves 50 us of host time.
        return _EinsumFunction.apply(names, text, known, lowering, *operands)
    if not torch.compiler.is_compiling() and (_in_functorch_transform() or _has_forward_tangent(operands)):
        # torch's operators support forward tangents and functorch transforms; a kernel would drop them.
        return plan.execute(operands, names, text, known, "graph")
    return torch.ops.pumice.einsum(operands, names, text, shape, lowering)


@dataclass(eq=False)
class KnownStatement:
    """`einsum` of operands of known dtypes on a known device; the plans of plain calls are kept by their shapes."""

    names: str
    text: str
    shape: tuple[int, ...] | None
    lowering: str
    _plans: BoundedCache[plan.Plan] = field(default_factory=lambda: BoundedCache(64))

    def __call__(self, operands: Sequence[Tensor]) -> Tensor:
        if not is_plain_call(operands):
            return einsum(operands, self.names, self.text, self.shape, self.lowering)
        shapes = tuple([x.shape for x in operands])
        if (known := self._plans.get(shapes)) is None:
            made = plan.plan_for(operands, self.names, self.text, self.shape, self.lowering)
            known = self._plans.keep(shapes, made)
        return plan.execute_plan(known, operands)

    def planned(self, operands: Sequence[Tensor]) -> plan.Plan:
        """The plan of a plain call that ran."""
        return self._plans[tuple([x.shape for x in operands])]


def only_autograd_active(operands: Sequence[Tensor]) -> bool:
    """True if at most autograd is active: no tracing, functorch transform or mode, and plain non-meta tensors."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or _in_functorch_transform():
        return False
    return not (_has_forward_tangent(operands) or not are_plain_tensors(operands))


def only_reverse_mode_active(operands: Sequence[Tensor]) -> bool:
    """`only_autograd_active`, and no forward-mode AD: other tensors of the call could have tangents."""
    return forward_ad._current_level < 0 and only_autograd_active(operands)


def is_plain_call(operands: Sequence[Tensor]) -> bool:
    """True to skip the dispatcher (10 us): plain non-meta tensors; no autograd, autocast, tracing, transform, mode."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or has_active_mode():
        return False
    recorded = torch.is_grad_enabled()
    # A loop: calls and lists would take twice as long, in every layer.
    for x in operands:
        if type(x) not in _ORDINARY or x.is_meta or (recorded and x.requires_grad):
            return False
    return not operands or not torch.is_autocast_enabled(operands[0].device.type)


def are_plain_tensors(operands: Sequence[Tensor]) -> bool:
    """True if all are plain torch tensors and none is meta."""
    return _ORDINARY.issuperset(map(type, operands)) and not any([x.is_meta for x in operands])


def _has_forward_tangent(operands: Sequence[Tensor]) -> bool:
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in operands)


def _in_functorch_transform() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def has_active_mode() -> bool:
    """True within a torch.func transform, forward-mode AD or a torch function mode."""
    return forward_ad._current_level >= 0 or bool(torch._C._len_torch_function_stack()) or _in_functorch_transform()


_ORDINARY = frozenset((Tensor, torch.nn.Parameter))


def check_device(device: torch.device) -> None:
    """Raise DeviceError for an unsupported device."""
    if device.type not in DEVICES:
        raise DeviceError(f"device {device.type!r} is not supported; expected one of {', '.join(DEVICES)}")


def _einsum(operands: list[Tensor], names: str, text: str, shape: list[int] | None, lowering: str) -> Tensor:
    known = None if shape is None else tuple(shape)
    with autocast_disabled(operands):
        if known is not None and operands[0].is_cuda and (ask := _convolution_request(names, text)) is not None:
            return writable(_run_bucketed(operands, replace(ask, shape=known, lowering=lowering)))
        return writable(plan.execute(operands, names, text, known, lowering))


def _run_bucketed(operands: Sequence[Tensor], ask: plan.PlanRequest) -> Tensor:
    """plan.execute with one plan per size class."""
    return plan.execute_plan(plan.bound_plan(operands, ask), [operands[place] for place in ask.runtime_operands])


@lru_cache(maxsize=1024)
def _convolution_request(names: str, text: str) -> plan.PlanRequest | None:
    """PlanRequest of a convolution or a derivative of one, None for other statements. Compiled code passes a kernel
    map[o, k, i] as arrays, which differ per input. runtime_operands: the dense operands. static_rows: positions of
    dense operands (last: of the result) whose first axis is neither the inputs nor the outputs of the map."""
    given, statement = plan.read(names), plan.statement_of(text, names)
    forms = given.forms.get("map", {})
    if len(given.forms) != 1 or not forms.keys() <= maps.FORMS.keys() or statement.reduction != "sum":
        return None
    accesses = (statement.target, *accesses_of(*statement.terms))
    sides = {str(end) for access in accesses if access.name in given.forms for end in access.indices[::2]}
    first = {access.name: str(access.indices[0]) for access in accesses if access.indices}
    places = {name: given.places[name, "", 0, ""] for name in given.dense}
    steady = [place for name, place in places.items() if first.get(name) not in sides]
    result = [] if first.get(statement.target.name) in sides else [len(given.places)]
    return plan.PlanRequest(names, text, (), (*steady, *result), tuple(places.values()))


def _einsum_fake(operands: list[Tensor], names: str, text: str, shape: list[int] | None, lowering: str) -> Tensor:
    if shape is None:
        shape = list(plan.sizes(text, names, [t.shape for t in operands], None).shape)
    dtype = plan.result_dtype(operands, names, text)
    # Meta features may come with maps that have values.
    like = next((t for t in operands if t.is_meta), operands[0])
    return like.new_empty(shape, dtype=dtype)


def writable(y: Tensor) -> Tensor:
    """y, or a non-view over the same memory if y is a view: autograd forbids in-place operators (such as a following
    activation) on a view that a custom function returns. Views that lowerings return are of memory not used
    elsewhere."""
    return y.new_empty(0).set_(y) if y._is_view() else y  # pyright: ignore[reportArgumentType]


def autocast_disabled(operands: Sequence[Tensor]) -> AbstractContextManager[object]:
    """Disable autocast within lowerings: operands are cast on entry, and must not be cast again."""
    kind = operands[0].device.type if operands else "cpu"
    return _WithoutAutocast(kind) if torch.is_autocast_enabled(kind) else nullcontext()


class _WithoutAutocast:
    """torch.autocast(kind, enabled=False) inside an enabled autocast, in a tenth of the time: keeps the cast cache."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self._kind, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self._kind, True)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    operands, names, text, shape, lowering = inputs
    # For an empty list, which torch takes for a list of tensors, it expects a list of gradients.
    ctx.none = [] if shape is not None and not len(shape) else None
    _keep(ctx, (names, text, lowering), operands, output)


def _keep(ctx: Any, call: tuple[str, str, str], operands: Sequence[Tensor], output: Tensor) -> None:
    ctx.names, ctx.text, ctx.lowering = call
    ctx.extreme = plan.statement_of(ctx.text, ctx.names).reduction in ("max", "min")
    ctx.tiles = plan.kernels.tuning_mode()
    ctx.save_for_backward(*operands, *([output] if ctx.extreme else []))


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _all_gradients(ctx, grad, ctx.needs_input_grad[0]), None, None, ctx.none, None


class _EinsumFunction(torch.autograd.Function):
    """The operator for calls where only autograd is active."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, names: str, text: str, shape: tuple[int, ...] | None, lowering: str, *operands: Tensor
    ) -> Tensor:
        with autocast_disabled(operands):
            output = writable(plan.execute(operands, names, text, shape, lowering))
        _keep(ctx, (names, text, lowering), operands, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, None, None, *_all_gradients(ctx, grad, ctx.needs_input_grad[4:])


def _all_gradients(ctx: Any, grad: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
    *operands, last = (*ctx.saved_tensors, None) if not ctx.extreme else ctx.saved_tensors
    call = _CallFunction(operands, ctx.names, ctx.text, ctx.lowering, grad.shape)
    if not any(needed):
        return [None] * len(operands)
    with plan.kernels.tiles_of(ctx.tiles):
        if call.statement.reduction == "sum" or not (call.given.forms or call.statement.summed):
            return _gradients(call, grad, last, needed)
        # The points to take a max or min over are known only from the storage form of a sparse operand.
        steps, places = call.over_arrays()
        found = _gradients_of_steps(steps, grad, last, [needed[place] for place in places])
    grads = dict(zip(places, found, strict=True))
    return [grads.get(place) for place in range(len(operands))]


def _gradients_of_steps(
    steps: Sequence[_CallFunction], grad: Tensor, last: Tensor | None, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the operands of the first of several calls. Each of the others has the operands of the one
    before and its result."""
    *before, final = steps
    if before and last is not None:
        # Compared with the recomputed results of the steps before, so recomputed as well.
        last = final.result()
    grads = _gradients(
        final, grad, last, [*needed, *(x.dtype.is_floating_point for x in final.operands[len(needed) :])]
    )
    for call in reversed(before):
        upstream = grads.pop()
        if upstream is not None:
            own = _gradients(call, upstream, None, [*needed, *[True] * (len(call.operands) - len(needed))])
            grads = [x if y is None else y if x is None else x + y for x, y in zip(grads, own, strict=True)]
    return grads


def _gradients(call: _CallFunction, grad: Tensor, last: Tensor | None, needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of the operands of a call, None if not needed."""
    grads: list[Tensor | None] = [None] * len(call.operands)
    if call.joins(needed) and only_autograd_active((*call.operands, grad)):
        part = StatementPart(tuple(range(len(call.operands))), call.names, call.text, 0)
        return _gradients_together(((part,), call.lowering), call.operands, [grad], needed)
    if any(needed):
        grad, grads = call.shared(grad, last, grads, needed)
        for (name, form, part, local), place in call.given.places.items():
            if needed[place] and grads[place] is None:
                grads[place] = call.gradient((name, form, part, local), grad, last)
    return grads


_Statements = tuple[tuple[StatementPart, ...], str]
"""Several statements over the same operands, and their lowering, "" for any."""


def _gradients_together(
    of: _Statements, operands: Sequence[Tensor], grads: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the operands of several statements from those of their results: such statements, too."""
    (parts, lowering), given, new = of, [*operands], list[StatementPart]()
    for number, grad in enumerate(grads):
        if grad is not None:
            for part in parts:
                new += _derivatives(part, operands, grad.shape, len(given)) if part.result == number else ()
            given.append(grad)
    new = [part for part in new if needed[part.result]]
    places = sorted({part.result for part in new})
    if not places:
        return [None] * len(operands)
    parts = tuple(part._replace(result=places.index(part.result)) for part in new)
    targets = tuple(Target(tuple(operands[place].shape), operands[place].dtype) for place in places)
    found = dict(zip(places, _TogetherFunction.apply((parts, lowering), targets, *given), strict=True))
    return [found.get(place) for place in range(len(operands))]


def _derivatives(
    part: StatementPart, operands: Sequence[Tensor], shape: Sequence[int], upstream: int
) -> Iterator[StatementPart]:
    """The statements for the gradients of a statement's operands; results: places of these. shape and upstream: those
    of the gradient of its result."""
    call = _CallFunction([operands[place] for place in part.places], part.names, part.text, "", shape)
    whole = (*part.places, upstream)
    for (name, form, _, _), local in call.given.places.items():
        if not form and operands[part.places[local]].dtype.is_floating_point:
            for places, names, text in call.derivatives(name, False):
                yield StatementPart(tuple(whole[n] for n in places), names, text, part.places[local])


class _TogetherFunction(torch.autograd.Function):
    """Several statements over the same operands."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, of: _Statements, targets: tuple[Target, ...], *operands: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.of = of
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands)
        with autocast_disabled(operands):
            return tuple(map(writable, together.run(operands, of[0], targets, of[1])))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return None, None, *_gradients_together(ctx.of, ctx.saved_tensors, grads, ctx.needs_input_grad[2:])


class DifferentiableCall:
    """A sum-reduction call over a kernel map, differentiable in its runtime operands; only for calls where just
    autograd is active. The constant arrays of the map follow the runtime operands, which have the devices and, up to
    row counts, the shapes of `like`; one with a fixed row count may have more axes and as many elements. They are cast
    to the dtype of `like`, their gradients are not. request.static_rows excludes the result; request.lowering applies
    to gradients too. axes: (dtype, number of axes) of each runtime operand."""

    axes: list[tuple[torch.dtype, int]]

    def __init__(
        self,
        request: plan.PlanRequest,
        like: tuple[Sequence[Tensor], torch.dtype],
        arrays: maps.MapArrays,
        launches: dict[Hashable, BoundCall],
    ) -> None:
        """like: (example runtime operands, dtype); arrays: of the map; launches: over the map, by signature."""
        assert plan.statement_of(request.text, request.names).reduction == "sum"
        given, dtype = like
        assert request.runtime_operands == tuple(range(len(given)))
        self._request, self._arrays, self._launches = request, arrays, launches
        self.axes, self._shapes = [(dtype, x.ndim) for x in given], [x.shape for x in given]
        dynamic = tuple([place not in request.static_rows for place in request.runtime_operands])
        self._dynamic = {len(given): dynamic, len(given) + 1: (*dynamic, True)}
        # By (gradient or None for the result, deterministic algorithms).
        self._plans: dict[tuple[_Gradient | None, bool], list[_Part]] = {}

    def __call__(self, *given: Tensor) -> Tensor:
        return _BoundCallFunction.apply(self, *given)

    def cast(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """The runtime operands, cast to the dtype and reshaped to the axes of the call."""
        every = zip(operands, self.axes, strict=True)
        return [x if (x.dtype, x.ndim) == axes else self._cast(x, n) for n, (x, axes) in enumerate(every)]

    def _cast(self, x: Tensor, n: int) -> Tensor:
        shape, x = self._shapes[n], x.to(self.axes[n][0])
        return x if x.ndim == len(shape) else x.reshape(shape)

    def compute(self, tensors: Sequence[Tensor], of: _Gradient | None = None) -> Tensor:
        """The result or, with `of`, a gradient. tensors: the runtime operands and, with `of`, the output gradient."""
        call = self._known_launch(tensors, of)
        y = None if call is None else call(tensors)
        if y is None:
            if call is None:
                compile_layers(Calls(tensors[0], tensors[0].shape[0], True))
            with autocast_disabled(tensors):
                parts = self._planned(tensors, of)
                first, *more = (plan.execute_plan(ready, [tensors[n] for n in numbers]) for ready, numbers in parts)
                y = sum(more, first) if more else first
            call = self._map_call(parts, tensors, of) if uses_gpu(tensors[0]) else None
            if call is not None and (bound := parts[0][0].keep_call(call, tensors, parts[0][1])) is not None:
                self._launches[call.signature] = bound
        return y if of is None or y.dtype == of[1] else y.to(of[1])

    def compilation(self, tensors: Sequence[Tensor], of: _Gradient | None = None) -> Callable[[], object] | None:
        """Cache the template of a result, or of a gradient, without computing it. Returns the task that compiles its
        kernel for these sizes; None if it is compiled, or for several kernels."""
        with autocast_disabled(tensors):
            parts = self._planned(tensors, of)
        call = self._map_call(parts, tensors, of)
        kernel = parts[0][0].kernel
        if call is None or kernel is None:
            return None
        if (known := call.template_like(kernel)) is not None:
            return known.compilation(call.on, call.rows, call.shape)
        return parts[0][0].compilation(call, tensors, parts[0][1])

    def splits(self, tensors: Sequence[Tensor], of: _Gradient | None = None) -> bool:
        """True if the result, or a gradient, is a split-K kernel, in which several programs add to each element."""
        with autocast_disabled(tensors):
            kernel = self._planned(tensors, of)[0][0].kernel
        return kernel is not None and kernel.executor.splits > 1

    def gradients(
        self, operands: Sequence[Tensor], grad: Tensor, wanted: Sequence[torch.dtype | None]
    ) -> list[Tensor | None]:
        """The gradients of the runtime operands in the wanted dtypes, None where the dtype is None."""
        if is_plain_call((*operands, grad)):
            tensors = (*operands, grad)
            return [None if dtype is None else self.compute(tensors, (n, dtype)) for n, dtype in enumerate(wanted)]
        # Double backward: autograd records each gradient.
        needed = [dtype is not None for dtype in wanted] + [False] * len(self._arrays.tokens)
        every = _gradients(self._call(operands, grad), grad, None, needed)
        return [None if x is None else x.to(dtype) for x, dtype in zip(every, wanted, strict=False)]

    def _known_launch(self, tensors: Sequence[Tensor], of: _Gradient | None) -> BoundCall | None:
        """The launch cached for this map, or instantiated from a template of another map; else None."""
        if not uses_gpu(tensors[0]):
            return None
        dynamic = self._dynamic[len(tensors)]
        signature = call_signature(tensors, dynamic, self._request.text, of)
        call = self._launches.get(signature)
        if call is None and (on := find_arrays_read(signature, self._arrays)) is not None:
            call = MapCall(signature, on, rows_of(tensors), self._shape(tensors, of)).instantiate()
            if call is not None:
                self._launches[signature] = call
        return call

    def _map_call(self, parts: Sequence[_Part], tensors: Sequence[Tensor], of: _Gradient | None) -> MapCall | None:
        """The MapCall of the result or gradient; None if it takes several kernels."""
        dynamic = self._dynamic[len(tensors)]
        signature = call_signature(tensors, dynamic, self._request.text, of)
        on = keep_arrays_read(signature, self._arrays, parts[0][0].kernel if len(parts) == 1 else None)
        if on is None:
            return None
        strides = row_strides(tensors, dynamic)
        return MapCall(signature, on, rows_of(tensors), self._shape(tensors, of), strides)

    def _shape(self, tensors: Sequence[Tensor], of: _Gradient | None) -> tuple[int, ...]:
        return self._request.shape if of is None else tuple(tensors[of[0]].shape)

    def _planned(self, tensors: Sequence[Tensor], of: _Gradient | None) -> list[_Part]:
        """Cached plans whose sum is the result or the gradient."""
        key = of, plan.deterministic()
        if key not in self._plans:
            if of is None:
                bound = plan.bound_plan(self._all_operands(tensors), self._request)
                self._plans[key] = [(bound, tuple(range(len(tensors))))]
            else:
                self._plans[key] = self._derivatives(of[0], tensors[:-1], tensors[-1], of[1])
        return self._plans[key]

    def _derivatives(self, number: int, given: Sequence[Tensor], grad: Tensor, dtype: torch.dtype) -> list[_Part]:
        """Plans whose sum is the gradient of runtime operand `number`, in `dtype`."""
        call, place, request = self._call(given, grad), self._request.runtime_operands[number], self._request
        everything, sources = (*call.operands, grad), (*request.runtime_operands, len(call.operands))
        found = []
        for places, names, text in call.derivatives(call.tokens[place], False):
            operands = [everything[source] for source in places]
            left = [n for n, source in enumerate(places) if source in sources]
            steady = [n for n, source in enumerate(places) if source in request.static_rows]
            steady += [len(places)] if place in request.static_rows else []
            kept = None if dtype == given[number].dtype else dtype
            shape = tuple(given[number].shape)
            ask = plan.PlanRequest(names, text, shape, tuple(steady), tuple(left), request.lowering, result_dtype=kept)
            numbers = tuple(sources.index(places[n]) for n in left)
            found.append((plan.bound_plan(operands, ask), numbers))
        return found

    def _call(self, given: Sequence[Tensor], grad: Tensor) -> _CallFunction:
        return _CallFunction(self._all_operands(given), self._request.names, self._request.text, "", grad.shape)

    def _all_operands(self, given: Sequence[Tensor]) -> list[Tensor]:
        return [*given, *self._arrays.arrays]


_Gradient = tuple[int, torch.dtype]
"""A gradient: (number of the runtime operand, dtype)."""
_Part = tuple[plan.Plan, tuple[int, ...]]
"""(plan, positions of its operands in (runtime operands..., output gradient))."""


class _BoundCallFunction(torch.autograd.Function):
    """autograd.Function of a DifferentiableCall."""

    @staticmethod
    def forward(ctx: Any, call: DifferentiableCall, *given: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.call, ctx.tiles = call, plan.kernels.tuning_mode()
        cast = call.cast(given)
        ctx.save_for_backward(*given, *[x for x, own in zip(cast, given, strict=True) if x is not own])
        return writable(call.compute(cast))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = ctx.needs_input_grad[1:]
        saved = iter(ctx.saved_tensors)
        given = list(islice(saved, len(needed)))
        if torch.is_grad_enabled():
            cast = ctx.call.cast(given)
        else:
            every = zip(given, ctx.call.axes, strict=True)
            cast = [x if (x.dtype, x.ndim) == axes else next(saved) for x, axes in every]
        wanted = [x.dtype if need else None for x, need in zip(given, needed, strict=True)]
        # Backward uses the dtypes of the forward pass, even when called within autocast.
        with autocast_disabled((grad,)), plan.kernels.tiles_of(ctx.tiles):
            found = ctx.call.gradients(cast, grad, wanted)
        both = zip(given, found, strict=True)
        return None, *[y if y is None or y.ndim == x.ndim else y.reshape(x.shape) for x, y in both]


class _CallFunction:
    """The operands of an einsum call, and its derivatives."""

    def __init__(self, operands: Sequence[Tensor], names: str, text: str, lowering: str, shape: Sequence[int]) -> None:
        self.operands, self.names, self.text, self.shape = operands, names, text, shape
        self.lowering = lowering and lowering.removesuffix(plan.PREFERRED) + plan.PREFERRED
        self.given = plan.read(names)
        self.statement = plan.statement_of(text, names)
        tokens, *self.notes = names.split(";")
        self.tokens = tokens.split("|")

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...] | None:
        """Shapes of the result and the operands, a cache key; None while tracing, where they may be symbolic."""
        shapes = (tuple(self.shape), *(x.shape for x in self.operands))
        known = not torch.compiler.is_compiling() and all(type(n) is int for shape in shapes for n in shape)
        return shapes if known else None

    def joins(self, needed: Sequence[bool]) -> bool:
        """True if the gradients needed, several of dense operands, may be one kernel."""
        if sum(needed) < 2 or self.statement.accumulate:
            return False
        values = any(needed[place] for (_, form, _, _), place in self.given.places.items() if form)
        return not values and together.is_candidate(self.operands[0], self.names, self.text, self.lowering)

    def result(self) -> Tensor:
        return einsum(self.operands, self.names, self.text, self.shape, self.lowering)

    def over_arrays(self) -> tuple[list[_CallFunction], list[int]]:
        """(the steps of the call over the arrays of its sparse operands, operand position of each array). A step has
        the results of those before as further operands."""
        forms = self.given.first_forms
        text = self.text
        if self.statement.summed:
            bound = plan.sizes(text, self.names, [x.shape for x in self.operands], self.shape)
            text = plan.with_lost_ranges(text, self.names, bound)
        known = plan.array_places(self.names, text, forms)
        steps, made = plan.rewritten(text, self.names, forms).steps, [self.operands[place] for place in known.values()]
        names, calls = [*known], list[_CallFunction]()
        for step in steps:
            shape = self.shape
            if step is not steps[-1]:
                shapes = {name: x.shape for name, x in zip(names, made, strict=True)}
                shape = bind(step, shapes, strict=False).shape
            calls.append(_CallFunction([*made], "|".join(names), str(step), self.lowering, shape))
            if step is not steps[-1]:
                made.append(calls[-1].result())
                names.append(step.target.name)
                if step.target.name in {array.name for array in arrays_of(steps[-1])}:
                    made[-1] = made[-1].to(torch.int64)
        return calls, list(known.values())

    def shared(
        self, grad: Tensor, result: Tensor | None, grads: list[Tensor | None], needed: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """(gradient of each contributing point, grads); sets the gradient of the target's old values in grads."""
        statement, target = self.statement, self.given.places.get((self.statement.target.name, "", 0, ""))
        if statement.reduction == "sum":
            if statement.accumulate and target is not None and needed[target]:
                grads[target] = grad
            return grad, grads
        points = self._run(count(statement), {result_name(statement): result}, self.shape)
        old = self.operands[target] == result if statement.accumulate and target is not None else None
        grad = grad / (points if old is None else points + old).clamp(min=1).to(grad.dtype)
        if old is not None and target is not None and needed[target]:
            grads[target] = torch.where(old, grad, 0)
        return grad, grads

    def gradient(self, place: tuple[str, str, int, str], grad: Tensor, result: Tensor | None) -> Tensor | None:
        """The gradient of a dense operand, or of the values of a sparse one; None for coordinates."""
        name, form, _, local = place
        operand = self.operands[self.given.places[place]]
        if not form:
            given = (*self.operands, grad, result)
            parts = [
                einsum(
                    [x for place in places if (x := given[place]) is not None],
                    names,
                    text,
                    operand.shape,
                    self.lowering,
                )
                for places, names, text in self.derivatives(name, result is not None)
            ]
        elif local == VALUES:
            parts = list(self._of_values(place, grad))
        else:
            return None
        return sum(parts[1:], parts[0]).to(operand.dtype) if parts else None

    def _of_values(self, place: tuple[str, str, int, str], grad: Tensor) -> Any:
        """The gradients of the values of a sparse operand, one per use in a step."""
        forms = self.given.first_forms
        done = plan.rewritten(self.text, self.names, forms)
        tensors = plan.arrays(self.operands, self.names, self.text, plan.Candidate(forms, (), done.steps, 0.0))
        for values, array in done.arrays.items():
            if (array.operand, array.part, array.local) != (place[0], place[2], VALUES):
                continue
            for step in done.steps:
                for new in derivative(step, values):
                    known = {**tensors, gradient_name(step): grad}
                    yield self._dense(self._with_ranges(new), known, tensors[values].shape)

    def _dense(self, new: Statement, tensors: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
        used = [name for name in dict.fromkeys(a.name for a in accesses_of(new)) if name in tensors]
        return einsum([tensors[name] for name in used], "|".join(used), str(new), shape, self.lowering)

    def derivatives(self, name: str, with_result: bool) -> Sequence[tuple[tuple[int, ...], str, str]]:
        """The calls (operand positions, names, text) whose sum is the gradient of a dense operand. Positions count the
        call's operands, then the output gradient and the result. Cached, by shape if the text declares extents."""
        key = (self.names, self.text, name, with_result)
        if (known := _DERIVATIVES.get(key)) is not None:
            return known
        sized = None if self.shapes is None else (*key, self.shapes)
        if sized is not None and (known := _DERIVATIVES.get(sized)) is not None:
            return known
        extra = [gradient_name(self.statement), *([result_name(self.statement)] if with_result else [])]
        new = derivative(self.statement, name)
        found = [self._operands_read(each, extra) for each in new]
        if all(map(self._has_all_ranges, new)):
            return _DERIVATIVES.keep(key, found)
        return found if sized is None else _DERIVATIVES.keep(sized, found)

    def _operands_read(self, new: Statement, extra: Sequence[str]) -> tuple[tuple[int, ...], str, str]:
        """(positions, names, text) of the operands that a statement reads, among those of the call and `extra`."""
        used = {access.name for access in accesses_of(*new.terms, *new.target.indices)}
        kept = [(place, t) for place, t in enumerate(self.tokens) if t.split("@")[0] in used]
        kept += [(len(self.tokens) + place, name) for place, name in enumerate(extra) if name in used]
        notes = [note for note in self.notes if note.partition("=")[0] in used]
        names = ";".join(["|".join(t for _, t in kept), *notes])
        return tuple(place for place, _ in kept), names, str(self._with_ranges(new))

    def _run(self, new: Statement, extra: Mapping[str, Tensor | None], shape: Sequence[int]) -> Tensor:
        """Evaluate a statement over the operands of the call and `extra`."""
        there = {name: x for name, x in extra.items() if x is not None}
        places, names, text = self._operands_read(new, list(there))
        given = (*self.operands, *there.values())
        return einsum([given[place] for place in places], names, text, shape, self.lowering)

    def _with_ranges(self, new: Statement) -> Statement:
        """The statement with ranges for indices that lost their axis, scaled by the extents of the indices it lost."""
        if self._has_all_ranges(new):
            return new
        shapes: dict[str, Sequence[int]] = dict(self.given.shapes)
        shapes.update((name, self.operands[self.given.places[name, "", 0, ""]].shape) for name in self.given.dense)
        bound = bind(self.statement, shapes, self.shape, strict=False)
        times = bound.points(lost_points(new, self.statement))
        terms = tuple(replace(term, coefficient=term.coefficient * times) for term in new.terms)
        return declare(replace(new, terms=terms), bound.ranges)

    def _has_all_ranges(self, new: Statement) -> bool:
        """True if every index has a range from an axis or the text, and none is lost."""
        bare = {e.bare for access in accesses_of(new) for e in access.indices}
        has_ranges = set(indices_of(new)) - {name for name, _ in new.ranges} <= bare
        return has_ranges and not lost_points(new, self.statement)


_DERIVATIVES: BoundedCache[Sequence[tuple[tuple[int, ...], str, str]]] = BoundedCache(1024)

for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("einsum", _einsum, _key)
torch.library.register_fake("pumice::einsum", _einsum_fake, lib=_LIBRARY)
torch.library.register_autograd("pumice::einsum", _backward, setup_context=_save, lib=_LIBRARY)


# Named dataflows
_X, _W, _Y = range(3)
_MISSING = (_Y, _X, _W)
"""The operand (x, w or y) that each of PASSES computes."""


def by_dataflow(
    operands: tuple[Tensor, Tensor], found: KernelMap, groups: int, flows: Chosen, epilogue: Epilogue | None
) -> Tensor:
    """The convolution of validated x [N_in, G*C] and w [G*N, K, C] over a map, in the given dataflows."""
    form = _TrilinearForm(tuple(Pass(name, flow, found, groups) for name, flow in zip(PASSES, flows, strict=True)))
    more = () if epilogue is None else tuple(epilogue.operands.values())
    if operands[0].is_meta:
        # `prepare`: shapes only.
        kept = None if epilogue is None else epilogue.signature.dtype
        return operands[0].new_empty(found.num_outputs, operands[1].shape[0], dtype=kept or operands[0].dtype)
    if is_plain_call((*operands, *more)):
        return form.passes[0](operands, epilogue)
    if not only_autograd_active((*operands, *more)):
        raise OptionError(
            f"dataflow {flows[0].name} does not support torch.compile, torch.func transforms or forward-mode AD; "
            "the automatic dataflow does: set layer.dataflow = None, or call Tuning.remove(model) if pumice.tune set it"
        )
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in operands]
    if any(wanted) and operands[0].dtype in EIGHT_BITS:
        raise DtypeError(f"{operands[0].dtype} is for inference and has no gradients; train in wider floats")
    for one, needed in zip(form.passes, (True, *wanted), strict=True):
        # Fail before the forward pass rather than in backward.
        if needed:
            check(one)
    y = _Trilinear.apply(form, _Y, *operands)
    return y if epilogue is None else applied(y, epilogue)


class _TrilinearForm:
    """The three passes of the trilinear form."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.passes = passes

    def without(self, missing: int, given: tuple[Tensor, Tensor]) -> Tensor:
        """The operand `missing` from the two others, given in the order x, w, y."""
        one = self.passes[_MISSING.index(missing)]
        # The pass for x takes (y, w).
        return one((given[1], given[0]) if missing == _X else given)


class _Trilinear(torch.autograd.Function):
    """Computes one of x, w, y from the two others; its gradients are applications of the same function."""

    @staticmethod
    def forward(ctx: Any, form: _TrilinearForm, missing: int, *given: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.form, ctx.missing, ctx.tiles = form, missing, plan.kernels.tuning_mode()
        ctx.save_for_backward(*given)
        with autocast_disabled(given):
            return writable(form.without(missing, (given[0], given[1])))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        places = [place for place in (_X, _W, _Y) if place != ctx.missing]
        operands = {**dict(zip(places, ctx.saved_tensors, strict=True)), ctx.missing: grad}
        with plan.kernels.tiles_of(ctx.tiles):
            found = [
                _form_gradient(ctx.form, place, operands, wanted)
                for place, wanted in zip(places, ctx.needs_input_grad[2:], strict=True)
            ]
        return None, None, *found


def _form_gradient(form: _TrilinearForm, place: int, operands: dict[int, Tensor], wanted: bool) -> Tensor | None:
    if not wanted:
        return None
    first, second = (operands[other] for other in (_X, _W, _Y) if other != place)
    return _Trilinear.apply(form, place, first, second)
