"""Ctrl-C while torch is still imported: one line and exit 130, wherever in it the signal strikes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import LIMIT_S

from autotune.exit_codes import ExitCode

ROOT = Path(__file__).parents[3]

# An exception that comes out of Python called by C++ ends the process by SIGABRT.
SLOW_TORCH = """
import os, sys, time
print("importing torch", file=sys.stderr, flush=True)
try:
    time.sleep(3600)
except BaseException:
    os.abort()
"""


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_ctrl_c_during_the_import_of_torch_is_one_line(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(SLOW_TORCH)
    command = subprocess.Popen(
        [sys.executable, "-m", "autotune", "which", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores it
    )
    watchdog = threading.Timer(LIMIT_S, command.kill)
    watchdog.start()
    try:
        assert command.stderr is not None
        assert command.stderr.readline() == "importing torch\n"
        command.send_signal(signal.SIGINT)
        out, rest = command.communicate()
    finally:
        watchdog.cancel()
        command.kill()
    assert command.returncode == ExitCode.INTERRUPTED, rest
    assert rest == "Error: interrupted\n"
    assert (json.loads(out) if options else out) == ({"error": "interrupted", "exit_code": 130} if options else "")


def test_a_command_in_the_background_goes_on_ignoring_it() -> None:
    """A shell without job control starts it with SIGINT ignored, and so it stays."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from autotune.__main__ import answer_interrupts; "
        "answer_interrupts(); assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
