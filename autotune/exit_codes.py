"""Exit codes of the ``ringtune`` command, and the errors that carry them."""

from __future__ import annotations

from enum import IntEnum

from ringattn.errors import RingAttentionError


class ExitCode(IntEnum):
    OK = 0
    ERROR = 1
    USAGE = 2
    NO_DEVICE = 3
    NO_PROFILE = 4
    STALE = 5
    INCONCLUSIVE = 6  # in part: what was measured stands
    NOTHING_MEASURED = 7
    UNAVAILABLE = 69  # a server that is needed does not answer
    BUSY = 75
    INTERRUPTED = 130


class ProbeFailure(RingAttentionError):
    """A probe or a verification that could not end well: one line for the user, and the exit code."""

    exit_code = ExitCode.ERROR

    def __init__(self, message: str, exit_code: ExitCode | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code or self.exit_code


class UsageFailure(ProbeFailure):
    """Options that contradict each other or leave nothing to measure."""

    exit_code = ExitCode.USAGE


class NoDevice(ProbeFailure):
    """The device asked for is absent or of a kind nobody has measured."""

    exit_code = ExitCode.NO_DEVICE


class NothingMeasured(ProbeFailure):
    """The machine was too noisy, throttled or shared for any number to be believed; nothing was written."""

    exit_code = ExitCode.NOTHING_MEASURED


class DeviceBusy(ProbeFailure):
    """Another probe holds this profile or this device."""

    exit_code = ExitCode.BUSY
