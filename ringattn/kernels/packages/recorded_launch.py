"""Calls of a package's function repeated as its bare launches: what its Python decides for a shape is decided once.

FlashAttention 4 takes 112 us of host time for a forward on an H200's host and torch's own kernels 38, most of it spent
on working out, from the shapes, which compiled kernels to launch with which workspace. ``RecordedLaunch`` watches one
such call and keeps its recipe: the tensors that it allocates and the compiled kernels that it calls. Later calls with
the same shapes, strides and dtypes allocate and launch without the rest.

A recipe is kept only where it explains everything: each tensor that a kernel receives is an input, a detached input or
one that a factory of torch made, and torch was asked for nothing else but what tensors look like. Otherwise, and where
one tensor is given twice, the function is called as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Recipes that are kept, of about 2 KB each; who meets more shapes starts again.
MOST_RECIPES = 512

Key = tuple[object, ...]
_ALIGNMENT = 16  # bytes that FlashAttention 4 wants of every pointer, or it copies
_recording = threading.Lock()  # of one call at a time: the package's caches stand in each other's place meanwhile


@dataclass(frozen=True, slots=True)
class _Allocation:
    """A tensor that a factory made."""

    zeros: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> Tensor:
        x = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return x.zero_() if self.zeros else x


@dataclass(frozen=True, slots=True)
class _Launch:
    """A call of a compiled kernel: its arguments, and which of them are which slots' tensors."""

    kernel: Callable[..., object]
    arguments: tuple[object, ...]
    tensors: tuple[tuple[int, int], ...]  # position of the argument, slot

    def run(self, slots: Sequence[Tensor]) -> None:
        arguments = list(self.arguments)
        for position, slot in self.tensors:
            arguments[position] = slots[slot]
        self.kernel(*arguments)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Slots are the inputs first, then the allocations in their order; ``results`` names the slots to return."""

    allocations: tuple[_Allocation, ...]
    launches: tuple[_Launch, ...]
    results: tuple[int, ...]

    def run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        slots = [x.detach() if x.requires_grad else x for x in inputs]
        slots += [allocation.make() for allocation in self.allocations]
        for launch in self.launches:
            launch.run(slots)
        return tuple(slots[n] for n in self.results)


class RecordedLaunch:
    """Calls ``function`` of ``module``, whose functions keep their compiled kernels in attributes ``compile_cache``.

    Called with tensors by position, then with those of ``into`` by name; ``keywords`` are the same at every call.
    Returns the first ``results`` of what the function returns. A shape is recorded when it comes for the second time,
    so that lengths that never come again cost nothing.
    """

    def __init__(
        self, function: Callable[..., Any], module: ModuleType, keywords: Mapping[str, object], results: int
    ) -> None:
        self._function, self._module, self._keywords, self._results = function, module, dict(keywords), results
        self._recipes: dict[Key, _Recipe | None] = {}  # None: met once
        self._explained = True

    def __call__(self, *inputs: Tensor, into: Mapping[str, Tensor] | None = None) -> tuple[Tensor, ...]:
        every = inputs if into is None else (*inputs, *into.values())
        distinct = len(set(map(id, every))) == len(every)
        if self._explained and distinct and not any(x.data_ptr() % _ALIGNMENT for x in every):
            key: Key = (
                None if into is None else tuple(into),
                torch.are_deterministic_algorithms_enabled(),
                *((x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in every),
            )
            recipe = self._recipes.get(key)
            if recipe is not None:
                return recipe.run(every)
            if key in self._recipes:
                return self._record(key, inputs, into)
            if len(self._recipes) >= MOST_RECIPES:
                self._recipes.clear()
            self._recipes[key] = None
        return self._call(inputs, into)

    def _call(self, inputs: Sequence[Tensor], into: Mapping[str, Tensor] | None) -> tuple[Tensor, ...]:
        return tuple(self._function(*inputs, **(into or {}), **self._keywords)[: self._results])

    def _record(self, key: Key, inputs: Sequence[Tensor], into: Mapping[str, Tensor] | None) -> tuple[Tensor, ...]:
        every = [*inputs, *(into or {}).values()]
        with _recording, _Watch(self._module, every) as watch:
            results = self._call(inputs, into)
        recipe = watch.recipe(results)
        if recipe is None:
            self._explained = False
        else:
            self._recipes[key] = recipe
        return results


class _Watch(TorchFunctionMode):
    """Notes what a call allocates and launches in this thread."""

    def __init__(self, module: ModuleType, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._slots = {id(x): n for n, x in enumerate(inputs)}
        self._count = len(inputs)
        self._alive: list[Tensor] = list(inputs)  # an id is a tensor's only while it lives
        self._allocations: list[_Allocation] = []
        self._launches: list[_Launch] = []
        self._explained = True
        self._addresses: set[int] = set()
        self._owners = [each for each in vars(module).values() if hasattr(each, "compile_cache")]
        self._caches = [owner.compile_cache for owner in self._owners]

    def __enter__(self) -> _Watch:
        for owner, cache in zip(self._owners, self._caches, strict=True):
            owner.compile_cache = _WatchedCache(cache, self._noted)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for owner, cache in zip(self._owners, self._caches, strict=True):
            owner.compile_cache = cache

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is Tensor.detach and id(args[0]) in self._slots:
            self._alive.append(result)
            self._slots[id(result)] = self._slots[id(args[0])]
        elif function in _FACTORIES:
            self._alive.append(result)
            self._slots[id(result)] = self._count + len(self._allocations)
            zeros = _FACTORIES[function]
            shape, stride = tuple(result.shape), result.stride()
            self._allocations.append(_Allocation(zeros, shape, stride, result.dtype, result.device))
        elif not _describes_a_tensor(function, result):
            self._explained = False
        if function is Tensor.data_ptr:
            self._addresses.add(result)
        return result

    def _noted(self, kernel: Callable[..., object], arguments: tuple[object, ...]) -> None:
        if threading.get_ident() != self._thread:
            return
        tensors = []
        for position, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                if id(argument) not in self._slots:
                    self._explained = False
                    return
                tensors.append((position, self._slots[id(argument)]))
            elif not self._is_constant(argument):
                self._explained = False
        plain = tuple(None if isinstance(argument, Tensor) else argument for argument in arguments)
        self._launches.append(_Launch(kernel, plain, tuple(tensors)))

    def _is_constant(self, argument: object) -> bool:
        """Return whether an argument is a number, text or None, or a tuple of such, and no tensor's address."""
        if isinstance(argument, tuple):
            return all(map(self._is_constant, argument))
        return argument is None or (isinstance(argument, int | float | str) and argument not in self._addresses)

    def recipe(self, results: Sequence[object]) -> _Recipe | None:
        """Return the recipe of the call, or None where something in it is not explained."""
        if not self._explained or not self._launches or any(id(x) not in self._slots for x in results):
            return None
        return _Recipe(tuple(self._allocations), tuple(self._launches), tuple(self._slots[id(x)] for x in results))


