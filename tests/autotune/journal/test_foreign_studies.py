"""Studies that somebody edited: one line with the study, the field and --fresh, or a result."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from probed_machine import Machine, request_for

from autotune.exit_codes import ProbeFailure
from autotune.journal.store import HEADER, Store
from autotune.measure.simulated import ReplayEvaluator
from autotune.probe.request import ProbeObserver
from autotune.probe.tuning import run_probe
from ringattn.workload import Workload

ASKED = {"dense": True, "modes": ("infer",)}  # two cells; for training each resumed search takes twice as long
STUDY_ATTRIBUTE, STUDY_OP, TRIAL_ATTRIBUTE = "user_attr", 2, 8
BAD: tuple[Any, ...] = (None, "x", True, -1, 10**18, 10**400, 1e300, float("nan"), float("inf"), [], [1], {}, {"a": 1})
MOST_BLOCKS = 2000  # of a probe of two cells, which needs 30: more is one without end


class Bounded(ReplayEvaluator):
    """A machine that gives up when it is asked without end."""

    asked = 0

    def block(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        assert self.asked < MOST_BLOCKS, "the search does not end"
        return super().block(*args, **kwargs)


class BoundedMachine(Machine):
    def _evaluator(self) -> ReplayEvaluator:
        made = super()._evaluator()
        made.__class__ = type("Bounded", (Bounded, type(made)), {})
        return made


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines of the journal of a probe that was interrupted in the final of its second cell."""
    folder = tmp_path_factory.mktemp("interrupted")
    machine = Machine(folder)

    class SecondFinal(ProbeObserver):
        finals = 0

        def stage(self, cell: Workload, name: str) -> None:
            self.finals += name == "final"
            if self.finals == 2:
                machine.made[-1].left = 1  # type: ignore[attr-defined]  # blocks

    with pytest.raises(KeyboardInterrupt):
        run_probe(request_for(folder / "p.yaml", **ASKED), SecondFinal(), machine.environment)
    return (folder / "p.yaml.journal").read_text().splitlines()


def resume(folder: Path, lines: list[str]) -> str:
    """Go on from a journal of these lines; return what the failure says, "" where it ends well."""
    folder.mkdir(exist_ok=True)
    (folder / "p.yaml.journal").write_text("\n".join(lines) + "\n")
    try:
        run_probe(request_for(folder / "p.yaml", **ASKED), None, BoundedMachine(folder).environment)
    except ProbeFailure as failure:
        told = str(failure)
    else:
        told = ""
    assert "\n" not in told
    return told


def edited(lines: list[str], where: Callable[[dict[str, Any]], bool], edit: Callable[[dict[str, Any]], None]) -> Any:
    """The lines with the last one that ``where`` holds for edited."""
    number = max(n for n, line in enumerate(lines) if where(json.loads(line)))
    log = json.loads(lines[number])
    edit(log)
    return [*lines[:number], json.dumps(log), *lines[number + 1 :]]


def has(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda log: name in log.get(STUDY_ATTRIBUTE, {}) and log["op_code"] in (STUDY_OP, TRIAL_ATTRIBUTE)


def test_what_was_not_edited_ends_well(tmp_path: Path, interrupted: list[str]) -> None:
    assert resume(tmp_path, interrupted) == ""


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("block 1", [5.0], "block 1: must be a mapping of default and samples"),
        ("block 1", {"default": 0, "samples": {}}, "block 1.default: is 0, of which there is no sample"),
        ("block 1", {"default": 0, "samples": {"x": []}}, "block 1.samples: its number must be an integer from 0 to"),
        ("block 1", {"default": 0, "samples": {"0": [[5.0]]}}, "block 1.samples[0][0]: must be two numbers"),
        ("block 1", {"default": 0, "samples": {"0": [[5, -1]]}}, "block 1.samples[0][0][1]: is -1.0; it must be from"),
        ("final since", 10**15, "final since: is 1000000000000000; it must be from 1 to"),
        ("final since", "soon", "final since: is 'soon'; it must be an integer"),
        ("checked", {"call_ms": 5.0}, "checked: error: is missing"),
        (
            "checked",
            {"call_ms": -1.0, "error": 0.0, "peak_bytes": 1, "cold_ms": 1.0, "host_us": 1.0},
            "checked.call_ms",
        ),
        ("checked", 7, "checked: is 7; it must be a mapping"),
        ("validation", {"first_call_ms": "x"}, "validation: first_call_ms: is 'x'; it must be a number"),
        ("validation", {"kind": "bad luck"}, "validation: kind: is 'bad luck'; it must be one of"),
        ("validation", {"kind": "crash", "cause": {"is": "magic"}}, "validation: cause: is {'is': 'magic'}"),
        ("result", {"state": "fine"}, "result: state: is 'fine'; it must be one of"),
        ("result", {"state": "tuned"}, "result: choice: is missing in a cell that is tuned"),
        ("identity", 3, "study 'probe': identity: is 3; it must be text"),
    ],
)
def test_a_bad_attribute_is_told_with_its_study_and_field(
    tmp_path: Path, interrupted: list[str], name: str, value: object, told: str
) -> None:
    lines = edited(interrupted, has(name), lambda log: log[STUDY_ATTRIBUTE].update({name: value}))
    failure = resume(tmp_path, lines)
    assert failure.startswith("study '")
    assert told in failure
    assert failure.endswith("; give --fresh to start over")


