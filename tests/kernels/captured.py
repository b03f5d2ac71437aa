"""Static programs by kernels in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from kernels.interpret import answering
from kernels.maps import DeviceOnly, fenced, kernels_inside, plain
from norms import both_passes
from torch import nn
from torch.nn import functional

import pumice as pm
from pumice.coords import Bounds, CoordBuffer, Geometry, Relation, build, chain, kernel_map
from pumice.coords import tiles as tiles_module
from pumice.coords.buffer import DUPLICATE, OVERFLOW, RANGE, new_status
from pumice.coords.capacity import BufferedState, CapacityPlanner, FixedCapacities
from pumice.coords.tiles import stable_argsort_torch
from pumice.engine.buffers import PointBuffers, PointScene, VoxelBuffers, VoxelGrid, VoxelScene
from pumice.engine.capture import captured_site
from pumice.lower import maps, norm
from pumice.lower import rows as by_rows
from pumice.lower import segments as segmented
from pumice.lower.rows import zero_padding_rows, zero_padding_rows_torch
from pumice.lower.segments import pieces, segments
from pumice.ops.pool import maximum
from pumice.runtime.cache import PERSISTENT
from pumice.schedule.dataflow import DATAFLOWS
from pumice.testing import assert_close, random_cloud

conv = sys.modules["pumice.ops.conv"]

Checks = Mapping[str, Callable[[], None]]
STEPS = (Relation.of(3, 2, stride=2), Relation.of(3, 3, stride=2, padding=1), Relation.of_transposed(3, 2, stride=2))
BOUNDS = Bounds((0, 0, 0), (9, 9, 9), 1)
FORMS = ("compacted", "unsorted", "split2", "table", "grouped", "compacted_t")


def scene(count: int, seed: int, extent: int = 6) -> pm.SparseTensor:
    coords = random_cloud(count, 3, extent=extent, seed=seed) if count else torch.zeros(0, 4, dtype=torch.int32)
    return pm.SparseTensor(torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)), coords, batch_size=1)


class Flows(nn.Module):
    """Down, across and back, by these dataflows of kernels."""

    def __init__(self, flow: str) -> None:
        super().__init__()
        self.stem = pm.nn.Conv3d(4, 8, 3, dataflow=flow)
        self.norm = pm.nn.BatchNorm(8)
        self.down = pm.nn.Conv3d(8, 8, 2, stride=2, dataflow=flow)
        self.up = pm.nn.InverseConv3d(8, 8, 2, stride=2, dataflow=flow)
        self.finer = pm.nn.ConvTranspose3d(8, 3, 2, stride=2, dataflow=flow)

    def forward(self, x: pm.SparseTensor) -> list[pm.SparseTensor]:
        x = self.norm(self.stem(x))
        y = self.down(x)
        return [self.up(y, x), self.finer(y)]


def flow_checks() -> Checks:
    flows = ("implicit-gemm-sorted", "implicit-gemm-unsorted", "implicit-gemm-split2", "fetch-on-demand")
    found = {f"captured in {flow}": partial(check_flow, flow) for flow in flows}
    return {**found, "no room for entries": check_entries, "pieces": check_pieces}


def check_flow(flow: str) -> None:
    """Scenes below, at and above the example's size; explicit products tell what they should be."""
    torch.manual_seed(0)
    net = Flows(flow).eval()
    plain = Flows("explicit-gemm").eval()
    plain.load_state_dict(net.state_dict())
    # Groups of thousands, mostly padding on so small a cloud, take the interpreter too long.
    with patch.object(maps, "group_of", lambda outputs: 16):
        fast = pm.capture(net, scene(60, 0), max_voxels=70, buckets=[70], margin=3.0)
        for count in (70, 0, 33):
            x = scene(count, count)
            with torch.no_grad():
                want = plain(x)
            for a, b in zip(fast(x), want, strict=True):
                assert_close(a, b)
    assert fast.replays == 3 and not fast.fallbacks


