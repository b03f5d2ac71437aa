"""Real-time loop of a robot: label the points of each scan, at a fixed rate.

    python examples/robot_loop.py                              generated streets; takes seconds without a GPU
    python examples/robot_loop.py SCAN... --scans 10000        scans from files in turn, each augmented differently
    python examples/robot_loop.py SCAN... --rate 0             as fast as possible

The network is captured from raw points (pumice.capture_points): voxelisation, kernel maps, 42 convolutions and argmax
are one CUDA graph per capacity. All graphs are captured before the first scan, scans arrive in a pinned buffer, and
existing objects are excluded from garbage collection. Device memory allocated in one tick is reused by the next.

It reports the latency from arrival of a scan to labels in host memory (p50, p99, p99.9, longest), missed deadlines and
memory growth, and draws a histogram. Weights are random: latency does not depend on them.
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
LEFT = 0.3  # Smallest share of a scan's points that is kept
GROWTH = 1.5  # Factor between capacities


class Labels(nn.Module):
    """Class label per voxel; under capture_points, per point."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: pm.SparseTensor) -> Tensor:
        return self.net(x).feats.argmax(1)


class Sensor:
    """Simulated sensor: the given scans in turn, randomly rotated about the vertical axis and thinned out.

    A scan is float32 [P, 4] on the host: x, y, z in metres, and intensity.
    """

    def __init__(self, scans: Sequence[np.ndarray], seed: int = 0) -> None:
        self.scans, self.chance = scans, np.random.default_rng(seed)

    @property
    def most(self) -> int:
        """Largest number of points of a scan."""
        return max(map(len, self.scans))

    @property
    def least(self) -> int:
        """Smallest number of points of a scan, after thinning."""
        return math.floor(LEFT * min(map(len, self.scans)))

    @property
    def reach(self) -> float:
        """Distance of the farthest point, in metres."""
        return max(float(np.linalg.norm(scan[:, :3], axis=1).max()) for scan in self.scans)

    def scan(self, number: int) -> np.ndarray:
        angle, share = self.chance.uniform(0, 2 * math.pi), self.chance.uniform(LEFT, 1.0)
        points = self.scans[number % len(self.scans)]
        points = points[self.chance.random(len(points), np.float32) < share]
        cos, sin = math.cos(angle), math.sin(angle)
        turn = np.array([[cos, sin, 0, 0], [-sin, cos, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], np.float32)
        return points @ turn


class Robot:
    """Labels scans of a sensor with a captured network. example: a scan, float32 [P, 4]."""

    def __init__(self, net: nn.Module, example: np.ndarray, sensor: Sensor, voxel: float) -> None:
        device = next(net.parameters()).device
        self.device, on_gpu = device, device.type == "cuda"
        self.arrived = torch.zeros(sensor.most, 4, pin_memory=on_gpu)
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
            dtype=torch.float16 if on_gpu else None,
        ).ready()

    def labels(self, scan: np.ndarray) -> np.ndarray:
        """Labels int64 [P] of a scan float32 [P, 4]."""
        arrived = self.arrived[: len(scan)]
        arrived.copy_(torch.from_numpy(scan))
        points = arrived.to(self.device, non_blocking=True)
        return self.fast(points[:, :3], points).cpu().numpy()


@dataclass(frozen=True)
class Memory:
    """Memory in MiB. host: of the process. live: allocated tensors on the device. used: all used device memory."""

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
    """Result of a run. spent: latency of each scan in ms. late: ticks that started late, because the previous one was
    not done. before, after: memory after warm-up, and after the last scan."""

    spent: np.ndarray
    points: int
    deadline: float
    late: int
    before: Memory
    after: Memory

    @property
    def missed(self) -> int:
        """Number of scans that missed the deadline."""
        return int((self.spent > self.deadline).sum())

    @property
    def quantiles(self) -> dict[str, float]:
        return dict(zip(QUANTILES, np.quantile(self.spent, list(QUANTILES.values())).tolist(), strict=True))


