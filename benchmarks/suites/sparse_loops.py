"""The studies `orders`, `activations` and `submanifold` of the suite `ucf`, in float32 on a CPU.

orders       C[i] = A[i+k] * B[k], both compressed, in its two orders: time, and positions that are visited, beside the
             complexities |i| (nnz A + nnz B) and nnz A nnz B of the paper (figure 6); a one-dimensional submanifold
             convolution with and without the search for the first coordinate of a window (5.2.2)
activations  3x3 layers with sparse images, n:U h:U w:U c:C, beside oneDNN's dense convolution, with and without the
             conversion from a dense image in channels last; images and filters sparse, beside the faster of the two
             statements with one of them dense
submanifold  3x3x3, 64 channels, over ready maps, with one and two threads: beside the time of the same operations at
             the rate of oneDNN's dense 3x3 convolution of 64 channels, and beside spconv, if it is installed;
             forward and backward over forward

One thread unless it is said. Source: "Unified Convolution Framework", 4 to 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import pumice as pm
from benchmarks.harness.results import geomean
from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Case, Ready, Setup, Way, error, ready
from benchmarks.harness.timing import cpu_clock, on_cpu, on_threads
from benchmarks.peers import spconv as spconv_peer
from benchmarks.scenes.clouds import named, published, scenes
from benchmarks.scenes.layers import FORWARD, TRAINING, Trained, Width, both, forward, layer_on, map_of
from benchmarks.suites.pruned import dense_ways
from benchmarks.suites.retrieval import over_spconv
from benchmarks.suites.structures import on_a_cpu
from pumice.language.bind import bind
from pumice.language.iteration import IterationChoices
from pumice.language.parse import parse
from pumice.lower import iterate
from pumice.ops.direct import stored_operand

LAYERS: Mapping[str, tuple[int, int]] = {"C4": (56, 64), "C10": (28, 128), "C17": (14, 256)}
"""Size of the image and channels of layers in the paper's table 3."""
DENSITIES = {0.5: 1.3, 0.3: 2.0, 0.1: 4.5}
"""Of the image, and the goals for times as fast as oneDNN, conversion included."""
SHARE, SPCONV, BACKWARD = 1.05, {1: 2.3, 2: 4.0}, 3.05
"""Goals of submanifold layers: share of oneDNN's rate; over spconv, by threads; forward and backward over forward."""
_RUNS, _LONG_RUNS = 15, 3
_CORRELATION = "C[i] = A[i+k] * B[k]"


def _random(shape: tuple[int, ...], density: float, seed: int = 0) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=chance) * (torch.rand(shape, generator=chance) < density)


def orders(setup: Setup) -> Iterator[Row]:
    """Two orders of a correlation at several densities, then window search."""
    with on_threads(1):
        for density in ((0.1,) if setup.quick else (0.002, 0.01, 0.05)) if on_a_cpu(setup, "orders") else ():
            if setup.wants(case := f"orders/{density}"):
                yield from _orders(setup, case, density)
        for extent in ((200,) if setup.quick else (5_000, 50_000)) if on_a_cpu(setup, "orders") else ():
            if setup.wants(case := f"orders/window-search/{extent}"):
                yield from _windows(setup, case, extent)


def _orders(setup: Setup, case: str, density: float) -> Iterator[Row]:
    a, b = _random((400 if setup.quick else 8192,), density), _random((100 if setup.quick else 4096,), density, 1)
    operands, truth = {"A": pm.sparse(a, "x:C"), "B": pm.sparse(b, "x:C")}, a.unfold(0, len(b), 1).double() @ b.double()
    calls = [
        partial(pm.compile_einsum(_CORRELATION, lowering=f"nest/order {order}"), **operands) for order in ("i k", "k i")
    ]
    if not (wrong := max(error(call(), truth) for call in calls)) < 1e-5:
        setup.failed(f"{case}: error {wrong:.1e}")
        return
    times = [found.p20 for found in on_cpu(calls, 3 if setup.quick else _RUNS)]
    (at,), (kept,) = a.nonzero(as_tuple=True), b.nonzero(as_tuple=True)
    inside = [torch.searchsorted(at, kept + len(truth)), torch.searchsorted(at, kept)]
    windows = torch.searchsorted(at, torch.arange(len(truth)) + len(b)) - torch.searchsorted(
        at, torch.arange(len(truth))
    )
    steps = [int(windows.sum()) + len(truth) * len(kept), int((inside[0] - inside[1]).sum())]
    bounds = [len(truth) * (len(at) + len(kept)), len(at) * len(kept)]
    for n, order in enumerate(("i-k", "k-i")):
        setup.say(f"{case}/{order}: {times[n]:.3f} ms, {steps[n]} positions, at most {bounds[n]}")
        yield setup.row(f"{case}/{order}", times[n], "cpu", Peer("the other order", times[1 - n]), dtype="fp32")
        yield setup.row(f"{case}/{order}", steps[n], "count", Peer("complexity", bounds[n]), "positions", "", "fp32")


