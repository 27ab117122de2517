"""``ringtune probe``: measure this machine and write its profile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.exit_codes import ExitCode

from ..options import (
    SHAPE,
    DtypeChoice,
    budget_option,
    check_alone,
    check_pattern,
    check_shape,
    check_writable,
    device_option,
    effort_option,
    json_option,
    launch_option,
    like_option,
    mebibytes,
    model_option,
    nproc_option,
    number_of,
    pattern_options,
    positive_number,
    seed_option,
    seq_lens_option,
    shape_options,
)
from ..store.options import (
    check_if_missing,
    check_store_writable,
    if_missing_option,
    if_stale_option,
    store_option,
    wait_option,
    written_store,
)

if TYPE_CHECKING:
    from ringattn.workload import Mode

_NAME_A_SHAPE = ("seq_lens", "batch_size", "documents", "heads", "kv_heads", "head_dim")  # whose pattern is said, too
# The rows are those of the profile, of which --mode may choose.
_NOT_WITH_ADDED = (SHAPE - {"modes"}) | {"like", "layout", "dry_run", "if_missing", "if_stale"}
MODES: dict[str, tuple[Mode, ...]] = {
    "train": ("train",),
    "infer": ("infer",),
    "both": ("train", "infer"),
    "decode": ("decode",),
    "all": ("train", "infer", "decode"),
}


@click.command(short_help="Measure this machine and write its profile.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write.  [default: the user's profile folder, named after the machine]",
)
@effort_option(
    "standard", "How long to search: quick 55 s, standard 170 s, full 1800 s; only full tries the kernels' tile shapes."
)
@budget_option
@click.option(
    "--mode",
    "modes",
    type=click.Choice(list(MODES)),
    default="both",
    show_default=True,
    callback=lambda ctx, param, value: MODES[value],
    help="With gradients, without, or both; decode is a query of each sequence over SEQ-LEN cached positions, for 1, 8 "
    "and 64 sequences where --batch-size names no number.",
)
@model_option
@like_option
@click.option(
    "--add-kernel",
    "add_kernels",
    metavar="NAME",
    multiple=True,
    help="Measure plans with this kernel against those of the profile there is, and nothing else; repeatable.",
)
@click.option("--causal/--no-causal", default=None, help="Causal attention or full.  [default: what the grid says]")
@seq_lens_option("A length to measure", "the grid")
@shape_options(of_grid=True)
@click.option(
    "--documents",
    type=number_of("batch"),
    metavar="N",
    help="Measure N documents of uneven lengths packed into --seq-len tokens, as cu_seqlens gives them.",
)
@pattern_options
@click.option(
    "--dense",
    is_flag=True,
    help="Dense attention alone, without the grid's dilated pattern: so it is where a length, heads, a head dimension, "
    "a batch size or documents are named and no --segment-lengths.",
)
@click.option(
    "--precision",
    type=DtypeChoice(["auto", "bf16", "fp16", "tf32", "fp32"]),
    default="auto",
    show_default=True,
    help="Dtype to compute in; auto measures all that pass the error bound, for inputs in the dtype of --model or the "
    "device's usual one.",
)
@click.option(
    "--max-error", type=positive_number, metavar="RATIO", help="Largest relative error against float64 to accept."
)
@click.option("--varied-lengths", is_flag=True, help="Lengths vary from call to call: let first-call cost count.")
@click.option(
    "--memory-limit",
    "memory_limit_mib",
    type=mebibytes,
    metavar="MIB",
    help="Workspace a plan may use, in MiB; 24GiB works too.",
)
@click.option(
    "--prefer",
    type=click.Choice(["time", "memory", "balanced"]),
    default="time",
    show_default=True,
    help="Which end of the time/memory front to choose.",
)
@launch_option
@seed_option("Fixes order, inputs, sampling.")
@click.option(
    "--sampler",
    metavar="NAME",
    default="auto",
    show_default=True,
    help="Optuna sampler that proposes plans: auto, tpe, gp, random, grid, or package.module:Class.",
)
@click.option(
    "--storage",
    metavar="URL",
    help="Where Optuna's studies go, which probes of identical nodes share cell by cell: "
    "postgresql://USER@HOST/DATABASE, grpc://HOST:PORT of Optuna's proxy, FILE.journal in a shared folder.  "
    "[default: PROFILE.journal]",
)
@device_option
@nproc_option
@click.option(
    "--layout",
    type=click.Choice(["auto", "contiguous", "zigzag"]),
    default="auto",
    show_default=True,
    help="How a sequence lies over several ranks; auto as RingAttention's own.",
)
@click.option(
    "--resume/--fresh",
    default=True,
    show_default=True,
    help="Go on from an interrupted probe, and measure what the profile lacks; or delete the studies, also where they "
    "cannot be read, and measure every cell. Rows stay until others take their place.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check the request as a probe does, print the cells, the space and the estimate; measure nothing.",
)
@store_option
@if_missing_option
@if_stale_option
@wait_option
@json_option
def probe(
    as_json: bool,
    nproc: str | None,
    model: Path | None,
    like: Path | None,
    stores: tuple[str, ...],
    if_missing: bool,
    if_stale: bool,
    wait_s: float | None,
    **options: Any,
) -> None:
    """Measure attention on this machine and write its hardware profile.

    With no options it covers a sensible grid: several lengths, training and
    inference, dense causal attention and a LongNet pattern. A shape that is
    named is dense unless --segment-lengths and --dilation-rates are given.
    Ctrl-C loses nothing: the same command goes on where it stopped.

    \b
        ringtune probe
        ringtune probe --effort quick --output this-machine.yaml
        ringtune probe --model path/to/config.json
        ringtune probe --like missed.jsonl
        ringtune probe --seq-len 8192 --heads 32 --kv-heads 8 --head-dim 128 --causal
        ringtune probe --nproc gpu
        torchrun --standalone --nproc-per-node 4 -m autotune probe
        ringtune probe --if-missing --wait --store /shared/ringtune
        ringtune probe --add-kernel flash-attn-4

    With --store the profile is also put into that store. With --if-missing
    nothing is measured where a store has a profile of this kind of machine.

    With several ranks lengths are those of one rank.

    Exit code 6 says that the profile was written and some cells could not be
    measured: such a cell keeps its earlier row, else its default, and has no
    row where not even that could be checked. It is said which and why, with
    the command that measures them. 7 says that none could be measured and
    nothing was written; a profile that is there stays. torchrun makes 1 and a
    traceback of its own of any code but 0; started by it, a probe that wrote
    its profile ends with 0. Where the code matters, use --nproc.

    With --storage probes of identical nodes share one search; see the page
    "Search on many nodes at once" of the documentation.

    Beside the profile stays PROFILE.journal, with which an interrupted probe
    goes on, and PROFILE.journal.writer, which keeps two probes from writing
    one. While no probe runs both may be deleted; the trials of an interrupted
    one are lost then.
    """
    if like is not None:
        check_alone("--like", SHAPE)
    if options["add_kernels"]:
        check_alone("--add-kernel", _NOT_WITH_ADDED)
    if model is None:
        check_shape(options["heads"], options["kv_heads"])
    check_pattern(options)
    check_if_missing(if_missing or if_stale, wait_s, options)
    if options["dense"] and options["segment_lengths"] is not None:
        raise click.UsageError("--dense and --segment-lengths ask for different attention; give one of them")
    if options["output"] is not None:
        check_writable(options["output"])

    from autotune.distributed.launcher import started_by_torchrun
    from autotune.probe.machine.ranks_environment import follow_rank_0, is_follower, ranks_of
    from autotune.probe.request import ProbeRequest
    from autotune.probe.tuning import run_probe

    from .once import push_measured
    from .probe_result import print_result, same_command
    from .progress import probe_observer

    ranks = ranks_of(nproc, options["device"])
    if ranks == 1 and options["layout"] != "auto":
        raise click.UsageError("--layout is for a sequence over several ranks; give --nproc, too, or use torchrun")
    if is_follower():
        if not options["dry_run"]:
            follow_rank_0()
        return
    if options["segment_lengths"] is None and any(options[name] for name in _NAME_A_SHAPE):
        options["dense"] = True
    notes = _shape_from_files(model, like, options)
    request = ProbeRequest(ranks=ranks, **options)
    if if_missing or if_stale:
        from .once_command import probe_if_missing

        probe_if_missing(request, stores, if_stale, wait_s, notes, as_json)
        return
    store = written_store(stores) if stores and not request.dry_run else None
    if store is not None:
        check_store_writable(store)
    with probe_observer() as observer:
        if ranks > 1 and not request.dry_run:
            observer.note(f"starting {ranks} ranks and measuring the links between them")
        for note in notes:
            observer.note(note)
        result = run_probe(request, observer)
    if store is not None and result.profile_path is not None:
        push_measured(store, result.profile_path)
    print_result(result, as_json, options["device"], ranks, same_command())
    if result.inconclusive and not started_by_torchrun(os.environ):
        raise click.exceptions.Exit(ExitCode.INCONCLUSIVE)


def _shape_from_files(model: Path | None, like: Path | None, options: dict[str, Any]) -> tuple[str, ...]:
    """Set the options that a model's config or a record decides, and return what to say of it."""
    if model is not None:
        from autotune.probe.workloads.model_config import read_model

        given = {name: options[name] for name in ("heads", "kv_heads", "head_dim", "causal")}
        shape = read_model(model, **given, needs_length=not options["seq_lens"])
        options |= {name: getattr(shape, name) for name in (*given, "longest", "input_dtype")}
        options["dense"] = options["segment_lengths"] is None
        return shape.notes
    if like is not None:
        from autotune.probe.workloads.recorded import read_workloads

        options["recorded"], notes = read_workloads(like)
        return notes
    return ()
