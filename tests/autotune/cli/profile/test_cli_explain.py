"""``ringtune explain``: the plan, its evidence, and a reason for every kernel that is not in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_runs import explained, measured_entry, profile_of_this_machine, ringtune

from ringattn.profile.schema import Choice, PlanEntry
from ringattn.profile.yaml_io import save_profile

SHAPE = ("--device", "cpu", "--heads", "4", "--head-dim", "32")


def test_explain_says_what_the_module_will_run(at_home: Path) -> None:
    import torch

    from ringattn import RingAttention

    attn = RingAttention(4, 32, causal=True, device="cpu")
    for seq_len in (1, 400, 512, 700, 5000):
        for mode in ("train", "infer"):
            said = explained(*SHAPE, "--seq-len", str(seq_len), "--mode", mode)
            runs = attn.plan_for(seq_len, torch.float32, mode == "train").tunables
            assert [(b["forward"], b["backward"], b["gather"]) for b in said["tunables"]["branches"]] == [
                (b.forward, b.backward, b.gather) for b in runs.branches
            ]
            assert said["tunables"]["dtype"] == runs.dtype


def test_explain_names_the_row_its_evidence_and_its_failures(at_home: Path) -> None:
    said = explained(*SHAPE, "--seq-len", "600")
    assert (said["bucket"], said["origin"], said["tier"], said["path"]) == (512, "profile", "exact", str(at_home))
    assert said["evidence"]["median_ms"] == 2.0
    assert said["failures"] == [{"candidate": "math/math fp32", "kind": "oom", "message": "needs 3 GiB"}]
    text = "".join(ringtune("explain", *SHAPE, "--seq-len", "600").stdout.split())  # lines are as wide as paths allow
    for part in ("math/flash-cpu fp32", "1.25x", "nearest measured length is 512", "needs 3 GiB", "this-machine.yaml"):
        assert part.replace(" ", "") in text


def test_it_names_the_probe_that_measures_what_no_plan_was_measured_for(at_home: Path) -> None:
    shape = ("--device", "cpu", "--heads", "3", "--head-dim", "48", "--dtype", "fp32")
    said = explained(*shape, "--seq-len", "3000", "--mode", "infer", "--batch-size", "2")
    assert said["remedy"] == (
        "`ringtune probe --heads 3 --head-dim 48 --causal --dense --mode infer --precision fp32 --seq-len 3000 "
        "--batch-size 2` measures it"
    )
    assert explained(*SHAPE, "--seq-len", "600")["remedy"] == ""


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_without_a_shape_it_explains_a_row_of_the_default_grid(mode: str) -> None:
    """So that what a newcomer has just measured is what the bare command explains."""
    from autotune.probe.request import ProbeRequest, usual_shape
    from autotune.probe.workloads.grid import cells_for
    from ringattn.hardware.facts import HardwareFacts

    workload = explained("--device", "cpu", "--mode", mode)["workload"]
    asked = tuple(workload[name] for name in ("seq_len", "heads", "head_dim"))
    assert asked == usual_shape("cpu")
    gpu = HardwareFacts("nvidia", "H100", "h100-sxm", "sm_90", 132, 81559, 50)
    cpu = HardwareFacts("cpu", "Invented", "invented", "x86_64", 4, 16384, 32, threads=4)
    for facts in (cpu, gpu):
        for effort in ("quick", "standard", "full"):
            cells = [cell.workload for cell in cells_for(ProbeRequest(effort=effort), facts)]
            assert usual_shape(facts.vendor) in {(w.seq_len, w.heads, w.head_dim) for w in cells if w.mode == mode}


def test_it_says_what_the_words_of_its_plans_mean(at_home: Path) -> None:
    from autotune.report.wording.legend import KERNEL_MEANINGS, legend

    said = explained(*SHAPE, "--seq-len", "600")
    assert ["math", KERNEL_MEANINGS["math"]] in said["legend"]
    assert not any(words == "cudnn" for words, _ in said["legend"]), "it is in no plan that is shown"
    text = ringtune("explain", *SHAPE, "--seq-len", "600").stdout
    shown = ringtune("show", at_home).stdout
    entry = measured_entry()
    assert entry.choice is not None
    for told in (text, shown):
        assert "Words of the plans" in told
        squeezed = "".join(told.split())
        assert all("".join(meaning.split()) in squeezed for _, meaning in legend([entry.choice.tunables]))


def test_no_path_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However narrow the terminal."""
    folder = tmp_path / ("long" * 20)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    path = folder / "ringtune" / "this-machine.yaml"
    save_profile(profile_of_this_machine(measured_entry()), path)
    for arguments in (("explain", *SHAPE, "--seq-len", "600"), ("doctor",), ("which",)):
        told = "".join(ringtune(*arguments).stdout.split())
        assert str(path) in told, arguments


