"""Which taps of a convolution are multiplied together: pure functions of how many pairs each tap has.

A batched multiply of taps g takes each as long as the longest, so that of its rows the share

    padding(g) = 1 - sum over k in g of n[k] / (len(g) * max over k in g of n[k])            n[k]: pairs of tap k

is filled up. TorchSparse (Tang et al., MLSys 2022, algorithms 4 and 5) weighs that against the regular work of larger
products:

    separate    every tap on its own
    symmetric   taps k and K-1-k of a submanifold map, which have as many pairs, in twos; the middle tap on its own
    fixed       runs of taps of a length settled beforehand; of a map that is not symmetric all at once
    adaptive    runs of taps as long as padding(g) <= epsilon; batched while max n[k] < S, plain from there on

Runs keep the order of the taps. Where n is the same from both ends, as that of a submanifold map, k and K-1-k go
together and the run is over such twos; the middle tap, which meets every row with itself, is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from pumice.errors import OptionError

Taps = tuple[int, ...]


class Group(NamedTuple):
    """Taps in their order that are multiplied together, in one batched product or each by a plain one."""

    taps: Taps
    batched: bool


@dataclass(frozen=True)
class Grouping:
    """How taps are grouped; kind: one of GROUPINGS.

    width: of fixed: how many taps, or twos of them, a run has. epsilon, size: of adaptive: the tolerated share of
    padding, and S, the number of pairs from which a tap fills a device by itself. The defaults are where
    to start from; both are meant to be tuned for a layer, as in the paper.
    """

    kind: str
    width: int = 4
    epsilon: float = 0.25
    size: int = 1 << 17

    def __post_init__(self) -> None:
        if self.kind not in GROUPINGS:
            raise OptionError(f"grouping {self.kind!r} is unknown; there are {', '.join(GROUPINGS)}")
        if self.width < 1 or self.size < 0 or not 0 <= self.epsilon <= 1:
            found = f"width={self.width}, size={self.size}, epsilon={self.epsilon}"
            raise OptionError(f"width is at least 1, size at least 0, epsilon from 0 to 1; found {found}")

    def groups(self, counts: Sequence[int]) -> tuple[Group, ...]:
        """The groups of taps with so many pairs each: every tap is in one of them."""
        return _groups(self, tuple(counts))

    def __str__(self) -> str:
        told = {"fixed": f"(width={self.width})", "adaptive": f"(epsilon={self.epsilon}, S={self.size})"}
        return self.kind + told.get(self.kind, "")


def padding(counts: Sequence[int], taps: Sequence[int]) -> float:
    """The share of rows of a batched multiply of these taps that is filled up."""
    longest = max((counts[tap] for tap in taps), default=0)
    return 1 - sum(counts[tap] for tap in taps) / (len(taps) * longest) if longest else 0.0


@lru_cache(maxsize=1024)
def _groups(how: Grouping, counts: Taps) -> tuple[Group, ...]:
    return tuple(GROUPINGS[how.kind](how, counts))


def _separate(how: Grouping, counts: Taps) -> Iterator[Group]:
    for tap in range(len(counts)):
        yield Group((tap,), False)


def _symmetric(how: Grouping, counts: Taps) -> Iterator[Group]:
    for unit in (*_units(counts), *_middle(counts)):
        yield Group(unit, len(unit) > 1)


def _fixed(how: Grouping, counts: Taps) -> Iterator[Group]:
    units = _units(counts)
    width = how.width if _mirrored(counts) else max(1, len(units))
    for at in range(0, len(units), width):
        yield Group(_together(units[at : at + width]), True)
    for unit in _middle(counts):
        yield Group(unit, False)


def _adaptive(how: Grouping, counts: Taps) -> Iterator[Group]:
    run: list[Taps] = []
    for unit in _units(counts):
        if run and padding(counts, _together([*run, unit])) > how.epsilon:
            yield _weighed(how, counts, _together(run))
            run = []
        run.append(unit)
    if run:
        yield _weighed(how, counts, _together(run))
    for unit in _middle(counts):
        yield Group(unit, False)


def _weighed(how: Grouping, counts: Taps, taps: Taps) -> Group:
    return Group(taps, len(taps) > 1 and max(counts[tap] for tap in taps) < how.size)


def _mirrored(counts: Taps) -> bool:
    return len(counts) > 1 and counts == counts[::-1]


def _units(counts: Taps) -> list[Taps]:
    """What is not taken apart: twos of taps, or taps; without the middle one of twos."""
    if not _mirrored(counts):
        return [(tap,) for tap in range(len(counts))]
    return [(tap, len(counts) - 1 - tap) for tap in range(len(counts) // 2)]


def _middle(counts: Taps) -> list[Taps]:
    return [(len(counts) // 2,)] if _mirrored(counts) and len(counts) % 2 else []


def _together(units: Sequence[Taps]) -> Taps:
    return tuple(sorted(tap for unit in units for tap in unit))


GROUPINGS: Mapping[str, Callable[[Grouping, Taps], Iterator[Group]]] = MappingProxyType(
    {"separate": _separate, "symmetric": _symmetric, "fixed": _fixed, "adaptive": _adaptive}
)
"""The groupings by name."""