def drive(robot: Robot, sensor: Sensor, count: int, rate: float, deadline: float) -> Ran:
    """Run `count` scans, `rate` per second (0: without pauses)."""
    spent = np.zeros(count)
    points = late = 0
    warm = min(count - 1, max(10, count // 100))
    before = Memory.now(robot.device)
    begin = time.perf_counter()
    for number in range(count):
        # Generate the next scan in the rest of the previous tick.
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


def report(ran: Ran) -> str:
    """Text report with a histogram."""
    lines = [", ".join(f"{name} {value:.3f} ms" for name, value in ran.quantiles.items())]
    lines[0] += f"; p99.9 is {ran.quantiles['p99.9'] / ran.quantiles['p50']:.2f} times p50"
    lines.append(f"{ran.missed} of {len(ran.spent)} scans missed {ran.deadline:g} ms; {ran.late} ticks began late")
    for name, first in vars(ran.before).items():
        last = getattr(ran.after, name)
        lines.append(f"memory, {name}: {first:.2f} to {last:.2f} MiB ({last - first:+.2f})")
    # One line for everything above p99.9.
    top = max(ran.quantiles["p99.9"], ran.spent.min() * 1.001)
    counts, edges = np.histogram(ran.spent[ran.spent <= top], bins=16, range=(ran.spent.min(), top))
    beyond = int((ran.spent > top).sum())
    rows = [(f"{a:8.3f} to {b:8.3f} ms", n) for a, b, n in zip(edges, edges[1:], counts, strict=False)]
    rows.append((f"{top:8.3f} to {ran.spent.max():8.3f} ms", beyond))
    lines += [f"{name} {n:6}  {'#' * math.ceil(50 * n / max(1, counts.max()))}" for name, n in rows]
    return "\n".join(lines)


def draw(path: Path, ran: Ran, title: str) -> Path:
    """Plot a histogram and the latency over time."""
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
    above.set(xlabel=f"milliseconds from arrival to labels; {int((ran.spent > top).sum())} scans above", ylabel="scans")
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
    parser.add_argument("paths", nargs="*", type=Path, metavar="SCAN", help="scan files, or folders of them")
    parser.add_argument("--scans", type=int, default=10_000 if on_gpu else 40, help="number of scans [%(default)s]")
    parser.add_argument(
        "--rate", type=float, default=20.0 if on_gpu else 10.0, help="scans per second; 0: no pause [%(default)s]"
    )
    parser.add_argument("--deadline", type=float, default=0.0, help="milliseconds [a tick, or 50]")
    parser.add_argument("--voxel", type=float, default=0.1, help="voxel size in metres [%(default)s]")
    parser.add_argument("--width", type=float, default=1.0 if on_gpu else 0.125, help="MinkUNet width [%(default)s]")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument(
        "--out", type=Path, default=Path("pumice-runs/robot"), help="folder for the picture [%(default)s]"
    )
    found = parser.parse_args(argv)
    if found.scans < 1 or found.rate < 0:
        parser.error("--scans must be at least 1 and --rate at least 0")
    found.deadline = found.deadline or (1e3 / found.rate if found.rate else 50.0)
    return found


def scans_of(paths: Sequence[Path], small: bool) -> list[np.ndarray]:
    """Scans float32 [P, 4] of the files; without paths, generated streets."""
    if paths:
        scans = [read_scan(file) for path in paths for file in find_scans(path)]
    else:
        size = {"beams": 16, "azimuths": 120} if small else {}
        scans = [street_scene(seed, **size) for seed in range(3)]
    # Missing intensity is 0.
    intensities = [np.pad(scan.feats, ((0, 0), (0, 1)))[:, :1] for scan in scans]
    return [np.concatenate([s.xyz, i], axis=1).astype(np.float32) for s, i in zip(scans, intensities, strict=True)]


def main(argv: Sequence[str] | None = None) -> Ran:
    args = options(argv)
    torch.manual_seed(0)
    sensor = Sensor(scans_of(args.paths, small=args.device == "cpu"))
    net = pm.models.MinkUNet(4, CLASSES, args.width).to(args.device)
    begin = time.perf_counter()
    largest = max(sensor.scans, key=len)
    robot = Robot(net, largest, sensor, args.voxel)
    for capacity in robot.fast.capacities:
        robot.labels(largest[:capacity])
    took = time.perf_counter() - begin
    print(f"{len(robot.fast.capacities)} capacities up to {sensor.most} points, ready in {took:.1f} s")
    gc.collect()
    gc.freeze()
    try:
        with warnings.catch_warnings(record=True) as said:
            ran = drive(robot, sensor, args.scans, args.rate, args.deadline)
    finally:
        gc.unfreeze()
    for warning in said:
        print(f"warning: {warning.message}")
    eager = dict(robot.fast.fallbacks) or "none"
    print(f"{args.scans} scans, {ran.points / args.scans:,.0f} points each; eager fallbacks: {eager}")
    print(report(ran))
    where = torch.cuda.get_device_name() if args.device != "cpu" else "CPU"
    title = f"MinkUNet captured from points, {where}: {args.scans} scans, {ran.missed} missed {args.deadline:g} ms"
    print(f"plot {draw(args.out / 'latency.png', ran, title)}")
    return ran


if __name__ == "__main__":
    main()
