"""The suites `conv-forward` and `conv-train`: what a single layer costs, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

import torch

from benchmarks.harness.rows import Row
from benchmarks.harness.study import Options, Say, Setup
from benchmarks.scenes.layers import FORWARD, TRAINING
from benchmarks.suites.host import first_call, host
from benchmarks.suites.layer_ablation import ablation
from benchmarks.suites.layer_channels import channels
from benchmarks.suites.layer_errors import errors
from benchmarks.suites.layer_gradients import gradients
from benchmarks.suites.layer_precisions import dtypes
from benchmarks.suites.layer_tiles import default_tile
from benchmarks.suites.layers import layers
from benchmarks.suites.redundancy import redundancy
from benchmarks.suites.roofline import roofline, utilisation
from pumice.cli.job import pick_device
from pumice.errors import OptionError

Study = Callable[[Setup], Iterator[Row]]

FORWARD_STUDIES: Mapping[str, Study] = MappingProxyType(
    {
        "layers": partial(layers, passed=FORWARD),
        "channels": channels,
        "dtypes": dtypes,
        "errors": errors,
        "roofline": roofline,
        "utilisation": utilisation,
        "ablation": ablation,
        "redundancy": redundancy,
        "default-tile": partial(default_tile, passed=FORWARD),
        "host": host,
        "first-call": first_call,
    }
)
TRAINING_STUDIES: Mapping[str, Study] = MappingProxyType(
    {
        "layers": partial(layers, passed=TRAINING),
        "gradients": gradients,
        "default-tile": partial(default_tile, passed=TRAINING),
    }
)


def forward(say: Say, options: Options) -> Iterator[Row]:
    """The rows of a study of the suite conv-forward. Raises PumiceError at the end if anything of ours was wrong."""
    return study_of("conv-forward", FORWARD_STUDIES, say, options)


def training(say: Say, options: Options) -> Iterator[Row]:
    """The rows of a study of the suite conv-train."""
    return study_of("conv-train", TRAINING_STUDIES, say, options)


def study_of(suite: str, studies: Mapping[str, Study], say: Say, options: Options) -> Iterator[Row]:
    """The rows of the study that the options name, of the first one where they name none.

    Raises OptionError for one that is not known, and PumiceError at the end if anything of ours was wrong.
    """
    name = options.case or next(iter(studies))
    if name not in studies:
        raise OptionError(f"case {name!r} of {suite} is unknown; there are {', '.join(studies)}")
    setup = Setup(pick_device(options.device), options.quick, say, options.only, options.thorough, suite)
    say(f"{setup.device}, torch {torch.__version__}; milliseconds, median (20 %, 80 %; relative error)")
    yield from studies[name](setup)
    setup.settle()
