"""Search of epsilon and S of the adaptive grouping for one layer (TorchSparse, Tang et al., MLSys 2022, algorithm 5).

Every pair of epsilon and S is tried on every sample; the pair with the smallest total latency is taken. Pairs that make
the same products of a sample (see `products`) share one measurement. The search space is ours, a little under the
thousand configurations that the paper states without listing them: epsilon in steps of 0.05, S in steps of a quarter of
an octave.

Plain data and a function `seconds`: no tensors, no launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from pumice.schedule.dataflow import Grouping, Taps

EPSILONS: tuple[float, ...] = tuple(step / 20 for step in range(21))
SIZES: tuple[int, ...] = (0, *(round(2 ** (step / 4)) for step in range(8 * 4, 19 * 4 + 1)), 1 << 31)
"""Values of epsilon and S. The largest S is above the rows of any map: every group is batched."""
UNTUNED = Grouping("adaptive")

Counts = tuple[int, ...]  # pairs per kernel offset of a layer on a sample
Seconds = Callable[[int, Grouping, float], float]
"""Seconds of the layer on the sample of this number with a grouping, and the fewest so far of any: a measurement that
exceeds these by far may stop early. Raises PumiceError if the layer cannot run."""


@dataclass(frozen=True)
class GroupingSearch:
    """Result of a search. best: the fastest grouping. seconds: by grouping, summed over the samples, for the first of
    those that make the same products."""

    best: Grouping
    seconds: Mapping[Grouping, float]

    @property
    def untuned(self) -> float:
        """Seconds of the default epsilon and S."""
        return self.seconds[UNTUNED]


@lru_cache(maxsize=1)
def search_space() -> tuple[Grouping, ...]:
    """The groupings that are tried, the default first."""
    found = (Grouping("adaptive", epsilon, size) for epsilon, size in product(EPSILONS, SIZES))
    return UNTUNED, *(grouping for grouping in found if grouping != UNTUNED)


def products(grouping: Grouping, counts: Counts) -> tuple[Taps, ...]:
    """The kernel offsets of each product with pairs, in order."""
    found: list[Taps] = []
    for group in grouping.groups(counts):
        found += [group.taps] if group.batched else [(tap,) for tap in group.taps]
    return tuple(taps for taps in found if any(counts[tap] for tap in taps))


@lru_cache(maxsize=128)
def _products_in_space(counts: Counts) -> tuple[tuple[Taps, ...], ...]:
    """The products with every grouping of the search space."""
    return tuple(products(grouping, counts) for grouping in search_space())


def search_grouping(counts: Sequence[Counts], seconds: Seconds) -> GroupingSearch:
    """Algorithm 5 for a layer with these pairs per kernel offset on each sample. The default epsilon and S are among
    those tried, and are kept unless others are faster."""
    known: dict[tuple[int, tuple[Taps, ...]], float] = {}
    distinct: dict[tuple[tuple[Taps, ...], ...], Grouping] = {}
    for grouping, *made in zip(search_space(), *map(_products_in_space, counts), strict=True):
        distinct.setdefault(tuple(made), grouping)
    least, found = [math.inf] * len(counts), dict[Grouping, float]()
    for each, grouping in distinct.items():
        total = 0.0
        for sample, own in enumerate(each):
            if (sample, own) not in known:
                known[sample, own] = seconds(sample, grouping, least[sample])
                least[sample] = min(least[sample], known[sample, own])
            total += known[sample, own]
        found[grouping] = total
    return GroupingSearch(min(found, key=lambda grouping: found[grouping]), found)
