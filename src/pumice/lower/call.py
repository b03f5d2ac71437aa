"""Cached launches of single-kernel calls over a kernel map, or over none (a linear map).

signature = call_signature(tensors, ...)   cache key: all that a launch depends on but row counts and addresses
call = found.calls.get(signature)          the launch cached with this map, or
     = MapCall(...).instantiate()          a template of a call over another map, bound to this map's sizes and arrays;
                                           without either a plan (lower.plan) is executed, and its kernel cached as both
call(tensors)                              fill in the addresses of tensors, and launch
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.coords import KernelMap
from pumice.lower import kernel as kernels
from pumice.lower.epilogue import NO_EPILOGUE, RESIDUAL, EpilogueSignature
from pumice.lower.kernel import KernelExecutor
from pumice.lower.maps import BoundMap, MapArrays, MapSignature, NoMap, bound_map
from pumice.lower.segments import SegmentArgs
from pumice.lower.tile_family import INT32_LIMIT, WORKSPACE, GeneratedKernel, TileFamily
from pumice.runtime import cache
from pumice.runtime.cache import BoundedCache
from pumice.runtime.launch import CompiledKernel
from pumice.runtime.repeat import NewTensor, OpenArguments, Repeated, RepeatedLaunch
from pumice.runtime.workspace import Workspace, workspace


def call_signature(tensors: Sequence[Tensor], dynamic: Sequence[bool], *facts: Hashable) -> Hashable:
    """The cache key of a launch, interned: layouts, dtypes and devices of the tensors, `facts`, and global settings.

    dynamic: for each tensor, True if its number of rows may vary between calls, and is left out.
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
    # cache.intern_key, inlined.
    return cache.INTERNED.get(key) or cache.INTERNED.keep(key, object())


deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
"""torch.are_deterministic_algorithms_enabled, in C."""


def global_settings() -> tuple[Hashable, ...]:
    """The global settings that launches depend on, except the precision of float32 products."""
    return deterministic(), kernels.ledger().generation, kernels.tuning_mode()


def product_signature(tensors: Sequence[Tensor], finish: EpilogueSignature) -> Hashable:
    """The signature of a convolution or linear map of (features, weight, operands of the epilogue...)."""
    return call_signature(tensors, has_dynamic_rows(finish), finish)


@lru_cache(maxsize=256)
def has_dynamic_rows(finish: EpilogueSignature) -> tuple[bool, ...]:
    """For each of (features, weight, operands of the epilogue...): True if its number of rows varies between calls."""
    return (True, False, *[name == RESIDUAL for name in finish.names])


def residual_matches(tensors: Sequence[Tensor], finish: EpilogueSignature, shape: tuple[int, ...]) -> bool:
    """True if the residual, if any, has the shape of the result: signatures leave out its number of rows."""
    names = finish.names
    # A residual is the last tensor.
    return not names or names[-1] != RESIDUAL or tensors[-1].shape == shape


def rows_of(tensors: Sequence[Tensor]) -> list[int]:
    """Number of rows of each tensor."""
    return [x.shape[0] if x.ndim else 1 for x in tensors]


def row_strides(tensors: Sequence[Tensor], dynamic: Sequence[bool]) -> list[int]:
    """The row stride of each tensor in elements, 0 if its number of rows is fixed by the signature."""
    return [x.stride(0) if varies and x.ndim else 0 for x, varies in zip(tensors, dynamic, strict=True)]


