"""Compiling is no hanging: kernels whose first call compiles for up to 20 s are found, whatever the budget."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from machines import H100, environment_of, invented, plan, row_of
from modelled_h100 import FACTS as MODELLED
from modelled_h100 import NOISE, SM_90, ModelledH100, device_ms, row_of_plan
from probed_machine import Watching

from autotune.measure.simulated import CompilingEvaluator, SimulatedClock, SimulatedCompilers
from autotune.probe.machine.environment import Environment
from autotune.probe.request import ProbeRequest
from autotune.probe.tuning import run_probe
from autotune.space.first_calls import CompiledKernel
from autotune.space.space import machine_of
from ringattn.profile.schema import Policy, Profile
from ringattn.profile.yaml_io import load_profile
from ringattn.workload import Tunables, Workload

KERNELS = ("flash", "flash-attn-4", "math")
POLICY = Policy(
    compute_dtype=(("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp64", "fp64")),
    forward=("flash", "math"),
    backward=("flash", "math"),
    copy_from_rate=2,
)


def truth(_: Workload, tunables: Tunables) -> float:
    """The kernel that compiles takes 0.8 of the default's time where it runs both ways."""
    times = {"flash": 0.0, "flash-attn-4": -0.11, "math": 0.5}
    first = tunables.branches[0]
    frills = 0.05 * sum(
        [tunables.checkpoint != "selective", tunables.pool_threshold_mib is not None, not tunables.pattern_cache]
    )
    return times[first.forward] + times.get(first.backward, 0.0) + frills + 0.3 * (tunables.dtype != "bf16")


def surroundings(
    folder: Path, compile_s: Callable[[CompiledKernel], float], workers: int
) -> tuple[Environment, SimulatedCompilers]:
    """A GPU with one kernel that compiles, found in ``folder`` by every probe with the same compilers and clock."""
    clock = SimulatedClock()
    compilers = SimulatedCompilers(clock, frozenset({"flash-attn-4"}), compile_s, workers)

    def evaluator() -> CompilingEvaluator:
        made = CompilingEvaluator(row_of(truth), clock, 0, check_s=0.05, prove_s=1.0)
        made.compilers = compilers
        return made

    machine = replace(invented(KERNELS), just_in_time=frozenset({"flash-attn-4"}))
    environment = environment_of(folder, evaluator, clock, machine, facts=H100)
    return replace(environment, policy=POLICY), compilers


def one_shape(folder: Path, budget_s: float) -> ProbeRequest:
    return ProbeRequest(
        output=folder / "made.yaml",
        effort="quick",
        budget_s=budget_s,
        seq_lens=(4096,),
        modes=("train",),
        dense=True,
        precision="bf16",
        resume=False,
    )


def chosen(profile: Profile | None) -> list[set[str]]:
    assert profile is not None
    return [set(entry.choice.tunables.kernels) for entry in profile.plans if entry.choice is not None]


@pytest.mark.parametrize("workers", [8, 2])
@pytest.mark.parametrize("compile_s", [5.0, 20.0])
def test_a_slow_compiler_loses_no_kernel_to_a_short_probe(tmp_path: Path, workers: int, compile_s: float) -> None:
    """It lost flash-attn-4 with "no answer within 4.1 s"."""
    environment, _ = surroundings(tmp_path, lambda kernel: compile_s, workers)
    result = run_probe(one_shape(tmp_path, 40.0), Watching(), environment)
    assert any("flash-attn-4" in kernels for kernels in chosen(result.profile))
    assert result.elapsed_s <= 44.0


def test_cells_whose_kernels_are_being_compiled_wait_for_the_others(tmp_path: Path) -> None:
    """The shortest training step was over before the backward was there, which the longer ones then found."""
    environment, _ = surroundings(tmp_path, lambda kernel: 20.0 if kernel.direction == "backward" else 3.0, 8)
    request = replace(one_shape(tmp_path, 40.0), seq_lens=(2048, 4096, 8192), modes=("train", "infer"))
    profile = run_probe(request, Watching(), environment).profile
    assert profile is not None
    choices = [entry.choice.tunables for entry in profile.plans if entry.workload.train and entry.choice is not None]
    assert [choice.branches[0].backward for choice in choices] == ["flash-attn-4"] * 3


def test_a_slow_compiler_without_workers_beside_loses_no_kernel_either(tmp_path: Path) -> None:
    environment, _ = surroundings(tmp_path, lambda kernel: 12.0, 0)
    result = run_probe(one_shape(tmp_path, 40.0), Watching(), environment)
    assert any("flash-attn-4" in kernels for kernels in chosen(result.profile))
    assert result.elapsed_s <= 44.0


