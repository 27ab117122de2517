"""Profiles, names and stores that nobody wrote: our errors alone, no code run, nothing touched, no wrong forward.

``FUZZ_CASES=100000`` makes as many cases; case N is the same wherever it runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_mutations import PARTS
from hypothesis import given
from hypothesis import strategies as st

from ringattn.errors import StoreError
from ringattn.store.backends.folder import Folder
from ringattn.store.names import ProfileName, is_name
from ringattn.store.store import Store

ROOT = Path(__file__).parents[3]
CASES = int(os.environ.get("FUZZ_CASES", "2000"))
PATHS = os.pathsep.join(str(ROOT / part) for part in ("", "tests/support/ringattn"))


@pytest.mark.timeout(120 + CASES / 10)
def test_no_case_does_harm(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests/support/ringattn/store/fuzz_main.py"), str(tmp_path), str(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PATHS})
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["faults"] == []
    counts = told["counts"]
    assert sum(counts[kind] for kind in ("profile", "bytes", "name", "contents")) == CASES
    for kind in ("profile refused", "bytes refused", "name refused", "accepted", "forwards", "contents"):
        assert counts[kind] > 0, counts  # the mutations are such that both ends are reached


@given(st.text(max_size=20) | st.lists(st.sampled_from(PARTS), max_size=5).map("/".join))
def test_no_text_leads_out_of_a_store(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "store").mkdir()
    backend = Folder(folder / "store")
    for act in (lambda: backend.put(text, b"x"), lambda: backend.create(text, b"x"), lambda: backend.delete(text)):
        if is_name(text):
            act()
            continue
        with pytest.raises(StoreError) as raised:
            act()
        assert str(raised.value).isprintable()
    with pytest.raises(StoreError):
        Store(backend).named(text)
    assert ProfileName.parse(text) is None or str(ProfileName.parse(text)) == text
    assert [path.name for path in folder.iterdir()] == ["store"]
