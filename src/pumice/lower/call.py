"""The launch of a kernel over a kernel map, or over none (a linear map).

signature = call_signature(tensors, ...)   all that the launch depends on but numbers of rows and addresses
call = found.calls.get(signature)          a call over this map with tensors like these, or
     = MapCall(...).instantiate()          one over another map, for the sizes and the arrays of this one, or
     = a plan (lower.plan) that is executed, whose kernel is kept as a template for both
call(tensors)                              addresses into the arguments of a compiled kernel
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import are_deterministic_algorithms_enabled as deterministic

from pumice.coords import KernelMap
from pumice.lower import kernel as kernels
from pumice.lower.epilogue import RESIDUAL, EpilogueSignature
from pumice.lower.kernel import KernelExecutor
from pumice.lower.maps import BoundMap, MapArrays, MapSignature, NoMap, bound_map
from pumice.lower.segments import SegmentArgs
from pumice.lower.tile_family import INT32_LIMIT, WORKSPACE, GeneratedKernel, TileFamily
from pumice.runtime import cache
from pumice.runtime.cache import BoundedCache
from pumice.runtime.launch import CompiledKernel
from pumice.runtime.workspace import Workspace, workspace


def call_signature(tensors: Sequence[Tensor], dynamic: Sequence[bool], *facts: Hashable) -> Hashable:
    """What a launch depends on: layouts, dtypes and devices of its tensors, and what is set for all calls. One object
    for equal ones.

    dynamic: of which tensors the number of rows is left out: a map, or the caller, knows it.
    """
    found: list[Hashable] = [facts, *global_settings()]
    wide, single = False, torch.float32
    for x, varies in zip(tensors, dynamic, strict=True):
        kind, shape = x.dtype, x.shape
        if kind is single:
            wide = True
        found += (shape[1:] if varies else shape, x.stride(), kind, x.get_device())
    if wide:
        found.append(kernels.float32_precision())
    key = tuple(found)
    # As cache.intern_key, without a call.
    return cache.INTERNED.get(key) or cache.INTERNED.keep(key, object())


def global_settings() -> tuple[Hashable, ...]:
    """What is set for all calls, but for how float32 is multiplied."""
    return deterministic(), kernels.ledger().generation, kernels.tuning_mode()


def product_signature(tensors: Sequence[Tensor], finish: EpilogueSignature) -> Hashable:
    """The signature of a convolution or linear map of (features, weight, operands of the epilogue...)."""
    return call_signature(tensors, has_dynamic_rows(finish), finish)


@lru_cache(maxsize=256)
def has_dynamic_rows(finish: EpilogueSignature) -> tuple[bool, ...]:
    """Of which of (features, weight, operands of the epilogue...) the number of rows varies between calls."""
    return (True, False, *[name == RESIDUAL for name in finish.names])


def residual_matches(tensors: Sequence[Tensor], finish: EpilogueSignature, shape: tuple[int, ...]) -> bool:
    """True if a residual, of whose rows no signature tells, has the shape of the result."""
    names = finish.names
    # It is the last of all.
    return not names or names[-1] != RESIDUAL or tensors[-1].shape == shape


def rows_of(tensors: Sequence[Tensor]) -> list[int]:
    """Number of rows of each tensor."""
    return [x.shape[0] if x.ndim else 1 for x in tensors]


def row_strides(tensors: Sequence[Tensor], dynamic: Sequence[bool]) -> list[int]:
    """Entries between the rows of each tensor, 0 where all calls of a signature have the same number of them."""
    return [x.stride(0) if varies and x.ndim else 0 for x, varies in zip(tensors, dynamic, strict=True)]


class ArgumentLayout:
    """Where what a call takes belongs among the arguments of a kernel.

    result: position of the result; workspace: of the counters and the partial sums, None without; segments: (position,
    name) of arrays of segments; arrays: (position, array of the map); tensors: (position, tensor of the call).
    segmented: the array of the map whose segments are taken, None without; -1: it is none of the map.
    """

    __slots__ = ("arrays", "result", "segmented", "segments", "tensors", "workspace")

    def __init__(self, kernel: GeneratedKernel, arrays: Mapping[str, int], tensors: Mapping[str, int]) -> None:
        """arrays, tensors: which array of the map, or tensor of the call, each operand is."""
        own = {kind: place for place, kind, _ in kernel.slots}
        sums, counters = WORKSPACE
        self.result = own["result"]
        self.workspace = (own[counters], own[sums]) if counters in own else None
        self.segments = tuple([(place, name) for place, kind, name in kernel.slots if kind == "segment"])
        operands = [(place, name) for place, kind, name in kernel.slots if kind in ("operand", "before")]
        self.arrays = tuple([(place, arrays[name]) for place, name in operands if name in arrays])
        self.tensors = tuple([(place, tensors[name]) for place, name in operands if name not in arrays])
        self.segmented = None if kernel.segmented is None else arrays.get(kernel.segmented, -1)


class BoundCall(NamedTuple):
    """A compiled kernel with the arguments of a call over a map, but for the addresses of the call's tensors, of its
    result and of its workspace.

    values: the arguments; layout: where the missing ones belong; programs: how many run; shape: of the result; needs:
    counters and bytes of workspace, None without; kept: what holds the memory of segments. The map's arrays are held by
    the map.
    """

    executor: KernelExecutor
    kernel: CompiledKernel
    layout: ArgumentLayout
    programs: int
    values: list[Any]
    needs: tuple[int, int] | None
    shape: tuple[int, ...]
    device: torch.device
    kept: Any

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The result; None where a tensor is not aligned to 16 bytes, or the device is not the current one."""
        device, executor = self.device, self.executor
        if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
            return None
        out = executor.allocate_output(tensors[0], self.shape)
        bits = result = out.data_ptr()
        addresses = {}
        for _, which in self.layout.tensors:
            addresses[which] = address = tensors[which].data_ptr()
            bits |= address
        if bits & 15:
            return None
        # Held until the kernel is under way.
        shared = None if self.needs is None else workspace(*self.needs, device)
        self.launch(addresses, result, shared)
        return out if out.dtype is executor.dtype else out.to(executor.dtype)

    def launch(self, addresses: Any, result: int, shared: Workspace | None) -> None:
        """Start the kernel on the current device. addresses: of the call's tensors, aligned, by number; shared:
        workspace of at least the size that the call needs."""
        values, layout = self.values.copy(), self.layout
        values[layout.result] = result
        for place, which in layout.tensors:
            values[place] = addresses[which]
        if layout.workspace is not None and shared is not None:
            counters, sums = layout.workspace
            values[counters], values[sums] = shared.addresses
        self.kernel(self.programs, values, self.device.index or 0)


