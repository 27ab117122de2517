"""``ringtune explain``: why this plan, for this workload, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .options import (
    POSITIVE,
    check_pattern,
    check_shape,
    device_option,
    json_option,
    pattern_options,
    profile_argument,
    shape_options,
)


@click.command(short_help="Explain the plan for one workload.")
@profile_argument
@click.option(
    "--mode",
    type=click.Choice(["train", "infer"]),
    default="train",
    show_default=True,
    help="With gradients or without.",
)
@click.option("--causal/--no-causal", default=True, show_default=True, help="Causal attention or full.")
@click.option("--seq-len", type=POSITIVE, metavar="N", default=8192, show_default=True, help="Sequence length.")
@shape_options(heads=8, head_dim=64)
@pattern_options
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32", "fp64"]),
    help="Input dtype.  [default: bf16 on a GPU, fp32 on a CPU]",
)
@device_option
@json_option
def explain(profile: Path | None, as_json: bool, **asked: Any) -> None:
    """Explain the plan for one workload: which profile, which row, and why not every other kernel.

    PROFILE is what this machine resolves unless given. The plan printed is
    the one that RingAttention would run.

    \b
        ringtune explain --seq-len 16384 --heads 16 --head-dim 128
        ringtune explain --segment-lengths 2048,4096 --dilation-rates 1,2 --mode infer
    """
    check_pattern(asked["segment_lengths"], asked["dilation_rates"])
    heads, kv_heads = asked["heads"], asked["kv_heads"] or asked["heads"]
    check_shape(heads, kv_heads)

    from ringattn.setup import set_up
    from ringattn.table import ModuleShape, build_table
    from ringattn.workload import Pattern

    from ..explain import explain_workload, explanation_summary
    from ..terminal import console, emit_json

    pattern = Pattern.of(asked["segment_lengths"], asked["dilation_rates"])
    shape = ModuleShape(heads, kv_heads, asked["head_dim"], asked["causal"], pattern)
    setup = set_up("auto" if profile is None else profile, asked["device"], shape)
    table = build_table(shape, setup.entries, setup.policy, setup.facts, strict=setup.named, place_of=setup.place_of)
    dtype = asked["dtype"] or ("fp32" if setup.facts.vendor == "cpu" else "bf16")
    workload = shape.workload(asked["seq_len"], dtype, asked["mode"] == "train", asked["batch_size"])
    explanation = explain_workload(workload, setup, table)
    if as_json:
        emit_json(explanation)
    else:
        console().print(explanation_summary(explanation))