def test_a_result_that_names_no_trial_is_told(tmp_path: Path, interrupted: list[str]) -> None:
    lines = edited(interrupted, has("result"), lambda log: log[STUDY_ATTRIBUTE]["result"]["choice"].update(trial=999))
    assert "result names trial 999, which is none with a check" in resume(tmp_path, lines)


def test_a_check_that_is_missing_is_told(tmp_path: Path, interrupted: list[str]) -> None:
    lines = [line for line in interrupted if not has("checked")(json.loads(line))]
    assert ", which is none with a check; give --fresh" in resume(tmp_path, lines)


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_no_value_of_any_attribute_ends_in_a_traceback_or_without_end(
    tmp_path: Path, interrupted: list[str], bad: object
) -> None:
    """Each kind of attribute once, whole, and one value inside it."""
    draw = random.Random(repr(bad))
    kinds = {name.split(" ")[0]: name for line in interrupted for name in json.loads(line).get(STUDY_ATTRIBUTE, {})}
    assert {"identity", "block", "final", "result", "checked", "validation", "repeats"} <= kinds.keys()
    for number, name in enumerate(kinds.values()):

        def inside(log: dict[str, Any], name: str = name) -> None:
            value = log[STUDY_ATTRIBUTE][name]
            while isinstance(value, dict | list) and value:
                key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
                if not isinstance(value[key], dict | list) or not value[key] or draw.random() < 0.3:
                    value[key] = bad
                    return
                value = value[key]

        whole = edited(interrupted, has(name), lambda log, name=name: log[STUDY_ATTRIBUTE].update({name: bad}))
        for place, lines in (("whole", whole), ("inside", edited(interrupted, has(name), inside))):
            failure = resume(tmp_path / f"{number}{place}", lines)
            assert not failure or failure.endswith("give --fresh to start over")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300, -1e300, 0.0, "x"], ids=str)
def test_a_time_that_is_none_is_told(tmp_path: Path, interrupted: list[str], bad: object) -> None:
    def spoil(log: dict[str, Any]) -> None:
        (samples, *_) = log[STUDY_ATTRIBUTE]["block 1"]["samples"].values()
        samples[0][0] = bad

    failure = resume(tmp_path, edited(interrupted, has("block 1"), spoil))
    assert "block 1.samples[" in failure
    assert failure.endswith("; give --fresh to start over")


def database(tmp_path: Path) -> tuple[str, Any]:
    url = f"sqlite:///{tmp_path}/studies.db"
    return url, optuna.create_study(study_name=HEADER, storage=url)


def test_a_study_of_our_name_that_is_somebody_else_s_is_neither_used_nor_deleted(tmp_path: Path) -> None:
    url, theirs = database(tmp_path)
    theirs.set_user_attr("colour", "red")
    for fresh in (False, True):
        with pytest.raises(ProbeFailure, match=r"its study 'probe' is not of a probe; name another database$"):
            Store(tmp_path / "p.journal", url=url, fresh=fresh)
    assert optuna.load_study(study_name=HEADER, storage=url).user_attrs == {"colour": "red"}


def test_a_study_that_maximizes_is_told(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/studies.db"
    optuna.create_study(study_name=HEADER, storage=url, directions=["maximize", "minimize"])
    for fresh in (False, True):
        with pytest.raises(ProbeFailure, match=r"its study 'probe' is not of a probe; name another database$"):
            Store(tmp_path / "p.journal", url=url, fresh=fresh)
    assert optuna.get_all_study_names(url).count(HEADER) == 1


def test_a_row_of_a_database_that_optuna_cannot_read_is_one_line(tmp_path: Path) -> None:
    url, study = database(tmp_path)
    study.set_user_attr("identity", "x")
    with sqlite3.connect(tmp_path / "studies.db") as rows:
        rows.execute("update study_user_attributes set value_json = '{'")
    rows.close()
    with pytest.raises(ProbeFailure, match=r"study 'probe': cannot be read by Optuna \(JSONDecodeError.*--fresh"):
        Store(tmp_path / "p.journal", url=url)
