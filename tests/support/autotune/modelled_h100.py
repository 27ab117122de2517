"""An H100 as arithmetic: about what each kernel, gather and mode takes there, so that whole probes run without one.

Not the card: efficiencies are rounded, and every combination has a small time of its own that nothing explains. What
matters is that all of a probe's cells are there, with the card's ratios of compute, copies and launches to each other
and to what a check, a proof and a block cost the probe.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from machines import H100, environment_of

from autotune.measure.evaluator import Block, Checked, Fault, Sample
from autotune.measure.simulated import REPLAY_US, Part, ReplayEvaluator, Row, SimulatedClock, Trouble, parts_of
from autotune.probe.machine.environment import Environment
from autotune.space.space import machine_of
from ringattn.profile.yaml_io import load_profile
from ringattn.workload import Branch, BranchTunables, Tunables, Workload

FACTS = replace(H100, packages=("flash_attn.cute", "triton"))
SM_90 = Path(__file__).parents[3] / "profiles" / "heuristic-sm_90.yaml"
NOISE = Trouble(sigma=0.006, outlier_share=0.02, outlier_low=0.05, outlier_high=0.3, drift=0.02)

BYTES_PER_MS = 2.6e9
LAUNCH_MS = 0.006  # of the device, however little there is to do
WIDE_DTYPES = 3.0  # times the time of bf16
# TFLOP/s over short rows and over long ones, forward and backward; us of the host for a launch.
FORWARD = {"cudnn": (300, 620), "flash-attn-4": (420, 700), "flash": (300, 380), "triton": (330, 420)}
BACKWARD = {"cudnn": (260, 560), "flash-attn-4": (300, 660), "flash": (240, 340), "triton": (220, 330)}
REST_FORWARD = {"efficient": (160, 210), "math": (4, 8), "xformers": (250, 300)}
REST_BACKWARD = {"efficient": (90, 140), "math": (4, 8), "xformers": (200, 250)}
HOST_US = {
    "cudnn": 45,
    "flash": 25,
    "flash-attn-4": 70,
    "triton": 40,
    "efficient": 35,
    "math": 200,
    "xformers": 60,
}
STRIDED = {"cudnn": 0.02, "flash-attn-4": 0.03}  # of the time, times the square root of the rate, where rows are far


def _own(*where: object) -> float:
    """A standard normal number of one place, the same in every process."""
    return float(np.random.default_rng(zlib.crc32(repr(where).encode())).standard_normal())


def _branch_ms(cell: Workload, number: int, branch: Branch, plan: BranchTunables, *, backward: bool) -> float:
    kernel = plan.backward if backward else plan.forward
    short, long = ((BACKWARD | REST_BACKWARD) if backward else (FORWARD | REST_FORWARD))[kernel]
    rows, segments = max(1, branch.segment // branch.rate), max(1, cell.seq_len // branch.segment)
    flop = 2 * rows * rows * cell.head_dim * cell.heads * segments * (2.5 if backward else 1.0)
    ms = flop / 1e9 / (short + (long - short) * min(1.0, rows / 8192) ** 0.7) + LAUNCH_MS
    if branch.rate > 1 and plan.gather == "copy":
        copied = rows * segments * cell.heads * cell.head_dim * 4
        ms += (6 if backward else 4) * copied / BYTES_PER_MS + 0.005
    elif branch.rate > 1:
        ms *= 1 + STRIDED.get(kernel, 0.05) * math.sqrt(branch.rate)
    return ms * (1 + 0.03 * _own(min(cell.seq_len, 16384), number, kernel, plan.gather, backward))


@functools.lru_cache(maxsize=100_000)
def device_ms(cell: Workload, plan: Tunables) -> float:
    """What the plan takes, without noise."""
    resolved = cell.pattern.resolved(cell.seq_len)
    pairs = list(enumerate(zip(resolved, plan.branches, strict=True)))
    forward = sum(_branch_ms(cell, n, branch, chosen, backward=False) for n, (branch, chosen) in pairs)
    ms = forward
    if cell.train:
        ms += sum(_branch_ms(cell, n, branch, chosen, backward=True) for n, (branch, chosen) in pairs)
        ms += 0.9 * forward if plan.checkpoint == "full" else 0.0
        ms += _row_bytes(cell) / 1e7 if plan.checkpoint == "offload" else 0.0
    if not cell.pattern.dense:
        ms += _row_bytes(cell) * (len(resolved) + 1) * (3 if cell.train else 1) / BYTES_PER_MS + 0.01
        ms *= 0.985 if plan.checkpoint == "none" else 1.0
    ms *= 1.03 if plan.window_tokens else 1.0
    ms *= WIDE_DTYPES if plan.dtype in ("fp32", "tf32") else 1.0
    ms *= math.prod(1 + 0.01 * _own(name, value) for name, value in plan.params)
    return ms * (1 + 0.006 * _own(str(cell), replace(plan, launch="eager")))


def host_us(cell: Workload, plan: Tunables) -> float:
    """What the host takes to launch it."""
    us = 40.0 + sum(HOST_US[b.forward] + (15 if b.gather == "copy" else 0) for b in plan.branches)
    if cell.train:
        us += sum(2.2 * HOST_US[b.backward] for b in plan.branches)
    if not cell.pattern.dense:
        us += 240 if cell.train else 80
    return us * (1.0 if plan.pattern_cache else 1.6) * (1.1 if plan.pool_threshold_mib else 1.0)


def eager_ms(cell: Workload, plan: Tunables, slowness: float) -> float:
    """What a loop of calls waits for: the longer of host and device."""
    us = slowness * host_us(cell, plan)
    return max(device_ms(cell, plan), (min(us, REPLAY_US[cell.mode]) if plan.launch == "graph" else us) / 1e3)


def _row_bytes(cell: Workload) -> int:
    return cell.seq_len * cell.heads * cell.head_dim * 2


class ModelledH100(ReplayEvaluator):
    """Its time for a probe: a check waits for the host, and so does a sample of what is launched slowly.

    ``host_slowness`` is of one process: two of them on one machine differed by a factor of two.
    """

    validation_workers = 9
    host_slowness = 2.5

    def check(
        self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
    ) -> Checked | Fault:
        self.clock.advance(5 * self._waited_s(cell, candidate))
        return super().check(cell, candidate, timeout_s=timeout_s, pace_ms=pace_ms)

    def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
        self.clock.advance(0.04)  # the surrogate, messages and the journal
        return super().block(cell, order, timeout_s=timeout_s)

    def _reading(self, cell: Workload, plan: Tunables, timeout_s: float) -> Sample | Fault:
        self.clock.advance(max(0.0, 7.5 * self._waited_s(cell, plan) - self.sample_target_s))
        return super()._reading(cell, plan, timeout_s)

    def _waited_s(self, cell: Workload, plan: Tunables) -> float:
        return max(0.0, eager_ms(cell, plan, self.host_slowness) - device_ms(cell, plan)) / 1e3


def row_of_plan(slowness: float, hangs: Part | None, cell: Workload, plan: Tunables) -> Row:
    if hangs in parts_of(plan):
        return Row(plan, fault=Fault("timeout", "no answer"))
    ms = device_ms(cell, plan)
    saved = {"none": 1.3, "selective": 1.0, "full": 0.75, "offload": 0.6}[plan.checkpoint]
    copies = 1 + 0.3 * sum(branch.gather == "copy" for branch in plan.branches)
    peak = int(_row_bytes(cell) * saved * copies)
    return Row(plan, (ms,), Checked(ms, 0.002, peak, ms + 2.0, slowness * host_us(cell, plan)))


def modelled_environment(
    folder: Path, seed: int, host_slowness: float, *, hangs: Part | None = None, clock: SimulatedClock | None = None
) -> Environment:
    """The surroundings of one probe of it; a kernel that ``hangs`` in one direction answers no check."""
    clock = clock or SimulatedClock()
    evaluator = ModelledH100(
        functools.partial(row_of_plan, host_slowness, hangs),
        clock,
        seed,
        NOISE,
        check_s=0.045,
        prove_s=1.0,
    )
    evaluator.host_slowness = host_slowness
    machine = replace(machine_of(FACTS), just_in_time=frozenset())  # first calls are not modelled
    policy = load_profile(SM_90).policy
    assert policy is not None
    return replace(environment_of(folder, lambda: evaluator, clock, machine=machine, facts=FACTS), policy=policy)
