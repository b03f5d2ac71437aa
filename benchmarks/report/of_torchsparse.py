"""Lines of docs/ablations.md: TorchSparse, its figures beside ours."""

from __future__ import annotations

from functools import partial

from benchmarks.report.picks import KITTI, LATER, NUSCENES, Line, Pick, numbers, seven, tuner, workloads

_PAPER = "TorchSparse"


def _movement(way: str) -> tuple[Pick, ...]:
    """Gather, scatter, both, against scalar fp32."""
    return tuple(
        tuner(f"{KITTI}/movement-{way}", f"part:{part}", peer="(scalar-)?fp32")
        for part in ("gather", "scatter", "movement")
    )


def _parts(network: str, way: str) -> tuple[Pick, ...]:
    """Shares of movement (gather, scatter), products and mapping."""
    return tuple(
        tuner(f"{network}/breakdown-{way}", f"fact:share of {part}", "count", show="value")
        for part in ("gather", "scatter", "product", "mapping")
    )


def _strategies(way: str, *networks: str) -> tuple[Pick, ...]:
    """Times of layers with these groups over those with own groups."""
    return tuple(
        tuner(f"{network}/strategies-{way}", "time with movement", show="share", times=0.01) for network in networks
    )


def _step(step: str, before: str) -> tuple[Pick, ...]:
    case = "steps/centerpoint-waymo-3f-generated"
    return (Pick("maps", f"{case}/{step}", over=f"{case}/{before}"),)


def lines() -> tuple[Line, ...]:
    paper = partial(numbers, _PAPER)
    waymo = "centerpoint-waymo-3f-generated/fp16/inference"
    return (
        Line(
            "figures 1, 11",
            "seven networks, wall, over MinkowskiEngine (ours: by its published ratio to SpConv 2.3)",
            paper("figure 11", "MinkowskiEngine, geometric mean"),
            [seven("fp16", "inference", "wall", LATER[0])],
            "x",
        ),
        Line(
            "",
            "over SpConv 1.2 (ours: by its published ratio)",
            paper("figure 11", "SpConv 1.2, geometric mean"),
            [seven("fp16", "inference", "wall", LATER[1])],
            "x",
        ),
        Line(
            "",
            "over spconv 2.3, measured: wall; GPU",
            "–",
            [seven("fp16", "inference", "wall"), seven("fp16", "inference", "gpu")],
            "x",
        ),
        Line(
            "figure 14",
            "MinkUNet 1x, KITTI, frames a second (RTX 3090, 2080 Ti, 1080 Ti)",
            paper("figure 14", "MinkUNet 1x, SemanticKITTI"),
            [workloads(KITTI, clock="wall", show="per second")],
        ),
        Line(
            "",
            "MinkUNet, 3 frames, nuScenes",
            paper("figure 14", "MinkUNet, 3 frames, nuScenes"),
            [workloads("minkunet-nuscenes-3f/fp16/inference", clock="wall", show="per second")],
        ),
        Line(
            "figure 4",
            "MinkUNet, offset by offset: gather, scatter, products, mapping",
            "40 to 50 (both), 20 to 50, –",
            _parts(KITTI, "offset-by-offset"),
            " %",
        ),
        Line("", "CenterPoint, 3 frames: the same", "–, –, –, 15", _parts(waymo, "offset-by-offset"), " %"),
        Line(
            "figure 8",
            "gather and scatter, fp16 over fp32: scalar, vectorised",
            "1.3, 1.9",
            [_movement(way)[2] for way in ("scalar", "vectorised")],
            "x",
        ),
        *(
            Line(
                "table 3" if way == "scalar" else "",
                f"gather, scatter, both: {row}",
                paper("table 3", row),
                _movement(way),
                "x",
            )
            for row, way in (
                ("fp16", "scalar"),
                ("vectorised", "vectorised"),
                ("fused", "fused"),
                ("locality-aware", "locality-aware"),
            )
        ),
        *(
            Line(
                "table 2" if row == "symmetric" else "",
                f"{row} groups over one by one: KITTI, nuScenes",
                paper("table 2", row, "KITTI, gain", "nuScenes, gain"),
                [tuner(f"{network}/grouping-{way}") for network in (KITTI, NUSCENES)],
                "x",
            )
            for row, way in (("symmetric", "symmetric"), ("fixed", "fixed"), ("adaptive", "adaptive-tuned"))
        ),
        Line(
            "",
            "rate one by one, and of adaptive groups, KITTI",
            "8.1, 11.9",
            [tuner(f"{KITTI}/grouping-{way}", "rate", show="value") for way in ("separate", "adaptive-tuned")],
            " TFLOP/s",
        ),
        *(
            Line(
                "figure 7" if length == "2" else "",
                f"first layer, products of {length} offsets at once: KITTI, nuScenes",
                published,
                [tuner(f"{network}/batching-{length}/4-32") for network in (KITTI, NUSCENES)],
                "x",
            )
            for length, published in (
                ("2", "1.2"),
                ("4", "drawn"),
                ("8", "drawn"),
                ("13", "drawn"),
                ("26", "1.5 (best)"),
            )
        ),
        Line(
            "figure 12",
            "pairs of an offset of the first map but the centre, mean (least to most): KITTI, nuScenes",
            "a factor of 10",
            [
                tuner(rf"{network}/offsets-W([0-9]|1[0-2])/0 k3x3x3", "fact:pairs", "count", show="value")
                for network in (KITTI, NUSCENES)
            ],
        ),
        Line(
            "",
            "adaptive groups of a layer: KITTI, nuScenes",
            "10, 8",
            [
                tuner(f"{network}/grouping-adaptive-tuned", "fact:products of the first layer", "count", show="value")
                for network in (KITTI, NUSCENES)
            ],
        ),
        Line(
            "table 1",
            "groups made for the other data over own: KITTI, nuScenes",
            "1.08, 1.13",
            _strategies("other-data", KITTI, NUSCENES),
            "x",
        ),
        Line(
            "",
            "for the other width: MinkUNet 1x, 0.5x",
            "1.06, 1.14",
            _strategies("other-width", KITTI, "minkunet-kitti-0.5x/fp16/inference"),
            "x",
        ),
        Line(
            "",
            "for other hardware: RTX 2080 Ti, GTX 1080 Ti; ours H100, H200",
            "1.03, 1.07",
            _strategies("from NVIDIA H[0-9]+.*", KITTI),
            "x",
        ),
        *(
            Line(
                "figure 13" if row == "grid" else "",
                f"mapping of CenterPoint, 3 frames: {row}",
                paper("figure 13", row),
                _step(step, before),
                "x",
            )
            for row, step, before in (
                ("grid", "2-grid", "1-hash"),
                ("fused outputs", "3-fused-outputs", "2-grid"),
                ("control logic", "4-control-logic", "3-fused-outputs"),
                ("symmetry", "5-symmetry", "4-control-logic"),
                ("all", "6-default", "1-hash"),
            )
        ),
    )
