"""Deduplication of coordinates."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pumice.coords.box import Bounds
from pumice.coords.codes import morton_unique
from pumice.coords.geometry import Geometry, check_form


def unique_coords(
    coords: Tensor,
    stride: int | Sequence[int] = 1,
    spatial_shape: int | Sequence[int] | None = None,
    batch_size: int | None = None,
) -> Geometry:
    """The distinct rows of a user's `coords` int32 [P, 1+D], in (batch, Morton) order.

    The geometry's `inverse` int64 [P]: `distinct[inverse] == coords`. Raises as Geometry.checked(), except duplicates.
    """
    check_form(coords)
    distinct, place = morton_unique(coords, Bounds.of(coords))
    site = Geometry.checked(distinct, stride, spatial_shape, batch_size).site
    return Geometry(distinct, site, place)
