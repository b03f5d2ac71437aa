"""A GPU that is none: kernels that are started compute, in plain torch, on memory whose addresses they are given."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module

import pytest
import torch

import pumice as pm
from pumice.lower import direct, maps, plan
from pumice.lower import triton as kernels
from pumice.nn import fused
from pumice.ops import line, linear, register
from pumice.schedule.ledger import Ledger

STREAM = 7
TENSORS = ("operand", "result")
MOVING = {("operand", "x"), ("operand", "*residual"), ("result", ""), ("room", ""), ("waiting", "")}


@dataclass(frozen=True)
class Started:
    """A kernel that was started.

    told: its name, how many programs, and all arguments but where features, result and what it shares lie; bytes: that
    it reads and writes, where they begin and how many, by name, the result being "".
    """

    told: tuple
    bytes: dict[str, tuple[int, int]]
    by_address: bool


@dataclass
class Gpu:
    """started: all kernels; lines: those of each line that was started; made: what `new_empty` gave within each.

    finishes: of each source what is behind its product; arrays: where they lie of each map, and its table; own: what is
    one thread's.
    """

    started: list[Started] = field(default_factory=list)
    lines: list[list[Started]] = field(default_factory=list)
    made: list[list[torch.Tensor]] = field(default_factory=list)
    finishes: dict = field(default_factory=dict)
    arrays: dict[int, tuple] = field(default_factory=dict)
    own: threading.local = field(default_factory=threading.local)

    def clear(self) -> None:
        self.started.clear(), self.lines.clear(), self.made.clear()

    @property
    def in_lines(self) -> list[Started]:
        return [one for each in self.lines for one in each]


class Kernel:
    """What Triton's JIT function is to the launcher."""

    def __init__(self, gpu: Gpu, source) -> None:
        self.gpu, self.source = gpu, source

    def __getitem__(self, grid):
        def launch(*values, num_warps, num_stages):
            compiled = Compiled(self, values)
            plainly = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
            compiled.compute(grid[0], plainly, False)
            return compiled

        return launch


class Compiled:
    """What Triton's launch gives. Dtypes and layouts are those of the tensors that it was made for; rows, which are
    arguments, are not."""

    function, packed_metadata = "function", "packed"

    def __init__(self, kernel: Kernel, values) -> None:
        self.kernel, self.layouts = kernel, {}
        for argument, value in zip(kernel.source.arguments, values, strict=True):
            if argument.kind in TENSORS:
                self.layouts[argument.name] = value.dtype, value.shape[1:], value.stride(), value.shape[0]
        # Triton makes a variant for what is aligned, and another for what is not.
        self.aligned = [isinstance(v, torch.Tensor) and v.data_ptr() % 16 == 0 for v in values]

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *values) -> None:
        assert (y, z, stream, function, packed) == (1, 1, STREAM, self.function, self.packed_metadata)
        self.compute(x, values, True)

    def __getitem__(self, grid):
        raise AssertionError("nobody profiles")

    def compute(self, programs: int, values, by_address: bool) -> None:
        source, gpu = self.kernel.source, self.kernel.gpu
        assert programs > 0 and not any(v is None for v in values)
        assert not any(v % 16 for v, aligned in zip(values, self.aligned, strict=True) if aligned), "not aligned"
        sizes = {(a.kind, a.name, a.axis): v for a, v in zip(source.arguments, values, strict=True)}
        finish = gpu.finishes[source]
        over = ("operand", "map_met", 0) in sizes
        rows = sizes["size", "", 0] if over else sizes["extent", "n", 0]
        counts = {"": rows, "x": sizes["size", "x", 0] if over else rows, "*residual": rows}
        found, touched = {}, {}
        for name, (dtype, tail, strides, fixed) in self.layouts.items():
            if name.startswith("map_"):
                continue
            address = sizes["operand" if name else "result", name, 0]
            shape = counts.get(name, fixed), *tail
            strides = [sizes.get(("stride", name, n), s) for n, s in enumerate(strides)]
            found[name], touched[name] = at(address, dtype, shape, strides)
        for name, (begin, length) in touched.items():
            # What is written is nowhere read.
            first, more = touched[""]
            assert not name or begin + length <= first or first + more <= begin, f"{name} lies where the result does"
        rooms = [(t.data_ptr(), t.untyped_storage().nbytes()) for t in getattr(gpu.own, "made", [])]
        inside = [begin <= touched[""][0] and sum(touched[""]) <= begin + length for begin, length in rooms]
        assert not rooms or any(inside), "what is written does not fit"
        x, w = found["x"].float(), found["w"].float()
        if over:
            table, inputs, own, alive = gpu.arrays[sizes["operand", "map_met", 0]]
            assert all(ref() is not None for ref in alive), "the arrays of this map are gone"
            assert own == {name: sizes["operand", name, 0] for name in own}, "arrays of several maps"
            assert table.shape[0] == rows and inputs == len(x)
            x = torch.cat([x, torch.zeros_like(x[:1])])[table.long()]
            grouped = x.ndim == 4
            y = torch.einsum("okgc,gnkc->ogn", x, w) if grouped else x.flatten(1) @ w.flatten(1).T
        else:
            y = x @ w.T
        more = {name[1:]: t.float() for name, t in found.items() if name.startswith("*")}
        y = y - more["mean"] if "mean" in more else y
        y = y * torch.rsqrt(more["variance"] + finish.eps) if "variance" in more else y
        y = y * more["scale"] if "scale" in more else y
        y = y + more["shift"] if "shift" in more else y
        y = y + more["residual"] if "residual" in more else y
        act = {"": lambda y: y, "relu": torch.relu, "silu": torch.nn.functional.silu}[finish.activation]
        assert {f"*{name}" for name in more} == {*finish.names}
        found[""].copy_(act(y))
        told = [None if (a.kind, a.name) in MOVING else v for a, v in zip(source.arguments, values, strict=True)]
        one = Started((source.text, programs, *told), touched, by_address)
        gpu.started.append(one)
        getattr(gpu.own, "line", []).append(one)


