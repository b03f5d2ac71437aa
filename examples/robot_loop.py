"""The loop of a robot: a scan comes in, the labels of its points go out, at a fixed rate, as long as it drives.

    python examples/robot_loop.py                              generated streets; in seconds without a GPU
    python examples/robot_loop.py SCAN... --scans 10000        scans from files, one after the other, each time others
    python examples/robot_loop.py SCAN... --rate 0             as fast as it goes

The network is captured from raw points on (pumice.capture_points): voxels, kernel maps, 42 convolutions and the choice
of a label are one CUDA graph for each of a few capacities. All of them are captured before the first scan comes, the
buffer that scans arrive in is pinned, and what is there by then is left out of garbage collection. Nothing is
allocated on the device in a tick but what the next one takes again.

It tells how long scans took from their arrival to their labels in memory of the host (p50, p99, p99.9, the longest),
how many missed their deadline, and whether memory grew; and draws a histogram. Weights are random: time does not depend
on them.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import pumice as pm
from pumice.data import find_scans, read_scan, street_scene

QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "longest": 1.0}
CLASSES = 19
LEFT = 0.3
"""The share of points of a scan that is there at least."""
GROWTH = 1.5
"""From one capacity to the next."""


class Labels(nn.Module):
    """A label for each voxel; behind capture_points for each point."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: pm.SparseTensor) -> Tensor:
        return self.net(x).feats.argmax(1)


