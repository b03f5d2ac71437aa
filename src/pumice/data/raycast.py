"""A spinning multi-beam LiDAR at the origin, and shapes with exact ray intersections in numpy.

Every ray is p = t * d with a unit vector d; a shape returns the smallest t in front of the sensor and the cosine of the
angle of incidence there. Only rays that can hit a shape's bounding sphere are tested.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Hit = tuple[np.ndarray, np.ndarray]
_MISS = np.inf
_TINY = 1e-12


@dataclass(frozen=True, eq=False)
class Convex:
    """The points with normals [M, 3] @ p <= offsets [M]: boxes, and cabins with slanted windows."""

    normals: np.ndarray
    offsets: np.ndarray
    centre: np.ndarray
    radius: float

    def hit(self, d: np.ndarray, rng: np.random.Generator) -> Hit:
        t, cosine, _ = self._enter(d)
        return t, cosine

    def _enter(self, d: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(distance, cosine, number) of the plane where each ray enters: the last plane crossed inwards."""
        near, far = np.full(d.shape[:-1], -_MISS), np.full(d.shape[:-1], _MISS)
        cosine, face = np.zeros(d.shape[:-1]), np.zeros(d.shape[:-1], np.int8)
        for i, (normal, offset) in enumerate(zip(self.normals, self.offsets, strict=True)):
            slope = d @ normal
            inwards = slope < 0
            # Parallel to the plane: infinitely far, with the sign of the side on which the ray runs.
            t = offset / np.where(np.abs(slope) < _TINY, np.where(inwards, -_TINY, _TINY), slope)
            later = inwards & (t > near)
            near, cosine, face = (np.where(later, t, near), np.where(later, -slope, cosine), np.where(later, i, face))
            far = np.where(inwards, far, np.minimum(far, t))
        return np.where((near < far) & (near > 0), near, _MISS), cosine, face


@dataclass(frozen=True, eq=False)
class Facade(Convex):
    """A building: a convex block whose walls have windows, set back and hard to see."""

    pitch: tuple[float, float] = (3.0, 3.0)
    share: float = 0.5

    def hit(self, d: np.ndarray, rng: np.random.Generator) -> Hit:
        t, cosine, face = self._enter(d)
        p = np.where(np.isfinite(t), t, 0.0)[..., None] * d - self.centre
        normal = self.normals[face]
        along = p[..., 1] * normal[..., 0] - p[..., 0] * normal[..., 1]
        pane = (np.mod(along / self.pitch[0], 1) < self.share) & (np.mod(p[..., 2] / self.pitch[1], 1) < self.share)
        pane &= (np.abs(normal[..., 2]) < 0.5) & np.isfinite(t)
        return t + np.where(pane, 0.15 / np.maximum(cosine, 0.2), 0), np.where(pane, 0.12 * cosine, cosine)


@dataclass(frozen=True, eq=False)
class Cylinder:
    """A vertical cylinder between two heights, without caps; `foot` is (x, y, lowest z)."""

    foot: np.ndarray
    width: float
    height: float

    @property
    def centre(self) -> np.ndarray:
        return self.foot + [0, 0, self.height / 2]

    @property
    def radius(self) -> float:
        return float(np.hypot(self.height / 2, self.width))

    def hit(self, d: np.ndarray, rng: np.random.Generator) -> Hit:
        flat = d[..., :2]
        a, b = (flat * flat).sum(-1), flat @ self.foot[:2]
        inside = b * b - a * (self.foot[:2] @ self.foot[:2] - self.width**2)
        t = (b - np.sqrt(np.maximum(inside, 0))) / np.maximum(a, _TINY)
        z = t * d[..., 2] - self.foot[2]
        met = (inside > 0) & (t > 0) & (z >= 0) & (z <= self.height)
        cosine = (b - t * a) / self.width
        return np.where(met, t, _MISS), np.abs(cosine)


@dataclass(frozen=True, eq=False)
class Ellipsoid:
    """An ellipsoid with axes along x, y, z; foliage lets rays in for `depth` > 0 metres on average."""

    centre: np.ndarray
    axes: np.ndarray
    depth: float = 0.0

    @property
    def radius(self) -> float:
        return float(self.axes.max())

    def hit(self, d: np.ndarray, rng: np.random.Generator) -> Hit:
        s, c = d / self.axes, self.centre / self.axes
        a, b = (s * s).sum(-1), s @ c
        inside = b * b - a * (c @ c - 1)
        root = np.sqrt(np.maximum(inside, 0))
        t, last = (b - root) / a, (b + root) / a
        if self.depth:
            # The path to the first leaf is exponential; a path longer than the crown passes through.
            t = np.maximum(t, 0) + rng.exponential(self.depth, t.shape)
            return np.where((inside > 0) & (t < last), t, _MISS), rng.uniform(0.3, 1.0, t.shape)
        normal = (t[..., None] * s - c) / self.axes
        cosine = -(normal * d).sum(-1) / np.maximum(np.linalg.norm(normal, axis=-1), _TINY)
        return np.where((inside > 0) & (t > 0), t, _MISS), np.abs(cosine)


Shape = Convex | Cylinder | Ellipsoid
"""What rays can hit: `centre` [3] and `radius` bound it; hit() gives the distance (inf if missed) and the cosine of
incidence [...] of the rays `d` [..., 3]."""


def box(centre: Sequence[float], size: Sequence[float], yaw: float = 0.0, top: tuple[float, float] = (1, 1)) -> Convex:
    """A box (length, width, height), rotated by `yaw` radians about z; `top` scales its upper face."""
    return Convex(*_faces(centre, size, yaw, top), np.asarray(centre, float), _half_diagonal(size))


