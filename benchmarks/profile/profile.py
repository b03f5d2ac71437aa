"""`python -m benchmarks profile`: host time and GPU time of an eager pass of a network."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.rows import device_name
from benchmarks.harness.timing import busy, synchronize
from benchmarks.profile.parts import Shares, shares
from benchmarks.profile.trace import Traced, traced
from benchmarks.scenes.clouds import batched, shell
from pumice.data import Scan, read_scan, street_scene
from pumice.env import settings
from pumice.errors import FileError, OptionError, PumiceError
from pumice.models import CenterPointBackbone, MinkUNet
from pumice.nn.conv import convolutions
from pumice.ops import SparseTensor, voxelize

NETWORKS: Mapping[str, Callable[[float], nn.Module]] = {
    "minkunet": lambda width: MinkUNet(4, 19, width),
    "centerpoint": lambda width: CenterPointBackbone(5, "voxelres8x"),
}
"""Networks by name; MinkUNet also with a width, as in minkunet-0.5."""
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STREET = "street"
_WARM = 4
"""Warm-up passes, which compile kernels and fill caches."""


@dataclass(frozen=True)
class ProfileOptions:
    """What to profile. model, scan: as on the command line. voxel: voxel size in metres, for scans of points.

    precision: a name of DTYPES; "": fp16 on a GPU, fp32 elsewhere. Raises OptionError for invalid values.
    """

    model: str
    scan: str
    device: torch.device
    precision: str = ""
    voxel: float = 0.1
    passes: int = 20

    def __post_init__(self) -> None:
        if self.precision and self.precision not in DTYPES:
            raise OptionError(f"precision={self.precision!r} is unknown; there are {', '.join(DTYPES)}")
        if self.passes < 1 or not self.voxel > 0:
            raise OptionError(f"passes and voxel are above 0, found {self.passes} and {self.voxel}")

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision or ("fp16" if self.device.type == "cuda" else "fp32")]


@dataclass(frozen=True, eq=False)
class Profiled:
    """Measurements of a network's passes. busy: seconds of device work per pass, or None without a GPU or if the
    profiler fails, with the reason in `why`."""

    asked: ProfileOptions
    layers: int
    voxels: int
    traced: Traced
    shares: Shares
    busy: float | None
    why: str = ""
    device: str = ""

    @property
    def title(self) -> str:
        return f"{self.asked.model} on {Path(self.asked.scan).name}"

    @property
    def where(self) -> str:
        kind = next(name for name, dtype in DTYPES.items() if dtype == self.asked.dtype)
        return f"{self.voxels:,} voxels, {self.layers} convolutions, {kind}, {self.device}"

    @property
    def hidden(self) -> float:
        """Microseconds per pass missing from the trace: waits for the device, which are shorter for a slower host."""
        return max(0.0, 1e6 * self.traced.wall - self.shares.total)


def profile(asked: ProfileOptions) -> Profiled:
    """Profile a network run eagerly without gradients; each pass makes a new tensor and so builds its maps.

    Raises OptionError for an unknown model or scan or one that does not fit, FileError for a scan that cannot be read.
    """
    net = network(asked.model).to(asked.device, asked.dtype).eval()
    feats, coords = scene(asked, _channels(net))
    call = partial(_pass, net, feats, coords)
    for _ in range(_WARM):
        call()
    on_gpu = asked.device.type == "cuda"
    found = traced(call, net, asked.passes, partial(synchronize, asked.device))
    spent, why = _busy(call) if on_gpu else (None, "on a CPU the arithmetic is the host's")
    counts = len(convolutions(net)), len(coords)
    return Profiled(asked, *counts, found, shares(found), spent, why, device_name(asked.device))


def _pass(net: nn.Module, feats: Tensor, coords: Tensor) -> Any:
    with torch.no_grad():
        return net(SparseTensor(feats, coords))


def _busy(call: Callable[[], object]) -> tuple[float | None, str]:
    try:
        return 1e-3 * busy(call).median, ""
    except (PumiceError, RuntimeError) as reason:
        return None, str(reason).splitlines()[0]


def network(name: str) -> nn.Module:
    """A network of NETWORKS with random weights, or the result of module:factory()."""
    torch.manual_seed(1)
    if ":" in name:
        return _imported(name)
    base, _, width = name.partition("-")
    if base not in NETWORKS or (width and base != "minkunet"):
        known = ", ".join((*NETWORKS, "minkunet-WIDTH", "module:factory"))
        raise OptionError(f"model {name!r} is unknown; there are {known}")
    try:
        return NETWORKS[base](float(width or 1.0))
    except ValueError:
        raise OptionError(f"a width is a number, as in minkunet-0.5, found {width!r}") from None


def _imported(name: str) -> nn.Module:
    module, _, factory = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        # As with `python -m`, modules of the current folder can be imported.
        sys.path.insert(0, here)
    try:
        found = getattr(import_module(module), factory)()
    except (ImportError, AttributeError) as reason:
        raise OptionError(f"model {name!r}: expected module:factory, found: {reason}") from None
    if not isinstance(found, nn.Module):
        raise OptionError(f"model {name!r}: expected a torch.nn.Module, found {type(found).__name__}")
    return found


def _channels(net: nn.Module) -> int:
    layers = convolutions(net)
    if not layers:
        raise OptionError(f"{type(net).__name__} has no convolution of pumice.nn")
    return layers[0].in_channels


def scene(asked: ProfileOptions, channels: int) -> tuple[Tensor, Tensor]:
    """(feats [N, channels], coords int32 [N, 4]) of a named scene, a generated street, or a file of points."""
    coords = _named(asked.scan)
    if coords is not None:
        feats = torch.randn(len(coords), channels, generator=torch.Generator().manual_seed(1))
    else:
        x = _voxels(_scan(asked.scan), asked.voxel)
        coords, feats = x.coords, x.feats[:, :channels]
        feats = torch.nn.functional.pad(feats, (0, channels - feats.shape[1]))
    if not len(coords):
        raise OptionError(f"scan {asked.scan!r} has no voxels")
    return feats.to(asked.device, asked.dtype).contiguous(), coords.to(asked.device)


def _voxels(scan: Scan, size: float) -> SparseTensor:
    points = torch.from_numpy(scan.xyz)
    return voxelize(points, torch.cat([points, torch.from_numpy(scan.feats)], dim=1), size)


def _named(name: str) -> Tensor | None:
    """Coordinates of a scene of PUMICE_DATA, or of a shell of this size; None for other names."""
    import numpy as np

    path = (settings().data or Path("no-data")) / "scenes" / f"{name}.npz"
    size = name.removeprefix("shell_")
    if path.is_file():
        found = np.load(path)["coords"]
    elif name != size and size.isdigit() and int(size) > 2:
        found = shell(int(size))
    else:
        return None
    return batched(found)


def _scan(name: str) -> Scan:
    if name == STREET:
        return street_scene(0, azimuths=720)
    if not Path(name).is_file():
        raise FileError(f"{name}: expected a scan, a scene of PUMICE_DATA, shell_SIZE or {STREET}, found none of these")
    return read_scan(Path(name))
