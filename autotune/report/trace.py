"""Measures where the time of a step goes, by the named ranges of ``ringattn`` under torch's profiler."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType

from autotune.accuracy.inputs import make_inputs
from autotune.display_text import format_ms
from autotune.distributed.launcher import TorchrunRank
from autotune.exit_codes import UsageFailure
from autotune.measure.evaluator import Interference, largest_of_each
from autotune.measure.interference import InterferenceMonitor
from autotune.measure.module_calls import build_module, caller
from autotune.measure.rank_agreement import siblings_in
from ringattn.planning.module_setup import device_of
from ringattn.profile.schema import Profile
from ringattn.runtime.ranges import PREFIX, named_ranges
from ringattn.wording import plural
from ringattn.workload import Workload, describe

STEP = "ringtune::step"
OTHER = "everything else"
WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class TracedRange:
    """Range of a step: how often it comes, and its ms of the host and of the device in one step."""

    name: str
    calls: float
    host_ms: float
    device_ms: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Averages over the steps traced, on this rank. ``device_ms`` are 0 on a CPU, where host and device are one."""

    workload: Workload
    plan: str
    origin: str
    steps: int
    host_ms: float
    device_ms: float
    ranges: tuple[TracedRange, ...]
    note: str = ""
    interference: tuple[Interference, ...] = ()

    @property
    def on_gpu(self) -> bool:
        return self.device_ms > 0


@contextmanager
def device_and_group(launched: TorchrunRank | None, device: str | None) -> Iterator[tuple[torch.device, Any]]:
    """Yield the device of this process, and the group of the ranks that torchrun started with it, or None."""
    if launched is None:
        yield device_of(device), None
        return
    if device is not None and ":" in device:
        raise UsageFailure(f"--device {device} names one device for {launched.world} ranks; leave it out, or use cpu")
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    own = device_of(f"cuda:{launched.local_rank}" if kind == "cuda" else kind)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if own.type == "cuda" else "gloo", device_id=own if own.type == "cuda" else None)
    try:
        yield own, dist.group.WORLD
    finally:
        dist.destroy_process_group()


def trace_workload(
    workload: Workload,
    *,
    profile: Profile | str,
    device: torch.device,
    steps: int,
    chrome: Path | None = None,
    group: Any = None,
) -> Trace:
    """Run a workload's steps under torch's profiler; write its Chrome trace to ``chrome``, if given."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    monitor = InterferenceMonitor(uuid, () if group is None else siblings_in(group))
    monitor.begin()  # so early that a few short steps are no reason to see nothing
    module = build_module(workload, profile=profile, device=device, group=group)
    inputs = make_inputs(workload, workload.seq_len, "ordinary", 0, device, for_timing=True)
    call = caller(module, inputs, workload)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library tells of its own start and stop on stderr
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with named_ranges(module):
        for _ in range(WARM_STEPS):
            call()
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(steps):
                with torch.profiler.record_function(STEP):
                    call()
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
    interference = largest_of_each(monitor.end())
    if chrome is not None:
        profiler.export_chrome_trace(str(chrome))
    plan = module.plan_for(workload.seq_len, workload.dtype, workload.train, workload.batch)
    graphs = plan.tunables.launch == "graph"
    note = "the plan replays CUDA graphs; its steps are launched one by one here" if graphs else ""
    host_ms, device_ms, ranges = ranges_of(profiler.events() or (), steps)
    return Trace(
        workload, describe(plan.tunables), str(plan.origin), steps, host_ms, device_ms, ranges, note, interference
    )


def ranges_of(events: Iterable[Any], steps: int) -> tuple[float, float, tuple[TracedRange, ...]]:
    """Return host and device ms of a step, and its ranges, largest first, from the events of a profiler.

    A range inside another one of ours counts as the outer one; what is in none is a range of its own.
    """
    host_ms = device_ms = 0.0
    sums: dict[str, list[float]] = {}
    for event in events:
        if event.device_type != DeviceType.CPU:
            device_ms += 0.0 if event.is_user_annotation else event.self_device_time_total / 1e3 / steps
        elif event.name == STEP:
            host_ms += event.cpu_time_total / 1e3 / steps
        elif event.name.startswith(PREFIX) and not _is_inside_another(event):
            found = sums.setdefault(event.name.removeprefix(PREFIX), [0.0, 0.0, 0.0])
            for number, value in enumerate((1.0, event.cpu_time_total / 1e3, event.device_time_total / 1e3)):
                found[number] += value / steps
    ranges = [TracedRange(name, *found) for name, found in sums.items()]
    rest = host_ms - sum(each.host_ms for each in ranges), device_ms - sum(each.device_ms for each in ranges)
    ranges.append(TracedRange(OTHER, 1.0, max(0.0, rest[0]), max(0.0, rest[1])))
    return host_ms, device_ms, tuple(sorted(ranges, key=lambda each: (-each.device_ms, -each.host_ms)))


def _is_inside_another(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(PREFIX):
            return True
        parent = parent.cpu_parent
    return False


def trace_summary(trace: Trace) -> Any:
    """Return the table of a trace for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("Range")
    for name in ("Calls", "Host", *(("Device",) if trace.on_gpu else ()), "Share"):
        table.add_column(name, justify="right")
    whole = trace.device_ms if trace.on_gpu else trace.host_ms
    for each in trace.ranges:
        own = each.device_ms if trace.on_gpu else each.host_ms
        cells = [f"{each.calls:g}", format_ms(each.host_ms), *([format_ms(each.device_ms)] if trace.on_gpu else [])]
        table.add_row(each.name, *cells, f"{100 * own / whole:.1f} %" if whole else "")
    step = f"one step: {format_ms(trace.host_ms)} of the host"
    if trace.on_gpu:
        step += f", {format_ms(trace.device_ms)} of the device's kernels"
    step += f", averaged over {plural(trace.steps, 'step')} under the profiler"
    lines: list[Any] = [
        Text(str(trace.workload), style="bold"),
        Text(f"{trace.plan}  ({trace.origin})"),
        table,
        Text(step),
    ]
    return Group(*lines, *([Text(trace.note)] if trace.note else []))
