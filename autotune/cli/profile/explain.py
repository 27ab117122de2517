"""``ringtune explain``: explain the plan for one workload on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ..options import (
    causal_option,
    check_pattern,
    check_shape,
    device_option,
    dtype_option,
    json_option,
    launch_option,
    pattern_asked,
    pattern_options,
    profile_argument,
    ranks_asked,
    seq_len_option,
    shape_asked,
    shape_options,
    world_option,
)


@click.command(short_help="Explain the plan for one workload.")
@profile_argument
@click.option(
    "--mode",
    type=click.Choice(["train", "infer", "decode"]),
    default="train",
    show_default=True,
    help="With gradients, without, or one query over SEQ-LEN cached positions.",
)
@causal_option
@seq_len_option
@shape_options()
@pattern_options
@dtype_option("bf16", "fp16", "fp32", "fp64")
@launch_option
@device_option
@world_option
@json_option
def explain(profile: Path | None, as_json: bool, **asked: Any) -> None:
    """Explain the plan for one workload: which profile, which row, and why not every other kernel.

    PROFILE is what this machine resolves unless given. The plan printed is
    the one that RingAttention would run; of a PROFILE that was measured on
    another kind of machine, the one that it would run there. With several
    ranks the length is that of one rank.

    \b
        ringtune explain --seq-len 16384 --heads 16 --head-dim 128
        ringtune explain --segment-lengths 2048,4096 --dilation-rates 1,2 --mode infer
        ringtune explain --nproc 4 --seq-len 16384 --heads 32 --head-dim 128
    """
    check_pattern(asked)
    check_shape(asked["heads"], asked["kv_heads"])

    from autotune.probe.machine.ranks_environment import facts_of_ranks
    from autotune.report.explain import explain_workload, explanation_summary, facts_of, why_foreign
    from ringattn.hardware.facts import detect
    from ringattn.planning.module_setup import device_of, set_up_for
    from ringattn.planning.plan import Conditions
    from ringattn.planning.table import ModuleShape, build_table
    from ringattn.profile.yaml_io import load_profile

    from ..console import emit_json, print_answer

    target = device_of(asked["device"])
    facts, foreign = detect(target), ""
    if profile is not None:
        named = load_profile(profile)
        foreign = why_foreign(named, facts)
        facts = facts_of(named) if foreign else facts
    pattern = pattern_asked(asked)
    ranks = ranks_asked(asked["nproc"], facts)
    facts = facts if foreign else facts_of_ranks(facts, ranks, os.environ)
    seq_len, heads, kv_heads, head_dim = shape_asked(asked, facts.vendor)
    shape = ModuleShape(heads, kv_heads, head_dim, asked["causal"], pattern, world=ranks)
    setup = set_up_for(facts, "auto" if profile is None else profile, target, shape)
    table = build_table(
        shape,
        setup.entries,
        setup.policy,
        setup.facts,
        conditions=Conditions(layout=shape.layout("auto", setup.entries, setup.facts) if ranks > 1 else ""),
        launch=asked["launch"],
        strict=setup.named and not foreign,
        place_of=setup.place_of,
    )
    dtype = asked["dtype"] or ("fp32" if setup.facts.vendor == "cpu" else "bf16")
    train, decode = asked["mode"] == "train", asked["mode"] == "decode"
    workload = shape.workload(seq_len, dtype, train, asked["batch_size"], decode=decode)
    explanation = explain_workload(workload, setup, table, foreign)
    if as_json:
        emit_json(explanation)
    else:
        print_answer(explanation_summary(explanation))