class CallTemplate:
    """Calls of one signature over maps with arrays of one signature, of whatever sizes.

    family: their kernels; other: the template of the same calls at sizes for which the result is accumulated, or is
    not, unlike here.
    """

    __slots__ = ("_arrays", "_layouts", "_rows", "_strides", "_tensors", "_widest", "executor", "family", "other")

    def __init__(
        self,
        family: TileFamily,
        executor: KernelExecutor,
        arrays: Mapping[str, int],
        tensors: Mapping[str, int],
        strides: Sequence[int],
    ) -> None:
        """arrays: which array of a map each bound operand is; tensors: which tensor of a call each other one is;
        strides: between the rows of each tensor of a call, 0 where all calls have the same number of rows."""
        self.family, self.executor, self._arrays, self._tensors = family, executor, arrays, tensors
        self.other: CallTemplate | None = None
        self._layouts: dict[GeneratedKernel, ArgumentLayout] = {}
        # Sizes are taken from (rows of the result, of the map's arrays, of the call's tensors).
        self._rows = [(0, 0) if not n else (1, arrays[n]) if n in arrays else (2, tensors[n]) for n in family.names]
        self._strides, self._widest = tuple(strides), max(*strides, executor.row_stride, 1)

    def instantiate(self, on: BoundMap, rows: Sequence[int], shape: tuple[int, ...]) -> BoundCall | None:
        """The call over a map. rows: of each tensor; shape: of the result. None where there is nothing to run, where
        addresses need 64 bits or are not aligned to 16 bytes, where Triton interprets kernels, and where the planner
        has to choose."""
        if on.needs_int64 or not on.is_aligned:
            return None
        sizes = self._sizes(on, rows, shape)
        # The product with the widest stride is a bound for all.
        if max(sizes) * self._widest >= INT32_LIMIT and self._needs_int64(rows, shape):
            return None
        family = self.family
        kernel = family.at(sizes)
        if kernel is None:
            return None if self.other is None else self.other.instantiate(on, rows, shape)
        layout = self._layouts.get(kernel)
        if layout is None:
            layout = self._layouts.setdefault(kernel, ArgumentLayout(kernel, self._arrays, self._tensors))
        segments: SegmentArgs | None = None
        if layout.segmented is not None:
            segments = on.segments(layout.segmented, kernel.segment_count(sizes), kernel.segment_rule)
            if segments is None:
                return None
        everything = (0 if segments is None else segments.count, *sizes)
        programs, values = kernel.programs(everything), kernel.arguments(everything)
        if not programs:
            return None
        device = family.device
        compiled = kernel.only.get(device.index or 0) or kernel.binary(values, everything, device)
        if compiled is None:
            return None
        addresses = on.addresses
        for place, which in layout.arrays:
            values[place] = addresses[which]
        kept = None
        if segments is not None:
            addresses, kept = segments.addresses, segments.kept
            for place, name in layout.segments:
                values[place] = addresses[name]
        needs = None if layout.workspace is None else (programs, kernel.workspace_bytes(programs))
        return BoundCall(self.executor, compiled, layout, programs, values, needs, shape, device, kept)

    def compilation(self, on: BoundMap, rows: Sequence[int], shape: tuple[int, ...]) -> Callable[[], object] | None:
        """What compiles the kernel of `instantiate` with these; None if it is compiled."""
        sizes = self._sizes(on, rows, shape)
        return None if self.family.is_compiled(sizes) else partial(self.family.at, sizes, True)

    def _sizes(self, on: BoundMap, rows: Sequence[int], shape: tuple[int, ...]) -> list[int]:
        """Numbers of rows in the order of the family's operands."""
        every = shape[:1] or (1,), on.rows, rows
        return [every[of][n] for of, n in self._rows]

    def _needs_int64(self, rows: Sequence[int], shape: tuple[int, ...]) -> bool:
        products = map(operator.mul, rows, self._strides)
        return self.executor.needs_int64(shape) or max(products, default=0) >= INT32_LIMIT


