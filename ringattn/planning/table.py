"""The plans of one module as a table, made at init: one row per (length bucket, input dtype, train or infer).

Pure: everything it reads is handed to it.

A row's plan was measured at the bucket's length. ``PlanTable.plan_at`` places an actual shape: the nearest bucket's
choice, then its runners-up, then the heuristic; the first that the constraint function lets run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from ringattn.arguments import integer
from ringattn.errors import PlanError
from ringattn.geometry.layout import resolve_layout
from ringattn.hardware.facts import HardwareFacts
from ringattn.hardware.kernel_faults import KernelFault, join_faults
from ringattn.profile.schema import Choice, PlanEntry, Policy
from ringattn.workload import (
    INPUT_DTYPES,
    MOST,
    Mode,
    Pattern,
    Tunables,
    Workload,
    attention_words,
    describe,
    head_words,
    not_narrower,
)

from .fused_steps import FUSED_STEPS
from .heuristic import NO_WISHES, Wishes, heuristic_plan, heuristic_tunables
from .matching import entry_for
from .plan import ORDINARY, Conditions, Origin, Plan, build_plan, rejection_reasons
from .preference import Launch, Preference, by_preference
from .ring import exchanges_heads
from .unmeasured_workloads import call_options, grid_options, remedy

# Where no length was measured a row is made for this one, to know at init whether anything can run at all.
_REPRESENTATIVE_LENGTH = 4096

_FORCE = "Name a backend to try it all the same, or probe again"


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """Facts that a module knows at init about every workload it will meet."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    pattern: Pattern
    max_seq_len: int | None = None
    world: int = 1
    window: int = 0
    softcap: float = 0.0
    head_dim_v: int = 0

    def __post_init__(self) -> None:
        """Raise FieldError for a number beyond those of any workload, which would take hours to plan for."""
        for name in ("heads", "kv_heads", "head_dim"):
            integer(name, getattr(self, name), most=MOST[name])
        if self.head_dim_v:
            integer("head_dim_v", self.head_dim_v, most=MOST["head_dim"])
        if self.head_dim_v == self.head_dim:
            object.__setattr__(self, "head_dim_v", 0)

    def __str__(self) -> str:
        world = f" world={self.world}" if self.world > 1 else ""
        return f"{attention_words(self)} {head_words(self)}{world}"

    @classmethod
    def of(cls, workload: Workload) -> ModuleShape:
        """Return the shape of a module that meets this workload."""
        w = workload
        scores = w.window, w.softcap, w.head_dim_v
        return cls(w.heads, w.kv_heads, w.head_dim, w.causal, w.pattern, None, w.world, *scores)

    @property
    def value_dim(self) -> int:
        """Head dimension of v and out."""
        return self.head_dim_v or self.head_dim

    def layout(self, asked: str, entries: Sequence[PlanEntry], facts: HardwareFacts) -> str:
        """Return the layout over the ranks, where a profile has these rows for the module; see ``resolve_layout``."""
        measured = [entry.choice.tunables.layout for entry in entries if entry.choice is not None]
        exchanged = exchanges_heads(self.pattern, self.kv_heads, self.world, facts)
        windowed = self.window > 0
        return resolve_layout(asked, self.pattern, self.causal, measured, exchanged=exchanged, windowed=windowed)

    def workload(
        self,
        seq_len: int,
        dtype: str,
        train: bool,
        batch: int = 1,
        total_length: int = 0,
        packed_tokens: int = 0,
        *,
        decode: bool = False,
        dropout: float = 0.0,
    ) -> Workload:
        """Return the workload of a call; with ``decode`` that of one query over a rank's part of a cache."""
        mode: Mode = "decode" if decode else "train" if train else "infer"
        world = 1 if decode else self.world
        # A window that reaches over everything is none, and what a cache holds is cut to it there.
        windowed = not decode and self.window < (total_length or world * seq_len)
        return Workload(
            mode=mode,
            causal=self.causal,
            seq_len=seq_len,
            heads=self.heads,
            head_dim=self.head_dim,
            dtype=dtype,
            kv_heads=self.kv_heads,
            batch=batch,
            pattern=self.pattern,
            world=world,
            total_length=total_length,
            packed_tokens=packed_tokens,
            window=self.window if windowed else 0,
            softcap=self.softcap,
            head_dim_v=self.head_dim_v,
            dropout=dropout,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One row: a plan, or why there is none. ``measured`` is the workload of its entry in the profile.

    None stands for every length that was not measured.
    """

    measured: Workload | None
    dtype: str
    mode: Mode
    plan: Plan | None
    refusal: PlanError | None = None
    refused_by: Origin | None = None  # where there is no plan, what an ``origin`` would be
    note: str = ""
    dropout: float = 0.0

    @property
    def kind(self) -> str:
        """Return input dtype and mode in words, with the dropout of training."""
        return f"{self.dtype} {self.mode}" + (f" dropout={self.dropout:g}" if self.dropout else "")

    @property
    def bucket(self) -> int | None:
        """Measured length, or None."""
        return None if self.measured is None else self.measured.seq_len

    @property
    def origin(self) -> Origin:
        """Return the origin of the plan, or of its refusal."""
        origin = self.refused_by if self.plan is None else self.plan.origin
        assert origin is not None
        return origin

    def runnable(self) -> Plan:
        """Return the plan; PlanError where the row is a refusal."""
        if self.plan is None:
            assert self.refusal is not None
            raise self.refusal.again()
        return self.plan

    def __str__(self) -> str:
        length = "any other length"
        if self.measured is not None:
            length = f"B~{self.measured.batch} " * (self.measured.batch > 1) + f"S~{self.bucket}"
            length += " packed" * self.measured.packed
        what = describe(self.plan.tunables) if self.plan else f"refused: {self.refusal}"
        mode = self.kind.partition(" ")[2]
        return f"{length:>16}  {self.dtype:<4}  {mode:<5}  {what}  ({self.origin})"


class Note(NamedTuple):
    """Something to tell the user once, "" for nothing, and what the first call of which it is true adds to it."""

    text: str
    of_first: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that the plans of a module follow from: equal questions have equal plans."""

    shape: ModuleShape
    entries: tuple[PlanEntry, ...]
    policy: Policy
    facts: HardwareFacts
    conditions: Conditions
    wishes: Wishes
    auto_dtype: bool
    prefer: Preference | None = None  # None: the plan that the profile's own probe preferred
    launch: Launch = "eager"
    dropout: float = field(default=0.0, metadata={"omit_default": True})  # of the module, in training mode

    @property
    def question(self) -> Question:
        """The question alone, of what has one."""
        return Question(**{field.name: getattr(self, field.name) for field in fields(Question)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable(Question):
    """All rows of a module; printable, never changed after init."""

    rows: tuple[Row, ...] = ()

    def __str__(self) -> str:
        return "\n".join(str(row) for row in self.rows)

    def without(
        self,
        faults: Sequence[KernelFault],
        *,
        strict: bool,
        place_of: Callable[[PlanEntry], str] | None,
    ) -> PlanTable:
        """Return the table without kernels that turned out to be wrong; see ``build_table`` for what is raised."""
        facts = replace(self.facts, faults=join_faults(self.facts.faults, tuple(faults)))
        return table_of(replace(self.question, facts=facts), strict=strict, place_of=place_of)

    def plan_at(
        self, seq_len: int, dtype: str, train: bool, batch: int, total_length: int = 0, packed_tokens: int = 0,
        dropout: float = 0.0,
    ) -> Row:  # fmt: skip
        """Return the row for an actual shape, its plan checked for exactly that shape (index limits, windows)."""
        workload = self.shape.workload(seq_len, dtype, train, batch, total_length, packed_tokens, dropout=dropout)
        return self._build(self._entry(workload), workload)

    def row_of(self, workload: Workload) -> Row:
        """Return the row for a workload of the module's shape, of any mode."""
        w = workload
        if w.decode:
            return self.decode_at(w.seq_len, w.dtype, w.batch)
        return self.plan_at(w.seq_len, w.dtype, w.train, w.batch, w.total_length, w.packed_tokens, w.dropout)

    def local_at(self, seq_len: int, dtype: str, train: bool, batch: int) -> Row:
        """Return the row for a sequence that one rank holds, also where the module has several.

        It is cut in blocks there, of which none has a window.
        """
        workload = replace(self.shape.workload(seq_len, dtype, train, batch), world=1, window=0)
        return self._build(self._entry(workload) if self.shape.world == 1 else None, workload)

    def decode_at(self, cached: int, dtype: str, batch: int) -> Row:
        """Return the row for one query of each sequence over so many cached positions."""
        workload = self.shape.workload(cached, dtype, False, batch, decode=True)
        return self._build(self._entry(workload), workload)

    def choices_of(self, workload: Workload) -> tuple[PlanEntry | None, list[Choice]]:
        """Return the row of the profile that serves a workload, and its choices, the one to run first."""
        entry = self._entry(workload)
        return entry, self._choices(entry, workload)

    def fallback_note(self, row: Row, *, searched: bool = False) -> Note:
        """Return what to tell the user where the measured plan of a length does not serve it; "" where it does.

        One text for all lengths outside the measured ones, so that saying it once is enough. Without any row it is
        said at init, but of decoding, documents and dropout: not where profiles were ``searched``.
        """
        what = f"{self.shape} {row.kind}"
        instead = "a heuristic plan" if self.entries and row.origin.source == "heuristic" else "the next best plan"
        if row.note:
            first = "a measured plan" if self.entries else "the heuristic's first plan"
            return Note(f"{what}: {first} cannot run here and gives way to {instead} ({row.note})")
        if row.plan is None or row.origin.source == "profile":
            return Note("")
        w = row.plan.workload
        if not self.entries and not (searched and (w.decode or w.packed or w.dropout)):
            return Note("")
        if w.dropout:
            kernel = row.plan.tunables.branches[0].forward
            cost = " and makes every weight in memory" if kernel == "math" else ""
            return Note(f"{what}: dropout is not probed; {kernel} serves, which draws it{cost}")
        measured = _buckets(self.entries, w)
        if row.bucket is None and measured:
            span = f"from {measured[0]} to {measured[-1]}" if len(measured) > 1 else f"at {measured[0]}"
            outside = f"measured {span} positions; outside, a heuristic plan serves"
            return Note(f"{what}: {outside}", remedy(w, *call_options(w), what="this one"))
        subject = "documents were not measured" if w.packed else "not measured"
        options = grid_options(w) if w.decode else call_options(w)
        return Note(f"{what}: {subject}; a heuristic plan serves", remedy(w, *options))

    def _build(self, entry: PlanEntry | None, workload: Workload) -> Row:
        """Return the first that can run of the entry's choices and the heuristic, for this workload."""
        measured = None if entry is None else entry.workload
        user = self.wishes != NO_WISHES
        fixed: dict[str, Any] = {"measured": measured, "dtype": workload.dtype, "mode": workload.mode}
        fixed["dropout"] = workload.dropout
        refused = entry.refusal if entry is not None else ""
        if refused and self.wishes == NO_WISHES:
            refusal = PlanError(f"cannot run {workload}", {"measured": (refused,)}, _FORCE)
            return Row(**fixed, plan=None, refusal=refusal, refused_by=Origin("profile"))
        rejected: dict[str, tuple[str, ...]] = {}
        for choice in self._choices(entry, workload):
            tunables = fitted(choice.tunables, workload)
            try:
                plan = build_plan(workload, tunables, self.facts, conditions=self.conditions)
            except PlanError as error:
                rejected |= error.rejected
                continue
            origin = Origin("profile", user, measured=choice.evidence is not None)
            note = "; ".join(f"{name}: {', '.join(why)}" for name, why in rejected.items())
            return Row(**fixed, plan=replace(plan, origin=origin), note=note)
        origin = Origin("heuristic", user)
        try:
            plan = heuristic_plan(workload, self.policy, self.facts, conditions=self.conditions, wishes=self.wishes)
        except PlanError as error:
            return Row(**fixed, plan=None, refusal=error.again(), refused_by=origin)
        rejected |= self._failed(workload)
        note = "; ".join(f"{name}: {', '.join(why)}" for name, why in rejected.items())
        return Row(**fixed, plan=replace(plan, origin=origin), note=note)

    def _failed(self, workload: Workload) -> dict[str, tuple[str, ...]]:
        """Return the heuristic's plan with what failed on this machine; empty where that is the one it has without."""
        if not self.facts.faults:
            return {}
        trusting = replace(self.facts, faults=())
        first = heuristic_tunables(workload, self.policy, trusting, conditions=self.conditions, wishes=self.wishes)
        reasons = rejection_reasons(workload, first, self.facts, conditions=self.conditions)
        return {describe(first): reasons} if reasons else {}

    def _choices(self, entry: PlanEntry | None, workload: Workload) -> list[Choice]:
        if entry is None or entry.choice is None:
            return []
        listed = [entry.choice, *entry.runners_up, *entry.front]
        if entry.default is not None and entry.default.evidence is not None:
            listed.append(entry.default)  # it may be leaner than the choice, and what was timed is no guess
        if self.launch == "captured":  # a graph of its own steps aside there, and such a plan was chosen for the graph
            captured = [entry.captured] if entry.captured is not None else []
            listed = captured + [choice for choice in listed if choice.tunables.launch == "eager"]
        if self.auto_dtype and entry.auto is not None:
            listed.insert(0, entry.auto)
        elif self.wishes.dtype is None:
            listed = [choice for choice in listed if choice.tunables.dtype in not_narrower(workload.dtype)]
        else:
            listed += [entry.auto] if entry.auto is not None else []
            listed = [choice for choice in listed if choice.tunables.dtype == self.wishes.dtype]
        listed = [_with_wishes(choice, self.wishes, workload.train) for choice in listed]
        return listed if self.prefer is None else by_preference(listed, self.prefer, self.launch)

    def _runs_for_its_own_heads(self, entry: PlanEntry) -> bool:
        """Return whether an entry for other heads than the module's, which has some, runs as it was measured."""
        own, asked = entry.workload, (self.shape.heads, self.shape.kv_heads)
        covered = any((w.heads, w.kv_heads) == asked for w in (other.workload for other in self.entries))
        return covered and (own.heads, own.kv_heads) != asked and not _gives_way(self._build(entry, own))

    def _entry(self, workload: Workload) -> PlanEntry | None:
        return entry_for(self.entries, workload, self.facts.sm_count)


def _gives_way(row: Row) -> bool:
    """Return whether something else runs than the choice of the row's entry."""
    return bool(row.note) or row.origin.source == "heuristic"


def _with_wishes(choice: Choice, wishes: Wishes, train: bool) -> Choice:
    """Return what was measured says nothing of a plan that wishes have changed."""
    tunables = as_wished(choice.tunables, wishes, train)
    return choice if tunables == choice.tunables else Choice(tunables)


def as_wished(tunables: Tunables, wishes: Wishes, train: bool) -> Tunables:
    """Return the tunables with the kernels and checkpoint asked for, and no parameter of a kernel that left."""
    branches = tuple(
        replace(
            branch,
            forward=wishes.forward or branch.forward,
            backward=(wishes.backward or branch.backward) if train else "",
        )
        for branch in tunables.branches
    )
    used = {name for branch in branches for name in (branch.forward, branch.backward)}
    params = tuple(
        (name, value)
        for name, value in tunables.params
        if name.rpartition(".")[0] in used or name.rpartition(".")[0] in FUSED_STEPS
    )
    checkpoint = wishes.checkpoint if wishes.checkpoint and train else tunables.checkpoint
    return replace(tunables, branches=branches, params=params, checkpoint=checkpoint)


def fitted(tunables: Tunables, workload: Workload) -> Tunables:
    """Return the tunables at another length than the measured one: a window that no longer splits anything goes."""
    if tunables.window_tokens is not None and tunables.window_tokens >= workload.seq_len:
        return replace(tunables, window_tokens=None)
    return tunables


def build_table(
    shape: ModuleShape,
    entries: tuple[PlanEntry, ...],
    policy: Policy,
    facts: HardwareFacts,
    *,
    conditions: Conditions = ORDINARY,
    wishes: Wishes = NO_WISHES,
    auto_dtype: bool = False,
    prefer: Preference | None = None,
    launch: Launch = "eager",
    dropout: float = 0.0,
    strict: bool = False,
    place_of: Callable[[PlanEntry], str] | None = None,
) -> PlanTable:
    """Return every row for ``shape``. ``entries`` are those of the profile that match it.

    ``strict``: a profile named by the user must run; PlanError when an entry's own choice cannot. Without it a
    choice that cannot run gives way to the next and to the heuristic, as does one for other heads than the module's
    that could run for these, in a profile that covers the module's too. PlanError too when *no* row can run.
    ``place_of`` says where an entry is written, for that error.
    """
    question = Question(shape, entries, policy, facts, conditions, wishes, auto_dtype, prefer, launch, dropout)
    return table_of(question, strict=strict, place_of=place_of)


def table_of(
    question: Question, *, strict: bool = False, place_of: Callable[[PlanEntry], str] | None = None
) -> PlanTable:
    """Return every row that follows from a question; see ``build_table``."""
    table = PlanTable(**{field.name: getattr(question, field.name) for field in fields(Question)})
    shape, entries, wishes = table.shape, table.entries, table.wishes
    rows: list[Row] = []
    for dtype in INPUT_DTYPES:
        modes: tuple[Mode, ...] = ("infer", "train", "decode")
        for mode in modes:
            for entry in entries:
                w = entry.workload
                if (w.dtype, w.mode) != (dtype, mode):
                    continue
                workload = shape.workload(
                    w.seq_len, dtype, w.train, w.batch, packed_tokens=w.packed_tokens, decode=w.decode
                )
                if table._entry(workload) is not entry:
                    continue  # another with the same length is nearer to the module
                row = table._build(entry, workload)
                if strict and wishes == NO_WISHES and _gives_way(row) and not table._runs_for_its_own_heads(entry):
                    narrower = f"it computes in less than {dtype}, which only dtype='auto' may"
                    why = row.note or str(row.refusal or narrower)
                    place = f"{place_of(entry)}: " if place_of else ""
                    raise PlanError(
                        f"{place}the profile's plan for {workload} cannot run here",
                        {"plan": (why,)},
                        "Probe this machine again, or name no profile",
                    )
                rows.append(row)
            if mode == "decode":  # without an entry it has a row when it is asked for
                continue
            rows.append(table._build(None, shape.workload(_representative(shape), dtype, mode == "train")))
    refusals = [row.refusal for row in rows if row.refusal is not None]
    if len(refusals) == len(rows):
        raise PlanError("nothing that was asked for can run on this machine", _merged_reasons(refusals))
    trained = [row for row in rows if row.mode == "train"]
    decided = wishes.checkpoint != "none" or shape.pattern.dense  # whether branches gather depends on the length
    if wishes.checkpoint is not None and decided and all(row.refusal is not None for row in trained):
        # A checkpoint matters in training alone, so this one could never be followed.
        refusals = [row.refusal for row in trained if row.refusal is not None]
        raise PlanError(f"checkpoint {wishes.checkpoint} can run nowhere here", _merged_reasons(refusals))
    return replace(table, rows=(*rows, *_dropping_rows(table)))


def _dropping_rows(table: PlanTable) -> Iterator[Row]:
    """Yield the rows of training with the module's dropout: of what a profile has of it, and of any other length."""
    if not table.dropout:
        return
    for dtype in INPUT_DTYPES:
        for entry in table.entries:
            w = entry.workload
            asked = table.shape.workload(w.seq_len, dtype, True, w.batch, dropout=table.dropout)
            if table._entry(asked) is entry:
                yield table._build(entry, asked)
        yield table._build(None, table.shape.workload(_representative(table.shape), dtype, True, dropout=table.dropout))


def _representative(shape: ModuleShape) -> int:
    return min(shape.max_seq_len or _REPRESENTATIVE_LENGTH, _REPRESENTATIVE_LENGTH)


def _merged_reasons(refusals: list[PlanError]) -> dict[str, tuple[str, ...]]:
    """Return every candidate of several refusals once, with all that speaks against it."""
    merged: dict[str, tuple[str, ...]] = {}
    for refusal in refusals:
        for name, reasons in refusal.rejected.items():
            merged[name] = tuple(dict.fromkeys((*merged.get(name, ()), *reasons)))
    return merged


def _buckets(entries: tuple[PlanEntry, ...], of: Workload) -> list[int]:
    """Return the measured lengths of workloads of this kind."""

    def kind(w: Workload) -> tuple[object, ...]:
        return w.mode, w.dtype, w.packed, w.window

    return sorted({entry.workload.seq_len for entry in entries if kind(entry.workload) == kind(of)})
