"""A GPU that is none: kernels that are started compute, in plain torch, on memory whose addresses they are given."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any

import pytest
import torch

from pumice.engine import stretch, train_pass
from pumice.language.nodes import accesses_of, indices_of
from pumice.lower import call, maps, norm, plan
from pumice.lower import kernel as kernels
from pumice.ops import autograd
from pumice.schedule.tuned_tiles import Ledger

prepare = import_module("pumice.ops.prepare")
STREAM = 7
TENSORS = ("operand", "result")
ADDRESSES = (*TENSORS, "before", "segment", "room", "waiting")
MOVING = {("operand", "x"), ("operand", "*residual"), ("result", ""), ("room", ""), ("waiting", "")}
SIDES = {"x": "inputs", "dx": "inputs", "O": "outputs", "grad": "outputs"}
"""Of a convolution and its gradients: what has rows for the inputs of a map, and for its outputs."""


@dataclass(frozen=True)
class Started:
    """A kernel that was started.

    told: its name, how many programs, and all arguments but where features, result and what it shares lie; bytes: that
    it reads and writes, where they begin and how many, by name, the result being "".
    """

    told: tuple
    bytes: dict[str, tuple[int, int]]
    by_address: bool


@dataclass(frozen=True)
class Form:
    """The arrays of a map in one form: where they lie, and how many rows there are on each side; known: indices that
    were read from them."""

    places: dict[str, int]
    arrays: dict[str, weakref.ref]
    inputs: int
    outputs: int
    known: dict = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return all(ref() is not None for ref in self.arrays.values())


@dataclass(frozen=True)
class Made:
    """What a source was made of, whether it adds to what lies in the result, and what is behind its product."""

    statement: object
    adds: bool
    finish: object
    room: object
    segment: str


@dataclass
class Gpu:
    """started: all kernels of statements, norms: names of those of norms and whether they were begun by addresses.
    launches: kernels of both kinds in the order in which they were started, each with what it is of, programs and
    arguments by name but addresses.

    passes, back: of each stretch in training, and of its gradients, how many products it has.

    sources: of each what it was made of; forms: of the place of each array of a map; rooms: how much is at a place that
    programs share; own: what is one thread's. caches, loaded, of_norms: what is known of kernels, for as long as it is.
    """

    started: list[Started] = field(default_factory=list)
    norms: list[tuple[str, bool]] = field(default_factory=list)
    launches: Any = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    back: list[int] = field(default_factory=list)
    sources: dict = field(default_factory=dict)
    forms: dict[tuple[str, int], list[Form]] = field(default_factory=dict)
    rooms: dict[int, int] = field(default_factory=dict)
    own: threading.local = field(default_factory=threading.local)
    caches: list[dict] = field(default_factory=lambda: [{} for _ in CACHES])
    loaded: dict = field(default_factory=dict)
    of_norms: list = field(default_factory=lambda: [lru_cache(1024)(each.__wrapped__) for each in OF_NORMS])

    def clear(self) -> None:
        for each in (self.started, self.norms, self.launches, self.passes, self.back):
            each.clear()

    def form_of(self, places: dict[str, int], rows: dict[str, int]) -> Form:
        """That whose arrays lie there; rows: of what has some for its sides."""
        known = [form for item in places.items() for form in self.forms.get(item, ())]
        fits = [form for form in known if form.places.items() >= places.items()]
        assert fits, "arrays of no map, or of several"
        alive = [form for form in fits if form.alive]
        assert alive, "the arrays of this map are gone"
        # A map and its transpose share arrays.
        fits = [form for form in alive if all(getattr(form, SIDES[name]) == count for name, count in rows.items())]
        assert fits, "other rows than the map has"
        return fits[-1]


class Kernel:
    """What Triton's JIT function is to the launcher."""

    def __init__(self, gpu: Gpu, source) -> None:
        self.gpu, self.source = gpu, source

    def __getitem__(self, grid):
        def launch(*values, num_warps, num_stages):
            compiled = Compiled(self, values, {"warps": num_warps, "stages": num_stages})
            plainly = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
            compiled.begin(grid[0], plainly, False)
            return compiled

        return launch

    def warmup(self, *values, grid, **options):
        assert grid == (1,) and all(v.is_meta for v in values if isinstance(v, torch.Tensor))
        return Compiled(self, values, {"warps": options["num_warps"], "stages": options["num_stages"]})


