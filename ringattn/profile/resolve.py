"""Decides which profile serves this machine, and why: pure, over profiles already read. No torch, no files.

The tiers, best first:

- ``exact``: the same silicon and the same software.
- ``same-silicon``: other versions of the software.
- ``same-sku``: same arch and class of card; memory, power limit or the like differ.
- ``nearest``: same arch; the nearest in log2 of (SMs, memory, L2).
- ``heuristic``: nothing measured fits.

Never across vendor or arch, and the MIG profile must be the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ringattn.errors import ProfileError
from ringattn.hardware.facts import HardwareFacts
from ringattn.wording import plural

from .locations import Located, Origin
from .schema import Fingerprint, Policy, Profile, Provenance

Tier = Literal["exact", "same-silicon", "same-sku", "nearest", "heuristic"]
TIERS: tuple[Tier, ...] = ("exact", "same-silicon", "same-sku", "nearest", "heuristic")

BUILT_IN = "built-in"
_BINDING: tuple[Origin, ...] = ("argument", "env")
_ANOTHER = {
    "argument": "Name none, so that this machine's own serves, or a file that was probed here",
    "env": "Unset RINGTUNE_PROFILE, or set it to a file that was probed here",
}
_MEMORY_TOLERANCE = 0.02  # of one card, drivers reserve more or less


class TraceLine(str):
    """Line of a trace: the verdict on a profile from ``path``, found by ``origin``."""

    path: str
    origin: Origin
    verdict: str

    def __new__(cls, path: str, origin: Origin, verdict: str) -> TraceLine:
        made = super().__new__(cls, f"{path} ({origin}): {verdict}")
        made.path, made.origin, made.verdict = path, origin, verdict
        return made

    @classmethod
    def at(cls, entry: Located, verdict: str) -> TraceLine:
        return cls(entry.path, entry.origin, verdict)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.path, self.origin, self.verdict


@dataclass(frozen=True, slots=True)
class Source:
    """A measured profile that serves this machine, the file it is in, and its tier."""

    path: str
    profile: Profile
    tier: Tier


@dataclass(frozen=True, slots=True)
class Resolution:
    """Profile and heuristic that serve this machine.

    ``profile`` is the measured profile (None: nothing measured fits; it may hold no plans for ``world`` ranks, where
    none that fits does), ``heuristic`` answers what it does not cover,
    ``path`` is the file of the one that leads, ``trace`` says of every profile looked at why it was taken or not, and
    only counts the shipped ones for other devices. ``world`` is the number of ranks that was asked for. ``beside`` are
    other measured profiles of the same silicon, best first, whose rows serve what ``profile`` has not measured.
    """

    profile: Profile | None
    heuristic: Profile
    heuristic_path: str
    path: str
    tier: Tier
    trace: tuple[str, ...]
    world: int
    beside: tuple[Source, ...] = ()

    @property
    def sources(self) -> tuple[Source, ...]:
        """Return all measured profiles that serve, the leading one first."""
        return () if self.profile is None else (Source(self.path, self.profile, self.tier), *self.beside)


@dataclass(frozen=True, slots=True)
class _Match:
    """Match of a measured profile with this machine; ``tier`` None is no match."""

    tier: Tier | None
    why: str
    distance: float = 0.0  # between two of one tier the smaller goes first

    @property
    def rank(self) -> tuple[int, float]:
        return (len(TIERS) if self.tier is None else TIERS.index(self.tier), self.distance)


def resolve(located: Sequence[Located], facts: HardwareFacts, *, world: int = 1) -> Resolution:
    """Return the best profile of ``located`` (in search order) for this machine: by tier, then nearness, then order.

    Those with plans for ``world`` ranks go before all others, which say nothing of it. On one rank further profiles of
    the same silicon serve what the best has not measured: a probe of one length must not hide all others that shipped.
    Several ranks take one layout for all rows, of one profile. A profile named by argument or
    RINGTUNE_PROFILE binds: it is taken in whatever tier, and ProfileError raised when it does not fit at all. Device
    count and link matter only for ``world`` > 1.
    """
    bound = next((entry for origin in _BINDING for entry in located if entry.origin == origin), None)
    if bound is not None:
        _check_bound(bound, facts, world)
    others = [entry for entry in located if _ships_for_others(entry, facts)]
    located = [entry for entry in located if entry not in others]
    trace: list[str] = []
    measured: list[tuple[_Match, Located]] = []
    for entry in located:
        if entry.profile.source != "measured":
            continue
        if bound is not None and entry is not bound:
            trace.append(TraceLine.at(entry, f"not taken, {bound.path} was named by {bound.origin}"))
            continue
        match = _match(entry.profile, facts, world)
        if match.tier is None:
            trace.append(TraceLine.at(entry, f"not taken, {match.why}"))
        else:
            measured.append((match, entry))
    # Stable: search order stays between equals.
    measured.sort(key=lambda pair: (not pair[1].profile.covers(world), *pair[0].rank))
    beside: list[Source] = []
    for number, (match, entry) in enumerate(measured):
        verdict = "taken" if number == 0 else f"not taken, {measured[0][1].path} comes first"
        if number and world == 1 and entry.profile.covers(world) and match.tier in ("exact", "same-silicon"):
            beside.append(Source(entry.path, entry.profile, match.tier))
            verdict = f"taken for what {measured[0][1].path} has not measured"
        if not entry.profile.covers(world):
            alone = "taken for its policy alone" if number == 0 and entry.profile.policy is not None else "not taken"
            verdict = f"{alone}, it holds no plans for {plural(world, 'rank')}"
        trace.insert(number, TraceLine.at(entry, f"{verdict}; tier {match.tier}: {match.why}"))
    heuristic = _heuristic(located, facts, bound, trace)
    if others:
        trace.append(f"{plural(len(others), 'shipped profile')} for other devices, {_kinds(others)}: not taken")
    if measured:
        match, entry = measured[0]
        assert match.tier is not None
        profile, path, tier = entry.profile, entry.path, match.tier
    else:
        profile, path, tier = None, heuristic.path, "heuristic"
    return Resolution(profile, heuristic.profile, heuristic.path, path, tier, tuple(trace), world, tuple(beside))


def _ships_for_others(entry: Located, facts: HardwareFacts) -> bool:
    """Tell whether a profile came with the package for another vendor, or is a heuristic for other devices.

    Nobody put it there for this machine, so why it does not serve is no news. A measured one of the same vendor is:
    people ask why their card does not use it.
    """
    made = entry.profile.fingerprint
    rule = entry.profile.source == "heuristic"
    return entry.origin == "shipped" and (
        made.vendor != facts.vendor or (rule and bool(_heuristic_mismatch(made, facts)))
    )


def _kinds(entries: Sequence[Located]) -> str:
    """Return how many of these profiles were measured, and how many are heuristics."""
    rules = sum(entry.profile.source == "heuristic" for entry in entries)
    counts = (
        f"{len(entries) - rules} measured" if len(entries) > rules else "",
        plural(rules, "heuristic") if rules else "",
    )
    return " and ".join(filter(None, counts))


def _check_bound(bound: Located, facts: HardwareFacts, world: int) -> None:
    if bound.profile.source == "measured":
        match = _match(bound.profile, facts, world)
        mismatch = match.why if match.tier is None else ""
    else:
        mismatch = _heuristic_mismatch(bound.profile.fingerprint, facts)
    if mismatch:
        raise ProfileError(
            bound.path,
            f"does not fit this machine: it was {mismatch}. {_ANOTHER[bound.origin]}",
            "fingerprint",
        )


# --- measured profiles ------------------------------------------------------------------------------------------


def _match(profile: Profile, facts: HardwareFacts, world: int) -> _Match:
    made, here = profile.fingerprint, Fingerprint.of(facts)
    if mismatch := _mismatch(made, here):
        return _Match(None, mismatch)
    differences = _silicon_differences(made, here) + (_ring_differences(made, here) if world > 1 else [])
    if not differences:
        changed = _software_differences(profile.software, facts.software)
        if not changed:
            return _Match("exact", "the same device and software")
        return _Match("same-silicon", f"the same device; {', '.join(changed)}", float(len(changed)))
    tier: Tier = "same-sku" if made.sku == here.sku and not _is_other_class(made, here, world) else "nearest"
    return _Match(tier, ", ".join(differences), _log_distance(made, here))


def tier_of(profile: Profile, facts: HardwareFacts, world: int = 1) -> tuple[Tier | None, str]:
    """Return the tier in which a measured profile serves a machine, and what differs; None where it cannot at all."""
    match = _match(profile, facts, world)
    return match.tier, match.why


def mismatch(profile: Profile, facts: HardwareFacts) -> str:
    """Return why a measured profile cannot serve this machine at all; empty where it can, in whatever tier."""
    return _mismatch(profile.fingerprint, Fingerprint.of(facts))


def _mismatch(made: Fingerprint, here: Fingerprint) -> str:
    for what, theirs, ours in (
        ("vendor", made.vendor, here.vendor),
        ("arch", made.arch, here.arch),
        ("MIG profile", made.mig or "none (the whole card)", here.mig or "none (the whole card)"),
    ):
        if theirs != ours:
            return f"made for {what} {theirs}, and this device's is {ours}"
    return ""


def _silicon_differences(made: Fingerprint, here: Fingerprint) -> list[str]:
    """Return the differences between the two devices, in words; a CPU is also its flags, cores and threads."""
    # A container's memory is not the processor's.
    names = ["sku", "device_name", "sm_count", "threads"] if made.vendor == "cpu" else ["sku", "sm_count", "l2_mib"]
    differences = [_differs(name, made, here) for name in names if getattr(made, name) != getattr(here, name)]
    if made.vendor == "cpu":
        if set(made.isa) != set(here.isa):
            changed = sorted(set(made.isa) ^ set(here.isa))
            differences.append(f"instruction sets differ in {', '.join(changed)}")
        return differences
    if made.vgpu != here.vgpu:
        differences.append(f"vgpu {made.vgpu or 'none'} there, {here.vgpu or 'none'} here")
    if abs(made.memory_mib - here.memory_mib) > _MEMORY_TOLERANCE * max(made.memory_mib, here.memory_mib):
        differences.append(_differs("memory_mib", made, here))
    if None not in (made.power_limit_w, here.power_limit_w) and made.power_limit_w != here.power_limit_w:
        differences.append(_differs("power_limit_w", made, here))
    return differences


def _ring_differences(made: Fingerprint, here: Fingerprint) -> list[str]:
    differences = []
    if made.device_count != here.device_count:
        differences.append(_differs("device_count", made, here))
    if made.link and here.link and made.link != here.link:  # empty: not known
        differences.append(_differs("link", made, here))
    return differences


def _is_other_class(made: Fingerprint, here: Fingerprint, world: int) -> bool:
    """Tell whether two devices of one name are too unlike for more than ``nearest``."""
    if world > 1 and _ring_differences(made, here):
        return True
    if made.vendor == "cpu":
        return made.sm_count != here.sm_count or set(made.isa) != set(here.isa)
    return made.sm_count != here.sm_count


def _differs(name: str, made: Fingerprint, here: Fingerprint) -> str:
    return f"{name} {getattr(made, name)} there, {getattr(here, name)} here"


def _software_differences(made: Iterable[tuple[str, str]], here: Iterable[tuple[str, str]]) -> list[str]:
    """Return versions that differ; the driver's counts only where both sides could read it."""
    theirs, ours = dict(made), dict(here)
    if not ("driver" in theirs and "driver" in ours):
        theirs.pop("driver", None)
        ours.pop("driver", None)
    return [
        f"{name} {theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} here"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]


