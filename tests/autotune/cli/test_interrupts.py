"""Ctrl-C at the worst moments: in a database's operation, in a destructor, and while the end hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import optuna
import pytest
import sqlalchemy
from patience import LIMIT_S

from autotune.cli import interrupts
from autotune.cli.interrupts import Interrupt
from autotune.exit_codes import ExitCode

ROOT = Path(__file__).parents[3]


def wait_for_interrupt(seconds: float = LIMIT_S) -> None:
    threading.Event().wait(seconds)
    raise AssertionError("no KeyboardInterrupt came")


def test_an_operation_on_a_database_comes_to_its_end_first(tmp_path: Path) -> None:
    storage = optuna.storages.get_storage(f"sqlite:///{tmp_path}/s.db")
    other = optuna.storages.get_storage(f"sqlite:///{tmp_path}/s.db")
    study = optuna.create_study(storage=storage, study_name="study")
    struck = []

    def strike(*_: object) -> None:
        if not struck:
            struck.append(True)
            signal.raise_signal(signal.SIGINT)

    engine = storage._backend.engine  # type: ignore[attr-defined]
    sqlalchemy.event.listen(engine, "after_cursor_execute", strike)  # a transaction is open then

    def tell() -> None:
        study.set_user_attr("before the end", 1)
        wait_for_interrupt()

    with Interrupt().installed(), pytest.raises(KeyboardInterrupt):
        tell()
    assert struck
    # Told whole, and no lock is left for which another connection would wait 5 s and fail.
    optuna.load_study(storage=other, study_name="study").set_user_attr("after", 2)
    assert optuna.load_study(storage=other, study_name="study").user_attrs == {"before the end": 1, "after": 2}


def test_one_that_a_destructor_drops_is_raised_again(capfd: pytest.CaptureFixture[str]) -> None:
    class Held:
        pass

    def strike(_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def collect() -> None:
        held = Held()
        kept = weakref.ref(held, strike)
        del held
        assert kept() is None
        wait_for_interrupt()

    with Interrupt().installed(), pytest.raises(KeyboardInterrupt):
        collect()
    assert capfd.readouterr().err == ""


def test_other_errors_of_destructors_are_printed_as_ever(capfd: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError("of its own")

    with Interrupt().installed():
        broken = Broken()
        del broken
    assert "ValueError: of its own" in capfd.readouterr().err


def within(module: str, function: Callable[[], None]) -> Callable[[], None]:
    """Return a function with the same code, as if ``module`` had defined it."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__, {**function.__globals__, "__name__": module})


def strike() -> None:
    signal.raise_signal(signal.SIGINT)


def strike_and_wait() -> None:
    signal.raise_signal(signal.SIGINT)
    wait_for_interrupt()


def test_an_operation_that_does_not_end_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "LONGEST_OPERATION_S", 0.2)
    with Interrupt().installed(), pytest.raises(KeyboardInterrupt):
        within("sqlalchemy.pool", strike_and_wait)()


def test_the_observer_of_a_deferred_interrupt_raises_it_once() -> None:
    interrupt = Interrupt()
    with interrupt.installed():
        within("optuna.storages", strike)()
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
        threading.Event().wait(40 * interrupts.REPEATED_EVERY_S)  # in which a second one would break the ending


HANGING_END = """
import signal, sys, threading
from autotune.cli import interrupts
interrupts.LONGEST_END_S = {longest}
interrupts.SECOND_AFTER_S = 0.0
with interrupts.Interrupt().installed():
    try:
        print("ready", flush=True)
        threading.Event().wait()
    finally:
        print("ending", flush=True)
        while True:
            try:
                threading.Event().wait()
            except KeyboardInterrupt:
                print("broken ending", flush=True)
"""


@pytest.mark.parametrize("again", [True, False], ids=["second Ctrl-C", "no second Ctrl-C"])
def test_an_end_that_hangs_ends_all_the_same(again: bool) -> None:
    code = HANGING_END.format(longest=LIMIT_S if again else 0.2)
    command = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    )
    watchdog = threading.Timer(LIMIT_S, command.kill)
    watchdog.start()
    try:
        assert command.stdout is not None
        assert command.stdout.readline() == "ready\n"
        command.send_signal(signal.SIGINT)
        assert command.stdout.readline() == "ending\n"
        if again:
            command.send_signal(signal.SIGINT)
        out, err = command.communicate()
    finally:
        watchdog.cancel()
        command.kill()
    assert command.returncode == ExitCode.INTERRUPTED, err
    assert out == ""
    assert err.startswith("Error: interrupted; finished trials are kept")
