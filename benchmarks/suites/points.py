"""The suite `points`: neighbours of points in real scans, farthest points, attention in patches.

knn         16 neighbours of every point
ball        up to 32 points within a radius of every point
fps         a quarter of the points
attention   patches of 1024 tokens, as in Point Transformer V3, forward and with gradients

Peers: torch_cluster (on a CPU, its kd-tree); SciPy's kd-tree; on a GPU, all pairs by torch.cdist and topk; for
attention, the back ends of torch's scaled_dot_product_attention. Sets of other programs are compared by distances.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Case, Setup, Way, measured, ready
from benchmarks.harness.timing import cpu_clock, on_cpu, on_threads
from pumice import ops
from pumice.env import settings

K, BALL, PATCH = 16, 32, 1024
HEADS = ((4, 16), (8, 32), (16, 64))  # (heads, channels of each)
_BACK_ENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}
_RUNS = 7
_ROWS = 4096  # Queries that are compared with all points at once
_SCANS = {"kitti": ("kitti_seq00/000000.bin", 4, 0.5), "scannet": ("indoor_scannet/scene0000_00.bin", 6, 0.1)}


def clouds(setup: Setup) -> Iterator[tuple[str, Tensor, float]]:
    """(name, points, radius of a ball) of real scans, and 10 thousand points of one; of a sphere, if quick."""
    chance, folder = torch.Generator().manual_seed(0), settings().data
    if setup.quick or folder is None:
        sphere = torch.nn.functional.normalize(torch.randn(300 if setup.quick else 100_000, 3, generator=chance), dim=1)
        yield "sphere", sphere.to(setup.device), 0.3 if setup.quick else 0.02
        return
    for name, (path, columns, radius) in _SCANS.items():
        values = np.fromfile(folder / path, dtype=np.float32).reshape(-1, columns)
        scan = torch.from_numpy(values[:, :3].copy())
        yield name, scan.to(setup.device), radius
        if name == "kitti":
            yield "kitti_10k", scan[torch.randperm(len(scan), generator=chance)[:10_000]].to(setup.device), radius


def _timed(setup: Setup, case: Case, ours: Way, peers: Sequence[Way]) -> Iterator[Row]:
    """As measured; on a CPU by the time of one thread."""
    if setup.device.type == "cuda":
        yield from measured(setup, case, [ours], peers)
        return
    checked = [ready(setup, case, way, way is ours) for way in (ours, *peers)]
    if checked[0] is None:
        return
    done = [one for one in checked if one]
    with on_threads(1):
        times = on_cpu([one.call for one in done], 3 if setup.quick else _RUNS, warm=1)
        clock = cpu_clock()
        setup.say(f"{case.name}: " + ", ".join(f"{r.name} {t.p20:.3f} ms" for r, t in zip(done, times, strict=True)))
        for other, spent in zip(done[1:], times[1:], strict=True):
            peer = Peer(other.name, spent.p20, package=other.package)
            yield setup.row(f"{case.name}/{ours.name}", times[0], clock, peer, dtype=case.dtype)


def knn(setup: Setup) -> Iterator[Row]:
    """16 neighbours of every point."""
    for name, x, _ in clouds(setup):
        if not setup.wants(case := f"knn/{name}/k{K}"):
            continue
        ours = Way("pumice", lambda x=x: partial(ops.knn, x, K), view=lambda found: found.squared_distance)
        peers = [_cluster("knn", x, x, K, view=partial(_squared, x), slack=10.0)]
        if x.is_cuda:
            peers.append(Way("cdist and topk", lambda x=x: partial(_all_pairs, x), slack=100.0))
        else:
            peers.append(Way("SciPy cKDTree", lambda x=x: _tree(x), "scipy", slack=10.0))
        yield from _timed(setup, Case(case, torch.float32, ops.knn(x, K).squared_distance), ours, peers)


def _cluster(name: str, *args: object, view: Callable[[Tensor], Tensor], slack: float = 1.0, **more: object) -> Way:
    """A function of torch_cluster."""

    def build() -> Callable[[], Tensor]:
        return partial(getattr(importlib.import_module("torch_cluster"), name), *args, **more)

    return Way("torch_cluster", build, "torch-cluster", view, slack)


def _squared(x: Tensor, edges: Tensor) -> Tensor:
    """[N, K], nearest first."""
    return (x[edges[0]] - x[edges[1]]).square().sum(1).reshape(len(x), -1).sort(dim=1).values


def _all_pairs(x: Tensor) -> Tensor:
    parts = [torch.cdist(x[n : n + _ROWS], x).topk(K, largest=False).values for n in range(0, len(x), _ROWS)]
    return torch.cat(parts).square()


def _tree(x: Tensor) -> Callable[[], Tensor]:
    from scipy.spatial import cKDTree  # pyright: ignore

    held = x.numpy()
    return lambda: torch.from_numpy(cKDTree(held).query(held, K)[0]).square()


def ball(setup: Setup) -> Iterator[Row]:
    """Up to 32 points within a radius of every point: those of lowest rows."""
    for name, x, radius in clouds(setup):
        if setup.wants(case := f"ball/{name}/k{BALL}"):
            run = partial(ops.ball_query, x, radius, BALL, order="index")
            ours = Way("pumice", lambda run=run: run, view=_counts)
            peer = _cluster("radius", x, x, radius, max_num_neighbors=BALL, view=partial(_degrees, x))
            yield from _timed(setup, Case(case, torch.float32, _counts(run())), ours, [peer])


def _counts(found: ops.Neighbors) -> Tensor:
    return (found.index >= 0).sum(1)


def _degrees(x: Tensor, edges: Tensor) -> Tensor:
    return torch.bincount(edges[0], minlength=len(x))


def fps(setup: Setup) -> Iterator[Row]:
    """A quarter of the points."""
    for name, x, _ in clouds(setup):
        if setup.wants(case := f"fps/{name}/quarter"):
            count, reach = -(-len(x) // 4), partial(_reach, x)
            run = partial(ops.farthest_point_sample, x, count)
            peers = [_cluster("fps", x, ratio=0.25, random_start=False, view=reach)]
            small = len(x) <= 10_000 or x.is_cuda  # Others take minutes on a CPU.
            case = Case(case, torch.float32, reach(run()))
            yield from _timed(setup, case, Way("pumice", lambda run=run: run, view=reach), peers if small else [])


def _reach(x: Tensor, index: Tensor) -> Tensor:
    """Distance of the point farthest from the samples, and their number."""
    far = ops.knn(x[index], 1, x).squared_distance.max().sqrt()
    return torch.stack([far, far.new_tensor(float(len(index)))])


def attention(setup: Setup) -> Iterator[Row]:
    """Patches of 1024 tokens, all full; torch's back ends have the same views of the same tensors."""
    patches = 2 if setup.quick else 100 if setup.device.type == "cuda" else 4
    size = 16 if setup.quick else PATCH
    for heads, channels in HEADS:
        given = [setup.filled(patches * size, heads, channels, dtype=setup.half, seed=n) for n in range(4)]
        for passed in ("fwd", "fwd+bwd"):
            if setup.wants(case := f"attention/T{patches * size}/H{heads}/D{channels}/{passed}"):
                yield from _attended(setup, case, given, size, passed == "fwd+bwd")


def _attended(setup: Setup, case: str, given: list[Tensor], size: int, trained: bool) -> Iterator[Row]:
    *leaves, cotangent = given
    leaves = [x.requires_grad_(trained) for x in leaves]
    ends = torch.arange(0, len(leaves[0]) + 1, size, dtype=torch.int32, device=setup.device)

    def passed(run: Callable[..., Tensor]) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        if not trained:
            return lambda: run(*leaves)
        return lambda: torch.autograd.grad(run(*leaves), leaves, cotangent)

    def batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (-1, size)).transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)

    ours = Way("pumice", lambda: passed(lambda q, k, v: ops.attention(q, k, v, ends)))
    names = _BACK_ENDS if setup.device.type == "cuda" else ("flash",)
    peers = [
        Way(f"SDPA {name}", lambda name=name: partial(_within, _BACK_ENDS[name], passed(batched))) for name in names
    ]
    with sdpa_kernel(SDPBackend.MATH):
        truth = passed(batched)()
    yield from measured(setup, Case(case, setup.half, truth), [ours], peers)


def _within(of: SDPBackend, run: Callable[[], object]) -> object:
    with sdpa_kernel(of):
        return run()
