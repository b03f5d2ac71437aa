"""Results that the papers on these dataflows report, as far as they are in public text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A finding in our words, and its source."""

    text: str
    source: str


_TS = "TorchSparse, MLSys 2022, arXiv 2204.10319, abstract"
_TS_PAPER = "TorchSparse, MLSys 2022, arXiv 2204.10319, "
_TSPP = "TorchSparse++, MICRO 2023, arXiv 2311.12862, abstract"
_CODE = "torchsparse 2.1, public code, "
_README = "torchsparse 2.1, README.md, benchmarks"
_DOCS = "torchsparse 2.1, documentation, changes: convolution modes"

PUBLISHED: Mapping[str, tuple[Published, ...]] = {
    "movement": (
        Published(
            "gather, scatter and both against scalar fp32: scalar fp16 1.17, 1.48, 1.32 times as fast; vectorised fp16 "
            "1.91, 1.95, 1.93; fused 1.91, 2.12, 2.02; locality-aware 2.86, 2.61, 2.72",
            f"{_TS_PAPER}section 6.2, table 3",
        ),
        Published("vectorised fp16 against fp32 on several GPUs: 1.9 times; scalar fp16: 1.3", f"{_TS_PAPER}4.3.1"),
    ),
    "breakdown": (
        Published(
            "movement takes 40 to 50 % of the time, matrix products 20 to 50 %, mapping 15 % in detectors on Waymo",
            f"{_TS_PAPER}sections 3 and 4.4, figure 4",
        ),
    ),
    "grouping": (
        Published("adaptive grouping speeds the matrix products up 1.4 to 1.5 times", _TS),
        Published(
            "epsilon 0 to 0.5 in steps of 0.1 and S 0 or 5,000 to 25,000 in steps of 2,500 are tried for a layer",
            f"{_CODE}utils/tune.py",
        ),
    ),
    "splits": (
        Published("the tuner tries unsorted and 1 to 4 splits of sorted rows", f"{_CODE}utils/tune.py"),
        Published("without tuning: unsorted; 3 splits in the mode for tf32 and fp32", f"{_CODE}conv_config.py"),
    ),
    "sorted": (
        Published(
            "unsorted is recommended in fp16, for segmentation and detection; sorted in 3 splits for segmentation "
            "in tf32 and fp32 and for detection in fp32",
            _DOCS,
        ),
    ),
    "hybrid": (
        Published(
            "by default the tuner tries implicit GEMM alone; fetch on demand and gather-scatter on request",
            f"{_CODE}utils/tune.py",
        ),
    ),
    "bindings": (
        Published("mixed precision training is 1.2 to 1.3 times as fast as with SpConv v2", _TSPP),
        Published("1.16 times on an A100, 1.27 times on an RTX 2080 Ti, at batch size 2", _README),
    ),
    "gains": (
        Published(
            "inference on an A100: 2.9 times MinkowskiEngine, 3.3 times SpConv 1.2, 2.2 times TorchSparse, 1.7 "
            "times SpConv v2",
            _TSPP,
        ),
        Published("1.6 times MinkowskiEngine and 1.5 times SpConv, of the gather-scatter kind", _TS),
    ),
}
"""By study. Figures that stand only in the papers' tables and charts could not be looked up."""
