"""A rival of the product: one Optuna study with any sampler, and every privilege that the product has.

The uniform plans are enqueued first, slow plans are dismissed after one block, the best few are timed again, the
default stays unless beaten by a margin, and what is chosen is validated, with the next best in its place if it fails.
What hung or failed its validation takes with it all plans of the part that is to blame.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import optuna

from autotune.measure.evaluator import Checked, Fault, Proven, Sample
from autotune.measure.launch_overhead import waited_ms
from autotune.measure.simulated import ReplayEvaluator, SimulatedClock, parts_of
from autotune.search.deciding.choose import gain_margin
from autotune.space.space import decode, encode
from autotune.statistics import interval_of
from ringattn.planning.preference import Launch
from ringattn.tunable_rules import LAUNCHES
from ringattn.workload import Tunables

from .problems import CELL_BUDGET_S, HANG_S, Problem

DISMISSED = math.log(1.3)  # times the best: a plan so slow in its first block gets no other
BLOCKS = 3  # of a plan that is not dismissed
FINALISTS = 4  # beside the default
CONTENDER = math.log(1.05)  # times the default: what seems slower than that is no finalist
FINAL_SHARE = 0.2  # of the budget for timing them again
FINAL_BLOCKS = 24  # at most
PROOFS_KEPT = 2
ASKS_IN_VAIN = 60  # that bring nothing new, and the study ends
HUNG_CALLS = 15  # times the default's call, beside HANG_S


@dataclass
class Rival:
    """Knowledge of one study: the plans it timed, as log(t / t_default) by block, and how others failed."""

    problem: Problem
    seed: int
    clock: SimulatedClock
    evaluator: ReplayEvaluator = field(init=False)
    ratios: dict[Tunables, list[float]] = field(default_factory=dict)
    failed: dict[Tunables, Fault] = field(default_factory=dict)
    proven: dict[Tunables, Proven | Fault] = field(default_factory=dict)
    call_s: float = 0.0

    def __post_init__(self) -> None:
        self.evaluator = self.problem.evaluator(self.clock, self.seed)
        self._order = random.Random(self.seed)
        self._workload, self._default = self.problem.space.workload, self.problem.space.default

    def run(self, sampler: optuna.samplers.BaseSampler) -> tuple[Tunables, float]:
        """Return the plan to run, and the ratio to the default that it claims."""
        default = self.evaluator.check(self._workload, self._default, timeout_s=4 * HANG_S)
        assert isinstance(default, Checked), default
        self.call_s = default.call_ms / 1e3
        proof_s = self._proof_s()
        final_s = min(FINAL_SHARE * CELL_BUDGET_S, FINAL_BLOCKS * self._block_s(FINALISTS + 1))
        until_s = CELL_BUDGET_S - final_s - PROOFS_KEPT * proof_s
        self._study(sampler, until_s)
        finalists = self._finalists(until_s + final_s)
        self._final(finalists, CELL_BUDGET_S - proof_s)
        return self._choice(finalists, proof_s)

    def _proof_s(self) -> float:
        """Return what validating the default takes. It stays without that, as it runs without a tuner, too."""
        clock = SimulatedClock()
        with self.clock.uncharged():
            self.problem.evaluator(clock, self.seed).validate(self._workload, self._default, timeout_s=4 * HANG_S)
        return clock.now()

    def _block_s(self, plans: int) -> float:
        return plans * 1.1 * max(self.evaluator.sample_target_s, self.call_s)

    # --- the study ----------------------------------------------------------------------------------------------

    def _study(self, sampler: optuna.samplers.BaseSampler, until_s: float) -> None:
        space = self.problem.space
        study = optuna.create_study(sampler=sampler)
        distributions = {
            name: optuna.distributions.CategoricalDistribution(values)
            for name, values in (
                {**space.knobs, "launch": LAUNCHES} if self.problem.asynchronous else space.knobs
            ).items()
            if len(values) > 1
        }
        for plan in space.kernel_plans:
            there = encode(self._workload, plan)
            study.enqueue_trial({name: there.get(name) for name in distributions})
        fixed = {name: values[0] for name, values in space.knobs.items()}
        in_vain = 0
        while self.clock.now() < until_s and in_vain < ASKS_IN_VAIN:
            trial = study.ask(distributions)
            plan = decode(self._workload, fixed | trial.params)
            in_vain += 1
            if space.valid(plan) and plan not in self.ratios and plan not in self.failed:
                in_vain = 0
                self._measure(plan)
            study.tell(trial, self._value(plan))

    def _value(self, plan: Tunables) -> float:
        """Return what a plan counts as; one that gave no number counts as the slowest that did."""
        if plan in self.ratios:
            return float(np.median(self.ratios[plan]))
        return max((float(np.median(logs)) for logs in self.ratios.values()), default=0.0)

    def _measure(self, plan: Tunables) -> None:
        if plan == self._default:
            self.ratios[plan] = [0.0]
            return
        if self._is_hopeless(plan):
            self.failed[plan] = Fault("timeout", "a kernel of it did not end in time")
            return
        timeout_s = HANG_S + HUNG_CALLS * self.call_s
        pace_ms = 1e3 * self.call_s * math.exp(self._best())
        result = self.evaluator.check(self._workload, plan, timeout_s=timeout_s, pace_ms=pace_ms)
        if isinstance(result, Fault):
            self.failed[plan] = result
            return
        for _ in range(BLOCKS):
            self._block([plan])
            logs = self.ratios.get(plan)
            if not logs or float(np.median(logs)) > self._best() + DISMISSED:
                return

    def _is_hopeless(self, plan: Tunables) -> bool:
        """Return whether a part of it hung, in every plan that had it."""
        hung = [other for other, fault in self.failed.items() if fault.kind == "timeout"]
        return _shares_blame(plan, hung, self.ratios)

    def _best(self) -> float:
        return min((float(np.median(logs)) for logs in self.ratios.values()), default=0.0)

    def _block(self, plans: Sequence[Tunables]) -> None:
        order = self._order.sample([self._default, *plans], 1 + len(plans))
        block = self.evaluator.block(self._workload, order, timeout_s=HANG_S + HUNG_CALLS * self.call_s)
        launch: Launch = "eager" if self.problem.asynchronous else "captured"
        ms = {
            plan: waited_ms(result.ms, result.host_us, launch)
            for plan, result in zip(order, block.results, strict=True)
            if isinstance(result, Sample)
        }
        for plan in plans:
            if plan in ms and self._default in ms:
                self.ratios.setdefault(plan, []).append(math.log(ms[plan] / ms[self._default]))

    # --- the choice ---------------------------------------------------------------------------------------------

    def _finalists(self, until_s: float) -> list[Tunables]:
        """Return the best few, the very best of them validated: most of what is fast has the same kernels."""
        contenders = [plan for plan in self.ratios if plan != self._default and self._value(plan) < CONTENDER]
        ranked = sorted(contenders, key=self._value)
        while ranked and self.clock.now() < until_s and not self._is_proven(ranked[0]):
            failed = list(self.proven)  # it ends with the first that is right
            ranked = [
                plan for plan in ranked if plan not in failed and not _shares_blame(plan, failed, [self._default])
            ]
        return ranked[:FINALISTS]

    def _is_proven(self, plan: Tunables) -> bool:
        if plan not in self.proven:
            self.proven[plan] = self.evaluator.validate(self._workload, plan, timeout_s=4 * HANG_S)
        return isinstance(self.proven[plan], Proven)

    def _final(self, finalists: Sequence[Tunables], until_s: float) -> None:
        """Time them again: only that decides between them."""
        for plan in finalists:
            self.ratios[plan] = []
        blocks = 0
        while finalists and blocks < FINAL_BLOCKS and (blocks < 2 or self.clock.now() < until_s):
            self._block(finalists)
            blocks += 1

    def _choice(self, finalists: Sequence[Tunables], proof_s: float) -> tuple[Tunables, float]:
        gains = {plan: interval_of(self.ratios[plan], seed=self.seed) for plan in finalists if self.ratios[plan]}
        surely = [plan for plan in gains if gains[plan].high < gain_margin(noisy=False)]
        for number, plan in enumerate(sorted(surely, key=lambda plan: gains[plan].median)):
            if number and plan not in self.proven and self.clock.now() + proof_s > CELL_BUDGET_S:
                continue
            if self._is_proven(plan):
                return plan, gains[plan].ratio
        return self._default, 1.0


def _shares_blame(plan: Tunables, failed: Iterable[Tunables], went_well: Iterable[Tunables]) -> bool:
    """Return whether it has all those parts of a failed plan that no other was well with."""
    innocent = {part for other in went_well for part in parts_of(other)}
    return any((blamed := set(parts_of(other)) - innocent) and blamed <= set(parts_of(plan)) for other in failed)
