"""A network as a static program: over coordinates and features in buffers, of sizes that are settled before.

The network's own forward pass runs unchanged on a tensor whose coordinates lie in a buffer (coords.capacity). No size
in it depends on the scene: how many rows live, the device alone knows. So the same calls serve every scene that fits,
and on a GPU they can be recorded once as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pumice.coords import Geometry, GridSpec, Relation, join_side_streams
from pumice.coords.capacity import BufferedState, Capacities
from pumice.coords.outputs import site_of
from pumice.engine.buffers import Buffers, InputBatch, per_point
from pumice.errors import CaptureError
from pumice.ops import SparseTensor
from pumice.ops.tensor import is_sparse
from pumice.runtime.launch import outside_inference_mode

Path = tuple[Relation, ...]
"""The relations that lead from the first coordinates to those of a level."""
Stride = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class LevelOutput:
    """Coordinates in their buffer, int32 [capacity, 1+D], without the maps between them."""

    coords: Tensor
    stride: Stride

    @property
    def capacity(self) -> int:
        return self.coords.shape[0]


@dataclass(frozen=True, eq=False)
class SparseOutput:
    """A sparse tensor among results: features [capacity, C] on the coordinates of a level."""

    feats: Tensor
    path: Path


@dataclass(frozen=True, eq=False)
class PointOutput:
    """A tensor among results with a row for each point that entered; taken: whether the network has one for each of
    their voxels."""

    values: Tensor
    taken: bool


@dataclass(frozen=True, eq=False)
class Results:
    """What a run gave. leaves: tensors, SparseOutput and PointOutputs of the network's result, which `spec` puts
    together.

    words: the status, then of each level how many voxels it has or, with room for all, would have.
    """

    leaves: list[Any]
    spec: Any
    levels: Mapping[Path, LevelOutput]
    status_words: Tensor


@dataclass(frozen=True)
class Autocast:
    """The autocast that a network runs under."""

    kind: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def now(kind: str) -> Autocast:
        return Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> AbstractContextManager[Any]:
        if not self.enabled and not torch.is_autocast_enabled(self.kind):
            return nullcontext()
        # What is cached of weights would lie in the memory of a graph.
        return torch.autocast(self.kind, self.dtype, self.enabled, cache_enabled=False)


@dataclass(frozen=True, eq=False)
class PaddedProgram:
    """A network over buffers. site: of the first coordinates; its bounds are a box that all of them lie in."""

    model: nn.Module
    site: GridSpec
    autocast: Autocast

    def run(
        self, buffers: Buffers, rooms: Capacities, poison: bool = False, host_words: Tensor | None = None
    ) -> Results:
        """One pass. poison: features of rows that do not live are NaN, wherever a tensor is made. told: pinned, where
        the words of the results are copied to, as soon as all maps are there if layers run beside these."""
        with torch.no_grad(), outside_inference_mode():
            entered = buffers.enter(self.site, BufferedState(rooms, (), poison))
        geometry = entered.x.geometry
        leaves, spec = pytree.tree_flatten(self.eager(entered.x), is_sparse)
        found = dict(levels_of(geometry))
        # Of the maps nothing is kept: their memory is another graph's.
        levels = {path: LevelOutput(g.coords, g.stride) for path, g in found.items()}
        leaves = [_of_points(_bare(leaf), entered) for leaf in leaves]
        with join_side_streams(geometry):
            words = status_words_of(geometry, found.values())
            if host_words is not None:
                host_words.copy_(words, non_blocking=True)
        return Results(leaves, spec, levels, words)

    def eager(self, x: SparseTensor) -> Any:
        """The forward pass as it is."""
        with torch.no_grad(), self.autocast.again():
            return self.model(x)


def _bare(leaf: Any) -> Any:
    if not isinstance(leaf, SparseTensor):
        return leaf
    if leaf.geometry.buffered is None:
        raise CaptureError("the network gives coordinates that it did not make from those of its input")
    return SparseOutput(leaf.feats, leaf.geometry.buffered.path)


def _of_points(leaf: Any, entered: InputBatch) -> Any:
    """What has a row for each of the first voxels has one for each point, where points entered."""
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
    """The status of the first coordinates, then of each level how many voxels it has or, with room for all, would; see
    `join_side_streams`."""
    clouds = [level.cloud for level in levels]
    return torch.cat([geometry.cloud.status, *[c.count if c.needed is None else c.needed for c in clouds]])


def levels_of(geometry: Geometry) -> Iterator[tuple[Path, Geometry]]:
    """All coordinates that were made of these, with their paths."""
    assert geometry.buffered is not None
    yield geometry.buffered.path, geometry
    seen = {id(geometry)}
    for _, other in geometry.maps.values():
        if other is None or id(other) in seen or other.buffered is None:
            continue
        seen.add(id(other))
        # A map may also lead to coordinates that were there before.
        if len(other.buffered.path) > len(geometry.buffered.path):
            yield from levels_of(other)


Kind = Path | str
"""What the first axis of a result counts: the voxels of a level, the "points" that entered ("taken" of the result for
their voxels), "items" of the batch, or ("whole") something else."""


@dataclass(frozen=True, eq=False)
class OutputCropping:
    """How results are cut to the size of a scene. kinds: one for each leaf."""

    kinds: tuple[Kind, ...]

    @staticmethod
    def of(results: Results, words: Sequence[int], wanted: Sequence[Any], batch: tuple[int, int]) -> OutputCropping:
        """What the leaves are, by what the eager network gives for the same scene's voxels; batch: items of the
        program's and of the scene. Raises CaptureError where they cannot be the same."""
        counts = dict(zip(results.levels, words[1:], strict=True))
        if len(wanted) != len(results.leaves):
            raise CaptureError(f"the network gives {len(wanted)} results, and {len(results.leaves)} in buffers")
        return OutputCropping(
            tuple(_kind(a, b, results, counts, batch) for a, b in zip(results.leaves, wanted, strict=True))
        )


