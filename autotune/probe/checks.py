"""Checks of a request that need no measurement: a dry run and a probe refuse the same, before anything is started."""

from __future__ import annotations

from pathlib import Path

import optuna

from autotune.exit_codes import ProbeFailure
from autotune.folders import is_there, write_trouble
from autotune.journal.storage.storages import check_storage
from autotune.probe.workloads.grid import check_lengths
from autotune.search.proposing.samplers import sampler_of

from .request import ProbeRequest


def check_request(request: ProbeRequest) -> None:
    """Raise ProbeFailure (UsageFailure) for a length, a sampler or a storage that the search would refuse."""
    check_lengths(request)
    sampler_of(request.sampler, request.seed % 2**32, {}, optuna.samplers.RandomSampler)
    if request.storage is not None:
        check_storage(request.storage)


def check_output(path: Path) -> None:
    """Raise ProbeFailure where no profile can be written at ``path``, whose folder is made when it is."""
    there = next(folder for folder in path.absolute().parents if is_there(folder))
    if is_there(path) and not path.is_file():
        raise ProbeFailure(f"{path}: is not a regular file; choose another --output")
    if trouble := write_trouble(there):
        raise ProbeFailure(f"{path}: cannot be written in {there} ({trouble}); name a file elsewhere with --output")
