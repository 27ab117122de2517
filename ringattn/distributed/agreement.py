"""Agreement of ranks on one plan for a module: they exchange what each resolved, and settle what differs.

What must be equal (the module's arguments, versions, architecture) is checked; plans that differ, because ranks found
different profiles or packages, give way to one that every rank can run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from ringattn.errors import InputError, PlanError, RingAttentionError
from ringattn.hardware.facts import HardwareFacts
from ringattn.hardware.kernel_faults import join_faults
from ringattn.planning.module_setup import ModuleSetup
from ringattn.planning.table import PlanTable, build_table
from ringattn.profile.schema import PlanEntry, Policy

from .peer_errors import PeerError, mark_known
from .watchdog import Watchdog

logger = logging.getLogger("ringattn")

Entries = tuple[PlanEntry, ...]


@dataclass(frozen=True, slots=True)
class Statement:
    """Plans that one rank resolved, or the error that it met."""

    error: str = ""
    arguments: tuple[tuple[str, str], ...] = ()
    facts: HardwareFacts | None = None
    table: str = ""
    source: str = ""
    entries: Entries = ()
    policy: Policy | None = None


def plan_together(
    watchdog: Watchdog,
    group: dist.ProcessGroup,
    module: int,
    arguments: tuple[tuple[str, str], ...],
    build: Callable[[], tuple[ModuleSetup, PlanTable]],
    layout_with: Callable[[Entries, HardwareFacts], str],
) -> tuple[ModuleSetup, PlanTable]:
    """Run ``build`` on every rank, and return one common result.

    ``layout_with`` says which layout goes with a profile's rows.

    Raises the rank's own error, or PeerError with that of another; InputError for unequal arguments, versions or
    architectures; PlanError where no plan runs on every rank.
    """
    own: RingAttentionError | None = None
    built: tuple[ModuleSetup, PlanTable] | None = None
    try:
        built = build()
        statement = _statement(arguments, *built)
    except PeerError:  # a rank is missing, which every rank has waited for
        raise
    except RingAttentionError as error:
        own, statement = error, Statement(error=f"{type(error).__name__}: {error}")
    said = _gather(watchdog, group, module, "resolved", statement)
    try:
        if own is not None:
            raise own
        failed = [rank for rank, each in enumerate(said) if each.error]
        if failed:
            raise PeerError(f"rank {failed[0]} of the group could not build its module: {said[failed[0]].error}")
        assert built is not None
        _check_equal(said)
        if all(each.table == said[0].table for each in said):
            return built
        return _common(watchdog, group, module, built, said, layout_with)
    except RingAttentionError as error:
        mark_known(error)
        raise


def tell_of_error(watchdog: Watchdog, group: dist.ProcessGroup, module: int, error: Exception) -> None:
    """Take part in ``plan_together`` of the other ranks with an error that this rank met before it."""
    _gather(watchdog, group, module, "resolved", Statement(error=f"{type(error).__name__}: {error}"))
    mark_known(error)


def _statement(arguments: tuple[tuple[str, str], ...], setup: ModuleSetup, table: PlanTable) -> Statement:
    resolution = setup.resolution
    source = f"{resolution.path} ({resolution.tier})" if setup.entries and resolution else "the heuristic"
    return Statement("", arguments, table.facts, _plans_of(table), source, setup.entries, setup.policy)


def _plans_of(table: PlanTable) -> str:
    """Return what must be equal on all ranks: the plans, and which kernels were found wrong, but not by how much."""
    plans = [(row.bucket, row.dtype, row.mode, row.plan) for row in table.rows]
    return repr((plans, [fault.combination for fault in table.facts.faults]))


def _gather(watchdog: Watchdog, group: dist.ProcessGroup, module: int, what: str, mine: Any) -> list[Any]:
    """Return every rank's object; PeerError names the ranks that do not come within the group's timeout."""
    keys = [f"init/{module}/{what}/{rank}" for rank in range(watchdog.size)]
    watchdog.announce(keys[watchdog.rank])
    watchdog.wait_for(keys, "did not build the same RingAttention")
    gathered: list[Any] = [None] * watchdog.size
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def _check_equal(said: Sequence[Statement]) -> None:
    """Raise InputError for the first thing that must be equal and is not."""
    for rank, each in enumerate(said):
        for (name, mine), (_, there) in zip(said[0].arguments, each.arguments, strict=True):
            if mine != there:
                raise InputError(
                    f"{name} is {mine} on rank 0 of the group and {there} on rank {rank}; it must be the same on all"
                )
        first, other = said[0].facts, each.facts
        assert first is not None
        assert other is not None
        for name in ("vendor", "arch"):
            if getattr(first, name) != getattr(other, name):
                raise InputError(
                    f"rank 0 of the group runs on {first.device_name} ({first.arch}) and rank {rank} on "
                    f"{other.device_name} ({other.arch}); one sequence needs one architecture"
                )
        versions = [dict(facts.software).get("torch", "") for facts in (first, other)]
        if versions[0] != versions[1]:
            raise InputError(f"torch is {versions[0]} on rank 0 of the group and {versions[1]} on rank {rank}")


def _common(
    watchdog: Watchdog,
    group: dist.ProcessGroup,
    module: int,
    built: tuple[ModuleSetup, PlanTable],
    said: Sequence[Statement],
    layout_with: Callable[[Entries, HardwareFacts], str],
) -> tuple[ModuleSetup, PlanTable]:
    """Return the first profile, most frequent first, whose table is the same on all ranks; else the heuristic's."""
    setup, table = built
    packages = [set(each.facts.packages) for each in said if each.facts is not None]
    links = {(each.facts.link, each.facts.device_count) for each in said if each.facts is not None}
    link, device_count = links.pop() if len(links) == 1 else ("", 1)
    facts = replace(
        setup.facts,
        packages=tuple(sorted(set.intersection(*packages))),
        link=link,
        device_count=device_count,
        faults=join_faults(*(each.facts.faults for each in said if each.facts is not None)),
    )
    policy = said[0].policy
    assert policy is not None
    counts = Counter(each.entries for each in said if each.entries)
    candidates: list[Entries] = [*(entries for entries, _ in counts.most_common()), ()]
    tables = [_try_table(entries, policy, facts, table, layout_with(entries, facts)) for entries in candidates]
    mine = [_plans_of(each) if isinstance(each, PlanTable) else "" for each in tables]
    everyones = _gather(watchdog, group, module, "common", mine)
    for number, entries in enumerate(candidates):
        texts = {each[number] for each in everyones}
        if len(texts) == 1 and "" not in texts:
            chosen = tables[number]
            assert isinstance(chosen, PlanTable)
            text = f"{table.shape}: {_common_text(said, entries)}"
            if watchdog.rank == 0:
                logger.warning(text)
            # What this rank found for itself does not serve, so there is nothing of it left to announce.
            return replace(setup, facts=facts, resolution=None, entries=(), trace=(*setup.trace, text)), chosen
    reasons = {f"rank {rank}": (each.source,) for rank, each in enumerate(said)}
    raise PlanError(
        "ranks resolved different plans and none runs on all of them", reasons, "Probe these machines again"
    )


def _try_table(
    entries: Entries, policy: Policy, facts: HardwareFacts, like: PlanTable, layout: str
) -> PlanTable | PlanError:
    try:
        return build_table(
            like.shape,
            entries,
            policy,
            facts,
            conditions=replace(like.conditions, layout=layout),
            wishes=like.wishes,
            auto_dtype=like.auto_dtype,
            prefer=like.prefer,
            launch=like.launch,
            dropout=like.dropout,
            strict=bool(entries),  # a profile that gives way to the heuristic here is no common plan
        )
    except PlanError as error:
        return error


def _common_text(said: Sequence[Statement], entries: Entries) -> str:
    source = next((each.source for each in said if each.entries == entries), "") if entries else "the heuristic"
    found = "; ".join(f"rank {rank}: {each.source}" for rank, each in enumerate(said))
    return f"ranks resolved different plans ({found}); all use {source}"