class ArgumentLayout:
    """Positions of the tensors of a call among the arguments of a kernel.

    result: of the result; workspace: of (counters, partial sums), or None; segments: (position, name) of segment
    arrays; arrays: (position, number of the map's array); tensors: (position, number of the call's tensor). segmented:
    number of the map's array whose segments the programs take, None without segments, -1 if it is not of the map.
    """

    __slots__ = ("arrays", "result", "segmented", "segments", "tensors", "workspace")
    segments: tuple[tuple[int, str], ...]
    arrays: tuple[tuple[int, int], ...]
    tensors: tuple[tuple[int, int], ...]

    def __init__(self, kernel: GeneratedKernel, arrays: Mapping[str, int], tensors: Mapping[str, int]) -> None:
        """arrays, tensors: number of the map's array, or of the call's tensor, by operand name."""
        own = {kind: place for place, kind, _ in kernel.slots}
        sums, counters = WORKSPACE
        self.result: int = own["result"]
        self.workspace: tuple[int, int] | None = (own[counters], own[sums]) if counters in own else None
        self.segments = tuple([(place, name) for place, kind, name in kernel.slots if kind == "segment"])
        operands = [(place, name) for place, kind, name in kernel.slots if kind in ("operand", "before")]
        self.arrays = tuple([(place, arrays[name]) for place, name in operands if name in arrays])
        self.tensors = tuple([(place, tensors[name]) for place, name in operands if name not in arrays])
        self.segmented: int | None = None if kernel.segmented is None else arrays.get(kernel.segmented, -1)


class BoundCall(NamedTuple):
    """A compiled kernel bound to a map: only the addresses of the call's tensors, result and workspace are missing.

    values: the arguments; layout: positions of the missing ones; programs: grid size; shape: of the result; needs:
    (counters, bytes) of workspace, or None; kept: keeps the segment arrays alive. The map keeps its own arrays alive.
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
        """Launch and return the result; None if a tensor is not 16-byte aligned or the device is not current."""
        out = self.executor.allocate_output(tensors[0], self.shape)
        if not self._into(out, tensors):
            return None
        return out if out.dtype is self.executor.dtype else out.to(self.executor.dtype)

    def add_to(self, out: Tensor, tensors: Sequence[Tensor]) -> bool:
        """Add the result to `out` in place; False, with `out` unchanged, if the kernel does not add to such a tensor,
        or as __call__ returns None."""
        fits = self.executor.adds and out.dtype is self.executor.writes and out.shape == self.shape
        return fits and out.is_contiguous() and self._into(out, tensors)

    def _into(self, out: Tensor, tensors: Sequence[Tensor]) -> bool:
        """Launch; False if a tensor is not 16-byte aligned or the device is not current."""
        device = self.device
        if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
            return False
        bits = result = out.data_ptr()
        addresses = {}
        for _, which in self.layout.tensors:
            addresses[which] = address = tensors[which].data_ptr()
            bits |= address
        if bits & 15:
            return False
        # Keeps the memory until the launch.
        shared = None if self.needs is None else workspace(*self.needs, device)
        self.launch(addresses, result, shared)
        return True

    def repeated(self) -> Repeated:
        """This call as a function of its tensors, while the arrays of the map are alive."""
        executor, layout = self.executor, self.layout
        shared = OpenArguments(layout.tensors, layout.result, layout.workspace or (-1, -1), self.needs)
        result = NewTensor(self.shape, executor.writes, self.device, not executor.writes_all)
        launch = RepeatedLaunch(self.kernel.prepared(self.programs, self.values), shared, result, self.kept)
        if executor.writes is executor.dtype:
            return launch
        return lambda tensors: None if (y := launch(tensors)) is None else y.to(executor.dtype)

    def launch(self, addresses: Any, result: int, shared: Workspace | None) -> None:
        """Launch on the current device. addresses: of the call's tensors, 16-byte aligned, by number; shared: workspace
        of at least the size `needs`."""
        values, layout = self.values.copy(), self.layout
        values[layout.result] = result
        for place, which in layout.tensors:
            values[place] = addresses[which]
        if layout.workspace is not None and shared is not None:
            counters, sums = layout.workspace
            values[counters], values[sums] = shared.addresses
        self.kernel(self.programs, values, self.device.index or 0)


class CallTemplate:
    """A call of one signature over maps of one MapSignature, with the sizes and the map's arrays left open.

    family: its kernels; other: the template for sizes where split-K is used if it is not here, or the reverse.
    """

    __slots__ = ("_arrays", "_layouts", "_rows", "_strides", "_tensors", "_widest", "executor", "family", "other")
    family: TileFamily
    executor: KernelExecutor

    def __init__(
        self,
        family: TileFamily,
        executor: KernelExecutor,
        arrays: Mapping[str, int],
        tensors: Mapping[str, int],
        strides: Sequence[int],
    ) -> None:
        """arrays: number of the map's array by name of a bound operand; tensors: number of the call's tensor by name of
        another operand; strides: row_strides of the call's tensors."""
        self.family, self.executor, self._arrays, self._tensors = family, executor, arrays, tensors
        self.other: CallTemplate | None = None
        self._layouts: dict[GeneratedKernel, ArgumentLayout] = {}
        # By operand, the source of its row count: (0 result, 1 map's arrays, 2 call's tensors; number).
        self._rows = [(0, 0) if not n else (1, arrays[n]) if n in arrays else (2, tensors[n]) for n in family.names]
        self._strides, self._widest = tuple(strides), max(*strides, executor.row_stride, 1)

    def instantiate(self, on: BoundMap, rows: Sequence[int], shape: tuple[int, ...]) -> BoundCall | None:
        """The call bound to a map. rows: of each tensor; shape: of the result. None if the planner must run the call:
        empty result, 64-bit or unaligned addresses, segments that need several kernels, interpreted kernels, or a tile
        that has to be tuned."""
        if on.needs_int64 or not on.is_aligned:
            return None
        sizes = self._sizes(on, rows, shape)
        # A cheap upper bound before the exact test.
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
        """A task that compiles the kernel of `instantiate` for these arguments; None if it is compiled."""
        sizes = self._sizes(on, rows, shape)
        return None if self.family.is_compiled(sizes) else partial(self.family.at, sizes, True)

    def _sizes(self, on: BoundMap, rows: Sequence[int], shape: tuple[int, ...]) -> list[int]:
        """Row counts in the order of the family's operands."""
        every = shape[:1] or (1,), on.rows, rows
        return [every[of][n] for of, n in self._rows]

    def _needs_int64(self, rows: Sequence[int], shape: tuple[int, ...]) -> bool:
        products = map(operator.mul, rows, self._strides)
        return self.executor.needs_int64(shape) or max(products, default=0) >= INT32_LIMIT


