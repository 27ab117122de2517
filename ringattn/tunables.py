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

from .arguments import integer
from .errors import FieldError
from .wording import plural

Value = str | int | bool | None
T = TypeVar("T")
ParamValue = int | bool | str

COMPUTE_DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp64")  # from the least to the most precise
GATHERS = ("view", "copy")
CHECKPOINTS = ("none", "selective", "full", "offload")
POOL_STRATEGIES = ("shape", "bucket")
SCHEDULES = ("local", "ring", "all-gather", "ulysses", "ulysses-ring")
EXCHANGING = ("ulysses", "ulysses-ring")  # the schedules that exchange heads
LAYOUTS = ("contiguous", "zigzag")
GRAD_WIRES = ("", "compute")
EXCHANGES = ("", "symmetric")
LAUNCHES = ("eager", "graph")

Stage = Literal["kernels", "memory", "housekeeping", "finalists", "ranks"]


@dataclass(frozen=True, slots=True)
class Case:
    """Question to the rules of an entry: a workload in plain numbers, and the choices made for it.

    ``segments`` and ``rates`` are the pattern's, one each per branch; a dense one is one segment of the sequence.
    Over several ranks ``degree`` is the number of ranks that exchange heads, 0 where the tunables give none, and
    ``travelling`` are the branches whose rows go from rank to rank. ``branch`` is the one that a rule of
    ``BranchTunables`` is asked about. ``packed`` says that documents of several lengths are asked about.
    """

    train: bool
    dense: bool
    seq_len: int
    input_dtype: str
    kv_heads: int
    world: int
    segments: tuple[int, ...]
    rates: tuple[int, ...]
    tunables: Tunables
    degree: int = 1
    travelling: tuple[int, ...] = ()
    branch: int = 0
    packed: bool = False


def _no_reason(case: Case) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Tunable:
    """One entry of the table; ``name``, ``plain`` and ``per_branch`` are the field's.

    ``allowed`` are the values that a plan may hold: these, integers from ``least`` on (and None, where that is the
    plain value), or any name where it is neither. ``values`` gives those worth trying for a case; without it all
    that are allowed are. ``void`` is the reason for which a value other than the plain one changes nothing or cannot be
    had beside the other choices, "" where it counts: such a plan is refused, and the search takes the plain value
    in its place, so that plans with equal steps are one candidate. What a machine cannot run is refused by
    ``rejection_reasons``. ``text`` is the part of ``describe`` where the value is not plain; without it ``name=value``.

    ``stage`` says when the search turns it: with the kernels, for memory, as housekeeping (worth little, tried one by
    one), on finalists only (costly to try), or for the ranks, where there are several. A profile leaves the plain
    value out, unless ``always_written``.
    """

    allowed: tuple[Value, ...] = ()
    least: int | None = None
    values: Callable[[Case], tuple[Value, ...]] | None = None
    void: Callable[[Case], str] = _no_reason
    text: Callable[[Tunables], str] | None = None
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
            return f"{self.name} {self.value(case.tunables)} is for a sequence over several ranks"
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


# --- the rules of the entries -----------------------------------------------------------------------------------


def _gather_void(case: Case) -> str:
    if case.rates[case.branch] == 1:
        return "rate 1 has nothing to gather; use view"
    return "rows that travel are always gathered; use view" if case.branch in case.travelling else ""


def _gather_text(tunables: Tunables) -> str:
    gathers = [branch.gather for branch in tunables.branches]
    return "copy" if set(gathers) == {"copy"} else "gather=" + ",".join(gather[0] for gather in gathers)


def _checkpoint_void(case: Case) -> str:
    checkpoint, schedule = case.tunables.checkpoint, case.tunables.schedule
    if not case.train:
        return f"checkpoint {checkpoint} matters in training alone"
    if checkpoint == "none" and schedule not in ("local", *EXCHANGING):
        return f"checkpoint none: {schedule} keeps nothing that it receives; use selective"
    return ""


