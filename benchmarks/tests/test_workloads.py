"""The seven workloads: which networks, how many voxels, and that each sample is what a network takes."""

import cases
import pytest
import torch

import pumice as pm
from benchmarks.scenes import workloads
from benchmarks.scenes.workloads import WORKLOADS, Sample, fresh, samples, stand_in, varied
from pumice.env import settings
from pumice.errors import OptionError

# The voxels of every scan at hand, as the notes of the real scans have them, or as many as the cap leaves.
VOXELS = {
    "minkunet-kitti-1x": (88_220, 94_625),
    "minkunet-kitti-0.5x": (88_220, 94_625),
    "minkunet-nuscenes-1f": (17_850, 18_960),
    "minkunet-nuscenes-3f": (46_000, 46_850),
    "centerpoint-nuscenes-10f": (60_000, 60_000),
    "centerpoint-waymo-1f": (74_902, 74_978),
    "centerpoint-waymo-3f": (140_000, 150_000),
}
ONE = "minkunet-nuscenes-1f"


def found(workload, **options):
    """Samples, or a skip where the scans are not at hand."""
    try:
        return samples(workload, "cpu", **options)
    except OptionError as reason:
        pytest.skip(str(reason))


@pytest.fixture
def streets(monkeypatch):
    """`streets(name)`: a workload on tiny generated scans."""
    return lambda name: stand_in(WORKLOADS[name])


def convolutions(net):
    return [m for m in net.modules() if isinstance(m, pm.nn.conv.Convolution)]


def test_the_seven():
    assert list(WORKLOADS) == list(VOXELS)
    assert all(workload.name == name for name, workload in WORKLOADS.items())
    assert [name for name, workload in WORKLOADS.items() if workload.generated] == ["centerpoint-waymo-3f"]


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name.startswith("minkunet")])
def test_minkunet_layer_for_layer(name):
    with torch.device("meta"):
        net = WORKLOADS[name].model()
    width = 0.5 if name.endswith("0.5x") else 1
    convs = convolutions(net)
    assert len(convs) == 42 and sum(isinstance(m, pm.nn.Linear) for m in net.modules()) == 7 + 1
    assert [tuple(m.weight.shape[1:-1]) for m in convs].count((2, 2, 2)) == 8
    assert convs[0].in_channels == WORKLOADS[name].features == 4
    assert max(m.out_channels for m in convs) == 256 * width
    assert net.head.out_features == (19 if "kitti" in name else 16)


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name.startswith("centerpoint")])
def test_centerpoint_layer_for_layer(name):
    with torch.device("meta"):
        net = WORKLOADS[name].model()
    convs = convolutions(net)
    assert len(convs) == 21 and net.form == "voxelres8x"
    assert convs[0].in_channels == WORKLOADS[name].features == (6 if "waymo-3f" in name else 5)
    assert convs[-1].out_channels == 128


@pytest.mark.parametrize("name, maps", [(ONE, 9), ("centerpoint-waymo-1f", 8)])
def test_maps_of_a_network(streets, name, maps):
    workload = streets(name)
    torch.manual_seed(0)
    x = fresh(samples(workload, "cpu", count=1, most=300)[0])
    with torch.no_grad():
        workload.model().eval()(x)
    assert len(cases.maps_below(x.geometry)) == maps


@pytest.mark.parametrize("name", WORKLOADS)
def test_voxels_of_the_scans(name):
    workload = WORKLOADS[name]
    given = found(workload)
    low, high = VOXELS[name]
    for one in given:
        # A point on a cell's face falls to either side as its decimals are rounded.
        assert low - 2 <= len(one) <= high + 2, f"{one.name}: {len(one)} voxels, expected {low} to {high}"
        assert one.coords.dtype == torch.int32 and one.coords.shape == (len(one), 4)
        assert one.feats.shape == (len(one), workload.features) and torch.isfinite(one.feats).all()
        assert int(one.coords.min()) == 0 and not bool(one.coords[:, 0].any())
        extent = one.spatial_shape
        assert (extent is None) == name.startswith("minkunet")
        assert extent is None or all(int(m) < e for m, e in zip(one.coords[:, 1:].amax(0), extent, strict=True))
    assert len({one.name for one in given}) == len(given)


def test_rows_are_sorted_and_distinct():
    for name in ("minkunet-nuscenes-1f", "centerpoint-waymo-1f"):
        rows = found(WORKLOADS[name], count=1)[0].coords
        assert torch.equal(rows, rows.unique(dim=0))


