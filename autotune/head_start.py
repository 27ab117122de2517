"""How the host's time for a call is kept apart from the device's, and how much of it counts. No torch."""

from __future__ import annotations

import math

# A call in a loop cannot be faster than the host launches it, but in a model attention is not alone: at 4096 positions
# the matrix products of a layer keep the device busy three times as long as attention does, with a third of its
# launches, and hide all of flash-attn-4's 195 us on a slow host; at 1024 they hide about half.
EXPOSED = 1 / 3  # of the host's time for a call, that a model waits for if the device is done earlier
LAUNCH_BOUND = 1.2 * EXPOSED  # of the host's time: a call that takes no longer is timed by its launches
HEAD_START = 1.5  # times the host's time: with less the device waits where the host is slower than it was
LONGEST_HEAD_START_MS = 10.0  # a first call that compiles takes the host seconds
FEWEST_LAUNCHES = 5  # calls in a sample where the host is the slower one: its quiet ones want several


def host_is_slower(call_ms: float, host_us: float) -> bool:
    return host_us > 1e3 * call_ms


def may_be_launches(waited_ms: float) -> bool:
    """Whether a call that was waited for may have been more its host's than the device's: no plan launches longer."""
    return waited_ms <= LONGEST_HEAD_START_MS


def flushes_for(host_us: float, flush_ms: float) -> int:
    """How many flushes of the cache keep the device busy while the host launches a call; at least one."""
    return max(1, math.ceil(min(HEAD_START * host_us / 1e3, LONGEST_HEAD_START_MS) / flush_ms))


def sample_ms(call_ms: float, host_us: float) -> float:
    """About what the shortest sample of such a plan takes on a device that gets a head start."""
    if not host_is_slower(call_ms, host_us):
        return call_ms
    return FEWEST_LAUNCHES * (call_ms + HEAD_START * host_us / 1e3)
