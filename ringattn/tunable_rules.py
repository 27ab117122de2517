"""Rules of tunables: which values are worth trying, and which change nothing beside the other choices.

``tunables`` holds the table that they belong to. A rule ``x_void`` returns why the value of x in a case changes nothing
or cannot be had, "" where it counts; it is asked about values other than the plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .wording import plural

Value = str | int | bool | None
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
PACKINGS = ("documents", "varlen")


class Choices(Protocol):
    """Fields of a plan that rules read; see ``Tunables``."""

    @property
    def dtype(self) -> str: ...

    @property
    def checkpoint(self) -> str: ...

    @property
    def packing(self) -> str: ...

    @property
    def schedule(self) -> str: ...

    @property
    def layout(self) -> str: ...

    @property
    def window_tokens(self) -> int | None: ...

    @property
    def pool_threshold_mib(self) -> int | None: ...

    @property
    def ulysses(self) -> int: ...

    @property
    def head_groups(self) -> int: ...

    @property
    def exchange(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Case:
    """Question to the rules of an entry: a workload in plain numbers, and the choices made for it.

    ``segments`` and ``rates`` are the pattern's, one each per branch; a dense one is one segment of the sequence.
    Over several ranks ``degree`` is the number of ranks that exchange heads, 0 where the tunables give none, and
    ``travelling`` are the branches whose rows go from rank to rank. ``branch`` is the one that a rule of
    ``BranchTunables`` is asked about. ``packed`` says that documents of several lengths are asked about, ``decode``
    that one query over a cache is.
    """

    train: bool
    dense: bool
    seq_len: int
    input_dtype: str
    kv_heads: int
    world: int
    segments: tuple[int, ...]
    rates: tuple[int, ...]
    tunables: Choices
    degree: int = 1
    travelling: tuple[int, ...] = ()
    branch: int = 0
    packed: bool = False
    decode: bool = False


def no_reason(case: Case) -> str:
    return ""


def gather_void(case: Case) -> str:
    if case.rates[case.branch] == 1:
        return "rate 1 has nothing to gather; use view"
    if case.tunables.packing == "varlen":
        return "dilated rows of packed documents are always gathered; use view"
    return "rows that travel are always gathered; use view" if case.branch in case.travelling else ""


def checkpoint_void(case: Case) -> str:
    checkpoint, schedule = case.tunables.checkpoint, case.tunables.schedule
    if not case.train:
        return f"checkpoint {checkpoint} matters in training alone"
    if checkpoint == "none" and case.tunables.packing == "varlen":
        return "checkpoint none: packing varlen gathers rows again; use selective"
    if checkpoint == "none" and schedule not in ("local", *EXCHANGING):
        return f"checkpoint none: {schedule} keeps nothing that it receives; use selective"
    return ""


def windows(case: Case) -> tuple[Value, ...]:
    """Return one, two and four times the largest segment where every branch nests in it, beside all at once."""
    widest = max(case.segments)
    if case.dense or any(widest % segment for segment in case.segments):
        return (None,)
    return (None, *(widest * n for n in (1, 2, 4) if widest * n < case.seq_len))


def window_void(case: Case) -> str:
    window = case.tunables.window_tokens
    if case.tunables.schedule != "local":
        return "window_tokens: only schedule local goes window by window"
    if case.tunables.packing == "varlen":
        return "window_tokens: packing varlen runs all documents at once"
    if window is not None and window >= case.seq_len:
        return f"window_tokens {window} is no shorter than the sequence, {case.seq_len}"
    return ""


def between_kernels(what: str, dense: str) -> Callable[[Case], str]:
    """Return the rule of what belongs to branches that are gathered and merged here; ``dense`` lacks that."""

    def void(case: Case) -> str:
        if case.dense:
            return f"{what}: a dense plan has no {dense}"
        if case.tunables.packing == "varlen":
            return f"{what}: packing varlen gathers and merges all documents at once"
        if len(case.travelling) == len(case.rates):
            return f"{what}: every branch travels, and this is for those that do not"
        return ""

    return void


def launch_void(case: Case) -> str:
    checkpoint, schedule = case.tunables.checkpoint, case.tunables.schedule
    if schedule != "local":
        return f"launch graph: a graph holds no messages, and schedule {schedule} sends some"
    if case.packed:
        return "launch graph: graphs are for shapes that repeat, and documents of a batch are others each time"
    if case.train and checkpoint != "selective":
        return f"launch graph: calls in flight keep q, k, v, out and lse of their own, not what {checkpoint} keeps"
    return ""


def packing_void(case: Case) -> str:
    if not case.packed:
        return "packing varlen is for documents"
    return "packing varlen is for documents on one rank" if case.world > 1 else ""


def degrees(world: int) -> tuple[int, ...]:
    """Return how many consecutive ranks may exchange heads, with a ring across: divisors other than 1 and all."""
    return tuple(n for n in range(2, world) if world % n == 0)


def ulysses_void(case: Case) -> str:
    schedule = case.tunables.schedule
    if schedule == "ulysses-ring":
        return ""
    return f"ulysses {case.tunables.ulysses} belongs to schedule ulysses-ring, this is {schedule}"


def head_groups_void(case: Case) -> str:
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


def grad_wire_void(case: Case) -> str:
    dtype, schedule = case.tunables.dtype, case.tunables.schedule
    if not case.train:
        return "grad_wire matters in training alone"
    if schedule in ("local", "ulysses"):
        return f"grad_wire: schedule {schedule} sends no gradients of keys that are to be added"
    order = COMPUTE_DTYPES.index
    if dtype == case.input_dtype or order(dtype) < order(case.input_dtype):
        return f"grad_wire compute: {dtype} is no wider than the inputs, {case.input_dtype}"
    return ""


def exchange_void(case: Case) -> str:
    schedule = case.tunables.schedule
    return "" if schedule in EXCHANGING else f"exchange {case.tunables.exchange}: {schedule} exchanges no heads"
