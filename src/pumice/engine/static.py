"""A network on coordinates and features in buffers of fixed capacity.

The program of the network (engine.program) runs on a tensor whose coordinates lie in a buffer (coords.capacity). The
valid-row count stays on the device, so no size depends on the scene: the same kernel launches serve every scene that
fits, and on a GPU they can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pumice.coords import Geometry, GridSpec, Relation, join_side_streams
from pumice.coords.capacity import BufferedState, Capacities
from pumice.coords.outputs import site_of
from pumice.engine.buffers import Buffers, InputBatch, per_point
from pumice.engine.program import Program
from pumice.errors import CaptureError
from pumice.ops import SparseTensor
from pumice.ops.tensor import is_sparse
from pumice.runtime.launch import outside_inference_mode

Path = tuple[Relation, ...]
"""Relations that lead from the input coordinates to those of a level."""
Stride = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class LevelOutput:
    """Coordinate buffer of a level, int32 [capacity, 1+D], without its kernel maps."""

    coords: Tensor
    stride: Stride

    @property
    def capacity(self) -> int:
        return self.coords.shape[0]


@dataclass(frozen=True, eq=False)
class SparseOutput:
    """Sparse tensor among the results: features [capacity, C] on the coordinates of a level."""

    feats: Tensor
    path: Path


@dataclass(frozen=True, eq=False)
class PointOutput:
    """Tensor among the results with one row per input point; taken: True if gathered from one row per voxel."""

    values: Tensor
    taken: bool


@dataclass(frozen=True, eq=False)
class Results:
    """Results of a run. leaves: tensors, SparseOutputs and PointOutputs of the result; spec: their pytree structure.
    status_words: the status, then the number of voxels that each level has, or needs if it overflowed."""

    leaves: list[Any]
    spec: Any
    levels: Mapping[Path, LevelOutput]
    status_words: Tensor


@dataclass(frozen=True)
class Autocast:
    """Autocast state of a network."""

    kind: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def current(kind: str) -> Autocast:
        return Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def context(self) -> AbstractContextManager[Any]:
        if not self.enabled and not torch.is_autocast_enabled(self.kind):
            return nullcontext()
        # Cached casts of weights would live in a graph's memory pool.
        return torch.autocast(self.kind, self.dtype, self.enabled, cache_enabled=False)


@dataclass(frozen=True, eq=False)
class PaddedProgram:
    """A program run on fixed-capacity buffers. model: the compiled network, or the program itself. site: grid of the
    input; coordinates outside its bounds set the status word."""

    program: Program
    model: nn.Module
    site: GridSpec
    autocast: Autocast

    def run(
        self, buffers: Buffers, capacities: Capacities, poison: bool = False, host_words: Tensor | None = None
    ) -> Results:
        """Run one pass. poison: fill padding rows with NaN wherever a tensor is made. host_words: pinned tensor that
        the status words are copied to, as soon as all maps are built (layers may still run)."""
        with torch.no_grad(), outside_inference_mode():
            entered = buffers.make_input(self.site, BufferedState(capacities, (), poison))
        geometry = entered.x.geometry
        leaves, spec = pytree.tree_flatten(self.forward(entered.x), is_sparse)
        geometry.search()
        found = dict(levels_of(geometry))
        # Kernel maps are not kept: other graphs of the pool reuse their memory.
        levels = {path: LevelOutput(g.coords, g.stride) for path, g in found.items()}
        leaves = [_of_points(_as_output(leaf), entered) for leaf in leaves]
        with join_side_streams(geometry):
            words = status_words_of(geometry, found.values())
            if host_words is not None:
                host_words.copy_(words, non_blocking=True)
        return Results(leaves, spec, levels, words)

    def forward(self, x: SparseTensor) -> Any:
        """The program's result, without gradients."""
        with torch.no_grad(), self.autocast.context():
            return self.program(x)


def _as_output(leaf: Any) -> Any:
    if not isinstance(leaf, SparseTensor):
        return leaf
    if leaf.geometry.buffered is None:
        raise CaptureError("the network returns coordinates that do not derive from those of its input")
    return SparseOutput(leaf.feats, leaf.geometry.buffered.path)


def _of_points(leaf: Any, entered: InputBatch) -> Any:
    """Gather a result with one row per input voxel to one row per point, if the input was points."""
    if entered.inverse is None:
        return leaf
    if isinstance(leaf, SparseOutput):
        return leaf if leaf.path else PointOutput(per_point(leaf.feats, entered.inverse), True)
    if not isinstance(leaf, Tensor) or not leaf.ndim:
        return leaf
    if leaf.shape[0] == len(entered.inverse):
        return PointOutput(leaf, False)
    return PointOutput(per_point(leaf, entered.inverse), True) if leaf.shape[0] == len(entered.x.geometry) else leaf


