"""The suite `tuner`: the ablations of TorchSparse and TorchSparse++ over real scans, and what tuning brings.

Sources: Tang et al., "TorchSparse: Efficient Point Cloud Inference Engine", MLSys 2022; Tang et al., "TorchSparse++:
Efficient Training and Inference Framework for Sparse Convolution on GPUs", MICRO 2023.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from benchmarks.harness.rows import Row, device_name
from benchmarks.harness.study import Options, Say, Setup
from benchmarks.suites.tuner_dataflows import dataflows
from benchmarks.suites.tuner_layers import data_movement, grouping
from benchmarks.suites.tuner_parts import layers
from benchmarks.suites.tuner_ways import bindings, gains, hybrid, sorted_rows, splits
from benchmarks.suites.tuner_whole import networks, transfer
from pumice.cli.job import pick_device
from pumice.errors import OptionError

STUDIES: Mapping[str, Callable[[Setup], Iterator[Row]]] = MappingProxyType(
    {
        "movement": data_movement,
        "grouping": grouping,
        "splits": splits,
        "sorted": sorted_rows,
        "hybrid": hybrid,
        "bindings": bindings,
        "networks": networks,
        "layers": layers,
        "gains": gains,
        "transfer": transfer,
        "dataflows": dataflows,
    }
)


def tuner(say: Say, options: Options) -> Iterator[Row]:
    """The rows of one study, or of all. Raises PumiceError at the end if anything of ours was wrong.

    With a limit of seconds a study begins no network for which it has less left than its longest one took, and the
    tuner has what is left for it (bench_tuner_asked.budgets); what it could not ask the rows say.
    """
    if options.case and options.case not in STUDIES:
        raise OptionError(f"case {options.case!r} of tuner is unknown; there are {', '.join(STUDIES)}")
    setup = Setup(pick_device(options.device), options.quick, say, options.only, options.thorough, "tuner")
    say(f"{device_name(setup.device)}, torch {torch.__version__}; milliseconds, median (20 %, 80 %; relative error)")
    for name in [options.case] if options.case else list(STUDIES):
        begin = time.perf_counter()
        yield from STUDIES[name](replace(setup, until=begin + options.limit) if options.limit else setup)
        say(f"{name}: {time.perf_counter() - begin:.0f} s")
    setup.settle()
