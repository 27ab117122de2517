"""``ringtune explain`` for several ranks, and for a profile that was measured on another kind of machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from cli_runs import explained, ringtune
from pool import Pool
from report_samples import evidence, gpu_profile

from autotune.report.explain import facts_of
from ringattn import RingAttention
from ringattn.hardware.facts import detect
from ringattn.profile.schema import Choice, Fingerprint, PlanEntry, Profile
from ringattn.profile.yaml_io import load_profile, save_profile
from ringattn.workload import BranchTunables, Tunables, Workload

ROOT = Path(__file__).parents[3]
FOUR_H100S = ROOT / "profiles" / "nvidia-h100-sxm-80g-x4.yaml"
SHAPE = ("--device", "cpu", "--heads", "2", "--head-dim", "16", "--seq-len", "64")
OVER_TWO = Tunables(
    "fp32",
    (BranchTunables("flash-cpu", "flash-cpu"),),
    checkpoint="none",
    schedule="ulysses",
    layout="contiguous",
)


@pytest.fixture
def over_two(tmp_path: Path) -> Path:
    """A profile of this machine for two ranks, in a layout that is not the module's own."""
    facts = detect("cpu")
    workload = Workload("train", True, 64, 2, 16, "fp32", world=2)
    entry = PlanEntry(workload, Choice(OVER_TWO, evidence(2.0, 0.8, 4)))
    path = tmp_path / "two.yaml"
    save_profile(Profile("measured", Fingerprint.of(facts), facts.software, plans=(entry,)), path)
    return path


def _planned(path: str) -> Tunables:
    module = RingAttention(2, 16, causal=True, profile=path, device="cpu", process_group=dist.group.WORLD)
    return module.plan_for(64, "fp32", True).tunables


def test_it_says_what_the_module_runs_over_ranks(over_two: Path) -> None:
    said = explained(over_two, *SHAPE, "--nproc", "2")
    assert said["workload"]["world"] == 2
    assert said["origin"] == "profile"
    assert said["evidence"]["median_ms"] == 2.0
    pool = Pool(2)
    try:
        for tunables in pool.run(_planned, str(over_two)):
            assert tunables == OVER_TWO
            for name in ("schedule", "layout", "checkpoint", "ulysses", "head_groups", "dtype"):
                assert said["tunables"][name] == getattr(tunables, name)
    finally:
        pool.stop()


def test_a_profile_for_other_numbers_of_ranks_says_which(over_two: Path) -> None:
    said = explained(over_two, *SHAPE)
    assert "number of ranks), its plans are for --nproc 2; the heuristic decides" in said["why"]


def test_without_a_profile_the_ring_is_the_heuristics() -> None:
    said = explained(*SHAPE, "--nproc", "2")
    assert (said["tunables"]["schedule"], said["tunables"]["layout"]) == ("ring", "zigzag")
    assert "schedule" in explained(*SHAPE)["tunables"]


def test_every_gpu_of_a_cpu_is_a_usage_error() -> None:
    for command in (("explain", *SHAPE), ("which", "--device", "cpu")):
        result = ringtune(*command, "--nproc", "gpu")
        assert result.exit_code == 2
        assert "is no GPU; give a number of ranks" in result.stderr