def _half_diagonal(size: Sequence[float]) -> float:
    return float(np.linalg.norm(size)) / 2


def _faces(
    centre: Sequence[float], size: Sequence[float], yaw: float, top: tuple[float, float] = (1, 1)
) -> tuple[np.ndarray, np.ndarray]:
    length, width, height = size
    lean_u, lean_v = length * (1 - top[0]) / 2 / height, width * (1 - top[1]) / 2 / height
    local = np.array([[1, 0, lean_u], [-1, 0, lean_u], [0, 1, lean_v], [0, -1, lean_v], [0, 0, 1], [0, 0, -1]], float)
    reach = np.array([length * (1 + top[0]) / 4] * 2 + [width * (1 + top[1]) / 4] * 2 + [height / 2] * 2)
    scale = np.linalg.norm(local, axis=1)
    c, s = np.cos(yaw), np.sin(yaw)
    normals = (local / scale[:, None]) @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])
    return normals, reach / scale + normals @ np.asarray(centre, float)


def facade(centre: Sequence[float], size: Sequence[float], yaw: float, pitch: tuple[float, float]) -> Facade:
    """A building of `size` with windows every `pitch` metres along the wall and upwards."""
    return Facade(*_faces(centre, size, yaw), np.asarray(centre, float), _half_diagonal(size), pitch)


@dataclass(frozen=True, eq=False)
class Primitive:
    """A shape in the scene, with its class and reflectance (0 to 1)."""

    shape: Shape
    label: int
    reflectance: float


@dataclass(frozen=True, eq=False)
class Rays:
    """One turn of the sensor: `elevation` [B] descending, `azimuth` [A] ascending (radians); `d` [B, A, 3]."""

    elevation: np.ndarray
    azimuth: np.ndarray
    d: np.ndarray

    @staticmethod
    def spin(elevation: np.ndarray, azimuths: int, rng: np.random.Generator) -> "Rays":
        """The rays of a full turn; beams are slightly offset in azimuth, as in real sensors."""
        azimuth = np.linspace(-np.pi, np.pi, azimuths, endpoint=False)
        step = 2 * np.pi / azimuths
        turned = azimuth + step * rng.uniform(-0.5, 0.5, (len(elevation), 1))
        up = elevation[:, None] + rng.normal(0, 2e-4, turned.shape)
        flat = np.cos(up)
        return Rays(elevation, azimuth, np.stack([flat * np.cos(turned), flat * np.sin(turned), np.sin(up)], axis=-1))

    def around(self, shape: Shape) -> Iterator[tuple[slice, slice]]:
        """The blocks of rays (beams, columns) that can hit the bounding sphere of a shape."""
        x, y, z = shape.centre
        flat, radius = float(np.hypot(x, y)), shape.radius * 1.001
        rows, columns = len(self.elevation), len(self.azimuth)
        if radius >= flat:
            yield slice(0, rows), slice(0, columns)
            return
        wide = np.arcsin(radius / flat) + 2 * np.pi / columns
        high = np.arcsin(min(1.0, radius / np.hypot(flat, z))) + 2e-3
        middle = np.arctan2(z, flat)
        r0, r1 = np.searchsorted(-self.elevation, [-(middle + high), -(middle - high)])
        first = (np.arctan2(y, x) - wide + np.pi) / (2 * np.pi) * columns
        c0, count = int(np.floor(first)) % columns, min(columns, int(wide / np.pi * columns) + 2)
        yield slice(r0, r1), slice(c0, min(c0 + count, columns))
        if c0 + count > columns:
            yield slice(r0, r1), slice(0, c0 + count - columns)


@dataclass(frozen=True, eq=False)
class Echo:
    """Echoes by ray [B, A]: distance (inf: none), cosine of incidence, class and reflectance."""

    t: np.ndarray
    cosine: np.ndarray
    label: np.ndarray
    reflectance: np.ndarray


def cast(rays: Rays, ground: Echo, items: Sequence[Primitive], rng: np.random.Generator) -> Echo:
    """The nearest echo of every ray, of the ground or an item."""
    t, cosine, label, reflectance = (v.copy() for v in (ground.t, ground.cosine, ground.label, ground.reflectance))
    for item in items:
        for block in rays.around(item.shape):
            far, angle = item.shape.hit(rays.d[block], rng)
            nearer = far < t[block]
            t[block] = np.where(nearer, far, t[block])
            cosine[block] = np.where(nearer, angle, cosine[block])
            label[block] = np.where(nearer, item.label, label[block])
            reflectance[block] = np.where(nearer, item.reflectance, reflectance[block])
    return Echo(t, cosine, label, reflectance)


def terrain_hit(d: np.ndarray, height: Callable[[np.ndarray, np.ndarray], np.ndarray], reach: float) -> np.ndarray:
    """Distance [...] to the gently sloped ground z = height(x, y); inf beyond `reach`."""

    def above(t: np.ndarray) -> np.ndarray:
        return t * d[..., 2] - height(t * d[..., 0], t * d[..., 1])

    t = np.full(d.shape[:-1], 5.0)
    value = above(t)
    for _ in range(5):  # Newton; the difference quotient over 0.5 m is exact for the plane part of the slope.
        slope = (above(t + 0.5) - value) / 0.5
        t = np.clip(t - value / np.minimum(slope, -1e-4), 0, 2 * reach)
        value = above(t)
    return np.where((t < reach) & (np.abs(value) < 0.02), t, _MISS)
