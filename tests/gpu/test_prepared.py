"""Kernels of whole containers started one after the other, against layers one by one, bit for bit."""

import pytest
import torch

import pumice as pm
from pumice import nn
from pumice.nn.prepared import Prepared
from pumice.ops import line

pytestmark = pytest.mark.gpu


@pytest.fixture
def lines(monkeypatch):
    """How many kernels each line had that was started."""
    seen, started = [], line.started

    def told(found, x):
        y = started(found, x)
        seen.append(0 if y is None else len(found))
        return y

    monkeypatch.setattr(line, "started", told)
    return seen


NETS = {
    "MinkUNet": lambda: pm.models.MinkUNet(4, 5, 0.5),
    "CenterPoint": lambda: pm.models.CenterPointBackbone(4),
    "blocks": lambda: nn.Sequential(
        nn.Sequential(nn.Conv3d(4, 32, 3, bias=False), nn.BatchNorm(32), nn.ReLU()),
        nn.Sequential(nn.ResidualBlock(32, 48), nn.ResidualBlock(48, 48)),
        nn.Conv3d(48, 32, 2, stride=2, bias=False),
        nn.BatchNorm(32),
        nn.SiLU(),
    ),
}


def net_of(name, device, dtype=torch.float16):
    torch.manual_seed(5)
    net = NETS[name]()
    for part in net.modules():
        if isinstance(part, nn.BatchNorm):
            for values in (part.running_mean, part.running_var, part.weight, part.bias):
                values.data.uniform_(0.5, 1.5)
    return net.to(device, dtype).eval()


def scan(count, seed, device, dtype=torch.float16):
    """About so many voxels on a wavy sheet."""
    g = torch.Generator().manual_seed(seed)
    side = int(count**0.5) + 1
    xy = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).reshape(-1, 2)
    z = (8 * torch.sin(xy[:, :1] / 9) + torch.randint(0, 2, (len(xy), 1), generator=g)).int()
    coords = torch.cat([torch.zeros_like(z), xy.int(), z], 1)[torch.randperm(len(xy), generator=g)[:count]].int()
    feats = torch.randn(count, 4, generator=g).to(dtype)
    return pm.SparseTensor(feats.to(device), coords.to(device))


def results(net, x):
    with torch.no_grad():
        y = net(pm.SparseTensor(x.feats, x.coords))
    return [one.feats for one in ((y,) if isinstance(y, pm.SparseTensor) else y)]


def one_by_one(net, x):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prepared, "ahead", lambda self, x, target, spare: (x, 0, 0))
        return results(net, x)


def equal(got, want):
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NETS)
def test_lines_are_the_layers_one_by_one(gpu, name, dtype, lines):
    """Over scenes of other sizes, too, whose maps are new each time."""
    net, taken = net_of(name, gpu, dtype), []
    for count in (5000, 4999, 5000, 4990, 900, 901, 5000):
        x = scan(count, count, gpu, dtype)
        want = one_by_one(net, x)
        lines.clear()
        assert equal(results(net, x), want), count
        taken.append(sum(lines))
    # The map of a stride is not there yet when the line before it begins.
    assert taken[-1] == max(taken) >= {"MinkUNet": 49, "blocks": 6}.get(name, 1), taken


@pytest.mark.parametrize("name", ["MinkUNet", "blocks"])
def test_weights_that_changed(gpu, name, lines):
    net, x = net_of(name, gpu), scan(3000, 1, gpu)
    for _ in range(3):
        before = results(net, x)
    layer = next(m for m in net.modules() if isinstance(m, nn.Conv3d) and m.in_channels == m.out_channels)
    norm = next(m for m in net.modules() if isinstance(m, nn.BatchNorm))

    def moved():
        norm.bias.data.add_(1)
        net.float().half()

    changes = (
        lambda: layer.weight.data.mul_(2),
        lambda: setattr(layer.weight, "data", layer.weight.data.clone() * 0.5),
        # At the same address.
        lambda: setattr(layer.weight, "data", layer.weight.data.transpose(0, -1)),
        lambda: norm.running_var.mul_(3),
        lambda: setattr(norm, "eps", 0.7),
        moved,
    )
    for change in changes:
        change()
        for _ in range(2):
            lines.clear()
            got = results(net, x)
            assert equal(got, one_by_one(net, x))
        assert sum(lines) > 0 and not equal(got, before)
        before = got


def test_lines_on_several_streams(gpu, lines):
    """What lies between kernels is the stream's own."""
    net, scans = net_of("MinkUNet", gpu), [scan(count, count, gpu) for count in (20000, 19999, 20001)]
    wanted = [one_by_one(net, x) for x in scans]
    for x in scans:
        results(net, x)
    streams, found = [torch.cuda.Stream(gpu) for _ in scans], []
    torch.cuda.synchronize(gpu)
    lines.clear()
    for _ in range(4):
        for x, stream in zip(scans, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                found.append(results(net, x))
    torch.cuda.synchronize(gpu)
    assert min(lines) > 0 and all(equal(y, wanted[n % 3]) for n, y in enumerate(found))


def test_lines_in_a_graph_of_ones_own(gpu, lines):
    """Known maps, weights that are written to between replays."""
    net, x = net_of("blocks", gpu), scan(4000, 3, gpu)
    stream = torch.cuda.Stream(gpu)
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            net(x)
    torch.cuda.synchronize(gpu)
    graph = torch.cuda.CUDAGraph()
    lines.clear()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        y = net(x).feats
    assert sum(lines) == 7
    for factor in (1.0, 0.5):
        for parameter in net.parameters():
            parameter.data.mul_(factor)
        torch.cuda.synchronize(gpu)
        graph.replay()
        with torch.no_grad():
            want = net(x).feats
        torch.cuda.synchronize(gpu)
        assert torch.equal(y, want)


def test_lines_take_no_more_memory(gpu):
    net, x = net_of("MinkUNet", gpu), scan(100_000, 7, gpu)
    peaks = []
    for call in (one_by_one, results):
        for _ in range(3):
            call(net, x)
        torch.cuda.synchronize(gpu)
        torch.cuda.reset_peak_memory_stats(gpu)
        before = torch.cuda.memory_allocated(gpu)
        call(net, x)
        peaks.append(torch.cuda.max_memory_allocated(gpu) - before)
        assert torch.cuda.memory_allocated(gpu) <= before + (1 << 20)
    assert peaks[1] <= 1.1 * peaks[0], peaks


def test_a_hook_is_heard(gpu, lines):
    net, x = net_of("MinkUNet", gpu), scan(3000, 1, gpu)
    for _ in range(3):
        want = results(net, x)
    seen, block = [], net.encoders[1].blocks[0]
    handle = block.body[2].register_forward_hook(lambda m, given, y: seen.append(y.feats.shape[1]))
    lines.clear()
    # Layers that are called apart round in between.
    torch.testing.assert_close(results(net, x), want, rtol=2e-2, atol=2e-2 * float(want[0].abs().max()))
    assert seen == [block.body[0].out_channels] and 0 < sum(lines) < 49
    handle.remove()
    assert equal(results(net, x), want)


def test_features_on_another_device_than_the_current(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1)
    net, x = net_of("blocks", other), scan(3000, 1, other)
    want = one_by_one(net, x)
    for _ in range(3):
        assert equal(results(net, x), want)


def test_the_line_of_a_scene_without_voxels(gpu):
    net = net_of("blocks", gpu)
    for count in (500, 0, 500, 1, 0):
        x = scan(count, 2, gpu)
        assert equal(results(net, x), one_by_one(net, x))
