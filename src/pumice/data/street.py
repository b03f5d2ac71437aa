"""Generated, labelled street scenes: a random street layout, scanned by a spinning LiDAR.

The layout is of road, houses, vehicles, poles, trees and people, as shapes for ray casting, in street coordinates in
metres: the sensor at the origin, u along the street, v across it, z up. The sensor is about 1.75 m above a road with
slopes, as in driving data; the finished scan is rotated by a random angle.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pumice.data.labels import STREET
from pumice.data.raycast import Cylinder, Echo, Ellipsoid, Primitive, Rays, Shape, box, cast, facade, terrain_hit
from pumice.data.scan import Scan
from pumice.errors import OptionError

GROUND = 0
_BUILDING, _VEHICLE, _POLE, _TREE, _PERSON = range(1, 6)
_REACH = 75.0  # The street extends this far to both sides.


@dataclass(frozen=True, eq=False)
class Street:
    """The ground plan, metres: the road runs along v = `middle`, a side street crosses at u = `cross`."""

    middle: float
    half: float
    walk: float
    cross: float
    cross_half: float
    sensor: float
    slope: tuple[float, float]
    waves: np.ndarray
    kerb: float

    def height(self, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        """z of the road surface (continued under the pavement), relative to the sensor."""
        z = self.slope[0] * u + self.slope[1] * v - self.sensor
        for amplitude, fu, fv, phase in self.waves:
            z = z + amplitude * (np.sin(fu * u + fv * v + phase) - np.sin(phase))
        return z

    def on_road(self, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        """True if a place lies on the roadway rather than behind a kerb."""
        return (np.abs(v - self.middle) < self.half) | (np.abs(u - self.cross) < self.cross_half)

    def base(self, u: float, v: float) -> float:
        """Height of the road or pavement on which objects stand."""
        place = np.asarray(u, float), np.asarray(v, float)
        return float(self.height(*place) + self.kerb * (not self.on_road(*place)))

    def clear(self, u: float, margin: float) -> bool:
        """True if a place along the street is off the crossing by `margin`."""
        return abs(u - self.cross) > self.cross_half + margin


@dataclass
class Plot:
    """Items placed so far, and the circles (u, v, radius) that they occupy."""

    street: Street
    rng: np.random.Generator
    items: list[Primitive] = field(default_factory=list)
    taken: list[tuple[float, float, float]] = field(default_factory=list)

    def free(self, u: float, v: float, radius: float) -> bool:
        near_sensor = np.hypot(u, v) < 2.2 + radius
        return not near_sensor and all(np.hypot(u - a, v - b) > radius + r for a, b, r in self.taken)

    def take(self, u: float, v: float, radius: float) -> None:
        self.taken.append((u, v, radius))

    def add(self, label: int, reflectance: float, *shapes: Shape) -> None:
        self.items += [Primitive(s, label, float(reflectance)) for s in shapes]


def _ground_plan(rng: np.random.Generator) -> Street:
    half = rng.uniform(5.0, 6.2)
    waves = np.stack(
        [rng.uniform(0.01, 0.07, 4), rng.normal(0, 0.16, 4), rng.normal(0, 0.16, 4), rng.uniform(0, 2 * np.pi, 4)],
        axis=1,
    )
    cross = rng.choice([-1, 1]) * rng.uniform(16, 45) if rng.random() < 0.6 else 1e4
    slope = rng.uniform(-0.025, 0.025), rng.uniform(-0.015, 0.015)
    return Street(
        half - rng.uniform(3.6, 4.2),
        half,
        rng.uniform(2.6, 4.5),
        cross,
        rng.uniform(3.5, 5.5),
        rng.uniform(1.65, 1.9),
        slope,
        waves,
        rng.uniform(0.08, 0.16),
    )


def _walk(rng: np.random.Generator, low: float, high: float) -> list[float]:
    """Positions u along the street, with random gaps."""
    steps = rng.uniform(low, high, int(2 * _REACH / low) + 1)
    places = -_REACH + np.cumsum(steps)
    return [float(p) for p in places if p < _REACH]


def _buildings(plot: Plot) -> None:
    street, rng = plot.street, plot.rng
    for side in (-1, 1):
        setback = rng.uniform(0, 3.5)
        u = -_REACH
        while u < _REACH:
            width = rng.uniform(8, 22)
            front = street.half + street.walk + setback + rng.uniform(0, 0.8)
            if street.clear(u + width / 2, width / 2 + 2):
                _building(plot, u + width / 2, side, front, width)
            u += width
            if rng.random() < 0.4:
                gap = rng.uniform(2, 9)
                if street.clear(u + gap / 2, gap / 2 + 1):
                    _gap(plot, u, gap, side * front)
                u += gap


def _building(plot: Plot, u: float, side: int, front: float, width: float) -> None:
    street, rng = plot.street, plot.rng
    depth, height = rng.uniform(8, 14), rng.uniform(4.5, 18)
    v = street.middle + side * (front + depth / 2)
    base = street.base(u, v) - 1.0
    light = rng.uniform(0.12, 0.7)
    pitch = float(rng.uniform(2.2, 3.6)), float(rng.uniform(2.8, 3.4))
    yaw = rng.normal(0, 0.01)
    plot.add(_BUILDING, light, facade((u, v, base + (height + 1) / 2), (width, depth, height + 1), yaw, pitch))
    wall = v - side * depth / 2
    for _ in range(rng.integers(0, 4)):  # balconies and canopies
        size = rng.uniform(1.5, 4), rng.uniform(0.6, 1.3), rng.choice([0.2, 1.1])
        place = (u + rng.uniform(-0.4, 0.4) * width, wall - side * size[1] / 2, base + 1 + rng.uniform(2.5, height))
        plot.add(_BUILDING, light * rng.uniform(0.6, 1.3), box(place, size))
    if rng.random() < 0.5:  # steps at the door
        place = u + rng.uniform(-0.3, 0.3) * width
        plot.add(_BUILDING, light, box((place, wall - side * 0.4, base + 1.0), (1.8, 0.8, 0.8)))


def _gap(plot: Plot, u: float, gap: float, front: float) -> None:
    """Fill a gap between two houses with a garden wall, a hedge, or nothing."""
    street, rng = plot.street, plot.rng
    v, kind, height = street.middle + front, rng.random(), rng.uniform(0.8, 2.0)
    base = street.base(u + gap / 2, v)
    if kind < 0.4:
        plot.add(_BUILDING, rng.uniform(0.15, 0.6), box((u + gap / 2, v, base + height / 2), (gap, 0.3, height)))
    elif kind < 0.8:
        for x in np.arange(u + 0.4, u + gap, 0.7):
            axes = np.array([rng.uniform(0.5, 0.8), rng.uniform(0.4, 0.6), height / 2 * rng.uniform(0.9, 1.2)])
            centre = np.array([x, v + rng.normal(0, 0.1), base + height / 2])
            plot.add(_TREE, rng.uniform(0.2, 0.6), Ellipsoid(centre, axes, 0.25))


def _vehicles(plot: Plot) -> None:
    street, rng = plot.street, plot.rng
    for side in (-1, 1):
        density = rng.uniform(0.45, 0.8)
        for u in _walk(rng, 5.6, 6.6):  # parked along the kerb
            if rng.random() < density and street.clear(u, 5):
                _vehicle(plot, u, street.middle + side * (street.half - 1.15), rng.normal(0, 0.03))
        for u in _walk(rng, 14, 40):  # driving
            v = street.middle + side * (street.half - 3.75)
            if abs(u) > 9:
                _vehicle(plot, u, v + rng.normal(0, 0.15), (np.pi if side > 0 else 0) + rng.normal(0, 0.02))
    if street.cross < _REACH:
        for v in (-14.0, 15.0):
            _vehicle(plot, street.cross + rng.uniform(-1, 1), street.middle + v, np.pi / 2)


def _vehicle(plot: Plot, u: float, v: float, yaw: float) -> None:
    kind = plot.rng.random()
    build = _car if kind < 0.72 else _van if kind < 0.92 else _truck
    reach = 2.3 if build is _car else 2.8 if build is _van else 4.2
    # Two circles per vehicle: one around all of it would keep people off the pavement.
    ahead = np.array([np.cos(yaw), np.sin(yaw)]) * reach / 2
    ends = [(u + s * ahead[0], v + s * ahead[1]) for s in (-1, 1)]
    if all(plot.free(*end, reach / 2) for end in ends):
        build(plot, u, v, yaw)
        for end in ends:
            plot.take(*end, reach / 2)


Part = tuple[float, float, float, float, float, float, float]  # ahead, left, low, length, width, height, top


def _assemble(plot: Plot, place: tuple[float, float, float], parts: list[Part], light: float) -> None:
    """Boxes of one vehicle in its own frame; `top` is the scale of the upper face."""
    u, v, yaw = place
    base, c, s = plot.street.base(u, v), np.cos(yaw), np.sin(yaw)
    for ahead, left, low, length, width, height, top in parts:
        centre = u + c * ahead - s * left, v + s * ahead + c * left, base + low + height / 2
        shape = box(centre, (length, width, height), yaw, (top, 0.5 + top / 2))
        plot.add(_VEHICLE, light * plot.rng.uniform(0.7, 1.2), shape)


def _wheels(track: float, axle: float, radius: float) -> list[Part]:
    return [(a * axle, b * track, 0.0, 1.7 * radius, 0.22, 2 * radius, 0.7) for a in (-1, 1) for b in (-1, 1)]


def _car(plot: Plot, u: float, v: float, yaw: float) -> None:
    rng = plot.rng
    length, width, height = rng.uniform(3.7, 4.7), rng.uniform(1.68, 1.88), rng.uniform(1.4, 1.65)
    waist = height * rng.uniform(0.54, 0.62)
    estate = rng.random() < 0.4
    cabin = (
        -0.12 * length,
        0.0,
        waist,
        length * (0.7 if estate else 0.56),
        width * 0.94,
        height - waist,
        0.76 if estate else 0.6,
    )
    parts = [(0.0, 0.0, 0.22, length, width, waist - 0.2, 0.95), cabin]
    _assemble(plot, (u, v, yaw), parts + _wheels(width / 2 - 0.11, length * 0.31, 0.31), rng.uniform(0.08, 0.85))


def _van(plot: Plot, u: float, v: float, yaw: float) -> None:
    rng = plot.rng
    length, width, height = rng.uniform(4.7, 5.5), rng.uniform(1.85, 2.05), rng.uniform(1.9, 2.5)
    parts = [
        (-0.09 * length, 0.0, 0.3, length * 0.82, width, height - 0.3, 0.92),
        (0.38 * length, 0.0, 0.3, length * 0.24, width * 0.96, height * 0.36, 0.75),
    ]
    _assemble(plot, (u, v, yaw), parts + _wheels(width / 2 - 0.11, length * 0.32, 0.35), rng.uniform(0.08, 0.85))


def _truck(plot: Plot, u: float, v: float, yaw: float) -> None:
    rng = plot.rng
    length, width, height = rng.uniform(6.5, 8.5), rng.uniform(2.2, 2.45), rng.uniform(2.7, 3.3)
    parts = [
        (-0.12 * length, 0.0, 0.75, length * 0.74, width, height - 0.75, 1.0),
        (0.39 * length, 0.0, 0.4, length * 0.2, width * 0.95, height * 0.72, 0.85),
        (0.0, 0.0, 0.5, length * 0.9, width * 0.5, 0.3, 1.0),
    ]
    _assemble(plot, (u, v, yaw), parts + _wheels(width / 2 - 0.14, length * 0.33, 0.48), rng.uniform(0.08, 0.85))


def _poles(plot: Plot) -> None:
    street, rng = plot.street, plot.rng
    for side in (-1, 1):
        edge = street.middle + side * (street.half + rng.uniform(0.35, 0.6))
        for u in _walk(rng, 8, 17):
            if street.clear(u, 1) and plot.free(u, edge, 0.3):
                kind = rng.random()
                (_lamp if kind < 0.45 else _sign if kind < 0.85 else _bollards)(plot, u, edge, side)
        if street.cross < _REACH:
            u = street.cross - side * (street.cross_half + 0.6)
            _traffic_light(plot, u, edge)


def _post(plot: Plot, u: float, v: float, width: float, height: float) -> tuple[float, float]:
    """Place a vertical tube. Returns (height of its foot, its reflectance)."""
    base, light = plot.street.base(u, v), plot.rng.uniform(0.15, 0.7)
    plot.add(_POLE, light, Cylinder(np.array([u, v, base - 0.1]), width, height + 0.1))
    plot.take(u, v, 0.3)
    return base, light


def _lamp(plot: Plot, u: float, v: float, side: int) -> None:
    height = plot.rng.uniform(5, 8)
    base, light = _post(plot, u, v, plot.rng.uniform(0.06, 0.11), height)
    arm = plot.rng.uniform(0.8, 1.8)
    plot.add(
        _POLE,
        light,
        box((u, v - side * arm / 2, base + height), (0.1, arm, 0.1)),
        box((u, v - side * arm, base + height), (0.3, 0.6, 0.18)),
    )


def _sign(plot: Plot, u: float, v: float, side: int) -> None:
    height = plot.rng.uniform(2.3, 3.2)
    base, _ = _post(plot, u, v, plot.rng.uniform(0.035, 0.06), height)
    yaw = plot.rng.normal(0, 0.25)
    for i in range(plot.rng.integers(1, 3)):
        size = 0.04, plot.rng.uniform(0.5, 0.8), plot.rng.uniform(0.4, 0.75)
        plot.add(_POLE, plot.rng.uniform(0.5, 1.0), box((u - 0.08, v, base + height - 0.35 - 0.75 * i), size, yaw))


def _bollards(plot: Plot, u: float, v: float, side: int) -> None:
    for i in range(plot.rng.integers(3, 7)):
        if plot.street.clear(u + 1.4 * i, 0.5) and plot.free(u + 1.4 * i, v, 0.2):
            _post(plot, u + 1.4 * i, v, 0.07, 0.95)


def _traffic_light(plot: Plot, u: float, v: float) -> None:
    base, light = _post(plot, u, v, 0.08, 3.3)
    plot.add(_POLE, light, box((u, v, base + 2.9), (0.3, 0.35, 0.95)))


def _trees(plot: Plot) -> None:
    street, rng = plot.street, plot.rng
    for side in (-1, 1):
        line = street.middle + side * (street.half + rng.uniform(0.8, 1.2))
        density = rng.uniform(0.55, 0.95)
        for u in _walk(rng, 8, 14):
            if rng.random() < density and street.clear(u, 2) and plot.free(u, line, 0.5):
                _tree(plot, u, line + rng.normal(0, 0.15))


def _tree(plot: Plot, u: float, v: float) -> None:
    rng, base = plot.rng, plot.street.base(u, v)
    trunk, spread = rng.uniform(1.9, 3.0), rng.uniform(1.1, 2.2)
    light = rng.uniform(0.2, 0.6)
    plot.take(u, v, 0.4)
    plot.add(_TREE, rng.uniform(0.15, 0.5), Cylinder(np.array([u, v, base - 0.1]), rng.uniform(0.09, 0.22), trunk + 1))
    for _ in range(rng.integers(5, 10)):
        axes = spread * rng.uniform(0.5, 1.0, 3)
        offset = np.array([*rng.normal(0, 0.55 * spread, 2), axes[2] * 0.8 + rng.uniform(0, 1.6 * spread)])
        plot.add(
            _TREE,
            light * rng.uniform(0.8, 1.2),
            Ellipsoid(np.array([u, v, base + trunk]) + offset, axes, rng.uniform(0.4, 1.1)),
        )


def _people(plot: Plot) -> None:
    street, rng = plot.street, plot.rng
    wanted = int(rng.integers(14, 26))
    for _ in range(6 * wanted):
        u, side = float(rng.normal(0, 17)), rng.choice([-1, 1])
        across = rng.uniform(0.4, street.walk) if rng.random() < 0.85 else rng.uniform(-2.5, -0.3)
        v = float(street.middle + side * (street.half + across))
        if wanted and np.hypot(u, v) > 4 and plot.free(u, v, 0.35) and street.clear(u, 0.3):
            _person(plot, u, v)
            wanted -= 1


def _person(plot: Plot, u: float, v: float) -> None:
    rng, base = plot.rng, plot.street.base(u, v)
    tall, way, stride = rng.uniform(1.5, 1.92), rng.uniform(0, 2 * np.pi), rng.uniform(0.05, 0.25)
    ahead, aside = np.array([np.cos(way), np.sin(way), 0]), np.array([-np.sin(way), np.cos(way), 0])
    foot = np.array([u, v, base])
    plot.take(u, v, 0.35)
    coat, trousers = rng.uniform(0.08, 0.7, 2)
    for s in (-1, 1):
        plot.add(_PERSON, trousers, Cylinder(foot + s * (stride * ahead + 0.09 * aside), 0.075, 0.5 * tall))
        arm = foot + s * (0.25 * aside - 0.5 * stride * ahead) + [0, 0, 0.45 * tall]
        plot.add(_PERSON, coat, Cylinder(arm, 0.05, 0.36 * tall))
    wide = rng.uniform(0.18, 0.24)
    plot.add(_PERSON, coat, Ellipsoid(foot + [0, 0, 0.66 * tall], np.array([wide, wide, 0.2 * tall])))
    plot.add(_PERSON, rng.uniform(0.2, 0.6), Ellipsoid(foot + [0, 0, 0.93 * tall], np.array([0.1, 0.1, 0.075 * tall])))


# Each builder uses the room that earlier ones left.
_BUILDERS: tuple[Callable[[Plot], None], ...] = (_buildings, _vehicles, _poles, _trees, _people)


def lay_out(rng: np.random.Generator) -> Plot:
    """A complete street."""
    plot = Plot(_ground_plan(rng), rng)
    for build in _BUILDERS:
        build(plot)
    return plot


# The scan
_TRIES = 12
_RANGES = {
    "seed": (0, 2**63 - 1),
    "beams": (4, 1024),
    "azimuths": (32, 32768),
    "noise": (0, 1),
    "dropout": (0, 0.95),
    "max_range": (10, 1000),
}


def street_scene(
    seed: int,
    beams: int = 64,
    azimuths: int = 1440,
    *,
    noise: float = 0.02,
    dropout: float = 0.05,
    max_range: float = 80.0,
) -> Scan:
    """A labelled scan of a generated street.

    `beams` lasers between -25 and +12 degrees turn once in `azimuths` steps; each ray gives the nearest echo
    range + noise * N(0, 1), or none: with probability `dropout`, more where little light returns.

    seed: 0 or more; the same seed and arguments give the same scan. beams, azimuths: rays in elevation and azimuth; the
    default of 64 x 1440 gives about 75 to 85 thousand points. noise: standard deviation of the range in metres.
    dropout: share of the echoes lost regardless of strength, in [0, 0.95]. max_range: range in metres beyond which
    echoes are lost.

    Returns a Scan: xyz float32 [P, 3] in metres, sensor at the origin, z up; feats float32 [P, 1] intensity in [0, 1];
    labels of `STREET`, each class present.

    Raises OptionError for an argument out of range, or if some class is not hit in any layout of this seed (too few
    rays).
    """
    _check(seed=seed, beams=beams, azimuths=azimuths, noise=noise, dropout=dropout, max_range=max_range)
    rng = np.random.default_rng([0x5CE4E, seed])
    least = min(30, 1 + beams * azimuths // 3000)
    for _ in range(_TRIES):
        xyz, intensity, labels = _sweep(rng, beams, azimuths, (noise, dropout, max_range))
        if np.bincount(labels, minlength=len(STREET)).min() >= least:
            return Scan(xyz, intensity[:, None], labels, f"street-{seed}", STREET)
    raise OptionError(
        f"beams x azimuths and max_range should be large enough to hit each class {least} times, "
        f"found {beams} x {azimuths} and {max_range} m"
    )


def _check(**values: float) -> None:
    for name, value in values.items():
        low, high = _RANGES[name]
        if not low <= value <= high:
            raise OptionError(f"{name} should be in {low}..{high}, found {value}")


def _ground(street: Street, d: np.ndarray, reach: float) -> Echo:
    """Echoes of the first surface along each ray: road, pavement, or the kerb between them."""
    flat = np.where(d[..., 2] < 0.05)
    rays = d[flat]
    low = terrain_hit(rays, street.height, reach)
    high = terrain_hit(rays, lambda u, v: street.height(u, v) + street.kerb, reach)

    def on_road(t: np.ndarray) -> np.ndarray:
        t = np.where(np.isfinite(t), t, 0)
        return street.on_road(t * rays[:, 0], t * rays[:, 1])

    t = np.where(np.isfinite(high) & ~on_road(high), high, low)
    face = np.isfinite(high) & on_road(high) & (~np.isfinite(low) | ~on_road(low))
    near, far = np.where(face, high, 0), np.where(face, np.minimum(low, 1.5 * reach), 0)
    for _ in range(12):  # bisect between the two levels until the kerb is hit
        middle = (near + far) / 2
        before = on_road(middle)
        near, far = np.where(before, middle, near), np.where(before, far, middle)
    t = np.where(face, far, t)
    t_all, cosine, light = np.full(d.shape[:-1], np.inf), np.zeros(d.shape[:-1]), np.zeros(d.shape[:-1])
    t_all[flat] = np.where(t > reach, np.inf, t)
    cosine[flat] = np.where(face, 0.7, np.maximum(-rays[:, 2], 0.0))
    light[flat] = _ground_light(street, rays, t)
    return Echo(t_all, cosine, np.full(d.shape[:-1], GROUND, np.int8), light)


def _ground_light(street: Street, rays: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Reflectance: dark asphalt with bright lane marks, lighter pavement slabs."""
    t = np.where(np.isfinite(t), t, 0)
    u, v = t * rays[:, 0], t * rays[:, 1]
    patches = 0.06 * np.sin(0.31 * u + street.waves[0, 3]) * np.sin(0.47 * v + street.waves[1, 3])
    road = street.on_road(u, v)
    mark = road & (np.abs(v - street.middle) < 0.08) & (np.mod(u, 6) < 3)
    mark |= road & (np.abs(np.abs(v - street.middle) - street.half + 2.35) < 0.06)
    return np.where(mark, 0.8, np.where(road, 0.24, 0.42) + patches)


