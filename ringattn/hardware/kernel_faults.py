"""Holds the outcome of checking a kernel's numbers on a machine: plain frozen data, no torch.

A kernel runs a ``Combination`` where it was validated: by a probe whose profile matches this machine exactly, or by
the accuracy check of ``planning.validation``. A failed check is a ``KernelFault``, one of the facts of a machine, and
``rejection_reasons`` refuses what it names.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringattn.workload import ParamValue


@dataclass(frozen=True, slots=True)
class Combination:
    """Everything but lengths and head counts that decides which code of a kernel runs; ``dtype`` is the compute one."""

    kernel: str
    head_dim: int
    dtype: str
    backward: bool
    causal: bool
    grouped: bool
    deterministic: bool = False
    params: tuple[tuple[str, ParamValue], ...] = ()
    packed: bool = False  # the entry for packed sequences
    window: bool = False
    softcap: bool = False
    head_dim_v: int = 0  # 0 is head_dim
    dropout: bool = False
    one_query: bool = False  # over several keys

    def __str__(self) -> str:
        parts = [
            f"{self.kernel} {'backward' if self.backward else 'forward'}",
            f"head_dim {self.head_dim}" + (f" and {self.head_dim_v} of v" if self.head_dim_v else ""),
            self.dtype,
            "causal" if self.causal else "full",
            *(["grouped heads"] if self.grouped else []),
            *(["deterministic"] if self.deterministic else []),
            *(["packed"] if self.packed else []),
            *(["sliding window"] if self.window else []),
            *(["softcap"] if self.softcap else []),
            *(["dropout"] if self.dropout else []),
            *(["one query"] if self.one_query else []),
            *(f"{name}={value}" for name, value in self.params),
        ]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Figure:
    """Error of one result against float64, which may be up to ``bound``; NaN is beyond any."""

    name: str
    error: float
    bound: float

    @property
    def passes(self) -> bool:
        return self.error <= self.bound

    def __str__(self) -> str:
        return f"{self.name} errs by {self.error:.1e} (allowed {self.bound:.1e})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a check: the figures of every result, or ``message`` where the kernel raised an error instead."""

    figures: tuple[Figure, ...] = ()
    message: str = ""

    @property
    def passes(self) -> bool:
        return not self.message and all(figure.passes for figure in self.figures)

    @property
    def reason(self) -> str:
        """Reason for refusing the kernel; "" where it passes."""
        if self.message:
            return f"fails on this machine: {self.message}"
        wrong = ", ".join(map(str, (figure for figure in self.figures if not figure.passes)))
        return f"is wrong on this machine: {wrong} against float64" if wrong else ""


@dataclass(frozen=True, slots=True)
class KernelFault:
    """Combination that does not run on a machine, with the reason."""

    combination: Combination
    reason: str


def join_faults(*lists: tuple[KernelFault, ...]) -> tuple[KernelFault, ...]:
    """Return all of them, one per combination, in an order that does not depend on that of the lists."""
    found: dict[Combination, KernelFault] = {}
    for fault in (fault for faults in lists for fault in faults):
        found.setdefault(fault.combination, fault)
    return tuple(sorted(found.values(), key=lambda fault: str(fault.combination)))
