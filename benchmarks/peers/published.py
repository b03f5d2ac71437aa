"""Numbers that papers publish, each with its place: every table, and every figure whose numbers the text tells.

A figure that is drawn without numbers has those that the text tells of it; one that only shows a method is among
DRAWINGS. Papers: TorchSparse (MLSys 2022, arXiv 2204.10319), TorchSparse++ (MICRO 2023, arXiv 2311.12862), Insum
(2025), FlexGEMM (an article), UCF (MLSys 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

PAPERS = ("TorchSparse", "TorchSparse++", "Insum", "FlexGEMM", "UCF")


@dataclass(frozen=True)
class Published:
    """Numbers of a table or figure. place: in the paper, as "table 2"; where: its section. values: by row, then column.

    studies: names of studies here that ask the same, which say these numbers when they run.
    """

    paper: str
    place: str
    where: str
    what: str
    unit: str
    values: Mapping[str, Mapping[str, float]]
    device: str = ""
    studies: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """Paper, section and table or figure."""
        return f"{self.paper}, {self.where}, {self.place}" if self.where else f"{self.paper}, {self.place}"

    @property
    def text(self) -> str:
        """All numbers in a line."""
        told = (f"{row}: {', '.join(_told(name, x) for name, x in held.items())}" for row, held in self.values.items())
        unit = f" ({self.unit})" if self.unit else ""
        return f"{self.what}{unit}: {'; '.join(told)}{f' ({self.device})' if self.device else ''}"


def _told(name: str, value: float) -> str:
    return f"{name} {value:g}" if name else f"{value:g}"


def _ends(least: float, most: float) -> dict[str, float]:
    return {"least": least, "most": most}


_TS, _TSPP, _INSUM, _FLEX, _UCF = PAPERS
_TIMES = "times as fast"

FIGURES: tuple[Published, ...] = (
    # TorchSparse
    Published(_TS, "figure 1", "", "end to end", _TIMES, {"TorchSparse": _ends(1.7, 2)}),
    Published(
        _TS,
        "figure 4",
        "3, 4.4",
        "share of a network's time",
        "%",
        {"movement": _ends(40, 50), "matrix products": _ends(20, 50), "mapping, detectors on Waymo": {"": 15}},
        studies=("breakdown",),
    ),
    Published(
        _TS,
        "figure 7",
        "4.2",
        "products of the first layer, in batches",
        _TIMES,
        {"symmetric, 13 groups": {"": 1.2}, "the best group size": {"": 1.5}},
        studies=("batching",),
    ),
    Published(
        _TS,
        "figure 8",
        "4.3.1",
        "gather and scatter in fp16 over fp32",
        _TIMES,
        {"scalar": {"": 1.3}, "vectorised": {"": 1.9}},
        studies=("movement",),
    ),
    Published(
        _TS,
        "figure 11",
        "5.2, 8",
        "end to end, inference",
        _TIMES,
        {
            "MinkowskiEngine, geometric mean": {"": 1.6},
            "SpConv 1.2, geometric mean": {"": 1.5},
            "MinkowskiEngine, detectors, RTX 3090": _ends(1.6, 2),
            "MinkowskiEngine, segmentation, RTX 3090, most": {"": 2.16},
            "SpConv in fp16, detectors, RTX 3090": {"": 1.2},
            "either, one model, most": {"": 2.3},
        },
        studies=("gains",),
    ),
    Published(
        _TS,
        "figure 12",
        "3, 5.1",
        "sizes of maps by kernel offset, and adaptive groups",
        "",
        {"largest over smallest, about": {"": 10}, "groups": {"SemanticKITTI": 10, "nuScenes": 8}},
        studies=("offsets",),
    ),
    Published(
        _TS,
        "figure 13",
        "6.3",
        "mapping of CenterPoint, 3 frames, Waymo: gain of each step, and of all",
        _TIMES,
        {
            "grid": {"": 1.6},
            "fused outputs": {"": 1.5},
            "control logic": {"": 1.8},
            "symmetry": {"": 1.1},
            "all": {"": 4.6},
        },
        studies=("steps",),
    ),
    Published(
        _TS,
        "figure 14",
        "5.2, C",
        "frames per second",
        "1/s",
        {
            "MinkUNet 1x, SemanticKITTI": {"RTX 3090": 36, "RTX 2080 Ti": 26, "GTX 1080 Ti": 13},
            "MinkUNet, 3 frames, nuScenes": {"RTX 3090": 45, "RTX 2080 Ti": 40, "GTX 1080 Ti": 25},
        },
    ),
    Published(
        _TS,
        "table 1",
        "6.1",
        "groupings made for (column), run on (row); the less the better, as of times",
        "printed as TFLOP/s",
        {
            "data: SemanticKITTI": {"SemanticKITTI": 10.11, "nuScenes": 10.87},
            "data: nuScenes": {"SemanticKITTI": 5.30, "nuScenes": 4.67},
            "model: MinkUNet 1x": {"MinkUNet 1x": 10.11, "MinkUNet 0.5x": 10.70},
            "model: MinkUNet 0.5x": {"MinkUNet 1x": 5.37, "MinkUNet 0.5x": 4.72},
            "hardware: RTX 2080 Ti": {"RTX 2080 Ti": 4.67, "GTX 1080 Ti": 4.80},
            "hardware: GTX 1080 Ti": {"RTX 2080 Ti": 14.95, "GTX 1080 Ti": 14.01},
        },
        "RTX 2080 Ti",
        ("strategies", "transfer"),
    ),
    Published(
        _TS,
        "table 2",
        "6.1",
        "matrix products, SemanticKITTI (MinkUNet 0.5x) and nuScenes (3 frames)",
        "TFLOP/s, times as fast",
        {
            "separate": {"KITTI": 8.1, "KITTI, gain": 1.00, "nuScenes": 10.4, "nuScenes, gain": 1.00},
            "symmetric": {"KITTI": 8.2, "KITTI, gain": 1.02, "nuScenes": 14.6, "nuScenes, gain": 1.39},
            "fixed": {"KITTI": 8.7, "KITTI, gain": 0.87, "nuScenes": 21.1, "nuScenes, gain": 1.50},
            "adaptive": {"KITTI": 11.9, "KITTI, gain": 1.39, "nuScenes": 16.9, "nuScenes, gain": 1.54},
        },
        "RTX 2080 Ti",
        ("grouping",),
    ),
    Published(
        _TS,
        "table 3",
        "6.2",
        "movement of MinkUNet 1x, SemanticKITTI",
        _TIMES,
        {
            "fp32": {"gather": 1.00, "scatter": 1.00, "both": 1.00},
            "fp16": {"gather": 1.17, "scatter": 1.48, "both": 1.32},
            "vectorised": {"gather": 1.91, "scatter": 1.95, "both": 1.93},
            "fused": {"gather": 1.91, "scatter": 2.12, "both": 2.02},
            "locality-aware": {"gather": 2.86, "scatter": 2.61, "both": 2.72},
        },
        studies=("movement",),
    ),
    # TorchSparse++
    Published(
        _TSPP,
        "figure 8",
        "3.2",
        "the best kernel of each layer over cuBLAS on a product of equal size, MinkUNet, SemanticKITTI",
        "%",
        {"mean, more than": {"": 100}},
        "RTX 3090",
        ("utilisation",),
    ),
    Published(
        _TSPP,
        "figure 11",
        "4.1, 5.2",
        "redundant operations",
        "times",
        {
            "2 splits over 4 splits, at most": {"detection": 1.2, "segmentation": 1.3},
            "unsorted, detection": _ends(2.4, 2.9),
        },
        studies=("redundancy",),
    ),
    Published(
        _TSPP,
        "figure 13",
        "4.2",
        "training with passes bound in part over all bound, at most",
        "%",
        {"gain": {"": 10}},
        studies=("bindings",),
    ),
    Published(
        _TSPP,
        "figure 14",
        "5.2, abstract",
        "inference, geometric mean of seven networks",
        _TIMES,
        {
            "MinkowskiEngine": {"A100": 2.9, "A100, RTX 3090, most": 3.7, "Turing, Pascal, least": 2.2},
            "SpConv 1.2": {"A100": 3.3, "A100, RTX 3090, least": 3.2, "Turing, Pascal, least": 2.4},
            "TorchSparse": {"A100": 2.2, "A100, RTX 3090, least": 2.0, "Turing, Pascal, least": 1.8},
            "SpConv 2.3": {"A100": 1.7, "A100, RTX 3090, least": 1.4, "Turing, Pascal, least": 1.4, "Orin": 1.25},
        },
        studies=("gains", "networks"),
    ),
    Published(
        _TSPP,
        "figure 15",
        "5.2",
        "training in mixed precision, batch of 2",
        _TIMES,
        {
            "MinkowskiEngine": _ends(4.6, 4.8),
            "TorchSparse": _ends(2.5, 2.6),
            "SpConv 2.3": {"A100": 1.16, "RTX 2080 Ti": 1.27},
        },
        studies=("bindings",),
    ),
    Published(
        _TSPP,
        "figure 16",
        "5.2",
        "R-GCN on five graphs: time and memory",
        "times as fast, as small",
        {
            "DGL": {"time": 7.6, "memory": 3.4},
            "PyG": {"time": 2.6, "memory": 4.4},
            "Graphiler": {"time": 2.9, "memory": 5.6},
        },
        studies=("relational",),
    ),
    Published(
        _TSPP,
        "figure 18",
        "6.1",
        "hybrid over the best single dataflow, MinkUNet 1 frame, nuScenes, fp32, at most",
        _TIMES,
        {"hybrid": {"": 1.06}},
        "RTX 2080 Ti and Orin",
        ("hybrid",),
    ),
    Published(
        _TSPP,
        "figure 19",
        "6.2",
        "maps reordered before the kernel over reordered in it, fp32",
        "%",
        {"inference": {"": 4}, "training": {"": 12}},
        "RTX 3090",
        ("reordering",),
    ),
    Published(
        _TSPP,
        "figure 20",
        "6.2, 3.2",
        "sizes as arguments without hoisted addresses over constants",
        "times as long",
        {"naive": _ends(1.5, 1.7)},
        "RTX 3090",
        ("ablation",),
    ),
    Published(
        _TSPP,
        "figure 21",
        "6.2, 3.2",
        "bounds checked in the loop over maps padded to whole tiles",
        "times as long",
        {"checked": _ends(1.14, 1.35)},
        "RTX 3090",
        ("ablation",),
    ),
    Published(_TSPP, "section 6.2", "", "tiles by size over one tile, at most", _TIMES, {"adaptive tiling": {"": 1.6}}),
    Published(
        _TSPP,
        "figure 22",
        "6.1",
        "loss where all passes share their dataflow, at most",
        "%",
        {"all bound": {"": 10}},
        "A100 (best: dgrad with wgrad), RTX 2080 Ti (best: forward with dgrad)",
        ("bindings",),
    ),
    Published(
        _TSPP,
        "figure 23",
        "6.3",
        "the generator alone over SpConv 2.3, with equal dataflows",
        _TIMES,
        {"generator": _ends(1.1, 1.2)},
        studies=("gains",),
    ),
    Published(
        _TSPP,
        "table 2",
        "5.2",
        "latency of MinkUNet beside an accelerator of equal peak, scaled",
        "ms",
        {"TorchSparse++, RTX 3090": {"": 31.6}, "PointAcc-L": {"": 17.8}},
    ),
    Published(
        _TSPP,
        "table 3",
        "6.1",
        "end to end, unsorted and sorted in splits",
        "ms",
        {
            "nuScenes, RTX 3090": {"unsorted": 7.45, "1": 8.18, "2": 8.81},
            "nuScenes, Orin": {"unsorted": 21.90, "1": 22.20, "2": 23.93},
            "Waymo 1 frame, RTX 3090": {"unsorted": 8.15, "1": 8.91, "2": 9.48},
            "Waymo 1 frame, Orin": {"unsorted": 28.68, "1": 29.86, "2": 33.12},
        },
        studies=("sorted",),
    ),
    Published(
        _TSPP,
        "table 4",
        "6.1",
        "convolution kernels alone, unsorted and sorted in splits",
        "ms",
        {
            "nuScenes, RTX 3090": {"unsorted": 3.70, "1": 3.68, "2": 3.89},
            "nuScenes, Orin": {"unsorted": 12.57, "1": 10.87, "2": 12.39},
            "Waymo 1 frame, RTX 3090": {"unsorted": 4.60, "1": 4.33, "2": 4.49},
            "Waymo 1 frame, Orin": {"unsorted": 19.33, "1": 17.06, "2": 19.75},
        },
        studies=("sorted",),
    ),
    Published(
        _TSPP,
        "table 5",
        "6.1",
        "MinkUNet, SemanticKITTI, by splits to choose from",
        "ms",
        {
            "fp16": {"1": 16.01, "1-2": 15.23, "0-4": 14.48},
            "tf32": {"1": 26.65, "1-2": 23.28, "0-4": 21.28},
            "fp32": {"1": 35.47, "1-2": 29.92, "0-4": 25.75},
        },
        "RTX 3090",
        ("splits",),
    ),
    Published(
        _TSPP,
        "section 6.3",
        "",
        "latency with half of a rate",
        "times as long",
        {"memory bandwidth": {"": 1.2}, "arithmetic": {"": 1.4}},
        "RTX 3090",
        ("sensitivity",),
    ),
    # Insum
    Published(
        _INSUM,
        "table 1",
        "1",
        "lines of code replaced by one, and gain in time",
        "lines, times as fast",
        {
            "structured SpMM (TorchBSR)": {"lines": 202, "gain": 1.95},
            "unstructured SpMM (Sputnik)": {"lines": 1918, "gain": 1.20},
            "tensor product (e3nn)": {"lines": 225, "gain": 3.81},
            "sparse convolution (TorchSparse)": {"lines": 4491, "gain": 1.14},
        },
        "RTX 3090",
        ("lines",),
    ),
    Published(
        _INSUM,
        "table 2",
        "6.5",
        "tensor product by degree and channels, over e3nn",
        _TIMES,
        {
            "1, 16": {"Insum": 8.3, "cuEquivariance": 2.6},
            "1, 32": {"Insum": 4.2, "cuEquivariance": 1.5},
            "1, 64": {"Insum": 2.3, "cuEquivariance": 0.9},
            "2, 16": {"Insum": 5.2, "cuEquivariance": 1.1},
            "2, 32": {"Insum": 5.4, "cuEquivariance": 1.1},
            "2, 64": {"Insum": 3.3, "cuEquivariance": 0.5},
            "3, 16": {"Insum": 2.6, "cuEquivariance": 0.5},
            "3, 32": {"Insum": 3.6, "cuEquivariance": 0.6},
            "3, 64": {"Insum": 2.5, "cuEquivariance": 0.3},
        },
        "RTX 3090",
        ("tensor-product",),
    ),
    Published(
        _INSUM,
        "table 3",
        "6.7",
        "a point-cloud convolution by compilers",
        "ms, lines of schedule",
        {
            "Insum": {"compile": 9900, "tune": 4900, "conversion": 0.55, "run": 0.47},
            "TACO": {"compile": 10, "conversion": 0.47, "run": 253.53, "lines": 10},
            "SparseTIR": {"compile": 320, "conversion": 13.47, "run": 1.05, "lines": 860},
            "TorchSparse": {"run": 0.66},
        },
        "RTX 3090",
        ("table3",),
    ),
    Published(
        _INSUM,
        "figure 7",
        "4.2, 6.6",
        "time follows gathers and scatters, memory grows with the group; sparsity of the matrix",
        "%",
        {"sparsity": {"": 80}},
        studies=("figure7",),
    ),
    Published(
        _INSUM,
        "figure 10",
        "6.2",
        "sparsity from which block-sparse products beat dense ones",
        "%",
        {"Insum": {"": 25}, "TorchBSR": {"": 40}},
        "RTX 3090",
        ("structured",),
    ),
    Published(
        _INSUM,
        "figure 11",
        "6.3",
        "unstructured SpMM of TC-GNN's matrices, 128 columns, over cuSPARSE, mean",
        _TIMES,
        {"Insum": {"fp32": 1.2, "fp16": 1.18}, "Sputnik": {"fp32": 1.09}},
        "RTX 3090",
        ("unstructured",),
    ),
    Published(
        _INSUM,
        "figure 12",
        "6.4, 1",
        "convolution of 128 channels on seven rooms of S3DIS in fp16, over TorchSparse",
        _TIMES,
        {"Insum": {"": 1.14}},
        "RTX 3090",
        ("conv",),
    ),
    Published(
        _INSUM,
        "figure 13",
        "6.6",
        "formats and compiler step by step, 4096 x 4096, 90 % in blocks of 32: gain over",
        _TIMES,
        {"groups over COO": {"": 8}, "groups and blocks over COO": {"": 20}, "fused over default": {"": 2.6}},
        "RTX 3090",
        ("ablation",),
    ),
    # FlexGEMM
    Published(
        _FLEX,
        "explicit GEMM, performance comparison",
        "",
        "explicit GEMM over the final kernels",
        "%, times",
        {"speed": {"": 10}, "memory": {"": 10}},
        studies=("shells",),
    ),
    Published(
        _FLEX,
        "masked implicit GEMM, performance comparison",
        "",
        "masked over plain implicit GEMM",
        "%",
        {"gain": _ends(20, 40)},
        studies=("shells",),
    ),
    Published(
        _FLEX,
        "preface",
        "",
        "training in fp16 and tf32 over other libraries, up to",
        _TIMES,
        {"FlexGEMM": {"": 2}},
        "A100",
        ("shells",),
    ),
    # UCF
    Published(
        _UCF,
        "table 4",
        "6.1",
        "accuracy (top 1, ImageNet) of pruned ResNet-50 by share of zeros",
        "%",
        {"top 1": {"0": 76.69, "80": 76.52, "91": 75.16, "96": 72.71, "98": 69.26}},
        studies=("filters",),
    ),
    Published(
        _UCF,
        "table 7",
        "6.2.4",
        "pruned ResNet-50 on a GPU by share of zeros, over cuDNN",
        _TIMES,
        {
            "Escort": {"80": 0.78, "91": 1.09, "96": 1.35, "98": 1.49},
            "TACO-UCF": {"80": 1.08, "91": 1.61, "96": 2.15, "98": 2.57},
        },
        studies=("filters",),
    ),
)

DRAWINGS: Mapping[str, tuple[str, ...]] = {
    _TS: ("figure 2", "figure 3", "figure 5", "figure 6", "figure 9", "figure 10"),
    _TSPP: (
        *(f"figure {n}" for n in (1, 2, 3, 4, 5, 6, 7, 9, 10, 12)),
        # Rules of a design, and bars whose numbers the text does not tell.
        "table 1",
        "figure 17",
    ),
    _INSUM: tuple(f"figure {n}" for n in (1, 2, 3, 4, 5, 6, 8, 9)),
}
"""By paper, the tables and figures without numbers: they show a method, or the text tells none of theirs."""

COUNTS: Mapping[str, tuple[int, int]] = {_TS: (3, 14), _TSPP: (5, 23), _INSUM: (3, 13)}
"""By paper, the number of tables and of figures."""


def figure(paper: str, place: str) -> Published:
    """The numbers of a table or figure, by its name in the paper."""
    return next(found for found in FIGURES if (found.paper, found.place) == (paper, place))


def _by_study() -> Iterator[tuple[str, tuple[Published, ...]]]:
    for study in dict.fromkeys(study for found in FIGURES for study in found.studies):
        yield study, tuple(found for found in FIGURES if study in found.studies)


PUBLISHED: Mapping[str, tuple[Published, ...]] = dict(_by_study())
"""The same by study."""
