"""Run with packages whose table has one entry more, ``prefetch``: follows it from the space to the table of plans.

``python new_tunable.py FOLDER`` writes a journal and a profile there.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from autotune.journal.store import Store
from autotune.journal.study.cell_study import SAMPLER, CellStudy
from autotune.journal.study.entry import Entry
from autotune.space.space import build_space, candidate_key, decode, encode, from_key, machine_of
from ringattn.errors import FieldError
from ringattn.hardware.facts import HardwareFacts
from ringattn.planning.heuristic import heuristic_tunables
from ringattn.planning.plan import rejection_reasons
from ringattn.planning.table import ModuleShape, build_table
from ringattn.profile.resolve import built_in_heuristic
from ringattn.profile.schema import Profile
from ringattn.profile.yaml_io import dump_profile, load_profile, save_profile
from ringattn.tunables import TABLE
from ringattn.workload import Pattern, Workload, describe

FACTS = HardwareFacts("cpu", "Invented", "invented", "x86_64", 4, 16384, 32, threads=4)
DENSE = Workload("train", True, 4096, 4, 64, "fp32")
DILATED = replace(DENSE, pattern=Pattern.of([1024, 2048], [1, 2]))

folder = Path(sys.argv[1])
policy = built_in_heuristic("cpu").policy
assert policy is not None
default = heuristic_tunables(DENSE, policy, FACTS)

# The space: its values, and a plan one step away.
space = build_space(DENSE, machine_of(FACTS), default, ("fp32",))
assert space.knobs["prefetch"] == ("off", "next")
assert TABLE["prefetch"].stage == "housekeeping"
(plan,) = (move.tunables for move in space.neighbours(default) if move.knob == "prefetch")
assert plan == replace(default, prefetch="next")  # type: ignore[call-arg]
assert encode(DENSE, plan)["prefetch"] == "next"

# Where it changes nothing, plans that differ in it are one candidate.
void = replace(heuristic_tunables(DILATED, policy, FACTS), prefetch="next")  # type: ignore[call-arg]
assert decode(DILATED, encode(DILATED, void)).prefetch == "off"  # type: ignore[attr-defined]
assert rejection_reasons(DILATED, void, FACTS) == ("prefetch next is for dense plans",)
assert rejection_reasons(DENSE, plan, FACTS) == ()

# The journal, written and read again.
assert from_key(candidate_key(plan)) == plan != from_key(candidate_key(default))
for _ in range(2):
    with Store(folder / "journal", identity="one") as store:
        study = CellStudy(store.study(DENSE), DENSE, space.knobs, store.sync)
        if not study.recalled:
            study.open(Entry(plan), SAMPLER)
        else:
            assert list(study.recalled) == [plan]

# The profile, written and read again; a plain value is not written, so that older files are what they were.
profile = Profile.single(FACTS, DENSE, plan)
save_profile(profile, folder / "profile.yaml")
assert load_profile(folder / "profile.yaml") == profile
assert "prefetch: next" in (folder / "profile.yaml").read_text()
assert "prefetch" not in dump_profile(Profile.single(FACTS, DENSE, default))

# The table of plans, and the text.
row = build_table(ModuleShape.of(DENSE), profile.plans, policy, FACTS).plan_at(4096, "fp32", True, 1)
assert row.runnable().tunables == plan
assert describe(plan) == f"{describe(default)} prefetch=next"
assert describe(plan) in str(row)

try:
    replace(default, prefetch="lazy")  # type: ignore[call-arg]
except FieldError as error:
    print(error)
