"""Measures whether two probes of this machine with different seeds agree: their choices timed against each other.

    python benchmarks/two_probes.py [--seeds A B] [--effort standard] [--device cpu] [--output FOLDER]
    python benchmarks/two_probes.py --profiles FILE FILE

Where two probes chose different plans for a cell, both are timed as a probe does, in paired blocks of random order, at
least 20 and until the interval of the median ratio is within 1 % to both sides. They agree where the plans are one, or
the median differs by no more than 2 %. A cell that only one of them measured is no agreement.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import Record  # noqa: E402

from autotune.measure.benchmark import DeviceBench  # noqa: E402
from autotune.probe.machine.environment import bench_settings  # noqa: E402
from autotune.probe.request import ProbeRequest  # noqa: E402
from autotune.search.budget import EFFORTS  # noqa: E402
from autotune.statistics import Interval, interval_of  # noqa: E402
from ringattn import detect, load_profile  # noqa: E402
from ringattn.workload import Tunables, Workload, describe  # noqa: E402

AGREED = 0.02
HALF_WIDTH = 0.01
FEWEST_BLOCKS, MOST_BLOCKS = 20, 200


def probe(seed: int, effort: str, device: str | None, folder: Path) -> Path:
    """Run a probe that knows nothing of any other; its exit code 6 leaves out the cells it could not measure."""
    path = folder / f"seed-{seed}.yaml"
    command = [sys.executable, "-m", "autotune", "probe", "--effort", effort, "--seed", str(seed), "--fresh"]
    command += ["--output", str(path), *(["--device", device] if device else [])]
    environment = {**os.environ, "XDG_CONFIG_HOME": str(folder / "config")}
    begin = time.perf_counter()
    run = subprocess.run(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    path.with_suffix(".log").write_text(run.stdout)
    print(f"probe with seed {seed}: exit code {run.returncode} after {time.perf_counter() - begin:.1f} s", flush=True)
    if run.returncode not in (0, 6):
        sys.exit(run.stdout)
    return path


def choices_of(path: Path) -> dict[Workload, Tunables]:
    plans = load_profile(path).plans
    return {plan.workload: plan.choice.tunables for plan in plans if plan.choice and plan.evidence}


def timed_against(bench: DeviceBench, workload: Workload, first: Tunables, second: Tunables) -> Interval:
    """Return log(first / second), paired; blocks while the machine was busy with something else do not count."""
    ratios: list[float] = []
    order = random.Random(0)
    for plan in (first, second):
        bench.check(workload, plan, lambda phase: None, None)
    for _ in range(MOST_BLOCKS):
        bench.begin_block()
        ms = {plan: bench.sample(workload, plan).ms for plan in order.sample([first, second], 2)}
        if bench.end_block():
            continue
        ratios.append(math.log(ms[first] / ms[second]))
        if len(ratios) >= FEWEST_BLOCKS and interval_of(ratios, seed=0).half_width <= HALF_WIDTH:
            break
    if len(ratios) < FEWEST_BLOCKS:
        sys.exit(f"{workload}: {len(ratios)} of {MOST_BLOCKS} blocks were undisturbed; quieten the machine")
    return interval_of(ratios, seed=0)


def bench_of(device: str | None, effort: str) -> DeviceBench:
    return DeviceBench(bench_settings(detect(device), ProbeRequest(device=device), EFFORTS[effort]))


def compare(record: Record, paths: list[Path], bench: DeviceBench) -> None:
    first, second = map(choices_of, paths)
    agreed = 0
    cells = sorted(first.keys() | second.keys(), key=str)
    for workload in cells:
        if workload not in first or workload not in second:
            record.add(cell=str(workload), same_plan=False, agree=False, note="measured by one probe only")
            continue
        if first[workload] == second[workload]:
            agreed += 1
            record.add(cell=str(workload), same_plan=True, agree=True, plan=describe(first[workload]))
            continue
        found = timed_against(bench, workload, first[workload], second[workload])
        agree = abs(found.median) <= math.log1p(AGREED)
        agreed += agree
        record.add(
            cell=str(workload),
            same_plan=False,
            agree=agree,
            ratio=found.ratio,
            half_width=found.half_width,
            blocks=found.count,
            plans=[describe(first[workload]), describe(second[workload])],
        )
    record.add(cells=len(cells), agree=agreed, share=agreed / len(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=[1, 2])
    parser.add_argument("--effort", choices=list(EFFORTS), default="standard")
    parser.add_argument("--device", help="as ringtune probe takes it")
    parser.add_argument("--profiles", type=Path, nargs=2, help="compare these instead of probing")
    parser.add_argument("--output", help="folder for two-probes.json, the profiles and what the probes printed")
    arguments = parser.parse_args()
    folder = Path(arguments.output or tempfile.mkdtemp(prefix="two-probes-"))
    folder.mkdir(parents=True, exist_ok=True)
    record = Record("two-probes", arguments.output)
    paths = arguments.profiles or [probe(seed, arguments.effort, arguments.device, folder) for seed in arguments.seeds]
    compare(record, paths, bench_of(arguments.device, arguments.effort))


if __name__ == "__main__":
    main()
