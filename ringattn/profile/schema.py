"""The content of a hardware profile, as plain frozen data: no torch, no files (``yaml_io`` reads and writes them).

A profile answers workloads with plans. A *measured* one belongs to one machine (its fingerprint) and carries the
evidence; a *heuristic* one belongs to a family (``arch`` may be a range) and carries only a policy.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

from ringattn.errors import FieldError
from ringattn.wording import plural
from ringattn.workload import INPUT_DTYPES, Tunables, Workload, not_narrower

from .row_origin import RowOrigin, check_date

if TYPE_CHECKING:
    from ringattn.hardware.facts import HardwareFacts

SCHEMA_VERSION = 1
VENDORS = ("nvidia", "cpu")

Source = Literal["measured", "heuristic"]
FailureKind = Literal["oom", "crash", "timeout", "wrong", "compile", "error", "rejected"]
FAILURE_KINDS: tuple[str, ...] = ("oom", "crash", "timeout", "wrong", "compile", "error", "rejected")

MESSAGE_LIMIT = 400  # characters kept of a failure's message: enough to find the cause, small enough for 4 MiB
RUNNERS_UP = 2

_DIRECTORY = re.compile(r"(?<![\w.~/-])(?:[A-Za-z]:)?[/\\](?:[^\s/\\:'\"]+[/\\])+")
_HOME = re.compile(r"(?<![\w.~/-])(?:[A-Za-z]:)?[/\\](?:home|Users)[/\\][^\s/\\:'\"]+")


def shareable_text(text: str) -> str:
    """Return ``text`` as one bounded line that may leave this machine: file names keep no folders, which name users.

    Idempotent, so a loaded profile equals the dumped one.
    """
    line = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
    while (shorter := " ".join(_DIRECTORY.sub("", _HOME.sub("~", line)).split())) != line:
        line = shorter
    return line[:MESSAGE_LIMIT].rstrip()


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Speed of messages between ``world`` ranks on ``hosts`` hosts, each sending to the next at the same time.

    ``ring_gb_s`` is what the slowest rank sent and received at once, each way, in 10^9 bytes a second;
    ``latency_us`` a round of the smallest message, begun and waited for by the host.
    """

    world: int
    hosts: int
    ring_gb_s: float
    latency_us: float

    def __post_init__(self) -> None:
        if self.world < 2:
            raise FieldError(f"is {self.world!r}; it must be an integer >= 2", field="world")
        if not 1 <= self.hosts <= self.world:
            raise FieldError(f"is {self.hosts!r}; it must be an integer from 1 to world, {self.world}", field="hosts")
        for name in ("ring_gb_s", "latency_us"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise FieldError(f"is {value!r}; it must be a finite number > 0", field=name)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The machine a profile belongs to: HardwareFacts without its software. See there for the meaning of a field.

    ``link_speeds`` were measured with the plans over several ranks, one for each number of ranks. They are readings,
    never twice the same: machines are compared by ``link`` and ``device_count``.

    In a heuristic every field but ``vendor`` may be left at its default, which stands for "any"; ``arch`` may be a
    range, ``sm_70-sm_75`` or ``sm_100+``; and ``isa`` is what a CPU must have at least.
    """

    vendor: str
    device_name: str = ""
    sku: str = ""
    arch: str = ""
    sm_count: int = 0
    memory_mib: int = 0
    l2_mib: int = 0
    mig: str = ""
    vgpu: str = ""
    power_limit_w: int | None = None
    device_count: int = 1
    link: str = ""
    isa: tuple[str, ...] = ()
    threads: int = 0
    link_speeds: tuple[LinkSpeed, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        worlds = [speed.world for speed in self.link_speeds]
        if len(set(worlds)) < len(worlds):
            raise FieldError(f"holds worlds {worlds}; it must name each number of ranks once", field="link_speeds")
        if self.vendor not in VENDORS:
            raise FieldError(f"is {self.vendor!r}; use one of {', '.join(VENDORS)}", field="vendor")
        for name in ("sm_count", "memory_mib", "l2_mib", "power_limit_w", "threads"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise FieldError(f"is {value!r}; it must be an integer >= 0", field=name)
        if self.device_count < 1:
            raise FieldError(f"is {self.device_count!r}; it must be an integer >= 1", field="device_count")

    @classmethod
    def of(cls, facts: HardwareFacts) -> Fingerprint:
        return cls(**{f.name: getattr(facts, f.name) for f in fields(cls) if f.name != "link_speeds"})


@dataclass(frozen=True, slots=True)
class Evidence:
    """Measurements of one choice.

    ``median_ms`` is the device's time for a call, ``host_us`` the host's. ``default_ratio`` is t / t_default, paired
    block by block (below 1: faster than the default plan), and ``ratio_low``..``ratio_high`` its 95 % bootstrap
    interval, where t is the longer of the two times; of an entry's ``captured`` it is the device's. ``error`` is the
    relative 2-norm against float64, ``peak_bytes`` what is allocated beyond the inputs, ``blocks`` the number of paired
    repetitions. ``reproducible``: two calls gave the same bits, gradients included; None where that was not compared.
    """

    median_ms: float
    default_ratio: float
    ratio_low: float
    ratio_high: float
    peak_bytes: int
    error: float
    first_call_ms: float
    host_us: float
    blocks: int
    reproducible: bool | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and (not math.isfinite(value) or value < 0):
                raise FieldError(f"is {value!r}; it must be a finite number >= 0", field=f.name)
        if self.ratio_low > self.ratio_high:
            raise FieldError(f"is {self.ratio_low!r}, above ratio_high, {self.ratio_high!r}", field="ratio_low")


@dataclass(frozen=True, slots=True)
class Choice:
    """One complete plan with what was measured for it; no evidence where nothing was measured."""

    tunables: Tunables
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A candidate that did not make it: which, what kind of end, and the message (made shareable)."""

    candidate: str
    kind: FailureKind
    message: str = ""

    def __post_init__(self) -> None:
        if self.kind not in FAILURE_KINDS:
            raise FieldError(f"is {self.kind!r}; use one of {', '.join(FAILURE_KINDS)}", field="kind")
        object.__setattr__(self, "candidate", shareable_text(self.candidate))
        object.__setattr__(self, "message", shareable_text(self.message))


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One row of the table: a workload and what to run for it, or the reason why nothing can (``refusal``).

    ``choice`` is for calls of an eager loop, which last as long as the slower of host and device. ``captured`` is for
    calls in a CUDA graph or a compiled model, which hide the host: the plan of least device time, where that is
    another one. Ratios in its evidence are the device's; all others are of the longer of host and device time.

    ``auto`` is the fastest choice with a narrower compute dtype, for ``dtype="auto"``; ``front`` the Pareto front of
    time and memory; ``default`` what the winner was paired against; ``torch`` the kernel to which
    ``F.scaled_dot_product_attention`` dispatches this workload, without evidence where ``choice`` or ``default`` is
    that plan and has it; ``singles`` the fastest plan of each kernel used alone, in every branch and direction, that no
    other field holds: reports compare with these three, nothing runs them. ``origin`` is a row's effort and day
    where they are not those of the profile. ``under_load``: other work ran on the machine while it was timed.
    """

    workload: Workload
    choice: Choice | None = None
    runners_up: tuple[Choice, ...] = ()
    captured: Choice | None = None
    auto: Choice | None = None
    front: tuple[Choice, ...] = ()
    default: Choice | None = None
    torch: Choice | None = None
    singles: tuple[Choice, ...] = ()
    failures: tuple[Failure, ...] = ()
    refusal: str = ""
    origin: RowOrigin | None = None
    under_load: bool = field(default=False, metadata={"omit_default": True})

    def __post_init__(self) -> None:
        if (self.choice is None) != bool(self.refusal):
            raise FieldError("must say why where choice is absent, and be absent where it is present", field="refusal")
        if self.captured is not None and (self.choice is None or self.captured.tunables == self.choice.tunables):
            raise FieldError("must be another plan than choice; leave it out", field="captured")
        if self.captured is not None and self.captured.tunables.launch == "graph":
            raise FieldError("has launch graph, which a capture around it undoes; use eager", field="captured")
        if len(self.runners_up) > RUNNERS_UP:
            raise FieldError(f"holds {len(self.runners_up)} choices; keep at most {RUNNERS_UP}", field="runners_up")
        branches = max(1, len(self.workload.pattern.branches))
        for name, choices in self._choices():
            for choice in choices:
                if len(choice.tunables.branches) != branches:
                    found = plural(len(choice.tunables.branches), "branch")
                    problem = f"has {found} in its tunables; the workload's pattern needs {branches}"
                    raise FieldError(problem, field=name)

    @property
    def evidence(self) -> Evidence | None:
        """The evidence of the choice; None for a refusal, and for a workload that could not be measured."""
        return None if self.choice is None else self.choice.evidence

    @property
    def torch_evidence(self) -> Evidence | None:
        """The evidence of torch's own plan, also where it is that of ``choice`` or ``default``; None without any."""
        known = [choice for choice in (self.torch, self.choice, self.default) if choice is not None and choice.evidence]
        return next((c.evidence for c in known if self.torch is not None and c.tunables == self.torch.tunables), None)

    @property
    def torch_ratio(self) -> float | None:
        """t / t_torch of the choice, each paired with the default; None where either was not measured.

        Below 1 the choice is faster than ``F.scaled_dot_product_attention``. t is the longer of host and device time.
        """
        torch, mine = self.torch_evidence, self.evidence
        return mine.default_ratio / torch.default_ratio if mine and torch and torch.default_ratio else None

    @property
    def measured(self) -> tuple[Choice, ...]:
        """Every choice that has evidence, and so was held against float64."""
        return tuple(choice for _, choices in self._choices() for choice in choices if choice.evidence is not None)

    def _choices(self) -> tuple[tuple[str, tuple[Choice, ...]], ...]:
        def one(choice: Choice | None) -> tuple[Choice, ...]:
            return () if choice is None else (choice,)

        return (
            ("choice", one(self.choice)),
            ("captured", one(self.captured)),
            ("runners_up", self.runners_up),
            ("auto", one(self.auto)),
            ("front", self.front),
            ("default", one(self.default)),
            ("torch", one(self.torch)),
            ("singles", self.singles),
        )


def _check_kernel_lists(lists: KernelLists | LaunchBound | Policy) -> None:
    for direction in ("forward", "backward"):
        names = getattr(lists, direction)
        if not names or names[-1] != "math" or len(set(names)) != len(names):
            raise FieldError(f"is {list(names)}; it must name every kernel once and end in math", field=direction)


@dataclass(frozen=True, slots=True)
class KernelLists:
    """Part of a policy: kernels in order of preference, of which each list ends in ``math``."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_kernel_lists(self)


@dataclass(frozen=True, slots=True)
class LaunchBound:
    """Part of a policy for where launches take longer than the work they start.

    A launch is of that kind whose forward does less than ``below_gflop`` GFLOP: its kernels are these. Where all
    launches of a training step do on average, dilated heads are gathered by copies, each of which saves launches.
    """

    below_gflop: float
    forward: tuple[str, ...]
    backward: tuple[str, ...]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.below_gflop) and self.below_gflop > 0):
            raise FieldError(f"is {self.below_gflop!r}; it must be a finite number > 0", field="below_gflop")
        _check_kernel_lists(self)


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules for planning what nobody measured, for one family of devices.

    ``compute_dtype`` maps input dtype to compute dtype (never a narrower one); ``forward`` and ``backward`` are
    kernel names in order of preference and end in ``math``, which runs everything; dilated heads are read in place
    below rate ``copy_from_rate`` and gathered by a copy from it on. ``launch_bound`` is for little work and
    ``packed`` for documents side by side on one device, if those are treated differently.
    """

    compute_dtype: tuple[tuple[str, str], ...]
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    copy_from_rate: int
    launch_bound: LaunchBound | None = None
    packed: KernelLists | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute_dtype", tuple(sorted(self.compute_dtype)))
        given = [name for name, _ in self.compute_dtype]
        if given != sorted(INPUT_DTYPES):
            raise FieldError(f"maps {given}; it must map each of {', '.join(INPUT_DTYPES)}", field="compute_dtype")
        for name, dtype in self.compute_dtype:
            if dtype not in not_narrower(name):
                allowed = ", ".join(not_narrower(name))
                raise FieldError(f"maps {name} to {dtype!r}; use one of {allowed}", field="compute_dtype")
        _check_kernel_lists(self)
        if self.copy_from_rate < 2:
            raise FieldError(f"is {self.copy_from_rate!r}; it must be an integer >= 2", field="copy_from_rate")

    def dtype_for(self, input_dtype: str) -> str:
        """Return the compute dtype for an input dtype, both by short name."""
        return dict(self.compute_dtype)[input_dtype]

    def kernels_for(
        self,
        direction: Literal["forward", "backward"],
        compute_dtype: str,
        launch_gflop: float = math.inf,
        *,
        packed: bool = False,
    ) -> tuple[str, ...]:
        """Return the kernels to try for launches that do so much, best first; float64 runs on math alone."""
        if compute_dtype == "fp64":
            return ("math",)
        few = self.launch_bound if self.binds(launch_gflop) else None
        lists = few or (self.packed if packed else None) or self
        return lists.forward if direction == "forward" else lists.backward

    def binds(self, launch_gflop: float) -> bool:
        """Return whether launches that do so much are waited for themselves."""
        return self.launch_bound is not None and launch_gflop < self.launch_bound.below_gflop

    def gather_for(self, rate: int) -> str:
        return "copy" if rate >= self.copy_from_rate else "view"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Origin of a profile: which ringtune, on which day (``YYYY-MM-DD``), how hard it looked."""

    tool_version: str = ""
    date: str = ""
    effort: str = ""
    budget_s: float | None = None
    elapsed_s: float | None = None
    seed: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_date(self.date)
        for name in ("budget_s", "elapsed_s"):
            value = getattr(self, name)
            if value is not None and (not math.isfinite(value) or value < 0):
                raise FieldError(f"is {value!r}; it must be a finite number >= 0", field=name)
        object.__setattr__(self, "notes", tuple(shareable_text(note) for note in self.notes))


@dataclass(frozen=True, slots=True)
class Profile:
    """A table of plans for one machine, or a policy for a family of them."""

    source: Source
    fingerprint: Fingerprint
    software: tuple[tuple[str, str], ...] = ()
    policy: Policy | None = None
    plans: tuple[PlanEntry, ...] = ()
    provenance: Provenance = field(default_factory=Provenance)
    schema: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "software", tuple(sorted(self.software)))
        if self.schema != SCHEMA_VERSION:
            raise FieldError(f"is {self.schema!r}; this version reads and writes {SCHEMA_VERSION}", field="schema")
        if self.source == "heuristic":
            if self.policy is None:
                raise FieldError("is missing; a heuristic profile needs one", field="policy")
            if self.plans:
                raise FieldError("holds entries; a heuristic profile has none, a measured one does", field="plans")
        elif self.source == "measured":
            for name in ("device_name", "sku", "arch", "sm_count", "memory_mib"):
                if not getattr(self.fingerprint, name):
                    raise FieldError(f"has no {name}; a measured profile needs one", field="fingerprint")
        else:
            raise FieldError(f"is {self.source!r}; use measured or heuristic", field="source")
        twice = [w for w, count in Counter(entry.workload for entry in self.plans).items() if count > 1]
        if twice:
            raise FieldError(f"answers one workload more than once: {twice[0]}", field="plans")

    def covers(self, world: int) -> bool:
        """Return whether it holds plans for so many ranks."""
        return any(entry.workload.world == world for entry in self.plans)

    @classmethod
    def single(cls, facts: HardwareFacts, workload: Workload, tunables: Tunables) -> Profile:
        """Return a measured profile of one plan and no evidence: how a tuner hands the runtime a candidate."""
        return cls(
            source="measured",
            fingerprint=Fingerprint.of(facts),
            software=facts.software,
            plans=(PlanEntry(workload, Choice(tunables)),),
        )
