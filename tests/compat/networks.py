"""Networks as users of spconv write them, in the forms of published ones, small: of layers of `spconv` alone.

tests/compat/test_spconv.py also runs this file's text on spconv itself.
"""

import functools
from collections import OrderedDict

import torch
from torch import nn

import pumice.compat.spconv as spconv


def norm(channels):
    return nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01)


class Basic(spconv.SparseModule):
    """Residual block; a projection of kernel size 1 where the channels change."""

    def __init__(self, inside, outside, key):
        super().__init__()
        self.proj = None
        if inside != outside:
            self.proj = spconv.SparseSequential(spconv.SubMConv3d(inside, outside, 1, bias=False), norm(outside))
        self.conv1 = spconv.SubMConv3d(inside, outside, 3, padding=1, bias=False, indice_key=key)
        self.bn1 = norm(outside)
        self.relu = nn.ReLU()
        self.conv2 = spconv.SubMConv3d(outside, outside, 3, padding=1, bias=False, indice_key=key)
        self.bn2 = norm(outside)

    def forward(self, x):
        shortcut = x if self.proj is None else self.proj(x)
        out = self.conv1(x)
        out = out.replace_feature(self.relu(self.bn1(out.features)))
        out = self.conv2(out)
        out = out.replace_feature(self.bn2(out.features) + shortcut.features)
        return out.replace_feature(self.relu(out.features))


class SpUNet(nn.Module):
    """U-Net: stem of kernel 5, strided convolutions of kernel 2, their inverses by key, skips side by side, a head of
    kernel 1. Takes and returns a SparseConvTensor."""

    def __init__(self, inside=4, classes=13, channels=(16, 32, 48), blocks=1):
        super().__init__()
        first, *more = channels
        self.stem = spconv.SparseSequential(
            spconv.SubMConv3d(inside, first, kernel_size=5, padding=2, bias=False, indice_key="stem"),
            norm(first),
            nn.ReLU(),
        )
        self.down, self.enc, self.up, self.dec = (nn.ModuleList() for _ in range(4))
        last = first
        for level, width in enumerate(more):
            self.down.append(
                spconv.SparseSequential(
                    spconv.SparseConv3d(
                        last, width, kernel_size=2, stride=2, bias=False, indice_key=f"spconv{level + 1}"
                    ),
                    norm(width),
                    nn.ReLU(),
                )
            )
            named = [(f"block{i}", Basic(width, width, f"subm{level + 1}")) for i in range(blocks)]
            self.enc.append(spconv.SparseSequential(OrderedDict(named)))
            self.up.append(
                spconv.SparseSequential(
                    spconv.SparseInverseConv3d(width, last, kernel_size=2, bias=False, indice_key=f"spconv{level + 1}"),
                    norm(last),
                    nn.ReLU(),
                )
            )
            self.dec.append(spconv.SparseSequential(OrderedDict([("block0", Basic(2 * last, last, f"subm{level}"))])))
            last = width
        self.final = spconv.SubMConv3d(first, classes, kernel_size=1, padding=1, bias=True)

    def forward(self, x):
        x = self.stem(x)
        skips = [x]
        for down, enc in zip(self.down, self.enc, strict=True):
            x = enc(down(x))
            skips.append(x)
        x = skips.pop()
        for up, dec in zip(reversed(self.up), reversed(self.dec), strict=True):
            x = up(x)
            skip = skips.pop()
            x = dec(x.replace_feature(torch.cat((x.features, skip.features), dim=1)))
        return self.final(x)


def block(inside, outside, kernel, key, stride=1, padding=0, kind="subm", dim=3):
    """A convolution, norm and ReLU in a row, by kind."""
    names = {"subm": f"SubMConv{dim}d", "spconv": f"SparseConv{dim}d", "inverseconv": f"SparseInverseConv{dim}d"}
    own = {} if kind == "inverseconv" else {"stride": stride, "padding": padding}
    layer = getattr(spconv, names[kind])(inside, outside, kernel, bias=False, indice_key=key, **own)
    return spconv.SparseSequential(layer, norm(outside), nn.ReLU())


