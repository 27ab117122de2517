"""Two hosts with a store between them: eight nodes start one command, one measures, a killed one is replaced."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from network_hosts import NOBODY, drop_what_is_sent_to_nobody, s3_server, two_hosts
from patience import LIMIT_S, slowness
from warm_start import Server, WarmPopen, popen_of

ROOT = Path(__file__).parents[4]
# One small cell.
CELL = (
    "--device",
    "cpu",
    "--seq-len",
    "64",
    "--heads",
    "1",
    "--head-dim",
    "8",
    "--dense",
    "--mode",
    "infer",
    "--causal",
)
SEARCH = ("--effort", "quick", "--budget", "120")
TERM_S = 5.0 * slowness()  # of a lease, in place of a minute
MEASURES, WAITS = "cell 1/1", "measures cpu-"  # what a node says of itself, and of another

# The command on this machine with invented times, so that what else runs here decides nothing. It goes on when a file
# is there, so that all others have come meanwhile, and a node that is to be killed in the middle of it never does.
NODE = """
import os, sys, time
from dataclasses import replace
from machines import row_of
from probed_machine import truth
from autotune.measure.simulated import QUIET, ReplayEvaluator, SimulatedClock
from autotune.probe import tuning
from autotune.probe.machine.environment import this_machine
from ringattn.store.lease import Lease
Lease.__init__.__kwdefaults__["term_s"] = float(sys.argv.pop(1))
goes_on = sys.argv.pop(1)
run_probe, clock = tuning.run_probe, SimulatedClock()

class Evaluator(ReplayEvaluator):
    def check(self, *cell, **limits):
        while not os.path.exists(goes_on):
            time.sleep(0.1)
        return super().check(*cell, **limits)

def simulated(request, observer):
    def evaluator(*_):
        return Evaluator(row_of(truth), clock, 0, QUIET)
    return run_probe(request, observer, replace(this_machine(request), evaluator=evaluator, clock=clock))

tuning.run_probe = simulated
from autotune.__main__ import main
main()
"""
# Reads every profile of the store again and again, as a node would, until its input ends. While there is none it looks
# less often: for as long as a lease lasts it would keep a core busy, and the server another.
READER = """
import json, select, sys
from ringattn.store.backends.backend import open_backend
from ringattn.store.store import Store
store, reads, faults = Store(open_backend(sys.argv[1])), 0, []
print("ready", flush=True)
names = ()
while not select.select([sys.stdin], [], [], 0.02 if names else 0.2)[0]:
    names = tuple(store.names())
    for name in names:
        try:
            store.profile(name)
            reads += 1
        except Exception as error:
            faults.append(f"{type(error).__name__}: {error}")
