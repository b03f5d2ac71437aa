"""Sums of gathered rows over the segments of a sorted index array on a GPU: sparse times dense above all.

    T[S[p],n] = sum over p, q of V[p,q] * X[K[p,q],n]          S sorted; the entries of one value of S are a segment

Index arrays and values are read where they are: only the order in which programs take segments is prepared, once per
index array. Short segments get a row of a program each, longer ones several, and very long ones are cut into pieces,
whose sums the last program to finish adds up in a fixed order. Segments of a window keep together, since they often
read the same rows of X, and are sorted by length within it. Columns are taken in slices, so that the rows of a slice
stay in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.coords.segments import bounds_of
from pumice.language.bind import BoundStatement
from pumice.language.nodes import Access, Affine, Statement, indices_of
from pumice.lower.entry_sums import finished
from pumice.runtime.cache import cached_per_tensor
from pumice.runtime.launch import BoundKernel, keep_for_graph, kernel
from pumice.runtime.repeat import NewTensor, OpenArguments, Repeated, RepeatedLaunch
from pumice.runtime.workspace import Workspace, workspace
from pumice.schedule.predict import Work

_FAR = 1 << 31


_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_FEW = 8
"""Columns below which lanes would idle."""


@dataclass(frozen=True)
class Roles:
    """The operands of a statement by what they are. values: "" for ones."""

    segments: str
    places: str
    values: str
    rows: str


@lru_cache(maxsize=1024)
def roles_of(statement: Statement) -> Roles | str:
    """The roles of the operands, or the reason why there are none."""
    if statement.reduction != "sum" or len(statement.terms) != 1:
        return "it is no sum of one term"
    target, factors = statement.target.indices, statement.terms[0].factors
    segments = _array(target[0]) if target else None
    if segments is None or (segments.name, "sorted") not in statement.facts:
        return "rows of the target are not named by a sorted index array"
    (position,) = [e.bare for e in segments.indices] if len(segments.indices) == 1 else (None,)
    columns = [e.bare for e in target[1:]]
    if position is None or not columns or None in columns or len({*columns}) < len(columns):
        return "the target has other axes than an index array of one position, and bare indices"
    gathered, values = "", ""
    places: Access | None = None
    for factor in factors:
        array = _array(factor.indices[0]) if isinstance(factor, Access) and factor.indices else None
        if isinstance(factor, Access) and array is not None and [e.bare for e in factor.indices[1:]] == columns:
            if gathered:
                return "several factors are gathered"
            gathered, places = factor.name, array
        elif isinstance(factor, Access) and not values:
            values = factor.name
        else:
            return "there are other factors than gathered rows and values of entries"
    if places is None:
        return "no factor has its rows named by an index array"
    entry = [e.bare for e in places.indices]
    stored = [[e.bare for e in f.indices] for f in factors if isinstance(f, Access) and f.name == values]
    if entry[:1] != [position] or len({*entry}) < len(entry) or len(entry) > 2 or any(e != entry for e in stored):
        return "entries are not those of one or two positions, of which the first is the target's"
    names = (segments.name, places.name, values, gathered)
    if len({*names}) < 4 or {*indices_of(statement)} != {*entry, *columns}:
        return "an operand has several roles"
    return Roles(*names)


def _array(expression: Affine) -> Access | None:
    """The index array that an expression is, if it is one of bare indices."""
    if expression.constant or len(expression.terms) != 1:
        return None
    ((coefficient, atom),) = expression.terms
    plain = coefficient == 1 and isinstance(atom, Access) and all(e.bare for e in atom.indices)
    return atom if plain and isinstance(atom, Access) else None


def refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why a statement is no sum of rows over segments here, or None."""
    roles = roles_of(statement)
    if isinstance(roles, str):
        return roles
    x = operands[roles.rows]
    kinds = [x.dtype, *([operands[roles.values].dtype] if roles.values else [])]
    if any(kind not in _TYPES for kind in kinds):
        return "a factor is not of float32, float16 or bfloat16"
    if partial_ranges(bound, x):
        return PARTIAL
    if math.prod(x.shape[1:]) < _FEW:
        return f"there are fewer than {_FEW} columns"
    if 0 in bound.shape or 0 in bound.extents.values():
        return "it is empty"
    return None