TEMPLATES: BoundedCache[CallTemplate] = BoundedCache(2048)


def find_template(signature: Hashable, on: BoundMap) -> CallTemplate | None:
    """The template of calls of a signature over maps like this."""
    return TEMPLATES.get((signature, on.signature))


class MapCall(NamedTuple):
    """A call over a map. on: the map's arrays; rows, strides: as rows_of and row_strides give them, the latter for a
    call whose template is kept; shape: of the result."""

    signature: Hashable
    on: BoundMap
    rows: Sequence[int]
    shape: tuple[int, ...]
    strides: Sequence[int] = ()

    @property
    def template(self) -> CallTemplate | None:
        """The template of calls like it."""
        return TEMPLATES.get((self.signature, self.on.signature))

    def template_like(self, kernel: BoundExecutor) -> CallTemplate | None:
        """That of calls whose result is accumulated, or not, as a kernel does it."""
        known, adds = self.template, kernel.executor.splits > 1
        every = () if known is None else (known, known.other)
        return next((one for one in every if one is not None and (one.executor.splits > 1) == adds), None)

    def keep_template(
        self, family: TileFamily, kernel: BoundExecutor, tensors: Mapping[str, int]
    ) -> CallTemplate | None:
        """Keep the template of calls like it. family: the kernels that it starts; kernel: it with the map's arrays
        bound; tensors: which of the call's tensors each other operand is."""
        places, bound = {id(x): n for n, x in enumerate(self.on.arrays)}, kernel.bound_operands
        if self.on.needs_int64 or not all([id(x) in places for x in bound.values()]):
            return None
        arrays = {name: places[id(x)] for name, x in bound.items()}
        template, known = CallTemplate(family, kernel.executor, arrays, tensors, self.strides), self.template
        if known is not None and (known.executor.splits > 1) != (kernel.executor.splits > 1):
            known.other = template
            return template
        return TEMPLATES.keep((self.signature, self.on.signature), template)

    def instantiate(self) -> BoundCall | None:
        """The call, as one like it was; None if there is none, and see CallTemplate.instantiate."""
        template = self.template
        return None if template is None else template.instantiate(self.on, self.rows, self.shape)


