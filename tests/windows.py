"""One relation of each kind of kernel window."""

from __future__ import annotations

from pumice.coords import Relation

RELATIONS = {
    "same": Relation.of(3, 3),
    "pointwise": Relation.of(3, 1),
    "floor": Relation.of(3, 2, stride=2),
    "support": Relation.of(3, 3, stride=2, padding=1),
    "transposed": Relation.of_transposed(3, 2, stride=2),
}
