"""How long the device works on a call: the sum over its kernels, copies and fills, whatever the host does meanwhile.

A network that waits for the host in its middle cannot be timed between two events: the wait lies between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from pumice.errors import PumiceError
from pumice.tools.timing import Times

_MARK = "spin_kernel"
"""In the name of the kernel of torch.cuda._sleep, which stands between runs."""


def device_time(call: Callable[[], object], runs: int = 7) -> Times:
    """Milliseconds that the GPU is busy with a call, over some runs: what CUPTI records of each piece of work, summed.

    Work on several streams counts as often as there is some. The call has run before: what compiles at first counts.
    Where the runs cannot be told from each other in what was recorded, the mean stands for median and quantiles.

    Raises PumiceError where the profiler records nothing (without CUPTI, or with another profiler attached).
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            torch.cuda._sleep(1)
            call()
            torch.cuda.synchronize()
    # torch's own tables of events take seconds to make of some thousands.
    recorded = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    work = [(e.start_ns(), e.duration_ns(), e.name()) for e in recorded if "CUDA" in str(e.device_type())]
    if not work:
        raise PumiceError("torch.profiler records nothing on the GPU: CUPTI is missing, or in use")
    spent = between_marks(work)
    if len(spent) != runs:
        spent = [sum(duration for _, duration, _ in work) // runs]
    return Times.of([1e-6 * ns for ns in spent])


def between_marks(work: Iterable[tuple[int, int, str]]) -> Sequence[int]:
    """Nanoseconds of the work after each mark, up to the next one; work: (start, duration, name) in any order."""
    spent: list[int] = []
    for _, duration, name in sorted(work):
        if _MARK in name:
            spent.append(0)
        elif spent:
            spent[-1] += duration
    return spent
