"""``ringtune list``: print what is in a store, or what a fleet's nodes run."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from ..options import Integer, json_option
from .options import opened_stores, store_option

if TYPE_CHECKING:
    from ringattn.store.store import Store


@click.command("list", short_help="Print what is in a store.")
@click.argument("kind", required=False, metavar="[KIND]")
@click.option("--fleet", is_flag=True, help="Print what the nodes run that left a note with `ringtune which --report`.")
@click.option(
    "--within",
    "within_days",
    type=Integer(min=1, max=36500),
    metavar="DAYS",
    help="With --fleet: nodes whose note is older count as silent; each has to report so often.  [default: 1]",
)
@store_option
@json_option
def list_store(kind: str | None, fleet: bool, within_days: int | None, stores: tuple[str, ...], as_json: bool) -> None:
    """Print the profiles in the stores: names alone, or with KIND what is in them.

    With --fleet, what each kind of node runs: a profile, or the heuristic and
    why. A node that is gone leaves its last note: those whose note is older
    than --within are counted apart, as silent.

    \b
        ringtune list --store /shared/ringtune
        ringtune list --store /shared/ringtune --fleet
    """
    from autotune.display_text import plain
    from autotune.report.wording.fitting_tables import WholeNames

    from ..console import emit_json, print_answer, warn

    if within_days is not None and not fleet:
        raise click.UsageError("--within is about the notes of nodes; give --fleet, too")
    opened = opened_stores(stores)
    notes: list[str] = []
    if fleet:
        if kind is not None:
            raise click.UsageError("--fleet is about every kind; leave KIND out")
        columns: tuple[str, ...] = ("Kind", "Ranks", "Nodes", "Silent", "Tier", "Profile, or why there is none")
        within = timedelta(days=within_days or 1)
        rows = [row for store in opened for row in fleet_rows(store, notes, within)]
    elif kind is not None:
        columns = ("Name", "Rows", "Effort", "Day", "Software")
        rows = [row for store in opened for row in profile_rows(store, kind, notes)]
    else:
        columns = ("Kind", "Ranks", "Profiles", "Store")
        rows = [row for store in opened for row in kind_rows(store, notes)]
    for note in notes:
        warn(f"warning: {note}")
    if as_json:
        emit_json([dict(zip(map(json_key, columns), row, strict=True)) for row in rows])
    elif rows:
        print_answer(WholeNames(columns, [tuple(map(plain, row)) for row in rows]))
    else:
        click.echo("nothing there")


def json_key(column: str) -> str:
    """Return a column's name as a key: its first word."""
    return column.split(",")[0].lower()


def kind_rows(store: Store, notes: list[str]) -> list[tuple[Any, ...]]:
    """Return a row for each kind and number of ranks, with how many profiles there are; a note for what is none."""
    from ringattn.store.store import others_note

    names, others = store.listed()
    if others := (*store.backend.loose_files(), *others):
        notes.append(others_note(store.url, others))
    counts = Counter((name.kind, name.world) for name in names)
    return [(of, world, count, store.url) for (of, world), count in sorted(counts.items())]


def profile_rows(store: Store, kind: str, notes: list[str]) -> list[tuple[Any, ...]]:
    """Return a row for each profile of one kind."""
    from ringattn.errors import RingAttentionError
    from ringattn.store.store import others_note

    rows = []
    names, others = store.listed(kind)
    if others:
        notes.append(others_note(store.url, others))
    for name in names:
        try:
            profile = store.profile(name)
        except FileNotFoundError:
            continue  # forgotten since it was listed
        except RingAttentionError as error:
            notes.append(str(error))
            continue
        origin = profile.provenance
        software = ", ".join(f"{package} {version}" for package, version in profile.software)
        rows.append((name.short, len(profile.plans), origin.effort, origin.date, software))
    return rows


def fleet_rows(store: Store, notes: list[str], within: timedelta) -> list[tuple[Any, ...]]:
    """Return a row for each kind, number of ranks and outcome, with how many nodes have it, those without first.

    Nodes that were not seen ``within`` that time are counted apart.
    """
    from ringattn.store.beacon import read_beacons

    now = datetime.now(tz=UTC)
    groups: dict[tuple[str, int, str, str], list[tuple[timedelta, str]]] = {}
    for beacon in read_beacons(store.backend, notes):
        what = beacon.profile or beacon.why
        node = now - beacon.seen, beacon.node
        groups.setdefault((beacon.kind, beacon.world, beacon.tier, what), []).append(node)
    ordered = sorted(groups.items(), key=lambda item: (item[0][2] != "heuristic", item[0]))
    rows = []
    for (kind, world, tier, what), nodes in ordered:
        lately = [node for node in nodes if node[0] <= within]
        rows.append((kind, world, _counted(lately), _counted([n for n in nodes if n not in lately]), tier, what))
    return rows


def _counted(nodes: list[tuple[timedelta, str]]) -> str:
    """Return how many these are, and when the last of them were seen."""
    from autotune.display_text import format_age

    named = [f"{name} ({format_age(age.total_seconds())})" for age, name in sorted(nodes)[:4]]
    more = f" and {len(nodes) - 4} more" if len(nodes) > 4 else ""
    return f"{len(nodes)}: {', '.join(named)}{more}" if nodes else "0"
