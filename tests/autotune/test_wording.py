"""Counts in messages: one of a thing is not several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from machines import workload

from autotune.commands.doctor import ranks_text
from autotune.commands.options import check_pattern
from autotune.exit_codes import ExitCode, ProbeFailure, UsageFailure
from autotune.probe import VALIDATION_PENDING, CellReport
from autotune.ranks.place import ranks_wanted
from autotune.verifying import check_same_silicon, entries_over
from ringattn.errors import InputError
from ringattn.hardware import HardwareFacts
from ringattn.profile import Fingerprint, PlanEntry, Profile
from ringattn.profile_io import load_profile
from ringattn.wording import plural
from ringattn.workload import Pattern, Workload

ROOT = Path(__file__).parents[2]
ONE_GPU = HardwareFacts("nvidia", "H100", "h100-sxm", "sm_90", 1, 81559, 50, device_count=2, link="nv1")
ONE_RANK = Profile(
    "measured", Fingerprint.of(ONE_GPU), plans=(PlanEntry(Workload("infer", True, 64, 1, 8, "bf16"), refusal="none"),)
)


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "cell", "0 cells"),
        (1, "cell", "1 cell"),
        (2, "cell", "2 cells"),
        (1, "entry", "1 entry"),
        (2, "entry", "2 entries"),
        (1, "branch", "1 branch"),
        (3, "branch", "3 branches"),
        (2, "key/value head", "2 key/value heads"),
    ],
)
def test_plural(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text


def test_one_of_a_thing_is_said_as_one() -> None:
    with pytest.raises(UsageFailure, match="torch sees 1 GPU here"):
        ranks_wanted("2", None, 1, "cuda")
    with pytest.raises(ProbeFailure, match="its plans are for 1 rank, not 2; run: ringtune verify without --") as none:
        entries_over(ONE_RANK, 2, Path("one.yaml"))
    assert none.value.exit_code == ExitCode.NO_PROFILE
    with pytest.raises(ProbeFailure, match=r"\(h100-sxm, 1 unit, 81559 MiB\)"):
        check_same_silicon(ONE_RANK, replace(ONE_GPU, sm_count=132), Path("one.yaml"))
    with pytest.raises(InputError, match="segment_lengths has 1 entry and dilation_rates 2"):
        Pattern.of([8], [1, 2])
    with pytest.raises(Exception, match="--segment-lengths has 1 entry and --dilation-rates 2"):
        check_pattern((8,), (1, 2))
    assert "linked by 1 NVLink each" in ranks_text(ONE_GPU, {"count": 2, "link": "nv1", "link_speeds": ()})


def test_what_is_said_of_owed_proofs_is_true_of_one_cell_and_of_several() -> None:
    assert not {"it", "its", "their", "was", "were", "is", "are"} & set(VALIDATION_PENDING.split(" but ")[0].split())


def test_a_report_says_that_validation_is_pending_beside_its_note() -> None:
    report = CellReport(workload(64), "default", note="noisy", validation_pending=True)
    assert report.text == f"noisy; {VALIDATION_PENDING}"
    assert CellReport(workload(64), "default").text == ""


@pytest.mark.parametrize("path", sorted((ROOT / "profiles").glob("*.yaml")), ids=lambda path: path.stem)
def test_notes_of_shipped_profiles_count_right(path: Path) -> None:
    assert not [note for note in load_profile(path).provenance.notes if note.startswith("1 cells")]
