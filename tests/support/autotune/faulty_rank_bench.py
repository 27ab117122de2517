"""What the workers of several ranks run in tests: ``what@RANK`` fails as ``what`` on one rank, while others wait."""

from __future__ import annotations

import time

from faulty_bench import TIMES_MS, FaultyBench

from autotune.measure.bench import BenchSettings, PeerWrong
from autotune.measure.evaluator import Interference, InterferenceKind
from autotune.measure.messages import LinkReading

SLOW_MS = 7.0


class FaultyRankBench(FaultyBench):
    """The rank that is named obeys; the others hang, as in a collective, or (``slow``, ``wrong``) keep in step."""

    def __init__(self, settings: BenchSettings) -> None:
        super().__init__(settings)
        assert settings.rendezvous is not None
        self.rank = settings.rendezvous.rank

    def links(self) -> LinkReading:
        return LinkReading(0.01 * (1 + self.rank), 1e-5)

    def end_block(self) -> tuple[Interference, ...]:
        kinds = (InterferenceKind.THERMAL, InterferenceKind.POWER_BRAKE)
        return (Interference(InterferenceKind.STEAL, 10.0 + self.rank), Interference(kinds[self.rank % 2]))

    def _obey(self, kernel: str) -> float:
        what, at, rank = kernel.partition("@")
        if not at:
            return super()._obey(kernel)
        mine = int(rank) == self.rank
        if what == "slow":
            return SLOW_MS if mine else TIMES_MS["quick"]
        if what == "wrong" and not mine:
            raise PeerWrong(f"rank {rank}: out errs")
        if what == "late-hang" and not mine:
            return TIMES_MS["quick"]
        if not mine:
            time.sleep(3600)
        return super()._obey(what.removeprefix("late-"))