@pytest.mark.parametrize("workers", [8, 0])
def test_what_is_still_being_compiled_is_named_and_there_for_the_next_probe(tmp_path: Path, workers: int) -> None:
    environment, compilers = surroundings(tmp_path, lambda kernel: 32.0, workers)
    observer = Watching()
    result = run_probe(one_shape(tmp_path, 40.0), observer, environment)
    assert chosen(result.profile) == [{"flash"}]
    assert result.profile is not None
    notes = " ".join(result.profile.provenance.notes)
    assert "flash-attn-4 (" in notes
    assert "compil" in notes
    if not workers:
        return
    assert any("flash-attn-4 (forward, dense)" in note for note in observer.notes)
    assert compilers.cached_at
    assert environment.clock.now() <= 40.0 + 11.0
    again = run_probe(one_shape(tmp_path, 40.0), Watching(), environment)
    assert any("flash-attn-4" in kernels for kernels in chosen(again.profile))


@pytest.mark.parametrize("budget_s", [40.0, 170.0])
def test_a_kernel_that_hangs_beside_the_probe_costs_it_no_more_than_one_trial(tmp_path: Path, budget_s: float) -> None:
    environment, _ = surroundings(tmp_path, lambda kernel: math.inf, 8)
    observer = Watching()
    result = run_probe(one_shape(tmp_path, budget_s), observer, environment)
    assert chosen(result.profile) == [{"flash"}]
    assert result.elapsed_s <= 1.1 * budget_s
    assert sum(outcome.kind == "timeout" for _, _, outcome in observer.trials) <= 1
    assert result.profile is not None
    assert any("flash-attn-4 (" in note for note in result.profile.provenance.notes)
    report = result.cells[0]
    assert report.status == "default"


def test_a_kernel_that_hangs_in_the_probe_itself_is_cut_once(tmp_path: Path) -> None:
    environment, _ = surroundings(tmp_path, lambda kernel: math.inf, 0)
    observer = Watching()
    result = run_probe(one_shape(tmp_path, 170.0), observer, environment)
    assert chosen(result.profile) == [{"flash"}]
    assert sum(outcome.kind == "timeout" for _, _, outcome in observer.trials) <= 2  # each direction
    assert result.elapsed_s <= 1.1 * 170.0


# --- eight cells -----------------------------------------------------------------------------------------------------


class CompilingH100(CompilingEvaluator, ModelledH100):
    """The modelled card with compilers; its first check starts the worker."""

    started = False

    def check(self, *arguments: object, **more: object) -> object:  # type: ignore[override]
        if not self.started:
            self.started = True
            self.clock.advance(8.0)
        return super().check(*arguments, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_quick_probe_with_an_empty_cache_measures_every_cell_and_finds_what_compiles(
    tmp_path: Path, seed: int
) -> None:
    """Sixteen cores: eight workers share what the four cells of each pattern compile, 5 to 20 s a kernel and way."""
    clock = SimulatedClock()
    machine = machine_of(MODELLED)

    def compile_s(kernel: CompiledKernel) -> float:
        if kernel.kernel != "flash-attn-4":
            return 2.0
        if kernel.rows not in ("", "view"):
            return 5.0
        return 20.0 if kernel.direction == "backward" else 9.0

    compilers = SimulatedCompilers(clock, machine.just_in_time, compile_s, 8)
    evaluator = CompilingH100(functools.partial(row_of_plan, 2.5, None), clock, seed, NOISE, check_s=0.045, prove_s=1.0)
    evaluator.compilers = compilers
    policy = load_profile(SM_90).policy
    assert policy is not None
    environment = environment_of(tmp_path, lambda: evaluator, clock, machine, facts=MODELLED)
    request = ProbeRequest(
        output=tmp_path / "h100.yaml", effort="quick", budget_s=60.0, seed=seed, causal=True, resume=False
    )
    result = run_probe(request, Watching(), replace(environment, policy=policy))
    assert result.elapsed_s <= 66.0
    assert result.profile is not None
    assert len(result.profile.plans) == 8
    assert all(entry.evidence is not None for entry in result.profile.plans)
    for entry in result.profile.plans:
        assert entry.choice is not None
        if entry.workload.pattern.dense and entry.workload.seq_len == 16384:
            assert "flash-attn-4" in entry.choice.tunables.kernels, entry.workload
            best = plan(entry.workload, "flash-attn-4")
            assert device_ms(entry.workload, entry.choice.tunables) <= 1.03 * device_ms(entry.workload, best)