def _windows(setup: Setup, case: str, extent: int) -> Iterator[Row]:
    """O[p] = Mask[p] * A[p+r-1] * F[r] at the entries of the mask."""
    a = _random((extent,), 0.1)
    given: dict[str, Any] = {"Mask": pm.sparse((a != 0).float(), "x:C"), "A": pm.sparse(a, "x:C"), "F": torch.randn(3)}
    bound = bind(
        parse(f"O[p] = Mask[p] * A[p+r-1] * F[r] ; p:{extent}", {}), {n: tuple(x.shape) for n, x in given.items()}
    )
    factors = stored_operand(given["Mask"]), stored_operand(given["A"]), given["F"]
    ways = (iterate.SparseProduct(bound, factors, 0, IterationChoices(searched=way)) for way in (True, False))
    searched, skipped = (_of_ready(way, factors) for way in ways)
    if searched is None or skipped is None:
        setup.say(f"{case} is left out: nests over levels do not run here")
        return
    if not (wrong := error(searched(), skipped())) < 1e-5:
        setup.failed(f"{case}: error {wrong:.1e}")
        return
    on, off = on_cpu([searched, skipped], 3 if setup.quick else _RUNS)
    setup.say(f"{case}: {on.p20:.3f} ms, without search {off.p20:.3f}: {off.p20 / on.p20:.2f} times as fast")
    yield setup.row(case, on, "cpu", Peer("without search", off.p20), dtype=torch.float32)


def _of_ready(product: iterate.SparseProduct, factors: Sequence[iterate.Factor]) -> Callable[[], Tensor] | None:
    ready = product.ready(factors)
    return None if isinstance(ready, str) else ready.run


# Sparse images


def activations(setup: Setup) -> Iterator[Row]:
    """Each layer at each density of the image, and with sparse filters besides."""
    with on_threads(1):
        layers = {"C4": (12, 16)} if setup.quick else LAYERS
        for density, goal in DENSITIES.items() if on_a_cpu(setup, "activations") else ():
            ratios = list[float]()
            for name, sizes in layers.items():
                for row in _images(setup, f"activations/{density}/{name}", sizes, density):
                    ratios += [row.ratio] if row.case.endswith("/converted") else []
                    yield row
            if ratios:
                setup.say(f"activations/{density}: {geomean(ratios):.2f} times as fast as oneDNN, goal {goal}")
                peer = Peer("goal", goal, "goal")
                yield setup.row(f"activations/{density}", geomean(ratios), "cpu", peer, "over oneDNN", "times", "fp32")
        for density in DENSITIES if on_a_cpu(setup, "activations") else ():
            for zeros in (0.8, 0.96):
                if setup.wants(case := f"activations/dual/{density}/{zeros}"):
                    yield from _dual(setup, case, density, zeros)


_IMAGE = "n:U h:U w:U c:C"


@torch.no_grad()
def _images(setup: Setup, case: str, sizes: tuple[int, int], density: float) -> Iterator[Row]:
    if not setup.wants(case):
        return
    size, channels = sizes
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False).eval().requires_grad_(False)
    image = _random((1, size, size, channels), density)
    x, weight = image.permute(0, 3, 1, 2).contiguous(), conv.weight.permute(2, 3, 1, 0).contiguous()
    statement = pm.compile_einsum(f"O[n,p,q,m] = I[n,p+r-1,q+s-1,c] * F[r,s,c,m] ; p:{size}, q:{size}")
    ready_image = pm.sparse(image, _IMAGE)
    ways: dict[str, Callable[[], Tensor]] = {
        "sparse": lambda: statement(I=ready_image, F=weight),
        "converted": lambda: statement(I=pm.sparse(image, _IMAGE), F=weight),
    }
    if not (wrong := max(error(call().permute(0, 3, 1, 2), conv(x)) for call in ways.values())) < 1e-5:
        setup.failed(f"{case}: error {wrong:.1e}")
        return
    found = on_cpu([*ways.values(), *dense_ways(conv, x)], 3 if setup.quick else _RUNS)
    dense = Peer("oneDNN", min(times.p20 for times in found[2:]))
    for way, times in zip(ways, found, strict=False):
        told = f"{times.p20:.3f} ms, oneDNN {dense.value:.3f}: {dense.value / times.p20:.2f} times as fast"
        setup.say(f"{case}/{way}: {told}")
        yield setup.row(f"{case}/{way}", times, "cpu", dense, dtype=torch.float32)


