"""The suite `engine`: whole networks captured, beside the same ones run eagerly, and spconv's in the same run.

A case of inference or training reads SCENE/DTYPE/MODE/WAY, as nuscenes_1f_10cm/fp16/inference/captured. Goals and the
best times recorded of other libraries (engine_scenes.py) stand in rows of their own, with the peers "goal" and
"best recorded".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from benchmarks.harness.rows import Row, device_name
from benchmarks.harness.study import Options, Say, Setup
from benchmarks.suites.engine_equal import equal
from benchmarks.suites.engine_inference import inference
from benchmarks.suites.engine_training import training
from benchmarks.suites.engine_varied import varied
from pumice.cli.job import pick_device
from pumice.errors import OptionError

STUDIES: Mapping[str, Callable[[Setup], Iterator[Row]]] = MappingProxyType(
    {"inference": inference, "equal": equal, "varied": varied, "training": training}
)


def engine(say: Say, options: Options) -> Iterator[Row]:
    """The rows of one study, or of all. Raises PumiceError at the end if anything of ours was wrong.

    With a limit of seconds a study leaves out scenes for which it has less left than its longest one took, and ends
    early where it repeats something; both are said.
    """
    if options.case and options.case not in STUDIES:
        raise OptionError(f"case {options.case!r} of engine is unknown; there are {', '.join(STUDIES)}")
    device = pick_device(options.device)
    setup = Setup(device, options.quick, say, options.only, options.thorough, "engine", count=options.count)
    say(f"{device_name(device)}, torch {torch.__version__}; milliseconds, median (20 %, 80 %; relative error)")
    for name in [options.case] if options.case else list(STUDIES):
        begin = time.perf_counter()
        yield from STUDIES[name](replace(setup, until=begin + options.limit) if options.limit else setup)
        say(f"{name}: {time.perf_counter() - begin:.0f} s")
    setup.settle()
