"""Results of accuracy checks on this machine, kept beside the user's profiles so that each is made once.

One small JSON file holds the verdicts of every device and software that used it. It is read by several processes at
once and written whole; of two writers at the same moment one may lose its verdicts, which are then found anew. A file
that cannot be read or written costs the same and is told about; it never stops a call.

Verdicts with figures are kept. A kernel that raised an error is tried again by the next process: a full disk or a
missing compiler says nothing of its numbers.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from ringattn.hardware.facts import HardwareFacts
from ringattn.hardware.kernel_faults import Combination, Figure, KernelFault, Verdict
from ringattn.kernels.registry import KERNELS
from ringattn.profile.locations import home_folder, user_folder
from ringattn.profile.whole_file import replace_file
from ringattn.versions import __version__

FILE_NAME = "validations.json"
_SCHEMA = 1
_MOST_VERDICTS = 4096  # the oldest go first; one takes 500 bytes
_MOST_BYTES = 8 * 2**20

Environment = tuple[tuple[str, str], ...]

# What any kernel's numbers may depend on, beside its own package. Python's version is none of it.
_SOFTWARE = ("torch", "cuda", "cudnn", "driver", "triton")

Key = tuple[Environment, Combination]


def user_memory() -> Memory:
    """Return the memory of this user, one object per file and process."""
    return _memory_at(user_folder(os.environ, home_folder()) / FILE_NAME)


@cache
def _memory_at(path: Path) -> Memory:
    return Memory(path)


def environment_of(facts: HardwareFacts, package: str) -> Environment:
    """Return the device and the versions that a verdict holds for; ``package`` is the kernel's, "" for torch itself."""
    software = dict(facts.software)
    here = {name: software[name] for name in (*_SOFTWARE, package) if name in software}
    device = {"vendor": facts.vendor, "device_name": facts.device_name, "arch": facts.arch, "mig": facts.mig}
    return tuple(sorted({**here, **device, "isa": " ".join(facts.isa), "ringtune": __version__}.items()))


def key_of(combination: Combination, facts: HardwareFacts) -> Key:
    """Return what a verdict about ``combination`` on this machine is known by."""
    kernel = KERNELS.get(combination.kernel)
    return environment_of(facts, kernel.package if kernel else ""), combination


class Memory:
    """Verdicts by environment and combination. ``note`` says what is wrong with the file, "" where nothing is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.note = ""
        self._lock = threading.Lock()
        self._found: dict[Key, Verdict] = {}  # by this process
        self._read: dict[Key, Verdict] = {}
        self._seen: tuple[int, int, int] | None = None

    def verdicts(self) -> Mapping[Key, Verdict]:
        """Return everything known: a look at the file's status where it has not changed since."""
        with self._lock:
            self._refresh()
            return {**self._read, **self._found}

    def faults(self, facts: HardwareFacts, head_dim: int) -> tuple[KernelFault, ...]:
        """Return the combinations of this head dimension that failed on this machine."""
        return tuple(
            KernelFault(combination, verdict.reason)
            for (environment, combination), verdict in self.verdicts().items()
            if combination.head_dim == head_dim and not verdict.passes and key_of(combination, facts)[0] == environment
        )

    def remember(self, verdicts: Mapping[Key, Verdict]) -> None:
        """Add verdicts, in this process and where the file allows it for all."""
        with self._lock:
            self._found |= verdicts
            lasting = {key: verdict for key, verdict in verdicts.items() if not verdict.message}
            if not lasting:
                return
            self._refresh()
            everything = [*{**self._read, **lasting}.items()][-_MOST_VERDICTS:]
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self.path, _dump(everything), lasting=False)
            except OSError as error:
                self.note = (
                    f"{self.path}: cannot be written: {error.strerror or error}; every process checks kernels anew"
                )

    def _refresh(self) -> None:
        """Read the file again where it has changed."""
        try:
            status = self.path.stat()
            seen = status.st_ino, status.st_size, status.st_mtime_ns
            if seen == self._seen:
                return
            self._seen, self._read = seen, {}
            if status.st_size > _MOST_BYTES:
                raise ValueError(f"it has {status.st_size} bytes, more than {_MOST_BYTES}")
            self._read = _load(self.path.read_bytes())
        except FileNotFoundError:
            self._seen, self._read = None, {}
        except OSError as error:
            self.note = f"{self.path}: cannot be read: {error.strerror or error}; every process checks kernels anew"
        except (ValueError, TypeError, KeyError, RecursionError) as error:  # json's own error is a ValueError
            what = str(error) if isinstance(error, ValueError) else "it holds something else"
            self.note = f"{self.path}: is no list of accuracy checks ({what}); it is replaced, kernels are checked anew"


def _dump(verdicts: list[tuple[Key, Verdict]]) -> bytes:
    entries = [
        {
            "environment": dict(environment),
            "combination": _plain(combination) | {"params": dict(combination.params)},
            # JSON has no NaN
            "figures": [[figure.name, str(figure.error), str(figure.bound)] for figure in verdict.figures],
        }
        for (environment, combination), verdict in verdicts
    ]
    return json.dumps({"schema": _SCHEMA, "verdicts": entries}, indent=1).encode()


def _plain(combination: Combination) -> dict[str, Any]:
    return {field.name: getattr(combination, field.name) for field in fields(combination)}


def _load(content: bytes) -> dict[Key, Verdict]:
    """Raise ValueError, TypeError or KeyError for anything but what ``_dump`` writes."""
    plain = json.loads(content)
    if not isinstance(plain, dict) or plain.get("schema") != _SCHEMA:
        raise ValueError(f"its schema is not {_SCHEMA}")
    return dict(map(_entry, plain["verdicts"]))


def _entry(entry: Any) -> tuple[Key, Verdict]:
    environment = tuple(sorted((str(name), str(value)) for name, value in dict(entry["environment"]).items()))
    plain = dict(entry["combination"])
    params = tuple(sorted(dict(plain.pop("params")).items()))
    figures = tuple(Figure(str(name), float(error), float(bound)) for name, error, bound in entry["figures"])
    if not figures:
        raise ValueError("a verdict has no figures")
    return (environment, Combination(**plain, params=params)), Verdict(figures)
