"""The process in which candidates run and may die: ``python -m autotune.measure.worker FD``.

Reads requests from a socket it inherits, answers in messages, and ends when the other side is gone. What a
candidate does wrong becomes a Fault; what this code does wrong is sent whole and raised by the parent.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ringattn.device_errors import is_out_of_memory, is_sticky
from ringattn.distributed.peer_errors import PeerError
from ringattn.errors import DeviceError, KernelLoadError
from ringattn.hardware.cgroups import available_bytes, data_bytes

from .bench import ChecksKernels, PeerWrong, WrongAnswer
from .evaluator import Cause, FailureKind, Fault, KernelUnavailable, PeerFailed
from .messages import Message, Request

if TYPE_CHECKING:
    from .bench import Bench, BenchSettings

MESSAGE_LIMIT = 300
MEMORY_SHARE = 0.9  # of what is available when the worker starts; beyond it a CPU candidate is out of memory

_PR_SET_PDEATHSIG = 1

_COMPILE_MODULES = ("triton.compiler", "triton.runtime", "torch._dynamo", "torch._inductor")


def one_line(error: BaseException) -> str:
    """Return the first line that is not empty, bounded."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:MESSAGE_LIMIT] if text else type(error).__name__


def classify(error: BaseException) -> tuple[FailureKind, bool]:
    """Return the kind of a candidate's exception, and whether this process can still be used after it."""
    names = {cls.__name__ for cls in type(error).__mro__}
    module = type(error).__module__
    if is_out_of_memory(error):
        return "oom", True
    if isinstance(error, WrongAnswer):
        return "wrong", True
    if is_sticky(error):
        return "crash", False
    if module.startswith(_COMPILE_MODULES) or "CompilationError" in names or "InductorError" in names:
        return "compile", True
    return "error", True


def cause_of(error: BaseException) -> Cause | None:
    """Return the cause of a candidate's exception, where something is decided by it."""
    if isinstance(error, KernelLoadError):
        return KernelUnavailable(error.kernel, str(error)[:MESSAGE_LIMIT])
    return PeerFailed() if isinstance(error, PeerError | PeerWrong) else None


def run_worker(connection: Connection, bench: Bench) -> None:
    """Serve requests until told to stop, or until the other side is gone."""
    while True:
        try:
            request: Request = connection.recv()
        except EOFError:
            return
        if request.action == "stop":
            return
        if request.action == "block":
            _serve_block(connection, bench, request)
        else:
            _serve_one(connection, bench, request)


def _serve_one(connection: Connection, bench: Bench, request: Request) -> None:

    def phase(name: str) -> None:
        connection.send(Message("phase", 0, name))

    def run() -> Any:
        if request.action == "links":
            return bench.links()
        if request.combination is not None:
            assert isinstance(bench, ChecksKernels)
            return bench.check_kernel(request.combination, request.rows)
        workload = request.workload
        assert workload is not None
        if request.action == "check":
            return bench.check(workload, request.plans[0], phase, request.pace_ms)
        if request.action == "validate":
            return bench.validate(workload, request.plans[0], phase, request.part)
        if request.action == "first-call":
            return bench.first_call(workload, request.plans[0])
        return bench.run_profile(workload, request.profile_path)

    connection.send(Message("done", 0, _guarded(connection, bench, run, phase, alone=not request.lockstep)))


def _serve_block(connection: Connection, bench: Bench, request: Request) -> None:
    workload = request.workload
    assert workload is not None
    bench.begin_block(request.pool_processes)
    for index, plan in enumerate(request.plans):
        connection.send(Message("phase", index, "candidate"))
        result = _guarded(
            connection,
            bench,
            lambda plan=plan: bench.sample(workload, plan),  # type: ignore[misc]
            lambda name: None,
            alone=not request.lockstep,
        )
        connection.send(Message("result", index, result))
        if request.lockstep and isinstance(result, Fault):
            break
    connection.send(Message("done", 0, bench.end_block()))


def _guarded(
    connection: Connection, bench: Bench, run: Callable[[], Any], phase: Callable[[str], None], *, alone: bool
) -> Any:
    """Return the result or a Fault. An out-of-memory is tried once more, with all other buffers released.

    Not where other ranks take part (not ``alone``): they are not trying again.
    """
    for attempt in range(2):
        try:
            return run()
        except AssertionError:
            raise  # ours, not the candidate's
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything, and all of it is its own fault
            kind, usable = classify(error)
            fault = Fault(kind, one_line(error), cause_of(error))
            error.__traceback__ = None  # it holds the tensors of the failed call
        if not usable:
            connection.send(Message("done", 0, fault))
            os._exit(1)
        release_all = getattr(bench, "release_all", None)
        if fault.kind != "oom" or attempt or release_all is None or not alone:
            return fault
        release_all()
        phase("candidate")
    raise AssertionError("unreachable")


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, also when the parent is killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it ended before the request was in place


def _limit_memory(ranks: int) -> None:
    """Limit memory, so that a CPU candidate that wants too much gets an error and the machine or container lives.

    ``ranks`` share what there is. Where that is unknown there is no limit. What this process has already counts apart:
    importing torch takes 0.2 GiB of addresses, and with its profiler it did not load below a limit of 0.45 GiB.
    """
    available = available_bytes()
    if available is None:
        return
    limit = data_bytes() + int(available * MEMORY_SHARE / ranks)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _load_bench(name: str, settings: BenchSettings) -> Bench:
    module, _, attribute = name.partition(":")
    bench: Bench = getattr(importlib.import_module(module), attribute)(settings)
    return bench


def main(arguments: Sequence[str]) -> None:
    """Run a worker; arguments: the inherited socket, the parent's process id, the bench to load."""
    descriptor, parent, bench_name = int(arguments[0]), int(arguments[1]), arguments[2]
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends this process
    connection = Connection(descriptor)
    settings: BenchSettings = connection.recv()
    try:
        bench = _load_bench(bench_name, settings)
        if settings.device == "cpu":
            _limit_memory(settings.rendezvous.world if settings.rendezvous is not None else 1)
        connection.send(Message("ready", 0, bench.unmonitored()))
        run_worker(connection, bench)
        os._exit(0)  # taking torch apart takes a second that the probe would wait for
    except BrokenPipeError:
        return
    except DeviceError as error:
        connection.send(Message("no-device", 0, str(error)))
    except Exception:  # noqa: BLE001 - a bug of ours, raised whole in the parent
        connection.send(Message("bug", 0, traceback.format_exc()))


if __name__ == "__main__":
    main(sys.argv[1:])