ARRAYS_READ: BoundedCache[tuple[int, ...] | None] = BoundedCache(1024)
"""By signature and key of MapArrays: where the arrays are that the kernel of a call takes, which alone matter for its
template; None: the call is several kernels."""


def keep_arrays_read(signature: Hashable, arrays: MapArrays, kernel: BoundExecutor | None) -> BoundMap | None:
    """The arrays that the kernel of a call takes, kept for calls over other maps. kernel: None for several."""
    places = None if kernel is None else arrays.places(kernel.bound_operands.values())
    ARRAYS_READ.keep((signature, arrays.key), places)
    return None if places is None else arrays.bound(places)


def find_arrays_read(signature: Hashable, arrays: MapArrays) -> BoundMap | None:
    """The arrays that calls of a signature take, as one over another map did; None where that is not known, and for
    several kernels."""
    places = ARRAYS_READ.get((signature, arrays.key))
    return None if places is None else arrays.bound(places)


def product_call(tensors: Sequence[Tensor], finish: EpilogueSignature, on: BoundMap, rows: int) -> MapCall:
    """A convolution or linear map with `rows` results. tensors: (features, weight, operands of the epilogue...)."""
    dynamic = has_dynamic_rows(finish)
    shape = rows, tensors[1].shape[0]
    signature = call_signature(tensors, dynamic, finish)
    return MapCall(signature, on, rows_of(tensors), shape, row_strides(tensors, dynamic))


def call_over(found: KernelMap | NoMap, signature: Hashable, rows: Sequence[int], columns: int) -> BoundCall | None:
    """The call of a signature over a map, or one over another map instantiated for it and kept; None if there is none.
    rows: of each tensor; columns: of the result."""
    calls, buffered = found.calls, found.buffered
    if buffered is not None:
        # Another stream may have bound it.
        buffered.pending_events.wait_for((signature, found.flipped))
    call = calls.get(signature)
    if call is None:
        on = bound_map(found)
        template = find_template(signature, on)
        call = None if template is None else template.instantiate(on, rows, (found.num_outputs, columns))
        if call is not None:
            keep_call(found, signature, call)
    return call


def keep_call(found: KernelMap | NoMap, signature: Hashable, call: BoundCall) -> None:
    """Keep a call with its map."""
    found.calls[signature] = call
    if found.buffered is not None:
        found.buffered.pending_events.register_derived((signature, found.flipped))


def run_product(tensors: Sequence[Tensor], found: KernelMap | NoMap, finish: EpilogueSignature) -> Tensor | None:
    """A convolution over a map, or a linear map, by a kernel of calls before; None where there is none, and where
    shapes do not fit. tensors: features, weight, operands of the epilogue; a plain call (ops.autograd)."""
    x, columns = tensors[0], tensors[1].shape[0]
    shape = found.num_outputs, columns
    if x.ndim != 2 or x.shape[0] != found.num_inputs or not residual_matches(tensors, finish, shape):
        return None
    dynamic = has_dynamic_rows(finish)
    signature = call_signature(tensors, dynamic, finish)
    call = found.calls.get(signature) if found.buffered is None else None
    if call is None:
        call = call_over(found, signature, rows_of(tensors), columns)
    return None if call is None else call(tensors)


