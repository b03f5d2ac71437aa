"""Grouping of kernel offsets that are multiplied together: pure functions of the pairs per offset.

In a batched GEMM over a group g, every offset costs as much as the longest one. The share of padding rows is

    padding(g) = 1 - sum over k in g of n[k] / (len(g) * max over k in g of n[k])            n[k]: pairs of offset k

which is at most

    spread(g) = 1 - min over k in g of n[k] / max over k in g of n[k]

TorchSparse (Tang et al., MLSys 2022) weighs padding against the regular work of larger products:

    separate    every offset by itself
    symmetric   offsets k and K-1-k of a submanifold map, which have equally many pairs; the centre by itself
    fixed       runs of a fixed number of offsets; all at once if the map is not symmetric
    adaptive    runs with spread(g) <= epsilon; batched if max n[k] < S, otherwise one plain GEMM per offset

Offsets are taken in the order 0, K-1, 1, K-2, ..., the centre last. If n is symmetric, as for a submanifold map, no run
separates k from K-1-k, and the centre, which pairs every row with itself, is alone.

Sources: order, spread, S and the ranges of epsilon and S follow TorchSparse's public code (torchsparse 2.1, files
backend/convolution/convolution_gather_scatter_cuda.cu and utils/tune.py), which multiplies the centre of a submanifold
map without gathering. Its untuned epsilon and S are 0, which is separate. Only the paper has fixed and symmetric and
does not give the length of the runs: width is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from pumice.errors import OptionError

Taps = tuple[int, ...]

EPSILONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # values of epsilon that TorchSparse's tuner tries
SIZES = (0, *range(5_000, 25_001, 2_500))  # values of S that it tries


class OffsetGroup(NamedTuple):
    """Kernel offsets multiplied together, in order: by one batched GEMM, or by one plain GEMM each."""

    taps: Taps
    batched: bool


@dataclass(frozen=True)
class Grouping:
    """How kernel offsets are grouped; kind: one of GROUPINGS.

    width (fixed): offsets, or pairs of offsets, in a run. epsilon, size (adaptive): the tolerated spread (0..1), and S,
    the number of pairs from which one offset fills a device. Both should be tuned per layer, as in the paper; the
    defaults are starting points.
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
        """The groups for offsets with these pair counts: each offset is in exactly one."""
        return _groups(self, tuple(counts))

    def __str__(self) -> str:
        settings = {"fixed": f"(width={self.width})", "adaptive": f"(epsilon={self.epsilon}, S={self.size})"}
        return self.kind + settings.get(self.kind, "")


def padding(counts: Sequence[int], taps: Sequence[int]) -> float:
    """The share of padding rows in a batched GEMM over these offsets."""
    longest = max((counts[tap] for tap in taps), default=0)
    return 1 - sum(counts[tap] for tap in taps) / (len(taps) * longest) if longest else 0.0


def spread(counts: Sequence[int], taps: Sequence[int]) -> float:
    """1 - shortest / longest of these offsets; an upper bound of their padding."""
    longest = max((counts[tap] for tap in taps), default=0)
    return 1 - min(counts[tap] for tap in taps) / longest if longest else 0.0


@lru_cache(maxsize=1024)
def _groups(how: Grouping, counts: Taps) -> tuple[OffsetGroup, ...]:
    return tuple(GROUPINGS[how.kind](how, counts))


def _separate(how: Grouping, counts: Taps) -> Iterator[OffsetGroup]:
    for tap in range(len(counts)):
        yield OffsetGroup((tap,), False)


def _symmetric(how: Grouping, counts: Taps) -> Iterator[OffsetGroup]:
    for unit in (*_units(counts), *_centre(counts)):
        yield OffsetGroup(unit, len(unit) > 1)


def _fixed(how: Grouping, counts: Taps) -> Iterator[OffsetGroup]:
    units = _units(counts)
    width = how.width if _mirrored(counts) else max(1, len(units))
    for at in range(0, len(units), width):
        yield OffsetGroup(_merge_units(units[at : at + width]), True)
    for unit in _centre(counts):
        yield OffsetGroup(unit, False)


def _adaptive(how: Grouping, counts: Taps) -> Iterator[OffsetGroup]:
    run: list[int] = []
    for tap in _outside_in(counts):
        if run and spread(counts, [*run, tap]) > how.epsilon:
            yield _as_group(how, counts, run)
            run = []
        run.append(tap)
    if run:
        yield _as_group(how, counts, run)
    for unit in _centre(counts):
        yield OffsetGroup(unit, False)


def _as_group(how: Grouping, counts: Taps, run: Sequence[int]) -> OffsetGroup:
    return OffsetGroup(tuple(sorted(run)), len(run) > 1 and max(counts[tap] for tap in run) < how.size)


def _mirrored(counts: Taps) -> bool:
    return len(counts) > 1 and counts == counts[::-1]


def _units(counts: Taps) -> list[Taps]:
    """Units that stay together: pairs of offsets, or offsets; without the centre of pairs."""
    if not _mirrored(counts):
        return [(tap,) for tap in range(len(counts))]
    return [(tap, len(counts) - 1 - tap) for tap in range(len(counts) // 2)]


def _outside_in(counts: Taps) -> Iterator[int]:
    """0, K-1, 1, K-2, ...; without the centre of pairs."""
    for tap in range(len(counts) // 2):
        yield from (tap, len(counts) - 1 - tap)
    if len(counts) % 2 and not _mirrored(counts):
        yield len(counts) // 2


def _centre(counts: Taps) -> list[Taps]:
    return [(len(counts) // 2,)] if _mirrored(counts) and len(counts) % 2 else []


def _merge_units(units: Sequence[Taps]) -> Taps:
    return tuple(sorted(tap for unit in units for tap in unit))


GROUPINGS: Mapping[str, Callable[[Grouping, Taps], Iterator[OffsetGroup]]] = MappingProxyType(
    {"separate": _separate, "symmetric": _symmetric, "fixed": _fixed, "adaptive": _adaptive}
)  # the groupings by name
