"""The update of parameters by an optimizer, as a CUDA graph where it can be one."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


class CapturedOptimizerStep:
    """An optimizer's step on gradients that always lie in the same memory.

    The first step is the optimizer's own, which makes its state; when the next one finds the same numbers (learning
    rate, momentum) and the same tensors, it is captured, and replayed as long as they stay. A number that changes makes
    the step the optimizer's own again: a learning rate that a schedule changes each time is best a tensor.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer, self._device = optimizer, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._of: tuple[Hashable, ...] | None = None
        self._last: tuple[Hashable, ...] | None = None
        # Held so that no other tensor gets the address of one that the graph reads.
        self._read: list[Tensor] = []
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.replays = 0

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return self._graph is not None

    def facts(self) -> tuple[Hashable, ...]:
        """What a graph of the update depends on, but for the values of tensors."""
        return tuple(_facts(self.optimizer)) if self._side is not None else ()

    def __call__(self, facts: tuple[Hashable, ...]) -> None:
        """Update; facts: those of now, gradients included."""
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
            # Torch wonders why what may be captured is not: it is, later.
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
    """Whether its step asks nothing of the host: those with capturable=True, and SGD; by Python's hooks it may."""
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