def _log_distance(made: Fingerprint, here: Fingerprint) -> float:
    pairs = [(getattr(made, name), getattr(here, name)) for name in ("sm_count", "memory_mib", "l2_mib")]
    return math.hypot(*(math.log2(theirs / ours) for theirs, ours in pairs if theirs > 0 and ours > 0))


# --- heuristics -------------------------------------------------------------------------------------------------


def _heuristic(located: Sequence[Located], facts: HardwareFacts, bound: Located | None, trace: list[str]) -> Located:
    """Return the heuristic of the first origin that has one for this device; of several, that for the fewest."""
    fitting: list[Located] = []
    for entry in located:
        if entry.profile.source != "heuristic":
            continue
        mismatch = _heuristic_mismatch(entry.profile.fingerprint, facts)
        if mismatch:
            trace.append(TraceLine.at(entry, f"not taken, {mismatch}"))
        else:
            fitting.append(entry)
    if not fitting:
        trace.append(f"{BUILT_IN}: taken for what no plan covers; no heuristic file is for {facts.vendor} {facts.arch}")
        return Located(BUILT_IN, built_in_heuristic(facts.vendor), "built-in")
    origins = [entry.origin for entry in fitting]
    best = min(
        fitting,
        key=lambda entry: (entry is not bound, origins.index(entry.origin), *_generality(entry.profile.fingerprint)),
    )
    for entry in fitting:
        verdict = "taken for what no plan covers" if entry is best else f"not taken, {best.path} comes first"
        trace.append(TraceLine.at(entry, f"{verdict}; tier heuristic"))
    return best


