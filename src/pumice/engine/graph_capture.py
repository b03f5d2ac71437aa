"""Networks over graphs, and their training steps, as CUDA graphs: one for each graph and shapes of the arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pumice.engine.buckets import forbid_synchronisation
from pumice.engine.static import Autocast
from pumice.engine.subject import undisturbed
from pumice.engine.text import first_line
from pumice.errors import CaptureError, DeviceError, DtypeError, OptionError, PumiceError, ShapeError
from pumice.nn import RelationalConv
from pumice.ops import Graph
from pumice.runtime.cache import BoundedCache
from pumice.runtime.launch import outside_inference_mode, record_graph
from pumice.runtime.streams import is_capturing

_KEPT = 8
"""CUDA graphs kept, of the last graphs and shapes."""


def takes_graph(example: Any) -> TypeGuard[tuple[Any, ...]]:
    """True for arguments among which is a Graph."""
    return isinstance(example, tuple) and any(isinstance(leaf, Graph) for leaf in tree_flatten(example)[0])


@dataclass(frozen=True, eq=False)
class Arguments:
    """Flattened arguments. tensors: copied into buffers; others: graphs and values, on which a recording depends."""

    spec: TreeSpec
    leaves: tuple[Any, ...]

    @staticmethod
    def of(args: tuple[Any, ...]) -> Arguments:
        leaves, spec = tree_flatten(args)
        return Arguments(spec, tuple(leaves))

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def device(self) -> torch.device:
        return next(leaf.device for leaf in self.leaves if isinstance(leaf, Graph))

    def key(self) -> tuple[Hashable, ...]:
        """Equal for calls that one recording serves."""
        return tuple([leaf.shape if isinstance(leaf, Tensor) else _value(leaf) for leaf in self.leaves])

    def check(self, given: Arguments) -> None:
        """Raise DtypeError, ShapeError or DeviceError unless the arguments are as these, but for numbers of rows."""
        if given.spec != self.spec:
            raise DtypeError(f"arguments are {_told(self)} as the example's, found {_told(given)}")
        for own, leaf in zip(self.leaves, given.leaves, strict=True):
            if type(leaf) is not type(own) and not (isinstance(own, Tensor) and isinstance(leaf, Tensor)):
                raise DtypeError(f"arguments are {_told(self)} as the example's, found {_told(given)}")
            if not isinstance(leaf, Tensor | Graph):
                continue
            if leaf.device != own.device:
                raise DeviceError(f"arguments are on {own.device} as the example's, found {leaf.device}")
            if isinstance(leaf, Tensor) and (leaf.dtype, leaf.shape[1:]) != (own.dtype, own.shape[1:]):
                wanted = f"{own.dtype} [rows{''.join(f', {n}' for n in own.shape[1:])}]"
                kind = DtypeError if leaf.dtype != own.dtype else ShapeError
                raise kind(f"a tensor is {wanted} as the example's, found {leaf.dtype} {list(leaf.shape)}")

    def static(self) -> tuple[tuple[Any, ...], list[Tensor]]:
        """(arguments with buffers in place of tensors, buffers)."""
        held = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(held, self.spec), [x for x in held if isinstance(x, Tensor)]


def _value(leaf: Any) -> Hashable:
    return id(leaf) if isinstance(leaf, Graph) or not isinstance(leaf, Hashable) else (type(leaf), leaf)


def _told(args: Arguments) -> str:
    return f"({', '.join(type(leaf).__name__ for leaf in args.leaves)})"


@dataclass(eq=False)
class _Recorded:
    """A recording. guard: addresses and modes that it depends on; buffers: that it reads; kept: what it reads besides;
    graph: None on a CPU."""

    guard: tuple[Hashable, ...]
    buffers: list[Tensor]
    work: Callable[[], Any]
    kept: list[Any] = field(default_factory=list)
    graph: torch.cuda.CUDAGraph | None = None
    results: Any = None

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """The results for these tensors, which the next call overwrites."""
        for own, given in zip(self.buffers, tensors, strict=True):
            own.copy_(given)
        if self.graph is None:
            return self.work()
        self.graph.replay()
        return self.results


class _Recorder:
    """Records the CUDA graphs of a pass over arguments with graphs, the last _KEPT of them."""

    def __init__(
        self, model: nn.Module, example: Arguments, of: Callable[[tuple[Any, ...]], Any], evaluates: bool = False
    ) -> None:
        """of: the pass over (arguments); evaluates: refuse a model in training mode."""
        self.model, self.example, self._pass, self._evaluates = model, example, of, evaluates
        self.autocast = Autocast.current(example.device.type)
        self.known: BoundedCache[_Recorded] = BoundedCache(_KEPT)
        self.replays = 0
        self._stream = torch.cuda.Stream(example.device) if example.device.type == "cuda" else None
        self._pool = None if self._stream is None else torch.cuda.graph_pool_handle()

    def results(self, args: Arguments) -> Any:
        """The results, which the next call may overwrite; recorded first for new graphs and shapes."""
        self.example.check(args)
        key, guard = args.key(), self._guard()
        known = self.known.get(key)
        if known is None or known.guard != guard:
            known = self.known.keep(key, self._record(args, guard))
        self.replays += 1
        return known.run(args.tensors)

    def _guard(self) -> tuple[Hashable, ...]:
        held = [x.data_ptr() for x in (*self.model.parameters(), *self.model.buffers())]
        modes = [(m.training, m.order if isinstance(m, RelationalConv) else None) for m in self.model.modules()]
        return (*held, *modes, torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled())

    def _record(self, args: Arguments, guard: tuple[Hashable, ...]) -> _Recorded:
        if self._evaluates:
            check_evaluation(self.model)
        with outside_inference_mode():
            given, buffers = args.static()

        def work() -> Any:
            with self.autocast.context():
                return self._pass(given)

        found = _Recorded(guard, buffers, work, [*args.leaves])
        stream = self._stream
        if stream is None:
            return found
        if is_capturing(args.device):
            raise CaptureError("a new graph, or new shapes, cannot be recorded while another CUDA graph is: call first")
        stream.wait_stream(torch.cuda.current_stream(args.device))
        with torch.cuda.device(args.device), undisturbed(self.model, self.model.training):
            with torch.cuda.stream(stream):
                # This pass builds what the graph keeps; the next runs as the recorded one.
                work()
            found.graph, found.results, constants = self._captured(work, stream)
        found.kept += constants
        torch.cuda.current_stream(args.device).wait_stream(stream)
        return found

    def _captured(self, work: Callable[[], Any], stream: torch.cuda.Stream) -> Any:
        try:
            # A host read within a recording would break the generator of random numbers, too.
            with torch.cuda.stream(stream), forbid_synchronisation():
                work()
            return record_graph(work, stream, self._pool)
        except PumiceError:
            raise
        except RuntimeError as problem:
            raise CaptureError(
                f"{type(self.model).__name__} cannot be recorded ({first_line(problem)}): expected a network "
                "that reads no values on the host and takes prepared graphs (pumice.Graph), not edge_index"
            ) from problem


def check_evaluation(model: nn.Module) -> None:
    """Raise OptionError unless the model is a module in evaluation mode."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"capture takes a torch.nn.Module, found {type(model).__name__}")
    training = [name or type(m).__name__ for name, m in model.named_modules() if m.training]
    if training:
        raise OptionError(f"capture expects model.eval(); these modules are in training mode: {training[:3]}")


