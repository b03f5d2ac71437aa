"""Pumice against its peers in one run, as rows of the results file.

Suites yield rows. A call is timed only after its result was checked against a float64 result. A row is one JSON object:
suite, case, metric, value (median), unit, p20, p80, lib, dtype, clock, peer, peer_value, peer_source, device, versions,
commit, date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.harness.rows import Row, append
from benchmarks.harness.study import Options, Say, Suite
from benchmarks.scenes.layers import FORWARD, TRAINING
from benchmarks.scenes.workloads import SPCONV_NET
from benchmarks.suites import (
    engine_passes,
    graph,
    layer_ablation,
    layer_accuracy,
    layers,
    map_steps,
    maps,
    points,
    pruned,
    roofline,
    sparse_loops,
    spmm,
    structures,
    tiled,
    tuner_groupings,
    tuner_layers,
    tuner_movement,
    tuner_passes,
    tuner_ways,
    workloads,
)
from benchmarks.suites.einsum_conv import conv
from benchmarks.suites.einsum_figures import ablation, figure7, lines, table3
from benchmarks.suites.engine_equal import equal
from benchmarks.suites.engine_varied import varied
from benchmarks.suites.estimates import estimates
from benchmarks.suites.first_call import compile_times
from benchmarks.suites.fleet import fleet
from benchmarks.suites.host import first_call, host
from benchmarks.suites.messages import messages
from benchmarks.suites.ranks import training
from benchmarks.suites.retrieval import retrieval
from benchmarks.suites.sensitivity import sensitivity
from benchmarks.suites.shells import algorithms as shell_algorithms
from benchmarks.suites.shells import shells
from benchmarks.suites.stream import stream
from benchmarks.suites.tensor_product import tensor_product
from pumice.errors import OptionError

_TABLE = (
    Suite(
        "conv-forward",
        {
            "layers": partial(layers.layers, passed=FORWARD),
            "channels": layer_accuracy.channels,
            "dtypes": layer_accuracy.dtypes,
            "errors": layer_accuracy.errors,
            "roofline": roofline.roofline,
            "utilisation": roofline.utilisation,
            "ablation": layer_ablation.ablation,
            "redundancy": roofline.redundancy,
            "sensitivity": sensitivity,
            "default-tile": partial(layer_ablation.default_tile, passed=FORWARD),
            "host": host,
            "first-call": first_call,
        },
        every=False,
    ),
    Suite(
        "conv-train",
        {
            "layers": partial(layers.layers, passed=TRAINING),
            "gradients": layers.gradients,
            "default-tile": partial(layer_ablation.default_tile, passed=TRAINING),
        },
        every=False,
    ),
    Suite(
        "einsum",
        {
            "structured": spmm.structured,
            "unstructured": spmm.unstructured,
            "conv": conv,
            "tensor-product": tensor_product,
            "messages": messages,
            "figure7": figure7,
            "table3": table3,
            "lines": lines,
            "ablation": ablation,
            "compile": compile_times,
        },
    ),
    Suite(
        "engine",
        {"inference": engine_passes.inference, "equal": equal, "varied": varied, "training": engine_passes.training},
    ),
    Suite("fleet", {"label": fleet}),
    Suite("graph", {"relational": graph.relational, "segment": graph.segment}),
    Suite(
        "maps",
        {
            "map": maps.submanifold,
            "plan": maps.plans,
            "outputs": maps.strided,
            "network": maps.networks,
            "pyramid": maps.pyramids,
            "scaling": maps.scaling,
            "ablation": maps.ablation,
            "steps": map_steps.steps,
        },
    ),
    Suite("tiled", {"memory": tiled.memory}),
    Suite("points", {"knn": points.knn, "ball": points.ball, "fps": points.fps, "attention": points.attention}),
    Suite("ranks", {"training": training}),
    Suite(
        "tuner",
        {
            "movement": tuner_movement.data_movement,
            "breakdown": tuner_movement.breakdown,
            "grouping": tuner_groupings.grouping,
            "batching": tuner_groupings.batching,
            "offsets": tuner_groupings.offsets,
            "strategies": tuner_groupings.strategies,
            "splits": tuner_ways.splits,
            "sorted": tuner_ways.sorted_rows,
            "hybrid": tuner_ways.hybrid,
            "reordering": tuner_ways.reordering,
            "bindings": tuner_ways.bindings,
            "networks": tuner_ways.networks,
            "layers": tuner_passes.layers,
            "gains": tuner_ways.gains,
            "transfer": tuner_ways.transfer,
            "dataflows": tuner_layers.dataflows,
        },
    ),
    Suite(
        "ucf",
        {
            "filters": pruned.filters,
            "blocks": pruned.blocks,
            "retrieval": retrieval,
            "structures": structures.structures,
            "presets": structures.presets,
            "crossing": structures.crossing,
            "orders": sparse_loops.orders,
            "activations": sparse_loops.activations,
            "submanifold": sparse_loops.submanifold,
        },
    ),
    Suite(
        "workloads",
        {
            "networks": workloads.networks,
            "estimates": estimates,
            "shells": shells,
            "shell-algorithms": shell_algorithms,
            "spconv-net": partial(workloads.networks, given={SPCONV_NET.name: SPCONV_NET}, batch=1),
        },
        every=False,
    ),
)
SUITES: dict[str, Callable[[Say, Options], Iterator[Row]]] = {
    "cpu-conv": layers.cpu_conv,
    "stream": stream,
    **{suite.name: suite for suite in _TABLE},
}


def run(suite: str, say: Say, options: Options | None = None) -> Iterator[Row]:
    """The rows of a suite. Raises OptionError for an unknown suite."""
    if suite not in SUITES:
        raise OptionError(f"suite {suite!r} is unknown; there are {', '.join(sorted(SUITES))}")
    return SUITES[suite](say, options or Options())


def record(rows: Iterable[Row], ledger: Path | None) -> None:
    """Run a suite by iterating over its rows, and append each to the results file, if given."""
    for found in rows:
        if ledger is not None:
            append(ledger, found)
