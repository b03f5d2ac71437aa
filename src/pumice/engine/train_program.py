"""A training step (forward, loss, gradients) as a static program over buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from pumice.coords import Geometry, GridSpec, join_side_streams
from pumice.coords.capacity import BufferedState, Capacities
from pumice.engine.buffers import VoxelBuffers, VoxelScene, sample_rows
from pumice.engine.program import Program
from pumice.engine.static import Autocast, LevelOutput, Path, levels_of, status_words_of
from pumice.errors import CaptureError, OptionError, ShapeError
from pumice.ops import SparseTensor
from pumice.runtime.launch import outside_inference_mode

Loss = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class PerItemTarget:
    """Target with one row per batch item, rather than per voxel."""

    values: Tensor


Target = Tensor | PerItemTarget


def values_of(target: Target) -> Tensor:
    return target.values if isinstance(target, PerItemTarget) else target


@dataclass(frozen=True, eq=False)
class Targets(VoxelBuffers):
    """Buffers of voxels and targets. per_voxel: for each target, True if it has one row per voxel."""

    tensors: tuple[Tensor, ...]
    per_voxel: tuple[bool, ...]
    ignored: int

    @staticmethod
    def like(capacity: int, x: SparseTensor, targets: Sequence[Target], ignored: int) -> Targets:
        by_voxel = tuple(_by_voxel(target) for target in targets)
        held = tuple(
            torch.zeros((capacity, *t.shape[1:]) if counts else t.shape, dtype=t.dtype, device=x.device)
            for t, counts in zip(map(values_of, targets), by_voxel, strict=True)
        )
        own = VoxelBuffers.of(capacity, x)
        return Targets(own.coords, own.feats, own.count, held, by_voxel, ignored)

    def first(self, capacity: int) -> Targets:
        held = tuple(t[:capacity] if counts else t for t, counts in zip(self.tensors, self.per_voxel, strict=True))
        return replace(self, coords=self.coords[:capacity], feats=self.feats[:capacity], tensors=held)

    def with_padding_ignored(self, alive: Tensor) -> list[Tensor]:
        """Targets with padding rows replaced: `ignored` for integers, 0 for floats, False for bools."""
        return [
            torch.where(alive.view(-1, *(1,) * (t.ndim - 1)), t, self._filler(t)) if counts else t
            for t, counts in zip(self.tensors, self.per_voxel, strict=True)
        ]

    def _filler(self, target: Tensor) -> Tensor:
        ignored = 0 if target.is_floating_point() or target.dtype == torch.bool else self.ignored
        return target.new_full((), ignored)


def _by_voxel(target: Target) -> bool:
    return isinstance(target, Tensor) and target.ndim > 0


@dataclass(frozen=True, eq=False)
class TrainingSample(VoxelScene):
    """Scene with its targets."""

    targets: tuple[Target, ...]

    def fill(self, buffers: Any) -> None:
        super().fill(buffers)
        for target, held in zip(map(values_of, self.targets), buffers.tensors, strict=True):
            (held[: len(target)] if target.ndim else held).copy_(target)

    def sample(self, most: int, near: bool = False) -> TrainingSample:
        chosen = sample_rows(self.coords[:, 1:], most, near)
        if chosen is None:
            return self
        coords = self.coords[chosen]
        made = Geometry(coords, self.like.geometry.site if self.own is None else self.own.site)
        targets = tuple(t[chosen] if _by_voxel(t) else t for t in self.targets)  # pyright: ignore[reportIndexIssue]
        return TrainingSample(self.feats[chosen], coords, made, self.like, targets)  # pyright: ignore[reportArgumentType]

    def check(self, like: TrainingSample) -> None:
        """Raise ShapeError if the targets do not match those of the example."""
        if len(self.targets) != len(like.targets):
            raise ShapeError(f"the step takes {len(like.targets)} targets, found {len(self.targets)}")
        for number, (mine, theirs) in enumerate(zip(self.targets, like.targets, strict=True)):
            a, b = values_of(mine), values_of(theirs)
            shape = (self.count, *b.shape[1:]) if _by_voxel(theirs) else tuple(b.shape)
            if isinstance(mine, PerItemTarget) != isinstance(theirs, PerItemTarget) or tuple(a.shape) != shape:
                kind = "batch item" if isinstance(theirs, PerItemTarget) else "voxel"
                raise ShapeError(f"target {number} must be {list(shape)}, a row per {kind}, found {list(a.shape)}")
            if a.dtype != b.dtype:
                raise ShapeError(f"target {number} must be {b.dtype}, found {a.dtype}")


@dataclass(frozen=True, eq=False)
class StepOptions:
    """scaler: enabled, or None. clip: largest total gradient norm. ignored: integer target of padding rows."""

    scaler: GradScaler | None = None
    clip: float | None = None
    ignored: int = -100

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise OptionError(f"clip must be a finite norm above 0, found {self.clip}")


@dataclass(frozen=True, eq=False)
class StepResult:
    """Loss, levels and status words (see static.Results) of a pass; gradients are in GradientBuffers."""

    loss: Tensor
    levels: Mapping[Path, LevelOutput]
    status_words: Tensor


class _WithLoss(nn.Module):
    """loss(program(x), *targets) as one module, so that functional_call replaces the parameters that either reads."""

    def __init__(self, program: Program, loss: Loss) -> None:
        super().__init__()
        self.program, self.loss = program, loss

    def forward(self, x: SparseTensor, *targets: Tensor) -> Any:
        return self.loss(self.program(x), *targets)


def _used_directly(loss: Tensor, views: Mapping[Tensor, Tensor]) -> set[Tensor]:
    """The parameters that a loss also depends on without their views in `views`, as a penalty on weights that it holds
    does: the gradient of the view is not all of theirs."""
    seen: set[Any] = {view.grad_fn for view in views.values()}
    left: list[Any] = [loss.grad_fn] if views else []
    found = set[Tensor]()
    while left:
        for node, _ in left.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                found.add(node.variable)
            else:
                left.append(node)
    return found


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy `sources` to `targets`, with one multi-tensor copy for all pairs of equal layout and dtype."""
    alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.stride() != source.stride() or target.dtype != source.dtype:
            target.copy_(source)
            continue
        mine, theirs = alike.setdefault(target.dtype, ([], []))
        mine.append(target)
        theirs.append(source)
    for mine, theirs in alike.values():
        torch._foreach_copy_(mine, theirs)  # pyright: ignore[reportPrivateImportUsage]


