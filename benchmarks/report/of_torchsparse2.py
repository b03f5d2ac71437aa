"""Lines of docs/ablations.md: TorchSparse++, its figures beside ours."""

from __future__ import annotations

from functools import partial

from benchmarks.report.picks import (
    DETECTED,
    KITTI,
    LATER,
    WAYMO,
    Line,
    Pick,
    numbers,
    seven,
    stream,
    tuner,
    ways,
    workloads,
)

_PAPER = "TorchSparse++"
_ACCELERATOR = 371 / 16.384
"""The rate of an H200's dense fp16 products over that of PointAcc-L, TMACS."""


def _redundancy(scene: str, way: str, over: str = "") -> Pick:
    case = f"redundancy/{scene}/k3/b128"
    rival = f"{case}/{over}" if over else ""
    return Pick("conv-forward", f"{case}/{way}", "redundancy", "count", show="value", over=rival)


def _idea(cells: str, name: str) -> Pick:
    """The gain of an idea of kernels."""
    return Pick("conv-forward", f"ablation/{cells}/{name}", "gain", show="value")


def lines() -> tuple[Line, ...]:
    paper = partial(numbers, _PAPER)
    minkunet = "minkunet-kitti-1x/{}/inference"
    shared = r"(waymo_1f_5cm|shell_256|nuscenes_1f_10cm)/k3/C(64|128)"
    return (
        Line(
            "figure 8",
            "rate with padding over cuBLAS, submanifold layers of MinkUNet, KITTI: default, tuned tiles",
            "over 100",
            [
                Pick("conv-forward", rf"utilisation/minkunet-kitti-1x/.+/{way}", "padded", show="share")
                for way in ("default", "tuned")
            ],
            " %",
        ),
        Line(
            "figure 11",
            "redundancy of 2 over 4 splits, at most: detection, segmentation",
            paper("figure 11", "2 splits over 4 splits, at most"),
            [_redundancy(scene, "split4", "split2") for scene in ("waymo_1f_10x10x15cm", "nuscenes_1f_10cm")],
            "x",
        ),
        Line(
            "",
            "redundancy of unsorted rows, detection",
            paper("figure 11", "unsorted, detection"),
            [_redundancy("waymo_1f_10x10x15cm", "unsorted")],
            "x",
        ),
        *(
            Line(
                "figure 14" if name == "MinkowskiEngine" else "",
                f"inference over {name}{by}: A100; ours wall, GPU",
                paper("figure 14", name, "A100"),
                [seven("fp16", "inference", clock, times) for clock in ("wall", "gpu")],
                "x",
            )
            for name, by, times in (
                ("MinkowskiEngine", " (ours: by the published ratio)", LATER[0]),
                ("SpConv 1.2", " (likewise)", LATER[1]),
                ("TorchSparse", " (likewise)", LATER[2]),
                ("SpConv 2.3", ", measured, fp16", 1.0),
            )
        ),
        *(
            Line(
                "",
                f"the same in {precision}",
                "at least 1.4",
                [seven(precision, "inference", clock) for clock in ("wall", "gpu")],
                "x",
            )
            for precision in ("tf32", "fp32")
        ),
        *(
            Line("", f"streams of new scenes, {precision}, compiled: U-Net, encoder; wall", "–", stream(mode), "x")
            for precision, mode in (("fp16", "infer"), ("tf32", "infer-tf32"), ("fp32", "infer-fp32"))
        ),
        Line(
            "figure 15",
            "training over SpConv 2.3: A100, 2080 Ti; ours wall, GPU",
            paper("figure 15", "SpConv 2.3"),
            [seven("fp16", "training", clock) for clock in ("wall", "gpu")],
            "x",
        ),
        Line("", "over MinkowskiEngine; TorchSparse", "4.6 to 4.8; 2.5 to 2.6", "not at hand"),
        Line("", "streams of new scenes, compiled: U-Net, encoder; wall", "–", stream("train"), "x"),
        Line(
            "figure 16",
            "R-GCN over PyG: time, memory",
            paper("figure 16", "PyG"),
            [
                Pick("graph", "relational/[^/]+/16-64-16/fwd/ours", peer="PyG"),
                Pick("graph", "relational/[^/]+/16-64-16/fwd/memory", "peak memory", "count", "PyG"),
            ],
            "x",
        ),
        Line("", "over DGL; Graphiler", "7.6, 3.4; 2.9, 5.6", "not at hand"),
        *(
            Line(
                "table 3" if row.startswith("nu") else "",
                f"end to end, {row}: unsorted, sorted, 2 splits",
                paper("table 3", f"{row}, RTX 3090"),
                ways(network, "sorted", "no yes split2", show="value"),
                " ms",
            )
            for row, network in (("nuScenes", DETECTED), ("Waymo 1 frame", WAYMO))
        ),
        *(
            Line(
                "table 4" if row.startswith("nu") else "",
                f"kernels alone, {row}",
                paper("table 4", f"{row}, RTX 3090"),
                ways(network, "sorted", "no yes split2", "part:kernel", show="value"),
                " ms",
            )
            for row, network in (("nuScenes", DETECTED), ("Waymo 1 frame", WAYMO))
        ),
        *(
            Line(
                "figure 17" if place else "",
                f"{name}: kernels unsorted, sorted; sorting unsorted, sorted",
                "drawn",
                [
                    *ways(network, "sorted", "no yes", "part:kernel", show="value"),
                    *ways(network, "sorted", "no yes", "part:sort", show="value"),
                ],
                " ms",
            )
            for place, name, network in ((True, "CenterPoint, Waymo", WAYMO), (False, "MinkUNet, KITTI", KITTI))
        ),
        *(
            Line(
                "table 5" if precision == "fp16" else "",
                f"{precision}, splits from 1; 1, 2; 0 to 4",
                paper("table 5", precision),
                ways(minkunet.format(precision), "splits", "1 1-2 0-4", show="value"),
                " ms",
            )
            for precision in ("fp16", "tf32", "fp32")
        ),
        *(
            Line(
                "figure 18" if precision == "fp32" else "",
                f"hybrid over implicit GEMM alone, nuScenes, {precision}",
                published,
                ways(f"minkunet-nuscenes-1f/{precision}/inference", "hybrid", "all"),
                "x",
            )
            for precision, published in (("fp32", "up to 1.06"), ("fp16", "–"))
        ),
        *(
            Line(
                "figure 19" if mode == "inference" else "",
                f"offline over online reordering, {mode}, fp32: KITTI; Waymo",
                published,
                [
                    tuner(f"{network}/fp32/{mode}/reordering-offline")
                    for network in ("minkunet-kitti-1x", "centerpoint-waymo-1f")
                ],
                "x",
            )
            for mode, published in (("inference", "1.04"), ("training", "1.12"))
        ),
        Line("figure 20", "loss without hoisted addresses", "1.5 to 1.7", [_idea(shared, "hoisting")], "x"),
        Line("figure 21", "loss with bounds checked in the loop", "1.14 to 1.35", [_idea(shared, "padding")], "x"),
        Line("6.2", "tiles by size of the layer over one size", "up to 1.6", [_idea(shared, "tile-by-size")], "x"),
        *(
            Line(
                "figures 13, 22" if way == "forward-dgrad" else "",
                f"training, {name} bound, over all bound: KITTI; Waymo",
                published,
                [
                    tuner(f"{network}/fp16/training/bindings-{way}", "convolutions")
                    for network in ("minkunet-kitti-1x", "centerpoint-waymo-1f")
                ],
                "x",
            )
            for way, name, published in (
                ("forward-dgrad", "forward with dgrad", "up to 1.1 (2080 Ti)"),
                ("dgrad-wgrad", "dgrad with wgrad", "up to 1.1 (A100)"),
            )
        ),
        Line(
            "figure 23",
            "the generator alone over SpConv 2.3 (ours: single layers, default tiles)",
            paper("figure 23", "generator"),
            [Pick("conv-forward", r"(?!channels|dtypes)[^/]+/k3/C\d+/fwd/default", peer="spconv")],
            "x",
        ),
        *(
            Line(
                "",
                f"{name}: KITTI; Waymo",
                "drawn",
                [tuner(f"{network}/gains-{way}", over=f"{network}/gains-{before}") for network in (KITTI, WAYMO)],
                "x",
            )
            for name, way, before in (
                ("more splits over the generator alone", "9-more-splits", "8-generator-alone"),
                ("unsorted rows besides", "10-unsorted-too", "9-more-splits"),
                ("fetch on demand besides", "11-fetch-on-demand-too", "10-unsorted-too"),
                ("all of it over gather-GEMM-scatter", "12-tuned", "1-gather-gemm-scatter"),
            )
        ),
        Line(
            "table 2",
            "MinkUNet, KITTI, at the accelerator's peak of 16.4 TMACS (PointAcc-L: 17.8)",
            "31.6",
            [workloads(KITTI, peer="spconv", show="value", times=_ACCELERATOR)],
            " ms",
        ),
        *(
            Line(
                "6.3" if rate == "memory" else "",
                f"half of the {name}, by the cost model: KITTI; Waymo",
                published,
                [
                    Pick("conv-forward", f"sensitivity/{network}/{rate}", "slowdown", "count", show="value")
                    for network in ("minkunet-kitti-1x", "centerpoint-waymo-1f")
                ],
                "x",
            )
            for rate, name, published in (
                ("memory", "memory bandwidth", "1.2"),
                ("arithmetic", "arithmetic", "1.4"),
                ("cache", "L2 bandwidth", "–"),
            )
        ),
    )
