"""Lines of docs/ablations.md: FlexGEMM, its figures beside ours."""

from __future__ import annotations

from functools import partial

from benchmarks.harness.families import ALGORITHMS
from benchmarks.report.picks import Line, Pick

_SPHERES = (64, 256, 1024)
"""Sides of the spheres on which algorithms are compared."""
_MASKED, _FINAL = "implicit-gemm-sorted", "implicit-gemm-split-k"
"""FlexGEMM's final kernels are masked with split-K, of as many parts as its autotuner finds best, one among them; ours
are split where a rule wants it, which it does on none of these spheres: explicit GEMM is compared with the masked."""


def lines() -> tuple[Line, ...]:
    """In the order of the article."""
    shells = partial(Pick, "workloads", peer="spconv")
    return (
        Line(
            "explicit GEMM",
            f"its speed in percent of the final kernels, spheres of {_SPHERES}: forward",
            "about 10",
            _over("explicit-gemm", _MASKED, "fwd", times=100),
            " %",
        ),
        Line("", "the same with gradients", "–", _over("explicit-gemm", _MASKED, r"fwd\+bwd", times=100), " %"),
        Line("", "its memory, times the final kernels': forward", "10", _memory("fwd"), "x"),
        Line("", "the same with gradients", "–", _memory(r"fwd\+bwd"), "x"),
        *(
            Line(
                place if passed == "fwd" else "",
                f"over {name}: {title}",
                published if passed == "fwd" else "–",
                _over(way, before, passed),
                "x",
            )
            for place, way, name, before, published in (
                ("implicit GEMM", "implicit-gemm-table", "explicit GEMM", "explicit-gemm", "significant"),
                ("split-K", "implicit-gemm-table-split-k", "implicit GEMM", "implicit-gemm-table", "of few rows"),
                ("masked", _MASKED, "implicit GEMM", "implicit-gemm-table", "1.2 to 1.4"),
                ("masked, split-K", _FINAL, "masked", _MASKED, "–"),
            )
            for passed, title in (("fwd", "forward"), (r"fwd\+bwd", "with gradients"))
        ),
        *(
            Line(
                "",
                f"{name} over FlexGEMM's {name}: forward, with gradients",
                "–",
                [
                    Pick("workloads", rf"algorithms/.+/{passed}/{way}", peer=rf"FlexGEMM {ALGORITHMS[way]} ")
                    for passed in ("fwd", r"fwd\+bwd")
                ],
                "x",
            )
            for name, way in (("masked", _MASKED), ("masked, split-K", _FINAL))
        ),
        *(
            Line(
                "preface" if size == 8 else "",
                f"sphere of {size}, fp16, over spconv: forward, with gradients",
                "up to 2",
                [shells(rf"shell_{size}/B\d+/k3/C\d+/fp16/{passed}") for passed in ("fwd", r"fwd\+bwd")],
                "x",
            )
            for size in (8, 16, 32, 64, 128, 256, 512, 1024)
        ),
    )


def _over(way: str, before: str, passed: str, times: float = 1.0) -> tuple[Pick, ...]:
    """How much faster a way is than another, on each sphere."""
    cases = [rf"algorithms/shell_{size}/B\d+/k3/C\d+/fp16/{passed}/" for size in _SPHERES]
    return tuple(Pick("workloads", case + way, over=case + before, times=times) for case in cases)


def _memory(passed: str) -> tuple[Pick, ...]:
    """Peak memory of explicit GEMM over that of the final kernels, on each sphere."""
    cases = [rf"algorithms/shell_{size}/B\d+/k3/C\d+/fp16/{passed}/" for size in _SPHERES]
    return tuple(
        Pick("workloads", case + _MASKED, "peak memory", "count", over=f"{case}explicit-gemm") for case in cases
    )
