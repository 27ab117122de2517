"""Notes what a plan executes: every call of a kernel, with what it was given, and every step between kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringattn import attention
from ringattn.kernels.contract import BoundKernel, KernelConfig
from ringattn.kernels.registry import KERNELS
from ringattn.runtime.merge import TorchOps


@dataclass(frozen=True)
class KernelCall:
    name: str
    direction: str
    tensors: tuple[Tensor, ...]  # q, k, v, or dout, q, k, v, out, lse

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, M, H, D) of q."""
        return tuple(self.tensors[0].shape)

    def lies_in(self, *owners: Tensor) -> bool:
        """Whether q, k and v are read where they lie: in the memory of ``owners``."""
        own = {x.untyped_storage().data_ptr() for x in owners}
        read = self.tensors[:3] if self.direction == "forward" else self.tensors[1:4]
        return all(x.untyped_storage().data_ptr() in own for x in read)


@dataclass
class Record:
    calls: list[KernelCall] = field(default_factory=list)
    configs: list[tuple[str, KernelConfig]] = field(default_factory=list)  # of the kernels loaded
    steps: Counter[str] = field(default_factory=Counter)  # gather, gather_backward, merge, scatter_sum

    def count(self, direction: str, name: str | None = None) -> int:
        return sum(call.direction == direction and name in (None, call.name) for call in self.calls)

    def clear(self) -> None:
        self.calls.clear()
        self.configs.clear()
        self.steps.clear()


def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """From now on until the end of the test, every kernel loaded notes its calls.

    None is left to autograd, whose calls of the backward nobody could note.
    """
    made = Record()

    def watched(name: str) -> Any:
        load = KERNELS[name].load

        def loading(config: KernelConfig) -> BoundKernel:
            made.configs.append((name, config))
            bound = load(config)

            def forward(*tensors: Tensor) -> tuple[Tensor, Tensor]:
                made.calls.append(KernelCall(name, "forward", tensors))
                return bound.forward(*tensors)

            def backward(*tensors: Tensor, **keywords: Any) -> Any:
                made.calls.append(KernelCall(name, "backward", tensors))
                return bound.backward(*tensors, **keywords)

            return BoundKernel(forward, backward)

        return replace(KERNELS[name], load=loading)

    monkeypatch.setattr(attention, "faults_among", lambda *arguments: [])  # the accuracy checks run kernels, too
    for name in ("math", "flash-cpu"):
        monkeypatch.setitem(KERNELS, name, watched(name))  # type: ignore[arg-type]
    for step in ("gather", "gather_backward", "merge", "scatter_sum"):
        monkeypatch.setattr(TorchOps, step, counting(getattr(TorchOps, step), step, made.steps))
    return made


def counting(function: Any, name: str, counts: Counter[str]) -> Any:
    def counted(*arguments: Any, **keywords: Any) -> Any:
        counts[name] += 1
        return function(*arguments, **keywords)

    return counted


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """The tensors that autograd is handed to keep."""
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved


class Allocations(TorchDispatchMode):
    """The bytes of every storage that torch makes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._alive: list[Tensor] = []  # so that no two storages have one address
        self._seen: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                self._seen.add(x.untyped_storage().data_ptr())
        result = op(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self._seen:
                self._seen.add(x.untyped_storage().data_ptr())
                self.sizes.append(x.untyped_storage().nbytes())
                self._alive.append(x)
        return result
