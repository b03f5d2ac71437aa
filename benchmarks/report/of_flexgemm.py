"""Lines of docs/ablations.md: FlexGEMM, its figures beside ours."""

from __future__ import annotations

from functools import partial

from benchmarks.report.picks import Line, Pick, tuner


def lines() -> tuple[Line, ...]:
    shells, flows = partial(Pick, "workloads", peer="spconv"), "dataflows/waymo_1f_5cm/k3/C128"
    return (
        Line(
            "explicit GEMM",
            "its speed in percent of the final kernels",
            "10",
            [tuner(f"{flows}/explicit-gemm", show="ratio", times=100)],
            " %",
        ),
        Line(
            "implicit GEMM",
            "over explicit GEMM",
            "significant",
            [tuner(f"{flows}/implicit-gemm-table", over=f"{flows}/explicit-gemm")],
            "x",
        ),
        Line(
            "masked",
            "over implicit GEMM, plain; with split-K",
            "1.2 to 1.4, –",
            [
                tuner(f"{flows}/implicit-gemm-{way}", over=f"{flows}/implicit-gemm-table")
                for way in ("sorted", "split-k")
            ],
            "x",
        ),
        *(
            Line(
                "preface" if size == 8 else "",
                f"shell of {size}, fp16, over spconv: forward, with gradients",
                "up to 2",
                [shells(rf"shell_{size}/B\d+/k3/C\d+/fp16/{passed}") for passed in ("fwd", r"fwd\+bwd")],
                "x",
            )
            for size in (8, 16, 32, 64, 128, 256, 512, 1024)
        ),
    )