@dataclass(eq=False)
class GradientBuffers:
    """Gradient buffers by parameter. infinite: float32 [1], nonzero if the scaler found a non-finite gradient."""

    by_parameter: dict[Tensor, Tensor] = field(default_factory=dict)
    infinite: Tensor | None = None

    def store(self, found: Mapping[Tensor, Tensor]) -> None:
        """Copy gradients into the buffers."""
        for parameter, grad in found.items():
            if parameter not in self.by_parameter:
                # torch gives gradients the layout of their parameter.
                self.by_parameter[parameter] = torch.zeros_like(parameter, dtype=grad.dtype)
        absent = [held for parameter, held in self.by_parameter.items() if parameter not in found]
        if absent:
            torch._foreach_zero_(absent)  # pyright: ignore[reportPrivateImportUsage]
        if found:
            copy_all([self.by_parameter[p] for p in found], list(found.values()))

    def assign_to(self, parameters: Sequence[Tensor]) -> None:
        """Set the buffers as `grad` of the parameters."""
        for parameter in parameters:
            parameter.grad = self.by_parameter.get(parameter)


@dataclass(frozen=True, eq=False)
class StepProgram:
    """Forward, loss and gradients on buffers. program: the compiled model. site: as in PaddedProgram. module_buffers:
    of model and loss; backup: their values before the last pass. modules: of model and loss. replicated: wrapper of the
    model, or None; averaged: parameters whose gradients are averaged over processes."""

    program: Program
    model: nn.Module
    loss: Loss
    site: GridSpec
    autocast: Autocast
    parameters: tuple[Tensor, ...]
    options: StepOptions
    gradients: GradientBuffers
    replicated: DistributedDataParallel | None = None
    averaged: list[Tensor] = field(default_factory=list)
    module_buffers: list[Tensor] = field(default_factory=list)
    backup: list[Tensor] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)

    def run(
        self, buffers: Targets, capacities: Capacities, poison: bool = False, scale: float | None = None
    ) -> StepResult:
        """Run one pass; gradients go to their buffers. poison: as in PaddedProgram. scale: replaces the scaler's."""
        with outside_inference_mode(), torch.enable_grad():
            with torch.no_grad():
                copy_all(self.backup, self.module_buffers)
            entered = buffers.make_input(self.site, BufferedState(capacities, (), poison, True))
            geometry = entered.x.geometry
            views = self._views()
            loss = self.forward_backward(entered.x, buffers.with_padding_ignored(geometry.valid_mask), scale, views)
            geometry.search()
            levels = dict(levels_of(geometry))
            with join_side_streams(geometry):
                words = status_words_of(geometry, levels.values())
            if self.gradients.infinite is not None:
                words = torch.cat([words, self.gradients.infinite.int()])
            return StepResult(loss, {path: LevelOutput(g.coords, g.stride) for path, g in levels.items()}, words)

    def _views(self) -> dict[Tensor, Tensor]:
        """Views of trained parameters, by parameter. A parameter's AccumulateGrad node may outlive a pass (held by
        DistributedDataParallel or earlier results) and belongs to the stream that created it, for which a captured
        graph must not wait. A view has a node of its own."""
        return {p: p.view_as(p) for p in self.model.parameters() if p.requires_grad and not p._backward_hooks}

    def forward_backward(
        self,
        x: SparseTensor,
        targets: Sequence[Tensor],
        scale: float | None = None,
        views: Mapping[Tensor, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """Compute and return the loss; gradients go to their buffers, unscaled and clipped unless averaged first.
        views: see _views; used in place of the parameters."""
        with outside_inference_mode(), torch.enable_grad():
            loss = self.compute_loss(x, targets, views)
            scaler = self.options.scaler
            scaled = scaler.scale(loss) if scaler is not None and scale is None else loss * (scale or 1.0)
            wanted, direct = [p for p in self.parameters if p.requires_grad], _used_directly(loss, views)
            sought = [p if p in direct else views.get(p, p) for p in wanted]
            # Gradients must have the dtype of their parameters, also under the caller's autocast.
            with torch.autocast(loss.device.type, enabled=False):
                grads = torch.autograd.grad(scaled, sought, allow_unused=True)
            with torch.no_grad():
                self._store_gradients({p: g for p, g in zip(wanted, grads, strict=True) if g is not None}, scale)
        return loss.detach()

    def compute_loss(
        self, x: SparseTensor, targets: Sequence[Tensor], views: Mapping[Tensor, Tensor] = MappingProxyType({})
    ) -> Tensor:
        with self.autocast.context():
            both = _WithLoss(self.program, self.loss)
            loss = functional_call(both, self._named(views), (x, *targets), tie_weights=False)
        if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise OptionError(f"the loss must be a scalar that depends on parameters, found {found}")
        return loss

    def _named(self, views: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
        """`views` by name within _WithLoss, one per module: with two, functional_call would leave views there."""
        modules = self.model.named_modules(prefix="program") if views else ()
        placed = [(f"{at}.{name}", p) for at, module in modules for name, p in module._parameters.items()]
        return {name: views[p] for name, p in placed if p is not None and p in views}

    def _store_gradients(self, found: Mapping[Tensor, Tensor], scale: float | None) -> None:
        self.gradients.store(found)
        if scale is not None:
            torch._foreach_div_(list(self.gradients.by_parameter.values()), scale)  # pyright: ignore[reportPrivateImportUsage]
        elif self.replicated is None:
            self._unscale_and_clip()

    def share_buffers(self) -> None:
        """Copy module buffers from the first process, as DistributedDataParallel does before a forward pass."""
        if self.replicated is not None and self.replicated.will_sync_module_buffers():
            self.replicated._sync_buffers()

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average gradients over all processes, as DistributedDataParallel does in the backward pass; then unscale and
        clip them. Missing gradients become 0."""
        assert self.replicated is not None
        group, own = self.replicated.process_group, self.gradients.by_parameter
        alike: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self.averaged:
            grad = own[parameter] if parameter in own else own.setdefault(parameter, torch.zeros_like(parameter))
            alike.setdefault(grad.dtype, []).append(grad)
        for grads in alike.values():
            flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(dist.get_world_size(group))
            dist.all_reduce(flat, group=group)
            parts = flat.split([grad.numel() for grad in grads])
            copy_all(grads, [part.view(grad.shape) for part, grad in zip(parts, grads, strict=True)])
        self._unscale_and_clip()

    def _unscale_and_clip(self) -> None:
        grads, scaler = list(self.gradients.by_parameter.values()), self.options.scaler
        if scaler is not None:
            self._unscale(grads, scaler)
        if self.options.clip is not None:
            total = get_total_norm(grads)
            torch._foreach_mul_(grads, (self.options.clip / (total + 1e-6)).clamp(max=1.0))  # pyright: ignore[reportPrivateImportUsage]

    def _unscale(self, grads: Sequence[Tensor], scaler: GradScaler) -> None:
        """Divide gradients by the scale and record non-finite ones."""
        held = self.gradients
        if held.infinite is None:
            held.infinite = torch.zeros(1, device=grads[0].device)
        held.infinite.zero_()
        scale = scaler._scale
        assert scale is not None
        inverse = scale.double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(list(grads), held.infinite, inverse)  # pyright: ignore[reportPrivateImportUsage]

    def rescale(self) -> None:
        """Update the scaler's scale after a step."""
        scaler, found = self.options.scaler, self.gradients.infinite
        if scaler is None or found is None or scaler._scale is None or scaler._growth_tracker is None:
            return
        factors = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        update = torch._amp_update_scale_  # pyright: ignore[reportPrivateImportUsage]
        update(scaler._scale, scaler._growth_tracker, found, *factors)

    def state(self) -> list[Tensor]:
        """Buffers of the model and the loss, which a pass may write to."""
        own = self.loss.buffers() if isinstance(self.loss, nn.Module) else ()
        return [*self.model.buffers(), *own]

    def guard(self) -> tuple[Any, ...]:
        """Guard of a captured pass: training modes, submodules, and addresses of parameters and buffers."""
        found: list[Any] = []
        for module in self.modules:
            found += (module.training, *map(id, module._modules.values()))
            for held in (module._parameters, module._buffers):
                found += [(id(t), t.data_ptr(), t.requires_grad) for t in held.values() if t is not None]
        return tuple(found)

    def refresh_modules(self) -> None:
        """Re-scan the modules and drop gradient buffers. Raises OptionError for new parameters."""
        parts = [self.model, *([self.loss] if isinstance(self.loss, nn.Module) else [])]
        self.modules[:] = dict.fromkeys(m for part in parts for m in part.modules())
        known = {id(p) for p in self.parameters}
        if any(id(p) not in known for part in parts for p in part.parameters()):
            raise OptionError("the model has new parameters, which the step does not update: call capture_step again")
        self.module_buffers[:] = self.state()
        self.backup[:] = [t.clone() for t in self.module_buffers]
        ignored, named = (), self.model
        if self.replicated is not None:
            ignored, named = self.replicated.parameters_to_ignore, self.replicated.module
        self.averaged[:] = [p for name, p in named.named_parameters() if p.requires_grad and name not in ignored]
        self.gradients.by_parameter.clear()

    @contextmanager
    def restoring_state(self) -> Iterator[None]:
        """Restore buffers, gradients and random states on exit. Raises CaptureError for replaced buffers."""
        held, device = [*self.gradients.by_parameter.values()], self.parameters[0].device
        before, grads = [(t, t.clone()) for t in self.state()], [t.clone() for t in held]
        gpus = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(gpus):
            try:
                yield
            finally:
                if [id(t) for t in self.state()] != [id(t) for t, _ in before]:
                    raise CaptureError("the forward pass replaces module buffers; it must update them in place")
                with torch.no_grad():
                    for tensor, old in (*before, *zip(held, grads, strict=True)):
                        tensor.copy_(old)

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Disable dropout, so that results can be compared."""
        found = [m for m in self.model.modules() if isinstance(m, _DropoutNd) and m.training]
        for module in found:
            module.training = False
        try:
            yield
        finally:
            for module in found:
                module.training = True