TEMPLATES: BoundedCache[CallTemplate] = BoundedCache(2048)


def find_template(signature: Hashable, on: BoundMap) -> CallTemplate | None:
    """The template of a signature for maps with this map's signature, or None."""
    return TEMPLATES.get((signature, on.signature))


class MapCall(NamedTuple):
    """Signature and sizes of a call over a map. on: the map's arrays; rows: rows_of the tensors; shape: of the result;
    strides: row_strides of the tensors, needed by keep_template only."""

    signature: Hashable
    on: BoundMap
    rows: Sequence[int]
    shape: tuple[int, ...]
    strides: Sequence[int] = ()

    @property
    def template(self) -> CallTemplate | None:
        """The stored template, or None."""
        return TEMPLATES.get((self.signature, self.on.signature))

    def template_like(self, kernel: BoundExecutor) -> CallTemplate | None:
        """The stored template that uses split-K exactly if `kernel` does, or None."""
        known, adds = self.template, kernel.executor.splits > 1
        every = () if known is None else (known, known.other)
        return next((one for one in every if one is not None and (one.executor.splits > 1) == adds), None)

    def keep_template(
        self, family: TileFamily, kernel: BoundExecutor, tensors: Mapping[str, int]
    ) -> CallTemplate | None:
        """Store a template of this call. family: its kernels; kernel: executor with the map's arrays bound; tensors:
        number of the call's tensor by name of another operand. None if the kernel binds other tensors."""
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
        """The call by the stored template; None without one, or as in CallTemplate.instantiate."""
        template = self.template
        return None if template is None else template.instantiate(self.on, self.rows, self.shape)


