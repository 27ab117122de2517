"""First calls for a probe of several ranks, made by processes of one rank beside them.

Ranks make their calls together, so none of them can compile beside the others. A probe of two H200s looked at its
training step over 8192 positions before flash-attn-4's backward was compiled, and left it with a plan 13 % slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autotune.measure.evaluator import Fault
from autotune.measure.pool.worker_pool import WorkerPool
from autotune.space.first_calls import Call
from ringattn.workload import Tunables


def calls_on_one_rank(call: Call) -> tuple[Call, ...]:
    """Return the calls of one device that compile what the ranks' call does.

    Kernels are compiled for neither a length nor a number of heads. A ring calls them for what a rank's queries see
    wholly, too.
    """
    workload, plan = call
    if workload.world == 1:
        return (call,)
    alone = replace(workload, world=1, total_length=0)
    own = Tunables(plan.dtype, plan.branches, params=plan.params, compile=plan.compile)
    has_full_blocks = workload.causal and workload.pattern.dense and plan.schedule != "ulysses"
    return ((alone, own), (replace(alone, causal=False), own)) if has_full_blocks else ((alone, own),)


class RanksFirstCalls:
    """First calls of ranks, each by way of those of one rank that compile the same."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self._calls: dict[Call, tuple[Call, ...]] = {}

    def begin(self, calls: Sequence[Call]) -> None:
        self._calls = {call: calls_on_one_rank(call) for call in calls}
        self.pool.begin_first_calls(tuple(dict.fromkeys(one for each in self._calls.values() for one in each)))

    def unfinished(self) -> tuple[Call, ...]:
        left = set(self.pool.unfinished_calls())
        return tuple(call for call, ones in self._calls.items() if not left.isdisjoint(ones))

    def failed(self) -> Mapping[Call, Fault]:
        failed = self.pool.failed_calls()
        found = {call: [failed[one] for one in ones if one in failed] for call, ones in self._calls.items()}
        return {call: faults[0] for call, faults in found.items() if faults}
