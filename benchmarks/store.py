"""Measures what a store of many profiles costs a node.

    python benchmarks/store.py [--output FOLDER] [--profiles 10000]

A folder with so many profiles of other kinds and 16 of this machine's, and an address that drops packets (with root: a
network namespace is made for it). Each figure is the median of rounds in processes of their own, beyond the import of
torch: `which` with an empty cache and with a full one, loading and resolving one profile, and `which` where the store
does not answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from common import Record, median

from ringattn.hardware.facts import detect
from ringattn.profile.schema import Choice, Evidence, Fingerprint, PlanEntry, Profile, Provenance
from ringattn.profile.yaml_io import dump_profile
from ringattn.store.backends.folder import Folder
from ringattn.store.store import Store
from ringattn.workload import BranchTunables, Tunables, Workload

ROOT = Path(__file__).parents[1]
ROWS = 24
NOBODY = "10.213.79.9"

WHICH = """
import io, json, sys, time, contextlib
import torch
from click.testing import CliRunner
from autotune.cli.main import cli
begin, cpu_begin = time.perf_counter(), time.process_time()
result = CliRunner().invoke(cli, sys.argv[1:])
taken, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
print(json.dumps([taken * 1e3, cpu * 1e3, result.exit_code, warnings]))
"""
LOAD = """
import json, sys, time
import torch
from ringattn.hardware.facts import detect
from ringattn.profile.locations import Located
from ringattn.profile.resolve import resolve
from ringattn.profile.yaml_io import load_profile
facts, times = detect("cpu"), []
load_profile(sys.argv[1])
for _ in range(20):
    begin, cpu_begin = time.perf_counter(), time.process_time()
    resolve((Located(sys.argv[1], load_profile(sys.argv[1]), "store"),), facts)
    times.append(((time.perf_counter() - begin) * 1e3, (time.process_time() - cpu_begin) * 1e3))
print(json.dumps([sorted(column)[10] for column in zip(*times)]))
"""


def profile_of(number: int, rows: int = ROWS) -> Profile:
    """Return a profile of this machine with rows for so many lengths."""
    evidence = Evidence(1.25, 0.75, 0.7, 0.8, 1 << 20, 1e-7, 480.0, 26.5, 12)
    plan = Choice(Tunables("fp32", (BranchTunables("flash-cpu", "flash-cpu"),)), evidence)
    entries = (PlanEntry(Workload("train", True, 64 + 8 * row, 4, 32, "fp32"), plan) for row in range(rows))
    facts = detect("cpu")
    day = f"2026-01-{number % 28 + 1:02d}"
    origin = Provenance("0.1.0", day, "quick", seed=number)
    return Profile("measured", Fingerprint.of(facts), facts.software, plans=tuple(entries), provenance=origin)


def fill(folder: Path, profiles: int, own: int) -> None:
    """Write the store: ``own`` profiles of this machine, and the others of 100 other kinds."""
    store = Store(Folder(folder))
    for number in range(own):
        store.push(profile_of(number))
    content = dump_profile(profile_of(0, 1))
    for number in range(profiles - own):
        path = folder / "profiles" / f"nvidia-other-{number % 100}" / f"x1-{number:064x}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)


def run(program: str, *arguments: str, inside: tuple[str, ...] = (), **variables: str) -> object:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [*inside, sys.executable, "-c", program, *arguments]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@contextlib.contextmanager
def dropping() -> Iterator[tuple[str, ...]]:
    """Yield the command prefix of a network namespace in which packets to NOBODY vanish; empty without root."""
    name = f"store{os.getpid()}"
    steps = (
        ("netns", "add", name),
        ("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two"),
        ("-n", name, "addr", "add", "10.213.79.1/24", "dev", "one"),
        ("-n", name, "link", "set", "one", "up"),
        ("-n", name, "link", "set", "two", "up"),
        ("-n", name, "neigh", "add", NOBODY, "lladdr", "02:00:00:00:00:01", "dev", "one"),
    )
    try:
        made = os.geteuid() == 0 and all(subprocess.run(["ip", *step]).returncode == 0 for step in steps)
        yield ("ip", "netns", "exec", name) if made else ()
    finally:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def which(record: Record, work: str, rounds: int, folder: Path, store: str, *, kept: bool, **how: object) -> None:
    """Record the time of `ringtune which`, with a cache kept from round to round or without one."""
    times: list[float] = []
    cpu: list[float] = []
    warnings, codes = set(), set()
    for number in range(rounds + kept):
        cache = folder / ("cache" if kept else f"cache{number}")
        arguments = ("which", "--device", "cpu", "--store", store)
        taken_ms, cpu_ms, code, told = run(WHICH, *arguments, XDG_CACHE_HOME=str(cache), **how)  # type: ignore[misc, arg-type]
        if number or not kept:
            times.append(taken_ms)
            cpu.append(cpu_ms)
        warnings.add(len(told))
        codes.add(code)
    found = {"warnings": sorted(warnings), "exit_codes": sorted(codes)}
    load = os.getloadavg()[0]  # above the number of processors the times are other programs', too
    record.add(work=work, which_ms=median(times), which_cpu_ms=median(cpu), least_ms=min(times), load=load, **found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="folder for store.json")
    parser.add_argument("--profiles", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    record = Record("store", arguments.output)
    with tempfile.TemporaryDirectory() as made, dropping() as inside:
        folder = Path(made)
        (folder / "config").mkdir()
        os.environ["XDG_CONFIG_HOME"] = str(folder / "config")
        for own in (1, 16):
            shared = folder / f"store{own}"
            shared.mkdir()
            fill(shared, arguments.profiles, own)
            for kept in (False, True):
                work = f"{arguments.profiles} profiles, {own} of this machine, {'full' if kept else 'empty'} cache"
                which(record, work, arguments.rounds, folder / str(own), str(shared), kept=kept)
        one = profile_of(0)
        file = folder / "one.yaml"
        for rows in (4, 12, ROWS):
            file.write_text(dump_profile(replace(one, plans=one.plans[:rows])))
            times = [run(LOAD, str(file)) for _ in range(arguments.rounds)]
            wall, cpu = zip(*times, strict=True)  # type: ignore[misc]
            record.add(
                work=f"load and resolve one profile of {rows} rows", load_ms=median(wall), load_cpu_ms=median(cpu)
            )
        which(record, "no store", arguments.rounds, folder / "none", str(folder / "config"), kept=True)
        if inside:
            keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
            keys["AWS_ENDPOINT_URL"] = f"http://{NOBODY}:9000"
            store = "s3://bucket/ringtune"
            which(record, "S3 at an address that drops packets", arguments.rounds, folder / "gone", store,
                  kept=False, inside=inside, **keys)  # fmt: skip


if __name__ == "__main__":
    main()
