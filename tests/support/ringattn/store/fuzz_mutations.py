"""Mutations of profiles and of names: what no ringtune wrote, reproducible from a number."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

from machine_samples import EVIDENCE

from ringattn.hardware.facts import HardwareFacts
from ringattn.kernels.registry import KERNELS
from ringattn.profile.plain_data import to_plain
from ringattn.profile.schema import Choice, Failure, Fingerprint, LinkSpeed, PlanEntry, Profile, Provenance
from ringattn.profile.strict_yaml import write_yaml
from ringattn.profile.yaml_io import checksum_of
from ringattn.tunables import TABLE
from ringattn.workload import INPUT_DTYPES, BranchTunables, Pattern, Tunables, Workload

NUMBERS = (0, 1, 2, 3, 4, 7, 8, 16, 31, 64, 100, 1024, 4096, 2**20, 2**31, 2**40, 2**63 - 1, 2**63, 2**64, 10**30, -1)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1e-300, 1e15, 1e300, float("inf"), float("nan"), -1.5)
TEXTS = (
    "", " ", "math", "..", "../../../etc/passwd", "/etc/passwd", "a\0b", "\n", "\x1b[2J", "\u202e", "\ud800", "é" * 50,
    "x" * 5000, "null", "~", "1", "1.0", "yes", "!!python/object/apply:os.system ['true']", "{{7*7}}", "%s%n", "$(id)",
    "__import__('os').system('true')", "sm_90", "sm_", "sm_999999999999", "cpu", "nvidia", "dense", "2026-02-30",
)  # fmt: skip
PARTS = ("..", ".", "", "/", "~", "profiles", "leases", "beacons", "a", "x1-" + "0" * 64 + ".yaml", "nul\0l", "\n", "é")


def base_profile(facts: HardwareFacts) -> Profile:
    """A profile of this machine whose rows run on a few tokens, with something in every part."""
    patterns = (Pattern(), Pattern.of([16, 32], [1, 2]), Pattern.of([32], [3], "blocked"))
    rows = []
    for number, pattern in enumerate(patterns):
        mode = "infer" if number == 1 else "train"
        rows.append(_row(Workload(mode, number != 1, 48, 4, 8, "fp32", kv_heads=2, pattern=pattern)))  # type: ignore[arg-type]
    rows.append(_row(Workload("infer", True, 40, 2, 16, "bf16"), "bf16"))
    ring = Tunables("fp32", (BranchTunables("math", "math"),), schedule="ring", layout="zigzag")
    rows.append(PlanEntry(Workload("train", True, 16, 2, 8, "fp32", world=4), Choice(ring, EVIDENCE)))
    rows.append(PlanEntry(Workload("train", True, 2**30, 2, 8, "fp32"), refusal="nothing fits"))
    made = Fingerprint.of(facts)
    speeds = (LinkSpeed(4, 1, 10.0, 20.0),)
    return Profile(
        "measured",
        Fingerprint(**{name: getattr(made, name) for name in Fingerprint.__slots__ if name != "link_speeds"},
                    link_speeds=speeds),
        facts.software,
        plans=tuple(rows),
        provenance=Provenance("0.1.0", "2026-11-27", "standard", 900.0, 812.5, 0, ("clocks not locked",)),
    )  # fmt: skip


def _row(workload: Workload, dtype: str = "fp32") -> PlanEntry:
    train = workload.mode == "train"
    rates = [branch.rate for branch in workload.pattern.resolved(workload.seq_len)]

    def plan(kernel: str, gather: str = "view", **changes: Any) -> Choice:
        branches = tuple(BranchTunables(kernel, kernel if train else "", gather if r > 1 else "view") for r in rates)
        return Choice(Tunables(dtype, branches, **changes), EVIDENCE)

    chosen = plan("flash-cpu", "copy", pool_threshold_mib=1)
    return PlanEntry(
        workload,
        chosen,
        runners_up=(plan("math"),),
        front=(chosen, plan("math")),
        default=plan("math"),
        failures=(Failure("math/math", "oom", "needs 3 GiB"),),
    )


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [found for key, value in items for found in ((*path, key), *_places(value, (*path, key)))]


def _value(random: Random, old: Any) -> Any:
    words = [*INPUT_DTYPES, *KERNELS, *(str(v) for entry in TABLE.values() for v in entry.allowed)]
    if random.random() < 0.5:  # of the same type: what is more likely to be taken
        if isinstance(old, bool):
            return not old
        if isinstance(old, int):
            return random.choice((old + 1, old - 1, old * 2, old // 2, random.choice(NUMBERS)))
        if isinstance(old, float):
            return random.choice((old * 2, old / 3, random.choice(FLOATS)))
        if isinstance(old, str):
            return random.choice(words)
        if isinstance(old, list) and old:
            return random.choice((old[::-1], old * 2, old[:-1], [old[0]], []))
    return random.choice(
        (random.choice(NUMBERS), random.choice(FLOATS), random.choice(TEXTS), random.choice(words), None, True, [], {},
         [random.choice(NUMBERS)] * 3, {random.choice(TEXTS): random.choice(NUMBERS)})
    )  # fmt: skip


def mutated_plain(random: Random, base: dict[str, Any]) -> dict[str, Any]:
    """YAML data of a profile in which one to four values are others, gone, doubled or in another's place."""
    plain = copy.deepcopy(base)
    for _ in range(random.choice((0, 1, 1, 1, 2, 4))):
        places = _places(plain)
        path = random.choice(places)
        parent: Any = plain
        for step in path[:-1]:
            parent = parent[step]
        how, key = random.random(), path[-1]
        if how < 0.1:
            del parent[key]
        elif how < 0.2 and isinstance(parent, dict):
            parent[random.choice(TEXTS)] = _value(random, None)
        elif how < 0.3:
            source: Any = plain
            for step in random.choice(places):
                source = source[step]
            parent[key] = copy.deepcopy(source)
        else:
            parent[key] = _value(random, parent[key])
    return plain


def as_text(random: Random, plain: dict[str, Any]) -> bytes:
    """A file of such data with a checksum that fits, as JSON, which is YAML, or as ringtune writes it."""
    content = {key: value for key, value in plain.items() if key != "checksum"}
    try:
        content["checksum"] = checksum_of(content)
    except ValueError:  # NaN has no canonical JSON
        content["checksum"] = "sha256:0"
    if random.random() < 0.9:
        return json.dumps(content).encode()
    try:
        return write_yaml(content).encode("utf-8", "surrogatepass")
    except ValueError:
        return b""


def mutated_bytes(random: Random, content: bytes) -> bytes:
    """A file with bytes changed, removed, inserted or cut off."""
    made = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(len(made) + 1)
        how = random.randrange(4)
        if how == 0:
            made[at : at + 1] = bytes([random.randrange(256)])
        elif how == 1:
            del made[at : at + random.choice((1, 3, 40))]
        elif how == 2:
            made[at:at] = random.choice(
                (b"\n", b"- ", b"{", b"[" * 50, b"&a ", b"*a", b"!!x ", b"\xff", b"? ", b"\t", b"'", b"0" * 400)
            )
        else:
            del made[at:]
    return bytes(made)


def name(random: Random) -> str:
    """A name that may be asked for in a store: some could be there, most lead elsewhere."""
    if random.random() < 0.1:
        return "".join(chr(random.randrange(1, 0x300)) for _ in range(random.randrange(12)))
    return random.choice(("", "/", "//")) + "/".join(random.choice(PARTS) for _ in range(random.randrange(1, 6)))


def base_plain(facts: HardwareFacts) -> dict[str, Any]:
    return to_plain(base_profile(facts))
