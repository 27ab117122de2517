"""Measures how much sooner several workers end one search: a simulated probe of 40 cells over a shared storage.

    python benchmarks/shared_search.py postgresql+psycopg://USER@HOST/DATABASE --workers 4
    python benchmarks/shared_search.py grpc://HOST:PORT --workers 4
    python benchmarks/shared_search.py /shared/search.journal --workers 4

Each worker is a process with a simulated machine of its own, as on a node of its own: its seconds are those of the
simulated measurements, in which it sleeps, and of its own CPU time, whatever else runs here. They leave out the round
trips to the storage and the wait for others' last cells, which the wall clock has. With ``--kill 2`` two workers end by
SIGKILL in the middle of a cell. The storage must be empty; it is left with the studies.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import multiprocessing
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

LENGTHS = tuple(round(256 * 1.19**step / 64) * 64 for step in range(20))  # 20, dense, in two modes: 40 cells
PASSING = 1.0  # of simulated time
KILLED_AFTER = 60  # blocks that a worker has timed


def work(storage: str, folder: Path, budget_s: float) -> None:
    """Run one worker to its end."""
    import dataclasses
    import datetime
    from collections.abc import Sequence

    from autotune.measure.evaluator import Block, Checked
    from autotune.measure.simulated import QUIET, ReplayEvaluator, Row, SimulatedClock
    from autotune.probe.machine.environment import environment_of
    from autotune.probe.request import ProbeRequest
    from autotune.probe.tuning import run_probe
    from ringattn.hardware.facts import detect
    from ringattn.workload import Tunables, Workload

    class Sleeping(SimulatedClock):
        """Lets a part of the measurements' time pass, so that workers meet as they would."""

        def advance(self, seconds: float) -> None:
            super().advance(seconds)
            time.sleep(PASSING * seconds)

    def row(cell: Workload, plan: Tunables) -> Row:
        ms = 60.0 * (1.0 + 0.1 * (plan.checkpoint != "selective") + 0.3 * ("math" in plan.kernels))
        return Row(plan, (ms,), Checked(ms, 1e-3, 2**20, ms, 20.0))

    class Counted(ReplayEvaluator):
        """Says which cells it times, also when it is killed."""

        def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
            said.write(f"{cell}\n")
            return super().block(cell, order, timeout_s=timeout_s)

    said = (folder / "blocks").open("w", buffering=1)
    clock = Sleeping(own_s=time.process_time)
    environment = environment_of(detect("cpu"), lambda *_: Counted(row, clock, 0, QUIET), (folder.name,))
    environment = dataclasses.replace(
        environment,
        clock=clock,
        home=folder,
        environ={"XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config")},
        today=datetime.date(2026, 1, 1),
        profiles=(),
    )
    request = ProbeRequest(
        output=folder / "profile.yaml", effort="quick", budget_s=budget_s, seq_lens=LENGTHS, dense=True, storage=storage
    )
    began_s = clock.now()
    run_probe(request, None, environment)
    (folder / "seconds").write_text(str(clock.now() - began_s))


def blocks_of(folder: Path) -> list[str]:
    """Return the cell of each block that a worker has timed."""
    return (folder / "blocks").read_text().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("storage")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kill", type=int, default=0, help="workers to kill")
    parser.add_argument("--budget", type=float, default=160.0, help="seconds of measuring, of all workers together")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / str(number) for number in range(arguments.workers)]
        for folder in folders:
            folder.mkdir()
            (folder / "blocks").touch()
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=work, args=(arguments.storage, folder, arguments.budget)) for folder in folders
        ]
        began_s = time.monotonic()
        for process in processes:
            process.start()
        for folder, process in zip(folders[: arguments.kill], processes, strict=False):
            while process.is_alive() and len(blocks_of(folder)) < KILLED_AFTER:
                time.sleep(0.02)
            process.kill()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes[arguments.kill :]):
            raise SystemExit("a worker failed; its error is above")
        taken_s = time.monotonic() - began_s
        living = folders[arguments.kill :]
        killed = sum(process.exitcode == -signal.SIGKILL for process in processes)
        hashes = {hashlib.sha256((folder / "profile.yaml").read_bytes()).hexdigest()[:12] for folder in living}
        seconds = [float((folder / "seconds").read_text()) for folder in living]
        blocks = [blocks_of(folder) for folder in folders]
        workers_of = Counter(itertools.chain.from_iterable(map(set, blocks)))
        print(
            f"{arguments.workers} workers, {killed} killed: {max(seconds):.1f} s on the busiest node, {taken_s:.1f} s "
            f"by the wall clock here; {sum(map(len, blocks))} blocks of {len(workers_of)} cells, "
            f"{sum(count > 1 for count in workers_of.values())} of them timed by more than one worker; "
            f"profiles {', '.join(sorted(hashes))}"
        )


if __name__ == "__main__":
    main()
