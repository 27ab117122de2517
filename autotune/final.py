"""The last stage of a cell: finalists are proven and re-timed; only these numbers decide and are written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ringattn.workload import Tunables

from .budget import Deadline
from .cell import CellContext, CellResult, Measured
from .choose import NOISY_SIGMA, Candidate, choose, pareto_front
from .evaluator import Checked
from .race import Arena, final_race
from .statistics import Interval

FINALISTS = 4  # the default among them
FRONT_KEPT = 4
WIDE = 0.10  # half-width of a finalist's interval from which nothing can be said
REFUSED_SIGMA = 0.25  # noise of one paired log-ratio from which no verdict is given
AT_PAR = Interval(0.0, 0.0, 0.0, 2)


def reserve_s(context: CellContext) -> float:
    """Seconds that the final needs: re-timing, and proving what will be written."""
    blocks = (FINALISTS + 1) * context.preset.final_min_blocks * context.sample_s()
    return 1.2 * blocks + (FINALISTS - 1) * context.prove_s


def final(context: CellContext, deadline: Deadline) -> CellResult:
    """Prove, re-time, choose."""
    context.listener.stage(context.cell, "final")
    record = context.record("final")
    arena = context.arena("final", record)
    finalists = _finalists(context, deadline)
    entries = arena.admit([context.default, *finalists], deadline)
    standing = final_race(arena, entries, context.preset, deadline)
    for entry in entries:
        arena.leave(entry, "final")
    record.abandon_open("not timed: no time was left")
    context.learn(arena, entries)
    if len(record.default_ms) < 2:
        return context.inconclusive("no time was left to time it twice")
    gains = {e.tunables: arena.interval(e) for e in standing if len(e.log_ratios) >= 2}
    times_ms = {e.tunables: arena.median_ms(e) for e in entries if e.log_ratios}
    return _decide(context, arena, gains, times_ms, deadline)


def _decide(
    context: CellContext,
    arena: Arena,
    gains: Mapping[Tunables, Interval],
    times_ms: Mapping[Tunables, float],
    deadline: Deadline,
) -> CellResult:
    sigma = context.ledger.noise_sigma()
    if sigma > REFUSED_SIGMA:
        return context.inconclusive(f"one plan timed twice differs by {100 * sigma:.0f} % here; quieten the machine")
    default = context.candidate(context.default, replace(AT_PAR, count=len(arena.record.default_ms)))
    others = [
        context.candidate(plan, gain)
        for plan, gain in gains.items()
        if plan != context.default and context.is_main(plan)
    ]
    noisy = sigma > NOISY_SIGMA or context.ledger.loaded
    try:
        winner = choose(context.cell, default, others, noisy=noisy, prefer=context.settings.prefer)
    except ValueError as nothing:
        return context.result("refused", f"{nothing}: {_nearest_to_limits(context)}")
    result = context.result("default" if winner is default else "tuned")
    front = _front(context, [default, *others], deadline)
    rest = sorted((c for c in (default, *others) if c is not winner and c.allowed), key=lambda c: c.gain.median)
    narrow = _narrow(context, gains, winner)

    def measured(candidate: Candidate) -> Measured:
        checked = context.checked(candidate.tunables)
        ms = times_ms.get(candidate.tunables, times_ms[context.default] * candidate.gain.ratio)
        return Measured(candidate.tunables, checked, candidate.gain, ms, checked.host_us)

    result.choice, result.default = measured(winner), measured(default)
    result.runners_up = tuple(measured(c) for c in rest[:2])
    result.auto = measured(narrow) if narrow is not None else None
    result.front = tuple(measured(c) for c in front)
    return _with_doubts(context, result, others, noisy)


def _with_doubts(
    context: CellContext, result: CellResult, others: Sequence[Candidate], noisy: bool
) -> CellResult:
    """What must be said of the numbers, up to that they say nothing."""
    widest = max((candidate.gain.half_width for candidate in others), default=0.0)
    sigma = context.ledger.noise_sigma()
    if widest > WIDE and result.state == "default":
        result.state = "inconclusive"
        result.note = f"plans could not be told apart to better than {100 * widest:.0f} %"
    elif noisy:
        why = "under foreign load" if context.ledger.loaded else "noisy"
        result.note = "; ".join(filter(None, (result.note, f"timed {why}: {100 * sigma:.1f} % a pair")))
    return result


def _finalists(context: CellContext, deadline: Deadline) -> list[Tunables]:
    """At most FINALISTS - 1 beside the default, all proven: the fastest (or as preferred) and the best narrow one."""
    mains = context.ranked(p for p in context.estimates if context.is_main(p) and p != context.default)
    allowed = [plan for plan in mains if context.keeps_limits(plan)]
    if context.settings.prefer != "time":
        allowed = _preferred_first(context, allowed)
    narrow = context.ranked(p for p in context.estimates if not context.is_main(p))[:1]
    wanted = FINALISTS - 1 - len(narrow)
    chosen: list[Tunables] = []
    for plan in allowed:
        if len(chosen) == wanted or (chosen and deadline.passed()):
            break
        if context.prove(plan) is None:
            chosen.append(plan)
    return chosen + [plan for plan in narrow if context.prove(plan) is None]


def _preferred_first(context: CellContext, plans: Sequence[Tunables]) -> list[Tunables]:
    """The order in which leaner or balanced plans would be wanted, the rest by time."""
    candidates = [context.candidate(plan, context.estimates[plan]) for plan in plans]
    default = context.candidate(context.default, AT_PAR)
    order = []
    while candidates:
        best = choose(context.cell, default, candidates, noisy=False, prefer=context.settings.prefer)
        if best is default:
            break
        order.append(best.tunables)
        candidates.remove(best)
    return order + [plan for plan in plans if plan not in order]


def _narrow(context: CellContext, gains: Mapping[Tunables, Interval], winner: Candidate) -> Candidate | None:
    """The best plan with a narrower dtype, where it is surely faster than the winner."""
    narrow = [context.candidate(plan, gain) for plan, gain in gains.items() if not context.is_main(plan)]
    surely = [c for c in narrow if c.allowed and c.gain.high < winner.gain.median - 0.01]
    return min(surely, key=lambda c: c.gain.median, default=None)


def _nearest_to_limits(context: CellContext) -> str:
    checked = [result for result in context.ledger.checked.values() if isinstance(result, Checked)]
    least = min(c.peak_bytes for c in checked) / 2**20
    error = min(c.error for c in checked)
    return f"the leanest of {len(checked)} plans holds {math.ceil(least)} MiB, the most exact errs by {error:.1e}"


def _front(context: CellContext, finals: Sequence[Candidate], deadline: Deadline) -> tuple[Candidate, ...]:
    """Time against memory over everything timed; a plan that there was no time to prove is left out."""
    known = {candidate.tunables: candidate for candidate in finals}
    for plan, gain in context.estimates.items():
        usable = context.is_main(plan) and not context.has_failed(plan) and context.keeps_limits(plan)
        if plan not in known and gain.count >= 2 and usable:
            known[plan] = context.candidate(plan, gain)
    kept: list[Candidate] = []
    for candidate in pareto_front(list(known.values())):
        plan = candidate.tunables
        if plan not in context.ledger.proven and not deadline.allows(context.prove_s):
            continue
        if context.prove(plan) is None:
            kept.append(candidate)
        if len(kept) == FRONT_KEPT:
            break
    return tuple(kept)
