"""``--if-stale`` on an invented machine whose software changed: winners are verified, and what flipped is searched."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from machines import FACTS
from probed_machine import Machine, Watching, request_for, truth, winners

import autotune.probe.tuning
from autotune.cli.probing.once import OncePerKind
from autotune.cli.probing.renew import can_renew, renew
from autotune.probe.request import ProbeRequest
from autotune.probe.tuning import run_probe
from ringattn.profile.schema import Profile
from ringattn.profile.yaml_io import load_profile
from ringattn.store.backends.folder import Folder
from ringattn.store.store import Store
from ringattn.workload import Tunables

CHANGES = {
    "driver": ("driver", "590.1"),
    "torch": ("torch", "9.9.9"),
    "cuDNN": ("cudnn", "9.99"),
    "a kernel package": ("flash-attn", "2.9"),
}


class Node:
    """A node that starts ``--if-stale``, with the versions it has by now."""

    def __init__(self, machine: Machine, tmp_path: Path) -> None:
        self.machine, self.folder = machine, tmp_path
        (tmp_path / "store").mkdir(exist_ok=True)
        self.store = Store(Folder(tmp_path / "store"))
        self.observer = Watching()
        for name in ("driver", "cudnn"):
            self.update(name, "1.0")

    def measure(self, earlier: Path | None) -> Path:
        output = self.folder / "measured.yaml"
        facts = self.machine.environment.facts
        if earlier is not None and can_renew(load_profile(earlier), facts):
            return renew(earlier, output, request_for(output), facts, self.observer)
        run_probe(request_for(output), self.observer, self.machine.environment)
        return output

    def ask(self) -> tuple[Profile, bool]:
        """The profile that it ends with, and whether it measured."""
        self.observer = Watching()
        facts = self.machine.environment.facts
        once = OncePerKind(
            self.store, str(self.store.url), self.folder / "cache", facts, 1, lambda note: None, exact=True
        )
        found = once.run(self.measure, None)
        assert found is not None
        return load_profile(found), once.measured

    def update(self, name: str, version: str) -> None:
        """Another version of one package, or one more."""
        software = tuple(sorted({**dict(self.machine.environment.facts.software), name: version}.items()))
        self.machine.environment = replace(self.machine.environment, facts=replace(FACTS, software=software))


@dataclass(frozen=True)
class Searched:
    """What the first search of a node leaves, the same every time."""

    profile: Profile
    folder: Path
    calls: int  # of the evaluator


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    folder = tmp_path_factory.mktemp("searched")
    node = Node(Machine(folder), folder)
    profile, measured = node.ask()
    assert measured
    assert set(winners(profile).values()) == {"math", "flash-cpu"}
    return Searched(profile, folder, sum(made.calls for made in node.machine.made))


@pytest.fixture
def node(tmp_path: Path, searched: Searched, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node whose first search is in the store."""
    shutil.copytree(searched.folder / "store", tmp_path / "store")
    machine = Machine(tmp_path)
    made = Node(machine, tmp_path)

    def here(function: str) -> None:
        real = getattr(autotune.probe.tuning, function)
        monkeypatch.setattr(
            autotune.probe.tuning, function, lambda *given: partial(real, environment=machine.environment)(*given)
        )

    here("verify_profile")
    here("run_probe")
    return made


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_after_an_update_only_what_flipped_is_searched(node: Node, searched: Searched, change: tuple[str, str]) -> None:
    first, measured = node.ask()
    assert (first, measured) == (searched.profile, False)
    node.update(*change)
    node.machine.truth = lambda cell, tunables: truth(cell.at(4096), tunables)  # math is slow everywhere by now
    second, measured = node.ask()
    assert measured
    assert {cell.seq_len for cell in node.observer.cells} == {512}  # the last that was planned is the search
    assert dict(second.software)[change[0]] == change[1]
    assert set(winners(second).values()) == {"flash-cpu"}
    kept = {entry.workload: entry for entry in first.plans if entry.workload.seq_len == 4096}
    assert kept == {entry.workload: entry for entry in second.plans if entry.workload.seq_len == 4096}
    assert len(second.plans) == len(first.plans)
    assert second.provenance.notes == ("2 rows of 2026-01-02 verified, 2 searched again, 0 not judged",)
    assert sum(made.calls for made in node.machine.made) < searched.calls  # of the whole search
    assert node.ask() == (second, False)
    assert node.ask() == (second, False)


def test_after_an_update_that_changes_nothing_nothing_is_searched(node: Node) -> None:
    first, _ = node.ask()
    node.update(*CHANGES["torch"])
    second, measured = node.ask()
    assert measured
    assert second.plans == first.plans
    assert len(node.machine.made) == 1  # for a verification
    assert second.provenance.notes == ("4 rows of 2026-01-02 verified, 0 searched again, 0 not judged",)
    assert node.ask() == (second, False)


def test_a_second_update_verifies_what_the_first_left(node: Node) -> None:
    node.ask()
    for number, name in enumerate(("torch", "cudnn", "torch")):
        node.update(name, f"9.{number}")
        profile, measured = node.ask()
        assert measured
        assert dict(profile.software)[name] == f"9.{number}"
    assert len(node.machine.made) == 3


def test_a_row_whose_plan_no_longer_runs_is_searched(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = node.ask()
    node.update(*CHANGES["torch"])
    asked: list[ProbeRequest] = []
    real = autotune.probe.tuning.run_probe

    def run(request: ProbeRequest, *more: object) -> object:
        asked.append(request)
        return real(request, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(autotune.probe.tuning, "run_probe", run)
    node.machine.truth = lambda cell, tunables: 3.0 if kernel_of(tunables) == "math" else truth(cell, tunables)
    second, _ = node.ask()
    assert [sorted(workload.seq_len for workload, _ in request.recorded) for request in asked] == [[512, 512]]
    assert set(winners(second).values()) == {"flash-cpu"}
    assert len(second.plans) == len(first.plans)


def kernel_of(tunables: Tunables) -> str:
    return tunables.branches[0].forward
