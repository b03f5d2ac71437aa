"""A training step, kernel maps included, as CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Optimizer

from pumice.coords.capacity import CapacityPlanner, Shares
from pumice.engine.around import around, sparse_in
from pumice.engine.buckets import Buckets, CapacityBucket, CapacityMargins, CapturedModule, GraphRunner, device_context
from pumice.engine.buffers import ModelInput
from pumice.engine.capture import captured_site, check_example, check_scene
from pumice.engine.compare import AMPLIFIED, steps_differ
from pumice.engine.graph_capture import Arguments, CapturedGraphStep, check_options, takes_graph
from pumice.engine.program import compile  # noqa: A004
from pumice.engine.ranks import waits_for_others
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
from pumice.runtime.launch import outside_inference_mode, record_graph


@overload
def capture_step(
    model: nn.Module, loss: Loss, optimizer: Optimizer, example: tuple[Any, ...], *targets: Tensor
) -> CapturedGraphStep: ...
@overload
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
    scaler: GradScaler | None = None,
    clip: float | None = None,
    ignored: int = -100,
) -> CapturedStep: ...
def capture_step(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizer,
    example: SparseTensor | tuple[Any, ...],
    *targets: Any,
    max_voxels: int | None = None,
    level_capacity: Shares = None,
    buckets: float | Sequence[int] = 1.5,
    margin: float = 1.5,
    scaler: GradScaler | None = None,
    clip: float | None = None,
    ignored: int = -100,
) -> CapturedStep | CapturedGraphStep:
    """Capture a training step: forward, loss and gradients, kernel maps included, as one CUDA graph per capacity, and
    the optimizer's update as another.

        step = pm.capture_step(net, lambda y, labels: F.cross_entropy(y.feats, labels), optimizer, x, labels)
        for x, labels in loader:
            value = step(x, labels)

    A step is equivalent, up to rounding, to

        optimizer.zero_grad(); value = loss(model(x), labels); value.backward(); optimizer.step()

    with the model compiled (pumice.compile), under the autocast state of the capture. A host synchronisation between
    the two graphs reads the status: a scene that overflowed, or has no graph, runs eagerly by the compiled model,
    without side effects of the failed pass. The example's capacity is captured at once, others by `ready()` or at the
    end of the first step without a graph; a capacity that overflowed is re-planned and re-captured at the end of that
    step, up to three times.

    Features and gradients of padding rows are 0 wherever a loss or a module reads them, norms and pools of pumice.nn
    use valid rows only, and targets of padding rows are `ignored` (floats 0, bools False). So cross_entropy with
    ignore_index needs no change; a mean over all rows does: see pumice.ops.row_mean and SparseTensor.valid_mask. The
    capture compares the example's loss and gradients with those of an eager step, with NaN in padding rows.

    Parameters
    ----------
    model: module that takes one SparseTensor, wholly or partly in training mode, or its program. Capturing does not
        change its parameters, gradients, buffers and random states.
    loss: scalar function of the model's result and the targets; may be a module with buffers.
    optimizer: its update is captured if possible (capturable=True, or SGD), from its second step on, while its
        hyperparameters stay constant; a learning rate that changes each step should be a tensor. Others run eagerly.
    example: typical scene, as in `capture`. Scenes with another number of batch items run eagerly.
    targets: tensors with one row per voxel of the example, scalars, or PerItemTarget(tensor) with one row per item.
    max_voxels, level_capacity, buckets, margin: as in `capture`.
    scaler: as torch.amp.GradScaler for half precision: a step with non-finite gradients updates only the scale.
    clip: largest total norm of the gradients, as torch.nn.utils.clip_grad_norm_.
    ignored: value of integer targets in padding rows.

    Gradients are not accumulated over steps. With a model in DistributedDataParallel, each process replays its own
    graph or runs eagerly; then, on the current stream, gradients are averaged over all processes, unscaled and clipped.
    Every process must run every step. Module buffers are those of the first process, as without a capture.
    Communication hooks and mixed_precision= of DistributedDataParallel raise OptionError; unused parameters get
    gradients of 0.

    A network over graphs has its arguments as the example, with a prepared pumice.Graph among them, and any targets:

        step = pm.capture_step(net, lambda y, labels: F.cross_entropy(y[nodes], labels), optimizer, (x, graph), labels)
        value = step((x, graph), labels)

    A new graph, or new numbers of rows, are recorded in that step; it takes no other option.

    Raises OptionError (SyncBatchNorm, FSDP2, invalid options, a loss that is no scalar), DtypeError,
    ShapeError and DeviceError (mismatched arguments), CaptureError (loss or gradients differ from the eager step on the
    example, or the model reads sizes on the host), GeometryError (operations with value-dependent row counts).
    """
    replicated = model if isinstance(model, DistributedDataParallel) else None
    model = model if replicated is None else replicated.module
    _check(model, loss, optimizer)
    _check_replicated(replicated)
    if takes_graph(example):
        voxels = (max_voxels, None), (level_capacity, None), (buckets, 1.5), (margin, 1.5), (scaler, None), (clip, None)
        names = "max_voxels", "level_capacity", "buckets", "margin", "scaler", "clip"
        check_options(dict(zip(names, voxels, strict=True)))
        device = Arguments.of(example).device
        return CapturedGraphStep(model, loss, CapturedOptimizerStep(optimizer, device), example, targets)
    model, example = around(model, example)
    example = check_example(example)
    _check_targets(example, targets)
    limits = Buckets.of("voxels", (len(example), max_voxels), (example.batch_size, None), buckets)
    margins = CapacityMargins(margin, level_capacity)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise OptionError(f"scaler takes a torch.amp.GradScaler, found {type(scaler).__name__}")
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    program = StepProgram(
        compile(model),
        model,
        loss,
        captured_site(example.geometry.site, limits.batch),
        Autocast.current(example.device.type),
        _parameters(model, loss, optimizer),
        StepOptions(scaler, clip, ignored),
        GradientBuffers(),
        replicated,
    )
    first = TrainingSample(example.feats.detach(), example.coords, example.geometry, example, targets)
    with outside_inference_mode():
        buffers = Targets.like(limits.capacities[-1], example, targets, ignored)
    steps = _Steps(program, buffers, first, limits, margins)
    return CapturedStep(steps, CapturedOptimizerStep(optimizer, example.device))


def _parameters(model: nn.Module, loss: Loss, optimizer: Optimizer) -> tuple[Tensor, ...]:
    own = loss.parameters() if isinstance(loss, nn.Module) else ()
    updated = (p for group in optimizer.param_groups for p in group["params"])
    return tuple(dict.fromkeys((*model.parameters(), *own, *updated)))


class CapturedStep(CapturedModule):
    """Captured training step; see `capture_step`. Not safe to call from two streams at once."""

    def __init__(self, steps: _Steps, update: CapturedOptimizerStep) -> None:
        super().__init__(steps)
        self._update = update

    def __call__(self, x: Any, *targets: Target) -> Tensor:
        """Run one step and return the loss before the update, a detached scalar. Gradients, unscaled and clipped, stay
        in the parameters' `grad` until the next step, unless the optimizer overwrites them (multi-tensor
        torch.optim.SGD with nesterov does).

        Raises CoordinateError (duplicates, a scene outside the example's spatial_shape), ShapeError, DtypeError,
        DeviceError, GeometryError and OptionError (input that does not match the example); nothing is updated then.
        """
        example: TrainingSample = self._engine.example  # pyright: ignore[reportAssignmentType]
        x = sparse_in(self._engine.program.model, x)
        if not isinstance(x, SparseTensor):
            raise DtypeError(f"a captured step takes a SparseTensor and targets, found {type(x).__name__}")
        check_scene(x, example.like)
        if x.dtype != example.like.dtype:
            raise DtypeError(f"feats must be {example.like.dtype} as the example's, found {x.dtype}")
        if x.requires_grad and torch.is_grad_enabled():
            raise OptionError("x requires gradients, which a captured step does not compute: capture the whole network")
        _check_targets(x, targets)
        scene = TrainingSample(x.feats.detach(), x.coords, x.geometry, example.like, targets)
        scene.check(example)
        with self._lock:
            return self._engine.step(scene, self._update)

    @property
    def skipped(self) -> int:
        """Number of steps skipped because of non-finite gradients (they only updated the scale)."""
        return self._engine.skipped

    def explain(self) -> str:
        """Text: the capacities, level capacities of captured ones, and how the optimizer runs."""
        lines = [super().explain()]
        optimizer = type(self._update.optimizer).__name__
        if self._update.captured:
            lines.append(f"{optimizer}: a graph, {self._update.replays} replays")
        elif self._engine.graphs:
            why = "a graph from its second step on" if capturable(self._update.optimizer) else "eager: not capturable"
            lines.append(f"{optimizer}: {why}")
        return "\n".join(lines)


_SCALE = 1024.0  # Loss scale for the comparison of half precision gradients, instead of the scaler's


class _Steps(GraphRunner):
    """GraphRunner of a training step."""

    early_status = False
    program: StepProgram  # pyright: ignore[reportIncompatibleVariableOverride]
    replays: int
    skipped: int

    def __init__(
        self, program: StepProgram, buffers: Targets, example: TrainingSample, limits: Buckets, margins: CapacityMargins
    ) -> None:
        super().__init__(program, buffers, example, limits, margins)
        self._guard: tuple[Any, ...] | None = None
        self.skipped = 0

    def step(self, scene: TrainingSample, update: CapturedOptimizerStep) -> Tensor:
        """Run a step, update included, and return its loss."""
        with device_context(self.device):
            self.program.share_buffers()
            if (problem := self._host_rejection(scene)) is not None:
                self._warn_once(*problem)
                return self._eager_step(scene, update)
            if not self.graphs:
                self._drop_stale_graphs()
            capacity = self.limits.capacity(scene.count)
            assert capacity is not None
            bucket = self.buckets.get(capacity)
            if bucket is None:
                return self._uncaptured_step(scene, update)
            scene.fill(bucket.buffers)  # pyright: ignore[reportArgumentType]
            done: StepResult = bucket.run(self.program)
            self.program.gradients.assign_to(self.program.parameters)
            # The guard is checked after launch, while the device is busy: the graph keeps alive what it reads.
            guard, value = update.guard(), done.loss.clone()
            if self._guard_failed():
                self._restore()
                return self._uncaptured_step(scene, update)
            read, most = done.status_words.tolist(), 1 + len(done.levels)
            # The last word, after those of levels, is the non-finite flag.
            words, infinite = read[:most], any(read[most:])
            if words[0]:
                self._restore()
                why, detail = self._device_rejection(scene, done, words)
                self._warn_once(why, detail)
                value = self._eager_step(scene, update)
                if why == "room":
                    self._make_ready(capacity, lambda _: self._replan(bucket, scene))
                return value
            self.replays += 1
            self._finish(infinite, update, guard)
            return value

    def _uncaptured_step(self, scene: TrainingSample, update: CapturedOptimizerStep) -> Tensor:
        """Run a step eagerly, then record the missing graph; returns the loss."""
        self.fallbacks["capture"] += 1
        value, capacity = self._eager_step(scene, update), self.limits.capacity(scene.count)
        assert capacity is not None
        self._make_ready(capacity, self._bucket_for)
        return value

    def _restore(self) -> None:
        """Restore module buffers to their values before the last pass."""
        with torch.no_grad():
            copy_all(self.program.module_buffers, self.program.backup)

    def _eager_step(self, scene: TrainingSample, update: CapturedOptimizerStep) -> Tensor:
        self._drop_stale_graphs()
        value = self.program.forward_backward(scene.tensor(), [values_of(t) for t in scene.targets])
        self.program.gradients.assign_to(self.program.parameters)
        found = self.program.gradients.infinite
        infinite = found is not None and bool(found)
        self._finish(infinite, update, update.guard())
        return value

    def _finish(self, infinite: bool, update: CapturedOptimizerStep, guard: tuple[Any, ...]) -> None:
        program = self.program
        if program.replicated is not None:
            program.average_gradients()
            program.gradients.assign_to(program.parameters)
            found, guard = program.gradients.infinite, update.guard()
            infinite = found is not None and bool(found)
        if infinite:
            self.skipped += 1
        else:
            update(guard)
        self.program.rescale()

    def _host_rejection(self, scene: TrainingSample) -> tuple[str, str] | None:
        own = self.program.site.batch_size
        if scene.batch != own:
            return "batch", f"of {scene.batch} items differs from the example's {own}"
        return super()._host_rejection(scene)

    def prepared(self, count: int) -> CapacityBucket:
        """Bucket for `count` voxels; all are dropped first if the guard (modes, modules, addresses) fails."""
        self._drop_stale_graphs()
        return self.bucket(count)

    def _guard_failed(self) -> bool:
        return self.program.guard() != self._guard

    def _drop_stale_graphs(self) -> None:
        """Drop all graphs if the guard fails."""
        if self._guard_failed():
            self.program.refresh_modules()
            self.clear()
            self._guard, self._checked = self.program.guard(), False

    def _build_bucket(
        self, capacity: int, scene: ModelInput | None = None, least: Mapping[Any, int] | None = None
    ) -> CapacityBucket:
        with self.program.restoring_state():
            return super()._build_bucket(capacity, scene, least)

    def _plan_bucket(self, buffers: Targets, planner: CapacityPlanner) -> CapacityBucket:
        # The scaler creates its scale lazily; it must exist before capture.
        if (scaler := self.program.options.scaler) is not None:
            scaler.scale(torch.ones((), device=self.device))
        return super()._plan_bucket(buffers, planner)

    def _check(self, bucket: CapacityBucket, scene: TrainingSample) -> None:
        """Compare with the eager step, with NaN in padding rows; a subsample ensures that there are padding rows."""
        few = scene.sample(max(1, bucket.buffers.capacity * 7 // 8))
        for sample in dict.fromkeys((few, scene)):
            sample.fill(bucket.buffers)  # pyright: ignore[reportArgumentType]
            if not self._compare(bucket, sample)[0]:
                return
        raise CaptureError("the example exceeds the capacity: see level_capacity and margin")

    def _compare(self, bucket: CapacityBucket, scene: TrainingSample) -> Sequence[int]:
        """Status words of a pass; raises CaptureError if it fits but differs from the eager step."""
        program, x, targets = self.program, scene.tensor(), [values_of(t) for t in scene.targets]
        scale = 1.0 if program.options.scaler is None else _SCALE
        kind = program.autocast.dtype if program.autocast.enabled else x.dtype

        def learned(x: SparseTensor) -> dict[str, Tensor]:
            return self._outcome(lambda: program.forward_backward(x, targets, scale))

        want, rounded = learned(x), learned(_rounded(x, kind, 1))
        bucket.buffers.poison(scene.count)
        words: list[Sequence[int]] = []

        def run() -> Tensor:
            done = program.run(bucket.buffers, bucket.capacities, poison=True, scale=scale)  # pyright: ignore[reportArgumentType]
            words.append(done.status_words.tolist())
            return done.loss

        got = self._outcome(run)
        error = None if words[0][0] else steps_differ([*want], _alike(got, want, rounded), kind, AMPLIFIED)
        if error:
            # Near the kink of a ReLU one rounding mostly changes nothing, but several may change much.
            others = [learned(_rounded(x, kind, AMPLIFIED, seed)) for seed in range(_PERTURBATIONS)]
            error = steps_differ([*want], _alike(got, want, *others), kind, 1)
        if error:
            raise CaptureError(
                f"the captured step differs from the eager one on the example, in {error}. Operations that reduce over "
                "rows, or read their number, include padding rows: use layers of pumice.nn, operators of pumice.ops "
                "(row_mean, row_sum), SparseTensor.valid_mask, or a loss that ignores an index"
            )
        return words[0]

    def _outcome(self, run: Callable[[], Tensor]) -> dict[str, Tensor]:
        """Loss, gradients and buffers after a pass without dropout, by name; model state is restored."""
        program = self.program
        with program.without_dropout(), program.restoring_state():
            found = {"the loss": run()}
            names: dict[Tensor, str] = {p: name for name, p in program.model.named_parameters()}
            held = program.gradients.by_parameter.items()
            found |= {f"the gradient of {names.get(p, f'parameter {n}')}": g.clone() for n, (p, g) in enumerate(held)}
            found |= {f"buffer {n} of {list(t.shape)}": t.clone() for n, t in enumerate(program.state())}
        return found


_PERTURBATIONS = 4  # Perturbed eager steps that a differing step is compared with


def _rounded(x: SparseTensor, kind: torch.dtype, times: int, seed: int = 0) -> SparseTensor:
    """Perturb features by at most `times` roundings of dtype `kind`."""
    noise = torch.rand(x.feats.shape, device=x.device, generator=torch.Generator(x.device).manual_seed(seed)) - 0.5
    return x.replace(x.feats * (1 + 2 * times * torch.finfo(kind).eps * noise.to(x.dtype)))


def _alike(*found: Mapping[str, Tensor]) -> list[list[Tensor]]:
    return [[each[name] for name in found[0]] for each in found]


def _check(model: nn.Module, loss: Loss, optimizer: Optimizer) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(f"capture_step takes a torch.nn.Module, found {type(model).__name__}")
    if not callable(loss):
        raise OptionError(f"the loss must be a function of the model's result and targets, found {type(loss).__name__}")
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LBFGS):
        kind = type(optimizer).__name__
        raise OptionError(f"the optimizer must be a torch.optim.Optimizer whose step needs no closure, found {kind}")
    for name, module in (*model.named_modules(), *(loss.named_modules() if isinstance(loss, nn.Module) else ())):
        if waits_for_others(module):
            raise OptionError(
                f"passes of a captured step run in one process: {name or 'it'} is {type(module).__name__}; capture the "
                "DistributedDataParallel model itself, with BatchNorm, or train with pumice.compile"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise OptionError("no parameter of the model requires gradients")


def _check_replicated(model: DistributedDataParallel | None) -> None:
    if model is not None and (model._comm_hooks or model.mixed_precision is not None):
        raise OptionError("a captured step takes neither communication hooks nor mixed_precision= of the model")


def _check_targets(x: SparseTensor, targets: Sequence[Target]) -> None:
    for number, target in enumerate(targets):
        values = values_of(target)
        if not isinstance(values, Tensor):
            raise DtypeError(f"targets must be tensors or PerItemTarget(tensor), found {type(target).__name__}")
        if values.device != x.device:
            raise DeviceError(f"target {number} is on {values.device}, x on {x.device}")
        if values.requires_grad:
            raise OptionError(f"target {number} requires gradients, which a captured step does not compute")
        rows = x.batch_size if isinstance(target, PerItemTarget) else len(x)
        if (values.ndim or isinstance(target, PerItemTarget)) and values.shape[:1] != (rows,):
            kind = "batch items" if isinstance(target, PerItemTarget) else "voxels (PerItemTarget: batch items)"
            raise ShapeError(f"target {number} must have one row for each of {rows} {kind}, found {list(values.shape)}")


class CapturedOptimizerStep:
    """Optimizer step on gradients at fixed addresses.

    The first step runs eagerly and creates the optimizer's state. A later step with the same hyperparameters and
    tensors is captured, then replayed until any of them changes; a step after a change runs eagerly. A learning rate
    that changes every step should be a tensor.
    """

    optimizer: Optimizer
    replays: int

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer, self._device = optimizer, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured_guard: tuple[Hashable, ...] | None = None
        self._last_guard: tuple[Hashable, ...] | None = None
        # Kept alive: the graph reads these addresses.
        self._kept_alive: list[Tensor] = []
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.replays = 0

    @property
    def captured(self) -> bool:
        """True if the step is captured."""
        return self._graph is not None

    def guard(self) -> tuple[Hashable, ...]:
        """Guard of the captured step: hyperparameters and tensor identities."""
        return tuple(_guard_values(self.optimizer)) if self._side is not None else ()

    def __call__(self, guard: tuple[Hashable, ...]) -> None:
        """Run the update; guard: the current one, with gradients set."""
        if self._side is None or (
            guard != self._captured_guard and (guard != self._last_guard or not capturable(self.optimizer))
        ):
            self._eager_step()
            return
        if guard != self._captured_guard:
            self._capture(guard)
        assert self._graph is not None
        self._graph.replay()
        self.replays += 1

    def _eager_step(self) -> None:
        with warnings.catch_warnings():
            # torch warns about capturable=True without a capture; the capture follows later.
            warnings.filterwarnings("ignore", message=".*capturable=True.*")
            self.optimizer.step()
        self._last_guard = self.guard()

    def _capture(self, guard: tuple[Hashable, ...]) -> None:
        assert self._side is not None
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        self._graph, _, _ = record_graph(self.optimizer.step, self._side)
        self._captured_guard, self._kept_alive = guard, list(_tensors(self.optimizer))


def capturable(optimizer: Optimizer) -> bool:
    """True if the step needs no host synchronisation: capturable=True, or SGD; and no Python hooks."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    if type(optimizer) is SGD:
        return all(group["fused"] or not isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
    return all(group.get("capturable", False) for group in optimizer.param_groups)


def _guard_values(optimizer: Optimizer) -> Iterator[Hashable]:
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                yield name
                yield _hashable(value)
        for parameter in group["params"]:
            yield id(parameter)
            yield parameter.data_ptr()
            yield id(parameter.grad)
            for value in optimizer.state.get(parameter, {}).values():
                yield _hashable(value)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return id(value)
    return value if isinstance(value, Hashable) else repr(value)


def _tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from (value for value in group.values() if isinstance(value, Tensor))
        for parameter in group["params"]:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
            yield from (v for v in optimizer.state.get(parameter, {}).values() if isinstance(v, Tensor))
