"""Label sets: names, colours, and the map from a data set's raw ids to class indices."""

import colorsys
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pumice.errors import DtypeError, OptionError, ShapeError

_HEX = re.compile(r"#[0-9a-fA-F]{6}")
_MOST_CLASSES = 1024
# Points with unknown ids per point of a class, up to which these ids are taken for mistakes.
_STRAY = 0.01


@dataclass(frozen=True)
class LabelSet:
    """The classes of a labelled scan; class `i` is called `names[i]` and drawn in `colors[i]` (#rrggbb).

    ignore: label of points excluded from training and evaluation; negative. raw: pairs (raw id in the files, class
    index or `ignore`); empty if files hold class indices.

    Raises ShapeError if names and colours differ in number; OptionError for a repeated name, a colour that is not
    #rrggbb, a non-negative `ignore`, or a raw id mapped to a class that does not exist.
    """

    names: tuple[str, ...]
    colors: tuple[str, ...]
    ignore: int = -1
    raw: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "colors", tuple(self.colors))
        object.__setattr__(self, "raw", tuple((int(r), int(c)) for r, c in self.raw))
        if len(self.names) != len(self.colors):
            raise ShapeError(
                f"expected one colour per name, found {len(self.names)} names and {len(self.colors)} colours"
            )
        if len(set(self.names)) != len(self.names):
            raise OptionError(f"class names must differ, found {list(self.names)}")
        bad = [c for c in self.colors if not _HEX.fullmatch(c)]
        if bad:
            raise OptionError(f"colours are written #rrggbb, found {bad[0]!r}")
        if self.ignore >= 0:
            raise OptionError(f"ignore must be negative, found {self.ignore}")
        outside = [c for _, c in self.raw if c != self.ignore and not 0 <= c < len(self.names)]
        if outside:
            raise OptionError(f"raw ids map to classes 0..{len(self.names) - 1} or {self.ignore}, found {outside[0]}")

    def __len__(self) -> int:
        return len(self.names)

    def from_raw(self, raw: np.ndarray) -> np.ndarray:
        """Class indices int64 [P] of the raw ids [P]; OptionError for an unknown id."""
        ids, inverse = np.unique(np.asarray(raw), return_inverse=True)
        table = dict(self.raw)
        unknown = [int(i) for i in ids if int(i) not in table]
        if unknown:
            raise OptionError(f"raw label ids known: {sorted(table)}, found {unknown[:8]}")
        return np.array([table[int(i)] for i in ids], np.int64)[inverse.reshape(-1)]


def generic_labels(values: Iterable[int] | np.ndarray, ignore: int = -1) -> LabelSet:
    """A label set for data of which only the label values are known.

    Each different non-negative value becomes a class `class <value>`, in ascending order; negative values are ignored.
    Colours depend on the value only, so they agree between scans. Raises DtypeError for values that are not integers,
    OptionError for more than 1024 different ones, which are hardly classes.
    """
    found = np.unique(np.asarray(values))
    if found.size and not np.issubdtype(found.dtype, np.integer):
        raise DtypeError(f"labels are integers, found dtype {found.dtype}")
    kept = [int(v) for v in found if v >= 0]
    if len(kept) > _MOST_CLASSES:
        raise OptionError(f"at most {_MOST_CLASSES} classes, found {len(kept)} different label values")
    raw = [(v, i) for i, v in enumerate(kept)] + [(int(v), ignore) for v in found if v < 0]
    return LabelSet(tuple(f"class {v}" for v in kept), tuple(_hue(v) for v in kept), ignore, tuple(raw))


