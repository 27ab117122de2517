"""Whole standard probes of a modelled H100 in simulated time: 20 cells, 170 seconds, the tuner's own time charged.

    python benchmarks/whole_probe.py --seeds 4 [--hangs flash-attn-4 backward] [--budget 170] [--output FILE]

Counts the cells whose plan is slower than the default by more than 2 %, by true times, those that are inconclusive,
and those that are refused although a right plan was timed; and says how far the plans of two seeds are apart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support" / "autotune")]

from modelled_h100 import device_ms, modelled_environment  # noqa: E402

from autotune.measure.simulated import Part, SimulatedClock  # noqa: E402
from autotune.probe.request import CellReport, ProbeObserver, ProbeRequest  # noqa: E402
from autotune.probe.tuning import run_probe  # noqa: E402
from autotune.trial_outcome import TrialOutcome  # noqa: E402
from ringattn.workload import Workload  # noqa: E402

BUDGET_S = 170.0
OVERRUN = 1.1  # times the budget
NOISE_FLOOR = 1.02  # times the default's: a choice slower than that counts as worse than the default
AGREED = 0.02
HOST_SLOWNESS = 2.5


@dataclass(frozen=True, slots=True)
class Cell:
    """The end of one cell; ``ms`` is the true time of its plan, None where it has none."""

    cell: str
    status: str
    note: str
    ms: float | None
    to_default: float | None
    timed: int  # plans that gave a number


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe; ``spent_s`` is simulated, ``own_s`` the part of it that the tuner itself worked."""

    seed: int
    spent_s: float
    own_s: float
    cells: tuple[Cell, ...]

    @property
    def worse(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.to_default is not None and cell.to_default > NOISE_FLOOR]

    @property
    def inconclusive(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.status == "inconclusive"]

    @property
    def refused(self) -> list[Cell]:
        """Refused although a right plan was timed."""
        return [cell for cell in self.cells if cell.status == "refused" and cell.timed]

    @property
    def gain(self) -> float:
        """The geometric mean of t / t_default over all cells that have a plan."""
        logs = [math.log(cell.to_default) for cell in self.cells if cell.to_default is not None]
        return math.exp(sum(logs) / len(logs)) if logs else 1.0


class _Counting(ProbeObserver):
    """Counts how many plans of each cell were timed."""

    def __init__(self) -> None:
        self.timed: dict[Workload, int] = {}

    def trial(self, cell: Workload, candidate: str, outcome: TrialOutcome) -> None:
        self.timed[cell] = self.timed.get(cell, 0) + (outcome.median_ms is not None)


def probe(seed: int, budget_s: float, hangs: Part | None) -> Probe:
    """Run one probe that knows nothing of any other."""
    with tempfile.TemporaryDirectory(prefix="whole-probe-") as folder:
        clock = SimulatedClock(own_s=time.process_time)
        environment = modelled_environment(Path(folder), seed, HOST_SLOWNESS, hangs=hangs, clock=clock)
        request = ProbeRequest(output=Path(folder) / "h100.yaml", effort="standard", budget_s=budget_s, seed=seed)
        counting = _Counting()
        result = run_probe(request, counting, environment)
        return Probe(
            seed,
            clock.now(),
            clock.charged_s,
            tuple(_cell(report, counting.timed.get(report.workload, 0)) for report in result.cells),
        )


def _cell(report: CellReport, timed: int) -> Cell:
    cell = report.workload
    ms = device_ms(cell, report.chosen) if report.chosen is not None else None
    default_ms = device_ms(cell, report.default) if report.default is not None else None
    ratio = ms / default_ms if ms is not None and default_ms is not None else None
    return Cell(str(cell), report.status, report.text, ms, ratio, timed)


def agreement(probes: Sequence[Probe]) -> float | None:
    """Return the share of cells, over all pairs of probes, whose plans take the same time within AGREED."""
    agreed = []
    for one, other in itertools.combinations(probes, 2):
        theirs = {cell.cell: cell.ms for cell in other.cells}
        for cell in one.cells:
            ms = theirs.get(cell.cell)
            apart = math.log(cell.ms / ms) if cell.ms is not None and ms is not None else math.inf
            agreed.append(abs(apart) <= math.log1p(AGREED))
    return sum(agreed) / len(agreed) if agreed else None


def report(probes: Sequence[Probe], budget_s: float) -> str:
    rows = [
        f"{'seed':>4} {'cells':>5} {'spent s':>8} {'own s':>6} {'t / default':>11} {'worse than default':>18}"
        f" {'inconclusive':>12} {'refused, though timed':>21} {'overrun':>7}"
    ]
    for each in probes:
        overrun = "yes" if each.spent_s > OVERRUN * budget_s else "no"
        rows.append(
            f"{each.seed:>4} {len(each.cells):>5} {each.spent_s:>8.1f} {each.own_s:>6.1f} {each.gain:>11.3f}"
            f" {len(each.worse):>18} {len(each.inconclusive):>12} {len(each.refused):>21} {overrun:>7}"
        )
    for each in probes:
        for what in ("worse", "inconclusive", "refused"):
            rows += [f"seed {each.seed}, {what}: {cell.cell}: {cell.note}" for cell in getattr(each, what)]
    agreed = agreement(probes)
    return "\n".join(rows if agreed is None else [*rows, f"two seeds agree in {agreed:.0%} of the cells"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="simulated seconds of each probe")
    parser.add_argument("--hangs", nargs=2, metavar=("KERNEL", "DIRECTION"), help="a kernel that answers no check")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=None, help="where the cells go as JSON")
    options = parser.parse_args()
    hangs = tuple(options.hangs) if options.hangs else None
    count = options.seeds
    with ProcessPoolExecutor(options.jobs) as pool:
        probes = list(pool.map(probe, range(count), [options.budget] * count, [hangs] * count))
    print(report(probes, options.budget))
    if options.output is not None:
        found = {"budget_s": options.budget, "hangs": hangs, "probes": [asdict(each) for each in probes]}
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
