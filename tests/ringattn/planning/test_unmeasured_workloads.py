"""The record of workloads that no measured plan served: what is in it, who may write it at once, and its faults."""

from __future__ import annotations

import copy
import errno
import gc
import json
import logging
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machine_samples import EVIDENCE
from patience import LIMIT_S

import ringattn
from ringattn import Profile, RingAttention, Workload, detect
from ringattn.planning import unmeasured_workloads
from ringattn.planning.unmeasured_workloads import VARIABLE, Record, line_of, read_record, record_at
from ringattn.profile.schema import Choice, PlanEntry
from ringattn.workload import BranchTunables, Pattern, Tunables

INFER = Workload("infer", False, 32, 4, 8, "fp32", batch=2)
ROOT = Path(ringattn.__file__).parents[1]


def made(**arguments: Any) -> RingAttention:
    return RingAttention(4, 8, device="cpu", **arguments)


def inputs(
    batch: int = 2, length: int = 32, dtype: torch.dtype = torch.float32, grad: bool = False
) -> list[torch.Tensor]:
    return [torch.randn(batch, length, 4, 8, dtype=dtype, requires_grad=grad) for _ in range(3)]


def recorded(path: Path) -> dict[Workload, int]:
    record_at(str(path)).write()
    calls, notes = read_record(path)
    assert notes == ()
    return calls


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that modules of this process record to."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "missed.jsonl"))
    return tmp_path / "missed.jsonl"


def test_calls_are_counted_by_workload_and_hold_no_tensors(path: Path) -> None:
    module = made()
    for _ in range(5):
        module(*inputs())
    module(*inputs(), return_lse=True)
    module(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs()))  # other strides, the same workload
    for _ in range(3):
        module(*inputs(1, 48, grad=True))
    with torch.autocast("cpu", torch.bfloat16):
        module(*inputs())
    made(causal=True, segment_lengths=[16], dilation_rates=[2])(*inputs())
    train = Workload("train", False, 48, 4, 8, "fp32")
    dilated = Workload("infer", True, 32, 4, 8, "fp32", batch=2, pattern=Pattern.of([16], [2]))
    autocast = Workload("infer", False, 32, 4, 8, "bf16", batch=2)
    assert recorded(path) == {INFER: 7, train: 3, autocast: 1, dilated: 1}
    assert {key for line in path.read_text().split() for key in json.loads(line)} == {"schema", "missed"}


def test_what_a_measured_plan_serves_is_left_out(path: Path) -> None:
    plan = Tunables("fp32", (BranchTunables("math", ""),))
    facts = detect("cpu")
    entry = PlanEntry(INFER, Choice(plan, EVIDENCE))
    profile = Profile.single(facts, INFER, plan)
    measured = Profile("measured", profile.fingerprint, profile.software, plans=(entry,))
    module = made(profile=measured)
    module(*inputs())
    module(*inputs(length=40))  # the nearest length
    assert not path.exists()
    module(*inputs(length=128))
    made(profile=profile)(*inputs())  # a plan that nobody timed
    assert recorded(path) == {INFER.at(128): 1, INFER: 1}


def test_what_no_measurement_could_change_is_left_out(path: Path) -> None:
    made(profile=None)(*inputs())
    made(backend="math")(*inputs())
    assert not path.exists()


def test_without_the_variable_runners_are_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unmeasured_workloads, "Record", None)  # made by nobody
    module = made()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "late.jsonl"))  # read at init alone
    module(*inputs())
    assert not list(tmp_path.iterdir())


def test_copies_and_pickles_record_to_the_same_file(path: Path) -> None:
    module = made()
    for copied in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301
        copied(*inputs())
    assert recorded(path) == {INFER: 3}


def test_steps_over_a_cache_and_cross_attention_are_recorded(path: Path) -> None:
    module = made(causal=True)
    cache = module.kv_cache(2, dtype="fp32")
    step, prompt = inputs(length=1), inputs()
    with torch.no_grad():
        module.prefill(*prompt, cache)
        for _ in range(3):
            module.prefill(*step, cache)
        module.decode(step[0], cache)
    for _ in range(2):
        module.cross(step[0], *prompt[1:])
    module.cross(inputs(length=20)[0], *prompt[1:])
    long = replace(INFER, causal=True)
    assert recorded(path) == {
        long: 2,
        replace(long, mode="decode", seq_len=40): 4,
        replace(long, mode="decode"): 2,
    }


