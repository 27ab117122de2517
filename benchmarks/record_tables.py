"""Record a machine for replay: every plan of a few cells, checked once and timed in many random orders.

    python benchmarks/record_tables.py --device cuda --output tests/data/h100.json.gz

A table is complete for the knobs it varies, so the best of it is known; ``benchmarks/tuner_regret.py`` and the
tests search it as if it were the machine. Plans are timed in chunks, every plan once per pass, at least nine passes.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from autotune.measure.benchmark import RUNNERS_KEPT, BenchSettings  # noqa: E402
from autotune.measure.evaluator import Checked, Fault, Sample  # noqa: E402
from autotune.measure.simulated import Row, Table, save_tables  # noqa: E402
from autotune.measure.worker_evaluator import WorkerEvaluator  # noqa: E402
from autotune.probe.cells.space import space_for  # noqa: E402
from autotune.probe.machine.environment import this_machine  # noqa: E402
from autotune.probe.request import ProbeRequest  # noqa: E402
from autotune.probe.workloads.grid import Cell  # noqa: E402
from autotune.space.space import Space, Value  # noqa: E402
from ringattn.hardware.facts import HardwareFacts  # noqa: E402
from ringattn.workload import Pattern, Tunables, Workload  # noqa: E402

REPETITIONS = 9
DROPPED = 6.0  # plans this many times slower than the default at their check are recorded with that one reading
CALL_TIMEOUT_S = 60.0


def cells_of(facts: HardwareFacts) -> tuple[Cell, ...]:
    """Return dense and dilated cells, short and long; two branches, so that all pairs of them can be timed."""
    gpu = facts.vendor == "nvidia"
    heads, head_dim, dtype = (16, 128, "bf16") if gpu else (4, 64, "fp32")
    short, long = (4096, 16384) if gpu else (512, 2048)
    dilated = Pattern.of([2048, 16384], [1, 8]) if gpu else Pattern.of([256, 1024], [1, 4])
    workloads = [
        Workload("infer", True, short, heads, head_dim, dtype),
        Workload("train", True, short, heads, head_dim, dtype),
        Workload("train", True, long, heads, head_dim, dtype),
        Workload("infer", True, long, heads, head_dim, dtype, pattern=dilated),
        Workload("train", True, long, heads, head_dim, dtype, pattern=dilated),
    ]
    return tuple(Cell(workload, (dtype,)) for workload in workloads)


def restricted(space: Space) -> Space:
    """Return the knobs that matter most, so that every combination of them can be timed in minutes."""
    kept: dict[str, tuple[Value, ...]] = {}
    dense, train = space.workload.pattern.dense, space.workload.train
    left_out = ("math",) if dense else ("math", "efficient", "triton")  # far behind on every GPU worth a table
    for name, values in space.knobs.items():
        if name.startswith(("forward.", "backward.")):
            values = tuple(value for value in values if value not in left_out)
        elif name == "checkpoint":
            values = tuple(value for value in values if value in ("selective", "full"))
        elif name == "pool_threshold_mib":
            values = (None, 16) if dense or not train else (None,)
        elif name in ("pattern_cache", "pool_strategy") or name.startswith("param:"):
            values = values if name == "param:triton.forward_tile" and space.workload.pattern.dense else values[:1]
        kept[name] = values
    if on_cpu(space):
        kept |= {name: values for name, values in space.knobs.items() if name.startswith(("forward.", "backward."))}
    return replace(space, knobs=kept)


def on_cpu(space: Space) -> bool:
    return all(value in ("flash-cpu", "math") for value in space.knobs["forward.0"])


def record(space: Space, evaluator: WorkerEvaluator, seed: int) -> Table:
    """Time every plan of the space; print how far it is."""
    workload = space.workload
    plans = list(space.all_plans() or ())
    if space.default not in plans:
        plans.insert(0, space.default)
    began = time.monotonic()
    results = {plan: evaluator.check(workload, plan, timeout_s=CALL_TIMEOUT_S) for plan in plans}
    default = results[space.default]
    assert isinstance(default, Checked), f"the default does not run: {default}"
    timed = [p for p, r in results.items() if isinstance(r, Checked) and r.call_ms < DROPPED * default.call_ms]
    print(
        f"{workload}: {len(plans)} plans, {len(timed)} timed, checked in {time.monotonic() - began:.0f} s", flush=True
    )
    times = _time(workload, timed, evaluator, random.Random(seed))
    rows = {}
    for plan, result in results.items():
        if isinstance(result, Fault):
            rows[plan] = Row(plan, fault=result)
        else:
            rows[plan] = Row(plan, tuple(times.get(plan, [result.call_ms])), result)
    print(f"{workload}: done in {time.monotonic() - began:.0f} s", flush=True)
    return Table(workload, space.default, rows)


def _time(
    workload: Workload, plans: Sequence[Tunables], evaluator: WorkerEvaluator, rng: random.Random
) -> dict[Tunables, list[float]]:
    """Take REPETITIONS readings of each; chunks are small enough for every plan of one to stay warm."""
    times: dict[Tunables, list[float]] = {}
    for _ in range(REPETITIONS):
        order = rng.sample(plans, len(plans))
        for first in range(0, len(order), RUNNERS_KEPT):
            chunk = order[first : first + RUNNERS_KEPT]
            block = evaluator.block(workload, chunk, timeout_s=CALL_TIMEOUT_S)
            for plan, result in zip(chunk, block.results, strict=True):
                if isinstance(result, Sample):
                    times.setdefault(plan, []).append(result.ms)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cells", type=int, nargs="+", help="positions of the cells to record; all unless given")
    options = parser.parse_args()
    request = ProbeRequest(device=options.device, seed=options.seed)
    environment = this_machine(request)
    settings = BenchSettings(
        device=options.device or ("cpu" if environment.facts.vendor == "cpu" else "cuda"),
        facts=environment.facts,
        seed=options.seed,
        sample_target_ms=10.0,
        ragged_lengths=1,
    )
    cells = cells_of(environment.facts)
    chosen = [cells[n] for n in options.cells] if options.cells else list(cells)
    evaluator = WorkerEvaluator(settings)
    tables = []
    try:
        for cell in chosen:
            space = restricted(space_for(cell, environment))
            tables.append(record(space, evaluator, options.seed))
            save_tables(
                tables, options.output, machine=environment.facts.device_name, software=dict(environment.facts.software)
            )
    finally:
        evaluator.close()


if __name__ == "__main__":
    main()