class Begun:
    """What is begun with addresses, on the current stream."""

    function, packed_metadata = "function", "packed"

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *values) -> None:
        assert (y, z, stream, function, packed) == (1, 1, STREAM, self.function, self.packed_metadata)
        self.begin(x, values, True)

    def __getitem__(self, grid):
        raise AssertionError("nobody profiles")

    def begin(self, programs: int, values, by_address: bool) -> None:
        # Neither autocast nor autograd hears of what a kernel does.
        with torch._C._DisableAutocast(), torch.no_grad():
            self.compute(programs, values, by_address)


class Compiled(Begun):
    """What Triton's launch gives. Dtypes and layouts are those of the tensors that it was made for; rows, which are
    arguments, are not."""

    def __init__(self, kernel: Kernel, values, options: dict[str, int]) -> None:
        self.kernel, self.layouts, self.options = kernel, {}, options
        for argument, value in zip(kernel.source.arguments, values, strict=True):
            if argument.kind in TENSORS:
                self.layouts[argument.name] = value.dtype, value.shape[1:], value.stride(), value.shape[0]
        # Triton makes a variant for what is aligned, and another for what is not.
        self.aligned = [isinstance(v, torch.Tensor) and v.data_ptr() % 16 == 0 for v in values]

    def compute(self, programs: int, values, by_address: bool) -> None:
        source, gpu = self.kernel.source, self.kernel.gpu
        assert programs > 0 and not any(v is None for v in values)
        assert not any(v % 16 for v, aligned in zip(values, self.aligned, strict=True) if aligned), "not aligned"
        sizes = {(a.kind, a.name, a.axis): v for a, v in zip(source.arguments, values, strict=True)}
        made = gpu.sources[source]
        finish, statement = made.finish, made.statement
        accesses = {a.name: a for a in accesses_of(*statement.terms)} | {"": statement.target}
        found, touched = {}, {}
        for name, (dtype, tail, strides, fixed) in self.layouts.items():
            if name.startswith("map_"):
                continue
            address = sizes["operand" if name else "result", name, 0]
            like = "" if name == "*residual" else name
            bare = accesses[like].indices[0].bare if like in accesses else None
            shape = sizes.get(("size", like, 0), sizes.get(("extent", bare, 0), fixed)), *tail
            strides = [sizes.get(("stride", name, n), s) for n, s in enumerate(strides)]
            found[name], touched[name] = at(address, dtype, shape, strides)
        apart = [name for name, x in found.items() if name and not side_by_side(x, found[""])]
        nowhere_read([touched[""]], [touched[name] for name in apart])
        begin, length = touched[""]
        rooms = [(t.data_ptr(), t.untyped_storage().nbytes()) for t in getattr(gpu.own, "made", [])]
        inside = [first <= begin and begin + length <= first + more for first, more in rooms]
        assert not rooms or any(inside), "what is written does not fit"
        if ("waiting", "", 0) in sizes:
            assert gpu.rooms[sizes["waiting", "", 0]] >= 4 * programs, "too few counters"
            lists = at(sizes["segment", "pieces", 0], torch.int32, (sizes["extent", made.segment, 0],), (1,))
            if int(lists[0].max()) > 1:
                assert gpu.rooms[sizes["room", "", 0]] >= made.room(programs), "too little room"
        places = {name[4:]: sizes["operand", name, 0] for name in self.layouts if name.startswith("map_")}
        operands = {name: t.float() for name, t in found.items() if name and not name.startswith("*")}
        if finish.weight_parts:
            # One behind another.
            w, begins = found["w"], range(sizes["operand", "w", 0], 1 << 63, found["w"].nbytes)
            parts = [at(begin, w.dtype, w.shape, w.stride())[0] for begin in begins[: finish.weight_parts]]
            operands["w"] = torch.stack(parts).float().sum(0)
        if places:
            rows = {name or statement.target.name: len(t) for name, t in found.items()}
            form = gpu.form_of(places, {name: count for name, count in rows.items() if name in SIDES})
            operands |= {f"map_{local}": ref() for local, ref in form.arrays.items()}
        y, written = computed(statement, operands, found[""].shape, form.known if places else {})
        more = {name[1:]: t.float() for name, t in found.items() if name.startswith("*")}
        y = y - more["mean"] if "mean" in more else y
        y = y * torch.rsqrt(more["variance"] + finish.eps) if "variance" in more else y
        y = y * more["scale"] if "scale" in more else y
        y = y + more["shift"] if "shift" in more else y
        y = y + more["residual"] if "residual" in more else y
        act = {"": lambda y: y, "relu": torch.relu, "silu": torch.nn.functional.silu}[finish.activation]
        assert {f"*{name}" for name in more} == {*finish.names}
        out = found[""]
        out.copy_(out + y if made.adds else torch.where(written, act(y), out))
        told = [None if (a.kind, a.name) in MOVING else v for a, v in zip(source.arguments, values, strict=True)]
        one = Started((source.text, programs, *told), touched, by_address)
        gpu.started.append(one)
        names = {a.variable: v for a, v in zip(source.arguments, values, strict=True) if a.kind not in ADDRESSES}
        gpu.launches.append((source, programs, names | self.options))


