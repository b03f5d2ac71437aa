"""The forms in which a kernel map is a sparse operand map[o, k, i]: one for each storage that a kernel reads.

pairs        lists of pairs per tap (weight-stationary)
compacted    tiles of outputs with the taps that occur in each (output-stationary); compacted_t: of the transposed map
grouped      groups of pairs of one tap
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pumice.coords import KernelMap, Order, settle
from pumice.language.parse import parse
from pumice.language.rewrite import Stored

_TEXTS = {
    "pairs": "map[o[p], k[p], i[p]] = 1 ; k:sorted",
    "compacted": "map[rows[tile[e],b], k[e], met[e,b]] = 1 ; tile:sorted, rows:distinct, rows:onto",
    "compacted_t": "map[met[e,b], k[e], rows[tile[e],b]] = 1 ; tile:sorted, rows:distinct, rows:onto",
    "grouped": "map[o[g,q], k[g], i[g,q]] = 1",
}


_FORMS_OF: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cpu": (("pairs",), ("pairs",)),
    "cuda": (("compacted",), ("compacted", "compacted_t", "grouped")),
}
"""The forms that are passed on a device: without gradients, and with."""


def form(name: str) -> Stored:
    """The form of that name."""
    return FORMS[name].stored


@dataclass(frozen=True)
class MapForm:
    """A form and how its arrays are read from a map. sizes: what coords.settle has to read before."""

    stored: Stored
    arrays: Callable[[KernelMap], Mapping[str, Tensor]]
    sizes: Callable[[KernelMap], Sequence[tuple[KernelMap, int, Order | None]]] = lambda _: ()


@lru_cache(maxsize=16)
def _stored(text: str) -> Stored:
    statement = parse(text)
    return Stored(statement.target.indices, facts=statement.facts, ones=True)


def _pairs(found: KernelMap) -> Mapping[str, Tensor]:
    inputs, outputs, _ = found.pairs()
    return {"o": outputs, "k": found.taps(), "i": inputs}


def _compacted(found: KernelMap) -> Mapping[str, Tensor]:
    rows, tiles, taps, met = found.compacted(block_of(found.num_outputs))
    return {"rows": rows, "tile": tiles, "k": taps, "met": met}


def _grouped(found: KernelMap) -> Mapping[str, Tensor]:
    taps, inputs, outputs = found.grouped(group_of(found.num_outputs))
    return {"o": outputs, "k": taps, "i": inputs}


def passed(found: KernelMap, differentiable: bool) -> tuple[tuple[str, ...], list[Tensor]]:
    """The arrays of a map for a call, with their tokens: in the forms that its device's lowerings like.

    While torch.compile traces, what is not there yet stays unmade: the pairs alone serve too.
    """
    names = _names(found, differentiable)
    if torch.compiler.is_compiling():
        names = tuple(name for name in names if found.has(("form", name))) or ("pairs",)
    held = [found.storage(("form", name), lambda m, name=name: _read(m, name)) for name in names]
    return tuple(t for tokens, _ in held for t in tokens), [x for _, arrays in held for x in arrays]


def _names(found: KernelMap, differentiable: bool) -> tuple[str, ...]:
    inference, training = _FORMS_OF.get(found.device.type, _FORMS_OF["cpu"])
    return training if differentiable else inference


def settled(found: Sequence[KernelMap], differentiable: bool) -> None:
    """Lay maps out in the forms that `passed` will give, with one read of all their sizes."""
    wanted: list[tuple[KernelMap, int, Order | None]] = []
    for one in found:
        for name in _names(one, differentiable):
            wanted += FORMS[name].sizes(one)
    settle(wanted)
    for one in found:
        passed(one, differentiable)


def _read(found: KernelMap, name: str) -> tuple[tuple[str, ...], list[Tensor]]:
    arrays = FORMS[name].arrays(found)
    return tuple(f"map@{name}@0@{local}" for local in arrays), list(arrays.values())


def block_of(outputs: int) -> int:
    """Outputs of a tile: fewer where there are too few tiles to fill a GPU."""
    return 64 if outputs < 40_000 else 128


def group_of(outputs: int) -> int:
    """Pairs of a group: some thousand, so that a group's weights are added to memory rarely."""
    return 2048 if outputs < 500_000 else 8192


def _tile_sizes(found: KernelMap) -> Sequence[tuple[KernelMap, int, Order | None]]:
    if found.flipped and found.symmetric:
        # Its tiles are those of the map as it was found.
        found = found.transpose()
    (how,) = Order.splits(found.volume, 1)
    return [(found, block_of(found.num_outputs), how)]


def _group_sizes(found: KernelMap) -> Sequence[tuple[KernelMap, int, Order | None]]:
    return [(found.transpose() if found.flipped else found, 0, None)]


FORMS: Mapping[str, MapForm] = {
    "pairs": MapForm(_stored(_TEXTS["pairs"]), _pairs),
    "compacted": MapForm(_stored(_TEXTS["compacted"]), _compacted, _tile_sizes),
    "compacted_t": MapForm(
        _stored(_TEXTS["compacted_t"]), lambda m: _compacted(m.transpose()), lambda m: _tile_sizes(m.transpose())
    ),
    "grouped": MapForm(_stored(_TEXTS["grouped"]), _grouped, _group_sizes),
}
