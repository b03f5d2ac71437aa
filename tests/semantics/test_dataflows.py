"""Every dataflow by name, on every kind of convolution: results and gradients by the oracle, repeats, refusals."""

import itertools
from dataclasses import replace
from functools import lru_cache

import cases
import oracle
import pytest
import torch
from cases import Case

import pumice as pm
from pumice.coords import Relation, kernel_map
from pumice.errors import DtypeError, OptionError
from pumice.lower import movement
from pumice.ops import DATAFLOWS, Dataflow, Dataflows, Epilogue, Grouping, conv, conv_features
from pumice.testing import random_tensor

CASES = [
    Case("submanifold k3", (3, 3, 3), channels=(4, 3)),
    Case("strided k2s2", (2, 2, 2), stride=(2, 2, 2), bias=False),
    Case("support k3s2", (3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 1), voxels=10),
    Case("transposed", (2, 2, 2), "transposed", stride=(2, 2, 2), voxels=10),
    Case("inverse", (3, 3, 3), "inverse", stride=(2, 2, 2), voxels=8),
    Case("groups", (3, 3), groups=2, channels=(4, 6)),
    Case("depthwise", (3, 3), groups=3, channels=(3, 3)),
    Case("1 channel", (3, 3, 3), channels=(1, 1)),
    Case("no voxel", (3, 3), voxels=0),
    Case("D=2, 1 tap", (1, 1)),
    Case("far apart", (3, 3, 3), low=-300, high=300, voxels=5),
]


@lru_cache
def wanted(case: Case):
    """Result and gradients of x and w by the oracle, and the gradient that they are of."""
    ops = cases.operands(case)
    outs = cases.outputs_of(case, ops.coords)
    pairs = cases.pairs_of(case, ops.coords, outs)
    x, w = cases.array(ops.feats), cases.flat(ops.weight)
    bias = None if ops.bias is None else cases.array(ops.bias)
    y = oracle.conv(pairs, len(outs), x, w, bias, case.groups)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dx, dw, _ = oracle.conv_grads(pairs, x, w, cases.array(dy), case.groups)
    return y, dy, dx, dw.reshape(ops.weight.shape)
