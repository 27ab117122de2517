"""Many nodes, one search: workers share the cells of a storage, also where some of them are killed."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from postgres import PASSWORD, Server, grpc_proxy, postgres_server
from shared_probe import Job, Told, checked_twice, rows_of, work_together

from autotune.exit_codes import ExitCode, ProbeFailure
from autotune.journal.sharing.lease import RUNS
from autotune.journal.storage import storages
from autotune.journal.storage.storages import check_storage, open_storage, without_password
from autotune.probe.request import ProbeRequest
from ringattn.profile.yaml_io import load_profile

WORKERS = 4
LENGTHS = (256, 1024, 2048, 8192)
BUDGET_S = 2.0 * len(LENGTHS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as started:
        yield started


@pytest.fixture(params=["postgresql", "grpc", "journal"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "journal":
        yield f"{tmp_path}/shared.journal"
        return
    database = request.getfixturevalue("server").new_database()
    if request.param == "postgresql":
        yield database
        return
    with grpc_proxy(f"get_storage({database!r})") as url:
        yield url


def jobs_of(tmp_path: Path, storage: str, count: int = WORKERS) -> list[Job]:
    request = ProbeRequest(
        effort="quick", budget_s=BUDGET_S, seq_lens=LENGTHS, modes=("infer",), dense=True, storage=storage
    )
    folders = [tmp_path / f"node-{number}" for number in range(count)]
    return [Job(folder, replace(request, output=folder / "p.yaml")) for folder in folders]


def check_shared(told: list[Told], jobs: list[Job], killed: set[int]) -> None:
    """Each cell is one worker's, but for those of killed ones, whose checks stay; all end with one profile."""
    living = [number for number in range(len(jobs)) if number not in killed]
    contents = {jobs[number].request.output.read_bytes() for number in living}  # type: ignore[union-attr]
    assert len(contents) == 1
    profile = load_profile(jobs[living[0]].request.output)  # type: ignore[arg-type]
    assert [entry.workload.seq_len for entry in profile.plans] == list(LENGTHS)
    assert all(entry.evidence is not None for entry in profile.plans)
    assert {plan.branches[0].forward for plan in rows_of(profile).values()} == {"flash-cpu", "math"}
    assert checked_twice(told) <= len(killed)  # what was measured when it was killed, and not yet told
    for length in LENGTHS:
        timed = {
            number for number, one in enumerate(told) if any(f" S{length} " in cell for (cell,) in one.of("block"))
        }
        assert len(timed - killed) <= 1, f"S{length} was timed by {timed}"


def test_workers_share_the_cells_and_end_with_one_profile(tmp_path: Path, storage: str) -> None:
    jobs = jobs_of(tmp_path, storage)
    told = work_together(jobs)
    check_shared(told, jobs, set())
    assert sum(bool(one.of("block")) for one in told) >= 2
    late = jobs_of(tmp_path / "late", storage, 1)  # it takes what the others came to
    (said,) = work_together(late)
    assert not said.of("check")
    assert late[0].request.output.read_bytes() == jobs[0].request.output.read_bytes()  # type: ignore[union-attr]


def test_an_interrupted_worker_leaves_its_cell_to_the_others_at_once(tmp_path: Path, storage: str) -> None:
    first, *others = jobs_of(tmp_path, storage, 2)
    jobs = [replace(first, interrupt_after=3), *others]
    told = work_together(jobs)
    assert told[0].of("interrupted")
    check_shared(told, jobs, {0})
    opened = open_storage(storage)
    assert not optuna.load_study(study_name=RUNS, storage=opened).get_trials(states=(TrialState.RUNNING,))


def test_cells_of_killed_workers_are_taken_over_with_all_they_told(tmp_path: Path, storage: str) -> None:
    jobs = jobs_of(tmp_path, storage)
    told = work_together(jobs, kill={0: 9, 1: 14})
    check_shared(told, jobs, {0, 1})
    opened = open_storage(storage)
    kept = set()
    for name in optuna.get_all_study_names(opened):
        for trial in optuna.load_study(study_name=name, storage=opened).trials:
            kept |= {(name, trial.params["forward.0"], trial.params["dtype"])} if "forward.0" in trial.params else set()
    # The last may have been on its way, and who took over the other's cell may have had nothing left to check.
    checks = [check for number in (0, 1) for check in told[number].of("check")[:-1]]
    assert len(checks) >= 8  # the first one's, at the least
    for cell, key in checks:
        plan = json.loads(key)
        assert (cell, plan["branches"][0]["forward"], plan["dtype"]) in kept


@pytest.mark.parametrize("other", ["machine", "request", "version"])
def test_another_machine_request_or_version_is_refused_and_changes_nothing(tmp_path: Path, other: str) -> None:
    storage = f"{tmp_path}/shared.journal"
    (job,) = jobs_of(tmp_path, storage, 1)
    work_together([job])
    before = Path(storage).read_bytes()
    changed = {
        "machine": replace(job, sku="another"),
        "request": replace(job, request=replace(job.request, seed=1)),
        "version": replace(job, version="0.0.1"),
    }[other]
    elsewhere = replace(
        changed, folder=tmp_path / "other", request=replace(changed.request, output=tmp_path / "o.yaml")
    )
    (told,) = work_together([elsewhere])
    assert "holds the studies of another machine, software or request; name another storage" in told.failure
    assert "\n" not in told.failure
    assert not told.of("check")
    names = {str(line).split('"study_name"')[-1] for line in before.splitlines() if b"study_name" in line}
    after = Path(storage).read_bytes()
    assert after.startswith(before)
    assert {str(line).split('"study_name"')[-1] for line in after.splitlines() if b"study_name" in line} == names


