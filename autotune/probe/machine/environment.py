"""Environment of a probe: the machine and its evaluator, the clock, the day, the user's folders and variables.

Facts are read here and nowhere else; tests put a recorded machine in their place.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.distributed.launcher import ranks_here
from autotune.exit_codes import NoDevice
from autotune.measure.bench import BenchSettings
from autotune.measure.evaluator import Clock, Evaluator, MonotonicClock
from autotune.measure.pool.pooled_evaluator import PooledEvaluator
from autotune.measure.pool.worker_pool import pool_size_here
from autotune.measure.worker_evaluator import WorkerEvaluator
from autotune.probe.request import ProbeRequest
from autotune.search.budget import EffortPreset
from autotune.space.space import Machine, machine_of
from ringattn.errors import DeviceError
from ringattn.hardware.facts import HardwareFacts, detect, fingerprint_name
from ringattn.hardware.identity import device_identity
from ringattn.profile.locations import FILE_VARIABLE, Located, collect, home_folder, user_folder
from ringattn.profile.resolve import resolve
from ringattn.profile.schema import Policy
from ringattn.store.names import file_stem

EvaluatorFactory = Callable[[HardwareFacts, ProbeRequest, EffortPreset], Evaluator]


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything that a probe reads from outside itself."""

    facts: HardwareFacts
    machine: Machine
    policy: Policy
    evaluator: EvaluatorFactory
    clock: Clock
    environ: Mapping[str, str]
    home: Path
    today: datetime.date
    devices: tuple[str, ...]  # identities of those that are measured, of this host
    profiles: tuple[Located, ...] = ()  # that a program would find here, whatever RINGTUNE_PROFILE names

    def at_effort(self, preset: EffortPreset) -> Environment:
        """Return the environment of an effort; only the full one tries tile shapes and fusion.

        Each shape costs 1 to 3 s of compilation and buys a few percent: flash-attn-4's took 30 of a standard probe's
        170 s on an H100.
        """
        if preset.name == "full":
            return self
        plain = dataclasses.replace(self.machine, params=lambda workload, kernel, dtype: {}, fuses=lambda dtype: False)
        return dataclasses.replace(self, machine=plain)


def this_machine(request: ProbeRequest) -> Environment:
    """Return this machine's environment; raises NoDevice for one that is absent or that nobody has measured."""
    try:
        return environment_of(detect(request.device), _worker_evaluator, devices_of(request))
    except DeviceError as error:
        raise NoDevice(str(error)) from None


def devices_of(request: ProbeRequest) -> tuple[str, ...]:
    """Return the identities of the devices of this host that a probe measures: a rank takes the GPU of its number."""
    import torch

    device = torch.device(request.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda":
        return (device_identity(device),)
    if request.ranks == 1:
        return (device_identity(torch.device("cuda", device.index or 0)),)
    return tuple(device_identity(torch.device("cuda", rank)) for rank in range(ranks_here(request.ranks, os.environ)))


def environment_of(facts: HardwareFacts, evaluator: EvaluatorFactory, devices: tuple[str, ...]) -> Environment:
    """Return this user's environment around a machine with these facts and ``devices``, which are their identities."""
    located, _ = collect(environ={name: value for name, value in os.environ.items() if name != FILE_VARIABLE})
    policy = resolve(located, facts).heuristic.policy
    assert policy is not None
    return Environment(
        facts=facts,
        machine=machine_of(facts),
        policy=policy,
        evaluator=evaluator,
        clock=MonotonicClock(),
        environ=os.environ,
        home=home_folder(),
        today=datetime.datetime.now(tz=datetime.UTC).date(),
        devices=devices,
        profiles=located,
    )


def _worker_evaluator(facts: HardwareFacts, request: ProbeRequest, preset: EffortPreset) -> Evaluator:
    settings = bench_settings(facts, request, preset)
    if facts.vendor == "cpu":  # which the worker has to itself
        return WorkerEvaluator(settings, reference_timeout_s=preset.budget_s)
    return PooledEvaluator(settings, workers=pool_size_here(facts), reference_timeout_s=preset.budget_s)


def bench_settings(facts: HardwareFacts, request: ProbeRequest, preset: EffortPreset) -> BenchSettings:
    """Return the settings of a probe's benches."""
    return BenchSettings(
        device=device_name(request, facts),
        facts=facts,
        seed=request.seed,
        sample_target_ms=preset.sample_target_ms,
        ragged_lengths=preset.ragged_lengths,
        train_too=not request.modes or "train" in request.modes,
        varied_lengths=request.varied_lengths,
    )


def device_name(request: ProbeRequest, facts: HardwareFacts) -> str:
    """Return the device as torch spells it."""
    if request.device is not None:
        return request.device
    return "cpu" if facts.vendor == "cpu" else "cuda"


def default_profile_path(environment: Environment, ranks: int = 1) -> Path:
    """Return where the runtime looks first, under a name of the machine and the number of ranks."""
    name = file_stem(fingerprint_name(environment.facts), ranks)
    return user_folder(environment.environ, environment.home) / f"{name}.yaml"
