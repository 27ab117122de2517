"""Environment of several ranks that are tuned as one, and the command on ranks other than 0."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.distributed.launcher import THREADS, ranks_wanted, torchrun_rank
from autotune.measure.evaluator import Evaluator
from autotune.probe.request import ProbeRequest
from autotune.search.budget import EffortPreset
from ringattn.hardware.facts import HardwareFacts

if TYPE_CHECKING:
    from .environment import Environment


def ranks_of(nproc: str | None, device: str | None) -> int:
    """Return the number of ranks that the command line and torchrun ask for; see ``launcher.ranks_wanted``."""
    launched = torchrun_rank(os.environ)
    if launched is None and nproc is None:
        return 1  # without importing torch
    import torch

    return ranks_wanted(nproc, launched, torch.cuda.device_count(), device)


def is_follower() -> bool:
    """Return whether torchrun started this process as another rank than 0."""
    launched = torchrun_rank(os.environ)
    return launched is not None and launched.rank > 0


def follow_rank_0() -> None:
    """Run the command on another rank than 0: measure what rank 0 asks, print nothing but errors."""
    from autotune.distributed.coordinator import follow

    launched = torchrun_rank(os.environ)
    assert launched is not None
    follow(launched)


def facts_of_ranks(facts: HardwareFacts, ranks: int, environ: Mapping[str, str]) -> HardwareFacts:
    """Return the facts that ranks started here would find: on CPUs one thread each unless told otherwise."""
    starts = ranks > 1 and torchrun_rank(environ) is None
    return replace(facts, threads=1) if starts and facts.vendor == "cpu" and THREADS not in environ else facts


@contextlib.contextmanager
def environment_of_ranks(request: ProbeRequest) -> Iterator[Environment]:
    """Yield the environment of ``request.ranks`` ranks, whose processes run until the block is left.

    Raises ProbeFailure (NoDevice, UsageFailure) where they cannot be gathered or are not alike.
    """
    import torch

    from autotune.distributed.coordinator import Coordinator
    from autotune.distributed.evaluator import RanksEvaluator
    from autotune.measure.pool.worker_pool import pool_size_here

    from .environment import bench_settings, devices_of, environment_of

    kind = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with Coordinator(request.ranks, kind, torchrun_rank(os.environ), os.environ) as coordinator:

        def evaluator(facts: HardwareFacts, request: ProbeRequest, preset: EffortPreset) -> Evaluator:
            settings = bench_settings(facts, request, preset)
            # What is compiled lies on the disk of one host, and the others would wait for their own first calls.
            workers = 0 if facts.vendor == "cpu" or coordinator.hosts > 1 else pool_size_here(facts)
            return RanksEvaluator(coordinator, settings, workers=workers, reference_timeout_s=preset.budget_s)

        yield environment_of(coordinator.facts, evaluator, devices_of(request))
