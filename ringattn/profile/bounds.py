"""Bounds on every size in a profile: one table. What is above them is refused before anything is computed from it.

A profile of 2 KB can name a billion ranks, and planning takes time and memory that grow with what is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ringattn.errors import FieldError
from ringattn.tunables import BranchTunables, Tunables
from ringattn.workload import LARGEST_SOFTCAP, LONGEST, MOST, MOST_BRANCHES, Pattern, Workload

from .schema import Evidence, Fingerprint, KernelLists, LaunchBound, LinkSpeed, PlanEntry, Policy, Profile, Provenance

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TEXT = 4096  # characters of one value
MAX_RANKS = MOST["world"]
MAX_BYTES = 2**60
MAX_DURATION = 10**15  # of whatever unit: no time, speed or ratio is longer
MAX_KERNELS = 64  # in a list of preference
MAX_RUNS = 2**31
# The ring's steps of one row, for all its branches and heads apart: planning takes some 6 us for each (2026, one core
# of a Xeon), so that a profile costs three minutes at most, and 512 ranks may still have 128 dense rows.
MAX_RING_STEPS = 2**25

_EVIDENCE_MS = dict.fromkeys(
    ("median_ms", "default_ratio", "ratio_low", "ratio_high", "error", "first_call_ms", "host_us"), MAX_DURATION
)
_PREFERENCE = {"forward": MAX_KERNELS, "backward": MAX_KERNELS}

# The largest number of a field, or the most entries of a list. Text has MAX_TEXT, and numbers a sign where they may.
BOUNDS: Mapping[type, Mapping[str, int]] = {
    Workload: {**MOST, "softcap": LARGEST_SOFTCAP},
    Pattern: {"branches": MOST_BRANCHES},
    Tunables: {
        "branches": MOST_BRANCHES,
        "window_tokens": LONGEST,
        "pool_threshold_mib": 2**40,
        "ulysses": MAX_RANKS,
        "head_groups": MOST["kv_heads"],
        "params": 256,
    },
    BranchTunables: {},
    LinkSpeed: {"world": MAX_RANKS, "hosts": MAX_RANKS, "ring_gb_s": MAX_DURATION, "latency_us": MAX_DURATION},
    Fingerprint: {
        "sm_count": 2**32,
        "memory_mib": 2**40,
        "l2_mib": 2**40,
        "power_limit_w": 2**32,
        "device_count": 2**32,
        "isa": 1024,
        "threads": 2**32,
        "link_speeds": 256,
    },
    Evidence: {**_EVIDENCE_MS, "peak_bytes": MAX_BYTES, "blocks": MAX_RUNS},
    PlanEntry: {"runners_up": 16, "front": 256, "singles": 256, "failures": 4096},
    KernelLists: _PREFERENCE,
    LaunchBound: {"below_gflop": MAX_DURATION, **_PREFERENCE},
    Policy: {"compute_dtype": 16, **_PREFERENCE, "copy_from_rate": LONGEST},
    Provenance: {"budget_s": MAX_DURATION, "elapsed_s": MAX_DURATION, "seed": 2**63, "notes": 256},
    Profile: {"software": 256, "plans": 4096, "schema": MAX_RUNS},
}


def check_bounds(made: Any) -> None:
    """Raise FieldError where a field of a profile's dataclass is above its bound; others have none."""
    for name, most in BOUNDS.get(type(made), {}).items():
        value = getattr(made, name)
        size = len(value) if isinstance(value, tuple) else value
        if size is not None and abs(size) > most:
            what = "entries" if isinstance(value, tuple) else ""
            shown = f"{size:g}" if isinstance(size, float) else str(size)
            raise FieldError(f"is {shown}{what and f' {what}'}; {most} is the most", field=name)
    if isinstance(made, Profile) and (steps := ring_steps(made.plans)) > MAX_RING_STEPS:
        raise FieldError(
            f"needs {steps} ring steps to be planned; {MAX_RING_STEPS} is the most: put rows of many ranks in files "
            "of their own",
            field="plans",
        )


def ring_steps(plans: Sequence[PlanEntry]) -> int:
    """Return how much planning the rows over several ranks take: ranks squared, for each branch and head apart."""
    return sum(
        entry.workload.world**2 * sum(min(branch.rate, entry.workload.kv_heads) for branch in _branches(entry))
        for entry in plans
        if entry.workload.world > 1
    )


def _branches(entry: PlanEntry) -> tuple[Any, ...]:
    return entry.workload.pattern.resolved(entry.workload.seq_len)
