"""Ranks for tests: processes on gloo that stay alive and run one function after the other, all at the same time.

The store is the test process's own, so that any rank may die. Processes are forked from a server that has torch, and
what tests of ranks share, loaded already.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import LIMIT_S, patient

from ringattn.distributed.watchdog import WatchdogTimes, watchdog_of

GROUP_TIMEOUT_S = LIMIT_S / 2  # what outlasts it is named, before the test gives up
# Ranks of one machine notice at once what they notice at all.
TIMES = WatchdogTimes(beat_s=0.2, silent_after_error_s=patient(2.0))
_PRELOADED = [
    "pytest",
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",  # with sympy: of the first gradient, 0.3 s in every rank
    "ringattn.attention",
    "ringattn.distributed.context",
    "ringattn.modules.pool",  # 0.7 s
    "ring_cases",
    "faults",
    "padded_models",  # with transformers: 1.3 s
    "transformers.models.llama.modeling_llama",  # 1.5 s
]
_context = multiprocessing.get_context("forkserver")


def _start_server() -> None:
    """The server that ranks are forked from. Before Python 3.13 it gets no sys.path but by the environment."""
    here = Path(__file__).parent
    folders = [str(here), str(here.parent / "ringattn"), str(here.parents[2])]
    _context.set_forkserver_preload(_PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(folders + sys.path))
        forkserver.ensure_running()


def forked(function: Callable[..., None], *arguments: Any) -> Any:
    """A process that runs ``function``, forked from the server."""
    _start_server()
    process = _context.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _rank_main(
    rank: int, world: int, port: int, name: str, timeout_s: float, times: WatchdogTimes | None, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    if times is not None:
        watchdog_of(dist.group.WORLD, torch.device("cpu"), times)  # type: ignore[arg-type]
    pipe.send(("ready", None))
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            pipe.send(("done", function(*arguments)))
        except BaseException:  # noqa: BLE001  the test shows it
            pipe.send(("failed", f"rank {rank}:\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class Pool:
    """``world`` ranks; ``run`` gives the same function to all and returns what each gave."""

    _store: dist.TCPStore | None = None
    _made = 0

    def __init__(self, world: int, timeout_s: float = GROUP_TIMEOUT_S, times: WatchdogTimes | None = TIMES) -> None:
        """``times`` are those of the ranks' watchdog, which begins here; None leaves it to the first module."""
        if Pool._store is None:
            _start_server()
            Pool._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        Pool._made += 1
        self.world, self.alive = world, True
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            here, there = _context.Pipe()
            arguments = (rank, world, Pool._store.port, f"pool{Pool._made}", timeout_s, times, there)
            process = _context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)
        self._collect(range(world), LIMIT_S)

    def run(self, function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> list[Any]:
        self.start(function, *arguments)
        return self._collect(range(self.world), limit_s)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        for pipe in self._pipes:
            pipe.send((function, arguments))

    def results_of(self, ranks: list[int], limit_s: float = LIMIT_S) -> list[Any]:
        """What these ranks give; the others are left alone."""
        return self._collect(ranks, limit_s)

    def _collect(self, ranks: Any, limit_s: float) -> list[Any]:
        deadline = time.monotonic() + limit_s
        results, faults = [], []
        for rank in ranks:
            pipe = self._pipes[rank]
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self.kill()
                raise AssertionError(f"rank {rank} of {self.world} gave nothing within {limit_s:g} s")
            try:
                kind, value = pipe.recv()
            except EOFError:
                self.kill()
                raise AssertionError(f"rank {rank} of {self.world} died") from None
            if kind == "failed":
                faults.append(value)
            results.append(value)
        if faults:
            self.kill()  # the ranks may be out of step with each other now
            raise AssertionError("\n".join(faults))
        return results

    def stop(self) -> None:
        """An orderly end."""
        if self.alive:
            for pipe in self._pipes:
                pipe.send(None)
            for process in self.processes:
                process.join(10)
            self.kill()

    def kill(self) -> None:
        self.alive = False
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)


def kill_self() -> None:
    os.kill(os.getpid(), 9)