def _windows(case: Case) -> tuple[Value, ...]:
    """Return one, two and four times the largest segment where every branch nests in it, beside all at once."""
    widest = max(case.segments)
    if case.dense or any(widest % segment for segment in case.segments):
        return (None,)
    return (None, *(widest * n for n in (1, 2, 4) if widest * n < case.seq_len))


def _window_void(case: Case) -> str:
    window = case.tunables.window_tokens
    if case.tunables.schedule != "local":
        return "window_tokens: only schedule local goes window by window"
    if window is not None and window >= case.seq_len:
        return f"window_tokens {window} is no shorter than the sequence, {case.seq_len}"
    return ""


def _between_kernels(what: str, dense: str) -> Callable[[Case], str]:
    """Return the rule of what belongs to branches that are gathered and merged here; ``dense`` lacks that."""

    def void(case: Case) -> str:
        if case.dense:
            return f"{what}: a dense plan has no {dense}"
        if len(case.travelling) == len(case.rates):
            return f"{what}: every branch travels, and this is for those that do not"
        return ""

    return void


def _launch_void(case: Case) -> str:
    checkpoint, schedule = case.tunables.checkpoint, case.tunables.schedule
    if schedule != "local":
        return f"launch graph: a graph holds no messages, and schedule {schedule} sends some"
    if case.packed:
        return "launch graph: graphs are for shapes that repeat, and documents of a batch are others each time"
    if case.train and checkpoint != "selective":
        return f"launch graph: calls in flight keep q, k, v, out and lse of their own, not what {checkpoint} keeps"
    return ""


def degrees(world: int) -> tuple[int, ...]:
    """Return how many consecutive ranks may exchange heads, with a ring across: divisors other than 1 and all."""
    return tuple(n for n in range(2, world) if world % n == 0)


def _ulysses_void(case: Case) -> str:
    schedule = case.tunables.schedule
    if schedule == "ulysses-ring":
        return ""
    return f"ulysses {case.tunables.ulysses} belongs to schedule ulysses-ring, this is {schedule}"


def _head_groups_void(case: Case) -> str:
    groups, schedule = case.tunables.head_groups, case.tunables.schedule
    if groups == 1:
        return "head_groups 1 is what 0 means"
    if schedule == "all-gather":
        few = groups > case.kv_heads
        return f"head_groups {groups} is more than the {plural(case.kv_heads, 'key/value head')}" if few else ""
    if schedule not in EXCHANGING:
        return f"head_groups {groups}: {schedule} does not cut heads in groups"
    own = case.kv_heads // max(1, case.degree)
    return f"head_groups {groups} does not divide the {plural(own, 'key/value head')} of a rank" if own % groups else ""


def _grad_wire_void(case: Case) -> str:
    dtype, schedule = case.tunables.dtype, case.tunables.schedule
    if not case.train:
        return "grad_wire matters in training alone"
    if schedule in ("local", "ulysses"):
        return f"grad_wire: schedule {schedule} sends no gradients of keys that are to be added"
    order = COMPUTE_DTYPES.index
    if dtype == case.input_dtype or order(dtype) < order(case.input_dtype):
        return f"grad_wire compute: {dtype} is no wider than the inputs, {case.input_dtype}"
    return ""


def _exchange_void(case: Case) -> str:
    schedule = case.tunables.schedule
    return "" if schedule in EXCHANGING else f"exchange {case.tunables.exchange}: {schedule} exchanges no heads"


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
        void=_gather_void,
        text=_gather_text,
        always_written=True,
    )

    def __post_init__(self) -> None:
        _check(self, _OF_A_BRANCH)


