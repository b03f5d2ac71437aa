"""Statements over lists of blocks on a GPU, each in one kernel on tensor cores: filters pruned in blocks above all.

    T[t(s) + dense, m] = sum over blocks e of segment s, channels c of V[e,m,c] * X[o(e) + dense, c]

As lower.entry_sums, where an entry is a block and an element a vector of as many channels as a block has: the sums of
the statement without m and c give segments, offsets, and the bits that tell where windows leave X. Several blocks of a
segment are read in an iteration, one after another along the reduction of one matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pumice.language.bind import BoundStatement
from pumice.language.nodes import Access, Affine, Index, Statement, affine, indices_of
from pumice.lower import entry_sums
from pumice.lower.entry_sums import OFFSET_BITS, EntrySums, EntryTile, missing_edge
from pumice.lower.kernel import float32_precision
from pumice.lower.nest_form import Form, Fusing, normalized, positions_of
from pumice.runtime.launch import is_hopper, keep_for_graph, kernel
from pumice.runtime.repeat import NewTensor, OpenArguments, Repeated, RepeatedLaunch
from pumice.schedule.predict import Work
from pumice.schedule.tile import PROCESSORS

_SIDES = (16, 32, 64, 128)
_TYPES = (torch.float32, torch.float16, torch.bfloat16)
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class BlockTile(NamedTuple):
    """points: of a program; parts: blocks of an iteration; warps; stages: iterations whose loads are under way."""

    points: int
    parts: int
    warps: int
    stages: int

    @classmethod
    def default(cls, blocks: BlockForm, segments: int, points: int, bits: int) -> BlockTile:
        """The tile for so many segments of `points` results. Measured on an H200 with layers of a ResNet-50, blocks of
        16 and 32, one and 32 images: a layer of one image has few programs, which should be small."""
        parts, programs = max(1, _DEPTH // blocks.channels), segments * -(-points // 32)
        if programs <= PROCESSORS:
            height, warps = 16, 1
        elif programs <= 2 * PROCESSORS or bits > 16:
            height, warps = 32, 4 if bits > 16 else 2
        else:
            height, warps = 64, 2
        return cls(height, parts, min(8, warps * max(1, blocks.outputs // 32)), 3)


_DEPTH = 64  # Channels of an iteration
_OVERLAPPED = 2 * PROCESSORS
"""Programs up to which kernels overlap: 0.7 us less per call, 3 to 8 us; larger ones took up to a fifth longer."""


class BlockForm(NamedTuple):
    """A statement over blocks. form: that of the statement without them; x, values: names of the factors; outputs,
    channels: of a block; turned: its values are [channels, outputs]."""

    form: Form
    x: str
    values: str
    outputs: int
    channels: int
    turned: bool


def refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why a statement is no sum over blocks here, or None."""
    found = matched(bound, _shapes(operands))
    if isinstance(found, str):
        return found
    kinds = {operands[found.x].dtype, operands[found.values].dtype}
    if len(kinds) > 1 or not kinds <= {*_TYPES}:
        return "the factors are not both of float32, float16 or bfloat16"
    return entry_sums.refused(found.form)


