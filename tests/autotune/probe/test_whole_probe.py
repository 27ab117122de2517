"""Whole standard probes of a modelled H100: the twenty causal cells of the grid, one budget, two seeds, one answer."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest
from modelled_h100 import device_ms, eager_ms, modelled_environment

from autotune.measure.simulated import parts_of
from autotune.probe.request import ProbeRequest
from autotune.probe.tuning import run_probe
from autotune.search.budget import EFFORTS
from ringattn.profile.schema import Choice, PlanEntry
from ringattn.profile.yaml_io import dump_profile, parse_profile
from ringattn.workload import Mode, Workload

BUDGET_S = 100.0  # what is left of a standard probe's after its defaults and first calls
AGREED = math.log(1.02)
RECORDED = Path(__file__).parents[2] / "data" / "replayed-probe.yaml.gz"


SLOWNESS = (4.0, 2.5)  # of the hosts of the two probes
_profiles: list[str] = []  # the files that the probes below wrote


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Workload, PlanEntry]]:
    """The rows of two probes with different seeds, one of them beside a slower host."""
    found = []
    _profiles.clear()
    for seed, slowness in enumerate(SLOWNESS, 1):
        folder = tmp_path_factory.mktemp(f"seed-{seed}")
        environment = modelled_environment(folder, seed, slowness)
        request = ProbeRequest(
            output=folder / "h100.yaml", effort="standard", budget_s=BUDGET_S, seed=seed, causal=True
        )
        result = run_probe(request, None, environment)
        assert environment.clock.now() <= 1.1 * BUDGET_S
        assert result.profile is not None
        _profiles.append(dump_profile(result.profile))
        found.append({entry.workload: entry for entry in result.profile.plans})
    return found


def test_every_cell_is_measured(probes: list[dict[Workload, PlanEntry]]) -> None:
    for entries in probes:
        assert len(entries) == 20
        unmeasured = [str(cell) for cell, entry in entries.items() if entry.evidence is None or entry.choice is None]
        assert not unmeasured


def captured(entry: PlanEntry) -> Choice:
    """What a program runs that captures its calls."""
    found = entry.captured or entry.choice
    assert found is not None
    return found


def test_neither_probe_would_be_better_off_with_the_others_choice_in_85_percent_of_the_cells(
    probes: list[dict[Workload, PlanEntry]],
) -> None:
    """Their hosts differ, and with them what is over first in a loop of calls."""
    behind = []
    for number, slowness in enumerate(SLOWNESS):
        for cell, entry in probes[number].items():
            mine, other = entry.choice, probes[1 - number][cell].choice
            assert mine is not None
            assert other is not None
            ratio = eager_ms(cell, mine.tunables, slowness) / eager_ms(cell, other.tunables, slowness)
            if math.log(ratio) > AGREED:
                behind.append(f"{cell}: {ratio:.3f}")
    assert len(behind) <= 0.15 * len(probes[0]), behind


def test_no_choice_is_slower_than_the_default(probes: list[dict[Workload, PlanEntry]]) -> None:
    for entries, slowness in zip(probes, SLOWNESS, strict=True):
        for cell, entry in entries.items():
            assert entry.choice is not None
            assert entry.default is not None
            default = entry.default.tunables
            assert eager_ms(cell, entry.choice.tunables, slowness) <= 1.01 * eager_ms(cell, default, slowness), cell
            if entry.captured is not None:
                assert device_ms(cell, entry.captured.tunables) <= 1.01 * device_ms(cell, default), cell


def test_short_calls_are_replayed_from_graphs_and_captured_ones_are_not(
    probes: list[dict[Workload, PlanEntry]],
) -> None:
    """At 1024 positions the host takes ten times as long as the device; at 65536 it is ahead."""
    for entries in probes:
        for cell, entry in entries.items():
            assert entry.choice is not None
            launch = entry.choice.tunables.launch
            assert launch == "graph" if cell.seq_len == 1024 else launch == "eager" or cell.seq_len < 65536, cell
            assert launch == "eager" or entry.captured is not None


def test_the_kernel_that_is_fastest_alone_is_found_at_every_long_dense_length(
    probes: list[dict[Workload, PlanEntry]],
) -> None:
    """It takes its host three times as long as the default's, which at 1024 positions says nothing of the others."""
    for entries in probes:
        for cell, entry in entries.items():
            if cell.pattern.dense and cell.seq_len >= 16384:
                assert entry.choice is not None
                assert captured(entry).tunables.branches[0].forward == "flash-attn-4", cell


def test_a_replayed_probe_writes_the_recorded_profile(probes: list[dict[Workload, PlanEntry]]) -> None:
    """The plans of the file, for one seed, or some as fast: the surrogate's last bits are those of the processor's."""
    recorded = parse_profile(gzip.decompress(RECORDED.read_bytes()).decode(), "recorded")
    assert [entry.workload for entry in recorded.plans] == list(probes[0])
    apart = []
    for entry in recorded.plans:
        one, other = entry.choice, probes[0][entry.workload].choice
        assert one is not None
        assert other is not None
        if one.tunables != other.tunables:
            ratio = device_ms(entry.workload, one.tunables) / device_ms(entry.workload, other.tunables)
            if abs(math.log(ratio)) > AGREED:
                apart.append(f"{entry.workload}: {ratio:.3f}")
    assert len(apart) <= 0.05 * len(recorded.plans), apart


@pytest.mark.parametrize(
    ("hangs", "modes"),
    [(("cudnn", "forward"), ("train", "infer")), (("flash", "backward"), ("train",))],  # inference has no backward
    ids=str,
)
def test_a_default_whose_kernel_hangs_costs_no_cell_its_search(
    hangs: tuple[str, str], modes: tuple[Mode, ...], tmp_path: Path
) -> None:
    """Another plan stands in for it, in every cell; waiting for it once may take a fifth of the time."""
    environment = modelled_environment(tmp_path, 0, 2.5, hangs=hangs)
    request = ProbeRequest(
        output=tmp_path / "h100.yaml",
        effort="standard",
        budget_s=EFFORTS["standard"].budget_s * len(modes) / 2,
        seed=0,
        causal=True,
        modes=modes,
    )
    result = run_probe(request, None, environment)
    inconclusive = [str(report.workload) for report in result.cells if report.status == "inconclusive"]
    assert len(inconclusive) <= len(result.cells) // 20, inconclusive
    for report in result.cells:
        assert report.status != "refused"
        if report.chosen is not None:
            assert hangs not in parts_of(report.chosen)
