"""Progress as a person sees it: plain lines in a pipe, a live bar on a terminal, and nothing left torn."""

from __future__ import annotations

import contextlib
import io
import signal
import sys

import pytest
from rich.console import Console

from autotune.cli.probing.progress import (
    ETA_LINE_EVERY_S,
    InterruptibleObserver,
    LiveObserver,
    LogObserver,
    probe_observer,
)
from autotune.probe.request import ProbeObserver, ProbeResult
from autotune.trial_outcome import TrialOutcome
from ringattn.workload import Workload

CELLS = [Workload("train", True, n, 4, 64, "fp32") for n in (256, 1024)]
OK = TrialOutcome("ok", "race", median_ms=1.5, default_ratio=0.9)
OOM = TrialOutcome("oom", "race", message="2.0 GiB\nneeded")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def tell_a_probe(observer: ProbeObserver) -> None:
    observer.plan(CELLS, 90.0)
    observer.stage(CELLS[0], "race")
    observer.trial(CELLS[0], "flash-cpu/flash-cpu fp32", OK)
    observer.trial(CELLS[0], "math/math fp32", OOM)
    observer.eta(0.25, 61.0)
    observer.note("the machine is shared: \x1b[31mload 3.1")
    observer.finished(ProbeResult(None, None, (), 92.0))


def test_log_lines_tell_position_failures_and_the_end() -> None:
    lines: list[str] = []
    tell_a_probe(LogObserver(lines.append, Clock()))
    assert lines[0].endswith("2 cells to measure, about 1 min 30 s")
    assert any("cell 1/2" in line and "race" in line for line in lines)
    assert any("math/math fp32: oom: 2.0 GiB needed" in line for line in lines)
    assert lines[-1].endswith("finished after 1 min 32 s, 2 trials, 1 failed")
    assert all("\n" not in line and "\x1b" not in line for line in lines)


def test_log_observer_tells_the_eta_now_and_then_only() -> None:
    lines: list[str] = []
    clock = Clock()
    observer = LogObserver(lines.append, clock)
    for step in range(10):
        clock.now_s += ETA_LINE_EVERY_S / 5
        observer.eta(step / 10, 30.0)
    assert len(lines) == 2
    assert all("about 30 s left" in line for line in lines)


def test_a_cell_that_was_refined_in_later_still_has_a_place() -> None:
    lines: list[str] = []
    observer = LogObserver(lines.append, Clock())
    observer.plan(CELLS, 10.0)
    observer.stage(CELLS[0].at(512), "race")
    assert "cell 3/3" in lines[-1]


def live(text: io.StringIO, width: int = 80) -> LiveObserver:
    return LiveObserver(Console(file=text, force_terminal=True, width=width, color_system=None, markup=False))


def test_the_live_bar_shows_the_cell_and_keeps_failures_above_it() -> None:
    text = io.StringIO()
    with live(text) as observer:
        tell_a_probe(observer)
        observer.stage(CELLS[1], "final")
        frame = Console(width=80, file=io.StringIO(), record=True)
        frame.print(observer._render())
    shown = frame.export_text()
    assert "cell 2/2" in shown
    assert "final" in shown
    assert "100%" in shown
    assert "math/math fp32: oom: 2.0 GiB needed" in text.getvalue()


def test_the_live_bar_fits_a_narrow_terminal() -> None:
    with live(io.StringIO(), width=30) as observer:
        tell_a_probe(observer)
        frame = Console(width=30, file=io.StringIO(), record=True)
        frame.print(observer._render())
    assert all(len(line) <= 30 for line in frame.export_text().splitlines())


def test_the_cursor_comes_back_whatever_ends_the_probe() -> None:
    text = io.StringIO()
    with pytest.raises(KeyboardInterrupt), live(text):
        raise KeyboardInterrupt
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") == 1


def inner(observer: ProbeObserver) -> ProbeObserver:
    assert isinstance(observer, InterruptibleObserver)
    return observer.observer


def test_a_ctrl_c_that_someone_swallows_strikes_again_at_the_next_step() -> None:
    before = signal.getsignal(signal.SIGINT)
    with probe_observer() as observer:
        observer.plan(CELLS, 1.0)
        with contextlib.suppress(KeyboardInterrupt):  # as an extension module does
            signal.raise_signal(signal.SIGINT)
        observer.note("what is said on the way out still comes through")
        for tell in (
            lambda: observer.stage(CELLS[0], "race"),
            lambda: observer.trial(CELLS[0], "math", OK),
            lambda: observer.eta(0.5, 1.0),
        ):
            with pytest.raises(KeyboardInterrupt):
                tell()
    assert signal.getsignal(signal.SIGINT) is before


def test_no_terminal_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with probe_observer() as observer:
        assert isinstance(inner(observer), LogObserver)
        tell_a_probe(observer)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "\x1b" not in captured.err
    assert "2 cells to measure" in captured.err


def test_a_terminal_gets_the_live_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with probe_observer() as observer:
        assert isinstance(inner(observer), LiveObserver)
        tell_a_probe(observer)
    assert "\x1b[1m" in terminal.getvalue()


def test_no_color_is_honoured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with probe_observer() as observer:
        tell_a_probe(observer)
    for colour in ("\x1b[3", "\x1b[9", "\x1b[38", "\x1b[33m"):
        assert colour not in terminal.getvalue()
