"""Calls of a statement that are repeated with other tensors of the same layouts, sparse operands and index arrays being
the same. What a call checks, converts and plans is done once; repeating it is a comparison and one launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pumice.lower import kernel as kernels
from pumice.lower import plan
from pumice.lower.call import deterministic
from pumice.ops import autograd
from pumice.ops.operands import Operand, tensors_of
from pumice.ops.sparse import Sparse
from pumice.runtime.launch import recorded_constants
from pumice.runtime.repeat import Repeated, RepeatedLaunch, like_these
from pumice.runtime.streams import is_capturing
from pumice.schedule.tuned_loops import loop_records


class RepeatedCalls:
    """The repeated calls of a statement whose first sparse operand is the same, if it is one kernel or loop nest."""

    def __init__(self) -> None:
        self.kept: tuple[RepeatedCall, ...] = ()

    def look(self, operands: Mapping[str, Operand], find: Callable[[], KnownPlan]) -> bool:
        """Keep a call that ran, if it is plain; find: its plan. False if such calls are never kept."""
        tensors = tensors_of(operands.values())
        if not autograd.is_plain_call(tensors) or recorded_constants() is not None or is_capturing(tensors[0].device):
            return True
        layout, alive = (torch.is_inference_mode_enabled(), *_layouts(operands)), [c for c in self.kept if c.alive]
        known = next((call for call in alive if call.layout == layout), None)
        # One that does not match again and again, as for a misaligned tensor, is not made again.
        if known is None or known.state != State.of(tensors):
            call = RepeatedCall.of(find(), operands, layout)
            if call is None:
                return False
            self.kept = (call, *[other for other in alive if other is not known][: _MOST - 1])
        return True


class State(NamedTuple):
    """What the choice of kernels, or of schedules of loop nests, depends on besides the operands. records: of tuned
    tiles or schedules; precision: of float32 products, "" without any."""

    records: Any
    generation: int
    mode: str
    deterministic: bool
    precision: str

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> State:
        on_cpu = tensors[0].is_cpu
        records = loop_records() if on_cpu else kernels.ledger()
        wide = not on_cpu and any(x.dtype is torch.float32 for x in tensors)
        precision = kernels.float32_precision() if wide else ""
        return State(records, records.generation, kernels.tuning_mode(), deterministic(), precision)


_MOST = 8
"""Repeated calls that are compared one after the other."""


class KnownPlan(NamedTuple):
    """The plan of a call, and the names of its operands that are index arrays."""

    plan: plan.Plan
    arrays: frozenset[str]


class Fixed(NamedTuple):
    """A tensor that a repeated call reads where it is, and that was not written to."""

    tensor: Callable[[], Tensor | None]
    version: int
    address: int

    @staticmethod
    def of(x: Any) -> Fixed:
        return Fixed(ref(x), x._version, x.data_ptr())

    def holds(self, x: Any) -> bool:
        """True if x is this tensor, as it was."""
        return x is self.tensor() and x._version == self.version and x.data_ptr() == self.address


class RepeatedCall:
    """A call as a function of its dense tensors that are no index arrays."""

    layout: Hashable
    state: State

    @staticmethod
    def of(known: KnownPlan, operands: Mapping[str, Operand], layout: Hashable) -> RepeatedCall | None:
        """Of a call that ran; None if it is more than one kernel or loop nest."""
        tensors = tensors_of(operands.values())
        names, values, places = list[str](), list[int](), list[int]()
        end = 0
        for name, x in operands.items():
            start, end = end, end + len(tensors_of([x]))
            if isinstance(x, Sparse):
                values += [place for place in range(start, end) if tensors[place].is_floating_point()]
            elif isinstance(x, Tensor) and name not in known.arrays:
                names.append(name)
                places.append(start)
        packs = plan.packs_values(known.plan)
        run = plan.repeated(known.plan, tensors, places if packs else [*places, *values])
        if run is None or any(t.is_inference() for t in tensors):
            return None
        if known.arrays and not isinstance(run, RepeatedLaunch):
            # Others would keep index arrays alive.
            return None
        held = [tensors[place] for place in values]
        precise = plan.depends_on_precision(known.plan)
        return RepeatedCall(run, operands, (names, sorted(known.arrays)), (held, packs, precise), layout)

    def __init__(
        self,
        run: Repeated,
        operands: Mapping[str, Operand],
        names: tuple[Sequence[str], Sequence[str]],
        values: tuple[Sequence[Tensor], bool, bool],
        layout: Hashable,
    ) -> None:
        self._run, self._count, self.layout = run, len(operands), layout
        self._open, self._arrays = names
        self._values, fixed, precise = values
        every = [*map(operands.__getitem__, self._open), *self._values, *map(operands.__getitem__, self._arrays)]
        self._alike, self._tracked = like_these(every), any(x.requires_grad for x in every)
        self._fixed = [(name, Fixed.of(operands[name])) for name in self._arrays]
        self._packed = [(x, Fixed.of(x)) for x in self._values if fixed]
        self._same = [(name, ref(x)) for name, x in operands.items() if isinstance(x, Sparse)]
        self._numbers = [(name, x) for name, x in operands.items() if isinstance(x, int)]
        self._besides = bool(self._fixed or self._packed or self._numbers)
        self.state = State.of(every)
        self._records, self._generation, self._mode, self._deterministic, precision = self.state
        self._precision = precision if precise else ""

    def __call__(self, operands: Mapping[str, Operand]) -> Tensor | None:
        """The result; None if anything that the call depends on has changed, or that the launch depends on."""
        find = operands.get
        for name, same in self._same:
            if find(name) is not same():
                return None
        tensors = [*map(find, self._open), *self._values]
        every = [*tensors, *map(find, self._arrays)] if self._arrays else tensors
        if not self._alike(*every) or len(operands) != self._count:
            return None
        if torch._C._len_torch_function_stack() or forward_ad._current_level >= 0 or recorded_constants() is not None:
            return None
        if self._records.generation != self._generation or kernels.tuning_mode() != self._mode:
            return None
        if deterministic() is not self._deterministic or (self._tracked and torch.is_grad_enabled()):
            return None
        if self._precision and kernels.float32_precision() != self._precision:
            return None
        if self._besides and not self._unchanged(operands):
            return None
        return self._run(tensors)

    @property
    def alive(self) -> bool:
        """True if the sparse operands and index arrays are there."""
        return all([same() is not None for _, same in self._same]) and all(
            [fixed.tensor() is not None for _, fixed in self._fixed]
        )

    def _unchanged(self, operands: Mapping[str, Operand]) -> bool:
        """True if index arrays, packed values and integers are those of before."""
        arrays = all([fixed.holds(operands[name]) for name, fixed in self._fixed])
        values = all([fixed.holds(x) for x, fixed in self._packed])
        numbers = all([type(x := operands.get(name)) is type(n) and x == n for name, n in self._numbers])
        return arrays and values and numbers


def _layouts(operands: Mapping[str, Operand]) -> Iterator[Hashable]:
    """What a repeated call is made for, besides the values of its operands."""
    for name, x in operands.items():
        if isinstance(x, Tensor):
            index = not x.is_floating_point() and not x.is_inference()
            yield name, (id(x), x._version) if index else None, x.shape, x.stride(), x.dtype, x.device, x.requires_grad
        else:
            yield name, id(x) if isinstance(x, Sparse) else x
