"""Batches of about as many voxels on each process."""

import itertools

import numpy as np
import pytest
from torch.utils.data import DataLoader

from pumice.data import BalancedBatchSampler
from pumice.errors import OptionError

SIZES = np.random.default_rng(0).lognormal(10, 0.5, 1003)


def epoch_of(sizes, batch, ranks, epoch=0, **options):
    """Batches of each step, by rank."""
    samplers = [BalancedBatchSampler(sizes, batch, ranks, rank, **options) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    assert len({len(sampler) for sampler in samplers}) == 1
    steps = [*zip(*samplers, strict=True)]
    assert len(steps) == len(samplers[0])
    return steps


@pytest.mark.parametrize(("count", "batch", "ranks"), [(1003, 2, 8), (1003, 1, 4), (7, 4, 3), (2, 3, 5), (12, 3, 1)])
def test_every_sample_once(count, batch, ranks):
    steps = epoch_of(SIZES[:count], batch, ranks)
    used = [*itertools.chain.from_iterable(itertools.chain.from_iterable(steps))]
    assert {*used} == {*range(count)}
    assert len(used) == -(-count // ranks) * ranks and max(map(used.count, {*used})) <= max(2, -(-ranks // count))
    assert all(len({*map(len, step)}) == 1 for step in steps)
    assert all(len(step[0]) == batch for step in steps[:-1])


def test_drop_last():
    steps = epoch_of(SIZES, 2, 8, drop_last=True)
    used = [*itertools.chain.from_iterable(itertools.chain.from_iterable(steps))]
    assert len(steps) == 62 and len(used) == len({*used}) == 62 * 16
    others = itertools.chain.from_iterable(itertools.chain.from_iterable(epoch_of(SIZES, 2, 8, 1, drop_last=True)))
    assert {*used} != {*others}


def random_imbalance(batch, ranks):
    order = np.random.default_rng(1).permutation(len(SIZES))[: len(SIZES) // (ranks * batch) * ranks * batch]
    sums = SIZES[order.reshape(-1, ranks, batch)].sum(2)
    found = sums.max(1) / sums.mean(1) - 1
    return found.max(), found.mean()


@pytest.mark.parametrize(("batch", "ranks"), [(1, 2), (1, 8), (4, 8)])
def test_balance(batch, ranks):
    worst, mean = random_imbalance(batch, ranks)
    for epoch in range(3):
        sampler = BalancedBatchSampler(SIZES, batch, ranks, 0, drop_last=True)
        sampler.set_epoch(epoch)
        found = sampler.imbalance()
        assert found[0] - 1 < worst / 2 and found[1] - 1 < mean / 20, (found, worst, mean)
        steps = epoch_of(SIZES, batch, ranks, epoch, drop_last=True)
        sums = [[SIZES[one].sum() for one in step] for step in steps]
        np.testing.assert_allclose(found[0], max(max(s) / np.mean(s) for s in sums))


def test_epochs_differ_and_repeat():
    first, again, other = (epoch_of(SIZES, 1, 4, epoch, seed=3) for epoch in (0, 0, 1))
    assert first == again != other
    # Others meet, too, not only in other steps.
    meet = [{frozenset(one[0] for one in step) for step in each} for each in (first, other)]
    assert len(meet[0] & meet[1]) < len(first) / 10
    assert epoch_of(SIZES, 1, 4, 5, shuffle=False) == epoch_of(SIZES, 1, 4, 0, shuffle=False)
    assert epoch_of(SIZES, 1, 4, seed=4) != first


def test_in_a_loader_without_a_group():
    sampler = BalancedBatchSampler([3, 1, 2, 5], 2)
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    batches = [*DataLoader([10, 11, 12, 13], batch_sampler=sampler)]
    assert sorted(int(v) for batch in batches for v in batch) == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (([], 1), "sizes"),
        (([1.0, 0.0], 1), "above 0"),
        (([float("nan")], 1), "finite"),
        (([1], 0), "batch_size"),
        (([1], 1, 2, 2), "found 1, 2 and 2"),
        (([1], 1, 2, -1), "rank"),
    ],
)
def test_refuses(options, told):
    with pytest.raises(OptionError, match=told):
        BalancedBatchSampler(*options)
    with pytest.raises(OptionError, match="drop_last"):
        BalancedBatchSampler([1, 2, 3], 2, 2, 0, drop_last=True)
