"""The command that a message names for a workload measures that workload and no other."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
from cli_runs import ringtune
from hypothesis import given
from hypothesis import strategies as st
from machines import FACTS, H100

import autotune.probe.tuning
from autotune.probe.checks import check_request
from autotune.probe.request import ProbeRequest, ProbeResult
from autotune.probe.workloads.grid import cells_for
from autotune.report.pages.page import uncovered
from ringattn.planning.matching import entries_for, entry_for
from ringattn.planning.unmeasured_workloads import call_options, grid_options, remedy, unmeasurable
from ringattn.profile.schema import Choice, Fingerprint, PlanEntry, Profile
from ringattn.workload import INPUT_DTYPES, BranchTunables, Pattern, Tunables, Workload

ROOMY = replace(FACTS, memory_mib=2**60)
PATTERNS = [
    pattern
    for rule in ("interleaved", "blocked")
    for pattern in (
        Pattern((), rule),
        *(Pattern.of(segments, rates, rule) for segments, rates in (([64], [1]), ([2048, 4096], [1, 2]), ([7], [3]))),
    )
]


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Workloads that differ from the command's defaults in any field, those that no probe measures among them."""
    pattern = draw(st.sampled_from(PATTERNS))
    mode = draw(st.sampled_from(("train", "infer", "decode")))
    causal, kv_heads = draw(st.booleans()), draw(st.integers(1, 32))
    seq_len, batch, world = draw(st.integers(1, 2**20)), draw(st.integers(1, 70)), draw(st.integers(1, 8))
    packed = draw(st.booleans()) and seq_len >= 2 and mode != "decode"
    odd: dict[str, Any] = draw(st.sampled_from(({}, {}, {}, {"softcap": 30.0}, {"window": 9}, {"dropout": 0.1})))
    if ("window" in odd and not (causal and pattern.dense)) or ("dropout" in odd and mode != "train"):
        odd = {}
    return Workload(
        mode, causal, seq_len, kv_heads * draw(st.integers(1, 4)), draw(st.integers(1, 256)),
        draw(st.sampled_from(INPUT_DTYPES)), kv_heads, batch, pattern, world,
        packed_tokens=draw(st.integers(seq_len + batch - 1, seq_len * batch)) if packed else 0, **odd,
    )  # fmt: skip


