"""The ``ringtune`` command: a group of commands, one file each, and the one place where errors become exit codes."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import click

from autotune.display_text import plain
from autotune.exit_codes import ExitCode, ProbeFailure

from .console import print_answer
from .interrupts import PROBE_INTERRUPTED
from .machine.compare import compare
from .machine.doctor import doctor
from .machine.trace import trace
from .probing.probe import probe
from .probing.probe_result import ARGUMENTS
from .probing.verify import verify
from .profile.explain import explain
from .profile.report import report
from .profile.show import show
from .profile.validate import validate
from .profile.which import which
from .store.diff import diff
from .store.forget import forget
from .store.listing import list_store
from .store.merge import merge
from .store.pull import pull
from .store.push import push
from .store.sign import sign, verify_signature

EPILOG = """\b
Exit codes: 0 ok, 1 error, 2 usage, 3 no device, 4 no matching profile,
            5 stale, 6 inconclusive, 7 nothing measured, 69 storage unavailable, 75 device busy,
            130 interrupted.
"""

_WANTS_JSON = "ringtune.wants_json"


def _fail(message: str, code: ExitCode, as_json: bool) -> click.exceptions.Exit:
    """Report an error in one line on stderr, and with --json as a document, so that stdout is always JSON."""
    message = plain(message)
    with contextlib.suppress(OSError):  # of a full stderr the exit code still tells
        click.echo(f"Error: {message}", err=True)
    if as_json:
        with contextlib.suppress(OSError):  # stdout may be what is full; the line above has said so
            click.echo(json.dumps({"error": message, "exit_code": int(code)}))
    return click.exceptions.Exit(code)


@contextlib.contextmanager
def _usage_errors(as_json: bool) -> Iterator[None]:
    """Print a usage error as a document on stdout with --json, before click reports it on stderr."""
    try:
        yield
    except click.UsageError as error:
        if as_json:
            click.echo(json.dumps({"error": error.format_message(), "exit_code": int(ExitCode.USAGE)}))
        raise


class RingtuneGroup(click.Group):
    """Turns what a user can cause into one line and its exit code. Anything else is a bug and keeps its traceback."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WANTS_JSON] = "--json" in args  # known before a usage error can hide it
        ctx.meta[ARGUMENTS] = tuple(args)
        with _usage_errors(bool(ctx.meta[_WANTS_JSON])):  # of an option before the command
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        as_json = bool(ctx.meta[_WANTS_JSON])
        try:
            with _usage_errors(as_json):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _fail(_interrupted(ctx), ExitCode.INTERRUPTED, as_json) from None
        except Exception as error:
            code = exit_code_of(error)
            if code is None:
                raise
            raise _fail(_told(error), code, as_json) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order a newcomer meets them, not the alphabet's


def exit_code_of(error: Exception) -> ExitCode | None:
    """Return the exit code of an error that a user can cause, None for a bug of ours."""
    from ringattn.errors import DeviceError, RingAttentionError

    if isinstance(error, ProbeFailure):
        return error.exit_code
    if isinstance(error, DeviceError):
        return ExitCode.NO_DEVICE
    if isinstance(error, RingAttentionError):
        return ExitCode.ERROR
    if isinstance(error, BrokenPipeError):
        return None  # click ends quietly when the reader of a pipe has gone
    if isinstance(error, OSError) and (
        error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT) or _is_of_stdout(error)
    ):
        return ExitCode.ERROR
    return None


def _told(error: Exception) -> str:
    """Return the line for an error: of stdout, which has no file name, what it is and the remedy."""
    if isinstance(error, OSError) and error.filename is None and _is_of_stdout(error):
        return f"stdout: {error.strerror}; make room where it goes, or redirect it to another place"
    return str(error)


def _is_of_stdout(error: OSError) -> bool:
    """Return whether it was raised where answers are printed, and not by what click prints on stderr."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(
        frame.f_code is print_answer.__code__ or (frame.f_code is click.echo.__code__ and not frame.f_locals["err"])
        for frame in frames
    )


def _interrupted(ctx: click.Context) -> str:
    if ctx.invoked_subcommand == "probe":
        return PROBE_INTERRUPTED
    return "interrupted"


class _StderrHandler(logging.Handler):
    """Prints log records as plain lines on the current stderr, so that a live progress bar is not torn."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(plain(f"{record.name}: {record.levelname.lower()}: {record.getMessage()}"), err=True)


def _configure_logging(verbose: bool) -> None:
    for name in ("ringattn", "autotune"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO if verbose else logging.WARNING)
        logger.propagate = False
        logger.handlers = [_StderrHandler()]


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from ringattn import __version__

        click.echo(f"ringtune {__version__}")
        ctx.exit()


@click.group(cls=RingtuneGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
@click.option("-v", "--verbose", is_flag=True, help="Log on stderr which profile was taken and why.")
def cli(verbose: bool) -> None:
    """Measure attention on this machine once, and keep the answer in a hardware profile.

    Start with 'ringtune probe'. Answers go to stdout, logs and progress to stderr.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a stream that a caller replaced may be any file object
            stream.reconfigure(errors="backslashreplace")
    _configure_logging(verbose)


for _command in (
    *(probe, show, report, explain, trace, which, validate, verify, doctor, compare),
    *(push, pull, list_store, merge, diff, forget, sign, verify_signature),
):
    cli.add_command(_command)


def main() -> NoReturn:
    """Run the command, and end the process with one of the exit codes above."""
    try:
        cli.main(prog_name="ringtune")
    except KeyboardInterrupt:  # before a command had begun
        click.echo("Error: interrupted", err=True)
        _leave_now(ExitCode.INTERRUPTED)
    except SystemExit as stop:
        if stop.code == ExitCode.INTERRUPTED:
            _leave_now(ExitCode.INTERRUPTED)
        _drop_what_cannot_be_written()
        raise
    except OSError as error:  # --help and --version print before the group is invoked
        code = exit_code_of(error)
        if code is None:
            raise
        failed = _fail(_told(error), code, as_json=False)
        _drop_what_cannot_be_written()
        sys.exit(failed.exit_code)
    raise AssertionError("click ends the process itself")


def _drop_what_cannot_be_written() -> None:
    """Point a stream that is full at nothing, after its error was reported.

    Python's own ending writes what the stream still holds a second time: it would report the same error in three more
    lines, and end the process with code 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)


def _leave_now(code: ExitCode) -> NoReturn:
    """End the process past Python's own ending.

    There a second Ctrl-C prints a traceback, and one that struck inside an extension module makes Python kill itself
    by the signal after all. Everything that must be closed is closed by then.
    """
    _drop_what_cannot_be_written()
    os._exit(code)