def at(address: int, dtype: torch.dtype, shape, strides) -> tuple[torch.Tensor, tuple[int, int]]:
    """A tensor over this very memory, and the bytes that it takes."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype), (address, 0)
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    whole = torch.frombuffer(memory, dtype=dtype, count=count)
    return whole.as_strided(shape, strides), (address, count * dtype.itemsize)


CACHES = (kernels._RUNNERS, plan._READY, plan._SERIES, plan._CHOSEN, direct.TEMPLATES, linear._CALLS)
LAYERS = import_module("pumice.nn.layers")
REAL = [
    (kernels, "interpreted", kernels.interpreted),
    (kernels, "loaded", kernels.loaded),
    (maps, "_FORMS_OF", maps._FORMS_OF),
    (plan, "device_of", plan.device_of),
    (direct, "starts_kernels", direct.starts_kernels),
    (fused, "_worth", fused._worth),
    (fused, "takes", fused.takes),
    (LAYERS, "takes", LAYERS.takes),
]


@contextmanager
def emulated(folder) -> Iterator[Gpu]:
    """Within it, tensors of the CPU are as those of a GPU to everything that asks."""
    gpu, ours, loaded = Gpu(), Ledger(folder / "tiles.json"), {}
    emitted, read, started, empty = kernels.emitted, maps.read, line.started, torch.Tensor.new_empty

    def emitted_too(bound, given, tile, how):
        made = emitted(bound, given, tile, how)
        assert gpu.finishes.setdefault(made.source, how.finish).activation == how.finish.activation
        assert gpu.finishes[made.source].eps == how.finish.eps
        return made

    def read_too(found, name):
        tokens, arrays = read(found, name)
        own = {t.split("@")[-1]: x for t, x in zip(tokens, arrays, strict=True)}
        if name in ("compacted", "unsorted"):
            places = {f"map_{local}": own[local].data_ptr() for local in ("met", "rows", "k")}
            alive = [weakref.ref(x) for x in own.values()]
            gpu.arrays[places["map_met"]] = found.rows().clone(), found.num_inputs, places, alive
        return tokens, arrays

    def started_too(calls, x):
        # Others may start theirs meanwhile.
        gpu.own.line, gpu.own.made = [], []
        try:
            y = started(calls, x)
            if y is not None:
                gpu.lines.append(gpu.own.line)
                gpu.made.append(gpu.own.made)
            return y
        finally:
            del gpu.own.line, gpu.own.made

    def empty_too(self, *given, **more):
        made = empty(self, *given, **more)
        getattr(gpu.own, "made", []).append(made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        for cache in CACHES:
            patch.setattr(cache, "_held", {})
        patch.setattr(kernels, "interpreted", lambda: True)
        patch.setattr(kernels, "loaded", lambda source: loaded.setdefault(source, Kernel(gpu, source)))
        patch.setattr(kernels, "ledger", lambda: ours)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
        patch.setattr(maps, "_FORMS_OF", {"cpu": maps._FORMS_OF["cuda"]})
        patch.setattr(plan, "device_of", lambda operands: plan.DEVICES["cuda"])
        patch.setattr(direct, "starts_kernels", lambda x: True)
        patch.setattr(fused, "_worth", lambda x: isinstance(x, pm.SparseTensor))
        for module in (fused, LAYERS):
            patch.setattr(module, "takes", lambda *tensors: register.plain(tensors))
        patch.setattr(kernels, "emitted", emitted_too)
        patch.setattr(maps, "read", read_too)
        patch.setattr(line, "started", started_too)
        patch.setattr(torch.Tensor, "new_empty", empty_too)
        yield gpu


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within it, and within `emulated`, all is as it is without: modules one by one, nothing of kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for cache in CACHES:
            patch.setattr(cache, "_held", {})
        for module, name, real in REAL:
            patch.setattr(module, name, real)
        yield


@contextmanager
def unprepared() -> Iterator[None]:
    """Within it, no layers are started one after the other: kernels by modules one by one."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("pumice.nn.blocks", "pumice.models.minkunet"):
            patch.setattr(f"{module}.prepared", lambda *given: None)
        yield
