"""Products of rows of blocks by a matrix on a GPU, on tensor cores: block-sparse times dense above all.

    T[32*S[p] + i, n] = sum over p, q, j of V[p,q,i,j] * X[d*K[p,q] + j, n]     S sorted; its values name rows of blocks

The places of blocks are prepared once per pair of index arrays: of each row of blocks the list of those that there are,
without padding. A program computes a slice of the columns of a row of blocks. Where blocks are many it takes two rows,
which read the rows of X that either has a block for once, and multiplies by zeros where one has none: reading X through
the second-level cache takes longer than multiplying. Rows with many blocks come first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement
from pumice.language.nodes import Access, Affine, Index, Statement, indices_of
from pumice.lower.segment_sums import PARTIAL, Roles, SegmentStep, partial_ranges, roles_of
from pumice.runtime.cache import cached_per_tensor
from pumice.runtime.launch import BoundKernel, is_hopper, keep_for_graph, kernel
from pumice.runtime.repeat import NewTensor, OpenArguments, RepeatedLaunch
from pumice.schedule.predict import Work
from pumice.schedule.tile import PROCESSORS

_FAR = 1 << 31
_HEIGHT, _DEPTHS = 32, (32, 64, 128)
"""Of blocks. The general kernel is as fast with higher ones, whose rows need no company, and with those of 16 rows."""
_TYPES = (torch.float16, torch.bfloat16)
_FEW = 16
"""Columns below which those of a tile would be padding."""
_NARROW, _WIDE, _LONG = 64, 256, 16  # Columns of a program at least and at most; blocks of a long row
_STEP = 32  # Depths of an iteration; deeper blocks are read in several


class RowForm(NamedTuple):
    """A statement over rows of blocks. roles: of the operands; depth: of a block; within: the indices within it;
    turned: its values are [depth, height]."""

    roles: Roles
    depth: int
    within: tuple[str, str]
    turned: bool

    @property
    def units(self) -> int:
        """Size of a block in the unit of the kernel's offsets into values: _STEP values, or _STEP rows if turned."""
        return self.depth // _STEP * (1 if self.turned else _HEIGHT)


@lru_cache(maxsize=1024)
def form_of(statement: Statement) -> RowForm | str:
    """The form of a statement, or the reason why it has none."""
    target, factors = _blocked(statement.target), statement.terms[0].factors if len(statement.terms) == 1 else ()
    gathered = [(f, b) for f in factors if isinstance(f, Access) and (b := _blocked(f)) is not None]
    others = [f for f in factors if isinstance(f, Access) and _blocked(f) is None]
    if target is None or len(gathered) != 1 or len(others) != 1 or len(factors) != 2:
        return "it is not one product of blocks by the rows that an index array names"
    ((x, read),), (values,) = gathered, others
    height, i, rows = target
    depth, j, places = read
    inner = [e.bare for e in values.indices[-2:]]
    if len(values.indices) < 3 or inner not in ([i, j], [j, i]):
        return "no factor holds blocks, of [entry, row, depth]"
    if height != _HEIGHT or depth not in _DEPTHS:
        return f"blocks are of {_HEIGHT} x {' or '.join(map(str, _DEPTHS))}, found {height} x {depth}"
    bare = (Access(x.name, places), Access(values.name, values.indices[:-2]))
    ranges = tuple((name, size) for name, size in statement.ranges if name not in (i, j))
    terms = (replace(statement.terms[0], factors=bare),)
    roles = roles_of(replace(statement, target=Access(statement.target.name, rows), terms=terms, ranges=ranges))
    return roles if isinstance(roles, str) else RowForm(roles, depth, (i, j), inner == [j, i])


def _blocked(access: Access) -> tuple[int, str, tuple[Affine, ...]] | None:
    """(size, index within a block, indices of blocks) of the access A[size * a[e] + index, ...]; None for others."""
    first, *others = access.indices or (Affine(()),)
    if first.constant or len(first.terms) != 2:
        return None
    (size, array), (one, index) = sorted(first.terms, key=lambda term: isinstance(term[1], Index))
    if one != 1 or not isinstance(index, Index) or not isinstance(array, Access) or index.name in indices_of(*others):
        return None
    return size, index.name, (Affine(((1, array),)), *others)


def refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why a statement is no product of rows of blocks here, or None."""
    form = form_of(statement)
    if isinstance(form, str):
        return form
    x, values = operands[form.roles.rows], operands[form.roles.values]
    if x.dtype not in _TYPES or values.dtype != x.dtype:
        return "the factors are not both of float16 or bfloat16"
    if partial_ranges(bound, x):
        return PARTIAL
    if tuple(bound.extents[name] for name in form.within) != (_HEIGHT, form.depth):
        return "blocks overlap, or have gaps between them"
    width, rows = math.prod(x.shape[1:]), -(-bound.shape[0] // _HEIGHT)
    if width < _FEW:
        return f"there are fewer than {_FEW} columns"
    if 0 in bound.shape or 0 in bound.extents.values():
        return "it is empty"
    if rows * -(-width // _NARROW) < PROCESSORS and values.numel() > _LONG * rows * _HEIGHT * form.depth:
        return "rows of blocks are few and long: programs of the general kernel share them"
    return None


def work(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> Work:
    """X is read for each row of blocks, through the second-level cache."""
    form, points = form_of(statement), bound.points(indices_of(statement))
    assert isinstance(form, RowForm)
    return Work(2 * points, cache=operands[form.roles.rows].element_size() * points / _HEIGHT, matrix=True)


class BlockRowStep(SegmentStep):
    """A step of a plan: a statement that `refusal` accepts."""

    result_at = 4

    def _roles_of(self, statement: Statement) -> Roles:
        form = form_of(statement)
        assert isinstance(form, RowForm)
        self._form = form
        return form.roles

    def _ready(self, operands: Mapping[str, Tensor]) -> tuple[BlockRows, tuple[Tensor, ...]]:
        roles, most = self._roles, (self.bound.shape[0], operands[self._roles.rows].shape[0])
        ready = prepared(operands[roles.segments], operands[roles.places], self._form, most, -(-self._width // _WIDE))
        return ready, (operands[roles.values].contiguous(),)


class RowTile(NamedTuple):
    """columns: of a program; stages: iterations whose loads are under way."""

    columns: int
    stages: int

    @classmethod
    def default(cls, count: int, groups: int, width: int) -> RowTile:
        """The tile for programs of `count` rows of blocks, the fastest of 40 on an H200 (4096 x 4096 by as much).
        groups: of so many rows. Few programs should be small, with many loads under way, each of which takes long."""
        columns = max(16, min(_WIDE, 1 << (width - 1).bit_length()))
        while columns > _NARROW and groups * -(-width // columns) < 2 * PROCESSORS:
            columns //= 2
        return cls(columns, 5 if columns < _WIDE else 2 + count)


class PresentBlocks(NamedTuple):
    """The blocks that there are, by rows. rows, places: of blocks of the target and of x; parts: of the values."""

    rows: Tensor
    places: Tensor
    parts: Tensor

    @classmethod
    def of(cls, segments: Tensor, places: Tensor, most: tuple[int, int]) -> PresentBlocks:
        """Those of the index arrays. most: rows of blocks of the target and of x."""
        flat = places.reshape(-1).long()
        rows = segments.long().repeat_interleave(len(flat) // len(segments))
        there = (flat >= 0) & (flat < most[1]) & (rows >= 0) & (rows < most[0])
        parts = there.nonzero()[:, 0]
        return cls(rows[parts], flat[parts], parts)


class BlockLists(NamedTuple):
    """The iterations of programs for `count` rows of blocks each; see block_row_kernels.block_rows."""

    count: int
    heads: Tensor
    words: Tensor


def listed(blocks: PresentBlocks, most: tuple[int, int], form: RowForm, count: int) -> BlockLists | None:
    """The lists of blocks, None if a place has several blocks. most: as of PresentBlocks.of."""
    device = blocks.rows.device
    key, order = (blocks.rows // count * most[1] + blocks.places).sort(stable=True)
    within = blocks.rows[order] % count
    other = torch.ones_like(key, dtype=torch.bool)
    if count > 1:
        same = key[1:] == key[:-1]
        if bool((same & (within[1:] == within[:-1])).any()):
            return None
        other[1:] = ~same
    key, at = key[other], other.cumsum(0) - 1
    parts = torch.full((len(key), count), -1, device=device)
    parts[at, within] = blocks.parts[order]
    steps = form.depth // _STEP
    number = torch.arange(steps, device=device)[:, None]
    parts = torch.where(parts[:, None] < 0, -1, parts[:, None] * form.units + number)
    places = (key % most[1])[:, None, None] * steps + number
    words = torch.cat([places, parts], 2).reshape(-1, 1 + count)
    words = torch.cat([words, words.new_zeros(1, 1 + count)]).int()
    groups = torch.arange(-(-most[0] // count) + 1, device=device)
    starts = torch.searchsorted(key // most[1], groups) * steps
    lengths, longest_first = starts.diff().sort(descending=True, stable=True)
    starts = starts[longest_first]
    heads = torch.stack([starts, lengths, longest_first], 1).int()
    return BlockLists(count, torch.cat([heads, words[starts]], 1), words)


def _best(blocks: PresentBlocks, most: tuple[int, int], form: RowForm, slices: int) -> BlockLists:
    """The lists with which programs take the least time. slices: of _WIDE columns."""
    found = listed(blocks, most, form, 1)
    assert found is not None
    if -(-most[0] // 2) * slices < 2 * PROCESSORS:
        return found
    both = listed(blocks, most, form, 2)
    return found if both is None or len(both.words) * _COST_OF_TWO > len(found.words) else both


_COST_OF_TWO = 1.14
"""Time of an iteration of two rows of blocks, over that of one row. On an H200 (fp16, 4096 x 4096 by as much), us:
share of blocks     0.5   0.25   0.1   0.05
one row             239    136    65     41
two rows            208    133    68     45"""


@dataclass(frozen=True, eq=False)
class BlockRows:
    """The blocks of two index arrays in lists. most: rows of the target and of x; launches: by dtypes and shape."""

    form: RowForm
    lists: BlockLists
    most: tuple[int, int]
    launches: dict[Any, tuple[BoundKernel, int, list[int]]] = field(default_factory=dict)

    def run(self, x: Tensor, values: Tensor, y: Tensor) -> Tensor:
        """Write the products to y. x [rows, n]; values: of the blocks, in their order."""
        key = x.dtype, y.dtype, x.shape
        launch = self.launches.get(key) or self.launches.setdefault(key, self._launch(x, values, y))
        run, programs, numbers = launch
        run(programs, self._tensors(x, values, y), numbers)
        return y

    def repeated(
        self, factors: tuple[Tensor, Tensor], dtype: torch.dtype, open: OpenArguments
    ) -> RepeatedLaunch | None:
        """`run` of contiguous factors (x, values) like these, if it has run."""
        x, values = factors
        launch = self.launches.get((x.dtype, dtype, x.shape))
        if launch is None:
            return None
        kernel, programs, numbers = launch
        result = NewTensor((self.most[0], x.shape[1]), dtype, x.device)
        return RepeatedLaunch.of(kernel, (programs, self._tensors(x, values, x), numbers), open, result, self)

    def _tensors(self, x: Tensor, values: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x, values, self.lists.heads, self.lists.words, y

    def _launch(self, x: Tensor, values: Tensor, y: Tensor) -> tuple[BoundKernel, int, list[int]]:
        form, lists, width = self.form, self.lists, x.shape[1]
        tile = RowTile.default(lists.count, len(lists.heads), width)
        constants = {
            "HEIGHT": _HEIGHT,
            "DEPTH": form.depth,
            "STEP": _STEP,
            "TURNED": form.turned,
            "COUNT": lists.count,
            "COLUMNS": tile.columns,
            "VECTOR": min(width & -width, 8),
            "EVEN": width % tile.columns == 0,
            "WHOLE": x.shape[0] % _STEP == 0,
            "FAR": max(x.numel(), values.numel(), y.numel()) >= _FAR,
            # From Hopper on, tensor cores multiply at least 64 rows.
            "SWAPPED": lists.count == 1 and (x.device.type != "cuda" or is_hopper(x.device)),
            "STAGES": 2 if torch.version.hip else tile.stages,  # More do not fit
        }
        made = kernel("block_row_kernels.block_rows", "lower").bound(self._tensors(x, values, y), constants)
        programs = len(lists.heads) * -(-width // tile.columns)
        return made, programs, [len(lists.heads), width, x.shape[0], y.shape[0]]

    def run_torch(self, x: Tensor, values: Tensor, y: Tensor) -> Tensor:
        """As run, in plain torch."""
        form, (count, heads, words), total = self.form, self.lists, y.float().zero_()
        shape = (form.depth, _HEIGHT) if form.turned else (_HEIGHT, form.depth)
        stored = values.reshape(-1, *shape).float()
        stored = stored.mT if form.turned else stored
        for start, length, group in heads[:, :3].tolist():
            for place, *parts in words[start : start + length].tolist():
                read = x[place * _STEP : (place + 1) * _STEP].float()
                for row, part in enumerate(parts):
                    block = stored[part // form.units, :, part % form.units * _STEP :]
                    mine = total[(group * count + row) * _HEIGHT :][:_HEIGHT]
                    mine += (block[:, : len(read)] @ read)[: len(mine)] if part >= 0 else 0
        return y.copy_(total)


def prepared(segments: Tensor, places: Tensor, form: RowForm, most: tuple[int, int], slices: int) -> BlockRows:
    """The products over the blocks of two index arrays. most: rows of the target and of x; slices: of _WIDE columns."""
    return keep_for_graph(_prepared(segments, places, form, most, min(slices, 2 * PROCESSORS)))


@cached_per_tensor
def _prepared(segments: Tensor, places: Tensor, form: RowForm, most: tuple[int, int], slices: int) -> BlockRows:
    blocks = -(-most[0] // _HEIGHT), -(-most[1] // form.depth)
    return BlockRows(form, _best(PresentBlocks.of(segments, places, blocks), blocks, form, slices), most)
