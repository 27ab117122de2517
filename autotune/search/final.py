"""The last stage of a cell: finalists are re-timed, and what is written is proven; only these numbers decide."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autotune import statistics
from autotune.journal.stage_record import Entry
from autotune.measure.evaluator import Checked, Fault
from autotune.space.space import Value, encode
from autotune.statistics import Interval
from ringattn.planning.preference import TIE, cost
from ringattn.workload import Tunables

from .arena import Arena, DefaultBroken
from .budget import Deadline
from .cell import CellContext, CellResult, Measured
from .choose import NOISY_SIGMA, Candidate, NothingAllowed, choose, distance, gain_margin, pareto_front
from .climb import HOUSEKEEPING
from .race import final_race

FINALISTS = 4  # the default among them
FRONT_KEPT = 4
RUNNERS_UP = 2
FINAL_WIDTH = 0.015  # half-width (log-ratio) that the re-timing should reach, where the preset's maximum allows
RESERVED = 3  # times the least number of blocks is kept for the final; it goes on while time is left
CONTENDER = math.log(1.15)  # a plan this much slower than the best is no finalist
WIDE = 0.10  # a possible gain (log-ratio) that a kept default must be able to exclude
# What a cell keeps of its time for the proof of its choice, where the probe has time after it. Kernels that work out
# nothing per shape take a second for all their lengths; cuDNN takes 6 to 12 s for a LongNet plan, and what the default
# owes is paid out of what is left of the probe when every cell has been searched.
PROOF_KEPT_S = 2.0
LIKE_A_FAILED_ONE = 3  # more choices that may fail their proof as another did, before one passes
PROOF_MARGIN = 1.2  # a choice that misses its proof by a hair is lost
REFUSED_SIGMA = 0.5  # noise of one paired log-ratio from which no verdict is given
AT_PAR = Interval(0.0, 0.0, 0.0, 2)


def proof_kept_s(context: CellContext, deadline: Deadline | None = None, proofs: int = 1) -> float:
    """Seconds that a cell ending at ``deadline`` keeps for the proof of its choice: what will not fit after its end."""
    whole_s = PROOF_MARGIN * proofs * context.prove_s()
    after_s = whole_s if deadline is None else context.end.remaining_s() - deadline.remaining_s()
    return min(whole_s, max(PROOF_KEPT_S, whole_s - after_s))


def reserve_s(context: CellContext, deadline: Deadline | None = None) -> float:
    """Seconds that the final needs: re-timing, and proving what will be written."""
    preset = context.preset
    blocks = statistics.blocks_needed(context.sigma(), FINAL_WIDTH)
    blocks = min(max(blocks, preset.final_min_blocks), RESERVED * preset.final_min_blocks)
    # All finalists and the default twice in the first blocks; after them mostly the default, the best and one rival.
    samples = (FINALISTS + 1) * preset.final_min_blocks + 4 * (blocks - preset.final_min_blocks)
    proofs = _proofs_wanted(context, [context.default, *_finalists(context)])
    return context.ledger.pace.factor * samples * context.sample_s() + proof_kept_s(context, deadline, proofs)


def _proofs_wanted(context: CellContext, finalists: Sequence[Tunables]) -> int:
    """Of the choice, of a narrower one, and of a plan that holds less: a front of one plan leaves nothing to prefer.

    What failed at other lengths is seldom alone: the next choices are often of the same kernels.
    """
    ledger = context.ledger
    unproven = {context.is_main(plan) for plan in finalists if plan not in ledger.proven}
    failed = sum(isinstance(result, Fault) for result in ledger.proven.values())
    return len(unproven) + _has_leaner(context) + LIKE_A_FAILED_ONE * failed


def final(context: CellContext, deadline: Deadline) -> CellResult:
    """Re-time, choose, prove; a choice that cannot be proven gives way to the next.

    Raises DefaultBroken when it is the default that would stay and its proof fails. A default that stays owes its
    proof where the cell has no time for it: then the context says so.
    """
    context.listener.stage(context.cell, "final")
    record = context.record("final")
    arena = context.arena("final", record)
    entries = arena.admit([context.default, *_finalists(context)], deadline)
    proofs = _proofs_wanted(context, [entry.tunables for entry in entries])
    racing = deadline.earlier_by(proof_kept_s(context, deadline, proofs)) if proofs else deadline
    standing = final_race(arena, entries, context.preset, racing)
    beyond_s = min(context.undecided_s, context.end.remaining_s() - deadline.remaining_s())
    if beyond_s > 0 and _noise_hides_a_gain(context, arena, standing):
        standing = final_race(arena, standing, context.preset, racing.earlier_by(-beyond_s))
    for entry in entries:
        arena.leave(entry, "final")
    record.abandon_open("not timed: no time was left")
    context.learn(arena, entries)
    if len(record.default_ms) < 2:
        return context.inconclusive("no time was left to time it twice")
    gains = {e.tunables: arena.interval(e) for e in standing if len(e.log_ratios) >= 2}
    times_ms = {e.tunables: arena.median_ms(e) for e in entries if e.log_ratios}
    return _decide(context, arena, gains, times_ms, deadline)


def _is_noisy(context: CellContext) -> bool:
    return context.ledger.noise_sigma() > NOISY_SIGMA or context.ledger.loaded


def _noise_hides_a_gain(context: CellContext, arena: Arena, entries: Sequence[Entry]) -> bool:
    """Whether the best is not sure enough to be taken: the cell would end inconclusive, or with a slower plan.

    Two outliers in six blocks of a modelled H100 gave way to a plan that was 5 % slower, and surely faster than the
    default.
    """
    rivals = [
        entry
        for entry in entries
        if entry.tunables != arena.default and len(entry.log_ratios) >= 2 and context.may_be_chosen(entry.tunables)
    ]
    gains, least = arena.intervals(rivals), gain_margin(noisy=_is_noisy(context))
    if not gains or min(gains, key=lambda gain: gain.median).high < least:
        return False
    best = min(gain.median for gain in gains)
    sure = [gain.median for gain in gains if gain.high < least]
    return best < min(sure) - TIE if sure else any(-gain.low > WIDE for gain in gains)


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
    noisy = _is_noisy(context)
    default = context.candidate(context.default, replace(AT_PAR, count=len(arena.record.default_ms)))
    others = [
        context.candidate(plan, gain)
        for plan, gain in gains.items()
        if plan != context.default and context.is_main(plan)
    ]
    try:
        winner = _proven_choice(context, default, others, noisy, deadline)
    except NothingAllowed:
        return _without_choice(context)
    usable = [candidate for candidate in others if not context.has_failed(candidate.tunables)]
    narrow = _narrow(context, gains, winner)
    front = _front(context, [default, *usable], deadline)
    rest = _runners_up(context, winner, [default, *usable], deadline)

    def measured(candidate: Candidate) -> Measured:
        ms = times_ms.get(candidate.tunables, times_ms[context.default] * candidate.gain.ratio)
        return context.measured(candidate, ms)

    result = context.result("default" if winner is default else "tuned")
    result.choice, result.default = measured(winner), measured(default)
    result.runners_up = tuple(measured(c) for c in rest)
    result.auto = measured(narrow) if narrow is not None else None
    result.front = tuple(measured(c) for c in front)
    return _with_doubts(context, result, usable, noisy)


def _proven_choice(
    context: CellContext, default: Candidate, others: Sequence[Candidate], noisy: bool, deadline: Deadline
) -> Candidate:
    """The choice among what can be proven; NothingAllowed when nothing is within the limits.

    A proof that starts late runs into the time of other cells, but not beyond the probe's end.
    """
    left = list(others)
    if not context.end.allows(context.prove_s()):
        left = _proven_already(context, left)
    context.owes_proof = False
    while True:
        winner = choose(
            context.cell,
            default,
            left,
            noisy=noisy,
            prefer=context.settings.prefer,
            sigma=context.sigma(),
            usual=context.seeds,
        )
        if winner is default and default.tunables not in context.ledger.proven:
            context.owes_proof = not deadline.allows(context.prove_s())
            if context.owes_proof:
                return default
        fault = context.prove(winner.tunables)
        if fault is None:
            return winner
        if winner is default:
            raise DefaultBroken(fault)
        left.remove(winner)
        # One proof, at most, is made after the end of the cell; more only for want of a plan within the limits.
        until = deadline if default.allowed else context.end
        if not until.allows(context.prove_s()):
            left = _proven_already(context, left)


def _proven_already(context: CellContext, candidates: Sequence[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.tunables in context.ledger.proven]


def _with_doubts(context: CellContext, result: CellResult, others: Sequence[Candidate], noisy: bool) -> CellResult:
    """What must be said of the numbers, up to that they say nothing."""
    # A preference for lean plans leaves faster ones on purpose.
    doubtful = [c for c in others if c.allowed and (c.gain.high >= 0 or context.settings.prefer == "time")]
    missed = max(doubtful, key=lambda candidate: -candidate.gain.low, default=None)
    sigma = context.ledger.noise_sigma()
    if missed is not None and -missed.gain.low > WIDE and result.state == "default":
        result.state = "inconclusive"
        why = "noise hides" if missed.gain.high >= gain_margin(noisy=noisy) else "no time was left to prove"
        note = f"{why} what may be a gain of up to {-100 * missed.gain.low:.0f} %"
        result.note = "; ".join(filter(None, (result.note, note)))
    elif noisy:
        why = "under foreign load" if context.ledger.loaded else "noisy"
        result.note = "; ".join(filter(None, (result.note, f"timed {why}: {100 * sigma:.1f} % a pair")))
    return result


def _finalists(context: CellContext) -> list[Tunables]:
    """At most FINALISTS - 1 beside the default: the fastest (or as preferred), and the best narrow one."""
    mains = context.ranked(p for p in context.estimates if context.is_main(p) and p != context.default)
    allowed = [plan for plan in mains if context.keeps_limits(plan)]
    narrow = _narrow_finalist(context, allowed)
    if context.settings.prefer != "time":
        allowed = _preferred_first(context, allowed)
    elif allowed and context.keeps_limits(context.default):
        best = min(0.0, context.estimates[allowed[0]].median)
        allowed = [plan for plan in allowed if context.estimates[plan].median < best + CONTENDER]
    wanted = FINALISTS - 1 - len(narrow)
    simplest = _simplest_equal(context, allowed) if context.settings.prefer == "time" else []
    first = [*allowed[:1], *simplest, *_looked_faster(context)]
    return list(dict.fromkeys([*first, *_unlike(context, allowed)]))[:wanted] + narrow


def _looked_faster(context: CellContext) -> list[Tunables]:
    """The plan that there was no time to time, if its check's call was faster than that of all that were timed.

    Of 14 plans that a climb had checked on an H100, 6 were not timed, the fastest among them.
    """
    default = context.default
    looks = {
        plan: look
        for plan in context.ledger.checked
        if context.may_be_chosen(plan) and (look := context.ledger.first_look(plan, default)) is not None
    }
    timed = [look for plan, look in looks.items() if plan in context.estimates]
    timed += [0.0] if context.may_be_chosen(default) else []
    untimed = [plan for plan in looks if plan not in context.estimates]
    best = min(untimed, key=lambda plan: looks[plan], default=None)
    return [best] if best is not None and looks[best] < min(timed, default=math.inf) - TIE else []


def _unlike(context: CellContext, ranked: Sequence[Tunables]) -> list[Tunables]:
    """Without what differs from a faster one in housekeeping only: those would be three times the same kernels."""
    kept: dict[frozenset[tuple[str, Value]], Tunables] = {}
    for plan in ranked:
        bare = frozenset(item for item in encode(context.cell, plan).items() if item[0] not in HOUSEKEEPING)
        kept.setdefault(bare, plan)
    return list(kept.values())


def _narrow_finalist(context: CellContext, mains: Sequence[Tunables]) -> list[Tunables]:
    """The fastest allowed plan with a narrower dtype, if it may be faster than ``mains`` and the default."""
    rivals = [context.estimates[plan].median for plan in mains[:1]]
    if context.keeps_limits(context.default):
        rivals.append(0.0)
    best = min(rivals, default=math.inf)
    narrow = context.ranked(p for p in context.estimates if not context.is_main(p) and context.keeps_limits(p))[:1]
    return [plan for plan in narrow if context.estimates[plan].median < best + CONTENDER]


def _simplest_equal(context: CellContext, ranked: Sequence[Tunables]) -> list[Tunables]:
    """Of what cannot be told from the best, the plan nearest to the default: frills that only luck favoured go."""
    if not ranked:
        return []
    best = context.estimates[ranked[0]]
    equal = []
    for plan in ranked:
        mine = context.estimates[plan]
        doubt = context.sigma() * math.sqrt(1 / mine.count + 1 / best.count)
        if mine.median <= best.median + max(TIE, doubt):
            equal.append(plan)
    return [min(equal, key=lambda plan: distance(context.cell, plan, context.default))]


def _runners_up(
    context: CellContext, winner: Candidate, finals: Sequence[Candidate], deadline: Deadline
) -> list[Candidate]:
    """The next two: finalists first, then what earlier stages timed, proven while there is time."""
    wanted = [c for c in _timed(context, finals) if c is not winner and c.allowed]
    wanted.sort(key=lambda c: (c not in finals, c.gain.median))
    return _proven(context, wanted, RUNNERS_UP, deadline)


def _proven(context: CellContext, candidates: Sequence[Candidate], wanted: int, deadline: Deadline) -> list[Candidate]:
    """The first of those that are right at ragged lengths; what there is no time to prove is left out."""
    kept: list[Candidate] = []
    for candidate in candidates:
        plan = candidate.tunables
        if len(kept) == wanted:
            break
        if plan not in context.ledger.proven and not deadline.allows(context.prove_s(plan)):
            continue
        if context.prove(plan) is None:
            kept.append(candidate)
    return kept


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
    if not context.end.allows(context.prove_s()):
        surely = _proven_already(context, surely)
    best = min(surely, key=lambda c: c.gain.median, default=None)
    return best if best is not None and context.prove(best.tunables) is None else None


def _without_choice(context: CellContext) -> CellResult:
    """Refused where every plan was looked at, and none within the limits is right; else nobody knows."""
    checked = context.ledger.checked
    allowed = [plan for plan in checked if context.is_main(plan) and context.keeps_limits(plan)]
    untried = [plan for plan in context.space.kernel_plans if context.is_main(plan) and plan not in checked]
    if any(not context.has_failed(plan) for plan in allowed) or (allowed and untried):
        return context.inconclusive("no time was left to prove a plan within the limits; give a larger --budget")
    if allowed:
        fault = context.ledger.failures()[allowed[0]]
        return context.result("refused", f"no plan within the limits is right: {fault.kind}, {fault.message}")
    ran = [each for plan, each in checked.items() if isinstance(each, Checked) and context.is_main(plan)]
    missed = context.settings.limits.missed(ran)
    if untried:
        return context.inconclusive(f"{missed}; no time was left for others: {len(untried)}, give a larger --budget")
    return context.result("refused", missed)


def _front(context: CellContext, finals: Sequence[Candidate], deadline: Deadline) -> tuple[Candidate, ...]:
    """Time against memory over everything timed, proven while there is time: what balances the two comes first."""
    front = pareto_front(_timed(context, finals))
    balanced = sorted(front, key=lambda c: cost("balanced", c.gain.median, c.peak_bytes))
    kept = _proven(context, balanced, FRONT_KEPT, deadline)
    return tuple(candidate for candidate in front if candidate in kept)


def _timed(context: CellContext, finals: Sequence[Candidate] = ()) -> list[Candidate]:
    """What may be chosen: ``finals``, and of what earlier stages timed all that they do not hold."""
    known = {candidate.tunables: candidate for candidate in finals}
    for plan, gain in context.estimates.items():
        if plan not in known and gain.count >= 2 and context.may_be_chosen(plan):
            known[plan] = context.candidate(plan, gain)
    return list(known.values())


def _has_leaner(context: CellContext) -> bool:
    """Whether something that was timed balances time and memory otherwise than the fastest plan does."""
    front = pareto_front(_timed(context))
    if len(front) < 2:
        return False
    costs = [cost("balanced", candidate.gain.median, candidate.peak_bytes) for candidate in front]
    return min(costs[1:]) < costs[0]
