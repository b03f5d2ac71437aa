"""Which taps of a convolution are multiplied together: pure functions of how many pairs each tap has.

A batched multiply of taps g takes each as long as the longest, so that of its rows the share

    padding(g) = 1 - sum over k in g of n[k] / (len(g) * max over k in g of n[k])            n[k]: pairs of tap k

is filled up, which is at most

    spread(g) = 1 - min over k in g of n[k] / max over k in g of n[k]

TorchSparse (Tang et al., MLSys 2022) weighs that against the regular work of larger products:

    separate    every tap on its own
    symmetric   taps k and K-1-k of a submanifold map, which have as many pairs, in twos; the middle tap on its own
    fixed       runs of taps of a length settled beforehand; of a map that is not symmetric all at once
    adaptive    runs of taps as long as spread(g) <= epsilon; batched where max n[k] < S, plain from there on

Taps are taken in the order 0, K-1, 1, K-2, ... with the middle one last. Where n is the same from both ends, as that of
a submanifold map, no run parts k from K-1-k, and the middle tap, which meets every row with itself, is alone.

Sources: order, spread, S and the ranges of both are those of TorchSparse's public code (torchsparse 2.1, files
backend/convolution/convolution_gather_scatter_cuda.cu and utils/tune.py), which multiplies the middle tap of a
submanifold map without gathering it. Without tuning its epsilon and S are 0, which is separate; fixed and symmetric
are in the paper alone, and which runs it settles was not found: width is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from pumice.errors import OptionError

Taps = tuple[int, ...]

EPSILONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""The spreads that TorchSparse's tuner tries."""
SIZES = (0, *range(5_000, 25_001, 2_500))
"""The numbers S that it tries."""


class OffsetGroup(NamedTuple):
    """Taps in their order that are multiplied together, in one batched product or each by a plain one."""

    taps: Taps
    batched: bool


@dataclass(frozen=True)
class Grouping:
    """How taps are grouped; kind: one of GROUPINGS.

    width: of fixed: how many taps, or twos of them, a run has. epsilon, size: of adaptive: the tolerated spread, a
    share of 1, and S, the number of pairs from which a tap fills a device by itself. Both are meant to be tuned for a
    layer, as in the paper: EPSILONS and SIZES are what TorchSparse tries, and the defaults are where to start from.
    """

    kind: str
    width: int = 4
    epsilon: float = 0.3
    size: int = 25_000

    def __post_init__(self) -> None:
        if self.kind not in GROUPINGS:
            raise OptionError(f"grouping {self.kind!r} is unknown; there are {', '.join(GROUPINGS)}")
        if self.width < 1 or self.size < 0 or not 0 <= self.epsilon <= 1:
            found = f"width={self.width}, size={self.size}, epsilon={self.epsilon}"
            raise OptionError(f"width is at least 1, size at least 0, epsilon from 0 to 1; found {found}")

    def groups(self, counts: Sequence[int]) -> tuple[OffsetGroup, ...]:
        """The groups of taps with so many pairs each: every tap is in one of them."""
        return _groups(self, tuple(counts))

    def __str__(self) -> str:
        told = {"fixed": f"(width={self.width})", "adaptive": f"(epsilon={self.epsilon}, S={self.size})"}
        return self.kind + told.get(self.kind, "")


def padding(counts: Sequence[int], taps: Sequence[int]) -> float:
    """The share of rows of a batched multiply of these taps that is filled up."""
    longest = max((counts[tap] for tap in taps), default=0)
    return 1 - sum(counts[tap] for tap in taps) / (len(taps) * longest) if longest else 0.0


def spread(counts: Sequence[int], taps: Sequence[int]) -> float:
    """By what share the shortest of these taps is shorter than the longest; no less than their padding."""
    longest = max((counts[tap] for tap in taps), default=0)
    return 1 - min(counts[tap] for tap in taps) / longest if longest else 0.0


@lru_cache(maxsize=1024)
def _groups(how: Grouping, counts: Taps) -> tuple[OffsetGroup, ...]:
    return tuple(GROUPINGS[how.kind](how, counts))


def _separate(how: Grouping, counts: Taps) -> Iterator[OffsetGroup]:
    for tap in range(len(counts)):
        yield OffsetGroup((tap,), False)


def _symmetric(how: Grouping, counts: Taps) -> Iterator[OffsetGroup]:
    for unit in (*_units(counts), *_middle(counts)):
        yield OffsetGroup(unit, len(unit) > 1)


def _fixed(how: Grouping, counts: Taps) -> Iterator[OffsetGroup]:
    units = _units(counts)
    width = how.width if _mirrored(counts) else max(1, len(units))
    for at in range(0, len(units), width):
        yield OffsetGroup(_together(units[at : at + width]), True)
    for unit in _middle(counts):
        yield OffsetGroup(unit, False)


def _adaptive(how: Grouping, counts: Taps) -> Iterator[OffsetGroup]:
    run: list[int] = []
    for tap in _outside_in(counts):
        if run and spread(counts, [*run, tap]) > how.epsilon:
            yield _weighed(how, counts, run)
            run = []
        run.append(tap)
    if run:
        yield _weighed(how, counts, run)
    for unit in _middle(counts):
        yield OffsetGroup(unit, False)


def _weighed(how: Grouping, counts: Taps, run: Sequence[int]) -> OffsetGroup:
    return OffsetGroup(tuple(sorted(run)), len(run) > 1 and max(counts[tap] for tap in run) < how.size)


def _mirrored(counts: Taps) -> bool:
    return len(counts) > 1 and counts == counts[::-1]


def _units(counts: Taps) -> list[Taps]:
    """What is not taken apart: twos of taps, or taps; without the middle one of twos."""
    if not _mirrored(counts):
        return [(tap,) for tap in range(len(counts))]
    return [(tap, len(counts) - 1 - tap) for tap in range(len(counts) // 2)]


def _outside_in(counts: Taps) -> Iterator[int]:
    """0, K-1, 1, K-2, ...; without the middle one of twos."""
    for tap in range(len(counts) // 2):
        yield from (tap, len(counts) - 1 - tap)
    if len(counts) % 2 and not _mirrored(counts):
        yield len(counts) // 2


def _middle(counts: Taps) -> list[Taps]:
    return [(len(counts) // 2,)] if _mirrored(counts) and len(counts) % 2 else []


def _together(units: Sequence[Taps]) -> Taps:
    return tuple(sorted(tap for unit in units for tap in unit))


GROUPINGS: Mapping[str, Callable[[Grouping, Taps], Iterator[OffsetGroup]]] = MappingProxyType(
    {"separate": _separate, "symmetric": _symmetric, "fixed": _fixed, "adaptive": _adaptive}
)
"""The groupings by name."""