def test_explain_gives_a_reason_for_every_kernel_that_is_not_in_the_plan(at_home: Path) -> None:
    from ringattn.kernels.registry import KERNELS

    said = explained(*SHAPE, "--seq-len", "512")
    told = {(v["kernel"], d) for v in said["kernels"] for d in directions_of(v)}
    used = {(b[d], d) for b in said["tunables"]["branches"] for d in ("forward", "backward")}
    assert told | used == {(name, d) for name in KERNELS for d in ("forward", "backward")}
    assert not told & used
    for verdict in said["kernels"]:
        assert verdict["reasons"] or verdict["evidence"]
    cudnn = next(v for v in said["kernels"] if v["kernel"] == "cudnn")
    assert cudnn["reasons"] == ["runs on NVIDIA GPUs only"]
    rival = next(v for v in said["kernels"] if v["kernel"] == "flash-cpu")
    assert "1.25x the time of the chosen plan" in rival["evidence"]


def directions_of(verdict: dict[str, Any]) -> tuple[str, ...]:
    return ("forward", "backward") if verdict["direction"] == "both" else (verdict["direction"],)


def test_explain_says_why_the_heuristic_decides(at_home: Path) -> None:
    assert "this length is outside" in explained(*SHAPE, "--seq-len", "100000")["why"]
    for other, name in (
        (("--no-causal",), "causal"),
        (("--mode", "decode"), "mode"),
        (("--head-dim", "48"), "head_dim"),
    ):
        why = explained(*SHAPE, "--seq-len", "512", *other)["why"]
        assert f"measured nothing of this kind (its nearest rows differ in {name}); the heuristic" in why
    at_home.unlink()
    assert "no measured profile serves this machine" in explained(*SHAPE, "--seq-len", "512")["why"]


def test_explain_says_of_a_cell_that_could_not_be_measured_just_that(at_home: Path) -> None:
    entry = measured_entry()
    assert entry.choice is not None
    unmeasured = PlanEntry(entry.workload, Choice(entry.choice.tunables), failures=entry.failures)
    save_profile(profile_of_this_machine(unmeasured), at_home)
    said = explained(*SHAPE, "--seq-len", "600")
    assert said["origin"] == "profile, not measured"
    assert said["why"] == "the nearest length of the profile is 512; this cell could not be measured, its default stays"
    known = {v["kernel"]: v["evidence"] for v in said["kernels"] if v["evidence"]}
    assert known["flash-cpu"] == "could run; not measured here"
    assert not any("slower when measured" in text for text in known.values())


def test_explain_says_first_that_the_row_is_for_other_heads(at_home: Path) -> None:
    asked = ("--device", "cpu", "--head-dim", "32", "--seq-len", "512", "--heads", "8", "--kv-heads", "2")
    told = "the row is for 4 query and 4 key/value heads, the nearest in the profile to 8 query and 2 key/value heads"
    assert explained(at_home, *asked)["other_heads"] == told
    lines = ringtune("explain", at_home, *asked).stdout.splitlines()
    assert lines[0].startswith("Workload")
    assert lines[1].startswith("Other heads")
    beyond = (*asked[:5], "100000", *asked[6:])  # served by the heuristic, which has no heads of its own
    for same in ((*SHAPE, "--seq-len", "512"), beyond):
        assert explained(at_home, *same)["other_heads"] == ""
        assert "Other heads" not in ringtune("explain", at_home, *same).stdout


def test_explain_takes_a_profile(at_home: Path) -> None:
    assert explained(at_home, *SHAPE, "--seq-len", "512")["path"] == str(at_home)


def test_explain_covers_dilated_patterns(at_home: Path) -> None:
    said = explained(*SHAPE, "--segment-lengths", "64,128", "--dilation-rates", "1,2", "--seq-len", "256")
    assert len(said["tunables"]["branches"]) == 2
