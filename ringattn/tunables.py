"""The table of tunables: all that a plan may choose, each in one entry. Plain frozen data, no torch.

A tunable is a field of ``Tunables``, or of ``BranchTunables`` where every branch of the pattern has its own, and the
field's metadata is its entry. What a plan may hold, which values are worth trying, which of them change nothing, the
text of ``describe``, the form in a profile and the place in the search all follow from the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from . import tunable_rules as rules
from .arguments import integer
from .errors import FieldError
from .tunable_rules import (
    CHECKPOINTS,
    COMPUTE_DTYPES,
    EXCHANGES,
    GATHERS,
    GRAD_WIRES,
    LAUNCHES,
    LAYOUTS,
    PACKINGS,
    POOL_STRATEGIES,
    SCHEDULES,
    Case,
    ParamValue,
    Value,
)

T = TypeVar("T")

Stage = Literal["kernels", "memory", "housekeeping", "finalists", "ranks"]


@dataclass(frozen=True, slots=True)
class Tunable:
    """One entry of the table; ``name``, ``plain`` and ``per_branch`` are the field's.

    ``allowed`` are the values that a plan may hold: these, integers from ``least`` on (and None, where that is the
    plain value), or any name where it is neither. ``values`` gives those worth trying for a case; without it all
    that are allowed are. ``void`` is the reason for which a value other than the plain one changes nothing or cannot be
    had beside the other choices, "" where it counts: such a plan is refused, and the search takes the plain value
    in its place, so that plans with equal steps are one candidate. What a machine cannot run is refused by
    ``rejection_reasons``. ``text`` is the part of ``describe`` where the value is not plain; without it ``name=value``.
    ``meaning`` explains that part to a reader who knows attention and not this table; kernels have their own.

    ``stage`` says when the search turns it: with the kernels, for memory, as housekeeping (worth little, tried one by
    one), on finalists only (costly to try), or for the ranks, where there are several. A profile leaves the plain
    value out, unless ``always_written``.
    """

    allowed: tuple[Value, ...] = ()
    least: int | None = None
    values: Callable[[Case], tuple[Value, ...]] | None = None
    void: Callable[[Case], str] = rules.no_reason
    text: Callable[[Tunables], str] | None = None
    meaning: str = ""
    stage: Stage = "kernels"
    name: str = ""
    plain: Value = None
    required: bool = False
    per_branch: bool = False

    def tried(self, case: Case) -> tuple[Value, ...]:
        """Return the values worth trying, the plain one first; empty where only the machine knows them."""
        values = self.allowed if self.values is None else self.values(case)
        return tuple(sorted(values, key=lambda value: value != self.plain))

    def value(self, tunables: Tunables, branch: int = 0) -> Value:
        """Return what a plan chose, for one branch where each has its own."""
        value: Value = getattr(tunables.branches[branch] if self.per_branch else tunables, self.name)
        return value

    def void_reason(self, case: Case) -> str:
        """Return why the value of the case, which is not the plain one, changes nothing; "" where it counts."""
        if self.stage == "ranks" and case.world == 1:
            return f"{self.name} {getattr(case.tunables, self.name)} is for a sequence over several ranks"
        if case.decode and not self.per_branch:
            return f"{self.name} is of the steps of a whole sequence, and this is decode"
        why = self.void(case)
        return f"branch {case.branch}: {why}" if why and self.per_branch else why

    def described(self, tunables: Tunables) -> str:
        """Return the part of ``describe``, "" for the plain value."""
        values = [self.value(tunables, n) for n in range(len(tunables.branches) if self.per_branch else 1)]
        if self.required or all(value == self.plain for value in values):
            return ""
        return f"{self.name}={','.join(map(str, values))}" if self.text is None else self.text(tunables)

    def checked(self, value: Any) -> Value:
        """Return a value as a plan holds it; FieldError for one that no plan may hold."""
        if self.allowed and value not in self.allowed:
            allowed = ", ".join(str(v) or repr(v) for v in self.allowed)
            raise FieldError(f"is {value!r}; use one of {allowed}", field=self.name)
        if self.least is None or (value is None and self.plain is None):
            checked: Value = value
            return checked
        return integer(self.name, value, least=self.least, instead="null or " if self.plain is None else "")


def tunable(plain: T, allowed: tuple[Any, ...] = (), *, always_written: bool = False, **entry: Any) -> T:
    """Return the field of a tunable, for a class body; see ``Tunable`` for the arguments."""
    made: T = field(default=plain, metadata=_metadata(Tunable(allowed, **entry), always_written))
    return made


def _metadata(entry: Tunable, always_written: bool = False) -> dict[str, Any]:
    return {"tunable": entry, "omit_default": not always_written}


def _gather_text(tunables: Tunables) -> str:
    gathers = [branch.gather for branch in tunables.branches]
    return "copy" if set(gathers) == {"copy"} else "gather=" + ",".join(gather[0] for gather in gathers)


# --- the table --------------------------------------------------------------------------------------------------


def _check(choices: Tunables | BranchTunables, entries: tuple[Tunable, ...]) -> None:
    for entry in entries:
        value = getattr(choices, entry.name)
        if (value is not entry.plain or entry.required) and (checked := entry.checked(value)) is not value:
            object.__setattr__(choices, entry.name, checked)


@dataclass(frozen=True, slots=True)
class BranchTunables:
    """Choices for one branch: the kernels of its two directions and how dilated rows reach them.

    A plan for inference holds no ``backward``, the empty string.
    """

    forward: str = field(metadata=_metadata(Tunable()))
    backward: str = tunable(
        "",
        void=lambda case: "" if case.train else "a backward kernel is for training alone, this is infer",
        text=lambda tunables: "",  # it stands beside the forward
    )
    gather: str = tunable(
        "view",
        GATHERS,
        values=lambda case: GATHERS if case.rates[case.branch] > 1 else ("view",),
        void=rules.gather_void,
        text=_gather_text,
        meaning="dilated rows are copied together first; by letters of branches, c is copied and v read in place",
        always_written=True,
    )

    def __post_init__(self) -> None:
        _check(self, _OF_A_BRANCH)


class _HashedOnce:
    """Keeps the hash of frozen data: a search asks for that of a plan, 20 values deep, a thousand times."""

    __slots__ = ("_hash",)  # no field, so that no copy takes it along: the hash of text is another in each process
    _hash: int


@dataclass(frozen=True, slots=True)
class Tunables(_HashedOnce):
    """One complete choice for a workload, as the search proposes it and a profile stores it.

    ``branches`` has one entry per branch of the pattern (one for dense). ``window_tokens`` bounds the positions
    whose workspace is alive at a time (None: all). ``pool_threshold_mib`` None turns the workspace pool off.
    ``packing`` "varlen" runs all documents of a packed batch in one call of a kernel's entry for them, "documents" one
    after the other. ``launch`` "graph" replays the launches of shapes that repeat from CUDA graphs.
    ``params`` are sorted ``("kernel.name", value)`` pairs handed to the kernel called ``kernel``.

    Over several ranks ``schedule`` says how rows travel and ``layout`` how the sequence is cut (empty at one rank).
    ``ulysses`` is the number of consecutive ranks that exchange heads under "ulysses-ring", 0 elsewhere;
    ``head_groups`` cuts the heads of an all-gather or Ulysses in groups that travel one after the other (0: one).
    Gradients of keys travel in the input dtype, or where ``grad_wire`` is "compute" in the wider compute dtype. Heads
    are exchanged by the group's all-to-all, or where ``exchange`` is "symmetric" by copies into the peers' memory.
    """

    dtype: str = field(
        metadata=_metadata(
            Tunable(COMPUTE_DTYPES, meaning="dtype that the kernels compute in; tf32 is fp32 on TF32 tensor cores")
        )
    )
    branches: tuple[BranchTunables, ...]
    checkpoint: str = tunable(
        "selective",
        CHECKPOINTS,
        values=lambda case: CHECKPOINTS if case.train else ("selective",),
        void=rules.checkpoint_void,
        meaning="what is kept for the backward: gathered and received rows beside q, k, v, out and lse (none); q, k "
        "and v alone, and the forward runs again (full); those five, in pinned host memory (offload)",
        stage="memory",
        always_written=True,
    )
    window_tokens: int | None = tunable(
        None,
        least=1,
        values=rules.windows,
        void=rules.window_void,
        text=lambda tunables: f"window={tunables.window_tokens}",
        meaning="tokens that run at a time, so that less workspace is held",
        stage="memory",
    )
    pattern_cache: bool = tunable(
        True,
        (True, False),
        values=lambda case: (True, False) if max(case.rates) > 1 else (True,),
        void=rules.between_kernels("pattern_cache off", "pattern to work out"),
        text=lambda tunables: "no-pattern-cache",
        meaning="index tensors of the pattern are made anew in each call",
        stage="housekeeping",
        always_written=True,
    )
    pool_threshold_mib: int | None = tunable(
        None,
        least=0,
        values=lambda case: (None, 1, 16),
        void=rules.between_kernels("pool_threshold_mib", "workspace to pool"),
        text=lambda tunables: f"pool>={tunables.pool_threshold_mib}MiB/{tunables.pool_strategy}",
        meaning="workspaces from this size on are kept, and used again for equal sizes (shape) or near ones (bucket)",
        stage="housekeeping",
    )
    pool_strategy: str = tunable(
        "shape",
        POOL_STRATEGIES,
        void=lambda case: "" if case.tunables.pool_threshold_mib is not None else "pool_strategy is of a pool alone",
        text=lambda tunables: "",  # it stands beside the threshold
        stage="housekeeping",
        always_written=True,
    )
    compile: bool = tunable(
        False,
        (False, True),
        void=rules.between_kernels("compile", "steps between kernels"),
        text=lambda tunables: "compile",
        meaning="the steps between kernels are compiled by torch.compile",
        stage="finalists",  # it costs seconds a plan
        always_written=True,
    )
    packing: str = tunable(
        "documents",
        PACKINGS,
        values=lambda case: PACKINGS if case.packed and case.world == 1 else PACKINGS[:1],
        void=rules.packing_void,
        meaning="all documents of a batch run in one call of a kernel",
    )
    launch: str = tunable(
        "eager",
        LAUNCHES,
        void=rules.launch_void,
        meaning="kernels of a shape that repeats are launched together, as a CUDA graph",
        stage="finalists",  # a capture takes 50 ms a shape
    )
    schedule: str = tunable(
        "local",
        SCHEDULES,
        text=lambda tunables: "/".join(filter(None, (tunables.schedule, tunables.layout))),
        meaning="way of keys and values between ranks, and behind a slash how they share the sequence; ulysses "
        "exchanges heads, ulysses-ring does within groups of ranks that form a ring",
        stage="ranks",
        always_written=True,
    )
    layout: str = tunable(
        "",
        ("", *LAYOUTS),
        values=lambda case: (case.tunables.layout,),  # the same for a whole profile
        text=lambda tunables: "",  # it stands beside the schedule
        stage="ranks",
    )
    ulysses: int = tunable(
        0,
        least=0,
        values=lambda case: (0, *rules.degrees(case.world)),
        void=rules.ulysses_void,
        meaning="consecutive ranks that exchange heads",
        stage="ranks",
    )
    head_groups: int = tunable(
        0,
        least=0,
        values=lambda case: (0, 2, 4, 8),
        void=rules.head_groups_void,
        meaning="groups in which heads travel, one after the other",
        stage="ranks",
    )
    grad_wire: str = tunable(
        "",
        GRAD_WIRES,
        void=rules.grad_wire_void,
        meaning="gradients of keys and values travel in the compute dtype, which is wider than the input dtype",
        stage="ranks",
    )
    exchange: str = tunable(
        "",
        EXCHANGES,
        void=rules.exchange_void,
        meaning="heads are exchanged by copies into the memory of the other ranks",
        stage="ranks",
    )
    params: tuple[tuple[str, ParamValue], ...] = ()

    def __post_init__(self) -> None:
        _check(self, _OF_THE_PLAN)
        if not self.branches:
            raise FieldError("is empty; a plan has one entry per branch, and one for dense", field="branches")
        if tuple(sorted(self.params)) != self.params:
            raise FieldError("must be sorted by name", field="params")

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash(tuple(getattr(self, name) for name in _NAMES)))
            return self._hash

    @property
    def kernels(self) -> frozenset[str]:
        """The names of all kernels of the plan, of either direction."""
        return frozenset(name for b in self.branches for name in (b.forward, b.backward) if name)

    @property
    def gathers(self) -> tuple[str, ...]:
        """The way of rows to the kernels of each branch."""
        return tuple(branch.gather for branch in self.branches)

    @property
    def is_local(self) -> bool:
        """True where every rank computes on its own rows, without a message."""
        return self.schedule == "local"

    @property
    def transport(self) -> str:
        """The way of keys and values between ranks, "ring" or "all-gather"."""
        return "all-gather" if self.schedule == "all-gather" else "ring"

    @property
    def transport_groups(self) -> int:
        """The groups of heads that an all-gather goes in; 1 where keys and values go in a ring."""
        return max(1, self.head_groups) if self.transport == "all-gather" else 1

    def exchange_degree(self, world: int) -> int:
        """Return how many consecutive ranks exchange heads; 1 where none do."""
        return {"ulysses": world, "ulysses-ring": self.ulysses}.get(self.schedule, 1)

    @property
    def keeps_inputs_and_results(self) -> bool:
        """True where q, k, v, out and lse are what is kept for the backward, as autograd itself would."""
        return self.checkpoint == "selective"

    def params_of(self, kernel: str) -> dict[str, ParamValue]:
        """Return the parameters meant for ``kernel``, without its prefix."""
        prefix = kernel + "."
        return {name.removeprefix(prefix): value for name, value in self.params if name.startswith(prefix)}


def _entries(cls: Any, *, per_branch: bool) -> tuple[Tunable, ...]:
    return tuple(
        replace(
            f.metadata["tunable"],
            name=f.name,
            plain=None if f.default is MISSING else f.default,
            required=f.default is MISSING,
            per_branch=per_branch,
        )
        for f in fields(cls)
        if "tunable" in f.metadata
    )


_NAMES = tuple(f.name for f in fields(Tunables))
_OF_A_BRANCH, _OF_THE_PLAN = _entries(BranchTunables, per_branch=True), _entries(Tunables, per_branch=False)

# Every tunable by its name. The parameters of kernels are listed by the kernels (``BlockKernel.params``).
TABLE: Mapping[str, Tunable] = MappingProxyType({entry.name: entry for entry in (*_OF_A_BRANCH, *_OF_THE_PLAN)})