def _kind(held: Any, wanted: Any, results: Results, counts: Mapping[Path, int], batch: tuple[int, int]) -> Kind:
    if isinstance(held, SparseOutput):
        return held.path
    if isinstance(held, PointOutput):
        return "taken" if held.taken else "points"
    if not isinstance(held, Tensor):
        return "whole"
    if held.ndim:
        for path, level in results.levels.items():
            if held.shape[0] == level.capacity and wanted.shape[0] == counts[path]:
                return path
        if held.shape[1:] == wanted.shape[1:] and (held.shape[0], wanted.shape[0]) == batch:
            return "items"
    if held.shape != wanted.shape:
        raise CaptureError(
            f"the network gives {list(wanted.shape)} for the example and {list(held.shape)} in buffers: sizes depend "
            "on the number of voxels in a way that is not known"
        )
    return "whole"


@dataclass(eq=False)
class CropContext:
    """The scene that results are given back for: its own coordinates if it has any, how many items it has and, where
    points entered, how many those are; counts by path as the device told them. site: of the first coordinates."""

    own: Geometry | None
    site: GridSpec
    items: int
    points: int
    counts: Mapping[Path, int]
    levels: Mapping[Path, LevelOutput]
    made: dict[Path, Geometry] = field(default_factory=dict)

    def level(self, path: Path) -> Geometry:
        """The coordinates of a level: the scene's own, or a copy of those in the buffer."""
        if not path and self.own is not None:
            return self.own
        if path not in self.made:
            site = self.site
            for relation in path:
                site = site_of(site, relation)
            self.made[path] = Geometry(self.levels[path].coords[: self.counts[path]].clone(), site)
        return self.made[path]

    def cut(self, leaf: Any, kind: Kind) -> Any:
        """A copy of a result's rows that are the scene's."""
        if isinstance(leaf, SparseOutput):
            return SparseTensor(leaf.feats[: self.counts[leaf.path]].clone(), self.level(leaf.path))
        if isinstance(leaf, PointOutput):
            return leaf.values[: self.points].clone()
        if not isinstance(leaf, Tensor):
            return leaf
        if isinstance(kind, tuple):
            return leaf[: self.counts[kind]].clone()
        return leaf[: self.items].clone() if kind == "items" else leaf.clone()
