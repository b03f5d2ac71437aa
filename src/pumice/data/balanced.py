"""Batches of about as many voxels on each process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from pumice.errors import OptionError


class BalancedBatchSampler(Sampler[list[int]]):
    """Batches of samples for each process of a group, with about as many voxels on each of them in every step.

        sampler = pm.data.BalancedBatchSampler([len(scan) for scan in scans], batch_size=2)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)

    A step takes as long as the process with most voxels. In each epoch the samples are split at random in two halves,
    so that other samples meet. Sorted by size, a half is cut into as many parts as a batch has samples; a step takes
    the next num_replicas samples of each part, large ones together with small ones, and deals them, largest first, to
    the process with least voxels that has room (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). The steps
    come in random order. Every process computes the same batches, from seed and epoch, without communication.

    sizes: number of voxels (or points) of each sample, above 0. batch_size: samples of a process in a step.
    num_replicas, rank: number of processes, and which this is; default: those of torch.distributed if it is
    initialised, else one. shuffle: False: the same batches in every epoch. seed: equal on all processes.
    drop_last: leave out the samples, others in every epoch, that do not fill a step. False: every sample is used once
    in an epoch, but for up to num_replicas - 1 that are used twice, so that all processes have equally many; the last
    step may have fewer samples on each.

    Raises OptionError for options out of range, no samples, or sizes that are not above 0.
    """

    batch_size: int
    num_replicas: int
    rank: int
    shuffle: bool
    seed: int
    drop_last: bool
    epoch: int

    def __init__(
        self,
        sizes: Sequence[float],
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        self.num_replicas = num_replicas if num_replicas is not None else dist.get_world_size() if grouped else 1
        self.rank = rank if rank is not None else dist.get_rank() if grouped else 0
        self.batch_size, self.shuffle, self.seed, self.drop_last, self.epoch = batch_size, shuffle, seed, drop_last, 0
        self._sizes = np.asarray(sizes, np.float64)
        if self._sizes.ndim != 1 or not (np.isfinite(self._sizes) & (self._sizes > 0)).all() or not len(self._sizes):
            raise OptionError("sizes must be a list of finite numbers above 0, one for each sample")
        if batch_size < 1 or self.num_replicas < 1 or not 0 <= self.rank < self.num_replicas:
            found = f"{batch_size}, {self.num_replicas} and {self.rank}"
            raise OptionError(f"batch_size and num_replicas are at least 1, and rank below num_replicas; found {found}")
        if not len(self):
            most = self.num_replicas * batch_size
            raise OptionError(f"{len(self._sizes)} samples do not fill a step of {most}, and drop_last leaves them out")

    def __len__(self) -> int:
        """Number of batches of a process in an epoch, the same on all."""
        count, most = len(self._sizes), self.num_replicas * self.batch_size
        return count // most if self.drop_last else -(-count // most)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._steps():
            yield step[self.rank]

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, which its batches depend on."""
        self.epoch = epoch

    def imbalance(self) -> tuple[float, float]:
        """(largest, mean) over the steps of the epoch of: most voxels of a process / their mean over processes."""
        sums = [[self._sizes[batch].sum() for batch in step] for step in self._steps()]
        found = [max(step) / np.mean(step) for step in sums]
        return float(max(found)), float(np.mean(found))

    def _steps(self) -> list[list[list[int]]]:
        """The batches of all processes in each step of the epoch."""
        chance = np.random.default_rng((self.seed, self.epoch if self.shuffle else 0))
        order, most = self._order(chance), self.num_replicas * self.batch_size
        whole = len(order) // most
        steps = list[list[list[int]]]()
        for half in np.array_split(order[: whole * most].reshape(whole, most), 2 if whole > 3 else 1):
            steps += self._balanced(half.ravel(), self.batch_size)
        steps = [steps[place] for place in chance.permutation(len(steps))]
        rest = order[whole * most :]
        steps += self._balanced(rest, len(rest) // self.num_replicas) if len(rest) else []
        # No process always has the largest sample.
        return [[step[place] for place in chance.permutation(self.num_replicas)] for step in steps]

    def _order(self, chance: np.random.Generator) -> np.ndarray:
        """The samples of an epoch: as many as fill all steps, or as all processes have equally many of."""
        count, most = len(self._sizes), self.num_replicas * self.batch_size
        order = chance.permutation(count)
        if self.drop_last:
            return order[: count // most * most]
        return np.resize(order, -(-count // self.num_replicas) * self.num_replicas)

    def _balanced(self, samples: np.ndarray, each: int) -> Iterator[list[list[int]]]:
        """Steps of these samples, `each` on every process."""
        largest_first = samples[np.argsort(-self._sizes[samples], kind="stable")]
        parts = largest_first.reshape(each, -1, self.num_replicas)
        parts[1:] = parts[1:, ::-1].copy()
        for step in range(parts.shape[1]):
            yield self._dealt(parts[:, step].ravel(), each)

    def _dealt(self, samples: np.ndarray, each: int) -> list[list[int]]:
        """The batch of each process, `each` samples with sums about equal."""
        batches: list[list[int]] = [[] for _ in range(self.num_replicas)]
        sums = np.zeros(self.num_replicas)
        for sample in samples[np.argsort(-self._sizes[samples], kind="stable")]:
            place = int(np.argmin(sums))
            batches[place].append(int(sample))
            sums[place] = sums[place] + self._sizes[sample] if len(batches[place]) < each else np.inf
        return batches
