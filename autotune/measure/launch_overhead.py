"""How the host's time for a call is kept apart from the device's, and how much of it counts. No torch."""

from __future__ import annotations

import math

# What a launch costs depends on who waits. In a CUDA graph, or behind a model's matrix products, nobody does: the
# device's time is all of it. In a loop of nothing but small calls the host's is. So a plan is judged by its ratio to
# the default on the device, but by no less than one in so many of that ratio where the host is waited for, too. While
# a third of the host's time counted in every call, two probes of one machine chose other plans: its host was twice as
# slow in one of them. At 1024 positions flash-attn-4 takes half of flash's time on an H100's device and 2.8 to 4 times
# its host's: with a leeway of 4 the noise of the host chose among plans that differ by a fifth.
LAUNCH_LEEWAY = 8.0
LEAD = 1.5  # times the host's time: with less the device waits where the host is slower than it was
LONGEST_LEAD_MS = 10.0  # a first call that compiles takes the host seconds
LONGEST_LAUNCH_US = 1e3 * LONGEST_LEAD_MS / LEAD  # that a lead can cover
LEAD_DECAY = 0.7  # of the last lead, at least, is the next: a host that was slow a moment ago may still be
FEWEST_LAUNCHES = 5  # calls in a sample where the host is the slower one: its quiet ones want several


def judged_ms(ms: float, host_us: float, default_ms: float, default_host_us: float) -> float:
    """Return the ms that a call counts: the device's time, or more where launches make up for the gain."""
    waited = max(ms, host_us / 1e3) / max(default_ms, default_host_us / 1e3)
    return max(ms, default_ms * waited / LAUNCH_LEEWAY)


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
