"""torch.export of networks that find their kernel maps inside: saved, and run by who has torch and pumice alone."""

import subprocess
import sys

import cases
import pytest
import torch
from nets import OneLevel

import pumice as pm
from pumice import nn
from pumice.errors import CoordinateError, DtypeError, GeometryError, OptionError, ShapeError

RUNNER = """
import sys
import torch
import pumice

program = torch.export.load(sys.argv[1]).module()
with torch.no_grad():
    results = [program(*scan) for scan in torch.load(sys.argv[2])]
torch.save(results, sys.argv[3])
print(sorted(name for name in sys.modules if name in ("pytest", "cases", "pumice.cli")))
"""


def scan(seed, voxels=20, batches=2, channels=4):
    """(coords, feats)"""
    coords = torch.tensor(cases.compact(3, 0, 16, voxels, batches, seed), dtype=torch.int32)
    return coords, torch.randn(len(coords), channels, generator=torch.Generator().manual_seed(seed))


EDGES = [(torch.zeros(rows, 4, dtype=torch.int32), torch.ones(rows, 4)) for rows in (0, 1)]


class Forked(torch.nn.Module):
    """Down, up again, and a number for each batch item."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(4, 8, 3), nn.BatchNorm(8), torch.nn.ReLU())
        self.down = nn.Conv3d(8, 8, 3, stride=2, padding=1)
        self.up = nn.InverseConv3d(8, 4, 3, stride=2, padding=1)
        self.pool = nn.Sequential(nn.MaxPool3d(2), nn.GlobalAvgPool())

    def forward(self, x):
        y = self.stem(x)
        deep = self.down(y)
        return {"voxels": self.up(deep, y) + x, "levels": [deep, (self.pool(deep),)]}


def exported(model, example, strict=False, **options):
    net = pm.exportable(model, **options)
    return net, torch.export.export(net, example, dynamic_shapes=net.dynamic_shapes, strict=strict)


def test_saved_and_run_in_a_process_of_its_own(tmp_path):
    torch.manual_seed(0)
    net, program = exported(OneLevel().eval(), scan(0))
    files = [str(tmp_path / name) for name in ("net.pt2", "scans.pt", "results.pt")]
    scans = [scan(1, 60), scan(2, 9, 3), *EDGES]
    torch.export.save(program, files[0])
    torch.save(scans, files[1])
    done = subprocess.run([sys.executable, "-c", RUNNER, *files], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    for given, (coords, feats) in zip(scans, torch.load(files[2]), strict=True):
        want = net(*given)
        assert torch.equal(coords, want[0])
        torch.testing.assert_close(feats, want[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_results_of_any_form(strict, tmp_path):
    net, program = exported(Forked().eval(), scan(0), strict)
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    for given in (scan(1, 30), scan(2, 7, 4), *EDGES):
        got, want = loaded(*given), net(*given)
        assert torch.equal(got["voxels"][0], given[0])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_what_is_known_of_all_scans():
    net, program = exported(Forked().eval(), scan(0), batch_size=4, spatial_shape=(16, 16, 16), stride=2)
    assert repr(net).startswith("Exportable(\n  stride=2, spatial_shape=(16, 16, 16), batch_size=4")
    got, want = program.module()(*scan(1)), net(*scan(1))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert got["levels"][1][0].shape == (4, 8)
    with pytest.raises(CoordinateError, match="batch indices reach 4, batch_size is 4"):
        program.module()(*scan(1, 9, 5))
    coords, feats = scan(1)
    with pytest.raises(CoordinateError, match="spatial_shape is"):
        program.module()(coords + torch.tensor([0, 9, 0, 0], dtype=torch.int32), feats)


def test_a_backbone_of_levels_bounded_by_an_extent():
    model = pm.models.CenterPointBackbone(4).eval()
    net, program = exported(model, scan(0), batch_size=2, spatial_shape=(41, 40, 40))
    got, want = program.module()(*scan(1, 30)), net(*scan(1, 30))
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-4)


class Curved(torch.nn.Module):
    """Codes along a curve, coarser voxels and back, and a mean over all voxels."""

    def forward(self, x):
        order = torch.argsort(pm.serialize(x.coords, "hilbert", check=False))
        y = x.replace(x.feats[order].cumsum(0))
        y = pm.ops.upsample_nearest(pm.ops.space_to_channel(y), 2, y)
        return y, pm.ops.row_mean(y, y.feats)


def test_an_export_leaves_nothing_behind():
    coords, feats = scan(3)
    net, program = exported(Curved(), (coords, feats))
    torch.testing.assert_close(net(coords, feats), program.module()(coords, feats))
    other = scan(4, 9)
    torch.testing.assert_close(net(*other), program.module()(*other))
    assert len(pm.serialize(coords, check=False).unique()) == len(coords)


def test_mistakes():
    with pytest.raises(OptionError, match="takes a torch.nn.Module, found function"):
        pm.exportable(lambda x: x)  # pyright: ignore[reportArgumentType]
    coords, feats = scan(0)
    with pytest.raises(DtypeError, match="must be a tensor of torch.int32, found torch.int64"):
        exported(nn.Conv3d(4, 4, 3), (coords.long(), feats))
    with pytest.raises(GeometryError, match=r"needs a target, layer\(x, finer\).*torch.export"):
        net = nn.Sequential(nn.Conv3d(4, 4, 2, stride=2), nn.InverseConv3d(4, 4, 2, stride=2))
        exported(net, (coords, feats))
    with pytest.raises(ShapeError, match="x has 3"):
        exported(nn.Conv3d(4, 4, 3), (coords, feats[:, :3]))
    with pytest.raises(OptionError, match="set layer.dataflow = None"):
        exported(nn.Conv3d(4, 4, 3, dataflow="implicit-gemm-unsorted"), (coords, feats))
    net, program = exported(nn.Conv3d(4, 4, 3), (coords, feats))
    for run in (net, program.module()):
        with pytest.raises(DtypeError, match="must be a tensor of torch.int32, found torch.int64"):
            run(coords.long(), feats)
        with pytest.raises(CoordinateError, match="40 of 80 coordinates are duplicates"):
            run(torch.cat([coords, coords]), torch.cat([feats, feats]))
        with pytest.raises(CoordinateError, match="batch indices start at 0, found -1"):
            run(coords - 1, feats)
        with pytest.raises((ShapeError, AssertionError), match=r"x has 3|feats.size\(\)\[1\] == 4"):
            run(coords, feats[:, :3])
