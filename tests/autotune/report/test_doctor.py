"""The diagnosis: every kernel once, right numbers or a reason, and no kernel that can take the others down."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli.doctor import ranks_text
from autotune.cli.main import cli
from autotune.report import doctor
from autotune.report.doctor import Diagnosis, Trial, TrialResult, diagnose, run_trials
from autotune.report.kernel_check import check
from ringattn.hardware.facts import HardwareFacts
from ringattn.kernels.registry import KERNELS
from ringattn.profile.schema import LinkSpeed
from ringattn.profile.yaml_io import save_profile

CPU = HardwareFacts("cpu", "a CPU", "cpu", "x86_64", 2, 8192, 32)
H100 = HardwareFacts("nvidia", "NVIDIA H100", "h100-sxm", "sm_90", 132, 81559, 50)
PASCAL = replace(H100, device_name="GTX 1080", sku="gtx-1080", arch="sm_61")


def all_work(trials: Sequence[Trial]) -> dict[str, TrialResult]:
    return {t.kernel: TrialResult(out=1e-6, grads=1e-6 if t.backward else None) for t in trials}


def by_name(facts: HardwareFacts, **results: TrialResult) -> dict[str, Diagnosis]:
    found = diagnose(facts, lambda trials: all_work(trials) | {k.replace("_", "-"): r for k, r in results.items()})
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
    broken = TrialResult(error="ImportError: undefined symbol")
    found = by_name(replace(H100, packages=("flash_attn",)), flash_attn_2=broken)
    assert found["flash-attn-2"].state == "broken"
    assert found["flash-attn-2"].detail == "ImportError: undefined symbol"
    assert found["flash-attn-2"].remedy
    assert found["cudnn"].state == "works"


@pytest.mark.parametrize(
    "result",
    [
        TrialResult(out=0.5),
        TrialResult(out=math.nan),
        TrialResult(out=0.0, grads=math.nan),
        TrialResult(out=0.0, grads=9.0),
    ],
)
def test_wrong_numbers_are_not_called_working(result: TrialResult) -> None:
    assert by_name(CPU, math=result)["math"].state == "wrong"


def test_xformers_is_said_to_be_torchs_own_kernels() -> None:
    assert "torch's own" in by_name(H100)["xformers"].note


def test_kernels_of_a_cpu_really_run() -> None:
    results = run_trials((Trial("flash-cpu", "bf16", True), Trial("math", "fp32", True)), "cpu")
    assert set(results) == {"flash-cpu", "math"}
    assert all(result.error == "" for result in results.values())
    assert 1e-4 < results["flash-cpu"].out < 2e-2
    assert results["math"].grads is not None
    assert results["math"].grads < 1e-5


def test_a_check_sees_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringattn.kernels import registry as kernels
    from ringattn.kernels.registry import BoundKernel

    right = KERNELS["math"]

    def load(config: object) -> BoundKernel:
        bound = right.load(config)  # type: ignore[arg-type]
        return BoundKernel(lambda q, k, v: (bound.forward(q, k, v)[0] * 1.5, bound.forward(q, k, v)[1]), bound.backward)

    monkeypatch.setattr(kernels, "KERNELS", {**KERNELS, "math": replace(right, load=load)})
    assert check("math", "fp32", False, "cpu")["out"] == pytest.approx(0.5, rel=1e-3)


CHILD = """
import json, os, signal, sys, time
for text in sys.argv[2:]:
    name = text.split(":")[0]
    print("a library says hello")
    print(json.dumps({"begin": name}), flush=True)
    if name == "crash":
        print("it hurts", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGFPE)
    if name == "exit":
        os._exit(3)
    if name == "hang":
        time.sleep(60)
    print(json.dumps({"end": name, "error": "", "out": 0.0, "grads": None}), flush=True)
"""


def test_a_kernel_that_kills_or_hangs_its_process_loses_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(doctor, "CHECK_COMMAND", (sys.executable, str(script)))
    names = ("one", "crash", "two", "exit", "hang", "three")
    results = run_trials([Trial(name, "fp32", True) for name in names], "cpu", timeout_s=2.0)
    assert set(results) == set(names)
    assert [name for name in names if not results[name].error] == ["one", "two", "three"]
    assert results["crash"].error == "its process died of SIGFPE: it hurts"
    assert results["exit"].error == "its process ended with exit code 3"
    assert results["hang"].error == "did not end in 2 s"


def test_a_child_that_never_starts_is_reported_for_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECK_COMMAND", (sys.executable, "-c", "raise SystemExit('no torch')"))
    results = run_trials([Trial("a", "fp32", True), Trial("b", "fp32", True)], "cpu")
    assert {name: r.error for name, r in results.items()} == dict.fromkeys(
        ("a", "b"), "its process ended with exit code 1: no torch"
    )


def test_the_command_shows_machine_kernels_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "ringtune").mkdir()
    (tmp_path / "ringtune" / "broken.yaml").write_text("schema: [")
    result = CliRunner().invoke(cli, ["doctor", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    for part in ("torch", "flash-cpu", "works", "needs an NVIDIA GPU", "broken.yaml", "heuristic-cpu.yaml", "In use"):
        assert part in result.stdout


def test_the_document_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "run_trials", lambda trials, device: all_work(trials))
    result = CliRunner().invoke(cli, ["doctor", "--device", "cpu", "--json"])
    document = json.loads(result.stdout)
    assert document["facts"]["vendor"] == "cpu"
    assert document["ranks"] == {"count": 1, "link": "", "link_speeds": []}
    assert {k["kernel"] for k in document["kernels"]} == set(KERNELS)
    assert [place["origin"] for place in document["search_path"]][-1] == "shipped"
    assert document["resolution"]["tier"] == "heuristic"


def test_wrong_numbers_and_no_working_kernel_are_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for result in (TrialResult(out=0.5), TrialResult(error="ImportError: x")):
        monkeypatch.setattr(doctor, "run_trials", lambda trials, device, r=result: {t.kernel: r for t in trials})
        assert CliRunner().invoke(cli, ["doctor", "--device", "cpu"]).exit_code == 1


def test_a_named_profile_that_cannot_be_read_is_part_of_the_diagnosis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "run_trials", lambda trials, device: all_work(trials))
    monkeypatch.setenv("RINGTUNE_PROFILE", str(tmp_path / "gone.yaml"))
    result = CliRunner().invoke(cli, ["doctor", "--device", "cpu"])
    assert result.exit_code == 0
    assert "gone.yaml" in result.stdout.replace("\n", "")  # which wraps where the folder's name is long


def test_a_readable_profile_is_listed_by_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from report_samples import cpu_profile

    monkeypatch.setattr(doctor, "run_trials", lambda trials, device: all_work(trials))
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