@pytest.mark.parametrize("behind", ["JournalStorage(JournalFileBackend({path!r}))", "InMemoryStorage()"])
def test_a_proxy_before_a_journal_is_refused(tmp_path: Path, behind: str) -> None:
    with grpc_proxy(behind.format(path=str(tmp_path / "x.log"))) as url:
        (told,) = work_together(jobs_of(tmp_path, url, 1))
    assert "its server keeps the studies in a journal or in memory, behind which trials get lost" in told.failure


@pytest.mark.parametrize(
    ("url", "code", "remedy"),
    [
        ("foo://host/studies", ExitCode.USAGE, "grpc://HOST:PORT of Optuna's gRPC proxy, or the path of a journal"),
        ("nonsense", ExitCode.USAGE, "or the path of a journal, FILE.journal"),
        ("/no/such/folder/x.journal", ExitCode.USAGE, "the folder /no/such/folder does not exist"),
        ("sqlite:////no/such/folder/x.db", ExitCode.USAGE, "the folder of /no/such/folder/x.db does not exist"),
        ("grpc://host", ExitCode.USAGE, "give grpc://HOST:PORT"),
        ("postgresql+psycopg://me:secret@localhost:1/x", ExitCode.UNAVAILABLE, "see that its server runs"),
    ],
)
def test_each_wrong_storage_has_its_remedy_and_exit_code(url: str, code: ExitCode, remedy: str) -> None:
    if url.startswith("postgresql"):
        pytest.importorskip("psycopg", reason="the driver is not installed: pip install 'psycopg[binary]'")
    with pytest.raises(ProbeFailure) as caught:
        check_storage(url)
    assert caught.value.exit_code == code
    assert remedy in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_proxy_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpc", reason="gRPC is not installed: pip install grpcio protobuf")
    monkeypatch.setattr(storages, "CONNECT_S", 0.2)
    with pytest.raises(ProbeFailure, match=r"cannot be reached .*; see that its server runs") as caught:
        storages.check_storage("grpc://localhost:1")
    assert caught.value.exit_code == ExitCode.UNAVAILABLE


def test_a_wrong_password_is_one_line_without_it(server: Server) -> None:
    wrong = server.url.replace(PASSWORD, "guessed")
    with pytest.raises(ProbeFailure, match=r"cannot be reached .*password authentication failed") as caught:
        check_storage(wrong)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
    assert "guessed" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret@host/x",
        "postgresql://me:a/secret@host/x",
        "postgresql://me:a@secret@host/x",
        "postgresql://host/x?user=me&password=secret",
        "postgresql://host/x?sslpassword=secret&user=me",
    ],
)
def test_no_part_of_a_password_is_shown(url: str) -> None:
    assert "secret" not in without_password(url)
    assert "host/x" in without_password(url)


def test_a_server_that_accepts_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg", reason="the driver is not installed: pip install 'psycopg[binary]'")
    monkeypatch.setattr(storages, "CONNECT_S", 2.0)  # the least of PostgreSQL's drivers
    with socket.socket() as silent:
        silent.bind(("localhost", 0))
        silent.listen()
        with pytest.raises(ProbeFailure, match=r"cannot be reached .*timeout"):
            check_storage(f"postgresql+psycopg://me@localhost:{silent.getsockname()[1]}/x")


def test_a_database_that_goes_away_is_one_line_and_the_search_goes_on_when_it_is_back(
    tmp_path: Path, server: Server
) -> None:
    jobs = [replace(job, call_s=0.05) for job in jobs_of(tmp_path, server.new_database(), 2)]
    told = work_together(jobs, after=(12, server.stop))
    server.start()
    for one in told:
        assert "cannot be used any more (" in one.failure
        assert "run the same command to go on when it can" in one.failure
        assert "\n" not in one.failure
        assert PASSWORD not in one.failure
    assert not any(job.request.output.exists() for job in jobs)  # type: ignore[union-attr]
    again = work_together(jobs)
    assert len({job.request.output.read_bytes() for job in jobs}) == 1  # type: ignore[union-attr]
    assert checked_twice([*told, *again]) <= len(jobs)


def test_one_worker_over_a_storage_writes_the_rows_of_a_probe_alone(tmp_path: Path) -> None:
    """Also those that come at the end: validated defaults, anchors half way, the leanest plan of a training row."""
    request = ProbeRequest(effort="standard", budget_s=200, seq_lens=(512, 4096), dense=True)
    plans = []
    for storage in (None, f"{tmp_path}/shared.journal"):
        folder = tmp_path / str(storage is None)
        work_together([Job(folder, replace(request, output=folder / "p.yaml", storage=storage))])
        plans.append(load_profile(folder / "p.yaml").plans)
    assert len(plans[0]) > 4
    assert any(entry.front for entry in plans[0])
    assert plans[0] == plans[1]