@dataclass(frozen=True, slots=True)
class Tunables:
    """One complete choice for a workload, as the search proposes it and a profile stores it.

    ``branches`` has one entry per branch of the pattern (one for dense). ``window_tokens`` bounds the positions
    whose workspace is alive at a time (None: all). ``pool_threshold_mib`` None turns the workspace pool off.
    ``launch`` "graph" replays the launches of shapes that repeat from CUDA graphs.
    ``params`` are sorted ``("kernel.name", value)`` pairs handed to the kernel called ``kernel``.

    Over several ranks ``schedule`` says how rows travel and ``layout`` how the sequence is cut (empty at one rank).
    ``ulysses`` is the number of consecutive ranks that exchange heads under "ulysses-ring", 0 elsewhere;
    ``head_groups`` cuts the heads of an all-gather or Ulysses in groups that travel one after the other (0: one).
    Gradients of keys travel in the input dtype, or where ``grad_wire`` is "compute" in the wider compute dtype. Heads
    are exchanged by the group's all-to-all, or where ``exchange`` is "symmetric" by copies into the peers' memory.
    """

    dtype: str = field(metadata=_metadata(Tunable(COMPUTE_DTYPES)))
    branches: tuple[BranchTunables, ...]
    checkpoint: str = tunable(
        "selective",
        CHECKPOINTS,
        values=lambda case: CHECKPOINTS if case.train else ("selective",),
        void=_checkpoint_void,
        stage="memory",
        always_written=True,
    )
    window_tokens: int | None = tunable(
        None,
        least=1,
        values=_windows,
        void=_window_void,
        text=lambda tunables: f"window={tunables.window_tokens}",
        stage="memory",
    )
    pattern_cache: bool = tunable(
        True,
        (True, False),
        values=lambda case: (True, False) if max(case.rates) > 1 else (True,),
        void=_between_kernels("pattern_cache off", "pattern to work out"),
        text=lambda tunables: "no-pattern-cache",
        stage="housekeeping",
        always_written=True,
    )
    pool_threshold_mib: int | None = tunable(
        None,
        least=0,
        values=lambda case: (None, 1, 16),
        void=_between_kernels("pool_threshold_mib", "workspace to pool"),
        text=lambda tunables: f"pool>={tunables.pool_threshold_mib}MiB/{tunables.pool_strategy}",
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
        void=_between_kernels("compile", "steps between kernels"),
        text=lambda tunables: "compile",
        stage="finalists",  # it costs seconds a plan
        always_written=True,
    )
    launch: str = tunable("eager", LAUNCHES, void=_launch_void, stage="finalists")  # a capture takes 50 ms a shape
    schedule: str = tunable(
        "local",
        SCHEDULES,
        text=lambda tunables: "/".join(filter(None, (tunables.schedule, tunables.layout))),
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
    ulysses: int = tunable(0, least=0, values=lambda case: (0, *degrees(case.world)), void=_ulysses_void, stage="ranks")
    head_groups: int = tunable(0, least=0, values=lambda case: (0, 2, 4, 8), void=_head_groups_void, stage="ranks")
    grad_wire: str = tunable("", GRAD_WIRES, void=_grad_wire_void, stage="ranks")
    exchange: str = tunable("", EXCHANGES, void=_exchange_void, stage="ranks")
    params: tuple[tuple[str, ParamValue], ...] = ()

    def __post_init__(self) -> None:
        _check(self, _OF_THE_PLAN)
        if not self.branches:
            raise FieldError("is empty; a plan has one entry per branch, and one for dense", field="branches")
        if tuple(sorted(self.params)) != self.params:
            raise FieldError("must be sorted by name", field="params")

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


_OF_A_BRANCH, _OF_THE_PLAN = _entries(BranchTunables, per_branch=True), _entries(Tunables, per_branch=False)

# Every tunable by its name. The parameters of kernels are listed by the kernels (``BlockKernel.params``).
TABLE: Mapping[str, Tunable] = MappingProxyType({entry.name: entry for entry in (*_OF_A_BRANCH, *_OF_THE_PLAN)})
