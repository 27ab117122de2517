"""A journal that several processes write: what one leaves half-written, overwrites or cannot write harms no other."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import BinaryIO

import pytest
from optuna.exceptions import StorageInternalError

from autotune.exit_codes import ProbeFailure, UsageFailure
from autotune.journal.storage import shared_file
from autotune.journal.storage.shared_file import SharedJournalFile
from autotune.journal.storage.storages import check_storage, open_storage
from autotune.journal.store import Store


def logs_of(path: Path) -> list[object]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def test_a_half_written_line_is_cut_off_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "s.journal"
    file = SharedJournalFile(path)
    file.append_logs([{"op_code": 0, "n": 1}])
    with path.open("a") as torn:
        torn.write('{"op_code":4,"wor')
    file.append_logs([{"op_code": 0, "n": 2}])
    assert logs_of(path) == [1, 2]


def test_a_writer_that_was_stopped_overwrites_no_line_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.journal"
    stopped, other = SharedJournalFile(path), SharedJournalFile(path)
    other.append_logs([{"op_code": 0, "n": 1}])
    measured = shared_file._size_and_whole_lines

    def stop(file: BinaryIO) -> tuple[int, int]:
        found = measured(file)
        monkeypatch.setattr(shared_file, "_size_and_whole_lines", measured)
        stopped._lock.release()  # as who waits for it does when it has been held for too long
        other.append_logs([{"op_code": 0, "n": 2}])
        return found

    monkeypatch.setattr(shared_file, "_size_and_whole_lines", stop)
    with pytest.raises(StorageInternalError, match="held up for 8 s while writing"):
        stopped.append_logs([{"op_code": 0, "n": 3}])
    assert logs_of(path) == [1, 2, 3]


def test_a_full_disk_ends_a_worker_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def remember(store: Store) -> None:
        with store:
            monkeypatch.setattr(os, "fsync", full)
            store.remember("a fact", 1)

    opened = Store(None, url=f"{tmp_path}/s.journal")
    with pytest.raises(ProbeFailure, match=r"cannot be used any more \(.*No space left on device.*\); run") as caught:
        remember(opened)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["hello", "hello\n", "a: 1\nb: 2", '{"op": 1}'])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.journal"
    path.write_text(content)
    for use in (check_storage, open_storage):
        with pytest.raises(UsageFailure, match=r"is no journal of Optuna; name another file$"):
            use(str(path))
    assert path.read_text() == content
