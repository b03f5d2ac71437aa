"""The Labeller on the machines of a Ray cluster, by Ray Data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pumice.data.scan import optional_package
from pumice.label.labeller import Labelled, Labeller
from pumice.label.sources import Input

_BATCH = 64
"""Most scans of a batch, which is done again from its first unfinished scan if its worker dies."""
_SHARE = 4
"""Batches of each worker at least, so that none waits for the others at the end."""


def label_on_ray(labeller: Labeller, inputs: Sequence[Input], address: str) -> Iterator[Labelled]:
    """Label scans by a worker on each GPU of a Ray cluster, or on each processor if it has no GPU.

    address: of the cluster; "local" starts one on this machine. Paths and the output folder are seen by all machines.
    A worker that dies is started again by Ray, and its batch continues where it stopped. Raises OptionError without
    ray, and as Labeller.label().
    """
    ray = optional_package("ray", "ray")
    data = optional_package("ray.data", "ray")
    labeller.opened()
    ray.init(address=address, log_to_driver=False, ignore_reinit_error=True)
    try:
        gpus, cpus = (int(ray.cluster_resources().get(kind, 0)) for kind in ("GPU", "CPU"))
        size = max(1, min(_BATCH, len(inputs) // (_SHARE * max(1, gpus or cpus))))
        workers = max(1, min(gpus or cpus, math.ceil(len(inputs) / size)))
        # A processor's worker reads its scans itself: the others are busy with theirs.
        chosen = labeller if gpus else replace(labeller, device="cpu", readers=0)
        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        rows = [{"path": one.source, "name": one.name} for one in inputs]
        pool = data.ActorPoolStrategy(size=workers)
        made = data.from_items(rows, override_num_blocks=math.ceil(len(rows) / size)).map_batches(
            Labeller,
            fn_constructor_kwargs=chosen.__getstate__(),
            batch_size=size,
            compute=pool,
            num_gpus=1 if gpus else 0,
        )
        for row in made.iter_rows():
            yield Labelled(**row)
    finally:
        if address == "local":
            ray.shutdown()