class Sensor:
    """Scans as they come from a sensor: those given in turn, each time turned about the vertical axis and thinned out.

    A scan is float32 [P, 4] on the host: x, y, z in metres, and intensity.
    """

    def __init__(self, scans: Sequence[np.ndarray], seed: int = 0) -> None:
        self.scans, self.chance = scans, np.random.default_rng(seed)

    @property
    def most(self) -> int:
        """Points of the largest scan."""
        return max(map(len, self.scans))

    @property
    def least(self) -> int:
        """Points of the smallest one, when the most is left out of it."""
        return math.floor(LEFT * min(map(len, self.scans)))

    @property
    def reach(self) -> float:
        """Metres from the sensor to the farthest point."""
        return max(float(np.linalg.norm(scan[:, :3], axis=1).max()) for scan in self.scans)

    def scan(self, number: int) -> np.ndarray:
        angle, share = self.chance.uniform(0, 2 * math.pi), self.chance.uniform(LEFT, 1.0)
        points = self.scans[number % len(self.scans)]
        points = points[self.chance.random(len(points), np.float32) < share]
        cos, sin = math.cos(angle), math.sin(angle)
        turn = np.array([[cos, sin, 0, 0], [-sin, cos, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], np.float32)
        return points @ turn


class Robot:
    """Labels of a scan, by a captured network, for scans as a sensor gives them. example: a scan, float32 [P, 4]."""

    def __init__(self, net: nn.Module, example: np.ndarray, sensor: Sensor, voxel: float) -> None:
        device = next(net.parameters()).device
        self.device, on_gpu = device, device.type == "cuda"
        self.arrived = torch.zeros(sensor.most, 4, pin_memory=on_gpu)
        cells = math.ceil(sensor.reach / voxel) + 1
        capacities = [sensor.most]
        while capacities[-1] > GROWTH * max(1, sensor.least):
            capacities.append(math.ceil(capacities[-1] / GROWTH))
        points = torch.from_numpy(example).to(device)
        self.fast = pm.capture_points(
            Labels(net).eval(),
            points[:, :3],
            points,
            size=voxel,
            max_points=sensor.most,
            buckets=capacities,
            box=((-cells,) * 3, (cells,) * 3),
            dtype=torch.float16 if on_gpu else None,
        ).ready()

    def labels(self, scan: np.ndarray) -> np.ndarray:
        """int64 [P] for float32 [P, 4]."""
        arrived = self.arrived[: len(scan)]
        arrived.copy_(torch.from_numpy(scan))
        points = arrived.to(self.device, non_blocking=True)
        return self.fast(points[:, :3], points).cpu().numpy()


@dataclass(frozen=True)
class Memory:
    """MiB: of the process, of live tensors on the device, and of all that is in use there."""

    host: float
    live: float
    used: float

    @staticmethod
    def now(device: torch.device) -> Memory:
        statm = Path("/proc/self/statm")
        host = int(statm.read_text().split()[1]) * 4096 / 2**20 if statm.is_file() else math.nan
        if device.type != "cuda":
            return Memory(host, 0.0, 0.0)
        free, whole = torch.cuda.mem_get_info(device)
        return Memory(host, torch.cuda.memory_allocated(device) / 2**20, (whole - free) / 2**20)


@dataclass(frozen=True, eq=False)
class Ran:
    """What happened. spent: milliseconds of each scan, from its arrival to its labels. late: ticks that began late,
    since the one before was not done. before, after: memory a little after the first scan, and behind the last."""

    spent: np.ndarray
    points: int
    deadline: float
    late: int
    before: Memory
    after: Memory

    @property
    def missed(self) -> int:
        """Scans whose labels came behind the deadline."""
        return int((self.spent > self.deadline).sum())

    @property
    def quantiles(self) -> dict[str, float]:
        return dict(zip(QUANTILES, np.quantile(self.spent, list(QUANTILES.values())).tolist(), strict=True))


def drive(robot: Robot, sensor: Sensor, count: int, rate: float, deadline: float) -> Ran:
    """So many scans, `rate` a second (0: without a pause)."""
    spent = np.zeros(count)
    points = late = 0
    warm = min(count - 1, max(10, count // 100))
    before = Memory.now(robot.device)
    begin = time.perf_counter()
    for number in range(count):
        # The next scan is made in what is left of the tick before.
        scan = sensor.scan(number)
        if rate:
            left = begin + number / rate - time.perf_counter()
            late += left < 0
            time.sleep(max(0.0, left))
        arrival = time.perf_counter()
        labels = robot.labels(scan)
        spent[number] = 1e3 * (time.perf_counter() - arrival)
        points += len(labels)
        if number == warm:
            before = Memory.now(robot.device)
    return Ran(spent, points, deadline, late, before, Memory.now(robot.device))


def told(ran: Ran) -> str:
    """What happened, and a histogram."""
    lines = [", ".join(f"{name} {value:.3f} ms" for name, value in ran.quantiles.items())]
    lines[0] += f"; p99.9 is {ran.quantiles['p99.9'] / ran.quantiles['p50']:.2f} times p50"
    lines.append(f"{ran.missed} of {len(ran.spent)} scans missed {ran.deadline:g} ms; {ran.late} ticks began late")
    for name, first in vars(ran.before).items():
        last = getattr(ran.after, name)
        lines.append(f"memory, {name}: {first:.2f} to {last:.2f} MiB ({last - first:+.2f})")
    # What is beyond p99.9 is one line.
    top = max(ran.quantiles["p99.9"], ran.spent.min() * 1.001)
    counts, edges = np.histogram(ran.spent[ran.spent <= top], bins=16, range=(ran.spent.min(), top))
    beyond = int((ran.spent > top).sum())
    rows = [(f"{a:8.3f} to {b:8.3f} ms", n) for a, b, n in zip(edges, edges[1:], counts, strict=False)]
    rows.append((f"{top:8.3f} to {ran.spent.max():8.3f} ms", beyond))
    lines += [f"{name} {n:6}  {'#' * math.ceil(50 * n / max(1, counts.max()))}" for name, n in rows]
    return "\n".join(lines)


def draw(path: Path, ran: Ran, title: str) -> Path:
    """A histogram, and scan after scan."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), dpi=130, layout="constrained")
    above, below = figure.subplots(2, 1)
    top = max(1.05 * ran.quantiles["p99.9"], ran.spent.min() * 1.001)
    above.hist(ran.spent, bins=120, range=(ran.spent.min(), top), color="#0072B2", log=True)
    colours = ("#009E73", "#E69F00", "#D55E00")
    for (name, value), colour in zip(list(ran.quantiles.items())[:3], colours, strict=True):
        for axis, line in ((above, above.axvline), (below, below.axhline)):
            line(value, color=colour, linewidth=1.2, label=f"{name} {value:.3f} ms")
            axis.spines[["top", "right"]].set_visible(False)
    above.set(
        xlabel=f"milliseconds from arrival to labels; {int((ran.spent > top).sum())} scans beyond", ylabel="scans"
    )
    above.legend(frameon=False)
    below.plot(ran.spent, ".", markersize=1.5, color="#0072B2")
    below.set(xlabel="scan", ylabel="ms", ylim=(0, None))
    above.set_title(title, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="SCAN", help="files of scans, or folders of them")
    parser.add_argument("--scans", type=int, default=10_000 if on_gpu else 40, help="how many [%(default)s]")
    parser.add_argument(
        "--rate", type=float, default=20.0 if on_gpu else 10.0, help="scans a second; 0: no pause [%(default)s]"
    )
    parser.add_argument("--deadline", type=float, default=0.0, help="milliseconds [those of a tick, or 50]")
    parser.add_argument("--voxel", type=float, default=0.1, help="metres [%(default)s]")
    parser.add_argument("--width", type=float, default=1.0 if on_gpu else 0.125, help="of MinkUNet [%(default)s]")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument(
        "--out", type=Path, default=Path("pumice-runs/robot"), help="folder for the picture [%(default)s]"
    )
    found = parser.parse_args(argv)
    if found.scans < 1 or found.rate < 0:
        parser.error("there is at least one scan, and the rate is not below 0")
    found.deadline = found.deadline or (1e3 / found.rate if found.rate else 50.0)
    return found


def scans_of(paths: Sequence[Path], small: bool) -> list[np.ndarray]:
    """float32 [P, 4] each; without paths, generated streets."""
    if paths:
        scans = [read_scan(file) for path in paths for file in find_scans(path)]
    else:
        size = {"beams": 16, "azimuths": 120} if small else {}
        scans = [street_scene(seed, **size) for seed in range(3)]
    # Scans without intensity have 0.
    intensities = [np.pad(scan.feats, ((0, 0), (0, 1)))[:, :1] for scan in scans]
    return [np.concatenate([s.xyz, i], axis=1).astype(np.float32) for s, i in zip(scans, intensities, strict=True)]


def main(argv: Sequence[str] | None = None) -> Ran:
    asked = options(argv)
    torch.manual_seed(0)
    sensor = Sensor(scans_of(asked.paths, small=asked.device == "cpu"))
    net = pm.models.MinkUNet(4, CLASSES, asked.width).to(asked.device)
    begin = time.perf_counter()
    largest = max(sensor.scans, key=len)
    robot = Robot(net, largest, sensor, asked.voxel)
    for capacity in robot.fast.capacities:
        robot.labels(largest[:capacity])
    took = time.perf_counter() - begin
    print(f"{len(robot.fast.capacities)} capacities up to {sensor.most} points, ready in {took:.1f} s")
    gc.collect()
    gc.freeze()
    try:
        with warnings.catch_warnings(record=True) as said:
            ran = drive(robot, sensor, asked.scans, asked.rate, asked.deadline)
    finally:
        gc.unfreeze()
    for warning in said:
        print(f"warned: {warning.message}")
    eagerly = dict(robot.fast.fallbacks) or "none"
    print(f"{asked.scans} scans, {ran.points / asked.scans:,.0f} points each; eagerly {eagerly}")
    print(told(ran))
    where = torch.cuda.get_device_name() if asked.device != "cpu" else "CPU"
    title = f"MinkUNet captured from points on, {where}: {asked.scans} scans, {ran.missed} missed {asked.deadline:g} ms"
    print(f"picture {draw(asked.out / 'latency.png', ran, title)}")
    return ran


if __name__ == "__main__":
    main()
