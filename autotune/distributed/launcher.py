"""Launchers of ranks: what torchrun tells a process, and what ``--nproc`` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.exit_codes import UsageFailure
from ringattn.wording import plural

_TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
EVERY_GPU = "gpu"
THREADS = "OMP_NUM_THREADS"  # that a rank on a CPU computes with


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """One of ``world`` ranks that torchrun started; ``attempt`` counts its restarts."""

    rank: int
    world: int
    local_rank: int
    master_host: str
    master_port: int
    attempt: int = 0


def torchrun_rank(environ: Mapping[str, str]) -> TorchrunRank | None:
    """Return what torchrun says of this process; None without torchrun, or for its only rank.

    Raises UsageFailure for variables that make no sense together.
    """
    if not all(name in environ for name in _TOLD):
        return None
    numbers = {"LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"} | dict(environ)
    try:
        rank, world, port, local_rank, attempt = (
            int(numbers[name])
            for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
        )
    except ValueError as error:
        raise UsageFailure(f"one of {', '.join(_TOLD)}, LOCAL_RANK is no number ({error}); use torchrun") from None
    if not 0 <= rank < world:
        raise UsageFailure(f"RANK is {rank} and WORLD_SIZE {world}; start the ranks with torchrun, or use --nproc")
    if world == 1:
        return None
    return TorchrunRank(rank, world, local_rank, environ["MASTER_ADDR"], port, attempt)


def ranks_here(ranks: int, environ: Mapping[str, str]) -> int:
    """Return how many of ``ranks`` are on this host: those that torchrun started here, or all that we start."""
    if torchrun_rank(environ) is None:
        return ranks
    here = environ.get("LOCAL_WORLD_SIZE", "1")
    return min(ranks, int(here)) if here.isdecimal() else 1


def started_by_torchrun(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun waits for this process, also as the only rank."""
    return "TORCHELASTIC_RUN_ID" in environ


def ranks_wanted(nproc: str | None, launched: TorchrunRank | None, gpus: int, device: str | None) -> int:
    """Return how many ranks to tune as one. ``gpus`` are those torch sees here, of which a rank takes one.

    Raises UsageFailure for what cannot be: two launchers, too few GPUs, a single GPU named for all.
    """
    if launched is not None and nproc is not None:
        raise UsageFailure(f"torchrun started {launched.world} ranks already, so --nproc {nproc} cannot; leave it out")
    if launched is None and nproc is None:
        return 1
    on_gpus = gpus > 0 if device is None else device.startswith("cuda")
    if launched is not None:
        count = launched.world
    elif nproc == EVERY_GPU:
        if not on_gpus or not gpus:
            raise UsageFailure("--nproc gpu: there is no GPU here; give a number of processes")
        count = gpus
    else:
        count = int(nproc or 1)
        if on_gpus and count > gpus:
            raise UsageFailure(f"--nproc is {count}, but torch sees {plural(gpus, 'GPU')} here; a rank takes one GPU")
    if count > 1 and device is not None and ":" in device:
        raise UsageFailure(
            f"--device {device} names one device for {count} ranks; leave it out, or use cpu or cuda: "
            "each rank takes the GPU of its local rank"
        )
    return count
