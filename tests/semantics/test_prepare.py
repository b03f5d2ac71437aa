"""Maps that are prepared are laid out for the layers that will read them."""

import importlib

import pytest
import torch

import pumice as pm
from pumice.lower import maps
from pumice.lower.dataflow import materialize
from pumice.testing import random_tensor

prepare = importlib.import_module("pumice.ops.prepare")
STEP, WINDOW = pm.Relation.of(3, 2, stride=2), pm.Relation.of(3, 3)


def layers(*flows):
    return [pm.nn.Conv3d(4, 4, 3, dataflow=flow) for flow in flows]


def maps_of(x):
    """Down, and of both levels those that keep them."""
    down, coarse = pm.kernel_map(x.geometry, STEP)
    return [down], [[pm.kernel_map(level, WINDOW)[0]] for level in (x.geometry, coarse)]


def wanted_of(geometry, users=None):
    """A step down, and windows of both levels."""
    same = ((WINDOW,), (WINDOW,))
    flows = None if users is None else prepare._flows_over((STEP,), same, users)
    return list(prepare.RequestedMaps((STEP,), same, flows).maps(geometry))


def laid(found):
    return {name for name in maps.FORMS if found.has(("form", name))}


@pytest.mark.parametrize("differentiable", [False, True])
def test_only_what_layers_read_is_laid_out(differentiable, monkeypatch):
    monkeypatch.setattr(maps, "_FORMS_OF", {"cpu": maps._FORMS_OF["cuda"]})
    x = random_tensor(60, 4, 3)
    passes = pm.ops.Dataflows("implicit-gemm-split2", "planned", "implicit-gemm-table")
    users = pm.ops.MapConsumers(
        [layers("implicit-gemm-unsorted")], [[]], [[layers(None, passes)], [layers("gather-gemm-scatter-fused-fixed")]]
    )
    wanted = wanted_of(x.geometry, users)
    materialize(wanted, differentiable)
    (fine, _), (one, _), (coarse, _), (back, _) = wanted
    down, kept = maps_of(x)
    assert one is down[0] and (fine, coarse) == (kept[0][0], kept[1][0]) and back.flipped
    assert laid(one) == ({"unsorted", "unsorted_t", "unsorted_w"} if differentiable else {"unsorted"})
    assert laid(fine) == {"compacted", "split2"} | ({"compacted_t", "grouped", "table"} if differentiable else set())
    assert laid(coarse) == laid(back) == set(), "library products read no form, and nothing leads back"


def test_without_users_all_is_laid_out_both_ways(monkeypatch):
    monkeypatch.setattr(maps, "_FORMS_OF", {"cpu": maps._FORMS_OF["cuda"]})
    wanted = wanted_of(random_tensor(60, 4, 3).geometry)
    materialize(wanted, False)
    assert [found.flipped for found, _ in wanted] == [False, False, False, True]
    forms = [laid(found) for found, _ in wanted]
    assert forms == [{"compacted"}, {"unsorted"}, {"compacted"}, {"unsorted"}], "few taps of few rows are not sorted"
    monkeypatch.setattr(maps, "_SORTED", 1)
    assert [maps.names_of(found, True) for found, _ in wanted] == [("compacted", "compacted_t", "grouped")] * 4


def test_what_is_prepared_is_not_looked_for_again(monkeypatch):
    x, asked, real = random_tensor(60, 4, 3), [], prepare.RequestedMaps.build

    def find(self, geometry):
        asked.append(len(geometry))
        real(self, geometry)

    monkeypatch.setattr(prepare.RequestedMaps, "build", find)
    for _ in range(2):
        x.prepare((STEP,), ((WINDOW,), (WINDOW,)))
        x.replace(x.feats + 1).prepare((STEP,), ((WINDOW,), (WINDOW,)))
    assert len(asked) == 1
    with torch.no_grad():
        x.prepare((STEP,), ((WINDOW,), (WINDOW,)))
    x.prepare((STEP,), ((WINDOW,), (pm.Relation.of(3, 5),)))
    assert len(asked) == 3, "without gradients, and of another window, other arrays are read"
    pm.SparseTensor(x.feats, x.coords).prepare((STEP,), ((WINDOW,), (WINDOW,)))
    assert len(asked) == 4


def test_what_failed_is_looked_for_again(monkeypatch):
    x = random_tensor(60, 4, 3)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "pyramid", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            x.prepare((STEP,))
    x.prepare((STEP,))
    assert (STEP, None) in x.geometry.maps


def test_compiled_code_reads_maps_that_were_found_together(monkeypatch):
    """What is kept of them are tensors, and metadata as it is."""
    monkeypatch.setattr(prepare, "has_triton", lambda tensor: True)
    net = torch.nn.Sequential(pm.nn.Conv3d(4, 2, 3), pm.nn.Conv3d(2, 2, 2, stride=2), pm.nn.Conv3d(2, 1, 3))
    x = random_tensor(60, 4, 3).prepare([STEP], [[WINDOW]] * 2)
    prepare._mark(x.geometry)
    compiled = torch.compile(lambda x: net(x).feats, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), net(x).feats, atol=1e-6)
