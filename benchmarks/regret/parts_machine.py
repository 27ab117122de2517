"""Machine whose plans take the sum of their parts, and where whole plans add traps and rewards to it.

The exact best of a space of millions of plans is known: given the knobs of the whole plan, branches do not touch each
other, so that per branch only what no other choice beats in both device and host time has to be combined.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from autotune.measure.evaluator import Checked, Fault
from autotune.measure.simulated import REPLAY_US, Part, Row, parts_of
from autotune.space.space import Assignment, Space, Value, encode
from ringattn.workload import BranchTunables, Tunables, Workload

FORWARD_SHARE, BACKWARD_SHARE = 1 / 3, 2 / 3  # of a training step
OWN = 0.03  # deviation of what each kernel gains or loses in each branch
COLD_MS = 10.0  # of a first call, beside what any call takes
OFFLOAD, NONE = 0.12, -0.01  # what a checkpoint mode adds to a training step
WINDOWED = 0.03
REBUILT_US = 0.4  # times the host's time, without a pattern cache
COPY_US = 12.0  # of the host, for a branch that is gathered
LEAN_POOL = 0.004  # deviation of what a pool does


@dataclass(frozen=True, slots=True)
class Together:
    """Values that cost alone and pay together: a window, a checkpoint mode and a backward kernel."""

    window_tokens: int
    checkpoint: str
    backward: str
    alone: float = 0.06  # added for the window without the others
    paid: float = 0.45  # times what each branch's backward takes with all three


@dataclass(frozen=True, slots=True)
class PartsMachine:
    """One invented machine: device and host time of every plan of ``space``, and what is wrong with some.

    ``speed`` is time relative to the default's kernel; ``strided`` what reading rows in place multiplies it by, by
    kernel; ``shares`` what each branch is of the whole. The default takes ``base_ms`` where the host is not slower.
    """

    space: Space
    seed: int
    base_ms: float
    shares: tuple[float, ...]
    speed: Mapping[Part, float]
    strided: Mapping[str, float]
    launch_us: Mapping[str, float]
    host_us: float = 20.0  # of a call, before any launch
    copied: float = 0.03  # times a branch's share, for a gather
    recomputed: float = 0.30  # what checkpoint=full adds to a training step
    tuned: Mapping[tuple[str, Value], float] = field(default_factory=dict)  # factors of kernels' parameters
    together: Together | None = None
    wrong: str | None = None  # a kernel
    too_large: str | None = None  # a kernel that runs out of memory
    unproven: Part | None = None
    hangs: Part | None = None
    _owned: dict[tuple[object, ...], float] = field(default_factory=dict, compare=False, repr=False)

    # --- the truth ----------------------------------------------------------------------------------------------

    def row(self, workload: Workload, plan: Tunables) -> Row:
        """Return the Row of a plan, as ReplayEvaluator wants it."""
        assert workload == self.space.workload
        ran = set(parts_of(plan))
        if self.hangs in ran:
            return Row(plan, fault=Fault("timeout", "no answer"))
        if self.wrong in plan.kernels:
            return Row(plan, fault=Fault("wrong", "out errs"))
        if self.too_large in plan.kernels:
            return Row(plan, fault=Fault("oom", "out of memory"))
        device_ms, host_us = self.total(plan)
        checked = Checked(device_ms, 1e-3, 2**24, device_ms + COLD_MS, host_us)
        unproven = Fault("wrong", "out errs at other lengths") if self.unproven in ran else None
        return Row(plan, (device_ms,), checked, unproven=unproven)

    def is_right(self, plan: Tunables) -> bool:
        row = self.row(self.space.workload, plan)
        return row.fault is None and row.unproven is None

    def total(self, plan: Tunables) -> tuple[float, float]:
        whole = _whole(self.space.workload, plan)
        costs = [self._branch(n, branch, whole) for n, branch in enumerate(plan.branches)]
        return self._total(sum(device for device, _ in costs), sum(host for _, host in costs), whole)

    def _branch(self, number: int, branch: BranchTunables, whole: Mapping[str, Value]) -> tuple[float, float]:
        """Return the device time relative to a default call, and us of the host."""
        train, share = bool(branch.backward), self.shares[number]
        forward_share = FORWARD_SHARE if train else 1.0
        device = share * forward_share * self._kernel(number, branch.forward, "forward", branch.gather, whole)
        host = self.launch_us[branch.forward]
        if train:
            took = share * BACKWARD_SHARE * self._kernel(number, branch.backward, "backward", branch.gather, whole)
            if self.together is not None and branch.backward == self.together.backward and self._may_pay(whole):
                took *= self.together.paid
            device += took
            host += 2.2 * self.launch_us[branch.backward]
        if branch.gather == "copy":
            device += share * self.copied
            host += COPY_US
        return device, host

    def _kernel(self, number: int, kernel: str, direction: str, gather: str, whole: Mapping[str, Value]) -> float:
        time = self.speed[kernel, direction]
        if kernel != self.space.default.branches[number].forward:
            time *= math.exp(OWN * self._own(number, kernel, direction))
        if gather == "view" and self._rate(number) > 1:
            time *= self.strided.get(kernel, 1.0)
        for name, value in whole.items():
            if name.startswith(f"param:{kernel}."):
                time *= self.tuned.get((name, value), 1.0)
        return time

    def _may_pay(self, whole: Mapping[str, Value]) -> bool:
        """Return whether the window and the checkpoint mode are those that pay with one backward kernel."""
        wanted = self.together
        return wanted is not None and (whole.get("window_tokens"), whole.get("checkpoint")) == (
            wanted.window_tokens,
            wanted.checkpoint,
        )

    def _total(self, device: float, host_us: float, whole: Mapping[str, Value]) -> tuple[float, float]:
        """Return ms of the device and us of the host."""
        checkpoint, window = whole.get("checkpoint", "selective"), whole.get("window_tokens")
        if self.space.workload.train:
            device += {"full": self.recomputed, "offload": OFFLOAD, "none": NONE}.get(str(checkpoint), 0.0)
        if window is not None:
            alone = self.together is not None and window == self.together.window_tokens
            device *= 1 + (self.together.alone if alone and self.together else WINDOWED)
        if whole.get("pool_threshold_mib") is not None and not self.space.workload.pattern.dense:
            device *= 1 + LEAN_POOL * self._own(whole["pool_threshold_mib"], whole.get("pool_strategy", "shape"))
        host_us += self.host_us
        if not whole.get("pattern_cache", True):
            host_us *= 1 + REBUILT_US
        return device * self.base_ms, host_us

    def _own(self, *where: object) -> float:
        """Return a standard normal number of one place, the same in every process."""
        if where not in self._owned:
            rng = np.random.default_rng((self.seed, zlib.crc32(repr(where).encode())))
            self._owned[where] = float(rng.standard_normal())
        return self._owned[where]

    def _rate(self, number: int) -> int:
        return self.space.workload.pattern.resolved(self.space.workload.seq_len)[number].rate

    # --- its best -----------------------------------------------------------------------------------------------

    def best_ms(self) -> float:
        """Return true ms of the fastest plan that is right."""
        fronts: dict[Hashable, dict[bool, list[tuple[float, float]]]] = {}
        best = math.inf
        for whole in self._wholes():
            # All that branches see of it.
            seen = (*(value for name, value in whole.items() if name.startswith("param:")), self._may_pay(whole))
            if seen not in fronts:
                fronts[seen] = self._fronts(whole)
            needs_copy = whole.get("checkpoint") == "none"
            sums = [point for copies, front in fronts[seen].items() if copies or not needs_copy for point in front]
            totals = [self._total(device, host, whole) for device, host in sums]
            replayed_us = [REPLAY_US[self.space.workload.mode] if self._may_be_a_graph(whole) else math.inf]
            best = min([best, *(max(ms, min(us, *replayed_us) / 1e3) for ms, us in totals)])
        return best

    def _may_be_a_graph(self, whole: Mapping[str, Value]) -> bool:
        return not self.space.workload.train or whole.get("checkpoint", "selective") == "selective"

    def _wholes(self) -> Iterator[Assignment]:
        names = [name for name in self.space.knobs if "." not in name or name.startswith("param:")]
        for values in itertools.product(*(self.space.knobs[name] for name in names)):
            yield dict(zip(names, values, strict=True))

    def _fronts(self, whole: Assignment) -> dict[bool, list[tuple[float, float]]]:
        """Return sums over all branches unbeaten in both device and host, by whether anything is gathered."""
        fronts: dict[bool, list[tuple[float, float]]] = {False: [(0.0, 0.0)]}
        for number in range(len(self.shares)):
            grown: dict[bool, list[tuple[float, float]]] = {}
            for branch in self._choices(number):
                device, host = self._branch(number, branch, whole)
                for copies, front in fronts.items():
                    sums = [(mine + device, us + host) for mine, us in front]
                    grown.setdefault(copies or branch.gather == "copy", []).extend(sums)
            fronts = {copies: _front(sums) for copies, sums in grown.items()}
        return fronts

    def _choices(self, number: int) -> Iterator[BranchTunables]:
        """Return every right choice for a branch."""
        knobs = self.space.knobs
        backwards = knobs.get(f"backward.{number}", ("",))
        for forward, backward, gather in itertools.product(
            knobs[f"forward.{number}"], backwards, knobs[f"gather.{number}"]
        ):
            branch = BranchTunables(str(forward), str(backward), str(gather))
            parts = {(branch.forward, "forward"), (branch.backward, "backward")}
            if not parts & {self.hangs, self.unproven} and not {self.wrong, self.too_large} & {
                branch.forward,
                branch.backward,
            }:
                yield branch


def _whole(workload: Workload, plan: Tunables) -> Assignment:
    """Return the knobs that hold for all branches."""
    return {
        name: value
        for name, value in encode(workload, plan).items()
        if not name.startswith(("forward.", "backward.", "gather."))
    }


def _front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other beats in both."""
    kept: list[tuple[float, float]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept
