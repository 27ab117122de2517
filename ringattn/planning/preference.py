"""The preference among right plans: the fastest, the leanest, or between. One rule for probes and for modules.

What is the fastest depends on who launches: an eager loop waits for the slower of host and device, a CUDA graph or a
compiled model for the device alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from ringattn.errors import InputError
from ringattn.profile.schema import Choice

Preference = Literal["time", "memory", "balanced"]
Launch = Literal["eager", "captured"]

TIE = 0.005  # log-ratio: plans closer than this are one plan to the user
MEMORY_WEIGHT = 0.5  # "balanced": halving the memory is worth a factor sqrt(2) in time


def check_preference(prefer: Any, launch: Any) -> None:
    """Raise InputError unless ``prefer`` is None or a preference, and ``launch`` one of the two ways to launch."""
    if prefer is not None and prefer not in get_args(Preference):
        raise InputError(f"prefer is {prefer!r}; use one of {', '.join(get_args(Preference))}, or None")
    if launch not in get_args(Launch):
        raise InputError(f"launch is {launch!r}; use one of {', '.join(get_args(Launch))}")


def cost(prefer: Preference, log_ratio: float, peak_bytes: int) -> float:
    """Lower is better: ``log_ratio`` is log(t / t_default), ``peak_bytes`` what is held beyond the inputs."""
    if prefer == "time":
        return log_ratio
    memory = math.log(max(peak_bytes, 1))
    return memory if prefer == "memory" else log_ratio + MEMORY_WEIGHT * memory


def by_preference(choices: Sequence[Choice], prefer: Preference, launch: Launch = "eager") -> list[Choice]:
    """Return the best first; what ties with it keeps its order, and what was never measured comes last.

    A gain counts only where its interval excludes that there is none. Of captured calls it is the device's time that
    counts, whose ratios are not recorded.
    """

    def cost_of(choice: Choice) -> float:
        evidence = choice.evidence
        if evidence is None or evidence.default_ratio <= 0 or evidence.median_ms <= 0:
            return math.inf
        if launch == "captured":
            return cost(prefer, math.log(evidence.median_ms), evidence.peak_bytes)
        gain = evidence.default_ratio if evidence.default_ratio >= 1 or evidence.ratio_high < 1 else 1.0
        return cost(prefer, math.log(gain), evidence.peak_bytes)

    costs = [cost_of(choice) for choice in choices]
    best = min(costs, default=math.inf)
    # inf + TIE is inf: without any evidence the order stays.
    order = sorted(range(len(choices)), key=lambda i: best if costs[i] <= best + TIE else costs[i])
    return [choices[i] for i in order]
