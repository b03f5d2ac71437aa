"""What a run over buffers leaves of levels and maps, and how a scene is given its own of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pumice.coords import Geometry, KernelMap, Relation
from pumice.coords.buffer import Packer
from pumice.coords.outputs import level_key, site_of
from pumice.coords.segments import RUNS, split_runs_together
from pumice.errors import OptionError
from pumice.lower import maps
from pumice.lower.direct import Held, Pattern

Storage = tuple[Hashable, bool]
"""The name of what a map keeps, and the direction of the map."""


@dataclass(frozen=True)
class Length:
    """How many rows of an array are a scene's: the sum over words [first, last) of each over `per`, rounded up."""

    first: int
    last: int
    per: int = 1

    def of(self, words: Sequence[int]) -> int:
        if self.per == 1 and self.last == self.first + 1:
            return words[self.first]
        return sum(-(-word // self.per) for word in words[self.first : self.last])


@dataclass(frozen=True, eq=False)
class MapLevel:
    """Coordinates, how many are a scene's, and the relation that makes them of which level."""

    coords: Tensor
    length: Length
    above: int
    relation: Relation


@dataclass(frozen=True, eq=False)
class MapPlan:
    """A map from one level to another. table: its array.

    forms: the tokens and arrays of each. ends: where the ends are of arrays of tiles. passed: the tokens and arrays
    that calls are passed; patterns: what is the same of those arrays for all scenes. totals: the words that tell its
    pairs, () where none do.
    """

    relation: Relation
    flipped: bool
    levels: tuple[int, int]
    table: int
    forms: Mapping[Storage, tuple[tuple[str, ...], tuple[int, ...]]]
    ends: Mapping[int, int]
    passed: Mapping[tuple[tuple[str, bool], bool], tuple[tuple[str, ...], tuple[int, ...]]]
    patterns: Mapping[Storage, Pattern]
    totals: tuple[int, ...]

    def of(
        self, sizes: tuple[int, int], arrays: Sequence[Tensor], rows: Sequence[int], words: Sequence[int]
    ) -> KernelMap:
        """The map of a scene with so many inputs and outputs; rows: of the arrays."""
        kept: dict[Storage, Any] = {
            name: (tokens, [arrays[n] for n in places]) for name, (tokens, places) in self.forms.items()
        }
        table = arrays[self.table]
        for (name, flipped), (tokens, places) in self.passed.items():
            held, pattern = [arrays[n] for n in places], self.patterns[name, flipped]
            kept[name, flipped] = tokens, held
            kept[("held", name[1]), flipped] = Held(held, pattern, [rows[n] for n in places])
        if self.totals:
            kept["totals", False] = words[slice(*self.totals)]
        return KernelMap(self.relation, table, *sizes, self.flipped, _storages=kept)


@dataclass(frozen=True, eq=False)
class Contents:
    """words int32: the status, how many voxels each level has, and what else tells lengths. arrays: contiguous int32;
    lengths: how much of each is a scene's. asked: by arrays of tiles how long pieces of their runs scenes asked for."""

    arrays: Sequence[Tensor]
    lengths: Sequence[Length]
    levels: Sequence[MapLevel]
    maps: Sequence[MapPlan]
    words: Tensor
    asked: Mapping[int, set[int]]

    def give(self, geometry: Geometry, words: Sequence[int], packer: Packer) -> None:
        """Give a scene its levels and maps; packer: of the arrays."""
        sizes, which = self._lengths
        known = [length.of(words) for length in sizes]
        rows = [known[n] for n in which]
        arrays, levels = packer.pack(rows), [geometry]
        for level in self.levels:
            # Not in one block with the maps, which whoever keeps coordinates alone would keep.
            coords = level.coords[: level.length.of(words)].clone()
            levels.append(Geometry(coords, site_of(levels[level.above].site, level.relation)))
        self._tell_ends(arrays)
        for plan in self.maps:
            inputs, outputs = (levels[n] for n in plan.levels)
            found = plan.of((len(inputs), len(outputs)), arrays, rows, words)
            inputs.keep(plan.relation, None, (found, None if outputs is inputs else outputs))
            if (key := level_key(plan.relation)) is not None:
                inputs.levels[key] = outputs

    @cached_property
    def _lengths(self) -> tuple[list[Length], list[int]]:
        """The distinct lengths, and which of them each array has."""
        places = {length: n for n, length in enumerate(dict.fromkeys(self.lengths))}
        return [*places], [places[length] for length in self.lengths]

    def _tell_ends(self, arrays: Sequence[Tensor]) -> None:
        """Of arrays of tiles; and what scenes before asked for is found for all of them at once."""
        wanted = []
        for plan in self.maps:
            for tiles, ends in plan.ends.items():
                array, asked = arrays[tiles], self.asked[tiles]
                RUNS.register(array, arrays[ends], len(plan.relation.offsets), asked)
                # Other threads' calls may ask for more meanwhile.
                wanted += [(array, arrays[ends].shape[0], most) for most in tuple(asked)]
        split_runs_together(wanted)


class Reader:
    """Reads what was found of a geometry in a buffer. laid: maps that are read as the planner picks; differentiable:
    for gradients, too."""

    def __init__(self, geometry: Geometry, laid: Sequence[KernelMap], differentiable: bool) -> None:
        self._laid, self._differentiable = laid, differentiable
        self._levels = _levels(geometry)
        self._words = [geometry.cloud.status]
        for one, *_ in self._levels:
            one.wait_for_all()
            self._words.append(one.cloud.count if one.cloud.needed is None else one.cloud.needed)
        self._read = len(self._words)
        self._told: dict[int, Length] = {}
        self._arrays: list[Tensor] = []
        self._lengths: list[Length] = []
        self._places: dict[int, int] = {}

    def contents(self) -> Contents:
        """Raises OptionError for forms whose lengths nothing tells, and where there are no maps."""
        numbers = {id(one): n for n, (one, *_) in enumerate(self._levels)}
        levels = [
            MapLevel(one.coords, _count(n), above, relation)
            for n, (one, above, relation) in enumerate(self._levels)
            if relation is not None
        ]
        plans = [
            self._map(found, (n, n if outputs is None else numbers[id(outputs)]))
            for n, (one, *_) in enumerate(self._levels)
            for found, outputs in one.maps.values()
        ]
        if not plans:
            raise OptionError("no maps are asked for")
        asked = {tiles: set[int]() for plan in plans for tiles in plan.ends}
        return Contents(self._arrays, self._lengths, levels, plans, torch.cat(self._words), asked)

    def _map(self, found: KernelMap, levels: tuple[int, int]) -> MapPlan:
        own = found.transpose() if found.flipped else found
        # Levels of the rows, and of what they meet, of the map as it was found.
        sides = levels if found.flipped else levels[::-1]
        forms, ends = {}, {}
        for (name, flipped), (tokens, arrays) in _forms_of(found):
            side = sides[flipped != name.endswith("_t")]
            lengths = self._form_lengths(own, name, side, dict(zip(tokens, arrays, strict=True)), ends)
            places = (self._array(array, length) for array, length in zip(arrays, lengths, strict=True))
            forms[("form", name), flipped] = tokens, tuple(places)
        passed, patterns = {}, {}
        for one in self._laid:
            if one._storages is found._storages:
                parts = [forms[("form", n), one.flipped] for n in maps.names_of(one, self._differentiable)]
                tokens, places = (
                    tuple(t for each, _ in parts for t in each),
                    tuple(n for _, each in parts for n in each),
                )
                passed[("passed", self._differentiable), one.flipped] = tokens, places
                pattern = Pattern(tokens, [self._arrays[n] for n in places])
                patterns[("passed", self._differentiable), one.flipped] = pattern
        table = self._array(found.table, _count(sides[0]))
        told = self._totals(own) if own.has("pair_counts") else None
        totals = () if told is None else (told.first, told.last)
        return MapPlan(found.relation, found.flipped, levels, table, forms, ends, passed, patterns, totals)

    def _form_lengths(
        self, own: KernelMap, name: str, outputs: int, given: Mapping[str, Tensor], ends: dict[int, int]
    ) -> list[Length]:
        """How long the arrays of a form are; outputs: the level that its rows are of. Notes where ends of tiles are."""
        axes, known = maps.FORMS[name].axes, dict[str, Length]()
        found = []
        for token, array in given.items():
            local = token.rpartition("@")[2]
            if local not in axes:
                raise OptionError(f"nothing tells how long {local} of the form {name} is")
            if local == "rows":
                # The first of a part; the others come behind it.
                tile = given[token.removesuffix("rows") + "tile"]
                told = RUNS.ends_of(tile, array.shape[0])
                if told is None:
                    raise OptionError(f"nothing tells how many entries the form {name} has")
                known = {"t": _count(outputs, array.shape[1]), "e": self._tell(told, told[-1:])}
                ends[self._array(tile, known["e"])] = self._array(told, known["t"])
            elif local == "o":
                totals, size = self._totals(own), array.shape[1]
                known = {"g": Length(totals.first, totals.last, size)}
            found.append(known[axes[local][0]])
        return found

    def _totals(self, own: KernelMap) -> Length:
        """The words with the pairs of each tap."""
        tally = own.pair_counts()
        return self._tell(tally, tally[:, -1])

    def _tell(self, of: Tensor, words: Tensor) -> Length:
        """Where words are told that belong to a tensor; once."""
        if id(of) not in self._told:
            self._words.append(words)
            self._told[id(of)] = Length(self._read, self._read + words.numel())
            self._read += words.numel()
        return self._told[id(of)]

    def _array(self, array: Tensor, length: Length) -> int:
        """The place of an array, which is noted once."""
        if id(array) not in self._places:
            self._places[id(array)] = len(self._arrays)
            self._arrays.append(array.contiguous())
            self._lengths.append(length)
        return self._places[id(array)]


def _count(level: int, per: int = 1) -> Length:
    return Length(1 + level, 2 + level, per)


def _levels(first: Geometry) -> list[tuple[Geometry, int, Relation | None]]:
    """All coordinates that were made of the first, each with the number of the level above it and its relation."""
    found: list[tuple[Geometry, int, Relation | None]] = [(first, -1, None)]
    for number, (geometry, *_) in enumerate(found):
        for (relation, _), (_, outputs) in geometry.maps.items():
            if outputs is not None and all(outputs is not one for one, *_ in found):
                found.append((outputs, number, relation))
    return found


def _forms_of(found: KernelMap) -> Iterator[tuple[tuple[str, bool], tuple[tuple[str, ...], list[Tensor]]]]:
    """The forms that a map was laid out in, with the direction of each."""
    for (name, flipped), value in tuple(found._storages.items()):
        if isinstance(name, tuple) and name[0] == "form":
            yield (name[1], flipped), value
