"""``ringtune doctor``: show what this machine can run, and what would make it run more."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from autotune.exit_codes import ExitCode
from ringattn.wording import plural

from ..options import device_option, json_option, seconds
from ..store.candidates import store_contents
from .numerics import head_dim_list, numerics_of

if TYPE_CHECKING:
    from ringattn.hardware.facts import HardwareFacts

STATE_STYLES = {"works": "green", "broken": "red", "wrong": "red", "unavailable": "dim"}


@click.command(short_help="Show what this machine can run.")
@click.option(
    "--numerics", is_flag=True, help="Hold every kernel against float64 at many head dimensions, and print the map."
)
@click.option("--kernel", "kernels", metavar="NAME", multiple=True, help="With --numerics: this kernel; repeatable.")
@click.option(
    "--head-dim",
    "head_dims",
    type=head_dim_list,
    metavar="N,N-N,...",
    help="With --numerics: these multiples of 8, as in 64,128 or 8-96.  [default: 8-256]",
)
@click.option(
    "--budget",
    "budget_s",
    type=seconds,
    metavar="SECONDS",
    help="With --numerics: begin nothing after so many seconds; 90s and 3m work, too.  [default: 240]",
)
@click.option(
    "--try-refused",
    is_flag=True,
    help="With --numerics: run what a rule refuses, too, unless it is known to stray through memory.",
)
@device_option
@json_option
def doctor(
    numerics: bool,
    kernels: tuple[str, ...],
    head_dims: tuple[int, ...] | None,
    budget_s: float | None,
    try_refused: bool,
    device: str | None,
    as_json: bool,
) -> None:
    """Show the machine, its profiles, and every attention kernel: works, or why not.

    Each kernel that says it can run is run once on a tiny input, in a process
    of its own, and compared with float64. Exit code 1 when none works or one
    gives wrong numbers.

    With --numerics each is run forward and backward, causal and full, with
    grouped heads and without, in every dtype and at several lengths; exit code
    1 when one that the rules allow is not right. RingAttention remembers what
    was found, and does not run what was wrong.
    """
    if numerics:
        numerics_of(device, kernels, head_dims, budget_s, try_refused, as_json)
        return
    given = {"--kernel": kernels, "--head-dim": head_dims, "--budget": budget_s, "--try-refused": try_refused}
    for name, value in given.items():
        if value:
            raise click.UsageError(f"{name} goes with --numerics")
    from autotune.report.doctor import diagnose
    from autotune.report.numerics.numerics_sweep import sweep
    from ringattn.hardware.facts import detect

    from ..console import emit_json, print_answer

    facts = detect(device)
    diagnoses = diagnose(facts, lambda attempts: sweep(attempts, facts, device))
    places = search_path_contents(store_contents(facts))
    ranks = ranks_here(facts, device)
    if as_json:
        resolution = _resolution(device)
        emit_json(
            {"facts": facts, "ranks": ranks, "search_path": places, "resolution": resolution, "kernels": diagnoses}
        )
    else:
        print_answer(doctor_summary(facts, ranks, places, _resolution(device), diagnoses))
    if not any(k.state == "works" for k in diagnoses) or any(k.state == "wrong" for k in diagnoses):
        raise click.exceptions.Exit(ExitCode.ERROR)


def search_path_contents(stores: list[dict[str, object]]) -> list[dict[str, object]]:
    """List every place that profiles are looked for, in order, with its files and whether each can be read.

    ``stores`` come after the user's folder.
    """
    from ringattn.errors import ProfileError
    from ringattn.profile.locations import home_folder, search_paths
    from ringattn.profile.yaml_io import load_profile

    places: list[dict[str, object]] = []
    for origin, place in search_paths(os.environ, home_folder()):
        try:
            # Not by a pattern: to those a folder that cannot be read is an empty one.
            files = [place] if place.is_file() else sorted(p for p in place.iterdir() if p.suffix in (".yaml", ".yml"))
        except (FileNotFoundError, NotADirectoryError):
            files = []
        except OSError as error:
            places.append({"origin": origin, "path": str(place), "exists": True, "error": error.strerror, "files": []})
            places += stores if origin == "user" else []
            continue
        contents = []
        for file in files:
            try:
                contents.append({"file": file.name, "source": load_profile(file).source, "error": ""})
            except ProfileError as error:
                contents.append({"file": file.name, "source": "", "error": error.problem})
        places.append({"origin": origin, "path": str(place), "exists": place.exists(), "error": "", "files": contents})
        places += stores if origin == "user" else []
    return places


def _resolution(device: str | None) -> dict[str, object]:
    """Return what resolves here; a named file that cannot be used is an answer, too, and no end of the diagnosis."""
    from ringattn.errors import ProfileError

    from ..locate import resolve_here

    try:
        resolution, _, _ = resolve_here(device)
    except ProfileError as error:
        return {"path": "", "tier": "", "error": str(error)}
    return {"path": resolution.path, "tier": resolution.tier, "error": ""}


def ranks_here(facts: HardwareFacts, device: str | None) -> dict[str, object]:
    """Return how many ranks fit on this host, what links them, and their measured speeds.

    On a CPU any number of processes can be ranks, so that 1 says nothing.
    """
    from ringattn.errors import ProfileError

    from ..locate import resolve_here

    found: dict[str, object] = {"count": facts.device_count, "link": facts.link, "link_speeds": ()}
    if facts.device_count > 1:
        try:
            resolution, _, _ = resolve_here(device, facts.device_count)
        except ProfileError:
            return found  # the resolution for one rank says what is wrong with it
        if resolution.profile is not None:
            found["link_speeds"] = resolution.profile.fingerprint.link_speeds
    return found


def ranks_text(facts: HardwareFacts, ranks: dict[str, Any]) -> str:
    """Return the ranks as one line."""
    if facts.vendor == "cpu":
        return "processes over gloo, as many as you like: ringtune probe --nproc N tunes them as one"
    if ranks["count"] == 1:
        return "one GPU"
    kinds = {"": "by links that NVML does not tell", "pcie": "over PCIe", "nv1": "by 1 NVLink each"}
    link = kinds.get(ranks["link"], f"by {ranks['link'].removeprefix('nv')} NVLinks each")
    speeds = [
        f"{speed.world} ranks on {plural(speed.hosts, 'host')}: {speed.ring_gb_s:g} GB/s each way, "
        f"{speed.latency_us:g} us"
        for speed in ranks["link_speeds"]
    ]
    measured = "; ".join(speeds) or "not measured yet: ringtune probe --nproc gpu"
    return f"{ranks['count']} GPUs, linked {link}; {measured}"


def doctor_summary(
    facts: Any, ranks: dict[str, Any], places: list[dict[str, Any]], resolution: dict[str, Any], kernels: Any
) -> Any:
    """Return the diagnosis as tables for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from autotune.display_text import format_bytes, plain
    from autotune.report.wording.hanging import hanging

    from ..locate import TIER_MEANINGS

    machine = Table.grid(padding=(0, 2))
    memory = format_bytes(facts.memory_mib * 2**20)
    cores = "cores" if facts.vendor == "cpu" else "SMs"
    for label, value in (
        ("device", f"{facts.device_name} ({facts.sku}, {facts.arch})"),
        ("size", f"{facts.sm_count} {cores}, {memory}, L2 {format_bytes(facts.l2_mib * 2**20)}"),
        ("ranks", ranks_text(facts, ranks)),
        ("software", ", ".join(f"{name} {version}" for name, version in facts.software)),
        ("optional packages", ", ".join(facts.packages) or "none found"),
    ):
        machine.add_row(Text(label, style="dim"), Text(plain(value), overflow="fold"))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("Kernel", no_wrap=True)
    table.add_column("State", no_wrap=True)
    table.add_column("What happened, and what would help", overflow="fold")
    for kernel in kernels:
        remedy = [f"-> {kernel.remedy}"] if kernel.remedy else []
        lines = [kernel.detail, *remedy, *([f"({kernel.note})"] if kernel.note else [])]
        state = Text(kernel.state, style=STATE_STYLES[kernel.state])
        table.add_row(kernel.kernel, state, Text("\n".join(map(plain, lines))))
    parts: list[Any] = [Text("Machine", style="bold"), machine, Text(""), Text("Kernels", style="bold"), table]
    parts.append(Text("Profiles, in search order", style="bold"))
    for place in places:
        empty = "cannot be read" if place["error"] else "empty" if place["exists"] else "not there"
        note = "" if place["files"] else f": {empty}"
        parts.append(hanging(f"  {place['origin']:<9} ", f"{plain(place['path'])}{note}"))
        for file in place["files"]:
            line = f"{plain(file['file'])}: {plain(file['error'] or file['source'])}"
            parts.append(hanging("            - ", line, "red" if file["error"] else "dim"))
    tier = resolution["tier"]
    verdict = f"{resolution['path']}: tier {tier} ({TIER_MEANINGS[tier]})" if tier else resolution["error"]
    parts += [Text(""), Text("In use", style="bold"), hanging("  ", plain(verdict))]
    if tier == "heuristic":
        parts.append(hanging("  ", "`ringtune probe` measures this machine and replaces it", "dim"))
    return Group(*parts)