class VoxelBackBone8x(nn.Module):
    """Backbone of a detector: three halvings of all axes, one of height alone. Takes a SparseConvTensor of an odd
    height, returns the encoded one."""

    def __init__(self, inside=4, channels=(16, 16, 32, 32), out=48):
        super().__init__()
        first, *more = channels
        self.conv_input = block(inside, first, 3, "subm1", padding=1)
        self.conv1 = spconv.SparseSequential(*self._level(first, 1))
        self.conv2 = spconv.SparseSequential(self._step(first, more[0], 1, "spconv2"), *self._level(more[0], 2))
        self.conv3 = spconv.SparseSequential(self._step(more[0], more[1], 1, "spconv3"), *self._level(more[1], 3))
        self.conv4 = spconv.SparseSequential(
            self._step(more[1], more[2], (0, 1, 1), "spconv4"), *self._level(more[2], 4)
        )
        self.conv_out = spconv.SparseSequential(
            spconv.SparseConv3d(
                more[2], out, (3, 1, 1), stride=(2, 1, 1), padding=0, bias=False, indice_key="spconv_down2"
            ),
            norm(out),
            nn.ReLU(),
        )

    def _step(self, inside, outside, padding, key):
        return block(inside, outside, 3, key, stride=2, padding=padding, kind="spconv")

    def _level(self, width, level):
        return [block(width, width, 3, f"subm{level}", padding=1) for _ in range(1 if level == 1 else 2)]

    def forward(self, x):
        x = self.conv_input(x)
        x = self.conv1(x)
        x = self.conv2(x)
        x = self.conv3(x)
        return self.conv_out(self.conv4(x))


class VoxelResBackBone8x(VoxelBackBone8x):
    """VoxelBackBone8x of residual blocks."""

    def _level(self, width, level):
        return [Basic(width, width, f"res{level}") for _ in range(2)]


class Pillars(nn.Module):
    """2-D backbone over pillars: submanifold blocks, halvings, the dense map at the end."""

    def __init__(self, inside=8, channels=(16, 32)):
        super().__init__()
        small, wide = channels
        make = functools.partial(block, dim=2)
        self.conv1 = spconv.SparseSequential(make(inside, small, 3, "subm1", padding=1))
        self.conv2 = spconv.SparseSequential(
            make(small, wide, 3, "spconv2", stride=2, padding=1, kind="spconv"), make(wide, wide, 3, "subm2", padding=1)
        )
        self.pool = spconv.SparseMaxPool2d(3, stride=2, padding=1)
        self.conv3 = make(wide, wide, 3, "subm3", padding=1)
        self.dense = spconv.ToDense()

    def forward(self, x):
        return self.dense(self.conv3(self.pool(self.conv2(self.conv1(x)))))


class VoxelRes(nn.Module):
    """A detector's module: builds the tensor of voxel features and coordinates (batch, z, y, x), returns the map seen
    from above [B, C * D, H, W]."""

    def __init__(self, inside=4, shape=(41, 64, 64), out=48):
        super().__init__()
        self.backbone, self.shape = VoxelResBackBone8x(inside, out=out), [*shape]

    def forward(self, features, coordinates, batch_size):
        x = spconv.SparseConvTensor(
            features=features, indices=coordinates.int(), spatial_shape=self.shape, batch_size=batch_size
        )
        dense = self.backbone(x).dense()
        n, c, d, h, w = dense.shape
        return dense.view(n, c * d, h, w)


def scene(channels=4, shape=(41, 64, 64), items=2, voxels=600, seed=0):
    """(features [N, C], indices int32 [N, 1+D]) of distinct random voxels, in random order."""
    made = torch.Generator().manual_seed(seed)
    cells = torch.cat([torch.randint(0, n, (items * voxels, 1), generator=made) for n in (items, *shape)], 1)
    cells = cells.unique(dim=0)
    indices = cells[torch.randperm(len(cells), generator=made)].int()
    return torch.randn(len(indices), channels, generator=made), indices