ARRAYS_READ: BoundedCache[tuple[int, ...] | None] = BoundedCache(1024)
"""By (signature, MapArrays.key): positions of the arrays that the call's kernel reads, on which alone its template
depends; None if the call is several kernels."""


def keep_arrays_read(signature: Hashable, arrays: MapArrays, kernel: BoundExecutor | None) -> BoundMap | None:
    """Record which arrays the kernel of a call reads, and return these. kernel: None if the call is several kernels."""
    places = None if kernel is None else arrays.places(kernel.bound_operands.values())
    ARRAYS_READ.keep((signature, arrays.key), places)
    return None if places is None else arrays.bound(places)


def find_arrays_read(signature: Hashable, arrays: MapArrays) -> BoundMap | None:
    """The arrays that calls of a signature read, by the record of an earlier call; None without one, and for several
    kernels."""
    places = ARRAYS_READ.get((signature, arrays.key))
    return None if places is None else arrays.bound(places)


def product_call(tensors: Sequence[Tensor], finish: EpilogueSignature, on: BoundMap, rows: int) -> MapCall:
    """The MapCall of a product with `rows` result rows. tensors: (features, weight, operands of the epilogue...)."""
    dynamic = has_dynamic_rows(finish)
    shape = rows, tensors[1].shape[0]
    signature = call_signature(tensors, dynamic, finish)
    return MapCall(signature, on, rows_of(tensors), shape, row_strides(tensors, dynamic))


def call_over(found: KernelMap | NoMap, signature: Hashable, rows: Sequence[int], columns: int) -> BoundCall | None:
    """The call cached with a map, or else instantiated from the signature's template and cached; None without a
    template. rows: of each tensor; columns: of the result."""
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
    """Cache a call with its map."""
    found.calls[signature] = call
    if found.buffered is not None:
        found.buffered.pending_events.register_derived((signature, found.flipped))


def run_product(tensors: Sequence[Tensor], found: KernelMap | NoMap, finish: EpilogueSignature) -> Tensor | None:
    """The result of a convolution or linear map by a cached launch or template; None without one, or if shapes do not
    match. tensors: features, weight, operands of the epilogue, of a plain call (ops.autograd.is_plain_call)."""
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


def add_product(tensors: Sequence[Tensor], found: KernelMap, out: Tensor) -> bool:
    """Add a convolution to `out` in place by a launch cached with the map; False, with `out` unchanged, without one.
    tensors: (features, weight) of a plain call."""
    if tensors[0].shape[0] != found.num_inputs:
        return False
    call = found.calls.get(call_signature(tensors, has_dynamic_rows(NO_EPILOGUE), NO_EPILOGUE))
    return call is not None and call.add_to(out, tensors)


Sizes = tuple[Mapping[str, Sequence[int]], tuple[int, ...]]
"""Shapes of all operands by name, and of the result."""


class BoundExecutor:
    """An executor with some operands bound, as a step of a plan. It caches a launch per layout of the other operands.
    at: the sizes, if they differ from those of the (resizable) executor."""

    executor: KernelExecutor
    bound_operands: Mapping[str, Tensor]

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
        """The result. operands: those that are not bound."""
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

    def repeated(self, operands: Mapping[str, Tensor]) -> Repeated:
        """A call of the executor that was run as a function of the operands that are not bound, of the same layouts."""
        key, names = self._key(operands), tuple(operands)
        if (self._layouts, key) not in self.executor.templates:
            self._keep_template(key, operands, self._sized.family({**self.bound_operands, **operands}))
        call = self._instantiate(key, operands)
        if call is not None:
            return call.repeated()
        return lambda tensors: self(dict(zip(names, tensors, strict=True)))

    def family(self, operands: Mapping[str, Tensor], was_run: bool = True) -> TileFamily | None:
        """The kernel family of a call that was run; None for several kernels. was_run: False to create the family of a
        call that was not run; None also if its tile has to be tuned first."""
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
        """Cache key of a launch: layouts, dtypes, devices and settings."""
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
"""Cached launches of a BoundExecutor, one per layout of the other operands and generation of tuned tiles."""