PARTIAL = "a range is a part of an axis"


def partial_ranges(bound: BoundStatement, x: Tensor) -> bool:
    """True if the columns are not all of x and of the target, or an index does not begin at 0."""
    return x.shape[1:] != bound.shape[1:] or any(extent.start for extent in bound.ranges.values())


def work(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> Work:
    """Rows are read through the second-level cache, some of them through the first."""
    roles = roles_of(statement)
    assert isinstance(roles, Roles)
    points = bound.points(indices_of(statement))
    return Work(2 * points, cache=_CACHED * operands[roles.rows].element_size() * points)


_CACHED = 0.8


class SegmentStep:
    """A step of a plan: a statement that `refusal` accepts."""

    bound: BoundStatement
    dtype: torch.dtype
    result_at = 9
    """Position of the result among the tensors of a launch, of which x and the values are the first two."""

    def __init__(self, bound: BoundStatement, dtype: torch.dtype) -> None:
        self.bound, self.dtype, self._roles = bound, dtype, self._roles_of(bound.statement)
        term = bound.statement.terms[0]
        self._plain = term.coefficient == 1 and not bound.statement.accumulate
        self._width = math.prod(bound.shape[1:])
        self._flat = len(bound.shape) == 2

    def __call__(self, operands: Mapping[str, Tensor], before: Tensor | None = None) -> Tensor:
        """The result, of `dtype`, added to that of the steps before."""
        if self._plain:
            found = self._sums(operands, self.dtype)
        else:
            found = finished(self.bound, operands, self.dtype, lambda dtype: self._sums(operands, dtype))
        return found if before is None else before + found

    def repeated(self, operands: Mapping[str, Tensor], names: Sequence[str]) -> Repeated | None:
        """The step that ran as a function of the operands `names`, of the same layouts; None if others than rows and
        values are open."""
        roles, fixed = self._roles, {name: x for name, x in operands.items() if name not in names}
        given = OpenArguments.of(names, [roles.rows, roles.values or roles.rows], self.result_at)
        if given is None:
            return None
        launch, x = None, operands[roles.rows]
        ready, others = self._ready(operands)
        read = all(any(other is tensor for tensor in operands.values()) for other in others if other is not None)
        if self._plain and self._flat and x.is_contiguous() and read:
            launch = ready.repeated((x, *others), self.dtype, given)
        return launch or (lambda tensors: self({**fixed, **dict(zip(names, tensors, strict=True))}))

    def _roles_of(self, statement: Statement) -> Roles:
        roles = roles_of(statement)
        assert isinstance(roles, Roles)
        return roles

    def _ready(self, operands: Mapping[str, Tensor]) -> tuple[Any, tuple[Tensor | None, ...]]:
        """(the prepared sums, the contiguous factors behind x that they take)."""
        roles, count = self._roles, self.bound.shape[0]
        places, values = operands[roles.places], operands[roles.values].contiguous() if roles.values else None
        tile = SegmentTile.default(operands[roles.rows].element_size(), places.numel(), count)
        return prepared(operands[roles.segments], places, count, tile), (values, places.contiguous())

    def _sums(self, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        shape, x = self.bound.shape, operands[self._roles.rows]
        x = x.contiguous() if self._flat else x.reshape(x.shape[0], self._width).contiguous()
        ready, others = self._ready(operands)
        y = ready.run(x, *others, x.new_empty((shape[0], self._width), dtype=dtype))
        return y if self._flat else y.view(shape)


class SegmentTile(NamedTuple):
    """rows: of a program, each of which reads `depth` entries at once, in `blocks` blocks of 128 bytes of columns (of
    4-byte values). short, long: entries up to which a segment gets one of these rows, or `middle` of them. turns:
    iterations of a program at most: longer segments are cut. window: segments that keep together."""

    rows: int = 4
    blocks: int = 4
    middle: int = 2
    short: int = 12
    long: int = 32
    turns: int = 16
    window: int = 1024
    depth: int = 1

    @classmethod
    def default(cls, size: int, entries: int, segments: int) -> SegmentTile:
        """The tile for values of `size` bytes, the fastest of 25 over the graphs of TC-GNN on an H200, of 128 columns:
        few rows in one warp; two entries at once if those of a row are 256 bytes; narrower programs if there are few.
        """
        few = max(segments // 4, entries // 32) < _FEW_PROGRAMS
        if size < 4:
            return cls(depth=2, turns=8 if few else 16)
        return cls(depth=2, turns=8, blocks=2) if few else cls()

    @property
    def longest(self) -> int:
        """Entries up to which a segment is not cut."""
        return self.rows * self.depth * self.turns


_FEW_PROGRAMS = 8192  # Twice what an H200 holds


class Order(NamedTuple):
    """The work of programs; see segment_kernels.segment_sums. slots: without the places of the first entries. firsts,
    pieces: of cut segments, which come first."""

    slots: Tensor
    codes: Tensor
    firsts: Tensor
    pieces: Tensor


def ordered(bounds: Tensor, size: int, tile: SegmentTile) -> Order:
    """The programs for segments. bounds [count + 1]: where segments begin and end, in groups of `size` entries.

    Few functions of torch, on int64 only: each takes milliseconds when a process first uses it on a GPU."""
    bounds = bounds.long() * size
    starts, lengths = bounds[:-1], bounds.diff()
    short = _windows(starts, lengths, tile)
    if int(lengths.max()) <= tile.longest:
        return short
    long = _pieces(starts, lengths, (lengths > tile.longest).nonzero()[:, 0], tile)
    firsts, pieces = (torch.cat([x, x.new_zeros(len(short.codes))]) for x in (long.firsts, long.pieces))
    return Order(torch.cat([long.slots, short.slots]), torch.cat([long.codes, short.codes]), firsts, pieces)


def _pieces(starts: Tensor, lengths: Tensor, which: Tensor, tile: SegmentTile) -> Order:
    """A program for each piece of these segments, the longest first."""
    which = which[lengths[which].argsort(descending=True, stable=True)]
    counts = _ceil(lengths[which], tile.longest)
    segment, number = _numbered(counts)
    of = which[segment]
    each = _ceil(lengths[of], counts[segment])
    begins = starts[of] + number * each
    stops = torch.minimum(begins + each, starts[of] + lengths[of])
    part = torch.arange(tile.rows, device=starts.device)
    slots = torch.stack([begins[:, None] + part, *(x[:, None].expand(-1, tile.rows) for x in (stops, of))], 1)
    steps = _ceil((stops - begins).clamp(min=0), tile.rows * tile.depth)
    firsts = torch.arange(len(segment), device=starts.device) - number
    return Order(*(x.int() for x in (slots, 4 * steps + 2, firsts, counts[segment])))


def _ceil(x: Tensor, divisor: Tensor | int) -> Tensor:
    return (x + (divisor - 1)) // divisor


def _numbered(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For each of so many elements of groups, in order: its group, and its number within it."""
    ends = counts.cumsum(0)
    every = torch.arange(int(ends[-1]), device=counts.device)
    group = torch.searchsorted(ends, every, right=True)
    return group, every - (ends - counts)[group]


def _windows(starts: Tensor, lengths: Tensor, tile: SegmentTile) -> Order:
    """Programs for segments that are not cut, by windows of segments: in each those that get most rows first, longer
    ones before shorter ones."""
    device, count, most = starts.device, len(starts), tile.longest + 1
    windows = -(-count // tile.window)
    # Groups: in each window those that get all rows, then some, then one; behind all windows what is cut.
    group_of = [2 - (n > tile.short) - (n > tile.long) for n in range(most)]
    table = [(group + 1) * most - 1 - n for n, group in enumerate(group_of)]
    keys = torch.tensor([*table, 3 * most * windows], device=device)[lengths.clamp(max=most)]
    key, order = (torch.arange(count, device=device) // tile.window * (3 * most) + keys).sort(stable=True)
    begins = torch.searchsorted(key, torch.arange(3 * windows + 1, device=device) * most)
    parts = torch.tensor([tile.rows, tile.middle, 1], device=device)
    group, number = _numbered(_ceil(begins.diff(), (tile.rows // parts).repeat(windows)))
    kind = group % 3
    own, row = parts[kind][:, None], torch.arange(tile.rows, device=device)
    place = (begins[group] + number * (tile.rows // parts)[kind])[:, None] + row // own
    there, none = place < begins[group + 1][:, None], torch.tensor(0, device=device)
    of = order[place.clamp(max=count - 1)]
    at, stop = (torch.where(there, x, none) for x in (starts[of] + row % own, starts[of] + lengths[of]))
    slots = torch.stack([at, stop, torch.where(there, of, none - 1)], 1)
    codes = 4 * _ceil(lengths[of[:, 0]], own[:, 0] * tile.depth) + 2 - kind
    nothing = codes[:0].int()
    return Order(slots.int(), codes.int(), nothing, nothing)


@dataclass(frozen=True, eq=False)
class SegmentSums:
    """The segments of an index array in the order of a tile, with the places of their first entries. launches: by
    dtypes and shape."""

    tile: SegmentTile
    count: int
    order: Order
    launches: dict[Any, tuple[BoundKernel, int, list[int]]] = field(default_factory=dict)

    def run(self, x: Tensor, values: Tensor | None, places: Tensor, y: Tensor) -> Tensor:
        """Write the sums to y [segments, n]. x [rows, n]; values, places: of the entries, in their order."""
        key = x.dtype, y.dtype, None if values is None else values.dtype, x.shape
        launch = self.launches.get(key) or self.launches.setdefault(key, self._launch(x, values, places, y))
        run, programs, numbers = launch
        needs = self._needs(x.shape[1], programs // numbers[0])
        own = needs and workspace(*needs, x.device)
        run(programs, self._tensors(x, values, places, y, own), numbers)
        return y

    def repeated(
        self, factors: tuple[Tensor, Tensor | None, Tensor], dtype: torch.dtype, open: OpenArguments
    ) -> RepeatedLaunch | None:
        """`run` of contiguous factors (x, values, places) like these, if it has run."""
        x, values, _ = factors
        launch = self.launches.get((x.dtype, dtype, None if values is None else values.dtype, x.shape))
        if launch is None:
            return None
        kernel, programs, numbers = launch
        needs = self._needs(x.shape[1], programs // numbers[0])
        tensors = self._tensors(*factors, x, needs and workspace(*needs, x.device))
        result = NewTensor((self.count, x.shape[1]), dtype, x.device)
        open = open._replace(workspace=_WORKSPACE, needs=needs) if needs else open
        return RepeatedLaunch.of(kernel, (programs, tensors, numbers), open, result, self)

    def _needs(self, width: int, groups: int) -> tuple[int, int] | None:
        """(counters, bytes) of a workspace, None if no segment is cut. groups: of columns."""
        return (self.cut * groups, 4 * self.cut * width) if self.cut else None

    @cached_property
    def cut(self) -> int:
        """Number of pieces, each of a program of its own."""
        return int((self.order.pieces > 0).sum())

    def _tensors(
        self, x: Tensor, values: Tensor | None, places: Tensor, y: Tensor, own: Workspace | None
    ) -> tuple[Tensor, ...]:
        """The tensors of a launch."""
        none = self.order.firsts
        scratch, waiting = (none, none) if own is None else (own.scratch.view(torch.float32), own.counters)
        return (
            x,
            x if values is None else values,
            places,
            *self.order,
            scratch,
            waiting,
            y,
        )  # see _WORKSPACE, SegmentStep.result_at

    def _launch(
        self, x: Tensor, values: Tensor | None, places: Tensor, y: Tensor
    ) -> tuple[BoundKernel, int, list[int]]:
        tile, width = self.tile, x.shape[1]
        size = max(x.element_size(), y.element_size())
        lanes = min(128 // size, 1 << (width - 1).bit_length())
        blocks = min(max(1, tile.blocks * size // 4), 1 << (-(-width // lanes) - 1).bit_length())
        constants = {
            "LANES": lanes,
            "BLOCKS": blocks,
            "ROWS": tile.rows,
            "MIDDLE": tile.middle,
            "DEPTH": tile.depth,
            "VECTOR": min(width & -width, 16 // size, lanes),
            "EVEN": width % (lanes * blocks) == 0,
            "FAR": max(x.numel(), y.numel()) >= _FAR,
            "LONG": self.cut > 0,
            "VALUED": values is not None,
            "SPLIT": width > lanes * blocks,
        }
        programs, groups = len(self.order.codes), -(-width // (lanes * blocks))
        needs = self._needs(width, groups)
        tensors = self._tensors(x, values, places, y, needs and workspace(*needs, x.device))
        made = kernel("segment_kernels.segment_sums", "lower").bound(tensors, constants, 1)
        return made, programs * groups, [programs, width, x.shape[0]]

    def run_torch(self, x: Tensor, values: Tensor | None, places: Tensor, y: Tensor) -> Tensor:
        """As run, in plain torch."""
        flat, rows = places.reshape(-1).long(), self.tile.rows
        held = (x.new_ones(()).expand(len(flat)) if values is None else values.reshape(-1)).float()
        total = torch.zeros(y.shape, dtype=torch.float32, device=x.device)
        for slots, code in zip(self.order.slots[:, :3].tolist(), self.order.codes.tolist(), strict=True):
            step = (1, self.tile.middle, rows)[code & 3]
            length = (code >> 2) * self.tile.depth * step
            for begin, stop, segment in zip(*slots, strict=True):
                read = [e for e in range(begin, min(stop, begin + length), step) if 0 <= flat[e] < len(x)]
                if segment >= 0:
                    total[segment] += (held[read][:, None] * x[flat[read]].float()).sum(0)
        return y.copy_(total)


_WORKSPACE = (8, 7)
"""Positions among the tensors of a launch of counters and partial sums."""


def prepared(array: Tensor, places: Tensor, count: int, tile: SegmentTile) -> SegmentSums:
    """The sums over the segments of a sorted array for the values 0 to count - 1. places: rows of x of the entries,
    [len(array)] or [len(array), entries of each]."""
    return keep_for_graph(_prepared(array, places, count, tile))


@cached_per_tensor
def _prepared(array: Tensor, places: Tensor, count: int, tile: SegmentTile) -> SegmentSums:
    found = ordered(bounds_of(array, count), places.shape[1] if places.ndim == 2 else 1, tile)
    begins, stops, _ = found.slots.unbind(1)
    kind = (found.codes & 3)[:, None]
    step = torch.where(kind == 0, 1, torch.where(kind == 1, tile.middle, tile.rows))
    entries = torch.stack([begins + n * step for n in range(tile.depth)], 1)
    flat = places.reshape(-1)
    read = torch.where(entries < stops[:, None], flat[entries.clamp(max=len(flat) - 1)], -1)
    return SegmentSums(tile, count, found._replace(slots=torch.cat([found.slots, read.int()], 1)))
