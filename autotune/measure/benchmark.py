"""Measures one plan on one device: checked against float64 first, then timed warm, with cold caches on a GPU.

Runs inside the worker process. Every candidate is the real module, built through a profile of one plan, so that
what is measured is what the runtime will do. Over several ranks the benches of all make the same calls: whatever
depends on a reading (how often to repeat, when to stop) follows the slowest rank's.

Legend: B batch, S length, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from autotune.accuracy.check import check_rows
from autotune.accuracy.documents import packed_documents, whole_length
from autotune.accuracy.inputs import Inputs, make_inputs, validation_inputs
from autotune.accuracy.references import References
from autotune.accuracy.sampled_rows import Expected, Sampled, pick_rows
from ringattn.attention import RingAttention
from ringattn.dtypes import TORCH_DTYPES
from ringattn.profile.schema import Profile
from ringattn.runtime.workspace import POOL
from ringattn.workload import Tunables, Workload

from .bench import BenchSettings, PeerWrong, Phase, WrongAnswer
from .evaluator import Checked, Interference, Proven, Sample
from .interference import InterferenceMonitor
from .launch_overhead import may_be_launch_bound
from .messages import LinkReading
from .module_calls import build_module, caller, graph_bytes, results_of, settled, torch_name
from .rank_agreement import RankGroup, SingleRank, measure_links
from .stopwatch import LaunchOverhead, Stopwatch
from .timers import FEWEST, CudaTimer, HostTimer, cpu_peak_bytes, warm_up_device

WARM_CALLS = 3  # at least, before anything is timed
WARM_LIMIT_S = 0.5
STEADY = 0.10  # two successive calls this close (relative) are a steady state
SLOW = 2.5  # times the pace: a candidate like that is let go after the first look
OVERLONG = 4.0  # times its target is where a sample ends early; ranks count the same calls whatever they last
# Times as long a sample is where others take CPUs: their turns of 3 to 10 ms are as long as a sample, and one plan
# timed twice differed by 57 to 156 % beside a busy loop on each core.
LONGER = 5.0
MOST_REPEATS = 256  # calls in one sample
RUNNERS_KEPT = 24
VARIED_CALLS = 32  # with varied lengths, how often a length is met: its first call is spread over so many

Result = TypeVar("Result")


@dataclass(slots=True)
class Runner:
    """Candidate ready to be called, with how long a call takes."""

    call: Callable[[], None]
    call_ms: float = 0.0
    host_us: float = 0.0
    launches: LaunchOverhead = field(default_factory=LaunchOverhead)


class DeviceBench:
    """Measures RingAttention on a CUDA device or the CPU."""

    def __init__(self, settings: BenchSettings) -> None:
        self.settings = settings
        self.device = torch.device(settings.device)
        self._cuda = self.device.type == "cuda"
        if self._cuda:
            self.device = torch.device("cuda", self.device.index or 0)
            torch.cuda.set_device(self.device)
        self._peers = SingleRank() if settings.rendezvous is None else RankGroup(settings.rendezvous, self.device)
        uuid = str(torch.cuda.get_device_properties(self.device).uuid) if self._cuda else None
        self._monitor = InterferenceMonitor(uuid, self._peers.siblings)
        self._timer = CudaTimer(self.device, settings.facts) if self._cuda else HostTimer()
        self._stopwatch = Stopwatch(self._timer, self._peers)
        if self._cuda:
            warm_up_device(self.device)
        else:
            cpu_peak_bytes(lambda: None)  # loading torch's profiler takes seconds on a busy machine
        self._references = References(self.device, settings.seed, train_too=settings.train_too, rank=self._peers.rank)
        self._runners: OrderedDict[tuple[Workload, Tunables], Runner] = OrderedDict()
        self._inputs: tuple[Workload, Inputs] | None = None
        self._new_length = 0
        self._first_calls: dict[tuple[Workload, Tunables], float] = {}

    def check(self, workload: Workload, tunables: Tunables, phase: Phase, pace_ms: float | None) -> Checked:
        """Check the answer at the workload's own length, and measure its memory and a warm call."""
        phase("reference")  # our own cost is not the candidate's
        inputs = self._timing_inputs(workload)
        module = self._module(workload, tunables)
        whole = workload.positions_of_tensors
        error, cold_ms = self._check_against_reference(module, workload, tunables, whole, "ordinary", phase)
        peak_bytes, taken_ms = self._peak_bytes(module, workload, inputs)  # replayed, where it is a graph
        (waited_ms,) = self._peers.max_over_ranks(taken_ms)
        if pace_ms is not None and waited_ms > SLOW * pace_ms:
            call_ms, host_us = self._first_look(module, workload, inputs, waited_ms)
            if call_ms > SLOW * pace_ms:
                return Checked(call_ms, error, peak_bytes, cold_ms, host_us, torch_kernel=torch_name(workload, inputs))
        varies = self._varies(module, workload, inputs)
        if self.settings.varied_lengths:
            self._first_calls[workload, tunables] = self._first_call_ms(module, workload, tunables, inputs)
        runner = self._runner(workload, tunables, module, waited_ms)
        times = runner.call_ms, error, peak_bytes, cold_ms, runner.host_us
        return Checked(*times, varies, torch_name(workload, inputs))

    def _varies(self, module: RingAttention, workload: Workload, inputs: Inputs) -> bool:
        """Return whether two calls differ in some bit on some rank: atomic additions come in any order."""
        (out, _, grads), (again, _, grads_again) = (results_of(module, inputs, workload) for _ in range(2))
        same = all(map(torch.equal, (out, *grads), (again, *grads_again)))
        (differs,) = self._peers.max_over_ranks(float(not same))
        return bool(differs)

    def validate(self, workload: Workload, tunables: Tunables, phase: Phase, part: tuple[int, int] = (0, 1)) -> Proven:
        """Check it at its own length with adversarial inputs, and at random ragged ones of the bucket.

        ``part`` (i, n) is every n-th of these from the i-th on: workers of a pool share them.
        """
        module = self._module(workload, tunables)
        number, parts = part
        ragged = validation_inputs(workload, self.settings.ragged_lengths, self.settings.seed)
        # Ranks hold unequal shares, too.
        whole, lengths = workload.positions_of_tensors, [(whole_length(workload, n), kind) for n, kind in ragged]
        for total, kind in [(whole, "negative"), *lengths][number::parts]:
            self._check_against_reference(module, workload, tunables, total, kind, phase)
        if parts > 1:
            return Proven(0.0)
        return Proven(self._first_call_ms(module, workload, tunables, self._timing_inputs(workload)))

    def _check_against_reference(
        self, module: RingAttention, workload: Workload, tunables: Tunables, length: int, kind: str, phase: Phase
    ) -> tuple[float, float]:
        """Return the relative error and the ms of the first call; raise WrongAnswer with what reproduces it.

        ``length`` is the whole sequence's. A wrong row on one rank is a wrong answer on all.
        """
        phase("reference")
        with self._free_cpus_alone():
            inputs, sampled, expected = self._references.get(workload, length, kind, tunables)
        self._peers.barrier()  # the candidate's time does not run while another rank still works on its reference
        phase("forward")
        return self._answer(module, workload, tunables, length, inputs, sampled, expected, phase)

    def _answer(
        self,
        module: RingAttention,
        workload: Workload,
        tunables: Tunables,
        length: int,
        inputs: Inputs,
        sampled: Sampled,
        expected: Expected,
        phase: Phase,
    ) -> tuple[float, float]:
        """Compare one call with the reference that is there: of graphs a replay, after all that makes them."""

        def before_backward() -> None:
            self._synchronize()  # so that what the forward started has ended, or hangs here
            phase("backward")

        ragged = length != workload.world * inputs.q.shape[1] or length % workload.world
        call: Callable[..., Any] = partial(module, total_length=length) if workload.world > 1 and ragged else module
        results = partial(results_of, call, inputs, workload, before_backward)
        (out, lse, grads), taken_ms = self._timed(lambda: settled(results, tunables))
        phase("candidate")
        with self._free_cpus_alone():
            got = pick_rows(workload, sampled, out, lse, grads)
            whole = [("out", out), ("lse", lse), *zip(("dq", "dk", "dv"), grads, strict=False)]
            checked = check_rows(expected, got, whole)
        found = self._peers.first_rank_at_fault(checked.fault)
        if found is not None:
            rank, fault = found
            text = f"{fault}; S={length}, {inputs.kind} inputs, seed {self.settings.seed}"
            raise WrongAnswer(text) if checked.fault else PeerWrong(f"rank {rank}: {text}")
        return checked.error, taken_ms

    @contextlib.contextmanager
    def _free_cpus_alone(self) -> Iterator[None]:
        """Work on our own things with no more threads than there are CPUs that others leave.

        Threads wait for each other after every operation. Beside a busy loop on each of two cores the references of a
        validation took 39.5 s on two threads, and 3.0 s on one.
        """
        threads = torch.get_num_threads()
        if self._cuda or threads == 1:
            yield
            return
        torch.set_num_threads(min(threads, self._monitor.free_cpus()))
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _first_call_ms(self, module: RingAttention, workload: Workload, tunables: Tunables, inputs: Inputs) -> float:
        """Time a call at a new length: some kernels build a plan for it, and graphs are captured."""
        self._new_length += 1
        length = max(workload.rows_of_tensors, inputs.q.shape[1] - self._new_length % 61)
        shorter = replace(inputs, **{name: getattr(inputs, name)[:, :length] for name in ("q", "k", "v", "dout")})
        if inputs.documents is not None:
            shorter = replace(shorter, documents=packed_documents(workload, length))
        call = caller(module, shorter, workload)
        return self._timed(lambda: settled(call, tunables))[1]

    def first_call(self, workload: Workload, tunables: Tunables) -> Proven:
        """Call at the workload's length and at a ragged one, which compiles what there is to compile."""
        module, inputs = self._module(workload, tunables), self._timing_inputs(workload)
        caller(module, inputs, workload)()
        return Proven(self._first_call_ms(module, workload, tunables, inputs))

    def run_profile(self, workload: Workload, profile_path: str) -> Tunables:
        """Return the plan that the runtime takes when it reads the file itself, after running it once."""
        module = build_module(workload, profile=profile_path, device=self.device, group=self._peers.group)
        caller(module, self._timing_inputs(workload), workload)()
        self._synchronize()
        return module.plan.row_of(workload).runnable().tunables

    def links(self) -> LinkReading:
        """Measure how long a round of messages among the ranks takes."""
        return measure_links(self._peers, self.device)

    def sample(self, workload: Workload, tunables: Tunables) -> Sample:
        """Time one repetition: the typical of as many calls as make it long enough against the timer's noise."""
        runner = self._runner(workload, tunables)
        call_ms, host_us = self._peers.max_over_ranks(runner.call_ms, runner.host_us)  # and all begin together
        waits_us = max(host_us, runner.launches.us)  # the same on all ranks
        target_ms = self.settings.sample_target_ms * (LONGER if self._is_busy() else 1.0)
        repeats = self._timer.calls_for(target_ms, call_ms, waits_us)
        # Calls of a fifth of a ms take twenty where another process is on a core that their threads wait for.
        alone = self.settings.rendezvous is None
        limit_s = OVERLONG * target_ms / 1e3 if alone else math.inf
        typical = self._stopwatch.read(runner.call, runner.launches, min(repeats, MOST_REPEATS), limit_s)
        runner.call_ms, runner.host_us = typical.ms, typical.host_us
        first_ms = self._first_calls.get((workload, tunables), 0.0) if self.settings.varied_lengths else 0.0
        first_ms /= VARIED_CALLS  # which host and device wait for
        return Sample(typical.ms + first_ms, typical.host_us + 1e3 * first_ms)

    def _is_busy(self) -> bool:
        """Return whether others leave less than all of the CPUs that the calls of a CPU run on."""
        alone = self.settings.rendezvous is None
        return alone and not self._cuda and self._monitor.free_cpus() < torch.get_num_threads()

    def begin_block(self, pool_processes: Sequence[int] = ()) -> None:
        """Begin a block; ``pool_processes`` of this probe are on the same device."""
        gc.collect()
        gc.freeze()  # what lives on is not looked at again: with torch alone that took 130 ms, beside 70 of samples
        gc.disable()
        self._monitor.begin(pool_processes)

    def end_block(self) -> tuple[Interference, ...]:
        gc.enable()
        return self._monitor.end()

    def unmonitored(self) -> tuple[str, ...]:
        return tuple(self._monitor.unmonitored)

    def _module(self, workload: Workload, tunables: Tunables) -> RingAttention:
        """Return the runtime's module with exactly this plan."""
        dtype: str | torch.dtype | None = None
        if tunables.dtype != workload.dtype:
            dtype = "tf32" if tunables.dtype == "tf32" else TORCH_DTYPES[tunables.dtype]
        profile = Profile.single(self.settings.facts, workload, tunables)
        module = build_module(
            workload,
            profile=profile,
            dtype=dtype,
            device=self.device,
            group=self._peers.group,
            layout=tunables.layout or "auto",
        )
        module.validates = False  # its answers are compared with float64 here, before any is timed
        planned = module.plan.row_of(workload).runnable().tunables
        assert planned == tunables, f"the runtime plans {planned} where {tunables} was asked for"
        return module

    def _timing_inputs(self, workload: Workload) -> Inputs:
        if self._inputs is None or self._inputs[0] != workload:
            self._runners.clear()
            self._inputs = None
            self._release()
            seed = self.settings.seed + self._peers.rank
            length = -(-workload.positions_of_tensors // workload.world)
            inputs = make_inputs(workload, length, "ordinary", seed, self.device, for_timing=True)
            self._inputs = (workload, inputs)
        return self._inputs[1]

    def _runner(
        self,
        workload: Workload,
        tunables: Tunables,
        module: RingAttention | None = None,
        waited_ms: float | None = None,
    ) -> Runner:
        """Return a warm candidate; those used longest ago make room.

        ``module`` is it, if it has been built and called: the last call took ``waited_ms``.
        """
        inputs = self._timing_inputs(workload)
        key = (workload, tunables)
        if key not in self._runners:
            while len(self._runners) >= RUNNERS_KEPT:
                self._runners.popitem(last=False)
            module = module or self._module(workload, tunables)
            runner = Runner(caller(module, inputs, workload))
            if waited_ms is None:
                settled(runner.call, tunables)
            self._warm(runner, waited_ms)
            self._runners[key] = runner
        self._runners.move_to_end(key)
        return self._runners[key]

    def _first_look(
        self, module: RingAttention, workload: Workload, inputs: Inputs, waited_ms: float
    ) -> tuple[float, float]:
        """Return the ms of a call and the us of its host, after a call that took ``waited_ms`` to the end.

        What is mostly the host's launching counts as it does in a sample: at 1024 positions flash-attn-4 keeps an H100
        busy for 0.03 ms, and a slow host for 0.36.
        """
        if not (self._cuda and may_be_launch_bound(waited_ms)):
            return waited_ms, waited_ms * 1e3
        call = caller(module, inputs, workload)
        typical = self._stopwatch.read(call, LaunchOverhead(waited_ms * 1e3), FEWEST + 1)
        call_ms, host_us = self._peers.max_over_ranks(typical.ms, typical.host_us)
        return call_ms, host_us

    def _warm(self, runner: Runner, waited_ms: float | None = None) -> None:
        """Call until two in a row take the same time, or for long enough; the last call took ``waited_ms``."""
        begin = time.perf_counter()
        last = math.inf
        if waited_ms is not None:  # with the lead it needs from the first reading on, which may be the only one
            last, runner.launches.us = waited_ms, waited_ms * 1e3
        for number in range(1 if waited_ms is None else WARM_CALLS, 50):
            reading = self._stopwatch.read(runner.call, runner.launches, 1)
            runner.call_ms, runner.host_us, taken_s = self._peers.max_over_ranks(
                reading.ms, reading.host_us, time.perf_counter() - begin
            )
            steady = abs(runner.call_ms - last) <= STEADY * runner.call_ms
            if (number >= WARM_CALLS and steady) or (number >= 2 and taken_s > WARM_LIMIT_S):
                break
            last = runner.call_ms

    def _peak_bytes(self, module: RingAttention, workload: Workload, inputs: Inputs) -> tuple[int, float]:
        """Return the most that two calls in a row hold beyond the inputs, and the ms of the second.

        The buffers of the pool count, as they stay, and so does what peers write into and what graphs hold.
        """
        call = caller(module, inputs, workload)
        taken_ms = 0.0

        def twice() -> None:
            nonlocal taken_ms
            call()
            taken_ms = self._timed(call)[1]

        POOL.clear()
        if not self._cuda:
            return cpu_peak_bytes(twice), taken_ms
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        twice()
        held = module.peer_workspace_bytes() + graph_bytes(module)
        return max(0, torch.cuda.max_memory_allocated(self.device) - before + held), taken_ms

    def _timed(self, call: Callable[[], Result]) -> tuple[Result, float]:
        """Call and wait for the device; return the result and the ms that took."""
        self._synchronize()
        begin = time.perf_counter()
        result = call()
        self._synchronize()
        return result, (time.perf_counter() - begin) * 1e3

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def _release(self) -> None:
        POOL.clear()
        gc.unfreeze()
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()

    def release_all(self) -> None:
        """Release every candidate and buffer: an out-of-memory may have been the fault of the others."""
        self._runners.clear()
        self._release_inputs()

    def _release_inputs(self) -> None:
        """Release the inputs; the rows of references stay: they are small and took long."""
        self._references.release_inputs()
        self._inputs = None
        self._release()
