"""The diagnosis: every kernel once, right numbers or a reason, and no kernel that can take the others down."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli.machine.doctor import ranks_text
from autotune.cli.main import cli
from autotune.report.doctor import Diagnosis, attempts_for, diagnose
from autotune.report.numerics import numerics_sweep
from autotune.report.numerics.numerics_map import Attempt
from autotune.report.numerics.numerics_sweep import sweep
from ringattn.hardware.facts import HardwareFacts
from ringattn.hardware.kernel_faults import Figure, Verdict
from ringattn.kernels.registry import KERNELS
from ringattn.profile.schema import LinkSpeed
from ringattn.profile.yaml_io import save_profile

CPU = HardwareFacts("cpu", "a CPU", "cpu", "x86_64", 2, 8192, 32)
H100 = HardwareFacts("nvidia", "NVIDIA H100", "h100-sxm", "sm_90", 132, 81559, 50)
PASCAL = replace(H100, device_name="GTX 1080", sku="gtx-1080", arch="sm_61")


def verdict(error: float, *names: str) -> Verdict:
    return Verdict(tuple(Figure(name, error, 0.03) for name in names))


def all_work(asked: Sequence[Attempt]) -> dict[Attempt, Verdict]:
    return {a: verdict(1e-6, *(("dq", "dk", "dv") if a.backward else ("out", "lse"))) for a in asked}


def by_name(facts: HardwareFacts, **verdicts: Verdict) -> dict[str, Diagnosis]:
    def run(asked: Sequence[Attempt]) -> dict[Attempt, Verdict]:
        given = {a: verdicts[a.kernel.replace("-", "_")] for a in asked if a.kernel.replace("-", "_") in verdicts}
        return all_work(asked) | given

    found = diagnose(facts, run)
    assert [d.kernel for d in found] == list(KERNELS)
    return {d.kernel: d for d in found}


def test_what_cannot_run_has_a_reason_and_a_remedy() -> None:
    for facts in (CPU, H100, PASCAL):
        for diagnosis in by_name(facts).values():
            assert diagnosis.detail
            assert diagnosis.state in ("works", "unavailable")
            assert diagnosis.remedy or diagnosis.state == "works"


def test_remedies_follow_from_the_checks_of_the_kernels() -> None:
    on_cpu, on_h100, on_pascal = by_name(CPU), by_name(H100), by_name(PASCAL)
    assert on_cpu["cudnn"].remedy == "needs an NVIDIA GPU of sm_80 or newer"
    assert "sm_90" in on_cpu["flash-attn-3"].remedy
    assert "; then: " in on_cpu["flash-attn-2"].remedy
    assert on_h100["flash-cpu"].remedy == "use --device cpu"
    assert "flash-attn >= 2.8" in on_h100["flash-attn-2"].remedy
    assert "not installed" in on_h100["flash-attn-2"].detail
    assert on_pascal["flash"].remedy == "needs an NVIDIA GPU of sm_80 or newer"


def test_an_installed_package_is_tried() -> None:
    with_package = replace(H100, packages=("flash_attn",))
    assert by_name(with_package)["flash-attn-2"].state == "works"


def test_a_broken_package_is_reported_and_the_rest_still_works() -> None:
    broken = Verdict(message="ImportError: undefined symbol")
    found = by_name(replace(H100, packages=("flash_attn",)), flash_attn_2=broken)
    assert found["flash-attn-2"].state == "broken"
    assert found["flash-attn-2"].detail == "ImportError: undefined symbol"
    assert found["flash-attn-2"].remedy
    assert found["cudnn"].state == "works"


@pytest.mark.parametrize("found", [verdict(0.5, "out"), verdict(math.nan, "out"), verdict(9.0, "dq")])
def test_wrong_numbers_are_not_called_working(found: Verdict) -> None:
    assert by_name(CPU, math=found)["math"].state == "wrong"


def test_xformers_is_said_to_be_torchs_own_kernels() -> None:
    assert "torch's own" in by_name(H100)["xformers"].note


def test_kernels_of_a_cpu_really_run() -> None:
    asked = [attempt for name in ("flash-cpu", "math") for attempt in attempts_for(KERNELS[name], CPU)]
    assert [(a.kernel, a.backward) for a in asked] == [(k, b) for k in ("flash-cpu", "math") for b in (False, True)]
    found = sweep(asked, CPU)
    assert set(found) == set(asked)
    assert all(v.passes and v.figures for v in found.values())


def test_the_command_shows_machine_kernels_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "ringtune").mkdir()
    (tmp_path / "ringtune" / "broken.yaml").write_text("schema: [")
    result = CliRunner().invoke(cli, ["doctor", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    for part in ("torch", "flash-cpu", "works", "needs an NVIDIA GPU", "broken.yaml", "heuristic-cpu.yaml", "In use"):
        assert part in result.stdout


def test_the_document_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics_sweep, "sweep", lambda asked, *arguments, **limits: all_work(asked))
    result = CliRunner().invoke(cli, ["doctor", "--device", "cpu", "--json"])
    document = json.loads(result.stdout)
    assert document["facts"]["vendor"] == "cpu"
    assert document["ranks"] == {"count": 1, "link": "", "link_speeds": []}
    assert {k["kernel"] for k in document["kernels"]} == set(KERNELS)
    assert [place["origin"] for place in document["search_path"]][-1] == "shipped"
    assert document["resolution"]["tier"] == "heuristic"


def test_wrong_numbers_and_no_working_kernel_are_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (verdict(0.5, "out"), Verdict(message="ImportError: x")):
        monkeypatch.setattr(numerics_sweep, "sweep", lambda asked, *a, v=found, **limits: dict.fromkeys(asked, v))
        assert CliRunner().invoke(cli, ["doctor", "--device", "cpu"]).exit_code == 1


def test_a_named_profile_that_cannot_be_read_is_part_of_the_diagnosis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numerics_sweep, "sweep", lambda asked, *arguments, **limits: all_work(asked))
    monkeypatch.setenv("RINGTUNE_PROFILE", str(tmp_path / "gone.yaml"))
    result = CliRunner().invoke(cli, ["doctor", "--device", "cpu"])
    assert result.exit_code == 0
    assert "gone.yaml" in result.stdout.replace("\n", "")  # which wraps where the folder's name is long


def test_a_readable_profile_is_listed_by_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from report_samples import cpu_profile

    monkeypatch.setattr(numerics_sweep, "sweep", lambda asked, *arguments, **limits: all_work(asked))
    save_profile(cpu_profile(), tmp_path / "mine.yaml")
    monkeypatch.setenv("RINGTUNE_PROFILE_PATH", str(tmp_path))
    result = CliRunner().invoke(cli, ["doctor", "--device", "cpu"])
    assert "mine.yaml: measured" in result.stdout


@pytest.mark.parametrize(
    ("vendor", "count", "link", "speeds", "told"),
    [
        ("cpu", 1, "", (), "ringtune probe --nproc N"),
        ("nvidia", 1, "pcie", (), "one GPU"),
        ("nvidia", 4, "nv18", (), "4 GPUs, linked by 18 NVLinks each; not measured yet: ringtune probe --nproc gpu"),
        ("nvidia", 2, "pcie", (), "2 GPUs, linked over PCIe; not measured"),
        ("nvidia", 2, "", (), "2 GPUs, linked by links that NVML does not tell"),
        ("nvidia", 4, "nv18", (LinkSpeed(4, 1, 251.5, 21.0),), "; 4 ranks on 1 host: 251.5 GB/s each way, 21 us"),
    ],
)
def test_how_many_ranks_and_what_links_them(
    vendor: str, count: int, link: str, speeds: tuple[LinkSpeed, ...], told: str
) -> None:
    facts = replace(H100, vendor=vendor, device_count=count, link=link)
    assert told in ranks_text(facts, {"count": count, "link": link, "link_speeds": speeds})
