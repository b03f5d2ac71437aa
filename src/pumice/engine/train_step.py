"""A training step with its kernel maps as CUDA graphs: coordinates, features and targets in, parameters updated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from pumice.coords.capacity import CapacityPlanner, Shares
from pumice.engine.buckets import CapacityBucket, CapacityMargins, CapturedModule, GraphRunner, Limits, on
from pumice.engine.buffers import ModelInput, VoxelScene
from pumice.engine.capture import Box, check_example, check_scene, site_within
from pumice.engine.compare import AMPLIFIED, steps_differ
from pumice.engine.optimizer_step import CapturedOptimizerStep, capturable
from pumice.engine.static import Autocast
from pumice.engine.train_program import (
    GradientBuffers,
    Loss,
    PerItemTarget,
    StepOptions,
    StepProgram,
    StepResult,
    Target,
    Targets,
    TrainingSample,
    copy_all,
    values_of,
)
from pumice.errors import CaptureError, DeviceError, DtypeError, OptionError, ShapeError
from pumice.ops import SparseTensor
from pumice.runtime.launch import outside_inference_mode


def capture_step(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizer,
    example: SparseTensor,
    *targets: Target,
    max_voxels: int | None = None,
    level_capacity: Shares = None,
    buckets: float | Sequence[int] = 1.5,
    margin: float = 1.5,
    box: Box | None = None,
    scaler: GradScaler | None = None,
    clip: float | None = None,
    ignored: int = -100,
) -> CapturedStep:
    """A step of training, its kernel maps included, as CUDA graphs: forward, loss and gradients as one for each of a
    few capacities, and the optimizer's update as another.

        step = pm.capture_step(net, lambda y, labels: F.cross_entropy(y.feats, labels), optimizer, x, labels)
        for x, labels in loader:
            value = step(x, labels)

    A step does what these lines do, within rounding:

        optimizer.zero_grad(); value = loss(model(x), labels); value.backward(); optimizer.step()

    under the autocast that is on now. Between the two graphs a few numbers are read: a scene that had no room, or is
    not for a graph, changes nothing before it runs eagerly; where an inner level had no room, its capacity is planned
    and captured anew, up to three times. Rows past the scene's voxels do not live: their features and gradients are 0
    wherever a loss or a module reads them, BatchNorm and the other norms and pools of pumice.nn count living ones
    alone, and targets are `ignored` there (of floats 0, of bools False). So cross_entropy with ignore_index is right as
    it is; a mean over all rows is not: see pumice.ops.row_mean and SparseTensor.living. The capture compares loss and
    gradients of the example with eager ones, with NaN in rows that do not live.

    Parameters
    ----------
    model: a module that takes one SparseTensor, in training or with parts in evaluation. Capturing leaves its
        parameters, buffers and random states as they are.
    loss: of what the model gives and the targets; a scalar. A function, or a module with buffers of its own.
    optimizer: its update is a graph where it can be (capturable=True, or SGD), from its second step on, as long as its
        numbers stay: a learning rate that changes each step is best a tensor. Any other updates eagerly.
    example: a typical scene. Its number of batch items is that of all; others run eagerly.
    targets: tensors with a row for each voxel of the example, scalars, or PerItem(tensor) with a row for each batch
        item.
    max_voxels, level_capacity, buckets, margin, box: as in `capture`.
    scaler: of a loss in half precision, as torch.amp.GradScaler does: a step with infinite gradients updates nothing
        but the scale.
    clip: the largest norm of all gradients together, as torch.nn.utils.clip_grad_norm_.
    ignored: what targets of integers are in rows that do not live.

    Gradients are not accumulated over steps: each is one update.

    Raises
    ------
    OptionError (SyncBatchNorm, DistributedDataParallel, options that are not known, a loss that is no scalar),
    DtypeError, ShapeError and DeviceError (what does not fit), CaptureError (a loss or gradients that are not those of
    the eager step on the example, a model that asks the host for sizes), GeometryError (operations whose results have
    as many rows as their values say).
    """
    _check(model, loss, optimizer, targets)
    check_example(example)
    _check_targets(example, targets)
    limits = Limits.of("voxels", (len(example), max_voxels), (example.batch_size, None), buckets)
    margins = CapacityMargins(margin, level_capacity)
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    program = StepProgram(
        model,
        loss,
        site_within(example.geometry.site, limits.batch, box),
        Autocast.now(example.device.type),
        _parameters(model, loss, optimizer),
        StepOptions(scaler, clip, ignored),
        GradientBuffers(),
    )
    first = TrainingSample(VoxelScene(example.feats.detach(), example.coords, example.geometry, example), targets)
    with outside_inference_mode():
        buffers = Targets.of(limits.capacities[-1], example, targets, ignored)
    steps = _Steps(program, buffers, first, limits, margins)
    return CapturedStep(steps, CapturedOptimizerStep(optimizer, example.device))


def _parameters(model: nn.Module, loss: Loss, optimizer: Optimizer) -> tuple[Tensor, ...]:
    own = loss.parameters() if isinstance(loss, nn.Module) else ()
    updated = (p for group in optimizer.param_groups for p in group["params"])
    return tuple(dict.fromkeys((*model.parameters(), *own, *updated)))


class CapturedStep(CapturedModule):
    """A captured step of training: see `capture_step`. Not for two streams at once."""

    def __init__(self, steps: _Steps, update: CapturedOptimizerStep) -> None:
        super().__init__(steps)
        self._update = update

    def __call__(self, x: SparseTensor, *targets: Target) -> Tensor:
        """One step; the loss before the update, a scalar without gradients. Gradients stay in the parameters' `grad`,
        unscaled and clipped, until the next step, unless the optimizer writes there (torch.optim.SGD with nesterov does
        where it takes all tensors at once, as on GPUs).

        Raises CoordinateError (duplicates, a scene outside the example's spatial_shape), ShapeError, DtypeError,
        DeviceError, GeometryError and OptionError for what does not fit the example; nothing is updated then.
        """
        like: TrainingSample = self._engine.example  # pyright: ignore[reportAssignmentType]
        if not isinstance(x, SparseTensor):
            raise DtypeError(f"a captured step takes a SparseTensor and targets, found {type(x).__name__}")
        check_scene(x, like.scene.like)
        if x.dtype != like.scene.like.dtype:
            raise DtypeError(f"feats are {x.dtype}, the example's {like.scene.like.dtype}")
        if x.requires_grad and torch.is_grad_enabled():
            raise OptionError("x requires gradients, which a captured step does not give: capture the whole network")
        _check_targets(x, targets)
        scene = TrainingSample(VoxelScene(x.feats.detach(), x.coords, x.geometry, like.scene.like), targets)
        scene.check(like)
        with self._lock:
            return self._engine.step(scene, self._update)

    @property
    def skipped(self) -> int:
        """How many updated nothing but the scale: gradients were not finite."""
        return self._engine.skipped

    def explain(self) -> str:
        """The capacities, those of the levels of each that is captured, and how updates are done."""
        lines = [super().explain()]
        optimizer = type(self._update.optimizer).__name__
        if self._update.captured:
            lines.append(f"{optimizer}: a graph, {self._update.replays} replays")
        elif self._engine.graphs:
            why = "a graph from its second step on" if capturable(self._update.optimizer) else "eagerly: not capturable"
            lines.append(f"{optimizer}: {why}")
        return "\n".join(lines)


_SCALE = 1024.0
"""The scale under which the gradients of a half precision are compared, instead of the scaler's."""


class _Steps(GraphRunner):
    """The engine of a step."""

    early = False
    program: StepProgram  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self, program: StepProgram, buffers: Targets, example: TrainingSample, limits: Limits, margins: CapacityMargins
    ) -> None:
        super().__init__(program, buffers, example, limits, margins)
        self._facts: tuple[Any, ...] | None = None
        self.skipped = 0

    def step(self, scene: TrainingSample, update: CapturedOptimizerStep) -> Tensor:
        """The loss of a scene, after the update."""
        with on(self.device):
            if (problem := self._unfit(scene)) is not None:
                self._tell(*problem)
                return self._own(scene, update)
            # Graphs are looked after while the device is busy: what they read is held, whatever was changed.
            bucket = self.bucket(scene.count) if self.graphs else self.prepared(scene.count)
            scene.fill(bucket.buffers)  # pyright: ignore[reportArgumentType]
            done: StepResult = bucket.run(self.program)
            self.program.gradients.give(self.program.parameters)
            facts, value = update.facts(), done.loss.clone()
            if self._changed():
                self._restore()
                self.prepared(scene.count)
                return self.step(scene, update)
            read, most = done.status_words.tolist(), 1 + len(done.levels)
            # Behind those of levels: whether a gradient was not finite.
            words, infinite = read[:most], any(read[most:])
            if words[0]:
                self._restore()
                why, told = self._refused(scene, done, words)
                self._tell(why, told)
                if why == "room":
                    # Before the step itself: gradients of what is planned and compared lie where those of steps do.
                    self._widen(bucket, scene)
                return self._own(scene, update)
            self.replays += 1
            self._finish(infinite, update, facts)
            return value

    def _restore(self) -> None:
        """Take back what a pass did to buffers."""
        with torch.no_grad():
            copy_all(self.program.kept, self.program.backup)

    def _own(self, scene: TrainingSample, update: CapturedOptimizerStep) -> Tensor:
        """The eager step."""
        self._renew()
        value = self.program.learn(scene.tensor(), [values_of(t) for t in scene.targets])
        self.program.gradients.give(self.program.parameters)
        found = self.program.gradients.infinite
        infinite = self.program.options.scaler is not None and found is not None and bool(found)
        self._finish(infinite, update, update.facts())
        return value

    def _finish(self, infinite: bool, update: CapturedOptimizerStep, facts: tuple[Any, ...]) -> None:
        if infinite:
            self.skipped += 1
        else:
            update(facts)
        self.program.rescale()

    def _unfit(self, scene: TrainingSample) -> tuple[str, str] | None:
        box = self.program.site.bounds
        if scene.batch != box.batch:
            return "batch", f"of {scene.batch} items, and the example had {box.batch}"
        return super()._unfit(scene)

    # Making ready

    def prepared(self, count: int) -> CapacityBucket:
        """The bucket for so many voxels; all anew where a module's mode or a parameter's memory is another."""
        self._renew()
        return self.bucket(count)

    def _changed(self) -> bool:
        return self.program.facts() != self._facts

    def _renew(self) -> None:
        """Drop graphs that are not of the model as it is now."""
        if self._changed():
            self.program.refresh_modules()
            self.buckets.clear()
            self._facts = self.program.facts()

    def _made(
        self, capacity: int, scene: ModelInput | None = None, least: Mapping[Any, int] | None = None
    ) -> CapacityBucket:
        with self.program.unchanged():
            return super()._made(capacity, scene, least)

    def _planned(self, buffers: Targets, planner: CapacityPlanner) -> CapacityBucket:
        # The scale of a half precision's gradients is made before a graph reads it.
        if (scaler := self.program.options.scaler) is not None:
            scaler.scale(torch.ones((), device=self.device))
        return super()._planned(buffers, planner)

    def _check(self, bucket: CapacityBucket, scene: TrainingSample) -> None:
        """Compare with the eager step, with NaN in rows that do not live, some of which there are."""
        few = scene.sample(max(1, bucket.buffers.capacity * 7 // 8))
        for sample in dict.fromkeys((few, scene)):
            sample.fill(bucket.buffers)  # pyright: ignore[reportArgumentType]
            if not self._compared(bucket, sample)[0]:
                return
        raise CaptureError("the example itself has no room: see level_capacity and margin")

    def _compared(self, bucket: CapacityBucket, scene: TrainingSample) -> Sequence[int]:
        """The words of a pass, whose results are those of the eager step unless it had no room."""
        program, x, targets = self.program, scene.tensor(), [values_of(t) for t in scene.targets]
        scale = 1.0 if program.options.scaler is None else _SCALE
        kind = program.autocast.dtype if program.autocast.enabled else x.dtype

        def learned(x: SparseTensor) -> dict[str, Tensor]:
            return self._found(lambda: program.learn(x, targets, scale))

        want, rounded = learned(x), learned(_rounded(x, kind, 1))
        bucket.buffers.poison(scene.count)
        words: list[Sequence[int]] = []

        def run() -> Tensor:
            done = program.run(bucket.buffers, bucket.rooms, poison=True, scale=scale)  # pyright: ignore[reportArgumentType]
            words.append(done.status_words.tolist())
            return done.loss

        got = self._found(run)
        told = None if words[0][0] else steps_differ([*want], _alike(got, want, rounded), kind, AMPLIFIED)
        if told:
            # Where a ReLU changes sides one rounding changes nothing, mostly, and many of them much.
            others = [learned(_rounded(x, kind, AMPLIFIED, seed)) for seed in range(_AGAIN)]
            told = steps_differ([*want], _alike(got, want, *others), kind, 1)
        if told:
            raise CaptureError(
                f"the captured step is not the eager one on the example, in {told}. What reduces over all rows, or "
                "asks for their number, sees those of the buffer: use layers of pumice.nn, operators of pumice.ops "
                "(row_mean, row_sum), SparseTensor.living, or a loss that ignores an index"
            )
        return words[0]

    def _found(self, run: Callable[[], Tensor]) -> dict[str, Tensor]:
        """What a pass gives, by name, without dropout; nothing else changes."""
        program = self.program
        with program.without_dropout(), program.unchanged():
            found = {"the loss": run()}
            names: dict[Tensor, str] = {p: name for name, p in program.model.named_parameters()}
            held = program.gradients.held.items()
            found |= {f"the gradient of {names.get(p, f'parameter {n}')}": g.clone() for n, (p, g) in enumerate(held)}
            found |= {f"buffer {n} of {list(t.shape)}": t.clone() for n, t in enumerate(program.state())}
        return found


_AGAIN = 4
"""How often a step that seems to differ is asked what many roundings change."""


def _rounded(x: SparseTensor, kind: torch.dtype, times: int, seed: int = 0) -> SparseTensor:
    """With features so many roundings of that dtype away, at most."""
    noise = torch.rand(x.feats.shape, device=x.device, generator=torch.Generator(x.device).manual_seed(seed)) - 0.5
    return x.replace(x.feats * (1 + 2 * times * torch.finfo(kind).eps * noise.to(x.dtype)))


def _alike(*found: Mapping[str, Tensor]) -> list[list[Tensor]]:
    return [[each[name] for name in found[0]] for each in found]


def _check(model: nn.Module, loss: Loss, optimizer: Optimizer, targets: Sequence[Target]) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(f"capture_step takes a torch.nn.Module, found {type(model).__name__}")
    if not callable(loss):
        raise OptionError(f"the loss is a function of the model's result and targets, found {type(loss).__name__}")
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LBFGS):
        kind = type(optimizer).__name__
        raise OptionError(f"the optimizer is a torch.optim.Optimizer whose step needs no closure, found {kind}")
    for name, module in model.named_modules():
        if isinstance(module, DataParallel | DistributedDataParallel | nn.SyncBatchNorm):
            raise OptionError(f"a captured step is of one process alone: {name or 'it'} is a {type(module).__name__}")
    if not any(p.requires_grad for p in model.parameters()):
        raise OptionError("no parameter of the model requires gradients")


def _check_targets(x: SparseTensor, targets: Sequence[Target]) -> None:
    for number, target in enumerate(targets):
        values = values_of(target)
        if not isinstance(values, Tensor):
            raise DtypeError(f"targets are tensors, or PerItem(tensor), found {type(target).__name__}")
        if values.device != x.device:
            raise DeviceError(f"target {number} is on {values.device}, x on {x.device}")
        if values.requires_grad:
            raise OptionError(f"target {number} requires gradients, which a captured step does not give")
        rows = x.batch_size if isinstance(target, PerItemTarget) else len(x)
        if (values.ndim or isinstance(target, PerItemTarget)) and values.shape[:1] != (rows,):
            kind = "batch items" if isinstance(target, PerItemTarget) else "voxels (PerItemTarget: batch items)"
            raise ShapeError(f"target {number} has a row for each of {rows} {kind}, found shape {list(values.shape)}")
