"""``ringtune doctor --numerics``: map where kernels are right, and record it for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from autotune.exit_codes import ExitCode
from ringattn.wording import plural

if TYPE_CHECKING:
    from autotune.report.numerics.numerics_map import Line
    from ringattn.hardware.facts import HardwareFacts

BUDGET_S = 240.0
PROGRESS_S = 2.0
WIDEST, STEP = 256, 8
STYLES = {"ok": "green", "wrong": "red", "fails": "red", "refused, but right": "yellow"}


def head_dim_list(value: str | tuple[int, ...]) -> tuple[int, ...]:
    """Parse multiples of 8 up to 256, and ranges of them: ``64,128`` or ``8-96,256``."""
    if isinstance(value, tuple):
        return value
    found: set[int] = set()
    for part in value.split(","):
        begin, dash, end = part.partition("-")
        if not begin.strip().isdecimal() or (dash and not end.strip().isdecimal()):
            raise click.BadParameter(f"{value!r} is not a list of head dimensions such as 64,128 or 8-96")
        own = [d for d in range(int(begin), int(end if dash else begin) + 1) if d % STEP == 0 and 0 < d <= WIDEST]
        if not own:
            raise click.BadParameter(f"{part!r} holds no multiple of {STEP} from {STEP} to {WIDEST}")
        found.update(own)
    return tuple(sorted(found))


def numerics_of(
    device: str | None,
    kernels: Sequence[str],
    head_dims: Sequence[int] | None,
    budget_s: float | None,
    try_refused: bool,
    as_json: bool,
) -> None:
    """Run the sweep and print its map, or JSON; exit code 1 where an allowed kernel is not right."""
    from autotune.measure.pool.worker_pool import pool_size_here
    from autotune.report.numerics.numerics_map import HEAD_DIMS, attempts, findings, lines
    from autotune.report.numerics.numerics_sweep import sweep
    from ringattn.hardware.facts import detect
    from ringattn.kernels.registry import KERNELS

    from ..console import emit_json, print_answer

    if unknown := [name for name in kernels if name not in KERNELS]:
        raise click.UsageError(f"--kernel {unknown[0]}: the kernels are {', '.join(KERNELS)}")
    facts = detect(device)
    asked = attempts(facts, kernels or tuple(KERNELS), head_dims or HEAD_DIMS, try_refused=try_refused)
    total = sum(attempt.runs for attempt in asked)
    progress = _Progress(total)
    verdicts = sweep(
        asked,
        facts,
        device,
        processes=1 if facts.vendor == "cpu" else max(1, pool_size_here(facts)),  # most of the time goes into compiling
        budget_s=budget_s or BUDGET_S,
        progress=progress,
    )
    found = findings(asked, verdicts)
    note = remember(facts, asked, verdicts)
    if as_json:
        emit_json({"facts": facts, "runs": total, "done": len(verdicts), "findings": found, "note": note})
    else:
        print_answer(numerics_summary(facts, kernels or tuple(KERNELS), lines(found), total, len(verdicts), note))
    if any(finding.state in ("wrong", "fails") for finding in found):
        raise click.exceptions.Exit(ExitCode.ERROR)


def remember(facts: HardwareFacts, asked: Any, verdicts: Any) -> str:
    """Record the verdicts where programs look for them; return what is wrong with that place, if anything."""
    from autotune.report.numerics.numerics_map import verdicts_to_remember
    from ringattn.planning.validation.validation_memory import key_of, user_memory

    memory = user_memory()
    memory.remember(
        {
            key_of(of, facts): verdict
            for of, verdict in verdicts_to_remember(asked, verdicts).items()
            if of.kernel != "math"
        }
    )
    return memory.note


class _Progress:
    """Prints a line on stderr every few seconds."""

    def __init__(self, total: int) -> None:
        self._total, self._began, self._said = total, time.monotonic(), 0.0

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self._said >= PROGRESS_S or done == self._total:
            self._said = now
            print(f"numerics: {done} of {self._total} runs, {now - self._began:.0f} s", file=sys.stderr, flush=True)


def numerics_summary(
    facts: HardwareFacts, kernels: Sequence[str], made: Sequence[Line], total: int, done: int, note: str
) -> Any:
    """Return the map as a table for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from autotune.display_text import plain

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("Kernel", "Direction", "Dtypes", "State", "head_dim"):
        table.add_column(name, no_wrap=name in ("Kernel", "Direction"), overflow="fold")
    last: tuple[str, str, str] = ("", "", "")
    for line in made:
        head = (line.kernel, line.direction, line.variants)
        shown = head if head != last else ("", "", "")
        last = head
        what = line.head_dims + (f": {line.detail}" if line.detail else "")
        table.add_row(*map(plain, shown), Text(line.state, style=STYLES.get(line.state, "dim")), plain(what))
    parts: list[Any] = [Text(plain(f"{facts.device_name} ({facts.arch})"), style="bold"), table]
    missing = [name for name in kernels if name not in {line.kernel for line in made}]
    if missing:
        parts.append(Text(f"Not on this machine: {', '.join(missing)}; `ringtune doctor` says why"))
    if done < total:
        parts.append(Text(f"{plural(total - done, 'run')} of {total} not made in time; --budget gives more"))
    if note:
        parts.append(Text(plain(note), style="red"))
    return Group(*parts)