def work(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> Work:
    """X is read for each row of blocks, through the second-level cache."""
    found, points = matched(bound, _shapes(operands)), bound.points(indices_of(statement))
    assert isinstance(found, BlockForm)
    return Work(2 * points, cache=operands[found.x].element_size() * points / found.outputs, matrix=True)


def run(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Evaluate a statement that `refusal` accepts; a new tensor of `dtype`."""
    found = matched(bound, _shapes(operands))
    assert isinstance(found, BlockForm)
    ready = keep_for_graph(prepared(found, operands))
    if ready is None:
        return entry_sums.finished(bound, operands, dtype, None)
    x, values = operands[found.x], operands[found.values]
    return entry_sums.finished(bound, operands, dtype, lambda kind: ready.run(x, values, kind))


class BlockStep(entry_sums.EntryStep):
    """A step of a plan: a statement that `refusal` accepts."""

    run: Callable[[BoundStatement, Mapping[str, Tensor], torch.dtype], Tensor] = staticmethod(run)

    def repeated(self, operands: Mapping[str, Tensor], names: Sequence[str]) -> Repeated | None:
        """The step that ran as a function of X, or of both factors, see EntryStep.repeated."""
        statement, fixed = self.bound.statement, {name: x for name, x in operands.items() if name not in names}
        found = matched(self.bound, _shapes(operands))
        assert isinstance(found, BlockForm)
        ready, read = prepared(found, operands), (found.x, found.values)
        plain = statement.terms[0].coefficient == 1 and not statement.accumulate
        if not plain or ready is None or found.x not in names:
            return None
        x, values = (operands[name] for name in read)
        launch = ready.repeated((x, values), self._result(ready.sums, x), OpenArguments.of(names, read, 6))
        if launch is not None and not ready.sums.pads and x.is_contiguous() and values.is_contiguous():
            return launch
        return lambda tensors: self({**fixed, **dict(zip(names, tensors, strict=True))})


def _shapes(operands: Mapping[str, Tensor]) -> Shapes:
    return tuple([(name, tuple(t.shape)) for name, t in operands.items()])


@lru_cache(maxsize=1024)
def matched(bound: BoundStatement, shapes: Shapes) -> BlockForm | str:
    """The blocks of a statement, or the reason why it has none. shapes: of the operands."""
    statement, known = bound.statement, dict(shapes)
    factors = statement.terms[0].factors
    if len(statement.terms) != 1 or len(factors) != 2 or not all(isinstance(f, Access) for f in factors):
        return "it is not one product of two factors"
    positions = positions_of(statement)
    for x, values in (factors, factors[::-1]):
        if isinstance(x, Access) and isinstance(values, Access) and len(positions) == 1:
            sides = [index.bare for index in values.indices]
            if len(sides) == 3 and None not in sides and sides[0] == positions[0]:
                return _of_factors(bound, known, (x, values), [name or "" for name in sides[1:]])
    return "no factor holds blocks, of [entry, output, channel]"


def _of_factors(
    bound: BoundStatement, known: Mapping[str, tuple[int, ...]], factors: tuple[Access, Access], names: list[str]
) -> BlockForm | str:
    """The blocks of a statement whose second factor has them, with these indices."""
    statement, (x, values), extents = bound.statement, factors, bound.extents
    if any(extents[name] not in _SIDES for name in names):
        return f"blocks have sides of {', '.join(map(str, _SIDES))}, found {[extents[name] for name in names]}"
    for output, channel in (names, names[::-1]):
        target = _without(statement.target, output, extents[output], bound.shape)
        read = _without(x, channel, extents[channel], known[x.name])
        if target is None or read is None:
            continue
        left = replace(statement.terms[0], factors=(read, Access(values.name, values.indices[:1])))
        plain = replace(statement, target=target, terms=(left,), ranges=_others(statement.ranges, names))
        level = BoundStatement(plain, dict(_others(tuple(bound.ranges.items()), names)), _units(bound, output))
        sizes = {**known, x.name: (*known[x.name][:-1], known[x.name][-1] // extents[channel])}
        sizes[values.name] = known[values.name][:1]
        form = normalized(level, tuple(sizes.items()), Fusing(sliced=False))
        if isinstance(form, str):
            return form
        return BlockForm(form, x.name, values.name, extents[output], extents[channel], names[0] != output)
    return "blocks are not of the last axes of the target and of the other factor"


def _units(bound: BoundStatement, output: str) -> tuple[int, ...]:
    """The target's shape, its last axis in blocks."""
    return (*bound.shape[:-1], bound.shape[-1] // bound.extents[output])


def _others(pairs: tuple[tuple[str, Any], ...], names: list[str]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in pairs if name not in names)


def _without(access: Access, name: str, size: int, shape: tuple[int, ...]) -> Access | None:
    """The access A[..., a[e]] of blocks for A[..., size * a[e] + name]; None for others."""
    *others, last = access.indices
    arrays = [(c, atom) for c, atom in last.terms if isinstance(atom, Access)]
    whole = len(last.terms) == 2 and (1, Index(name)) in last.terms and not last.constant
    if not whole or len(arrays) != 1 or arrays[0][0] != size or shape[-1] % size or name in indices_of(*others):
        return None
    return Access(access.name, (*others, _single(arrays[0][1])))


def _single(atom: Index | Access) -> Affine:
    return affine([(1, atom)], 0)


@dataclass(frozen=True, eq=False)
class BlockSums:
    """The blocks of a statement in the order in which a tile reads them: `sums`, in vectors; see entry_kernels."""

    blocks: BlockForm
    tile: BlockTile
    sums: EntrySums

    def run(self, x: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The target. x, values: the factors."""
        sums, blocks = self.sums, self.blocks
        x, values = (functional.pad(x, sums.pads) if sums.pads else x).contiguous(), values.contiguous()
        shape = (*sums.shape[:-1], sums.shape[-1] * blocks.outputs)
        y = (torch.empty if sums.whole else torch.zeros)(shape, dtype=dtype, device=x.device)
        key = self._key(x)
        found = sums.launches.get(key) or sums.launches.setdefault(key, self._launch(key[0]))
        programs, words, counts, numbers, constants = found
        tensors = (x, values, words, counts, sums.targets, sums.edges, y)
        launch = kernel("entry_kernels.block_sums", "lower")
        launch(programs, tensors, numbers, constants, self.tile.warps, constants["OVERLAP"])
        return y

    def _key(self, x: Tensor) -> tuple[Any, ...]:
        """What a launch depends on besides the sizes; the precision is the first."""
        return (float32_precision() if x.dtype is torch.float32 else "ieee", self.tile, self.blocks[3:])

    def repeated(
        self, factors: tuple[Tensor, Tensor], result: NewTensor, open: OpenArguments | None
    ) -> RepeatedLaunch | None:
        """`run` of contiguous factors like these, if it has run."""
        found, sums = self.sums.launches.get(self._key(factors[0])), self.sums
        if found is None or open is None:
            return None
        programs, words, counts, numbers, constants = found
        y = factors[0].new_empty(0, dtype=result.dtype)
        tensors = (*factors, words, counts, sums.targets, sums.edges, y)
        bound = kernel("entry_kernels.block_sums", "lower").bound(
            tensors, constants, self.tile.warps, constants["OVERLAP"]
        )
        return RepeatedLaunch.of(bound, (programs, tensors, numbers), open, result, (self, found))

    def _rows(self) -> tuple[Tensor, Tensor]:
        """(words of each segment in a row, iterations of each): the first words are loaded without waiting."""
        sums, parts, device = self.sums, self.tile.parts, self.sums.words.device
        starts, words = sums.starts.cpu(), sums.words.cpu()
        counts = starts.diff()
        along = torch.arange(int(counts.max()) * parts, device="cpu")
        place = (starts[:-1, None] * parts + along).clamp(max=len(words) - 1)
        none = missing_edge(sums.edges.dtype) << OFFSET_BITS
        rows = words[place].masked_fill(along >= counts[:, None] * parts, none)
        # Copies have ended when they return, which an overlapped kernel relies on.
        return rows.to(device), counts.to(device)

    def _launch(self, precision: str) -> tuple[int, Tensor, Tensor, list[int], dict[str, Any]]:
        """(programs, words, counts, integers, constants) of a launch."""
        tile, sums = self.tile, self.sums
        numbers, (words, counts) = sums.numbers(), self._rows()
        programs = len(counts) * -(-sums.points // tile.points)
        constants = {
            "LOOPS": len(sums.loops),
            "POINTS": tile.points,
            "PARTS": tile.parts,
            "OUTPUTS": self.blocks.outputs,
            "CHANNELS": self.blocks.channels,
            "TURNED": self.blocks.turned,
            "EDGES": len(sums.edges) > 0,
            "MISSING": missing_edge(sums.edges.dtype),
            "OFFSET": OFFSET_BITS,
            "PRECISION": precision,
            "STAGES": tile.stages,
            "OVERLAP": programs <= _OVERLAPPED and is_hopper(words.device),
        }
        numbers = [*numbers[:4], 0, words.shape[1], *numbers[4:]]
        return programs, words, counts, numbers, constants


def prepared(blocks: BlockForm, operands: Mapping[str, Tensor], tile: BlockTile | None = None) -> BlockSums | None:
    """The sums over the blocks of these index arrays; None without blocks. tile: default: by size."""
    form, values = blocks.form, operands[blocks.values]
    *across, rows = form.views[0].shape
    tile = tile or BlockTile.default(blocks, rows, math.prod(across), 8 * values.element_size())
    first, *others = [operands[name] for name in form.arrays]
    sums = entry_sums.prepared(first, form, *others, tile=EntryTile(tile.points, 1, tile.parts, tile.warps))
    return None if sums is None else BlockSums(blocks, tile, sums)