Sizes = tuple[Mapping[str, Sequence[int]], tuple[int, ...]]
"""Shapes of all operands by name, and of the result."""


class BoundExecutor:
    """An executor with some operands bound: a step of a plan. Calls with other operands of layouts seen before are
    launches. at: the sizes, if they differ from those of the (resizable) executor."""

    def __init__(self, executor: KernelExecutor, bound_operands: Mapping[str, Tensor], at: Sizes | None = None) -> None:
        self.executor, self.bound_operands, self._at = executor, bound_operands, at
        self._shape = executor.bound.shape if at is None else at[1]
        layouts = [(name, x.stride(), x.dtype) for name, x in bound_operands.items()]
        self._in_fp32, self._layouts = any([kind is torch.float32 for *_, kind in layouts]), tuple(layouts)
        self._calls: BoundedCache[BoundCall] = BoundedCache(_MAX_CALLS)

    @cached_property
    def _sized(self) -> KernelExecutor:
        return self.executor if self._at is None else self.executor.with_sizes(*self._at)

    @cached_property
    def _arrays(self) -> BoundMap:
        """The bound operands as the arrays of a map."""
        arrays = [*self.bound_operands.values()]
        return BoundMap(arrays, MapSignature(None, [x.stride(0) if x.ndim else 0 for x in arrays]))

    def __call__(self, operands: Mapping[str, Tensor], before: Tensor | None = None) -> Tensor:
        """The result; operands: those that are not bound."""
        everything = {**self.bound_operands, **operands}
        if before is not None:
            return self._sized(everything, before)
        key = self._key(operands)
        call = self._calls.get(key) or self._instantiate(key, operands)
        if call is not None and (y := call([*(operands or everything).values()])) is not None:
            return y
        y = self._sized(everything)
        if call is None:
            self._keep_template(key, operands, self._sized.family(everything))
        return y

    def family(self, operands: Mapping[str, Tensor], was_run: bool = True) -> TileFamily | None:
        """The kernels of calls like one that was run, for all sizes; None for several kernels. was_run: False to make
        them for a call that was not; None where the tile is to be tuned first, too."""
        key = self._key(operands)
        known = self.executor.templates.get((self._layouts, key))
        if known is None and not was_run:
            family = self._sized.make_family({**self.bound_operands, **operands})
            known = self._keep_template(key, operands, family)
        return known and known.family

    def _keep_template(
        self, key: Hashable, operands: Mapping[str, Tensor], family: TileFamily | None
    ) -> CallTemplate | None:
        if family is None:
            return None
        arrays, tensors = ({name: n for n, name in enumerate(of)} for of in (self.bound_operands, operands))
        given = [*operands.values()]
        template = CallTemplate(family, self.executor, arrays, tensors, row_strides(given, [True] * len(given)))
        return self.executor.templates.keep((self._layouts, key), template)

    def _key(self, operands: Mapping[str, Tensor]) -> Hashable:
        """Key of a launch on operands like these."""
        kinds, in_fp32 = [], self._in_fp32
        for x in operands.values():
            kind = x.dtype
            in_fp32 |= kind is torch.float32
            # A compiled kernel belongs to one device.
            kinds += (x.stride(), kind, x.get_device())
        precision = self.executor.precision or (kernels.float32_precision() if in_fp32 else "")
        return (tuple(operands), kernels.ledger().generation, kernels.tuning_mode(), precision, *kinds)

    def _instantiate(self, key: Hashable, operands: Mapping[str, Tensor]) -> BoundCall | None:
        template = self.executor.templates.get((self._layouts, key))
        if template is None:
            return None
        call = template.instantiate(self._arrays, rows_of([*operands.values()]), self._shape)
        return call and self._calls.keep(key, call)


_MAX_CALLS = 64
"""Calls per executor with bound operands, one for each layout of the others and generation of tuned tiles."""
