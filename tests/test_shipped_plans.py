"""The plan of every shipped profile and family of devices for 500 workloads, held against a recorded table.

A change of this table is a change of what users run: ``python tests/test_shipped_plans.py`` records it anew, and the
commit says why.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autotune.report.explain import facts_of
from ringattn.errors import InputError, PlanError
from ringattn.hardware.facts import HardwareFacts
from ringattn.planning.module_setup import set_up_for
from ringattn.planning.plan import Conditions
from ringattn.planning.table import ModuleShape, build_table
from ringattn.profile.locations import shipped_folder
from ringattn.profile.schema import Profile
from ringattn.profile.yaml_io import load_profile
from ringattn.workload import Pattern

TABLE = Path(__file__).parent / "data" / "shipped-plans.txt.gz"
SHAPES, CALLS = 25, 20
PATTERNS = (
    (None, None),
    ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16]),
    ([1024, 5792, 32768], [1, 2, 4]),
    ([512, 1024, 2048], [1, 2, 4]),
    ([256], [3]),
)
MEASURED = sorted(path.name for path in shipped_folder().glob("nvidia-*.yaml"))
FAMILIES = {
    "sm_60": HardwareFacts("nvidia", "Tesla P100-PCIE-16GB", "p100-pcie", "sm_60", 56, 16384, 4),
    "sm_61": HardwareFacts("nvidia", "Tesla P40", "p40", "sm_61", 30, 24576, 3),
    "sm_75": HardwareFacts("nvidia", "Tesla T4", "t4", "sm_75", 40, 15360, 4, packages=("triton",)),
    "sm_80": HardwareFacts("nvidia", "NVIDIA A100", "a100", "sm_80", 108, 81920, 40, packages=("triton",)),
    "sm_90": HardwareFacts("nvidia", "NVIDIA H100", "h100", "sm_90", 132, 81559, 50, packages=("triton",)),
    "sm_100": HardwareFacts("nvidia", "NVIDIA B200", "b200", "sm_100", 148, 182000, 126, packages=("triton",)),
    "cpu-bf16": HardwareFacts("cpu", "EPYC", "epyc", "x86_64", 8, 32000, 32, isa=("avx512_bf16", "avx512f"), threads=8),
    "cpu": HardwareFacts("cpu", "Core", "core", "x86_64", 4, 16000, 8, isa=("avx2",), threads=4),
}


def plans_of(name: str) -> Iterator[str]:
    """One line for each of 500 workloads: what is asked, and the plan or why there is none."""
    draw = random.Random(name)
    profile: Profile | None = load_profile(shipped_folder() / name) if name in MEASURED else None
    facts = FAMILIES[name] if profile is None else facts_of(profile)
    worlds = (1, 1, 2, 4) if profile is None else (facts.device_count,) * 3 + (1, 2, 4)
    for _ in range(SHAPES):
        shape = _shape(draw, profile, draw.choice(worlds))
        wanted = draw.choice((None, None, "time", "memory", "balanced"))
        try:
            setup = set_up_for(facts, profile, torch.device("cpu"), shape)
            layout = shape.layout("auto", setup.entries, facts) if shape.world > 1 else ""
            table = build_table(
                shape,
                setup.entries,
                setup.policy,
                facts,
                conditions=Conditions(draw.random() < 0.1, layout),
                auto_dtype=draw.random() < 0.2,
                prefer=wanted,
            )
        except (PlanError, InputError) as error:
            yield f"{shape}: {error}"
            continue
        for _ in range(CALLS):
            length = int(2 ** draw.uniform(5, 19)) if draw.random() < 0.5 else 2 ** draw.randrange(6, 20)
            dtype, train = draw.choice(("bf16", "bf16", "fp16", "fp32", "fp64")), draw.random() < 0.6
            if setup.entries and draw.random() < 0.6:
                asked = draw.choice(setup.entries).workload
                length, dtype, train = int(asked.seq_len * 2 ** draw.uniform(-0.7, 0.7)), asked.dtype, asked.train
            row = table.plan_at(length, dtype, train, draw.choice((1, 1, 2, 8)))
            plan = f"{row.plan} {row.plan.fused}" if row.plan else f"{row.origin} refused: {row.refusal}"
            yield f"{shape.world} {shape.heads}/{shape.kv_heads}x{shape.head_dim} {length} {dtype} {train}: {plan}"


def _shape(draw: random.Random, profile: Profile | None, world: int) -> ModuleShape:
    """The shape of a module: half of the time one that the profile has rows for, with its own or other heads."""
    if profile is not None and draw.random() < 0.6:
        workload = draw.choice(profile.plans).workload
        heads = draw.choice((workload.heads, workload.heads, 8, 32))
        kv_heads = draw.choice((workload.kv_heads, heads)) if heads == workload.heads else heads
        return ModuleShape(heads, kv_heads, workload.head_dim, workload.causal, workload.pattern, world=workload.world)
    heads = draw.choice((8, 16, 32))
    segments, rates = draw.choice(PATTERNS)
    pattern = Pattern.of(segments, rates, draw.choice(("interleaved", "blocked")))
    head_dim = draw.choice((40, 64, 80, 96, 128, 192, 256))
    longest = draw.choice((None, None, 1 << 17))
    return ModuleShape(heads, draw.choice((heads, 8)), head_dim, draw.random() < 0.6, pattern, longest, world)


def _recorded() -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    for line in gzip.decompress(TABLE.read_bytes()).decode().splitlines():
        if line.startswith("# "):
            lines = sections.setdefault(line[2:], [])
        else:
            lines.append(line)
    return sections


@pytest.mark.parametrize("name", [*MEASURED, *FAMILIES])
def test_plans_are_those_recorded(name: str) -> None:
    assert [line.replace("\n", " ") for line in plans_of(name)] == _recorded()[name]


def test_the_table_is_of_what_ships() -> None:
    assert sorted(_recorded()) == sorted([*MEASURED, *FAMILIES])


if __name__ == "__main__":
    made = [
        f"# {name}\n" + "".join(line.replace("\n", " ") + "\n" for line in plans_of(name))
        for name in [*MEASURED, *FAMILIES]
    ]
    TABLE.write_bytes(gzip.compress("".join(made).encode(), mtime=0))