def test_features_are_where_their_voxels_are():
    """x, y and z of a voxel's points lie within its cell."""
    grid = torch.tensor(WORKLOADS["centerpoint-waymo-1f"].grid.size)
    one = found(WORKLOADS["centerpoint-waymo-1f"], count=1)[0]
    low = torch.tensor([-75.2, -75.2, -2.0])
    place = (one.feats[:, :3] - low) / grid - one.coords[:, [3, 2, 1]]
    assert float(place.min()) > -1e-2 and float(place.max()) < 1 + 1e-2


def test_a_batch_joins_scans(streets):
    workload = streets(ONE)
    singles, pairs = samples(workload, "cpu", most=200), samples(workload, "cpu", batch=2, most=200)
    assert len(singles) == 2 and len(pairs) == 1
    both = pairs[0]
    assert both.batch == 2 and len(both) == 400
    for item, one in enumerate(singles):
        rows = both.coords[:, 0] == item
        assert torch.equal(both.coords[rows][:, 1:], one.coords[:, 1:]) and torch.equal(both.feats[rows], one.feats)
    # More than there are: they come again.
    assert samples(workload, "cpu", batch=3, most=200)[0].batch == 3


def test_a_fresh_tensor_has_no_maps(streets):
    one = samples(streets("centerpoint-waymo-3f"), "cpu", torch.float64, count=1, most=100)[0]
    x, y = fresh(one), fresh(one)
    assert x.geometry is not y.geometry and x.dtype == torch.float64
    assert x.spatial_shape == (41, 1504, 1504) and x.batch_size == 1 and x.channels == 6


def test_without_scans_the_variable_is_named(monkeypatch, tmp_path):
    settings.cache_clear()
    try:
        monkeypatch.delenv("PUMICE_DATA", raising=False)
        with pytest.raises(OptionError, match="minkunet-kitti-1x reads real scans: set PUMICE_DATA"):
            samples(WORKLOADS["minkunet-kitti-1x"], "cpu")
        assert samples(stand_in(WORKLOADS[ONE]), "cpu", count=1, most=10)
        settings.cache_clear()
        monkeypatch.setenv("PUMICE_DATA", str(tmp_path))
        for workload in WORKLOADS.values():
            if not workload.generated:
                with pytest.raises(OptionError, match="PUMICE_DATA=.*expected scans"):
                    samples(workload, "cpu")
    finally:
        settings.cache_clear()
        workloads._read.cache_clear()


# Varied scans


def grid(shape, coords):
    coords = torch.tensor(coords, dtype=torch.int32)
    return Sample(torch.nn.functional.pad(coords, (1, 0)), torch.arange(len(coords)).float()[:, None], shape, 1, "one")


@pytest.mark.parametrize("shape", [None, (4, 30, 30), (4, 30, 20)])
def test_varied_scans_are_the_same_surface_elsewhere(shape):
    chance = torch.Generator().manual_seed(1)
    extent = shape or (30, 30, 4)
    cells = torch.cartesian_prod(*map(torch.arange, extent))
    kept = cells[torch.rand(len(cells), generator=chance).argsort()[:400].sort().values]
    one = grid(shape, kept.tolist())
    given = varied([one, one], 7)
    assert len(given) == 7 and given[0] is one and len({x.name for x in given[2:]}) == 5
    sizes = [len(x) for x in given[2:]]
    assert sizes == [396, 392, 388, 384, 380]
    for x in given[2:]:
        assert x.spatial_shape == shape and bool((x.coords >= 0).all())
        assert bool((x.coords[:, 1:] < torch.tensor(extent)).all()) and len(x.coords.unique(dim=0)) == len(x)
        assert torch.equal(x.coords, x.coords[workloads._by_coordinates(x.coords, 0)])
        # Distances are kept: a turn, no mirror image and no mixing up of axes or features.
        rows = x.feats[:, 0].long()
        before, after = (torch.cdist(c, c) for c in (one.coords[rows, 1:].double(), x.coords[:, 1:].double()))
        assert torch.allclose(before, after)
        up = 1 if shape is not None else 3
        assert torch.equal(one.coords[rows, up], x.coords[:, up]) and not torch.equal(one.coords[rows], x.coords)


def test_more_real_scans_than_asked():
    ones = [grid(None, [[i, 0, 0]]) for i in range(4)]
    assert varied(ones, 3) == ones[:3] and varied(ones, 4) == ones