def status_words_of(geometry: Geometry, levels: Iterable[Geometry]) -> Tensor:
    """int32 [1 + levels]: status of the input, then by level the number of voxels, or the number needed on overflow."""
    clouds = [level.cloud for level in levels]
    return torch.cat([geometry.cloud.status, *[c.count if c.needed is None else c.needed for c in clouds]])


def levels_of(geometry: Geometry) -> Iterator[tuple[Path, Geometry]]:
    """All geometries derived from this one (itself included), with their paths."""
    assert geometry.buffered is not None
    yield geometry.buffered.path, geometry
    seen = {id(geometry)}
    for _, other in geometry.maps.values():
        if other is None or id(other) in seen or other.buffered is None:
            continue
        seen.add(id(other))
        # A map may also lead back to an earlier level.
        if len(other.buffered.path) > len(geometry.buffered.path):
            yield from levels_of(other)


Kind = Path | str
"""Meaning of a result's first axis: voxels of a level (its path), input "points" ("taken": gathered from their voxels),
batch "items", or "whole" (anything else)."""


def kinds_of(results: Results, words: Sequence[int], wanted: Sequence[Any], batch: tuple[int, int]) -> tuple[Kind, ...]:
    """How each result is cropped to a scene, by the eager results `wanted`; or raise CaptureError. batch: items of
    (program, scene)."""
    counts = dict(zip(results.levels, words[1:], strict=True))
    if len(wanted) != len(results.leaves):
        raise CaptureError(f"the network returns {len(wanted)} results eagerly, {len(results.leaves)} captured")
    return tuple(_kind(a, b, results, counts, batch) for a, b in zip(results.leaves, wanted, strict=True))


def _kind(leaf: Any, wanted: Any, results: Results, counts: Mapping[Path, int], batch: tuple[int, int]) -> Kind:
    if isinstance(leaf, SparseOutput):
        return leaf.path
    if isinstance(leaf, PointOutput):
        return "taken" if leaf.taken else "points"
    if not isinstance(leaf, Tensor):
        return "whole"
    if leaf.ndim:
        for path, level in results.levels.items():
            if leaf.shape[0] == level.capacity and wanted.shape[0] == counts[path]:
                return path
        if leaf.shape[1:] == wanted.shape[1:] and (leaf.shape[0], wanted.shape[0]) == batch:
            return "items"
    if leaf.shape != wanted.shape:
        raise CaptureError(
            f"the network returns {list(wanted.shape)} eagerly and {list(leaf.shape)} captured: sizes depend on "
            "the number of voxels in an unsupported way"
        )
    return "whole"


@dataclass(eq=False)
class CropContext:
    """Scene that results are cropped to. own: its geometry, None for points. site: the program's grid. items, points:
    numbers of its batch items and rows. counts: voxels by path. levels: coordinate buffers by path."""

    own: Geometry | None
    site: GridSpec
    items: int
    points: int
    counts: Mapping[Path, int]
    levels: Mapping[Path, LevelOutput]
    cropped_levels: dict[Path, Geometry] = field(default_factory=dict)

    def level(self, path: Path) -> Geometry:
        """Geometry of a level: the scene's own, or a copy cropped from the buffer."""
        if not path and self.own is not None:
            return self.own
        if path not in self.cropped_levels:
            site, own = self.site, self.own
            if own is not None:
                site = replace(site, batch_size=own.batch_size, frame=own.frame)
            for relation in path:
                site = site_of(site, relation)
            self.cropped_levels[path] = Geometry(self.levels[path].coords[: self.counts[path]].clone(), site.unread())
        return self.cropped_levels[path]

    def crop(self, leaf: Any, kind: Kind) -> Any:
        """Copy of the rows of a result that belong to the scene."""
        if isinstance(leaf, SparseOutput):
            return SparseTensor(leaf.feats[: self.counts[leaf.path]].clone(), self.level(leaf.path))
        if isinstance(leaf, PointOutput):
            return leaf.values[: self.points].clone()
        if not isinstance(leaf, Tensor):
            return leaf
        if isinstance(kind, tuple):
            return leaf[: self.counts[kind]].clone()
        return leaf[: self.items].clone() if kind == "items" else leaf.clone()