def computed(statement, operands: dict[str, torch.Tensor], shape, known) -> tuple[torch.Tensor, torch.Tensor]:
    """What a statement of one term gives, and which of it is written: of operands by name, in plain torch.

    known: indices of these arrays that were read before.
    """
    ((term,), ranges) = statement.terms, dict(statement.ranges)
    assert term.coefficient == 1 and not statement.accumulate and not ranges
    letters = {}

    def own(name):
        return letters.setdefault(name, chr(ord("a") + len(letters)))

    def values(array) -> tuple[torch.Tensor, list[str]]:
        """Of an array of indices, and the indices that it runs over; -1 where there is none."""
        value = operands[array.name].long()
        (axis, read), *more = [(n, e) for n, e in enumerate(array.indices) if e.bare is None] or [(0, None)]
        if read is None:
            return value, [e.bare for e in array.indices]
        ((coefficient, inner),) = read.terms
        assert not more and coefficient == 1 and axis == 0
        first, names = values(inner)
        assert not first.numel() or (int(first.min()) >= 0 and int(first.max()) < len(value))
        return value[first], [*names, *(e.bare for e in array.indices[1:])]

    def placed(access, extents):
        """(axis, where along it, its indices) of the one axis of an access that is no index; and the other indices."""
        names = [e.bare for e in access.indices]
        if None not in names:
            return None, names
        axis = names.index(None)
        key = access.indices[axis], extents[axis]
        if key not in known:
            assert names.count(None) == 1 and not access.indices[axis].constant
            ((coefficient, array),) = access.indices[axis].terms
            assert coefficient == 1
            where, over = values(array)
            assert not where.numel() or int(where.max()) < extents[axis], "an index is outside"
            flat = where.flatten()
            there = (flat >= 0).nonzero()[:, 0]
            known[key] = where.shape, torch.where(flat < 0, extents[axis], flat), (there, flat[there]), over
        return (axis, *known[key]), names

    factors, inputs = [], []
    for access in term.factors:
        value = operands[access.name]
        place, names = placed(access, value.shape)
        if place is not None:
            axis, sizes, flat, _, over = place
            # What is nowhere is 0.
            longer = torch.cat([value, torch.zeros_like(value.narrow(axis, 0, 1))], axis)
            value = longer.index_select(axis, flat).unflatten(axis, sizes)
            names[axis : axis + 1] = over
        factors.append(value)
        inputs.append("".join(map(own, names)))
    place, names = placed(statement.target, shape)
    over = names if place is None else [*names[: place[0]], *place[-1], *names[place[0] + 1 :]]
    assert {*over} <= {name for access in (*term.factors, statement.target) for name in indices_of(access)}
    y = torch.einsum(f"{','.join(inputs)}->{''.join(map(own, over))}", *factors)
    if place is None:
        return y, torch.ones_like(y, dtype=torch.bool)
    axis, _, _, (there, rows), own_names = place
    out, written = y.new_zeros(shape), torch.zeros(shape[axis], dtype=torch.bool)
    out.index_add_(axis, rows, y.flatten(axis, axis + len(own_names) - 1).index_select(axis, there))
    ((_, array),) = statement.target.indices[axis].terms
    every = operands[array.name].long().flatten()
    # Programs of tiles without entries write zeros.
    written[every[every >= 0]] = True
    return out, written.view([-1 if n == axis else 1 for n in range(len(shape))])


