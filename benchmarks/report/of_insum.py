"""Lines of docs/ablations.md: Insum, its figures beside ours."""

from __future__ import annotations

import re
from functools import partial

from benchmarks.report.picks import Line, Pick, numbers

_PAPER = "Insum"


def lines() -> tuple[Line, ...]:
    paper, einsum = partial(numbers, _PAPER), partial(Pick, "einsum")
    bsr, sparse = "torch BSR", "torch.sparse|cuSPARSE"
    graphs = r"unstructured/(cora|citeseer|pubmed|[\w-]+-like)/N128/.+"
    return (
        *(
            Line(
                "table 1" if row.startswith("structured") else "",
                f"{row}: lines replaced by one, gain",
                paper("table 1", row),
                [einsum(f"lines/{name}", "lines", "count", show="value"), gain],
            )
            for row, name, gain in (
                ("structured SpMM (TorchBSR)", "structured", einsum(r"structured/.+", peer=bsr, best=True)),
                (
                    "unstructured SpMM (Sputnik)",
                    "unstructured",
                    einsum(graphs, clock="wall", peer=sparse, dtype="fp32", best=True),
                ),
                (
                    "tensor product (e3nn)",
                    "tensor-product",
                    einsum(r"tensor-product/l./C\d+/per-sample/fwd/.+", peer="e3nn", best=True),
                ),
                (
                    "sparse convolution (TorchSparse)",
                    "conv",
                    einsum("conv/(lobby|office)/.+", peer="spconv", best=True),
                ),
            )
        ),
        *(
            Line(
                "table 2" if degree == 1 and channels == 16 else "",
                f"tensor product, l {degree}, {channels} channels, over e3nn",
                paper("table 2", f"{degree}, {channels}", "Insum"),
                [einsum(rf"tensor-product/l{degree}/C{channels}/per-sample/fwd/.+", peer="e3nn", best=True)],
                "x",
            )
            for degree in (1, 2, 3)
            for channels in (16, 32, 64)
        ),
        Line("table 3", "compile and tune", "14800", [einsum("table3/.+", "compile", "wall", show="value")], " ms"),
        Line("", "convert", "0.55", [einsum("table3/.+", "conversion", "wall", show="value")], " ms"),
        Line(
            "",
            "run (TACO 253.5, SparseTIR 1.05, TorchSparse 0.66)",
            "0.47",
            [einsum("table3/.+", "run", "wall", show="value")],
            " ms",
        ),
        *(
            Line(
                "figure 7" if size == 1 else "",
                f"80 %, blocks: groups of {size}: gathers and scatters, memory, time",
                "drawn",
                [
                    einsum(f"figure7/blocks.*/g{size}", "gathers+scatters", "count", show="value"),
                    einsum(f"figure7/blocks.*/g{size}", "memory", "count", show="value"),
                    einsum(f"figure7/blocks.*/g{size}", show="value"),
                ],
            )
            for size in (1, 4, 16)
        ),
        *(
            Line(
                "figure 10" if share == "0.25" else "",
                f"4096, {share[2:]} % zeros, over dense: blocks of 32; 128",
                published,
                [einsum(f"structured/4096/B{block}/s{share}/.+", peer="dense", best=True) for block in (32, 128)],
                "x",
            )
            for share, published in (("0.25", "1"), ("0.50", "drawn"), ("0.90", "drawn"), ("0.99", "drawn"))
        ),
        Line(
            "",
            "4096, blocks of 32, 90 %, over TorchBSR: GPU, wall",
            "as fast, or faster",
            [einsum("structured/4096/B32/s0.90/.+", clock=clock, peer=bsr, best=True) for clock in ("gpu", "wall")],
            "x",
        ),
        *(
            Line(
                "figure 11" if dtype == "fp32" else "",
                f"{dtype}, matrices as TC-GNN's, over the best cuSPARSE: wall, GPU",
                published,
                [einsum(graphs, clock=clock, peer=sparse, dtype=dtype, best=True) for clock in ("wall", "gpu")],
                "x",
            )
            for dtype, published in (("fp32", "1.2"), ("fp16", "1.18"))
        ),
        *(
            Line(
                "",
                f"{dtype}, the same over torch.sparse.mm: wall, GPU",
                "–",
                [
                    einsum(graphs, clock=clock, peer="torch.sparse.mm", dtype=dtype, best=True)
                    for clock in ("wall", "gpu")
                ],
                "x",
            )
            for dtype in ("fp32", "fp16")
        ),
        Line("", "Sputnik, fp32", "1.09", "not at hand", "x"),
        Line(
            "figure 12",
            "convolution, 128 channels, rooms of S3DIS (ours over spconv)",
            "1.14",
            [einsum("conv/(lobby|office)/k3/C128/.+", peer="spconv", best=True)],
            "x",
        ),
        *(
            Line(
                "figure 13" if row == "groups over COO" else "",
                f"{name} (4096, 90 %, blocks of 32)",
                published,
                [einsum(re.escape(f"ablation/{way}"), over=re.escape(f"ablation/{before}"))],
                "x",
            )
            for row, name, published, way, before in (
                ("groups over COO", "groups over COO", "8", "+ group", "COO"),
                ("", "groups and blocks over COO", "20", "+ block", "COO"),
                ("", "products fused over not", "2.6", "+ tensor cores", "+ block"),
                ("", "lazy over eager broadcasting", "drawn", "+ lazy broadcasting", "our kernel, eager broadcasting"),
            )
        ),
    )
