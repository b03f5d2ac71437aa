"""A pass of a network without arithmetic: meta features over real coordinates, whose memory and work are counted.

Kernel maps are built, since the sizes of all features follow from them. Steps run on features without contents (meta
tensors), by the functions that run them otherwise, and those of fused stretches by their plans of memory; what they
allocate and free is counted as it happens, in both passes.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pumice.coords import Geometry
from pumice.lower import native_products
from pumice.schedule.dataflow import FORWARD, WGRAD
from pumice.schedule.predict import CALL_SECONDS, Device, Work, pairs_on_cpu, seconds

_STEP = "step of a dry run"
"""Key of a step's name in the metadata of its autograd nodes."""
_HEADERS = frozenset(("view", "detach", "empty", "new_empty", "empty_like", "as_strided", "expand", "t", "slice"))
"""Operators that read and write nothing, besides those whose results are views."""


@dataclass
class Spent:
    """What a step takes: bytes that it allocates, rows and channels of its result, pairs of its map, and seconds."""

    allocated: int = 0
    rows: int = 0
    channels: int = 0
    pairs: int = 0
    time: float = 0.0


@dataclass(frozen=True)
class Machine:
    """What a dry run reckons with. rates: of the device; on_gpu: programs fuse steps to stretches."""

    rates: Device
    on_gpu: bool