print(json.dumps([reads, faults]))
"""


@dataclass(frozen=True)
class Stage:
    """Two hosts, and a store that both reach, with the variables that it takes."""

    on_host: tuple[type[WarmPopen], type[WarmPopen]]
    store: str
    variables: dict[str, str]
    folder: Path

    def start(self, host: int, own: str, *command: str) -> subprocess.Popen[str]:
        """A process on a host, with a home of its own."""
        path = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support" / "autotune")))
        environment = {**os.environ, **self.variables, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        for variable, folder in (("XDG_CACHE_HOME", "cache"), ("XDG_CONFIG_HOME", "config"), ("HOME", "home")):
            (self.folder / own / folder).mkdir(parents=True, exist_ok=True)
            environment[variable] = str(self.folder / own / folder)
        words, pipe = [sys.executable, *command], subprocess.PIPE
        return self.on_host[host](words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=ROOT)

    def node(self, number: int, goes_on: Path) -> subprocess.Popen[str]:
        """A node that asks for a profile as all others of its kind do; even ones are on the first host."""
        ask = ("probe", "--if-missing", "--wait", str(LIMIT_S), "--store", self.store, "--json", *CELL, *SEARCH)
        return self.start(number % 2, f"node{number}", "-c", NODE, str(TERM_S), str(goes_on), *ask)

    @contextmanager
    def read_all_along(self) -> Iterator[None]:
        """Read from the second host while the block runs: no read may fail, and some must succeed."""
        reader = self.start(1, "reader", "-c", READER, self.store)
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            told, complaints = reader.communicate()
        reads, faults = json.loads(told or "[0, []]")
        assert faults == [], faults[:3]
        assert reads > 0, complaints


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def on_host(hosts: tuple[str, str]) -> Iterator[tuple[type[WarmPopen], type[WarmPopen]]]:
    needed = ("machines", "probed_machine", *(["s3fs"] if importlib.util.find_spec("s3fs") else []))
    first, second = (Server.new("ip", "netns", "exec", host, loaded=needed) for host in hosts)
    with closing(first), closing(second):
        yield popen_of(first), popen_of(second)


@pytest.fixture(scope="module")
def s3(hosts: tuple[str, str]) -> Iterator[dict[str, str]]:
    with s3_server(hosts[0]) as variables:
        yield variables


@pytest.fixture(params=["folder", "s3"])
def stage(
    request: pytest.FixtureRequest,
    on_host: tuple[type[WarmPopen], type[WarmPopen]],
    tmp_path: Path,
) -> Stage:
    if request.param == "s3":
        return Stage(on_host, f"s3://bucket/{tmp_path.name}", request.getfixturevalue("s3"), tmp_path)
    (tmp_path / "shared").mkdir()
    return Stage(on_host, str(tmp_path / "shared"), {}, tmp_path)


def answers(nodes: list[subprocess.Popen[str]]) -> list[dict[str, object]]:
    """What nodes print; each must end well, with the very file that the store holds."""
    found = []
    for node in nodes:
        out, err = node.communicate(timeout=2 * LIMIT_S)
        assert node.returncode == 0, err
        answer = json.loads(out)
        path = Path(answer["profile_path"])
        assert path.name == f"x1-{hashlib.sha256(path.read_bytes()).hexdigest()}.yaml"
        found.append(answer)
    assert len({Path(str(answer["profile_path"])).name for answer in found}) == 1
    return found


def read_until(node: subprocess.Popen[str], *told: str) -> str:
    """Return the first of what is ``told`` that a node says."""
    assert node.stderr is not None
    while line := node.stderr.readline():
        for text in told:
            if text in line:
                return text
    raise AssertionError(f"the node ended without {told}")


@pytest.mark.timeout(600)
def test_of_eight_nodes_on_two_hosts_one_measures(stage: Stage) -> None:
    with stage.read_all_along():
        all_came = stage.folder / "all came"
        nodes = [stage.node(number, all_came) for number in range(8)]
        told = [read_until(node, MEASURES, WAITS) for node in nodes]
        assert sorted(told) == [MEASURES] + [WAITS] * 7
        all_came.touch()
        found = answers(nodes)
    assert sorted(answer["measured"] for answer in found) == [False] * 7 + [True]
    which = stage.start(1, "node1", "-m", "autotune", "which", "--device", "cpu", "--store", stage.store, "--json")
    out, err = which.communicate(timeout=LIMIT_S)
    assert which.returncode == 0, err
    assert Path(json.loads(out)["path"]).name == Path(str(found[0]["profile_path"])).name


@pytest.mark.timeout(600)
def test_another_host_takes_over_from_one_that_is_killed_while_it_measures(stage: Stage) -> None:
    with stage.read_all_along():
        dead = stage.node(0, stage.folder / "never")
        read_until(dead, MEASURES)
        dead.send_signal(signal.SIGSTOP)  # it shall not be done before the others have looked
        heirs = [stage.node(number, stage.folder) for number in (1, 2, 3)]
        read_until(heirs[0], WAITS)
        dead.send_signal(signal.SIGKILL)
        assert dead.wait() == -signal.SIGKILL
        found = answers(heirs)
    assert sorted(answer["measured"] for answer in found) == [False, False, True]


def test_a_store_that_drops_every_packet_is_said_once(
    hosts: tuple[str, str], on_host: tuple[type[WarmPopen], type[WarmPopen]], tmp_path: Path
) -> None:
    pytest.importorskip("s3fs")
    drop_what_is_sent_to_nobody(hosts)
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    stage = Stage(on_host, "s3://bucket/ringtune", {**keys, "AWS_ENDPOINT_URL": f"http://{NOBODY}:9000"}, tmp_path)
    asked = stage.start(0, "node", "-m", "autotune", "which", "--device", "cpu", "-v", "--store", stage.store)
    out, err = asked.communicate(timeout=LIMIT_S)
    assert asked.returncode == 4
    told = [line for line in err.splitlines() if "s3://" in line]
    assert told == ["warning: s3://bucket/ringtune: did not answer within 1 s; skipped"]