def _sweep(
    rng: np.random.Generator, beams: int, azimuths: int, sensor: tuple[float, float, float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One layout, one turn of the sensor: positions [P, 3], intensities [P] and classes [P]."""
    noise, dropout, max_range = sensor
    plot = lay_out(rng)
    # Half of the beams point at the far end of the road, where real sensors are densest too.
    fall = np.concatenate([np.linspace(12, -8, beams // 2, endpoint=False), np.linspace(-8, -25, beams - beams // 2)])
    rays = Rays.spin(np.radians(fall), azimuths, rng)
    echo = cast(rays, _ground(plot.street, rays.d, max_range), plot.items, rng)
    # Speckle: neighbouring echoes of a surface differ, so that intensity alone does not identify a class.
    light = echo.reflectance * rng.lognormal(0, 0.35, echo.t.shape)
    strength = light * (0.3 + 0.7 * echo.cosine) * np.exp(-np.where(np.isfinite(echo.t), echo.t, 0) / 120)
    lost = dropout + (0.9 - dropout) * np.exp(-strength / 0.03) * (echo.t > 4)
    t = echo.t + rng.normal(0, noise, echo.t.shape)
    # Grazing angles and glass return little.
    lost = np.maximum(lost, 0.7 * np.exp(-echo.cosine / 0.04))
    kept = np.isfinite(t) & (t > 0.9) & (t < max_range) & (rng.random(t.shape) > lost)
    turn = rng.uniform(0, 2 * np.pi)
    c, s = np.cos(turn), np.sin(turn)
    xyz = (t[kept][:, None] * rays.d[kept]) @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])
    intensity = np.clip(strength[kept] + rng.normal(0, 0.02, len(xyz)), 0, 1)
    return xyz.astype(np.float32), intensity.astype(np.float32), echo.label[kept].astype(np.int64)
