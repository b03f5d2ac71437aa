"""A scan in compact form for the page: few bytes, plain JSON values, no torch."""

import base64
from typing import Any

import numpy as np

__all__ = ["code_type", "packed_view"]


def packed_view(
    xyz: np.ndarray, labels: np.ndarray | None, prediction: np.ndarray | None, classes: int, limit: int
) -> dict[str, Any]:
    """A scan in 8 bytes a point: uint16 per axis between the bounds (3 mm over 200 m), and two class codes. xyz [P, 3]
    metres; labels, prediction int [P] or None. At most `limit` finite points are drawn, by a seeded choice. Counts and
    accuracy are those of all P points."""
    xyz = np.asarray(xyz, dtype=np.float64)
    labels = _codes(labels, classes)
    prediction = _codes(prediction, classes)
    finite = np.flatnonzero(np.isfinite(xyz).all(axis=1))
    drawn = finite
    if len(finite) > limit:
        drawn = np.sort(np.random.default_rng(0).choice(finite, size=limit, replace=False))
    frame = _framing(xyz[finite])
    unit = (frame["high"] - frame["low"]) / 65535
    packed = np.rint((xyz[drawn] - frame["origin"] - frame["low"]) / unit)
    return {
        "total": len(xyz),
        "shown": len(drawn),
        "xyz": _base64(packed.astype("<u2")),
        "labels": None if labels is None else _base64(labels[drawn]),
        "prediction": None if prediction is None else _base64(prediction[drawn]),
        **_view_counts(labels, prediction, classes, len(xyz)),
        **{key: value.tolist() for key, value in frame.items()},
        "unit": unit.tolist(),
    }


def _view_counts(labels: np.ndarray | None, prediction: np.ndarray | None, classes: int, total: int) -> dict[str, Any]:
    """Points per class (last: none), right/wrong/unlabelled, and accuracy; all of the whole scan."""
    counts: dict[str, list[int]] = {"points": [total]}
    for key, codes in (("label", labels), ("prediction", prediction)):
        if codes is not None:
            counts[key] = np.bincount(np.minimum(codes, classes), minlength=classes + 1).tolist()
    accuracy = None
    if labels is not None and prediction is not None:
        known = labels < classes
        right = int((known & (labels == prediction)).sum())
        counts["error"] = [right, int(known.sum()) - right, int((~known).sum())]
        accuracy = right / int(known.sum()) if known.any() else None
    return {"counts": counts, "accuracy": accuracy}


def _framing(xyz: np.ndarray) -> dict[str, np.ndarray]:
    """The median of all points as origin, their bounds relative to it, and the span of most of them."""
    if not len(xyz):
        xyz = np.zeros((1, 3))
    # Relative to the median, because the page draws in float32: national grids have coordinates of millions of metres.
    origin = np.median(xyz, axis=0)
    xyz = xyz - origin
    low, high = xyz.min(axis=0), xyz.max(axis=0)
    bulk = np.percentile(xyz, (3, 97), axis=0)
    span = max(float((bulk[1] - bulk[0]).max()), float((high - low).max()) / 8, 1e-3)
    # A flat cloud still needs an axis of some height.
    thin = np.maximum(0, 1e-3 * span - (high - low)) / 2
    return {"low": low - thin, "high": high + thin, "origin": origin, "span": np.asarray(span)}


def _codes(values: np.ndarray | None, classes: int) -> np.ndarray | None:
    """Class codes as small unsigned integers; anything that is not a class becomes the largest one."""
    if values is None:
        return None
    values = np.asarray(values).astype(np.int64)
    code = code_type(classes)
    return np.where((values >= 0) & (values < classes), values, np.iinfo(code).max).astype(code)


def code_type(classes: int) -> type[np.unsignedinteger]:
    """The smallest unsigned integer type for every class and one more code for none."""
    return np.uint8 if classes < 255 else np.uint16


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")