def _heuristic_mismatch(made: Fingerprint, facts: HardwareFacts) -> str:
    here = Fingerprint.of(facts)
    if made.vendor != here.vendor:
        return f"made for vendor {made.vendor}, and this device's is {here.vendor}"
    low, high = arch_range(made.arch)
    if made.arch and not (made.arch == here.arch or low <= _sm(here.arch) <= high):
        return f"made for arch {made.arch}, and this device's is {here.arch}"
    for name in ("sku", "mig"):
        wanted = getattr(made, name)
        if wanted and wanted != getattr(here, name):
            return f"made for {name} {wanted}, and this device's is {getattr(here, name) or 'none'}"
    if missing := [flag for flag in made.isa if flag not in here.isa]:
        return f"made for a CPU with {', '.join(missing)}, which this one lacks"
    return ""


def arch_range(arch: str) -> tuple[float, float]:
    """Return the first and last compute capability (times ten) of "sm_90", "sm_80-sm_89" or "sm_100+".

    Anything else is the empty range (1, 0): such an arch is itself and nothing more.
    """
    match = re.fullmatch(r"sm_(\d{2,4})(?:(\+)|-sm_(\d{2,4}))?", arch)
    if not match:
        return (1, 0)
    low = int(match[1])
    return (low, math.inf if match[2] else int(match[3] or low))


def _sm(arch: str) -> float:
    match = re.fullmatch(r"sm_(\d{2,4})", arch)
    return int(match[1]) if match else -1


def _generality(made: Fingerprint) -> tuple[float, int]:
    """Return a sort key for the devices a heuristic is meant for: its range of arch, then what else it asks for."""
    low, high = arch_range(made.arch)
    width = max(0.0, high - low) if made.arch else math.inf
    return width, -sum((bool(made.sku), bool(made.mig), len(made.isa)))


def built_in_heuristic(vendor: str) -> Profile:
    """Return the last resort, where no heuristic file fits: 16-bit inputs in fp32, on kernels that run everywhere."""
    kernels = ("math",) if vendor == "cpu" else ("efficient", "math")
    dtypes = (("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64"))
    return Profile(
        source="heuristic",
        fingerprint=Fingerprint(vendor),
        policy=Policy(dtypes, forward=kernels, backward=kernels, copy_from_rate=8),
        provenance=Provenance(notes=("built in",)),
    )