def check_options(given: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise OptionError for options of networks over voxels. given: (value, default) by name."""
    if wrong := [name for name, (value, default) in given.items() if value != default]:
        raise OptionError(f"{', '.join(wrong)} are options of networks over voxels, found with a Graph")


class CapturedGraphNet:
    """Captured network over graphs; see pumice.capture."""

    def __init__(self, model: nn.Module, example: tuple[Any, ...]) -> None:
        self._lock = Lock()
        self._recorder = _Recorder(model, Arguments.of(example), lambda args: model(*args), True)
        with torch.no_grad(), self._lock:
            self._recorder.results(self._recorder.example)
        self._recorder.replays = 0

    def __call__(self, *args: Any) -> Any:
        """model(*args), without gradients, as new tensors. A graph, or shapes, that were not seen are recorded first.

        Raises DtypeError, ShapeError and DeviceError (arguments that do not match the example's), OptionError (a model
        in training mode), CaptureError (as pumice.capture)."""
        with self._lock, torch.no_grad():
            return _copied(self._recorder.results(Arguments.of(args)))

    @property
    def replays(self) -> int:
        """Number of calls that ran by a graph."""
        return self._recorder.replays

    def refresh(self) -> None:
        """Drop all recordings. Written parameters are seen without it, and replaced ones are noticed."""
        with self._lock:
            self._recorder.known.clear()

    def explain(self) -> str:
        """Text: what is recorded."""
        return _explained(self._recorder)


def _copied(found: Any) -> Any:
    leaves, spec = tree_flatten(found)
    return tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _explained(recorder: _Recorder) -> str:
    kept = recorder.known.values()
    graphs = [str(leaf) for known in kept for leaf in known.kept if isinstance(leaf, Graph)]
    head = f"{len(kept)} CUDA graphs, {recorder.replays} replays" if recorder._stream else "a CPU: no CUDA graphs"
    return "\n".join([head, *graphs])


class CapturedGraphStep:
    """Captured training step of a network over graphs; see pumice.capture_step."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        update: Any,
        example: tuple[Any, ...],
        targets: tuple[Tensor, ...],
    ) -> None:
        """update: engine.train_step.CapturedOptimizerStep."""
        self._lock, self._update = Lock(), update
        held = [p for p in model.parameters() if p.requires_grad]
        own = [p for p in loss.parameters() if p.requires_grad] if isinstance(loss, nn.Module) else []
        self._parameters = [*dict.fromkeys([*held, *own])]

        def step(given: tuple[Any, ...]) -> tuple[Tensor, list[Tensor | None]]:
            args, others = given
            with torch.enable_grad():
                value = loss(model(*args), *others)
                if not isinstance(value, Tensor) or value.numel() != 1:
                    raise OptionError(f"loss gives a scalar tensor, found {_shape_of(value)}")
                found = torch.autograd.grad(value, self._parameters, allow_unused=True)
            return value.detach(), [*found]

        self._recorder = _Recorder(model, Arguments.of((example, targets)), step)
        if self._recorder._stream is not None:
            self._recorder.results(self._recorder.example)
            self._recorder.replays = 0

    def __call__(self, args: tuple[Any, ...], *targets: Tensor) -> Tensor:
        """Run one step and return the loss before the update, a detached scalar; gradients stay in `grad` until the
        next step. Raises as CapturedGraphNet.__call__."""
        with self._lock:
            value, grads = self._recorder.results(Arguments.of((args, targets)))
            for parameter, grad in zip(self._parameters, grads, strict=True):
                parameter.grad = grad
            self._update(self._update.guard())
            return value.clone()

    @property
    def replays(self) -> int:
        """Number of steps that ran by a graph."""
        return self._recorder.replays

    def explain(self) -> str:
        """Text: what is recorded."""
        return _explained(self._recorder)


def _shape_of(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