def test_a_call_that_fails_is_not_counted(tmp_path: Path) -> None:
    record = Record(str(tmp_path / "r"))
    run = record.counted(lambda x: 1 // x, INFER)
    assert run(1) == 1
    with pytest.raises(ZeroDivisionError):
        run(0)
    record.write()
    assert read_record(tmp_path / "r")[0] == {INFER: 1}


def test_workloads_of_compiled_graphs_are_met_and_not_counted(path: Path) -> None:
    gc.collect()  # a graph runs any equal module that lives, and so records where that one does
    compiled = torch.compile(made(), backend="eager")
    compiled(*inputs())
    compiled(*inputs())
    assert recorded(path) == {INFER: 0}


def test_lines_grow_with_the_logarithm_of_the_calls_and_with_new_workloads(tmp_path: Path) -> None:
    path = tmp_path / "r"
    record = Record(str(path))
    run = record.counted(lambda: None, INFER)
    for _ in range(1000):
        run()
    assert read_record(path)[0] == {INFER: 512}  # what is left if it is killed now
    for length in range(1, 16):
        record.meet(INFER.at(length))
    assert path.read_text().count("\n") == 10
    record.meet(INFER.at(16))
    assert read_record(path)[0] == {INFER: 1000, **{INFER.at(n): 0 for n in range(1, 17)}}


def test_threads_lose_no_call(tmp_path: Path) -> None:
    record = Record(str(tmp_path / "r"))
    run = record.counted(lambda: None, INFER)
    threads = [threading.Thread(target=lambda: [run() for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record.write()
    assert read_record(tmp_path / "r") == ({INFER: 8000}, ())


def _append_often(path: Path, number: int) -> None:
    record = Record(str(path))
    run = record.counted(lambda: None, INFER)
    for _ in range(50):
        for length in range(1, 40):  # a line of about 6 KiB
            record.counted(lambda: None, Workload("train", True, length, 4, 8, "bf16", batch=number + 1))()
        run()
        record.write()


def test_processes_append_at_once_without_mixing_lines(tmp_path: Path) -> None:
    path, fork = tmp_path / "r", multiprocessing.get_context("fork")
    running = [fork.Process(target=_append_often, args=(path, number)) for number in range(4)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0] * 4
    calls, notes = read_record(path)
    assert notes == ()
    assert calls.pop(INFER) == 4 * 50
    assert Counter(calls.values()) == {50: 4 * 39}


def test_a_program_writes_at_its_end(tmp_path: Path) -> None:
    code = (
        "import torch; from ringattn import RingAttention; x = torch.zeros(2, 32, 4, 8)\n"
        "module = RingAttention(4, 8, device='cpu')\n"
        "for _ in range(7): module(x, x, x)\n"
        "import os; os.chdir('/')\n"
    )
    environ = {**os.environ, VARIABLE: "here.jsonl", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environ, capture_output=True)
    assert read_record(tmp_path / "here.jsonl") == ({INFER: 7}, ())


def test_a_forked_process_writes_its_own_calls_alone(tmp_path: Path) -> None:
    path = tmp_path / "r"
    record = Record(str(path))
    run = record.counted(lambda: None, INFER)
    for _ in range(7):
        run()  # three of them unwritten
    child = os.fork()
    if child == 0:
        run()
        record.write()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    record.write()
    assert read_record(path) == ({INFER: 8}, ())


CHILDREN = """
import multiprocessing, os, sys
from ringattn import Workload
from ringattn.planning.unmeasured_workloads import record_at
run = record_at(sys.argv[1]).counted(lambda: None, Workload("infer", False, 32, 4, 8, "fp32", batch=2))
def call():
    for _ in range(7):
        run()
if __name__ == "__main__":
    call()
    child = multiprocessing.get_context(sys.argv[2]).Process(target=call)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_processes_of_multiprocessing_write_at_their_end(method: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(CHILDREN)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "program.py", "r", method], check=True, cwd=tmp_path, env=environ)
    assert read_record(tmp_path / "r") == ({INFER: 14}, ())


# --- faults ------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_is_told_of_once_and_stops_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "nowhere" / "r"
    monkeypatch.setenv(VARIABLE, str(path))
    with caplog.at_level(logging.WARNING, "ringattn"):
        module = made()
        for _ in range(4):
            module(*inputs())
        made()(*inputs(length=64))
    said = [record.getMessage() for record in caplog.records if "not recorded" in record.getMessage()]
    assert said == [
        f"{path}: workloads that no measured plan serves are not recorded (No such file or directory); "
        "RINGTUNE_RECORD names a file to append to"
    ]


def test_what_a_full_disk_cuts_short_costs_that_line_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r"
    full, other = Record(str(path)), Record(str(path))
    full.counted(lambda: None, INFER)()
    write = os.write
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "ringattn"):
        patched.setattr(os, "write", lambda file, line: write(file, line[:-9]))
        full.counted(lambda: None, INFER)()
    assert "bytes of a line were written" in caplog.text
    full.counted(lambda: None, INFER)()
    full.write()
    other.counted(lambda: None, INFER.at(7))()
    calls, notes = read_record(path)
    assert calls == {INFER: 1, INFER.at(7): 1}
    assert notes == (f"{path}, line 3: is cut short or no JSON; line skipped",)


def test_an_error_of_the_disk_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: int, line: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    record = Record(str(tmp_path / "r"))
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "ringattn"):
        patched.setattr(os, "write", full)
        record.counted(lambda: None, INFER)()
        record.counted(lambda: None, INFER)()
    assert caplog.text.count("not recorded (No space left on device)") == 1


WORKLOADS = st.builds(
    Workload,
    mode=st.sampled_from(("train", "infer")),
    causal=st.booleans(),
    seq_len=st.integers(1, 1 << 30),
    heads=st.just(12),
    kv_heads=st.sampled_from((0, 1, 4)),
    head_dim=st.integers(1, 300),
    dtype=st.sampled_from(("bf16", "fp32", "fp64")),
    batch=st.integers(1, 100),
    pattern=st.sampled_from((Pattern(), Pattern.of([8, 16], [1, 2], "blocked"))),
    world=st.integers(1, 8),
    total_length=st.integers(0, 1 << 33),
)
LINES = st.lists(st.dictionaries(WORKLOADS, st.integers(0, 1 << 40), min_size=1, max_size=4), max_size=5)


def added_up(lines: list[dict[Workload, int]]) -> dict[Workload, int]:
    calls: Counter[Workload] = Counter()
    for line in lines:
        calls.update(line)
    return dict(calls)


@given(LINES, st.data())
def test_what_is_written_is_read_and_added_up_whatever_the_end_lacks(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[Workload, int]], data: st.DataObject
) -> None:
    texts = [line_of(calls).encode() for calls in lines]
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(b"".join(texts))
    assert read_record(path) == (added_up(lines), ())
    if texts:
        cut = data.draw(st.integers(1, len(texts[-1]) - 1))
        path.write_bytes(b"".join(texts)[:-cut])
        read, notes = read_record(path)
        assert read == added_up(lines[:-1])
        assert len(notes) == (cut < len(texts[-1]) - 1)


@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists).map(
    lambda plain: json.dumps({"schema": 1, "missed": plain}).encode()
), LINES)  # fmt: skip
def test_no_line_stops_the_reader(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, lines: list[dict[Workload, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.jsonl"
    path.write_bytes(junk + b"".join(line_of(calls).encode() for calls in lines))
    assert read_record(path)[0] == added_up(lines)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": 2}, "schema is 2, and this version reads 1"),
        ({"missed": [{"calls": 1}]}, r"missed\[0\]"),
        ({"other": 1}, "other: is not a known key"),
        ({"missed": [{"calls": -1, "workload": {}}]}, r"missed\[0\]"),
    ],
)
def test_a_line_of_another_kind_is_told_of(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_text(json.dumps({**json.loads(line_of({INFER: 1})), **change}) + line_of({INFER: 3}))
    calls, (note,) = read_record(path)
    assert calls == {INFER: 3}
    assert re.search(told, note), note
    assert note.startswith(f"{path}, line 1")


def test_a_pipe_is_neither_waited_for_nor_written(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a process of its own, which is ended where it waits."""
    pipe = path.with_name("pipe")
    os.mkfifo(pipe)
    code = (
        "import sys, logging; logging.basicConfig(format='%(message)s')\n"
        "from ringattn import RingAttention\n"
        "import torch\n"
        "module = RingAttention(4, 8, device='cpu')\n"
        "module(*[torch.randn(1, 8, 4, 8) for _ in range(3)])\n"
    )
    environ = {**os.environ, VARIABLE: str(pipe), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    (told,) = [line for line in done.stderr.splitlines() if "are not recorded" in line]
    assert f"{pipe}: workloads that no measured plan serves are not recorded" in told


@pytest.mark.parametrize("device", ["/dev/null", "/dev/full"])
def test_a_device_is_no_record(device: str, caplog: pytest.LogCaptureFixture) -> None:
    record = Record(device)
    record.meet(INFER)
    with caplog.at_level(logging.WARNING, logger="ringattn"):
        record.write()
        record.write()
    (told,) = caplog.messages
    assert f"{device}: workloads that no measured plan serves are not recorded (it is not a regular file)" in told


def test_a_record_is_read_from_a_regular_file_of_a_bounded_size_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is not a regular file"):
            read_record(path)
    with pytest.raises(IsADirectoryError, match="it is a directory"):
        read_record(tmp_path)
    with pytest.raises(ValueError, match="null"):
        read_record(Path("a\0b"))
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(unmeasured_workloads.MOST_BYTES + 1)
    monkeypatch.setattr(os, "fdopen", None)  # it is not opened for reading
    with pytest.raises(OSError, match=f"it has {unmeasured_workloads.MOST_BYTES + 1} bytes, more than"):
        read_record(large)


@pytest.mark.parametrize("name", ["calls", "seq_len", "heads", "head_dim", "batch", "world", "total_length"])
@pytest.mark.parametrize("number", [10**19, -(10**30), 10**400])
def test_no_number_is_longer_than_64_bits(name: str, number: int, tmp_path: Path) -> None:
    plain = json.loads(line_of({INFER: 2}))
    of = plain["missed"][0] if name == "calls" else plain["missed"][0]["workload"]
    of[name] = number
    (tmp_path / "record").write_text(json.dumps(plain))
    calls, (note,) = read_record(tmp_path / "record")
    assert calls == {}
    assert re.search(rf"{name}: is an integer of more than 64 bits; line skipped", note)
