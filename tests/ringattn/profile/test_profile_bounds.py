"""Every size in a profile has a bound, every file that is named as one is read at once, and no words of others leak."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import time
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from cli_runs import ringtune
from machine_samples import H100, dense_entry, measured
from profile_samples import RICH, assert_one_line, resealed

from ringattn.errors import InputError, ProfileError
from ringattn.hardware.facts import detect
from ringattn.profile.bounds import BOUNDS, MAX_RANKS, MAX_RING_STEPS, MAX_TEXT
from ringattn.profile.plain_data import to_plain
from ringattn.profile.schema import Choice, PlanEntry, Profile
from ringattn.profile.whole_file import STALE_TEMPORARY_S
from ringattn.profile.yaml_io import dump_profile, load_profile, parse_profile, save_profile
from ringattn.workload import LONGEST, BranchTunables, Pattern, Tunables, Workload

ROOT = Path(__file__).parents[3]


def classes_in(hint: Any) -> Iterator[type]:
    """The dataclasses that a profile is made of."""
    if is_dataclass(hint):
        assert isinstance(hint, type)
        yield hint
        for inner in typing.get_type_hints(hint).values():
            yield from classes_in(inner)
    for inner in typing.get_args(hint):
        yield from classes_in(inner)


def sizes_in(hint: Any) -> bool:
    if typing.get_origin(hint) is tuple or hint in (int, float):
        return True
    return typing.get_origin(hint) is not tuple and any(sizes_in(inner) for inner in typing.get_args(hint))


def test_every_number_and_list_in_a_profile_has_a_bound() -> None:
    without_own = {"Branch"}  # a pattern checks its branches
    for cls in {cls for cls in classes_in(Profile) if cls.__name__ not in without_own}:
        hints = typing.get_type_hints(cls)
        sized = {field.name for field in fields(cls) if sizes_in(hints[field.name])}
        own = {"dropout"} if cls is Workload else set()  # a workload checks it itself, see below
        assert sized == set(BOUNDS.get(cls, {})) | own, cls


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (
            ("plans", 0, "workload", "world"),
            1_000_000_000,
            r"plans\[0\].workload.world: is 1000000000; it must be an integer >= 1 and <= 1024",
        ),
        (
            ("plans", 0, "workload", "heads"),
            2**40,
            r"workload.heads: is 1099511627776; it must be an integer >= 1 and <= 65536",
        ),
        (("plans", 0, "workload", "batch"), 2**62, "workload.batch: is"),
        (("plans", 0, "workload", "seq_len"), 2**41, "workload.seq_len: is"),
        (("plans", 0, "choice", "evidence", "median_ms"), 1e300, r"evidence.median_ms: is 1e\+300; 1000000000000000"),
        (("plans", 0, "choice", "tunables", "head_groups"), 2**62, "head_groups: is"),
        (("fingerprint", "isa"), ["x"] * 1025, "fingerprint.isa: is 1025 entries; 1024 is the most"),
        (("fingerprint", "device_name"), "x" * (MAX_TEXT + 1), "device_name: is text of 4097 characters; 4096 is the"),
        (("software",), {f"p{n}": "1" for n in range(257)}, "software: is 257 entries; 256 is the most"),
        (("provenance", "seed"), -(2**63), "seed: is an integer of more than 64 bits"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_what_is_above_its_bound_is_refused(place: tuple[Any, ...], value: Any, told: str) -> None:
    plain = to_plain(RICH)
    parent: Any = plain
    for step in place[:-1]:
        parent = parent[step]
    parent[place[-1]] = value
    with pytest.raises(ProfileError, match=told) as caught:
        parse_profile(resealed(plain), "p.yaml")
    assert_one_line(caught.value, "p.yaml")


def test_a_pattern_of_many_branches_is_refused() -> None:
    plain = to_plain(RICH)
    plain["plans"][0]["workload"]["pattern"] = {"segment_lengths": [64] * 65, "dilation_rates": [1] * 65}
    with pytest.raises(ProfileError, match=r"pattern.segment_lengths: has 65 entries; 64 is the most"):
        parse_profile(resealed(plain), "p.yaml")


ONE = dense_entry().workload


@pytest.mark.parametrize("name", sorted(BOUNDS[Workload]))
def test_what_can_be_asked_can_be_written(name: str) -> None:
    """A probe of more heads than a profile may hold found that out when it wrote, after it had measured."""
    sizes = {"heads": 1, "kv_heads": 1, "batch": 1, "seq_len": 1, "world": 1}
    most = BOUNDS[Workload][name]
    sizes |= {"heads": most} if name == "kv_heads" else {"batch": most} if name == "packed_tokens" else {}
    largest = replace(ONE, **sizes | {name: most})
    profile = measured(H100, PlanEntry(largest, refusal="nothing fits"))
    assert parse_profile(dump_profile(profile), "p.yaml") == profile
    with pytest.raises(InputError, match=f"{name} is {most + 1}; .*<= {most}"):
        replace(largest, **{name: most + 1})


def test_dropout_is_a_probability_below_one() -> None:
    profile = measured(H100, PlanEntry(replace(ONE, mode="train", dropout=0.999), refusal="nothing drops"))
    assert parse_profile(dump_profile(profile), "p.yaml") == profile
    with pytest.raises(InputError, match=r"dropout is 1\.0; it must be in \[0, 1\)"):
        replace(ONE, dropout=1.0)


def test_a_pattern_that_can_be_asked_for_can_be_written() -> None:
    most = BOUNDS[Pattern]["branches"]
    assert BOUNDS[Tunables]["branches"] == most
    pattern = Pattern.of([LONGEST] * most, [LONGEST] * most)
    profile = measured(H100, PlanEntry(replace(ONE, pattern=pattern), refusal="nothing fits"))
    assert parse_profile(dump_profile(profile), "p.yaml") == profile
    for more in (lambda: Pattern.of([64] * (most + 1), [1] * (most + 1)), lambda: Pattern.of([LONGEST + 1], [1])):
        with pytest.raises(InputError):
            more()


def ring_entry(world: int, seq_len: int) -> PlanEntry:
    workload = Workload("infer", True, seq_len, 2, 8, "fp32", world=world)
    plan = Tunables("fp32", (BranchTunables("math"),), schedule="ring", layout="zigzag")
    return PlanEntry(workload, Choice(plan))


def test_rows_of_many_ranks_are_counted_together() -> None:
    fitting = MAX_RING_STEPS // MAX_RANKS**2
    rows = [ring_entry(MAX_RANKS, 16 + number) for number in range(fitting + 1)]
    assert dump_profile(measured(H100, *rows[:-1]))
    with pytest.raises(ProfileError, match=r"plans: needs 34603008 ring steps .*; 33554432 is the most"):
        dump_profile(measured(H100, *rows))


SMALL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
from autotune.__main__ import main
sys.argv = ["ringtune", "validate", "--here", "--device", "cpu", sys.argv[1]]
main()
"""