def request_of(command: str) -> ProbeRequest:
    """The request that the command line ``ringtune probe ...`` makes of itself."""
    words = shlex.split(command)
    assert words[:2] == ["ringtune", "probe"]
    requests: list[ProbeRequest] = []

    def remember(request: ProbeRequest, observer: object) -> ProbeResult:
        requests.append(request)
        return ProbeResult(None, None, (), 0.0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(autotune.probe.tuning, "run_probe", remember)
        result = ringtune(*words[1:], "--device", "cpu")
    assert not isinstance(result.exception, SystemExit) or result.exit_code == 0, result.stderr
    (request,) = requests
    return request


def without_what_no_row_has(workload: Workload) -> Workload:
    """A row has the length of a rank, and heads without offsets have no rule for them."""
    pattern = workload.pattern if workload.pattern.dilated else replace(workload.pattern, head_offset="interleaved")
    return replace(workload, total_length=0, pattern=pattern)


@given(workloads())
def test_the_command_for_a_workload_measures_it_alone(workload: Workload) -> None:
    told = remedy(workload, *call_options(workload))
    if unmeasurable(workload):
        assert told == f"no probe measures it ({unmeasurable(workload)})"
        return
    request = request_of(told.split("`")[1])
    check_request(request)
    (cell,) = cells_for(request, ROOMY)
    expected = without_what_no_row_has(workload)
    if workload.packed:  # of which the command says how many there are and how long they are together
        expected = replace(expected, seq_len=cell.workload.seq_len)
    assert cell.workload == expected


@given(workloads())
def test_the_command_for_steps_of_any_length_measures_rows_that_serve_them(workload: Workload) -> None:
    """A message about steps over a cache, whose lengths grow, leaves the lengths to the grid."""
    if unmeasurable(workload) or not workload.decode:
        return
    request = request_of(remedy(workload, *grid_options(workload)).split("`")[1])
    cells = [cell.workload for cell in cells_for(request, ROOMY)]
    found, _ = entries_for(profile_of(cells), workload)
    assert len(found) == len(cells), "a cell that no call of this module meets"
    assert {cell.batch for cell in cells} == ({1, 8, 64} if workload.batch == 1 else {workload.batch})
    assert all(entry_for(found, workload.at(cell.seq_len), 2) is not None for cell in cells)


@given(workloads())
def test_the_command_for_a_module_measures_its_rows_alone(workload: Workload) -> None:
    if unmeasurable(workload):
        return
    request = request_of(remedy(workload).split("`")[1])
    cells = [cell.workload for cell in cells_for(request, ROOMY)]
    found, _ = entries_for(profile_of(cells), workload)
    assert len(found) == len(cells) > 0
    assert {(cell.heads, cell.kv_heads) for cell in cells} == {(workload.heads, workload.kv_heads)}


@given(st.lists(workloads(), min_size=1, max_size=3), st.sampled_from((ROOMY, H100, replace(H100, arch="sm_75"))))
def test_the_page_names_commands_for_exactly_the_shapes_of_its_rows(found: list[Workload], facts: Any) -> None:
    """One took the number of documents for that of sequences, and one bf16 for what every GPU measures."""
    facts = replace(facts, memory_mib=2**60)
    rows = [without_what_no_row_has(each) for each in found if not unmeasurable(each)]
    profile = replace(profile_of(rows), fingerprint=Fingerprint.of(facts))
    unmeasured = {replace(row, seq_len=1, packed_tokens=0) for row in rows}
    for what, command in uncovered(profile):
        request = request_of(command)
        cells = [cell.workload for cell in cells_for(request, facts)]
        alike = {replace(cell, seq_len=1, packed_tokens=0) for cell in cells}
        if what.endswith("could not be measured"):
            assert alike <= unmeasured, command
        else:
            assert {replace(each, mode="train") for each in alike} <= {
                replace(each, mode="train") for each in unmeasured
            }


def profile_of(cells: list[Workload]) -> Profile:
    def plan(cell: Workload) -> Choice:
        return Choice(
            Tunables("fp32", (BranchTunables("math", "math" * cell.train),) * max(1, len(cell.pattern.branches)))
        )

    plans = tuple(PlanEntry(cell, plan(cell)) for cell in dict.fromkeys(cells))
    return Profile("measured", Fingerprint.of(FACTS), FACTS.software, plans=plans)


@pytest.mark.parametrize(("arguments", "told"), [
    (("--head-offset", "blocked"), "--head-offset blocked is for a dilated pattern"),
    (("--head-offset", "blocked", "--dense"), "--head-offset blocked is for a dilated pattern"),
])  # fmt: skip
@pytest.mark.parametrize("command", ["probe", "trace", "explain", "compare"])
def test_a_rule_for_offsets_that_nothing_has_is_refused(command: str, arguments: tuple[str, ...], told: str) -> None:
    given = arguments if command == "probe" else arguments[:2]
    result = ringtune(command, *given)
    assert result.exit_code == 2
    assert told in result.stderr


def test_a_batch_size_that_is_named_is_the_only_one() -> None:
    """``--batch-size 1`` was taken for none, with which decoding has three sizes and the grid its short sequences."""
    for modes in (("decode",), ("train", "infer")):
        cells = cells_for(ProbeRequest(modes=modes, batch_size=1, causal=False), FACTS)  # type: ignore[arg-type]
        assert {cell.workload.batch for cell in cells} == {1}
    assert {cell.workload.batch for cell in cells_for(ProbeRequest(modes=("decode",)), FACTS)} == {1, 8, 64}
