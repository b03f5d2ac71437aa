"""The suites `conv-forward` and `conv-train`: what a single layer costs, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

import torch

from pumice.errors import OptionError
from pumice.tools.bench_ablation import ablation
from pumice.tools.bench_channels import channels
from pumice.tools.bench_errors import errors
from pumice.tools.bench_gradients import gradients
from pumice.tools.bench_host import first_call, host
from pumice.tools.bench_layers import layers
from pumice.tools.bench_precisions import dtypes
from pumice.tools.bench_redundancy import redundancy
from pumice.tools.bench_roofline import roofline, utilisation
from pumice.tools.bench_tiles import default_tile
from pumice.tools.job import pick_device
from pumice.tools.layer_cells import FORWARD, TRAINING
from pumice.tools.ledger import Row
from pumice.tools.study import Options, Say, Setup

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