def test_a_small_file_of_a_billion_ranks_is_refused_at_once(tmp_path: Path) -> None:
    """It took 3 GB for 20,000,000 ranks, and for a billion whatever there was."""
    profile = to_plain(measured(detect("cpu"), ring_entry(MAX_RANKS, 16)))
    profile["plans"][0]["workload"]["world"] = 1_000_000_000
    file = tmp_path / "p.yaml"
    file.write_text(resealed(profile))
    assert file.stat().st_size < 2048
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = subprocess.run([sys.executable, "-c", SMALL, str(file)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done
    assert done.stderr == (
        f"Error: {file}: plans[0].workload.world: is 1000000000; it must be an integer >= 1 and <= 1024\n"
    )
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss - used < 2**20  # KiB, beyond what torch takes


# --- files that were meant for something else -------------------------------------------------------------------

SECRET = "correct-horse-battery"
FOREIGN = {
    "a password": SECRET,
    "a password in quotes": f'"{SECRET}"',
    "lines": f"{SECRET}\n{SECRET}\n",
    "an /etc/shadow": f"root:{SECRET}:19000:0:99999:7:::\n",
    "a key twice": f"{SECRET}: 1\n{SECRET}: 2\n",
    "a date": "2026-11-27",
    "no number": "0b_",
    "an environment": f"TOKEN={SECRET}\n",
    "settings": f"token: {SECRET}\n",
    "another schema": f"schema: {SECRET}\n",
    "a list": f"- {SECRET}\n",
    "an anchor": f"&{SECRET} x",
    "an alias": f"*{SECRET}",
    "a tag": f"!{SECRET} x",
    "a directive": f"%{SECRET}\n---\nx",
    "no YAML": f"[{SECRET}: }}",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_the_words_of_a_file_that_is_no_profile_are_not_shown(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.yaml").write_text(content)
    with pytest.raises(ProfileError) as caught:
        load_profile(tmp_path / "p.yaml")
    assert_one_line(caught.value, str(tmp_path / "p.yaml"))
    shown = str(caught.value).removeprefix(str(tmp_path))
    assert not any(word in shown for word in (SECRET, "root", "TOKEN", "token", "2026", "0b"))


def test_a_profiles_own_words_are() -> None:
    with pytest.raises(ProfileError, match="line 3: key 'source' appears twice"):
        parse_profile("schema: 1\nsource: measured\nsource: x\n", "p.yaml")


def test_what_the_kernel_makes_up_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/kmsg waits for the next message; a read takes it from whoever collects them."""
    monkeypatch.setattr(os, "fdopen", None)
    with pytest.raises(ProfileError, match="the file is empty"):
        load_profile("/proc/self/environ")


@pytest.mark.parametrize("command", ["validate", "show", "report", "verify"])
def test_no_command_waits_for_a_pipe(tmp_path: Path, command: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = ringtune(command, tmp_path / "pipe")
    assert result.exit_code == 1
    assert "not a regular file" in result.stderr
    assert len(result.stderr.splitlines()) == 1


# --- writing ----------------------------------------------------------------------------------------------------


def test_places_that_lead_nowhere_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    for path, told in (
        (tmp_path / "one", "Too many levels of symbolic links"),
        (tmp_path / "one" / "p.yaml", "Too many levels of symbolic links"),
        ("nul\0l.yaml", "its name holds a NUL"),
        (tmp_path / "nul\0l" / "p.yaml", "its name holds a NUL"),
    ):
        with pytest.raises(ProfileError, match=f"cannot be written: {told}") as caught:
            save_profile(RICH, path)
        assert str(caught.value).isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, "tests/support/ringattn")
from profile_samples import RICH
from ringattn.profile.yaml_io import save_profile
Path.replace = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)
save_profile(RICH, sys.argv[1])
"""


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "p.yaml"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(target)], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    foreign = [tmp_path / name for name in (".p.yaml.swp", ".other.yaml.0123456789ab.tmp", ".p.yaml.0123456789xy.tmp")]
    long_ago = time.time() - 2 * STALE_TEMPORARY_S
    for path in foreign:
        path.touch()
        os.utime(path, (long_ago, long_ago))
    save_profile(RICH, target)
    assert left.exists()  # it may be another writer's, at work
    os.utime(left, (long_ago, long_ago))
    save_profile(RICH, target)
    assert sorted(tmp_path.iterdir()) == sorted([target, *foreign])
    assert stat.S_ISREG(target.lstat().st_mode)
