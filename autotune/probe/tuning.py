"""The tuner's front door. The engine, with torch and optuna, is loaded when it is called."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.children import has_temporary_folder
from autotune.exit_codes import ProbeFailure
from autotune.probe.machine.ranks_environment import environment_of_ranks, facts_of_ranks
from ringattn.profile.locations import home_folder, user_folder
from ringattn.profile.yaml_io import load_profile
from ringattn.wording import plural

from .request import ProbeObserver, ProbeRequest, ProbeResult, VerifyResult

if TYPE_CHECKING:
    from autotune.probe.machine.environment import Environment
    from autotune.probe.workloads.grid import Cell


def run_probe(
    request: ProbeRequest, observer: ProbeObserver | None = None, environment: Environment | None = None
) -> ProbeResult:
    """Measure this machine for ``request`` and write its profile; an unchanged machine is verified instead.

    ``environment`` stands in for this machine. Raises ProbeFailure (with its exit code) when nothing can be measured,
    when every cell is inconclusive, when another probe holds the profile; KeyboardInterrupt passes through after the
    journal is safe.
    """
    from autotune.probe.machine.device_lock import device_lock
    from autotune.probe.machine.environment import this_machine

    from .added_kernels import AddedKernels
    from .checks import check_request
    from .dry_run import dry_run
    from .probe_context import ProbeContext
    from .run import ProbeRun

    observer = observer or ProbeObserver()
    check_request(request)
    if request.dry_run:
        environment = environment or this_machine(request)
        environment = replace(environment, facts=facts_of_ranks(environment.facts, request.ranks, environment.environ))
        path, cells = _asked(request, observer, environment)
        return dry_run(ProbeContext.of(request, observer, environment), path, cells)
    if request.ranks > 1:  # told before ranks start, which takes 16 s on two cores
        _check_file(request, environment)
    if not has_temporary_folder():
        observer.note("no folder for temporary files: what torch would compile fails; name one with TMPDIR")
    with _surroundings(request, environment) as environment:
        path, cells = _asked(request, observer, environment)
        with device_lock(request, environment, observer.note):
            run = AddedKernels if request.add_kernels else ProbeRun
            return run(ProbeContext.of(request, observer, environment), path, cells).run()


def _check_file(request: ProbeRequest, environment: Environment | None) -> None:
    """Raise ProbeFailure where the profile cannot be written, ProfileError where it is there and broken."""
    from .checks import check_output

    environ, home = (os.environ, home_folder()) if environment is None else (environment.environ, environment.home)
    path = request.output or user_folder(environ, home) / "profile.yaml"  # its name is not known before the ranks
    check_output(path)
    if request.resume and request.output is not None and request.output.exists():
        load_profile(request.output)


def _asked(request: ProbeRequest, observer: ProbeObserver, environment: Environment) -> tuple[Path, tuple[Cell, ...]]:
    """Return where the profile goes and what is measured for it; say what is not."""
    from autotune.probe.machine.environment import default_profile_path
    from autotune.probe.workloads.grid import cells_for, left_out

    from .checks import check_output

    cells = () if request.add_kernels else cells_for(request, environment.facts)  # those are the profile's
    if cells and (large := left_out(request, environment.facts)):
        observer.note(large)
    path = request.output or default_profile_path(environment, request.ranks)
    check_output(path)
    return path, cells


def verify_profile(
    path: Path, request: ProbeRequest, observer: ProbeObserver | None = None, environment: Environment | None = None
) -> VerifyResult:
    """Re-time the recorded winners of ``path`` on this machine; of ``request`` device, seed, effort and budget count.

    Rows for other numbers of ranks than the request's are left out, and counted. ``environment`` stands in for this
    machine. Raises ProfileError for a broken file, ProbeFailure for one of another machine or without such rows.
    """
    from autotune.probe.machine.device_lock import device_lock

    from .probe_context import ProbeContext
    from .verify import check_same_silicon, entries_over, how_to_verify, verify_cells

    observer = observer or ProbeObserver()
    profile = load_profile(path)
    if profile.source != "measured" or not profile.plans:
        raise ProbeFailure(f"{path}: holds no measured plans, so there is nothing to verify; run: ringtune probe")
    entries = entries_over(profile, request.ranks, path)
    others = [entry.workload.world for entry in profile.plans if entry.workload.world != request.ranks]
    if others:
        worlds = sorted(set(others))
        of = f"{', '.join(map(str, worlds))} {'rank' if worlds == [1] else 'ranks'}"
        how = how_to_verify(worlds, path)
        observer.note(f"{path.name}: {plural(len(others), 'row')} for {of} left out; judged by: {how}")
    if all(entry.evidence is None for entry in entries):
        raise ProbeFailure(
            f"{path}: none of its plans was measured, so there is nothing to verify; run: ringtune probe"
        )
    if unmeasured := sum(entry.choice is not None and entry.evidence is None for entry in entries):
        observer.note(f"{path.name}: {plural(unmeasured, 'row')} that could not be measured left out; probe again")
    with _surroundings(request, environment) as environment:
        check_same_silicon(profile, environment.facts, path, request.ranks)
        with device_lock(request, environment, observer.note):
            result = verify_cells(ProbeContext.of(request, observer, environment), profile, entries)
    return replace(result, other_ranks=len(others))


@contextlib.contextmanager
def _surroundings(request: ProbeRequest, environment: Environment | None) -> Iterator[Environment]:
    """Yield ``environment`` if given, else this machine or all ranks of the request, which run until the block ends."""
    from autotune.probe.machine.environment import this_machine

    if environment is not None:
        yield environment
    elif request.ranks == 1:
        yield this_machine(request)
    else:
        with environment_of_ranks(request) as found:
            yield found
