"""The street generator: the same for a seed, labelled as the geometry says, and like a sensor's scan."""

import numpy as np
import pytest

from pumice.data import STREET, Scan, street_scene
from pumice.data.raycast import Cylinder, Ellipsoid, Rays, box, facade
from pumice.errors import OptionError

SEEDS = range(6)
SCENES = {seed: street_scene(seed) for seed in SEEDS}
CLASSES = {name: i for i, name in enumerate(STREET.names)}


def _of(scan: Scan, name: str) -> np.ndarray:
    return scan.xyz[scan.labels == CLASSES[name]]


def test_a_seed_gives_one_scan() -> None:
    again = street_scene(3)
    np.testing.assert_array_equal(again.xyz, SCENES[3].xyz)
    np.testing.assert_array_equal(again.feats, SCENES[3].feats)
    np.testing.assert_array_equal(again.labels, SCENES[3].labels)
    assert again.name == "street-3"
    assert not np.array_equal(SCENES[0].xyz[:100], SCENES[1].xyz[:100])


@pytest.mark.parametrize("seed", SEEDS)
def test_size_and_classes(seed: int) -> None:
    scan = SCENES[seed]
    assert 30_000 <= len(scan) <= 120_000
    assert scan.label_set == STREET
    assert scan.feats.shape == (len(scan), 1)
    assert scan.feats.min() >= 0
    assert scan.feats.max() <= 1
    assert np.linalg.norm(scan.xyz, axis=1).max() <= 80
    share = np.array(list(scan.label_counts().values())) / len(scan)
    assert min(scan.label_counts().values()) >= 30
    assert share[CLASSES["ground"]] > 0.3
    assert share[CLASSES["person"]] < 0.08
    assert share[CLASSES["pole"]] < 0.05


@pytest.mark.parametrize("seed", SEEDS)
def test_labels_follow_the_geometry(seed: int) -> None:
    scan = SCENES[seed]
    ground = _of(scan, "ground")
    near = np.linalg.norm(ground[:, :2], axis=1) < 8
    assert np.abs(ground[near, 2].mean() + 1.75) < 0.35
    # A plane and a few centimetres of rolling describe the ground.
    basis = np.concatenate([ground[:, :2], np.ones((len(ground), 1))], axis=1)
    plane = np.linalg.lstsq(basis, ground[:, 2], rcond=None)[0]
    assert np.quantile(np.abs(basis @ plane - ground[:, 2]), 0.99) < 0.6

    def above(name: str) -> np.ndarray:
        points = _of(scan, name)
        return points[:, 2] - points[:, :2] @ plane[:2] - plane[2]

    for name in STREET.names[1:]:
        assert np.quantile(above(name), 0.01) > -0.8, name
    assert np.quantile(above("person"), 0.99) < 2.6
    assert np.quantile(above("vehicle"), 0.99) < 4.0
    assert above("building").max() > 4
    assert np.median(above("tree")) > 1


def test_no_class_can_be_told_by_its_brightness() -> None:
    values = np.concatenate([s.feats[:, 0] for s in SCENES.values()])
    labels = np.concatenate([s.labels for s in SCENES.values()])
    counts = np.stack([np.histogram(values[labels == c], bins=50, range=(0, 1))[0] for c in CLASSES.values()])
    recall = counts / counts.sum(1, keepdims=True)
    # The best rule from intensity alone, with all classes weighed alike, stays close to guessing (1/6).
    assert recall.max(0).sum() / 6 < 0.36


def test_height_alone_is_a_poor_rule() -> None:
    z = np.concatenate([s.xyz[:, 2] for s in SCENES.values()])
    labels = np.concatenate([s.labels for s in SCENES.values()])
    counts = np.stack([np.histogram(z[labels == c], bins=80, range=(-6, 16))[0] for c in CLASSES.values()])
    recall = counts / counts.sum(1, keepdims=True)
    assert recall.max(0).sum() / 6 < 0.6


def test_options_do_what_they_say() -> None:
    small = street_scene(1, beams=32, azimuths=720)
    assert 10_000 < len(small) < 24_000
    assert min(small.label_counts().values()) >= 1
    near = street_scene(1, max_range=30.0)
    assert np.linalg.norm(near.xyz, axis=1).max() <= 30
    assert len(street_scene(1, dropout=0.5)) < 0.7 * len(SCENES[1])


def test_noise_is_along_the_ray() -> None:
    quiet, loud = street_scene(2, noise=0.0, dropout=0.0), street_scene(2, noise=0.1, dropout=0.0)
    assert len(quiet) == len(loud)
    a, b = np.linalg.norm(quiet.xyz, axis=1), np.linalg.norm(loud.xyz, axis=1)
    assert 0.09 < np.std(b - a) < 0.11
    np.testing.assert_allclose(quiet.xyz / a[:, None], loud.xyz / b[:, None], atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"beams": 2},
        {"azimuths": 0},
        {"noise": -0.1},
        {"dropout": 1.0},
        {"max_range": 1e9},
        {"beams": 4, "azimuths": 32, "max_range": 10, "dropout": 0.95},
    ],
)
def test_bad_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="should be"):
        street_scene(0, **options)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(OptionError, match=r"seed should be in 0\.\..*, found -1"):
        street_scene(-1)


def test_shapes_are_met_where_they_stand() -> None:
    rng = np.random.default_rng(0)
    ahead = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]])
    shapes = {
        9.0: box((10, 0, 0), (2, 4, 2)),
        8.0: box((10, 0, 0), (2, 4, 2), np.pi / 2),
        9.5: Cylinder(np.array([10.0, 0, -1]), 0.5, 2.0),
        7.0: Ellipsoid(np.array([10.0, 0, 0]), np.array([3.0, 1, 1])),
    }
    for distance, shape in shapes.items():
        t, cosine = shape.hit(ahead, rng)
        np.testing.assert_allclose(t, [distance, np.inf, np.inf], rtol=1e-9)
        np.testing.assert_allclose(cosine[0], 1)
    t, cosine = facade((10, 0.4, 0), (2, 4, 2), 0.0, (3.0, 3.0)).hit(ahead, rng)
    assert t[0] in (9.0, 9.15)
    slanted = box((10, 0, 0), (4, 2, 2), 0.0, (0.5, 1.0))
    t, cosine = slanted.hit(ahead, rng)
    np.testing.assert_allclose(t[0], 8.5)
    np.testing.assert_allclose(cosine[0], 2 / np.sqrt(5), rtol=1e-6)
    leaves = Ellipsoid(np.array([10.0, 0, 0]), np.array([1.0, 1, 1]), depth=0.3)
    t, _ = leaves.hit(np.repeat(ahead[:1], 2000, axis=0), rng)
    inside = t[np.isfinite(t)]
    assert inside.min() >= 9 and inside.max() <= 11
    assert 0.2 < inside.mean() - 9 < 0.4


@pytest.mark.parametrize("place", [(10, 0, 0), (-10, 0.2, 1), (-6, -6, -2), (1.0, 0.5, 0)])
def test_only_rays_that_miss_are_left_out(place: tuple[float, float, float]) -> None:
    rng = np.random.default_rng(1)
    rays = Rays.spin(np.radians(np.linspace(12, -25, 40)), 360, rng)
    shape = box(place, (2.0, 1.5, 1.7), 0.3)
    whole, _ = shape.hit(rays.d, rng)
    asked = np.zeros(whole.shape, bool)
    for block in rays.around(shape):
        asked[block] = True
    assert np.isfinite(whole).any()
    assert not np.isfinite(whole[~asked]).any()
