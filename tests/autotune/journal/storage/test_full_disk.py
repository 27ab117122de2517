"""A disk that becomes full in the middle of a record: the record is told as lost, and none after it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
# A limit on the size of files is met as a full disk is: what fits is written, and the next write fails.
WRITER = """
import resource, sys
from pathlib import Path
from autotune.exit_codes import ProbeFailure
from autotune.journal.storage.journal_file import JournalFile
file = JournalFile(Path(sys.argv[1]))
file.append_logs([{"op_code": 0}])
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
try:
    file.append_logs([{"op_code": 1, "text": "x" * 100}])
except ProbeFailure as failure:
    print(failure)
resource.setrlimit(resource.RLIMIT_FSIZE, before)
file.append_logs([{"op_code": 2}])
"""


def test_a_record_that_fits_in_part_is_told_and_leaves_the_journal_whole(tmp_path: Path) -> None:
    journal = tmp_path / "p.yaml.journal"
    command = [sys.executable, "-c", WRITER, str(journal)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "cannot be written (No space left on device); finished trials are kept" in ran.stdout
    assert [json.loads(line)["op_code"] for line in journal.read_text().splitlines()] == [0, 2]
