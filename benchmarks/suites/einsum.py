"""The suite `einsum`: the four case studies of the language, and the figures and tables that go with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch

from benchmarks.harness.rows import Row
from benchmarks.harness.study import Options, Say, Setup
from benchmarks.suites.einsum_conv import conv
from benchmarks.suites.einsum_figures import ablation, figure7, table3
from benchmarks.suites.first_call import compile_times
from benchmarks.suites.spmm_structured import structured
from benchmarks.suites.spmm_unstructured import unstructured
from benchmarks.suites.tensor_product import tensor_product
from pumice.cli.job import pick_device
from pumice.errors import OptionError

STUDIES: Mapping[str, Callable[[Setup], Iterator[Row]]] = MappingProxyType(
    {
        "structured": structured,
        "unstructured": unstructured,
        "conv": conv,
        "tensor-product": tensor_product,
        "figure7": figure7,
        "table3": table3,
        "ablation": ablation,
        "compile": compile_times,
    }
)


def einsum(say: Say, options: Options) -> Iterator[Row]:
    """The rows of one study, or of all. Raises PumiceError at the end if anything of ours was wrong."""
    if options.case and options.case not in STUDIES:
        raise OptionError(f"case {options.case!r} is unknown; there are {', '.join(STUDIES)}")
    setup = Setup(pick_device(options.device), options.quick, say, options.only, options.thorough)
    chosen = [options.case] if options.case else list(STUDIES)
    say(f"{setup.device}, torch {torch.__version__}; milliseconds, median (20 %, 80 %; relative error)")
    for name in chosen:
        try:
            yield from STUDIES[name](setup)
        except Exception as reason:  # out of memory, a file that cannot be read: the other studies are still wanted
            setup.failed(f"{name}: {type(reason).__name__}: {reason}")
    setup.settle()