def check_pieces() -> None:
    """A pass cuts no runs where it reads them once one before it has, in rooms that were widened neither."""
    flow = replace(DATAFLOWS["implicit-gemm-sorted"], piece=4)
    net = pm.nn.Sequential(pm.nn.Linear(4, 16), pm.nn.Conv3d(16, 24, 3, dataflow=flow)).eval()
    near, far = scene(70, 0, extent=5), scene(60, 1, extent=20)
    cut, asked, real = [], [], segmented.split_runs

    def counted(*given: Any) -> Any:
        cut.append(given[1:])
        return real(*given)

    with patch.object(segmented, "split_runs", counted), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = pm.capture(net, far, max_voxels=70, buckets=[70], margin=1.0)
        asked.append(len(cut))
        for x in (far, near, near, far):
            with torch.no_grad():
                want = net(x)
            cut.clear()
            assert_close(fast(x).feats, want.feats)
            asked.append(len(cut))
    (bucket,) = fast._engine.buckets.values()
    assert any(bucket.capacities.lengths_by_key.values()), "no kernel shares segments"
    # The pass that plans and the eager one that it is compared with; the scene that has no room. No other.
    assert asked[0] == 2 and asked[2] and asked[1] == asked[3] == asked[4] == 0, asked
    assert fast.fallbacks == {"room": 1} and fast.replays == 3, (fast.fallbacks, fast.replays)


def check_entries() -> None:
    """An example whose tiles have a few taps leaves no room for one whose tiles have them all: it runs eagerly."""
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 8, 3, dataflow="implicit-gemm-sorted")).eval()
    far = torch.cartesian_prod(torch.arange(1), *[4 * torch.arange(4)] * 3).int()
    near = torch.cartesian_prod(torch.arange(1), *[torch.arange(4)] * 3).int()
    feats = torch.randn(64, 4)
    fast = pm.capture(net, pm.SparseTensor(feats, far), max_voxels=64, margin=1.0)
    with torch.no_grad():
        want = net(pm.SparseTensor(feats, near))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = fast(feats, near)
    assert_close(got.feats, want.feats)
    told = [str(each.message) for each in caught]
    assert fast.fallbacks == {"room": 1} and any("entries" in each for each in told), (fast.fallbacks, told)


