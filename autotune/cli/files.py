"""Files that a command writes: checked before the work, put in place in one step."""

from __future__ import annotations

import tempfile
from pathlib import Path

from autotune.exit_codes import ProbeFailure


def check_writable(output: Path) -> None:
    """Raise ProbeFailure now rather than after minutes of measuring, when ``output`` cannot be written later."""
    folder = output.parent
    if output.is_dir():
        raise ProbeFailure(f"{output}: is a folder; --output names a file")
    if not folder.is_dir():
        raise ProbeFailure(
            f"{output}: the folder {folder} does not exist; make it (mkdir -p) or choose another --output"
        )
    if output.exists() and not output.is_file():  # a device or pipe, which a file would replace
        raise ProbeFailure(f"{output}: is not a regular file; choose another --output")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".ringtune-"):
            pass
    except OSError as error:
        raise ProbeFailure(f"{output}: cannot write in {folder} ({error.strerror}); choose another --output") from error