def known_or_generic(raw: np.ndarray, label_set: LabelSet, path: Path) -> tuple[np.ndarray, LabelSet]:
    """Raw ids [P] of a file, and their label set: `label_set` if it knows them, else a generic one.

    Rare unknown ids are ignored; frequent ones make the set generic. Either way warns (UserWarning), unless none of the
    ids is a class of `label_set`.
    """
    known = np.isin(raw, [r for r, _ in label_set.raw])
    if known.all():
        return raw, label_set
    classed = int(np.isin(raw, [r for r, c in label_set.raw if c != label_set.ignore]).sum())
    strays = np.unique(raw[~known]).tolist()
    lost = len(raw) - int(known.sum())
    message = f"{path}: {lost} of {len(raw)} labels are {strays[:8]}, no ids of {', '.join(label_set.names[:2])}, ..."
    if lost <= _STRAY * classed:
        warnings.warn(f"{message}; they are ignored", stacklevel=2)
        return np.where(known, raw, next(r for r, c in label_set.raw if c == label_set.ignore)), label_set
    if classed:
        warnings.warn(f"{message}; the labels are taken as one class per value", stacklevel=2)
    return raw, generic_labels(raw)


def _hue(value: int) -> str:
    # Golden-ratio steps keep neighbouring values apart on the colour circle.
    hue = (0.11 + value * 0.61803398875) % 1.0
    level = (0.95, 0.75, 0.55)[value % 3]
    r, g, b = (round(255 * c) for c in colorsys.hsv_to_rgb(hue, 0.65, level))
    return f"#{r:02x}{g:02x}{b:02x}"


def _from_table(ignored: str, table: str) -> LabelSet:
    """A label set from the ignored raw ids, and lines of name, colour and raw ids."""
    rows = [line.partition("#") for line in table.strip().splitlines()]
    names, rest = [name.strip() for name, _, _ in rows], [right.split() for _, _, right in rows]
    raw = [(int(i), -1) for i in ignored.split()]
    raw += [(int(i), c) for c, words in enumerate(rest) for i in words[1:]]
    return LabelSet(tuple(names), tuple("#" + words[0] for words in rest), raw=tuple(raw))


SEMANTIC_KITTI = _from_table(
    "0 1 52 99",
    """
    car            #6496f5  10 252
    bicycle        #64e6f5  11
    motorcycle     #1e3c96  15
    truck          #501eb4  18 258
    other-vehicle  #0000ff  13 16 20 256 257 259
    person         #ff1e1e  30 254
    bicyclist      #ff28c8  31 253
    motorcyclist   #961e5a  32 255
    road           #ff00ff  40 60
    parking        #ff96ff  44
    sidewalk       #4b004b  48
    other-ground   #af004b  49
    building       #ffc800  50
    fence          #ff7832  51
    vegetation     #00af00  70
    trunk          #873c00  71
    terrain        #96f050  72
    pole           #fff096  80
    traffic-sign   #ff0000  81
    """,
)
"""The 19 single-scan classes of SemanticKITTI with its published learning map (moving counts as static)."""

NUSCENES = _from_table(
    "0 1 5 7 8 10 11 13 19 20 29 31",
    """
    barrier               #708090  9
    bicycle               #dc143c  14
    bus                   #ff7f50  15 16
    car                   #ff9e00  17
    construction vehicle  #e99646  18
    motorcycle            #ff3d63  21
    pedestrian            #0000e6  2 3 4 6
    traffic cone          #2f4f4f  12
    trailer               #ff8c00  22
    truck                 #ff6347  23
    driveable surface     #00cfbf  24
    other flat            #af004b  25
    sidewalk              #4b004b  26
    terrain               #70b43c  27
    manmade               #deb887  28
    vegetation            #00af00  30
    """,
)
"""The 16 lidarseg challenge classes of nuScenes."""

ASPRS = _from_table(
    "0 1 7 12 18",
    """
    ground             #b48c5a  2 8
    low vegetation     #b4e68c  3
    medium vegetation  #5ac850  4
    high vegetation    #00821e  5
    building           #e6785a  6
    water              #3c8ce6  9
    rail               #6e5a78  10
    road               #6e6e6e  11
    wire guard         #f0dc50  13
    wire conductor     #f0b400  14
    tower              #8c50b4  15
    wire connector     #c88c28  16
    bridge             #b4b4c8  17
    """,
)
"""The point classes of LAS files; unclassified, noise and overlap points are ignored."""

STREET = _from_table(
    "",
    """
    ground    #8c8378  0
    building  #e0a458  1
    vehicle   #3f7fd9  2
    pole      #f2d544  3
    tree      #3f9b4f  4
    person    #d9345f  5
    """,
)
"""The six classes of the generated street scenes."""