def _dual(setup: Setup, case: str, density: float, zeros: float) -> Iterator[Row]:
    """C10 with a sparse image and a sparse filter: what the cost model does, beside either of them in dense form."""
    size, channels = (12, 16) if setup.quick else LAYERS["C10"]
    image, weight = _random((1, channels, size, size), density), _random((channels, channels, 3, 3), 1 - zeros, 1)
    sparse = {"I": pm.sparse(image, f"[n,c,h,w] {_IMAGE}"), "F": pm.sparse(weight, "m:U (c r s):C")}
    statement = pm.compile_einsum(f"O[n,m,p,q] = I[n,c,p+r-1,q+s-1] * F[m,c,r,s] ; p:{size}, q:{size}")
    calls = [partial(statement, **given) for given in (sparse, sparse | {"F": weight}, sparse | {"I": image})]
    truth = functional.conv2d(image.double(), weight.double(), padding=1)
    if not (wrong := max(error(call(), truth) for call in calls)) < 1e-5:
        setup.failed(f"{case}: error {wrong:.1e}")
        return
    dual, *single = (times.p20 for times in on_cpu(calls, 3 if setup.quick else _RUNS))
    setup.say(f"{case}: {dual:.3f} ms, a sparse image alone {single[0]:.3f}, a sparse filter alone {single[1]:.3f}")
    yield setup.row(case, dual, "cpu", Peer("the faster with one sparse operand", min(single)), dtype=torch.float32)


# Submanifold layers


def submanifold(setup: Setup) -> Iterator[Row]:
    """UCF's rooms and LiDAR scans, and a scan of Waymo."""
    if not on_a_cpu(setup, "submanifold"):
        return
    found = dict[int, dict[str, list[float]]]()
    places = scenes(setup) if setup.quick else chain(published(setup), named(setup, ("waymo_1f_5cm",)))
    for name, load in places:
        if setup.wants(case := f"submanifold/{name}"):
            voxels = load()
            layer = layer_on(setup, map_of(voxels.coords), voxels.coords, Width.square(8 if setup.quick else 64), _FP32)
            ways = _ways(setup, case, layer)
            for threads in SPCONV if "forward" in ways else ():
                with on_threads(threads):
                    yield from _submanifold(setup, case, layer, ways, found.setdefault(threads, {}))
    for threads, ratios in found.items():
        with on_threads(threads):
            yield from over_spconv(setup, "submanifold", ratios.get("spconv", []), SPCONV[threads])
            for metric, goal in (("share of oneDNN's rate", SHARE), ("forward and backward over forward", BACKWARD)):
                if values := ratios.get(metric):
                    setup.say(f"submanifold: {metric} {geomean(values):.2f}, {threads} threads, goal {goal}")
                    peer = Peer("goal", goal, "goal")
                    yield setup.row("submanifold", geomean(values), cpu_clock(), peer, metric, "times", _FP32)


_FP32 = torch.float32


def _ways(setup: Setup, case: str, layer: Trained) -> dict[str, Ready]:
    """Ways whose results are right: ours forward and in training, and spconv's forward."""
    truths = {"forward": FORWARD.exact(layer), "training": TRAINING.exact(layer)}
    ours = {"forward": lambda: partial(forward, layer), "training": lambda: partial(both, layer)}
    made = {name: ready(setup, Case(case, _FP32, truths[name]), Way(name, make), True) for name, make in ours.items()}
    made["spconv"] = ready(setup, Case(case, _FP32, truths["forward"]), spconv_peer.way(layer), False)
    return {name: way for name, way in made.items() if way}


def _submanifold(
    setup: Setup, case: str, layer: Trained, ways: Mapping[str, Ready], ratios: dict[str, list[float]]
) -> Iterator[Row]:
    channels, size = layer.feats.shape[1], 32 if setup.quick else 128
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False).eval().requires_grad_(False)
    image = setup.random(1, channels, size, size)
    times = on_cpu([*(way.call for way in ways.values()), *dense_ways(conv, image)], _LONG_RUNS, 1)
    spent = dict(zip(ways, times, strict=False))
    per_pair = min(t.p20 for t in times[len(ways) :]) / (9 * size**2)
    dense, clock = len(layer.found.pairs().inputs) * per_pair, cpu_clock()
    ours = spent["forward"]
    peers = [Peer("oneDNN's dense rate", dense)]
    if "spconv" in spent:
        peers.append(Peer("spconv", spent["spconv"].p20, package=spconv_peer.package()))
        ratios.setdefault("spconv", []).append(spent["spconv"].p20 / ours.p20)
    ratios.setdefault("share of oneDNN's rate", []).append(dense / ours.p20)
    for peer in peers:
        setup.say(f"{case}, {clock}: {ours.p20:.2f} ms, {peer.name} {peer.value:.2f}: {peer.value / ours.p20:.2f}")
        yield setup.row(f"{case}/fwd", ours, clock, peer, dtype=_FP32)
    if both_ways := spent.get("training"):
        over = both_ways.p20 / ours.p20
        ratios.setdefault("forward and backward over forward", []).append(over)
        setup.say(f"{case}, {clock}: forward and backward {both_ways.p20:.2f} ms, {over:.2f} times forward")
        yield setup.row(f"{case}/fwd+bwd", both_ways, clock, Peer("forward", ours.p20), dtype=_FP32)
