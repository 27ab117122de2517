"""Named ranges around the steps of a call, for torch.profiler and NVTX: gather, kernels, merge, messages, waits.

Programs are built with them or without: a call of a program without looks at nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

PREFIX = "ringattn::"

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@contextmanager
def _range(name: str) -> Iterator[None]:
    cuda: Any = torch.cuda
    on_gpu = cuda.is_initialized()
    if on_gpu:
        cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if on_gpu:
            cuda.nvtx.range_pop()


def named(name: str, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return ``function`` with a range around each call."""

    def run(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        with _range(PREFIX + name):
            return function(*arguments, **keywords)

    return run


def name_methods(owner: object, **names: str) -> None:
    """Put ranges of these names around methods of one object."""
    for method, name in names.items():
        setattr(owner, method, named(name, getattr(owner, method)))


class HasRanges:
    """Base of ``RingAttention``, which has what is declared here."""

    names_ranges = False
    _runners: dict[Any, Any]
    _programs: dict[Any, Any]
    traced: dict[Any, Any]

    def set_ranges(self, on: bool) -> None:
        """Build programs with named ranges, or without, from the next call on."""
        self.names_ranges = on
        for made in (self._runners, self._programs, self.traced):
            made.clear()


@contextmanager
def named_ranges(model: nn.Module) -> Iterator[None]:
    """Name the steps of every RingAttention of ``model`` inside the context, for torch.profiler and NVTX.

    The ranges are ``ringattn::gather``, ``ringattn::branch 0 cudnn forward``, ``ringattn::merge``, ``ringattn::sum``,
    ``ringattn::messages`` and ``ringattn::wait``. Programs are built anew on entering and on leaving, so call once
    before you measure. Inside, plans launch their steps one by one, also those that replay CUDA graphs, and a backward
    is ours where torch would have run its own.
    """
    modules = [module for module in model.modules() if isinstance(module, HasRanges)]
    for module in modules:
        module.set_ranges(True)
    try:
        yield
    finally:
        for module in modules:
            module.set_ranges(False)
