"""The suite `tiled`: a U-Net over a large scene in tiles against the whole scene at once: memory, time, equal results.

The scene is made of real scans side by side, 40 m apart, each turned at random, so that they overlap: `--count` voxels
of 5 cm (20 million; on a CPU 1 million). The network is a MinkUNet, on a CPU of an eighth of the width, else of half.
Tiles are the largest of which none, with its halo, has more than an eighth of the voxels, since compiled inference
holds the kernel maps of all levels at once. Each way runs in a process of its own. Memory is the peak of allocated GPU
memory, where tiles may have a quarter of what the whole needed (torch.cuda.set_per_process_memory_fraction); on a CPU
it is the growth of the process's peak resident size.
"""

from __future__ import annotations

import math
import resource
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pumice as pm
from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Setup
from pumice.data import read_scan, street_scene
from pumice.env import settings

VOXEL, APART = 0.05, 40.0
"""Metres: voxels, and between scans."""
SHARE, LIMIT = 0.12, 0.25
"""Of the voxels in the largest tile, and of the whole's memory that tiles may use."""
_COUNT = {"cuda": 20_000_000, "cpu": 1_000_000}
_GIB = 2**30


class Ran(NamedTuple):
    """Peak memory in bytes and seconds of a way, or why it failed."""

    memory: float
    seconds: float
    failed: str = ""


def memory(setup: Setup) -> Iterator[Row]:
    """Memory and time of tiles against the whole."""
    count = setup.count or (4_000 if setup.quick else _COUNT[setup.device.type])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        x = scene(count, setup.quick)
        torch.save((x.feats, x.coords), path / "scene.pt")
        tile = largest_tile(x, 0.6 if setup.quick else SHARE)
        setup.say(f"{len(x):,} voxels; {pm.plan_tiles(network(setup.device), x, tile)}")
        whole = _apart(path, setup.device, 0, 0.0)
        limit = LIMIT * whole.memory if setup.device.type == "cuda" and not whole.failed else 0.0
        tiles = _apart(path, setup.device, tile, limit)
        for name, way in (("whole", whole), ("tiles", tiles)):
            setup.say(f"{name}: {way.failed or f'{way.memory / _GIB:.2f} GiB, {way.seconds:.1f} s'}")
        if tiles.failed:
            setup.failed(f"tiles: {tiles.failed}")
        elif whole.failed:
            yield _row(setup, len(x), tiles.memory / _GIB, Peer("", math.nan), "memory", "GiB")
        else:
            _compare(setup, path)
            yield _row(setup, len(x), tiles.memory / _GIB, Peer("whole", whole.memory / _GIB), "memory", "GiB")
            yield _row(setup, len(x), 1e3 * tiles.seconds, Peer("whole", 1e3 * whole.seconds), "time", "ms")


def _row(setup: Setup, voxels: int, value: float, peer: Peer, metric: str, unit: str) -> Row:
    return setup.row(f"unet/{voxels}", value, "wall", peer, metric, unit, "fp32")


def scene(count: int, quick: bool) -> pm.SparseTensor:
    """About `count` voxels of scans side by side, at least one scan; features: x, y, z within the scan, intensity."""
    chance, folder = torch.Generator().manual_seed(0), settings().data
    files = [] if quick or folder is None else sorted([*folder.glob("kitti_seq00/*.bin"), *folder.glob("waymo/*.bin")])
    parts: list[Tensor] = []
    found, side = 0, max(1, math.isqrt(count // 80_000))
    while found < count:
        number = len(parts)
        scan = read_scan(files[number % len(files)]) if files else street_scene(seed=number, beams=16, azimuths=256)
        points = torch.cat([torch.from_numpy(scan.xyz), torch.from_numpy(scan.feats)[:, :1]], 1).float()
        turn = 2 * math.pi * float(torch.rand(1, generator=chance))
        c, s = math.cos(turn), math.sin(turn)
        points[:, :2] = points[:, :2] @ torch.tensor([[c, s], [-s, c]])
        place = APART * torch.tensor([number % side, number // side, 0.0])
        x = pm.voxelize(points[:, :3] + place, points, VOXEL, origin=(0.0, 0.0, 0.0))
        parts.append(torch.cat([x.coords.double(), x.feats.double()], 1))
        found += len(x)
    rows = torch.cat(parts)
    merged = pm.coalesce(rows[:, 4:].float(), rows[:, :4].int())
    return pm.SparseTensor(merged.feats, merged.coords, batch_size=1)


def network(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    return pm.models.MinkUNet(4, width=0.5 if device.type == "cuda" else 0.125).eval().to(device)


def largest_tile(x: pm.SparseTensor, share: float) -> int:
    """The largest power of two of which every tile, with its halo, has at most `share` of the voxels; at least 128."""
    net = network(torch.device("cpu"))
    sizes = (2**power for power in range(14, 6, -1))
    fits = (size for size in sizes if pm.plan_tiles(net, x, size).largest <= share * len(x))
    return next(fits, 128)


def _apart(path: Path, device: torch.device, tile: int, limit: float) -> Ran:
    """A way in a process of its own. tile: 0 for the whole; limit: bytes of GPU memory, 0 for none."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_ran, (path, str(device), tile, limit))


def _ran(path: Path, device: str, tile: int, limit: float) -> Ran:
    feats, coords = torch.load(path / "scene.pt")
    net, cuda = network(torch.device(device)), device.startswith("cuda")
    x = pm.SparseTensor(feats, coords, batch_size=1)
    _warm(net, x, device)
    if cuda and limit:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(device).total_memory)
    before, begin = _peak(cuda), time.perf_counter()
    try:
        with torch.no_grad():
            y = pm.tiled(net, x, tile) if tile else net(x.to(device)).cpu()
    except torch.OutOfMemoryError as error:
        return Ran(math.nan, math.nan, str(error).partition("\n")[0])
    ran = Ran(_peak(cuda) - before * (not cuda), time.perf_counter() - begin)
    torch.save(y.feats, path / ("tiles.pt" if tile else "whole.pt"))
    return ran


def _warm(net: Any, x: pm.SparseTensor, device: str) -> None:
    """Compile the kernels on few voxels."""
    with torch.no_grad():
        net(pm.SparseTensor(x.feats[:4096], x.coords[:4096], batch_size=1).to(device))
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()


def _peak(cuda: bool) -> float:
    return torch.cuda.max_memory_allocated() if cuda else 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _compare(setup: Setup, path: Path) -> None:
    whole, tiles = torch.load(path / "whole.pt"), torch.load(path / "tiles.pt")
    worst = float((whole - tiles).abs().max() / whole.abs().max())
    setup.say(f"results: {'equal bit for bit' if torch.equal(whole, tiles) else f'relative error {worst:.2g}'}")
    bound = 0.0 if setup.device.type == "cpu" else 1e-4
    if not worst <= bound:
        setup.failed(f"tiles: relative error {worst:.2g}, expected at most {bound}")