class Trained(nn.Module):
    """Down, across and back, with norms that take statistics, a bias and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = pm.nn.Sequential(pm.nn.Conv3d(4, 8, 3, bias=False), pm.nn.BatchNorm(8), pm.nn.ReLU())
        self.down = pm.nn.Sequential(pm.nn.Conv3d(8, 8, 2, stride=2), pm.nn.BatchNorm(8))
        self.pool = pm.nn.MaxPool3d(2)
        self.up = pm.nn.InverseConv3d(8, 8, 2, stride=2, bias=False)
        self.head = pm.nn.Linear(16, 3)

    def forward(self, x: pm.SparseTensor) -> pm.SparseTensor:
        x = self.stem(x)
        return self.head(pm.cat([x, self.up(self.down(x) + self.pool(x), x)]))


def loss(y: pm.SparseTensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(y.feats, labels)


def check_cleared_rows() -> None:
    """Of no row, of all, from within a block of a program, whole blocks among them; what is behind the rows stays."""
    for count, rows, channels in ((0, 3, 5), (3, 3, 5), (9, 1500, 7), (700, 1500, 7), (1300, 1500, 7), (4096, 4097, 1)):
        room = torch.randn(rows * channels + 9)
        given, living = room.clone(), torch.tensor([count], dtype=torch.int32)
        zero_padding_rows(given[: rows * channels].view(rows, channels), living)
        zero_padding_rows_torch(room[: rows * channels].view(rows, channels), living)
        assert torch.equal(given, room) and not room[count * channels : rows * channels].any() and room[-9:].all()


def check_norms() -> None:
    """Kernels of norms against plain torch: of no row, of one, of whole blocks and parts of them."""
    cases = ((0, 40), (1, 40), (2, 40), (64, 64), (333, 500), (700, 4000), (9000, 9500))
    for number, ((count, rows), channels, momentum) in enumerate(
        zip(cases, (5, 70, 16, 3, 96, 17, 32), (0.1, 0.1, None, 0.1, None, 0.3, 0.1), strict=True)
    ):
        x, grad = 3 * torch.randn(rows, channels) + 20, torch.randn(rows, channels + 3)
        # Rows of a gradient may lie apart, as a part of a concatenation's do, and columns, too.
        grad = (grad[:, 3:], grad[:, :channels].contiguous(), grad.t().contiguous().t()[:, :channels])[number % 3]
        x[count:], grad[count:] = torch.nan, torch.nan
        cloud = CoordBuffer(
            torch.zeros(rows, 4, dtype=torch.int32),
            torch.tensor([count], dtype=torch.int32),
            BOUNDS,
            new_status(x.device),
        )
        found = []
        for kernels in (True, False):
            torch.manual_seed(0)
            running, tracked = (torch.randn(channels), torch.rand(channels) + 0.5), torch.tensor(3)
            weight, bias = torch.randn(channels), torch.randn(channels)
            added = torch.randn(rows, channels) if number % 4 > 1 else None
            offset = torch.randn(channels) if number > 3 else None
            told = norm.Statistics(running, 1e-5, True, momentum, tracked, offset)
            with patch.object(norm, "_by_kernels", lambda x, kernels=kernels: kernels):
                wanted = norm.Norm(weight if number % 3 else None, bias, told, added, number % 2 == 1)
                y, (dx, dweight, dbias, more) = both_passes(x, cloud, wanted, grad)
            assert dx is not None and int(tracked) == 3 + (count > 1)
            own = [g for g in (dweight, dbias) if g is not None]
            found.append((y[:count], dx[:count], *running, *own, *(() if more is None else (more[:count],))))
            assert (more is None) == (added is None) and len(own) == 1 + bool(number % 3)
        for got, want in zip(*found, strict=True):
            assert_close(got, want, scale=1.0 + float(want.abs().max()) if want.numel() else None)


def check_known_statistics() -> None:
    for channels, dtype, kind in product((3, 16, 130), (torch.float32, torch.float16), (torch.float32, torch.float16)):
        x = torch.randn(77, channels).to(dtype)
        mean, weight, bias = (torch.randn(channels).to(kind) for _ in range(3))
        variance = (torch.rand(channels) + 0.5).to(kind)
        for own in ((weight, bias), (None, None), (weight, None)):
            wide = [None if t is None else t.float() for t in (mean, variance, *own)]
            wanted = functional.batch_norm(x.float(), *wide, False, 0.0, 1e-5)
            assert_close(norm.by_statistics(x, (mean, variance, *own), 1e-5), wanted.to(dtype))
        assert norm.by_statistics(x[:0], (mean, variance, None, None), 1e-5).shape == (0, channels)


def check_few_rows() -> None:
    """Norms of fewer than two rows, whatever is known: by it, or by 0 and 1, and with a bias that is taken away again
    or, then, is not. Vectors that lie in a larger tensor are read, and written, where they are."""
    for count in (0, 1, 2, 70):
        for known in (True, False):
            for momentum in (0.1, None):
                for strided in (True, False):
                    ended = [few_rows(count, known, momentum, strided, kernels) for kernels in (True, False)]
                    for got, want in zip(*ended, strict=True):
                        assert_close(got, want, scale=1.0 + float(want.abs().max()) if want.numel() else None)


def few_rows(count: int, known: bool, momentum: float | None, strided: bool, kernels: bool) -> list[torch.Tensor]:
    """The result of the living rows, gradients, and what is kept; kernels: whether they are used."""
    generator = torch.Generator().manual_seed(count)
    x, residual, grad = torch.randn(3, count + 3, 5, generator=generator) + 1
    table = torch.rand(5, 5, 2, generator=generator) + 0.5
    mean, variance, offset, weight, bias = table[..., 0] if strided else table[..., 0].clone()
    tracked = torch.tensor(3)
    cloud = CoordBuffer(
        torch.zeros(count + 3, 4, dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
        BOUNDS,
        new_status(x.device),
    )
    told = norm.Statistics((mean, variance) if known else None, 1e-3, known, momentum, tracked, offset)
    with patch.object(norm, "_by_kernels", lambda x: kernels):
        y, (dx, dweight, dbias, more) = both_passes(x, cloud, norm.Norm(weight, bias, told, residual, True), grad)
    assert int(tracked) == 3 + (known and count > 1)
    assert dx is not None and dweight is not None and dbias is not None and more is not None
    # What lies between the entries of a vector is nobody's to write.
    return [*(t[:count] for t in (y, dx, more)), dweight, dbias, mean, variance, table[..., 1]]


def check_largest() -> None:
    """Maxima by kernels and their gradients are those of plain torch: ties, NaN, windows of -inf alone, given
    outputs that meet nothing."""
    for number, (relation, channels, dtype) in enumerate(
        (
            (Relation.of(3, 2, stride=2), 5, torch.float32),
            (Relation.of(3, 3, stride=2), 64, torch.float16),
            (Relation.of(3, 3), 100, torch.bfloat16),
            (Relation.of(3, 2, stride=2), 1, torch.float32),
        )
    ):
        x = scene(150, number)
        found, _ = kernel_map(x.geometry, relation)
        generator = torch.Generator().manual_seed(number)
        values = torch.randint(-3, 3, (150, channels), generator=generator).to(dtype)
        values[torch.arange(150) % 9 > 0, -1] = -torch.inf
        values[::17, 0] = torch.nan
        results = []
        for kernels in (True, False):
            given = values.clone().requires_grad_()
            with patch.object(by_rows, "has_triton", lambda x, kernels=kernels: kernels):
                y = by_rows.max_pool_rows(given, found)
                (grad,) = torch.autograd.grad(y, given, torch.arange(y.numel()).view_as(y).to(dtype))
                with torch.no_grad():
                    assert torch.equal(by_rows.max_pool_rows(given, found).nan_to_num(9), y.nan_to_num(9))
            results.append((y.detach(), grad))
        (y, grad), (wanted, exact) = results
        assert torch.equal(y.isnan(), wanted.isnan()) and torch.equal(y.nan_to_num(9), wanted.nan_to_num(9))
        assert_close(grad, exact)
        # What a CPU does, over lists of pairs; of several NaN it hands the first one's gradient on.
        given, pairs = values.nan_to_num(5).requires_grad_(), found.pairs()
        plain = maximum(given, pairs.inputs, pairs.outputs, found.num_outputs)
        (exact,) = torch.autograd.grad(plain, given, torch.arange(y.numel()).view_as(y).to(dtype))
        with patch.object(by_rows, "has_triton", lambda x: True):
            again = by_rows.max_pool_rows(given, found)
            assert torch.equal(again, plain)
            assert_close(torch.autograd.grad(again, given, torch.arange(y.numel()).view_as(y).to(dtype))[0], exact)


def check_items() -> None:
    """Sums and maxima over batch items by kernels, and gradients of gradients, are those of plain torch: items in any
    order, rows of none, items without rows, ties, NaN, zeros of both signs, several blocks and parts."""
    for number, (count, channels, batch, dtype) in enumerate(
        (
            (900, 5, 3, torch.float32),
            (3000, 64, 2, torch.float16),
            (700, 100, 7, torch.bfloat16),
            (40, 3, 50, torch.float32),
            (20_000, 1, 1, torch.float32),
            (0, 3, 2, torch.float32),
            (600, 5, 100, torch.float32),
        )
    ):
        generator = torch.Generator().manual_seed(number)
        items = torch.randint(-1, batch, (count,), generator=generator)
        items = items.sort().values if number % 2 else items
        values = torch.randint(-4, 5, (count, channels), generator=generator).to(dtype)
        odd = values.clone()
        for share, value in ((0.3, -0.0), (0.1, -torch.inf), (0.002, torch.inf), (0.01, torch.nan)):
            odd[torch.rand(odd.shape, generator=generator) < share] = value
        assert torch.equal(by_rows.max_items(odd, items, batch), by_rows.max_items_torch(odd, items, batch))
        ones = torch.ones(count, 1, dtype=torch.int64)
        few = torch.randint(-3, 4, (batch, channels), generator=generator).float()
        assert torch.equal(by_rows.sum_items(ones, items, batch)[:, 0], (items[:, None] == torch.arange(batch)).sum(0))
        # Coordinates whose check is pending may have items beyond the batch.
        beyond = torch.where(items < 0, batch + 3, items)
        assert torch.equal(by_rows.max_items(values, beyond, batch), by_rows.max_items(values, items, batch))
        assert torch.equal(by_rows.sum_items(values, beyond, batch), by_rows.sum_items(values, items, batch))
        assert torch.equal(by_rows.spread_items(few, beyond), by_rows.spread_items(few, items))
        found = []
        for sums, spread in (
            (by_rows.sum_items, by_rows.spread_items),
            (by_rows.sum_items_torch, by_rows.spread_items_torch),
        ):
            x, y = values.clone().requires_grad_(), few.clone().requires_grad_()
            total = sums(x, items, batch)
            (dx,) = torch.autograd.grad((total**2).sum(), x, create_graph=True)
            (ddx,) = torch.autograd.grad((dx.float() ** 2).sum(), x)
            rows = spread(y, items)
            (dy,) = torch.autograd.grad((rows * values.float()).square().sum(), y, create_graph=True)
            found.append((total, dx, ddx, rows, dy, *torch.autograd.grad(dy.sum(), y)))
        for got, want in zip(*found, strict=True):
            assert_close(got.detach(), want.detach())


@contextmanager
def by_kernels() -> Iterator[None]:
    """Convolutions by the kernels and the forms of maps that a GPU has."""
    with (
        patch.object(maps, "group_of", lambda outputs: 16),
        patch.object(maps, "_FORMS_OF", {"cpu": maps._FORMS_OF["cuda"]}),
        patch.object(conv, "_lowering", lambda found, operands: "triton" if found.buffered is not None else ""),
    ):
        yield


def check_step() -> None:
    """Gradients by the kernels that a GPU has, over buffers, are those of plain torch."""
    torch.manual_seed(0)
    net = Trained()
    plain = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in (net, plain)]

    def labels(x: pm.SparseTensor) -> torch.Tensor:
        return (x.feats[:, 0] > 0).long()

    x = scene(60, 0)
    with by_kernels():
        step = pm.capture_step(net, loss, optimizers[0], x, labels(x), max_voxels=70, buckets=[70], margin=3.0)
        scenes = [scene(count, count) for count in (70, 33, 0, 60)]
        values = [step(x, labels(x)) for x in scenes]
    assert step.replays == 4 and not step.fallbacks
    for x, value in zip(scenes, values, strict=True):
        optimizers[1].zero_grad()
        want = loss(plain(x), labels(x))
        want.backward()
        optimizers[1].step()
        assert_close(value, want.detach(), scale=1.0)
    for got, want in zip(net.state_dict().values(), plain.state_dict().values(), strict=True):
        assert_close(got, want, dtype=torch.float16, scale=1.0)


def check_wider_step() -> None:
    """A step that found no room runs eagerly, once: for the next one of its kind there is room."""
    torch.manual_seed(0)
    net = pm.nn.Sequential(pm.nn.BatchNorm(4), pm.nn.Conv3d(4, 8, 2, stride=2), pm.nn.BatchNorm(8))
    plain = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in (net, plain)]
    near, far = scene(100, 0, extent=5), scene(100, 1, extent=20)
    told = {"max_voxels": 110, "margin": 1.2}

    def mean(y: pm.SparseTensor) -> torch.Tensor:
        return pm.ops.row_mean(y, (y.feats + 1).square().sum(1))

    with by_kernels(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = pm.capture_step(net, mean, optimizers[0], near, **told)
        for number, x in enumerate((near, far, far)):
            value = step(x)
            optimizers[1].zero_grad()
            want = mean(plain(x))
            want.backward()
            optimizers[1].step()
            assert_close(value, want.detach(), scale=10.0)
            for got, wanted in zip(net.parameters(), plain.parameters(), strict=True):
                assert got.grad is not None and wanted.grad is not None
                assert_close(got.grad, wanted.grad, dtype=torch.float16, scale=1.0)
            assert step.fallbacks == ({"room": 1} if number else {})
    assert step.replays == 2 and any("re-planned" in str(w.message) for w in caught)
    for got, want in zip(net.state_dict().values(), plain.state_dict().values(), strict=True):
        assert_close(got, want, dtype=torch.float16, scale=1.0)


def map_checks() -> Checks:
    chains = {f"chains in buffers, D={dim}": partial(check_chain, dim) for dim in (1, 2, 3, 4)}
    more = {"chains without room": check_chain_without_room, "chains of wrong coordinates": check_chain_status}
    return {"maps in buffers": check_maps, "nothing waits": check_waits, "points": check_points} | chains | more


def levels(geometry: Geometry) -> list[Any]:
    """The maps of a few levels, and what kernels read of them."""
    found = []
    for step in STEPS:
        down, other = kernel_map(geometry, step)
        same, _ = kernel_map(other, Relation.of(3, 3))
        for each in (down, same):
            for form in FORMS:
                tokens, arrays = maps.form_operands(each, form)
                found.append((form, each, arrays))
                for token, array in zip(tokens, arrays, strict=True):
                    if token.endswith("tile"):
                        segments(array, 5), segments(array, 5, 512), pieces(array, 5, 8)
        geometry = other
    return found


def built(buffers: VoxelBuffers, rooms: Any, x: pm.SparseTensor) -> Geometry:
    return buffers.make_input(captured_site(x.geometry.site, 1), BufferedState(rooms)).x.geometry


def planned(x: pm.SparseTensor, capacity: int) -> tuple[VoxelBuffers, FixedCapacities]:
    buffers = VoxelBuffers.of(capacity, x)
    VoxelScene(x.feats, x.coords, x.geometry, x).fill(buffers)
    planner = CapacityPlanner(capacity, len(x), 2.0, None)
    with by_torch():
        levels(built(buffers, planner, x))
        chain_of(built(buffers, planner, x), 3)
    return buffers, planner.to_fixed()


def check_maps() -> None:
    """Rows that live meet what they meet eagerly, the others nothing; entries past the last belong to no tile."""
    x = scene(50, 1)
    buffers, rooms = planned(x, 80)
    for y in (x, scene(80, 2), scene(7, 3)):
        VoxelScene(y.feats, y.coords, y.geometry, y).fill(buffers)
        with fenced():
            geometry = built(buffers, rooms, x)
            found = levels(geometry)
        with plain():
            want = levels(Geometry(y.coords, y.geometry.site))
        assert int(geometry.cloud.status) == 0
        for (form, got, arrays), (_, eager, _) in zip(found, want, strict=True):
            here, there = got.rows(), eager.rows()
            outputs = len(there)
            assert torch.equal(here[:outputs], there) and bool((here[outputs:] == -1).all()), form
            assert int(got.valid_count()) == outputs and int(got.transpose().valid_count()) == eager.num_inputs
            assert all(array in PERSISTENT for array in arrays)
            if form == "compacted":
                block = maps.tile_rows_for(got.num_outputs)
                whole = eager.compacted(block)
                entries, tiles = len(whole.tiles), -(-got.num_outputs // block)
                made = got.compacted(block)
                assert bool((made.tiles[entries:] == tiles).all()) and bool((made.inputs[entries:] == -1).all())
                assert bool((made.rows >= 0).sum() == outputs) and len(made.rows) == tiles


def chain_steps(dim: int) -> tuple[list[Relation], list[list[Relation]]]:
    """Steps of both kinds and the windows of their levels, two of them on the first."""
    wide = Relation.of(dim, 3, stride=2, padding=1) if dim < 4 else Relation.of(dim, 2, stride=2)
    steps = [Relation.of(dim, 2, stride=2), wide, Relation.of(dim, 2, stride=2)]
    small, large = Relation.of(dim, (*(3,) * min(dim, 3), *(1,) * (dim - 3))), Relation.of(dim, (5, *(1,) * (dim - 1)))
    return steps, [[small, large], [small], [], [large]]


def chain_of(geometry: Geometry, dim: int) -> list[Any]:
    """The maps of such a network, found together."""
    steps, windows = chain_steps(dim)
    pm.SparseTensor(torch.zeros(len(geometry.coords), 1), geometry).prepare(steps, windows)
    found, here = [], geometry
    for number, each in enumerate(windows):
        found += [(kernel_map(here, window)[0], here) for window in each]
        if number < len(steps):
            kept, other = kernel_map(here, steps[number])
            found.append((kept, other))
            here = other
    return found


def cloud_of(dim: int, count: int, seed: int, along: int = 0) -> pm.SparseTensor:
    coords = random_cloud(count, dim, extent=(40, 8, 6, 4)[dim - 1], batch_size=min(2, count), seed=seed)
    coords = coords + torch.tensor([0, along, *(0,) * (dim - 1)], dtype=torch.int32)
    return pm.SparseTensor(torch.randn(count, 2), coords, batch_size=2, dim=dim)


def chain_in(buffers: VoxelBuffers, rooms: Any, x: pm.SparseTensor) -> tuple[Geometry, list[Any]]:
    """The maps of a scene in buffers, all of them by the kernels of chains."""
    VoxelScene(x.feats, x.coords, x.geometry, x).fill(buffers)
    geometry = buffers.make_input(captured_site(x.geometry.site, 2), BufferedState(rooms)).x.geometry
    with patch.object(build, "make_outputs", refused), patch.object(build, "_search", refused):
        return geometry, chain_of(geometry, x.spatial_dim)


def refused(*given: Any) -> Any:
    raise AssertionError("level by level")


def check_chain(dim: int) -> None:
    """Maps that are found together are those that are found one by one, wherever a scene lies."""
    x, planner = cloud_of(dim, 50, 1), CapacityPlanner(80, 50, 3.0, None)
    buffers = VoxelBuffers.of(80, x)
    # What does not fit in the first estimate of a coarser level is found again.
    with patch.multiple(chain, _FIRST_ESTIMATE=0.01, _LEAST=0):
        chain.estimate_of.cache_clear()
        chain_in(buffers, planner, x)
    chain.estimate_of.cache_clear()
    rooms = planner.to_fixed()
    reach = {1: 1 << 24, 2: 1 << 24, 3: 1 << 16, 4: 1 << 11}[dim]
    for number, (count, along) in enumerate(((50, 0), (80, reach - 110), (1, 7), (66, 66 - reach), (0, 0))):
        y = cloud_of(dim, count, number, along) if count else pm.SparseTensor(torch.zeros(0, 2), x.coords[:0], dim=dim)
        with fenced():
            geometry, found = chain_in(buffers, rooms, y)
        with plain():
            want = chain_of(Geometry(y.coords, y.geometry.site), dim)
        assert int(geometry.cloud.status) == 0 and geometry.searched
        for (got, outputs), (eager, level) in zip(found, want, strict=True):
            here, there = got.rows(), eager.rows()
            assert torch.equal(here[: len(there)], there) and bool((here[len(there) :] == -1).all())
            assert torch.equal(got.masks()[: len(there)], eager.masks()) and not got.masks()[len(there) :].any()
            assert int(got.valid_count()) == len(there) and int(got.transpose().valid_count()) == eager.num_inputs
            assert torch.equal(outputs.coords[: len(there)], level.coords)
            if outputs is not geometry:
                assert bool((outputs.coords[len(there) :] == -1).all())
            assert outputs.stride == level.stride and not outputs.cloud.count.data_ptr() % 16
            assert got.buffered is not None and outputs.cloud.status is geometry.cloud.status


def check_chain_without_room() -> None:
    """Nothing is read beyond the rows of a level, and what it needs is told."""
    near = pm.SparseTensor(torch.zeros(216, 2), torch.cartesian_prod(*[torch.arange(n) for n in (1, 6, 6, 6)]).int())
    far = pm.SparseTensor(near.feats, near.coords * torch.tensor([1, 8, 8, 8], dtype=torch.int32), batch_size=1)
    planner, buffers = CapacityPlanner(216, 216, 1.0, None), VoxelBuffers.of(216, near)
    chain_in(buffers, planner, near)
    with fenced():
        geometry, found = chain_in(buffers, planner.to_fixed(), far)
    assert int(geometry.cloud.status) == OVERFLOW
    coarse = found[2][1].cloud
    assert coarse.needed is not None and int(coarse.needed) == 216 and int(coarse.count) == coarse.capacity == 64
    for got, _ in found:
        assert int(got.rows().max()) < got.num_inputs


def check_chain_status() -> None:
    """Duplicates, items and coordinates outside are told; so they are where there are no maps."""
    x, planner = cloud_of(3, 50, 1), CapacityPlanner(80, 50, 3.0, None)
    buffers = VoxelBuffers.of(80, x)
    chain_in(buffers, planner, x)
    rooms = planner.to_fixed()
    for status, column, value in ((DUPLICATE, None, 9), (RANGE, 0, 2), (RANGE, 2, 1 << 16), (RANGE, 0, -1)):
        coords = x.coords.clone()
        if column is None:
            coords[7] = coords[value]
        else:
            coords[7, column] = value
        scene_of = VoxelScene(x.feats, coords, None, x)
        for maps_too in (True, False):
            scene_of.fill(buffers)
            geometry = buffers.make_input(captured_site(x.geometry.site, 2), BufferedState(rooms)).x.geometry
            if maps_too:
                chain_of(geometry, 3)
            geometry.search()
            assert int(geometry.cloud.status) & (DUPLICATE | RANGE) == status, (status, maps_too)


def check_waits() -> None:
    """From coordinates to what kernels read, in rooms that were settled, without a value that Python sees."""
    x = scene(50, 1)
    buffers, rooms = planned(x, 80)
    points, entered = pointed()
    watch = DeviceOnly()
    # The first turn fills what is kept on the host and the device from call to call.
    with kernels_inside(watch):
        for guard in (False, True):
            if guard:
                watch.__enter__()
            try:
                levels(built(buffers, rooms, x))
                points.make_input(*entered)
                chain_of(built(buffers, rooms, x), 3)
            finally:
                if guard:
                    watch.__exit__(None, None, None)


def pointed() -> tuple[PointBuffers, Any]:
    """Points in buffers, and how they enter; what they are when they have."""
    cloud = torch.rand(90, 3, generator=torch.Generator().manual_seed(0)) * 4
    frame = pm.voxelize(cloud, size=0.9).geometry.frame
    assert frame is not None
    like = PointScene(cloud, None, None, VoxelGrid(frame, None, 1))
    site = captured_site(like.tensor().geometry.site, 1)
    points = PointBuffers.of(120, like, site.bounds)
    like.fill(points)
    planner = CapacityPlanner(120, 90, 2.0, None)
    points.make_input(site, BufferedState(planner))
    return points, (site, BufferedState(planner.to_fixed()))


def check_points() -> None:
    points, entered = pointed()
    for count, seed in ((90, 0), (120, 1), (0, 2)):
        cloud = torch.rand(count, 3, generator=torch.Generator().manual_seed(seed)) * 4
        PointScene(cloud, None, None, points.grid).fill(points)
        with fenced():
            found = points.make_input(*entered)
        want = pm.voxelize(cloud, size=0.9)
        voxels = len(want)
        assert found.inverse is not None and int(found.x.geometry.cloud.status) == 0
        assert int(found.x.geometry.cloud.count) == voxels
        assert torch.equal(found.x.coords[:voxels], want.coords)
        assert torch.equal(found.inverse[:count], want.inverse) and bool((found.inverse[count:] == -1).all())
        assert_close(found.x.feats[:voxels], want.feats)


def by_torch() -> Any:
    """Sorting by kernels takes a second each time in the interpreter, and is checked elsewhere."""
    return patch.object(tiles_module, "stable_argsort", lambda keys, *_: stable_argsort_torch(keys))


GROUPS: Mapping[str, Callable[[], Checks]] = {
    "programs": lambda: {
        **map_checks(),
        **flow_checks(),
        "cleared rows": check_cleared_rows,
        "norms": check_norms,
        "norms of few rows": check_few_rows,
        "norms by known statistics": check_known_statistics,
        "maxima": check_largest,
        "sums over items": check_items,
        "a step of training": check_step,
        "a step without room": check_wider_step,
    }
}
"""The checks, by name, of each group."""

answer = answering(GROUPS)