def nowhere_read(written, read) -> None:
    """That what is written is apart from what is read: (begin, bytes) of each."""
    for first, more in written:
        for begin, length in read:
            assert begin + length <= first or first + more <= begin, "what is read lies where the result does"


def side_by_side(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether they are other columns of the same rows."""
    if x.ndim != 2 or y.ndim != 2 or x.stride() != y.stride() or x.dtype != y.dtype:
        return False
    row = x.stride(0) * x.itemsize
    away = (y.data_ptr() - x.data_ptr()) % row if row else 0
    return x.shape[1] * x.itemsize <= away <= row - y.shape[1] * x.itemsize


class OfNorm:
    """What Triton's JIT function is to pumice.lower.norm."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def __getitem__(self, grid):
        def launch(*values, num_warps):
            compiled = CompiledNorm(self, values)
            plainly = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
            compiled.begin(grid[0], plainly, False)
            return compiled

        return launch

    def warmup(self, *values, grid, num_warps):
        assert grid == (1,) and all(v.is_meta for v in values if isinstance(v, torch.Tensor))
        return CompiledNorm(self, values)


class CompiledNorm(Begun):
    """One of the kernels of pumice.lower.row_kernels, for tensors of certain dtypes, and constants."""

    def __init__(self, kernel: OfNorm, values) -> None:
        self.kernel, numbers = (
            kernel,
            {"moments": 2, "products": 2, "gradient": 1, "by_statistics": 1}.get(kernel.name, 0),
        )
        self.dtypes = [v.dtype for v in values if isinstance(v, torch.Tensor)]
        self.constants = values[len(self.dtypes) + numbers :]
        self.aligned = [isinstance(v, torch.Tensor) and v.data_ptr() % 16 == 0 for v in values]

    def compute(self, programs: int, values, by_address: bool) -> None:
        gpu, count = self.kernel.gpu, len(self.dtypes)
        assert programs > 0 and not any(v % 16 for v, aligned in zip(values, self.aligned, strict=True) if aligned)
        constants = values[len(values) - len(self.constants) :]
        assert tuple(constants) == tuple(self.constants), "another variant"
        places, numbers = [*zip(values[:count], self.dtypes, strict=True)], values[count : len(values) - len(constants)]
        getattr(self, f"_{self.kernel.name}")(programs, places, numbers, constants)
        gpu.norms.append((self.kernel.name, by_address))
        told = [*numbers, *constants]
        gpu.launches.append((self.kernel.name, programs, {str(n): v for n, v in enumerate(told)}))

    def _shared(self, programs, room, counters, parts, channels, lanes) -> None:
        """Room is filled with what is no number; counters are 0."""
        sides = -(-channels // lanes)
        assert programs == parts * sides
        for (address, _), least in ((room, 8 * parts * channels), (counters, 4 * sides)):
            assert self.kernel.gpu.rooms[address] >= least, "too little is shared"
        at(room[0], torch.uint8, (8 * parts * channels,), (1,))[0].fill_(255)
        assert not at(counters[0], torch.int32, (sides,), (1,))[0].any()

    def _moments(self, programs, places, numbers, constants) -> None:
        x, count, known, variance, tracked, offset, pair, room, counters = places
        (parts, momentum), (c, _, lanes, _, _, eps, mean_of_all, is_known, follows, tracks, offsets) = (
            numbers,
            constants,
        )
        self._shared(programs, room, counters, parts, c, lanes)
        rows = int(vector(count, 1)[0])
        (x, at_x), (pair, at_pair) = matrix(x, rows, c), matrix(pair, 2, c)
        wide = x.float()
        mean = wide.sum(0) / max(rows, 1)
        spread = (wide - mean).square().sum(0) / max(rows, 1)
        olds = [vector(known, c), vector(variance, c)] if is_known else [torch.zeros(c), torch.ones(c)]
        beyond = vector(offset, c) if offsets else torch.zeros(c)
        written, old = [at_pair], [olds[0] - beyond, olds[1].clone()]
        if is_known and follows and rows > 1:
            share, counter = 0.0 if mean_of_all else momentum, vector(tracked, 1) if tracks else None
            if counter is not None and mean_of_all:
                share = 1.0 / float(counter[0])
            elif counter is not None:
                counter.add_(1)
                written.append((tracked[0], 8))
            olds[0].copy_(old[0] + share * (mean - old[0]) + beyond)
            olds[1].copy_(old[1] + share * (spread * (rows / (rows - 1)) - old[1]))
            written += [(known[0], 4 * c), (variance[0], 4 * c)]
        nowhere_read(written, [at_x, (count[0], 4), *([(offset[0], 4 * c)] if offsets else [])])
        nowhere_read([at_pair], written[1:])
        pair[0] = mean if rows > 1 else old[0]
        pair[1] = torch.rsqrt((spread if rows > 1 else old[1]) + eps)

    def _normalise(self, programs, places, numbers, constants) -> None:
        x, count, pair, weight, bias, residual, y = places
        c, block, lanes, has_weight, has_bias, adds, relu = constants
        rows = int(vector(count, 1)[0])
        assert programs >= -(-rows // block) * -(-c // lanes)
        (x, at_x), (pair, at_pair), (y, at_y) = matrix(x, rows, c), matrix(pair, 2, c), matrix(y, rows, c)
        found, read = (x.float() - pair[0]) * pair[1], [at_x, at_pair, (count[0], 4)]
        found = affine(found, weight if has_weight else None, bias if has_bias else None, read)
        if adds:
            residual, place = matrix(residual, rows, c)
            found, read = found + residual.float(), [*read, place]
        nowhere_read([at_y], read)
        y.copy_(found.relu() if relu else found)

    def _by_statistics(self, programs, places, numbers, constants) -> None:
        x, mean, variance, weight, bias, y = places
        (rows,), (c, block, lanes, eps, has_weight, has_bias) = numbers, constants
        assert programs >= -(-rows // block) * -(-c // lanes)
        (x, at_x), (y, at_y) = matrix(x, rows, c), matrix(y, rows, c)
        read = [at_x, *((address, c * dtype.itemsize) for address, dtype in (mean, variance))]
        found = (x.float() - vector(mean, c).float()) * torch.rsqrt(vector(variance, c).float() + eps)
        found = affine(found, weight if has_weight else None, bias if has_bias else None, read)
        nowhere_read([at_y], read)
        y.copy_(found)

    def _passed(self, grad, apart, y, given, constants, read) -> torch.Tensor:
        """The gradient of what is normalised."""
        (weight, bias), (has_weight, has_bias, adds, relu, _) = given, constants[-5:]
        if not relu:
            return grad
        if adds:
            result, place = matrix(y, *grad.shape)
            read.append(place)
        else:
            result = affine(apart, weight if has_weight else None, bias if has_bias else None, read)
        return torch.where(result > 0, grad, 0)

    def _products(self, programs, places, numbers, constants) -> None:
        grad, x, count, pair, weight, bias, y, sums, room, counters = places
        (parts, step), (c, _, lanes, *_, unit) = numbers, constants
        assert step % unit == 0
        self._shared(programs, room, counters, parts, c, lanes)
        rows = int(vector(count, 1)[0])
        (grad, at_grad), (x, at_x) = matrix(grad, rows, c, step), matrix(x, rows, c)
        (pair, at_pair), (sums, at_sums) = matrix(pair, 2, c), matrix(sums, 2, c)
        apart, read = (x.float() - pair[0]) * pair[1], [at_grad, at_x, at_pair, (count[0], 4)]
        let = self._passed(grad.float(), apart, y, (weight, bias), constants, read)
        nowhere_read([at_sums], read)
        sums[0], sums[1] = let.sum(0), (let * apart).sum(0)

    def _gradient(self, programs, places, numbers, constants) -> None:
        grad, x, count, pair, weight, bias, y, sums, dresidual, dx = places
        (step,), (c, block, lanes, has_weight, _, adds, relu, unit) = numbers, constants
        assert step % unit == 0
        rows = int(vector(count, 1)[0])
        assert programs >= -(-rows // block) * -(-c // lanes)
        (grad, at_grad), (x, at_x) = matrix(grad, rows, c, step), matrix(x, rows, c)
        (pair, at_pair), (sums, at_sums), (dx, at_dx) = matrix(pair, 2, c), matrix(sums, 2, c), matrix(dx, rows, c)
        apart, read = (x.float() - pair[0]) * pair[1], [at_grad, at_x, at_pair, at_sums, (count[0], 4)]
        let = self._passed(grad.float(), apart, y, (weight, bias), constants, read)
        factor = affine(pair[1], weight if has_weight else None, None, read)
        written = [at_dx]
        if adds and relu:
            dresidual, place = matrix(dresidual, rows, c)
            nowhere_read([at_dx], [place])
            written.append(place)
        nowhere_read(written, read)
        if adds and relu:
            dresidual.copy_(let)
        dx.copy_((let - (sums[0] + apart * sums[1]) * (1 / rows if rows > 1 else 0)) * factor)


def vector(place, length: int) -> torch.Tensor:
    address, dtype = place
    return at(address, dtype, (length,), (1,))[0]


def matrix(place, rows: int, columns: int, step: int | None = None) -> tuple[torch.Tensor, tuple[int, int]]:
    address, dtype = place
    return at(address, dtype, (rows, columns), (columns if step is None else step, 1))


def affine(values, weight, bias, read) -> torch.Tensor:
    for given, function in ((weight, torch.mul), (bias, torch.add)):
        if given is not None:
            values = function(values, vector(given, values.shape[-1]).float())
            read.append((given[0], values.shape[-1] * given[1].itemsize))
    return values


def room_of(made):
    """How many bytes the programs of a kernel need that share segments."""
    return lambda programs: programs * made.tile.rows * made.tile.columns * made.partial_dtype.itemsize


def at(address: int, dtype: torch.dtype, shape, strides) -> tuple[torch.Tensor, tuple[int, int]]:
    """A tensor over this very memory, and the bytes that it takes."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype), (address, 0)
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    # Not by an array of ctypes: its type, one per size, stays for a while after it.
    view, writable = ctypes.pythonapi.PyMemoryView_FromMemory, 0x200
    view.restype, view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    whole = torch.frombuffer(view(address, count * dtype.itemsize, writable), dtype=dtype, count=count)
    return whole.as_strided(shape, strides), (address, count * dtype.itemsize)


CACHES = (
    kernels._RUNNERS,
    plan._PLANS,
    plan._BUCKETED_PLANS,
    plan._CHOSEN,
    call.TEMPLATES,
    maps.NO_MAPS,
)
REAL = [
    (kernels, "interpreted", kernels.interpreted),
    (kernels, "loaded", kernels.loaded),
    (maps, "_FORMS_OF", maps._FORMS_OF),
    (plan, "device_of", plan.device_of),
    (autograd, "uses_gpu", autograd.uses_gpu),
    (norm, "_by_kernels", norm._by_kernels),
]
OF_NORMS = (norm._of_blocks, norm._of_parts)


@contextmanager
def holding(contents: list[dict]) -> Iterator[None]:
    """Within it the caches hold these, to which what is kept meanwhile is added."""
    before = [{**cache} for cache in CACHES]

    def put(found: list[dict]) -> None:
        for cache, held in zip(CACHES, found, strict=True):
            cache.clear()
            cache.update(held)

    put(contents)
    try:
        yield
    finally:
        contents[:] = [{**cache} for cache in CACHES]
        put(before)


@contextmanager
def emulated(folder, gpu: Gpu | None = None) -> Iterator[Gpu]:
    """Within it, tensors of the CPU are as those of a GPU to everything that asks. gpu: one that knows kernels."""
    gpu, ours = gpu or Gpu(), Ledger(folder / "tiles.json")
    gpu.clear()
    emitted, read, empty, zeros = (
        kernels.generated_kernel,
        maps.build_form,
        torch.Tensor.new_empty,
        torch.Tensor.new_zeros,
    )
    keep = prepare.keep_tiles
    trains, goes_back, shared = train_pass.Started.run, train_pass.Backward.run, norm.workspace

    def emitted_too(bound, given, tile, how):
        made = emitted(bound, given, tile, how)
        segment = made.form.segment.index if made.form.segment else ""
        known = Made(bound.statement, made.form.atomic or how.splits > 1, how.finish, room_of(made), segment)
        before = gpu.sources.setdefault(made.source, known)
        assert (before.finish.activation, before.finish.eps) == (how.finish.activation, how.finish.eps)
        assert str(before.statement) == str(bound.statement) and before.adds == known.adds
        return made

    def remember(found, tokens, arrays):
        own = {t.split("@")[-1]: x for t, x in zip(tokens, arrays, strict=True)}
        places = {local: x.data_ptr() for local, x in own.items()}
        form = Form(places, {n: weakref.ref(x) for n, x in own.items()}, found.num_inputs, found.num_outputs)
        for item in places.items():
            gpu.forms[item] = [*(one for one in gpu.forms.get(item, ()) if one.alive), form]
        return tokens, arrays

    def keep_too(one):
        # Kernels that take addresses alone are told whose these are.
        keep(one)
        remember(one.found, *maps._form_of_tiles(one.tiled, "compacted" if one.tiled.sorted else "unsorted"))
        if one.turned is not None and one.groups is not None:
            sorts = "compacted_t" if one.turned.sorted else "unsorted_t"
            remember(one.found, *maps._form_of_tiles(one.turned, sorts))
            remember(one.found, *maps._form_of_groups(one.groups))

    def read_too(found, name):
        return remember(found, *read(found, name))

    @contextmanager
    def within():
        # Others may run theirs meanwhile.
        gpu.own.made = []
        try:
            yield
        finally:
            vars(gpu.own).clear()

    def trains_too(begun, feats):
        with within():
            found = trains(begun, feats)
            gpu.passes.append(len([*begun.plan.layers]))
            return found

    def back_too(self, given):
        with within():
            found = [*goes_back(self, given)]
            gpu.back.append(len([*self.plan.layers]))
            return iter(found)

    def shared_too(count, size, device):
        made = shared(count, size, device)
        gpu.rooms[made.counters.data_ptr()], gpu.rooms[made.scratch.data_ptr()] = 4 * made.count, made.size
        return made

    def empty_too(self, *given, **more):
        made = empty(self, *given, **more)
        if made.numel() and made.device.type == "cpu" and made.is_contiguous():
            # What nobody has written is no number.
            made.detach().view(-1).view(torch.uint8).fill_(255)
        getattr(gpu.own, "made", []).append(made)
        return made

    def zeros_too(self, *given, **more):
        made = zeros(self, *given, **more)
        getattr(gpu.own, "made", []).append(made)
        return made

    with holding(gpu.caches), pytest.MonkeyPatch.context() as patch:
        for name, cache in zip(("_of_blocks", "_of_parts"), gpu.of_norms, strict=True):
            patch.setattr(norm, name, cache)
        patch.setattr(kernels, "interpreted", lambda: True)
        patch.setattr(kernels, "loaded", lambda source: gpu.loaded.setdefault(source, Kernel(gpu, source)))
        patch.setattr(kernels, "ledger", lambda: ours)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
        patch.setattr(maps, "_FORMS_OF", {"cpu": maps._FORMS_OF["cuda"]})
        patch.setattr(plan, "device_of", lambda operands: plan.DEVICES["cuda"])
        patch.setattr(autograd, "uses_gpu", lambda x: True)
        patch.setattr(kernels, "generated_kernel", emitted_too)
        patch.setattr(maps, "build_form", read_too)
        patch.setattr(prepare, "keep_tiles", keep_too)
        patch.setattr(torch.Tensor, "new_empty", empty_too)
        patch.setattr(torch.Tensor, "new_zeros", zeros_too)
        patch.setattr(norm, "_by_kernels", lambda x: x.dtype != torch.float64)
        patch.setattr(norm, "jitted", lambda name, room: OfNorm(gpu, name.partition(".")[2]))
        patch.setattr(train_pass.Started, "run", trains_too)
        patch.setattr(train_pass.Backward, "run", back_too)
        for module in (kernels, call, norm, stretch, train_pass):
            patch.setattr(module, "workspace", shared_too)
        yield gpu


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within it, and within `emulated`, all is as it is without: modules one by one, nothing of kernels."""
    with holding([{} for _ in CACHES]), pytest.MonkeyPatch.context() as patch:
        for module, name, real in REAL:
            patch.setattr(module, name, real)
        yield
