"""Progress of a probe: a live bar with an ETA on a terminal, plain lines everywhere else.

Both are ProbeObservers and write to stderr only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from autotune.display_text import format_duration, format_ms, plain
from autotune.probe.request import ProbeObserver, ProbeResult, VerifyResult
from autotune.trial_outcome import TrialOutcome
from ringattn.wording import plural
from ringattn.workload import Workload

from ..console import console
from ..interrupts import Interrupt

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import TaskID

ETA_LINE_EVERY_S = 15.0


@contextmanager
def probe_observer() -> Iterator[ProbeObserver]:
    """Yield the observer that fits stderr, with a Ctrl-C that is never lost.

    The bar is taken down whatever ends the probe.
    """
    interrupt = Interrupt()
    with interrupt.installed():
        target = console(stderr=True)
        if not target.is_terminal or target.is_dumb_terminal:
            yield InterruptibleObserver(LogObserver(), interrupt)
        else:
            with LiveObserver(target) as live:
                yield InterruptibleObserver(live, interrupt)


class InterruptibleObserver(ProbeObserver):
    """Passes everything on, and raises KeyboardInterrupt at the next event after a Ctrl-C."""

    def __init__(self, observer: ProbeObserver, interrupt: Interrupt) -> None:
        self.observer = observer
        self._check = interrupt.check

    def plan(self, cells: Sequence[Workload], estimate_s: float) -> None:
        self._check()
        self.observer.plan(cells, estimate_s)

    def stage(self, cell: Workload, name: str) -> None:
        self._check()
        self.observer.stage(cell, name)

    def trial(self, cell: Workload, candidate: str, outcome: TrialOutcome) -> None:
        self._check()
        self.observer.trial(cell, candidate, outcome)

    def eta(self, fraction: float, remaining_s: float) -> None:
        self._check()
        self.observer.eta(fraction, remaining_s)

    def note(self, text: str) -> None:  # may come while the probe is already ending, as may the next
        self.observer.note(text)

    def finished(self, result: ProbeResult | VerifyResult) -> None:
        self.observer.finished(result)


class _Tally:
    """Counts cells and candidates."""

    def __init__(self) -> None:
        self._order: dict[Workload, int] = {}
        self.trials = 0
        self.failures = 0

    def plan(self, cells: Sequence[Workload]) -> None:
        self._order = {cell: number for number, cell in enumerate(cells, 1)}

    def count(self, outcome: TrialOutcome) -> None:
        self.trials += 1
        self.failures += outcome.kind != "ok"

    def position(self, cell: Workload) -> str:
        """Return ``cell 3/20``; a cell that was refined in later counts on."""
        number = self._order.setdefault(cell, len(self._order) + 1)
        return f"cell {number}/{len(self._order)}"

    def __str__(self) -> str:
        failed = f", {self.failures} failed" if self.failures else ""
        return plural(self.trials, "trial") + failed


class LogObserver(ProbeObserver):
    """Prints one line per event worth keeping, with the seconds since the start: for logs, CI and pipes."""

    def __init__(
        self,
        write: Callable[[str], None] = lambda line: click.echo(line, err=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._clock = clock
        self._start_s = clock()
        self._last_eta_s = self._start_s
        self._tally = _Tally()

    def plan(self, cells: Sequence[Workload], estimate_s: float) -> None:
        self._tally.plan(cells)
        self._line(f"{plural(len(cells), 'cell')} to measure, about {format_duration(estimate_s)}")

    def stage(self, cell: Workload, name: str) -> None:
        self._line(f"{self._tally.position(cell)}  {cell}: {name}")

    def trial(self, cell: Workload, candidate: str, outcome: TrialOutcome) -> None:
        self._tally.count(outcome)
        if outcome.kind != "ok":
            self._line(f"{self._tally.position(cell)}  {_failure_line(candidate, outcome)}")

    def eta(self, fraction: float, remaining_s: float) -> None:
        now_s = self._clock()
        if now_s - self._last_eta_s >= ETA_LINE_EVERY_S:
            self._last_eta_s = now_s
            self._line(f"{fraction:.0%} done, about {format_duration(remaining_s)} left, {self._tally}")

    def note(self, text: str) -> None:
        self._line(text)

    def finished(self, result: ProbeResult | VerifyResult) -> None:
        self._line(f"finished after {format_duration(result.elapsed_s)}, {self._tally}")

    def _line(self, text: str) -> None:
        self._write(f"[{self._clock() - self._start_s:5.0f} s] {plain(text)}")


class LiveObserver(ProbeObserver):
    """Draws a bar with percent, elapsed and remaining time, and the cell and candidate at work."""

    def __init__(self, target: Console) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._console = target
        self._tally = _Tally()
        self._cell = "looking at this machine"
        self._doing = ""
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[remaining]}"),
            console=target,
        )
        self._task: TaskID = self._bar.add_task("probe", total=1.0, remaining="")
        self._live = Live(console=target, get_renderable=self._render, refresh_per_second=8, transient=True)

    def __enter__(self) -> LiveObserver:
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def plan(self, cells: Sequence[Workload], estimate_s: float) -> None:
        self._tally.plan(cells)
        self._bar.update(self._task, remaining=f"about {format_duration(estimate_s)} left")
        self._print(f"{plural(len(cells), 'cell')} to measure, about {format_duration(estimate_s)}", "bold")

    def stage(self, cell: Workload, name: str) -> None:
        self._cell, self._doing = f"{self._tally.position(cell)}  {cell}", name

    def trial(self, cell: Workload, candidate: str, outcome: TrialOutcome) -> None:
        self._tally.count(outcome)
        if outcome.kind != "ok":
            self._print(f"{self._tally.position(cell)}  {_failure_line(candidate, outcome)}", "yellow")
            return
        timed = "" if outcome.median_ms is None else f"  {format_ms(outcome.median_ms)}"
        self._doing = f"{outcome.stage}: {candidate}{timed}"

    def eta(self, fraction: float, remaining_s: float) -> None:
        left = f"about {format_duration(remaining_s)} left"
        self._bar.update(self._task, completed=min(max(fraction, 0.0), 1.0), remaining=left)

    def note(self, text: str) -> None:
        self._print(text, "dim")

    def finished(self, result: ProbeResult | VerifyResult) -> None:
        self._bar.update(self._task, completed=1.0, remaining="done")
        self._print(f"finished after {format_duration(result.elapsed_s)}, {self._tally}", "bold")

    def _print(self, text: str, style: str) -> None:
        self._console.print(plain(text), style=style)

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        lines = [self._cell, f"{self._tally}  {self._doing}" if self._doing else str(self._tally)]
        texts = (Text("  " + plain(line), style="dim", no_wrap=True, overflow="ellipsis") for line in lines)
        return Group(self._bar.get_renderable(), *texts)


def _failure_line(candidate: str, outcome: TrialOutcome) -> str:
    reason = f": {outcome.message}" if outcome.message else ""
    return f"{candidate}: {outcome.kind}{reason}"
