"""One answer out of those of several ranks, and what ranks must have in common: pure rules."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGKILL

import pytest
from machines import FACTS, H100, plan, workload

from autotune.distributed.launcher import TorchrunRank, ranks_wanted, torchrun_rank
from autotune.distributed.merging import agreed_plan, disagreement, first_cause, largest, samples_of
from autotune.exit_codes import UsageFailure
from autotune.measure.evaluator import Checked, Ended, Fault, Killed, PeerFailed, Proven, Sample
from ringattn.hardware.facts import HardwareFacts

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_every_number_is_that_of_the_rank_that_needs_most() -> None:
    fast, lean = Checked(1.0, 2e-3, 500, 9.0, 30.0), Checked(2.0, 1e-3, 100, 3.0, 40.0)
    assert largest([fast, lean]) == Checked(2.0, 2e-3, 500, 9.0, 40.0)
    assert largest([Proven(3.0), Proven(5.0), Proven(4.0)]) == Proven(5.0)
    assert largest([Sample(3.0, 1.0), Sample(2.0, 8.0)]) == Sample(3.0, 8.0)


OOM = Fault("oom", "OutOfMemoryError: tried 3 GiB")
PEER = Fault("error", "rank 2 failed: OutOfMemoryError: tried 3 GiB", PeerFailed())
GONE = Fault("crash", "its worker was ended", Ended())
KILLED = Fault("crash", "the worker was killed", Killed(SIGKILL))


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ([(2, OOM)], Fault("oom", "rank 2: OutOfMemoryError: tried 3 GiB")),
        ([(0, PEER), (2, OOM), (1, PEER)], Fault("oom", "rank 2: OutOfMemoryError: tried 3 GiB")),
        ([(3, OOM), (0, OOM)], Fault("oom", "ranks 0, 3: OutOfMemoryError: tried 3 GiB")),
        ([(1, Fault("crash", "the worker ended")), (0, OOM)], Fault("crash", "rank 1: the worker ended")),
        ([(0, PEER)], replace(PEER, message=f"rank 0: {PEER.message}")),
        ([(0, PEER), (1, GONE)], replace(GONE, message="rank 1: its worker was ended")),
        ([(1, GONE), (0, OOM)], Fault("oom", "rank 0: OutOfMemoryError: tried 3 GiB")),
        ([(1, KILLED), (0, PEER)], replace(KILLED, message="rank 1: the worker was killed")),
        (
            [(0, Fault("error", "PeerError: said a kernel")), (1, OOM)],
            Fault("error", "rank 0: PeerError: said a kernel"),
        ),
    ],
    ids=["one", "cause", "both", "first", "second-hand", "gone", "gone-and-oom", "killed", "words"],
)
def test_the_first_that_failed_by_itself_is_the_cause(faults: list[tuple[int, Fault]], told: Fault) -> None:
    assert first_cause(faults) == told


def test_a_block_holds_what_every_rank_timed() -> None:
    one, two, three = Sample(1.0), Sample(2.0), Sample(3.0)
    assert samples_of([[one, two], [three, one]]) == [three, two]
    assert samples_of([[one, two, OOM], [three, one, two]]) == [three, two]
    assert samples_of([[one], [three, OOM]]) == [three]  # the first was stopped before it could answer
    assert samples_of([[], [one]]) == []


def test_one_plan_or_who_differs() -> None:
    cell = workload(512, mode="infer")
    quick, math = plan(cell, "quick"), plan(cell, "math")
    assert agreed_plan({1: quick, 0: quick}) == quick
    assert agreed_plan({0: quick, 1: quick, 2: math}) == Fault("error", "rank 0 plans quick bf16, rank 2 math bf16")


def _software(facts: HardwareFacts, **versions: str) -> HardwareFacts:
    return replace(facts, software=tuple(sorted({**dict(facts.software), **versions}.items())))


@pytest.mark.parametrize(
    ("there", "told"),
    [
        (H100, ""),
        (replace(H100, memory_mib=H100.memory_mib + 300, power_limit_w=500), ""),
        (_software(H100, torch="2.12.0"), "torch is 2.11.0 on rank 0 and 2.12.0 on rank 1"),
        (_software(H100, triton="3.9"), "triton is "),
        (replace(H100, memory_mib=H100.memory_mib // 2), "memory_mib is "),
        (replace(H100, mig="1g.10gb"), "mig is  on rank 0 and 1g.10gb on rank 1"),
        (FACTS, "vendor is nvidia on rank 0 and cpu on rank 1"),
    ],
)
def test_ranks_are_alike_or_one_line_says_what_is_not(there: HardwareFacts, told: str) -> None:
    said = disagreement([H100, there])
    assert said.startswith(told)
    assert bool(said) is bool(told)
    assert "\n" not in said
    assert disagreement([FACTS] * 4) == ""


# --- where a process stands --------------------------------------------------------------------------------------


def test_torchrun_says_where_a_process_stands() -> None:
    assert torchrun_rank(TORCHRUN) == TorchrunRank(1, 4, 1, "node0", 29500)
    assert torchrun_rank({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}) is None
    assert torchrun_rank({}) is None
    assert torchrun_rank({"WORLD_SIZE": "4"}) is None  # somebody else's variable
    with pytest.raises(UsageFailure, match="RANK is 4 and WORLD_SIZE 4"):
        torchrun_rank({**TORCHRUN, "RANK": "4"})
    with pytest.raises(UsageFailure, match="no number"):
        torchrun_rank({**TORCHRUN, "MASTER_PORT": "any"})


@pytest.mark.parametrize(
    ("nproc", "torchrun", "gpus", "device", "ranks"),
    [
        (None, False, 4, None, 1),
        ("4", False, 4, None, 4),
        ("gpu", False, 4, None, 4),
        ("8", False, 0, None, 8),
        ("8", False, 4, "cpu", 8),
        ("2", False, 4, "cuda", 2),
        ("1", False, 4, "cuda:3", 1),
        (None, True, 4, None, 4),
        (None, True, 4, "cpu", 4),
    ],
)
def test_how_many_ranks(nproc: str | None, torchrun: bool, gpus: int, device: str | None, ranks: int) -> None:
    assert ranks_wanted(nproc, torchrun_rank(TORCHRUN) if torchrun else None, gpus, device) == ranks


@pytest.mark.parametrize(
    ("nproc", "torchrun", "gpus", "device", "told"),
    [
        ("2", True, 4, None, "torchrun started 4 ranks already"),
        ("8", False, 4, None, "--nproc is 8, but torch sees 4 GPUs"),
        ("gpu", False, 0, None, "there is no GPU here"),
        ("gpu", False, 4, "cpu", "there is no GPU here"),
        ("2", False, 4, "cuda:3", "names one device for 2 ranks"),
        (None, True, 4, "cuda:0", "names one device for 4 ranks"),
    ],
)
def test_what_cannot_be_is_said(nproc: str | None, torchrun: bool, gpus: int, device: str | None, told: str) -> None:
    with pytest.raises(UsageFailure, match=told):
        ranks_wanted(nproc, torchrun_rank(TORCHRUN) if torchrun else None, gpus, device)
