"""The receptive field of a network against what changes when one voxel of a full grid changes or goes."""

import pytest
import torch
from nets import Dense, Levels, OneLevel
from torch import nn
from wide import beyond

import pumice as pm
from pumice.errors import DtypeError, OptionError
from pumice.testing import random_tensor

N = 48


class Unet(nn.Module):
    def __init__(self, kernel=2, stride=2):
        super().__init__()
        self.stem = pm.nn.Conv1d(1, 1, 3)
        self.down = pm.nn.Conv1d(1, 1, kernel, stride)
        self.deep, self.up = pm.nn.Conv1d(1, 1, 3), pm.nn.InverseConv1d(1, 1, kernel, stride)

    def forward(self, x):
        x = self.stem(x)
        return pm.cat([self.up(self.deep(self.down(x)), x), x])


class Functions(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, 3, 1))

    def forward(self, x):
        y = pm.ops.conv(x, self.weight, stride=2, padding=1)
        y = pm.ops.sum_pool(y, 3, stride=1)
        return pm.ops.conv_transpose(y, self.weight, stride=2, padding=1) + x


NETS = {
    "unet": Unet,
    "functions": Functions,
    "window": lambda: pm.nn.Conv1d(1, 1, 3, dilation=2),
    "even": lambda: pm.nn.Conv1d(1, 1, 4),
    "offsets": lambda: pm.nn.Conv1d(1, 1, None, offsets=[[3], [5]]),
    "floor": lambda: pm.nn.Conv1d(1, 1, 2, stride=2),
    "wide floor": lambda: pm.nn.Conv1d(1, 1, 5, stride=2),
    "narrow floor": lambda: pm.nn.Conv1d(1, 1, 1, stride=3),
    "support": lambda: pm.nn.Conv1d(1, 1, 3, stride=2, padding=1),
    "dilating": lambda: pm.nn.Conv1d(1, 1, 3, out="support"),
    "chain": lambda: pm.nn.Sequential(
        pm.nn.Conv1d(1, 1, 3, stride=2, padding=1), pm.nn.Conv1d(1, 1, 3), pm.nn.Conv1d(1, 1, 2, stride=2)
    ),
    "generative": lambda: pm.nn.GenerativeConvTranspose1d(1, 1, 3, stride=2),
    "there and back": lambda: pm.nn.Sequential(
        pm.nn.Conv1d(1, 1, 3, stride=3, padding=1), pm.nn.ConvTranspose1d(1, 1, 3, stride=3)
    ),
    "inverse": lambda: pm.nn.Sequential(pm.nn.Conv1d(1, 1, 3, stride=2, padding=1), pm.nn.InverseConv1d(1, 1, 3, 2, 1)),
    "pool": lambda: pm.nn.Sequential(pm.nn.SumPool1d(3, stride=2), pm.nn.UpsampleNearest(2)),
    "channels": lambda: pm.nn.Sequential(pm.nn.SpaceToChannel(2), pm.nn.Linear(2, 2), pm.nn.ChannelToSpace(2)),
    "unet of thirds": lambda: Unet(3, 3),
}
EXACT = set(NETS) - {"unet of thirds"}


def line(rows):
    """Voxels -N/2 .. N/2 without those that are missing, all of one channel 1."""
    coords = torch.stack([torch.zeros_like(rows), rows], 1).int()
    return pm.SparseTensor(torch.ones(len(rows), 1, dtype=torch.float64), coords, dim=1, batch_size=1)


def seen(net, change):
    """By output: the inputs whose change changes its value, or which outputs there are."""
    rows = torch.arange(-N // 2, N // 2)
    whole = net(line(rows))
    before = dict(zip(whole.coords[:, 1].tolist(), whole.feats.tolist(), strict=True))
    found = {}
    for at in range(-6, 6):
        y = net(change(rows, at))
        after = dict(zip(y.coords[:, 1].tolist(), y.feats.tolist(), strict=True))
        for o in {*before, *after}:
            if before.get(o) != after.get(o):
                found.setdefault(o, []).append(at)
    return found


def louder(rows, at):
    x = line(rows)
    return x.replace(torch.where(x.coords[:, 1:] == at, 2.0, x.feats))


def gone(rows, at):
    return line(rows[rows != at])


@pytest.mark.parametrize("name", beyond(9, NETS))
def test_field_is_what_changes(name):
    net = NETS[name]().double().eval()
    for p in net.parameters():
        nn.init.ones_(p)
    told = pm.receptive_field(net, line(torch.arange(3)))
    ((before, after),) = told.reach
    with torch.no_grad():
        every = [
            (float(o * told.scale[0] - at), o)
            for change in (louder, gone)
            for o, ats in seen(net, change).items()
            for at in ats
        ]
    most, least = max(every)[0], min(every)[0]
    assert most <= before and -least <= after, (told, most, least)
    if name in EXACT:
        assert (before - most, after + least) < (1, 1)


def test_field_of_networks():
    x = random_tensor(9, 4)
    told = pm.receptive_field(pm.models.MinkUNet(4).eval(), x)
    assert told.reach == ((197, 197),) * 3 and told.stride == (16,) * 3 and told.scale == (1,) * 3
    assert told.existence == ((0, 0),) * 3 and "-197 to +197" in str(told)
    detector = pm.receptive_field(pm.models.CenterPointBackbone(4).eval(), x)
    assert detector.scale == detector.stride == (16, 8, 8)
    assert pm.receptive_field(pm.compile(OneLevel().eval()), x) == pm.receptive_field(OneLevel().eval(), x)


class Whole(nn.Module):
    def forward(self, x):
        return x.replace(x.feats - x.feats.mean(0))


class Untraced(nn.Module):
    def forward(self, x):
        return x if x.feats.sum() > 0 else -x


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (lambda: OneLevel().train(), "stem.1.*in training"),
        (lambda: nn.Sequential(pm.nn.Conv3d(4, 4, 3), pm.nn.GroupNorm(2, 4)), "at 1: GroupNorm sees whole items"),
        (lambda: nn.Sequential(pm.nn.BatchNorm(4, track_running_stats=False)).eval(), "at 0.*no running statistics"),
        (lambda: nn.Sequential(pm.nn.Conv3d(4, 4, 3), Untraced()), "1.*untraced"),
        (Whole, "Whole is not known at mean"),
        (lambda: Dense().eval(), "at to_dense"),
        (lambda: Levels().eval(), "not one SparseTensor"),
    ],
)
def test_unknown_fields(net, said):
    with pytest.raises(OptionError, match=said):
        pm.receptive_field(net(), random_tensor(9, 4))


def test_takes_sparse_tensors():
    with pytest.raises(DtypeError, match="Tensor"):
        pm.receptive_field(OneLevel(), torch.zeros(3, 4))  # pyright: ignore[reportArgumentType]
