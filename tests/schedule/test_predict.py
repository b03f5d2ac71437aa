"""The cost model of dataflows: near what was measured, and in the right order where that is clear."""

import math

import pytest

from pumice.schedule.dataflow import DATAFLOWS, PASSES, PLANNED
from pumice.schedule.predict import (
    LayerWork,
    MapStats,
    candidate_flows,
    equivalence_key,
    flow_seconds,
    is_applicable,
    layouts,
    promising,
    total_seconds,
)


def side(rows, pairs, entries, block, taps=27):
    return MapStats(rows, rows, (pairs // taps,) * taps, entries, block)


# 3 x 3 x 3 maps of scans and of a shell, with the entries that were counted.
NUSCENES = side(17_856, 50_390, {"unsorted": (3788,), "compacted": (1118,), "split2": (480, 475)}, 64)
WAYMO = side(173_011, 597_583, {"unsorted": (31_806,), "compacted": (7917,), "split2": (2930, 2931)}, 128)
SHELL = side(248_720, 3_668_408, {"unsorted": (52_355,), "compacted": (32_368,), "split2": (14_731, 14_731)}, 128)

# Microseconds on an H200 in fp16: bench/results.jsonl, conv-forward, utilisation and ablation.
MEASURED = [
    (NUSCENES, 64, "sorted", 15.7),
    (NUSCENES, 64, "unsorted", 16.3),
    (NUSCENES, 64, "split2", 22.5),
    (NUSCENES, 128, "sorted", 24.0),
    (NUSCENES, 128, "unsorted", 29.0),
    (NUSCENES, 256, "sorted", 42.1),
    (WAYMO, 64, "sorted", 36.0),
    (WAYMO, 64, "unsorted", 81.3),
    (WAYMO, 64, "split2", 72.1),
    (WAYMO, 128, "sorted", 77.6),
    (WAYMO, 128, "unsorted", 218.0),
    (WAYMO, 128, "split2", 136.8),
    (SHELL, 64, "sorted", 94.4),
    (SHELL, 64, "unsorted", 131.6),
    (SHELL, 64, "split2", 147.1),
    (SHELL, 128, "sorted", 240.6),
    (SHELL, 128, "unsorted", 339.3),
    (SHELL, 128, "split2", 332.1),
]


def flow(name):
    return DATAFLOWS[f"implicit-gemm-{name}"]


def work(over, channels, **more):
    return LayerWork(over, over, (channels, channels), **{"itemsize": 2, **more})


@pytest.mark.parametrize(("over", "channels", "name", "measured"), MEASURED)
def test_within_a_third_of_what_was_measured(over, channels, name, measured):
    reckoned = 1e6 * flow_seconds(flow(name), work(over, channels), "forward", "cuda")
    assert 0.66 * measured <= reckoned <= 1.34 * measured


def test_a_layout_pays_where_layers_share_it():
    """One narrow layer does not pay for the order of its rows, many do; layers over one map share the layout."""
    one = [work(NUSCENES, 32)]
    assert total_seconds(flow("unsorted"), one, ["forward"], "cuda") < total_seconds(
        flow("sorted"), one, ["forward"], "cuda"
    )
    many = [work(WAYMO, 128)] * 4
    assert total_seconds(flow("sorted"), many, ["forward"], "cuda") < total_seconds(
        flow("unsorted"), many, ["forward"], "cuda"
    )
    alone, both = (total_seconds(flow("sorted"), many[:count], ["forward"], "cuda") for count in (1, 2))
    kernel = flow_seconds(flow("sorted"), many[0], "forward", "cuda")
    assert both - alone == pytest.approx(kernel) and alone > kernel
    assert total_seconds(PLANNED, many, ["forward"], "cuda") == total_seconds(flow("sorted"), many, ["forward"], "cuda")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("flow", [*DATAFLOWS.values(), PLANNED], ids=str)
def test_every_dataflow_has_a_cost(flow, name, device):
    """Finite, above 0, and more for more; an empty map and a few channels, too."""
    small, large = (LayerWork(s, s, (32, 64), 2) for s in (side(1000, 5000, {}, 64), side(100_000, 500_000, {}, 128)))
    costs = [total_seconds(flow, [one], [name], device) for one in (small, large)]
    assert 0 < costs[0] < costs[1] < math.inf
    empty = MapStats(0, 0, (0,) * 8)
    assert 0 < total_seconds(flow, [LayerWork(empty, empty, (4, 1), itemsize=8)], [name], device) < 1e-2


@pytest.mark.parametrize("name", PASSES)
def test_an_offset_of_every_row_with_itself_costs_no_movement(name):
    same, other = (MapStats(inputs, 10**6, (400_000, 10**6, 400_000)) for inputs in (10**6, 2 * 10**6))
    assert (same.unmoved, other.unmoved) == (10**6, 0)
    fused = DATAFLOWS["gather-gemm-scatter-fused-separate"]
    costs = [flow_seconds(fused, LayerWork(side, side, (64, 64), itemsize=2), name, "cuda") for side in (same, other)]
    assert costs[0] < 0.7 * costs[1]
    explicit = [
        flow_seconds(DATAFLOWS["explicit-gemm"], LayerWork(side, side, (64, 64)), name, "cuda")
        for side in (same, other)
    ]
    assert explicit[0] == explicit[1]


def test_the_input_gradient_reads_the_other_side():
    up, down = side(1000, 8000, {"compacted": (900,)}, 64), side(8000, 8000, {"compacted": (1000,)}, 64)
    one = LayerWork(down, up, (16, 64))
    assert flow_seconds(flow("sorted"), one, "dgrad", "cuda") == flow_seconds(
        flow("sorted"), LayerWork(up, down, (64, 16)), "forward", "cuda"
    )
    assert set(layouts(flow("sorted"), one, "dgrad", "cuda")) != set(layouts(flow("sorted"), one, "forward", "cuda"))


def test_weight_gradients_over_tiles():
    """As many operations as entries of whole tiles; a table has all. The layout is that of the tiles, and its own."""
    one = work(WAYMO, 128)
    spent = {name: flow_seconds(flow(name), one, "wgrad", "cuda") for name in ("unsorted", "sorted", "table")}
    pairs = flow_seconds(PLANNED, one, "wgrad", "cuda")
    assert pairs == flow_seconds(DATAFLOWS["fetch-on-demand"], one, "wgrad", "cuda")
    assert pairs < spent["sorted"] < spent["unsorted"] < spent["table"]
    keys = set(layouts(flow("sorted"), one, "wgrad", "cuda"))
    assert len(keys) == 2 and set(layouts(flow("sorted"), one, "forward", "cuda")) < keys
    assert not layouts(flow("table"), one, "wgrad", "cuda")


def names(passes, device):
    return {p.flow.name for p in candidate_flows(DATAFLOWS.values(), [work(NUSCENES, 64)], passes, device)}


def test_what_does_the_same_is_tried_once():
    assert "implicit-gemm-sorted" not in names(["forward"], "cuda"), "it is what the planner picks there"
    assert "implicit-gemm-sorted" in names(["forward"], "cpu")
    assert names(["forward"], "cuda") == set(DATAFLOWS) - {"implicit-gemm-sorted"}
    weights = names(["wgrad"], "cuda")
    assert "fetch-on-demand" not in weights, "it is what the planner picks for weights"
    assert {"implicit-gemm-sorted", "implicit-gemm-split3", "implicit-gemm-table"} < weights
    assert "implicit-gemm-table-split-k" not in weights, "as the other one over the table for weights"
    assert "fetch-on-demand-deterministic" not in weights, "as the vectorised one by offset for weights"
    assert {f"gather-gemm-scatter-{way}-fixed" for way in ("vectorised", "fused", "locality-aware")} <= weights
    assert "explicit-gemm" in weights
    both = equivalence_key(DATAFLOWS["gather-gemm-scatter-vectorised-separate"], "wgrad", "cuda")
    assert both == equivalence_key(DATAFLOWS["fetch-on-demand-deterministic"], "wgrad", "cuda")


def test_only_what_may_be_best_is_promising():
    found = candidate_flows(DATAFLOWS.values(), [work(WAYMO, 128)], ["forward"], "cuda")
    assert [p.seconds for p in found] == sorted(p.seconds for p in found)
    standing = total_seconds(PLANNED, [work(WAYMO, 128)], ["forward"], "cuda")
    kept = promising(found, standing, 2.5)
    assert kept == [p for p in found if p.seconds <= 2.5 * min(standing, found[0].seconds)]
    assert {"implicit-gemm-split2"} <= {p.flow.name for p in kept} < {p.flow.name for p in found}
    assert promising([], 1.0, 2.5) == []


def test_what_may_be_taken():
    fetch, gather = DATAFLOWS["fetch-on-demand"], DATAFLOWS["gather-gemm-scatter-fused-fixed"]
    assert not is_applicable("forward", fetch, deterministic=True, library=True)
    assert is_applicable("forward", flow("sorted"), deterministic=True, library=False)
    assert is_applicable("wgrad", flow("sorted"), deterministic=True, library=True), "a fixed order over tiles"
    assert not is_applicable("wgrad", fetch, deterministic=True, library=True)
    assert not is_applicable("forward", gather, deterministic=False, library=False)
    assert is_applicable("forward", gather, deterministic=False, library=True)
