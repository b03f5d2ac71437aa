"""The suite `graph`: every study runs, peers agree, and generated graphs have the sizes asked for."""

import pytest
import torch

import benchmarks.run as bench
import pumice as pm
from benchmarks.peers.graphs import PaddedConv, looped
from benchmarks.scenes.graphs import generated
from pumice.errors import PumiceError


@pytest.mark.parametrize(("study", "cases"), [("relational", 5), ("segment", 6)])
def test_rows(study, cases):
    rows = list(bench.run("graph", print, bench.Options(study, quick=True, device="cpu")))
    assert len({row.case for row in rows}) == cases
    assert {row.case.rpartition("/")[2] for row in rows} <= {"ours", "captured", "compiled"}
    assert {row.peer for row in rows} >= ({"padded bmm"} if study == "relational" else {"index_add", "scatter_reduce"})


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(pm.ops, "scatter", lambda x, index, dim, dim_size, reduce: torch.zeros(dim_size, x.shape[1]))
    with pytest.raises(PumiceError, match="relative error"):
        list(bench.run("graph", print, bench.Options("segment", quick=True, device="cpu")))


def test_peers_agree():
    edges = generated(50, 400, 7)
    assert edges.index.shape == (2, 400) and edges.index.max() < 50 and edges.kinds.max() < 7
    conv, x = pm.nn.RelationalConv(5, 4, 7), torch.randn(50, 5)
    wanted = conv(x, edges.index, edges.kinds)
    torch.testing.assert_close(looped(conv, edges, x), wanted)
    torch.testing.assert_close(PaddedConv(conv, edges)(x), wanted)
