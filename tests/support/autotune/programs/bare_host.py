"""Runs a command on a host that allows nothing: all file systems read-only but for one folder, in a mount namespace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[4]
NO_FLOCK = Path(__file__).parent / "no_flock"

# What is mounted below a mount point keeps its own flags, so that each is remounted; some, as /proc, refuse and may.
_SCRIPT = """
mount --make-rprivate /
for place in $(cut -d' ' -f5 /proc/self/mountinfo); do
    mount -o remount,bind,ro "$place" 2>/dev/null
done
[ -z "$ROOM" ] || mount -t tmpfs -o size="$ROOM" none "$FOLDER"
cd / || exit 99
for place in / /tmp /var/tmp /dev/shm "$HOME"; do
    touch "$place/is-writable" 2>/dev/null && exit 98
done
exec "$@"
"""

# Runs commands one after the other, each with its home, and says of each how it ended: (exit code, stdout and stderr).
_EACH = """
import contextlib, io, json, os, sys
from autotune.cli.main import main
ended = []
for home, words in json.loads(sys.argv.pop(1)):
    os.environ["HOME"], sys.argv[1:] = home, words
    code, told = 0, io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            main()
        except SystemExit as end:
            code = end.code
    ended.append((code, told.getvalue()))
print(json.dumps(ended))
"""


@cache
def can_remount() -> bool:
    """Tell whether this user may make mount namespaces, as root may outside of most containers."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(["unshare", "-m", "mount", "--make-rprivate", "/"], capture_output=True)
    return tried.returncode == 0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, with stdout and stderr in one text."""

    code: int
    text: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()]


@dataclass(frozen=True, slots=True)
class BareHost:
    """Host whose one writable folder, ``folder``, has ``room`` ("64m"); with "" it is not writable either."""

    folder: Path
    room: str = "64m"
    environ: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str) -> Ended:
        """Run a command in /, so that the working folder is no place for temporary files either."""
        environ = {**os.environ, **self.environ, "ROOM": self.room, "FOLDER": str(self.folder)}
        for name in [name for name in environ if name.startswith("XDG_")]:
            del environ[name]
        ended = subprocess.run(
            ["unshare", "-m", "sh", "-c", _SCRIPT, "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
        )
        assert ended.returncode not in (98, 99), "the namespace is not as bare as it should be"
        return Ended(ended.returncode, ended.stdout)

    def ringtune(self, *words: str) -> Ended:
        return self.run(sys.executable, "-P", "-m", "autotune", *words)

    def ringtune_each(self, *commands: tuple[str, tuple[str, ...]]) -> list[Ended]:
        """Run commands one after the other in one process, each with the home named before it."""
        ended = self.run(sys.executable, "-P", "-c", _EACH, json.dumps(commands))
        assert ended.code == 0, ended.text
        return [Ended(code or 0, text) for code, text in json.loads(ended.lines[-1])]


def environ_of(*, home: str = "/root", flock_errno: str = "") -> dict[str, str]:
    """Return the variables of a host: the checkout's packages, a home, and a file system without locks if wanted."""
    path = [str(REPO), *([str(NO_FLOCK)] if flock_errno else [])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": home,
        "OMP_NUM_THREADS": "1",
        "TEST_FLOCK_ERRNO": flock_errno,
    }
