"""Consoles and the JSON document that all commands share.

stdout carries the answer (a table, or with ``--json`` exactly one document); stderr carries logs, progress and
errors. Rich is imported late so that ``ringtune --help`` stays quick.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING

import click

from autotune.display_text import plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PIPED_WIDTH = 110  # columns when stdout is no terminal: tables stay whole in a log file


def console(*, stderr: bool = False) -> Console:
    """Return a console on the current stdout or stderr. Rich itself honours NO_COLOR, FORCE_COLOR, TERM and COLUMNS."""
    import os

    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, emoji=False, markup=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made = Console(stderr=stderr, highlight=False, emoji=False, markup=False, width=PIPED_WIDTH)
    return made


def print_answer(answer: RenderableType) -> None:
    """Print the answer of a command on stdout, without the spaces that Rich fills its tables up with at line ends."""
    made = console()
    with made.capture() as captured:
        made.print(answer, crop=False)  # a table is as wide as its names, which are no use cut off
    lines = "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
    click.echo(lines, nl=False, color=True)  # Rich has decided on colours


def emit_json(document: object) -> None:
    """Print the one JSON document of a command on stdout: dataclasses as objects, inf and NaN as null."""
    click.echo(json.dumps(_plain_data(document), indent=2, allow_nan=False))


def _plain_data(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple | frozenset | set):
        return [_plain_data(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def warn(text: str) -> None:
    """Print one line on stderr that is not an error."""
    click.echo(plain(text), err=True)
