"""Keeps the host's time for a call apart from the device's, and says when it counts. No torch."""

from __future__ import annotations

import math

from ringattn.planning.preference import Launch

LEAD = 1.5  # times the host's time: with less the device waits where the host is slower than it was
LONGEST_LEAD_MS = 10.0  # a first call that compiles takes the host seconds
LONGEST_LAUNCH_US = 1e3 * LONGEST_LEAD_MS / LEAD  # that a lead can cover
LEAD_DECAY = 0.7  # of the last lead, at least, is the next: a host that was slow a moment ago may still be
FEWEST_LAUNCHES = 5  # calls in a sample where the host is the slower one: its quiet ones want several


def waited_ms(ms: float, host_us: float, launch: Launch) -> float:
    """Return the ms that a program waits for a call of these times of device and host.

    In a loop of nothing but calls that is the longer of the two. In a CUDA graph, or behind a model's matrix products,
    the host is ahead, and the device's time is all of it.
    """
    return max(ms, host_us / 1e3) if launch == "eager" else ms


NEARLY = 0.5  # of the device's time: hosts were twice as slow as a moment ago


def is_nearly_launch_bound(call_ms: float, host_us: float) -> bool:
    """Return whether the host is the slower one, or was or will be."""
    return host_us > NEARLY * 1e3 * call_ms


def is_launch_bound(call_ms: float, host_us: float) -> bool:
    return host_us > 1e3 * call_ms


def may_be_launch_bound(waited_ms: float) -> bool:
    """Return whether a call that was waited for may have been mostly launches: no plan launches longer."""
    return waited_ms <= LONGEST_LEAD_MS


def flushes_for(host_us: float, flush_ms: float) -> int:
    """Return how many cache flushes keep the device busy while the host launches a call; at least one."""
    return max(1, math.ceil(min(LEAD * host_us / 1e3, LONGEST_LEAD_MS) / flush_ms))


def sample_ms(call_ms: float, host_us: float) -> float:
    """Estimate the shortest sample of such a plan on a device that is given a lead."""
    if not is_launch_bound(call_ms, host_us):
        return call_ms
    return FEWEST_LAUNCHES * (call_ms + LEAD * host_us / 1e3)
