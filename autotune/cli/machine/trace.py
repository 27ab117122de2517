"""``ringtune trace``: show where the time of a step goes."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..options import (
    Integer,
    causal_option,
    check_pattern,
    check_shape,
    check_writable,
    device_option,
    dtype_option,
    json_option,
    pattern_asked,
    pattern_options,
    profile_argument,
    seq_len_option,
    shape_asked,
    shape_options,
    train_or_infer_option,
)

_MOST_STEPS = 1000  # of which torch's profiler keeps every event


@click.command(short_help="Show where the time of a step goes.")
@profile_argument
@train_or_infer_option
@causal_option
@seq_len_option
@shape_options()
@pattern_options
@dtype_option("bf16", "fp16", "fp32", "fp64")
@click.option(
    "--steps",
    type=Integer(min=1, max=_MOST_STEPS),
    metavar="N",
    default=5,
    show_default=True,
    help="Steps to trace, after three to warm up.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write a trace for chrome://tracing or Perfetto, as JSON.",
)
@device_option
@json_option
def trace(profile: Path | None, as_json: bool, output: Path | None, **asked: Any) -> None:
    """Show where the time of a step goes: gather, kernels, merge, messages, waits.

    The step is one call of RingAttention, and with --mode train its backward,
    by the plan of PROFILE, which is what this machine resolves unless given.
    Under torchrun its ranks hold one sequence, --seq-len each, and rank 0
    prints what its own time went into.

    \b
        ringtune trace --seq-len 2048 --segment-lengths 512,2048 --dilation-rates 1,2
        torchrun --nproc-per-node 4 -m autotune trace --seq-len 16384 --heads 32
    """
    check_pattern(asked)
    check_shape(asked["heads"], asked["kv_heads"])
    if output is not None:
        check_writable(output)

    from autotune.distributed.launcher import torchrun_rank
    from autotune.measure.evaluator import told
    from autotune.report.trace import device_and_group, trace_summary, trace_workload
    from ringattn.workload import Workload

    from ..console import emit_json, print_answer, warn

    launched = torchrun_rank(os.environ)
    first = launched is None or launched.rank == 0
    with device_and_group(launched, asked["device"]) as (device, group):
        shape = shape_asked(asked, device.type)
        workload = Workload(
            asked["mode"],
            asked["causal"],
            shape.seq_len,
            shape.heads,
            shape.head_dim,
            asked["dtype"] or ("fp32" if device.type == "cpu" else "bf16"),
            shape.kv_heads,
            asked["batch_size"],
            pattern_asked(asked),
            world=1 if launched is None else launched.world,
        )
        found = trace_workload(
            workload,
            profile="auto" if profile is None else str(profile),
            device=device,
            steps=asked["steps"],
            chrome=output if first else None,
            group=group,
        )
    if not first:
        return
    if as_json:
        emit_json(asdict(found) | {"interference": [str(each) for each in found.interference]})
    else:
        print_answer(trace_summary(found))
    if disturbed := told(found.interference):
        warn(disturbed)
