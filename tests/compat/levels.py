"""A level down and up, with a skip, in layers of other libraries."""

from torch import nn

import pumice.compat.minkowski as ME
import pumice.compat.torchsparse as torchsparse


class OfTorchsparse(nn.Module):
    def __init__(self):
        super().__init__()
        own = torchsparse.nn
        self.stem = nn.Sequential(own.Conv3d(4, 16, 3), own.BatchNorm(16), own.ReLU(True))
        self.down = nn.Sequential(own.Conv3d(16, 32, 2, stride=2), own.BatchNorm(32), own.ReLU(True))
        self.up = nn.Sequential(own.Conv3d(32, 16, 2, stride=2, transposed=True), own.BatchNorm(16), own.ReLU(True))
        self.last = own.Conv3d(32, 8, 1, bias=True)

    def forward(self, x):
        y = self.stem(x)
        return self.last(torchsparse.cat([self.up(self.down(y)), y]))


class OfMinkowski(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = ME.MinkowskiConvolution(4, 16, kernel_size=3, dimension=3)
        self.norm = ME.MinkowskiBatchNorm(16)
        self.down = ME.MinkowskiConvolution(16, 32, kernel_size=2, stride=2, dimension=3)
        self.up = ME.MinkowskiConvolutionTranspose(32, 16, kernel_size=2, stride=2, dimension=3)
        self.act = ME.MinkowskiReLU(inplace=True)
        self.last = ME.MinkowskiConvolution(32, 8, kernel_size=1, bias=True, dimension=3)

    def forward(self, x):
        y = self.act(self.norm(self.conv(x)))
        return self.last(ME.cat(self.act(self.up(self.act(self.down(y)))), y))
