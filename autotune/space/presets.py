"""Plans that earlier ring and dilated attention ran by their design, as data: each a plan among those of the space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ringattn.errors import PlanError
from ringattn.hardware.facts import HardwareFacts
from ringattn.planning.equal_plans import plainest
from ringattn.planning.plan import rejection_reasons
from ringattn.planning.ring import travelling_branches
from ringattn.workload import BranchTunables, Tunables, Workload

# The order in which torch's own function tries its kernels.
TORCH_ORDER = ("cudnn", "flash", "efficient", "flash-cpu", "math")
PACKAGES_FIRST = ("flash-attn-4", "flash-attn-3", "flash-attn-2", "flash", "flash-cpu", "efficient", "math")


@dataclass(frozen=True, slots=True)
class Preset:
    """One system's choices; ``system`` says which, in a line.

    ``kernels``: the first that can run the workload is taken, once, for both directions. ``narrows``: computes in the
    fastest usual dtype of the card whatever the inputs are. ``leaner``: after out-of-memory it keeps less and works
    window by window.
    """

    name: str
    system: str
    kernels: tuple[str, ...] = TORCH_ORDER
    gather: str = "copy"
    checkpoint: str = "selective"
    pool_threshold_mib: int | None = None
    pool_strategy: str = "shape"
    pattern_cache: bool = True
    narrows: bool = False
    leaner: bool = False
    schedule: str = "all-gather"


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "collective-ring",
            "K and V of all ranks gathered at once, torch's own kernels on them, pooled buffers",
            pool_threshold_mib=1,
        ),
        Preset(
            "production",
            "every branch recomputed in the backward, buffers kept by shape, a leaner plan after out-of-memory",
            checkpoint="full",
            pool_threshold_mib=1,
            leaner=True,
        ),
        Preset(
            "flash-first",
            "the first FlashAttention that is there, its dtype decided once, no buffers kept",
            kernels=PACKAGES_FIRST,
            gather="view",
            narrows=True,
            schedule="ring",
        ),
        Preset(
            "improved-dilated",
            "one GPU: rows of each branch gathered by indices that are kept, torch's own kernels, large buffers pooled",
            pool_threshold_mib=16,
            pool_strategy="bucket",
        ),
    )
}


def plans_of(preset: Preset, workload: Workload, facts: HardwareFacts) -> tuple[Tunables, ...]:
    """Return the preset's plan for a workload on a machine, and after it what it turns to when memory runs out.

    What changes nothing for the workload is left out: plans with equal steps are equal.

    Raises:
        PlanError: no kernel of the preset can run it, with every one's reasons.
    """
    reasons = {}
    for kernel in preset.kernels:
        plan = _plan(preset, workload, facts, kernel)
        reasons[kernel] = rejection_reasons(workload, plan, facts)
        if not reasons[kernel]:
            leaner = _leaner(workload, plan, facts) if preset.leaner else ()
            return (plan, *leaner)
    raise PlanError(f"preset {preset.name} cannot run {workload}", reasons)


def _plan(preset: Preset, workload: Workload, facts: HardwareFacts, kernel: str) -> Tunables:
    backward = kernel if workload.train else ""
    branch = BranchTunables(kernel, backward, gather=preset.gather)
    several = workload.world > 1
    plan = Tunables(
        dtype=_narrow(workload.dtype, facts) if preset.narrows else workload.dtype,
        branches=(branch,) * len(workload.pattern.resolved(workload.seq_len)),
        checkpoint=preset.checkpoint,
        pool_threshold_mib=preset.pool_threshold_mib,
        pool_strategy=preset.pool_strategy,
        pattern_cache=preset.pattern_cache,
        schedule=preset.schedule if several else "local",
        layout="contiguous" if several else "",
    )
    if several and not travelling_branches(workload, plan):
        plan = replace(plan, schedule="local")
    return plainest(workload, plan)


def _narrow(dtype: str, facts: HardwareFacts) -> str:
    """Return the dtype that a card computes fastest in: bf16 from sm_80 on, fp16 from sm_70 on."""
    if dtype != "fp32" or facts.vendor != "nvidia":
        return dtype
    arch = int(facts.arch.removeprefix("sm_"))
    return "bf16" if arch >= 80 else "fp16" if arch >= 70 else dtype


def _leaner(workload: Workload, plan: Tunables, facts: HardwareFacts) -> Iterator[Tunables]:
    """Yield the plan with no more than one largest segment in the workspace, if it can be had."""
    window = max((branch.segment for branch in workload.pattern.branches), default=0)
    lean = plainest(workload, replace(plan, window_tokens=window or None, pool_threshold_mib=None))
    if lean != plan and not rejection_reasons(workload, lean, facts):
        yield lean
