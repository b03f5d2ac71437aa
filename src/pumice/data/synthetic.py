"""Generated, labelled street scenes: a random street layout, scanned by a spinning LiDAR.

The sensor is at the origin, as in driving data, about 1.75 m above a road with slopes. A layout uses street
coordinates: u along the street, v across it; the finished scan is rotated by a random angle.
"""

import numpy as np

from pumice.data.labels import STREET
from pumice.data.raycast import Echo, Rays, cast, terrain_hit
from pumice.data.scan import Scan
from pumice.data.street import GROUND, Street, lay_out
from pumice.errors import OptionError

__all__ = ["street_scene"]

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
    """Road, pavement and the kerb between them: the first of the three surfaces along each ray."""
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
