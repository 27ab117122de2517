"""``ringtune diff``: print in what two profiles differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..options import json_option
from .options import is_store_name, opened_stores, store_option, store_with

if TYPE_CHECKING:
    from ringattn.profile.schema import Profile


@click.command(short_help="Print in what two profiles differ.")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@store_option
@json_option
def diff(first: str, second: str, stores: tuple[str, ...], as_json: bool) -> None:
    """Print in what profile B differs from A: machine, software, and the rows.

    A and B are files, or names in the stores. A row counts as different where
    its plan is another one, or where the measured gain differs by more than
    noise.

    \b
        ringtune diff this-machine.yaml this-machine.yaml
    """
    from autotune.display_text import plain

    from ..console import emit_json

    one, other = profile_named(first, stores), profile_named(second, stores)
    machine, rows = machine_differences(one, other), row_differences(one, other)
    if as_json:
        emit_json({"machine": machine, "rows": rows})
        return
    for line in (*machine, *rows):
        click.echo(plain(line))
    if not machine and not rows:
        click.echo("no difference")


def profile_named(text: str, stores: tuple[str, ...]) -> Profile:
    """Return the profile in a file, or where there is no such file and the text is a name, the one in a store."""
    from ringattn.profile.yaml_io import load_profile

    if Path(text).exists() or not is_store_name(text):
        return load_profile(text)
    store, name = store_with(opened_stores(stores), text)
    return store.profile(name)


def machine_differences(one: Profile, other: Profile) -> list[str]:
    """Return the fields of the fingerprint and the versions that differ."""
    from dataclasses import fields

    lines = []
    for field in fields(one.fingerprint):
        mine, theirs = getattr(one.fingerprint, field.name), getattr(other.fingerprint, field.name)
        if field.compare and mine != theirs:
            lines.append(f"{field.name}: {mine} in A, {theirs} in B")
    mine_of, theirs_of = dict(one.software), dict(other.software)
    for name in sorted(mine_of.keys() | theirs_of.keys()):
        if mine_of.get(name) != theirs_of.get(name):
            lines.append(f"{name}: {mine_of.get(name, 'absent')} in A, {theirs_of.get(name, 'absent')} in B")
    return lines


def row_differences(one: Profile, other: Profile) -> list[str]:
    """Return a line for each workload that only one has, or for which the two say something else."""
    from ringattn.store.merge import disagree, row_text

    mine, theirs = ({entry.workload: entry for entry in profile.plans} for profile in (one, other))
    lines = []
    for workload in sorted(mine.keys() | theirs.keys(), key=str):
        a, b = mine.get(workload), theirs.get(workload)
        if a is None or b is None:
            entry, where = (b, "B") if a is None else (a, "A")
            assert entry is not None
            lines.append(f"{workload}: in {where} alone, {row_text(entry)}")
            continue
        plans = [entry.choice.tunables if entry.choice else None for entry in (a, b)]
        if plans[0] != plans[1] or disagree(a, b):
            noise = "beyond noise" if disagree(a, b) else "within noise"
            lines.append(f"{workload}: {row_text(a)} in A; {row_text(b)} in B; {noise}")
    return lines
