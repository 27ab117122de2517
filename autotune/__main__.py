"""``python -m autotune`` is ``ringtune``, also where nothing is installed.

This is where the command begins, so that Ctrl-C is answered while its parts are still imported.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

from autotune.cli.interrupts import leave_interrupted

# Packages that are no extra, by the names that are imported: a bare Python with NO_INSTALL=1 has none of them.
NEEDED = {"click": "click", "jinja2": "jinja2", "optuna": "optuna", "rich": "rich", "torch": "torch", "yaml": "pyyaml"}


def answer_interrupts() -> None:
    """Let Ctrl-C end the process with one line before torch is imported, and raise KeyboardInterrupt later.

    One that is raised while torch is imported comes out of the middle of C++, as a crash or a traceback. Nothing has
    begun by then that needs an ending.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, or somebody else's
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _is_importing(frame) and not _has_torch():
        leave_interrupted("interrupted")
    signal.default_int_handler(number, frame)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _has_torch() -> bool:
    """Return whether all of it has been imported."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def main() -> NoReturn:
    """Run the command, as the console script."""
    answer_interrupts()
    try:
        from autotune.cli.main import main as run

        run()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in NEEDED:
            raise
        from ringattn.wording import needs_package

        sys.exit(f"Error: {needs_package('ringtune', NEEDED[package])}")


if __name__ == "__main__":
    main()