def test_which_names_the_profile_that_so_many_ranks_use(
    over_two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with plans for that number goes before one without."""
    home = tmp_path / "home" / "ringtune"
    home.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home.parent))
    two = load_profile(over_two)
    save_profile(two, home / "two.yaml")
    (entry,) = two.plans
    alone = PlanEntry(
        Workload("train", True, 64, 2, 16, "fp32"), Choice(Tunables("fp32", (BranchTunables("math", "math"),)))
    )
    save_profile(Profile("measured", two.fingerprint, two.software, plans=(alone,)), home / "alone.yaml")
    for ranks, name in (("1", "alone.yaml"), ("2", "two.yaml")):
        result = ringtune("which", "--device", "cpu", "--nproc", ranks, "--path-only")
        assert (result.exit_code, result.stdout) == (0, f"{home / name}\n")
    result = ringtune("which", "--device", "cpu", "--nproc", "3")
    assert result.exit_code == 4
    nothing = "holds no plans for 3 ranks, which a heuristic serves; `ringtune probe --nproc 3` adds them."
    assert result.stderr == f"{home / 'alone.yaml'}: {nothing}\n"
    first, tier, *trace = result.stdout.splitlines()  # what serves, as the exit code says
    assert Path(first).name.startswith("heuristic-cpu")
    assert tier == "tier: heuristic (no plan was measured for 3 ranks; kernels are chosen by rule)"
    assert [line for line in trace if ": taken" in line] == [
        f"  {first} (shipped): taken for what no plan covers; tier heuristic"
    ]
    lacking = [line for line in trace if str(home) in line]
    assert len(lacking) == 2
    assert all(": not taken, it holds no plans for 3 ranks; tier " in line for line in lacking)
    runs = explained(*SHAPE, "--nproc", "3")  # by the setup of a module over so many ranks
    assert runs["origin"] == "heuristic"
    assert [line.strip() for line in trace] == runs["trace"][: len(trace)]
    said = json.loads(ringtune("which", "--device", "cpu", "--nproc", "3", "--json").stdout)
    assert (said["path"], said["tier"]) == (first, "heuristic")
    assert ringtune("which", "--device", "cpu", "--nproc", "3", "--path-only").stdout == ""


# --- of another machine -----------------------------------------------------------------------------------------


def test_a_profile_of_another_machine_is_explained_and_said_to_be_one() -> None:
    shape = ("--device", "cpu", "--heads", "32", "--head-dim", "128", "--seq-len", "16384")
    profile = load_profile(FOUR_H100S)
    entry = next(e for e in profile.plans if (e.workload.mode, e.workload.seq_len) == ("train", 16384))
    assert entry.choice is not None
    said = explained(FOUR_H100S, *shape, "--nproc", "4")
    assert said["foreign"] == "made for vendor nvidia, and this device's is cpu"
    assert said["device_name"] == profile.fingerprint.device_name
    assert (said["origin"], said["gave_way"]) == ("profile", "")
    assert said["tunables"]["schedule"] == entry.choice.tunables.schedule
    assert said["evidence"]["median_ms"] == entry.choice.evidence.median_ms  # type: ignore[union-attr]
    assert not any("tier exact" in line for line in said["trace"])
    assert explained(FOUR_H100S, *shape, "--nproc", "gpu") == said  # as many as that machine has
    text = " ".join(ringtune("explain", FOUR_H100S, *shape, "--nproc", "4").stdout.split())
    assert "the profile would not be used on this machine: it was made for vendor nvidia" in text


def test_kernels_that_a_foreign_profile_names_were_there(tmp_path: Path) -> None:
    """Also those of packages that it does not list."""
    path = tmp_path / "gpu.yaml"
    save_profile(gpu_profile(), path)
    profile = load_profile(path)
    assert "flash_attn.cute" in facts_of(profile).packages
    entry = profile.plans[0]
    w = entry.workload
    said = explained(
        path,
        *("--device", "cpu", "--mode", w.mode, "--heads", str(w.heads), "--head-dim", str(w.head_dim)),
        *("--seq-len", str(w.seq_len), "--kv-heads", str(w.kv_heads), "--dtype", w.dtype),
    )
    assert said["origin"] == "profile"


def test_a_rule_for_another_machine_stays_an_error() -> None:
    """It has no machine on which it could be explained."""
    result = ringtune("explain", ROOT / "profiles" / "heuristic-sm_90.yaml", "--device", "cpu")
    assert result.exit_code == 1
    assert "does not fit this machine" in result.stderr
    assert "profile=" not in result.stderr, "that is for Python"