class Meter(TorchDispatchMode):
    """Counts bytes and work of operators on meta tensors, by the step that runs or whose gradient is computed.

    live: bytes of the tensors that exist, without those that are given; peak: the most so far; steps: by name; needs:
    (counters, bytes) of the workspace that all kernels share.
    """

    def __init__(self, machine: Machine, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.machine: Machine = machine
        self.live: int = 0
        self.peak: int = 0
        self.needs: tuple[int, int] = 0, 0
        self.steps: dict[str, Spent] = {}
        self.step: str = ""
        self._seen: dict[int, Any] = {t.untyped_storage()._cdata: t for t in given}
        self._copies = set[Any]()
        self._marked = set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            self.step = node.metadata.get(_STEP, self.step)
        read = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in pytree.tree_leaves(found) if isinstance(t, Tensor) and t.is_meta]
        fresh = [self._hold(t) for t in made]
        if made and func.namespace == "pumice":
            self._products(read, made[0])
        elif made:
            name, views = func._schema.name.rpartition("::")[2], not any(fresh) and not func._schema.is_mutable
            if name not in _HEADERS and not views:
                self.work(_work(func, (args, kwargs or {}), read, made, found))
        return found

    @property
    def spent(self) -> Spent:
        """Of the current step."""
        return self.steps.setdefault(self.step, Spent())

    def work(self, work: Work) -> None:
        """Add the time of some work to the current step."""
        self.time(seconds(work, self.machine.rates))

    def time(self, spent: float) -> None:
        self.spent.time += spent

    def room(self, size: int) -> None:
        """Memory that is used for a moment besides what lives."""
        self.peak = max(self.peak, self.live + size)

    def keep(self, size: int) -> None:
        """Memory that stays."""
        self.live += size
        self.room(0)

    def shared(self, count: int, size: int) -> None:
        """A kernel's workspace: counters, and bytes."""
        self.needs = max(self.needs[0], count), max(self.needs[1], size)

    def mark(self, tensors: Iterable[Tensor]) -> None:
        """Ascribe the autograd nodes of these results that have no step yet to the current one."""
        todo: list[Any] = [t.grad_fn for t in tensors]
        while todo:
            node = todo.pop()
            if node is not None and node not in self._marked:
                self._marked.add(node)
                node.metadata[_STEP] = self.step
                todo += [before for before, _ in node.next_functions]

    def _hold(self, t: Tensor) -> int:
        """Count the memory of a tensor until it is freed. Returns its bytes, 0 if counted before."""
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return 0
        self.live += size
        self.spent.allocated += size
        self.room(0)
        self._seen[key] = weakref.ref(storage, partial(self._free, key, size))
        return size

    def _free(self, key: int, size: int, _: object) -> None:
        self.live -= size
        self._seen.pop(key, None)

    def _products(self, read: Sequence[Tensor], made: Tensor) -> None:
        """An einsum over index arrays, such as a convolution or a gradient of one."""
        arrays = [t for t in read if not t.is_meta]
        values = [t for t in read if t.is_meta]
        pairs = max([t.numel() for t in arrays], default=0)
        weight = max((*values, made), key=Tensor.dim)
        if weight.dim() < 3 or len(values) < 2:
            moved = sum(pairs * t[:1].nbytes for t in (*values, made))
            return self.work(Work(cache=moved, memory=made.nbytes))
        macs, ends = weight.numel() // weight.shape[-2], [t for t in (*values, made) if t is not weight]
        name = WGRAD if weight is made else FORWARD
        widths, size = [t.numel() // max(1, len(t)) for t in ends], made.element_size()
        if self.machine.on_gpu:
            moved = pairs * sum(widths) * size
            return self.work(Work(2 * pairs * macs, made.nbytes, moved, matrix=True))
        sizes = pairs, (widths[0], widths[-1]), macs, size
        self.time(CALL_SECONDS + pairs_on_cpu(sizes, name, self.machine.rates))
        self._scratch(name, values[0] if name == WGRAD else weight, made, arrays)
        if name == FORWARD:
            self.spent.pairs = max(self.spent.pairs, pairs)
        return None

    def _scratch(self, name: str, operand: Tensor, made: Tensor, arrays: Sequence[Tensor]) -> None:
        """Memory that the C kernels take besides their result: copies with whole vectors; packed weights and, for the
        transposed map, lists of pairs stay."""
        found = native_products.kernels(torch.float32)
        if found is None:
            return
        if name == WGRAD:
            return self.room(operand.nbytes + made.nbytes)
        if made.shape[-1] % found.lanes:
            self.room(made.nbytes)
        turned = torch._C._current_autograd_node() is not None
        key = operand.untyped_storage()._cdata, turned
        if key not in self._copies:
            self._copies.add(key)
            # Whole vectors of output channels.
            self.keep(operand.nbytes // made.shape[-1] * (made.shape[-1] + -made.shape[-1] % found.lanes))
        lists = tuple(t.data_ptr() for t in arrays)
        if turned and lists not in self._copies:
            self._copies.add(lists)
            self.keep(2 * max(t.nbytes for t in arrays))
        return None


def _work(func: Any, given: tuple[Any, Any], read: Sequence[Tensor], made: Sequence[Tensor], found: Any) -> Work:
    """The work of an operator of torch: it reads its operands and writes its results."""
    # Imports Triton, where there is one.
    from torch.utils.flop_counter import flop_registry

    reckoned = flop_registry.get(func._overloadpacket)
    flops = 0 if reckoned is None else reckoned(*given[0], **given[1], out_val=found)
    moved = sum(t.nbytes for t in (*read, *made))
    return Work(flops, moved, matrix=bool(flops))


# Networks and coordinates


def without_contents(net: nn.Module) -> nn.Module:
    """A copy of a network whose parameters and buffers are meta tensors; it takes no memory."""
    memo: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in net.buffers()}
    for p in net.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    return copy.deepcopy(net, memo)


def bytes_held(geometry: Geometry) -> int:
    """Bytes of all tensors that a geometry holds: coordinates, search structures, kernel maps and their layouts, and
    those of the geometries below it."""
    sizes, seen, todo = dict[int, int](), set[int](), list[Any]([geometry])
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | BuiltinFunctionType | nn.Module):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            sizes[storage._cdata] = 0 if one.is_meta else storage.nbytes()
        else:
            todo += gc.get_referents(one)
    return sum(sizes.values())
