"""A lease has one holder; a dead one's lapses by the others' own clocks, whatever those say."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ringattn.errors import StoreError
from ringattn.store.backends.backend import Backend, open_backend
from ringattn.store.backends.folder import Folder
from ringattn.store.lease import Holder, Lease

ROOT = Path(__file__).parents[3]


class Clock:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(params=["folder", "memory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    pytest.importorskip("fsspec")
    return open_backend(str(tmp_path) if request.param == "folder" else f"memory://{tmp_path.name}/leases")


def test_one_holds_and_the_next_takes_what_was_freed(backend: Backend) -> None:
    one, other = Lease(backend, "k", node="one"), Lease(backend, "k", node="two")
    assert one.acquire()
    assert not other.acquire()
    assert other.holder == Holder("one", 60.0)
    one.release()
    assert other.acquire()
    assert not one.acquire()
    assert one.holder.node == "two"


def test_a_dead_holders_lease_lapses_by_ones_own_clock(backend: Backend) -> None:
    """The clocks are far apart and are never compared."""
    dead = Lease(backend, "k", clock=Clock(1e9), term_s=30.0)
    clock = Clock(-5.0)
    heir = Lease(backend, "k", clock=clock)
    assert dead.acquire()
    assert not heir.acquire()
    clock.now_s += 29.9
    assert not heir.acquire()
    clock.now_s += 0.2
    assert heir.acquire()
    assert not dead.renew()  # it was not dead, and learns that it was overtaken
    assert heir.renew()


def test_a_renewed_lease_does_not_lapse(backend: Backend) -> None:
    clock = Clock(0.0)
    holder, other = Lease(backend, "k"), Lease(backend, "k", clock=clock)
    assert holder.acquire()
    for _ in range(20):
        assert not other.acquire()
        clock.now_s += 59.0
        assert holder.renew()
    assert not other.acquire()
    assert len(backend.names("leases/k")) <= 9  # the numbers behind are removed


def test_an_old_listing_makes_no_second_holder(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.0)
    holder, other = Lease(backend, "k"), Lease(backend, "k", clock=clock)
    assert holder.acquire()
    stale = other._newest()
    for _ in range(20):
        assert holder.renew()
    answers = [stale, stale]
    fresh = Lease._newest
    monkeypatch.setattr(Lease, "_newest", lambda self: answers.pop() if answers and self is other else fresh(self))
    assert not other.acquire()
    clock.now_s += 120.0
    assert not other.acquire()  # the number after the stale one is over and removed: it could be created anew
    assert holder.renew()


def test_a_file_that_says_nothing_is_a_holder_with_the_usual_term(backend: Backend) -> None:
    for content in (b"", b"{", b"[]", b'{"node": 1}', b'{"node": "x", "term_s": "y"}', b"\xff", b"[" * 4000):
        assert Holder.parse(content) == Holder("", 60.0)
    assert Holder.parse(b'{"node": "x", "term_s": 1e300}').term_s == 600.0
    assert Holder.parse(b'{"node": "x", "term_s": -1}').term_s == 60.0
    assert Holder.parse(b'{"node": "x", "term_s": NaN}').term_s == 60.0
    assert Holder.parse(b'{"node": "x", "term_s": 1%s}' % (b"0" * 400)).term_s == 60.0  # no float holds it
    backend.put("leases/k/00000001", b"")
    clock = Clock(0.0)
    lease = Lease(backend, "k", clock=clock)
    assert not lease.acquire()
    clock.now_s += 60.0
    assert lease.acquire()


def test_kept_renews_and_frees_and_tells_what_went_wrong(tmp_path: Path) -> None:
    renewed = threading.Event()

    class Watched(Folder):
        def create(self, name: str, content: bytes) -> bool:
            made = super().create(name, content)
            if name.endswith("3"):
                renewed.set()
            return made

    lease = Lease(Watched(tmp_path), "k", term_s=0.04)
    assert lease.acquire()
    with lease.kept():
        assert renewed.wait(30)
    assert lease.lost == ""
    assert Lease(Folder(tmp_path), "k").acquire()

    failed = threading.Event()

    class Failing(Folder):
        def create(self, name: str, content: bytes) -> bool:
            if name.endswith("1"):
                return super().create(name, content)
            failed.set()
            raise StoreError(self.url, "gone")

    lease = Lease(Failing(tmp_path), "other", term_s=0.04)
    assert lease.acquire()
    with lease.kept():
        assert failed.wait(30)
    assert "gone" in lease.lost


def test_a_back_end_without_conditions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Folder, "lease_refusal", lambda self: "ftp cannot")
    with pytest.raises(StoreError, match="cannot say who measures: ftp cannot; use a folder, S3 or GCS"):
        Lease(Folder(tmp_path), "k")


TAKE = """
import sys
from pathlib import Path
from ringattn.store.backends.folder import Folder
from ringattn.store.lease import Lease
lease = Lease(Folder(Path(sys.argv[1])), "k")
print("ready", flush=True)
sys.stdin.readline()
print(lease.acquire(), flush=True)
"""


def test_of_many_processes_one_takes_it(tmp_path: Path) -> None:
    start = [sys.executable, "-c", TAKE, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    takers = [subprocess.Popen(start, **pipes) for _ in range(6)]  # type: ignore[call-overload]
    for taker in takers:
        assert taker.stdout.readline() == "ready\n"
    for taker in takers:
        taker.stdin.write("\n")
        taker.stdin.flush()
    taken = [taker.communicate()[0].strip() for taker in takers]
    assert sorted(taken) == ["False"] * 5 + ["True"]


class LosesAnswers:
    """A back end whose next answer to ``create`` is lost once the file is there: the client says so, or asks again."""

    def __init__(self, backend: Backend, again: bool) -> None:
        self._backend, self._again, self.losing = backend, again, False

    def create(self, name: str, content: bytes) -> bool:
        made = self._backend.create(name, content)
        if not self.losing:
            return made
        self.losing = False
        if self._again:  # as clients of S3 do, for which 412 is the answer
            return self._backend.create(name, content)
        raise StoreError(self._backend.url, "connection reset by peer")

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)


@pytest.mark.parametrize("again", [True, False])
def test_a_holder_whose_answer_was_lost_is_not_overtaken_by_itself(backend: Backend, again: bool) -> None:
    losing = LosesAnswers(backend, again)
    one, other = Lease(losing, "k", clock=Clock(0.0)), Lease(backend, "k", clock=Clock(0.0))  # type: ignore[arg-type]

    def until_told(act: Callable[[], bool]) -> bool:
        losing.losing = True
        try:
            return act()
        except StoreError:
            return act()

    assert until_told(one.acquire)
    assert not other.acquire()
    assert until_told(one.renew)
    assert one.renew()
    assert not other.acquire()
    one.release()
    assert other.acquire()
    assert not one.acquire()


def test_a_full_disk_takes_no_number(tmp_path: Path) -> None:
    backend = Folder(tmp_path)
    lease = Lease(backend, "k")
    assert lease.acquire()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(StoreError, match="File too large"):
            lease.renew()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(backend.names("leases")) == 1
    assert lease.renew()
