"""An optimizer's update, captured as a CUDA graph if possible."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


class CapturedOptimizerStep:
    """Optimizer step on gradients at fixed addresses.

    The first step runs eagerly and creates the optimizer's state. A later step with the same hyperparameters and
    tensors is captured, then replayed until any of them changes; a step after a change runs eagerly. A learning rate
    that changes every step should be a tensor.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer, self._device = optimizer, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._of: tuple[Hashable, ...] | None = None
        self._last: tuple[Hashable, ...] | None = None
        # Kept alive: the graph reads these addresses.
        self._read: list[Tensor] = []
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.replays = 0

    @property
    def captured(self) -> bool:
        """True if the step is captured."""
        return self._graph is not None

    def facts(self) -> tuple[Hashable, ...]:
        """Guard of the captured step: hyperparameters and tensor identities."""
        return tuple(_facts(self.optimizer)) if self._side is not None else ()

    def __call__(self, facts: tuple[Hashable, ...]) -> None:
        """Run the update; facts: the current guard, with gradients set."""
        if self._side is None or (facts != self._of and (facts != self._last or not capturable(self.optimizer))):
            self._own()
            return
        if facts != self._of:
            self._record(facts)
        assert self._graph is not None
        self._graph.replay()
        self.replays += 1

    def _own(self) -> None:
        with warnings.catch_warnings():
            # torch warns about capturable=True without a capture; the capture follows later.
            warnings.filterwarnings("ignore", message=".*capturable=True.*")
            self.optimizer.step()
        self._last = self.facts()

    def _record(self, facts: tuple[Hashable, ...]) -> None:
        assert self._side is not None
        self._graph = graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.graph(graph, stream=self._side, capture_error_mode="thread_local"):
            self.optimizer.step()
        self._of, self._read = facts, list(_tensors(self.optimizer))


def capturable(optimizer: Optimizer) -> bool:
    """True if the step needs no host synchronisation: capturable=True, or SGD; and no Python hooks."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    if type(optimizer) is SGD:
        return all(group["fused"] or not isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
    return all(group.get("capturable", False) for group in optimizer.param_groups)


def _facts(optimizer: Optimizer) -> Iterator[Hashable]:
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                yield name
                yield _fact(value)
        for parameter in group["params"]:
            yield id(parameter)
            yield parameter.data_ptr()
            yield id(parameter.grad)
            for value in optimizer.state.get(parameter, {}).values():
                yield _fact(value)


def _fact(value: Any) -> Hashable:
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
