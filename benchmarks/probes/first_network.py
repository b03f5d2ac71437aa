"""How long a network's first call takes in a new process; run as a program, it prints one line of JSON.

    python -m benchmarks.probes.first_network DEVICE quick|full

Torch has started its device before, network and voxels lie on it; all else is in the first call: maps, the choice of
kernels, their sources, their compilation or their way from the disk, and one run.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from benchmarks.harness.study import Setup
from benchmarks.scenes.clouds import Voxels, layer_scenes, surface
from pumice.models import MinkUNet
from pumice.ops import SparseTensor

SCAN = "nuscenes_1f_10cm"


def calls(setup: Setup) -> tuple[float, float]:
    """Seconds of the first call of the network on a scan, and of a later one."""
    torch.manual_seed(1)
    net = MinkUNet(width=0.25 if setup.quick else 1.0).to(setup.device, setup.half).eval()
    coords = _scan(setup).coords
    feats = setup.filled(len(coords), 4, dtype=setup.half)
    warm = setup.filled(64, 64, dtype=setup.half)
    (warm @ warm).sum().item()
    spent = []
    for _ in range(4):
        begin = time.perf_counter()
        with torch.inference_mode():
            # A tensor of its own each time: its maps are found anew.
            net(SparseTensor(feats, coords)).feats.sum().item()
        spent.append(time.perf_counter() - begin)
    return spent[0], min(spent[1:])


def _scan(setup: Setup) -> Voxels:
    """The scan; where it is not at hand, a rough landscape of as many voxels."""
    known = {} if setup.quick else dict(layer_scenes(setup))
    return known[SCAN]() if SCAN in known else surface(300 if setup.quick else 18_000, setup.device)


def main(arguments: list[str]) -> None:
    """Print [first, later]."""
    device, size = arguments
    print(json.dumps(calls(Setup(torch.device(device), size == "quick", lambda text: None))))


if __name__ == "__main__":
    main(sys.argv[1:])
