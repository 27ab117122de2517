"""Measures how far from the best the tuner ends, and Optuna's samplers with its privileges, in simulated time.

    python benchmarks/tuner_regret.py --seeds 40 --output benchmarks/results/tuner-regret.json

Machines are the five invented kinds of benchmarks/regret/machines.py, each under three noises, every table recorded in
tests/data, and one whose knobs all interact. Every seed tunes one cell in 8 simulated seconds: checks, first calls,
readings and proofs cost what they cost on a machine, and the CPU time that a method itself takes is charged, too.
Regret is t(chosen) / t(best) - 1 with true times; a plan that is wrong has an infinite one. The rivals time uniform
plans first, dismiss slow ones early, time the best few again, keep the default unless it is beaten by a margin, and
validate what they choose. Prints one table; choices that the study's sampler proposed, those that were enqueued and
kept defaults are three shares of it, and the first is given of all that were not enqueued, too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from regret.machines import INSTANCES, KINDS  # noqa: E402
from regret.methods import METHODS, be_quiet  # noqa: E402
from regret.problems import CELL_BUDGET_S, NOISES, names, problem_of, working_clock  # noqa: E402
from regret.table import NOISE_FLOOR, Line, Outcome, line_of, lines_of, printed  # noqa: E402

from ringattn import __version__  # noqa: E402

Task = tuple[str, str, str, int]  # machine, noise, method, seed


def run_one(task: Task) -> Outcome:
    """Run one method on one problem with one seed; tasks are plain so that processes can share them."""
    machine, noise, method, seed = task
    problem = problem_of(machine, noise, seed)
    clock = working_clock()
    choice = METHODS[method](problem, seed, clock)
    spent_s = clock.now()
    right = problem.is_right(choice.plan)
    ms = problem.true_ms(choice.plan) if right else math.inf
    to_default = ms / problem.default_ms if right else 1.0
    return Outcome(
        machine=machine,
        noise=noise,
        method=method,
        cell=problem.cell,
        seed=seed,
        regret=ms / problem.best_ms - 1,
        to_default=to_default,
        ms=ms,
        wrong=not right,
        by=choice.by,
        spent_s=spent_s,
        own_s=clock.charged_s,
        claimed=choice.claimed / to_default,
    )


def prepare() -> None:
    """Load everything that a first run would otherwise be charged for."""
    be_quiet()
    for method in METHODS.values():
        method(problem_of("two-optima", "drift", 0), 0, working_clock())


def tasks_of(options: argparse.Namespace) -> list[Task]:
    """Return tasks; seeds that tune the same instance stand together, as finding its best takes a second."""
    return [
        (machine, noise, method, seed)
        for machine in options.kinds
        for noise in (options.noises if machine in KINDS else options.noises[:1])
        for method in options.methods
        for instance in range(INSTANCES)
        for seed in range(
            instance, min(options.seeds, options.gp_seeds if method == "GP" else options.seeds), INSTANCES
        )
    ]


def document(lines: Sequence[Line], outcomes: Sequence[Outcome], seeds: int) -> str:
    """Return the table as JSON, with each cell apart."""
    cells = []
    for key in dict.fromkeys((o.machine, o.noise, o.method, o.cell) for o in outcomes):
        found = [o for o in outcomes if (o.machine, o.noise, o.method, o.cell) == key]
        cells.append({"cell": key[3]} | asdict(line_of(*key[:3], found)))
    packages = {name: importlib.metadata.version(name) for name in ("numpy", "optuna", "torch")}
    return json.dumps(
        {
            "versions": {"python": platform.python_version(), "ringtune": __version__} | packages,
            "seeds": seeds,
            "cell_budget_s": CELL_BUDGET_S,
            "noise_floor": NOISE_FLOOR,
            "noises": {
                name: {field: value for field, value in asdict(noise).items() if math.isfinite(value)}
                for name, noise in NOISES.items()
            },
            "lines": [asdict(line) for line in lines],
            "cells": cells,
        },
        indent=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--gp-seeds", type=int, default=40, help="of GP at most, whose fits take longer than the rest")
    parser.add_argument("--kinds", nargs="+", choices=names(), default=list(names()), metavar="KIND")
    parser.add_argument("--noises", nargs="+", choices=list(NOISES), default=list(NOISES))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=None, help="where the numbers go as JSON")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs, initializer=prepare) as pool:
        outcomes = list(pool.map(run_one, tasks_of(options), chunksize=5))
    lines = lines_of(outcomes, list(KINDS))
    print(printed(lines))
    if options.output is not None:
        options.output.write_text(document(lines, outcomes, options.seeds) + "\n")


if __name__ == "__main__":
    main()
