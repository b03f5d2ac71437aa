"""What other processes do that tune at the same time."""

import warnings
from pathlib import Path

import torch

import pumice as pm
from pumice.engine import tuned_network
from pumice.schedule.tuned_plans import Plans


def tune(path: Path, mode: str, start) -> None:
    """Tune a network once all are there; ends with an error where it was not kept."""
    torch.set_num_threads(1)
    warnings.simplefilter("error", RuntimeWarning)
    net, scenes = _network_and_scenes(path)
    start.wait()
    for _ in range(3):
        pm.tune(net, scenes, mode, budget=1, candidates=["explicit-gemm"], fresh=True, progress=False)


def tune_groupings(path: Path, told) -> None:
    """Tune the groupings of a network, and tell whether they were found, and which."""
    torch.set_num_threads(1)
    net, scenes = _network_and_scenes(path)
    found = pm.tune(net, scenes, "grouping", budget=30, progress=False)
    told.put((found.reused, [str(flow) for flow in found.flows.values()]))


def _network_and_scenes(path: Path):
    """A network and a scene, whose plans are kept in this file."""
    own = Plans(path)
    tuned_network.plans = lambda: own
    coords = torch.nn.functional.pad(torch.cartesian_prod(*[torch.arange(4)] * 3), (1, 0)).int()
    net = torch.nn.Sequential(pm.nn.Conv3d(4, 4, 3), pm.nn.Conv3d(4, 4, 2, stride=2))
    return net, [(coords, torch.ones(64, 4))]