_FACTORIES: Mapping[object, bool] = {
    torch.empty: False,
    torch.empty_like: False,
    torch.zeros: True,
    torch.zeros_like: True,
}


# Functions whose plain result is of a tensor's values, not of what it looks like.
_OF_VALUES = {"item", "tolist", "equal", "allclose", "is_nonzero", "numpy", "__contains__", "__bool__", "__int__"}
_OF_VALUES |= {"__float__", "__index__", "__format__", "__repr__", "__array__"}


def _describes_a_tensor(function: Any, result: object) -> bool:
    """Return whether a function that torch was asked for only tells shapes, strides, dtypes and their like.

    What changes a tensor returns it, or None.
    """
    plain = isinstance(result, bool | int | str | torch.dtype | torch.device | torch.layout) or (
        isinstance(result, tuple) and all(isinstance(each, int) for each in result)
    )
    name = getattr(function, "__name__", "")
    return (plain and name not in _OF_VALUES) or name == "_set_grad_enabled"


class _WatchedCache:
    """A cache of compiled kernels that hands them out with their calls noted."""

    def __init__(self, cache: Any, noted: Callable[[Callable[..., object], tuple[object, ...]], None]) -> None:
        self._cache, self._noted = cache, noted

    def __contains__(self, key: object) -> bool:
        return key in self._cache

    def __setitem__(self, key: object, kernel: Callable[..., object]) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: object) -> Callable[..., object]:
        kernel = self._cache[key]

        def call(*arguments: object, **named: object) -> object:
            self._noted(kernel, (*arguments, named) if named else arguments)
            with torch._C.DisableTorchFunction():  # what a kernel does is its own
                return kernel(*arguments, **named)

        return call

    def get(self, key: object, default: Any = None) -> Any:
        return self[key] if key in self._cache else default

    def clear(self) -> None:
        self._cache.clear()
