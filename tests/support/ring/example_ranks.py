"""Runs an example on several ranks, and on one in this process."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from patience import LIMIT_S
from pool import forked, free_port


def run_ranks(example: str, ranks: int, folder: Path, *arguments: str) -> tuple[list[int | None], str, str]:
    """Exit codes, and the output of all ranks: processes that find themselves in what torchrun gives."""
    environment = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        forked(
            _rank, example, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, folder / str(rank), arguments
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.join(LIMIT_S)
        process.kill()
    out, err = ("".join((folder / f"{rank}.{name}").read_text() for rank in range(ranks)) for name in ("out", "err"))
    return [process.exitcode for process in processes], out, err


def _rank(example: str, environment: dict[str, str], output: Path, arguments: tuple[str, ...]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False
    sys.argv = [example, *arguments]
    with (
        output.with_suffix(".out").open("w") as out,
        output.with_suffix(".err").open("w") as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        runpy.run_path(example, run_name="__main__")


def run_here(example: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """The example on one rank, in this process, which has loaded what it needs."""
    monkeypatch.setattr(sys, "argv", [example, *arguments])
    runpy.run_path(example, run_name="__main__")
