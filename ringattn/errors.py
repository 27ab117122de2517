"""Defines the errors that users can cause.

Each message is one line that names the thing, the value it had and the remedy. Anything else that goes wrong
is a bug of this package and is an ``assert``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any


def one_line(text: str) -> str:
    r"""Escape everything in ``text`` that steers a terminal, line ends too (``\n``): a profile's words are others'."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class KernelReason(str):
    """Reason that is one kernel's. As text it names the kernel's place in the plan."""

    branch: int
    direction: str
    kernel: str
    why: str

    def __new__(cls, branch: int, direction: str, kernel: str, why: str) -> KernelReason:
        made = super().__new__(cls, f"branch {branch} {direction} {kernel}: {why}")
        made.branch, made.direction, made.kernel, made.why = branch, direction, kernel, why
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.branch, self.direction, self.kernel, self.why


class RingAttentionError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(RingAttentionError, ValueError):
    """Tensor or argument that does not fit: its name, its value, and what would fit."""


class FieldError(InputError):
    """Field that a dataclass refuses: ``field`` is its name and ``problem`` says the rest.

    The text is both, "world is 1; it must be an integer >= 2". A class of its own, because torch.compile cannot trace
    an exception with an ``__init__``, and InputErrors are raised where it traces.
    """

    def __init__(self, problem: str, *, field: str) -> None:
        self.problem, self.field = problem, field
        super().__init__(f"{field} {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), field=self.field), (self.problem,)


class DeviceError(RingAttentionError, RuntimeError):
    """Device that is absent, or of a kind nobody has measured yet."""


class ProfileError(RingAttentionError, ValueError):
    """Hardware profile that cannot be read: the file, the key path inside it, and the fault."""

    def __init__(self, source: str, message: str, key: str = "") -> None:
        self.source = source
        self.key = key
        self._message = message
        self.problem = one_line(f"{key}: {message}" if key else message)  # without the file
        where = f"{source}: {key}" if key else source
        super().__init__(one_line(f"{where}: {message}"))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self._message, self.key)


class StoreError(RingAttentionError, RuntimeError):
    """Store of profiles, or a file in it, that cannot be used: the store's URL, and the fault."""

    def __init__(self, url: str, message: str) -> None:
        self.url, self.problem = url, one_line(message)
        super().__init__(one_line(f"{url}: {message}"))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.problem)


class PlanError(RingAttentionError, RuntimeError):
    """Workload that no candidate can run; holds every candidate with its reasons."""

    def __init__(self, subject: str, rejected: Mapping[str, Iterable[str]], remedy: str = "") -> None:
        self.rejected = {name: tuple(reasons) for name, reasons in rejected.items()}
        self._subject, self._remedy = subject, remedy
        listed = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in self.rejected.items())
        super().__init__(one_line(f"{subject}: {listed}" + (f". {remedy}" if remedy else "")))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._subject, self.rejected, self._remedy)

    def again(self) -> PlanError:
        """Copy the error to raise it anew: one that was raised holds on to the tensors of that call."""
        kind, arguments = self.__reduce__()
        again: PlanError = kind(*arguments)
        return again


class KernelLoadError(PlanError):
    """Kernel that cannot be loaded in this environment: its name, why, and what to install."""

    def __init__(self, kernel: str, reason: str, remedy: str) -> None:
        super().__init__(f"kernel {kernel} cannot be loaded", {kernel: (reason,)}, remedy)
        self.kernel = kernel

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kernel, *self.rejected[self.kernel], self._remedy)
